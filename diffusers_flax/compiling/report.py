"""Compile a program for TPUs or GPUs, and report its memory and times."""

import math
import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from diffusers_flax.compilation_cache import no_compilation_cache
from diffusers_flax.compiling.chips import GIB, TPUS, USABLE_SHARE
from diffusers_flax.compiling.hlo import hbm_bytes, host_bytes, interconnect_bytes
from diffusers_flax.compiling.kernels import BUSY, add_tables, kernel_table, kind_seconds
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
    unit: str = "images"  # of rates
    per_batch: int = 1  # units for each of the batch
    num_chips: int | None = None  # chips that take part; None: all
    evaluations: int = 0  # of the UNet per image, for programs that make images
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


def program_costs(function, args, chip, fractions=None, compiler_options=None):
    """Compile a program and measure its memory and traffic on each chip.

    Args:
        function: of pmap or jit.
        args: its arguments, trees of ShapeDtypeStructs.
        chip: Chip.
        fractions: see hlo.executed.
        compiler_options: {name: value} of XLA's options.

    Returns:
        dict: "padding" (of the arguments), "temporaries", "outputs" (unless they replace an
        argument) and "code", bytes; "interconnect_bytes", "host_bytes", "hbm_bytes"; of a GPU
        "kernels", see kernel_table; "compile_seconds". If the memory is too small, only "needs",
        bytes, and "compile_seconds".

    Raises:
        ValueError: XLA does not take a compiler option, or the program does not compile with them.
    """
    started, given = time.perf_counter(), compiler_options or {}
    as_bool = {"true": True, "false": False}  # a GPU's compiler does not take these as text
    options = {} if chip.card is None else GPU_OPTIONS
    options = options | {name: as_bool.get(value, value) for name, value in given.items()}
    try:
        with no_compilation_cache():  # reading from it needs the chip
            compiled = function.lower(*args).compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        said = str(error)
        size = re.search(r"\b([\d.]+)([KMGT])\b", said)  # the first number is what it needs
        is_full = "RESOURCE_EXHAUSTED" in said and size is not None
        # With options another memory may be full, such as VMEM.
        if given and not (is_full and (chip.card or "hbm" in said.lower())):
            raise ValueError(
                f"XLA does not compile with these --compiler_options: {one_line(error, 200)}"
            ) from error
        if not is_full:
            raise
        needs = float(size[1]) * 1024 ** (1 + "KMGT".index(size[2]))
        return {"needs": needs, "compile_seconds": time.perf_counter() - started}
    memory, formats = compiled.memory_analysis(), jax.tree.leaves(compiled.input_formats)
    used = [x for x, form in zip(jax.tree.leaves(args), formats) if form.layout is not None]
    shardings, text = jax.tree.leaves(compiled.input_shardings), compiled.as_text()
    meshes = (sharding.mesh for sharding in shardings if hasattr(sharding, "mesh"))
    devices = next(meshes).devices.flat if chip.card is None else ()
    coords = [device.coords for device in devices if hasattr(device, "coords")] or None
    costs = {
        "padding": memory.argument_size_in_bytes - num_bytes(used),
        "temporaries": memory.temp_size_in_bytes,
        "outputs": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "code": memory.generated_code_size_in_bytes,
        "interconnect_bytes": interconnect_bytes(text, coords),
        "host_bytes": host_bytes(text, fractions),
        "compile_seconds": time.perf_counter() - started,
    }
    if chip.card is None:
        return costs | {"hbm_bytes": hbm_bytes(text, fractions)}
    kernels = kernel_table(text, chip, fractions)
    moved = sum(row["bytes"] for kind, row in kernels.items() if kind != "collective")
    return costs | {"hbm_bytes": moved, "kernels": kernels}


