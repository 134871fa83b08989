"""Rows of index files: JSON lines, a JSON array or parquet, also gzipped.

for place, row in read_rows(Path("metadata/train-00000.jsonl.gz")): ...
"""

import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from diffusers_flax.messages import one_line

SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet")
ROWS = 1000  # of a parquet file that are read at a time


def is_index(file: Path) -> bool:
    """Whether a file may be an index, by its name."""
    return file.name.lower().endswith(SUFFIXES)


@contextmanager
def one_line_errors(file: Path) -> Iterator[None]:
    """Context in which errors of decoders are a ValueError that names the file."""
    try:
        yield
    except (
        OSError,
        EOFError,
        zlib.error,
        UnicodeDecodeError,
        json.JSONDecodeError,
        RecursionError,
        pa.ArrowException,
    ) as error:
        raise ValueError(
            f"{file} cannot be read ({one_line(error, 200)}); download it again"
        ) from error


def read_rows(file: Path) -> Iterator[tuple[str, Any]]:
    """The rows of an index.

    Args:
        file: of one of SUFFIXES.

    Yields:
        (place such as "row 3", the row; None for a line that is no JSON).

    Raises:
        ValueError: the file is damaged.
    """
    with one_line_errors(file):
        if file.suffix == ".parquet":
            with pq.ParquetFile(file) as opened:
                rows = (row for batch in opened.iter_batches(ROWS) for row in batch.to_pylist())
                yield from ((f"row {number}", row) for number, row in enumerate(rows, start=1))
            return
        opener = gzip.open if file.suffix == ".gz" else open
        with opener(file, "rt", encoding="utf-8-sig") as text:
            is_array = text.read(256).lstrip().startswith("[")
            text.seek(0)
            if is_array:
                rows = json.load(text)
                yield from ((f"object {number}", row) for number, row in enumerate(rows, start=1))
                return
            for number, line in enumerate(text, start=1):
                row = None
                with suppress(ValueError, RecursionError):
                    row = json.loads(line)
                if line.strip():
                    yield f"line {number}", row
