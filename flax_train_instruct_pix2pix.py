"""Fine-tune Stable Diffusion into InstructPix2Pix: one readable pmap loop.

    python flax_train_instruct_pix2pix.py \\
        --pretrained_model_name_or_path stable-diffusion-v1-5/stable-diffusion-v1-5 \\
        --unet_model_name_or_path modified_unet --train_data_dir data --output_dir instruct-pix2pix

`modified_unet` is what create_modified_unet.py wrote; `data` is a folder of parquet shards. On a
CPU, with the demo's model and data (`make demo` makes both), in about a minute:

    python flax_train_instruct_pix2pix.py --pretrained_model_name_or_path demo/base_model \\
        --unet_model_name_or_path demo/output/modified_unet --train_data_dir demo/output/data \\
        --resolution 64 --train_batch_size 8 --max_train_steps 50 --output_dir /tmp/trained

Stable Diffusion 1.5 needs about 14 GB per device for parameters, optimizer and gradients, 3.4 GB
for the average from its first step on, and the activations of its share of the batch. On a slice
run the same command on every worker, each with its own part of the shards (script.py, script.sh)
or all with the same. No row is trained on twice in an epoch; it says how many are left out.

Papers: InstructPix2Pix (arXiv 2211.09800); the late EMA is MosaicML's for Stable Diffusion 2.
"""

import json
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import struct
from flax.jax_utils import replicate, unreplicate
from flax.training.common_utils import shard
from jax.experimental.multihost_utils import process_allgather
from tqdm import tqdm

from modeling_flax_clip import FlaxCLIPTextModel
from modeling_flax_unet import FlaxUNet2DConditionModel
from modeling_flax_vae import FlaxAutoencoderKL
from parquet_processing import ParquetImagePairs
from pipeline_flax_stable_diffusion_instruct_pix2pix import (
    FlaxStableDiffusionInstructPix2PixPipeline,
    load_tokenizer,
)
from scheduling_flax import FlaxDDPMScheduler, scheduler_from_pretrained

EMA_HORIZONS = 5  # the averaging window in units of 1 / (1 - decay)


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
    resolution: int = 256  # side of the square training pictures, pixels
    random_crop: bool = True  # crop anywhere along the longer side, else in the middle
    random_flip: bool = True  # mirror half of the pairs
    image_interpolation_mode: Literal["dct", "lanczos", "bicubic"] = "dct"  # dct: while decoding
    shuffle_buffer: int = 4096  # encoded pairs to draw from, over all hosts; see the README
    max_bad_fraction: float = 0.1  # share of pairs that cannot be decoded at which a run stops
    dataloader_num_workers: int = 0  # decoding threads; 0 takes one per core
    # training
    train_batch_size: int = 16  # pairs per step over all devices of all hosts
    gradient_accumulation_steps: int = 1  # micro-batches that a step's pairs are split into
    max_train_steps: int = 15000  # optimizer steps
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
    ema: Literal["none", "late", "full"] = "late"  # late: only in the final stage
    ema_fraction: float = 0.036  # late: the share of the run, at its end, that is averaged
    ema_start_step: int | None = None  # late: the first averaged step, instead of ema_fraction
    ema_decay: float | None = None  # of a step; None is 1 - 5 / (averaged steps)
    ema_every: int = 1  # steps between updates, which then have the decay ema_decay^ema_every
    ema_warmup: bool = False  # smaller decays at first, (1 + n) / (10 + n), as diffusers has it
    # output
    output_dir: str = "instruct-pix2pix-model"  # becomes a diffusers pipeline folder
    overwrite_output_dir: bool = False  # replace the model that an earlier run left there
    save_raw_unet: bool = False  # also keep the UNet before averaging, in OUTPUT_DIR/unet_raw
    logging_steps: int = 50  # steps between lines of metrics.jsonl
    report_to: Literal["none", "wandb"] = "none"
    tracker_project_name: str = "instruct-pix2pix"  # wandb project


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


def split_axis(shape, num_slices):
    """The longest axis that num_slices divides; None: no such, or 1 slice, and it stays whole."""
    axes = [axis for axis, size in enumerate(shape) if size and size % num_slices == 0]
    return max(axes, key=lambda axis: shape[axis], default=None) if num_slices > 1 else None


def my_slice(tree, num_slices):
    """This replica's slice of every parameter, under pmap(axis_name="batch")."""

    def cut(x):
        axis = split_axis(x.shape, num_slices)
        if axis is None:
            return x
        size = x.shape[axis] // num_slices
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index("batch") * size, size, axis)

    return jax.tree.map(cut, tree)


