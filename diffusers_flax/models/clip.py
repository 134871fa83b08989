"""CLIP's encoders: FlaxCLIPTextModel, FlaxCLIPTextModelWithProjection, FlaxCLIPVisionModel.

The published class names and parameter trees, for any transformers `config.json`: CLIP-L (quick
GELU) of SD 1.x, OpenCLIP-H (GELU) of SD 2.x, OpenCLIP-bigG of SDXL; and CLIP's image encoder.
Models that compare images with texts are in clip_similarities.py.

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
from flax.core import FrozenDict
from jax.typing import DTypeLike

from diffusers_flax.models.attention import attention, attention_weights
from diffusers_flax.models.base import FlaxModelMixin
from diffusers_flax.models.blocks import Dense, unmerged
from diffusers_flax.models.norms import LayerNorm
from diffusers_flax.models.pretrained import CALL_SETTINGS, FlaxPreTrainedModel, FromTransformers
from diffusers_flax.outputs import ModelOutput

# Paths in files of transformers 5, which saves an encoder without its published prefix.
WITHOUT_PREFIX = re.compile(
    r"embeddings/|encoder/layers/\d+/(layer_norm|mlp|self_attn)"
    "|(final_layer_norm|pre_layrnorm|post_layernorm)/"
)


ACTIVATIONS = {
    "quick_gelu": lambda x: x * nn.sigmoid(1.702 * x),
    "gelu": partial(nn.gelu, approximate=False),
}


@flax.struct.dataclass
class FlaxBaseModelOutput(ModelOutput):
    """The output of CLIP's layers.

    Args:
        last_hidden_state: (B, T, D), before any final norm.
        hidden_states: the embeddings and every layer's output, (B, T, D) each.
        attentions: every layer's softmax weights, (B, heads, T, T) each; None if not asked for.
    """

    last_hidden_state: jax.Array | None = None
    hidden_states: tuple | None = None
    attentions: tuple | None = None


@flax.struct.dataclass
class FlaxBaseModelOutputWithPooling(ModelOutput):
    """The output of an encoder.

    Args:
        last_hidden_state: (B, T, D), of a text encoder after the final norm.
        pooler_output: (B, D), its end-of-text row; of an image encoder the normed class token.
        hidden_states: the embeddings and every layer's output, (B, T, D) each, before the final
            norm; None if not asked for.
        attentions: as in FlaxBaseModelOutput.
    """

    last_hidden_state: jax.Array | None = None
    pooler_output: jax.Array | None = None
    hidden_states: tuple | None = None
    attentions: tuple | None = None


@flax.struct.dataclass
class FlaxCLIPTextModelOutput(ModelOutput):
    """The output of a text encoder with projection.

    Args:
        text_embeds: (B, projection_dim), the end-of-text row, projected.
        last_hidden_state, hidden_states, attentions: as in FlaxBaseModelOutputWithPooling.
    """

    text_embeds: jax.Array | None = None
    last_hidden_state: jax.Array | None = None
    hidden_states: tuple | None = None
    attentions: tuple | None = None


class CLIPPart(nn.Module):
    """Base of an encoder's parts; config: the entries of its config.json."""

    config: FrozenDict
    dtype: DTypeLike
    is_causal: bool

    def part(self, cls, name):
        """A part of this part."""
        return cls(self.config, self.dtype, self.is_causal, name=name)

    def norm(self, name):
        """A layer norm."""
        return LayerNorm(self.config["layer_norm_eps"], self.dtype, name=name)


class CLIPEmbeddings(CLIPPart):
    """Token plus position embeddings."""

    @nn.compact
    def __call__(self, input_ids, position_ids):
        embed = partial(
            nn.Embed,
            features=self.config["hidden_size"],
            dtype=self.dtype,
            embedding_init=nn.initializers.normal(0.02),
        )
        tokens = embed(self.config["vocab_size"], name="token_embedding")(input_ids)
        num_positions = self.config["max_position_embeddings"]
        return tokens + embed(num_positions, name="position_embedding")(position_ids)


class CLIPAttention(CLIPPart):
    """Self-attention; projections with bias."""

    @nn.compact
    def __call__(self, x, mask, output_attentions):
        """(B, T, D) -> (B, T, D), softmax weights (B, heads, T, T) or None."""
        num_heads = self.config["num_attention_heads"]
        dense = partial(Dense, x.shape[-1], dtype=self.dtype)
        query = dense(name="q_proj")(x)
        x, query = unmerged(x, query)
        key = dense(name="k_proj")(x)
        x, key = unmerged(x, key)
        value = dense(name="v_proj")(x)
        weights = None
        if output_attentions:
            weights = attention_weights(query, key, num_heads, mask, self.is_causal)
            value = value.reshape(*value.shape[:2], num_heads, -1)
            out = jnp.einsum("bhts,bshd->bthd", weights, value).reshape(x.shape)
        else:
            out = attention(query, key, value, num_heads, mask, self.is_causal)
        return dense(name="out_proj")(out), weights


