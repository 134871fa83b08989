"""Training batches from parquet shards: a plain iterator, and a torch IterableDataset.

    for batch in ParquetImagePairs("data", batch_size=16): ...

Images are prepared as in InstructPix2Pix (arXiv 2211.09800).
"""

import hashlib
import logging
import math
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pyarrow as pa

from dataloading.decoding import Decoding
from dataloading.images import RESAMPLING, num_usable_cores
from dataloading.order import choose_num_parts, partition_rows
from dataloading.shards import (
    Cells,
    Pair,
    RowGroup,
    gather_directories,
    latents_metadata,
    list_row_groups,
    pair_at,
    read_row_group,
    shard_ids,
    source_columns,
    take_first_rows,
)
from diffusers_flax.messages import differences

MIN_ROWS_FOR_BAD_FRACTION = 1000  # max_bad_fraction is tested as if at least this many were read
MIN_LEFT_OUT = 0.01  # share of an epoch's pairs for which a better batch size is looked up
logger = logging.getLogger(__name__)


def register_with_torch(dataset_class: type) -> None:
    """Register a class as a torch IterableDataset if torch is already imported.

    Subclassing IterableDataset would import torch, which takes seconds, for all users.
    """
    if "torch.utils.data" in sys.modules:
        sys.modules["torch.utils.data"].IterableDataset.register(dataset_class)


def in_torch_worker() -> bool:
    """Whether this process is a worker of a torch DataLoader."""
    data = sys.modules.get("torch.utils.data")
    return data is not None and data.get_worker_info() is not None


