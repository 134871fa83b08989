"""TPU chips and NVIDIA GPUs, and how to compile for them without having one.

target = find_target("v5e-16")                # or "h100x8"
devices = target_devices(target)
with traced_for(target.chip): lowered = jax.pmap(f, devices=devices).lower(*shapes)
"""

import importlib
import math
import os
import re
import sys
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import jax
import jaxlib
from jax.experimental.topologies import get_topology_desc

from diffusers_flax.models.attention import tracing_for

GIB = 2**30
# Of a GPU's memory, what a program can use: CUDA's context and the kernels of cuDNN and cuBLAS take
# about 1 GB, and the allocator leaves gaps.
USABLE_SHARE = 0.92


class Card(NamedTuple):
    """What XLA's compiler has to know of an NVIDIA GPU.

    Source: XLA's files of targets (openxla/xla, xla/backends/gpu/target_config/specs: size and
    bandwidth of the memory, cores, clock, caches) for the A100, H100, H200 and RTX PRO 6000;
    otherwise NVIDIA's data sheets and its papers on the architectures.
    """

    capability: float  # CUDA's compute capability
    cores: int  # streaming multiprocessors
    units: int  # float32 units of a core
    clock: float  # GHz
    l2: int  # cache, MiB
    shared: int  # memory of a core, KiB
    threads: int = 2048  # most of a core


class Chip(NamedTuple):
    """A TPU chip or an NVIDIA GPU. Rates are peaks, per second.

    Source: Cloud TPU's documentation, for host "How to Scale Your Model"
    (jax-ml.github.io/scaling-book), part 2; NVIDIA's data sheets, for dense matrices with sums in
    float32. A TPU's memory is the compiler's limit.
    """

    name: str  # of a TPU in jax.experimental.topologies
    flops: float  # in bfloat16; a GPU computes float32 as TF32 at half of it
    int8: float  # operations
    bandwidth: float  # of the memory, bytes
    interconnect: float  # bytes in one direction: sum over a TPU's links; NVLink or PCIe
    host: float  # from the host's memory, bytes
    num_bytes: float  # of the memory
    card: Card | None = None  # None: a TPU
    cores: int = 1  # TensorCores per chip if the slice's name counts them
    # Share of a TPU's peak that SDXL images of 20 steps reached in a published measurement.
    share: float = 0.42  # the lowest one, for chips without a measurement

    @property
    def memory(self):
        """Bytes that a program can use."""
        return self.num_bytes if self.card is None else USABLE_SHARE * self.num_bytes


TPUS = {
    "v4": Chip("v4", 275e12, 275e12, 1.23e12, 0.3e12, 15e9, 30.75 * GIB, cores=2),
    # diffusers' Flax classes: 2.33 s an image for a bound of 1.43 s (docs/sdxl.md)
    "v5e": Chip("v5e", 197e12, 393e12, 0.82e12, 0.2e12, 15e9, 15.75 * GIB, share=0.61),
    "v5p": Chip("v5", 459e12, 918e12, 2.8e12, 0.6e12, 15e9, 95.74 * GIB, cores=2),
    # MLPerf Inference v4.1, tpu_v6_x4_flax: 1.36 images/s for a bound of 3.26
    "v6e": Chip("v6e", 918e12, 1836e12, 1.64e12, 0.448e12, 32e9, 31.25 * GIB),
}
A100, HOPPER = Card(8.0, 108, 64, 1.41, 40, 164), Card(9.0, 132, 128, 1.98, 50, 228)
L4, RTX4090 = Card(8.9, 58, 128, 2.04, 48, 100, 1536), Card(8.9, 128, 128, 2.52, 72, 100, 1536)
BLACKWELL = Card(12.0, 188, 128, 2.6, 128, 128, 1536)
GPUS = {
    "a100_40": Chip("A100-SXM4-40GB", 312e12, 624e12, 1.5552e12, 3e11, 32e9, 42_331_013_120, A100),
    "a100_80": Chip("A100-SXM4-80GB", 312e12, 624e12, 2.03904e12, 3e11, 32e9, 85_100_068_864, A100),
    "h100": Chip("H100", 989.4e12, 1978.9e12, 3.35232e12, 450e9, 64e9, 84_942_979_072, HOPPER),
    "h200": Chip("H200", 989.4e12, 1978.9e12, 4.8e12, 450e9, 64e9, 151_397_597_184, HOPPER),
    "l4": Chip("L4", 121e12, 242e12, 0.3e12, 32e9, 32e9, 24_152_899_584, L4),
    "rtx4090": Chip("RTX 4090", 165.2e12, 660.6e12, 1.008e12, 32e9, 32e9, 25_757_220_864, RTX4090),
    "rtx6000pro": Chip(
        *("RTX PRO 6000 Blackwell Workstation Edition", 503.8e12, 1007.6e12, 1.792e12, 64e9, 64e9),
        *(103_079_215_104, BLACKWELL),
    ),
}
# Slices have three dimensions (v4, v5p) or two.
SHAPES_3D = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8")
SHAPES_2D = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")


class Target(NamedTuple):
    """Chips of one type to compile for."""

    chip: Chip
    num_chips: int
    shape: str = ""  # of a TPU slice


