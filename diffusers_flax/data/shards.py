"""Reading parquet shards of (original image, instruction, edited image).

for group in list_row_groups("data"):
    cells = read_row_group(group)
    pair = pair_at(cells, 0)  # encoded bytes; data/decoding.py decodes them
"""

import hashlib
import json
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from diffusers_flax.data.known_sets import COLUMN_FLAGS, nearest_set
from diffusers_flax.data.options import Columns
from diffusers_flax.data.streaming import (
    RemoteFile,
    chunk_ranges,
    is_remote,
    list_files,
    open_shards,
)
from diffusers_flax.messages import first_names, one_line

ROLES = dict(zip(COLUMN_FLAGS, ("original image", "edited image", "instruction")))
TEXT_TYPES = (pa.string(), pa.large_string(), pa.string_view())  # or a dictionary of one
BINARY_TYPES = (pa.binary(), pa.large_binary(), pa.binary_view())  # likewise
MASK_COLUMNS = ("mask_img", "mask_image", "mask", "MASK_IMG")  # names of columns of masks
MASK = "mask"  # column of shards of latents: uint8 (h, w), see decoding.reduce_mask
TIME_IDS = "time_ids"  # column of shards of latents: float32 (2, 6), see decode_pair
LATENTS = b"latents"  # metadata key of shards by cache_latents.py: how their latents were made
UNFINISHED_DIR = ".unfinished"  # subdirectory; marks an incomplete directory of shards
INDEX_HINT = (
    "if it is the index of archives, make shards with parquet_processing.py --pairs DIR, of the "
    "directory that has both"
)
READ_ROWS = 32  # rows of a column that are read at a time
READ_BYTES = 8 << 20  # read buffer; without one pyarrow reads whole column chunks


class Pair(NamedTuple):
    """One stored row: two encoded images and the instruction, or several to draw from."""

    original: bytes | None
    edited: bytes | None
    instruction: str | tuple[str, ...] | None
    time_ids: bytes | None = None  # of shards of latents
    mask: bytes | None = None  # encoded image, see RowGroup


class RowGroup(NamedTuple):
    """A row group of a shard, the unit in which parquet is read."""

    path: Path | RemoteFile  # of the shard
    metadata: pq.FileMetaData
    columns: tuple[str, str, str]  # original image, edited image, instruction
    index: int  # in the shard
    first_row: int  # row of the shard at which it starts
    num_rows: int
    mask_column: str = ""  # "": masks are not read


def list_row_groups(
    train_data_dir: str, columns: Columns = Columns(), flag: str = "--train_data_dir"
) -> list[RowGroup]:
    """Open every shard of a directory, check its columns and list its row groups.

    Args:
        train_data_dir: directory of *.parquet files, read in the order of their names; hidden
            files do not count. Or a URL, see streaming.list_files.
        columns: names to look for; in shards of latents masks are in the column MASK.
        flag: the directory's flag, for error messages.

    Returns:
        All row groups with at least one row, in order.

    Raises:
        ValueError: no such directory, no shards, unreadable shards (all are named), a column that
            is missing or of the wrong type, or no rows.
    """
    shards = open_shards(train_data_dir) if is_remote(train_data_dir) else None
    shards = shards or open_local_shards(Path(train_data_dir), flag)
    groups = []
    for path, metadata in shards:
        schema = metadata.schema.to_arrow_schema()
        try:
            names, mask = find_columns(schema, path, columns), ""
        except ValueError as error:
            hint = "" if has_bytes(schema) else f"; {INDEX_HINT}"
            raise ValueError(f"{error}{hint}") from error
        if columns.mask is not None:
            is_latents = latents_metadata(metadata) is not None
            mask = MASK if is_latents else find_mask_column(schema, path, columns.mask)
            if mask not in schema.names:
                raise ValueError(
                    f"{path} has latents without masks, which --mask_loss_weight needs; make them "
                    "in another directory, by training with --cache_latents or with "
                    "cache_latents.py --cache_masks"
                )
        first_row = 0
        for index in range(metadata.num_row_groups):
            num_rows = metadata.row_group(index).num_rows
            if num_rows:
                groups.append(RowGroup(path, metadata, names, index, first_row, num_rows, mask))
            first_row += num_rows
    if not groups:
        raise ValueError(
            f"the {len(shards)} shards in {train_data_dir} have 0 rows; name another directory"
        )
    return groups


