"""What a plan downloads: shards, or a set of archives or image files with its index.

    found = list_dataset("OWNER/NAME", Selection())

How a dataset on the hub is told apart, with one or two requests besides the listings:

1. The repository's file list has no tar archives, and fewer than MIN_IMAGES image files or no
   index (.parquet, .jsonl, .json): shards, as remote_shards.py lists them. Fewer image files are
   figures of the dataset's card.
2. Else the footer of one parquet file decides, the largest one of the repository, or without any
   there the largest one of the hub's conversion, if that is complete: shards if it has a column of
   bytes, and so the images themselves. The conversion of an index has no such column. The
   conversion of WebDataset has, but its columns are named by file extensions; __key__ tells it.
3. Else a set of archives: the repository's archives, image files and indexes.

A list of --urls is a set of archives if it names one. Hidden files do not count.
"""

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from itertools import takewhile
from pathlib import PurePosixPath
from typing import NamedTuple

from huggingface_hub import constants, hf_hub_url

from diffusers_flax.data.archives.names import (
    IMAGE_SUFFIXES,
    INDEX_SUFFIXES,
    NAME,
    OTHER,
    group_parts,
    in_order,
)
from diffusers_flax.data.known_sets import PICO, SHOULD_MAP
from diffusers_flax.data.remote_shards import (
    CONVERTED_REF,
    check_dataset_name,
    classify_converted,
    file_names,
    list_dataset_shards,
    list_tree,
    manifest_row,
    read_footer,
    select_split,
    unique_file_names,
    url_path,
)

MIN_IMAGES = 20
MAX_COMPONENT = 200  # bytes of a file's or directory's name; aria2 appends to it
# Directories with one side of the pairs; the directory above has both.
SIDE = re.compile(
    r"(?:input|output|original|edited|source|target|before|after|mask)s?(?:[_-]?images?)?"
)
FIRST_STEPS = {  # by the name on the hub in lower case: what else has to be downloaded
    "ucsc-vlaa/gpt-image-edit-1.5m": (
        "the set has its index in another repository; download it to the directory of the images: "
        "hf download UCSC-VLAA/gpt-image-edit-training --include 'training_json/*' --local-dir "
        "downloads"
    ),
    PICO.lower(): SHOULD_MAP,
}
# Of which the original and the edited image of a pair are in two archives.
SPREAD = frozenset({"a1557811266/inter-edit-train", PICO.lower()})


class Selection(NamedTuple):
    """What of a dataset is wanted; flags of script.py."""

    config: str | None = None
    split: str = "train"
    revision: str | None = None
    include: tuple[str, ...] = ()  # patterns of paths; (): all


class Found(NamedTuple):
    """Rows of manifest.json, with names of files."""

    units: dict[str, list[dict]]  # what goes to one worker together, by name
    common: list[dict]  # what goes to every worker
    source: str  # where they are, in words
    kind: str = ""  # of a set of archives, in words; "": shards
    first_step: str = ""  # what else to do before the set can be read
    is_spread: bool = False  # whether a pair may need any two archives

    @property
    def rows(self) -> list[dict]:
        """All files."""
        return [row for unit in self.units.values() for row in unit] + self.common

    def first(self, count: int | None) -> "Found":
        """With the first units only; None: all."""
        return self._replace(units=dict(list(self.units.items())[:count]))


def is_archive(path: str) -> bool:
    """Whether a file is a tar archive or a part of one, by its name."""
    return NAME.fullmatch(PurePosixPath(path).name) is not None


def is_image(path: str) -> bool:
    """Whether a file is an image, by its name."""
    return path.lower().endswith(IMAGE_SUFFIXES)


def is_index(path: str) -> bool:
    """Whether a file may be an index, by its name."""
    return path.lower().endswith(INDEX_SUFFIXES)


def may_be_archives(paths: list[str]) -> bool:
    """Whether files are archives, or image files with an index; see the top of this file."""
    if any(is_archive(path) or OTHER.fullmatch(path.lower()) for path in paths):
        return True
    return sum(map(is_image, paths)) >= MIN_IMAGES and any(map(is_index, paths))


