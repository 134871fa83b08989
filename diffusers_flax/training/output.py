"""The output directory of a run: check and lock it, and write the final model."""

import contextlib
import json
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path

import jax
import numpy as np

from diffusers_flax.command_line import ask_before_replacing
from diffusers_flax.compilation_cache import use_compilation_cache
from diffusers_flax.data.buckets import size_name
from diffusers_flax.devices.processes import start_distributed
from diffusers_flax.generating.flags import with_single_files, write_defaults
from diffusers_flax.loading.directories import CONV_IN_FILE, INDEX_NAME, LORA_FILE
from diffusers_flax.loading.files import read_json
from diffusers_flax.loading.single_file import SingleFile
from diffusers_flax.models.unet import FlaxUNet2DConditionModel
from diffusers_flax.training.checkpoints import CHECKPOINTS_DIR, newest_checkpoint
from diffusers_flax.training.flags import (
    COMPONENT_FLAGS,
    check_flags,
    chosen_sizes,
    final_file,
    flag,
)
from diffusers_flax.training.lora import fold_lora, save_conv_in, save_lora
from diffusers_flax.training.models import (
    is_sdxl,
    load_text_encoder,
    load_vae,
    lora_options,
    params_beside_unet,
    to_float32,
)
from diffusers_flax.training.processes import from_process_0, locked, wait_for_all
from diffusers_flax.training.publishing import check_hub, push_to_hub, write_card
from diffusers_flax.training.reports import NUM_INFERENCE_STEPS, guidance_scales

# Flags that differ between starts of one command.
OF_A_START = {"output_dir", "compilation_cache_dir", "coordinator_address", "num_processes"}
OF_A_START |= {"process_id", "dataloader_num_workers", "hub_model_id"}
MODEL_FILES = {INDEX_NAME, LORA_FILE, CONV_IN_FILE}


@contextlib.contextmanager
def open_run(config):
    """A context for a run: all processes have joined, its flags are checked, output_dir is locked.

    Args:
        config: flags of a program.

    Yields:
        The flags with models of one file opened and sizes named; None if the run is finished.

    Raises:
        ValueError: flags do not fit together, or output_dir cannot be used.
    """
    known = {f.name for f in fields(config)}
    if "coordinator_address" in known:  # else the program runs on one machine
        start_distributed(config.coordinator_address, config.num_processes, config.process_id)
    check_flags(config, jax.device_count())
    if sizes := chosen_sizes(config):
        config = replace(config, aspect_ratio_buckets=tuple(map(size_name, sizes)))
    if not isinstance(config.pretrained_model_name_or_path, SingleFile):  # already opened
        components = {name: x for name, x in COMPONENT_FLAGS.items() if name in known}
        config = with_single_files(config, "pretrained_model_name_or_path", **components)
    with contextlib.ExitStack() as stack:
        finished = False
        if jax.process_index() == 0:
            if not is_finished(config):  # else a run without checkpoints would be refused
                check_output_dir(config)
            stack.enter_context(locked(Path(config.output_dir)))
            finished = is_finished(config)
            if config.push_to_hub and not finished:
                config = replace(config, hub_model_id=check_hub(config))
        wait_for_all("process 0 has checked")
        if from_process_0(np.int32(finished)):
            print(f"{config.output_dir} has the model of this run, which is finished")
            yield None
            return
        if use_compilation_cache(config.compilation_cache_dir):
            # Saving runs many small programs, with no time to compile them at a preemption.
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        yield config


def check_output_dir(config):
    """Raise a ValueError if output_dir is an input of the run, or has files that would be lost."""
    output_dir, given = Path(config.output_dir), flag(config, "output_dir")
    names = {path.name for path in output_dir.iterdir()} if output_dir.is_dir() else set()
    others = (config.cache_latents, config.compilation_cache_dir, *config.train_data_dir)
    others = [Path(path).expanduser() for path in others if path]
    is_run = bool(names & (MODEL_FILES | {CHECKPOINTS_DIR, "metrics.jsonl", "wandb"}))
    replaces = config.overwrite_output_dir or is_run
    ask_before_replacing("output_dir", config.output_dir, replaces, others=others)
    inputs = [getattr(config, name) for name in ("pretrained_model_name_or_path", *COMPONENT_FLAGS)]
    for path in filter(None, inputs):
        if Path(path).resolve().is_relative_to(output_dir.resolve()):
            raise ValueError(f"{given} is or contains the model {path}; name another directory")
    if output_dir.resolve() in [Path(directory).resolve() for directory in config.train_data_dir]:
        raise ValueError(f"{given} is --train_data_dir too; name another directory")
    resumes = config.resume_from_checkpoint == "latest" and newest_checkpoint(output_dir)
    if names & MODEL_FILES and not (config.overwrite_output_dir or resumes):
        raise ValueError(
            f"{given} contains a model and no checkpoint to go on from; name another directory, or "
            "replace the model with --overwrite_output_dir"
        )


