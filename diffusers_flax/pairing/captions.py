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
from collections import Counter
from collections.abc import Iterable
from difflib import get_close_matches
from itertools import product
from pathlib import Path
from typing import NamedTuple

from diffusers_flax.data.lists import LIKENESS, raise_problems, read_objects
from diffusers_flax.generating.flags import nonblank_lines
from diffusers_flax.loading.tokenizer import sequences_of_ids, sequences_of_tokens

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
            check_change(caption)
            if (first := lines.setdefault(spelling_of(caption[1:]), line)) != line:
                raise ValueError(f"repeats line {first}")
            captions.append(caption)
        except ValueError as error:
            problems.append((line, str(error)))
    raise_problems(given, problems)
    if not captions:
        raise ValueError(f"{given} is empty; write a line for each edit: {example()}")
    return captions


def text_of(captions: Iterable[Caption]) -> str:
    """A list of captions, as read_captions reads it."""
    rows = (dict(zip(KEYS, caption[1:])) for caption in captions)
    return "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)


def example() -> str:
    """A line of a list."""
    texts = ("a photo of a cat", "make it a lion", "a photo of a lion")
    return json.dumps(dict(zip(KEYS, texts)))


def texts_of(content: dict | str) -> tuple[str, str, str]:
    """The texts of a line's object; content: of read_objects.

    Raises:
        ValueError: content is a problem, or a text is missing, empty or not valid.
    """
    if isinstance(content, str):
        raise ValueError(content)
    if "caption" in content and "input" not in content:  # of InstructPix2Pix's own generator
        content = content | {"input": content["caption"]}
    if problem := name_missing(content):
        raise ValueError(problem)
    texts = [content[key] for key in KEYS]
    for key, text in zip(KEYS, texts):
        if not isinstance(text, str):
            raise ValueError(f"{key} is {json.dumps(text)[:EXCERPT]}, not text")
        if not text.strip():
            raise ValueError(f"{key} is empty")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{key} is not valid Unicode: it has an unpaired surrogate") from None
    return tuple(text.strip() for text in texts)


def name_missing(names: Iterable[str]) -> str:
    """Name the missing keys or columns; "" without any."""
    names = [*names, *(["input"] if "caption" in names else [])]
    missing = [key for key in KEYS if key not in names]
    if not missing:
        return ""
    unknown = [name for name in names if name not in KEYS]
    near = get_close_matches(missing[0], unknown, 1, LIKENESS)
    hint = f"; rename {near[0]} to {missing[0]}" if near else ""
    return f"no {' and no '.join(missing)}{hint}"


def check_change(caption: Caption) -> None:
    """Raise a ValueError unless the captions differ in a word."""
    before, _, after = spelling_of(caption[1:])
    if before == after:
        raise ValueError("output is the same as input; write the caption after the edit")


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
    names = fields_of(template)
    values = values_of(fill)
    if unknown := [name for name in names if name not in values]:
        raise ValueError(
            f"--template has {', '.join(map('{{{}}}'.format, unknown))}, for which --fill has no "
            f"values; add {' '.join(f'{name}=VALUE,VALUE' for name in unknown)}"
        )
    if unused := [name for name in values if name not in names]:
        fields = ", ".join(map("{{{}}}".format, names)) or "none"
        raise ValueError(
            f"--fill {unused[0]}=... is not in --template, whose fields are {fields}; write "
            f"{{{unused[0]}}} into a text, or leave it out"
        )
    number = math.prod(map(len, values.values()))
    if number > MAX_COMBINATIONS:
        raise ValueError(
            f"--fill makes {number:,} combinations of its values, more than {MAX_COMBINATIONS:,}; "
            "give fewer values, and other seeds or more samples for more pairs"
        )
    filled = (
        tuple(text.format(**dict(zip(values, chosen))) for text in template)
        for chosen in product(*values.values())
    )
    changes = {}  # copies that differ in case alone are made once
    for texts in filled:
        spelling = spelling_of(texts)
        if spelling[0] != spelling[2]:
            changes.setdefault(spelling, tuple(text.strip() for text in texts))
    if not changes:
        raise ValueError(
            f"--template makes equal captions before and after the edit, such as {template[0]!r}; "
            "give the third text another field or word than the first"
        )
    return [Caption(number, *texts) for number, texts in enumerate(changes.values(), start=1)]


