"""Blocks of UNet, VAE and CLIP: norms, convolutions, residual blocks, transformers, resampling.

Everything here works channels-last, (B, H, W, C). Matmuls, convolutions and stored activations use
`dtype`; norms accumulate in float32 and return `dtype`. `rows_axis` is the mesh's axis, or a tuple
of axes, along which the rows of feature maps are sharded (spatial_parallelism.py); None: this
device has all rows. Submodules have the names of the published Flax checkpoints.
"""

from collections.abc import Callable
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from flax.errors import ScopeParamShapeError
from jax.tree_util import Partial
from jax.typing import DTypeLike

from diffusers_flax.models.attention import attention, attention_weights
from diffusers_flax.models.convolution import convolve
from diffusers_flax.models.quantization import eight_bit_layer, is_eight_bit
from diffusers_flax.models.spatial_parallelism import gather_positions, global_moments, with_halo
from diffusers_flax.outputs import ModelOutput

# How the names of blocks begin that a UNet with gradient_checkpointing recomputes.
CHECKPOINTED_BLOCKS = ("resnets_", "transformer_blocks_")


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6, 7))
def group_norm(x, scale, bias, num_groups, epsilon, activate, dtype, rows_axis=None):
    """Group normalisation over the last axis, SiLU if activate; only x is saved for the gradient.

    Channels stay the innermost axis throughout: means are taken per channel, then over each group.

    Args:
        x: (B, ..., C), C divisible by num_groups.
        scale, bias: (C,).
        num_groups, epsilon: of the normalisation.
        activate: True: SiLU of the result.
        dtype: of the result; everything before it is float32.
        rows_axis: of GroupNorm. The gradient is right for None only.

    Returns:
        (B, ..., C).

    Source: arXiv 1803.08494.
    """
    return _group_norm_forward(x, scale, bias, num_groups, epsilon, activate, dtype, rows_axis)[0]


def _per_group(x, num_groups):
    """Means of channels (B, C) -> mean of each channel's group (B, 1, C)."""
    B, C = x.shape
    means = x.reshape(B, num_groups, -1).mean(-1)
    return jnp.repeat(means, C // num_groups, axis=1)[:, None]


def _normalized(x, scale, bias, mean, rstd):
    """(x, (B, N, C), standardised, then scaled and shifted), float32."""
    standard = (x.reshape(x.shape[0], -1, x.shape[-1]).astype(jnp.float32) - mean) * rstd
    return standard, standard * scale.astype(jnp.float32) + bias.astype(jnp.float32)


def _group_norm_forward(x, scale, bias, num_groups, epsilon, activate, dtype, rows_axis):
    flat = x.reshape(x.shape[0], -1, x.shape[-1]).astype(jnp.float32)  # (B, N, C)
    group_mean = _per_group(flat.mean(1), num_groups)
    variance = _per_group(jnp.square(flat - group_mean).mean(1), num_groups)
    if rows_axis is not None:
        group_mean, variance = global_moments(group_mean, variance, rows_axis)
    rstd = jax.lax.rsqrt(variance + epsilon)
    _, out = _normalized(x, scale, bias, group_mean, rstd)
    out = nn.silu(out) if activate else out
    return out.astype(dtype).reshape(x.shape), (x, scale, bias, group_mean, rstd)


def _group_norm_backward(num_groups, epsilon, activate, dtype, rows_axis, kept, g):
    x, scale, bias, mean, rstd = kept
    standard, out = _normalized(x, scale, bias, mean, rstd)
    g = g.reshape(standard.shape).astype(jnp.float32)
    if activate:
        sigmoid = jax.nn.sigmoid(out)
        g = g * sigmoid * (1 + out * (1 - sigmoid))
    sums, weighted_sums = g.sum(1), (g * standard).sum(1)  # (B, C)
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


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def layer_norm(x, scale, bias, epsilon, dtype):
    """Layer normalisation over the last axis; only x is saved for the gradient.

    Args:
        x: (..., C).
        scale, bias: (C,).
        epsilon: of the normalisation.
        dtype: of the result; everything before it is float32.

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


class GivenParams:
    """Mixin of modules: of a parameter that the caller gives, only the shape is checked.

    Flax traces the initial value of each parameter in each call to compare shapes, which takes a
    third of the time of tracing SDXL's UNet. Parameters are arrays, not boxes of flax.linen.meta.
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


class GroupNorm(GivenParams, nn.Module):
    """Group normalisation over the last axis of (B, ..., C), and SiLU if activate; group_norm."""

    num_groups: int = 32
    epsilon: float = 1e-5
    dtype: DTypeLike = jnp.float32
    activate: bool = False
    rows_axis: str | tuple | None = None

    @nn.compact
    def __call__(self, x):
        if x.shape[-1] % self.num_groups:
            raise ValueError(
                f"norm_num_groups={self.num_groups} does not divide {x.shape[-1]} channels; "
                "block_out_channels must be multiples of it"
            )
        scale, bias = _scale_and_bias(self, x.shape[-1])
        options = self.num_groups, self.epsilon, self.activate, self.dtype, self.rows_axis
        return group_norm(x, scale, bias, *options)


class LayerNorm(GivenParams, nn.Module):
    """Layer normalisation over the last axis; layer_norm."""

    epsilon: float = 1e-5
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x):
        return layer_norm(x, *_scale_and_bias(self, x.shape[-1]), self.epsilon, self.dtype)


