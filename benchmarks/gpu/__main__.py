"""One NVIDIA GPU: ours and PyTorch's in turn, in eight minutes with compilation.

    python -m benchmarks.gpu

measures in bfloat16, with random weights: Stable Diffusion 1.5's UNet at 512 pixels (8 samples),
forward and with the gradient of float32 parameters; optimizer steps at 256 pixels (16 pairs), with
the average of the weights; an SDXL image at 1024 pixels, 20 steps, plain and with --accelerate
deepcache:interval=2 guidance:stop=0.5; an edit at 512 pixels, 20 steps; and how far the
edits of a tiny pipeline differ between GPU and CPU. PyTorch runs eager; --pytorch eager compiled
adds torch.compile, which takes two to three minutes for a row: measure a row or two at a time.

First everything is compiled: our programs in threads, beside PyTorch's in the main thread. Then the
rows are measured one after the other, contenders in turn, and each row is written as soon as it is
known. Inputs and images stay on the GPU. SDXL's VAE decodes in float32 in ours, as its config asks
(force_upcast), and in bfloat16 in PyTorch's.

--rows measures some rows only, and keeps the other rows of the file. "First" includes compilation
while other contenders compile, so do not compare it. The share of the peak counts the FLOPs of the
plain UNet, also for the accelerated image. All rows need a GPU of 80 GB; a row that does not fit is
left out, with a message.

Needs PyTorch with CUDA and, for torch.compile, a C++ compiler. Tiny, on a CPU, in a few minutes; an
empty --pytorch leaves PyTorch's contenders out:

    python -m benchmarks.gpu --tiny --output gpu.json

Rows go to benchmarks/results/gpu.json.
"""

import gc
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import torch

from benchmarks.gpu.flags import ROWS, Config
from benchmarks.gpu.ours import compile_ours, measure_agreement, our_flags, our_run
from benchmarks.gpu.pytorch import (
    edit_contenders,
    sdxl_contenders,
    train_contenders,
    unet_contenders,
)
from benchmarks.harness import in_new_process, time_in_this_process, write_contenders
from benchmarks.random_models import make_pipeline, make_xl_pipeline
from benchmarks.rows import check_counts, describe_machine, run_benchmark, write_rows
from benchmarks.unet import Case, can_compile, count_flops, make_inputs
from compiling.programs import read_configs
from diffusers_flax.messages import one_line
from diffusers_flax.pipelines.instruct_pix2pix import EDIT_BRANCHES
from diffusers_flax.published_configs import PUBLISHED_CONFIGS


class Row(NamedTuple):
    """A row to measure.

    ours: {contender: flags of compile_for.py's programs}. theirs: () -> PyTorch's contenders,
    {name: (prepare, run)}, for the names in Config.pytorch.
    """

    case: str
    batch_size: int
    ours: dict[str, Any]
    theirs: Callable[[], dict[str, tuple[Callable, Callable]]]
    count_flops: Callable[[], int]


class Background:
    """The result of a function that a thread computes."""

    def __init__(self, function, *args):
        self.value, self.error, self.seconds = None, "", 0.0
        self.thread = threading.Thread(target=self.work, args=(function, *args), daemon=True)
        self.thread.start()

    def work(self, function, *args):
        """Compute in the thread."""
        started = time.monotonic()
        try:
            self.value = function(*args)
        except Exception as error:  # of any library; the other rows go on
            self.error = describe_error(error)
        self.seconds = time.monotonic() - started

    def wait(self):
        """Wait for the result; returns why there is none, or ""."""
        self.thread.join()
        return self.error


def describe_error(error):
    """Type and message of an exception of any library, on one line."""
    return f"{type(error).__name__}: {one_line(error, 300)}"


