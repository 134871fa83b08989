"""Few-step sampling: LCM, chosen timesteps, eta, distilled UNets; against PyTorch diffusers."""

import dataclasses

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from helpers import psnr, slow
from tiny_models import make_tiny_pipeline

from diffusers_flax.models.unet import FlaxUNet2DConditionModel, guidance_embedding
from diffusers_flax.pipelines.base import FlaxDiffusionPipeline
from diffusers_flax.pipelines.instruct_pix2pix_xl import (
    FlaxStableDiffusionXLInstructPix2PixPipeline,
)
from diffusers_flax.pipelines.sampling import AYS_SDXL, keys_per_image, normal, timestep_options
from diffusers_flax.schedulers.factory import make_scheduler

# of torch.Tensor.__array__, called by diffusers' schedulers
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
TIMESTEPS = (999, 749, 499, 249)
AYS = (999, 850, 736, 645, 545, 455, 343, 233, 124, 24)
AYS_XL = (999, 845, 730, 587, 443, 310, 193, 116, 53, 13)
SHAPE = (4, 8, 8)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """{name: directory} of text-to-image models; "distilled": its UNet embeds the guidance."""
    folder = tmp_path_factory.mktemp("models")
    folders = {}
    for name in ("plain", "distilled"):
        folders[name] = make_tiny_pipeline(folder / name, in_channels=4)
    unet = folders["distilled"] / "unet"
    config = diffusers.UNet2DConditionModel.load_config(unet)
    torch.manual_seed(0)
    distilled = diffusers.UNet2DConditionModel.from_config(config, time_cond_proj_dim=16)
    distilled.save_pretrained(unet)
    return folders


@pytest.mark.slow
def test_distilled_unet_is_pytorchs(models):
    theirs = diffusers.UNet2DConditionModel.from_pretrained(models["distilled"] / "unet")
    ours, params = FlaxUNet2DConditionModel.from_pretrained(models["distilled"] / "unet")
    pipeline = diffusers.LatentConsistencyModelPipeline
    scale = torch.tensor([1.5, 8.0])
    expected = pipeline.get_guidance_scale_embedding(None, scale - 1, embedding_dim=16)
    embedding = guidance_embedding(jnp.asarray(scale.numpy()), 16)
    np.testing.assert_allclose(embedding, expected, atol=1e-3)  # angles of 7000 in float32
    torch.manual_seed(1)
    x, text = torch.randn(2, *SHAPE), torch.randn(2, 7, 24)
    times = torch.tensor([3, 500])
    for cond in (expected, None):
        wanted = theirs(x, times, text, timestep_cond=cond).sample.detach()
        given = None if cond is None else jnp.asarray(cond.numpy())
        arrays = map(jnp.asarray, (x.numpy(), times.numpy().astype(np.int32), text.numpy()))
        found = ours.apply({"params": params}, *arrays, timestep_cond=given).sample
        np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize(
    ("model", "scheduler", "options", "steps"),
    [
        ("plain", "lcm", {}, {"timesteps": TIMESTEPS, "guidance_scale": 1.0}),
        *slow(
            ("plain", "tcd", {}, {"num_inference_steps": 4, "eta": 0.8, "guidance_scale": 2.0}),
            (
                "plain",  # as SDXL-Lightning
                "euler",
                {"timestep_spacing": "trailing"},
                {"num_inference_steps": 4, "guidance_scale": 0.0},
            ),
            ("distilled", "lcm", {}, {"num_inference_steps": 4, "guidance_scale": 8.5}),
            ("plain", "dpmsolver++", {}, {"timesteps": "ays", "guidance_scale": 5.0}),
        ),
    ],
    ids=["lcm", "tcd", "lightning", "distilled", "ays"],
)
def test_images_are_those_of_pytorch(models, monkeypatch, model, scheduler, options, steps):
    pipeline, params = FlaxDiffusionPipeline.from_pretrained(models[model])
    config = dict(pipeline.scheduler.config) | options
    pipeline = dataclasses.replace(pipeline, scheduler=make_scheduler(scheduler, config)[0])
    key = jax.random.key(3)
    noises = [np.array(normal(keys_per_image(key, 1), i, SHAPE)) for i in range(5)]

    theirs = diffusers.StableDiffusionPipeline.from_pretrained(models[model], safety_checker=None)
    theirs.set_progress_bar_config(disable=True)
    cls = getattr(diffusers, type(pipeline.scheduler).__name__.removeprefix("Flax"))
    theirs.scheduler = cls.from_config(config)
    fresh = iter(map(torch.from_numpy, noises[1:]))
    for name in ("lcm", "tcd"):
        module = f"diffusers.schedulers.scheduling_{name}.randn_tensor"
        monkeypatch.setattr(module, lambda *_, **__: next(fresh))
    size = dict(height=32, width=32, latents=torch.from_numpy(noises[0]), output_type="np")
    theirs_steps = steps
    if timesteps := {"ays": AYS}.get(steps.get("timesteps"), steps.get("timesteps")):
        theirs_steps = steps | {"timesteps": list(timesteps)}
    expected = theirs("a red panda", **theirs_steps, **size).images

    prompt_ids = pipeline.prepare_inputs("a red panda")
    found = pipeline(prompt_ids, params, key, height=32, width=32, **steps).images
    assert psnr(found, expected) > 60


@pytest.mark.parametrize(
    ("scheduler", "steps", "message"),
    [
        ("euler", {"eta": 0.3}, "eta=0.3 .* is an option of DDIM and TCD, not of FlaxEuler"),
        ("tcd", {"eta": 1.5}, "eta=1.5 must be from 0 to 1"),
        ("ddim", {"timesteps": (999, 499)}, "cannot be chosen with FlaxDDIMScheduler"),
    ],
)
def test_bad_steps(models, scheduler, steps, message):
    pipeline, params = FlaxDiffusionPipeline.from_pretrained(models["plain"])
    scheduler, _ = make_scheduler(scheduler, pipeline.scheduler.config)
    pipeline = dataclasses.replace(pipeline, scheduler=scheduler)
    prompt_ids = pipeline.prepare_inputs("a red panda")
    with pytest.raises(ValueError, match=message):
        pipeline(prompt_ids, params, jax.random.key(0), height=32, width=32, **steps)


def test_align_your_steps():
    """Ten timesteps of the model's family."""
    for timesteps in ("ays", ("ays",)):
        steps = timestep_options(5, timesteps, None)
        assert steps == {"num_inference_steps": 10, "timesteps": AYS, "eta": None}
    assert timestep_options(5, np.array([999, 499]), None)["timesteps"] == (999, 499)
    assert timestep_options(5, ("ays",), None, AYS_SDXL)["timesteps"] == AYS_XL
    assert FlaxStableDiffusionXLInstructPix2PixPipeline.ays_timesteps == AYS_XL
    with pytest.raises(ValueError, match="must be integers, or ays alone"):
        timestep_options(5, ("ays", 999), None)
