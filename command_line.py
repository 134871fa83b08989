"""What the programs share: flags and their checks, how programs end, the files that they write."""

import errno
import gc
import io
import math
import os
import re
import shutil
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

DESCRIPTION = "DESCRIPTION"  # its place in the help of tyro, which would join its lines
DEFAULTS = {  # in the help, of equal length
    "None)": "none)",
    "(default: )": "(optional) ",
}
IMAGE_EXTENSIONS = (".png", ".jpg", ".jpeg")  # of images that programs write
DEFAULT_PROMPT = "a photograph of a red panda reading a map in a bamboo forest, soft morning light"
DEFAULT_NEGATIVE_PROMPT = "blurry, low quality, drawing, text, watermark"
ALSO_CALLED = {  # name of a flag in other programs: names of such flags here
    **dict.fromkeys(("prompt", "instruction"), ("edit",)),
    **dict.fromkeys(("image", "images", "input_image"), ("input",)),
    **dict.fromkeys(("model", "model_id", "model_path"), ("pretrained_model_name_or_path",)),
    **dict.fromkeys(("data", "data_dir", "dataset_name"), ("train_data_dir",)),
    **dict.fromkeys(("cfg", "cfg_scale", "scale"), ("guidance_scale",)),
    **dict.fromkeys(("resolution", "size"), ("height", "width")),
    "unet": ("unet_model_name_or_path",),
    "pretrained_model_name_or_path": ("model",),
    "steps": ("num_inference_steps", "max_train_steps"),
    "epochs": ("num_train_epochs",),
    "lr": ("learning_rate",),
    "fp16": ("dtype", "mixed_precision"),
}
OUTPUT_FLAGS = (  # for files that a program writes
    "output",
    "output_dir",
    "held_out_dir",
    "image_dir",
    "work_dir",
    "grid",
    "preview",
    "cache_latents",
    "executable_dir",
    "compilation_cache_dir",
)


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
        args: the flags; None: this process's command line.
        interrupted: what Ctrl-C leaves, unless the KeyboardInterrupt says it.
        out_of_memory: what helps against too little device memory; None raises the error.
        explain: the message for an exception, or None.
    """
    from tqdm.contrib.logging import logging_redirect_tqdm  # only scripts need it, as tyro

    if args is None:
        gc.set_threshold(10_000)  # with Python 3.11's 700, a start takes a tenth longer
    config = parse_flags(config_class, description, args)
    try:
        with logging_redirect_tqdm():  # a warning ends the line of a progress bar
            work(config)
        return
    except KeyboardInterrupt as stop:
        code, message = 130, f"interrupted; {one_line(stop) if stop.args else interrupted}"
    except (ValueError, OSError) as error:
        said = with_flags(error, config)
        hint = comma_hint(said, config)
        code, message = 2, f"error: {said}{hint}{free_space(error, config)}"
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

    A mistake of the user ends the program with one line: what is wrong, and what would be right.
    """
    import tyro  # only scripts need it, not the programs' parts that import this file's helpers

    words = sys.argv[1:] if args is None else args
    check_unicode(words)
    for name in list_flags(config_class):
        count = sum(word.partition("=")[0].replace("-", "_") == f"__{name}" for word in words)
        if count > 1:
            refuse(f"--{name} is given {count} times; write all values after one --{name}")
    options = {"description": DESCRIPTION, "use_underscores": True, "return_unknown_args": True}
    shown = io.StringIO()
    try:
        with one_line_errors(config_class, words), redirect_stdout(shown):
            config, unknown = tyro.cli(config_class, args=words, **options)
    except SystemExit as stop:
        if not stop.code:  # --help
            text = shown.getvalue()
            for default, shorter in DEFAULTS.items():
                text = text.replace(default, shorter)
            sys.stdout.write(text.replace(DESCRIPTION, wrap_paragraphs(description), 1))
        raise
    if unknown:
        refuse(explain_unknown(unknown, config_class, words))
    return config


def refuse(message: str) -> NoReturn:
    """End the program because of its flags."""
    sys.stderr.write(f"error: {message}; --help lists the flags\n")
    sys.exit(2)


