"""Compare tiny Stable Diffusion and SDXL models, fine-tuned alike, on the demo's held-out images.

    python -m benchmarks.families          # 21 minutes on 2 CPU cores
    python -m benchmarks.families --max_train_steps 20 --seeds 0 --guidance_scale 2 \\
        --work_dir /tmp/families --output /tmp/families.json --image_dir /tmp/families   # minutes

Fine-tunes demo/base_model and demo/base_model_xl with flax_train_instruct_pix2pix.py, once per
seed, with the same pairs, steps, batch and learning rate, and measures all models with
evaluate_edits.py. Runs that --work_dir holds, finished with the same flags, are not repeated.

Writes --output, with a row per family and seed, per family over all seeds, and for the baselines;
and to --image_dir families_loss.png (training loss), families_validation.jpg (validation images
over training steps) and families.gif (the same as an animation). CLIP's metrics are left out, as
this repository has no CLIP model.
"""

import json
import os
import shlex
import statistics
import subprocess
import sys
import textwrap
import time
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from benchmarks.rows import ROOT, check_output, describe_machine, write_rows
from demo.photographs import EDITS
from diffusers_flax.command_line import run_main
from diffusers_flax.data.images import load_image
from diffusers_flax.generating.captions import GRID_MARGIN
from diffusers_flax.loading.files import save_whole

FAMILIES = {"sd": "demo/base_model", "sdxl": "demo/base_model_xl"}
TITLES = {"sd": "Stable Diffusion", "sdxl": "SDXL"}
SHORT = {"sd": "SD", "sdxl": "SDXL"}  # titles of columns
METRICS = ("l1", "mse", "error_ratio", "l1_to_input", "seconds_per_edit", "flops_per_edit")
VALIDATION = {  # held-out image: number of its edit
    "chelsea_0": 0,
    "coffee_0": 7,
    "china_0": 6,
}
NUM_VALIDATIONS = 8  # of a run
LOGGING_STEPS = 10
CELL = 64  # pixels of an image's side
GAP = 4
LABEL = 18  # height of a line of text


@dataclass(frozen=True)
class Config:
    seeds: tuple[int, ...] = (0, 1, 2)  # of data order, noise and dropout in training
    max_train_steps: int = 1000  # optimizer steps of each run
    train_batch_size: int = 8  # pairs per step
    learning_rate: float = 3e-3  # peak value
    guidance_scale: tuple[float, ...] = (1.5, 2.0, 3.0)  # of the measured edits
    image_guidance_scale: tuple[float, ...] = (1.2,)  # of the measured edits
    work_dir: Path = Path("demo/families")  # data, models and edits
    output: Path = Path("benchmarks/results/families.json")
    image_dir: Path = Path("docs/images")  # for the plot, the image grid and the animation


def check_flags(config):
    """Raise a ValueError for invalid flags; evaluate_edits.py checks the scales."""
    if not config.seeds or len(set(config.seeds)) < len(config.seeds):
        seeds = " ".join(map(str, config.seeds))
        raise ValueError(f"--seeds {seeds} must be one or more different numbers")
    if config.max_train_steps < NUM_VALIDATIONS:
        raise ValueError(
            f"--max_train_steps {config.max_train_steps} must be at least {NUM_VALIDATIONS}, one "
            "for each validation"
        )
    check_output(config.output)


# Training and measuring


def run_script(command):
    """Print and run a command, a list of words after "python"; ValueError if it fails."""
    words = [str(word) for word in command]
    print(f"\n$ python {shlex.join(words)}", flush=True)
    if subprocess.run([sys.executable, *words], cwd=ROOT).returncode:
        raise ValueError(f"{words[0]} failed; its message is above")


