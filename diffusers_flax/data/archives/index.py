"""Rows of index files: JSON lines, a JSON array or parquet, also gzipped, a few rows at a time.

for place, row in read_rows(Path("metadata/train-00000.jsonl.gz")): ...
"""

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from diffusers_flax.data.archives.names import INDEX_SUFFIXES
from diffusers_flax.data.shards import is_binary
from diffusers_flax.messages import one_line

CHUNK = 1 << 20  # characters of a JSON array that are read at a time
MAX_ROW = 64 << 20  # characters of one row
ROWS = 1000  # of a parquet file that are read at a time


def is_index(file: Path) -> bool:
    """Whether a file may be an index, by its name."""
    return file.name.lower().endswith(INDEX_SUFFIXES) and not file.name.startswith(".")


def has_images(file: Path) -> bool:
    """Whether a parquet file has images itself, and so is a shard."""
    if not file.name.endswith(".parquet"):
        return False
    with one_line_errors(file):
        schema = pq.read_schema(file)
    return any(
        is_binary(field.type)
        or (pa.types.is_struct(field.type) and any(is_binary(child.type) for child in field.type))
        for field in schema
    )


def read_rows(file: Path) -> Iterator[tuple[str, dict | str]]:
    """The rows of an index.

    Args:
        file: named as in INDEX_SUFFIXES.

    Yields:
        (place such as "line 3", the row or a description of its problem).

    Raises:
        ValueError: the file is damaged.
    """
    with one_line_errors(file):
        if file.name.endswith(".parquet"):
            with pq.ParquetFile(file) as opened:
                number = 0
                for batch in opened.iter_batches(ROWS):
                    for row in batch.to_pylist():
                        number += 1
                        yield f"row {number}", row
            return
        opener = gzip.open if file.name.endswith(".gz") else open
        with opener(file, "rb") as opened:
            start = opened.read(256).lstrip(b"\xef\xbb\xbf \t\r\n")
        with opener(file, "rt", encoding="utf-8-sig") as opened:
            yield from read_array(opened) if start[:1] == b"[" else read_lines(opened)


def count_rows(file: Path) -> int:
    """The number of rows of an index; of parquet by its footer."""
    if file.name.endswith(".parquet"):
        with one_line_errors(file):
            return pq.read_metadata(file).num_rows
    return sum(1 for _ in read_rows(file))


@contextmanager
def one_line_errors(file: Path) -> Iterator[None]:
    """Context in which errors of decoders are a ValueError that names the file."""
    try:
        yield
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, pa.ArrowException) as error:
        raise ValueError(
            f"{file} cannot be read ({one_line(error, 200)}); download it again"
        ) from error


def read_lines(opened: io.TextIOBase) -> Iterator[tuple[str, dict | str]]:
    """The objects of JSON lines."""
    number = 0
    while line := opened.readline(MAX_ROW):
        number += 1
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield f"line {number}", f"not JSON ({getattr(error, 'msg', error)})"
        else:
            yield f"line {number}", row if isinstance(row, dict) else "not a JSON object"


def read_array(opened: io.TextIOBase) -> Iterator[tuple[str, dict | str]]:
    """The objects of JSON arrays, one after the other, without a whole array in memory."""
    decoder, text, at, number = json.JSONDecoder(), opened.read(CHUNK).lstrip(), 1, 0
    while True:
        at = skip(text, at, " \t\r\n,")
        if at < len(text) and text[at] == "]":
            text, at = text[at + 1 :].lstrip(), 1
            while not text and (more := opened.read(CHUNK)):
                text = more.lstrip()
            if not text:
                return
            if text[0] != "[":
                raise ValueError(
                    f"{getattr(opened, 'name', 'the index')} has more after its JSON array: "
                    f"{one_line(text[:40])}; give an array of objects, or an object in each line"
                )
            continue
        try:
            row, end = decoder.raw_decode(text, at)
            if end == len(text) and not isinstance(row, dict):  # a number may go on
                raise json.JSONDecodeError("incomplete", text, at)
        except (json.JSONDecodeError, RecursionError) as error:
            more = opened.read(CHUNK)
            if not more or len(text) - at > MAX_ROW:
                raise ValueError(
                    f"{getattr(opened, 'name', 'the index')} is not a complete JSON array: object "
                    f"{number + 1} ({one_line(error, 100)}); download it again"
                ) from error
            text, at = text[at:] + more, 0
            continue
        number, at = number + 1, end
        yield f"object {number}", row if isinstance(row, dict) else "not a JSON object"


def skip(text: str, at: int, characters: str) -> int:
    """The position of the first other character."""
    while at < len(text) and text[at] in characters:
        at += 1
    return at
