"""Reading JSON files; writing files that a reader never sees unfinished."""

import errno
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

UNFINISHED_PREFIX = ".unfinished-"  # of files while they are written


def save_whole(path: Path, save: Callable[[Path], None], shared: bool = False) -> None:
    """Write a file or directory that appears under its name when it is complete.

    Args:
        path: file or directory; its parents are made.
        save: function that writes to a path.
        shared: several processes may write the path at the same time.
    """
    # Without a unique name, a later save removes the file of a killed one.
    unique = f"{uuid.uuid4().hex}-" if shared else ""
    unfinished = path.with_name(f"{UNFINISHED_PREFIX}{unique}{path.name}")
    with naming_full_disk(path):
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        remove(unfinished)
        try:
            save(unfinished)
            if unfinished.is_dir() and path.is_dir():  # of an earlier start
                shutil.rmtree(path)
            unfinished.replace(path)
        except BaseException:
            remove(unfinished)
            raise


def remove(path: Path) -> None:
    """Remove a file or directory, if it exists."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_text(path: Path, text: str, shared: bool = False) -> None:
    """Write a text file with save_whole; shared: see there."""
    save_whole(path, partial(Path.write_text, data=text, encoding="utf-8"), shared)


@contextmanager
def naming_full_disk(path: Path, num_bytes: int | None = None) -> Iterator[None]:
    """Turn any library's error for a full disk into an OSError that names the path and size."""
    try:
        yield
    except Exception as error:
        if not is_full_disk(error):
            raise
        takes = f"; it takes {num_bytes / 1e6:.4g} MB" if num_bytes else ""
        raise OSError(errno.ENOSPC, f"the disk is full{takes}", str(path)) from error


def is_full_disk(error: BaseException) -> bool:
    """Whether an exception of any library is about a full disk or a used quota."""
    return any(os.strerror(code) in str(error) for code in (errno.ENOSPC, errno.EDQUOT))


def read_json(file):
    """Read a JSON object from a file; raise a ValueError that names the file if it has none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # RecursionError: thousands of brackets
        raise ValueError(f"{file} is not valid JSON ({error}); fetch it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} is not a JSON object; fetch it again")
    return content


def write_json(file, content):
    """Write content to a JSON file."""
    file.write_text(json_text(content), encoding="utf-8")


def json_text(content):
    """Content as indented JSON."""
    return json.dumps(content, indent=2, sort_keys=True) + "\n"
