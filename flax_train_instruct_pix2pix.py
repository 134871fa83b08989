"""Fine-tune Stable Diffusion into InstructPix2Pix: one readable pmap loop.

    python flax_train_instruct_pix2pix.py \\
        --pretrained_model_name_or_path stable-diffusion-v1-5/stable-diffusion-v1-5 \\
        --unet_model_name_or_path modified_unet --train_data_dir data --output_dir instruct-pix2pix

`modified_unet` is what create_modified_unet.py wrote; `data` is a folder of parquet shards. On a
CPU, with the demo's model and data (`make demo` makes both), in about a minute:

    python flax_train_instruct_pix2pix.py --pretrained_model_name_or_path demo/base_model \\
        --unet_model_name_or_path demo/output/modified_unet --train_data_dir demo/output/data \\
        --resolution 64 --train_batch_size 8 --max_train_steps 50 --output_dir /tmp/trained

Interrupted, by SIGTERM, Ctrl-C or the plug: run the same command again. It goes on from the newest
checkpoint in OUTPUT_DIR/checkpoints and ends with the very weights it would have had.

Stable Diffusion 1.5 needs 3.4 GB per device for each of parameters and gradients; as much, divided
by the number of devices, for each of two moments and, from its first step on, the average; and the
activations of a micro-batch (tpu_compile.py tells what a TPU slice holds). On a slice run the same
command on every worker, each with its own part of the shards (script.py, script.sh) or all with the
same; on other clusters also say who is who: --coordinator_address, --num_processes, --process_id.
No row is trained on twice in an epoch; it says how many are left out.

Papers: InstructPix2Pix (arXiv 2211.09800); the late EMA is MosaicML's for Stable Diffusion 2.
"""

import contextlib
import ctypes
import itertools
import json
import logging
import os
import re
import resource
import shlex
import shutil
import signal
import sys
import time
import traceback
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import struct
from jax.experimental.multihost_utils import process_allgather
from PIL import Image, ImageOps
from tqdm import tqdm

import cache_latents
from attention_flax import by_platform
from cache_latents import encode_pictures
from checkpoints_flax import Checkpoints, find_checkpoint, tree_checksum
from command_line import run_main
from ema_flax import SIGMA_RELS, ema_plan, ema_start, ema_update
from executables import use_compilation_cache
from modeling_flax_clip import FlaxCLIPTextModel
from modeling_flax_unet import FlaxUNet2DConditionModel
from modeling_flax_vae import FlaxAutoencoderKL
from parallel_flax import (
    StopSignal,
    check_agreement,
    first,
    from_process_0,
    lift,
    local_shares,
    lock_folder,
    mean_slice,
    my_slice,
    norm_of_slices,
    on_process_0,
    put,
    put_shares,
    put_slices,
    start_distributed,
    to_host,
    unlift,
    wait_for_all,
    whole,
)
from parquet_processing import KNOWN_COLUMNS, ParquetImagePairs
from pictures import load_image
from pipeline_flax_stable_diffusion_instruct_pix2pix import (
    FlaxStableDiffusionInstructPix2PixPipeline,
)
from pipeline_flax_utils import load_tokenizer
from report_flax import MetricsLog, check_hub, push_to_hub, validation_grid, write_model_card
from scheduling_flax import FlaxDDPMScheduler, scheduler_from_pretrained

VALIDATION_INFERENCE_STEPS = 20
LOST = "(?i)gloo|unavailable|deadline|aborted|coordination|connection"  # errors of a dead process
IN_FLIGHT = 2  # steps that the devices may be behind the host, and batches put on them ahead
READ_AT_ONCE = 32  # arrays of a checkpoint that the host holds while it is read

# Flags that may differ from one start of a run to the next: with them it stays the same run, up to
# rounding. Models and data may move; they are known by what they hold.
MAY_CHANGE = frozenset(
    """
    pretrained_model_name_or_path unet_model_name_or_path revision variant train_data_dir
    cache_latents dataloader_num_workers max_bad_fraction gradient_checkpointing
    gradient_accumulation_steps shard_optimizer output_dir overwrite_output_dir save_raw_unet
    logging_steps report_to tracker_project_name checkpointing_steps checkpoints_total_limit
    resume_from_checkpoint validation_image validation_prompt validation_steps profile_steps
    push_to_hub hub_model_id compilation_cache_dir coordinator_address num_processes process_id
    num_train_epochs
    """.split()  # noqa: SIM905
)
# Of them, those that may also differ from one process to another.
PER_PROCESS = frozenset(
    """
    pretrained_model_name_or_path unet_model_name_or_path train_data_dir cache_latents
    dataloader_num_workers output_dir compilation_cache_dir coordinator_address process_id
    """.split()  # noqa: SIM905
)


