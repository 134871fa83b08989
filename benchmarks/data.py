"""Throughput of the data loader, compared with other loaders.

Makes parquet shards of the shape of timbrooks/instructpix2pix-clip-filtered (512x512 JPEG of
quality 100, row groups of 1000 rows, 400 MB) from photographs, and measures pairs per second of
256x256 batches of 16 on one and two threads, alternating between the methods in several rounds:

    python -m benchmarks.data

The same with tiny shards, in seconds:

    python -m benchmarks.data --rows_per_shard 64 --epoch_rows 256 --rounds 1 \\
        --slice_seconds 0.3 --warm_up_pairs 0 --output quick.json

Methods:
    ours, ours_lanczos  ParquetImagePairs; with resample="lanczos"
    datasets            Hugging Face datasets, streaming, with its PyTorch trainer's transforms
    torch               DataLoader over pyarrow and Pillow, with the same transforms

Rows go to benchmarks/results/data.json. Needs two CPU cores, 16 GB of memory and 1 GB of disk
(Linux); about 20 minutes. The method `datasets` needs `pip install datasets` and is left out
without it.
"""

import contextlib
import io
import itertools
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image, ImageEnhance, ImageFilter
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from tqdm import tqdm

from benchmarks.harness import describe_machine, run_benchmark, write_row
from demo.photographs import load_photographs
from diffusers_flax.command_line import AtLeast
from diffusers_flax.data.options import Reading, Transform
from diffusers_flax.data.writing import SCHEMA
from parquet_processing import ParquetImagePairs

try:
    import datasets
except ImportError:
    datasets = None

SIZE = 512  # side of the stored images, pixels
RESOLUTION = 256  # side of the batches' images
BATCH_SIZE = 16
THREADS = (1, 2)
COLUMNS = ("original_image", "edited_image", "edit_prompt")
PIXELS = ("original_pixel_values", "edited_pixel_values")

# Detailed photographs that ship with these packages: their crops take as many bytes as the public
# dataset's images, 205 kB, and decoding time is proportional to the bytes.
PHOTOGRAPHS = (
    "skimage/data/astronaut.png",
    "skimage/data/chelsea.png",
    "skimage/data/coffee.png",
    "skimage/data/gravel.png",
    "skimage/data/hubble_deep_field.jpg",
    "skimage/data/ihc.png",
    "skimage/data/motorcycle_left.png",
    "skimage/data/motorcycle_right.png",
    "skimage/data/retina.jpg",
    "sklearn/datasets/images/china.jpg",
    "sklearn/datasets/images/flower.jpg",
)

EDITS = {  # name in the prompt: function
    "sharper": lambda image: image.filter(ImageFilter.UnsharpMask(1, 60)),
    "richer in contrast": lambda image: ImageEnhance.Contrast(image).enhance(1.3),
    "brighter": lambda image: ImageEnhance.Brightness(image).enhance(1.3),
    "warmer": lambda image: Image.fromarray(np.uint8(np.asarray(image) * (1.0, 0.85, 0.7))),
    "softer": lambda image: image.filter(ImageFilter.GaussianBlur(0.7)),
}


@dataclass(frozen=True)
class Config:
    shards_dir: str = ""  # shards are written to it if it has none; "": a temporary directory
    num_shards: Annotated[int, AtLeast(2)] = 2  # to write; one for each of two workers
    rows_per_shard: int = 1000  # in one row group
    epoch_rows: int = 24000  # least rows of an epoch, which reads links to the shards
    rounds: Annotated[int, AtLeast(1)] = 5  # each measures every method once
    slice_seconds: float = 3.0  # least time of a measurement
    warm_up_pairs: int = 6000  # pairs of ours before the measurement: its shuffle buffer and more
    output: str = "benchmarks/results/data.json"


# ---------------------------------------------------------------------------- shards


def make_pair(photographs, row):
    """A random crop and an edit of it, as a row of SCHEMA; no other row has its edit_prompt."""
    rng = np.random.default_rng([0, row])
    photograph = photographs[rng.integers(len(photographs))]
    side = int(min(photograph.size) * rng.uniform(0.6, 1))
    left, top = (int(rng.integers(n - side + 1)) for n in photograph.size)
    box = (left, top, left + side, top + side)
    original = photograph.resize((SIZE, SIZE), Image.Resampling.LANCZOS, box=box)
    edit = list(EDITS)[rng.integers(len(EDITS))]

    cells = []
    for name, image in (("original", original), ("edited", EDITS[edit](original))):
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=100)  # with Pillow's 4:2:0, as the public dataset's
        cells.append({"bytes": buffer.getvalue(), "path": f"{row}_{name}.jpg"})
    return {
        "original_prompt": f"photograph {row}",
        "original_image": cells[0],
        "edit_prompt": f"make photograph {row} {edit}",
        "edited_prompt": f"photograph {row}, {edit}",
        "edited_image": cells[1],
    }


