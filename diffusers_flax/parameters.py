"""Parameters of a pipeline: replacing their arrays without holding them twice."""

import jax


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
