"""The benchmarks' harness, benchmarks/train.py and benchmarks/images.py; invalid flags of all."""

import json
import os
import subprocess
import sys

import pytest
from helpers import ROOT

from benchmarks import data, full_size, images, train, unet
from benchmarks.harness import in_new_process, in_turn, summarize
from benchmarks.rows import read_rows, rows_of, write_rows


def test_summary_by_hand():
    """Ratios are taken within each round."""
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


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        (train, []),
        (images, ["edit", "--num_inference_steps", "2"]),
        (images, ["sdxl", "--num_inference_steps", "2"]),
    ],
    ids=["train", "edit", "sdxl"],
)
def test_command_line(script, flags, tmp_path, capsys):
    output = tmp_path / "figures.json"
    flags = [*flags, "--tiny", "--resolution", "64", "--rounds", "1", "--seconds", "0"]
    script.main([*flags, "--output", str(output)])
    (row,) = json.loads(output.read_text()).values()
    assert row["summary"].keys() - {"ours, latents cached"} == {"ours", "torch eager"}
    for figures in row["summary"].values():
        assert 0 < figures["peak_share"] < 1
        assert figures["first_seconds"] > 0 and figures["samples_per_second"] > 0
    assert ", summary, torch eager: samples_per_second " in capsys.readouterr().out


def test_accelerated_edits(tmp_path):
    output = tmp_path / "images.json"
    flags = ["accelerations", "--tiny", "--resolution", "64", "--rounds", "1"]
    images.main([*flags, "--names", "spectrum", "taesd", "--output", str(output)])
    rows = rows_of(json.loads(output.read_text()), "accelerated cpu tiny_64,")
    assert rows.keys() == {"plain", "spectrum", "taesd"}
    assert rows["plain"]["times_as_fast"] == [1.0]
    assert rows["spectrum"]["times_as_fast"][0] > 0


def test_cases_of_quality():
    config = images.QualityFlags(lora="lora", taesd="a taesd", names=("deepcache 2", "tgate"))
    cases, taesd = images.quality_cases(config), "taesd:path=a taesd"
    assert list(cases)[:3] == ["plain", "deepcache 2", "taesd"]  # no tgate for edits
    assert cases["plain"] == ((), ()) and cases["taesd"] == ((taesd,), ())
    assert cases["4 steps"] == ((), ("--num_inference_steps", "4"))
    specs, flags = cases["4 steps, LCM-LoRA, int8, taesd"]
    assert specs == ("int8", taesd) and flags[-2:] == ("--lora", "lora")
    assert cases["1 step, no guidance"][1][-2:] == ("--image_guidance_scale", "1")
    specs = images.quality_specs(config, 1)
    assert specs.keys() == {"deepcache 2", "tgate", "taesd"}


def test_starts(tmp_path):
    output = tmp_path / "start.json"
    full_size.main(["starts", "--tiny", "--output", str(output)])
    rows = rows_of(json.loads(output.read_text()), "start")
    seconds = {name: row["starts"][0]["seconds"] for name, row in rows.items()}
    assert seconds["tiny AOT, executable kept"] < seconds["tiny AOT, first start"]


@pytest.mark.parametrize(
    ("script", "flags", "message"),
    [
        (train, "--resolution 100", "--resolution 100 must be a multiple of 64"),
        (images, "edit --rounds 0", "--rounds 0 must be at least 1"),
        (unet, "--batch_size 0", "--batch_size 0 must be at least 1"),
        (images, "sdxl --output README.md", "README.md cannot be read (Expecting value"),
        (train, "--output demo/base_model/model_index.json", "is not a results file; name"),
        (images, "accelerations --names turbo", "--names turbo is unknown; choose from"),
        (images, "quality --demo_dir tests", "--demo_dir tests is not complete; run `make demo`"),
        (images, "quality --names taesd", "--names taesd needs --taesd, the directory of demo/"),
        (full_size, "starts --rounds 0", "--rounds 0 must be at least 1"),
        (data, "--num_shards 1", "--num_shards 1 must be at least 2"),
    ],
)
def test_flags_that_do_not_work(script, flags, message, capsys):
    with pytest.raises(SystemExit) as ended:
        script.main(flags.split())
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_rows_of_other_cases_stay(tmp_path, monkeypatch):
    output = tmp_path / "figures.json"
    monkeypatch.setattr("sys.argv", [str(ROOT / "benchmarks/unet.py"), "--size", "tiny"])
    write_rows({"a": {"x": 1}, "b": {"x": 2}}, {"cores": 2}, output)
    write_rows({"b": {"x": 3}}, {"cores": 2}, output)
    rows = read_rows(output)
    assert {case: row["x"] for case, row in rows.items()} == {"a": 1, "b": 3}
    assert rows["a"]["command"] == "python -m benchmarks.unet --size tiny"
    assert rows["a"]["machine"] == {"cores": 2}


def test_a_killed_process_is_told():
    with pytest.raises(
        ValueError, match="a process was killed, most likely because memory ran out"
    ):
        in_new_process(os._exit, 9)


def test_importing_pytorchs_pipelines_warns_of_nothing():
    """transformers would say that torchvision is not installed."""
    command = [sys.executable, "-c", "import benchmarks.images"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""
