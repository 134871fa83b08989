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
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from diffusers_flax.command_line import run_main
from diffusers_flax.devices.processes import start_distributed
from diffusers_flax.generating.single_files import with_single_files
from diffusers_flax.models.blocks import CHECKPOINTED_BLOCKS
from diffusers_flax.training.batches import Batches, open_dataset
from diffusers_flax.training.checkpoints import find_start, run_identity
from diffusers_flax.training.ema import ema_flags, ema_plan
from diffusers_flax.training.flags import (
    COMPONENT_FLAGS,
    Config,
    check_flags,
    check_schedules,
    named_buckets,
)
from diffusers_flax.training.latents import check_vae
from diffusers_flax.training.models import (
    encode_batch,
    load_models,
    mixed_precision_dtype,
    move_to_devices,
)
from diffusers_flax.training.output import (
    FinalModel,
    check_run_dir,
    lock_output_dir,
    merge_finished_run,
    merges_finished_run,
    says_finished,
)
from diffusers_flax.training.processes import explain_lost_process, from_process_0
from diffusers_flax.training.run import (
    Optimization,
    TrainRun,
    cache_programs,
    compile_steps,
    make_optimizer,
)
from diffusers_flax.training.sharding import (
    combine,
    gather,
    gather_by_block,
    replicate,
    shard_axes,
    state_shapes,
    update_state,
)
from diffusers_flax.training.validation import fit_validation_images, load_validation_images


def conditioning_dropout(keys, text, null_text, image_latents, rate):
    """Drop text, image or both, so that one network learns all branches of the guidance.

    For one uniform number u per sample, text is dropped if u < rate, text and image if
    rate <= u < 2 rate, the image if 2 rate <= u < 3 rate.

    Args:
        keys: one PRNG key per sample, (B, ...).
        text: the text encoder's outputs, {"states": (B, T, D)}; for SDXL also "pooled" (B, P) and
            "time_ids" (B, 6).
        null_text: replaces dropped text, (1, ...) each; entries missing here are never dropped.
        image_latents: unscaled latents of the original image, (B, C, h, w).
        rate: probability of each of the three cases, in [0, 1/3]; 0 disables dropout.

    Returns:
        (text, image_latents) with dropped text replaced by null_text and dropped latents by zeros.

    Source: InstructPix2Pix (arXiv 2211.09800), section 3.2.1.
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
    return text, jnp.where(drop_image[:, None, None, None], 0, image_latents)


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
        unet: FlaxUNet2DConditionModel with in_channels 2C.
        scheduler, scheduler_state: FlaxDDPMScheduler and its state; for CosXL
            FlaxEDMTrainingScheduler.
        x_0: scaled latents of the edited image, (B, C, h, w) float32.
        condition: unscaled latents of the original image, (B, C, h, w); for CosXL scaled.
        text: as for conditioning_dropout.
        noise: standard normal, (B, C, h, w) float32.
        timesteps: (B,) integers in [0, num_train_timesteps).
        snr_gamma: > 0, 5 in the paper; the loss in terms of x_0 is weighted by
            min(SNR, snr_gamma). None: equal weights for noise or v.
        mask: uint8 (B, H, W), 255 where the image may change; H, W are multiples of h, w. None:
            all latents have the same weight.
        mask_loss_weight: > 0, weight inside the mask relative to outside. The mean weight of a
            sample is 1.

    Returns:
        The mean loss, a float32 scalar.

    Source: DDPM (arXiv 2006.11239), equation 14; InstructPix2Pix (arXiv 2211.09800), equation 1;
    min-SNR (arXiv 2303.09556), section 3.4.
    """
    x_t = scheduler.add_noise(scheduler_state, x_0, noise, timesteps)
    target = noise
    if scheduler.config.prediction_type == "v_prediction":
        target = scheduler.get_velocity(scheduler_state, x_0, noise, timesteps)
    x_in = jnp.concatenate((x_t, condition), axis=1)  # (B, 2C, h, w)
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

    Args:
        state: TrainState.
        frozen: dict of parameters "vae" and "text_encoder"; "null_text", the encode_text of an
            empty prompt with B = 1; "scheduler", its state; with LoRA also the frozen "unet".
        batch: this device's rows, see encode_batch.
        base_rng: PRNG key, the same on every device and in every step.
        models: Models.
        tx: element-wise optax optimizer, such as Adam; others would see only one shard.
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
        )  # (B, C, h, w)
        text, condition = conditioning_dropout(
            dropout_keys, text, frozen["null_text"], condition, dropout_rate
        )
        num_timesteps = models.scheduler.config.num_train_timesteps
        timesteps = jax.vmap(lambda key: jax.random.randint(key, (), 0, num_timesteps))(
            timestep_keys
        )

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
        gather=partial(gather_by_block, blocks=CHECKPOINTED_BLOCKS)
        if config.gather_by_block
        else gather,
    )


