"""FlaxAutoencoderTiny: TAESD, a small approximation of the VAE, for fast decoding and previews.

One architecture for Stable Diffusion (madebyollin/taesd) and SDXL (madebyollin/taesdxl); any
`AutoencoderTiny` config.json. Its latents are scaled like the UNet's: its scaling_factor is 1.

    vae, params = FlaxAutoencoderTiny.from_pretrained("madebyollin/taesd")
    images = vae.apply({"params": params}, scaled_latents, method=vae.decode).sample

Source: github.com/madebyollin/taesd; numerics of PyTorch diffusers.
"""

import itertools
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from diffusers_flax.loading.hub import locate
from diffusers_flax.models.base import FlaxModelMixin
from diffusers_flax.models.blocks import Conv, repeat_pixels
from diffusers_flax.models.vae import FlaxDecoderOutput, check_sample
from diffusers_flax.outputs import ModelOutput

# Hub ids of the published models, for Stable Diffusion 1 and 2, and for SDXL.
TINY_VAES = ("madebyollin/taesd", "madebyollin/taesdxl")


@struct.dataclass
class FlaxAutoencoderTinyOutput(ModelOutput):
    """The output of encode: scaled latents (B, latent_channels, h, w)."""

    latents: jax.Array


class BlockConvs(nn.Module):
    """Three 3x3 convolutions with ReLU between them; PyTorch numbers the ReLUs too."""

    width: int
    dtype: DTypeLike
    rows_axis: str | tuple | None = None

    @nn.compact
    def __call__(self, x):
        conv = partial(Conv, self.width, dtype=self.dtype, rows_axis=self.rows_axis)
        x = nn.relu(conv(name="0")(x))
        x = nn.relu(conv(name="2")(x))
        return conv(name="4")(x)


class TinyBlock(nn.Module):
    """Convolutions plus the input, then ReLU."""

    width: int
    dtype: DTypeLike
    rows_axis: str | tuple | None = None

    @nn.compact
    def __call__(self, x):
        convs = BlockConvs(self.width, self.dtype, self.rows_axis, name="conv")
        return nn.relu(x + convs(x))


class CoderLayers(nn.Module):
    """The encoder's or decoder's layers, numbered as in PyTorch's nn.Sequential."""

    out_channels: int
    width: int
    num_blocks: tuple
    upsampling_factor: int | None  # between the decoder's levels; None: the encoder, which halves
    dtype: DTypeLike
    rows_axis: str | tuple | None = None

    @nn.compact
    def __call__(self, x):
        names = map(str, itertools.count())
        options = {"dtype": self.dtype, "rows_axis": self.rows_axis}
        x = Conv(self.width, name=next(names), **options)(x)
        if self.upsampling_factor:
            x = nn.relu(x)
            next(names)  # PyTorch numbers the ReLU
        for level, num_blocks in enumerate(self.num_blocks):
            if level > 0:
                stride = 2
                if self.upsampling_factor:
                    x, stride = repeat_pixels(x, self.upsampling_factor), 1
                    next(names)  # PyTorch numbers the upsampling
                conv = partial(Conv, self.width, stride=stride, use_bias=False, **options)
                x = conv(name=next(names))(x)
            for _ in range(num_blocks):
                x = TinyBlock(self.width, name=next(names), **options)(x)
        return Conv(self.out_channels, name=next(names), **options)(x)


class Coder(nn.Module):
    """The encoder or decoder, a level of the parameter tree that holds the layers."""

    layers: CoderLayers

    def __call__(self, x):
        return self.layers(x)


