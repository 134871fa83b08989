"""Make the demo's data: parquet shards to train on, and held-out photographs to be edited.

    python demo/make_dataset.py --output_dir demo/output          # seconds, no accelerator

OUTPUT_DIR/data gets shards in the schema of timbrooks/instructpix2pix-clip-filtered.
OUTPUT_DIR/held_out gets crops of photographs that are in no shard, their true edits and a list,
edits.jsonl for edit_cli.py and evaluate_edits.py: every instruction for every crop. With
--references the edits need a second image, a crop of a random photograph.
"""

import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import trange

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from demo.photographs import ALL_EDITS, HELD_OUT, TRAINING, load_photographs, random_crop
from diffusers_flax.command_line import run_main
from diffusers_flax.data.writing import IMAGE, SCHEMA
from diffusers_flax.images import to_pil

SIZE = 64  # pixels of an image's side


@dataclass(frozen=True)
class Config:
    output_dir: str = "demo/output"
    num_pairs: int = 3000  # training pairs, over all instructions
    num_shards: int = 4
    crops_per_photograph: int = 3  # of the held-out ones
    references: bool = False  # edits that need a reference image, for UNets that take two images
    seed: int = 0


def jpeg(image):
    """A parquet image cell with the image as JPEG of the best quality."""
    buffer = io.BytesIO()
    to_pil(image)[0].save(buffer, "JPEG", quality=100, subsampling=0)
    return {"bytes": buffer.getvalue(), "path": None}


def draw_images(rng, photographs, image, edit):
    """The images that an edit takes: the image, and maybe a crop of a random photograph."""
    if not edit.has_reference:
        return [image]
    return [image, random_crop(rng, photographs[rng.integers(len(photographs))], SIZE)]


def write_demo_shards(folder, rng, num_pairs, num_shards, edits):
    """num_pairs random crops, each with a random edit, by their weights."""
    photographs, names = load_photographs(TRAINING), list(TRAINING.values())
    shares = np.array([edit.weight for edit in edits]) / sum(edit.weight for edit in edits)
    schema = SCHEMA.append(pa.field("reference_image", IMAGE)) if edits[0].has_reference else SCHEMA
    rows = []
    for _ in trange(num_pairs, desc="pairs", mininterval=2):
        i, edit = rng.integers(len(photographs)), edits[rng.choice(len(edits), p=shares)]
        images = draw_images(rng, photographs, random_crop(rng, photographs[i], SIZE), edit)
        rows.append(
            {
                "original_prompt": f"a photo of {names[i]}",
                "original_image": jpeg(images[0]),
                "edit_prompt": edit.instruction,
                "edited_prompt": edit.caption.format(names[i]),
                "edited_image": jpeg(edit.apply(*images)),
            }
        )
        if edit.has_reference:
            rows[-1]["reference_image"] = jpeg(images[1])
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(num_shards):
        table = pa.Table.from_pylist(rows[shard::num_shards], schema=schema)
        name = f"train-{shard:05d}-of-{num_shards:05d}.parquet"
        pq.write_table(table, folder / name, row_group_size=100)


def write_demo_held_out(folder, rng, crops_per_photograph, edits):
    """Crops of the held-out photographs, every true edit, and the list of edits to be made."""
    folder.mkdir(parents=True, exist_ok=True)
    lines, photographs = [], load_photographs(HELD_OUT)
    for photograph, (file, subject) in zip(photographs, HELD_OUT.items()):
        for crop in range(crops_per_photograph):
            image = random_crop(rng, photograph, SIZE, smallest=0.4)
            name = f"{Path(file).stem}_{crop}"
            to_pil(image)[0].save(folder / f"{name}.png")
            for edit in edits:
                i, images = ALL_EDITS.index(edit), draw_images(rng, photographs, image, edit)
                to_pil(edit.apply(*images))[0].save(folder / f"{name}_truth_{i}.png")
                line = {
                    "input": f"{name}.png",
                    "edit": edit.instruction,
                    "output": f"../edits/{name}_{i}.png",
                    "truth": f"{name}_truth_{i}.png",
                    "input_caption": f"a photo of {subject}",
                    "output_caption": edit.caption.format(subject),
                }
                if edit.has_reference:
                    line["reference"] = f"{name}_reference_{i}.png"
                    to_pil(images[1])[0].save(folder / line["reference"])
                lines.append(line)
    (folder / "edits.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return len(lines)


def run(config):
    """Write both."""
    output_dir = Path(config.output_dir)
    rng = np.random.default_rng(config.seed)
    edits = [edit for edit in ALL_EDITS if edit.has_reference == config.references]
    write_demo_shards(output_dir / "data", rng, config.num_pairs, config.num_shards, edits)
    held_out = output_dir / "held_out"
    num_edits = write_demo_held_out(held_out, rng, config.crops_per_photograph, edits)
    print(f"wrote {config.num_pairs} pairs and {num_edits} held-out edits below {output_dir}")


def main(args=None):
    """Command line."""
    run_main(Config, __doc__, run, args, interrupted="run the same command again")


if __name__ == "__main__":
    main()
