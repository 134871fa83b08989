"""Quality of edits with the demo's model, with accelerations, fewer steps and other dtypes.

    make demo
    python -m benchmarks.quality --cases "deepcache 2" bfloat16

edits the demo's held-out images by edit_cli.py with the flags of each case, and measures them as
demo/evaluate.py does: edit_error_ratio and instruction_accuracy; and the PSNR to the edits without
these flags. A case takes half a minute. docs/few-steps.md has the command that makes the LoRA of
the cases with LCM; demo/make_tiny_vae.py makes the TAESD.

Rows go to benchmarks/results/images.json.
"""

import json
import math
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from tqdm import tqdm

from benchmarks.harness import ROOT, describe_machine, run_benchmark, write_row
from demo.evaluate import load_edits, read_held_out_edits, summarize_edits

NO_GUIDANCE = "--guidance_scale 1 --image_guidance_scale 1"
LCM = f"{NO_GUIDANCE} --scheduler lcm --lora LORA"
CASES = {  # flags of edit_cli.py
    "guidance": "--accelerate guidance:image_stop=0.3,stop=0.6",
    "deepcache 2": "--accelerate deepcache:interval=2",
    "deepcache 3": "--accelerate deepcache:interval=3",
    "spectrum": "--accelerate spectrum",
    "fbcache": "--accelerate fbcache",
    "tome": "--accelerate tome",
    "int8": "--accelerate int8",
    "int8 in all layers": "--accelerate int8:mode=dynamic",
    "int8 weights": "--accelerate int8:mode=weight",
    "deepcache 2, guidance": "--accelerate deepcache:interval=2 guidance:image_stop=0.3,stop=0.6",
    "spectrum, guidance": "--accelerate spectrum guidance:image_stop=0.3,stop=0.6",
    "storage int8": "--storage int8",
    "storage float8": "--storage float8",
    "bfloat16": "--dtype bfloat16",
    "bfloat16, storage int8": "--dtype bfloat16 --storage int8",
    "taesd": "--accelerate taesd:path=TAESD",
    "4 steps": "--num_inference_steps 4",
    "4 steps, no guidance": f"--num_inference_steps 4 {NO_GUIDANCE}",
    "4 steps, LCM-LoRA": f"--num_inference_steps 4 {LCM}",
    "4 steps, LCM-LoRA, int8, taesd": f"--num_inference_steps 4 {LCM} "
    "--accelerate int8 taesd:path=TAESD",
    "2 steps": "--num_inference_steps 2",
    "2 steps, no guidance": f"--num_inference_steps 2 {NO_GUIDANCE}",
    "2 steps, LCM-LoRA": f"--num_inference_steps 2 {LCM}",
    "1 step": "--num_inference_steps 1",
    "1 step, no guidance": f"--num_inference_steps 1 {NO_GUIDANCE}",
    "1 step, LCM-LoRA": f"--num_inference_steps 1 {LCM}",
}
FILES = ("LORA", "TAESD")  # in CASES
PLAIN = "--resolution 64 --guidance_scale 2 --image_guidance_scale 1.2 --num_inference_steps 20"


@dataclass(frozen=True)
class Config:
    # default: the cases that need neither --lora nor --taesd
    cases: tuple[Literal[tuple(CASES)], ...] = tuple(
        name for name, flags in CASES.items() if not any(file in flags for file in FILES)
    )
    demo_dir: Path = Path("demo/output")  # of `make demo`
    lora: Path = Path("demo/output/lcm")  # an LCM-LoRA of distill_lcm.py
    taesd: Path = Path("demo/output/taesd")  # a TAESD of demo/make_tiny_vae.py
    output: str = "benchmarks/results/images.json"


def words_of(config, name):
    """The flags of a case after PLAIN's, of which edit_cli.py takes the last."""
    files = {"LORA": config.lora, "TAESD": config.taesd}
    words = f"{PLAIN} {CASES.get(name, '')}".split()
    return [re.sub("LORA|TAESD", lambda match: str(files[match[0]]), word) for word in words]


def edit_held_out(config, words):
    """Edit the demo's held-out images by edit_cli.py; returns load_edits' crops."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        lines = [
            {
                "input": str(edit["original_image"].absolute()),
                "edit": edit["edit_prompt"],
                "output": str(folder / edit["output"].name),
            }
            for edit in read_held_out_edits(config.demo_dir)
        ]
        file = folder / "edits.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        command = [sys.executable, "edit_cli.py", "--model", str(config.demo_dir / "model")]
        command += ["--edits_jsonl", str(file), "--batch_size", "18", *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise ValueError(done.stderr.strip().splitlines()[-1].removeprefix("error: "))
        return load_edits(config.demo_dir, folder)


def results_of(crops):
    """The edits of load_edits' crops, (N, H, W, 3)."""
    return np.stack([crop["results"][i] for crop in crops.values() for i in crop["results"]])


def psnr_db(images, others):
    """PSNR of all pixels of float images in [0, 1], dB; None: they are equal."""
    error = np.mean(np.square(images - others))
    return -10 * math.log10(error) if error else None


def run(config):
    """Edit, measure, write."""
    edits = config.demo_dir / "held_out" / "edits.jsonl"
    if not ((config.demo_dir / "model").is_dir() and edits.is_file()):
        raise ValueError(f"--demo_dir {config.demo_dir} is not complete; run `make demo`")
    machine, plain = describe_machine(), None
    for name in tqdm(("plain", *config.cases), unit="case"):
        words = words_of(config, name)
        crops = edit_held_out(config, words)
        plain = results_of(crops) if plain is None else plain
        measured = summarize_edits(crops)
        row = {
            "flags": " ".join(words),
            "psnr": psnr_db(results_of(crops), plain),
            "edit_error_ratio": measured["edit_error_ratio"],
            "instruction_accuracy": measured["instruction_accuracy"],
        }
        write_row(f"quality {name}", row, machine, config.output)


def main(args=None):
    """Command line."""
    run_benchmark(Config, run, __doc__, args)


if __name__ == "__main__":
    main()