@dataclass(frozen=True)
class Config:
    # model
    pretrained_model_name_or_path: str  # pipeline folder or hub id: VAE, text encoder, scheduler
    unet_model_name_or_path: str  # the 8-channel UNet: create_modified_unet.py's --output_dir
    revision: str | None = None  # branch, tag or commit, if the pretrained model is a hub id
    variant: str | None = None  # e.g. fp16, for the pretrained model's files
    # data
    train_data_dir: str = "data"  # folder with this host's *.parquet shards, or with all
    original_image_column: str = ""  # "" finds original_image or input_image
    edited_image_column: str = ""  # "" finds edited_image
    edit_prompt_column: str = ""  # "" finds edit_prompt
    max_train_samples: int | None = None  # train on the first so many pairs only
    resolution: int = 256  # side of the square training pictures, pixels
    random_crop: bool = True  # crop anywhere along the longer side, else in the middle
    random_flip: bool = True  # mirror half of the pairs
    image_interpolation_mode: Literal["dct", "lanczos", "bicubic"] = "dct"  # dct: while decoding
    shuffle_buffer: int = 4096  # encoded pairs to draw from, over all hosts; see the README
    max_bad_fraction: float = 0.1  # share of pairs that cannot be decoded at which a run stops
    dataloader_num_workers: int = 0  # decoding threads; 0 takes one per core
    cache_latents: str = ""  # folder for the VAE's latents of all pairs; "" encodes in every step
    # training
    train_batch_size: int = 16  # pairs per step over all devices of all hosts
    gradient_accumulation_steps: int = 1  # micro-batches that a step's pairs are split into
    max_train_steps: int = 15000  # optimizer steps
    num_train_epochs: int | None = None  # instead of max_train_steps
    learning_rate: float = 5e-5  # peak
    lr_scheduler: Literal["constant", "linear", "cosine"] = "constant"  # after the warm-up
    lr_warmup_steps: int = 0  # linear from 0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_weight_decay: float = 1e-2
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0  # clip the global norm of the gradient
    snr_gamma: float | None = None  # min-SNR weights of the loss, 5 in its paper; None is off
    conditioning_dropout_prob: float = 0.05  # of each dropout case; 0 is off, at most 1/3
    mixed_precision: Literal["no", "bf16"] = "no"  # compute dtype; master weights stay float32
    gradient_checkpointing: bool = False  # recompute activations: less memory, about 1.3x the time
    shard_optimizer: bool = True  # each device updates and averages its slice of the weights
    seed: int = 42
    # exponential moving average of the weights
    ema: Literal["none", "late", "full", "power"] = "late"  # late: only in the final stage
    ema_fraction: float = 0.036  # late: the share of the run, at its end, that is averaged
    ema_start_step: int | None = None  # late: the first averaged step, instead of ema_fraction
    ema_decay: float | None = None  # of a step; None is 1 - 5 / (averaged steps)
    ema_every: int = 1  # steps between updates, which then have the decay ema_decay^ema_every
    ema_warmup: bool = False  # smaller decays at first, (1 + n) / (10 + n), as diffusers has it
    ema_snapshot_steps: int | None = None  # power: between snapshots; None is 1/8 of the run
    # output
    output_dir: str = "instruct-pix2pix-model"  # becomes a diffusers pipeline folder
    overwrite_output_dir: bool = False  # replace the model that an earlier run left there
    save_raw_unet: bool = False  # also keep the UNet before averaging, in OUTPUT_DIR/unet_raw
    logging_steps: int = 50  # steps between lines of metrics.jsonl
    report_to: Literal["none", "wandb"] = "none"
    tracker_project_name: str = "instruct-pix2pix"  # wandb project
    checkpointing_steps: int = 500  # steps between checkpoints; 0 saves at SIGTERM and Ctrl-C only
    checkpoints_total_limit: int | None = 2  # so many are kept; None keeps all
    resume_from_checkpoint: str = (
        "latest"  # of output_dir; or none; or a folder, .../checkpoints/500
    )
    validation_image: tuple[str, ...] = ()  # pictures to edit while training
    validation_prompt: tuple[str, ...] = ()  # an instruction for each, or one for all
    validation_steps: int = 500  # steps between such edits, in OUTPUT_DIR/validation
    profile_steps: str = ""  # FIRST:LAST, to trace these steps into OUTPUT_DIR/profile
    push_to_hub: bool = False  # upload the model; needs HF_TOKEN or `hf auth login`
    hub_model_id: str | None = None  # OWNER/NAME to upload it to; None is output_dir's name
    compilation_cache_dir: str = "~/.cache/jax"  # programs for the next start; "" keeps none
    # several hosts, where no TPU slice, Slurm or Open MPI says so by itself: all three, or none
    coordinator_address: str | None = None  # HOST:PORT of process 0
    num_processes: int | None = None
    process_id: int | None = None  # of this one, from 0


class Models(NamedTuple):
    """The modules of a training step; parameters travel separately."""

    unet: FlaxUNet2DConditionModel
    vae: FlaxAutoencoderKL
    text_encoder: FlaxCLIPTextModel
    scheduler: FlaxDDPMScheduler


@struct.dataclass
class TrainState:
    """What a step changes: its number, float32 master weights, optimizer moments."""

    step: jax.Array
    params: Any
    opt_state: Any


def conditioning_dropout(key, text, null_text, image_latents, rate):
    """Drop text, image or both, so that one network learns all three branches of the guidance.

    One uniform number per sample decides: below `rate` the text is dropped, up to 2 `rate` both
    are, up to 3 `rate` the image is.

    Args:
        key: PRNG key.
        text: text-encoder states, (B, T, D).
        null_text: states of the empty prompt, (1, T, D).
        image_latents: unscaled latents of the picture to edit, (B, C, h, w).
        rate: chance of each of the three cases; 0 switches dropout off, at most 1/3.

    Returns:
        (text, image_latents), dropped text replaced by null_text and dropped latents by zeros.

    Source: InstructPix2Pix (arXiv 2211.09800), section 3.2.1.
    """
    u = jax.random.uniform(key, (text.shape[0],))
    drop_text = u < 2 * rate
    drop_image = (u >= rate) & (u < 3 * rate)
    text = jnp.where(drop_text[:, None, None], null_text, text)
    return text, jnp.where(drop_image[:, None, None, None], 0, image_latents)


def diffusion_loss(
    params, unet, scheduler, scheduler_state, x_0, condition, text, noise, timesteps, snr_gamma=None
):
    """Mean squared error of the UNet's prediction of the noise (or of v, as the scheduler says).

    Args:
        params: the UNet's parameters.
        unet: FlaxUNet2DConditionModel with twice the latents' channels as in_channels.
        scheduler: FlaxDDPMScheduler, and scheduler_state its state.
        x_0: scaled latents of the edited picture, (B, C, h, w) float32.
        condition: unscaled latents of the picture to edit, (B, C, h, w).
        text: text-encoder states, (B, T, D).
        noise: standard normal, (B, C, h, w) float32.
        timesteps: (B,) integers in [0, num_train_timesteps).
        snr_gamma: weigh each sample so that its loss in terms of x_0 has the weight min(SNR,
            snr_gamma), above 0; 5 in the paper, None weighs all alike.

    Returns:
        A float32 scalar.

    Source: DDPM (arXiv 2006.11239), equation 14; InstructPix2Pix (arXiv 2211.09800), equation 1;
    min-SNR (arXiv 2303.09556), section 3.4.
    """
    x_t = scheduler.add_noise(scheduler_state, x_0, noise, timesteps)
    target = noise
    if scheduler.config.prediction_type == "v_prediction":
        target = scheduler.get_velocity(scheduler_state, x_0, noise, timesteps)
    x_in = jnp.concatenate((x_t, condition), axis=1)  # (B, 2C, h, w)
    prediction = unet.apply({"params": params}, x_in, timesteps, text).sample
    error = jnp.square(prediction.astype(jnp.float32) - target).mean(axis=(1, 2, 3))  # (B,)
    if snr_gamma is None:
        return error.mean()
    alpha_bar = scheduler_state.common.alphas_cumprod[timesteps]
    snr = alpha_bar / (1 - alpha_bar)
    if scheduler.config.prediction_type == "v_prediction":
        weight = jnp.minimum(snr, snr_gamma) / (snr + 1)
    else:
        weight = jnp.minimum(1, snr_gamma / snr)
    return (error * weight).mean()


def clip_by_norm(grads, norm, max_norm):
    """Scale gradients of a known global norm to max_norm, if that is less."""
    scale = jnp.minimum(1, max_norm / norm)
    return jax.tree.map(lambda g: g * scale, grads)


def micro_batches(tree, num):
    """Split the batch axis: (B, ...) to (num, B / num, ...)."""
    return jax.tree.map(lambda x: x.reshape(num, -1, *x.shape[1:]), tree)


