"""Throughput of the data loader, compared with an upper bound and with other loaders.

Makes parquet shards of the shape of timbrooks/instructpix2pix-clip-filtered (512x512 JPEG of
quality 100, row groups of 1000 rows, 400 MB) from photographs, and measures pairs per second of
256x256 batches of 16 on one and two threads, alternating between the methods in several rounds:

    python -m benchmarks.data --output data.json

The same with tiny shards, in seconds:

    python -m benchmarks.data --rows_per_shard 64 --epoch_rows 256 --rounds 1 \\
        --slice_seconds 0.3 --warm_up_pairs 0 --output quick.json

What batches of several sizes cost, with other shards, whose images have five aspect ratios:

    python -m benchmarks.data --aspect_ratios --output data.json

Methods:
    ours              ParquetImagePairs; also with resample="lanczos"
    ceiling           decode_pair in a bare loop over encoded images that are in memory
    datasets          Hugging Face datasets, streaming, with its PyTorch trainer's transforms
    torch             DataLoader over pyarrow and Pillow, with the same transforms
    squares, buckets  with --aspect_ratios: ParquetImagePairs, without and with sizes

Writes all figures to --output and prints them. Needs two CPU cores, 16 GB of memory and 1 GB of
disk (Linux); about 20 minutes. The method `datasets` needs `pip install datasets` and is left out
without it.
"""

import contextlib
import io
import itertools
import multiprocessing
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image, ImageEnhance, ImageFilter
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from tqdm import tqdm

from benchmarks.rows import check_counts, describe_machine, run_benchmark, write_rows
from demo.photographs import load_photographs
from diffusers_flax.data.buckets import bucket_sizes
from diffusers_flax.data.decoding import decode_pair
from diffusers_flax.data.options import Reading, Transform
from diffusers_flax.data.shards import Pair, list_row_groups, pair_at, read_row_group, shard_files
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

ASPECT_RATIOS = (9 / 16, 3 / 4, 1, 4 / 3, 16 / 9)  # width to height, equally often

OURS = ("ours", "ours_lanczos", "squares", "buckets")  # methods with a shuffle buffer to fill
RATIOS = (("ours", "ceiling"), ("ours", "datasets"), ("buckets", "squares"))


@dataclass(frozen=True)
class Config:
    shards_dir: str = ""  # shards are written to it if it has none; "": a temporary directory
    num_shards: int = 2  # shards to write
    rows_per_shard: int = 1000  # in one row group
    epoch_rows: int = 24000  # least rows of an epoch, which reads links to the shards
    rounds: int = 5  # each measures every method once
    slice_seconds: float = 3.0  # least time of a measurement
    warm_up_pairs: int = 6000  # pairs of ours before the measurement: its shuffle buffer and more
    memory_epochs: int = 3  # epochs of the memory measurement; 0: none
    output: str = "benchmarks/results/data.json"
    # measure batches of several sizes instead, with images of ASPECT_RATIOS
    aspect_ratios: bool = False


# ---------------------------------------------------------------------------- shards


def make_pair(photographs: list[Image.Image], row: int, aspects=(1,)) -> dict:
    """A random crop and an edit of it, as a row of SCHEMA; no other row has its edit_prompt.

    All images have about as many pixels, and an aspect ratio of aspects.
    """
    rng = np.random.default_rng([0, row])
    photograph = photographs[rng.integers(len(photographs))]
    root = aspects[row % len(aspects)] ** 0.5
    side = int(min(photograph.width / root, photograph.height * root) * rng.uniform(0.6, 1))
    box_size = int(side * root), int(side / root)
    left, top = (int(rng.integers(n - m + 1)) for n, m in zip(photograph.size, box_size))
    box = (left, top, left + box_size[0], top + box_size[1])
    size = round(SIZE * root), round(SIZE / root)
    original = photograph.resize(size, Image.Resampling.LANCZOS, box=box)
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


