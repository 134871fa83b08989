"""FLOPs of a traced program.

matmul_flops(jax.make_jaxpr(function)(*args).jaxpr)
"""

import math

import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxprs_in_params


def matmul_flops(jaxpr, fractions=None):
    """FLOPs of a traced program's matmuls and convolutions.

    For jax.lax.platform_dependent the default, XLA's own operations, counts: kernels hide their
    FLOPs, and other algorithms have fewer.

    Args:
        jaxpr: its Jaxpr. A loop counts once per trip, a loop with unknown trips once.
        fractions: {jax.named_scope around a condition: the fraction of its runs in which each
            branch is taken}; of other conditions the branch with the most FLOPs counts.

    Returns:
        (number of all FLOPs, number of FLOPs with int8 operands).
    """
    scopes = fractions or {}

    def count(jaxpr):
        total = np.zeros(2)
        for equation in jaxpr.eqns:
            name, params = equation.primitive.name, equation.params
            platforms = params.get("branches_platforms", ())  # None is the default
            if name in ("dot_general", "conv_general_dilated"):
                flops = 2 * multiply_adds(name, equation)
                is_int8 = all(x.aval.dtype == jnp.int8 for x in equation.invars)
                total += [flops, flops * is_int8]
            elif None in platforms:
                total += count(params["branches"][platforms.index(None)].jaxpr)
            elif name == "cond":
                costs = np.array([count(branch.jaxpr) for branch in params["branches"]])
                scope = str(equation.source_info.name_stack).rpartition("/")[2]
                total += np.array(scopes[scope]) @ costs if scope in scopes else costs.max(0)
            else:
                trips = params["length"] if name == "scan" else 1
                total += trips * sum((count(x) for x in jaxprs_in_params(params)), np.zeros(2))
        return total

    return tuple(count(jaxpr).tolist())


def multiply_adds(name, equation):
    """Multiply-adds of a dot_general or convolution in a jaxpr."""
    left, right = (x.aval.shape for x in equation.invars)
    out = equation.outvars[0].aval.shape
    if name == "dot_general":
        (summed, _), _ = equation.params["dimension_numbers"]
        return math.prod(out) * math.prod(left[axis] for axis in summed)
    outputs, *_ = equation.params["dimension_numbers"].rhs_spec  # the axis of output channels
    # Zeros between inputs, in gradients of strided convolutions, do not count.
    zeros = math.prod(equation.params["lhs_dilation"])
    return math.prod(out) * math.prod(right) // (right[outputs] * zeros)
