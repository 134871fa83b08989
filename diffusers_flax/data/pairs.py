"""Check your own image pairs and write them as parquet shards for training.

    python parquet_processing.py --pairs pairs.jsonl --output_dir data

The list is a .jsonl file with one object per line, a .csv file whose first line names the columns,
or a directory with original/, edited/ and captions.jsonl or captions.csv, where file_name names the
files in original/ and edited/, whose extensions may differ. docs/data.md has the table of keys;
data/lists.py reads them.

Several pairs may share an instruction or an original image. Image files are copied unchanged; the
loader applies their EXIF orientation.
"""

import hashlib
from collections import defaultdict
from functools import cache
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
from PIL import Image
from tqdm import tqdm

from diffusers_flax.data.images import (
    MAX_ASPECT,
    check_one_shape,
    decode_image,
    decode_mask,
    encoded_size,
)
from diffusers_flax.data.lists import CAPTIONS, IMAGES, list_rows, raise_problems
from diffusers_flax.data.options import num_usable_cores
from diffusers_flax.data.writing import (
    COPIES,
    HELD_OUT,
    HELD_OUT_LIST,
    IMAGE,
    SCHEMA,
    SHARDS,
    ShardWriter,
    check_directory,
    choose_held_out,
    image_cell,
    move_when_complete,
    number_shards,
    write_held_out,
)
from diffusers_flax.images import READ_FORMATS
from diffusers_flax.messages import one_line

IMAGE_DIRS = ("original", "edited")  # in a directory of pairs
CAPTION_FILES = ("captions.jsonl", "captions.csv")  # in a directory of pairs, one of these


class ListedPair(NamedTuple):
    """A pair of a list."""

    line: int  # first line of the row, from 1
    original: Path
    edited: Path
    edit_prompt: str
    original_prompt: str | None
    edited_prompt: str | None
    mask: Path | None

    def files(self) -> dict[str, Path]:
        """The image files: original, edited and, if it has one, the mask."""
        files = {"original": self.original, "edited": self.edited, "mask": self.mask}
        return {name: file for name, file in files.items() if file}


def index_images(folder: Path) -> dict[str, list[Path]]:
    """Map file names, with and without extension, to the visible files of a directory."""
    files = defaultdict(list)
    for path in sorted(folder.glob("[!.]*")):
        for name in {path.name, path.stem}:
            files[name].append(path)
    return files


def find_image(files: dict[str, list[Path]], name: str, folder: str) -> Path:
    """Find an image by its file name; an image with another extension also matches.

    Raises:
        ValueError: no or several images match, or the name contains a directory.
    """
    if Path(name).name != name:
        raise ValueError(f"{name} contains a directory; give the file name in {folder}/")
    extensions = Image.registered_extensions()
    is_image = extensions.get(Path(name).suffix.lower()) in READ_FORMATS
    found = files.get(name) or (files.get(Path(name).stem, []) if is_image else [])
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
        f"{'/, '.join(IMAGE_DIRS)}/ and {' or '.join(CAPTION_FILES)}"
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
    return pairs, problems


@cache
def image_size(path: Path, is_mask: bool = False) -> tuple[int, int]:
    """(width, height) of an image after EXIF orientation; decodes it as the loader does.

    Raises:
        OSError, ValueError: it cannot be read or used.
    """
    data = path.read_bytes()
    decode_image(data, (16, 16))  # raises a ValueError if the image is damaged
    width, height = encoded_size(data)
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise ValueError(f"{width}x{height} is too narrow; the most is {MAX_ASPECT} to 1")
    if is_mask and decode_mask(data).max() < 128:
        raise ValueError("has no white, so nothing may change; paint white what the edit changes")
    return width, height


