"""The manifest of a conversion, and what an output directory may already have.

read_manifest(Path("data"))["sets"]  # {name: licence}
"""

import json
from pathlib import Path

from diffusers_flax.data.archives.tar import Archive
from diffusers_flax.data.shards import UNFINISHED_DIR

MANIFEST = "manifest.json"


def read_manifest(folder: Path) -> dict:
    """The manifest of a conversion in a directory; {} without one."""
    try:
        content = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return {}
    is_ours = isinstance(content, dict) and isinstance(content.get("conversion"), dict)
    return content if is_ours else {}  # script.py writes a file of this name too


def files_of(folder: Path) -> list[dict]:
    """The shards that a manifest lists, {"file", "size", "rows", ...}; [] without one."""
    files = read_manifest(folder).get("files")
    names = ("file", "size", "rows")
    is_ours = isinstance(files, list) and all(
        isinstance(x, dict) and all(name in x for name in names) for x in files
    )
    return files if is_ours else []


def sets_in(folder: Path, names: set[str]) -> dict[str, str] | None:
    """{name: licence} of the sets of which a conversion made shards; None: others made them.

    Args:
        folder: of the shards.
        names: of the shards.
    """
    if not names <= {file["file"] for file in files_of(folder)}:
        return None
    sets = read_manifest(folder).get("sets")
    return sets if isinstance(sets, dict) else {}


def check_apart(path: Path, output_dir: Path) -> None:
    """Raise a ValueError if the output directory is the directory of --pairs."""
    root = path if path.is_dir() else path.parent
    if root.resolve() == output_dir.resolve():
        where = "also" if path.is_dir() else "the directory of"
        raise ValueError(f"--output_dir {output_dir} is {where} --pairs {path}; name another")


def check_replaced(archives: list[Archive], output_dir: Path) -> None:
    """Raise a ValueError if a shard that is replaced is also read, such as by a link."""
    replaced = {(output_dir / file["file"]).resolve() for file in files_of(output_dir)}
    read = [part for archive in archives for part in archive.parts]
    if both := [file for file in read if file.resolve() in replaced]:
        raise ValueError(
            f"--overwrite_output_dir would delete {both[0]}, which --pairs reads; name another "
            "--output_dir"
        )


def check_other_shards(output_dir: Path) -> None:
    """Raise a ValueError for shards that are not listed in a manifest of this program."""
    listed = {file["file"] for file in files_of(output_dir)}
    other = [x for x in output_dir.glob("[!.]*.parquet") if x.name not in listed]
    if other or (output_dir / UNFINISHED_DIR).exists():
        name = other[0].name if other else UNFINISHED_DIR
        raise ValueError(f"--output_dir {output_dir} is not empty ({name}); name another")


def finished_report(output_dir: Path, given: dict, stamp: str) -> str:
    """What to say if a conversion is complete; "" if it is not, or is another one.

    Args:
        output_dir: of the conversion.
        given: what is converted, as the manifest notes it.
        stamp: of the files that are read.

    Raises:
        ValueError: files of --pairs have changed since.
    """
    manifest = read_manifest(output_dir)
    files = files_of(output_dir)
    if not files or manifest.get("conversion") != given:
        return ""
    for file in files:
        written = output_dir / file["file"]
        if not written.is_file() or written.stat().st_size != file["size"]:
            return ""
    if manifest.get("source") != stamp:
        raise ValueError(
            f"--output_dir {output_dir} has this conversion, but files of --pairs have come, gone "
            "or changed since; name another directory, or convert all of them again with "
            "--overwrite_output_dir"
        )
    total = sum(file["rows"] for file in files)
    return f"{output_dir} is finished: {total} pairs (shards: {len(files)}; {MANIFEST} lists them)"
