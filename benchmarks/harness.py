"""Measurements of contenders that alternate in one run.

Rows of contenders have "device", "case", "work", "batch_size", "dtype", "flops" of a pass (of its
UNet), "peak_flops_per_second", "seconds" {contender: [of a pass, per round]}, "first_seconds"
{contender: [until the first result]} and "summary".
"""

import math
import os
import shutil
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch is on the same GPU

import jax
import jax.numpy as jnp
import numpy as np
import torch
from tqdm import tqdm

from benchmarks.rows import markdown_table, read_rows, report, write_rows
from diffusers_flax.parameters import replace_leaves

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


def find_device():
    """The device of both libraries, by PyTorch's name: "cuda" or "cpu".

    Raises:
        ValueError: only one of them sees a GPU, there are several GPUs, or there is a TPU.
    """
    backend = jax.default_backend()
    if backend not in ("cpu", "gpu"):
        raise ValueError(f"PyTorch does not run on this {backend}; set JAX_PLATFORMS=cpu")
    if (backend == "gpu") != torch.cuda.is_available():
        sees, blind = ("jax", "torch") if backend == "gpu" else ("torch", "jax")
        raise ValueError(f"{sees} sees a GPU and {blind} does not; install {blind} with CUDA")
    if backend == "cpu":
        return "cpu"
    if jax.device_count() > 1:
        raise ValueError(f"{jax.device_count()} GPUs; set CUDA_VISIBLE_DEVICES=0")
    return "cuda"


def can_compile():
    """Whether the C++ compiler that torch.compile needs is installed."""
    return shutil.which("g++") is not None or shutil.which("clang++") is not None


def synchronize(device):
    """Wait for PyTorch's asynchronous operations."""
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


def contenders_on(device, ours, theirs):
    """{name: its function}: ours, and theirs(..., compiled=) in the variants for the device."""
    contenders = {"ours": ours, "torch eager": partial(theirs, compiled=False)}
    if device == "cuda" and can_compile():
        contenders["torch compiled"] = partial(theirs, compiled=True)
    return contenders


def params_on_device(params, dtype):
    """A pipeline's parameters from from_pretrained, in dtype on the first device.

    The scheduler's state stays float32, as its steps need the precision.
    """
    state = params.pop("scheduler")
    replace_leaves(lambda x: jax.device_put(np.asarray(x, dtype)), params)
    return params | {"scheduler": state}


def torch_pipeline(pipeline_class, folder, device, compiled):
    """A PyTorch pipeline of a directory, in bfloat16 on a GPU; compiled: UNet and VAE."""
    pipeline = pipeline_class.from_pretrained(
        folder, dtype=torch.bfloat16 if device == "cuda" else torch.float32
    ).to(device)
    pipeline.set_progress_bar_config(disable=True)
    if compiled:
        pipeline.unet = torch.compile(pipeline.unet.to(memory_format=torch.channels_last))
        pipeline.vae.decode = torch.compile(pipeline.vae.decode)
    return pipeline


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


def time_in_turn(contenders, args, rounds, seconds):
    """Time contenders, each measurement in a new process.

    Args:
        contenders: {name: make_run}; make_run(*args) -> run, which does a pass to its end.
        args: for all of them.
        rounds: how often each is measured.
        seconds: of a measurement, see mean_seconds.

    Returns:
        {"first_seconds": {name: [from the process's start to the first pass's end]},
        "seconds": {name: [of a pass]}}.
    """
    figures = {kind: {name: [] for name in contenders} for kind in ("first_seconds", "seconds")}
    for _, name in tqdm(list(in_turn(list(contenders), rounds)), unit="measurement"):
        started = time.time()
        took = in_new_process(time_contender, contenders[name], args, seconds, started)
        for kind, value in zip(figures, took):
            figures[kind][name].append(value)
    return figures


def matmul_peak(half, device):
    """FLOPs per second of a large matmul in jax or PyTorch, whichever is faster."""
    n = 2048 if device == "cpu" else 8192
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


def make_row(case, work, batch_size, flops, device, figures):
    """A row of results; figures: "seconds" and "first_seconds", flops: of a pass."""
    half = device == "cuda"
    return {
        "case": case,
        "work": work,
        "batch_size": batch_size,
        "dtype": "bfloat16" if half else "float32",
        "flops": flops,
        "peak_flops_per_second": matmul_peak(half, device),
        **figures,
    }


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


def check_config(config, *names):
    """Find mistakes before anything is measured.

    Args:
        config: with rounds and output.
        *names: further flags that are counts or tuples of counts.

    Raises:
        ValueError: a count below 1, no count, or an output that read_rows refuses.
    """
    for name in (*names, "rounds"):
        values = getattr(config, name)
        if values == ():
            raise ValueError(f"--{name} is empty; give at least one number")
        if (least := min(values) if isinstance(values, tuple) else values) < 1:
            raise ValueError(f"--{name} {least} must be at least 1")
    read_rows(config.output)


def format_contenders(results):
    """Markdown of the rows of contenders."""
    lines = []
    for row in results.values():
        for name, figures in row.get("summary", {}).items():
            low, high = figures["ours_times_as_fast_range"]
            ratio = f"{figures['ours_times_as_fast']:.2f} ({low:.2f}-{high:.2f})"
            rate = figures["samples_per_second"]
            lines.append(
                [
                    row["device"],
                    f"{row['case']} {row['work']}",
                    str(row["batch_size"]),
                    name,
                    f"{row['batch_size'] / rate:.3g}",
                    f"{rate:.3g}",
                    f"{figures['peak_share']:.0%}",
                    f"{figures['first_seconds']:.1f}",
                    "1" if name == "ours" else ratio,
                ]
            )
    header = "device | case | batch | | s | samples/s | of the peak | first, s"
    return markdown_table(f"{header} | ours times as fast", lines)


def write_contenders(rows, machine, output):
    """Write rows of make_row, each as soon as it is measured, then print the file's table.

    Args:
        rows: iterable of rows.
        machine, output: as for write_rows.
    """
    kind = jax.devices()[0].device_kind
    for row in rows:
        case = f"{kind} {row['case']} {row['work']} {row['batch_size']}"
        row |= {"device": kind, "summary": summarize(row)}
        results = write_rows({case: row}, machine, output)
    report(format_contenders(results), output)