class CLIPMLP(CLIPPart):
    """Two dense layers with the configured activation between."""

    @nn.compact
    def __call__(self, x):
        hidden_act = self.config["hidden_act"]
        if hidden_act not in ACTIVATIONS:
            raise ValueError(
                f"hidden_act={hidden_act} is not supported; {' and '.join(ACTIVATIONS)} are"
            )
        h = Dense(self.config["intermediate_size"], dtype=self.dtype, name="fc1")(x)
        return Dense(x.shape[-1], dtype=self.dtype, name="fc2")(ACTIVATIONS[hidden_act](h))


class CLIPEncoderLayer(CLIPPart):
    """Attention and MLP: each normalises its input and adds to it."""

    @nn.compact
    def __call__(self, x, mask, output_attentions):
        """(B, T, D) -> (B, T, D), softmax weights (B, heads, T, T) or None."""
        normed = self.norm("layer_norm1")(x)
        attend = self.part(CLIPAttention, "self_attn")
        attended, weights = attend(normed, mask, output_attentions)
        x = x + attended
        normed = self.norm("layer_norm2")(x)
        return x + self.part(CLIPMLP, "mlp")(normed), weights


class CLIPLayers(CLIPPart):
    """The layers, with the published names "0", "1", ..."""

    @nn.compact
    def __call__(self, x, mask, output_attentions):
        """(B, T, D) -> FlaxBaseModelOutput with hidden_states of num_layers + 1 entries."""
        states, attentions = [x], []
        for i in range(self.config["num_hidden_layers"]):
            x, weights = self.part(CLIPEncoderLayer, str(i))(x, mask, output_attentions)
            states.append(x)
            attentions.append(weights)
        return FlaxBaseModelOutput(
            x, tuple(states), tuple(attentions) if output_attentions else None
        )


class CLIPEncoder(CLIPPart):
    """The encoder, a level of the published parameter tree that holds the layers."""

    @nn.compact
    def __call__(self, x, mask=None, output_attentions=False):
        return self.part(CLIPLayers, "layers")(x, mask, output_attentions)


class CLIPTextTransformer(CLIPPart):
    """Embeddings, encoder, final norm, end-of-text row."""

    is_causal: bool = True

    @nn.compact
    def __call__(
        self,
        input_ids,
        attention_mask=None,
        position_ids=None,
        output_attentions=False,
    ):
        """(B, T) int -> FlaxBaseModelOutputWithPooling, last_hidden_state after the final norm."""
        T, longest = input_ids.shape[1], self.config["max_position_embeddings"]
        if longest < T:
            raise ValueError(
                f"input_ids are {T} tokens long, this text encoder takes at most {longest}; "
                "truncate the prompt"
            )
        mask = None if attention_mask is None else attention_mask.astype(bool)[:, None, None, :]
        position_ids = jnp.arange(T)[None] if position_ids is None else position_ids
        x = self.part(CLIPEmbeddings, "embeddings")(input_ids, position_ids)
        output = self.part(CLIPEncoder, "encoder")(x, mask, output_attentions)
        states = self.norm("final_layer_norm")(output.last_hidden_state)
        # Configs older than transformers 4.30 have a wrong eos_token_id, 2; the end of text has the
        # highest id of CLIP's vocabulary.
        end = self.config["eos_token_id"]
        ends = input_ids if end in (None, 2) else input_ids == end
        pooled = states[jnp.arange(len(input_ids)), jnp.argmax(ends, axis=-1)]
        return FlaxBaseModelOutputWithPooling(
            states, pooled, output.hidden_states, output.attentions
        )


class CLIPFiles(FlaxModelMixin):
    """Reads a CLIP module from its own files or from a complete CLIP model's.

    A subclass has `prefix`, the first name of its paths in the tree, and `config_entry`, the key of
    its config in a complete model's config.
    """

    weights_name = "model"
    also_opens = ("CLIPModel",)
    projection = None  # the name of the projection after the encoder, if there is one
    fixed_config = {"attention_dropout": 0.0}  # noqa: RUF012 (a Linen field otherwise)
    # Initial values, outputs of a call, and dropout, which PyTorch's class does not use either.
    ignored_config = ("dropout", "initializer_factor", "initializer_range", *CALL_SETTINGS)

    @classmethod
    def own_config(cls, config):
        """See FlaxModelMixin.own_config; a complete model's entries without effect are left out."""
        if cls.config_entry not in config:
            return config
        own = nested_config(config, cls.config_entry)
        return {name: own[name] for name in cls.entry_names() if name in own}

    @classmethod
    def path_in_tree(cls, path, config):
        """See FlaxModelMixin.path_in_tree; transformers 5 saves encoders without their prefix."""
        if WITHOUT_PREFIX.match(path):
            return f"{cls.prefix}/{path}"
        is_other = path.split("/")[0] not in (cls.prefix, cls.projection)
        return None if is_other and cls.config_entry in config else path


