"""The order of an epoch: which rows each process has in which batch, shuffled, and their size.

Sizes are (height, width). With several of them, every batch has the images of one size.

Source: NovelAI's aspect ratio bucketing and SDXL (arXiv 2307.01952), section 2.3, for the sizes.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from dataloading.options import Processes

# Parts of an epoch. A process holds a window of row groups in memory for each part that it reads.
# Fewer parts need less memory in one process; with many processes, more parts mean less reading.
DEFAULT_PARTS = 4
MAX_STEP = 64  # pixels; sides of buckets are multiples of it, at low resolutions of less
MAX_BUCKET_ASPECT = 2  # of the default sizes: the longer side to the shorter
BUCKETS = "--aspect_ratio_buckets"


def side_step(resolution: int) -> int:
    """What the sides of buckets are multiples of: 64, or a power of two of a quarter at most."""
    return min(MAX_STEP, 1 << max(0, (resolution // 4).bit_length() - 1))


def bucket_sizes(resolution: int, texts: tuple[str, ...] | None) -> tuple[tuple[int, int], ...]:
    """The sizes of --aspect_ratio_buckets, from the tallest to the widest.

    By default each shorter side, a multiple of `side_step`, has the longest side with which the
    image has at most resolution² pixels, up to an aspect ratio of MAX_BUCKET_ASPECT; all of them
    upright and lying.

    Args:
        resolution: --resolution.
        texts: sizes as WIDTHxHEIGHT; (): the default sizes; None: only the square.

    Raises:
        ValueError: a text is no size, or the sizes do not fit the resolution or each other.
    """
    if texts is None:
        return ((resolution, resolution),)
    step = side_step(resolution)
    if not texts:
        check_side(f"--resolution {resolution}", resolution, step)
        shorts = range(step, resolution + 1, step)
        sides = [(short, resolution**2 // short // step * step) for short in shorts]
        sides = [(short, long) for short, long in sides if long <= MAX_BUCKET_ASPECT * short]
        return tuple(sorted({*sides, *((long, short) for short, long in sides)}, reverse=True))
    sizes = {}  # by aspect ratio
    for text in texts:
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
        if not match:
            raise ValueError(f"{BUCKETS} {text} is no size; write WIDTHxHEIGHT, such as 640x384")
        width, height = map(int, match.groups())
        for side in (width, height):
            check_side(f"{BUCKETS} {text}: {side}", side, step)
        if not 0.5 <= width * height / resolution**2 <= 2:
            raise ValueError(
                f"{BUCKETS} {text} has {width * height / resolution**2:.3g} times the pixels of "
                f"--resolution {resolution}; it may have from a half to twice as many"
            )
        if other := sizes.get(width / height):
            raise ValueError(
                f"{BUCKETS} {size_name(other)} and {text} have one aspect ratio; leave out one"
            )
        sizes[width / height] = (height, width)
    return tuple(sizes[aspect] for aspect in sorted(sizes))


def check_side(named: str, side: int, step: int) -> None:
    """Raise a ValueError that begins with `named` unless a side is a multiple of step."""
    if side % step:
        below = side // step * step
        near = " or ".join(str(n) for n in (below, below + step) if n)
        raise ValueError(f"{named} is not a multiple of {step}; try {near}")


def check_sides(size: tuple[int, int], step: int) -> None:
    """Raise a ValueError unless height and width of a bucket are multiples of step."""
    for side in size:
        check_side(f"{BUCKETS} {size_name(size)}: {side}", side, step)


def size_name(size: tuple[int, int]) -> str:
    """WIDTHxHEIGHT."""
    return f"{size[1]}x{size[0]}"


def nearest_sizes(image_sizes: np.ndarray, sizes: tuple[tuple[int, int], ...]) -> np.ndarray:
    """For each image the index of the size with the nearest aspect ratio, by its logarithm.

    Args:
        image_sizes: integers (N, 2), height and width; (0, 0), unknown, counts as a square.
        sizes: to choose from.
    """
    logs = np.log(np.maximum(image_sizes, 1))
    aspects = logs[:, 1] - logs[:, 0]
    return np.abs(aspects[:, None] - [math.log(w / h) for h, w in sizes]).argmin(axis=1)


def choose_sizes(
    image_sizes: list[np.ndarray], sizes: tuple[tuple[int, int], ...], batch_size: int
) -> tuple[tuple[tuple[int, int], ...], list[np.ndarray]]:
    """The sizes that have a batch of pairs, and for each pair the nearest of these sizes.

    A size with fewer pairs is left out, first the one with the fewest, and its pairs go to the
    nearest remaining size.

    Args:
        image_sizes: of the rows of each directory, see nearest_sizes.
        sizes: to choose from.
        batch_size: pairs that every directory needs of every size.

    Returns:
        (sizes, size_of): the remaining sizes; for each directory's rows the index of their size.
    """
    while True:
        size_of = [nearest_sizes(of_directory, sizes) for of_directory in image_sizes]
        counts = count_sizes(size_of, len(sizes))
        too_few = np.flatnonzero(counts.min(axis=0) < batch_size)
        if len(sizes) == 1 or not len(too_few):
            return sizes, size_of
        left_out = too_few[counts.sum(axis=0)[too_few].argmin()]
        sizes = sizes[:left_out] + sizes[left_out + 1 :]


def count_sizes(size_of: list[np.ndarray], num_sizes: int) -> np.ndarray:
    """Number of rows of each size in each directory, (directories, sizes)."""
    return np.array([np.bincount(of_rows, minlength=num_sizes) for of_rows in size_of])


class Epoch(NamedTuple):
    """What a process reads in an epoch, and when."""

    order: np.ndarray  # integers (num_batches, B), rows of the directory
    read_steps: np.ndarray  # (num_batches, B): the batch at which each row is read, see _deal
    # (num_rows, 3) in [0, 1): of each row the crop, the flip, and which of several instructions.
    draws: np.ndarray


@dataclass(frozen=True)
class Partition:
    """How an epoch is divided among processes; see partition_rows."""

    num_batches: tuple[int, ...]  # of every process, of each size
    num_parts: int  # of the order that this process draws
    total_parts: int  # of the orders of all processes
    batch_size: int  # rows of the order in a batch
    columns: slice  # of these rows: the rows of this process
    # Of each directory: seeds of its order besides seed and epoch.
    shard_seeds: tuple[tuple[int, ...], ...]
    directory: int  # of this process, as an index

    def shuffle(
        self,
        group_rows: list[int],
        seed: int,
        epoch: int,
        shuffle_buffer: int,
        directories: list[tuple[list[int], np.ndarray]] | None = None,
    ) -> Epoch:
        """Draw an epoch's order, crops, flips and instructions.

        Args:
            group_rows: number of rows of each row group of this process's directory.
            seed, epoch: of ParquetImagePairs.
            shuffle_buffer: see Reading.
            directories: with several sizes, of each directory the rows of its row groups, and for
                each row the index of its size.
        """
        shard_seed = self.shard_seeds[self.directory]
        num_rows = sum(group_rows)
        of_images, of_texts = (
            np.random.default_rng([seed, epoch, purpose, *shard_seed]).random((num_rows, n))
            for purpose, n in ((1, 2), (2, 1))
        )
        draws = np.hstack((of_images, of_texts))
        order_parts = partial(
            epoch_order,
            num_parts=self.num_parts,
            rows_per_part=sum(self.num_batches) * self.batch_size // self.num_parts,
            window=shuffle_buffer / self.total_parts,
        )
        if directories is None:
            parts = order_parts(group_rows, seed=[seed, epoch, 0, *shard_seed])
            order = self._join(parts.reshape(self.num_parts, sum(self.num_batches), -1))
            steps = np.arange(len(order))[:, None]
            read_steps = np.broadcast_to(steps, order.shape)
        else:
            order, read_steps = self._deal(directories, seed, epoch, order_parts)
        return Epoch(order[:, self.columns], read_steps[:, self.columns], draws)

    def _join(self, slices: np.ndarray) -> np.ndarray:
        """Batches (num_batches, B) of the parts' slices (num_parts, num_batches, rows)."""
        return slices.swapaxes(0, 1).reshape(-1, self.batch_size)

    def _deal(
        self,
        directories: list[tuple[list[int], np.ndarray]],
        seed: int,
        epoch: int,
        order_parts: Callable[..., np.ndarray],
    ) -> tuple[np.ndarray, np.ndarray]:
        """Deal the rows of an epoch to batches of one size each.

        All parts are read in their order, at the same pace, and a batch is complete when every part
        has dealt its slice of it. Complete batches are emitted at once. So the batches of all
        processes have the same sizes, and rows of rare sizes wait for their batch.

        Args:
            directories, seed, epoch: see shuffle.
            order_parts: epoch_order of a directory.

        Returns:
            order: (num_batches, B), rows of this process's directory.
            read_steps: (num_batches, B): the first batch that is complete when a row has been
                dealt, at most the row's own.
        """
        batches, places, complete = [], [], []
        for directory, (group_rows, size_of) in enumerate(directories):
            shard_seed = self.shard_seeds[directory]
            drawn = self._drawn_sizes(size_of, seed, epoch, shard_seed)
            parts = order_parts(group_rows, seed=[seed, epoch, 0, *shard_seed], size_of=drawn)
            place_of = [  # in their part, the rows of a size, (num_parts, num_batches, rows)
                np.nonzero(size_of[parts] == size)[1].reshape(self.num_parts, count, -1)
                for size, count in enumerate(self.num_batches)
            ]
            complete.append(np.concatenate([place.max(axis=(0, 2)) for place in place_of]))
            if directory == self.directory:
                each_part = np.arange(self.num_parts)[:, None, None]
                batches = [self._join(parts[each_part, place]) for place in place_of]
                places = [self._join(place) for place in place_of]
        complete = np.max(complete, axis=0)
        turn = np.argsort(complete, kind="stable")
        order, places = (np.concatenate(x)[turn] for x in (batches, places))
        return order, np.searchsorted(complete[turn], places)

    def _drawn_sizes(
        self, size_of: np.ndarray, seed: int, epoch: int, shard_seed: tuple[int, ...]
    ) -> np.ndarray:
        """size_of, with -1 for the rows that wait for the next epoch.

        The rows of a size take turns: the first to be drawn in an epoch are those after the last
        one of the epoch before. So a row that waits is drawn in the next epoch, unless more wait
        than are drawn, as on a process with more shards than another.
        """
        drawn = np.full_like(size_of, -1)
        for size, count in enumerate(self.num_batches):
            rows = np.flatnonzero(size_of == size)
            rows = np.random.default_rng([seed, size, 3, *shard_seed]).permutation(rows)
            count *= self.batch_size
            drawn[rows.take(range(epoch * count, (epoch + 1) * count), mode="wrap")] = size
        return drawn


