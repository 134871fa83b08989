"""FlaxStableDiffusionInstructPix2PixPipeline: edit images by instruction, in one compiled program.

    pipeline, params = FlaxStableDiffusionInstructPix2PixPipeline.from_pretrained("MODEL")
    prompt_ids, image = pipeline.prepare_inputs("make it red", Image.open("in.png"))
    images = pipeline(prompt_ids, image, params, jax.random.key(0)).images    # (1, H, W, 3), [0, 1]

An edit of a part of the image, the white part of a mask; all other pixels stay as they are:

    prompt_ids, image, mask = pipeline.prepare_inputs("make it red", image, Image.open("mask.png"))
    images = pipeline(prompt_ids, image, params, jax.random.key(0), mask=mask).images

On several devices, each with an equal part of the images:

    p_params = flax.jax_utils.replicate(params)
    prompt_ids, image = flax.training.common_utils.shard((prompt_ids, image))
    images = pipeline(prompt_ids, image, p_params, key, jit=True).images  # (devices, B, H, W, 3)

Source: InstructPix2Pix (arXiv 2211.09800); masks, Blended Latent Diffusion (arXiv 2206.02779).
"""

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from diffusers_flax.acceleration.plans import TGate
from diffusers_flax.devices.parts import part
from diffusers_flax.images import pair_up, pair_with_masks, prepare_images
from diffusers_flax.pipelines.base import MODULES
from diffusers_flax.pipelines.calls import published_call, with_options
from diffusers_flax.pipelines.generation import Generation
from diffusers_flax.pipelines.outputs import FlaxStableDiffusionPipelineOutput
from diffusers_flax.pipelines.sampling import (
    keep_outside,
    keys_per_image,
    latent_mask,
    paste,
    posterior_of,
    rescale_guidance,
    resize,
    rows_of_branches,
    rows_per_image,
    starting_noise,
)
from diffusers_flax.pipelines.stable_diffusion import StableDiffusionParts

__all__ = ["FlaxStableDiffusionInstructPix2PixPipeline", "FlaxStableDiffusionPipelineOutput"]

# Branches of guidance: the UNet sees instruction and image, the image only, or neither.
BRANCHES = ("text", "image", "null")
# Latents around the white part of a mask that an edit may change too; their pixels are the input's
# in the result. With 0 they would pull the edit back to the input, see docs/editing.md.
MASK_MARGIN = 6
TEXT_OF_BRANCH = {"text": "text", "image": "null", "null": "null"}


def guidance_weights(guidance_scale, image_guidance_scale):
    """Weights of the branches' noise predictions in the guided one; they sum to 1.

    Source: InstructPix2Pix (arXiv 2211.09800), equation 3, sorted by prediction.
    """
    return (
        guidance_scale,
        image_guidance_scale - guidance_scale,
        1 - image_guidance_scale,
    )


def edit_branches(guidance_scale, image_guidance_scale, guidance_rescale=0.0):
    """Choose the branches that are needed; all three for JAX arrays.

    A branch is needed if its weight is not zero, and the text's for guidance_rescale.

    Args:
        guidance_scale, image_guidance_scale: s_T and s_I, numbers >= 0 or JAX arrays.
        guidance_rescale: number from 0 to 1, or a JAX array.

    Returns:
        Some of BRANCHES, in their order.

    Raises:
        ValueError: a scale is negative or not finite, or guidance_rescale is not from 0 to 1.
    """
    rescales = isinstance(guidance_rescale, jax.Array) or guidance_rescale > 0
    if not isinstance(guidance_rescale, jax.Array) and not 0 <= guidance_rescale <= 1:
        raise ValueError(f"guidance_rescale={guidance_rescale} must be from 0 to 1; 0 is off")
    scales = {"guidance_scale": guidance_scale, "image_guidance_scale": image_guidance_scale}
    if any(isinstance(scale, jax.Array) for scale in scales.values()):
        return BRANCHES
    for name, scale in scales.items():
        if not 0 <= scale < math.inf:
            raise ValueError(
                f"{name}={scale} must be 0 or more; guidance_scale=1 and image_guidance_scale=1 "
                "switch guidance off"
            )
    weights = guidance_weights(guidance_scale, image_guidance_scale)
    needed = dict(zip(BRANCHES, weights))
    return tuple(x for x in BRANCHES if needed[x] != 0 or (x == "text" and rescales))


