"""FlaxCLIPTextModel and FlaxCLIPTextModelWithProjection: prompts to text states.

The published class names and parameter trees; CLIP-L (quick-GELU) of SD 1.x, OpenCLIP-H (GELU) of
SD 2.x, OpenCLIP-bigG of SDXL, from their transformers `config.json`. FlaxCLIPVisionModule is the
image encoder of the safety checker.

    text_encoder, params = FlaxCLIPTextModel.from_pretrained(
        "MODEL", subfolder="text_encoder", _do_init=False
    )
    states = text_encoder(input_ids, params=params).last_hidden_state

Source: CLIP (arXiv 2103.00020), section 2.4; the numerics are those of PyTorch transformers.
"""

from functools import partial

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from attention_flax import attention
from config_flax import ModelOutput
from modeling_flax_blocks import LayerNorm
from modeling_flax_pretrained import CALL_SETTINGS, FlaxPreTrainedModel, FromTransformers
from modeling_flax_utils import FlaxModelMixin

ACTIVATIONS = {
    "quick_gelu": lambda x: x * nn.sigmoid(1.702 * x),
    "gelu": partial(nn.gelu, approximate=False),
}


@flax.struct.dataclass
class FlaxBaseModelOutput(ModelOutput):
    """last_hidden_state (B, T, D) before any final norm, hidden_states and attentions as below."""

    last_hidden_state: jax.Array | None = None
    hidden_states: tuple | None = None
    attentions: tuple | None = None


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
    """text_embeds (B, projection_dim): the end-of-text row, projected; the rest as above."""

    text_embeds: jax.Array | None = None
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
        dense = partial(nn.Dense, x.shape[-1], dtype=self.dtype)
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


def attention_weights(query, key, num_heads, mask, is_causal):
    """The softmax weights of attention, which its kernels do not return.

    Args:
        query, key, num_heads, mask, is_causal: as for attention.

    Returns:
        (B, num_heads, T, S) in query's dtype; the softmax is float32.
    """
    query, key = (x.reshape(*x.shape[:2], num_heads, -1) for x in (query, key))
    logits = jnp.einsum("bthd,bshd->bhts", query, key, preferred_element_type=jnp.float32)
    seen = jnp.ones(logits.shape[-2:], bool) if mask is None else mask
    seen = seen & jnp.tri(*logits.shape[-2:], dtype=bool) if is_causal else seen
    logits = jnp.where(seen, logits / query.shape[-1] ** 0.5, jnp.finfo(jnp.float32).min)
    return nn.softmax(logits).astype(query.dtype)


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
        h = nn.Dense(self.intermediate_size, dtype=self.dtype, name="fc1")(x)
        h = ACTIVATIONS[self.hidden_act](h)
        return nn.Dense(x.shape[-1], dtype=self.dtype, name="fc2")(h)


class CLIPEncoderLayer(nn.Module):
    """Attention and MLP, each on a normed copy and added back."""

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
    """The stack, named "0", "1", ... as published."""

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
    """Only the level "encoder" of the published tree."""

    num_layers: int
    layer: partial

    @nn.compact
    def __call__(self, x, mask=None, deterministic=True, output_attentions=False):
        layers = CLIPLayers(self.num_layers, self.layer, name="layers")
        return layers(x, mask, deterministic, output_attentions)


class CLIPTextTransformer(nn.Module):
    """Embeddings, encoder, final norm."""

    embeddings_args: tuple
    num_layers: int
    layer: partial
    epsilon: float
    dtype: DTypeLike

    @nn.compact
    def __call__(self, input_ids, mask, position_ids, deterministic, output_attentions):
        """(B, T) int -> FlaxBaseModelOutput, its last_hidden_state after the final norm."""
        x = CLIPEmbeddings(*self.embeddings_args, self.dtype, name="embeddings")(
            input_ids, position_ids
        )
        encoder = CLIPEncoder(self.num_layers, self.layer, name="encoder")
        output = encoder(x, mask, deterministic, output_attentions)
        norm = LayerNorm(self.epsilon, self.dtype, name="final_layer_norm")
        return output.replace(last_hidden_state=norm(output.last_hidden_state))


