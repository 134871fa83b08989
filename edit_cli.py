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

import jax
from PIL import ImageOps
from tqdm import tqdm

from diffusers_flax.command_line import (
    check_image_file,
    check_scale,
    check_seed,
    print_files,
    run_main,
)
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
    note_single_words,
)
from diffusers_flax.generating.masks import (
    check_inputs,
    check_masks,
    finish_image,
    load_mask,
    stretch_mask,
)
from diffusers_flax.generating.models import ModelOptions, Sampling, load_model
from diffusers_flax.generating.previews import preview_files
from diffusers_flax.generating.recipes import changed, recipe_text, with_flags_of_image
from diffusers_flax.generating.resuming import (
    checksum_of,
    id_maker,
    is_finished,
    names_in,
    print_continued,
)
from diffusers_flax.generating.single_files import with_single_files
from diffusers_flax.generating.sizes import load_fitted, result_size, shared_size, stretch
from diffusers_flax.images import IMAGE_FORMATS, save_image, to_pil
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
    mask: tuple[str, ...] | None = None
    mask_feather: int = 0  # pixels inside of the white part, from its border, to fade the edit in
    num_inference_steps: int | None = None  # denoising steps; default: the model's, or 50
    # weight of the instruction, >= 0; default: the model's, or 7.5
    guidance_scale: float | None = None
    image_guidance_scale: float | None = None  # similarity to the input, >= 0; likewise, or 1.5
    negative_prompt: str = ""  # what to avoid
    seed: int = 0  # seed of the noise
    first_index: int = 0  # place of the first edit in a list, on which the noise depends too
    like: Path | None = None  # image of this program or page: its flags, unless given here
    resolution: int | None = None  # pixels, longer side; default: the model's
    exact_size: bool = False  # a program for each size; default: similar shapes share one
    batch_size: int = 1  # images per device at once
    grid: Path | None = None  # image of the first 64 edits: before, after, true edit
    compilation_cache_dir: str = "~/.cache/jax"  # saves programs; "": no cache


@dataclass(frozen=True)
class Config(ProcessFlags, DeviceFlags, PreviewFlags, SamplingFlags, EditFlags):
    """Flags of the script. tyro lists the flags of the last base class first."""


@dataclass(frozen=True)
class Edit:
    """One image to edit."""

    index: int  # place in the list, on which the noise depends
    input: Path
    instruction: str
    output: Path
    mask: Path | None = None  # white where the image may change; None: everywhere
    after: int | None = None  # index of the edit whose output is the input
    truth: Path | None = None  # the true edit, for --grid


