"""Checks of the trainer's flags that concern several of them, and what depends on flags alone.

`config` is the dataclass of a program's flags: the trainer's Config, or one with the same names.
"""

from dataclasses import fields
from pathlib import Path
from typing import Any

from diffusers_flax.data.buckets import bucket_sizes
from diffusers_flax.data.mixture import check_sets
from diffusers_flax.data.options import Columns
from diffusers_flax.data.shards import REFERENCE
from diffusers_flax.loading.directories import INDEX_NAME, LORA_FILE
from diffusers_flax.training.ema import ema_plan

COMPONENT_FLAGS = {  # flags of models that replace components of the main model
    "unet_model_name_or_path": "unet",
    "pretrained_vae_model_name_or_path": "vae",
}
VALIDATION_SCALES = ("validation_guidance_scale", "validation_image_guidance_scale")
# Flags that may differ between the processes of a run, and may change on resume. Directories may
# change, but not the weights and pairs in them.
PER_PROCESS = {
    *("pretrained_model_name_or_path", "unet_model_name_or_path", "config_name_or_path"),
    *("pretrained_vae_model_name_or_path", "train_data_dir", "dataloader_num_workers"),
    *("cache_latents", "output_dir", "compilation_cache_dir", "coordinator_address", "process_id"),
    "hub_model_id",  # of which process 0 asks the hub
}
# Flags that may change on resume: results change at most by rounding. All others may not.
MAY_CHANGE = PER_PROCESS | {
    *("revision", "variant", "use_ema_weights", "train_data_weights", "max_bad_fraction"),
    *("gradient_accumulation_steps", "num_train_epochs", "gradient_checkpointing"),
    *("gather_by_block", "merge_lora", "overwrite_output_dir", "save_raw_unet", "logging_steps"),
    *("report_to", "tracker_project_name", "checkpointing_steps", "checkpoints_total_limit"),
    *("resume_from_checkpoint", "validation_image", "validation_prompt", *VALIDATION_SCALES),
    *("validation_reference", "validation_steps", "profile_steps", "push_to_hub", "num_processes"),
}


class TrainerFlags:
    """Values of the trainer's flags that a program does not have, for the functions of training/.

    A Config of such a program has this class as its base.
    """

    pretrained_vae_model_name_or_path = mask_column = cache_latents = profile_steps = ""
    conditioning_dropout_prob = 0.0
    config_name_or_path = revision = variant = num_train_epochs = storage = hub_model_id = None
    optimizer = "adamw"
    prediction = coordinator_address = num_processes = process_id = ema_snapshot_steps = None
    validation_guidance_scale = validation_image_guidance_scale = snr_gamma = None
    aspect_ratio_buckets = None
    merge_lora = gather_by_block = push_to_hub = use_ema_weights = ema_warmup = False
    ema, ema_fraction, ema_start_step, ema_decay, ema_every = "none", 1.0, None, None, 1
    image_interpolation_mode, shuffle_buffer, max_bad_fraction = "dct", 4096, 0.1
    gradient_accumulation_steps, mask_loss_weight, report_to = 1, 1.0, "none"
    validation_image = validation_prompt = validation_reference = train_data_weights = ()
    validation_steps = 500


def fixed_flags(config: Any, unless: set[str]) -> dict[str, Any]:
    """{name: value} of the flags but those in `unless`, which is MAY_CHANGE or PER_PROCESS."""
    return {f.name: getattr(config, f.name) for f in fields(config) if f.name not in unless}


def flag(config: Any, name: str) -> str:
    """Format a flag for an error message: "--name value"."""
    return f"--{name} {getattr(config, name)}"


def profiled_steps(text: str) -> tuple[int, int]:
    """Parse "FIRST:LAST" into the first and last profiled step, from 0; (-1, -1) for ""."""
    if not text:
        return -1, -1
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        raise ValueError(f"--profile_steps {text} must be FIRST:LAST, two step numbers; try 10:12")
    return int(first), int(last)


def chosen_columns(config: Any, masks: bool, references: bool) -> Columns:
    """The columns that flags choose; masks, references: read these, too."""
    reference = config.reference_image_column
    if reference and not references:
        raise ValueError(
            f"{flag(config, 'reference_image_column')} needs a UNet that takes two images, from "
            "create_modified_unet.py --num_images 2"
        )
    return Columns(
        config.original_image_column,
        config.edited_image_column,
        config.edit_prompt_column,
        mask=config.mask_column if masks else None,
        reference_image=(reference or REFERENCE) if references else None,
    )


def chosen_sizes(config: Any) -> tuple[tuple[int, int], ...] | None:
    """The sizes of --aspect_ratio_buckets; None without the flag."""
    if config.aspect_ratio_buckets is None:
        return None
    return bucket_sizes(config.resolution, config.aspect_ratio_buckets)


def check_flags(config: Any, num_devices: int) -> None:
    """Raise a ValueError for flags that do not fit together; ranges are beside their types."""
    if not config.unet_model_name_or_path:
        raise ValueError(
            "--unet_model_name_or_path is missing; give the output of create_modified_unet.py "
            f"--pretrained_model_name_or_path {config.pretrained_model_name_or_path}"
        )
    for name, part in COMPONENT_FLAGS.items():
        if (given := getattr(config, name)) and Path(given, part).is_dir():
            raise ValueError(f"{flag(config, name)} is a pipeline; give {Path(given, part)}")
    check_batch(config, num_devices)
    check_combinations(config)
    profiled_steps(config.profile_steps)


