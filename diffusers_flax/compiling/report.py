"""Compile a program for TPUs or GPUs, and report its memory and times."""

import math
import re
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from diffusers_flax.compilation_cache import no_compilation_cache
from diffusers_flax.compiling.chips import GIB, USABLE_SHARE
from diffusers_flax.compiling.hlo import traffic
from diffusers_flax.compiling.kernels import BUSY, add_times, kernel_table, kind_seconds
from diffusers_flax.flops import matmul_flops
from diffusers_flax.messages import one_line

# What jax takes of a GPU when it starts. Source: "GPU memory allocation" in jax's documentation.
JAX_SHARE = 0.75
# Without a GPU, XLA cannot try Triton's tiles of a matmul; it takes cuBLAS.
GPU_OPTIONS = {"xla_gpu_enable_triton_gemm": False}


class Part(NamedTuple):
    """A function that runs in a program; arguments are ShapeDtypeStructs, of pmap (chips, ...)."""

    function: Callable  # of pmap or jit
    args: tuple
    times: float = 1.0  # that it runs in a step
    fractions: dict = {}  # noqa: RUF012  of conditions, see hlo.executed
    passes: int = 1  # products in bfloat16 that a TPU makes for one
    busy: float = BUSY  # share of the time in which a GPU's kernels run
    held: float = 1.0  # copies of its arguments that are held and no other part's


class Program(NamedTuple):
    """What compile_for.py compiles."""

    parts: dict  # {name: Part}, the step first
    held: dict[str, Any]  # arrays in memory before the step, {name in the report: tree}
    batch_per_chip: float  # pairs, samples or images
    num_chips: int  # that take part
    unit: str = "images"  # of rates
    per_batch: int = 1  # units for each of the batch
    vae_tile: int = 0  # side of the tiles in which the VAE works, pixels; 0: whole images


