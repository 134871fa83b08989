"""Programs compiled for TPUs, without a TPU: memory, traffic, cycles. Nothing is run.

    python -m benchmarks.tpu programs

compiles with compile_for.py the training step of Stable Diffusion 1.5 (256 pixels, 8 pairs per
chip, bfloat16), its UNet and whole SDXL images (1024 pixels). Rows that benchmarks/results/tpu.json
has already are not compiled again; --again compiles them. With the demo's model, in a minute:

    python -m benchmarks.tpu programs --tpus v5e-1 --programs unet --resolution 64 \\
        --pretrained_model_name_or_path demo/base_model --output /tmp/tpu.json

    python -m benchmarks.tpu accelerations

counts the UNet's evaluations and the FLOPs of images and edits with each technique of --accelerate
and without; nothing is compiled.

    python -m benchmarks.tpu shared

counts the FLOPs of a chip and what it sends to other chips where several chips make one image
(--parallel), in the traced programs; nothing is compiled. `programs --tpus v5e-4 --programs
"sdxl, branches=2 rows=2"` compiles one of them.

    python -m benchmarks.tpu convolutions

counts the cycles that the compiler expects of 3x3 convolutions: XLA's,
models.convolution.shifted_matmuls, and in int8. Ten minutes.

Needs a CPU, 18 GB of memory and `pip install "jax[tpu]"`; 5 to 75 minutes per program on two cores.
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

import compile_for
from benchmarks.gpu_compiled import PAIRS
from benchmarks.harness import ACCELERATIONS
from benchmarks.rows import (
    ROOT,
    describe_compiler,
    describe_machine,
    read_rows,
    run_benchmark,
    write_rows,
)
from diffusers_flax.compiling.chips import CHIPS, find_slice, roofline_seconds, slice_devices
from diffusers_flax.compiling.costs import program_costs
from diffusers_flax.compiling.programs import image_program
from diffusers_flax.devices.layout import AXES, parse_layout
from diffusers_flax.flops import matmul_flops
from diffusers_flax.loading.files import read_json
from diffusers_flax.models.convolution import shifted_matmuls, xla_convolve
from diffusers_flax.models.quantization import eight_bit_layer

RESULTS = "benchmarks/results/tpu.json"
PAIRS_PER_CHIP = 8
TRAIN = ("train", "--mixed_precision", "bf16", "--ema", "full")
# Arguments of compile_for.py.
TRAIN_SDXL = (
    *TRAIN[:3],
    *("--family", "sdxl", "--resolution", "512", "--gradient_checkpointing"),
)
LATENTS = ("--cache_latents", "latents", "--no_random_crop")
PROGRAMS = {
    "train": TRAIN,
    "train latents": (*TRAIN, *LATENTS),
    "train sdxl latents": (*TRAIN_SDXL, *LATENTS),
    "train sdxl by block": (*TRAIN_SDXL, *LATENTS, "--gather_by_block"),
    "train sdxl lora": (*TRAIN_SDXL, *LATENTS, "--lora_rank", "16"),
    "train sdxl lora int8": (*TRAIN_SDXL, *LATENTS, "--lora_rank", "16", "--storage", "int8"),
    "unet": ("unet", "--batch_size", str(PAIRS_PER_CHIP)),
    "sdxl 1": ("sdxl", "--num_images", "1"),
    "sdxl 2": ("sdxl", "--num_images", "2"),
    "sdxl 4": ("sdxl", "--num_images", "4"),
}
FOUR_STEPS = ("--num_inference_steps", "4", "--scheduler", "lcm", "--guidance_scale", "1")


def accelerated_programs():
    """{"edit, NAME" or "sdxl, NAME": arguments of compile_for.py}."""
    edit, one_scale, programs = ("edit", "--scheduler", "ddim"), ("--image_guidance_scale", "1"), {}
    for name, (edit_spec, sdxl_spec) in ACCELERATIONS.items():
        if edit_spec is not None:
            programs[f"edit, {name}"] = (*edit, "--accelerate", *edit_spec.split())
        programs[f"sdxl, {name}"] = ("sdxl", "--accelerate", *sdxl_spec.split())
    for name, specs in (("4 steps", ()), ("4 steps, int8, taesd", ("int8", "taesd"))):
        programs[f"edit, {name}"] = ("edit", *FOUR_STEPS, *one_scale, "--accelerate", *specs)
        programs[f"sdxl, {name}"] = ("sdxl", *FOUR_STEPS, "--accelerate", *specs)
    return programs


ACCELERATED = accelerated_programs()
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
PROGRAMS |= {f"sdxl, {name}": ("sdxl", *flags) for name, flags in LITTLE_MEMORY.items()}
PROGRAMS |= ACCELERATED | SHARED
PROGRAMS |= {name: ("pairs", *words) for name, words in PAIRS.items()}
ProgramName = Literal[tuple(PROGRAMS)]


@dataclass(frozen=True)
class ProgramFlags:
    """Training steps, UNets, SDXL images and edits."""

    tpus: tuple[str, ...] = ("v5e-4", "v4-8", "v6e-4")
    programs: tuple[ProgramName, ...] = ("train", "unet", "sdxl 1", "sdxl 2", "sdxl 4")
    pairs_per_chip: int = PAIRS_PER_CHIP  # of the training steps
    again: bool = False  # also compile rows that the output has
    resolution: int | None = None  # pixels, of training and UNets; default: as described
    pretrained_model_name_or_path: str = ""  # "": Stable Diffusion 1.5, or XL
    optimization_level: Literal["O0", "O1"] | None = None  # see compile_for.py; default: XLA's
    output: str = RESULTS


@dataclass(frozen=True)
class AccelerationFlags:
    """FLOPs of accelerated images and edits, 20 steps and 4."""

    pretrained_model_name_or_path: str = ""  # of tiny edits only, to try this
    output: str = RESULTS


@dataclass(frozen=True)
class SharedFlags:
    """FLOPs and exchanges of images that four v5e chips share."""

    programs: tuple[Literal[tuple(SHARED)], ...] = tuple(SHARED)
    output: str = RESULTS


@dataclass(frozen=True)
class ConvolutionFlags:
    """Cycles of 3x3 convolutions: XLA's, and a matmul per kernel position in bfloat16 and int8."""

    tpus: tuple[str, ...] = ("v5e-1", "v6e-1")  # slices; their first chips count
    output: str = RESULTS


