"""FlaxUNet2DConditionModel: the denoiser of Stable Diffusion 1.x, 2.x, XL and InstructPix2Pix.

Class name, call signature and parameter tree are the published ones; any `config.json` of these
families.

    unet, params = FlaxUNet2DConditionModel.from_pretrained("MODEL", subfolder="unet")
    noise = unet.apply({"params": params}, sample, timesteps, encoder_hidden_states).sample

Source: Latent Diffusion Models (arXiv 2112.10752) and SDXL (arXiv 2307.01952); the numerics
follow PyTorch diffusers.
"""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.typing import DTypeLike

from diffusers_flax.loading.configs import FromSingleFile
from diffusers_flax.models.base import FlaxModelMixin
from diffusers_flax.models.blocks import (
    Conv,
    Dense,
    Downsample2D,
    GroupNorm,
    ResnetBlock2D,
    Transformer2D,
    Upsample2D,
    checkpointed,
)
from diffusers_flax.outputs import ModelOutput

DOWN_BLOCKS = (*("CrossAttnDownBlock2D",) * 3, "DownBlock2D")  # Stable Diffusion's
CROSS_ATTENTION_BLOCKS = {
    "DownBlock2D": False,
    "CrossAttnDownBlock2D": True,
    "UpBlock2D": False,
    "CrossAttnUpBlock2D": True,
}


@struct.dataclass
class FlaxUNet2DConditionOutput(ModelOutput):
    """The model's output: sample, (B, out_channels, H, W)."""

    sample: jax.Array


class UNetLevel(nn.Module):
    """Base of DownBlock and UpBlock: residual blocks, each with an optional transformer."""

    out_channels: int
    num_layers: int
    resnet: partial
    transformer: partial | None
    resample: partial | None  # after the residual blocks

    def setup(self):
        self.resnets = [self.resnet(self.out_channels) for _ in range(self.num_layers)]
        if self.transformer is not None:
            self.attentions = [self.transformer() for _ in range(self.num_layers)]

    def attend(self, i, x, context):
        """The transformer of layer i, if there is one."""
        return x if self.transformer is None else self.attentions[i](x, context)


class DownBlock(UNetLevel):
    """Residual blocks with optional transformers, then downsampling."""

    def setup(self):
        super().setup()
        if self.resample:
            self.downsamplers = [self.resample(self.out_channels)]

    def __call__(self, x, time_emb, context):
        """x (B, H, W, C) -> (B, H/2, W/2, out_channels), and the skip connections."""
        skips = []
        for i in range(self.num_layers):
            x = self.layer(i, x, time_emb, context)
            skips.append(x)
        if self.resample:
            x = self.downsamplers[0](x)
            skips.append(x)
        return x, skips

    def layer(self, i, x, time_emb, context):
        """Residual block i and its transformer."""
        return self.attend(i, self.resnets[i](x, time_emb), context)


class UpBlock(UNetLevel):
    """Residual blocks over skip connections, with optional transformers, then upsampling."""

    def setup(self):
        super().setup()
        if self.resample:
            self.upsamplers = [self.resample(self.out_channels)]

    def __call__(self, x, skips, time_emb, context, shape):
        """x (B, H, W, C) -> (B, *shape, out_channels); the last skip connection is the first used.

        shape: (height, width) after upsampling.
        """
        for i in range(self.num_layers):
            x = self.layer(i, x, skips[-1 - i], time_emb, context)
        return self.upsamplers[0](x, shape) if self.resample else x

    def layer(self, i, x, skip, time_emb, context):
        """Residual block i over the features and the skip connection, and its transformer."""
        x = self.resnets[i](jnp.concatenate((x, skip), axis=-1), time_emb)
        return self.attend(i, x, context)


class UNetMidBlock(nn.Module):
    """A transformer between two residual blocks, or one residual block alone."""

    out_channels: int
    resnet: partial
    transformer: partial | None

    @nn.compact
    def __call__(self, x, time_emb, context):
        x = self.resnet(self.out_channels, name="resnets_0")(x, time_emb)
        if self.transformer is None:
            return x
        x = self.transformer(name="attentions_0")(x, context)
        return self.resnet(self.out_channels, name="resnets_1")(x, time_emb)


