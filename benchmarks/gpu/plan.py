"""Flags, sizes and the plan of a run, and its clock."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple


class Plan(NamedTuple):
    """Seconds of a row on an H100: compilation by XLA and PyTorch, measurement.

    Measured, or estimated: the gradient and SDXL image of ours, PyTorch's last three.
    """

    ours: float
    torch: float
    measure: float


PLANS = {
    "forward": Plan(91, 141, 20),
    "gradient": Plan(150, 172, 20),
    "train": Plan(177, 170, 20),
    "edit": Plan(75, 120, 15),
    "images": Plan(200, 150, 50),
    "agreement": Plan(60, 0, 1),
}
START_SECONDS = 40  # planned for the start of the process, tiny models and PyTorch's modules


class Size(NamedTuple):
    """Sizes of all rows: samples, pairs, pixels, denoising steps."""

    batch_size: int
    pairs: int
    resolution: int
    train_resolution: int
    image_size: int
    num_inference_steps: int


SIZES = {"full": Size(8, 16, 512, 256, 1024, 20), "tiny": Size(2, 2, 64, 64, 64, 10)}


@dataclass(frozen=True)
class Config:
    """Measure and write."""

    size: Literal["full", "tiny"] = "full"
    rows: tuple[Literal[tuple(PLANS)], ...] = tuple(PLANS)
    # torch.compile takes minutes for a row; none: ours only
    pytorch: tuple[Literal["eager", "compiled"], ...] = ("eager",)
    rounds: int = 2  # each contender is measured once in each
    seconds: float = 1.0  # of a measurement, at least; one pass at least
    limit: float = 480.0  # seconds of the whole run, from its start
    output: str = "benchmarks/results/gpu.json"


def process_seconds():
    """Seconds since the start of this process, imports included."""
    started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]  # clock ticks
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(started) / os.sysconf("SC_CLK_TCK")


def say(text):
    """Print a line that begins with the time since the start."""
    print(f"[{process_seconds():4.0f} s] {text}", flush=True)


def seconds_left(config):
    """Until --limit."""
    return config.limit - process_seconds()


def planned_rows(config):
    """The names of the rows whose planned time fits into --limit; prints the plan.

    Our programs compile at the same time, so the longest counts; PyTorch's one after the other.
    """
    if config.size == "tiny":
        say("the plan is for --size full on an H100; --size tiny takes less")
    chosen, torch_seconds = [], 0.0
    for name in config.rows:
        plan = PLANS[name]
        rows = [PLANS[x] for x in (*chosen, name)]
        torch_seconds = sum(x.torch for x in rows) if "compiled" in config.pytorch else 0.0
        total = START_SECONDS + max(torch_seconds, *(x.ours for x in rows))
        total += sum(x.measure for x in rows)
        if total > config.limit:
            say(f"{name} is left out: the run would take about {total:.0f} s; see --limit")
            continue
        chosen.append(name)
        say(
            f"{name}: planned {plan.ours:.0f} s of compilation by XLA, {plan.torch:.0f} s by "
            f"PyTorch, {plan.measure:.0f} s of measurement; {total:.0f} s so far"
        )
    return chosen
