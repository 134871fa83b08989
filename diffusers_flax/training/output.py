"""The output directory of a run: check and lock it, and write the final model."""

import contextlib
import json
import math
import shutil
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path

import jax
import numpy as np

from diffusers_flax.command_line import ask_before_replacing, check_writable
from diffusers_flax.compilation_cache import use_compilation_cache
from diffusers_flax.devices.processes import start_distributed
from diffusers_flax.generating.defaults import write_defaults
from diffusers_flax.generating.single_files import with_single_files
from diffusers_flax.loading.directories import COMPONENTS, CONV_IN_FILE, INDEX_NAME, LORA_FILE
from diffusers_flax.loading.files import read_json
from diffusers_flax.loading.single_file import SingleFile
from diffusers_flax.messages import differences
from diffusers_flax.models.unet import FlaxUNet2DConditionModel
from diffusers_flax.training.checkpoints import CHECKPOINTS_DIR, check_goes_on, release_memory
from diffusers_flax.training.flags import (
    COMPONENT_FLAGS,
    FINAL_FILES,
    MAY_CHANGE,
    check_flags,
    final_file,
    fixed_flags,
    flag,
    named_buckets,
    write_flags,
)
from diffusers_flax.training.lora import fold_lora, read_lora, read_record, save_conv_in, save_lora
from diffusers_flax.training.models import (
    WEIGHTS,
    checksums,
    is_sdxl,
    load_models,
    load_text_encoder,
    lora_options,
    mixed_precision_dtype,
    params_beside_unet,
    to_float32,
)
from diffusers_flax.training.processes import (
    from_process_0,
    lock_folder,
    on_process_0,
    wait_for_all,
)
from diffusers_flax.training.publishing import check_hub, push_to_hub, scales_of_run, write_card
from diffusers_flax.training.reports import lines_until_step
from diffusers_flax.training.validation import NUM_INFERENCE_STEPS, load_validation_images

# Flags that differ between starts of one command.
OF_A_START = {"output_dir", "compilation_cache_dir", "coordinator_address", "num_processes"}
OF_A_START |= {"process_id", "dataloader_num_workers"}
UPLOADED = ".uploaded"  # marks a finished run whose model is on the hub


@contextlib.contextmanager
def open_run(config):
    """A context for a run: all processes have joined, its flags are checked, output_dir is locked.

    Args:
        config: flags of a program.

    Yields:
        The flags with models of one file opened and sizes named; None if nothing is left to do,
        because the run is finished or only its LoRA was to be merged.

    Raises:
        ValueError: flags do not fit together, or output_dir cannot be used.
    """
    known = {f.name for f in fields(config)}
    if "coordinator_address" in known:  # else the program runs on one machine
        start_distributed(config.coordinator_address, config.num_processes, config.process_id)
    check_flags(config, jax.device_count())
    config = named_buckets(config)
    if not isinstance(config.pretrained_model_name_or_path, SingleFile):  # already opened
        components = {name: x for name, x in COMPONENT_FLAGS.items() if name in known}
        config = with_single_files(config, "pretrained_model_name_or_path", **components)
    load_validation_images(config)  # an error ends the run early
    folder = Path(config.output_dir)
    check_output_dir(config)
    on_process_0(lambda: check_writable(flag(config, "output_dir"), folder))
    model_before = modified_at(folder / final_file(config))
    with contextlib.ExitStack() as stack:
        on_process_0(lambda: stack.enter_context(lock_folder(folder)))
        trains = on_process_0(lambda: is_left_to_train(config, model_before))
        if not from_process_0(np.int32(bool(trains))):
            yield None
            return
        if use_compilation_cache(config.compilation_cache_dir):
            # Saving runs many small programs, with no time to compile them at a preemption.
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        yield config


def is_left_to_train(config, model_before):
    """Whether a run is not finished; merges the LoRA of a finished run if only that is left.

    Process 0 calls it.

    Args:
        config: flags of a program.
        model_before: modified_at of the model before the lock was requested.

    Raises:
        ValueError: output_dir has something that would be lost, or the hub refuses an upload.
    """
    folder = Path(config.output_dir)
    if modified_at(folder / final_file(config)) != model_before:
        raise ValueError(
            f"a run that has just ended has written a model to --output_dir {folder}; name "
            "another directory, or replace the model with --overwrite_output_dir"
        )
    if says_finished(config):
        return False
    if merges_finished_run(config):
        merge_finished_run(config)
        return False
    check_replaces(config)
    if config.push_to_hub:
        check_hub(config.hub_model_id, folder)
    return True


def modified_at(path):
    """Modification time of a file in ns, or None."""
    return path.stat().st_mtime_ns if path.exists() else None


