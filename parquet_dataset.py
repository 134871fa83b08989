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

from images import RESAMPLING, num_usable_cores
from parquet_shards import (
    Cells,
    Pair,
    check_latents,
    columns_of,
    compare_folders,
    copy_latents,
    decode_pair,
    first_rows_of,
    identify_shards,
    latents_of,
    list_row_groups,
    pair_at,
    read_row_group,
)

# Parts of an epoch. A process holds a window of row groups of each part that its rows come from:
# with fewer parts one process needs less memory, with more parts many processes read less.
DEFAULT_PARTS = 4
MIN_ROWS_TO_JUDGE = 1000  # a share of broken pairs says nothing before; less if an epoch is less
logger = logging.getLogger(__name__)


def epoch_order(
    group_rows: list[int],
    *,
    seed: list[int],
    num_parts: int,
    rows_per_part: int,
    window: float,
) -> np.ndarray:
    """Shuffle an epoch so that each part needs a few row groups at a time.

    All row groups are laid on a line, whole and in shuffled order, and the line is cut into one
    stretch per part; what is left at its end waits for another epoch. Every row then trains at a
    random moment of its part's epoch, uniform over a window of time around the place of its row
    group in the stretch: so many of the part's rows long that a window's rows are mixed with each
    other, and a row group is needed for the length of its window only. A window as long as the
    stretch makes a uniform shuffle.

    Args:
        group_rows: rows of every row group.
        seed: integers of at least 0 that the order depends on, together with what follows.
        num_parts: stretches.
        rows_per_part: length of each; num_parts of them are at most all rows.
        window: rows; a window is never shorter than its row group's part of the stretch.

    Returns:
        The rows, counted through all row groups, of each part in order of training: integers
        (num_parts, rows_per_part).
    """
    group_rows = np.asarray(group_rows)
    first_rows = np.cumsum(group_rows) - group_rows
    group_of = np.repeat(np.arange(len(group_rows)), group_rows)  # by row
    rng = np.random.default_rng(seed)
    # A row group's own rows are shuffled too: it is chance which of them a cut parts or leaves out.
    line = np.concatenate(
        [first_rows[g] + rng.permutation(group_rows[g]) for g in rng.permutation(len(group_rows))]
    )
    parts = line[: num_parts * rows_per_part].reshape(num_parts, rows_per_part)
    parts[1::2] = parts[1::2, ::-1].copy()  # the row group that two parts share serves both at once

    order = np.empty_like(parts)
    for part, rows in enumerate(parts):
        cuts = np.flatnonzero(np.diff(group_of[rows], prepend=-1, append=-1))  # between row groups
        starts, stops = cuts[:-1], cuts[1:]
        centers, halves = (starts + stops) / 2, np.maximum(stops - starts, window) / 2
        begins = np.maximum(centers - halves, 0)
        ends = np.minimum(centers + halves, rows_per_part)
        if window >= rows_per_part:
            begins, ends = np.zeros_like(begins), np.full_like(ends, rows_per_part)
        moments = rng.uniform(np.repeat(begins, stops - starts), np.repeat(ends, stops - starts))
        order[part] = rows[np.argsort(moments, kind="stable")]
    return order


def register_with_torch(dataset_class: type) -> None:
    """Make a class an IterableDataset, for which DataLoader asks, where torch is imported.

    A base class would need torch, and the seconds that its import takes, where nothing uses it.
    """
    if "torch.utils.data" in sys.modules:
        sys.modules["torch.utils.data"].IterableDataset.register(dataset_class)


def in_torch_worker() -> bool:
    """Whether this is a worker process of a torch DataLoader."""
    data = sys.modules.get("torch.utils.data")
    return data is not None and data.get_worker_info() is not None


