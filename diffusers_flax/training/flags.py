"""The trainer's flags and their validation."""

from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from diffusers_flax.data.buckets import bucket_sizes, size_name
from diffusers_flax.data.mixture import check_sets
from diffusers_flax.data.options import Columns
from diffusers_flax.loading.directories import INDEX_NAME, LORA_FILE
from diffusers_flax.training.ema import ema_flags, ema_plan

FINAL_FILES = (LORA_FILE, INDEX_NAME)  # written last, by runs with and without LoRA
COMPONENT_FLAGS = {  # flags of models that replace components of the main model
    "unet_model_name_or_path": "unet",
    "pretrained_vae_model_name_or_path": "vae",
}
VALIDATION_SCALES = ("validation_guidance_scale", "validation_image_guidance_scale")
POSITIVE = (
    *("train_batch_size", "max_train_steps", "num_train_epochs", "max_train_samples", "resolution"),
    *("logging_steps", "validation_steps", "checkpoints_total_limit", "ema_snapshot_steps"),
    "lora_rank",
)


def may_change(default: Any = MISSING) -> Any:
    """A flag that may change on resume; it changes results at most by rounding."""
    return field(default=default, metadata={"may_change": True})


def per_process(default: Any = MISSING) -> Any:
    """A flag that may also differ between the processes of a run."""
    return field(default=default, metadata={"may_change": True, "per_process": True})


