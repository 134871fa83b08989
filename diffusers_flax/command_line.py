"""The command line of all programs: parsing and checking flags, one-line errors."""

import errno
import gc
import io
import logging
import math
import os
import re
import shutil
import sys
import textwrap
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, NoReturn, Union, get_args, get_origin, get_type_hints

DESCRIPTION = "DESCRIPTION"  # placeholder in the help of tyro, which would join its lines
DEFAULTS = {  # replacements in the help, of equal length
    "None)": "none)",
    "(default: )": "(optional) ",
}
IMAGE_EXTENSIONS = (".png", ".jpg", ".jpeg")  # that programs write
# Names of one thing: a program has one of them as its flag and takes the other.
SAME_FLAGS = (
    ("model", "pretrained_model_name_or_path"),
    ("data_dir", "train_data_dir"),
    ("max_pairs", "max_train_samples"),
)
ALSO_CALLED = {  # name of a flag in other programs: its names here
    **dict.fromkeys(("prompt", "instruction"), ("edit",)),
    **dict.fromkeys(("image", "images", "input_image"), ("input",)),
    **dict.fromkeys(("model_id", "model_path"), ("pretrained_model_name_or_path",)),
    **dict.fromkeys(("data", "dataset_name"), ("train_data_dir",)),
    **dict.fromkeys(("cfg", "cfg_scale", "scale"), ("guidance_scale",)),
    **dict.fromkeys(("resolution", "size"), ("height", "width")),
    "unet": ("unet_model_name_or_path",),
    "steps": ("num_inference_steps", "max_train_steps"),
    "epochs": ("num_train_epochs",),
    "lr": ("learning_rate",),
    "fp16": ("dtype", "mixed_precision"),
}
# Flags that a short program, whose config says MORE_FLAGS_IN, leaves to another one.
FLAGS_OF = {
    "generate_cli.py": (
        *("accelerate", "compilation_cache_dir", "config_name_or_path", "coordinator_address"),
        *("devices", "embedding", "eta", "grid", "guidance_rescale", "latents", "lora"),
        *("num_processes", "offload", "parallel", "prediction_type", "preview", "preview_decoder"),
        *("process_id", "prompts_file", "scheduler", "storage", "timestep_spacing", "timesteps"),
        *("unet", "unet_delta", "use_ema_weights", "vae_dtype", "vae_tile", "variant"),
    )
}
ONE_WORD = ("_dir", "model", "name_or_path")  # ends of names of flags whose text is no prose
ARGUMENTS = {  # flag: the library's argument, if it has another name
    "config_name_or_path": "config",
    "devices": "components",
    "embedding": "embeddings",
    "model": "pretrained_model_name_or_path",
    "parallel": "layout",
    "preview_decoder": "preview.path",
}
OUTPUT_FLAGS = (  # of files that a program writes
    "output",
    "output_dir",
    "held_out_dir",
    "image_dir",
    "work_dir",
    "grid",
    "preview",
    "report",
    "cache_latents",
    "executable_dir",
    "compilation_cache_dir",
)


@dataclass(frozen=True)
class Range:
    """The numbers that a flag takes, declared beside its type.

        steps: Annotated[int, AtLeast(1)] = 20
        sizes: tuple[Annotated[int, AtLeast(8), MultipleOf(8)], ...] = ()
        share: Annotated[float, Above(0), Below(1)] | None = None

    check_ranges checks all of a config. Infinity is refused, unless the range allows it.
    """

    description: str  # "at least 1"
    contains: Callable[[float], bool]
    has_infinity: bool = False


def AtLeast(low: float) -> Range:
    return Range(f"at least {low}", lambda x: x >= low)


def Above(low: float) -> Range:
    return Range(f"above {low}", lambda x: x > low)


def AtMost(high: float) -> Range:
    return Range(f"at most {high}", lambda x: x <= high)