def check_batch(config: Any, num_devices: int) -> None:
    """Raise a ValueError for a batch that cannot be divided over devices and micro-batches."""
    if config.train_batch_size % num_devices:
        below = config.train_batch_size // num_devices * num_devices
        near = " or ".join(str(n) for n in (below, below + num_devices) if n)
        raise ValueError(
            f"{flag(config, 'train_batch_size')} is not divisible by {num_devices} devices; try "
            f"{near}"
        )
    per_device = config.train_batch_size // num_devices
    if per_device % config.gradient_accumulation_steps:
        raise ValueError(
            f"{flag(config, 'gradient_accumulation_steps')} must divide the {per_device} pairs per "
            f"device ({flag(config, 'train_batch_size')} on {num_devices} devices)"
        )


def check_combinations(config: Any) -> None:
    """Raise a ValueError for flags that contradict each other."""
    check_sets(config.train_data_dir, config.train_data_weights, chosen_sizes(config))
    if config.num_train_epochs is not None and len(config.train_data_dir) > 1:
        raise ValueError(
            f"{flag(config, 'num_train_epochs')} goes with one --train_data_dir, as each set has "
            "epochs of its own; give --max_train_steps"
        )
    defaults = type(config)
    has_steps = config.max_train_steps != defaults.max_train_steps
    if config.num_train_epochs is not None and has_steps:
        raise ValueError(
            f"{flag(config, 'num_train_epochs')} and {flag(config, 'max_train_steps')} both set "
            "the length of the run; leave out one"
        )
    num_images, num_prompts = len(config.validation_image), len(config.validation_prompt)
    if num_prompts not in (num_images, min(1, num_images)):
        raise ValueError(
            f"{num_images} --validation_image and {num_prompts} --validation_prompt do not match; "
            "give one instruction for each image, or one for all"
        )
    if (number := len(config.validation_reference)) not in (0, min(1, num_images), num_images):
        raise ValueError(
            f"{num_images} --validation_image and {number} --validation_reference do not match; "
            "give one reference for each image, or one for all"
        )
    if config.cache_latents and config.random_crop:
        raise ValueError(
            "--cache_latents stores latents of the centre of each image; add --no_random_crop (it "
            "changes nothing for square images)"
        )
    if config.ema == "power" and config.lora_rank is not None:
        raise ValueError("--ema power does not go with --lora_rank; use --ema full, late or none")
    if config.prediction == "flow" and config.lora_rank is not None and not config.merge_lora:
        raise ValueError(
            "--prediction flow with --lora_rank needs --merge_lora, as a LoRA has no scheduler; "
            "once the model is a flow, leave --prediction out"
        )
    if config.optimizer == "schedule_free":
        name = "--optimizer schedule_free"
        if config.ema != "none" or config.lr_scheduler != "constant":
            remedy = "add --ema none --lr_scheduler constant"
            raise ValueError(f"{name} averages the weights itself; {remedy}")
        if config.save_raw_unet:
            raise ValueError(f"{name} has no other weights worth saving; leave out --save_raw_unet")
        if config.adam_beta1 == 0:
            raise ValueError(f"{name} divides by --adam_beta1 0; 0.9 is usual")
    needs = {  # flags: what they go with, and whether it is given
        ("lora_alpha", "lora_target_modules", "storage", "merge_lora"): (
            "--lora_rank, for example --lora_rank 16",
            config.lora_rank is not None,
        ),
        VALIDATION_SCALES: ("--validation_image; name an image", num_images > 0),
        ("hub_model_id",): ("--push_to_hub", config.push_to_hub),
        ("ema_snapshot_steps",): (f"--ema power, not {config.ema}", config.ema == "power"),
        ("mask_column",): ("--mask_loss_weight, for example 3", config.mask_loss_weight != 1),
        ("gather_by_block",): ("--gradient_checkpointing", config.gradient_checkpointing),
        ("adam_beta1", "adam_beta2"): (
            "another --optimizer than adafactor",
            config.optimizer != "adafactor",
        ),
        ("adam_epsilon",): (
            "--optimizer adamw, muon or schedule_free",
            config.optimizer not in ("adafactor", "lion"),
        ),
    }
    for names, (needed, has_it) in needs.items():
        for name in names:
            if not has_it and getattr(config, name) != getattr(defaults, name):
                raise ValueError(f"{flag(config, name)} goes with {needed}")
    if config.num_train_epochs is None:
        check_schedules(config, config.max_train_steps)


def final_file(config: Any) -> str:
    """Name of the file that a run writes last, which marks the run as finished."""
    is_lora_only = config.lora_rank is not None and not config.merge_lora
    return LORA_FILE if is_lora_only else INDEX_NAME


def check_schedules(config: Any, max_train_steps: int) -> None:
    """Raise a ValueError for a warm-up or EMA that does not fit into max_train_steps."""
    if config.lr_warmup_steps >= max_train_steps:
        raise ValueError(
            f"{flag(config, 'lr_warmup_steps')} must be below --max_train_steps {max_train_steps}"
        )
    ema_plan(config, max_train_steps)
    steps = snapshot_steps(config, max_train_steps)
    if steps > max_train_steps or steps % config.ema_every:
        raise ValueError(
            f"--ema_snapshot_steps {steps} must be a multiple of {flag(config, 'ema_every')} and "
            f"at most the run's {max_train_steps} steps; an eighth of them is usual"
        )


def snapshot_steps(config: Any, max_train_steps: int) -> int:
    """Steps between EMA snapshots, a multiple of ema_every; 0: no snapshots."""
    if config.ema != "power":
        return 0
    eighth = max_train_steps // 8 // config.ema_every * config.ema_every
    return config.ema_snapshot_steps or max(config.ema_every, eighth)
