"""Pipelines whose VAE works in tiles, against PyTorch's enable_tiling; the choice of a tile."""

import math

import diffusers
import jax
import pytest
import torch
from helpers import PROMPTS, psnr, random_inputs
from tiny_models import make_tiny_pipeline, make_tiny_xl

from diffusers_flax import FlaxStableDiffusionXLPipeline
from diffusers_flax.pipelines import memory
from diffusers_flax.pipelines.base import FlaxDiffusionPipeline

# diffusers' Euler scheduler under NumPy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy")
KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {"edit": make_tiny_pipeline(root / "edit"), "xl": make_tiny_xl(root / "xl")}


def tiled_by_torch(pipeline, tile, factor):
    pipeline.set_progress_bar_config(disable=True)
    pipeline.vae.enable_tiling()
    pipeline.vae.tile_sample_min_size, pipeline.vae.tile_latent_min_size = tile, tile // factor
    return pipeline


@pytest.mark.slow
def test_edits_equal_pytorchs_enable_tiling(folders):
    """Two images of a size that is no multiple of the tile, encoded and decoded."""
    images, latents = random_inputs(2, 56, 40)
    edit = diffusers.StableDiffusionInstructPix2PixPipeline.from_pretrained(
        folders["edit"], safety_checker=None
    )
    tensors = torch.tensor(images).permute(0, 3, 1, 2)
    options = dict(num_inference_steps=4, guidance_scale=3.0, image_guidance_scale=1.5)
    arguments = dict(image=tensors, latents=torch.tensor(latents), output_type="np")
    whole = edit(PROMPTS[:2], **arguments, **options).images
    expected = tiled_by_torch(edit, 32, 4)(PROMPTS[:2], **arguments, **options).images
    assert psnr(whole, expected) < 50
    pipeline, params = FlaxDiffusionPipeline.from_pretrained(folders["edit"], vae_tile=32)
    inputs = pipeline.prepare_inputs(PROMPTS[:2], images)
    found = pipeline(*inputs, params, KEY, latents=latents, **options).images
    assert psnr(found, expected) > 60


@pytest.mark.parametrize("batch_size", [1, 3])
def test_choice_of_a_tile(folders, batch_size):
    pipeline = FlaxStableDiffusionXLPipeline.open(folders["xl"])  # its VAE is for 64 pixels
    size = (1024, 1024)
    whole = memory.bytes_of_vae(pipeline.compute_vae, batch_size, size, "cpu")
    of_64 = memory.bytes_of_vae(pipeline.compute_vae, batch_size, size, "cpu", 64)
    assert of_64 < whole / 2

    def choose(available):
        return memory.choose_vae_tile(pipeline, batch_size, size, available, "cpu")

    assert choose(math.inf) == choose(whole) == 0
    assert choose(whole - 1) == choose(of_64) == 64
    assert choose(of_64 - 1) == choose(0) == 32  # the least
