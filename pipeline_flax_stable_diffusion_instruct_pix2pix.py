"""FlaxStableDiffusionInstructPix2PixPipeline: edit images as instructed, in one compiled program.

    pipeline, params = FlaxStableDiffusionInstructPix2PixPipeline.from_pretrained("MODEL")
    prompt_ids, image = pipeline.prepare_inputs("make it red", Image.open("in.png"))
    images = pipeline(prompt_ids, image, params, jax.random.key(0)).images    # (1, H, W, 3), [0, 1]

On several devices, each with its share of the images:

    p_params = flax.jax_utils.replicate(params)
    prompt_ids, image = flax.training.common_utils.shard((prompt_ids, image))
    images = pipeline(prompt_ids, image, p_params, key, jit=True).images  # (devices, B, H, W, 3)

Source: InstructPix2Pix (arXiv 2211.09800).
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from config_flax import read_parts
from executables import run
from images import prepare_images
from pipeline_flax_utils import FlaxStableDiffusionPipelineOutput, StableDiffusionParts, pair_up
from sampling_flax import (
    decode,
    denoise,
    keys_per_image,
    resize,
    rows_per_image,
    starting_noise,
)

__all__ = ["FlaxStableDiffusionInstructPix2PixPipeline", "FlaxStableDiffusionPipelineOutput"]

# What the UNet is shown in each branch of guidance: instruction and image, image, nothing.
BRANCHES = ("text", "image", "null")


def guidance_weights(guidance_scale, image_guidance_scale):
    """Weight of each branch's noise prediction in the guided one; they sum to 1.

    Source: InstructPix2Pix (arXiv 2211.09800), equation 3, sorted by prediction.
    """
    return (
        guidance_scale,
        image_guidance_scale - guidance_scale,
        1 - image_guidance_scale,
    )


def guidance_branches(guidance_scale, image_guidance_scale):
    """Choose the branches whose weight is not zero; JAX arrays may have any value, so need all.

    Args:
        guidance_scale, image_guidance_scale: s_T and s_I, numbers >= 0 or JAX arrays.

    Returns:
        A part of BRANCHES, in its order.

    Raises:
        ValueError: a scale is negative or not finite.
    """
    scales = {"guidance_scale": guidance_scale, "image_guidance_scale": image_guidance_scale}
    if any(isinstance(scale, jax.Array) for scale in scales.values()):
        return BRANCHES
    for name, scale in scales.items():
        if not 0 <= scale < math.inf:
            raise ValueError(f"{name}={scale} must be 0 or more; 1 and 1 switch guidance off")
    weights = guidance_weights(guidance_scale, image_guidance_scale)
    return tuple(branch for branch, weight in zip(BRANCHES, weights) if weight != 0)


@dataclass(frozen=True, eq=False)
class FlaxStableDiffusionInstructPix2PixPipeline(StableDiffusionParts):
    """Instruction and image in, edited image out.

    Scheduler, steps and image size are compiled in: asking for others compiles again, and logs
    that; the scales are not, unless a branch of guidance falls away or joins.
    """

    torch_class_name = "StableDiffusionInstructPix2PixPipeline"
    text_axes = 1  # of one image's prompt_ids

    @classmethod
    def check(cls, pretrained_model_name_or_path, revision=None, **hub_options):
        """See FlaxDiffusionPipeline.check; takes an InstructPix2Pix that is not of SDXL."""
        path = pretrained_model_name_or_path
        parts = ("unet", "vae", "text_encoder", "tokenizer", "scheduler")
        index, configs = read_parts(path, parts, revision, **hub_options)
        class_name = str(index.get("_class_name"))
        if "XL" in class_name:
            raise ValueError(
                f"{path} is a {class_name}; this pipeline edits with InstructPix2Pix models made "
                "from Stable Diffusion 1.x and 2.x"
            )
        in_channels = configs["unet"].get("in_channels", 4)
        latent_channels = configs["vae"].get("latent_channels", 4)
        if in_channels == latent_channels:
            raise ValueError(
                f"{path} is no InstructPix2Pix: its UNet has in_channels={in_channels}, so it "
                "makes images from text and sees none; widen it with create_modified_unet.py and "
                "train it with flax_train_instruct_pix2pix.py"
            )
        if in_channels != 2 * latent_channels:
            raise ValueError(
                f"{path} is no InstructPix2Pix: its UNet has in_channels={in_channels}, which "
                f"should be twice its VAE's latent_channels={latent_channels}"
            )
        return index, configs

    def prepare_inputs(self, prompt, image):
        """Turn instructions and images into arrays; one of either goes with many of the other.

        Args:
            prompt: str or list of str.
            image: image or list of images of one size: PIL of any mode, or array (H, W, 3),
                or arrays (B, H, W, 3); uint8, or float in [0, 1].

        Returns:
            (prompt_ids, image): int32 (B, 77), float32 (B, 3, H, W) in [-1, 1].

        Raises:
            ValueError: numbers or sizes of the images do not fit, or it is no image.
        """
        return pair_up(self.prepare_text_inputs(prompt), prepare_images(image))

    def __call__(
        self,
        prompt_ids,
        image,
        params,
        prng_seed,
        num_inference_steps=50,
        guidance_scale=7.5,
        image_guidance_scale=1.5,
        height=None,
        width=None,
        latents=None,
        neg_prompt_ids=None,
        return_dict=True,
        jit=False,
    ):
        """Edit a batch of images; compiles at the first call of each size, see the class.

        Args:
            prompt_ids: instructions, int32 (B, 77); with jit all arrays are (devices, B, ...).
            image: images, float32 (B, 3, H, W) in [-1, 1].
            params: as from from_pretrained; with jit replicated. Without jit the first call puts
                NumPy arrays on the device, where they stay for further calls, and makes them
                read-only. To alternate between models, use jax.device_put(params) for each.
            prng_seed: one PRNG key, typed or uint32, or one per image (B,); with jit also one
                per device. With one key, image i gets the noise of fold_in(key, i), so it does
                not depend on how many images or devices there are.
            num_inference_steps: of the scheduler, at least 1.
            guidance_scale: weight of the instruction, >= 0.
            image_guidance_scale: likeness to the image, >= 0. Both 1: no guidance, a third
                of the work; image_guidance_scale 1, or both alike: two thirds.
            height, width: of the result, multiples of the VAE's factor (8); the images are
                resized to it. None takes the images' own.
            latents: standard normal noise to start from, (B, 4, H / 8, W / 8); None draws it.
            neg_prompt_ids: what to avoid, int32 (B, 77) or one row for all; None is the empty text.
            return_dict: False returns a plain tuple (images, nsfw_content_detected).
            jit: True runs on several devices, False on one; compiled either way.

        Returns:
            FlaxStableDiffusionPipelineOutput, images (B, H, W, 3), with jit
            (devices, B, H, W, 3), float32 in [0, 1].

        Raises:
            ValueError: shapes, sizes, scales or steps that do not fit.
        """
        if image.dtype == np.uint8:
            raise ValueError("image is uint8; prepare_inputs makes it float32 in [-1, 1]")
        scales = dict(
            guidance_scale=float(guidance_scale), image_guidance_scale=float(image_guidance_scale)
        )
        images = run(
            self,
            jit,
            arrays=dict(
                prompt_ids=prompt_ids,
                image=image,
                params=params,
                prng_seed=prng_seed,
                latents=latents,
                neg_prompt_ids=neg_prompt_ids,
            ),
            shared=scales,
            options=dict(
                num_inference_steps=num_inference_steps,
                height=height,
                width=width,
                branches=guidance_branches(**scales),
            ),
        )
        return self._output(images, params, jit, "np", return_dict)

    def _generate(
        self,
        prompt_ids,
        image,
        params,
        prng_seed,
        num_inference_steps=50,
        height=None,
        width=None,
        guidance_scale=7.5,
        image_guidance_scale=1.5,
        latents=None,
        neg_prompt_ids=None,
        branches=None,
    ):
        """The whole edit as one pure function of arrays, for one device; jit or pmap it.

        Args as in __call__. Scales may be traced, then all three branches run, unless `branches`
        (static) says which; None works it out.

        Returns:
            images, float32 (B, H, W, 3) in [0, 1].
        """
        if branches is None:
            branches = guidance_branches(guidance_scale, image_guidance_scale)
        B = prompt_ids.shape[0]
        if image.ndim != 4 or image.shape[0] != B:
            raise ValueError(
                f"image has shape {image.shape}, prompt_ids {prompt_ids.shape}; image is "
                "(batch, 3, height, width) with the same batch; prepare_inputs makes both"
            )

        # 1. The image and the texts, each encoded once.
        posterior = self.vae.apply(
            {"params": params["vae"]},
            resize(image, self.image_size(height, width, image.shape)),
            method=self.vae.encode,
        ).latent_dist
        # The posterior's mode, unscaled, as in training: section 3.2 of the paper.
        image_latents = jnp.transpose(posterior.mode(), (0, 3, 1, 2))  # (B, 4, h, w)
        if neg_prompt_ids is None:
            null_ids = self.prepare_text_inputs("")
        else:
            null_ids = rows_per_image(neg_prompt_ids, B).astype(prompt_ids.dtype)
        text_ids = jnp.concatenate([prompt_ids, null_ids])
        states = self.text_encoder(text_ids, params=params["text_encoder"], return_dict=True)
        text, null_text = states.last_hidden_state[:B], states.last_hidden_state[B:]
        null_text = jnp.broadcast_to(null_text, text.shape)  # (B, 77, D)

        # 2. What each branch of guidance is shown.
        conditions = {
            "text": (text, image_latents),
            "image": (null_text, image_latents),
            "null": (null_text, jnp.zeros_like(image_latents)),
        }
        context = jnp.concatenate([conditions[branch][0] for branch in branches])
        image_latents_in = jnp.concatenate([conditions[branch][1] for branch in branches])
        scales = (jnp.asarray(s, jnp.float32) for s in (guidance_scale, image_guidance_scale))
        weights = dict(zip(BRANCHES, guidance_weights(*scales)))

        # 3. Noise, each image from its own key.
        keys = keys_per_image(prng_seed, B)
        state = self._schedule(num_inference_steps, image_latents.shape)
        x_t = starting_noise(latents, keys, image_latents.shape) * state.init_noise_sigma

        # 4. Denoise.
        def predict(scaled, t):
            model_input = jnp.concatenate(
                [jnp.concatenate([scaled] * len(branches)), image_latents_in], axis=1
            )  # (branches * B, 8, h, w)
            eps_pred = self.unet.apply({"params": params["unet"]}, model_input, t, context).sample
            eps_pred = jnp.split(eps_pred.astype(jnp.float32), len(branches))
            return sum(weights[branch] * eps for branch, eps in zip(branches, eps_pred))

        x_0 = denoise(self.scheduler, state, x_t, keys, predict)

        # 5. Back to an image.
        return decode(self.vae, params["vae"], x_0)
