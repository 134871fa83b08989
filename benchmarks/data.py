"""Throughput of the data loader, compared with other loaders.

Makes parquet shards of the shape of timbrooks/instructpix2pix-clip-filtered (512x512 JPEG of
quality 100, row groups of 1000 rows, 400 MB) from photographs, and measures pairs per second of
256x256 batches of 16 on one and two threads, alternating between the methods in several rounds:

    python -m benchmarks.data

The same with tiny shards, in seconds:

    python -m benchmarks.data --rows_per_shard 64 --rounds 1 --seconds 0.3 --warm_up_pairs 16 \\
        --output quick.json

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
from PIL import Image, ImageEnhance
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from tqdm import tqdm

from benchmarks.harness import describe_machine, in_turn, run_benchmark, write_row
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


@dataclass(frozen=True)
class Config:
    shards_dir: str = ""  # shards are written to it if it has none; "": a temporary directory
    rows_per_shard: int = 1000  # of each of two shards, in one row group
    rounds: Annotated[int, AtLeast(1)] = 5  # each measures every method once
    seconds: float = 10.0  # least time of a measurement
    warm_up_pairs: int = 2000  # pairs before a measurement
    output: str = "benchmarks/results/data.json"


def make_pair(photographs, row):
    """A random crop and a brighter one, as a row of SCHEMA; no other row has its edit_prompt."""
    rng = np.random.default_rng([0, row])
    photograph = photographs[rng.integers(len(photographs))]
    side = int(min(photograph.size) * rng.uniform(0.6, 1))
    left, top = (int(rng.integers(n - side + 1)) for n in photograph.size)
    box = (left, top, left + side, top + side)
    original = photograph.resize((SIZE, SIZE), Image.Resampling.LANCZOS, box=box)

    cells = []
    for image in (original, ImageEnhance.Brightness(original).enhance(1.3)):
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=100)  # with Pillow's 4:2:0, as the public dataset's
        cells.append({"bytes": buffer.getvalue(), "path": f"{row}.jpg"})
    return dict(zip(COLUMNS, (*cells, f"make photograph {row} brighter")))


def make_shards(folder, rows_per_shard):
    """Write two shards of real photographs, one for each of two workers; returns their paths."""
    make = partial(make_pair, load_photographs(PHOTOGRAPHS))
    folder.mkdir(parents=True, exist_ok=True)
    for shard in tqdm(range(2), desc="shards"):
        numbers = range(shard * rows_per_shard, (shard + 1) * rows_per_shard)
        with ThreadPoolExecutor() as pool:
            table = pa.Table.from_pylist(list(pool.map(make, numbers)), schema=SCHEMA)
        file = folder / f"train-{shard:05d}-of-00002.parquet"
        pq.write_table(table, file, row_group_size=rows_per_shard)
    return sorted(folder.glob("*.parquet"))


# ---------------------------------------------------------------------------- methods
# Each yields batches without end: dicts with edit_prompt, original_pixel_values and
# edited_pixel_values. Ours are uint8 (B, R, R, 3), as sent to the device; the others are float32
# (B, 3, R, R) in [-1, 1], as Hugging Face's trainer makes them on the host.


def ours(shards, num_threads, resample="dct"):
    """The loader with its default arguments, except for the measured ones."""
    dataset = ParquetImagePairs(
        str(shards[0].parent),
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


def hugging_face(shards, num_threads):
    """Hugging Face datasets, streaming as its documentation shows: shuffle buffer, then map."""
    rows = datasets.load_dataset(
        "parquet", data_files=list(map(str, shards)), split="train", streaming=True
    )
    rows = rows.select_columns(list(COLUMNS))
    for column in COLUMNS[:2]:
        rows = rows.cast_column(column, datasets.Image())
    rows = rows.shuffle(seed=0, buffer_size=1000, max_buffer_input_shards=1)
    rows = rows.map(
        transform_examples, batched=True, batch_size=BATCH_SIZE, remove_columns=list(COLUMNS)
    )
    return load_in_workers(rows, num_threads)


class PillowRows(IterableDataset):
    """Rows read by pyarrow and decoded by Pillow, one by one in the order of the shards."""

    def __init__(self, shards):
        self.shards = shards

    def __iter__(self):
        worker = get_worker_info()
        mine = self.shards if worker is None else self.shards[worker.id :: worker.num_workers]
        for shard in mine:
            for rows in pq.ParquetFile(shard).iter_batches(BATCH_SIZE, columns=list(COLUMNS)):
                for row in rows.to_pylist():
                    images = [Image.open(io.BytesIO(row[name]["bytes"])) for name in COLUMNS[:2]]
                    pixels = [x[0] for x in trainer_transform(images[:1], images[1:])]
                    yield {"edit_prompt": row["edit_prompt"], **dict(zip(PIXELS, pixels))}


def torch_rows(shards, num_threads):
    """Batches of PyTorch's DataLoader."""
    return load_in_workers(PillowRows(shards), num_threads)


def load_in_workers(rows, num_threads):
    """Batches through DataLoader: in this process for one thread, else in num_threads workers."""
    num_workers = 0 if num_threads == 1 else num_threads
    loader = DataLoader(rows, batch_size=BATCH_SIZE, num_workers=num_workers)
    while True:
        yield from loader


METHODS = {
    "ours": ours,
    "ours_lanczos": partial(ours, resample="lanczos"),
    "datasets": hugging_face,
    "torch": torch_rows,
}


# ---------------------------------------------------------------------------- measuring


def pairs_per_second(stream, seconds, warm_up_pairs):
    """Pairs per second of a stream for at least `seconds`, after `warm_up_pairs`."""
    for _ in range(0, warm_up_pairs + 1, BATCH_SIZE):
        next(stream)
    start, num_pairs = time.perf_counter(), 0
    while num_pairs == 0 or time.perf_counter() - start < seconds:
        num_pairs += len(next(stream)["edit_prompt"])
    return num_pairs / (time.perf_counter() - start)


def run(config):
    """Make the shards, measure, write."""
    machine = describe_machine(["numpy", "pyarrow", "simplejpeg", "pillow", "torch"])
    names = [name for name in METHODS if name != "datasets" or datasets]
    results = {name: {threads: [] for threads in (1, 2)} for name in names}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(config.shards_dir or f"{temporary}/shards")
        shards = sorted(folder.glob("*.parquet")) or make_shards(folder, config.rows_per_shard)
        for name in in_turn(names, config.rounds):
            for threads, speeds in results[name].items():
                torch.set_num_threads(threads)
                with contextlib.closing(METHODS[name](shards, threads)) as stream:
                    speeds.append(pairs_per_second(stream, config.seconds, config.warm_up_pairs))
    for name, rounds in results.items():
        summary = {
            threads: {
                "pairs_per_second": float(np.median(speeds)),
                "to_ours": float(np.median(np.divide(speeds, results["ours"][threads]))),
            }
            for threads, speeds in rounds.items()
        }
        row = {"summary": summary, "rounds": rounds}
        write_row(f"method {name}", row, machine, config.output)
    if datasets is None:
        print("`datasets` was not measured: pip install datasets")


def main(args=None):
    """Command line."""
    run_benchmark(Config, run, __doc__, args)


if __name__ == "__main__":
    main()