def Below(high: float) -> Range:
    return Range(f"below {high}", lambda x: x < high)


def Between(low: float, high: float) -> Range:
    """From low to high, both included; Between(1, math.inf) includes infinity."""
    return Range(f"from {low} to {high}", lambda x: low <= x <= high, math.isinf(high))


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
            if not all(limit.contains(number) for limit in ranges):
                must_be = " and ".join(limit.description for limit in ranges)
                raise ValueError(f"--{name} {number} must be {must_be}")
            if not (math.isfinite(number) or any(limit.has_infinity for limit in ranges)):
                raise ValueError(f"--{name} {number} must be a finite number")


def ranges_of(hint: Any) -> Iterator[Range]:
    """The ranges in a type, such as Annotated[int, AtLeast(1)] | None."""
    if isinstance(hint, Range):
        yield hint
    for part in get_args(hint):
        yield from ranges_of(part)


def spare_this_machine():
    """Let no proxy of the environment take requests to this machine: a page, a judge, a server."""
    given = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    has_proxy = any(name.lower().endswith("_proxy") for name in os.environ)
    if has_proxy and "127.0.0.1" not in given and "*" not in given:
        spared = ",".join(filter(None, (given, "localhost,127.0.0.1,::1")))
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = spared


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

    Exit codes: 0; 2 for a user's mistake (ValueError, OSError, too little device memory); 130 for
    Ctrl-C; 1 for an ArithmeticError and for a lost process. Others are raised.

    Args:
        config_class: dataclass of the flags, or {subcommand: dataclass}.
        description: for --help.
        work: takes the config.
        args: the flags; None: this process's command line.
        interrupted: message for a KeyboardInterrupt without one.
        out_of_memory: remedy for too little device memory; None raises the error.
    """
    if args is None:
        gc.set_threshold(10_000)  # with Python 3.11's 700, a start takes a tenth longer
    spare_this_machine()
    config = parse_flags(config_class, description, args)
    try:
        with messages_with_flags(config):
            check_ranges(config)
            work(config)
        return
    except KeyboardInterrupt as stop:
        code, message = 130, f"interrupted; {one_line(stop) if stop.args else interrupted}"
    except (ValueError, OSError) as error:
        said = with_flags(one_line(error), config)
        hint = comma_hint(said, config)
        code, message = 2, f"error: {said}{hint}{free_space(error, config)}"
    except Exception as error:
        # By name, as some scripts do not import jax.
        ran_out = type(error).__name__ == "JaxRuntimeError" and "RESOURCE_EXHAUSTED" in str(error)
        if ran_out and out_of_memory:
            code, message = 2, f"error: out of device memory; {out_of_memory}"
        elif space := free_space(error, config):
            code, message = 2, f"error: {one_line(error)}{space}"
        elif isinstance(error, ArithmeticError):
            code, message = 1, f"error: {one_line(error)}"
        elif is_distributed():
            from diffusers_flax.devices.processes import explain_lost_process  # imports jax

            reason = explain_lost_process(error)
            code, message = 1, f"error: {reason}" if reason else traceback.format_exc()
        else:
            raise
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

    A mistake ends the program with one line: what is wrong, and what would be right.
    """
    import tyro  # only scripts need it

    words = sys.argv[1:] if args is None else args
    check_unicode(words)
    words = with_own_names(words, config_class)
    lists = list_flags(config_class)
    names = [word.partition("=")[0].replace("-", "_") for word in words]
    given = Counter(name.removeprefix("__") for name in names if name.startswith("__"))
    more = getattr(config_class, "MORE_FLAGS_IN", None)
    for name, count in given.items():
        if name in FLAGS_OF.get(more, ()):
            refuse(f"--{name} is a flag of {more}")
        if count > 1 and name in lists:
            refuse(f"--{name} is given {count} times; write all values after one --{name}")
        if count > 1 and name == "model" and name not in lists:
            refuse(f"--{name} is given {count} times; name one model")
    options = {"description": DESCRIPTION, "use_underscores": True, "return_unknown_args": True}
    kind = config_class
    if isinstance(config_class, dict):
        named = [Annotated[x, tyro.conf.subcommand(name)] for name, x in config_class.items()]
        kind = Union[tuple(named)]  # noqa: UP007
    shown = io.StringIO()
    try:
        with one_line_errors(config_class, words), redirect_stdout(shown):
            config, unknown = tyro.cli(kind, args=words, **options)
    except SystemExit as stop:
        if not stop.code:  # --help
            text = shown.getvalue()
            for default, shorter in DEFAULTS.items():
                text = text.replace(default, shorter)
            # Of an optional flag the type alone is shown; the columns of help stay aligned.
            text = re.sub(
                r"\{None\}\|(\{\[.*?\]\]\}|\S+)",
                lambda found: found[1].strip("{}").ljust(len(found[0])),
                text,
            )
            text = re.sub(r"\{None,(\S*\})", r"{\1     ", text)
            sys.stdout.write(text.replace(DESCRIPTION, wrap_paragraphs(description), 1))
        raise
    if unknown:
        refuse(explain_unknown(unknown, config_class, words))
    for name in sorted(lists & given.keys()):
        if getattr(config, name) == ():
            refuse(f"--{name} has no value; give one or more, or leave the flag out")
    return config


