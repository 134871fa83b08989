"""Parquet shards of (image, instruction, edited image): listing, comparing and reading them.

    for group in list_row_groups("data"):
        cells = read_row_group(group)
        pair = pair_at(cells, 0)  # encoded; decode_pair decodes it

The data loader in parquet_dataset.py is made of these functions.
"""

import hashlib
import json
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from command_line import one_line
from images import crop_square, decode_image
from parquet_pairs import UNFINISHED

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


class Pair(NamedTuple):
    """One row as it is stored: two encoded images and the instruction."""

    original: bytes | None
    edited: bytes | None
    prompt: str | None


class RowGroup(NamedTuple):
    """The unit parquet is read in, and where its rows stand in their shard."""

    path: Path
    metadata: pq.FileMetaData
    columns: tuple[str, str, str]  # original image, edited image, prompt
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
        original_image_column: column of the image to edit; "" looks for the known names.
        edited_image_column: column of the edited image; "" looks for the known name.
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
            unreadable.append(f"{path.name} ({one_line(error, 200)})")
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


def latents_metadata(metadata: pq.FileMetaData) -> dict | None:
    """What cache_latents.py made a shard's latents with; None of a shard of images."""
    kept = (metadata.metadata or {}).get(LATENTS)
    return None if kept is None else json.loads(kept)


def source_columns(group: RowGroup) -> list[str]:
    """The columns that a row group's data come from; of latents, those of the images."""
    latents = latents_metadata(group.metadata)
    return latents["columns"] if latents else list(group.columns)


def find_columns(
    schema: pa.Schema, path: Path, original: str = "", edited: str = "", prompt: str = ""
) -> tuple[str, str, str]:
    """Names of the original, edited and prompt columns of a shard, each given or "" to look for.

    Raises:
        ValueError: a column is missing, or is neither text nor encoded images as it should be.
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
            wanted = "encoded images (binary, or a struct with a binary field bytes)"
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


class Images:
    """Encoded images of a row group's column, one after the other in one buffer.

    A fresh buffer of 200 MB costs as much time as copying into it, and memory of which row groups
    come and go is soon in pieces: buffers go back to `spare` when their images are let go.
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
            if stop + size > len(self._buffer):  # an image many rows share is stored once
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

    originals: Images
    edits: Images
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
                    columns.append(Images(parts, sizes[leaf], spare))
                else:
                    columns.append(pa.chunked_array(list(parts)))
    except (pa.ArrowException, OSError) as error:
        way = "download it again"
        if latents_metadata(group.metadata) is not None:
            way = "make it again with cache_latents.py, or by training with --cache_latents"
        raise ValueError(
            f"{group.path}: row group {group.index} cannot be read ({one_line(error, 200)}); "
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
    """Decode both images of a pair into out, cropped and flipped alike.

    Args:
        pair: encoded.
        out: original and edited, uint8 (R, R, 3) each, contiguous; written to.
        columns: names to put in the error.
        resample: "dct" lets libjpeg scale images of twice the size or more down while it
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
            raise ValueError(f"{column}: no image bytes in the shard")
        resolution = len(pixels)
        try:
            min_side = resolution if resample == "dct" else 2 * resolution
            decoded = decode_image(data, min_side, out=pixels)
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
    """Copy a pair of cache_latents.py into out, of the images or of their mirror images.

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
            raise ValueError(f"{column}: no latents in the shard, as of an image that is broken")
        latents[:] = np.frombuffer(data, np.float16).reshape(2, *latents.shape)[int(flip)]


def take_first_rows(groups: list[RowGroup], num_rows: int) -> list[RowGroup]:
    """The row groups that hold the first so many rows; the last of them may be cut."""
    kept = []
    for group in groups:
        if num_rows <= 0:
            break
        kept.append(group._replace(num_rows=min(group.num_rows, num_rows)))
        num_rows -= group.num_rows
    return kept


def shard_ids(groups: list[RowGroup]) -> dict[tuple[int, int, int], Path]:
    """Each shard as three 32-bit numbers: a hash of its name and size in two, and its rows.

    One of latents is known as the shard that it was made of.
    """
    shards = {}
    for path, metadata in {group.path: group.metadata for group in groups}.items():
        rows, latents = metadata.num_rows, latents_metadata(metadata)
        size = latents["source_bytes"] if latents else path.stat().st_size
        name = f"{path.name} {size} {rows}"
        digest = np.frombuffer(hashlib.sha256(name.encode()).digest()[:8], np.uint32)
        shards[(*digest.tolist(), rows)] = path
    return shards


def gather_directories(
    shards: dict[tuple[int, int, int], Path],
    all_gather: Callable[[np.ndarray], np.ndarray] | None,
) -> list[list[tuple[int, int, int]]]:
    """What shards the processes have: all the same, or each its own.

    Args:
        shards: of `shard_ids`; none if this process's folder cannot be used.
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
    """Raise a ValueError if a row group's latents, or images, do not go with the arguments.

    Args:
        group: of any shard.
        first: latents_metadata the first shard.
        resolution, resample, random_crop: of ParquetImagePairs.
    """
    kept = latents_metadata(group.metadata)
    for name in ("vae", "shape"):
        if (kept or {}).get(name) != (first or {}).get(name):
            raise ValueError(
                f"{group.path.name} and others of {group.path.parent} do not go together: latents "
                "and images, or latents of two VAEs or sizes; keep them in folders of their own"
            )
    if kept is None:
        return
    if random_crop:
        raise ValueError(
            "random_crop=True does not go with latents, which are of the middle of each image; "
            "switch it off (for square images it changes nothing)"
        )
    for name, value in (("resolution", resolution), ("image_interpolation_mode", resample)):
        if kept[name] != value:
            raise ValueError(
                f"{group.path.parent} holds latents of {name}={kept[name]}, not {value}; give "
                "that, or make others in another folder"
            )
