"""Flags and sizes."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from benchmarks.harness import TimingFlags

# In the order in which they are measured if figures of all are missing.
ROWS = (
    "train",
    "images",
    "image_batch",
    "edit",
    "gradient",
    "train_latents",
    "forward",
    "agreement",
)
# Images per second of SDXL, 1024 pixels, 20 steps, with TensorRT: NVIDIA's results per GPU of
# MLPerf Inference v4.1, offline scenario, {device: figure}.
PUBLISHED_IMAGES = {"NVIDIA H200": 2.18, "NVIDIA H100 80GB HBM3": 2.03}


class Sizes(NamedTuple):
    """Sizes of all rows: samples, pairs, pixels, denoising steps, images."""

    batch_size: int
    pairs: int
    resolution: int
    train_resolution: int
    image_size: int
    num_inference_steps: int
    num_images: int  # of SDXL at once


SIZES = {"full": Sizes(8, 16, 512, 256, 1024, 20, 8), "tiny": Sizes(2, 2, 64, 64, 64, 10, 2)}


@dataclass(frozen=True, kw_only=True)
class Config(TimingFlags):
    """Measure and write."""

    size: Literal["full", "tiny"] = "full"  # tiny: tiny models, also on a CPU
    minutes: float = 9.0  # rows that do not fit into this time are left out
    # in this order; default: all, the ones without figures of this device first
    rows: tuple[Literal[ROWS], ...] | None = None
    # eager: contiguous; channels_last: eager too; compiled: torch.compile; none: ours only
    pytorch: tuple[Literal["eager", "channels_last", "compiled"], ...] = (
        "eager",
        "channels_last",
        "compiled",
    )
    seconds: float = 1.0  # of a measurement, at least; one pass at least
    compile_only: bool = False  # compile into --cache_dir, so that the next call measures
    cache_dir: str = "~/.cache/benchmarks_gpu"  # of compiled programs; "": no cache
    profile: str = ""  # directory for a table of the kernels of each contender's pass
    # rows; "": benchmarks/results/gpu.json, for tiny models gpu_tiny.json in the current directory
    output: str = ""

    @property
    def results(self):
        """The file of the rows."""
        full = "benchmarks/results/gpu.json"
        return self.output or (full if self.size == "full" else "gpu_tiny.json")

    @property
    def sizes(self):
        """The Sizes of the rows."""
        return SIZES[self.size]