def list_dataset(dataset: str, selection: Selection) -> Found:
    """List the files of a dataset on the hub: shards, or a set of archives.

    Sets of FIRST_STEPS are no shards.

    Args:
        dataset: OWNER/NAME.
        selection: see Selection.

    Raises:
        ValueError: there is no such dataset, or nothing to download; a name is not safe.
    """
    check_dataset_name(dataset)
    config, split, revision, include = selection
    first_step = FIRST_STEPS.get(dataset.lower(), "")
    try:
        entries = list_tree(dataset, revision or constants.DEFAULT_REVISION)
        usable = [entry for entry in entries if is_usable(entry["path"])]
        may_be = may_be_archives([entry["path"] for entry in usable])
        is_set = first_step or (may_be and not has_images(dataset, usable, selection))
        if not is_set:
            rows, source = list_dataset_shards(dataset, config, split, revision, entries)
            return shards_of(choose_rows(rows, include, dataset), source)
    except ValueError as error:
        if not first_step:
            raise
        raise ValueError(f"{error}; {first_step}") from None
    if config or split != Selection().split:
        raise ValueError(
            f"{dataset} consists of archives, which have no configurations and splits; leave out "
            "--config and --split, and choose files with --include"
        )
    found_revision = revision or constants.DEFAULT_REVISION
    source = f"the repository's files ({found_revision})"
    rows = []
    has_few = sum(is_image(entry["path"]) for entry in usable) < MIN_IMAGES
    for entry in usable:
        if has_few and is_image(entry["path"]):
            continue
        check_path(entry["path"], dataset)
        url = hf_hub_url(dataset, entry["path"], repo_type="dataset", revision=found_revision)
        row = manifest_row(url, entry["size"], (entry.get("lfs") or {}).get("oid"))
        rows.append(row | {"file": entry["path"]})
    found = archives_of(rows, include, dataset, source)
    return found._replace(first_step=first_step, is_spread=dataset.lower() in SPREAD)


def list_urls(rows: list[dict], include: tuple[str, ...], place: str) -> Found:
    """The files of a list of addresses: shards, or a set of archives.

    Args:
        rows: of the manifest.
        include: patterns of paths.
        place: the list, for messages.

    Raises:
        ValueError: nothing is chosen, or a name is not safe or not unique.
    """
    rows = [row | {"file": url_path(row["url"]).lstrip("/")} for row in rows]
    if not any(is_archive(row["file"]) for row in rows):
        return shards_of(choose_rows(rows, include, place), place)
    folders = [row["file"].split("/")[:-1] for row in rows]
    shared = len(list(takewhile(lambda names: len(set(names)) == 1, zip(*folders))))
    for row in rows:
        row["file"] = "/".join(row["file"].split("/")[shared:])
        check_path(row["file"], place)
        if not is_usable(row["file"]) or OTHER.fullmatch(row["file"].lower()):
            raise ValueError(
                f"{place} names archives, and {row['file']}, which is no .tar, .tar.gz, index or "
                "image; remove it"
            )
    return archives_of(rows, include, place, place)


def has_images(dataset: str, entries: list[dict], selection: Selection) -> bool:
    """Whether parquet files have the images themselves; see the top of this file."""
    config, split, revision, _ = selection
    shards = [entry for entry in entries if entry["path"].endswith(".parquet")]
    found_revision = revision or constants.DEFAULT_REVISION
    if not shards and revision is None:
        converted = list_tree(dataset, CONVERTED_REF)
        try:
            shards, _ = select_split(converted, classify_converted, config, split)
        except ValueError:  # several configurations
            return False
        found_revision = CONVERTED_REF
    if not shards:
        return False
    path = max(shards, key=lambda entry: entry["size"])["path"]
    url = hf_hub_url(dataset, path, repo_type="dataset", revision=found_revision)
    schema = read_footer(url)[1].schema
    columns = [schema.column(number) for number in range(len(schema))]
    if any(column.path == "__key__" for column in columns):  # of WebDataset
        return False
    # A text has the logical type STRING.
    kinds = {(column.physical_type, column.logical_type.type) for column in columns}
    return ("BYTE_ARRAY", "NONE") in kinds


def shards_of(rows: list[dict], source: str) -> Found:
    """Shards, with names for one flat directory."""
    names = unique_file_names([row["url"] for row in rows])
    units = {name: [row | {"file": name}] for name, row in zip(names, rows)}
    return Found(units, [], source)