def encode(batch, frozen, models):
    """Latents and text states of one micro-batch.

    Args:
        batch, frozen, models: as for train_step.

    Returns:
        mean and std of the edited pictures' posterior, (B, h, w, C) float32; mode of the
        originals', (B, h, w, C); text states (B, T, D).
    """
    text = models.text_encoder(batch["input_ids"], params=frozen["text_encoder"])[0]
    if "edited_latents" in batch:  # of cache_latents.py
        mean, std = jnp.split(batch["edited_latents"].astype(jnp.float32), 2, axis=-1)
        return mean, std, batch["original_latents"].astype(jnp.float32), text
    pictures = jnp.concatenate((batch["edited_pixel_values"], batch["original_pixel_values"]))
    posterior = encode_pictures(models.vae, frozen["vae"], pictures)  # (2B, h, w, C)
    B = len(pictures) // 2
    return posterior.mean[:B], posterior.std[:B], posterior.mode()[B:], text


def apply_gradients(state, grads, tx, num_slices):
    """The optimizer's step, under pmap(axis_name="batch"), on state that is donated.

    Each device works out the updates of its slice of the parameters and holds the moments of no
    more. Not parameters but updates are gathered then, and added in place: XLA copies what is
    donated before and after it gathers into it, on a TPU all parameters. What is donated is lifted,
    except on TPUs, which move less without.

    Args:
        state: TrainState.
        grads: this device's slice of the mean gradient, see mean_slice.
        tx, num_slices: as for train_step.

    Returns:
        TrainState of the next step.

    Source: ZeRO (arXiv 1910.02054), section 5.
    """

    def update(params, grads, opt_state, lift=lift, unlift=unlift):
        slices = lift(my_slice(params, num_slices))
        updates, opt_state = tx.update(lift(grads), lift(opt_state), slices)
        updates = lift(whole(unlift(updates), params, num_slices))
        return unlift((optax.apply_updates(lift(params), updates), opt_state))

    def unlifted(*args):
        return update(*args, lift=lambda tree: tree, unlift=lambda tree: tree)

    args = state.params, grads, state.opt_state
    params, opt_state = by_platform(*args, tpu=unlifted, default=update)
    return TrainState(step=state.step + 1, params=params, opt_state=opt_state)


def train_step(
    state,
    frozen,
    batch,
    base_rng,
    *,
    models,
    tx,
    dropout_rate,
    snr_gamma=None,
    max_grad_norm=1.0,
    num_micro_batches=1,
    num_slices=1,
):
    """One optimizer step on one device's share of the batch; call it under pmap(axis_name="batch").

    All randomness comes from (base_rng, state.step, global device index), so none has to be saved,
    and it is drawn for the whole share, so that micro-batches do not change it.

    Args:
        state: TrainState.
        frozen: {"vae", "text_encoder"} parameters, "null_text" states of the empty prompt
            (1, T, D), "scheduler" state.
        batch: original_pixel_values and edited_pixel_values, uint8 (B, R, R, 3), or instead the
            latents of cache_latents.py, original_latents and edited_latents; input_ids (B, T).
        base_rng: PRNG key, the same on every device and at every step.
        models: Models.
        tx: optax optimizer that works on each number by itself, as Adam does.
        dropout_rate: see conditioning_dropout.
        snr_gamma: see diffusion_loss.
        max_grad_norm: longer gradients are scaled to this global norm.
        num_micro_batches: a divisor of B; activations of one at a time are held.
        num_slices: the number of devices, over which the optimizer is then shared out, see
            apply_gradients. 1: all do all.

    Returns:
        (state, {"loss", "grad_norm"}), both metrics averaged over all devices.

    Source: InstructPix2Pix (arXiv 2211.09800), section 3.2.
    """
    rng = jax.random.fold_in(base_rng, state.step)
    rng = jax.random.fold_in(rng, jax.lax.axis_index("batch"))
    posterior_key, noise_key, timestep_key, dropout_key = jax.random.split(rng, 4)

    # Latents: the target is a scaled sample of the posterior, the condition its unscaled mode.
    if num_micro_batches == 1:
        mean, std, mode, text = encode(batch, frozen, models)
    else:
        encoded = jax.lax.map(
            lambda part: encode(part, frozen, models), micro_batches(batch, num_micro_batches)
        )
        mean, std, mode, text = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), encoded)
    x_0 = mean + std * jax.random.normal(posterior_key, mean.shape)
    x_0 = jnp.transpose(x_0 * models.vae.config.scaling_factor, (0, 3, 1, 2))  # (B, C, h, w)
    condition = jnp.transpose(mode, (0, 3, 1, 2))

    text, condition = conditioning_dropout(
        dropout_key, text, frozen["null_text"], condition, dropout_rate
    )
    noise = jax.random.normal(noise_key, x_0.shape)
    num_timesteps = models.scheduler.config.num_train_timesteps
    timesteps = jax.random.randint(timestep_key, (len(x_0),), 0, num_timesteps)

    def loss_and_grads(x_0, condition, text, noise, timesteps):
        return jax.value_and_grad(diffusion_loss)(
            state.params,
            models.unet,
            models.scheduler,
            frozen["scheduler"],
            x_0,
            condition,
            text,
            noise,
            timesteps,
            snr_gamma,
        )

    samples = (x_0, condition, text, noise, timesteps)
    if num_micro_batches == 1:
        loss, grads = loss_and_grads(*samples)
    else:

        def add(total, part):
            return jax.tree.map(jnp.add, total, loss_and_grads(*part)), None

        zeros = (jnp.float32(0), jax.tree.map(jnp.zeros_like, state.params))
        total, _ = jax.lax.scan(add, zeros, micro_batches(samples, num_micro_batches))
        loss, grads = jax.tree.map(lambda x: x / num_micro_batches, total)

    grads = mean_slice(grads, num_slices)  # from here on every replica has the same, or its slice
    grad_norm = norm_of_slices(grads, state.params, num_slices)
    grads = clip_by_norm(grads, grad_norm, max_grad_norm)
    state = apply_gradients(state, grads, tx, num_slices)
    return state, {"loss": jax.lax.pmean(loss, "batch"), "grad_norm": grad_norm}


class Programs(NamedTuple):
    """What runs on the devices; each is compiled at its first call, or by tpu_compile.py."""

    init: Callable  # parameters -> TrainState
    train_step: Callable  # (state, frozen, batch, base_rng) -> (state, metrics)
    ema_start: Callable  # parameters -> average, in slices
    ema_update: Callable  # (average, parameters, decay) -> average
    whole: Callable  # slices of the size of parameters -> parameters


