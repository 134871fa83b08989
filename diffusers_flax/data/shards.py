"""Reading parquet shards of (original image, instruction, edited image).

for group in list_row_groups("data"):
    cells = read_row_group(group)
    pair = pair_at(cells, 0)  # encoded bytes; data/decoding.py decodes them
"""

import hashlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from diffusers_flax.data.known_sets import COLUMN_FLAGS, nearest_set
from diffusers_flax.data.options import Columns
from diffusers_flax.data.streaming import RemoteFile, is_remote, open_shards
from diffusers_flax.messages import first_names, one_line

MASK_COLUMNS = ("mask_img", "mask_image", "mask", "MASK_IMG")  # names of columns of masks
MASK = "mask"  # column of shards of latents: uint8 (h, w), see decoding.reduce_mask
REFERENCE = "reference_image"  # usual column of reference images, and of their latents
TIME_IDS = "time_ids"  # column of shards of latents: float32 (2, 6), see decode_pair
LATENTS = b"latents"  # metadata key of shards by cache_latents.py: how their latents were made
UNFINISHED_DIR = ".unfinished"  # subdirectory; marks an incomplete directory of shards
READ_ROWS = 32  # rows that are read at a time, to save memory
READ_BYTES = 8 << 20  # read buffer; without one pyarrow reads whole column chunks


class Pair(NamedTuple):
    """One stored row: two encoded images and the instruction, or several to draw from."""

    original: bytes | None
    edited: bytes | None
    instruction: str | tuple[str, ...] | None
    time_ids: bytes | None = None  # of shards of latents
    mask: bytes | None = None  # encoded image, see RowGroup
    reference: bytes | None = None  # likewise, or its latents


class RowGroup(NamedTuple):
    """A row group of a shard, the unit in which parquet is read."""

    path: Path | RemoteFile  # of the shard
    metadata: pq.FileMetaData
    columns: tuple[str, str, str]  # original image, edited image, instruction
    index: int  # in the shard
    first_row: int  # row of the shard at which it starts
    num_rows: int
    mask_column: str = ""  # "": masks are not read
    reference_column: str = ""  # "": reference images are not read


class Cells(NamedTuple):
    """The encoded columns of a row group."""

    group: RowGroup
    table: pa.Table


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
        ValueError: no such directory, no shards, an unreadable shard, a column that is missing or
            of the wrong type, or no rows.
    """
    if is_remote(train_data_dir):
        shards = open_shards(train_data_dir)
    else:
        shards = open_local_shards(Path(train_data_dir), flag)
    groups = []
    for path, metadata in shards:
        schema = metadata.schema.to_arrow_schema()
        names, mask = find_columns(schema, path, columns), ""
        is_latents = latents_metadata(metadata) is not None
        if columns.mask is not None:
            if is_latents and MASK not in schema.names:
                raise ValueError(
                    f"{path} has latents without masks, which --mask_loss_weight needs; make them "
                    "in another directory with cache_latents.py --cache_masks"
                )
            mask = MASK if is_latents else find_mask_column(schema, path, columns.mask)
        reference = columns.reference_image or ""
        if reference and is_latents:
            reference = REFERENCE
            if reference not in schema.names:
                raise ValueError(
                    f"{path} has latents without reference images, which this UNet needs; make "
                    "them in another directory with cache_latents.py --cache_references"
                )
        elif reference:
            check_column(schema, path, reference, "reference_image_column")
        first_row = 0
        for index in range(metadata.num_row_groups):
            num_rows = metadata.row_group(index).num_rows
            if num_rows:
                place = path, metadata, names, index, first_row, num_rows
                groups.append(RowGroup(*place, mask, reference))
            first_row += num_rows
    if not groups:
        raise ValueError(f"the shards in {train_data_dir} have 0 rows; name another directory")
    return groups


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
            "script.sh, or make them with parquet_processing.py --pairs"
        )
    shards = []
    for path in paths:
        try:
            shards.append((path, pq.read_metadata(path)))
        except (pa.ArrowException, OSError) as error:
            raise ValueError(
                f"{path} cannot be read as parquet ({one_line(error, 200)}); download it again"
            ) from error
    return shards


def shard_files(directory: str | Path) -> list[Path]:
    """The shards of a directory by name, without hidden files such as ._a.parquet of macOS."""
    return sorted(Path(directory).glob("[!.]*.parquet"))


def latents_metadata(metadata: pq.FileMetaData) -> dict | None:
    """How cache_latents.py made a shard's latents; None for a shard of images."""
    text = (metadata.metadata or {}).get(LATENTS)
    return None if text is None else json.loads(text)


def source_columns(group: RowGroup) -> list[str]:
    """The columns of the dataset that are read, also if the row group contains their latents."""
    latents = latents_metadata(group.metadata)
    columns, mask, reference = group.columns, group.mask_column, group.reference_column
    if latents is not None:
        columns, mask = latents["columns"], mask and latents.get("mask_column")
        reference = reference and latents.get("reference_column")
    return [*columns, *filter(None, (mask, reference))]


