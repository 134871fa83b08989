"""Fine-tune Stable Diffusion or SDXL into InstructPix2Pix with one pmap.

    python flax_train_instruct_pix2pix.py \\
        --pretrained_model_name_or_path stable-diffusion-v1-5/stable-diffusion-v1-5 \\
        --unet_model_name_or_path modified_unet --train_data_dir data --output_dir instruct-pix2pix

`modified_unet` is the output of create_modified_unet.py, `data` a directory of parquet shards. With
the demo's model and data (run `make demo` once), in about one minute on a CPU:

    python flax_train_instruct_pix2pix.py --pretrained_model_name_or_path demo/base_model \\
        --unet_model_name_or_path demo/output/modified_unet --train_data_dir demo/output/data \\
        --resolution 64 --train_batch_size 8 --max_train_steps 50 --output_dir /tmp/trained

After SIGTERM, Ctrl-C or a crash the same command resumes from the newest checkpoint in
OUTPUT_DIR/checkpoints. The final weights are bit-identical; if the number of devices changes, they
differ by rounding. With more --max_train_steps a finished run continues. On a TPU slice, run the
same command on every worker; workers have either different shards (script.py, script.sh) or all
shards. Slurm and Open MPI are detected; on other clusters also give --coordinator_address,
--num_processes and --process_id.

Memory for Stable Diffusion 1.5: 3.4 GB each for float32 parameters, gradients, two Adam moments and
the EMA, sharded over all devices; on every device the parameters in the compute dtype and the
activations of one micro-batch. compile_for.py computes the sum for TPUs and GPUs.

Papers: InstructPix2Pix (arXiv 2211.09800); ZeRO (arXiv 1910.02054) for sharded training state;
MosaicML's Stable Diffusion 2 for the late EMA.
"""

import logging
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import (
    MuonDimensionNumbers,
    ScheduleFreeState,
    muon,
    schedule_free_adamw,
    schedule_free_eval_params,
)

from diffusers_flax.command_line import Above, AtLeast, AtMost, Below, Between, Seed, run_main
from diffusers_flax.training.batches import Batches, compile_steps, length_of_run, open_dataset
from diffusers_flax.training.checkpoints import Checkpoints, StopSignal, run_identity
from diffusers_flax.training.ema import compile_averages, ema_plan
from diffusers_flax.training.models import (
    encode_batch,
    load_models,
    mixed_precision_dtype,
    move_to_devices,
    params_beside_unet,
)
from diffusers_flax.training.output import open_run, save_model
from diffusers_flax.training.reports import (
    Reports,
    Validation,
    describe_run,
    is_due,
    save_snapshots,
)
from diffusers_flax.training.sharding import (
    WholeArrays,
    combine,
    each_array,
    gather,
    gather_by_block,
    replicate,
    replicated_number,
    shard_axes,
    state_shapes,
    to_host,
    update_state,
)

Count = Annotated[int, AtLeast(1)]
Positive = Annotated[float, Above(0)]


