"""Requests for images, from the flags or from the lines of a list; their sizes and files.

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
from functools import cache
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

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
from diffusers_flax.data.lists import find_base, raise_problems, read_list, read_objects
from diffusers_flax.generating.flags import from_flags, nonblank_lines
from diffusers_flax.generating.models import EDIT, factor_and_resolution, task_of
from diffusers_flax.generating.sizes import NUM_LOADERS, check_mask, result_size, shared_size
from diffusers_flax.images import image_mark

SEVERAL = ("image", "mask", "latents")  # flags with a file for each image
# Flags that have no effect without another one.
NEEDS = dict.fromkeys(("strength", "mask"), "image") | {"mask_feather": "mask"}
NEEDS |= {"resolution": "input"}
NEEDS |= dict.fromkeys(
    (
        *("guess_mode", "control_from", "controlnet_conditioning_scale"),
        *("control_guidance_start", "control_guidance_end"),
    ),
    "control",
)
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
class ListedFlags(RequestFlags):
    """The keys of lines of a list. Fields as flags with these names, of one image."""

    prompt: str = ""  # for an edit the instruction
    image: Path | None = None  # to start from
    mask: Path | None = None  # white where the image may change
    control: tuple[Path, ...] = ()  # an image for each ControlNet
    latents: Path | None = None  # .npy of the noise to start from, (1, channels, h, w)
    output: Path | None = None  # file; None: numbered
    timesteps: tuple[int | str, ...] = ()
    eta: float | None = None
    guidance: str | None = None


@dataclass(frozen=True)
class Request(ListedFlags):
    """One image to make."""

    image_guidance_scale: float | None = None  # of edits; None: no edit
    index: int = 0  # of an edit: place in the list, on which the noise depends
    after: int | None = None  # place of the edit whose output is the image
    reference: Path | None = None  # of an edit: a second image that the model sees
    truth: Path | None = None  # the true edit, for the grid

    @property
    def input(self):
        """The image that the size of the result comes from, or None."""
        return self.image or (self.control[0] if self.control else None)

    @property
    def task(self):
        """A key of models.TASKS."""
        is_edit = self.image_guidance_scale is not None
        return EDIT if is_edit else task_of(self.image, self.mask, self.control)


# ------------------------------------------------------------ from flags and lines


def one_for_each(given):
    """The values of flags for each image, which have one for each, or one for all.

    Args:
        given: {flag: values, one for each or for all, or none}.

    Returns:
        List of {flag: value}, without the flags that have none.
    """
    most = max(given, key=lambda name: len(given[name]))
    number = len(given[most])
    for name, values in given.items():
        if len(values) not in (0, 1, number):
            raise ValueError(
                f"{len(values)} --{name} do not fit {number} --{most}; give one for each, or one "
                "for all, texts in quotation marks"
            )
    columns = {name: x * (number // len(x)) for name, x in given.items() if x}
    return [dict(zip(columns, row)) for row in zip(*columns.values())]


def requests_of_flags(config):
    """A list of Request for the flags prompt, image, mask, control, latents and num_images."""
    prompts = config.prompt
    if file := config.prompts_file:
        if prompts:
            raise ValueError("--prompt and --prompts_file are both given; give one of them")
        prompts = nonblank_lines(file)
    if not prompts:
        raise ValueError("--prompt is empty; give one or more texts, in quotation marks")
    given = {"prompt": prompts} | {name: getattr(config, name) for name in SEVERAL}
    rows = [row for row in one_for_each(given) for _ in range(config.num_images)]
    requests, nothing = [], dict.fromkeys((*SEVERAL, "output"))
    for place, row in enumerate(rows):
        changes = nothing | row | {"seed": (config.seed + place) % 2**32}
        requests.append(checked_request(from_flags(Request, config, **changes), NEEDS))
    return requests


def requests_of_jsonl(file, config):
    """A list of Request for the lines of a list, see the module's docstring."""
    given = f"--requests_jsonl {file}"
    nothing = dict.fromkeys((*SEVERAL, "output")) | {"prompt": "", "control": ()}
    requests, problems = [], []
    for line, content in read_objects(given, file):
        try:
            if isinstance(content, str):
                raise ValueError(content)
            if "prompt" not in content:
                raise ValueError('no "prompt"; give one, which may be empty')
            own = parse_line(content, file.parent)
            changes = nothing | {"seed": (config.seed + len(requests)) % 2**32} | own
            request = checked_request(from_flags(Request, config, **changes), own)
            check_ranges(request)
            if missing := [path for path in files_read(request) if not path.is_file()]:
                raise ValueError(f"{missing[0]} does not exist; check the path")
            requests.append(request)
        except ValueError as error:
            problems.append((line, str(error)))
    raise_problems(file, problems)
    if not requests:
        raise ValueError(f'{given} is empty; write a JSON object a line: {{"prompt": "a fox"}}')
    return requests


def read_edits(file, flag="edits_jsonl"):
    """Read a list of edits, see data/lists.py; flag: name of the file's flag, for errors.

    Returns:
        List of {field of Request: value}: image, prompt, output, mask, reference, after and truth.
    """
    names, optional = ("original_image", "edit_prompt", "output"), ("mask", "reference_image")
    rows = read_list(f"--{flag} {file}", file, names, (*optional, "edited_image"))
    places = {row["line"]: place for place, row in enumerate(rows)}
    return [
        {
            "image": row["original_image"],
            "prompt": row["edit_prompt"],
            "output": row["output"],
            "mask": row["mask"],
            "reference": row["reference_image"],
            "after": places.get(row["after"]),
            "truth": row["edited_image"],
        }
        for row in rows
    ]


