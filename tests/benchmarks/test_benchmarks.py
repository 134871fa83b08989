"""Every benchmark runs as a command with tiny arguments and appends its row."""

import json
import os
import subprocess
import sys

import pytest
from helpers import ROOT
from tiny_models import make_tiny_pipeline

from benchmarks import data, gpu, quality
from benchmarks.harness import in_turn, summarize
from benchmarks.works import Work

QUICK = "--rounds 1 --seconds 0"
TINY = f"--tiny --resolution 64 {QUICK}"


def run_benchmark(name, flags, output):
    """Run `python -m benchmarks.NAME` on one device; returns the rows that it wrote."""
    output.write_text(json.dumps({"another case": {"command": "python"}}))
    command = [sys.executable, "-m", f"benchmarks.{name}", *flags.split(), "--output", str(output)]
    environment = {name: x for name, x in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(output.read_text())
    assert rows.pop("another case") == {"command": "python"}
    for case, row in rows.items():
        assert row["command"].startswith(f"python -m benchmarks.{name} ")
        assert row["machine"]["cores"] >= 1
        assert f"{case}: {{" in done.stdout
    return rows


TORCH = {"torch eager"}
CASES = [
    (
        "unet",
        f"{TINY} --no_torch_compile",
        {"cpu tiny_64 forward 2": {"ours", *TORCH}, "cpu tiny_64 gradient 2": {"ours", *TORCH}},
    ),
    (
        "images",
        f"edit {TINY} --num_inference_steps 2",
        {"cpu tiny_64 edit, 2 steps 1": {"ours", "torch eager"}},
    ),
    (
        "images",
        f"sdxl {TINY} --num_inference_steps 2",
        {"cpu tiny_64 images, 2 steps 1": {"ours", "torch eager"}},
    ),
    (
        "train",
        TINY,
        {"cpu tiny_64 optimizer step 2": {"ours", "ours, latents cached", "torch eager"}},
    ),
    (
        "gpu",
        f"--size tiny {QUICK} --pytorch eager --rows train_latents agreement",
        {"cpu tiny_64 optimizer step, latents cached 2": {"ours", *TORCH}},
    ),
    (
        "gpu",
        f"--size tiny {QUICK} --pytorch none --rows images image_batch",
        {
            "cpu tiny_64 images, 10 steps 1": {"ours", *gpu.OPTIONS["images"]},
            "cpu tiny_64 images, 10 steps 2": {"ours", *gpu.HALF_VAE},
        },
    ),
]


@pytest.mark.parametrize(("name", "flags", "expected"), CASES)
def test_timed_contenders(name, flags, expected, tmp_path):
    rows = run_benchmark(name, flags, tmp_path / "rows.json")
    agreement = rows.pop("cpu agreement", None)
    assert (agreement is not None) == ("agreement" in flags)
    if agreement:
        assert agreement["psnr"]["float32"] is None and agreement["psnr"]["bfloat16"] > 15
    assert {case: set(row["summary"]) for case, row in rows.items()} == expected
    for row in rows.values():
        assert row["dtype"] == ("bfloat16" if name == "gpu" else "float32")
        for figures in row["summary"].values():
            assert figures["samples_per_second"] > 0 and figures["first_seconds"] > 0
            assert 0 < figures["peak_share"] < 1
        assert row["summary"]["ours"]["ours_times_as_fast"] == 1


def test_host_time_on_several_hosts(tmp_path):
    rows = run_benchmark("train", "--hosts 2 --hosts_steps 25", tmp_path / "rows.json")
    found = {(case.split(",")[0], row["processes"], row["devices"]) for case, row in rows.items()}
    names = ("sd15 host time", "sdxl host time")
    assert found == {(name, n, 2 * n) for name in names for n in (1, 2)}
    for case, row in rows.items():
        assert row["parameter_arrays"] == {"sd15": 686, "sdxl": 1680}[case.split()[0]]
        assert row["host_ms"] > 0 and row["step_ms"] > 0


def test_quality_of_edits(tmp_path):
    """With a random model the edits of plain and guidance differ, and equal flags agree."""
    demo = tmp_path / "demo"
    make_tiny_pipeline(demo / "model")
    command = [sys.executable, "demo/make_dataset.py", "--output_dir", demo, "--num_pairs", "16"]
    command += ["--num_shards", "1", "--crops_per_photograph", "1"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    flags = f"--demo_dir {demo} --cases guidance"
    rows = run_benchmark("quality", flags, tmp_path / "rows.json")
    assert rows.keys() == {"quality plain", "quality guidance"}
    assert rows["quality plain"]["psnr"] is None and rows["quality guidance"]["psnr"] > 0
    assert all(row["edit_error_ratio"] > 0 for row in rows.values())


def test_cases_of_quality_replace_the_plain_flags():
    words = quality.words_of(quality.Config(lora="a lora"), "4 steps, LCM-LoRA")
    flags = dict(zip(words[::2], words[1::2], strict=True))
    assert flags["--num_inference_steps"] == "4" and flags["--guidance_scale"] == "1"
    assert flags["--resolution"] == "64" and flags["--lora"] == "a lora"


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_data(tmp_path):
    flags = f"--shards_dir {tmp_path / 'shards'} --rows_per_shard 32 --rounds 1"
    flags += " --seconds 0.05 --warm_up_pairs 0"
    rows = run_benchmark("data", flags, tmp_path / "rows.json")
    names = set(data.METHODS) - ({"datasets"} if data.datasets is None else set())
    assert rows.keys() == {f"method {name}" for name in names}
    for row in rows.values():
        assert all(x["pairs_per_second"] > 0 for x in row["summary"].values())


def test_flops_are_the_published():
    """0.18 and 0.80 TFLOP a sample of Stable Diffusion 1.5, 6.76 of SDXL."""
    assert Work("forward", 256).count_flops() == pytest.approx(0.18e12, rel=0.15)
    assert Work("forward", 512).count_flops() == pytest.approx(0.80e12, rel=0.15)
    images = Work("sdxl", 1024, num_inference_steps=1).count_flops()
    assert images == pytest.approx(2 * 6.76e12, rel=0.15)


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
    assert list(in_turn(["a", "b", "c"], 2)) == ["a", "b", "c", "c", "b", "a"]
