"""Write shards from an index with archives, or from WebDataset's archives.

    report = convert_archives(Path("downloads"), Path("data"), Options())

Headers of all archives are read once, then every pair's files are read in the order of the
archives, by position; gzipped archives are read once more from their start. A killed conversion
continues with the next shard, and writes the same shards.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from diffusers_flax.command_line import ask_before_replacing, is_full_disk
from diffusers_flax.data.archives.finder import FOLDER
from diffusers_flax.data.archives.held_out import HeldOut, choose
from diffusers_flax.data.archives.index import is_index, read_rows
from diffusers_flax.data.archives.manifest import (
    MANIFEST,
    check_apart,
    check_other_shards,
    check_replaced,
    files_of,
    finished_report,
)
from diffusers_flax.data.archives.names import NAME
from diffusers_flax.data.archives.plan import MAX_NAMED, Plan, Source, find_source, sets_of
from diffusers_flax.data.archives.reader import COLUMNS, Pair, Reader
from diffusers_flax.data.archives.sets import find_set, forbids
from diffusers_flax.data.faults import FaultFinder, measure
from diffusers_flax.data.pairs import (
    CAPTION_FILES,
    IMAGE,
    IMAGE_DIRS,
    ROW_GROUP_BYTES,
    ROW_GROUP_ROWS,
    SCHEMA,
    SHARD_BYTES,
    check_directory,
)
from diffusers_flax.data.shards import UNFINISHED_DIR
from diffusers_flax.loading.files import naming_full_disk, remove, write_text
from diffusers_flax.messages import first_names, one_line

PLAN = "plan.sqlite"
HASH_BLOCK = 8 << 20  # bytes; a thread needs Python's lock once for each
MAX_IGNORED = 5  # files that are named as not read


@dataclass(frozen=True)
class Options:
    """What is converted, and by whom."""

    max_pairs: int | None = None  # only the first N pairs; None: all
    worker: int = 0  # of num_workers that divide the archives among them
    num_workers: int = 1
    max_bad_fraction: float = 0.1  # of rows and pairs that cannot be used
    overwrite: bool = False  # replace earlier shards of this function
    faults: tuple[str, ...] = ()  # names of faults.FAULTS; pairs with one are left out
    num_held_out: int = 0  # original images, which with all their pairs go to held_out_dir
    held_out_dir: Path | None = None
    seed: int = 0  # of the choice of images


class Planned(NamedTuple):
    """A pair of the plan."""

    number: int  # in its archive, from 0
    position: int  # in the archive, of its last file
    name: str
    record: str  # JSON
    id: int  # in the plan


class Hash:
    """The SHA-256 of a file that is being written, read behind the writer by a thread."""

    def __init__(self, path: Path):
        self._file, self._sha256 = open(path, "rb", buffering=0), hashlib.sha256()  # noqa: SIM115
        self._thread, self._jobs, self._size = ThreadPoolExecutor(1), [], 0
        self._block = memoryview(bytearray(HASH_BLOCK))

    def follow(self, size: int) -> None:
        """Hash the blocks that are complete; size: bytes written so far."""
        while size - self._size >= HASH_BLOCK:
            self._jobs.append(self._thread.submit(self._read, HASH_BLOCK))
            self._size += HASH_BLOCK

    def finish(self, size: int) -> str:
        """Hash up to the end, and close the file; the hash in hexadecimal."""
        self.follow(size)
        self._jobs.append(self._thread.submit(self._read, size - self._size))
        for job in self._jobs:
            job.result()
        self.close()
        return self._sha256.hexdigest()

    def close(self) -> None:
        """Close the file."""
        self._thread.shutdown()
        self._file.close()

    def _read(self, size: int) -> None:
        while size:
            count = self._file.readinto(self._block[:size])
            if not count:
                raise OSError(f"{self._file.name} ends too early; is it being changed?")
            self._sha256.update(self._block[:count])
            size -= count


class Shards:
    """Writes the pairs of one home, an archive or the directory, to shards."""

    def __init__(self, plan: Plan, folder: Path, home: int, stem: str):
        self._plan, self._folder, self._home, self._stem = plan, folder, home, stem
        self.faults = FaultFinder(plan.db) if plan.get("conversion")["faults"] else None
        row = plan.db.execute(
            "select count(*), coalesce(max(stop), 0) from shards where home = ?", (home,)
        ).fetchone()
        self._number, self.start = row
        columns = plan.get("columns")
        self._schema = SCHEMA
        if "instructions" in columns:
            index = SCHEMA.get_field_index("edit_prompt")
            self._schema = SCHEMA.set(index, pa.field("edit_prompt", pa.list_(pa.string())))
        self._roles = [
            "original",
            "edited",
            *(role for role in ("mask", "reference") if role in columns),
        ]
        for role in self._roles[2:]:
            self._schema = self._schema.append(pa.field(COLUMNS[role], IMAGE))
        self._pairs, self._group_bytes = [], 0
        self._writer = self._file = self._hash = None
        self._rows = self._bytes = 0

    def add(self, pair: Pair, position: int) -> None:
        """Add a pair; position: of the pair in its home, from 0."""
        is_full = len(self._pairs) == ROW_GROUP_ROWS
        if self._pairs and (is_full or self._group_bytes + pair.size > ROW_GROUP_BYTES):
            self._write_group()
            if self._bytes + pair.size > SHARD_BYTES:
                self._close_shard(position)
        self._pairs.append(pair)
        self._group_bytes += pair.size
        self._bytes += pair.size

    def finish(self, stop: int) -> None:
        """Write what is left; stop: number of pairs of the home."""
        if self._pairs:
            self._write_group()
        if self._writer:
            self._close_shard(stop)
        self._plan.db.execute("insert into finished values (?)", (self._home,))
        self._plan.db.commit()

    def close(self) -> None:
        """Remove a shard that is not complete."""
        if self._writer:
            with suppress(OSError):  # the disk is full
                self._writer.close()
            with suppress(OSError):
                self._file.close()
            self._hash.close()
            remove(self._path)
            self._writer = None

    def _write_group(self) -> None:
        if not self._writer:
            self._path = self._folder / f"train-{self._stem}-{self._number:05d}.parquet"
            self._file, self._hash = pa.OSFile(str(self._path), "wb"), Hash(self._path)
            options = {"compression": "none", "use_dictionary": False, "write_statistics": False}
            self._writer = pq.ParquetWriter(self._file, self._schema, **options)
        columns = {COLUMNS[role]: [p.cells[role] for p in self._pairs] for role in self._roles}
        for name in ("original_prompt", "edited_prompt", "edit_prompt"):
            columns[name] = [pair.texts[name] for pair in self._pairs]
        if self._schema.field("edit_prompt").type == pa.string():
            columns["edit_prompt"] = [texts[0] for texts in columns["edit_prompt"]]
        arrays = [
            image_array(columns[field.name])
            if field.type == IMAGE
            else pa.array(columns[field.name], field.type)
            for field in self._schema
        ]
        with naming_full_disk(self._path):
            self._writer.write_table(pa.Table.from_arrays(arrays, schema=self._schema))
        self._hash.follow(self._file.tell())
        self._rows += len(self._pairs)
        self._pairs, self._group_bytes = [], 0

    def _close_shard(self, stop: int) -> None:
        """Complete a shard, and note it together with what was left out up to here."""
        with naming_full_disk(self._path):
            self._writer.close()
            size = self._file.tell()
            self._file.close()
        values = (self._home, self._number, stop, self._path.name, size)
        self._plan.db.execute(
            "insert into shards values (?, ?, ?, ?, ?, ?, ?)",
            (*values, self._hash.finish(size), self._rows),
        )
        self._plan.db.commit()
        self._writer, self._rows, self._bytes = None, 0, 0
        self._number += 1


def image_array(cells: list[dict | None]) -> pa.StructArray:
    """The column of image cells; as pa.array(cells, IMAGE), in half the time."""
    if None in cells:
        return pa.array(cells, IMAGE)
    images = [cell["bytes"] for cell in cells]
    offsets = np.cumsum([0, *map(len, images)], dtype=np.int32)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(images))]
    data = pa.Array.from_buffers(pa.binary(), len(images), buffers)
    paths = pa.array([cell["path"] for cell in cells], pa.string())
    return pa.StructArray.from_arrays([data, paths], fields=[*IMAGE])


def is_archived(path: Path) -> bool:
    """Whether --pairs names an index with archives, and not a list of image files."""
    if path.is_dir():
        lists = [path / name for name in CAPTION_FILES if (path / name).is_file()]
        return not (lists and all((path / name).is_dir() for name in IMAGE_DIRS))
    if not path.is_file() or path.suffix.lower() == ".csv":
        return False
    if path.suffix.lower() != ".jsonl":
        return is_index(path) or bool(NAME.fullmatch(path.name))
    row = next((row for _, row in read_rows(path) if isinstance(row, dict)), {})
    known = find_set(row)
    if known is None or known.name:
        return known is not None
    with suppress(ValueError, LookupError, TypeError, AttributeError, OSError):
        original = next(known.rows(row, "")).original
        if any((folder / original).is_file() for folder in (path.parent, Path())):
            return False
    return any(NAME.fullmatch(file.name) for file in path.parent.iterdir())


def convert_archives(path: Path, output_dir: Path, options: Options = Options()) -> str:
    """Convert a set to shards, or continue with it.

    Args:
        path: directory, index or archive.
        output_dir: new or empty, or of the same conversion that was interrupted.
        options: see Options.

    Returns:
        A summary of a few lines.

    Raises:
        ValueError: there is nothing to convert, an archive is damaged or hostile, too many pairs
            cannot be used, or output_dir belongs to something else.
    """
    if not path.exists():
        raise ValueError(f"--pairs {path} does not exist; name an index, an archive or a directory")
    check_apart(path, output_dir)
    unfinished = output_dir / UNFINISHED_DIR
    database = unfinished / PLAN
    source = find_source(path, output_dir)
    given = conversion_of(path, options)
    is_new = not database.exists()
    if is_new and (unfinished.exists() or not options.overwrite):
        finished = finished_report(output_dir, given, source.stamp())
        if finished:
            remove(unfinished)
            return finished
    if is_new:
        ask_before_replacing("output_dir", output_dir, options.overwrite)
        check_other_shards(output_dir)
        check_replaced(source.archives, output_dir)
        check_held_out(source, output_dir, options)
    unfinished.mkdir(parents=True, exist_ok=True)
    with going_on_if_full(), Plan(database) as plan:
        plan.check_same(given, output_dir)
        plan.check_files(source)
        if not plan.has_shards:
            check_held_out(source, output_dir, options)
        if not plan.get("planned"):
            plan.take_inventory(source)
            announce(source, plan)
            plan.make_pairs(source, options.max_pairs)
        check_left_out(plan, source, options)
        if options.num_held_out and not plan.get("chosen"):
            choose(plan, source, options.num_held_out, options.seed)
        write_homes(plan, source, output_dir, options)
        report = finish(plan, source, output_dir, options)
    remove(unfinished)
    return report


@contextmanager
def going_on_if_full() -> Iterator[None]:
    """Context in which the error of a full disk says that the same command goes on."""
    try:
        yield
    except OSError as error:
        if not is_full_disk(error):
            raise
        text = f"{error.strerror}; with free space, the same command goes on"
        raise OSError(error.errno, text, error.filename) from error


def check_held_out(source: Source, output_dir: Path, options: Options) -> None:
    """Raise a ValueError unless the directory for held-out pairs may be written."""
    if not (folder := options.held_out_dir):
        return
    check_directory("held_out_dir", folder, options.overwrite)
    for other, flag in ((output_dir, "output_dir"), (source.root, "pairs")):
        if folder.resolve().is_relative_to(other.resolve()):
            raise ValueError(f"--held_out_dir {folder} is in --{flag} {other}; name another")


def conversion_of(path: Path, options: Options) -> dict:
    """What is converted, as a plan and a manifest note it."""
    given = asdict(options)
    names = ("max_pairs", "worker", "num_workers", "faults")
    conversion = {"pairs": str(path.resolve())} | {
        name: list(given[name]) if name == "faults" else given[name] for name in names
    }
    if options.num_held_out:
        names = ("num_held_out", "seed")
        conversion |= {name: given[name] for name in names}
        conversion["held_out_dir"] = str(options.held_out_dir.resolve())
    return conversion


def announce(source: Source, plan: Plan) -> None:
    """Print what set it is, what its licence forbids, and what is not read."""
    for name, licence in sets_of(source, plan).items():
        forbidden = forbids(licence)
        told = "columns" if source.are_shards else "keys" if source.indexes else "file names"
        print(f"set         {name} by its {told}, {licence or 'no licence on its card'}")
        if forbidden:
            print(f"licence     {licence} forbids {forbidden}")
    for line in source.ignored[:MAX_IGNORED]:
        print(f"not read    {line}")
    if len(source.ignored) > MAX_IGNORED:
        more = f"{len(source.ignored) - MAX_IGNORED} more files"
        print(f"not read    {more}; {MANIFEST} will name them")


def check_left_out(plan: Plan, source: Source, options: Options) -> None:
    """Raise a ValueError if too few rows of the indexes are pairs."""
    left_out, pairs = Counter(plan.get("left_out")), plan.get("pairs")
    absent = left_out["no files here"]
    bad = left_out.total() - absent
    names = dict(plan.db.execute("select kind, name from problems where stage = 'plan'").fetchall())
    if not pairs:
        steps = [known.sources for _, known in source.indexes if known.sources]
        steps += no_pairs_hint(source)
        first = f"{next(iter(names.values()))}" if names else "it has no rows"
        raise ValueError(
            f"--pairs {source.root} has no pair that can be used ({left_out.total()} rows); the "
            f"first: {first}{f'; {steps[0]}' if steps else ''}"
        )
    if bad > options.max_bad_fraction * (pairs + bad):
        steps = [known.sources for _, known in source.indexes if known.sources]
        names.pop("no files here", None)
        raise ValueError(
            f"{bad} of {pairs + bad} rows cannot be used, more than --max_bad_fraction "
            f"{options.max_bad_fraction}; for example {next(iter(names.values()))}"
            f"{f'; {steps[0]}' if steps else ''}"
        )


def no_pairs_hint(source: Source) -> list[str]:
    """What may be missing if there are no pairs at all."""
    if source.indexes and not source.archives:
        return [f"{source.root} has no archive; name a directory that has the index and archives"]
    if source.indexes or source.are_shards:
        return []
    not_read = f" (not read: {first_names(source.ignored)})" if source.ignored else ""
    return [
        f"no index (.jsonl, .json, .parquet) with keys such as input, edited and edit names files "
        f"of the {len(source.archives)} archives{not_read}, and they are no WebDataset with "
        "original, edited and instruction: download the index, and name a directory that has both"
    ]


def stem_of(source: Source, home: int) -> str:
    """The part of the shards' names for an archive, or for the directory."""
    if home == FOLDER:
        return "files"
    name = source.archives[home - 1].name
    for suffix in (".tar.gz", ".tgz", ".tar", ".parquet"):
        name = name.removesuffix(suffix)
    stem = "".join(x if x.isalnum() or x in "_-" else "-" for x in name)
    return f"{stem[-80:]}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"


