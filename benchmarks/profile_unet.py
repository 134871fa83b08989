"""Where the time of the UNet goes on a CPU, ours and PyTorch's, by kind of operation.

    python benchmarks/profile_unet.py

Traces one pass of what bench_unet.py times, forward and with the gradient of all parameters: of
ours every operation of the compiled program is counted to the part of the model that it comes from,
of PyTorch's (eager) to the function that was called. Tiny, in half a minute:

    python benchmarks/profile_unet.py --case tiny --output profile.json

Writes benchmarks/results/profile_unet.json and prints a table; three minutes on two CPU cores.
"""

import collections
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax
import torch
from diffusers import UNet2DConditionModel

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.bench_unet import (  # noqa: E402
    CASES,
    make_inputs,
    our_program,
    torch_contenders,
)
from benchmarks.full_size import (  # noqa: E402
    check_replaced,
    command_line,
    describe_machine,
    report,
)
from benchmarks.side_by_side import PACKAGES  # noqa: E402

# The first that is found in the name of an operation's place in the model.
KINDS = {
    "attention": r"attn\d/(cond|while)|ts,|sh->|st,",
    "convolutions": r"conv|proj_in|proj_out",
    "norms": r"norm",
    "matmuls": r"dot_general",
    "other": r"",
}
TORCH_KINDS = {
    "attention": "scaled_dot_product",
    "convolutions": "convolution",
    "norms": "norm",
    "matmuls": r"::(addmm|mm|bmm)$",
    "other": "",
}
INSTRUCTION = re.compile(r'^\s*(?:ROOT )?%?([\w.\-]+) = .*op_name="([^"]*)"', re.M)


@dataclass(frozen=True)
class Config:
    case: Literal[tuple(CASES)] = "sd15_256"
    batch_size: int = 2  # samples
    output: str = "benchmarks/results/profile_unet.json"


def by_kind(seconds, kinds):
    """{name: seconds} summed up, {kind: seconds}; kinds: KINDS or TORCH_KINDS."""
    sums = dict.fromkeys(kinds, 0.0)
    for name, own in seconds:
        sums[next(kind for kind, pattern in kinds.items() if re.search(pattern, name))] += own
    return sums


def own_seconds(profile, names):
    """{name: seconds} of the operations of a jax.profiler.ProfileData.

    An operation's time is without those inside it, and a loop's is that of its operations.
    """
    seconds = collections.Counter()
    for line in (line for plane in profile.planes for line in plane.lines):
        inside = []  # (name, end) of the operations that have begun
        for event in sorted(line.events, key=lambda e: (e.start_ns, -e.duration_ns)):
            if event.name not in names:
                continue
            while inside and event.start_ns >= inside[-1][1]:
                inside.pop()
            if inside:
                seconds[inside[-1][0]] -= event.duration_ns / 1e9
            seconds[event.name] += event.duration_ns / 1e9
            inside.append((event.name, event.start_ns + event.duration_ns))
    return seconds


def profile_ours(program, args):
    """{kind: seconds} of a pass, after a first one."""
    jax.block_until_ready(program(*args))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(program(*args))
        (file,) = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(file))
        places = dict(INSTRUCTION.findall(program.as_text()))
    seconds = own_seconds(data, places)
    return by_kind(((places[name], own) for name, own in seconds.items()), KINDS)


def profile_theirs(run):
    """{kind: seconds} of a pass, after a first one; run does one."""
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
        run()
    averages = trace.key_averages()
    return by_kind(((x.key, x.self_cpu_time_total / 1e6) for x in averages), TORCH_KINDS)


def format_table(figures):
    """Markdown, in seconds; figures: {pass: {whose: {kind: seconds}}}."""
    lines = ["| | | " + " | ".join([*KINDS, "all"]) + " |", "|---" * (len(KINDS) + 3) + "|"]
    for name, contenders in figures.items():
        for whose, seconds in contenders.items():
            numbers = [*(seconds[kind] for kind in KINDS), sum(seconds.values())]
            lines.append(f"| {name} | {whose} | {' | '.join(f'{x:.2f}' for x in numbers)} |")
    return "\n".join(lines)


def run(config):
    """Profile both passes, write, print."""
    if config.batch_size < 1:
        raise ValueError(f"batch_size={config.batch_size} must be at least 1")
    if jax.default_backend() != "cpu":
        raise ValueError("this is for CPUs; set JAX_PLATFORMS=cpu")
    check_replaced(config.output)
    machine = describe_machine(PACKAGES)
    case = CASES[config.case]
    inputs = make_inputs(case, config.batch_size)
    arguments = jax.tree.map(torch.from_numpy, inputs)
    unet = UNet2DConditionModel(**case.config)
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        unet.save_pretrained(folder)
        for name in ("forward", "gradient"):
            with_gradient = name == "gradient"
            ours = profile_ours(*our_program(folder, inputs, with_gradient, False))
            theirs = torch_contenders(unet, arguments, with_gradient, False, False)
            prepare, run_theirs = theirs["torch eager"]
            prepare()
            figures[name] = {"ours": ours, "torch eager": profile_theirs(run_theirs)}
    report(format_table(figures), config.output, machine=machine, seconds=figures)


def main(args=None):
    """Command line."""
    command_line(Config, __doc__, run, args)


if __name__ == "__main__":
    main()
