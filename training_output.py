"""The output directory of a training run: lock it, write its flags, replace or merge its model."""

import contextlib
import json
import math
import shutil
from dataclasses import asdict
from pathlib import Path

from command_line import write_text
from config_flax import INDEX_NAME, LORA_FILE, PARTS
from processes_flax import lock_folder, on_process_0
from training_flags import CONV_IN_FILE, Config, final_file
from training_models import compute_dtype, merge_lora
from training_report import check_hub, lines_until_step, push_to_hub, write_card


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
