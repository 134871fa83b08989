"""Distil an InstructPix2Pix model into an LCM-LoRA: guided edits in 2 to 8 steps of one branch.

    python distill_lcm.py --pretrained_model_name_or_path instruct-pix2pix --train_data_dir data \\
        --output_dir lcm-lora
    python edit_cli.py --model instruct-pix2pix --lora lcm-lora --scheduler lcm \\
        --num_inference_steps 4 --guidance_scale 1 --image_guidance_scale 1 --input in.jpg \\
        --edit "make it red" --output out.png

`instruct-pix2pix` is a pipeline directory of Stable Diffusion or SDXL that
flax_train_instruct_pix2pix.py wrote or `hf download` fetched. `data` is a directory of parquet
shards, or of latents that cache_latents.py wrote (then add --no_random_crop). With the demo's model
and latents (run `make demo` once), in one minute on a CPU:

    python distill_lcm.py --pretrained_model_name_or_path demo/output/model \\
        --train_data_dir demo/output/latents --no_random_crop --resolution 64 \\
        --guidance_scale 2 --image_guidance_scale 1.2 --max_train_steps 50 \\
        --train_batch_size 8 --output_dir /tmp/lcm-lora

The guidance scales of the teacher are distilled into the LoRA: to sample with others, distil again.
The result is OUTPUT_DIR/pytorch_lora_weights.safetensors, a PEFT file for --lora of edit_cli.py and
load_lora_weights of PyTorch's pipelines. After SIGTERM, Ctrl-C or a crash the same command resumes
from the newest checkpoint in OUTPUT_DIR/checkpoints and ends with bit-identical weights.

Runs on all TPU chips, GPUs or CPU devices of one machine. The LoRA and its Adam moments are sharded
over the devices, and every device holds the frozen model in the compute dtype. A step takes the
time of about two training steps: the UNet runs five times (three branches of the teacher, target,
student) and once backward.

Papers: Latent Consistency Models (arXiv 2310.04378), LCM-LoRA (arXiv 2311.05556).
"""

import logging
import shlex
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from diffusers_flax.command_line import Above, AtLeast, Seed, run_main
from diffusers_flax.generating.flags import with_defaults, with_single_files, write_defaults
from diffusers_flax.loading.directories import INDEX_NAME, LORA_FILE
from diffusers_flax.loading.single_file import SingleFile
from diffusers_flax.pipelines.base import pipeline_class
from diffusers_flax.pipelines.instruct_pix2pix import EDIT_BRANCHES, edit_branches, guidance_weights
from diffusers_flax.pipelines.sampling import TEXT_OF_BRANCH
from diffusers_flax.schedulers.factory import EDM_CLASSES, class_name
from diffusers_flax.schedulers.flow import FlaxFlowMatchLCMScheduler
from diffusers_flax.schedulers.lcm import FlaxLCMScheduler, boundary_scalings
from diffusers_flax.schedulers.noise_schedule import predict_x0_and_eps
from diffusers_flax.training.batches import Batches, compile_steps, open_dataset
from diffusers_flax.training.checkpoints import Checkpoints, StopSignal, run_identity
from diffusers_flax.training.ema import NO_AVERAGE
from diffusers_flax.training.flags import TrainerFlags
from diffusers_flax.training.lora import save_lora
from diffusers_flax.training.models import (
    Models,
    encode_batch,
    load_models,
    lora_options,
    mixed_precision_dtype,
    move_to_devices,
)
from diffusers_flax.training.output import open_run
from diffusers_flax.training.publishing import write_readme
from diffusers_flax.training.reports import Reports, describe_run, is_due
from diffusers_flax.training.sharding import (
    combine,
    each_array,
    gather,
    replicate,
    shard_axes,
    state_shapes,
    to_host,
    update_state,
)

Count, Number = Annotated[int, AtLeast(1)], Annotated[int, AtLeast(0)]
Positive, Scale = Annotated[float, Above(0)], Annotated[float, AtLeast(0)]
NUM_FLOW_STEPS = 50  # of the teacher, if it is a flow
HUBER_C = 0.001  # below it the loss is quadratic, above linear