def make_programs(config, models, tx, params, num_slices, devices=None):
    """Wrap the functions above for all devices; arrays of all programs are (local devices, ...).

    Args:
        config: Config.
        models, tx, num_slices: as for train_step.
        params: the UNet's parameters, or their shapes.
        devices: to compile for; None: all there are.
    """
    # One axis name for all: pmap compiles anew for arrays that come from an axis of another name.
    pmap = partial(jax.pmap, axis_name="batch", devices=devices)
    cut = partial(my_slice, num_slices=num_slices)
    step = partial(
        train_step,
        models=models,
        tx=tx,
        dropout_rate=config.conditioning_dropout_prob,
        snr_gamma=config.snr_gamma,
        max_grad_norm=config.max_grad_norm,
        num_micro_batches=config.gradient_accumulation_steps,
        num_slices=num_slices,
    )
    return Programs(
        init=pmap(lambda p: TrainState(jnp.int32(0), p, tx.init(cut(p))), donate_argnums=0),
        train_step=pmap(step, donate_argnums=0),
        ema_start=pmap(lambda p: ema_start(cut(p))),
        ema_update=pmap(
            lambda e, p, decay: unlift(ema_update(*lift((e, cut(p))), decay)), donate_argnums=0
        ),
        whole=pmap(lambda e: whole(e, params, num_slices)),
    )


def lr_schedule(name, learning_rate, num_warmup_steps, max_train_steps):
    """Step -> learning rate: linear warm-up, then "constant", or "linear" or "cosine" to zero."""
    if not 0 <= num_warmup_steps < max_train_steps:
        raise ValueError(
            f"lr_warmup_steps={num_warmup_steps} must be at least 0 and below "
            f"max_train_steps={max_train_steps}"
        )
    num_decay_steps = max_train_steps - num_warmup_steps
    after = {
        "constant": optax.constant_schedule(learning_rate),
        "linear": optax.linear_schedule(learning_rate, 0.0, num_decay_steps),
        "cosine": optax.cosine_decay_schedule(learning_rate, num_decay_steps),
    }[name]
    if num_warmup_steps == 0:
        return after
    warmup = optax.linear_schedule(0.0, learning_rate, num_warmup_steps)
    return optax.join_schedules([warmup, after], [num_warmup_steps])


def make_optimizer(schedule, beta1, beta2, epsilon, weight_decay):
    """Optax AdamW at the schedule's rate, each number by itself; train_step clips the gradient."""
    return optax.adamw(schedule, b1=beta1, b2=beta2, eps=epsilon, weight_decay=weight_decay)


def optimizer_of(config: Config, schedule):
    """make_optimizer with the run's flags."""
    return make_optimizer(
        schedule,
        config.adam_beta1,
        config.adam_beta2,
        config.adam_epsilon,
        config.adam_weight_decay,
    )


def make_plans(config: Config, max_train_steps):
    """The averages' EmaPlan and the learning rate's schedule of a run of so many steps."""
    plan = ema_plan(
        config.ema,
        max_train_steps,
        config.ema_fraction,
        config.ema_start_step,
        config.ema_decay,
        config.ema_every,
        config.ema_warmup,
    )
    schedule = lr_schedule(
        config.lr_scheduler, config.learning_rate, config.lr_warmup_steps, max_train_steps
    )
    return plan, schedule


def nearest_multiples(number, factor):
    """The positive multiples of factor around number, for an error message: "2 or 4"."""
    below = number // factor * factor
    return " or ".join(str(n) for n in (below, below + factor) if n > 0)


def check_config(config: Config, num_devices: int):
    """Raise a ValueError for what no run could work with, before anything is loaded."""
    for name in ("train_batch_size", "max_train_steps", "logging_steps", "resolution"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name}={getattr(config, name)} must be at least 1")
    if config.train_batch_size % num_devices:
        raise ValueError(
            f"train_batch_size={config.train_batch_size} is not divisible by {num_devices} "
            f"devices; try {nearest_multiples(config.train_batch_size, num_devices)}"
        )
    share = config.train_batch_size // num_devices
    if config.gradient_accumulation_steps < 1 or share % config.gradient_accumulation_steps:
        raise ValueError(
            f"gradient_accumulation_steps={config.gradient_accumulation_steps} must divide the "
            f"{share} pairs of a device (train_batch_size={config.train_batch_size} on "
            f"{num_devices} devices)"
        )
    for name in (
        "max_train_samples",
        "num_train_epochs",
        "checkpoints_total_limit",
        "ema_snapshot_steps",
        "validation_steps",
    ):
        if getattr(config, name) is not None and getattr(config, name) < 1:
            raise ValueError(f"{name}={getattr(config, name)} must be at least 1")
    if config.checkpointing_steps < 0:
        raise ValueError(f"checkpointing_steps={config.checkpointing_steps} must be at least 0")
    if config.num_train_epochs is not None and config.max_train_steps != Config.max_train_steps:
        raise ValueError(
            f"num_train_epochs={config.num_train_epochs} and max_train_steps="
            f"{config.max_train_steps} both say how long to train; leave out one"
        )
    if config.ema_snapshot_steps is not None and config.ema != "power":
        raise ValueError(
            f"ema_snapshot_steps={config.ema_snapshot_steps} goes with --ema power, not "
            f"{config.ema}"
        )
    if (config.ema_snapshot_steps or 0) % max(1, config.ema_every):
        raise ValueError(
            f"ema_snapshot_steps={config.ema_snapshot_steps} must be a multiple of "
            f"ema_every={config.ema_every}"
        )
    num_pictures, num_prompts = len(config.validation_image), len(config.validation_prompt)
    if num_prompts not in (num_pictures, min(1, num_pictures)):
        raise ValueError(
            f"{num_pictures} validation_image and {num_prompts} validation_prompt do not go "
            "together; give one instruction for each picture, or one for all"
        )
    if config.hub_model_id is not None and not config.push_to_hub:
        raise ValueError(f"hub_model_id={config.hub_model_id} goes with --push_to_hub")
    profile_window(config.profile_steps)
    if config.cache_latents and config.random_crop:
        raise ValueError(
            "cache_latents keeps latents of the middle of each picture; add --no_random_crop (of "
            "square pictures it changes nothing)"
        )
    if config.num_train_epochs is None:
        make_plans(config, config.max_train_steps)
    if config.snr_gamma is not None and not 0 < config.snr_gamma < float("inf"):
        raise ValueError(f"snr_gamma={config.snr_gamma} must be above 0 and finite; 5 is usual")
    if not 0 <= config.seed < 2**32:
        raise ValueError(f"seed={config.seed} must be from 0 to 4294967295")
    if not 0 <= config.conditioning_dropout_prob <= 1 / 3:
        raise ValueError(
            f"conditioning_dropout_prob={config.conditioning_dropout_prob} must be from 0 to 1/3: "
            "it is the chance of each of three cases"
        )
    for name in ("learning_rate", "max_grad_norm", "adam_epsilon"):
        if not 0 < getattr(config, name) < float("inf"):
            raise ValueError(f"{name}={getattr(config, name)} must be above 0 and finite")
    for name in ("adam_beta1", "adam_beta2"):
        if not 0 <= getattr(config, name) < 1:
            raise ValueError(f"{name}={getattr(config, name)} must be at least 0 and below 1")
    if not config.adam_weight_decay >= 0:
        raise ValueError(f"adam_weight_decay={config.adam_weight_decay} must be at least 0")
    output_dir = Path(config.output_dir)
    if not config.output_dir:
        raise ValueError("output_dir is empty; name a folder")
    if output_dir.is_file():
        raise ValueError(f"output_dir={config.output_dir} is a file; name a folder")
    for name in ("pretrained_model_name_or_path", "unet_model_name_or_path"):
        if Path(getattr(config, name)).resolve().is_relative_to(output_dir.resolve()):
            raise ValueError(
                f"output_dir={config.output_dir} is or holds {name}; name another folder"
            )
    if (output_dir / "model_index.json").exists() and not config.overwrite_output_dir:
        raise ValueError(
            f"output_dir={config.output_dir} holds a model already; name another folder, or "
            "replace it with --overwrite_output_dir"
        )
    own = [name for name in ("README.md", "config.json") if (output_dir / name).exists()]
    if own and not (output_dir / "metrics.jsonl").exists() and not config.overwrite_output_dir:
        raise ValueError(
            f"output_dir={config.output_dir} holds {' and '.join(own)} of no training run, which "
            "would be lost; name another folder, or --overwrite_output_dir"
        )
    check_writable("output_dir", config.output_dir, output_dir)


