"""Trees of parameters: casting them, and replacing their arrays in place."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import jax_utils

from diffusers_flax.messages import warn_once


def replace_leaves(function, params):
    """Replace every array of parameters by function(array), in place, one at a time.

    It waits for the devices, which copy in the background, so one array at a time is in memory
    twice; old arrays stay if something else refers to them.
    """
    for name, value in params.items():
        if isinstance(value, dict):
            replace_leaves(function, value)
        else:
            params[name] = jax.block_until_ready(jax.tree.map(function, value))


def cast_floating(params, dtype, mask=None):
    """A new tree with the floating-point arrays in a dtype.

    mask: tree of bools of the same structure, False for arrays to leave as they are; None: all.
    """
    if mask is None:
        mask = jax.tree.map(lambda _: True, params)

    def cast(array, is_selected):
        is_floating = jnp.issubdtype(array.dtype, jnp.floating)
        return array.astype(dtype) if is_selected and is_floating else array

    return jax.tree.map(cast, params, mask)


class FloatingCasts:
    """The published methods that cast parameters; see cast_floating."""

    def to_bf16(self, params, mask=None):
        """Parameters in bfloat16."""
        return cast_floating(params, jnp.bfloat16, mask)

    def to_fp16(self, params, mask=None):
        """Parameters in float16."""
        return cast_floating(params, jnp.float16, mask)

    def to_fp32(self, params, mask=None):
        """Parameters in float32."""
        return cast_floating(params, jnp.float32, mask)


def warn_of_float16(params, model="UNet"):
    """Warn once if parameters are float16, in which a model cannot be trained."""
    if any(x.dtype == jnp.float16 for x in jax.tree.leaves(params)):
        warn_once(
            f"the {model}'s parameters are float16, as in its file: good for sampling, but updates "
            "in float16 end in NaN; to train it take from_pretrained(..., param_dtype=jnp.float32)"
        )


def cast_params(pipeline, params):
    """Cast a pipeline's parameters, in place, to their compute dtype.

    This is pipeline.dtype; float32 for a VAE with force_upcast; int8 for the UNet's kernels if the
    pipeline's acceleration says so. The scheduler's state, and kernels in the pipeline's storage
    with their scales, stay as they are.

    Args:
        pipeline: from open or from_pretrained.
        params: its parameters, arrays on the host.
    """
    for name in params.keys() - {"scheduler", "safety_checker"}:
        dtype = pipeline.compute_vae.dtype if name == "vae" else pipeline.dtype
        _cast(params[name], dtype, pipeline.storage)
    pipeline.quantize_params(params)


def _cast(params, dtype, storage):
    """Cast arrays in place, except kernels in 8 bits and their scales if there is a storage."""
    for name, x in params.items():
        if isinstance(x, dict):
            _cast(x, dtype, storage)
        elif not storage or not is_stored_array(name, x):
            params[name] = np.asarray(x, dtype=dtype)


def is_stored_array(name, x):
    """Whether an array, with its path, is a kernel in 8 bits or the scale of one."""
    return np.dtype(x.dtype).itemsize == 1 or name.rpartition("/")[2] == "weight_scale"


def replicate_params(params, devices):
    """Replace parameters by their copies on every device, one array at a time."""
    replace_leaves(lambda x: jax_utils.replicate(x, devices), params)


def place_params(params, devices, layout=None):
    """Place parameters on devices as a Layout says; None: copies on every device."""
    if layout is None:
        replicate_params(params, devices)
    else:
        layout.place_params(params)
