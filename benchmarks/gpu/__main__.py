"""What matters on one NVIDIA GPU, ours and PyTorch's in turn, in eight minutes with compilation.

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

The plan is printed at the start. A row or a contender that would exceed --limit is left out, which
a line says; --rows measures some rows only, and keeps the other rows of the file. "First" is a
contender's compilation and first pass, beside the compilation of others: no comparison. The share
of the peak counts the FLOPs of the plain UNet, also for the accelerated image. All rows need a GPU
of 80 GB; a row that does not fit is left out.

Needs PyTorch with CUDA and, for torch.compile, a C++ compiler. Tiny, on a CPU, in a few minutes; an
empty --pytorch leaves PyTorch's contenders out:

    python -m benchmarks.gpu --size tiny --output gpu.json

Rows go to benchmarks/results/gpu.json.
"""

import gc
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import torch

from benchmarks.gpu.ours import compile_ours, measure_agreement, our_flags, our_run
from benchmarks.gpu.plan import PLANS, SIZES, Config, planned_rows, say, seconds_left
from benchmarks.gpu.pytorch import torch_edit, torch_sdxl, torch_train, torch_unet
from benchmarks.harness import (
    can_compile,
    check_config,
    find_device,
    format_contenders,
    in_new_process,
    make_row,
    summarize,
    time_in_this_process,
)
from benchmarks.random_models import make_pipeline, make_xl_pipeline
from benchmarks.rows import PACKAGES, describe_machine, psnr_cell, report, run_benchmark, write_rows
from benchmarks.unet import Case, count_flops, make_inputs
from compiling.jobs import read_configs
from diffusers_flax.messages import one_line
from diffusers_flax.pipelines.instruct_pix2pix import BRANCHES
from diffusers_flax.published_configs import PUBLISHED_CONFIGS


class Row(NamedTuple):
    """What is measured.

    ours: {contender: flags of tpu_compile.py's programs}. theirs: () -> the PyTorch modules'
    contenders, {name: (prepare, run)}, for the names in Config.pytorch.
    """

    case: str
    work: str
    batch_size: int
    ours: dict[str, Any]
    theirs: Callable[[], dict[str, tuple[Callable, Callable]]]
    count_flops: Callable[[], int]


def describe_error(error):
    """Type and message of an exception of any library, on one line."""
    return f"{type(error).__name__}: {one_line(error, 300)}"


class Background:
    """The result of a function that a thread computes; the process may end before it."""

    def __init__(self, function, *args):
        self.value, self.error = None, ""
        self.seconds = 0.0
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

    def wait(self, seconds):
        """Wait for the result; returns why there is none, or ""."""
        self.thread.join(max(0.0, seconds))
        return "it does not compile in time" if self.thread.is_alive() else self.error


