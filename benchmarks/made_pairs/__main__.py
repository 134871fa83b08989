"""How near the pairs that make_pairs.py draws with the demo's model are to true edits.

    python examples/pairs_from_captions.py --output_dir pairs
    python -m benchmarks.made_pairs --pairs pairs

The demo's edits can be computed (demo/photographs.py), so each made pair has an edit error: L1 of
its edited image to the true edit of its original image, over L1 of the original image to it. The
error of several pairs is the ratio of the means. Cases, --measure:

    p           pairs with p (attention sharing) fixed, all from the same noise and guidance
    fast        pairs made with fewer steps and with accelerations, with p drawn
    thresholds  which pairs of PAIRS/samples CLIP keeps
    models      edits of held-out photographs by models trained on made and true pairs, from
                PAIRS/summary.json, by instruction, beside the errors of the pairs. --others
                DIRECTORY is another run of the example, such as one with --thresholds none.
                --demo demo/output takes the model of true pairs from `make demo`, which trains it
                on the same data with the same flags; the example then needs --only made. Further
                directories of --demo have the same steps with less data (demo/run_demo.py)

Replaces these rows of benchmarks/results/pairs.json; its other rows are of benchmarks.pairs.
p and fast take minutes on two cores for each row.
"""

import io
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow.parquet as pq
from PIL import Image

from benchmarks.rows import ROOT, check_counts, describe_machine, run_benchmark, write_rows
from demo.photographs import EDITS
from diffusers_flax.pairing.scores import Scores, Thresholds

APPLY = {edit.instruction: edit.apply for edit in EDITS}
FAST = {  # flags of make_pairs.py
    "20 steps": [],
    "10 steps": ["--num_inference_steps", 10],
    "5 steps": ["--num_inference_steps", 5],
    "10 steps of dpmsolver++": ["--num_inference_steps", 10, "--scheduler", "dpmsolver++"],
    "guidance in half of the steps": ["--accelerate", "guidance:stop=0.5"],
    "DeepCache, every second step": ["--accelerate", "deepcache:interval=2"],
}


@dataclass(frozen=True)
class Config:
    pairs: Path  # OUTPUT_DIR of examples/pairs_from_captions.py
    measure: tuple[Literal["p", "fast", "thresholds", "models"], ...] = (
        "p",
        "fast",
        "thresholds",
        "models",
    )
    fractions: tuple[float, ...] = (0.0, 0.3, 0.6, 0.9)  # values of p
    ways: tuple[str, ...] = tuple(FAST)  # rows of fast
    samples_per_line: int = 1  # for each row of p and fast
    num_inference_steps: int = 20  # likewise
    num_kept: int = 4  # pairs of a line, of thresholds
    others: tuple[Path, ...] = ()  # OUTPUT_DIR of other runs of the example, for models
    demo: tuple[Path, ...] = ()  # outputs of run_demo.py, for the models of true pairs
    output: str = "benchmarks/results/pairs.json"


def decode_cell(cell):
    """The image of a parquet cell: (H, W, 3) float32 in [0, 1]."""
    return np.asarray(Image.open(io.BytesIO(cell["bytes"])).convert("RGB"), np.float32) / 255


def read_made(folder):
    """The pairs of a directory: dicts of instruction, line, error, change and scores.

    error and change are the L1 distances of the edited and the original image to the true edit.
    """
    rows = []
    for file in sorted(Path(folder).glob("*.parquet")):
        for row in pq.read_table(file).to_pylist():
            original = decode_cell(row["original_image"])
            true = APPLY[row["edit_prompt"]](original)
            rows.append(
                {
                    "instruction": row["edit_prompt"],
                    "line": row["line"],
                    "error": float(np.abs(decode_cell(row["edited_image"]) - true).mean()),
                    "change": float(np.abs(original - true).mean()),
                    "scores": Scores(*(row[name] for name in Scores._fields)),
                }
            )
    return rows


def edit_error(rows):
    """Error of pairs relative to the change."""
    return sum(row["error"] for row in rows) / sum(row["change"] for row in rows)


def summarize_pairs(rows):
    """Numbers of some pairs."""
    by_instruction = defaultdict(list)
    for row in rows:
        by_instruction[row["instruction"]].append(row)
    return {
        "pairs": len(rows),
        "lines": len({row["line"] for row in rows}),
        "edit_error_ratio": edit_error(rows),
        **{
            name: float(np.mean([getattr(row["scores"], name) for row in rows]))
            for name in Scores._fields
        },
        "edit_error_ratio_by_instruction": {
            name: edit_error(some) for name, some in sorted(by_instruction.items())
        },
    }


