"""Captions of pairs of images: from a list, or from a template with words to fill in.

    captions = read_captions(Path("captions.jsonl"))
    captions = captions_of_template(
        ("a photo of {animal}", "make it {other}", "a photo of {other}"),
        ("animal=a cat,a dog", "other=a lion,a tiger"),
    )

A list has lines {"input": caption, "edit": instruction, "output": caption after the edit}, or is a
.csv file with these columns; "caption" is another name of "input". Other keys are ignored, as in
lists of edits (data/lists.py).
"""

import json
import string
from itertools import product
from pathlib import Path
from typing import NamedTuple

from diffusers_flax.data.lists import raise_problems, read_objects
from diffusers_flax.generating.flags import nonblank_lines
from diffusers_flax.loading.tokenizer import check_text, sequences_of_ids

EXCERPT = 40  # characters of a text in a message


class Caption(NamedTuple):
    """Two captions and the instruction between them."""

    line: int  # in its list, from 1
    input: str
    edit: str
    output: str


KEYS = Caption._fields[1:]


def read_captions(file):
    """Read a list of captions.

    Args:
        file: JSON lines or .csv, UTF-8.

    Returns:
        List of Caption, with the spaces around texts removed. Blank lines are skipped.

    Raises:
        ValueError: the file cannot be read, is not UTF-8 or has no captions; or lines are invalid
            or have two equal captions (names the first ten).
    """
    given = f"--captions {file}"
    captions, problems = [], []
    for line, content in read_objects(given, file):
        try:
            if isinstance(content, str):
                raise ValueError(content)
            content = {"input": content.get("caption")} | content  # of the paper's own lists
            texts = [content.get(key) for key in KEYS]
            for key, text in zip(KEYS, texts):
                if not isinstance(text, str) or not text.strip():
                    raise ValueError(f"{key} has no text")
                check_text(text)
            caption = Caption(line, *map(str.strip, texts))
            if caption.input.lower() == caption.output.lower():
                raise ValueError("output is the same as input; write the caption after the edit")
            captions.append(caption)
        except ValueError as error:
            problems.append((line, str(error)))
    raise_problems(given, problems)
    if not captions:
        example = '{"input": "a cat", "edit": "make it a lion", "output": "a lion"}'
        raise ValueError(f"{given} is empty; write a line for each edit: {example}")
    return captions


def text_of(captions):
    """A list of captions, as read_captions reads it."""
    rows = (dict(zip(KEYS, caption[1:])) for caption in captions)
    return "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)


def captions_of_template(template, fill):
    """All captions that words make of a template, except those without a change.

    Args:
        template: caption, instruction, caption after the edit, with fields such as {animal}.
        fill: "FIELD=VALUE,VALUE" for each field, or "FIELD=@FILE" for a file with a value a line.

    Returns:
        List of Caption, numbered from 1. The values of the last field change first.

    Raises:
        ValueError: a template is not valid, a field has no values or values no field, or nothing
            is left.
    """
    values = {}
    for given in fill:
        name, _, text = given.partition("=")
        if text.startswith("@"):
            values[name] = nonblank_lines(Path(text[1:]))
        else:
            values[name] = [value.strip() for value in text.split(",")]
        if not (values[name] and all(values[name])):
            raise ValueError(f"--fill {given} has a value without text; write NAME=WORDS,WORDS")
    parts = [part for text in template for part in string.Formatter().parse(text)]
    names = {name for _, name, _, _ in parts if name is not None}
    if names != {*values}:
        raise ValueError(
            f"--template has the fields {', '.join(sorted(names)) or 'none'}, and --fill has "
            f"values for {', '.join(values) or 'none'}; give values for each field"
        )
    captions = []
    for chosen in product(*values.values()):
        texts = [text.format(**dict(zip(values, chosen))).strip() for text in template]
        if texts[0].lower() != texts[2].lower():
            captions.append(Caption(len(captions) + 1, *texts))
    if not captions:
        raise ValueError(
            f"--template makes equal captions before and after the edit, such as {template[0]!r}; "
            "give the third text another field or word than the first"
        )
    return captions


def check_lengths(captions, tokenizers, given):
    """Raise a ValueError that names lines with texts which a text encoder would cut.

    Args:
        captions: list of Caption.
        tokenizers: (tokenizer, tokens that its text encoder takes, start and end included).
        given: the captions with their flag, for error messages.
    """
    problems = set()
    rows = [(x.line, key, getattr(x, key)) for x in captions for key in KEYS]
    for tokenizer, length in tokenizers:
        all_ids = sequences_of_ids(tokenizer, [text for _, _, text in rows])
        problems |= {
            (line, f"{key} is too long, {len(ids)} tokens of {length}: {text[:EXCERPT]!r}")
            for (line, key, text), ids in zip(rows, all_ids)
            if len(ids) > length
        }
    raise_problems(given, sorted(problems))
