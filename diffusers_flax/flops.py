"""FLOPs of a traced program.

matmul_flops(jax.make_jaxpr(function)(*args).jaxpr)
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxprs_in_params


class Scoped(NamedTuple):
    """All conditions in a jax.named_scope: the fraction of trips in which each branch runs."""

    scope: str
    fractions: tuple


def split_switches(switches):
    """(fractions of the switches in loops, {scope: fractions}) of matmul_flops' switches."""
    scoped = {x.scope: x.fractions for x in switches if isinstance(x, Scoped)}
    return [x for x in switches if not isinstance(x, Scoped)], scoped


def in_scope(scoped, name):
    """The fractions for an operation in named scopes, name: scopes and operation; or None."""
    return next((fractions for scope, fractions in scoped.items() if scope in name), None)


def matmul_flops(jaxpr, switches=()):
    """FLOPs of a traced program's matmuls and convolutions.

    For jax.lax.platform_dependent the default, XLA's own operations, counts: kernels hide their
    FLOPs, and other algorithms have fewer.

    Args:
        jaxpr: its Jaxpr. A loop counts once per trip, a loop with unknown trips once.
        switches: for each `lax.switch` in a loop, in their order, the fraction of trips per branch;
            and Scoped. For other conditions the branch with the most FLOPs counts.

    Returns:
        (number of all FLOPs, number of FLOPs with int8 operands).
    """
    in_loops, scoped = split_switches(switches)
    fractions = iter(in_loops)

    def count(jaxpr, in_switch=False):
        total = np.zeros(2)
        for equation in jaxpr.eqns:
            name, params = equation.primitive.name, equation.params
            platforms = params.get("branches_platforms", ())  # None is the default
            if name in ("dot_general", "conv_general_dilated"):
                flops = 2 * multiply_adds(name, equation)
                is_int8 = all(x.aval.dtype == jnp.int8 for x in equation.invars)
                total += [flops, flops * is_int8]
            elif None in platforms:
                total += count(params["branches"][platforms.index(None)].jaxpr, in_switch)
            elif name == "cond" and len(params["branches"]) > 1:
                costs = np.array([count(branch.jaxpr, True) for branch in params["branches"]])
                fraction = in_scope(scoped, str(equation.source_info.name_stack))
                if fraction is None and not in_switch:
                    fraction = next(fractions, None)
                total += costs.max(0) if fraction is None else np.array(fraction) @ costs
            else:
                trips = params["length"] if name == "scan" else 1
                inner = jaxprs_in_params(params)
                total += trips * sum((count(x, in_switch) for x in inner), np.zeros(2))
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
