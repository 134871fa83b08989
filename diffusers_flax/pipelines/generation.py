"""A call of a pipeline, from arrays to images, and text to image, of all families.

`_generate` is one pure function of arrays: text encoding, denoising and decoding are one program.

Source: Latent Diffusion Models (arXiv 2112.10752).
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from diffusers_flax.devices.parts import part
from diffusers_flax.devices.shares import check_parallel, is_first_of_group, shared_apply
from diffusers_flax.images import to_pil
from diffusers_flax.loading.tokenizer import tokenize
from diffusers_flax.models.unet import guidance_embedding
from diffusers_flax.pipelines.calls import (
    ARRAYS,
    AYS_SD,
    CALL,
    GENERATE,
    check_arrays,
    check_shares,
    first_step_of_share,
    inputs_to_host,
    keys_of_call,
    log_compilation,
    output_options,
    published_call,
    steps_of_share,
    timestep_options,
    with_options,
)
from diffusers_flax.pipelines.outputs import FlaxStableDiffusionPipelineOutput
from diffusers_flax.pipelines.sampling import (
    decode,
    denoise,
    guide,
    keys_per_image,
    rows_of_branches,
    rows_per_image,
    starting_noise,
    text_branches,
)
from diffusers_flax.schedulers.noise_schedule import noise_scales


def check_channels(path, configs, for_inpainting=False):
    """Refuse a UNet with other input channels than the pipeline feeds.

    path, configs: as in FlaxDiffusionPipeline.check. Inpainting may add a mask and the latents of
    the masked image to the noisy latents.
    """
    in_channels = configs["unet"].get("in_channels", 4)
    latent_channels = configs["vae"].get("latent_channels", 4)
    expected = [latent_channels]
    if for_inpainting:
        expected.insert(0, 2 * latent_channels + 1)
    if in_channels not in expected:
        raise ValueError(
            f"the UNet of {path} has in_channels={in_channels}, this pipeline needs "
            f"{' or '.join(map(str, expected))}; "
            "edit with an InstructPix2Pix model by edit_cli.py, inpaint with "
            "FlaxStableDiffusionInpaintPipeline or FlaxStableDiffusionXLInpaintPipeline"
        )


class Generation:
    """Base of FlaxDiffusionPipeline, which has the parts that these methods use.

    Each class has the arguments of its calls, `__call__ = published_call(...)`, and a pure function
    of arrays, `_generate`.
    """

    ays_timesteps = AYS_SD  # what timesteps="ays" stands for

    def __call__(self, **given):
        """Make a batch of images; compiles at the first call of each size, see the class.

        Args:
            prompt_ids: int32 (B, 77), SDXL (B, 2, 77), as from prepare_inputs; with jit all arrays
                are (devices, B, ...), for a Layout (data, B, ...).
            image: to begin with or to edit, float32 (B, 3, H, W) in [-1, 1], as from
                prepare_inputs; image to image also takes scaled latents (B, 4, h, w), as from
                output_type="latent". For ControlNets the condition, in [0, 1], as from
                prepare_image_inputs: (B, 3, H, W), for several (B, ControlNets, 3, H, W).
            mask: for inpainting, float32 (B, 1, H, W), 1 where the image is repainted. For edits
                weights from 0, where the image stays as it is, to 1, where it may change; None: it
                may change everywhere.
            masked_image: for inpainting, float32 (B, 3, H, W) in [-1, 1], 0 where it is repainted,
                or scaled latents; read by a UNet of 9 channels.
            params: from from_pretrained; with jit replicated. Without jit the call runs where
                they are: jax.device_put(params, jax.devices()[0]) puts them on the device. For a
                Layout, as its place_params leaves them.
            prng_seed: one PRNG key, typed or uint32, or one per image (B,); with jit also one
                per device. With one key, image i gets the noise of fold_in(key, i), so it does
                not depend on how many images or devices there are.
            strength: for image to image, fraction of the steps to run, in (0, 1]; 1 almost ignores
                the image, for inpainting it ignores the repainted part.
            num_inference_steps: of the scheduler, at least 1.
            height, width: of the result, multiples of 8; input images are resized to it. None: the
                size of the input image, or, without one, the size that the model was trained at.
            guidance_scale: weight of the prompt, >= 0, a number, or an array of one per image; a
                number up to 1: no guidance, half of the work.
            image_guidance_scale: for edits, similarity to the image, >= 0, likewise. Both numbers
                1: no guidance, a third of the work; this one 1, or both equal: two thirds.
            latents: standard normal noise to start from, (B, 4, height / 8, width / 8); None draws
                it.
            noise: for image to image, standard normal noise that is added at first, like latents.
            denoising_start: for image to image, the share of the denoising that is done already,
                between 0 and 1: image is the latents that another pipeline gave for this
                denoising_end, and no noise is added. None: strength chooses the first step.
            denoising_end: the share of the denoising to end at, between 0 and 1, for another
                pipeline that goes on, with output_type="latent"; None: all.
            neg_prompt_ids: what to avoid, like prompt_ids, or one row for all; None is the empty
                text, for SDXL zeros.
            return_dict: False returns a plain tuple (images, nsfw_content_detected).
            jit: True runs on several devices, False on one; compiled either way.
            output_type: "np", "pil" or "latent".
            guidance_rescale: phi in [0, 1] of arXiv 2305.08891, equation 16: reduces the contrast
                that guidance adds; 0: off.
            timesteps: the timesteps to visit instead of num_inference_steps of the scheduler's
                choice, decreasing integers, for models distilled to them: (999, 749, 499, 249). Or
                "ays": the ten of Align-Your-Steps (arXiv 2404.14507) for the model's family.
            eta: share of noise in a step of DDIM (default 0) and TCD (default 0.3), 0 to 1.
            controlnet_conditioning_scale: factor of a ControlNet's residuals, a number, or an array
                of one per image; for several ControlNets a number or a list of one for each.
            control_guidance_start, control_guidance_end: the part of the steps with the
                ControlNet, shares from 0 to 1; for several also a list of one for each.
            guess_mode: True: the ControlNet acts on the branch of the prompt alone, and its first
                residuals less, for images without a prompt.

        Returns:
            FlaxStableDiffusionPipelineOutput, or for SDXL FlaxStableDiffusionXLPipelineOutput:
            images (B, H, W, 3), with jit (devices, B, H, W, 3), float32 in [0, 1]; a list of PIL
            images for "pil"; the scaled latents (B, 4, H / 8, W / 8), float32, for "latent".

        Raises:
            ValueError: shapes, sizes, scales or steps that do not fit.
        """
        self._check_inputs(given)
        jit = given["jit"]
        arrays = {name: given[name] for name in ARRAYS if name in given}
        check_arrays(self, jit, arrays)
        if jit:
            arrays = inputs_to_host(arrays)
        steps = (given[name] for name in ("num_inference_steps", "timesteps", "eta"))
        options = timestep_options(*steps, self.ays_timesteps)
        options |= self._range_options(options["num_inference_steps"], given)
        images = (given.get(name) for name in ("image", "masked_image"))
        image_shape = next((image.shape for image in images if image is not None), None)
        height, width = self.image_size(given["height"], given["width"], image_shape)
        options |= {"height": height, "width": width} | output_options(given["output_type"])
        names = ("guidance_scale", "image_guidance_scale", "guidance_rescale")
        scales = {name: given[name] for name in names if name in given}
        branches = self.guidance_branches(**scales)
        self.check_parallel(branches, height)
        options |= {"branches": branches}
        arrays |= {name: scale for name, scale in scales.items() if np.ndim(scale)}
        shared = {name: np.float32(scale) for name, scale in scales.items() if not np.ndim(scale)}
        more_options, more_arrays, more_shared = self._further_arguments(given)
        options, arrays, shared = options | more_options, arrays | more_arrays, shared | more_shared
        # The safety checker is not part of the program.
        params = {name: x for name, x in given["params"].items() if name != "safety_checker"}
        arrays |= {"params": params, "prng_seed": keys_of_call(self, jit, arrays)}
        compiled_in = tuple(options.items()), self.text_modules()
        program = log_compilation(self, jit, arrays, compiled_in)
        if self.layout is not None:
            arrays |= self.layout.as_inputs({k: x for k, x in arrays.items() if k != "params"})
            generate = _generate_in_parts if self.layout.parts else _generate_on_layout
            result = generate(self, compiled_in, arrays, shared, jit)
        else:
            generate = _generate_on_all if jit else _generate_on_one
            result = generate(self, compiled_in, arrays, shared)
        self.compiled.add(program)
        return self._output(
            result, given["params"], jit, given["output_type"], given["return_dict"]
        )

    def _check_inputs(self, given):
        """Raise a ValueError for arguments of a call that do not fit; given: {name: value}."""

    def _range_options(self, num_inference_steps, given):
        """The options of _generate that choose a part of the steps; given: {name: value}."""
        names = ("strength", "denoising_start", "denoising_end")
        return {name: given[name] for name in names if name in given}

    def _further_arguments(self, given):
        """A class's own arguments of a call, three dicts.

        They are options, which are compiled in; arrays with one entry for each image; and arrays
        that all images share. given: {name: value}.
        """
        return {}, {}, {}

    @property
    def vae_scale_factor(self):
        """Pixels per latent, along a side: 8."""
        return 2 ** (len(self.vae.config.block_out_channels) - 1)

    def image_size(self, height=None, width=None, image_shape=None):
        """Height and width of the result, in pixels.

        Args:
            height, width: None: the size of the input image, or, without one, the size that the
                model was trained at.
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

    def check_parallel(self, branches, height=None):
        """Raise a ValueError for branches or a height that the layout's devices cannot share.

        Args:
            branches: of guidance.
            height: of the images, pixels; None: the model's.
        """
        if self.layout is not None:
            height, _ = self.image_size(height)
            check_parallel(self.layout, self.unet, branches, height, self.vae_scale_factor)

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

    @part("vae", "tiny_vae")
    def _decode(self, params, latents):
        """Images of scaled latents, by the tiny VAE if the acceleration says so; see decode."""
        if self.accelerate.tiny_decoder:
            return decode(self.tiny_vae, params["tiny_vae"], latents, self.layout)
        return decode(self._vae, params["vae"], latents, self.layout)

    # ----------------------------------------------------------------- inputs

    def _schedule(
        self,
        num_inference_steps,
        shape,
        first_step=0,
        timesteps=None,
        denoising_start=None,
        denoising_end=None,
    ):
        """The scheduler's state, float32, and the noise_scales of the steps to make.

        Args:
            num_inference_steps, shape, first_step, timesteps: as in set_timesteps.
            denoising_start: share of the denoising; wins over first_step.
            denoising_end: share of the denoising; the steps after it are not made.
        """
        scheduler = self.scheduler
        check_shares(scheduler, denoising_start, denoising_end)
        with jax.ensure_compile_time_eval():
            plan = partial(
                scheduler.set_timesteps, scheduler.create_state(), num_inference_steps, shape
            )
            if denoising_start is not None:
                whole_run = plan(timesteps=timesteps)
                first_step = first_step_of_share(scheduler, whole_run, denoising_start)
            constants = jax.tree.map(np.asarray, plan(first_step, timesteps))
        num_steps = steps_of_share(scheduler, constants, denoising_end)
        scales = tuple(scale[:num_steps] for scale in noise_scales(scheduler, constants))
        return jax.tree.map(jnp.asarray, constants), scales

    @part("unet", "controlnet", "tiny_vae")
    def _denoise(
        self,
        params,
        schedule,
        x_t,
        keys,
        branches,
        inputs,
        combine,
        eta,
        after_step=None,
        finish=lambda images: images,
    ):
        """x_0 of x_t.

        Args:
            params: the pipeline's.
            schedule: of _schedule.
            x_t, keys, eta, after_step: as for sampling.denoise.
            branches: of guidance.
            inputs: (branches, x_t, t) -> the UNet's sample, t, text states, added_cond_kwargs, a
                ControlNet's residuals if there is one (two arguments), timestep_cond, a tuple;
                arrays hold all rows of one branch, then all rows of the next.
            combine: (predictions, float32 (branches * B, C, h, w), branches) -> guided prediction,
                (B, C, h, w).
            finish: changes the decoded images of previews.
        """
        state, scales = schedule
        watch = None
        if self.preview:

            def tiny_decode(x_0):
                return finish(decode(self.tiny_vae, params["tiny_vae"], x_0))

            prediction_type = self.scheduler.vp_prediction_type
            in_mesh = self.layout is not None and not self.layout.parts
            shown = (is_first_of_group(),) if in_mesh else ()
            watch = self.preview.watch(tiny_decode, prediction_type, scales, keys, *shown)
        if self.accelerate:
            from diffusers_flax.acceleration import caches  # not for a plain image

            steps = self.scheduler, state, scales
            return caches.denoise_accelerated(
                self.accelerate,
                self.unet,
                params["unet"],
                steps,
                x_t,
                keys,
                branches,
                inputs,
                combine,
                eta,
                watch,
                after_step,
                self.layout,
            )
        apply = self.unet.apply
        if self.layout is not None:
            apply = shared_apply(self.layout, self.unet, len(branches), x_t.shape[2])

        def predict(x_t, t):
            *arguments, timestep_cond = inputs(branches, x_t, t)
            output = apply({"params": params["unet"]}, *arguments, timestep_cond=timestep_cond)
            return combine(output.sample.astype(jnp.float32), branches)

        return denoise(
            self.scheduler, state, x_t, keys, predict, eta, watch, len(scales[0]), after_step
        )

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
        if jit and self.layout is None:
            params = jax.tree.map(lambda x: x[0], params)
        images = np.asarray(images)
        checked, flags = self.safety_checker.filter_images(
            images.reshape(-1, *images.shape[-3:]), self.feature_extractor, params
        )
        return checked.reshape(images.shape), flags


