"""Programs compiled for TPUs, without a TPU: memory, traffic, cycles. Nothing is run.

    python -m benchmarks.tpu programs

compiles with tpu_compile.py the training step of Stable Diffusion 1.5 (256 pixels, 8 pairs per
chip, bfloat16), its UNet, SDXL's UNet in one sampling step and whole SDXL images (1024 pixels).
Rows that benchmarks/results/tpu.json has already are not compiled again; --again compiles them.
With the demo's model, in a minute:

    python -m benchmarks.tpu programs --tpus v5e-1 --jobs unet --resolution 64 \\
        --pretrained_model_name_or_path demo/base_model --output /tmp/tpu.json

    python -m benchmarks.tpu accelerations

counts the UNet's evaluations and the FLOPs of images and edits with each technique of --accelerate
and without; nothing is compiled.

    python -m benchmarks.tpu shared

counts the FLOPs of a chip and what it sends to other chips where several chips make one image
(--parallel), in the traced programs; nothing is compiled. `programs --tpus v5e-4 --jobs "sdxl,
branches=2 rows=2"` compiles one of them.

    python -m benchmarks.tpu options

compiles blocks of SDXL's UNet, its VAE's decoder, blocks of Stable Diffusion 1.5's UNet with their
gradients, SDXL's whole UNet and the training step with the compiler options of Google's SDXL
recipes; rows that the output has are not compiled again. Half a minute per block, ten minutes per
UNet and twenty per training step.

"Accessed" is the compiler's count of bytes, which includes values that stay on the chip, plus what
kernels access, which the compiler does not count. "HBM" is the traffic of the chip's memory
(compiling/hlo.py). Needs a CPU, 18 GB of memory and `pip install "jax[tpu]"`;
5 to 75 minutes per program on two cores.
"""

import math
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import tyro
from jax.extend.core import jaxprs_in_params
from tqdm import tqdm

from benchmarks.harness import ACCELERATIONS
from benchmarks.rows import (
    GIB,
    ROOT,
    describe_compiler,
    describe_machine,
    read_rows,
    report,
    rows_of,
    run_benchmark,
    write_rows,
)
from compiling.jobs import Edit, Sdxl, image_job
from compiling.programs import (
    CHIPS,
    find_slice,
    program_costs,
    replicated_shapes,
    roofline_seconds,
    slice_devices,
)
from diffusers_flax.devices.layout import AXES, parse_layout
from diffusers_flax.flops import matmul_flops
from diffusers_flax.loading.files import read_json
from diffusers_flax.models.blocks import ResnetBlock2D, Transformer2D
from diffusers_flax.models.vae import Decoder
from tpu_compile import count_step_flops

PAIRS_PER_CHIP = 8
TRAIN = ("train", "--mixed_precision", "bf16", "--ema", "full")
# Arguments of tpu_compile.py.
TRAIN_SDXL = (
    *TRAIN[:3],
    *("--family", "sdxl", "--resolution", "512", "--gradient_checkpointing"),
)
LATENTS = ("--cache_latents", "latents", "--no_random_crop")
JOBS = {
    "train": TRAIN,
    "train latents": (*TRAIN, *LATENTS),
    "train lora latents": (*TRAIN[:3], *LATENTS, "--lora_rank", "16"),
    "train sdxl": TRAIN_SDXL,
    "train sdxl latents": (*TRAIN_SDXL, *LATENTS),
    "train sdxl by block": (*TRAIN_SDXL, *LATENTS, "--gather_by_block"),
    "train sdxl lora": (*TRAIN_SDXL, *LATENTS, "--lora_rank", "16"),
    "train sdxl lora int8": (*TRAIN_SDXL, *LATENTS, "--lora_rank", "16", "--storage", "int8"),
    "unet": ("unet", "--batch_size", str(PAIRS_PER_CHIP)),
    "unet sdxl": (
        *("unet", "--family", "sdxl", "--no_gradient", "--batch_size", "2"),
        *("--resolution", "1024"),
    ),
    "sdxl 1": ("sdxl", "--num_images", "1"),
    "sdxl 2": ("sdxl", "--num_images", "2"),
    "sdxl 4": ("sdxl", "--num_images", "4"),
}
FOUR_STEPS = ("--num_inference_steps", "4", "--scheduler", "lcm", "--guidance_scale", "1")


