"""Settings: their ranges, and recipes that carry them."""

import dataclasses
import json
import re

import pytest

from diffusers_flax.app.settings import Limits, Settings, check_settings, settings_of

LIMITS = Limits(16, 128, ("style",), takes_strength=True)
PLAIN = Settings("", resolution=64)


def restored(recipe, limits=LIMITS):
    """settings_of a recipe as its JSON text brings it."""
    return settings_of(json.loads(json.dumps(recipe)), PLAIN, limits)


def test_a_recipe_has_the_settings():
    settings = Settings("écris « rouge »", 3.5, 1.2, 7, 2**32 - 1, 48, "square", "euler", ("tome",))
    settings = dataclasses.replace(settings, lora=("style",), lora_weight=0.5, strength=0.7)
    recipe = {"prompt": settings.instruction, "page": vars(settings)}
    assert restored(recipe) == settings
    other_program = {"prompt": "red", "strength": 1, "lora": ["a.safetensors:0.5"], "grid": "x.png"}
    expected = dataclasses.replace(PLAIN, instruction="red", strength=1.0)
    assert restored(other_program) == expected


@pytest.mark.parametrize(
    "wrong",
    [
        {"seed": -1, "resolution": 10**30, "mask_feather": -5},
        {"accelerate": [{"a": 1}, ["x"], 5], "lora": [["style"]]},
        {"scheduler": "<b>", "accelerate": ["taesd:path=/etc/passwd"]},
        {"seed": None, "num_inference_steps": "x"},
    ],
)
def test_settings_that_a_page_cannot_have(wrong):
    settings = restored({"prompt": "red", "page": {"num_inference_steps": 9} | wrong})
    check_settings(settings, LIMITS)
    if "num_inference_steps" not in wrong:
        assert settings == dataclasses.replace(PLAIN, instruction="red", num_inference_steps=9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"instruction": " "}, "instruction= is empty; write a few words"),
        ({"guidance_scale": float("nan")}, "guidance_scale=nan must be from 0 to 20"),
        ({"resolution": 136}, "resolution=136 must be from 16 to 128"),
        ({"scheduler": "eular"}, "scheduler=eular is unknown"),
        ({"lora": ("/etc/x",)}, "lora=/etc/x is not among the files that this page offers"),
        ({"accelerate": ("taesd:path=/etc",)}, "the page has one TAESD; write taesd"),
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
    edits = dataclasses.replace(LIMITS, takes_strength=False)
    with pytest.raises(ValueError, match="strength= is for models that make images from text"):
        check_settings(settings, edits)
    recipe = {"edit": "red", "page": vars(settings)}
    assert restored(recipe, edits).strength is None