@dataclass(frozen=True)
class Config:
    """Flags. Which of them may change on resume is in diffusers_flax/training/flags.py."""

    # model; on resume, directories may change but not the weights in them
    pretrained_model_name_or_path: str  # pipeline directory, hub id or file
    # UNet with 8 input channels, or 12 for a reference image too, such as
    # create_modified_unet.py's: directory, hub id or file
    unet_model_name_or_path: str = ""
    # another VAE, directory, hub id or file; "": the model's own
    pretrained_vae_model_name_or_path: str = ""
    revision: str | None = None  # branch, tag or commit of a hub id
    variant: str | None = None  # variant of its files, e.g. fp16
    # configs of one-file models: a directory or hub id; default: their family's
    config_name_or_path: str | None = None
    use_ema_weights: bool = False  # of a one-file UNet: the averages of its weights
    # data

    # directories of *.parquet shards, all or this host's, or URLs; a batch mixes them
    train_data_dir: tuple[str, ...] = ("data",)
    # weights of several directories, in any unit; default: in proportion to their pairs
    train_data_weights: tuple[float, ...] = ()
    original_image_column: str = ""  # original image; "": as in a known set, docs/data.md
    edited_image_column: str = ""  # edited image; "": likewise
    edit_prompt_column: str = ""  # one or several instructions; "": likewise
    # masks, white where an image may change; read for mask_loss_weight; "": mask_img, mask_image or
    # mask
    mask_column: str = ""
    # second image of an edit, read by a UNet with 12 input channels; "": reference_image
    reference_image_column: str = ""
    max_train_samples: Count | None = None  # use the first N pairs of each set only; None: all
    resolution: Count = 256  # side of the square training images, pixels
    # sizes WIDTHxHEIGHT of about resolution² pixels; a pair gets the nearest aspect ratio; for one
    # train_data_dir; no values: default sizes; default: only squares
    aspect_ratio_buckets: tuple[str, ...] | None = None
    random_crop: bool = True  # crop at a random position, else in the centre
    random_flip: bool = True  # mirror half of the pairs
    image_interpolation_mode: Literal["dct", "lanczos", "bicubic"] = "dct"  # resizing; dct: fastest
    # encoded pairs in memory to draw from, over all hosts
    shuffle_buffer: Annotated[int, AtLeast(0)] = 4096
    # stop if more of the pairs cannot be used
    max_bad_fraction: Annotated[float, Between(0, 1)] = 0.1
    dataloader_num_workers: Annotated[int, AtLeast(0)] = 0  # decoding threads; 0: one per core
    # directory for the VAE's latents; with several train_data_dir a subdirectory for each; "": none
    cache_latents: str = ""
    # training
    train_batch_size: Count = 16  # global batch: pairs per optimizer step
    gradient_accumulation_steps: Count = 1  # micro-batches per step
    max_train_steps: Count = 15000  # optimizer steps
    # replaces max_train_steps, with one train_data_dir; None: off
    num_train_epochs: Count | None = None
    learning_rate: Positive = 5e-5  # peak of the schedule
    lr_scheduler: Literal["constant", "linear", "cosine"] = "constant"  # decay after warm-up
    lr_warmup_steps: Annotated[int, AtLeast(0)] = 0  # steps of linear warm-up from 0
    # compared in docs/training.md; the next four are numbers of AdamW, and of others that have them
    optimizer: Literal["adamw", "lion", "muon", "adafactor", "schedule_free"] = "adamw"
    adam_beta1: Annotated[float, AtLeast(0), Below(1)] = 0.9  # decay of the first moment
    # decay of the second moment; Lion's first, where 0.99 is usual
    adam_beta2: Annotated[float, AtLeast(0), Below(1)] = 0.999
    adam_weight_decay: Annotated[float, AtLeast(0)] = 1e-2  # decoupled, as in AdamW; 0: off
    adam_epsilon: Positive = 1e-8  # added to the root of the second moment
    max_grad_norm: Positive = 1.0  # clip the gradient to this global norm
    snr_gamma: Positive | None = None  # min-SNR loss weighting, 5 in the paper; None: off
    # flow: the UNet learns the velocity of a rectified flow; None: what it predicts already
    prediction: Literal["flow"] | None = None
    # loss inside the mask relative to outside; 1: no masks are read
    mask_loss_weight: Positive = 1.0
    # probability of dropping the text; the same for the image, for both, and for a reference alone;
    # at most 1/3, with references 1/4; 0: off
    conditioning_dropout_prob: Annotated[float, Between(0, 1 / 3)] = 0.05
    mixed_precision: Literal["no", "bf16"] = "no"  # compute dtype; weights stay float32
    gradient_checkpointing: bool = False  # less memory, slower
    # with gradient_checkpointing: a block gathers its parameters when it runs, for models that do
    # not fit into a device's memory; parameters are sent twice
    gather_by_block: bool = False
    seed: Seed = 42  # of data order, augmentation, noise and dropout
    # LoRA: train low-rank updates and the UNet's first convolution; all else is frozen
    lora_rank: Count | None = None  # rank of the updates; None: train the whole UNet
    lora_alpha: Positive | None = None  # updates are scaled by alpha / rank; None: the rank
    # layers with updates, by the ends of their PyTorch names
    lora_target_modules: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0")
    # 8-bit kernels of the frozen UNet and text encoders, with --lora_rank; None: the compute dtype
    storage: Literal["float8", "int8"] | None = None
    merge_lora: bool = False  # also write a pipeline that contains the updates
    # exponential moving average (EMA) of the weights
    ema: Literal["none", "late", "full", "power"] = "late"  # late: only the last steps
    # late: fraction of the run, at its end, to average
    ema_fraction: Annotated[float, Above(0), AtMost(1)] = 0.036
    # late: first averaged step; replaces ema_fraction
    ema_start_step: Annotated[int, AtLeast(0)] | None = None
    # decay per step; None: 1 - 5 / (averaged steps)
    ema_decay: Annotated[float, AtLeast(0), Below(1)] | None = None
    ema_every: Count = 1  # steps between updates; each has decay ema_decay ** ema_every
    ema_warmup: bool = False  # decay of update n at most (1 + n) / (10 + n), as in diffusers
    ema_snapshot_steps: Count | None = None  # power: steps between snapshots; None: 1/8 of the run
    # output
    output_dir: str = "instruct-pix2pix-model"  # for model, checkpoints and metrics
    overwrite_output_dir: bool = False  # replace an existing model
    save_raw_unet: bool = False  # also save the UNet without EMA, in unet_raw/
    # steps between lines of metrics.jsonl; None: 50, in short runs a twentieth of the run
    logging_steps: Count | None = None
    report_to: Literal["none", "wandb"] = "none"  # service besides metrics.jsonl
    tracker_project_name: str = "instruct-pix2pix"  # wandb project
    # steps between checkpoints; 0: only when stopped
    checkpointing_steps: Annotated[int, AtLeast(0)] = 500
    checkpoints_total_limit: Count | None = 2  # newest checkpoints to keep; None: all
    resume_from_checkpoint: str = "latest"  # latest, none, or DIR/checkpoints/STEP
    validation_image: tuple[str, ...] = ()  # images to edit during training
    validation_prompt: tuple[str, ...] = ()  # an instruction for each, or one for all
    # a reference image for each, or one for all, for UNets with 12 input channels
    validation_reference: tuple[str, ...] = ()
    # weight of the instruction in these edits; default: 7.5, SDXL 3, CosXL 7, short runs 2
    validation_guidance_scale: Annotated[float, AtLeast(0)] | None = None
    # similarity of these edits to the original image; default: 1.5, short runs 1.2
    validation_image_guidance_scale: Annotated[float, AtLeast(0)] | None = None
    validation_steps: Count = 500  # steps between validations, saved in validation/
    profile_steps: str = ""  # FIRST:LAST, steps to trace into profile/, counted from 0; "": none
    push_to_hub: bool = False  # upload the model; needs HF_TOKEN or `hf auth login`
    hub_model_id: str | None = None  # OWNER/NAME; None: the name of output_dir
    compilation_cache_dir: str = "~/.cache/jax"  # cache of compiled programs; "": none
    # several hosts without a TPU slice, Slurm or Open MPI: give all three flags
    coordinator_address: str | None = None  # HOST:PORT of process 0
    num_processes: int | None = None  # number of processes on all hosts
    process_id: int | None = None  # index of this process, from 0