def with_own_names(words: list[str], config_class: Any) -> list[str]:
    """The words of a command line with the program's own names of SAME_FLAGS."""
    known = {name for cls in classes_of(config_class).values() for name in get_type_hints(cls)}
    own = {}
    for pair in SAME_FLAGS:
        for name, other in (pair, pair[::-1]):
            if name in known and other not in known:
                own[f"--{other}"] = f"--{name}"

    def renamed(word):
        flag, sep, value = word.partition("=")
        return own.get(f"--{flag[2:].replace('-', '_')}", flag) + sep + value

    return [renamed(word) if word.startswith("--") else word for word in words]


def refuse(message: str) -> NoReturn:
    """End the program because of its flags."""
    sys.stderr.write(f"error: {message}; --help lists the flags\n")
    sys.exit(2)


def check_unicode(words: list[str]) -> None:
    """End the program if a word is not valid Unicode."""
    for place, word in enumerate(words):
        try:
            word.encode()
        except UnicodeEncodeError:
            # Python reads a byte FF as U+DCFF.
            shown = re.sub("[\udc80-\udcff]", lambda byte: f"\\x{ord(byte[0]) - 0xDC00:02x}", word)
            shown = shown.encode(errors="backslashreplace").decode()
            before = [] if word.startswith("--") else words[:place]
            flag = next((f"{x} " for x in reversed(before) if x.startswith("--")), "")
            remedy = "type the text again, or rename the file"
            refuse(f"{flag}{shown} is not valid UTF-8; {remedy}")


@contextmanager
def one_line_errors(config_class: Any, words: list[str]) -> Iterator[None]:
    """Context in which errors of tyro, which it frames over several lines, are one line.

    tyro's events are private: versions without them, or with others, print the frame.
    """
    try:
        from tyro._errors import (
            BadValue,
            InstantiationFailure,
            InvalidChoice,
            MissingArgs,
            MissingSubcommand,
            on_parse_error,
        )
    except ImportError:
        yield
        return

    def explain(event):
        match event:
            case MissingArgs(missing_arguments=missing, unrecognized_tokens=unknown):
                flags = " and ".join(given.arg.display_name() for given in missing)
                also = f"; {explain_unknown(unknown, config_class, words)}" if unknown else ""
                refuse(f"{flags} must be given{also}")
            case MissingSubcommand(subcommand_spec=subcommands):
                wrong = f"{words[0]} is not a subcommand; " if words else ""
                refuse(f"{wrong}begin with one of {', '.join(subcommands.parser_from_name)}")
            case InvalidChoice(argument=argument, value=value, choices=choices):
                names = ", ".join(sorted({*choices} - {"None"}))
                refuse(f"{argument.display_name()} {value} is unknown; choose from {names}")
            case BadValue(argument=argument):
                refuse(f"{argument.display_name()} has too few values; write {usage(argument)}")
            case InstantiationFailure(argument=argument, message=message) if argument:
                refuse(explain_value(argument, message))

    def explain_known(event):
        with suppress(AttributeError):  # of an event with other fields
            explain(event)

    with on_parse_error(explain_known):
        yield


