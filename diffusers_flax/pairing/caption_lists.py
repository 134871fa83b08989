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
import math
import string
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import NamedTuple

from diffusers_flax.data.lists import raise_problems, read_objects
from diffusers_flax.generating.flags import nonblank_lines
from diffusers_flax.loading.tokenizer import check_text, sequences_of_ids

MAX_COMBINATIONS = 1_000_000  # of the words of a template
TEXTS_AT_ONCE = 10_000  # to tokenize
EXCERPT = 40  # characters of a text in a message


class Caption(NamedTuple):
    """Two captions and the instruction between them."""

    line: int  # in its list, from 1
    input: str
    edit: str
    output: str


KEYS = Caption._fields[1:]


# ------------------------------------------------------------------ lists


def read_captions(file: Path) -> list[Caption]:
    """Read a list of captions.

    Args:
        file: JSON lines or .csv, UTF-8.

    Returns:
        The captions with the spaces around them removed. Blank lines are skipped.

    Raises:
        ValueError: the file cannot be read, is not UTF-8 or has no captions; or lines are invalid,
            repeat an earlier line, or have two equal captions (names the first ten).
    """
    given = f"--captions {file}"
    captions, problems, lines = [], [], {}
    for line, content in read_objects(given, file, name_missing):
        try:
            caption = Caption(line, *texts_of(content))
            before, _, after = spelling = spelling_of(caption[1:])
            if before == after:
                raise ValueError("output is the same as input; write the caption after the edit")
            if (first := lines.setdefault(spelling, line)) != line:
                raise ValueError(f"repeats line {first}")
            captions.append(caption)
        except ValueError as error:
            problems.append((line, str(error)))
    raise_problems(given, problems)
    if not captions:
        example = '{"input": "a cat", "edit": "make it a lion", "output": "a lion"}'
        raise ValueError(f"{given} is empty; write a line for each edit: {example}")
    return captions


def text_of(captions: Iterable[Caption]) -> str:
    """A list of captions, as read_captions reads it."""
    rows = (dict(zip(KEYS, caption[1:])) for caption in captions)
    return "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)


def texts_of(content: dict | str) -> list[str]:
    """The texts of a line; content: of read_objects. A ValueError says what is wrong with it."""
    if isinstance(content, str):
        raise ValueError(content)
    if "caption" in content and "input" not in content:  # of InstructPix2Pix's own generator
        content = content | {"input": content["caption"]}
    if problem := name_missing(content):
        raise ValueError(problem)
    for key in KEYS:
        if not isinstance(content[key], str) or not content[key].strip():
            raise ValueError(f"{key} has no text")
        check_text(content[key])
    return [content[key].strip() for key in KEYS]


def name_missing(names: Iterable[str]) -> str:
    """Name the missing keys or columns; "" without any."""
    names = [*names, *(["input"] if "caption" in names else [])]
    missing = [key for key in KEYS if key not in names]
    return f"no {' and no '.join(missing)}" if missing else ""


def spelling_of(texts: Iterable[str]) -> tuple[str, ...]:
    """Texts as CLIP's tokenizer reads them, without punctuation at the end."""
    return tuple(" ".join(text.lower().rstrip(" .!?").split()) for text in texts)


# ------------------------------------------------------------------ templates


def captions_of_template(template: tuple[str, str, str], fill: tuple[str, ...]) -> list[Caption]:
    """All captions that words make of a template, except those without a change.

    Args:
        template: caption, instruction, caption after the edit, with fields such as {animal}.
        fill: "FIELD=VALUE,VALUE" for each field, or "FIELD=@FILE" for a file with a value a line.

    Returns:
        The captions, numbered from 1. The values of the last field change first.

    Raises:
        ValueError: a template or value is not valid, a field has no values or values no field, or
            nothing is left.
    """
    values = dict(map(values_of, fill))
    names = fields_of(template)
    if {*names} != {*values}:
        raise ValueError(
            f"--template has the fields {', '.join(names) or 'none'}, and --fill has values for "
            f"{', '.join(values) or 'none'}; give values for each field"
        )
    number = math.prod(map(len, values.values()))
    if number > MAX_COMBINATIONS:
        raise ValueError(
            f"--fill makes {number:,} combinations of its values, more than {MAX_COMBINATIONS:,}; "
            "give fewer values, and other seeds or more samples for more pairs"
        )
    changes = {}  # copies that differ in case alone are made once
    for chosen in product(*values.values()):
        texts = [text.format(**dict(zip(values, chosen))).strip() for text in template]
        before, _, after = spelling = spelling_of(texts)
        if before != after:
            changes.setdefault(spelling, texts)
    if not changes:
        raise ValueError(
            f"--template makes equal captions before and after the edit, such as {template[0]!r}; "
            "give the third text another field or word than the first"
        )
    return [Caption(number, *texts) for number, texts in enumerate(changes.values(), start=1)]


def fields_of(template: tuple[str, str, str]) -> list[str]:
    """The names of the fields of a template's texts; a ValueError if they are not valid."""
    names = []
    for text in template:
        try:
            parts = list(string.Formatter().parse(text))
        except ValueError:
            parts = [("", "", "", "")]  # as of a field without a name
        if not text.strip():
            raise ValueError("--template has an empty text; write a caption or an instruction")
        for _, name, form, conversion in parts:
            if name is not None and (form or conversion or not name.isidentifier()):
                raise ValueError(
                    f"--template {text!r} has a field that is not a name in braces, such as "
                    "{animal}; write braces that stay as {{ and }}"
                )
            names += [name] if name else []
    return list(dict.fromkeys(names))


def values_of(given: str) -> tuple[str, list[str]]:
    """(name, values) of a field; given: a word of --fill, see captions_of_template."""
    name, equals, text = given.partition("=")
    if not (equals and name.isidentifier()):
        raise ValueError(
            f"--fill {given!r} has no NAME= at its start; write animal=cat,dog, or animal=@FILE "
            "for a file with a value a line"
        )
    if text.startswith("@"):
        values = nonblank_lines(f"--fill {given}", Path(text[1:]), "value")
    else:
        values = [value.strip() for value in text.split(",")]
    if not all(values) or len({*values}) < len(values):
        raise ValueError(f"--fill {given} has a value without text, or a value twice")
    return name, values


# ------------------------------------------------------------------ lengths


def check_lengths(captions: list[Caption], tokenizers: list[tuple], given: str) -> None:
    """Raise a ValueError that names lines with texts which a text encoder would cut.

    Args:
        captions: all of them.
        tokenizers: (tokenizer, tokens that its text encoder takes, start and end included).
        given: the captions with their flag, for error messages.
    """
    problems = []
    for key in KEYS:
        texts = [getattr(caption, key) for caption in captions]
        found = find_cut_texts(texts, tokenizers)
        problems += [(captions[place].line, f"{key} {said}") for place, said in found.items()]
    raise_problems(given, sorted(problems))


def find_cut_texts(texts: list[str], tokenizers: list[tuple]) -> dict[int, str]:
    """The texts that text encoders cut, {place: sentence}; tokenizers: see check_lengths."""
    problems = {}
    for tokenizer, length in tokenizers:
        for start in range(0, len(texts), TEXTS_AT_ONCE):
            sequences = sequences_of_ids(tokenizer, texts[start : start + TEXTS_AT_ONCE])
            for place, ids in enumerate(sequences, start):
                if len(ids) > length:
                    problems[place] = (
                        f"is {len(ids)} tokens long, the model takes {length}, start and end "
                        f"included: {texts[place][:EXCERPT]!r}"
                    )
    return problems