def fields_of(template: tuple[str, str, str]) -> list[str]:
    """The names of the fields of the texts of a template, in order.

    Raises:
        ValueError: a text is empty, or a field is not a name in braces.
    """
    if len(template) != 3:
        raise ValueError(
            f"--template has {len(template)} texts; write 3 in quotation marks: caption, "
            "instruction, caption after the edit"
        )
    names = []
    for text in template:
        if not text.strip():
            raise ValueError("--template has an empty text; write a caption or an instruction")
        try:
            parts = list(string.Formatter().parse(text))
        except ValueError as error:
            raise ValueError(
                f"--template {text!r} cannot be read ({error}); write fields as {{name}}, and "
                "braces that stay as {{ and }}"
            ) from None
        for _, name, form, conversion in parts:
            if name is None:  # text after the last field
                continue
            if form or conversion or not name.isidentifier():
                raise ValueError(
                    f"--template {text!r} has the field {{{name}}}; a field is a name of letters, "
                    "digits and _, such as {animal}"
                )
            names.append(name)
    return list(dict.fromkeys(names))


def values_of(fill: tuple[str, ...]) -> dict[str, list[str]]:
    """The values of fields: {name: values}; arguments and errors of captions_of_template."""
    values = {}
    for given in fill:
        name, equals, text = given.partition("=")
        if not (equals and name.isidentifier()):
            raise ValueError(
                f"--fill {given!r} has no NAME= at its start; write animal=cat,dog, or "
                "animal=@FILE for a file with a value a line"
            )
        if name in values:
            raise ValueError(f"--fill {name}= is given twice; write all its values after one")
        if text.startswith("@"):
            found = nonblank_lines(f"--fill {given}", Path(text[1:]), "value")
        else:
            found = [value.strip() for value in text.split(",")]
            if not all(found):
                raise ValueError(
                    f"--fill {given} has a value without text; write NAME=VALUE,VALUE without a "
                    "comma at the end"
                )
        value, count = Counter(found).most_common(1)[0]
        if count > 1:
            raise ValueError(f"--fill {name}= has the value {value!r} {count} times")
        values[name] = found
    return values


# ------------------------------------------------------------------ lengths


def check_lengths(captions: list[Caption], tokenizers: list[tuple], given: str) -> None:
    """Check that text encoders read the texts to their ends.

    Args:
        captions: all of them.
        tokenizers: (tokenizer, tokens that its text encoder takes, start and end included).
        given: the captions with their flag, for error messages.

    Raises:
        ValueError: texts are longer (names the first ten).
    """
    lines = {}  # places of each text
    for caption in captions:
        for key, text in zip(KEYS, caption[1:]):
            lines.setdefault(text, []).append((caption.line, key))
    problems = [
        (line, KEYS.index(key), f"{key} {problem}")
        for text, problem in find_cut_texts(lines, tokenizers).items()
        for line, key in lines[text]
    ]
    raise_problems(given, [(line, problem) for line, _, problem in sorted(problems)])


def find_cut_texts(texts: Iterable[str], tokenizers: list[tuple]) -> dict[str, str]:
    """The texts that text encoders cut: {text: sentence}; tokenizers: see check_lengths."""
    problems = {}
    for tokenizer, length in tokenizers:
        unsure = may_be_long(texts, tokenizer, length)
        for start in range(0, len(unsure), TEXTS_AT_ONCE):
            some = unsure[start : start + TEXTS_AT_ONCE]
            for text, ids in zip(some, sequences_of_ids(tokenizer, some)):
                if len(ids) > length:
                    excerpt = f"{text[:EXCERPT]}..." if len(text) > EXCERPT else text
                    problems[text] = (
                        f"is {len(ids)} tokens long, the model takes {length}, start and end "
                        f"included: {excerpt!r}"
                    )
    return problems


def may_be_long(texts: Iterable[str], tokenizer, length: int) -> list[str]:
    """The texts of which characters alone do not tell that their tokens fit.

    CLIP's tokens are at least one byte, without spaces. A token of an embedding may become several.
    """
    if sequences_of_tokens(tokenizer):
        return list(texts)
    return [x for x in texts if not x.isascii() or len(x) - x.count(" ") > length - 2]
