"""Tar archives, gzipped or not, whole or in parts, read in place.

    for archive in find_archives(Path("downloads"), files):
        for name, offset, size in list_members(archive): ...

Nothing is unpacked. An archive that could do harm when unpacked, or that is damaged, is refused
with its name and its member's.
"""

import gzip
import io
import math
import os
import re
import tarfile
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import NamedTuple

from diffusers_flax.data.archives.names import group_parts, in_order
from diffusers_flax.messages import one_line

ZEROS = bytes(tarfile.BLOCKSIZE)
MAX_MEMBER_BYTES = 512 << 20  # no image is larger
MAX_HEADER_BYTES = 1 << 20  # of a long name or of extended attributes
MAX_RATIO = 200  # bytes for each compressed byte; images do not shrink
FREE_BYTES = 256 << 20  # for which the ratio is not checked
MAX_ZEROS = 1 << 20  # between two archives or after the last member
OUTSIDE = re.compile(r"[/\\]|\w:|(.*[/\\])?\.\.([/\\]|$)", re.DOTALL)
WINDOW_BYTES = 128 << 20  # of files of gzipped archives that wait in memory; more go to disk


class Place(NamedTuple):
    """Where a file is."""

    archive: int  # number of its archive, from 1; 0: it is in none
    offset: int
    size: int
    name: str
    left_out: tuple[str, ...] = ()  # first directories of the index's path that the name lacks


class Parts(io.RawIOBase):
    """The parts of an archive as one file."""

    def __init__(self, paths: tuple[Path, ...]):
        self._files = [open(path, "rb", buffering=0) for path in paths]  # noqa: SIM115
        self._sizes = [path.stat().st_size for path in paths]
        self._position = 0

    def at(self, offset: int, size: int) -> bytes:
        """The bytes at an offset, fewer at the end."""
        chunks = []
        for file, length in zip(self._files, self._sizes):
            if size > 0 and offset < length:
                chunks.append(os.pread(file.fileno(), min(size, length - offset), offset))
                size -= len(chunks[-1])
            offset = max(0, offset - length)
        return b"".join(chunks)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        data = self.at(self._position, len(buffer))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        bases = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: sum(self._sizes)}
        self._position = bases[whence] + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def close(self) -> None:
        for file in self._files:
            file.close()
        super().close()


class Archive(NamedTuple):
    """An archive; its bytes are those of its parts, one after the other."""

    name: str  # relative to the searched directory, without the suffix of a part
    parts: tuple[Path, ...]

    @property
    def is_gzipped(self) -> bool:
        """Whether the content is gzipped, whatever the name says."""
        with open(self.parts[0], "rb") as file:
            return file.read(2) == b"\x1f\x8b"

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(part.stat().st_size for part in self.parts)

    @contextmanager
    def open(self) -> Iterator[io.BufferedIOBase]:
        """Context with the unpacked content, in which errors of its data name the archive."""
        with Parts(self.parts) as parts:
            file = io.BufferedReader(parts, 1 << 20)
            try:
                yield gzip.GzipFile(fileobj=file) if self.is_gzipped else file
            except (OSError, EOFError, zlib.error) as error:
                raise ValueError(
                    f"{self.name} is damaged ({one_line(error, 200)}); download it again"
                ) from error


def find_archives(folder: Path, files: list[Path]) -> list[Archive]:
    """The archives among the files of a directory, by name.

    Raises:
        ValueError: a part is missing.
    """
    paths = {file.relative_to(folder).as_posix(): file for file in files}
    return [
        Archive(name, tuple(paths[path] for path in in_order(folder / name, found)))
        for name, found in group_parts(paths).items()
    ]


class Headers:
    """A file as tarfile reads headers from it, with a limit to their size."""

    def __init__(self, file: io.BufferedIOBase):
        self._file, self.last = file, b""
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int) -> bytes:
        """The next bytes."""
        if not 0 <= size <= MAX_HEADER_BYTES:
            raise ValueError(f"a header of {size} bytes")
        self.last = self._file.read(size)
        return self.last


class Refused(ValueError):
    """A member that no data set of images has."""