def check_channels(path, configs):
    """Raise a ValueError unless the UNet takes the latents of an image to edit.

    Args:
        path: pipeline directory or hub id.
        configs: {part: its config}, with "unet" and "vae".
    """
    in_channels = configs["unet"].get("in_channels", 4)
    latent_channels = configs["vae"].get("latent_channels", 4)
    if (dim := configs["unet"].get("time_cond_proj_dim")) is not None:
        raise ValueError(
            f"the UNet of {path} has time_cond_proj_dim={dim}: it embeds one guidance scale, and "
            "edits have two; distil a LoRA with distill_lcm.py instead"
        )
    if in_channels == latent_channels:
        raise ValueError(
            f"{path} is not an InstructPix2Pix model: its UNet has in_channels={in_channels}, so "
            "it makes images from text only; widen it with create_modified_unet.py and train it "
            "with flax_train_instruct_pix2pix.py"
        )
    if in_channels != 2 * latent_channels:
        raise ValueError(
            f"{path} is not an InstructPix2Pix model: its UNet has in_channels={in_channels}, "
            f"which must be twice its VAE's latent_channels={latent_channels}"
        )


def pixels_per_latent(configs, resolution):
    """How many pixels of a side the VAE turns into one; checks --resolution as well.

    Args:
        configs: {part: its config}, with "unet" and "vae".
        resolution: of the longer side of the images, pixels.

    Raises:
        ValueError: the UNet would have to halve latents with a side of one pixel.
    """
    factor = 2 ** (len(configs["vae"]["block_out_channels"]) - 1)
    unet = {"block_out_channels": MODULES["unet"].block_out_channels} | dict(configs["unet"])
    smallest = factor * 2 ** (len(unet["block_out_channels"]) - 1)
    if resolution < smallest:
        side = unet.get("sample_size")
        usual = f"; its UNet was made for {factor * side}" if isinstance(side, int) else ""
        raise ValueError(
            f"--resolution {resolution} is too small: this model's VAE and UNet reduce sides to "
            f"1/{smallest}, which takes {smallest} pixels or more{usual}"
        )
    return factor


