"""Tables of programs that are compiled for NVIDIA GPUs and not run, and of their estimates."""

from benchmarks.rows import markdown_table, rows_of
from benchmarks.tables.cells import results
from compiling.cards import CARDS
from compiling.kernels import ALL_KINDS, MEASURED_SHARES


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
