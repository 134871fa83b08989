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
from collections import Counter
from multiprocessing.pool import ThreadPool
from pathlib import Path

import numpy as np
import pyarrow as pa
from tqdm import tqdm

from diffusers_flax.data.decoding import IMAGE_NAMES, decode_pair, place_image, place_mask
from diffusers_flax.data.images import decode_mask, encoded_size
from diffusers_flax.data.lists import CAPTIONS, IMAGES, READ, list_rows, raise_problems
from diffusers_flax.data.options import num_usable_cores
from diffusers_flax.data.shards import Pair
from diffusers_flax.data.writing import (
    IMAGE,
    SCHEMA,
    check_directories,
    choose_held_out,
    image_cell,
    write_set,
)
from diffusers_flax.messages import one_line

IMAGE_DIRS = dict(zip(IMAGES, ("original", "edited")))  # in a directory of pairs
CAPTION_FILES = ("captions.jsonl", "captions.csv")  # in a directory of pairs, one of these
FILES = dict(zip(("original", "edited", "mask", "reference"), READ))  # role: key


def files_of(pair: dict) -> dict[str, Path]:
    """The image files of a row: original, edited and, if it has them, mask and reference."""
    return {role: pair[key] for role, key in FILES.items() if pair[key]}


def texts_of(pair: dict) -> dict[str, str | None]:
    """Instruction and captions of a row, as columns of SCHEMA."""
    return {name: pair[name] for name in ("edit_prompt", *CAPTIONS)}


def list_pairs(
    source: Path, max_pairs: int | None = None
) -> tuple[Path, list[dict], list[tuple[int, str]]]:
    """Read a list of pairs without opening images.

    Args:
        source: .jsonl or .csv file, or a directory with one of CAPTION_FILES and IMAGE_DIRS.
        max_pairs: read only the first N rows; None: all.

    Returns:
        (file, pairs, problems): the list, its valid rows, see lists.list_rows, and (line, problem)
        for each invalid row.

    Raises:
        ValueError: there is no list, or it has no rows.
    """
    in_folders = source.is_dir()
    file = source
    if in_folders:
        files = [source / name for name in CAPTION_FILES if (source / name).is_file()]
        file = next(iter(files), source)
    if file.suffix.lower() not in (".jsonl", ".csv"):
        raise ValueError(
            f"--pairs {source} must be a .jsonl or .csv file, or a directory with "
            f"{'/, '.join(IMAGE_DIRS.values())}/ and {' or '.join(CAPTION_FILES)}"
        )
    required = (*(["file_name"] if in_folders else IMAGES), "edit_prompt")
    optional = (*CAPTIONS, "mask", "reference_image")
    rows, problems = list_rows(f"--pairs {file}", file, required, optional, max_pairs)
    if not in_folders:
        return file, rows, problems
    for key, name in IMAGE_DIRS.items():
        files = sorted((file.parent / name).glob("[!.]*"))
        counts = Counter(path.stem for path in files)
        images = {path.stem: path for path in files if counts[path.stem] == 1}
        images |= {path.name: path for path in files}
        for row in rows:
            given = row["file_name"]
            row[key] = images.get(given) or images.get(Path(given).stem)
            if not row[key]:
                problems.append((row["line"], f"no or several images in {name}/ are named {given}"))
    return file, [row for row in rows if all(row[key] for key in IMAGE_DIRS)], problems


def check_pair(pair: Pair, names: tuple[str, str] = IMAGE_NAMES) -> None:
    """Decode a pair as training does.

    Args:
        pair: encoded pair.
        names: of the images, for errors.

    Raises:
        ValueError: it cannot be used.
    """
    pixels = np.empty((2, 16, 16, 3), np.uint8)  # small, but JPEGs are still read to their end
    time_ids = decode_pair(pair, pixels, "bicubic", 0.5, False, names)
    place_mask(pair, pixels[0, :, :, 0], time_ids, "bicubic", 0.5, False)
    if pair.reference is not None:
        place_image(pair.reference, pixels[0], "bicubic", 0.5, False, "reference_image")


def problem_of(row: dict) -> str:
    """What is wrong with the images of a row; "": nothing."""
    try:
        images = (row[key] and row[key].read_bytes() for key in READ)
        original, edited, mask, reference = images
        pair = Pair(original, edited, row["edit_prompt"], mask=mask, reference=reference)
        check_pair(pair, (row["original_image"], row["edited_image"]))
        if mask and decode_mask(mask).max() < 128:
            raise ValueError(f"{row['mask']} has no white, so nothing may change; paint it")
        if mask and encoded_size(mask) != encoded_size(original):
            raise ValueError(f"{row['mask']} does not have the size of the original image")
    except (OSError, ValueError) as error:
        return one_line(error, 300)
    return ""


def write_pairs(source: Path, output_dir: Path, options) -> str:
    """Check a list of pairs and all its images, then write shards.

    Args:
        source: .jsonl or .csv file, or a directory (see the docstring of this file).
        output_dir: directory for the shards, empty or new unless overwrite_output_dir.
        options: PairsFlags.

    Returns:
        A summary with one line per directory.

    Raises:
        ValueError: the list or an image is invalid (names the first ten problems), or a directory
            is not empty or not writable. Nothing is written in these cases.
    """
    check_directories(output_dir, options)
    file, pairs, problems = list_pairs(source, options.max_pairs)
    with ThreadPool(num_usable_cores()) as pool:  # exits at once on Ctrl-C
        found = pool.imap(problem_of, pairs, chunksize=4)
        bar = tqdm(found, "checking images", len(pairs), unit="pair", disable=None)
        problems += [(row["line"], problem) for row, problem in zip(pairs, bar) if problem]
    raise_problems(file, sorted(problems))

    training, held_out = pairs, []
    if options.num_held_out:
        digests = {
            x: hashlib.sha256(x.read_bytes()).digest()
            for x in {pair["original_image"] for pair in pairs}
        }
        keys = [(digests[pair["original_image"]], None, False) for pair in pairs]
        chosen = choose_held_out(keys, options.num_held_out, options.seed)
        training = [pair for pair, is_chosen in zip(pairs, chosen) if not is_chosen]
        held_out = [pair for pair, is_chosen in zip(pairs, chosen) if is_chosen]
    schema = SCHEMA
    for role in ("mask", "reference"):
        if any(pair[FILES[role]] for pair in training):
            schema = schema.append(pa.field(f"{role}_image", IMAGE))

    def rows():
        for pair in tqdm(training, "writing shards", unit="pair", disable=None):
            cells = {f"{role}_image": image_cell(x) for role, x in files_of(pair).items()}
            yield texts_of(pair) | cells, sum(len(cell["bytes"]) for cell in cells.values())

    images = (
        {role: (path.suffix, path.read_bytes()) for role, path in files_of(pair).items()}
        for pair in held_out
    )
    held_out = zip(images, map(texts_of, held_out))
    number, lines = write_set(rows(), schema, held_out, output_dir, options)
    head = f"wrote {len(training)} pairs to {output_dir} (shards: {number})"
    return "\n".join([head, *lines])