def check_unicode(words: list[str]) -> None:
    """End the program for a word that is not valid Unicode, such as bytes that are not UTF-8."""
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
    """While it lasts, an error of tyro is one line; tyro itself frames it over several.

    The events that tyro reports errors by are no part of its public interface: in a version
    without them, or with other ones, the frame is printed.
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
                flags = " and ".join(usage(given.arg) for given in missing)
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
    """A flag and the kind of its value, such as "--steps INT"; argument: of tyro."""
    kind = re.sub(r"\[/?bold\]", "", argument.lowered.metavar)
    if kind.startswith("{None}|"):  # of an optional flag: {None}|INT, {None}|{FLOAT FLOAT}
        kind = kind.removeprefix("{None}|").strip("{}")
    return f"{argument.display_name()} {kind}"


def explain_value(argument: Any, message: str) -> str:
    """Say that a flag cannot have its value; argument and message: of tyro's event."""
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
    """Name the words that are neither flags nor values of a flag, and flags with similar names.

    Args:
        unknown: some of the words.
        config_class: as for run_main.
        words: the command line.
    """
    classes = get_args(config_class) or (config_class,)
    chosen = [cls for cls in classes if words[:1] == [cls.__name__.lower()]]  # the subcommand
    hints = {name: hint for cls in chosen or classes for name, hint in get_type_hints(cls).items()}
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
        if hint in (int, float, Path) or (hint is str and name.endswith("_dir")):
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
    """Paragraphs wrapped at the terminal's width; indented ones, commands, stay as they are."""
    width = shutil.get_terminal_size().columns
    return "\n\n".join(
        paragraph
        if paragraph.startswith(" ")
        else textwrap.fill(paragraph, width, break_long_words=False, break_on_hyphens=False)
        for paragraph in text.strip().split("\n\n")
    )


def list_flags(config_class: Any) -> set[str]:
    """The flags of a dataclass, or of a union of them, that take several values."""
    return {
        name
        for cls in get_args(config_class) or (config_class,)
        for name, hint in get_type_hints(cls).items()
        if tuple in (get_origin(hint), *map(get_origin, get_args(hint)))
    }


def is_distributed() -> bool:
    """Whether this process has joined others through jax.distributed."""
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized()


def one_line(error: BaseException | str) -> str:
    """What an exception says, on one line; its type if it says nothing.

    As diffusers_flax.messages.one_line, which script.py must not need.
    """
    return " ".join(str(error).split()) or type(error).__name__


def with_flags(error: Exception, config: Any) -> str:
    """What an exception says, on one line; NAME=VALUE of the library is --NAME VALUE of a flag.

    It must begin a part of the message and have the flag's value, or one of its values: paths and
    texts of the user may have such words too.
    """

    def flag(found):
        start, name, text = found.groups()
        given, text = vars(config).get(name), text.strip("'")
        values = given if isinstance(given, tuple) else (given,)
        if given in (None, "") or given is False:
            return found[0]
        if given is True:
            return f"{start}--{name}" if text == "True" else found[0]
        if text == str(given) or (text[:1] == "(" and values == ("ays",)):  # its timesteps
            return f"{start}--{name} {' '.join(map(str, values))}"
        return f"{start}--{name} {text}" if text in map(str, values) else found[0]

    part = r"(^|: |; | and )(\w+)=(\(.*?\)|\S+?)(?=[\s;:,]|$)"
    return re.sub(part, flag, one_line(error))


def comma_hint(said: str, config: Any) -> str:
    """For an error about a value with commas, of a flag with several: how to separate them.

    Values with spaces are texts, and NAME:PARAMETER=VALUE,... has commas of its own.
    """
    for name, values in vars(config).items():
        for value in map(str, values if isinstance(values, tuple) else ()):
            is_named = f"--{name} {value}" in said or f"{value} does not exist" in said
            if "," in value and not re.search(r"[\s=]", value) and is_named:
                return "; separate several values with spaces, not commas"
    return ""


def is_full_disk(error: BaseException) -> bool:
    """Whether an exception, of any library, says that a disk is full or a quota is used up."""
    codes = (errno.ENOSPC, errno.EDQUOT)
    if isinstance(error, OSError):
        return error.errno in codes
    return any(os.strerror(code) in str(error) for code in codes)