def has_bytes(schema: pa.Schema) -> bool:
    """Whether a column may have images themselves; an index of files has none."""
    return any("binary" in str(data_type) for data_type in schema.types)


def open_local_shards(directory: Path, flag: str) -> list[tuple[Path, pq.FileMetaData]]:
    """The shards of a directory on this machine; arguments and errors of list_row_groups."""
    if not directory.is_dir():
        raise ValueError(f"{flag} {directory} is not a directory; name the directory of the shards")
    if (directory / UNFINISHED_DIR).exists():
        raise ValueError(
            f"{directory} is not complete, as it contains {UNFINISHED_DIR}: run the same command "
            "of script.sh, make_pairs.py or parquet_processing.py --pairs again, or remove "
            f"{directory / UNFINISHED_DIR} if none goes on"
        )
    paths = shard_files(directory)
    if not paths:
        raise ValueError(
            f"{flag} {directory} contains no *.parquet file; download shards with script.py and "
            "script.sh (--num_workers 1 gives all shards to every worker), or make them from "
            "images or archives with parquet_processing.py --pairs"
        )

    shards, unreadable = [], []
    for path in paths:
        try:
            shards.append((path, pq.read_metadata(path)))
        except (pa.ArrowException, OSError) as error:
            unreadable.append(f"{path.name} ({one_line(error, 200)})")
    if unreadable:
        raise ValueError(
            f"{len(unreadable)} of {len(paths)} shards in {directory} cannot be read as parquet: "
            f"{', '.join(unreadable)}; delete them and download them again"
        )
    return shards


def shard_files(directory: str | Path) -> list[Path] | list[RemoteFile]:
    """The shards of a directory by name, without hidden files such as ._a.parquet of macOS."""
    if is_remote(directory):
        return list_files(directory)
    return sorted(Path(directory).glob("[!.]*.parquet"))


def latents_metadata(metadata: pq.FileMetaData) -> dict | None:
    """How cache_latents.py made a shard's latents; None for a shard of images."""
    text = (metadata.metadata or {}).get(LATENTS)
    return None if text is None else json.loads(text)


def has_time_ids(group: RowGroup) -> bool:
    """Whether a row group of latents also has the time ids of SDXL."""
    is_latents = latents_metadata(group.metadata) is not None
    return is_latents and TIME_IDS in group.metadata.schema.names


def source_columns(group: RowGroup) -> list[str]:
    """The columns of the dataset that are read, also if the row group contains their latents."""
    latents = latents_metadata(group.metadata)
    columns, mask_column = group.columns, group.mask_column
    if latents is not None:
        columns, mask_column = latents["columns"], latents.get("mask_column")
    return [*columns, mask_column] if group.mask_column else [*columns]


def find_columns(
    schema: pa.Schema, path: Path | RemoteFile, chosen: Columns
) -> tuple[str, str, str]:
    """Find a shard's columns of the original image, the edited image and the instruction.

    Raises:
        ValueError: a column is missing, ambiguous or of the wrong type.
    """
    given = (chosen.original_image, chosen.edited_image, chosen.edit_prompt)
    nearest = nearest_set(schema.names, given)
    columns = tuple(flag or column for flag, column in zip(given, nearest.columns))
    missing = {flag: name for flag, name in zip(COLUMN_FLAGS, columns) if name not in schema.names}
    if missing:
        named = [name for name in missing.values() if name in given]
        roles = " and ".join(f"the {ROLES[flag]}" for flag in missing)
        lacks = named[0] if named else f"that is known to have {roles}"
        raise ValueError(
            f"{path} has no column {lacks}; it has {first_names(schema.names)}: choose with "
            f"--{' and --'.join(missing)}"
        )
    for flag, name in zip(COLUMN_FLAGS, columns):
        check_column(schema, path, name, flag)
    return columns