def parse_line(content, folder):
    """The fields of ListedFlags in a line, a dict; folder: that paths are relative to."""
    hints, changes = get_type_hints(ListedFlags), {}
    for key, value in content.items():
        if key not in hints:
            raise ValueError(f"the key {key} is unknown; keys are {', '.join(sorted(hints))}")
        try:
            base = Path() if key == "output" else folder
            changes[key] = value_of_json(hints[key], value, base)
        except TypeError:
            raise ValueError(f"{key} cannot be {json.dumps(value)[:40]}") from None
    if (name := changes.get("output")) and name.name != str(name):
        raise ValueError(f"output is {name}; write a file name, which goes to --output")
    return changes


def value_of_json(hint, value, folder):
    """A value of JSON as a field of a type, or a TypeError; folder: that paths are relative to."""
    options = get_args(hint) or (hint,)
    if get_origin(hint) is tuple:
        values = value if isinstance(value, list) else [value]
        return tuple(value_of_json(options[0], x, folder) for x in values)
    if Path in options and isinstance(value, str) and value:
        return find_base(value, folder) / value
    if float in options and type(value) is int:
        return float(value)
    if type(value) in options or value in options:
        return value
    raise TypeError


def checked_request(request, named):
    """A Request without values of NEEDS that have no effect.

    Args:
        request: Request.
        named: flags that must have an effect; others are for other images of the command.

    Raises:
        ValueError: values do not fit together.
    """
    unused = [name for name, other in NEEDS.items() if not getattr(request, other)]
    for name in unused:
        if name in named and getattr(request, name):
            other = "image or --control" if name == "resolution" else NEEDS[name]
            raise ValueError(f"--{name} is for --{other}; give both or none")
    if request.control and request.image:
        raise ValueError(
            f"--control {request.control[0]} excludes --image and --mask: a ControlNet guides what "
            "is made from text; give one or the other"
        )
    sides = [bool(getattr(request, name)) for name in ("width", "height", "resolution")]
    if request.input and (sides[0] != sides[1] or all(sides)):
        raise ValueError(
            f"{request.input} gives the shape of the result; with it take --resolution alone, or "
            "--width and --height, to which it is cropped"
        )
    return replace(request, **{name: getattr(Request, name) for name in unused})


def files_read(request):
    """The files that a Request reads, without the output of another one."""
    image = request.image if request.after is None else None
    files = image, request.mask, request.latents, request.reference
    return [*filter(None, files), *request.control]


# ------------------------------------------------------------ sizes


def choose_sizes(requests, pipeline, exact_size):
    """The sizes of images, (width, height); reads all images, also masks, to check them.

    Args:
        requests: list of Request.
        pipeline: of the model, without weights.
        exact_size: --exact_size.

    Returns:
        (sizes of the results, sizes of their programs).
    """
    files = [x.input for x in requests if x.input and x.after is None]
    files = list(dict.fromkeys(files + [x.reference for x in requests if x.reference]))
    with ThreadPoolExecutor(NUM_LOADERS) as loaders:
        shapes = dict(zip(files, loaders.map(lambda file: load_image(file).size, files)))
    configs = {"unet": pipeline.unet.config, "vae": pipeline.vae.config}
    sizes, program_sizes, check = [], [], cache(check_mask)
    for request in requests:
        first = request
        while first.after is not None:
            first = requests[first.after]
        shape, is_exact = shapes.get(first.input), exact_size or request.width
        size = pipeline.image_size(request.height, request.width)[::-1]
        if shape and not request.width:
            factor, resolution = factor_and_resolution(configs, request.resolution)
            size = result_size(shape, resolution, factor)
        sizes.append(size)
        program_sizes.append(size if is_exact or not shape else shared_size(size, factor))
        if request.mask:
            # An edit of another's output may have a mask of the output's size.
            check(request.mask, (shape, shape if request.after is None else size), size)
    return sizes, program_sizes


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
    if None in files and (is_image_file(output) or (len(files) == 1 and output.suffix)):
        if len(files) > 1:
            raise ValueError(
                f"--output {output} is one file for {len(files)} images; give a directory"
            )
        files = [output]
    elif None in files:
        # 000.png, 001.png, ...; made ones keep theirs.
        found = sorted((x for x in output.glob("*.png") if x.stem.isdecimal()), reverse=True)
        made = {image_mark(file)[1]: file for file in found}
        numbered = (output / f"{number:03}.png" for number in itertools.count())
        free = (file for file in numbered if file not in found)
        files = [file or made.get(image_id) or next(free) for file, image_id in zip(files, ids)]
    written = [*files, *filter(None, [grid])]
    for path in written:
        check_image_file(path)
    resolved = Counter(path.resolve() for path in written)
    path, number = resolved.most_common(1)[0]
    if number > 1:
        raise ValueError(f"{number} images would be written to {path}; give each its own name")
    for path in itertools.chain(*map(files_read, requests)):
        if path.resolve() in resolved:
            raise ValueError(f"{path} is an input and would be overwritten; name another output")
    marks = [image_mark(file) if file.exists() else (software, None) for file in files]
    for file, (by, _) in zip(files, marks):
        if by != software:
            raise ValueError(
                f"{file} exists, is not by {software} and would be overwritten; name another "
                "output, or delete the file"
            )
    return files, [place for place, mark in enumerate(marks) if mark[1] != ids[place]]


def is_image_file(output):
    """Whether --output names a file, not a directory."""
    return output.is_file() or (output.suffix.lower() in IMAGE_EXTENSIONS and not output.is_dir())
