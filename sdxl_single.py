"""Images from text with Stable Diffusion XL on all devices of this machine, compiled by jit.

    python sdxl_single.py --prompt "a red panda reading a map" --output panda/
    python sdxl_single.py --prompt "a red panda" "a fox in the snow" --num_images 4 --output out/
    python sdxl_single.py --prompts_file prompts.txt --batch_size 2 --output out/ --grid grid.png

Each device makes --batch_size images at once; the last batch is padded. The noise of image i of the
list (--num_images of each prompt in a row) depends only on --seed and i: the same command gives the
same images on any number of devices, up to rounding. Started again, it makes the missing images.
The first batch compiles; --compilation_cache_dir saves the program.

sdxl_single_aot.py makes the same images, but compiles ahead of time and saves the executable for
faster starts; `diff sdxl_single.py sdxl_single_aot.py` shows the difference.

For TPU (v4, v5e and later), GPU and CPU (minutes per image). SDXL's weights take 7 GB in bfloat16
and 14 GB in float32, which is the default on a CPU.

Source: SDXL (arXiv 2307.01952).
"""

import math
import sys
from dataclasses import dataclass

import jax
import numpy as np
from PIL import Image
from tqdm import tqdm

from diffusers_flax import FlaxStableDiffusionXLPipeline
from diffusers_flax.command_line import print_files, run_main
from diffusers_flax.compilation_cache import use_compilation_cache
from diffusers_flax.devices.precision import choose_dtype
from diffusers_flax.generating.batches import (
    DeviceClock,
    FileWriter,
    check_finite_images,
    run_ahead,
    to_batches,
)
from diffusers_flax.generating.captions import GRID_IMAGES, image_grid
from diffusers_flax.generating.flags import (
    BatchFlags,
    DeviceFlags,
    ImageFlags,
    PreviewFlags,
    ProcessFlags,
    SamplingFlags,
    check_image_flags,
    from_flags,
    layout_of_flags,
    list_prompts,
    read_latents,
)
from diffusers_flax.generating.models import Sampling, check_sampling, check_xl, plan_images
from diffusers_flax.generating.previews import preview_files
from diffusers_flax.generating.resuming import (
    continue_images,
    id_maker,
    image_files,
    print_continued,
)
from diffusers_flax.generating.single_files import with_single_files
from diffusers_flax.images import save_image
from diffusers_flax.parameters import cast_params, place_params
from diffusers_flax.pipelines.base import Execution
from diffusers_flax.pipelines.sampling import count_steps, keys_per_image

SOFTWARE = "sdxl_single.py"  # marks the images


@dataclass(frozen=True)
class Config(ProcessFlags, DeviceFlags, BatchFlags, PreviewFlags, SamplingFlags, ImageFlags):
    """Flags of diffusers_flax/generating/flags.py, and the flag of this script alone.

    tyro lists the flags of the last base class first.
    """

    SAME_IMAGES = ("compilation_cache_dir",)

    compilation_cache_dir: str = "~/.cache/jax"  # saves programs; "": no cache


def open_pipeline(config, layout, sampling, outputs):
    """The pipeline with the chosen scheduler, without weights."""
    model, revision = config.pretrained_model_name_or_path, config.revision
    check_xl(model, revision, config.unet)
    replaced = {"unet": config.unet} if config.unet else None
    _, configs = FlaxStableDiffusionXLPipeline.check(model, revision, replaced)
    scheduler = check_sampling(FlaxStableDiffusionXLPipeline, configs["scheduler"], model, sampling)
    num_steps = count_steps(scheduler, sampling.steps(FlaxStableDiffusionXLPipeline))
    preview = preview_files(config, outputs, num_steps, [config.grid])
    execution = Execution(
        config.accelerate, preview, layout, storage=config.storage, vae_dtype=config.vae_dtype
    )
    options = dict(dtype=choose_dtype(config.dtype), scheduler=scheduler, replaced=replaced)
    options |= dict(embeddings=config.embedding, execution=execution)
    pipeline = FlaxStableDiffusionXLPipeline.open(model, revision, **options)
    pipeline.check_parallel(sampling.branches(type(pipeline)), config.height)
    return pipeline