@dataclass(frozen=True)
class Config(TrainerFlags):
    # model; on resume, directories may change but not the weights in them
    pretrained_model_name_or_path: str  # InstructPix2Pix directory or file
    variant: str | None = None  # e.g. fp16, of the model's files
    # configs of a one-file model: a directory or hub id; default: its family's
    config_name_or_path: str | None = None
    use_ema_weights: bool = False  # of a one-file model: the UNet's averages
    # of the teacher: weight of the instruction; default: the model's, or 7.5
    guidance_scale: Scale | None = None
    # of the teacher: similarity to the original image; default: the model's, or 1.5
    image_guidance_scale: Scale | None = None
    # data

    # directories or URLs of *.parquet shards or of latents; batches are drawn from all of them
    train_data_dir: tuple[str, ...] = ("data",)
    # weights of several directories, in any unit; default: in proportion to their pairs
    train_data_weights: tuple[float, ...] = ()
    original_image_column: str = ""  # original image; "": as in a known set, docs/data.md
    edited_image_column: str = ""  # edited image; "": likewise
    edit_prompt_column: str = ""  # one or several instructions; "": likewise
    # second image of an edit, read by a UNet with 12 input channels; "": reference_image
    reference_image_column: str = ""
    max_train_samples: Count | None = None  # use the first N pairs of each set only; None: all
    resolution: Count = 256  # side of the square training images, pixels
    # train at these sizes, WIDTHxHEIGHT, of about resolution² pixels; each pair gets the size
    # nearest in aspect ratio; no values: default sizes; default: only squares
    aspect_ratio_buckets: tuple[str, ...] | None = None
    random_crop: bool = True  # crop at a random position, else in the centre
    random_flip: bool = True  # mirror half of the pairs
    dataloader_num_workers: Number = 0  # decoding threads; 0: one per core
    # LoRA
    lora_rank: Count = 64  # rank of the updates
    lora_alpha: Positive | None = None  # updates are scaled by alpha / rank; None: the rank
    lora_target_modules: tuple[str, ...] = (  # PyTorch's names
        *("to_q", "to_k", "to_v", "to_out.0", "proj_in", "proj_out", "ff.net.0.proj", "ff.net.2"),
        *("conv1", "conv2", "conv_shortcut", "time_emb_proj"),
    )
    # training
    train_batch_size: Count = 16  # global batch: pairs per optimizer step
    max_train_steps: Count = 2000  # optimizer steps
    learning_rate: Positive = 1e-4  # peak value
    lr_scheduler: Literal["constant", "cosine"] = "constant"  # after warm-up; cosine: to zero
    lr_warmup_steps: Number = 0  # linear warm-up from 0
    adam_weight_decay: Scale = 1e-2  # decoupled, as in AdamW; 0: off
    max_grad_norm: Positive = 1.0  # clip the gradient to this global norm
    mixed_precision: Literal["no", "bf16"] = "no"  # compute dtype; the LoRA stays float32
    gradient_checkpointing: bool = False  # less memory, slower
    seed: Seed = 42  # of the LoRA's initial values, data order, augmentation and noise
    # output
    output_dir: str = "lcm-lora"  # for the LoRA, checkpoints and metrics
    overwrite_output_dir: bool = False  # replace an existing LoRA
    # steps between lines of metrics.jsonl; None: 50, in short runs a twentieth of the run
    logging_steps: Count | None = None
    checkpointing_steps: Number = 500  # steps between checkpoints; 0: only when stopped
    checkpoints_total_limit: Count | None = 2  # newest checkpoints to keep; None: all
    resume_from_checkpoint: str = "latest"  # latest, none, or DIR/checkpoints/STEP
    compilation_cache_dir: str = "~/.cache/jax"  # cache of compiled programs; "": none

    @property
    def unet_model_name_or_path(self):
        """The UNet of the model."""
        source = self.pretrained_model_name_or_path
        is_file = isinstance(source, SingleFile)
        return source.as_component("unet") if is_file else str(Path(source, "unet"))


