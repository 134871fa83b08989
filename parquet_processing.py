"""Parquet shards of (picture, instruction, edited picture) to training batches.

The data half of flax_train_instruct_pix2pix.py. Run by itself it describes a folder of shards
and draws some of its pairs:

    python parquet_processing.py --train_data_dir data

A sample of a few rows, quick on one CPU core:

    python parquet_processing.py --train_data_dir data --num_checked 100 --num_preview 4

Needs a CPU only. A pair of 512x512 JPEGs takes 10 to 20 ms of one core to decode and scale to
256x256. Pictures are prepared as in InstructPix2Pix (arXiv 2211.09800).
"""

import io
import logging
import math
import os
import sys
import textwrap
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import simplejpeg
import tyro
from PIL import Image, ImageDraw, ImageFont, ImageOps, UnidentifiedImageError
from tqdm import tqdm

# What the public datasets call the three columns, by the flag that names another.
KNOWN_COLUMNS = {
    "original_image_column": ("original_image", "input_image"),
    "edited_image_column": ("edited_image",),
    "edit_prompt_column": ("edit_prompt",),
}
RESAMPLING = {"lanczos": Image.Resampling.LANCZOS, "bicubic": Image.Resampling.BICUBIC}
EXIF_ORIENTATION = 0x0112
READ_ROWS = 16  # rows taken from a row group at a time
READ_BYTES = 1 << 20  # from disk at a time; without it pyarrow fetches whole column chunks

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Config:
    train_data_dir: str  # folder with the *.parquet shards
    original_image_column: str = ""  # picture to edit; "" finds original_image or input_image
    edited_image_column: str = ""  # picture after the edit; "" finds edited_image
    edit_prompt_column: str = ""  # instruction; "" finds edit_prompt
    num_checked: int = 2000  # rows to decode, from row groups all over the folder; 0: all rows
    num_named: int = 20  # unreadable rows to name
    preview: str = "preview.png"  # picture of some pairs; "" draws none
    num_preview: int = 8  # pairs in it
    resolution: int = 256  # side of its pictures, pixels


class Pair(NamedTuple):
    """One row as it is stored: two encoded pictures and the instruction."""

    original: bytes | None
    edited: bytes | None
    prompt: str | None


class RowGroup(NamedTuple):
    """The unit parquet is read in, and where its rows stand in their shard."""

    path: Path
    metadata: pq.FileMetaData
    columns: tuple[str, str, str]  # original picture, edited picture, prompt
    index: int  # among the row groups of the shard
    first_row: int  # row of the shard it begins at
    num_rows: int


def list_row_groups(
    train_data_dir: str,
    original_image_column: str = "",
    edited_image_column: str = "",
    edit_prompt_column: str = "",
) -> list[RowGroup]:
    """Open every shard of a folder, check its columns and list its row groups.

    Args:
        train_data_dir: folder with *.parquet files; they are taken in the order of their names.
        original_image_column: column of the picture to edit; "" looks for the known names.
        edited_image_column: column of the edited picture; "" looks for the known name.
        edit_prompt_column: column of the instruction; "" looks for the known name.

    Returns:
        The row groups that have rows, in order.

    Raises:
        ValueError: no such folder, no shards, unreadable shards (all are named), a column that is
            missing or of the wrong type, or no rows at all.
    """
    folder = Path(train_data_dir)
    if not folder.is_dir():
        raise ValueError(f"train_data_dir={folder} is not a folder; give the one with the shards")
    paths = sorted(folder.glob("*.parquet"))
    if not paths:
        raise ValueError(f"train_data_dir={folder} holds no *.parquet file; download shards to it")

    shards, unreadable = [], []
    for path in paths:
        try:
            shards.append((path, pq.read_metadata(path)))
        except (pa.ArrowException, OSError) as error:
            unreadable.append(f"{path.name} ({one_line(error)})")
    if unreadable:
        raise ValueError(
            f"{len(unreadable)} of {len(paths)} shards in {folder} cannot be read as parquet: "
            f"{', '.join(unreadable)}; delete and download again"
        )

    names = (original_image_column, edited_image_column, edit_prompt_column)
    groups = []
    for path, metadata in shards:
        columns = find_columns(metadata.schema.to_arrow_schema(), path, *names)
        first_row = 0
        for index in range(metadata.num_row_groups):
            num_rows = metadata.row_group(index).num_rows
            if num_rows:
                groups.append(RowGroup(path, metadata, columns, index, first_row, num_rows))
            first_row += num_rows
    if not groups:
        raise ValueError(f"the {len(paths)} shards in {folder} have 0 rows; nothing to train on")
    return groups


