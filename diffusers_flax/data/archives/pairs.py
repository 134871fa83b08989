"""The pairs of archives, in the order in which they are written, and their content.

plan = make_plan(source, max_pairs=None)
for pair, row in read_pairs(source, sorted(plan.pairs)): ...
"""

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from diffusers_flax.data.archives.index import read_rows
from diffusers_flax.data.archives.masks import run_lengths_to_png
from diffusers_flax.data.archives.source import Files, Source
from diffusers_flax.data.archives.tar import Archive, Parts, Place, list_members
from diffusers_flax.data.images import decode_image
from diffusers_flax.data.known_sets import (
    MEANINGS,
    X2EDIT,
    IndexedPair,
    KnownIndex,
    as_list,
    by_words,
)
from diffusers_flax.data.shards import read_beside
from diffusers_flax.messages import first_names, one_line

MAX_NAMED = 10  # examples of a reason that are kept
OPEN_ARCHIVES = 8  # each of many parts
IMAGES = ("original", "edited", "mask", "reference")  # columns are named so, with _image
READ = {*MEANINGS.values(), "txt", "json"}  # of a sample of WebDataset
NO_FILES, NOT_A_PAIR = "no files here", "not a pair"


class PlannedPair(NamedTuple):
    """A pair before it is read; sorted by archives, and in them by the place of its last file."""

    archive: int
    position: int
    number: int  # in the order of the indexes
    name: str  # for messages
    record: dict  # places of files, run lengths of a mask, texts


class Plan(NamedTuple):
    """What is to be written."""

    pairs: list[PlannedPair]  # in the order of the indexes
    columns: set[str]  # that the shards have besides pairs with one instruction
    sets: dict[str, str]  # known sets and their licences
    left_out: dict[str, dict]  # see leave_out
    unnamed: list[str]  # archives with files that no index names


def leave_out(left_out: dict[str, dict], reason: str, example: str) -> None:
    """Count a row or pair that is not used; left_out: {reason: {"count", "examples"}}."""
    kept = left_out.setdefault(reason, {"count": 0, "examples": []})
    kept["count"] += 1
    if len(kept["examples"]) < MAX_NAMED:
        kept["examples"].append(one_line(example, 200).encode(errors="replace").decode())


def make_plan(source: Source, max_pairs: int | None) -> Plan:
    """Find the files of every pair.

    Args:
        source: the set.
        max_pairs: only the first N; None: all.

    Raises:
        ValueError: an archive or index is damaged or hostile.
    """
    sizes = ((file.relative_to(source.root), file.stat().st_size) for file in source.files)
    members = [[Place(0, 0, size, file.as_posix()) for file, size in sizes]]
    for number, archive in enumerate(tqdm(source.archives, "listing archives", disable=None), 1):
        members.append([Place(number, *x) for x in list_members(archive)])
    plan = Plan([], set(), {}, {}, [])
    plan.sets.update((known.name, known.licence) for _, known in source.indexes if known.name)
    if any(place.name.endswith(".1.0.jpg") for places in members for place in places):
        plan.sets[X2EDIT.name] = X2EDIT.licence
    pairs = []
    if source.indexes:
        pairs += indexed_pairs(source, members, max_pairs, plan.left_out)
    pairs += sampled_pairs(source, members, pairs, plan)
    gzipped = {number for number, x in enumerate(source.archives, 1) if x.is_gzipped}
    for number, (name, record) in enumerate(pairs[:max_pairs]):
        streamed = [x for x in record.values() if isinstance(x, Place) and x.archive in gzipped]
        last = max(streamed, default=record["edited"])
        plan.pairs.append(PlannedPair(last.archive, last.offset, number, name, record))
        plan.columns.update({"mask", "reference"} & record.keys())
        if len(as_list(record.get("instruction"))) > 1:
            plan.columns.add("instructions")
    return plan


def indexed_pairs(
    source: Source, members: list[list[Place]], max_pairs: int | None, left_out: dict
) -> Iterator[tuple[str, dict]]:
    """(name, record) of each pair of the indexes; rows that are none are added to left_out."""
    files, found = Files(source, members), []
    rows = ((x, known, *row) for x, known in source.indexes for row in read_rows(x))
    for index, known, place, row in tqdm(rows, "finding pairs", disable=None):
        if max_pairs and len(found) >= max_pairs:
            break
        name = f"{index.name} {place}"
        try:
            turns = list(known.pairs(row, index.name.partition(".")[0]))
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            leave_out(left_out, NOT_A_PAIR, f"{name}: {type(error).__name__} {error}")
            continue
        for number, pair in enumerate(turns, start=1):
            name = f"{index.name} {place}" + f" turn {number}" * (len(turns) > 1)
            try:
                found.append((name, *make_record(files, pair, index, known)))
            except ValueError as error:
                reason, text = error.args if len(error.args) == 2 else (NOT_A_PAIR, error)
                leave_out(left_out, reason, f"{name}: {text}")
    for name, record, lacks in found:
        if all(files.is_right(place, directories) for place, directories in lacks):
            yield name, record
        else:
            leave_out(left_out, NO_FILES, f"{name}: {lacks[0][0].name} is of another directory")


