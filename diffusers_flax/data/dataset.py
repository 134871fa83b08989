"""Training batches from parquet shards, and their order: a plain iterator, a torch IterableDataset.

    for batch in ParquetImagePairs("data", batch_size=16): ...

Images are prepared as in InstructPix2Pix (arXiv 2211.09800).
"""

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from diffusers_flax.data.buckets import size_name
from diffusers_flax.data.options import Columns, Processes, Reading, Transform
from diffusers_flax.data.reading import Epoch, StoredPairs, decode_batches, stream_settings
from diffusers_flax.messages import differences

# Parts of an epoch, at most. A process holds a window of row groups in memory for each part that it
# reads. Fewer parts need less memory in one process; with many processes, more mean less reading.
MAX_PARTS = 4


def register_with_torch(dataset_class: type) -> None:
    """Register a class as a torch IterableDataset if torch is already imported.

    Subclassing IterableDataset would import torch, which takes seconds, for all users.
    """
    if "torch.utils.data" in sys.modules:
        sys.modules["torch.utils.data"].IterableDataset.register(dataset_class)


def refuse_torch_workers() -> None:
    """Raise a ValueError in a worker of a torch DataLoader."""
    data = sys.modules.get("torch.utils.data")
    if data is not None and data.get_worker_info() is not None:
        raise ValueError("DataLoader's num_workers must be 0; set num_threads of Reading instead")


