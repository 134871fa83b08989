"""Tables of programs that are compiled for NVIDIA GPUs and not run, and of their estimates."""

from benchmarks.gpu_compiled import CASES, program_case
from benchmarks.rows import GIB, markdown_table, rows_of
from benchmarks.tables.cells import results
from diffusers_flax.compiling.cards import CARDS, USABLE_SHARE
from diffusers_flax.compiling.kernels import ALL_KINDS, MEASURED_SHARES


def cards_table() -> str:
    """The cards that compile_for.py knows."""
    lines = []
    for name, card in CARDS.items():
        line = [f"`{name}`", card.name.removeprefix("NVIDIA "), f"{card.flops / 1e12:.0f}"]
        line += [f"{card.int8 / 1e12:.0f}", f"{card.bandwidth / 1e9:.0f}"]
        line += [f"{card.num_bytes / 2**30:.1f}", f"{card.memory:.1f}"]
        line += [f"{card.interconnect / 1e9:.0f}", f"{card.capability}"]
        lines.append(line)
    return markdown_table(
        "`--gpu` | card | TFLOP/s in bfloat16 | int8 | GB/s of the memory | memory, GiB | usable "
        "| to another GPU, GB/s | compute capability",
        lines,
    )


def shares_table() -> str:
    """Measured kernels on an H200, and their share of the least time."""
    rows, lines = rows_of(results("gpu_compiled"), "shares"), []
    for kind in ALL_KINDS:
        if any(kind in row["kinds"] for row in rows.values()):
            cells = []
            for row in rows.values():
                cell = row["kinds"][kind]
                share = cell["least_seconds"] / cell["seconds"]
                cells.append(f"{cell['seconds'] * 1e3:.1f} ({share:.2f})")
            lines.append([kind, *cells, f"{MEASURED_SHARES[kind]:.2f}"])
    totals = [f"{row['kernel_seconds'] * 1e3:.1f}" for row in rows.values()]
    lines.append(["all kernels", *totals, ""])
    whole = [f"{row['seconds'] * 1e3:.1f}" for row in rows.values()]
    lines.append(["the whole program", *whole, ""])
    return markdown_table(f"H200, ms (share) | {' | '.join(rows)} | share of all three", lines)


MEASURED = {  # case: the program that was measured
    "full 256": "optimizer step, 256 px",
    "forward": "UNet, 512 px",
    "gradient": "UNet with gradients, 512 px",
    "edit": "edit, 512 px, 20 steps",
    "image": "SDXL image, 1024 px, 20 steps",
}


def estimates_table() -> str:
    """Estimates of programs that are compiled without a GPU, beside their measured time."""
    lines = []
    for row in rows_of(results("gpu_compiled"), "measured").values():
        least = sum(cells["least_seconds"] for cells in row["kernels"].values())
        estimate, seconds = row["estimated_seconds"], row["seconds"]
        line = [row["gpu"].upper(), f"{MEASURED[row['case']]}, {row['batch_size']} at once"]
        line += [f"{x * 1e3:.3g}" for x in (least, estimate, seconds)]
        lines.append([*line, f"{estimate / seconds - 1:+.0%}"])
    return markdown_table(
        "GPU | program | at least, ms | by estimate, ms | measured, ms | the estimate is off by",
        lines,
    )


MOVES = "matmul", "element-wise", "convolution", "reduction", "attention", "concatenation"
MOVES += "transpose", "copy"
LEAST = 0.05e9  # bytes of a kind that a table shows


def moves(columns: dict[str, dict], with_kernels: bool) -> str:
    """Bytes of each kind of kernel, and the estimated time.

    Args:
        columns: {heading: row of the results}.
        with_kernels: kernels of each kind stand in columns beside the bytes.
    """
    tables = [row["kernels"] for row in columns.values()]

    def cells(kinds):
        cells = []
        for name, unit in (("bytes", 1e9), ("kernels", 1))[: 1 + with_kernels]:
            sums = [sum(t[kind][name] for kind in kinds if kind in t) / unit for t in tables]
            cells += [f"{x:,.1f}" if name == "bytes" else f"{x:,.0f}" for x in sums]
        return cells

    shown = [x for x in MOVES if any(t.get(x, {"bytes": 0})["bytes"] >= LEAST for t in tables)]
    lines = [[kind, *cells([kind])] for kind in shown] + [["all", *cells(ALL_KINDS)]]
    empty = [""] * len(columns) * with_kernels
    if not with_kernels:
        counts = [sum(row["kernels"] for row in table.values()) for table in tables]
        lines.append(["kernels", *(f"{count:,.0f}" for count in counts)])
    times = [f"{row['estimated_seconds'] * 1e3:.0f} ms" for row in columns.values()]
    lines.append(["estimated time", *times, *empty])
    lines.append(["commit", *(row["commit"] for row in columns.values()), *empty])
    heading = f"GB | {' | '.join(columns)}"
    if with_kernels:
        heading += "".join(f" | kernels, {name}" for name in columns)
    return markdown_table(heading, lines)