def usage(argument: Any) -> str:
    """A flag and the type of its value, such as "--steps INT"; argument: tyro's."""
    kind = re.sub(r"\[/?bold\]", "", argument.lowered.metavar)
    if kind.startswith("{None}|"):  # of an optional flag: {None}|INT, {None}|{FLOAT FLOAT}
        kind = kind.removeprefix("{None}|").strip("{}")
    return f"{argument.display_name()} {kind}"


def explain_value(argument: Any, message: str) -> str:
    """Message for a value of the wrong type; argument, message: of tyro's event."""
    flag, needed = argument.display_name(), usage(argument)
    value = message.rpartition(": ")[2]  # Python says what it could not convert: '9.5', ['1', 'a']
    given = f"{flag} {value}" if value.startswith(("'", '"', "[")) else flag
    numbers = {f"{flag} INT": "a whole number", f"{flag} FLOAT": "a number"}
    if re.search(r"'[^', ]+,[^' ]*'", value) and needed not in numbers:
        return f"{given}: separate values with spaces, not commas"
    if needed in numbers:
        return f"{given} is not {numbers[needed]}"
    return f"{given} does not fit; write {needed}"


def explain_unknown(unknown: list[str], config_class: Any, words: list[str]) -> str:
    """Name words that are neither flags nor values, and flags with similar names.

    Args:
        unknown: some of the words.
        config_class: as for run_main.
        words: the command line.
    """
    classes = classes_of(config_class)
    chosen = [cls for subcommand, cls in classes.items() if words[:1] == [subcommand]]
    hints = {}
    for cls in chosen or classes.values():
        hints |= get_type_hints(cls)
    flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
    if not flags:
        said = " ".join(unknown)
        before = words[: words.index(unknown[0])]
        name = next((word for word in reversed(before) if word.startswith("--")), "")
        name = name.partition("=")[0].removeprefix("--").replace("-", "_")
        hint = hints.get(name)
        switch = name if hint is bool else name.removeprefix("no_")
        if hints.get(switch) is bool:
            return f"{said}: --{name} takes no value; write --{switch} or --no_{switch}"
        if hint in (int, float, Path) or (hint is str and name.endswith(ONE_WORD)):
            return f"{said}: --{name} takes one value"
        return f"{said}: no flag takes this; write a text with spaces in quotation marks"
    known = {}  # the flag by its name with underscores
    for name, hint in hints.items():
        known |= {name: f"--{name}"} | ({f"no_{name}": f"--no_{name}"} if hint is bool else {})
    parts = []
    for flag in flags:
        name = flag.strip("-").replace("-", "_")
        near = [x for x in ALSO_CALLED.get(name, ()) if x in hints]
        near = near or get_close_matches(name, known)
        meant = f" (did you mean {' or '.join(known[name] for name in near)}?)" if near else ""
        parts.append(f"{flag} is unknown{meant}")
    return "; ".join(parts)


def wrap_paragraphs(text: str) -> str:
    """Wrap paragraphs at the terminal's width; indented ones are commands and stay."""
    width = shutil.get_terminal_size().columns
    return "\n\n".join(
        paragraph
        if paragraph.startswith(" ")
        else textwrap.fill(paragraph, width, break_long_words=False, break_on_hyphens=False)
        for paragraph in text.strip().split("\n\n")
    )


