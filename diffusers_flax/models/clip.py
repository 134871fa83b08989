"""CLIP's encoders: FlaxCLIPTextModel, FlaxCLIPTextModelWithProjection, FlaxCLIPVisionModel.

The published class names and parameter trees; CLIP-L (quick-GELU) of SD 1.x, OpenCLIP-H (GELU) of
SD 2.x, OpenCLIP-bigG of SDXL, from their transformers `config.json`; FlaxCLIPVisionModel, CLIP's
image encoder. clip_similarities.py has the models of both.

    text_encoder, params = FlaxCLIPTextModel.from_pretrained(
        "MODEL", subfolder="text_encoder", _do_init=False
    )
    states = text_encoder(input_ids, params=params).last_hidden_state

Source: CLIP (arXiv 2103.00020), section 2.4; the numerics follow PyTorch transformers.
"""

import re
from functools import partial

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from diffusers_flax.loading.configs import RUNTIME_FIELDS
from diffusers_flax.models.base import FlaxModelMixin
from diffusers_flax.models.blocks import (
    CLIPEmbeddings,
    CLIPEncoder,
    CLIPEncoderLayer,
    LayerNorm,
)
from diffusers_flax.models.pretrained import CALL_SETTINGS, FlaxPreTrainedModel, FromTransformers
from diffusers_flax.outputs import ModelOutput

# transformers 5 saves the towers without the published prefix, and loads them with or without.
WITHOUT_PREFIX = re.compile(
    r"embeddings/|encoder/layers/\d+/(layer_norm|mlp|self_attn)"
    "|(final_layer_norm|pre_layrnorm|post_layernorm)/"
)


@flax.struct.dataclass
class FlaxBaseModelOutputWithPooling(ModelOutput):
    """What a text model returns.

    Args:
        last_hidden_state: (B, T, D), after the final norm.
        pooler_output: (B, D), its end-of-text row.
        hidden_states: the embeddings and every layer's output, (B, T, D) each, before the final
            norm; None if not asked for.
        attentions: every layer's softmax weights, (B, heads, T, T) each; None if not asked for.
    """

    last_hidden_state: jax.Array | None = None
    pooler_output: jax.Array | None = None
    hidden_states: tuple | None = None
    attentions: tuple | None = None


@flax.struct.dataclass
class FlaxCLIPTextModelOutput(ModelOutput):
    """What a text model with projection returns.

    Args:
        text_embeds: (B, projection_dim), the end-of-text row, projected.
        last_hidden_state, hidden_states, attentions: as in FlaxBaseModelOutputWithPooling.
    """

    text_embeds: jax.Array | None = None
    last_hidden_state: jax.Array | None = None
    hidden_states: tuple | None = None
    attentions: tuple | None = None


def encoder_layer(module, is_causal):
    """CLIPEncoderLayer with the settings of a text or vision module."""
    return partial(
        CLIPEncoderLayer,
        module.num_attention_heads,
        module.intermediate_size,
        module.hidden_act,
        module.layer_norm_eps,
        module.dtype,
        is_causal,
        module.attention_dropout or 0.0,
    )


def check_shape(name, array, shapes):
    """Raise ValueError if an array, unless None, has none of the shapes; name is the argument's."""
    if array is not None and array.shape not in shapes:
        expected = " or ".join(map(str, dict.fromkeys(shapes)))
        raise ValueError(f"{name} has shape {array.shape}; with these input_ids it is {expected}")


class CLIPTextSettings(nn.Module):
    """The entries of a text encoder's `config.json`, as fields.

    `dtype` is the dtype of the computation, not of the parameters.
    """

    vocab_size: int = 49408
    hidden_size: int = 512
    intermediate_size: int = 2048
    projection_dim: int = 512
    num_hidden_layers: int = 12
    num_attention_heads: int = 8
    max_position_embeddings: int = 77
    hidden_act: str = "quick_gelu"
    layer_norm_eps: float = 1e-5
    attention_dropout: float | None = 0.0
    bos_token_id: int | None = 49406
    eos_token_id: int | None = 49407
    pad_token_id: int | None = 1
    dtype: DTypeLike = jnp.float32


