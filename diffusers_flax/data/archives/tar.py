"""Tar archives, gzipped or not, whole or in parts.

    for archive in find_archives(Path("downloads"), files):
        for offset, size, name in list_members(archive): ...

Members are read in place, those of a gzipped archive after it is unpacked to one .tar file.
Archives with links, devices or paths outside of them are refused.
"""

import gzip
import io
import os
import re
import shutil
import tarfile
import zlib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from diffusers_flax.loading.files import save_whole
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

    def unpack(self, file: Path) -> "Archive":
        """The archive as a plain .tar file, which is written if it is not there."""

        def save(path: Path) -> None:
            with self.open() as content, open(path, "wb") as unpacked:
                shutil.copyfileobj(content, unpacked, 1 << 20)

        if not file.exists():
            save_whole(file, save)
        return Archive(self.name, (file,))


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


def list_members(archive: Archive) -> Iterator[tuple[int, int, str]]:
    """The files of an archive in its order: (offset of the content, size, name).

    Several archives one after the other are read as one.

    Raises:
        ValueError: the archive is damaged or hostile, see the docstring of this file.
    """
    with archive.open() as file:
        block = b"begin"
        while block:
            tar = tarfile.TarFile(fileobj=file, encoding="utf-8", errors="replace")
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
