"""The report on a program that is compiled for TPUs or GPUs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from diffusers_flax.compiling.chips import GIB, TPUS, USABLE_SHARE
from diffusers_flax.compiling.costs import num_bytes, program_costs
from diffusers_flax.compiling.kernels import BUSY, BUSY_WITH_IMAGES, add_tables, kind_seconds
from diffusers_flax.flops import matmul_flops

# What jax takes of a GPU when it starts. Source: "GPU memory allocation" in jax's documentation.
JAX_SHARE = 0.75


class Part(NamedTuple):
    """A function that runs in a program; arguments are ShapeDtypeStructs, of pmap (chips, ...)."""

    function: Callable  # of pmap or jit
    args: tuple
    times: float = 1.0  # that it runs in a step
    fractions: dict = {}  # noqa: RUF012  of conditions, see hlo.executed
    passes: int = 1  # products in bfloat16 that a TPU makes for one
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


def compile_program(config, name, program, target):
    """Compile a Program; returns its report, ready for JSON.

    Memory, FLOPs and bytes are for one chip and one step. A program that does not fit has no times.

    Args:
        config: the flags.
        name: of the subcommand.
        program: Program.
        target: Target.
    """
    chip, batch = target.chip, program.batch_per_chip
    n = program.num_chips or target.num_chips
    report = {
        "target": config.tpu or config.gpu,
        "chips": n,
        "program": name,
        "batch_per_chip": batch,
        "unet_evaluations": program.evaluations,
        "vae_tile": program.vae_tile,
        "memory_usable": round(chip.memory),
        "compile_seconds": 0.0,
    }
    memory = {name: num_bytes(tree) for name, tree in program.held.items()}
    memory |= dict.fromkeys(("padding", "temporaries", "outputs", "code"), 0)
    needs, costs = sum(memory.values()), []
    options = dict(option.split("=", 1) for option in config.compiler_options)
    for part in program.parts.values():
        # Without minutes of compilation it is known that more does not fit.
        found = {"needs": needs, "compile_seconds": 0.0}
        if needs <= chip.memory:
            found = program_costs(part.function, part.args, chip, part.fractions, options)
        report["compile_seconds"] += found["compile_seconds"]
        if "needs" in found:
            return report | {"fits": False, "memory_total": round(found["needs"])}
        memory["padding"] += int(found["padding"] * part.held)
        memory["temporaries"] = max(memory["temporaries"], found["temporaries"])
        memory["outputs"] = memory["outputs"] or found["outputs"]
        memory["code"] += found["code"]
        costs.append(found)
    total = sum(memory.values())
    report |= {"fits": total <= chip.memory, "memory": memory, "memory_total": total}

    amounts = ("flops", "int8_flops", "hbm_bytes", "interconnect_bytes", "host_bytes")
    report |= dict.fromkeys((*amounts, "step_seconds", "estimated_seconds"), 0.0)
    if chip.card:
        tables = [(x["kernels"], part.times) for x, part in zip(costs, program.parts.values())]
        report["kernels"] = add_tables(tables)
    # Groups that --offload fetches come while others compute.
    is_ahead = getattr(config, "offload", None) == "group"
    for part, found in zip(program.parts.values(), costs):
        traced = jax.make_jaxpr(part.function)(*part.args)
        flops, int8_flops = matmul_flops(traced.jaxpr, part.fractions)
        found |= {"flops": flops, "int8_flops": int8_flops}
        times = least_and_estimate(chip, found, part.passes, bool(program.evaluations))
        fetching = found["host_bytes"] / chip.host
        for key, seconds in zip(("step_seconds", "estimated_seconds"), times):
            seconds = max(seconds, fetching) if is_ahead else seconds + fetching
            report[key] += part.times * seconds
        for key in amounts:
            report[key] += part.times * found[key]
    rate = batch * program.per_batch / report["step_seconds"]
    report |= {"images_per_second_per_chip": rate, "images_per_second": n * rate}
    return report | {"unit": program.unit}


def peak_share(chip):
    """Share of a TPU's peak for estimates: the published one, else the lowest of all chips."""
    return chip.share or min(other.share for other in TPUS.values() if other.share)


def least_and_estimate(chip, costs, passes, makes_images):
    """(least seconds, estimate) of a function.

    Args:
        chip: Chip.
        costs: of program_costs, with "flops" and "int8_flops".
        passes: of Part.
        makes_images: the program makes images by a loop, which keeps a GPU busier than a step.

    Source: Roofline (Williams, Waterman, Patterson 2009), section 3.
    """
    if chip.card:
        rows = costs["kernels"].items()
        seconds = sum(kind_seconds(kind, row) for kind, row in rows)
        busy = BUSY_WITH_IMAGES if makes_images else BUSY
        return sum(row["least_seconds"] for _, row in rows), seconds / busy
    flops = (costs["flops"] - costs["int8_flops"]) * passes
    compute = flops / chip.flops + costs["int8_flops"] / chip.int8
    sent = costs["interconnect_bytes"] / chip.interconnect
    least = max(compute, costs["hbm_bytes"] / chip.bandwidth, sent)
    return least, least / peak_share(chip)


def verdict(report):
    """A line that says whether the program fits."""
    total, usable = report["memory_total"] / GIB, report["memory_usable"] / GIB
    answer = "fits" if report["fits"] else "does not fit"
    return f"{answer}: {report['batch_per_chip']} per chip need {total:.2f} of {usable:.2f} GiB"


def print_report(report, chip):
    """The report as a table; chip: Chip."""
    print(f"{report['program']} on {report['target']}, {report['chips']} chip(s), each:")
    if report["vae_tile"]:
        print(f"  the VAE works in tiles of {report['vae_tile']} pixels")
    for name, size in report.get("memory", {}).items():
        print(f"  {name:<14}{size / GIB:8.3f} GiB")
    print(verdict(report))
    if "smallest_not_fitting" in report:
        print(f"{report['smallest_not_fitting']} per chip do not fit")
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
    share = "the shares that these kinds of kernels reached on an H200"
    if kernels := report.get("kernels"):
        head = f"  {'kernels':<14}{'number':>8}{'GB':>9}{'TFLOP':>9}"
        print(f"{head}{'least ms':>10}{'estimate':>10}")
        for kind, row in sorted(kernels.items(), key=lambda row: -kind_seconds(*row)):
            amounts = f"{row['bytes'] / 1e9:9.2f}{row['flops'] / 1e12:9.2f}"
            times = f"{row['least_seconds'] * 1e3:10.2f}{kind_seconds(kind, row) * 1e3:10.2f}"
            print(f"  {kind:<14}{row['kernels']:8.0f}{amounts}{times}")
    else:
        share = f"{peak_share(chip):.0%} of the peak, which is published for "
        share += "SDXL on this chip" if chip.share else "another chip; for this one there is none"
    for key, said in (
        ("step_seconds", "at least"),
        ("estimated_seconds", f"by estimate, at {share},"),
    ):
        slower, unit = report[key] / report["step_seconds"], report["unit"]
        rate = report["images_per_second_per_chip"] / slower
        of_all = f", {rate * report['chips']:.3g} on all" if report["chips"] > 1 else ""
        print(f"{said} {report[key] * 1e3:.3g} ms, {rate:.3g} {unit}/s per chip{of_all}")
