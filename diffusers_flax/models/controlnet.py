"""FlaxControlNetModel: residuals from an image, for a UNet of Stable Diffusion or SDXL.

Class name, call signature, parameter tree and the residuals' layout, channels-last, are the
published ones; any `config.json` of PyTorch's ControlNetModel.

    controlnet, params = FlaxControlNetModel.from_pretrained("MODEL")
    residuals = controlnet.apply({"params": params}, sample, timesteps, states, image)
    noise = unet.apply(
        {"params": unet_params}, sample, timesteps, states,
        down_block_additional_residuals=residuals.down_block_res_samples,
        mid_block_additional_residual=residuals.mid_block_res_sample,
    ).sample

Source: ControlNet (arXiv 2302.05543); the numerics follow PyTorch diffusers.
"""

from itertools import pairwise
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.typing import DTypeLike

from diffusers_flax.loading.configs import FromSingleFile, FrozenConfig
from diffusers_flax.loading.hub import fetch_file
from diffusers_flax.models.base import FlaxModelMixin
from diffusers_flax.models.blocks import Conv
from diffusers_flax.models.unet import DOWN_BLOCKS, DownPath
from diffusers_flax.outputs import ModelOutput


@struct.dataclass
class FlaxControlNetOutput(ModelOutput):
    """The model's output, channels-last.

    Args:
        down_block_res_samples: list of (B, h, w, C), one per skip connection of the UNet.
        mid_block_res_sample: (B, h, w, C), for its middle block.
    """

    down_block_res_samples: list
    mid_block_res_sample: jax.Array


class FlaxControlNetConditioningEmbedding(nn.Module):
    """Convolutions with SiLU from an image to features with the latents' height and width.

    Each entry of block_out_channels but the first halves height and width. The last convolution
    starts at zero.
    """

    conditioning_embedding_channels: int
    block_out_channels: tuple = (16, 32, 96, 256)
    dtype: DTypeLike = jnp.float32
    rows_axis: str | tuple | None = None

    def setup(self):
        """Make the convolutions."""
        channels = self.block_out_channels
        options = {"dtype": self.dtype, "rows_axis": self.rows_axis}
        self.conv_in = Conv(channels[0], **options)
        self.blocks = [
            Conv(features, stride=stride, padding=((1, 1), (1, 1)), **options)
            for before, after in pairwise(channels)
            for features, stride in ((before, 1), (after, 2))
        ]
        self.conv_out = Conv(self.conditioning_embedding_channels, starts_at_zero=True, **options)

    def __call__(self, conditioning):
        """conditioning (B, H, W, C) -> (B, H / 8, W / 8, conditioning_embedding_channels)."""
        x = nn.silu(self.conv_in(conditioning))
        for block in self.blocks:
            x = nn.silu(block(x))
        return self.conv_out(x)


