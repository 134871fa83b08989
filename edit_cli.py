"""Edit images with an InstructPix2Pix model, over all devices of this machine.

    python edit_cli.py --model MODEL --input in.jpg --edit "make it red" --output out.png
    python edit_cli.py --model MODEL --input a.jpg b.jpg --edit "make it red" --output edited/
    python edit_cli.py --model MODEL --edits_jsonl edits.jsonl --batch_size 8 --grid grid.png
    python edit_cli.py --model MODEL --input in.png --mask mask.png --edit "make it red"

The list has lines {"input": "a.jpg", "edit": "make it red", "output": "edited/a.png"} with paths
relative to it; docs/data.md has the table of keys. A line may edit the output of another. With a
mask the image changes where the mask is white; all other pixels are the input's at the size of the
result. With the model of `make demo`, on a CPU:

    python edit_cli.py --model demo/output/model --input demo/output/held_out/chelsea_0.png \\
        --edit "invert the colors" --output inverted.png

Sizes: the EXIF orientation is applied. The longer side becomes --resolution, by default the model's
own; the aspect ratio is kept, with each side rounded to the nearest multiple of the VAE's factor.
The image is resized (Lanczos) to cover that size and cropped evenly. Transparent areas become
white. Photographs of similar shapes share a compiled program: the shorter side is scaled to a
multiple of a sixteenth of the longer one, by at most 7% from 256 pixels on, and the result is
scaled back, unless --exact_size.

The noise of an edit depends on --seed and its place in the list, not on batch size, devices or
other edits: the same command gives the same images on any machine, up to rounding. Started again,
it makes the missing images. Images of one program run in one batch. Compilation takes most of the
time of a short list; --compilation_cache_dir saves programs for the next start. Runs on TPU, GPU
and CPU, with --batch_size images at once on each device.

Source: InstructPix2Pix (arXiv 2211.09800); masks, Blended Latent Diffusion (arXiv 2206.02779).
"""

import math
import sys
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import jax
from PIL import ImageOps
from tqdm import tqdm

from diffusers_flax.command_line import AtLeast, Seed, print_files, run_main
from diffusers_flax.compilation_cache import use_compilation_cache
from diffusers_flax.devices.precision import choose_dtype
from diffusers_flax.evaluation.edits import (
    SOFTWARE,
    EditList,
    check_model,
    edit_batches,
    plan_edits,
    read_edits,
)
from diffusers_flax.generating.batches import (
    IN_FLIGHT,
    DeviceClock,
    FileWriter,
    check_finite_images,
    rounds_of,
)
from diffusers_flax.generating.captions import (
    GRID_IMAGE_SIZE,
    GRID_IMAGES,
    GRID_MARGIN,
    captioned,
    tile_grid,
)
from diffusers_flax.generating.defaults import USUAL, with_defaults
from diffusers_flax.generating.flags import (
    DeviceFlags,
    PreviewFlags,
    ProcessFlags,
    SamplingFlags,
    from_flags,
    layout_of_flags,
)
from diffusers_flax.generating.inputs import keys_of
from diffusers_flax.generating.masks import load_mask, stretch_mask
from diffusers_flax.generating.models import ModelOptions, Sampling, load_model
from diffusers_flax.generating.previews import preview_files
from diffusers_flax.generating.recipes import (
    ids_of,
    print_continued,
    with_flags_of_image,
    write_image,
)
from diffusers_flax.generating.requests import (
    EditRequest,
    check_images,
    files_read,
    is_image_file,
    one_for_each,
    output_files,
)
from diffusers_flax.generating.single_files import with_single_files
from diffusers_flax.generating.sizes import load_fitted, stretch
from diffusers_flax.images import save_image
from diffusers_flax.parameters import place_params
from diffusers_flax.pipelines.sampling import count_steps
from diffusers_flax.schedulers.factory import check_scheduler

# Flags of --like that a list replaces.
REPLACED = {"edits_jsonl": ("input", "edit", "mask", "first_index")}