def generate(config, layout, devices, prompts, outputs, ids, todo):
    """Load the model, make images and write them.

    Args:
        config: Config.
        layout: Layout or None.
        devices: that make images, or the first device of each group of the layout.
        prompts, outputs, ids: text, file and id of each image.
        todo: list of the images to make.
    """
    batch_size = min(config.batch_size, math.ceil(len(prompts) / len(devices)))
    devices = devices[: math.ceil(len(prompts) / batch_size)]
    layout = layout and layout.first(len(devices))
    devices, is_writer = layout.groups if layout else devices, not layout or layout.is_writer
    sampling = from_flags(Sampling, config)

    # 1. Load
    pipeline = open_pipeline(config, layout, sampling, outputs)
    branches, steps = sampling.branches(type(pipeline)), sampling.steps(type(pipeline))
    shape = pipeline.latent_shape(len(prompts), config.height, config.width)
    latents = read_latents(config.latents, shape) if config.latents else None
    height, width = pipeline.image_size(config.height, config.width)
    batch = dict(num_images=len(todo), batch_size=batch_size, branches=branches)
    batch |= dict(size=(width, height), vae_tile=config.vae_tile)
    pipeline, planned = plan_images(pipeline, devices, **batch)
    weights = dict(variant=config.variant, lora=config.lora, unet_delta=config.unet_delta)
    model, revision = config.pretrained_model_name_or_path, config.revision
    params = pipeline.load_params(model, revision, **weights)

    # 2. Cast
    cast_params(pipeline, params)

    # 3. Tokenize; SDXL was trained with zeros for no text, not with the empty text
    prompt_ids = pipeline.prepare_inputs(prompts)  # int32 (images, 2, 77)
    neg_ids = pipeline.prepare_inputs([config.negative_prompt])  # of all images
    neg_ids = np.repeat(neg_ids, len(prompts), 0) if config.negative_prompt else None
    pipeline.embeddings.warn_unused([*prompts, config.negative_prompt])

    # 4. Replicate the parameters, split the rest
    place_params(params, devices, pipeline.layout)
    keys = keys_per_image(jax.random.key(config.seed), len(prompts))
    arrays = dict(prompt_ids=prompt_ids, neg_prompt_ids=neg_ids, prng_seed=keys, latents=latents)
    print(planned, file=sys.stderr)

    # 5. Generate: the first batch compiles, the following ones are fast
    options = dict(height=config.height, width=config.width, **steps)
    scales = dict(guidance_scale=config.guidance_scale, guidance_rescale=config.guidance_rescale)

    def dispatch(batch):
        return pipeline(**batch[1], params=params, **scales, **options, jit=True).images

    def collect(batch, images):
        images = np.concatenate(np.asarray(images))[: len(batch[0])]  # (images, H, W, 3)
        check_finite_images(images, f"images from {batch[0][0]} on", config.lora)
        return images

    clock, batches = DeviceClock(), to_batches(arrays, len(devices), batch_size, todo)
    with (
        tqdm(total=len(todo), desc="compiling", unit="image") as bar,
        FileWriter(is_writer) as files,
    ):
        for (batch, _), images, seconds in run_ahead(batches, dispatch, collect, clock):
            for i, image in zip(batch, images):
                files.write(outputs[i], save_image, image, outputs[i], SOFTWARE, ids[i])
            bar.set_postfix_str(f"last batch {seconds:.2f} s")
            bar.set_description("generating")
            bar.update(len(batch))
    jax.effects_barrier()  # waits for the previews
    if report := clock.report(len(todo)):
        print(report, file=sys.stderr)


def run(config):
    """Check the flags, make the images that this command has not made yet, and the grid."""
    check_image_flags(config)
    config = with_single_files(config, "pretrained_model_name_or_path", unet="unet")
    use_compilation_cache(config.compilation_cache_dir)
    layout = layout_of_flags(config)
    devices = jax.local_devices() if layout is None else layout.groups
    prompts = list_prompts(config, len(devices) * config.batch_size)
    make_id = id_maker(config, config.pretrained_model_name_or_path)
    ids = [make_id(prompt=prompt, index=i) for i, prompt in enumerate(prompts)]
    outputs = image_files(config.output, len(prompts), config.grid)
    outputs, todo = continue_images(outputs, ids, config.output, SOFTWARE, config.grid)
    todo = layout.agree(todo) if layout else todo
    print_continued(len(prompts) - len(todo), len(prompts))
    if todo:
        generate(config, layout, devices, prompts, outputs, ids, todo)
    if layout and not layout.is_writer:
        return
    if config.grid:
        images = [Image.open(file) for file in outputs[:GRID_IMAGES]]
        save_image(image_grid(images, prompts), config.grid)
    print_files(outputs)


def main(args=None):
    """Command line."""
    interrupted = "the images finished so far are in place"
    remedy = "lower --batch_size or the size, or use --dtype bfloat16"
    run_main(Config, __doc__, run, args, interrupted=interrupted, out_of_memory=remedy)


if __name__ == "__main__":
    main()
