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
from typing import Any, Unpack

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
from diffusers_flax.pipelines.running import CallOptions, run
from diffusers_flax.pipelines.sampling import TEXT_OF_BRANCH, are_plain
from diffusers_flax.pipelines.text_to_image import TextToImage
from diffusers_flax.schedulers.base import FlaxSchedulerMixin


class StableDiffusionFamily(FlaxDiffusionPipeline):
    """Text encoding and safety checker of Stable Diffusion 1.x and 2.x."""

    text_axes = 1  # of one image's prompt_ids

    def encode_text(self, params, inputs, options):
        """(Text states of all branches, (branches * B, 77 k, D); None): a run begins with it."""
        prompt_ids = inputs["prompt_ids"]
        ids, B = {"text": prompt_ids}, len(prompt_ids)
        if {*options.branches} != {"text"}:
            null_ids = inputs["neg_prompt_ids"]
            if null_ids is None:
                null_ids = self.prepare_text_inputs("")
            else:
                null_ids = jnp.broadcast_to(null_ids, (B, *null_ids.shape[1:]))
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

    def output(self, result, call):
        """What a call returns, a Call; runs the safety checker if there is one."""
        flags = False
        if self.safety_checker is not None and call.output_type != "latent":
            result, flags = self.apply_safety_checker(result, call.params, call.jit)
        if call.output_type == "pil":
            result = self.numpy_to_pil(result)
        output = FlaxStableDiffusionPipelineOutput(result, flags)
        return output if call.return_dict else output.to_tuple()

    def apply_safety_checker(self, images, params, jit):
        """(images, black where the safety checker flags them; flat list of bool)."""
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

    tokenizer: a transformers CLIPTokenizer; safety_checker: a FlaxStableDiffusionSafetyChecker;
    feature_extractor: its CLIPImageProcessor.
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
        strength=1.0,
        denoising_start=None,
        image=None,
        **options: Unpack[CallOptions],
    ):
        """Repaint the masked area of images; compiles at the first call of each size.

        Args:
            prompt_ids: int32 (B, 77), as from prepare_inputs.
            mask: float32 (B, 1, H, W), 1 where the image is repainted.
            masked_image: float32 (B, 3, H, W) in [-1, 1], 0 where it is repainted, or scaled
                latents; read by a UNet of 9 channels.
            height, width: of the result, multiples of 8; the image is resized to it. None: the size
                of the image.
            strength: fraction of the steps to run, in (0, 1]; 1 ignores the masked area.
            denoising_start: as for FlaxStableDiffusionImg2ImgPipeline's call.
            image: the whole image, float32 (B, 3, H, W) in [-1, 1], or scaled latents (B, 4, h, w);
                needed by a UNet of 4 channels, by strength below 1 and by denoising_start.
            params, prng_seed, num_inference_steps, guidance_scale, latents, neg_prompt_ids,
                return_dict, jit, options: as for FlaxStableDiffusionPipeline's call.

        Returns, Raises: as FlaxStableDiffusionPipeline's call.
        """
        return run(self, self.make_call(locals()))
