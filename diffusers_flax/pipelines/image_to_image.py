"""Image to image, of all families.

A run makes the last steps of a schedule: from a noised image (strength), or from the latents of
another pipeline that ended early (denoising_end), without adding noise (denoising_start).

Source: SDEdit (arXiv 2108.01073).
"""

import math

import jax.numpy as jnp

from diffusers_flax.images import pair_up, prepare_images
from diffusers_flax.pipelines.running import Options, choose_denoising, generate, run
from diffusers_flax.pipelines.sampling import (
    encode,
    keys_of_sequel,
    keys_per_image,
    normal,
    resize,
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

    def first_step(self, steps, strength, denoising_start):
        """Number of first steps to skip; none with denoising_start, which chooses the timesteps.

        steps: of step_options.
        """
        if denoising_start is not None:
            return 0
        return self.get_timestep_start(steps["num_inference_steps"], strength)

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
        output_type="np",
        guidance_rescale=0.0,
        timesteps=None,
        eta=None,
        denoising_start=None,
        denoising_end=None,
        prompt_weights=None,
    ):
        """Make images from images; compiles at the first call of each size.

        Args:
            prompt_ids: int32 (B, 77), SDXL (B, 2, 77), as from prepare_inputs, or of k chunks,
                77 k, as from prompts.prepare_prompts; with jit all arrays are (devices, B, ...),
                for a Layout (data, B, ...).
            image: float32 (B, 3, H, W) in [-1, 1], as from prepare_inputs, or scaled latents
                (B, 4, h, w), as from output_type="latent".
            params: from from_pretrained; with jit replicated. Without jit the call runs where
                they are: jax.device_put(params, jax.devices()[0]) puts them on the device. For a
                Layout, as its place_params leaves them.
            prng_seed: one PRNG key, typed or uint32, or one per image (B,); with jit also one
                per device. With one key, image i gets the noise of fold_in(key, i), so it does
                not depend on how many images or devices there are.
            strength: fraction of the steps to run, in (0, 1]; 1 almost ignores the image.
            num_inference_steps: of the scheduler, at least 1.
            height, width: of the result, multiples of 8; the image is resized to it. None: the size
                of the image.
            guidance_scale: weight of the prompt, >= 0, a number, or an array of one per image; a
                number up to 1: no guidance, half the work.
            noise: standard normal noise that is added to the image, (B, 4, height / 8, width / 8);
                None draws it.
            neg_prompt_ids: what to avoid, like prompt_ids, or one row for all; None is the empty
                text, for SDXL zeros.
            return_dict: False returns a plain tuple (images, nsfw_content_detected), for SDXL
                (images,).
            jit: True runs on several devices, False on one; compiled either way.
            output_type: "np", "pil" or "latent".
            guidance_rescale: phi in [0, 1] of arXiv 2305.08891, equation 16: reduces the contrast
                that guidance adds; 0: off.
            timesteps: the timesteps to visit instead of num_inference_steps of the scheduler's
                choice, decreasing integers, for models distilled to them: (999, 749, 499, 249). Or
                "ays": the ten of Align-Your-Steps (arXiv 2404.14507) for the model's family.
            eta: noise in a step of DDIM (default 0) and TCD (default 0.3), from 0 to 1.
            denoising_start: fraction of the denoising that is done already, between 0 and 1: image
                is the latents of another pipeline that ended there (denoising_end), and no noise is
                added. None: strength chooses the first step.
            denoising_end: fraction of the denoising to end at, between 0 and 1, with
                output_type="latent", for another pipeline to continue; None: all.
            prompt_weights: PromptWeights, of prompts.prepare_prompts; None: no weights.

        Returns:
            FlaxStableDiffusionPipelineOutput, or for SDXL FlaxStableDiffusionXLPipelineOutput:
            images (B, H, W, 3), with jit (devices, B, H, W, 3), float32 in [0, 1]; a list of PIL
            images for "pil"; the scaled latents (B, 4, H / 8, W / 8), float32, for "latent".

        Raises:
            ValueError: shapes, sizes, scales or steps that do not fit.
        """
        steps = self.step_options(num_inference_steps, timesteps, eta)
        options = Options(
            **steps,
            **self.size_options(height, width, output_type, image.shape),
            branches=self.guidance_branches(guidance_scale),
            first_step=self.first_step(steps, strength, denoising_start),
            denoising_start=denoising_start,
            denoising_end=denoising_end,
        )
        inputs = dict(prompt_ids=prompt_ids, image=image, neg_prompt_ids=neg_prompt_ids)
        inputs["prompt_weights"] = prompt_weights
        inputs["noise"] = noise
        scales = dict(guidance_scale=guidance_scale, guidance_rescale=guidance_rescale)
        result = run(self, options, inputs, scales, params, prng_seed, jit)
        return self.output(result, params, jit, output_type, return_dict)

    def _generate(
        self,
        prompt_ids,
        image,
        params,
        prng_seed,
        start_timestep=10,
        num_inference_steps=50,
        height=None,
        width=None,
        guidance_scale=7.5,
        noise=None,
        neg_prompt_ids=None,
        return_latents=False,
        guidance_rescale=0.0,
        branches=None,
        timesteps=None,
        eta=None,
        denoising_start=None,
        denoising_end=None,
        prompt_weights=None,
    ):
        """Image to image as one pure function of arrays, for one device; jit or pmap it.

        Args as in __call__; start_timestep, a Python int, is the result of get_timestep_start and
        has no effect with denoising_start.

        Returns:
            As FlaxStableDiffusionPipeline._generate.
        """
        options = Options(
            num_inference_steps=num_inference_steps,
            timesteps=timesteps,
            eta=eta,
            height=height,
            width=width,
            branches=branches or self.guidance_branches(guidance_scale),
            return_latents=return_latents,
            first_step=start_timestep,
            denoising_start=denoising_start,
            denoising_end=denoising_end,
        )
        inputs = dict(prompt_ids=prompt_ids, image=image, neg_prompt_ids=neg_prompt_ids)
        inputs["prompt_weights"] = prompt_weights
        inputs |= dict(noise=noise, guidance_scale=guidance_scale)
        inputs |= dict(guidance_rescale=guidance_rescale, prng_seed=prng_seed)
        return generate(self, options, (), inputs, {}, params)

    def encode_image(self, params, inputs, options):
        """Scaled latents of the images, (B, 4, h, w): a stage of a run."""
        image, prompt_ids = inputs["image"], inputs["prompt_ids"]
        if image.ndim != 4 or len(image) != len(prompt_ids):
            raise ValueError(
                f"image has shape {image.shape}, prompt_ids {prompt_ids.shape}; both need the same "
                "batch; prepare_inputs makes both"
            )
        keys = keys_of_sequel(keys_per_image(inputs["prng_seed"], len(prompt_ids)))
        return self.latents_of(params, image, keys, options)

    def latents_of(self, params, image, keys, options):
        """Scaled latents of images, float32 (B, 4, h, w); latents are returned as they are."""
        shape = self.image_size(options.height, options.width, image.shape)
        if self.is_latents(image.shape):
            return image.astype(jnp.float32)
        return encode(self.compute_vae, params["vae"], resize(image, shape), keys, self.layout)

    def denoise(self, params, inputs, options, text, encoded):
        """Scaled latents (B, 4, h, w) of the texts; encoded: the images' scaled latents."""
        keys = keys_of_sequel(keys_per_image(inputs["prng_seed"], len(encoded)))
        schedule = self.make_schedule(options, encoded.shape)
        noise, x_t = inputs["noise"], encoded
        if options.denoising_start is not None:
            if noise is not None:
                raise ValueError("noise is not added with denoising_start; leave one of them out")
        else:
            if noise is None:
                noise = normal(keys, 0, encoded.shape[1:])
            elif noise.shape != encoded.shape:
                raise ValueError(f"noise has shape {noise.shape}, need {encoded.shape}")
            state = schedule.state
            x_t = self.scheduler.add_noise(state, encoded, noise, state.timesteps[0])
        prediction = self.text_prediction(inputs, options, text, len(encoded))
        return choose_denoising(self, params, schedule, keys, prediction, encoded.shape[2])(x_t)
