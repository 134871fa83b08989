"""Parts of a model that the user replaces are not read: schedulers, UNets, VAEs, text encoders."""

import json
import logging
import shutil

import jax.numpy as jnp
import pytest
from tiny_models import make_tiny_pipeline, make_tiny_xl

import compile_for
import flax_train_instruct_pix2pix as trainer
import generate_cli
from diffusers_flax.generating.requests import Request
from diffusers_flax.generating.runner import open_models
from diffusers_flax.messages import warn_once
from diffusers_flax.models.unet import FlaxUNet2DConditionModel
from diffusers_flax.models.vae import FlaxAutoencoderKL
from diffusers_flax.pipelines.instruct_pix2pix import FlaxStableDiffusionInstructPix2PixPipeline
from diffusers_flax.pipelines.stable_diffusion_xl import FlaxStableDiffusionXLPipeline
from diffusers_flax.schedulers.ddim import FlaxDDIMScheduler
from diffusers_flax.schedulers.ddpm import FlaxDDPMScheduler
from diffusers_flax.schedulers.dpmsolver import FlaxDPMSolverMultistepScheduler
from diffusers_flax.training.models import load_models


def change(file, **values):
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def with_unipc(folder):
    """Make a pipeline's scheduler UniPC, which has no Flax class."""
    options = {
        "_class_name": "UniPCMultistepScheduler",
        "solver_type": "bh2",
        "thresholding": False,
    }
    change(folder / "scheduler" / "scheduler_config.json", **options)
    return folder


def test_images_by_the_chosen_scheduler(tmp_path):
    folder = with_unipc(make_tiny_xl(tmp_path / "model"))

    def scheduler_of(**flags):
        config = generate_cli.Config(model=str(folder), **flags)
        return open_models(config, [Request()], None).pipeline.scheduler

    assert type(scheduler_of(scheduler="ddim")) is FlaxDDIMScheduler
    with pytest.raises(ValueError, match=r"names _class_name=UniPC.*choose one with scheduler="):
        scheduler_of()


def test_training_needs_the_noise_schedule_only(tmp_path, caplog):
    """DPM-Solver++ takes UniPC's place in what is saved; other options have no effect."""
    folder = with_unipc(make_tiny_pipeline(tmp_path / "model", prediction_type="v_prediction"))
    flags = dict(
        pretrained_model_name_or_path=str(folder), unet_model_name_or_path=f"{folder}/unet"
    )
    warn_once.cache_clear()
    models, pipeline, frozen, _ = load_models(trainer.Config(**flags), jnp.float32)
    assert type(models.scheduler) is FlaxDDPMScheduler
    assert models.scheduler.config.prediction_type == "v_prediction"
    betas = frozen["scheduler"].common.betas
    assert betas[0] == pytest.approx(0.00085) and betas[-1] == pytest.approx(0.012)
    assert type(pipeline.scheduler) is FlaxDPMSolverMultistepScheduler
    (warning,) = [x for x in caplog.records if x.levelno == logging.WARNING]
    assert "has a UniPCMultistepScheduler, which is not supported: DPM-Solver++" in warning.message

    shutil.move(folder / "vae", tmp_path / "vae")
    train = compile_for.TrainFlags(
        tpu="v5e", **flags, pretrained_vae_model_name_or_path=str(tmp_path / "vae")
    )
    assert compile_for.training_model_shapes(train)[0].scheduler == models.scheduler


def test_a_given_unet_replaces_the_models(tmp_path):
    """As in PyTorch, an edit pipeline is a text-to-image model with a UNet of 8 channels."""
    folder = make_tiny_pipeline(tmp_path / "text to image", in_channels=4)
    other = make_tiny_pipeline(tmp_path / "edits", in_channels=8, seed=1)
    unet, _ = FlaxUNet2DConditionModel.from_pretrained(other, subfolder="unet")
    cls = FlaxStableDiffusionInstructPix2PixPipeline
    with pytest.raises(ValueError, match="in_channels=4, this pipeline needs 8"):
        cls.open(folder)
    assert cls.open(folder, replaced={"unet": unet}).unet is unet
    assert cls.open(folder, replaced={"unet": str(other / "unet")}).unet.in_channels == 8
    shutil.rmtree(folder / "unet")
    shutil.rmtree(folder / "scheduler")
    _, params = cls.from_pretrained(folder, unet=str(other / "unet"), scheduler=FlaxDDIMScheduler())
    assert params["unet"]["conv_in"]["kernel"].shape[2] == 8
    with pytest.raises(ValueError, match=r"lacks unet/config\.json, scheduler/scheduler_config"):
        cls.open(folder)


def test_a_given_vae_and_text_encoder_replace_the_models(tmp_path):
    folder = make_tiny_xl(tmp_path / "model")
    vae, _ = FlaxAutoencoderKL.from_pretrained(folder, subfolder="vae")
    whole = FlaxStableDiffusionXLPipeline.open(folder)
    change(folder / "vae" / "config.json", scaling_factor=0.18215)
    with pytest.raises(ValueError, match=r"the VAE of .*model has scaling_factor 0.18215"):
        FlaxStableDiffusionXLPipeline.open(folder)
    replaced = {"vae": vae, "text_encoder": whole.text_encoder, "tokenizer": whole.tokenizer}
    for name in replaced:
        shutil.rmtree(folder / name)
    pipeline = FlaxStableDiffusionXLPipeline.open(folder, replaced=replaced)
    assert all(getattr(pipeline, name) is part for name, part in replaced.items())
    replaced["vae"] = vae.clone(scaling_factor=0.18215)
    with pytest.raises(ValueError, match=r"has scaling_factor 0\.18215"):
        FlaxStableDiffusionXLPipeline.open(folder, replaced=replaced)