def check_writable(flag, value, folder):
    """Raise a ValueError naming flag=value if a folder neither can be made nor written to."""
    parent = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not (parent.is_dir() and os.access(parent, os.W_OK)):
        raise ValueError(
            f"{flag}={value} cannot be written: {parent} is no folder or not yours to write to; "
            "name another"
        )


def profile_window(text):
    """The first and the last step, counted from 0, that "FIRST:LAST" names; (-1, -1) of ""."""
    if not text:
        return -1, -1
    numbers = text.split(":")
    if (
        len(numbers) != 2
        or not all(map(str.isdecimal, numbers))
        or int(numbers[0]) > int(numbers[1])
    ):
        raise ValueError(f"profile_steps={text} must be FIRST:LAST, two step numbers; try 10:12")
    return tuple(map(int, numbers))


def load_validation_images(config: Config):
    """The images to edit while training: PIL, RGB, cropped to squares of the run's resolution."""
    side = (config.resolution, config.resolution)
    try:
        return [
            ImageOps.fit(load_image(path), side, Image.Resampling.LANCZOS)
            for path in config.validation_image
        ]
    except ValueError as error:
        raise ValueError(f"--validation_image {error}") from error


def load_models(config: Config, dtype):
    """Load and check everything a run needs of the models, on the host, weights in float32.

    Returns:
        (Models; the pipeline to save at the end; train_step's `frozen`; the UNet's parameters).
    """
    source, revision = config.pretrained_model_name_or_path, config.revision
    files = dict(revision=revision, variant=config.variant, dtype=dtype)
    unet, unet_params = FlaxUNet2DConditionModel.from_pretrained(
        config.unet_model_name_or_path, dtype=dtype
    )
    if unet.addition_embed_type is not None:
        raise ValueError(
            f"{config.unet_model_name_or_path} is the UNet of an SDXL, which is not trained here; "
            "give a Stable Diffusion 1.x or 2.x that create_modified_unet.py has widened"
        )
    unet = unet.clone(gradient_checkpointing=config.gradient_checkpointing)
    vae, vae_params = FlaxAutoencoderKL.from_pretrained(source, subfolder="vae", **files)
    text_encoder, text_params = FlaxCLIPTextModel.from_pretrained(
        source, subfolder="text_encoder", _do_init=False, **files
    )
    scheduler, scheduler_state = FlaxDDPMScheduler.from_pretrained(
        source, subfolder="scheduler", revision=revision
    )
    sampler, _ = scheduler_from_pretrained(source, revision=revision)
    tokenizer = load_tokenizer(source, text_encoder, revision)

    if scheduler.config.prediction_type == "sample":
        raise ValueError(
            f"the scheduler of {source} has prediction_type=sample; epsilon and v_prediction can "
            "be trained"
        )
    if unet.in_channels != 2 * vae.latent_channels:
        raise ValueError(
            f"the UNet in {config.unet_model_name_or_path} has {unet.in_channels} input channels, "
            f"InstructPix2Pix needs {2 * vae.latent_channels}; widen it: create_modified_unet.py"
        )
    if unet.cross_attention_dim != text_encoder.module.hidden_size:
        raise ValueError(
            f"the UNet in {config.unet_model_name_or_path} reads text states "
            f"{unet.cross_attention_dim} wide, the text encoder of {source} makes "
            f"{text_encoder.module.hidden_size}; take both from the same Stable Diffusion"
        )
    factor = 2 ** (len(vae.block_out_channels) + len(unet.block_out_channels) - 2)
    if config.resolution % factor:
        raise ValueError(
            f"resolution={config.resolution} is not a multiple of {factor}; "
            f"try {nearest_multiples(config.resolution, factor)}"
        )

    float32 = partial(jax.tree.map, lambda x: np.asarray(x, np.float32))
    pipeline = FlaxStableDiffusionInstructPix2PixPipeline(
        vae, text_encoder, tokenizer, unet, sampler
    )
    # The empty prompt's states come from the text encoder itself, once.
    null_ids = pipeline.prepare_text_inputs("")
    null_text = jax.jit(text_encoder)(null_ids, params=text_params)[0]
    frozen = {
        "vae": float32(vae_params),
        "text_encoder": float32(text_params),
        "null_text": np.asarray(null_text),
        "scheduler": scheduler_state,
    }
    return Models(unet, vae, text_encoder, scheduler), pipeline, frozen, float32(unet_params)


def run_identity(config, num_devices, max_train_steps, dataset, models, params, frozen):
    """What makes a run this run and no other, flat: flags, devices, data, the models' weights."""
    flags = {name: value for name, value in asdict(config).items() if name not in MAY_CHANGE}
    data = dataset.state_dict()
    modules = models._asdict() | {"text_encoder": models.text_encoder.module}
    configs = {name: dict(module.config) for name, module in modules.items()}
    return flags | {
        "max_train_steps": max_train_steps,
        "number of devices": num_devices,
        "configs of the models": zlib.crc32(json.dumps(configs, default=str).encode()),
        "columns of train_data_dir": data["columns"],
        "shards of train_data_dir": data["data"],
        "weights of unet_model_name_or_path": tree_checksum(params),
        "weights of pretrained_model_name_or_path": tree_checksum(
            [frozen["vae"], frozen["text_encoder"]]
        ),
    }


def by_name(tree):
    """A tree as a flat dict: names as "opt_state/0/mu/conv_in/kernel" -> arrays."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves}


def state_shapes(params, tx, num_averages):
    """Whole shapes of all that a checkpoint holds, given those of the UNet's parameters."""
    opt_state = jax.eval_shape(tx.init, params)
    return {"params": params, "opt_state": opt_state, "ema": [params] * num_averages}


