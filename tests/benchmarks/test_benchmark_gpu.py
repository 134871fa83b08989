"""benchmarks/gpu: the plan and its limit, random arguments, tiny runs."""

import json
import os
import subprocess
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import ours, plan
from benchmarks.gpu.plan import process_seconds


@pytest.fixture(autouse=True)
def as_run(monkeypatch):
    """The limit counts from the start of the test; optax promotes dtypes, in all threads."""
    started = time.monotonic()
    monkeypatch.setattr(plan, "process_seconds", lambda: time.monotonic() - started)
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    yield
    jax.config.update("jax_numpy_dtype_promotion", "strict")


def test_the_process_has_run_since_its_start():
    """As ps says, whose digits are seconds."""
    age = subprocess.run(["ps", "-o", "etimes=", "-p", str(os.getpid())], capture_output=True)
    assert process_seconds() == pytest.approx(int(age.stdout), abs=2)


def test_the_plan_fits_and_a_row_beyond_the_limit_is_left_out(monkeypatch, capsys):
    assert plan.planned_rows(plan.Config()) == list(plan.PLANS)
    monkeypatch.setattr(plan, "START_SECONDS", 10)
    monkeypatch.setattr(
        plan, "PLANS", {"forward": plan.Plan(60, 20, 5), "images": plan.Plan(90, 50, 7)}
    )
    rows = ("forward", "images")
    capsys.readouterr()
    # 10 s, then 20 + 50 s of PyTorch, 90 s of ours beside them, and 5 + 7 s of measurements.
    assert plan.planned_rows(plan.Config(rows=rows, limit=112)) == ["forward", "images"]
    assert "112 s so far" in capsys.readouterr().out
    assert plan.planned_rows(plan.Config(rows=rows, limit=111)) == ["forward"]
    assert "images is left out: the run would take about 112 s" in capsys.readouterr().out


def test_random_arguments():
    """Kernels are small and not all equal, norms are the identity, the optimizer starts at zero."""
    struct = jax.ShapeDtypeStruct
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), (1, 2)))
    shapes = {
        "conv": {
            "kernel": struct((1, 3, 3, 8, 64), jnp.bfloat16),
            "bias": struct((1, 64), jnp.float32),
        },
        "norm": {"scale": struct((1, 8), jnp.float32)},
        "opt_state": {"mu": struct((1, 4), jnp.float32)},
        "step": struct((1,), jnp.int32),
        "pixels": struct((1, 2, 16, 16, 3), jnp.uint8),
        "keys": keys,
    }
    arrays = ours.random_arrays(shapes)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), arrays) == jax.tree.map(
        lambda x: (x.shape, x.dtype), shapes
    )
    kernel = np.asarray(arrays["conv"]["kernel"], np.float32)
    assert kernel.std() == pytest.approx(0.02, rel=0.1)
    assert not np.any(arrays["conv"]["bias"]) and np.all(np.asarray(arrays["norm"]["scale"]) == 1)
    assert not np.any(arrays["opt_state"]["mu"]) and not np.any(arrays["step"])
    assert len(np.unique(arrays["pixels"])) > 200


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch and diffusers
def test_all_rows(tmp_path, capsys):
    output = tmp_path / "gpu.json"
    flags = ["--size", "tiny", "--pytorch", "eager", "--rounds", "1", "--seconds", "0"]
    gpu.main([*flags, "--limit", "1200", "--output", str(output)])
    results = json.loads(output.read_text())
    agreement = results.pop("cpu agreement")["psnr"]
    assert agreement["float32"] is None and agreement["bfloat16"] > 15
    assert {row["work"] for row in results.values()} == {
        "forward",
        "gradient",
        "optimizer step",
        "edit, 10 steps",
        "images, 10 steps",
    }
    for row in results.values():
        assert row["dtype"] == "bfloat16" and 0 < row["summary"]["ours"]["peak_share"] < 1
        assert row["summary"]["ours"]["first_seconds"] > row["compile_seconds"]["ours"] > 0
        assert "torch eager" in row["summary"]
    images = results["cpu tiny_xl_64 images, 10 steps 1"]["summary"]
    assert images.keys() - {"torch eager"} == {"ours", ours.ACCELERATED}
    assert "left out" not in capsys.readouterr().out


def test_a_row_that_fails_does_not_stop_the_others(tmp_path, capsys, monkeypatch):
    def fail(*args):
        raise MemoryError("too small")

    monkeypatch.setattr(gpu, "torch_train", fail)
    output = tmp_path / "gpu.json"
    flags = ["--size", "tiny", "--pytorch", "eager", "--rounds", "1", "--seconds", "0"]
    with pytest.raises(SystemExit) as stop:
        gpu.main([*flags, "--rows", "train", "forward", "--output", str(output)])
    assert stop.value.code == 1
    rows = {row["work"]: row for row in json.loads(output.read_text()).values()}
    assert rows["forward"]["summary"].keys() == {"ours", "torch eager"}
    assert rows["optimizer step"]["summary"].keys() == {"ours"}
    printed = capsys.readouterr()
    assert "train: PyTorch is left out: MemoryError: too small" in printed.out
    assert printed.err.endswith("not all of train is measured; the lines above say why\n")


def test_rows_that_would_exceed_the_limit_are_left_out(tmp_path, capsys, monkeypatch):
    """The time runs out after the first row."""
    write_rows, now = gpu.write_rows, [0.0]

    def write(rows, *args):
        now[0] = 1000.0
        return write_rows(rows, *args)

    monkeypatch.setattr(plan, "process_seconds", lambda: now[0])
    monkeypatch.setattr(gpu, "write_rows", write)
    output = tmp_path / "gpu.json"
    flags = ["--size", "tiny", "--pytorch", "--rounds", "1", "--seconds", "0"]
    gpu.main([*flags, "--rows", "forward", "gradient", "--output", str(output)])
    assert [row["work"] for row in json.loads(output.read_text()).values()] == ["forward"]
    assert "gradient is left out: its measurement would exceed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rows"], "--rows is empty"),
        (["--rounds", "0"], "--rounds 0 must be at least 1"),
        ([], "no GPU is visible"),
        (["--size", "tiny", "--limit", "0"], "--limit 0 is too short for any row"),
    ],
)
def test_invalid_flags(flags, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        gpu.main([*flags, "--output", str(tmp_path / "gpu.json")])
    assert stop.value.code == 2 and message in capsys.readouterr().err
