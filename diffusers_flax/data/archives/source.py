"""What a set consists of on disk, and which of its files a path in an index names.

source = find_source(Path("downloads"), output_dir)
files = Files(source, members)  # of each archive
files.find("images/0.png", index, known)
"""

import os
from collections import defaultdict
from pathlib import Path, PurePath
from typing import NamedTuple

import pyarrow.parquet as pq

from diffusers_flax.data.archives.index import is_index, one_line_errors, read_rows
from diffusers_flax.data.archives.tar import Archive, Place, find_archives
from diffusers_flax.data.known_sets import KnownIndex, find_set
from diffusers_flax.data.shards import UNFINISHED_DIR, has_bytes
from diffusers_flax.messages import first_names

OTHER = (".tar.xz", ".tar.bz2", ".tar.zst", ".zip", ".7z", ".rar")


class Source(NamedTuple):
    """What a set consists of on disk."""

    root: Path
    archives: list[Archive]
    indexes: list[tuple[Path, KnownIndex]]
    files: list[Path]  # other files
    ignored: list[str]  # files that are not read, with the reason

    def paths(self) -> list[Path]:
        """All files that are read."""
        parts = [part for archive in self.archives for part in archive.parts]
        return [*parts, *(file for file, _ in self.indexes), *self.files]


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
    files = []
    for folder, folders, names in os.walk(root, followlinks=True):
        below = (Path(folder, name) for name in sorted(folders) if not name.startswith("."))
        folders[:] = [x.name for x in below if x.resolve() != output_dir.resolve()]
        files += [Path(folder, name) for name in sorted(names) if not name.startswith(".")]
    archives = find_archives(root, files)
    candidates = [file for file in files if is_index(file)]
    if path.is_file():
        archives = [archive for archive in archives if path in archive.parts] or archives
        candidates = [path] if is_index(path) else []
    indexes, ignored = [], []
    for file in candidates:
        known = set_of(file, candidates)
        if isinstance(known, str):
            ignored.append(f"{file}: {known}")
        else:
            indexes.append((file, known))
    others = (file for file in files if file.name.lower().endswith(OTHER))
    ignored += [f"{file} is not a .tar or .tar.gz; unpack it" for file in others]
    if not indexes and not archives:
        reasons = f" ({'; '.join(ignored[:3])})" if ignored else ""
        raise ValueError(
            f"--pairs {path} must be a .jsonl or .csv list, an index (.jsonl, .json, .parquet) "
            "with its .tar, .tar.gz or .tgz archives or images, or a directory with original/, "
            f"edited/ and captions.jsonl or captions.csv{reasons}"
        )
    source = Source(root, archives, indexes, [], ignored)
    known = {*source.paths()}
    return source._replace(files=[x for x in files if x not in known] if indexes else [])


def set_of(file: Path, files: list[Path]) -> KnownIndex | str:
    """The set of an index, or why a file is not read; files: all that may be indexes."""
    mapped = file.with_name(f"{file.stem}_with_local_source_image_path{file.suffix}")
    if mapped in files:
        return f"{mapped.name} is read instead"
    if "preference" in file.stem:
        return "preferences, not pairs to learn from"
    if file.suffix == ".parquet":
        with one_line_errors(file):
            if has_bytes(pq.read_schema(file)):
                return "a shard with images; train on its directory as it is"
    row = next((row for _, row in read_rows(file) if isinstance(row, dict)), {})
    return find_set(row) or f"no known keys of images and instruction ({first_names([*row])})"


class Files:
    """The members of archives and the files beside them, by the paths in an index.

    Either the index or an archive may have more leading directories. All paths with files in one
    archive leave out the same ones, else paths of an archive that is not here would fit another.
    """

    def __init__(self, source: Source, members: list[list[Place]]):
        """members: of each archive, after the files that are in none."""
        self._names = ["", *(archive.name for archive in source.archives)]
        self._bases = [("",)]  # of each archive, to which its members may be unpacked
        for path in map(PurePath, self._names[1:]):
            folders = (path.parent, path, path.with_name(path.name.partition(".")[0]))
            self._bases.append(tuple(f"{folder}/" for folder in folders))
        self._by_end = defaultdict(list)  # {last name, or last two names, of a path: places}
        for place in (place for places in members for place in places):
            bases = self._bases[place.archive][: 1 if "/" in place.name else None]
            paths = [f"{base}{place.name}".split("/") for base in bases]
            for end in {"/".join(path[-count:]) for path in paths for count in (1, 2)}:
                self._by_end[end].append(place)
        self._left_out: dict[int | str, set[tuple]] = defaultdict(set)  # by group_of

    def find(
        self, path: str, index: Path, known: KnownIndex, near: int = 0
    ) -> tuple[Place, tuple[str, ...]] | None:
        """The file of a path, with the leading directories of the path that it lacks.

        Args:
            path: of a URL only the file's name counts.
            index, known: the file that has the path, and its set.
            near: archive that decides between equals, as does the index.

        Returns:
            None if the file is not here. See is_right.

        Raises:
            ValueError: several files fit, or the path is none.
        """
        if not isinstance(path, str):
            raise ValueError(f"{str(path)[:40]} is not a path")
        if "://" in path:
            path = path.partition("?")[0].rpartition("/")[2]
        parts = [part for part in path.replace("\\", "/").split("/") if part not in ("", ".")]
        for count in range(1 if known.has_whole_paths else len(parts)):
            rest = "/".join(parts[count:])
            found = {
                (place.archive, place.name): place  # the last one of a name
                for place in self._by_end.get("/".join(parts[count:][-2:]), ())
                if place.name == rest or (not count and self._ends_in(place, rest))
            }
            if found:
                place = self._choose([*found.values()], rest, index, near)
                if len(parts) > 1:
                    self._left_out[group_of(place)].add(tuple(parts[:count]))
                return place, tuple(parts[:count])
        return None

    def is_right(self, place: Place, left_out: tuple[str, ...]) -> bool:
        """Whether no other directories are left out for files of the same archive.

        To be asked when all paths are looked up.
        """
        return not left_out or len(self._left_out[group_of(place)]) == 1

    def _ends_in(self, place: Place, path: str) -> bool:
        """Whether a file's path ends in this one."""
        bases = self._bases[place.archive]
        return any(f"/{base}{place.name}".endswith(f"/{path}") for base in bases)

    def _choose(self, found: list[Place], path: str, index: Path, near: int) -> Place:
        """The one of several files."""
        stem = index.name.partition(".")[0]
        for fits in (
            lambda place: place.name == path,
            lambda place: place.archive == near,
            lambda place: stem in self._names[place.archive],
        ):
            found = [place for place in found if fits(place)] or found
        if len(found) > 1:
            names = [f"{self._names[x.archive] or 'the directory'} ({x.name})" for x in found]
            raise ValueError(f"{path} is in {' and '.join(names[:2])}")
        return found[0]


def group_of(place: Place) -> int | str:
    """The archive of a file or, of a file in none, its first directory."""
    return place.archive or place.name.partition("/")[0]