def mean_slice(grads, num_slices):
    """This replica's slice of the mean of all replicas' gradients: a reduce-scatter."""

    def reduce(g):
        axis = split_axis(g.shape, num_slices)
        if axis is None:
            return jax.lax.pmean(g, "batch")
        return jax.lax.psum_scatter(g, "batch", scatter_dimension=axis, tiled=True) / num_slices

    return jax.tree.map(reduce, grads)


def whole(slices, like, num_slices):
    """Put the replicas' slices together again, an all-gather; like: a tree of the whole shapes."""

    def gather(x, full):
        axis = split_axis(full.shape, num_slices)
        return x if axis is None else jax.lax.all_gather(x, "batch", axis=axis, tiled=True)

    return jax.tree.map(gather, slices, like)


def norm_of_slices(slices, like, num_slices):
    """Global norm of a tree of which every replica has its slices."""
    squares = jax.tree.map(lambda x: jnp.sum(jnp.square(x)), slices)
    is_cut = [split_axis(x.shape, num_slices) is not None for x in jax.tree.leaves(like)]
    cut = sum(x for x, c in zip(jax.tree.leaves(squares), is_cut) if c)
    uncut = sum(x for x, c in zip(jax.tree.leaves(squares), is_cut) if not c)
    return jnp.sqrt(jax.lax.psum(cut, "batch") + uncut if any(is_cut) else uncut)


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
        batch: original_pixel_values and edited_pixel_values, uint8 (B, R, R, 3); input_ids (B, T).
        frozen, models: as for train_step.

    Returns:
        mean and std of the edited pictures' posterior, (B, h, w, C) float32; mode of the
        originals', (B, h, w, C); text states (B, T, D).
    """
    pictures = jnp.concatenate((batch["edited_pixel_values"], batch["original_pixel_values"]))
    pictures = jnp.transpose(pictures.astype(jnp.float32) / 127.5 - 1, (0, 3, 1, 2))
    posterior = models.vae.apply(
        {"params": frozen["vae"]}, pictures, method=models.vae.encode
    ).latent_dist  # (2B, h, w, C)
    B = len(pictures) // 2
    text = models.text_encoder.apply({"params": frozen["text_encoder"]}, batch["input_ids"])[0]
    return posterior.mean[:B], posterior.std[:B], posterior.mode()[B:], text


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
        batch: original_pixel_values and edited_pixel_values, uint8 (B, R, R, 3); input_ids (B, T).
        base_rng: PRNG key, the same on every device and at every step.
        models: Models.
        tx: optax optimizer that works on each number by itself, as Adam does.
        dropout_rate: see conditioning_dropout.
        snr_gamma: see diffusion_loss.
        max_grad_norm: longer gradients are scaled to this global norm.
        num_micro_batches: a divisor of B; activations of one at a time are held.
        num_slices: the number of devices, over which the optimizer is then shared out: each
            updates its slice of the parameters and holds the moments of no more. 1: all do all.

    Returns:
        (state, {"loss", "grad_norm"}), both metrics averaged over all devices.

    Source: InstructPix2Pix (arXiv 2211.09800), section 3.2; ZeRO (arXiv 1910.02054), section 5.
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
    params = my_slice(state.params, num_slices)
    updates, opt_state = tx.update(grads, state.opt_state, params)
    params = whole(optax.apply_updates(params, updates), state.params, num_slices)
    state = TrainState(step=state.step + 1, params=params, opt_state=opt_state)
    return state, {"loss": jax.lax.pmean(loss, "batch"), "grad_norm": grad_norm}


def ema_start(params, num_slices=1):
    """A copy of the parameters, or this replica's slice: the average starts where they are."""
    return jax.tree.map(jnp.copy, my_slice(params, num_slices))


def ema_update(ema_params, params, decay, num_slices=1):
    """Move the average towards the parameters: decay * ema_params + (1 - decay) * params."""
    params = my_slice(params, num_slices)
    return jax.tree.map(lambda ema, p: ema + (1 - decay) * (p - ema), ema_params, params)


def warmup_decay(num_updates, decay):
    """The decay of an update (counted from 1) with warm-up: (1 + s) / (10 + s), at most decay.

    s counts the updates before this one; the first takes the parameters as they are.

    Source: diffusers' EMAModel.
    """
    s = num_updates - 1
    return min(decay, (1 + s) / (10 + s)) if s else 0.0


