"""SDXL images as scripts for diffusers 0.39 make them, compiled at the first call or before it."""

import jax
import jax.numpy as jnp
import numpy as np
from common import run
from diffusers import FlaxStableDiffusionXLPipeline
from flax.jax_utils import replicate
from jax.experimental.compilation_cache import compilation_cache as cc

PROMPT, NEGATIVE = "make it red", "red"


def load(model, cache):
    """The pipeline, and its parameters on every device: bfloat16 but for the scheduler's."""
    cc.initialize_cache(cache)
    pipeline, params = FlaxStableDiffusionXLPipeline.from_pretrained(model, split_head_dim=True)
    scheduler_state = params.pop("scheduler")
    params = jax.tree_map(lambda x: x.astype(jnp.bfloat16), params)
    params["scheduler"] = scheduler_state
    return pipeline, replicate(params)


def inputs(pipeline):
    """Token ids of PROMPT and NEGATIVE on every device, and a key for each device."""
    ids = replicate(pipeline.prepare_inputs(PROMPT)), replicate(pipeline.prepare_inputs(NEGATIVE))
    return *ids, jax.random.split(jax.random.PRNGKey(33), jax.device_count())


def save(pipeline, images, folder):
    """Write images (devices, B, H, W, 3) as FOLDER/0.png, FOLDER/1.png, ..."""
    images = images.reshape(-1, *images.shape[-3:])
    for number, image in enumerate(pipeline.numpy_to_pil(np.array(images))):
        image.save(f"{folder}/{number}.png")


def generate(model, cache, num_steps, output):
    """Write an image per device by pipeline(..., jit=True)."""
    pipeline, params = load(model, cache)
    prompt_ids, neg_prompt_ids, rng = inputs(pipeline)
    images = pipeline(
        prompt_ids,
        params,
        rng,
        num_inference_steps=num_steps,
        neg_prompt_ids=neg_prompt_ids,
        guidance_scale=5.0,
        jit=True,
    ).images
    save(pipeline, images, output)


def generate_ahead_of_time(model, cache, num_steps, output, size):
    """Write the same images by pipeline._generate, compiled before it is called."""
    pipeline, params = load(model, cache)
    prompt_ids, neg_prompt_ids, rng = inputs(pipeline)
    guidance = jnp.array([5.0] * len(prompt_ids), dtype=jnp.float32)[:, None]
    generate = jax.pmap(pipeline._generate, static_broadcasted_argnums=[3, 4, 5, 9])
    generate = generate.lower(
        prompt_ids, params, rng, num_steps, size, size, guidance, None, neg_prompt_ids, False
    ).compile()
    images = generate(prompt_ids, params, rng, guidance, None, neg_prompt_ids)
    save(pipeline, images, output)


def main(ahead_of_time, **flags):
    (generate_ahead_of_time if ahead_of_time else generate)(**flags)


if __name__ == "__main__":
    run(main)
