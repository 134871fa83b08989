"""Check your own image pairs and write them as parquet shards for training.

    python parquet_processing.py --pairs pairs.jsonl --output_dir data

The list is a .jsonl file with one object per line, a .csv file whose first line names the columns,
or a directory with original/, edited/ and captions.jsonl or captions.csv, where file_name names the
files in original/ and edited/, whose extensions may differ. docs/data.md has the table of keys;
data/lists.py reads them.

Several pairs may share an instruction or an original image. Image files are copied unchanged; the
loader applies their EXIF orientation. The shards have the schema of
timbrooks/instructpix2pix-clip-filtered.
"""

import hashlib
import json
import logging
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from tqdm import tqdm

from diffusers_flax.command_line import ask_before_replacing
from diffusers_flax.data.images import (
    MAX_ASPECT,
    check_one_shape,
    decode_image,
    decode_mask,
    encoded_size,
)
from diffusers_flax.data.lists import CAPTIONS, IMAGES, list_rows, raise_problems
from diffusers_flax.data.options import num_usable_cores
from diffusers_flax.data.shards import UNFINISHED_DIR
from diffusers_flax.images import READ_FORMATS
from diffusers_flax.loading.files import remove
from diffusers_flax.messages import one_line

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
HELD_OUT_LIST = "edits.jsonl"
COPIES = (
    "all pairs with the same original, byte by byte, are held out; copies of it that were saved "
    "again, in another size or format, are not recognized"
)
SHARDS = "train-*-of-*.parquet"
IMAGE_DIRS = ("original", "edited")  # in a directory of pairs
MASK_DIR = "masks"  # beside them, of held-out pairs that have masks
CAPTION_FILES = ("captions.jsonl", "captions.csv")  # in a directory of pairs, one of these
ROW_GROUP_ROWS = 100
ROW_GROUP_BYTES = 32 << 20
SHARD_BYTES = 256 << 20

logger = logging.getLogger(__name__)


class ListedPair(NamedTuple):
    """A pair of a list."""

    line: int  # first line of the row, from 1
    original: Path
    edited: Path
    edit_prompt: str
    original_prompt: str | None
    edited_prompt: str | None
    mask: Path | None


def index_images(folder: Path) -> dict[str, list[Path]]:
    """Map file names, with and without extension, to the visible files of a directory."""
    files = defaultdict(list)
    for path in sorted(folder.glob("[!.]*")):
        for name in {path.name, path.stem}:
            files[name].append(path)
    return files


def image_extensions() -> set[str]:
    """The file extensions of the formats that are read, such as ".png"."""
    extensions = Image.registered_extensions()
    return {extension for extension, name in extensions.items() if name in READ_FORMATS}


def find_image(files: dict[str, list[Path]], name: str, folder: str) -> Path:
    """Find an image by its file name; an image with another extension also matches.

    Raises:
        ValueError: no or several images match, or the name contains a directory.
    """
    if Path(name).name != name:
        raise ValueError(f"{name} contains a directory; give the file name in {folder}/")
    found = files.get(name, [])
    if not found and Path(name).suffix.lower() in image_extensions():
        found = files.get(Path(name).stem, [])
    if len(found) != 1:
        raise ValueError(f"{len(found) or 'no'} images in {folder}/ are named {name}")
    return found[0]


def find_list(source: Path) -> Path:
    """The list of --pairs: the file itself, or a directory's file of captions.

    Raises:
        ValueError: there is no list.
    """
    if not source.exists():
        raise ValueError(f"--pairs {source} does not exist; name a list or a directory")
    if source.is_dir():
        if all((source / name).is_dir() for name in IMAGE_DIRS):
            for name in CAPTION_FILES:
                if (source / name).is_file():
                    return source / name
    elif source.suffix.lower() in (".jsonl", ".csv"):
        return source
    raise ValueError(
        f"--pairs {source} must be a .jsonl or .csv file, or a directory with "
        f"{', '.join(f'{name}/' for name in IMAGE_DIRS)} and {' or '.join(CAPTION_FILES)}"
    )