def best_of_lines(rows, num_kept):
    """Of each line the pairs with the largest direction."""
    lines = defaultdict(list)
    for row in sorted(rows, key=lambda row: -row["scores"].clip_direction):
        if len(kept := lines[row["line"]]) < num_kept:
            kept.append(row)
    return [row for kept in lines.values() for row in kept]


def make_samples(config, *flags):
    """Make pairs of the example's captions; returns (pairs of read_made, seconds per pair)."""
    source = config.pairs.resolve()
    settings = json.loads((source / "samples" / "make_pairs.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        command = ["make_pairs.py", "--captions", source / "captions.jsonl", "--keep_all"]
        command += ["--model", "demo/base_model", "--clip_model", source / "clip"]
        command += ["--output_dir", folder, "--batch_size", 8, "--lines_per_shard", 28]
        command += ["--guidance_scale", *settings["guidance_scale"]]
        command += ["--num_samples", config.samples_per_line]
        command += ["--num_inference_steps", config.num_inference_steps, *flags]
        environment = os.environ | {"JAX_NUM_CPU_DEVICES": "2"}
        command = [sys.executable, *map(str, command)]
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
        report = json.loads(Path(folder, "report.json").read_text())
        return read_made(folder), report["seconds_per_kept_pair"]


def read_thresholds(config):
    """{share of the true pairs in percent that reach them: Thresholds}."""
    quantiles = json.loads((config.pairs / "clip" / "scores.json").read_text())["quantiles"]
    return {share: Thresholds(**values) for share, values in quantiles.items()}


def good_of(rows, thresholds):
    """The pairs that reach Thresholds."""
    return [row for row in rows if not thresholds.missed(row["scores"])]


def study_fractions(config):
    """Yields the row of each fixed p."""
    for p in config.fractions:
        rows, _ = make_samples(config, "--attention_sharing", p, p)
        yield {f"p {p:g}": summarize_pairs(rows)}


def study_fast(config):
    """Yields the row of each way to make pairs in less time."""
    thresholds = read_thresholds(config)["90"]
    for name in config.ways:
        rows, seconds = make_samples(config, *FAST[name])
        good = {"good": len(good_of(rows, thresholds)), "seconds_per_pair": seconds}
        yield {f"fast {name}": summarize_pairs(rows) | good}


def study_thresholds(config):
    """Yields the rows of the samples that thresholds keep."""
    samples = read_made(config.pairs / "samples")
    rows = {"thresholds all": summarize_pairs(samples)}
    rows["thresholds none"] = summarize_pairs(best_of_lines(samples, config.num_kept))
    for share, thresholds in read_thresholds(config).items():
        if good := good_of(samples, thresholds):
            kept = best_of_lines(good, config.num_kept)
            rows[f"thresholds {share}"] = summarize_pairs(kept) | thresholds._asdict()
    best = summarize_pairs(best_of_lines(samples, 1))
    yield rows | {"thresholds none, best": best}


def study_models(config):
    """Yields the rows of the models of the example."""
    summaries = {"made": {}, "true": {}}
    for folder in (*config.others, config.pairs):
        title = "" if folder == config.pairs else f", {folder.name}"
        for name, measured in json.loads((folder / "summary.json").read_text()).items():
            data = summarize_pairs(read_made(folder / "made" / "data")) if name == "made" else {}
            summaries[f"{name}{title}"] = measured | {"made_pairs": data}
    for number, folder in enumerate(config.demo):
        pairs = sum(pq.read_metadata(file).num_rows for file in (folder / "data").glob("*.parquet"))
        measured = json.loads((folder / "summary.json").read_text())
        title = f", {pairs}" if number else ""
        summaries[f"true{title}"] = measured | {"pairs": pairs, "made_pairs": {}}
    columns = ("pairs", "edit_error_ratio", "instruction_accuracy", "num_edits", "by_instruction")
    columns += ("made_pairs",)
    yield {
        f"model {name}": {column: measured[column] for column in columns}
        for name, measured in summaries.items()
        if measured
    }


def run(config):
    """Measure and write the rows."""
    if unknown := [way for way in config.ways if way not in FAST]:
        raise ValueError(f"--ways {unknown[0]} is unknown; known: {', '.join(FAST)}")
    check_counts(config, samples_per_line=1, num_inference_steps=1, num_kept=1)
    machine = describe_machine()
    studies = {"p": study_fractions, "fast": study_fast}
    studies |= {"thresholds": study_thresholds, "models": study_models}
    for name in config.measure:
        for rows in studies[name](config):
            write_rows(rows, machine, config.output)


def main(args=None):
    """Command line."""
    run_benchmark(Config, run, __doc__, args)


if __name__ == "__main__":
    main()
