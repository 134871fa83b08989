"""The command line of all programs: flags and their ranges, one-line errors, paths to write."""

import gc
import io
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn, Union, get_args, get_type_hints

from diffusers_flax.loading.files import is_full_disk
from diffusers_flax.messages import one_line

IMAGE_EXTENSIONS = (".png", ".jpg", ".jpeg")  # that programs write
# Names of one thing: a program has one of them as its flag and takes the other.
SAME_FLAGS = (
    ("model", "pretrained_model_name_or_path"),
    ("data_dir", "train_data_dir", "pairs"),
    ("max_pairs", "max_train_samples"),
)


@dataclass(frozen=True)
class Range:
    """The numbers that a flag takes, declared beside its type.

        steps: Annotated[int, AtLeast(1)] = 20
        sizes: tuple[Annotated[int, AtLeast(8), MultipleOf(8)], ...] = ()
        share: Annotated[float, Above(0), Below(1)] | None = None

    check_ranges checks all of a config.
    """

    description: str  # "at least 1"
    contains: Callable[[float], bool]


def AtLeast(low: float) -> Range:
    return Range(f"at least {low}", lambda x: x >= low)


def Above(low: float) -> Range:
    return Range(f"above {low}", lambda x: x > low)


def AtMost(high: float) -> Range:
    return Range(f"at most {high}", lambda x: x <= high)


def Below(high: float) -> Range:
    return Range(f"below {high}", lambda x: x < high)


def Between(low: float, high: float) -> Range:
    """From low to high, both included."""
    return Range(f"from {low} to {high}", lambda x: low <= x <= high)


def MultipleOf(number: int) -> Range:
    return Range(f"a multiple of {number}", lambda x: x % number == 0)


Seed = Annotated[int, Between(0, 2**32 - 1)]  # of PRNGKey


def check_ranges(config: Any) -> None:
    """Raise a ValueError for the first flag of a config that is out of its ranges.

    Args:
        config: dataclass object. Its numbers must be finite, also without a range; None has none.
    """
    for name, hint in get_type_hints(type(config), include_extras=True).items():
        ranges, value = list(ranges_of(hint)), getattr(config, name)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, bool) or not isinstance(number, int | float):
                continue
            if not math.isfinite(number):
                raise ValueError(f"--{name} {number} must be a finite number")
            if not all(limit.contains(number) for limit in ranges):
                must_be = " and ".join(limit.description for limit in ranges)
                raise ValueError(f"--{name} {number} must be {must_be}")


def ranges_of(hint: Any) -> Iterator[Range]:
    """The ranges in a type, such as Annotated[int, AtLeast(1)] | None."""
    if isinstance(hint, Range):
        yield hint
    for part in get_args(hint):
        yield from ranges_of(part)


