"""Layers and blocks of UNet, ControlNet and VAE, from norms to transformers.

Everything here works channels-last, (B, H, W, C). Matmuls, convolutions and stored activations use
`dtype`; norms accumulate in float32 and return `dtype`. `rows_axis` is the mesh's axis, or a tuple
of axes, along which the rows of feature maps are sharded (spatial_parallelism.py); None: this
device has all rows. Submodules have the names of the published Flax checkpoints.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.errors import ScopeParamShapeError
from jax.tree_util import Partial
from jax.typing import DTypeLike

from diffusers_flax.models.attention import attention, cuda_capability, pad_keys
from diffusers_flax.models.convolution import convolve
from diffusers_flax.models.quantization import eight_bit_layer, is_eight_bit
from diffusers_flax.models.spatial_parallelism import gather_positions, global_moments, with_halo

# Name prefixes of blocks that gradient checkpointing recomputes.
CHECKPOINTED_BLOCKS = ("resnets_", "transformer_blocks_")


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


class Conv(NoInitTrace, nn.Module):
    """A convolution; its parameters may be in 8 bits or have LoRA factors; convolve."""

    features: int
    size: int = 3
    stride: int = 1
    padding: tuple | None = None  # None: size // 2 on all sides
    dtype: DTypeLike = jnp.float32
    use_bias: bool = True
    starts_at_zero: bool = False
    rows_axis: str | tuple | None = None

    @nn.compact
    def __call__(self, x):
        """x (B, H, W, C) -> (B, h, w, features)."""
        shape = (self.size, self.size, x.shape[-1], self.features)
        init = nn.initializers.zeros if self.starts_at_zero else nn.initializers.lecun_normal()
        kernel = self.param("kernel", init, shape)
        bias = []
        if self.use_bias:
            bias = [self.param("bias", nn.initializers.zeros, (self.features,))]
        params = self.variables["params"]
        padding = self.padding
        if padding is None:
            padding = ((self.size // 2, self.size // 2),) * 2
        if self.rows_axis is not None:
            x, padding = with_halo(x, self.size, self.stride, padding, self.rows_axis)
        apply_kernel = partial(convolve, stride=self.stride, padding=padding)
        if is_eight_bit(params):
            out = eight_bit_layer(params, x, self.dtype, self.stride, padding, self.rows_axis)
        else:
            x, kernel, *bias = (y.astype(self.dtype) for y in (x, kernel, *bias))
            out = sum(bias, apply_kernel(x, kernel))
        if "lora_A" in params:
            x, out = unmerged(x, out)
            out = out + lora_product(params, x, self.dtype, apply_kernel)
        return out


def lora_product(params, x, dtype, apply_kernel=jnp.matmul):
    """The output that LoRA adds to a layer's output.

    Args:
        params: the layer's parameters, with lora_A, lora_B and lora_scale.
        x: the layer's input.
        dtype: compute dtype.
        apply_kernel: (x, kernel) -> output, for A; B is a matrix.
    """
    a, b = (params[name]["kernel"].astype(dtype) for name in ("lora_A", "lora_B"))
    b = b.reshape(b.shape[-2:])  # (1, 1, rank, out) of a convolution
    return apply_kernel(x.astype(dtype), a) @ b * params["lora_scale"].astype(dtype)


class Dense(NoInitTrace, nn.Dense):
    """A dense layer; its parameters may be in 8 bits or have LoRA factors."""

    def __call__(self, x):
        """x (..., C) -> (..., features)."""
        params = self.variables.get("params", {})  # none before init
        if is_eight_bit(params):
            out = eight_bit_layer(params, x, self.dtype)
        else:
            out = super().__call__(x)
        if "lora_A" in params:
            x, out = unmerged(x, out)
            out = out + lora_product(params, x, self.dtype)
        return out


class ResnetBlock2D(nn.Module):
    """Twice norm, SiLU and 3x3 convolution, with the time embedding in between; plus the input."""

    out_channels: int
    num_groups: int = 32
    epsilon: float = 1e-5
    dtype: DTypeLike = jnp.float32
    rows_axis: str | tuple | None = None

    @nn.compact
    def __call__(self, x, time_emb=None):
        """x (B, H, W, C), time_emb (B, D) or None -> (B, H, W, out_channels)."""
        options = {"dtype": self.dtype, "rows_axis": self.rows_axis}
        norm = partial(GroupNorm, self.num_groups, self.epsilon, activate=True, **options)
        conv = partial(Conv, self.out_channels, **options)
        h = norm(name="norm1")(x)
        h = conv(name="conv1")(h)
        if time_emb is not None:
            dense = Dense(self.out_channels, dtype=self.dtype, name="time_emb_proj")
            time_emb, h = unmerged(time_emb, h)
            h = h + dense(nn.silu(time_emb))[:, None, None, :]
        h = norm(name="norm2")(h)
        h = conv(name="conv2")(h)
        if x.shape[-1] != self.out_channels:
            x = conv(size=1, name="conv_shortcut")(x)
        return x + h


class Downsample2D(nn.Module):
    """Halve height and width by a 3x3 convolution of stride 2."""

    out_channels: int
    padding: tuple = ((1, 1), (1, 1))  # the VAE pads ((0, 1), (0, 1)), as it was trained
    dtype: DTypeLike = jnp.float32
    rows_axis: str | tuple | None = None

    @nn.compact
    def __call__(self, x):
        options = {"padding": self.padding, "dtype": self.dtype, "rows_axis": self.rows_axis}
        return Conv(self.out_channels, stride=2, name="conv", **options)(x)


class Upsample2D(nn.Module):
    """Nearest-neighbour upsampling, then a 3x3 convolution."""

    out_channels: int
    dtype: DTypeLike = jnp.float32
    rows_axis: str | tuple | None = None

    @nn.compact
    def __call__(self, x, shape=None):
        """x (B, H, W, C), shape (height, width) or None to double -> (B, *shape, out_channels)."""
        _, H, W, _ = x.shape
        if shape is None or tuple(shape) == (2 * H, 2 * W):
            x = repeat_pixels(x, 2)
        else:  # the skip connection has an odd height or width
            rows, columns = (np.arange(n) * m // n for n, m in zip(shape, (H, W)))
            x = x[:, rows][:, :, columns]
        options = {"dtype": self.dtype, "rows_axis": self.rows_axis}
        return Conv(self.out_channels, name="conv", **options)(x)


def repeat_pixels(x, factor):
    """Nearest-neighbour upsampling: x (B, H, W, C) -> (B, factor H, factor W, C)."""
    B, H, W, C = x.shape
    x = jnp.broadcast_to(x[:, :, None, :, None], (B, H, factor, W, factor, C))
    return x.reshape(B, factor * H, factor * W, C)


def unmerged(x, product):
    """(x, product of x) such that other products of this x are matmuls of their own on NVIDIA GPUs.

    XLA there joins matmuls of one operand, and concatenates their kernels in each step.
    """
    if cuda_capability() is None:
        return x, product
    return jax.lax.optimization_barrier((x, product))


# Collection of variables with the keys and values of the text, see project_text.
TEXT = "text"


def project_text(params, states, dtype):
    """Keys and values of the text, which a loop over steps computes once.

        variables = {"params": params, TEXT: project_text(params, states, unet.dtype)}
        unet.apply(variables, sample, t, states)  # as with the parameters alone

    Args:
        params: of a UNet or ControlNet, or of several.
        states: text states (B, S, D).
        dtype: compute dtype of the model.

    Returns:
        {block: ... {"attn2": {"key", "value": (B, S, dim)}}}, S even for cuDNN, see pad_keys.
        Layers with kernels in the host's memory, which they fetch, are left out.
    """
    states = states.astype(dtype)

    def project(layer):
        features = layer["kernel"].shape[-1]
        dense = Dense(features, use_bias=False, dtype=dtype)
        product = dense.apply({"params": layer}, states)
        return product if cuda_capability() is None else pad_keys(product)

    found = {}
    for name, tree in params.items():
        if name == "attn2":
            if jax.typeof(tree["to_k"]["kernel"]).memory_space == jax.memory.Space.Host:
                continue
            found[name] = {"key": project(tree["to_k"]), "value": project(tree["to_v"])}
        elif isinstance(tree, Mapping) and (inside := project_text(tree, states, dtype)):
            found[name] = inside
    return found


class Attention(nn.Module):
    """Multi-head attention of x to itself or to a context; query, key and value have no bias."""

    dim: int
    num_heads: int
    dtype: DTypeLike = jnp.float32
    rows_axis: str | tuple | None = None

    @nn.compact
    def __call__(self, x, context=None):
        """x (B, T, dim), context (B, S, D) or None for x itself -> (B, T, dim)."""
        is_self_attention = context is None
        context = x if is_self_attention else context
        query = Dense(self.dim, use_bias=False, dtype=self.dtype, name="to_q")(x)
        num_keys = None
        if self.has_variable(TEXT, "key"):
            key, value = (self.get_variable(TEXT, name) for name in ("key", "value"))
            num_keys = context.shape[1]
        else:
            context, query = unmerged(context, query)
            key = Dense(self.dim, use_bias=False, dtype=self.dtype, name="to_k")(context)
            context, key = unmerged(context, key)
            value = Dense(self.dim, use_bias=False, dtype=self.dtype, name="to_v")(context)
        if is_self_attention and self.rows_axis is not None:
            key, value = (gather_positions(each, self.rows_axis) for each in (key, value))
        if is_self_attention:
            out = self.attend_to_itself(query, key, value)
        else:
            out = attention(query, key, value, self.num_heads, num_keys=num_keys)
        return Dense(self.dim, dtype=self.dtype, name="to_out_0")(out)

    def attend_to_itself(self, query, key, value):
        """Self-attention of projected x, as attention; a method, so that it can be intercepted."""
        return attention(query, key, value, self.num_heads)


@jax.custom_vjp
def gated_gelu(x):
    """x (..., 2 C) -> (..., C): the first half times the second's GELU; saves x only.

    GELU is float32 and rounded to x's dtype, as in PyTorch. The erfc of jax.nn.gelu needs 83
    instructions per number (PTX, sm_90), erf 32, so that a GPU's memory is the limit.

    Source: GLU variants (arXiv 2002.05202), equation 6.
    """
    hidden, gate = jnp.split(x, 2, -1)
    gate = gate.astype(jnp.float32)
    return hidden * (gate * _normal_cdf(gate)).astype(x.dtype)


def _normal_cdf(x):
    """The probability that a standard normal number is below x, float32."""
    return 0.5 * (1 + jax.lax.erf(x * 2**-0.5))


def _gated_gelu_backward(x, g):
    hidden, gate, g = (y.astype(jnp.float32) for y in (*jnp.split(x, 2, -1), g))
    cdf = _normal_cdf(gate)
    slope = cdf + gate * jnp.exp(-0.5 * jnp.square(gate)) * (2 * np.pi) ** -0.5
    return (jnp.concatenate((g * gate * cdf, g * hidden * slope), -1).astype(x.dtype),)


gated_gelu.defvjp(lambda x: (gated_gelu(x), x), _gated_gelu_backward)
gated_gelu = jax.jit(gated_gelu)


class GEGLU(nn.Module):
    """A projection whose first half is gated by the GELU of its second half; see gated_gelu."""

    dim_out: int
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x):
        return gated_gelu(Dense(2 * self.dim_out, dtype=self.dtype, name="proj")(x))


class FeedForward(nn.Module):
    """GEGLU to four times the width and back."""

    dim: int
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x):
        x = GEGLU(4 * self.dim, dtype=self.dtype, name="net_0")(x)
        return Dense(self.dim, dtype=self.dtype, name="net_2")(x)


class BasicTransformerBlock(nn.Module):
    """Self-attention, cross-attention, feed-forward, each with a norm and a residual."""

    dim: int
    num_heads: int
    only_cross_attention: bool = False  # True: the first attention also reads the context
    dtype: DTypeLike = jnp.float32
    rows_axis: str | tuple | None = None

    @nn.compact
    def __call__(self, x, context):
        """x (B, T, dim), context (B, S, D) -> (B, T, dim)."""
        attend = partial(Attention, self.dim, self.num_heads, self.dtype, self.rows_axis)
        normed = LayerNorm(dtype=self.dtype, name="norm1")(x)
        first_context = context if self.only_cross_attention else None
        x = x + attend(name="attn1")(normed, first_context)
        normed = LayerNorm(dtype=self.dtype, name="norm2")(x)
        x = x + attend(name="attn2")(normed, context)
        normed = LayerNorm(dtype=self.dtype, name="norm3")(x)
        return x + FeedForward(self.dim, self.dtype, name="ff")(normed)


class Transformer2D(nn.Module):
    """Transformer blocks over the positions of a feature map, plus the input."""

    num_heads: int
    num_layers: int = 1
    num_groups: int = 32
    use_linear_projection: bool = False  # False: proj_in and proj_out are 1x1 convolutions
    only_cross_attention: bool = False
    gradient_checkpointing: bool = False
    dtype: DTypeLike = jnp.float32
    rows_axis: str | tuple | None = None

    @nn.compact
    def __call__(self, x, context):
        """x (B, H, W, C), context (B, S, D) -> (B, H, W, C)."""
        B, H, W, C = x.shape
        block = checkpointed(BasicTransformerBlock, self.gradient_checkpointing)
        options = {"dtype": self.dtype, "rows_axis": self.rows_axis}
        h = GroupNorm(self.num_groups, epsilon=1e-6, name="norm", **options)(x)
        if self.use_linear_projection:
            h = Dense(C, dtype=self.dtype, name="proj_in")(h.reshape(B, H * W, C))
        else:
            h = Conv(C, 1, name="proj_in", **options)(h).reshape(B, H * W, C)
        for i in range(self.num_layers):
            h = block(
                C,
                self.num_heads,
                only_cross_attention=self.only_cross_attention,
                name=f"transformer_blocks_{i}",
                **options,
            )(h, context)
        if self.use_linear_projection:
            h = Dense(C, dtype=self.dtype, name="proj_out")(h).reshape(B, H, W, C)
        else:
            h = Conv(C, 1, name="proj_out", **options)(h.reshape(B, H, W, C))
        return x + h


def checkpointed(module: Callable, enabled: bool) -> Callable:
    """The module class; if enabled, the backward pass recomputes its activations.

    Parameters may then be functions that return arrays (training.sharding.gather_by_block), which
    the backward pass calls again instead of keeping the arrays.
    """
    if not enabled:
        return module
    return nn.remat(nn.map_variables(module, "params", trans_in_fn=make_arrays, init=True))


def make_arrays(params):
    """Replace each jax.tree_util.Partial in a tree by the array that it returns."""
    return jax.tree.map(
        lambda x: x() if isinstance(x, Partial) else x,
        params,
        is_leaf=lambda x: isinstance(x, Partial),
    )