def accelerated_jobs():
    """{"edit, NAME" or "sdxl, NAME": arguments of tpu_compile.py}."""
    edit, one_scale, jobs = ("edit", "--scheduler", "ddim"), ("--image_guidance_scale", "1"), {}
    for name, (edit_spec, sdxl_spec) in ACCELERATIONS.items():
        if edit_spec is not None:
            jobs[f"edit, {name}"] = (*edit, "--accelerate", *edit_spec.split())
        jobs[f"sdxl, {name}"] = ("sdxl", "--accelerate", *sdxl_spec.split())
    for name, specs in (("4 steps", ()), ("4 steps, int8, taesd", ("int8", "taesd"))):
        jobs[f"edit, {name}"] = ("edit", *FOUR_STEPS, *one_scale, "--accelerate", *specs)
        jobs[f"sdxl, {name}"] = ("sdxl", *FOUR_STEPS, "--accelerate", *specs)
    return jobs


ACCELERATED = accelerated_jobs()
SHARED = {  # one image on several chips
    "sdxl, branches=2 rows=2": ("sdxl", "--parallel", "branches=2", "rows=2"),
    "sdxl, rows=4": ("sdxl", "--parallel", "rows=4"),
    "edit, branches=3": ("edit", "--parallel", "data=1", "branches=3"),
    "edit, rows=4": ("edit", "--parallel", "rows=4"),
}
TILES = ("--vae_tile", "512")
LITTLE_MEMORY = {  # one image of SDXL on one chip: flags in words, without "sdxl, "
    "plain": (),
    "tiles": TILES,
    "offload component": ("--offload", "component"),
    "offload component, tiles": ("--offload", "component", *TILES),
    "offload group, tiles": ("--offload", "group", *TILES),
    "offload layer, tiles": ("--offload", "layer", *TILES),
    "storage int8, tiles": ("--storage", "int8", *TILES),
    "storage float8, tiles": ("--storage", "float8", *TILES),
    "offload component, storage int8, tiles": (
        *("--offload", "component", "--storage", "int8"),
        *TILES,
    ),
    "offload group, storage int8, tiles": ("--offload", "group", "--storage", "int8", *TILES),
}
JOBS |= {f"sdxl, {name}": ("sdxl", *flags) for name, flags in LITTLE_MEMORY.items()}
JOBS |= ACCELERATED | SHARED
JobName = Literal[tuple(JOBS)]


@dataclass(frozen=True)
class Programs:
    """Training steps, UNets, SDXL images and edits."""

    tpus: tuple[str, ...] = ("v5e-4", "v4-8", "v6e-4")
    jobs: tuple[JobName, ...] = ("train", "unet", "unet sdxl", "sdxl 1", "sdxl 2", "sdxl 4")
    pairs_per_chip: int = PAIRS_PER_CHIP  # of the training steps
    again: bool = False  # also compile rows that the output has
    resolution: int | None = None  # pixels, of training and UNets; default: as described
    pretrained_model_name_or_path: str = ""  # "": Stable Diffusion 1.5, or XL
    optimization_level: Literal["O0", "O1"] | None = None  # see tpu_compile.py; default: XLA's
    output: str = "benchmarks/results/tpu.json"


@dataclass(frozen=True)
class Accelerations:
    """FLOPs of accelerated images and edits, 20 steps and 4."""

    num_images: int = 1  # images at once
    pretrained_model_name_or_path: str = ""  # for edits, in place of Stable Diffusion 1.5
    edits_only: bool = False  # leave out SDXL's images
    output: str = "benchmarks/results/tpu.json"