def edits_of_flags(inputs, instructions, output, masks=(), first_index=0):
    """Pair inputs, instructions and masks of the command line; returns a list of Edit.

    Args:
        inputs: paths.
        instructions: one per input, or one.
        output: file or directory for one edit, directory for several; None:
            NAME-edited.png next to each input.
        masks: one per input, or one, or none.
        first_index: of the first edit.
    """
    missing = [flag for flag, x in (("--input", inputs), ("--edit", instructions)) if not x]
    if missing:
        raise ValueError(
            f"no {' and no '.join(missing)}; give --input and --edit, or --edits_jsonl"
        )
    if not all(map(str.strip, instructions)):
        raise ValueError('an --edit is empty; say what to change, such as "make it red"')
    for path in inputs:
        if path.is_dir():
            raise ValueError(
                f"--input {path} is a directory; name images, such as {path / '*.png'}"
            )
    if len(instructions) not in (1, len(inputs)):
        raise ValueError(
            f"{len(instructions)} --edit do not fit {len(inputs)} --input; give one per input, "
            "in quotation marks, or one for all"
        )
    note_single_words("edit", instructions)
    instructions = list(instructions) * (len(inputs) // len(instructions))
    if len(masks) not in (0, 1, len(inputs)):
        raise ValueError(
            f"{len(masks)} --mask do not fit {len(inputs)} --input; give one per input, or one for "
            "all"
        )
    masks = list(masks or [None]) * (len(inputs) // max(1, len(masks)))
    if output is None:
        outputs = [path.with_name(f"{path.stem}-edited.png") for path in inputs]
    elif len(inputs) == 1 and not output.is_dir() and (output.suffix or output.is_file()):
        outputs = [output]
    elif output.suffix.lower() in IMAGE_FORMATS or output.is_file():
        raise ValueError(f"--output {output} is one file for {len(inputs)} edits; give a directory")
    else:
        outputs = [output / f"{path.stem}.png" for path in inputs]
    rows = zip(inputs, instructions, outputs, masks)
    return [Edit(i, *row) for i, row in enumerate(rows, first_index)]


def edits_of_jsonl(file, first_index=0):
    """Read a list of edits, see read_edits."""
    return [Edit(i, *row) for i, row in enumerate(read_edits(file), first_index)]


def recipe_of(config, edit):
    """The recipe_text of an edit; config: Config, with its paths as the user wrote them."""
    same = names_in(config, "SAME_IMAGES")
    flags = {name: x for name, x in changed(config).items() if name not in same}
    flags |= {"input": edit.input, "edit": edit.instruction, "seed": config.seed}
    flags |= {"mask": edit.mask} if edit.mask else {}
    flags |= {"first_index": edit.index} if edit.index else {}
    files = {name: flags[name] for name in ("input", "mask") if name in flags}
    return recipe_text(SOFTWARE, flags, files)


def check_outputs(edits, grid):
    """Raise a ValueError for outputs that cannot be written, coincide or overwrite an input."""
    paths = [edit.output for edit in edits] + ([grid] if grid else [])
    for path in paths:
        check_image_file(path)
    written = Counter(path.resolve() for path in paths)
    path, count = written.most_common(1)[0]
    if count > 1:
        raise ValueError(f"{count} images would be written to {path}; give each its own output")
    for edit in edits:
        if edit.after is None and edit.input.resolve() in written:
            raise ValueError(
                f"{edit.input} is an input and would be overwritten; name another output"
            )
        if edit.mask and edit.mask.resolve() in written:
            raise ValueError(f"{edit.mask} is a mask and would be overwritten; name another output")


def before_after_grid(edits, sizes):
    """A PIL image of the first edits: input, result, the true edit if known, and instruction.

    sizes: of the results.
    """
    box = (GRID_IMAGE_SIZE, GRID_IMAGE_SIZE)
    tiles = []
    for edit, size in zip(edits[:GRID_IMAGES], sizes):
        paths = filter(None, (edit.input, edit.output, edit.truth))
        before_after = (load_fitted(path, size) for path in paths)
        images = [ImageOps.contain(image, box) for image in before_after]
        tiles.append(captioned(images, edit.instruction))
    shape = max(tile.width for tile in tiles) / max(tile.height for tile in tiles)
    return tile_grid(tiles, max(1, round(math.sqrt(len(tiles) / shape))), GRID_MARGIN)


def ids_of_edits(edits, sizes, program_sizes, config):
    """The id of each edit, see id_maker; another edit's output as input counts with that id.

    sizes, program_sizes: (width, height) of each result, and of its program.
    """
    make_id, rounds, ids = id_maker(config, config.model), rounds_of(edits), [None] * len(edits)
    for place in sorted(range(len(edits)), key=rounds.__getitem__):
        edit = edits[place]
        ids[place] = make_id(
            instruction=edit.instruction,
            index=edit.index,
            input=checksum_of(edit.input) if edit.after is None else ids[edit.after],
            mask=edit.mask and checksum_of(edit.mask),
            **({} if sizes[place] == program_sizes[place] else {"program": program_sizes[place]}),
        )
    return ids


def load_edit_model(edit_list, checked, preview, layout, config):
    """Load the model.

    Args:
        edit_list: EditList.
        checked: of check_model.
        preview, layout: Preview and Layout, or None.
        config: Config.

    Returns:
        (pipeline, its parameters as NumPy arrays).
    """
    sampling = from_flags(Sampling, config)
    options = dict(dtype=choose_dtype(config.dtype), preview=preview, layout=layout)
    pipeline, params = load_model(
        config.model,
        checked.pipeline_type,
        checked.scheduler,
        config.accelerate,
        from_flags(ModelOptions, config, **options),
        partial(
            plan_edits,
            edit_list=edit_list,
            branches=sampling.branches(checked.pipeline_type),
            vae_tile=config.vae_tile,
        ),
    )
    instructions = [edit.instruction for edit in edit_list.edits]
    pipeline.embeddings.warn_unused([*instructions, config.negative_prompt])
    return pipeline, params


def write_edit(result, edit, size, image_id, given):
    """Write a program's result, NumPy (H, W, 3) in [0, 1], at size (width, height)."""
    original = mask = None
    if edit.mask is not None:
        original, mask = load_fitted(edit.input, size), load_mask(edit.mask, size)
    (image,) = to_pil(result)
    image = finish_image(image, size, original, mask, given.mask_feather)
    save_image(image, edit.output, SOFTWARE, image_id, recipe_of(given, edit))


def run_edits(pipeline, params, edit_list, sizes, ids, config, given):
    """Edit and write all images on the local devices.

    Args:
        pipeline: InstructPix2Pix.
        params: its parameters, NumPy arrays that are moved to the devices.
        edit_list: EditList.
        sizes: (width, height) of each result.
        ids: of ids_of_edits.
        config, given: Config, and with its paths as the user wrote them.
    """
    edits, finished = edit_list.edits, edit_list.finished
    place_params(params, edit_list.devices(pipeline.layout), pipeline.layout)
    clock, todo = DeviceClock(), len(edits) - len(finished)
    size_of, id_of = dict(zip(edits, sizes)), dict(zip(edits, ids))
    is_writer = pipeline.layout is None or pipeline.layout.is_writer
    with tqdm(total=todo, unit="edit") as bar, FileWriter(is_writer) as files:

        def load(edit, program_size, is_masked):
            if edit.after is not None and edit.after not in finished:
                files.wait_for(edits[edit.after].output)
            size, mask = size_of[edit], None
            image = stretch(load_fitted(edit.input, size), program_size)
            if is_masked:
                mask = stretch_mask(load_mask(edit.mask, size), program_size)
            return image, mask

        for batch, images, _ in edit_batches(
            pipeline, params, edit_list, from_flags(Sampling, config), load, bar, clock, IN_FLIGHT
        ):
            check_finite_images(images, f"the edit of {batch[0].input} and others", config.lora)
            for edit, image in zip(batch, images):
                files.write(
                    edit.output,
                    write_edit,
                    image,
                    edit,
                    size_of[edit],
                    id_of[edit],
                    given,
                )
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
    """Raise a ValueError for invalid flags."""
    if config.edits_jsonl and (config.input or config.edit or config.output):
        raise ValueError(
            "--edits_jsonl excludes --input, --edit and --output; give one or the other"
        )
    for name in ("num_inference_steps", "batch_size"):
        if (value := getattr(config, name)) is not None and value < 1:
            raise ValueError(f"--{name} {value} must be at least 1")
    for name in ("guidance_scale", "image_guidance_scale"):
        if (value := getattr(config, name)) is not None:
            check_scale(name, value)
    if config.mask and config.edits_jsonl:
        raise ValueError('--mask is for --input; give "mask" in the rows of --edits_jsonl')
    if config.mask == ():
        raise ValueError("--mask has no value; name an image, or leave the flag out")
    if "" in (config.mask or ()):
        raise ValueError("--mask is empty; name an image, or leave the flag out")
    if config.mask_feather < 0:
        raise ValueError(f"--mask_feather {config.mask_feather} must be 0 or more pixels")
    check_seed("seed", config.seed)
    check_seed("first_index", config.first_index)
    check_scheduler(config.scheduler)


def run(config):
    """Check the flags and images, load the model, edit and write."""
    check_flags(config)
    if config.edits_jsonl:
        edits = edits_of_jsonl(config.edits_jsonl, config.first_index)
    else:
        masks = [Path(name) for name in config.mask or ()]
        edits = edits_of_flags(config.input, config.edit, config.output, masks, config.first_index)
    if config.mask_feather and not any(edit.mask for edit in edits):
        raise ValueError(f"--mask_feather {config.mask_feather} is for --mask; give both or none")
    check_outputs(edits, config.grid)
    layout = layout_of_edits(config, edits)
    use_compilation_cache(config.compilation_cache_dir)
    bar = partial(tqdm, desc="checking images", unit="edit", disable=len(edits) < 100)
    image_sizes = check_inputs(edits, bar)

    given, config = config, with_single_files(config, "model")
    config = with_defaults(config, [config.model], config.lora)
    given = replace(given, **{name: getattr(config, name) for name in USUAL})
    sampling = from_flags(Sampling, config)
    checked = check_model(config.model, config.resolution, sampling)
    sizes = [result_size(size, checked.resolution, checked.factor) for size in image_sizes]
    program_sizes = sizes
    if not config.exact_size:
        program_sizes = [shared_size(size, checked.factor) for size in sizes]
    outputs, inputs, masks = zip(*((edit.output, edit.input, edit.mask) for edit in edits))
    num_steps = count_steps(checked.scheduler, sampling.steps(checked.pipeline_type))
    preview = preview_files(config, outputs, num_steps, [*inputs, *masks, config.grid], sizes)
    edits = check_masks(edits, image_sizes, sizes, config.mask_feather)
    ids = ids_of_edits(edits, sizes, program_sizes, config)
    finished = {i for i, edit in enumerate(edits) if is_finished(edit.output, ids[i], SOFTWARE)}
    finished = {*layout.agree(list(finished))} if layout else finished
    print_continued(len(finished), len(edits))
    if len(finished) < len(edits):
        edit_list = EditList(
            edits,
            program_sizes,
            config.batch_size,
            rounds_of(edits),
            use_masks=True,
            finished=frozenset(finished),
        )
        pipeline, params = load_edit_model(edit_list, checked, preview, layout, config)
        run_edits(pipeline, params, edit_list, sizes, ids, config, given)
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