class Teacher(NamedTuple):
    """The guided model that is distilled; the scales are numbers >= 0."""

    models: Models  # with FlaxLCMScheduler, or FlaxFlowMatchLCMScheduler of a flow
    guidance_scale: float
    image_guidance_scale: float


def predict(params, unet, x_t, timesteps, condition, text):
    """The UNet's output, float32 (B, C, h, w); arguments as for consistency_loss."""
    added = {}
    if "pooled" in text:  # SDXL
        added["added_cond_kwargs"] = {"text_embeds": text["pooled"], "time_ids": text["time_ids"]}
    x_in = jnp.concatenate((x_t, condition), axis=1)  # (B, 2C, h, w), with references 3C
    output = unet.apply({"params": params}, x_in, timesteps, text["states"], **added).sample
    return output.astype(jnp.float32)


def guided_prediction(params, unet, x_t, timesteps, condition, text, null_text, scales):
    """The guided prediction, from up to three branches in one batch.

    Args:
        params, unet, x_t, timesteps, condition, text: as for predict.
        null_text: of the empty prompt, (1, ...) each; missing entries are taken from text.
        scales: (guidance_scale, image_guidance_scale), numbers >= 0.

    Source: InstructPix2Pix (arXiv 2211.09800), equation 3.
    """
    branches, weights = edit_branches(*scales), dict(zip(EDIT_BRANCHES, guidance_weights(*scales)))
    null = {name: jnp.broadcast_to(null_text.get(name, x), x.shape) for name, x in text.items()}
    texts = [{"text": text, "null": null}[TEXT_OF_BRANCH[branch]] for branch in branches]
    text = jax.tree.map(lambda *branches: jnp.concatenate(branches), *texts)
    conditions = [jnp.zeros_like(condition) if b == "null" else condition for b in branches]
    x_t, timesteps = (jnp.concatenate([x] * len(branches)) for x in (x_t, timesteps))
    outputs = predict(params, unet, x_t, timesteps, jnp.concatenate(conditions), text)
    outputs = jnp.split(outputs, len(branches))
    return sum(weights[branch] * output for branch, output in zip(branches, outputs))


def ddim_step(scheduler, scheduler_state, output, x_t, timesteps, earlier):
    """One deterministic step: the latents at earlier timesteps, float32. Of a flow Euler's step.

    Args:
        scheduler, scheduler_state: of Teacher, and its state.
        output: of the UNet, float32 (B, C, h, w).
        x_t: latents at timesteps, float32 (B, C, h, w).
        timesteps, earlier: integers (B,), of a flow float32.

    Source: DDIM (arXiv 2010.02502), equation 12 with sigma 0.
    """
    alpha, sigma = scheduler.scales(scheduler_state, x_t, timesteps)
    x_0, eps = predict_x0_and_eps(scheduler.vp_prediction_type, alpha, sigma, x_t, output)
    alpha, sigma = scheduler.scales(scheduler_state, x_t, earlier)
    return alpha * x_0 + sigma * eps


def consistency_function(scheduler, scheduler_state, output, x_t, timesteps):
    """f(x_t, t) = c_skip x_t + c_out x_0, the denoised latents of FlaxLCMScheduler.step.

    At timestep 0 it is x_t. Arguments as for ddim_step.

    Source: Consistency Models (arXiv 2303.01469), equation 5 and appendix C.
    """
    alpha, sigma = scheduler.scales(scheduler_state, x_t, timesteps)
    x_0, _ = predict_x0_and_eps(scheduler.vp_prediction_type, alpha, sigma, x_t, output)
    if scheduler.is_flow:
        return x_0  # x_t at time 0, without scalings
    t = timesteps[:, None, None, None]
    c_skip, c_out = boundary_scalings(t, scheduler.config.timestep_scaling)
    return c_skip * x_t + c_out * x_0


