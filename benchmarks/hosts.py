"""Host time of a training step on one and several hosts: python -m benchmarks.train --hosts 2.

The trainer runs with the trees of Stable Diffusion 1.5 and SDXL, whose number of arrays decides the
host's time; channels and images are small enough for a CPU. Every step updates an average. Each
process has two devices. host_seconds of metrics.jsonl is what the loop's thread computes in a step,
without waiting.
"""

import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from benchmarks.harness import in_new_process
from benchmarks.random_models import IDS, SD15, SDXL, write_pipeline
from benchmarks.rows import ROOT, describe_machine, write_rows
from diffusers_flax.models.clip import FlaxCLIPTextModelWithProjectionModule, FlaxCLIPTextModule
from diffusers_flax.models.unet import FlaxUNet2DConditionModel
from diffusers_flax.models.vae import FlaxAutoencoderKL

RESOLUTION = 64  # pixels
NUM_STEPS, LOGGING_STEPS = 90, 10
DEVICES = 2  # of each process
NUM_ARRAYS = {"sd15": 686, "sdxl": 1680}  # parameters of the UNet
TEXT = dict(hidden_size=32, intermediate_size=32, num_attention_heads=2, projection_dim=32)


def make_model(folder, name):
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
        pixels = rng.integers(0, 256, (RESOLUTION, RESOLUTION, 3), np.uint8)
        Image.fromarray(pixels).save(image, "JPEG")
        rows.append(dict.fromkeys(("original_image", "edited_image"), image.getvalue()))
        rows[-1]["edit_prompt"] = "invert the colors"
    pq.write_table(pa.Table.from_pylist(rows), folder / "train-00000-of-00001.parquet")


def train(folder, num_hosts):
    """Run the trainer in a number of processes; returns the rows of metrics.jsonl."""
    output = folder / f"run-{num_hosts}"
    flags = dict(
        pretrained_model_name_or_path=folder / "model",
        unet_model_name_or_path=folder / "model" / "unet",
        train_data_dir=folder / "data",
        output_dir=output,
        resolution=RESOLUTION,
        train_batch_size=4,
        max_train_steps=NUM_STEPS,
        logging_steps=LOGGING_STEPS,
        checkpointing_steps=0,
        ema="full",
        ema_decay=0.99,
        compilation_cache_dir="",
    )
    # XLA's optimizations change the step, which the host does not wait for, and take minutes.
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES} "
        "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
    }
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
            in_new_process(make_model, folder / "model", name)
            write_pairs(folder / "data")
            for num_hosts in dict.fromkeys((1, config.hosts)):
                timed = train(folder, num_hosts)[
                    2:
                ]  # not the first step, and the average's program
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