class FlaxAutoencoderTiny(nn.Module, FlaxModelMixin):
    """The tiny autoencoder; its fields are the entries of an AutoencoderTiny `config.json`.

    `dtype` is the compute dtype, `rows_axis` for spatial parallelism, see blocks.py. As in PyTorch,
    block_out_channels is always decoder_block_out_channels, and force_upcast False.
    """

    in_channels: int = 3
    out_channels: int = 3
    encoder_block_out_channels: tuple = (64, 64, 64, 64)
    decoder_block_out_channels: tuple = (64, 64, 64, 64)
    latent_channels: int = 4
    upsampling_scaling_factor: int = 2
    num_encoder_blocks: tuple = (1, 3, 3, 3)
    num_decoder_blocks: tuple = (3, 3, 3, 1)
    latent_magnitude: float = 3  # these two are for storing latents as images
    latent_shift: float = 0.5
    scaling_factor: float = 1.0
    force_upcast: bool = False
    block_out_channels: tuple | None = None
    dtype: DTypeLike = jnp.float32
    rows_axis: str | tuple | None = None  # None: this device has all rows; not in the config

    weights_name = "diffusion_pytorch_model"
    torch_class_name = "AutoencoderTiny"
    fixed_config = {  # noqa: RUF012 (a Linen field otherwise)
        "act_fn": "relu",
        "shift_factor": 0.0,
        "upsample_fn": "nearest",
    }
    ignored_config = ()

    def __post_init__(self):
        self.block_out_channels = self.decoder_block_out_channels
        self.force_upcast = False
        super().__post_init__()

    def setup(self):
        # parent=None: the layers are children of the encoder, not of this module.
        options = {"dtype": self.dtype, "rows_axis": self.rows_axis, "parent": None}
        width, counts = self.encoder_block_out_channels[0], tuple(self.num_encoder_blocks)
        self.encoder = Coder(CoderLayers(self.latent_channels, width, counts, None, **options))
        width, counts = self.decoder_block_out_channels[0], tuple(self.num_decoder_blocks)
        factor = self.upsampling_scaling_factor
        self.decoder = Coder(CoderLayers(self.out_channels, width, counts, factor, **options))

    def init_weights(self, rng):
        """Random float32 parameters of this configuration. rng: a PRNG key."""
        size = 2 ** len(self.num_encoder_blocks)
        return self.init(rng, jnp.zeros((1, self.in_channels, size, size)))["params"]

    def encode(self, sample, return_dict=True):
        """Scaled latents of images, without noise.

        Args:
            sample: images (B, in_channels, H, W) in [-1, 1]; H and W multiples of
                2 ** (len(num_encoder_blocks) - 1).
            return_dict: False returns a plain tuple.

        Returns:
            FlaxAutoencoderTinyOutput; latents is (B, latent_channels, h, w) in `dtype`.
        """
        check_sample(sample, self.in_channels, 2 ** (len(self.num_encoder_blocks) - 1))
        x = jnp.transpose(sample.astype(jnp.float32), (0, 2, 3, 1))
        latents = jnp.transpose(self.encoder((x + 1) / 2), (0, 3, 1, 2))
        return FlaxAutoencoderTinyOutput(latents) if return_dict else (latents,)

    def decode(self, latents, return_dict=True):
        """Images of latents.

        Args:
            latents: as the UNet makes them, scaled, (B, latent_channels, h, w).
            return_dict: False returns a plain tuple.

        Returns:
            FlaxDecoderOutput; sample is (B, out_channels, H, W) in `dtype`, about [-1, 1].
        """
        x = jnp.transpose(latents.astype(jnp.float32), (0, 2, 3, 1))
        sample = jnp.transpose(2 * self.decoder(3 * jnp.tanh(x / 3)) - 1, (0, 3, 1, 2))
        return FlaxDecoderOutput(sample) if return_dict else (sample,)

    def __call__(self, sample, return_dict=True):
        """Encode and decode; PyTorch's forward also rounds the latents to 8 bits."""
        return self.decode(self.encode(sample).latents, return_dict)


def choose_tiny_vae(decoder, preview, published):
    """Directory or hub id of the TAESD that images or previews need; None: neither does.

    Args:
        decoder: acceleration.plans.TinyDecoder or None; previews have the images' decoder.
        preview: acceleration.previews.Preview or None.
        published: the hub id in TINY_VAES for the model's family.

    Raises:
        ValueError: it does not exist or is of another family.
    """
    if not decoder and (not preview or preview.path is None):
        return None
    source = (decoder or preview).path or published
    if source in TINY_VAES and source != published:
        raise ValueError(
            f"the TAESD {source} is of the other family of models; this one's is {published}"
        )
    return locate("accelerate=taesd:path" if decoder else "preview.path", source)[0]


def open_tiny_vae(source, dtype, **hub_options):
    """The FlaxAutoencoderTiny of a directory or hub id, without weights.

    Args:
        source: directory or hub id.
        dtype: compute dtype.

    Raises:
        ValueError: its config is missing or of another class.
    """
    config = FlaxAutoencoderTiny.load_config(source, **hub_options)
    FlaxAutoencoderTiny.check_class(config, source)
    return FlaxAutoencoderTiny.from_config(config, dtype=dtype)
