"""Textual-inversion embeddings: new tokens for prompts, with vectors from files.

    pipeline, params = FlaxStableDiffusionPipeline.from_pretrained(
        "MODEL", embeddings=["style.pt", "cat-toy.safetensors:<cat-toy>"]
    )
    prompt_ids = pipeline.prepare_inputs("a <cat-toy> on a beach")

Reads files of AUTOMATIC1111's web UI and of the original code (.pt), of diffusers (.bin,
.safetensors), and of SDXL with vectors for both text encoders (clip_l and clip_g). A token with n
vectors is one word in a prompt and n tokens in the text encoder.

Source: An Image is Worth One Word (arXiv 2208.01618).
"""

from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from diffusers_flax.loading.hub import fetch_named
from diffusers_flax.loading.lora import split_spec
from diffusers_flax.loading.refused import EMBEDDING, refuse
from diffusers_flax.loading.weights import as_array, load_pickle, naming_damage, read_safetensors

# diffusers' names, in a directory or on the hub.
EMBEDDING_FILES = ("learned_embeds.safetensors", "learned_embeds.bin")
ENCODERS = {"clip_l": "text_encoder", "clip_g": "text_encoder_2"}  # by names in SDXL's files
TOKENIZERS = {"text_encoder": "tokenizer", "text_encoder_2": "tokenizer_2"}
NO_TOKEN = ("emb_params", "*")  # names of vectors that are not tokens
TABLE = "text_model/embeddings/token_embedding/embedding"


class Embedding(NamedTuple):
    """A token and its vectors."""

    source: str  # as given
    token: str
    # {"text_encoder", "text_encoder_2": float32 (n, D)}; {None: ...} for a model with one of them
    vectors: dict


class Embeddings:
    """Embedding files, added to tokenizers and to the parameters of text encoders.

    Args:
        specs: FILE or FILE:TOKEN, each a .safetensors, .pt or .bin file, a directory with
            learned_embeds.safetensors or .bin, or a hub id (owner/name or owner/name/FILE). TOKEN
            is by default the file's, or the file's name.
        **hub_options: see take_hub_options.
    """

    def __init__(self, specs=(), **hub_options):
        specs = [specs] if isinstance(specs, str | Path) else specs
        self.embeddings = [
            found for spec in specs for found in read_embeddings(spec, **hub_options)
        ]
        self.rows = {}  # {component: {token id: vector}}

    def add_tokens(self, components):
        """Add the tokens to the tokenizers, and their number to the text encoders of a pipeline.

        components: {name: component}; tokenizers change in place, text encoders are replaced.
        """
        if not self.embeddings:
            return
        encoders = {name: x for name in TOKENIZERS if (x := components.get(name)) is not None}
        modules = {name: encoder.module for name, encoder in encoders.items()}
        for embedding in self.embeddings:
            for component, vectors in fit_vectors(embedding, modules).items():
                tokenizer, token = components[TOKENIZERS[component]], embedding.token
                tokens = [token, *(f"{token}_{i}" for i in range(1, len(vectors)))]
                if known := sorted({*tokens} & tokenizer.get_vocab().keys()):
                    raise ValueError(
                        f"embeddings={embedding.source}: the tokenizer has the token {known[0]} "
                        "already; name another one, FILE:TOKEN"
                    )
                tokenizer.add_tokens(tokens)
                ids = tokenizer.convert_tokens_to_ids(tokens)
                self.rows.setdefault(component, {}).update(zip(ids, vectors))
        for component, rows in self.rows.items():
            module = modules[component]
            vocab_size = max(module.vocab_size, 1 + max(rows))
            components[component] = type(encoders[component]).from_config(
                module.config_fields(), dtype=module.dtype, vocab_size=vocab_size
            )

    def extend(self, component, name, x):
        """A component's parameter x with the new tokens' rows, in its dtype; name: by "/"."""
        if name != TABLE or component not in self.rows:
            return x
        rows = self.rows[component]
        table = np.zeros((max(len(x), 1 + max(rows)), x.shape[1]), x.dtype)
        table[: len(x)] = x
        for i, vector in rows.items():
            table[i] = vector.astype(x.dtype)
        return table


def fit_vectors(embedding, modules):
    """{text encoder: vectors (n, D)} of an Embedding for a model's {text encoder: its module}."""
    vectors = embedding.vectors
    if None in vectors and len(modules) == 1:
        vectors = dict.fromkeys(modules, vectors[None])
    elif modules.keys() == {"text_encoder_2"}:  # a refiner takes an embedding of SDXL
        vectors = {name: x for name, x in vectors.items() if name in modules}
    found = {name: x.shape[1] for name, x in vectors.items()}
    wanted = {name: module.hidden_size for name, module in modules.items()}
    if found != wanted:
        has, take = (" and ".join(map(str, widths.values())) for widths in (found, wanted))
        raise ValueError(
            f"embeddings={embedding.source} has vectors of {has} numbers, the model's text "
            f"encoders take {take}; take an embedding of the model's family"
        )
    return vectors


def read_embeddings(spec, **hub_options):
    """List of the Embeddings of FILE or FILE:TOKEN; a ValueError if there are none."""
    source, token = split_spec(spec)
    file = fetch_named("embeddings", source, EMBEDDING_FILES, **hub_options)
    what = f"embeddings={source}"
    with naming_damage(what):
        is_pickle = file.suffix != ".safetensors"
        content = as_arrays(load_pickle(file)) if is_pickle else dict(read_safetensors(file))
    default = file.parent.name if file.name in EMBEDDING_FILES else file.stem
    if isinstance(content, dict) and "string_to_param" in content:  # of the web UI
        default = content.get("name") or default
        content = next(iter(content["string_to_param"].values()))
    content = content if isinstance(content, dict) else {"*": content}
    refuse(what, map(str, content), takes=(EMBEDDING,))
    vectors = {key: as_vectors(what, key, x) for key, x in content.items()}
    if vectors.keys() <= ENCODERS.keys():  # of one token
        of_encoders = {ENCODERS[key]: x for key, x in vectors.items()}
        return [Embedding(str(spec), token or default, of_encoders)]
    if token and len(vectors) > 1:
        raise ValueError(f"{what} has the tokens {', '.join(vectors)}; leave out :TOKEN")
    return [
        Embedding(str(spec), token or (default if key in NO_TOKEN else key), {None: x})
        for key, x in vectors.items()
    ]


def as_vectors(what, name, x):
    """An array of floats, (D,) or (n, D), as float32 (n, D); a ValueError for others."""
    if getattr(x, "ndim", 0) not in (1, 2) or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"{what} is not an embedding: its entry {name} is no vectors of floats")
    return np.atleast_2d(x.astype(np.float32))


def as_arrays(content):
    """The content of a PyTorch file, with NumPy arrays in place of tensors."""
    if hasattr(content, "items"):  # a dict or PyTorch's ParameterDict
        return {name: as_arrays(x) for name, x in content.items()}
    return as_array(content) if hasattr(content, "detach") else content
