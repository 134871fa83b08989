"""Edit images with an InstructPix2Pix model, over all devices of this machine.

    python edit_cli.py --model MODEL --input in.jpg --edit "make it red" --output out.png
    python edit_cli.py --model MODEL --input a.jpg b.jpg --edit "make it red" --output edited/
    python edit_cli.py --model MODEL --edits_jsonl edits.jsonl --batch_size 8 --grid grid.png
    python edit_cli.py --model MODEL --input in.png --mask mask.png --edit "make it red"
    python edit_cli.py --model MODEL --input me.png --reference hat.png --edit "put this hat on him"

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
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from PIL import ImageOps

from diffusers_flax.command_line import AtLeast, Seed, print_files, run_main
from diffusers_flax.generating.captions import (
    GRID_IMAGE_SIZE,
    GRID_IMAGES,
    GRID_MARGIN,
    captioned,
    tile_grid,
)
from diffusers_flax.generating.flags import (
    DeviceFlags,
    PreviewFlags,
    ProcessFlags,
    SamplingFlags,
    from_flags,
    with_defaults,
    with_single_files,
)
from diffusers_flax.generating.recipes import with_flags_of_image
from diffusers_flax.generating.requests import (
    Request,
    checked_request,
    is_image_file,
    one_for_each,
    read_edits,
)
from diffusers_flax.generating.runner import make_files
from diffusers_flax.generating.sizes import load_fitted
from diffusers_flax.images import save_image
from diffusers_flax.schedulers.factory import check_scheduler

# Messages of run_main
INTERRUPTED = "the images finished so far are in place"
LESS_MEMORY = "lower --batch_size or --resolution, or use --dtype bfloat16"


@dataclass(frozen=True)
class EditFlags:
    """What to edit and how."""

    model: str  # directory, hub id or file of an InstructPix2Pix model, SD or SDXL
    # configs of a one-file model: a directory or hub id; default: its family's
    config_name_or_path: str | None = None
    use_ema_weights: bool = False  # of a one-file model: the averages of the UNet's weights
    input: tuple[Path, ...] = ()  # images
    edit: tuple[str, ...] = ()  # instructions: one per image, or one for all
    # image (.png, .jpg); several edits: a directory; default: next to each input
    output: Path | None = None
    # lines {"input", "edit", "output"}, also "mask" and "reference", instead of these flags
    edits_jsonl: Path | None = None
    # images, white where an input may change: one per input, or one for all; default: everywhere
    mask: tuple[Path, ...] = ()
    # images that a model with 12 input channels sees too: one per input, or one for all
    reference: tuple[Path, ...] = ()
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
    # image of the first 64 edits: before, reference, after, true edit
    grid: Path | None = None
    compilation_cache_dir: str = "~/.cache/jax"  # saves programs; "": no cache


@dataclass(frozen=True)
class Config(ProcessFlags, DeviceFlags, PreviewFlags, SamplingFlags, EditFlags):
    """Flags of the script. tyro lists the flags of the last base class first."""


def edits_of_flags(config):
    """The edits of the flags input, edit, mask, reference and output, as of read_edits."""
    if not (config.input and config.edit and all(map(str.strip, config.edit))):
        raise ValueError("--input and --edit must be given, or --edits_jsonl")
    names = ("input", "edit", "mask", "reference")
    given = {name: getattr(config, name) for name in names}
    edits = []
    for row in one_for_each(given):
        path, output = row["input"], config.output
        if output is None:
            output = path.with_name(f"{path.stem}-edited.png")
        elif len(config.input) > 1 and is_image_file(output):
            raise ValueError(f"--output {output} is one file for several edits; give a directory")
        elif len(config.input) > 1 or output.is_dir() or not output.suffix:
            output = output / f"{path.stem}.png"
        files = {"image": path, "mask": row.get("mask"), "reference": row.get("reference")}
        edits.append(files | {"prompt": row["edit"], "output": output})
    return edits


def before_after_grid(edits, sizes):
    """A PIL image of the first edits: input, reference, result, true edit, and instruction.

    sizes: of the results.
    """
    box = (GRID_IMAGE_SIZE, GRID_IMAGE_SIZE)
    tiles = []
    for edit, size in zip(edits[:GRID_IMAGES], sizes):
        paths = filter(None, (edit.image, edit.reference, edit.output, edit.truth))
        before_after = (load_fitted(path, size) for path in paths)
        images = [ImageOps.contain(image, box) for image in before_after]
        tiles.append(captioned(images, edit.prompt))
    shape = max(tile.width for tile in tiles) / max(tile.height for tile in tiles)
    return tile_grid(tiles, max(1, round(math.sqrt(len(tiles) / shape))), GRID_MARGIN)


def run(config):
    """Check the flags, make the edits that are not made yet, and the grid."""
    of_lines = ("input", "edit", "output", "mask", "reference")
    of_lines = [name for name in of_lines if getattr(config, name)]
    if config.edits_jsonl and of_lines:
        raise ValueError(f"--edits_jsonl excludes --{of_lines[0]}; write it into the lines")
    if config.mask_feather and not (config.mask or config.edits_jsonl):
        raise ValueError(f"--mask_feather {config.mask_feather} is for --mask; give both or none")
    check_scheduler(config.scheduler)
    edits = read_edits(config.edits_jsonl) if config.edits_jsonl else edits_of_flags(config)
    config = with_single_files(config, "model")
    config = with_defaults(config, [config.model], config.lora)
    requests = []
    for index, edit in enumerate(edits, config.first_index):
        requests.append(checked_request(from_flags(Request, config, index=index, **edit), ()))
    if made := make_files(config, requests, "edit_cli.py"):
        if config.grid:
            save_image(before_after_grid(*made), config.grid)
        print_files([request.output for request in made[0]])


def main(args=None):
    """Command line."""
    words = with_flags_of_image(sys.argv[1:] if args is None else args, Config)
    if args is None:
        sys.argv[1:] = words
    run_main(
        Config, __doc__, run, args and words, interrupted=INTERRUPTED, out_of_memory=LESS_MEMORY
    )


if __name__ == "__main__":
    main()
