"""The arguments of pipelines' calls: published signatures, checks, and options of _generate."""

import functools
import inspect
import logging
import math
from numbers import Real
from types import SimpleNamespace

import jax
import numpy as np

from diffusers_flax.acceleration.plans import plan_steps
from diffusers_flax.messages import warn_once
from diffusers_flax.pipelines.sampling import as_keys, check_eta, keys_per_image
from diffusers_flax.schedulers.noise_schedule import noise_scales

logger = logging.getLogger(__name__)

# The arguments with defaults of the pipelines' calls and of _generate, in the published order.
CALL = (
    *("num_inference_steps", "height", "width", "guidance_scale", "latents", "neg_prompt_ids"),
    *("return_dict", "jit", "output_type", "guidance_rescale", "timesteps", "eta"),
)
GENERATE = (
    *("num_inference_steps", "height", "width", "guidance_scale", "latents", "neg_prompt_ids"),
    *("return_latents", "guidance_rescale", "branches", "timesteps", "eta"),
)
# Align-Your-Steps (arXiv 2404.14507): timesteps to visit in 10 steps, of Stable Diffusion and SDXL.
AYS_SD = (999, 850, 736, 645, 545, 455, 343, 233, 124, 24)
AYS_SDXL = (999, 845, 730, 587, 443, 310, 193, 116, 53, 13)
# None unless named here.
DEFAULTS = {
    "num_inference_steps": 50,
    "strength": 0.8,
    "start_timestep": 10,
    "guidance_scale": 7.5,
    "image_guidance_scale": 1.5,
    "guidance_rescale": 0.0,
    "controlnet_conditioning_scale": 1.0,
    "control_guidance_start": 0.0,
    "control_guidance_end": 1.0,
    "guess_mode": False,
    "return_dict": True,
    "return_latents": False,
    "jit": False,
    "output_type": "np",
}
INPUTS = ("prompt_ids", "image", "mask", "masked_image", "params", "prng_seed")
# The arguments of a call that are arrays, or trees of them.
ARRAYS = (*INPUTS, "latents", "noise", "neg_prompt_ids")


def signature_of(names, defaults):
    """The signature of a method with these arguments; defaults win over DEFAULTS.

    INPUTS have no default, or None, if an argument with a default stands before.
    """
    kind, empty = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
    parameters = [inspect.Parameter("self", kind)]
    for i, name in enumerate(names):
        is_required = set(names[: i + 1]) <= {*INPUTS}
        default = empty if is_required else defaults.get(name, DEFAULTS.get(name))
        parameters.append(inspect.Parameter(name, kind, default=default))
    return inspect.Signature(parameters)