def sinusoidal_embedding(timesteps, dim, flip_sin_to_cos=True, freq_shift=0):
    """Sine and cosine of timesteps (B,) at dim / 2 frequencies, 1 to 1/10000: (B, dim) float32.

    flip_sin_to_cos: True puts the cosines first, as Stable Diffusion does; freq_shift: 0 (Stable
    Diffusion) or 1, subtracted from the number of frequencies.

    Source: DDPM (arXiv 2006.11239), appendix B, after arXiv 1706.03762, section 3.5.
    """
    half = dim // 2
    frequencies = np.exp(-np.log(10000.0) * np.arange(half) / (half - freq_shift))
    angles = timesteps.astype(jnp.float32)[:, None] * frequencies.astype(np.float32)
    if flip_sin_to_cos:
        return jnp.concatenate((jnp.cos(angles), jnp.sin(angles)), axis=-1)
    return jnp.concatenate((jnp.sin(angles), jnp.cos(angles)), axis=-1)


def guidance_embedding(guidance_scale, dim):
    """The timestep_cond of a UNet that is distilled with guidance.

    Args:
        guidance_scale: (B,), 1 for no guidance.
        dim: the UNet's time_cond_proj_dim.

    Returns:
        (B, dim) float32.

    Source: Latent Consistency Models (arXiv 2310.04378), section 4.2; scale and order of the
    frequencies as in the published models.
    """
    return sinusoidal_embedding(1000 * (guidance_scale - 1), dim, False, freq_shift=1)


class TimestepEmbedding(nn.Module):
    """Two dense layers with SiLU between, over the input plus a projected condition."""

    dim: int
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x, condition=None):
        if condition is not None:
            project = Dense(x.shape[-1], use_bias=False, dtype=self.dtype, name="cond_proj")
            x = x + project(condition)
        x = nn.silu(Dense(self.dim, dtype=self.dtype, name="linear_1")(x))
        return Dense(self.dim, dtype=self.dtype, name="linear_2")(x)


