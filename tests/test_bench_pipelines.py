"""benchmarks/bench_train.py, bench_edit.py, bench_sdxl.py and others, by their command lines."""

import json
import os

import pytest
from conftest import ROOT

from benchmarks import (
    bench_edit,
    bench_memory,
    bench_sdxl,
    bench_start,
    bench_tpu_compiled,
    bench_train,
    ema_study,
    full_size,
    profile_unet,
)
from benchmarks.bench_data import check_replaced
from benchmarks.full_size import in_new_process, report
from benchmarks.side_by_side import in_turn, summarize


def test_summary_by_hand():
    """A ratio is taken within its round."""
    row = {
        "batch_size": 4,
        "flops": 100.0,
        "peak_flops_per_second": 1000.0,
        "seconds": {"ours": [1.0, 2.0, 4.0], "torch eager": [3.0, 4.0, 4.0]},
        "first_seconds": {"ours": [9.0], "torch eager": [7.0]},
    }
    summary = summarize(row)
    assert summary["ours"] == {
        "samples_per_second": 2.0,
        "peak_share": 0.05,
        "first_seconds": 9.0,
        "ours_times_as_fast": 1.0,
        "ours_times_as_fast_range": [1.0, 1.0],
    }
    assert summary["torch eager"]["ours_times_as_fast"] == 2.0
    assert summary["torch eager"]["ours_times_as_fast_range"] == [1.0, 3.0]
    turns = [name for _, name in in_turn(["a", "b", "c"], 2)]
    assert turns == ["a", "b", "c", "c", "b", "a"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "flags"),
    [
        (bench_train, ["--resolution", "64"]),
        (bench_edit, ["--resolution", "64", "--num_inference_steps", "2"]),
        (bench_sdxl, ["--image_size", "64", "--num_inference_steps", "2"]),
    ],
    ids=["train", "edit", "sdxl"],
)
def test_command_line(script, flags, tmp_path, capsys):
    output = tmp_path / "figures.json"
    flags = ["--size", "tiny", "--rounds", "1", "--seconds", "0", *flags]
    script.main([*flags, "--output", str(output)])
    (row,) = json.loads(output.read_text()).values()
    assert row["summary"].keys() - {"ours, latents cached"} == {"ours", "torch eager"}
    for figures in row["summary"].values():
        assert 0 < figures["peak_share"] < 1
        assert figures["first_seconds"] > row["batch_size"] / figures["samples_per_second"]
    assert "| ours times as fast |" in capsys.readouterr().out


@pytest.mark.slow
def test_starts(tmp_path, capsys):
    output = tmp_path / "start.json"
    bench_start.main(["--size", "tiny", "--output", str(output)])
    (row,) = json.loads(output.read_text()).values()
    seconds = {name: starts[0]["seconds"] for name, starts in row["figures"].items()}
    assert seconds["AOT, executable kept"] < seconds["AOT, first start"]
    assert "| AOT, executable kept | tiny |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("script", "flags", "message"),
    [
        (bench_train, "--resolution 100", "resolution=100 must be a multiple of 64"),
        (bench_edit, "--rounds 0", "rounds=0 must be at least 1"),
        (bench_edit, "--batch_sizes 1 0", "batch_sizes=0 must be at least 1"),
        (bench_sdxl, "--batch_sizes", "batch_sizes is empty; give at least one number"),
        (bench_sdxl, "--output README.md", "README.md cannot be read (Expecting value"),
        (bench_train, "--output benchmarks/results/start.json", "holds something else than such"),
        (bench_sdxl, "--image_size 8", "image_size=8 must be a multiple of 64"),
        (ema_study, "--output tests", "output=tests is there and no such result"),
        (bench_start, "--rounds 0", "rounds=0 must be at least 1"),
        (bench_start, "--output benchmarks/results/unet.json", "holds something else than such"),
        (bench_tpu_compiled, "--results_dir README.md", "README.md/tpu_compile_v5e-4_unet_grad.j"),
        (
            profile_unet,
            "--output benchmarks/results/unet.json",
            "unet.json is there and no such result; name another",
        ),
        (profile_unet, "--case tiny", "profile_unet.json is of: python benchmarks/profile_unet.py"),
        (
            full_size,
            "--output README.md",
            "output=README.md is there and no such result; name another",
        ),
        (bench_memory, "--output README.md", "README.md is there and no such"),
    ],
)
def test_flags_that_do_not_work(script, flags, message, capsys):
    with pytest.raises(SystemExit) as ended:
        script.main(flags.split())
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_command_may_replace_its_own_results(tmp_path, monkeypatch):
    output = tmp_path / "figures.json"
    monkeypatch.setattr("sys.argv", [str(ROOT / "benchmarks/x.py"), "--size", "tiny"])
    check_replaced(output)
    report("table", output, figures=1)
    check_replaced(output)
    assert json.loads(output.read_text())["command"] == "python benchmarks/x.py --size tiny"
    monkeypatch.setattr("sys.argv", [str(ROOT / "benchmarks/x.py")])
    with pytest.raises(ValueError, match=r"is of: python benchmarks/x\.py --size tiny; name"):
        check_replaced(output)
    with pytest.raises(ValueError, match="is there and no such result"):
        check_replaced(tmp_path)


def test_a_killed_process_is_told():
    with pytest.raises(ValueError, match="a process was killed, most likely as memory ran out"):
        in_new_process(os._exit, 9)