class ParquetImagePairs:
    """Batches of image pairs and instructions from a folder of parquet shards.

    Iterating gives one epoch of this process's batches, `len()` of them, the same number on every
    process, and the next iteration the next epoch; `set_epoch` chooses another. Made where torch is
    imported it is a torch IterableDataset: `DataLoader(dataset, batch_size=None)`. Batches are
    dicts of

        original_pixel_values, edited_pixel_values: uint8 (B, R, R, 3)
        edit_prompt: B strings

    or, from a folder of cache_latents.py, instead of the images

        original_latents, edited_latents: float16 (B, h, w, C), (B, h, w, 2 C)

    An epoch has `num_parts` parts, and a global batch is equal slices of them, one after the
    other. If all processes have the same shards, parts are cut out of all rows, each process takes
    an equal share of every global batch in order, and less than one global batch of rows is left
    out. If each process has its own shards, it cuts parts and batches out of these, and rows beyond
    the whole batches of the process with the fewest rows are left out. Other rows are left out in
    every epoch; no row is seen twice in one. Order, crops and flips depend on the data, (seed,
    epoch), the global batch size, `num_parts` and `shuffle_buffer`, see `epoch_order`; they do not
    depend on the number of threads nor, if all processes have the same shards, on the number of
    processes.

    The place of a pair that cannot be decoded is taken by the next row of its row group that can,
    after the last row the first, with the crop and the flip of the pair it stands in for (in a row
    group without any, by the first of the row groups after it). It is counted in `num_bad`, kept
    in `bad_rows` and logged as a warning once.

    Memory: for each part that the process takes rows from, the encoded pairs of its window of
    shuffle_buffer / num_parts rows and of up to two row groups more, but never more than its
    shards; one row group read ahead, and one column of it twice while it is read;
    `prefetch_batches` batches.

    `state_dict()` is where the stream stands after the batch last given; a dataset of the same
    arguments that loads it goes on with the very next batch, the same to the last bit.

    Args:
        train_data_dir: folder with *.parquet files.
        batch_size: pairs per batch of this process.
        resolution: side R of the images, pixels.
        seed: at least 0.
        random_crop: cut the square out anywhere along the longer side; else from the middle, as
            latents are.
        random_flip: mirror half of the pairs.
        resample: "dct", "lanczos" or "bicubic", see `decode_pair`.
        original_image_column, edited_image_column, edit_prompt_column: "" finds the known names.
        max_rows: use the first so many rows only, over all processes; None uses all.
        process_index, process_count: `jax.process_index()` and `jax.process_count()`.
        num_parts: a divisor of the global batch size; 0 takes the greatest common divisor of the
            global batch size and DEFAULT_PARTS.
        all_gather: `jax.experimental.multihost_utils.process_allgather`, by which processes find
            out whether all have the same shards or each its own; needed if each has its own.
        num_threads: that decode; 0 takes as many as there are cores.
        prefetch_batches: decoded ahead of the consumer.
        shuffle_buffer: encoded pairs to draw from, over all processes.
        max_bad_fraction: in [0, 1], the share of pairs that may be replaced (judged as if 1000
            pairs, or an epoch of all processes, had been given at least).

    Raises:
        ValueError: a bad argument, a bad folder (see `list_row_groups`, `compare_folders`) or
            fewer rows than one batch; while iterating, damaged shards or too many broken pairs.
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
        for name, value, lowest in (
            ("batch_size", batch_size, 1),
            ("resolution", resolution, 1),
            ("seed", seed, 0),
            ("max_rows", 1 if max_rows is None else max_rows, 1),
            ("process_count", process_count, 1),
            ("num_parts", num_parts, 0),
            ("num_threads", num_threads, 0),
            ("prefetch_batches", prefetch_batches, 1),
            ("shuffle_buffer", shuffle_buffer, 0),
        ):
            if value < lowest:
                raise ValueError(f"{name}={value} must be at least {lowest}")
        if not 0 <= process_index < process_count:
            raise ValueError(
                f"process_index={process_index} must be from 0 to process_count-1, "
                f"{process_count - 1}"
            )
        global_batch_size = batch_size * process_count
        num_parts = num_parts or math.gcd(global_batch_size, DEFAULT_PARTS)
        if global_batch_size % num_parts:
            raise ValueError(
                f"num_parts={num_parts} does not divide the global batch of {global_batch_size} "
                f"pairs (batch_size={batch_size}, process_count={process_count})"
            )
        if resample not in RESAMPLING:
            raise ValueError(f"resample={resample} is unknown; use {' or '.join(RESAMPLING)}")
        if not 0 <= max_bad_fraction <= 1:
            raise ValueError(f"max_bad_fraction={max_bad_fraction} must be from 0 to 1")

        try:
            self.groups = list_row_groups(
                train_data_dir, original_image_column, edited_image_column, edit_prompt_column
            )
            shards = identify_shards(self.groups)
        except BaseException:
            if all_gather is not None:
                all_gather(np.array([0], np.int32))  # tells the others, who would wait for ever
            raise
        folders = compare_folders(shards, all_gather)
        self.folder_rows = [sum(rows for *_, rows in folder) for folder in folders]
        if max_rows is not None:
            share = max_rows // len(folders)
            self.folder_rows = [min(rows, share) for rows in self.folder_rows]
            self.groups = first_rows_of(self.groups, share)
        if len(folders) == 1:
            self.num_batches = self.folder_rows[0] // global_batch_size
            self._num_cut, self._salt = num_parts, []
            self._num_windows = num_parts  # over all processes
            self._cut_batch_size = global_batch_size
            self._mine = slice(process_index * batch_size, (process_index + 1) * batch_size)
        else:
            self.num_batches = min(self.folder_rows) // batch_size
            self._num_cut = math.gcd(batch_size, max(1, num_parts // process_count))
            self._num_windows = self._num_cut * process_count
            # A folder that moves to another process keeps its order.
            self._salt = list(folders[process_index][0][:2])
            self._cut_batch_size = batch_size
            self._mine = slice(batch_size)
        if self.num_batches == 0:
            rows, sharing = min(self.folder_rows), process_count if len(folders) == 1 else 1
            where = train_data_dir if len(folders) == 1 else "the folder with the fewest"
            if max_rows is not None:
                where = f"max_rows={max_rows} of {where}"
            way_out = f"the batch of a process can be {rows // sharing} at most"
            if rows < sharing:
                way_out = f"use {rows} processes at most"
            raise ValueError(
                f"batch_size={batch_size} needs {batch_size * sharing} rows (process_count="
                f"{process_count}), {where} has {rows}; {way_out}"
            )

        self.latents = latents_of(self.groups[0].metadata)
        for group in self.groups:
            check_latents(group, self.latents, resolution, resample, random_crop)
        self.num_rows = sum(self.folder_rows)  # of all processes
        self.num_seen = 0  # pairs given so far by this object
        self.num_bad = 0  # of them, places that another pair had to take
        self.bad_rows: dict[tuple[str, int], str] = {}  # (shard, row) -> reason
        self._spare: list[np.ndarray] = []  # buffers of row groups, to use again
        self._stand_ins: dict[int, Pair] = {}  # for row groups without a good pair
        pixels = ((resolution, resolution, 3), np.uint8)
        self._arrays = {"original_pixel_values": pixels, "edited_pixel_values": pixels}
        if self.latents:
            h, w, C = self.latents["shape"]
            self._arrays = {
                "original_latents": ((h, w, C), np.float16),
                "edited_latents": ((h, w, 2 * C), np.float16),
            }
        self.train_data_dir = train_data_dir
        self.batch_size = batch_size
        self.resolution = resolution
        self.seed = seed
        self.random_crop = random_crop
        self.random_flip = random_flip
        self.resample = resample
        self.num_parts = num_parts
        self.num_threads = num_threads or num_usable_cores()
        self.prefetch_batches = prefetch_batches
        self.shuffle_buffer = shuffle_buffer
        self.max_bad_fraction = max_bad_fraction
        self.epoch = 0
        self._start = 0  # the batch that the next iteration begins with
        self._batch = 0  # the batch after the one last given
        self._first_rows = np.cumsum([0] + [group.num_rows for group in self.groups])
        self._identity = {
            "seed": seed,
            "global_batch_size": batch_size * process_count,
            "num_parts": num_parts,
            "shuffle_buffer": shuffle_buffer,
            "resolution": resolution,
            "random_crop": random_crop,
            "random_flip": random_flip,
            "resample": resample,
            "max_rows": max_rows,
            "columns": sorted({", ".join(columns_of(group)) for group in self.groups}),
            "latents": self.latents and self.latents["vae"],
            "data": hashlib.sha256(str(sorted(folders)).encode()).hexdigest()[:16],
        }

    def __len__(self) -> int:
        """Batches per epoch of every process."""
        return self.num_batches

    def __getitem__(self, index):
        """DataLoader calls this if the object is no IterableDataset; raises a TypeError."""
        raise TypeError(
            "import torch before ParquetImagePairs is made; DataLoader then iterates it"
        )

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch (from 0) that the next iteration gives."""
        self.epoch, self._start, self._batch = epoch, 0, 0

    def state_dict(self) -> dict:
        """Where the stream stands and what it is a stream of, the same on every process."""
        return {"epoch": self.epoch, "batch": self._batch, **self._identity}

    def load_state_dict(self, state: dict) -> None:
        """Have the next iteration go on where `state_dict` was taken.

        Raises:
            ValueError: the state is of another stream; all that differs is named.
        """
        different = [
            f"{name} was {state.get(name)} and is {value}"
            for name, value in self._identity.items()
            if state.get(name) != value
        ]
        if different:
            raise ValueError(
                f"the data cannot go on where they stopped: {'; '.join(different)}"
                + (" (other shards)" if state.get("data") != self._identity["data"] else "")
            )
        if not (state["epoch"] >= 0 and 0 <= state["batch"] < len(self)):
            raise ValueError(
                f"epoch={state['epoch']}, batch={state['batch']} is no place in epochs of "
                f"{len(self)} batches"
            )
        self.epoch, self._start = state["epoch"], state["batch"]
        self._batch = self._start

    def __iter__(self) -> Iterator[dict]:
        if in_torch_worker():
            raise ValueError(
                "DataLoader's num_workers must be 0: ParquetImagePairs decodes in num_threads "
                "threads of its own"
            )
        start, self._start = self._start, 0
        self._batch = start
        order, draws = self._draw_epoch()
        encoded = self._read_in_order(order[start:])

        # One thread reads and hands the rows on to the others; the consumer only collects.
        reader = ThreadPoolExecutor(1, "parquet-read")
        decoders = ThreadPoolExecutor(self.num_threads, "parquet-decode")

        def start_batch() -> tuple[dict, list, list[Future]]:
            rows = next(encoded)
            batch = {
                name: np.empty((self.batch_size, *shape), dtype)
                for name, (shape, dtype) in self._arrays.items()
            }
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
                        prompt = self._replace(batch, place, row, cells, draws[row], error)
                    batch["edit_prompt"].append(prompt)
                self.num_seen += self.batch_size
                self._check_bad_fraction()
                self._batch = step + 1
                if self._batch == len(self):
                    self.epoch, self._batch = self.epoch + 1, 0
                yield batch
        finally:  # also when the consumer stops early
            reader.shutdown(cancel_futures=True)
            decoders.shutdown(cancel_futures=True)
            encoded.close()
            pa.default_memory_pool().release_unused()

    def _draw_epoch(self) -> tuple[np.ndarray, np.ndarray]:
        """The epoch's rows, batch by batch, and the two numbers that are each row's crop and flip.

        Returns:
            order: rows of this process's folder, (batches, B) integers.
            draws: by row of the folder, (rows, 2) in [0, 1).
        """
        slice_size = self._cut_batch_size // self._num_cut  # of a batch, from one part
        parts = epoch_order(
            [group.num_rows for group in self.groups],
            seed=[self.seed, self.epoch, 0, *self._salt],
            num_parts=self._num_cut,
            rows_per_part=len(self) * slice_size,
            window=self.shuffle_buffer / self._num_windows,
        )
        order = parts.reshape(self._num_cut, len(self), slice_size).swapaxes(0, 1)
        order = order.reshape(len(self), self._cut_batch_size)[:, self._mine]
        rng = np.random.default_rng([self.seed, self.epoch, 1, *self._salt])
        return order, rng.random((self._first_rows[-1], 2))

    def _read_in_order(self, order: np.ndarray) -> Iterator[list[tuple[int, Cells]]]:
        """For each batch of `order`, (batches, B), its rows, each with the cells of its row group.

        A row group is kept from the first batch that needs it to the last, and one is read ahead.
        """
        groups = np.searchsorted(self._first_rows, order, side="right") - 1
        first_use, last_use = {}, {}
        for step, needed in enumerate(groups.tolist()):
            for g in needed:
                first_use.setdefault(g, step)
                last_use[g] = step
        upcoming = deque(first_use.items())
        held: dict[int, Future] = {}
        newest = -1  # first use of the row group that was asked for last
        loader = ThreadPoolExecutor(1, "parquet-row-group")
        try:
            for step, (rows, needed) in enumerate(zip(order.tolist(), groups.tolist())):
                while upcoming and newest <= step:
                    g, newest = upcoming.popleft()
                    held[g] = loader.submit(read_row_group, self.groups[g], self._spare)
                yield [(row, held[g].result()) for row, g in zip(rows, needed)]
                for g in set(needed):
                    if last_use[g] == step:
                        del held[g]
        finally:
            loader.shutdown(cancel_futures=True)

    def _locate(self, row: int) -> tuple[int, int]:
        """The row group of a row, and its place in that."""
        g = int(np.searchsorted(self._first_rows, row, side="right")) - 1
        return g, row - int(self._first_rows[g])

    def _decode_row(self, batch: dict, place: int, row: int, cells: Cells, draw: np.ndarray) -> str:
        """Decode a row into its place in a batch, cropped and flipped as drawn; its prompt."""
        g, position = self._locate(row)
        return self._decode_pair(batch, place, g, pair_at(cells, position), draw)

    def _decode_pair(self, batch: dict, place: int, g: int, pair: Pair, draw: np.ndarray) -> str:
        """The same for a pair that was read from row group g."""
        out = tuple(batch[name][place] for name in self._arrays)
        columns, flip = self.groups[g].columns, self.random_flip and bool(draw[1] < 0.5)
        if self.latents:
            copy_latents(pair, out, columns, flip)
        else:
            crop = draw[0] if self.random_crop else 0.5
            decode_pair(pair, out, columns, self.resample, crop, flip)
        return pair.prompt

    def _replace(
        self, batch: dict, place: int, row: int, cells: Cells, draw: np.ndarray, error: ValueError
    ) -> str:
        """Count a row that cannot be decoded and put the next good one in its place; its prompt."""
        g, position = self._locate(row)
        self.num_bad += 1
        self._note_bad(g, position, error)
        if g in self._stand_ins:
            return self._decode_pair(batch, place, g, self._stand_ins[g], draw)
        for other, other_cells in self._rows_after(row, cells):
            h, other_position = self._locate(other)
            if self._name(h, other_position) in self.bad_rows:
                continue
            try:
                pair = pair_at(other_cells, other_position)
                prompt = self._decode_pair(batch, place, h, pair, draw)
            except ValueError as other_error:
                self._note_bad(h, other_position, other_error)
                continue
            if h != g:  # the whole row group is bad: not to be looked through again
                self._stand_ins[g] = pair
            return prompt
        raise ValueError(
            f"none of the {self._first_rows[-1]} pairs of {self.train_data_dir} can be decoded "
            f"({next(iter(self.bad_rows.values()))})"
        )

    def _rows_after(self, row: int, cells: Cells) -> Iterator[tuple[int, Cells]]:
        """The other rows of a row's group and then of all others, with the cells of their group."""
        own, position = self._locate(row)
        first, count = int(self._first_rows[own]), self.groups[own].num_rows
        for place in (*range(position + 1, count), *range(position)):
            yield first + place, cells
        for g in (*range(own + 1, len(self.groups)), *range(own)):
            cells = read_row_group(self.groups[g])
            for place in range(self.groups[g].num_rows):
                yield int(self._first_rows[g]) + place, cells

    def _name(self, g: int, position: int) -> tuple[str, int]:
        """Shard and row of a row group's row."""
        return self.groups[g].path.name, self.groups[g].first_row + position

    def _note_bad(self, g: int, position: int, error: ValueError) -> None:
        """Name a row that cannot be decoded, the first time; stop if there are too many."""
        name = self._name(g, position)
        if name not in self.bad_rows:
            self.bad_rows[name] = str(error)
            logger.warning("%s row %d: %s; another row takes its place", *name, error)
        num_rows = int(self._first_rows[-1])
        if len(self.bad_rows) > self.max_bad_fraction * max(num_rows, MIN_ROWS_TO_JUDGE):
            self._stop(f"{len(self.bad_rows)} of the {num_rows} pairs of {self.train_data_dir}")

    def _stop(self, what: str) -> None:
        (shard, row), reason = next(reversed(self.bad_rows.items()))
        raise ValueError(
            f"{what} cannot be decoded, more than max_bad_fraction={self.max_bad_fraction} allows; "
            f"for one {shard} row {row} ({reason}); check the folder with "
            f"python parquet_processing.py --train_data_dir {self.train_data_dir}"
        )

    def _check_bad_fraction(self) -> None:
        """Stop where more pairs than allowed had to be replaced."""
        epoch = len(self) * self._identity["global_batch_size"]
        judged = max(self.num_seen, min(MIN_ROWS_TO_JUDGE, epoch))
        if self.num_bad > self.max_bad_fraction * judged:
            self._stop(f"{self.num_bad} of the first {self.num_seen} pairs")
