"""Images from text with Stable Diffusion XL on all devices, compiled ahead of time and saved.

    python sdxl_single_aot.py --prompt "a red panda reading a map" --output panda/
    python sdxl_single_aot.py --prompt "a red panda" "a fox in the snow" --num_images 4 --output o/
    python sdxl_single_aot.py --prompts_file prompts.txt --batch_size 2 --output o/ --grid grid.png

Makes the same images as sdxl_single.py with the same flags. Here
`jax.pmap(pipeline._generate).lower(...).compile()` compiles before the first image, for one number
of steps and one size, and the executable is saved in --executable_dir: the next start loads it
without tracing or compiling. If jax, the device, the code or settings have changed, the script
compiles again and prints the reason. --devices is for sdxl_single.py.

An executable is code. --executable_dir is created for its owner only (mode 0700); a directory that
others may write to is refused. Never use executables from others.

For TPU (v4, v5e and later), GPU and CPU (minutes per image). SDXL's weights take 7 GB in bfloat16
and 14 GB in float32, which is the default on a CPU.

Source: SDXL (arXiv 2307.01952); jax's documentation, "Ahead-of-time lowering and compilation".
"""

import hashlib
import json
import math
import sys
import time
from dataclasses import dataclass

import jax
import numpy as np
from PIL import Image
from tqdm import tqdm

from diffusers_flax import FlaxStableDiffusionXLPipeline
from diffusers_flax.command_line import print_files, run_main
from diffusers_flax.compilation_cache import no_compilation_cache
from diffusers_flax.devices.precision import choose_dtype
from diffusers_flax.executables import ExecutableStore, surroundings
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
    ProcessFlags,
    SamplingFlags,
    check_image_flags,
    from_flags,
    layout_of_flags,
    list_prompts,
    read_latents,
)
from diffusers_flax.generating.models import Sampling, check_sampling, check_xl, plan_images
from diffusers_flax.generating.resuming import (
    continue_images,
    id_maker,
    image_files,
    print_continued,
)
from diffusers_flax.generating.single_files import with_single_files
from diffusers_flax.images import save_image
from diffusers_flax.messages import one_line
from diffusers_flax.parameters import cast_params, place_params
from diffusers_flax.pipelines.base import Execution
from diffusers_flax.pipelines.sampling import keys_per_image

SOFTWARE = "sdxl_single.py"  # marks the images


@dataclass(frozen=True)
class Config(ProcessFlags, DeviceFlags, BatchFlags, SamplingFlags, ImageFlags):
    """Flags of diffusers_flax/generating/flags.py, and the flag of this script alone.

    tyro lists the flags of the last base class first.
    """

    SAME_IMAGES = ("executable_dir",)

    executable_dir: str = "~/.cache/sdxl_single_aot"  # not writable by others; "" saves none


def open_pipeline(config, layout, sampling):
    """The pipeline with the chosen scheduler, without weights."""
    model, revision = config.pretrained_model_name_or_path, config.revision
    check_xl(model, revision, config.unet)
    replaced = {"unet": config.unet} if config.unet else None
    _, configs = FlaxStableDiffusionXLPipeline.check(model, revision, replaced)
    scheduler = check_sampling(FlaxStableDiffusionXLPipeline, configs["scheduler"], model, sampling)
    execution = Execution(
        config.accelerate, layout=layout, storage=config.storage, vae_dtype=config.vae_dtype
    )
    options = dict(dtype=choose_dtype(config.dtype), scheduler=scheduler, replaced=replaced)
    options |= dict(embeddings=config.embedding, execution=execution)
    pipeline = FlaxStableDiffusionXLPipeline.open(model, revision, **options)
    pipeline.check_parallel(sampling.branches(type(pipeline)), config.height)
    return pipeline


