"""One NVIDIA GPU: ours and PyTorch's in turn.

    python -m benchmarks.gpu
    python -m benchmarks.gpu --rows train edit --pytorch eager

measures in bfloat16, with random weights: optimizer steps of Stable Diffusion 1.5 at 256 pixels (16
pairs), with the average of the weights, from images and from cached latents; an SDXL image at 1024
pixels, 20 steps, plain, with --vae_dtype bfloat16, and with --accelerate deepcache:interval=2
guidance:stop=0.5; eight such images at once, plain and with --vae_dtype bfloat16, beside the
published images per second of TensorRT (MLPerf Inference v4.1); an edit at 512 pixels, 20 steps;
the UNet at 512 pixels (8 samples), forward and with the gradient of float32 parameters; and how far
the edits of a tiny pipeline differ between GPU and CPU.

Row after row: our programs compile in threads, beside PyTorch's in the main thread; then the
contenders are measured in turn, and the row is written. A row takes three minutes with
torch.compile, one without. A row that does not fit into memory (80 GB hold all) is left out, with a
message. For a second run in the same place set JAX_COMPILATION_CACHE_DIR; PyTorch keeps its own.

PyTorch has bfloat16 (autocast in training), fused AdamW, an average updated in few launches, its
own attention kernels, cuDNN's fastest algorithms (cudnn.benchmark), and the text encoded once per
image. "eager" has contiguous kernels and images, "compiled" is torch.compile in its default mode,
with channels_last. Inputs and images stay on the GPU. SDXL's VAE
decodes in float32 in ours without --vae_dtype, as its config asks (force_upcast), and in bfloat16
in PyTorch's. The share of the peak counts the FLOPs of the plain UNet, also for the accelerated
image.

Needs PyTorch with CUDA and, for torch.compile, a C++ compiler. --pytorch none leaves PyTorch's
contenders out. Tiny, on a CPU, in a few minutes:

    python -m benchmarks.gpu --size tiny --output gpu.json

Rows go to benchmarks/results/gpu.json.
"""

import gc
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import torch

from benchmarks.harness import (
    TimingFlags,
    describe_machine,
    in_new_process,
    in_turn,
    mean_seconds,
    run_benchmark,
    write_contenders,
    write_row,
)
from benchmarks.ours import our_contender, tiny_edit
from benchmarks.pytorch import NAMES, can_compile, torch_contender
from benchmarks.works import Work
from diffusers_flax.messages import one_line

ROWS = {
    "train": Work("train", 256, 16),
    "images": Work("sdxl", 1024),
    "image_batch": Work("sdxl", 1024, 8),
    "edit": Work("edit", 512),
    "gradient": Work("gradient", 512, 8),
    "train_latents": Work("train_latents", 256, 16),
    "forward": Work("forward", 512, 8),
}
AGREEMENT = "agreement"
HALF_VAE = {"ours, vae_dtype bfloat16": {"vae_dtype": "bfloat16"}}  # as PyTorch's
ACCELERATE = ("deepcache:interval=2", "guidance:stop=0.5")
OPTIONS = {  # {row: {contender of ours besides the plain one: options}}
    "images": HALF_VAE | {f"ours, {' '.join(ACCELERATE)}": {"accelerate": ACCELERATE}},
    "image_batch": HALF_VAE,
}
# Images per second of SDXL, 1024 pixels, 20 steps, with TensorRT: NVIDIA's results per GPU of
# MLPerf Inference v4.1, offline scenario, {device: figure}.
PUBLISHED_IMAGES = {"NVIDIA H200": 2.18, "NVIDIA H100 80GB HBM3": 2.03}


@dataclass(frozen=True, kw_only=True)
class Config(TimingFlags):
    """Measure and write."""

    size: Literal["full", "tiny"] = "full"  # tiny: tiny models, also on a CPU
    rows: tuple[Literal[*ROWS, AGREEMENT], ...] = (*ROWS, AGREEMENT)  # in this order
    pytorch: tuple[Literal[*NAMES, "none"], ...] = NAMES  # compiled: torch.compile; none: ours only
    seconds: float = 1.0  # of a measurement, at least; one pass at least
    output: str = "benchmarks/results/gpu.json"