@dataclass(frozen=True)
class Config:
    # model; on resume, directories may change but not the weights in them
    pretrained_model_name_or_path: str = per_process()  # pipeline directory, hub id or file
    # UNet with 8 input channels, such as create_modified_unet.py's: directory, hub id or file
    unet_model_name_or_path: str = per_process("")
    # another VAE, directory, hub id or file; "": the model's own
    pretrained_vae_model_name_or_path: str = per_process("")
    revision: str | None = may_change(None)  # branch, tag or commit of a hub id
    variant: str | None = may_change(None)  # variant of its files, e.g. fp16
    # configs of one-file models: a directory or hub id; default: their family's
    config_name_or_path: str | None = per_process(None)
    use_ema_weights: bool = may_change(False)  # of a one-file UNet: the averages of its weights
    # data

    # directories of *.parquet shards, all or this host's, or URLs; a batch mixes them
    train_data_dir: tuple[str, ...] = per_process(("data",))
    # weights of several directories, in any unit; default: in proportion to their pairs
    train_data_weights: tuple[float, ...] = may_change(())
    original_image_column: str = ""  # original image; "": as in a known set, docs/data.md
    edited_image_column: str = ""  # edited image; "": likewise
    edit_prompt_column: str = ""  # one or several instructions; "": likewise
    # masks, white where an image may change; read for mask_loss_weight; "": mask_img, mask_image or
    # mask
    mask_column: str = ""
    max_train_samples: int | None = None  # use the first N pairs of each set only; None: all
    resolution: int = 256  # side of the square training images, pixels
    # sizes WIDTHxHEIGHT of about resolution² pixels; a pair gets the nearest aspect ratio; for one
    # train_data_dir; no values: default sizes; default: only squares
    aspect_ratio_buckets: tuple[str, ...] | None = None
    random_crop: bool = True  # crop at a random position, else in the centre
    random_flip: bool = True  # mirror half of the pairs
    image_interpolation_mode: Literal["dct", "lanczos", "bicubic"] = "dct"  # resizing; dct: fastest
    shuffle_buffer: int = 4096  # encoded pairs in memory to draw from, over all hosts
    max_bad_fraction: float = may_change(0.1)  # stop if more of the pairs cannot be used
    dataloader_num_workers: int = per_process(0)  # decoding threads; 0: one per core
    # directory for the VAE's latents; with several train_data_dir a subdirectory for each; "": none
    cache_latents: str = per_process("")
    # training
    train_batch_size: int = 16  # global batch: pairs per optimizer step
    gradient_accumulation_steps: int = may_change(1)  # micro-batches per step
    max_train_steps: int = 15000  # optimizer steps
    # replaces max_train_steps, with one train_data_dir; None: off
    num_train_epochs: int | None = may_change(None)
    learning_rate: float = 5e-5  # peak of the schedule
    lr_scheduler: Literal["constant", "linear", "cosine"] = "constant"  # decay after warm-up
    lr_warmup_steps: int = 0  # steps of linear warm-up from 0
    adam_beta1: float = 0.9  # decay of the first moment
    adam_beta2: float = 0.999  # decay of the second moment
    adam_weight_decay: float = 1e-2  # decoupled, as in AdamW; 0: off
    adam_epsilon: float = 1e-8  # added to the root of the second moment
    max_grad_norm: float = 1.0  # clip the gradient to this global norm
    snr_gamma: float | None = None  # min-SNR loss weighting, 5 in the paper; None: off
    mask_loss_weight: float = 1.0  # loss inside the mask relative to outside; 1: no masks are read
    # probability of dropping the text; the same for the image, and for both; at most 1/3; 0: off
    conditioning_dropout_prob: float = 0.05
    mixed_precision: Literal["no", "bf16"] = "no"  # compute dtype; weights stay float32
    gradient_checkpointing: bool = may_change(False)  # less memory, slower
    # with gradient_checkpointing: a block gathers its parameters when it runs, for models that do
    # not fit into a device's memory; parameters are sent twice
    gather_by_block: bool = may_change(False)
    seed: int = 42  # of data order, augmentation, noise and dropout
    # LoRA: train low-rank updates and the UNet's first convolution; all else is frozen
    lora_rank: int | None = None  # rank of the updates; None: train the whole UNet
    lora_alpha: float | None = None  # updates are scaled by alpha / rank; None: the rank
    # layers with updates, by the ends of their PyTorch names
    lora_target_modules: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0")
    # 8-bit kernels of the frozen UNet and text encoders, with --lora_rank; None: the compute dtype
    storage: Literal["float8", "int8"] | None = None
    merge_lora: bool = may_change(False)  # also write a pipeline that contains the updates
    # exponential moving average (EMA) of the weights
    ema: Literal["none", "late", "full", "power"] = "late"  # late: only the last steps
    ema_fraction: float = 0.036  # late: fraction of the run, at its end, to average
    ema_start_step: int | None = None  # late: first averaged step; replaces ema_fraction
    ema_decay: float | None = None  # decay per step; None: 1 - 5 / (averaged steps)
    ema_every: int = 1  # steps between updates; each has decay ema_decay ** ema_every
    ema_warmup: bool = False  # decay of update n at most (1 + n) / (10 + n), as in diffusers
    ema_snapshot_steps: int | None = None  # power: steps between snapshots; None: 1/8 of the run
    # output
    output_dir: str = per_process("instruct-pix2pix-model")  # for model, checkpoints and metrics
    overwrite_output_dir: bool = may_change(False)  # replace an existing model
    save_raw_unet: bool = may_change(False)  # also save the UNet without EMA, in unet_raw/
    # steps between lines of metrics.jsonl; None: 50, in short runs a twentieth of the run
    logging_steps: int | None = may_change(None)
    report_to: Literal["none", "wandb"] = may_change("none")  # service besides metrics.jsonl
    tracker_project_name: str = may_change("instruct-pix2pix")  # wandb project
    checkpointing_steps: int = may_change(500)  # steps between checkpoints; 0: only when stopped
    checkpoints_total_limit: int | None = may_change(2)  # newest checkpoints to keep; None: all
    resume_from_checkpoint: str = may_change("latest")  # latest, none, or DIR/checkpoints/STEP
    validation_image: tuple[str, ...] = may_change(())  # images to edit during training
    validation_prompt: tuple[str, ...] = may_change(())  # an instruction for each, or one for all
    # weight of the instruction in these edits; default: 7.5, SDXL 3, CosXL 7, short runs 2
    validation_guidance_scale: float | None = may_change(None)
    # similarity of these edits to the original image; default: 1.5, short runs 1.2
    validation_image_guidance_scale: float | None = may_change(None)
    validation_steps: int = may_change(500)  # steps between validations, saved in validation/
    profile_steps: str = may_change("")  # FIRST:LAST, steps to trace into profile/; "": none
    push_to_hub: bool = may_change(False)  # upload the model; needs HF_TOKEN or `hf auth login`
    hub_model_id: str | None = may_change(None)  # OWNER/NAME; None: the name of output_dir
    compilation_cache_dir: str = per_process("~/.cache/jax")  # cache of compiled programs; "": none
    # several hosts without a TPU slice, Slurm or Open MPI: give all three flags
    coordinator_address: str | None = per_process(None)  # HOST:PORT of process 0
    num_processes: int | None = may_change(None)  # number of processes on all hosts
    process_id: int | None = per_process(None)  # index of this process, from 0


