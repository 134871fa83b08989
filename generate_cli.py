"""Make images with Stable Diffusion 1.x, 2.x or SDXL, over all devices of this machine.

    python generate_cli.py --model MODEL --prompt "a red panda reading a map" --output panda.png
    python generate_cli.py --model MODEL --image photo.jpg --strength 0.6 --prompt "watercolour"
    python generate_cli.py --model MODEL --image photo.jpg --mask hole.png --prompt "a bench"
    python generate_cli.py --model MODEL --controlnet CANNY DEPTH --control edges.png depth.png \\
        --prompt "a red panda"
    python generate_cli.py --model BASE --refiner REFINER --denoising_end 0.8 --prompt "a red panda"
    python generate_cli.py --model MODEL --requests_jsonl requests.jsonl --batch_size 4 --output out
    python generate_cli.py --like out/003.png --guidance_scale 9 --output again.png

The model and what is given choose the pipeline: with an image, image to image; with a mask too,
inpainting, which changes the white part only; with control images, ControlNets. Lines of a list may
differ in that, and may have any flag of an image: {"prompt": "a fox", "seed": 3}. With the model of
the demo, on a CPU:

    python generate_cli.py --model demo/base_model --prompt "a photo of the moon" --output moon.png

Image i of the list depends on the seed --seed + i, or its line's own, and not on batch size,
devices or the other images: the same command gives the same images on any machine, up to rounding.
Started again, it makes the missing images. A PNG holds its flags, and --like makes it again. Images
of one program run in one batch, --batch_size at once on each device.

Sizes: an image from text is --width by --height. With an image, the longer side becomes
--resolution and the aspect ratio is kept; photographs of similar shapes share a program, unless
--exact_size, as in edit_cli.py.

Runs on TPU, GPU and CPU. docs/generating.md has examples.

Source: Latent Diffusion Models (arXiv 2112.10752); SDEdit (arXiv 2108.01073); ControlNet (arXiv
2302.05543); SDXL (arXiv 2307.01952).
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from PIL import Image

from diffusers_flax.command_line import Above, AtLeast, Below, print_files, run_main
from diffusers_flax.generating.captions import GRID_IMAGES, image_grid
from diffusers_flax.generating.flags import (
    DeviceFlags,
    PreviewFlags,
    ProcessFlags,
    SamplingFlags,
    with_single_files,
)
from diffusers_flax.generating.recipes import OF_LINES, with_flags_of_image
from diffusers_flax.generating.requests import RequestFlags, requests_of_flags, requests_of_jsonl
from diffusers_flax.generating.runner import make_files
from diffusers_flax.images import save_image
from diffusers_flax.loading.hub import open_source
from diffusers_flax.schedulers.factory import check_scheduler

# Messages of run_main
INTERRUPTED = "the images finished so far are in place"
LESS_MEMORY = "lower --batch_size or the size, or use --dtype bfloat16"


@dataclass(frozen=True)
class GenerateFlags:
    """What to make, and with which models."""

    model: str  # directory, hub id or file of Stable Diffusion 1.x, 2.x or SDXL
    revision: str | None = None  # branch, tag or commit on the hub
    variant: str | None = None  # variant of the weights' files, such as fp16
    unet: str | None = None  # file, directory or hub id of a UNet in place of the model's
    # configs of a one-file model: a directory or hub id; default: its family's
    config_name_or_path: str | None = None
    use_ema_weights: bool = False  # of a one-file model: the averages of the UNet's weights
    prompt: tuple[str, ...] = ()  # one or more texts
    prompts_file: Path | None = None  # one prompt per line, replaces --prompt
    num_images: Annotated[int, AtLeast(1)] = 1  # of each prompt, with different seeds
    image: tuple[Path, ...] = ()  # images to start from: one per prompt, or one for all
    # images, white where --image may change: one per image, or one for all
    mask: tuple[Path, ...] = ()
    controlnet: tuple[str, ...] = ()  # ControlNets: directories, hub ids or files
    control: tuple[Path, ...] = ()  # images that guide, such as edges: one for each ControlNet
    # directory, hub id or file of the SDXL model that makes the last steps
    refiner: str | None = None
    # fraction of the denoising after which --refiner goes on; default: 0.8
    denoising_end: Annotated[float, Above(0), Below(1)] | None = None
    # lines {"prompt", "seed", ...}, with any flag of an image, instead of the flags above
    requests_jsonl: Path | None = None
    like: Path | None = None  # image of this program, whose flags are taken unless given here
    long_prompts: bool = False  # prompts of more than 77 tokens, in chunks; default: cut
    # read (red:1.3) as a weight, as AUTOMATIC1111's web UI or ComfyUI; default: as text
    prompt_weights: Literal["webui", "comfyui"] | None = None
    # what the UNet predicts; default: the scheduler's config
    prediction_type: Literal["epsilon", "v_prediction", "sample"] | None = None
    latents: tuple[Path, ...] = ()  # .npy of the noise to start from, (1, channels, h, w), likewise
    exact_size: bool = False  # a program for each size; default: similar photographs share one
    batch_size: Annotated[int, AtLeast(1)] = 1  # images per device at once
    output: Path = Path("images")  # directory; for one image also a file (.png, .jpg)
    grid: Path | None = None  # also write the first 64 images into one file
    compilation_cache_dir: str = "~/.cache/jax"  # saves programs; "": no cache
    # directory of compiled programs: later starts do not trace either; made for its owner only
    executable_dir: Path | None = None


@dataclass(frozen=True)
class Config(ProcessFlags, DeviceFlags, PreviewFlags, SamplingFlags, RequestFlags, GenerateFlags):
    """Flags of the script. tyro lists the flags of the last base class first."""


def run(config):
    """Check the flags, make the images that are not made yet, and the grid."""
    given = [name for name in OF_LINES if getattr(config, name) != getattr(Config, name)]
    if config.requests_jsonl and given:
        raise ValueError(f"--requests_jsonl excludes --{given[0]}; write it into the lines")
    if config.denoising_end is not None and not config.refiner:
        raise ValueError(f"--denoising_end {config.denoising_end} is for --refiner; give both")
    check_scheduler(config.scheduler)
    if config.requests_jsonl:
        requests = requests_of_jsonl(config.requests_jsonl, config)
    else:
        requests = requests_of_flags(config)
    config = with_single_files(config, "model", unet="unet")
    if config.refiner:
        config = replace(config, refiner=open_source("refiner", config.refiner))
    if made := make_files(config, requests, "generate_cli.py", config.output):
        requests, _ = made
        files = [request.output for request in requests]
        if config.grid:
            images = [Image.open(file) for file in files[:GRID_IMAGES]]
            save_image(image_grid(images, [x.prompt for x in requests]), config.grid)
        print_files(files)


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
