"""What matters on one NVIDIA GPU, ours and PyTorch's in turn, in eight minutes with compilation.

    python -m benchmarks.gpu

measures in bfloat16, with random weights: Stable Diffusion 1.5's UNet at 512 pixels (8 samples),
forward and with the gradient of float32 parameters; optimizer steps at 256 pixels (16 pairs), with
the average of the weights; an SDXL image at 1024 pixels, 20 steps, plain and with --accelerate
deepcache:interval=2 guidance:stop=0.5; an edit at 512 pixels, 20 steps; and how far a tiny
pipeline's edits on the GPU are from those on the CPU. PyTorch runs eager and through torch.compile.

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

    python -m benchmarks.gpu --size tiny --pytorch eager --output gpu.json

Rows go to benchmarks/results/gpu.json.
"""

import gc
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

import tpu_compile
from benchmarks.gpu_pytorch import (
    torch_edit,
    torch_sdxl,
    torch_train,
    torch_unet,
)
from benchmarks.harness import (
    PROMPT,
    SCALES,
    can_compile,
    check_config,
    find_device,
    format_contenders,
    in_new_process,
    make_row,
    psnr_db,
    summarize,
    time_in_this_process,
)
from benchmarks.random_models import make_pipeline, make_xl_pipeline
from benchmarks.rows import PACKAGES, describe_machine, psnr_cell, report, run_benchmark, write_rows
from benchmarks.unet import Case, count_flops, make_inputs
from diffusers_flax.loading.published_configs import PUBLISHED_CONFIGS
from diffusers_flax.messages import one_line
from diffusers_flax.pipelines.instruct_pix2pix import (
    BRANCHES,
    FlaxStableDiffusionInstructPix2PixPipeline,
)
from diffusers_flax.schedulers.ddpm import FlaxDDPMScheduler
from diffusers_flax.schedulers.factory import make_scheduler
from tpu.jobs import Edit, Sdxl, Unet, open_pipeline, read_configs

ACCELERATE = ("deepcache:interval=2", "guidance:stop=0.5")
ACCELERATED = f"ours, {' '.join(ACCELERATE)}"
AGREEMENT_STEPS = 4


class Plan(NamedTuple):
    """Seconds of a row on an H100, estimated: compilation by XLA and PyTorch, measurement."""

    ours: float
    torch: float
    measure: float


PLANS = {
    "forward": Plan(60, 35, 14),
    "gradient": Plan(90, 65, 16),
    "train": Plan(120, 60, 24),
    "edit": Plan(90, 40, 20),
    "images": Plan(200, 60, 50),
    "agreement": Plan(60, 0, 1),
}
START_SECONDS = 40  # planned for the start of the process, tiny models and PyTorch's modules


class Size(NamedTuple):
    """Sizes of all rows: samples, pairs, pixels, denoising steps."""

    batch_size: int
    pairs: int
    resolution: int
    train_resolution: int
    image_size: int
    num_inference_steps: int


SIZES = {"full": Size(8, 16, 512, 256, 1024, 20), "tiny": Size(2, 2, 64, 64, 64, 10)}


@dataclass(frozen=True)
class Config:
    """Measure and write."""

    size: Literal["full", "tiny"] = "full"
    rows: tuple[Literal[tuple(PLANS)], ...] = tuple(PLANS)
    pytorch: tuple[Literal["eager", "compiled"], ...] = ("eager", "compiled")  # none: ours only
    rounds: int = 2  # each contender is measured once in each
    seconds: float = 1.0  # of a measurement, at least; one pass at least
    limit: float = 480.0  # seconds of the whole run, from its start
    output: str = "benchmarks/results/gpu.json"


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


def process_seconds():
    """Seconds since the start of this process, imports included."""
    started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]  # clock ticks
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(started) / os.sysconf("SC_CLK_TCK")


def say(text):
    """Print a line that begins with the time since the start."""
    print(f"[{process_seconds():4.0f} s] {text}", flush=True)


def describe_error(error):
    """Type and message of an exception of any library, on one line."""
    return f"{type(error).__name__}: {one_line(error, 300)}"


def seconds_left(config):
    """Until --limit."""
    return config.limit - process_seconds()


# Our programs, from config files only


def our_flags(config, sources):
    """{row: {contender: flags}} of our programs.

    Args:
        config: Config.
        sources: directories of the pipelines' configs, {"sd15", "sdxl"}; "": the published ones.
    """
    size = SIZES[config.size]
    sd15 = {"tpu": "", "pretrained_model_name_or_path": sources["sd15"]}
    steps = {"num_inference_steps": size.num_inference_steps}
    unet = Unet(
        **sd15,
        in_channels=8,
        batch_size=size.batch_size,
        resolution=size.resolution,
        gradient=False,
    )
    train = tpu_compile.Train(
        **sd15,
        train_batch_size=size.pairs,
        resolution=size.train_resolution,
        mixed_precision="bf16",
        train_data_dir="",
        ema="full",
    )
    images = Sdxl(
        tpu="",
        pretrained_model_name_or_path=sources["sdxl"],
        image_size=size.image_size,
        **steps,
    )
    return {
        "forward": {"ours": unet},
        "gradient": {"ours": replace(unet, gradient=True)},
        "train": {"ours": train},
        "images": {"ours": images, ACCELERATED: replace(images, accelerate=ACCELERATE)},
        "edit": {"ours": Edit(**sd15, resolution=size.resolution, **steps)},
    }