def fixed_flags(config: Any, unless: str) -> dict[str, Any]:
    """{name: value} of the flags without the metadata `unless`.

    Args:
        config: dataclass of flags.
        unless: "may_change" or "per_process".
    """
    return {
        f.name: getattr(config, f.name) for f in fields(config) if not f.metadata.get(unless, False)
    }


def flag(config: Config, name: str) -> str:
    """Format a flag for an error message: "--name value"."""
    return f"--{name} {getattr(config, name)}"


def nearest_multiples(number: int, factor: int) -> str:
    """Format the positive multiples of factor nearest to number: "2 or 4"."""
    below = number // factor * factor
    return " or ".join(str(n) for n in (below, below + factor) if n > 0)


def profiled_steps(text: str) -> tuple[int, int]:
    """Parse "FIRST:LAST" into the first and last profiled step, from 0; (-1, -1) for ""."""
    if not text:
        return -1, -1
    numbers = text.split(":")
    if (
        len(numbers) != 2
        or not all(map(str.isdecimal, numbers))
        or int(numbers[0]) > int(numbers[1])
    ):
        raise ValueError(f"--profile_steps {text} must be FIRST:LAST, two step numbers; try 10:12")
    return int(numbers[0]), int(numbers[1])


def chosen_columns(config: Any, masks: bool) -> Columns:
    """The columns that flags choose; masks: read masks, too."""
    return Columns(
        config.original_image_column,
        config.edited_image_column,
        config.edit_prompt_column,
        mask=config.mask_column if masks else None,
    )


def check_flags(config: Config, num_devices: int) -> None:
    """Raise a ValueError for invalid flags; training.output.check_run_dir checks --output_dir."""
    if not config.unet_model_name_or_path:
        raise ValueError(
            "--unet_model_name_or_path is missing; give the output of create_modified_unet.py "
            f"--pretrained_model_name_or_path {config.pretrained_model_name_or_path}"
        )
    check_numbers(config)
    check_batch(config, num_devices)
    check_combinations(config)