class FlaxControlNetModel(DownPath, FlaxModelMixin, FromSingleFile):
    """A UNet's encoder with an image as a further input; its outputs start at zero.

    Its fields are the entries of a ControlNet's `config.json`, see FlaxUNet2DConditionModel.
    """

    is_trained = True

    sample_size: int | tuple | None = 32  # no effect: any size may be given
    in_channels: int = 4
    down_block_types: tuple = DOWN_BLOCKS
    only_cross_attention: bool | tuple = False
    block_out_channels: tuple = (320, 640, 1280, 1280)
    layers_per_block: int = 2
    attention_head_dim: int | tuple = 8
    num_attention_heads: int | tuple | None = None  # None: attention_head_dim
    cross_attention_dim: int = 1280
    dropout: float = 0.0  # no other value is implemented
    use_linear_projection: bool = False
    dtype: DTypeLike = jnp.float32
    flip_sin_to_cos: bool = True
    freq_shift: int = 0
    controlnet_conditioning_channel_order: str = "rgb"  # "bgr" reverses the image's channels
    conditioning_embedding_out_channels: tuple = (16, 32, 96, 256)
    conditioning_channels: int = 3  # of the image
    mid_block_type: str = "UNetMidBlock2DCrossAttn"  # "UNetMidBlock2D": one residual block
    transformer_layers_per_block: int | tuple = 1
    addition_embed_type: str | None = None  # "text_time": SDXL's added_cond_kwargs
    addition_time_embed_dim: int | None = None  # length of each time id's embedding
    addition_embed_type_num_heads: int = 64  # no effect with "text_time"
    projection_class_embeddings_input_dim: int | None = None  # length of text_embeds and time ids
    global_pool_conditions: bool = False  # True: residuals are means over all positions
    norm_num_groups: int = 32
    norm_eps: float = 1e-5
    upcast_attention: bool | None = False  # logits and softmax are float32 either way
    gradient_checkpointing: bool = False
    rows_axis: str | tuple | None = None  # None: this device has all rows; not in the config

    weights_name = "diffusion_pytorch_model"
    single_file_component = "controlnet"
    torch_class_name = "ControlNetModel"
    short_name = "ControlNet"
    choices = {  # noqa: RUF012 (a Linen field otherwise)
        "mid_block_type": ("UNetMidBlock2DCrossAttn", "UNetMidBlock2D"),
        "addition_embed_type": (None, "text_time"),
        "dropout": (0.0,),
        "controlnet_conditioning_channel_order": ("rgb", "bgr"),
    }

    @nn.nowrap
    def _file_content(self):
        """The config.json for PyTorch, whose class has no sample_size and no dropout."""
        content = super()._file_content()
        return {key: content[key] for key in content if key not in ("sample_size", "dropout")}

    @classmethod
    def from_unet(
        cls,
        unet,
        controlnet_conditioning_channel_order="rgb",
        conditioning_embedding_out_channels=(16, 32, 96, 256),
        load_weights_from_unet=True,
        conditioning_channels=3,
        *,
        params=None,
        rng=None,
    ):
        """A ControlNet to train for a UNet.

        Args:
            unet: FlaxUNet2DConditionModel.
            controlnet_conditioning_channel_order, conditioning_embedding_out_channels,
                conditioning_channels: config entries.
            load_weights_from_unet: True copies the UNet's parameters into the new tree.
            params: the UNet's parameters, needed to copy them.
            rng: PRNG key of the other parameters; None is jax.random.key(0).

        Returns:
            (module, params): module computes in the UNet's dtype; copied parameters are the
            UNet's arrays, new ones float32.
        """
        shared = {name: x for name, x in unet.config.items() if name in cls.__dataclass_fields__}
        controlnet = cls(
            **shared,
            dtype=unet.dtype,
            controlnet_conditioning_channel_order=controlnet_conditioning_channel_order,
            conditioning_embedding_out_channels=tuple(conditioning_embedding_out_channels),
            conditioning_channels=conditioning_channels,
        )
        new = controlnet.init_weights(jax.random.key(0) if rng is None else rng)
        if load_weights_from_unet:
            new |= {name: params[name] for name in new.keys() & params.keys()}
        return controlnet, new

    def init_weights(self, rng):
        """Random float32 parameters of this configuration. rng: a PRNG key."""
        (sample, *others), options = self.example_inputs()
        factor = 2 ** (len(self.conditioning_embedding_out_channels) - 1)
        sides = (factor * side for side in sample.shape[2:])
        image = jnp.zeros((1, self.conditioning_channels, *sides))
        return self.init(rng, sample, *others, image, **options)["params"]

    def setup(self):
        """Check the configuration and make the blocks."""
        self.make_down_path()
        channels, num_layers = self.block_out_channels, self.per_block("layers_per_block")
        self.controlnet_cond_embedding = FlaxControlNetConditioningEmbedding(
            channels[0], self.conditioning_embedding_out_channels, self.dtype, self.rows_axis
        )
        widths = [channels[0]]
        for i in range(len(channels)):
            widths += [channels[i]] * (num_layers[i] + (i < len(channels) - 1))
        self.controlnet_down_blocks = [self.output_layer(width) for width in widths]
        self.controlnet_mid_block = self.output_layer(channels[-1])

    def output_layer(self, channels):
        """A 1x1 convolution that starts at zero."""
        options = {"dtype": self.dtype, "rows_axis": self.rows_axis}
        return Conv(channels, 1, starts_at_zero=True, **options)

    def __call__(
        self,
        sample,
        timesteps,
        encoder_hidden_states,
        controlnet_cond,
        conditioning_scale=1.0,
        return_dict=True,
        train=False,
        added_cond_kwargs=None,
        guess_mode=False,
    ):
        """The residuals for a UNet's call with the same sample, timesteps and text.

        Args:
            sample: (B, in_channels, H, W).
            timesteps: (B,), or a scalar for all.
            encoder_hidden_states: text states, (B, T, cross_attention_dim).
            controlnet_cond: image in [0, 1], (B, conditioning_channels, 8 H, 8 W).
            conditioning_scale: factor of the residuals, a number or (B,).
            return_dict: False returns a plain tuple.
            train: without effect, as there is no dropout.
            added_cond_kwargs: for SDXL as in the UNet's call, else None.
            guess_mode: True scales the residuals from 0.1 (the first) to 1 (the middle block's).

        Returns:
            FlaxControlNetOutput: residuals in `dtype`.

        Raises:
            ValueError: an input's shape does not match the configuration.
        """
        x, time_emb, context = self.embed(
            sample, timesteps, encoder_hidden_states, added_cond_kwargs
        )
        x = x + self.embed_condition(controlnet_cond)
        x, skips = self.down(x, time_emb, context)
        x = self.mid_block(x, time_emb, context)
        layers = *self.controlnet_down_blocks, self.controlnet_mid_block
        residuals = [layer(features) for layer, features in zip(layers, (*skips, x), strict=True)]
        scale = jnp.asarray(conditioning_scale, self.dtype).reshape(-1, 1, 1, 1)
        scales = [scale] * len(residuals)
        if guess_mode and not self.global_pool_conditions:
            levels = np.logspace(-1, 0, len(residuals))
            scales = [scale * jnp.asarray(level, self.dtype) for level in levels]
        residuals = [residual * scale for residual, scale in zip(residuals, scales)]
        if self.global_pool_conditions:
            residuals = [residual.mean((1, 2), keepdims=True) for residual in residuals]
            if self.rows_axis is not None:
                residuals = jax.lax.pmean(residuals, self.rows_axis)
        *down, middle = residuals
        return FlaxControlNetOutput(down, middle) if return_dict else (down, middle)

    def embed_condition(self, image):
        """Features of control images, (B, H, W, C)."""
        if self.controlnet_conditioning_channel_order == "bgr":
            image = image[:, ::-1]
        image = jnp.transpose(image.astype(self.dtype), (0, 2, 3, 1))
        return self.controlnet_cond_embedding(image)


