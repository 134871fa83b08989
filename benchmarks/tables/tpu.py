"""Tables of programs that are compiled for TPUs and not run."""

from collections.abc import Callable

from benchmarks.rows import GIB, markdown_table, rows_of
from benchmarks.tables.cells import (
    AT_SHARE,
    MEASURED_SHARE,
    estimate,
    estimated_seconds,
    memory_cell,
    results,
    seconds,
)
from benchmarks.tpu import LITTLE_MEMORY, OPTIONS, SHARED
from benchmarks.tpu_kernels import CASES
from tpu.programs import find_slice, roofline_seconds
from training.flags import Config as TrainingConfig

CHIPS = ("v5e", "v6e")  # that images and convolutions are compiled for


def recipes_table() -> str:
    """The two recipes of docs/training.md: memory and least time."""
    lines = []
    for title, pairs, num_steps in (("toy run", " 4 pairs", 1000), ("full dataset", "", 15000)):
        for slice_name in ("v4-32", "v5e-16"):
            row = results("tpu")[f"program {slice_name} train{pairs}"]
            step = row["step_seconds"]
            lines.append(
                [
                    title,
                    slice_name,
                    f"{row['batch_per_chip'] * row['chips']}",
                    str(row["batch_per_chip"]),
                    memory_cell(row),
                    f"{step * 1e3:.0f} ms",
                    f"{estimate(step) * 1e3:.0f} ms",
                    f"{num_steps}",
                    f"{num_steps * step / 60:.1f} min",
                    f"{num_steps * estimate(step) / 60:.1f} min",
                ]
            )
    return markdown_table(
        "recipe | slice | batch size | pairs per chip | memory per chip, GiB | a step, at least "
        f"| {AT_SHARE} | steps | all steps, at least | {AT_SHARE}",
        lines,
    )


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
    """Of a training step: GB to and from HBM, GB to other chips, ms (least, estimate), limit."""
    limits, hbm_bytes = least_times(row), row["hbm_bytes"] + row["ema_hbm_bytes"]
    moved, least, note = f"{hbm_bytes / 1e9:.1f}", row["step_seconds"], ""
    if "optimization_level" in row["flags"]:  # the default level moves less
        moved = f"less than {moved}"
        at_most = roofline_seconds(find_slice(row["tpu"]).chip, 0, hbm_bytes)
        note = f", or HBM: less than {at_most * 1e3:.0f} ms"
        del limits["HBM"]
        least = max(limits.values())
    sent = f"{row['interconnect_bytes'] / 1e9:.2f}" if "interconnect_bytes" in row else ""
    times = [f"{x * 1e3:.0f}" for x in (least, estimate(least))]
    return [moved, sent, *times, max(limits, key=limits.get) + note]


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
        f"| {AT_SHARE}, ms | limit",
        lines,
    )


def sdxl_table() -> str:
    """SDXL images."""
    lines = []
    for tpu in ("v5e-4", "v4-8", "v6e-4"):
        for num_images in (1, 2, 4):
            row = results("tpu")[f"program {tpu} sdxl {num_images}"]
            lines.append(
                [
                    tpu.split("-")[0],
                    str(num_images),
                    memory_cell(row),
                    f"{row['hbm_bytes'] / num_images / 1e9:.0f}",
                    f"{row['step_seconds'] / num_images:.2f}",
                    estimated_seconds(row["step_seconds"] / num_images).removesuffix(" s"),
                    f"{row['images_per_second_per_chip']:.2f}",
                    f"{row['images_per_second_per_chip'] * MEASURED_SHARE:.2f}",
                ]
            )
    return markdown_table(
        "chip | images at once | holds, GiB | to and from HBM, GB per image "
        f"| at least, s per image | {AT_SHARE}, s | at most, images/s per chip "
        f"| {AT_SHARE}, images/s",
        lines,
    )


