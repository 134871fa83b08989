"""The report on a program that is compiled for TPUs or GPUs."""

from dataclasses import asdict, fields
from importlib.metadata import distributions

from diffusers_flax.compiling.cards import JAX_SHARE, USABLE_SHARE
from diffusers_flax.compiling.chips import HOST_MS, find_slice, peak_share, roofline_seconds
from diffusers_flax.compiling.costs import GIB, num_bytes
from diffusers_flax.compiling.kernels import add_tables, estimated_seconds, kind_seconds

PACKAGES = ("jax", "libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin")
# Products in bfloat16 that a TPU makes for one of CLIP's, which are in float32 with the highest
# precision. Source: jax.lax.Precision, HIGHEST: bfloat16 in six passes.
TPU_PASSES = 6


def chip_memory(program, step, update=None, scoring=None):
    """A chip's memory during a step, {name: bytes}, beginning with program.held.

    Args:
        program: Program.
        step, update, scoring: program_costs of its programs; None: it has none.
    """
    memory = {name: num_bytes(tree) for name, tree in program.held.items()}
    others = [costs for costs in (update, scoring) if costs]
    padding = step["padding"] + (scoring["padding"] if scoring else 0)
    if update:
        padding += update["padding"] * memory["ema"] // num_bytes(program.update_args)
    return memory | {
        "padding": padding,
        "temporaries": max(costs["temporaries"] for costs in (step, *others)),
        "outputs": step["outputs"],
        "code": step["code"] + sum(costs["code"] for costs in others),
    }


def least_and_estimate(chip, costs, flops=(0, 0), makes_images=False):
    """(least seconds, estimate) of a program.

    Args:
        chip: Chip or Card.
        costs: of program_costs.
        flops: (all, in int8); of a GPU the kernels' count.
        makes_images: see estimated_seconds.
    """
    if "kernels" in costs:
        least = sum(row["least_seconds"] for row in costs["kernels"].values())
        return least, estimated_seconds(costs["kernels"], makes_images)
    moved, sent = costs["hbm_bytes"], costs.get("interconnect_bytes", 0)
    least = roofline_seconds(chip, flops[0], moved, sent, flops[1])
    return least, least / peak_share(chip)


def make_report(config, subcommand, target, program, costs, flops):
    """The report on one compilation.

    Args:
        config: the flags.
        subcommand: of compile_for.py.
        target: Slice or Host.
        program: Program.
        costs: {"step", "update", "scoring"}: program_costs of the programs that it has.
        flops: {"step": (all, in int8), "scoring": all}, where a step is compiled.

    Returns:
        dict, ready for JSON. Memory, FLOPs and bytes are for one chip and one step. "clip_*" are of
        the scoring of a batch of pairs; rates count both programs, one after the other.
    """
    step, update, scoring = (costs.get(name) for name in ("step", "update", "scoring"))
    chip, usable = target.chip, round(target.chip.memory * GIB)
    n, batch = program.num_chips or target.num_chips, program.batch_per_chip
    installed = {package.metadata["Name"]: package.version for package in distributions()}
    report = {
        **({"tpu": config.tpu} if config.tpu else {"gpu": config.gpu}),
        "chips": n,
        "hosts": target.num_hosts,
        "program": subcommand,
        "flags": changed_flags(config),
        "batch_per_chip": batch,
        **({"unet_evaluations": program.evaluations} if program.evaluations else {}),
        **({"vae_tile": program.vae_tile} if program.vae_tile else {}),
        "memory_usable": usable,
        "compile_seconds": sum(x["compile_seconds"] for x in (step, scoring) if x),
        "versions": {name: installed[name] for name in PACKAGES if name in installed},
    }
    for compiled in (step, scoring):
        if compiled and "needs" in compiled:
            return report | {"fits": False, "memory_total": round(compiled["needs"])}
    memory = chip_memory(program, step, update, scoring)
    total = sum(memory.values())
    report |= {"fits": total <= usable, "memory": memory, "memory_total": total}
    report |= {"flops": flops["step"][0], "int8_flops": flops["step"][1]}
    report |= {name: step[name] for name in ("interconnect_bytes", "host_bytes")}
    average = (0.0, 0.0)
    if "kernels" in step:
        tables = [(step["kernels"], 1)]
        tables += [(update["kernels"], program.updates_per_step)] if update else []
        step = step | {"kernels": add_tables(tables)}
        rows = step["kernels"].items()
        moved = sum(row["bytes"] for kind, row in rows if kind != "collective")
        report |= {"kernels": step["kernels"], "hbm_bytes": moved}
    else:
        moved = update["hbm_bytes"] * program.updates_per_step if update else 0.0
        average = least_and_estimate(chip, {"hbm_bytes": moved})
        report |= {"hbm_bytes": step["hbm_bytes"], "cycles": step["cycles"], "ema_hbm_bytes": moved}
    fetching = step["host_bytes"] / chip.host
    is_ahead = getattr(config, "offload", None) == "group"  # groups come while others compute
    times = least_and_estimate(chip, step, flops["step"], bool(program.evaluations))
    for name, seconds, more in zip(("step_seconds", "estimated_seconds"), times, average):
        report[name] = (max(seconds, fetching) if is_ahead else seconds + fetching) + more
    rate = batch / report["step_seconds"]
    if scoring:
        clip, estimated_clip = least_and_estimate(chip, scoring, (TPU_PASSES * flops["scoring"], 0))
        report |= {"clip_flops": flops["scoring"], "clip_seconds": clip}
        rate = 2 * batch / (report["step_seconds"] + clip)
        estimated = 2 * batch / (report["estimated_seconds"] + estimated_clip)
        report |= {
            "clip_estimated_seconds": estimated_clip,
            "estimated_images_per_second_per_chip": estimated,
            "estimated_images_per_second": n * estimated,
        }
    return report | {"images_per_second_per_chip": rate, "images_per_second": n * rate}


