"""Lists of edits and of image pairs, one reader for all programs.

    rows = read_list("--edits_jsonl FILE", Path(FILE), ("original_image", "edit_prompt", "output"))

parquet_processing.py --pairs, edit_cli.py --edits_jsonl and evaluate_edits.py --pairs_jsonl read
them. A list is a .csv file whose first line names the columns, or else a file with one JSON object
per line. NAMES has the accepted keys or column names; other keys are ignored. Several names of one
text must agree. `output` is the file that edit_cli.py writes, never an image to learn from.

Paths are relative to the list. An image that is not there is looked up in the working directory,
with a warning; the output of its row is relative to the working directory too. The image of a row
may be the output of another row, so that edits follow one another; both are then relative to the
same directory.
"""

import csv
import io
import json
import logging
import os
from collections.abc import Callable, Iterator
from functools import partial
from graphlib import CycleError, TopologicalSorter
from itertools import islice
from pathlib import Path

NAMES = {  # meaning: accepted keys
    "original_image": ("original_image", "input_image", "original", "input"),
    "edited_image": ("edited_image", "output_image", "edited", "truth"),
    "edit_prompt": ("edit_prompt", "edit", "instruction"),
    "mask": ("mask", "mask_image", "mask_img"),
    "output": ("output",),
    "original_prompt": ("original_prompt", "original_caption", "input_caption"),
    "edited_prompt": ("edited_prompt", "edited_caption", "output_caption"),
    "file_name": ("file_name", "file", "name"),
}
IMAGES = ("original_image", "edited_image")
READ = (*IMAGES, "mask")  # files that must exist
PATHS = (*READ, "output")
CAPTIONS = ("original_prompt", "edited_prompt")
MAX_NAMED_PROBLEMS = 10  # in an error message
LIKENESS = 0.75  # difflib's ratio of a misspelt and the right key: maks and mask have 0.75

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
        (rows, problems). A row is a dict with "line", its first line, from 1, and keys of NAMES:
        texts, Paths for the keys in PATHS, None if missing. With outputs also "after", the line of
        the row whose output it edits, or None. A problem is (line, description) of an invalid row
        or a missing image.

    Raises:
        ValueError: the file cannot be read, is not UTF-8 or has no rows.
    """
    rows, problems, truths, promised = [], [], [], set()
    check = partial(missing_names, required=required)
    for line, content in islice(read_objects(given, file, check), max_rows):
        try:
            if isinstance(content, str):
                raise ValueError(content)
            rows.append({"line": line} | parse_texts(content, required, optional))
            truths += [content[name] for name in NAMES["edited_image"] if name in content]
        except ValueError as error:
            problems.append((line, str(error)))
            output = content.get("output") if isinstance(content, dict) else None
            if isinstance(output, str) and "\0" not in output:
                promised |= {(file.parent / output).resolve(), Path(output).resolve()}
    if not rows and not problems:
        raise ValueError(f"{given} has no rows; write one for each edit")

    elsewhere, begins = [], []
    has_outputs = "output" in required
    if has_outputs:
        writers = {os.path.normpath(row["output"]): row for row in rows}
        begins = [first_image(row, writers) for row in rows]
    for row, image in zip(rows, begins or rows):
        bases = {name: find_base(row[name], file.parent) for name in READ if row.get(name)}
        if has_outputs:
            bases |= dict.fromkeys(("original_image", "output"), find_base(image, file.parent))
        elsewhere += [row[name] for name, base in bases.items() if base != file.parent][:1]
        row |= {name: base / row[name] for name, base in bases.items()}
    if has_outputs:
        problems += check_outputs(rows, truths, file.parent)
    outputs = {row["output"].resolve(): row["line"] for row in rows if "output" in row}
    problems += [x for row in rows for x in missing_files(row, outputs, promised)]
    problems.sort(key=lambda problem: problem[0])
    wrong = {line for line, _ in problems}
    if elsewhere:
        logger.warning(
            "%s: images are in the working directory, not beside the list (rows: %d), for example "
            "%s; write paths relative to the list%s",
            file, len(elsewhere), elsewhere[0],
            "; outputs of these rows go to the working directory too" * has_outputs,
        )  # fmt: skip
    return [row for row in rows if row["line"] not in wrong], problems


def first_image(row: dict, writers: dict[str, dict]) -> str:
    """The image with which the edits of a row begin, if it edits another row's output.

    Args:
        row: with the text "original_image".
        writers: {output: its row}.
    """
    seen = []
    while row not in seen:  # also ends in a cycle, see check_outputs
        seen.append(row)
        row = writers.get(os.path.normpath(row["original_image"]), row)
    return row["original_image"]


def check_outputs(rows: list[dict], truths: list, folder: Path) -> list[tuple[int, str]]:
    """Set "after" of each row, see list_rows; problems with files that would be overwritten.

    Args:
        rows: with paths.
        truths: edited images of all rows, as they are written in the list.
        folder: directory of the list.
    """
    lines = {row["output"].resolve(): row["line"] for row in rows}
    kept = {(find_base(x, folder) / x).resolve() for x in truths if isinstance(x, str) and x}
    problems = []
    for row in rows:
        row["after"] = lines.get(row["original_image"].resolve())
        if row["output"].resolve() in kept:
            text = f"{row['output']} is a truth and would be overwritten; name another output"
            problems.append((row["line"], text))
    try:
        follows = {row["line"]: {row["after"]} - {None} for row in rows}
        TopologicalSorter(follows).prepare()
    except CycleError as error:
        cycle = sorted({*error.args[1]})
        numbers = " and ".join(map(str, cycle))
        text = (
            f"an input would be overwritten, as the outputs of line {numbers} are edited in a cycle"
        )
        problems.append((cycle[0], f"{text}; name another output"))
    return problems


def missing_files(
    row: dict, outputs: dict[Path, int], promised: set[Path]
) -> list[tuple[int, str]]:
    """A problem for each missing file of a row, except an image that another row writes.

    Args:
        row: row of list_rows.
        outputs: {output: line of its row}, resolved.
        promised: outputs of invalid rows, resolved.
    """
    problems = []
    for name in READ:
        path = row.get(name)
        if path is None or os.path.isfile(path):
            continue
        if name == "edited_image" and "output" in row:  # only drawn
            row[name] = None
            continue
        if name == "original_image" and (row.get("after") or path.resolve() in promised):
            continue
        problem = f"{path} {'is a directory' if os.path.exists(path) else 'does not exist'}"
        if name == "mask" and (line := outputs.get(path.resolve())):
            problem = f"{path} is written by line {line}; a mask must exist before"
        problems.append((row["line"], problem))
    return problems


def read_objects(
    given: str, file: Path, check_columns: Callable[[list[str]], str] = lambda names: ""
) -> Iterator[tuple[int, dict | str]]:
    """Read the objects of a list.

    Args:
        given, file: see list_rows.
        check_columns: columns of a CSV file -> what is wrong with them, or "".

    Yields:
        (first line, {name: value} or a description of the problem).

    Raises:
        ValueError: the file cannot be read or is not UTF-8, or a CSV file has no valid header.
    """
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"{given} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{file} line {line} is not UTF-8; save the file as UTF-8, a JSON object a line, or CSV"
        ) from None

    if file.suffix.lower() != ".csv":
        for line, row in enumerate(text.split("\n"), start=1):
            if not row.strip():
                continue
            try:
                row = json.loads(row)
            except (ValueError, RecursionError) as error:
                yield line, f"not JSON ({getattr(error, 'msg', error)})"
            else:
                yield line, row if isinstance(row, dict) else "not a JSON object"
        return

    rows = csv.reader(io.StringIO(text, newline=""), skipinitialspace=True, strict=True)
    header, line = None, 1
    try:
        for values in rows:
            if header is None:
                header = [name.strip() for name in values]
                problem = check_columns(header)
                if len(set(header)) < len(header):
                    problem = "two columns have the same name"
                if problem:
                    hint = "; separate them by commas" if len(header) == 1 else ""
                    raise ValueError(
                        f"{file} line {line} names the columns {', '.join(header)}: {problem}{hint}"
                    )
            elif not any(map(str.strip, values)):  # a blank row of a table
                pass
            elif len(values) == len(header):
                yield line, dict(zip(header, values))
            elif values:
                problem = f"{len(values)} values, but {len(header)} columns"
                if len(values) > len(header):
                    problem += "; put texts with commas in quotation marks"
                yield line, problem
            line = rows.line_num + 1
    except csv.Error as error:
        yield line, f"not CSV ({error})"


def missing_names(names: list[str], required: tuple[str, ...]) -> str:
    """Name the missing required keys or columns; "" without any."""
    missing = [name for name in required if not set(NAMES[name]) & set(names)]
    problem = "; ".join(f"no {' or '.join(NAMES[name])}" for name in missing)
    if "edited_image" in missing and "output" in names:
        problem += " (output is the file that edit_cli.py writes, no image to learn from)"
    return problem


def parse_texts(
    content: dict, required: tuple[str, ...], optional: tuple[str, ...]
) -> dict[str, str | None]:
    """An object's texts by their keys in NAMES; missing optional texts are None.

    Raises:
        ValueError: a text is missing, empty or not a string, or several names of it differ.
    """
    if problem := missing_names(list(content), required):
        raise ValueError(problem)
    texts = {}
    for key in (*required, *optional):
        found = {}
        for name in (name for name in NAMES[key] if content.get(name) is not None):
            if key == "edit_prompt" and isinstance(content[name], list):
                raise ValueError(
                    f"{name} is a list; write one line for each instruction, or, to train, shards "
                    "with a list column by pyarrow"
                )
            if not isinstance(content[name], str):
                raise ValueError(f"{name} is {json.dumps(content[name])[:40]}, not text")
            if text := content[name].strip():
                found[name] = text
        if key in required and not found:
            raise ValueError(f"{next(name for name in NAMES[key] if name in content)} is empty")
        if len(set(found.values())) > 1:
            differing = " and ".join(f'{name} "{text[:40]}"' for name, text in found.items())
            raise ValueError(f"{differing} differ, but mean the same; give one of them")
        texts[key] = next(iter(found.values()), None)
        if key in PATHS and "\0" in (texts[key] or ""):
            raise ValueError("a path has a null byte")
        try:
            (texts[key] or "").encode()
        except UnicodeEncodeError:
            (name,) = list(found)[:1]
            raise ValueError(f"{name} is not valid Unicode: it has an unpaired surrogate") from None
    return texts


def find_base(path: str, folder: Path) -> Path:
    """The directory that a path is relative to.

    It is the working directory if the file is only there, else folder, also for absolute paths.
    """
    is_elsewhere = not os.path.isfile(folder / path) and os.path.isfile(path)
    return Path() if is_elsewhere else folder