def make_rows(config, sources, device):
    """(rows, configs): {name: Row} of the measured rows, {family: {part: config}}."""
    size = SIZES[config.size]
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

    steps = size.num_inference_steps
    case, B = Case(sd15["unet"], size.resolution // 8), size.batch_size
    rows = {
        name: Row(
            f"{config.size}_{size.resolution}",
            name,
            B,
            ours[name],
            partial(torch_unet, config.pytorch, case, B, name == "gradient", device),
            partial(flops, sd15["unet"], size.resolution, B, name == "gradient"),
        )
        for name in ("forward", "gradient")
    }
    rows["train"] = Row(
        f"{config.size}_{size.train_resolution}",
        "optimizer step",
        size.pairs,
        ours["train"],
        partial(torch_train, config.pytorch, sd15, size, device),
        partial(flops, sd15["unet"], size.train_resolution, size.pairs, True),
    )
    rows["edit"] = Row(
        f"{config.size}_{size.resolution}",
        f"edit, {steps} steps",
        1,
        ours["edit"],
        partial(torch_edit, config.pytorch, sd15, size, device),
        # PNDM has one more call of the UNet than steps.
        partial(flops, sd15["unet"], size.resolution, len(BRANCHES), passes=steps + 1),
    )
    rows["images"] = Row(
        f"{config.size}_xl_{size.image_size}",
        f"images, {steps} steps",
        1,
        ours["images"],
        partial(torch_sdxl, config.pytorch, sdxl, size, device),
        partial(flops, sdxl["unet"], size.image_size, 2, passes=steps),
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


def warm_torch(config, names, rows):
    """Make PyTorch's contenders and run each once, which compiles.

    Args:
        config: Config.
        names: of the rows to measure.
        rows: {name: Row}.

    Returns:
        ({row: {contender: (prepare, run, seconds of the first pass)}}, names of rows that failed).
    """
    failed, warm, to_measure = [], {}, sum(PLANS[name].measure for name in names)
    for name in rows:
        warm[name] = {}
        try:
            contenders = rows[name].theirs() if config.pytorch else {}
        except Exception as error:  # such as too little memory; the other rows go on
            say(f"{name}: PyTorch is left out: {describe_error(error)}")
            failed.append(name)
            contenders = {}
        for contender, (prepare, run) in contenders.items():
            needed = PLANS[name].torch + to_measure
            if contender == "compiled" and needed > seconds_left(config):
                say(f"{name}: torch compiled is left out: it would exceed --limit")
                continue
            try:
                first = first_pass(prepare, run)
            except Exception as error:
                say(f"{name}: torch {contender} is left out: {describe_error(error)}")
                failed.append(name)
                continue
            warm[name][f"torch {contender}"] = (prepare, run, first)
            say(f"{name}: first pass of torch {contender} in {first:.0f} s")
        free_memory()
    return warm, failed


def measure_row(config, name, row, programs, theirs, configs, device):
    """Measure the contenders of a row in turn; without PyTorch's if that fails.

    Args:
        config, name, row: see make_rows.
        programs: {contender: Background of compile_ours}.
        theirs: {contender: (prepare, run, seconds of the first pass)}.
        configs, device: see our_run and measure_all.

    Returns:
        A row of results, see harness.make_row; None if ours fails.
    """
    for others in [theirs, {}] if theirs else [{}]:
        try:
            return measure_contenders(config, row, programs, others, configs, device)
        except Exception as error:  # such as too little memory; the other rows go on
            what = "all contenders together" if others else "ours"
            say(f"{name}: measuring {what} fails: {describe_error(error)}")
        finally:
            free_memory()
    return None


def measure_contenders(config, row, programs, theirs, configs, device):
    """A row of results; arguments as for measure_row."""
    contenders, first, flops = {}, {}, row.count_flops()
    for name, program in programs.items():
        run = our_run(row.ours[name], program.value, configs)
        first[name] = program.seconds + first_pass(lambda: None, run)
        contenders[name] = (lambda: None, run)
    for name, (prepare, run, seconds) in theirs.items():
        contenders[name], first[name] = (prepare, run), seconds
    figures = time_in_this_process(contenders, config.rounds, config.seconds)
    figures["first_seconds"] = {name: [seconds] for name, seconds in first.items()}
    made = make_row(row.case, row.work, row.batch_size, flops, device, figures)
    made |= {"dtype": "bfloat16", "device": jax.devices()[0].device_kind}
    return made | {"compile_seconds": {name: x.seconds for name, x in programs.items()}}


def measure_all(config, names, folder, sources, machine, device):
    """Compile everything, then measure and write row by row.

    Args:
        config: Config.
        names: of the rows.
        folder: of the tiny pipeline for the agreement.
        sources: see our_flags.
        machine: see write_rows.
        device: "cuda" or "cpu".

    Returns:
        (names of the rows in which something failed, whether a thread is still compiling).
    """
    rows, configs = make_rows(replace(config, rows=tuple(names)), sources, device)
    programs = {
        name: {contender: Background(compile_ours, flags) for contender, flags in row.ours.items()}
        for name, row in rows.items()
    }
    agreement = Background(measure_agreement, folder) if "agreement" in names else None
    theirs, failed = warm_torch(config, names, rows)
    kind = jax.devices()[0].device_kind
    waiting = [x for row in programs.values() for x in row.values()] + [agreement] * bool(agreement)
    to_measure = sum(PLANS[name].measure for name in names)
    while seconds_left(config) > to_measure and any(x.thread.is_alive() for x in waiting):
        time.sleep(0.1)
    say("compiled; measuring")
    for number, (name, row) in enumerate(rows.items()):
        if PLANS[name].measure > seconds_left(config):
            say(f"{name} is left out: its measurement would exceed --limit")
            continue
        ready = {}
        for contender, program in programs.pop(name).items():
            if reason := program.wait(0):
                say(f"{name}: {contender} is left out: {reason}")
                failed.append(name)
            else:
                ready[contender] = program
        if "ours" not in ready:
            continue
        is_compiling = any(x.thread.is_alive() for x in waiting)
        found = measure_row(config, name, row, ready, theirs.pop(name), configs, device)
        if found is None:
            failed.append(name)
            continue
        found |= {"summary": summarize(found), "other_programs_compile": is_compiling}
        case = f"{kind} {row.case} {row.work} {row.batch_size}"
        write_rows({case: found}, machine, config.output)
        say(f"{name} is written, {number + 1} of {len(rows)}")
    if agreement and (reason := agreement.wait(seconds_left(config))):
        say(f"agreement is left out: {reason}")
        failed.append("agreement")
    elif agreement:
        cells = {name: psnr_cell(x, "equal") for name, x in agreement.value.items()}
        write_rows({f"{kind} agreement": {"psnr": agreement.value}}, machine, config.output)
        say(f"agreement with the CPU: {', '.join(f'{k} {v}' for k, v in cells.items())}")
    return failed, any(x.thread.is_alive() for x in waiting)


def run(config):
    """Plan, compile, measure, write, print."""
    check_config(config)
    if not config.rows:
        raise ValueError(f"--rows is empty; name some of {', '.join(PLANS)}")
    if "compiled" in config.pytorch and not can_compile():
        raise ValueError("torch.compile needs a C++ compiler; install g++, or --pytorch eager")
    device, machine = find_device(), describe_machine(PACKAGES)
    if device == "cpu" and config.size == "full":
        raise ValueError("no GPU is visible; --size tiny tries the benchmark on a CPU")
    names = planned_rows(config)
    if not names:
        raise ValueError(f"--limit {config.limit:g} is too short for any row; see the lines above")
    with tempfile.TemporaryDirectory() as temporary:
        folder, sources = Path(temporary), {"sd15": "", "sdxl": ""}
        if "agreement" in names or config.size == "tiny":
            in_new_process(make_pipeline, folder / "sd15", True, 8)
        if config.size == "tiny":
            in_new_process(make_xl_pipeline, folder / "sdxl", True)
            sources = {name: str(folder / name) for name in sources}
        failed, busy = measure_all(config, names, folder / "sd15", sources, machine, device)
    say("done")
    report(format_contenders(write_rows({}, machine, config.output)), config.output)
    if failed:
        failed = ", ".join(dict.fromkeys(failed))
        print(f"error: not all of {failed} is measured; the lines above say why", file=sys.stderr)
    if busy:  # XLA's compiler cannot be interrupted
        sys.stdout.flush()
        os._exit(1)
    if failed:
        sys.exit(1)


def main(args=None):
    """Command line."""
    run_benchmark({Config: run}, __doc__, args)


if __name__ == "__main__":
    main()
