"""Lists of edits and of image pairs, one reader for all programs.

    rows = read_list("--edits_jsonl FILE", Path(FILE), ("original_image", "edit_prompt", "output"))

parquet_processing.py --pairs, edit_cli.py --edits_jsonl and evaluate_edits.py --pairs_jsonl read
them. A list is a .csv file whose first line names the columns, or else a file with one JSON object
per line. NAMES has the accepted keys or column names; other keys are ignored. `output` is the file
that edit_cli.py writes, never an image to learn from.

Paths are relative to the list. If its images are not there, but in the working directory, all paths
are relative to the working directory, with a warning. The image of a row may be the output of
an earlier row, so that edits follow one another.
"""

import csv
import io
import json
import logging
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

NAMES = {  # meaning: accepted keys
    "original_image": ("original_image", "input_image", "original", "input"),
    "edited_image": ("edited_image", "output_image", "edited", "truth"),
    "edit_prompt": ("edit_prompt", "edit", "instruction"),
    "mask": ("mask", "mask_image", "mask_img"),
    "reference_image": ("reference_image", "reference"),
    "output": ("output",),
    "original_prompt": ("original_prompt", "original_caption", "input_caption"),
    "edited_prompt": ("edited_prompt", "edited_caption", "output_caption"),
    "file_name": ("file_name", "file", "name"),
}
IMAGES = ("original_image", "edited_image")
READ = (*IMAGES, "mask", "reference_image")  # files that must exist
CAPTIONS = ("original_prompt", "edited_prompt")
MAX_NAMED_PROBLEMS = 10  # in an error message

logger = logging.getLogger(__name__)


def read_list(
    given: str,
    file: Path,
    required: tuple[str, ...],
    optional: tuple[str, ...] = (),
    max_rows: int | None = None,
) -> list[dict]:
    """Read a list; arguments and rows as of list_rows.

    Raises:
        ValueError: a row is invalid (names the first ten problems).
    """
    rows, problems = list_rows(given, file, required, optional, max_rows)
    raise_problems(file, problems)
    return rows


def raise_problems(file: Path, problems: list[tuple[int, str]]) -> None:
    """Raise one ValueError for all problems of a list, (line, description) each, in order."""
    if problems:
        named = [f"line {line}: {problem}" for line, problem in problems[:MAX_NAMED_PROBLEMS]]
        if more := len(problems) - len(named):
            named.append(f"and {more} more")
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ValueError(f"{file} has {count}: {'; '.join(named)}")


def list_rows(
    given: str,
    file: Path,
    required: tuple[str, ...],
    optional: tuple[str, ...] = (),
    max_rows: int | None = None,
) -> tuple[list[dict], list[tuple[int, str]]]:
    """Read a list without opening images.

    Args:
        given: the file with its flag, for error messages.
        file: the list, in UTF-8.
        required, optional: keys of NAMES.
        max_rows: read only the first N rows; None: all.

    Returns:
        (rows, problems). A row is a dict with "line", from 1, and keys of NAMES: texts, Paths for
        images and outputs, None if missing. With outputs also "after", the line of
        the row whose output it edits, or None. A problem is (line, description) of an invalid row
        or a missing image.

    Raises:
        ValueError: the file cannot be read, is not UTF-8 or has no rows.
    """
    rows, problems = [], []
    for line, content in islice(read_objects(given, file), max_rows):
        try:
            rows.append({"line": line} | parse_texts(content, required, optional))
        except ValueError as error:
            problems.append((line, str(error)))
    if not rows and not problems:
        raise ValueError(f"{given} has no rows; write one for each edit")

    images = [row["original_image"] for row in rows if "original_image" in row]
    folder = file.parent
    is_beside = any(os.path.isfile(folder / image) for image in images)
    if not is_beside and any(map(os.path.isfile, images)):
        folder = Path()
        logger.warning("%s: paths are relative to the working directory, not to the list", file)
    for row in rows:
        row |= {name: folder / row[name] for name in (*READ, "output") if row.get(name)}
    if "output" in required:
        problems += order_outputs(rows)
    for row in rows:
        if "output" in row and row.get("edited_image") and not row["edited_image"].is_file():
            row["edited_image"] = None  # it is only drawn
        names = READ[1:] if row.get("after") else READ
        for path in (row[name] for name in names if row.get(name)):
            if not os.path.isfile(path):
                problems.append((row["line"], f"{path} does not exist"))
    wrong = {line for line, _ in problems}
    return [row for row in rows if row["line"] not in wrong], sorted(problems)


def order_outputs(rows: list[dict]) -> list[tuple[int, str]]:
    """Set "after" of each row, see list_rows; problems with files that would be overwritten."""
    lines = {row["output"].resolve(): row["line"] for row in rows}
    truths = {row["edited_image"].resolve() for row in rows if row.get("edited_image")}
    problems = []
    for row in rows:
        row["after"] = lines.get(row["original_image"].resolve())
        if row["after"] and row["after"] >= row["line"]:
            text = f"its image would be overwritten by the output of line {row['after']}"
            problems.append((row["line"], text))
        if row["output"].resolve() in truths:
            text = f"{row['output']} is a truth and would be overwritten; name another output"
            problems.append((row["line"], text))
    return problems


def read_objects(given: str, file: Path) -> Iterator[tuple[int, dict | str]]:
    """Read the objects of a list.

    Args:
        given, file: see list_rows.

    Yields:
        (line, {name: value} or a description of the problem).

    Raises:
        ValueError: the file cannot be read or is not UTF-8.
    """
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"{given} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not UTF-8; save the file as UTF-8") from None

    if file.suffix.lower() == ".csv":
        rows = csv.DictReader(io.StringIO(text, newline=""), skipinitialspace=True, strict=True)
        try:
            for row in rows:
                if None in row or None in row.values():
                    yield rows.line_num, "too few or many values; put texts with commas in quotes"
                elif any(map(str.strip, row.values())):  # else a blank row of a table
                    yield rows.line_num, row
        except csv.Error as error:
            yield rows.line_num, f"not CSV ({error})"
        return
    for line, row in enumerate(text.split("\n"), start=1):
        if row.strip():
            try:
                content = json.loads(row)
                yield line, content if isinstance(content, dict) else "not a JSON object"
            except (ValueError, RecursionError) as error:
                yield line, f"not JSON ({getattr(error, 'msg', error)})"


def parse_texts(
    content: dict | str, required: tuple[str, ...], optional: tuple[str, ...]
) -> dict[str, str | None]:
    """An object's texts by their keys in NAMES; missing optional texts are None.

    Args:
        content: of read_objects.
        required, optional: keys of NAMES.

    Raises:
        ValueError: it is invalid, or a text is missing, empty or not a string.
    """
    if isinstance(content, str):
        raise ValueError(content)
    texts = {}
    for key in (*required, *optional):
        name = next((name for name in NAMES[key] if content.get(name) is not None), None)
        text = content.get(name, "")
        if not isinstance(text, str):
            raise ValueError(f"{name} is {json.dumps(text)[:40]}, not text")
        texts[key] = text.strip() or None
        if key in required and not texts[key]:
            raise ValueError(f"{name} is empty" if name else f"no {' or '.join(NAMES[key])}")
    return texts


def find_base(path: str, folder: Path) -> Path:
    """The directory that a path is relative to: the working directory if the file is only there."""
    is_elsewhere = not os.path.isfile(folder / path) and os.path.isfile(path)
    return Path() if is_elsewhere else folder
