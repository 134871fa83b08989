"""Models of a run: text against PyTorch, models that do not fit together."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import UNet2DConditionModel
from helpers import edit_json
from tiny_models import make_tiny_pipeline, make_tiny_xl
from trainer_runs import SIZE, config_of, run_badly, run_trainer
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from diffusers_flax.models.clip import FlaxCLIPTextModel, FlaxCLIPTextModelWithProjection
from diffusers_flax.models.vae import FlaxAutoencoderKL
from diffusers_flax.training import models as training_models
from diffusers_flax.training.models import encode_text

pytestmark = pytest.mark.usefixtures("lenient_optimizer")


@pytest.fixture(scope="module")
def unet_of(tmp_path_factory):
    """UNet directories that do not fit the model: name -> directory."""
    folder = tmp_path_factory.mktemp("unets")
    make_tiny_pipeline(folder / "narrow", in_channels=4, **SIZE)
    wider = {"cross_attention_dim": 40}
    config = json.loads((folder / "narrow" / "unet" / "config.json").read_text())
    torch_unet = UNet2DConditionModel.from_config(config | wider | {"in_channels": 8})
    torch_unet.save_pretrained(folder / "other" / "unet")
    return {name: str(folder / name / "unet") for name in ("narrow", "other")}


def without(path):
    return lambda: shutil.rmtree(path)


def damaged(file, content=b""):
    return lambda: Path(file).write_bytes(content)


def changed(file, **values):
    return lambda: edit_json(Path(file), **values)


NOWHERE = "nowhere/model"
BAD_FOLDERS = [
    ({"unet_model_name_or_path": NOWHERE}, None, f"no config.json in {NOWHERE}"),
    ({"unet_model_name_or_path": "model/vae"}, None, "is the config of AutoencoderKL"),
    ({"unet_model_name_or_path": "narrow"}, None, "create_modified_unet.py"),
    ({"unet_model_name_or_path": "other"}, None, "does not fit the text encoders of model; take"),
    ({"pretrained_model_name_or_path": NOWHERE}, None, f"{NOWHERE} has no model_index.json"),
    ({}, without("model/text_encoder"), "no config.json in model/text_encoder"),
    ({}, without("model/tokenizer"), "no tokenizer_config.json in model/tokenizer"),
    ({}, damaged("model/unet/diffusion_pytorch_model.safetensors"), "diffusion_pytorch_model"),
    (
        {},
        changed("model/scheduler/scheduler_config.json", _class_name="UnknownScheduler"),
        "_class_name=UnknownScheduler, which is not supported",
    ),
    ({"resolution": 17}, None, "--resolution 17 is not a multiple of 2; try 16 or 18"),
    ({"train_data_dir": ("model",)}, None, "--train_data_dir model contains no *.parquet file"),
    ({"edit_prompt_column": "caption"}, None, "a.parquet has no column caption"),
    ({"train_batch_size": 20}, None, "fewer than a batch of 20"),
]


@pytest.fixture
def copies(model, data, tmp_path, monkeypatch):
    """Copies of model and data, to spoil, in the working directory."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model, "model")
    shutil.copytree(data, "data")


@pytest.mark.variants
@pytest.mark.usefixtures("copies")
@pytest.mark.parametrize(("flags", "spoil", "message"), BAD_FOLDERS)
def test_bad_folders_are_one_line(unet_of, monkeypatch, capsys, flags, spoil, message):
    if spoil is not None:
        spoil()
    if (name := flags.get("unet_model_name_or_path")) in unet_of:
        flags = flags | {"unet_model_name_or_path": unet_of[name]}
    config = config_of("model", "data", "out", **flags)
    assert message in run_badly(config, monkeypatch, capsys)


def test_sdxl_text_equals_pytorch(tmp_path):
    """Penultimate states of both encoders, side by side, and the projected end of text."""
    folder = make_tiny_xl(tmp_path / "xl")
    ids = np.random.default_rng(0).integers(0, 500, (2, 2, 77)).astype(np.int32)
    encoders, params, expected = [], [], []
    for i, (ours, theirs) in enumerate(
        (
            (FlaxCLIPTextModel, CLIPTextModel),
            (FlaxCLIPTextModelWithProjection, CLIPTextModelWithProjection),
        )
    ):
        subfolder = f"text_encoder{'_2' if i else ''}"
        encoder, its_params = ours.from_pretrained(folder, subfolder=subfolder, _do_init=False)
        encoders.append(encoder)
        params.append(its_params)
        theirs = theirs.from_pretrained(folder, subfolder=subfolder)
        with torch.no_grad():
            expected.append(theirs(torch.from_numpy(ids[:, i]).long(), output_hidden_states=True))
    time_ids = np.ones((2, 6), np.float32)
    text = encode_text(tuple(encoders), tuple(params), ids, time_ids)
    states = torch.cat([output.hidden_states[-2] for output in expected], -1)
    np.testing.assert_allclose(text["states"], states.numpy(), atol=1e-5)
    np.testing.assert_allclose(text["pooled"], expected[1].text_embeds.numpy(), atol=1e-5)
    assert text["time_ids"] is time_ids


@pytest.fixture(scope="module")
def xl(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "xl"
    return make_tiny_xl(folder, edits=True, prediction_type="v_prediction")


def sd_unet(tmp_path):
    return {"unet_model_name_or_path": str(make_tiny_pipeline(tmp_path / "sd") / "unet")}


def sd_vae(tmp_path):
    return {"pretrained_vae_model_name_or_path": str(make_tiny_pipeline(tmp_path / "sd") / "vae")}


@pytest.mark.variants
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (sd_unet, "does not fit the text encoders of "),
        (sd_vae, "is Stable Diffusion's; SDXL needs its own"),
        (lambda tmp_path: {"resolution": 12}, "--resolution 12 is not a multiple of 8; try 8 or"),
    ],
)
def test_models_that_do_not_fit_are_one_line(
    xl, data, tmp_path, monkeypatch, capsys, change, message
):
    config = dataclasses.replace(config_of(xl, data, tmp_path / "out"), **change(tmp_path))
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        run_trainer(config, monkeypatch)
    assert stop.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and message in error
    assert not Path(config.output_dir, "config.json").exists()


def test_the_vae_computes_in_float32(xl):
    config = config_of(xl, "unused", "unused", mixed_precision="bf16")
    models, *_ = training_models.load_models(config, jnp.bfloat16)
    assert models.vae.dtype == jnp.float32 and models.unet.dtype == jnp.bfloat16


def test_another_vae_replaces_the_models_own(xl, tmp_path):
    """One that computes in half precision, as its config says."""
    vae = tmp_path / "vae"
    shutil.copytree(make_tiny_xl(tmp_path / "other", seed=1) / "vae", vae)
    content = json.loads((vae / "config.json").read_text()) | {"force_upcast": False}
    (vae / "config.json").write_text(json.dumps(content))
    options = dict(mixed_precision="bf16", pretrained_vae_model_name_or_path=str(vae))
    config = config_of(xl, "unused", "unused", **options)
    models, pipeline, frozen, _ = training_models.load_models(config, jnp.bfloat16)
    assert models.vae.dtype == jnp.bfloat16 and pipeline.vae is models.vae
    _, expected = FlaxAutoencoderKL.from_pretrained(vae)
    jax.tree.map(np.testing.assert_array_equal, frozen["vae"], expected)
