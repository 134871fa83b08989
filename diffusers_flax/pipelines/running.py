"""From a call of a pipeline to its program: checks, where it runs, what changes a prediction.

A program is `generate`, the stages of a pipeline, which are pure functions of arrays:

    encode_text, encode_image -> denoise -> decode

It runs on one device, on all devices (pmap), or on the devices of a Layout: as one program
(shard_map), or as one program for each stage, on the stage's device.
"""

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypedDict

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from diffusers_flax.devices.layout import component_of
from diffusers_flax.messages import warn_once
from diffusers_flax.models.blocks import TEXT, project_text
from diffusers_flax.pipelines.sampling import as_keys, decode, denoise, keys_per_image
from diffusers_flax.schedulers.noise_schedule import output_of_x0, predict_x0_and_eps

# Models that a stage runs, by their keys in params; some may be absent.
MODELS_OF_STAGE = {
    "encode_text": ("text_encoder", "text_encoder_2"),
    "encode_image": ("vae",),
    "denoise": ("unet", "controlnet", "tiny_vae"),
    "decode": ("vae", "tiny_vae"),
}


@dataclass(frozen=True)
class Options:
    """Settings that are compiled into a program; another value compiles another program.

    Fields:
        num_inference_steps, timesteps, eta: of timestep_options.
        height, width: of the result, pixels; None: of the input image, or the model's.
        branches: of guidance, to compute; None: the ones that the scales need.
        guidance: ProjectedGuidance; None: classifier-free guidance as it is.
        return_latents: True skips the last stage.
        first_step: number of first steps to skip, see ImageToImage.
        denoising_start, denoising_end: fractions of the denoising, see make_schedule.
        control_guidance_start, control_guidance_end: of each ControlNet, fractions of the steps.
        guess_mode: of ControlNets.
    """

    num_inference_steps: int = 50
    timesteps: tuple | None = None
    eta: float | None = None
    height: int | None = None
    width: int | None = None
    branches: tuple | None = None
    guidance: Any = None
    return_latents: bool = False
    first_step: int = 0
    denoising_start: float | None = None
    denoising_end: float | None = None
    control_guidance_start: tuple = (0.0,)
    control_guidance_end: tuple = (1.0,)
    guess_mode: bool = False


class CallOptions(TypedDict, total=False):
    """Arguments of every pipeline's call and _generate, with their defaults.

    Fields:
        output_type: "np" (default), "pil" or "latent"; not of _generate.
        guidance_rescale: phi in [0, 1] of arXiv 2305.08891, equation 16: reduces the contrast that
            guidance adds; 0 (default): off.
        guidance: "apg" or "apg:eta=0,norm=15,momentum=-0.5", projected guidance, see guidance.py;
            None (default): off.
        timesteps: the timesteps to visit instead of num_inference_steps of the scheduler's choice,
            decreasing integers, for models distilled to them: (999, 749, 499, 249). Or "ays": the
            ten of Align-Your-Steps (arXiv 2404.14507) for the model's family.
        eta: noise in a step of DDIM (default 0) and TCD (default 0.3), from 0 to 1.
        denoising_end: fraction of the denoising to end at, between 0 and 1, with
            output_type="latent", for another pipeline to continue; None (default): all.
        prompt_weights: PromptWeights, of prompts.prepare_prompts; None (default): no weights.
    """

    output_type: str | None
    guidance_rescale: Any
    guidance: str | None
    timesteps: Any
    eta: float | None
    denoising_end: float | None
    prompt_weights: Any


# Arguments that are arrays with an entry for each image.
INPUTS = (
    *("prompt_ids", "neg_prompt_ids", "prompt_weights"),
    *("latents", "noise", "image", "mask", "masked_image", "reference"),
)
# Arguments that are numbers, or arrays with an entry for each image.
SCALES = (
    "guidance_scale",
    "image_guidance_scale",
    "guidance_rescale",
    "attention_sharing",
    "controlnet_conditioning_scale",
)
RESULT_ARGUMENTS = ("params", "prng_seed", "jit", "output_type", "return_dict")


