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
def edit_by_parts(folder, scheduler, prompts, images, references, latents, steps, mask=None):
    """The edit by a loop over PyTorch's models and scheduler, at SCALES; (B, H, W, 3) in [0, 1].

    references: None for zeros in the place of their latents; mask: of the latents, (1, 1, h, w).
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
        if mask is not None:
            outside = image * vae.config.scaling_factor
            if i + 1 < steps:
                outside = scheduler.add_noise(outside, noise, scheduler.timesteps[i + 1 : i + 2])
            x = mask * x + (1 - mask) * outside
    decoded = vae.decode(x / vae.config.scaling_factor).sample
    return (decoded / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).numpy()


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of diffusers' _encode_prompt
@pytest.mark.parametrize(
    ("kind", "scheduler"),
    [
        ("sd", "ddim"),
        ("xl", "euler"),
        *slow(("sd", "dpmsolver++"), ("xl", "ddim"), ("cosxl", None)),
    ],
)
def test_edits_equal_a_loop_over_the_parts_of_pytorch(folders, kind, scheduler):
    """Also without a reference, whose latents are zeros then; another one gives another image."""
    pipeline, params = open_ours(folders[kind], scheduler)
    images, others, latents = images_and_references(2, pipeline.vae_scale_factor)
    arrays = pipeline.prepare_inputs(PROMPTS[:2], images, reference=others)
    assert len(arrays) == 3 and arrays[2].shape == arrays[1].shape
    found = []
    for ours, theirs in ((arrays[2], others), (None, None)):
        options = dict(num_inference_steps=8, latents=latents, reference=ours, **SCALES)
        found.append(pipeline(*arrays[:2], params, KEY, **options).images)
        given = PROMPTS[:2], images, theirs, latents, 8
        expected = edit_by_parts(folders[kind], pipeline.scheduler, *given)
        assert psnr(found[-1], expected) > 60
    assert psnr(*found) < 40


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_masked_edits_with_a_reference(folders):
    pipeline, params = open_ours(folders["sd"], "ddim")
    images, others, latents = images_and_references(2, pipeline.vae_scale_factor)
    inside = np.zeros(SIZE, bool)
    inside[:, 40:] = True
    prompt_ids, image, mask, reference = pipeline.prepare_inputs(
        PROMPTS[:2], images, inside, reference=others
    )
    options = dict(num_inference_steps=8, latents=latents, mask=mask, **SCALES)
    found = pipeline(prompt_ids, image, params, KEY, reference=reference, **options).images
    weights = torch.zeros(1, 1, 16, 12)
    weights[..., 4:] = 1  # 6 latents more than the mask's
    given = PROMPTS[:2], images, others, latents, 8, weights
    expected = edit_by_parts(folders["sd"], pipeline.scheduler, *given)
    assert psnr(found, np.where(inside[..., None], expected, images)) > 60


@pytest.mark.slow
@pytest.mark.parametrize("accelerate", ["deepcache:interval=2", "guidance:stop=0.5", "tome"])
def test_accelerations_see_the_reference(folders, accelerate):
    images, others, _ = images_and_references(2, 4)
    edits = []
    for options in ({}, {"accelerate": accelerate}):
        pipeline, params = open_ours(folders["sd"], **options)
        arrays = pipeline.prepare_inputs(PROMPTS[:2], images, reference=others)
        call = dict(num_inference_steps=8, **SCALES)
        edits.append(pipeline(*arrays[:2], params, KEY, reference=arrays[2], **call).images)
        edits.append(pipeline(*arrays[:2], params, KEY, **call).images)
    plain, plain_without, fast, fast_without = edits
    assert psnr(fast, plain) > 1 + psnr(fast, plain_without)
    assert psnr(fast_without, plain_without) > 1 + psnr(fast_without, plain)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [None, "data=2", "data=1 branches=3", "data=1 rows=2"])
def test_devices_share_edits_with_references(folders, parallel):
    pipeline, params = open_ours(folders["sd"])
    images, others, _ = images_and_references(2, 4)
    arrays = pipeline.prepare_inputs(PROMPTS[:2], images, reference=others)
    options = dict(num_inference_steps=4, **SCALES)
    expected = pipeline(*arrays[:2], params, KEY, reference=arrays[2], **options).images
    if parallel is None:
        arrays = [x[:, None] for x in arrays]
        params, options = replicate(params, jax.local_devices()[:2]), options | {"jit": True}
    else:
        layout = parse_layout(parallel.split())
        pipeline, params = open_ours(folders["sd"], layout=layout)
        params = jax.tree.map(np.asarray, params)
        layout.place_params(params)
    found = pipeline(*arrays[:2], params, KEY, reference=arrays[2], **options).images
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
