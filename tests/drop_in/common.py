"""Common to the scripts here: flags, images, token ids, the loss, saving a pipeline."""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from diffusers import FlaxStableDiffusionPipeline
from diffusers.pipelines.stable_diffusion import FlaxStableDiffusionSafetyChecker
from PIL import Image
from transformers import CLIPImageProcessor

BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
RESOLUTION = 16


def run(main):
    """Call main with the keywords in this process's argument, JSON; print what it returns."""
    print(json.dumps(main(**json.loads(sys.argv[1]))))


def read_images(folder, number):
    """The first images of a directory, float32 (number, 3, RESOLUTION, RESOLUTION) in [-1, 1]."""
    files = sorted(Path(folder).iterdir())[:number]
    images = [Image.open(f).convert("RGB").resize((RESOLUTION, RESOLUTION)) for f in files]
    return np.stack(images).transpose(0, 3, 1, 2).astype(np.float32) / 127.5 - 1


def token_ids(tokenizer, captions):
    """int (B, T) ids of captions: tokenized one by one, then padded together."""
    length = tokenizer.model_max_length
    ids = [tokenizer(c, truncation=True, max_length=length).input_ids for c in captions]
    padded = tokenizer.pad(
        {"input_ids": ids}, padding="max_length", max_length=length, return_tensors="np"
    )
    return padded.input_ids


def diffusion_loss(vae, vae_params, unet, unet_params, scheduler, pixels, states, rng, train):
    """Mean squared error of the UNet's output, per image; pixels (B, 3, H, W) in [-1, 1]."""
    state = scheduler.create_state()
    posterior_rng, noise_rng, time_rng = jax.random.split(rng, 3)
    posterior = vae.apply(
        {"params": vae_params}, pixels, deterministic=True, method=vae.encode
    ).latent_dist
    latents = jnp.transpose(posterior.sample(posterior_rng), (0, 3, 1, 2))  # (B, 4, h, w)
    latents = latents * vae.config.scaling_factor
    noise = jax.random.normal(noise_rng, latents.shape)
    num_steps = scheduler.config.num_train_timesteps
    timesteps = jax.random.randint(time_rng, (len(latents),), 0, num_steps)
    noisy = scheduler.add_noise(state, latents, noise, timesteps)
    output = unet.apply({"params": unet_params}, noisy, timesteps, states, train=train).sample
    if scheduler.config.prediction_type == "v_prediction":
        target = scheduler.get_velocity(state, latents, noise, timesteps)
    else:
        target = noise
    return jnp.mean((target - output) ** 2, axis=(1, 2, 3))


def first(replicated):
    """The first device's arrays of a replicated pytree, on the host."""
    return jax.device_get(jax.tree_util.tree_map(lambda x: x[0], replicated))


def save(folder, safety_checker, params, **components):
    """Write a pipeline with trained params and the safety checker of a directory."""
    checker = FlaxStableDiffusionSafetyChecker.from_pretrained(safety_checker, from_pt=True)
    pipeline = FlaxStableDiffusionPipeline(
        **components, safety_checker=checker, feature_extractor=CLIPImageProcessor()
    )
    pipeline.save_pretrained(folder, params={**params, "safety_checker": checker.params})
