"""Make a model of a checkpoint, or of an average of the weights of any length, after training.

    python ema_posthoc.py --checkpoint instruct-pix2pix-model/checkpoints/600 --output_dir model-600

writes what the run would have written if it had ended there: its average, if it has one by then,
else its weights. Give the command in the directory in which the run was started.

    python ema_posthoc.py --train_output_dir instruct-pix2pix-model --sigma_rel 0.08 \\
        --output_dir model-0.08
    python ema_posthoc.py --train_output_dir instruct-pix2pix-model --sigma_rel 0.03 0.08 0.15 \\
        --output_dir models

The first of these writes model-0.08, the second models/0.03, models/0.08 and models/0.15; each is a
pipeline directory for edit_cli.py and PyTorch diffusers. The run must have --ema power, which saves
snapshots of two averages; the result is their best weighted sum, and its error is printed.
sigma_rel is the average's standard deviation in time as a fraction of the run: an average with 0.1
is about twice as long as one with 0.05.

Needs a CPU and memory for the UNet in float32 (3.4 GB for Stable Diffusion 1.5), and reads all
snapshots up to --step once for each length. A model of a few MB takes seconds.

Paper: EDM2 (arXiv 2312.02696), section 3.
"""

import logging
import re
import shutil
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Annotated, Literal

import jax
import numpy as np
from flax.traverse_util import unflatten_dict
from tqdm import tqdm

from diffusers_flax.command_line import Above, Below, ask_before_replacing, run_main
from diffusers_flax.generating.flags import DEFAULTS_FILE, with_single_files
from diffusers_flax.loading.directories import writing_pipeline
from diffusers_flax.loading.files import naming_full_disk, read_json
from diffusers_flax.loading.weights import read_safetensors, torch_to_flax
from diffusers_flax.models.unet import FlaxUNet2DConditionModel
from diffusers_flax.training.checkpoints import flatten_by_name, read_arrays, read_record
from diffusers_flax.training.ema import posthoc_weights, sigma_rel_to_gamma
from diffusers_flax.training.flags import COMPONENT_FLAGS, TrainerFlags
from diffusers_flax.training.models import load_models, params_beside_unet
from diffusers_flax.training.output import write_model

SNAPSHOT_NAME = re.compile(r"(\d+)-(0\.\d+)")  # STEP-SIGMA
LARGEST_ERROR = 0.1  # of the profile; above it the line says so


@dataclass(frozen=True)
class Config:
    output_dir: str  # directory for the model; several lengths: a subdirectory for each
    checkpoint: str | None = None  # RUN/checkpoints/STEP, instead of the two below
    train_output_dir: str | None = None  # output directory of a finished run with --ema power
    # lengths of the averages, each above 0 and below 0.28
    sigma_rel: tuple[Annotated[float, Above(0), Below(0.28)], ...] = ()
    step: int | None = None  # last step of the average, one with snapshots; default: the last
    dtype: Literal["float32", "float16"] = "float32"  # dtype of the UNet's file
    overwrite_output_dir: bool = False  # replace an existing model; other files are not changed


def find_snapshots(train_output_dir, last_step=None):
    """The snapshots of a run up to a step, by default the last.

    Returns:
        List of (step, sigma_rel, directory), sorted.
    """
    parent = Path(train_output_dir, "ema_snapshots")
    snapshots = sorted(
        (int(match[1]), float(match[2]), folder)
        for folder in parent.glob("*")
        if (match := SNAPSHOT_NAME.fullmatch(folder.name))
    )
    if not snapshots:
        raise ValueError(
            f"{parent} has no snapshots; give the --output_dir of a training run with --ema power"
        )
    steps = sorted({step for step, *_ in snapshots})
    if last_step is not None and last_step not in steps:
        raise ValueError(
            f"--step {last_step} has no snapshots; choose from {', '.join(map(str, steps))}"
        )
    return [x for x in snapshots if x[0] <= (last_step or steps[-1])]


def sum_snapshots(folders, weights, description):
    """The weighted sum of UNets, {PyTorch name: float32 array}.

    Args:
        folders: UNet directories with the same tensors.
        weights: one number for each.
        description: of the progress bar.
    """
    total = {}
    with tqdm(zip(folders, weights), description, len(folders), unit="snapshot") as bar:
        for folder, weight in bar:
            files = sorted(folder.glob("*.safetensors"))  # one, or its shards
            terms = {
                key: np.multiply(array, weight, dtype=np.float32)
                for file in files
                for key, array in read_safetensors(file)
            }
            if total and terms.keys() != total.keys():
                raise ValueError(f"the snapshot {folder} is incomplete; copy it again")
            total = {key: total[key] + term for key, term in terms.items()} if total else terms
    return total