def check_numbers(config: Config) -> None:
    """Raise a ValueError for a number out of range."""
    for name in POSITIVE:
        if getattr(config, name) is not None and getattr(config, name) < 1:
            raise ValueError(f"{flag(config, name)} must be at least 1")
    for name in ("learning_rate", "max_grad_norm", "adam_epsilon"):
        if not 0 < getattr(config, name) < float("inf"):
            raise ValueError(f"{flag(config, name)} must be above 0 and finite")
    for name in ("adam_beta1", "adam_beta2"):
        if not 0 <= getattr(config, name) < 1:
            raise ValueError(f"{flag(config, name)} must be at least 0 and below 1")
    not_negative = ("adam_weight_decay", "checkpointing_steps", "shuffle_buffer")
    for name in (*not_negative, "dataloader_num_workers"):
        if not getattr(config, name) >= 0:
            raise ValueError(f"{flag(config, name)} must be at least 0")
    if config.snr_gamma is not None and not 0 < config.snr_gamma < float("inf"):
        raise ValueError(f"{flag(config, 'snr_gamma')} must be above 0 and finite; 5 is usual")
    if not 0 < config.mask_loss_weight < float("inf"):
        raise ValueError(f"{flag(config, 'mask_loss_weight')} must be above 0 and finite; try 3")
    for name in VALIDATION_SCALES:
        if getattr(config, name) is not None and not 0 <= getattr(config, name) < float("inf"):
            raise ValueError(
                f"{flag(config, name)} must be at least 0 and finite; 1 is no guidance"
            )
    if not 0 <= config.seed < 2**32:
        raise ValueError(f"{flag(config, 'seed')} must be from 0 to 4294967295")
    if not 0 <= config.conditioning_dropout_prob <= 1 / 3:
        raise ValueError(
            f"{flag(config, 'conditioning_dropout_prob')} must be from 0 to 1/3, as it applies "
            "to three cases"
        )
    if not 0 <= config.max_bad_fraction <= 1:
        raise ValueError(f"{flag(config, 'max_bad_fraction')} must be from 0 to 1")
    profiled_steps(config.profile_steps)


def check_batch(config: Config, num_devices: int) -> None:
    """Raise a ValueError for a batch that cannot be divided over devices and micro-batches."""
    if config.train_batch_size % num_devices:
        raise ValueError(
            f"{flag(config, 'train_batch_size')} is not divisible by {num_devices} devices; try "
            f"{nearest_multiples(config.train_batch_size, num_devices)}"
        )
    per_device = config.train_batch_size // num_devices
    if config.gradient_accumulation_steps < 1 or per_device % config.gradient_accumulation_steps:
        raise ValueError(
            f"{flag(config, 'gradient_accumulation_steps')} must divide the {per_device} pairs per "
            f"device ({flag(config, 'train_batch_size')} on {num_devices} devices)"
        )


def chosen_sizes(config: Any) -> tuple[tuple[int, int], ...] | None:
    """The sizes of --aspect_ratio_buckets; None without the flag."""
    if config.aspect_ratio_buckets is None:
        return None
    return bucket_sizes(config.resolution, config.aspect_ratio_buckets)


def named_buckets(config: Any) -> Any:
    """The flags with the default sizes of --aspect_ratio_buckets written out."""
    sizes = chosen_sizes(config)
    names = None if sizes is None else tuple(map(size_name, sizes))
    return replace(config, aspect_ratio_buckets=names)


def check_combinations(config: Config) -> None:
    """Raise a ValueError for flags that contradict each other."""
    check_sets(config.train_data_dir, config.train_data_weights, chosen_sizes(config))
    if config.num_train_epochs is not None and len(config.train_data_dir) > 1:
        raise ValueError(
            f"{flag(config, 'num_train_epochs')} goes with one --train_data_dir, as each set has "
            "epochs of its own; give --max_train_steps"
        )
    if config.num_train_epochs is not None and config.max_train_steps != Config.max_train_steps:
        raise ValueError(
            f"{flag(config, 'num_train_epochs')} and {flag(config, 'max_train_steps')} both set "
            "the length of the run; leave out one"
        )
    if config.ema_snapshot_steps is not None and config.ema != "power":
        raise ValueError(
            f"{flag(config, 'ema_snapshot_steps')} goes with --ema power, not {config.ema}"
        )
    if (config.ema_snapshot_steps or 0) % max(1, config.ema_every):
        raise ValueError(
            f"{flag(config, 'ema_snapshot_steps')} must be a multiple of "
            f"{flag(config, 'ema_every')}"
        )
    if config.mask_column and config.mask_loss_weight == 1:
        raise ValueError(
            f"{flag(config, 'mask_column')} goes with --mask_loss_weight, for example 3"
        )
    if config.gather_by_block and not config.gradient_checkpointing:
        raise ValueError("--gather_by_block goes with --gradient_checkpointing; add it")
    check_lora(config)
    num_images, num_prompts = len(config.validation_image), len(config.validation_prompt)
    if num_prompts not in (num_images, min(1, num_images)):
        raise ValueError(
            f"{num_images} --validation_image and {num_prompts} --validation_prompt do not match; "
            "give one instruction for each image, or one for all"
        )
    for name in VALIDATION_SCALES:
        if getattr(config, name) is not None and not num_images:
            raise ValueError(f"{flag(config, name)} goes with --validation_image; name an image")
    if config.hub_model_id is not None and not config.push_to_hub:
        raise ValueError(f"{flag(config, 'hub_model_id')} goes with --push_to_hub")
    if config.cache_latents and config.random_crop:
        raise ValueError(
            "--cache_latents stores latents of the centre of each image; add --no_random_crop (it "
            "changes nothing for square images)"
        )
    if config.num_train_epochs is None:
        check_schedules(config, config.max_train_steps)


