"""examples/training_loop.py as a user runs it: one and several devices, a model that edits."""

import os
import subprocess
import sys

import numpy as np
import pytest
from helpers import ROOT, photo
from safetensors.numpy import load_file
from shards import write_random_shard

import edit_cli

BASE = ROOT / "demo" / "base_model"
UNET = "unet/diffusion_pytorch_model.safetensors"


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_loop_trains_a_model_that_edits(tmp_path, devices, capsys):
    """A few steps, from a folder of its own; the average is not the base model."""
    text = (ROOT / "examples" / "training_loop.py").read_text()
    for name, value in (("NUM_STEPS, LEARNING_RATE", 3), ("EMA_START", 2)):
        before = f"{name}, MAX_GRAD_NORM = 500, " if "," in name else f"{name} = 400"
        assert before in text
        text = text.replace(before, before.replace("500", str(value)).replace("400", str(value)))
    (tmp_path / "mine.py").write_text(text)
    (tmp_path / "data").mkdir()
    write_random_shard(tmp_path / "data" / "a.parquet", 20, seed=0)
    flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    done = subprocess.run(
        [sys.executable, "mine.py", str(BASE), "data", "trained"],
        cwd=tmp_path,
        env=os.environ | flags | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "saved trained" in done.stdout
    trained = load_file(tmp_path / "trained" / UNET)
    base = load_file(BASE / UNET)
    assert trained["conv_in.weight"].shape[1] == 2 * base["conv_in.weight"].shape[1]
    for name, x in base.items():
        assert np.isfinite(trained[name]).all(), name
        assert name == "conv_in.weight" or not np.array_equal(trained[name], x), name
    image, out = tmp_path / "in.png", tmp_path / "out.png"
    photo(64, 64).save(image)
    flags = ["--model", tmp_path / "trained", "--input", image, "--edit", "make it red"]
    flags += ["--output", out, "--num_inference_steps", 2]
    edit_cli.main([*map(str, flags)])
    assert out.exists()


@pytest.mark.slow
def test_it_says_what_to_type():
    command = [sys.executable, "examples/training_loop.py", "--help"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "python examples/training_loop.py demo/base_model" in done.stderr
