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
from typing import Any, Unpack

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
from diffusers_flax.pipelines.base import FlaxDiffusionPipeline
from diffusers_flax.pipelines.image_to_image import ImageToImage
from diffusers_flax.pipelines.inpainting import Inpainting
from diffusers_flax.pipelines.running import CallOptions, run
from diffusers_flax.pipelines.sampling import AYS_SDXL, TEXT_OF_BRANCH, are_plain
from diffusers_flax.pipelines.text_to_image import TextToImage
from diffusers_flax.schedulers.base import FlaxSchedulerMixin

INDEX_SETTINGS = ("force_zeros_for_empty_prompt", "requires_aesthetics_score")
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
        names = super().required_components(path, index)
        absent = [name for name in ("text_encoder", "tokenizer") if not has_component(index, name)]
        if absent and not issubclass(cls, ImageToImage):
            raise ValueError(
                f"{path} has no {' and no '.join(absent)}: it is a refiner, which needs an "
                "image; make one with the base model and refine it with "
                "FlaxStableDiffusionXLImg2ImgPipeline"
            )
        return [name for name in names if name not in absent]

    @classmethod
    def check_configs(cls, path, configs):
        """See FlaxDiffusionPipeline.check_configs."""
        if configs["unet"].get("addition_embed_type") != "text_time":
            raise ValueError(
                f"the UNet of {path} has no addition_embed_type='text_time': it is not SDXL"
            )
        if configs["vae"].get("scaling_factor", SD_SCALING_FACTOR) == SD_SCALING_FACTOR:
            raise ValueError(
                f"the VAE of {path} has scaling_factor {SD_SCALING_FACTOR}: it is Stable "
                "Diffusion's VAE; take SDXL's"
            )
        super().check_configs(path, configs)

    @classmethod
    def _settings(cls, index):
        return {name: bool(index.get(name, getattr(cls, name))) for name in INDEX_SETTINGS}

    def _index(self):
        return {name: getattr(self, name) for name in INDEX_SETTINGS}

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

        Returns:
            (states (branches * B, 77 k, D); the UNet's {"text_embeds", "time_ids"}).
        """
        prompt_ids, null_ids = inputs["prompt_ids"], inputs["neg_prompt_ids"]
        B, texts = len(prompt_ids), {"text": prompt_ids}
        if null_ids is None and not self.force_zeros_for_empty_prompt:
            null_ids = self.prepare_text_inputs("")
        if null_ids is not None:
            null_ids = null_ids.astype(prompt_ids.dtype)
            texts["null"] = jnp.broadcast_to(null_ids, (B, *null_ids.shape[1:]))
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
        size = options.height, options.width
        time_ids = [jnp.tile(self.time_ids(name, size), (B, 1)) for name in names]
        added = {
            "text_embeds": jnp.concatenate([pooled[name] for name in names]),
            "time_ids": jnp.concatenate(time_ids),
        }
        return jnp.concatenate([states[name] for name in names]), added

    def time_ids(self, text, size):
        """Micro-conditioning of "text" or "null": original size, crop corner, target size (6,).

        Source: SDXL (arXiv 2307.01952), section 2.2.
        """
        if self.requires_aesthetics_score:
            return jnp.array([*size, 0, 0, AESTHETIC_SCORES[text]], jnp.float32)
        return jnp.array([*size, 0, 0, *size], jnp.float32)

    def output(self, result, call):
        """What a call returns, a Call."""
        result = self.numpy_to_pil(result) if call.output_type == "pil" else result
        output = FlaxStableDiffusionXLPipelineOutput(result)
        return output if call.return_dict else output.to_tuple()

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
    order_of_generate = TextToImage.__call__

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
        attention_sharing=None,
        **options: Unpack[CallOptions],
    ):
        """Make a batch of images; compiles at the first call of each size.

        Args:
            prompt_ids: int32 (B, 2, 77), as from prepare_inputs, or of k chunks, 77 k, as from
                prompts.prepare_prompts; with jit all arrays are (devices, B, ...), for a Layout
                (data, B, ...).
            neg_prompt_ids: what to avoid, like prompt_ids, or one row for all; None: text
                states of zeros.
            params, prng_seed, num_inference_steps, guidance_scale, height, width, latents,
                return_dict, output_type, jit, attention_sharing, options: as for
                FlaxStableDiffusionPipeline's call.

        Returns:
            FlaxStableDiffusionXLPipelineOutput with images as of FlaxStableDiffusionPipeline's
            call; with return_dict=False a tuple (images,).

        Raises:
            ValueError: shapes, sizes, scales or steps that do not fit.
        """
        return run(self, self.make_call(locals()))


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
        denoising_start=None,
        masked_image=None,
        **options: Unpack[CallOptions],
    ):
        """Repaint the masked area of images; compiles at the first call of each size.

        Args:
            prompt_ids: int32 (B, 2, 77), as from prepare_inputs.
            image: the whole image, float32 (B, 3, H, W) in [-1, 1], or scaled latents (B, 4, h, w),
                as from prepare_inputs.
            mask: float32 (B, 1, H, W), 1 where the image is repainted.
            masked_image: float32 (B, 3, H, W) in [-1, 1], 0 where it is repainted, or scaled
                latents; read by a UNet of 9 channels.
            params, prng_seed, strength, num_inference_steps, height, width, guidance_scale,
                latents, neg_prompt_ids, return_dict, jit, denoising_start, options: as for
                FlaxStableDiffusionInpaintPipeline's call.

        Returns, Raises: as FlaxStableDiffusionXLPipeline's call.
        """
        return run(self, self.make_call(locals()))
