"""Types of TPU, their slices, and the least time that a program takes on a chip.

tpu = find_slice("v5e-16")
devices = slice_devices(tpu)  # to compile for, without a TPU
"""

import importlib.util
import math
import os
from typing import NamedTuple

import jax
from jax.experimental.topologies import get_topology_desc


class Chip(NamedTuple):
    """A type of TPU.

    Source: Cloud TPU's documentation; for host "How to Scale Your Model"
    (jax-ml.github.io/scaling-book), part 2; memory is the compiler's limit.
    """

    topology: str  # its name in jax.experimental.topologies
    cores: int  # TensorCores per chip if the slice's name counts them, else 1
    flops: float  # peak in bfloat16, per second
    int8: float  # peak in int8, operations per second
    bandwidth: float  # of the memory, bytes per second
    interconnect: float  # sum over a chip's links, one direction, bytes per second
    memory: float  # usable by a program, GiB
    host: float = 15e9  # from the host's memory, bytes per second
    # Share of the bfloat16 peak that SDXL images of 20 steps reached in a published measurement.
    share: float | None = None


CHIPS = {
    "v4": Chip("v4", 2, 275e12, 275e12, 1.23e12, 0.3e12, 30.75),
    # diffusers' Flax classes: 2.33 s an image for a bound of 1.43 s (docs/sdxl.md)
    "v5e": Chip("v5e", 1, 197e12, 393e12, 0.82e12, 0.2e12, 15.75, share=0.61),
    "v5p": Chip("v5", 2, 459e12, 918e12, 2.8e12, 0.6e12, 95.74),
    # MLPerf Inference v4.1, tpu_v6_x4_flax: 1.36 images/s for a bound of 3.26
    "v6e": Chip("v6e", 1, 918e12, 1836e12, 1.64e12, 0.448e12, 31.25, 32e9, share=0.42),
}
# Milliseconds that the trainer's thread computes in a step on several hosts, with an average in
# every step: benchmarks/results/train.json, "host time, 2 processes".
HOST_MS = {"Stable Diffusion 1.5": 15, "SDXL": 38}
# Slices have three dimensions (v4, v5p) or two.
SHAPES_3D = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8")
SHAPES_2D = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")

# Without these settings the compiler looks for a TPU in the network, writes logs to /tmp, and runs
# in only one process at a time.
LIBTPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


class Slice(NamedTuple):
    """Connected chips and their hosts."""

    chip: Chip
    num_chips: int
    num_hosts: int
    shape: str


def find_slice(name):
    """The Slice of an accelerator type.

    Args:
        name: such as v4-32 or v5p-8, which count TensorCores, two per chip; or v5e-16 (also as
            v5litepod-16) or v6e-8, which count chips.

    Raises:
        ValueError: the name is unknown.
    """
    types = {}
    for family, chip in CHIPS.items():
        for shape in SHAPES_3D if chip.cores == 2 else SHAPES_2D:
            num_chips = math.prod(map(int, shape.split("x")))
            # Four chips per host; v5e and v6e slices of up to eight chips have one host.
            num_hosts = 1 if chip.cores == 1 and num_chips <= 8 else num_chips // 4
            types[f"{family}-{num_chips * chip.cores}"] = Slice(chip, num_chips, num_hosts, shape)
    name = name.replace("v5litepod-", "v5e-")
    if name not in types:
        raise ValueError(f"--tpu {name} is not known; known are {', '.join(types)}")
    return types[name]


def slice_devices(tpu):
    """The devices of a Slice, to compile for.

    Raises:
        ValueError: the compiler is not installed.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            "libtpu, the TPU's compiler, is not installed; get the one for this jax: "
            f'pip install "jax[tpu]=={jax.__version__}"'
        )
    for name, value in LIBTPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    options = {"chip_config_name": "megacore"} if tpu.chip.cores == 2 else {}
    if tpu.num_chips == 1:
        options["chips_per_host_bounds"] = (1, 1, 1)
    return get_topology_desc(f"{tpu.chip.topology}:{tpu.shape}", "tpu", **options).devices


def peak_share(chip):
    """Share of a Chip's peak for estimates: the published one, else the lowest of all chips."""
    return chip.share or min(other.share for other in CHIPS.values() if other.share)


def roofline_seconds(chip, flops, moved, sent=0, int8_flops=0):
    """The least time that a program can take on a Chip.

    Args:
        chip: Chip.
        flops: of the program, with int8_flops.
        moved, sent: bytes to and from the memory, and to other chips.
        int8_flops: how many of the FLOPs are in int8.

    Source: Roofline (Williams, Waterman, Patterson 2009), section 3.
    """
    compute = (flops - int8_flops) / chip.flops + int8_flops / chip.int8
    return max(compute, moved / chip.bandwidth, sent / chip.interconnect)
