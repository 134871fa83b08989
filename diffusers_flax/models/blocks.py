"""Layers and blocks of UNet, ControlNet and VAE, from convolutions to transformers.

Everything here works channels-last, (B, H, W, C). Matmuls, convolutions and stored activations use
`dtype`; norms accumulate in float32 and return `dtype`. `rows_axis` is the mesh's axis, or a tuple
of axes, along which the rows of feature maps are sharded (spatial_parallelism.py); None: this
device has all rows. Submodules have the names of the published Flax checkpoints.
"""

from collections.abc import Callable, Mapping
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial
from jax.typing import DTypeLike

from diffusers_flax.models.attention import attention, cuda_capability, pad_keys
from diffusers_flax.models.convolution import convolve
from diffusers_flax.models.norms import GroupNorm, LayerNorm, NoInitTrace
from diffusers_flax.models.quantization import eight_bit_layer, is_eight_bit
from diffusers_flax.models.spatial_parallelism import gather_positions, with_halo

# Name prefixes of blocks that gradient checkpointing recomputes.
CHECKPOINTED_BLOCKS = ("resnets_", "transformer_blocks_")


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
    """The output that LoRA adds to the output of a layer with lora_A, lora_B and lora_scale.

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
