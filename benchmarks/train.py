"""Optimizer steps against the same step in PyTorch diffusers, and the memory of a step.

    python -m benchmarks.train step

times full steps of InstructPix2Pix with Stable Diffusion 1.5's shapes and random weights: encoding
of both images and the text, conditioning dropout, loss and gradient of the UNet, clipping, AdamW,
EMA. Ours is the step of flax_train_instruct_pix2pix.py, also with --cache_latents. PyTorch's step
has fused AdamW, diffusers' EMAModel and, on a GPU, bfloat16 autocast with frozen models in
bfloat16, TF32, and a second variant with torch.compile. On a CPU both compute in float32. The batch
is on the device. Each measurement runs in its own process and includes the time to the end of the
first step. Tiny, in a minute:

    python -m benchmarks.train step --size tiny --resolution 64 --rounds 1 --output train.json

Needs 23 GB of memory on a CPU; a quarter of an hour on two otherwise idle cores.

    python -m benchmarks.train memory

compiles the training step for four forced CPU devices with eight pairs each and prints the memory
of each device; nothing is run. A CPU's compiler undoes gradient checkpointing and computes bfloat16
in float32; with --tpu v5e-16 the step is compiled for that slice, some 20 minutes a row. Add
--one_chip to compile it as if a chip of the slice were alone: about the memory that one GPU needs.
With the demo's model, in a minute:

    python -m benchmarks.train memory --pretrained_model_name_or_path demo/base_model \\
        --resolution 64 --output train.json

Rows go to benchmarks/results/train.json. Needs 8 GB of memory; a quarter of an hour on two cores.
"""

import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import torch
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from diffusers.training_utils import EMAModel
from tqdm import tqdm
from transformers import CLIPTextModel

import flax_train_instruct_pix2pix as trainer
import tpu_compile
from benchmarks.harness import (
    check_config,
    contenders_on,
    find_device,
    in_new_process,
    make_row,
    synchronize,
    time_in_turn,
    write_contenders,
)
from benchmarks.random_models import END_OF_TEXT, TINY_UNET, make_pipeline
from benchmarks.rows import (
    GIB,
    PACKAGES,
    describe_machine,
    read_rows,
    report,
    rows_of,
    run_benchmark,
    write_rows,
)
from benchmarks.unet import SD15_EDIT, TEXT_LENGTH, Case, count_flops, make_inputs
from compiling.programs import find_slice, program_costs, slice_devices
from training.checkpoints import release_memory
from training.ema import make_update_average, start_average
from training.models import load_models
from training.sharding import replicate, shard_axes, start_state

EMA_DECAY = 0.9999


@dataclass(frozen=True)
class Step:
    """Time of an optimizer step."""

    size: Literal["sd15", "tiny"] = "sd15"
    resolution: int = 256  # pixels
    batch_size: int = 2  # pairs
    gradient_checkpointing: bool = False  # in both libraries
    rounds: int = 3  # each contender is measured once in each
    seconds: float = 30.0  # of a measurement, at least; one step at least
    output: str = "benchmarks/results/train.json"


