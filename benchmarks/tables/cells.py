"""What the tables have in common: rows of results, cells."""

from functools import cache

from benchmarks.rows import GIB, ROOT, read_rows
from diffusers_flax.compiling.chips import Chip, peak_share


@cache
def results(name: str) -> dict:
    """The rows of benchmarks/results/NAME.json."""
    return read_rows(ROOT / "benchmarks" / "results" / f"{name}.json")


def seconds(value: float) -> str:
    """A time with three digits."""
    return f"{value:.3g} s"


def at_share(chip: Chip) -> str:
    """The title of the column of estimates beside the bounds of a chip."""
    return f"at {peak_share(chip):.0%} of the peak"


def estimate(bound: float, chip: Chip) -> float:
    """Estimated time of a program; bound: its time at the chip's peak."""
    return bound / peak_share(chip)


def estimated_seconds(bound: float, chip: Chip) -> str:
    """The estimate with two digits, as many as a published share has."""
    return f"{estimate(bound, chip):#.2g}".rstrip(".") + " s"


def spread(low: float, middle: float, high: float, digits: int = 2) -> str:
    """A middle value, such as the median, and the range."""
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def median_spread(figures: dict, digits: int = 2) -> str:
    """The median and the range of a measure's figures."""
    return spread(figures["min"], figures["median"], figures["max"], digits)


def edit_cells(row: dict, digits: int = 3) -> list[str]:
    """Error and accuracy of edits."""
    return [f"{row[x]:.{digits}f}" for x in ("edit_error_ratio", "instruction_accuracy")]


def memory_cell(row: dict) -> str:
    """GiB of a program and of the chip."""
    return f"{row['memory_total'] / GIB:.1f} of {row['memory_usable'] / GIB:.2f}"