@dataclass(frozen=True)
class Shared:
    """FLOPs and exchanges of images that four v5e chips share."""

    image_size: int | None = None  # pixels, of all images; default: 1024 and 512
    jobs: tuple[Literal[tuple(SHARED)], ...] = tuple(SHARED)
    output: str = "benchmarks/results/tpu.json"


def case_name(tpu, job, config):
    """The case of a row: the slice, the job and what differs from the defaults."""
    changes = []
    if job.startswith("train") and config.pairs_per_chip != PAIRS_PER_CHIP:
        changes.append(f"{config.pairs_per_chip} pairs")
    if config.resolution is not None:
        changes.append(f"{config.resolution} px")
    if config.pretrained_model_name_or_path:
        changes.append(config.pretrained_model_name_or_path)
    if config.optimization_level:
        changes.append(config.optimization_level)
    return " ".join(["program", tpu, job, *changes])


def arguments_of(tpu, job, config):
    """The arguments of tpu_compile.py."""
    program, *flags = JOBS[job]
    arguments = [program, "--tpu", tpu, *flags]
    if program == "train":
        batch_size = config.pairs_per_chip * find_slice(tpu).num_chips
        arguments += ["--train_batch_size", str(batch_size)]
    if config.resolution is not None and program != "sdxl":
        arguments += ["--resolution", str(config.resolution)]
    if config.optimization_level:
        arguments += ["--optimization_level", config.optimization_level]
    if model := config.pretrained_model_name_or_path:
        arguments += ["--pretrained_model_name_or_path", str(Path(model).absolute())]
    return arguments


