"""The pairs of archives, in the order in which they are written, and their content.

plan = make_plan(source, max_pairs=None)
with closing(Reader(source, plan.pairs, folder)) as reader:
    reader.read(plan.pairs[0])
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from diffusers_flax.data.archives.index import read_rows
from diffusers_flax.data.archives.masks import run_lengths_to_png
from diffusers_flax.data.archives.source import Files, Source
from diffusers_flax.data.archives.tar import (
    MAX_MEMBER_BYTES,
    Archive,
    Forwards,
    Parts,
    Place,
    list_members,
)
from diffusers_flax.data.images import decode_image
from diffusers_flax.data.known_sets import (
    MEANINGS,
    X2EDIT,
    IndexedPair,
    KnownSet,
    by_words,
)
from diffusers_flax.data.shards import (
    read_beside,
)
from diffusers_flax.messages import first_names, one_line

MAX_NAMED = 10  # examples of a problem that are kept
OPEN_ARCHIVES = 8  # each of many parts
FIRST_FILES = 64  # of an archive, one of which begins a sample if it is WebDataset
IMAGES = ("original", "edited", "mask", "reference")  # columns are named so, with _image
NO_FILES = "no files here"


class PlannedPair(NamedTuple):
    """A pair before it is read; sorted in the order of its last file that is read forwards."""

    archive: int
    position: int
    number: int  # in the order of the indexes
    name: str  # for messages
    record: dict  # places of files, run lengths of a mask, texts


class LeftOut:
    """Rows and pairs that are not used: {reason: {"count", "examples"}}."""

    def __init__(self, found: dict | None = None):
        self.found = {} if found is None else found

    def add(self, reason: str, example: str) -> None:
        """Count a row or pair."""
        kept = self.found.setdefault(reason, {"count": 0, "examples": []})
        kept["count"] += 1
        if len(kept["examples"]) < MAX_NAMED:
            kept["examples"].append(one_line(example).encode(errors="replace").decode())


class Plan(NamedTuple):
    """What is to be written."""

    pairs: list[PlannedPair]  # in the order of the indexes
    columns: set[str]  # that the shards have besides pairs with one instruction
    sets: dict[str, str]  # known sets and their licences
    left_out: LeftOut
    unnamed: list[str]  # archives with files that no index names


def list_files(source: Source) -> list[list[Place]]:
    """The files in no archive, then those of each archive.

    Raises:
        ValueError: archives are damaged or hostile.
    """
    names = ((file.relative_to(source.root).as_posix(), file) for file in source.files)
    members, problems = [[Place(0, 0, file.stat().st_size, name) for name, file in names]], []
    for number, archive in enumerate(tqdm(source.archives, "listing archives", disable=None), 1):
        try:
            members.append(
                [
                    # Bytes that are not UTF-8 become question marks.
                    Place(number, offset, size, name.encode(errors="replace").decode())
                    for name, offset, size in list_members(archive)
                ]
            )
        except ValueError as error:
            problems.append(str(error))
    if problems:
        more = f"{len(problems)} archives cannot be read: " * (len(problems) > 1)
        raise ValueError(more + " | ".join(problems[:MAX_NAMED]))
    return members


def make_plan(source: Source, max_pairs: int | None) -> Plan:
    """Find the files of every pair; max_pairs: only the first N, None: all."""
    plan = Plan([], set(), {}, LeftOut(), [])
    members = list_files(source)
    plan.sets.update((known.name, known.licence) for _, known in source.indexes if known.name)
    if any(place.name.endswith(".1.0.jpg") for places in members for place in places):
        plan.sets[X2EDIT.name] = X2EDIT.licence
    found = pairs_of(source, members, plan, max_pairs)
    gzipped = {number for number, x in enumerate(source.archives, 1) if x.is_gzipped}
    for number, (name, record) in enumerate(tqdm(found, "finding pairs", disable=None)):
        if number == max_pairs:
            break
        streamed = [x[:2] for x in record.values() if isinstance(x, Place) and x.archive in gzipped]
        place = max(streamed, default=record["edited"][:2])
        plan.pairs.append(PlannedPair(*place, number, name, record))
        texts = record.get("instruction")
        plan.columns.update({"mask", "reference"} & record.keys())
        plan.columns.update({"instructions"} if isinstance(texts, list) and texts[1:] else ())
    return plan


def pairs_of(
    source: Source, members: list[list[Place]], plan: Plan, max_pairs: int | None
) -> Iterator[tuple[str, dict]]:
    """(name, record) of each pair of the indexes, then of archives that no index names.

    Args:
        source, members: the set and list_files of it.
        plan: what is left out and not named is added to it.
        max_pairs: of the indexes; None: all.
    """
    used, found = set(), []
    files = Files(source, members) if source.indexes else None
    for index, known in source.indexes:
        for name, pair in indexed_pairs(index, known, plan.left_out):
            if len(found) == max_pairs:
                break
            try:
                found.append((name, make_record(files, pair, index)))
            except (ValueError, LookupError) as error:
                reason = error.args[0] if isinstance(error, LookupError) else "not a pair"
                plan.left_out.add(reason, f"{name}: {error.args[-1]}")
    for name, record in found:
        places = {role: place for role, place in record.items() if isinstance(place, Place)}
        if all(map(files.is_right, places.values())):
            used |= {place.archive for place in places.values()}
            yield name, record | {role: x._replace(left_out=()) for role, x in places.items()}
        else:
            plan.left_out.add(NO_FILES, f"{name}: {record['edited'].name} is of another directory")
    for number, archive in enumerate(source.archives, start=1):
        if number in used:
            continue
        samples = [*samples_of(members[number], archive)]
        is_set = not source.indexes or any(map(is_sample, (x for _, x in samples[:FIRST_FILES])))
        if not is_set:
            plan.unnamed.append(archive.name)
            continue
        for name, record in samples:
            contents = [*record.pop("others", ()), *record]
            if is_sample(record):
                yield name, record
            else:
                wanted = sorted({"original", "edited"} - record.keys()) or ["instruction"]
                text = f"{name} has {first_names(contents)}"
                plan.left_out.add(f"no {' or '.join(wanted)}", text)


def indexed_pairs(
    index: Path, known: KnownSet, left_out: LeftOut
) -> Iterator[tuple[str, IndexedPair]]:
    """(name, pair) of each row of an index, or of its turns."""
    for place, row in read_rows(index):
        name = f"{index.name} {place}"
        try:
            if isinstance(row, str):
                raise ValueError(row)
            turns = list(known.pairs(row, index.name.partition(".")[0]))
        except KeyError as error:
            left_out.add("key missing", f"{name}: {error}")
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            left_out.add("not a pair", f"{name}: {one_line(error, 200)}")
        else:
            for number, turn in enumerate(turns, start=1):
                yield (f"{name} turn {number}" if len(turns) > 1 else name), turn


def make_record(files: Files, pair: IndexedPair, index: Path) -> dict:
    """The record of a pair.

    Raises:
        LookupError: (reason, text): a file or the instruction is missing.
        ValueError: an image is ambiguous, or no path.
    """
    record, missing = {}, []
    for role in ("edited", "original", "mask", "reference"):
        given = getattr(pair, role)
        if role == "mask" and isinstance(given, dict):
            record[role] = {"size": given.get("size"), "counts": given.get("counts")}
        elif given:
            near = record["edited"].archive if "edited" in record else -1
            if place := files.find(pair, role, near, index):
                record[role] = place
            else:
                missing.append(given)
    if not {"original", "edited"} & record.keys():
        raise LookupError(NO_FILES, f"{pair.edited} is in no archive or directory")
    if missing:
        raise LookupError("a file is missing", f"{missing[0]} is in no archive or directory")
    for role in ("original", "edited"):
        if role not in record:
            raise ValueError(f"it has no {role} image")
    texts = [text.strip() for text in pair.instruction if isinstance(text, str) and text.strip()]
    if not texts:
        raise LookupError("no instruction", "it has no instruction")
    record["instruction"] = texts
    for name in ("original_prompt", "edited_prompt"):
        if isinstance(text := getattr(pair, name), str) and text:
            record[name] = text
    return record


def meaning_of(extension: str) -> str:
    """What a file of a WebDataset sample is: a field of IndexedPair, "text", "json" or ""."""
    if extension in ("txt", "json"):
        return {"txt": "text"}.get(extension, extension)
    return MEANINGS.get(extension.rpartition(".")[0], "")


def split_name(name: str) -> tuple[str, str]:
    """Key and extension of a file in WebDataset: a/001.input.jpg is of a/001, input.jpg."""
    folder, slash, file = name.rpartition("/")
    stem, _, extension = file.partition(".")
    return f"{folder}{slash}{stem}", extension.lower()


def samples_of(places: list[Place], archive: Archive) -> Iterator[tuple[str, dict]]:
    """(name, record) of each sample of WebDataset: files in a row with one key.

    A second file of a kind begins another sample: some archives are several archives one after the
    other, with the same names.
    """
    for key, same in groupby(places, lambda place: split_name(place.name)[0]):
        record = {}
        for place in same:
            extension = split_name(place.name)[1]
            meaning = meaning_of(extension)
            if meaning in record or extension in record.get("others", ()):
                yield f"{archive.name} {key}", record
                record = {}
            if meaning:
                record[meaning] = place
            else:
                record.setdefault("others", []).append(extension)
        yield f"{archive.name} {key}", record


def is_sample(record: dict) -> bool:
    """Whether a sample has both images and a text."""
    texts = {"text", "json", "instruction"} & record.keys()
    return {"original", "edited"} <= record.keys() and bool(texts)


class StoredPair(NamedTuple):
    """A pair that is read."""

    cells: dict[str, dict | None]  # of IMAGES: image cells
    texts: dict[str, str | list[str] | None]

    def image(self, role: str) -> bytes:
        """An encoded image."""
        return self.cells[role]["bytes"]

    @property
    def images(self) -> tuple[bytes, bytes]:
        """The original and the edited image."""
        return self.image("original"), self.image("edited")

    @property
    def size(self) -> int:
        """Bytes of all images."""
        return sum(len(cell["bytes"]) for cell in self.cells.values() if cell)


def check_image(data: bytes) -> None:
    """Raise a ValueError for data that are no image; usual ones are not decoded."""
    is_jpeg = data.startswith(b"\xff\xd8\xff") and data.endswith(b"\xff\xd9")
    is_png = data.startswith(b"\x89PNG\r\n\x1a\n") and data.endswith(b"IEND\xaeB`\x82")
    if not (is_jpeg or is_png):
        decode_image(data, (16, 16))


class Reader:
    """Reads the files of pairs.

    Args:
        source: the set.
        pairs: those that will be read, in this order.
        folder: for files of gzipped archives that wait for their pair.
    """

    def __init__(self, source: Source, pairs: Iterable[PlannedPair], folder: Path):
        self._source = source
        self._gzipped = {number for number, x in enumerate(source.archives, 1) if x.is_gzipped}
        uses = Counter(
            place
            for pair in (pairs if self._gzipped else ())
            for place in pair.record.values()
            if isinstance(place, Place) and place.archive in self._gzipped
        )
        self._forwards = Forwards(source.archives, uses, folder)
        self._open: dict[int, Parts] = {}

    def close(self) -> None:
        """Close all archives."""
        self._forwards.close()
        for parts in self._open.values():
            parts.close()

    def read_file(self, place: Place) -> bytes:
        """The content of a file.

        Raises:
            ValueError: it cannot be read.
        """
        if not place.archive:
            data = read_beside(self._source.root, place.name)
        elif place.archive in self._gzipped:
            data = self._forwards.read(place)
        else:
            if place.archive not in self._open and len(self._open) == OPEN_ARCHIVES:
                self._open.pop(next(iter(self._open))).close()
            if place.archive not in self._open:
                self._open[place.archive] = Parts(self._source.archives[place.archive - 1].parts)
            data = self._open[place.archive].at(place.offset, place.size)
        if len(data) != place.size or place.size > MAX_MEMBER_BYTES:
            raise ValueError(f"{place.name} has {len(data)} bytes, not {place.size}")
        return data

    def read(self, pair: PlannedPair) -> StoredPair:
        """Read a pair.

        Raises:
            ValueError: an image or the instruction cannot be used.
        """
        files = {
            role: self.read_file(place)
            for role, place in pair.record.items()
            if isinstance(place, Place)
        }
        cells = dict.fromkeys(IMAGES)
        for role in IMAGES:
            if (given := pair.record.get(role)) is None:
                continue
            name = given.name if isinstance(given, Place) else f"the {role}"
            try:
                data = files[role] if role in files else run_lengths_to_png(given)
                check_image(data)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
            cells[role] = {"bytes": data, "path": name.rpartition("/")[2]}
        return StoredPair(cells, texts_of(pair.record, files))


def texts_of(record: dict, files: dict[str, bytes]) -> dict[str, str | list[str] | None]:
    """The instructions and captions of a pair; in a sample they are files.

    Args:
        record: of a PlannedPair.
        files: content of its files.
    """

    def text(name: str) -> str | None:
        if name not in files:
            return record.get(name)
        try:
            return files[name].decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"{record[name].name} is not UTF-8") from error

    captions = {name: text(name) for name in ("original_prompt", "edited_prompt")}
    found = text("instruction")
    found = [found] if isinstance(found, str) else found
    if not found and "json" in files:
        try:
            content = json.loads(text("json")) | {"original": "", "edited": ""}
            found = [x for x in next(by_words(content, "")).instruction if isinstance(x, str)]
        except (ValueError, AttributeError, TypeError, StopIteration, RecursionError):
            found = None
    if not any(map(str.strip, found or ())) and "text" in files:
        found = [text("text")]
    found = [text.strip() for text in found or () if text.strip()]
    if not found:
        raise ValueError("it has no instruction")
    try:
        "".join([*found, *filter(None, captions.values())]).encode()
    except UnicodeEncodeError as error:  # half a letter, as JSON may have
        raise ValueError(f"a text has no letter at {error.start} ({error.reason})") from error
    return captions | {"edit_prompt": found}