def list_pairs(
    file: Path, in_folders: bool, max_pairs: int | None = None
) -> tuple[list[ListedPair], list[tuple[int, str]]]:
    """Read a list of pairs without opening images.

    Args:
        file: .jsonl or .csv file.
        in_folders: whether the images are in original/ and edited/, in the directory of file.
        max_pairs: read only the first N rows; None: all.

    Returns:
        (pairs, problems): the valid rows, and (line, problem) for each invalid row.

    Raises:
        ValueError: the file is not a list or has no rows.
    """
    required, folders = (*IMAGES, "edit_prompt"), {}
    if in_folders:
        required = ("file_name", "edit_prompt")
        folders = {name: index_images(file.parent / name) for name in IMAGE_DIRS}
    optional = (*CAPTIONS, "mask")
    rows, problems = list_rows(f"--pairs {file}", file, required, optional, max_pairs)
    pairs, lines = [], {}
    for row in rows:
        if in_folders:
            try:
                for image, folder in zip(IMAGES, folders):
                    row[image] = find_image(folders[folder], row["file_name"], folder)
            except ValueError as error:
                problems.append((row["line"], str(error)))
                continue
        # Two spellings of a path are one file.
        row |= {image: row[image].resolve() for image in IMAGES}
        names = (*IMAGES, "edit_prompt", *CAPTIONS, "mask")
        pair = ListedPair(row["line"], *(row[name] for name in names))
        if (first := lines.setdefault(pair[1:4], pair.line)) != pair.line:
            problems.append((pair.line, f"repeats line {first}"))
        pairs.append(pair)
    if in_folders and max_pairs is None and not problems:
        unlisted = {path.resolve() for paths in folders["original"].values() for path in paths}
        unlisted -= {pair.original for pair in pairs}
        if unlisted:
            logger.warning(
                "%s lists no edit of %d files in original/, for example %s",
                file, len(unlisted), min(unlisted).name,
            )  # fmt: skip
    return pairs, problems


def check_image(path: Path) -> tuple[int, int] | str:
    """Decode an image as the loader does.

    Returns:
        (width, height) after EXIF orientation, or a description of the problem.
    """
    try:
        data = path.read_bytes()
        decode_image(data, (16, 16))  # raises a ValueError if the image is damaged
        width, height = encoded_size(data)
        if max(width, height) > MAX_ASPECT * min(width, height):
            return f"{width}x{height} is too narrow; the most is {MAX_ASPECT} to 1"
        return width, height
    except FileNotFoundError:
        return "does not exist"
    except OSError as error:
        return error.strerror or one_line(error, 200)
    except ValueError as error:
        return one_line(error, 200)


def check_mask(path: Path) -> tuple[int, int] | str:
    """check_image for a mask, which must have white."""
    size = check_image(path)
    try:
        if not isinstance(size, str) and decode_mask(path.read_bytes()).max() < 128:
            return "has no white, so nothing may change; paint white what the edit changes"
    except (OSError, ValueError) as error:
        return one_line(error, 200)
    return size


def check_listed_images(pairs: list[ListedPair]) -> list[tuple[int, str]]:
    """Decode every image once, in threads, and compare the sizes within each pair.

    Returns:
        (line, problem) for each problem.
    """
    checks = list(dict.fromkeys(check for pair in pairs for check in checks_of(pair)))
    with ThreadPool(num_usable_cores()) as pool:  # exits at once on Ctrl-C
        sizes = pool.imap(lambda given: given[0](given[1]), checks, chunksize=4)
        bar = tqdm(sizes, "checking images", len(checks), unit="image", disable=None)
        size_by_check = dict(zip(checks, bar))

    problems = []
    for pair in pairs:
        found = [(check[1], size_by_check[check]) for check in checks_of(pair)]
        wrong = [f"{path}: {size}" for path, size in found if isinstance(size, str)]
        problems += [(pair.line, problem) for problem in wrong or compare_sizes(found)]
    return problems


def checks_of(pair: ListedPair) -> list[tuple[Callable, Path]]:
    """A pair's files, each with the function that checks it."""
    checks = [check_image, check_image, check_mask]
    return list(zip(checks, files_of(pair)))


def compare_sizes(found: list[tuple[Path, tuple[int, int]]]) -> Iterator[str]:
    """Problems with the sizes of a pair; found: (file, (width, height)) of each image."""
    (original, size), (edited, edited_size), *masks = found
    try:
        check_one_shape(original, size, edited, edited_size)
    except ValueError as error:
        yield str(error)
    for mask, mask_size in masks:
        if mask_size != size:
            yield (
                "{} is {}x{} pixels (width x height) and {} {}x{}; a mask has the size of the "
                "original image".format(mask, *mask_size, original, *size)
            )


def files_of(pair: ListedPair) -> list[Path]:
    """The image files of a pair: original, edited and, if it has one, the mask."""
    return [pair.original, pair.edited, *[pair.mask] * (pair.mask is not None)]


def split_held_out(
    pairs: list[ListedPair], num_held_out: int, seed: int
) -> tuple[list[ListedPair], list[ListedPair]]:
    """Split off all pairs of num_held_out randomly chosen original images.

    Returns:
        (training pairs, held-out pairs), both in the order of the list.

    Raises:
        ValueError: no training pairs would remain.
    """
    same = same_files({pair.original for pair in pairs} if num_held_out else ())
    originals = list(dict.fromkeys(same.get(pair.original, pair.original) for pair in pairs))
    if not 0 <= num_held_out < len(originals):
        raise ValueError(
            f"--num_held_out {num_held_out} must be less than the {len(originals)} original images"
        )
    chosen = np.random.default_rng(seed).permutation(len(originals))[:num_held_out]
    held_out = {originals[i] for i in chosen}
    return (
        [pair for pair in pairs if same.get(pair.original, pair.original) not in held_out],
        [pair for pair in pairs if same.get(pair.original, pair.original) in held_out],
    )


