"""Compare the demo's results with the true edits, draw them, summarize.

    python demo/evaluate.py --output_dir demo/output          # after edit_cli.py; seconds

Reads OUTPUT_DIR/held_out/edits.jsonl and the images it names. Writes OUTPUT_DIR/summary.json and
OUTPUT_DIR/edits.png: a row per held-out crop; the original image, then result and true edit of each
instruction.
"""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from demo.photographs import ALL_EDITS
from diffusers_flax.command_line import run_main
from diffusers_flax.data.images import load_image
from diffusers_flax.data.lists import read_list
from diffusers_flax.generating.captions import captioned, tile_grid
from diffusers_flax.images import to_pil

CELL = 128  # pixels of an image in the grid


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
    return read_list(str(file), file, ("original_image", "edit_prompt", "output"))


def load_edits(output_dir, results_dir=None):
    """Images of each held-out crop.

    Args:
        output_dir: of the demo.
        results_dir: of the results; None: where edit_cli.py wrote them.

    Returns:
        {crop: {"original": image, "results": {number of the edit: image}, "edited": likewise, the
        true edits}}; images as from read_pixels.
    """
    instructions = [edit.instruction for edit in ALL_EDITS]
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
    figures = {}
    for crop in crops.values():
        for i, result in crop["results"].items():
            errors = {j: distance(result, edited) for j, edited in crop["edited"].items()}
            errors["original"] = distance(result, crop["original"])
            ratio = errors[i] / distance(crop["original"], crop["edited"][i])
            is_nearest = min(errors, key=errors.get) == i
            figures.setdefault(ALL_EDITS[i].instruction, []).append((ratio, is_nearest))

    def means(figures):
        ratio, accuracy = map(float, np.mean(figures, axis=0))
        return {"edit_error_ratio": ratio, "instruction_accuracy": accuracy}

    everything = [figure for some in figures.values() for figure in some]
    return means(everything) | {
        "num_edits": len(everything),
        "by_instruction": {instruction: means(some) for instruction, some in figures.items()},
    }


def draw_edits(crops):
    """The grid: original image, then result and true edit per instruction."""
    tiles = []
    for crop in crops.values():
        images = [crop["original"]]
        for i, result in crop["results"].items():
            images += [result, crop["edited"][i]]
        images = to_pil(np.stack(images))
        images = [image.resize((CELL, CELL), Image.Resampling.BICUBIC) for image in images]
        tiles.append(captioned(images[:1], "input"))
        for i, *both in zip(crop["results"], images[1::2], images[2::2]):
            tiles.append(captioned(both, f"{ALL_EDITS[i].instruction}: result, truth"))
    return tile_grid(tiles, 1 + len(crop["results"]), margin=6)


def run(config):
    """Measure, draw, print."""
    output_dir = Path(config.output_dir)
    crops = load_edits(output_dir)
    draw_edits(crops).save(output_dir / "edits.png")
    summary = summarize_edits(crops)
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
