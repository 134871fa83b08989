"""Where each file and each pair of a set is: a small database in the output directory.

The database has the offset of every file in every archive, and one record for each pair, in the
order in which the shards are written. It is made once; a killed conversion continues with it.
"""

import hashlib
import json
import os
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from itertools import groupby, islice
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet as pq
from tqdm import tqdm

from diffusers_flax.data.archives.finder import (
    FOLDER,
    Absent,
    Changed,
    Finder,
    Missing,
    NoInstruction,
    end_of,
)
from diffusers_flax.data.archives.index import count_rows, has_images, is_index, read_rows
from diffusers_flax.data.archives.manifest import MANIFEST, read_manifest, sets_in
from diffusers_flax.data.archives.names import OTHER
from diffusers_flax.data.archives.sets import (
    LICENCES,
    WORDS,
    X2EDIT,
    IndexedSet,
    Row,
    find_set,
    meaning_of,
    split_name,
)
from diffusers_flax.data.archives.tar import Archive, Stream, find_archives, hint_of, list_members
from diffusers_flax.data.options import Columns
from diffusers_flax.data.shards import (
    UNFINISHED_DIR,
    find_columns,
    find_mask_column,
    is_text,
    known_set,
)
from diffusers_flax.messages import differences, first_names, one_line

MAX_INDEXES = 5000
TURNS = 50  # pairs of an index that are looked up at once
MAX_NAMED = 10  # problems of one kind that are kept by name
KINDS = {  # of rows that are left out
    Absent: "no files here",
    Missing: "a file is missing",
    NoInstruction: "no instruction",
}
TABLES = """
create table if not exists meta (key text primary key, value text);
create table if not exists archives (id integer primary key, name text, stamp text);
create table if not exists members (name text, archive integer, offset integer, size integer);
create table if not exists pairs (
    home integer, position integer, name text, record text, id integer primary key);
create table if not exists needs (
    archive integer, offset integer, size integer, home integer, position integer,
    primary key (archive, offset)) without rowid;
create table if not exists problems (stage text, kind text, name text);
create table if not exists shards (
    home integer, number integer, stop integer, file text, size integer, sha256 text, rows integer);
create table if not exists finished (home integer primary key);
"""


class Source(NamedTuple):
    """What a set consists of on disk."""

    root: Path
    archives: list[Archive]  # or, without indexes, shards, each as an archive
    indexes: list[tuple[Path, IndexedSet]]
    files: list[Path]  # other files
    ignored: list[str]  # files that look like an index, with the reason
    are_shards: bool = False

    def stamp(self, archives: bool = True) -> str:
        """A hash of the names, sizes and times of change of all files, or without archives."""
        parts = [part for archive in self.archives for part in archive.parts] if archives else []
        digest = hashlib.sha256()
        for file in (*parts, *(file for file, _ in self.indexes), *self.files):
            stat = file.stat()
            digest.update(f"{file} {stat.st_size} {stat.st_mtime_ns}\n".encode(errors="replace"))
        return digest.hexdigest()


def walk(root: Path, skipped: Path) -> Iterator[Path]:
    """The visible files below a directory by name; links are followed once."""
    seen = set()
    for folder, folders, files in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen or Path(real) == skipped:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            if not name.startswith("."):
                yield Path(folder, name)


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
    unfinished = root / UNFINISHED_DIR
    if unfinished.exists() and root.resolve() != output_dir.resolve():
        raise ValueError(
            f"--pairs {root} is not complete, as it contains {UNFINISHED_DIR}: run script.sh "
            f"again, or remove {unfinished} if it belongs to another plan"
        )
    files = list(walk(root, output_dir.resolve()))
    archives = find_archives(root, files)
    in_archives = {part for archive in archives for part in archive.parts}
    candidates = [file for file in files if is_index(file)]
    if path.is_file():
        if path in in_archives:
            archives = [archive for archive in archives if path in archive.parts]
            candidates, files = [], []
        elif is_index(path):
            candidates = [path]
        else:
            raise ValueError(f"--pairs {path} is neither an index nor an archive")
    if len(candidates) > MAX_INDEXES:
        raise ValueError(
            f"--pairs {path} has {len(candidates)} files such as {candidates[0].name}; name the "
            "index instead of the directory"
        )
    indexes, shards, ignored = find_indexes(candidates)
    if shards and not indexes and not archives:
        found = [Archive(file.relative_to(root).as_posix(), (file,)) for file in shards]
        return Source(root, found, [], [], ignored, are_shards=True)
    ignored += [f"{file}: a shard with images; train on its directory as it is" for file in shards]
    others = (file for file in files if OTHER.fullmatch(file.name.lower()))
    ignored += [f"{file} is not a .tar or .tar.gz; unpack it" for file in others]
    if path in candidates and not indexes:
        raise ValueError(f"--pairs {ignored[0]}")
    if not indexes and not archives:
        reasons = f" ({'; '.join(ignored[:3])})" if ignored else ""
        raise ValueError(
            f"--pairs {path} must be a .jsonl or .csv list, an index (.jsonl, .json, .parquet) "
            "with its .tar, .tar.gz or .tgz archives or images, or a directory with original/, "
            f"edited/ and captions.jsonl or captions.csv{reasons}"
        )
    known = in_archives | {file for file, _ in indexes}
    loose = [file for file in files if file not in known] if indexes else []
    return Source(root, archives, indexes, loose, ignored)


