"""Inpainting, and the hand-over from base to refiner, against the PyTorch pipelines."""

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax.jax_utils import replicate
from helpers import psnr
from PIL import Image
from references import call_theirs, open_ours, open_theirs, remove_variance
from tiny_models import make_tiny_pipeline, make_tiny_xl

import diffusers_flax
from diffusers_flax.images import prepare_images
from diffusers_flax.pipelines.base import FlaxDiffusionPipeline
from diffusers_flax.pipelines.running import Options

# diffusers' Euler scheduler under NumPy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy")

PROMPTS = ["make it red", "it"]
KEY = jax.random.key(0)
KEYS = jax.random.split(KEY, 2)  # of two images
STEPS = 10
RNG = np.random.default_rng(0)
SIZES = {"64x48": (64, 48), "48x64": (48, 64)}  # height x width


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A directory per kind of model, whose VAE has a posterior without variance."""
    root = tmp_path_factory.mktemp("models")
    options = dict(vae_channels=(8, 8, 16, 16))
    made = {
        "sd 4": make_tiny_pipeline(root / "sd", in_channels=4, **options),
        "sd 9": make_tiny_pipeline(root / "sd_inpaint", in_channels=9, **options),
        "xl 4": make_tiny_xl(root / "xl"),
        "xl 9": make_tiny_xl(root / "xl_inpaint", inpaints=True),
        "refiner 4": make_tiny_xl(root / "refiner", refiner=True, force_zeros=False),
    }
    for folder in made.values():
        remove_variance(folder)
    return made


def inputs_of(size):
    """Two images, a mask and noise for them: arrays (2, H, W, 3), PIL, (2, 4, h, w)."""
    height, width = size
    rng = np.random.default_rng(height)
    mask = np.zeros(size, np.uint8)
    mask[5:41, 10:33] = 255
    noise = rng.standard_normal((2, 4, height // 8, width // 8), np.float32)
    return rng.random((2, height, width, 3), np.float32), Image.fromarray(mask), noise


def inpaint_theirs(kind, folder, scheduler, size, **options):
    cls = (
        diffusers.StableDiffusionInpaintPipeline
        if "sd" in kind
        else diffusers.StableDiffusionXLInpaintPipeline
    )
    images, mask, noise = inputs_of(size)
    given = dict(prompt=PROMPTS, image=torch.from_numpy(images).permute(0, 3, 1, 2))
    given |= dict(mask_image=mask, height=size[0], width=size[1], num_inference_steps=STEPS)
    return call_theirs(open_theirs(folder, scheduler, cls), noise, **(given | options))


def inpaint_ours(kind, folder, scheduler, size, accelerate=(), **options):
    images, mask, noise = inputs_of(size)
    options = dict(latents=noise, num_inference_steps=STEPS) | options
    if "sd" in kind:
        pipeline, params = open_ours(
            folder, scheduler, diffusers_flax.FlaxStableDiffusionInpaintPipeline
        )
        prompt_ids, _, mask = pipeline.prepare_inputs(PROMPTS, images, mask)
        options["image"] = prepare_images(images)
        return pipeline(prompt_ids, mask, None, params, KEY, **options).images
    pipeline, params = open_ours(
        folder,
        scheduler,
        diffusers_flax.FlaxStableDiffusionXLInpaintPipeline,
        accelerate=accelerate,
    )
    inputs = pipeline.prepare_inputs(PROMPTS, images, mask)
    return pipeline(*inputs, params, KEY, **options).images


def cases():
    """One case runs in make test."""
    yield "xl 4", "euler", 0.6, "64x48"
    found = []
    for kind in ("xl 4", "xl 9", "refiner 4", "sd 4", "sd 9"):
        found += [(kind, "ddim", 1.0, "48x64"), (kind, "dpmsolver++", 0.6, "64x48")]
    found += [("xl 4", "euler", 1.0, "64x48"), ("xl 9", "euler", None, "48x64")]
    found += [("xl 9", "pndm", 1.0, "64x48")]  # PyTorch's is a timestep late below strength 1
    yield from (pytest.param(*case, marks=pytest.mark.slow) for case in found)


@pytest.mark.parametrize(("kind", "scheduler", "strength", "size"), list(cases()))
@torch.no_grad()
def test_inpainting_equals_pytorch(folders, kind, scheduler, strength, size):
    options = dict(guidance_scale=5.0) | ({"strength": strength} if strength else {})
    case = kind, folders[kind], scheduler, SIZES[size]
    expected = inpaint_theirs(*case, **options)
    images = inpaint_ours(*case, **options)
    assert images.shape == (2, *SIZES[size], 3) and images.dtype == jnp.float32
    assert psnr(images, expected) > 60
    assert np.std(expected) > 0.01


@pytest.mark.slow
def test_devices_folders_and_latents(folders, tmp_path):
    """Two devices make the same images; a directory's class opens it; an image may be latents."""
    pipeline, params = FlaxDiffusionPipeline.from_pretrained(folders["xl 9"])
    assert isinstance(pipeline, diffusers_flax.FlaxStableDiffusionXLInpaintPipeline)
    images, mask, _ = inputs_of((64, 48))
    inputs = pipeline.prepare_inputs(PROMPTS, images, mask)
    options = dict(num_inference_steps=3)
    expected = pipeline(*inputs, params, KEY, **options).images
    p_params = replicate(params, jax.devices()[:2])
    found = pipeline(*(x[:, None] for x in inputs), p_params, KEY, jit=True, **options).images
    np.testing.assert_allclose(found[:, 0], expected, atol=1e-5)

    _, image, mask_array = inputs
    latents = pipeline.latents_of(params, image, KEYS, Options(height=64, width=48))
    inputs = pipeline.prepare_inputs(PROMPTS, latents, mask)
    masked_image = image * (mask_array == 0)
    found = pipeline(*inputs, params, KEY, masked_image=masked_image, **options).images
    np.testing.assert_allclose(found, expected, atol=1e-4)

    pipeline.save_pretrained(tmp_path, params)
    theirs = diffusers.StableDiffusionXLInpaintPipeline.from_pretrained(
        tmp_path, low_cpu_mem_usage=False
    )
    assert theirs.unet.config.in_channels == 9