def conditioning_dropout(keys, text, null_text, image_latents, rate, num_images=1):
    """Drop text, image or both, so that one network learns all branches of the guidance.

    For one uniform number u per sample, text is dropped if u < rate, text and image if
    rate <= u < 2 rate, the image if 2 rate <= u < 3 rate. A reference image is dropped with the
    image, and alone if 3 rate <= u < 4 rate, so that the network also edits without one.

    Args:
        keys: one PRNG key per sample, (B, ...).
        text: the text encoder's outputs, {"states": (B, T, D)}; for SDXL also "pooled" (B, P) and
            "time_ids" (B, 6).
        null_text: replaces dropped text, (1, ...) each; entries missing here are never dropped.
        image_latents: unscaled latents of the original image, (B, C, h, w), or of the original and
            the reference image, (B, 2C, h, w).
        rate: probability of each case, in [0, 1/3], with references in [0, 1/4]; 0 disables
            dropout.
        num_images: 1, or 2 with references.

    Returns:
        (text, image_latents) with dropped text replaced by null_text and dropped latents by zeros.

    Source: InstructPix2Pix (arXiv 2211.09800), section 3.2.1; the case of the reference is ours.
    """
    u = jax.vmap(jax.random.uniform)(keys)  # (B,)
    drop_text = u < 2 * rate
    drop_image = (u >= rate) & (u < 3 * rate)

    def drop(name, x):
        if name not in null_text:
            return x
        mask = drop_text.reshape(-1, *[1] * (x.ndim - 1))
        return jnp.where(mask, null_text[name], x)

    text = {name: drop(name, x) for name, x in text.items()}
    image_latents = jnp.where(drop_image[:, None, None, None], 0, image_latents)
    if num_images == 2:
        drop_reference = (u >= 3 * rate) & (u < 4 * rate)
        image, reference = jnp.split(image_latents, 2, axis=1)
        reference = jnp.where(drop_reference[:, None, None, None], 0, reference)
        image_latents = jnp.concatenate((image, reference), axis=1)
    return text, image_latents