def find_indexes(
    files: list[Path],
) -> tuple[list[tuple[Path, IndexedSet]], list[Path], list[str]]:
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
                rows = f", {count_rows(file)} rows" if row else ""
                ignored.append(f"{file}: no known keys of images and instruction ({keys}){rows}")
    return indexes, shards, ignored


class ShardColumns(NamedTuple):
    """The columns of a shard with images that a conversion keeps."""

    original: str
    edited: str
    instruction: str
    mask: str
    reference: str  # "": none
    has_lists: bool  # of instructions

    @classmethod
    def of(cls, file: Path) -> "ShardColumns":
        """Read the schema of a shard; a ValueError if a column is missing."""
        schema = pq.read_schema(file)
        names = find_columns(schema, file, Columns())
        mask = find_mask_column(schema, file, missing_ok=True)
        reference = next((x for x in WORDS["reference"] if x in schema.names), "")
        return cls(*names, mask, reference, not is_text(schema.field(names[2]).type))

    @property
    def extra(self) -> set[str]:
        """What the shards have besides pairs with one instruction."""
        has = {"mask": self.mask, "reference": self.reference, "instructions": self.has_lists}
        return {name for name, value in has.items() if value}


class Plan:
    """The database; a context that closes it."""

    def __init__(self, file: Path):
        self._file = file
        self.db = sqlite3.connect(file, timeout=1)
        self.db.create_function("end_of", 2, end_of, deterministic=True)
        try:
            self.db.executescript(
                "pragma locking_mode = exclusive; begin exclusive; commit;"
                f"pragma synchronous = normal; pragma cache_size = -65536; {TABLES}"
            )
        except sqlite3.Error as error:
            self.db.close()
            remedy = f"remove {file.parent} and convert again"
            if "locked" in str(error):
                remedy = "another conversion has the same --output_dir: wait for it"
            raise ValueError(f"{file} cannot be used ({error}); {remedy}") from error

    def __enter__(self) -> "Plan":
        return self

    def __exit__(self, kind, error, trace) -> None:
        self.db.close()
        if isinstance(error, sqlite3.Error):
            raise ValueError(
                f"{self._file} cannot be written ({error}); is its disk full? Then run the same "
                "command again"
            ) from error

    def get(self, key: str):
        """A value of the table meta, or None."""
        row = self.db.execute("select value from meta where key = ?", (key,)).fetchone()
        return row and json.loads(row[0])

    def put(self, **values) -> None:
        """Set values of the table meta."""
        rows = [(key, json.dumps(value)) for key, value in values.items()]
        self.db.executemany("insert or replace into meta values (?, ?)", rows)
        self.db.commit()

    def one(self, query: str, *values):
        """The first value of a query."""
        return self.db.execute(query, values).fetchone()[0]

    def record(self, pair: int) -> str:
        """The record of a pair, JSON."""
        return self.one("select record from pairs where id = ?", pair)

    @cached_property
    def num_pairs(self) -> int:
        """Number of pairs, when they are planned."""
        return self.get("pairs")

    @cached_property
    def num_damaged(self) -> int:
        """Number of pairs that could not be read so far."""
        return self.one("select count(*) from problems where kind = 'damaged'")

    def add_problem(self, stage: str, kind: str, name: str) -> None:
        """Count a row or pair that is left out."""
        if kind == "damaged":
            self.num_damaged += 1
        self.db.execute("insert into problems values (?, ?, ?)", (stage, kind, one_line(name)))

    @property
    def has_shards(self) -> bool:
        """Whether a shard is written."""
        return self.one("select exists (select 1 from shards) or exists (select 1 from finished)")

    def check_same(self, now: dict, output_dir: Path) -> None:
        """Note what is converted; raise a ValueError if shards of something else are written."""
        before = self.get("conversion")
        if before and before != now:
            if self.has_shards:
                raise ValueError(
                    f"--output_dir {output_dir} has another conversion that is not complete: "
                    f"{', '.join(differences(before, now))}; go on with its flags, or name another "
                    "directory"
                )
            self.put(planned=False)
        self.put(conversion=now)

    def check_files(self, source: Source) -> None:
        """Forget the plan if files have changed; raise a ValueError if shards are written by it."""
        known = self.db.execute("select id, name, stamp from archives order by id").fetchall()
        here = [(n, x.name, x.stamp()) for n, x in enumerate(source.archives, start=1)]
        same = next((n for n, (a, b) in enumerate(zip(known, here)) if a != b), len(known))
        changed = next((name for _, name, _ in [*known[same:], *here[same:]]), None)
        others = source.stamp(archives=False)
        if self.get("others") not in (None, others):
            changed = changed or "an index or a file beside the archives"
        if changed and self.get("planned"):
            if self.has_shards:
                raise ValueError(
                    f"{changed} has changed, come or gone since the conversion began; bring it "
                    "back, or convert to another --output_dir"
                )
            self.put(planned=False)
        for table, column in (("archives", "id"), ("members", "archive")):
            self.db.execute(f"delete from {table} where {column} > ?", (same,))
        self.put(others=others)

    def take_inventory(self, source: Source) -> None:
        """Read the headers of all archives that are not yet in the database.

        Raises:
            ValueError: an archive is damaged or hostile.
        """
        done = self.one("select count(*) from archives")
        sizes = [sum(part.stat().st_size for part in x.parts) for x in source.archives]
        broken = []
        bar = tqdm(
            desc="listing archives", total=sum(sizes), unit="B", unit_scale=True, disable=None
        )
        with bar:
            for number, archive in enumerate(source.archives, start=1):
                if number <= done:
                    bar.update(sizes[number - 1])
                    continue
                if source.are_shards:
                    bar.update(sizes[number - 1])
                else:
                    try:
                        self._list(archive, number, sizes[number - 1], bar)
                    except ValueError as error:
                        self.db.rollback()
                        broken.append(f"{error}{hint_of(archive)}")
                if broken:  # the next start begins with the first of them
                    continue
                values = (number, archive.name, archive.stamp())
                self.db.execute("insert into archives values (?, ?, ?)", values)
                self.db.commit()
        if broken:
            more = f"{len(broken)} archives cannot be read: " * (len(broken) > 1)
            raise ValueError(more + " | ".join(broken[:MAX_NAMED]))
        self.db.execute("delete from members where archive = ?", (FOLDER,))
        names = ((file.relative_to(source.root).as_posix(), file) for file in source.files)
        rows = ((name, FOLDER, 0, file.stat().st_size) for name, file in names)
        self.db.executemany("insert into members values (?, ?, ?, ?)", rows)
        self.db.execute(
            "create index if not exists by_name on members (name, archive, offset, size)"
        )
        self.db.commit()

    def _list(self, archive: Archive, number: int, total: int, bar: tqdm) -> None:
        """Insert the members of an archive; moves the progress bar by total bytes."""
        shown = 0

        def rows(stream):
            nonlocal shown
            for count, (name, offset, size) in enumerate(list_members(archive, stream)):
                if not name.isascii():  # maybe not UTF-8
                    name = name.encode(errors="replace").decode()
                yield name, number, offset, size
                if count % 256 == 0:
                    now = min(stream.done if stream.size is None else offset, total)
                    bar.update(now - shown)
                    shown = now

        with Stream(archive) as stream:
            self.db.executemany("insert into members values (?, ?, ?, ?)", rows(stream))
        bar.update(total - shown)

    def make_pairs(self, source: Source, max_pairs: int | None) -> None:
        """Find the files of every pair; the pairs of an earlier try are replaced.

        Args:
            source: inventoried.
            max_pairs: only the first N; None: all.
        """
        finder, is_right = Finder(self.db, source), False
        self.put(unnamed=[], chosen=False)
        while not is_right:
            for table in ("pairs", "needs", "problems"):
                self.db.execute(f"delete from {table}")
            self.db.execute("drop index if exists by_order")
            with suppress(Changed):
                self._find_pairs(source, max_pairs, finder)
                is_right = True

    def _find_pairs(self, source: Source, max_pairs: int | None, finder: Finder) -> None:
        """As make_pairs, by the rules that the finder knows so far."""
        gzipped = {n for n, x in enumerate(source.archives, start=1) if x.is_gzipped}
        if source.are_shards:
            pairs = self._rows(source)
        else:
            pairs = self._indexed(source, finder) if source.indexes else self._samples(source)
        columns = set()

        def rows(found):
            for count, (name, record) in enumerate(found):
                if count == max_pairs:
                    break
                columns.update(role for role in ("mask", "reference") if record.get(role))
                texts = record.get("instruction") or ()
                if len(texts) > 1 and not is_place(texts):
                    columns.add("instructions")
                yield *self._home(record, gzipped), name, json.dumps(record)

        with tqdm(pairs, desc="finding pairs", unit="pair", disable=None) as found:
            query = "insert into pairs (home, position, name, record) values (?, ?, ?, ?)"
            self.db.executemany(query, rows(found))
        self.db.execute("create index by_order on pairs (home, position, id)")
        if source.are_shards:
            shards = map(ShardColumns.of, (shard.parts[0] for shard in source.archives))
            columns = set().union(*(shard.extra for shard in shards))
        count = self.one("select count(*) from pairs")
        self.put(columns=sorted(columns), pairs=count, planned=True)

    def _home(self, record: dict, gzipped: set[int]) -> tuple[int, int]:
        """(archive, position) of a pair: of its last gzipped file, else of the result.

        Notes the gzipped files that it needs.
        """
        if not gzipped:
            return record["edited"][:2]
        places = [place for place in record.values() if is_place(place)]
        streamed = [place[:3] for place in places if place[0] in gzipped]
        home, position = max(streamed)[:2] if streamed else record["edited"][:2]
        for archive, offset, size in streamed:
            self.db.execute(
                "insert into needs values (?, ?, ?, ?, ?) on conflict do update set "
                "(home, position) = (excluded.home, excluded.position) "
                "where (excluded.home, excluded.position) > (home, position)",
                (archive, offset, size, home, position),
            )
        return home, position

    def _indexed(self, source: Source, finder: Finder) -> Iterator[tuple[str, dict]]:
        """(name, record) of each pair of the indexes, whose files are all there.

        After them, the samples of archives that no index names, if they are WebDataset.
        """
        named = Counter()

        def leave_out(kind, name):
            named[kind] += 1
            if named[kind] <= MAX_NAMED:
                self.add_problem("plan", kind, name)

        for file, known in source.indexes:
            turns = turns_of(file, known)
            while some := list(islice(turns, TURNS)):
                finder.look_ahead([turn for _, turn in some if isinstance(turn, Row)])
                for name, turn in some:
                    if not isinstance(turn, Row):
                        leave_out(turn[0], f"{name}: {turn[1]}")
                        continue
                    try:
                        yield name, finder.record(turn, file)
                    except ValueError as error:
                        leave_out(KINDS.get(type(error), "not a pair"), f"{name}: {error}")
        spare = {n for n in range(1, len(source.archives) + 1) if n not in finder.used}
        if spare:
            self.db.execute("create index if not exists by_archive on members (archive, offset)")
        samples = {number for number in spare if self._has_samples(number)}
        self.put(unnamed=[source.archives[n - 1].name for n in sorted(spare - samples)])
        yield from self._samples(source, samples, named)

    def _has_samples(self, archive: int) -> bool:
        """Whether one of the first files of an archive begins a sample of WebDataset."""
        query = (
            "select archive, offset, size, name from members where archive = ? "
            "order by offset limit 64"
        )
        rows = (([*row], *split_name(row[3])) for row in self.db.execute(query, (archive,)))
        groups = groupby(rows, lambda row: row[1])
        return any(is_sample(record) for _, files in groups for record in samples_of(files))

    def _rows(self, source: Source) -> Iterator[tuple[str, dict]]:
        """(name, record) of each row of shards, whose place is the row's number."""
        for number, shard in enumerate(source.archives, start=1):
            for row in range(pq.read_metadata(shard.parts[0]).num_rows):
                yield f"{shard.name} row {row}", {"edited": [number, row, 0, ""]}
        self.put(left_out={})

    def _samples(
        self, source: Source, archives: set[int] | None = None, named: Counter | None = None
    ) -> Iterator[tuple[str, dict]]:
        """(name, record) of each sample of WebDataset: files in a row with one key.

        Args:
            source: inventoried.
            archives: numbers of those that have samples; None: all.
            named: counts of rows that are left out already.
        """
        named = Counter() if named is None else named
        query = "select archive, offset, size, name from members order by archive, offset"
        rows = self.db.cursor().execute(query) if archives != set() else ()
        named_rows = (  # place, key, extension
            ([*row], *split_name(row[3])) for row in rows if archives is None or row[0] in archives
        )
        names = [archive.name for archive in source.archives]
        for (number, key), files in groupby(named_rows, lambda row: (row[0][0], row[1])):
            for record in samples_of(files):
                name = f"{names[number - 1]} {key}"
                if is_sample(record):
                    yield name, record
                    continue
                kinds = [*record.pop("others", ()), *record]
                wanted = {"original", "edited"} - record.keys() or {"instruction"}
                kind = f"no {' or '.join(sorted(wanted))}"
                named[kind] += 1
                if named[kind] <= MAX_NAMED:
                    self.add_problem("plan", kind, f"{name} has {first_names(kinds)}")
        self.put(left_out=named)


