"""FlaxCLIPTextModel and FlaxCLIPTextModelWithProjection: prompts to text states.

The published class names and parameter trees; CLIP-L (quick-GELU) of SD 1.x, OpenCLIP-H (GELU) of
SD 2.x, OpenCLIP-bigG of SDXL, from their transformers `config.json`.

    text_encoder, params = FlaxCLIPTextModel.from_pretrained("MODEL", subfolder="text_encoder")
    states = text_encoder.apply({"params": params}, input_ids).last_hidden_state

Source: CLIP (arXiv 2103.00020), section 2.4; the numerics are those of PyTorch transformers.
"""

from functools import partial
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from attention_flax import attention
from modeling_flax_blocks import LayerNorm
from modeling_flax_utils import FlaxModelMixin

ACTIVATIONS = {
    "quick_gelu": lambda x: x * nn.sigmoid(1.702 * x),
    "gelu": partial(nn.gelu, approximate=False),
}


class FlaxBaseModelOutputWithPooling(NamedTuple):
    """last_hidden_state (B, T, D) after the final norm; pooler_output (B, D), its end-of-text row;
    hidden_states: the embeddings and every layer's output before the final norm, or None."""

    last_hidden_state: jax.Array
    pooler_output: jax.Array
    hidden_states: tuple | None = None


class FlaxCLIPTextModelOutput(NamedTuple):
    """text_embeds (B, projection_dim): the end-of-text row, projected; the rest as above."""

    text_embeds: jax.Array
    last_hidden_state: jax.Array
    hidden_states: tuple | None = None


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
    """Causal self-attention; projections with bias."""

    num_heads: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x, mask):
        dense = partial(nn.Dense, x.shape[-1], dtype=self.dtype)
        query, key, value = (dense(name=f"{name}_proj")(x) for name in "qkv")
        out = attention(query, key, value, self.num_heads, mask=mask, is_causal=True)
        return dense(name="out_proj")(out)


class CLIPMLP(nn.Module):
    """Two dense layers with the configured activation between."""

    intermediate_size: int
    hidden_act: str
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x):
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

    @nn.compact
    def __call__(self, x, mask):
        normed = LayerNorm(self.epsilon, self.dtype, name="layer_norm1")(x)
        x = x + CLIPAttention(self.num_heads, self.dtype, name="self_attn")(normed, mask)
        normed = LayerNorm(self.epsilon, self.dtype, name="layer_norm2")(x)
        mlp = CLIPMLP(self.intermediate_size, self.hidden_act, self.dtype, name="mlp")
        return x + mlp(normed)


class CLIPLayers(nn.Module):
    """The stack, named "0", "1", ... as published."""

    num_layers: int
    layer: partial

    @nn.compact
    def __call__(self, x, mask):
        """(B, T, D) -> the input and every layer's output, a tuple of num_layers + 1."""
        states = [x]
        for i in range(self.num_layers):
            states.append(self.layer(name=str(i))(states[-1], mask))
        return tuple(states)


class CLIPEncoder(nn.Module):
    """Only the level "encoder" of the published tree."""

    num_layers: int
    layer: partial

    @nn.compact
    def __call__(self, x, mask):
        return CLIPLayers(self.num_layers, self.layer, name="layers")(x, mask)


class CLIPTextTransformer(nn.Module):
    """Embeddings, encoder, final norm."""

    embeddings_args: tuple
    num_layers: int
    layer: partial
    epsilon: float
    dtype: DTypeLike

    @nn.compact
    def __call__(self, input_ids, mask, position_ids):
        """(B, T) int -> last_hidden_state (B, T, D), all hidden states."""
        x = CLIPEmbeddings(*self.embeddings_args, self.dtype, name="embeddings")(
            input_ids, position_ids
        )
        states = CLIPEncoder(self.num_layers, self.layer, name="encoder")(x, mask)
        norm = LayerNorm(self.epsilon, self.dtype, name="final_layer_norm")
        return norm(states[-1]), states


