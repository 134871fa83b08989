"""Measurements of contenders that alternate in one run.

Rows of contenders have "device", "batch_size", "dtype", "flops" of a pass (of its UNet),
"peak_flops_per_second", "seconds" {contender: [of a pass, per round]}, "first_seconds"
{contender: [until the first result]} and "summary".
"""

import math
import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch is on the same GPU

import jax
import jax.numpy as jnp
import numpy as np
import torch
from tqdm import tqdm

from benchmarks.rows import check_counts, write_rows

PROMPT = "invert the colors"
SCALES = {"guidance_scale": 7.5, "image_guidance_scale": 1.5}  # of edits

# The accelerations that are compared, of edits and of SDXL images; None where one does not apply.
ACCELERATIONS = {
    "plain": ("", ""),
    "guidance": ("guidance:image_stop=0.3,stop=0.6", "guidance:stop=0.5"),
    "deepcache 2": ("deepcache:interval=2", "deepcache:interval=2"),
    "deepcache 3": ("deepcache:interval=3", "deepcache:interval=3"),
    "spectrum": ("spectrum", "spectrum"),
    "tgate": (None, "tgate"),
    "fbcache": ("fbcache", "fbcache"),
    "tome": ("tome", "tome:max_downsample=2"),
    "int8": ("int8", "int8"),
    "int8 in all layers": ("int8:mode=dynamic", "int8:mode=dynamic"),
    "int8 weights": ("int8:mode=weight", "int8:mode=weight"),
    "taesd": ("taesd", "taesd"),
    "deepcache 2, guidance": (
        "deepcache:interval=2 guidance:image_stop=0.3,stop=0.6",
        "deepcache:interval=2 guidance:stop=0.5",
    ),
    "spectrum, guidance": (
        "spectrum guidance:image_stop=0.3,stop=0.6",
        "spectrum guidance:stop=0.5",
    ),
}


@dataclass(frozen=True, kw_only=True)
class TimingFlags:
    """Flags of benchmarks that time ours and PyTorch in turn."""

    rounds: int = 2  # each contender is measured once in each
    seconds: float = 30.0  # of a measurement, at least; one pass at least


def check_timing(config, side=None, **lowest):
    """Check the flags and the device before anything is measured.

    Args:
        config: of TimingFlags.
        side: name of the flag with the side of the images, if there is one.
        **lowest: see check_counts.

    Raises:
        ValueError: a flag is invalid, or jax's device is not a CPU.
    """
    check_counts(config, rounds=1, **lowest)
    if side and ((pixels := getattr(config, side)) < 64 or pixels % 64):
        raise ValueError(f"--{side} {pixels} must be a multiple of 64")
    if jax.default_backend() != "cpu":
        raise ValueError("this measures a CPU; set JAX_PLATFORMS=cpu. For GPUs: benchmarks.gpu")


def psnr_db(images, others):
    """PSNR of all pixels of float images in [0, 1], dB; None: they are equal."""
    error = np.mean(np.square(images - others))
    return -10 * math.log10(error) if error else None


def in_new_process(function, *args):
    """Run function in a new process, with its own devices and memory; returns its result.

    Raises:
        ValueError: the process was killed.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        try:
            return process.submit(function, *args).result()
        except BrokenProcessPool as error:
            raise ValueError(
                "a process was killed, most likely because memory ran out; use a smaller case "
                "or a machine with more memory"
            ) from error


def synchronize(device):
    """Wait for PyTorch's asynchronous operations; device: "cuda" or "cpu"."""
    if device == "cuda":
        torch.cuda.synchronize()


def mean_seconds(run, seconds):
    """Seconds of a pass: the mean over as many as fit into `seconds`, at least one."""
    started = time.perf_counter()
    count = 0
    while count == 0 or time.perf_counter() - started < seconds:
        run()
        count += 1
    return (time.perf_counter() - started) / count


def in_turn(names, rounds):
    """(round, name) of every measurement; every second round is in reverse order.

    Thus no contender always follows the same one.
    """
    for number in range(rounds):
        for name in names[::-1] if number % 2 else names:
            yield number, name