def make_shards(folder, num_shards, rows_per_shard):
    """Write shards of real photographs to a directory."""
    make = partial(make_pair, load_photographs(PHOTOGRAPHS))
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor() as pool:
        for shard in tqdm(range(num_shards), desc="shards", disable=None):
            numbers = range(shard * rows_per_shard, (shard + 1) * rows_per_shard)
            table = pa.Table.from_pylist(list(pool.map(make, numbers)), schema=SCHEMA)
            file = folder / f"train-{shard:05d}-of-{num_shards:05d}.parquet"
            pq.write_table(table, file, row_group_size=rows_per_shard)


def link_shards(shards, folder, num_rows):
    """Fill a directory with links to shards until it has num_rows rows.

    No epoch ends during a measurement, and row groups are read as in training. All methods read
    from the page cache.
    """
    folder.mkdir()
    links = []
    for shard in itertools.cycle(shards):
        links.append(folder / f"{len(links):05d}.parquet")
        links[-1].symlink_to(shard.resolve())
        num_rows -= pq.read_metadata(shard).num_rows
        if num_rows <= 0:
            return links


# ---------------------------------------------------------------------------- methods
# Each yields batches without end: dicts with edit_prompt, original_pixel_values and
# edited_pixel_values. Ours are uint8 (B, R, R, 3), as sent to the device; the others are float32
# (B, 3, R, R) in [-1, 1], as Hugging Face's trainer makes them on the host.


def ours(links, num_threads, resample="dct"):
    """The loader with its default arguments, except for the measured ones."""
    dataset = ParquetImagePairs(
        str(links[0].parent),
        batch_size=BATCH_SIZE,
        transform=Transform(RESOLUTION, resample=resample),
        reading=Reading(num_threads=num_threads),
    )
    while True:
        yield from dataset


def trainer_transform(originals, edits):
    """The transforms of diffusers' train_instruct_pix2pix.py: two float32 (B, 3, R, R).

    Its random crop has the size of the scaled images and so does nothing; its flip is one draw for
    all images of a call. Neither needs torchvision.
    """
    pixels = [
        np.array(image.convert("RGB").resize((RESOLUTION, RESOLUTION))).transpose(2, 0, 1)
        for image in (*originals, *edits)
    ]
    pixels = 2 * (torch.tensor(np.concatenate(pixels)) / 255) - 1  # (2 * B * 3, R, R)
    if torch.rand(()) < 0.5:
        pixels = pixels.flip(-1)
    return tuple(pixels.reshape(2, -1, 3, RESOLUTION, RESOLUTION))


def transform_examples(examples):
    """A batch of decoded rows for `datasets`."""
    pixels = trainer_transform(examples["original_image"], examples["edited_image"])
    return {"edit_prompt": examples["edit_prompt"], **dict(zip(PIXELS, pixels))}


def hugging_face(links, num_threads):
    """Hugging Face datasets, streaming as its documentation shows: shuffle buffer, then map."""
    rows = datasets.load_dataset(
        "parquet", data_files=[str(link) for link in links], split="train", streaming=True
    )
    rows = rows.select_columns(list(COLUMNS))
    for column in COLUMNS[:2]:
        rows = rows.cast_column(column, datasets.Image())
    # One shard at a time instead of the default ten: ten of these row groups take 10 GB in every
    # process and are read together every 10,000 pairs, longer than a measurement.
    rows = rows.shuffle(seed=0, buffer_size=1000, max_buffer_input_shards=1)
    rows = rows.map(
        transform_examples, batched=True, batch_size=BATCH_SIZE, remove_columns=list(COLUMNS)
    )
    return load_in_workers(rows, num_threads)


class PillowRows(IterableDataset):
    """Rows read by pyarrow and decoded by Pillow, one by one in the order of the shards."""

    def __init__(self, links):
        self.links = links

    def __iter__(self):
        worker = get_worker_info()
        mine = self.links if worker is None else self.links[worker.id :: worker.num_workers]
        for link in mine:
            for rows in pq.ParquetFile(link).iter_batches(BATCH_SIZE, columns=list(COLUMNS)):
                for row in rows.to_pylist():
                    images = [Image.open(io.BytesIO(row[name]["bytes"])) for name in COLUMNS[:2]]
                    pixels = [x[0] for x in trainer_transform(images[:1], images[1:])]
                    yield {"edit_prompt": row["edit_prompt"], **dict(zip(PIXELS, pixels))}


