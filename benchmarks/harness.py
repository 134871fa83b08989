"""Common to the benchmarks: alternating measurements of contenders, results files, command lines.

`benchmarks/results/NAME.json` has the rows of benchmarks.NAME, {case: row}; families.json has those
of demo/compare_families.py. Every row has "command" and "machine". The rows of contenders also have
"device", "case", "work", "batch_size", "dtype", "flops" of a pass (of its UNet),
"peak_flops_per_second", "seconds" {contender: [of a pass, per round]}, "first_seconds" {contender:
[until the first result]} and "summary".
"""

import functools
import json
import math
import operator
import os
import platform
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch is on the same GPU

import jax
import jax.numpy as jnp
import numpy as np
import torch
from tqdm import tqdm

from command_line import run_main
from diffusers_flax.parameters import replace_leaves
from tpu.programs import check_compiler

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("jax", "jaxlib", "flax", "optax", "torch", "diffusers", "transformers", "numpy")
GIB = 2**30
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


# Command line and results


def command_line(subcommands, description, args=None):
    """Parse the flags, check that --output can be written, and run.

    Args:
        subcommands: {dataclass of the flags: function of the config}; several are subcommands.
        description: for --help.
        args: the flags; None takes those of this process.
    """

    def work(config):
        check_output(config.output)
        subcommands[type(config)](config)

    run_main(
        functools.reduce(operator.or_, subcommands),
        description,
        work,
        args,
        interrupted="the rows written so far are kept",
    )


def check_output(output):
    """Raise a ValueError, before anything is measured, if a file cannot be written."""
    folder = Path(output).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"--output {output} cannot be written: {error.strerror}") from error


def this_command():
    """The command of this process, a module of benchmarks/ or a script of demo/."""
    program = Path(sys.argv[0])
    words = ["-m", f"benchmarks.{program.stem}"]
    if program.resolve().parent.name == "demo":
        words = [f"demo/{program.name}"]
    return shlex.join(["python", *words, *sys.argv[1:]])


def describe_machine(packages=PACKAGES):
    """CPU, memory, load and versions of packages, for the row."""
    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    machine = {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": {package: version(package) for package in packages},
        "memory_gib": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB,
    }
    if machine["load_before"] > machine["cores"] / 2:
        print(
            f"warning: other work (load {machine['load_before']:.1f} on {machine['cores']} cores) "
            "slows down some contenders more than others",
            file=sys.stderr,
        )
    return machine


def read_rows(output):
    """The rows of a results file, {case: row}; {} if the file does not exist.

    Raises:
        ValueError: the file is damaged or not a results file.
    """
    output = Path(output)
    try:
        rows = json.loads(output.read_text()) if output.exists() else {}
    except (OSError, ValueError) as error:
        raise ValueError(f"--output {output} cannot be read ({error}); name another") from error
    values = rows.values() if isinstance(rows, dict) else [None]
    if not all(isinstance(row, dict) and "command" in row for row in values):
        raise ValueError(f"--output {output} is not a results file; name another")
    return rows


def describe_compiler():
    """describe_machine with the TPU's compiler; a ValueError if that is not installed."""
    check_compiler()
    return describe_machine(("jax", "jaxlib", "libtpu"))


def write_rows(rows, machine, output):
    """Write rows into a results file, next to the rows of other cases.

    Args:
        rows: {case: dict}.
        machine: describe_machine(), called before they were measured.
        output: the file.

    Returns:
        All rows of the file.
    """
    output = Path(output)
    origin = {"command": this_command(), "machine": machine}
    results = read_rows(output) | {case: row | origin for case, row in rows.items()}
    output.parent.mkdir(parents=True, exist_ok=True)
    unfinished = output.with_name(f".{output.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(results, indent=1) + "\n")
    unfinished.replace(output)
    return results


def psnr_db(images, others):
    """PSNR of all pixels of float images in [0, 1], dB; None: they are equal."""
    error = np.mean(np.square(images - others))
    return -10 * math.log10(error) if error else None


def psnr_cell(row):
    """The PSNR of a row of quality or text to image; empty if the images are equal."""
    return "" if row["psnr"] is None else f"{row['psnr']:.1f} dB"


def report(table, output):
    """Print the table of a results file."""
    print(f"\n{table}\n\nwrote {output}")


def rows_of(results, kind):
    """{name: row} of the rows whose case is "KIND NAME"."""
    prefix = f"{kind} "
    return {
        case.removeprefix(prefix): row for case, row in results.items() if case.startswith(prefix)
    }


# Alternating measurements of contenders


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


def measure(run, seconds):
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


def on_device(params, dtype):
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
    return first, measure(run, seconds)


def time_in_this_process(contenders, rounds, seconds):
    """Time contenders that are all in memory at once.

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
            run()  # warms the caches; threads of the previous contender go idle
            passes[name].append(measure(run, seconds))
            bar.update()
    return {"first_seconds": first, "seconds": passes}


def time_in_turn(contenders, args, rounds, seconds):
    """Time contenders, each measurement in a new process.

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
            best = max(best, 2 * n**3 / measure(run, 0.5))
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


def format_table(results):
    """Rows as Markdown."""
    lines = [
        "| device | case | batch | | s | samples/s | of the peak | first, s | ours times as fast |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in results.values():
        if "summary" not in row:
            continue
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
    report(format_table(results), output)