class Conv(GivenParams, nn.Module):
    """A convolution with bias, in 8 bits and with LoRA if its parameters say so; convolve."""

    features: int
    size: int = 3
    stride: int = 1
    padding: tuple | None = None  # None: an odd size with stride 1 preserves height and width
    dtype: DTypeLike = jnp.float32
    starts_at_zero: bool = False
    rows_axis: str | tuple | None = None

    @nn.compact
    def __call__(self, x):
        """x (B, H, W, C) -> (B, h, w, features)."""
        shape = (self.size, self.size, x.shape[-1], self.features)
        init = nn.initializers.zeros if self.starts_at_zero else nn.initializers.lecun_normal()
        kernel = self.param("kernel", init, shape)
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
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
            x, kernel, bias = (y.astype(self.dtype) for y in (x, kernel, bias))
            out = apply_kernel(x, kernel) + bias
        if "lora_A" in params:
            out = out + lora_product(params, x, self.dtype, apply_kernel)
        return out


def lora_product(params, x, dtype, apply_kernel=jnp.matmul):
    """The output that LoRA adds to a layer's.

    Args:
        params: the layer's parameters, with lora_A, lora_B and lora_scale.
        x: the layer's input.
        dtype: of the computation.
        apply_kernel: (x, kernel) -> output; used for A. B is a matrix.
    """
    a, b = (params[name]["kernel"].astype(dtype) for name in ("lora_A", "lora_B"))
    b = b.reshape(b.shape[-2:])  # (1, 1, rank, out) of a convolution
    return apply_kernel(x.astype(dtype), a) @ b * params["lora_scale"].astype(dtype)


class Dense(GivenParams, nn.Dense):
    """A dense layer, in 8 bits and with LoRA if its parameters say so."""

    def __call__(self, x):
        """x (..., C) -> (..., features)."""
        params = self.variables.get("params", {})  # none before init
        if is_eight_bit(params):
            out = eight_bit_layer(params, x, self.dtype)
        else:
            out = super().__call__(x)
        if "lora_A" in params:
            out = out + lora_product(params, x, self.dtype)
        return out