def shared_table() -> str:
    """Images that several v5e chips share: FLOPs of a chip, and what it sends."""
    lines, link = [], find_slice("v5e-4").chip.interconnect / 4  # of a chip's four links
    for job in SHARED:
        row = results("tpu")[f"shared {job}"]
        image, _ = job.split(", ")
        lines.append(
            [
                {"sdxl": "SDXL, 1024 px", "edit": "edit, 512 px"}[image],
                str(row["chips"]),
                f"`{row['parallel']}`",
                f"{row['flops'] / 1e12:.1f}",
                f"{row['seconds']:.3f}",
                estimated_seconds(row["seconds"]).removesuffix(" s"),
                f"{row['exchanges']}",
                f"{row['sent'] / 1e9:.3g}",
                f"{row['sent'] / link:.2g}",
            ]
        )
    return markdown_table(
        "20 steps | chips | `--parallel` | TFLOP of a chip | at least, s "
        f"| {AT_SHARE}, s | exchanges | sent by a chip, GB | over one link, s",
        lines,
    )


def little_memory_table() -> str:
    """An image of SDXL on a v5e chip with less memory; times count FLOPs and what is fetched."""
    lines, chip = [], find_slice("v5e-1").chip
    for name, flags in LITTLE_MEMORY.items():
        if (row := results("tpu").get(f"program v5e-1 sdxl, {name} O0")) is None:
            continue
        compute = roofline_seconds(chip, row["flops"], 0)
        fetched = row.get("host_bytes", 0) / chip.host
        at_once = "group" in flags  # blocks are fetched while others compute
        least, estimated = (
            max(x, fetched) if at_once else x + fetched for x in (compute, estimate(compute))
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
        f"| {AT_SHARE}, s",
        lines,
    )


def unet_table() -> str:
    """The UNet's forward and backward pass on a v5e chip."""
    row = results("tpu")["program v5e-1 unet"]
    line = [
        "ours",
        f"{row['memory']['temporaries'] / 1e9:.2f} GB",
        f"{row['bytes_accessed'] / 1e9:.1f} GB",
        f"{row['hbm_bytes'] / 1e9:.1f} GB",
        f"{row['flops'] / 1e12:.2f} T",
    ]
    header = "| temporaries | bytes accessed | of them to and from HBM | FLOPs"
    return markdown_table(header, [line])


def gpu_memory_table() -> str:
    """Full fine-tuning on one GPU: memory as compiled for a chip as if it were alone."""
    lines, totals = [], {}
    parts = ("parameters", "optimizer", "ema", "frozen models", "batches", "temporaries")
    parts += ("padding", "outputs", "code")
    for gpu, pairs, variant in (
        ("24 GB", 32, "bf16, checkpointing"),
        ("24 GB", 32, "bf16"),
        ("40 GB", 64, "bf16"),
    ):
        row = results("train")[f"memory v5p-8 one chip, {pairs} pairs, ema full {variant}"]
        total, temporaries = sum(row[part] for part in parts) / GIB, row["temporaries"] / GIB
        flags = "`--gradient_checkpointing`" if "checkpointing" in variant else ""
        lines.append([gpu, str(pairs), flags, f"{total:.1f}", f"{temporaries:.1f}"])
        totals[pairs] = total
    more = totals[64] + 128 * (totals[64] - totals[32]) / 32
    lines.append(["80 GB", "192", "", f"about {more:.0f}, extrapolated", ""])
    header = "GPU | `--train_batch_size` | flags | memory, GiB | of which temporaries"
    return markdown_table(header, lines)


def attention_table() -> str:
    """Cycles of an attention layer."""
    lines = []
    for case in CASES:
        cells = [case]
        for variant in ("ours", "all three"):
            row = results("tpu")[f"attention {case}, {variant}"]
            cells += [f"{sum(row['kernels'].values()) / 1e3:.0f}", f"{row['rest'] / 1e3:.0f}"]
        lines.append(cells)
    return markdown_table(
        "an attention layer, thousand cycles | kernels | all else | blocks of 512: kernels "
        "| all else",
        lines,
    )


def convolution_table() -> str:
    """Cycles of 3x3 convolutions."""
    cells: dict[str, list[str]] = {}
    names = {"xla": "XLA", "matmuls": "matmuls", "int8": "in int8"}
    for case, row in rows_of(results("tpu"), "convolution").items():
        shape = case.partition(", ")[2]
        cells.setdefault(shape, []).extend(f"{row[name]['cycles'] / 1e3:.0f}" for name in names)
    header = [f"{chip}: {column}" for chip in CHIPS for column in names.values()]
    lines = [[shape, *figures] for shape, figures in cells.items()]
    return markdown_table(f"| {' | '.join(header)}", lines)


