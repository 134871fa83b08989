"""The UNet against PyTorch diffusers' UNet, in turn in one run.

    python -m benchmarks.unet --rounds 4

times the forward pass (as in an edit) and the gradient of all parameters (as in training) of Stable
Diffusion 1.5's 8-channel UNet on a CPU in float32. PyTorch runs eager, and with torch.compile where
a C++ compiler is installed. Each measurement runs in its own process. Other work on the machine
slows down PyTorch most, as its threads wait for each other. Tiny, in a minute:

    python -m benchmarks.unet --tiny --resolution 64 --rounds 1 --output unet.json

The share of the peak is FLOPs (PyTorch's count) over what the fastest large matmul of the machine,
measured in the same run, does in that time. A row goes to benchmarks/results/unet.json. The
gradient needs 12 GB of memory, the forward pass half of that.
"""

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from benchmarks.harness import CpuFlags, measure_on_cpu, run_benchmark
from benchmarks.ours import our_contender
from benchmarks.pytorch import can_compile, torch_contender
from benchmarks.works import Work
from diffusers_flax.command_line import AtLeast


@dataclass(frozen=True, kw_only=True)
class Config(CpuFlags):
    batch_size: Annotated[int, AtLeast(1)] = 2  # samples
    rounds: Annotated[int, AtLeast(1)] = 7  # each contender is measured once in each
    seconds: float = 10.0  # of a measurement, at least; one pass at least
    torch_compile: bool = can_compile()  # needs a C++ compiler
    output: str = "benchmarks/results/unet.json"


def run(config):
    """Measure, write."""
    contenders = {"ours": our_contender, "torch eager": torch_contender}
    if config.torch_compile:
        contenders["torch compiled"] = partial(torch_contender, name="compiled")
    for name in ("forward", "gradient"):
        work = Work(name, config.resolution, config.batch_size, tiny=config.tiny)
        measure_on_cpu(work, contenders, config)


def main(args=None):
    """Command line."""
    run_benchmark(Config, run, __doc__, args)


if __name__ == "__main__":
    main()
