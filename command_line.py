"""What the scripts share: how they run and end, and how they write files."""

import io
import os
import re
import shutil
import sys
import traceback
import uuid
from collections.abc import Callable
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints


def run_main(
    config_class: Any,
    description: str,
    work: Callable[[Any], None],
    args: list[str] | None = None,
    *,
    interrupted: str = "nothing was written",
    out_of_memory: str | None = None,
    explain: Callable[[Exception], str | None] = lambda error: None,
) -> None:
    """Parse a script's flags and call its work; errors end in one line on stderr.

    Exit codes: 0; 2 for a user's mistake (ValueError, OSError, too little device memory); 130 for
    Ctrl-C; 1 for failed arithmetic and for what `explain` explains. Other exceptions are raised.

    Args:
        config_class: dataclass of the flags, or a union of dataclasses, one per subcommand.
        description: for --help.
        work: takes the config.
        args: the flags; None takes those of this process.
        interrupted: what Ctrl-C leaves, unless the KeyboardInterrupt says it.
        out_of_memory: what helps against too little device memory; None raises the error.
        explain: the message for an exception, or None.
    """
    config = parse_flags(config_class, description, args)
    try:
        work(config)
        return
    except KeyboardInterrupt as stop:
        code, message = 130, f"interrupted; {one_line(stop) if stop.args else interrupted}"
    except (ValueError, OSError) as error:
        code, message = 2, f"error: {one_line(error)}"
    except Exception as error:
        # jaxlib's class is known by name, as scripts without jax do not import it.
        ran_out = type(error).__name__ == "JaxRuntimeError" and "RESOURCE_EXHAUSTED" in str(error)
        if ran_out and out_of_memory:
            code, message = 2, f"error: out of device memory; {out_of_memory}"
        elif reason := explain(error):
            code, message = 1, f"error: {reason}"
        elif isinstance(error, ArithmeticError):
            code, message = 1, f"error: {one_line(error)}"
        elif is_distributed():
            code, message = 1, traceback.format_exc()
        else:
            raise
    sys.stderr.write(f"{message}\n")  # at once, as print lets another thread write before the \n
    # XLA's compiler threads outlive the interpreter and die of a segmentation fault after Ctrl-C;
    # a process of several would wait for the other processes at an orderly exit.
    if args is None and (code == 130 or is_distributed()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def parse_flags(config_class: Any, description: str, args: list[str] | None) -> Any:
    """An object of config_class, parsed by tyro; arguments as for run_main.

    tyro frames errors over several lines. Here an error is one line: what is wrong, and the flag or
    the names that would be right.
    """
    import tyro  # only scripts need it, not the models that import this file's helpers

    words = sys.argv[1:] if args is None else args
    for name in list_flags(config_class):
        count = sum(word.partition("=")[0].replace("-", "_") == f"__{name}" for word in words)
        if count > 1:
            sys.stderr.write(
                f"error: --{name} is given {count} times; write all values after one --{name}\n"
            )
            sys.exit(2)
    printed = io.StringIO()
    try:
        with redirect_stderr(printed):
            return tyro.cli(config_class, description=description, args=args, use_underscores=True)
    except SystemExit as stop:
        if stop.code == 2:
            sys.stderr.write(f"error: {unframe(printed.getvalue(), words)}\n")
        raise


def list_flags(config_class: Any) -> set[str]:
    """The flags of a dataclass, or of a union of them, that take several values."""
    return {
        name
        for cls in get_args(config_class) or (config_class,)
        for name, hint in get_type_hints(cls).items()
        if get_origin(hint) is tuple
    }


def unframe(text: str, words: list[str]) -> str:
    """An error of tyro on one line, without the help texts of the flags that it suggests.

    Args:
        text: a title, then parts with rules between them, in a frame.
        words: of the command line; the frame breaks long ones.
    """
    lines = [line for line in text.splitlines() if not re.match(r".{2} {8}\S", line)]
    lines = [line.strip("│╭╮╰╯ ") for line in lines]
    ruled = re.sub(r"^─ (.+?) ─+$", r"\1\n---", "\n".join(lines), flags=re.MULTILINE)
    _, *parts = re.split(r"\n[─-]+(?:\n|$)", ruled)
    parts = [one_line(part.split("\n\n")[0]).rstrip(".") for part in parts if part.strip()]
    if any(part.startswith("Available subcommands") for part in parts):
        parts = [part for part in parts if not part.startswith("Perhaps you meant")]
    message = "; ".join(parts) or one_line(text)
    for word in words:
        if len(word) > 40:
            message = re.sub(" ?".join(map(re.escape, word)), lambda _, word=word: word, message)
    return message


def is_distributed() -> bool:
    """Whether this process has joined others through jax.distributed."""
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized()


def one_line(error: BaseException | str, limit: int | None = None) -> str:
    """What an exception says, on one line of at most `limit` characters; its type if nothing."""
    return " ".join(str(error).split())[:limit] or type(error).__name__


def differences(saved: dict, current: dict) -> list[str]:
    """List the entries of current that differ from saved, as "NAME was A and is B"."""
    return [
        f"{name} was {saved.get(name)} and is {value}"
        for name, value in current.items()
        if saved.get(name) != value
    ]


def check_writable(given: str, directory: Path) -> None:
    """Raise a ValueError naming the flag as given if a directory cannot be made or written to."""
    parent = next(p for p in (directory, *directory.absolute().parents) if p.exists())
    if not (parent.is_dir() and os.access(parent, os.W_OK)):
        raise ValueError(
            f"{given} cannot be written: {parent} is not a directory that you can write to; name "
            "another"
        )


def save_whole(path: Path, save: Callable[[Path], None], shared: bool = False) -> None:
    """Have save(path) write a file or directory that appears under its name when complete.

    Args:
        path: file or directory; its parents are made.
        save: writes to the path that it is given.
        shared: several processes may write the path at the same time.
    """
    unique = f"{uuid.uuid4().hex}-" if shared else ""  # else a later save removes what a kill left
    unfinished = path.with_name(f".unfinished-{unique}{path.name}")
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    remove(unfinished)
    try:
        save(unfinished)
        if path.is_dir():  # of an earlier start of this run
            shutil.rmtree(path)
        unfinished.replace(path)
    except BaseException:
        remove(unfinished)
        raise


def remove(path: Path) -> None:
    """Remove a file or a directory if it exists."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_text(path: Path, text: str, shared: bool = False) -> None:
    """Write a text file so that no reader sees a partial file; shared: see save_whole."""
    save_whole(path, partial(Path.write_text, data=text, encoding="utf-8"), shared)