@dataclass(frozen=True)
class EditFlags:
    """What to edit and how."""

    FILES = ("model", "config_name_or_path")
    SAME_IMAGES = ("input", "edit", "mask", "edits_jsonl", "output", "grid", "batch_size")
    SAME_IMAGES += ("first_index", "like", "compilation_cache_dir")

    model: str  # directory, hub id or file of an InstructPix2Pix model, SD or SDXL
    # configs of a one-file model: a directory or hub id; default: its family's
    config_name_or_path: str | None = None
    use_ema_weights: bool = False  # of a one-file model: the averages of the UNet's weights
    input: tuple[Path, ...] = ()  # images
    edit: tuple[str, ...] = ()  # instructions: one per image, or one for all
    # image (.png, .jpg); several edits: a directory; default: next to each input
    output: Path | None = None
    # lines {"input", "edit", "output"}, also "mask", instead of the three above
    edits_jsonl: Path | None = None
    # images, white where an input may change: one per input, or one for all; default: everywhere
    mask: tuple[Path, ...] = ()
    # pixels inside of the white part, from its border, to fade the edit in
    mask_feather: Annotated[int, AtLeast(0)] = 0
    # denoising steps; default: the model's, or 50
    num_inference_steps: Annotated[int, AtLeast(1)] | None = None
    # weight of the instruction; default: the model's, or 7.5
    guidance_scale: Annotated[float, AtLeast(0)] | None = None
    # similarity to the input; likewise, or 1.5
    image_guidance_scale: Annotated[float, AtLeast(0)] | None = None
    negative_prompt: str = ""  # what to avoid
    seed: Seed = 0  # seed of the noise
    # place of the first edit in a list, on which the noise depends too
    first_index: Annotated[int, AtLeast(0)] = 0
    like: Path | None = None  # image of this program or page: its flags, unless given here
    resolution: int | None = None  # pixels, longer side; default: the model's
    exact_size: bool = False  # a program for each size; default: similar shapes share one
    batch_size: Annotated[int, AtLeast(1)] = 1  # images per device at once
    grid: Path | None = None  # image of the first 64 edits: before, after, true edit
    compilation_cache_dir: str = "~/.cache/jax"  # saves programs; "": no cache


@dataclass(frozen=True)
class Config(ProcessFlags, DeviceFlags, PreviewFlags, SamplingFlags, EditFlags):
    """Flags of the script. tyro lists the flags of the last base class first."""


def edits_of_flags(config):
    """A list of EditRequest for the flags input, edit, mask and output."""
    if not (config.input and config.edit):
        raise ValueError("--input and --edit must be given, or --edits_jsonl")
    if not all(map(str.strip, config.edit)):
        raise ValueError('an --edit is empty; say what to change, such as "make it red"')
    given = {name: list(getattr(config, name)) for name in ("input", "edit", "mask")}
    if len(config.input) < len(config.edit):
        raise ValueError(f"{len(config.edit)} --edit do not fit {len(config.input)} --input")
    edits = []
    for i, row in enumerate(one_for_each(given)):
        path, output = row["input"], config.output
        if output is None:
            output = path.with_name(f"{path.stem}-edited.png")
        elif len(config.input) > 1 and is_image_file(output):
            raise ValueError(f"--output {output} is one file for several edits; give a directory")
        elif len(config.input) > 1 or output.is_dir() or not output.suffix:
            output = output / f"{path.stem}.png"
        edits.append(edit_of(config, i, path, row["edit"], output, row.get("mask")))
    return edits


def edit_of(config, place, image, instruction, output, mask=None, after=None, truth=None):
    """The EditRequest of a row of a list, see read_edits; place: in the list, from 0."""
    files = dict(image=image, mask=mask, output=output, truth=truth)
    return EditRequest(
        prompt=instruction,
        seed=config.seed,
        mask_feather=config.mask_feather,
        resolution=config.resolution,
        index=config.first_index + place,
        after=after,
        **files,
    )


def before_after_grid(edits, sizes):
    """A PIL image of the first edits: input, result, the true edit if known, and instruction.

    sizes: of the results.
    """
    box = (GRID_IMAGE_SIZE, GRID_IMAGE_SIZE)
    tiles = []
    for edit, size in zip(edits[:GRID_IMAGES], sizes):
        paths = filter(None, (edit.image, edit.output, edit.truth))
        before_after = (load_fitted(path, size) for path in paths)
        images = [ImageOps.contain(image, box) for image in before_after]
        tiles.append(captioned(images, edit.instruction))
    shape = max(tile.width for tile in tiles) / max(tile.height for tile in tiles)
    return tile_grid(tiles, max(1, round(math.sqrt(len(tiles) / shape))), GRID_MARGIN)


