"""benchmarks/families.py: summaries, the validation images, the command line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT
from PIL import Image

from benchmarks import families
from demo.photographs import EDITS
from diffusers_flax.training.validation import validation_grid


def test_summary_of_families():
    def row(l1, loss):
        edit = dict.fromkeys(families.METRICS, l1)
        edit |= {"guidance_scale": 2.0, "image_guidance_scale": 1.2}
        fixed = dict.fromkeys(("parameters", "max_train_steps", "train_batch_size", "num_pairs"))
        curve = [[step, loss] for step in range(10, 101, 10)]
        figures = {"train_seconds": 1.0, "final_loss": families.final_loss(curve)}
        return {"family": "sd", "learning_rate": 1e-3, **fixed, **figures, "edits": [edit]}

    summary = families.summarize_family([row(1.0, 0.5), row(3.0, 0.7)])
    assert summary["num_seeds"] == 2
    assert summary["final_loss"]["mean"] == pytest.approx(0.6)
    (edit,) = summary["edits"]
    assert (edit["guidance_scale"], edit["image_guidance_scale"]) == (2.0, 1.2)
    assert edit["l1"] == pytest.approx({"mean": 2, "min": 1, "max": 3, "std": 2**0.5})


def test_validation_edits_are_read_from_the_grid(tmp_path):
    """The right half of each row of the trainer's grid."""
    colors = [(200, 0, 0), (0, 200, 0), (0, 0, 200)]
    pairs = [(Image.new("RGB", (64, 64)), Image.new("RGB", (64, 64), color)) for color in colors]
    prompts = [EDITS[i].instruction for i in families.VALIDATION.values()]
    (tmp_path / "validation").mkdir()
    validation_grid(pairs, prompts).save(tmp_path / "validation" / "step-000125.png")
    (read,) = families.validation_edits(tmp_path).items()
    assert read[0] == 125
    for image, color in zip(read[1], colors, strict=True):
        assert image.size == (64, 64)
        assert image.getcolors() == [(64 * 64, color)]


def test_families_are_trained_and_compared(tmp_path):
    """The small command of the docstring."""
    out, environment = tmp_path / "families", dict(os.environ)
    del environment["XLA_FLAGS"]  # the script chooses the number of devices
    command = [sys.executable, "-m", "benchmarks.families", "--max_train_steps", "20"]
    command += ["--seeds", "0", "--guidance_scale", "2", "--work_dir", out]
    command += ["--output", f"{out}.json", "--image_dir", out]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(Path(f"{out}.json").read_text())
    baselines = ("copied input", "VAE round trip of the input", "VAE round trip of the truth")
    names = [f"{family} {what}" for what in ("seed 0", "summary") for family in ("sd", "sdxl")]
    assert rows.keys() >= {*names, *(f"baseline {name}" for name in baselines)}
    for family in ("sd", "sdxl"):
        row, summary = (rows[f"{family} {what}"] for what in ("seed 0", "summary"))
        assert [step for step, _ in row["loss_curve"]] == [1, 10, 20]
        assert row["final_loss"] == row["loss_curve"][-1][1] == summary["final_loss"]["mean"]
        assert row["train_seconds"] > 0 and row["num_pairs"] == 72
        (edit,) = row["edits"]
        assert edit["guidance_scale"] == 2 and all(edit[x] > 0 for x in families.METRICS)
        assert summary["edits"][0]["l1"]["mean"] == edit["l1"]
    with Image.open(out / "families_loss.png") as plot:
        assert plot.getcolors(2**20) is None or len(plot.getcolors(2**20)) > 2
    with Image.open(out / "families_validation.jpg") as grid:  # input, 10 validations, truth
        cell = families.CELL + families.GAP
        assert grid.size == (120 + 12 * cell, families.LABEL + 6 * cell)
    with Image.open(out / "families.gif") as animation:
        assert animation.n_frames == 10


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max_train_steps", "7"], "--max_train_steps 7 must be at least 8"),
        (["--seeds", "1", "1"], "--seeds 1 1 must be one or more different numbers"),
        (["--output", "FILE/families.json"], "FILE/families.json cannot be written"),
    ],
)
def test_a_comparison_is_refused_before_it_trains(tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    Path("FILE").touch()
    with pytest.raises(SystemExit) as stop:
        families.main(["--work_dir", "work", "--output", "out.json", *flags])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error
    assert [file.name for file in tmp_path.iterdir()] == ["FILE"]
