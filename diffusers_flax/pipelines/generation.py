"""What calls of all pipelines do: sizes, tokens, the schedule, denoising, decoding, the output.

`_generate` is one pure function of arrays: text encoding, denoising and decoding are one program,
which programs.run compiles and calls.
"""

import functools
import inspect
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from diffusers_flax.images import to_pil
from diffusers_flax.loading.tokenizer import tokenize
from diffusers_flax.pipelines.outputs import FlaxStableDiffusionPipelineOutput
from diffusers_flax.pipelines.sampling import decode, denoise
from diffusers_flax.programs import output_options, run, timestep_options
from diffusers_flax.schedulers.noise_schedule import noise_scales

# The arguments with defaults of the pipelines' calls and of _generate, in the published order.
CALL = (
    *("num_inference_steps", "height", "width", "guidance_scale", "latents", "neg_prompt_ids"),
    *("return_dict", "jit", "output_type", "guidance_rescale", "timesteps", "eta"),
)
GENERATE = (
    *("num_inference_steps", "height", "width", "guidance_scale", "latents", "neg_prompt_ids"),
    *("return_latents", "guidance_rescale", "branches", "timesteps", "eta"),
)
# None unless named here.
DEFAULTS = {
    "num_inference_steps": 50,
    "strength": 0.8,
    "start_timestep": 10,
    "guidance_scale": 7.5,
    "image_guidance_scale": 1.5,
    "guidance_rescale": 0.0,
    "return_dict": True,
    "return_latents": False,
    "jit": False,
    "output_type": "np",
}
INPUTS = ("prompt_ids", "image", "mask", "masked_image", "params", "prng_seed")
# The arguments of a call that are arrays, or trees of them.
ARRAYS = (*INPUTS, "latents", "noise", "neg_prompt_ids")