def compile_program(tpu, job, config, more=()):
    """The report of tpu_compile.py; more: further arguments."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "report.json")
        arguments = [*arguments_of(tpu, job, config), *more, "--output", str(output)]
        done = subprocess.run(
            [sys.executable, "tpu_compile.py", *arguments], cwd=ROOT, capture_output=True, text=True
        )
        if done.returncode:
            said = done.stderr.strip() or f"tpu_compile.py ended with code {done.returncode}"
            raise ValueError(said.splitlines()[-1].removeprefix("error: "))
        return read_json(output)


def format_programs(results):
    """Markdown of the rows of programs."""
    lines = [
        "| program | memory, GiB | temporaries, GiB | accessed, GB | HBM, GB | sent, GB | TFLOP "
        "| at least, ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case, row in rows_of(results, "program").items():
        if "memory" not in row:
            lines.append(f"| {case} | does not fit | | | | | | |")
            continue
        # A loop's body counts once in the compiler's count.
        accessed = (
            "" if row["program"] in ("sdxl", "edit") else f"{row['bytes_accessed'] / 1e9:.3g}"
        )
        sent = f"{row['interconnect_bytes'] / 1e9:.3g}" if "interconnect_bytes" in row else ""
        lines.append(
            f"| {case} | {row['memory_total'] / GIB:.1f} of {row['memory_usable'] / GIB:.2f} "
            f"| {row['memory']['temporaries'] / GIB:.3g} | {accessed} "
            f"| {row['hbm_bytes'] / 1e9:.3g} | {sent} | {row['flops'] / 1e12:.3g} "
            f"| {row['step_seconds'] * 1e3:.3g} |"
        )
    return "\n".join(lines)


def run_programs(config):
    """Compile the rows that are missing, print all."""
    if not (config.tpus and config.jobs):
        raise ValueError("--tpus and --jobs need at least one value each")
    for tpu in config.tpus:
        find_slice(tpu)
    machine = describe_compiler()
    results = read_rows(config.output)
    for job in config.jobs:
        for tpu in config.tpus:
            case = case_name(tpu, job, config)
            if config.again or case not in results:
                print(f"{case} ...", flush=True)
                rows = {case: compile_program(tpu, job, config)}
                results = write_rows(rows, machine, config.output)
    report(format_programs(results), config.output)


# MaxDiffusion's for SDXL: two options of fusions on every chip, and a limit of scoped VMEM in KiB.
FUSIONS = {"xla_tpu_rwb_fusion": False, "xla_tpu_dot_dot_fusion_duplicated": True}
VMEM = {"v5e": 64 * 1024, "v6e": 128 * 1024}
OPTIONS = ("default", "fusions", "VMEM", "fusions + VMEM")
BLOCKS = {  # module, shapes of its inputs (of its dtype), whether with gradients
    "SDXL, transformers at 64x64": (
        Transformer2D(10, 2, use_linear_projection=True, dtype=jnp.bfloat16),
        ((2, 64, 64, 640), (2, 77, 2048)),
        False,
    ),
    "SDXL, transformers at 32x32": (
        Transformer2D(20, 2, use_linear_projection=True, dtype=jnp.bfloat16),
        ((2, 32, 32, 1280), (2, 77, 2048)),
        False,
    ),
    "SDXL, residual block at 128x128": (
        ResnetBlock2D(320, dtype=jnp.bfloat16),
        ((2, 128, 128, 320), (2, 1280)),
        False,
    ),
    "SDXL, residual block at 32x32": (
        ResnetBlock2D(1280, dtype=jnp.bfloat16),
        ((2, 32, 32, 1280), (2, 1280)),
        False,
    ),
    "SDXL, VAE decoder": (
        Decoder(3, (128, 256, 512, 512), 2, 32, True, jnp.float32),
        ((1, 128, 128, 4),),
        False,
    ),
    "training, transformer at 32x32": (
        Transformer2D(8, dtype=jnp.bfloat16),
        ((8, 32, 32, 320), (8, 77, 768)),
        True,
    ),
    "training, residual block at 32x32": (
        ResnetBlock2D(320, dtype=jnp.bfloat16),
        ((8, 32, 32, 320), (8, 1280)),
        True,
    ),
}


@dataclass(frozen=True)
class Options:
    """Compiler options on blocks of the models and on whole programs."""

    tpus: tuple[str, ...] = ("v5e-4", "v6e-4")  # slices of v5e or v6e; rows are named by the chip
    blocks: tuple[Literal[tuple(BLOCKS)], ...] = tuple(BLOCKS)
    jobs: tuple[JobName, ...] = ("unet sdxl", "train")  # whole programs
    options: tuple[Literal[OPTIONS], ...] = OPTIONS
    again: bool = False  # also compile rows that the output has
    output: str = "benchmarks/results/tpu.json"


def compiler_options(chip, name):
    """The options of OPTIONS that a name stands for on a chip."""
    fusions = FUSIONS if "fusions" in name else {}
    vmem = {"xla_tpu_scoped_vmem_limit_kib": VMEM[chip]} if "VMEM" in name else {}
    return fusions | vmem


def block_program(module, shapes, with_gradient):
    """(function, its arguments) of a block; the gradients of float32 parameters."""
    inputs = [jax.ShapeDtypeStruct(shape, module.dtype) for shape in shapes]
    params = jax.eval_shape(module.init, jax.random.key(0), *inputs)

    def loss(params, inputs):
        return jnp.square(module.apply(params, *inputs).astype(jnp.float32)).mean()

    if with_gradient:
        return jax.grad(loss, (0, 1)), (params, inputs)
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, module.dtype), params)
    return (lambda params, inputs: module.apply(params, *inputs)), (params, inputs)


def format_options(results):
    """Markdown table of the cycles and the memory of each row of options."""
    rows = rows_of(results, "options")
    lines = ["| | thousand cycles | HBM, MB | temporaries, MB |", "|---|---|---|---|"]
    for name, row in rows.items():
        lines.append(
            f"| {name} | {row['cycles'] / 1e3:.0f} | {row['hbm_bytes'] / 1e6:.0f} | "
            f"{row['temporaries'] / 1e6:.0f} |"
        )
    return "\n".join(lines)


def compile_block(tpu, block, options):
    """A block's costs, of program_costs."""
    function, args = block_program(*BLOCKS[block])
    program = jax.pmap(function, devices=slice_devices(find_slice(tpu))[:1])
    return program_costs(program, replicated_shapes(args, 1), compiler_options=options)


