"""Training a rectified flow: against PyTorch's UNet, and by the command line."""

import json
import shutil
from functools import partial

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from helpers import PROMPTS, psnr, random_inputs, random_normal
from shards import write_random_shard
from tiny_models import make_tiny_pipeline
from trainer_runs import SIZE, config_of, run_badly, run_trainer

import flax_train_instruct_pix2pix as trainer
from diffusers_flax import FlaxDiffusionPipeline
from diffusers_flax.training.models import load_models

pytestmark = pytest.mark.usefixtures("lenient_optimizer")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "model"
    make_tiny_pipeline(folder, **SIZE)
    return folder


class TorchFlow(diffusers.FlowMatchEulerDiscreteScheduler):
    """With what PyTorch's editing pipeline asks a scheduler for."""

    init_noise_sigma = 1.0

    def scale_model_input(self, sample, timestep):
        return sample


def test_the_loss_is_the_error_of_the_velocity(model):
    B = 3
    x_0, noise, condition = (random_normal(B, 4, 5, 7, seed=seed) for seed in range(3))
    text = random_normal(B, 7, 24, seed=3)
    t = np.float32([0.02, 0.5, 0.97]).reshape(B, 1, 1, 1)
    unet = diffusers.UNet2DConditionModel.from_pretrained(model / "unet")
    x_in = np.concatenate([(1 - t) * x_0 + t * noise, condition], axis=1)
    with torch.no_grad():
        arguments = map(torch.tensor, (x_in, 1000 * t.ravel(), text))
        velocity = unet(*arguments).sample.numpy()
    expected = np.square(velocity - (noise - x_0)).mean()

    config = config_of(model, "unused", "unused", prediction="flow")
    models, _, frozen, params = load_models(config, jnp.float32)
    loss = partial(trainer.diffusion_loss, unet=models.unet, scheduler=models.scheduler)
    found = jax.jit(loss)(
        params,
        scheduler_state=frozen["scheduler"],
        x_0=x_0,
        condition=condition,
        text={"states": text},
        noise=noise,
        timesteps=1000 * t.ravel(),
    )
    assert float(found) == pytest.approx(expected, rel=1e-5)


def test_a_trained_flow_edits_as_in_pytorch(model, data, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    run_trainer(config_of(model, data, out, prediction="flow", ema="none"), monkeypatch)
    index = json.loads((out / "model_index.json").read_text())
    assert index["scheduler"][1] == "FlowMatchEulerDiscreteScheduler"

    again = config_of(model, data, tmp_path / "again", unet_model_name_or_path=str(out / "unet"))
    assert "is of a flow; add --prediction flow" in run_badly(again, monkeypatch, capsys)

    images, latents = random_inputs(2, 32, 48, 2)
    scales = dict(guidance_scale=3.0, image_guidance_scale=1.5)
    cls = diffusers.StableDiffusionInstructPix2PixPipeline
    theirs = cls.from_pretrained(out, safety_checker=None)
    theirs.scheduler = TorchFlow.from_config(theirs.scheduler.config)
    theirs.set_progress_bar_config(disable=True)
    expected = theirs(
        PROMPTS[:2],
        image=torch.tensor(images).permute(0, 3, 1, 2),
        num_inference_steps=5,
        latents=torch.tensor(latents),
        output_type="np",
        **scales,
    ).images
    pipeline, params = FlaxDiffusionPipeline.from_pretrained(out)
    inputs = pipeline.prepare_inputs(PROMPTS[:2], images)
    found = pipeline(*inputs, params, jax.random.key(0), 5, latents=latents, **scales).images
    assert psnr(found, expected) > 60
    with pytest.raises(ValueError, match="timesteps=ays are of models of noise"):
        pipeline(*inputs, params, jax.random.key(0), timesteps="ays")
    options = dict(timesteps=(999, 500, 0), guidance="apg", **scales)
    assert np.isfinite(pipeline(*inputs, params, jax.random.key(0), **options).images).all()
    # Accelerations use the clean image that the velocity implies.
    faster, params = FlaxDiffusionPipeline.from_pretrained(out, accelerate="spectrum")
    assert np.isfinite(faster(*inputs, params, jax.random.key(0), 20, **scales).images).all()


@pytest.mark.slow
def test_a_flow_resumes_with_buckets_and_latents(model, tmp_path, monkeypatch, capsys):
    (tmp_path / "data").mkdir()
    write_random_shard(tmp_path / "data" / "a.parquet", 48, sizes=((22, 18), (30, 18)))
    options = dict(aspect_ratio_buckets=("16x16", "20x12"), cache_latents=str(tmp_path / "latents"))
    options |= dict(prediction="flow", max_train_steps=4, checkpointing_steps=2, random_crop=False)
    config = config_of(model, tmp_path / "data", out := tmp_path / "out", **options)
    run_trainer(config, monkeypatch)
    unet = out / "unet" / "diffusion_pytorch_model.safetensors"
    whole = unet.read_bytes()
    shutil.rmtree(out / "checkpoints" / "4")
    (out / "model_index.json").unlink()
    run_trainer(config, monkeypatch)
    assert "resuming after step 2" in capsys.readouterr().out and unet.read_bytes() == whole


@pytest.mark.parametrize("flags", [dict(snr_gamma=5.0), dict(lora_rank=4)])
def test_what_does_not_go_with_a_flow_is_refused(flags, model, data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config = config_of(model, data, tmp_path / "out", prediction="flow", **flags)
    assert next(iter(flags)) in run_badly(config, monkeypatch, capsys)
