"""Shards and held-out pairs that programs write, and the directories that they write to.

    check_directories(Path("data"), options)
    write_set([(row, num_bytes)], SCHEMA, held_out, Path("data"), options)

The schema is the one of timbrooks/instructpix2pix-clip-filtered.
"""

import io
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from diffusers_flax.command_line import ask_before_replacing
from diffusers_flax.data.shards import UNFINISHED_DIR
from diffusers_flax.images import open_image
from diffusers_flax.loading.files import naming_full_disk, remove, write_text

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
SCHEMA = pa.schema(
    {
        "original_prompt": pa.string(),
        "original_image": IMAGE,
        "edit_prompt": pa.string(),
        "edited_prompt": pa.string(),
        "edited_image": IMAGE,
    }
)
SHARDS = "train-*-of-*.parquet"
ROW_GROUP_ROWS = 100
ROW_GROUP_BYTES = 32 << 20
SHARD_BYTES = 256 << 20
MANIFEST = "manifest.json"
HELD_OUT_LIST = "edits.jsonl"
HELD_OUT_DIRS = {
    "original": "original",
    "edited": "edited",
    "mask": "masks",
    "reference": "references",
}
HELD_OUT = (*HELD_OUT_DIRS.values(), HELD_OUT_LIST)
COPIES = (
    "all pairs with the same original, byte by byte, are held out; copies of it that were saved "
    "again, in another size or format, are not recognized"
)


def write_numbered_shards(
    rows: Iterable[tuple[dict, int]],
    folder: Path,
    schema: pa.Schema,
    name: str = "{:05d}.parquet",
    number: int = 0,
) -> Iterator[tuple[Path, int]]:
    """Write rows to shards.

    Args:
        rows: each with its size in bytes.
        folder: for the shards.
        schema: of the rows.
        name: of a shard, with a place for its number.
        number: of the first shard.

    Yields:
        (file, number of rows) of each shard, when it is complete.
    """
    options = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    writer, group, group_bytes, shard_bytes, num_rows = None, [], 0, 0, 0
    for row, num_bytes in chain(rows, [(None, 0)]):
        is_end = row is None
        is_full = len(group) == ROW_GROUP_ROWS or group_bytes + num_bytes > ROW_GROUP_BYTES
        if group and (is_full or is_end):
            file = folder / name.format(number)
            writer = writer or pq.ParquetWriter(file, schema, **options)
            with naming_full_disk(file):
                writer.write_table(pa.Table.from_pylist(group, schema))
                num_rows, group, group_bytes = num_rows + len(group), [], 0
                if is_end or shard_bytes + num_bytes > SHARD_BYTES:
                    writer.close()
            if is_end or shard_bytes + num_bytes > SHARD_BYTES:
                yield file, num_rows
                writer, shard_bytes, num_rows, number = None, 0, 0, number + 1
        group.append(row)
        group_bytes += num_bytes
        shard_bytes += num_bytes


def image_cell(path: Path) -> dict:
    """An image file as public datasets store it."""
    return {"bytes": path.read_bytes(), "path": path.name}


def write_set(
    rows: Iterable[tuple[dict, int]],
    schema: pa.Schema,
    held_out: Iterable[tuple[dict, dict]],
    output_dir: Path,
    options,
) -> tuple[int, list[str]]:
    """Write shards and held-out pairs, which appear when all are complete.

    Args:
        rows: of the shards, each with its size in bytes.
        schema: of the rows.
        held_out: see write_held_out.
        output_dir: directory for shards like train-00000-of-00003.parquet; replaces earlier ones.
        options: PairsFlags.

    Returns:
        (number of shards, lines about the held-out pairs).
    """
    replaced = (MANIFEST, *(file.name for file in own_shards(output_dir)))
    with move_when_complete(output_dir, replaced) as folder:
        files = [file for file, _ in write_numbered_shards(rows, folder, schema)]
        for number, file in enumerate(files):
            file.rename(folder / f"train-{number:05d}-of-{len(files):05d}.parquet")
        held_out_dir = Path(options.held_out_dir)
        lines = [write_held_out(held_out, held_out_dir)] if options.num_held_out else []
    return len(files), lines


def image_suffix(data: bytes) -> str:
    """The extension of an image's format."""
    return f".{open_image(io.BytesIO(data)).format.lower().replace('jpeg', 'jpg')}"


def choose_held_out(keys: list[tuple], number: int, seed: int) -> np.ndarray:
    """Whether each pair is held out, bool (n,).

    Args:
        keys: see group_originals.
        number: of original images, or of sequences of turns.
        seed: of the choice.

    Raises:
        ValueError: no image is left for training.
    """
    groups = group_originals(keys)
    num_groups = groups.max(initial=-1) + 1
    if not number < num_groups:
        raise ValueError(
            f"--num_held_out {number} must be less than the {num_groups} original images"
        )
    return np.isin(groups, np.random.default_rng(seed).permutation(num_groups)[:number])


