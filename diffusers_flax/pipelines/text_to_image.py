"""Text to image, of all families.

Source: Latent Diffusion Models (arXiv 2112.10752).
"""

from functools import partial
from typing import Unpack

import jax.numpy as jnp

from diffusers_flax.models.unet import guidance_embedding
from diffusers_flax.pipelines.base import FlaxDiffusionPipeline
from diffusers_flax.pipelines.guidance import guide_projected, memory_of
from diffusers_flax.pipelines.running import (
    CallOptions,
    GuidedPrediction,
    choose_denoising,
    run,
)
from diffusers_flax.pipelines.sampling import (
    guide,
    keys_per_image,
    rescale_guidance,
    rows_of_branches,
    starting_noise,
    text_branches,
)


class TextToImage(FlaxDiffusionPipeline):
    """Text to image; a base of the pipelines of Stable Diffusion 1.x, 2.x and XL.

    The scheduler (dataclasses.replace changes it), the number of steps and the image size are
    compiled in; another choice compiles again and logs it. The guidance scale is an argument of
    the program; with 1 or less the program has one branch. The scheduler computes in float32, also
    if params["scheduler"] has another dtype.
    """

    def prepare_inputs(self, prompt):
        """Tokenize prompts; see prepare_text_inputs.

        Args:
            prompt: str or list of str.

        Returns:
            prompt_ids, int32 (B, 77).
        """
        return self.prepare_text_inputs(prompt)

    def __call__(
        self,
        prompt_ids,
        params,
        prng_seed,
        num_inference_steps=50,
        height=None,
        width=None,
        guidance_scale=7.5,
        latents=None,
        neg_prompt_ids=None,
        return_dict=True,
        jit=False,
        attention_sharing=None,
        **options: Unpack[CallOptions],
    ):
        """Make a batch of images; compiles at the first call of each size.

        Args:
            prompt_ids: int32 (B, 77), SDXL (B, 2, 77), as from prepare_inputs, or of k chunks,
                77 k, as from prompts.prepare_prompts; with jit all arrays are (devices, B, ...),
                for a Layout (data, B, ...).
            params: from from_pretrained; with jit replicated. Without jit the call runs where
                they are: jax.device_put(params, jax.devices()[0]) puts them on the device. For a
                Layout, as its place_params leaves them.
            prng_seed: one PRNG key, typed or uint32, or one per image (B,); with jit also one
                per device. With one key, image i gets the noise of fold_in(key, i), so it does
                not depend on how many images or devices there are.
            num_inference_steps: of the scheduler, at least 1.
            height, width: of the images, multiples of 8; None: the size that the model was trained
                at.
            guidance_scale: weight of the prompt, >= 0, a number, or an array of one per image; a
                number up to 1: no guidance, half the work.
            latents: standard normal noise to start from, (B, 4, height / 8, width / 8); None draws
                it.
            neg_prompt_ids: what to avoid, like prompt_ids, or one row for all; None is the empty
                text, for SDXL zeros.
            return_dict: False returns a plain tuple (images, nsfw_content_detected), for SDXL
                (images,).
            jit: True runs on several devices, False on one; compiled either way.
            attention_sharing: p in [0, 1], a number, or an array of one per image, of which each
                second one counts; None: off.
                Images 2 j and 2 j + 1 are a pair, for which prng_seed has equal keys. In the steps
                i with p > i / (steps - 1) the second image's self-attention has the queries and
                keys of the first image, which gives both one layout; see attention_sharing.py.
            options: see CallOptions.

        Returns:
            FlaxStableDiffusionPipelineOutput, or for SDXL FlaxStableDiffusionXLPipelineOutput:
            images (B, H, W, 3), with jit (devices, B, H, W, 3), float32 in [0, 1]; a list of PIL
            images for "pil"; the scaled latents (B, 4, H / 8, W / 8), float32, for "latent".

        Raises:
            ValueError: shapes, sizes, scales or steps that do not fit.
        """
        return run(self, self.make_call(locals()))

    def denoise(self, params, inputs, options, text, encoded):
        """Scaled latents (B, 4, h, w) of the texts; encoded: None."""
        B = len(inputs["prompt_ids"])
        shape = self.latent_shape(B, options.height, options.width)
        keys = keys_per_image(inputs["prng_seed"], B)
        schedule = self.make_schedule(options, shape)
        x_T = starting_noise(inputs["latents"], keys, shape) * schedule.state.init_noise_sigma
        residuals = self.residuals_of(params, inputs, options, schedule, text)
        prediction = self.text_prediction(inputs, options, text, B, residuals=residuals)
        if inputs.get("attention_sharing") is not None:
            from diffusers_flax.pipelines.attention_sharing import share_attention  # not for others

            fraction = inputs["attention_sharing"]
            prediction = share_attention(self, prediction, fraction, B, schedule.num_steps)
        return choose_denoising(self, params, schedule, keys, prediction, shape[2])(x_T)

    def residuals_of(self, params, inputs, options, schedule, text):
        """None, or a function (i, sample, t, states, added) -> the UNet's residuals in step i."""

    def guidance_branches(self, guidance_scale):
        """The branches to compute; a UNet that is distilled with guidance needs only one."""
        branches = text_branches(guidance_scale)
        return ("text",) if self.unet.time_cond_proj_dim is not None else branches

    def text_prediction(self, inputs, options, text, batch_size, extra=(), residuals=None):
        """The GuidedPrediction for texts; extra: arrays (B, C, h, w) that join the UNet's input."""
        branches, timestep_cond = options.branches, None
        if (dim := self.unet.time_cond_proj_dim) is not None:
            scale = jnp.asarray(inputs["guidance_scale"], jnp.float32).reshape(-1)
            timestep_cond = guidance_embedding(jnp.broadcast_to(scale, (batch_size,)), dim)

        def unet_inputs(active, i, x_t, t):
            model_input = jnp.concatenate([x_t, *extra], axis=1)
            model_input = jnp.concatenate([model_input] * len(active))
            arguments = model_input, t, *rows_of_branches(text, branches, active)
            more = () if residuals is None else residuals(i, *arguments)
            return *arguments, *more, timestep_cond

        scales, projected = (inputs["guidance_scale"], inputs["guidance_rescale"]), options.guidance

        def guide_step(predictions, active, i, memory):
            if projected is None or len(active) == 1:
                return guide(predictions, active, *scales), memory
            predictions = dict(zip(active, jnp.split(predictions, 2)))
            scale = jnp.asarray(scales[0], jnp.float32).reshape(-1, 1, 1, 1)
            guided, memory = guide_projected(projected, predictions, {"text": scale}, memory)
            return rescale_guidance(guided, predictions["text"], scales[1]), memory

        states_of = partial(rows_of_branches, text[0], branches)
        shape = self.latent_shape(batch_size, options.height, options.width)
        memory = memory_of(projected, branches, shape)
        return GuidedPrediction(branches, unet_inputs, states_of, guide_step, memory=memory)
