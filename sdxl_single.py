"""Images from text with Stable Diffusion XL (arXiv 2307.01952) on all devices, compiled by jit.

    python sdxl_single.py --prompt "a red panda reading a map" --output panda/
    python sdxl_single.py --prompt "a red panda" "a fox in the snow" --num_images 4 --output out/

A simple example, to copy; generate_cli.py has more flags. `diff sdxl_single.py sdxl_single_aot.py`
shows how its twin compiles ahead of time. --model demo/base_model_xl is tiny and runs on a CPU.
SDXL's weights take 7 GB in bfloat16; on a CPU 14 GB in float32, and minutes per image.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import jax
import numpy as np
from flax.jax_utils import replicate

from diffusers_flax import FlaxStableDiffusionXLPipeline
from diffusers_flax.command_line import AtLeast, Seed, run_main
from diffusers_flax.devices.precision import choose_dtype


@dataclass(frozen=True)
class Config:
    """Flags of the script."""

    MORE_FLAGS = "; generate_cli.py has more flags"
    model: str = "stabilityai/stable-diffusion-xl-base-1.0"  # directory or hub id
    revision: str | None = None  # branch, tag or commit on the hub
    prompt: tuple[str, ...] = ("a photograph of a red panda reading a map in a bamboo forest",)
    negative_prompt: str = "blurry, low quality, drawing, text, watermark"  # to avoid; "": no text
    num_images: Annotated[int, AtLeast(1)] | None = None  # per prompt; of one prompt a batch
    batch_size: Annotated[int, AtLeast(1)] = 1  # images per device at once
    num_inference_steps: Annotated[int, AtLeast(1)] = 25  # denoising steps
    guidance_scale: Annotated[float, AtLeast(0)] = 5.0  # weight of the prompt; at most 1: off
    height: int | None = None  # pixels, a multiple of 8; default: the model's
    width: int | None = None  # pixels, likewise
    seed: Seed = 33  # seed of the noise
    dtype: Literal["float32", "bfloat16", "float16"] | None = None  # default: fast on the device
    output: Path = Path("sdxl")  # directory; images in it stay


def run(config):
    """Make the images, and print how long each call takes."""
    config.output.mkdir(parents=True, exist_ok=True)
    files = (config.output / f"{i:03}.png" for i in range(10**6))

    # 1. Load: the pipeline has settings only, the parameters are a tree of arrays beside it.
    pipeline, params = FlaxStableDiffusionXLPipeline.from_pretrained(
        config.model, config.revision, dtype=choose_dtype(config.dtype)
    )

    # 2. Cast: half precision is faster and smaller, but too coarse for noise levels and SDXL's VAE.
    exact = {name: params.pop(name) for name in ("scheduler", "vae")}
    params = jax.tree.map(lambda x: x.astype(pipeline.dtype), params) | exact

    # 3. Inputs: a prompt for each image, up to whole batches of (devices, images per device).
    batch = jax.local_device_count(), config.batch_size
    size = batch[0] * batch[1]
    num_images = config.num_images or (size if len(config.prompt) == 1 else 1)
    prompts = [prompt for prompt in config.prompt for _ in range(num_images)]
    padded = prompts + prompts[-1:] * (-len(prompts) % size)

    # 4. Tokenize: each of SDXL's two text encoders takes 77 numbers.
    prompt_ids = pipeline.prepare_inputs(padded).reshape(-1, *batch, 2, 77)
    neg_prompt_ids = pipeline.prepare_inputs([config.negative_prompt] * size)
    neg_prompt_ids = neg_prompt_ids.reshape(*batch, 2, 77) if config.negative_prompt else None

    # 5. Replicate: every device has all parameters. Noise is a function of a key in JAX; an image's
    # own key makes it independent of the other images and of the devices.
    params = replicate(params)
    fold_in = jax.vmap(jax.random.fold_in, (None, 0))  # of a key and several numbers
    keys = fold_in(jax.random.key(config.seed), np.arange(len(padded))).reshape(-1, *batch)

    # 6. Generate: with jit=True every device runs the program on its part of the arrays.
    def generate(prompt_ids, keys):
        options = config.num_inference_steps, config.guidance_scale, config.height, config.width
        made = pipeline(prompt_ids, params, keys, *options, neg_prompt_ids=neg_prompt_ids, jit=True)
        return pipeline.numpy_to_pil(made.images)

    # 7. The first call compiles. 8. From then on calls are fast.
    for i in range(len(keys)):
        started = time.perf_counter()
        images = generate(prompt_ids[i], keys[i])
        print(f"{'later' if i else 'first'} call: {time.perf_counter() - started:.2f} s")
        for image in images[: len(prompts) - i * size]:
            file = next(file for file in files if not file.exists())
            image.save(file)
            print(file)


def main(args=None):
    """Command line."""
    run_main(Config, __doc__, run, args, out_of_memory="lower --batch_size or the size")


if __name__ == "__main__":
    main()
