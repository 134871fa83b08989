"""Reading parquet shards of (image, instruction, edited image).

for group in list_row_groups("data"):
    cells = read_row_group(group)
    pair = pair_at(cells, 0)  # encoded bytes; dataloading/decoding.py decodes them
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

from diffusers_flax.messages import one_line

# Column names of public datasets, by the flag that selects another column.
KNOWN_COLUMNS = {
    "original_image_column": ("original_image", "input_image"),
    "edited_image_column": ("edited_image",),
    "edit_prompt_column": ("edit_prompt",),
}
TEXT_TYPES = (pa.string(), pa.large_string(), pa.string_view())  # or a dictionary of one
BINARY_TYPES = (pa.binary(), pa.large_binary(), pa.binary_view())  # likewise
TIME_IDS = "time_ids"  # column of shards of latents: float32 (2, 6), see decode_pair
LATENTS = b"latents"  # metadata key of shards by cache_latents.py: how their latents were made
UNFINISHED_DIR = ".unfinished"  # subdirectory; marks an incomplete directory of shards
READ_ROWS = 32  # rows of a column that are read at a time
READ_BYTES = 8 << 20  # read buffer; without one pyarrow reads whole column chunks


class Pair(NamedTuple):
    """One stored row: two encoded images and the instruction."""

    original: bytes | None
    edited: bytes | None
    prompt: str | None
    time_ids: bytes | None = None  # of shards of latents


class RowGroup(NamedTuple):
    """A row group of a shard, the unit in which parquet is read."""

    path: Path
    metadata: pq.FileMetaData
    columns: tuple[str, str, str]  # original image, edited image, prompt
    index: int  # in the shard
    first_row: int  # row of the shard at which it starts
    num_rows: int


def list_row_groups(
    train_data_dir: str,
    original_image_column: str = "",
    edited_image_column: str = "",
    edit_prompt_column: str = "",
    flag: str = "--train_data_dir",
) -> list[RowGroup]:
    """Open every shard of a directory, check its columns and list its row groups.

    Args:
        train_data_dir: directory of *.parquet files, read in the order of their names; hidden
            files do not count.
        original_image_column: column of the image to edit; "": the names in KNOWN_COLUMNS.
        edited_image_column: column of the edited image; "" likewise.
        edit_prompt_column: column of the instruction; "" likewise.
        flag: that names the directory, for error messages.

    Returns:
        All row groups with at least one row, in order.

    Raises:
        ValueError: no such directory, no shards, unreadable shards (all are named), a column that
            is missing or of the wrong type, or no rows.
    """
    directory = Path(train_data_dir)
    if not directory.is_dir():
        raise ValueError(f"{flag} {directory} is not a directory; name the directory of the shards")
    if (directory / UNFINISHED_DIR).exists():
        raise ValueError(
            f"{directory} is not complete, as it contains {UNFINISHED_DIR}: run script.sh again, "
            f"or remove {directory / UNFINISHED_DIR} if it belongs to another plan; if "
            f"parquet_processing.py --pairs was killed, remove {directory} and run that again"
        )
    paths = shard_files(directory)
    if not paths:
        raise ValueError(
            f"{flag} {directory} contains no *.parquet file; download shards with script.py and "
            "script.sh (--num_workers 1 gives all shards to every worker), or make them from "
            "images with parquet_processing.py --pairs"
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
        raise ValueError(
            f"the {len(paths)} shards in {directory} have 0 rows; name another directory"
        )
    return groups


def shard_files(directory: Path) -> list[Path]:
    """The shards of a directory by name. Hidden files, such as ._a.parquet of macOS, are none."""
    return sorted(directory.glob("[!.]*.parquet"))


def latents_metadata(metadata: pq.FileMetaData) -> dict | None:
    """How cache_latents.py made a shard's latents; None for a shard of images."""
    text = (metadata.metadata or {}).get(LATENTS)
    return None if text is None else json.loads(text)


def has_time_ids(group: RowGroup) -> bool:
    """Whether a row group of latents also has the time ids of SDXL."""
    is_latents = latents_metadata(group.metadata) is not None
    return is_latents and TIME_IDS in group.metadata.schema.names


def source_columns(group: RowGroup) -> list[str]:
    """The columns of the dataset that a row group was made from, also if it contains latents."""
    latents = latents_metadata(group.metadata)
    return latents["columns"] if latents else list(group.columns)