def find_columns(
    schema: pa.Schema, path: Path, original: str = "", edited: str = "", prompt: str = ""
) -> tuple[str, str, str]:
    """Names of the original, edited and prompt columns of a shard, each given or "" to look for.

    Raises:
        ValueError: a column is missing, or is neither text nor encoded pictures as it should be.
    """
    found = []
    for flag, given in zip(KNOWN_COLUMNS, (original, edited, prompt)):
        names = (given,) if given else KNOWN_COLUMNS[flag]
        name = next((name for name in names if name in schema.names), None)
        if name is None:
            raise ValueError(
                f"{path} has no column {' or '.join(names)}; it has {', '.join(schema.names)}: "
                f"choose with --{flag}"
            )
        kind = schema.field(name).type
        if flag == "edit_prompt_column":
            wanted, fits = "text", pa.types.is_string(kind) or pa.types.is_large_string(kind)
        else:
            wanted = "encoded pictures (binary, or a struct with a binary field bytes)"
            if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
                stored = kind.field("bytes").type
            else:
                stored = kind
            fits = pa.types.is_binary(stored) or pa.types.is_large_binary(stored)
        if not fits:
            raise ValueError(
                f"{path}: column {name} is {kind}, not {wanted}; it has "
                f"{', '.join(schema.names)}: choose with --{flag}"
            )
        found.append(name)
    return tuple(found)


def read_rows(group: RowGroup, start: int = 0, stop: int | None = None) -> Iterator[Pair]:
    """Read rows start to stop of a row group in order, a few at a time.

    Raises:
        ValueError: the row group's data are damaged.
    """
    stop = group.num_rows if stop is None else stop
    try:
        with pq.ParquetFile(
            group.path, metadata=group.metadata, pre_buffer=False, buffer_size=READ_BYTES
        ) as file:
            position = 0
            for table in file.iter_batches(
                READ_ROWS, [group.index], list(dict.fromkeys(group.columns)), use_threads=False
            ):
                low, high = max(start - position, 0), min(stop - position, len(table))
                if low < high:
                    part = table.slice(low, high - low)
                    cells = [part.column(name) for name in group.columns]
                    cells = [
                        pc.struct_field(cell, "bytes") if pa.types.is_struct(cell.type) else cell
                        for cell in cells
                    ]
                    yield from map(Pair, *(cell.to_pylist() for cell in cells))
                position += len(table)
                if position >= stop:
                    return
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"{group.path}: row group {group.index} cannot be read ({one_line(error)}); "
            "delete the shard and download it again"
        ) from error


