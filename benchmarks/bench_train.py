"""Whole optimizer steps, ours against the same step of PyTorch diffusers, in turn in one run.

    python benchmarks/bench_train.py

One step of InstructPix2Pix's training with Stable Diffusion 1.5's shapes and random weights, all of
it: encode both pictures and the text, conditioning dropout, the UNet's loss and gradient, clipping,
AdamW, the average of the weights. Ours is what flax_train_instruct_pix2pix.py runs, also with
--cache_latents; PyTorch's is written as its users run it: fused AdamW, diffusers' EMAModel, on a
GPU bfloat16 autocast with the frozen models in bfloat16, TF32, and also with torch.compile. On a
CPU all is float32. Data are on the device. Both hold weights, gradient, moments and average, 17 GB
in float32, so each measurement is a process of its own, which also tells the time from its start to
the end of the first step.

The share of the peak counts the UNet's FLOPs alone. Tiny, in a minute:

    python benchmarks/bench_train.py --size tiny --resolution 64 --rounds 1 --output train.json

Adds to benchmarks/results/train.json, a row for each device, size and batch, and prints a table.
Needs 23 GB of memory with the CPU; a quarter of an hour on two cores that do nothing else.
"""

import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import torch
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from diffusers.training_utils import EMAModel
from transformers import CLIPTextModel

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import flax_train_instruct_pix2pix as trainer  # noqa: E402
from benchmarks.bench_unet import (  # noqa: E402
    SD15,
    TEXT_LENGTH,
    Case,
    count_flops,
    make_inputs,
)
from benchmarks.full_size import (  # noqa: E402
    END_OF_TEXT,
    TINY_UNET,
    command_line,
    describe_machine,
    in_new_process,
    make_pipeline,
)
from benchmarks.side_by_side import (  # noqa: E402
    PACKAGES,
    check_config,
    contenders_on,
    find_device,
    make_row,
    report,
    synchronize,
    time_in_turn,
)
from sharding_flax import replicate, shard_axes, start_state  # noqa: E402
from training_models import load_models  # noqa: E402
from training_output import release_memory  # noqa: E402
from training_run import make_update_average, start_average  # noqa: E402

EMA_DECAY = 0.9999


@dataclass(frozen=True)
class Config:
    size: Literal["sd15", "tiny"] = "sd15"
    resolution: int = 256  # pixels
    batch_size: int = 2  # pairs
    gradient_checkpointing: bool = False  # of both
    rounds: int = 3  # each contender is measured once in each
    seconds: float = 30.0  # of a measurement, at least; one step at least
    output: str = "benchmarks/results/train.json"


def make_batch(config, latents=False):
    """Pairs of random pictures, uint8 (B, R, R, 3), or of their latents, and ids (B, 77)."""
    rng = np.random.default_rng(0)
    if latents:
        shape = (config.batch_size, config.resolution // 8, config.resolution // 8)
        edited = rng.uniform(0.1, 1, (*shape, 8)).astype(np.float16)
        ids = rng.integers(0, END_OF_TEXT, (config.batch_size, TEXT_LENGTH), np.int32)
        return {"original_latents": edited[..., :4], "edited_latents": edited, "input_ids": ids}
    pictures = (config.batch_size, config.resolution, config.resolution, 3)
    return {
        "original_pixel_values": rng.integers(0, 256, pictures, np.uint8),
        "edited_pixel_values": rng.integers(0, 256, pictures, np.uint8),
        "input_ids": rng.integers(0, END_OF_TEXT, (config.batch_size, TEXT_LENGTH), np.int32),
    }


def our_step(folder, config, device, latents=False):
    """The trainer's step, to be called again and again; latents: with --cache_latents."""
    flags = trainer.Config(
        pretrained_model_name_or_path=str(folder),
        unet_model_name_or_path=str(folder / "unet"),
        train_data_dir="",
        resolution=config.resolution,
        train_batch_size=config.batch_size,
        gradient_checkpointing=config.gradient_checkpointing,
    )
    dtype = jnp.bfloat16 if device == "cuda" else jnp.float32
    models, _, frozen, params = load_models(flags, dtype)
    tx, _ = trainer.make_optimizer(flags, flags.max_train_steps)
    axes = shard_axes(params, 1)
    step = partial(
        trainer.train_step, models=models, tx=tx, axes=axes, **trainer.step_options(flags)
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
    """The same with PyTorch diffusers."""
    torch.backends.cuda.matmul.allow_tf32 = True
    half = torch.bfloat16 if device == "cuda" else torch.float32
    unet = UNet2DConditionModel.from_pretrained(folder / "unet").to(device).train()
    vae = AutoencoderKL.from_pretrained(folder / "vae", torch_dtype=half).to(device)
    text_encoder = CLIPTextModel.from_pretrained(folder / "text_encoder", dtype=half).to(device)
    vae.requires_grad_(False)
    text_encoder.requires_grad_(False)
    scheduler = DDPMScheduler.from_pretrained(folder / "scheduler")
    if config.gradient_checkpointing:
        unet.enable_gradient_checkpointing()
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
    program = torch.compile(unet) if compiled else unet
    batch = {k: torch.from_numpy(v).to(device) for k, v in make_batch(config).items()}
    empty = torch.full((1, TEXT_LENGTH), END_OF_TEXT, device=device)
    with torch.no_grad():
        null_text = text_encoder(empty)[0]
    rate, B = flags.conditioning_dropout_prob, config.batch_size

    def run():
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
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            noisy = torch.cat((noisy, condition), 1)
            prediction = program(noisy, timesteps, text, return_dict=False)[0]
        torch.nn.functional.mse_loss(prediction.float(), noise.float()).backward()
        torch.nn.utils.clip_grad_norm_(unet.parameters(), flags.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        average.step(unet.parameters())
        synchronize(device)

    return run


def run(config):
    """Measure, write, print."""
    check_config(config, "batch_size")
    if config.resolution < 64 or config.resolution % 64:
        raise ValueError(f"resolution={config.resolution} must be a multiple of 64")
    device, machine = find_device(), describe_machine(PACKAGES)
    case = Case(SD15 | (TINY_UNET if config.size == "tiny" else {}), config.resolution // 8)
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
    report([row], machine, config.output)


def main(args=None):
    """Command line."""
    command_line(Config, __doc__, run, args)


if __name__ == "__main__":
    main()
