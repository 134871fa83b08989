"""The report on a program that is compiled for TPUs or GPUs."""

from dataclasses import asdict, fields
from importlib.metadata import PackageNotFoundError, version

from diffusers_flax.compiling.cards import JAX_SHARE, USABLE_SHARE
from diffusers_flax.compiling.chips import (
    HOST_MS,
    PUBLISHED_SHARES,
    find_slice,
    peak_share,
    roofline_seconds,
)
from diffusers_flax.compiling.costs import GIB, num_bytes
from diffusers_flax.compiling.kernels import add_tables, estimated_seconds, kind_seconds


def chip_memory(program, step, update):
    """A chip's memory during a step, {name: bytes}, beginning with program.held.

    Args:
        program: Program.
        step, update: program_costs of both programs; update None: no average.
    """
    memory = {name: num_bytes(tree) for name, tree in program.held.items()}
    temporaries, padding, code = step["temporaries"], step["padding"], step["code"]
    if update:
        temporaries = max(temporaries, update["temporaries"])
        padding += update["padding"] * memory["ema"] // num_bytes(program.update_args)
        code += update["code"]
    return memory | {
        "padding": padding,
        "temporaries": temporaries,
        "outputs": step["outputs"],
        "code": code,
    }


def make_report(config, subcommand, target, program, costs, flops):
    """The report on one compilation.

    Args:
        config: the flags.
        subcommand: of compile_for.py.
        target: Slice or Host.
        program: Program.
        costs: (step, update): program_costs or gpu_costs of both programs; update None: no average.
        flops: of compile_for.count_step_flops.

    Returns:
        dict, ready for JSON. Memory, FLOPs and bytes are for one chip and one step.
    """
    step, update = costs
    n, usable = program.num_chips or target.num_chips, round(target.chip.memory * GIB)
    name, packages = ("tpu", TPU_PACKAGES) if config.tpu else ("gpu", GPU_PACKAGES)
    report = {
        name: getattr(config, name),
        "chips": n,
        "hosts": target.num_hosts,
        "program": subcommand,
        "flags": changed_flags(config),
        "batch_per_chip": program.batch_per_chip,
        **({"unet_evaluations": program.evaluations} if program.evaluations else {}),
        **({"vae_tile": program.vae_tile} if program.vae_tile else {}),
        "memory_usable": usable,
        "compile_seconds": step["compile_seconds"],
        "versions": {x: version(x) for x in packages if is_installed(x)},
    }
    if "needs" in step:
        return report | {"fits": False, "memory_total": round(step["needs"])}
    memory = chip_memory(program, step, update)
    total = sum(memory.values())
    report |= {
        "fits": total <= usable,
        "memory": memory,
        "memory_total": total,
        "flops": flops[0],
        "int8_flops": flops[1],
    }
    times = tpu_times if config.tpu else gpu_times
    report |= times(config, target.chip, program, costs, flops)
    seconds = report["step_seconds"]
    return report | {
        "images_per_second_per_chip": program.batch_per_chip / seconds,
        "images_per_second": n * program.batch_per_chip / seconds,
    }


TPU_PACKAGES = ("jax", "libtpu")
GPU_PACKAGES = ("jax", "jax-cuda13-plugin", "jax-cuda12-plugin")


def is_installed(package):
    """Whether a package is installed."""
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


def with_fetching(config, seconds, step, chip):
    """Seconds of a step with what it fetches from the host's memory."""
    fetching = step["host_bytes"] / chip.host
    # Only groups are fetched while others compute.
    is_ahead = getattr(config, "offload", None) == "group"
    return max(seconds, fetching) if is_ahead else seconds + fetching


def tpu_times(config, chip, program, costs, flops):
    """Bytes, cycles, the least time and an estimate of a TPU's step; see make_report."""
    (step, update), (flops, int8_flops) = costs, flops
    traffic, averages = ("bytes_accessed", "hbm_bytes", "interconnect_bytes", "host_bytes"), {}
    for name in traffic[:2]:
        averages[f"ema_{name}"] = update[name] * program.updates_per_step if update else 0.0
    moved, sent = step["hbm_bytes"], step["interconnect_bytes"]
    least = roofline_seconds(chip, flops, moved, sent, int8_flops)
    average = roofline_seconds(chip, 0.0, averages["ema_hbm_bytes"])
    estimate, estimated_average = (x / peak_share(chip) for x in (least, average))
    return {
        **{name: step[name] for name in traffic},
        "cycles": step["cycles"],
        **averages,
        "step_seconds": with_fetching(config, least, step, chip) + average,
        "estimated_seconds": with_fetching(config, estimate, step, chip) + estimated_average,
    }