def training_command(config, family, seed):
    """The trainer's command line of a run."""
    work_dir, steps = config.work_dir, config.max_train_steps
    held_out = work_dir / "held_out"
    command = ["flax_train_instruct_pix2pix.py", "--pretrained_model_name_or_path"]
    command += [FAMILIES[family], "--unet_model_name_or_path", work_dir / f"modified_unet_{family}"]
    command += ["--train_data_dir", work_dir / "data", "--no_random_crop", "--resolution", 64]
    command += ["--cache_latents", work_dir / f"latents_{family}", "--overwrite_output_dir"]
    command += ["--output_dir", model_dir(config, family, seed), "--checkpointing_steps", 0]
    command += ["--seed", seed, "--max_train_steps", steps, "--lr_warmup_steps", steps // 20]
    command += ["--train_batch_size", config.train_batch_size, "--lr_scheduler", "cosine"]
    command += ["--learning_rate", config.learning_rate, "--ema_fraction", 0.2]
    command += ["--logging_steps", LOGGING_STEPS, "--validation_steps", steps // NUM_VALIDATIONS]
    command += ["--validation_image", *(held_out / f"{name}.png" for name in VALIDATION)]
    command += ["--validation_prompt", *(EDITS[i].instruction for i in VALIDATION.values())]
    return [str(word) for word in command]


def model_dir(config, family, seed):
    """The directory of a run."""
    return config.work_dir / f"{family}_{seed}"


def train_family(config, family, seed):
    """Train a model unless a run of the same command has finished; returns its seconds."""
    command = training_command(config, family, seed)
    file = model_dir(config, family, seed) / "finished.json"
    finished = json.loads(file.read_text()) if file.exists() else {}
    if finished.get("command") == command:
        return finished["seconds"]
    file.unlink(missing_ok=True)
    started = time.perf_counter()
    run_script(command)
    finished = {"command": command, "seconds": time.perf_counter() - started}
    save_whole(file, partial(Path.write_text, data=json.dumps(finished) + "\n"))
    return finished["seconds"]


def evaluate(config, models):
    """Measure the models with evaluate_edits.py; returns its results."""
    command = ["evaluate_edits.py", "--model", *models, "--overwrite_output_dir"]
    command += ["--pairs_jsonl", config.work_dir / "held_out" / "edits.jsonl"]
    command += ["--guidance_scale", *config.guidance_scale]
    command += ["--image_guidance_scale", *config.image_guidance_scale]
    command += ["--resolution", 64, "--num_inference_steps", 20, "--batch_size", 18]
    command += ["--clip_model", "", "--output_dir", config.work_dir / "evaluation"]
    run_script(command)
    return json.loads((config.work_dir / "evaluation" / "results.json").read_text())


def loss_curve(folder):
    """[[step, mean loss since the row before]] of a run."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [[row["step"], row["loss"]] for row in rows]


def final_loss(curve):
    """Mean loss of the last tenth of a run."""
    last_step = curve[-1][0]
    return statistics.mean(loss for step, loss in curve if step > 0.9 * last_step)


def run_row(config, family, seed, train_seconds, results):
    """The row of a run."""
    folder = model_dir(config, family, seed)
    curve = loss_curve(folder)
    scales = ("guidance_scale", "image_guidance_scale")
    return {
        "family": family,
        "seed": seed,
        "parameters": results["models"][str(folder)]["parameters"],
        "max_train_steps": config.max_train_steps,
        "train_batch_size": config.train_batch_size,
        "learning_rate": config.learning_rate,
        "train_seconds": train_seconds,
        "final_loss": final_loss(curve),
        "loss_curve": curve,
        "num_pairs": results["settings"]["num_pairs"],
        "edits": [
            {name: row[name] for name in (*scales, *METRICS)}
            for row in results["rows"]
            if row["model"] == str(folder)
        ],
    }


def spread_of(values):
    """Mean, least and largest value, and the sample standard deviation (0 of one value)."""
    return {
        "mean": statistics.mean(values),
        "min": min(values),
        "max": max(values),
        "std": statistics.stdev(values) if len(values) > 1 else 0.0,
    }


def summarize_family(rows):
    """Mean and spread of a family's runs.

    Args:
        rows: one per seed, see run_row.

    Returns:
        {"num_seeds", "parameters", "train_seconds", "final_loss", "edits": one dict per pair of
        scales}; figures as from spread_of.
    """
    first = rows[0]
    edits = []
    for i, edit in enumerate(first["edits"]):
        figures = {name: spread_of([row["edits"][i][name] for row in rows]) for name in METRICS}
        scales = {name: edit[name] for name in ("guidance_scale", "image_guidance_scale")}
        edits.append(scales | figures)
    fixed = ("family", "parameters", "max_train_steps", "train_batch_size", "learning_rate")
    return {
        **{name: first[name] for name in (*fixed, "num_pairs")},
        "num_seeds": len(rows),
        "train_seconds": spread_of([row["train_seconds"] for row in rows]),
        "final_loss": spread_of([row["final_loss"] for row in rows]),
        "edits": edits,
    }


# Plot and images


def draw_family_losses(curves):
    """The training losses: mean over the seeds, and the range between them.

    Args:
        curves: {family: [loss_curve of each seed]}.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    for color, (family, runs) in zip(("C0", "C1"), curves.items()):
        steps = [step for step, _ in runs[0]]
        losses = list(zip(*([loss for _, loss in run] for run in runs)))  # per step
        means = [statistics.mean(values) for values in losses]
        least, largest = map(min, losses), map(max, losses)
        axes.plot(steps, means, color=color, linewidth=1, label=TITLES[family])
        axes.fill_between(steps, list(least), list(largest), color=color, alpha=0.25)
    axes.set(xlabel="step", ylabel=f"training loss, mean of {LOGGING_STEPS} steps", yscale="log")
    axes.legend()
    return figure


def validation_edits(folder):
    """The edited validation images of a run, {step: [PIL image of each pair]}.

    validation/step-N.png has a row per pair: input and result side by side, enlarged, the
    instruction below, and a margin around each row.
    """
    edits = {}
    for file in sorted((folder / "validation").glob("step-*.png")):
        grid = load_image(file)
        side = (grid.width - 2 * GRID_MARGIN) // 2
        left, height = GRID_MARGIN + side, (grid.height - GRID_MARGIN) // len(VALIDATION)
        tops = [GRID_MARGIN + row * height for row in range(len(VALIDATION))]
        images = [grid.crop((left, top, left + side, top + side)) for top in tops]
        edits[int(file.stem.removeprefix("step-"))] = [x.resize((CELL, CELL)) for x in images]
    return edits


def held_out_images(config):
    """[(original image, edited image)] of VALIDATION, PIL images."""
    folder = config.work_dir / "held_out"
    return [
        tuple(Image.open(folder / f"{stem}.png") for stem in (name, f"{name}_truth_{i}"))
        for name, i in VALIDATION.items()
    ]


def draw_rows(columns, rows, titles):
    """A grid of images with a title above each column and text left of each row.

    Args:
        columns: titles of the columns.
        rows: lists of PIL images of CELL pixels, one per column.
        titles: of the rows; their lines are wrapped.
    """
    left = 120
    size = (left + len(columns) * (CELL + GAP), LABEL + len(rows) * (CELL + GAP))
    canvas = Image.new("RGB", size, "white")
    pen, font = ImageDraw.Draw(canvas), ImageFont.load_default(11)
    for i, column in enumerate(columns):
        pen.text((left + i * (CELL + GAP), 1), column, fill="black", font=font)
    for j, (images, title) in enumerate(zip(rows, titles)):
        top = LABEL + j * (CELL + GAP)
        lines = [line for text in title.splitlines() for line in textwrap.wrap(text, 20)]
        pen.multiline_text((2, top + 8), "\n".join(lines), fill="black", font=font)
        for i, image in enumerate(images):
            canvas.paste(image, (left + i * (CELL + GAP), top))
    return canvas


def draw_validation(pairs, edits):
    """Validation images over training steps: per image a row of each family.

    Args:
        pairs: of held_out_images.
        edits: {family: validation_edits}.
    """
    steps = list(next(iter(edits.values())))
    columns = ["input", *(f"step {step}" for step in steps), "truth"]
    rows, titles = [], []
    for i, (original, edited) in enumerate(pairs):
        for family, by_step in edits.items():
            rows.append([original, *(by_step[step][i] for step in steps), edited])
            instruction = EDITS[list(VALIDATION.values())[i]].instruction
            titles.append(f"{TITLES[family]}:\n{instruction}")
    return draw_rows(columns, rows, titles)


def draw_frames(pairs, edits):
    """The animation's frames, one per step: a row per image; columns input, families, truth."""
    columns = ["input", *(SHORT[family] for family in edits), "truth"]
    for step in next(iter(edits.values())):
        rows = [
            [original, *(by_step[step][i] for by_step in edits.values()), edited]
            for i, (original, edited) in enumerate(pairs)
        ]
        titles = [EDITS[i].instruction for i in VALIDATION.values()]
        frame = draw_rows(columns, rows, titles)
        font = ImageFont.load_default(11)
        ImageDraw.Draw(frame).text((2, 1), f"step {step}", fill="black", font=font)
        yield frame.quantize(128, dither=Image.Dither.NONE)


def save_figures(config, curves):
    """Write families_loss.png, families_validation.jpg and families.gif."""
    folder = config.image_dir
    save_whole(folder / "families_loss.png", partial(draw_family_losses(curves).savefig, dpi=110))
    seed = config.seeds[0]
    edits = {family: validation_edits(model_dir(config, family, seed)) for family in FAMILIES}
    pairs = held_out_images(config)
    grid = draw_validation(pairs, edits)
    save_whole(folder / "families_validation.jpg", partial(grid.save, quality=85))
    first, *others = draw_frames(pairs, edits)
    pauses = [700] * len(others) + [2800]  # milliseconds
    save = partial(first.save, save_all=True, append_images=others, duration=pauses, loop=0)
    save_whole(folder / "families.gif", save)


def run(config):
    """Train, measure, write."""
    check_flags(config)
    os.environ["JAX_NUM_CPU_DEVICES"] = "2"  # XLA runs small operations on one core per device
    machine = describe_machine(("jax", "jaxlib", "flax", "optax", "numpy"))
    run_script(["demo/make_dataset.py", "--output_dir", config.work_dir])
    for family, base_model in FAMILIES.items():
        command = ["create_modified_unet.py", "--pretrained_model_name_or_path", base_model]
        command += ["--overwrite_output_dir", "--output_dir"]
        run_script([*command, config.work_dir / f"modified_unet_{family}"])
    # Seed by seed, so that a machine that slows down does so for both families.
    runs = [(family, seed) for seed in config.seeds for family in FAMILIES]
    seconds = {run: train_family(config, *run) for run in runs}
    results = evaluate(config, [model_dir(config, *run) for run in runs])

    rows, of_family = {}, defaultdict(list)
    for family, seed in runs:
        row = run_row(config, family, seed, seconds[family, seed], results)
        rows[f"{family} seed {seed}"] = row
        of_family[family].append(row)
    for family, family_rows in of_family.items():
        rows[f"{family} summary"] = summarize_family(family_rows)
    first_model = str(model_dir(config, *runs[0]))  # all models have the same VAE
    for row in results["baselines"]:
        if row["model"] in (None, first_model):
            figures = {name: row[name] for name in METRICS if name in row}
            rows[f"baseline {row['baseline']}"] = figures
    write_rows(rows, machine, config.output)
    save_figures(config, {f: [row["loss_curve"] for row in rs] for f, rs in of_family.items()})
    print(f"\nwrote {config.output} and families_* in {config.image_dir}")


def main(args=None):
    """Command line."""
    run_main(Config, __doc__, run, args, interrupted="finished runs in --work_dir are kept")


if __name__ == "__main__":
    main()
