"""Optimizer steps against the same step in PyTorch diffusers.

    python -m benchmarks.train

times full steps of InstructPix2Pix with Stable Diffusion 1.5's shapes and random weights, in
float32 on a CPU: encoding of both images and the text, conditioning dropout, loss and gradient of
the UNet, clipping, AdamW, EMA. Ours is the step of flax_train_instruct_pix2pix.py, also with
--cache_latents. PyTorch's step has fused AdamW and diffusers' EMAModel. The batch is on the device.
Each measurement runs in its own process and includes the time to the end of the first step. Tiny,
in a minute:

    python -m benchmarks.train --tiny --resolution 64 --rounds 1 --output train.json

    python -m benchmarks.train --hosts 2

runs instead the trainer in one and in two processes of two devices each, with the trees of Stable
Diffusion 1.5 and SDXL, whose number of arrays decides the host's time; channels and images are
small enough for a CPU. Every step updates an average. A row has the host_seconds of metrics.jsonl:
what the loop's thread computes in a step, without waiting. Half an hour, 10 GB of memory.

Rows go to benchmarks/results/train.json. The comparison needs 23 GB of memory; a quarter of an hour
on two otherwise idle cores.
"""

import io
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from diffusers.training_utils import EMAModel
from PIL import Image
from transformers import CLIPTextModel

import flax_train_instruct_pix2pix as trainer
from benchmarks.harness import (
    TimingFlags,
    check_timing,
    in_new_process,
    synchronize,
    time_in_turn,
    write_contenders,
)
from benchmarks.random_models import (
    END_OF_TEXT,
    IDS,
    SD15,
    SDXL,
    TINY_UNET,
    make_pipeline,
    write_pipeline,
)
from benchmarks.rows import ROOT, check_counts, describe_machine, run_benchmark, write_rows
from benchmarks.unet import SD15_EDIT, TEXT_LENGTH, Case, count_flops, make_inputs
from diffusers_flax.models.clip import FlaxCLIPTextModelWithProjectionModule, FlaxCLIPTextModule
from diffusers_flax.models.unet import FlaxUNet2DConditionModel
from diffusers_flax.models.vae import FlaxAutoencoderKL
from diffusers_flax.training.checkpoints import release_memory
from diffusers_flax.training.ema import make_update_average, start_average
from diffusers_flax.training.models import load_models
from diffusers_flax.training.sharding import replicate, shard_axes, start_state

EMA_DECAY = 0.9999
HOSTS_RESOLUTION = 64  # pixels
HOSTS_STEPS, HOSTS_LOGGING = 40, 5
DEVICES = 2  # of each process
NUM_ARRAYS = {"sd15": 686, "sdxl": 1680}  # parameters of the UNet
TEXT = dict(hidden_size=32, intermediate_size=32, num_attention_heads=2, projection_dim=32)


@dataclass(frozen=True, kw_only=True)
class Config(TimingFlags):
    tiny: bool = False  # tiny models, to try this
    resolution: int = 256  # pixels
    batch_size: int = 2  # pairs
    rounds: int = 3  # each contender is measured once in each
    hosts: int | None = None  # measure only the host's time, in one and in this many processes
    output: str = "benchmarks/results/train.json"