class CLIPTextTransformer(CLIPTextSettings):
    """Embeddings, encoder, final norm, end-of-text row."""

    @nn.compact
    def __call__(
        self,
        input_ids,
        attention_mask=None,
        position_ids=None,
        deterministic=True,
        output_attentions=False,
    ):
        """(B, T) int -> FlaxBaseModelOutputWithPooling, last_hidden_state after the final norm."""
        if input_ids.ndim != 2:
            raise ValueError(f"input_ids has shape {input_ids.shape}; it is (batch, tokens)")
        T = input_ids.shape[1]
        if self.max_position_embeddings < T:
            raise ValueError(
                f"input_ids are {T} tokens long, this text encoder takes at most "
                f"{self.max_position_embeddings}; truncate the prompt"
            )
        like_ids = [input_ids.shape, (1, T)]
        check_shape("attention_mask", attention_mask, like_ids)
        check_shape("position_ids", position_ids, [*like_ids, (T,)])
        mask = None if attention_mask is None else attention_mask.astype(bool)[:, None, None, :]
        position_ids = jnp.arange(T)[None] if position_ids is None else position_ids
        sizes = self.vocab_size, self.hidden_size, self.max_position_embeddings
        embeddings = CLIPEmbeddings(*sizes, self.dtype, name="embeddings")
        x = embeddings(input_ids, position_ids)
        layer = encoder_layer(self, is_causal=True)
        encoder = CLIPEncoder(self.num_hidden_layers, layer, name="encoder")
        output = encoder(x, mask, deterministic, output_attentions)
        norm = LayerNorm(self.layer_norm_eps, self.dtype, name="final_layer_norm")
        states = norm(output.last_hidden_state)
        # Configs written before transformers 4.30 carry eos_token_id=2, which is wrong; in CLIP's
        # vocabulary the end of text has the highest number.
        ends = input_ids if self.eos_token_id in (None, 2) else input_ids == self.eos_token_id
        pooled = states[jnp.arange(len(input_ids)), jnp.argmax(ends, axis=-1)]
        return FlaxBaseModelOutputWithPooling(
            states, pooled, output.hidden_states, output.attentions
        )


class CLIPFiles(FlaxModelMixin):
    """Reading a CLIP module: the files are its own, or a complete CLIP model's.

    A subclass has `prefix`, the first name of its paths in the tree, and `config_part`, its entry
    in the config of a complete model.
    """

    weights_name = "model"
    also_opens = ("CLIPModel",)
    projection = None  # the name of the projection after the tower, if there is one
    # Initial values, outputs of a call, and dropout, which PyTorch's class reads and does not use.
    ignored_config = ("dropout", "initializer_factor", "initializer_range", *CALL_SETTINGS)

    @classmethod
    def own_config(cls, config):
        """See FlaxModelMixin.own_config; leaves out what has no effect."""
        if cls.config_part not in config:
            return config
        part = part_of_config(config, cls.config_part)
        return {name: part[name] for name in entries_of_tower(cls) if name in part}

    @classmethod
    def path_in_tree(cls, path, config):
        """See FlaxModelMixin.path_in_tree; transformers 5 saves the towers without their prefix."""
        if WITHOUT_PREFIX.match(path):
            return f"{cls.prefix}/{path}"
        is_other = path.split("/")[0] not in (cls.prefix, cls.projection)
        return None if is_other and cls.config_part in config else path


def entries_of_tower(tower):
    """The names of a module's entries in a config.json."""
    return tower.__dataclass_fields__.keys() - RUNTIME_FIELDS


def part_of_config(config, name):
    """text_config or vision_config of a complete model's config; "{name}_dict" replaces it."""
    return config.get(f"{name}_dict") or config.get(name) or {}


