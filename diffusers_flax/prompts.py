"""Prompts of more than 77 tokens, and prompts whose words have weights: "(red:1.3) panda".

    prompts = prepare_prompts(
        pipeline, "a (red:1.3) panda", "blurry", long_prompts=True, prompt_weights="webui"
    )
    images = pipeline(
        prompts.prompt_ids,
        params,
        key,
        neg_prompt_ids=prompts.neg_prompt_ids,
        prompt_weights=prompts.prompt_weights,
    ).images

A text encoder takes 77 tokens. A long prompt is several chunks of 77: start, up to 75 tokens, end,
padding. Each is encoded alone; their states are joined. docs/generating.md has the table of the two
conventions for brackets and chunks.

Source: AUTOMATIC1111/stable-diffusion-webui, modules/prompt_parser.py, sd_hijack_clip.py and
sd_emphasis.py ("Original"); comfyanonymous/ComfyUI, comfy/sd1_clip.py and sdxl_clip.py.
"""

import math
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diffusers_flax.loading.tokenizer import check_text, sequences_of_tokens, too_long
from diffusers_flax.messages import warn_once

BRACKET = 1.1  # weight of brackets without a number
LAST_TOKENS = 20  # webui: a comma among so many last tokens of a full chunk ends it
ROUNDING = 1e-6  # a mean of so much of the mean absolute value is zero
LONG_TEXT = 8  # comfyui: texts of so many tokens or more are split over chunks
BREAK = None  # in a list of (text, weight): what follows begins a new chunk

# webui: an escape, a bracket, a weight that closes a bracket, or text.
WEBUI_PIECE = re.compile(r"\\[\\()\[\]]?|[(\[\])]|:\s*(?P<weight>[+-]?[.\d]+)\s*\)|[^\\()\[\]:]+|:")

COMFYUI_TOKEN = re.compile(r"\\?[()]|[^\\()]+|\\")  # a bracket, perhaps escaped, or text


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("text", "null"),
    meta_fields=("convention",),
)
@dataclass(frozen=True)
class PromptWeights:
    """Weights of tokens, for a call of a pipeline.

    Fields:
        text: float32, one for each of prompt_ids, with their shape; 1: no change.
        null: likewise for neg_prompt_ids, or None.
        convention: "webui" or "comfyui".
    """

    text: Any
    null: Any
    convention: str


class Prompts(NamedTuple):
    """Arguments of a call of a pipeline.

    Fields:
        prompt_ids: int32 (B, 77 k), SDXL (B, 2, 77 k), a refiner (B, 1, 77 k), of k chunks.
        neg_prompt_ids: likewise, or None.
        prompt_weights: PromptWeights, or None if all are 1.
    """

    prompt_ids: np.ndarray
    neg_prompt_ids: np.ndarray | None
    prompt_weights: PromptWeights | None


def prepare_prompts(
    pipeline, prompt, negative_prompt=None, long_prompts=False, prompt_weights=None
):
    """Tokenize prompts that may be long or have weights; see the top of this file.

    The prompts of a batch may have different numbers of chunks: each prompt's chunks are repeated
    up to the least common multiple of the numbers, which does not change its image.

    Args:
        pipeline: FlaxDiffusionPipeline.
        prompt: str or list of str.
        negative_prompt: a str for all, or a list with one for each prompt; None or empty: none.
        long_prompts: False: tokens past the text encoder's 77 are cut, with a warning, and BREAK
            has no effect.
        prompt_weights: "webui" or "comfyui", the convention for brackets; None: brackets are text.

    Returns:
        Prompts.

    Raises:
        ValueError: prompts that are not text; a weight that is no number; another convention.
    """
    if prompt_weights not in (None, "webui", "comfyui"):
        raise ValueError(f"prompt_weights={prompt_weights!r} is unknown; take webui or comfyui")
    has_negative = any(text not in ("", None) for text in as_list(negative_prompt))
    if not long_prompts and prompt_weights is None:
        prepare = pipeline.prepare_text_inputs
        return Prompts(prepare(prompt), prepare(negative_prompt) if has_negative else None, None)
    prepare = partial(tokenize_weighted, pipeline, long_prompts, prompt_weights)
    ids, weights = prepare(prompt)
    null_ids, null_weights = prepare(negative_prompt) if has_negative else (None, None)
    all_weights = PromptWeights(weights, null_weights, prompt_weights)
    is_plain = all((x == 1).all() for x in jax.tree.leaves(all_weights))
    return Prompts(ids, null_ids, None if is_plain else all_weights)