class ParquetImagePairs:
    """Batches of image pairs and instructions from a directory of parquet shards.

    One iteration yields one epoch of this process's batches; every process gets `len(self)` of
    them. The next iteration yields the next epoch, unless `set_epoch` selects another. If torch is
    imported before the object is created, the object is a torch IterableDataset:
    `DataLoader(dataset, batch_size=None)`. A batch is a dict:

        original_pixel_values, edited_pixel_values: uint8 (B, R, R, 3)
        edit_prompt: list of B strings

    or, for a directory written by cache_latents.py, with latents instead of images:

        original_latents: float16 (B, h, w, C)
        edited_latents: float16 (B, h, w, 2 C)

    and, with micro_conditioning, `time_ids`, float32 (B, 6), see `decoding.decode_pair`.

    Order: an epoch has `num_parts` parts, and a global batch concatenates equal slices of them. If
    all processes have the same shards, the parts cover all rows, and process i takes the i-th equal
    slice of every global batch; less than one global batch of rows is unused. If each process has
    its own shards, it makes its own parts and batches, and every process stops after as many
    batches as the process with the fewest rows has. Each epoch leaves out different rows and yields
    no row twice. Order, crops and flips depend on the data, seed, epoch, global batch size,
    `num_parts` and `shuffle_buffer` (see `order.epoch_order`). They do not depend on the number of
    threads or, if all processes have the same shards, on the number of processes.

    Undecodable pairs: the next decodable row of the same row group, cyclically, replaces the pair
    and gets its crop and flip. If the row group has none, the following row groups are searched.
    `num_bad` counts replaced pairs, `bad_rows` names undecodable rows, and each is logged once.

    Memory: the encoded pairs of a window of shuffle_buffer / num_parts rows plus up to two row
    groups, for each part that the process reads, and at most all of its shards; one row group read
    ahead, one of its columns twice while it is read; `prefetch_batches` batches.

    `state_dict()` is the position after the last batch yielded. A dataset with the same arguments
    that loads it continues with the next batch, bit for bit.

    Args:
        train_data_dir: directory of *.parquet files.
        batch_size: pairs per batch of this process.
        resolution: side R of the images, pixels.
        seed: at least 0.
        random_crop: crop at a random position along the longer side, else in the centre. Latents
            need False.
        random_flip: mirror half of the pairs.
        micro_conditioning: also yield the time ids of SDXL.
        resample: "dct", "lanczos" or "bicubic", see `decoding.decode_pair`.
        original_image_column, edited_image_column, edit_prompt_column: "" finds the known names.
        max_rows: use the first N rows only, over all processes; None: all.
        process_index, process_count: `jax.process_index()` and `jax.process_count()`.
        num_parts: a divisor of the global batch size; 0: the greatest common divisor of the global
            batch size and DEFAULT_PARTS.
        all_gather: `jax.experimental.multihost_utils.process_allgather`; required if processes have
            different shards, to compare their directories.
        num_threads: decoding threads; 0: one per core.
        prefetch_batches: batches decoded ahead of the consumer.
        shuffle_buffer: encoded pairs to draw from, over all processes.
        max_bad_fraction: largest fraction of undecodable pairs, in [0, 1]; it is tested as if at
            least MIN_ROWS_FOR_BAD_FRACTION pairs, or a global epoch if that is less, were read.

    Raises:
        ValueError: an invalid argument, an invalid directory (see `list_row_groups` and
            `gather_directories`), or fewer rows than one batch; while iterating, damaged shards or
            too many undecodable pairs.
    """

    def __init__(
        self,
        train_data_dir: str,
        *,
        batch_size: int,
        resolution: int = 256,
        seed: int = 0,
        random_crop: bool = True,
        random_flip: bool = True,
        micro_conditioning: bool = False,
        resample: str = "dct",
        original_image_column: str = "",
        edited_image_column: str = "",
        edit_prompt_column: str = "",
        max_rows: int | None = None,
        process_index: int = 0,
        process_count: int = 1,
        num_parts: int = 0,
        all_gather: Callable[[np.ndarray], np.ndarray] | None = None,
        num_threads: int = 0,
        prefetch_batches: int = 2,
        shuffle_buffer: int = 4096,
        max_bad_fraction: float = 0.1,
    ):
        register_with_torch(type(self))
        check_lowest(
            batch_size=(batch_size, 1),
            resolution=(resolution, 1),
            seed=(seed, 0),
            max_rows=(1 if max_rows is None else max_rows, 1),
            process_count=(process_count, 1),
            num_parts=(num_parts, 0),
            num_threads=(num_threads, 0),
            prefetch_batches=(prefetch_batches, 1),
            shuffle_buffer=(shuffle_buffer, 0),
        )
        check_options(process_index, process_count, resample, max_bad_fraction)
        num_parts = choose_num_parts(num_parts, batch_size, process_count)

        columns = (original_image_column, edited_image_column, edit_prompt_column)
        self.groups, directories = open_directories(train_data_dir, columns, all_gather)
        self.directory_rows = [sum(rows for *_, rows in directory) for directory in directories]
        if max_rows is not None:
            share = max_rows // len(directories)
            self.directory_rows = [min(rows, share) for rows in self.directory_rows]
            self.groups = take_first_rows(self.groups, share)
        self.num_rows = sum(self.directory_rows)  # over all processes
        check_enough_rows(self.directory_rows, batch_size, process_count, max_rows, train_data_dir)
        self._partition = partition_rows(
            directories, self.directory_rows, batch_size, num_parts, process_index, process_count
        )
        self.latents = latents_metadata(self.groups[0].metadata)
        self._decoding = Decoding(
            resolution, resample, random_crop, random_flip, micro_conditioning, self.latents
        )
        for group in self.groups:
            self._decoding.check(group)

        self.train_data_dir, self.batch_size, self.seed = train_data_dir, batch_size, seed
        self.num_parts, self.shuffle_buffer = num_parts, shuffle_buffer
        self.num_threads = num_threads or num_usable_cores()
        self.prefetch_batches, self.max_bad_fraction = prefetch_batches, max_bad_fraction
        self.num_seen = 0  # pairs yielded by this object
        self.num_bad = 0  # replaced pairs among them
        self.bad_rows: dict[tuple[str, int], str] = {}  # (shard, row) -> reason
        self.epoch = 0
        self._first_batch = 0  # at which the next iteration starts
        self._next_batch = 0  # position of state_dict
        self._first_rows = np.cumsum([0] + [group.num_rows for group in self.groups])
        self._spare_buffers: list[np.ndarray] = []  # for reuse by read_row_group
        self._replacements: dict[int, Pair] = {}  # for row groups without a decodable pair
        self._stream_identity = {
            "seed": seed,
            "global_batch_size": batch_size * process_count,
            "num_parts": num_parts,
            "shuffle_buffer": shuffle_buffer,
            "resolution": resolution,
            "random_crop": random_crop,
            "random_flip": random_flip,
            "resample": resample,
            "max_rows": max_rows,
            "columns": sorted({", ".join(source_columns(group)) for group in self.groups}),
            "latents": self.latents and self.latents["vae"],
            "data": hashlib.sha256(str(sorted(directories)).encode()).hexdigest()[:16],
        }

    def describe_epoch(self, multiple: int = 1) -> str:
        """Say how many pairs an epoch uses, and a smaller batch that would leave out fewer.

        Args:
            multiple: the global batch size must be a multiple of it.

        Returns:
            "16 of 24 pairs per epoch (24 with --train_batch_size 12)"; the part in parentheses if
            a batch of at least half the size leaves out fewer, and more than MIN_LEFT_OUT are.
        """
        global_batch_size = self._stream_identity["global_batch_size"]
        processes = global_batch_size // self.batch_size
        sharing = processes if len(self.directory_rows) == 1 else 1  # processes per directory

        def num_used(size):
            return min(self.directory_rows) // (size // processes * sharing) * size

        used, step = num_used(global_batch_size), math.lcm(multiple, processes)
        smaller = range(global_batch_size - step, (global_batch_size - 1) // 2, -step)
        best = max(smaller, key=num_used, default=global_batch_size)  # the largest of equals
        text = f"{used} of {self.num_rows} pairs per epoch"
        if used < min(num_used(best), (1 - MIN_LEFT_OUT) * self.num_rows):
            text += f" ({num_used(best)} with --train_batch_size {best})"
        return text

    def __len__(self) -> int:
        """Batches per epoch of every process."""
        return self._partition.num_batches

    def __getitem__(self, index):
        """Raise a TypeError: DataLoader indexes objects that are not registered with torch."""
        raise TypeError(
            "import torch before creating ParquetImagePairs, so that DataLoader iterates over it"
        )

    def set_epoch(self, epoch: int) -> None:
        """Select the epoch, from 0, of the next iteration."""
        self.epoch, self._first_batch, self._next_batch = epoch, 0, 0

    def state_dict(self) -> dict:
        """Position and identity of the stream of batches; the same on every process."""
        return {"epoch": self.epoch, "batch": self._next_batch, **self._stream_identity}

    def load_state_dict(self, state: dict) -> None:
        """Continue the next iteration at the position of a `state_dict`.

        Raises:
            ValueError: the state belongs to another stream; names all differences.
        """
        if different := differences(state, self._stream_identity):
            raise ValueError(
                f"cannot resume the data: {'; '.join(different)}"
                + (" (other shards)" if state.get("data") != self._stream_identity["data"] else "")
            )
        if not (state["epoch"] >= 0 and 0 <= state["batch"] < len(self)):
            raise ValueError(
                f"epoch={state['epoch']}, batch={state['batch']} is not a position in an epoch "
                f"of {len(self)} batches"
            )
        self.epoch, self._first_batch = state["epoch"], state["batch"]
        self._next_batch = self._first_batch

    def __iter__(self) -> Iterator[dict]:
        if in_torch_worker():
            raise ValueError(
                "DataLoader's num_workers must be 0: ParquetImagePairs has its own threads; set "
                "num_threads instead"
            )
        start, self._first_batch = self._first_batch, 0
        self._next_batch = start
        order, draws = self._partition.shuffle(
            [group.num_rows for group in self.groups], self.seed, self.epoch, self.shuffle_buffer
        )
        encoded = self._read_batches(order[start:])

        # One thread reads row groups and submits rows to the decoding threads.
        reader = ThreadPoolExecutor(1, "parquet-read")
        decoders = ThreadPoolExecutor(self.num_threads, "parquet-decode")

        def start_batch() -> tuple[dict, list, list[Future]]:
            rows = next(encoded)
            batch = self._decoding.empty_batch(self.batch_size)
            batch["edit_prompt"] = []
            futures = [
                decoders.submit(self._decode_row, batch, place, row, cells, draws[row])
                for place, (row, cells) in enumerate(rows)
            ]
            return batch, rows, futures

        try:
            steps = range(start, len(self))
            started = deque(reader.submit(start_batch) for _ in steps[: self.prefetch_batches])
            for step in steps:
                batch, rows, futures = started.popleft().result()
                if step + self.prefetch_batches < len(self):
                    started.append(reader.submit(start_batch))
                for place, ((row, cells), future) in enumerate(zip(rows, futures)):
                    try:
                        prompt = future.result()
                    except ValueError as error:
                        prompt = self._decode_replacement(
                            batch, place, row, cells, draws[row], error
                        )
                    batch["edit_prompt"].append(prompt)
                self.num_seen += self.batch_size
                self._check_bad_fraction()
                self._next_batch = step + 1
                if self._next_batch == len(self):
                    self.epoch, self._next_batch = self.epoch + 1, 0
                yield batch
        finally:  # also when the consumer stops early
            reader.shutdown(cancel_futures=True)
            decoders.shutdown(cancel_futures=True)
            encoded.close()
            pa.default_memory_pool().release_unused()

    def _read_batches(self, order: np.ndarray) -> Iterator[list[tuple[int, Cells]]]:
        """Yield, for each batch of `order` (num_batches, B), its rows with their row groups' cells.

        A row group stays in memory from its first batch to its last. One row group is read ahead.
        """
        groups = np.searchsorted(self._first_rows, order, side="right") - 1
        first_step, last_step = {}, {}
        for step, needed in enumerate(groups.tolist()):
            for g in needed:
                first_step.setdefault(g, step)
                last_step[g] = step
        upcoming = deque(first_step.items())
        loaded: dict[int, Future] = {}
        newest_step = -1  # first step of the row group submitted last
        loader = ThreadPoolExecutor(1, "parquet-row-group")
        try:
            for step, (rows, needed) in enumerate(zip(order.tolist(), groups.tolist())):
                while upcoming and newest_step <= step:
                    g, newest_step = upcoming.popleft()
                    loaded[g] = loader.submit(read_row_group, self.groups[g], self._spare_buffers)
                yield [(row, loaded[g].result()) for row, g in zip(rows, needed)]
                for g in set(needed):
                    if last_step[g] == step:
                        del loaded[g]
        finally:
            loader.shutdown(cancel_futures=True)

    def _locate(self, row: int) -> tuple[int, int]:
        """Index of a row's row group, and the row's position in it."""
        g = int(np.searchsorted(self._first_rows, row, side="right")) - 1
        return g, row - int(self._first_rows[g])

    def _decode_row(self, batch: dict, place: int, row: int, cells: Cells, draw: np.ndarray) -> str:
        """Decode a row into batch[...][place], cropped and flipped by draw; return its prompt."""
        g, position = self._locate(row)
        pair, columns = pair_at(cells, position), self.groups[g].columns
        return self._decoding.decode(batch, place, pair, columns, draw)

    def _decode_replacement(
        self, batch: dict, place: int, row: int, cells: Cells, draw: np.ndarray, error: ValueError
    ) -> str:
        """Count an undecodable row, decode a replacement into its place and return its prompt."""
        g, position = self._locate(row)
        self.num_bad += 1
        self._record_bad_row(g, position, error)
        if g in self._replacements:
            pair, columns = self._replacements[g], self.groups[g].columns
            return self._decoding.decode(batch, place, pair, columns, draw)
        for candidate, candidate_cells in self._following_rows(row, cells):
            h, candidate_position = self._locate(candidate)
            if self._shard_and_row(h, candidate_position) in self.bad_rows:
                continue
            try:
                pair = pair_at(candidate_cells, candidate_position)
                prompt = self._decoding.decode(batch, place, pair, self.groups[h].columns, draw)
            except ValueError as candidate_error:
                self._record_bad_row(h, candidate_position, candidate_error)
                continue
            if h != g:  # no row of the row group is decodable: do not search it again
                self._replacements[g] = pair
            return prompt
        raise ValueError(
            f"none of the {self._first_rows[-1]} pairs of {self.train_data_dir} can be decoded "
            f"({next(iter(self.bad_rows.values()))})"
        )

    def _following_rows(self, row: int, cells: Cells) -> Iterator[tuple[int, Cells]]:
        """Yield all other rows, cyclically: first of the same row group, then of the next ones."""
        own, position = self._locate(row)
        first, count = int(self._first_rows[own]), self.groups[own].num_rows
        for place in (*range(position + 1, count), *range(position)):
            yield first + place, cells
        for g in (*range(own + 1, len(self.groups)), *range(own)):
            cells = read_row_group(self.groups[g])
            for place in range(self.groups[g].num_rows):
                yield int(self._first_rows[g]) + place, cells

    def _shard_and_row(self, g: int, position: int) -> tuple[str, int]:
        """(shard name, row of the shard) of a position in row group g."""
        return self.groups[g].path.name, self.groups[g].first_row + position

    def _record_bad_row(self, g: int, position: int, error: ValueError) -> None:
        """Log an undecodable row the first time it occurs; raise if there are too many."""
        name = self._shard_and_row(g, position)
        if name not in self.bad_rows:
            self.bad_rows[name] = str(error)
            logger.warning("%s row %d: %s; another row takes its place", *name, error)
        num_rows = int(self._first_rows[-1])
        if len(self.bad_rows) > self.max_bad_fraction * max(num_rows, MIN_ROWS_FOR_BAD_FRACTION):
            self._raise_too_many_bad(
                f"{len(self.bad_rows)} of the {num_rows} pairs of {self.train_data_dir}"
            )

    def _raise_too_many_bad(self, count: str) -> None:
        """Raise the ValueError for max_bad_fraction; count: e.g. "11 of the first 100 pairs"."""
        (shard, row), reason = next(reversed(self.bad_rows.items()))
        raise ValueError(
            f"{count} cannot be decoded, more than --max_bad_fraction {self.max_bad_fraction} "
            f"allows; for example {shard} row {row} ({reason}); check the directory with "
            f"python parquet_processing.py --train_data_dir {self.train_data_dir}"
        )

    def _check_bad_fraction(self) -> None:
        """Raise a ValueError if more pairs were replaced than max_bad_fraction allows."""
        epoch_rows = len(self) * self._stream_identity["global_batch_size"]
        num_counted = max(self.num_seen, min(MIN_ROWS_FOR_BAD_FRACTION, epoch_rows))
        if self.num_bad > self.max_bad_fraction * num_counted:
            self._raise_too_many_bad(f"{self.num_bad} of the first {self.num_seen} pairs")


def check_lowest(**values: tuple[int, int]) -> None:
    """Raise a ValueError for an argument below its lowest value: name=(value, lowest)."""
    for name, (value, lowest) in values.items():
        if value < lowest:
            raise ValueError(f"{name}={value} must be at least {lowest}")


def check_options(
    process_index: int, process_count: int, resample: str, max_bad_fraction: float
) -> None:
    """Raise a ValueError for the arguments of ParquetImagePairs that are out of range."""
    if not 0 <= process_index < process_count:
        raise ValueError(
            f"process_index={process_index} must be from 0 to process_count - 1 = "
            f"{process_count - 1}"
        )
    if resample not in RESAMPLING:
        raise ValueError(f"resample={resample} is unknown; use one of {', '.join(RESAMPLING)}")
    if not 0 <= max_bad_fraction <= 1:
        raise ValueError(f"max_bad_fraction={max_bad_fraction} must be from 0 to 1")


def check_enough_rows(
    directory_rows: list[int],
    batch_size: int,
    process_count: int,
    max_rows: int | None,
    train_data_dir: str,
) -> None:
    """Raise a ValueError if a directory has less than one batch; arguments as in partition_rows."""
    is_shared = len(directory_rows) == 1
    num_rows, num_sharing = min(directory_rows), process_count if is_shared else 1
    if num_rows >= batch_size * num_sharing:
        return
    source = train_data_dir if is_shared else "the directory with the fewest rows"
    if max_rows is not None:
        source = f"max_rows={max_rows} of {source}"
    most = num_rows // num_sharing
    remedy = f"use at most {most} pairs per process, --train_batch_size {most * process_count}"
    if num_rows < num_sharing:
        remedy = f"use at most {num_rows} processes"
    raise ValueError(
        f"a batch of {batch_size} pairs on each of {num_sharing} process(es) needs "
        f"{batch_size * num_sharing} pairs, but {source} has {num_rows}; {remedy}"
    )


def open_directories(
    train_data_dir: str,
    columns: tuple[str, str, str],
    all_gather: Callable[[np.ndarray], np.ndarray] | None,
) -> tuple[list[RowGroup], list[list[tuple[int, int, int]]]]:
    """List the row groups of this process's directory, and the shards of all directories.

    Args:
        train_data_dir: directory of *.parquet files.
        columns: see list_row_groups.
        all_gather: see gather_directories.

    Returns:
        (row groups, result of gather_directories).
    """
    try:
        groups = list_row_groups(train_data_dir, *columns)
        shards = shard_ids(groups)
    except BaseException:
        if all_gather is not None:
            # The other processes wait in gather_directories for this one.
            all_gather(np.array([0], np.int32))
        raise
    return groups, gather_directories(shards, all_gather)