def write_homes(plan: Plan, source: Source, output_dir: Path, options: Options) -> None:
    """Write the shards of all archives of this worker that are not complete."""
    folder = output_dir / UNFINISHED_DIR
    homes = [row[0] for row in plan.db.execute("select distinct home from pairs order by home")]
    mine = homes[options.worker :: options.num_workers]
    if not mine:
        raise ValueError(
            f"--num_workers {options.num_workers} is too many: only {len(homes)} archives have "
            f"pairs, so --worker {options.worker} has none"
        )
    done = {row[0] for row in plan.db.execute("select home from finished")}
    for file, size in plan.db.execute("select file, size from shards").fetchall():
        places = (folder / file, output_dir / file)  # the second after a kill at the end
        written = next((place for place in places if place.exists()), None)
        if written is None or written.stat().st_size != size:
            raise ValueError(
                f"{folder / file} has changed or gone; remove {folder} and convert again"
            )
    counts = dict(plan.db.execute("select home, count(*) from pairs group by home").fetchall())
    with (
        closing(Reader(source, folder)) as reader,
        tqdm(desc="writing shards", unit="pair", disable=None) as bar,
    ):
        bar.total = sum(counts[home] for home in mine)
        held_out = None
        if options.num_held_out:
            held_out = HeldOut(plan, folder, options.held_out_dir)
        conversion = Conversion(plan, options, reader, bar, held_out)
        for home in sorted({*mine, *reader.gzipped}):
            todo = {other for other in mine if other not in done and other >= home}
            if home in todo:
                shards = Shards(plan, folder, home, stem_of(source, home))
                with closing(shards):
                    conversion.write(shards, home, todo)
                    shards.finish(counts[home])
            elif home in reader.gzipped:
                conversion.write(None, home, todo)
            if home in mine and home in done:
                bar.update(counts[home])


