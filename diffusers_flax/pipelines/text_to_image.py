"""Base classes of the pipelines for text to image and image to image, of all families.

`_generate` is one pure function of arrays: text encoding, denoising and decoding are one program.

Source: Latent Diffusion Models (arXiv 2112.10752); image to image, SDEdit (arXiv 2108.01073).
"""

from functools import partial

import jax.numpy as jnp

from diffusers_flax.images import pair_up, prepare_images
from diffusers_flax.models.unet import guidance_embedding
from diffusers_flax.pipelines.base import FlaxDiffusionPipeline
from diffusers_flax.pipelines.generation import CALL, GENERATE, published_call, with_options
from diffusers_flax.pipelines.sampling import (
    encode,
    guide,
    keys_of_sequel,
    keys_per_image,
    normal,
    resize,
    rows_of,
    rows_per_image,
    starting_noise,
    text_branches,
)


def check_channels(path, configs, for_inpainting=False):
    """Refuse a UNet with other input channels than the pipeline feeds.

    path, configs: as in FlaxDiffusionPipeline.check. Inpainting adds a mask and the latents of the
    masked image to the noisy latents.
    """
    in_channels = configs["unet"].get("in_channels", 4)
    latent_channels = configs["vae"].get("latent_channels", 4)
    expected = 2 * latent_channels + 1 if for_inpainting else latent_channels
    if in_channels != expected:
        raise ValueError(
            f"the UNet of {path} has in_channels={in_channels}, this pipeline needs {expected}; "
            "edit with an InstructPix2Pix model by edit_cli.py, inpaint with "
            "FlaxStableDiffusionInpaintPipeline"
        )


class TextToImage(FlaxDiffusionPipeline):
    """Text to image; common to the pipelines of Stable Diffusion 1.x, 2.x and XL.

    Scheduler (dataclasses.replace changes it), number of steps and image size are compiled in;
    another choice compiles again and logs it. The guidance scale is an argument of the program;
    with 1 or less the program has one branch. The scheduler computes in float32, also if
    params["scheduler"] has another dtype.
    """

    text_axes = 1  # of one image's prompt_ids
    check_channels = staticmethod(check_channels)

    remedy_for_xl = (
        "this pipeline is for Stable Diffusion 1.x and 2.x; for XL use "
        "FlaxStableDiffusionXLPipeline (sdxl_single.py)"
    )

    def prepare_inputs(self, prompt):
        """Tokenize prompts; see prepare_text_inputs.

        Args:
            prompt: str or list of str.

        Returns:
            prompt_ids, int32 (B, 77).
        """
        return self.prepare_text_inputs(prompt)

    __call__ = published_call("prompt_ids", "params", "prng_seed", *CALL)

    @with_options(*GENERATE)
    def _generate(self, prompt_ids, params, prng_seed, given):
        """Text to image as one pure function of arrays, for one device; jit or pmap it.

        Args as in __call__. guidance_scale may be traced, then both branches run, unless
        `branches` (static) names them; None: those that guidance_scale needs.

        Returns:
            images, float32 (B, H, W, 3) in [0, 1], or with return_latents the scaled latents,
            float32 (B, 4, H / 8, W / 8).
        """
        branches = given.branches or self.guidance_branches(given.guidance_scale)
        shape = self.latent_shape(len(prompt_ids), given.height, given.width)
        keys = keys_per_image(prng_seed, len(prompt_ids))
        schedule = self._schedule(given.num_inference_steps, shape, timesteps=given.timesteps)
        x_t = starting_noise(given.latents, keys, shape) * schedule[0].init_noise_sigma
        text = self._encode_text(params, prompt_ids, given.neg_prompt_ids, branches, shape)
        inputs = self._unet_inputs(text, branches, given.guidance_scale, len(x_t))
        scales = {name: getattr(given, name) for name in ("guidance_scale", "guidance_rescale")}
        combine = partial(guide, **scales)
        x_0 = self._denoise(params, schedule, x_t, keys, branches, inputs, combine, given.eta)
        return x_0 if given.return_latents else self._decode(params, x_0)

    def guidance_branches(self, guidance_scale, guidance_rescale=0.0):
        """The branches to compute; a UNet that is distilled with guidance needs only one."""
        branches = text_branches(guidance_scale)
        return ("text",) if self.unet.config.time_cond_proj_dim is not None else branches

    def _encode_text(self, params, prompt_ids, neg_prompt_ids, branches, latent_shape):
        """The text of all branches for the UNet: (states (branches * B, 77, D), SDXL's further)."""
        if neg_prompt_ids is None:
            neg_prompt_ids = self.prepare_text_inputs("")
        neg_prompt_ids = rows_per_image(neg_prompt_ids, len(prompt_ids))
        texts = {"text": prompt_ids, "null": neg_prompt_ids.astype(prompt_ids.dtype)}
        ids = jnp.concatenate([texts[branch] for branch in branches])
        states = self.text_encoder(ids, params=params["text_encoder"], return_dict=True)
        return states.last_hidden_state, None

    def _unet_inputs(self, text, branches, guidance_scale, num_images, extra_channels=()):
        """The function that makes the UNet's arguments in each step, `inputs` of _denoise.

        Args:
            text: of _encode_text.
            branches: of guidance.
            guidance_scale: a UNet that is distilled with guidance embeds it.
            num_images: B.
            extra_channels: arrays (B, C, h, w) that join the UNet's input.
        """
        timestep_cond = None
        if (dim := self.unet.config.time_cond_proj_dim) is not None:
            scale = jnp.asarray(guidance_scale, jnp.float32).reshape(-1)
            timestep_cond = guidance_embedding(jnp.broadcast_to(scale, (num_images,)), dim)

        def inputs(active, x_t, t):
            model_input = jnp.concatenate([x_t, *extra_channels], axis=1)
            model_input = jnp.concatenate([model_input] * len(active))
            return model_input, t, *rows_of(text, branches, active), timestep_cond

        return inputs


