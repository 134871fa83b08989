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
from diffusers_flax.models.blocks import Conv, NoInitTrace, repeat_pixels
from diffusers_flax.models.convolution import convolve
from diffusers_flax.models.spatial_parallelism import with_halo
from diffusers_flax.models.vae import FlaxDecoderOutput, check_sample
from diffusers_flax.outputs import ModelOutput

# Hub ids of the published models, for Stable Diffusion 1 and 2, and for SDXL.
TINY_VAES = ("madebyollin/taesd", "madebyollin/taesdxl")


@struct.dataclass
class FlaxAutoencoderTinyOutput(ModelOutput):
    """The output of encode: scaled latents (B, latent_channels, h, w)."""

    latents: jax.Array


class BiasFreeConv(NoInitTrace, nn.Module):
    """A 3x3 convolution without bias."""

    features: int
    stride: int = 1
    dtype: DTypeLike = jnp.float32
    rows_axis: str | tuple | None = None

    @nn.compact
    def __call__(self, x):
        """x (B, H, W, C) -> (B, H / stride, W / stride, features)."""
        shape = (3, 3, x.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.lecun_normal(), shape)
        x, kernel = x.astype(self.dtype), kernel.astype(self.dtype)
        padding = ((1, 1), (1, 1))
        if self.rows_axis is not None:
            x, padding = with_halo(x, 3, self.stride, padding, self.rows_axis)
        return convolve(x, kernel, self.stride, padding)


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


class EncoderLayers(nn.Module):
    """The encoder's layers, numbered as in PyTorch's nn.Sequential."""

    latent_channels: int
    width: int
    num_blocks: tuple
    dtype: DTypeLike
    rows_axis: str | tuple | None = None

    @nn.compact
    def __call__(self, x):
        names = map(str, itertools.count())
        options = {"dtype": self.dtype, "rows_axis": self.rows_axis}
        x = Conv(self.width, name=next(names), **options)(x)
        for level, num_blocks in enumerate(self.num_blocks):
            if level > 0:
                x = BiasFreeConv(self.width, 2, name=next(names), **options)(x)
            for _ in range(num_blocks):
                x = TinyBlock(self.width, name=next(names), **options)(x)
        return Conv(self.latent_channels, name=next(names), **options)(x)


class DecoderLayers(nn.Module):
    """The decoder's layers, numbered as in PyTorch's nn.Sequential."""

    out_channels: int
    width: int
    num_blocks: tuple
    upsampling_factor: int
    dtype: DTypeLike
    rows_axis: str | tuple | None = None

    @nn.compact
    def __call__(self, x):
        names = map(str, itertools.count())
        options = {"dtype": self.dtype, "rows_axis": self.rows_axis}
        x = nn.relu(Conv(self.width, name=next(names), **options)(x))
        next(names)  # PyTorch numbers the ReLU
        for level, num_blocks in enumerate(self.num_blocks):
            if level > 0:
                x = repeat_pixels(x, self.upsampling_factor)
                next(names)  # PyTorch numbers the upsampling
                x = BiasFreeConv(self.width, name=next(names), **options)(x)
            for _ in range(num_blocks):
                x = TinyBlock(self.width, name=next(names), **options)(x)
        return Conv(self.out_channels, name=next(names), **options)(x)


class Encoder(nn.Module):
    """Images (B, H, W, 3) in [-1, 1] to scaled latents (B, h, w, latent_channels)."""

    layers: EncoderLayers

    def __call__(self, x):
        return self.layers((x + 1) / 2)


