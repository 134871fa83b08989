"""Aspect ratio buckets: the sizes of batches, and the size of each pair. A size is (width, height).

Source: NovelAI's aspect ratio bucketing; SDXL (arXiv 2307.01952), section 2.3.
"""

import math
import os
import re
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
from tqdm import tqdm

from diffusers_flax.data.images import encoded_size
from diffusers_flax.data.shards import Cells, RowGroup, image_at, latents_metadata, read_columns
from diffusers_flax.data.streaming import is_remote
from diffusers_flax.loading.files import save_whole

MAX_STEP = 64  # pixels; sides of buckets are multiples of it, at low resolutions of less
MAX_BUCKET_ASPECT = 2  # of the default sizes: the longer side to the shorter
BUCKETS = "--aspect_ratio_buckets"
SIZE = "size"  # column of shards of latents of several sizes: index in the list of sizes
SIZES_DIR = ".image_sizes"  # subdirectory of a directory of shards, see stored_sizes
SIZE_READERS = 4  # threads at most; each holds the images of a row group
FOOTER_BYTES = 1 << 16  # at the end of a shard, for its checksum


def bucket_sizes(resolution: int, texts: tuple[str, ...] | None) -> tuple[tuple[int, int], ...]:
    """The sizes of --aspect_ratio_buckets, from the tallest to the widest.

    Sides are multiples of 64, at low resolutions of a smaller power of two. By default, every
    multiple is a shorter side. Its longer side is the largest with at most resolution² pixels, up
    to an aspect ratio of MAX_BUCKET_ASPECT. Sizes are upright and lying.

    Args:
        resolution: --resolution.
        texts: sizes as WIDTHxHEIGHT; (): the default sizes; None: only the square.

    Raises:
        ValueError: a text is not WIDTHxHEIGHT, or a side is not a multiple of the step.
    """
    if texts is None:
        return ((resolution, resolution),)
    step = min(MAX_STEP, 1 << max(0, (resolution // 4).bit_length() - 1))
    if not texts:
        check_side(f"--resolution {resolution}", resolution, step)
        shorts = range(step, resolution + 1, step)
        sides = [(short, resolution**2 // short // step * step) for short in shorts]
        sides = [(short, long) for short, long in sides if long <= MAX_BUCKET_ASPECT * short]
        return tuple(sorted({*sides, *((long, short) for short, long in sides)}))
    sizes = []
    for text in texts:
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
        if not match:
            raise ValueError(f"{BUCKETS} {text} is no size; write WIDTHxHEIGHT, such as 640x384")
        width, height = map(int, match.groups())
        for side in (width, height):
            check_side(f"{BUCKETS} {text}: {side}", side, step)
        sizes.append((width, height))
    return tuple(sorted(set(sizes), key=lambda size: size[0] / size[1]))


def check_side(named: str, side: int, step: int) -> None:
    """Raise a ValueError unless a side is a multiple of step; named: its beginning."""
    if side % step:
        below = side // step * step
        near = " or ".join(str(n) for n in (below, below + step) if n)
        raise ValueError(f"{named} is not a multiple of {step}; try {near}")


def size_name(size: tuple[int, int]) -> str:
    """WIDTHxHEIGHT."""
    return f"{size[0]}x{size[1]}"


def nearest_sizes(image_sizes: np.ndarray, sizes: tuple[tuple[int, int], ...]) -> np.ndarray:
    """Index of the size with the nearest aspect ratio, by its logarithm, for each image.

    Args:
        image_sizes: integers (N, 2), width and height; (0, 0), unknown, counts as a square.
        sizes: to choose from.
    """
    logs = np.log(np.maximum(image_sizes, 1))
    aspects = logs[:, 0] - logs[:, 1]
    return np.abs(aspects[:, None] - [math.log(w / h) for w, h in sizes]).argmin(axis=1)


def choose_sizes(
    image_sizes: list[np.ndarray], sizes: tuple[tuple[int, int], ...], batch_size: int
) -> tuple[tuple[tuple[int, int], ...], list[np.ndarray], np.ndarray]:
    """Choose the sizes with at least a batch of pairs, and each pair's nearest size.

    The size with the fewest pairs is left out first; its pairs go to the nearest remaining size.

    Args:
        image_sizes: per directory, the sizes of its rows, see nearest_sizes.
        sizes: to choose from.
        batch_size: pairs of a size that every directory needs.

    Returns:
        (sizes, size_of, counts): the remaining sizes; per directory, the index of each row's size;
        rows of each size, (directories, sizes).
    """
    while True:
        size_of = [nearest_sizes(of_directory, sizes) for of_directory in image_sizes]
        counts = np.array([np.bincount(rows, minlength=len(sizes)) for rows in size_of])
        too_few = np.flatnonzero(counts.min(axis=0) < batch_size)
        if len(sizes) == 1 or not len(too_few):
            return sizes, size_of, counts
        left_out = too_few[counts.sum(axis=0)[too_few].argmin()]
        sizes = sizes[:left_out] + sizes[left_out + 1 :]


def stored_sizes(groups: list[RowGroup], num_threads: int) -> np.ndarray:
    """Width and height of every row's original image, upright, from the files' headers.

    The first call reads a column of all shards and saves the sizes of each shard in SIZES_DIR, if
    that is writable. The size of latents is the size that their images were scaled to.

    Args:
        groups: row groups of images or of latents, in the order of their shards.
        num_threads: threads to read shards with, up to SIZE_READERS.

    Returns:
        Integers (N, 2); (0, 0) without an image or a readable header.

    Raises:
        ValueError: a shard is damaged.
    """
    if latents := latents_metadata(groups[0].metadata):
        if "sizes" not in latents:
            num_rows = sum(group.num_rows for group in groups)
            return np.full((num_rows, 2), latents["resolution"])
        sizes = np.flip(latents["sizes"], axis=1)  # heights and widths
        indices = [read_columns(g, [SIZE])[SIZE].to_numpy()[: g.num_rows] for g in groups]
        return sizes[np.concatenate(indices)]
    if is_remote(groups[0].path):
        raise ValueError(
            f"{BUCKETS} reads all images of {groups[0].path.parent} before training; download them "
            "with script.py and script.sh first"
        )
    shards = list({group.path: group for group in groups}.values())
    with ThreadPoolExecutor(min(num_threads, SIZE_READERS)) as threads:
        sizes = threads.map(sizes_of_shard, shards)
        bar = tqdm(sizes, "image sizes", len(shards), unit="shard", delay=1)
        sizes_of = {shard.path: sizes for shard, sizes in zip(shards, bar)}
    return np.concatenate(
        [sizes_of[g.path][g.first_row : g.first_row + g.num_rows] for g in groups]
    )


def sizes_of_shard(shard: RowGroup) -> np.ndarray:
    """Saved stored_sizes of a shard, or else those of its images; shard: any of its row groups."""
    (column, *_), path = shard.columns, shard.path
    file = path.parent / SIZES_DIR / f"{path.name}.{column}.{end_checksum(path)}.npy"
    with suppress(OSError):
        return np.load(file)
    sizes = []
    for index in range(shard.metadata.num_row_groups):
        group = shard._replace(index=index)
        cells = Cells(group, read_columns(group, [column]))
        for position in range(len(cells.table)):
            try:
                sizes.append(encoded_size(image_at(cells, column, position)))
            except Exception:  # null, or damaged data, which make decoders raise anything
                sizes.append((0, 0))
    sizes = np.array(sizes, np.int32).reshape(-1, 2)

    def save(unfinished):
        with open(unfinished, "wb") as opened:
            np.save(opened, sizes)

    with suppress(OSError):  # the directory cannot be written
        save_whole(file, save, shared=True)
    return sizes


def end_checksum(path: Path) -> str:
    """CRC-32 of the end of a shard, where parquet keeps the statistics of all columns."""
    with path.open("rb") as file:
        file.seek(-min(FOOTER_BYTES, path.stat().st_size), os.SEEK_END)
        return f"{zlib.crc32(file.read()):08x}"