class InstructPix2Pix:
    """The editing pipelines of Stable Diffusion and SDXL have these methods in common.

    A subclass has `_encode_text`, as TextToImage.
    """

    check_channels = staticmethod(check_channels)
    is_cosxl_edit = False  # the UNet takes the latents of the image to edit scaled, as CosXL Edit

    @classmethod
    def check_acceleration(cls, acceleration):
        """See FlaxDiffusionPipeline.check_acceleration."""
        if isinstance(acceleration.cache, TGate):
            raise ValueError(
                "--accelerate tgate is for text to image; for edits take guidance:stop=0.6"
            )

    def prepare_inputs(self, prompt, image, mask=None, mask_feather=0):
        """Turn instructions and images into arrays; a single one of either is repeated.

        Args:
            prompt: str or list of str.
            image: image or list of images of one size: PIL of any mode, or array (H, W, 3),
                or arrays (B, H, W, 3); uint8, or float in [0, 1].
            mask: one or as many, of the images' size, white (1) where an image may change; see
                images.prepare_masks. None: everywhere.
            mask_feather: pixels inside of the white part, along its border, in which the edit fades
                in.

        Returns:
            (prompt_ids, image): int32 (B, 77), float32 (B, 3, H, W) in [-1, 1]; with a mask
            (prompt_ids, image, mask), the last float32 (B, 1, H, W) from 0 to 1.

        Raises:
            ValueError: numbers of prompts, images and masks differ, sizes differ, it is not an
                image, or a mask has no white.
        """
        prompt_ids, image = self.prepare_text_inputs(prompt), prepare_images(image)
        if mask is None:
            return pair_up(prompt_ids, image)
        prompt_ids, image, mask = pair_with_masks(prompt_ids, image, mask, feather=mask_feather)
        if not mask.any((1, 2, 3)).all():
            raise ValueError("a mask has no white, so nothing may change; white may change")
        return prompt_ids, image, mask

    __call__ = published_call(
        Generation.__call__,
        *("prompt_ids", "image", "params", "prng_seed", "num_inference_steps", "guidance_scale"),
        *("image_guidance_scale", "height", "width", "latents", "neg_prompt_ids", "return_dict"),
        *("jit", "output_type", "guidance_rescale", "timesteps", "eta", "mask"),
    )

    def _check_inputs(self, given):
        if given["image"].dtype == np.uint8:
            raise ValueError("image is uint8; prepare_inputs makes it float32 in [-1, 1]")
        if (mask := given["mask"]) is not None and getattr(mask, "dtype", None) != np.float32:
            raise ValueError(
                f"mask is of type {getattr(mask, 'dtype', type(mask).__name__)}; prepare_inputs "
                "makes it float32 from 0 to 1"
            )
        if mask is not None and not isinstance(mask, jax.core.Tracer):
            low, high = mask.min(), mask.max()
            if not (low >= 0 and high <= 1):
                raise ValueError(f"mask has values from {low} to {high}; they are from 0 to 1")
            if not mask.any(tuple(range(mask.ndim - 3, mask.ndim))).all():
                raise ValueError("a mask is 0 everywhere, so nothing may change; 1 may change")

    def guidance_branches(self, guidance_scale, image_guidance_scale, guidance_rescale=0.0):
        """The branches of guidance to compute; all for arrays of scales; see edit_branches."""
        scales, phi = (guidance_scale, image_guidance_scale), float(guidance_rescale)
        if not any(map(np.ndim, scales)):
            return edit_branches(*map(float, scales), phi)
        for values in zip(*map(np.ravel, np.broadcast_arrays(*scales))):
            edit_branches(*map(float, values), phi)
        return BRANCHES

    @with_options(
        *("num_inference_steps", "height", "width", "guidance_scale", "image_guidance_scale"),
        *("latents", "neg_prompt_ids", "branches", "guidance_rescale", "timesteps", "eta"),
        *("return_latents", "mask"),
    )
    def _generate(self, prompt_ids, image, params, prng_seed, given):
        """The edit as one pure function of arrays, for one device; jit or pmap it.

        Args:
            branches: branches of guidance to compute, static; None: branches with a weight other
                than zero, all three if the scales are traced. Other arguments: as for __call__.

        Returns:
            images, float32 (B, H, W, 3) in [0, 1], or with return_latents the scaled latents,
            float32 (B, 4, H / 8, W / 8).
        """
        guidance_scale, image_guidance_scale = given.guidance_scale, given.image_guidance_scale
        guidance_rescale, branches = given.guidance_rescale, given.branches
        if branches is None:
            branches = edit_branches(guidance_scale, image_guidance_scale, guidance_rescale)
        B = prompt_ids.shape[0]
        if image.ndim != 4 or image.shape[0] != B:
            raise ValueError(
                f"image has shape {image.shape}, prompt_ids {prompt_ids.shape}; image is "
                "(batch, 3, height, width) with the same batch; prepare_inputs makes both"
            )
        if given.mask is not None and given.mask.shape != (B, 1, *image.shape[2:]):
            raise ValueError(
                f"mask has shape {given.mask.shape}, image {image.shape}; mask is (batch, 1, "
                "height, width) of the same batch and size; prepare_inputs makes both"
            )

        # The image to edit: the posterior's mode, unscaled but for CosXL Edit, as in training
        # (section 3.2).
        image = resize(image, self.image_size(given.height, given.width, image.shape))
        input_latents = self._encode_mode(params, image)  # (B, 4, h, w)
        scaling_factor = self.vae.config.scaling_factor
        image_latents = input_latents * scaling_factor if self.is_cosxl_edit else input_latents
        image_latents_in = jnp.concatenate(
            [jnp.zeros_like(image_latents) if x == "null" else image_latents for x in branches]
        )
        text = self._encode_text(
            params, prompt_ids, given.neg_prompt_ids, branches, image_latents.shape
        )

        # Noise, one key per image
        keys = keys_per_image(prng_seed, B)
        schedule = self._schedule(
            given.num_inference_steps, image_latents.shape, timesteps=given.timesteps
        )
        noise = starting_noise(given.latents, keys, image_latents.shape)
        x_T = noise * schedule[0].init_noise_sigma
        after_step, finish = None, lambda images: images
        if given.mask is not None:
            mask = jax.image.resize(given.mask, (B, 1, *image.shape[2:]), "nearest")
            finish = partial(paste, image=image, mask=mask)
            latent_weights = latent_mask(mask, self.vae_scale_factor, MASK_MARGIN)
            num_steps = len(schedule[1][0])
            kept = input_latents.astype(jnp.float32) * scaling_factor
            after_step = keep_outside(self.scheduler, latent_weights, kept, noise, num_steps)

        # Denoise
        def inputs(active, x_t, t):
            image_rows, *text_rows = rows_of_branches([image_latents_in, *text], branches, active)
            model_input = jnp.concatenate([x_t] * len(active))
            return jnp.concatenate([model_input, image_rows], axis=1), t, *text_rows, None

        def combine(eps_pred, active):
            weights = (guidance_scale, image_guidance_scale)
            if active != branches:  # guidance by the image has ended, or all guidance
                weights = (guidance_scale if len(active) > 1 else 1.0, 1.0)
            weights = (jnp.asarray(s, jnp.float32) for s in weights)
            weights = (s.reshape(-1, 1, 1, 1) if s.ndim else s for s in weights)  # of each image
            weights = guidance_weights(*weights)
            weights = dict(zip(BRANCHES, weights))
            eps_pred = dict(zip(active, jnp.split(eps_pred, len(active))))
            guided = sum(weights[branch] * eps for branch, eps in eps_pred.items())
            if "text" not in active:
                return guided
            return rescale_guidance(guided, eps_pred["text"], guidance_rescale)

        of_mask = {"after_step": after_step, "finish": finish}
        arguments = params, schedule, x_T, keys, branches, inputs, combine, given.eta
        x_0 = self._denoise(*arguments, **of_mask)
        return x_0 if given.return_latents else finish(self._decode(params, x_0))

    @part("vae")
    def _encode_mode(self, params, image):
        """The mode of the posterior over an image's latents, unscaled, (B, C, h, w)."""
        mode = posterior_of(self._vae, params["vae"], image, self.layout).mode()
        return jnp.transpose(mode, (0, 3, 1, 2))


