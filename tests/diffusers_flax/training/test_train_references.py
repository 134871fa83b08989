"""Training with reference images: PyTorch, cached latents, resume, LoRA, validation, refusals."""

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file
from shards import write_random_shard, write_references
from tiny_models import make_tiny_pipeline
from torch_training import Parallel, compare_runs, draws_by_hand, make_batch, train_with_torch
from trainer_runs import SIZE, config_of, read_metrics, run_badly, run_trainer

import cache_latents
import distill_lcm
import flax_train_instruct_pix2pix as trainer

pytestmark = pytest.mark.usefixtures("lenient_optimizer")
SHORT = dict(max_train_steps=3, ema="none", lr_scheduler="constant", lr_warmup_steps=0)
SHORT |= dict(random_crop=False)
WEIGHTS = "unet/diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_pipeline(tmp_path_factory.mktemp("tiny") / "model", in_channels=12, **SIZE)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_references(tmp_path_factory.mktemp("data") / "pairs", 16)


def test_four_devices_are_pytorch_on_one(model, data):
    """Every case of dropout, with pairs that have no reference."""
    batches = [make_batch(seed, references=True) for seed in range(4)]
    draws = [draws_by_hand(3, step) for step in range(4)]
    parallel = Parallel(config_of(model, data, "unused"))
    steps = list(parallel.run(batches, 3))
    compare_runs(parallel, steps, *train_with_torch(model, batches, draws))


def test_runs_stop_and_go_on_with_images_and_latents(model, data, tmp_path, monkeypatch):
    """Bit for bit; a validation image has a reference; latents change the loss by rounding."""
    Image.new("RGB", (20, 24), "red").save(tmp_path / "red.png")
    image = (str(tmp_path / "red.png"),)
    more = dict(validation_image=image, validation_prompt=("x",), validation_reference=image)
    config = config_of(model, data, tmp_path / "whole", **SHORT, **more)
    run_trainer(config, monkeypatch)
    assert (tmp_path / "whole/validation/step-000003.png").exists()
    for num_steps in (2, 3):
        out = dict(output_dir=str(tmp_path / "out"), max_train_steps=num_steps)
        run_trainer(replace(config, **out), monkeypatch)
    trained, expected = (load_file(tmp_path / name / WEIGHTS) for name in ("out", "whole"))
    for name, array in expected.items():
        np.testing.assert_array_equal(trained[name], array, err_msg=name)
    assert "refuses a UNet for two images" in (tmp_path / "out/README.md").read_text()
    latents = str(tmp_path / "latents")
    flags = ["--pretrained_model_name_or_path", str(model), "--train_data_dir", str(data)]
    flags += ["--output_dir", latents, "--resolution", "16"]
    cache_latents.main([*flags, "--max_train_samples=1"])
    cached = replace(config, train_data_dir=(latents,), output_dir=str(tmp_path / "cached"))
    with pytest.raises(ValueError, match="has latents without reference images, which this UNet"):
        trainer.open_dataset(cached)
    cache_latents.main([*flags, "--cache_references", "--overwrite_output_dir"])
    run_trainer(cached, monkeypatch)
    rows = [read_metrics(tmp_path / name) for name in ("whole", "cached")]
    first, second = (trainer.open_dataset(run).state_dict() for run in (config, cached))
    assert first["columns"] == second["columns"]
    np.testing.assert_allclose(*([row["loss"] for row in x] for x in rows), rtol=2e-3)


@pytest.mark.slow
def test_mixture_lora_and_distillation(model, data, tmp_path, monkeypatch):
    """With a set that has no references, whose latents are cached beside the others."""
    write_random_shard(tmp_path / "b.parquet", 16)
    options = dict(lora_rank=2, merge_lora=True, train_data_dir=(str(data), str(tmp_path)))
    options |= dict(cache_latents=str(tmp_path / "latents"), train_data_weights=(1.0, 1.0))
    run_trainer(config_of(model, "", tmp_path / "out", **SHORT, **options), monkeypatch)
    before, after = (load_file(path / WEIGHTS) for path in (model, tmp_path / "out"))
    assert (before["conv_in.weight"][:, 8:] != after["conv_in.weight"][:, 8:]).any()
    flags = ["--pretrained_model_name_or_path", tmp_path / "out", "--train_data_dir", data]
    flags += ["--output_dir", tmp_path / "lcm", "--resolution=16", "--train_batch_size=8"]
    distill_lcm.main([*map(str, flags), "--max_train_steps=2", "--lora_rank=2"])
    assert (tmp_path / "lcm/pytorch_lora_weights.safetensors").exists()


@pytest.mark.parametrize(
    ("channels", "options", "message"),
    [
        (12, {"conditioning_dropout_prob": 0.3}, "must be at most 1/4 with a reference image"),
        (12, {"reference_image_column": "hat"}, "has no column hat; it has "),
        (8, {"reference_image_column": "hat"}, "needs a UNet that takes two images"),
        (8, {"validation_reference": ("a",)}, "0 --validation_image and 1 --validation_reference"),
    ],
)
def test_one_line_errors(data, tmp_path, monkeypatch, capsys, channels, options, message):
    monkeypatch.chdir(tmp_path)
    model = make_tiny_pipeline("model", in_channels=channels, **SIZE)
    assert message in run_badly(config_of(model, data, "out", **options), monkeypatch, capsys)