class ImageToImage(TextToImage):
    """Text and an image to begin with in, image out.

    An image's noise differs from the noise that TextToImage draws for the same key, so one key can
    make an image and continue from it. With strength below 1 it differs from PyTorch for two
    schedulers: PyTorch's PNDM is then one timestep late (38 dB apart at strength 0.7), and its LMS
    takes coefficients for derivatives that it does not have.

    Source: SDEdit (arXiv 2108.01073), algorithm 1.
    """

    def prepare_inputs(self, prompt, image):
        """Turn prompts and images into arrays; a single one of either is repeated.

        Args:
            prompt: str or list of str.
            image: image or list of images of one size: PIL of any mode, or array (H, W, 3),
                or arrays (B, H, W, 3); uint8, or float in [0, 1]; or what output_type="latent"
                gave, (B, 4, h, w).

        Returns:
            (prompt_ids, image): int32 (B, 77), float32 (B, 3, H, W) in [-1, 1], or the latents.

        Raises:
            ValueError: numbers of prompts and images differ, sizes differ, or it is not an image.
        """
        if getattr(image, "ndim", 0) != 4 or not self._is_latents(image.shape):
            image = prepare_images(image)
        return pair_up(super().prepare_inputs(prompt), image)

    def get_timestep_start(self, num_inference_steps, strength):
        """Number of first steps to skip: the noised image replaces their result.

        Args:
            num_inference_steps: of the full schedule.
            strength: share of the steps to run, in [0, 1].

        Raises:
            ValueError: strength is out of range, or leaves no step.
        """
        if not 0 <= strength <= 1:
            raise ValueError(f"strength={strength} must be from 0 to 1, the share of the steps")
        num_done = min(int(num_inference_steps * strength), num_inference_steps)
        if num_done < 1:
            raise ValueError(
                f"strength={strength} of num_inference_steps={num_inference_steps} leaves no step "
                f"to do; take strength {1 / num_inference_steps:.2g} or more"
            )
        return num_inference_steps - num_done

    def _encode(self, params, image, keys, height, width):
        """Scaled latents of images, or those given, float32 (B, 4, h, w)."""
        size = self.image_size(height, width, image.shape)
        if self._is_latents(image.shape):
            return image.astype(jnp.float32)
        return encode(self._vae, params["vae"], resize(image, size), keys)

    __call__ = published_call(
        "prompt_ids",
        "image",
        "params",
        "prng_seed",
        "strength",
        *("noise" if name == "latents" else name for name in CALL),
    )

    @with_options("start_timestep", *("noise" if name == "latents" else name for name in GENERATE))
    def _generate(self, prompt_ids, image, params, prng_seed, given):
        """Image to image as one pure function of arrays, for one device; jit or pmap it.

        Args as in __call__; start_timestep, a Python int, is get_timestep_start's.

        Returns:
            As FlaxStableDiffusionPipeline._generate.
        """
        branches = given.branches or self.guidance_branches(given.guidance_scale)
        if image.ndim != 4 or len(image) != len(prompt_ids):
            raise ValueError(
                f"image has shape {image.shape}, prompt_ids {prompt_ids.shape}; both need the same "
                "batch; prepare_inputs makes both"
            )
        keys = keys_of_sequel(keys_per_image(prng_seed, len(prompt_ids)))
        latents = self._encode(params, image, keys, given.height, given.width)
        schedule = self._schedule(
            given.num_inference_steps, latents.shape, given.start_timestep, given.timesteps
        )
        state, _ = schedule
        noise = given.noise
        if noise is None:
            noise = normal(keys, 0, latents.shape[1:])
        elif noise.shape != latents.shape:
            raise ValueError(f"noise has shape {noise.shape}, need {latents.shape}")
        x_t = self.scheduler.add_noise(state, latents, noise, state.timesteps[0])
        text = self._encode_text(params, prompt_ids, given.neg_prompt_ids, branches, x_t.shape)
        inputs = self._unet_inputs(text, branches, given.guidance_scale, len(x_t))
        scales = {name: getattr(given, name) for name in ("guidance_scale", "guidance_rescale")}
        combine = partial(guide, **scales)
        x_0 = self._denoise(params, schedule, x_t, keys, branches, inputs, combine, given.eta)
        return x_0 if given.return_latents else self._decode(params, x_0)