def check_images(pair: ListedPair) -> list[tuple[int, str]]:
    """(line, problem) for each problem with the images of a pair."""
    sizes, problems = {}, []
    for name, path in pair.files().items():
        try:
            sizes[name] = image_size(path, name == "mask")
        except (OSError, ValueError) as error:
            problems.append(f"{path}: {getattr(error, 'strerror', None) or one_line(error, 200)}")
    if not problems:
        try:
            check_one_shape(pair.original, sizes["original"], pair.edited, sizes["edited"])
        except ValueError as error:
            problems.append(str(error))
        if sizes.get("mask", sizes["original"]) != sizes["original"]:
            named = (pair.mask, *sizes["mask"], pair.original, *sizes["original"])
            problems.append(
                "{} is {}x{} pixels (width x height) and {} {}x{}; a mask has the size of the "
                "original image".format(*named)
            )
    return [(pair.line, problem) for problem in problems]


def check_listed_images(pairs: list[ListedPair]) -> list[tuple[int, str]]:
    """check_images of all pairs, in threads."""
    image_size.cache_clear()  # files may have changed
    with ThreadPool(num_usable_cores()) as pool:  # exits at once on Ctrl-C
        found = pool.imap(check_images, pairs, chunksize=4)
        bar = tqdm(found, "checking images", len(pairs), unit="pair", disable=None)
        return [problem for problems in bar for problem in problems]


def split_held_out(
    pairs: list[ListedPair], num_held_out: int, seed: int
) -> tuple[list[ListedPair], list[ListedPair]]:
    """Split off all pairs of num_held_out randomly chosen original images.

    Returns:
        (training pairs, held-out pairs), both in the order of the list.

    Raises:
        ValueError: no training pairs would remain.
    """
    if not num_held_out:
        return pairs, []
    content = {
        x: hashlib.sha256(x.read_bytes()).digest() for x in {pair.original for pair in pairs}
    }
    keys = [(content[pair.original], None, False) for pair in pairs]
    chosen = choose_held_out(keys, num_held_out, seed).tolist()
    training = [pair for pair, is_held_out in zip(pairs, chosen) if not is_held_out]
    return training, [pair for pair, is_held_out in zip(pairs, chosen) if is_held_out]


def write_shards(pairs: list[ListedPair], folder: Path) -> int:
    """Write shards named like train-00000-of-00003.parquet; return their number."""
    schema = SCHEMA
    if any(pair.mask for pair in pairs):
        schema = schema.append(pa.field("mask_image", IMAGE))
    with ShardWriter(folder, schema) as writer:
        for pair in tqdm(pairs, "writing shards", unit="pair", disable=None):
            cells = {f"{name}_image": image_cell(x) for name, x in pair.files().items()}
            writer.add(texts_of(pair) | cells, sum(len(cell["bytes"]) for cell in cells.values()))
    return number_shards(folder)


def texts_of(pair: ListedPair) -> dict[str, str | None]:
    """Instruction and captions of a pair, as columns of SCHEMA."""
    names = ("original_prompt", "edit_prompt", "edited_prompt")
    return {name: getattr(pair, name) for name in names}


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
    files = [path for pair in pairs for path in pair.files().values()]
    if held_out_dir and any(path.is_relative_to(held_out_dir.resolve()) for path in files):
        raise ValueError(f"--held_out_dir {held_out_dir} has images of --pairs; name another")
    raise_problems(file, sorted(problems + check_listed_images(pairs)))
    training, held_out = split_held_out(pairs, num_held_out, seed)

    with move_when_complete(output_dir, (SHARDS,)) as folder:
        num_shards = write_shards(training, folder)
        report = f"wrote {len(training)} pairs to {output_dir} (shards: {num_shards})"
        if held_out:
            with move_when_complete(held_out_dir, HELD_OUT) as folder:
                images = (
                    {name: (path.suffix, path.read_bytes()) for name, path in pair.files().items()}
                    for pair in held_out
                )
                write_held_out(zip(images, map(texts_of, held_out)), folder)
            report += f"\nheld out {len(held_out)} pairs: {held_out_dir / HELD_OUT_LIST}"
            report += f" (of {num_held_out} originals); {COPIES}"
    return report
