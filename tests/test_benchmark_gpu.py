"""benchmarks/gpu.py: the plan and its limit, random arguments, tiny runs."""

import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import gpu


@pytest.fixture(autouse=True)
def as_run(monkeypatch):
    """The limit counts from the start of the test; optax promotes dtypes, in all threads."""
    monkeypatch.setattr(gpu, "STARTED", time.monotonic())
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    yield
    jax.config.update("jax_numpy_dtype_promotion", "strict")


def test_the_plan_fits_and_a_row_beyond_the_limit_is_left_out(capsys):
    assert gpu.planned_rows(gpu.Config()) == list(gpu.PLANS)
    plans = gpu.PLANS.values()
    total = max(sum(x.torch for x in plans), max(x.ours for x in plans))
    total += sum(x.measure for x in plans)
    assert f"{total:.0f} s so far" in capsys.readouterr().out and total < gpu.Config.limit
    # Without PyTorch the row with the longest compilation of ours decides.
    longest = max(gpu.PLANS, key=lambda name: gpu.PLANS[name].ours)
    chosen = gpu.planned_rows(gpu.Config(pytorch=(), limit=gpu.PLANS[longest].ours))
    assert longest not in chosen and {"forward", "agreement"} <= set(chosen)
    assert f"{longest} is left out: the run would take about" in capsys.readouterr().out


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
    arrays = gpu.random_arrays(shapes)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), arrays) == jax.tree.map(
        lambda x: (x.shape, x.dtype), shapes
    )
    kernel = np.asarray(arrays["conv"]["kernel"], np.float32)
    assert kernel.std() == pytest.approx(0.02, rel=0.1)
    assert not np.any(arrays["conv"]["bias"]) and np.all(np.asarray(arrays["norm"]["scale"]) == 1)
    assert not np.any(arrays["opt_state"]["mu"]) and not np.any(arrays["step"])
    assert len(np.unique(arrays["pixels"])) > 200


def test_all_rows_without_pytorch(tmp_path, capsys):
    output = tmp_path / "gpu.json"
    flags = ["--size", "tiny", "--pytorch", "--rounds", "1", "--seconds", "0"]
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
    images = results["cpu tiny_xl_64 images, 10 steps 1"]["summary"]
    assert images.keys() == {"ours", gpu.ACCELERATED}
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


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rows"], "--rows is empty"),
        (["--rounds", "0"], "--rounds 0 must be at least 1"),
        ([], "no GPU is visible"),
    ],
)
def test_invalid_flags(flags, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        gpu.main([*flags, "--output", str(tmp_path / "gpu.json")])
    assert stop.value.code == 2 and message in capsys.readouterr().err