def find_mask_column(
    schema: pa.Schema, path: Path | RemoteFile, given: str = "", missing_ok: bool = False
) -> str:
    """Find the column of a shard's masks; "" tries the names in MASK_COLUMNS.

    Args:
        schema, path: of the shard.
        given: --mask_column.
        missing_ok: return "" if `given` is "" and there is no mask.

    Raises:
        ValueError: it is missing, ambiguous or of the wrong type.
    """
    names = (given,) if given else MASK_COLUMNS
    name = next((name for name in names if name in schema.names), None)
    if name is None and missing_ok and not given:
        return ""
    if name is None:
        remedy = "" if missing_ok else ", or leave out --mask_loss_weight"
        raise ValueError(
            f"{path} has no column {' or '.join(names)}; it has {first_names(schema.names)}: "
            f"choose one with --mask_column{remedy}"
        )
    check_column(schema, path, name, "mask_column")
    return name


def check_column(schema: pa.Schema, path: Path | RemoteFile, name: str, flag: str) -> None:
    """Raise a ValueError for a repeated column or a type that does not fit its flag."""
    if (count := schema.names.count(name)) > 1:
        raise ValueError(
            f"{path} has {count} columns named {name}; rename all but one, or choose another with "
            f"--{flag}"
        )
    data_type = schema.field(name).type
    if flag == "edit_prompt_column":
        wanted, fits = "text or a list of texts", is_text(data_type) or is_list_of_text(data_type)
    else:
        wanted = (
            "encoded images (binary, or a struct with a binary field bytes) or text with the paths "
            "of their files"
        )
        fits = is_text(data_type) or is_binary(data_type)
        if pa.types.is_struct(data_type):
            fields = {field.name: field.type for field in data_type}
            fits = is_binary(fields.get("bytes")) or is_text(fields.get("path"))
    if not fits:
        raise ValueError(
            f"{path}: column {name} is {data_type}, not {wanted}; it has "
            f"{', '.join(schema.names)}: choose another with --{flag}"
        )


def is_text(data_type: pa.DataType | None) -> bool:
    """Whether a type is text, directly or in a dictionary."""
    return getattr(data_type, "value_type", data_type) in TEXT_TYPES and not is_list(data_type)


def is_binary(data_type: pa.DataType | None) -> bool:
    """Whether a type is bytes, directly or in a dictionary."""
    return getattr(data_type, "value_type", data_type) in BINARY_TYPES and not is_list(data_type)


def is_list(data_type: pa.DataType | None) -> bool:
    """Whether a type is a list, of variable or fixed length."""
    return isinstance(data_type, pa.ListType | pa.LargeListType | pa.FixedSizeListType)


def is_list_of_text(data_type: pa.DataType) -> bool:
    """Whether a type is a list of texts."""
    return is_list(data_type) and is_text(data_type.value_type)