@dataclass
class Conversion:
    """Writes the pairs of one archive after the other."""

    plan: Plan
    options: Options
    reader: Reader
    bar: tqdm
    held_out: HeldOut | None

    def write(self, shards: Shards | None, home: int, todo: set[int]) -> None:
        """Write the pairs of an archive, and keep its files for later archives if it is gzipped.

        Args:
            shards: of the archive; None: it has no pairs left.
            home: its number.
            todo: archives whose pairs are not all written, from this one on.
        """
        pairs = self.pairs(home, shards.start) if shards else iter(())
        ahead = next(pairs, None)
        if home in self.reader.gzipped:
            first = ahead.position if ahead else None
            for offset in self.reader.stream(home, self.needed(home, todo, first)):
                while ahead and ahead.position == offset:
                    self.write_pair(shards, ahead)
                    ahead = next(pairs, None)
        while ahead:
            self.write_pair(shards, ahead)
            ahead = next(pairs, None)

    def pairs(self, home: int, start: int) -> Iterator[Planned]:
        """The pairs of an archive from the one with number `start` on."""
        query = "select position, name, record, id from pairs where home = ? order by position, id"
        rows = self.plan.db.cursor().execute(query, (home,))
        for number, (position, *values) in enumerate(rows):
            if number < start:
                self.bar.update()
            else:
                yield Planned(number, position, *values)

    def needed(self, archive: int, todo: set[int], first: int | None) -> Iterator[tuple]:
        """The files of a gzipped archive that pairs to come need: (offset, size, last pair).

        Args:
            archive: its number.
            todo: archives whose pairs are not all written.
            first: position of this archive's first pair that is not written; None: all are.
        """
        query = "select offset, size, home, position from needs where archive = ? order by offset"
        for offset, size, home, position in self.plan.db.cursor().execute(query, (archive,)):
            is_later = home != archive or (first is not None and position >= first)
            if home in todo and is_later:
                yield offset, size, (home, position)

    def write_pair(self, shards: Shards, planned: Planned) -> None:
        """Read a pair and add it to the shards, or count it as one that is left out."""
        self.bar.update()
        try:
            pair = self.reader.pair(json.loads(planned.record))
        except ValueError as error:
            problem = f"{planned.name}: {one_line(error, 200)}"
            self.plan.add_problem("write", "damaged", problem)
            self.check_damaged(problem)
            return
        if not shards.faults:
            self.keep(shards, planned, pair)
            return
        measured = measure(*(pair.cells[role]["bytes"] for role in ("original", "edited")))
        text = "\n".join(pair.texts["edit_prompt"])
        found = [x for x in shards.faults.find(measured, text) if x in self.options.faults]
        if found:
            self.plan.add_problem("write", f"--drop {found[0]}", planned.name)
            return
        # First add, which may commit a shard that ends before this pair.
        self.keep(shards, planned, pair)
        shards.faults.remember(measured, text)

    def keep(self, shards: Shards, planned: Planned, pair: Pair) -> None:
        """Add a pair to the shards or to those that are held out."""
        if self.held_out and self.held_out.take(planned.id, pair):
            return
        if self.held_out and self.held_out.is_copy(pair):
            self.plan.add_problem("write", "its original image is held out", planned.name)
            return
        shards.add(pair, planned.number)

    def check_damaged(self, problem: str) -> None:
        """Raise a ValueError if too many pairs are damaged; problem: of the last one."""
        pairs, damaged = self.plan.num_pairs, self.plan.num_damaged
        if damaged > self.options.max_bad_fraction * pairs:
            raise ValueError(
                f"over {damaged - 1} of {pairs} pairs are damaged, more than --max_bad_fraction "
                f"{self.options.max_bad_fraction}; for example {problem}"
            )


