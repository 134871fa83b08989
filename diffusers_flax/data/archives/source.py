"""What a set consists of on disk, and which of its files a path in an index names.

source = find_source(Path("downloads"), output_dir)
files = Files(source, members)  # of each archive
files.find(pair, "original", index)
"""

import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from diffusers_flax.data.archives.index import has_images, is_index, read_rows
from diffusers_flax.data.archives.names import OTHER
from diffusers_flax.data.archives.tar import MAX_MEMBER_BYTES, Archive, Parts, Place, find_archives
from diffusers_flax.data.known_sets import IndexedPair, KnownSet, find_set
from diffusers_flax.data.shards import UNFINISHED_DIR
from diffusers_flax.data.writing import MANIFEST, read_manifest
from diffusers_flax.messages import first_names

MAX_ALIKE = 1000  # files with one end of their names that are looked at


class Source(NamedTuple):
    """What a set consists of on disk."""

    root: Path
    archives: list[Archive]
    indexes: list[tuple[Path, KnownSet]]
    files: list[Path]  # other files
    ignored: list[str]  # files that look like an index, with the reason

    def stamp(self) -> str:
        """A hash of the names, sizes and times of change of all files."""
        parts = [part for archive in self.archives for part in archive.parts]
        digest = hashlib.sha256()
        for file in (*parts, *(file for file, _ in self.indexes), *self.files):
            stat = file.stat()
            digest.update(f"{file} {stat.st_size} {stat.st_mtime_ns}\n".encode(errors="replace"))
        return digest.hexdigest()


def walk(root: Path, skipped: Path) -> Iterator[Path]:
    """The visible files below a directory by name; links are followed once."""
    seen = {os.path.realpath(skipped)}
    for folder, folders, files in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(folder, name) for name in sorted(files) if not name.startswith("."))


def find_source(path: Path, output_dir: Path) -> Source:
    """Look up the archives, indexes and other files of --pairs.

    Args:
        path: directory, index or archive.
        output_dir: is not searched.

    Raises:
        ValueError: there is nothing to read, a part of an archive is missing, or its download is
            not complete.
    """
    root = path if path.is_dir() else path.parent
    if (root / UNFINISHED_DIR).exists():
        raise ValueError(
            f"--pairs {root} is not complete, as it contains {UNFINISHED_DIR}: run the command "
            "that writes it again"
        )
    files = list(walk(root, output_dir))
    archives = find_archives(root, files)
    candidates = [file for file in files if is_index(file)]
    if path.is_file():
        in_path = [archive for archive in archives if path in archive.parts]
        if in_path:
            archives, candidates, files = in_path, [], []
        else:
            candidates = [path]
    indexes, shards, ignored = find_indexes(candidates)
    ignored += [f"{file}: a shard with images; train on its directory as it is" for file in shards]
    others = (file for file in files if OTHER.fullmatch(file.name.lower()))
    ignored += [f"{file} is not a .tar or .tar.gz; unpack it" for file in others]
    if not indexes and not archives:
        reasons = f" ({'; '.join(ignored[:3])})" if ignored else ""
        raise ValueError(
            f"--pairs {path} must be a .jsonl or .csv list, an index (.jsonl, .json, .parquet) "
            "with its .tar, .tar.gz or .tgz archives or images, or a directory with original/, "
            f"edited/ and captions.jsonl or captions.csv{reasons}"
        )
    known = {part for archive in archives for part in archive.parts}
    known |= {file for file, _ in indexes}
    loose = [file for file in files if file not in known] if indexes else []
    return Source(root, archives, indexes, loose, ignored)


def find_indexes(
    files: list[Path],
) -> tuple[list[tuple[Path, KnownSet]], list[Path], list[str]]:
    """The indexes with their sets, shards with images, and why other files are neither."""
    indexes, shards, ignored = [], [], []
    mapped = "_with_local_source_image_path"
    for file in files:
        if file.name == MANIFEST and read_manifest(file.parent):
            continue
        if file.with_name(f"{file.stem}{mapped}{file.suffix}") in files:
            ignored.append(f"{file}: the file with{mapped} is read instead")
        elif "preference" in file.stem:
            ignored.append(f"{file}: preferences, not pairs to learn from")
        elif has_images(file):
            shards.append(file)
        else:
            row = next((row for _, row in read_rows(file) if isinstance(row, dict)), None)
            if row and (known := find_set(row)):
                indexes.append((file, known))
            else:
                keys = first_names(list(row)) if row else "no JSON objects"
                ignored.append(f"{file}: no known keys of images and instruction ({keys})")
    return indexes, shards, ignored