class FlaxCLIPTextModule(nn.Module, FlaxModelMixin):
    """The Linen module of FlaxCLIPTextModel; its fields are entries of a `config.json`.

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

    weights_name = "model"
    torch_class_name = "CLIPTextModel"
    fixed_config = {}  # noqa: RUF012 (a Linen field otherwise)
    # What PyTorch initialises with, what a call returns, and a key without effect in PyTorch.
    ignored_config = ("dropout", "initializer_factor", "initializer_range", *CALL_SETTINGS)

    def init_weights(self, rng):
        """Random float32 parameters of this configuration. rng: a PRNG key."""
        return self.init(rng, jnp.zeros((1, self.max_position_embeddings), jnp.int32))["params"]

    def encode(self, input_ids, attention_mask, position_ids, deterministic, output_attentions):
        """What both models share: (FlaxBaseModelOutput, end-of-text row (B, D))."""
        if input_ids.ndim != 2:
            raise ValueError(f"input_ids has shape {input_ids.shape}; it is (batch, tokens)")
        T = input_ids.shape[1]
        if self.max_position_embeddings < T:
            raise ValueError(
                f"input_ids are {T} tokens long, this text encoder takes at most "
                f"{self.max_position_embeddings}; truncate the prompt"
            )
        mask = None if attention_mask is None else attention_mask.astype(bool)[:, None, None, :]
        layer = partial(
            CLIPEncoderLayer,
            self.num_attention_heads,
            self.intermediate_size,
            self.hidden_act,
            self.layer_norm_eps,
            self.dtype,
            is_causal=True,
            attention_dropout=self.attention_dropout or 0.0,
        )
        embeddings_args = (self.vocab_size, self.hidden_size, self.max_position_embeddings)
        transformer = CLIPTextTransformer(
            embeddings_args,
            self.num_hidden_layers,
            layer,
            self.layer_norm_eps,
            self.dtype,
            name="text_model",
        )
        position_ids = jnp.arange(T)[None] if position_ids is None else position_ids
        output = transformer(input_ids, mask, position_ids, deterministic, output_attentions)
        # Configs written before transformers 4.30 carry eos_token_id=2, which is wrong; in CLIP's
        # vocabulary the end of text has the highest number.
        ends = input_ids if self.eos_token_id in (None, 2) else input_ids == self.eos_token_id
        rows = jnp.arange(len(input_ids)), jnp.argmax(ends, axis=-1)
        return output, output.last_hidden_state[rows]

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
        output, pooled = self.encode(
            input_ids, attention_mask, position_ids, deterministic, output_attentions
        )
        output = FlaxBaseModelOutputWithPooling(
            output.last_hidden_state,
            pooled,
            output.hidden_states if output_hidden_states else None,
            output.attentions,
        )
        return output if return_dict else output.to_tuple()


class FlaxCLIPTextModelWithProjectionModule(FlaxCLIPTextModule):
    """The Linen module of FlaxCLIPTextModelWithProjection."""

    torch_class_name = "CLIPTextModelWithProjection"

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
        output, pooled = self.encode(
            input_ids, attention_mask, position_ids, deterministic, output_attentions
        )
        projection = nn.Dense(
            self.projection_dim, use_bias=False, dtype=self.dtype, name="text_projection"
        )
        output = FlaxCLIPTextModelOutput(
            projection(pooled),
            output.last_hidden_state,
            output.hidden_states if output_hidden_states else None,
            output.attentions,
        )
        return output if return_dict else output.to_tuple()


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
            attention_mask: (B, T), 0 where a token may not be seen; None sees all (as Stable
                Diffusion was trained), always causally.
            position_ids: (B, T) or (1, T); None counts from 0.
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
            ValueError: input_ids of another shape, or dropout_rng or the parameters are missing.
        """
        module = self.module
        if train and module.attention_dropout and dropout_rng is None:
            raise ValueError(
                f"train=True applies attention_dropout={module.attention_dropout}; pass a PRNG "
                "key as dropout_rng="
            )
        return module.apply(
            self._variables(params),
            *map(as_int32, (input_ids, attention_mask, position_ids)),
            deterministic=not train,
            rngs=None if dropout_rng is None else {"dropout": dropout_rng},
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


class CLIPVisionTransformer(nn.Module):
    """Embeddings, norm, encoder, norm of the class token."""

    embeddings_args: tuple
    num_layers: int
    layer: partial
    epsilon: float
    dtype: DTypeLike

    @nn.compact
    def __call__(self, pixels):
        """(B, H, W, C) -> FlaxBaseModelOutputWithPooling; only the pooled output is normed."""
        norm = partial(LayerNorm, self.epsilon, self.dtype)
        # The published name has this spelling.
        x = norm(name="pre_layrnorm")(
            CLIPVisionEmbeddings(*self.embeddings_args, self.dtype, name="embeddings")(pixels)
        )
        x = CLIPEncoder(self.num_layers, self.layer, name="encoder")(x).last_hidden_state
        return FlaxBaseModelOutputWithPooling(x, norm(name="post_layernorm")(x[:, 0]))


class FlaxCLIPVisionModule(nn.Module, FlaxModelMixin):
    """CLIP's image encoder; its fields are entries of a `vision_config`."""

    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_channels: int = 3
    image_size: int = 224
    patch_size: int = 32
    hidden_act: str = "quick_gelu"
    layer_norm_eps: float = 1e-5
    dtype: DTypeLike = jnp.float32

    fixed_config = {}  # noqa: RUF012 (a Linen field otherwise)

    @nn.compact
    def __call__(self, pixel_values):
        """Encode images.

        Args:
            pixel_values: (B, H, W, C), normalised by a CLIPImageProcessor.

        Returns:
            FlaxBaseModelOutputWithPooling: last_hidden_state (B, 1 + number of patches, D) without
            a norm, pooler_output (B, D), the class token after post_layernorm.
        """
        expected = (self.image_size, self.image_size, self.num_channels)
        if pixel_values.shape[1:] != expected:
            raise ValueError(
                f"images have the shape {pixel_values.shape[1:]} (height, width, channels), this "
                f"image encoder takes {expected}; resize them with its CLIPImageProcessor"
            )
        layer = partial(
            CLIPEncoderLayer,
            self.num_attention_heads,
            self.intermediate_size,
            self.hidden_act,
            self.layer_norm_eps,
            self.dtype,
            is_causal=False,
        )
        transformer = CLIPVisionTransformer(
            (self.hidden_size, self.image_size, self.patch_size),
            self.num_hidden_layers,
            layer,
            self.layer_norm_eps,
            self.dtype,
            name="vision_model",
        )
        return transformer(pixel_values)