def time_contender(make_run, args, seconds, started):
    """Seconds from started (time.time()) to the first pass's end, and of a pass after that."""
    run = make_run(*args)
    run()
    first = time.time() - started
    return first, mean_seconds(run, seconds)


def time_in_this_process(contenders, rounds, seconds):
    """Time contenders that are all in memory at once.

    Args:
        contenders: {name: (prepare, run)}; run does a pass to its end, after prepare.
        rounds: how often each is measured, after a first pass.
        seconds: of a measurement, see mean_seconds.

    Returns:
        As time_in_turn; "first_seconds" is of a single pass.
    """
    first, passes = {}, {name: [] for name in contenders}
    with tqdm(total=(rounds + 1) * len(contenders), unit="measurement") as bar:
        for name, (prepare, run) in contenders.items():
            prepare()
            first[name] = [mean_seconds(run, 0)]
            bar.update()
        for _, name in in_turn(list(contenders), rounds):
            prepare, run = contenders[name]
            prepare()
            run()  # warms the caches; threads of the previous contender go idle
            passes[name].append(mean_seconds(run, seconds))
            bar.update()
    return {"first_seconds": first, "seconds": passes}


def time_in_turn(contenders, args, config):
    """Time contenders, each measurement in a new process.

    Args:
        contenders: {name: make_run}; make_run(*args) -> run, which does a pass to its end.
        args: for all of them.
        config: of TimingFlags.

    Returns:
        {"first_seconds": {name: [from the process's start to the first pass's end]},
        "seconds": {name: [of a pass]}}.
    """
    figures = {kind: {name: [] for name in contenders} for kind in ("first_seconds", "seconds")}
    for _, name in tqdm(list(in_turn(list(contenders), config.rounds)), unit="measurement"):
        started = time.time()
        took = in_new_process(time_contender, contenders[name], args, config.seconds, started)
        for kind, value in zip(figures, took):
            figures[kind][name].append(value)
    return figures


def matmul_peak(device):
    """FLOPs per second of a large matmul in jax or PyTorch, whichever is faster.

    In float32 on a CPU, in bfloat16 on a GPU.
    """
    n, half = (2048, False) if device == "cpu" else (8192, True)
    x = np.random.default_rng(0).standard_normal((n, n), np.float32)
    ours = jnp.asarray(x, jnp.bfloat16 if half else jnp.float32)
    theirs = torch.from_numpy(x).to(device, torch.bfloat16 if half else torch.float32)
    multiply = jax.jit(jnp.matmul)

    def run_theirs():
        theirs @ theirs
        synchronize(device)

    best = 0.0
    for run in (lambda: jax.block_until_ready(multiply(ours, ours)), run_theirs):
        run()
        for _ in range(3):
            best = max(best, 2 * n**3 / mean_seconds(run, 0.5))
    return best


def write_contenders(case, row, machine, output):
    """Complete a row of contenders and write it.

    Args:
        case: "CASE WORK BATCH_SIZE"; the row is named "DEVICE CASE WORK BATCH_SIZE".
        row: "batch_size", "flops" of a pass, and what time_in_turn returned.
        machine, output: as for write_rows.
    """
    kind = jax.devices()[0].device_kind
    row = {
        "device": kind,
        "dtype": "float32",
        "peak_flops_per_second": matmul_peak("cuda" if jax.default_backend() == "gpu" else "cpu"),
        **row,
    }
    write_rows({f"{kind} {case}": row | {"summary": summarize(row)}}, machine, output)


def summarize(row):
    """Medians per contender: samples/s, share of the peak, the factor by which ours is faster."""
    summary = {}
    for name, seconds in row["seconds"].items():
        ratios = [theirs / ours for theirs, ours in zip(seconds, row["seconds"]["ours"])]
        middle = statistics.median(seconds)
        summary[name] = {
            "samples_per_second": row["batch_size"] / middle,
            "peak_share": row["flops"] / middle / row["peak_flops_per_second"],
            "first_seconds": statistics.median(row["first_seconds"][name]),
            "ours_times_as_fast": statistics.median(ratios),
            "ours_times_as_fast_range": [min(ratios), max(ratios)],
        }
    return summary
