"""Tar archives, gzipped or not, whole or in parts, read in place.

    for archive in find_archives(Path("downloads")):
        with Stream(archive) as stream:
            for name, offset, size in list_members(archive, stream): ...

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
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from diffusers_flax.data.archives.names import group_parts, in_order
from diffusers_flax.messages import one_line

BLOCK = tarfile.BLOCKSIZE
ZEROS = bytes(BLOCK)
MAX_MEMBER_BYTES = 512 << 20  # no image is larger
MAX_HEADER_BYTES = 1 << 20  # of a long name or of extended attributes
MAX_HEADERS = 32  # of one member; tarfile reads each in a call of itself
MAX_RATIO = 200  # bytes for each compressed byte; images do not shrink
FREE_BYTES = 256 << 20  # for which the ratio is not checked
MAX_ZEROS = 1 << 20  # between two archives or after the last member
OUTSIDE = re.compile(r"[/\\]|\w:|(.*[/\\])?\.\.([/\\]|$)", re.DOTALL)


class Archive(NamedTuple):
    """An archive; its bytes are those of its parts, one after the other."""

    name: str  # relative to the searched directory, without the suffix of a part
    parts: tuple[Path, ...]

    def stamp(self) -> str:
        """Size and time of change of each part."""
        stats = [part.stat() for part in self.parts]
        return " ".join(f"{stat.st_size}:{stat.st_mtime_ns}" for stat in stats)

    @property
    def is_gzipped(self) -> bool:
        """Whether the content is gzipped, whatever the name says."""
        with open(self.parts[0], "rb") as file:
            return file.read(2) == b"\x1f\x8b"


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


class Parts(io.RawIOBase):
    """The parts of an archive as one file."""

    def __init__(self, paths: tuple[Path, ...]):
        self._files = [open(path, "rb", buffering=0) for path in paths]  # noqa: SIM115
        self._stops = []
        for path in paths:
            self._stops.append((self._stops[-1] if self._stops else 0) + path.stat().st_size)
        self.size, self._position = self._stops[-1], 0

    def at(self, offset: int, size: int) -> bytes:
        """The bytes at an offset, fewer at the end."""
        if len(self._files) == 1:
            return os.pread(self._files[0].fileno(), size, offset)
        chunks, start = [], 0
        for file, stop in zip(self._files, self._stops):
            if size and offset < stop:
                chunk = os.pread(file.fileno(), min(size, stop - offset), offset - start)
                chunks.append(chunk)
                offset, size = offset + len(chunk), size - len(chunk)
            start = stop
        return b"".join(chunks)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        data = self.at(self._position, len(buffer))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def tell(self) -> int:
        return self._position

    def close(self) -> None:
        for file in self._files:
            file.close()
        super().close()


class Stream:
    """The content of an archive by position, uncompressed; a gzipped one is read forwards."""

    def __init__(self, archive: Archive):
        self.archive, self._parts = archive, Parts(archive.parts)
        self._gzip = None
        if archive.is_gzipped:
            self._gzip = gzip.GzipFile(fileobj=io.BufferedReader(self._parts, 1 << 20))

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._parts.close()

    @property
    def size(self) -> int | None:
        """Bytes of the content; None: not known, as it is gzipped."""
        return None if self._gzip else self._parts.size

    @property
    def done(self) -> int:
        """Bytes of the files that are read so far, if they are gzipped."""
        return self._parts.tell()

    def at(self, offset: int, size: int) -> bytes:
        """The bytes at an offset, fewer at the end of the archive.

        Raises:
            ValueError: the gzipped data are damaged, truncated or a bomb.
        """
        if not self._gzip:
            return self._parts.at(offset, size)
        try:
            while (position := self._gzip.tell()) < offset:  # not seek, which hides the end
                if position > MAX_RATIO * self._parts.tell() + FREE_BYTES:
                    raise ValueError(
                        f"{self.archive.name} unpacks to over {MAX_RATIO} times its size, as bombs "
                        "do; it is not read"
                    )
                if not self._gzip.read(min(offset - position, 1 << 20)):
                    return b""
            return self._gzip.read(size)
        except EOFError as error:
            raise ValueError(
                f"{self.archive.name} is truncated: its gzipped data end too early; download it "
                "again"
            ) from error
        except (OSError, zlib.error) as error:
            raise ValueError(
                f"{self.archive.name} is damaged ({one_line(error, 200)}); download it again"
            ) from error


class Headers:
    """A stream as tarfile reads headers from it, with a limit to their size."""

    def __init__(self, stream: "Replay"):
        self._stream, self.position, self._num_reads = stream, 0, 0
        self._tar = tarfile.TarFile(fileobj=io.BytesIO(), mode="w")  # reads nothing by itself
        self._tar.fileobj = self

    def read(self, size: int) -> bytes:
        """The next bytes."""
        self._num_reads += 1
        if not 0 <= size <= MAX_HEADER_BYTES:
            raise ValueError(f"a header of {size} bytes")
        if self._num_reads > 2 * MAX_HEADERS:  # each has a block and its content
            raise ValueError(f"over {MAX_HEADERS} headers for one member")
        data = self._stream.at(self.position, size)
        self.position += len(data)
        return data

    def tell(self) -> int:
        """Position of the next bytes."""
        return self.position

    def seek(self, position: int) -> None:
        """Go forwards."""
        self.position = position

    def member_at(self, position: int) -> tuple[tarfile.TarInfo, int]:
        """A member of any kind by tarfile, and the position of the next header."""
        self.position, self._num_reads = position, 0
        member = tarfile.TarInfo.fromtarfile(self._tar)
        return member, self._tar.offset


class Replay:
    """A stream whose last block can be read again, for gzipped archives."""

    def __init__(self, stream: Stream):
        self._stream, self._start, self._block = stream, 0, b""

    def keep(self, start: int, block: bytes) -> None:
        """Remember a block that is already read."""
        self._start, self._block = start, block

    def at(self, offset: int, size: int) -> bytes:
        """As Stream.at; may begin in the kept block."""
        skip = offset - self._start
        if 0 <= skip < len(self._block):
            kept = self._block[skip : skip + size]
            rest = size - len(kept)
            return kept + (self._stream.at(offset + len(kept), rest) if rest else b"")
        return self._stream.at(offset, size)


def sum_of(block: bytes) -> int:
    """The sum of a block's bytes, by Adler-32, whose low half is 1 + the sum of up to 256 bytes."""
    halves = zlib.adler32(block[:256]) & 0xFFFF, zlib.adler32(block[256:]) & 0xFFFF
    return halves[0] + halves[1] - 2


