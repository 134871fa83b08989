"""Tables of programs that are compiled for TPUs and not run."""

from benchmarks.rows import GIB, markdown_table, rows_of
from benchmarks.tables.cells import (
    at_share,
    estimate,
    estimated_seconds,
    memory_cell,
    results,
    seconds,
)
from benchmarks.tpu import LITTLE_MEMORY, SHARED
from diffusers_flax.compiling.chips import CHIPS, find_slice, peak_share, roofline_seconds
from diffusers_flax.training.flags import Config as TrainingConfig

COUNTED = ("v5e", "v6e")  # chips that images and edits are counted for


def training_settings(flags: dict) -> str:
    """Model, resolution and memory settings of a training step, from its non-default flags."""
    model = "SDXL" if flags.get("family") == "sdxl" else "Stable Diffusion 1.5"
    settings = [flags.get("pretrained_model_name_or_path", model)]
    settings.append(f"{flags.get('resolution', TrainingConfig.resolution)} px")
    for flag, name in (
        ("cache_latents", "cached latents"),
        ("gradient_checkpointing", "checkpointing"),
        ("gather_by_block", "by block"),
        ("lora_rank", "LoRA of rank {}"),
        ("storage", "frozen kernels in {}"),
        ("optimization_level", "{}"),
    ):
        if flag in flags:
            settings.append(name.format(flags[flag]))
    return ", ".join(settings)


def least_times(row: dict) -> dict[str, float]:
    """{limit: seconds at the chip's peak} of a training step without its average."""
    chip = find_slice(row["tpu"]).chip
    return {
        "FLOPs": roofline_seconds(chip, row["flops"], 0),
        "HBM": roofline_seconds(chip, 0, row["hbm_bytes"]),
        "other chips": roofline_seconds(chip, 0, 0, row.get("interconnect_bytes", 0)),
    }


def traffic_cells(row: dict) -> list[str]:
    """Of a training step: GB to and from HBM, to other chips, ms (least, estimate, host), limit."""
    chip = find_slice(row["tpu"]).chip
    limits, hbm_bytes = least_times(row), row["hbm_bytes"] + row["ema_hbm_bytes"]
    moved, least, note = f"{hbm_bytes / 1e9:.1f}", row["step_seconds"], ""
    if "optimization_level" in row["flags"]:  # the default level moves less
        moved = f"less than {moved}"
        at_most = roofline_seconds(chip, 0, hbm_bytes)
        note = f", or HBM: less than {at_most * 1e3:.0f} ms"
        del limits["HBM"]
        least = max(limits.values())
    sent = f"{row['interconnect_bytes'] / 1e9:.2f}" if "interconnect_bytes" in row else ""
    times = [f"{least * 1e3:.0f}", f"{estimate(least, chip) * 1e3:.0f} ({peak_share(chip):.0%})"]
    times.append(f"{host_ms(row['flags'].get('family', 'sd15')):.0f}" if row["hosts"] > 1 else "")
    return [moved, sent, *times, max(limits, key=limits.get) + note]


def host_ms(family: str) -> float:
    """Measured ms of the trainer's thread for a step on several hosts; the longest of all jax."""
    rows = rows_of(results("train"), f"{family} host time,")
    return max(row["host_ms"] for name, row in rows.items() if name.startswith("2 processes"))


def train_table() -> str:
    """Training steps."""
    lines = []
    programs = [row for row in results("tpu").values() if row.get("program") == "train"]
    for row in sorted(programs, key=lambda x: (-x["batch_per_chip"], x["chips"])):
        state = sum(row["memory"][name] for name in ("parameters", "optimizer", "ema"))
        lines.append(
            [
                row["tpu"],
                training_settings(row["flags"]),
                str(row["chips"]),
                str(row["batch_per_chip"]),
                memory_cell(row),
                f"{state / GIB:.1f}",
                f"{row['memory']['temporaries'] / GIB:.1f}",
                f"{row['flops'] / 1e12:.1f}",
                *traffic_cells(row),
            ]
        )
    return markdown_table(
        "slice | model | chips | pairs per chip | memory, GiB | of which state | temporaries "
        "| TFLOP | to and from HBM, GB | to other chips, GB | at least, ms "
        "| estimate, ms (share of the peak) | host, ms | limit",
        lines,
    )


