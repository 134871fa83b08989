"""Image to image, of all families.

A run makes the last steps of a schedule: from a noised image (strength), or from the latents of
another pipeline that ended early (denoising_end), without adding noise (denoising_start).

Source: SDEdit (arXiv 2108.01073).
"""

import math
from typing import Unpack

import jax.numpy as jnp

from diffusers_flax.images import pair_up, prepare_images
from diffusers_flax.pipelines.running import CallOptions, choose_denoising, run
from diffusers_flax.pipelines.sampling import (
    encode,
    keys_of_sequel,
    keys_per_image,
    resize,
    starting_noise,
)
from diffusers_flax.pipelines.text_to_image import TextToImage


class ImageToImage(TextToImage):
    """Text and an image to start from in, image out.

    The noise differs from TextToImage's for the same key, so one key can make an image and continue
    from it. Images differ from PyTorch's for two schedulers if strength is below 1: PyTorch's PNDM
    is then one timestep late (38 dB apart at strength 0.7), and its LMS takes coefficients for
    derivatives that it does not have.

    Source: SDEdit (arXiv 2108.01073), algorithm 1.
    """

    encodes_images = True

    def prepare_inputs(self, prompt, image):
        """Turn prompts and images into arrays; a single one of either is repeated.

        Args:
            prompt: str or list of str.
            image: image or list of images of one size: PIL of any mode, or array (H, W, 3),
                or arrays (B, H, W, 3); uint8, or float in [0, 1]; or latents (B, 4, h, w), as
                from output_type="latent".

        Returns:
            (prompt_ids, image): int32 (B, 77), float32 (B, 3, H, W) in [-1, 1], or the latents.

        Raises:
            ValueError: numbers of prompts and images differ, sizes differ, or it is not an image.
        """
        if getattr(image, "ndim", 0) != 4 or not self.is_latents(image.shape):
            image = prepare_images(image)
        return pair_up(super().prepare_inputs(prompt), image)

    @staticmethod
    def get_timestep_start(num_inference_steps, strength):
        """Number of first steps to skip; the noised image replaces their result.

        Args:
            num_inference_steps: of the full schedule.
            strength: fraction of the steps to run, in [0, 1].

        Raises:
            ValueError: strength is out of range, or leaves no step.
        """
        if not 0 <= strength <= 1:
            raise ValueError(f"strength={strength} must be from 0 to 1, a fraction of the steps")
        num_done = min(int(num_inference_steps * strength), num_inference_steps)
        if num_done < 1:
            raise ValueError(
                f"strength={strength} of num_inference_steps={num_inference_steps} leaves no step "
                f"to do; take strength {math.ceil(100 / num_inference_steps) / 100:g} or more"
            )
        return num_inference_steps - num_done

    def __call__(
        self,
        prompt_ids,
        image,
        params,
        prng_seed,
        strength=0.8,
        num_inference_steps=50,
        height=None,
        width=None,
        guidance_scale=7.5,
        noise=None,
        neg_prompt_ids=None,
        return_dict=True,
        jit=False,
        denoising_start=None,
        **options: Unpack[CallOptions],
    ):
        """Make images from images; compiles at the first call of each size.

        Args:
            image: float32 (B, 3, H, W) in [-1, 1], as from prepare_inputs, or scaled latents
                (B, 4, h, w), as from output_type="latent".
            strength: fraction of the steps to run, in (0, 1]; 1 almost ignores the image.
            height, width: of the result, multiples of 8; the image is resized to it. None: the size
                of the image.
            noise: standard normal noise that is added to the image, (B, 4, height / 8, width / 8);
                None draws it.
            denoising_start: fraction of the denoising that is done already, between 0 and 1: image
                is the latents of another pipeline that ended there (denoising_end), and no noise is
                added. None: strength chooses the first step.
            prompt_ids, params, prng_seed, num_inference_steps, guidance_scale, neg_prompt_ids,
                return_dict, jit, options: as for FlaxStableDiffusionPipeline's call.

        Returns, Raises: as FlaxStableDiffusionPipeline's call.
        """
        return run(self, self.make_call(locals()))

    def _generate(
        self, prompt_ids, image, params, prng_seed, start_timestep=10, *arguments, **options
    ):
        """See FlaxDiffusionPipeline._generate.

        start_timestep, a Python int, is the result of get_timestep_start, in place of strength. It
        has no effect with denoising_start.
        """
        first = prompt_ids, image, params, prng_seed, None
        options |= {"start_timestep": start_timestep}
        return super()._generate(*first, *arguments, **options)

    def encode_image(self, params, inputs, options):
        """Scaled latents of the images, (B, 4, h, w): a stage of a run."""
        image, prompt_ids = inputs["image"], inputs["prompt_ids"]
        keys = keys_of_sequel(keys_per_image(inputs["prng_seed"], len(prompt_ids)))
        return self.latents_of(params, image, keys, options)

    def latents_of(self, params, image, keys, options):
        """Scaled latents of images, float32 (B, 4, h, w); latents are returned as they are."""
        if self.is_latents(image.shape):
            return image.astype(jnp.float32)
        size = options.height, options.width
        return encode(self.compute_vae, params["vae"], resize(image, size), keys, self.layout)

    def denoise(self, params, inputs, options, text, encoded):
        """Scaled latents (B, 4, h, w) of the texts; encoded: the images' scaled latents."""
        keys = keys_of_sequel(keys_per_image(inputs["prng_seed"], len(encoded)))
        schedule = self.make_schedule(options, encoded.shape)
        x_t = encoded
        if options.denoising_start is None:
            noise, state = starting_noise(inputs["noise"], keys, encoded.shape), schedule.state
            x_t = self.scheduler.add_noise(state, encoded, noise, state.timesteps[0])
        prediction = self.text_prediction(inputs, options, text, len(encoded))
        return choose_denoising(self, params, schedule, keys, prediction, encoded.shape[2])(x_t)
