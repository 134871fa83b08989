"""Programs compiled for an NVIDIA GPU without one, and what a profile says about such estimates.

    python -m benchmarks.gpu_compiled programs

compiles training steps, edits and SDXL images for an H100 and writes memory, kernels and estimated
time of each at a small and a large batch; docs/memory.md has what fits on which card. Nothing is
run. Each program takes 1 to 10 minutes on two cores; rows that are there already are kept. With
--milliseconds the row is of a program that was measured, for docs/compile.md. Needs the compiler,
see requirements-gpu-compiler.txt. In 20 seconds, with a tiny model:

    python -m benchmarks.gpu_compiled programs --cases forward --resolution 64 \\
        --pretrained_model_name_or_path demo/base_model --output /tmp/compiled.json

    python -m benchmarks.gpu_compiled shares --kernels kernels.tsv.gz --program hlo.txt.gz \\
        --work "step, 16 pairs, 256 px" --milliseconds 93.5 --gpu h200

compares a profile with the program that ran: by kind of kernel, the least time at the card's rates
and the measured one. diffusers_flax/compiling/kernels.py has the shares of all rows together. The
profile has lines of microseconds, launches and name, separated by tabs; the program is
compiled.as_text().
"""

import gzip
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax
import tyro
from tqdm import tqdm

import compile_for
from benchmarks.rows import ROOT, describe_machine, read_rows, run_benchmark, write_rows
from diffusers_flax.compiling.cards import find_gpus, traced_for
from diffusers_flax.compiling.costs import gpu_costs
from diffusers_flax.compiling.hlo import parse_program
from diffusers_flax.compiling.kernels import (
    ALL_KINDS,
    add_tables,
    estimated_seconds,
    kernel_table,
    kind_of,
    kind_of_name,
)
from diffusers_flax.compiling.programs import target_devices
from diffusers_flax.compiling.report import chip_memory

RESULTS = "benchmarks/results/gpu_compiled.json"
GPU = "h100"
BF16 = ("--mixed_precision", "bf16")
CACHED = ("--cache_latents", "latents", "--no_random_crop")
CHECKPOINTED = ("--gradient_checkpointing", *CACHED)
LORA = ("--lora_rank", "16")
XL = ("--family", "sdxl")
TILES = ("--vae_tile", "512")
LCM = ("--scheduler", "lcm", "--guidance_scale", "1", "1")
PAIRS = {  # of make_pairs.py
    "pairs, 100 steps": (),
    "pairs, 25 steps": ("--num_inference_steps", "25"),
    "pairs, 8 steps of LCM": (*LCM, "--num_inference_steps", "8"),
    "pairs, 4 steps of LCM": (*LCM, "--num_inference_steps", "4"),
}
# {name: (subcommand and flags, batches)}
CASES = {
    "edit": (("edit",), (1, 8)),
    "image": (("sdxl",), (1, 4)),
    "image, tiles": (("sdxl", *TILES), (1, 4)),
    "image, int8, tiles": (("sdxl", "--storage", "int8", *TILES), (1, 4)),
    "lora 256": (("train", *BF16, *LORA), (1, 16)),
    "lora 512": (("train", *BF16, *LORA, "--resolution", "512"), (1, 8)),
    "lora 512, checkpointed": (
        ("train", *BF16, *LORA, *CHECKPOINTED, "--resolution", "512"),
        (1, 16),
    ),
    "lora xl 512": (("train", *BF16, *XL, *LORA, *CHECKPOINTED, "--resolution", "512"), (1, 8)),
    "lora xl 1024": (("train", *BF16, *XL, *LORA, *CHECKPOINTED, "--resolution", "1024"), (1, 4)),
    "lora xl 512, int8": (
        ("train", *BF16, *XL, *LORA, *CHECKPOINTED, "--storage", "int8", "--resolution", "512"),
        (1, 8),
    ),
    "full 256": (("train", *BF16, "--ema", "full"), (1, 16, 64)),
    "full 256, small": (("train", *BF16, "--ema", "none", *CHECKPOINTED), (1, 16)),
    "forward": (("unet", "--no_gradient", "--in_channels", "8", "--resolution", "512"), (8,)),
    "gradient": (("unet", "--resolution", "512"), (8,)),
    **{name: (("pairs", *words), (4,)) for name, words in PAIRS.items()},
    "full xl 512": (("train", *BF16, *XL, *CHECKPOINTED, "--resolution", "512"), (1, 8)),
}


@dataclass(frozen=True)
class ProgramFlags:
    """Memory and kernels of training steps, edits and images."""

    cases: tuple[Literal[tuple(CASES)], ...] = tuple(CASES)
    batch_sizes: tuple[int, ...] = ()  # default: as the case says
    # measured time of one program, which goes into a row of its own beside the estimate
    milliseconds: float | None = None
    gpu: str = GPU
    again: bool = False  # also compile rows that the output has
    pretrained_model_name_or_path: str = ""  # "": Stable Diffusion 1.5, or XL
    resolution: int | None = None  # pixels; default: as the case says
    output: str = RESULTS


@dataclass(frozen=True)
class SharesFlags:
    """Measured time of each kind of kernel, to the least time at the card's rates."""

    kernels: Path  # profile: microseconds, launches, name, ... of each kernel
    program: Path  # compiled.as_text() of the program that ran
    work: str  # name of the row
    milliseconds: float  # measured time of the whole program
    gpu: str = "h200"  # on which it ran
    output: str = RESULTS


