"""Reading and decoding pairs ahead, in threads, with replacements for undecodable pairs.

    pairs = StoredPairs("data", Columns(), Transform(), Processes(), Reading())
    for rows in pairs.read_batches([order]): ...

dataset.py and mixture.py choose the rows of each batch.
"""

import hashlib
import itertools
import logging
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from diffusers_flax.data import streaming
from diffusers_flax.data.buckets import BUCKETS, choose_sizes, count_sizes, size_name, stored_sizes
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
    start_fetching,
    take_first_rows,
)
from diffusers_flax.data.streaming import changed_files, is_remote, versions_of
from diffusers_flax.messages import differences

MIN_ROWS_FOR_BAD_FRACTION = 1000  # max_bad_fraction is tested as if at least this many were read
GROUPS_READ_AGAIN = 2  # row groups that stay in memory to replace undecodable pairs
logger = logging.getLogger(__name__)


class ReadingPlan(NamedTuple):
    """An order of batches and when its row groups are read; steps count over all orders."""

    number: int  # of the order; 0 for all if row groups are kept
    order: np.ndarray  # (num_batches, B), rows of the directory
    groups: np.ndarray  # (num_batches, B), their row groups
    readings: list[tuple[int, tuple[int, int]]]  # first step and (number, row group), sorted
    freed: dict[int, list[int]]  # step -> row groups that are not needed after it
    early: dict[int, list[tuple[int, int]]]  # step -> (row, row group) of rows of later batches