def make_batch(config, latents=False):
    """Pairs of random images, uint8 (B, R, R, 3), or of their latents, and ids (B, 77)."""
    rng = np.random.default_rng(0)
    if latents:
        shape = (config.batch_size, config.resolution // 8, config.resolution // 8)
        edited = rng.uniform(0.1, 1, (*shape, 8)).astype(np.float16)
        ids = rng.integers(0, END_OF_TEXT, (config.batch_size, TEXT_LENGTH), np.int32)
        return {"original_latents": edited[..., :4], "edited_latents": edited, "input_ids": ids}
    images = (config.batch_size, config.resolution, config.resolution, 3)
    return {
        "original_pixel_values": rng.integers(0, 256, images, np.uint8),
        "edited_pixel_values": rng.integers(0, 256, images, np.uint8),
        "input_ids": rng.integers(0, END_OF_TEXT, (config.batch_size, TEXT_LENGTH), np.int32),
    }


def our_step(folder, config, device, latents=False):
    """A function that runs the trainer's step; latents: with --cache_latents."""
    flags = trainer.Config(
        pretrained_model_name_or_path=str(folder),
        unet_model_name_or_path=str(folder / "unet"),
        train_data_dir=(),
        resolution=config.resolution,
        train_batch_size=config.batch_size,
        gradient_checkpointing=config.gradient_checkpointing,
    )
    dtype = jnp.bfloat16 if device == "cuda" else jnp.float32
    models, _, frozen, params = load_models(flags, dtype)
    tx, _ = trainer.make_optimizer(flags, flags.max_train_steps)
    axes = shard_axes(params, 1)
    step = partial(
        trainer.train_step, models=models, tx=tx, axes=axes, **trainer.train_step_options(flags)
    )
    p_train_step = jax.pmap(step, axis_name="batch", donate_argnums=0)
    p_update_average = make_update_average()
    cast = partial(jax.tree.map, lambda x: np.asarray(x, dtype))
    frozen = replicate(frozen | {name: cast(frozen[name]) for name in ("vae", "text_encoder")})
    if latents:
        del frozen["vae"]
    batch, rng = replicate((make_batch(config, latents), np.asarray(jax.random.PRNGKey(0))))
    held = {"state": start_state(params, tx, axes)}
    del params
    release_memory()
    held["average"] = start_average(held["state"].params)
    decay = replicate(np.float32(EMA_DECAY))

    def run():
        held["state"], metrics = p_train_step(held["state"], frozen, batch, rng)
        held["average"] = p_update_average(held["average"], held["state"].params, decay)
        jax.block_until_ready((metrics, held))

    return run


def torch_step(folder, config, device, compiled):
    """A function that runs the same step in PyTorch diffusers."""
    half = torch.bfloat16 if device == "cuda" else torch.float32
    unet = UNet2DConditionModel.from_pretrained(folder / "unet").to(device)
    if config.gradient_checkpointing:
        unet.enable_gradient_checkpointing()
    vae = AutoencoderKL.from_pretrained(folder / "vae", dtype=half).to(device)
    text_encoder = CLIPTextModel.from_pretrained(folder / "text_encoder", dtype=half).to(device)
    scheduler = DDPMScheduler.from_pretrained(folder / "scheduler")
    program = torch.compile(unet) if compiled else unet
    run = torch_training(unet, vae, text_encoder, scheduler, make_batch(config))
    return partial(run, program)


def torch_training(unet, vae, text_encoder, scheduler, batch):
    """PyTorch's optimizer step, as a function of the UNet's program.

    Args:
        unet: UNet2DConditionModel with float32 parameters.
        vae, text_encoder: frozen, in the dtype to compute in.
        scheduler: DDPMScheduler.
        batch: see make_batch.

    Returns:
        run(program): a step; program is the UNet, or torch.compile of it.
    """
    torch.backends.cuda.matmul.allow_tf32 = True
    device, half = unet.device.type, vae.dtype
    unet.train()
    vae.requires_grad_(False)
    text_encoder.requires_grad_(False)
    flags = trainer.Config(*[""] * 3)
    optimizer = torch.optim.AdamW(
        unet.parameters(),
        lr=flags.learning_rate,
        betas=(flags.adam_beta1, flags.adam_beta2),
        weight_decay=flags.adam_weight_decay,
        eps=flags.adam_epsilon,
        fused=True,
    )
    average = EMAModel(unet.parameters(), decay=EMA_DECAY)
    average.to(device)
    batch = {k: torch.from_numpy(v).to(device) for k, v in batch.items()}
    empty = torch.full((1, TEXT_LENGTH), END_OF_TEXT, device=device)
    with torch.no_grad():
        null_text = text_encoder(empty)[0]
    rate, B = flags.conditioning_dropout_prob, len(batch["input_ids"])

    def run(program):
        with torch.no_grad():
            original, edited = (
                (batch[name].permute(0, 3, 1, 2) / 127.5 - 1).to(half)
                for name in ("original_pixel_values", "edited_pixel_values")
            )
            latents = vae.encode(edited).latent_dist.sample() * vae.config.scaling_factor
            condition = vae.encode(original).latent_dist.mode()
            text = text_encoder(batch["input_ids"])[0]
            noise = torch.randn_like(latents)
            timesteps = torch.randint(0, 1000, (B,), device=device)
            noisy = scheduler.add_noise(latents, noise, timesteps)
            u = torch.rand(B, device=device)
            text = torch.where((u < 2 * rate)[:, None, None], null_text, text)
            keep = ~((u >= rate) & (u < 3 * rate))
            condition = condition * keep[:, None, None, None]
        with torch.autocast(device, torch.bfloat16, enabled=half == torch.bfloat16):
            noisy = torch.cat((noisy, condition), 1)
            prediction = program(noisy, timesteps, text, return_dict=False)[0]
        torch.nn.functional.mse_loss(prediction.float(), noise.float()).backward()
        torch.nn.utils.clip_grad_norm_(unet.parameters(), flags.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        average.step(unet.parameters())
        synchronize(device)

    return run


def run_step(config):
    """Measure, write, print."""
    check_config(config, "batch_size")
    if config.resolution < 64 or config.resolution % 64:
        raise ValueError(f"--resolution {config.resolution} must be a multiple of 64")
    device, machine = find_device(), describe_machine(PACKAGES)
    case = Case(SD15_EDIT | (TINY_UNET if config.size == "tiny" else {}), config.resolution // 8)
    contenders = contenders_on(device, our_step, torch_step)
    contenders["ours, latents cached"] = partial(our_step, latents=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        in_new_process(make_pipeline, folder, config.size == "tiny", 8)
        args = (folder, config, device)
        figures = time_in_turn(contenders, args, config.rounds, config.seconds)
    row = make_row(
        f"{config.size}_{config.resolution}",
        "optimizer step" + (", checkpointing" if config.gradient_checkpointing else ""),
        config.batch_size,
        count_flops(case, make_inputs(case, config.batch_size), True),
        device,
        figures,
    )
    write_contenders([row], machine, config.output)


NUM_DEVICES = 4

VARIANTS = {
    "plain": {},
    "4 micro-batches": {"gradient_accumulation_steps": 4},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "bf16": {"mixed_precision": "bf16"},
    "bf16, checkpointing": {"mixed_precision": "bf16", "gradient_checkpointing": True},
    "bf16, 4 micro-batches, checkpointing": {
        "mixed_precision": "bf16",
        "gradient_accumulation_steps": 4,
        "gradient_checkpointing": True,
    },
}


@dataclass(frozen=True)
class Memory:
    """Memory of a training step, as compiled."""

    pretrained_model_name_or_path: str = ""  # directory or hub id; "" is Stable Diffusion 1.5
    resolution: int = 256  # pixels
    batch_per_device: int = 8  # pairs
    tpu: str = ""  # type of a slice, as for tpu_compile.py; "": four CPU devices
    one_chip: bool = False  # with --tpu: as if its first chip were alone, for GPUs of that memory
    variants: tuple[Literal[tuple(VARIANTS)], ...] = tuple(VARIANTS)
    ema: Literal["none", "full"] = "full"  # whether a step holds an average of the weights
    # XLA's optimization level; O1 compiles several times faster
    optimization_level: Literal["O0", "O1", "O2", "O3"] | None = None
    output: str = "benchmarks/results/train.json"


def compile_variants(config, devices):
    """The memory of a step with each of VARIANTS.

    Args:
        config: Config.
        devices: to compile for.

    Returns:
        {name: {"parameters", "optimizer", "ema", "temporaries": bytes of a device, ...}}.

    Raises:
        ValueError: flags that the trainer does not take.
    """
    base = tpu_compile.Train(
        tpu=config.tpu,
        pretrained_model_name_or_path=config.pretrained_model_name_or_path,
        resolution=config.resolution,
        train_batch_size=config.batch_per_device * len(devices),
        ema=config.ema,
        ema_decay=0.9999 if config.ema == "full" else None,
    )
    variants = {name: replace(base, **VARIANTS[name]) for name in config.variants}
    for variant in variants.values():
        tpu_compile.check_flags(variant, len(devices))
    figures = {}
    for name, variant in tqdm(variants.items(), unit="step"):
        job = tpu_compile.train_job(variant, devices)
        step = program_costs(job.step, job.args)
        update = program_costs(job.update, job.update_args) if job.update else None
        if "needs" in step:  # too large for the chip
            figures[name] = step
            continue
        figures[name] = tpu_compile.memory_parts(job, step, update)
        figures[name] |= {"compile_seconds": step["compile_seconds"]}
    return figures


def format_memory(figures):
    """The figures as Markdown."""
    parts = ("parameters", "optimizer", "ema", "temporaries")
    lines = [f"| GiB per device | {' | '.join(parts)} |", "|---|" + "---|" * len(parts)]
    for name, row in figures.items():
        cells = [f"{row[part] / GIB:.2f}" if part in row else "does not fit" for part in parts]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def run_memory(config):
    """Compile, write, print."""
    if config.one_chip and not config.tpu:
        raise ValueError("--one_chip goes with --tpu, for example --tpu v5p-8")
    if config.batch_per_device % 4 or config.batch_per_device < 4:
        raise ValueError(
            f"--batch_per_device {config.batch_per_device} cannot be cut into four micro-batches; "
            "give a multiple of 4"
        )
    read_rows(config.output)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    jax.config.update("jax_optimization_level", config.optimization_level or "UNKNOWN")
    devices = slice_devices(find_slice(config.tpu)) if config.tpu else jax.devices()
    devices = devices[:1] if config.one_chip else devices
    figures = compile_variants(config, devices)
    machine = describe_machine(("jax", "jaxlib", "flax", "optax"))
    place = config.tpu or "CPU"
    if config.one_chip:
        place += f" one chip, {config.batch_per_device} pairs, ema {config.ema}"
    rows = {f"memory {place} {name}": row for name, row in figures.items()}
    results = write_rows(rows, machine, config.output)
    report(format_memory(rows_of(results, "memory")), config.output)


SUBCOMMANDS = {Step: run_step, Memory: run_memory}


def main(args=None):
    """Command line."""
    run_benchmark(SUBCOMMANDS, __doc__, args)


if __name__ == "__main__":
    main()