class FlaxCLIPTextModule(CLIPTextSettings, CLIPFiles):
    """The Linen module of FlaxCLIPTextModel."""

    torch_class_name = "CLIPTextModel"
    model_type = "clip_text_model"
    prefix = "text_model"
    config_part = "text_config"

    def init_weights(self, rng):
        """Random float32 parameters of this configuration. rng: a PRNG key."""
        return self.init(rng, jnp.zeros((1, self.max_position_embeddings), jnp.int32))["params"]

    @nn.compact
    def __call__(
        self,
        input_ids,
        attention_mask=None,
        position_ids=None,
        deterministic=True,
        output_attentions=False,
        output_hidden_states=False,
        return_dict=True,
    ):
        """Encode token ids; arguments as for FlaxCLIPTextModel.

        deterministic: False applies attention_dropout, with an rng "dropout".
        """
        transformer = CLIPTextTransformer(**self.config, dtype=self.dtype, name="text_model")
        output = transformer(
            input_ids, attention_mask, position_ids, deterministic, output_attentions
        )
        return as_requested(output, output_hidden_states, return_dict)


def as_requested(output, output_hidden_states, return_dict):
    """The output of a tower without what a call does not ask for."""
    output = output if output_hidden_states else output.replace(hidden_states=None)
    return output if return_dict else output.to_tuple()


class FlaxCLIPTextModelWithProjectionModule(FlaxCLIPTextModule):
    """The Linen module of FlaxCLIPTextModelWithProjection."""

    torch_class_name = "CLIPTextModelWithProjection"
    projection = "text_projection"

    @nn.compact
    def __call__(
        self,
        input_ids,
        attention_mask=None,
        position_ids=None,
        deterministic=True,
        output_attentions=False,
        output_hidden_states=False,
        return_dict=True,
    ):
        """As FlaxCLIPTextModule; returns FlaxCLIPTextModelOutput, whose [0] is text_embeds."""
        transformer = CLIPTextTransformer(**self.config, dtype=self.dtype, name="text_model")
        output = transformer(
            input_ids, attention_mask, position_ids, deterministic, output_attentions
        )
        projection = nn.Dense(
            self.projection_dim, use_bias=False, dtype=self.dtype, name="text_projection"
        )
        output = FlaxCLIPTextModelOutput(
            projection(output.pooler_output),
            output.last_hidden_state,
            output.hidden_states,
            output.attentions,
        )
        return as_requested(output, output_hidden_states, return_dict)


def dropout_rngs(dropout, train, dropout_rng):
    """The rngs of a call; a ValueError if it applies attention_dropout and has none."""
    if train and dropout and dropout_rng is None:
        raise ValueError(
            f"train=True applies attention_dropout={dropout}; pass a PRNG key as dropout_rng="
        )
    return None if dropout_rng is None else {"dropout": dropout_rng}


class FlaxCLIPTextPreTrainedModel(FlaxPreTrainedModel):
    """What FlaxCLIPTextModel and FlaxCLIPTextModelWithProjection share."""

    config_class = FromTransformers("CLIPTextConfig")

    def __call__(
        self,
        input_ids,
        attention_mask=None,
        position_ids=None,
        params=None,
        dropout_rng=None,
        train=False,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
    ):
        """Encode token ids.

        Args:
            input_ids: (B, T) integers, T at most max_position_embeddings.
            attention_mask: (B, T) or (1, T), 0 for tokens that no token attends to; None attends
                to all, as Stable Diffusion was trained. Attention is causal either way.
            position_ids: (B, T), (1, T) or (T,) integers; None counts from 0.
            params: nested dict of arrays; None or {} for the model's own.
            dropout_rng: PRNG key, needed with train=True where config.attention_dropout is not 0.
            train: True applies config.attention_dropout.
            output_attentions, output_hidden_states: True fills attentions and hidden_states; None
                takes the config's.
            return_dict: False returns a tuple; None takes the config's.

        Returns:
            FlaxBaseModelOutputWithPooling, [0] last_hidden_state; with projection
            FlaxCLIPTextModelOutput, [0] text_embeds.

        Raises:
            ValueError: input_ids, attention_mask or position_ids have another shape, or
                dropout_rng or the parameters are missing.
        """
        module = self.module
        return module.apply(
            self._variables(params),
            *map(as_int32, (input_ids, attention_mask, position_ids)),
            deterministic=not train,
            rngs=dropout_rngs(module.attention_dropout, train, dropout_rng),
            **self._call_settings(
                output_attentions=output_attentions,
                output_hidden_states=output_hidden_states,
                return_dict=return_dict,
            ),
        )