def make_record(
    files: Files, pair: IndexedPair, index: Path, known: KnownIndex
) -> tuple[dict, list[tuple[Place, tuple[str, ...]]]]:
    """The record of a pair, and its files that lack directories of the index's paths.

    Raises:
        ValueError: a file or the instruction is missing (reason and example), or a name is
            ambiguous.
    """
    record, lacks, missing = {}, [], []
    for role in ("edited", "original", "mask", "reference"):
        given = getattr(pair, role)
        if role == "mask" and isinstance(given, dict):
            record[role] = {"size": given.get("size"), "counts": given.get("counts")}
        elif given:
            near = record["edited"].archive if "edited" in record else -1
            if found := files.find(given, index, known, near):
                record[role], directories = found
                lacks += [found] if directories else []
            else:
                missing.append(given)
    if missing:
        is_here = {"original", "edited"} & record.keys()
        text = f"{missing[0]} is in no archive or directory"
        raise ValueError("a file is missing" if is_here else NO_FILES, text)
    if not {"original", "edited"} <= record.keys():
        raise ValueError("it has no original or no edited image")
    texts = [text.strip() for text in pair.instruction if isinstance(text, str) and text.strip()]
    if not texts:
        raise ValueError("no instruction", "it has no instruction")
    record["instruction"] = texts
    for name in ("original_prompt", "edited_prompt"):
        if isinstance(text := getattr(pair, name), str) and text:
            record[name] = text
    return record, lacks


def sampled_pairs(
    source: Source, members: list[list[Place]], indexed: list[tuple[str, dict]], plan: Plan
) -> Iterator[tuple[str, dict]]:
    """(name, record) of the samples of WebDataset in archives of which no index names a file.

    Args:
        source, members: the set and the files of each archive.
        indexed: pairs of the indexes.
        plan: what is left out and not named is added to it.
    """
    records = (record.values() for _, record in indexed)
    used = {x.archive for values in records for x in values if isinstance(x, Place)}
    for number, archive in enumerate(source.archives, start=1):
        if number in used:
            continue
        samples = [*samples_of(members[number], archive)]
        if source.indexes and not any(is_sample(x) for _, x in samples):
            plan.unnamed.append(archive.name)
            continue
        for name, record in samples:
            if is_sample(record):
                yield name, {x: place for x, place in record.items() if x in READ}
            else:
                leave_out(plan.left_out, "no whole sample", f"{name} has {first_names([*record])}")


def samples_of(places: list[Place], archive: Archive) -> Iterator[tuple[str, dict]]:
    """(name, record) of each sample of WebDataset: files in a row with one key.

    a/001.input.jpg has the key a/001. A second file of a kind begins another sample: some archives
    are several archives one after the other, with the same names.
    """

    def key_of(place: Place) -> str:
        folder, slash, file = place.name.rpartition("/")
        return folder + slash + file.partition(".")[0]

    for key, same in groupby(places, key_of):
        record = {}
        for place in same:
            extension = place.name[len(key) + 1 :].lower()
            meaning = MEANINGS.get(extension.rpartition(".")[0], extension)
            if meaning in record:
                yield f"{archive.name} {key}", record
                record = {}
            record[meaning] = place
        yield f"{archive.name} {key}", record


def is_sample(record: dict) -> bool:
    """Whether a sample has both images and a text."""
    return {"original", "edited"} <= record.keys() and bool(
        {"txt", "json", "instruction"} & record.keys()
    )


def read_pairs(
    source: Source, pairs: list[PlannedPair]
) -> Iterator[tuple[PlannedPair, dict | ValueError]]:
    """Read pairs; each with its row of a shard, see row_of, or why it cannot be used.

    Args:
        source: the set; archives of the pairs are not gzipped.
        pairs: sorted.
    """
    parts_of = lru_cache(OPEN_ARCHIVES)(lambda number: Parts(source.archives[number - 1].parts))

    def read_file(place: Place) -> bytes:
        if place.archive:
            data = parts_of(place.archive).at(place.offset, place.size)
        else:
            data = read_beside(source.root, place.name)
        if len(data) != place.size:
            raise ValueError(f"it has {len(data)} bytes, not {place.size}")
        return data

    for pair in pairs:
        try:
            yield pair, row_of(pair.record, read_file)
        except ValueError as error:
            yield pair, error


def row_of(record: dict, read_file: Callable[[Place], bytes]) -> dict:
    """A row of a shard: cells of IMAGES or None, "edit_prompt" as a list, and captions.

    Args:
        record: of a PlannedPair.
        read_file: gives the content of a file.

    Raises:
        ValueError: an image or the instruction cannot be used.
    """
    row = {}
    for role in IMAGES:
        if (given := record.get(role)) is None:
            row[f"{role}_image"] = None
            continue
        name = given.name if isinstance(given, Place) else f"the {role}"
        try:
            data = read_file(given) if isinstance(given, Place) else run_lengths_to_png(given)
            is_jpeg = data.startswith(b"\xff\xd8\xff") and data.endswith(b"\xff\xd9")
            is_png = data.startswith(b"\x89PNG\r\n\x1a\n") and data.endswith(b"IEND\xaeB`\x82")
            if not (is_jpeg or is_png):  # these are whole
                decode_image(data, (16, 16))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        row[f"{role}_image"] = {"bytes": data, "path": name.rpartition("/")[2]}

    def text(name: str) -> str | list[str] | None:
        given = record.get(name)
        return read_file(given).decode("utf-8-sig") if isinstance(given, Place) else given

    captions = {name: text(name) for name in ("original_prompt", "edited_prompt")}
    found = as_list(text("instruction"))
    if not found and "json" in record:
        with suppress(ValueError, TypeError, LookupError, AttributeError):
            content = json.loads(text("json")) | {"original": "x", "edited": "x"}
            found = [x for x in next(by_words(content, "")).instruction if isinstance(x, str)]
    found = [x.strip() for x in found if x.strip()] or [x.strip() for x in as_list(text("txt"))]
    if not any(found):
        raise ValueError("it has no instruction")
    "".join([*found, *filter(None, captions.values())]).encode()  # half a letter raises an error
    return row | captions | {"edit_prompt": found}