def make_shards(folder: Path, num_shards: int, rows_per_shard: int, aspects=(1,)) -> None:
    """Write shards of real photographs to a new directory, which appears when it is complete."""
    make = partial(make_pair, load_photographs(PHOTOGRAPHS), aspects=aspects)
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}")
    unfinished.mkdir(parents=True)
    with (
        ThreadPoolExecutor() as pool,
        tqdm(total=num_shards * rows_per_shard, desc="shards", unit="row", disable=None) as bar,
    ):
        for shard in range(num_shards):
            rows = []
            numbers = range(shard * rows_per_shard, (shard + 1) * rows_per_shard)
            for row in pool.map(make, numbers):
                rows.append(row)
                bar.update()
            name = f"train-{shard:05d}-of-{num_shards:05d}.parquet"
            pq.write_table(
                pa.Table.from_pylist(rows, schema=SCHEMA),
                unfinished / name,
                row_group_size=rows_per_shard,
            )
    unfinished.rename(folder)  # save_whole would replace a directory with the user's other files


def link_shards(shards: list[Path], folder: Path, num_rows: int) -> list[Path]:
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


def read_pairs(folder: Path) -> list[Pair]:
    """All rows of a directory; this also brings its shards into the page cache."""
    pairs = []
    for group in list_row_groups(str(folder)):
        cells = read_row_group(group)
        pairs += [pair_at(cells, position) for position in range(group.num_rows)]
    return pairs


# ---------------------------------------------------------------------------- methods
# Each yields batches without end: dicts with edit_prompt, original_pixel_values and
# edited_pixel_values. Ours are uint8 (B, R, R, 3), as sent to the device; the others are float32
# (B, 3, R, R) in [-1, 1], as Hugging Face's trainer makes them on the host.


def ours(folder: Path, num_threads: int, resample: str, sizes=None) -> Iterator[dict]:
    """The loader with its default arguments, except for the measured ones."""
    dataset = ParquetImagePairs(
        str(folder),
        batch_size=BATCH_SIZE,
        transform=Transform(RESOLUTION, sizes, resample=resample),
        reading=Reading(num_threads=num_threads),
    )
    while True:
        yield from dataset


def ceiling(pairs: list[Pair], num_threads: int, resample: str) -> Iterator[dict]:
    """An upper bound: decode the same images and flip half of them, nothing else.

    Independent threads decode into the same batch again and again and wait for each other after
    every 16 batches, whose prompts are yielded together, without images.
    """
    original, edited = np.empty((2, BATCH_SIZE, RESOLUTION, RESOLUTION, 3), np.uint8)

    def decode(share: list[tuple[int, Pair]]) -> None:
        for number, pair in share:
            place = number % BATCH_SIZE
            out = original[place], edited[place]
            decode_pair(pair, out, COLUMNS, resample, 0.5, number % 4 < 2)

    firsts = range(0, len(pairs), 16 * BATCH_SIZE)
    with ThreadPoolExecutor(num_threads) as pool:
        for first in itertools.cycle(firsts):
            numbered = list(enumerate(pairs[first : first + 16 * BATCH_SIZE]))
            if num_threads == 1:
                decode(numbered)
            else:
                list(pool.map(decode, [numbered[t::num_threads] for t in range(num_threads)]))
            yield {"edit_prompt": [pair.instruction for _, pair in numbered]}


def trainer_transform(originals: list[Image.Image], edits: list[Image.Image]) -> tuple:
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


def transform_examples(examples: dict) -> dict:
    """A batch of decoded rows for `datasets`."""
    pixels = trainer_transform(examples["original_image"], examples["edited_image"])
    return {"edit_prompt": examples["edit_prompt"], **dict(zip(PIXELS, pixels))}


def hugging_face(links: list[Path], num_threads: int) -> Iterator[dict]:
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

    def __init__(self, links: list[Path]):
        self.links = links

    def __iter__(self) -> Iterator[dict]:
        worker = get_worker_info()
        mine = self.links if worker is None else self.links[worker.id :: worker.num_workers]
        for link in mine:
            for rows in pq.ParquetFile(link).iter_batches(BATCH_SIZE, columns=list(COLUMNS)):
                for row in rows.to_pylist():
                    images = [Image.open(io.BytesIO(row[name]["bytes"])) for name in COLUMNS[:2]]
                    pixels = [x[0] for x in trainer_transform(images[:1], images[1:])]
                    yield {"edit_prompt": row["edit_prompt"], **dict(zip(PIXELS, pixels))}


def torch_rows(links: list[Path], num_threads: int) -> Iterator[dict]:
    """Batches of PyTorch's DataLoader."""
    return load_in_workers(PillowRows(links), num_threads)


