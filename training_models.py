"""The models of a training run: loading and checking them, encoding text and images."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention_flax import by_platform
from modeling_flax_clip import FlaxCLIPTextModel
from modeling_flax_unet import FlaxUNet2DConditionModel
from modeling_flax_vae import FlaxAutoencoderKL
from pipeline_flax_stable_diffusion_instruct_pix2pix import (
    FlaxStableDiffusionInstructPix2PixPipeline,
)
from pipeline_flax_utils import load_tokenizer
from scheduling_flax import FlaxDDPMScheduler, scheduler_from_pretrained
from training_flags import Config, flag, nearest_multiples


class Models(NamedTuple):
    """The modules of a training step; parameters travel separately."""

    unet: FlaxUNet2DConditionModel
    vae: FlaxAutoencoderKL
    text_encoder: FlaxCLIPTextModel
    scheduler: FlaxDDPMScheduler


def encode_text(text_encoder, params, input_ids):
    """The states of a text encoder, as a pytree that dropout and loss take.

    Args:
        text_encoder, params: FlaxCLIPTextModel and its parameters.
        input_ids: integers (B, T).

    Returns:
        {"states": (B, T, D)}.
    """
    return {"states": text_encoder(input_ids, params=params)[0]}


def encode_images(vae, params, images):
    """The VAE's posterior of images; CPUs encode one image after the other.

    Args:
        vae, params: FlaxAutoencoderKL and its parameters.
        images: uint8 (B, R, R, 3).

    Returns:
        A distribution with mean and std, float32 (B, h, w, C), not scaled.
    """

    def encode(params, images):
        return vae.apply({"params": params}, images, method=vae.encode).latent_dist

    def encode_one_by_one(params, images):  # keeps the activations in a CPU's caches
        posteriors = jax.lax.map(partial(encode, params), images[:, None])
        return jax.tree.map(lambda x: x[:, 0], posteriors)

    images = jnp.transpose(images.astype(jnp.float32) / 127.5 - 1, (0, 3, 1, 2))
    return by_platform(params, images, cpu=encode_one_by_one, default=encode)


def encode_batch(batch, frozen, models):
    """Latents and text states of a batch.

    Args:
        batch: original_pixel_values and edited_pixel_values, uint8 (B, R, R, 3), or instead the
            latents of cache_latents.py, original_latents (B, h, w, C) and edited_latents
            (B, h, w, 2 C); input_ids (B, T).
        frozen: {"vae", "text_encoder"} parameters; no VAE for latents.
        models: Models.

    Returns:
        mean and std of the edited images' posterior, float32 (B, h, w, C); mode of the original
        images', (B, h, w, C); text, see encode_text.
    """
    text = encode_text(models.text_encoder, frozen["text_encoder"], batch["input_ids"])
    if "edited_latents" in batch:
        mean, std = jnp.split(batch["edited_latents"].astype(jnp.float32), 2, axis=-1)
        return mean, std, batch["original_latents"].astype(jnp.float32), text
    images = jnp.concatenate((batch["edited_pixel_values"], batch["original_pixel_values"]))
    posterior = encode_images(models.vae, frozen["vae"], images)  # (2B, h, w, C)
    B = len(images) // 2
    return posterior.mean[:B], posterior.std[:B], posterior.mode()[B:], text


def load_models(config: Config, dtype: Any):
    """Load the models of a run and check that they go together; weights stay on the host.

    Args:
        config: Config.
        dtype: compute dtype of the modules.

    Returns:
        (Models; the pipeline to save at the end; the frozen parameters that train_step takes, in
        float32; the UNet's parameters, float32).

    Raises:
        ValueError: files are missing or damaged, or the models do not fit each other.
    """
    source, revision = config.pretrained_model_name_or_path, config.revision
    files = dict(revision=revision, variant=config.variant, dtype=dtype)
    unet, unet_params = FlaxUNet2DConditionModel.from_pretrained(
        config.unet_model_name_or_path, dtype=dtype
    )
    if unet.addition_embed_type is not None:
        raise ValueError(
            f"{config.unet_model_name_or_path} is the UNet of an SDXL, which is not trained here; "
            "give a Stable Diffusion 1.x or 2.x that create_modified_unet.py has widened"
        )
    unet = unet.clone(gradient_checkpointing=config.gradient_checkpointing)
    vae, vae_params = FlaxAutoencoderKL.from_pretrained(source, subfolder="vae", **files)
    text_encoder, text_params = FlaxCLIPTextModel.from_pretrained(
        source, subfolder="text_encoder", _do_init=False, **files
    )
    scheduler, scheduler_state = FlaxDDPMScheduler.from_pretrained(
        source, subfolder="scheduler", revision=revision
    )
    sampler, _ = scheduler_from_pretrained(source, revision=revision)
    tokenizer = load_tokenizer(source, text_encoder, revision)
    models = Models(unet, vae, text_encoder, scheduler)
    check_models(config, models)

    float32 = partial(jax.tree.map, lambda x: np.asarray(x, np.float32))
    pipeline = FlaxStableDiffusionInstructPix2PixPipeline(
        vae, text_encoder, tokenizer, unet, sampler
    )
    null_ids = pipeline.prepare_text_inputs("")
    null_text = jax.jit(partial(encode_text, text_encoder))(text_params, null_ids)
    frozen = {
        "vae": float32(vae_params),
        "text_encoder": float32(text_params),
        "null_text": jax.tree.map(np.asarray, null_text),  # {"states": (1, T, D)}
        "scheduler": scheduler_state,
    }
    return models, pipeline, frozen, float32(unet_params)


def check_models(config: Config, models: Models):
    """Raise a ValueError for models that do not fit each other or the resolution."""
    unet, vae, text_encoder, scheduler = models
    source = config.pretrained_model_name_or_path
    if scheduler.config.prediction_type == "sample":
        raise ValueError(
            f"the scheduler of {source} has prediction_type=sample; epsilon and v_prediction can "
            "be trained"
        )
    if unet.in_channels != 2 * vae.latent_channels:
        raise ValueError(
            f"the UNet in {config.unet_model_name_or_path} has {unet.in_channels} input channels, "
            f"InstructPix2Pix needs {2 * vae.latent_channels}; widen it: create_modified_unet.py"
        )
    if unet.cross_attention_dim != text_encoder.module.hidden_size:
        raise ValueError(
            f"the UNet in {config.unet_model_name_or_path} reads text states "
            f"{unet.cross_attention_dim} wide, the text encoder of {source} makes "
            f"{text_encoder.module.hidden_size}; take both from the same Stable Diffusion"
        )
    factor = 2 ** (len(vae.block_out_channels) + len(unet.block_out_channels) - 2)
    if config.resolution % factor:
        raise ValueError(
            f"{flag(config, 'resolution')} is not a multiple of {factor}; "
            f"try {nearest_multiples(config.resolution, factor)}"
        )