@dataclass(frozen=True, eq=False)
class FlaxStableDiffusionInstructPix2PixPipeline(InstructPix2Pix, StableDiffusionParts):
    """Edit images with Stable Diffusion 1.x and 2.x.

    Scheduler, number of steps, image size and branches are compiled in; another choice compiles
    again and logs it. The guidance scales are arguments of the compiled program; it changes only if
    a branch of guidance is added or removed.
    """

    torch_class_name = "StableDiffusionInstructPix2PixPipeline"
    text_axes = 1  # of one image's prompt_ids

    remedy_for_xl = (
        "open it with FlaxStableDiffusionXLInstructPix2PixPipeline "
        "(diffusers_flax/pipelines/instruct_pix2pix_xl.py)"
    )

    @part("text_encoder")
    def _encode_text(self, params, prompt_ids, neg_prompt_ids, branches, latent_shape):
        B = len(prompt_ids)
        if neg_prompt_ids is None:
            null_ids = self.prepare_text_inputs("")
        else:
            null_ids = rows_per_image(neg_prompt_ids, B).astype(prompt_ids.dtype)
        text_ids = jnp.concatenate([prompt_ids, null_ids])
        states = self.text_encoder(text_ids, params=params["text_encoder"], return_dict=True)
        text, null_text = states.last_hidden_state[:B], states.last_hidden_state[B:]
        states = {"text": text, "null": jnp.broadcast_to(null_text, text.shape)}  # (B, 77, D)
        return jnp.concatenate([states[TEXT_OF_BRANCH[branch]] for branch in branches]), None
