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
    reference_image: str | None = None  # a second image of the edit; None: it is not read


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


@dataclass(frozen=True)
class Processes:
    """The processes that read a dataset together."""

    process_index: int = 0  # jax.process_index()
    process_count: int = 1  # jax.process_count()
    # jax.experimental.multihost_utils.process_allgather, to compare the processes' shards; None:
    # all processes have the same shards.
    all_gather: Callable[[np.ndarray], np.ndarray] | None = None


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

    @property
    def threads(self) -> int:
        """Number of decoding threads."""
        return self.num_threads or num_usable_cores()


def num_usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