def classes_of(config_class: Any) -> dict[str, Any]:
    """{subcommand: dataclass}; {"": dataclass} without subcommands."""
    return config_class if isinstance(config_class, dict) else {"": config_class}


def list_flags(config_class: Any) -> set[str]:
    """Flags with several values."""
    return {
        name
        for cls in classes_of(config_class).values()
        for name, hint in get_type_hints(cls).items()
        if tuple in (get_origin(hint), *map(get_origin, get_args(hint)))
    }


def is_distributed() -> bool:
    """Whether this process has joined others through jax.distributed."""
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized()


def one_line(error: BaseException | str) -> str:
    """An exception's message on one line, or its type; the library's copy is not for script.py."""
    return " ".join(str(error).split()) or type(error).__name__


def with_flags(message: str, config: Any) -> str:
    """Replace arguments in a message by flags: NAME=VALUE by --NAME VALUE, NAME= by --NAME.

    Quoted texts, URLs and paths stay as they are. An unquoted path with a space counts as two
    words: runs/make seed=3 becomes runs/make --seed 3.
    """
    flags = {name: name for name in vars(config)}
    flags |= {ARGUMENTS[name]: name for name in flags.keys() & ARGUMENTS.keys()}

    def flag(found):
        argument, value = found.groups()
        if argument not in flags or value in ("None", "False"):
            return found[0]
        name = flags[argument]
        if value in ("", "True"):
            return f"--{name}"
        if value[0] == "(":  # a tuple
            value = " ".join(word.strip(" '") for word in value.strip("()").split(",") if word)
            return f"--{name} {value}"
        value, given = value.strip("'"), getattr(config, name)
        given = map(str, given if isinstance(given, tuple) else (given,))
        is_given = any(x == value or x.startswith(f"{value}:") for x in given)  # FILE:WEIGHT
        is_path = re.search(r"[/\\]|\.[a-z]", value)
        return found[0] if is_path and not is_given else f"--{name} {value}"

    value = r"'[^']*'|\([^()]*\)|[^\s;]*?(?=[;:,.)]*(?:\s|$))"
    quoted = r"(?<!\w)(?:'[^']*'|\"[^\"]*\")"
    return re.sub(rf"{quoted}|(?<![\w./:=,?&\\-])(\w+(?:\.\w+)?)=({value})", flag, message)


@contextmanager
def messages_with_flags(config: Any) -> Iterator[None]:
    """Context in which logged messages name flags and end the line of a progress bar."""
    from tqdm.contrib.logging import logging_redirect_tqdm  # only scripts need it

    def name_flags(record):
        record.msg, record.args = with_flags(record.getMessage(), config), ()
        return True

    with logging_redirect_tqdm():
        handlers = [*logging.root.handlers]
        for handler in handlers:
            handler.addFilter(name_flags)
        try:
            yield
        finally:
            for handler in handlers:
                handler.removeFilter(name_flags)


def comma_hint(said: str, config: Any) -> str:
    """The remedy for an error about a value that is a list with commas, else "".

    Values with spaces are texts, and NAME:PARAMETER=VALUE,... has its own commas.
    """
    for name, values in vars(config).items():
        for value in map(str, values if isinstance(values, tuple) else ()):
            is_named = f"--{name} {value}" in said or f"{value} does not exist" in said
            if "," in value and not re.search(r"[\s=]", value) and is_named:
                return "; separate several values with spaces, not commas"
    return ""


def is_full_disk(error: BaseException) -> bool:
    """Whether an exception of any library is about a full disk or a used quota."""
    codes = (errno.ENOSPC, errno.EDQUOT)
    if isinstance(error, OSError):
        return error.errno in codes
    return any(os.strerror(code) in str(error) for code in codes)


