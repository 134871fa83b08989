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
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import jax
from PIL import Image
from tqdm import tqdm

from diffusers_flax.command_line import Above, AtLeast, Below, print_files, run_main
from diffusers_flax.compilation_cache import use_compilation_cache
from diffusers_flax.generating.batches import (
    IN_FLIGHT,
    DeviceClock,
    FileWriter,
    batches_of_places,
    check_finite_images,
    devices_for,
    run_batches,
)
from diffusers_flax.generating.captions import GRID_IMAGES, image_grid
from diffusers_flax.generating.flags import (
    DeviceFlags,
    PreviewFlags,
    ProcessFlags,
    SamplingFlags,
    layout_of_flags,
)
from diffusers_flax.generating.inputs import arrays_of, join, keys_of, kind_of, load_inputs
from diffusers_flax.generating.previews import preview_files
from diffusers_flax.generating.recipes import (
    ids_of,
    print_continued,
    with_flags_of_image,
    write_image,
)
from diffusers_flax.generating.requests import (
    OF_LINES,
    REPLACED,
    RequestFlags,
    check_images,
    check_seeds_differ,
    files_read,
    output_files,
    requests_of_flags,
    requests_of_jsonl,
)
from diffusers_flax.generating.single_files import with_single_files
from diffusers_flax.generating.tasks import REFINER_ARRAYS, call_models, check_models, load_models
from diffusers_flax.images import save_image
from diffusers_flax.loading.hub import open_source
from diffusers_flax.parameters import place_params
from diffusers_flax.prompts import prepare_prompts
from diffusers_flax.schedulers.factory import check_scheduler

SOFTWARE = "generate_cli.py"  # marks the images, which the same command may replace
DENOISING_END = 0.8  # as in diffusers' example of the ensemble of base and refiner


@dataclass(frozen=True)
class GenerateFlags:
    """What to make, and with which models."""

    FILES = ("model", "config_name_or_path", "unet", "refiner", "controlnet")
    SAME_IMAGES = ("prompt", "prompts_file", "image", "mask", "control", "latents", "num_images")
    SAME_IMAGES += ("requests_jsonl", "like", "output", "grid", "batch_size", "timesteps", "eta")
    SAME_IMAGES += (
        "compilation_cache_dir",
        "executable_dir",
        *(field.name for field in fields(RequestFlags)),
    )

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


def check_flags(config):
    """Raise a ValueError for flags that do not fit together; requests.py checks an image's."""
    given = [name for name in OF_LINES if getattr(config, name) != getattr(Config, name)]
    if config.requests_jsonl and given:
        key = "" if given[0] in ("num_images", "prompts_file") else "write it into the lines, or "
        raise ValueError(f"--requests_jsonl excludes --{given[0]}; {key}leave one out")
    if config.denoising_end is not None and not config.refiner:
        raise ValueError(f"--denoising_end {config.denoising_end} is for --refiner; give both")
    check_scheduler(config.scheduler)


def make_images(models, requests, sizes, program_sizes, todo, write, config):
    """Make images on the local devices.

    Args:
        models: LoadedModels.
        requests: list of Request.
        sizes, program_sizes: (width, height) of each result, and of its program.
        todo: places of the images to make.
        write: (place, result of the program, NumPy (H, W, 3) in [0, 1]) -> None.
        config: Config.
    """
    layout = next(iter(models.pipelines.values())).layout
    devices = devices_for(len(requests), layout)
    for params in filter(None, (models.params, models.refiner_params)):
        place_params(params, devices, layout)
    texts = partial(
        prepare_prompts, long_prompts=config.long_prompts, prompt_weights=config.prompt_weights
    )
    prompts = [texts(models.pipelines[x.task], x.prompt, x.negative_prompt) for x in requests]
    kinds = [kind_of(*row) for row in zip(requests, program_sizes, prompts)]
    finished = {*range(len(requests))} - {*todo}
    rounds_and_kinds = [(0, kind) for kind in kinds]
    batches = batches_of_places(rounds_and_kinds, finished, config.batch_size, len(devices))

    def prepare(kind, places, load_all):
        rows = [(requests[i], sizes[i], program_sizes[i]) for i in places]
        loaded = list(load_all(load_inputs, *zip(*rows)))
        batch = [requests[i] for i in places]
        arrays = arrays_of(models.pipelines[kind.task], kind, batch, loaded)
        arrays |= join(prompts[i] for i in places)
        refining = None
        if models.refiners:
            refining = {name: arrays[name] for name in REFINER_ARRAYS if name in arrays}
            refiner = models.refiners[kind.task]
            refining |= join(texts(refiner, x.prompt, x.negative_prompt) for x in batch)
        split = partial(jax.tree.map, lambda x: x.reshape(len(devices), -1, *x.shape[1:]))
        return split(arrays), split(refining)

    def call(kind, arrays):
        return call_models(models, kind, *arrays, config.denoising_end)

    clock = DeviceClock()
    with tqdm(total=len(todo), unit="image") as bar:
        for places, images, _ in run_batches(
            batches, prepare, call, bar, "generating", clock, IN_FLIGHT
        ):
            first = requests[places[0]]
            check_finite_images(images, f'images of "{first.prompt}" and others', config.lora)
            for place, image in zip(places, images):
                write(place, image)
    jax.effects_barrier()  # waits for the previews
    return clock.report(len(todo))


def run(config):
    """Check flags, images and models, load the models, make the images and the grid."""
    check_flags(config)
    requests = (
        requests_of_jsonl(config.requests_jsonl, config)
        if config.requests_jsonl
        else requests_of_flags(config)
    )
    layout = layout_of_flags(config)
    layout = layout and layout.first(len(requests))
    use_compilation_cache(config.compilation_cache_dir)
    given, config = config, with_single_files(config, "model", unet="unet")
    if config.refiner:
        end = config.denoising_end or DENOISING_END
        config = replace(config, refiner=open_source("refiner", config.refiner), denoising_end=end)
    checked = check_models(config, requests)
    images = check_images(requests, checked.configs, config.exact_size)
    requests, sizes, program_sizes = images
    requests = [replace(x, output=x.output and config.output / x.output) for x in requests]
    ids = ids_of(SOFTWARE, given, requests, zip(sizes, program_sizes))
    outputs, todo = output_files(requests, ids, config.output, SOFTWARE, config.grid)
    todo = layout.agree(todo) if layout else todo
    print_continued(len(requests) - len(todo), len(requests))
    if todo:
        if config.preview:
            check_seeds_differ(requests)
        kept = [config.grid, *(path for x in requests for path in files_read(x))]
        preview = preview_files(config, outputs, checked.num_steps, kept, sizes, keys_of(requests))
        models = load_models(config, checked, requests, program_sizes, preview, layout)
        with FileWriter(not layout or layout.is_writer) as files:

            def write(i, image):
                about = requests[i], sizes[i], outputs[i], SOFTWARE, ids[i], given
                files.write(outputs[i], write_image, image, *about)

            report = make_images(models, requests, sizes, program_sizes, todo, write, config)
        print(report, file=sys.stderr, end="\n" if report else "")
    if layout and not layout.is_writer:
        return
    if config.grid:
        images = [Image.open(file) for file in outputs[:GRID_IMAGES]]
        save_image(image_grid(images, [x.prompt for x in requests]), config.grid)
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
        out_of_memory="lower --batch_size or the size, or use --dtype bfloat16",
    )


if __name__ == "__main__":
    main()