def nested_config(config, name):
    """text_config or vision_config of a complete model's config; "{name}_dict" replaces it."""
    return config.get(f"{name}_dict") or config.get(name) or {}


class FlaxCLIPTextModule(nn.Module, CLIPFiles):
    """The Linen module of FlaxCLIPTextModel; its fields are the entries of a `config.json`."""

    vocab_size: int = 49408
    hidden_size: int = 512
    intermediate_size: int = 2048
    projection_dim: int = 512
    num_hidden_layers: int = 12
    num_attention_heads: int = 8
    max_position_embeddings: int = 77
    hidden_act: str = "quick_gelu"
    layer_norm_eps: float = 1e-5
    attention_dropout: float = 0.0  # see fixed_config; checkpoints of training name it
    bos_token_id: int | None = 49406
    eos_token_id: int | None = 49407
    pad_token_id: int | None = 1
    dtype: DTypeLike = jnp.float32

    torch_class_name = "CLIPTextModel"
    model_type = "clip_text_model"
    prefix = "text_model"
    config_entry = "text_config"

    def init_weights(self, rng):
        """Random float32 parameters of this configuration. rng: a PRNG key."""
        return self.init(rng, jnp.zeros((1, self.max_position_embeddings), jnp.int32))["params"]

    @nn.compact
    def __call__(
        self,
        input_ids,
        attention_mask=None,
        position_ids=None,
        output_attentions=False,
        output_hidden_states=False,
        return_dict=True,
    ):
        """Encode token ids; arguments as for FlaxCLIPTextModel."""
        config = FrozenDict(self.config_fields())
        transformer = CLIPTextTransformer(config, self.dtype, name="text_model")
        output = transformer(input_ids, attention_mask, position_ids, output_attentions)
        if self.projection is not None:
            project = nn.Dense(
                self.projection_dim, use_bias=False, dtype=self.dtype, name=self.projection
            )
            output = FlaxCLIPTextModelOutput(
                project(output.pooler_output),
                output.last_hidden_state,
                output.hidden_states,
                output.attentions,
            )
        return select_outputs(output, output_hidden_states, return_dict)


class FlaxCLIPTextModelWithProjectionModule(FlaxCLIPTextModule):
    """The Linen module of FlaxCLIPTextModelWithProjection."""

    torch_class_name = "CLIPTextModelWithProjection"
    projection = "text_projection"


def select_outputs(output, output_hidden_states, return_dict):
    """An encoder's output without hidden states that a call does not ask for."""
    output = output if output_hidden_states else output.replace(hidden_states=None)
    return output if return_dict else output.to_tuple()


class FlaxCLIPTextPreTrainedModel(FlaxPreTrainedModel):
    """Base of FlaxCLIPTextModel and FlaxCLIPTextModelWithProjection."""

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
            attention_mask: (B, T) or (1, T), 0 for tokens that no token attends to; None: no mask,
                as Stable Diffusion was trained. Attention is causal either way.
            position_ids: (B, T), (1, T) or (T,) integers; None counts from 0.
            params: nested dict of arrays; None or {} for the model's own.
            dropout_rng, train: without effect, as there is no dropout.
            output_attentions, output_hidden_states: True fills attentions and hidden_states; None
                takes the config's.
            return_dict: False returns a tuple; None takes the config's.

        Returns:
            FlaxBaseModelOutputWithPooling, [0] last_hidden_state; with projection
            FlaxCLIPTextModelOutput, [0] text_embeds.

        Raises:
            ValueError: input_ids are too long, or the parameters are missing.
        """
        arrays = map(as_int32, (input_ids, attention_mask, position_ids))
        settings = self._call_settings(output_attentions, output_hidden_states, return_dict)
        return self.module.apply(self._variables(params), *arrays, **settings)


def as_int32(array):
    """An array as int32; None stays None."""
    return None if array is None else jnp.asarray(array).astype(jnp.int32)


class FlaxCLIPTextModel(FlaxCLIPTextPreTrainedModel):
    """CLIP's text encoder; see FlaxPreTrainedModel."""

    module_class = FlaxCLIPTextModule