def tokenize_weighted(pipeline, long_prompts, convention, prompt):
    """(ids, weights) of prompts, int32 and float32 (B, 77 k), SDXL (B, encoders, 77 k)."""
    prompts = as_list(prompt)
    for text in prompts:
        check_text(text)
    parse = {"webui": parse_webui, "comfyui": parse_comfyui, None: lambda text: [(text, 1.0)]}
    encoders = [
        (tokenizer, encoder.module.max_position_embeddings)
        for _, encoder, tokenizer in pipeline.text_encoders
    ]
    rows = []  # for each prompt, (encoders, chunks, 77, 2)
    for parts in map(parse[convention], prompts):
        padded = []
        for tokenizer, length in encoders:
            chunks = make_chunks(tokenizer, parts, length, long_prompts, convention)
            padded.append([pad_chunk(tokenizer, chunk, length) for chunk in chunks])
        rows.append(np.array(padded))
    most = math.lcm(*(row.shape[1] for row in rows))
    pairs = np.stack([np.tile(row, (1, most // row.shape[1], 1, 1)) for row in rows])
    pairs = pairs.reshape(*pairs.shape[:2], -1, 2)
    if pipeline.text_axes == 1:
        pairs = pairs[:, 0]
    return pairs[..., 0].astype(np.int32), pairs[..., 1].astype(np.float32)


def as_list(prompt):
    """A list of prompts from one or several."""
    return list(prompt) if isinstance(prompt, list | tuple) else [prompt]


def make_chunks(tokenizer, parts, length, long_prompts, convention):
    """Chunks of up to length - 2 pairs (id, weight) of a prompt's parts (text, weight) or BREAK."""
    units, size = units_of(tokenizer, parts, convention, length - 2), length - 2
    if long_prompts:
        comma = None if convention == "comfyui" else tokenizer.convert_tokens_to_ids(",</w>")
        return fill_chunks(units, size, comma)
    pairs = [(i, weight) for ids, weight in filter(None, units) for i in ids]
    ids = [tokenizer.bos_token_id, *(i for i, _ in pairs), tokenizer.eos_token_id]
    if message := too_long(tokenizer, ids, length):
        warn_once(message)
    return [pairs[:size]]


def units_of(tokenizer, parts, convention, size):
    """[(ids, weight) or BREAK]: tokens that share a chunk, at most `size` of them.

    An embedding with several vectors is one unit, and so is a short text of comfyui.
    """
    sequences, units = sequences_of_tokens(tokenizer), []
    for part in parts:
        if part is BREAK:
            units.append(BREAK)
            continue
        ids = tokenizer(part[0], add_special_tokens=False, verbose=False).input_ids
        together = convention == "comfyui" and len(ids) < LONG_TEXT
        for is_sequence, group in groupby(ids, lambda i: i in sequences):
            if is_sequence:
                found = [sequences[i] for i in group]
            else:
                found = [[*group]] if together else [[i] for i in group]
            for unit in found:
                whole = [unit] if len(unit) <= size else [[i] for i in unit]
                units += [(ids, part[1]) for ids in whole]
    return units


def fill_chunks(units, size, comma):
    """Chunks of up to `size` pairs (id, weight) of units_of; comma: its id, or None."""
    chunks, last_comma = [[]], -math.inf
    for unit in units:
        if unit is BREAK:
            chunks.append([])
            last_comma = -math.inf
            continue
        ids, weight = unit
        if ids == [comma]:
            last_comma = len(chunks[-1])
        elif len(chunks[-1]) == size and size - last_comma <= LAST_TOKENS:
            moved = chunks[-1][last_comma + 1 :]
            del chunks[-1][last_comma + 1 :]
            chunks.append(moved)
            last_comma = -math.inf
        if len(chunks[-1]) + len(ids) > size:
            chunks.append([])
            last_comma = -math.inf
        chunks[-1] += [(i, weight) for i in ids]
    return chunks if chunks[-1] or len(chunks) == 1 else chunks[:-1]


def pad_chunk(tokenizer, chunk, length):
    """A chunk's pairs (id, weight) between start and end, padded to a length."""
    pairs = [(tokenizer.bos_token_id, 1), *chunk, (tokenizer.eos_token_id, 1)]
    return pairs + [(tokenizer.pad_token_id, 1)] * (length - len(pairs))


def parse_webui(text):
    """[(text, weight) or BREAK] of a prompt with webui's brackets."""
    pieces, opened = [], {"(": [], "[": []}  # numbers of the first pieces within
    factors = {"(": BRACKET, "[": 1 / BRACKET}

    def close(bracket, factor):
        for piece in pieces[opened[bracket].pop() :]:
            piece[1] *= factor

    for match in WEBUI_PIECE.finditer(text):
        piece = match[0]
        if piece in opened:
            opened[piece].append(len(pieces))
        elif piece[-1] == ")" and opened["("] and piece[0] != "\\":
            close("(", float(match["weight"] or BRACKET))
        elif piece == "]" and opened["["]:
            close("[", factors["["])
        else:
            pieces.append([piece[1:] if piece[0] == "\\" else piece, 1.0])
    for bracket, factor in factors.items():
        while opened[bracket]:
            close(bracket, factor)
    parts = []
    for piece, weight in pieces:
        for i, part in enumerate(re.split(r"\bBREAK\b", piece)):
            if i:
                parts.append(BREAK)
            if parts and parts[-1] is not BREAK and parts[-1][1] == weight:
                part = parts.pop()[0] + part  # one text for the tokenizer
            parts.append((part, weight))
    return parts


def parse_comfyui(text, weight=1.0):
    """[(text, weight)] of a prompt with comfyui's brackets; weight: of what is in no bracket."""
    pieces, depth = [[]], 0  # lists of tokens, split where the outermost brackets open and close
    for token in COMFYUI_TOKEN.findall(text):
        if token == "(" and depth == 0:
            pieces.append([])
        pieces[-1].append(token)
        depth += {"(": 1, ")": -1}.get(token, 0)
        if token == ")" and depth == 0:
            pieces.append([])
    parts = []
    for piece in filter(None, pieces):
        part, is_bracketed = "".join(piece), (piece[0], piece[-1]) == ("(", ")")
        if not is_bracketed:
            parts.append((re.sub(r"\\([()])", r"\1", part), weight))
            continue
        part, own = part[1:-1], weight * BRACKET
        if (colon := part.rfind(":")) > 0:
            with suppress(ValueError):  # text that is no number stays text
                own, part = float(part[colon + 1 :]), part[:colon]
        parts += parse_comfyui(part, own)
    return parts


def encode_prompts(encode, texts, weights, empty_ids):
    """Text states of prompts of several chunks, or with weights: part of a compiled program.

    Cross-attention to all keys and values twice is cross-attention to them once, as softmax halves
    the weight of each. So the states of each text are repeated up to the least common multiple of
    the numbers of chunks, which changes no image.

    Args:
        encode: token ids (N, 77), SDXL (N, encoders, 77) -> ([states (N, 77, D) of each text
            encoder], pooled states (N, P) or None).
        texts: {"text", "null": token ids (rows, 77 k), SDXL (rows, encoders, 77 k)}; k may differ.
        weights: PromptWeights or None.
        empty_ids: of the empty prompt, like texts with k = 1 and one row.

    Returns:
        ({name: states (rows, S, D)}, {name: pooled states (rows, P) or None}), S the same for all.

    Source: see the top of this file.
    """
    length = empty_ids.shape[-1]
    chunks = {name: split_chunks(ids, length) for name, ids in texts.items()}
    batches = [x.reshape(-1, *x.shape[2:]) for x in chunks.values()]
    sizes = [len(x) for x in batches]
    if weights is not None:
        batches.append(jnp.asarray(empty_ids, batches[0].dtype))
    encoded, pooled = encode(jnp.concatenate(batches))
    most = math.lcm(*(x.shape[1] for x in chunks.values()))
    all_states, all_pooled, first = {}, dict.fromkeys(texts), 0
    for (name, ids), size in zip(chunks.items(), sizes):
        rows, k = ids.shape[:2]
        states = [x[first : first + size].reshape(rows, k, *x.shape[1:]) for x in encoded]
        w = None if weights is None else getattr(weights, name)
        if w is not None:
            w = split_chunks(w, length)
            w = w.reshape(len(w), k, -1, length)
            states = [
                weigh(weights.convention, z, w[:, :, i], x[-1])
                for i, (z, x) in enumerate(zip(states, encoded))
            ]
        joined = jnp.concatenate(states, axis=-1).reshape(rows, k * length, -1)
        all_states[name] = jnp.tile(joined, (1, most // k, 1))
        if pooled is not None:
            all_pooled[name] = pooled[first : first + size].reshape(rows, k, -1)[:, 0]
        first += size
    return all_states, all_pooled


def split_chunks(x, length):
    """(rows, 77 k) -> (rows, k, 77), or (rows, encoders, 77 k) -> (rows, k, encoders, 77)."""
    return jnp.moveaxis(x.reshape(*x.shape[:-1], -1, length), -2, 1)


def weigh(convention, states, weights, empty):
    """States z of chunks, (rows, k, 77, D), with weights (rows or 1, k, 77); empty: (77, D)."""
    z, w, z_empty = states.astype(jnp.float32), weights[..., None], empty.astype(jnp.float32)
    if convention == "comfyui":
        weighted = jnp.where(w == 1, z, z_empty + w * (z - z_empty))
    else:
        chunk = dict(axis=(-2, -1), keepdims=True)
        before, after = z.mean(**chunk), (w * z).mean(**chunk)
        smallest = ROUNDING * jnp.abs(z).mean(**chunk)
        is_zero = jnp.minimum(jnp.abs(before), jnp.abs(after)) <= smallest
        unscaled = is_zero | (w == 1).all(**chunk)
        weighted = w * z * jnp.where(unscaled, 1.0, before / after)
    return weighted.astype(states.dtype)
