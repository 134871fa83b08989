"""Rows of index files: JSON lines, a JSON array or parquet, also gzipped.

for place, row in read_rows(Path("metadata/train-00000.jsonl.gz")): ...
"""

import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from diffusers_flax.data.archives.names import INDEX_SUFFIXES
from diffusers_flax.data.shards import has_bytes
from diffusers_flax.messages import one_line

ROWS = 1000  # of a parquet file that are read at a time


def is_index(file: Path) -> bool:
    """Whether a file may be an index, by its name."""
    return file.name.lower().endswith(INDEX_SUFFIXES) and not file.name.startswith(".")


def has_images(file: Path) -> bool:
    """Whether a parquet file has images itself, and so is a shard."""
    if file.suffix != ".parquet":
        return False
    with one_line_errors(file):
        return has_bytes(pq.read_schema(file))


@contextmanager
def one_line_errors(file: Path) -> Iterator[None]:
    """Context in which errors of decoders are a ValueError that names the file."""
    try:
        yield
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, pa.ArrowException) as error:
        raise ValueError(
            f"{file} cannot be read ({one_line(error, 200)}); download it again"
        ) from error


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
        if file.suffix == ".parquet":
            with pq.ParquetFile(file) as opened:
                rows = (row for batch in opened.iter_batches(ROWS) for row in batch.to_pylist())
                for number, row in enumerate(rows, start=1):
                    yield f"row {number}", row
            return
        with (gzip.open if file.suffix == ".gz" else open)(
            file, "rt", encoding="utf-8-sig"
        ) as text:
            if text.read(256).lstrip()[:1] == "[":
                text.seek(0)
                yield from objects_of(file, text.read())
                return
            text.seek(0)
            for number, line in enumerate(text, start=1):
                if line.strip():
                    yield f"line {number}", as_object(parse(line))


def objects_of(file: Path, text: str) -> Iterator[tuple[str, dict | str]]:
    """The objects of a JSON array."""
    rows = parse(text)
    if not isinstance(rows, list):
        raise ValueError(f"{file} is {rows}: give an array of objects, or an object in each line")
    for number, row in enumerate(rows, start=1):
        yield f"object {number}", as_object(row)


def parse(text: str) -> dict | list | str:
    """JSON, or what is wrong with it."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"not JSON ({getattr(error, 'msg', error)})"


def as_object(row: dict | list | str) -> dict | str:
    """A row, or what is wrong with it."""
    return row if isinstance(row, dict | str) else "not a JSON object"