def options_table() -> str:
    """What compiler options change: cycles and HBM traffic, relative to the default options."""
    costs: dict[str, dict] = {}
    for case, row in rows_of(results("tpu"), "options").items():
        program, _, name = case.rpartition(", ")
        costs.setdefault(program, {})[name] = row
    names = [name for name in OPTIONS if name != "default"]
    lines = []
    for program, found in sorted(costs.items()):
        if "default" not in found:
            continue
        default, cells = found["default"], []
        for name in names:
            row = found.get(name)
            keys = ("cycles", "hbm_bytes") if row and row["tpu"] == default["tpu"] else ()
            cells.append(", ".join(f"{row[key] / default[key]:.2f}" for key in keys))
        if any(cells):
            lines.append([program, *cells])
    return markdown_table(f"| {' | '.join(names)}", lines)


def flops_cells(row: dict | None) -> list[str]:
    """Evaluations, TFLOP, and per chip least time and estimate; empty without a row."""
    if row is None:
        return [""] * 6
    bounds = [row["seconds"][chip] for chip in CHIPS]
    times = [cell for bound in bounds for cell in (seconds(bound), estimated_seconds(bound))]
    return [str(row["unet_evaluations"]), f"{row['flops'] / 1e12:.3g}", *times]


def acceleration_flops_table() -> str:
    """UNet evaluations, FLOPs and their time with each acceleration."""
    counts, lines = rows_of(results("tpu"), "acceleration"), []
    for name in dict.fromkeys(case.partition(", ")[2] for case in counts):
        found = [counts.get(f"{program}, {name}") for program in ("sdxl", "edit")]
        lines.append([name, *(cell for row in found for cell in flops_cells(row))])
    times = " | ".join(f"{chip}, at least | {chip}, {AT_SHARE}" for chip in CHIPS)
    columns = f"evaluations | TFLOP | {times}"
    return markdown_table(f"| SDXL: {columns} | edit: {columns}", lines)


def compiled_row(tpu: str, job: str) -> dict | None:
    """A compiled image or edit, of the highest of XLA's levels; None if it was not compiled."""
    rows = results("tpu")
    cases = (f"program {tpu} {job}{level}" for level in ("", " O1", " O0"))
    return next((rows[case] for case in cases if case in rows), None)


def compiled_cells(row: dict | None) -> list[str]:
    """Memory, traffic, least time and estimate of a compiled program; empty without a row."""
    if row is None:
        return [""] * 4
    if "flops" not in row:
        return ["does not fit", "", "", ""]
    chip = find_slice(row["tpu"]).chip
    compute = roofline_seconds(chip, row["flops"], 0, int8_flops=row["int8_flops"])
    times = [compute, max(compute, roofline_seconds(chip, 0, row["hbm_bytes"]))]
    memory, moved = f"{row['memory_total'] / GIB:.1f}", f"{row['hbm_bytes'] / 1e9:.0f} GB"
    if "optimization_level" in row["flags"]:  # the default level moves less
        moved = f"< {moved}"
    else:
        times = times[1:]
    return [memory, moved, *(time_range(times, write) for write in (seconds, estimated_seconds))]


def time_range(times: list[float], write: Callable[[float], str]) -> str:
    """Times from the least to the largest, each written by `write`, with one unit at the end."""
    cells = dict.fromkeys(write(time).removesuffix(" s") for time in times)
    return f"{' to '.join(cells)} s"


def acceleration_tpu_table(program: str) -> str:
    """Compiled programs with each acceleration. program: sdxl or edit."""
    lines = []
    for case in rows_of(results("tpu"), "acceleration"):
        job, _, name = case.partition(", ")
        if job == program:
            found = [compiled_row(f"{chip}-1", case) for chip in CHIPS]
            lines.append([name, *(cell for row in found for cell in compiled_cells(row))])
    titles = ("GiB", "HBM", "at least", AT_SHARE)
    header = [f"{chip}: {title}" for chip in CHIPS for title in titles]
    return markdown_table(f"| {' | '.join(header)}", lines)
