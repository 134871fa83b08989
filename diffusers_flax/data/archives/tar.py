"""Tar archives, gzipped or not, whole or in parts, read in place.

    for archive in find_archives(Path("downloads"), files):
        for offset, size, name in list_members(archive): ...

Nothing is unpacked. Archives with links, devices or paths outside of them are refused.
"""

import gzip
import io
import os
import re
import tarfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple

from diffusers_flax.messages import one_line

# split's parts: .000, .aa, .split.000, .part-aa, -part-aa, .part0
NAME = re.compile(
    r"(.+\.(?:tar\.gz|tgz|tar))(?:[.-](?:(?:split|part)[.-]?([a-z]{2,3}|\d{1,6})|((?!bz|gz|lz|xz|md|br|py)[a-y][a-z]|a[ab][a-z]|\d{1,6})))?"
)
BLOCK = tarfile.BLOCKSIZE
WHOLE = -1  # number of an archive that has no parts
MAX_MEMBER_BYTES = 512 << 20  # no image is larger


class Place(NamedTuple):
    """Where a file is."""

    archive: int  # number of its archive, from 1; 0: it is in none
    offset: int
    size: int
    name: str


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
        self._position = offset + (self._position if whence == io.SEEK_CUR else 0)
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

    @contextmanager
    def open(self) -> Iterator[io.BufferedIOBase]:
        """Context with the unpacked content, in which errors of its data name the archive."""
        with Parts(self.parts) as parts:
            file = io.BufferedReader(parts, 1 << 20)
            try:
                yield io.BufferedReader(gzip.GzipFile(fileobj=file)) if self.is_gzipped else file
            except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
                raise ValueError(
                    f"{self.name} is damaged ({one_line(error, 200)}); download it again, with all "
                    "of its parts"
                ) from error


def find_archives(folder: Path, files: list[Path]) -> list[Archive]:
    """The archives among the files of a directory, by name.

    Raises:
        ValueError: a part is missing, or an archive is there whole and in parts.
    """
    found = defaultdict(dict)  # {archive: {number of the part: file}}
    for file in files:
        if match := NAME.fullmatch(file.name):
            name = (file.parent / match[1]).relative_to(folder).as_posix()
            found[name][part_number(match[2] or match[3] or "")] = file
    for name, parts in found.items():
        numbers = sorted(parts)
        if numbers not in ([WHOLE], [*range(len(parts))], [*range(1, len(parts) + 1)]):
            raise ValueError(f"{folder / name}: a part is missing, or there are whole and parts")
    return [Archive(x, tuple(found[x][part] for part in sorted(found[x]))) for x in sorted(found)]


def part_number(part: str) -> int:
    """The number of a part: 007 is 7, aa is 0, ab is 1; "" is WHOLE."""
    if not part or part.isdigit():
        return int(part or WHOLE)
    return sum(26**place * (ord(x) - ord("a")) for place, x in enumerate(reversed(part)))


class Header(tarfile.TarInfo):
    """A member's header, of which only what is used is read; tarfile reads unusual ones."""

    @classmethod
    def frombuf(cls, block: bytes, encoding: str, errors: str) -> tarfile.TarInfo:
        """The header in a block of an archive."""
        try:
            total = sum(block) - sum(block[148:156]) + 8 * ord(" ")
            is_usual = block[156:157] == b"0" and block[345:346] == b"\0"
            if is_usual and total == int(block[148:156].rstrip(b"\0 "), 8):
                header = cls(block[:100].split(b"\0")[0].decode(encoding, errors))
                header.size = int(block[124:136].rstrip(b"\0 "), 8)
                return header
        except ValueError:  # digits in base 256
            pass
        return super().frombuf(block, encoding, errors)


def list_members(archive: Archive) -> Iterator[tuple[int, int, str]]:
    """The files of an archive in its order: (offset of the content, size, name).

    Several archives one after the other are read as one.

    Raises:
        ValueError: the archive is damaged or hostile, see the docstring of this file.
    """
    with archive.open() as file:
        block = b"begin"
        while block:
            tar = tarfile.TarFile(fileobj=file, encoding="utf-8", errors="replace", tarinfo=Header)
            while member := tar.next():
                tar.members.clear()  # which would take memory
                is_file = member.isreg() and not member.issparse()
                is_outside = member.name.startswith("/") or ".." in member.name.split("/")
                if is_outside or not (is_file or member.isdir()) or member.size > MAX_MEMBER_BYTES:
                    raise ValueError(
                        f"{archive.name}: the member {member.name} is not an image of this "
                        "archive, but a link, a device, outside of it, or over 512 MB"
                    )
                if is_file and "/._" not in f"/{member.name}":  # of macOS
                    yield member.offset_data, member.size, member.name.removeprefix("./")
            file.seek(tar.offset)
            if file.read(BLOCK) != bytes(BLOCK):
                raise tarfile.ReadError("no end after the last member")
            while (block := file.read(BLOCK)) == bytes(BLOCK):
                pass
            file.seek(-len(block), io.SEEK_CUR)  # of another archive


class Forwards:
    """Files of gzipped archives, each read once from start to end; files wait until used."""

    def __init__(self, archives: list[Archive], uses: Counter[Place], folder: Path):
        """uses: how often each file will be read; folder: for files that wait."""
        self._uses = uses
        self._streams = {
            number: stream(archives[number - 1], sorted(x for x in uses if x.archive == number))
            for number in {place.archive for place in uses}
        }
        self._waiting = {}  # {place: position in the file}
        self._file = TemporaryFile(dir=folder)  # noqa: SIM115

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
            self._file.truncate(0)
        return data

    def close(self) -> None:
        """Close the archives."""
        for opened in self._streams.values():
            opened.close()
        self._file.close()


def stream(archive: Archive, places: list[Place]) -> Iterator[tuple[Place, bytes]]:
    """The files at some places, in the order of the archive."""
    with archive.open() as file:
        for place in places:
            file.seek(place.offset)
            yield place, file.read(place.size)