class StoredPairs:
    """The pairs of one directory: reads them ahead, decodes them, replaces undecodable ones.

    Args:
        train_data_dir: directory of *.parquet files, or a URL, see streaming.list_files.
        columns, transform, processes, reading: see options.py.
        masks: batches have masks; zeros if columns.mask is None.

    Attributes:
        groups: the row groups of this process's directory.
        directories: see gather_directories.
        is_streamed: whether the directory is a URL.
        versions: of streamed shards that all processes read, see streaming.versions_of.
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
        sizes_left_out: sizes without a batch of pairs, see choose_sizes.
    """

    def __init__(
        self,
        train_data_dir: str,
        columns: Columns,
        transform: Transform,
        processes: Processes,
        reading: Reading,
        masks: bool = False,
    ):
        self.train_data_dir, self.processes, self.reading = train_data_dir, processes, reading
        try:
            self.groups = list_row_groups(train_data_dir, columns)
            self.latents = latents_metadata(self.groups[0].metadata)
            self.decoding = Decoding(transform, self.latents, masks or columns.mask is not None)
            for group in self.groups:
                self.decoding.check(group)
            shards = shard_ids(self.groups)
        except BaseException:
            if processes.all_gather is not None:  # the others wait in gather_directories
                processes.all_gather(np.array([0], np.int32))
            raise
        self.directories = gather_directories(shards, processes.all_gather)
        is_shared = len(self.directories) == 1  # else versions differ between processes
        self.versions = versions_of(shards.values()) if is_shared else {}
        self.directory_rows = [sum(rows for *_, rows in shards) for shards in self.directories]
        if reading.max_rows is not None:
            share = reading.max_rows // len(self.directories)
            self.directory_rows = [min(rows, share) for rows in self.directory_rows]
            self.groups = take_first_rows(self.groups, share)
        self.num_rows = self.epoch_rows = sum(self.directory_rows)
        self.num_seen = self.num_bad = 0
        self.bad_rows: dict[tuple[str, int], str] = {}
        self._first_rows = np.cumsum([0] + [group.num_rows for group in self.groups])
        self._spare_buffers: list[np.ndarray] = []  # for reuse by read_row_group
        self.is_streamed = is_remote(train_data_dir)
        self._num_readers, self._more_ahead = 1, 0  # threads; row groups ahead besides the next
        if self.is_streamed:
            largest = max(g.metadata.row_group(g.index).total_byte_size for g in self.groups)
            self._num_readers = streaming.NUM_READERS
            more_ahead = streaming.READ_AHEAD_BYTES // largest
            self._more_ahead = min(more_ahead, streaming.MAX_GROUPS_AHEAD)
        # {(row group, size): pair} of row groups without a decodable pair of the size.
        self._replacements: dict[tuple[int, int], Pair] = {}
        # With sizes an undecodable pair comes without its row group, which more pairs may need.
        groups = self.groups
        self._read_again = lru_cache(GROUPS_READ_AGAIN)(lambda g: read_row_group(groups[g]))
        self.size_of = np.zeros(self._first_rows[-1], int)
        self.size_rows = np.array(self.directory_rows)[:, None]
        self.directory_sizes = None
        self.sizes_left_out = ()

    def choose_sizes(self, batch_size: int) -> None:
        """Choose the sizes with a batch of pairs, and each pair's size, see buckets.choose_sizes.

        Args:
            batch_size: pairs per batch of a process.

        Raises:
            ValueError: a shard is damaged, or latents of a size are less than a batch.
        """
        processes, all_gather = self.processes, self.processes.all_gather
        if len(self.directories) == 1:
            batch_size, all_gather = batch_size * processes.process_count, None
        group_rows = np.array([group.num_rows for group in self.groups], np.int32)
        try:
            image_sizes = stored_sizes(self.groups, self.reading.threads, processes)
            image_sizes = image_sizes.astype(np.int32)
        except BaseException:
            if all_gather is not None:  # the other processes wait for this one
                gather_rows(group_rows[:0], all_gather)
            raise
        group_rows, image_sizes = (
            [x] if all_gather is None else gather_rows(x, all_gather)
            for x in (group_rows, image_sizes)
        )
        sizes, size_of = choose_sizes(image_sizes, self.decoding.sizes, batch_size)
        if self.latents:
            self._check_latent_sizes(np.concatenate(image_sizes), sizes, np.concatenate(size_of))
        self.sizes_left_out = tuple(size for size in self.decoding.sizes if size not in sizes)
        self.decoding = replace(
            self.decoding, transform=replace(self.decoding.transform, sizes=sizes)
        )
        self.size_of = size_of[processes.process_index if len(size_of) > 1 else 0]
        self.size_rows = count_sizes(size_of, len(sizes))
        self.directory_sizes = [(rows.tolist(), of) for rows, of in zip(group_rows, size_of)]

    def _check_latent_sizes(self, stored: np.ndarray, sizes: tuple, size_of: np.ndarray) -> None:
        """Raise a ValueError if a size of latents was left out."""
        is_other = (np.array(sizes)[size_of] != stored).any(axis=1)
        if is_other.any():
            (few, *_), counts = np.unique(stored[is_other], axis=0, return_counts=True)
            raise ValueError(
                f"{self.train_data_dir} has latents of {size_name(few)} for {counts[0]} pairs, "
                "which are less than a batch; lower --train_batch_size, or make the latents again "
                f"with {BUCKETS} {' '.join(map(size_name, sizes))}"
            )

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Widths and heights of the images in batches."""
        return self.decoding.sizes

    def image_shapes(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """For each size, {array in a batch: shape of a row}.

        Sizes are named WIDTHxHEIGHT; without buckets the only name is "".
        """
        sizes = self.decoding.sizes
        names = [""] if self.directory_sizes is None else map(size_name, sizes)
        return {
            name: {key: x.shape[1:] for key, x in self.decoding.empty_batch(0, size).items()}
            for size, name in enumerate(names)
        }

    def identity(self) -> dict:
        """Identity of the data, for state_dict."""
        return {
            "columns": sorted({", ".join(source_columns(group)) for group in self.groups}),
            "latents": self.latents and self.latents["vae"],
            "data": hashlib.sha256(str(sorted(self.directories)).encode()).hexdigest()[:16],
        }

    def read_batches(
        self, orders: Iterable[tuple[np.ndarray, np.ndarray]], keep: bool = False
    ) -> Iterator[list[tuple[int, Cells | Pair | ValueError]]]:
        """Yield the rows of each batch with the cells of their row groups.

        A row group stays in memory from the first to the last batch of an order at which it is
        read. A row that is read before its batch comes with its pair, or the error of reading it,
        so that a rare size keeps no row group in memory. One row group is read ahead, also of the
        next order; of streamed shards streaming.READ_AHEAD_BYTES.

        Args:
            orders: (order, read_steps), integers (num_batches, B) each: rows of the directory, and
                the batch at which each row is read, not after its own.
            keep: keep all row groups in memory.
        """
        plans, plans_to_read = itertools.tee(self._plan_reading(orders, keep))
        readings = itertools.chain.from_iterable(plan.readings for plan in plans_to_read)
        loaded: dict[tuple[int, int], Future] = {}
        waiting: dict[int, Pair | ValueError] = {}
        newest_step, step = -1, -1  # at which the row group submitted last is needed; now
        ahead = deque()  # steps of the row groups that are not needed yet
        loader = ThreadPoolExecutor(self._num_readers, "parquet-row-group")
        try:
            for plan in plans:
                for rows, groups in zip(plan.order, plan.groups):
                    step += 1
                    while ahead and ahead[0] <= step:
                        ahead.popleft()
                    while (newest_step <= step or len(ahead) < self._more_ahead) and (
                        reading := next(readings, None)
                    ):
                        newest_step, key = reading
                        if newest_step > step:
                            ahead.append(newest_step)
                        if key not in loaded:
                            group = self.groups[key[1]]
                            loaded[key] = loader.submit(read_row_group, group, self._spare_buffers)
                    for row, g in plan.early.get(step, ()):
                        waiting[row] = self._pair_or_error(row, loaded[plan.number, g].result())
                    yield [
                        (row, waiting.pop(row, None) or loaded[plan.number, g].result())
                        for row, g in zip(rows.tolist(), groups.tolist())
                    ]
                    for g in plan.freed.get(step, ()):
                        del loaded[plan.number, g]
        finally:
            loader.shutdown(cancel_futures=True)

    def stop_waiting(self, stop: bool) -> None:
        """Make threads that wait for a streamed shard give up, or let them wait again."""
        for path in {group.path for group in self.groups} if self.is_streamed else ():
            (path.stopped.set if stop else path.stopped.clear)()

    def fetch_ahead(self, order: np.ndarray) -> None:
        """Begin to fetch the first row groups of a streamed directory's order: what is kept."""
        groups = np.searchsorted(self._first_rows, order.ravel(), side="right") - 1
        bytes_left = streaming.CACHE_BYTES
        for group in map(self.groups.__getitem__, dict.fromkeys(groups.tolist())):
            bytes_left -= group.metadata.row_group(group.index).total_byte_size
            if bytes_left < 0:
                break
            start_fetching(group)

    def _pair_or_error(self, row: int, cells: Cells) -> Pair | ValueError:
        """The encoded pair of a row, or the error of reading it."""
        try:
            return pair_at(cells, self._locate(row)[1])
        except ValueError as error:
            return error

    def _plan_reading(
        self, orders: Iterable[tuple[np.ndarray, np.ndarray]], keep: bool
    ) -> Iterator[ReadingPlan]:
        """Yield the ReadingPlan of each order; arguments as in read_batches."""
        first_step = 0
        for number, (order, read_steps) in enumerate(orders):
            number *= not keep
            groups = np.searchsorted(self._first_rows, order, side="right") - 1
            steps = read_steps.ravel()
            turn = np.argsort(steps, kind="stable")  # of reading
            steps, read = first_step + steps[turn], groups.ravel()[turn]
            used, firsts = np.unique(read, return_index=True)
            lasts = len(read) - 1 - np.unique(read[::-1], return_index=True)[1]
            by_turn = np.argsort(firsts)
            keys = ((number, g) for g in used[by_turn].tolist())
            freed, early = {}, {}
            for g, step in () if keep else zip(used.tolist(), steps[lasts].tolist()):
                freed.setdefault(step, []).append(g)
            own_steps = np.arange(len(order))[:, None]
            for place in np.argwhere(read_steps < own_steps).tolist():
                row, g, step = (int(x[tuple(place)]) for x in (order, groups, read_steps))
                early.setdefault(first_step + step, []).append((row, g))
            readings = list(zip(steps[firsts[by_turn]].tolist(), keys))
            yield ReadingPlan(number, order, groups, readings, freed, early)
            first_step += len(order)

    def _locate(self, row: int) -> tuple[int, int]:
        """(index of a row's row group, position in it)."""
        g = int(np.searchsorted(self._first_rows, row, side="right")) - 1
        return g, row - int(self._first_rows[g])

    def decode_row(
        self, batch: dict, place: int, row: int, found: Cells | Pair | ValueError, draw: np.ndarray
    ) -> str:
        """Decode a row into batch[...][place], cropped and flipped by draw; return its prompt."""
        g, position = self._locate(row)
        if isinstance(found, ValueError):
            raise found
        pair = pair_at(found, position) if isinstance(found, Cells) else found
        return self.decoding.decode(batch, place, pair, self.groups[g].columns, draw)

    def decode_replacement(
        self,
        batch: dict,
        place: int,
        row: int,
        found: Cells | Pair | ValueError,
        draw: np.ndarray,
        error: ValueError,
    ) -> str:
        """Count an undecodable row, decode a replacement into its place and return its prompt."""
        g, position = self._locate(row)
        size = int(self.size_of[row])
        self.num_bad += 1
        self._record_bad_row(g, position, error)
        if (g, size) in self._replacements:
            pair, columns = self._replacements[g, size], self.groups[g].columns
            return self.decoding.decode(batch, place, pair, columns, draw)
        cells = found if isinstance(found, Cells) else self._read_again(g)
        for candidate, candidate_cells in self._following_rows(row, cells):
            h, candidate_position = self._locate(candidate)
            if (
                self.size_of[candidate] != size
                or self._shard_and_row(h, candidate_position) in self.bad_rows
            ):
                continue
            try:
                pair = pair_at(candidate_cells, candidate_position)
                prompt = self.decoding.decode(batch, place, pair, self.groups[h].columns, draw)
            except ValueError as candidate_error:
                self._record_bad_row(h, candidate_position, candidate_error)
                continue
            if h != g:  # no row of the row group is decodable: do not search it again
                self._replacements[g, size] = pair
            return prompt
        raise ValueError(
            f"none of the {np.sum(self.size_of == size)} pairs of {self.train_data_dir} can "
            f"be used ({next(iter(self.bad_rows.values()))})"
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
        num_rows = max(int(self._first_rows[-1]), MIN_ROWS_FOR_BAD_FRACTION)
        self._check_bad(len(self.bad_rows), num_rows)

    def _check_bad(self, num_bad: int, num_rows: int) -> None:
        """Raise a ValueError if more of some rows are bad than max_bad_fraction."""
        if num_bad <= self.reading.max_bad_fraction * num_rows:
            return
        (shard, row), reason = next(reversed(self.bad_rows.items()))
        raise ValueError(
            f"{num_bad} pairs of {self.train_data_dir} cannot be used, more than "
            f"--max_bad_fraction {self.reading.max_bad_fraction} of {num_rows}; for example "
            f"{shard} row {row} ({reason}); parquet_processing.py --train_data_dir lists them"
        )

    def count_seen(self, num_pairs: int) -> None:
        """Add to num_seen; raise a ValueError for more replaced pairs than max_bad_fraction."""
        self.num_seen += num_pairs
        # Later passes count nothing twice: an end and a beginning may both have all bad rows.
        num_bad = min(self.num_bad, len(self.bad_rows))
        num_seen = min(self.num_seen, int(self._first_rows[-1]))
        least = min(MIN_ROWS_FOR_BAD_FRACTION, self.epoch_rows)
        self._check_bad(num_bad, max(num_seen, least))


class BatchRow(NamedTuple):
    """A row of a batch before it is decoded."""

    pairs: StoredPairs
    row: int  # of the directory
    found: Cells | Pair | ValueError  # its row group's cells, its pair, or the error of reading it
    draw: np.ndarray  # (3,) in [0, 1), see Decoding.decode


def decode_batches(
    encoded: Iterator[list[BatchRow]], reading: Reading, sets: Iterable[StoredPairs]
) -> Iterator[dict]:
    """Decode batches in threads.

    One thread takes batches from `encoded` and submits their rows to the decoding threads.

    Args:
        encoded: generator of the rows of each batch.
        reading: number of threads and of batches decoded ahead.
        sets: which the rows are of.

    Yields:
        Batches, see ParquetImagePairs.
    """
    for pairs in sets:
        pairs.stop_waiting(False)
    pool = pa.default_memory_pool()
    reader = ThreadPoolExecutor(1, "parquet-read")
    decoders = ThreadPoolExecutor(reading.threads, "parquet-decode")

    def start_batch() -> tuple[dict, list[BatchRow], list[Future]] | None:
        rows = next(encoded, None)
        if rows is None:
            return None
        pairs, row = rows[0][:2]
        batch = pairs.decoding.empty_batch(len(rows), pairs.size_of[row])
        batch["edit_prompt"] = []
        futures = [
            decoders.submit(pairs.decode_row, batch, place, *row)
            for place, (pairs, *row) in enumerate(rows)
        ]
        return batch, rows, futures

    try:
        started = deque(reader.submit(start_batch) for _ in range(reading.prefetch_batches))
        while result := started.popleft().result():
            started.append(reader.submit(start_batch))
            batch, rows, futures = result
            for place, ((pairs, *row), future) in enumerate(zip(rows, futures)):
                try:
                    prompt = future.result()
                except ValueError as error:
                    prompt = pairs.decode_replacement(batch, place, *row, error)
                batch["edit_prompt"].append(prompt)
            for pairs, num_pairs in Counter(row.pairs for row in rows).items():
                pairs.count_seen(num_pairs)
            del result, rows, futures  # and with them the cells
            yield batch
    finally:  # also when the consumer stops early
        for pairs in sets:
            pairs.stop_waiting(True)
        reader.shutdown(cancel_futures=True)
        decoders.shutdown(cancel_futures=True)
        encoded.close()
        pool.release_unused()


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


def check_same_stream(state: dict, identity: dict, versions: dict[str, str]) -> None:
    """Raise a ValueError that names all differences if a saved state is of another stream.

    Args:
        state: of state_dict.
        identity: settings and data of this stream.
        versions: of its streamed shards.
    """
    different = changed_files(state.get("versions"), versions) + differences(state, identity)
    if different:
        raise ValueError(f"cannot resume the data: {'; '.join(different)}")