def compile_with_options(tpu, job, options):
    """A whole program's costs, of tpu_compile.py's report."""
    words = [f"{name}={str(value).lower()}" for name, value in options.items()]
    costs = compile_program(tpu, job, Programs(), ("--compiler_options", *words))
    return costs | costs.get("memory", {})


def run_options(config):
    """Compile the rows that are missing, print all."""
    chips = {tpu: find_slice(tpu).chip.topology for tpu in config.tpus}
    if len(set(chips.values())) < len(chips):
        raise ValueError("--tpus has two slices of one chip; name one")
    if unknown := set(chips.values()) - set(VMEM):
        known = " and ".join(VMEM)
        raise ValueError(f"--tpus: the recipes name no options for {unknown.pop()}, only {known}")
    jax.config.update("jax_platforms", "cpu")
    machine = describe_compiler()
    results = read_rows(config.output)
    cases = [
        (f"options {chips[tpu]}, {program}, {name}", tpu, program, name)
        for program in (*config.blocks, *config.jobs)
        for tpu in config.tpus
        for name in config.options
    ]
    cases = [
        (case, tpu, *words)
        for case, tpu, *words in cases
        if config.again or results.get(case, {}).get("tpu") != tpu
    ]
    for case, tpu, program, name in tqdm(cases, unit="program"):
        options = compiler_options(chips[tpu], name)
        compile_case = compile_block if program in BLOCKS else compile_with_options
        costs = compile_case(tpu, program, options)
        if "cycles" not in costs:
            raise ValueError(f"{program} does not fit {tpu}; take another slice")
        figures = {key: costs[key] for key in ("cycles", "hbm_bytes", "temporaries")}
        row = {"tpu": tpu, "options": options, **figures}
        results = write_rows({case: row}, machine, config.output)
    report(format_options(results), config.output)


def accelerated_flags(config):
    """{job of ACCELERATED: flags of tpu_compile.py}."""
    flags = {}
    for job, (program, *words) in ACCELERATED.items():
        if "taesd" in words and config.pretrained_model_name_or_path:
            continue  # the published TAESD may not fit
        words += ["--tpu", "v5e-1", "--num_images", str(config.num_images)]
        if program == "edit" and (model := config.pretrained_model_name_or_path):
            words += ["--pretrained_model_name_or_path", model, "--resolution", "64"]
        if program == "edit" or not config.edits_only:
            kind = {"edit": Edit, "sdxl": Sdxl}[program]
            flags[job] = tyro.cli(kind, args=words, use_underscores=True)
    return flags


def format_accelerations(results):
    """Markdown of the rows of accelerations."""
    lines = ["| | UNet evaluations | TFLOP | int8 | v5e, s | v6e, s |", "|---|---|---|---|---|---|"]
    for name, row in rows_of(results, "acceleration").items():
        seconds = " | ".join(f"{value:.3g}" for value in row["seconds"].values())
        lines.append(
            f"| {name} | {row['unet_evaluations']} | {row['flops'] / 1e12:.3g} | "
            f"{row['int8_flops'] / row['flops']:.0%} | {seconds} |"
        )
    return "\n".join(lines)


def run_accelerations(config):
    """Count, write, print."""
    jax.config.update("jax_platforms", "cpu")
    machine = describe_machine(("jax", "jaxlib"))
    rows = {}
    for job, flags in tqdm(accelerated_flags(config).items(), unit="program"):
        flops, int8_flops = count_step_flops(flags, config.num_images)
        rows[f"acceleration {job}"] = {
            "accelerate": " ".join(flags.accelerate),
            "num_inference_steps": flags.num_inference_steps,
            "unet_evaluations": image_job(flags, jax.devices()[:1]).evaluations,
            "flops": flops / config.num_images,
            "int8_flops": int8_flops / config.num_images,
            "seconds": {  # of the FLOPs alone, at the chip's peak
                chip: roofline_seconds(CHIPS[chip], flops, 0, int8_flops=int8_flops)
                / config.num_images
                for chip in ("v5e", "v6e")
            },
        }
    results = write_rows(rows, machine, config.output)
    report(format_accelerations(results), config.output)


