"""What the scripts share: how they run and end, and how they write files."""

import errno
import io
import os
import re
import shutil
import sys
import textwrap
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

HELP_COLUMN = 24  # of the help texts
UNFINISHED_PREFIX = ".unfinished-"  # of files while they are written
DESCRIPTION = "@@@"  # its place in tyro's help

# Flags, paths and examples stay whole.
fill = partial(textwrap.fill, break_long_words=False, break_on_hyphens=False)


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
    from tqdm.contrib.logging import logging_redirect_tqdm  # only scripts need it, as tyro

    config = parse_flags(config_class, description, args)
    try:
        with logging_redirect_tqdm():  # a warning ends the line of a progress bar
            work(config)
        return
    except KeyboardInterrupt as stop:
        code, message = 130, f"interrupted; {one_line(stop) if stop.args else interrupted}"
    except (ValueError, OSError) as error:
        code, message = 2, f"error: {with_flags(error, config)}{free_space(error, config)}"
    except Exception as error:
        # jaxlib's class is known by name, as scripts without jax do not import it.
        ran_out = type(error).__name__ == "JaxRuntimeError" and "RESOURCE_EXHAUSTED" in str(error)
        if ran_out and out_of_memory:
            code, message = 2, f"error: out of device memory; {out_of_memory}"
        elif space := free_space(error, config):
            code, message = 2, f"error: {one_line(error)}{space}"
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
    the names that would be right. --help is wrapped at the terminal's width.
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
    printed, shown = io.StringIO(), io.StringIO()
    width, columns = shutil.get_terminal_size().columns, os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "5000"  # every help text on one line, see layout_help
    try:
        with redirect_stderr(printed), redirect_stdout(shown):
            return tyro.cli(config_class, description=DESCRIPTION, args=args, use_underscores=True)
    except SystemExit as stop:
        if stop.code == 2:
            sys.stderr.write(f"error: {unframe(printed.getvalue(), words)}\n")
        else:
            sys.stdout.write(layout_help(shown.getvalue(), description, width))
        raise
    finally:
        os.environ.pop("COLUMNS") if columns is None else os.environ.update(COLUMNS=columns)


def layout_help(text: str, description: str, width: int) -> str:
    """A help text of tyro, wrapped.

    Args:
        text: without wrapping; the description is DESCRIPTION.
        description: paragraphs, and indented lines, which are not wrapped.
        width: of the terminal, characters.
    """
    paragraphs = description.strip().split("\n\n")
    paragraphs = [x if x.startswith(" ") else fill(x, width) for x in paragraphs]
    text = plain_types(text)
    lines, flag = [], ""
    for line in map(str.rstrip, text.splitlines()):
        if re.fullmatch(" -+", line):
            lines[-1:] = ["", f"{lines[-1].strip()}:"]
        elif found := re.match(r"  (-\S.*?)(?:  +(.*))?$", line):  # a flag, and its text or not
            flag, line = found.groups()
            lines += [] if line is None else layout_flag(flag, line, width)
            flag = flag if line is None else ""
        elif flag and line.strip():  # the text of the flag in the line before
            lines += layout_flag(flag, line.strip(), width)
            flag = ""
        elif line.startswith("usage: "):
            lines.append(fill(line, width, subsequent_indent=" " * 7))
        else:
            lines.append(line.replace("•", " "))
    text = "\n".join(lines).strip() + "\n"
    return re.sub(r"\n{3,}", "\n\n", text.replace(DESCRIPTION, "\n\n".join(paragraphs)))


def plain_types(text: str) -> str:
    """A text of tyro with the types of flags as users write them: INT, {a,b}, [INT ...]."""
    text = text.replace("{None}|", "").replace("{None,", "{")
    return re.sub(r"\[(\w+) \[\1 \.\.\.\]\]", r"[\1 ...]", text)


def layout_flag(flag: str, text: str, width: int) -> list[str]:
    """The lines of a flag's help; a default that says nothing is left out.

    Args:
        flag: with its type, as tyro writes them.
        text: of the help, with the default.
        width: of the lines, characters.
    """
    start, _, default = text.rpartition(" (default: ")
    if default in ("None)", "'')", ")"):
        name = "None" if default == "None)" else '""'
        text = re.sub(rf"(?<!\w){name}: ", "default: ", start)  # "None: all" -> "default: all"
        if "default" not in text:
            text += f" (default: {name if name in text else 'none'})"
    indent = " " * HELP_COLUMN
    text = re.sub(r"\(default: (\S+)\)$", "(default:\xa0\\1)", text)  # on one line
    text = fill(text, max(width, 60), initial_indent=indent, subsequent_indent=indent)
    text = text.replace("\xa0", " ")
    if len(flag) + 4 > HELP_COLUMN:
        return [f"  {flag}", *text.splitlines()]
    return (f"  {flag}".ljust(HELP_COLUMN) + text.lstrip()).splitlines()


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
    message = plain_types("; ".join(parts) or one_line(text))
    if found := re.search(r"Expected one of \((.*?)\)", message):  # in no order
        names = sorted(set(re.findall("'(.*?)'", found[1])) - {"None"})
        message = message.replace(found[0], f"Expected one of {', '.join(names)}")
    message = re.sub(
        r"Error parsing (\S+): (?:invalid literal for int\(\) with base 10|"
        r"could not convert string to (float)): (.*?);",
        lambda found: f"{found[1]} {found[3]} is not a {'number' if found[2] else 'whole number'};",
        message,
    )
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