class EmaPlan(NamedTuple):
    """When the average is taken and how fast it forgets."""

    first_step: int | None  # the first averaged step; None: no average
    every: int  # steps between updates
    decay: Callable[[int], float]  # of an update, counted from 1

    def update_of(self, num_steps):
        """Which update the average gets after so many steps of the run, from 1; 0: none."""
        averaged = 0 if self.first_step is None else num_steps - self.first_step
        return averaged // self.every if averaged > 0 and averaged % self.every == 0 else 0


def ema_plan(
    ema, max_train_steps, fraction=0.036, start_step=None, decay=None, every=1, warmup=False
):
    """Plan the average of a run.

    The default decay is 1 - 5 / window: whatever the run's length, the weights that the average
    starts from keep e^-5 = 0.7% of it.

    Args:
        ema: "none", "late" (in the final stage) or "full" (from the first step).
        max_train_steps: length of the run, steps.
        fraction: late: the share of the run that is averaged, in (0, 1].
        start_step: late: the first averaged step instead, in [0, max_train_steps); or None.
        decay: of a step, in [0, 1), or None for the default.
        every: steps between updates, which then have the decay decay^every.
        warmup: smaller decays at first, see warmup_decay.

    Returns:
        EmaPlan.

    Raises:
        ValueError: a number is out of its range, or has no meaning with this kind of average.

    Source: MosaicML's Stable Diffusion 2: decay 0.9999 over the last 50k of 1.4M steps.
    """
    if ema != "late" and start_step is not None:
        raise ValueError(f"ema_start_step={start_step} goes with --ema late, not {ema}")
    if ema == "none":
        for name, value in (("ema_decay", decay), ("ema_warmup", warmup or None)):
            if value is not None:
                raise ValueError(f"{name}={value} goes with --ema late or full, not none")
        return EmaPlan(None, 1, lambda n: 0.0)
    if not 0 < fraction <= 1:
        raise ValueError(
            f"ema_fraction={fraction} must be above 0 and at most 1, a window as long as the run"
        )
    if ema == "full":
        start = 0
    elif start_step is None:
        start = max_train_steps - max(1, round(max_train_steps * fraction))
    else:
        start = start_step
    if not 0 <= start < max_train_steps:
        raise ValueError(
            f"ema_start_step={start} must be from 0 to max_train_steps-1, {max_train_steps - 1}; "
            "or use --ema none"
        )
    window = max_train_steps - start
    if not 1 <= every <= window:
        raise ValueError(f"ema_every={every} must be from 1 to the averaged steps, {window}")
    if decay is None:
        decay = max(0.0, 1 - EMA_HORIZONS / window)
    if not 0 <= decay < 1:
        raise ValueError(f"ema_decay={decay} must be at least 0 and below 1")
    decay **= every
    return EmaPlan(start, every, partial(warmup_decay, decay=decay) if warmup else lambda n: decay)


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


def nearest_multiples(number, factor):
    """The positive multiples of factor around number, for an error message: "2 or 4"."""
    below = number // factor * factor
    return " or ".join(str(n) for n in (below, below + factor) if n > 0)


