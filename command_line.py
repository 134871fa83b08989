"""What the scripts share of a command line: how they end, and the files they write."""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path


def run_main(main: Callable[[], None]) -> None:
    """Call a script's main; exit code 130 (Ctrl-C) ends the process at once.

    XLA's compiler threads outlive the Python interpreter, so that an orderly exit in the middle of
    a compilation ends in a segmentation fault.
    """
    try:
        main()
    except SystemExit as stop:
        if stop.code == 130:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(130)
        raise


def check_writable(given: str, directory: Path) -> None:
    """Raise a ValueError naming the flag as given if a directory cannot be made or written to."""
    parent = next(p for p in (directory, *directory.absolute().parents) if p.exists())
    if not (parent.is_dir() and os.access(parent, os.W_OK)):
        raise ValueError(
            f"{given} cannot be written: {parent} is no directory or not yours to write to; name "
            "another"
        )


def save_whole(path: Path, save: Callable[[Path], None]) -> None:
    """Have save(path) write a file or directory that appears under its name when complete."""
    unfinished = path.with_name(f".unfinished-{path.name}")
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    if unfinished.is_dir():
        shutil.rmtree(unfinished)
    save(unfinished)
    if path.is_dir():  # of an earlier start of this run
        shutil.rmtree(path)
    unfinished.replace(path)