def check_output_dir(config):
    """Raise a ValueError if output_dir is no directory, or is an input of the run."""
    if not config.output_dir:
        raise ValueError("--output_dir is empty; name a directory")
    output_dir, given = Path(config.output_dir), flag(config, "output_dir")
    if output_dir.is_file():
        raise ValueError(f"{given} is a file; name a directory")
    for name in ("pretrained_model_name_or_path", *COMPONENT_FLAGS):
        value = getattr(config, name)
        if value and Path(value).resolve().is_relative_to(output_dir.resolve()):
            raise ValueError(f"{given} is or contains {flag(config, name)}; name another directory")
    if output_dir.resolve() in [Path(directory).resolve() for directory in config.train_data_dir]:
        raise ValueError(f"{given} is --train_data_dir too; name another directory")


def check_replaces(config):
    """Raise a ValueError if output_dir cannot be written, or has files that would be lost."""
    output_dir = Path(config.output_dir)
    names = {path.name for path in output_dir.iterdir()} if output_dir.is_dir() else set()
    # conv_in is written before a LoRA: a run that was killed in between has checkpoints, too.
    if names & {*FINAL_FILES, CONV_IN_FILE} and not config.overwrite_output_dir:
        check_goes_on(config)
    is_run = names & {*FINAL_FILES, CONV_IN_FILE, CHECKPOINTS_DIR, "metrics.jsonl", "wandb"}
    others = (config.cache_latents, config.compilation_cache_dir, *config.train_data_dir)
    others = [Path(path).expanduser() for path in others if path]
    replaces = config.overwrite_output_dir or bool(is_run)
    ask_before_replacing("output_dir", output_dir, replaces, others=others)


def says_finished(config):
    """Whether output_dir has the model of a finished run of the same command; if so, say it."""
    folder = Path(config.output_dir)
    record, files = folder / "config.json", [folder / final_file(config)]
    files += [folder / INDEX_NAME] if config.merge_lora else []
    files += [folder / UPLOADED] if config.push_to_hub else []
    if config.overwrite_output_dir or not all(path.exists() for path in (record, *files)):
        return False
    # A run writes its flags at the start, its model at the end.
    if max(path.stat().st_mtime_ns for path in files) < record.stat().st_mtime_ns:
        return False
    saved, now = read_json(record), json.loads(json.dumps(asdict(config), default=str))
    if any(saved.get(name) != now[name] for name in now.keys() - OF_A_START):
        return False
    print(f"{folder} has the model of this run, which is finished; nothing is left to do")
    return True


def save_model(config, pipeline, trained, others, identity, reports):
    """Write the model of a run, its card and plot, and upload it; all processes call it together.

    final_file(config) comes last and marks a finished run.

    Args:
        config: flags of the program.
        pipeline: of load_models.
        trained: {"unet"}, the trained parameters of the UNet, NumPy arrays; with --save_raw_unet
            also {"unet_raw"}, without average.
        others: params_beside_unet, float32; None with LoRA.
        identity: of run_identity.
        reports: Reports.
    """
    release_memory()
    reports.close()
    if jax.process_index() == 0:
        output_dir, repo_id, error = Path(config.output_dir), None, None
        try:
            repo_id = check_hub(config.hub_model_id, output_dir) if config.push_to_hub else None
        except ValueError as refused:  # the model is saved first
            error = refused
        write_model(config, pipeline, trained, others, identity, reports.last_row, repo_id)
        print(f"saved {output_dir}")
        if error:
            raise error
        upload(config, repo_id)
    wait_for_all("process 0 has saved")


def write_model(config, pipeline, trained, others, identity, metrics, repo_id=None):
    """Write the model of a run and its card to output_dir.

    Args:
        config, pipeline, trained, others, identity: as for save_model.
        metrics: last row of metrics.jsonl, or None.
        repo_id: hub id, if the model is published.
    """
    output_dir, is_lora = Path(config.output_dir), config.lora_rank is not None
    if "unet_raw" in trained:
        params = trained["unet_raw"]
        params = merged_unet(config, params) if is_lora else params
        pipeline.unet.save_pretrained(output_dir / "unet_raw", params=params)
    write_card(config, pipeline, metrics, repo_id)
    write_scales(config, pipeline, metrics)
    remove_replaced_model(config, pipeline)
    if not is_lora:
        pipeline.save_pretrained(output_dir, {"unet": trained["unet"], **others})
        return
    save_conv_in(output_dir / CONV_IN_FILE, trained["unet"])
    save_lora_file(config, trained["unet"], identity)
    if config.merge_lora:
        merge_lora(config, pipeline.unet.dtype)


def upload(config, repo_id):
    """Upload output_dir to the hub; repo_id None: not."""
    if repo_id:
        print(f"uploaded {push_to_hub(config.output_dir, repo_id)}")
        Path(config.output_dir, UPLOADED).touch()


