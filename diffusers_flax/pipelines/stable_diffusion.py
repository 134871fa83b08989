"""Pipelines of Stable Diffusion 1.x and 2.x: text to image, image to image, inpainting.

    pipeline, params = FlaxStableDiffusionPipeline.from_pretrained("MODEL")
    prompt_ids = pipeline.prepare_inputs("a red panda reading")
    images = pipeline(prompt_ids, params, jax.random.key(0)).images  # (1, H, W, 3), [0, 1]

On several devices, with a share of the prompts on each:

    p_params = flax.jax_utils.replicate(params)
    prompt_ids = flax.training.common_utils.shard(prompt_ids)
    images = pipeline(prompt_ids, p_params, key, jit=True).images  # (devices, B, H, W, 3)

Text encoding, denoising and decoding are one compiled program, as in
`jax.pmap(pipeline._generate)`.

Source: Latent Diffusion Models (arXiv 2112.10752); image to image, SDEdit (arXiv 2108.01073).
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from diffusers_flax.images import pair_with_masks, prepare_images
from diffusers_flax.models.clip import FlaxCLIPTextModel
from diffusers_flax.models.unet import FlaxUNet2DConditionModel
from diffusers_flax.models.vae import FlaxAutoencoderKL
from diffusers_flax.pipelines.base import FlaxDiffusionPipeline
from diffusers_flax.pipelines.calls import CALL, GENERATE, published_call, with_options
from diffusers_flax.pipelines.generation import Generation, TextToImage
from diffusers_flax.pipelines.image_to_image import (
    RANGE,
    ImageToImage,
    Inpainting,
)
from diffusers_flax.pipelines.outputs import FlaxStableDiffusionPipelineOutput
from diffusers_flax.schedulers.base import FlaxSchedulerMixin

__all__ = [
    "FlaxStableDiffusionImg2ImgPipeline",
    "FlaxStableDiffusionInpaintPipeline",
    "FlaxStableDiffusionPipeline",
    "FlaxStableDiffusionPipelineOutput",
]


class StableDiffusionFamily:
    """What the pipelines of Stable Diffusion 1.x and 2.x have in common."""

    def __post_init__(self):
        super().__post_init__()
        if self.safety_checker is not None and self.feature_extractor is None:
            raise ValueError(
                "safety_checker needs feature_extractor, the CLIPImageProcessor that prepares its "
                "input; give both or neither"
            )

    @classmethod
    def parts_of(cls, path, index):
        """See FlaxDiffusionPipeline.parts_of; refuses SDXL."""
        class_name = str(index.get("_class_name"))
        if "XL" in class_name:
            raise ValueError(f"{path} is a {class_name}; {cls.remedy_for_xl}")
        return ("unet", "vae", "text_encoder", "tokenizer", "scheduler")


@dataclass(frozen=True, eq=False)
class StableDiffusionParts(StableDiffusionFamily, FlaxDiffusionPipeline):
    """The parts of Stable Diffusion 1.x and 2.x pipelines, in the published order.

    Fields: modules, which compute in the dtype that from_pretrained gave them; tokenizer, a
    transformers CLIPTokenizer; scheduler; safety_checker, a FlaxStableDiffusionSafetyChecker, and
    feature_extractor, its CLIPImageProcessor, or None; dtype.
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
class FlaxStableDiffusionPipeline(StableDiffusionParts, TextToImage):
    """Text in, image out, with Stable Diffusion 1.x and 2.x; see TextToImage."""

    torch_class_name = "StableDiffusionPipeline"


@dataclass(frozen=True, eq=False)
class FlaxStableDiffusionImg2ImgPipeline(StableDiffusionParts, ImageToImage):
    """Text and an image in, image out, with Stable Diffusion 1.x and 2.x; see ImageToImage."""

    torch_class_name = "StableDiffusionImg2ImgPipeline"


@dataclass(frozen=True, eq=False)
class FlaxStableDiffusionInpaintPipeline(StableDiffusionParts, Inpainting):
    """Inpainting with Stable Diffusion 1.x and 2.x; see Inpainting.

    A UNet of 9 channels needs masked_image at strength 1; otherwise it takes the whole `image`.
    """

    torch_class_name = "StableDiffusionInpaintPipeline"

    def prepare_inputs(self, prompt, image, mask):
        """Turn prompts, images and masks into arrays; one of each is repeated for many of the rest.

        Args:
            prompt: str or list of str.
            image: image or list of images of one size: PIL of any mode, or array (H, W, 3), or
                arrays (B, H, W, 3); uint8, or float in [0, 1].
            mask: as many, of the same size, white (1) where the image is repainted; see
                prepare_masks.

        Returns:
            (prompt_ids, masked_image, mask): int32 (B, 77); float32 (B, 3, H, W) in [-1, 1], 0
            where it is repainted; float32 (B, 1, H, W) of 0 and 1. The call takes them in another
            order: prompt_ids, mask, masked_image.

        Raises:
            ValueError: numbers or sizes differ, or one is not an image.
        """
        arrays = self.prepare_text_inputs(prompt), prepare_images(image), mask
        prompt_ids, image, mask = pair_with_masks(*arrays)
        return prompt_ids, image * (mask < 0.5), mask

    __call__ = published_call(
        Generation.__call__,
        *("prompt_ids", "mask", "masked_image", "params", "prng_seed"),
        *(*CALL, "strength", *RANGE, "image"),
        strength=1.0,
    )

    @with_options(*GENERATE, "strength", *RANGE, "image", strength=1.0)
    def _generate(self, prompt_ids, mask, masked_image, params, prng_seed, given):
        """Inpainting as one pure function of arrays, for one device; jit or pmap it.

        Args as in __call__, strength static.

        Returns:
            As TextToImage._generate.
        """
        arrays = prompt_ids, given.image, mask, masked_image, params, prng_seed
        return self._inpaint(*arrays, given)