def diffusion_loss(
    params,
    unet,
    scheduler,
    scheduler_state,
    x_0,
    condition,
    text,
    noise,
    timesteps,
    snr_gamma=None,
    mask=None,
    mask_loss_weight=1.0,
):
    """Mean squared error of the UNet's prediction of noise, or of v if the scheduler says so.

    Args:
        params: the UNet's parameters.
        unet: FlaxUNet2DConditionModel with in_channels 2C; 3C with a reference image.
        scheduler, scheduler_state: FlaxDDPMScheduler and its state; for CosXL
            FlaxEDMTrainingScheduler.
        x_0: scaled latents of the edited image, (B, C, h, w) float32.
        condition: unscaled latents of the original image, (B, C, h, w), or of the original and the
            reference image, (B, 2C, h, w); for CosXL scaled.
        text: as for conditioning_dropout.
        noise: standard normal, (B, C, h, w) float32.
        timesteps: (B,) of scheduler.draw_timesteps.
        snr_gamma: > 0, 5 in the paper; the loss in terms of x_0 is weighted by
            min(SNR, snr_gamma). None: equal weights for noise or v.
        mask: uint8 (B, H, W), 255 where the image may change; H, W are multiples of h, w. None:
            all latents have the same weight.
        mask_loss_weight: > 0, weight inside the mask relative to outside. The mean weight of a
            sample is 1.

    Returns:
        The mean loss, a float32 scalar.

    Source: DDPM (arXiv 2006.11239), equation 14; InstructPix2Pix (arXiv 2211.09800), equation 1;
    min-SNR (arXiv 2303.09556), section 3.4; rectified flow (arXiv 2209.03003), equation 1.
    """
    x_t = scheduler.add_noise(scheduler_state, x_0, noise, timesteps)
    target = noise
    is_flow = getattr(scheduler, "is_flow", False)  # whose config may name another type
    if is_flow or scheduler.config.prediction_type != "epsilon":
        target = scheduler.get_velocity(scheduler_state, x_0, noise, timesteps)
    x_in = jnp.concatenate((x_t, condition), axis=1)  # (B, 2C or 3C, h, w)
    added = {}
    if "pooled" in text:  # SDXL
        added["added_cond_kwargs"] = {"text_embeds": text["pooled"], "time_ids": text["time_ids"]}
    t = scheduler.model_timesteps(scheduler_state, timesteps)
    prediction = unet.apply({"params": params}, x_in, t, text["states"], **added).sample
    error = jnp.square(prediction.astype(jnp.float32) - target)  # (B, C, h, w)
    if mask is not None:
        B, _, h, w = x_0.shape
        blocks = mask.reshape(B, h, mask.shape[1] // h, w, mask.shape[2] // w)
        inside = jnp.round(blocks.astype(jnp.float32).mean(axis=(2, 4))) / 255  # as when cached
        weight = 1 + (mask_loss_weight - 1) * inside  # (B, h, w)
        error = error * (weight / weight.mean(axis=(1, 2), keepdims=True))[:, None]
    error = error.mean(axis=(1, 2, 3))  # (B,)
    if snr_gamma is None:
        return error.mean()
    alpha_bar = scheduler_state.common.alphas_cumprod[timesteps]
    snr = alpha_bar / (1 - alpha_bar)
    if scheduler.config.prediction_type == "v_prediction":
        weight = jnp.minimum(snr, snr_gamma) / (snr + 1)
    else:
        weight = jnp.minimum(1, snr_gamma / snr)
    return (error * weight).mean()


def train_step(
    state,
    frozen,
    batch,
    base_rng,
    *,
    models,
    tx,
    axes,
    dropout_rate,
    snr_gamma=None,
    mask_loss_weight=1.0,
    max_grad_norm=1.0,
    num_micro_batches=1,
    gather=gather,
):
    """One optimizer step on one device's rows of the batch; call it under pmap(axis_name="batch").

    Parameters, gradients and moments are this device's shards. Random numbers of a sample depend on
    base_rng, state.step and its row of the global batch, not on the number of devices or
    micro-batches. No RNG state needs to be saved.

    With the whole state on each device instead of shards, which takes fewer lines and more memory:
    replicate params and tx.init(params), call the loss on cast params without gather, and average
    the gradients with jax.lax.pmean before tx.update and optax.apply_updates.

    Args:
        state: TrainState.
        frozen: dict of parameters "vae" and "text_encoder"; "null_text", the encode_text of an
            empty prompt with B = 1; "scheduler", its state; with LoRA also the frozen "unet".
        batch: this device's rows, see encode_batch.
        base_rng: PRNG key, the same on every device and in every step.
        models: Models.
        tx: element-wise optax optimizer, such as Adam, or WholeArrays, see make_optimizer.
        axes: shard_axes of the UNet's parameters.
        dropout_rate: see conditioning_dropout.
        snr_gamma, mask_loss_weight: see diffusion_loss; 1: the batch needs no "mask".
        max_grad_norm: gradients with a larger global norm are scaled down to it.
        num_micro_batches: gradient accumulation steps, a divisor of B; saves activation memory.
        gather: (shards, axes, dtype) -> parameters; gather_by_block needs less memory.

    Returns:
        (state, {"loss", "grad_norm"}): mean loss and gradient norm over the global batch.

    Source: InstructPix2Pix (arXiv 2211.09800), section 3.2; ZeRO (arXiv 1910.02054), section 5.
    """
    B = len(batch["input_ids"])
    rows = jax.lax.axis_index("batch") * B + jnp.arange(B)  # rows of the global batch
    step_rng = jax.random.fold_in(base_rng, state.step)
    keys = jax.vmap(partial(jax.random.fold_in, step_rng))(rows)

    def loss_and_grads(batch, keys):
        posterior_keys, noise_keys, timestep_keys, dropout_keys = jax.vmap(
            partial(jax.random.split, num=4), out_axes=1
        )(keys)

        # The target is a scaled sample of the VAE's posterior, the condition its unscaled mode
        # (scaled for CosXL).
        mean, std, condition, text = encode_batch(batch, frozen, models)
        normal = jax.vmap(lambda key: jax.random.normal(key, mean.shape[1:]))
        x_0 = (mean + std * normal(posterior_keys)) * models.vae.config.scaling_factor
        x_0, condition, noise = (
            jnp.transpose(x, (0, 3, 1, 2)) for x in (x_0, condition, normal(noise_keys))
        )  # (B, C, h, w); condition with a reference image (B, 2C, h, w)
        num_images = condition.shape[1] // x_0.shape[1]
        text, condition = conditioning_dropout(
            dropout_keys, text, frozen["null_text"], condition, dropout_rate, num_images
        )
        timesteps = models.scheduler.draw_timesteps(timestep_keys)

        def loss_fn(shards):
            params = combine(frozen.get("unet", {}), gather(shards, axes, models.unet.dtype))
            return diffusion_loss(
                params,
                models.unet,
                models.scheduler,
                frozen["scheduler"],
                x_0,
                condition,
                text,
                noise,
                timesteps,
                snr_gamma,
                None if mask_loss_weight == 1 else batch["mask"],
                mask_loss_weight,
            )

        return jax.value_and_grad(loss_fn)(state.params)

    if num_micro_batches == 1:
        loss, grads = loss_and_grads(batch, keys)
    else:

        def add(total, micro_batch):
            return jax.tree.map(jnp.add, total, loss_and_grads(*micro_batch)), None

        micro_batches = jax.tree.map(
            lambda x: x.reshape(num_micro_batches, -1, *x.shape[1:]), (batch, keys)
        )
        zeros = jax.tree.map(jnp.zeros_like, (jnp.float32(0), state.params))
        total, _ = jax.lax.scan(add, zeros, micro_batches)
        loss, grads = jax.tree.map(lambda x: x / num_micro_batches, total)

    return update_state(tx, state, loss, grads, axes, max_grad_norm)


def train_step_options(config: Config):
    """train_step's keyword arguments that come from flags."""
    return dict(
        dropout_rate=config.conditioning_dropout_prob,
        snr_gamma=config.snr_gamma,
        mask_loss_weight=config.mask_loss_weight,
        max_grad_norm=config.max_grad_norm,
        num_micro_batches=config.gradient_accumulation_steps,
        gather=gather_by_block if config.gather_by_block else gather,
    )


def update_ema(averages, params, step, plan, p_start, p_update):
    """The averages of the weights after a step: an EMA of the final stage of the run.

    Before plan.first_step there is no average, and it costs neither time nor memory. There it
    starts as a copy of the weights. After every plan.every steps more it becomes
    decay * average + (1 - decay) * weights. The decay of update n is plan.decays(n): by default
    1 - 5 / (averaged steps), so that the copy keeps a share of e^-5; with --ema_warmup it grows and
    is at most (1 + n) / (10 + n).

    Args:
        averages: list of averages, sharded like the weights; empty before the first step.
        params: the weights, sharded.
        step: number of completed steps.
        plan: EmaPlan of ema_plan: one average, none, or with --ema power two.
        p_start: pmapped copy of the weights.
        p_update: pmapped (average, weights, decay) -> average.

    Returns:
        The new list; the old averages are donated.

    Source: MosaicML's Stable Diffusion 2: decay 0.9999 over the last 50k of 1.4M steps.
    """
    if plan.first_step is None or step < plan.first_step:
        return []
    if not averages:
        return [p_start(params) for _ in range(plan.num_averages)]
    n = plan.num_updates(step)
    if n == plan.num_updates(step - 1):
        return averages
    decays = map(replicated_number, plan.decays(n))
    return [p_update(average, params, decay) for average, decay in zip(averages, decays)]


def best_weights(state, averages):
    """The weights to use: the first average, or before there is one the trained weights.

    schedule_free trains at other weights than its average, which follows from its state.
    """
    if isinstance(state.opt_state, ScheduleFreeState):
        return schedule_free_average(state.opt_state, state.params)
    return averages[0] if averages else state.params


@jax.jit
def schedule_free_average(opt_state, params):
    """The average of schedule_free, sharded like params."""
    return jax.vmap(schedule_free_eval_params)(opt_state, params)


def make_optimizer(config: Config, num_steps):
    """The optimizer and its learning rate; write another one here, such as optax.rmsprop.

    A device has a part of each matrix and all vectors in one array. So the optimizer must treat
    every element alone, as AdamW, Lion, SGD and RMSProp do. For WholeArrays, such as Muon (whole
    matrices) or LAMB (norms of arrays), every device has all weights and the whole state.
    train_step clips the gradient. each_array shortens compilation.

    Args:
        config: Config.
        num_steps: length of the run.

    Returns:
        (optax optimizer, schedule: step from 0 -> learning rate).
    """
    decay_steps = num_steps - config.lr_warmup_steps
    schedule = {
        "constant": optax.constant_schedule(config.learning_rate),
        "linear": optax.linear_schedule(config.learning_rate, 0.0, decay_steps),
        "cosine": optax.cosine_decay_schedule(config.learning_rate, decay_steps),
    }[config.lr_scheduler]
    if config.lr_warmup_steps:
        warmup = optax.linear_schedule(0.0, config.learning_rate, config.lr_warmup_steps)
        schedule = optax.join_schedules([warmup, schedule], [config.lr_warmup_steps])
    decay = config.adam_weight_decay
    options = dict(b1=config.adam_beta1, b2=config.adam_beta2, weight_decay=decay)
    if config.optimizer == "lion":
        tx = optax.lion(schedule, **options)
    elif config.optimizer == "muon":  # Adam for vectors; updates as large as Adam's
        tx = muon(
            schedule,
            consistent_rms=0.2,  # arXiv 2502.16982, equation 4
            eps=config.adam_epsilon,
            weight_decay=decay,
            adam_b1=config.adam_beta1,
            adam_b2=config.adam_beta2,
            muon_weight_dimension_numbers=matrix_axes,
        )
        return WholeArrays(*tx), schedule
    elif config.optimizer == "adafactor":
        tx = optax.adafactor(
            schedule,
            multiply_by_parameter_scale=False,  # the learning rate means what it does for AdamW
            weight_decay_rate=lambda step: decay * schedule(step),
        )
        return WholeArrays(*each_array(tx)), schedule
    elif config.optimizer == "schedule_free":
        tx = schedule_free_adamw(schedule, eps=config.adam_epsilon, **options)
    else:
        tx = optax.adamw(schedule, eps=config.adam_epsilon, **options)
    return each_array(tx), schedule


def matrix_axes(params):
    """Muon's view of each array: kernels as matrices of inputs x outputs; None: a vector."""

    def axes(x):
        return MuonDimensionNumbers(range(x.ndim - 1), x.ndim - 1) if x.ndim > 1 else None

    return jax.tree.map(axes, params)


def train(config: Config):
    """Train a model and write it to config.output_dir."""
    with open_run(config) as config:  # with its models opened; None: the run is finished
        if config is not None:
            run_training(config)


def run_training(config: Config):
    """Load models, start or resume, run the loop, and save."""
    # Data and models, on the host
    dataset = open_dataset(config)  # first, to report errors before gigabytes are loaded
    num_steps = length_of_run(config, dataset)
    models, pipeline, frozen, params = load_models(config, mixed_precision_dtype(config))
    others = None if config.lora_rank else params_beside_unet(frozen)  # saved beside the UNet
    validation = Validation(config, pipeline, dataset.sizes, num_steps)

    # Optimizer, EMA, the step to start from
    tx, schedule = make_optimizer(config, num_steps)
    ema = ema_plan(config, num_steps)
    axes = shard_axes(params, jax.device_count(), whole=isinstance(tx, WholeArrays))
    identity = run_identity(config, num_steps, dataset, models, params, frozen)
    checkpoints = Checkpoints(config, dataset, identity, ema, axes)
    start_step = checkpoints.start_step
    batches = Batches(dataset, pipeline.prepare_text_inputs, start_step)
    describe_run(config, num_steps, dataset, params, ema)

    # Frozen weights in the compute dtype to the devices; all programs are compiled before the
    # sharded state takes memory
    p_frozen = move_to_devices(frozen, models, config, dataset)
    p_rng = replicate(np.asarray(jax.random.PRNGKey(config.seed)))
    shapes = state_shapes(params, tx, axes, jax.device_count())
    p_train_step = jax.pmap(
        partial(train_step, models=models, tx=tx, axes=axes, **train_step_options(config)),
        axis_name="batch",
        donate_argnums=0,
    )
    if start_step < num_steps:
        p_train_step = compile_steps(p_train_step, shapes, p_frozen, batches, p_rng)
    p_average = compile_averages(ema, shapes.params)
    state, averages = checkpoints.restore(params, tx)
    del params
    averages = averages or update_ema([], state.params, start_step, ema, *p_average)
    reports = Reports(config, num_steps, schedule, ema, batches, checkpoints)

    # Loop
    with reports, StopSignal() as stop_signal:
        for step in range(start_step + 1, num_steps + 1):
            reports.profile(step)
            state, metrics = p_train_step(state, p_frozen, next(batches), p_rng)
            averages = update_ema(averages, state.params, step, ema, *p_average)
            reports.log(step, metrics)
            if is_due(step, reports.snapshot_steps, num_steps):
                with reports.pause():
                    save_snapshots(config.output_dir, step, averages, ema, axes, models.unet)
            is_stopped = stop_signal.requested(step)  # by SIGTERM or Ctrl-C
            if is_stopped or is_due(step, config.checkpointing_steps, num_steps):
                with reports.pause():
                    checkpoints.save(step, state, averages, reports.state(step))
                    reports.draw()
            if is_stopped and step < num_steps:
                checkpoints.close()
                reports.close()
                stop_signal.end(step)
            if validation.images and is_due(step, config.validation_steps, num_steps):
                with reports.pause():
                    weights = best_weights(state, averages)
                    reports.show(validation.edit(step, weights, axes, p_frozen), step)

    trained = {"unet": to_host(best_weights(state, averages), axes)}
    if config.save_raw_unet:
        trained["unet_raw"] = to_host(state.params, axes)
    del state, averages, p_frozen  # free device memory: writing the model needs as much
    try:
        checkpoints.close()  # a run is finished if its model is newer than its last checkpoint
    finally:  # also without room for the last checkpoint
        save_model(config, pipeline, trained, others, reports.close())


def main(args=None):
    """Run the command line."""
    logging.basicConfig(format="%(levelname)s: %(message)s")
    for name in ("absl", "asyncio"):  # orbax logs every action twice
        logging.getLogger(name).setLevel(logging.CRITICAL)
    run_main(
        Config,
        __doc__,
        train,
        args,
        interrupted="run the same command to resume from the last checkpoint",
        out_of_memory="raise --gradient_accumulation_steps, lower --train_batch_size, or use "
        "--mixed_precision bf16, --gradient_checkpointing, --lora_rank 16 and, on several "
        "devices, --gather_by_block",
    )


if __name__ == "__main__":
    main()
