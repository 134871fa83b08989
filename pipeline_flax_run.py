"""Calling a pipeline: compiled, on one device or on all, with its weights kept on the device."""

import logging
import math
import weakref

import jax
import numpy as np

from config_flax import warn_once
from pipeline_flax_utils import MODULES, TEXT_ENCODERS
from sampling_flax import as_keys, keys_per_image

logger = logging.getLogger(__name__)


def run(pipeline, jit, arrays, shared, options):
    """Call pipeline._generate, compiled, on one device or on all devices.

    Args:
        pipeline: FlaxDiffusionPipeline.
        jit: True: `arrays` have a leading axis of devices and run under pmap. False: NumPy arrays
            of params are kept on the device, see on_device.
        arrays: {argument: tree of arrays, or None}, among them prompt_ids, params and prng_seed.
        shared: {argument: number}, the same on all devices, not compiled in.
        options: {argument: hashable}, compiled in.

    Returns:
        What _generate returns; with jit with a leading axis of devices.

    Raises:
        ValueError: the number of axes of prompt_ids or params does not suit jit.
    """
    prompt_ids = arrays["prompt_ids"]
    for name in ("prompt_ids", "neg_prompt_ids"):
        if isinstance(arrays[name], str | list | tuple):
            raise ValueError(
                f"{name} is a {type(arrays[name]).__name__}, not an array of token ids; make it "
                "with prepare_inputs, for negative prompts with prepare_text_inputs"
            )
    pipeline._require_params(arrays["params"])
    # The safety checker is not part of the program.
    params = {name: tree for name, tree in arrays["params"].items() if name != "safety_checker"}
    arrays = arrays | {"params": params}
    text_axes = ", ".join(map(str, prompt_ids.shape[-pipeline.text_axes :]))
    shape = f"(devices, batch, {text_axes})" if jit else f"(batch, {text_axes})"
    if prompt_ids.ndim != shape.count(",") + 1:
        raise ValueError(
            f"prompt_ids has shape {prompt_ids.shape}, jit={jit} takes {shape}; with jit=True "
            "shard prompt_ids (and the image), and replicate params"
        )
    kernel = params["unet"]["conv_in"]["kernel"]
    if kernel.ndim != (5 if jit else 4):
        raise ValueError(
            f"params are {'' if kernel.ndim == 5 else 'not '}replicated over devices; "
            "with jit=True replicate them, with jit=False do not"
        )
    keys = as_keys(arrays["prng_seed"])
    if jit and keys.ndim == 0:  # so that images do not depend on the number of devices
        batch = prompt_ids.shape[:2]
        keys = keys_per_image(keys, math.prod(batch)).reshape(batch)
    arrays = arrays | {"prng_seed": keys}
    image = arrays.get("image", arrays.get("masked_image"))
    height, width = pipeline.picture_size(
        options["height"], options["width"], None if image is None else image.shape
    )
    options = options | {"height": height, "width": width}
    shared = {name: np.float32(number) for name, number in shared.items()}
    text_modules = _text_modules(pipeline)
    program = _program_of(pipeline, jit, arrays, options, text_modules)
    if pipeline.compiled and program not in pipeline.compiled:
        nearest = min(pipeline.compiled, key=lambda other: len(program - other))
        before = dict(nearest)
        changes = [f"{k}={v} (was {before.get(k)})" for k, v in sorted(program - nearest)]
        logger.warning("compiling again, for %s", ", ".join(changes))
    if not jit:
        arrays["params"] = on_device(params)
    generate = _on_devices if jit else _on_one
    compiled_in = tuple(options.items()), text_modules
    result = generate(pipeline, compiled_in, arrays, shared)
    pipeline.compiled.add(program)
    return result


# {id of a NumPy array: (weak reference that removes the entry, the array's copy on the device)}
_latest_copies = {}


def is_writeable_through_base(array):
    """Whether a NumPy array is a view of a writeable one."""
    base = array.base
    while isinstance(base, np.ndarray) and not base.flags.writeable:
        base = base.base
    return isinstance(base, np.ndarray)


def on_device(params):
    """Put NumPy arrays of parameters on the device, once for calls in a row with the same arrays.

    The copies of the latest call are kept, array by array: an array that is replaced in params is
    copied, the rest is not. They are dropped when a call has other arrays, or when nothing else
    holds the NumPy array (on a CPU, where both may share memory, only by a later call). NumPy
    arrays become read-only, as a change in place would not reach the copy. One that is writeable
    at the next call is copied again. Views of writeable arrays are left to be copied in every call,
    with a warning.

    Args:
        params: tree of NumPy and JAX arrays.

    Returns:
        The same tree of JAX arrays and such views.
    """
    leaves, tree = jax.tree.flatten(params)
    arrays = {id(x): x for x in leaves if isinstance(x, np.ndarray)}
    owned = {key: x for key, x in arrays.items() if not is_writeable_through_base(x)}
    if len(owned) < len(arrays):
        warn_once(
            "params has views of writeable NumPy arrays, which are copied to the device in every "
            "call; jax.device_put(params) copies them once"
        )
    unchanged = {key for key, array in owned.items() if not array.flags.writeable}
    # A local dict, as another thread may change the shared one.
    copies = {key: copy for key, copy in list(_latest_copies.items()) if key in unchanged}
    _latest_copies.clear()  # frees the memory of other parameters first
    for key, array in owned.items():
        if key not in copies:
            array.flags.writeable = False
            forget = weakref.ref(array, lambda _, key=key: _latest_copies.pop(key, None))
            copies[key] = forget, jax.device_put(array)
    _latest_copies.update(copies)
    return jax.tree.unflatten(tree, [copies[id(x)][1] if id(x) in copies else x for x in leaves])


def _program_of(pipeline, jit, arrays, options, text_modules):
    """What a call's program depends on: a frozenset of (name, value)."""
    scheduler = pipeline.scheduler
    types = {
        name: f"{x.dtype}{list(x.shape)}"
        for name, x in arrays.items()
        if name != "params" and x is not None
    }
    weights = {name: tree for name, tree in arrays["params"].items() if name in MODULES}
    dtypes = {str(x.dtype) for x in jax.tree.leaves(weights)}
    settings = {
        "scheduler": f"{type(scheduler).__name__} {sorted(scheduler.config.items())}",
        "params": "/".join(sorted(dtypes)),
        "text encoders": str([dict(module.config) for module in text_modules]),
    }
    return frozenset({"jit": jit, **options, **types, **settings}.items())


def _text_modules(pipeline):
    """The modules of the text encoders, the only parts of a pipeline whose config may change."""
    encoders = (getattr(pipeline, name, None) for name in TEXT_ENCODERS.values())
    return tuple(encoder.module for encoder in encoders if encoder is not None)


def _call(pipeline, compiled_in, arrays, shared):
    options, _ = compiled_in
    return pipeline._generate(**dict(options), **arrays, **shared)


_on_one = jax.jit(_call, static_argnums=(0, 1))
_on_devices = jax.pmap(_call, static_broadcasted_argnums=(0, 1), in_axes=(None, None, 0, None))
