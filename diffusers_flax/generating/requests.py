"""Requests for images, from the flags or from the lines of a list.

    requests = requests_of_flags(config)
    requests = requests_of_jsonl(Path("requests.jsonl"), config)

A line of a list is a JSON object whose keys are names of flags, {"prompt": "a red panda", "seed":
3}. Flags that a line does not name are the command's. Paths are relative to the list, or else to
the working directory; "output" is a name in the directory of --output.
"""

import itertools
import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

import numpy as np
from tqdm import tqdm

from diffusers_flax.command_line import (
    IMAGE_EXTENSIONS,
    Above,
    AtLeast,
    AtMost,
    Between,
    Seed,
    check_image_file,
    check_ranges,
)
from diffusers_flax.data.images import load_image
from diffusers_flax.data.lists import find_base, raise_problems, read_objects
from diffusers_flax.generating.flags import from_flags, nonblank_lines
from diffusers_flax.generating.inputs import naming_line
from diffusers_flax.generating.masks import check_mask
from diffusers_flax.generating.models import factor_and_resolution
from diffusers_flax.generating.recipes import is_finished
from diffusers_flax.generating.sizes import num_loaders, result_size, shared_size
from diffusers_flax.generating.tasks import task_of
from diffusers_flax.images import image_mark
from diffusers_flax.pipelines.base import MODULES

PATHS = ("image", "mask", "control", "latents")  # fields with files to read
SEVERAL = ("image", "mask", "latents")  # flags with a file for each image
# Flags that lines of a list replace.
OF_LINES = ("prompt", "prompts_file", "num_images", "control", *SEVERAL)
# Flags that go with an image that is given, see without_effect.
OF_IMAGES = ("strength", "resolution", "mask_feather", "guess_mode", "control_from")
OF_IMAGES += ("controlnet_conditioning_scale", "control_guidance_start", "control_guidance_end")
# Flags of an image made before that other flags replace, see with_flags_of_image.
REPLACED = {"requests_jsonl": (*OF_LINES, *OF_IMAGES), "prompts_file": ("prompt",)}
NOTHING = dict(prompt="", image=None, mask=None, control=(), latents=None, output=None)
NAMES = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    Path: "a path",
}
Pixels = Annotated[int, AtLeast(1)] | None


@dataclass(frozen=True)
class RequestFlags:
    """Flags that each line of a list may have, too."""

    negative_prompt: str = ""  # what to avoid
    seed: Seed = 0  # of the noise of the first image; the next ones have seed + 1, seed + 2, ...
    num_inference_steps: Annotated[int, AtLeast(1)] = 50  # denoising steps
    # weight of the prompt; at most 1: no guidance, half the work
    guidance_scale: Annotated[float, AtLeast(0)] = 7.5
    # reduces the contrast that guidance adds; 0: off
    guidance_rescale: Annotated[float, Between(0, 1)] = 0.0
    # how much of --image is made anew; default: 0.8, with --mask all
    strength: Annotated[float, Above(0), AtMost(1)] | None = None
    width: Pixels = None  # pixels; default: the model's, or see --resolution
    height: Pixels = None  # pixels; likewise
    # pixels, longer side of an image from --image or --control; default: the model's
    resolution: Pixels = None
    # pixels inside of the white part, from its border, to fade the image in
    mask_feather: Annotated[int, AtLeast(0)] = 0
    # how to make control images from those given, for each ControlNet or for all: canny finds
    # edges; image takes it as it is (default)
    control_from: tuple[Literal["canny", "image"], ...] = ()
    # factor of what a ControlNet adds, for each ControlNet or for all; default: 1
    controlnet_conditioning_scale: tuple[float, ...] = ()
    # fractions of the steps, 0 to 1, between which a ControlNet acts, for each or for all; default:
    # 0 and 1
    control_guidance_start: tuple[float, ...] = ()
    control_guidance_end: tuple[float, ...] = ()
    guess_mode: bool = False  # ControlNets act on the prompt alone, for images without a prompt


@dataclass(frozen=True)
class Request(RequestFlags):
    """One image to make. Fields as flags with these names, of one image."""

    prompt: str = ""  # for an edit the instruction
    image: Path | None = None  # to start from
    mask: Path | None = None  # white where the image may change
    control: tuple[Path, ...] = ()  # an image for each ControlNet
    latents: Path | None = None  # .npy of the noise to start from, (1, channels, h, w)
    output: Path | None = None  # file; None: numbered
    timesteps: tuple[int | str, ...] = ()
    eta: float | None = None
    line: int | None = None  # of the list

    index = after = None  # of edits

    @property
    def input(self):
        """The image that the size of the result comes from, or None."""
        return self.image or (self.control[0] if self.control else None)

    @property
    def instruction(self):
        """The prompt of an edit."""
        return self.prompt

    @property
    def task(self):
        """See task_of."""
        return task_of(self.image, self.mask, self.control)


