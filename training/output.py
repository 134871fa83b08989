"""The output directory of a training run: check and lock it, write its flags, merge its model."""

import contextlib
import json
import math
import shutil
from dataclasses import asdict
from pathlib import Path

from command_line import check_writable
from diffusers_flax.loading.directories import CONV_IN_FILE, INDEX_NAME, LORA_FILE, PARTS
from diffusers_flax.loading.files import write_text
from diffusers_flax.loading.lora import read_record
from training.checkpoints import check_goes_on
from training.flags import FINAL_FILES, Config, final_file, flag
from training.models import compute_dtype, merge_lora
from training.processes import lock_folder, on_process_0
from training.report import check_hub, lines_until_step, push_to_hub, write_card


def check_run_dir(config: Config) -> None:
    """Raise a ValueError if output_dir cannot be written or its content would be lost."""
    if not config.output_dir:
        raise ValueError("--output_dir is empty; name a directory")
    output_dir, given = Path(config.output_dir), flag(config, "output_dir")
    if output_dir.is_file():
        raise ValueError(f"{given} is a file; name a directory")
    sources = ("pretrained_model_name_or_path", "unet_model_name_or_path")
    for name in (*sources, "pretrained_vae_model_name_or_path"):
        value = getattr(config, name)
        if value and Path(value).resolve().is_relative_to(output_dir.resolve()):
            raise ValueError(f"{given} is or contains {flag(config, name)}; name another directory")
    if Path(config.train_data_dir).resolve() == output_dir.resolve():
        raise ValueError(f"{given} is --train_data_dir too; name another directory")
    has_model = any((output_dir / name).exists() for name in FINAL_FILES)
    if not any(output_dir.glob("checkpoints/*")):  # otherwise a crash while the files were written
        has_model = has_model or (output_dir / CONV_IN_FILE).exists()
    if has_model and not (config.overwrite_output_dir or merges_finished_run(config)):
        check_goes_on(config, None if config.num_train_epochs else config.max_train_steps)
    overwritten = [name for name in ("README.md", "config.json") if (output_dir / name).exists()]
    if (
        overwritten
        and not (output_dir / "metrics.jsonl").exists()
        and not config.overwrite_output_dir
    ):
        raise ValueError(
            f"{given} contains {' and '.join(overwritten)} from something other than a training "
            "run; name another directory, or replace them with --overwrite_output_dir"
        )
    check_writable(given, output_dir)


def merges_finished_run(config: Config) -> bool:
    """Whether only --merge_lora is left to do: output_dir has the LoRA of a run of this length."""
    file, pipeline = (Path(config.output_dir, name) for name in FINAL_FILES)
    is_replaced = config.overwrite_output_dir or pipeline.exists()
    if not config.merge_lora or is_replaced or not file.exists():
        return False
    saved = read_record(file)
    if saved is None:
        return True  # merge_lora says what is wrong with the file
    if config.num_train_epochs is not None:  # their number of steps is known with the data only
        return config.num_train_epochs == saved.get("num_train_epochs")
    return config.max_train_steps == saved.get("max_train_steps")


@contextlib.contextmanager
def lock_output_dir(config: Config):
    """A context that locks --output_dir for this run; all processes must enter it together.

    Raises:
        ValueError: another run uses the directory or has just written a model to it.
    """
    output_dir = Path(config.output_dir)
    final = output_dir / final_file(config)
    model_before = modified_at(final)
    with contextlib.ExitStack() as stack:

        def lock():
            stack.enter_context(lock_folder(output_dir))
            # --overwrite_output_dir covers only models that existed before the lock was requested.
            if modified_at(final) != model_before:
                raise ValueError(
                    f"a run that has just ended has written a model to --output_dir {output_dir}; "
                    "name another directory, or replace the model with --overwrite_output_dir"
                )

        on_process_0(lock)
        yield


def modified_at(path):
    """Modification time of a file in ns, or None."""
    return path.stat().st_mtime_ns if path.exists() else None


def write_flags(folder, flags):
    """Write FOLDER/config.json, the flags of a run, a dataclass."""
    write_text(Path(folder, "config.json"), json.dumps(asdict(flags), indent=2) + "\n")


def remove_replaced_model(config, pipeline):
    """Remove the files of a replaced model that the new model lacks.

    Args:
        config: Config of the run.
        pipeline: that the run trains.
    """
    output_dir, is_lora_only = Path(config.output_dir), final_file(config) == LORA_FILE
    parts = {} if is_lora_only else pipeline.components
    index = output_dir / INDEX_NAME
    if index.exists():  # without it, directories of these names are not parts of a model
        for name in PARTS:
            if parts.get(name) is None:
                part = output_dir / name
                if part.is_symlink():
                    part.unlink()
                else:
                    shutil.rmtree(part, ignore_errors=True)  # a mount point stays, empty
    for file in [index] if is_lora_only else [output_dir / LORA_FILE, output_dir / CONV_IN_FILE]:
        file.unlink(missing_ok=True)


def merge_finished_run(config: Config):
    """Write the merged pipeline of a finished run with LoRA; all processes call it together."""
    output_dir = Path(config.output_dir)

    def merge():
        repo_id = check_hub(config.hub_model_id, output_dir) if config.push_to_hub else None
        pipeline = merge_lora(config, compute_dtype(config))
        rows = lines_until_step(output_dir / "metrics.jsonl", math.inf)
        write_card(config, pipeline, json.loads(rows[-1]) if rows else None, repo_id)
        write_flags(output_dir, config)
        print(f"merged {output_dir / LORA_FILE} without training; saved {output_dir}")
        if repo_id:
            print(f"uploaded {push_to_hub(output_dir, repo_id)}")

    on_process_0(merge)
