"""Types of TPU; memory, traffic and least time of programs that are compiled for them.

tpu = find_slice("v5e-16")
costs = program_costs(jax.pmap(f, devices=slice_devices(tpu)), args)
"""

import importlib.util
import math
import os
import re
import time
from typing import NamedTuple

import jax
from jax.experimental.topologies import get_topology_desc

from compiling.hlo import (
    expected_cycles,
    hbm_bytes,
    host_bytes,
    interconnect_bytes,
    kernel_bytes,
)
from diffusers_flax.compilation_cache import no_compilation_cache
from diffusers_flax.messages import one_line

GIB = 2**30


class Chip(NamedTuple):
    """A type of TPU. Source: Cloud TPU's documentation; memory is the compiler's limit.

    host: "How to Scale Your Model" (jax-ml.github.io/scaling-book), part 2.
    """

    topology: str  # its name in jax.experimental.topologies
    cores: int  # TensorCores per chip if the slice's name counts them, else 1
    flops: float  # peak in bfloat16, per second
    int8: float  # peak in int8, operations per second
    bandwidth: float  # of the memory, bytes per second
    interconnect: float  # sum over a chip's links, one direction, bytes per second
    memory: float  # usable by a program, GiB
    host: float = 15e9  # from the host's memory, bytes per second


CHIPS = {
    "v4": Chip("v4", 2, 275e12, 275e12, 1.23e12, 0.3e12, 30.75),
    "v5e": Chip("v5e", 1, 197e12, 393e12, 0.82e12, 0.2e12, 15.75),
    "v5p": Chip("v5", 2, 459e12, 918e12, 2.8e12, 0.6e12, 95.74),
    "v6e": Chip("v6e", 1, 918e12, 1836e12, 1.64e12, 0.448e12, 31.25, 32e9),
}
# Slices have three dimensions (v4, v5p) or two.
SHAPES_3D = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8")
SHAPES_2D = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")

# Without these settings the compiler looks for a TPU in the network, writes logs to /tmp, and runs
# in only one process at a time.
LIBTPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


class Slice(NamedTuple):
    """Connected chips and their hosts."""

    chip: Chip
    num_chips: int
    num_hosts: int
    shape: str


def slices():
    """All types of slices, {name: Slice}."""
    types = {}
    for family, chip in CHIPS.items():
        for shape in SHAPES_3D if chip.cores == 2 else SHAPES_2D:
            num_chips = math.prod(map(int, shape.split("x")))
            # Four chips per host; v5e and v6e slices of up to eight chips have one host.
            num_hosts = 1 if chip.cores == 1 and num_chips <= 8 else num_chips // 4
            types[f"{family}-{num_chips * chip.cores}"] = Slice(chip, num_chips, num_hosts, shape)
    return types


def find_slice(name):
    """The Slice of an accelerator type.

    Args:
        name: such as v4-32 or v5p-8, which count TensorCores, two per chip; or v5e-16 (also as
            v5litepod-16) or v6e-8, which count chips.

    Raises:
        ValueError: the name is unknown.
    """
    types = slices()
    name = name.replace("v5litepod-", "v5e-")
    if name not in types:
        raise ValueError(f"--tpu {name} is not known; known are {', '.join(types)}")
    return types[name]


def check_compiler():
    """Raise a ValueError unless the TPU's compiler is installed."""
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            "libtpu, the TPU's compiler, is not installed; get the one for this jax: "
            f'pip install "jax[tpu]=={jax.__version__}"'
        )


def slice_devices(tpu):
    """The devices of a Slice, to compile for.

    Raises:
        ValueError: the compiler is not installed.
    """
    check_compiler()
    for name, value in LIBTPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    options = {"chip_config_name": "megacore"} if tpu.chip.cores == 2 else {}
    if tpu.num_chips == 1:
        options["chips_per_host_bounds"] = (1, 1, 1)
    return get_topology_desc(f"{tpu.chip.topology}:{tpu.shape}", "tpu", **options).devices


def param_shapes(module, dtype):
    """Shapes of a module's parameters, stored in dtype."""
    shapes = jax.eval_shape(module.init_weights, jax.random.key(0))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), shapes)


