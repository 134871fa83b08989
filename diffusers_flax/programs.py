"""Compiled programs: checks and options of a pipeline's call, and jax's compilation cache."""

import logging
import math
import os
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from diffusers_flax.acceleration.plans import plan_steps
from diffusers_flax.messages import warn_once
from diffusers_flax.pipelines.sampling import as_keys, check_eta, keys_per_image
from diffusers_flax.schedulers.noise_schedule import noise_scales

logger = logging.getLogger(__name__)


def timestep_options(num_inference_steps, timesteps, eta):
    """The options of _generate that choose the steps; timesteps win over num_inference_steps."""
    timesteps = None if timesteps is None else tuple(np.asarray(timesteps).tolist()) or None
    num_inference_steps = len(timesteps) if timesteps else num_inference_steps
    return dict(num_inference_steps=num_inference_steps, timesteps=timesteps, eta=eta)


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
    if kernel.ndim != (5 if jit else 4):
        raise ValueError(
            f"params are {'' if kernel.ndim == 5 else 'not '}replicated over devices; "
            "with jit=True replicate them, with jit=False do not"
        )
    if not jit and jax.default_backend() != "cpu" and is_on_cpu(kernel):
        warn_once(
            "params are on the CPU, where images take minutes; put them on the device once: "
            "params = jax.device_put(params, jax.devices()[0])"
        )


def keys_of_call(jit, arrays):
    """The keys of a call's prng_seed; with jit one per image, if it is one key.

    Images then do not depend on the number of devices.
    """
    keys = as_keys(arrays["prng_seed"])
    if jit and keys.ndim == 0:
        batch = arrays["prompt_ids"].shape[:2]
        keys = keys_per_image(keys, math.prod(batch)).reshape(batch)
    return keys


def is_on_cpu(array):
    """Whether an array is a JAX array on the host's CPU."""
    return isinstance(array, jax.Array) and {x.platform for x in array.devices()} == {"cpu"}


def log_compilation(pipeline, jit, arrays, compiled_in):
    """Log what is new if the pipeline has compiled a program, and this call compiles another.

    Args:
        pipeline, jit, arrays: as for check_arrays.
        compiled_in: (options, a tuple of (name, value); the text encoders' modules).
    """
    program = _program_of(pipeline, jit, arrays, *compiled_in)
    if pipeline.compiled and program not in pipeline.compiled:
        nearest = min(pipeline.compiled, key=lambda other: len(program - other))
        before = dict(nearest)
        changes = [f"{k}={v} (was {before.get(k)})" for k, v in sorted(program - nearest)]
        logger.warning("compiling again, for %s", ", ".join(changes))
    pipeline.compiled.add(program)


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


def use_compilation_cache(folder):
    """Set the directory of jax's compilation cache, unless one is set already.

    Args:
        folder: directory, created if missing; "": no cache.

    Returns:
        True if the cache uses this directory.

    Raises:
        ValueError: it cannot be created or written to.
    """
    if not folder or jax.config.jax_compilation_cache_dir is not None:
        return False
    folder = Path(folder).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"--compilation_cache_dir {folder} cannot be made: {error}; name another directory"
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(
            f'--compilation_cache_dir {folder} cannot be written to; name another, or "" for none'
        )
    jax.config.update("jax_compilation_cache_dir", str(folder))
    return True


def initialize_cache(path):
    """Set the directory of jax's compilation cache, replacing one that is set already.

    Scripts that call cc.initialize_cache(path), which jax removed, run with
    `from diffusers_flax import programs as cc` in place of jax's compilation_cache.

    Args:
        path: of the directory, which is created when the first program is saved.
    """
    jax.config.update("jax_compilation_cache_dir", str(path))
    compilation_cache.reset_cache()  # jax reads the setting only once


@contextmanager
def no_compilation_cache():
    """Compile without reading or writing jax's persistent cache.

    An executable that was read from that cache and saved again can be loaded on a CPU, but not run.
    """
    enabled = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # jax reads the setting only once
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()


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
    plan_steps(accelerate, branches, noise_scales(state))


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
