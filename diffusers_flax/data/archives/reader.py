"""Reads the pairs of a plan: files in archives and directories, rows of shards.

with closing(Reader(source, Waiting(folder), gzipped)) as reader:
    pair = reader.pair(record)
"""

import json
import os
import tempfile
from collections import OrderedDict
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from diffusers_flax.data.archives.finder import FOLDER
from diffusers_flax.data.archives.index import one_line_errors
from diffusers_flax.data.archives.masks import run_lengths_to_png
from diffusers_flax.data.archives.plan import ShardColumns, Source, is_place
from diffusers_flax.data.archives.sets import any_index
from diffusers_flax.data.archives.tar import MAX_MEMBER_BYTES, Stream
from diffusers_flax.data.images import decode_image
from diffusers_flax.data.shards import READ_BYTES, READ_ROWS, read_beside

OPEN_FILES = 256  # parts of archives; a process may have 1024 files
WINDOW_BYTES = 128 << 20  # of files of gzipped archives that wait for their pair; more go to disk
COLUMNS = {"original": "original_image", "edited": "edited_image", "mask": "mask_image"}
COLUMNS["reference"] = "reference_image"


class Pair(NamedTuple):
    """A pair that is read."""

    cells: dict[str, dict | None]  # "original", "edited", "mask", "reference": image cells
    texts: dict[str, str | list[str] | None]
    size: int  # bytes of the images


def looks_whole(data: bytes) -> bool:
    """Whether data begin and end as a JPEG or PNG does."""
    if data.startswith(b"\xff\xd8\xff"):
        return data.endswith(b"\xff\xd9")
    return data.startswith(b"\x89PNG\r\n\x1a\n") and data.endswith(b"IEND\xaeB`\x82")


def check_image(data: bytes) -> None:
    """Raise a ValueError for data that are no image; usual ones are not decoded."""
    if not looks_whole(data):
        decode_image(data, (16, 16))


class Waiting:
    """Files of gzipped archives that wait for their pair, in memory and beyond that on disk."""

    def __init__(self, folder: Path):
        self._kept, self._bytes, self._until = {}, 0, {}
        self._spill = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115

    def close(self) -> None:
        """Forget all files."""
        self._spill.close()

    def put(self, key: tuple, data: bytes, until: tuple) -> None:
        """Keep a file up to and with a pair; until: (home, position)."""
        self._until.setdefault(until, []).append(key)
        if self._bytes + len(data) > WINDOW_BYTES:
            self._kept[key] = (self._spill.seek(0, os.SEEK_END), len(data))
            self._spill.write(data)
        else:
            self._kept[key] = data
            self._bytes += len(data)

    def get(self, key: tuple) -> bytes:
        """A file that is kept."""
        data = self._kept[key]
        if isinstance(data, tuple):
            self._spill.seek(data[0])
            return self._spill.read(data[1])
        return data

    def drop(self, done: tuple) -> None:
        """Forget the files of which (home, position) is the last pair."""
        for key in self._until.pop(done, ()):
            data = self._kept.pop(key)
            self._bytes -= 0 if isinstance(data, tuple) else len(data)
        if not self._kept:
            self._spill.truncate(0)


