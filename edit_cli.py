"""Edit images with an InstructPix2Pix model, over all devices of this machine.

    python edit_cli.py --model MODEL --input in.jpg --edit "make it red" --output out.png
    python edit_cli.py --model MODEL --input a.jpg b.jpg --edit "make it red" --output edited/
    python edit_cli.py --model MODEL --edits_jsonl edits.jsonl --batch_size 8 --grid grid.png

The last takes lines {"input": "a.jpg", "edit": "make it red", "output": "edited/a.png"}. With the
model of `make demo`, on a CPU:

    python edit_cli.py --model demo/output/model --input demo/output/held_out/chelsea_0.png \\
        --edit "invert the colors" --output inverted.png --resolution 64 \\
        --num_inference_steps 20 --guidance_scale 2 --image_guidance_scale 1.2

Sizes: the EXIF orientation is applied. The longer side becomes --resolution and the aspect ratio is
kept, each side rounded to the nearest multiple of the VAE's factor (8). The image is resized
(Lanczos) to cover that size and cropped evenly on both sides. Transparent parts become white.

The noise of an edit depends on --seed and its index in the list, not on batch size, devices or
other edits: the same command gives the same images on any machine, up to rounding. Images of one
size run in one batch. Each size compiles once, which takes most of the time of a short list;
--compilation_cache_dir saves the programs for the next start. Runs on TPU, GPU and CPU, with
--batch_size images at once on each device.

Source: InstructPix2Pix (arXiv 2211.09800).
"""

import json
import math
import textwrap
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import jax_utils
from PIL import Image, ImageDraw, ImageFont, ImageOps
from tqdm import tqdm

from command_line import run_main
from executables import use_compilation_cache
from images import IMAGE_FORMATS, check_image_file, load_image, save_image
from pipeline_flax_stable_diffusion_instruct_pix2pix import InstructPix2Pix, pixels_per_latent
from pipeline_flax_utils import MODULES, pipeline_class, replace_leaves
from scheduling_flax import SCHEDULERS, make_scheduler, scheduler_from_pretrained

GRID_EDITS = 64  # at most; more cannot be looked at in one image
GRID_IMAGE_SIZE = 256  # pixels, longer side
GRID_MARGIN = 8  # pixels


@dataclass(frozen=True)
class Config:
    """Flags of the script."""

    model: str  # directory or hub id of an InstructPix2Pix pipeline, SD or SDXL
    input: tuple[Path, ...] = ()  # images
    edit: tuple[str, ...] = ()  # instructions: one per image, or one for all
    output: Path | None = (
        None  # image (.png, .jpg); several edits: directory; default: next to input
    )
    edits_jsonl: Path | None = None  # lines {"input", "edit", "output"} instead of the three above
    num_inference_steps: int = 50
    guidance_scale: float = 7.5  # weight of the instruction, >= 0
    image_guidance_scale: float = 1.5  # similarity to the input, >= 0
    negative_prompt: str = ""  # what to avoid
    seed: int = 0
    resolution: int = 512  # pixels, longer side
    scheduler: str | None = None  # ddim, euler, ...; default: the model's own
    batch_size: int = 1  # images per device at once
    dtype: Literal["float32", "bfloat16"] | None = None  # default: float32 on CPU, else bfloat16
    grid: Path | None = None  # image of the first 64 edits, before and after
    compilation_cache_dir: str = "~/.cache/jax"  # saves programs; "": no cache


@dataclass(frozen=True)
class Edit:
    """One image to edit; its noise depends on index, its place in the list."""

    index: int
    input: Path
    instruction: str
    output: Path