class FlaxCLIPTextModel(nn.Module, FlaxModelMixin):
    """CLIP's text encoder; its fields are the entries of a transformers `config.json`.

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
    bos_token_id: int | None = 49406
    eos_token_id: int | None = 49407
    pad_token_id: int | None = 1
    dtype: DTypeLike = jnp.float32

    weights_name = "model"
    torch_class_name = "CLIPTextModel"
    fixed_config = {}  # noqa: RUF012 (a Linen field otherwise)
    # Entries about training and bookkeeping: they change no number of a forward pass.
    ignored_config = (
        "attention_dropout",
        "dropout",
        "initializer_factor",
        "initializer_range",
    )

    def init_weights(self, rng):
        """Random float32 parameters of this configuration. rng: a PRNG key."""
        return self.init(rng, jnp.zeros((1, self.max_position_embeddings), jnp.int32))["params"]

    def encode(self, input_ids, attention_mask, position_ids):
        """What both share: last_hidden_state (B, T, D), end-of-text row (B, D), hidden states."""
        T = input_ids.shape[1]
        if self.max_position_embeddings < T:
            raise ValueError(
                f"input_ids are {T} tokens long, this text encoder takes at most "
                f"{self.max_position_embeddings}; truncate the prompt"
            )
        if self.hidden_act not in ACTIVATIONS:
            raise ValueError(
                f"hidden_act={self.hidden_act} is not supported; {' and '.join(ACTIVATIONS)} are"
            )
        mask = None if attention_mask is None else attention_mask.astype(bool)[:, None, None, :]
        layer = partial(
            CLIPEncoderLayer,
            self.num_attention_heads,
            self.intermediate_size,
            self.hidden_act,
            self.layer_norm_eps,
            self.dtype,
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
        last_hidden_state, states = transformer(input_ids, mask, position_ids)
        # Configs written before transformers 4.30 carry eos_token_id=2, which is wrong; in CLIP's
        # vocabulary the end of text has the highest number.
        ends = input_ids if self.eos_token_id in (None, 2) else input_ids == self.eos_token_id
        pooled = last_hidden_state[jnp.arange(len(input_ids)), jnp.argmax(ends, axis=-1)]
        return last_hidden_state, pooled, states

    @nn.compact
    def __call__(
        self, input_ids, attention_mask=None, position_ids=None, output_hidden_states=False
    ):
        """Encode token ids.

        Args:
            input_ids: (B, T) integers, T at most max_position_embeddings.
            attention_mask: (B, T), 0 where a token may not be seen; None sees all (as Stable
                Diffusion was trained), always causally.
            position_ids: (B, T) or (1, T); None counts from 0.
            output_hidden_states: True fills hidden_states.

        Returns:
            FlaxBaseModelOutputWithPooling; [0] is last_hidden_state.
        """
        last_hidden_state, pooled, states = self.encode(input_ids, attention_mask, position_ids)
        return FlaxBaseModelOutputWithPooling(
            last_hidden_state, pooled, states if output_hidden_states else None
        )


class FlaxCLIPTextModelWithProjection(FlaxCLIPTextModel):
    """The same with a linear projection of the end-of-text row, as SDXL uses it."""

    torch_class_name = "CLIPTextModelWithProjection"

    @nn.compact
    def __call__(
        self, input_ids, attention_mask=None, position_ids=None, output_hidden_states=False
    ):
        """As FlaxCLIPTextModel; returns FlaxCLIPTextModelOutput, whose [0] is text_embeds."""
        last_hidden_state, pooled, states = self.encode(input_ids, attention_mask, position_ids)
        projection = nn.Dense(
            self.projection_dim, use_bias=False, dtype=self.dtype, name="text_projection"
        )
        return FlaxCLIPTextModelOutput(
            projection(pooled), last_hidden_state, states if output_hidden_states else None
        )