@dataclass(frozen=True)
class Call:
    """The arguments of a call of a pipeline, or of its _generate; see make_call.

    Fields:
        options: Options.
        inputs: {argument: array, or tree of arrays, with an entry for each image, or None}, with
            prompt_ids.
        scales: {argument: number, array with an entry for each image, or tuple for all images}.
        params, prng_seed, jit, output_type, return_dict: of the call.
    """

    options: Options
    inputs: dict
    scales: dict
    params: dict
    prng_seed: jax.Array
    jit: bool = False
    output_type: str | None = "np"
    return_dict: bool = True


def run(pipeline, call):
    """Run a pipeline's program; every call ends here. With jit arrays have an axis of devices."""
    options, inputs, jit, layout = call.options, call.inputs, call.jit, pipeline.layout
    check_inputs(pipeline, jit, inputs, call.params)
    pipeline.check_parallel(options.branches, options.height)
    scales = {name: x for name, x in call.scales.items() if x is not None}
    per_image = {name: x for name, x in scales.items() if np.ndim(x) and not isinstance(x, tuple)}
    shared = {name: np.float32(x) for name, x in scales.items() if name not in per_image}
    inputs = inputs | per_image
    if jit:  # pmap refuses inputs that are on one device
        inputs = jax.tree.map(on_host_if_on_one, inputs)
    inputs |= {"prng_seed": keys_of_call(pipeline, jit, call.prng_seed, inputs["prompt_ids"])}
    # The safety checker is not part of the program.
    params = {name: x for name, x in call.params.items() if name != "safety_checker"}
    static = pipeline, options, pipeline.text_modules()
    function = generate_on_all if jit else generate_on_one
    if layout is not None:
        function, static = generate_on_layout, (*static, jit)
        inputs = layout.as_inputs(inputs)
    arrays = inputs, shared, params
    if layout is not None and layout.components:
        result = generate_by_stages(*static, *arrays)
    elif pipeline.saved_programs:
        devices = jax.local_devices()[: len(inputs["prompt_ids"]) if jit else 1]
        devices = devices if layout is None else layout.devices
        description = f"{pipeline.description()} {options} {jit}"
        result = pipeline.saved_programs.run(function, description, devices, static, arrays)
    else:
        result = function(*static, *arrays)
    return pipeline.output(result, call)


def generate(pipeline, options, text_modules, inputs, shared, params):
    """A pipeline's images, or their latents, as one pure function of arrays.

    text_modules: of the text encoders, whose config may change between calls, for jit's cache key;
    inputs: see Call; shared: {argument: number for all images}; params: the pipeline's.
    """
    inputs, layout = {**inputs, **shared}, pipeline.layout
    if layout is None or not layout.fetches:
        return run_stages(pipeline, options, inputs, params)
    from diffusers_flax.devices.offload import fetching  # for parameters in the host's memory

    with fetching(layout.offload) as fetcher:

        def with_fetched(stage):
            return fetcher.stage(stage, MODELS_OF_STAGE[stage.__name__])

        return run_stages(pipeline, options, inputs, params, with_fetched)


def run_stages(pipeline, options, inputs, params, wrap=lambda stage: stage):
    """The stages of a pipeline, one after the other; wrap: a stage -> what runs in its place."""
    text = wrap(pipeline.encode_text)(params, inputs, options)
    encoded = None
    if pipeline.encodes_images:
        encoded = wrap(pipeline.encode_image)(params, inputs, options)
    latents = wrap(pipeline.denoise)(params, inputs, options, text, encoded)
    if options.return_latents:
        return latents
    return wrap(pipeline.decode)(params, inputs, options, encoded, latents)