def plain_member(head: bytes) -> tuple[bytes, int] | None:
    """Name and size in the header of a usual file; None: tarfile has to read it."""
    if head[156] not in b"0\0" or head[257:262] != b"ustar" or head[124] >= 0x80:
        return None
    try:
        checksum = int(head[148:156].strip(b" \0"), 8)
        size = int(head[124:136].strip(b" \0") or b"0", 8)
    except ValueError:
        return None
    if sum_of(head) - sum(head[148:156]) + 8 * 32 != checksum:  # the field counts as spaces
        return None
    name = head[:100].partition(b"\0")[0]
    if head[262] == 0:  # POSIX, not GNU
        prefix = head[345:500].partition(b"\0")[0]
        name = prefix + b"/" + name if prefix else name
    return None if name.endswith(b"/") else (name, size)


def list_members(archive: Archive, stream: Stream) -> Iterator[tuple[str, int, int]]:
    """The files of an archive in its order: (name, offset of the content, size).

    Several archives one after the other are read as one.

    Raises:
        ValueError: the archive is damaged or hostile, see the docstring of this file.
    """
    replay = Replay(stream)
    headers, position, has_end, zeros, count = Headers(replay), 0, False, 0, 0
    total = math.inf if stream.size is None else stream.size
    while head := stream.at(position, BLOCK):
        if head == ZEROS:
            has_end, position, zeros = True, position + BLOCK, zeros + BLOCK
            if zeros > MAX_ZEROS:
                raise ValueError(
                    f"{archive.name} has over {MAX_ZEROS} zeros from byte {position - zeros} on, "
                    "as an unfinished download has; download it again"
                )
            continue
        if len(head) < BLOCK:
            raise ValueError(f"{archive.name} is truncated in a header; download it again")
        has_end, zeros, found = False, 0, plain_member(head)
        if found:
            name, size = found[0].decode("utf-8", "surrogateescape"), found[1]
            offset, following = position + BLOCK, position + BLOCK + -(-size // BLOCK) * BLOCK
            is_file = True
        else:
            replay.keep(position, head)
            try:
                member, following = headers.member_at(position)
            except (tarfile.TarError, ValueError, OverflowError) as error:
                place = f"after {count} members" if count else "at its start"
                raise ValueError(
                    f"{archive.name} is not a tar archive {place} ({one_line(error, 100)}); "
                    "download it again"
                ) from error
            name, offset, size = member.name, member.offset_data, member.size
            refuse_kind(archive, member)
            is_file = member.isreg()
        check_member(archive, name, size)
        if offset + size > total:
            raise ValueError(
                f"{archive.name} is truncated: its member {name} ends at byte {offset + size}, the "
                f"archive at {total}; download it again"
            )
        count, position = count + 1, following
        if is_file and "/._" not in f"/{name}":  # of macOS
            yield name.removeprefix("./"), offset, size
    if not has_end:
        raise ValueError(
            f"{archive.name} has no end after its last member, so it may be truncated; download it "
            "again, or, if it is complete, add an end with truncate -s +1024"
        )


def hint_of(archive: Archive) -> str:
    """What a damaged archive may be instead, or which part may be missing; begins with "; "."""
    with open(archive.parts[0], "rb") as file:
        start = file.read(64).lstrip()
    if start.startswith(b"version https://git-lfs"):
        return "; it is a Git LFS pointer and not the file, which hf download or git lfs pull gets"
    if start[:1] in (b"<", b"{"):
        return "; it is a web page or a server's message and not the file"
    names = [part.name for part in archive.parts]
    if len(names) > 1 or not archive.name.endswith(names[0]):
        here = f"s here are {names[0]} to {names[-1]}" if len(names) > 1 else f" here is {names[0]}"
        return f"; its part{here}: an earlier or a later one may be missing"
    return ""


def refuse_kind(archive: Archive, member: tarfile.TarInfo) -> None:
    """Raise a ValueError unless a member is a file or a directory."""
    kinds = {
        "link": member.issym() or member.islnk(),
        "device": member.isdev(),
        "sparse file": member.issparse(),
    }
    kinds["special file"] = not (member.isreg() or member.isdir())
    if kind := next((kind for kind, is_it in kinds.items() if is_it), None):
        raise ValueError(
            f"{archive.name}: the member {member.name} is a {kind}, which no dataset of images "
            "needs; the archive is not read"
        )


def check_member(archive: Archive, name: str, size: int) -> None:
    """Raise a ValueError for a name outside of the archive or a size that no image has."""
    is_odd = name.startswith(("/", "\\")) or name[1:2] == ":" or ".." in name
    if is_odd and OUTSIDE.match(name):
        raise ValueError(
            f"{archive.name}: the member {name} has a path outside of the archive; the archive is "
            "not read"
        )
    if size > MAX_MEMBER_BYTES or size < 0:
        raise ValueError(
            f"{archive.name}: the member {name} has {size} bytes, more than any image; the archive "
            "is not read"
        )