def num_common(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    """How many leading directories two paths have in common."""
    return len(list(takewhile(lambda names: names[0] == names[1], zip(one, other))))


class Files:
    """The members of archives and the files beside them, by the paths in an index.

    Either the index or an archive may have more leading directories. All paths with files in one
    archive have the same ones more, else paths of an archive that is not here would fit another.
    Files that lie nearer to another index are its own.
    """

    def __init__(self, source: Source, members: list[list[Place]]):
        """members: of each archive, after the files that are in none."""
        self._root, self._archives = source.root, source.archives
        self._names = ["", *(archive.name for archive in source.archives)]
        self._by_name: dict[str, list[Place]] = {}
        for place in (place for places in members for place in places):
            self._by_name.setdefault(place.name, []).append(place)
        self._by_end: dict[int, dict[str, list[Place]]] = {}  # by the number of its directories
        self._indexes = {file.parent.relative_to(source.root).parts for file, _ in source.indexes}
        self._is_near: dict[tuple, bool] = {}
        self._left_out: dict[tuple[int, str], set[tuple]] = defaultdict(set)  # by _group_of

    def find(self, pair: IndexedPair, field: str, near: int, index: Path) -> Place | None:
        """The file of a field of a pair; None: it is not here.

        Args:
            pair, field: "original", "edited", "mask" or "reference", a path; of a URL only the
                file's name counts.
            near: archive of the edited image, which decides between equals, as does the index.
            index: file that names the pair.

        Raises:
            ValueError: several different files fit, or the path is none.
        """
        path, folder = getattr(pair, field), pair.folder
        hint = str(pair.original_archive if field == "original" else pair.edited_archive)
        if not isinstance(path, str):
            raise ValueError(f"{str(path)[:40]} is not a path")
        if "://" in path:
            path = path.partition("?")[0].rpartition("/")[2]
        parts = [part for part in path.replace("\\", "/").split("/") if part not in ("", ".")]
        if not parts:
            raise ValueError(f"{path!r} names no file")

        def fits(place: Place) -> bool:
            if hint and not f"/{self._names[place.archive]}".endswith(f"/{hint}"):
                return False
            if folder:
                return self._is_in(folder, place)
            return (place.archive == 0 and look != self._longer) or self._near(place, index)

        for names in [[*folder.split("/"), *parts], parts] if folder else [parts]:
            for look in (self._named, self._longer, self._shorter):
                if found := list(filter(fits, look(names))):
                    place = self._choose(path, found, folder, near, index)
                    if place.left_out:
                        self._left_out[self._group_of(place)].add(place.left_out)
                    return place
        return None

    def is_right(self, place: Place) -> bool:
        """Whether all paths into an archive have the same directories more, or these name it.

        To be asked when all paths are looked up.
        """
        number, top = group = self._group_of(place)
        own = self._names[number].rpartition("/")[2].partition(".")[0] or top
        return not place.left_out or len(self._left_out[group]) == 1 or place.left_out[-1] == own

    def _choose(self, path, found, folder, near, index):
        """The one of several files, the last one of a name in an archive."""
        found = list({(place.archive, place.name): place for place in found}.values())
        stem = index.name.partition(".")[0]
        for fits in (
            lambda place: folder and self._is_in(folder, place),
            lambda place: place.archive == near,
            lambda place: stem in self._names[place.archive],
        ):
            found = list(filter(fits, found)) or found
        contents = {self.content(place) for place in found} - {None} if found[1:] else set()
        if len(contents) > 1 or len({place.size for place in found}) > 1:
            names = [f"{self._names[x.archive] or 'the directory'} ({x.name})" for x in found]
            raise ValueError(f"{path} is in {' and '.join(names[:2])}, with different content")
        return found[0]

    def content(self, place: Place) -> bytes | None:
        """The SHA-256 of a file; None: it is in a gzipped archive, or larger than any image."""
        if place.size > MAX_MEMBER_BYTES:
            return None
        if not place.archive:
            return hashlib.sha256((self._root / place.name).read_bytes()).digest()
        archive = self._archives[place.archive - 1]
        if archive.is_gzipped:
            return None
        with Parts(archive.parts) as parts:
            return hashlib.sha256(parts.at(place.offset, place.size)).digest()

    def _is_in(self, folder: str, place: Place) -> bool:
        """Whether a file is below a folder of this name, in or out of archives."""
        return f"/{folder}/" in f"/{self._names[place.archive]}/{place.name}"

    def _near(self, place: Place, index: Path) -> bool:
        """Whether a file is below an index, or no other index has more directories in common."""
        if len(self._indexes) < 2:
            return True
        folder = (self._names[place.archive] or place.name).rpartition("/")[0]
        key = folder, index.parent
        if key not in self._is_near:
            parts, own = tuple(folder.split("/")), index.parent.relative_to(self._root).parts
            common = num_common(parts, own)
            others = (num_common(parts, other) for other in self._indexes)
            self._is_near[key] = common == len(own) or common >= max(others)
        return self._is_near[key]

    def _named(self, parts: list[str]) -> list[Place]:
        """The files of exactly this name."""
        return self._by_name.get("/".join(parts), [])

    def _longer(self, parts: list[str]) -> list[Place]:
        """The files that have more leading directories."""
        depth = min(len(parts), 2)
        if depth not in self._by_end:
            ends = self._by_end[depth] = {}
            for name, places in self._by_name.items():
                end = "/".join(name.rsplit("/", depth)[-depth:])
                ends.setdefault(end, []).extend(places)
        found = self._by_end[depth].get("/".join(parts[-depth:]), ())[:MAX_ALIKE]
        end = "/" + "/".join(parts)
        return [place for place in found if place.name.endswith(end)]

    def _shorter(self, parts: list[str]) -> list[Place]:
        """The files that have fewer leading directories."""
        for count in range(1, len(parts)):
            left_out = tuple(parts[:count])
            found = [x for x in self._named(parts[count:]) if not self._is_other(x, left_out)]
            if found:
                return [place._replace(left_out=left_out) for place in found]
        return []

    @staticmethod
    def _group_of(place: Place) -> tuple[int, str]:
        """The archive of a file and, of a file in none, its first directory."""
        folder, slash, _ = place.name.partition("/")
        return place.archive, folder if slash and not place.archive else ""

    def _is_other(self, place: Place, folders: tuple[str, ...]) -> bool:
        """Whether a file's archive has the name of one of the folders, but with another number."""
        own = [*self._names[place.archive].split("/")]
        own[-1] = own[-1].partition(".")[0]
        return any(
            folder != name and re.sub(r"\d+", "0", folder) == re.sub(r"\d+", "0", name)
            for folder in folders
            for name in own
        )