def find_target(name):
    """The Target of a name.

    Args:
        name: of a TPU slice, such as v4-32 or v5p-8, which count TensorCores, two per chip, or
            v5e-16 (also v5litepod-16) or v6e-8, which count chips; or of GPUs: h100, or h100x8 for
            eight of them in one host.

    Raises:
        ValueError: the name is unknown.
    """
    targets = {}
    for family, chip in TPUS.items():
        for shape in SHAPES_3D if chip.cores == 2 else SHAPES_2D:
            num_chips = math.prod(map(int, shape.split("x")))
            targets[f"{family}-{num_chips * chip.cores}"] = Target(chip, num_chips, shape)
    found = re.fullmatch(r"(\w+?)(?:x([1-9]\d?))?", name.lower())
    if found and found[1] in GPUS:
        return Target(GPUS[found[1]], int(found[2] or 1))
    if (name := name.replace("v5litepod-", "v5e-")) in targets:
        return targets[name]
    raise ValueError(
        f"{name} is no known target; TPU slices: {', '.join(targets)}; GPUs: {', '.join(GPUS)}, "
        "and h100x8, eight in one host"
    )


# Without these settings the compiler looks for a TPU in the network, writes logs to /tmp, and runs
# in only one process at a time.
LIBTPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


# Folder of the GPUs' compiler in the environment. In the environment itself, without NVIDIA's
# packages, every program that uses jax would print an error.
FOLDER = Path(sys.prefix, "gpu")


def gpu_compiler():
    """The installed plugin of jax for NVIDIA GPUs, which can be imported afterwards.

    Raises:
        ValueError: it is not installed, or has another version than jax.
    """
    if FOLDER.is_dir() and str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))  # after an environment's own
    for cuda in ("cuda13", "cuda12"):
        try:
            found = {version(f"jax-{cuda}-{part}") for part in ("plugin", "pjrt")}
        except PackageNotFoundError:
            continue
        if found == {jaxlib.__version__}:
            return f"xla_{cuda}"
    raise ValueError(
        "the compiler for NVIDIA GPUs of this jax is not installed; 140 MB: pip install --upgrade "
        f"--target {FOLDER} jax-cuda13-plugin=={jaxlib.__version__}"
    )


def target_devices(target):
    """The devices of a Target, to compile for.

    Raises:
        ValueError: the compiler is not installed.
    """
    chip = target.chip
    if chip.card:
        plugin = gpu_compiler()
        from jax._src import xla_bridge

        jax.devices()  # finds the plugins of the environment
        if "cuda" not in xla_bridge._topology_factories:  # the folder was not known then
            importlib.import_module(f"jax_plugins.{plugin}").initialize()
        options = {"target_config": target_config(chip), "topology": f"1x1x{target.num_chips}"}
        return get_topology_desc("", "cuda", **options).devices
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            "libtpu, the TPU's compiler, is not installed; get the one for this jax: "
            f'pip install "jax[tpu]=={jax.__version__}"'
        )
    for name, value in LIBTPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    options = {"chip_config_name": "megacore"} if chip.cores == 2 else {}
    if target.num_chips == 1:
        options["chips_per_host_bounds"] = (1, 1, 1)
    return get_topology_desc(f"{chip.name}:{target.shape}", "tpu", **options).devices


def target_config(chip):
    """XLA's description of a GPU (GpuTargetConfigProto as text)."""
    card = chip.card
    major, minor = str(card.capability).split(".")
    # Hopper's own instructions (sm_90a).
    extension = "ACCELERATED_FEATURES" if major == "9" else "NONE"
    facts = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 48 * 2**10,
        "shared_memory_per_core": card.shared * 2**10,
        "shared_memory_per_block_optin": (card.shared - 1) * 2**10,
        "threads_per_core_limit": card.threads,
        "core_count": card.cores,
        "fpus_per_core": card.units,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 2**16 - 1,
        "block_dim_limit_z": 2**16 - 1,
        "memory_bandwidth": int(chip.bandwidth),
        "l2_cache_size": card.l2 * 2**20,
        "clock_rate_ghz": card.clock,
        "device_memory_size": chip.num_bytes,
        "registers_per_core_limit": 2**16,
        "registers_per_block_limit": 2**16,
    }
    return (
        f"gpu_device_info {{ {' '.join(f'{key}: {value}' for key, value in facts.items())} "
        f"cuda_compute_capability {{ major: {major} minor: {minor} "
        f"feature_extension: {extension} }} }} "
        'platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 } '
        f'runtime_version {{ major: 12 minor: 8 }} device_description_str: "NVIDIA {chip.name}"'
    )


@contextmanager
def traced_for(chip):
    """Trace programs for a GPU, which need not be there; chip: of a TPU it changes nothing.

    jax's functions for cuDNN ask for a GPU of this process; here they are told the capability, as
    the attention of the models is.
    """
    if chip.card is None:
        yield
        return
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    capability = chip.card.capability
    answers = {
        "check_cudnn_version": lambda: 91000,  # as in target_config
        "check_compute_capability": lambda least: capability >= float(least),
        "is_cuda_compute_capability_equal": lambda only: capability == float(only),
    }
    with mock.patch.multiple(cudnn, create=True, **answers), tracing_for(capability):
        yield
