"""Flags and sizes."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from benchmarks.harness import TimingFlags

ROWS = ("forward", "gradient", "train", "edit", "images", "agreement")


class Sizes(NamedTuple):
    """Sizes of all rows: samples, pairs, pixels, denoising steps."""

    batch_size: int
    pairs: int
    resolution: int
    train_resolution: int
    image_size: int
    num_inference_steps: int


FULL, TINY = Sizes(8, 16, 512, 256, 1024, 20), Sizes(2, 2, 64, 64, 64, 10)


@dataclass(frozen=True, kw_only=True)
class Config(TimingFlags):
    """Measure and write."""

    tiny: bool = False  # tiny models, to try this on a CPU
    rows: tuple[Literal[ROWS], ...] = ROWS
    # torch.compile takes minutes for a row; none: ours only
    pytorch: tuple[Literal["eager", "compiled"], ...] = ("eager",)
    seconds: float = 1.0  # of a measurement, at least; one pass at least
    output: str = "benchmarks/results/gpu.json"

    @property
    def sizes(self):
        """The Sizes of the rows."""
        return TINY if self.tiny else FULL
