"""One NVIDIA GPU: ours and PyTorch's in turn, in nine minutes with compilation.

    python -m benchmarks.gpu --compile_only    # fills --cache_dir; may be left out
    python -m benchmarks.gpu

measures in bfloat16, with random weights: optimizer steps of Stable Diffusion 1.5 at 256 pixels (16
pairs), with the average of the weights, from images and from cached latents; an SDXL image at 1024
pixels, 20 steps, plain, with --vae_dtype bfloat16, and with --accelerate deepcache:interval=2
guidance:stop=0.5; eight such images at once, plain and with --vae_dtype bfloat16, beside the
published images per second of TensorRT (MLPerf Inference v4.1); an edit at 512 pixels, 20 steps;
the UNet at 512 pixels (8 samples), forward and with the gradient of float32 parameters; and how far
the edits of a tiny pipeline differ between GPU and CPU.

The plan, printed first, has the rows that fit into --minutes by what they took before. Rows without
figures of this GPU come first, so that repeating the command measures what is missing; --rows
chooses and orders them, and keeps the other rows of the file. Then everything is compiled: our
programs in threads, beside PyTorch's in the main thread. Then the rows are measured one after the
other, contenders in turn, and each row is written as soon as it is known.

Compiled programs are kept in --cache_dir, and the next call loads them if code, packages and GPU
are the same. --profile FOLDER also writes the kernels of a pass of each contender,
FOLDER/kernels_ROW_CONTENDER.tsv.gz: microseconds, launches, kernel, operation or command buffer,
module.

PyTorch has bfloat16 (autocast in training), fused AdamW, an average updated in few launches, its
own attention kernels, cuDNN's fastest algorithms (cudnn.benchmark), and the text encoded once per
image. "eager" has contiguous kernels and images, "channels_last" is eager too, "compiled" is
torch.compile in its default mode of the UNet, and of the VAE's encoder in training or decoder in
images, with channels_last. Inputs and images stay on the GPU. SDXL's VAE decodes in float32 in
ours without --vae_dtype, as its config asks (force_upcast), and in bfloat16 in PyTorch's.

"First" includes compilation while other contenders compile, also if this call loaded the program.
The share of the peak counts the FLOPs of the plain UNet, also for the accelerated image. Bytes of
memory are of a pass: for ours as compiled, for PyTorch its allocator's peak. All rows need a GPU of
80 GB; a row that does not fit is left out, with a message.

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

from benchmarks.gpu.cache import ProgramCache, file_name
from benchmarks.gpu.flags import PUBLISHED_IMAGES, ROWS, Config
from benchmarks.gpu.kernels import write_kernels
from benchmarks.gpu.ours import compile_ours, measure_agreement, our_flags, our_run
from benchmarks.gpu.plan import (
    AGREEMENT,
    Planned,
    choose_rows,
    earlier_row,
    in_order,
    plan_row,
    print_plan,
)
from benchmarks.gpu.pytorch import (
    edit_contenders,
    sdxl_contenders,
    train_contenders,
    unet_contenders,
)
from benchmarks.harness import in_new_process, time_in_this_process, write_contenders
from benchmarks.random_models import make_pipeline, make_xl_pipeline
from benchmarks.rows import (
    check_counts,
    describe_machine,
    read_rows,
    run_benchmark,
    write_rows,
)
from benchmarks.unet import Case, can_compile, count_flops, make_inputs
from diffusers_flax.compilation_cache import no_compilation_cache
from diffusers_flax.compiling.programs import read_configs
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

    def wait(self, seconds):
        """Wait for the result, at most these seconds; returns why there is none, or ""."""
        self.thread.join(max(0.0, seconds))
        if self.thread.is_alive():
            self.error = "its compilation takes too long for --minutes"
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
    if backend == "cpu" and config.size != "tiny":
        raise ValueError("no GPU is visible; --size tiny tries the benchmark on a CPU")
    if backend == "cpu" and config.profile:
        raise ValueError("--profile reads the kernels of a GPU, and no GPU is visible")
    if backend == "gpu" and jax.device_count() > 1:
        raise ValueError(f"{jax.device_count()} GPUs; set CUDA_VISIBLE_DEVICES=0")
    return "cpu" if backend == "cpu" else "cuda"


def make_rows(config, sources, device):
    """(rows, configs): {name: Row} without the agreement, {family: {component: config}}."""
    sizes, size = config.sizes, config.size
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
    for name, title in (("train", ""), ("train_latents", ", latents cached")):
        rows[name] = Row(
            f"{size}_{sizes.train_resolution} optimizer step{title} {sizes.pairs}",
            sizes.pairs,
            ours[name],
            partial(train_contenders, config.pytorch, sd15, sizes, device, bool(title)),
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
    for name, num_images in (("images", 1), ("image_batch", sizes.num_images)):
        rows[name] = Row(
            f"{size}_xl_{sizes.image_size} images, {steps} steps {num_images}",
            num_images,
            ours[name],
            partial(sdxl_contenders, config.pytorch, sdxl, sizes, device, num_images),
            partial(flops, sdxl["unet"], sizes.image_size, 2 * num_images, passes=steps),
        )
    return rows, configs


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


def peak_bytes(prepare, run):
    """(seconds of a first pass, bytes that PyTorch's allocator held at once; None on a CPU)."""
    if not torch.cuda.is_available():
        return first_pass(prepare, run), None
    torch.cuda.reset_peak_memory_stats()
    return first_pass(prepare, run), torch.cuda.max_memory_allocated()


class Warm(NamedTuple):
    """A contender of PyTorch that did its first pass."""

    prepare: Callable
    run: Callable
    seconds: float  # of the first pass; with a program from the cache, of the call that compiled it
    bytes: int | None  # of memory in the first pass; None: unknown


def warm_torch(rows, cache, is_late):
    """Make PyTorch's contenders and run each once, which compiles.

    Args:
        rows: {name: Row}.
        cache: ProgramCache.
        is_late: () -> whether no time is left to compile.

    Returns:
        ({row: {contender: Warm}}, names of rows that failed).
    """
    failed, warm = [], {name: {} for name in rows}
    for name, row in rows.items():
        try:
            held = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
            for contender, (prepare, run) in row.theirs().items():
                if is_late():
                    raise ValueError(f"no time is left in --minutes for {contender}")
                contender = f"torch {contender}"
                seconds, peak = peak_bytes(prepare, run)
                if contender == "torch compiled":
                    program = cache.name(row.case, contender)
                    if note := cache.note(program):
                        seconds = note["seconds"]
                    cache.save(program, {"seconds": seconds})
                warm[name][contender] = Warm(prepare, run, seconds, peak and peak - held)
        except Exception as error:  # such as too little memory; the other rows go on
            print(f"{name}: PyTorch is left out: {describe_error(error)}", flush=True)
            failed.append(name)
        free_memory()
    return warm, failed


def measure_row(config, name, row, programs, theirs, configs):
    """A row's figures.

    Args:
        config: Config.
        name: of the row.
        row: Row.
        programs: {contender: Compiled}.
        theirs: {contender: Warm}.
        configs: of make_rows.
    """
    contenders, first, memory = {}, {}, {}
    for contender, compiled in programs.items():
        run = our_run(row.ours[contender], compiled, configs)
        first[contender] = compiled.note["seconds"] + first_pass(lambda: None, run)
        memory[contender] = compiled.note["bytes"]
        contenders[contender] = (lambda: None), run
    for contender, warm in theirs.items():
        contenders[contender], first[contender] = (warm.prepare, warm.run), warm.seconds
        memory[contender] = warm.bytes
    figures = time_in_this_process(contenders, config.rounds, config.seconds)
    figures["first_seconds"] = {name: [seconds] for name, seconds in first.items()}
    figures["compile_seconds"] = {name: x.note["seconds"] for name, x in programs.items()}
    figures["peak_bytes"] = {name: x for name, x in memory.items() if x is not None}
    if config.profile:
        for contender, (prepare, run) in contenders.items():
            prepare()
            run()
            file = Path(config.profile) / f"kernels_{file_name(f'{name} {contender}')}.tsv.gz"
            milliseconds, launches = write_kernels(run, file)
            print(f"{file}: {milliseconds:.1f} ms in {launches} launches", flush=True)
    known = {"dtype": "bfloat16", "batch_size": row.batch_size, "flops": row.count_flops()}
    if name == "image_batch" and (published := PUBLISHED_IMAGES.get(jax.devices()[0].device_kind)):
        known["published_samples_per_second"] = published
    return known | figures


def make_plan(config, rows, cache):
    """The Planned rows that fit into the time, in their order."""
    kind, results = jax.devices()[0].device_kind, read_rows(config.results)
    contenders = {
        name: [*row.ours, *(f"torch {x}" for x in config.pytorch)] for name, row in rows.items()
    }
    cases = {name: (f"{kind} {row.case}", contenders[name]) for name, row in rows.items()}
    cases = {name: cases.get(name, (f"{kind} agreement", [])) for name in ROWS}
    candidates = []
    for name in config.rows or in_order(cases, results):
        if name == "agreement":
            if not config.compile_only:
                candidates.append(Planned(name, {"ours": AGREEMENT}, 0))
            continue
        row, cached = rows[name], []
        for contender in contenders[name]:
            flags = text_of_flags(row.ours[contender]) if contender in row.ours else ""
            if cache.has(cache.name(row.case, contender, flags), contender in row.ours):
                cached.append(contender)
        if config.compile_only and len(cached) == len(contenders[name]):
            print(f"{name}: all programs are in --cache_dir")
            continue
        earlier = earlier_row(row.case, kind, results)
        candidates.append(plan_row(name, contenders[name], earlier, cached, config))
    chosen, left_out = choose_rows(candidates, config.minutes)
    print_plan(chosen, left_out, config.minutes, kind)
    if left_out and not chosen:
        raise ValueError(f"no row fits into --minutes {config.minutes:g}; give it more")
    return chosen


def text_of_flags(flags):
    """The flags of a program without the place of its model's configs."""
    return repr(replace(flags, pretrained_model_name_or_path=""))


class Ready(NamedTuple):
    """What is compiled."""

    ours: dict[str, dict[str, Any]]  # {row: {contender: Compiled}}
    theirs: dict[str, dict[str, Warm]]
    agreement: Background | None
    failed: list[str]  # names of rows in which something failed
    unfinished: bool  # whether a program still compiles


def compile_all(config, rows, plan, folder, cache, deadline):
    """Compile ours in threads, and PyTorch's beside them.

    Args:
        config: Config.
        rows: {name: Row} of the plan.
        plan: Planned rows.
        folder: of the tiny pipeline for the agreement.
        cache: ProgramCache.
        deadline: of time.monotonic().

    Returns:
        Ready.
    """

    def left():
        return deadline - time.monotonic()

    def start(case, contender, flags):
        name = cache.name(case, contender, text_of_flags(flags))
        return Background(compile_ours, flags, cache, name)

    programs = {
        name: {contender: start(row.case, contender, x) for contender, x in row.ours.items()}
        for name, row in rows.items()
    }
    in_plan = any(row.name == "agreement" for row in plan)
    agreement = Background(measure_agreement, folder) if in_plan else None
    theirs, failed = warm_torch(rows if config.pytorch else {}, cache, lambda: left() < 0)
    for name, contenders in programs.items():
        for contender, program in contenders.items():
            if reason := program.wait(left()):
                print(f"{name}: {contender} is left out: {reason}", flush=True)
                failed.append(name)
    if agreement and (reason := agreement.wait(left())):
        print(f"agreement is left out: {reason}", flush=True)
        failed.append("agreement")
    ours = {
        name: {contender: x.value for contender, x in contenders.items() if not x.error}
        for name, contenders in programs.items()
    }
    threads = [x for contenders in programs.values() for x in contenders.values()]
    threads += [agreement] if agreement else []
    return Ready(ours, theirs, agreement, failed, any(x.thread.is_alive() for x in threads))


def measure_all(config, rows, ready, machine, configs):
    """Measure what is compiled, and write row by row.

    Args:
        config: Config.
        rows: {name: Row} of the plan.
        ready: Ready; the contenders of rows that are measured are removed.
        machine: see write_rows.
        configs: of make_rows.
    """
    for name, row in rows.items():
        ours, theirs = ready.ours.pop(name), ready.theirs.pop(name, {})
        if "ours" not in ours:
            continue
        try:
            found = measure_row(config, name, row, ours, theirs, configs)
            found["other_programs_compile"] = ready.unfinished
            write_contenders(row.case, found, machine, config.results)
        except Exception as error:  # such as too little memory; the other rows go on
            print(f"{name} is left out: {describe_error(error)}", flush=True)
            ready.failed.append(name)
        del ours, theirs
        free_memory()
    if ready.agreement and not ready.agreement.error:
        kind = jax.devices()[0].device_kind
        row = {f"{kind} agreement": {"psnr": ready.agreement.value}}
        write_rows(row, machine, config.results)


def run(config):
    """Plan, compile, measure, write."""
    check_counts(config, rounds=1, minutes=1)
    if config.rows == ():
        raise ValueError(f"--rows is empty; name some of {', '.join(ROWS)}")
    if config.compile_only and not config.cache_dir:
        raise ValueError("--compile_only keeps programs in --cache_dir, which is empty")
    if "compiled" in config.pytorch and not can_compile():
        raise ValueError("torch.compile needs a C++ compiler; install g++, or --pytorch eager")
    started, device, machine = time.monotonic(), find_device(config), describe_machine()
    torch.backends.cudnn.benchmark = True
    if config.compile_only:
        config = replace(config, pytorch=tuple(x for x in config.pytorch if x == "compiled"))
    with tempfile.TemporaryDirectory() as temporary:
        folder, sources = Path(temporary), {"sd15": "", "sdxl": ""}
        if config.size == "tiny" or "agreement" in (config.rows or ROWS):
            in_new_process(make_pipeline, folder / "sd15", True, 8)
        if config.size == "tiny":
            in_new_process(make_xl_pipeline, folder / "sdxl", True)
            sources = {name: str(folder / name) for name in sources}
        rows, configs = make_rows(config, sources, device)
        cache = ProgramCache(config.cache_dir, configs)
        plan = make_plan(config, rows, cache)
        rows = {row.name: rows[row.name] for row in plan if row.name in rows}
        deadline = started + 60 * config.minutes - sum(row.measuring for row in plan)
        with no_compilation_cache():  # what it loads cannot be saved by another cache
            ready = compile_all(config, rows, plan, folder / "sd15", cache, deadline)
        if not config.compile_only:
            measure_all(config, rows, ready, machine, configs)
    if ready.failed:
        failed = ", ".join(dict.fromkeys(ready.failed))
        print(f"error: not all of {failed} is measured; the lines above say why", file=sys.stderr)
    if ready.unfinished:  # Python would wait for the compiler
        sys.stdout.flush()
        os._exit(1)
    if ready.failed:
        sys.exit(1)


def main(args=None):
    """Command line."""
    run_benchmark(Config, run, __doc__, args)


if __name__ == "__main__":
    main()