def list_members(archive: Archive) -> Iterator[tuple[str, int, int]]:
    """The files of an archive in its order: (name, offset of the content, size).

    Several archives one after the other are read as one.

    Raises:
        ValueError: the archive is damaged or hostile, see the docstring of this file.
    """
    count = 0
    most = MAX_RATIO * archive.size + FREE_BYTES if archive.is_gzipped else math.inf
    with archive.open() as file:
        while True:
            headers = Headers(file)
            try:
                tar = tarfile.TarFile(fileobj=headers, encoding="utf-8", errors="surrogateescape")
                while member := tar.next():
                    tar.members.clear()  # which would take memory
                    check_member(archive, member, most)
                    count += 1
                    if member.isreg() and "/._" not in f"/{member.name}":  # of macOS
                        yield member.name.removeprefix("./"), member.offset_data, member.size
                if headers.last != ZEROS:
                    raise tarfile.ReadError("no end after the last member")
            except Refused:
                raise
            except (tarfile.TarError, OverflowError, RecursionError, ValueError) as error:
                raise ValueError(
                    f"{archive.name} is truncated, damaged or no tar archive after {count} members "
                    f"({one_line(error, 100)}); download it again, with all of its parts"
                ) from error
            zeros = len(ZEROS)
            while (block := file.read(len(ZEROS))) == ZEROS[: len(block)] and block:
                zeros += len(block)
                if zeros > MAX_ZEROS:
                    raise ValueError(
                        f"{archive.name} has over {MAX_ZEROS} zeros after {count} members, as an "
                        "unfinished download has; download it again"
                    )
            if not block:
                return
            file.seek(-len(block), io.SEEK_CUR)  # another archive


def check_member(archive: Archive, member: tarfile.TarInfo, most: float) -> None:
    """Raise an error for links, devices, names outside of the archive, and large files.

    Args:
        archive: for the error.
        member: of the archive.
        most: bytes that the archive may unpack to.
    """
    problem = ""
    if member.issparse() or not (member.isreg() or member.isdir()):
        problem = "is a link, a device or a sparse file"
    elif OUTSIDE.match(member.name):
        problem = "has a path outside of the archive"
    elif not 0 <= member.size <= MAX_MEMBER_BYTES:
        problem = f"has {member.size} bytes, more than any image"
    elif member.offset_data + member.size > most:
        problem = f"unpacks to over {MAX_RATIO} times the archive's size, as bombs do"
    if problem:
        raise Refused(f"{archive.name}: the member {member.name} {problem}; it is not read")


class Forwards:
    """Files of gzipped archives, each read once from start to end; files wait until used."""

    def __init__(self, archives: list[Archive], uses: Counter[Place], folder: Path):
        """uses: how often each file will be read; folder: for files that wait."""
        self._uses = uses
        self._streams = {
            number: self._stream(
                archives[number - 1], iter(sorted(x for x in uses if x[0] == number))
            )
            for number in {place.archive for place in uses}
        }
        self._waiting = {}  # {place: position in the file}
        self._file = SpooledTemporaryFile(WINDOW_BYTES, dir=folder)  # noqa: SIM115

    def read(self, place: Place) -> bytes:
        """The content of a file."""
        while place not in self._waiting:
            other, data = next(self._streams[place.archive])
            self._waiting[other] = self._file.seek(0, os.SEEK_END)
            self._file.write(data)
        self._file.seek(self._waiting[place])
        data = self._file.read(place.size)
        self._uses[place] -= 1
        if not self._uses[place]:
            del self._waiting[place]
        if not self._waiting:
            self._file.seek(0)
            self._file.truncate()
        return data

    def close(self) -> None:
        """Close the archives."""
        for stream in self._streams.values():
            stream.close()
        self._file.close()

    @staticmethod
    def _stream(archive: Archive, places: Iterator[Place]) -> Iterator[tuple[Place, bytes]]:
        """The files at some places, in the order of the archive."""
        with archive.open() as file:
            for place in places:
                file.seek(place.offset)
                yield place, file.read(place.size)
