"""What calls of all pipelines do: sizes, tokens, the schedule, denoising, decoding, the output.

`_generate` is one pure function of arrays: text encoding, denoising and decoding are one program,
which programs.run compiles and calls.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from diffusers_flax.images import to_pil
from diffusers_flax.loading.tokenizer import tokenize
from diffusers_flax.pipelines.outputs import FlaxStableDiffusionPipelineOutput
from diffusers_flax.pipelines.sampling import decode, denoise
from diffusers_flax.schedulers.noise_schedule import noise_scales


class Generation:
    """Base of FlaxDiffusionPipeline, which has the parts that these methods use."""

    @property
    def vae_scale_factor(self):
        """Pixels per latent, along a side: 8."""
        return 2 ** (len(self.vae.config.block_out_channels) - 1)

    def image_size(self, height=None, width=None, image_shape=None):
        """Height and width of the result, in pixels.

        Args:
            height, width: None: those of the input image, or, without one, the size that the model
                was trained at.
            image_shape: (..., 3, H, W) of the input image, or (..., 4, h, w) of its latents.

        Raises:
            ValueError: height or width is not a positive multiple of the VAE's factor, or differs
                from the latents'.
        """
        factor = self.vae_scale_factor
        if image_shape is None:
            side = self.unet.config.sample_size
            height_0, width_0 = (
                x * factor for x in (side if isinstance(side, tuple) else (side, side))
            )
        else:
            height_0, width_0 = image_shape[-2:]
            if self._is_latents(image_shape):
                height_0, width_0 = height_0 * factor, width_0 * factor
                if height not in (None, height_0) or width not in (None, width_0):
                    raise ValueError(
                        f"size {height}x{width} (height x width) is not the size of these latents, "
                        f"{height_0}x{width_0}; leave height and width out"
                    )
        sides = [
            default if side is None else side
            for side, default in ((height, height_0), (width, width_0))
        ]
        size = f"size {sides[0]}x{sides[1]} (height x width)"
        if not all(isinstance(side, int | np.integer) for side in sides):
            raise ValueError(f"{size} is not of type int; give whole numbers of pixels")
        if any(side < 1 or side % factor for side in sides):
            near = "x".join(str(max(factor, round(side / factor) * factor)) for side in sides)
            reason = "must be positive" if min(sides) < 1 else f"is not divisible by {factor}"
            raise ValueError(f"{size} {reason}; try {near}")
        return tuple(map(int, sides))

    def _is_latents(self, image_shape):
        return image_shape[-3] == self.vae.config.latent_channels

    def latent_shape(self, batch_size, height=None, width=None):
        """(B, 4, height / 8, width / 8), see image_size."""
        height, width = self.image_size(height, width)
        factor = self.vae_scale_factor
        return batch_size, self.vae.config.latent_channels, height // factor, width // factor

    @property
    def _vae(self):
        """The VAE in the dtype that it computes in."""
        return self.vae

    def _decode(self, params, latents):
        """Images of scaled latents, by the tiny VAE if the acceleration says so; see decode."""
        if self.accelerate.tiny_decoder:
            return decode(self.tiny_vae, params["tiny_vae"], latents)
        return decode(self._vae, params["vae"], latents)

    # ----------------------------------------------------------------- inputs

    def _schedule(self, num_inference_steps, shape, first_step=0, timesteps=None):
        """The scheduler's state for the steps, float32, and the steps' noise_scales.

        Arguments as in set_timesteps.
        """
        with jax.ensure_compile_time_eval():
            state = self.scheduler.set_timesteps(
                self.scheduler.create_state(), num_inference_steps, shape, first_step, timesteps
            )
            constants = jax.tree.map(np.asarray, state)
        return jax.tree.map(jnp.asarray, constants), noise_scales(constants)

    def _denoise(self, params, schedule, x_t, keys, branches, inputs, combine, eta):
        """x_0 of x_t.

        Args:
            params: the pipeline's.
            schedule: of _schedule.
            x_t, keys, eta: as for sampling.denoise.
            branches: of guidance.
            inputs: (branches, x_t, t) -> the UNet's arguments, a tuple; the rows of one branch
                after those of the other.
            combine: (predictions, float32 (branches * B, C, h, w), branches) -> guided prediction,
                (B, C, h, w).
        """
        state, scales = schedule
        watch = None
        if self.preview:
            tiny_decode = partial(decode, self.tiny_vae, params["tiny_vae"])
            prediction_type = self.scheduler.config.prediction_type
            watch = self.preview.watch(tiny_decode, prediction_type, scales, keys)
        if self.accelerate:
            schedule, arguments = (self.scheduler, state, scales), (branches, inputs, combine)
            return self.accelerate.denoise(
                self.unet, params["unet"], schedule, x_t, keys, *arguments, eta, watch
            )

        def predict(x_t, t):
            arguments = inputs(branches, x_t, t)
            predictions = self.unet.apply({"params": params["unet"]}, *arguments).sample
            return combine(predictions.astype(jnp.float32), branches)

        return denoise(self.scheduler, state, x_t, keys, predict, eta, watch)

    def prepare_text_inputs(self, prompt):
        """Tokenize prompts, for negative prompts and the like.

        Args:
            prompt: str or list of str; tokens past the text encoder's 77 are cut, with a warning.

        Returns:
            prompt_ids, int32 (B, 77).
        """
        return tokenize(self.tokenizer, prompt, self.text_encoder.module.max_position_embeddings)

    numpy_to_pil = staticmethod(to_pil)

    def _output(self, result, params, jit, output_type, return_dict):
        """The result of a call, after the safety checker, if there is one."""
        flags = False
        if self.safety_checker is not None and output_type != "latent":
            result, flags = self._check_images(result, params, jit)
        if output_type == "pil":
            result = self.numpy_to_pil(result)
        output = FlaxStableDiffusionPipelineOutput(result, flags)
        return output if return_dict else output.to_tuple()

    def _check_images(self, images, params, jit):
        """Make images black that the safety checker flags: (images, flat list of bool)."""
        if "safety_checker" not in params:
            raise ValueError("params has no safety_checker; add safety_checker.params under it")
        params = params["safety_checker"]
        if jit:
            params = jax.tree.map(lambda x: x[0], params)
        images = np.asarray(images)
        checked, flags = self.safety_checker.filter_images(
            images.reshape(-1, *images.shape[-3:]), self.feature_extractor, params
        )
        return checked.reshape(images.shape), flags