def write_scales(config, pipeline, metrics):
    """Write the scales and steps that programs take for the model of a run."""
    s_T, s_I = scales_of_run(config, pipeline, metrics)
    scales = dict(guidance_scale=s_T, image_guidance_scale=s_I)
    write_defaults(config.output_dir, **scales, num_inference_steps=NUM_INFERENCE_STEPS)


def remove_replaced_model(config, pipeline):
    """Remove the files of a replaced model that the new model, of `pipeline`, lacks."""
    output_dir, is_lora_only = Path(config.output_dir), final_file(config) == LORA_FILE
    components = {} if is_lora_only else pipeline.components
    index = output_dir / INDEX_NAME
    if index.exists():  # without it, directories of these names are not components
        for name in COMPONENTS:
            if components.get(name) is None:
                folder = output_dir / name
                if folder.is_symlink():
                    folder.unlink()
                else:
                    shutil.rmtree(folder, ignore_errors=True)  # a mount point stays, empty
    for file in [index] if is_lora_only else [output_dir / LORA_FILE, output_dir / CONV_IN_FILE]:
        file.unlink(missing_ok=True)


# LoRA


def lora_identity(config, checksums):
    """What must be the same when --merge_lora is given later, as JSON, besides the run's length."""
    flags = fixed_flags(config, MAY_CHANGE)
    del flags["max_train_steps"]
    flags["lora_alpha"] = config.lora_alpha or config.lora_rank
    return json.loads(json.dumps(flags | checksums))


def save_lora_file(config, trained, identity):
    """Write the LoRA with a record of its run; arguments as for save_model."""
    sums = {name: identity[name] for name in WEIGHTS}
    length = {"max_train_steps": identity["max_train_steps"]}
    length["num_train_epochs"] = config.num_train_epochs
    record = lora_identity(config, sums) | length
    save_lora(Path(config.output_dir, LORA_FILE), trained, **lora_options(config), run=record)


def merges_finished_run(config):
    """Whether only --merge_lora is left to do: output_dir has the LoRA of a run of this length."""
    file, pipeline = (Path(config.output_dir, name) for name in FINAL_FILES)
    is_replaced = config.overwrite_output_dir or pipeline.exists()
    if not config.merge_lora or is_replaced or not file.exists():
        return False
    saved = read_record(file)
    if saved is None:
        return True  # merge_lora says what is wrong with the file
    if config.num_train_epochs is not None:  # without the data the number of steps is unknown
        return config.num_train_epochs == saved.get("num_train_epochs")
    return config.max_train_steps == saved.get("max_train_steps")


def merge_lora(config, dtype):
    """Write the merged pipeline of a finished run with LoRA, read from its files, to output_dir.

    Args:
        config: flags of the program.
        dtype: compute dtype of the run.

    Returns:
        The pipeline, without its parameters.

    Raises:
        ValueError: the run had other flags or models.
    """
    file = Path(config.output_dir, LORA_FILE)
    trained, saved = read_lora(file, file.with_name(CONV_IN_FILE))
    _, pipeline, frozen, params = load_models(config, dtype)
    if jax.tree.structure(trained) != jax.tree.structure(params):
        raise ValueError(f"{file} or {CONV_IN_FILE} next to it is damaged; copy both files again")
    current = lora_identity(config, checksums(frozen, params))
    if different := differences({name: saved.get(name) for name in current}, current):
        raise ValueError(
            f"{file} belongs to another run: {'; '.join(different)}. Give the flags and models in "
            "its config.json, or start again with --overwrite_output_dir"
        )
    others = {"vae": frozen["vae"]}  # in float32 already
    del frozen, params  # free memory
    _, others["text_encoder"] = load_text_encoder(config, np.float32, is_sdxl(config), to_float32)
    others = params_beside_unet(others)
    pipeline.save_pretrained(config.output_dir, {"unet": merged_unet(config, trained), **others})
    return pipeline


def merged_unet(config, trained):
    """Read the UNet's files again and merge the LoRA; returns float32 parameters."""
    fold = partial(fold_lora, trained=trained, rank=config.lora_rank, alpha=config.lora_alpha)
    return FlaxUNet2DConditionModel.from_pretrained(config.unet_model_name_or_path, convert=fold)[1]


def merge_finished_run(config):
    """Write the merged pipeline of a finished run with LoRA, without training."""
    output_dir = Path(config.output_dir)
    repo_id = check_hub(config.hub_model_id, output_dir) if config.push_to_hub else None
    pipeline = merge_lora(config, mixed_precision_dtype(config))
    rows = lines_until_step(output_dir / "metrics.jsonl", math.inf)
    write_card(config, pipeline, json.loads(rows[-1]) if rows else None, repo_id)
    write_flags(output_dir, config)
    (output_dir / INDEX_NAME).touch()  # see says_finished
    print(f"merged {output_dir / LORA_FILE} without training; saved {output_dir}")
    upload(config, repo_id)