class ResnetBlock2D(nn.Module):
    """Twice GroupNorm, SiLU and 3x3 convolution, plus the input; the time embedding in between."""

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
    def __call__(self, x, size=None):
        """x (B, H, W, C), size (height, width) or None to double -> (B, *size, out_channels)."""
        B, H, W, C = x.shape
        if size is None or tuple(size) == (2 * H, 2 * W):
            x = jnp.broadcast_to(x[:, :, None, :, None], (B, H, 2, W, 2, C))
            x = x.reshape(B, 2 * H, 2 * W, C)
        else:  # the skip connection came from an odd size
            rows, columns = (np.arange(n) * m // n for n, m in zip(size, (H, W)))
            x = x[:, rows][:, :, columns]
        options = {"dtype": self.dtype, "rows_axis": self.rows_axis}
        return Conv(self.out_channels, name="conv", **options)(x)


class Attention(nn.Module):
    """Multi-head attention of x over itself, or over a context; projections without bias."""

    dim: int
    num_heads: int
    dtype: DTypeLike = jnp.float32
    rows_axis: str | tuple | None = None

    @nn.compact
    def __call__(self, x, context=None):
        """x (B, T, dim), context (B, S, D) or None for x itself -> (B, T, dim)."""
        of_itself = context is None
        context = x if of_itself else context
        query = Dense(self.dim, use_bias=False, dtype=self.dtype, name="to_q")(x)
        key = Dense(self.dim, use_bias=False, dtype=self.dtype, name="to_k")(context)
        value = Dense(self.dim, use_bias=False, dtype=self.dtype, name="to_v")(context)
        if of_itself and self.rows_axis is not None:
            key, value = (gather_positions(each, self.rows_axis) for each in (key, value))
        out = attention(query, key, value, self.num_heads)
        return Dense(self.dim, dtype=self.dtype, name="to_out_0")(out)


@jax.custom_vjp
def gated_gelu(x):
    """x (..., 2 C) -> (..., C): the first half times GELU (erf) of the second; only x is saved.

    Source: GLU variants (arXiv 2002.05202), equation 6.
    """
    hidden, gate = jnp.split(x, 2, -1)
    return hidden * nn.gelu(gate, approximate=False)


def _gated_gelu_backward(x, g):
    hidden, gate, g = (y.astype(jnp.float32) for y in (*jnp.split(x, 2, -1), g))
    share = 0.5 * (1 + jax.lax.erf(gate * 2**-0.5))  # GELU is gate * share
    slope = share + gate * jnp.exp(-0.5 * jnp.square(gate)) * (2 * np.pi) ** -0.5
    return (jnp.concatenate((g * gate * share, g * hidden * slope), -1).astype(x.dtype),)


gated_gelu.defvjp(lambda x: (gated_gelu(x), x), _gated_gelu_backward)


class GEGLU(nn.Module):
    """Half of a projection gates the other half through GELU (erf). Source: arXiv 2002.05202."""

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
    """Self-attention, cross-attention, feed-forward: each normalises its input and adds to it."""

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
        if C % self.num_heads:
            raise ValueError(
                f"{self.num_heads} attention heads do not divide {C} channels; "
                "see attention_head_dim in the UNet's config.json (it counts heads)"
            )
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

    Its parameters may then be functions that make the arrays (training.sharding.gather_by_block);
    the backward pass calls them again instead of keeping the arrays.
    """
    if not enabled:
        return module
    return nn.remat(nn.map_variables(module, "params", trans_in_fn=make_arrays, init=True))


def make_arrays(params):
    """Replace every jax.tree_util.Partial in a tree of parameters by the array that it returns."""
    return jax.tree.map(
        lambda x: x() if isinstance(x, Partial) else x,
        params,
        is_leaf=lambda x: isinstance(x, Partial),
    )


# CLIP

ACTIVATIONS = {
    "quick_gelu": lambda x: x * nn.sigmoid(1.702 * x),
    "gelu": partial(nn.gelu, approximate=False),
}


@struct.dataclass
class FlaxBaseModelOutput(ModelOutput):
    """What the CLIP encoder returns.

    Args:
        last_hidden_state: (B, T, D), before any final norm.
        hidden_states: the embeddings and every layer's output, (B, T, D) each.
        attentions: every layer's softmax weights, (B, heads, T, T) each; None if not asked for.
    """

    last_hidden_state: jax.Array | None = None
    hidden_states: tuple | None = None
    attentions: tuple | None = None


class CLIPEmbeddings(nn.Module):
    """Token plus position embeddings."""

    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, input_ids, position_ids):
        embed = partial(
            nn.Embed,
            features=self.hidden_size,
            dtype=self.dtype,
            embedding_init=nn.initializers.normal(0.02),
        )
        tokens = embed(self.vocab_size, name="token_embedding")(input_ids)
        positions = embed(self.max_position_embeddings, name="position_embedding")(position_ids)
        return tokens + positions


class CLIPAttention(nn.Module):
    """Self-attention; projections with bias."""

    num_heads: int
    dtype: DTypeLike
    is_causal: bool
    dropout: float

    @nn.compact
    def __call__(self, x, mask, deterministic, output_attentions):
        """(B, T, D) -> (B, T, D), softmax weights (B, heads, T, T) or None."""
        dense = partial(Dense, x.shape[-1], dtype=self.dtype)
        query, key, value = (dense(name=f"{name}_proj")(x) for name in "qkv")
        weights = None
        if output_attentions or (self.dropout and not deterministic):
            weights = attention_weights(query, key, self.num_heads, mask, self.is_causal)
            weights = nn.Dropout(self.dropout)(weights, deterministic=deterministic)
            value = value.reshape(*value.shape[:2], self.num_heads, -1)
            out = jnp.einsum("bhts,bshd->bthd", weights, value).reshape(x.shape)
        else:
            out = attention(query, key, value, self.num_heads, mask, self.is_causal)
        return dense(name="out_proj")(out), weights if output_attentions else None


class CLIPMLP(nn.Module):
    """Two dense layers with the configured activation between."""

    intermediate_size: int
    hidden_act: str
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x):
        if self.hidden_act not in ACTIVATIONS:
            raise ValueError(
                f"hidden_act={self.hidden_act} is not supported; {' and '.join(ACTIVATIONS)} are"
            )
        h = Dense(self.intermediate_size, dtype=self.dtype, name="fc1")(x)
        h = ACTIVATIONS[self.hidden_act](h)
        return Dense(x.shape[-1], dtype=self.dtype, name="fc2")(h)


class CLIPEncoderLayer(nn.Module):
    """Attention and MLP: each normalises its input and adds to it."""

    num_heads: int
    intermediate_size: int
    hidden_act: str
    epsilon: float
    dtype: DTypeLike
    is_causal: bool
    attention_dropout: float = 0.0

    @nn.compact
    def __call__(self, x, mask, deterministic, output_attentions):
        """(B, T, D) -> (B, T, D), softmax weights (B, heads, T, T) or None."""
        normed = LayerNorm(self.epsilon, self.dtype, name="layer_norm1")(x)
        attend = CLIPAttention(
            self.num_heads, self.dtype, self.is_causal, self.attention_dropout, name="self_attn"
        )
        attended, weights = attend(normed, mask, deterministic, output_attentions)
        x = x + attended
        normed = LayerNorm(self.epsilon, self.dtype, name="layer_norm2")(x)
        mlp = CLIPMLP(self.intermediate_size, self.hidden_act, self.dtype, name="mlp")
        return x + mlp(normed), weights


class CLIPLayers(nn.Module):
    """The layers, with the published names "0", "1", ..."""

    num_layers: int
    layer: partial

    @nn.compact
    def __call__(self, x, mask, deterministic, output_attentions):
        """(B, T, D) -> FlaxBaseModelOutput with hidden_states of num_layers + 1 entries."""
        states, attentions = [x], []
        for i in range(self.num_layers):
            layer = self.layer(name=str(i))
            x, weights = layer(x, mask, deterministic, output_attentions)
            states.append(x)
            attentions.append(weights)
        return FlaxBaseModelOutput(
            x, tuple(states), tuple(attentions) if output_attentions else None
        )


class CLIPEncoder(nn.Module):
    """The encoder, a level of the published parameter tree that holds the layers."""

    num_layers: int
    layer: partial

    @nn.compact
    def __call__(self, x, mask=None, deterministic=True, output_attentions=False):
        layers = CLIPLayers(self.num_layers, self.layer, name="layers")
        return layers(x, mask, deterministic, output_attentions)
