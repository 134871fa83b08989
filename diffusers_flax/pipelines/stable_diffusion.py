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
from functools import partial

import jax

from diffusers_flax.images import pair_up, prepare_images, prepare_masks
from diffusers_flax.pipelines.base import StableDiffusionParts
from diffusers_flax.pipelines.calls import CALL, GENERATE, published_call, with_options
from diffusers_flax.pipelines.generation import (
    Generation,
    ImageToImage,
    TextToImage,
    check_channels,
)
from diffusers_flax.pipelines.outputs import FlaxStableDiffusionPipelineOutput
from diffusers_flax.pipelines.sampling import (
    encode,
    guide,
    keys_of_sequel,
    keys_per_image,
    resize,
    starting_noise,
)

__all__ = [
    "FlaxStableDiffusionImg2ImgPipeline",
    "FlaxStableDiffusionInpaintPipeline",
    "FlaxStableDiffusionPipeline",
    "FlaxStableDiffusionPipelineOutput",
]


@dataclass(frozen=True, eq=False)
class FlaxStableDiffusionPipeline(StableDiffusionParts, TextToImage):
    """Text in, image out, with Stable Diffusion 1.x and 2.x; see TextToImage."""

    torch_class_name = "StableDiffusionPipeline"


@dataclass(frozen=True, eq=False)
class FlaxStableDiffusionImg2ImgPipeline(StableDiffusionParts, ImageToImage):
    """Text and an image in, image out, with Stable Diffusion 1.x and 2.x; see ImageToImage."""

    torch_class_name = "StableDiffusionImg2ImgPipeline"


@dataclass(frozen=True, eq=False)
class FlaxStableDiffusionInpaintPipeline(StableDiffusionParts, TextToImage):
    """Text, image and mask in, image out; see TextToImage for what is compiled in."""

    torch_class_name = "StableDiffusionInpaintPipeline"
    check_channels = staticmethod(partial(check_channels, for_inpainting=True))

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
        image, mask = prepare_images(image), prepare_masks(mask)
        if image.shape[2:] != mask.shape[2:]:
            raise ValueError(
                f"image is {image.shape[2]}x{image.shape[3]} and mask {mask.shape[2]}x"
                f"{mask.shape[3]} (height x width); resize one of them"
            )
        image, mask = pair_up(image, mask, "images", "masks")
        prompt_ids, masked_image = pair_up(super().prepare_inputs(prompt), image * (mask < 0.5))
        return prompt_ids, masked_image, pair_up(prompt_ids, mask)[1]

    __call__ = published_call(
        Generation.__call__, "prompt_ids", "mask", "masked_image", "params", "prng_seed", *CALL
    )

    @with_options(*GENERATE)
    def _generate(self, prompt_ids, mask, masked_image, params, prng_seed, given):
        """Inpainting as one pure function of arrays, for one device; jit or pmap it.

        Args as in __call__.

        Returns:
            As TextToImage._generate.
        """
        branches = given.branches or self.guidance_branches(given.guidance_scale)
        B = len(prompt_ids)
        shape = masked_image.shape
        if len(shape) != 4 or shape[0] != B or mask.shape != (B, 1, *shape[2:]):
            raise ValueError(
                f"prompt_ids has shape {prompt_ids.shape}, mask {mask.shape}, masked_image "
                f"{shape}; they need one batch and one size; prepare_inputs makes them"
            )
        size = self.image_size(given.height, given.width, shape)
        keys = keys_per_image(prng_seed, B)
        masked_latents = encode(
            self._vae, params["vae"], resize(masked_image, size), keys_of_sequel(keys)
        )  # (B, 4, h, w)
        factor = self.vae_scale_factor
        mask = jax.image.resize(mask, (B, 1, *size), "nearest")
        mask = mask[..., ::factor, ::factor]  # as PyTorch's nearest neighbour, (B, 1, h, w)

        schedule = self._schedule(
            given.num_inference_steps, masked_latents.shape, timesteps=given.timesteps
        )
        x_t = (
            starting_noise(given.latents, keys, masked_latents.shape) * schedule[0].init_noise_sigma
        )
        text = self._encode_text(params, prompt_ids, given.neg_prompt_ids, branches, x_t.shape)
        inputs = self._unet_inputs(text, branches, given.guidance_scale, B, [mask, masked_latents])
        scales = {name: getattr(given, name) for name in ("guidance_scale", "guidance_rescale")}
        combine = partial(guide, **scales)
        x_0 = self._denoise(params, schedule, x_t, keys, branches, inputs, combine, given.eta)
        return x_0 if given.return_latents else self._decode(params, x_0)
