"""Images from text with Stable Diffusion XL on all devices of this machine, compiled by jit.

    python sdxl_single.py --prompt "a red panda reading a map" --output panda/
    python sdxl_single.py --prompt "a red panda" "a fox in the snow" --num_images 4 --output out/
    python sdxl_single.py --prompts_file prompts.txt --batch_size 2 --output out/ --grid grid.png

Each device makes an equal part of the images, --batch_size at once; the last batch is padded. The
noise of image i of the list (--num_images of each prompt in a row) depends only on --seed and i, so
the same command gives the same images on any number of devices, up to rounding. The first batch
compiles; --compilation_cache_dir saves the program.

sdxl_single_aot.py makes the same images, but compiles ahead of time and saves the executable, so
that later starts are faster; `diff sdxl_single.py sdxl_single_aot.py` shows the difference.

For TPU (v4, v5e and later), GPU and CPU (minutes per image). SDXL's weights take 7 GB in bfloat16
and 14 GB in float32, which is the default on a CPU.

Source: SDXL (arXiv 2307.01952).
"""

import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax
import numpy as np
from flax import jax_utils
from tqdm import tqdm

from command_line import check_image_file, image_files, run_main
from diffusers_flax.captions import GRID_IMAGES, image_grid
from diffusers_flax.images import read_latents, read_prompts, save_image, to_batches
from diffusers_flax.parameters import replace_leaves
from diffusers_flax.pipelines.sampling import keys_per_image
from diffusers_flax.pipelines.stable_diffusion_xl import FlaxStableDiffusionXLPipeline
from diffusers_flax.programs import timestep_options, use_compilation_cache
from editing.edits import (
    cast_params,
    check_finite,
    check_scheduler,
    check_seed,
    check_steps,
    check_xl,
    choose_scheduler,
    compute_dtype,
    plan_images,
    preview_files,
)

DEFAULT_PROMPT = "a photograph of a red panda reading a map in a bamboo forest, soft morning light"
DEFAULT_NEGATIVE_PROMPT = "blurry, low quality, drawing, text, watermark"


@dataclass(frozen=True)
class Config:
    """Flags of the script."""

    # directory or hub id of an SDXL model
    pretrained_model_name_or_path: str = "stabilityai/stable-diffusion-xl-base-1.0"
    revision: str | None = None  # branch, tag or commit on the hub
    variant: str | None = None  # variant of the weights' files, e.g. fp16
    prompt: tuple[str, ...] = (DEFAULT_PROMPT,)  # one or more texts
    prompts_file: Path | None = None  # one prompt per line, replaces --prompt
    negative_prompt: str = DEFAULT_NEGATIVE_PROMPT  # what to avoid; "": no text
    num_images: int | None = None  # per prompt; default: 1, or one batch if there is one prompt
    seed: int = 33  # seed of the noise
    num_inference_steps: int = 25  # denoising steps
    # timesteps to run instead of --num_inference_steps, for distilled models: 999 749 499 249
    timesteps: tuple[int, ...] = ()
    eta: float | None = None  # noise per step, 0 to 1, for ddim (default 0) and tcd (default 0.3)
    guidance_scale: float = 5.0  # weight of the prompt; at most 1: no guidance, half the work
    guidance_rescale: float = 0.0  # 0 to 1: reduces the contrast that guidance adds; 0: off
    height: int | None = None  # pixels; default: the model's
    width: int | None = None  # pixels; default: the model's
    scheduler: str | None = None  # ddim, euler, ...; default: the model's own
    # how timesteps are spaced; default: the scheduler's config
    timestep_spacing: Literal["leading", "linspace", "trailing"] | None = None
    # what the UNet predicts; default: the scheduler's config
    prediction_type: Literal["epsilon", "v_prediction", "sample"] | None = None
    unet: str | None = None  # file, directory or hub id of a UNet in place of the model's
    lora: tuple[str, ...] = ()  # LoRA files or hub ids to fold into the model: FILE or FILE:WEIGHT
    # NAME or NAME:PARAMETER=VALUE,...; names: guidance, deepcache, spectrum, tgate, fbcache, tome,
    # int8, taesd; see docs/acceleration.md
    accelerate: tuple[str, ...] = ()
    # also write a preview of every N-th step, decoded by TAESD, next to each image
    preview: int | None = None
    # directory or hub id of the TAESD of previews; "": as for --accelerate taesd
    preview_decoder: str = ""
    latents: Path | None = None  # .npy of initial noise, (images, channels, h, w) of the latents
    batch_size: int = 1  # images per device at once
    dtype: Literal["float32", "bfloat16"] | None = None  # default: float32 on CPU, else bfloat16
    output: Path = Path("sdxl")  # directory; for one image also a file (.png, .jpg)
    grid: Path | None = None  # also write the first 64 images into one file
    compilation_cache_dir: str = "~/.cache/jax"  # saves programs; "": no cache