def aot_compile(pipeline, store, devices, arguments, options):
    """The program for batches of this shape, loaded, or compiled and saved.

    Args:
        pipeline: FlaxStableDiffusionXLPipeline.
        store: ExecutableStore or None.
        devices: of the program, or the first device of each group of a layout.
        arguments: {argument of _generate: tree of arrays (devices, ...)}, and the parameters.
        options: {argument of _generate: hashable}, compiled in.

    Returns:
        (compiled program of the arguments, "loaded in N s" or "compiled (REASON) in N s").
    """
    started = time.perf_counter()

    def generate(images, params):
        return pipeline._generate(**images, params=params, **options)

    p_generate = jax.pmap(generate, devices=devices)
    if layout := pipeline.layout:
        p_generate, devices = layout.jit_batches(generate), layout.devices
    if store is None:
        compiled = p_generate.lower(*arguments).compile()
        return compiled, f"compiled in {time.perf_counter() - started:.2f} s"
    cache_key = {
        "pipeline": hashlib.sha256(pipeline.description().encode()).hexdigest()[:16],
        "options": options,
        "arguments": str(jax.tree.map(jax.typeof, arguments)),
    }
    if layout and not layout.is_local:  # an executable belongs to one process
        cache_key["process"] = f"{jax.process_index()} of {jax.process_count()}"
    name = hashlib.sha256(json.dumps(cache_key).encode()).hexdigest()[:16]
    cache_key |= surroundings(devices, [__file__])
    in_tree, out_tree = jax.tree.structure((arguments, {})), jax.tree.structure(0)
    compiled, reason = store.load(name, cache_key, devices, in_tree, out_tree)
    if compiled is not None:
        return compiled, f"loaded in {time.perf_counter() - started:.2f} s"
    print(f"compiling ({reason}), which may take minutes", file=sys.stderr)
    with no_compilation_cache():
        compiled = p_generate.lower(*arguments).compile()
    how = f"compiled ({reason}) in {time.perf_counter() - started:.2f} s"
    try:
        store.save(name, cache_key, compiled)
    except Exception as error:  # e.g. a full disk; the images can still be made
        how += f"; not saved: {one_line(error)}"
    return compiled, how


def generate(config, layout, devices, prompts, outputs, ids, todo):
    """Load the model, make images and write them.

    Args:
        config: Config.
        layout: Layout or None.
        devices: that make images, or the first device of each group of the layout.
        prompts, outputs, ids: text, file and id of each image.
        todo: list of the images to make.
    """
    store = ExecutableStore(config.executable_dir) if config.executable_dir else None
    batch_size = min(config.batch_size, math.ceil(len(prompts) / len(devices)))
    devices = devices[: math.ceil(len(prompts) / batch_size)]
    layout = layout and layout.first(len(devices))
    devices, is_writer = layout.groups if layout else devices, not layout or layout.is_writer
    sampling = from_flags(Sampling, config)

    # 1. Load
    pipeline = open_pipeline(config, layout, sampling)
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
    place_params(params, devices, layout)
    keys = keys_per_image(jax.random.key(config.seed), len(prompts))
    arrays = dict(prompt_ids=prompt_ids, neg_prompt_ids=neg_ids, prng_seed=keys, latents=latents)
    print(planned, file=sys.stderr)

    # 5. Compile; the scales of guidance are arrays, so that others need no other program
    ones = np.ones((len(devices), 1), np.float32)
    same = {
        "guidance_scale": ones * np.float32(config.guidance_scale),
        "guidance_rescale": ones * np.float32(config.guidance_rescale),
    }
    options = {"height": config.height, "width": config.width, "branches": branches, **steps}
    arrays = layout.as_inputs(arrays) if layout else arrays
    _, batch = next(to_batches(arrays, len(devices), batch_size, todo))
    p_generate, how = aot_compile(pipeline, store, devices, (batch | same, params), options)
    print(how, file=sys.stderr)

    # 6. Generate: all batches are fast, as the program is compiled

    def dispatch(batch):
        return p_generate(batch[1] | same, params)

    def collect(batch, images):
        images = np.concatenate(np.asarray(images))[: len(batch[0])]  # (images, H, W, 3)
        check_finite_images(images, f"images from {batch[0][0]} on", config.lora)
        return images

    clock, batches = DeviceClock(), to_batches(arrays, len(devices), batch_size, todo)
    with (
        tqdm(total=len(todo), desc="generating", unit="image") as bar,
        FileWriter(is_writer) as files,
    ):
        for (batch, _), images, seconds in run_ahead(batches, dispatch, collect, clock):
            for i, image in zip(batch, images):
                files.write(outputs[i], save_image, image, outputs[i], SOFTWARE, ids[i])
            bar.set_postfix_str(f"last batch {seconds:.2f} s")
            bar.update(len(batch))
    if report := clock.report(len(todo)):
        print(report, file=sys.stderr)


def run(config):
    """Check the flags, make the images that this command has not made yet, and the grid."""
    check_image_flags(config)
    config = with_single_files(config, "pretrained_model_name_or_path", unet="unet")
    if config.devices:
        raise ValueError("--devices is for sdxl_single.py; this saves one executable")
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