def read_state(checkpoints, step, shapes, num_slices):
    """A checkpoint on the devices: process 0 reads it, in parts, and tells the others.

    Args:
        checkpoints: Checkpoints on process 0, None on the others.
        step: of the checkpoint.
        shapes: state_shapes of what it holds.
        num_slices: that optimizer state and averages are cut into.

    Returns:
        (TrainState, list of averages).
    """
    shape_of, arrays = by_name(shapes), []
    names = list(shape_of)
    for start in range(0, len(names), READ_AT_ONCE):
        part = names[start : start + READ_AT_ONCE]
        saved = checkpoints.read_state(step, part) if checkpoints else {}
        wait_for_all("process 0 has read")
        for name in part:
            shape = shape_of[name]
            x = saved.pop(name) if checkpoints else np.zeros(shape.shape, shape.dtype)
            x = from_process_0(x)
            arrays.append(put(x) if name.startswith("params/") else put_slices(x, num_slices))
        del x
        release_memory()
    tree = jax.tree.unflatten(jax.tree.structure(shapes), arrays)
    return TrainState(put(np.int32(step)), tree["params"], tree["opt_state"]), tree["ema"]


def columns_of(config: Config):
    """The flags that name columns of the data."""
    return {name: getattr(config, name) for name in KNOWN_COLUMNS}


def fill_cache(config: Config):
    """Compute the latents that are not in --cache_latents yet, on this process's devices."""
    shared = {field.name for field in fields(cache_latents.Config)}
    flags = {name: value for name, value in asdict(config).items() if name in shared}
    flags["output_dir"] = config.cache_latents
    cache_latents.fill(cache_latents.Config(**flags))


def finished_at(output_dir):
    """When the model in a folder was written, in ns; None: there is none."""
    model = output_dir / "model_index.json"
    return model.stat().st_mtime_ns if model.exists() else None


def train(config: Config):
    """The run, as the only one in config.output_dir, where all results are."""
    start_distributed(config.coordinator_address, config.num_processes, config.process_id)
    output_dir = Path(config.output_dir)
    model_before = finished_at(output_dir)
    check_config(config, jax.device_count())
    originals = load_validation_images(config)
    with contextlib.ExitStack() as held:

        def occupy():
            held.enter_context(lock_folder(output_dir))
            # --overwrite_output_dir is for models that were there when this run started.
            if finished_at(output_dir) != model_before:
                raise ValueError(
                    f"a run that has just ended has written a model to --output_dir {output_dir}; "
                    "name another folder, or replace the model with --overwrite_output_dir"
                )

        on_process_0(occupy)
        run_training(config, originals)