class GuidedPrediction(NamedTuple):
    """How the UNet's predictions of several branches become one.

    Fields:
        branches: names, in the order of the rows.
        inputs: (branches, i, x_t, t) -> the UNet's sample, t, text states, added_cond_kwargs, a
            ControlNet's residuals if there is one (two arguments), timestep_cond, a tuple; i is the
            number of the step. Arrays hold all rows of one branch, then all rows of the next.
        text: branches -> their text states, (branches * B, S, D).
        guide: (predictions, float32 (branches * B, C, h, w), branches, i, memory) -> (guided
            prediction, (B, C, h, w), memory for the next step). With memory they are clean samples.
        hooks: functions for flax.linen.intercept_methods that change the UNet.
        memory: of guide in the first step.
    """

    branches: tuple
    inputs: Callable
    text: Callable
    guide: Callable
    hooks: tuple = ()
    memory: Any = ()


def choose_denoising(
    pipeline, params, schedule, keys, prediction, height, finish=lambda images: images
):
    """The function (x_T, after_step=None) -> x_0 of a pipeline; see sampling.denoise.

    Accelerations, several devices and previews are chosen here alone. A plain image runs none of
    their code. keys: one per image; height: of the latents; finish: changes the decoded images of
    previews.
    """
    watch = watch_for_previews(pipeline, params, schedule, keys, finish)
    if pipeline.accelerate:
        from diffusers_flax.acceleration.caches import denoise_accelerated

        return partial(
            denoise_accelerated, pipeline, params, schedule, keys, prediction, watch=watch
        )
    apply, branches = pipeline.unet.apply, prediction.branches
    text = prediction.text(branches)
    if pipeline.layout is not None:
        from diffusers_flax.devices.parallelism import choose_axes, parallel_apply

        axes = choose_axes(pipeline.layout, pipeline.unet, len(branches), height)
        apply, text = parallel_apply(axes, pipeline.unet), axes.local_branches(text)
    variables = {"params": params["unet"]}
    variables[TEXT] = project_text(params["unet"], text, pipeline.unet.dtype)

    def predict(i, x_t, t, memory):
        *arguments, timestep_cond = prediction.inputs(branches, i, x_t, t)
        with ExitStack() as stack:
            for hook in prediction.hooks:
                stack.enter_context(nn.intercept_methods(hook))
            output = apply(variables, *arguments, timestep_cond=timestep_cond)
        output = output.sample.astype(jnp.float32)
        if not memory:
            return prediction.guide(output, branches, i, memory)
        alpha, sigma = (jnp.asarray(table)[i] for table in schedule.scales)
        kind, rows = pipeline.scheduler.vp_prediction_type, jnp.concatenate([x_t] * len(branches))
        x_0, _ = predict_x0_and_eps(kind, alpha, sigma, rows, output)
        x_0, memory = prediction.guide(x_0, branches, i, memory)
        return output_of_x0(kind, alpha, sigma, x_t, x_0), memory

    memory = prediction.memory
    return partial(denoise, schedule, keys=keys, predict=predict, watch=watch, memory=memory)


def watch_for_previews(pipeline, params, schedule, keys, finish):
    """The `watch` of sampling.denoise that shows previews, or None; arguments: choose_denoising."""
    if not pipeline.preview:
        return None

    def tiny_decode(x_0):
        return finish(decode(pipeline.tiny_vae, params["tiny_vae"], x_0))

    shown = ()
    if pipeline.layout is not None and not pipeline.layout.components:
        from diffusers_flax.devices.parallelism import is_first_of_group

        shown = (is_first_of_group(),)
    prediction_type = pipeline.scheduler.vp_prediction_type
    return pipeline.preview.watch(tiny_decode, prediction_type, schedule.scales, keys, *shown)


generate_on_one = jax.jit(generate, static_argnums=(0, 1, 2))
generate_on_all = jax.pmap(
    generate,
    static_broadcasted_argnums=(0, 1, 2),
    in_axes=(None, None, None, 0, None, 0),
)


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def generate_on_layout(pipeline, options, text_modules, jit, inputs, shared, params):
    """On the devices of a pipeline's layout, each group with its share of the images."""
    axes = inputs["prompt_ids"].shape[: 2 if jit else 1]

    def one_axis(x):  # a single row is for all images
        x = jnp.broadcast_to(x, (*axes, *x.shape[len(axes) :]))
        return x.reshape(-1, *x.shape[len(axes) :])

    def on_group(inputs, others):
        return generate(pipeline, options, text_modules, inputs, *others)

    inputs = jax.tree.map(one_axis, inputs)
    result = pipeline.layout.map(on_group)(inputs, (shared, params))
    return pipeline.layout.on_all_devices(result.reshape(*axes, *result.shape[1:]))


