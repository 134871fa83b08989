"""Flags that programs share."""

from dataclasses import fields

import pytest

import edit_app
import edit_cli
import evaluate_edits
import generate_cli
from diffusers_flax.app.settings import Settings
from diffusers_flax.generating.models import ModelOptions, Sampling

OF_MODELS = {"unet", "revision", "variant", "controlnet", "layout", "saved_programs"}
OF_TEXT = {"timesteps", "eta", "timestep_spacing", "prediction_type"}


@pytest.mark.parametrize(
    ("group", "config", "expected"),
    [
        (Sampling, edit_cli.Config, {"prediction_type"}),
        (ModelOptions, edit_cli.Config, OF_MODELS),
        (Sampling, evaluate_edits.Config, {"negative_prompt", "seed", "prediction_type"}),
        (ModelOptions, evaluate_edits.Config, {*OF_MODELS, "storage", "vae_dtype", "preview"}),
        (Sampling, edit_app.Config, {*OF_TEXT, "negative_prompt"}),
        (ModelOptions, edit_app.Config, {*OF_MODELS, "preview"}),
        (Sampling, generate_cli.Config, {"image_guidance_scale"}),
        (ModelOptions, generate_cli.Config, {"layout", "saved_programs"}),
        (Sampling, Settings, OF_TEXT),
    ],
)
def test_fields_without_a_flag(group, config, expected):
    """from_flags leaves their defaults; a flag that is renamed would have no effect."""
    flags = {field.name for field in fields(config)}
    assert {field.name for field in fields(group)} - flags == expected
