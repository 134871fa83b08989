"""Group and layer normalisation, whose gradients save their input only, and their modules."""

import math
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.errors import ScopeParamShapeError
from jax.typing import DTypeLike

from diffusers_flax.models.spatial_parallelism import global_moments


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6, 7))
def group_norm(x, scale, bias, num_groups, epsilon, activate, dtype, rows_axis=None):
    """Group normalisation over the last axis, then SiLU if activate; the gradient saves x only.

    Channels stay the innermost axis: means are taken per channel, then over each group.

    Args:
        x: (B, ..., C), C divisible by num_groups.
        scale, bias: (C,).
        num_groups, epsilon: of the normalisation.
        activate: True applies SiLU.
        dtype: of the result; the computation is float32.
        rows_axis: as GroupNorm's; the gradient is correct for None only.

    Returns:
        (B, ..., C).

    Source: arXiv 1803.08494.
    """
    return _group_norm_forward(x, scale, bias, num_groups, epsilon, activate, dtype, rows_axis)[0]


def _per_group(x, num_groups):
    """Channels' means (B, C) -> their groups' means (B, 1, C)."""
    B, C = x.shape
    means = x.reshape(B, num_groups, -1).mean(-1)
    return jnp.repeat(means, C // num_groups, axis=1)[:, None]


def _in_memory(x, g):
    """x and g unchanged; on GPUs a kernel writes both, in the dtype of x, and others read them."""

    def write(x, g):
        x, rounded = jax.lax.optimization_barrier((x, g.astype(x.dtype)))
        return x, rounded.astype(g.dtype)

    return jax.lax.platform_dependent(x, g, cuda=write, default=lambda x, g: (x, g))


BLOCK = 32  # neighbours whose values a GPU's thread joins; a block's results go through the memory


def _blocks(x):
    """x (B, N, C) -> its values in blocks of at most BLOCK neighbours: list of (B, blocks, C)."""
    B, N, C = x.shape
    size = math.gcd(N, BLOCK)
    x = x.reshape(B, N // size, size, C)
    return [x[:, :, i] for i in range(size)]


def _in_pairs(join, values):
    """Join values, 2^k of them, two at a time."""
    while len(values) > 1:
        values = [join(a, b) for a, b in zip(values[::2], values[1::2])]
    return values[0]


def _add_exactly(a, b):
    """(a + b rounded, what the rounding has lost). Source: Knuth's TwoSum."""
    total = a + b
    b_part = total - a
    return total, (a - (total - b_part)) + (b - b_part)


def _halves(x):
    """x as a sum of two float32 numbers of at most 12 bits, whose products are exact."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & np.uint32(0xFFFFF000)
    high = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return high, x - high


def _multiply_exactly(a, b):
    """(high, low) parts of a b; the high part is exact, so a fused multiply-add changes nothing."""
    (a1, a2), (b1, b2) = _halves(a), _halves(b)
    return a1 * b1, a1 * b2 + (a2 * b1 + a2 * b2)


def _exact_sums(highs, lows, axis):
    """Sums over an axis of numbers that have a high and a low part: (highs, lows)."""
    k = len(highs)

    def add(x, y):
        sums = [_add_exactly(a, b) for a, b in zip(x[:k], y[:k])]
        lost = [a + b + error for a, b, (_, error) in zip(x[k:], y[k:], sums)]
        return *(total for total, _ in sums), *lost

    operands = (*highs, *lows)
    sums = jax.lax.reduce(operands, (np.float32(0),) * len(operands), add, (axis,))
    return sums[:k], sums[k:]


def _two_sums(a, b):
    """Sums of a and b, float32 (B, N, C), over N; on GPUs one kernel reads both."""

    def at_once(a, b):
        sums = [_in_pairs(jnp.add, _blocks(x)) for x in (a, b)]
        sums = jax.lax.optimization_barrier(sums)
        sums, lost = _exact_sums(sums, [jnp.zeros_like(x) for x in sums], 1)
        return jax.lax.optimization_barrier(tuple(map(jnp.add, sums, lost)))

    def each(a, b):
        return a.sum(1), b.sum(1)

    return jax.lax.platform_dependent(a, b, cuda=at_once, default=each)


def _moments(x, num_groups):
    """Means and variances of the groups of x (B, ..., C): float32 (B, 1, C) each.

    On GPUs one pass over the memory gives both. Blocks of neighbours have a mean and a sum of
    squared differences to it; these, and the squares of the means, are added without rounding.

    Source: Chan, Golub and LeVeque, Algorithms for computing the sample variance (1983).
    """

    def one_pass(flat):
        B, N, C = flat.shape
        values = _blocks(flat)
        size, group = len(values), C // num_groups

        def join(a, b):  # two blocks of n values; the differences' sum of squares is n/2 d^2
            (mean, squares, n), (other, others, _) = a, b
            d = other - mean
            return mean + d / 2, squares + others + d * d * (n / 2), 2 * n

        means, squares, _ = _in_pairs(join, [(x, jnp.zeros_like(x), 1) for x in values])
        means, squares = jax.lax.optimization_barrier((means, squares))
        zeros = jnp.zeros_like(means)
        high, low = _multiply_exactly(means, means)
        sums = _exact_sums((means, squares, high), (zeros, zeros, low), 1)
        sums = jax.lax.optimization_barrier(sums)
        per_group = jax.tree.map(lambda x: x.reshape(B, num_groups, group), sums)
        (total, within, square), lost = _exact_sums(*per_group, 2)
        n = jnp.float32(N // size * group)  # blocks of a group
        mean = (total + lost[0]) / n
        # sum (m - mean)^2 = sum m^2 - mean (2 sum m - n mean), of large numbers that nearly cancel
        high, low = _multiply_exactly(mean, n)
        difference, difference_lost = _add_exactly(2 * total, -high)
        difference_lost = difference_lost + 2 * lost[0] - low
        high, low = _multiply_exactly(mean, difference)
        between, between_lost = _add_exactly(square, -high)
        between = between + (between_lost + lost[2] - low - mean * difference_lost)
        variance = (within + lost[1] + size * jnp.maximum(between, 0)) / (size * n)
        return tuple(jnp.repeat(x, group, axis=1)[:, None] for x in (mean, variance))

    def two_passes(flat):
        group_mean = _per_group(flat.mean(1), num_groups)
        return group_mean, _per_group(jnp.square(flat - group_mean).mean(1), num_groups)

    flat = x.reshape(x.shape[0], -1, x.shape[-1]).astype(jnp.float32)  # (B, N, C)
    return jax.lax.platform_dependent(flat, cuda=one_pass, default=two_passes)


def _normalized(x, scale, bias, mean, rstd):
    """(x standardised, x also scaled and shifted), float32 (B, N, C)."""
    standard = (x.reshape(x.shape[0], -1, x.shape[-1]).astype(jnp.float32) - mean) * rstd
    return standard, standard * scale.astype(jnp.float32) + bias.astype(jnp.float32)


def _group_norm_forward(x, scale, bias, num_groups, epsilon, activate, dtype, rows_axis):
    group_mean, variance = _moments(x, num_groups)
    if rows_axis is not None:
        group_mean, variance = global_moments(group_mean, variance, rows_axis)
    rstd = jax.lax.rsqrt(variance + epsilon)
    _, out = _normalized(x, scale, bias, group_mean, rstd)
    out = nn.silu(out) if activate else out
    return out.astype(dtype).reshape(x.shape), (x, scale, bias, group_mean, rstd)


def _group_norm_backward(num_groups, epsilon, activate, dtype, rows_axis, kept, g):
    # On GPUs three passes over the memory: SiLU's gradient, the sums, the result. XLA alone makes
    # more, and keeps float32 arrays between them and from the forward pass.
    x, scale, bias, mean, rstd = kept
    x, g = _in_memory(x, g)
    standard, out = _normalized(x, scale, bias, mean, rstd)
    g = g.reshape(standard.shape).astype(jnp.float32)
    if activate:
        sigmoid = jax.nn.sigmoid(out)
        x, g = _in_memory(x, g * sigmoid * (1 + out * (1 - sigmoid)))
        standard, _ = _normalized(x, scale, bias, mean, rstd)
    sums, weighted_sums = _two_sums(g, g * standard)  # (B, C)
    scale32, num_values = scale.astype(jnp.float32), standard.shape[1]
    g_mean = _per_group(sums * scale32 / num_values, num_groups)
    g_slope = _per_group(weighted_sums * scale32 / num_values, num_groups)
    g_x = (g * scale32 - g_mean - standard * g_slope) * rstd
    return (
        g_x.astype(x.dtype).reshape(x.shape),
        weighted_sums.sum(0).astype(scale.dtype),
        sums.sum(0).astype(bias.dtype),
    )


group_norm.defvjp(_group_norm_forward, _group_norm_backward)
group_norm = jax.jit(group_norm, static_argnums=(3, 4, 5, 6, 7))  # traced once for each shape


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def layer_norm(x, scale, bias, epsilon, dtype):
    """Layer normalisation over the last axis; the gradient saves x only.

    Args:
        x: (..., C).
        scale, bias: (C,).
        epsilon: of the normalisation.
        dtype: of the result; the computation is float32.

    Returns:
        (..., C).

    Source: arXiv 1607.06450.
    """
    return _layer_norm_forward(x, scale, bias, epsilon, dtype)[0]


def _layer_norm_forward(x, scale, bias, epsilon, dtype):
    centred = x.astype(jnp.float32)
    mean = centred.mean(-1, keepdims=True)
    centred = centred - mean
    rstd = jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + epsilon)
    out = centred * rstd * scale.astype(jnp.float32) + bias.astype(jnp.float32)
    return out.astype(dtype), (x, scale, bias, mean, rstd)


def _layer_norm_backward(epsilon, dtype, kept, g):
    x, scale, bias, mean, rstd = kept
    standard = (x.astype(jnp.float32) - mean) * rstd
    g = g.astype(jnp.float32)
    g_standard = g * scale.astype(jnp.float32)
    slope = (g_standard * standard).mean(-1, keepdims=True)
    g_x = (g_standard - g_standard.mean(-1, keepdims=True) - standard * slope) * rstd
    axes = tuple(range(x.ndim - 1))
    g_scale, g_bias = (g * standard).sum(axes), g.sum(axes)
    return g_x.astype(x.dtype), g_scale.astype(scale.dtype), g_bias.astype(bias.dtype)


layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)
layer_norm = jax.jit(layer_norm, static_argnums=(3, 4))


class NoInitTrace:
    """Mixin of modules: a call with parameters does not trace their initializers.

    Flax traces them in each call to compare shapes, a third of the time of tracing SDXL's UNet.
    Parameters must be arrays, not boxes of flax.linen.meta.
    """

    def param(self, name, init, shape, dtype=jnp.float32):
        """As flax.linen.Module.param, for initializers of (key, shape, dtype)."""
        if not self.has_variable("params", name):
            return super().param(name, init, shape, dtype)
        value = self.get_variable("params", name)
        if value.shape != shape:
            raise ScopeParamShapeError(name, self.scope.path_text, value.shape, shape)
        return value


def _scale_and_bias(module, num_channels):
    scale = module.param("scale", nn.initializers.ones, (num_channels,))
    return scale, module.param("bias", nn.initializers.zeros, (num_channels,))


class GroupNorm(NoInitTrace, nn.Module):
    """Group normalisation of (B, ..., C) over the last axis, then SiLU if activate; group_norm."""

    num_groups: int = 32
    epsilon: float = 1e-5
    dtype: DTypeLike = jnp.float32
    activate: bool = False
    rows_axis: str | tuple | None = None

    @nn.compact
    def __call__(self, x):
        scale, bias = _scale_and_bias(self, x.shape[-1])
        options = self.num_groups, self.epsilon, self.activate, self.dtype, self.rows_axis
        return group_norm(x, scale, bias, *options)


class LayerNorm(NoInitTrace, nn.Module):
    """Layer normalisation over the last axis; layer_norm."""

    epsilon: float = 1e-5
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x):
        return layer_norm(x, *_scale_and_bias(self, x.shape[-1]), self.epsilon, self.dtype)