def group_originals(keys: list[tuple]) -> np.ndarray:
    """The group of each pair, numbered in the order of appearance, int64 (n,).

    Pairs go together if they have the original image, or if one edits the other's result.

    Args:
        keys: for each pair, a key of its original and of its edited image, and whether it goes with
            the pair before.
    """
    numbers = {}
    originals = [numbers.setdefault(original, len(numbers)) for original, *_ in keys]
    links = [(i, numbers[x]) for i, (_, x, _) in zip(originals, keys) if x in numbers]
    turns = zip(originals, originals[1:], keys[1:])
    links += [(i, before) for before, i, (*_, follows) in turns if follows]
    rows, columns = np.array(links, int).reshape(-1, 2).T
    graph = coo_array((np.ones(len(rows)), (rows, columns)), shape=(len(numbers), len(numbers)))
    _, groups = connected_components(graph, directed=False)
    return groups[originals].astype(np.int64)


def write_held_out(
    pairs: Iterable[tuple[dict[str, tuple[str, bytes]], dict]], held_out_dir: Path
) -> str:
    """Write pairs to HELD_OUT_DIRS, and HELD_OUT_LIST for other programs.

    Paths in the list are relative to it; edit_cli.py writes results to results/.

    Args:
        pairs: (images, texts): {role of HELD_OUT_DIRS: (suffix, bytes)}, and the
            texts "edit_prompt", "original_prompt" and "edited_prompt", the captions or None.
        held_out_dir: directory; files appear when all are complete.

    Returns:
        A line for a summary.
    """
    lines = []
    with move_when_complete(held_out_dir, HELD_OUT) as folder:
        for number, (images, texts) in enumerate(pairs):
            edit = {"edit": texts["edit_prompt"], "output": f"results/{number:05d}.png"}
            for role in HELD_OUT_DIRS:
                key = {"original": "input", "edited": "truth"}.get(role, role)
                if role in images:
                    suffix, data = images[role]
                    edit[key] = f"{HELD_OUT_DIRS[role]}/{number:05d}{suffix}"
                    (folder / HELD_OUT_DIRS[role]).mkdir(exist_ok=True)
                    (folder / edit[key]).write_bytes(data)
            captions = {"input_caption": "original_prompt", "output_caption": "edited_prompt"}
            edit |= {key: texts[name] for key, name in captions.items() if texts[name]}
            lines.append(json.dumps(edit, ensure_ascii=False) + "\n")
        write_text(folder / HELD_OUT_LIST, "".join(lines))
    return f"held out {len(lines)} pairs: {held_out_dir / HELD_OUT_LIST}; {COPIES}"


def check_directories(output_dir: Path, options) -> None:
    """Raise a ValueError unless the directories for shards and held-out pairs may be written.

    Hidden files do not count, except UNFINISHED_DIR. Only shards and held-out pairs of these
    programs are replaced: shards of other names would join the data, and image directories without
    HELD_OUT_LIST are the user's.

    Args:
        output_dir: --output_dir.
        options: PairsFlags.
    """
    folders = {"output_dir": output_dir}
    if options.num_held_out:
        folders["held_out_dir"] = Path(options.held_out_dir)
    for flag, folder in folders.items():
        ask_before_replacing(flag, folder, options.overwrite_output_dir)
        other = {*folder.glob(f"{UNFINISHED_DIR}*"), *folder.glob("[!.]*.parquet")}
        if not (folder / HELD_OUT_LIST).exists():
            other |= {folder / name for name in HELD_OUT if (folder / name).exists()}
        if other := sorted(other - {*own_shards(folder)}):
            raise ValueError(
                f"--{flag} {folder} is not empty ({other[0].name}); name another, or remove it"
            )
    if options.num_held_out and output_dir.resolve() == folders["held_out_dir"].resolve():
        raise ValueError(f"--held_out_dir {output_dir} is also --output_dir; name another")


def own_shards(directory: Path) -> list[Path]:
    """The shards of a directory that these programs wrote."""
    listed = {file["file"] for file in read_manifest(directory).get("files", ())}
    files = directory.glob("[!.]*.parquet")
    return [file for file in files if file.match(SHARDS) or file.name in listed]


@contextmanager
def move_when_complete(folder: Path, replaced: tuple[str, ...]) -> Iterator[Path]:
    """Yield a temporary directory whose content moves to `folder` at the end.

    The temporary directory is folder/.unfinished; while it exists, the loader refuses `folder`. An
    error or Ctrl-C in the context removes it.

    Args:
        folder: directory, made if absent.
        replaced: patterns of old files and directories to remove before the move.
    """
    # save_whole would replace the directory, with the files that are not listed in `replaced`.
    unfinished = folder / UNFINISHED_DIR
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
    except BaseException:
        remove(unfinished)
        raise
    for old in (path for pattern in replaced for path in folder.glob(pattern)):
        remove(old)
    for path in sorted(unfinished.iterdir()):
        path.rename(folder / path.name)
    unfinished.rmdir()


def read_manifest(folder: Path) -> dict:
    """The manifest of a conversion of archives in a directory; {} without one."""
    try:
        content = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return {}
    # script.py writes a file of this name too
    return content if isinstance(content, dict) and "conversion" in content else {}