def find_columns(
    schema: pa.Schema, path: Path | RemoteFile, chosen: Columns
) -> tuple[str, str, str]:
    """Find a shard's columns of the original image, the edited image and the instruction.

    Raises:
        ValueError: a column is missing or of the wrong type.
    """
    given = (chosen.original_image, chosen.edited_image, chosen.edit_prompt)
    nearest = nearest_set(schema.names, given)
    columns = tuple(flag or column for flag, column in zip(given, nearest.columns))
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
        ValueError: it is missing or of the wrong type.
    """
    name = given or next((name for name in MASK_COLUMNS if name in schema.names), "")
    if not name and missing_ok:
        return ""
    check_column(schema, path, name or " or ".join(MASK_COLUMNS), "mask_column")
    return name


def check_column(schema: pa.Schema, path: Path | RemoteFile, name: str, flag: str) -> None:
    """Raise a ValueError for a column that is missing or of a type that does not fit its flag."""
    if name not in schema.names:
        raise ValueError(
            f"{path} has no column {name}; it has {first_names(schema.names)}: choose with --{flag}"
        )
    data_type = str(schema.field(name).type)  # such as struct<bytes: binary, path: string>
    has_text, has_images = "string" in data_type, "binary" in data_type
    is_prompt = flag == "edit_prompt_column"
    if (not has_text and not has_images) or (is_prompt and has_images):
        wanted = "text" if is_prompt else "images or paths of their files"
        raise ValueError(
            f"{path}: column {name} is {data_type}, not {wanted}; it has "
            f"{', '.join(schema.names)}: choose another with --{flag}"
        )


def has_bytes(schema: pa.Schema) -> bool:
    """Whether a column may have images themselves; an index of files has none."""
    return any("binary" in str(data_type) for data_type in schema.types)


def read_row_group(group: RowGroup) -> Cells:
    """Read the columns of a row group.

    Raises:
        ValueError: the data are damaged.
    """
    names = [*group.columns, *filter(None, (group.mask_column, group.reference_column))]
    names += [TIME_IDS] * (TIME_IDS in group.metadata.schema.names)
    return Cells(group, read_columns(group, names))


def read_columns(group: RowGroup, names: list[str]) -> pa.Table:
    """Read columns of a row group; those of a streamed shard are fetched at once.

    Raises:
        ValueError: the data are damaged.
    """
    source = group.path
    if isinstance(source, RemoteFile):
        source = source.open(chunk_ranges(group.metadata, group.index, names))
    try:
        with pq.ParquetFile(
            source, metadata=group.metadata, pre_buffer=False, buffer_size=READ_BYTES
        ) as file:
            batches = file.iter_batches(READ_ROWS, [group.index], names, use_threads=False)
            return pa.Table.from_batches(list(batches))
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"{group.path}: row group {group.index} cannot be read ({one_line(error, 200)}); "
            "download or make the shard again"
        ) from error


def chunk_ranges(metadata: pq.FileMetaData, index: int, names: list[str]) -> list[tuple[int, int]]:
    """(start, stop) of the column chunks of some columns, with their fields, in a row group."""
    row_group, ranges = metadata.row_group(index), []
    for chunk in map(row_group.column, range(row_group.num_columns)):
        if any(f"{chunk.path_in_schema}.".startswith(f"{name}.") for name in names):
            start = chunk.data_page_offset
            if chunk.has_dictionary_page and chunk.dictionary_page_offset:
                start = min(start, chunk.dictionary_page_offset)
            ranges.append((start, start + chunk.total_compressed_size))
    return ranges


def pair_at(cells: Cells, position: int) -> Pair:
    """One row of a row group. An empty list, or one with a null, is no instruction.

    Raises:
        ValueError: the instruction is not text, or the file of an image cannot be read.
    """
    original, edited, edit_prompt = cells.group.columns
    instruction = cells.table[edit_prompt][position].as_py()
    if isinstance(instruction, list):
        is_complete = instruction and None not in instruction
        instruction = tuple(instruction) if is_complete else None
    has_ids, mask = TIME_IDS in cells.table.column_names, cells.group.mask_column
    reference = cells.group.reference_column
    return Pair(
        image_at(cells, original, position),
        image_at(cells, edited, position),
        instruction,
        cells.table[TIME_IDS][position].as_py() if has_ids else None,
        image_at(cells, mask, position) if mask else None,
        image_at(cells, reference, position) if reference else None,
    )


def image_at(cells: Cells, name: str, position: int) -> bytes | None:
    """The encoded image of a row; it may be a file beside the shard, see read_beside."""
    data = cells.table[name][position].as_py()
    if isinstance(data, dict):
        data = data.get("path") if data.get("bytes") is None else data["bytes"]
    return read_beside(cells.group.path.parent, data) if isinstance(data, str) else data


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
            f"{path} is outside of {folder}; link a directory of images into it, or make shards "
            "with parquet_processing.py --pairs"
        )
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from error


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


def shard_ids(groups: list[RowGroup]) -> dict[tuple[int, int, int], str]:
    """{three 32-bit numbers: name} of each shard: a 64-bit hash of name and size, and its rows.

    A shard of latents has the id of its shard of images.
    """
    shards = {}
    for path, metadata in {group.path: group.metadata for group in groups}.items():
        rows, latents = metadata.num_rows, latents_metadata(metadata)
        size = latents["source_bytes"] if latents else path.stat().st_size
        name = f"{path.name} {size} {rows}"
        digest = np.frombuffer(hashlib.sha256(name.encode()).digest()[:8], np.uint32)
        shards[(*digest.tolist(), rows)] = path.name
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
    shards: dict[tuple[int, int, int], str],
    all_gather: Callable[[np.ndarray], np.ndarray] | None,
) -> list[list[tuple[int, int, int]]]:
    """Collect the shard ids of all processes' directories.

    Args:
        shards: this process's shards, see `shard_ids`.
        all_gather: see Processes.

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
    counts = Counter(itertools.chain(*directories))
    if twice := [shards.get(shard, "a shard") for shard, count in counts.items() if count > 1]:
        raise ValueError(
            f"several processes have {twice[0]}, but their directories differ; give every process "
            "all shards, or give each its own part of the plan"
        )
    return directories
