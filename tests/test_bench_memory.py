"""benchmarks/bench_memory.py by its command line."""

import json
import os
import subprocess
import sys

import jax
import pytest
from conftest import ROOT

from benchmarks import bench_memory


@pytest.mark.slow
def test_command_line(tmp_path):
    """Parameters, moments and average are sharded; micro-batches need less memory."""
    command = [sys.executable, "benchmarks/bench_memory.py", "--output", tmp_path / "memory.json"]
    command += ["--pretrained_model_name_or_path", "demo/base_model", "--resolution", "64"]
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "memory.json").read_text())["figures"]
    assert figures.keys() == bench_memory.VARIANTS.keys()
    plain = figures["plain"]
    assert plain["ema"] == plain["parameters"] == pytest.approx(plain["optimizer"] / 2, rel=0.01)
    assert figures["4 micro-batches"]["temporaries"] < plain["temporaries"]
    assert "| bf16, 4 micro-batches, checkpointing |" in done.stdout


def test_a_batch_that_cannot_be_cut_is_refused():
    with pytest.raises(ValueError, match="batch_per_device=6 cannot be cut into four"):
        bench_memory.run(bench_memory.Config(batch_per_device=6))


def test_flags_that_the_trainer_does_not_take_are_refused():
    with pytest.raises(ValueError, match="--resolution -64 must be at least 1"):
        bench_memory.compile_variants(bench_memory.Config(resolution=-64), jax.devices()[:4])