def run_training(config: Config, originals):
    """Load, go on or begin, loop, save; originals: see load_validation_images."""
    num_devices, num_processes = jax.device_count(), jax.process_count()
    is_main = jax.process_index() == 0
    if use_compilation_cache(config.compilation_cache_dir):
        # Saving has many small programs, which a preemption leaves no time to compile.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    dtype = jnp.bfloat16 if config.mixed_precision == "bf16" else jnp.float32
    if config.cache_latents:
        fill_cache(config)
        wait_for_all("latents are there")  # what processes do together next waits less long
    dataset = ParquetImagePairs(  # first: its faults show before gigabytes are loaded
        config.cache_latents or config.train_data_dir,
        batch_size=config.train_batch_size // num_processes,
        resolution=config.resolution,
        seed=config.seed,
        random_crop=config.random_crop,
        random_flip=config.random_flip,
        resample=config.image_interpolation_mode,
        **({} if config.cache_latents else columns_of(config)),
        max_rows=config.max_train_samples,
        process_index=jax.process_index(),
        process_count=num_processes,
        num_parts=num_devices,
        all_gather=process_allgather if num_processes > 1 else None,
        num_threads=config.dataloader_num_workers,
        shuffle_buffer=config.shuffle_buffer,
        max_bad_fraction=config.max_bad_fraction,
    )
    max_train_steps = config.max_train_steps
    if config.num_train_epochs is not None:
        max_train_steps = config.num_train_epochs * len(dataset)
    first_profiled, last_profiled = profile_window(config.profile_steps)
    if last_profiled >= max_train_steps:
        raise ValueError(
            f"profile_steps={config.profile_steps} must be steps of the run, 0 to "
            f"{max_train_steps - 1}"
        )
    plan, schedule = make_plans(config, max_train_steps)
    snapshot_steps = 0  # none
    if config.ema == "power":
        eighth = max_train_steps // 8 // plan.every * plan.every
        snapshot_steps = config.ema_snapshot_steps or max(plan.every, eighth)
        if snapshot_steps > max_train_steps:
            raise ValueError(
                f"ema_snapshot_steps={snapshot_steps} is more than the run's {max_train_steps} "
                "steps; take an eighth of them or less"
            )
    tx = optimizer_of(config, schedule)
    models, pipeline, frozen, params = load_models(config, dtype)
    if dataset.latents and dataset.latents["vae"] != cache_latents.vae_checksum(frozen["vae"]):
        raise ValueError(
            f"{dataset.train_data_dir} holds latents of another VAE than "
            f"{config.pretrained_model_name_or_path} has; make others in another folder"
        )
    shapes = jax.eval_shape(lambda: params)
    num_params = sum(x.size for x in jax.tree.leaves(params))
    num_slices = num_devices if config.shard_optimizer else 1
    programs = make_programs(config, models, tx, shapes, num_slices)

    # What every process has to have alike, and a checkpoint too.
    identity = run_identity(config, num_devices, max_train_steps, dataset, models, params, frozen)
    shared = {k: v for k, v in asdict(config).items() if k not in PER_PROCESS}
    check_agreement(json.dumps([identity, shared, bool(dataset.latents)]))
    output_dir = Path(config.output_dir)
    if config.push_to_hub:
        repo_id = on_process_0(partial(check_hub, config.hub_model_id, output_dir))

    # Process 0 finds the newest checkpoint, if any, and all go on from there.
    find = partial(find_checkpoint, output_dir, config.resume_from_checkpoint, identity)
    source, done, run = on_process_0(find) or (None, 0, {})
    done = int(from_process_0(np.int32(done)))
    epoch, position = divmod(done, len(dataset))
    dataset.load_state_dict(dataset.state_dict() | {"epoch": epoch, "batch": position})
    batches = batches_ahead(dataset, pipeline.prepare_text_inputs)

    # In the compute dtype on the devices; what is saved at the end keeps its precision.
    cast = partial(jax.tree.map, lambda x: np.asarray(x, dtype))
    on_devices = frozen | {name: cast(frozen[name]) for name in ("vae", "text_encoder")}
    if dataset.latents and not config.validation_image:
        del on_devices["vae"]
    p_frozen = put(on_devices)
    del on_devices
    base_rng = put(np.asarray(jax.random.PRNGKey(config.seed)))
    p_train_step = programs.train_step
    if num_processes == 1:  # jax 0.10 cannot do so for several
        # Compiled now, while there is most room.
        first_batch = next(batches)
        batches = itertools.chain([first_batch], batches)
        on_all = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((num_devices, *x.shape), x.dtype), shapes
        )
        p_train_step = programs.train_step.lower(
            jax.eval_shape(programs.init, on_all), p_frozen, first_batch[0], base_rng
        ).compile()
        del first_batch

    if done:
        del params
        release_memory()
        averages_begun = plan.first_step is not None and done > plan.first_step
        num_averages = len(plan.decays(1)) if averages_begun else 0
        saved = state_shapes(shapes, tx, num_averages)
        state, averages = read_state(source, done, saved, num_slices)
        if source:
            source.close()
    else:
        state, averages = programs.init(put(params)), []
        del params
    release_memory()
    window = run.get("losses", [])  # [loss, grad_norm] of each step since the last logged one
    num_bad_here, num_bad_before = 0, run.get("num_bad", 0)
    pending = deque()  # those that are still on the devices
    prompts = list(config.validation_prompt)
    prompts *= len(originals) if len(prompts) == 1 else 1

    log = checkpoints = None
    if is_main:
        log = MetricsLog(  # the first file of a run, by which its folder is known
            output_dir, asdict(config), config.report_to, config.tracker_project_name, done
        )
        (output_dir / "config.json").write_text(json.dumps(asdict(config), indent=2) + "\n")
        checkpoints = Checkpoints(output_dir / "checkpoints", config.checkpoints_total_limit, done)
        if not done:  # of an earlier run
            shutil.rmtree(output_dir / "ema_snapshots", ignore_errors=True)
        print(
            f"training {num_params / 1e6:.1f}M parameters on "
            f"{len(dataset) * config.train_batch_size} of {dataset.num_rows} pairs an epoch: "
            f"{config.train_batch_size} pairs a step on {num_devices} device(s), "
            f"{jax.devices()[0].device_kind}"
        )
        if done:
            print(f"going on after step {done}")
        if plan.first_step is not None:
            decays = ", ".join(f"{decay:.6g}" for decay in plan.decays(max_train_steps))
            print(f"averaging the weights from step {plan.first_step} with decay {decays}")

    def fetch():
        """Wait for the steps in flight; their losses and norms join the window."""
        while pending:
            metrics = pending.popleft()
            window.append([float(first(metrics[name])) for name in ("loss", "grad_norm")])
        check_finite(np.reshape(window, (-1, 2)).sum(axis=1), num_steps - len(window) + 1)

    def num_bad():
        """Pairs of the batches so far that could not be decoded, over all processes."""
        here = np.int32(num_bad_here)
        return num_bad_before + int(process_allgather(here).sum() if num_processes > 1 else here)

    def save_checkpoint():
        fetch()
        if is_main:
            checkpoints.wait()  # or its arrays and the next one's would be held together
        release_memory()  # writing takes up to 6 GB for a while
        content = {"params": state.params, "opt_state": state.opt_state, "ema": averages}
        like = state_shapes(shapes, tx, len(averages))
        content = {
            name: to_host(x, full, 1 if name.startswith("params/") else num_slices)
            for (name, x), full in zip(by_name(content).items(), jax.tree.leaves(like))
        }
        run = {"identity": identity, "losses": list(window), "num_bad": num_bad()}
        if is_main:
            checkpoints.save(num_steps, content, run)
            if jax.default_backend() == "cpu":  # the arrays are the devices' own, soon overwritten
                checkpoints.wait()
                release_memory()

    def save_snapshots():
        step = plan.last_update_step(num_steps)  # --ema_every need not divide the last step
        for sigma_rel, average in zip(SIGMA_RELS, averages):
            average = to_host(average, shapes, num_slices)
            if is_main:
                folder = output_dir / "ema_snapshots" / f"{step:08d}-{sigma_rel:.3f}"
                half = jax.tree.map(lambda x: x.astype(np.float16), average)
                save_whole(folder, partial(models.unet.save_pretrained, params=half))

    def validate():
        """Edit the validation pictures with the average, or without one with the parameters."""
        unet = programs.whole(averages[0]) if averages else state.params
        edits = edit_pictures(pipeline, {"unet": unet, **p_frozen}, originals, prompts, config.seed)
        if is_main:
            path = output_dir / "validation" / f"step-{num_steps:06d}.png"
            save_whole(path, validation_grid(list(zip(originals, edits)), prompts).save)
            log.pictures("validation", path, f"before and after, step {num_steps}", num_steps)

    num_steps, waited, images, started, row, profiling = done, 0.0, 0, None, None, False
    with (
        StopSignal() as stop,
        tqdm(
            total=max_train_steps, initial=done, unit="step", desc="train", disable=not is_main
        ) as progress,
    ):
        for step in range(done, max_train_steps):
            if is_main and step == first_profiled:
                profiling = True
                jax.profiler.start_trace(output_dir / "profile")
            asked = time.perf_counter()
            batch, num_bad_here = next(batches)
            waited += time.perf_counter() - asked
            if step == plan.first_step:
                averages = [programs.ema_start(state.params) for _ in plan.decays(1)]
            state, metrics = p_train_step(state, p_frozen, batch, base_rng)
            num_steps = step + 1
            if num_updates := plan.update_of(num_steps):
                averages = [
                    programs.ema_update(average, state.params, put(np.float32(decay)))
                    for average, decay in zip(averages, plan.decays(num_updates))
                ]
            pending.append(metrics)
            if started is None:  # the clock starts after compilation
                jax.block_until_ready(metrics)
                started = time.perf_counter()
                waited = 0.0
            else:
                if len(pending) > IN_FLIGHT:  # so the bar is honest
                    jax.block_until_ready(pending[-1 - IN_FLIGHT])
                images += config.train_batch_size
            progress.update()
            is_last = num_steps == max_train_steps
            if profiling and (step == last_profiled or is_last):
                profiling = False
                jax.block_until_ready(metrics)
                jax.profiler.stop_trace()
            if num_steps % config.logging_steps == 0 or is_last:
                fetch()
                seconds = time.perf_counter() - started
                num_averaged = len(averages) and (num_steps - plan.first_step) // plan.every
                row = {
                    "step": num_steps,
                    "loss": float(np.mean(window, axis=0)[0]),
                    "lr": float(schedule(step)),
                    "grad_norm": window[-1][1],
                    "images_per_second": images / seconds if images else None,
                    "data_wait": waited / seconds if images else None,  # share of the time
                    "memory_gb": peak_memory() / 1e9,
                    "ema_decay": plan.decays(num_averaged)[0] if num_averaged else None,
                    "num_bad": num_bad(),
                }
                window.clear()
                images, waited, started = 0, 0.0, time.perf_counter()
                if is_main:
                    log.write(row)
                    rate = row["images_per_second"]
                    progress.set_postfix_str(
                        f"loss={row['loss']:.4f}" + (f", {rate:.1f} images/s" if rate else "")
                    )

            # What follows does not count as time of training.
            paused = time.perf_counter()
            stopping = stop.came_by(num_steps) and not is_last
            every = config.checkpointing_steps
            snapshot_due = snapshot_steps and (num_steps % snapshot_steps == 0 or is_last)
            save_due = stopping or (every and (num_steps % every == 0 or is_last))
            edit_due = originals and (num_steps % config.validation_steps == 0 or is_last)
            if snapshot_due:
                save_snapshots()
            if save_due:
                save_checkpoint()
            if edit_due and not stopping:  # then there may be no time for it
                validate()
            if snapshot_due or save_due or edit_due:
                wait_for_all("process 0 has written")
            started += time.perf_counter() - paused
            if stopping:
                break
    del batches

    if num_steps == max_train_steps:
        source = (averages[0], num_slices) if averages else (state.params, 1)
        params = to_host(source[0], shapes, source[1])
        raw_params = to_host(state.params, shapes) if config.save_raw_unet else None
        del source, state, averages, p_frozen  # writing a model takes twice its size
        release_memory()
        if is_main:
            if config.save_raw_unet:
                models.unet.save_pretrained(output_dir / "unet_raw", params=raw_params)
            write_model_card(
                output_dir,
                name=repo_id if config.push_to_hub else str(output_dir),
                base_model=config.pretrained_model_name_or_path,
                dataset=config.train_data_dir,
                command=shlex.join(["python", Path(sys.argv[0]).name, *sys.argv[1:]]),
                config=asdict(config),
                metrics=row,
                picture=f"validation/step-{num_steps:06d}.png" if originals else None,
            )
            parts = {"unet": params, "vae": frozen["vae"], "text_encoder": frozen["text_encoder"]}
            pipeline.save_pretrained(output_dir, parts)  # last: then the run is finished
            print(f"saved {config.output_dir}")
    if is_main:
        checkpoints.close()
        log.close()
        if config.push_to_hub and num_steps == max_train_steps:
            print(f"uploaded {push_to_hub(output_dir, repo_id)}")
    wait_for_all("process 0 has saved")
    if num_steps < max_train_steps:
        resumes = config.resume_from_checkpoint == "latest"
        print(
            f"stopped by {signal.Signals(stop.number).name} after step {num_steps} of "
            f"{max_train_steps}, which is saved; the same command"
            + (" " if resumes else ", with --resume_from_checkpoint latest, ")
            + "goes on from there"
        )
        sys.exit(128 + stop.number)


