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
A step whose result is there is not run again: after an interruption repeat the command, and give
other flags another OUTPUT_DIR.
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


def run(command, result):
    """Run `python COMMAND`, unless its result, a file or folder, is there."""
    if result.exists():
        print(f"\n{result} is there; it is not made again", flush=True)
        return
    print(f"\n$ python {command}", flush=True)
    done = subprocess.run([sys.executable, *shlex.split(command)], cwd=ROOT)
    if done.returncode:
        sys.exit(done.returncode)


def extract_captions(data, file):
    """Write each caption and instruction of the shards once, as make_pairs.py reads them."""
    found = set()
    for shard in sorted(data.glob("*.parquet")):
        for row in pq.read_table(shard, columns=list(COLUMNS)).to_pylist():
            found.add(tuple(row[name] for name in COLUMNS))
    lines = [json.dumps(dict(zip(COLUMNS.values(), texts))) for texts in sorted(found)]
    file.write_text("\n".join(lines) + "\n")
    print(f"{file} has {len(lines)} lines, such as\n{lines[0]}")


def write_edits(source, folder):
    """Write the list of held-out edits again, with results in another folder."""
    lines = [json.loads(line) for line in source.read_text().splitlines()]
    for line in lines:
        line["output"] = str(folder / "edits" / Path(line["output"]).name)
    list_of_edits = folder / "held_out" / "edits.jsonl"
    list_of_edits.parent.mkdir(parents=True, exist_ok=True)
    list_of_edits.write_text("".join(json.dumps(line) + "\n" for line in lines))


def quoted(path):
    """A path in a command."""
    return shlex.quote(str(path))


def make_pairs(args, folder):
    """Captions to pairs: everything before training."""
    true, clip, samples = (folder / name for name in ("true", "clip", "samples"))
    captions = folder / "captions.jsonl"
    run(
        f"demo/make_dataset.py --output_dir {quoted(true)} --num_pairs {args.num_pairs} "
        f"--crops_per_photograph {args.crops_per_photograph}",
        true / "held_out" / "edits.jsonl",
    )
    run(
        f"examples/train_clip.py --data {quoted(true)}/data --tokenizer {MODEL}/tokenizer "
        f"--output_dir {quoted(clip)} --num_steps {args.clip_steps}",
        clip / "scores.json",
    )
    extract_captions(true / "data", captions)
    run(
        f"make_pairs.py --captions {quoted(captions)} --model {MODEL} --clip_model {quoted(clip)} "
        f"--output_dir {quoted(samples)} --keep_all --lines_per_shard 28 --guidance_scale 1.2 3.0 "
        f"--attention_sharing 0.1 0.9 --num_samples {args.num_samples} "
        f"--num_inference_steps {args.num_inference_steps} --batch_size 8",
        samples / "report.json",
    )
    flags = f"--num_kept {args.num_kept}"
    if args.thresholds != "none":
        scores = json.loads((clip / "scores.json").read_text())
        for name, value in scores["quantiles"][args.thresholds].items():
            flags += f" --{name} {value}"
    run(
        f"parquet_processing.py --pairs {quoted(samples)} --output_dir {quoted(folder)}/made/data "
        f"--overwrite_output_dir {flags}",
        folder / "made" / "data",
    )


def train_and_edit(args, folder, unet):
    """Train on FOLDER/data with the demo's settings, edit the held-out photographs, measure."""
    warmup = min(50, args.train_steps // 2)
    run(
        f"flax_train_instruct_pix2pix.py --pretrained_model_name_or_path {MODEL} "
        f"--unet_model_name_or_path {quoted(unet)} --train_data_dir {quoted(folder)}/data "
        f"--output_dir {quoted(folder)}/model --cache_latents {quoted(folder)}/latents "
        "--no_random_crop --checkpointing_steps 0 --resolution 64 --train_batch_size 8 "
        f"--max_train_steps {args.train_steps} --learning_rate 3e-3 --lr_warmup_steps {warmup} "
        "--lr_scheduler cosine --ema_fraction 0.2",
        folder / "model" / "model_index.json",
    )
    edits = folder / "held_out" / "edits.jsonl"
    run(
        f"edit_cli.py --model {quoted(folder)}/model --edits_jsonl {quoted(edits)} "
        "--resolution 64 --num_inference_steps 20 --guidance_scale 2 --image_guidance_scale 1.2 "
        "--batch_size 18",
        edits.parent / json.loads(edits.read_text().splitlines()[-1])["output"],
    )
    summary = folder / "summary.json"
    run(f"demo/evaluate.py --output_dir {quoted(folder)}", summary)
    return json.loads(summary.read_text())


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
    print("$ export JAX_NUM_CPU_DEVICES=2", flush=True)
    make_pairs(args, folder)
    write_edits(folder / "true" / "held_out" / "edits.jsonl", folder / "made")
    unet = folder / "modified_unet"
    run(
        f"create_modified_unet.py --pretrained_model_name_or_path {MODEL} "
        f"--output_dir {quoted(unet)}",
        unet,
    )
    summary = {}
    for name in ("made", "true") if args.only == "both" else ("made",):
        measured = train_and_edit(args, folder / name, unet)
        shards = (folder / name / "data").glob("*.parquet")
        rows = sum(pq.read_metadata(shard).num_rows for shard in shards)
        summary[name] = row = {"pairs": rows} | measured
        nearest = round(row["instruction_accuracy"] * row["num_edits"])
        print(
            f"{name} pairs ({rows}): edit error {row['edit_error_ratio']:.3f} of the change, "
            f"{nearest} of {row['num_edits']} results are nearest to their true edit"
        )
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(f"look at {folder}/made/edits.png")


if __name__ == "__main__":
    main()
