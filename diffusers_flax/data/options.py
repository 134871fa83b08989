"""Options of ParquetImagePairs and Mixture that travel together."""

import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image

RESAMPLING = {
    "dct": Image.Resampling.LANCZOS,  # after libjpeg has decoded at a reduced scale
    "lanczos": Image.Resampling.LANCZOS,
    "bicubic": Image.Resampling.BICUBIC,
}


@dataclass(frozen=True)
class Columns:
    """Names of a dataset's columns; "": as in the nearest of known_sets.KNOWN_SETS."""

    original_image: str = ""
    edited_image: str = ""
    edit_prompt: str = ""  # the instruction, or a list of several to draw from
    mask: str | None = None  # "": one of shards.MASK_COLUMNS; None: masks are not read


@dataclass(frozen=True)
class Transform:
    """From stored images to the images of a batch."""

    resolution: int = 256  # side of the square images, pixels
    # (width, height) of each size to choose from, see buckets.bucket_sizes; None: only the square.
    sizes: tuple[tuple[int, int], ...] | None = None
    random_crop: bool = True  # at a random position along the longer side, else in the centre
    random_flip: bool = True  # mirror half of the pairs
    resample: str = "dct"  # "dct", "lanczos" or "bicubic", see decoding.decode_pair
    micro_conditioning: bool = False  # also yield the time ids of SDXL

    def __post_init__(self):
        check_at_least(1, resolution=self.resolution)
        if self.resample not in RESAMPLING:
            raise ValueError(
                f"resample={self.resample} is unknown; use one of {', '.join(RESAMPLING)}"
            )


@dataclass(frozen=True)
class Processes:
    """The processes that read a dataset together."""

    process_index: int = 0  # jax.process_index()
    process_count: int = 1  # jax.process_count()
    # jax.experimental.multihost_utils.process_allgather, to compare the processes' shards; None:
    # all processes have the same shards.
    all_gather: Callable[[np.ndarray], np.ndarray] | None = None

    def __post_init__(self):
        check_at_least(1, process_count=self.process_count)
        if not 0 <= self.process_index < self.process_count:
            raise ValueError(
                f"process_index={self.process_index} must be from 0 to process_count - 1 = "
                f"{self.process_count - 1}"
            )


@dataclass(frozen=True)
class Reading:
    """How rows are read."""

    max_rows: int | None = None  # only the first N of a directory, over all processes; None: all
    shuffle_buffer: int = 4096  # encoded pairs to draw from, over all processes
    num_threads: int = 0  # decoding threads; 0: one per core
    prefetch_batches: int = 2  # batches decoded ahead of the consumer
    # Largest fraction of pairs that cannot be used, in [0, 1]. It is tested as if at least
    # reading.MIN_ROWS_FOR_BAD_FRACTION pairs were read, or a global epoch if that is less.
    max_bad_fraction: float = 0.1

    def __post_init__(self):
        check_at_least(1, max_rows=self.max_rows, prefetch_batches=self.prefetch_batches)
        check_at_least(0, shuffle_buffer=self.shuffle_buffer, num_threads=self.num_threads)
        if not 0 <= self.max_bad_fraction <= 1:
            raise ValueError(f"max_bad_fraction={self.max_bad_fraction} must be from 0 to 1")

    @property
    def threads(self) -> int:
        """Number of decoding threads."""
        return self.num_threads or num_usable_cores()


def check_at_least(lowest: int, **numbers: int | None) -> None:
    """Raise a ValueError for a number below the lowest; None passes."""
    for name, value in numbers.items():
        if value is not None and value < lowest:
            raise ValueError(f"{name}={value} must be at least {lowest}")


def num_usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