def as_int32(array):
    """An array as int32; None stays None."""
    return None if array is None else jnp.asarray(array).astype(jnp.int32)


class FlaxCLIPTextModel(FlaxCLIPTextPreTrainedModel):
    """CLIP's text encoder; see FlaxPreTrainedModel."""

    module_class = FlaxCLIPTextModule


class FlaxCLIPTextModelWithProjection(FlaxCLIPTextPreTrainedModel):
    """The same with a linear projection of the end-of-text row, as SDXL uses it."""

    module_class = FlaxCLIPTextModelWithProjectionModule


# --------------------------------------------------------------------- images


class CLIPVisionSettings(nn.Module):
    """The entries of an image encoder's `config.json`, as fields; see CLIPTextSettings."""

    hidden_size: int = 768
    intermediate_size: int = 3072
    projection_dim: int = 512
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_channels: int = 3
    image_size: int = 224
    patch_size: int = 32
    hidden_act: str = "quick_gelu"
    layer_norm_eps: float = 1e-5
    attention_dropout: float | None = 0.0
    dtype: DTypeLike = jnp.float32


class CLIPVisionEmbeddings(nn.Module):
    """The class token and the patches, plus position embeddings."""

    hidden_size: int
    image_size: int
    patch_size: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, pixels):
        """(B, H, W, C) -> (B, 1 + number of patches, hidden_size), the class token first."""
        normal = nn.initializers.normal(0.02)
        patch_embedding = nn.Conv(
            self.hidden_size,
            (self.patch_size, self.patch_size),
            strides=self.patch_size,
            padding="VALID",
            use_bias=False,
            dtype=self.dtype,
            kernel_init=normal,
            name="patch_embedding",
        )
        num_positions = (self.image_size // self.patch_size) ** 2 + 1
        position_embedding = nn.Embed(
            num_positions,
            self.hidden_size,
            dtype=self.dtype,
            embedding_init=normal,
            name="position_embedding",
        )
        token = self.param("class_embedding", normal, (self.hidden_size,)).astype(self.dtype)
        B = len(pixels)
        tokens = jnp.broadcast_to(token, (B, 1, self.hidden_size))
        patches = patch_embedding(pixels).reshape(B, -1, self.hidden_size)
        embeddings = jnp.concatenate([tokens, patches], axis=1)
        return embeddings + position_embedding(jnp.arange(num_positions))


class CLIPVisionTransformer(CLIPVisionSettings):
    """Embeddings, norm, encoder, norm of the class token."""

    @nn.compact
    def __call__(self, pixel_values, deterministic=True, output_attentions=False):
        """(B, H, W, C) -> FlaxBaseModelOutputWithPooling; only the pooled output is normed."""
        side = self.image_size
        check_images("pixel_values", pixel_values, (side, side, self.num_channels))
        norm = partial(LayerNorm, self.layer_norm_eps, self.dtype)
        sizes = self.hidden_size, self.image_size, self.patch_size
        embeddings = CLIPVisionEmbeddings(*sizes, self.dtype, name="embeddings")
        # The published name has this spelling.
        x = norm(name="pre_layrnorm")(embeddings(pixel_values))
        layer = encoder_layer(self, is_causal=False)
        encoder = CLIPEncoder(self.num_hidden_layers, layer, name="encoder")
        output = encoder(x, None, deterministic, output_attentions)
        states = output.last_hidden_state
        pooled = norm(name="post_layernorm")(states[:, 0])
        return FlaxBaseModelOutputWithPooling(
            states, pooled, output.hidden_states, output.attentions
        )


class FlaxCLIPVisionModule(CLIPVisionSettings, CLIPFiles):
    """The Linen module of FlaxCLIPVisionModel; its images are channels-last."""

    torch_class_name = "CLIPVisionModel"
    model_type = "clip_vision_model"
    prefix = "vision_model"
    config_part = "vision_config"

    def init_weights(self, rng):
        """Random float32 parameters of this configuration. rng: a PRNG key."""
        shape = (1, self.image_size, self.image_size, self.num_channels)
        return self.init(rng, jnp.zeros(shape))["params"]

    @nn.compact
    def __call__(
        self,
        pixel_values,
        deterministic=True,
        output_attentions=False,
        output_hidden_states=False,
        return_dict=True,
    ):
        """Encode images.

        Args:
            pixel_values: (B, H, W, C), normalised by a CLIPImageProcessor.
            deterministic: False applies attention_dropout, with an rng "dropout".
            output_attentions, output_hidden_states, return_dict: as for FlaxCLIPVisionModel.

        Returns:
            FlaxBaseModelOutputWithPooling: last_hidden_state (B, 1 + number of patches, D) without
            a norm, pooler_output (B, D), the class token after post_layernorm.
        """
        transformer = CLIPVisionTransformer(**self.config, dtype=self.dtype, name="vision_model")
        output = transformer(pixel_values, deterministic, output_attentions)
        return as_requested(output, output_hidden_states, return_dict)


def check_images(name, images, shape):
    """Raise ValueError if images are not (B, *shape); name is the argument's."""
    if images.shape[1:] != shape:
        expected = f"(batch, {str(shape)[1:]}"
        raise ValueError(
            f"{name} has shape {images.shape}; this image encoder takes {expected}; resize the "
            "images with its CLIPImageProcessor"
        )


def image_shape(vision_config):
    """(1, C, H, W) of an image encoder's images."""
    side = vision_config["image_size"]
    return 1, vision_config["num_channels"], side, side


def channels_last(pixel_values, vision_config):
    """Images (B, C, H, W) as (B, H, W, C); a ValueError if they have another size."""
    pixel_values = jnp.asarray(pixel_values)
    check_images("pixel_values", pixel_values, image_shape(vision_config)[1:])
    return jnp.transpose(pixel_values, (0, 2, 3, 1))


class FlaxCLIPVisionPreTrainedModel(FlaxPreTrainedModel):
    """Base of FlaxCLIPVisionModel; input_shape, None for the config's, has no effect."""

    config_class = FromTransformers("CLIPVisionConfig")
    main_input_name = "pixel_values"

    def __init__(self, config, input_shape=None, seed=0, dtype=jnp.float32, _do_init=True):
        super().__init__(config, input_shape, seed, dtype, _do_init)
        module = self.module
        default = (1, module.image_size, module.image_size, module.num_channels)
        self.input_shape = default if input_shape is None else input_shape

    def __call__(
        self,
        pixel_values,
        params=None,
        dropout_rng=None,
        train=False,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
    ):
        """Encode images.

        Args:
            pixel_values: (B, C, H, W) floats, of a CLIPImageProcessor.
            params, dropout_rng, train, output_attentions, output_hidden_states, return_dict: as
                for FlaxCLIPTextModel.

        Returns:
            FlaxBaseModelOutputWithPooling: last_hidden_state (B, 1 + number of patches, D) without
            a norm, pooler_output (B, D), the class token after post_layernorm.

        Raises:
            ValueError: pixel_values has another size, or dropout_rng or the parameters are missing.
        """
        module = self.module
        return module.apply(
            self._variables(params),
            channels_last(pixel_values, module.config),
            deterministic=not train,
            rngs=dropout_rngs(module.attention_dropout, train, dropout_rng),
            **self._call_settings(
                output_attentions=output_attentions,
                output_hidden_states=output_hidden_states,
                return_dict=return_dict,
            ),
        )


class FlaxCLIPVisionModel(FlaxCLIPVisionPreTrainedModel):
    """CLIP's image encoder; see FlaxPreTrainedModel."""

    module_class = FlaxCLIPVisionModule
