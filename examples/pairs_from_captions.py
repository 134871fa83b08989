"""From captions to an edit model, and how good it is: make_pairs.py with the demo's base model.

    python examples/pairs_from_captions.py --output_dir pairs                # on two CPU cores
    python examples/pairs_from_captions.py --output_dir tiny --num_pairs 120 --clip_steps 20 \\
        --num_samples 2 --num_inference_steps 4 --train_steps 20 --crops_per_photograph 1

Run it in a clone. It prints each command before it runs it, and writes to OUTPUT_DIR:

    true/          pairs of photographs with true edits, and held-out photographs (the demo's)
    clip/          a small CLIP model that has learned from them: nobody publishes one for 64 pixels
    captions.jsonl every caption and instruction of these pairs
    samples/       pairs that make_pairs.py draws from the captions alone, all with their scores
    made/data/     the pairs that are kept
    made/model/    an edit model that is trained on the made pairs
    true/model/    the same, trained on the true pairs
    summary.json   errors of both models' edits of the held-out photographs

--thresholds is the share of true pairs that reach the thresholds of CLIP's scores: 90, 75 or 50%;
"none" keeps the samples with the best direction. --only made leaves the model of true pairs out.
"""

import json
import os
import shlex
import subprocess
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parent.parent
MODEL = "demo/base_model"
COLUMNS = {"original_prompt": "input", "edit_prompt": "edit", "edited_prompt": "output"}


def run(command):
    """Run `python COMMAND`; end if it fails."""
    print(f"\n$ python {command}", flush=True)
    done = subprocess.run([sys.executable, *shlex.split(command)], cwd=ROOT)
    if done.returncode:
        sys.exit(done.returncode)


def extract_captions(data, file):
    """Write each caption and instruction of the shards once, as make_pairs.py reads them."""
    rows = pq.read_table(sorted(data.glob("*.parquet")), columns=list(COLUMNS)).to_pylist()
    found = sorted({tuple(row.values()) for row in rows})
    lines = [json.dumps(dict(zip(COLUMNS.values(), texts))) for texts in found]
    file.write_text("\n".join(lines) + "\n")
    print(f"{file} has {len(lines)} lines, such as\n{lines[0]}")


def make_pairs(args, folder):
    """Captions to pairs: everything before training."""
    out = shlex.quote(str(folder))
    run(
        f"demo/make_dataset.py --output_dir {out}/true --num_pairs {args.num_pairs} "
        f"--crops_per_photograph {args.crops_per_photograph}"
    )
    run(
        f"examples/train_clip.py --data {out}/true/data --tokenizer {MODEL}/tokenizer "
        f"--output_dir {out}/clip --num_steps {args.clip_steps}"
    )
    extract_captions(folder / "true" / "data", folder / "captions.jsonl")
    run(
        f"make_pairs.py --captions {out}/captions.jsonl --model {MODEL} --clip_model {out}/clip "
        f"--output_dir {out}/samples --keep_all --lines_per_shard 28 --guidance_scale 1.2 3.0 "
        f"--attention_sharing 0.1 0.9 --num_samples {args.num_samples} "
        f"--num_inference_steps {args.num_inference_steps} --batch_size 8"
    )
    flags = f"--num_kept {args.num_kept}"
    if args.thresholds != "none":
        scores = json.loads((folder / "clip" / "scores.json").read_text())
        for name, value in scores["quantiles"][args.thresholds].items():
            flags += f" --{name} {value}"
    run(f"parquet_processing.py --pairs {out}/samples --output_dir {out}/made/data {flags}")


def train_and_edit(args, folder, name):
    """Train on NAME/data with the demo's settings, edit the held-out photographs, measure."""
    out, warmup = shlex.quote(str(folder)), min(50, args.train_steps // 2)
    run(
        f"flax_train_instruct_pix2pix.py --pretrained_model_name_or_path {MODEL} "
        f"--unet_model_name_or_path {out}/modified_unet --train_data_dir {out}/{name}/data "
        f"--output_dir {out}/{name}/model --cache_latents {out}/{name}/latents "
        "--no_random_crop --checkpointing_steps 0 --resolution 64 --train_batch_size 8 "
        f"--max_train_steps {args.train_steps} --learning_rate 3e-3 --lr_warmup_steps {warmup} "
        "--lr_scheduler cosine --ema_fraction 0.2"
    )
    lines = (folder / "true" / "held_out" / "edits.jsonl").read_text().splitlines()
    edits = [json.loads(line) for line in lines]
    for edit in edits:
        edit["input"] = str(folder / "true" / "held_out" / edit["input"])
    held_out = folder / name / "held_out"
    held_out.mkdir(exist_ok=True)
    (held_out / "edits.jsonl").write_text("".join(f"{json.dumps(edit)}\n" for edit in edits))
    run(
        f"edit_cli.py --model {out}/{name}/model --edits_jsonl {out}/{name}/held_out/edits.jsonl "
        "--resolution 64 --num_inference_steps 20 --guidance_scale 2 --image_guidance_scale 1.2 "
        "--batch_size 18"
    )
    run(f"demo/evaluate.py --output_dir {out}/{name}")
    measured = json.loads((folder / name / "summary.json").read_text())
    shards = (folder / name / "data").glob("*.parquet")
    return {"pairs": sum(pq.read_metadata(shard).num_rows for shard in shards)} | measured


def main():
    """All steps, then the comparison."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--output_dir", type=Path, default="pairs")
    add("--num_pairs", type=int, default=3000, help="true pairs")
    add("--crops_per_photograph", type=int, default=3, help="held out")
    add("--clip_steps", type=int, default=1000)
    add("--num_samples", type=int, default=8, help="pairs to make of each line of captions")
    add("--num_kept", type=int, default=4, help="of each line")
    add("--thresholds", choices=("90", "75", "50", "none"), default="90")
    add("--num_inference_steps", type=int, default=20)
    add("--train_steps", type=int, default=2000)
    add("--only", choices=("both", "made"), default="both")
    args = parser.parse_args()
    folder = args.output_dir.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["JAX_NUM_CPU_DEVICES"] = "2"  # as XLA runs small operations on one core of each
    make_pairs(args, folder)
    unet = shlex.quote(str(folder / "modified_unet"))
    run(f"create_modified_unet.py --pretrained_model_name_or_path {MODEL} --output_dir {unet}")
    names = ("made", "true") if args.only == "both" else ("made",)
    summary = {name: train_and_edit(args, folder, name) for name in names}
    for name, row in summary.items():
        nearest = round(row["instruction_accuracy"] * row["num_edits"])
        print(
            f"{name} pairs ({row['pairs']}): edit error {row['edit_error_ratio']:.3f} of the "
            f"change, {nearest} of {row['num_edits']} results are nearest to their true edit"
        )
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(f"look at {folder}/made/edits.png")


if __name__ == "__main__":
    main()
