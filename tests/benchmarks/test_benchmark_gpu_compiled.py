"""benchmarks.gpu_compiled: profiles by kind of kernel, batches that fit, compiled rows."""

import gzip
import json

import pytest
from gpu_programs import needs_gpu_compiler
from tiny_models import make_tiny_pipeline

from benchmarks import gpu_compiled
from benchmarks.rows import run_benchmark
from benchmarks.tables.gpu import largest_batch

PROGRAM = """HloModule jit_step

%fused (p: f32[1024,1024]) -> f32[1024] {
  %p = f32[1024,1024]{1,0} parameter(0)
  ROOT %r = f32[1024]{0} reduce(%p, %p), dimensions={1}, to_apply=%add
}

ENTRY %main (x: f32[1024,1024]) -> f32[1024] {
  %x = f32[1024,1024]{1,0} parameter(0)
  ROOT %fusion.7 = f32[1024]{0} fusion(%x), kind=kCustom, calls=%fused
}
"""


def run(*args):
    """The command line."""
    run_benchmark(gpu_compiled.SUBCOMMANDS, gpu_compiled.run, "", [*map(str, args)])


def test_shares_of_a_profile(tmp_path):
    """A kernel that only the program names, one that its own name tells, and a memset."""
    kernels, program = tmp_path / "kernels.tsv.gz", tmp_path / "hlo.txt"
    lines = ["4.0\t2.0\tfusion_7\tcommand_buffer_1\tjit_step", "6.0\t1.0\tnvjet_sm90_x\t\t"]
    lines.append("1.0\t5\tMemset 3\t\t")
    kernels.write_bytes(gzip.compress("\n".join(lines).encode()))
    program.write_text(PROGRAM)
    output = tmp_path / "rows.json"
    run(
        *("shares", "--kernels", kernels, "--program", program, "--work", "a step"),
        *("--milliseconds", 0.02, "--output", output),
    )
    row = json.loads(output.read_text())["shares a step"]
    assert row["seconds"] == pytest.approx(2e-5)
    assert row["kernel_seconds"] == pytest.approx(11e-6)
    kinds = row["kinds"]
    assert kinds.keys() == {"reduction", "matmul", "copy"}
    assert kinds["reduction"]["seconds"] == pytest.approx(4e-6)
    assert (kinds["reduction"]["launches"], kinds["copy"]["launches"]) == (2, 5)
    assert kinds["reduction"]["least_seconds"] == pytest.approx(4 * (1024**2 + 1024) / 4.8e12)


def test_a_missing_profile_is_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        run(
            *("shares", "--kernels", tmp_path / "none.tsv", "--program", tmp_path / "x"),
            *("--work", "x", "--milliseconds", 1, "--output", tmp_path / "rows.json"),
        )
    assert stopped.value.code == 2
    assert capsys.readouterr().err == f"error: {tmp_path}/none.tsv does not exist\n"


@pytest.mark.parametrize(
    ("usable", "batch"),
    [
        (9, "no"),
        (10, "1"),
        (13.9, "4"),
        (14, "5"),
        (19, "6"),
        (30, "8"),
        (54.9, "~10"),
        (1000, "over 36"),
    ],
)
def test_largest_batches(usable, batch):
    """Compiled: 1, 5 and 9 with 10, 14 and 34 bytes; beyond 9 ten bytes each."""
    assert largest_batch({1: 10, 5: 14, 9: 34}, usable, more=10) == batch
    alone = "no" if usable < 10 else largest_batch({1: 10, 2: 11}, min(usable, 10.5), more=1)
    assert alone == ("no" if usable < 10 else "1")


@needs_gpu_compiler
def test_programs(tmp_path):
    output, model = tmp_path / "rows.json", make_tiny_pipeline(tmp_path / "model")
    flags = ["--pretrained_model_name_or_path", model, "--resolution", 16, "--output", output]
    run("programs", "--cases", "forward", *flags)
    row = json.loads(output.read_text())["h100 forward, 8"]
    assert row["memory_total"] == sum(row["memory"].values()) > 0
    assert row["estimated_seconds"] > sum(x["least_seconds"] for x in row["kernels"].values())
    run("programs", "--cases", "forward", *flags)  # nothing is compiled again
    assert json.loads(output.read_text()) == {"h100 forward, 8": row}