def is_sample(record: dict) -> bool:
    """Whether a sample has both images and a text."""
    texts = {"text", "json", "instruction"} & record.keys()
    return {"original", "edited"} <= record.keys() and bool(texts)


def turns_of(file: Path, known: IndexedSet) -> Iterator[tuple[str, Row | tuple[str, str]]]:
    """(name, pair) of each row of an index, or of its turns; not a pair: (kind, reason)."""
    stem = file.name.partition(".")[0]
    for place, row in read_rows(file):
        name = f"{file.name} {place}"
        try:
            if isinstance(row, str):
                raise ValueError(row)
            turns = list(known.rows(row, stem))
        except KeyError as error:
            yield name, ("key missing", str(error))
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            yield name, ("not a pair", one_line(error, 200))
        else:
            for number, turn in enumerate(turns, start=1):
                yield (f"{name} turn {number}" if len(turns) > 1 else name), turn


def is_place(value) -> bool:
    """Whether a value of a record is the place of a file: [archive, offset, size, name]."""
    return isinstance(value, list) and len(value) == 4 and isinstance(value[0], int)


def samples_of(files: Iterator[tuple[list, str, str]]) -> Iterator[dict]:
    """The records of files with one key; a second file of a kind begins another sample.

    Some archives are several archives one after the other, with the same names.
    """
    record = {}
    for place, _, extension in files:
        meaning = meaning_of(extension)
        if meaning in record or extension in record.get("others", ()):
            yield record
            record = {}
        if meaning:
            record[meaning] = place
        else:
            record.setdefault("others", []).append(extension)
    if record:
        yield record


def sets_of(source: Source, plan: Plan) -> dict[str, str]:
    """{name of a known set: its licence}; plan: with the inventory."""
    if source.are_shards:
        sets = {}
        for folder, shards in groupby((x.parts[0] for x in source.archives), lambda x: x.parent):
            files = [*shards]
            made = sets_in(folder, {file.name for file in files})
            names = filter(None, (known_set(ShardColumns.of(file)[:3]) for file in files))
            sets |= {x: LICENCES.get(x, "") for x in names} if made is None else made
        return sets
    found = {known.name: known.licence for _, known in source.indexes if known.name}
    query = "select exists (select 1 from members where name like '%.1.0.jpg')"
    return found | ({X2EDIT: "Apache-2.0"} if plan.one(query) else {})
