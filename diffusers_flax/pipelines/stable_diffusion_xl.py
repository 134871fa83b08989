"""Pipelines of SDXL, base and refiner: text to image, image to image, inpainting.

    pipeline, params = FlaxStableDiffusionXLPipeline.from_pretrained("MODEL", dtype=jnp.bfloat16)
    prompt_ids = pipeline.prepare_inputs("a red panda reading")  # (1, 2, 77)
    images = pipeline(prompt_ids, params, jax.random.key(0)).images  # (1, H, W, 3), [0, 1]

Base, then refiner, which makes the last fifth of the steps:

    options = dict(num_inference_steps=40, output_type="latent", denoising_end=0.8)
    latents = pipeline(prompt_ids, params, key, **options).images
    refiner, params = FlaxStableDiffusionXLImg2ImgPipeline.from_pretrained("REFINER")
    options = dict(num_inference_steps=40, denoising_start=0.8)
    images = refiner(refiner.prepare_text_inputs(prompt), latents, params, key, **options).images

On several devices as with FlaxStableDiffusionPipeline. As in PyTorch's pipelines by default,
micro-conditioning says that the original has the result's size and was not cropped, and the refiner
gets the aesthetic scores 6 and, for the null text, 2.5. Other values are not supported.

Source: SDXL (arXiv 2307.01952).
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from diffusers_flax.images import pair_with_masks
from diffusers_flax.loading.directories import has_component
from diffusers_flax.loading.tokenizer import tokenize
from diffusers_flax.models.clip import FlaxCLIPTextModel, FlaxCLIPTextModelWithProjection
from diffusers_flax.models.tiny_vae import TINY_VAES
from diffusers_flax.models.unet import FlaxUNet2DConditionModel
from diffusers_flax.models.vae import FlaxAutoencoderKL
from diffusers_flax.outputs import FlaxStableDiffusionXLPipelineOutput
from diffusers_flax.pipelines.base import TEXT_ENCODERS, FlaxDiffusionPipeline
from diffusers_flax.pipelines.image_to_image import ImageToImage
from diffusers_flax.pipelines.inpainting import Inpainting
from diffusers_flax.pipelines.running import Options, generate, run
from diffusers_flax.pipelines.sampling import AYS_SDXL, TEXT_OF_BRANCH, are_plain, rows_per_image
from diffusers_flax.pipelines.text_to_image import TextToImage
from diffusers_flax.schedulers.base import FlaxSchedulerMixin

AESTHETIC_SCORES = {"text": 6.0, "null": 2.5}  # of each branch, for the refiner
SD_SCALING_FACTOR, SDXL_SCALING_FACTOR = 0.18215, 0.13025  # of the VAEs' latents


@dataclass(frozen=True, eq=False)
class XLComponents(FlaxDiffusionPipeline):
    """Components of SDXL's pipelines: two text encoders, micro-conditioning, VAE.

    force_zeros_for_empty_prompt: without a negative prompt the text states are zeros instead of the
    states of an empty prompt. requires_aesthetics_score: a refiner, whose UNet takes five time ids.
    """

    text_encoder: FlaxCLIPTextModel | None  # None: a refiner
    text_encoder_2: FlaxCLIPTextModelWithProjection
    vae: FlaxAutoencoderKL
    tokenizer: Any  # a transformers CLIPTokenizer; None: a refiner
    tokenizer_2: Any
    unet: FlaxUNet2DConditionModel
    scheduler: FlaxSchedulerMixin
    dtype: DTypeLike = jnp.float32
    force_zeros_for_empty_prompt: bool = True
    requires_aesthetics_score: bool = False

    text_axes = 2  # of one image's prompt_ids
    tiny_vae_name = TINY_VAES[1]
    ays_timesteps = AYS_SDXL

    @classmethod
    def required_components(cls, path, index):
        """See FlaxDiffusionPipeline.required_components; image to image accepts a refiner, too."""
        class_name = str(index.get("_class_name"))
        if "XL" not in class_name:
            raise ValueError(
                f"{path} is a {class_name}, not Stable Diffusion XL; for 1.x and 2.x use "
                f"{cls.__name__.replace('XL', '')}"
            )
        absent = [name for name in ("text_encoder", "tokenizer") if not has_component(index, name)]
        if absent and not issubclass(cls, ImageToImage):
            raise ValueError(
                f"{path} has no {' and no '.join(absent)}: it is a refiner, which needs an "
                "image; make one with the base model and refine it with "
                "FlaxStableDiffusionXLImg2ImgPipeline"
            )
        names = ("unet", "vae", *TEXT_ENCODERS, *TEXT_ENCODERS.values(), "scheduler")
        return [name for name in names if name not in absent]

    @classmethod
    def check_configs(cls, sources, configs):
        """See FlaxDiffusionPipeline.check_configs."""
        if configs["unet"].get("addition_embed_type") != "text_time":
            raise ValueError(
                f"the UNet of {sources['unet']} has no addition_embed_type='text_time': it is not "
                "SDXL"
            )
        if configs["vae"].get("scaling_factor", SD_SCALING_FACTOR) == SD_SCALING_FACTOR:
            raise ValueError(
                f"the VAE of {sources['vae']} has scaling_factor {SD_SCALING_FACTOR}: it is Stable "
                "Diffusion's VAE; take SDXL's"
            )
        super().check_configs(sources, configs)

    @classmethod
    def _settings(cls, index):
        return {
            "force_zeros_for_empty_prompt": bool(index.get("force_zeros_for_empty_prompt", True)),
            "requires_aesthetics_score": bool(index.get("requires_aesthetics_score", False)),
        }

    def _index(self):
        return {
            "force_zeros_for_empty_prompt": self.force_zeros_for_empty_prompt,
            "requires_aesthetics_score": self.requires_aesthetics_score,
        }

    def prepare_text_inputs(self, prompt):
        """Tokenize prompts for every text encoder, each with its own tokenizer.

        Args:
            prompt: str or list of str; tokens past the 77th are cut, with a warning.

        Returns:
            prompt_ids, int32 (B, 2, 77); (B, 1, 77) for a refiner, which has one text encoder.
        """
        return np.stack(
            [
                tokenize(tokenizer, prompt, encoder.module.max_position_embeddings)
                for _, encoder, tokenizer in self.text_encoders
            ],
            axis=1,
        )

    def get_embeddings(self, prompt_ids, params):
        """Text states for the UNet.

        Args:
            prompt_ids: (B, 2, 77), as from prepare_text_inputs.
            params: the pipeline's.

        Returns:
            (penultimate hidden states, concatenated, (B, 77, D + D_2); the second text encoder's
            projected pooled output, (B, projection_dim)).

        Source: SDXL (arXiv 2307.01952), section 2.1.
        """
        if prompt_ids.shape[1] != len(self.text_encoders):
            raise ValueError(
                f"prompt_ids has shape {prompt_ids.shape}, this pipeline has "
                f"{len(self.text_encoders)} text encoders; make it with this pipeline's "
                "prepare_text_inputs"
            )
        states, pooled = self.text_outputs(params, prompt_ids)
        return jnp.concatenate(states, axis=-1), pooled

    def text_outputs(self, params, ids):
        """([states (N, 77, D) of each text encoder], pooled (N, P)) of token ids (N, 2, 77)."""
        outputs = [
            encoder(ids[:, i], params=params[name], output_hidden_states=True, return_dict=True)
            for i, (name, encoder, _) in enumerate(self.text_encoders)
        ]
        return [output.hidden_states[-2] for output in outputs], outputs[-1].text_embeds

    def encode_text(self, params, inputs, options):
        """Text states of all branches of guidance: the first stage of a run.

        Args:
            params, inputs, options: see running.generate.

        Returns:
            (states (branches * B, 77 k, D); the UNet's {"text_embeds", "time_ids"}).
        """
        prompt_ids, null_ids = inputs["prompt_ids"], inputs["neg_prompt_ids"]
        B, texts = len(prompt_ids), {"text": prompt_ids}
        if null_ids is not None:
            texts["null"] = rows_per_image(null_ids.astype(prompt_ids.dtype), B)
        elif not self.force_zeros_for_empty_prompt:
            texts["null"] = rows_per_image(self.prepare_text_inputs(""), B)
        names = [TEXT_OF_BRANCH[branch] for branch in options.branches]
        encoded = list(dict.fromkeys(name for name in names if name in texts)) or ["text"]
        texts = {name: texts[name] for name in encoded}
        if are_plain(inputs, self.text_encoder_2.module.max_position_embeddings):
            states, pooled = self.get_embeddings(jnp.concatenate([*texts.values()]), params)
            states, pooled = (
                dict(zip(encoded, jnp.split(x, len(encoded)))) for x in (states, pooled)
            )  # per text (B, 77, D), (B, D)
        else:
            from diffusers_flax.prompts import encode_prompts  # not for a plain image

            encode, empty_ids = partial(self.text_outputs, params), self.prepare_text_inputs("")
            weights = inputs.get("prompt_weights")
            states, pooled = encode_prompts(encode, texts, weights, empty_ids)
        if "null" not in encoded:  # no negative prompt: SDXL was trained with zeros
            states["null"] = jnp.zeros_like(states["text"])
            pooled["null"] = jnp.zeros_like(pooled["text"])
        image = inputs.get("masked_image") if inputs.get("image") is None else inputs["image"]
        shape = self.image_size(
            options.height, options.width, None if image is None else image.shape
        )
        time_ids = [jnp.tile(self.time_ids(name, shape), (B, 1)) for name in names]
        added = {
            "text_embeds": jnp.concatenate([pooled[name] for name in names]),
            "time_ids": jnp.concatenate(time_ids),
        }
        return jnp.concatenate([states[name] for name in names]), added

    def time_ids(self, text, shape):
        """Micro-conditioning: original size, crop corner, target size (6,); a refiner's (5,).

        Args:
            text: "text" or "null".
            shape: (height, width) of the result, pixels.

        Source: SDXL (arXiv 2307.01952), section 2.2.
        """
        if self.requires_aesthetics_score:
            return jnp.array([*shape, 0, 0, AESTHETIC_SCORES[text]], jnp.float32)
        return jnp.array([*shape, 0, 0, *shape], jnp.float32)

    def output(self, result, params, jit, output_type, return_dict):
        """What a call returns."""
        result = self.numpy_to_pil(result) if output_type == "pil" else result
        output = FlaxStableDiffusionXLPipelineOutput(result)
        return output if return_dict else output.to_tuple()

    @property
    def compute_vae(self):
        """The VAE in vae_dtype; None: in float32 if its config has force_upcast."""
        if self.vae_dtype is None and self.vae.force_upcast:
            return self.vae.clone(dtype=jnp.float32)
        return super().compute_vae


@dataclass(frozen=True, eq=False)
class FlaxStableDiffusionXLPipeline(XLComponents, TextToImage):
    """Text to image with SDXL; see XLComponents, and TextToImage for what is compiled in."""

    torch_class_name = "StableDiffusionXLPipeline"

    def __call__(
        self,
        prompt_ids,
        params,
        prng_seed,
        num_inference_steps=50,
        guidance_scale=7.5,
        height=None,
        width=None,
        latents=None,
        neg_prompt_ids=None,
        return_dict=True,
        output_type="np",
        jit=False,
        guidance_rescale=0.0,
        timesteps=None,
        eta=None,
        denoising_end=None,
        prompt_weights=None,
        attention_sharing=None,
    ):
        """Make a batch of images; compiles at the first call of each size.

        Args:
            prompt_ids: int32 (B, 2, 77), as from prepare_inputs, or of k chunks, 77 k, as from
                prompts.prepare_prompts; with jit all arrays are (devices, B, ...), for a Layout
                (data, B, ...).
            params: from from_pretrained; with jit replicated. Without jit the call runs where
                they are: jax.device_put(params, jax.devices()[0]) puts them on the device. For a
                Layout, as its place_params leaves them.
            prng_seed: one PRNG key, typed or uint32, or one per image (B,); with jit also one
                per device. With one key, image i gets the noise of fold_in(key, i), so it does
                not depend on how many images or devices there are.
            num_inference_steps: of the scheduler, at least 1.
            guidance_scale: weight of the prompt, >= 0, a number, or an array of one per image; a
                number up to 1: no guidance, half the work.
            height, width: of the images, multiples of 8; None: the size that the model was trained
                at.
            latents: standard normal noise to start from, (B, 4, height / 8, width / 8); None draws
                it.
            neg_prompt_ids: what to avoid, like prompt_ids, or one row for all; None: text
                states of zeros.
            return_dict: False returns a plain tuple (images,).
            output_type: "np", "pil" or "latent".
            jit: True runs on several devices, False on one; compiled either way.
            guidance_rescale: phi in [0, 1] of arXiv 2305.08891, equation 16: reduces the contrast
                that guidance adds; 0: off.
            timesteps: the timesteps to visit instead of num_inference_steps of the scheduler's
                choice, decreasing integers, for models distilled to them: (999, 749, 499, 249). Or
                "ays": the ten of Align-Your-Steps (arXiv 2404.14507) for the model's family.
            eta: noise in a step of DDIM (default 0) and TCD (default 0.3), from 0 to 1.
            denoising_end: fraction of the denoising to end at, between 0 and 1, with
                output_type="latent", for another pipeline to continue; None: all.
            prompt_weights: PromptWeights, of prompts.prepare_prompts; None: no weights.
            attention_sharing: p in [0, 1], a number, or an array of one per image, of which each
                second one counts; None: off.
                Images 2 j and 2 j + 1 are a pair, for which prng_seed has equal keys. In the steps
                i with p > i / (steps - 1) the second image's self-attention has the queries and
                keys of the first image, which gives both one layout; see attention_sharing.py.

        Returns:
            FlaxStableDiffusionXLPipelineOutput, images (B, H, W, 3), with jit
            (devices, B, H, W, 3), float32 in [0, 1]; a list of PIL images for "pil"; the scaled
            latents (B, 4, H / 8, W / 8), float32, for "latent".

        Raises:
            ValueError: shapes, sizes, scales or steps that do not fit.
        """
        options = Options(
            **self.step_options(num_inference_steps, timesteps, eta),
            **self.size_options(height, width, output_type),
            branches=self.guidance_branches(guidance_scale),
            denoising_end=denoising_end,
        )
        inputs = dict(prompt_ids=prompt_ids, neg_prompt_ids=neg_prompt_ids, latents=latents)
        inputs["prompt_weights"] = prompt_weights
        scales = dict(guidance_scale=guidance_scale, guidance_rescale=guidance_rescale)
        if attention_sharing is not None:
            scales["attention_sharing"] = attention_sharing
        result = run(self, options, inputs, scales, params, prng_seed, jit)
        return self.output(result, params, jit, output_type, return_dict)


@dataclass(frozen=True, eq=False)
class FlaxStableDiffusionXLImg2ImgPipeline(XLComponents, ImageToImage):
    """Image to image with SDXL's base or refiner, from an image or latents."""

    torch_class_name = "StableDiffusionXLImg2ImgPipeline"


@dataclass(frozen=True, eq=False)
class FlaxStableDiffusionXLInpaintPipeline(XLComponents, Inpainting):
    """Inpainting with SDXL's inpainting model, base or refiner; see Inpainting.

    The call takes the whole image; masked_image is for a UNet of 9 channels whose image is latents.
    As in PyTorch, strength is 0.9999 by default: all steps but one, from the noised image.
    """

    torch_class_name = "StableDiffusionXLInpaintPipeline"

    def prepare_inputs(self, prompt, image, mask):
        """Turn prompts, images and masks into arrays; a single one of any is repeated.

        Args:
            prompt, image: as for FlaxStableDiffusionXLImg2ImgPipeline.
            mask: as many, of the image's size in pixels, white (1) where the image is repainted;
                see prepare_masks.

        Returns:
            (prompt_ids, image, mask): int32 (B, 2, 77); float32 (B, 3, H, W) in [-1, 1], or the
            latents; float32 (B, 1, H, W) of 0 and 1.

        Raises:
            ValueError: numbers or sizes differ, or one is not an image.
        """
        prompt_ids, image = super().prepare_inputs(prompt, image)
        factor = self.vae_scale_factor if self.is_latents(image.shape) else 1
        return pair_with_masks(prompt_ids, image, mask, factor)

    def __call__(
        self,
        prompt_ids,
        image,
        mask,
        params,
        prng_seed,
        strength=0.9999,
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
        denoising_start=None,
        denoising_end=None,
        masked_image=None,
        prompt_weights=None,
    ):
        """Repaint the masked area of images; compiles at the first call of each size.

        Args:
            prompt_ids: int32 (B, 2, 77), as from prepare_inputs, or of k chunks, 77 k, as from
                prompts.prepare_prompts; with jit all arrays are (devices, B, ...), for a Layout
                (data, B, ...).
            image: the whole image, float32 (B, 3, H, W) in [-1, 1], or scaled latents (B, 4, h, w),
                as from prepare_inputs.
            mask: float32 (B, 1, H, W), 1 where the image is repainted.
            params: from from_pretrained; with jit replicated. Without jit the call runs where
                they are: jax.device_put(params, jax.devices()[0]) puts them on the device. For a
                Layout, as its place_params leaves them.
            prng_seed: one PRNG key, typed or uint32, or one per image (B,); with jit also one
                per device. With one key, image i gets the noise of fold_in(key, i), so it does
                not depend on how many images or devices there are.
            strength: fraction of the steps to run, in (0, 1]; 1 ignores the masked area.
            num_inference_steps: of the scheduler, at least 1.
            height, width: of the result, multiples of 8; the image is resized to it. None: the size
                of the image.
            guidance_scale: weight of the prompt, >= 0, a number, or an array of one per image; a
                number up to 1: no guidance, half the work.
            latents: standard normal noise to start from, (B, 4, height / 8, width / 8); None draws
                it.
            neg_prompt_ids: what to avoid, like prompt_ids, or one row for all; None: text
                states of zeros.
            return_dict: False returns a plain tuple (images,).
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
            masked_image: float32 (B, 3, H, W) in [-1, 1], 0 where it is repainted, or scaled
                latents; read by a UNet of 9 channels.
            prompt_weights: PromptWeights, of prompts.prepare_prompts; None: no weights.

        Returns:
            FlaxStableDiffusionXLPipelineOutput, images (B, H, W, 3), with jit
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
        image,
        mask,
        params,
        prng_seed,
        strength=0.9999,
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
        denoising_start=None,
        denoising_end=None,
        masked_image=None,
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
