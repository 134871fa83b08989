"""Optimizer steps against the same step in PyTorch diffusers.

    python -m benchmarks.train

times full steps of InstructPix2Pix with Stable Diffusion 1.5's shapes and random weights, in
float32 on a CPU: encoding of both images and the text, conditioning dropout, loss and gradient of
the UNet, clipping, AdamW, EMA. Ours is the step of flax_train_instruct_pix2pix.py, also from cached
latents. PyTorch's step has fused AdamW and diffusers' EMAModel. The batch is on the device. Each
measurement runs in its own process and includes the time to the end of the first step. Needs 23 GB
of memory and a quarter of an hour on two otherwise idle cores. Tiny, in a minute:

    python -m benchmarks.train --tiny --resolution 64 --rounds 1 --output train.json

    python -m benchmarks.train --hosts 2

runs instead the trainer in one and in two processes of two devices each, with the trees of Stable
Diffusion 1.5 and SDXL, whose number of arrays decides the host's time; channels and images are
small enough for a CPU. Every step updates an average. A row has the host_seconds of metrics.jsonl:
what the loop's thread computes in a step, without waiting. Half an hour, 10 GB of memory.

Rows go to benchmarks/results/train.json.
"""

import io
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from benchmarks.harness import (
    ROOT,
    CpuFlags,
    describe_machine,
    in_new_process,
    measure_on_cpu,
    run_benchmark,
    write_row,
)
from benchmarks.ours import make_pipeline, our_contender, random_image, random_params
from benchmarks.pytorch import torch_contender
from benchmarks.works import PROMPT, Work
from diffusers_flax.command_line import AtLeast

HOSTS_RESOLUTION = 64  # pixels
HOSTS_STEPS, HOSTS_LOGGING = 40, 5
DEVICES = 2  # of each process
FAMILIES = {"sd15": "edit", "sdxl": "sdxl"}  # {model: name of a Work with its configs}
TEXT = dict(hidden_size=32, intermediate_size=32, num_attention_heads=2, projection_dim=32)


@dataclass(frozen=True, kw_only=True)
class Config(CpuFlags):
    batch_size: Annotated[int, AtLeast(1)] = 2  # pairs
    rounds: Annotated[int, AtLeast(1)] = 3  # each contender is measured once in each
    hosts: int | None = None  # measure only the host's time, in one and in this many processes
    hosts_steps: int = HOSTS_STEPS  # of each run of the trainer
    output: str = "benchmarks/results/train.json"


def cached_contender(work):
    """Our step from cached latents."""
    return our_contender(work._replace(name="train_latents"))


def make_small_model(folder, family):
    """Write a pipeline with a published tree and few channels; the number of the UNet's arrays."""
    jax.config.update("jax_platforms", "cpu")
    is_xl = family == "sdxl"
    configs = Work(FAMILIES[family], HOSTS_RESOLUTION).configs
    unet = configs["unet"]
    widths = (32, 64, 128) if is_xl else (32, 64, 128, 128)  # a tenth
    unet |= dict(in_channels=8, block_out_channels=widths, cross_attention_dim=32 * (1 + is_xl))
    if is_xl:
        unet |= dict(attention_head_dim=(2, 4, 8), addition_time_embed_dim=8)
        unet["projection_class_embeddings_input_dim"] = 32 + 6 * 8
    configs["vae"]["block_out_channels"] = (32, 64, 128, 128)
    for name in configs:
        if name.startswith("text_encoder"):
            configs[name] |= TEXT
    pipeline = make_pipeline(configs, is_xl, np.float32)
    names = [name for name in configs if name != "scheduler"]
    params = {name: random_params(getattr(pipeline, name)) for name in names}
    pipeline.save_pretrained(folder, params)
    return len(jax.tree.leaves(params["unet"]))


def write_pairs(folder):
    """Write a shard with 64 pairs of random images."""
    folder.mkdir()
    image = io.BytesIO()
    Image.fromarray(random_image(HOSTS_RESOLUTION)).save(image, "JPEG")
    row = dict.fromkeys(("original_image", "edited_image"), image.getvalue())
    table = pa.Table.from_pylist([row | {"edit_prompt": PROMPT}] * 64)
    pq.write_table(table, folder / "train-00000-of-00001.parquet")


def run_trainer(folder, num_hosts, num_steps):
    """Run the trainer in a number of processes; returns the rows of metrics.jsonl."""
    output = folder / f"run-{num_hosts}"
    flags = dict(
        pretrained_model_name_or_path=folder / "model",
        unet_model_name_or_path=folder / "model" / "unet",
        train_data_dir=folder / "data",
        output_dir=output,
        resolution=HOSTS_RESOLUTION,
        train_batch_size=4,
        max_train_steps=num_steps,
        logging_steps=HOSTS_LOGGING,
        checkpointing_steps=0,
        ema="full",
        ema_decay=0.99,
        compilation_cache_dir="",
    )
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(DEVICES)}
    workers = []
    if num_hosts > 1:
        address = f"localhost:{29400 + os.getpid() % 500}"
        flags |= dict(coordinator_address=address, num_processes=num_hosts)
    for number in range(num_hosts):
        if num_hosts > 1:
            flags["process_id"] = number
        command = [sys.executable, "flax_train_instruct_pix2pix.py"]
        command += [f"--{name}={value}" for name, value in flags.items()]
        workers.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL))
    if any([worker.wait() for worker in workers]):
        raise ChildProcessError("the trainer failed; it says why above")
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def measure_hosts(config):
    """Measure one process and config.hosts processes with each tree, and write a row of each."""
    machine = describe_machine()
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            num_arrays = in_new_process(make_small_model, folder / "model", family)
            write_pairs(folder / "data")
            for num_hosts in dict.fromkeys((1, config.hosts)):
                # The first steps compile.
                timed = run_trainer(folder, num_hosts, config.hosts_steps)[2:]
                row = {
                    "processes": num_hosts,
                    "devices": num_hosts * DEVICES,
                    "parameter_arrays": num_arrays,
                    "host_ms": 1e3 * median(row["host_seconds"] for row in timed),
                    "step_ms": 4e3 / median(row["pairs_per_second"] for row in timed),
                    "jax": jax.__version__,
                }
                case = f"{family} host time, {num_hosts} process{'es' * (num_hosts > 1)}"
                write_row(f"{case}, jax {jax.__version__}", row, machine, config.output)


def run(config):
    """Measure, write."""
    if config.hosts is not None:
        measure_hosts(config)
        return
    work = Work("train", config.resolution, config.batch_size, tiny=config.tiny)
    contenders = {"ours": our_contender, "torch eager": torch_contender}
    contenders["ours, latents cached"] = cached_contender
    measure_on_cpu(work, contenders, config)


def main(args=None):
    """Command line."""
    run_benchmark(Config, run, __doc__, args)


if __name__ == "__main__":
    main()