def consistency_loss(lora, frozen, teacher, x_0, condition, text, noise, timesteps):
    """Distance of f at a timestep from f at the end of the teacher's DDIM step.

    Args:
        lora: trained parameters of add_lora; without them the UNet is the teacher.
        frozen: as for distill_step.
        teacher: Teacher.
        x_0: scaled latents of the edited image, (B, C, h, w) float32.
        condition: unscaled latents of the original image, (B, C, h, w) float32, or of the
            original and the reference image, (B, 2C, h, w).
        text: as from encode_text.
        noise: standard normal, (B, C, h, w) float32.
        timesteps: (B,), of the grid of the teacher's steps.

    Returns:
        The mean pseudo-Huber loss of the elements, a float32 scalar.

    Source: Latent Consistency Models (arXiv 2310.04378), algorithm 1; the student itself is the
    target, as in LCM-LoRA (arXiv 2311.05556).
    """
    models, *scales = teacher
    unet, scheduler, schedule = models.unet, models.scheduler, frozen["scheduler"]
    places = jnp.argmax(timesteps[:, None] == schedule.timesteps, axis=1)
    earlier = jnp.append(schedule.timesteps[1:], 0)[places]
    x_t = scheduler.add_noise(schedule, x_0, noise, timesteps)
    guided = guided_prediction(
        frozen["unet"], unet, x_t, timesteps, condition, text, frozen["null_text"], scales
    )
    x_earlier = ddim_step(scheduler, schedule, guided, x_t, timesteps, earlier)

    def student(x, t):
        output = predict(combine(frozen["unet"], lora), unet, x, t, condition, text)
        return consistency_function(scheduler, schedule, output, x, t)

    error = student(x_t, timesteps) - jax.lax.stop_gradient(student(x_earlier, earlier))
    return (jnp.sqrt(jnp.square(error) + HUBER_C**2) - HUBER_C).mean()


def distill_step(state, frozen, batch, base_rng, *, teacher, tx, axes, max_grad_norm=1.0):
    """One optimizer step on one device's rows of the batch; call it under pmap(axis_name="batch").

    The random numbers of a sample depend on base_rng, state.step and its row of the global batch.

    Args:
        state: TrainState of the LoRA; parameters and moments are this device's shards.
        frozen: dict of parameters "unet", "vae" (not with cached latents) and "text_encoder";
            "null_text", see guided_prediction; "scheduler", the state of set_timesteps.
        batch: this device's rows, see encode_batch.
        base_rng: PRNG key, the same on every device and in every step.
        teacher: Teacher.
        tx: element-wise optax optimizer, such as Adam; others would see only one shard.
        axes: shard_axes of the LoRA.
        max_grad_norm: gradients with a larger global norm are scaled down to it.

    Returns:
        (state, {"loss", "grad_norm"}): mean loss and gradient norm over the global batch.
    """
    models, B = teacher.models, len(batch["input_ids"])
    rows = jax.lax.axis_index("batch") * B + jnp.arange(B)  # rows of the global batch
    step_rng = jax.random.fold_in(base_rng, state.step)
    keys = jax.vmap(partial(jax.random.fold_in, step_rng))(rows)
    posterior_keys, noise_keys, timestep_keys = jax.vmap(
        partial(jax.random.split, num=3), out_axes=1
    )(keys)

    # The target is a scaled sample of the VAE's posterior, the condition its unscaled mode.
    mean, std, condition, text = encode_batch(batch, frozen, models)
    normal = jax.vmap(lambda key: jax.random.normal(key, mean.shape[1:]))
    x_0 = (mean + std * normal(posterior_keys)) * models.vae.config.scaling_factor
    x_0, condition, noise = (
        jnp.transpose(x, (0, 3, 1, 2)) for x in (x_0, condition, normal(noise_keys))
    )  # (B, C, h, w)
    grid = frozen["scheduler"].timesteps
    indices = jax.vmap(lambda key: jax.random.randint(key, (), 0, len(grid)))(timestep_keys)

    def loss_fn(shards):
        lora = gather(shards, axes, models.unet.dtype)
        return consistency_loss(lora, frozen, teacher, x_0, condition, text, noise, grid[indices])

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return update_state(tx, state, loss, grads, axes, max_grad_norm)


