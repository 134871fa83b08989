"""Fine-tuning from CosXL Edit: against PyTorch's UNet and EDM's loss, and by the command line."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import StableDiffusionXLInstructPix2PixPipeline, UNet2DConditionModel
from helpers import PROMPTS, psnr, random_inputs, random_normal
from references import edit_with_torch_xl
from tiny_models import make_tiny_cosxl
from trainer_runs import config_of, read_metrics, run_trainer

import distill_lcm
import flax_train_instruct_pix2pix as trainer
from diffusers_flax import FlaxDiffusionPipeline
from diffusers_flax.models.unet import FlaxUNet2DConditionModel
from diffusers_flax.training.models import encode_batch, load_models

pytestmark = pytest.mark.usefixtures("lenient_optimizer")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_cosxl(tmp_path_factory.mktemp("tiny") / "cosxl")


@pytest.mark.parametrize("snr_gamma", [None, pytest.param(5.0, marks=pytest.mark.slow)])
def test_the_loss_is_edms(model, snr_gamma):
    """The error of the denoised latents, weighted by 1 / c_out^2, with PyTorch's UNet."""
    B = 3
    text = {
        "states": random_normal(B, 7, 48, seed=3),
        "pooled": random_normal(B, 20, seed=4),
        "time_ids": np.full((B, 6), 64, np.float32),
    }
    x_0, noise, condition = (random_normal(B, 4, 5, 7, seed=seed) for seed in range(3))
    indices = np.array([990, 8, 500])
    lowest, highest = np.arctan([0.002, 120])
    sigma = np.tan(lowest + (indices + 0.5) / 1000 * (highest - lowest)).reshape(B, 1, 1, 1)

    x_t, variance = x_0 + sigma * noise, sigma**2 + 1
    x_in = np.concatenate([x_t / np.sqrt(variance), condition], axis=1).astype(np.float32)
    unet = UNet2DConditionModel.from_pretrained(model / "unet")
    added = {"text_embeds": text["pooled"], "time_ids": text["time_ids"]}
    with torch.no_grad():
        output = unet(
            torch.tensor(x_in),
            torch.tensor(np.log(sigma.ravel()) / 4, dtype=torch.float32),
            torch.tensor(text["states"]),
            added_cond_kwargs={name: torch.tensor(x) for name, x in added.items()},
        ).sample.numpy()
    denoised = x_t / variance - sigma / np.sqrt(variance) * output
    weight = variance / sigma**2
    if snr_gamma:
        snr = 1 / sigma**2
        weight = weight * np.minimum(snr, snr_gamma) / (snr + 1)
    expected = (weight * (denoised - x_0) ** 2).mean()

    config = config_of(model, "unused", "unused")
    models, _, frozen, params = load_models(config, jnp.float32)
    loss = jax.jit(
        partial(
            trainer.diffusion_loss,
            unet=models.unet,
            scheduler=models.scheduler,
            snr_gamma=snr_gamma,
        )
    )(
        params,
        scheduler_state=frozen["scheduler"],
        x_0=x_0,
        condition=condition,
        text=text,
        noise=noise,
        timesteps=jnp.asarray(indices, jnp.int32),
    )
    assert float(loss) == pytest.approx(expected, rel=1e-3 if snr_gamma else 1e-4)


@pytest.mark.slow
def test_the_latents_of_the_image_are_scaled(model):
    models, pipeline, frozen, _ = load_models(config_of(model, "unused", "unused"), jnp.float32)
    assert pipeline.is_cosxl_edit
    latents = random_normal(2, 4, 4, 4)
    text = {"input_ids": np.zeros((2, 2, 77), np.int32), "time_ids": np.zeros((2, 6), np.float32)}
    cached = {"edited_latents": np.repeat(latents, 2, axis=-1), "original_latents": latents}
    np.testing.assert_allclose(
        encode_batch(text | cached, frozen, models)[2], latents * 0.13025, rtol=1e-6
    )
    images = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), np.uint8)
    pixels = {"edited_pixel_values": images, "original_pixel_values": images}
    mean, _, mode, _ = encode_batch(text | pixels, frozen, models)
    np.testing.assert_allclose(mode, mean * 0.13025, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_trained_model_opens_as_cosxl_edit(model, data, tmp_path, monkeypatch):
    """Here and in PyTorch, with the same edits; cached latents give the same losses."""
    losses = {}
    for name, cached in (("plain", ""), ("cached", str(tmp_path / "latents"))):
        options = dict(random_crop=False, cache_latents=cached, ema="none")
        run_trainer(config_of(model, data, tmp_path / name, **options), monkeypatch)
        losses[name] = [row["loss"] for row in read_metrics(tmp_path / name)]
    np.testing.assert_allclose(losses["cached"], losses["plain"], rtol=2e-3)

    out = tmp_path / "plain"
    assert json.loads((out / "model_index.json").read_text())["is_cosxl_edit"] is True
    theirs = StableDiffusionXLInstructPix2PixPipeline.from_pretrained(out)
    assert theirs.is_cosxl_edit and theirs.scheduler.config.sigma_max == 120
    images, latents = random_inputs(1, 32, 48, 8)
    scales = dict(guidance_scale=3.0, image_guidance_scale=1.5)
    expected = edit_with_torch_xl(out, PROMPTS[:1], images, latents, **scales)
    pipeline, params = FlaxDiffusionPipeline.from_pretrained(out)
    inputs = pipeline.prepare_inputs(PROMPTS[:1], images)
    found = pipeline(*inputs, params, jax.random.key(0), 8, latents=latents, **scales).images
    assert psnr(found, expected) > 60
    _, before = FlaxUNet2DConditionModel.from_pretrained(model, subfolder="unet")
    kernel = params["unet"]["conv_in"]["kernel"]
    assert np.abs(kernel - before["conv_in"]["kernel"]).max() > 1e-4


@pytest.mark.slow
def test_it_is_not_distilled(model, data, tmp_path, capsys):
    args = f"--pretrained_model_name_or_path {model} --train_data_dir {data}"
    with pytest.raises(SystemExit) as stop:
        distill_lcm.main([*args.split(), "--output_dir", str(tmp_path / "out")])
    assert stop.value.code == 2 and "LCM distils InstructPix2Pix" in capsys.readouterr().err
