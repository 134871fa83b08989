"""CLIP's tokenizers: opening them from a pipeline directory, tokenizing prompts."""

import numpy as np

from diffusers_flax.loading.hub import fetch_directory
from diffusers_flax.messages import warn_once

TOKENIZER_FILES = (
    "tokenizer_config.json",
    "tokenizer.json",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
)
EXCERPT = 40  # characters of a prompt in a message


def load_tokenizer(path, text_encoder, revision=None, subfolder="tokenizer", **hub_options):
    """The CLIP tokenizer of a pipeline directory or hub id.

    text_encoder: the model that reads its tokens; subfolder: "tokenizer" or "tokenizer_2".
    """
    from transformers import CLIPTokenizer  # takes a second

    folder = fetch_directory(path, TOKENIZER_FILES, subfolder, revision, **hub_options)
    try:
        tokenizer = CLIPTokenizer.from_pretrained(folder)
    except Exception as error:  # of several kinds, for example without vocab.json
        raise ValueError(
            f"the tokenizer of {path}/{subfolder} cannot be opened, {error}; download it again"
        ) from error
    # Without the files transformers makes a tokenizer of two tokens, without an error.
    if not 2 < len(tokenizer) <= text_encoder.module.vocab_size:
        raise ValueError(
            f"the {subfolder} of {path} has {len(tokenizer)} tokens, its text encoder knows "
            f"{text_encoder.module.vocab_size}; copy or download {path}/{subfolder} again, from "
            "the same model"
        )
    return tokenizer


def tokenize(tokenizer, prompt, length):
    """Token ids, int32 (B, length), of a str or list of str; logs what it cuts off.

    The token of an embedding with several vectors, such as "<cat>", becomes "<cat> <cat>_1 ...".
    """
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    if not prompts:
        raise ValueError("prompt is an empty list; give at least one text, which may be empty")
    rows = np.full((len(prompts), length), tokenizer.pad_token_id, np.int32)
    for row, ids in zip(rows, sequences_of_ids(tokenizer, prompts)):
        if message := too_long(tokenizer, ids, length):
            warn_once(message)
            ids = [*ids[: length - 1], ids[-1]]  # with the end-of-text token
        row[: len(ids)] = ids
    return rows


def sequences_of_ids(tokenizer, prompts):
    """Token ids of a list of str, a list of any length for each."""
    for prompt in prompts:
        check_text(prompt)
    sequences = sequences_of_tokens(tokenizer)
    return [
        [token for i in ids for token in sequences.get(i, [i])]
        for ids in tokenizer(prompts, verbose=False).input_ids
    ]


def check_text(prompt):
    """Raise a ValueError unless a prompt is a str of valid Unicode."""
    if not isinstance(prompt, str):
        raise ValueError(f"prompt has {repr(prompt)[:EXCERPT]}, which is not a str; give texts")
    prompt.encode()  # a UnicodeEncodeError, where the tokenizers library would say nothing


def too_long(tokenizer, ids, length):
    """What tokenize cuts off a prompt, in words; "" if its ids fit."""
    if len(ids) <= length:
        return ""
    cut = tokenizer.decode(ids[length - 1 : -1])
    return (
        f"prompt is {len(ids)} tokens long, the text encoder takes {length}: its last "
        f"{len(ids) - length} tokens are ignored, {cut[:EXCERPT]!r}"
    )


def sequences_of_tokens(tokenizer):
    """{id of TOKEN: ids of TOKEN, TOKEN_1, ...} of added tokens with several vectors."""
    added, sequences = tokenizer.added_tokens_encoder, {}
    for token, i in added.items():
        ids = [i]
        while (following := f"{token}_{len(ids)}") in added:
            ids.append(added[following])
        if len(ids) > 1:
            sequences[i] = ids
    return sequences