def find_device(config):
    """The device of both libraries, by PyTorch's name: "cuda" or "cpu".

    Raises:
        ValueError: only one of them sees a GPU, there are several GPUs, or there is none or a TPU.
    """
    is_gpu = jax.default_backend() == "gpu"
    if is_gpu != torch.cuda.is_available():
        raise ValueError("only one of jax and torch sees a GPU; install the other with CUDA")
    if not is_gpu and config.size != "tiny":
        raise ValueError("no GPU is visible; --size tiny tries the benchmark on a CPU")
    if is_gpu and jax.device_count() > 1:
        raise ValueError(f"{jax.device_count()} GPUs; set CUDA_VISIBLE_DEVICES=0")
    return "cuda" if is_gpu else "cpu"


def start(make_run, work, **options):
    """(run, seconds of making it and of the first pass) of a contender."""
    started = time.monotonic()
    run = make_run(work, **options)
    run()
    return run, time.monotonic() - started


def measure_row(config, name, device, machine):
    """Compile, measure and write a row."""
    work = ROWS[name]._replace(half=True)
    if config.size == "tiny":
        work = work._replace(tiny=True, resolution=64, batch_size=min(2, work.batch_size))
        work = work._replace(num_inference_steps=10)
    options = {"ours": {}} | OPTIONS.get(name, {})
    with ThreadPoolExecutor() as pool:
        ours = {x: pool.submit(start, our_contender, work, **some) for x, some in options.items()}
        theirs = {
            f"torch {form}": start(torch_contender, work, name=form, device=device)
            for form in config.pytorch
            if form != "none"
        }
        started = {x: future.result() for x, future in ours.items()} | theirs
    passes = {contender: [] for contender in started}
    for contender in in_turn(list(started), config.rounds):
        run, _ = started[contender]
        run()  # warms the caches; threads of the previous contender go idle
        passes[contender].append(mean_seconds(run, config.seconds))
    first = {contender: [seconds] for contender, (_, seconds) in started.items()}
    more = {}
    if name == "image_batch" and (published := PUBLISHED_IMAGES.get(jax.devices()[0].device_kind)):
        more = {"published_samples_per_second": published}
    write_contenders(work, first, passes, machine, config.output, more)


def measure_agreement(config, machine):
    """Write the PSNR of this device's edits to the CPU's in float32, dB; None: equal."""
    expected, psnr = in_new_process(tiny_edit, jnp.float32, "cpu"), {}
    for dtype in (jnp.float32, jnp.bfloat16):
        error = float(np.mean(np.square(tiny_edit(dtype) - expected)))
        psnr[jnp.dtype(dtype).name] = -10 * np.log10(error) if error else None
    case = f"{jax.devices()[0].device_kind} {AGREEMENT}"
    write_row(case, {"psnr": psnr}, machine, config.output)


def run(config):
    """Measure row after row."""
    if "compiled" in config.pytorch and not can_compile():
        raise ValueError("torch.compile needs a C++ compiler; install g++, or --pytorch eager")
    device, machine, failed = find_device(config), describe_machine(), []
    torch.backends.cudnn.benchmark = True
    for name in config.rows:
        try:
            if name == AGREEMENT:
                measure_agreement(config, machine)
            else:
                measure_row(config, name, device, machine)
        except Exception as error:  # of any library, such as too little memory
            print(f"{name} is left out: {type(error).__name__}: {one_line(error, 300)}", flush=True)
            failed.append(name)
        gc.collect()
        torch.cuda.empty_cache()  # for the other library
    if failed:
        sys.exit(f"error: {', '.join(failed)} not measured; see above")


def main(args=None):
    """Command line."""
    run_benchmark(Config, run, __doc__, args)


if __name__ == "__main__":
    main()