class ImageColumn:
    """The encoded images of a row group's column, concatenated in one buffer.

    Allocating a buffer of 200 MB takes as long as filling it, and frequent allocations fragment
    memory. Buffers are therefore reused: a deleted ImageColumn returns its buffer to `spare`.
    """

    def __init__(self, column: Iterator[pa.Array], num_bytes: int, spare: list[np.ndarray]):
        """Copy the arrays of a column; num_bytes: estimate of their total size."""
        try:
            self._buffer = spare.pop()
        except IndexError:
            self._buffer = np.empty(0, np.uint8)
        if len(self._buffer) < num_bytes:
            self._buffer = np.empty(num_bytes + num_bytes // 8, np.uint8)  # larger, for reuse
        stops, valid, stop = [np.zeros(1, np.int64)], [], 0
        for array in column:
            if array.type not in (pa.binary(), pa.large_binary()):  # a view or a dictionary
                array = array.cast(pa.large_binary())
            _, offsets, data = array.buffers()
            dtype = np.int64 if pa.types.is_large_binary(array.type) else np.int32
            offsets = np.frombuffer(offsets, dtype)[array.offset : array.offset + len(array) + 1]
            start, size = int(offsets[0]), int(offsets[-1] - offsets[0])
            if stop + size > len(self._buffer):  # e.g. rows that share one stored image
                self._buffer = np.concatenate([self._buffer, np.empty(stop + size, np.uint8)])
            if size:
                self._buffer[stop : stop + size] = np.frombuffer(data, np.uint8, size, start)
            stops.append(offsets[1:].astype(np.int64) - start + stop)
            valid.append(array.is_valid().to_numpy(zero_copy_only=False))
            stop += size
        self._stops, self._valid = np.concatenate(stops), np.concatenate(valid)
        weakref.finalize(self, spare.append, self._buffer)

    def __len__(self) -> int:
        return len(self._valid)

    def is_complete(self) -> bool:
        """Whether no row is null."""
        return bool(self._valid.all())

    def __getitem__(self, row: int) -> bytes | None:
        if not self._valid[row]:
            return None
        return self._buffer[self._stops[row] : self._stops[row + 1]].tobytes()


class ImageFiles:
    """The images of a row group's column; some or all are files beside the shard."""

    def __init__(self, stored: ImageColumn | None, paths: pa.ChunkedArray, folder: Path | str):
        """stored: images in the shard; folder: the shard's, which paths are relative to."""
        self._stored, self._paths, self._folder = stored, paths, folder

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, row: int) -> bytes | None:
        data = None if self._stored is None else self._stored[row]
        path = self._paths[row].as_py()
        return read_beside(self._folder, path) if data is None and path else data

    def has_files(self) -> bool:
        """Whether any image is a file."""
        stored = self._stored or [None] * len(self)
        return any(data is None and path.as_py() for data, path in zip(stored, self._paths))


def read_beside(folder: Path | str, path: str) -> bytes:
    """Read a file that a shard names.

    A shard may come from anyone, so files outside its directory are not read. Links in the
    directory are followed.

    Args:
        folder: directory of the shard; in one at a URL no files are read.
        path: relative to folder, or absolute.

    Raises:
        ValueError: the file is outside of folder or cannot be read.
    """
    if is_remote(folder):
        raise ValueError(f"{path} is a file beside a streamed shard; download {folder}")
    root = os.path.abspath(folder)
    file = os.path.normpath(os.path.join(root, path))
    if not file.startswith(os.path.join(root, "")):
        raise ValueError(
            f"{path} is outside of {folder}; write paths relative to it, and link a directory of "
            "images into it, or make shards with parquet_processing.py --pairs"
        )
    try:
        with open(file, "rb") as opened:
            return opened.read()
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: {getattr(error, 'strerror', None) or error}") from error


class Cells(NamedTuple):
    """The encoded columns of a row group."""

    originals: ImageColumn | ImageFiles
    edited: ImageColumn | ImageFiles
    instructions: pa.ChunkedArray  # converted row by row, as a row may not be UTF-8
    time_ids: pa.ChunkedArray | None = None  # of shards of latents
    masks: ImageColumn | ImageFiles | None = None


def read_row_group(group: RowGroup, spare: list[np.ndarray] | None = None) -> Cells:
    """Read a row group, READ_ROWS rows of a column at a time to save memory.

    Args:
        group: the row group.
        spare: buffers to reuse; this row group's buffers are appended when it is deleted.

    Raises:
        ValueError: the data are damaged.
    """
    spare = [] if spare is None else spare
    images, texts = columns_to_read(group)
    with open_row_group(group, images + texts) as file:
        images = [read_images(file, group, name, spare) for name in images]
        texts = [pa.chunked_array(list(read_column(file, group, name))) for name in texts]
    return Cells(*images[:2], *texts)._replace(masks=images[2] if group.mask_column else None)