# 1. Load


def steps_of(config):
    """The arguments of the pipeline that choose the steps."""
    return timestep_options(config.num_inference_steps, config.timesteps, config.eta)


def open_pipeline(config, dtype, outputs):
    """The pipeline with the chosen scheduler, without weights; outputs: the images' files."""
    source = {
        "pretrained_model_name_or_path": config.pretrained_model_name_or_path,
        "revision": config.revision,
    }
    check_xl(config.pretrained_model_name_or_path, config.revision, config.unet)
    given = {"unet": config.unet} if config.unet else None
    _, configs = FlaxStableDiffusionXLPipeline.check(**source, given=given)
    scheduler, state = choose_scheduler(
        configs["scheduler"],
        config.pretrained_model_name_or_path,
        config.scheduler,
        config.timestep_spacing,
        config.prediction_type,
    )
    pipeline = FlaxStableDiffusionXLPipeline.open(
        **source,
        dtype=dtype,
        scheduler=scheduler,
        given=given,
        accelerate=config.accelerate,
        preview=preview_files(config, scheduler, outputs),
    )
    branches = pipeline.guidance_branches(config.guidance_scale)
    check_steps(scheduler, state, steps_of(config), pipeline.accelerate, branches)
    return pipeline


def load(pipeline, config):
    """The parameters, as they are stored."""
    return pipeline.load_params(
        config.pretrained_model_name_or_path,
        revision=config.revision,
        variant=config.variant,
        lora=config.lora,
    )


# 3. Defaults


def list_prompts(config, num_devices):
    """Each image's prompt."""
    if config.prompts_file and config.prompt != Config.prompt:
        raise ValueError("--prompt and --prompts_file are both given; give one of them")
    prompts = read_prompts(config.prompts_file) if config.prompts_file else list(config.prompt)
    if not prompts:
        raise ValueError("--prompt is empty; give one or more texts, in quotation marks")
    all_devices = num_devices * config.batch_size
    num_images = config.num_images or (all_devices if len(prompts) == 1 else 1)
    return [prompt for prompt in prompts for _ in range(num_images)]


# 4. Tokenize


def tokenize_prompts(pipeline, prompts, negative_prompt):
    """(prompt_ids, neg_prompt_ids or None), int32 (images, 2, 77)."""
    prompt_ids = pipeline.prepare_inputs(prompts)
    if not negative_prompt:  # SDXL was trained with zeros, not with the empty text
        return prompt_ids, None
    return prompt_ids, pipeline.prepare_inputs([negative_prompt] * len(prompts))


# 5. Replicate


def replicate_all(params, devices, seed, num_images):
    """(parameters on every device; a key for each image, which depends only on its index)."""
    replace_leaves(lambda x: jax_utils.replicate(x, devices), params)
    return params, keys_per_image(jax.random.key(seed), num_images)


# 6. Generate