class DownPath(nn.Module):
    """Base of UNet and ControlNet: embeddings, down blocks and the middle block.

    A subclass has the fields of its config.json, and `short_name`, for errors.
    """

    short_name = "UNet"
    choices = {  # noqa: RUF012 (a Linen field otherwise)
        "mid_block_type": (None, "UNetMidBlock2DCrossAttn"),
        "addition_embed_type": (None, "text_time"),
        "num_attention_heads": (None,),
        "dropout": (0.0,),
    }

    # The only supported value of options that are not implemented, besides null.
    fixed_config = {  # noqa: RUF012 (a Linen field otherwise)
        "act_fn": "silu",
        "class_embed_type": None,
        "downsample_padding": 1,
        "encoder_hid_dim": None,
        "encoder_hid_dim_type": None,
        "mid_block_scale_factor": 1,
        "num_class_embeds": None,
        "resnet_time_scale_shift": "default",
    }

    def example_inputs(self):
        """A call's smallest arguments, zeros: (positional, keywords)."""
        self.check_choices()
        factor = 2 ** (len(self.block_out_channels) - 1)
        sample = jnp.zeros((1, self.in_channels, factor, factor))
        context = jnp.zeros((1, 1, self.cross_attention_dim))
        added = None
        if self.addition_embed_type is not None:
            per_id = self.addition_time_embed_dim  # one id; no parameter depends on their number
            text_dim = self.projection_class_embeddings_input_dim - per_id
            added = {"text_embeds": jnp.zeros((1, text_dim)), "time_ids": jnp.zeros((1, 1))}
        return (sample, jnp.zeros((1,), jnp.int32), context), {"added_cond_kwargs": added}

    def per_block(self, name):
        """A config entry as one value per down block."""
        value, num_blocks = getattr(self, name), len(self.block_out_channels)
        values = tuple(value) if isinstance(value, tuple | list) else (value,) * num_blocks
        if len(values) != num_blocks:
            raise ValueError(
                f"{name} has {len(values)} entries, block_out_channels has {num_blocks}; "
                "give one per block"
            )
        return values

    def resnet(self):
        """Constructor of residual blocks."""
        return partial(
            checkpointed(ResnetBlock2D, self.gradient_checkpointing),
            num_groups=self.norm_num_groups,
            epsilon=self.norm_eps,
            dtype=self.dtype,
            rows_axis=self.rows_axis,
        )

    def transformer(self, i, only_cross_attention=False):
        """Constructor of level i's transformers."""
        heads = "attention_head_dim" if self.num_attention_heads is None else "num_attention_heads"
        return partial(
            Transformer2D,
            num_heads=self.per_block(heads)[i],
            num_layers=self.per_block("transformer_layers_per_block")[i],
            num_groups=self.norm_num_groups,
            use_linear_projection=self.use_linear_projection,
            only_cross_attention=only_cross_attention,
            gradient_checkpointing=self.gradient_checkpointing,
            dtype=self.dtype,
            rows_axis=self.rows_axis,
        )

    def block_transformer(self, block_type, i):
        """Constructor of the transformers of a level's block; None: this block type has none."""
        if block_type not in CROSS_ATTENTION_BLOCKS:
            raise ValueError(
                f"block type {block_type} is not supported; supported types: "
                f"{', '.join(CROSS_ATTENTION_BLOCKS)}"
            )
        if CROSS_ATTENTION_BLOCKS[block_type]:
            return self.transformer(i, self.per_block("only_cross_attention")[i])
        return None

    def make_down_path(self):
        """Check the configuration and make the modules."""
        self.check_choices()
        channels, num_layers = self.block_out_channels, self.per_block("layers_per_block")
        resnet = self.resnet()
        self.time_embedding = TimestepEmbedding(4 * channels[0], self.dtype)
        if self.addition_embed_type is not None:
            self.add_embedding = TimestepEmbedding(4 * channels[0], self.dtype)
        options = {"dtype": self.dtype, "rows_axis": self.rows_axis}
        self.conv_in = Conv(channels[0], **options)
        resample = partial(Downsample2D, **options)
        self.down_blocks = [
            DownBlock(
                channels[i],
                num_layers[i],
                resnet,
                self.block_transformer(block_type, i),
                resample if i < len(channels) - 1 else None,
            )
            for i, block_type in enumerate(self.per_block("down_block_types"))
        ]
        if self.mid_block_type is not None:
            has_transformer = self.mid_block_type == "UNetMidBlock2DCrossAttn"
            transformer = self.transformer(len(channels) - 1) if has_transformer else None
            self.mid_block = UNetMidBlock(channels[-1], resnet, transformer)

    def embed(
        self,
        sample,
        timesteps,
        encoder_hidden_states,
        added_cond_kwargs=None,
        timestep_cond=None,
    ):
        """The features after conv_in, the time embedding (B, D) and the text states, in `dtype`.

        Arguments and errors as for __call__.
        """
        if sample.ndim != 4 or sample.shape[1] != self.in_channels:
            raise ValueError(
                f"sample has shape {tuple(sample.shape)}, this {self.short_name} takes "
                f"(batch, {self.in_channels}, height, width)"
            )
        if encoder_hidden_states.shape[-1] != self.cross_attention_dim:
            raise ValueError(
                f"encoder_hidden_states are {encoder_hidden_states.shape[-1]} wide, this "
                f"{self.short_name} takes cross_attention_dim={self.cross_attention_dim}; take "
                "both from one model"
            )
        if (added_cond_kwargs is None) != (self.addition_embed_type is None):
            raise ValueError(
                "added_cond_kwargs is needed by SDXL's models and taken by no others; this "
                f"{self.short_name} has addition_embed_type={self.addition_embed_type!r}"
            )

        timesteps = jnp.broadcast_to(jnp.asarray(timesteps), (sample.shape[0],))
        time_emb = sinusoidal_embedding(
            timesteps, self.block_out_channels[0], self.flip_sin_to_cos, self.freq_shift
        )
        time_emb = self.time_embedding(time_emb.astype(self.dtype), timestep_cond)
        if added_cond_kwargs is not None:
            time_emb = time_emb + self._embed_added(**added_cond_kwargs)
        x = jnp.transpose(sample.astype(self.dtype), (0, 2, 3, 1))
        return self.conv_in(x), time_emb, encoder_hidden_states.astype(self.dtype)

    def _embed_added(self, text_embeds, time_ids):
        """SDXL's embedding of pooled text, sizes and crop, (B, 4 * channels[0]).

        Source: SDXL (arXiv 2307.01952), section 2.2.
        """
        ids = sinusoidal_embedding(
            time_ids.reshape(-1),
            self.addition_time_embed_dim,
            self.flip_sin_to_cos,
            self.freq_shift,
        ).reshape(len(time_ids), -1)
        added = jnp.concatenate((text_embeds.astype(self.dtype), ids.astype(self.dtype)), axis=-1)
        return self.add_embedding(added)

    def down(self, x, time_emb, context):
        """The down blocks: features (B, h, w, C), and the skip connections, x first.

        x, time_emb, context: from embed.
        """
        skips = [x]
        for block in self.down_blocks:
            x, passed = block(x, time_emb, context)
            skips += passed
        return x, skips


