"""Training with reference images: PyTorch, cached latents, resume, LoRA, validation, refusals."""

from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import PROMPTS, random_normal, slow
from PIL import Image
from safetensors.numpy import load_file
from shards import open_pairs, random_png, write_random_shard
from tiny_models import make_tiny_pipeline, make_tiny_xl
from torch_training import (
    Parallel,
    compare_losses,
    compare_runs,
    draws_by_hand,
    make_batch,
    train_with_torch,
)
from trainer_runs import SIZE, config_of, read_metrics, run_badly, run_trainer

import cache_latents
import distill_lcm
from diffusers_flax.models.vae import FlaxAutoencoderKL
from diffusers_flax.training.models import encode_images

pytestmark = pytest.mark.usefixtures("lenient_optimizer")
SHORT = dict(max_train_steps=3, ema="none", lr_scheduler="constant", lr_warmup_steps=0)
WEIGHTS = "unet/diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_pipeline(tmp_path_factory.mktemp("tiny") / "model", in_channels=12, **SIZE)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Sixteen pairs; every third has no reference."""
    rows = [
        {
            "original_image": random_png([n, 0]),
            "edit_prompt": PROMPTS[n % 3],
            "edited_image": random_png([n, 1]),
            "reference_image": random_png([n, 2], (30, 20)) if n % 3 else None,
        }
        for n in range(16)
    ]
    folder = tmp_path_factory.mktemp("data") / "pairs"
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist(rows), folder / "a.parquet")
    return folder


@pytest.fixture(scope="module")
def latents(model, data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("latents")
    flags = ["--pretrained_model_name_or_path", model, "--train_data_dir", data]
    flags += ["--output_dir", folder, "--resolution", "16", "--cache_references"]
    cache_latents.main(list(map(str, flags)))
    return folder


@pytest.mark.parametrize("family", ["sd", *slow("xl")])
def test_loss_and_gradients_are_pytorchs(model, tmp_path, family):
    text, condition = {"states": random_normal(3, 7, 24, seed=3)}, random_normal(3, 8, 8, 6, seed=2)
    if family == "xl":
        model = make_tiny_xl(tmp_path / "xl", edits=2)
        ids = np.resize(np.float32([40, 56, 3, 0, 40, 40]), (3, 6))
        pooled = random_normal(3, 20, seed=4)
        text = {"states": random_normal(3, 7, 44, seed=3), "pooled": pooled, "time_ids": ids}
    compare_losses(model, "epsilon", (text, condition), (text, condition))


def test_four_devices_are_pytorch_on_one(model, data):
    """Every case of dropout, with pairs that have no reference."""
    batches = [make_batch(seed, references=True) for seed in range(4)]
    draws = [draws_by_hand(3, step) for step in range(4)]
    parallel = Parallel(config_of(model, data, "unused"))
    steps = list(parallel.run(batches, 3))
    compare_runs(parallel, steps, *train_with_torch(model, batches, draws))


def test_latents_are_the_encoded_references(model, data, latents):
    options = dict(
        batch_size=8, resolution=16, random_crop=False, reference_image="reference_image"
    )
    vae, params = FlaxAutoencoderKL.from_pretrained(model, subfolder="vae")
    images, cached = (open_pairs(str(folder), **options) for folder in (data, latents))
    for theirs, ours in zip(images, cached, strict=True):
        np.testing.assert_array_equal(ours["has_reference"], theirs["has_reference"])
        expected = np.asarray(encode_images(vae, params, theirs["reference_image"]).mean)
        expected = np.where(theirs["has_reference"][:, None, None, None], expected, 0)
        close = partial(np.testing.assert_allclose, rtol=2e-3, atol=1e-3)
        close(ours["reference_image"], expected)
    assert images.state_dict()["columns"] == cached.state_dict()["columns"]


def test_runs_stop_and_go_on_with_images_and_latents(model, data, latents, tmp_path, monkeypatch):
    """Bit for bit; a validation image has a reference; latents change the loss by rounding."""
    Image.new("RGB", (20, 24), "red").save(tmp_path / "red.png")
    image = (str(tmp_path / "red.png"),)
    more = dict(validation_image=image, validation_prompt=("x",), validation_reference=image)
    config = config_of(model, data, tmp_path / "whole", random_crop=False, **SHORT, **more)
    run_trainer(config, monkeypatch)
    assert (tmp_path / "whole/validation/step-000003.png").exists()
    out = str(tmp_path / "out")
    for num_steps in (2, 3):
        run_trainer(replace(config, output_dir=out, max_train_steps=num_steps), monkeypatch)
    trained, expected = (load_file(tmp_path / name / WEIGHTS) for name in ("out", "whole"))
    for name, array in expected.items():
        np.testing.assert_array_equal(trained[name], array, err_msg=name)
    assert "refuses a UNet for two images" in (tmp_path / "out/README.md").read_text()
    cached = replace(config, train_data_dir=(str(latents),), output_dir=str(tmp_path / "latents"))
    run_trainer(cached, monkeypatch)
    losses = [
        [row["loss"] for row in read_metrics(tmp_path / name)] for name in ("whole", "latents")
    ]
    np.testing.assert_allclose(*losses, rtol=2e-3)


@pytest.mark.slow
def test_mixture_lora_and_distillation(model, data, tmp_path, monkeypatch):
    """With a set that has no references, whose latents are cached beside the others."""
    (tmp_path / "plain").mkdir()
    write_random_shard(tmp_path / "plain/b.parquet", 16)
    sets = (str(data), str(tmp_path / "plain"))
    options = dict(lora_rank=2, merge_lora=True, random_crop=False, train_data_dir=sets)
    options |= dict(cache_latents=str(tmp_path / "latents"), train_data_weights=(1.0, 1.0))
    run_trainer(config_of(model, "", tmp_path / "out", **SHORT, **options), monkeypatch)
    before, after = (
        load_file(path / WEIGHTS)["conv_in.weight"] for path in (model, tmp_path / "out")
    )
    assert (before[:, 8:] != after[:, 8:]).any()
    flags = ["--pretrained_model_name_or_path", tmp_path / "out", "--train_data_dir", data]
    flags += ["--output_dir", tmp_path / "lcm", "--resolution=16", "--train_batch_size=8"]
    distill_lcm.main([*map(str, flags), "--max_train_steps=2", "--lora_rank=2"])
    assert (tmp_path / "lcm/pytorch_lora_weights.safetensors").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"conditioning_dropout_prob": 0.3}, "must be at most 1/4 with a reference image"),
        ({"data": "plain"}, "no column reference_image; it has "),
        ({"reference_image_column": "hat"}, "has no column hat; it has "),
        ({"model": 8, "reference_image_column": "hat"}, "needs a UNet that takes two images"),
        ({"model": 8, "validation_reference": ("a",)}, "0 --validation_image and 1 --validation_r"),
    ],
)
def test_what_does_not_go_together_is_one_line(
    model, data, tmp_path, monkeypatch, capsys, options, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain").mkdir()
    write_random_shard(tmp_path / "plain/b.parquet", 16)
    if "model" in options:
        model = make_tiny_pipeline(tmp_path / "narrow", in_channels=options.pop("model"), **SIZE)
    data = options.pop("data", data)
    assert message in run_badly(config_of(model, data, "out", **options), monkeypatch, capsys)
