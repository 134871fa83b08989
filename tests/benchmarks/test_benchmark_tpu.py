"""benchmarks/tpu.py: exchanges by hand, tiny runs, invalid flags."""

import importlib.util
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from tiny_models import make_tiny_pipeline

from benchmarks import tpu
from benchmarks.harness import ACCELERATIONS

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="no compiler for TPUs"
)


def test_exchanges_of_a_traced_program():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("branches", "rows"))

    def on_each(x):  # (4,) float32
        def body(i, x):
            return x + jax.lax.ppermute(x, "rows", [(0, 1)])  # 16 bytes, three times

        x = jax.lax.fori_loop(0, 3, body, x)
        x = jax.lax.all_gather(x, ("branches", "rows"))  # 16 bytes to each of three
        return jax.lax.psum(x, "rows")  # 64 bytes in a ring of two

    shared = jax.shard_map(
        on_each, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
    )
    traced = jax.make_jaxpr(shared)(jnp.zeros(4)).jaxpr
    assert tpu.exchanges_of(traced, {"branches": 2, "rows": 2}) == (5, 3 * 16 + 3 * 16 + 64)


@needs_libtpu
def test_programs(tmp_path, capsys):
    """The second run reads the rows of the first."""
    model = make_tiny_pipeline(tmp_path / "model")
    output = tmp_path / "tpu.json"
    flags = ["programs", "--tpus", "v5e-1", "--programs", "unet", "--resolution", "16"]
    flags += ["--pretrained_model_name_or_path", str(model), "--output", str(output)]
    tpu.main(flags)
    (case,) = json.loads(output.read_text())
    assert case == f"program v5e-1 unet 16 px {model}"
    assert f"{case} ..." in capsys.readouterr().out
    tpu.main(flags)
    assert f"{case} is in " in capsys.readouterr().out


def test_accelerations_are_counted(tmp_path):
    """Whole steps times branches; what a cache, fewer branches and int8 leave of the FLOPs."""
    model, output = make_tiny_pipeline(tmp_path / "model"), tmp_path / "tpu.json"
    flags = ["accelerations", "--pretrained_model_name_or_path", str(model)]
    tpu.main([*flags, "--output", str(output)])
    found = json.loads(output.read_text())
    found = {case.removeprefix("acceleration edit, "): row for case, row in found.items()}
    assert found.keys() == (ACCELERATIONS.keys() - {"tgate", "taesd"}) | {"4 steps"}
    evaluations = {name: row["unet_evaluations"] for name, row in found.items()}
    assert (evaluations["plain"], evaluations["deepcache 2"], evaluations["4 steps"]) == (60, 30, 4)
    plain = found["plain"]
    assert found["spectrum, guidance"]["flops"] < 0.6 * plain["flops"]
    assert found["int8"]["int8_flops"] > 0 == plain["int8_flops"]
    assert plain["seconds"]["v5e"] == pytest.approx(plain["flops"] / 197e12)
    assert found["int8 in all layers"]["seconds"]["v5e"] < plain["seconds"]["v5e"]


@pytest.mark.parametrize("words", ["programs", "convolutions"])
def test_without_the_compiler(words, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stop:
        tpu.main([words, "--output", str(tmp_path / "tpu.json")])
    assert stop.value.code == 2
    assert "error: libtpu, the TPU's compiler, is not installed" in capsys.readouterr().err


def test_an_unknown_slice_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        tpu.main(["programs", "--tpus", "v9-4", "--output", str(tmp_path / "tpu.json")])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: --tpu v9-4 is not known; known are ")


@needs_libtpu
def test_convolutions(tmp_path, monkeypatch):
    """In a batch of 2 the matmuls take fewer cycles than XLA's convolution."""
    output = tmp_path / "tpu.json"
    monkeypatch.setattr(tpu, "CONVOLUTIONS", (((2, 16, 16, 640), 640),))
    tpu.main(["convolutions", "--tpus", "v5e-1", "--output", str(output)])
    (row,) = json.loads(output.read_text()).values()
    assert 10_000 < row["matmuls"]["cycles"] < 0.8 * row["xla"]["cycles"]