class ParquetImagePairs(StoredPairs):
    """Batches of image pairs and instructions from a directory of parquet shards.

    One iteration yields one epoch of this process's batches; every process gets `len(self)` of
    them. The next iteration yields the next epoch, unless `set_epoch` selects another. If torch is
    imported before the object is created, the object is a torch IterableDataset:
    `DataLoader(dataset, batch_size=None)`. A batch is a dict:

        original_pixel_values, edited_pixel_values: uint8 (B, R, R, 3); (B, H, W, 3) with sizes
        edit_prompt: list of B strings

    or, for a directory written by cache_latents.py, with latents instead of images:

        original_latents: float16 (B, h, w, C)
        edited_latents: float16 (B, h, w, 2 C)

    With micro_conditioning also `time_ids`, float32 (B, 6), see `decoding.decode_pair`. With masks
    also `mask`, uint8 (B, R, R) or (B, h, w), 255 where the image may change, 0 without a mask.
    With reference images also `reference_image`, like the original images or their latents, and
    `has_reference`, bool (B,); a row without one is 0.

    Order: an epoch has parts (the greatest common divisor of the global batch size and MAX_PARTS;
    with sizes 1), and a global batch concatenates equal slices of them. If all processes have the
    same shards, process i takes the i-th equal slice of every global batch. If each process has
    its own shards, it makes its own batches, and all processes stop when the process with the
    fewest rows has no more. Each epoch leaves out different rows and yields no row twice. Order,
    crops and flips depend on the data, seed, epoch, global batch size and `shuffle_buffer` (see
    `epoch_order`), and not on the number of threads or, with the same shards, of processes.

    Sizes: with `sizes` a pair gets the size nearest in aspect ratio to its original image, and a
    global batch has one size, the same on every process. A size with less than a batch of pairs is
    left out. Pairs of a size that do not fill a batch wait for the next epoch.

    Undecodable pairs: the next decodable row, first of the same row group and always of the same
    size, replaces the pair and gets its crop and flip. `num_bad` counts replaced pairs, `bad_rows`
    names their rows, and each is logged once.

    Memory: for each part the encoded pairs of a window of shuffle_buffer / parts rows plus up to
    two row groups; the row groups that are read ahead; `prefetch_batches` batches; with sizes also
    the encoded pairs of incomplete batches.

    `state_dict()` is the position after the last batch yielded. A dataset with the same arguments
    that loads it continues with the next batch, bit for bit.

    Args:
        train_data_dir: directory of *.parquet files, or a URL, see streaming.list_files.
        batch_size: pairs per batch of this process.
        columns, transform, processes, reading: see options.py.
        seed: at least 0.

    Raises:
        ValueError: an invalid argument, an invalid directory (see `list_row_groups` and
            `gather_directories`), or fewer rows than one batch; while iterating, damaged shards or
            too many pairs that cannot be used.
    """

    def __init__(
        self,
        train_data_dir: str,
        *,
        batch_size: int,
        columns: Columns = Columns(),
        transform: Transform = Transform(),
        seed: int = 0,
        processes: Processes = Processes(),
        reading: Reading = Reading(),
    ):
        register_with_torch(type(self))
        global_batch_size = batch_size * processes.process_count
        # With sizes and more parts, more pairs would wait until their batch is full.
        num_parts = math.gcd(global_batch_size, MAX_PARTS) if transform.sizes is None else 1
        super().__init__(train_data_dir, columns, transform, processes, reading)
        is_shared = len(self.directories) == 1
        needed = global_batch_size if is_shared else batch_size
        if min(self.directory_rows) < needed:
            source = train_data_dir if is_shared else "the directory with the fewest rows"
            raise ValueError(
                f"{source} has {min(self.directory_rows)} pairs, fewer than a batch of {needed}; "
                "use a smaller batch, fewer processes or more pairs"
            )
        if transform.sizes is not None:
            self.choose_sizes(batch_size)
        self._partition = partition_rows(self, batch_size, num_parts)
        self.epoch_rows = len(self) * global_batch_size
        self.seed = seed
        self.epoch = 0
        self._first_batch = 0  # at which the next iteration starts
        self._next_batch = 0  # position of state_dict
        self._stream_identity = {
            "seed": seed,
            "global_batch_size": global_batch_size,
            "num_parts": num_parts,
            **stream_settings(transform, reading),
            **self.identity(),
        }
        if transform.sizes is not None:
            self._stream_identity["sizes"] = " ".join(map(size_name, self.sizes))

    def describe_epoch(self) -> str:
        """Such as "16 of 24 pairs per epoch (pairs by size: 384x640 4, 512x512 20)"."""
        text = f"{self.epoch_rows} of {self.num_rows} pairs per epoch"
        if self.directory_sizes is None:
            return text
        counts = zip(self.sizes, self.size_rows.sum(axis=0))
        texts = (f"{size_name(size)} {count}" for size, count in counts)
        return f"{text} (pairs by size: {', '.join(texts)})"

    def __len__(self) -> int:
        """Batches per epoch of every process."""
        return sum(self._partition.num_batches)

    def set_epoch(self, epoch: int) -> None:
        """Select the epoch, from 0, of the next iteration."""
        self.set_step(epoch * len(self))

    def set_step(self, step: int) -> None:
        """Select the first batch of the next iteration, counted from 0 over all epochs."""
        self.epoch, self._first_batch = divmod(step, len(self))
        self._next_batch = self._first_batch

    def passes(self, step: int) -> dict[str, float]:
        """See Mixture.passes; a single set has none."""
        return {}

    def state_dict(self) -> dict:
        """Position and identity of the stream of batches; the same on every process."""
        return {"epoch": self.epoch, "batch": self._next_batch, **self._stream_identity}

    def load_state_dict(self, state: dict) -> None:
        """Continue the next iteration at the position of a `state_dict`.

        Raises:
            ValueError: the state belongs to another stream; names all differences.
        """
        if different := differences(state, self._stream_identity):
            raise ValueError(f"cannot resume the data: {'; '.join(different)}")
        self.set_step(state["epoch"] * len(self) + state["batch"])

    def __iter__(self) -> Iterator[dict]:
        refuse_torch_workers()
        start, self._first_batch = self._first_batch, 0
        self._next_batch = start
        epoch = self._partition.shuffle(self, self.seed, self.epoch, self.reading.shuffle_buffer)
        read = partial(self.read_batches, [epoch.after(start)])
        batches = decode_batches(read, self.reading)
        with contextlib.closing(batches):
            for step, batch in enumerate(batches, start=start + 1):
                self._next_batch = step
                if step == len(self):
                    self.epoch, self._next_batch = self.epoch + 1, 0
                yield batch


