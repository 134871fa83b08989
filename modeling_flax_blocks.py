"""What the UNet and the VAE share: attention, norms, residual blocks, transformers, resampling.

Everything here works channels-last, (B, H, W, C). Matmuls, convolutions and what is stored between
them are in `dtype`; norms and softmax accumulate in float32 and hand back `dtype`. Submodule names
are those of the published Flax checkpoints.
"""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike


def attention(query, key, value, num_heads, mask=None, is_causal=False):
    """Scaled dot-product attention; every model here calls this one.

    Args:
        query: (B, T, C), C divisible by num_heads.
        key, value: (B, S, C).
        num_heads: how many heads C is split into.
        mask: bool, broadcastable to (B, num_heads, T, S), True where a key may be seen; or None.
        is_causal: True lets position t see positions 0 to t only.

    Returns:
        (B, T, C) in query's dtype; logits and softmax are float32.

    Source: Attention Is All You Need (arXiv 1706.03762), equation 1.
    """
    query, key, value = (
        x.reshape(*x.shape[:2], num_heads, x.shape[-1] // num_heads) for x in (query, key, value)
    )  # (B, T or S, num_heads, C / num_heads)
    with jax.numpy_dtype_promotion("standard"):  # jax's own code promotes bfloat16 implicitly
        out = jax.nn.dot_product_attention(query, key, value, mask=mask, is_causal=is_causal)
    return out.reshape(*out.shape[:2], -1)


def _standardize(x, axes, epsilon):
    """Zero mean and unit variance over axes, in float32, two passes."""
    x = x.astype(jnp.float32)
    x = x - x.mean(axes, keepdims=True)
    return x * jax.lax.rsqrt(jnp.square(x).mean(axes, keepdims=True) + epsilon)


def _scale_and_shift(module, x):
    scale = module.param("scale", nn.initializers.ones, (x.shape[-1],)).astype(jnp.float32)
    bias = module.param("bias", nn.initializers.zeros, (x.shape[-1],)).astype(jnp.float32)
    return (x * scale + bias).astype(module.dtype)


class GroupNorm(nn.Module):
    """Group normalisation over the last axis of (B, ..., C). Source: arXiv 1803.08494."""

    num_groups: int = 32
    epsilon: float = 1e-5
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x):
        if x.shape[-1] % self.num_groups:
            raise ValueError(
                f"norm_num_groups={self.num_groups} does not divide {x.shape[-1]} channels; "
                "block_out_channels have to be multiples of it"
            )
        grouped = x.reshape(x.shape[0], -1, self.num_groups, x.shape[-1] // self.num_groups)
        grouped = _standardize(grouped, (1, 3), self.epsilon)
        return _scale_and_shift(self, grouped.reshape(x.shape))


class LayerNorm(nn.Module):
    """Layer normalisation over the last axis. Source: arXiv 1607.06450."""

    epsilon: float = 1e-5
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x):
        return _scale_and_shift(self, _standardize(x, -1, self.epsilon))


class ResnetBlock2D(nn.Module):
    """GroupNorm, SiLU, 3x3 convolution, twice, plus the input; the time embedding joins between."""

    out_channels: int
    num_groups: int = 32
    epsilon: float = 1e-5
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x, time_emb=None):
        """x (B, H, W, C), time_emb (B, D) or None -> (B, H, W, out_channels)."""
        norm = dict(num_groups=self.num_groups, epsilon=self.epsilon, dtype=self.dtype)
        h = nn.silu(GroupNorm(**norm, name="norm1")(x))
        h = nn.Conv(self.out_channels, (3, 3), dtype=self.dtype, name="conv1")(h)
        if time_emb is not None:
            dense = nn.Dense(self.out_channels, dtype=self.dtype, name="time_emb_proj")
            h = h + dense(nn.silu(time_emb))[:, None, None, :]
        h = nn.silu(GroupNorm(**norm, name="norm2")(h))
        h = nn.Conv(self.out_channels, (3, 3), dtype=self.dtype, name="conv2")(h)
        if x.shape[-1] != self.out_channels:
            x = nn.Conv(self.out_channels, (1, 1), dtype=self.dtype, name="conv_shortcut")(x)
        return x + h


class Downsample2D(nn.Module):
    """Halve height and width by a 3x3 convolution of stride 2."""

    out_channels: int
    padding: tuple = ((1, 1), (1, 1))  # the VAE pads ((0, 1), (0, 1)), as it was trained
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x):
        conv = nn.Conv(
            self.out_channels, (3, 3), (2, 2), self.padding, dtype=self.dtype, name="conv"
        )
        return conv(x)


class Upsample2D(nn.Module):
    """Nearest-neighbour upsampling, then a 3x3 convolution."""

    out_channels: int
    dtype: DTypeLike = jnp.float32

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
        return nn.Conv(self.out_channels, (3, 3), dtype=self.dtype, name="conv")(x)