def signature_of(names):
    """The signature of a method with these arguments; INPUTS have no default."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter("self", kind)]
    for name in names:
        default = inspect.Parameter.empty if name in INPUTS else DEFAULTS.get(name)
        parameters.append(inspect.Parameter(name, kind, default=default))
    return inspect.Signature(parameters)


def published_call(*names):
    """Generation.__call__ with these arguments, by position or name."""
    signature = signature_of(names)

    @functools.wraps(Generation.__call__)
    def call(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return Generation.__call__(**bound.arguments)

    call.__signature__ = signature
    return call


def with_options(*names):
    """Decorator of a method whose last argument, `given`, has these options as attributes.

    The method itself takes each option as an argument, by position or name.
    """

    def decorate(method):
        _, *inputs, _ = inspect.signature(method).parameters
        signature = signature_of((*inputs, *names))

        @functools.wraps(method)
        def wrapper(*args, **kwargs):
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            options = SimpleNamespace(**{name: bound.arguments[name] for name in names})
            return method(*(bound.arguments[name] for name in ("self", *inputs)), options)

        wrapper.__signature__ = signature
        return wrapper

    return decorate


class Generation:
    """Base of FlaxDiffusionPipeline, which has the parts that these methods use.

    Each class has the arguments of its calls, `__call__ = published_call(...)`, and a pure function
    of arrays, `_generate`.
    """

    def __call__(self, **given):
        """Make a batch of images; compiles at the first call of each size, see the class.

        Args:
            prompt_ids: int32 (B, 77), SDXL (B, 2, 77), as from prepare_inputs; with jit all arrays
                are (devices, B, ...).
            image: to begin with or to edit, float32 (B, 3, H, W) in [-1, 1], as from
                prepare_inputs; image to image also takes scaled latents (B, 4, h, w), as from
                output_type="latent".
            mask: for inpainting, float32 (B, 1, H, W), 1 where the image is repainted.
            masked_image: for inpainting, float32 (B, 3, H, W) in [-1, 1], 0 where it is repainted.
            params: from from_pretrained; with jit replicated. Without jit the call runs where
                they are: jax.device_put(params, jax.devices()[0]) puts them on the device.
            prng_seed: one PRNG key, typed or uint32, or one per image (B,); with jit also one
                per device. With one key, image i gets the noise of fold_in(key, i), so it does
                not depend on how many images or devices there are.
            strength: for image to image, fraction of the steps to run, in (0, 1]; 1 almost ignores
                the image.
            num_inference_steps: of the scheduler, at least 1.
            height, width: of the result, multiples of 8; input images are resized to it. None: the
                size of the input image, or, without one, the size that the model was trained at.
            guidance_scale: weight of the prompt, >= 0, a number, or, but for edits, an array of one
                per image; a number up to 1: no guidance, half of the work.
            image_guidance_scale: for edits, similarity to the image, >= 0. Both scales 1: no
                guidance, a third of the work; this one 1, or both equal: two thirds.
            latents: standard normal noise to start from, (B, 4, height / 8, width / 8); None draws
                it.
            noise: for image to image, standard normal noise that is added at first, like latents.
            neg_prompt_ids: what to avoid, like prompt_ids, or one row for all; None is the empty
                text, for SDXL zeros.
            return_dict: False returns a plain tuple (images, nsfw_content_detected).
            jit: True runs on several devices, False on one; compiled either way.
            output_type: "np", "pil" or "latent".
            guidance_rescale: phi in [0, 1] of arXiv 2305.08891, equation 16: reduces the contrast
                that guidance adds; 0: off.
            timesteps: the timesteps to visit instead of num_inference_steps of the scheduler's
                choice, decreasing integers, for models distilled to them: (999, 749, 499, 249).
            eta: share of noise in a step of DDIM (default 0) and TCD (default 0.3), 0 to 1.

        Returns:
            FlaxStableDiffusionPipelineOutput, or for SDXL FlaxStableDiffusionXLPipelineOutput:
            images (B, H, W, 3), with jit (devices, B, H, W, 3), float32 in [0, 1]; a list of PIL
            images for "pil"; the scaled latents (B, 4, H / 8, W / 8), float32, for "latent".

        Raises:
            ValueError: shapes, sizes, scales or steps that do not fit.
        """
        self._check_inputs(given)
        options = timestep_options(given["num_inference_steps"], given["timesteps"], given["eta"])
        if "strength" in given:
            num_steps = options["num_inference_steps"]
            start = self.get_timestep_start(num_steps, given["strength"])
            options = options | {"start_timestep": start}
        options |= {"height": given["height"], "width": given["width"]}
        options |= output_options(given["output_type"])
        names = ("guidance_scale", "image_guidance_scale", "guidance_rescale")
        scales = {name: given[name] for name in names if name in given}
        options |= {"branches": self.guidance_branches(**scales)}
        arrays = {name: given[name] for name in ARRAYS if name in given}
        arrays |= {name: scale for name, scale in scales.items() if np.ndim(scale)}
        shared = {name: scale for name, scale in scales.items() if not np.ndim(scale)}
        result = run(self, given["jit"], arrays, shared, options)
        how = given["jit"], given["output_type"], given["return_dict"]
        return self._output(result, given["params"], *how)

    def _check_inputs(self, given):
        """Raise a ValueError for arguments of a call that do not fit; given: {name: value}."""

    @property
    def vae_scale_factor(self):
        """Pixels per latent, along a side: 8."""
        return 2 ** (len(self.vae.config.block_out_channels) - 1)

    def image_size(self, height=None, width=None, image_shape=None):
        """Height and width of the result, in pixels.

        Args:
            height, width: None: those of the input image, or, without one, the size that the model
                was trained at.
            image_shape: (..., 3, H, W) of the input image, or (..., 4, h, w) of its latents.

        Raises:
            ValueError: height or width is not a positive multiple of the VAE's factor, or differs
                from the latents'.
        """
        factor = self.vae_scale_factor
        if image_shape is None:
            side = self.unet.config.sample_size
            height_0, width_0 = (
                x * factor for x in (side if isinstance(side, tuple) else (side, side))
            )
        else:
            height_0, width_0 = image_shape[-2:]
            if self._is_latents(image_shape):
                height_0, width_0 = height_0 * factor, width_0 * factor
                if height not in (None, height_0) or width not in (None, width_0):
                    raise ValueError(
                        f"size {height}x{width} (height x width) is not the size of these latents, "
                        f"{height_0}x{width_0}; leave height and width out"
                    )
        sides = [
            default if side is None else side
            for side, default in ((height, height_0), (width, width_0))
        ]
        size = f"size {sides[0]}x{sides[1]} (height x width)"
        if not all(isinstance(side, int | np.integer) for side in sides):
            raise ValueError(f"{size} is not of type int; give whole numbers of pixels")
        if any(side < 1 or side % factor for side in sides):
            near = "x".join(str(max(factor, round(side / factor) * factor)) for side in sides)
            reason = "must be positive" if min(sides) < 1 else f"is not divisible by {factor}"
            raise ValueError(f"{size} {reason}; try {near}")
        return tuple(map(int, sides))

    def _is_latents(self, image_shape):
        return image_shape[-3] == self.vae.config.latent_channels

    def latent_shape(self, batch_size, height=None, width=None):
        """(B, 4, height / 8, width / 8), see image_size."""
        height, width = self.image_size(height, width)
        factor = self.vae_scale_factor
        return batch_size, self.vae.config.latent_channels, height // factor, width // factor

    @property
    def _vae(self):
        """The VAE in the dtype that it computes in."""
        return self.vae

    def _decode(self, params, latents):
        """Images of scaled latents, by the tiny VAE if the acceleration says so; see decode."""
        if self.accelerate.tiny_decoder:
            return decode(self.tiny_vae, params["tiny_vae"], latents)
        return decode(self._vae, params["vae"], latents)

    # ----------------------------------------------------------------- inputs

    def _schedule(self, num_inference_steps, shape, first_step=0, timesteps=None):
        """The scheduler's state for the steps, float32, and the steps' noise_scales.

        Arguments as in set_timesteps.
        """
        with jax.ensure_compile_time_eval():
            state = self.scheduler.set_timesteps(
                self.scheduler.create_state(), num_inference_steps, shape, first_step, timesteps
            )
            constants = jax.tree.map(np.asarray, state)
        return jax.tree.map(jnp.asarray, constants), noise_scales(constants)

    def _denoise(self, params, schedule, x_t, keys, branches, inputs, combine, eta):
        """x_0 of x_t.

        Args:
            params: the pipeline's.
            schedule: of _schedule.
            x_t, keys, eta: as for sampling.denoise.
            branches: of guidance.
            inputs: (branches, x_t, t) -> the arguments of unet.embed, a tuple; the rows of one
                branch after those of the other.
            combine: (predictions, float32 (branches * B, C, h, w), branches) -> guided prediction,
                (B, C, h, w).
        """
        state, scales = schedule
        watch = None
        if self.preview:
            tiny_decode = partial(decode, self.tiny_vae, params["tiny_vae"])
            prediction_type = self.scheduler.config.prediction_type
            watch = self.preview.watch(tiny_decode, prediction_type, scales, keys)
        if self.accelerate:
            schedule, arguments = (self.scheduler, state, scales), (branches, inputs, combine)
            return self.accelerate.denoise(
                self.unet, params["unet"], schedule, x_t, keys, *arguments, eta, watch
            )

        def predict(x_t, t):
            *arguments, timestep_cond = inputs(branches, x_t, t)
            variables = {"params": params["unet"]}
            output = self.unet.apply(variables, *arguments, timestep_cond=timestep_cond)
            return combine(output.sample.astype(jnp.float32), branches)

        return denoise(self.scheduler, state, x_t, keys, predict, eta, watch)

    def prepare_text_inputs(self, prompt):
        """Tokenize prompts, for negative prompts and the like.

        Args:
            prompt: str or list of str; tokens past the text encoder's 77 are cut, with a warning.

        Returns:
            prompt_ids, int32 (B, 77).
        """
        return tokenize(self.tokenizer, prompt, self.text_encoder.module.max_position_embeddings)

    numpy_to_pil = staticmethod(to_pil)

    def _output(self, result, params, jit, output_type, return_dict):
        """The result of a call, after the safety checker, if there is one."""
        flags = False
        if self.safety_checker is not None and output_type != "latent":
            result, flags = self._check_images(result, params, jit)
        if output_type == "pil":
            result = self.numpy_to_pil(result)
        output = FlaxStableDiffusionPipelineOutput(result, flags)
        return output if return_dict else output.to_tuple()

    def _check_images(self, images, params, jit):
        """Make images black that the safety checker flags: (images, flat list of bool)."""
        if "safety_checker" not in params:
            raise ValueError("params has no safety_checker; add safety_checker.params under it")
        params = params["safety_checker"]
        if jit:
            params = jax.tree.map(lambda x: x[0], params)
        images = np.asarray(images)
        checked, flags = self.safety_checker.filter_images(
            images.reshape(-1, *images.shape[-3:]), self.feature_extractor, params
        )
        return checked.reshape(images.shape), flags