@dataclass(frozen=True)
class EditRequest(Request):
    """One image to edit."""

    index: int = 0  # place in the list, on which the noise depends
    after: int | None = None  # place of the edit whose output is the image
    truth: Path | None = None  # the true edit, for the grid


# ------------------------------------------------------------ from flags and lines


def one_for_each(given):
    """The values of flags for each image, which have one for each, or one for all.

    Args:
        given: {flag: list of values, one for each or for all, or none}.

    Returns:
        List of {flag: value}, without the flags that have none.
    """
    number = max(map(len, given.values()))
    for name, values in given.items():
        for value in values:
            if isinstance(value, Path) and value.is_dir():  # also an empty one
                raise ValueError(f"--{name} {value} is a directory; name files")
        if len(values) not in (0, 1, number):
            most = max(given, key=lambda other: len(given[other]))
            raise ValueError(
                f"{len(values)} --{name} do not fit {number} --{most}; give one for each, or one "
                "for all, texts in quotation marks"
            )
    columns = {name: x * (number // len(x)) for name, x in given.items() if x}
    return [dict(zip(columns, row)) for row in zip(*columns.values())]


def requests_of_flags(config):
    """A list of Request for the flags prompt, image, mask, control, latents and num_images."""
    prompts = list(config.prompt)
    if file := config.prompts_file:
        if prompts:
            raise ValueError("--prompt and --prompts_file are both given; give one of them")
        prompts = nonblank_lines(f"--prompts_file {file}", file, "prompt")
    if not prompts:
        raise ValueError("--prompt is empty; give one or more texts, in quotation marks")
    given = {"prompt": prompts} | {name: list(getattr(config, name)) for name in SEVERAL}
    rows = [row for row in one_for_each(given) for _ in range(config.num_images)]
    plain = from_flags(Request, config, **NOTHING | {"control": config.control})
    requests = [replace(plain, **row, seed=seed_of(config, i)) for i, row in enumerate(rows)]
    for request in requests:
        check_request(request)
    return requests


def requests_of_jsonl(file, config):
    """A list of Request for the lines of a list, see the module's docstring."""
    given = f"--requests_jsonl {file}"
    plain = from_flags(Request, config, **NOTHING)
    requests, problems = [], []
    for line, content in read_objects(given, file):
        try:
            if isinstance(content, str):
                raise ValueError(content)
            if "prompt" not in content:
                raise ValueError('no "prompt"; give one, which may be empty')
            changes = {"seed": seed_of(config, len(requests))} | parse_line(content, file.parent)
            request = replace(plain, line=line, **changes)
            unused = without_effect(request).keys() - changes  # of the command, for other lines
            request = replace(request, **{name: getattr(Request, name) for name in unused})
            check_ranges(request)
            check_request(request)
            if missing := [path for path in files_read(request) if not path.is_file()]:
                raise ValueError(f"{missing[0]} does not exist; check the path")
            requests.append(request)
        except ValueError as error:
            problems.append((line, str(error)))
    raise_problems(file, problems)
    if not requests:
        raise ValueError(f'{given} is empty; write a JSON object a line: {{"prompt": "a fox"}}')
    return requests


def seed_of(config, place):
    """The seed of an image without one of its own; place: in the list."""
    return (config.seed + place) % 2**32


def parse_line(content, folder):
    """The fields of a Request in a line, a dict; folder: that paths are relative to."""
    hints = get_type_hints(Request)
    del hints["line"]
    changes = {}
    for key, value in content.items():
        if key not in hints:
            near = get_close_matches(key, hints, 1)
            meant = f"did you mean {near[0]}?" if near else f"keys are {', '.join(sorted(hints))}"
            raise ValueError(f"the key {key} is unknown; {meant}")
        try:
            changes[key] = value_of_json(hints[key], value)
        except TypeError:
            shown = json.dumps(value)[:40]
            raise ValueError(f"{key} is {shown}, not {name_of_type(hints[key])}") from None
    for name in PATHS:
        if isinstance(path := changes.get(name), tuple):
            changes[name] = tuple(find_base(str(x), folder) / x for x in path)
        elif path is not None:
            changes[name] = find_base(str(path), folder) / path
    if (name := changes.get("output")) and (name.name != str(name)):
        raise ValueError(f"output is {name}; write a file name, which goes to --output")
    return changes


def value_of_json(hint, value):
    """A value of JSON as a field of a type; raises a TypeError if it is of another type."""
    if isinstance(hint, UnionType) or get_origin(hint) not in (None, tuple, Literal):
        for option in get_args(hint):
            try:
                return value_of_json(option, value)
            except TypeError:
                pass
        raise TypeError
    if get_origin(hint) is tuple:
        values = value if isinstance(value, list) else [value]
        return tuple(value_of_json(get_args(hint)[0], x) for x in values)
    if get_origin(hint) is Literal and value in get_args(hint):
        return value
    if hint is Path and isinstance(value, str) and value and "\0" not in value:
        return Path(value)
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise TypeError
    return value


def name_of_type(hint):
    """A type for an error."""
    options = [x for x in get_args(hint) if x not in (NoneType, Ellipsis)] or [hint]
    if get_origin(hint) is Literal:
        return " or ".join(map(str, options))
    if get_origin(hint) is tuple:
        return f"{name_of_type(options[0])}, or a list"
    return " or ".join(NAMES[x] for x in options)


# ------------------------------------------------------------ checks without a model


def check_request(request):
    """Raise a ValueError for values that do not fit together, or have no effect."""
    if request.mask and not request.image:
        raise ValueError(f"--mask {request.mask} needs the image that it belongs to; give --image")
    if request.control and request.image:
        raise ValueError(
            f"--control {request.control[0]} excludes --image and --mask: a ControlNet guides what "
            "is made from text; give one or the other"
        )
    unused = without_effect(request)
    for name in OF_IMAGES:
        value = getattr(request, name)
        if value and name in unused:
            shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
            raise ValueError(f"--{name} {shown} is for {unused[name]}")
        if isinstance(value, tuple) and len(value) not in (0, 1, len(request.control)):
            raise ValueError(
                f"{len(value)} --{name} do not fit {len(request.control)} --control; give one for "
                "each, or one for all"
            )
    sides = [getattr(request, name) is not None for name in ("width", "height", "resolution")]
    if request.input and (sides[0] != sides[1] or all(sides)):
        raise ValueError(
            f"{request.input} gives the shape of the result; with it take --resolution alone, or "
            "--width and --height, to which it is cropped"
        )


def without_effect(request):
    """{flag: what it is for} of OF_IMAGES, of flags that have no effect with any value."""
    needed = dict.fromkeys(OF_IMAGES, (request.control, "--control")) | {
        "strength": (request.image, "--image"),
        "resolution": (request.input, "--image or --control; give --width and --height"),
        "mask_feather": (request.mask, "--mask"),
    }
    return {name: other for name, (is_given, other) in needed.items() if not is_given}


def files_read(request):
    """The files that a Request reads, without the output of another one."""
    image = request.image if request.after is None else None
    return [*filter(None, (image, request.mask, request.latents)), *request.control]


# ------------------------------------------------------------ sizes


def check_images(requests, configs, exact_size):
    """Read all images of requests, to check them and to choose the sizes.

    Args:
        requests: list of Request.
        configs: {component: its config} of the model.
        exact_size: --exact_size.

    Returns:
        (requests, without the masks of edits that are all white; sizes; program sizes): (width,
        height) of each result, and of its program.

    Raises:
        ValueError: an image, mask or file of latents cannot be read or does not fit.
    """
    shapes = shapes_of_inputs(requests)
    factors = {x: factor_and_resolution(configs, x) for x in {x.resolution for x in requests}}
    factor, _ = factors[requests[0].resolution]
    side = configs["unet"].get("sample_size") or MODULES["unet"].sample_size
    height, width = (factor * x for x in (side if isinstance(side, list) else (side, side)))
    checked, sizes, program_sizes = [], [], []
    check = cache(partial(check_files, factor=factor, configs=configs))
    for request, shape in zip(requests, shapes):
        size = request.width or width, request.height or height
        if shape and not request.width:
            size = result_size(shape, factors[request.resolution][1], factor)
        is_exact = exact_size or not shape or request.width
        sizes.append(size)
        program_sizes.append(size if is_exact else shared_size(size, factor))
        plain = replace(request, prompt="", negative_prompt="", seed=0, output=None, line=None)
        with naming_line(request):
            is_white = check(plain, shape, size)
        is_needless = is_white and request.index is not None
        checked.append(replace(request, mask=None) if is_needless else request)
    return checked, sizes, program_sizes


def shapes_of_inputs(requests):
    """(width, height) of the image of each request, of the first of a chain of edits; or None."""
    files = list(dict.fromkeys(x.input for x in requests if x.input and x.after is None))
    with ThreadPoolExecutor(num_loaders()) as loaders:
        found = loaders.map(lambda file: load_image(file).size, files)
        disable = len(files) < 100
        sizes = dict(zip(files, tqdm(found, "checking images", len(files), disable=disable)))

    def first(request):
        while request.after is not None:
            request = requests[request.after]
        return request

    return [sizes.get(first(request).input) for request in requests]


def check_files(request, shape, size, factor, configs):
    """Raise a ValueError for a mask, control images or latents that do not fit.

    Args:
        request: Request.
        shape, size: (width, height) of its image, or None, and of its result.
        factor, configs: of the model.

    Returns:
        Whether there is a mask and all of it is white.
    """
    for path in request.control[1:]:
        width, height = load_image(path).size
        if abs(width * shape[1] - height * shape[0]) > max(width, height, *shape):
            raise ValueError(
                f"{path} is {width}x{height} pixels (width x height) and {request.control[0]} "
                f"{shape[0]}x{shape[1]}; control images of a result have one aspect ratio"
            )
    if request.latents:
        channels = configs["vae"].get("latent_channels", 4)
        check_latents(request.latents, (1, channels, size[1] // factor, size[0] // factor))
    return bool(request.mask and check_mask(request, shape, size).getextrema()[0])


def check_latents(file, shape):
    """Raise a ValueError unless a .npy file has noise of a shape."""
    given = f"--latents {file}"
    try:
        latents = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{given} cannot be read as a .npy file: {error}") from error
    if getattr(latents, "shape", None) != shape or not np.isrealobj(latents):
        found = getattr(latents, "shape", "several arrays")
        raise ValueError(f"{given} has {found}, an image needs {shape} real numbers")
    if not np.isfinite(latents).all():
        raise ValueError(f"{given} has numbers that are not finite; make it again without them")


def check_seeds_differ(requests):
    """Raise a ValueError for equal seeds, by which previews find their images."""
    seed, number = Counter(request.seed for request in requests).most_common(1)[0]
    if number > 1:
        raise ValueError(
            f"--preview needs a seed of its own for each image, and {number} have {seed}; leave "
            "--preview out, or change the seeds"
        )


# ------------------------------------------------------------ outputs


def output_files(requests, ids, output, software, grid):
    """The files of all images, and the places of those that are not made yet.

    Args:
        requests, ids: Request and id of each image; requests without a file get numbered ones.
        output: directory of numbered images; for one image also a file.
        software: the program's mark.
        grid: file of the grid, or None.

    Raises:
        ValueError: a file cannot be written, is not by this program, or is read or written twice.
    """
    files = [request.output for request in requests]
    if files == [None] and not output.is_dir() and (output.suffix or output.is_file()):
        files = [output]
    elif None in files:
        if is_image_file(output):
            number = len(files)
            raise ValueError(f"--output {output} is one file for {number} images; give a directory")
        places = [place for place, file in enumerate(files) if file is None]
        for place, file in zip(places, numbered_files(output, [ids[i] for i in places])):
            files[place] = file
    written = [*files, *filter(None, [grid])]
    for path in written:
        check_image_file(path)
    resolved = Counter(path.resolve() for path in written)
    for path in written:
        if (number := resolved[path.resolve()]) > 1:
            raise ValueError(f"{number} images would be written to {path}; give each its own name")
    for path in itertools.chain(*map(files_read, requests)):
        if path.resolve() in resolved:
            raise ValueError(f"{path} is an input and would be overwritten; name another output")
    return files, [i for i, file in enumerate(files) if not is_finished(file, ids[i], software)]


def is_image_file(output):
    """Whether --output names a file, not a directory."""
    return output.is_file() or (output.suffix.lower() in IMAGE_EXTENSIONS and not output.is_dir())


def numbered_files(folder, ids):
    """The files 000.png, 001.png, ... of images in a directory, also of those that are made.

    The numbers follow those of other images; an interrupted run goes on with its own.
    """
    numbers = {int(x.stem): x for x in sorted(folder.glob("*.png")) if x.stem.isdecimal()}
    number_of = {image_mark(file)[1]: number for number, file in reversed(numbers.items())}
    own = [number_of[image_id] for image_id in ids if image_id in number_of]
    first = min(own) if own else max(numbers, default=-1) + 1
    free = (number for number in itertools.count(first) if number not in numbers)
    return [
        numbers[number_of[x]] if x in number_of else folder / f"{next(free):03}.png" for x in ids
    ]