def batches_ahead(dataset, tokenize):
    """Epoch after epoch what train_step needs of each batch; the next ones are on the devices.

    Args:
        dataset: ParquetImagePairs.
        tokenize: prompts -> ids (B, T).

    Yields:
        The batch, and the dataset's num_bad when it was taken.
    """

    def batches():
        while True:
            for batch in dataset:
                batch = {"input_ids": tokenize(batch.pop("edit_prompt")), **batch}
                yield put_shares(batch), dataset.num_bad

    stream = batches()
    ahead = deque(itertools.islice(stream, IN_FLIGHT))
    while True:
        yield ahead.popleft()
        ahead.append(next(stream))


def edit_pictures(pipeline, p_params, pictures, prompts, seed):
    """Edit pictures on the devices of this process; all processes do the same, with all pictures.

    Args:
        pipeline: FlaxStableDiffusionInstructPix2PixPipeline.
        p_params: its parameters, on every device; "scheduler" may be another one's.
        pictures: N PIL pictures of one size.
        prompts: N instructions.
        seed: of the noise.

    Returns:
        N PIL pictures.
    """
    n = jax.local_device_count()
    B = -(-len(pictures) // n)  # per device
    padding = n * B - len(pictures)
    prompt_ids, image = pipeline.prepare_inputs(
        prompts + prompts[-1:] * padding, pictures + pictures[-1:] * padding
    )
    p_params = p_params | {"scheduler": put(pipeline.scheduler.create_state())}
    images = pipeline(
        prompt_ids.reshape(n, B, -1),
        image.reshape(n, B, *image.shape[1:]),
        p_params,
        jax.random.key(seed),
        num_inference_steps=VALIDATION_INFERENCE_STEPS,
        jit=True,
    ).images
    return pipeline.numpy_to_pil(local_shares(images))[: len(pictures)]


def release_memory():
    """Hand memory that was freed back to the system; glibc keeps gigabytes of it for itself."""
    if malloc_trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        malloc_trim(0)


def peak_memory():
    """Most bytes that the first device has held; on a CPU, those of the process."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def save_whole(path, save):
    """Have save(path) write a file or folder that appears under its name when it is complete."""
    unfinished = path.with_name(f".unfinished-{path.name}")
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    if unfinished.is_dir():
        shutil.rmtree(unfinished)
    save(unfinished)
    if path.is_dir():  # of an earlier start of this run
        shutil.rmtree(path)
    unfinished.replace(path)


def check_finite(numbers, first_step):
    """Raise a FloatingPointError that names the first step with a number that is not finite."""
    bad = [first_step + int(i) for i in np.flatnonzero(~np.isfinite(numbers))]
    if bad:
        raise FloatingPointError(
            f"the loss or gradient is not finite at step {bad[0]} ({len(bad)} of the last "
            f"{len(numbers)} steps); nothing was saved since the last checkpoint; start anew with "
            "a lower --learning_rate, or without --mixed_precision bf16"
        )


def main():
    """Read the flags, train; the user's mistakes end in one line and exit code 2."""
    logging.basicConfig(format="%(levelname)s: %(message)s")
    for name in ("absl", "asyncio"):  # orbax tells all it does, and twice
        logging.getLogger(name).setLevel(logging.CRITICAL)
    config = tyro.cli(Config, description=__doc__, use_underscores=True)
    try:
        train(config)
        return
    except KeyboardInterrupt:
        code, message = (
            130,
            "interrupted; the same command goes on from the last checkpoint, if any",
        )
    except FloatingPointError as error:
        code, message = 1, f"error: {error}"
    except (ValueError, OSError) as error:
        code, message = 2, f"error: {' '.join(str(error).split())}"
    except jax.errors.JaxRuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        if "RESOURCE_EXHAUSTED" in reason:
            code, message = (
                2,
                (
                    "error: out of device memory; raise --gradient_accumulation_steps, lower "
                    "--train_batch_size, or use --mixed_precision bf16 and --gradient_checkpointing"
                ),
            )
        elif jax.process_count() > 1 and re.search(LOST, reason):
            code, message = (
                1,
                (
                    f"error: process {jax.process_index()} has lost another one ({reason}); start "
                    "all with the same command, and they go on from the last checkpoint"
                ),
            )
        else:
            code, message = 1, traceback.format_exc()
    except Exception:
        code, message = 1, traceback.format_exc()
    print(message, file=sys.stderr)
    if jax.distributed.is_initialized():  # an orderly exit would wait for the other processes
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    run_main(main)