def columns_to_read(group: RowGroup) -> tuple[list[str], list[str]]:
    """The columns that read_row_group reads: images, then instructions and time ids."""
    masks = [group.mask_column] if group.mask_column else []
    texts = [group.columns[2], *[TIME_IDS] * has_time_ids(group)]
    return [*group.columns[:2], *masks], texts


def start_fetching(group: RowGroup) -> None:
    """Begin to fetch what read_row_group reads of a streamed shard."""
    images, texts = columns_to_read(group)
    group.path.open(chunk_ranges(group.metadata, group.index, images + texts))


@contextmanager
def open_row_group(group: RowGroup, columns: Iterable[str]) -> Iterator[pq.ParquetFile]:
    """Open the shard of a row group, to read columns of it.

    A context in which errors become a ValueError. The columns of a streamed shard are fetched at
    once.
    """
    source = group.path
    if isinstance(source, RemoteFile):
        source = source.open(chunk_ranges(group.metadata, group.index, columns))
    try:
        with pq.ParquetFile(
            source, metadata=group.metadata, pre_buffer=False, buffer_size=READ_BYTES
        ) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        if source is not group.path:
            raise ValueError(
                f"{group.path}: row group {group.index} is damaged ({one_line(error, 200)}); ask "
                "its publisher for another copy"
            ) from error
        remedy = "download it again"
        if latents_metadata(group.metadata) is not None:
            remedy = "make it again with cache_latents.py, or by training with --cache_latents"
        raise ValueError(
            f"{group.path}: row group {group.index} cannot be read ({one_line(error, 200)}); "
            f"delete the shard and {remedy}"
        ) from error


def read_images(
    file: pq.ParquetFile, group: RowGroup, name: str, spare: list[np.ndarray]
) -> ImageColumn | ImageFiles:
    """Read a column of images; arguments as for read_row_group."""
    data_type, folder = file.schema_arrow.field(name).type, group.path.parent
    if is_text(data_type):
        return ImageFiles(None, pa.chunked_array(list(read_column(file, group, name))), folder)
    field, stored = "", None
    if pa.types.is_struct(data_type):
        field = (
            "bytes" if is_binary(dict((f.name, f.type) for f in data_type).get("bytes")) else "path"
        )
    if field != "path":
        leaf = f"{name}.{field}" if field else name
        row_group = group.metadata.row_group(group.index)
        chunks = map(row_group.column, range(row_group.num_columns))
        num_bytes = {c.path_in_schema: c.total_uncompressed_size for c in chunks}[leaf]
        stored = ImageColumn(read_column(file, group, name, field), num_bytes, spare)
        has_paths = field and data_type.get_field_index("path") >= 0
        if stored.is_complete() or not (has_paths and is_text(data_type.field("path").type)):
            return stored
    return ImageFiles(
        stored, pa.chunked_array(list(read_column(file, group, name, "path"))), folder
    )


def read_column(
    file: pq.ParquetFile, group: RowGroup, name: str, field: str = ""
) -> Iterator[pa.Array]:
    """Read a column of a row group, or only a field of its structs, READ_ROWS rows at a time."""
    leaf = f"{name}.{field}" if field else name
    for part in file.iter_batches(READ_ROWS, [group.index], [leaf], use_threads=False):
        column = part.column(name)  # a column of its own may also be named leaf, and is read too
        yield pc.struct_field(column, field) if field else column


