"""Edited images and SDXL images against PyTorch diffusers' pipelines.

    python -m benchmarks.images edit --rounds 3
    python -m benchmarks.images sdxl

times an edit of 20 steps with Stable Diffusion 1.5's shapes, or an SDXL image of 4 steps, with
random weights, in float32 on a CPU. Each measurement runs in its own process: the time from its
start to the first image ("first", with compiling), then images for --seconds. The share of the peak
counts the UNet's FLOPs only. `edit` needs 12 GB of memory, `sdxl` 18 GB; a quarter of an hour on
two otherwise idle cores. With tiny models, a minute each:

    python -m benchmarks.images edit --tiny --resolution 64 --rounds 1 --output images.json

A row goes to benchmarks/results/images.json.
"""

from dataclasses import dataclass

from benchmarks.harness import CpuFlags, measure_on_cpu, run_benchmark
from benchmarks.ours import our_contender
from benchmarks.pytorch import torch_contender
from benchmarks.works import Work


@dataclass(frozen=True, kw_only=True)
class EditTiming(CpuFlags):
    """Edited images with Stable Diffusion 1.5."""

    num_inference_steps: int = 20
    output: str = "benchmarks/results/images.json"


@dataclass(frozen=True, kw_only=True)
class SdxlTiming(EditTiming):
    """SDXL images from text."""

    num_inference_steps: int = 4


def run(config):
    """Measure, write."""
    name = "sdxl" if isinstance(config, SdxlTiming) else "edit"
    steps = config.num_inference_steps
    work = Work(name, config.resolution, num_inference_steps=steps, tiny=config.tiny)
    contenders = {"ours": our_contender, "torch eager": torch_contender}
    measure_on_cpu(work, contenders, config)


SUBCOMMANDS = {"edit": EditTiming, "sdxl": SdxlTiming}


def main(args=None):
    """Command line."""
    run_benchmark(SUBCOMMANDS, run, __doc__, args)


if __name__ == "__main__":
    main()