class TextToImage(Generation):
    """Text to image; common to the pipelines of Stable Diffusion 1.x, 2.x and XL.

    Scheduler (dataclasses.replace changes it), number of steps and image size are compiled in;
    another choice compiles again and logs it. The guidance scale is an argument of the program;
    with 1 or less the program has one branch. The scheduler computes in float32, also if
    params["scheduler"] has another dtype.
    """

    text_axes = 1  # of one image's prompt_ids
    check_channels = staticmethod(check_channels)

    remedy_for_xl = (
        "this pipeline is for Stable Diffusion 1.x and 2.x; for XL use "
        "FlaxStableDiffusionXLPipeline (sdxl_single.py)"
    )

    def prepare_inputs(self, prompt):
        """Tokenize prompts; see prepare_text_inputs.

        Args:
            prompt: str or list of str.

        Returns:
            prompt_ids, int32 (B, 77).
        """
        return self.prepare_text_inputs(prompt)

    __call__ = published_call(
        Generation.__call__, "prompt_ids", "params", "prng_seed", *CALL, "denoising_end"
    )

    @with_options(*GENERATE, "denoising_end")
    def _generate(self, prompt_ids, params, prng_seed, given):
        """Text to image as one pure function of arrays, for one device; jit or pmap it.

        Args as in __call__. guidance_scale may be traced, then both branches run, unless
        `branches` (static) names them; None: the branches that guidance_scale needs.

        Returns:
            images, float32 (B, H, W, 3) in [0, 1], or with return_latents the scaled latents,
            float32 (B, 4, H / 8, W / 8).
        """
        return self._text_to_image(prompt_ids, params, prng_seed, given)

    def _text_to_image(self, prompt_ids, params, prng_seed, given, residuals=None):
        """See _generate; residuals: None, or a ControlNet's function, see WithControlNet."""
        branches = given.branches or self.guidance_branches(given.guidance_scale)
        shape = self.latent_shape(len(prompt_ids), given.height, given.width)
        keys = keys_per_image(prng_seed, len(prompt_ids))
        schedule = self._schedule(
            given.num_inference_steps,
            shape,
            timesteps=given.timesteps,
            denoising_end=given.denoising_end,
        )
        x_t = starting_noise(given.latents, keys, shape) * schedule[0].init_noise_sigma
        text = self._encode_text(params, prompt_ids, given.neg_prompt_ids, branches, shape)
        of_text = text, branches, given.guidance_scale
        inputs = self._unet_inputs(*of_text, len(x_t), residuals=residuals)
        scales = {name: getattr(given, name) for name in ("guidance_scale", "guidance_rescale")}
        combine = partial(guide, **scales)
        x_0 = self._denoise(params, schedule, x_t, keys, branches, inputs, combine, given.eta)
        return x_0 if given.return_latents else self._decode(params, x_0)

    def guidance_branches(self, guidance_scale, guidance_rescale=0.0):
        """The branches to compute; a UNet that is distilled with guidance needs only one."""
        branches = text_branches(guidance_scale)
        return ("text",) if self.unet.config.time_cond_proj_dim is not None else branches

    @part("text_encoder")
    def _encode_text(self, params, prompt_ids, neg_prompt_ids, branches, latent_shape):
        """The text of all branches for the UNet: (states (branches * B, 77, D), SDXL's further)."""
        if neg_prompt_ids is None:
            neg_prompt_ids = self.prepare_text_inputs("")
        neg_prompt_ids = rows_per_image(neg_prompt_ids, len(prompt_ids))
        texts = {"text": prompt_ids, "null": neg_prompt_ids.astype(prompt_ids.dtype)}
        ids = jnp.concatenate([texts[branch] for branch in branches])
        states = self.text_encoder(ids, params=params["text_encoder"], return_dict=True)
        return states.last_hidden_state, None

    def _unet_inputs(
        self, text, branches, guidance_scale, num_images, extra_channels=(), residuals=None
    ):
        """The function that makes the UNet's arguments in each step, `inputs` of _denoise.

        Args:
            text: of _encode_text.
            branches: of guidance.
            guidance_scale: a UNet that is distilled with guidance embeds it.
            num_images: B.
            extra_channels: arrays (B, C, h, w) that join the UNet's input.
            residuals: None, or a ControlNet's function of the arguments, for further ones.
        """
        timestep_cond = None
        if (dim := self.unet.config.time_cond_proj_dim) is not None:
            scale = jnp.asarray(guidance_scale, jnp.float32).reshape(-1)
            timestep_cond = guidance_embedding(jnp.broadcast_to(scale, (num_images,)), dim)

        def inputs(active, x_t, t):
            model_input = jnp.concatenate([x_t, *extra_channels], axis=1)
            model_input = jnp.concatenate([model_input] * len(active))
            arguments = model_input, t, *rows_of_branches(text, branches, active)
            more = () if residuals is None else residuals(*arguments)
            return *arguments, *more, timestep_cond

        return inputs