class FlaxMultiControlNetModel(nn.Module):
    """Several ControlNets as one, with the sum of their residuals.

    Its parameters are {"nets_0": the first ControlNet's, "nets_1": ...}. Its files are in the
    directories controlnet, controlnet_1, ..., as PyTorch's MultiControlNetModel's.

    Args:
        nets: tuple of FlaxControlNetModel.
    """

    nets: tuple

    torch_class_name = "MultiControlNetModel"

    def __call__(
        self,
        sample,
        timesteps,
        encoder_hidden_states,
        controlnet_cond,
        conditioning_scale=1.0,
        return_dict=True,
        **options,
    ):
        """The sums of the ControlNets' residuals.

        Args:
            controlnet_cond: an image per ControlNet, (B, nets, C, 8 H, 8 W), or a sequence.
            conditioning_scale: one for all, or a sequence with one per ControlNet.
            sample, timesteps, encoder_hidden_states, return_dict, **options: as for
                FlaxControlNetModel.

        Returns:
            FlaxControlNetOutput.

        Raises:
            ValueError: the number of images or scales is not the number of ControlNets.
        """
        images = controlnet_cond
        if not isinstance(images, list | tuple):
            images = [images[:, i] for i in range(images.shape[1])]
        scales = conditioning_scale
        if not isinstance(scales, list | tuple):
            scales = [scales] * len(self.nets)
        outputs = [
            net(sample, timesteps, encoder_hidden_states, image, scale, False, **options)
            for net, image, scale in zip(self.nets, images, scales, strict=True)
        ]
        down, middle = jax.tree.map(lambda first, *others: sum(others, first), *outputs)
        return FlaxControlNetOutput(down, middle) if return_dict else (down, middle)

    @property
    def config(self):
        """{"controlnet": the first ControlNet's config, "controlnet_1": ...}, read-only."""
        return FrozenConfig(
            {f"controlnet{suffix(i)}": net.config for i, net in enumerate(self.nets)}
        )

    @nn.nowrap
    def params_of(self, params):
        """The parameters as a tree; params: the tree, or a list with an entry per ControlNet."""
        if isinstance(params, list | tuple):
            return {f"nets_{i}": tree for i, tree in enumerate(params)}
        return params

    @nn.nowrap
    def _param_shapes(self):
        """See FlaxModelMixin."""
        return {
            f"nets_{i}/{key}": shape
            for i, net in enumerate(self.nets)
            for key, shape in net._param_shapes().items()
        }

    @classmethod
    def from_config(cls, configs, dtype=jnp.float32):
        """The module with these ControlNets' configs."""
        return cls(tuple(FlaxControlNetModel.from_config(x, dtype=dtype) for x in configs))

    @classmethod
    def load_config(cls, path, subfolder="controlnet", revision=None, **hub_options):
        """The configs of a pipeline directory's or hub id's ControlNets, a list."""
        configs, folder, options = [], subfolder, {"revision": revision, **hub_options}
        while fetch_file(path, "config.json", folder, **options):
            configs.append(FlaxControlNetModel.load_config(path, subfolder=folder, **options))
            folder = subfolder + suffix(len(configs))
        return configs

    @classmethod
    def from_pretrained(
        cls, path, dtype=jnp.float32, *, subfolder="controlnet", revision=None, **options
    ):
        """Read several ControlNets; see FlaxModelMixin.

        path: a pipeline's directory or hub id, or a sequence with the directory, hub id or file of
        each ControlNet.
        """
        if isinstance(path, list | tuple):
            places = [(source, None) for source in path]
        else:
            number = len(cls.load_config(path, subfolder, revision))
            places = [(path, subfolder + suffix(i)) for i in range(number)]
        load = FlaxControlNetModel.from_pretrained
        options |= {"dtype": dtype, "revision": revision}
        nets, params = zip(*(load(x, subfolder=folder, **options) for x, folder in places))
        module = cls(nets)
        return module, module.params_of(params)

    @nn.nowrap
    def save_pretrained(self, save_directory, params, **options):
        """Write each ControlNet to save_directory, save_directory_1, ...; see FlaxModelMixin."""
        params = self.params_of(params)
        for i, net in enumerate(self.nets):
            net.save_pretrained(
                f"{Path(save_directory)}{suffix(i)}", params[f"nets_{i}"], **options
            )


def suffix(i):
    """The end of ControlNet i's directory name, as PyTorch's."""
    return f"_{i}" if i else ""