def finish(plan: Plan, source: Source, output_dir: Path, options: Options) -> str:
    """Move the shards into the output directory with their manifest; the summary."""
    rows = plan.db.execute(
        "select file, size, sha256, rows, home from shards order by home, number"
    )
    names = ["", *(archive.name for archive in source.archives)]
    files = [
        {"file": file, "size": size, "sha256": sha256, "rows": count, "archive": names[home]}
        for file, size, sha256, count, home in rows
    ]
    if not files:
        raise ValueError(f"--pairs {source.root}: no pair is left, so there is no shard")
    counts = Counter(plan.get("left_out"))
    rows = plan.db.execute(
        "select kind, count(*) from problems where stage = 'write' group by kind"
    )
    counts.update(dict(rows.fetchall()))
    examples = {}
    for kind, name in plan.db.execute("select kind, name from problems"):
        if len(named := examples.setdefault(kind, [])) < MAX_NAMED:
            named.append(name)
    for old in files_of(output_dir):
        if old["file"] not in {file["file"] for file in files}:
            remove(output_dir / Path(old["file"]).name)
    for file in files:
        if (written := output_dir / UNFINISHED_DIR / file["file"]).exists():
            written.rename(output_dir / file["file"])
    held_out = []
    if options.num_held_out:
        folder = output_dir / UNFINISHED_DIR
        held_out = [HeldOut(plan, folder, options.held_out_dir).finish()]
    left_out = {
        kind: {"count": count, "examples": examples.get(kind, [])}
        for kind, count in sorted(counts.items())
    }
    content = {
        "sets": sets_of(source, plan),
        "conversion": plan.get("conversion"),
        "source": source.stamp(),
        "files": files,
        "left_out": left_out,
        "not_read": [*source.ignored, *(plan.get("unnamed") or [])],
    }
    write_text(output_dir / MANIFEST, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    total = sum(file["rows"] for file in files)
    lines = [f"wrote {total} pairs to {output_dir} (shards: {len(files)}; {MANIFEST} lists them)"]
    lines += held_out
    if unnamed := plan.get("unnamed"):
        text = f"{len(unnamed)} archives with files that no index here names: "
        lines.append(f"not read    {text}{first_names(unnamed)}")
    for kind, found in left_out.items():
        lines.append(f"left out    {found['count']} pairs: {kind}")
        lines += [f"            {name}" for name in found["examples"][:3]]
    return "\n".join(lines)
