"""Inpainting, of all families: repaints the masked area of an image.

Source: inpainting with any text-to-image model, Blended Latent Diffusion (arXiv 2206.02779).
"""

import jax

from diffusers_flax.pipelines.base import FlaxDiffusionPipeline
from diffusers_flax.pipelines.image_to_image import ImageToImage
from diffusers_flax.pipelines.running import choose_denoising
from diffusers_flax.pipelines.sampling import (
    keep_outside,
    keys_of_sequel,
    keys_per_image,
    resize,
    starting_noise,
)


class Inpainting(ImageToImage):
    """Text, an image and a mask in, the image with the masked area repainted out.

    A UNet of 9 channels sees the mask and the latents of the masked image. With any text-to-image
    model, whose UNet has 4 channels, the image's latents, noised to the next timestep, replace the
    latents outside the mask after every step; see sampling.keep_outside. With strength 1 the masked
    area begins as noise, below 1 as the noised image.

    If strength is below 1, `latents`, standard normal noise, is added to the image; PyTorch's
    pipelines begin with this noise alone.
    """

    unet_inputs = ((2, 1), (1, 0))
    _generate = FlaxDiffusionPipeline._generate  # strength chooses the first step

    @property
    def sees_mask(self):
        """Whether the UNet takes the mask and the latents of the masked image: 9 channels."""
        return self.unet.in_channels != self.vae.latent_channels

    def encode_image(self, params, inputs, options):
        """Scaled latents (B, 4, h, w) of the masked and the whole image, None where not needed."""
        image, masked_image, mask = (inputs[name] for name in ("image", "masked_image", "mask"))
        shape = options.height, options.width
        keys = keys_of_sequel(self.keys_of(inputs, options))
        masked_latents = image_latents = None
        if self.sees_mask:
            if masked_image is None:
                masked_image = blank(image, mask, shape)
            masked_latents = self.latents_of(params, masked_image, keys, options)
        if options.first_step or options.denoising_start or not self.sees_mask:
            if image is None:
                raise ValueError(
                    "a UNet of 4 channels, strength below 1 and denoising_start need the whole "
                    "image: give image=, made by diffusers_flax.images.prepare_images"
                )
            image_latents = self.latents_of(params, image, keys, options)
        return masked_latents, image_latents

    def denoise(self, params, inputs, options, text, encoded):
        """Scaled latents (B, 4, h, w), repainted within the mask; encoded: of encode_image."""
        masked_latents, image_latents = encoded
        B, factor = len(inputs["prompt_ids"]), self.vae_scale_factor
        size = options.height, options.width
        mask = jax.image.resize(inputs["mask"], (B, 1, *size), "nearest")
        mask = mask[..., ::factor, ::factor]  # as PyTorch's nearest neighbour, (B, 1, h, w)

        keys = self.keys_of(inputs, options)
        shape = (masked_latents if self.sees_mask else image_latents).shape
        schedule = self.make_schedule(options, shape)
        state, noise = schedule.state, starting_noise(inputs["latents"], keys, shape)
        if options.denoising_start:
            x_t = image_latents
        elif options.first_step:
            x_t = self.scheduler.add_noise(state, image_latents, noise, state.timesteps[0])
        else:
            x_t = noise * state.init_noise_sigma
        after_step, extra = None, (mask, masked_latents)
        if not self.sees_mask:
            after_step, extra = keep_outside(schedule, mask, image_latents, noise), ()
        prediction = self.text_prediction(inputs, options, text, B, extra)
        denoise = choose_denoising(self, params, schedule, keys, prediction, shape[2])
        return denoise(x_t, after_step=after_step)

    def keys_of(self, inputs, options):
        """Keys of a run, one per image; they differ from the keys of a run that made the image."""
        keys = keys_per_image(inputs["prng_seed"], len(inputs["prompt_ids"]))
        if options.first_step or options.denoising_start:
            keys = keys_of_sequel(keys)
        return keys_of_sequel(keys) if options.denoising_start else keys


def blank(image, mask, shape):
    """Images (B, 3, H, W) of a shape (height, width), 0 where the mask (B, 1, H, W) is 1."""
    mask = jax.image.resize(mask, (len(mask), 1, *shape), "nearest")
    return resize(image, shape) * (mask < 0.5).astype(image.dtype)
