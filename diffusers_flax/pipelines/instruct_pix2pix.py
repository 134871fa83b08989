"""FlaxStableDiffusionInstructPix2PixPipeline: edit images by instruction, in one compiled program.

    pipeline, params = FlaxStableDiffusionInstructPix2PixPipeline.from_pretrained("MODEL")
    prompt_ids, image = pipeline.prepare_inputs("make it red", Image.open("in.png"))
    images = pipeline(prompt_ids, image, params, jax.random.key(0)).images    # (1, H, W, 3), [0, 1]

With a mask only its white area changes; all other pixels stay as they are:

    prompt_ids, image, mask = pipeline.prepare_inputs("make it red", image, Image.open("mask.png"))
    images = pipeline(prompt_ids, image, params, jax.random.key(0), mask=mask).images

A model whose UNet has 12 input channels takes a second image, see docs/editing.md:

    prompt_ids, image, reference = pipeline.prepare_inputs(prompt, image, reference=hat)
    images = pipeline(prompt_ids, image, params, jax.random.key(0), reference=reference).images

On several devices, each with an equal number of images:

    p_params = flax.jax_utils.replicate(params)
    prompt_ids, image = flax.training.common_utils.shard((prompt_ids, image))
    images = pipeline(prompt_ids, image, p_params, key, jit=True).images  # (devices, B, H, W, 3)

Source: InstructPix2Pix (arXiv 2211.09800); masks, Blended Latent Diffusion (arXiv 2206.02779).
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from diffusers_flax.images import pair_up, pair_with_masks, prepare_images
from diffusers_flax.pipelines.base import MODULES, FlaxDiffusionPipeline
from diffusers_flax.pipelines.guidance import guide_projected, memory_of
from diffusers_flax.pipelines.running import (
    CallOptions,
    GuidedPrediction,
    choose_denoising,
    run,
)
from diffusers_flax.pipelines.sampling import (
    keep_outside,
    keys_per_image,
    latent_mask,
    paste,
    posterior_of,
    rescale_guidance,
    resize,
    rows_of_branches,
    starting_noise,
)
from diffusers_flax.pipelines.stable_diffusion import StableDiffusionComponents

# Branches of guidance: the UNet sees instruction and image, the image only, or neither.
EDIT_BRANCHES = ("text", "image", "null")
# Latents around the white area of a mask that an edit may change, too. The result has the original
# image's pixels there. With 0 they would pull the edit towards the original image, see
# docs/editing.md.
MASK_MARGIN = 6


def guidance_weights(guidance_scale, image_guidance_scale):
    """Weights of the branches' noise predictions in the guided one; they sum to 1.

    Source: InstructPix2Pix (arXiv 2211.09800), equation 3, sorted by prediction.
    """
    return (
        guidance_scale,
        image_guidance_scale - guidance_scale,
        1 - image_guidance_scale,
    )


def edit_branches(guidance_scale, image_guidance_scale, guidance_rescale=0.0):
    """The EDIT_BRANCHES to compute, whose weight is not zero; all three for JAX arrays.

    guidance_scale, image_guidance_scale: s_T and s_I, numbers >= 0. A guidance_rescale above 0, to
    1, needs the text's branch.
    """
    rescales = isinstance(guidance_rescale, jax.Array) or guidance_rescale > 0
    if not isinstance(guidance_rescale, jax.Array) and not 0 <= guidance_rescale <= 1:
        raise ValueError(f"guidance_rescale={guidance_rescale} must be from 0 to 1; 0 is off")
    scales = {"guidance_scale": guidance_scale, "image_guidance_scale": image_guidance_scale}
    if any(isinstance(scale, jax.Array) for scale in scales.values()):
        return EDIT_BRANCHES
    for name, scale in scales.items():
        if not 0 <= scale < math.inf:
            raise ValueError(f"{name}={scale} must be 0 or more; both 1: no guidance")
    weights = guidance_weights(guidance_scale, image_guidance_scale)
    needed = dict(zip(EDIT_BRANCHES, weights))
    return tuple(x for x in EDIT_BRANCHES if needed[x] != 0 or (x == "text" and rescales))


def pixels_per_latent(configs, resolution):
    """Pixels per latent along a side; a ValueError if images are too small for the UNet.

    configs: {"unet", "vae": its config}; resolution: of the images' longer side, pixels.
    """
    factor = 2 ** (len(configs["vae"]["block_out_channels"]) - 1)
    unet = {"block_out_channels": MODULES["unet"].block_out_channels} | dict(configs["unet"])
    smallest = factor * 2 ** (len(unet["block_out_channels"]) - 1)
    if resolution < smallest:
        raise ValueError(
            f"resolution={resolution} is too small: this model takes {smallest} or more"
        )
    return factor


class OriginalImage(NamedTuple):
    """The original images of a batch of edits.

    Fields:
        latents: mode of the VAE's posterior, unscaled, (B, C, h, w).
        image: (B, 3, H, W) in [-1, 1], at the size of the result.
        mask: (B, 1, H, W) from 0 to 1, at the same size, or None.
        reference: latents of the reference images, as the original images', or None.
    """

    latents: Any
    image: Any
    mask: Any
    reference: Any


class InstructPix2Pix(FlaxDiffusionPipeline):
    """Base of the editing pipelines of Stable Diffusion and SDXL."""

    encodes_images = True
    branch_scales = ("guidance_scale", "image_guidance_scale", "guidance_rescale")
    unet_inputs = ((2, 0), (3, 0))  # the latter with a reference
    is_cosxl_edit = False  # True: the UNet takes scaled latents of the original image

    @classmethod
    def check_configs(cls, path, configs):
        """See FlaxDiffusionPipeline.check_configs."""
        super().check_configs(path, configs)
        if configs["unet"].get("time_cond_proj_dim") is not None:
            raise ValueError(
                f"the UNet of {path} has time_cond_proj_dim: it embeds one guidance "
                "scale, and edits have two; take a UNet without it, and distil it into a LoRA"
            )

    @classmethod
    def check_acceleration(cls, acceleration):
        """See FlaxDiffusionPipeline.check_acceleration."""
        from diffusers_flax.acceleration.plans import TGate

        if isinstance(acceleration.cache, TGate):
            raise ValueError(
                "accelerate=tgate is for text to image; for edits take guidance:stop=0.6"
            )

    def make_call(self, arguments):
        """See FlaxDiffusionPipeline.make_call; a reference needs a UNet that sees it."""
        call = super().make_call(arguments)
        if call.inputs["reference"] is not None and not self.unet.takes_reference:
            raise ValueError(
                f"a reference needs a UNet with {3 * self.vae.latent_channels} input channels, "
                f"this model's has {self.unet.in_channels}; leave the reference out, or train such "
                "a model"
            )
        if call.options.guidance and call.options.branches not in (("text",), ("text", "image")):
            # A weight of 0 leaves a branch out of plain guidance alone.
            return replace(call, options=replace(call.options, branches=EDIT_BRANCHES))
        return call

    def prepare_inputs(self, prompt, image, mask=None, mask_feather=0, reference=None):
        """Turn instructions and images into arrays; a single one of either is repeated.

        Args:
            prompt: str or list of str.
            image: image or list of images of one size: PIL of any mode, or array (H, W, 3),
                or arrays (B, H, W, 3); uint8, or float in [0, 1].
            mask: one, or one per image, of the images' size; white (1) where an image may change;
                see images.prepare_masks. None: everywhere.
            mask_feather: width in pixels of the border inside the white area in which the edit
                fades in.
            reference: one, or one per image, as image; stretched to the images' size.

        Returns:
            (prompt_ids, image): int32 (B, 77), float32 (B, 3, H, W) in [-1, 1]; followed by the
            mask, float32 (B, 1, H, W) from 0 to 1, and by the reference, as image, if given.

        Raises:
            ValueError: numbers of prompts, images and masks differ, sizes differ, it is not an
                image, or a mask has no white.
        """
        prompt_ids, image = self.prepare_text_inputs(prompt), prepare_images(image)
        arrays = pair_up(prompt_ids, image)
        if mask is not None:
            arrays = pair_with_masks(prompt_ids, image, mask, feather=mask_feather)
            if not arrays[2].any((1, 2, 3)).all():
                raise ValueError(
                    "a mask has no white, so nothing may change; make the area to edit white"
                )
        if reference is not None:
            reference = np.asarray(resize(prepare_images(reference), image.shape[2:]))
            arrays = (*arrays, pair_up(arrays[0], reference, "images", "references")[1])
        return arrays

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
        mask=None,
        reference=None,
        **options: Unpack[CallOptions],
    ):
        """Edit a batch of images; compiles at the first call of each size.

        Args:
            image: to edit, float32 (B, 3, H, W) in [-1, 1], as from prepare_inputs.
            guidance_scale: weight of the instruction, >= 0, a number, or an array of one per image.
            image_guidance_scale: similarity to the image, >= 0, likewise. Both numbers 1: no
                guidance, a third of the work; this one 1, or both equal: two thirds.
            height, width: of the result, multiples of 8; the image is resized to it. None: the size
                of the image.
            mask: float32 (B, 1, H, W), weights from 0, where the image stays as it is, to 1, where
                it may change; None: it may change everywhere.
            reference: a second image to see, as image, for a UNet with 12 input channels; None:
                zeros in the place of its latents, as in a part of training.
            prompt_ids, params, prng_seed, num_inference_steps, latents, neg_prompt_ids,
                return_dict, jit, options: as for FlaxStableDiffusionPipeline's call.

        Returns, Raises: as FlaxStableDiffusionPipeline's call.
        """
        return run(self, self.make_call(locals()))

    def guidance_branches(self, guidance_scale, image_guidance_scale, guidance_rescale=0.0):
        """The branches to compute, all of them for arrays of scales; see edit_branches."""
        scales = guidance_scale, image_guidance_scale
        if any(isinstance(scale, jax.core.Tracer) for scale in scales):
            return EDIT_BRANCHES
        pairs = zip(*map(np.ravel, np.broadcast_arrays(*scales)))
        branches = [edit_branches(*map(float, pair), guidance_rescale) for pair in pairs]
        return EDIT_BRANCHES if any(map(np.ndim, scales)) else branches[0]

    def encode_image(self, params, inputs, options):
        """The OriginalImage: a stage of a run.

        The latents are the posterior's mode, as in training (section 3.2).
        """
        size, mask, reference = (options.height, options.width), inputs["mask"], inputs["reference"]
        image = resize(inputs["image"], size)
        if mask is not None:
            mask = jax.image.resize(mask, (len(inputs["prompt_ids"]), 1, *size), "nearest")

        def latents_of(image):
            mode = posterior_of(self.compute_vae, params["vae"], image, self.layout).mode()
            return jnp.transpose(mode, (0, 3, 1, 2))

        latents = latents_of(image)
        if reference is not None:
            reference = latents_of(resize(reference, size))
        return OriginalImage(latents, image, mask, reference)

    def denoise(self, params, inputs, options, text, encoded):
        """Scaled latents (B, 4, h, w) of the edited images; encoded: OriginalImage."""
        branches, scaling_factor = options.branches, self.vae.scaling_factor
        guidance_rescale = inputs["guidance_rescale"]
        guidance_scale, image_guidance_scale = (
            inputs[name] for name in ("guidance_scale", "image_guidance_scale")
        )
        latents = condition = encoded.latents
        if self.unet.takes_reference:
            reference = encoded.reference
            reference = jnp.zeros_like(latents) if reference is None else reference
            condition = jnp.concatenate([latents, reference], axis=1)
        if self.is_cosxl_edit:  # else unscaled, as in training
            condition = condition * scaling_factor
        conditions = jnp.concatenate(
            [jnp.zeros_like(condition) if x == "null" else condition for x in branches]
        )

        # Noise, one key per image
        keys = keys_per_image(inputs["prng_seed"], len(latents))
        schedule = self.make_schedule(options, latents.shape)
        noise = starting_noise(inputs["latents"], keys, latents.shape)
        after_step = None
        if encoded.mask is not None:
            weights = latent_mask(encoded.mask, self.vae_scale_factor, MASK_MARGIN)
            kept = encoded.latents.astype(jnp.float32) * scaling_factor
            after_step = keep_outside(schedule, weights, kept, noise)

        def unet_inputs(active, i, x_t, t):
            rows = rows_of_branches([conditions, *text], branches, active)
            model_input = jnp.concatenate([x_t] * len(active))
            return jnp.concatenate([model_input, rows[0]], axis=1), t, *rows[1:], None

        def guide_edit(eps_pred, active, i, memory):
            weights = (guidance_scale, image_guidance_scale)
            if active != branches:  # guidance by the image has ended, or all guidance
                weights = (guidance_scale if len(active) > 1 else 1.0, 1.0)
            weights = (jnp.asarray(s, jnp.float32) for s in weights)
            weights = [s.reshape(-1, 1, 1, 1) if s.ndim else s for s in weights]  # of each image
            of_branch = dict(zip(EDIT_BRANCHES, guidance_weights(*weights)))
            eps_pred = dict(zip(active, jnp.split(eps_pred, len(active))))
            if options.guidance is None:
                guided = sum(of_branch[branch] * eps for branch, eps in eps_pred.items())
            else:
                scales = dict(zip(EDIT_BRANCHES, weights))
                guided, memory = guide_projected(options.guidance, eps_pred, scales, memory)
            if "text" in active:
                guided = rescale_guidance(guided, eps_pred["text"], guidance_rescale)
            return guided, memory

        finish = partial(keep_pixels_outside, encoded)
        states_of = partial(rows_of_branches, text[0], branches)
        memory = memory_of(options.guidance, branches, latents.shape)
        prediction = GuidedPrediction(branches, unet_inputs, states_of, guide_edit, memory=memory)
        height = latents.shape[2]
        denoise = choose_denoising(self, params, schedule, keys, prediction, height, finish)
        return denoise(noise * schedule.state.init_noise_sigma, after_step=after_step)

    def decode(self, params, inputs, options, encoded, latents):
        """Images, float32 (B, H, W, 3) in [0, 1]: the last stage of a run."""
        return keep_pixels_outside(
            encoded, super().decode(params, inputs, options, encoded, latents)
        )


def keep_pixels_outside(original, images):
    """Images with the original image's pixels outside the mask; original: OriginalImage."""
    return images if original.mask is None else paste(images, original.image, original.mask)


@dataclass(frozen=True, eq=False)
class FlaxStableDiffusionInstructPix2PixPipeline(StableDiffusionComponents, InstructPix2Pix):
    """Edit images with Stable Diffusion 1.x and 2.x.

    The scheduler, number of steps, image size and branches are compiled in; another choice compiles
    again and logs it. The guidance scales are arguments of the program, which is compiled again
    only if they add or remove a branch.
    """

    torch_class_name = "StableDiffusionInstructPix2PixPipeline"