def check_config(config: Config, num_devices: int):
    """Raise a ValueError for what no run could work with, before anything is loaded."""
    for name in ("train_batch_size", "max_train_steps", "logging_steps"):
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
    unet = unet.clone(gradient_checkpointing=config.gradient_checkpointing)
    vae, vae_params = FlaxAutoencoderKL.from_pretrained(source, subfolder="vae", **files)
    text_encoder, text_params = FlaxCLIPTextModel.from_pretrained(
        source, subfolder="text_encoder", **files
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
    if unet.cross_attention_dim != text_encoder.hidden_size:
        raise ValueError(
            f"the UNet in {config.unet_model_name_or_path} reads text states "
            f"{unet.cross_attention_dim} wide, the text encoder of {source} makes "
            f"{text_encoder.hidden_size}; take both from the same Stable Diffusion"
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
    null_text = jax.jit(text_encoder.apply)({"params": text_params}, null_ids)[0]
    frozen = {
        "vae": float32(vae_params),
        "text_encoder": float32(text_params),
        "null_text": np.asarray(null_text),
        "scheduler": scheduler_state,
    }
    return Models(unet, vae, text_encoder, scheduler), pipeline, frozen, float32(unet_params)


def train(config: Config):
    """The run: load, loop, save. Returns nothing; the results are in config.output_dir."""
    num_devices, num_processes = jax.device_count(), jax.process_count()
    is_main = jax.process_index() == 0
    check_config(config, num_devices)
    average = ema_plan(
        config.ema,
        config.max_train_steps,
        config.ema_fraction,
        config.ema_start_step,
        config.ema_decay,
        config.ema_every,
        config.ema_warmup,
    )
    schedule = lr_schedule(
        config.lr_scheduler, config.learning_rate, config.lr_warmup_steps, config.max_train_steps
    )
    dtype = jnp.bfloat16 if config.mixed_precision == "bf16" else jnp.float32
    dataset = ParquetImagePairs(  # first: its faults show before gigabytes are loaded
        config.train_data_dir,
        batch_size=config.train_batch_size // num_processes,
        resolution=config.resolution,
        seed=config.seed,
        random_crop=config.random_crop,
        random_flip=config.random_flip,
        resample=config.image_interpolation_mode,
        original_image_column=config.original_image_column,
        edited_image_column=config.edited_image_column,
        edit_prompt_column=config.edit_prompt_column,
        process_index=jax.process_index(),
        process_count=num_processes,
        num_parts=num_devices,
        all_gather=process_allgather if num_processes > 1 else None,
        num_threads=config.dataloader_num_workers,
        shuffle_buffer=config.shuffle_buffer,
        max_bad_fraction=config.max_bad_fraction,
    )
    models, pipeline, frozen, params = load_models(config, dtype)

    tx = make_optimizer(
        schedule,
        config.adam_beta1,
        config.adam_beta2,
        config.adam_epsilon,
        config.adam_weight_decay,
    )
    num_slices = num_devices if config.shard_optimizer else 1
    # One axis name for all: pmap compiles anew for arrays that come from an axis of another name.
    pmap = partial(jax.pmap, axis_name="batch")
    p_train_step = pmap(
        partial(
            train_step,
            models=models,
            tx=tx,
            dropout_rate=config.conditioning_dropout_prob,
            snr_gamma=config.snr_gamma,
            max_grad_norm=config.max_grad_norm,
            num_micro_batches=config.gradient_accumulation_steps,
            num_slices=num_slices,
        ),
        donate_argnums=0,
    )
    p_init = pmap(
        lambda p: TrainState(jnp.int32(0), p, tx.init(my_slice(p, num_slices))), donate_argnums=0
    )
    p_ema_start = pmap(partial(ema_start, num_slices=num_slices))
    p_ema_update = pmap(partial(ema_update, num_slices=num_slices), donate_argnums=0)
    p_whole = pmap(partial(whole, num_slices=num_slices))

    state = p_init(replicate(params, axis_name="batch"))
    # In the compute dtype on the devices; what is saved at the end keeps its precision.
    cast = partial(jax.tree.map, lambda x: np.asarray(x, dtype))
    on_device = {name: cast(frozen[name]) for name in ("vae", "text_encoder")}
    p_frozen = replicate(frozen | on_device, axis_name="batch")
    del on_device
    base_rng = replicate(jax.random.PRNGKey(config.seed), axis_name="batch")
    ema_params = None
    num_params = sum(x.size for x in jax.tree.leaves(params))
    del params

    output_dir = Path(config.output_dir)
    log = None
    if is_main:
        output_dir.mkdir(parents=True, exist_ok=True)
        (output_dir / "config.json").write_text(json.dumps(asdict(config), indent=2) + "\n")
        log = MetricsLog(config, output_dir / "metrics.jsonl")
        print(
            f"training {num_params / 1e6:.1f}M parameters on "
            f"{len(dataset) * config.train_batch_size} of {dataset.num_rows} pairs an epoch: "
            f"{config.train_batch_size} pairs a step on {num_devices} device(s), "
            f"{jax.devices()[0].device_kind}"
        )
        if average.first_step is not None:
            decay = average.decay(config.max_train_steps)
            print(f"averaging the weights from step {average.first_step} with decay {decay:.6g}")

    ema_decay = None
    pending = []  # metrics still on the device, one dict per step since the last logged one
    with tqdm(
        total=config.max_train_steps, unit="step", desc="train", disable=not is_main
    ) as progress:
        progress.set_postfix_str("compiling")
        batches = endless_batches(dataset, pipeline.prepare_text_inputs)
        for step, batch in zip(range(config.max_train_steps), batches):
            if step == average.first_step:
                ema_params = p_ema_start(state.params)
            state, metrics = p_train_step(state, p_frozen, shard(batch), base_rng)
            if num_updates := average.update_of(step + 1):
                ema_decay = average.decay(num_updates)
                decay = replicate(np.float32(ema_decay), axis_name="batch")
                ema_params = p_ema_update(ema_params, state.params, decay)
            pending.append(metrics)
            if step == 0:  # the clock starts after compilation
                jax.block_until_ready(metrics)
                started, images = time.perf_counter(), 0
                progress.set_postfix_str("")
            else:  # one step stays in flight, so the bar is honest
                jax.block_until_ready(pending[-2:-1])
                images += config.train_batch_size
            progress.update()

            num_steps = step + 1
            if num_steps % config.logging_steps and num_steps < config.max_train_steps:
                continue
            losses, norms = np.array(
                [[unreplicate(m[name]) for m in pending] for name in ("loss", "grad_norm")]
            )
            check_finite(losses + norms, num_steps - len(losses))
            num_bad = dataset.num_bad
            if num_processes > 1:
                num_bad = int(process_allgather(np.int32(num_bad)).sum())
            seconds = time.perf_counter() - started
            row = {
                "step": num_steps,
                "loss": float(losses.mean()),
                "lr": float(schedule(step)),
                "grad_norm": float(norms[-1]),
                "images_per_second": images / seconds if images else None,
                "ema_decay": ema_decay,
                "num_bad": num_bad,
            }
            pending, images, started = [], 0, time.perf_counter()
            if is_main:
                log.write(row)
                rate = row["images_per_second"]
                progress.set_postfix_str(
                    f"loss={row['loss']:.4f}" + (f", {rate:.1f} images/s" if rate else "")
                )

    raw_params = jax.device_get(unreplicate(state.params))
    if ema_params is not None:
        averaged = jax.device_get(unreplicate(p_whole(ema_params, state.params)))
    if is_main:
        params = raw_params if ema_params is None else averaged
        parts = {"unet": params, "vae": frozen["vae"], "text_encoder": frozen["text_encoder"]}
        pipeline.save_pretrained(output_dir, parts)
        if config.save_raw_unet:
            models.unet.save_pretrained(output_dir / "unet_raw", params=raw_params)
        log.close()
        print(f"saved {config.output_dir}")


def endless_batches(dataset, tokenize):
    """Epoch after epoch, what train_step needs of each batch; tokenize: prompts to ids (B, T)."""
    while True:
        for batch in dataset:
            yield {"input_ids": tokenize(batch.pop("edit_prompt")), **batch}


def check_finite(numbers, first_step):
    """Raise a FloatingPointError that names the first step whose number is not finite."""
    bad = [first_step + int(i) for i in np.flatnonzero(~np.isfinite(numbers))]
    if bad:
        raise FloatingPointError(
            f"the loss or gradient is not finite at step {bad[0]} ({len(bad)} of the last "
            f"{len(numbers)} steps); nothing was saved; lower --learning_rate, or leave out "
            "--mixed_precision bf16"
        )


class MetricsLog:
    """metrics.jsonl, one object a line, and wandb if asked for."""

    def __init__(self, config, path):
        self.path = path
        self.run = None
        path.write_text("")
        if config.report_to == "wandb":
            import wandb

            try:
                self.run = wandb.init(project=config.tracker_project_name, config=asdict(config))
            except wandb.errors.Error as error:
                raise ValueError(
                    f"wandb: {error}; run `wandb login`, set WANDB_MODE=offline, or leave out "
                    "--report_to wandb"
                ) from error

    def write(self, row):
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        if self.run is not None:
            self.run.log(row, step=row["step"])

    def close(self):
        if self.run is not None:
            self.run.finish()


def main():
    """Read the flags, train; the user's mistakes end in one line and exit code 2."""
    logging.basicConfig(format="%(levelname)s: %(message)s")
    config = tyro.cli(Config, description=__doc__, use_underscores=True)
    try:
        train(config)
    except KeyboardInterrupt:
        print("interrupted; nothing was saved, for that happens at the end", file=sys.stderr)
        sys.exit(130)
    except (ValueError, OSError, FloatingPointError, jax.errors.JaxRuntimeError) as error:
        message = " ".join(str(error).split())
        if isinstance(error, jax.errors.JaxRuntimeError):
            if "RESOURCE_EXHAUSTED" not in message:
                raise
            message = (
                "out of device memory; lower --train_batch_size, or use --mixed_precision bf16 "
                "and --gradient_checkpointing"
            )
        print(f"error: {message}", file=sys.stderr)
        sys.exit(1 if isinstance(error, FloatingPointError) else 2)


if __name__ == "__main__":
    main()
