"""Captions for make_pairs.py: lists, templates, and texts that are too long."""

import itertools
import json

import pytest
from helpers import ROOT
from shards import write_list
from transformers import CLIPTokenizer

from diffusers_flax.pairing.caption_lists import (
    Caption,
    captions_of_template,
    check_lengths,
    read_captions,
)

CAT = {"input": "a photo of a cat", "edit": "make it a lion", "output": "a photo of a lion"}
TEMPLATE = ("a photo of {animal}", "make it {other}", "a photo of {other}")


def write(tmp_path, *rows):
    """A list of dicts and texts."""
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    file = tmp_path / "captions.jsonl"
    file.write_text("\n".join(lines), encoding="utf-8")
    return file


def error_of(call, *args):
    with pytest.raises(ValueError) as error:
        call(*args)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_list(tmp_path):
    """Blank lines count, spaces around texts and other keys do not."""
    snow = {"input": " カフェ ", "edit": "add snow\n", "output": "カフェ in the snow", "url": "x"}
    file = write(tmp_path, "\ufeff" + json.dumps(CAT), "", "  ", snow, CAT | {"edit": "a lion"})
    assert read_captions(file) == [
        Caption(1, *CAT.values()),
        Caption(4, "カフェ", "add snow", "カフェ in the snow"),
        Caption(5, CAT["input"], "a lion", CAT["output"]),
    ]
    table = write_list(tmp_path / "captions.csv", [{**CAT, "url": ""}, snow])
    assert [caption[1:] for caption in read_captions(table)] == [
        tuple(CAT.values()),
        ("カフェ", "add snow", "カフェ in the snow"),
    ]


def test_all_problems_at_once(tmp_path):
    """The first ten are named."""
    rows = [
        CAT,
        "{",
        {"input": "a"},
        CAT | {"edit": 3},
        CAT | {"output": " \n"},
        '{"input": "\\ud800", "edit": "b", "output": "c"}',
        CAT | {"output": " A photo of a CAT"},
        *[CAT | {"edit": ""}] * 5,
    ]
    error = error_of(read_captions, write(tmp_path, *rows))
    expected = (
        *("not JSON (Expecting", "edit has no text", "edit has no text", "output has no text"),
        *("'utf-8' codec can't encode", "output is the same as input; write"),
    )
    assert all(f"line {line}: {problem}" in error for line, problem in enumerate(expected, start=2))
    assert error.endswith("and 1 more")


def test_a_template_has_all_combinations(tmp_path):
    (tmp_path / "cities.txt").write_text("\ufeffRome, in May\n\n Oslo \n", encoding="utf-8")
    template = ("{animal} in {city}", "make it {other}", "{other} in {city}")
    fill = ("animal=a cat,a dog", "other=a dog, a lion", f"city=@{tmp_path / 'cities.txt'}")
    expected = [
        (f"{a} in {city}", f"make it {b}", f"{b} in {city}")
        for a, b, city in itertools.product(
            ("a cat", "a dog"), ("a dog", "a lion"), ("Rome, in May", "Oslo")
        )
        if a != b
    ]
    found = captions_of_template(template, fill)
    assert [x[1:] for x in found] == expected
    assert [x.line for x in found] == list(range(1, len(expected) + 1))


def test_braces():
    found = captions_of_template(("{{{a}}}", "edit", "after"), ("a=x,y",))
    assert [x.input for x in found] == ["{x}", "{y}"]


@pytest.mark.parametrize(
    ("template", "fill", "problem"),
    [
        (TEMPLATE, ("animal=cat",), "has the fields animal, other, and --fill has values"),
        (TEMPLATE, ("animal=a", "other=b", "city=c"), "has values for animal, other, city; give"),
        (TEMPLATE, ("animal=cat,", "other=a"), "--fill animal=cat, has a value without text"),
        (TEMPLATE, ("animal=cat", "other=Cat"), "equal captions before and after the edit"),
    ],
)
def test_mistakes_in_templates(template, fill, problem):
    assert problem in error_of(captions_of_template, template, fill)


@pytest.fixture(scope="module")
def tokenizer():
    return CLIPTokenizer.from_pretrained(ROOT / "demo/base_model/tokenizer")


def texts_of_tokens(tokenizer, numbers):
    """Texts of so many tokens, start and end included."""
    texts = ["a " * (number - 2) for number in numbers]
    assert [len(tokenizer(text).input_ids) for text in texts] == numbers
    return [text.strip() for text in texts]


def test_texts_that_are_too_long_are_named(tokenizer):
    fits, long = texts_of_tokens(tokenizer, [77, 78])
    captions = [Caption(1, fits, "b", "c"), Caption(3, "a", long, long), Caption(5, long, "b", "c")]
    check_lengths(captions[:1], [(tokenizer, 77)], "--captions list.jsonl")
    problem = f"is too long, 78 tokens of 77: '{long[:40]}'"
    expected = f"line 3: edit {problem}; line 3: output {problem}; line 5: input {problem}"
    for tokenizers in ([(tokenizer, 77)], [(tokenizer, 99), (tokenizer, 77)]):
        error = error_of(check_lengths, captions, tokenizers, "--captions list.jsonl")
        assert error == f"--captions list.jsonl has 3 problems: {expected}"


def test_tokens_of_embeddings_count_with_all_vectors():
    tokenizer = CLIPTokenizer.from_pretrained(ROOT / "demo/base_model/tokenizer")
    tokenizer.add_tokens(["<cat>", *(f"<cat>_{n}" for n in range(1, 90))])
    caption = Caption(1, "a <cat>", "b", "c")
    error = error_of(check_lengths, [caption], [(tokenizer, 77)], "--template")
    assert "line 1: input is too long, 93 tokens" in error
