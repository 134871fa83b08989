"""Stable Diffusion 1.5's true shapes with random weights: minutes, 12 GB of memory, 7 of disk.

pytest -m slow -s tests/test_full_size.py
"""

import os
import resource
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from conftest import ROOT
from diffusers import UNet2DConditionModel

from modeling_flax_unet import FlaxUNet2DConditionModel

pytestmark = pytest.mark.slow


def test_widening_and_pytorch_parity(tmp_path):
    torch.manual_seed(0)
    UNet2DConditionModel(cross_attention_dim=768).save_pretrained(tmp_path / "narrow")

    environment = {k: v for k, v in os.environ.items() if k != "JAX_DISABLE_MOST_OPTIMIZATIONS"}
    command = [sys.executable, "create_modified_unet.py", "--subfolder", ""]
    command += ["--pretrained_model_name_or_path", tmp_path / "narrow"]
    command += ["--output_dir", tmp_path / "wide"]
    started = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    seconds = time.perf_counter() - started
    assert done.returncode == 0, done.stderr
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    print(f"\n{done.stdout}create_modified_unet.py: {seconds:.0f} s, peak {peak:.1f} GiB")
    assert "largest difference" in done.stdout

    inputs = torch.randn(2, 8, 32, 32), torch.tensor([1, 999]), torch.randn(2, 77, 768)
    with torch.no_grad():
        theirs = UNet2DConditionModel.from_pretrained(tmp_path / "wide").eval()
        expected = theirs(*inputs).sample.numpy()
        narrow = UNet2DConditionModel.from_pretrained(tmp_path / "narrow").eval()
        unwidened = narrow(inputs[0][:, :4], *inputs[1:]).sample.numpy()
    del theirs, narrow
    assert np.abs(expected - unwidened).max() < 1e-5 * np.abs(unwidened).max()

    ours, params = FlaxUNet2DConditionModel.from_pretrained(tmp_path / "wide")
    started = time.perf_counter()
    result = jax.jit(ours.apply)({"params": params}, *(jnp.asarray(x.numpy()) for x in inputs))
    seconds = time.perf_counter() - started
    error = np.abs(result.sample - expected).max() / np.abs(expected).max()
    print(f"ours against PyTorch: {error:.1e} of the largest output, in {seconds:.0f} s")
    assert error < 2e-4
