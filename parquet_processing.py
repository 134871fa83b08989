"""Parquet shards of (image, instruction, edited image) to training batches.

The data half of flax_train_instruct_pix2pix.py. Run by itself it describes a directory of shards
and draws some of its pairs:

    python parquet_processing.py --train_data_dir data

or first writes the shards, of your own images (parquet_pairs.py has the forms of the list):

    python parquet_processing.py --pairs pairs.jsonl --output_dir data

with lines such as {"input": "a.jpg", "edit": "make it red", "edited": "a-red.jpg"}. A description
by a few rows, quick on one CPU core:

    python parquet_processing.py --train_data_dir data --num_checked 100 --num_preview 4

In code it is a plain iterator of NumPy batches, and a torch IterableDataset:

    for batch in ParquetImagePairs("data", batch_size=16): ...

Needs a CPU only. A pair of 512x512 JPEGs takes about 3 ms of one core to decode at 256x256
(benchmarks/bench_data.py measures it). Images are prepared as in InstructPix2Pix
(arXiv 2211.09800).
"""

import dataclasses
import hashlib
import io
import json
import logging
import math
import sys
import textwrap
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import tyro
from PIL import Image, ImageDraw, ImageFont
from tqdm import tqdm

from parquet_images import (
    FORMATS,
    RESAMPLING,
    crop_square,
    decode_picture,
    num_usable_cores,
    one_line,
)
from parquet_pairs import UNFINISHED, write_pairs
from pictures import check_picture_file, save_picture

# What the public datasets call the three columns, by the flag that names another.
KNOWN_COLUMNS = {
    "original_image_column": ("original_image", "input_image"),
    "edited_image_column": ("edited_image",),
    "edit_prompt_column": ("edit_prompt",),
}
TEXT_TYPES = (pa.string(), pa.large_string(), pa.string_view())  # or a dictionary of one
BINARY_TYPES = (pa.binary(), pa.large_binary(), pa.binary_view())  # likewise
LATENTS = b"latents"  # in the metadata of a shard of cache_latents.py: what they were made with
READ_ROWS = 32  # of a column at a time
READ_BYTES = 8 << 20  # from disk at a time; without it pyarrow fetches whole column chunks
MIN_ROWS_TO_JUDGE = 1000  # a share of broken pairs says nothing before; less if an epoch is less
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Config:
    train_data_dir: str = ""  # directory with *.parquet shards to describe
    pairs: str = ""  # instead: .jsonl or .csv list of image pairs, or directory of them
    output_dir: str = ""  # with --pairs: empty or new directory for the shards
    max_pairs: int | None = None  # with --pairs: only the first so many
    num_held_out: int = 0  # with --pairs: original images left out of the shards, with their edits
    held_out_dir: str = ""  # with --num_held_out: empty or new directory for these
    seed: int = 0  # with --num_held_out: of their choice, at least 0
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
    if (folder / UNFINISHED).exists():
        raise ValueError(
            f"{folder} is not complete ({UNFINISHED} is there): run script.sh again, or remove "
            f"{folder / UNFINISHED} if it is of another plan; if parquet_processing.py --pairs was "
            f"killed, remove {folder} and run that again"
        )
    paths = sorted(folder.glob("*.parquet"))
    if not paths:
        raise ValueError(
            f"train_data_dir={folder} holds no *.parquet file; download shards to it "
            "(with fewer shards than workers: script.py --num_workers 1, then all get all)"
        )

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


def latents_of(metadata: pq.FileMetaData) -> dict | None:
    """What cache_latents.py made a shard's latents with; None of a shard of pictures."""
    kept = (metadata.metadata or {}).get(LATENTS)
    return None if kept is None else json.loads(kept)


