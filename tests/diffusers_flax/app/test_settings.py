"""Settings: their ranges, and the PNG files that carry them."""

import dataclasses
import json
import re

import numpy as np
import pytest
from helpers import photo
from PIL import Image

from diffusers_flax.app.settings import (
    SOFTWARE,
    Limits,
    Settings,
    check_settings,
    page_recipe,
    read_settings,
    within_limits,
)
from diffusers_flax.generating.recipes import KEYWORD, checksum_of, read_recipe
from diffusers_flax.images import save_image

LIMITS = Limits(16, 128, ("style",), takes_strength=True)


def test_settings_in_a_png_file(tmp_path):
    """They come back as they were; other files have none, damaged ones are no error."""
    settings = Settings(
        "écris « rouge »", 3.5, 1.2, 7, 2**32 - 1, 48, "square", "euler", ("tome",), ("style",), 0.5
    )
    settings = dataclasses.replace(settings, strength=0.7)
    image, flags = photo(8, 6), {"edit": settings.instruction, "input": "a.png"}
    save_image(image, tmp_path / "a.png", SOFTWARE, texts=page_recipe(settings, flags))
    assert read_settings(tmp_path / "a.png") == settings
    texts = page_recipe(settings, flags, {"input": tmp_path / "a.png"})
    save_image(image, tmp_path / "b.png", SOFTWARE, texts=texts)
    assert read_settings(tmp_path / "b.png") == settings
    recipe = read_recipe(tmp_path / "b.png")
    assert (recipe["edit"], recipe["input"]) == ("écris « rouge »", "a.png")
    assert recipe["sha256"] == {"input": checksum_of(tmp_path / "a.png")}
    np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / "a.png")), np.asarray(image))
    save_image(image, tmp_path / "plain.png", SOFTWARE)
    page = {"seed": "7", "guidance_scale": 2, "lora": ["x"]}
    texts = {KEYWORD: json.dumps({"edit": "red", "page": page})}
    save_image(image, tmp_path / "other.png", texts=texts)
    assert read_settings(tmp_path / "plain.png") is None
    other = Settings("red", guidance_scale=2.0, lora=("x",))  # the seed is no number
    assert read_settings(tmp_path / "other.png") == other
    assert within_limits(other, LIMITS) == (
        dataclasses.replace(other, resolution=128, lora=()),
        ["resolution", "lora"],
    )
    for wrong in (
        {"edit": "x" * 9999, "negative_prompt": "y" * 9999},
        {"seed": -1, "resolution": 10**30, "num_inference_steps": 0, "mask_feather": -5},
        {"guidance_scale": 99, "image_guidance_scale": float("inf"), "lora_weight": float("nan")},
        {"accelerate": [{"a": 1}, ["x"], 5], "lora": [["style"]], "scheduler": "<b>"},
        {"accelerate": ["taesd:path=/etc/passwd"], "shape": "round"},
        {"edit": "half an emoji \ud83d", "negative_prompt": "\udcff"},
        {"strength": 0.001},
    ):
        texts = {
            KEYWORD: json.dumps(
                {"edit": "red", "resolution": 64}
                | wrong
                | {"page": {"edit": "red", "resolution": 64} | wrong}
            )
        }
        save_image(image, tmp_path / "wrong.png", texts=texts)
        allowed, changed = within_limits(read_settings(tmp_path / "wrong.png"), LIMITS)
        check_settings(allowed, LIMITS)
        names = {"instruction" if name == "edit" else name for name in wrong}
        assert {*changed} == names
    texts = {KEYWORD: '{"edit": "red", "strength": 1}'}
    save_image(image, tmp_path / "a.png", texts=texts)
    assert read_settings(tmp_path / "a.png") == Settings("red", strength=1.0)
    for damaged in ('{"edit": ', "[]", "7"):
        save_image(image, tmp_path / "broken.png", texts={KEYWORD: damaged})
        assert read_settings(tmp_path / "broken.png") is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"instruction": " "}, "--instruction is empty; write a few words"),
        ({"instruction": "red " * 300}, "--instruction has 1200 characters; write 1000 or less"),
        (
            {"negative_prompt": "half an emoji \ud83d"},
            "--negative_prompt is not valid Unicode: character 15 is an unpaired surrogate",
        ),
        ({"guidance_scale": float("nan")}, "--guidance_scale nan must be from 0 to 20"),
        ({"seed": 2**32}, "--seed 4294967296 must be from 0 to 4294967295"),
        ({"num_inference_steps": 151}, "--num_inference_steps 151 must be from 1 to 150"),
        ({"resolution": 136}, "--resolution 136 must be from 16 to 128 pixels"),
        ({"scheduler": "eular"}, "scheduler=eular is unknown"),
        ({"lora": ("/etc/x",)}, "--lora /etc/x is not among the files that this page offers"),
        ({"lora_weight": 2.5}, "--lora_weight 2.5 must be from 0 to 2"),
        ({"mask_feather": -1}, "--mask_feather -1 must be from 0 to 64 pixels"),
        ({"accelerate": ("tea",)}, "accelerate=tea: 'tea' is unknown"),
        ({"accelerate": ("taesd:path=/etc",)}, "the page has one TAESD; write taesd"),
        ({"shape": "round"}, "--shape round is unknown"),
        ({"strength": 1.5}, "--strength 1.5 must be from 0 to 1"),
        ({"strength": float("nan")}, "--strength nan must be from 0 to 1"),
        ({"strength": 0.01}, "strength=0.01 of num_inference_steps=50 leaves no step to do; take"),
    ],
)
def test_settings_out_of_range(change, message):
    settings = Settings("red", resolution=64, lora=("style",))
    check_settings(settings, LIMITS)
    with pytest.raises(ValueError, match=re.escape(message)):
        check_settings(dataclasses.replace(settings, **change), LIMITS)


def test_strength_is_not_for_edits():
    settings = Settings("red", resolution=64, strength=0.5)
    check_settings(settings, LIMITS)
    edits = dataclasses.replace(LIMITS, takes_strength=False)
    with pytest.raises(ValueError, match="--strength is for models that make images from text"):
        check_settings(settings, edits)
    plain = dataclasses.replace(settings, strength=None)
    assert within_limits(settings, edits) == (plain, ["strength"])


@pytest.mark.parametrize("num_inference_steps", [1, 3, 7, 50, 150])
def test_the_smallest_strength_that_an_error_names(num_inference_steps):
    settings = Settings("red", num_inference_steps=num_inference_steps, strength=0.001)
    with pytest.raises(ValueError, match="leaves no step to do") as error:
        settings.num_steps  # noqa: B018
    named = float(re.search("take strength ([0-9.]+) or more", str(error.value))[1])
    assert dataclasses.replace(settings, strength=named).num_steps >= 1


@pytest.mark.parametrize(
    ("edits", "words"),
    [(True, "instruction scale 7.5, image scale 1.2"), (False, "prompt scale 7.5")],
)
def test_the_summary_names_each_scale(edits, words):
    settings = Settings("red", 7.5, 1.2, 3, seed=7, scheduler="euler")
    assert settings.summary(edits) == f"{words}, 3 steps, seed 7, euler"
    if not edits:
        settings = dataclasses.replace(settings, strength=0.4)
        assert settings.summary(edits) == f"{words}, strength 0.4, 3 steps, seed 7, euler"
