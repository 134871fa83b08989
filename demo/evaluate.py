"""Compare the demo's results with the true edits, draw them, summarize.

    python demo/evaluate.py --output_dir demo/output          # after edit_cli.py; seconds

Reads OUTPUT_DIR/held_out/edits.jsonl and the images it names. Writes OUTPUT_DIR/summary.json and
OUTPUT_DIR/edits.png: a row per held-out crop; the original image, then result and true edit of each
instruction; the summary has copies of the original images beside the results.
"""

import json
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from demo.photographs import EDITS
from diffusers_flax.command_line import run_main
from diffusers_flax.data.images import load_image
from diffusers_flax.data.lists import read_list
from diffusers_flax.images import to_pil

CELL = 128  # pixels of an image in the grid
GAP = 6
HEADER = 64


@dataclass(frozen=True)
class Config:
    output_dir: str = "demo/output"
    started: float | None = None  # when the demo began, seconds since 1970; None leaves it out


def read_pixels(path):
    """An image file: (H, W, 3) float32 in [0, 1]."""
    return np.asarray(load_image(path), np.float32) / 255


def distance(a, b):
    """Mean absolute difference of two images in [0, 1]."""
    return float(np.abs(a - b).mean())


def read_held_out_edits(output_dir):
    """The rows of the list of held-out edits; see diffusers_flax/data/lists.py."""
    file = Path(output_dir) / "held_out" / "edits.jsonl"
    required = ("original_image", "edit_prompt", "output")
    return read_list(str(file), file, required, ("edited_image", "edited_prompt"))


def load_edits(output_dir, results_dir=None):
    """Images of each held-out crop.

    Args:
        output_dir: of the demo.
        results_dir: of the results; None: where edit_cli.py wrote them.

    Returns:
        {crop: {"original": image, "results": {number of the edit: image}, "edited": likewise, the
        true edits}}; images as from read_pixels.
    """
    instructions = [edit.instruction for edit in EDITS]
    crops = {}
    for edit in read_held_out_edits(output_dir):
        source, i = edit["original_image"], instructions.index(edit["edit_prompt"])
        crop = crops.setdefault(
            source.stem, {"original": read_pixels(source), "results": {}, "edited": {}}
        )
        result = edit["output"]
        crop["results"][i] = read_pixels(Path(results_dir or result.parent, result.name))
        crop["edited"][i] = read_pixels(source.with_name(f"{source.stem}_truth_{i}.png"))
    return crops


def summarize_edits(crops):
    """The numbers of summary.json.

    edit_error_ratio: mean of L1(result, edited) / L1(original, edited); 1 for a copy of the
        original image.
    instruction_accuracy: share of results that are nearer to the true edit of their instruction
        than to the original image and to the true edits of other instructions.
    """
    ratios, hits = {i: [] for i in range(len(EDITS))}, {i: [] for i in range(len(EDITS))}
    for crop in crops.values():
        for i, result in crop["results"].items():
            errors = {j: distance(result, edited) for j, edited in crop["edited"].items()}
            errors["original"] = distance(result, crop["original"])
            ratios[i].append(errors[i] / distance(crop["original"], crop["edited"][i]))
            hits[i].append(min(errors, key=errors.get) == i)
    return {
        "edit_error_ratio": float(np.mean([r for rs in ratios.values() for r in rs])),
        "instruction_accuracy": float(np.mean([h for hs in hits.values() for h in hs])),
        "num_edits": sum(len(rs) for rs in ratios.values()),
        "by_instruction": {
            edit.instruction: {
                "edit_error_ratio": float(np.mean(ratios[i])),
                "instruction_accuracy": float(np.mean(hits[i])),
            }
            for i, edit in enumerate(EDITS)
        },
    }


def draw_edits(crops):
    """The grid: original image, then result and true edit per instruction."""
    pair = 2 * CELL + GAP
    width = CELL + len(EDITS) * (pair + 3 * GAP) + 2 * GAP
    grid = Image.new("RGB", (width, HEADER + len(crops) * (CELL + GAP) + GAP), "white")
    pen, font = ImageDraw.Draw(grid), ImageFont.load_default(15)

    def heading(x, text, columns):
        wrapped = "\n".join(textwrap.wrap(text, columns))
        pen.multiline_text((x, GAP), wrapped, fill="black", font=font)

    heading(GAP, "input", 16)
    for i, edit in enumerate(EDITS):
        left = CELL + 4 * GAP + i * (pair + 3 * GAP)
        heading(left, edit.instruction, 36)
        pen.text((left, HEADER - 22), "result", fill="black", font=font)
        pen.text((left + CELL + GAP, HEADER - 22), "truth", fill="gray", font=font)

    def paste(image, x, y):
        cell = to_pil(image)[0]
        grid.paste(cell.resize((CELL, CELL), Image.Resampling.BICUBIC), (x, y))

    for row, crop in enumerate(crops.values()):
        y = HEADER + row * (CELL + GAP)
        paste(crop["original"], GAP, y)
        for i in crop["results"]:
            left = CELL + 4 * GAP + i * (pair + 3 * GAP)
            paste(crop["results"][i], left, y)
            paste(crop["edited"][i], left + CELL + GAP, y)
    return grid


def run(config):
    """Measure, draw, print."""
    output_dir = Path(config.output_dir)
    crops = load_edits(output_dir)
    draw_edits(crops).save(output_dir / "edits.png")
    summary = summarize_edits(crops)
    copies = {
        name: crop | {"results": dict.fromkeys(crop["results"], crop["original"])}
        for name, crop in crops.items()
    }
    summary["others"] = {"copied input": summarize_edits(copies)["edit_error_ratio"]}
    if config.started is not None:
        summary["seconds"] = round(time.time() - config.started, 1)
    (output_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(json.dumps(summary, indent=2))
    print(f"look at {output_dir / 'edits.png'}")


def main(args=None):
    """Command line."""
    run_main(Config, __doc__, run, args, interrupted="run the same command again")


if __name__ == "__main__":
    main()