# --- from base to refiner ---


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheduler", "share", "output_type"),
    [
        ("dpmsolver++", 0.8, "latent"),
        *(
            (scheduler, share, "np")
            for scheduler in ("dpmsolver++", "euler", "ddim")
            for share in (0.8, 0.33)
        ),
    ],
)
@torch.no_grad()
def test_base_and_refiner_equal_pytorch(folders, scheduler, share, output_type):
    """The base ends early, the refiner makes the remaining steps, without history."""
    _, _, noise = inputs_of((64, 48))
    options = dict(num_inference_steps=STEPS, guidance_scale=5.0)
    first = dict(denoising_end=share, output_type="latent")
    base = open_theirs(folders["xl 4"], scheduler, diffusers.StableDiffusionXLPipeline)
    latents = call_theirs(base, noise, prompt=PROMPTS, height=64, width=48, **options, **first)
    refiner = open_theirs(
        folders["refiner 4"], scheduler, diffusers.StableDiffusionXLImg2ImgPipeline
    )
    second = dict(denoising_start=share, output_type=output_type)
    image = torch.from_numpy(latents)
    expected = call_theirs(refiner, noise, prompt=PROMPTS, image=image, **options, **second)

    pipeline, params = open_ours(
        folders["xl 4"], scheduler, diffusers_flax.FlaxStableDiffusionXLPipeline
    )
    inputs = pipeline.prepare_inputs(PROMPTS), params, KEY
    ours = pipeline(*inputs, latents=noise, height=64, width=48, **options, **first).images
    assert psnr(ours, latents, np.ptp(latents)) > 60
    pipeline, params = open_ours(
        folders["refiner 4"], scheduler, diffusers_flax.FlaxStableDiffusionXLImg2ImgPipeline
    )
    inputs = *pipeline.prepare_inputs(PROMPTS, ours), params, KEY
    images = pipeline(*inputs, **options, **second).images
    assert psnr(images, expected) > 60
    assert np.std(expected) > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["xl 4", "xl 9"])
@torch.no_grad()
def test_inpainting_goes_on_with_a_refiner(folders, kind):
    size, options = SIZES["64x48"], dict(guidance_scale=5.0)
    first = dict(denoising_end=0.7, output_type="latent", **options)
    latents = inpaint_theirs(kind, folders[kind], "euler", size, **first)
    second = dict(denoising_start=0.7, **options)
    case = "refiner 4", folders["refiner 4"], "euler", size
    expected = inpaint_theirs(*case, image=torch.from_numpy(latents), **second)

    ours = inpaint_ours(kind, folders[kind], "euler", size, **first)
    assert psnr(ours, latents, np.ptp(latents)) > 60
    pipeline, params = open_ours(*case[1:3], diffusers_flax.FlaxStableDiffusionXLInpaintPipeline)
    _, mask, noise = inputs_of(size)
    inputs = pipeline.prepare_inputs(PROMPTS, ours, mask)
    second |= dict(latents=noise, num_inference_steps=STEPS)
    assert psnr(pipeline(*inputs, params, KEY, **second).images, expected) > 60