class Reader:
    """Reads the files of pairs."""

    def __init__(self, source: Source, folder: Path):
        """folder: for files that wait."""
        self._source, self._waiting = source, Waiting(folder)
        self.gzipped = {n for n, x in enumerate(source.archives, start=1) if x.is_gzipped}
        self._open = OrderedDict()
        self._next, self._rows = None, iter(())

    def close(self) -> None:
        """Close all archives."""
        self._waiting.close()
        for stream in self._open.values():
            stream.__exit__()

    def stream(self, archive: int, needed: Iterator[tuple]) -> Iterator[int]:
        """Read a gzipped archive and keep files that pairs need.

        Args:
            archive: its number.
            needed: (offset, size, (home, position) of the last pair that needs it), by offset.

        Yields:
            The offset of each file, when the pairs at this position can be read.
        """
        with Stream(self._source.archives[archive - 1]) as stream:
            for offset, size, until in needed:
                self._waiting.put((archive, offset), stream.at(offset, size), until)
                yield offset
                self._waiting.drop((archive, offset))

    def read(self, place: list) -> bytes:
        """The content of a file.

        Raises:
            ValueError: it cannot be read.
        """
        archive, offset, size, name = place
        if archive == FOLDER:
            data = read_beside(self._source.root, name)
        elif archive in self.gzipped:
            data = self._waiting.get((archive, offset))
        else:
            if archive not in self._open:
                self._open[archive] = Stream(self._source.archives[archive - 1])
                while self._num_files() > OPEN_FILES and len(self._open) > 1:
                    self._open.popitem(last=False)[1].__exit__()
            data = self._open[archive].at(offset, size)
        if len(data) != size or size > MAX_MEMBER_BYTES:
            raise ValueError(f"{name} has {len(data)} bytes, not {size}")
        return data

    def _num_files(self) -> int:
        """Number of open parts of archives."""
        return sum(len(stream.archive.parts) for stream in self._open.values())

    def row(self, place: list) -> Pair:
        """Read a row of a shard; rows are read in their order.

        Raises:
            ValueError: an image or the instruction cannot be used.
        """
        shard, number = place[:2]
        if (shard, number) != self._next:
            self._rows = rows_from(self._source.archives[shard - 1].parts[0], number)
        file, self._next = self._source.archives[shard - 1].parts[0], None
        with one_line_errors(file):
            columns, batch, position = next(self._rows)
        self._next = (shard, number + 1)
        try:
            values = {name: batch.column(name)[position].as_py() for name in batch.schema.names}
        except UnicodeDecodeError as error:
            raise ValueError(f"a text is not UTF-8 ({error})") from error
        folder = file.parent
        cells, num_bytes = dict.fromkeys(COLUMNS), 0
        for role in COLUMNS:
            value = values.get(getattr(columns, role))
            if value is None:
                continue
            cell = value if isinstance(value, dict) else {"bytes": value}
            if isinstance(value, str):
                cell = {"bytes": None, "path": value}
            data, path = cell["bytes"], cell.get("path")
            data = read_beside(folder, path or "") if data is None else data
            check_image(data)
            cells[role] = {"bytes": data, "path": path}
            num_bytes += len(data)
        if cells["original"] is None or cells["edited"] is None:
            raise ValueError("an image is null")
        texts = values[columns.instruction]
        found = [texts] if isinstance(texts, str) else texts or []
        found = [text.strip() for text in found if text and text.strip()]
        if not found:
            raise ValueError("it has no instruction")
        captions = {name: values.get(name) for name in ("original_prompt", "edited_prompt")}
        return Pair(cells, captions | {"edit_prompt": found}, num_bytes)

    def pair(self, record: dict) -> Pair:
        """Read a pair of the plan.

        Raises:
            ValueError: an image or the instruction cannot be used.
        """
        if self._source.are_shards:
            return self.row(record["edited"])
        cells, num_bytes = dict.fromkeys(COLUMNS), 0
        for role in COLUMNS:
            given = record.get(role)
            if given is None:
                continue
            name = f"the {role}"
            try:
                if is_place(given):
                    name = given[3]
                    data = self.read(given)
                else:
                    data = run_lengths_to_png(given)
                check_image(data)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
            cells[role] = {"bytes": data, "path": name.rpartition("/")[2]}
            num_bytes += len(data)
        return Pair(cells, self.texts(record), num_bytes)

    def texts(self, record: dict) -> dict:
        """The instructions and captions of a pair; in a sample they are files."""
        texts = {name: record.get(name) for name in ("original_prompt", "edited_prompt")}
        texts = {name: self.text(value) for name, value in texts.items()}
        found = record.get("instruction")
        if found is None or is_place(found):
            found = [self.text(found)] if found else []
            if "json" in record and not found:
                try:
                    content = json.loads(self.text(record["json"]))
                    row = next(any_index(content | {"original": "", "edited": ""}, ""))
                    found = [text for text in row.instruction if isinstance(text, str)]
                except (ValueError, AttributeError, TypeError, StopIteration, RecursionError):
                    found = []
            if "text" in record and not any(map(str.strip, found)):
                found = [self.text(record["text"])]
        found = [text.strip() for text in found if text.strip()]
        if not found:
            raise ValueError("it has no instruction")
        try:
            "".join([*found, *filter(None, texts.values())]).encode()
        except UnicodeEncodeError as error:  # half a letter, as JSON may have
            raise ValueError(f"a text has no letter at {error.start} ({error.reason})") from error
        return texts | {"edit_prompt": found}

    def text(self, value: str | list | None) -> str | None:
        """A text, from its file if it is in one."""
        if not is_place(value):
            return value
        try:
            return self.read(value).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"{value[3]} is not UTF-8") from error


def rows_from(file: Path, first: int) -> Iterator[tuple[ShardColumns, pa.RecordBatch, int]]:
    """The rows of a shard from a number on; earlier row groups are not read.

    Yields:
        (columns, batch of rows, position of the row in it).
    """
    columns = ShardColumns.of(file)
    with pq.ParquetFile(file, pre_buffer=False, buffer_size=READ_BYTES) as opened:
        names = {*columns[:5], "original_prompt", "edited_prompt"} & {*opened.schema_arrow.names}
        counts = [opened.metadata.row_group(n).num_rows for n in range(opened.num_row_groups)]
        stops = list(accumulate(counts))
        groups = [group for group, stop in enumerate(stops) if stop > first]
        row = sum(counts[: len(counts) - len(groups)])
        for batch in opened.iter_batches(READ_ROWS, groups, sorted(names), use_threads=False):
            for position in range(len(batch)):
                if row >= first:
                    yield columns, batch, position
                row += 1
