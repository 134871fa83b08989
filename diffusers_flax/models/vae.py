"""FlaxAutoencoderKL: images to latents and back.

The published class name, call signature and parameter tree; any `AutoencoderKL` config.json of
Stable Diffusion 1.x, 2.x and SDXL.

    vae, params = FlaxAutoencoderKL.from_pretrained("MODEL", subfolder="vae")
    posterior = vae.apply({"params": params}, images, method=vae.encode).latent_dist
    latents = latents / vae.config.scaling_factor
    images = vae.apply({"params": params}, latents, method=vae.decode).sample

Source: Latent Diffusion Models (arXiv 2112.10752), section 3.1; numerics of PyTorch diffusers.
"""

import math
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from diffusers_flax.loading.configs import FromSingleFile
from diffusers_flax.models.attention import attention
from diffusers_flax.models.base import FlaxModelMixin
from diffusers_flax.models.blocks import (
    Conv,
    Dense,
    Downsample2D,
    GroupNorm,
    ResnetBlock2D,
    Upsample2D,
)
from diffusers_flax.models.spatial_parallelism import gather_positions
from diffusers_flax.outputs import ModelOutput

OVERLAP = 0.25  # of neighbouring tiles, PyTorch's tile_overlap_factor


@jax.tree_util.register_pytree_with_keys_class
class FlaxDiagonalGaussianDistribution:
    """The posterior over latents, channels-last and float32: a pytree of mean and logvar.

    Args:
        parameters: the encoder's output (B, h, w, 2C): mean, logarithm of the variance.
        deterministic: True takes the variance as 0.

    Attributes:
        mean: (B, h, w, C).
        logvar: (B, h, w, C), in [-30, 20].
    """

    def __init__(self, parameters, deterministic=False):
        self.mean, logvar = jnp.split(parameters.astype(jnp.float32), 2, axis=-1)
        self.logvar = jnp.clip(logvar, -30.0, 20.0)
        self.deterministic = deterministic

    def tree_flatten_with_keys(self):
        """For JAX: the arrays with their names, and the static field."""
        names = ("mean", "logvar")
        children = [(jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in names]
        return children, self.deterministic

    @classmethod
    def tree_unflatten(cls, deterministic, children):
        """For JAX: the inverse."""
        distribution = object.__new__(cls)
        distribution.mean, distribution.logvar = children
        distribution.deterministic = deterministic
        return distribution

    @property
    def var(self):
        """(B, h, w, C)."""
        return jnp.zeros_like(self.mean) if self.deterministic else jnp.exp(self.logvar)

    @property
    def std(self):
        """(B, h, w, C)."""
        return jnp.zeros_like(self.mean) if self.deterministic else jnp.exp(0.5 * self.logvar)

    def sample(self, key):
        """One draw, (B, h, w, C)."""
        return self.mean + self.std * jax.random.normal(key, self.mean.shape)

    def mode(self):
        """The most probable latent, (B, h, w, C)."""
        return self.mean

    def nll(self, sample, axis=(1, 2, 3)):
        """Negative log likelihood of sample (B, h, w, C) in nats, summed over axis."""
        if self.deterministic:
            return jnp.zeros((1,))
        terms = math.log(2 * math.pi) + self.logvar + jnp.square(sample - self.mean) / self.var
        return 0.5 * terms.sum(axis)

    def kl(self, other=None):
        """Divergence from other, or from the standard normal, in nats per image, (B,)."""
        if self.deterministic:
            return jnp.zeros((1,))
        if other is None:
            terms = jnp.square(self.mean) + self.var - 1.0 - self.logvar
        else:
            terms = (jnp.square(self.mean - other.mean) + self.var) / other.var
            terms = terms - 1.0 - self.logvar + other.logvar
        return 0.5 * terms.sum((1, 2, 3))


@struct.dataclass
class FlaxAutoencoderKLOutput(ModelOutput):
    """The output of encode."""

    latent_dist: FlaxDiagonalGaussianDistribution


@struct.dataclass
class FlaxDecoderOutput(ModelOutput):
    """The output of decode: images (B, 3, H, W), about [-1, 1]."""

    sample: jax.Array


class AttentionBlock(nn.Module):
    """Self-attention with one head over the positions of a feature map, plus the input."""

    num_groups: int
    dtype: DTypeLike
    rows_axis: str | tuple | None = None

    @nn.compact
    def __call__(self, x):
        B, H, W, C = x.shape
        options = {"dtype": self.dtype, "rows_axis": self.rows_axis}
        h = GroupNorm(self.num_groups, 1e-6, name="group_norm", **options)(x)
        h = h.reshape(B, H * W, C)
        query = Dense(C, dtype=self.dtype, name="query")(h)
        key = Dense(C, dtype=self.dtype, name="key")(h)
        value = Dense(C, dtype=self.dtype, name="value")(h)
        if self.rows_axis is not None:
            key, value = (gather_positions(each, self.rows_axis) for each in (key, value))
        h = Dense(C, dtype=self.dtype, name="proj_attn")(attention(query, key, value, 1))
        return x + h.reshape(B, H, W, C)


class VAEMidBlock(nn.Module):
    """Two residual blocks, with self-attention between them unless attention_block is None."""

    resnet: partial
    attention_block: partial | None

    @nn.compact
    def __call__(self, x):
        channels = x.shape[-1]
        x = self.resnet(channels, name="resnets_0")(x)
        if self.attention_block is not None:
            x = self.attention_block(name="attentions_0")(x)
        return self.resnet(channels, name="resnets_1")(x)


class VAELevel(nn.Module):
    """The residual blocks of one level, then down- or upsampling unless resample is None."""

    out_channels: int
    num_layers: int
    resnet: partial
    resample: partial | None

    @nn.compact
    def __call__(self, x):
        for i in range(self.num_layers):
            x = self.resnet(self.out_channels, name=f"resnets_{i}")(x)
        return x if self.resample is None else self.resample(self.out_channels)(x)


class Coder(nn.Module):
    """Base of Encoder and Decoder; the partials are constructors of their layers."""

    out_channels: int
    block_out_channels: tuple
    num_layers: int  # of each level
    conv: partial
    resnet: partial
    mid_block: partial
    norm: partial
    resample: partial

    def level(self, i, width, name):
        """The i-th level that runs; all but the last resample."""
        resample = self.resample if i < len(self.block_out_channels) - 1 else None
        return VAELevel(width, self.num_layers, self.resnet, resample, name=f"{name}_{i}")

    def head(self, x):
        """Norm, SiLU and the last convolution."""
        x = self.norm(name="conv_norm_out")(x)
        return self.conv(self.out_channels, name="conv_out")(x)


class Encoder(Coder):
    """Images (B, H, W, 3) to moments before quant_conv, (B, h, w, 2 * latent_channels)."""

    @nn.compact
    def __call__(self, x):
        x = self.conv(self.block_out_channels[0], name="conv_in")(x)
        for i, width in enumerate(self.block_out_channels):
            x = self.level(i, width, "down_blocks")(x)
        return self.head(self.mid_block(name="mid_block")(x))


class Decoder(Coder):
    """Latents after post_quant_conv, (B, h, w, latent_channels), to images (B, H, W, 3)."""

    @nn.compact
    def __call__(self, x):
        x = self.conv(self.block_out_channels[-1], name="conv_in")(x)
        x = self.mid_block(name="mid_block")(x)
        for i, width in enumerate(reversed(self.block_out_channels)):
            x = self.level(i, width, "up_blocks")(x)
        return self.head(x)


class FlaxAutoencoderKL(nn.Module, FlaxModelMixin, FromSingleFile):
    """The variational autoencoder; its fields are the entries of a diffusers VAE `config.json`.

    `dtype` is the compute dtype; the latent distribution is always float32. With `tile`, see
    with_tile, encode and decode split larger images into overlapping tiles with this side in
    pixels, compute one at a time and blend them, as PyTorch's enable_tiling does. The result
    differs from a whole image's, as norms and the middle block's attention see one tile.
    `rows_axis` is for spatial parallelism, see blocks.py.
    """

    in_channels: int = 3
    out_channels: int = 3
    down_block_types: tuple = ("DownEncoderBlock2D",)
    up_block_types: tuple = ("UpDecoderBlock2D",)
    block_out_channels: tuple = (64,)
    layers_per_block: int = 1
    act_fn: str = "silu"  # no other value is implemented
    latent_channels: int = 4
    norm_num_groups: int = 32
    sample_size: int | tuple | None = 32
    scaling_factor: float = 0.18215
    dtype: DTypeLike = jnp.float32
    force_upcast: bool = True
    use_quant_conv: bool = True
    use_post_quant_conv: bool = True
    mid_block_add_attention: bool = True
    tile: int | None = None  # None: whole images; not in the config
    rows_axis: str | tuple | None = None  # None: this device has all rows; not in the config

    weights_name = "diffusion_pytorch_model"
    single_file_component = "vae"
    torch_class_name = "AutoencoderKL"
    fixed_config = dict.fromkeys(("latents_mean", "latents_std", "shift_factor"))
    choices = {"act_fn": ("silu",)}  # noqa: RUF012 (a Linen field otherwise)

    def setup(self):
        self.check_choices()
        found = {*self.down_block_types, *self.up_block_types}
        if found != {"DownEncoderBlock2D", "UpDecoderBlock2D"}:
            raise ValueError(
                f"VAE block types {', '.join(sorted(found))} are not supported, only "
                "DownEncoderBlock2D and UpDecoderBlock2D are"
            )
        options = {"dtype": self.dtype, "rows_axis": self.rows_axis}
        groups = {"num_groups": self.norm_num_groups, **options}
        resnet = partial(ResnetBlock2D, epsilon=1e-6, **groups)
        attend = partial(AttentionBlock, **groups) if self.mid_block_add_attention else None
        layers = dict(
            conv=partial(Conv, **options),
            resnet=resnet,
            mid_block=partial(VAEMidBlock, resnet, attend),
            norm=partial(GroupNorm, epsilon=1e-6, activate=True, **groups),
        )
        padding = ((0, 1), (0, 1))
        self.encoder = Encoder(
            2 * self.latent_channels,
            tuple(self.block_out_channels),
            self.layers_per_block,
            resample=partial(Downsample2D, padding=padding, name="downsamplers_0", **options),
            **layers,
        )
        self.decoder = Decoder(
            self.out_channels,
            tuple(self.block_out_channels),
            self.layers_per_block + 1,
            resample=partial(Upsample2D, name="upsamplers_0", **options),
            **layers,
        )
        if self.use_quant_conv:
            self.quant_conv = Conv(2 * self.latent_channels, 1, **options)
        if self.use_post_quant_conv:
            self.post_quant_conv = Conv(self.latent_channels, 1, **options)

    def init_weights(self, rng):
        """Random float32 parameters of this configuration. rng: a PRNG key."""
        size = 2 ** (len(self.block_out_channels) - 1)
        sample = jnp.zeros((1, self.in_channels, size, size))
        return self.init(rng, sample)["params"]

    def moments(self, sample):
        """Mean and logvar of images as for encode, (B, h, w, 2 * latent_channels)."""
        factor = 2 ** (len(self.block_out_channels) - 1)
        check_sample(sample, self.in_channels, factor)
        if self.tile and max(sample.shape[2:]) > self.tile:
            module, variables = self.unbind()  # jax's loops take no bound module's method

            def moments(tile):
                found = module.apply(variables, tile, method="moments")
                return jnp.transpose(found, (0, 3, 1, 2))

            found = map_tiles(moments, sample, self.tile, self.tile // factor)
            return jnp.transpose(found, (0, 2, 3, 1))
        moments = self.encoder(jnp.transpose(sample.astype(self.dtype), (0, 2, 3, 1)))
        return self.quant_conv(moments) if self.use_quant_conv else moments

    def encode(self, sample, deterministic=True, return_dict=True):
        """The posterior over latents of images.

        Args:
            sample: images (B, in_channels, H, W) in [-1, 1]; H and W multiples of
                2 ** (len(block_out_channels) - 1).
            deterministic: without effect, as there is no dropout.
            return_dict: False returns a plain tuple.

        Returns:
            FlaxAutoencoderKLOutput; latent_dist is channels-last and float32.
        """
        posterior = FlaxDiagonalGaussianDistribution(self.moments(sample))
        return FlaxAutoencoderKLOutput(posterior) if return_dict else (posterior,)

    def decode(self, latents, deterministic=True, return_dict=True):
        """Images of latents.

        Args:
            latents: unscaled, (B, latent_channels, h, w), or (B, h, w, latent_channels) if axis 1
                is not latent_channels long.
            deterministic: without effect, as there is no dropout.
            return_dict: False returns a plain tuple.

        Returns:
            FlaxDecoderOutput; sample is (B, out_channels, H, W) in `dtype`, about [-1, 1].
        """
        if latents.shape[1] == self.latent_channels:
            latents = jnp.transpose(latents, (0, 2, 3, 1))
        latents = latents.astype(self.dtype)
        factor = 2 ** (len(self.block_out_channels) - 1)
        if self.tile and max(latents.shape[1:3]) * factor > self.tile:
            module, variables = self.unbind()  # as in moments

            def image(tile):
                return module.apply(variables, tile, method="decode").sample

            latents = jnp.transpose(latents, (0, 3, 1, 2))
            sample = map_tiles(image, latents, self.tile // factor, self.tile)
        else:
            if self.use_post_quant_conv:
                latents = self.post_quant_conv(latents)
            sample = jnp.transpose(self.decoder(latents), (0, 3, 1, 2))
        return FlaxDecoderOutput(sample) if return_dict else (sample,)

    def __call__(self, sample, sample_posterior=False, deterministic=True, return_dict=True):
        """Encode and decode; sample_posterior draws the latents (rng "gaussian")."""
        posterior = self.encode(sample, deterministic).latent_dist
        latents = (
            posterior.sample(self.make_rng("gaussian")) if sample_posterior else posterior.mode()
        )
        return self.decode(jnp.transpose(latents, (0, 3, 1, 2)), deterministic, return_dict)


def check_sample(sample, in_channels, factor):
    """Raise a ValueError unless a VAE that divides sides by factor can encode the images."""
    if sample.ndim != 4 or sample.shape[1] != in_channels:
        raise ValueError(
            f"sample has shape {tuple(sample.shape)}, this VAE encodes "
            f"(batch, {in_channels}, height, width)"
        )
    if sample.shape[2] % factor or sample.shape[3] % factor:
        raise ValueError(
            f"image size {sample.shape[3]}x{sample.shape[2]} is not divisible by {factor}; "
            "resize or crop it first"
        )


def least_tile(vae):
    """The smallest side of a tile in pixels; others are its multiples."""
    return round(2 ** (len(vae.block_out_channels) - 1) / OVERLAP)


def with_tile(vae, tile):
    """The VAE with tiles for images larger than one; tile None or 0: whole images.

    A ValueError unless a tile's side and overlap are whole numbers of latents.
    """
    least = least_tile(vae)
    if tile and (tile < least or tile % least):
        raise ValueError(f"vae_tile={tile} is not a multiple of {least} pixels, {least} or more")
    return vae.clone(tile=tile or None)


def map_tiles(function, x, side, out_side):
    """Apply a function to overlapping tiles of x, one at a time, and blend the results.

    function: (B, C, h, w) -> (B, C', h', w'), whose sides scale by out_side / side; side: a tile's,
    but tiles at the end may be smaller. Memory has the blended rows and one row of results.

    Source: PyTorch diffusers' AutoencoderKL.tiled_decode.
    """
    B, C, H, W = x.shape
    extent = int(out_side * OVERLAP)
    kept = out_side - extent

    def row_of_tiles(ends, corner, height):
        """(the tiles' ends, for blending with the next row; the row without them).

        ends: of the row above; corner: (the row's index, its top).
        """
        index, top = corner
        tiles = []
        for width, starts in starts_by_length(W, side):

            def result(left, width=width):
                return function(jax.lax.dynamic_slice(x, (0, 0, top, left), (B, C, height, width)))

            tiles.extend(jax.lax.map(result, starts))
        for j, tile in enumerate(tiles):
            if ends is not None:
                tile = fade(ends[j], tile, extent, 2, is_alone=index == 0)
            tiles[j] = fade(tiles[j - 1], tile, extent, 3) if j else tile
        row = jnp.concatenate([tile[:, :, :kept, :kept] for tile in tiles], 3)
        return [tile[:, :, -extent:] for tile in tiles], row

    rows, ends, number = [], None, 0
    for height, tops in starts_by_length(H, side):
        step = partial(row_of_tiles, height=height)
        corners = number + jnp.arange(len(tops)), tops
        number += len(tops)
        if len(tops) == 1:
            ends, row = step(ends, jax.tree.map(lambda values: values[0], corners))
        else:  # the first rows
            shapes, _ = jax.eval_shape(step, None, jax.tree.map(lambda values: values[0], corners))
            zeros = [jnp.zeros(shape.shape, shape.dtype) for shape in shapes]
            ends, row = jax.lax.scan(step, zeros, corners)  # (rows, B, C', kept, W')
            row = jnp.moveaxis(row, 0, 2).reshape(*row.shape[1:3], -1, row.shape[-1])
        rows.append(row)
    return jnp.concatenate(rows, 2)


def starts_by_length(total, side):
    """Starts of the tiles along an axis of length total, in order: [(tile's length, starts)]."""
    by_length = {}
    for start in range(0, total, int(side * (1 - OVERLAP))):
        by_length.setdefault(min(side, total - start), []).append(start)
    return [(length, jnp.array(starts)) for length, starts in by_length.items()]


def fade(first, second, extent, axis, is_alone=False):
    """The second tile (B, C, h, w), faded in over the first one's end along axis 2 or 3.

    is_alone: True returns the second tile as it is.
    """
    extent = min(first.shape[axis], second.shape[axis], extent)
    shape = [extent if i == axis else 1 for i in range(4)]
    weight = jnp.where(is_alone, 1, jnp.arange(extent) / extent)
    weight = weight.astype(second.dtype).reshape(shape)
    end = jax.lax.slice_in_dim(first, first.shape[axis] - extent, None, axis=axis)
    beginning = jax.lax.slice_in_dim(second, 0, extent, axis=axis)
    unfaded = jax.lax.slice_in_dim(second, extent, None, axis=axis)
    return jnp.concatenate((end * (1 - weight) + beginning * weight, unfaded), axis)
