"""File names of a set that comes as an index with archives or image files, wherever they lie."""

import re
from collections.abc import Iterable
from pathlib import PurePath

# split's parts: .000, .aa, .split.000, .part-aa, -part-aa, .part0
NAME = re.compile(
    r"(.+\.(?:tar\.gz|tgz|tar))(?:[.-](?:(?:split|part)[.-]?([a-z]{2,3}|\d{1,6})|((?!bz|gz|lz|md|br|py)[a-y][a-z]|a[ab][a-z]|\d{1,6})))?"
)
OTHER = re.compile(r".+\.(?:tar\.(?:xz|bz2|zst|lz4)|txz|tbz2?|zip|7z|rar)")
INDEX_SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet")


def part_number(part: str) -> int:
    """The number of a part: 007 is 7, aa is 0, ab is 1."""
    if part.isdigit():
        return int(part)
    number = 0
    for letter in part:
        number = 26 * number + ord(letter) - ord("a")
    return number


def group_parts(paths: Iterable[str]) -> dict[str, dict[str, str]]:
    """The archives among some paths: {path without the suffix of a part: {part: path}}."""
    archives = {}
    for path in paths:
        folder, slash, name = path.rpartition("/")
        if not OTHER.fullmatch(name) and (found := NAME.fullmatch(name)):
            whole, part, bare = found.groups()
            archives.setdefault(folder + slash + whole, {})[part or bare or ""] = path
    return dict(sorted(archives.items()))


def in_order(name: PurePath, found: dict[str, str]) -> list[str]:
    """The paths of an archive's parts, from the first to the last.

    Args:
        name: of the archive, for messages.
        found: {part: path}.

    Raises:
        ValueError: a part is missing, or the archive is there twice.
    """
    if "" in found and len(found) > 1:
        raise ValueError(f"{name} is there whole and in {len(found) - 1} parts; remove one of both")
    if "" in found:
        return list(found.values())
    ordered = sorted(found, key=part_number)
    starts_at_one = part_number(ordered[0]) == 1 and ordered[0].isdigit()
    for expected, part in enumerate(ordered, start=int(starts_at_one)):
        if part_number(part) != expected:
            file_name = PurePath(found[part]).name
            raise ValueError(f"{name}: the part before {file_name} is missing; download it")
    return [found[part] for part in ordered]