def program_case(name, batch_size, gpu=GPU):
    """The case of a row of programs."""
    return f"{gpu} {name}, {batch_size}"


def flags_of(name, batch_size, config):
    """The flags of compile_for.py of a case."""
    (subcommand, *words), _ = CASES[name]
    words += ["--gpu", config.gpu, f"--{compile_for.BATCH_FLAGS[subcommand]}", str(batch_size)]
    if config.resolution is not None:
        sides = ("width", "height") if subcommand == "pairs" else ("resolution",)
        words += [word for side in sides for word in (f"--{side}", str(config.resolution))]
    if model := config.pretrained_model_name_or_path:
        flag = "model" if subcommand == "pairs" else "pretrained_model_name_or_path"
        words += [f"--{flag}", model]
    return tyro.cli(compile_for.SUBCOMMANDS[subcommand], args=words, use_underscores=True)


def run_programs(config):
    """Compile, write."""
    jax.config.update("jax_platforms", "cpu")
    host = find_gpus(config.gpu)
    devices, machine = target_devices(host), describe_machine(("jax", "jaxlib"))
    cases = [(name, x) for name in config.cases for x in config.batch_sizes or CASES[name][1]]
    done = read_rows(config.output)
    if config.milliseconds is not None and len(cases) > 1:
        raise ValueError(
            f"--milliseconds {config.milliseconds} is the time of one program, but {len(cases)} "
            "are chosen; give one of --cases and one of --batch_sizes"
        )
    for name, size in tqdm(cases, unit="program"):
        case, measured = program_case(name, size, config.gpu), {}
        if config.milliseconds is not None:
            case, measured = f"measured {case}", {"seconds": config.milliseconds / 1e3}
        if case in done and not config.again:
            continue
        flags = flags_of(name, size, config)
        with traced_for(host.chip):
            program = compile_for.make_program(flags, devices)
            if program.scoring is None:
                row = compiled_row(program, host.chip)
            else:  # with CLIP's time
                row = compile_for.compile_program(flags, program, host)
        row |= {"gpu": config.gpu, "case": name, "batch_size": size} | measured
        row |= {"commit": head_commit()}
        write_rows({case: row}, machine, config.output)


def head_commit():
    """The short id of the checkout's commit; "" outside git."""
    command = ("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD")
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def compiled_row(program, card):
    """Memory, kernels and times of a Program that is compiled for a Card."""
    step = gpu_costs(program.step, program.args, card, program.switches)
    update = program.update
    update = update and gpu_costs(update, program.update_args, card)
    memory = chip_memory(program, step, update)
    tables = [(step["kernels"], 1)]
    if update:
        tables.append((update["kernels"], program.updates_per_step))
    kernels = add_tables(tables)
    return {
        "memory": memory,
        "memory_total": sum(memory.values()),
        "compile_seconds": step["compile_seconds"],
        "kernels": kernels,
        "estimated_seconds": estimated_seconds(kernels, bool(program.evaluations)),
    }


def read_text(file):
    """The text of a file, also if it is compressed."""
    content = file.read_bytes()
    return (gzip.decompress(content) if file.suffix == ".gz" else content).decode()


def measured_kinds(profile, program):
    """{kind: (seconds, launches)} of a profile.

    Args:
        profile: text of SharesFlags.kernels.
        program: text of the program; names in a profile have _ for its dots.
    """
    computations, _ = parse_program(program)
    kinds = {
        name.replace(".", "_"): kind_of(name, operation, rest, computations)
        for instructions in computations.values()
        for name, _, operation, rest in instructions
    }
    seconds, launches = Counter(), Counter()
    for line in profile.splitlines():
        microseconds, number, name, *_ = line.split("\t")
        kind = kinds.get(name) or kind_of_name(name)
        seconds[kind] += float(microseconds) / 1e6
        launches[kind] += float(number)
    return {kind: (seconds[kind], launches[kind]) for kind in seconds}


def run_shares(config):
    """Read, compare, write."""
    for file in (config.kernels, config.program):
        if not file.is_file():
            raise ValueError(f"{file} does not exist")
    card, program = find_gpus(config.gpu).chip, read_text(config.program)
    table = kernel_table(program, card)
    measured = measured_kinds(read_text(config.kernels), program)
    kinds = {}
    for kind in ALL_KINDS:
        if kind in table or kind in measured:
            seconds, launches = measured.get(kind, (0.0, 0))
            row = table.get(kind, {"least_seconds": 0.0})
            kinds[kind] = row | {"seconds": seconds, "launches": launches}
    row = {"gpu": config.gpu, "seconds": config.milliseconds / 1e3, "kinds": kinds}
    row |= {"kernel_seconds": sum(seconds for seconds, _ in measured.values())}
    machine = describe_machine(("jax", "jaxlib"))
    write_rows({f"shares {config.work}": row}, machine, config.output)


SUBCOMMANDS = {"programs": ProgramFlags, "shares": SharesFlags}


def run(config):
    """Run the subcommand of the flags."""
    {ProgramFlags: run_programs, SharesFlags: run_shares}[type(config)](config)


if __name__ == "__main__":
    run_benchmark(SUBCOMMANDS, run, __doc__)
