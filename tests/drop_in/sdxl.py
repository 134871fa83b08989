"""SDXL images as scripts for diffusers 0.39 make them, compiled at the first call or before it."""

import jax
import jax.numpy as jnp
import numpy as np
from flax.jax_utils import replicate

from diffusers_flax import programs as cc
from diffusers_flax.pipelines.stable_diffusion_xl import FlaxStableDiffusionXLPipeline

PROMPT, NEGATIVE = "make it red", "red"


def load(model, cache):
    """The pipeline, and its parameters on every device: bfloat16 but for the scheduler's."""
    cc.initialize_cache(cache)
    pipeline, params = FlaxStableDiffusionXLPipeline.from_pretrained(model, split_head_dim=True)
    scheduler_state = params.pop("scheduler")
    params = jax.tree_util.tree_map(lambda x: x.astype(jnp.bfloat16), params)
    params["scheduler"] = scheduler_state
    return pipeline, replicate(params)


def inputs(pipeline):
    """Token ids of PROMPT and NEGATIVE on every device, and a key for each device."""
    ids = replicate(pipeline.prepare_inputs(PROMPT)), replicate(pipeline.prepare_inputs(NEGATIVE))
    return *ids, jax.random.split(jax.random.PRNGKey(33), jax.device_count())


def to_pil(pipeline, images):
    """PIL images of an array (devices, B, H, W, 3)."""
    images = images.reshape(-1, *images.shape[-3:])
    return pipeline.numpy_to_pil(np.array(images))


def main(model, cache, num_steps):
    """An image per device by pipeline(..., jit=True)."""
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
    return to_pil(pipeline, images)


def main_ahead_of_time(model, cache, num_steps, size):
    """The same images by pipeline._generate, compiled before it is called."""
    pipeline, params = load(model, cache)
    prompt_ids, neg_prompt_ids, rng = inputs(pipeline)
    guidance = jnp.array([5.0] * len(prompt_ids), dtype=jnp.float32)[:, None]
    generate = jax.pmap(pipeline._generate, static_broadcasted_argnums=[3, 4, 5, 9])
    generate = generate.lower(
        prompt_ids, params, rng, num_steps, size, size, guidance, None, neg_prompt_ids, False
    ).compile()
    images = generate(prompt_ids, params, rng, guidance, None, neg_prompt_ids)
    return to_pil(pipeline, images)