def find_columns(
    schema: pa.Schema, path: Path, original: str = "", edited: str = "", prompt: str = ""
) -> tuple[str, str, str]:
    """Find the original, edited and prompt columns of a shard; "" tries the names in KNOWN_COLUMNS.

    Raises:
        ValueError: a column is missing, ambiguous or of the wrong type.
    """
    found = []
    for flag, given in zip(KNOWN_COLUMNS, (original, edited, prompt)):
        names = (given,) if given else KNOWN_COLUMNS[flag]
        name = next((name for name in names if name in schema.names), None)
        if name is None:
            raise ValueError(
                f"{path} has no column {' or '.join(names)}; it has {', '.join(schema.names)}: "
                f"choose one with --{flag}"
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
                f"{', '.join(schema.names)}: choose another with --{flag}"
            )
        found.append(name)
    return tuple(found)


class ImageColumn:
    """The encoded images of a row group's column, concatenated in one buffer.

    Allocating a buffer of 200 MB takes as long as filling it, and frequent allocations fragment
    memory. Buffers are therefore reused: a deleted ImageColumn returns its buffer to `spare`.
    """

    def __init__(self, column: Iterator[pa.Array], num_bytes: int, spare: list[np.ndarray]):
        """Copy the arrays of a column; num_bytes: estimate of their total size."""
        self._buffer = spare.pop() if spare else np.empty(0, np.uint8)
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

    def __getitem__(self, row: int) -> bytes | None:
        if not self._valid[row]:
            return None
        return self._buffer[self._stops[row] : self._stops[row + 1]].tobytes()


class Cells(NamedTuple):
    """The encoded columns of a row group."""

    originals: ImageColumn
    edits: ImageColumn
    prompts: pa.ChunkedArray  # converted row by row, as a row may not be UTF-8
    time_ids: pa.ChunkedArray | None = None  # of shards of latents


def read_row_group(group: RowGroup, spare: list[np.ndarray] | None = None) -> Cells:
    """Read a row group, READ_ROWS rows of a column at a time to save memory.

    Args:
        group: the row group.
        spare: buffers to reuse; this row group's buffers are appended when it is deleted.

    Raises:
        ValueError: the data are damaged.
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
            for name in (*group.columns, *[TIME_IDS] * has_time_ids(group)):
                # Of a struct only the field "bytes" is read.
                is_struct = pa.types.is_struct(file.schema_arrow.field(name).type)
                leaf = f"{name}.bytes" if is_struct else name
                parts = file.iter_batches(READ_ROWS, [group.index], [leaf], use_threads=False)
                # A column of its own may also be named leaf, and is then read too.
                parts = (part.column(name) for part in parts)
                if is_struct:
                    parts = (pc.struct_field(part, "bytes") for part in parts)
                if len(columns) < 2:
                    columns.append(ImageColumn(parts, sizes[leaf], spare))
                else:
                    columns.append(pa.chunked_array(list(parts)))
    except (pa.ArrowException, OSError) as error:
        remedy = "download it again"
        if latents_metadata(group.metadata) is not None:
            remedy = "make it again with cache_latents.py, or by training with --cache_latents"
        raise ValueError(
            f"{group.path}: row group {group.index} cannot be read ({one_line(error, 200)}); "
            f"delete the shard and {remedy}"
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
    time_ids = None if cells.time_ids is None else cells.time_ids[position].as_py()
    return Pair(cells.originals[position], cells.edits[position], prompt, time_ids)


def take_first_rows(groups: list[RowGroup], num_rows: int) -> list[RowGroup]:
    """The row groups with the first num_rows rows; the last one may be truncated."""
    first_groups = []
    for group in groups:
        if num_rows <= 0:
            break
        first_groups.append(group._replace(num_rows=min(group.num_rows, num_rows)))
        num_rows -= group.num_rows
    return first_groups


def shard_ids(groups: list[RowGroup]) -> dict[tuple[int, int, int], Path]:
    """Identify each shard by three 32-bit numbers: a 64-bit hash of name and size, and its rows.

    A shard of latents has the id of the shard of images that it was made from.
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

    counts = np.reshape(all_gather(np.array([len(shards)], np.int32)), -1)
    if counts.min() == 0:
        raise ValueError(
            f"process {counts.argmin()} cannot use its --train_data_dir; see its error"
        )
    padded = np.zeros((counts.max(), 3), np.uint32)
    padded[: len(shards)] = sorted(shards)
    tables = [table[:count] for table, count in zip(all_gather(padded), counts)]
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