def run_main(
    config_class: Any,
    description: str,
    work: Callable[[Any], None],
    args: list[str] | None = None,
    *,
    interrupted: str = "nothing was written",
    out_of_memory: str | None = None,
) -> None:
    """Parse a script's flags and call its work; errors end in one line on stderr.

    Exit codes: 0; 2 for a user's mistake (ValueError, OSError, a full disk, too little device
    memory); 130 for Ctrl-C; 1 for an ArithmeticError and for a lost process. Others are raised.

    Args:
        config_class: dataclass of the flags, or {subcommand: dataclass}.
        description: for --help.
        work: takes the config.
        args: the flags; None: this process's command line.
        interrupted: message for a KeyboardInterrupt without one.
        out_of_memory: remedy for too little device memory; None raises the error.
    """
    from tqdm.contrib.logging import logging_redirect_tqdm  # only programs need it

    if args is None:
        gc.set_threshold(10_000)  # with Python 3.11's 700, a start takes a tenth longer
        # No proxy takes requests to this machine: to a page, a judge, a server.
        spared = (os.environ.get("no_proxy"), os.environ.get("NO_PROXY"), "localhost,127.0.0.1,::1")
        if "*" not in spared:
            os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(filter(None, spared))
    config = parse_flags(config_class, description, args)
    try:
        check_ranges(config)
        with logging_redirect_tqdm():  # a warning ends the line of a progress bar
            work(config)
        return
    except KeyboardInterrupt as stop:
        code, message = 130, f"interrupted; {one_line(stop) if stop.args else interrupted}"
    except Exception as error:
        # By name, as some scripts do not import jax.
        ran_out = type(error).__name__ == "JaxRuntimeError" and "RESOURCE_EXHAUSTED" in str(error)
        code, message = 2, f"error: {one_line(error)}"
        if ran_out and out_of_memory:
            message = f"error: out of device memory; {out_of_memory}"
        elif isinstance(error, ArithmeticError):
            code = 1
        elif not (isinstance(error, ValueError | OSError) or is_full_disk(error)):
            if not is_distributed():
                raise
            from diffusers_flax.devices.processes import explain_lost_process  # imports jax

            reason = explain_lost_process(error)
            code, message = 1, f"error: {reason}" if reason else traceback.format_exc()
    sys.stderr.write(f"{message}\n")  # at once, as print lets another thread write before the \n
    # After Ctrl-C, XLA's compiler threads would outlive the interpreter and segfault; at an orderly
    # exit a process would wait for the others.
    if args is None and (code == 130 or is_distributed()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def parse_flags(config_class: Any, description: str, args: list[str] | None) -> Any:
    """An object of config_class, parsed by tyro; arguments as for run_main.

    A mistake ends the program with one line.
    """
    import tyro  # only programs need it

    words, flags = list(sys.argv[1:] if args is None else args), config_class
    if isinstance(config_class, dict):
        named = [Annotated[x, tyro.conf.subcommand(name)] for name, x in config_class.items()]
        flags = Union[tuple(named)]  # noqa: UP007
        config_class = config_class.get(words[0] if words else "", object)
    hints, own_names, given = get_type_hints(config_class), {}, set()
    for group in SAME_FLAGS:
        own = next((name for name in group if name in hints), None)
        own_names |= {name: own for name in group if own and name not in hints}
    for i, word in enumerate(words):
        if word.startswith("--"):
            flag, sep, value = word[2:].partition("=")
            name = own_names.get(flag.replace("-", "_"), flag.replace("-", "_"))
            if "tuple[" in str(hints.get(name)) and name in given:  # tyro takes the last ones
                refuse(f"--{name} is given twice; write all values after one --{name}")
            given.add(name)
            words[i] = f"--{name if name in hints else flag}{sep}{value}"
    shown = io.StringIO()
    try:
        with redirect_stdout(shown), redirect_stderr(shown):
            return tyro.cli(flags, args=words, description="", use_underscores=True)
    except SystemExit as stop:
        text = shown.getvalue()
        if stop.code:
            # The second section of a framed text, after its title, is the message.
            text = re.sub("[│╮]", " ", text)
            message = one_line(re.split("[-─]{10,}|Got errors:", text)[1]).rstrip(".")
            near = re.search(r"Perhaps you meant:\s+(--\w+)", text)
            message += f"; did you mean {near[1]}?" if near else ""
            refuse(message + getattr(config_class, "MORE_FLAGS", ""))
        print(description.strip(), text, sep="\n\n", end="")
        raise


def refuse(message: str) -> NoReturn:
    """End the program because of its flags."""
    sys.stderr.write(f"error: {message}; --help lists the flags\n")
    sys.exit(2)


def is_distributed() -> bool:
    """Whether this process has joined others through jax.distributed."""
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized()


def ask_before_replacing(
    flag: str,
    directory: str | Path,
    overwrite: bool,
    continues: str = "",
    others: Iterable[str | Path] = (),
) -> None:
    """Raise a ValueError unless a program may write its files into a directory.

    Args:
        flag: name of the directory's flag.
        directory: its value.
        overwrite: --overwrite_output_dir, which replaces the program's own files only. False
            refuses a directory with visible files.
        continues: pattern of files of an earlier start that the program continues.
        others: paths of other flags that may be in the directory.
    """
    given, folder = f"--{flag} {directory}", Path(directory)
    check_writable(given, folder)
    if overwrite or (continues and any(folder.glob(continues))):
        return
    known = [Path(path).resolve() for path in others]
    names = [
        file.name
        for file in sorted(folder.glob("[!.]*"))
        if not any(path.is_relative_to(file.resolve()) for path in known)
    ]
    if names:
        raise ValueError(
            f"{given} is not empty ({', '.join(names[:3])}); name another directory, or replace "
            "this program's files in it with --overwrite_output_dir"
        )


def check_writable(given: str, directory: Path) -> None:
    """Raise a ValueError if a directory cannot be made or written to; given: --FLAG VALUE."""
    path = directory.resolve()
    parent = next(p for p in (path, *path.parents) if p.exists())
    if not (parent.is_dir() and os.access(parent, os.W_OK)):
        raise ValueError(f"{given}: {parent} is no directory that you can write to; name another")


def check_image_file(path):
    """Raise a ValueError for an image file that cannot be written; nothing is written."""
    if path.suffix.lower() not in IMAGE_EXTENSIONS:
        raise ValueError(f"{path} is no image; name it {' or '.join(IMAGE_EXTENSIONS)}")
    if path.is_dir():
        raise ValueError(f"{path} is a directory; name a file")
    check_writable(str(path), path.parent)


def print_files(paths):
    """Print the first ten files that a program has written, and their number."""
    print(*paths[:10], sep="\n")
    if len(paths) > 10:
        print(f"... {len(paths)} images")
