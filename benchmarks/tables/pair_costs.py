"""Table of what pairs of make_pairs.py take, by its compiled programs, which are not run."""

from benchmarks.gpu_compiled import PAIRS, program_case
from benchmarks.rows import GIB, markdown_table
from benchmarks.tables.cells import estimate, results
from diffusers_flax.compiling.chips import CHIPS, roofline_seconds
from diffusers_flax.compiling.pairs import TPU_PASSES

SAMPLES_PER_PAIR = 43  # samples for a kept pair of the published set, see docs/pairs.md
PRICES = {"v5e": 1.2, "H100": 2.69}  # dollars for an hour of a chip, see docs/pairs.md
PAIRS_AT_ONCE = 4


def pair_costs_table() -> str:
    """Images per second, CLIP's part, hours and dollars for 1,000 kept pairs.

    A v5e's times count FLOPs alone, an H100's its kernels.
    """
    lines, v5e = [], CHIPS["v5e"]
    for name in PAIRS:
        row = results("gpu_compiled")[program_case(name, PAIRS_AT_ONCE)]
        clip = roofline_seconds(v5e, TPU_PASSES * row["clip_flops"], 0)
        bounds = roofline_seconds(v5e, row["flops"], 0), clip
        times = {
            "v5e": (sum(bounds), *(estimate(bound, v5e) for bound in bounds)),
            "H100": (
                row["step_seconds"] + row["clip_seconds"],
                *(row[f"{kind}estimated_seconds"] for kind in ("", "clip_")),
            ),
        }
        for chip, (least, images, scores) in times.items():
            seconds = images + scores
            hours = 1000 * SAMPLES_PER_PAIR / PAIRS_AT_ONCE * seconds / 3600
            line = [name.removeprefix("pairs, "), chip, f"{2 * PAIRS_AT_ONCE / least:.3g}"]
            line += [f"{2 * PAIRS_AT_ONCE / seconds:.2g}", f"{scores / seconds:.0%}"]
            line += [f"{hours:#.2g}".rstrip("."), f"{hours * PRICES[chip]:#.2g}".rstrip(".")]
            compiled = row if chip == "H100" else results("tpu").get(f"program v5e-1 {name} O1")
            memory = f"{compiled['memory_total'] / GIB:.1f}" if compiled else ""
            lines.append([*line, memory])
    return markdown_table(
        "Stable Diffusion 1.5, 512 px | chip | images/s, at most | images/s, estimate "
        "| of the time CLIP | hours for 1,000 kept pairs | dollars | memory, GiB",
        lines,
    )