def changed_flags(config):
    """Flags that differ from the defaults, without --output; ready for JSON."""
    defaults = {field.name: field.default for field in fields(config)} | {"output": config.output}
    return {k: v for k, v in asdict(config).items() if v != defaults[k]}


def chip_name(report):
    """What the report calls one of the devices."""
    return "GPU" if "gpu" in report else "chip"


def verdict(report):
    """A line that says whether the program fits."""
    total, usable = report["memory_total"] / GIB, report["memory_usable"] / GIB
    answer = "fits" if report["fits"] else "does not fit"
    need = f"{report['batch_per_chip']} per {chip_name(report)} need {total:.2f} of {usable:.2f}"
    return f"{answer}: {need} GiB"


BATCH_FLAGS = {"train": "train_batch_size", "unet": "batch_size", "pairs": "batch_size"}
BATCH_FLAGS |= dict.fromkeys(("sdxl", "edit"), "num_images")
IMAGE_ADVICE = {"parameters": ("--storage int8",), "temporaries": ("--vae_tile 512",)}
# {subcommand: {part of the memory: flags that make it smaller}}
ADVICE = {
    "train": {
        "parameters": ("--lora_rank 16",),
        "optimizer": ("--lora_rank 16",),
        "ema": ("--ema none", "--lora_rank 16"),
        "frozen models": ("--cache_latents latents --no_random_crop",),
        "temporaries": ("--gradient_checkpointing", "--gradient_accumulation_steps 2"),
    },
    "unet": {},
    "sdxl": IMAGE_ADVICE,
    "edit": IMAGE_ADVICE,
    "pairs": {"parameters": ("--storage int8",)},
}


def advice(report):
    """The end of the verdict on a program that does not fit: what needs most, and what to try."""
    memory, name = report.get("memory", {}), report["program"]
    batch, most = report["batch_per_chip"], max(memory, key=memory.get, default="")
    given = report["flags"]
    tries = [x for x in ADVICE[name].get(most, ()) if x.split()[0].removeprefix("--") not in given]
    if most == "frozen models" and "lora_rank" in given and "storage" not in given:
        tries.insert(0, "--storage int8")
    if most == "temporaries" and batch == 1:
        tries = [x for x in tries if not x.startswith("--gradient_accumulation_steps")]
    if batch > 1 and most in ("", "batches", "temporaries", "outputs"):
        tries.append(f"--{BATCH_FLAGS[name]} auto")
    tries = tries or [f"a {chip_name(report)} with more memory"]
    cause = f"; the largest part is {most}, {memory[most] / GIB:.2f} GiB" if memory else ""
    return f"{cause}; try {' or '.join(tries)}"