def compile_ours(flags):
    """Compile a program for the first device: (Job, program, update of the average or None)."""
    job = tpu_compile.SUBCOMMANDS[type(flags)](flags, jax.devices()[:1])
    program = job.step.lower(*job.args).compile()
    update = job.update.lower(*job.update_args).compile() if job.update else None
    return job, program, update


def scheduler_state(flags, configs):
    """The state of the scheduler that a program takes."""
    if isinstance(flags, tpu_compile.Train):
        return FlaxDDPMScheduler.from_config(configs["sd15"]["scheduler"]).create_state()
    return open_pipeline(flags).scheduler.create_state()


def random_arrays(shapes):
    """Arrays on the first device: zeros for counters and moments, ones for scales of norms.

    Kernels are 0.02 times normal: parts of one random array, as many arrays of billions take long.

    Args:
        shapes: ShapeDtypeStructs of (1, ...).
    """
    sharding = jax.NamedSharding(jax.sharding.Mesh(jax.devices()[:1], ("batch",)), jax.P("batch"))
    rng = np.random.default_rng(0)
    sizes = [x.size for x in jax.tree.leaves(shapes) if jnp.issubdtype(x.dtype, jnp.floating)]
    normal = rng.standard_normal(max(sizes), np.float32) * np.float32(0.02)
    normals = {}

    def make(path, shape):
        name, dtype = jax.tree_util.keystr(path, simple=True, separator="/"), shape.dtype
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            return jax.random.split(jax.random.key(0), shape.shape)
        if "opt_state" in name or name.endswith(("step", "bias")):
            return np.zeros(shape.shape, dtype)
        if name.endswith("/scale"):
            return np.ones(shape.shape, dtype)
        if not jnp.issubdtype(dtype, jnp.floating):
            return rng.integers(0, 256, shape.shape).astype(dtype)  # pixels, tokens, timesteps
        if dtype not in normals:
            normals[dtype] = normal.astype(dtype)
        return normals[dtype][: shape.size].reshape(shape.shape)

    def place(path, shape):
        return jax.device_put(make(path, shape), sharding)

    return jax.tree_util.tree_map_with_path(place, shapes)


def our_run(flags, compiled, configs):
    """A function that runs a compiled program on random arrays.

    Args:
        flags: of the program.
        compiled: what compile_ours returned.
        configs: {family: {part: config}}.
    """
    job, program, update = compiled
    args = list(random_arrays(job.args))
    if not isinstance(flags, Unet):
        state = scheduler_state(flags, configs)
        args[1]["scheduler"] = jax.tree.map(lambda x: jnp.asarray(x)[None], state)
    if update is None:
        return lambda: jax.block_until_ready(program(*args))
    held = {"state": args[0], "average": random_arrays(job.update_args[0])}
    decay = jnp.full((1,), flags.ema_decay or 0.9999, jnp.float32)

    def run():
        held["state"], metrics = program(held["state"], *args[1:])
        held["average"] = update(held["average"], held["state"].params, decay)
        jax.block_until_ready((metrics, held))

    return run


# Agreement


def tiny_edit(folder, dtype, platform=None):
    """A tiny pipeline's edit: float32 (1, 64, 64, 3).

    Args:
        folder: of the pipeline.
        dtype: "float32", with the highest precision of matmuls, or "bfloat16".
        platform: "cpu" in a new process; None: the process's default device.
    """
    if platform:
        jax.config.update("jax_platforms", platform)
    pipeline, params = FlaxStableDiffusionInstructPix2PixPipeline.from_pretrained(
        folder, dtype=jnp.dtype(dtype), scheduler=make_scheduler("ddim", {})[0]
    )
    params = jax.device_put(params, jax.devices()[0])
    image = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    ids, pixels = pipeline.prepare_inputs(PROMPT, image)
    with jax.default_matmul_precision("highest"):
        out = pipeline(ids, pixels, params, jax.random.key(0), AGREEMENT_STEPS, **SCALES)
        return np.asarray(out.images, np.float32)


def measure_agreement(folder):
    """{dtype: PSNR of this device's edit to the CPU's in float32, dB; None: equal}."""
    expected = in_new_process(tiny_edit, folder, "float32", "cpu")
    return {x: psnr_db(tiny_edit(folder, x), expected) for x in ("float32", "bfloat16")}


# Run


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


def planned_rows(config):
    """The names of the rows whose planned time fits into --limit; prints the plan.

    Our programs compile at the same time, so the longest counts; PyTorch's one after the other.
    """
    chosen, torch_seconds = [], 0.0
    for name in config.rows:
        plan = PLANS[name]
        rows = [PLANS[x] for x in (*chosen, name)]
        torch_seconds = sum(x.torch for x in rows) if "compiled" in config.pytorch else 0.0
        total = START_SECONDS + max(torch_seconds, *(x.ours for x in rows))
        total += sum(x.measure for x in rows)
        if total > config.limit:
            say(f"{name} is left out: the run would take about {total:.0f} s; see --limit")
            continue
        chosen.append(name)
        say(
            f"{name}: planned {plan.ours:.0f} s of compilation by XLA, {plan.torch:.0f} s by "
            f"PyTorch, {plan.measure:.0f} s of measurement; {total:.0f} s so far"
        )
    return chosen


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