def replicated_shapes(tree, num_devices):
    """Shapes of arrays that pmap takes: (num_devices, ...)."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((num_devices, *x.shape), x.dtype), tree)


def num_bytes(tree):
    """Bytes of a tree of arrays on each chip, without padding.

    Arrays are (chips, ...), or ShapeDtypeStructs with a sharding; arrays in the host's memory do
    not count.
    """

    def on_a_chip(x):
        sharding = getattr(x, "sharding", None)
        if sharding is not None and sharding.memory_kind == "pinned_host":
            return (0,)
        return x.shape[1:] if sharding is None else sharding.shard_shape(x.shape)

    return sum(math.prod(on_a_chip(x)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def program_costs(part, chip, compiler_options=None):
    """Compile a Part and measure its memory and traffic on each chip.

    Args:
        part: Part.
        chip: Chip.
        compiler_options: {name: value} of XLA's options.

    Returns:
        dict: "memory", bytes of "padding" (of the arguments), "temporaries", "outputs" (unless
        they replace an argument) and "code"; the bytes of hlo.traffic; "kernels", see kernel_table,
        {} of a TPU; "compile_seconds". If the memory is too small, only "needs", bytes.

    Raises:
        ValueError: XLA does not compile it.
    """
    started = time.perf_counter()
    as_bool = {"true": True, "false": False}  # a GPU's compiler does not take these as text
    given = {name: as_bool.get(value, value) for name, value in (compiler_options or {}).items()}
    try:
        with no_compilation_cache():  # reading from it needs the chip
            options = GPU_OPTIONS | given if chip.card else given
            compiled = part.function.lower(*part.args).compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        said = str(error)
        size = re.search(r"\b([\d.]+)([KMGT])\b", said)  # the first number is what it needs
        # Another memory of a TPU may be full, such as VMEM.
        is_full = "RESOURCE_EXHAUSTED" in said and (chip.card or "hbm" in said.lower())
        if not (is_full and size):
            flag = "with these --compiler_options" if given else "this program"
            raise ValueError(f"XLA does not compile {flag}: {one_line(error, 200)}") from error
        return {"needs": float(size[1]) * 1024 ** (1 + "KMGT".index(size[2]))}
    memory, formats = compiled.memory_analysis(), jax.tree.leaves(compiled.input_formats)
    used = [x for x, y in zip(jax.tree.leaves(part.args), formats) if y.layout is not None]
    text, coords, kernels = compiled.as_text(), None, {}
    if chip.card:
        kernels = kernel_table(text, chip, part.fractions)
    else:
        shardings = jax.tree.leaves(compiled.input_shardings)
        mesh = next(x.mesh for x in shardings if hasattr(x, "mesh"))
        coords = [device.coords for device in mesh.devices.flat]
    held = {
        "padding": memory.argument_size_in_bytes - num_bytes(used),
        "temporaries": memory.temp_size_in_bytes,
        "outputs": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "code": memory.generated_code_size_in_bytes,
    }
    costs = {"memory": held, "kernels": kernels, "compile_seconds": time.perf_counter() - started}
    return costs | traffic(text, part.fractions, coords)


def compile_program(config, name, program, chip):
    """Compile a Program and return its report, ready for JSON.

    Memory, FLOPs and bytes are for one chip and one step. A program that does not fit has no times.

    Args:
        config: the flags.
        name: of the subcommand.
        program: Program.
        chip: Chip.
    """
    n = program.num_chips
    memory = Counter({name: num_bytes(tree) for name, tree in program.held.items()})
    report = {
        "program": name,
        "target": config.tpu or config.gpu,
        "chips": n,
        "batch_per_chip": program.batch_per_chip,
        "unit": program.unit,
        "vae_tile": program.vae_tile,
        "memory_usable": round(chip.memory),
        "memory_total": memory.total(),
        "fits": False,
    }
    if memory.total() > chip.memory:
        return report  # minutes of compilation are for nothing
    sums, kernels = Counter(), {}
    options = dict(option.split("=", 1) for option in config.compiler_options)
    for part in program.parts.values():
        costs = program_costs(part, chip, options)
        if "needs" in costs:
            return report | {"memory_total": round(costs["needs"])}
        own = costs.pop("memory")
        memory["padding"] += int(own["padding"] * part.held)
        memory["temporaries"] = max(memory["temporaries"], own["temporaries"])
        memory.setdefault("outputs", own["outputs"])  # of the step
        memory["code"] += own["code"]
        traced = jax.make_jaxpr(part.function)(*part.args)
        costs["flops"], costs["int8_flops"] = matmul_flops(traced.jaxpr, part.fractions)
        times, fetching = least_and_estimate(chip, part, costs), costs["host_bytes"] / chip.host
        # Groups that --offload fetches come while others compute.
        is_ahead = getattr(config, "offload", None) == "group"
        times = [max(x, fetching) if is_ahead else x + fetching for x in times]
        costs["step_seconds"], costs["estimated_seconds"] = times
        add_times(kernels, costs.pop("kernels"), part.times)
        sums.update({name: part.times * amount for name, amount in costs.items()})
    report |= sums | {"memory": memory, "memory_total": memory.total(), "kernels": kernels}
    report["fits"] = memory.total() <= chip.memory
    images = n * program.batch_per_chip * program.per_batch
    return report | {"images_per_second": images / report["step_seconds"]}


def least_and_estimate(chip, part, costs):
    """(least seconds, estimate) of a run of a Part.

    costs: of program_costs, with "flops" and "int8_flops".

    Source: Roofline (Williams, Waterman, Patterson 2009), section 3.
    """
    if chip.card:
        rows = costs["kernels"].items()
        seconds = sum(kind_seconds(kind, row) for kind, row in rows)
        return sum(row["least_seconds"] for _, row in rows), seconds / part.busy
    flops = (costs["flops"] - costs["int8_flops"]) * part.passes
    compute = flops / chip.flops + costs["int8_flops"] / chip.int8
    sent = costs["interconnect_bytes"] / chip.interconnect
    least = max(compute, costs["hbm_bytes"] / chip.bandwidth, sent)
    return least, least / chip.share


def verdict(report):
    """A line that says whether the program fits."""
    total, usable = report["memory_total"] / GIB, report["memory_usable"] / GIB
    answer = "fits" if report["fits"] else "does not fit"
    return f"{answer}: {report['batch_per_chip']:g} per chip need {total:.2f} of {usable:.2f} GiB"


def print_report(report, chip):
    """The report as a table; chip: Chip."""
    print(f"{report['program']} on {report['target']}, {report['chips']} chip(s), each:")
    if report["vae_tile"]:
        print(f"  the VAE works in tiles of {report['vae_tile']} pixels")
    for name, size in report.get("memory", {}).items():
        print(f"  {name:<14}{size / GIB:8.3f} GiB")
    print(verdict(report))
    if not report["fits"]:
        print("docs/memory.md has flags that take less memory")
        return
    # The program fits only if jax takes more of a GPU's memory than by default.
    if chip.card and report["memory_total"] > JAX_SHARE * chip.num_bytes:
        variable = f"XLA_PYTHON_CLIENT_MEM_FRACTION={USABLE_SHARE}"
        print(f"jax takes {JAX_SHARE:.0%} of a GPU's memory: export {variable}")
    print(
        f"{report['flops'] / 1e12:.3g} TFLOP, {report['hbm_bytes'] / 1e9:.3g} GB to and from the "
        f"memory, {report['interconnect_bytes'] / 1e9:.3g} GB to other chips, "
        f"{report['host_bytes'] / 1e9:.3g} GB from the host's memory"
    )
    share = "the shares that these kinds of kernels reached on an H200"
    if chip.card:
        print(f"  {'kernels':<14}  number       GB    TFLOP  least ms  estimate")
        for kind, row in sorted(report["kernels"].items(), key=lambda row: -kind_seconds(*row)):
            amounts = f"{row['bytes'] / 1e9:9.2f}{row['flops'] / 1e12:9.2f}"
            times = f"{row['least_seconds'] * 1e3:10.2f}{kind_seconds(kind, row) * 1e3:10.2f}"
            print(f"  {kind:<14}{row['kernels']:8.0f}{amounts}{times}")
    else:
        share = f"{chip.share:.0%} of the peak, see docs/sdxl.md"
    batch = report["images_per_second"] * report["step_seconds"]
    said = {"step_seconds": "at least", "estimated_seconds": f"by estimate, at {share},"}
    for key, words in said.items():
        rate = f"{batch / report[key]:.3g} {report['unit']}/s"
        print(f"{words} {report[key] * 1e3:.3g} ms, {rate} on {report['chips']} chip(s)")