def free_space(error: Exception, config: Any) -> str:
    """For the error of a full disk: "; PATH is on a disk with N GB free", else "".

    The path is the error's file, else the output in config with the least free space.
    """
    if not is_full_disk(error):
        return ""
    if isinstance(file := getattr(error, "filename", None), str):
        paths = {file: Path(file)}
    else:
        paths = {
            f"--{name} {value}": Path(value).expanduser()
            for name, value in vars(config).items()
            if name in OUTPUT_FLAGS and value and isinstance(value, str | Path)
        }
    free = {
        given: disk_space(path)
        for given, path in paths.items()
        if os.access(nearest_existing(path), os.W_OK)  # not read-only
    }
    if not free:
        return ""
    given = min(free, key=free.get)
    return f"; {given} is on a disk with {in_bytes(free[given])} free; free some space"


def disk_space(path: Path) -> int:
    """Free bytes on the disk of a file or directory, which may not exist."""
    return shutil.disk_usage(nearest_existing(path)).free


def nearest_existing(path: Path) -> Path:
    """The path, or the nearest of its parents that exists, absolute and without `..`."""
    path = path.resolve()
    return next(p for p in (path, *path.parents) if p.exists())


def in_bytes(number: float) -> str:
    """A number of bytes, such as 3.4 GB."""
    unit, name = next((x for x in ((1e9, "GB"), (1e6, "MB")) if number >= x[0]), (1e3, "kB"))
    return f"{number / unit:.3g} {name}"


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
    if not str(directory):
        raise ValueError(f"--{flag} is empty; name a directory")
    if folder.is_file():
        raise ValueError(f"{given} is a file; name a directory")
    check_writable(given, folder)
    if overwrite or not folder.is_dir() or (continues and any(folder.glob(continues))):
        return
    known = [Path(path).resolve() for path in others]
    names = [
        file.name
        for file in sorted(folder.iterdir())
        if not file.name.startswith(".")
        and not any(path.is_relative_to(file.resolve()) for path in known)
    ]
    if names:
        more = f" and {len(names) - 3} more" * (len(names) > 3)
        raise ValueError(
            f"{given} is not empty ({', '.join(names[:3])}{more}); name another directory, or "
            "replace this program's files in it with --overwrite_output_dir"
        )


def check_writable(given: str, directory: Path) -> None:
    """Raise a ValueError if a directory cannot be made or written to; given: --FLAG VALUE."""
    parent = nearest_existing(directory)
    if not (parent.is_dir() and os.access(parent, os.W_OK)):
        raise ValueError(
            f"{given} cannot be written: {parent} is not a directory that you can write to; name "
            "another"
        )


def check_scale(name, value, has_image_scale=True):
    """Raise a ValueError unless a guidance scale is finite and >= 0.

    Args:
        name: of its flag.
        value: of the flag.
        has_image_scale: whether the program has --image_guidance_scale too.
    """
    if not 0 <= value < math.inf:
        off = "--guidance_scale 1" + " --image_guidance_scale 1" * has_image_scale
        raise ValueError(f"--{name} {value} must be 0 or more; {off} switches guidance off")


def check_seed(name, value):
    """Raise a ValueError for a seed that is not a uint32; name: of its flag."""
    if not 0 <= value < 2**32:
        raise ValueError(f"--{name} {value} must be from 0 to {2**32 - 1}")


def check_image_file(path):
    """Raise a ValueError for an image file that cannot be written; nothing is written."""
    if path.is_dir():
        raise ValueError(f"{path} is a directory; name a file")
    if path.suffix.lower() not in IMAGE_EXTENSIONS:
        raise ValueError(
            f"{path} ends in {path.suffix or 'no extension'}; name it "
            f"{' or '.join(IMAGE_EXTENSIONS)}"
        )
    check_writable(str(path), path.parent)


def print_files(paths):
    """Print the first ten files that a program has written, and their number."""
    for path in paths[:10]:
        print(path)
    if len(paths) > 10:
        print(f"... {len(paths)} images")
