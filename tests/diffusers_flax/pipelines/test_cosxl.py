"""CosXL and CosXL Edit against PyTorch diffusers."""

import dataclasses
import json

import jax
import pytest
import torch
from diffusers import StableDiffusionXLInstructPix2PixPipeline, StableDiffusionXLPipeline
from helpers import PROMPTS, edit_json, psnr, random_inputs
from references import edit_with_torch_xl
from tiny_models import make_tiny_cosxl

from diffusers_flax import (
    FlaxDiffusionPipeline,
    FlaxStableDiffusionXLInstructPix2PixPipeline,
    FlaxStableDiffusionXLPipeline,
)

SCALES = dict(guidance_scale=3.0, image_guidance_scale=1.5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_cosxl(tmp_path_factory.mktemp("cosxl") / "model")


def edit(pipeline, params, images, latents, num_inference_steps=8):
    inputs = pipeline.prepare_inputs(PROMPTS[: len(images)], images)
    key = jax.random.key(0)
    options = dict(num_inference_steps=num_inference_steps, latents=latents) | SCALES
    return pipeline(*inputs, params, key, **options).images


@pytest.mark.slow
@pytest.mark.parametrize("size", [(40, 56), (72, 64)])
def test_edits_are_those_of_pytorch(folder, size):
    images, latents = random_inputs(2, *size, 8)
    expected = edit_with_torch_xl(folder, PROMPTS[:2], images, latents, **SCALES)
    pipeline, params = FlaxDiffusionPipeline.from_pretrained(folder)
    assert type(pipeline) is FlaxStableDiffusionXLInstructPix2PixPipeline
    assert pipeline.is_cosxl_edit
    assert psnr(edit(pipeline, params, images, latents), expected) > 60


@pytest.mark.slow
def test_the_latents_of_the_image_are_scaled(folder, tmp_path):
    """Unless model_index.json says not; PyTorch's save_pretrained says nothing."""
    images, latents = random_inputs(1, 32, 32, 8)
    pipeline, params = FlaxDiffusionPipeline.from_pretrained(folder)
    scaled = edit(pipeline, params, images, latents)
    unscaled = dataclasses.replace(pipeline, is_cosxl_edit=False)
    assert psnr(edit(unscaled, params, images, latents), scaled) < 60

    pipeline.save_pretrained(tmp_path / "ours", params)
    theirs = StableDiffusionXLInstructPix2PixPipeline.from_pretrained(tmp_path / "ours")
    assert theirs.is_cosxl_edit and type(theirs.scheduler).__name__ == "EDMEulerScheduler"
    assert FlaxDiffusionPipeline.from_pretrained(tmp_path / "ours")[0].is_cosxl_edit
    theirs.save_pretrained(tmp_path / "theirs")
    assert "is_cosxl_edit" not in json.loads((tmp_path / "theirs/model_index.json").read_text())
    assert FlaxDiffusionPipeline.from_pretrained(tmp_path / "theirs")[0].is_cosxl_edit
    edit_json(tmp_path / "theirs/model_index.json", is_cosxl_edit=False)
    assert not FlaxDiffusionPipeline.from_pretrained(tmp_path / "theirs")[0].is_cosxl_edit


@pytest.mark.slow
def test_text_to_image_is_pytorchs(tmp_path):
    folder = make_tiny_cosxl(tmp_path / "model", edits=False)
    theirs = StableDiffusionXLPipeline.from_pretrained(folder)
    theirs.set_progress_bar_config(disable=True)
    _, latents = random_inputs(1, 48, 64, 8)
    options = dict(height=48, width=64, num_inference_steps=8, guidance_scale=4.0)
    expected = theirs(PROMPTS[0], latents=torch.tensor(latents), output_type="np", **options).images
    pipeline, params = FlaxStableDiffusionXLPipeline.from_pretrained(folder)
    prompt_ids, key = pipeline.prepare_inputs(PROMPTS[0]), jax.random.key(0)
    images = pipeline(prompt_ids, params, key, latents=latents, **options).images
    assert psnr(images, expected) > 60
