"""The UNet against PyTorch diffusers' UNet, alternating in one run.

    python -m benchmarks.unet --rounds 4

times the forward pass (as in an edit) and the gradient of all parameters (as in training) of Stable
Diffusion 1.5's 8-channel UNet on a CPU in float32. PyTorch runs eager, eager with channels_last,
and with torch.compile where a C++ compiler is installed. Other work on the machine slows down
PyTorch most, as its threads wait for each other. Tiny, in a minute:

    python -m benchmarks.unet --tiny --resolution 64 --rounds 1 --output unet.json

The share of the peak is FLOPs (PyTorch's count) over what the fastest large matmul of the machine,
measured in the same run, does in that time. A row goes to benchmarks/results/unet.json. The
gradient needs 14 GB of memory, the forward pass half of that.
"""

import gc
from dataclasses import dataclass
from typing import Annotated

import torch

from benchmarks.harness import (
    Pixels,
    TimingFlags,
    check_cpu,
    describe_machine,
    first_seconds,
    run_benchmark,
    time_in_this_process,
    write_contenders,
)
from benchmarks.ours import our_contender
from benchmarks.pytorch import NAMES, can_compile, torch_contenders
from benchmarks.works import Work
from diffusers_flax.command_line import AtLeast


@dataclass(frozen=True, kw_only=True)
class Config(TimingFlags):
    tiny: bool = False  # a tiny UNet, to try this
    resolution: Pixels = 256  # pixels
    batch_size: Annotated[int, AtLeast(1)] = 2  # samples
    rounds: Annotated[int, AtLeast(1)] = 7  # each contender is measured once in each
    seconds: float = 3.0  # of a measurement, at least; one pass at least
    torch_compile: bool = can_compile()  # needs a C++ compiler
    output: str = "benchmarks/results/unet.json"


def run(config):
    """Measure, write."""
    check_cpu()
    machine = describe_machine()
    names = NAMES if config.torch_compile else NAMES[:2]
    for name in ("forward", "gradient"):
        torch.manual_seed(0)
        work = Work(name, config.resolution, config.batch_size, tiny=config.tiny)
        contenders = {"ours": ((lambda: None), our_contender(work))}
        theirs = torch_contenders(work, names, "cpu")
        contenders |= {f"torch {name}": theirs[name] for name in names}
        row = {
            "batch_size": config.batch_size,
            "dtype": "float32",
            "flops": work.count_flops(),
            "first_seconds": first_seconds(contenders),
            "seconds": time_in_this_process(contenders, config),
        }
        write_contenders(work.case, row, machine, config.output)
        del contenders, theirs
        gc.collect()


def main(args=None):
    """Command line."""
    run_benchmark(Config, run, __doc__, args)


if __name__ == "__main__":
    main()