def archives_of(rows: list[dict], include: tuple[str, ...], place: str, source: str) -> Found:
    """The files of a set of archives.

    An archive is one unit with all of its parts. The image files of a directory are one unit, with
    those of directories beside it that are named as SIDE.

    Args:
        rows: of the manifest; "file" is a path.
        include: see choose.
        place: dataset or list, for messages.
        source: where they are, in words.

    Raises:
        ValueError: nothing is chosen, a part of an archive is missing, or a name is there twice.
    """
    by_path = {}
    for row in rows:
        if by_path.setdefault(row["file"], row) is not row:
            raise ValueError(f"{place} has two files of the name {row['file']}; remove one")
    archives, folders = group_parts(by_path), {}
    for path in filter(is_image, by_path):
        folders.setdefault(folder_of(path), []).append(path)
    units = {name: list(found.values()) for name, found in archives.items()} | folders
    indexes = [path for path in by_path if is_index(path)]
    units, indexes = choose(units, indexes, include, place)
    for name in units.keys() & archives.keys():
        units[name] = in_order(PurePosixPath(place, name), archives[name])
    others = [path for path in by_path if OTHER.fullmatch(path.lower())]
    if others and not units:
        raise ValueError(
            f"{place} has archives such as {others[0]}, which are not .tar or .tar.gz; download "
            "and unpack them, and give their directory to parquet_processing.py --pairs"
        )
    if not units and not indexes:
        raise ValueError(f"{place} has neither archives nor image files nor an index")
    parts = [units[name] for name in units.keys() & archives.keys()]
    num_parts, counts = sum(map(len, parts)), []
    if parts:
        counts.append(
            f"{len(parts)} archives" + f" in {num_parts} parts" * (num_parts > len(parts))
        )
    if num_images := sum(map(len, units.values())) - num_parts:
        counts.append(f"{num_images} image files in {len(units) - len(parts)} directories")
    counts.append(f"{len(indexes)} index files" if indexes else "no index, as WebDataset")
    if others:
        counts.append(f"without {len(others)} that cannot be read, such as {others[0]}")
    return Found(
        {name: [by_path[path] for path in paths] for name, paths in units.items()},
        [by_path[path] for path in indexes],
        source,
        ", ".join(counts),
    )


def choose(
    units: dict[str, list[str]], indexes: list[str], include: tuple[str, ...], place: str
) -> tuple[dict[str, list[str]], list[str]]:
    """The units and indexes that patterns choose; indexes are all chosen if no pattern names one.

    Args:
        units: {name: paths}; an archive is chosen whole, by its name or a part's path.
        indexes: paths.
        include: patterns such as Singleturn/add_*; (): everything.
        place: for messages.

    Raises:
        ValueError: a pattern fits no file, or none fits an archive or image.
    """
    if not include:
        return units, indexes
    chosen = {}
    for name, paths in units.items():
        if any(map(is_archive, paths)):
            hits = paths if any(fits(path, include) for path in (name, *paths)) else []
        else:
            hits = [path for path in paths if fits(path, include)]
        if hits:
            chosen[name] = hits
    names = [*units, *(path for paths in units.values() for path in paths), *indexes]
    for pattern in include:
        if not any(fits(name, (pattern,)) for name in names):
            raise ValueError(
                f"--include {pattern} fits no file of {place}; it has "
                f"{file_names(units or indexes)}"
            )
    if not chosen and units:
        raise ValueError(
            f"--include {' '.join(include)} chooses only indexes of {place}, no archives or image "
            f"files; it has {file_names(units)}"
        )
    return chosen, [path for path in indexes if fits(path, include)] or indexes


def choose_rows(rows: list[dict], include: tuple[str, ...], place: str) -> list[dict]:
    """The shards that patterns choose; arguments and errors as of choose."""
    for pattern in include:
        if not any(fits(row["file"], (pattern,)) for row in rows):
            raise ValueError(
                f"--include {pattern} fits no shard of {place}; it has "
                f"{file_names(row['file'] for row in rows)}"
            )
    return [row for row in rows if not include or fits(row["file"], include)]


def fits(path: str, include: Iterable[str]) -> bool:
    """Whether a path fits one of the patterns; a pattern that ends in / is a directory."""
    return any(fnmatchcase(path, f"{x}*" if x.endswith("/") else x) for x in include)


def folder_of(path: str) -> str:
    """The directory of an image file, or the one above with both sides of its pair."""
    parts = path.split("/")[:-1]
    while parts and SIDE.fullmatch(parts[-1].lower()):
        parts.pop()
    return f"{'/'.join(parts)}/" if parts else "./"


def is_usable(path: str) -> bool:
    """Whether a file may be a part of a set, by its name; hidden files and directories are not."""
    if any(part.startswith(".") and part.strip(".") for part in path.split("/")):
        return False
    is_other = OTHER.fullmatch(path.lower())
    return bool(is_archive(path) or is_image(path) or is_index(path) or is_other)


def check_path(path: str, place: str) -> None:
    """Raise a ValueError if a path must not be written below a directory, or cannot be."""
    parts = path.split("/")
    if (
        not path.isprintable()
        or "\\" in path
        or any(not part.strip(".") or part != part.strip() for part in parts)
        or any(len(part.encode()) > MAX_COMPONENT for part in parts)
    ):
        shown = path if path.isprintable() else ascii(path)
        raise ValueError(
            f"{place} has a file {shown[:300]}; absolute names are refused, and names with .., //, "
            f"a backslash, control characters, blanks at an end or over {MAX_COMPONENT} bytes"
        )