def find_device(config):
    """The device of both libraries, by PyTorch's name: "cuda" or "cpu".

    Raises:
        ValueError: only one of them sees a GPU, there are several GPUs, or there is none or a TPU.
    """
    backend = jax.default_backend()
    if backend not in ("cpu", "gpu"):
        raise ValueError(f"PyTorch does not run on this {backend}; set JAX_PLATFORMS=cpu")
    if (backend == "gpu") != torch.cuda.is_available():
        sees, blind = ("jax", "torch") if backend == "gpu" else ("torch", "jax")
        raise ValueError(f"{sees} sees a GPU and {blind} does not; install {blind} with CUDA")
    if backend == "cpu" and not config.tiny:
        raise ValueError("no GPU is visible; --tiny tries the benchmark on a CPU")
    if backend == "gpu" and jax.device_count() > 1:
        raise ValueError(f"{jax.device_count()} GPUs; set CUDA_VISIBLE_DEVICES=0")
    return "cpu" if backend == "cpu" else "cuda"


def make_rows(config, sources, device):
    """(rows, configs): {name: Row} of the measured rows, {family: {component: config}}."""
    sizes, size = config.sizes, "tiny" if config.tiny else "full"
    configs = {
        "sd15": dict(PUBLISHED_CONFIGS["stable-diffusion-v1-5"]),
        "sdxl": dict(PUBLISHED_CONFIGS["stable-diffusion-xl-base-1.0"]),
    }
    for family, source in sources.items():
        if source:
            names = [name for name in configs[family] if name != "scheduler"]
            for name, entries in read_configs(source, None, *names).items():
                configs[family][name] = {k: v for k, v in entries.items() if v is not None}
    sd15, sdxl = configs["sd15"], configs["sdxl"]
    sd15["unet"] = {**sd15["unet"], "in_channels": 8}
    ours = our_flags(config, sources)

    def flops(unet, pixels, batch_size, with_gradient=False, passes=1):
        case = Case(unet, pixels // 8)
        return passes * count_flops(case, make_inputs(case, batch_size), with_gradient)

    steps, B = sizes.num_inference_steps, sizes.batch_size
    case = Case(sd15["unet"], sizes.resolution // 8)
    rows = {
        name: Row(
            f"{size}_{sizes.resolution} {name} {B}",
            B,
            ours[name],
            partial(unet_contenders, config.pytorch, case, B, name == "gradient", device),
            partial(flops, sd15["unet"], sizes.resolution, B, name == "gradient"),
        )
        for name in ("forward", "gradient")
    }
    rows["train"] = Row(
        f"{size}_{sizes.train_resolution} optimizer step {sizes.pairs}",
        sizes.pairs,
        ours["train"],
        partial(train_contenders, config.pytorch, sd15, sizes, device),
        partial(flops, sd15["unet"], sizes.train_resolution, sizes.pairs, True),
    )
    rows["edit"] = Row(
        f"{size}_{sizes.resolution} edit, {steps} steps 1",
        1,
        ours["edit"],
        partial(edit_contenders, config.pytorch, sd15, sizes, device),
        # PNDM has one more call of the UNet than steps.
        partial(flops, sd15["unet"], sizes.resolution, len(EDIT_BRANCHES), passes=steps + 1),
    )
    rows["images"] = Row(
        f"{size}_xl_{sizes.image_size} images, {steps} steps 1",
        1,
        ours["images"],
        partial(sdxl_contenders, config.pytorch, sdxl, sizes, device),
        partial(flops, sdxl["unet"], sizes.image_size, 2, passes=steps),
    )
    return {name: rows[name] for name in config.rows if name in rows}, configs


def free_memory():
    """Give what PyTorch does not use back to the GPU, for the other library."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def first_pass(prepare, run):
    """Seconds of a first pass, which compiles."""
    started = time.monotonic()
    prepare()
    run()
    return time.monotonic() - started


def warm_torch(rows, use_torch):
    """Make PyTorch's contenders and run each once, which compiles.

    Args:
        rows: {name: Row}.
        use_torch: whether there are any.

    Returns:
        ({row: {contender: (prepare, run, seconds of the first pass)}}, names of rows that failed).
    """
    failed, warm = [], {name: {} for name in rows}
    for name, row in rows.items():
        try:
            contenders = row.theirs() if use_torch else {}
            for contender, (prepare, run) in contenders.items():
                warm[name][f"torch {contender}"] = (prepare, run, first_pass(prepare, run))
        except Exception as error:  # such as too little memory; the other rows go on
            print(f"{name}: PyTorch is left out: {describe_error(error)}", flush=True)
            failed.append(name)
        free_memory()
    return warm, failed


def measure_row(config, row, programs, theirs, configs):
    """A row's figures.

    Args:
        config: Config.
        row: Row.
        programs: {contender: Background of compile_ours}.
        theirs: {contender: (prepare, run, seconds of the first pass)}.
        configs: of make_rows.
    """
    contenders, first = {}, {}
    for name, program in programs.items():
        run = our_run(row.ours[name], program.value, configs)
        first[name] = program.seconds + first_pass(lambda: None, run)
        contenders[name] = (lambda: None), run
    for name, (prepare, run, seconds) in theirs.items():
        contenders[name], first[name] = (prepare, run), seconds
    figures = time_in_this_process(contenders, config.rounds, config.seconds)
    figures["first_seconds"] = {name: [seconds] for name, seconds in first.items()}
    figures["compile_seconds"] = {name: program.seconds for name, program in programs.items()}
    known = {"dtype": "bfloat16", "batch_size": row.batch_size, "flops": row.count_flops()}
    return known | figures


def measure_all(config, folder, sources, machine, device):
    """Compile everything, then measure and write row by row.

    Args:
        config: Config.
        folder: of the tiny pipeline for the agreement.
        sources: see our_flags.
        machine: see write_rows.
        device: "cuda" or "cpu".

    Returns:
        Names of the rows in which something failed.
    """
    rows, configs = make_rows(config, sources, device)
    programs = {
        name: {contender: Background(compile_ours, flags) for contender, flags in row.ours.items()}
        for name, row in rows.items()
    }
    agreement = Background(measure_agreement, folder) if "agreement" in config.rows else None
    theirs, failed = warm_torch(rows, bool(config.pytorch))
    for name in rows:
        for contender, program in programs[name].items():
            if reason := program.wait():
                print(f"{name}: {contender} is left out: {reason}", flush=True)
                failed.append(name)
    reason = agreement.wait() if agreement else ""
    for name, row in rows.items():
        ready = {key: x for key, x in programs.pop(name).items() if not x.error}
        if "ours" not in ready:
            continue
        try:
            found = measure_row(config, row, ready, theirs.pop(name), configs)
            write_contenders(row.case, found, machine, config.output)
        except Exception as error:  # such as too little memory; the other rows go on
            print(f"{name} is left out: {describe_error(error)}", flush=True)
            failed.append(name)
        free_memory()
    if reason:
        print(f"agreement is left out: {reason}", flush=True)
        failed.append("agreement")
    elif agreement:
        kind = jax.devices()[0].device_kind
        write_rows({f"{kind} agreement": {"psnr": agreement.value}}, machine, config.output)
    return failed


def run(config):
    """Compile, measure, write."""
    check_counts(config, rounds=1)
    if not config.rows:
        raise ValueError(f"--rows is empty; name some of {', '.join(ROWS)}")
    if "compiled" in config.pytorch and not can_compile():
        raise ValueError("torch.compile needs a C++ compiler; install g++, or --pytorch eager")
    device, machine = find_device(config), describe_machine()
    with tempfile.TemporaryDirectory() as temporary:
        folder, sources = Path(temporary), {"sd15": "", "sdxl": ""}
        if "agreement" in config.rows or config.tiny:
            in_new_process(make_pipeline, folder / "sd15", True, 8)
        if config.tiny:
            in_new_process(make_xl_pipeline, folder / "sdxl", True)
            sources = {name: str(folder / name) for name in sources}
        failed = measure_all(config, folder / "sd15", sources, machine, device)
    if failed:
        failed = ", ".join(dict.fromkeys(failed))
        print(f"error: not all of {failed} is measured; the lines above say why", file=sys.stderr)
        sys.exit(1)


def main(args=None):
    """Command line."""
    run_benchmark(Config, run, __doc__, args)


if __name__ == "__main__":
    main()