def choose_num_parts(num_parts: int, batch_size: int, process_count: int) -> int:
    """num_parts, or for 0 the greatest common divisor of the global batch and DEFAULT_PARTS.

    Raises:
        ValueError: num_parts does not divide the global batch.
    """
    global_batch_size = batch_size * process_count
    num_parts = num_parts or math.gcd(global_batch_size, DEFAULT_PARTS)
    if global_batch_size % num_parts:
        raise ValueError(
            f"num_parts={num_parts} does not divide the global batch of {global_batch_size} "
            f"pairs (batch_size={batch_size}, process_count={process_count}); use a divisor or 0"
        )
    return num_parts


def partition_rows(
    directories: list[list[tuple[int, int, int]]],
    size_rows: np.ndarray,
    batch_size: int,
    num_parts: int,
    processes: Processes,
) -> Partition:
    """Divide an epoch among processes.

    Args:
        directories: shard ids; of one directory if all processes have the same shards, else of the
            directory of each process.
        size_rows: (directories, sizes), number of rows.
        batch_size: pairs per batch of a process.
        num_parts: a divisor of the global batch size.
        processes: that share the epoch.
    """
    process_index, process_count = processes.process_index, processes.process_count
    if len(directories) == 1:  # one order of global batches; each process takes its columns
        global_batch_size = batch_size * process_count
        return Partition(
            num_batches=tuple((np.array(size_rows[0]) // global_batch_size).tolist()),
            num_parts=num_parts,
            total_parts=num_parts,
            batch_size=global_batch_size,
            columns=slice(process_index * batch_size, (process_index + 1) * batch_size),
            shard_seeds=((),),
            directory=0,
        )
    # Each process has its own order of its own batches.
    own_parts = math.gcd(batch_size, max(1, num_parts // process_count))
    return Partition(
        num_batches=tuple((np.min(size_rows, axis=0) // batch_size).tolist()),
        num_parts=own_parts,
        total_parts=own_parts * process_count,
        batch_size=batch_size,
        columns=slice(batch_size),
        # The order belongs to the shards, whichever process reads them.
        shard_seeds=tuple(tuple(directory[0][:2]) for directory in directories),
        directory=process_index,
    )


def epoch_order(
    group_rows: list[int],
    *,
    seed: list[int],
    num_parts: int,
    rows_per_part: int,
    window: float,
    size_of: np.ndarray | None = None,
) -> np.ndarray:
    """Shuffle an epoch so that each part needs a few row groups at a time.

    The row groups are concatenated in shuffled order and cut into num_parts parts of equal length;
    the remaining rows are not used in this epoch. Within a part, each row gets a random time,
    uniform over a window around its row group's position in the part, and rows are sorted by time.
    A row group is therefore needed only during its window, and rows mix with all rows whose windows
    overlap. A window as long as the part gives a uniform shuffle. With several sizes the rows of
    each size are cut on their own, so that all parts have as many of them.

    Args:
        group_rows: number of rows of each row group.
        seed: integers >= 0; the order depends on them and on the other arguments.
        num_parts: at least 1.
        rows_per_part: rows of each part; num_parts * rows_per_part <= sum(group_rows).
        window: length of a window in rows; a window always covers its row group's rows in the part.
        size_of: the size of each row as an index, -1: the row is not used; None: there is one.

    Returns:
        Integers (num_parts, rows_per_part): the rows of each part in order, counted over all row
        groups.
    """
    group_rows = np.asarray(group_rows)
    first_rows = np.cumsum(group_rows) - group_rows
    group_of = np.repeat(np.arange(len(group_rows)), group_rows)  # row -> row group
    rng = np.random.default_rng(seed)
    # Rows within a row group are shuffled too, so that a cut or the unused end takes random rows.
    all_rows = np.concatenate(
        [first_rows[g] + rng.permutation(group_rows[g]) for g in rng.permutation(len(group_rows))]
    )
    if size_of is not None:
        all_rows = all_rows[size_of[all_rows] >= 0]
        part_of = np.empty(len(all_rows), int)
        for size in np.unique(size_of[all_rows]):
            places = np.flatnonzero(size_of[all_rows] == size)
            part_of[places] = np.arange(len(places)) * num_parts // len(places)
        all_rows = all_rows[np.argsort(part_of, kind="stable")]
    parts = all_rows[: num_parts * rows_per_part].reshape(num_parts, rows_per_part)
    # Neighbouring parts share a row group; reversing every other part makes both need it at once.
    parts[1::2] = parts[1::2, ::-1].copy()

    order = np.empty_like(parts)
    for part, rows in enumerate(parts):
        cuts = np.flatnonzero(np.diff(group_of[rows], prepend=-1, append=-1))  # row group bounds
        starts, stops = cuts[:-1], cuts[1:]
        centers, halves = (starts + stops) / 2, np.maximum(stops - starts, window) / 2
        begins = np.maximum(centers - halves, 0)
        ends = np.minimum(centers + halves, rows_per_part)
        if window >= rows_per_part:
            begins, ends = np.zeros_like(begins), np.full_like(ends, rows_per_part)
        times = rng.uniform(np.repeat(begins, stops - starts), np.repeat(ends, stops - starts))
        order[part] = rows[np.argsort(times, kind="stable")]
    return order
