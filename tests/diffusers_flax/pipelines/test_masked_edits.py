"""Edits of a part of an image: against PyTorch, outside of the mask, with all accelerations."""

import jax
import numpy as np
import pytest
import torch
from helpers import PROMPTS, psnr, random_inputs, slow
from references import open_ours, open_theirs
from tiny_models import make_tiny_cosxl, make_tiny_pipeline, make_tiny_xl

from diffusers_flax.images import prepare_masks

# of torch.Tensor.__array__, called by diffusers' schedulers
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

KEY = jax.random.key(0)
SIZE = (64, 120)  # height x width


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A directory per kind of edit model."""
    root = tmp_path_factory.mktemp("models")
    return {
        "sd": make_tiny_pipeline(root / "sd"),
        "xl": make_tiny_xl(root / "xl", edits=True),
        "cosxl": make_tiny_cosxl(root / "cosxl"),
    }


def two_parts():
    """A mask of two white parts, one of which reaches the edges, bool (H, W)."""
    inside = np.zeros(SIZE, bool)
    inside[:41, 91:] = True
    inside[50:53, 82:85] = True
    return inside


def ramp_of(inside, feather):
    """The distance of every pixel from the next one outside, by search."""
    outside = np.argwhere(~inside)
    distance = np.zeros(SIZE)
    for pixel in np.argwhere(inside):
        distance[tuple(pixel)] = np.hypot(*(pixel - outside).T).min()
    return np.minimum(distance / (feather + 1), 1).astype(np.float32)


@torch.no_grad()
def masked_edit_with_torch(folder, scheduler, images, latents, mask, steps, **options):
    """PyTorch's edit, whose latents and pixels are mixed with those of the input by mask (H, W)."""
    theirs = open_theirs(folder, scheduler)
    images, noise = torch.tensor(images).permute(0, 3, 1, 2), torch.tensor(latents)
    weights = torch.tensor(mask)[None, None]
    factor = theirs.vae_scale_factor
    latent_weights = torch.nn.functional.max_pool2d(weights, factor)
    latent_weights = torch.nn.functional.max_pool2d(latent_weights, 13, stride=1, padding=6)
    assert 0.2 < latent_weights.mean() < 0.8
    of_input = theirs.vae.encode(2 * images - 1).latent_dist.mode()
    of_input = of_input * theirs.vae.config.scaling_factor

    def blend(i, x):
        outside, timesteps = of_input, theirs.scheduler.timesteps
        if i + 1 < len(timesteps):
            outside = theirs.scheduler.add_noise(of_input, noise, timesteps[i + 1 : i + 2])
        x.copy_(latent_weights * x + (1 - latent_weights) * outside)

    def on_step_end(pipeline, i, t, given):
        blend(i, given["latents"])
        return given

    if "XL" in type(theirs).__name__:
        options |= dict(height=SIZE[0], width=SIZE[1], callback=lambda i, t, x: blend(i, x))
    else:
        options |= dict(callback_on_step_end=on_step_end)
    options |= dict(image=images, latents=noise, num_inference_steps=steps, output_type="np")
    edited = theirs(PROMPTS[: len(images)], **options).images
    weights, images = (x.permute(0, 2, 3, 1).numpy() for x in (weights, images))
    return weights * edited + (1 - weights) * images


@pytest.mark.parametrize(
    ("kind", "scheduler", "feather"),
    [
        ("sd", "ddim", 5),
        *slow(("sd", "pndm", 0), ("sd", "euler", 0), ("sd", "dpmsolver++", 5)),
        *slow(("xl", "euler", 5), ("xl", "ddim", 0), ("cosxl", None, 5)),
    ],
)
def test_masked_edits_equal_pytorch(folders, kind, scheduler, feather):
    pipeline, params = open_ours(folders[kind], scheduler)
    images, latents = random_inputs(2, *SIZE, pipeline.vae_scale_factor)
    prompt_ids, image, mask = pipeline.prepare_inputs(PROMPTS[:2], images, two_parts(), feather)
    scales = dict(guidance_scale=5.0, image_guidance_scale=1.5)
    options = dict(num_inference_steps=10, latents=latents, **scales)
    found = pipeline(prompt_ids, image, params, KEY, mask=mask, **options).images
    given = images, latents, ramp_of(two_parts(), feather), 10
    expected = masked_edit_with_torch(folders[kind], pipeline.scheduler, *given, **scales)
    print(f"{kind} {scheduler}: {psnr(found, expected):.0f} dB")
    assert psnr(found, expected) > 60
    outside = np.rint(np.asarray(found)[:, ~two_parts()] * 255)
    np.testing.assert_array_equal(outside, np.rint(images[:, ~two_parts()] * 255))


def pixels_of(images):
    return np.rint(np.asarray(images) * 255)


ACCELERATIONS = [
    ("sd", "ddim", ("guidance:image_stop=0.3,stop=0.6",)),
    ("sd", "tcd", ("int8",)),
    ("xl", "euler", ("deepcache:interval=2", "guidance:stop=0.5")),
    ("xl", "ddim", ("spectrum",)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "scheduler", "accelerate"), ACCELERATIONS)
def test_masks_with_accelerations_and_few_steps(folders, kind, scheduler, accelerate):
    """All white: bit for bit the edit without a mask. Else the input outside, an edit inside."""
    pipeline, params = open_ours(folders[kind], scheduler, accelerate=accelerate)
    images, _ = random_inputs(2, *SIZE)
    steps = 4 if scheduler in ("lcm", "tcd") else 12
    options = dict(num_inference_steps=steps, guidance_scale=3.0, image_guidance_scale=1.5)
    prompt_ids, image, mask = pipeline.prepare_inputs(PROMPTS[:2], images, two_parts())
    plain = pipeline(prompt_ids, image, params, KEY, **options).images
    white = pipeline(prompt_ids, image, params, KEY, mask=np.ones_like(mask), **options).images
    np.testing.assert_array_equal(white, plain)
    found = pipeline(prompt_ids, image, params, KEY, mask=mask, **options).images
    np.testing.assert_array_equal(
        pixels_of(found[:, ~two_parts()]), pixels_of(images[:, ~two_parts()])
    )
    assert np.abs(found - images)[:, two_parts()].mean() > 0.05
    assert psnr(found[:, two_parts()], plain[:, two_parts()]) < 50  # it sees what is outside


def test_a_feathered_mask_rises_inside_of_its_border():
    soft = prepare_masks(two_parts(), 3)[0, 0]
    np.testing.assert_allclose(soft, ramp_of(two_parts(), 3), rtol=1e-6)
    assert (soft[~two_parts()] == 0).all() and (soft[two_parts()] > 0).all()
    assert (prepare_masks(np.ones(SIZE), 9) == 1).all()