def torch_rows(links, num_threads):
    """Batches of PyTorch's DataLoader."""
    return load_in_workers(PillowRows(links), num_threads)


def load_in_workers(rows, num_threads):
    """Batches through DataLoader: in this process for one thread, else in num_threads workers."""
    loader = DataLoader(
        rows, batch_size=BATCH_SIZE, num_workers=0 if num_threads == 1 else num_threads
    )
    while True:
        yield from loader


METHODS = {
    "ours": ours,
    "ours_lanczos": partial(ours, resample="lanczos"),
    "datasets": hugging_face,
    "torch": torch_rows,
}


# ---------------------------------------------------------------------------- measuring


def pairs_per_second(stream, rows_at_once, seconds, warm_up_pairs=0):
    """Pairs per second of a stream in its steady state.

    The clock starts after the first batch, `warm_up_pairs` more pairs and a third of `seconds`. By
    then shards are open, buffers are full and the first row groups of the epoch are read. The
    prefetched batches at the start and at the end of the measurement cancel out.

    Args:
        stream: batches without end.
        rows_at_once: pairs are measured in multiples of this, a row group, so that reading one is
            counted as often as decoding its rows.
        seconds: the clock runs for at least this long.
        warm_up_pairs: taken before it starts.
    """
    num_pairs = len(next(stream)["edit_prompt"])
    ready = time.perf_counter() + seconds / 3
    while time.perf_counter() < ready or num_pairs < warm_up_pairs:
        num_pairs += len(next(stream)["edit_prompt"])
    start = time.perf_counter()
    num_pairs = until = 0
    while num_pairs == 0 or time.perf_counter() - start < seconds:
        until += rows_at_once
        while num_pairs < until:
            num_pairs += len(next(stream)["edit_prompt"])
    return num_pairs / (time.perf_counter() - start)


def measure_rounds(config, links, rows_at_once):
    """{method: {threads: [pairs per second of each round]}}, every method once per round."""
    names = [name for name in METHODS if name != "datasets" or datasets]
    results = {name: {str(threads): [] for threads in THREADS} for name in names}
    for number in tqdm(range(config.rounds), desc="measuring", unit="round", disable=None):
        shift = number % len(names)  # no method always comes after the same other, warm or hot
        for threads in THREADS:
            torch.set_num_threads(threads)
            for name in names[shift:] + names[:shift]:
                warm_up = config.warm_up_pairs if name.startswith("ours") else 0
                with contextlib.closing(METHODS[name](links, threads)) as stream:
                    speed = pairs_per_second(stream, rows_at_once, config.slice_seconds, warm_up)
                results[name][str(threads)].append(speed)
    return results


def summarize(rounds):
    """{threads: {"pairs_per_second": median and range}} of {threads: [figure of each round]}."""
    return {
        threads: {"pairs_per_second": {"median": float(np.median(x)), "min": min(x), "max": max(x)}}
        for threads, x in rounds.items()
    }


def run(config):
    """Make the shards, measure, write."""
    packages = ["numpy", "pyarrow", "simplejpeg", "pillow", "torch"]
    machine = describe_machine(packages + (["datasets"] if datasets else []))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(config.shards_dir or f"{temporary}/shards")
        if not list(folder.glob("*.parquet")):
            make_shards(folder, config.num_shards, config.rows_per_shard)
        shards = sorted(folder.glob("*.parquet"))
        links = link_shards(shards, Path(temporary) / "links", config.epoch_rows)
        rows_at_once = pq.read_metadata(shards[0]).row_group(0).num_rows
        results = measure_rounds(config, links, rows_at_once)
    for name, rounds in results.items():
        row = {"summary": summarize(rounds), "rounds": rounds}
        write_row(f"method {name}", row, machine, config.output)
    if datasets is None:
        print("`datasets` was not measured: pip install datasets")
        return
    ratios = {  # of each round
        threads: [ours / theirs for ours, theirs in zip(rounds, results["datasets"][threads])]
        for threads, rounds in results["ours"].items()
    }
    write_row("ratio ours/datasets", {"summary": summarize(ratios)}, machine, config.output)


def main(args=None):
    """Command line."""
    run_benchmark(Config, run, __doc__, args)


if __name__ == "__main__":
    main()
