"""benchmarks/tpu.py: counting of cycles, tiny runs, invalid flags."""

import importlib.util
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import ROOT
from jax.sharding import Mesh, PartitionSpec
from tiny_models import make_tiny_pipeline

from benchmarks import tpu, tpu_kernels
from benchmarks.harness import ACCELERATIONS

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="no compiler for TPUs"
)

BUNDLES = """= control target key start
LB: loop body
= control target key end
     0   :  { %s1 = smov 0 }
   0x1   :  { %s2 = smov 1 /* materialized constant */ }
   0x2 LB: > { %s3 = sphi %s1 }
   0x3   : > { %s4 = sadd.s32 1, %s3 ;;  %p5 = scmp.ge.s32 %s4, 12 /* loop exit test */ }
   0x4 PF: > { %6 = sbr.rel (!%p5) target = $region9 }
   0x5   :  { %7 = vsyncpa [#allocation6], 1 }
"""


def test_a_kernels_loop_counts_as_often_as_it_is_run(tmp_path):
    (tmp_path / "bundles.txt").write_text(BUNDLES)
    assert tpu_kernels.kernel_cycles(tmp_path / "bundles.txt") == (5 - 2) * 10


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


SMALL = """if True:
    import sys
    from benchmarks import tpu_kernels as tpu
    tpu.CASES = {"small": ((1, 1024, 80), 2, True)}
    variants = tpu.VARIANTS
    tpu.VARIANTS = {name: variants[name] for name in ("ours", "all three")}
    tpu.main(["attention", "--output", sys.argv[1]])
"""


@needs_libtpu
def test_attention(tmp_path):
    output = tmp_path / "splash.json"
    done = subprocess.run(
        [sys.executable, "-c", SMALL, str(output)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(output.read_text())
    figures = {case.removeprefix("attention small, "): row for case, row in results.items()}
    assert figures["ours"]["kernels"].keys() == {"fwd", "dkv"}
    assert figures["all three"]["kernels"].keys() == {"fwd", "dkv", "dq"}
    cycles = {name: sum(row["kernels"].values()) for name, row in figures.items()}
    assert 10_000 < cycles["ours"] < 0.9 * cycles["all three"]
    assert "| small, all three | " in done.stdout


@needs_libtpu
def test_programs(tmp_path, capsys):
    """The second run reads the rows of the first."""
    model = make_tiny_pipeline(tmp_path / "model")
    output = tmp_path / "tpu.json"
    flags = ["programs", "--tpus", "v5e-1", "--jobs", "unet", "--resolution", "16"]
    flags += ["--pretrained_model_name_or_path", str(model), "--output", str(output)]
    tpu.main(flags)
    (case,) = json.loads(output.read_text())
    assert case == f"program v5e-1 unet 16 px {model}"
    assert f"{case} ..." in capsys.readouterr().out
    tpu.main(flags)
    out = capsys.readouterr().out
    assert "16 px ..." not in out and "| v5e-1 unet 16 px" in out


def test_accelerations_are_counted(tmp_path, capsys):
    """Whole steps times branches; what a cache, fewer branches and int8 leave of the FLOPs."""
    model, output = make_tiny_pipeline(tmp_path / "model"), tmp_path / "tpu.json"
    flags = ["accelerations", "--edits_only", "--pretrained_model_name_or_path", str(model)]
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
    assert "| edit, spectrum, guidance | " in capsys.readouterr().out


@pytest.mark.parametrize("words", ["programs", "options"])
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
def test_convolution(tmp_path, monkeypatch, capsys):
    """In a batch of 2 the matmuls take fewer cycles than XLA's convolution."""
    output = tmp_path / "tpu.json"
    monkeypatch.setattr(tpu_kernels, "CONVOLUTIONS", (((2, 16, 16, 640), 640),))
    tpu_kernels.main(["convolution", "--tpus", "v5e-1", "--output", str(output)])
    (row,) = json.loads(output.read_text()).values()
    assert 10_000 < row["matmuls"]["cycles"] < 0.8 * row["xla"]["cycles"]
    assert "| v5e-1, 2x16x16x640 to 640 | " in capsys.readouterr().out


@needs_libtpu
def test_options(tmp_path, monkeypatch, capsys):
    """A block and a whole program, each compiled once."""
    module, _, _ = tpu.BLOCKS["SDXL, residual block at 32x32"]
    block = module.clone(out_channels=32), ((2, 8, 8, 32), (2, 64)), False
    monkeypatch.setitem(tpu.BLOCKS, "SDXL, residual block at 32x32", block)
    model = make_tiny_pipeline(tmp_path / "model")
    words = ("--pretrained_model_name_or_path", str(model), "--resolution", "16")
    monkeypatch.setitem(tpu.JOBS, "unet", ("unet", *words))
    flags = ["options", "--tpus", "v5e-1", "--blocks", "SDXL, residual block at 32x32"]
    flags += ["--jobs", "unet", "--options", "default", "VMEM"]
    flags += ["--output", str(tmp_path / "tpu.json")]
    tpu.main(flags)
    results = json.loads((tmp_path / "tpu.json").read_text())
    assert len(results) == 4 and all(row["cycles"] > 0 for row in results.values())
    assert results["options v5e, unet, VMEM"]["options"] == {"xla_tpu_scoped_vmem_limit_kib": 65536}
    monkeypatch.setattr(tpu, "compile_program", None)
    monkeypatch.setattr(tpu, "compile_block", None)
    tpu.main(flags)
    assert "| v5e, unet, default | " in capsys.readouterr().out