def edits_of_flags(inputs, instructions, output):
    """Pair the images and instructions of the command line and name the outputs.

    Args:
        inputs: paths.
        instructions: as many, or one.
        output: file or existing folder for one edit, directory for several; None: next to each,
            NAME-edited.png.

    Returns:
        List of Edit.
    """
    if not inputs or not instructions:
        raise ValueError("no edits; give --input and --edit, or --edits_jsonl")
    if not all(map(str.strip, instructions)):
        raise ValueError('an --edit is empty; say what to change, such as "make it red"')
    if len(instructions) not in (1, len(inputs)):
        raise ValueError(
            f"{len(instructions)} --edit do not fit {len(inputs)} --input; give one per input, "
            "in quotation marks, or one for all"
        )
    instructions = list(instructions) * (len(inputs) // len(instructions))
    if output is None:
        outputs = [path.with_name(f"{path.stem}-edited.png") for path in inputs]
    elif len(inputs) == 1 and not output.is_dir():
        outputs = [output]
    elif output.suffix.lower() in IMAGE_FORMATS or output.is_file():
        raise ValueError(f"--output {output} is one file for {len(inputs)} edits; give a folder")
    else:
        outputs = [output / f"{path.stem}.png" for path in inputs]
    return [Edit(i, *row) for i, row in enumerate(zip(inputs, instructions, outputs))]


def edits_of_jsonl(file):
    """Read a list of edits: one JSON object {"input", "edit", "output"} per line.

    Paths are relative to the working directory; empty lines are skipped.
    """
    edits = []
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--edits_jsonl {file} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            values = [row[key] for key in ("input", "edit", "output")]
        except (json.JSONDecodeError, KeyError, TypeError):
            values = [None]
        if not all(isinstance(value, str) and value.strip() for value in values):
            raise ValueError(
                f'{file}, line {number} is not a JSON object with the texts "input", "edit" and '
                f'"output", none of them empty: {textwrap.shorten(line, 60)}'
            )
        edits.append(Edit(len(edits), Path(values[0]), values[1], Path(values[2])))
    if not edits:
        raise ValueError(f"--edits_jsonl {file} has no edits")
    return edits


def check_outputs(edits, grid):
    """Raise an error for outputs that cannot be written, coincide, or would overwrite an input."""
    paths = [edit.output for edit in edits] + ([grid] if grid else [])
    for path in paths:
        check_image_file(path)
    written = Counter(path.resolve() for path in paths)
    path, count = written.most_common(1)[0]
    if count > 1:
        raise ValueError(f"{count} images would be written to {path}; give each its own output")
    for edit in edits:
        if edit.input.resolve() in written:
            raise ValueError(
                f"{edit.input} is an input and would be overwritten; name another output"
            )


def load_fitted(path, size):
    """The image in a file, scaled to cover size (width, height) and cropped to it evenly."""
    return ImageOps.fit(load_image(path), size, Image.Resampling.LANCZOS)


def edit_size(size, resolution, factor):
    """Width and height at which an image is edited.

    Args:
        size: its (width, height).
        resolution: of the longer side.
        factor: both are multiples of it.

    Returns:
        (width, height), each the nearest multiple of factor, at least one.
    """
    scale = resolution / max(size)
    return tuple(max(1, math.floor(side * scale / factor + 0.5)) * factor for side in size)


def before_after_grid(edits, sizes):
    """An image of the first edits, before and after, each with its instruction below.

    Args:
        edits: list of Edit, their outputs written.
        sizes: (width, height) of each edit.

    Returns:
        PIL image.
    """
    edits = edits[:GRID_EDITS]
    box = (GRID_IMAGE_SIZE, GRID_IMAGE_SIZE)
    font = ImageFont.load_default(14)
    tiles = []
    for edit, size in zip(edits, sizes):
        before = ImageOps.contain(load_fitted(edit.input, size), box)
        after = ImageOps.contain(load_image(edit.output), box)
        text = textwrap.fill(edit.instruction, max(1, 2 * before.width // 7))  # about 7 pixels each
        tile = Image.new("RGB", (2 * before.width, before.height + 20 * (1 + text.count("\n"))))
        tile.paste("white", (0, 0, *tile.size))
        tile.paste(before, (0, 0))
        tile.paste(after, (before.width, 0))
        ImageDraw.Draw(tile).text((0, before.height), text, fill="black", font=font)
        tiles.append(tile)

    columns = max(1, round(math.sqrt(len(tiles) / 2)))  # a tile is about twice as wide as high
    width = max(tile.width for tile in tiles) + GRID_MARGIN
    height = max(tile.height for tile in tiles) + GRID_MARGIN
    rows = math.ceil(len(tiles) / columns)
    grid = Image.new("RGB", (columns * width + GRID_MARGIN, rows * height + GRID_MARGIN), "white")
    for i, tile in enumerate(tiles):
        row, column = divmod(i, columns)
        grid.paste(tile, (GRID_MARGIN + column * width, GRID_MARGIN + row * height))
    return grid


def run_edits(pipeline, params, edits, sizes, config):
    """Edit and write all images, those of one size together, over the local devices.

    The parameters are moved there: afterwards params has no NumPy arrays.

    Args:
        pipeline: InstructPix2Pix.
        params: its parameters, in the dtype to compute in.
        edits: list of Edit.
        sizes: (width, height) of each edit.
        config: Config.
    """
    devices = jax.local_devices()[: len(edits)]
    replace_leaves(lambda x: jax_utils.replicate(x, devices), params)
    # All texts at once, so that warnings come early and once.
    all_prompt_ids = pipeline.prepare_text_inputs([edit.instruction for edit in edits])
    neg_prompt_ids = None
    if config.negative_prompt:  # SDXL distinguishes no text from an empty one
        neg_prompt_ids = pipeline.prepare_text_inputs(config.negative_prompt)
    base_key = jax.random.key(config.seed)
    groups = defaultdict(list)
    for edit, size in zip(edits, sizes):
        groups[size].append(edit)

    with tqdm(total=len(edits), unit="edit") as bar:
        for size, group in groups.items():
            B = min(config.batch_size, math.ceil(len(group) / len(devices)))
            bar.set_description(f"compiling {size[0]}x{size[1]}")
            for start in range(0, len(group), B * len(devices)):
                batch = group[start : start + B * len(devices)]
                padded = batch + batch[-1:] * (B * len(devices) - len(batch))
                _, image = pipeline.prepare_inputs("", [load_fitted(e.input, size) for e in padded])
                indices = np.array([edit.index for edit in padded])
                prompt_ids = all_prompt_ids[indices]
                keys = jax.vmap(jax.random.fold_in, (None, 0))(base_key, indices)
                neg_ids = None
                if neg_prompt_ids is not None:
                    neg_ids = np.broadcast_to(neg_prompt_ids, prompt_ids.shape)
                prompt_ids, image, keys, neg_ids = jax.tree.map(
                    lambda x: x.reshape(len(devices), -1, *x.shape[1:]),
                    (prompt_ids, image, keys, neg_ids),
                )
                images = pipeline(
                    prompt_ids,
                    image,
                    params,
                    keys,
                    config.num_inference_steps,
                    config.guidance_scale,
                    config.image_guidance_scale,
                    neg_prompt_ids=neg_ids,
                    jit=True,
                ).images  # (devices, B, H, W, 3)
                images = np.asarray(images).reshape(-1, *images.shape[2:])[: len(batch)]
                if not np.isfinite(images).all():
                    raise ValueError(
                        f"the edit of {batch[0].input} and others are NaN; try --dtype "
                        "float32, and if that does not help, the model is broken"
                    )
                for edit, edited in zip(batch, pipeline.numpy_to_pil(images)):
                    save_image(edited, edit.output)
                bar.set_description(f"editing {size[0]}x{size[1]}")
                bar.update(len(batch))


def run(config):
    """Check the flags and images, load the model, edit and write."""
    if config.edits_jsonl and (config.input or config.edit or config.output):
        raise ValueError(
            "--edits_jsonl excludes --input, --edit and --output; give one or the other"
        )
    if config.edits_jsonl:
        edits = edits_of_jsonl(config.edits_jsonl)
    else:
        edits = edits_of_flags(config.input, config.edit, config.output)
    for name in ("num_inference_steps", "batch_size"):
        if (value := getattr(config, name)) < 1:
            raise ValueError(f"--{name} {value} must be at least 1")
    for name in ("guidance_scale", "image_guidance_scale"):
        if not 0 <= (value := getattr(config, name)) < math.inf:
            raise ValueError(f"--{name} {value} must be 0 or more; 1 and 1 switch guidance off")
    if not 0 <= config.seed < 2**32:
        raise ValueError(f"--seed {config.seed} must be from 0 to {2**32 - 1}")
    if config.scheduler not in (None, *SCHEDULERS):
        raise ValueError(
            f"--scheduler {config.scheduler} is unknown; choose from {', '.join(SCHEDULERS)}"
        )
    check_outputs(edits, config.grid)
    use_compilation_cache(config.compilation_cache_dir)
    image_sizes = [
        load_image(edit.input).size
        for edit in tqdm(edits, "checking images", unit="edit", disable=len(edits) < 100)
    ]

    pipeline_type = pipeline_class(config.model)
    if not issubclass(pipeline_type, InstructPix2Pix):
        raise ValueError(
            f"--model {config.model} is a {pipeline_type.torch_class_name}, not an InstructPix2Pix "
            "model; train one with flax_train_instruct_pix2pix.py"
        )
    _, configs = pipeline_type.check(config.model)
    factor = pixels_per_latent(configs, config.resolution)
    sizes = [edit_size(size, config.resolution, factor) for size in image_sizes]
    scheduler, state = scheduler_from_pretrained(config.model)
    if config.scheduler:
        scheduler, state = make_scheduler(config.scheduler, scheduler.config)
    scheduler.set_timesteps(
        state, config.num_inference_steps
    )  # raises an error for invalid numbers

    default_dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    dtype = jnp.dtype(config.dtype or default_dtype)
    pipeline, params = pipeline_type.from_pretrained(config.model, dtype=dtype, scheduler=scheduler)
    for name in MODULES.keys() & params.keys():
        replace_leaves(lambda array: np.asarray(array, dtype), params[name])

    run_edits(pipeline, params, edits, sizes, config)
    if config.grid:
        save_image(before_after_grid(edits, sizes), config.grid)
    for path in [edit.output for edit in edits][:10]:
        print(path)
    if len(edits) > 10:
        print(f"... {len(edits)} images")


def main(args=None):
    """Command line."""
    run_main(
        Config,
        __doc__,
        run,
        args,
        interrupted="the images finished so far are in place",
        out_of_memory="lower --batch_size or --resolution, or use --dtype bfloat16",
    )


if __name__ == "__main__":
    main()