def sdxl_table() -> str:
    """SDXL images."""
    lines = []
    for tpu in ("v5e-4", "v4-8", "v6e-4"):
        chip = find_slice(tpu).chip
        share = peak_share(chip)
        for num_images in (1, 2, 4):
            row = results("tpu")[f"program {tpu} sdxl {num_images}"]
            lines.append(
                [
                    tpu.split("-")[0],
                    str(num_images),
                    memory_cell(row),
                    f"{row['hbm_bytes'] / num_images / 1e9:.0f}",
                    f"{row['step_seconds'] / num_images:.2f}",
                    estimated_seconds(row["step_seconds"] / num_images, chip).removesuffix(" s")
                    + f" ({share:.0%})",
                    f"{row['images_per_second_per_chip']:.2f}",
                    f"{row['images_per_second_per_chip'] * share:.2f}",
                ]
            )
    return markdown_table(
        "chip | images at once | holds, GiB | to and from HBM, GB per image "
        "| at least, s per image | estimate, s (share of the peak) | at most, images/s per chip "
        "| estimate, images/s",
        lines,
    )


def shared_table() -> str:
    """Images that several v5e chips share: FLOPs of a chip, and what it sends."""
    lines, chip = [], CHIPS["v5e"]
    link = chip.interconnect / 4  # of a chip's four links
    for name in SHARED:
        row = results("tpu")[f"shared {name}"]
        image, _ = name.split(", ")
        lines.append(
            [
                {"sdxl": "SDXL, 1024 px", "edit": "edit, 512 px"}[image],
                str(row["chips"]),
                f"`{row['parallel']}`",
                f"{row['flops'] / 1e12:.1f}",
                f"{row['seconds']:.3f}",
                estimated_seconds(row["seconds"], chip).removesuffix(" s"),
                f"{row['exchanges']}",
                f"{row['sent'] / 1e9:.3g}",
                f"{row['sent'] / link:.2g}",
            ]
        )
    return markdown_table(
        "20 steps | chips | `--parallel` | TFLOP of a chip | at least, s "
        f"| {at_share(chip)}, s | exchanges | sent by a chip, GB | over one link, s",
        lines,
    )


def little_memory_table() -> str:
    """An image of SDXL on a v5e chip with less memory; times count FLOPs and what is fetched."""
    lines, chip = [], CHIPS["v5e"]
    for name, flags in LITTLE_MEMORY.items():
        row = results("tpu")[f"program v5e-1 sdxl, {name} O0"]
        compute = roofline_seconds(chip, row["flops"], 0)
        fetched = row.get("host_bytes", 0) / chip.host
        at_once = "group" in flags  # blocks are fetched while others compute
        least, estimated = (
            max(x, fetched) if at_once else x + fetched for x in (compute, estimate(compute, chip))
        )
        lines.append(
            [
                f"`{' '.join(flags)}`" if flags else "no flags",
                f"{row['memory_total'] / GIB:.1f}",
                f"{row['memory']['temporaries'] / GIB:.1f}",
                f"{row.get('host_bytes', 0) / 1e9:.1f}",
                f"{least:.2f}",
                f"{estimated:.2f}",
            ]
        )
    return markdown_table(
        "flags | memory, GiB | of which temporaries | fetched from the host, GB | at least, s "
        f"| {at_share(chip)}, s",
        lines,
    )


def flops_cells(row: dict | None) -> list[str]:
    """Evaluations, TFLOP, and per chip least time and estimate; empty without a row."""
    if row is None:
        return [""] * 6
    times = []
    for name in COUNTED:
        bound = row["seconds"][name]
        times += [seconds(bound), estimated_seconds(bound, CHIPS[name])]
    return [str(row["unet_evaluations"]), f"{row['flops'] / 1e12:.3g}", *times]


def acceleration_flops_table() -> str:
    """UNet evaluations, FLOPs and their time with each acceleration."""
    counts, lines = rows_of(results("tpu"), "acceleration"), []
    for name in dict.fromkeys(case.partition(", ")[2] for case in counts):
        found = [counts.get(f"{program}, {name}") for program in ("sdxl", "edit")]
        lines.append([name, *(cell for row in found for cell in flops_cells(row))])
    times = " | ".join(f"{name}, at least | {name}, {at_share(CHIPS[name])}" for name in COUNTED)
    columns = f"evaluations | TFLOP | {times}"
    return markdown_table(f"| SDXL: {columns} | edit: {columns}", lines)
