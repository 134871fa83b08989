"""Requests for images, from the flags or from the lines of a list.

    requests = requests_of_flags(config)
    requests = requests_of_jsonl(Path("requests.jsonl"), config)

A line of a list is a JSON object whose keys are names of flags, {"prompt": "a red panda", "seed":
3}. Flags that a line does not name are the command's. Paths are relative to the list, or else to
the working directory; "output" is a name in the directory of --output.
"""

import json
from collections import Counter
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Literal, get_args, get_origin, get_type_hints

import numpy as np
from tqdm import tqdm

from diffusers_flax.command_line import check_image_file, check_seed
from diffusers_flax.data.images import load_image
from diffusers_flax.data.lists import find_base, raise_problems, read_objects
from diffusers_flax.generating.flags import check_ranges, from_flags, list_prompts, read_latents
from diffusers_flax.generating.inputs import naming_line
from diffusers_flax.generating.masks import check_inputs, check_masks
from diffusers_flax.generating.models import factor_and_resolution
from diffusers_flax.generating.resuming import (
    checksum_of,
    commit_of,
    continue_images,
    id_maker,
    image_files,
    is_finished,
)
from diffusers_flax.generating.sizes import result_size, shared_size
from diffusers_flax.generating.tasks import task_of
from diffusers_flax.images import IMAGE_FORMATS
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
EXAMPLE = '{"prompt": "a red panda"}'
NAMES = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    Path: "a path",
}


@dataclass(frozen=True)
class RequestFlags:
    """Flags that each line of a list may have, too."""

    negative_prompt: str = ""  # what to avoid
    seed: int = 0  # of the noise of the first image; the next ones have seed + 1, seed + 2, ...
    num_inference_steps: int = 50  # denoising steps
    guidance_scale: float = 7.5  # weight of the prompt; at most 1: no guidance, half the work
    guidance_rescale: float = 0.0  # 0 to 1: reduces the contrast that guidance adds; 0: off
    # how much of --image is made anew, above 0 to 1; default: 0.8, with --mask all
    strength: float | None = None
    width: int | None = None  # pixels; default: the model's, or see --resolution
    height: int | None = None  # pixels; likewise
    # pixels, longer side of an image from --image or --control; default: the model's
    resolution: int | None = None
    mask_feather: int = 0  # pixels inside of the white part, from its border, to fade the image in
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

    prompt: str = ""
    image: Path | None = None  # to start from
    mask: Path | None = None  # white where the image may change
    control: tuple[Path, ...] = ()  # an image for each ControlNet
    latents: Path | None = None  # .npy of the noise to start from, (1, channels, h, w)
    output: Path | None = None  # file name; None: numbered
    timesteps: tuple[int | str, ...] = ()
    eta: float | None = None
    line: int | None = None  # of the list

    after = None  # no image is made from another one, see masks.check_inputs

    @property
    def input(self):
        """The image that the size of the result comes from, or None."""
        return self.image or (self.control[0] if self.control else None)

    @property
    def task(self):
        """See task_of."""
        return task_of(self.image, self.mask, self.control)


