"""A run resumes from a checkpoint of an earlier version, and on another platform.

run_of_2026_11.tar.xz has a tiny model, eight pairs, the checkpoint after 2 of 4 steps, and the UNet
at the end of the run, as commit cf0953e wrote them on one CPU device.
"""

import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import flax_train_instruct_pix2pix as trainer
from diffusers_flax.training import sharding

# Adam's epsilon is large: the sign of a gradient that is zero but for rounding has no effect.
FLAGS = [
    *("--pretrained_model_name_or_path", "model", "--unet_model_name_or_path", "model/unet"),
    *("--train_data_dir", "data", "--output_dir", "out", "--resolution", "16", "--seed", "3"),
    *("--train_batch_size", "4", "--max_train_steps", "4", "--checkpointing_steps", "2"),
    *("--learning_rate", "0.03", "--adam_epsilon", "0.001", "--ema", "full", "--ema_decay", "0.5"),
    "--compilation_cache_dir=",
]

pytestmark = pytest.mark.usefixtures("lenient_optimizer")


def use_order_of_gpus(monkeypatch):
    """Keep kernels in the order of GPUs, here on a CPU."""
    real = sharding.kernel_order
    monkeypatch.setattr(sharding, "kernel_order", lambda x, platform=None: real(x, "gpu"))


@pytest.fixture
def old_run(tmp_path, monkeypatch):
    """The working directory of the run."""
    with tarfile.open(Path(__file__).with_name("run_of_2026_11.tar.xz")) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)


def trained():
    """The UNet's weights at the end of a run."""
    return load_file("out/unet/diffusion_pytorch_model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_an_old_checkpoint_is_the_start(old_run, monkeypatch, capsys, platform):
    if platform == "gpu":
        use_order_of_gpus(monkeypatch)
    trainer.main(FLAGS)
    assert "resuming after step 2" in capsys.readouterr().out
    found, expected = trained(), load_file("expected/unet.safetensors")
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_allclose(found[name], x, rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_a_run_moves_between_platforms(old_run, monkeypatch):
    """From a CPU to a GPU and back: the weights of a run that stays."""
    shutil.copytree("out", "stays")
    trainer.main([*FLAGS, "--output_dir", "stays", "--max_train_steps", "6"])
    expected = load_file("stays/unet/diffusion_pytorch_model.safetensors")
    with monkeypatch.context() as on_gpu:
        use_order_of_gpus(on_gpu)
        trainer.main(FLAGS)
    trainer.main([*FLAGS, "--max_train_steps", "6"])
    for name, x in trained().items():
        np.testing.assert_allclose(x, expected[name], rtol=0, atol=1e-5, err_msg=name)