def make_edits(config, given, checked, options, edit_list, sizes, ids):
    """Load the model, edit on the local devices and write the images.

    Args:
        config, given: Config, and with its paths as the user wrote them.
        checked: of check_model.
        options: ModelOptions.
        edit_list: EditList.
        sizes, ids: (width, height) and id of each image.
    """
    edits, finished = edit_list.edits, edit_list.finished
    sampling = from_flags(Sampling, config)
    branches = sampling.branches(checked.pipeline_type)
    pipeline, params = load_model(
        config.model,
        checked.pipeline_type,
        checked.scheduler,
        config.accelerate,
        options,
        partial(plan_edits, edit_list=edit_list, branches=branches, vae_tile=config.vae_tile),
    )
    place_params(params, edit_list.devices(pipeline.layout), pipeline.layout)
    place_of = {edit: place for place, edit in enumerate(edits)}
    clock, todo = DeviceClock(), len(edits) - len(finished)
    is_writer = pipeline.layout is None or pipeline.layout.is_writer
    with tqdm(total=todo, unit="edit") as bar, FileWriter(is_writer) as files:

        def load(edit, program_size, is_masked):
            if edit.after is not None and edit.after not in finished:
                files.wait_for(edits[edit.after].output)
            size = sizes[place_of[edit]]
            image = stretch(load_fitted(edit.image, size), program_size)
            mask = stretch_mask(load_mask(edit.mask, size), program_size) if is_masked else None
            return image, mask

        for batch, images, _ in edit_batches(
            pipeline, params, edit_list, sampling, load, bar, clock, IN_FLIGHT
        ):
            check_finite_images(images, f"the edit of {batch[0].image} and others", config.lora)
            for edit, image in zip(batch, images):
                place = place_of[edit]
                about = edit, sizes[place], edit.output, SOFTWARE, ids[place], given
                files.write(edit.output, write_image, image, *about)
    jax.effects_barrier()  # waits for the previews
    if report := clock.report(todo):
        print(report, file=sys.stderr)


def layout_of_edits(config, edits):
    """The Layout of the flags, with no more groups than edits at once, or None."""
    layout, rounds = layout_of_flags(config), rounds_of(edits)
    if layout is None:
        return None
    if not layout.is_local and any(rounds):
        raise ValueError(
            "--edits_jsonl has edits of the outputs of others, which only process 0 writes; edit "
            "them with a second list, or in one process"
        )
    return layout.first(max(Counter(rounds).values()))


def check_flags(config):
    """Raise a ValueError for flags that do not fit together."""
    of_lines = [name for name in ("input", "edit", "output", "mask") if getattr(config, name)]
    if config.edits_jsonl and of_lines:
        raise ValueError(f"--edits_jsonl excludes --{of_lines[0]}; write it into the lines")
    if config.mask_feather and not (config.mask or config.edits_jsonl):
        raise ValueError(f"--mask_feather {config.mask_feather} is for --mask; give both or none")
    check_scheduler(config.scheduler)


def run(config):
    """Check the flags and images, load the model, edit and write."""
    check_flags(config)
    if config.edits_jsonl:
        rows = enumerate(read_edits(config.edits_jsonl))
        edits = [edit_of(config, place, *row) for place, row in rows]
    else:
        edits = edits_of_flags(config)
    layout = layout_of_edits(config, edits)
    use_compilation_cache(config.compilation_cache_dir)
    given, config = config, with_single_files(config, "model")
    config = with_defaults(config, [config.model], config.lora)
    given = replace(given, **{name: getattr(config, name) for name in USUAL})
    sampling = from_flags(Sampling, config)
    checked = check_model(config.model, config.resolution, sampling)
    _, configs = checked.pipeline_type.check(config.model)
    edits, sizes, program_sizes = check_images(edits, configs, config.exact_size)
    ids = ids_of(SOFTWARE, given, edits, zip(sizes, program_sizes))
    outputs, todo = output_files(edits, ids, None, SOFTWARE, config.grid)
    todo = layout.agree(todo) if layout else todo
    print_continued(len(edits) - len(todo), len(edits))
    num_steps = count_steps(checked.scheduler, sampling.steps(checked.pipeline_type))
    kept = [config.grid, *(path for edit in edits for path in files_read(edit))]
    preview = preview_files(config, outputs, num_steps, kept, sizes, keys_of(edits))
    if todo:
        edit_list = EditList(
            edits,
            program_sizes,
            config.batch_size,
            rounds_of(edits),
            use_masks=True,
            finished=frozenset(range(len(edits))) - {*todo},
        )
        options = dict(dtype=choose_dtype(config.dtype), preview=preview, layout=layout)
        options = from_flags(ModelOptions, config, **options)
        make_edits(config, given, checked, options, edit_list, sizes, ids)
    if layout and not layout.is_writer:
        return
    if config.grid:
        save_image(before_after_grid(edits, sizes), config.grid)
    print_files(outputs)


def main(args=None):
    """Command line."""
    words = with_flags_of_image(sys.argv[1:] if args is None else args, Config, REPLACED)
    if args is None:
        sys.argv[1:] = words
    run_main(
        Config,
        __doc__,
        run,
        args and words,
        interrupted="the images finished so far are in place",
        out_of_memory="lower --batch_size or --resolution, or use --dtype bfloat16",
    )


if __name__ == "__main__":
    main()