def generate_by_stages(pipeline, options, text_modules, jit, inputs, shared, params):
    """One program for each stage, on the device of its models, dispatched without waiting."""
    layout = pipeline.layout
    inputs = {**(jax.tree.map(lambda x: x[0], inputs) if jit else inputs), **shared}

    def on_its_device(stage):
        models = MODELS_OF_STAGE[stage.__name__]
        device = layout.device_of(component_of(models[0]))

        def run_stage(params, inputs, options, *results):
            own = {name: params[name] for name in models if name in params}
            arrays = jax.device_put((own, inputs, results), device)
            return stage_program(pipeline, options, text_modules, stage.__name__, *arrays)

        return run_stage

    result = run_stages(pipeline, options, inputs, params, on_its_device)
    return result[None] if jit else result


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def stage_program(pipeline, options, text_modules, name, params, inputs, results):
    """A stage, by its name, with the results of the stages before."""
    return getattr(pipeline, name)(params, inputs, options, *results)


def check_inputs(pipeline, jit, inputs, params):
    """Raise a ValueError unless arrays and params have the axes that a call with `jit` takes."""
    prompt_ids = inputs["prompt_ids"]
    if not hasattr(prompt_ids, "ndim"):
        raise ValueError("prompt_ids is no array of token ids; make it with prepare_inputs")
    pipeline._require_params(params)
    kernel = params["unet"]["conv_in"]["kernel"]
    batch, layout = prompt_ids.shape[: -pipeline.text_axes], pipeline.layout
    is_replicated = kernel.ndim == 5
    if len(batch) != 1 + jit or is_replicated != (jit and layout is None):
        raise ValueError(
            f"prompt_ids has shape {prompt_ids.shape}, and params are "
            f"{'' if is_replicated else 'not '}replicated over devices; jit=False takes prompts "
            "of one device and params as they are; with jit=True shard prompt_ids (and the image), "
            "and replicate params"
        )
    sizes = set()
    for name in ("image", "masked_image", "mask", "reference"):
        if (x := inputs[name]) is not None:
            factor = pipeline.vae_scale_factor if pipeline.is_latents(x.shape) else 1
            sizes.add((*x.shape[: len(batch)], *(side * factor for side in x.shape[-2:])))
    if len(sizes) > 1 or any(size[:-2] != batch for size in sizes):
        raise ValueError(
            f"prompt_ids has shape {prompt_ids.shape}, images and masks have (batch, height, "
            f"width) {sorted(sizes)}; they need one batch and one size; prepare_inputs makes them"
        )
    if layout is not None:
        devices = {layout.device_of("unet")} if layout.components else {*layout.devices}
        if not isinstance(kernel, jax.Array) or kernel.devices() != devices:
            raise ValueError(
                "params are not on the devices of the layout; put them there once: "
                "layout.place_params(params)"
            )
    elif not jit and jax.default_backend() != "cpu":
        devices = kernel.devices() if isinstance(kernel, jax.Array) else jax.devices("cpu")
        if {device.platform for device in devices} == {"cpu"}:
            warn_once(
                "params are on the CPU, where images take minutes; put them on the device once: "
                "params = jax.device_put(params, jax.devices()[0])"
            )


def on_host_if_on_one(x):
    """An array, in NumPy if it is on one device."""
    return np.asarray(x) if isinstance(x, jax.Array) and len(x.devices()) == 1 else x


def keys_of_call(pipeline, jit, prng_seed, prompt_ids):
    """A call's keys; on several devices one per image, so that images do not depend on devices."""
    keys = as_keys(prng_seed)
    if (jit or pipeline.layout is not None) and keys.ndim == 0:
        batch = prompt_ids.shape[: 2 if jit else 1]
        keys = keys_per_image(keys, math.prod(batch)).reshape(batch)
    return keys
