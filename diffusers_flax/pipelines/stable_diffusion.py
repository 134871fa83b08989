"""Pipelines of Stable Diffusion 1.x and 2.x: text to image, image to image, inpainting.

    pipeline, params = FlaxStableDiffusionPipeline.from_pretrained("MODEL")
    prompt_ids = pipeline.prepare_inputs("a red panda reading")
    images = pipeline(prompt_ids, params, jax.random.key(0)).images  # (1, H, W, 3), [0, 1]

On several devices, each with an equal number of prompts:

    p_params = flax.jax_utils.replicate(params)
    prompt_ids = flax.training.common_utils.shard(prompt_ids)
    images = pipeline(prompt_ids, p_params, key, jit=True).images  # (devices, B, H, W, 3)

Text encoding, denoising and decoding are one compiled program, as in
`jax.pmap(pipeline._generate)`.

Source: Latent Diffusion Models (arXiv 2112.10752); image to image, SDEdit (arXiv 2108.01073).
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from diffusers_flax.images import pair_with_masks, prepare_images
from diffusers_flax.models.clip import FlaxCLIPTextModel
from diffusers_flax.models.unet import FlaxUNet2DConditionModel
from diffusers_flax.models.vae import FlaxAutoencoderKL
from diffusers_flax.outputs import FlaxStableDiffusionPipelineOutput
from diffusers_flax.pipelines.base import FlaxDiffusionPipeline
from diffusers_flax.pipelines.image_to_image import ImageToImage
from diffusers_flax.pipelines.inpainting import Inpainting
from diffusers_flax.pipelines.running import Options, generate, run
from diffusers_flax.pipelines.sampling import TEXT_OF_BRANCH, are_plain, rows_per_image
from diffusers_flax.pipelines.text_to_image import TextToImage
from diffusers_flax.schedulers.base import FlaxSchedulerMixin

__all__ = [
    "FlaxStableDiffusionImg2ImgPipeline",
    "FlaxStableDiffusionInpaintPipeline",
    "FlaxStableDiffusionPipeline",
    "FlaxStableDiffusionPipelineOutput",
]


class StableDiffusionFamily(FlaxDiffusionPipeline):
    """Text encoding and safety checker of Stable Diffusion 1.x and 2.x."""

    text_axes = 1  # of one image's prompt_ids

    def __post_init__(self):
        super().__post_init__()
        if self.safety_checker is not None and self.feature_extractor is None:
            raise ValueError(
                "safety_checker needs feature_extractor, the CLIPImageProcessor that prepares its "
                "input; give both or neither"
            )

    @classmethod
    def required_components(cls, path, index):
        """See FlaxDiffusionPipeline.required_components; refuses SDXL."""
        class_name = str(index.get("_class_name"))
        if "XL" in class_name:
            raise ValueError(f"{path} is a {class_name}; {cls.remedy_for_xl}")
        return ("unet", "vae", "text_encoder", "tokenizer", "scheduler")

    def encode_text(self, params, inputs, options):
        """Text states of all branches of guidance: the first stage of a run.

        Args:
            params, inputs, options: see running.generate.

        Returns:
            (states (branches * B, 77 k, D); None, as only SDXL has added conditions).
        """
        prompt_ids = inputs["prompt_ids"]
        ids, B = {"text": prompt_ids}, len(prompt_ids)
        if {*options.branches} != {"text"}:
            null_ids = inputs["neg_prompt_ids"]
            if null_ids is None:
                null_ids = self.prepare_text_inputs("")
            else:
                null_ids = rows_per_image(null_ids, B)
            ids["null"] = null_ids.astype(prompt_ids.dtype)
        if are_plain(inputs, self.text_encoder.module.max_position_embeddings):
            (encoded,), _ = self.text_outputs(params, jnp.concatenate([*ids.values()]))
            rows = {"text": slice(B), "null": slice(B, None)}
            states = {name: encoded[rows[name]] for name in ids}
        else:
            from diffusers_flax.prompts import encode_prompts  # not for a plain image

            encode, empty_ids = partial(self.text_outputs, params), self.prepare_text_inputs("")
            states, _ = encode_prompts(encode, ids, inputs.get("prompt_weights"), empty_ids)
        if "null" in ids:
            states["null"] = jnp.broadcast_to(states["null"], states["text"].shape)
        return jnp.concatenate([states[TEXT_OF_BRANCH[x]] for x in options.branches]), None

    def text_outputs(self, params, ids):
        """([states (N, 77, D) of the text encoder], None) of token ids (N, 77)."""
        encoder = self.text_encoder
        output = encoder(ids, params=params["text_encoder"], return_dict=True)
        return [output.last_hidden_state], None

    def output(self, result, params, jit, output_type, return_dict):
        """What a call returns; runs the safety checker if there is one."""
        flags = False
        if self.safety_checker is not None and output_type != "latent":
            result, flags = self.apply_safety_checker(result, params, jit)
        if output_type == "pil":
            result = self.numpy_to_pil(result)
        output = FlaxStableDiffusionPipelineOutput(result, flags)
        return output if return_dict else output.to_tuple()

    def apply_safety_checker(self, images, params, jit):
        """(images, black where the safety checker flags them; flat list of bool)."""
        if "safety_checker" not in params:
            raise ValueError("params has no safety_checker; add safety_checker.params under it")
        params = params["safety_checker"]
        if jit and self.layout is None:
            params = jax.tree.map(lambda x: x[0], params)
        images = np.asarray(images)
        checked, flags = self.safety_checker.filter_images(
            images.reshape(-1, *images.shape[-3:]), self.feature_extractor, params
        )
        return checked.reshape(images.shape), flags


@dataclass(frozen=True, eq=False)
class StableDiffusionComponents(StableDiffusionFamily):
    """Components of Stable Diffusion 1.x and 2.x pipelines, in the published order.

    Fields: modules, which compute in `dtype`; tokenizer, a transformers CLIPTokenizer; scheduler;
    safety_checker, a FlaxStableDiffusionSafetyChecker, and feature_extractor, its
    CLIPImageProcessor, or None.
    """

    vae: FlaxAutoencoderKL
    text_encoder: FlaxCLIPTextModel
    tokenizer: Any
    unet: FlaxUNet2DConditionModel
    scheduler: FlaxSchedulerMixin
    safety_checker: Any = None
    feature_extractor: Any = None
    dtype: DTypeLike = jnp.float32


@dataclass(frozen=True, eq=False)
class FlaxStableDiffusionPipeline(StableDiffusionComponents, TextToImage):
    """Text in, image out, with Stable Diffusion 1.x and 2.x; see TextToImage."""

    torch_class_name = "StableDiffusionPipeline"


@dataclass(frozen=True, eq=False)
class FlaxStableDiffusionImg2ImgPipeline(StableDiffusionComponents, ImageToImage):
    """Text and an image in, image out, with Stable Diffusion 1.x and 2.x; see ImageToImage."""

    torch_class_name = "StableDiffusionImg2ImgPipeline"


@dataclass(frozen=True, eq=False)
class FlaxStableDiffusionInpaintPipeline(StableDiffusionComponents, Inpainting):
    """Inpainting with Stable Diffusion 1.x and 2.x; see Inpainting.

    A UNet of 9 channels needs masked_image at strength 1; otherwise it takes the whole `image`.
    """

    torch_class_name = "StableDiffusionInpaintPipeline"

    def prepare_inputs(self, prompt, image, mask):
        """Turn prompts, images and masks into arrays; a single one of any is repeated.

        Args:
            prompt: str or list of str.
            image: image or list of images of one size: PIL of any mode, or array (H, W, 3), or
                arrays (B, H, W, 3); uint8, or float in [0, 1].
            mask: as many, of the same size, white (1) where the image is repainted; see
                prepare_masks.

        Returns:
            (prompt_ids, masked_image, mask): int32 (B, 77); float32 (B, 3, H, W) in [-1, 1], 0 in
            the masked area; float32 (B, 1, H, W) of 0 and 1. The call's order is prompt_ids, mask,
            masked_image.

        Raises:
            ValueError: numbers or sizes differ, or one is not an image.
        """
        arrays = self.prepare_text_inputs(prompt), prepare_images(image), mask
        prompt_ids, image, mask = pair_with_masks(*arrays)
        return prompt_ids, image * (mask < 0.5), mask

    def __call__(
        self,
        prompt_ids,
        mask,
        masked_image,
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
        output_type="np",
        guidance_rescale=0.0,
        timesteps=None,
        eta=None,
        strength=1.0,
        denoising_start=None,
        denoising_end=None,
        image=None,
        prompt_weights=None,
    ):
        """Repaint the masked area of images; compiles at the first call of each size.

        Args:
            prompt_ids: int32 (B, 77), as from prepare_inputs, or of k chunks, 77 k, as from
                prompts.prepare_prompts; with jit all arrays are (devices, B, ...), for a Layout
                (data, B, ...).
            mask: float32 (B, 1, H, W), 1 where the image is repainted.
            masked_image: float32 (B, 3, H, W) in [-1, 1], 0 where it is repainted, or scaled
                latents; read by a UNet of 9 channels.
            params: from from_pretrained; with jit replicated. Without jit the call runs where
                they are: jax.device_put(params, jax.devices()[0]) puts them on the device. For a
                Layout, as its place_params leaves them.
            prng_seed: one PRNG key, typed or uint32, or one per image (B,); with jit also one
                per device. With one key, image i gets the noise of fold_in(key, i), so it does
                not depend on how many images or devices there are.
            num_inference_steps: of the scheduler, at least 1.
            height, width: of the result, multiples of 8; the image is resized to it. None: the size
                of the image.
            guidance_scale: weight of the prompt, >= 0, a number, or an array of one per image; a
                number up to 1: no guidance, half the work.
            latents: standard normal noise to start from, (B, 4, height / 8, width / 8); None draws
                it.
            neg_prompt_ids: what to avoid, like prompt_ids, or one row for all; None: the empty
                text.
            return_dict: False returns a plain tuple (images, nsfw_content_detected).
            jit: True runs on several devices, False on one; compiled either way.
            output_type: "np", "pil" or "latent".
            guidance_rescale: phi in [0, 1] of arXiv 2305.08891, equation 16: reduces the contrast
                that guidance adds; 0: off.
            timesteps: the timesteps to visit instead of num_inference_steps of the scheduler's
                choice, decreasing integers, for models distilled to them: (999, 749, 499, 249). Or
                "ays": the ten of Align-Your-Steps (arXiv 2404.14507) for the model's family.
            eta: noise in a step of DDIM (default 0) and TCD (default 0.3), from 0 to 1.
            strength: fraction of the steps to run, in (0, 1]; 1 ignores the masked area.
            denoising_start: fraction of the denoising that is done already, between 0 and 1: image
                is the latents of another pipeline that ended there (denoising_end), and no noise is
                added. None: strength chooses the first step.
            denoising_end: fraction of the denoising to end at, between 0 and 1, with
                output_type="latent", for another pipeline to continue; None: all.
            image: the whole image, float32 (B, 3, H, W) in [-1, 1], or scaled latents (B, 4, h, w);
                needed by a UNet of 4 channels, by strength below 1 and by denoising_start.
            prompt_weights: PromptWeights, of prompts.prepare_prompts; None: no weights.

        Returns:
            FlaxStableDiffusionPipelineOutput, images (B, H, W, 3), with jit
            (devices, B, H, W, 3), float32 in [0, 1]; a list of PIL images for "pil"; the scaled
            latents (B, 4, H / 8, W / 8), float32, for "latent".

        Raises:
            ValueError: shapes, sizes, scales or steps that do not fit.
        """
        image_shape = self.shape_of_input(image, masked_image)
        steps = self.step_options(num_inference_steps, timesteps, eta)
        options = Options(
            **steps,
            **self.size_options(height, width, output_type, image_shape),
            branches=self.guidance_branches(guidance_scale),
            first_step=self.first_step(steps, strength, denoising_start),
            denoising_start=denoising_start,
            denoising_end=denoising_end,
        )
        inputs = dict(prompt_ids=prompt_ids, neg_prompt_ids=neg_prompt_ids, latents=latents)
        inputs["prompt_weights"] = prompt_weights
        inputs |= dict(image=image, mask=mask, masked_image=masked_image)
        scales = dict(guidance_scale=guidance_scale, guidance_rescale=guidance_rescale)
        result = run(self, options, inputs, scales, params, prng_seed, jit)
        return self.output(result, params, jit, output_type, return_dict)

    def _generate(
        self,
        prompt_ids,
        mask,
        masked_image,
        params,
        prng_seed,
        num_inference_steps=50,
        height=None,
        width=None,
        guidance_scale=7.5,
        latents=None,
        neg_prompt_ids=None,
        return_latents=False,
        guidance_rescale=0.0,
        branches=None,
        timesteps=None,
        eta=None,
        strength=1.0,
        denoising_start=None,
        denoising_end=None,
        image=None,
        prompt_weights=None,
    ):
        """Inpainting as one pure function of arrays, for one device; jit or pmap it.

        Args as in __call__, strength static.

        Returns:
            As TextToImage._generate.
        """
        steps = self.step_options(num_inference_steps, timesteps, eta)
        options = Options(
            **steps,
            height=height,
            width=width,
            branches=branches or self.guidance_branches(guidance_scale),
            return_latents=return_latents,
            first_step=self.first_step(steps, strength, denoising_start),
            denoising_start=denoising_start,
            denoising_end=denoising_end,
        )
        inputs = dict(prompt_ids=prompt_ids, neg_prompt_ids=neg_prompt_ids, latents=latents)
        inputs["prompt_weights"] = prompt_weights
        inputs |= dict(image=image, mask=mask, masked_image=masked_image)
        inputs |= dict(guidance_scale=guidance_scale, guidance_rescale=guidance_rescale)
        return generate(self, options, (), inputs, {"prng_seed": prng_seed}, params)