class Attention(nn.Module):
    """Multi-head attention of x over itself, or over a context; projections without bias."""

    dim: int
    num_heads: int
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x, context=None):
        """x (B, T, dim), context (B, S, D) or None for x itself -> (B, T, dim)."""
        context = x if context is None else context
        query = nn.Dense(self.dim, use_bias=False, dtype=self.dtype, name="to_q")(x)
        key = nn.Dense(self.dim, use_bias=False, dtype=self.dtype, name="to_k")(context)
        value = nn.Dense(self.dim, use_bias=False, dtype=self.dtype, name="to_v")(context)
        out = attention(query, key, value, self.num_heads)
        return nn.Dense(self.dim, dtype=self.dtype, name="to_out_0")(out)


class GEGLU(nn.Module):
    """Half of a projection gates the other half through GELU (erf). Source: arXiv 2002.05202."""

    dim_out: int
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x):
        hidden, gate = jnp.split(
            nn.Dense(2 * self.dim_out, dtype=self.dtype, name="proj")(x), 2, -1
        )
        return hidden * nn.gelu(gate, approximate=False)


class FeedForward(nn.Module):
    """GEGLU to four times the width and back."""

    dim: int
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x):
        x = GEGLU(4 * self.dim, dtype=self.dtype, name="net_0")(x)
        return nn.Dense(self.dim, dtype=self.dtype, name="net_2")(x)


class BasicTransformerBlock(nn.Module):
    """Self-attention, cross-attention, feed-forward, each on a normed copy and added back."""

    dim: int
    num_heads: int
    only_cross_attention: bool = False  # True: the first attention reads the context as well
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x, context):
        """x (B, T, dim), context (B, S, D) -> (B, T, dim)."""
        normed = LayerNorm(dtype=self.dtype, name="norm1")(x)
        first_context = context if self.only_cross_attention else None
        x = x + Attention(self.dim, self.num_heads, self.dtype, name="attn1")(normed, first_context)
        normed = LayerNorm(dtype=self.dtype, name="norm2")(x)
        x = x + Attention(self.dim, self.num_heads, self.dtype, name="attn2")(normed, context)
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
        h = GroupNorm(self.num_groups, epsilon=1e-6, dtype=self.dtype, name="norm")(x)
        if self.use_linear_projection:
            h = nn.Dense(C, dtype=self.dtype, name="proj_in")(h.reshape(B, H * W, C))
        else:
            h = nn.Conv(C, (1, 1), dtype=self.dtype, name="proj_in")(h).reshape(B, H * W, C)
        for i in range(self.num_layers):
            h = block(
                C,
                self.num_heads,
                only_cross_attention=self.only_cross_attention,
                dtype=self.dtype,
                name=f"transformer_blocks_{i}",
            )(h, context)
        if self.use_linear_projection:
            h = nn.Dense(C, dtype=self.dtype, name="proj_out")(h).reshape(B, H, W, C)
        else:
            h = nn.Conv(C, (1, 1), dtype=self.dtype, name="proj_out")(h.reshape(B, H, W, C))
        return x + h


def checkpointed(module: Callable, enabled: bool) -> Callable:
    """The module class, its activations recomputed in the backward pass where enabled."""
    return nn.remat(module) if enabled else module


def sinusoidal_embedding(timesteps, dim, flip_sin_to_cos=True, freq_shift=0):
    """Sine and cosine of the timestep at dim / 2 frequencies, 1 to 1/10000.

    Args:
        timesteps: (B,), any real dtype.
        dim: length of the embedding, even.
        flip_sin_to_cos: True puts the cosines first, as Stable Diffusion does.
        freq_shift: 0 (Stable Diffusion) or 1: subtracted from the number of frequencies.

    Returns:
        (B, dim) float32.

    Source: DDPM (arXiv 2006.11239), appendix B, after arXiv 1706.03762, section 3.5.
    """
    half = dim // 2
    frequencies = np.exp(-np.log(10000.0) * np.arange(half) / (half - freq_shift))
    angles = timesteps.astype(jnp.float32)[:, None] * frequencies.astype(np.float32)
    parts = (
        (jnp.cos(angles), jnp.sin(angles))
        if flip_sin_to_cos
        else (jnp.sin(angles), jnp.cos(angles))
    )
    return jnp.concatenate(parts, axis=-1)


class TimestepEmbedding(nn.Module):
    """Two dense layers with SiLU between."""

    dim: int
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x):
        x = nn.silu(nn.Dense(self.dim, dtype=self.dtype, name="linear_1")(x))
        return nn.Dense(self.dim, dtype=self.dtype, name="linear_2")(x)