def decode_picture(data: bytes, min_side: int = 0) -> Image.Image:
    """Decode one picture to upright RGB.

    Args:
        data: an encoded picture of any format Pillow reads. Plain JPEGs go through simplejpeg,
            which lets other threads run meanwhile.
        min_side: a JPEG at least twice as large may come back smaller, by a half or more, but
            with no side below this; 0 decodes at full size.

    Raises:
        ValueError: the data are no picture, cut short or damaged.
    """
    try:
        image = Image.open(io.BytesIO(data))  # reads the header only
        upright = image.getexif().get(EXIF_ORIENTATION, 1) == 1
        if image.format == "JPEG" and image.mode in ("RGB", "L") and upright:
            side = min_side if min(image.size) >= 2 * min_side else 0
            # Strict by default: a warning of libjpeg (premature end, corrupt data) is an error.
            pixels = simplejpeg.decode_jpeg(data, "RGB", min_height=side, min_width=side)
            return Image.fromarray(pixels)
        image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I"):  # 16 bits; Pillow would clip them at 255, not scale
            image = Image.fromarray((np.asarray(image) // 257).astype(np.uint8))
        if image.has_transparency_data:  # onto white
            image = image.convert("RGBA")
            white = Image.new("RGBA", image.size, "white")
            image = Image.alpha_composite(white, image)
        return image.convert("RGB")
    except UnidentifiedImageError:
        raise ValueError(f"no known picture format ({len(data)} bytes)") from None
    except Exception as error:  # damaged data make decoders raise anything
        raise ValueError(one_line(error)) from error


def crop_square(
    image: Image.Image,
    resolution: int,
    resample: str = "lanczos",
    crop: float = 0.5,
    flip: bool = False,
) -> np.ndarray:
    """Scale the shorter side of a picture to the resolution and cut a square out.

    Hugging Face's trainer squeezes the whole picture into the square instead, after which its
    crop has nothing left to choose; on the square pictures of the public datasets both agree.

    Args:
        image: RGB.
        resolution: side R of the square, pixels.
        resample: "lanczos" (the paper) or "bicubic" (Hugging Face).
        crop: in [0, 1), where along the longer side the square lies; 0.5 is the middle.
        flip: mirror left and right.

    Returns:
        uint8 (R, R, 3).
    """
    scale = resolution / min(image.size)
    width, height = (max(resolution, round(side * scale)) for side in image.size)
    if image.size != (width, height):
        image = image.resize((width, height), RESAMPLING[resample])
    top = int(crop * (height - resolution + 1))
    left = int(crop * (width - resolution + 1))
    pixels = np.asarray(image)[top : top + resolution, left : left + resolution]
    return pixels[:, ::-1] if flip else pixels


def decode_pair(
    pair: Pair,
    out: tuple[np.ndarray, np.ndarray],
    columns: tuple[str, str, str],
    resample: str,
    crop: float,
    flip: bool,
) -> None:
    """Decode both pictures of a pair into out, cropped and flipped alike.

    Args:
        pair: encoded.
        out: original and edited, uint8 (R, R, 3) each; written to.
        columns: names to put in the error.
        resample, crop, flip: as for crop_square.

    Raises:
        ValueError: something of the pair is missing or cannot be decoded; out is then undefined.
    """
    if pair.prompt is None:
        raise ValueError(f"{columns[2]}: null")
    for data, pixels, column in zip(pair[:2], out, columns[:2]):
        if data is None:
            raise ValueError(f"{column}: no picture bytes in the shard")
        resolution = len(pixels)
        try:
            # Twice the size wanted, so that the filter asked for still does the last halving.
            image = decode_picture(data, min_side=2 * resolution)
        except ValueError as error:
            raise ValueError(f"{column}: {error}") from error
        pixels[:] = crop_square(image, resolution, resample, crop, flip)


def epoch_order(
    group_rows: list[int],
    *,
    seed: int,
    epoch: int,
    batch_size: int,
    process_index: int = 0,
    process_count: int = 1,
    num_streams: int = 4,
    shuffle_buffer: int = 2048,
) -> tuple[np.ndarray, np.ndarray, list[list[tuple[int, int, int]]]]:
    """Shuffle an epoch so that row groups are read once, front to back, a few at a time.

    All processes lay all rows on one line, row groups whole and in shuffled order, beginning
    anywhere, and each takes its stretch of it: as many rows as the others, whole batches, the
    rest of the line (less than one global batch, other rows every epoch) left out. The row
    groups of the stretch are dealt to streams that are read side by side. A row that is at the
    fraction f of its stream trains at the moment f + r u of the epoch, u uniform in [0, 1) and r
    the part of the stretch that the shuffle buffer holds; if it holds all, at the moment u, which
    is a uniform shuffle.

    Args:
        group_rows: rows of every row group.
        seed, epoch: what the order depends on, together with the arguments below; at least 0.
        batch_size: per process.
        process_index, process_count: which stretch of the line.
        num_streams: row groups open at a time.
        shuffle_buffer: rows read but not yet used, at most, over all streams.

    Returns:
        order: the rows in the order of training, counted through all row groups, (n,) integers.
        stream_of: the stream that each of them comes from, (n,) integers.
        streams: for each stream its runs of rows in the order of reading, (row group, first row
            of the group, row to stop before).
    """
    group_rows = np.asarray(group_rows)
    first_rows = np.cumsum(group_rows) - group_rows
    num_rows = int(group_rows.sum())
    rng = np.random.default_rng([seed, epoch])
    line = np.concatenate(
        [first_rows[g] + np.arange(group_rows[g]) for g in rng.permutation(len(group_rows))]
    )
    line = np.roll(line, rng.integers(num_rows))
    u = rng.random(num_rows)  # by row

    share = num_rows // (batch_size * process_count) * batch_size
    rows = line[process_index * share : (process_index + 1) * share]
    groups = np.searchsorted(first_rows, rows, side="right") - 1
    # Within one group a step back means that the line ends in the group it begins in.
    breaks = (np.diff(groups) != 0) | (np.diff(rows) != 1)
    runs = []
    for begin, end in pairwise(np.flatnonzero(np.concatenate([[True], breaks, [True]])).tolist()):
        start = int(rows[begin] - first_rows[groups[begin]])
        runs.append((int(groups[begin]), start, start + end - begin))

    streams = [runs[s::num_streams] for s in range(min(num_streams, len(runs)))]
    lengths = [sum(stop - start for _, start, stop in stream) for stream in streams]
    stream_of = np.repeat(np.arange(len(streams)), lengths)
    rows = np.concatenate(
        [first_rows[g] + np.arange(start, stop) for g, start, stop in chain(*streams)]
    )
    fraction = np.concatenate([np.arange(length) / length for length in lengths])
    spread = shuffle_buffer / share
    moment = u[rows] if spread >= 1 else fraction + spread * u[rows]
    by_moment = np.argsort(moment, kind="stable")
    return rows[by_moment], stream_of[by_moment], streams


class ParquetImagePairs:
    """Batches of picture pairs and instructions from a folder of parquet shards.

    Iterating gives one epoch of this process's batches, `len()` of them, the same number on every
    process; `set_epoch` chooses which. Batches are dicts of

        original_pixel_values, edited_pixel_values: uint8 (B, R, R, 3)
        edit_prompt: B strings
        input_ids: int32 (B, 77), if a tokenizer is given

    Order, crops and flips depend on (seed, epoch) and on how many processes and rows per batch
    there are, never on the number of threads; see `epoch_order`. A pair that cannot be decoded
    has its place in the batch taken by the next good one of the same batch, with a crop and a
    flip of its own (by the first good one of this process's epoch, as it is read, if the batch
    has none). It is counted in `num_bad`, kept in `bad_rows` and logged as a warning once.

    Memory: `shuffle_buffer` encoded pairs, `num_streams` row groups as far as pyarrow holds them
    (a page each, which is a few MB, or in some shards everything: count twice their bytes) and
    `prefetch_batches` batches.

    Args:
        train_data_dir: folder with *.parquet files.
        batch_size: pairs per batch of this process.
        resolution: side R of the pictures, pixels.
        seed: at least 0.
        random_crop: cut the square out anywhere along the longer side; else from the middle.
        random_flip: mirror half of the pairs.
        resample: "lanczos" or "bicubic".
        tokenizer: list of B strings -> int32 (B, 77), called in the consumer's thread.
        original_image_column, edited_image_column, edit_prompt_column: "" finds the known names.
        process_index, process_count: `jax.process_index()` and `jax.process_count()`.
        num_threads: that decode; 0 takes as many as there are cores.
        prefetch_batches: decoded ahead of the consumer.
        num_streams: row groups read at a time.
        shuffle_buffer: encoded pairs to mix, at most.

    Raises:
        ValueError: a bad argument, a bad folder (see `list_row_groups`) or fewer rows than one
            batch of every process; while iterating, damaged shards or no readable pair at all.
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
        resample: str = "lanczos",
        tokenizer: Callable[[list[str]], np.ndarray] | None = None,
        original_image_column: str = "",
        edited_image_column: str = "",
        edit_prompt_column: str = "",
        process_index: int = 0,
        process_count: int = 1,
        num_threads: int = 0,
        prefetch_batches: int = 2,
        num_streams: int = 4,
        shuffle_buffer: int = 2048,
    ):
        for name, value, lowest in (
            ("batch_size", batch_size, 1),
            ("resolution", resolution, 1),
            ("seed", seed, 0),
            ("process_count", process_count, 1),
            ("num_threads", num_threads, 0),
            ("prefetch_batches", prefetch_batches, 1),
            ("num_streams", num_streams, 1),
            ("shuffle_buffer", shuffle_buffer, 0),
        ):
            if value < lowest:
                raise ValueError(f"{name}={value} must be at least {lowest}")
        if not 0 <= process_index < process_count:
            raise ValueError(
                f"process_index={process_index} must be from 0 to process_count-1, "
                f"{process_count - 1}"
            )
        if resample not in RESAMPLING:
            raise ValueError(f"resample={resample} is unknown; use {' or '.join(RESAMPLING)}")

        self.groups = list_row_groups(
            train_data_dir, original_image_column, edited_image_column, edit_prompt_column
        )
        self.num_rows = sum(group.num_rows for group in self.groups)
        self.num_bad = 0  # places in batches so far that another pair had to take
        self.bad_rows: dict[tuple[str, int], str] = {}  # (shard, row) -> reason
        global_batch = batch_size * process_count
        if self.num_rows < global_batch:
            way_out = f"batch_size can be {self.num_rows // process_count} at most"
            if self.num_rows < process_count:
                way_out = f"use {self.num_rows} processes at most"
            raise ValueError(
                f"batch_size={batch_size} times process_count={process_count} needs {global_batch} "
                f"rows, {train_data_dir} has {self.num_rows}; {way_out}"
            )

        self.train_data_dir = train_data_dir
        self.batch_size = batch_size
        self.resolution = resolution
        self.seed = seed
        self.epoch = 0
        self.random_crop = random_crop
        self.random_flip = random_flip
        self.resample = resample
        self.tokenizer = tokenizer
        self.process_index = process_index
        self.process_count = process_count
        self.num_threads = num_threads if num_threads else os.cpu_count()
        self.prefetch_batches = prefetch_batches
        self.num_streams = num_streams
        self.shuffle_buffer = shuffle_buffer
        self._first_rows = np.cumsum([0] + [group.num_rows for group in self.groups])

    def __len__(self) -> int:
        """Batches per epoch of every process."""
        return self.num_rows // (self.batch_size * self.process_count)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch (from 0) that the next iteration gives."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict]:
        order, stream_of, streams = epoch_order(
            [group.num_rows for group in self.groups],
            seed=self.seed,
            epoch=self.epoch,
            batch_size=self.batch_size,
            process_index=self.process_index,
            process_count=self.process_count,
            num_streams=self.num_streams,
            shuffle_buffer=self.shuffle_buffer,
        )
        # By row: crop and flip. The 1 keeps them apart from the draws of the order.
        draws = np.random.default_rng([self.seed, self.epoch, 1]).random((self.num_rows, 2))
        encoded = self._read_in_order(order, stream_of, streams)

        # One thread reads and hands the pairs on to the others; the consumer only collects.
        reader = ThreadPoolExecutor(1, "parquet-read")
        decoders = ThreadPoolExecutor(self.num_threads, "parquet-decode")

        def start_batch() -> tuple[dict, list[tuple[int, Pair]], list[Future]]:
            rows = list(islice(encoded, self.batch_size))
            shape = (len(rows), self.resolution, self.resolution, 3)
            batch = {
                "original_pixel_values": np.empty(shape, np.uint8),
                "edited_pixel_values": np.empty(shape, np.uint8),
                "edit_prompt": [pair.prompt for _, pair in rows],
            }
            futures = [
                decoders.submit(self._decode_into, batch, place, row, pair, draws[row])
                for place, (row, pair) in enumerate(rows)
            ]
            return batch, rows, futures

        try:
            started = deque(
                reader.submit(start_batch) for _ in range(min(self.prefetch_batches, len(self)))
            )
            spare = None
            for step in range(len(self)):
                batch, rows, futures = started.popleft().result()
                if step + self.prefetch_batches < len(self):
                    started.append(reader.submit(start_batch))

                good = []
                for place, future in enumerate(futures):
                    error = future.exception()
                    if error is None:
                        good.append(place)
                    elif isinstance(error, ValueError):
                        self._note_bad(rows[place][0], error)
                    else:
                        raise error
                if not good and spare is None:
                    spare = self._first_good_pair(streams)
                for place in range(len(rows)):
                    if place in good:
                        continue
                    other = next((g for g in good if g > place), good[0] if good else None)
                    source = spare if other is None else rows[other]
                    self._decode_into(batch, place, *source, draws[rows[place][0]])
                    batch["edit_prompt"][place] = source[1].prompt

                if self.tokenizer is not None:
                    batch["input_ids"] = np.asarray(self.tokenizer(batch["edit_prompt"]), np.int32)
                yield batch
        finally:  # also when the consumer stops early
            reader.shutdown(cancel_futures=True)
            decoders.shutdown(cancel_futures=True)
            encoded.close()

    def _locate(self, row: int) -> tuple[RowGroup, int]:
        """The row group of a row and the row's place in it."""
        g = int(np.searchsorted(self._first_rows, row, side="right")) - 1
        return self.groups[g], row - int(self._first_rows[g])

    def _read_stream(self, stream: list[tuple[int, int, int]]) -> Iterator[tuple[int, Pair]]:
        """Read the runs of one stream of `epoch_order`, each pair with its row."""
        for g, start, stop in stream:
            rows = range(int(self._first_rows[g]) + start, int(self._first_rows[g]) + stop)
            yield from zip(rows, read_rows(self.groups[g], start, stop))

    def _read_in_order(
        self,
        order: np.ndarray,
        stream_of: np.ndarray,
        streams: list[list[tuple[int, int, int]]],
    ) -> Iterator[tuple[int, Pair]]:
        """Read all streams side by side, holding rows back until it is their turn."""
        readers = [self._read_stream(stream) for stream in streams]
        waiting = {}
        for row, stream in zip(order.tolist(), stream_of.tolist()):
            while row not in waiting:
                ahead, pair = next(readers[stream])
                waiting[ahead] = pair
            yield row, waiting.pop(row)

    def _decode_into(self, batch: dict, place: int, row: int, pair: Pair, draw: np.ndarray) -> None:
        """Decode a pair into its place in a batch with the crop and flip that were drawn."""
        decode_pair(
            pair,
            (batch["original_pixel_values"][place], batch["edited_pixel_values"][place]),
            columns=self._locate(row)[0].columns,
            resample=self.resample,
            crop=draw[0] if self.random_crop else 0.5,
            flip=self.random_flip and bool(draw[1] < 0.5),
        )

    def _note_bad(self, row: int, error: ValueError) -> None:
        """Count a pair that cannot be decoded, and name it the first time."""
        group, position = self._locate(row)
        name = (group.path.name, group.first_row + position)
        self.num_bad += 1
        if name not in self.bad_rows:
            self.bad_rows[name] = str(error)
            logger.warning("%s row %d: %s; another row takes its place", *name, error)

    def _first_good_pair(self, streams: list[list[tuple[int, int, int]]]) -> tuple[int, Pair]:
        """The first pair that can be decoded, in the order of reading."""
        pixels = np.empty((2, 1, self.resolution, self.resolution, 3), np.uint8)
        batch = {"original_pixel_values": pixels[0], "edited_pixel_values": pixels[1]}
        for row, pair in self._read_stream(list(chain.from_iterable(streams))):
            try:
                self._decode_into(batch, 0, row, pair, np.full(2, 0.5))
                return row, pair
            except ValueError as error:
                reason = error
        raise ValueError(
            f"none of the {len(self) * self.batch_size} pairs that this process reads of "
            f"{self.train_data_dir} can be decoded (last: {reason}); check the folder with "
            "python parquet_processing.py --train_data_dir"
        )


def describe(groups: list[RowGroup]) -> str:
    """Shards, rows, columns and row groups of a folder in a few lines."""
    shards = {group.path: group.metadata for group in groups}
    schema = next(iter(shards.values())).schema.to_arrow_schema()
    roles = dict(zip(groups[0].columns, ("original picture", "edited picture", "prompt")))
    rows = [group.num_rows for group in groups]
    stored = [
        sum(row_group.column(c).total_compressed_size for c in range(row_group.num_columns))
        for row_group in (group.metadata.row_group(group.index) for group in groups)
    ]
    return "\n".join(
        [
            f"shards      {len(shards)}, {megabytes(sum(p.stat().st_size for p in shards))}",
            f"rows        {sum(rows)}",
            "columns     "
            + "\n            ".join(
                f"{field.name}: {field.type}"
                + (f"  <- {roles[field.name]}" if field.name in roles else "")
                for field in schema
            ),
            f"row groups  {len(groups)}; rows min {min(rows)}, median {np.median(rows):g}, "
            f"max {max(rows)}; bytes min {megabytes(min(stored))}, "
            f"median {megabytes(np.median(stored))}, max {megabytes(max(stored))}",
        ]
    )


def check_pair(pair: Pair, columns: tuple[str, str, str]) -> list[str]:
    """Decode a pair; format, size and mode of both pictures.

    Raises:
        ValueError: something of the pair is missing or cannot be decoded.
    """
    pixels = np.empty((2, 16, 16, 3), np.uint8)  # small: JPEGs are read to their end all the same
    decode_pair(pair, pixels, columns, "bicubic", 0.5, False)
    kinds = []
    for data in pair[:2]:
        image = Image.open(io.BytesIO(data))
        kinds.append(f"{image.format} {image.width}x{image.height} {image.mode}")
    return kinds


def check_rows(groups: list[RowGroup], num_checked: int) -> Iterator[tuple[str, Pair, Future]]:
    """Read the first rows of some row groups and check them in threads.

    Args:
        groups: of one folder.
        num_checked: rows, about, from as few row groups as hold them but from 8 at least: the
            first row may cost as much to read as the whole group. 0, or more than there are,
            checks all.

    Yields:
        Name of the row, the pair, and the future of its `check_pair`.
    """
    num_rows = sum(group.num_rows for group in groups)
    per_group = num_rows
    if 0 < num_checked < num_rows:
        enough = max(8, math.ceil(num_checked * len(groups) / num_rows))
        picks = np.linspace(0, len(groups) - 1, min(enough, len(groups))).astype(int)
        groups = [groups[pick] for pick in picks]
        per_group = math.ceil(num_checked / len(groups))
    stops = [min(per_group, group.num_rows) for group in groups]
    with (
        ThreadPoolExecutor() as pool,
        tqdm(total=sum(stops), desc="checking", unit="row", disable=None) as progress,
    ):
        ahead = deque()
        for group, stop in zip(groups, stops):
            for position, pair in enumerate(read_rows(group, 0, stop)):
                name = f"{group.path.name} row {group.first_row + position}"
                ahead.append((name, pair, pool.submit(check_pair, pair, group.columns)))
                if len(ahead) > 64:
                    yield ahead.popleft()
                progress.update()
        yield from ahead


def draw_preview(pairs: list[Pair], resolution: int) -> Image.Image:
    """Draw pairs side by side, original left and edited right, the prompt under each."""
    font = ImageFont.load_default(size=max(10, resolution // 16))
    line_height = math.ceil(font.size * 1.3)
    letters = max(12, int(2 * resolution / (0.52 * font.size)))
    gap = max(4, resolution // 32)
    across = max(1, round(math.sqrt(len(pairs) / 2)))
    width, height = 2 * resolution + gap, resolution + 2 * line_height + gap
    size = (across * width + gap, math.ceil(len(pairs) / across) * height + gap)
    sheet = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(sheet)
    for i, pair in enumerate(pairs):
        x, y = gap + i % across * width, gap + i // across * height
        for data in pair[:2]:
            square = crop_square(decode_picture(data, 2 * resolution), resolution)
            sheet.paste(Image.fromarray(square), (x, y))
            x += resolution
        lines = textwrap.wrap(pair.prompt, letters, max_lines=2, placeholder=" ...")
        for n, line in enumerate(lines):
            draw.text((x - 2 * resolution, y + resolution + n * line_height), line, "black", font)
    return sheet


def one_line(error: Exception) -> str:
    """What an exception says, on one short line."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def megabytes(size: float) -> str:
    """A number of bytes for people."""
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"


def inspect(config: Config) -> None:
    """Describe a folder of shards on standard output and write the preview.

    Raises:
        ValueError: a bad argument, a bad folder, or no pair that can be decoded.
    """
    for name in ("resolution", "num_preview"):
        if getattr(config, name) <= 0:
            raise ValueError(f"{name}={getattr(config, name)} must be at least 1")
    if config.num_checked < 0:
        raise ValueError(f"num_checked={config.num_checked} must be at least 0, which checks all")
    preview = Path(config.preview)
    picture_format = Image.registered_extensions().get(preview.suffix.lower())
    if config.preview and picture_format is None:
        raise ValueError(f"preview={preview} must end as pictures do; try preview.png")

    groups = list_row_groups(
        config.train_data_dir,
        config.original_image_column,
        config.edited_image_column,
        config.edit_prompt_column,
    )
    print(describe(groups), flush=True)

    num_rows, kinds, bad, shown = 0, (Counter(), Counter()), [], []
    num_expected = min(config.num_checked or math.inf, sum(group.num_rows for group in groups))
    for name, pair, future in check_rows(groups, config.num_checked):
        try:
            for counter, kind in zip(kinds, future.result()):
                counter[kind] += 1
            if len(shown) < config.num_preview * (num_rows + 1) / num_expected:
                shown.append(pair)
        except ValueError as error:
            bad.append(f"{name}: {error}")
        num_rows += 1

    whole = num_rows == sum(group.num_rows for group in groups)
    print("checked     " + (f"all {num_rows} rows" if whole else f"{num_rows} rows (a sample)"))
    for column, counter in zip(groups[0].columns, kinds):
        common = ", ".join(f"{count} x {kind}" for kind, count in counter.most_common(5))
        more = f" and {len(counter) - 5} other kinds" if len(counter) > 5 else ""
        print(f"{column}: {common}{more}")
    print(f"unreadable  {len(bad)} of {num_rows} rows")
    for line in bad[: config.num_named]:
        print(f"            {line}")
    if not shown:
        raise ValueError(
            f"none of the {num_rows} rows checked in {config.train_data_dir} can be decoded; "
            f"the first is {bad[0]}"
        )
    shown = shown[: config.num_preview]
    print("prompts     " + "\n            ".join(repr(pair.prompt) for pair in shown))

    if config.preview:
        preview.parent.mkdir(parents=True, exist_ok=True)
        unfinished = preview.with_name(f".{preview.name}.{os.getpid()}")
        draw_preview(shown, config.resolution).save(unfinished, picture_format)
        unfinished.replace(preview)
        print(f"preview     {preview}")


def main(args: list[str] | None = None) -> None:
    """Command line."""
    try:
        inspect(tyro.cli(Config, description=__doc__, args=args, use_underscores=True))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
