"""Finds the files that an index names, in archives and beside them.

finder = Finder(db, source)  # db: with the table members of plan.py
finder.record(row, file)  # {"original": [archive, offset, size, name], ...}
"""

import hashlib
import json
import re
import sqlite3
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path

from diffusers_flax.data.archives.sets import Row
from diffusers_flax.data.archives.tar import MAX_MEMBER_BYTES, Stream

FOLDER = 0  # "archive" of files that are in no archive
MAX_ALIKE = 1000  # files with one end of their names that are looked at


class Absent(ValueError):
    """None of the files of a pair is here."""


class Missing(ValueError):
    """Some of the files of a pair are here."""


class NoInstruction(ValueError):
    """A pair has no instruction."""


class Changed(Exception):
    """A rule by which earlier pairs were found does not hold; find all pairs again."""


def end_of(name: str, num_parts: int) -> str:
    """The last directories and the file of a name; a function of the database, too."""
    return "/".join(name.rsplit("/", num_parts)[-num_parts:])


def num_common(one: Iterable[str], other: Iterable[str]) -> int:
    """How many leading directories two paths have in common."""
    pairs = zip(one, other)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def without_numbers(name: str) -> str:
    """A name in which all numbers are equal."""
    return re.sub(r"\d+", "0", name)


class Finder:
    """Finds the files that an index names among the members of archives and the other files.

    Either the index or an archive may have more leading directories. All paths with files in one
    archive have the same ones more, else paths of an archive that is not here would fit another.
    Files that lie nearer to another index are its own.
    """

    def __init__(self, db: sqlite3.Connection, source):
        """db: with the table of members; source: plan.Source."""
        self._db, self._root, self._archives = db, source.root, source.archives
        self._names = ["", *(archive.name for archive in source.archives)]
        self._folders = [  # of each archive, and its name without the suffix
            [*folder.split("/"), name.partition(".")[0]]
            for folder, _, name in (name.rpartition("/") for name in self._names)
        ]
        self._more: dict[tuple, tuple | None] = {}  # see _has_same_more; None: none is right
        self._indexes = {file.parent.relative_to(source.root).parts for file, _ in source.indexes}
        self.used: set[int] = set()  # archives with a file that an index names
        self._is_near: dict[tuple, bool] = {}  # (directory of a file, of an index): see _near
        self._ahead: dict[str, list[list]] = {}  # name: its files, see look_ahead

    def look_ahead(self, rows: list[Row]) -> None:
        """Look up the names of many rows at once, for the calls of `record` that follow."""
        names = {
            f"{row.folder}/{path}" if row.folder else path
            for row in rows
            for path in (row.original, row.edited, row.mask, row.reference)
            if isinstance(path, str)
        }
        marks = ",".join("?" * len(names))
        query = (
            f"select archive, offset, size, name from members where name in ({marks}) "
            "order by name, archive, offset"
        )
        try:
            found = self._db.execute(query, [*names])
        except UnicodeEncodeError:  # half a letter in a name: record looks for each
            names, found = set(), ()
        self._ahead = {name: [] for name in names}
        for row in found:
            self._ahead[row[3]].append([*row])

    def record(self, row: Row, file: Path) -> dict:
        """The record of a pair: places of files, and texts.

        Args:
            row: of the index `file`.

        Raises:
            Absent: none of its images is here.
            Missing: one of its files is not.
            NoInstruction: it has none.
            ValueError: an image is ambiguous, or no path.
            Changed: see there.
        """
        record, missing = {}, []
        for field in ("edited", "original", "mask", "reference"):
            path = getattr(row, field)
            if field == "mask" and isinstance(path, dict):
                record[field] = run_lengths(path)
            elif path:
                hint = row.original_archive if field == "original" else row.edited_archive
                near = record.get("edited", [None])[0]
                place = self.place(path, str(hint), row.folder, (near, file))
                if place is None:
                    missing.append(path)
                else:
                    record[field] = place
                    self.used.add(place[0])
        if not {"original", "edited"} & record.keys():
            raise Absent(f"{row.edited} is in no archive or directory")
        if missing:
            raise Missing(f"{missing[0]} is in no archive or directory")
        for field in ("original", "edited"):
            if field not in record:
                raise ValueError(f"it has no {field} image")
        texts = [text.strip() for text in row.instruction if isinstance(text, str) and text.strip()]
        if not texts:
            raise NoInstruction("it has no instruction")
        record["instruction"] = texts
        for field in ("original_prompt", "edited_prompt"):
            if isinstance(text := getattr(row, field), str) and text:
                record[field] = text
        return record

    def place(self, path: str, hint: str, folder: str, near: tuple) -> list | None:
        """[archive, offset, size, name] of a file; None: it is not here.

        Args:
            path: as in the index; of a URL only the file's name counts.
            hint: the archive that has it; "": any.
            folder: that the path is relative to; "": not known.
            near: (archive of the edited image, index), which decide between equals.

        Raises:
            ValueError: several different files fit.
            Changed: see there.
        """
        if not isinstance(path, str):
            raise ValueError(f"{str(path)[:40]} is not a path")
        found = () if hint or folder else self._ahead.get(path, ())
        if len(found) == 1 and self._near(found[0], near[1]):
            return found[0]  # as most are: written as in the only archive that has it
        if "://" in path:
            path = path.partition("?")[0].rpartition("/")[2]
        parts = [part for part in path.replace("\\", "/").split("/") if part not in ("", ".")]
        if not parts:
            raise ValueError(f"{path!r} names no file")
        found = self._lookup(parts, hint, folder, near[1])
        if len(found) > 1:
            stem = near[1].name.partition(".")[0]
            for fits in (
                lambda x: folder and self._is_in(folder, x),
                lambda x: x[0] == near[0],
                lambda x: stem in self._names[x[0]],
            ):
                found = list(filter(fits, found)) or found
            if not self._are_equal(found):
                places = " and ".join(
                    f"{self._names[x[0]] or 'the directory'} ({x[3]})" for x in found[:2]
                )
                raise ValueError(f"{path} is in {places}, with different content")
        return found[0] if found else None

    def _is_in(self, folder: str, found: list) -> bool:
        """Whether a file is below a folder of this name, in or out of archives."""
        return f"/{folder}/" in f"/{self._names[found[0]]}/{found[3]}"

    def _are_equal(self, found: list[list]) -> bool:
        """Whether files have the same content; of files in gzipped archives, the same size."""
        if len({x[2] for x in found}) > 1:
            return False
        return len({content for x in found if (content := self.content(x)) is not None}) <= 1

    def content(self, place: list) -> bytes | None:
        """The SHA-256 of a file; None: it is in a gzipped archive, or larger than any image."""
        number, offset, size, name = place
        if size > MAX_MEMBER_BYTES:
            return None
        if number == FOLDER:
            return hashlib.sha256((self._root / name).read_bytes()).digest()
        archive = self._archives[number - 1]
        if archive.is_gzipped:
            return None
        with Stream(archive) as stream:
            return hashlib.sha256(stream.at(offset, size)).digest()

    def _lookup(self, parts: list[str], hint: str, folder: str, index: Path) -> list[list]:
        """The files that a path may name; in an archive the last one of a name counts."""
        for path in [[*folder.split("/"), *parts], parts] if folder else [parts]:
            for find in (self._named, self._longer, self._shorter):
                found = [
                    x
                    for x in find(path)
                    if (not hint or f"/{self._names[x[0]]}".endswith(f"/{hint}"))
                    and (not folder or self._is_in(folder, x))
                    and (
                        # The index says so, by the directory or by the whole path.
                        folder or (x[0] == FOLDER and find != self._longer) or self._near(x, index)
                    )
                ]
                if found:
                    return list({(x[0], x[3]): x for x in found}.values())
        return []

    def _near(self, found: list, index: Path) -> bool:
        """Whether a file is below an index, or no other index has more directories in common."""
        if len(self._indexes) < 2:
            return True
        folder = (self._names[found[0]] or found[3]).rpartition("/")[0]
        key = (folder, index.parent)
        if key not in self._is_near:
            parts, own = folder.split("/"), index.parent.relative_to(self._root).parts
            common = num_common(parts, own)
            others = (num_common(parts, other) for other in self._indexes)
            self._is_near[key] = common == len(own) or common >= max(others)
        return self._is_near[key]

    def _named(self, parts: list[str]) -> list[list]:
        """The files of exactly this name."""
        name = "/".join(parts)
        if name in self._ahead:
            return self._ahead[name]
        query = (
            "select archive, offset, size, name from members where name = ? "
            "order by archive, offset"
        )
        return [[*row] for row in self._db.execute(query, (name,))]

    def _longer(self, parts: list[str]) -> list[list]:
        """The files that have more leading directories."""
        name, num_parts = "/".join(parts), min(len(parts), 2)
        self._db.execute(
            f"create index if not exists by_end_{num_parts} on members (end_of(name, {num_parts}))"
        )
        query = (
            f"select archive, offset, size, name from members where end_of(name, {num_parts}) = ? "
            "order by archive, offset limit ?"
        )
        found = self._db.execute(query, ("/".join(parts[-num_parts:]), MAX_ALIKE))
        return [[*row] for row in found if row[3].endswith(f"/{name}")]

    def _shorter(self, parts: list[str]) -> list[list]:
        """The files that have fewer leading directories."""
        for count in range(1, len(parts)):
            more = parts[:count]
            found = [
                x
                for x in self._named(parts[count:])
                if not self._is_other(x, more) and self._has_same_more(x, more)
            ]
            if found:
                return found
        return []

    def _has_same_more(self, found: list, more: list[str]) -> bool:
        """Whether the index has these directories more for all files of an archive or directory.

        If it has others too, those that end in the archive's name are right, else none.

        Raises:
            Changed: others were taken before.
        """
        number, name = found[0], found[3]
        place = (number, name.split("/")[0] if number == FOLDER and "/" in name else "")
        given, known = tuple(more), self._more.get(place, ())
        if known == ():
            self._more[place] = known = given
        if known == given or known is None:
            return known is not None
        own = self._folders[number][-1] or place[1]
        if known[-1] == own:
            return False
        self._more[place] = given if given[-1] == own else None
        raise Changed

    def _is_other(self, found: list, folders: list[str]) -> bool:
        """Whether a file's archive has the name of one of the folders, but with another number."""
        return any(
            folder != place and without_numbers(folder) == without_numbers(place)
            for folder in folders
            for place in self._folders[found[0]]
        )


def run_lengths(mask: dict) -> dict:
    """Size and run lengths of a mask, as JSON has them."""
    counts = mask.get("counts")
    counts = counts.decode("latin-1") if isinstance(counts, bytes) else counts
    record = {"size": mask.get("size"), "counts": counts}
    try:
        json.dumps(record)
    except TypeError as error:
        raise ValueError(f"the mask has no run lengths ({error})") from error
    return record