def free_space(error: Exception, config: Any) -> str:
    """For the error of a full disk: "; PATH is on a disk with N GB free", else "".

    The path is the file in the error, else the output in config with the least free space.
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
        if os.access(nearest_existing(path), os.W_OK)  # a read-only disk has no free space
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
    """A number of bytes in words, such as 3.4 GB."""
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
        flag: that names the directory.
        directory: as given.
        overwrite: --overwrite_output_dir, which replaces files of the program and leaves others.
            False refuses a directory with files that are not hidden.
        continues: pattern of the files of an earlier start that the program continues.
        others: paths of other flags, which may be in the directory.
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
    """Raise a ValueError naming the flag as given if a directory cannot be made or written to."""
    parent = nearest_existing(directory)
    if not (parent.is_dir() and os.access(parent, os.W_OK)):
        raise ValueError(
            f"{given} cannot be written: {parent} is not a directory that you can write to; name "
            "another"
        )


@dataclass(frozen=True)
class ImageFlags:
    """What sdxl_single.py and sdxl_single_aot.py make. --help begins with the last base class."""

    # directory, hub id or file of an SDXL model
    pretrained_model_name_or_path: str = "stabilityai/stable-diffusion-xl-base-1.0"
    revision: str | None = None  # branch, tag or commit on the hub
    variant: str | None = None  # variant of the weights' files, e.g. fp16
    # configs of a one-file model: a directory or hub id; default: its family's
    config_name_or_path: str | None = None
    use_ema_weights: bool = False  # of a one-file model: the averages of the UNet's weights
    prompt: tuple[str, ...] = (DEFAULT_PROMPT,)  # one or more texts
    prompts_file: Path | None = None  # one prompt per line, replaces --prompt
    negative_prompt: str = DEFAULT_NEGATIVE_PROMPT  # what to avoid; "": no text
    num_images: int | None = None  # per prompt; default: 1, or one batch if there is one prompt
    seed: int = 33  # seed of the noise
    num_inference_steps: int = 25  # denoising steps
    # timesteps to run instead of --num_inference_steps, for distilled models: 999 749 499 249; or
    # ays, the ten of Align-Your-Steps for the model's family
    timesteps: tuple[int | Literal["ays"], ...] = ()
    eta: float | None = None  # noise per step, 0 to 1, for ddim (default 0) and tcd (default 0.3)
    guidance_scale: float = 5.0  # weight of the prompt; at most 1: no guidance, half the work
    guidance_rescale: float = 0.0  # 0 to 1: reduces the contrast that guidance adds; 0: off
    height: int | None = None  # pixels; default: the model's
    width: int | None = None  # pixels; default: the model's
    scheduler: str | None = None  # ddim, euler, ...; default: the model's own
    # how timesteps are spaced; default: the scheduler's config
    timestep_spacing: Literal["leading", "linspace", "trailing"] | None = None
    # what the UNet predicts; default: the scheduler's config
    prediction_type: Literal["epsilon", "v_prediction", "sample"] | None = None
    unet: str | None = None  # file, directory or hub id of a UNet in place of the model's
    # DISTILLED BASE or DISTILLED BASE:WEIGHT, adds the difference of two UNets to the model's; each
    # is a directory, hub id or file
    unet_delta: tuple[str, ...] = ()
    lora: tuple[str, ...] = ()  # LoRA files or hub ids to fold into the model: FILE or FILE:WEIGHT
    # textual-inversion files or hub ids, whose token prompts may have: FILE or FILE:TOKEN
    embedding: tuple[str, ...] = ()
    # NAME or NAME:PARAMETER=VALUE,...; names: guidance, deepcache, spectrum, tgate, fbcache, tome,
    # int8, taesd; see docs/acceleration.md
    accelerate: tuple[str, ...] = ()


@dataclass(frozen=True)
class PreviewFlags:
    """Previews of the images of sdxl_single.py; its twin has none."""

    # also write a preview of every N-th step, decoded by TAESD, next to each image
    preview: int | None = None
    # directory or hub id of the TAESD of previews; "": as for --accelerate taesd
    preview_decoder: str = ""


@dataclass(frozen=True)
class BatchFlags:
    """How sdxl_single.py and sdxl_single_aot.py make images, and where they write them."""

    latents: Path | None = None  # .npy of initial noise, (images, channels, h, w) of the latents
    batch_size: int = 1  # images per device at once
    dtype: Literal["float32", "bfloat16"] | None = None  # default: float32 on CPU, else bfloat16
    output: Path = Path("sdxl")  # directory; for one image also a file (.png, .jpg)
    grid: Path | None = None  # also write the first 64 images into one file


def check_scale(name, value):
    """Raise a ValueError unless a guidance scale is a number >= 0; name: of its flag."""
    if not 0 <= value < math.inf:
        raise ValueError(
            f"--{name} {value} must be 0 or more; --guidance_scale 1 --image_guidance_scale 1 "
            "switches guidance off"
        )


def check_seed(name, value):
    """Raise a ValueError for a seed that is not a uint32; name: of its flag."""
    if not 0 <= value < 2**32:
        raise ValueError(f"--{name} {value} must be from 0 to {2**32 - 1}")


def check_image_flags(config):
    """Raise a ValueError for a flag of sdxl_single.py or sdxl_single_aot.py out of its range."""
    for name in ("num_images", "num_inference_steps", "batch_size", "height", "width"):
        if (value := getattr(config, name)) is not None and value < 1:
            raise ValueError(f"--{name} {value} must be at least 1")
    if not 0 <= config.guidance_scale < math.inf:
        raise ValueError(f"--guidance_scale {config.guidance_scale} must be 0 or more")
    if not 0 <= config.guidance_rescale <= 1:
        raise ValueError(f"--guidance_rescale {config.guidance_rescale} must be from 0 to 1")
    check_seed("seed", config.seed)


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


def image_files(output, num_images, grid=None):
    """The files to write images to.

    Args:
        output: directory; for one image also a file name with an extension.
        num_images: number of images.
        grid: another image file that will be written, or None.

    Returns:
        Paths; in a directory 000.png, 001.png, ..., numbered on from the existing files.

    Raises:
        ValueError: output is one file for several images; output or the grid cannot be written.
    """
    if grid:
        check_image_file(grid)
    is_folder = output.is_dir() or not (output.suffix or output.is_file())
    if is_one_file := num_images == 1 and not is_folder:
        files = [output]
    elif output.suffix.lower() in IMAGE_EXTENSIONS or output.is_file():
        raise ValueError(
            f"--output {output} is one file for {num_images} images; give a directory, or one "
            "prompt and --num_images 1 to make one image"
        )
    else:
        numbers = [int(file.stem) for file in output.glob("*.png") if file.stem.isdecimal()]
        first = max(numbers, default=-1) + 1
        files = [output / f"{first + i:03}.png" for i in range(num_images)]
    for file in files if is_one_file else files[:1]:  # further files are new, in the same directory
        check_image_file(file)
    return files


def print_files(paths):
    """Print the first ten of the files that a program has written, and how many there are."""
    for path in paths[:10]:
        print(path)
    if len(paths) > 10:
        print(f"... {len(paths)} images")


def print_continued(num_finished, num_images):
    """Say how many images an earlier start of this command has made."""
    if num_finished:
        made = f"{num_finished} of {num_images} image{'s' * (num_images > 1)}"
        print(f"made already by this command: {made}", file=sys.stderr)


def list_prompts(config, per_batch):
    """Each image's prompt.

    Args:
        config: with the flags prompt, prompts_file and num_images.
        per_batch: images of one prompt without num_images.
    """
    if config.prompts_file and config.prompt != type(config).prompt:
        raise ValueError("--prompt and --prompts_file are both given; give one of them")
    prompts = read_prompts(config.prompts_file) if config.prompts_file else list(config.prompt)
    if not prompts:
        raise ValueError("--prompt is empty; give one or more texts, in quotation marks")
    if not config.prompts_file:
        note_single_words("prompt", prompts)
    num_images = config.num_images or (per_batch if len(prompts) == 1 else 1)
    return [prompt for prompt in prompts for _ in range(num_images)]


def note_single_words(flag, texts):
    """Say so if the texts of a flag look like the words of one text without quotation marks."""
    if len(texts) > 2 and all(re.fullmatch(r"[A-Za-z]+[,.]?", text.strip()) for text in texts):
        print(
            f"--{flag} has {len(texts)} texts of one word each; if they are one text, write it in "
            "quotation marks",
            file=sys.stderr,
        )


def read_prompts(file):
    """The lines of a text file that are not empty; raise a ValueError if there are none."""
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompts_file {file} is not UTF-8 text; save it as UTF-8") from error
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"--prompts_file {file} cannot be read: {reason}") from error
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise ValueError(f"--prompts_file {file} has no prompt; write one per line")
    return prompts