def requests_of_flags(config):
    """A list of Request for the flags prompt, image, mask, control, latents and num_images.

    Prompts, images and masks go in pairs: one for each, or one for all.
    """
    prompts = list_prompts(replace(config, num_images=1), 1)
    given = {"prompt": prompts} | {name: list(getattr(config, name)) for name in SEVERAL}
    number = max(map(len, given.values()))
    for name, values in given.items():
        if Path() in values:
            raise ValueError(f"--{name} is empty; name a file")
        if len(values) not in (0, 1, number):
            most = max(given, key=lambda other: len(given[other]))
            raise ValueError(
                f"{len(values)} --{name} do not fit {number} --{most}; give one for each, or one "
                "for all"
            )
    one_of_each = {name: x * (number // len(x)) for name, x in given.items() if x}
    rows = [dict(zip(one_of_each, row)) for row in zip(*one_of_each.values())]
    rows = [row for row in rows for _ in range(config.num_images)]
    plain = from_flags(Request, config, **NOTHING | {"control": config.control})
    check_seed("seed", config.seed)
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
            check_request(request)
            if missing := [path for path in files_read(request) if not path.is_file()]:
                raise ValueError(f"{missing[0]} does not exist; check the path")
            requests.append(request)
        except ValueError as error:
            problems.append((line, str(error)))
    raise_problems(file, problems)
    if not requests:
        raise ValueError(f"{given} is empty; write a JSON object a line, such as {EXAMPLE}")
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
            raise ValueError(
                f"{key} is {json.dumps(value)[:40]}, not {name_of_type(hints[key])}"
            ) from None
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
        for kind in get_args(hint):
            try:
                return value_of_json(kind, value)
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
    kinds = [kind for kind in get_args(hint) if kind not in (NoneType, Ellipsis)] or [hint]
    if get_origin(hint) is Literal:
        return " or ".join(map(str, kinds))
    if get_origin(hint) is tuple:
        return f"{name_of_type(kinds[0])}, or a list"
    return " or ".join(NAMES[kind] for kind in kinds)


def check_images(requests, configs, exact_size):
    """Read all images of requests, to check them and to choose the sizes.

    Args:
        requests: list of Request.
        configs: {component: its config} of the model.
        exact_size: --exact_size.

    Returns:
        (sizes, program sizes): (width, height) of each result, and of its program.

    Raises:
        ValueError: an image, mask or file of latents cannot be read or does not fit.
    """
    bar = partial(tqdm, desc="checking images", unit="image", disable=len(requests) < 100)
    read = {(request.input, request.mask): request for request in requests if request.input}
    shapes = dict(zip(read, check_inputs([*read.values()], bar)))
    resolutions = {request.resolution for request in requests}
    factors = {x: factor_and_resolution(configs, x) for x in resolutions}
    factor, _ = factors[requests[0].resolution]
    side = configs["unet"].get("sample_size") or MODULES["unet"].sample_size
    height, width = (factor * x for x in (side if isinstance(side, list) else (side, side)))
    sizes, program_sizes, checked = [], [], set()
    for request in requests:
        size = request.width or width, request.height or height
        shape = shapes.get((request.input, request.mask))
        if shape and not request.width:
            size = result_size(shape, factors[request.resolution][1], factor)
        is_exact = exact_size or not shape or request.width
        sizes.append(size)
        program_sizes.append(size if is_exact else shared_size(size, factor))
        files = (request.control, request.mask, request.latents, size, request.mask_feather)
        if files not in checked:
            checked.add(files)
            with naming_line(request):
                check_files(request, shape, size, factor, configs)
    return sizes, program_sizes


def check_files(request, shape, size, factor, configs):
    """Raise a ValueError for a mask, control images or latents that do not fit.

    Args:
        request: Request.
        shape, size: (width, height) of its image, or None, and of its result.
        factor, configs: of the model.
    """
    check_controls(request, shape)
    if request.mask:
        check_masks([request], [shape], [size], request.mask_feather)
    if request.latents:
        channels = configs["vae"].get("latent_channels", 4)
        read_latents(request.latents, (1, channels, size[1] // factor, size[0] // factor))
        if (number := len(np.load(request.latents, mmap_mode="r"))) > 1:
            raise ValueError(
                f"--latents {request.latents} has noise for {number} images; write one for each "
                "image, (1, channels, h, w), into a file of its own"
            )


def check_seeds_differ(requests):
    """Raise a ValueError for equal seeds, by which previews find their images."""
    seed, number = Counter(request.seed for request in requests).most_common(1)[0]
    if number > 1:
        raise ValueError(
            f"--preview needs a seed of its own for each image, and {number} have {seed}; leave "
            "--preview out, or change the seeds"
        )


def check_controls(request, shape):
    """Raise a ValueError unless the control images have the shape of the first one.

    shape: (width, height) of the first one.
    """
    for path in request.control[1:]:
        width, height = load_image(path).size
        if abs(width * shape[1] - height * shape[0]) > max(width, height, *shape):
            raise ValueError(
                f"{path} is {width}x{height} pixels (width x height) and {request.control[0]} "
                f"{shape[0]}x{shape[1]}; control images of a result have one aspect ratio"
            )


def output_files(requests, ids, output, software, grid):
    """The files of all images, and the places of those that are not made yet.

    Args:
        requests, ids: Request and id of each image.
        output, grid: flags.
        software: the program's mark.

    Raises:
        ValueError: a file cannot be written, or is not by this program.
    """
    named = {place: output / x.output for place, x in enumerate(requests) if x.output}
    numbered = [place for place in range(len(requests)) if place not in named]
    if named and (output.is_file() or output.suffix.lower() in IMAGE_FORMATS):
        raise ValueError(f"--output {output} is one file; lines with an output need a directory")
    for path in [*named.values(), *filter(None, [grid])]:
        check_image_file(path)
    missing = [i for i, path in named.items() if not is_finished(path, ids[i], software)]
    files = dict(named)
    if numbered:
        found = image_files(output, len(numbered), grid)
        own_ids = [ids[place] for place in numbered]
        found, left = continue_images(found, own_ids, output, software, grid)
        files |= zip(numbered, found)
        missing += [numbered[i] for i in left]
    files = [files[place] for place in range(len(requests))]
    paths = [*files, *filter(None, [grid])]
    written = Counter(path.resolve() for path in paths)
    if repeated := [path for path in paths if written[path.resolve()] > 1]:
        raise ValueError(
            f"{len(repeated)} images would be written to {repeated[0]}; give each its own name, "
            "and none a number"
        )
    if overwritten := [
        path for x in requests for path in files_read(x) if path.resolve() in written
    ]:
        raise ValueError(
            f"{overwritten[0]} is an input and would be overwritten; name another output"
        )
    return files, sorted(missing)


def files_read(request):
    """The files that a Request reads."""
    return [*filter(None, (request.image, request.mask, request.latents)), *request.control]


def maker_of_ids(config):
    """id_maker's function, for all models of the flags."""
    commits = [commit_of(net, file="config.json") for net in config.controlnet]
    commits += [commit_of(config.refiner)] if config.refiner else []
    make_id = id_maker(config, config.model)
    return partial(make_id, commits=commits) if any(commits) else make_id


def identities_of(requests, sizes, program_sizes, make_id):
    """The id of each image; equal requests count how often they came before.

    Args:
        requests: list of Request.
        sizes, program_sizes: of check_images.
        make_id: of maker_of_ids.
    """
    ids, before, checksums = [], Counter(), cache(checksum_of)
    for request, size, program_size in zip(requests, sizes, program_sizes):
        identity = identity_of(request, checksums)
        if size != program_size:
            identity["program"] = program_size
        known = make_id(**identity)
        ids.append(make_id(**identity, repeated=before[known]) if before[known] else known)
        before[known] += 1
    return ids


def identity_of(request, checksum):
    """All that an image depends on of a Request; checksum: function of a file."""
    values = {name: x for name, x in vars(request).items() if name not in ("line", "output")}
    for name in PATHS:
        paths = values[name] if isinstance(values[name], tuple) else filter(None, [values[name]])
        values[name] = [checksum(path) for path in paths]
    is_set = {name: x not in (None, "", (), []) and x is not False for name, x in values.items()}
    return {name: x for name, x in values.items() if is_set[name]}


def check_request(request):
    """Raise a ValueError for values out of range, and for values that have no effect."""
    check_ranges(request, ("num_inference_steps", "width", "height", "resolution"))
    if request.strength is not None and not 0 < request.strength <= 1:
        raise ValueError(
            f"--strength {request.strength:g} must be above 0, which would change nothing, and at "
            "most 1"
        )
    if request.mask_feather < 0:
        raise ValueError(f"--mask_feather {request.mask_feather} must be 0 or more pixels")
    if request.mask and not request.image:
        raise ValueError(f"--mask {request.mask} needs the image that it belongs to; give --image")
    if request.control and request.image:
        raise ValueError(
            f"--control {request.control[0]} excludes --image and --mask: a ControlNet guides what "
            "is made from text; give one or the other"
        )
    check_effects(request)
    if request.output and request.output.suffix.lower() not in IMAGE_FORMATS:
        raise ValueError(f"output {request.output} must end in {', '.join(IMAGE_FORMATS)}")


def without_effect(request):
    """{flag: what it is for} of OF_IMAGES, of flags that have no effect with any value."""
    needed = dict.fromkeys(OF_IMAGES, (request.control, "--control")) | {
        "strength": (request.image, "--image"),
        "resolution": (request.input, "--image or --control; give --width and --height"),
        "mask_feather": (request.mask, "--mask"),
    }
    return {name: other for name, (is_given, other) in needed.items() if not is_given}


def check_effects(request):
    """Raise a ValueError for values that have no effect, or too few or too many values."""
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
