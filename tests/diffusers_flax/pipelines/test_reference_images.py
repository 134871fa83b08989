"""Edits with a reference image, by a UNet with 12 input channels, against PyTorch's parts."""

import jax
import numpy as np
import pytest
import torch
from diffusers import UNet2DConditionModel
from flax.jax_utils import replicate
from helpers import PROMPTS, psnr, random_inputs, slow
from references import open_ours, open_theirs
from tiny_models import make_tiny_cosxl, make_tiny_pipeline, make_tiny_xl

from diffusers_flax.devices.layout import parse_layout

# of torch.Tensor.__array__, called by diffusers' schedulers
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

KEY = jax.random.key(0)
SIZE = (64, 48)  # height x width
INSIDE = np.arange(SIZE[1]) >= np.full((SIZE[0], 1), 40)  # white part of a mask
SCALES = {"guidance_scale": 5.0, "image_guidance_scale": 1.5}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A directory per kind of model."""
    root = tmp_path_factory.mktemp("models")
    return {
        "sd": make_tiny_pipeline(root / "sd", in_channels=12),
        "xl": make_tiny_xl(root / "xl", edits=2),
        "cosxl": make_tiny_cosxl(root / "cosxl", edits=2),
    }


def images_and_references(batch, factor):
    """Images and other images, (B, H, W, 3) in [0, 1], and latents."""
    images, latents = random_inputs(batch, *SIZE, factor)
    return images, images[::-1, ::-1, :, ::-1].copy(), latents


@torch.no_grad()
def edit_by_parts(folder, scheduler, prompts, images, references, latents, steps, masked):
    """The edit by a loop over PyTorch's models and scheduler, at SCALES; (B, H, W, 3) in [0, 1].

    references: None for zeros in the place of their latents; masked: whether only INSIDE changes,
    with a factor of 4.
    """
    theirs, B = open_theirs(folder, scheduler), len(prompts)
    vae, scheduler, x = theirs.vae, theirs.scheduler, torch.tensor(latents)
    noise, added = x, None

    def encode(images):
        pixels = torch.tensor(images).permute(0, 3, 1, 2) * 2 - 1
        return vae.encode(pixels).latent_dist.mode()

    image = encode(images)
    reference = torch.zeros_like(image) if references is None else encode(references)
    seen = torch.cat([image, reference], dim=1)
    if getattr(theirs, "is_cosxl_edit", False):
        seen = seen * vae.config.scaling_factor
    seen = torch.cat([seen, seen, torch.zeros_like(seen)])
    if "XL" in type(theirs).__name__:
        text, null, pooled, null_pooled = theirs.encode_prompt(prompts)
        states = torch.cat([text, null, null])
        ids = torch.tensor([[*SIZE, 0, 0, *SIZE]] * 3 * B)
        added = {"text_embeds": torch.cat([pooled, null_pooled, null_pooled]), "time_ids": ids}
    else:
        states = theirs._encode_prompt(prompts, "cpu", 1, True)

    scheduler.set_timesteps(steps)
    x = x * scheduler.init_noise_sigma
    for i, t in enumerate(scheduler.timesteps):
        sample = torch.cat([scheduler.scale_model_input(x, t)] * 3)
        sample = torch.cat([sample, seen], dim=1)
        predicted = theirs.unet(sample, t, states, added_cond_kwargs=added).sample
        text, image_only, null = predicted.chunk(3)
        guided = null + SCALES["guidance_scale"] * (text - image_only)
        guided += SCALES["image_guidance_scale"] * (image_only - null)
        x = scheduler.step(guided, t, x).prev_sample
        if masked:
            inside = torch.arange(x.shape[3]) >= 10 - 6  # with 6 latents around
            outside = image * vae.config.scaling_factor
            if i + 1 < steps:
                outside = scheduler.add_noise(outside, noise, scheduler.timesteps[i + 1 : i + 2])
            x = torch.where(inside, x, outside)
    decoded = vae.decode(x / vae.config.scaling_factor).sample
    edited = (decoded / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).numpy()
    return np.where(INSIDE[..., None], edited, images) if masked else edited


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of diffusers' _encode_prompt
@pytest.mark.parametrize(
    ("kind", "scheduler", "masked"),
    [
        *(("sd", "ddim", False), ("xl", "euler", False)),
        *slow(("sd", "dpmsolver++", False), ("xl", "ddim", False), ("cosxl", None, False)),
        *slow(("sd", "ddim", True)),
    ],
)
def test_edits_equal_a_loop_over_the_parts_of_pytorch(folders, kind, scheduler, masked):
    """Also without a reference, whose latents are zeros then; another one gives another image."""
    pipeline, params = open_ours(folders[kind], scheduler)
    images, others, latents = images_and_references(2, pipeline.vae_scale_factor)
    mask = INSIDE if masked else None
    arrays = pipeline.prepare_inputs(PROMPTS[:2], images, mask, reference=others)
    prompt_ids, image, *mask, reference = arrays
    options = dict(num_inference_steps=8, latents=latents, mask=mask[0] if mask else None)
    found = []
    for ours, theirs in ((reference, others), (None, None)):
        edit = pipeline(prompt_ids, image, params, KEY, reference=ours, **options, **SCALES)
        found.append(edit.images)
        given = PROMPTS[:2], images, theirs, latents, 8, masked
        assert psnr(found[-1], edit_by_parts(folders[kind], pipeline.scheduler, *given)) > 60
    assert psnr(*found) < 50


@pytest.mark.slow
@pytest.mark.parametrize("accelerate", ["deepcache:interval=2", "guidance:stop=0.5", "tome"])
def test_accelerations_see_the_reference(folders, accelerate):
    images, others, _ = images_and_references(2, 4)
    edits = []
    for accelerated, sees in ((), True), (accelerate, True), ((), False):
        pipeline, params = open_ours(folders["sd"], accelerate=accelerated)
        *arrays, reference = pipeline.prepare_inputs(PROMPTS[:2], images, reference=others)
        options = dict(num_inference_steps=10, reference=reference if sees else None, **SCALES)
        edits.append(pipeline(*arrays, params, KEY, **options).images)
    assert psnr(edits[0], edits[1]) > 3 + psnr(edits[2], edits[1])


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [None, "data=2", "data=1,branches=3", "data=1,rows=2"])
def test_devices_share_edits_with_references(folders, parallel):
    pipeline, params = open_ours(folders["sd"])
    images, others, _ = images_and_references(2, 4)
    *arrays, reference = pipeline.prepare_inputs(PROMPTS[:2], images, reference=others)
    options = dict(num_inference_steps=4, reference=reference, **SCALES)
    expected = pipeline(*arrays, params, KEY, **options).images
    if parallel:
        layout = parse_layout(parallel)
        pipeline, params = open_ours(folders["sd"], layout=layout)
        layout.place_params(params)
    else:
        params, arrays = replicate(params, jax.local_devices()[:2]), [x[:, None] for x in arrays]
        options |= {"jit": True, "reference": reference[:, None]}
    found = pipeline(*arrays, params, KEY, **options).images
    np.testing.assert_allclose(found.reshape(expected.shape), expected, atol=2e-4)


def test_a_reference_is_for_models_that_see_it(folders, tmp_path):
    """Others refuse it. PyTorch opens the UNet, bit by bit, but its pipeline cannot edit."""
    narrow, _ = open_ours(make_tiny_pipeline(tmp_path / "narrow"))
    images, others, _ = images_and_references(1, 4)
    arrays = narrow.prepare_inputs("red", images, reference=others)
    with pytest.raises(ValueError, match="needs a UNet with 12 input channels, this model's has 8"):
        narrow(*arrays[:2], {}, KEY, reference=arrays[2])
    pipeline, params = open_ours(folders["sd"])
    pipeline.save_pretrained(tmp_path / "saved", params)
    unet, saved = (
        UNet2DConditionModel.from_pretrained(folder, subfolder="unet").state_dict()
        for folder in (folders["sd"], tmp_path / "saved")
    )
    assert unet["conv_in.weight"].shape[1] == 12 and unet.keys() == saved.keys()
    assert all(torch.equal(saved[name], x) for name, x in unet.items())
    theirs = open_theirs(tmp_path / "saved", pipeline.scheduler)
    with pytest.raises(ValueError, match="Incorrect configuration settings"):
        theirs("red", image=torch.tensor(images).permute(0, 3, 1, 2))