def same_files(paths: Iterable[Path]) -> dict[Path, Path]:
    """Map each path whose file repeats the bytes of an earlier path's file to the earlier path."""
    by_size, first, same = defaultdict(list), {}, {}
    for path in sorted(paths):
        by_size[path.stat().st_size].append(path)
    for path in chain.from_iterable(alike for alike in by_size.values() if len(alike) > 1):
        other = first.setdefault(hashlib.sha256(path.read_bytes()).digest(), path)
        if other != path:
            same[path] = other
    return same


def plan_shards(pairs: list[ListedPair]) -> list[list[list[ListedPair]]]:
    """Distribute pairs over shards and row groups by file size."""
    shards, shard_bytes, group_bytes = [[[]]], 0, 0
    for pair in pairs:
        num_bytes = sum(path.stat().st_size for path in files_of(pair))
        group = shards[-1][-1]
        is_full = len(group) == ROW_GROUP_ROWS or group_bytes + num_bytes > ROW_GROUP_BYTES
        if group and is_full:
            if shard_bytes + num_bytes > SHARD_BYTES:
                shards.append([])
                shard_bytes = 0
            shards[-1].append([])
            group_bytes = 0
        shards[-1][-1].append(pair)
        shard_bytes += num_bytes
        group_bytes += num_bytes
    return shards


def write_shards(pairs: list[ListedPair], folder: Path) -> int:
    """Write shards named like train-00000-of-00003.parquet; return their number."""
    shards, schema = plan_shards(pairs), SCHEMA
    if any(pair.mask for pair in pairs):
        schema = schema.append(pa.field("mask_image", IMAGE))
    with tqdm(desc="writing shards", total=len(pairs), unit="pair", disable=None) as bar:
        for number, groups in enumerate(shards):
            path = folder / f"train-{number:05d}-of-{len(shards):05d}.parquet"
            options = {"compression": "none", "use_dictionary": False, "write_statistics": False}
            with pq.ParquetWriter(path, schema, **options) as writer:
                for group in groups:
                    rows = [
                        {
                            "original_prompt": pair.original_prompt,
                            "original_image": image_cell(pair.original),
                            "edit_prompt": pair.edit_prompt,
                            "edited_prompt": pair.edited_prompt,
                            "edited_image": image_cell(pair.edited),
                            "mask_image": pair.mask and image_cell(pair.mask),
                        }
                        for pair in group
                    ]
                    writer.write_table(pa.Table.from_pylist(rows, schema))  # one row group
                    bar.update(len(group))
    return len(shards)


def image_cell(path: Path) -> dict:
    """An image as public datasets store it."""
    return {"bytes": path.read_bytes(), "path": path.name}


def write_held_out(pairs: list[ListedPair], folder: Path) -> None:
    """Copy pairs to original/, edited/ and masks/; write edits.jsonl for other programs.

    Paths in edits.jsonl are relative to it; edit_cli.py writes results to results/.
    """
    for name in IMAGE_DIRS:
        (folder / name).mkdir()
    edits = []
    for number, pair in enumerate(pairs):
        original, edited = (f"{number:05d}{path.suffix}" for path in (pair.original, pair.edited))
        shutil.copyfile(pair.original, folder / "original" / original)
        shutil.copyfile(pair.edited, folder / "edited" / edited)
        names = {"original": original, "edited": edited}
        if pair.mask:
            (folder / MASK_DIR).mkdir(exist_ok=True)
            names["mask"] = f"{number:05d}{pair.mask.suffix}"
            shutil.copyfile(pair.mask, folder / MASK_DIR / names["mask"])
        captions = pair.original_prompt, pair.edited_prompt
        edits.append(held_out_edit(number, names, pair.edit_prompt, captions))
    lines = [json.dumps(edit, ensure_ascii=False) + "\n" for edit in edits]
    (folder / HELD_OUT_LIST).write_text("".join(lines), encoding="utf-8", newline="\n")


def held_out_edit(
    number: int,
    names: dict[str, str],
    text: str,
    captions: tuple[str | None, str | None],
) -> dict[str, str]:
    """The object of a held-out pair in HELD_OUT_LIST.

    Args:
        number: of the pair, from 0.
        names: of its files: "original", "edited" and, if it has one, "mask".
        text: instruction.
        captions: of both images.
    """
    edit = {
        "input": f"original/{names['original']}",
        "edit": text,
        "output": f"results/{number:05d}.png",
        "truth": f"edited/{names['edited']}",
    }
    keys = ("input_caption", "output_caption")
    edit |= {key: caption for key, caption in zip(keys, captions) if caption}
    if "mask" in names:
        edit["mask"] = f"{MASK_DIR}/{names['mask']}"
    return edit