def make_batch(resolution, batch_size, latents=False):
    """Pairs of random images, uint8 (B, R, R, 3), or of their latents, and ids (B, 77)."""
    rng = np.random.default_rng(0)
    batch = {"input_ids": rng.integers(0, END_OF_TEXT, (batch_size, TEXT_LENGTH), np.int32)}
    if latents:
        shape = (batch_size, resolution // 8, resolution // 8, 8)
        edited = rng.uniform(0.1, 1, shape).astype(np.float16)
        return batch | {"original_latents": edited[..., :4], "edited_latents": edited}
    shape = (batch_size, resolution, resolution, 3)
    names = ("original_pixel_values", "edited_pixel_values")
    return batch | {name: rng.integers(0, 256, shape, np.uint8) for name in names}


def our_step(folder, config, latents=False):
    """A function that runs the trainer's step; latents: with --cache_latents."""
    flags = trainer.Config(
        pretrained_model_name_or_path=str(folder),
        unet_model_name_or_path=str(folder / "unet"),
        train_data_dir=(),
        resolution=config.resolution,
        train_batch_size=config.batch_size,
    )
    models, _, frozen, params = load_models(flags, jnp.float32)
    tx, _ = trainer.make_optimizer(flags, flags.max_train_steps)
    axes = shard_axes(params, 1)
    step = partial(
        trainer.train_step, models=models, tx=tx, axes=axes, **trainer.train_step_options(flags)
    )
    p_train_step = jax.pmap(step, axis_name="batch", donate_argnums=0)
    p_update_average = make_update_average()
    if latents:
        del frozen["vae"]
    frozen, batch = replicate(frozen), make_batch(config.resolution, config.batch_size, latents)
    batch, rng = replicate((batch, np.asarray(jax.random.PRNGKey(0))))
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


def torch_step(folder, config):
    """A function that runs the same step in PyTorch diffusers."""
    unet = UNet2DConditionModel.from_pretrained(folder / "unet")
    vae = AutoencoderKL.from_pretrained(folder / "vae")
    text_encoder = CLIPTextModel.from_pretrained(folder / "text_encoder")
    scheduler = DDPMScheduler.from_pretrained(folder / "scheduler")
    batch = make_batch(config.resolution, config.batch_size)
    run, _ = torch_training(unet, vae, text_encoder, scheduler, batch)
    return partial(run, unet, vae.encode)


def torch_training(unet, vae, text_encoder, scheduler, batch):
    """PyTorch's optimizer step, as a function of its programs.

    The optimizer is fused; on a GPU the average is updated in one launch for many parameters. The
    text of dropped conditions is encoded once, the batch's text in every step, as in ours.

    Args:
        unet: UNet2DConditionModel with float32 parameters.
        vae, text_encoder: frozen, in the dtype to compute in.
        scheduler: DDPMScheduler.
        batch: see make_batch.

    Returns:
        (run, arrange): run(program, encode) does a step with the UNet and vae.encode, or with
        torch.compile of both; arrange(memory_format) moves kernels, moments and average into it.
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
    average = EMAModel(unet.parameters(), decay=EMA_DECAY, foreach=device == "cuda")
    average.to(device)
    batch = {k: torch.from_numpy(v).to(device) for k, v in batch.items()}
    empty = torch.full((1, TEXT_LENGTH), END_OF_TEXT, device=device)
    with torch.no_grad():
        null_text = text_encoder(empty)[0]
    rate, B = flags.conditioning_dropout_prob, len(batch["input_ids"])

    def arrange(memory_format):
        def arranged(tensor):
            return tensor.to(memory_format=memory_format) if tensor.ndim == 4 else tensor

        unet.to(memory_format=memory_format)
        vae.to(memory_format=memory_format)
        # Fused AdamW takes parameters and moments of the same strides only.
        for moments in optimizer.state.values():
            moments.update({name: arranged(x) for name, x in moments.items()})
        average.shadow_params = [arranged(x) for x in average.shadow_params]

    def encode_images(encode):
        if "edited_latents" in batch:
            mean, std = batch["edited_latents"].permute(0, 3, 1, 2).chunk(2, 1)
            latents = mean + std * torch.randn_like(std)
            return latents.to(half), batch["original_latents"].permute(0, 3, 1, 2).to(half)
        original, edited = (
            (batch[name].permute(0, 3, 1, 2) / 127.5 - 1).to(half)
            for name in ("original_pixel_values", "edited_pixel_values")
        )
        return encode(edited).latent_dist.sample(), encode(original).latent_dist.mode()

    def run(program, encode):
        with torch.no_grad():
            latents, condition = encode_images(encode)
            latents = latents * vae.config.scaling_factor
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

    return run, arrange


def make_small_model(folder, name):
    """Write an InstructPix2Pix pipeline with a published tree and few channels.

    Args:
        folder: Path of a new directory.
        name: "sd15" or "sdxl".
    """
    jax.config.update("jax_platforms", "cpu")
    is_xl = name == "sdxl"
    configs = SDXL if is_xl else SD15
    unet = FlaxUNet2DConditionModel(**configs["unet"])
    widths = tuple(width // 10 for width in unet.block_out_channels)
    changes = dict(in_channels=8, block_out_channels=widths, cross_attention_dim=32 * (1 + is_xl))
    if is_xl:
        changes |= dict(attention_head_dim=(2, 4, 8), addition_time_embed_dim=8)
        changes["projection_class_embeddings_input_dim"] = 32 + 6 * 8
    modules = {
        "unet": unet.clone(**changes),
        "vae": FlaxAutoencoderKL(**configs["vae"] | {"block_out_channels": (32, 64, 128, 128)}),
        "text_encoder": FlaxCLIPTextModule(**configs["text_encoder"] | TEXT, **IDS),
    }
    if is_xl:
        text = configs["text_encoder_2"] | TEXT
        modules["text_encoder_2"] = FlaxCLIPTextModelWithProjectionModule(**text, **IDS)
    num_arrays = len(
        jax.tree.leaves(jax.eval_shape(modules["unet"].init_weights, jax.random.key(0)))
    )
    assert num_arrays == NUM_ARRAYS[name], f"{num_arrays} arrays"
    scheduler = SD15["scheduler"] | {"_class_name": "DDIMScheduler"}
    class_name = f"StableDiffusion{'XL' * is_xl}InstructPix2PixPipeline"
    settings = {"force_zeros_for_empty_prompt": True} if is_xl else {}
    write_pipeline(folder, modules, class_name, scheduler, settings)


def write_pairs(folder):
    """Write a shard with pairs of random images."""
    folder.mkdir()
    rng, rows = np.random.default_rng(0), []
    for _ in range(64):
        image = io.BytesIO()
        pixels = rng.integers(0, 256, (HOSTS_RESOLUTION, HOSTS_RESOLUTION, 3), np.uint8)
        Image.fromarray(pixels).save(image, "JPEG")
        rows.append(dict.fromkeys(("original_image", "edited_image"), image.getvalue()))
        rows[-1]["edit_prompt"] = "invert the colors"
    pq.write_table(pa.Table.from_pylist(rows), folder / "train-00000-of-00001.parquet")


def run_trainer(folder, num_hosts):
    """Run the trainer in a number of processes; returns the rows of metrics.jsonl."""
    output = folder / f"run-{num_hosts}"
    flags = dict(
        pretrained_model_name_or_path=folder / "model",
        unet_model_name_or_path=folder / "model" / "unet",
        train_data_dir=folder / "data",
        output_dir=output,
        resolution=HOSTS_RESOLUTION,
        train_batch_size=4,
        max_train_steps=HOSTS_STEPS,
        logging_steps=HOSTS_LOGGING,
        checkpointing_steps=0,
        ema="full",
        ema_decay=0.99,
        compilation_cache_dir="",
    )
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(DEVICES)}
    workers = []
    for number in range(num_hosts):
        if num_hosts > 1:
            who = dict(coordinator_address=f"localhost:{29400 + os.getpid() % 500}")
            flags |= who | dict(num_processes=num_hosts, process_id=number)
        command = [sys.executable, "flax_train_instruct_pix2pix.py"]
        command += [f"--{name}={value}" for name, value in flags.items()]
        workers.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL))
    if any([worker.wait() for worker in workers]):
        raise ChildProcessError("the trainer failed; it says why above")
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def measure_hosts(config):
    """Measure one process and config.hosts processes with each tree, and write a row of each."""
    machine = describe_machine()
    for name, num_arrays in NUM_ARRAYS.items():
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            in_new_process(make_small_model, folder / "model", name)
            write_pairs(folder / "data")
            for num_hosts in dict.fromkeys((1, config.hosts)):
                timed = run_trainer(folder, num_hosts)[2:]  # the first steps compile
                row = {
                    "processes": num_hosts,
                    "devices": num_hosts * DEVICES,
                    "parameter_arrays": num_arrays,
                    "host_ms": 1e3 * median(row["host_seconds"] for row in timed),
                    "step_ms": 4e3 / median(row["pairs_per_second"] for row in timed),
                    "jax": jax.__version__,
                }
                case = f"{name} host time, {num_hosts} process{'es' * (num_hosts > 1)}"
                write_rows({f"{case}, jax {jax.__version__}": row}, machine, config.output)


def run(config):
    """Measure, write."""
    check_timing(config, side="resolution", batch_size=1)
    if config.hosts is not None:
        check_counts(config, hosts=1)
        measure_hosts(config)
        return
    machine, size = describe_machine(), "tiny" if config.tiny else "sd15"
    contenders = {"ours": our_step, "torch eager": torch_step}
    contenders["ours, latents cached"] = partial(our_step, latents=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        in_new_process(make_pipeline, folder, config.tiny, 8)
        figures = time_in_turn(contenders, (folder, config), config)
    case = Case(SD15_EDIT | (TINY_UNET if config.tiny else {}), config.resolution // 8)
    flops = count_flops(case, make_inputs(case, config.batch_size), True)
    name = f"{size}_{config.resolution} optimizer step {config.batch_size}"
    row = {"batch_size": config.batch_size, "flops": flops, **figures}
    write_contenders(name, row, machine, config.output)


def main(args=None):
    """Command line."""
    run_benchmark(Config, run, __doc__, args)


if __name__ == "__main__":
    main()
