"""Flags that programs share."""

from dataclasses import fields

import pytest

import edit_app
import edit_cli
import evaluate_edits
import generate_cli
import sdxl_single
import sdxl_single_aot
from diffusers_flax.app.settings import Settings
from diffusers_flax.generating.models import ModelOptions, Sampling


@pytest.mark.parametrize(
    ("group", "config", "expected"),
    [
        (Sampling, edit_cli.Config, "prediction_type"),
        (ModelOptions, edit_cli.Config, "layout controlnet"),
        (Sampling, evaluate_edits.Config, "negative_prompt seed prediction_type"),
        (ModelOptions, evaluate_edits.Config, "storage vae_dtype layout controlnet preview"),
        (Sampling, sdxl_single.Config, "image_guidance_scale"),
        (Sampling, sdxl_single_aot.Config, "image_guidance_scale"),
        (
            Sampling,
            edit_app.Config,
            "negative_prompt timesteps eta timestep_spacing prediction_type",
        ),
        (ModelOptions, edit_app.Config, "layout controlnet preview"),
        (Sampling, generate_cli.Config, "image_guidance_scale"),
        (ModelOptions, generate_cli.Config, "layout"),
        (Sampling, Settings, "timesteps eta timestep_spacing prediction_type"),
    ],
)
def test_fields_without_a_flag(group, config, expected):
    """from_flags leaves their defaults; a flag that is renamed would have no effect."""
    flags = {field.name for field in fields(config)}
    missing = [field.name for field in fields(group) if field.name not in flags]
    assert missing == expected.split()