def case_name(tpu, name, config):
    """The case of a row: the slice, the program and what differs from the defaults."""
    changes = []
    if name.startswith("train") and config.pairs_per_chip != PAIRS_PER_CHIP:
        changes.append(f"{config.pairs_per_chip} pairs")
    if config.resolution is not None:
        changes.append(f"{config.resolution} px")
    if config.pretrained_model_name_or_path:
        changes.append(config.pretrained_model_name_or_path)
    if config.optimization_level:
        changes.append(config.optimization_level)
    return " ".join(["program", tpu, name, *changes])


def arguments_of(tpu, name, config):
    """The arguments of compile_for.py."""
    subcommand, *flags = PROGRAMS[name]
    arguments = [subcommand, "--tpu", tpu, *flags]
    if subcommand == "train":
        batch_size = config.pairs_per_chip * find_slice(tpu).num_chips
        arguments += ["--train_batch_size", str(batch_size)]
    if config.resolution is not None and subcommand not in ("sdxl", "pairs"):
        arguments += ["--resolution", str(config.resolution)]
    if config.optimization_level:
        arguments += ["--optimization_level", config.optimization_level]
    if model := config.pretrained_model_name_or_path:
        flag = "model" if subcommand == "pairs" else "pretrained_model_name_or_path"
        arguments += [f"--{flag}", str(Path(model).absolute())]
    return arguments


def run_programs(config):
    """Compile and write the rows that are missing."""
    if not (config.tpus and config.programs):
        raise ValueError("--tpus and --programs need at least one value each")
    for tpu in config.tpus:
        find_slice(tpu)
    machine, results = describe_compiler(), read_rows(config.output)
    for name in config.programs:
        for tpu in config.tpus:
            case = case_name(tpu, name, config)
            if case in results and not config.again:
                print(f"{case} is in {config.output}")
                continue
            print(f"{case} ...", flush=True)
            write_rows({case: report_of(tpu, name, config)}, machine, config.output)


def report_of(tpu, name, config):
    """The report of compile_for.py."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "report.json")
        command = [sys.executable, "compile_for.py", *arguments_of(tpu, name, config)]
        command += ["--output", str(output)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            said = done.stderr.strip() or f"compile_for.py ended with code {done.returncode}"
            raise ValueError(said.splitlines()[-1].removeprefix("error: "))
        return read_json(output)


def image_flags(arguments):
    """Flags of a subcommand of compile_for.py, from its command line."""
    subcommand, *words = arguments
    return tyro.cli(compile_for.SUBCOMMANDS[subcommand], args=words, use_underscores=True)


def run_accelerations(config):
    """Count, write."""
    jax.config.update("jax_platforms", "cpu")
    machine, programs = describe_machine(("jax", "jaxlib")), ACCELERATED
    if model := config.pretrained_model_name_or_path:  # the published TAESD may not fit
        tiny = ("--pretrained_model_name_or_path", model, "--resolution", "64")
        programs = {
            name: (*arguments, *tiny)
            for name, arguments in programs.items()
            if arguments[0] == "edit" and "taesd" not in arguments
        }
    rows = {}
    for name, arguments in tqdm(programs.items(), unit="program"):
        flags = image_flags((*arguments, "--tpu", "v5e-1"))
        flops, int8_flops = compile_for.count_step_flops(flags, 1)
        rows[f"acceleration {name}"] = {
            "accelerate": " ".join(flags.accelerate),
            "num_inference_steps": flags.num_inference_steps,
            "unet_evaluations": image_program(flags, jax.devices()[:1]).evaluations,
            "flops": flops,
            "int8_flops": int8_flops,
            "seconds": {  # of the FLOPs alone, at the chip's peak
                chip: roofline_seconds(CHIPS[chip], flops, 0, int8_flops=int8_flops)
                for chip in ("v5e", "v6e")
            },
        }
    write_rows(rows, machine, config.output)


EXCHANGES = {"all_gather", "ppermute", "psum", "pmax"}


def exchanges_of(jaxpr, sizes):
    """What a device sends to other devices in a traced program.

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


