"""Where the time of the UNet goes on a CPU: a profile by kind of operation.

    python benchmarks/profile_unet.py

Traces one pass of what bench_unet.py times as ours, forward and with the gradient of all
parameters, and sums up what each operation of the compiled program took by the part of the model
that it comes from. Tiny, in half a minute:

    python benchmarks/profile_unet.py --case tiny --output profile.json

Writes benchmarks/results/profile_unet.json and prints a table; three minutes on two CPU cores.
"""

import collections
import re
import shlex
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax
from diffusers import UNet2DConditionModel

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.bench_data import write_json  # noqa: E402
from benchmarks.bench_unet import CASES, make_inputs, our_program  # noqa: E402
from benchmarks.full_size import command_line, describe_machine  # noqa: E402

# The first that is found in the name of an operation's place in the model.
KINDS = {
    "attention": r"attn\d/(cond|while)|ts,|sh->|st,",
    "convolutions": r"conv|proj_in|proj_out",
    "norms": r"norm",
    "matmuls": r"dot_general",
    "other": r"",
}
INSTRUCTION = re.compile(r'^\s*(?:ROOT )?%?([\w.\-]+) = .*op_name="([^"]*)"', re.M)


@dataclass(frozen=True)
class Config:
    case: Literal[tuple(CASES)] = "sd15_256"
    batch_size: int = 2  # samples
    output: str = "benchmarks/results/profile_unet.json"


def kind_of(place):
    """In what part of the model, "jit(predict)/FlaxUNet2DConditionModel/conv_in/..."."""
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, place))


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


def profile(program, args):
    """Trace a pass, after a first one.

    Returns:
        {kind: seconds}.
    """
    jax.block_until_ready(program(*args))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(program(*args))
        (file,) = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(file))
        places = dict(INSTRUCTION.findall(program.as_text()))
        seconds = dict.fromkeys(KINDS, 0.0)
        for name, own in own_seconds(data, places).items():
            seconds[kind_of(places[name])] += own
    return seconds


def format_table(figures):
    """Markdown; figures: {pass: {kind: seconds}}."""
    lines = ["| | " + " | ".join(KINDS) + " |", "|---" * (len(KINDS) + 1) + "|"]
    for name, seconds in figures.items():
        total = sum(seconds.values())
        shares = " | ".join(f"{seconds[kind] / total:.0%}" for kind in KINDS)
        lines.append(f"| {name}, {total:.2f} s | {shares} |")
    return "\n".join(lines)


def run(config):
    """Profile both passes, write, print."""
    if config.batch_size < 1:
        raise ValueError(f"batch_size={config.batch_size} must be at least 1")
    if jax.default_backend() != "cpu":
        raise ValueError("this is for CPUs; set JAX_PLATFORMS=cpu")
    machine = describe_machine(("jax", "jaxlib", "flax", "numpy"))
    case = CASES[config.case]
    inputs = make_inputs(case, config.batch_size)
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        UNet2DConditionModel(**case.config).save_pretrained(folder)
        for name in ("forward", "gradient"):
            figures[name] = profile(*our_program(folder, inputs, name == "gradient", False))
    command = shlex.join(["python", *sys.orig_argv[1:]])
    write_json({"command": command, "machine": machine, "seconds": figures}, config.output)
    print(f"\n{format_table(figures)}\n\nwrote {config.output}")


def main(args=None):
    """Command line."""
    command_line(Config, __doc__, run, args)


if __name__ == "__main__":
    main()
