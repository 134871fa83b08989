"""What the benchmarks against PyTorch share: contenders measured in turn, and what is made of it.

A row of results is a dict: "device", "case", "work", "batch_size", "dtype", "flops" of a pass (its
UNet's), "peak_flops_per_second", "seconds" {contender: [of a pass, in each round]},
"first_seconds" {contender: [until the first result]}; add_row adds "summary".
"""

import os
import shutil
import statistics
import time
from functools import partial

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch is on the same GPU

import jax
import jax.numpy as jnp
import numpy as np
import torch
from tqdm import tqdm

from benchmarks.full_size import in_new_process, read_results, this_command, write_json
from pipeline_flax_utils import replace_leaves

PACKAGES = ("jax", "jaxlib", "flax", "optax", "torch", "diffusers", "transformers", "numpy")


def find_device():
    """Where both run: "cuda" or "cpu", as PyTorch calls it.

    Raises:
        ValueError: not both see a GPU, or there are several, or there is a TPU.
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
    """Is there the C++ compiler that torch.compile wants?"""
    return shutil.which("g++") is not None or shutil.which("clang++") is not None


def synchronize(device):
    """Wait for what PyTorch has under way."""
    if device == "cuda":
        torch.cuda.synchronize()


def measure(run, seconds):
    """Seconds of a pass: the mean over as many as fill the time given, at least one."""
    started = time.perf_counter()
    count = 0
    while count == 0 or time.perf_counter() - started < seconds:
        run()
        count += 1
    return (time.perf_counter() - started) / count


def in_turn(names, rounds):
    """(round, name) of every measurement; every other round goes backwards.

    So none always comes after the same other.
    """
    for number in range(rounds):
        for name in names[::-1] if number % 2 else names:
            yield number, name


def contenders_on(device, ours, theirs):
    """{name: its function}: ours, and theirs(..., compiled=) in the ways worth while there."""
    contenders = {"ours": ours, "torch eager": partial(theirs, compiled=False)}
    if device == "cuda" and can_compile():
        contenders["torch compiled"] = partial(theirs, compiled=True)
    return contenders


def on_device(params, dtype):
    """A pipeline's parameters from from_pretrained, in dtype on the first device.

    The scheduler's state stays as it is, float32: bfloat16 would ruin it.
    """
    state = params.pop("scheduler")
    replace_leaves(lambda x: jax.device_put(np.asarray(x, dtype)), params)
    return params | {"scheduler": state}


def torch_pipeline(pipeline_class, folder, device, compiled):
    """A PyTorch pipeline of a folder, in bfloat16 on a GPU; compiled: UNet and VAE."""
    pipeline = pipeline_class.from_pretrained(
        folder, torch_dtype=torch.bfloat16 if device == "cuda" else torch.float32
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
    return first, measure(run, seconds)


def time_in_this_process(contenders, rounds, seconds):
    """Time contenders, all of which are held at once.

    Args:
        contenders: {name: (prepare, run)}; run does a pass to its end, after prepare.
        rounds: how often each is measured, after a first pass.
        seconds: of a measurement, see measure.

    Returns:
        As time_in_turn; "first_seconds" is of a single pass.
    """
    first, passes = {}, {name: [] for name in contenders}
    with tqdm(total=(rounds + 1) * len(contenders), unit="measurement") as bar:
        for name, (prepare, run) in contenders.items():
            prepare()
            first[name] = [measure(run, 0)]
            bar.update()
        for _, name in in_turn(list(contenders), rounds):
            prepare, run = contenders[name]
            prepare()
            run()  # brings its weights back to the caches; the others' threads come to rest
            passes[name].append(measure(run, seconds))
            bar.update()
    return {"first_seconds": first, "seconds": passes}


def time_in_turn(contenders, args, rounds, seconds):
    """Time contenders, every measurement in a process of its own.

    Args:
        contenders: {name: make_run}; make_run(*args) -> run, which does a pass to its end.
        args: for all of them.
        rounds: how often each is measured.
        seconds: of a measurement, see measure.

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
    """FLOPs per second of the fastest large matmul, of jax's and PyTorch's."""
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
            best = max(best, 2 * n**3 / measure(run, 0.5))
    return best


def check_config(config, *names):
    """Find mistakes before anything is measured.

    Args:
        config: with rounds and output.
        *names: of its flags that are counts as well, or tuples of counts.

    Raises:
        ValueError: a count below 1 or none at all, or an output that read_results refuses.
    """
    for name in (*names, "rounds"):
        values = getattr(config, name)
        if values == ():
            raise ValueError(f"{name} is empty; give at least one number")
        if (least := min(values) if isinstance(values, tuple) else values) < 1:
            raise ValueError(f"{name}={least} must be at least 1")
    read_results(config.output, "summary")


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
    """Medians: samples/s, share of the peak, and how many times as fast ours is, per contender."""
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


def format_table(results):
    """Rows as Markdown."""
    lines = [
        "| device | what | batch | | s | samples/s | of the peak | first, s | ours times as fast |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in results.values():
        for name, figures in row["summary"].items():
            low, high = figures["ours_times_as_fast_range"]
            ratio = f"{figures['ours_times_as_fast']:.2f} ({low:.2f}-{high:.2f})"
            rate = figures["samples_per_second"]
            lines.append(
                f"| {row['device']} | {row['case']} {row['work']} | {row['batch_size']} | {name} "
                f"| {row['batch_size'] / rate:.3g} | {rate:.3g} | {figures['peak_share']:.0%} | "
                f"{figures['first_seconds']:.1f} | {'1' if name == 'ours' else ratio} |"
            )
    return "\n".join(lines)


def report(rows, machine, output):
    """Write rows, each as soon as it is measured, and print all of the file; args of add_row."""
    for row in rows:
        results = add_row(row, machine, output)
    print(f"\n{format_table(results)}\n\nwrote {output}")


def add_row(row, machine, output):
    """Write a row into a JSON file, beside those of other devices, cases and batches.

    Args:
        row: from make_row.
        machine: from describe_machine(PACKAGES), before it was measured.
        output: the file.

    Returns:
        all rows of the file.
    """
    kind = jax.devices()[0].device_kind
    origin = {
        "command": this_command(),
        "machine": machine,
        "device": kind,
    }
    results = read_results(output, "summary")
    key = f"{kind} {row['case']} {row['work']} {row['batch_size']}"
    results[key] = row | origin | {"summary": summarize(row)}
    write_json(results, output)
    return results