def run_shared(config):
    """Trace, write."""
    jax.config.update("jax_platforms", "cpu")
    machine, devices = describe_machine(("jax", "jaxlib")), slice_devices(find_slice("v5e-4"))
    rows = {}
    for name in tqdm(config.programs, unit="program"):
        flags = image_flags((*SHARED[name], "--tpu", "v5e-4"))
        layout, program = parse_layout(flags.parallel, devices), image_program(flags, devices)
        traced = jax.make_jaxpr(program.step)(*program.args).jaxpr
        flops, _ = matmul_flops(traced)
        exchanges, sent = exchanges_of(traced, dict(zip(AXES, layout.mesh.devices.shape)))
        rows[f"shared {name}"] = {
            "parallel": " ".join(flags.parallel),
            "chips": len(layout.devices),
            "flops": flops,
            "seconds": roofline_seconds(CHIPS["v5e"], flops, 0),  # of the FLOPs alone
            "exchanges": exchanges,
            "sent": sent,
        }
    write_rows(rows, machine, config.output)


CONVOLUTIONS = (  # (B, H, W, C) and output channels: SDXL's images, edits, small training batches
    *(((2, 128, 128, 320), 320), ((2, 128, 128, 960), 320), ((2, 64, 64, 640), 640)),
    *(((2, 32, 32, 1280), 1280), ((2, 32, 32, 2560), 1280)),
    *(((3, 64, 64, 320), 320), ((3, 32, 32, 640), 640), ((3, 16, 16, 1280), 1280)),
    *(((4, 32, 32, 640), 640), ((6, 32, 32, 640), 640), ((8, 32, 32, 640), 640)),
    *(((6, 64, 64, 640), 640), ((12, 32, 32, 640), 640), ((15, 32, 32, 640), 640)),
    *(((1, 16, 16, 1280), 1280), ((1, 128, 128, 512), 512)),
)


def int8_convolve(x, kernel):
    """A convolution with an int8 kernel; quantizes the activations first."""
    params = {"kernel": kernel, "dynamic_scale": jnp.ones(kernel.shape[-1])}
    return eight_bit_layer(params, x, x.dtype, padding=((1, 1), (1, 1)))


CONVOLVE = {  # name: function of (x, kernel), dtype of the kernel
    "xla": (xla_convolve, jnp.bfloat16),
    "matmuls": (shifted_matmuls, jnp.bfloat16),
    "int8": (int8_convolve, jnp.int8),
}


def convolution_costs(tpu, shape, out_channels, name):
    """Figures of SiLU and a convolution in bfloat16, as in a residual block."""
    convolve, dtype = CONVOLVE[name]
    x = jax.ShapeDtypeStruct((1, *shape), jnp.bfloat16)
    kernel = jax.ShapeDtypeStruct((1, 3, 3, shape[-1], out_channels), dtype)
    devices = slice_devices(find_slice(tpu))[:1]
    block = jax.pmap(lambda x, kernel: convolve(jax.nn.silu(x), kernel), devices=devices)
    costs = program_costs(block, (x, kernel))
    return {key: costs[key] for key in ("cycles", "hbm_bytes", "temporaries")}


def run_convolutions(config):
    """Compile, write."""
    jax.config.update("jax_platforms", "cpu")
    cases = [(tpu, *shapes) for tpu in config.tpus for shapes in CONVOLUTIONS]
    machine = describe_compiler()
    for tpu, shape, out_channels in tqdm(cases, unit="shape"):
        case = f"convolution {tpu}, {'x'.join(map(str, shape))} to {out_channels}"
        row = {name: convolution_costs(tpu, shape, out_channels, name) for name in CONVOLVE}
        write_rows({case: row}, machine, config.output)


SUBCOMMANDS = {
    "programs": ProgramFlags,
    "accelerations": AccelerationFlags,
    "shared": SharedFlags,
    "convolutions": ConvolutionFlags,
}
RUN = {
    ProgramFlags: run_programs,
    AccelerationFlags: run_accelerations,
    SharedFlags: run_shared,
    ConvolutionFlags: run_convolutions,
}


def main(args=None):
    """Command line."""
    run_benchmark(SUBCOMMANDS, lambda config: RUN[type(config)](config), __doc__, args)


if __name__ == "__main__":
    main()