def gpu_times(config, chip, program, costs, flops):
    """Kernels, the least time and an estimate of a GPU's step; arguments as for make_report."""
    step, update = costs
    tables = [(step["kernels"], 1)]
    if update:
        tables.append((update["kernels"], program.updates_per_step))
    kernels = add_tables(tables)
    least = sum(row["least_seconds"] for row in kernels.values())
    estimate = estimated_seconds(kernels, makes_images=bool(program.evaluations))
    return {
        "kernels": kernels,
        "hbm_bytes": sum(row["bytes"] for kind, row in kernels.items() if kind != "collective"),
        "interconnect_bytes": step["interconnect_bytes"],
        "host_bytes": step["host_bytes"],
        "step_seconds": with_fetching(config, least, step, chip),
        "estimated_seconds": with_fetching(config, estimate, step, chip),
    }


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
    flags, has_lora = report["flags"], "lora_rank" in report["flags"]
    tries = [x for x in ADVICE[name].get(most, ()) if x.split()[0].removeprefix("--") not in flags]
    if most == "frozen models" and has_lora and "storage" not in flags:
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
    if "gpu" in report and report["fits"] and needs_more_than_jax_takes(report):
        print(f"jax takes {JAX_SHARE:.0%} of a GPU's memory: export {FRACTION}={USABLE_SHARE}")
    for size, row in report.get("sizes", {}).items():
        time = f", at least {row['step_seconds'] * 1e3:.3g} ms" if row["fits"] else ""
        flops = f", {row['flops'] / 1e12:.3g} TFLOP" if row["fits"] else ""
        seconds = f", compiled in {row['compile_seconds']:.0f} s"
        print(f"  {size:<14}{row['memory_total'] / GIB:8.3f} GiB{flops}{time}{seconds}")
    if "smallest_not_fitting" in report:
        print(f"{report['smallest_not_fitting']} per {chip} do not fit")
    if report["fits"]:
        print_times(report)


FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"


def needs_more_than_jax_takes(report):
    """Whether a program for a GPU fits only if jax may take more than it does by default."""
    return report["memory_total"] > report["memory_usable"] / USABLE_SHARE * JAX_SHARE


def print_times(report):
    """FLOPs, bytes, kernels and times of a report."""
    ema, fetched = report.get("ema_hbm_bytes", 0) / 1e9, report.get("host_bytes", 0)
    unit = {"train": "pairs", "unet": "samples"}.get(report["program"], "images")
    chips = "GPUs" if "gpu" in report else "chips"
    print(
        f"{report['flops'] / 1e12:.3g} TFLOP, {report['hbm_bytes'] / 1e9:.3g} GB to and from "
        f"the memory{f', {ema:.3g} GB for averages of the weights' if ema else ''}, "
        f"{report['interconnect_bytes'] / 1e9:.3g} GB to other {chips}"
        + (f", {fetched / 1e9:.3g} GB from the host's memory" if fetched else "")
    )
    if "kernels" in report:
        print_kernels(report["kernels"])
    if "cycles" in report:
        print(f"{report['cycles'] / 1e6:.4g} million cycles expected, without kernels")
    if report["program"] == "pairs":
        print_pair_times(report)
        return
    rates = f"{report['images_per_second_per_chip']:.3g} {unit}/s per {chip_name(report)}"
    if report["chips"] > 1:
        where = "host" if "gpu" in report else "slice"
        rates += f", {report['images_per_second']:.3g} on the {where}"
    print(f"at least {report['step_seconds'] * 1e3:.3g} ms, so at most {rates}")
    seconds = report["estimated_seconds"]
    rate = f"{report['batch_per_chip'] / seconds:.3g} {unit}/s per {chip_name(report)}"
    print(f"by estimate {seconds * 1e3:.3g} ms, {rate}, {source_of_estimate(report)}")
    if report["program"] == "train" and report["hosts"] > 1:
        hosts = " and ".join(f"{ms} ms with {model}" for model, ms in HOST_MS.items())
        print(f"the host's thread needs about {hosts}; a step takes the longer of host and chip")


def source_of_estimate(report):
    """The share of the peak that the estimate of a report counts with."""
    if "gpu" in report:
        return "at the shares that these kinds of kernels reached on an H200"
    chip = find_slice(report["tpu"]).chip
    source = "as SDXL reached in a published measurement of this chip"
    if chip.topology not in PUBLISHED_SHARES:
        source = "the lowest published one: no measurement of this chip is published"
    return f"at {peak_share(chip):.0%} of the peak, {source}"


def print_pair_times(report):
    """Times of make_pairs.py's programs for a batch of pairs, and CLIP's part of them."""
    where, chip = ("host" if "gpu" in report else "slice"), chip_name(report)
    pairs = f"{report['batch_per_chip']} pair{'s' * (report['batch_per_chip'] > 1)}"

    def line(seconds, clip, rate):
        images = f"{rate / report['chips']:.3g} images/s, {rate / report['chips'] / 2:.3g} pairs/s"
        rates = f"{images} per {chip}"
        if report["chips"] > 1:
            rates += f", {rate / 2:.3g} pairs/s on the {where}"
        total = seconds + clip
        share = f"{clip * 1e3:.3g} ms ({clip / total:.1%}) of them by CLIP"
        return f"{total * 1e3:.3g} ms for {pairs}, {share}", rates

    time, rates = line(report["step_seconds"], report["clip_seconds"], report["images_per_second"])
    print(f"at least {time}; so at most {rates}")
    names = ("estimated_seconds", "clip_estimated_seconds", "estimated_images_per_second")
    time, rates = line(*(report[name] for name in names))
    print(f"by estimate {time}; {rates}, {source_of_estimate(report)}")


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