def check_teacher(source):
    """Raise a ValueError unless a model, a directory or SingleFile, can be distilled."""
    if not isinstance(source, SingleFile) and not Path(source, "unet").is_dir():
        raise ValueError(
            f"--pretrained_model_name_or_path {source} is not a pipeline directory with unet/; "
            "train a model, or get one with hf download OWNER/NAME --local-dir DIR"
        )
    name = pipeline_class(source).torch_class_name
    scheduler = class_name(FlaxLCMScheduler.load_config(source, subfolder="scheduler"))
    if "InstructPix2Pix" not in name or scheduler in EDM_CLASSES:
        raise ValueError(
            f"--pretrained_model_name_or_path {source} is a {name} with {scheduler}; LCM distils "
            "InstructPix2Pix models with timesteps, which flax_train_instruct_pix2pix.py trains "
            "(not CosXL)"
        )


def load_teacher(config: Config):
    """Load the models of a run onto the host.

    Returns:
        (models, pipeline, frozen, lora): Models as of Teacher; the teacher's pipeline;
        distill_step's frozen parameters; the LoRA's initial parameters.
    """
    models, pipeline, frozen, lora = load_models(config, mixed_precision_dtype(config))
    frozen["unet"]["conv_in"] = lora.pop("conv_in")  # the trainer trains it in full
    scheduler_type = FlaxFlowMatchLCMScheduler if pipeline.scheduler.is_flow else FlaxLCMScheduler
    scheduler = scheduler_type.from_config(pipeline.scheduler.config)
    num_teacher_steps = scheduler.config.get("original_inference_steps", NUM_FLOW_STEPS)
    frozen["scheduler"] = scheduler.set_timesteps(scheduler.create_state(), num_teacher_steps)
    return models._replace(scheduler=scheduler), pipeline, frozen, lora


def make_optimizer(config: Config):
    """AdamW without clipping; returns (optax optimizer, schedule: step from 0 -> learning rate)."""
    rate, num_warmup = config.learning_rate, config.lr_warmup_steps
    schedule = optax.constant_schedule(rate)
    if config.lr_scheduler == "cosine":
        schedule = optax.cosine_decay_schedule(rate, config.max_train_steps - num_warmup)
    if num_warmup:
        warmup = optax.linear_schedule(0.0, rate, num_warmup)
        schedule = optax.join_schedules([warmup, schedule], [num_warmup])
    return each_array(optax.adamw(schedule, weight_decay=config.adam_weight_decay)), schedule


def save_model(config: Config, scheduler, lora, metrics):
    """Write the card and the LoRA; the LoRA last, as it marks a finished run.

    Args:
        config: Config.
        scheduler: of Teacher.
        lora: the LoRA's parameters, NumPy arrays.
        metrics: last row of metrics.jsonl.
    """
    output_dir = Path(config.output_dir)
    teacher, R = shlex.quote(str(config.pretrained_model_name_or_path)), config.resolution
    num_steps = 5 if scheduler.is_flow else 4  # a flow's last step begins near time 0
    with_torch = """\
With PyTorch, use `LCMScheduler`, `pipeline.load_lora_weights`, 4 steps and both guidance scales 1.
"""
    if scheduler.is_flow:
        with_torch = "PyTorch's InstructPix2Pix pipeline refuses the scheduler of a flow.\n"
    introduction = f"""\
Edits images in 2 to 8 steps: an LCM-LoRA of the InstructPix2Pix model `{teacher}`, distilled with
guidance scale {config.guidance_scale:g} and image guidance scale {config.image_guidance_scale:g}.

## Use

On TPU, GPU or CPU, with `edit_cli.py` from the scripts that distilled the model:

```sh
python edit_cli.py --model {teacher} --lora {shlex.quote(config.output_dir)} \\
    --resolution {R} --input in.jpg --edit "make it red" --output out.png
```

{with_torch}"""
    write_readme(config, config.output_dir, introduction, metrics, tags=("lora", "lcm"))
    scales = dict(guidance_scale=1.0, image_guidance_scale=1.0)
    write_defaults(output_dir, **scales, num_inference_steps=num_steps, scheduler="lcm")
    (output_dir / INDEX_NAME).unlink(missing_ok=True)  # of a replaced model
    save_lora(output_dir / LORA_FILE, lora, **lora_options(config))
    print(f"saved {output_dir}; sample with --scheduler lcm and both guidance scales 1")


