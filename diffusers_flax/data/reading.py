"""Reading and decoding pairs ahead, in threads, with replacements for undecodable pairs.

    pairs = StoredPairs("data", Columns(), Transform(), Processes(), Reading())
    for batch in decode_batches(partial(pairs.read_batches, [epoch]), Reading()): ...

dataset.py and mixture.py choose the rows of each batch.
"""

import hashlib
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from diffusers_flax.data.buckets import BUCKETS, choose_sizes, size_name, stored_sizes
from diffusers_flax.data.decoding import Decoding
from diffusers_flax.data.options import Columns, Processes, Reading, Transform
from diffusers_flax.data.shards import (
    Cells,
    Pair,
    gather_directories,
    gather_rows,
    latents_metadata,
    list_row_groups,
    pair_at,
    read_row_group,
    shard_ids,
    source_columns,
    take_first_rows,
)
from diffusers_flax.data.streaming import is_remote

MIN_ROWS_FOR_BAD_FRACTION = 1000  # max_bad_fraction is tested as if at least this many were read
STREAMED_AHEAD = 4  # row groups of streamed shards that are read ahead, at the same time
GROUPS_READ_AGAIN = 2  # row groups that stay in memory to replace undecodable pairs
logger = logging.getLogger(__name__)


class Epoch(NamedTuple):
    """The rows that a process reads in an epoch, and when."""

    order: np.ndarray  # integers (num_batches, B), rows of the directory
    read_steps: np.ndarray  # (num_batches, B): the batch at which each row is read, up to its own
    # (num_rows, 3) in [0, 1): crop, flip and choice of the instruction of each row.
    draws: np.ndarray

    def after(self, step: int) -> "Epoch":
        """The batches from a step on."""
        read_steps = np.maximum(self.read_steps[step:] - step, 0)
        return Epoch(self.order[step:], read_steps, self.draws)


class BatchRow(NamedTuple):
    """A row of a batch before it is decoded."""

    pairs: "StoredPairs"
    row: int  # of the directory
    pair: Callable[[], Pair]
    draw: np.ndarray  # (3,) in [0, 1), see Decoding.decode