class Decoder(nn.Module):
    """Scaled latents (B, h, w, latent_channels) to images (B, H, W, 3), about [-1, 1]."""

    layers: DecoderLayers

    def __call__(self, x):
        return 2 * self.layers(3 * jnp.tanh(x / 3)) - 1


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
    latent_magnitude: float = 3
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
        for name in ("encoder", "decoder"):
            widths = tuple(getattr(self, f"{name}_block_out_channels"))
            counts = tuple(getattr(self, f"num_{name}_blocks"))
            if len(set(widths)) != 1 or len(widths) != len(counts):
                raise ValueError(
                    f"{name}_block_out_channels={widths} does not suit num_{name}_blocks={counts}: "
                    f"it must be one width, repeated {len(counts)} times"
                )
        if self.upsampling_scaling_factor < 1:
            raise ValueError(
                f"upsampling_scaling_factor={self.upsampling_scaling_factor} must be at least 1"
            )
        # parent=None: the layers are children of the encoder, not of this module.
        options = {"dtype": self.dtype, "rows_axis": self.rows_axis, "parent": None}
        encoder = EncoderLayers(
            self.latent_channels,
            self.encoder_block_out_channels[0],
            tuple(self.num_encoder_blocks),
            **options,
        )
        decoder = DecoderLayers(
            self.out_channels,
            self.decoder_block_out_channels[0],
            tuple(self.num_decoder_blocks),
            self.upsampling_scaling_factor,
            **options,
        )
        self.encoder, self.decoder = Encoder(encoder), Decoder(decoder)

    def init_weights(self, rng):
        """Random float32 parameters of this configuration. rng: a PRNG key."""
        size = 2 ** len(self.num_encoder_blocks)
        return self.init(rng, jnp.zeros((1, self.in_channels, size, size)))["params"]

    def scale_latents(self, latents):
        """Scaled latents to [0, 1], for storing them as an image."""
        return jnp.clip(latents / (2 * self.latent_magnitude) + self.latent_shift, 0, 1)

    def unscale_latents(self, stored):
        """The inverse of scale_latents: [0, 1] to scaled latents."""
        return (stored - self.latent_shift) * (2 * self.latent_magnitude)

    def encode(self, sample, return_dict=True):
        """Scaled latents of images, without noise.

        Args:
            sample: images (B, in_channels, H, W) in [-1, 1]; H and W multiples of
                2 ** (len(num_encoder_blocks) - 1).
            return_dict: False returns a plain tuple.

        Returns:
            FlaxAutoencoderTinyOutput; latents is (B, latent_channels, h, w) in `dtype`.

        Raises:
            ValueError: sample has another shape.
        """
        check_sample(sample, self.in_channels, 2 ** (len(self.num_encoder_blocks) - 1))
        latents = self.encoder(jnp.transpose(sample.astype(jnp.float32), (0, 2, 3, 1)))
        latents = jnp.transpose(latents, (0, 3, 1, 2))
        return FlaxAutoencoderTinyOutput(latents) if return_dict else (latents,)

    def decode(self, latents, return_dict=True):
        """Images of latents.

        Args:
            latents: as the UNet makes them, scaled, (B, latent_channels, h, w).
            return_dict: False returns a plain tuple.

        Returns:
            FlaxDecoderOutput; sample is (B, out_channels, H, W) in `dtype`, about [-1, 1].

        Raises:
            ValueError: latents have another shape.
        """
        if latents.ndim != 4 or latents.shape[1] != self.latent_channels:
            raise ValueError(
                f"latents have shape {tuple(latents.shape)}, this VAE decodes "
                f"(batch, {self.latent_channels}, height, width)"
            )
        sample = self.decoder(jnp.transpose(latents.astype(jnp.float32), (0, 2, 3, 1)))
        sample = jnp.transpose(sample, (0, 3, 1, 2))
        return FlaxDecoderOutput(sample) if return_dict else (sample,)

    def __call__(self, sample, return_dict=True):
        """Encode, round the latents to 8 bits as PyTorch's forward does, and decode."""
        latents = self.encode(sample).latents.astype(jnp.float32)
        stored = jnp.round(255 * self.scale_latents(latents))
        return self.decode(self.unscale_latents(stored / 255), return_dict)


def choose_tiny_vae(decoder, preview, published):
    """Directory or hub id of the TAESD that images or previews need; None: neither does.

    Args:
        decoder: acceleration.plans.TinyDecoder or None.
        preview: acceleration.previews.Preview or None.
        published: the hub id in TINY_VAES for the model's family.

    Raises:
        ValueError: both arguments name a TAESD, or it does not exist or is of another family.
    """
    if not decoder and (not preview or preview.path is None):
        return None
    if decoder and preview and preview.path:
        raise ValueError(
            f"preview.path={preview.path} and accelerate=taesd: previews have the images' decoder; "
            "leave preview.path= out"
        )
    source = (decoder or preview).path or published
    if source in TINY_VAES and source != published:
        raise ValueError(
            f"the TAESD {source} is of the other family of models; this one's is {published}"
        )
    source, file = locate("accelerate=taesd:path" if decoder else "preview.path", source)
    if file:
        raise ValueError(f"the TAESD {source}/{file} is not a directory or hub id; name one")
    return source


def open_tiny_vae(source, vae, dtype, **hub_options):
    """The FlaxAutoencoderTiny of a directory or hub id, without weights.

    Args:
        source: directory or hub id.
        vae: the VAE whose latents it decodes, or its config.
        dtype: compute dtype.

    Raises:
        ValueError: its config is missing, or it decodes other latents.
    """
    config = FlaxAutoencoderTiny.load_config(source, **hub_options)
    if not str(config.get("_class_name")).endswith("AutoencoderTiny"):
        raise ValueError(
            f"{source} is of class {config.get('_class_name', 'unknown')}, not AutoencoderTiny; "
            "name the directory of a TAESD"
        )
    tiny = FlaxAutoencoderTiny.from_config(config, dtype=dtype)
    check_latents(tiny, vae, source)
    return tiny


def check_latents(tiny, vae, source):
    """Raise a ValueError unless a FlaxAutoencoderTiny decodes the latents of vae, or its config."""
    channels, factor = tiny.latent_channels, 2 ** (len(tiny.encoder_block_out_channels) - 1)
    wanted = vae.latent_channels, 2 ** (len(vae.block_out_channels) - 1)
    if (channels, factor) != wanted:
        raise ValueError(
            f"the TAESD {source} decodes latents of {channels} channels to images {factor} times "
            f"as large; the model's have {wanted[0]} and {wanted[1]}; name one for this model"
        )
