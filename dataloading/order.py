"""The order of an epoch: which rows each process has in which batch, shuffled."""

import math
from dataclasses import dataclass

import numpy as np

# Parts of an epoch. A process holds a window of row groups in memory for each part that it reads.
# Fewer parts need less memory in one process; with many processes, more parts mean less reading.
DEFAULT_PARTS = 4


@dataclass(frozen=True)
class Partition:
    """How an epoch is divided among processes; see partition_rows."""

    num_batches: int  # of every process
    num_parts: int  # of the order that this process draws
    total_parts: int  # of the orders of all processes
    batch_size: int  # rows of the order in a batch
    columns: slice  # of these rows: the rows of this process
    shard_seed: tuple[int, ...]  # seeds of the order besides seed and epoch

    def shuffle(
        self, group_rows: list[int], seed: int, epoch: int, shuffle_buffer: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw an epoch's order, crops, flips and instructions.

        Args:
            group_rows: number of rows of each row group of this process's directory.
            seed, epoch, shuffle_buffer: see ParquetImagePairs.

        Returns:
            order: integers (num_batches, B), rows of the directory.
            draws: (num_rows, 3) in [0, 1): of each row the crop, the flip, and which of several
                instructions.
        """
        slice_size = self.batch_size // self.num_parts  # rows of one part in a batch
        parts = epoch_order(
            group_rows,
            seed=[seed, epoch, 0, *self.shard_seed],
            num_parts=self.num_parts,
            rows_per_part=self.num_batches * slice_size,
            window=shuffle_buffer / self.total_parts,
        )
        order = parts.reshape(self.num_parts, self.num_batches, slice_size).swapaxes(0, 1)
        order = order.reshape(self.num_batches, self.batch_size)[:, self.columns]
        num_rows = sum(group_rows)
        of_images, of_texts = (
            np.random.default_rng([seed, epoch, purpose, *self.shard_seed]).random((num_rows, n))
            for purpose, n in ((1, 2), (2, 1))
        )
        return order, np.hstack((of_images, of_texts))


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
    directory_rows: list[int],
    batch_size: int,
    num_parts: int,
    process_index: int,
    process_count: int,
) -> Partition:
    """Divide an epoch among processes.

    Args:
        directories: shard ids; of one directory if all processes have the same shards, else of the
            directory of each process.
        directory_rows: rows of each directory.
        batch_size: pairs per batch of a process.
        num_parts: a divisor of the global batch size.
        process_index, process_count: of this process, and of all.
    """
    if len(directories) == 1:  # one order of global batches; each process takes its columns
        global_batch_size = batch_size * process_count
        return Partition(
            num_batches=directory_rows[0] // global_batch_size,
            num_parts=num_parts,
            total_parts=num_parts,
            batch_size=global_batch_size,
            columns=slice(process_index * batch_size, (process_index + 1) * batch_size),
            shard_seed=(),
        )
    # Each process has its own order of its own batches.
    own_parts = math.gcd(batch_size, max(1, num_parts // process_count))
    return Partition(
        num_batches=min(directory_rows) // batch_size,
        num_parts=own_parts,
        total_parts=own_parts * process_count,
        batch_size=batch_size,
        columns=slice(batch_size),
        # The order belongs to the shards, whichever process reads them.
        shard_seed=tuple(directories[process_index][0][:2]),
    )


def epoch_order(
    group_rows: list[int],
    *,
    seed: list[int],
    num_parts: int,
    rows_per_part: int,
    window: float,
) -> np.ndarray:
    """Shuffle an epoch so that each part needs a few row groups at a time.

    The row groups are concatenated in shuffled order and cut into num_parts parts of equal length;
    the remaining rows are not used in this epoch. Within a part, each row gets a random time,
    uniform over a window around its row group's position in the part, and rows are sorted by time.
    A row group is therefore needed only during its window, and rows mix with all rows whose windows
    overlap. A window as long as the part gives a uniform shuffle.

    Args:
        group_rows: number of rows of each row group.
        seed: integers >= 0; the order depends on them and on the other arguments.
        num_parts: at least 1.
        rows_per_part: rows of each part; num_parts * rows_per_part <= sum(group_rows).
        window: length of a window in rows; a window always covers its row group's rows in the part.

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