EXCHANGES = {"all_gather", "ppermute", "psum", "pmax"}


def exchanges_of(jaxpr, sizes):
    """What a device exchanges with other devices in a traced program.

    Args:
        jaxpr: its Jaxpr, without exchanges in conditions. A loop counts once for each of its trips.
        sizes: {axis of the mesh: number of devices}.

    Returns:
        (number of exchanges, bytes that the device sends: to one other device in a ppermute, to
        all in an all_gather, and in a ring for a sum or maximum).
    """
    count = sent = 0
    for equation in jaxpr.eqns:
        params, name = equation.params, equation.primitive.name
        trips = params["length"] if name == "scan" else 1
        for inner in jaxprs_in_params(params):
            more, bytes_of_trip = exchanges_of(inner, sizes)
            count, sent = count + trips * more, sent + trips * bytes_of_trip
        if name in EXCHANGES:
            axes = params.get("axis_name", params.get("axes"))
            axes = (axes,) if isinstance(axes, str) else axes
            n = math.prod(sizes[axis] for axis in axes)
            num_bytes = sum(x.aval.size * x.aval.dtype.itemsize for x in equation.invars)
            factor = {"all_gather": n - 1, "ppermute": 1}.get(name, 2 * (n - 1) / n)
            count, sent = count + 1, sent + num_bytes * factor
    return count, round(sent)


def format_shared(results):
    """Markdown of the rows of images that chips share."""
    lines = [
        "| | chips | TFLOP of a chip | FLOPs, s | exchanges | sent, GB |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in rows_of(results, "shared").items():
        lines.append(
            f"| {name} | {row['chips']} | {row['flops'] / 1e12:.3g} | {row['seconds']:.3g} | "
            f"{row['exchanges']} | {row['sent'] / 1e9:.3g} |"
        )
    return "\n".join(lines)


def run_shared(config):
    """Trace, write, print."""
    jax.config.update("jax_platforms", "cpu")
    machine, devices = describe_machine(("jax", "jaxlib")), slice_devices(find_slice("v5e-4"))
    rows = {}
    for job in tqdm(config.jobs, unit="program"):
        program, *words = SHARED[job]
        if config.image_size:
            flag = {"sdxl": "--image_size", "edit": "--resolution"}[program]
            words = [*words, flag, str(config.image_size)]
        kind, words = {"edit": Edit, "sdxl": Sdxl}[program], ["--tpu", "v5e-4", *words]
        flags = tyro.cli(kind, args=words, use_underscores=True)
        layout, made = parse_layout(flags.parallel, devices), image_job(flags, devices)
        traced = jax.make_jaxpr(made.step)(*made.args).jaxpr
        flops, _ = matmul_flops(traced)
        exchanges, sent = exchanges_of(traced, dict(zip(AXES, layout.mesh.devices.shape)))
        rows[f"shared {job}"] = {
            "parallel": " ".join(flags.parallel),
            "chips": len(layout.devices),
            "flops": flops,
            "seconds": roofline_seconds(CHIPS["v5e"], flops, 0),  # of the FLOPs alone
            "exchanges": exchanges,
            "sent": sent,
        }
    results = write_rows(rows, machine, config.output)
    report(format_shared(results), config.output)


SUBCOMMANDS = {
    Programs: run_programs,
    Accelerations: run_accelerations,
    Shared: run_shared,
    Options: run_options,
}


def main(args=None):
    """Command line."""
    run_benchmark(SUBCOMMANDS, __doc__, args)


if __name__ == "__main__":
    main()
