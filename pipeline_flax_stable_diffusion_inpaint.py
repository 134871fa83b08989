"""FlaxStableDiffusionInpaintPipeline: repaint part of an image from text.

    pipeline, params = FlaxStableDiffusionInpaintPipeline.from_pretrained("MODEL")
    prompt_ids, masked_image, mask = pipeline.prepare_inputs("a cat on the bench", image, mask)
    images = pipeline(prompt_ids, mask, masked_image, params, jax.random.key(0)).images

The models are Stable Diffusion 1.x and 2.x for inpainting, whose UNet takes 9 channels: the noisy
latents, the mask and the latents of the image without the masked part.

Source: Latent Diffusion Models (arXiv 2112.10752), section 4.5; numerics of PyTorch diffusers.
"""

from dataclasses import dataclass

import jax
import numpy as np
from PIL import Image

from images import prepare_images
from pipeline_flax_stable_diffusion import TextToImage
from pipeline_flax_utils import FlaxStableDiffusionPipelineOutput, StableDiffusionParts, pair_up
from sampling_flax import (
    encode,
    guidance_branches,
    keys_of_sequel,
    keys_per_image,
    resize,
    starting_noise,
)

__all__ = ["FlaxStableDiffusionInpaintPipeline", "FlaxStableDiffusionPipelineOutput"]


def check_channels(path, configs):
    """Refuse a UNet that takes no mask; path, configs: as in FlaxDiffusionPipeline.check."""
    in_channels = configs["unet"].get("in_channels", 4)
    latent_channels = configs["vae"].get("latent_channels", 4)
    if in_channels != 2 * latent_channels + 1:
        raise ValueError(
            f"the UNet of {path} has in_channels={in_channels}; inpainting needs "
            f"{2 * latent_channels + 1}: latents, mask and latents of the masked image"
        )


def prepare_masks(mask):
    """Masks as float32 (B, 1, H, W) of 0 (keep) and 1 (repaint).

    Args:
        mask: mask or list of masks of one size: PIL of any mode, or array (H, W), or arrays
            (B, H, W); uint8, bool, or float in [0, 1]. From the middle of the range on a pixel is
            repainted.

    Raises:
        ValueError: sizes differ, or it is no mask.
    """
    is_batch = isinstance(mask, list | tuple) or getattr(mask, "ndim", 0) == 3
    masks = []
    for one in mask if is_batch else [mask]:
        array = np.asarray(one.convert("L") if isinstance(one, Image.Image) else one)
        if array.ndim != 2:
            raise ValueError(f"a mask has shape {array.shape}; as an array it is (H, W)")
        if array.dtype == np.uint8:
            array = array.astype(np.float32) / 255
        if array.min() < 0 or array.max() > 1:
            raise ValueError(
                f"a mask has {array.dtype} values from {array.min()} to {array.max()}; give uint8, "
                "bool, or float in [0, 1]"
            )
        masks.append(array >= 0.5)
    if len({mask.shape for mask in masks}) != 1:
        raise ValueError("the masks of a batch must have one size; resize them, or call per size")
    return np.stack(masks)[:, None].astype(np.float32)


@dataclass(frozen=True, eq=False)
class FlaxStableDiffusionInpaintPipeline(StableDiffusionParts, TextToImage):
    """Text, image and mask in, image out; see TextToImage for what is compiled in."""

    torch_class_name = "StableDiffusionInpaintPipeline"
    check_channels = staticmethod(check_channels)

    def prepare_inputs(self, prompt, image, mask):
        """Turn prompts, images and masks into arrays; one of each goes with many of the others.

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
            ValueError: numbers or sizes do not fit, or one is no image.
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
    ):
        """Repaint a batch of images; arguments as in TextToImage, and:

        Args:
            mask: float32 (B, 1, H, W), 1 where the image is repainted.
            masked_image: float32 (B, 3, H, W) in [-1, 1], 0 where it is repainted.
            height, width: of the result, to which both are resized; None takes their own.
        """
        return self._run(
            jit,
            output_type,
            return_dict,
            guidance_scale,
            guidance_rescale,
            arrays=dict(
                prompt_ids=prompt_ids,
                mask=mask,
                masked_image=masked_image,
                params=params,
                prng_seed=prng_seed,
                latents=latents,
                neg_prompt_ids=neg_prompt_ids,
            ),
            options=dict(num_inference_steps=num_inference_steps, height=height, width=width),
        )

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
    ):
        """Inpainting as one pure function of arrays, for one device; jit or pmap it.

        Args as in __call__.

        Returns:
            As TextToImage._generate.
        """
        branches = guidance_branches(guidance_scale) if branches is None else branches
        B = len(prompt_ids)
        shape = masked_image.shape
        if len(shape) != 4 or shape[0] != B or mask.shape != (B, 1, *shape[2:]):
            raise ValueError(
                f"prompt_ids has shape {prompt_ids.shape}, mask {mask.shape}, masked_image "
                f"{shape}; they need one batch and one size; prepare_inputs makes them"
            )
        size = self.picture_size(height, width, shape)
        keys = keys_per_image(prng_seed, B)
        masked_latents = encode(
            self._vae, params["vae"], resize(masked_image, size), keys_of_sequel(keys)
        )  # (B, 4, h, w)
        factor = self.vae_scale_factor
        mask = jax.image.resize(mask, (B, 1, *size), "nearest")
        mask = mask[..., ::factor, ::factor]  # as PyTorch's nearest neighbour, (B, 1, h, w)

        state = self._schedule(num_inference_steps, masked_latents.shape)
        x_t = starting_noise(latents, keys, masked_latents.shape) * state.init_noise_sigma
        conditions = self._conditions(params, prompt_ids, neg_prompt_ids, branches, x_t.shape)
        x_0 = self._denoise(
            params,
            state,
            x_t,
            keys,
            conditions,
            branches,
            guidance_scale,
            guidance_rescale,
            extra_channels=[mask, masked_latents],
        )
        return x_0 if return_latents else self._decode(params, x_0)