class Partition(NamedTuple):
    """Division of an epoch among processes; see partition_rows."""

    num_batches: tuple[int, ...]  # of each size, equal on all processes
    shard_seeds: tuple[tuple[int, ...], ...]  # of each directory, besides seed and epoch
    directory: int = 0  # index of this process's directory
    batch_size: int = 1  # rows of the order in a batch
    columns: slice = slice(1)  # of a batch: the rows of this process
    num_parts: int = 1  # in the order that this process draws; with sizes 1
    total_parts: int = 1  # in the orders of all processes

    def shuffle(self, pairs: StoredPairs, seed: int, epoch: int, shuffle_buffer: float) -> Epoch:
        """Draw an epoch's order, crops, flips and instructions; arguments as of the data set."""
        shard_seed, num_batches = self.shard_seeds[self.directory], sum(self.num_batches)
        group_rows = [group.num_rows for group in pairs.groups]
        of_images, of_texts = (
            np.random.default_rng([seed, epoch, purpose, *shard_seed]).random((sum(group_rows), n))
            for purpose, n in ((1, 2), (2, 1))
        )
        order_parts = partial(
            epoch_order,
            num_parts=self.num_parts,
            rows_per_part=num_batches * self.batch_size // self.num_parts,
            window=shuffle_buffer / self.total_parts,
        )
        if pairs.directory_sizes is None:
            parts = order_parts(group_rows, seed=[seed, epoch, 0, *shard_seed])
            slices = parts.reshape(self.num_parts, num_batches, -1)
            order = slices.swapaxes(0, 1).reshape(num_batches, self.batch_size)
            read_steps = np.broadcast_to(np.arange(num_batches)[:, None], order.shape)
        else:
            order, read_steps = self._deal(pairs.directory_sizes, seed, epoch, order_parts)
        draws = np.hstack((of_images, of_texts))
        return Epoch(order[:, self.columns], read_steps[:, self.columns], draws)

    def _deal(
        self,
        directories: list[tuple[list[int], np.ndarray]],
        seed: int,
        epoch: int,
        order_parts: Callable[..., np.ndarray],
    ) -> tuple[np.ndarray, np.ndarray]:
        """Deal the rows of an epoch to batches of one size each; returns order and read_steps.

        All directories are read at the same pace. A batch comes next when all its rows are read in
        every directory. So the batches of all processes have the same sizes, and rows of rare sizes
        wait for their batch. The rows of a size take turns: an epoch begins after the last row of
        the epoch before, so that a waiting row is drawn in the next epoch.
        """
        complete = []  # for each directory, the place at which each batch is complete
        for directory, (group_rows, size_of) in enumerate(directories):
            shard_seed = self.shard_seeds[directory]
            drawn = np.full_like(size_of, -1)  # rows that wait for the next epoch
            for size, count in enumerate(self.num_batches):
                rows = np.flatnonzero(size_of == size)
                rows = np.random.default_rng([seed, size, 3, *shard_seed]).permutation(rows)
                count *= self.batch_size
                drawn[rows.take(range(epoch * count, (epoch + 1) * count), mode="wrap")] = size
            (rows,) = order_parts(group_rows, seed=[seed, epoch, 0, *shard_seed], size_of=drawn)
            by_size = np.argsort(size_of[rows], kind="stable").reshape(-1, self.batch_size)
            complete.append(by_size.max(axis=1))
            if directory == self.directory:
                order, places = rows[by_size], by_size
        complete = np.max(complete, axis=0)
        turn = np.argsort(complete, kind="stable")
        return order[turn], np.searchsorted(complete[turn], places[turn])


def partition_rows(pairs: StoredPairs, batch_size: int, num_parts: int) -> Partition:
    """Divide an epoch among processes.

    Args:
        pairs: of this process's directory.
        batch_size: pairs per batch of a process.
        num_parts: a divisor of the global batch size.
    """
    process_index, process_count = pairs.processes.process_index, pairs.processes.process_count
    if len(pairs.directories) == 1:  # one order of global batches; each process takes its columns
        global_batch_size = batch_size * process_count
        return Partition(
            num_batches=tuple((pairs.size_rows[0] // global_batch_size).tolist()),
            shard_seeds=((),),
            batch_size=global_batch_size,
            columns=slice(process_index * batch_size, (process_index + 1) * batch_size),
            num_parts=num_parts,
            total_parts=num_parts,
        )
    # Each process has its own order of its own batches.
    own_parts = math.gcd(batch_size, max(1, num_parts // process_count))
    return Partition(
        num_batches=tuple((np.min(pairs.size_rows, axis=0) // batch_size).tolist()),
        # The order belongs to the shards, whichever process reads them.
        shard_seeds=tuple(tuple(directory[0][:2]) for directory in pairs.directories),
        directory=process_index,
        batch_size=batch_size,
        columns=slice(batch_size),
        num_parts=own_parts,
        total_parts=own_parts * process_count,
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
    """Shuffle an epoch such that each part needs only a few row groups at a time.

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
        size_of: index of each row's size, -1 for unused rows; None: all rows are used.

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
