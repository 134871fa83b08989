"""What all pipelines share in a call: sizes, branches, schedule, the Call, decoding."""

import inspect

import jax.numpy as jnp
import numpy as np

from diffusers_flax.images import to_pil
from diffusers_flax.loading.tokenizer import tokenize
from diffusers_flax.models.clip import FlaxCLIPTextModel, FlaxCLIPTextModelWithProjection
from diffusers_flax.models.controlnet import FlaxControlNetModel
from diffusers_flax.models.quantization import check_quantized
from diffusers_flax.models.unet import FlaxUNet2DConditionModel
from diffusers_flax.models.vae import FlaxAutoencoderKL
from diffusers_flax.pipelines.running import (
    INPUTS,
    RESULT_ARGUMENTS,
    SCALES,
    Call,
    Options,
    generate,
)
from diffusers_flax.pipelines.sampling import AYS_SD, decode, make_schedule, timestep_options

MODULES = {
    "unet": FlaxUNet2DConditionModel,
    "vae": FlaxAutoencoderKL,
    "text_encoder": FlaxCLIPTextModel,
    "text_encoder_2": FlaxCLIPTextModelWithProjection,
    "controlnet": FlaxControlNetModel,
}
TEXT_ENCODERS = {"tokenizer": "text_encoder", "tokenizer_2": "text_encoder_2"}