def image_moves_table() -> str:
    """What an SDXL image and an edit move, before and with the changes of docs/gpu.md."""
    rows = results("gpu_compiled")
    return moves(
        {
            "SDXL, 1024 px, before": rows["moves: image, before"],
            "SDXL, with": rows[program_case("image", 1)],
            "edit, 512 px, before": rows["moves: edit, before"],
            "edit, with": rows[program_case("edit", 1)],
        },
        with_kernels=False,
    )


def step_moves_table() -> str:
    """What a training step moves, before and with the changes of docs/gpu.md."""
    rows = results("gpu_compiled")
    columns = {"before": rows["moves: step, before"], "with": rows["moves: step, after"]}
    return moves(columns, with_kernels=True)


SIZES = (8, 12, 16, 24, 40, 80)  # of GPUs, GiB
EXTRAPOLATED = 4  # times the largest compiled batch
WORKS = {  # case of benchmarks.gpu_compiled: (work, flags that matter)
    "full 256": ("full fine-tuning, Stable Diffusion 1.5, 256 px", ""),
    "full 256, small": ("the same", "--ema none --gradient_checkpointing --cache_latents"),
    "full xl 512": ("full fine-tuning, SDXL, 512 px", "--gradient_checkpointing --cache_latents"),
    "lora 256": ("LoRA, Stable Diffusion 1.5, 256 px", ""),
    "lora 512": ("LoRA, Stable Diffusion 1.5, 512 px", ""),
    "lora 512, checkpointed": ("the same", "--gradient_checkpointing --cache_latents"),
    "lora xl 512": ("LoRA, SDXL, 512 px", "--gradient_checkpointing --cache_latents"),
    "lora xl 512, int8": (
        "the same",
        "--gradient_checkpointing --cache_latents --storage int8",
    ),
    "lora xl 1024": ("LoRA, SDXL, 1024 px", "--gradient_checkpointing --cache_latents"),
    "edit": ("edits, Stable Diffusion 1.5, 512 px", ""),
    "image": ("SDXL images, 1024 px", ""),
    "image, int8, tiles": ("the same", "--storage int8 --vae_tile 512"),
}


def compiled_batches(name: str) -> dict[int, dict]:
    """{batch: row} of a case of benchmarks.gpu_compiled."""
    rows = results("gpu_compiled")
    cases = {size: program_case(name, size) for size in CASES[name][1]}
    return {size: rows[case] for size, case in cases.items() if case in rows}


def largest_batch(totals: dict[int, int], usable: float, more: float) -> str:
    """The largest batch that fits, on lines between compiled batches; "~": beyond the largest.

    Args:
        totals: {batch: bytes} of compiled batches, beginning with the smallest that there is.
        usable: bytes.
        more: bytes of each image or pair beyond the largest compiled batch.
    """
    sizes = sorted(totals)
    fitting = [size for size in sizes if totals[size] <= usable]
    if not fitting:
        return "no"
    start = fitting[-1]
    if start < sizes[-1]:
        end = sizes[sizes.index(start) + 1]
        more = (totals[end] - totals[start]) / (end - start)
    batch = int(start + (usable - totals[start]) / more)
    if batch <= sizes[-1]:
        return f"{batch}"
    if batch > (limit := EXTRAPOLATED * sizes[-1]):
        return f"over {limit}"
    unit = max(1, 10 ** (len(f"{batch}") - 1) // 2)
    return f"~{batch // unit * unit}"


def fits_rows(names) -> list[list[str]]:
    """Rows of fits_table, without cases that are not compiled."""
    lines = []
    for name in names:
        rows = compiled_batches(name)
        if not rows:
            continue
        totals = {size: row["memory_total"] for size, row in rows.items()}
        # As if all temporaries grew with the batch: some are there for one image, too.
        more = rows[max(rows)]["memory"]["temporaries"] / max(rows)
        work, flags = WORKS[name]
        cells = [largest_batch(totals, USABLE_SHARE * size * GIB, more) for size in SIZES]
        used = ", ".join(f"{size}: {total / GIB:.1f}" for size, total in totals.items())
        lines.append([work, f"`{flags}`" if flags else "", used, *cells])
    return lines


def fits_table() -> str:
    """The largest batch of each work on GPUs of each size."""
    sizes = " | ".join(f"{size} GB" for size in SIZES)
    return markdown_table(f"work | flags | batch: GiB | {sizes}", fits_rows(WORKS))


def training_fits_table() -> str:
    """The training rows of fits_table."""
    sizes = " | ".join(f"{size} GB" for size in SIZES)
    names = [name for name in WORKS if name.startswith(("full", "lora"))]
    return markdown_table(f"work | flags | batch: GiB | {sizes}", fits_rows(names))