def published_call(method, *names, **defaults):
    """`method`, which takes keywords, with these arguments, by position or name."""
    signature = signature_of(names, defaults)

    @functools.wraps(method)
    def call(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return method(**bound.arguments)

    call.__signature__ = signature
    return call


def with_options(*names, **defaults):
    """Decorator of a method whose last argument, `given`, has these options as attributes.

    The method itself takes each option as an argument, by position or name.
    """

    def decorate(method):
        _, *inputs, _ = inspect.signature(method).parameters
        signature = signature_of((*inputs, *names), defaults)

        @functools.wraps(method)
        def wrapper(*args, **kwargs):
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            options = SimpleNamespace(**{name: bound.arguments[name] for name in names})
            return method(*(bound.arguments[name] for name in ("self", *inputs)), options)

        wrapper.__signature__ = signature
        return wrapper

    return decorate


def timestep_options(num_inference_steps, timesteps, eta, ays=AYS_SD):
    """The options of _generate that choose the steps; timesteps win over num_inference_steps.

    Args:
        num_inference_steps, eta: of a call.
        timesteps: of a call, integers or "ays"; a flag's tuple of them.
        ays: the timesteps that "ays" stands for, AYS_SD or AYS_SDXL.

    Raises:
        ValueError: timesteps is another text, or has "ays" among others.
    """
    words = (timesteps,) if isinstance(timesteps, str) else timesteps
    if words is not None and any(isinstance(word, str) for word in words):
        if tuple(words) != ("ays",):
            raise ValueError(f"timesteps={timesteps!r} must be integers, or ays alone")
        timesteps = ays
    timesteps = None if timesteps is None else tuple(np.asarray(timesteps).tolist()) or None
    num_inference_steps = len(timesteps) if timesteps else num_inference_steps
    return dict(num_inference_steps=num_inference_steps, timesteps=timesteps, eta=eta)


def check_shares(scheduler, denoising_start, denoising_end):
    """Raise a ValueError unless both are shares of the denoising, in order; None: not given."""
    for name, share in (("denoising_start", denoising_start), ("denoising_end", denoising_end)):
        if share is None:
            continue
        if not isinstance(share, Real) or not 0 < share < 1:
            raise ValueError(
                f"{name}={share!r} must be a number between 0 and 1, the share of the denoising "
                "that is done there; leave it out for all of it"
            )
        if scheduler._option("sigma_data"):
            raise ValueError(
                f"{name}={share} cannot be chosen for a model of EDM, whose timesteps are "
                "log(sigma) / 4; leave it out"
            )
        if scheduler._option("skip_prk_steps") is False:
            raise ValueError(
                f"{name}={share} cannot be chosen with PNDM's Runge-Kutta start; take "
                "skip_prk_steps=True, or another scheduler"
            )
    if None not in (denoising_start, denoising_end) and denoising_start >= denoising_end:
        raise ValueError(
            f"denoising_start={denoising_start} must be below denoising_end={denoising_end}"
        )


def first_step_of_share(scheduler, state, denoising_start):
    """How many first steps of a run leave denoising_start of the denoising behind them.

    Args:
        scheduler: the share is of its num_train_timesteps, as in PyTorch's pipelines.
        state: of set_timesteps with all steps.
        denoising_start: between 0 and 1.
    """
    num_done = num_steps_before(scheduler, state, denoising_start)
    # PNDM repeats its second timestep.
    num_repeated = len(state.timesteps) - state.num_inference_steps
    first_step = num_done - min(num_repeated, max(num_done - 1, 0))
    if first_step == state.num_inference_steps:
        raise ValueError(
            f"denoising_start={denoising_start} of num_inference_steps={first_step} leaves no step "
            "to do; take more steps or an earlier start"
        )
    return first_step


def steps_of_share(scheduler, state, denoising_end):
    """How many of a run's steps to make up to denoising_end; None: all.

    Args:
        scheduler, denoising_end: as for first_step_of_share.
        state: of set_timesteps.
    """
    if denoising_end is None:
        return len(state.timesteps)
    num_steps = num_steps_before(scheduler, state, denoising_end)
    if not num_steps:
        raise ValueError(
            f"denoising_end={denoising_end} of num_inference_steps={state.num_inference_steps} "
            "leaves no step to do; take more steps or a later end"
        )
    return num_steps


def num_steps_before(scheduler, state, share):
    """The number of timesteps that are visited before a share of the denoising is done."""
    reached = round(len(scheduler) - share * len(scheduler))
    return int((np.asarray(state.timesteps) >= reached).sum())


def output_options(output_type):
    """The option of _generate for an output_type, "np" (or None), "pil" or "latent"."""
    if output_type not in (None, "np", "pil", "latent"):
        raise ValueError(f"output_type={output_type!r} is unknown; take np, pil or latent")
    return {"return_latents": output_type == "latent"}


def check_arrays(pipeline, jit, arrays):
    """Raise a ValueError unless prompt_ids and params have the axes that a call with `jit` takes.

    Args:
        pipeline: FlaxDiffusionPipeline.
        jit: True: the arrays have a leading axis of devices. False: the program runs where params
            are; warns if that is the CPU beside an accelerator.
        arrays: {argument: tree of arrays, or None}, among them prompt_ids and params.
    """
    prompt_ids = arrays["prompt_ids"]
    for name in ("prompt_ids", "neg_prompt_ids"):
        if isinstance(arrays[name], str | list | tuple):
            raise ValueError(
                f"{name} is a {type(arrays[name]).__name__}, not an array of token ids; make it "
                "with prepare_inputs, for negative prompts with prepare_text_inputs"
            )
    pipeline._require_params(arrays["params"])
    text_axes = ", ".join(map(str, prompt_ids.shape[-pipeline.text_axes :]))
    shape = f"(devices, batch, {text_axes})" if jit else f"(batch, {text_axes})"
    if prompt_ids.ndim != shape.count(",") + 1:
        raise ValueError(
            f"prompt_ids has shape {prompt_ids.shape}, jit={jit} takes {shape}; with jit=True "
            "shard prompt_ids (and the image), and replicate params"
        )
    kernel = arrays["params"]["unet"]["conv_in"]["kernel"]
    if pipeline.layout is not None:
        check_layout(pipeline.layout, jit, prompt_ids, kernel)
        return
    if kernel.ndim != (5 if jit else 4):
        raise ValueError(
            f"params are {'' if kernel.ndim == 5 else 'not '}replicated over devices; "
            "with jit=True replicate them, with jit=False do not"
        )
    if not jit and jax.default_backend() != "cpu":
        remedy = "put them on the device once: params = jax.device_put(params, jax.devices()[0])"
        if not isinstance(kernel, jax.Array):
            warn_once(f"params are NumPy arrays, which every call copies; {remedy}")
        elif {device.platform for device in kernel.devices()} == {"cpu"}:
            warn_once(f"params are on the CPU, where images take minutes; {remedy}")


def check_layout(layout, jit, prompt_ids, kernel):
    """Raise a ValueError unless images and parameters fit a layout.

    Args:
        layout: Layout.
        jit, prompt_ids: of a call.
        kernel: one of the parameters.
    """
    num_images, what = len(prompt_ids), "a multiple" if not jit else "the number"
    if num_images % layout.data or (jit and num_images != layout.data):
        raise ValueError(
            f"prompt_ids has shape {prompt_ids.shape}, whose first axis must be {what} of the "
            f"layout's data={layout.data} groups of devices"
        )
    devices = {layout.device_of("unet")} if layout.parts else {*layout.devices}
    if kernel.ndim != 4 or not isinstance(kernel, jax.Array) or kernel.devices() != devices:
        raise ValueError(
            f"params are not on the {len(layout.devices)} devices of the layout; put them there "
            "once: layout.place_params(params)"
        )


def inputs_to_host(arrays):
    """Move inputs on one device to the host, as pmap refuses them; params and keys stay.

    The latents of a call on one device are such an input of a refiner on all devices.
    """
    inputs = {name: x for name, x in arrays.items() if name not in ("params", "prng_seed")}
    on_one = {
        name: np.asarray(x)
        for name, x in inputs.items()
        if isinstance(x, jax.Array) and len(x.devices()) == 1
    }
    return arrays | on_one


def keys_of_call(pipeline, jit, arrays):
    """The keys of a call's prng_seed; on several devices one per image, if it is one key.

    Images then do not depend on the number of devices.
    """
    keys = as_keys(arrays["prng_seed"])
    if (jit or pipeline.layout is not None) and keys.ndim == 0:
        batch = arrays["prompt_ids"].shape[: 2 if jit else 1]
        keys = keys_per_image(keys, math.prod(batch)).reshape(batch)
    return keys


def log_compilation(pipeline, jit, arrays, compiled_in):
    """Log what is new if the pipeline has compiled a program, and this call compiles another.

    Args:
        pipeline, jit, arrays: as for check_arrays.
        compiled_in: (options, a tuple of (name, value); the text encoders' modules).

    Returns:
        The program's entry for pipeline.compiled, to be added after the call.
    """
    program = _program_of(pipeline, jit, arrays, *compiled_in)
    if pipeline.compiled and program not in pipeline.compiled:
        nearest = min(pipeline.compiled, key=lambda other: len(program - other))
        before, now = dict(nearest), dict(program)
        names = sorted(name for name, _ in program ^ nearest)
        changes = [f"{k}={now.get(k)} (was {before.get(k)})" for k in dict.fromkeys(names)]
        logger.warning("compiling again, for %s", ", ".join(changes))
    return program


def _program_of(pipeline, jit, arrays, options, text_modules):
    """All that the program of a call depends on: a frozenset of (name, value)."""
    scheduler = pipeline.scheduler
    types = {
        name: f"{x.dtype}{list(x.shape)}"
        for name, x in arrays.items()
        if name != "params" and x is not None
    }
    weights = {name: tree for name, tree in arrays["params"].items() if name != "scheduler"}
    dtypes = {str(x.dtype) for x in jax.tree.leaves(weights)}
    settings = {
        "scheduler": f"{type(scheduler).__name__} {sorted(scheduler.config.items())}",
        "accelerate": str(pipeline.accelerate) or "nothing",
        "preview": pipeline.preview.every if pipeline.preview else "none",
        "params": "/".join(sorted(dtypes)),
        "text encoders": str([dict(module.config) for module in text_modules]),
    }
    return frozenset({"jit": jit, **dict(options), **types, **settings}.items())


def check_steps(scheduler, state, steps, accelerate, branches):
    """Raise a ValueError for steps that the scheduler or the accelerations do not take.

    Args:
        scheduler, state: of choose_scheduler.
        steps: of timestep_options.
        accelerate: Acceleration.
        branches: of guidance.
    """
    state = timesteps_of(scheduler, state, steps)
    check_eta(scheduler, steps["eta"])
    if accelerate:
        plan_steps(accelerate, branches, noise_scales(scheduler, state))


def count_steps(scheduler, steps):
    """Number of steps that a scheduler makes, PNDM's repeated ones included.

    Arguments as for check_steps.
    """
    return len(timesteps_of(scheduler, scheduler.create_state(), steps).timesteps)


def timesteps_of(scheduler, state, steps):
    """The scheduler's state; its timesteps are all that it visits, PNDM's repeated ones included.

    Arguments as for check_steps.
    """
    return scheduler.set_timesteps(
        state, steps["num_inference_steps"], timesteps=steps["timesteps"]
    )
