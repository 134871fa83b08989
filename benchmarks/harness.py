"""Timing of contenders in turn, and the files of rows.

`benchmarks/results/NAME.json` has the rows of benchmarks.NAME, {case: row}. Every row has "command"
and "machine". A row of timed contenders also has "device", "batch_size", "dtype", "flops" of a pass
(of its UNet), "peak_flops_per_second", "seconds" {contender: [of a pass, per round]},
"first_seconds" {contender: [until the first result]} and "summary".
"""

import json
import os
import platform
import re
import shlex
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch is on the same GPU

import jax
import jax.numpy as jnp
import numpy as np
import torch
from tqdm import tqdm

from diffusers_flax.command_line import AtLeast, MultipleOf, run_main
from diffusers_flax.loading.files import read_json, write_text

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("jax", "jaxlib", "flax", "optax", "torch", "diffusers", "transformers", "numpy")
Pixels = Annotated[int, AtLeast(64), MultipleOf(64)]  # of images


@dataclass(frozen=True, kw_only=True)
class TimingFlags:
    """Flags of benchmarks that time ours and PyTorch in turn."""

    rounds: Annotated[int, AtLeast(1)] = 2  # each contender is measured once in each
    seconds: float = 30.0  # of a measurement, at least; one pass at least


@dataclass(frozen=True, kw_only=True)
class CpuFlags(TimingFlags):
    """The same on a CPU."""

    tiny: bool = False  # tiny models, to try this
    resolution: Pixels = 256  # pixels


def run_benchmark(config_class, work, description, args=None):
    """Parse the flags and work; arguments as for command_line.run_main."""
    run_main(config_class, description, work, args, interrupted="the rows written so far are kept")


def write_row(case, row, machine, output):
    """Write a row next to the rows of other cases, and print it.

    Args:
        case: name of the row.
        row: dict.
        machine: describe_machine(), called before it was measured.
        output: the file.
    """
    command = shlex.join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]])
    row, file = row | {"command": command, "machine": machine}, Path(output)
    rows = read_json(file) if file.exists() else {}
    write_text(file, json.dumps(rows | {case: row}, indent=1) + "\n")
    shown = row.get("summary", {name: row[name] for name in row if name != "machine"})
    print(f"{case}: {json.dumps(shown)}", flush=True)


def describe_machine(packages=PACKAGES):
    """CPU, load and versions of packages, for the row."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return {
        "cpu": cpu[1] if cpu else platform.machine(),
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": {package: version(package) for package in packages},
    }


def in_new_process(function, *args):
    """Run function in a new process, with its own devices and memory; returns its result."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(function, *args).result()


def mean_seconds(run, seconds):
    """Seconds of a pass: the mean over as many as fit into `seconds`, at least one."""
    started, count = time.perf_counter(), 0
    while count == 0 or time.perf_counter() - started < seconds:
        run()
        count += 1
    return (time.perf_counter() - started) / count


def in_turn(names, rounds):
    """The name of every measurement, with a bar; every second round is in reverse order.

    Thus no contender always follows the same one.
    """
    turns = [name for k in range(rounds) for name in (names[::-1] if k % 2 else names)]
    return tqdm(turns, unit="measurement")


def time_contender(make_run, work, seconds, started):
    """Seconds from started (time.time()) to the first pass's end, and of a pass after that."""
    run = make_run(work)
    run()
    first = time.time() - started
    return first, mean_seconds(run, seconds)


def measure_on_cpu(work, contenders, config):
    """Time contenders on a CPU, each measurement in a new process, and write the row.

    Args:
        work: Work.
        contenders: {name: make_run}; make_run(work) -> run, which does a pass to its end.
        config: of CpuFlags, with output.

    Raises:
        ValueError: jax's device is not a CPU.
    """
    if jax.default_backend() != "cpu":
        raise ValueError("this measures a CPU; set JAX_PLATFORMS=cpu. For GPUs: benchmarks.gpu")
    machine = describe_machine()
    first, passes = {name: [] for name in contenders}, {name: [] for name in contenders}
    for name in in_turn(list(contenders), config.rounds):
        args = contenders[name], work, config.seconds, time.time()
        first_seconds, seconds = in_new_process(time_contender, *args)
        first[name].append(first_seconds)
        passes[name].append(seconds)
    write_contenders(work, first, passes, machine, config.output)


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
        best = max(best, *(2 * n**3 / mean_seconds(run, 0.5) for _ in range(3)))
    return best


def synchronize(device):
    """Wait for PyTorch's asynchronous operations; device: "cuda" or "cpu"."""
    if device == "cuda":
        torch.cuda.synchronize()


def write_contenders(work, first_seconds, seconds, machine, output, more=()):
    """Write the row of a Work's contenders, see the module; more: other entries of the row."""
    name = jax.devices()[0].device_kind
    row = {
        "device": name,
        "peak_flops_per_second": matmul_peak("cuda" if jax.default_backend() == "gpu" else "cpu"),
        "batch_size": work.batch_size,
        "dtype": "bfloat16" if work.half else "float32",
        "flops": work.count_flops(),
        "first_seconds": first_seconds,
        "seconds": seconds,
        **dict(more),
    }
    write_row(f"{name} {work.case}", row | {"summary": summarize(row)}, machine, output)


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
