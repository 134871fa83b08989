"""Trees of parameters: casting them, and replacing their arrays without holding them twice."""

import jax
import jax.numpy as jnp


def replace_leaves(function, params):
    """Replace every array of parameters by function(array), in place, one at a time.

    Only one array is in memory twice: each call waits for the devices, which copy in the
    background. Old arrays stay in memory if something else refers to them.

    Args:
        function: array -> array.
        params: nested dict.
    """
    for name, value in params.items():
        if isinstance(value, dict):
            replace_leaves(function, value)
        else:
            params[name] = jax.block_until_ready(jax.tree.map(function, value))


def cast_floating(params, dtype, mask=None):
    """Cast the floating-point arrays of a parameter tree.

    Args:
        params: tree of NumPy and JAX arrays.
        dtype: what to cast to.
        mask: tree of bools of the same structure; arrays marked False stay as they are. None
            casts all.

    Returns:
        A new tree.
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