def load_in_workers(rows: IterableDataset, num_threads: int) -> Iterator[dict]:
    """Batches through DataLoader: in this process for one thread, else in num_threads workers."""
    loader = DataLoader(
        rows, batch_size=BATCH_SIZE, num_workers=0 if num_threads == 1 else num_threads
    )
    while True:
        yield from loader


# ---------------------------------------------------------------------------- measuring


def cpu_seconds() -> float:
    """Processor time so far of all threads of this process and of its child processes."""
    ticks = 0
    for child in multiprocessing.active_children():  # this also collects ended children
        fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])  # user and system
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    running = ticks / os.sysconf("SC_CLK_TCK")
    return time.process_time() + running + ended.ru_utime + ended.ru_stime


def measure_stream(
    stream: Iterator[dict], rows_at_once: int, seconds: float, warm_up_pairs: int = 0
) -> dict:
    """Pairs per second and per CPU second of a stream, in its steady state.

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
    start, start_cpu = time.perf_counter(), cpu_seconds()
    num_pairs = until = 0
    while num_pairs == 0 or time.perf_counter() - start < seconds:
        until += rows_at_once
        while num_pairs < until:
            num_pairs += len(next(stream)["edit_prompt"])
    wall, cpu = time.perf_counter() - start, cpu_seconds() - start_cpu
    return {
        "pairs": num_pairs,
        "seconds": wall,
        "cpu_seconds": cpu,
        "pairs_per_second": num_pairs / wall,
        "pairs_per_cpu_second": num_pairs / cpu,
    }


def measure_memory(folder: Path, num_parts: int, epochs: int) -> dict:
    """Resident memory that passes of the loader take, MB; to be called in a fresh process."""

    def resident(field: str) -> float:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024 / 1e6
        raise AssertionError(f"/proc/self/status has no {field}")

    before = resident("VmRSS")
    dataset = ParquetImagePairs(str(folder), batch_size=BATCH_SIZE, num_parts=num_parts)
    after_epochs = []
    for _ in range(epochs):
        for _ in dataset:
            pass
        after_epochs.append(resident("VmRSS") - before)
    return {
        "num_parts": dataset.num_parts,
        "peak_increase_mb": resident("VmHWM") - before,
        "increase_after_epochs_mb": after_epochs,
    }


def median_and_range(values: list[float]) -> dict:
    """Median, least and largest."""
    return {"median": float(np.median(values)), "min": min(values), "max": max(values)}


def summarize_rounds(rounds: list[dict]) -> tuple[dict, dict]:
    """Medians and spreads over the rounds of each method's figures, and of ratios of methods.

    Args:
        rounds: of each, {method: {threads: what `measure_stream` returned, or None}}.

    Returns:
        methods: {method: {threads: {figure: spread}}}, None for a method that was left out.
        ratios: {"a/b": {threads: {figure: spread}}}, likewise, of the ratios within each round.
    """
    figures = ("pairs_per_second", "pairs_per_cpu_second")
    methods, ratios = {}, {}
    for name in rounds[0]:
        methods[name] = rounds[0][name] and {
            threads: {f: median_and_range([r[name][threads][f] for r in rounds]) for f in figures}
            for threads in rounds[0][name]
        }
    for a, b in RATIOS:
        if a not in methods or b not in methods:
            continue
        ratios[f"{a}/{b}"] = methods[b] and {
            threads: {
                f: median_and_range([r[a][threads][f] / r[b][threads][f] for r in rounds])
                for f in figures
            }
            for threads in methods[b]
        }
    return methods, ratios


def run_rounds(
    config: Config,
    streams: dict[str, Callable[[int], Iterator[dict]] | None],
    rows_at_once: int,
) -> list[dict]:
    """Measure every method with every number of threads, once per round.

    Args:
        config: with the number of rounds and the length of a measurement.
        streams: method -> (threads -> its stream); None: it is left out.
        rows_at_once: see `measure_stream`.

    Returns:
        Of each round {method: {threads: figures}}, with None for what is left out.
    """
    names = [name for name, stream in streams.items() if stream]
    total = config.rounds * len(THREADS) * len(names)
    results = []
    with tqdm(total=total, desc="measuring", unit="slice", disable=None) as bar:
        for number in range(config.rounds):
            results.append({name: stream and {} for name, stream in streams.items()})
            shift = number % len(names)  # no method always comes after the same other, warm or hot
            for threads in THREADS:
                torch.set_num_threads(threads)
                for name in names[shift:] + names[:shift]:
                    bar.set_postfix_str(f"{name}, {threads}")
                    warm_up_pairs = config.warm_up_pairs if name in OURS else 0
                    lengths = (rows_at_once, config.slice_seconds, warm_up_pairs)
                    with contextlib.closing(streams[name](threads)) as stream:
                        results[-1][name][str(threads)] = measure_stream(stream, *lengths)
                    bar.update()
    return results


def streams_of(
    config: Config, links: list[Path], pairs: list[Pair]
) -> dict[str, Callable[[int], Iterator[dict]] | None]:
    """The methods to measure, see run_rounds; arguments: of link_shards and read_pairs."""
    folder = links[0].parent
    if config.aspect_ratios:
        sizes = bucket_sizes(RESOLUTION, ())
        return {
            "squares": lambda threads: ours(folder, threads, "dct"),
            "buckets": lambda threads: ours(folder, threads, "dct", sizes),
        }
    return {
        "ceiling": lambda threads: ceiling(pairs, threads, "dct"),
        "ours": lambda threads: ours(folder, threads, "dct"),
        "ceiling_lanczos": lambda threads: ceiling(pairs, threads, "lanczos"),
        "ours_lanczos": lambda threads: ours(folder, threads, "lanczos"),
        "datasets": datasets and (lambda threads: hugging_face(links, threads)),
        "torch": lambda threads: torch_rows(links, threads),
    }


def bench(config: Config) -> tuple[dict, dict]:
    """Make the shards, measure everything; the results.

    Raises:
        ValueError: a bad argument, bad shards, or an output of another command.
    """
    check_counts(
        config,
        num_shards=2,  # one for each of two worker processes
        rows_per_shard=BATCH_SIZE,
        epoch_rows=2 * BATCH_SIZE,
        rounds=1,
        slice_seconds=0,
        warm_up_pairs=0,
        memory_epochs=0,
    )
    packages = ["numpy", "pyarrow", "simplejpeg", "pillow", "torch"]
    machine = describe_machine(packages + (["datasets"] if datasets else []))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(config.shards_dir or f"{temporary}/shards")
        if not shard_files(folder):
            aspects = ASPECT_RATIOS if config.aspect_ratios else (1,)
            make_shards(folder, config.num_shards, config.rows_per_shard, aspects)
        shards = shard_files(folder)
        links = link_shards(shards, Path(temporary) / "links", config.epoch_rows)
        linked = links[0].parent
        pairs = read_pairs(folder)
        rows_at_once = list_row_groups(str(folder))[0].num_rows
        images = [image for pair in pairs for image in pair[:2]]
        data = {
            "shards": len(shards),
            "rows": len(pairs),
            "rows_per_row_group": rows_at_once,
            "shard_bytes": [shard.stat().st_size for shard in shards],
            "mean_image_bytes": sum(map(len, images)) / len(images),
            "links": len(links),
        }

        rounds = run_rounds(config, streams_of(config, links, pairs), rows_at_once)

        memory = []
        for num_parts in (1, 8) if config.memory_epochs and not config.aspect_ratios else ():
            # A new interpreter each: what another pass left behind is not to be counted.
            spawn = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(1, mp_context=spawn) as process:
                task = process.submit(measure_memory, linked, num_parts, config.memory_epochs)
                memory.append(task.result())

    methods, ratios = summarize_rounds(rounds)
    rows = {
        f"method {name}": {"summary": summary, "rounds": [of[name] for of in rounds], "data": data}
        for name, summary in methods.items()
    }
    rows |= {f"ratio {name}": {"summary": summary} for name, summary in ratios.items()}
    rows |= {f"memory num_parts={row['num_parts']}": row for row in memory}
    return rows, machine


def run(config: Config) -> None:
    """Measure, write."""
    rows, machine = bench(config)
    write_rows(rows, machine, config.output)
    if datasets is None and not config.aspect_ratios:
        print("`datasets` was not measured: pip install datasets")


def main(args=None):
    """Command line."""
    run_benchmark(Config, run, __doc__, args)


if __name__ == "__main__":
    main()
