"""Pipelines that begin with an image: image to image and inpainting, of all families.

Both run the last part of the steps: from a noised image (strength), or from the latents of another
pipeline that ended early (denoising_end), to which no noise is added (denoising_start).

Source: SDEdit (arXiv 2108.01073); inpainting with any text-to-image model, Blended Latent Diffusion
(arXiv 2206.02779).
"""

from functools import partial

import jax
import jax.numpy as jnp

from diffusers_flax.devices.parts import part
from diffusers_flax.images import pair_up, prepare_images
from diffusers_flax.pipelines.calls import CALL, GENERATE, published_call, with_options
from diffusers_flax.pipelines.generation import Generation, TextToImage, check_channels
from diffusers_flax.pipelines.sampling import (
    encode,
    guide,
    keep_outside,
    keys_of_sequel,
    keys_per_image,
    normal,
    resize,
    starting_noise,
)

RANGE = ("denoising_start", "denoising_end")
# The noise of image to image is added to an image.
NOISE_CALL = (*("noise" if name == "latents" else name for name in CALL), *RANGE)
NOISE_GENERATE = (*("noise" if name == "latents" else name for name in GENERATE), *RANGE)


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

    def _range_options(self, num_inference_steps, given):
        options = super()._range_options(num_inference_steps, given)
        strength, start = options.pop("strength"), 0
        if given["denoising_start"] is None:
            start = self.get_timestep_start(num_inference_steps, strength)
        return {"start_timestep": start} | options

    @part("vae")
    def _encode(self, params, image, keys, height, width):
        """Scaled latents of images, or those given, float32 (B, 4, h, w)."""
        size = self.image_size(height, width, image.shape)
        if self._is_latents(image.shape):
            return image.astype(jnp.float32)
        return encode(self._vae, params["vae"], resize(image, size), keys, self.layout)

    __call__ = published_call(
        Generation.__call__,
        "prompt_ids",
        "image",
        "params",
        "prng_seed",
        "strength",
        *NOISE_CALL,
    )

    @with_options("start_timestep", *NOISE_GENERATE)
    def _generate(self, prompt_ids, image, params, prng_seed, given):
        """Image to image as one pure function of arrays, for one device; jit or pmap it.

        Args as in __call__; start_timestep, a Python int, is get_timestep_start's, without effect
        if there is a denoising_start.

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
            given.num_inference_steps,
            latents.shape,
            given.start_timestep,
            given.timesteps,
            given.denoising_start,
            given.denoising_end,
        )
        state, _ = schedule
        noise = given.noise
        if given.denoising_start is not None:
            x_t = latents
            if noise is not None:
                raise ValueError("noise is not added with denoising_start; leave one of them out")
        else:
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


class Inpainting(ImageToImage):
    """Text, an image and a mask in, an image that is repainted within the mask out.

    A UNet of 9 channels sees the mask and the latents of the masked image. With any text-to-image
    model, whose UNet has 4 channels, the latents outside the mask are replaced after every step by
    the image's, noised to the next timestep; see sampling.keep_outside. With strength 1 the
    repainted part begins as noise, below 1 as the noised image.

    `latents`, standard normal noise, is added to the image if strength is below 1; PyTorch's
    pipelines then begin with this noise alone.
    """

    check_channels = staticmethod(partial(check_channels, for_inpainting=True))

    def _range_options(self, num_inference_steps, given):
        return TextToImage._range_options(self, num_inference_steps, given)

    def _inpaint(self, prompt_ids, image, mask, masked_image, params, prng_seed, given):
        """Inpainting as one pure function of arrays; image or masked_image may be None.

        Args as in __call__; given: the options of _generate, strength static.

        Returns:
            As TextToImage._generate.
        """
        branches = given.branches or self.guidance_branches(given.guidance_scale)
        B = len(prompt_ids)
        self._check_batch(prompt_ids, image, mask, masked_image)
        shape = (masked_image if image is None else image).shape
        size = self.image_size(given.height, given.width, shape)
        first_step = 0
        if given.denoising_start is None:
            first_step = self.get_timestep_start(given.num_inference_steps, given.strength)
        sees_mask = self.unet.config.in_channels != self.vae.config.latent_channels

        keys = keys_per_image(prng_seed, B)
        if first_step or given.denoising_start:
            keys = keys_of_sequel(keys)
        if given.denoising_start:  # of a pipeline that has used these keys
            keys = keys_of_sequel(keys)
        encode_image = partial(
            self._encode,
            params,
            keys=keys_of_sequel(keys),
            height=given.height,
            width=given.width,
        )
        if sees_mask:
            if masked_image is None:
                masked_image = blank(image, mask, size)
            masked_latents = encode_image(masked_image)  # (B, 4, h, w)
        if first_step or given.denoising_start or not sees_mask:
            if image is None:
                raise ValueError(
                    "a UNet of 4 channels, strength below 1 and denoising_start need the whole "
                    "image: give image=, made by diffusers_flax.images.prepare_images"
                )
            image_latents = encode_image(image)
        factor = self.vae_scale_factor
        mask = jax.image.resize(mask, (B, 1, *size), "nearest")
        mask = mask[..., ::factor, ::factor]  # as PyTorch's nearest neighbour, (B, 1, h, w)

        latent_shape = (masked_latents if sees_mask else image_latents).shape
        schedule = self._schedule(
            given.num_inference_steps,
            latent_shape,
            first_step,
            given.timesteps,
            given.denoising_start,
            given.denoising_end,
        )
        state, scales = schedule
        noise = starting_noise(given.latents, keys, latent_shape)
        if given.denoising_start:
            x_t = image_latents
            if sees_mask and given.latents is not None:
                raise ValueError("latents are not used with denoising_start; leave one of them out")
        elif first_step:
            x_t = self.scheduler.add_noise(state, image_latents, noise, state.timesteps[0])
        else:
            x_t = noise * state.init_noise_sigma
        after_step = None
        if not sees_mask:
            after_step = keep_outside(self.scheduler, mask, image_latents, noise, len(scales[0]))
        text = self._encode_text(params, prompt_ids, given.neg_prompt_ids, branches, x_t.shape)
        channels = [mask, masked_latents] if sees_mask else []
        inputs = self._unet_inputs(text, branches, given.guidance_scale, B, channels)
        weights = {name: getattr(given, name) for name in ("guidance_scale", "guidance_rescale")}
        x_0 = self._denoise(
            params,
            schedule,
            x_t,
            keys,
            branches,
            inputs,
            partial(guide, **weights),
            given.eta,
            after_step,
        )
        return x_0 if given.return_latents else self._decode(params, x_0)

    def _check_batch(self, prompt_ids, image, mask, masked_image):
        """Raise a ValueError unless all arrays have one batch and one size; None: not given."""
        B = len(prompt_ids)
        images = {"image": image, "masked_image": masked_image}
        shapes = {name: x.shape for name, x in images.items() if x is not None}
        for name, shape in (shapes or {"image": None}).items():
            pixels = None
            if shape is not None and len(shape) == 4:
                factor = self.vae_scale_factor if self._is_latents(shape) else 1
                pixels = tuple(side * factor for side in shape[2:])
            if pixels is None or shape[0] != B or mask.shape != (B, 1, *pixels):
                raise ValueError(
                    f"prompt_ids has shape {prompt_ids.shape}, mask {mask.shape}, {name} "
                    f"{shape}; they need one batch and one size; prepare_inputs makes them"
                )


def blank(image, mask, size):
    """Images (B, 3, H, W) resized to size (height, width), 0 where the mask (B, 1, H, W) is 1."""
    if image.shape[1] != 3:
        raise ValueError(
            f"image has shape {image.shape}: it is latents, which cannot be masked; give "
            "masked_image= as well"
        )
    mask = jax.image.resize(mask, (len(mask), 1, *size), "nearest")
    return resize(image, size) * (mask < 0.5).astype(image.dtype)