def is_finished(config):
    """Whether output_dir has the model of a finished run of the same command.

    A run writes its flags at the start, its model at the end.
    """
    record, model = (Path(config.output_dir, name) for name in ("config.json", final_file(config)))
    if config.overwrite_output_dir or not (record.exists() and model.exists()):
        return False
    defaults = {field.name: field.default for field in fields(config)}  # of flags since then
    defaults, now = (json.loads(json.dumps(x, default=str)) for x in (defaults, asdict(config)))
    saved = defaults | read_json(record)
    is_same = all(saved[name] == now[name] for name in now.keys() - OF_A_START)
    return is_same and model.stat().st_mtime_ns >= record.stat().st_mtime_ns


def save_model(config, pipeline, trained, others, metrics):
    """Write the model of a run and upload it; all processes call it; args of write_model."""
    if jax.process_index() == 0:
        write_model(config, pipeline, trained, others, metrics)
        print(f"saved {config.output_dir}")
        if config.push_to_hub:
            print(f"uploaded {push_to_hub(config.output_dir, config.hub_model_id)}")
    wait_for_all("process 0 has saved")


def write_model(config, pipeline, trained, others, metrics):
    """Write the model of a run and its card to output_dir.

    final_file(config) comes last and marks a finished run.

    Args:
        config: flags of the program.
        pipeline: of load_models.
        trained: {"unet"}, the trained parameters of the UNet, NumPy arrays; with --save_raw_unet
            also {"unet_raw"}, without average.
        others: params_beside_unet, float32; None with LoRA.
        metrics: last row of metrics.jsonl, or None.
    """
    output_dir, is_lora = Path(config.output_dir), config.lora_rank is not None
    if "unet_raw" in trained:
        params = merged_unet(config, trained["unet_raw"]) if is_lora else trained["unet_raw"]
        pipeline.unet.save_pretrained(output_dir / "unet_raw", params=params)
    num_steps = metrics["step"] if metrics else config.max_train_steps
    scales = guidance_scales(config, pipeline, num_steps)
    write_card(config, pipeline, metrics, scales)
    scales = dict(zip(("guidance_scale", "image_guidance_scale"), scales))
    write_defaults(output_dir, **scales, num_inference_steps=NUM_INFERENCE_STEPS)
    for name in [INDEX_NAME] if is_lora else [LORA_FILE, CONV_IN_FILE]:  # of a replaced model
        (output_dir / name).unlink(missing_ok=True)
    if not is_lora:
        pipeline.save_pretrained(output_dir, {"unet": trained["unet"], **others})
        return
    save_conv_in(output_dir / CONV_IN_FILE, trained["unet"])
    save_lora(output_dir / LORA_FILE, trained["unet"], **lora_options(config))
    if config.merge_lora:  # in float32, from the files: frozen parameters may have another dtype
        is_xl = is_sdxl(config)
        _, vae = load_vae(config, np.float32, is_xl)
        _, text_encoder = load_text_encoder(config, np.float32, is_xl, to_float32)
        others = params_beside_unet({"vae": vae, "text_encoder": text_encoder})
        pipeline.save_pretrained(
            output_dir, {"unet": merged_unet(config, trained["unet"]), **others}
        )


def merged_unet(config, trained):
    """Read the UNet's files again and merge the LoRA; returns float32 parameters."""
    fold = partial(fold_lora, trained=trained, rank=config.lora_rank, alpha=config.lora_alpha)
    return FlaxUNet2DConditionModel.from_pretrained(config.unet_model_name_or_path, convert=fold)[1]
