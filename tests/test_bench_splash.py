"""benchmarks/bench_splash.py: how cycles are counted, its command line."""

import importlib.util
import json
import subprocess
import sys

import pytest
from conftest import ROOT

from benchmarks import bench_splash

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
    assert bench_splash.kernel_cycles(tmp_path / "bundles.txt") == (5 - 2) * 10


SMALL = """if True:
    import sys
    from benchmarks import bench_splash
    bench_splash.CASES = {"small": ((1, 1024, 80), 2, True)}
    variants = bench_splash.VARIANTS
    bench_splash.VARIANTS = {name: variants[name] for name in ("ours", "all three")}
    bench_splash.main(["--output", sys.argv[1]])
"""


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="no compiler for TPUs")
def test_command_line(tmp_path):
    output = tmp_path / "splash.json"
    done = subprocess.run(
        [sys.executable, "-c", SMALL, str(output)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(output.read_text())["figures"]["small"]
    assert figures["ours"]["kernels"].keys() == {"fwd", "dkv"}
    assert figures["all three"]["kernels"].keys() == {"fwd", "dkv", "dq"}
    cycles = {name: sum(row["kernels"].values()) for name, row in figures.items()}
    assert 10_000 < cycles["ours"] < 0.9 * cycles["all three"]
    assert "| small | all three | " in done.stdout
