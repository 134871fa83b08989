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
Finished steps are kept: the same command goes on where it was interrupted. With other flags, a step
whose command differs runs again, and all steps after it.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parent.parent
MODEL = "demo/base_model"
COLUMNS = {"original_prompt": "input", "edit_prompt": "edit", "edited_prompt": "output"}
FLAGS = dict(  # defaults
    output_dir=Path("pairs"),
    num_pairs=3000,  # true pairs
    crops_per_photograph=3,  # held out
    clip_steps=1000,
    num_samples=8,  # pairs to make of each line of captions
    num_kept=4,
    thresholds="90",
    attention_sharing=(0.1, 0.9),
    guidance_scale=(1.2, 3.0),
    num_inference_steps=20,
    batch_size=8,  # pairs of a device at once
    train_steps=2000,
    only="both",
)
CHOICES = dict(thresholds=("90", "75", "50", "none"), only=("both", "made"))


class Steps:
    """Runs commands and remembers, in OUTPUT_DIR/steps.json, which have finished."""

    def __init__(self, folder):
        self.file, self.place = folder / "steps.json", 0
        folder.mkdir(parents=True, exist_ok=True)
        # [[command, whether it has finished]] in order
        self.known = json.loads(self.file.read_text()) if self.file.exists() else []

    def remember(self, command, is_finished):
        """Replace this step and forget all later ones."""
        self.known[self.place :] = [[command, is_finished]]
        part = self.file.with_suffix(".part")
        part.write_text(json.dumps(self.known, indent=1) + "\n")
        part.replace(self.file)

    def run(self, command, *outputs):
        """Run `python COMMAND`, unless it has finished.

        Args:
            command: text.
            outputs: files and folders that are removed first if they are of another command.
        """
        before = self.known[self.place] if self.place < len(self.known) else [None, False]
        if before == [command, True]:
            print(f"\n(finished before) python {command}", flush=True)
        else:
            if before[0] != command:
                for path in outputs:
                    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            self.remember(command, False)
            print(f"\n$ python {command}", flush=True)
            done = subprocess.run([sys.executable, *shlex.split(command)], cwd=ROOT)
            if done.returncode:
                sys.exit(done.returncode)
            self.remember(command, True)
        self.place += 1


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


def make_pairs(steps, args):
    """Captions to pairs: everything before training."""
    folder = args.output_dir
    true, clip, samples = (folder / name for name in ("true", "clip", "samples"))
    captions = folder / "captions.jsonl"
    steps.run(
        f"demo/make_dataset.py --output_dir {quoted(true)} --num_pairs {args.num_pairs} "
        f"--crops_per_photograph {args.crops_per_photograph}",
        true,
    )
    steps.run(
        f"examples/train_clip.py --data {quoted(true)}/data --tokenizer {MODEL}/tokenizer "
        f"--output_dir {quoted(clip)} --num_steps {args.clip_steps}",
        clip,
    )
    extract_captions(true / "data", captions)
    flags = ""
    for name in ("guidance_scale", "attention_sharing"):
        low, high = getattr(args, name)
        flags += f" --{name} {low} {high}"
    for name in ("num_samples", "num_inference_steps", "batch_size"):
        flags += f" --{name} {getattr(args, name)}"
    steps.run(
        f"make_pairs.py --captions {quoted(captions)} --model {MODEL} --clip_model {quoted(clip)} "
        f"--output_dir {quoted(samples)} --keep_all --lines_per_shard 28{flags}",
        samples,
    )
    flags = f"--num_kept {args.num_kept}"
    if args.thresholds != "none":
        scores = json.loads((clip / "scores.json").read_text())
        for name, value in scores["quantiles"][args.thresholds].items():
            flags += f" --{name} {value}"
    steps.run(
        f"parquet_processing.py --pairs {quoted(samples)} --output_dir {quoted(folder)}/made/data "
        f"--overwrite_output_dir {flags}",
        folder / "made" / "data",
    )


def train_and_edit(steps, args, folder):
    """Train on FOLDER/data with the demo's settings, edit the held-out photographs, measure."""
    unet = args.output_dir / "modified_unet"
    warmup = min(50, args.train_steps // 2)
    steps.run(
        f"flax_train_instruct_pix2pix.py --pretrained_model_name_or_path {MODEL} "
        f"--unet_model_name_or_path {quoted(unet)} --train_data_dir {quoted(folder)}/data "
        f"--output_dir {quoted(folder)}/model --overwrite_output_dir "
        f"--cache_latents {quoted(folder)}/latents "
        "--no_random_crop --checkpointing_steps 0 --resolution 64 --train_batch_size 8 "
        f"--max_train_steps {args.train_steps} --learning_rate 3e-3 --lr_warmup_steps {warmup} "
        "--lr_scheduler cosine --ema_fraction 0.2",
        folder / "model",
        folder / "latents",
    )
    steps.run(
        f"edit_cli.py --model {quoted(folder)}/model "
        f"--edits_jsonl {quoted(folder)}/held_out/edits.jsonl "
        "--resolution 64 --num_inference_steps 20 --guidance_scale 2 --image_guidance_scale 1.2 "
        "--batch_size 18",
        folder / "edits",
    )
    steps.run(f"demo/evaluate.py --output_dir {quoted(folder)}", folder / "summary.json")


def run(args):
    """All steps, then the comparison."""
    folder = args.output_dir = args.output_dir.resolve()
    os.environ["JAX_NUM_CPU_DEVICES"] = "2"  # as XLA runs small operations on one core of each
    print("$ export JAX_NUM_CPU_DEVICES=2", flush=True)
    steps = Steps(folder)
    make_pairs(steps, args)
    write_edits(folder / "true" / "held_out" / "edits.jsonl", folder / "made")
    steps.run(
        f"create_modified_unet.py --pretrained_model_name_or_path {MODEL} "
        f"--output_dir {quoted(folder)}/modified_unet --overwrite_output_dir",
        folder / "modified_unet",
    )
    summary = {}
    for name in ("made", "true") if args.only == "both" else ("made",):
        train_and_edit(steps, args, folder / name)
        measured = json.loads((folder / name / "summary.json").read_text())
        shards = (folder / name / "data").glob("*.parquet")
        rows = sum(pq.read_metadata(shard).num_rows for shard in shards)
        summary[name] = {"pairs": rows} | measured
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    for name, row in summary.items():
        nearest = round(row["instruction_accuracy"] * row["num_edits"])
        print(
            f"{name} pairs ({row['pairs']}): edit error {row['edit_error_ratio']:.3f} of the "
            f"change, {nearest} of {row['num_edits']} results are nearest to their true edit"
        )
    print(f"look at {folder}/made/edits.png")


def main():
    """Command line."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    for name, value in FLAGS.items():
        if isinstance(value, tuple):
            options = dict(type=float, nargs=2, metavar=("LEAST", "LARGEST"))
        else:
            options = dict(type=type(value), choices=CHOICES.get(name))
        parser.add_argument(f"--{name}", default=value, help=f"default: {value}", **options)
    run(parser.parse_args())


if __name__ == "__main__":
    main()