class StoredPairs:
    """The pairs of one directory: reads them ahead, decodes them, replaces undecodable ones.

    Args:
        train_data_dir: directory of *.parquet files, or a URL, see streaming.list_files.
        columns, transform, processes, reading: see options.py.
        masks: batches have masks; zeros if columns.mask is None.
        references: batches have reference images; none if columns.reference_image is None.

    Attributes:
        groups: the row groups of this process's directory.
        directories: see gather_directories.
        directory_rows: rows of each directory.
        num_rows: rows over all processes.
        latents: latents_metadata of the shards, None if they have images.
        epoch_rows: rows of a global epoch.
        num_seen: pairs in the batches of this object so far.
        num_bad: replaced pairs among them.
        bad_rows: {(shard, row): reason}.
        size_of: (rows,), index in decoding.sizes of each row's size.
        size_rows: (directories, sizes), number of rows.
        directory_sizes: after choose_sizes, per directory the number of rows of its row groups and
            size_of; else None.
    """

    def __init__(
        self,
        train_data_dir: str,
        columns: Columns,
        transform: Transform,
        processes: Processes,
        reading: Reading,
        masks: bool = False,
        references: bool = False,
    ):
        self.train_data_dir, self.processes, self.reading = train_data_dir, processes, reading
        try:
            self.groups = list_row_groups(train_data_dir, columns)
            self.latents = latents_metadata(self.groups[0].metadata)
            self.decoding = Decoding(
                transform,
                self.latents,
                masks or columns.mask is not None,
                references or columns.reference_image is not None,
            )
            for group in self.groups:
                self.decoding.check(group)
        except BaseException:
            if processes.all_gather is not None:  # the others wait in gather_directories
                processes.all_gather(np.array([0], np.int32))
            raise
        shards = shard_ids(self.groups)
        self.directories = gather_directories(shards, processes.all_gather)
        self.directory_rows = [sum(rows for *_, rows in shards) for shards in self.directories]
        if reading.max_rows is not None:
            share = reading.max_rows // len(self.directories)
            self.directory_rows = [min(rows, share) for rows in self.directory_rows]
            self.groups = take_first_rows(self.groups, share)
        self.num_rows = self.epoch_rows = sum(self.directory_rows)
        self.num_seen = self.num_bad = 0
        self.bad_rows: dict[tuple[str, int], str] = {}
        self._first_rows = np.cumsum([0] + [group.num_rows for group in self.groups])
        self._is_streamed = is_remote(train_data_dir)
        groups = self.groups
        self._read_again = lru_cache(GROUPS_READ_AGAIN)(lambda g: read_row_group(groups[g]))
        self.size_of = np.zeros(self._first_rows[-1], int)
        self.size_rows = np.array(self.directory_rows)[:, None]
        self.directory_sizes = None

    def choose_sizes(self, batch_size: int) -> None:
        """Choose the sizes with a batch of pairs, and each pair's size, see buckets.choose_sizes.

        Args:
            batch_size: pairs per batch of a process.

        Raises:
            ValueError: a shard is damaged, or latents of a size are less than a batch.
        """
        processes, is_shared = self.processes, len(self.directories) == 1
        stored = stored_sizes(self.groups, self.reading.threads).astype(np.int32)
        group_rows = np.array([group.num_rows for group in self.groups], np.int32)
        if is_shared:
            group_rows, image_sizes = [group_rows], [stored]
            batch_size *= processes.process_count
        else:
            group_rows = gather_rows(group_rows, processes.all_gather)
            image_sizes = gather_rows(stored, processes.all_gather)
        sizes, size_of, self.size_rows = choose_sizes(image_sizes, self.decoding.sizes, batch_size)
        self.size_of = size_of[0 if is_shared else processes.process_index]
        if self.latents and (np.array(sizes)[self.size_of] != stored).any():
            raise ValueError(
                f"{self.train_data_dir} has latents of a size with less than a batch of pairs; "
                "lower --train_batch_size, or make the latents again with "
                f"{BUCKETS} {' '.join(map(size_name, sizes))}"
            )
        self.decoding = replace(
            self.decoding, transform=replace(self.decoding.transform, sizes=sizes)
        )
        self.directory_sizes = [(rows.tolist(), of) for rows, of in zip(group_rows, size_of)]

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Widths and heights of the images in batches."""
        return self.decoding.sizes

    def identity(self) -> dict:
        """Identity of the data, for state_dict."""
        return {
            "columns": sorted({", ".join(source_columns(group)) for group in self.groups}),
            "latents": self.latents and self.latents["vae"],
            "data": hashlib.sha256(str(sorted(self.directories)).encode()).hexdigest()[:16],
        }

    def read_batches(self, epochs: Iterable[Epoch], threads: Executor) -> Iterator[list[BatchRow]]:
        """Yield the rows of each batch of some epochs.

        A row group is in memory while rows are read of it; rows that are read before their batch
        wait as pairs, so that a rare size keeps no row group in memory. One row group is read
        ahead, also of the next epoch; of streamed shards STREAMED_AHEAD.

        Args:
            epochs: one after the other.
            threads: which take pairs from row groups before their batch.
        """

        def read(g: int) -> Cells:
            return read_row_group(self.groups[g])

        num_ahead = STREAMED_AHEAD if self._is_streamed else 1
        plans, plans_ahead = itertools.tee(map(self._plan, epochs))
        needed = (g for *_, groups in plans_ahead for g in groups)
        loader, ahead = ThreadPoolExecutor(num_ahead, "parquet-row-group"), deque()
        try:
            for epoch, rows, groups, _ in plans:
                uses, loaded, pairs, place = np.bincount(groups), {}, {}, 0
                counts = np.bincount(epoch.read_steps.ravel(), minlength=len(epoch.order))
                for batch, count in zip(map(np.ndarray.tolist, epoch.order), counts.tolist()):
                    reads = slice(place, place + count)
                    for row, g in zip(rows[reads].tolist(), groups[reads].tolist()):
                        if g not in loaded:
                            for h in itertools.islice(needed, num_ahead + 1 - len(ahead)):
                                ahead.append(loader.submit(read, h))
                            loaded[g] = ahead.popleft().result()
                        take = partial(pair_at, loaded[g], row - int(self._first_rows[g]))
                        pairs[row] = take if row in batch else threads.submit(take).result
                        uses[g] -= 1
                        if not uses[g]:
                            del loaded[g]
                    place += count
                    yield [BatchRow(self, row, pairs.pop(row), epoch.draws[row]) for row in batch]
        finally:
            loader.shutdown(cancel_futures=True)

    def _plan(self, epoch: Epoch) -> tuple[Epoch, np.ndarray, np.ndarray, list[int]]:
        """An epoch, its rows as they are read, the row group of each, and these in order."""
        turn = np.argsort(epoch.read_steps, axis=None, kind="stable")
        rows = epoch.order.ravel()[turn]
        groups = self._group_of(rows)
        firsts = np.sort(np.unique(groups, return_index=True)[1])
        return epoch, rows, groups, groups[firsts].tolist()

    def _group_of(self, rows: np.ndarray | int) -> np.ndarray:
        """Indices of the row groups of rows."""
        return np.searchsorted(self._first_rows, rows, side="right") - 1

    def decode_replacement(
        self, batch: dict, place: int, row: int, draw: np.ndarray, error: ValueError
    ) -> str:
        """Count an undecodable row, decode a replacement into its place and return its prompt."""
        own, size = int(self._group_of(row)), int(self.size_of[row])
        self.num_bad += 1
        self._record_bad_row(row, error)
        # Later passes count nothing twice: an end and a beginning may both have all bad rows.
        num_bad = min(self.num_bad, len(self.bad_rows))
        least = min(MIN_ROWS_FOR_BAD_FRACTION, self.epoch_rows)
        num_rows = max(min(self.num_seen, len(self.size_of)), least)
        if num_bad > self.reading.max_bad_fraction * num_rows:
            (shard, bad_row), reason = next(reversed(self.bad_rows.items()))
            raise ValueError(
                f"{num_bad} pairs of {self.train_data_dir} cannot be used, more than "
                f"--max_bad_fraction {self.reading.max_bad_fraction} of {num_rows}; for example "
                f"{shard} row {bad_row} ({reason}); parquet_processing.py --train_data_dir lists "
                "them"
            )
        # Cyclically, first of the same row group.
        first, stop, end = (int(self._first_rows[g]) for g in (own, own + 1, -1))
        parts = range(row + 1, stop), range(first, row), range(stop, end), range(first)
        for candidate in itertools.chain(*parts):
            if self.size_of[candidate] != size or self._name(candidate) in self.bad_rows:
                continue
            g = int(self._group_of(candidate))
            try:
                pair = pair_at(self._read_again(g), candidate - int(self._first_rows[g]))
                return self.decoding.decode(batch, place, pair, draw)
            except ValueError as candidate_error:
                self._record_bad_row(candidate, candidate_error)
        raise ValueError(f"none of the pairs of {self.train_data_dir} can be used ({error})")

    def _name(self, row: int) -> tuple[str, int]:
        """(shard name, row of the shard) of a row of the directory."""
        g = int(self._group_of(row))
        group = self.groups[g]
        return group.path.name, group.first_row + row - int(self._first_rows[g])

    def _record_bad_row(self, row: int, error: ValueError) -> None:
        """Log an undecodable row the first time it occurs."""
        name = self._name(row)
        if name not in self.bad_rows:
            self.bad_rows[name] = str(error)
            logger.warning("%s row %d: %s; another row takes its place", *name, error)


def decode_batches(
    read: Callable[[Executor], Iterator[list[BatchRow]]],
    reading: Reading,
) -> Iterator[dict]:
    """Decode batches in threads.

    One thread takes batches from `read` and submits their rows to the decoding threads.

    Args:
        read: of the decoding threads, makes a generator of the rows of each batch.
        reading: number of threads and of batches decoded ahead.

    Yields:
        Batches, see ParquetImagePairs.
    """
    reader = ThreadPoolExecutor(1, "parquet-read")
    decoders = ThreadPoolExecutor(reading.threads, "parquet-decode")
    encoded = read(decoders)

    def start_batch() -> tuple[dict, list[BatchRow], list[Future]] | None:
        rows = next(encoded, None)
        if rows is None:
            return None
        pairs, row = rows[0][:2]
        batch = pairs.decoding.empty_batch(len(rows), pairs.size_of[row])
        batch["edit_prompt"] = []
        return batch, rows, [decoders.submit(decode_row, batch, *row) for row in enumerate(rows)]

    def decode_row(batch: dict, place: int, row: BatchRow) -> str:
        return row.pairs.decoding.decode(batch, place, row.pair(), row.draw)

    try:
        started = deque(reader.submit(start_batch) for _ in range(reading.prefetch_batches))
        while result := started.popleft().result():
            started.append(reader.submit(start_batch))
            batch, rows, futures = result
            for place, ((pairs, row, _, draw), future) in enumerate(zip(rows, futures)):
                try:
                    prompt = future.result()
                except ValueError as error:
                    prompt = pairs.decode_replacement(batch, place, row, draw, error)
                batch["edit_prompt"].append(prompt)
            for row in rows:
                row.pairs.num_seen += 1
            yield batch
    finally:  # also when the consumer stops early
        reader.shutdown(cancel_futures=True)
        decoders.shutdown(cancel_futures=True)
        encoded.close()


def stream_settings(transform: Transform, reading: Reading) -> dict:
    """Options that change the stream of batches, for state_dict."""
    return {
        "shuffle_buffer": reading.shuffle_buffer,
        "resolution": transform.resolution,
        "random_crop": transform.random_crop,
        "random_flip": transform.random_flip,
        "resample": transform.resample,
        "max_rows": reading.max_rows,
    }