class PipelineCalls:
    """The part of FlaxDiffusionPipeline that its calls use."""

    ays_timesteps = AYS_SD  # what timesteps="ays" stands for
    encodes_images = False  # whether a run has the stage encode_image
    branch_scales = ("guidance_scale",)  # arguments of guidance_branches
    order_of_generate = None  # a method with the order of _generate's arguments; None: __call__

    def text_modules(self):
        """The modules of the text encoders, the only components whose config may change."""
        encoders = (getattr(self, name, None) for name in TEXT_ENCODERS.values())
        return tuple(encoder.module for encoder in encoders if encoder is not None)

    @property
    def text_encoders(self):
        """[(name, text encoder, its tokenizer)]; a refiner has no first one."""
        pairs = [(name, getattr(self, key, None)) for key, name in TEXT_ENCODERS.items()]
        return [(name, getattr(self, name), tokenizer) for name, tokenizer in pairs if tokenizer]

    def _require_params(self, params):
        """Raise a ValueError if parameters of a module are missing."""
        names = {name for name in (*MODULES, "tiny_vae") if getattr(self, name, None) is not None}
        if missing := sorted(names - params.keys()):
            raise ValueError(
                f"params lack {', '.join(missing)}; give the parameters of every component"
            )
        int8 = self.accelerate and self.accelerate.int8
        check_quantized(params, self.storage, int8.mode if int8 else None)

    def prepare_text_inputs(self, prompt):
        """Tokenize prompts, for negative prompts and the like.

        Args:
            prompt: str or list of str; tokens past the text encoder's 77 are cut, with a warning.

        Returns:
            prompt_ids, int32 (B, 77).
        """
        return tokenize(self.tokenizer, prompt, self.text_encoder.module.max_position_embeddings)

    numpy_to_pil = staticmethod(to_pil)

    @property
    def vae_scale_factor(self):
        """Pixels per latent, along a side: 8."""
        return 2 ** (len(self.vae.block_out_channels) - 1)

    def image_size(self, height=None, width=None, image_shape=None):
        """Height and width of the result, in pixels.

        Args:
            height, width: None: the size of the input image or, without one, the size that the
                model was trained at.
            image_shape: (..., 3, H, W) of the input image, or (..., 4, h, w) of its latents.

        Raises:
            ValueError: height or width is not a positive multiple of the VAE's factor, or differs
                from the latents'.
        """
        factor = self.vae_scale_factor
        if image_shape is None:
            side = self.unet.sample_size
            defaults = [x * factor for x in (side if isinstance(side, tuple) else (side, side))]
        else:
            scale = factor if self.is_latents(image_shape) else 1
            defaults = [x * scale for x in image_shape[-2:]]
        sides = [y if x is None else x for x, y in zip((height, width), defaults)]
        size = f"size {sides[0]}x{sides[1]} (height x width)"
        if not all(isinstance(side, int | np.integer) for side in sides):
            raise ValueError(f"{size} is not of type int; give whole numbers of pixels")
        if any(side < 1 or side % factor for side in sides):
            near = "x".join(str(max(factor, round(side / factor) * factor)) for side in sides)
            raise ValueError(f"{size} is not divisible by {factor}; try {near}")
        if image_shape is not None and self.is_latents(image_shape) and sides != defaults:
            raise ValueError(f"{size} is not the size of these latents; leave height and width out")
        return tuple(map(int, sides))

    def check_parallel(self, branches, height=None):
        """Raise a ValueError for branches or a height that the layout does not divide.

        Args:
            branches: of guidance.
            height: of the images, pixels; None: the model's.
        """
        if self.layout is not None:
            from diffusers_flax.devices.parallelism import check_parallel

            height, _ = self.image_size(height)
            check_parallel(self.layout, self.unet, branches, height, self.vae_scale_factor)

    def is_latents(self, image_shape):
        """Whether an image's shape, (..., C, H, W), is of latents."""
        return image_shape[-3] == self.vae.latent_channels

    def latent_shape(self, batch_size, height=None, width=None):
        """(B, 4, height / 8, width / 8), see image_size."""
        height, width = self.image_size(height, width)
        factor = self.vae_scale_factor
        return batch_size, self.vae.latent_channels, height // factor, width // factor

    @property
    def compute_vae(self):
        """The VAE in vae_dtype; None: in its own, or float32 if it would overflow float16.

        A config says by force_upcast that it would.
        """
        if self.vae_dtype is not None:
            return self.vae.clone(dtype=jnp.dtype(self.vae_dtype))
        overflows = self.vae.force_upcast and self.vae.dtype == jnp.float16
        return self.vae.clone(dtype=jnp.float32) if overflows else self.vae

    def make_schedule(self, options, shape):
        """The Schedule of a run with these Options; shape: of the latents."""
        return make_schedule(
            self.scheduler,
            shape,
            options.num_inference_steps,
            options.timesteps,
            options.eta,
            options.first_step,
            options.denoising_start,
            options.denoising_end,
        )

    def _generate(self, *arguments, **options):
        """The pipeline as one pure function of arrays, for one device; jit or pmap it.

        Args:
            arguments: as for __call__, in its order, of Stable Diffusion for SDXL's text to image.
            options: as for __call__; return_latents; and branches of guidance to compute, static,
                None: the ones that the scales need, all of them for traced scales.

        Returns:
            images, float32 (B, H, W, 3) in [0, 1], or with return_latents the scaled latents,
            float32 (B, 4, H / 8, W / 8).
        """
        call = type(self).order_of_generate or type(self).__call__
        bound = inspect.signature(call).bind(self, *arguments, **options)
        bound.apply_defaults()
        call = self.make_call(bound.arguments)
        inputs = call.inputs | call.scales | {"prng_seed": call.prng_seed}
        return generate(self, call.options, (), inputs, {}, call.params)

    def make_call(self, arguments):
        """The Call of the arguments of __call__ or _generate, {name: value}, `self` among them."""
        given = arguments.get("options", {}) | arguments
        given = {name: x for name, x in given.items() if name not in ("self", "options")}

        def take(names):
            return {name: given.pop(name) for name in names if name in given}

        result, scales = take(RESULT_ARGUMENTS), {"guidance_rescale": 0.0} | take(SCALES)
        strength, first_step = given.pop("strength", None), given.pop("start_timestep", 0)
        options = {"timesteps": None, "eta": None} | take(Options.__dataclass_fields__)
        inputs = dict.fromkeys(INPUTS) | take(INPUTS)
        if given:
            raise TypeError(f"{type(self).__name__} has no argument {', '.join(given)}")
        steps = (options[name] for name in ("num_inference_steps", "timesteps", "eta"))
        options |= timestep_options(*steps, self.ays_timesteps)
        images = inputs["image"], inputs["masked_image"]
        shape = next((x.shape for x in images if x is not None), None)
        sides = self.image_size(options.get("height"), options.get("width"), shape)
        options |= dict(zip(("height", "width"), sides))
        if not options.get("branches"):
            options["branches"] = self.guidance_branches(*map(scales.get, self.branch_scales))
        if (output_type := result.get("output_type")) not in (None, "np", "pil", "latent"):
            raise ValueError(f"output_type={output_type!r} is unknown; take np, pil or latent")
        if output_type == "latent":
            options["return_latents"] = True
        if options.get("denoising_start") is None:  # else it chooses the first step
            if strength is not None:
                num_steps = options["num_inference_steps"]
                first_step = self.get_timestep_start(num_steps, strength)
            options["first_step"] = first_step
        return Call(Options(**options), inputs, scales, **result)

    def decode(self, params, inputs, options, encoded, latents):
        """Images, float32 (B, H, W, 3) in [0, 1]: the last stage of a run.

        The tiny VAE decodes if the acceleration has taesd.

        Args:
            params, inputs, options: see running.generate.
            encoded: result of the stage encode_image; None without one.
            latents: scaled, (B, 4, h, w), of the stage denoise.
        """
        if self.accelerate and self.accelerate.tiny_decoder:
            return decode(self.tiny_vae, params["tiny_vae"], latents, self.layout)
        return decode(self.compute_vae, params["vae"], latents, self.layout)