class FlaxCLIPTextModelWithProjection(FlaxCLIPTextPreTrainedModel):
    """CLIP's text encoder with a linear projection of the end-of-text row, SDXL's second."""

    module_class = FlaxCLIPTextModelWithProjectionModule


# --------------------------------------------------------------------- images


class CLIPVisionEmbeddings(CLIPPart):
    """The class token and the patches, plus position embeddings."""

    @nn.compact
    def __call__(self, pixels):
        """(B, H, W, C) -> (B, 1 + number of patches, hidden_size), the class token first."""
        normal = nn.initializers.normal(0.02)
        width, side = self.config["hidden_size"], self.config["patch_size"]
        patch_embedding = nn.Conv(
            width,
            (side, side),
            strides=side,
            padding="VALID",
            use_bias=False,
            dtype=self.dtype,
            kernel_init=normal,
            name="patch_embedding",
        )
        num_positions = (self.config["image_size"] // side) ** 2 + 1
        position_embedding = nn.Embed(
            num_positions,
            width,
            dtype=self.dtype,
            embedding_init=normal,
            name="position_embedding",
        )
        token = self.param("class_embedding", normal, (width,)).astype(self.dtype)
        B = len(pixels)
        tokens = jnp.broadcast_to(token, (B, 1, width))
        patches = patch_embedding(pixels).reshape(B, -1, width)
        embeddings = jnp.concatenate([tokens, patches], axis=1)
        return embeddings + position_embedding(jnp.arange(num_positions))


class CLIPVisionTransformer(CLIPPart):
    """Embeddings, norm, encoder, norm of the class token."""

    is_causal: bool = False

    @nn.compact
    def __call__(self, pixel_values, output_attentions=False):
        """(B, H, W, C) -> FlaxBaseModelOutputWithPooling; only the pooled output is normed."""
        x = self.part(CLIPVisionEmbeddings, "embeddings")(pixel_values)
        x = self.norm("pre_layrnorm")(x)  # the published name
        output = self.part(CLIPEncoder, "encoder")(x, None, output_attentions)
        states = output.last_hidden_state
        pooled = self.norm("post_layernorm")(states[:, 0])
        return FlaxBaseModelOutputWithPooling(
            states, pooled, output.hidden_states, output.attentions
        )


class FlaxCLIPVisionModule(nn.Module, CLIPFiles):
    """The Linen module of FlaxCLIPVisionModel; its images are channels-last."""

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
    dtype: DTypeLike = jnp.float32

    torch_class_name = "CLIPVisionModel"
    model_type = "clip_vision_model"
    prefix = "vision_model"
    config_entry = "vision_config"

    def init_weights(self, rng):
        """Random float32 parameters of this configuration. rng: a PRNG key."""
        shape = (1, self.image_size, self.image_size, self.num_channels)
        return self.init(rng, jnp.zeros(shape))["params"]

    @nn.compact
    def __call__(
        self,
        pixel_values,
        output_attentions=False,
        output_hidden_states=False,
        return_dict=True,
    ):
        """Encode images (B, H, W, C); other arguments and output as for FlaxCLIPVisionModel."""
        config = FrozenDict(self.config_fields())
        transformer = CLIPVisionTransformer(config, self.dtype, name="vision_model")
        output = transformer(pixel_values, output_attentions)
        return select_outputs(output, output_hidden_states, return_dict)


def channels_last(images):
    """Images (B, C, H, W) as (B, H, W, C)."""
    return jnp.transpose(jnp.asarray(images), (0, 2, 3, 1))


class FlaxCLIPVisionPreTrainedModel(FlaxPreTrainedModel):
    """Base of FlaxCLIPVisionModel; input_shape, None for the config's, has no effect."""

    config_class = FromTransformers("CLIPVisionConfig")
    main_input_name = "pixel_values"

    def __init__(self, config, input_shape=None, seed=0, dtype=jnp.float32, _do_init=True):
        super().__init__(config, input_shape, seed, dtype, _do_init)
        if input_shape is None:
            module = self.module
            self.input_shape = 1, module.image_size, module.image_size, module.num_channels

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
            ValueError: the parameters are missing.
        """
        settings = self._call_settings(output_attentions, output_hidden_states, return_dict)
        images = channels_last(pixel_values)
        return self.module.apply(self._variables(params), images, **settings)


class FlaxCLIPVisionModel(FlaxCLIPVisionPreTrainedModel):
    """CLIP's image encoder; see FlaxPreTrainedModel."""

    module_class = FlaxCLIPVisionModule