def save_average(config, folders, weights, sigma_rel, output_dir):
    """Write a pipeline with the weighted sum of UNets; its other parts are copied from the run."""
    source = Path(config.train_output_dir)
    with naming_full_disk(output_dir), writing_pipeline(output_dir) as new:
        shutil.copy(source / "model_index.json", new)
        if (source / DEFAULTS_FILE).is_file():
            shutil.copy(source / DEFAULTS_FILE, new)
        for name, classes in read_json(source / "model_index.json").items():
            if isinstance(classes, list) and classes[0] is not None and name != "unet":
                shutil.copytree(source / name, new / name)
        tensors = sum_snapshots(folders, weights, f"sigma_rel {sigma_rel}")
        params = dict(torch_to_flax(key, array) for key, array in tensors.items())
        unet = FlaxUNet2DConditionModel.from_config(read_json(folders[0] / "config.json"))
        unet.save_pretrained(new / "unet", unflatten_dict(params, sep="/"), dtype=config.dtype)


def save_checkpoint(config):
    """Write the model of --checkpoint, as the trainer writes it."""
    checkpoint, output_dir = Path(config.checkpoint), config.output_dir
    run = checkpoint.parent.parent
    if not (checkpoint.name.isdecimal() and checkpoint.is_dir() and (run / "config.json").exists()):
        raise ValueError(
            f"--checkpoint {checkpoint} is not a checkpoint of the trainer; give its directory, "
            "such as OUTPUT_DIR/checkpoints/600"
        )
    ask_before_replacing("output_dir", output_dir, config.overwrite_output_dir)
    saved, step = read_json(run / "config.json"), int(checkpoint.name)
    saved = {name: tuple(x) if isinstance(x, list) else x for name, x in saved.items()}
    saved |= dict(output_dir=output_dir, max_train_steps=step, num_train_epochs=None)
    saved |= dict(push_to_hub=False, save_raw_unet=False)
    flags_class = make_dataclass("Flags", saved, bases=(TrainerFlags,), frozen=True, kw_only=True)
    flags = flags_class(**saved)
    flags = with_single_files(flags, "pretrained_model_name_or_path", **COMPONENT_FLAGS)
    _, pipeline, frozen, params = load_models(flags, np.float32)
    record, arrays = read_record(checkpoint), read_arrays(checkpoint)
    what, prefix = ("average", "ema/0") if record.get("num_averages") else ("weights", "params")
    weights = [arrays[f"{prefix}/{name}"] for name in flatten_by_name(params)]
    if flags.optimizer == "schedule_free":  # weights = b1 average + (1 - b1) z, arXiv 2405.15682
        what, b1 = "average", arrays["opt_state/b1"]
        zs = (arrays[f"opt_state/z/{name}"] for name in flatten_by_name(params))
        weights = [(x - (1 - b1) * z) / b1 for x, z in zip(weights, zs)]
    weights = jax.tree.unflatten(jax.tree.structure(params), weights)
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    write_model(flags, pipeline, {"unet": weights}, params_beside_unet(frozen), {"step": step})
    print(f"saved the {what} after {step} steps to {output_dir}")


def save_averages(config):
    """Write a model for each of --sigma_rel."""
    source, output_dir = Path(config.train_output_dir), Path(config.output_dir)
    folders = {sigma_rel: output_dir / str(sigma_rel) for sigma_rel in config.sigma_rel}
    if len(folders) == 1:
        folders = dict.fromkeys(folders, output_dir)
    for folder in folders.values():
        ask_before_replacing("output_dir", folder, config.overwrite_output_dir)
    snapshots = find_snapshots(source, config.step)
    if not (source / "model_index.json").is_file():
        raise ValueError(
            f"{source} has snapshots but no model_index.json, so the training is not finished; "
            "run the training command again to resume it"
        )
    times, lengths, unets = zip(*snapshots)
    gammas = list(map(sigma_rel_to_gamma, lengths))
    print(f"{len(snapshots)} snapshots, steps {times[0]} to {times[-1]}")
    for sigma_rel, folder in folders.items():
        weights, error = posthoc_weights(times, gammas, times[-1], sigma_rel_to_gamma(sigma_rel))
        poor = ": choose a length closer to the tracked ones" if error > LARGEST_ERROR else ""
        print(f"sigma_rel {sigma_rel}: relative error of the profile {error:.2%}{poor}")
        save_average(config, unets, weights, sigma_rel, folder.resolve())
        print(f"saved {folder.resolve()}")


def run(config):
    """Write the model of a checkpoint, or of averages."""
    average = bool(config.train_output_dir), bool(config.sigma_rel)
    if any(average) == bool(config.checkpoint) or any(average) != all(average):
        raise ValueError("give --checkpoint, or --train_output_dir and --sigma_rel")
    jax.config.update("jax_platforms", "cpu")  # only shapes are computed
    save_checkpoint(config) if config.checkpoint else save_averages(config)


def main(args=None):
    """Command line."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # orbax logs every action
    run_main(Config, __doc__, run, args, interrupted="the models named as saved are complete")


if __name__ == "__main__":
    main()