def train(config: Config):
    """Train a model and write it to config.output_dir."""
    start_distributed(config.coordinator_address, config.num_processes, config.process_id)
    check_flags(config, jax.device_count())
    config = named_buckets(config)
    config = with_single_files(config, "pretrained_model_name_or_path", **COMPONENT_FLAGS)
    if from_process_0(np.int32(says_finished(config))):
        return
    check_run_dir(config)
    validation_images = load_validation_images(config)
    with lock_output_dir(config):
        if from_process_0(np.int32(merges_finished_run(config))):
            merge_finished_run(config)
        else:
            run_training(config, validation_images)


def run_training(config: Config, validation_images):
    """Load models, start or resume, run the loop, and save."""
    cache_programs(config.compilation_cache_dir)

    # Data and models, on the host
    dataset = open_dataset(config)  # first, to report errors before gigabytes are loaded
    validation_images = fit_validation_images(validation_images, dataset.sizes)
    max_train_steps = config.max_train_steps
    if config.num_train_epochs is not None:
        max_train_steps = config.num_train_epochs * len(dataset)
        check_schedules(config, max_train_steps)
    models, pipeline, frozen, params = load_models(config, mixed_precision_dtype(config))
    check_vae(dataset, frozen["vae"], config)

    # Optimizer, EMA, the step to start from
    tx, schedule = make_optimizer(config, max_train_steps)
    plan = ema_plan(*ema_flags(config, max_train_steps))
    axes = shard_axes(params, jax.device_count())
    identity = run_identity(config, max_train_steps, dataset, models, params, frozen)
    start = find_start(config, dataset, identity, plan)
    final_model = FinalModel(config, models, pipeline, frozen, identity)
    p_train_step = jax.pmap(
        partial(train_step, models=models, tx=tx, axes=axes, **train_step_options(config)),
        axis_name="batch",
        donate_argnums=0,
    )

    # Frozen weights in the compute dtype, batches and sharded state go to the devices
    with_vae = bool(validation_images) or not dataset.latents
    p_frozen = move_to_devices(frozen, models, with_vae, config.storage)
    p_rng = replicate(np.asarray(jax.random.PRNGKey(config.seed)))
    batches = Batches(dataset, pipeline.prepare_text_inputs, start.step)
    if start.step < max_train_steps:  # compile before the state takes memory
        shapes = state_shapes(params, tx, axes, jax.device_count())
        p_train_step = compile_steps(p_train_step, shapes, p_frozen, batches, p_rng)
    state, averages = start.load(params, tx, axes, plan)
    optimization = Optimization(
        max_train_steps, jax.eval_shape(lambda x: x, params), tx, schedule, plan
    )
    del params
    run = TrainRun(config, start, batches, optimization, pipeline, final_model, validation_images)

    # Loop
    for step in run.steps():
        averages.start(step, state.params)
        state, metrics = p_train_step(state, p_frozen, next(batches), p_rng)
        averages.update(step + 1, state.params)
        run.log(step + 1, metrics)
        run.save_if_due(step + 1, state, averages)
        run.validate_if_due(step + 1, state, averages, p_frozen)

    weights = run.final_weights(state, averages)
    del state, averages, p_frozen  # free device memory: writing the model needs as much
    run.finish(weights)


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
        explain=explain_lost_process,
    )


if __name__ == "__main__":
    main()