def pair_at(cells: Cells, position: int) -> Pair:
    """One row of a row group. An empty list, or one with a null, is no instruction.

    Raises:
        ValueError: the instruction is not text, or the file of an image cannot be read.
    """
    try:
        instruction = cells.instructions[position].as_py()
    except UnicodeDecodeError as error:
        raise ValueError(f"the instruction is not UTF-8 ({error})") from error
    if isinstance(instruction, list):
        is_complete = instruction and None not in instruction
        instruction = tuple(instruction) if is_complete else None
    time_ids = None if cells.time_ids is None else cells.time_ids[position].as_py()
    mask = None if cells.masks is None else cells.masks[position]
    original, edited = cells.originals[position], cells.edited[position]
    return Pair(original, edited, instruction, time_ids, mask)


def choose_instruction(instruction: str | tuple[str, ...], draw: float) -> str:
    """A pair's instruction, or one of several; draw: in [0, 1), 0 takes the first."""
    is_one = isinstance(instruction, str)
    return instruction if is_one else instruction[int(draw * len(instruction))]


def take_first_rows(groups: list[RowGroup], num_rows: int) -> list[RowGroup]:
    """The row groups with the first num_rows rows; the last one may be truncated."""
    first_groups = []
    for group in groups:
        if num_rows <= 0:
            break
        first_groups.append(group._replace(num_rows=min(group.num_rows, num_rows)))
        num_rows -= group.num_rows
    return first_groups


def shard_ids(groups: list[RowGroup]) -> dict[tuple[int, int, int], Path | RemoteFile]:
    """Identify each shard by three 32-bit numbers: a 64-bit hash of name and size, and its rows.

    A shard of latents has the id of its shard of images.
    """
    shards = {}
    for path, metadata in {group.path: group.metadata for group in groups}.items():
        rows, latents = metadata.num_rows, latents_metadata(metadata)
        size = latents["source_bytes"] if latents else path.stat().st_size
        name = f"{path.name} {size} {rows}"
        digest = np.frombuffer(hashlib.sha256(name.encode()).digest()[:8], np.uint32)
        shards[(*digest.tolist(), rows)] = path
    return shards


def gather_rows(
    array: np.ndarray, all_gather: Callable[[np.ndarray], np.ndarray]
) -> list[np.ndarray]:
    """Gather the arrays (n, ...) of all processes; n may differ.

    Raises:
        ValueError: a process has no rows because it cannot read its data.
    """
    counts = np.reshape(all_gather(np.array([len(array)], np.int32)), -1)
    if counts.min() == 0:
        raise ValueError(
            f"process {counts.argmin()} cannot use its --train_data_dir; see its error"
        )
    padded = np.zeros((counts.max(), *array.shape[1:]), array.dtype)
    padded[: len(array)] = array
    return [rows[:count] for rows, count in zip(all_gather(padded), counts)]


def gather_directories(
    shards: dict[tuple[int, int, int], Path | RemoteFile],
    all_gather: Callable[[np.ndarray], np.ndarray] | None,
) -> list[list[tuple[int, int, int]]]:
    """Collect the shard ids of all processes' directories.

    Args:
        shards: this process's shards, see `shard_ids`.
        all_gather: collective, array -> stacked arrays of all processes. None: there is only one
            process, or all processes have the same shards.

    Returns:
        One sorted list if all processes have the same shards, else one sorted list per process.

    Raises:
        ValueError: a process has no usable directory, or directories overlap but differ.
    """
    if all_gather is None:
        return [sorted(shards)]

    tables = gather_rows(np.array(sorted(shards), np.uint32), all_gather)
    directories = [[tuple(row) for row in table.tolist()] for table in tables]
    if all(directory == directories[0] for directory in directories):
        return directories[:1]
    owners = {}
    for process, directory in enumerate(directories):
        for shard in directory:
            if shard in owners:
                raise ValueError(
                    f"processes {owners[shard]} and {process} both have "
                    f"{shards[shard].name if shard in shards else 'a shard'}, but their "
                    "directories differ; give every process all shards, or give each its own part "
                    "of the plan"
                )
            owners[shard] = process
    return directories