def _generate(pipeline, compiled_in, arrays, shared):
    options, _ = compiled_in
    return pipeline._generate(**dict(options), **arrays, **shared)


_generate_on_one = jax.jit(_generate, static_argnums=(0, 1))
_generate_on_all = jax.pmap(
    _generate, static_broadcasted_argnums=(0, 1), in_axes=(None, None, 0, None)
)


@partial(jax.jit, static_argnums=(0, 1, 4))
def _generate_on_layout(pipeline, compiled_in, arrays, shared, jit):
    """On the devices of a pipeline's layout, each group with its part of the images."""
    axes = arrays["prompt_ids"].shape[: 2 if jit else 1]

    def one_axis(x):  # a single row is for all images
        x = jnp.broadcast_to(x, (*axes, *x.shape[len(axes) :]))
        return x.reshape(-1, *x.shape[len(axes) :])

    images = {name: x for name, x in arrays.items() if name != "params"}
    images = jax.tree.map(one_axis, images)

    def generate(images, params_and_shared):
        params, shared = params_and_shared
        return _generate(pipeline, compiled_in, images | {"params": params}, shared)

    result = pipeline.layout.map(generate)(images, (arrays["params"], shared))
    return pipeline.layout.on_all_devices(result.reshape(*axes, *result.shape[1:]))


def _generate_in_parts(pipeline, compiled_in, arrays, shared, jit):
    """On the devices of the parts of a pipeline's layout, a program for each part."""
    from diffusers_flax.devices.stages import programs_of_parts

    if jit:  # one group of devices
        images = {name: x for name, x in arrays.items() if name != "params"}
        arrays = arrays | jax.tree.map(lambda x: x[0], images)
    stages = programs_of_parts(_generate, (pipeline, compiled_in), arrays)
    layout = pipeline.layout
    result = stages(arrays, shared, layout.device_of, one_at_a_time=layout.offload is not None)
    return result[None] if jit else result