def check_lora(config: Config) -> None:
    """Raise a ValueError for flags that contradict --lora_rank, and a LoRA instead of a UNet."""
    if Path(config.unet_model_name_or_path, LORA_FILE).exists():
        raise ValueError(
            f"{flag(config, 'unet_model_name_or_path')} is the output of a run with --lora_rank, "
            "not a UNet; give the UNet that it was trained from, or its unet/ if it was merged"
        )
    if config.lora_rank is None:
        for name in ("lora_alpha", "lora_target_modules", "storage", "merge_lora"):
            if getattr(config, name) != getattr(Config, name):
                raise ValueError(f"--{name} goes with --lora_rank, for example --lora_rank 16")
        return
    if config.lora_alpha is not None and not 0 < config.lora_alpha < float("inf"):
        raise ValueError(f"{flag(config, 'lora_alpha')} must be above 0 and finite")
    if not config.lora_target_modules:
        raise ValueError("--lora_target_modules is empty; leave it out for attention's layers")
    if config.ema == "power":
        raise ValueError("--ema power does not go with --lora_rank; use --ema full, late or none")


def final_file(config: Config) -> str:
    """Name of the file that a run writes last, which marks the run as finished."""
    is_lora_only = config.lora_rank is not None and not config.merge_lora
    return LORA_FILE if is_lora_only else INDEX_NAME


def check_schedules(config: Config, max_train_steps: int) -> None:
    """Raise a ValueError for a warm-up, EMA or profile that does not fit into max_train_steps."""
    if not 0 <= config.lr_warmup_steps < max_train_steps:
        raise ValueError(
            f"{flag(config, 'lr_warmup_steps')} must be at least 0 and below --max_train_steps "
            f"{max_train_steps}"
        )
    ema_plan(*ema_flags(config, max_train_steps))
    if (steps := snapshot_steps(config, max_train_steps)) > max_train_steps:
        raise ValueError(
            f"--ema_snapshot_steps {steps} is more than the run's {max_train_steps} steps; use "
            "an eighth of them or less"
        )
    if profiled_steps(config.profile_steps)[1] >= max_train_steps:
        raise ValueError(
            f"{flag(config, 'profile_steps')} must be between 0 and {max_train_steps - 1}"
        )


def steps_between_rows(config: Config, max_train_steps: int) -> int:
    """Steps between lines of metrics.jsonl."""
    return config.logging_steps or min(50, max(1, max_train_steps // 20))


def snapshot_steps(config: Config, max_train_steps: int) -> int:
    """Steps between EMA snapshots, a multiple of ema_every; 0: no snapshots."""
    if config.ema != "power":
        return 0
    eighth = max_train_steps // 8 // config.ema_every * config.ema_every
    return config.ema_snapshot_steps or max(config.ema_every, eighth)