class FlaxUNet2DConditionModel(DownPath, FlaxModelMixin, FromSingleFile):
    """The noise predictor; its fields are the entries of a diffusers UNet `config.json`.

    `attention_head_dim` is the number of heads, despite its name, as in every released Stable
    Diffusion. `dtype` is the compute dtype. `rows_axis` is for spatial parallelism, see blocks.py.
    """

    is_trained = True

    sample_size: int | tuple | None = 32
    in_channels: int = 4
    out_channels: int = 4
    down_block_types: tuple = DOWN_BLOCKS
    up_block_types: tuple = ("UpBlock2D", *("CrossAttnUpBlock2D",) * 3)
    mid_block_type: str | None = "UNetMidBlock2DCrossAttn"  # None: no middle block
    only_cross_attention: bool | tuple = False
    block_out_channels: tuple = (320, 640, 1280, 1280)
    layers_per_block: int | tuple = 2
    attention_head_dim: int | tuple = 8
    num_attention_heads: int | tuple | None = None  # PyTorch and the published class refuse others
    cross_attention_dim: int = 1280
    dropout: float = 0.0  # no other value is implemented
    use_linear_projection: bool = False
    dtype: DTypeLike = jnp.float32
    flip_sin_to_cos: bool = True
    freq_shift: int = 0
    use_memory_efficient_attention: bool = False  # no effect: attention has one form
    split_head_dim: bool = False  # no effect: attention has one form
    transformer_layers_per_block: int | tuple = 1
    addition_embed_type: str | None = None  # "text_time": SDXL's added_cond_kwargs
    addition_time_embed_dim: int | None = None  # length of each time id's embedding
    addition_embed_type_num_heads: int = 64  # no effect with "text_time"
    projection_class_embeddings_input_dim: int | None = None  # length of text_embeds and time ids
    time_cond_proj_dim: int | None = None  # length of timestep_cond, of distilled UNets
    norm_num_groups: int = 32
    norm_eps: float = 1e-5
    upcast_attention: bool | None = False  # logits and softmax are float32 either way
    gradient_checkpointing: bool = False
    rows_axis: str | tuple | None = None  # None: this device has all rows; not in the config

    weights_name = "diffusion_pytorch_model"
    single_file_component = "unet"
    torch_class_name = "UNet2DConditionModel"
    fixed_config = DownPath.fixed_config | {
        "attention_type": "default",
        "center_input_sample": False,
        "class_embeddings_concat": False,
        "conv_in_kernel": 3,
        "conv_out_kernel": 3,
        "cross_attention_norm": None,
        "dual_cross_attention": False,
        "resnet_out_scale_factor": 1.0,
        "resnet_skip_time_act": False,
        "reverse_transformer_layers_per_block": None,
        "time_embedding_act_fn": None,
        "time_embedding_dim": None,
        "time_embedding_type": "positional",
        "timestep_post_act": None,
    }
    # Entries without effect on the numbers.
    ignored_config = (
        "mid_block_only_cross_attention",
        "split_head_dim",
        "use_memory_efficient_attention",
    )

    @property
    def takes_reference(self):
        """Whether the latents of an original and of a reference image follow the noisy latents."""
        return self.in_channels == 3 * self.out_channels

    def init_weights(self, rng):
        """Random float32 parameters of this configuration. rng: a PRNG key."""
        inputs, options = self.example_inputs()
        if self.time_cond_proj_dim is not None:
            options["timestep_cond"] = jnp.zeros((1, self.time_cond_proj_dim))
        return self.init(rng, *inputs, **options)["params"]

    def setup(self):
        """Check the configuration and make the blocks."""
        self.make_down_path()
        channels, num_layers = self.block_out_channels, self.per_block("layers_per_block")
        num_blocks, resnet = len(channels), self.resnet()
        options = {"dtype": self.dtype, "rows_axis": self.rows_axis}
        resample = partial(Upsample2D, **options)
        self.up_blocks = [
            UpBlock(
                channels[-1 - i],  # of the down block on the same level
                num_layers[-1 - i] + 1,
                resnet,
                self.block_transformer(block_type, num_blocks - 1 - i),
                resample if i < num_blocks - 1 else None,
            )
            for i, block_type in enumerate(self.per_block("up_block_types"))
        ]
        self.conv_norm_out = GroupNorm(
            self.norm_num_groups, self.norm_eps, activate=True, **options
        )
        self.conv_out = Conv(self.out_channels, **options)

    def __call__(
        self,
        sample,
        timesteps,
        encoder_hidden_states,
        added_cond_kwargs=None,
        down_block_additional_residuals=None,
        mid_block_additional_residual=None,
        return_dict=True,
        train=False,
        timestep_cond=None,
    ):
        """Predict the noise (or v) in sample.

        Args:
            sample: (B, in_channels, H, W), any H and W.
            timesteps: (B,), or a scalar for all.
            encoder_hidden_states: text states, (B, T, cross_attention_dim).
            added_cond_kwargs: for SDXL {"text_embeds": (B, D), the pooled text, "time_ids": (B, 6),
                height and width of the original image, top and left of the crop, height and width
                of the result; the refiner's five end with an aesthetic score}; else None.
            down_block_additional_residuals: a ControlNet's, one (B, h, w, C) to add to each skip
                connection, or (B, 1, 1, C) to add at all positions; or None.
            mid_block_additional_residual: the same for the middle block's output, or None.
            return_dict: False returns a plain tuple.
            train: without effect, as there is no dropout.
            timestep_cond: embedding of the guidance scale, (B, time_cond_proj_dim), for UNets that
                are distilled with guidance; see guidance_embedding.

        Returns:
            FlaxUNet2DConditionOutput, sample (B, out_channels, H, W) in `dtype`.

        Raises:
            ValueError: an input's shape does not match the configuration.
        """
        x, time_emb, context = self.embed(
            sample, timesteps, encoder_hidden_states, added_cond_kwargs, timestep_cond
        )
        residuals = down_block_additional_residuals, mid_block_additional_residual
        x = self.blocks(x, time_emb, context, *residuals)
        x = self.predict(x)
        return FlaxUNet2DConditionOutput(x) if return_dict else (x,)

    # A call is embed, blocks and predict. Features are channels-last, (B, H, W, C).

    def blocks(self, x, time_emb, context, down_residuals=None, mid_residual=None):
        """All blocks; returns the features for `predict`.

        Args:
            x, time_emb, context: from embed.
            down_residuals, mid_residual: __call__'s additional residuals.
        """
        x, skips = self.down(x, time_emb, context)
        if down_residuals is not None:
            pairs = zip(skips, down_residuals, strict=True)
            skips = [skip + residual.astype(self.dtype) for skip, residual in pairs]
        if self.mid_block_type is not None:
            x = self.mid_block(x, time_emb, context)
        if mid_residual is not None:
            x = x + mid_residual.astype(self.dtype)
        for block in self.up_blocks:
            taken, skips = skips[-block.num_layers :], skips[: -block.num_layers]
            shape = skips[-1].shape[1:3] if skips else None
            x = block(x, taken, time_emb, context, shape)
        return x

    def predict(self, x):
        """Features (B, H, W, C) -> prediction (B, out_channels, H, W)."""
        return jnp.transpose(self.conv_out(self.conv_norm_out(x)), (0, 3, 1, 2))