def generate(pipeline, p_params, batch, config):
    """Images of a batch, float32 (devices * batch_size, H, W, 3) in [0, 1]."""
    images = pipeline(
        batch["prompt_ids"],
        p_params,
        batch["prng_seed"],
        **steps_of(config),
        guidance_scale=config.guidance_scale,
        guidance_rescale=config.guidance_rescale,
        height=config.height,
        width=config.width,
        latents=batch["latents"],
        neg_prompt_ids=batch["neg_prompt_ids"],
        jit=True,
    ).images  # (devices, batch_size, H, W, 3)
    images = np.asarray(images)
    return images.reshape(-1, *images.shape[2:])


def check_config(config):
    """Raise a ValueError for invalid flags."""
    for name in ("num_images", "num_inference_steps", "batch_size", "height", "width"):
        if (value := getattr(config, name)) is not None and value < 1:
            raise ValueError(f"--{name} {value} must be at least 1")
    if not 0 <= config.guidance_scale < math.inf:
        raise ValueError(f"--guidance_scale {config.guidance_scale} must be 0 or more")
    if not 0 <= config.guidance_rescale <= 1:
        raise ValueError(f"--guidance_rescale {config.guidance_rescale} must be from 0 to 1")
    check_seed("seed", config.seed)
    check_scheduler(config.scheduler)
    if config.grid:
        check_image_file(config.grid)


def run(config):
    """Check the flags, load the model, make the images and write them."""
    check_config(config)
    use_compilation_cache(config.compilation_cache_dir)
    devices = jax.local_devices()
    prompts = list_prompts(config, len(devices))
    outputs = image_files(config.output, len(prompts), config.grid)
    batch_size = min(config.batch_size, math.ceil(len(prompts) / len(devices)))
    devices = devices[: math.ceil(len(prompts) / batch_size)]
    dtype = compute_dtype(config.dtype)

    pipeline = open_pipeline(config, dtype, outputs)
    shape = pipeline.latent_shape(len(prompts), config.height, config.width)
    latents = read_latents(config.latents, shape) if config.latents else None
    branches = pipeline.guidance_branches(config.guidance_scale)
    height, width = pipeline.image_size(config.height, config.width)
    planned = plan_images(pipeline, devices, len(prompts), batch_size, branches, (width, height))
    params = load(pipeline, config)
    cast_params(pipeline, params)  # 2. Cast
    prompt_ids, neg_prompt_ids = tokenize_prompts(pipeline, prompts, config.negative_prompt)
    p_params, keys = replicate_all(params, devices, config.seed, len(prompts))
    arrays = {
        "prompt_ids": prompt_ids,
        "neg_prompt_ids": neg_prompt_ids,
        "prng_seed": keys,
        "latents": latents,
    }

    print(planned, file=sys.stderr)
    # 7. The first batch compiles. 8. The following ones are fast.
    batch_images = []
    with tqdm(total=len(prompts), desc="compiling", unit="image") as bar:
        for indices, batch in to_batches(arrays, len(devices), batch_size):
            started = time.perf_counter()
            images = generate(pipeline, p_params, batch, config)[: len(indices)]
            bar.set_postfix_str(f"last batch {time.perf_counter() - started:.2f} s")
            check_finite(images, f"images from {indices[0]} on", config.lora)
            for i, image in zip(indices, pipeline.numpy_to_pil(images)):
                save_image(image, outputs[i])
                if config.grid and i < GRID_IMAGES:
                    batch_images.append(image)
            bar.set_description("generating")
            bar.update(len(indices))
    jax.effects_barrier()  # waits for the previews
    if config.grid:
        save_image(image_grid(batch_images, prompts), config.grid)
    for path in outputs[:10]:
        print(path)
    if len(outputs) > 10:
        print(f"... {len(outputs)} images")


def main(args=None):
    """Command line."""
    run_main(
        Config,
        __doc__,
        run,
        args,
        interrupted="the images finished so far are in place",
        out_of_memory="lower --batch_size or the size, or use --dtype bfloat16",
    )


if __name__ == "__main__":
    main()