def check_directory(flag: str, directory: Path, overwrite: bool) -> None:
    """Raise a ValueError unless the directory that a flag names may be written.

    Hidden files do not count, except UNFINISHED_DIR. Only files of write_pairs are replaced: shards
    of other names would join the data, and image directories without HELD_OUT_LIST are the user's.

    Args:
        flag, directory, overwrite: see ask_before_replacing.
    """
    ask_before_replacing(flag, directory, overwrite)
    other = [path for path in directory.glob("[!.]*.parquet") if not path.match(SHARDS)]
    if not (directory / HELD_OUT_LIST).exists():
        names = (*IMAGE_DIRS, MASK_DIR)
        other += [directory / name for name in names if (directory / name).exists()]
    if first := next(iter([*directory.glob(f"{UNFINISHED_DIR}*"), *other]), None):
        raise ValueError(
            f"--{flag} {directory} is not empty ({first.name}); name another, or remove it"
        )


@contextmanager
def move_when_complete(folder: Path, replaced: tuple[str, ...]) -> Iterator[Path]:
    """Yield a temporary directory whose content moves to `folder` at the end.

    The temporary directory is folder/.unfinished; while it exists, the loader refuses `folder`. An
    error or Ctrl-C removes all new files.

    Args:
        folder: directory, made if absent.
        replaced: patterns of old files and directories to remove before the move.
    """
    # save_whole would replace the directory, with the files that are not listed in `replaced`.
    existed, unfinished, moved = folder.exists(), folder / UNFINISHED_DIR, []
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        for old in (path for pattern in replaced for path in folder.glob(pattern)):
            remove(old)
        for path in sorted(unfinished.iterdir()):
            moved.append(path.rename(folder / path.name))
        unfinished.rmdir()
    except BaseException:
        for path in (unfinished, *moved):
            remove(path)
        if not existed:
            with suppress(OSError):  # missing, or other files were added
                folder.rmdir()
        raise


def write_pairs(
    source: Path,
    output_dir: Path,
    *,
    max_pairs: int | None = None,
    num_held_out: int = 0,
    held_out_dir: Path | None = None,
    seed: int = 0,
    overwrite: bool = False,
) -> str:
    """Check a list of pairs and all its images, then write shards.

    Args:
        source: .jsonl or .csv file, or a directory (see the docstring of this file).
        output_dir: directory for the shards, empty or new unless overwrite.
        max_pairs: use only the first N pairs; None: all.
        num_held_out: number of original images to hold out, with all their edits.
        held_out_dir: likewise, for held-out pairs; required if num_held_out > 0.
        seed: seed of the choice of held-out images.
        overwrite: replace earlier shards and held-out pairs of this function.

    Returns:
        A summary with one line per directory.

    Raises:
        ValueError: the list or an image is invalid (names the first ten problems), or a directory
            is not empty or not writable. Nothing is written in these cases.
    """
    check_directory("output_dir", output_dir, overwrite)
    if held_out_dir:
        check_directory("held_out_dir", held_out_dir, overwrite)
        if held_out_dir.resolve() == output_dir.resolve():
            raise ValueError(f"--held_out_dir {held_out_dir} is also --output_dir; name another")
    file = find_list(source)
    pairs, problems = list_pairs(file, source.is_dir(), max_pairs)
    if held_out_dir and any(
        path.is_relative_to(held_out_dir.resolve()) for pair in pairs for path in files_of(pair)
    ):
        raise ValueError(f"--held_out_dir {held_out_dir} has images of --pairs; name another")
    problems = sorted(problems + check_listed_images(pairs))
    raise_problems(file, problems)
    if file.name == HELD_OUT_LIST and all((file.parent / name).is_dir() for name in IMAGE_DIRS):
        logger.warning(
            "%s lists held-out pairs; a model that is trained on them cannot be evaluated on them",
            file,
        )
    training, held_out = split_held_out(pairs, num_held_out, seed)

    with move_when_complete(output_dir, (SHARDS,)) as folder:
        num_shards = write_shards(training, folder)
        report = f"wrote {len(training)} pairs to {output_dir} (shards: {num_shards})"
        if held_out:
            with move_when_complete(held_out_dir, (*IMAGE_DIRS, MASK_DIR, HELD_OUT_LIST)) as folder:
                write_held_out(held_out, folder)
            report += f"\nheld out {len(held_out)} pairs: {held_out_dir / HELD_OUT_LIST}"
            report += f" (of {num_held_out} originals)"
            report += f"; {COPIES}"
    return report
