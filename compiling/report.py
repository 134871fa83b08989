"""The report on a program that is compiled for TPUs."""

from dataclasses import asdict, fields
from importlib.metadata import version

from compiling.chips import roofline_seconds
from compiling.costs import GIB, num_bytes


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


def make_report(config, subcommand, tpu, program, step, update, flops):
    """The report on one compilation.

    Args:
        config: the flags.
        subcommand: of compile_for.py.
        tpu: Slice.
        program: Program.
        step, update: program_costs of both programs; update None: no average.
        flops: of compile_for.count_step_flops.

    Returns:
        dict, ready for JSON. Memory, FLOPs and bytes are for one chip and one step.
    """
    n, usable = program.num_chips or tpu.num_chips, round(tpu.chip.memory * GIB)
    report = {
        "tpu": config.tpu,
        "chips": n,
        "hosts": tpu.num_hosts,
        "program": subcommand,
        "flags": changed_flags(config),
        "batch_per_chip": program.batch_per_chip,
        **({"unet_evaluations": program.evaluations} if program.evaluations else {}),
        **({"vae_tile": program.vae_tile} if program.vae_tile else {}),
        "memory_usable": usable,
        "compile_seconds": step["compile_seconds"],
        "versions": {name: version(name) for name in ("jax", "libtpu")},
    }
    if "needs" in step:
        return report | {"fits": False, "memory_total": round(step["needs"])}
    memory = chip_memory(program, step, update)
    total = sum(memory.values())
    traffic, averages = ("bytes_accessed", "hbm_bytes", "interconnect_bytes", "host_bytes"), {}
    for name in traffic[:2]:
        averages[f"ema_{name}"] = update[name] * program.updates_per_step if update else 0.0
    flops, int8_flops = flops
    moved, sent = step["hbm_bytes"], step["interconnect_bytes"]
    seconds = roofline_seconds(tpu.chip, flops, moved, sent, int8_flops)
    fetching = step["host_bytes"] / tpu.chip.host
    # Only groups are fetched while others compute.
    is_ahead = getattr(config, "offload", None) == "group"
    seconds = max(seconds, fetching) if is_ahead else seconds + fetching
    seconds += roofline_seconds(tpu.chip, 0.0, averages["ema_hbm_bytes"])
    return report | {
        "fits": total <= usable,
        "memory": memory,
        "memory_total": total,
        "flops": flops,
        "int8_flops": int8_flops,
        **{name: step[name] for name in traffic},
        "cycles": step["cycles"],
        **averages,
        "step_seconds": seconds,
        "images_per_second_per_chip": program.batch_per_chip / seconds,
        "images_per_second": n * program.batch_per_chip / seconds,
    }


def changed_flags(config):
    """Flags that differ from the defaults, without --output; ready for JSON."""
    defaults = {field.name: field.default for field in fields(config)} | {"output": config.output}
    return {k: v for k, v in asdict(config).items() if v != defaults[k]}


def verdict(report):
    """A line that says whether the program fits."""
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