def compile_program(config, name, program, target):
    """Compile a Program, say whether it fits, and return its report, ready for JSON.

    Memory, FLOPs and bytes are for one chip and one step. A program that does not fit has no times.

    Args:
        config: the flags.
        name: of the subcommand.
        program: Program.
        target: Target.
    """
    chip, batch = target.chip, program.batch_per_chip
    n = program.num_chips or target.num_chips
    report = {"program": name, "target": config.tpu or config.gpu, "chips": n}
    report |= {"batch_per_chip": batch, "unit": program.unit, "fits": False}
    report |= {"unet_evaluations": program.evaluations, "vae_tile": program.vae_tile}
    memory = {name: num_bytes(tree) for name, tree in program.held.items()}
    memory |= dict.fromkeys(("padding", "temporaries", "outputs", "code"), 0)
    report |= {"memory_usable": round(chip.memory), "memory_total": sum(memory.values())}
    amounts = ("flops", "int8_flops", "hbm_bytes", "interconnect_bytes", "host_bytes")
    amounts += ("compile_seconds", "step_seconds", "estimated_seconds")
    sums, kernels = dict.fromkeys(amounts, 0.0), {}
    options = dict(option.split("=", 1) for option in config.compiler_options)
    # Groups that --offload fetches come while others compute.
    is_ahead = getattr(config, "offload", None) == "group"
    for part in program.parts.values():
        costs = {"needs": report["memory_total"]}
        if costs["needs"] <= chip.memory:  # else minutes of compilation are for nothing
            costs = program_costs(part.function, part.args, chip, part.fractions, options)
        if "needs" in costs:
            report["memory_total"] = round(costs["needs"])
            print(verdict(report), flush=True)
            return report
        memory["padding"] += int(costs["padding"] * part.held)
        memory["temporaries"] = max(memory["temporaries"], costs["temporaries"])
        memory["outputs"] = memory["outputs"] or costs["outputs"]
        memory["code"] += costs["code"]
        traced = jax.make_jaxpr(part.function)(*part.args)
        costs["flops"], costs["int8_flops"] = matmul_flops(traced.jaxpr, part.fractions)
        times, fetching = least_and_estimate(chip, part, costs), costs["host_bytes"] / chip.host
        times = [max(x, fetching) if is_ahead else x + fetching for x in times]
        costs["step_seconds"], costs["estimated_seconds"] = times
        sums = {key: x + part.times * costs[key] for key, x in sums.items()}
        kernels = add_tables([(kernels, 1), (costs.get("kernels", {}), part.times)])
    report |= sums | {"memory": memory, "memory_total": sum(memory.values()), "kernels": kernels}
    report["fits"] = report["memory_total"] <= chip.memory
    print(verdict(report), flush=True)
    rate = batch * program.per_batch / report["step_seconds"]
    return report | {"images_per_second_per_chip": rate, "images_per_second": n * rate}


def verdict(report):
    """A line that says whether the program fits."""
    total, usable = report["memory_total"] / GIB, report["memory_usable"] / GIB
    answer = "fits" if report["fits"] else "does not fit"
    return f"{answer}: {report['batch_per_chip']} per chip need {total:.2f} of {usable:.2f} GiB"


def peak_share(chip):
    """Share of a TPU's peak for estimates: the published one, else the lowest of all chips."""
    return chip.share or min(other.share for other in TPUS.values() if other.share)


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
    return least, least / peak_share(chip)


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
    # A program may fit only if jax takes more of a GPU's memory than by default.
    if chip.card and report["memory_total"] > JAX_SHARE * chip.num_bytes:
        variable = f"XLA_PYTHON_CLIENT_MEM_FRACTION={USABLE_SHARE}"
        print(f"jax takes {JAX_SHARE:.0%} of a GPU's memory: export {variable}")
    print(
        f"{report['flops'] / 1e12:.3g} TFLOP, {report['hbm_bytes'] / 1e9:.3g} GB to and from the "
        f"memory, {report['interconnect_bytes'] / 1e9:.3g} GB to other chips, "
        f"{report['host_bytes'] / 1e9:.3g} GB from the host's memory"
    )
    if chip.card:
        share = "the shares that these kinds of kernels reached on an H200"
        print(f"  {'kernels':<14}  number       GB    TFLOP  least ms  estimate")
        for kind, row in sorted(report["kernels"].items(), key=lambda row: -kind_seconds(*row)):
            amounts = f"{row['bytes'] / 1e9:9.2f}{row['flops'] / 1e12:9.2f}"
            times = f"{row['least_seconds'] * 1e3:10.2f}{kind_seconds(kind, row) * 1e3:10.2f}"
            print(f"  {kind:<14}{row['kernels']:8.0f}{amounts}{times}")
    else:
        share = f"{peak_share(chip):.0%} of the peak, which is published for "
        share += "SDXL on this chip" if chip.share else "another chip; for this one there is none"
    said = {"step_seconds": "at least", "estimated_seconds": f"by estimate, at {share},"}
    for key, words in said.items():
        slower, unit = report[key] / report["step_seconds"], report["unit"]
        rate = report["images_per_second_per_chip"] / slower
        of_all = f", {rate * report['chips']:.3g} on all" if report["chips"] > 1 else ""
        print(f"{words} {report[key] * 1e3:.3g} ms, {rate:.3g} {unit}/s per chip{of_all}")
