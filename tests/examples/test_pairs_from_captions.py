"""examples/pairs_from_captions.py from end to end, small, and its CLIP model."""

import io
import json
import subprocess
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from helpers import ROOT
from PIL import Image
from transformers import CLIPModel, CLIPProcessor

from demo.photographs import EDITS
from diffusers_flax.generating.clip import Clip

SMALL = "--num_pairs 120 --clip_steps 60 --num_samples 2 --num_kept 1 --num_inference_steps 4"
SMALL += " --train_steps 4 --crops_per_photograph 1 --thresholds 90"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """OUTPUT_DIR of a small run."""
    folder = tmp_path_factory.mktemp("example") / "made pairs"
    command = [sys.executable, ROOT / "examples" / "pairs_from_captions.py"]
    command += ["--output_dir", folder, *SMALL.split()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder.parent)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def rows_of(folder):
    return pq.read_table(sorted(folder.glob("*.parquet"))).to_pylist()


def test_files_and_numbers(made):
    folder = made
    texts = [json.loads(line) for line in (folder / "captions.jsonl").read_text().splitlines()]
    samples, kept = rows_of(folder / "samples"), rows_of(folder / "made" / "data")
    assert len(samples) == 2 * len(texts)
    least = json.loads((folder / "clip" / "scores.json").read_text())["quantiles"]["90"]
    best = {}
    for row in samples:
        text = min(row["clip_text_original"], row["clip_text_edited"])
        values = text, row["clip_image"], row["clip_direction"]
        if all(value >= least[name] for value, name in zip(values, least, strict=True)):
            best[row["line"]] = max(best.get(row["line"], -1), row["clip_direction"])
    assert {row["line"]: row["clip_direction"] for row in kept} == best
    summary = json.loads((folder / "summary.json").read_text())
    pairs = {name: row["pairs"] for name, row in summary.items()}
    assert pairs == {"made": len(kept), "true": 120}
    for name, row in summary.items():
        assert row["num_edits"] == 3 * len(EDITS)
        assert len(list((folder / name / "edits").glob("*.png"))) == 3 * len(EDITS)
        assert 0 < row["edit_error_ratio"] < 20
    assert summary["made"]["edit_error_ratio"] != summary["true"]["edit_error_ratio"]


def test_clip_is_the_same_in_pytorch_and_has_learned(made):
    folder = made
    rows = rows_of(folder / "true" / "data")[:8]
    images = [Image.open(io.BytesIO(row["original_image"]["bytes"])) for row in rows]
    texts = [row["original_prompt"] for row in rows]
    model = CLIPModel.from_pretrained(folder / "clip").eval()
    processor = CLIPProcessor.from_pretrained(folder / "clip")
    inputs = processor(text=texts, images=images, return_tensors="pt", padding=True)
    with torch.no_grad():
        outputs = model(**inputs)
    clip = Clip(str(folder / "clip"))
    np.testing.assert_allclose(clip.image_features(images), outputs.image_embeds, atol=1e-5)
    np.testing.assert_allclose(clip.text_features(texts), outputs.text_embeds, atol=1e-5)
    scores = json.loads((folder / "clip" / "scores.json").read_text())
    assert scores["num_held_out"] == 12
    assert scores["direction"] > scores["direction_of_other_edits"] + 0.05
