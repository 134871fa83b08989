"""benchmarks/gpu: random arguments, tiny runs."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import ours

FLAGS = ["--tiny", "--rounds", "1", "--seconds", "0"]


@pytest.fixture(autouse=True)
def as_run():
    """Optax promotes dtypes, in all threads."""
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    yield
    jax.config.update("jax_numpy_dtype_promotion", "strict")


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
    gpu.main([*FLAGS, "--output", str(output)])
    results = json.loads(output.read_text())
    agreement = results.pop("cpu agreement")["psnr"]
    assert agreement["float32"] is None and agreement["bfloat16"] > 15
    names = ("forward 2", "gradient 2", "optimizer step 2", "edit, 10 steps 1")
    names = {f"cpu tiny_64 {name}" for name in names}
    assert results.keys() == names | {"cpu tiny_xl_64 images, 10 steps 1"}
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

    monkeypatch.setattr(gpu, "train_contenders", fail)
    output = tmp_path / "gpu.json"
    with pytest.raises(SystemExit) as stop:
        gpu.main([*FLAGS, "--rows", "train", "forward", "--output", str(output)])
    assert stop.value.code == 1
    rows = json.loads(output.read_text())
    assert rows["cpu tiny_64 forward 2"]["summary"].keys() == {"ours", "torch eager"}
    assert rows["cpu tiny_64 optimizer step 2"]["summary"].keys() == {"ours"}
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