def distill(config: Config):
    """Distil a model and write the LoRA to config.output_dir."""
    config = with_single_files(config, "pretrained_model_name_or_path")
    config = with_defaults(config, [config.pretrained_model_name_or_path])
    check_teacher(config.pretrained_model_name_or_path)
    with open_run(config) as config:  # None: the run is finished
        if config is not None:
            run_distillation(config)


def run_distillation(config: Config):
    """Load the model, start or resume, run the loop, and save."""
    # Data and models, on the host
    num_steps = config.max_train_steps
    dataset = open_dataset(config)  # first, to report errors before gigabytes are loaded
    models, pipeline, frozen, lora = load_teacher(config)

    # Optimizer, the step to start from
    tx, schedule = make_optimizer(config)
    axes = shard_axes(lora, jax.device_count())
    identity = run_identity(config, num_steps, dataset, models, lora, frozen)
    checkpoints = Checkpoints(config, dataset, identity, NO_AVERAGE, axes)
    start_step = checkpoints.start_step
    batches = Batches(dataset, pipeline.prepare_text_inputs, start_step)
    describe_run(config, num_steps, dataset, lora, NO_AVERAGE)

    # Frozen weights in the compute dtype, batches and sharded state go to the devices
    p_frozen = move_to_devices(frozen, models, config, dataset)
    p_rng = replicate(np.asarray(jax.random.PRNGKey(config.seed)))
    teacher = Teacher(models, config.guidance_scale, config.image_guidance_scale)
    options = dict(teacher=teacher, tx=tx, axes=axes, max_grad_norm=config.max_grad_norm)
    p_train_step = jax.pmap(partial(distill_step, **options), axis_name="batch", donate_argnums=0)
    if start_step < num_steps:  # compile before the state takes memory
        shapes = state_shapes(lora, tx, axes, jax.device_count())
        p_train_step = compile_steps(p_train_step, shapes, p_frozen, batches, p_rng)
    state, _ = checkpoints.restore(lora, tx)
    reports = Reports(config, num_steps, schedule, NO_AVERAGE, batches, checkpoints)

    # Loop
    with reports, StopSignal() as stop_signal:
        for step in range(start_step + 1, num_steps + 1):
            state, metrics = p_train_step(state, p_frozen, next(batches), p_rng)
            reports.log(step, metrics)
            is_stopped = stop_signal.requested(step)
            if is_stopped or is_due(step, config.checkpointing_steps, num_steps):
                with reports.pause():
                    checkpoints.save(step, state, [], reports.state(step))
                    reports.draw()
            if is_stopped and step < num_steps:
                checkpoints.close()
                reports.close()
                stop_signal.end(step)

    lora = to_host(state.params, axes)
    del state, p_frozen  # free device memory
    try:
        checkpoints.close()
    finally:  # also without room for the last checkpoint
        save_model(config, models.scheduler, lora, reports.close())


def main(args=None):
    """Run the command line."""
    logging.basicConfig(format="%(levelname)s: %(message)s")
    for name in ("absl", "asyncio"):  # orbax logs every action twice
        logging.getLogger(name).setLevel(logging.CRITICAL)
    run_main(
        Config,
        __doc__,
        distill,
        args,
        interrupted="run the same command to resume from the last checkpoint",
        out_of_memory="lower --train_batch_size, or use --mixed_precision bf16, "
        "--gradient_checkpointing or a lower --lora_rank",
    )


if __name__ == "__main__":
    main()