def replicated_shapes(tree, num_devices):
    """Shapes of arrays that pmap takes: (num_devices, ...)."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((num_devices, *x.shape), x.dtype), tree)


def num_bytes(tree):
    """Bytes that a tree of arrays takes on each chip, without padding.

    Arrays are (chips, ...), or ShapeDtypeStructs with a sharding; those in the host's memory do not
    count.
    """

    def on_a_chip(x):
        sharding = getattr(x, "sharding", None)
        if sharding is not None and sharding.memory_kind == "pinned_host":
            return (0,)
        return x.shape[1:] if sharding is None else sharding.shard_shape(x.shape)

    return sum(math.prod(on_a_chip(x)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def program_costs(program, args, switches=(), compiler_options=None):
    """Compile a program and measure its memory and traffic on each chip.

    Args:
        program: what pmap returned.
        args: its arguments, of ShapeDtypeStructs.
        switches: see sum_over_run.
        compiler_options: {name: value} of XLA's options.

    Returns:
        dict: "padding" (of the arguments), "temporaries", "outputs" (unless they replace an
        argument) and "code", bytes; "hbm_bytes", to and from the memory;
        "host_bytes", from the host's memory;
        "interconnect_bytes", sent to other chips; "cycles", of expected_cycles;
        "bytes_accessed", the compiler's count plus kernel_bytes, a loop's body once;
        "compile_seconds". If the memory is too small, only "needs", bytes, and "compile_seconds".

    Raises:
        ValueError: XLA does not take a compiler option.
    """
    started = time.perf_counter()
    try:
        with no_compilation_cache():  # reading from it needs the chip
            compiled = program.lower(*args).compile(compiler_options=compiler_options)
    except jax.errors.JaxRuntimeError as error:
        # The first number is the memory needed.
        size = re.search(r"\b([\d.]+)([KMGT])\b", str(error))
        if re.search("No such compile option|Failed to parse .* into flag", str(error)):
            given = " ".join(f"{name}={value}" for name, value in compiler_options.items())
            raise ValueError(
                f"XLA does not take the compiler options {given} ({one_line(error, 200)}); leave "
                "out or correct the one that it names"
            ) from error
        if "RESOURCE_EXHAUSTED" not in str(error) or size is None:
            raise
        if compiler_options and "hbm" not in str(error).lower():  # another memory, such as VMEM
            raise ValueError(
                f"the program does not compile with these options: {one_line(error, 200)}"
            ) from error
        needs = float(size[1]) * 1024 ** (1 + "KMGT".index(size[2]))
        return {"needs": needs, "compile_seconds": time.perf_counter() - started}
    memory, cost, text = compiled.memory_analysis(), compiled.cost_analysis(), compiled.as_text()
    formats = jax.tree.leaves(compiled.input_formats)
    used = [x for x, form in zip(jax.tree.leaves(args), formats) if form.layout is not None]
    shardings = jax.tree.leaves(compiled.input_shardings)
    meshes = [sharding.mesh for sharding in shardings if hasattr(sharding, "mesh")]
    chips = meshes[0].devices.ravel() if meshes else []
    coords = [chip.coords for chip in chips if hasattr(chip, "coords")] or None  # a CPU has none
    return {
        "padding": memory.argument_size_in_bytes - num_bytes(used),
        "temporaries": memory.temp_size_in_bytes,
        "outputs": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "code": memory.generated_code_size_in_bytes,
        "bytes_accessed": cost["bytes accessed"] + kernel_bytes(text),
        "hbm_bytes": hbm_bytes(text, switches),
        "interconnect_bytes": interconnect_bytes(text, coords),
        "host_bytes": host_bytes(text, switches),
        "cycles": expected_cycles(text, switches),
        "compile_seconds": time.perf_counter() - started,
    }


def roofline_seconds(chip, flops, moved, sent=0, int8_flops=0):
    """The least time that a program can take on a Chip.

    Args:
        flops: of the work.
        moved, sent: bytes to and from the memory, and to other chips.
        int8_flops: the part of flops that is in int8.

    Source: Roofline (Williams, Waterman, Patterson 2009), section 3.
    """
    compute = (flops - int8_flops) / chip.flops + int8_flops / chip.int8
    return max(compute, moved / chip.bandwidth, sent / chip.interconnect)


def largest_fitting(fits, start):
    """Find the largest number that fits, to within an eighth: double, then bisect.

    Args:
        fits: number, at least 1 -> bool; slow.
        start: first number to try.

    Returns:
        (number, or 0 if 1 does not fit; the smallest number known not to fit).
    """
    good, bad, number = 0, None, start
    while bad is None or bad - good > max(1, good // 8):
        if fits(number):
            good = number
        else:
            bad = number
        number = 2 * good if bad is None else (good + bad) // 2
    return good, bad


def verdict(report):
    """Whether the program fits, in a line."""
    total, usable = report["memory_total"] / GIB, report["memory_usable"] / GIB
    answer = "fits" if report["fits"] else "does not fit"
    return f"{answer}: {report['batch_per_chip']} per chip need {total:.2f} of {usable:.2f} GiB"


def print_report(report):
    """The report as a table."""
    print(f"{report['program']} on {report['tpu']}, {report['chips']} chip(s), each:")
    if "vae_tile" in report:
        print(f"  the VAE works in tiles of {report['vae_tile']} pixels")
    for name, size in report.get("memory", {}).items():
        print(f"  {name:<14}{size / GIB:8.3f} GiB")
    print(verdict(report))
    for size, row in report.get("sizes", {}).items():
        time = f", at least {row['step_seconds'] * 1e3:.3g} ms" if "step_seconds" in row else ""
        flops = f", {row['flops'] / 1e12:.3g} TFLOP" if "flops" in row else ""
        seconds = f", compiled in {row['compile_seconds']:.0f} s"
        print(f"  {size:<14}{row['memory_total'] / GIB:8.3f} GiB{flops}{time}{seconds}")
    if "smallest_not_fitting" in report:
        print(f"{report['smallest_not_fitting']} per chip do not fit")
    if "flops" in report:
        ema, fetched = report["ema_hbm_bytes"] / 1e9, report.get("host_bytes", 0)
        unit = {"train": "pairs", "unet": "samples"}.get(report["program"], "images")
        print(
            f"{report['flops'] / 1e12:.3g} TFLOP, {report['hbm_bytes'] / 1e9:.3g} GB to and from "
            f"the memory{f', {ema:.3g} GB for averages of the weights' if ema else ''}, "
            f"{report['interconnect_bytes'] / 1e9:.3g} GB to other chips"
            + (f", {fetched / 1e9:.3g} GB from the host's memory" if fetched else "")
        )
        print(f"{report['cycles'] / 1e6:.4g} million cycles expected, without kernels")
        print(
            f"at least {report['step_seconds'] * 1e3:.3g} ms, so at most "
            f"{report['images_per_second_per_chip']:.1f} {unit}/s per chip, "
            f"{report['images_per_second']:.0f} on the slice"
        )