def with_flags(error: Exception, config: Any) -> str:
    """What an exception says, on one line; the library's NAME=VALUE is --NAME VALUE of a flag.

    A tuple (1, 2) is 1 2.
    """
    name = rf"(?<![\w.:,?&-])({'|'.join(vars(config)) or '-'})"  # not a part of another word
    message = re.sub(rf"{name}=True\b", r"--\1", one_line(error))
    message = re.sub(
        rf"{name}=\(([^()]+)\)",
        lambda found: f"--{found[1]} {found[2].replace(',', '')}",
        message,
    )
    return re.sub(rf"{name}=(?=\S)", r"--\1 ", message)


def is_full_disk(error: BaseException) -> bool:
    """Whether an exception says that a disk is full or a quota is used up."""
    codes = (errno.ENOSPC, errno.EDQUOT)
    if isinstance(error, OSError):
        return error.errno in codes
    # safetensors has its own error.
    return any(os.strerror(code) in str(error) for code in codes)


def free_space(error: Exception, config: Any) -> str:
    """For the error of a full disk: "; OUTPUT is on a disk with N GB free", else "".

    The output, of the flags in config, is that on the disk with the least free space.
    """
    if not is_full_disk(error):
        return ""
    free = {
        f"--{name} {value}": disk_space(Path(value).expanduser())
        for name, value in vars(config).items()
        if re.search("output|held_out|grid|_dir$", name) and isinstance(value, str | Path) and value
    }
    given = min(free, key=free.get, default=None)
    if given is None:
        return ""
    return f"; {given} is on a disk with {in_bytes(free[given])} free; free some space"


def disk_space(path: Path) -> int:
    """Free bytes on the disk of a file or directory, which may not exist."""
    return shutil.disk_usage(nearest_existing(path)).free


def nearest_existing(path: Path) -> Path:
    """The path, or the nearest of its parents that exists."""
    return next(p for p in (path, *path.absolute().parents) if p.exists())


def in_bytes(number: float) -> str:
    """A number of bytes in words, such as 3.4 GB."""
    unit, name = next((x for x in ((1e9, "GB"), (1e6, "MB")) if number >= x[0]), (1e3, "kB"))
    return f"{number / unit:.3g} {name}"


@contextmanager
def naming_full_disk(path: Path, num_bytes: int | None = None) -> Iterator[None]:
    """Raise the error of a full disk, of any library, with path, bytes needed and bytes free.

    Args:
        path: that is written; the caller's block removes what it has written if it fails.
        num_bytes: that are written; None: not known.
    """
    try:
        yield
    except Exception as error:
        if not is_full_disk(error):
            raise
        free = disk_space(path)
        takes = f"more than the {in_bytes(free)} that are free"
        if num_bytes:
            takes = f"{in_bytes(num_bytes)}, {in_bytes(free)} are free"
        raise OSError(
            f"{path} cannot be written: the disk is full; it takes {takes}; free some space, or "
            "name another disk"
        ) from error


def check_output_dir(
    flag: str, directory: str | Path, overwrite: bool | None, continues: str = ""
) -> None:
    """Raise a ValueError unless a program may write its files into a directory.

    Args:
        flag: that names the directory.
        directory: as given.
        overwrite: --overwrite_output_dir, which replaces files of the program and leaves others;
            None: the program has no such flag. False refuses a directory with files that are not
            hidden.
        continues: pattern of the files of an earlier start that the program continues.
    """
    given, folder = f"--{flag} {directory}", Path(directory)
    if not str(directory):
        raise ValueError(f"--{flag} is empty; name a directory")
    if folder.is_file():
        raise ValueError(f"{given} is a file; name a directory")
    check_writable(given, folder)
    if overwrite or not folder.is_dir() or (continues and any(folder.glob(continues))):
        return
    names = sorted(file.name for file in folder.iterdir())
    names = [name for name in names if not name.startswith(".")]
    if names:
        more = f" and {len(names) - 3} more" * (len(names) > 3)
        remedy = ", or replace this program's files in it with --overwrite_output_dir"
        raise ValueError(
            f"{given} is not empty ({', '.join(names[:3])}{more}); name another directory"
            f"{'' if overwrite is None else remedy}"
        )


def check_writable(given: str, directory: Path) -> None:
    """Raise a ValueError naming the flag as given if a directory cannot be made or written to."""
    parent = nearest_existing(directory)
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
    unfinished = path.with_name(f"{UNFINISHED_PREFIX}{unique}{path.name}")
    with naming_full_disk(path):
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