def print_report(report):
    """The report as a table."""
    chip = chip_name(report)
    target = report.get("tpu") or report["gpu"]
    print(f"{report['program']} on {target}, {report['chips']} {chip}(s), each:")
    if "vae_tile" in report:
        print(f"  the VAE works in tiles of {report['vae_tile']} pixels")
    for name, size in report.get("memory", {}).items():
        print(f"  {name:<14}{size / GIB:8.3f} GiB")
    print(verdict(report) + ("" if report["fits"] else advice(report)))
    # A program may fit only if jax takes more of a GPU's memory than by default.
    of_jax = report["memory_usable"] / USABLE_SHARE * JAX_SHARE
    if "gpu" in report and report["fits"] and report["memory_total"] > of_jax:
        variable = f"XLA_PYTHON_CLIENT_MEM_FRACTION={USABLE_SHARE}"
        print(f"jax takes {JAX_SHARE:.0%} of a GPU's memory: export {variable}")
    for size, row in report.get("sizes", {}).items():
        times = ""
        if row["fits"]:
            times = (
                f", {row['flops'] / 1e12:.3g} TFLOP, at least {row['step_seconds'] * 1e3:.3g} ms"
            )
        print(f"  {size:<14}{row['memory_total'] / GIB:8.3f} GiB{times}")
    if "smallest_not_fitting" in report:
        print(f"{report['smallest_not_fitting']} per {chip} do not fit")
    if report["fits"]:
        print_times(report)


def print_times(report):
    """FLOPs, bytes, kernels and times of a report."""
    chip, amounts = chip_name(report), [f"{report['flops'] / 1e12:.3g} TFLOP"]
    for name, what in (
        ("hbm_bytes", "to and from the memory"),
        ("ema_hbm_bytes", "for averages of the weights"),
        ("interconnect_bytes", f"to other {chip}s"),
        ("host_bytes", "from the host's memory"),
    ):
        if report.get(name) or name in ("hbm_bytes", "interconnect_bytes"):
            amounts.append(f"{report[name] / 1e9:.3g} GB {what}")
    print(", ".join(amounts))
    if "kernels" in report:
        print_kernels(report["kernels"])
    if "cycles" in report:
        print(f"{report['cycles'] / 1e6:.4g} million cycles expected, without kernels")
    unit = {"train": "pairs", "unet": "samples"}.get(report["program"], "images")
    where, batch = "host" if "gpu" in report else "slice", report["batch_per_chip"]

    def line(seconds, clip, at_most=""):
        """Time and rates of a batch; seconds, clip: names in the report."""
        seconds, num_images = report[seconds], batch
        if report["program"] == "pairs":
            clip, num_images = report[clip], 2 * batch
            seconds += clip
        rate = num_images / seconds
        said = [f"{seconds * 1e3:.3g} ms", f"{at_most}{rate:.3g} {unit}/s per {chip}"]
        if report["program"] == "pairs":
            said.insert(1, f"{clip * 1e3:.3g} ms ({clip / seconds:.1%}) of them by CLIP")
            said[2] += f", {rate / 2:.3g} pairs/s"
        if report["chips"] > 1:
            said.append(f"{rate * report['chips']:.3g} on the {where}")
        return ", ".join(said)

    print(f"at least {line('step_seconds', 'clip_seconds', 'so at most ')}")
    estimate = line("estimated_seconds", "clip_estimated_seconds")
    print(f"by estimate {estimate}, {source_of_estimate(report)}")
    if report["program"] == "train" and report["hosts"] > 1:
        hosts = " and ".join(f"{ms} ms with {model}" for model, ms in HOST_MS.items())
        print(f"the host's thread needs about {hosts}; a step takes the longer of host and chip")


def source_of_estimate(report):
    """The share of the peak that the estimate of a report counts with."""
    if "gpu" in report:
        return "at the shares that these kinds of kernels reached on an H200"
    chip = find_slice(report["tpu"]).chip
    source = "as SDXL reached in a published measurement of this chip"
    if chip.share is None:
        source = "the lowest published one: no measurement of this chip is published"
    return f"at {peak_share(chip):.0%} of the peak, {source}"


def print_kernels(kernels):
    """A row for each kind of kernel, the longest first."""
    rows = sorted(kernels.items(), key=lambda row: -kind_seconds(*row))
    print(f"  {'kernels':<14}{'number':>8}{'GB':>9}{'TFLOP':>9}{'least ms':>10}{'estimate':>10}")
    for kind, row in rows:
        least = row["least_seconds"] * 1e3
        print(
            f"  {kind:<14}{row['kernels']:8.0f}{row['bytes'] / 1e9:9.2f}{row['flops'] / 1e12:9.2f}"
            f"{least:10.2f}{kind_seconds(kind, row) * 1e3:10.2f}"
        )
    print(f"  {'all':<14}{sum(row['kernels'] for row in kernels.values()):8.0f}")