def columns_of(group: RowGroup) -> list[str]:
    """The columns that a row group's data come from; of latents, those of the pictures."""
    latents = latents_of(group.metadata)
    return latents["columns"] if latents else list(group.columns)


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
        if (count := schema.names.count(name)) > 1:
            raise ValueError(
                f"{path} has {count} columns named {name}; rename all but one, or choose another "
                f"with --{flag}"
            )
        stored = kind = schema.field(name).type
        if flag == "edit_prompt_column":
            wanted, kinds = "text", TEXT_TYPES
        else:
            wanted = "encoded pictures (binary, or a struct with a binary field bytes)"
            kinds = BINARY_TYPES
            if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
                stored = kind.field("bytes").type
        if pa.types.is_dictionary(stored):
            stored = stored.value_type
        if stored not in kinds:
            raise ValueError(
                f"{path}: column {name} is {kind}, not {wanted}; it has "
                f"{', '.join(schema.names)}: choose with --{flag}"
            )
        found.append(name)
    return tuple(found)


class Pictures:
    """Encoded pictures of a row group's column, one after the other in one buffer.

    A fresh buffer of 200 MB costs as much time as copying into it, and memory of which row groups
    come and go is soon in pieces: buffers go back to `spare` when their pictures are let go.
    """

    def __init__(self, column: Iterator[pa.Array], num_bytes: int, spare: list[np.ndarray]):
        """Copy a column, given in parts; num_bytes: that it will take, or about."""
        self._buffer = spare.pop() if spare else np.empty(0, np.uint8)
        if len(self._buffer) < num_bytes:
            self._buffer = np.empty(num_bytes + num_bytes // 8, np.uint8)  # for the next one too
        stops, valid, stop = [np.zeros(1, np.int64)], [], 0
        for part in column:
            if part.type not in (pa.binary(), pa.large_binary()):  # a view or a dictionary
                part = part.cast(pa.large_binary())
            _, offsets, data = part.buffers()
            kind = np.int64 if pa.types.is_large_binary(part.type) else np.int32
            offsets = np.frombuffer(offsets, kind)[part.offset : part.offset + len(part) + 1]
            start, size = int(offsets[0]), int(offsets[-1] - offsets[0])
            if stop + size > len(self._buffer):  # a picture many rows share is stored once
                self._buffer = np.concatenate([self._buffer, np.empty(stop + size, np.uint8)])
            if size:
                self._buffer[stop : stop + size] = np.frombuffer(data, np.uint8, size, start)
            stops.append(offsets[1:].astype(np.int64) - start + stop)
            valid.append(part.is_valid().to_numpy(zero_copy_only=False))
            stop += size
        self._stops, self._valid = np.concatenate(stops), np.concatenate(valid)
        weakref.finalize(self, spare.append, self._buffer)

    def __len__(self) -> int:
        return len(self._valid)

    def __getitem__(self, row: int) -> bytes | None:
        if not self._valid[row]:
            return None
        return self._buffer[self._stops[row] : self._stops[row + 1]].tobytes()


class Cells(NamedTuple):
    """The rows of a row group, still encoded."""

    originals: Pictures
    edits: Pictures
    prompts: pa.ChunkedArray  # turned into text one by one: one that is none is its row's fault


def read_row_group(group: RowGroup, spare: list[np.ndarray] | None = None) -> Cells:
    """Read a row group, a few rows of a column at a time, which takes the least memory.

    Args:
        group: of a shard.
        spare: buffers to use again; those of this row group are put there when it is let go.

    Raises:
        ValueError: its data are damaged.
    """
    spare = [] if spare is None else spare
    stored = group.metadata.row_group(group.index)
    sizes = {
        c.path_in_schema: c.total_uncompressed_size
        for c in map(stored.column, range(stored.num_columns))
    }
    columns = []
    try:
        with pq.ParquetFile(
            group.path, metadata=group.metadata, pre_buffer=False, buffer_size=READ_BYTES
        ) as file:
            for name in group.columns:
                # The leaf with the bytes; a struct's other fields are not read.
                is_struct = pa.types.is_struct(file.schema_arrow.field(name).type)
                leaf = f"{name}.bytes" if is_struct else name
                parts = file.iter_batches(READ_ROWS, [group.index], [leaf], use_threads=False)
                parts = (part.column(0) for part in parts)
                if is_struct:
                    parts = (pc.struct_field(part, "bytes") for part in parts)
                if len(columns) < 2:
                    columns.append(Pictures(parts, sizes[leaf], spare))
                else:
                    columns.append(pa.chunked_array(list(parts)))
    except (pa.ArrowException, OSError) as error:
        way = "download it again"
        if latents_of(group.metadata) is not None:
            way = "make it again with cache_latents.py, or by training with --cache_latents"
        raise ValueError(
            f"{group.path}: row group {group.index} cannot be read ({one_line(error)}); "
            f"delete the shard and {way}"
        ) from error
    return Cells(*columns)


def pair_at(cells: Cells, position: int) -> Pair:
    """One row of a row group.

    Raises:
        ValueError: the instruction is not text.
    """
    try:
        prompt = cells.prompts[position].as_py()
    except UnicodeDecodeError as error:
        raise ValueError(f"the instruction is not UTF-8 ({error})") from error
    return Pair(cells.originals[position], cells.edits[position], prompt)


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
        out: original and edited, uint8 (R, R, 3) each, contiguous; written to.
        columns: names to put in the error.
        resample: "dct" lets libjpeg scale pictures of twice the size or more down while it
            decodes, and Lanczos do the rest; "lanczos" (the paper) and "bicubic" (Hugging Face)
            leave them at least the last halving.
        crop: as for crop_square.
        flip: mirror left and right.

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
            min_side = resolution if resample == "dct" else 2 * resolution
            decoded = decode_picture(data, min_side, out=pixels)
            square = crop_square(decoded, resolution, resample, crop)
        except ValueError as error:
            raise ValueError(f"{column}: {error}") from error
        if flip:
            for c in range(3):  # one channel at a time is five times faster than all at once
                pixels[..., c] = square[:, ::-1, c]
        else:
            pixels[:] = square


def copy_latents(
    pair: Pair, out: tuple[np.ndarray, np.ndarray], columns: tuple[str, str, str], flip: bool
) -> None:
    """Copy a pair of cache_latents.py into out, of the pictures or of their mirror images.

    Args:
        pair: as it is stored.
        out: float16, modes (h, w, C) and means and deviations (h, w, 2 C); written to.
        columns: names to put in the error.
        flip: mirrored.

    Raises:
        ValueError: it could not be encoded, or the shard is damaged.
    """
    if pair.prompt is None:
        raise ValueError(f"{columns[2]}: null")
    for data, latents, column in zip(pair[:2], out, columns[:2]):
        if data is None or len(data) != 2 * latents.nbytes:
            raise ValueError(f"{column}: no latents in the shard, as of a picture that is broken")
        latents[:] = np.frombuffer(data, np.float16).reshape(2, *latents.shape)[int(flip)]


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


def first_rows_of(groups: list[RowGroup], num_rows: int) -> list[RowGroup]:
    """The row groups that hold the first so many rows; the last of them may be cut."""
    kept = []
    for group in groups:
        if num_rows <= 0:
            break
        kept.append(group._replace(num_rows=min(group.num_rows, num_rows)))
        num_rows -= group.num_rows
    return kept


def identify_shards(groups: list[RowGroup]) -> dict[tuple[int, int, int], Path]:
    """Each shard as three 32-bit numbers: a hash of its name and size in two, and its rows.

    One of latents is known as the shard that it was made of.
    """
    shards = {}
    for path, metadata in {group.path: group.metadata for group in groups}.items():
        rows, latents = metadata.num_rows, latents_of(metadata)
        size = latents["source_bytes"] if latents else path.stat().st_size
        name = f"{path.name} {size} {rows}"
        digest = np.frombuffer(hashlib.sha256(name.encode()).digest()[:8], np.uint32)
        shards[(*digest.tolist(), rows)] = path
    return shards


def compare_folders(
    shards: dict[tuple[int, int, int], Path],
    all_gather: Callable[[np.ndarray], np.ndarray] | None,
) -> list[list[tuple[int, int, int]]]:
    """What shards the processes have: all the same, or each its own.

    Args:
        shards: of `identify_shards`; none if this process's folder cannot be used.
        all_gather: array -> the arrays of all processes, stacked; all call it at the same time.
            None: there is one process, or all have the same folder.

    Returns:
        One list if all processes have the same shards, else the list of each process; sorted.

    Raises:
        ValueError: a process has no usable folder, or two share a part of their shards.
    """
    if all_gather is None:
        return [sorted(shards)]

    counts = np.reshape(all_gather(np.array([len(shards)], np.int32)), -1)
    if counts.min() == 0:
        raise ValueError(f"process {counts.argmin()} cannot use its train_data_dir and says why")
    padded = np.zeros((counts.max(), 3), np.uint32)
    padded[: len(shards)] = sorted(shards)
    tables = [table[:count] for table, count in zip(all_gather(padded), counts)]
    folders = [[tuple(row) for row in table.tolist()] for table in tables]
    if all(folder == folders[0] for folder in folders):
        return folders[:1]
    owners = {}
    for process, folder in enumerate(folders):
        for shard in folder:
            if shard in owners:
                raise ValueError(
                    f"processes {owners[shard]} and {process} both have "
                    f"{shards[shard].name if shard in shards else 'a shard'}, but not the same "
                    "folders: give all processes all shards, or each its own part of the plan"
                )
            owners[shard] = process
    return folders


def check_latents(
    group: RowGroup, first: dict | None, resolution: int, resample: str, random_crop: bool
) -> None:
    """Raise a ValueError if a row group's latents, or pictures, do not go with the arguments.

    Args:
        group: of any shard.
        first: latents_of the first shard.
        resolution, resample, random_crop: of ParquetImagePairs.
    """
    kept = latents_of(group.metadata)
    for name in ("vae", "shape"):
        if (kept or {}).get(name) != (first or {}).get(name):
            raise ValueError(
                f"{group.path.name} and others of {group.path.parent} do not go together: latents "
                "and pictures, or latents of two VAEs or sizes; keep them in folders of their own"
            )
    if kept is None:
        return
    if random_crop:
        raise ValueError(
            "random_crop=True does not go with latents, which are of the middle of each picture; "
            "switch it off (for square pictures it changes nothing)"
        )
    for name, value in (("resolution", resolution), ("image_interpolation_mode", resample)):
        if kept[name] != value:
            raise ValueError(
                f"{group.path.parent} holds latents of {name}={kept[name]}, not {value}; give "
                "that, or make others in another folder"
            )


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
    """Batches of picture pairs and instructions from a folder of parquet shards.

    Iterating gives one epoch of this process's batches, `len()` of them, the same number on every
    process, and the next iteration the next epoch; `set_epoch` chooses another. Made where torch is
    imported it is a torch IterableDataset: `DataLoader(dataset, batch_size=None)`. Batches are
    dicts of

        original_pixel_values, edited_pixel_values: uint8 (B, R, R, 3)
        edit_prompt: B strings

    or, from a folder of cache_latents.py, instead of the pictures

        original_latents, edited_latents: float16 (B, h, w, C), (B, h, w, 2 C)

    At most once: an epoch has `num_parts` parts, each process takes as many of them as the others,
    and a batch is equal slices of them, one after the other. If all processes have the same
    shards, parts are cut out of all rows, and all but less than one global batch of rows are seen;
    if each has its own, parts are cut out of these, and what a process has beyond the whole
    batches of the process with the fewest rows is left out. Other rows are left out in every
    epoch; no row is seen twice in one. Order, crops and flips depend on the data, (seed, epoch),
    the global batch size, `num_parts` and `shuffle_buffer`, see `epoch_order`: not on the number
    of threads and, if all have the same shards, not on the number of processes.

    The place of a pair that cannot be decoded is taken by the next row of its row group that can,
    after the last row the first, with the crop and the flip of the pair it stands in for (in a row
    group without any, by the first of the row groups after it). It is counted in `num_bad`, kept
    in `bad_rows` and logged as a warning once.

    Memory: for each part of the process the encoded pairs of its window of shuffle_buffer /
    num_parts rows and of up to two row groups more, but never more than its shards; one row group
    read ahead, and one column of it twice while it is read; `prefetch_batches` batches.

    `state_dict()` is where the stream stands after the batch last given; a dataset of the same
    arguments that loads it goes on with the very next batch, the same to the last bit.

    Args:
        train_data_dir: folder with *.parquet files.
        batch_size: pairs per batch of this process.
        resolution: side R of the pictures, pixels.
        seed: at least 0.
        random_crop: cut the square out anywhere along the longer side; else from the middle, as
            latents are.
        random_flip: mirror half of the pairs.
        resample: "dct", "lanczos" or "bicubic", see `decode_pair`.
        original_image_column, edited_image_column, edit_prompt_column: "" finds the known names.
        max_rows: use the first so many rows only, over all processes; None uses all.
        process_index, process_count: `jax.process_index()` and `jax.process_count()`.
        num_parts: a multiple of process_count, such as `jax.device_count()`; 0 is process_count.
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
        num_parts = num_parts or process_count
        if num_parts % process_count or batch_size % (num_parts // process_count):
            raise ValueError(
                f"num_parts={num_parts} must be a multiple of process_count={process_count}, and "
                f"batch_size={batch_size} one of the parts of a process"
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
            self.num_batches = self.folder_rows[0] // (batch_size * process_count)
            self._num_cut, self._salt = num_parts, []
            first_part = process_index * num_parts // process_count
        else:
            self.num_batches = min(self.folder_rows) // batch_size
            self._num_cut = num_parts // process_count
            # A folder that moves to another process keeps its order.
            self._salt = list(folders[process_index][0][:2])
            first_part = 0
        self._mine = slice(first_part, first_part + num_parts // process_count)
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
        num_mine = self._mine.stop - self._mine.start
        slice_size = self.batch_size // num_mine  # of a batch, from one part
        parts = epoch_order(
            [group.num_rows for group in self.groups],
            seed=[self.seed, self.epoch, 0, *self._salt],
            num_parts=self._num_cut,
            rows_per_part=len(self) * slice_size,
            window=self.shuffle_buffer / self.num_parts,
        )[self._mine]
        order = parts.reshape(num_mine, len(self), slice_size).swapaxes(0, 1)
        rng = np.random.default_rng([self.seed, self.epoch, 1, *self._salt])
        return order.reshape(len(self), self.batch_size), rng.random((self._first_rows[-1], 2))

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


def check_pair(
    cells: Cells, position: int, columns: tuple[str, str, str]
) -> tuple[Pair, list[str]]:
    """Decode a pair; it, and format, size and mode of both pictures.

    Raises:
        ValueError: something of the pair is missing or cannot be decoded.
    """
    pair = pair_at(cells, position)
    pixels = np.empty((2, 16, 16, 3), np.uint8)  # small: JPEGs are read to their end all the same
    decode_pair(pair, pixels, columns, "bicubic", 0.5, False)
    kinds = []
    for data in pair[:2]:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        kinds.append(f"{image.format} {image.width}x{image.height} {image.mode}")
    return pair, kinds


def check_rows(groups: list[RowGroup], num_checked: int) -> Iterator[tuple[str, Future]]:
    """Read the first rows of some row groups and check them in threads.

    Args:
        groups: of one folder.
        num_checked: rows, about, from as few row groups as hold them but from 8 at least: the
            first row may cost as much to read as the whole group. 0, or more than there are,
            checks all.

    Yields:
        Name of the row, and the future of its `check_pair`.
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
            cells = read_row_group(group)
            for position in range(stop):
                name = f"{group.path.name} row {group.first_row + position}"
                check = pool.submit(check_pair, cells, position, group.columns)
                ahead.append((name, check))
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
            square = crop_square(decode_picture(data, 2 * resolution), resolution, "lanczos")
            sheet.paste(Image.fromarray(square), (x, y))
            x += resolution
        lines = textwrap.wrap(pair.prompt, letters, max_lines=2, placeholder=" ...")
        for n, line in enumerate(lines):
            draw.text((x - 2 * resolution, y + resolution + n * line_height), line, "black", font)
    return sheet


def megabytes(size: float) -> str:
    """A number of bytes for people."""
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"


def check(config: Config) -> None:
    """Refuse flags with bad values, and those that do not go together."""
    if bool(config.train_data_dir) == bool(config.pairs):
        raise ValueError(
            "give --train_data_dir DIR to describe shards, or --pairs LIST --output_dir DIR to "
            "write them"
        )
    if config.pairs:
        if not config.output_dir:
            raise ValueError("--pairs needs --output_dir DIR, for the shards")
        if bool(config.num_held_out) != bool(config.held_out_dir):
            raise ValueError("--num_held_out N and --held_out_dir DIR go together; give both")
        unused, other = KNOWN_COLUMNS, "--train_data_dir; --pairs knows its columns by their names"
    else:
        unused = ("output_dir", "max_pairs", "num_held_out", "held_out_dir", "seed")
        other = "--pairs"
    for field in dataclasses.fields(Config):
        if field.name in unused and getattr(config, field.name) != field.default:
            raise ValueError(f"--{field.name} goes with {other}")
    for name, lowest in (("max_pairs", 1), ("num_held_out", 0), ("seed", 0)):
        if (value := getattr(config, name)) is not None and value < lowest:
            raise ValueError(f"--{name} {value} must be at least {lowest}")
    for name in ("resolution", "num_preview"):
        if getattr(config, name) <= 0:
            raise ValueError(f"{name}={getattr(config, name)} must be at least 1")
    if config.num_checked < 0:
        raise ValueError(f"num_checked={config.num_checked} must be at least 0, which checks all")
    if config.preview:
        try:
            check_picture_file(Path(config.preview))
        except ValueError as error:
            raise ValueError(f"--preview {error}") from error


def inspect(config: Config) -> None:
    """Describe a directory of shards on standard output and write the preview.

    Raises:
        ValueError: a bad directory, or no pair that can be decoded.
    """
    groups = list_row_groups(
        config.train_data_dir,
        config.original_image_column,
        config.edited_image_column,
        config.edit_prompt_column,
    )
    if latents_of(groups[0].metadata):
        raise ValueError(f"{config.train_data_dir} holds latents; only pictures can be looked at")
    print(describe(groups), flush=True)

    num_rows, kinds, bad, shown = 0, (Counter(), Counter()), [], []
    num_expected = min(config.num_checked or math.inf, sum(group.num_rows for group in groups))
    for name, check in check_rows(groups, config.num_checked):
        try:
            pair, kinds_of_pair = check.result()
            for counter, kind in zip(kinds, kinds_of_pair):
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
    if len(bad) > config.num_named:
        print(f"            and {len(bad) - config.num_named} more")
    if len(bad) > 0.1 * num_rows:
        print("            training stops at more than --max_bad_fraction of them, 0.1 if not set")
    if not shown:
        raise ValueError(
            f"none of the {num_rows} rows checked in {config.train_data_dir} can be decoded; "
            f"the first is {bad[0]}"
        )
    shown = shown[: config.num_preview]
    print("prompts     " + "\n            ".join(repr(pair.prompt) for pair in shown))

    if config.preview:
        save_picture(draw_preview(shown, config.resolution), Path(config.preview))
        print(f"preview     {config.preview}")


def main(args: list[str] | None = None) -> None:
    """Write shards if there are pairs, and describe the directory.

    A user's mistake and Ctrl-C end in one line.
    """
    config = tyro.cli(Config, description=__doc__, args=args, use_underscores=True)
    advice = "run the same command again"
    try:
        check(config)
        if config.pairs:
            report = write_pairs(
                Path(config.pairs),
                Path(config.output_dir),
                max_pairs=config.max_pairs,
                num_held_out=config.num_held_out,
                held_out_dir=Path(config.held_out_dir) if config.held_out_dir else None,
                seed=config.seed,
            )
            advice = f"the shards are complete; --train_data_dir {config.output_dir} describes them"
            print(report, flush=True)
            config = dataclasses.replace(config, train_data_dir=config.output_dir)
        inspect(config)
    except KeyboardInterrupt:
        tqdm.write(f"interrupted; {advice}", file=sys.stderr)
        sys.exit(130)
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
