"""NVIDIA GPUs, and how to compile for one that this machine does not have.

host = find_gpus("h100x8")
devices = gpu_devices(host)     # to compile for, without a GPU
with traced_for(host.chip): lowered = jax.pmap(f, devices=devices).lower(*shapes)
"""

import importlib
import importlib.util
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

# Of a GPU's memory, what a program can use: CUDA's context and the kernels of cuDNN and cuBLAS take
# about 1 GB, and the allocator leaves gaps.
USABLE_SHARE = 0.92
# What jax takes when it starts. Source: "GPU memory allocation" in jax's documentation.
JAX_SHARE = 0.75


class Card(NamedTuple):
    """A type of NVIDIA GPU, and the rates that a Chip has.

    Source: XLA's files of targets (openxla/xla, xla/backends/gpu/target_config/specs: size and
    bandwidth of the memory, cores, clock, caches) for the A100, H100, H200 and RTX PRO 6000;
    otherwise NVIDIA's data sheets and its papers on the architectures Ampere, Hopper, Ada and RTX
    Blackwell, for dense matrices with sums in float32.
    """

    name: str
    flops: float  # peak in bfloat16, per second; float32 runs as TF32 at half of it
    int8: float  # peak in int8, operations per second
    bandwidth: float  # of the memory, bytes per second
    interconnect: float  # NVLink, else PCIe, one direction, bytes per second
    host: float  # PCIe, one direction, bytes per second
    num_bytes: int  # of the memory
    capability: float  # CUDA's compute capability
    cores: int  # streaming multiprocessors
    units: int  # float32 units of a core
    clock: float  # GHz
    l2: int  # cache, bytes
    shared: int  # memory of a core, bytes
    threads: int  # most of a core

    @property
    def memory(self):
        """GiB that a program can use."""
        return USABLE_SHARE * self.num_bytes / 2**30


def _hopper(name, bandwidth, num_bytes):
    rates = (989.4e12, 1978.9e12, bandwidth, 450e9, 64e9, num_bytes)
    return Card(name, *rates, 9.0, 132, 128, 1.98, 50 * 2**20, 228 * 2**10, 2048)


def _a100(name, bandwidth, num_bytes):
    rates = (312e12, 624e12, bandwidth, 300e9, 32e9, num_bytes)
    return Card(name, *rates, 8.0, 108, 64, 1.41, 40 * 2**20, 164 * 2**10, 2048)


def _ada(name, rates, cores, clock, l2):
    flops, int8, bandwidth, num_bytes = rates
    rates = (flops, int8, bandwidth, 32e9, 32e9, num_bytes)
    return Card(name, *rates, 8.9, cores, 128, clock, l2 * 2**20, 100 * 2**10, 1536)


CARDS = {
    "a100_40": _a100("NVIDIA A100-SXM4-40GB", 1.5552e12, 42_331_013_120),
    "a100_80": _a100("NVIDIA A100-SXM4-80GB", 2.03904e12, 85_100_068_864),
    "h100": _hopper("NVIDIA H100 80GB HBM3", 3.35232e12, 84_942_979_072),
    "h200": _hopper("NVIDIA H200", 4.8e12, 151_397_597_184),
    "l4": _ada("NVIDIA L4", (121e12, 242e12, 0.3e12, 24_152_899_584), 58, 2.04, 48),
    "rtx4090": _ada(
        "NVIDIA GeForce RTX 4090", (165.2e12, 660.6e12, 1.008e12, 25_757_220_864), 128, 2.52, 72
    ),
    "rtx6000pro": Card(
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        *(503.8e12, 1007.6e12, 1.792e12, 64e9, 64e9, 103_079_215_104),
        *(12.0, 188, 128, 2.6, 128 * 2**20, 128 * 2**10, 1536),
    ),
}


class Host(NamedTuple):
    """GPUs of one type in one host."""

    chip: Card
    num_chips: int
    num_hosts: int = 1


def find_gpus(name):
    """The Host of a name.

    Args:
        name: such as h100, or h100x8 for eight of them in one host.

    Raises:
        ValueError: the name is unknown.
    """
    card, count = name.lower(), "1"
    if found := re.fullmatch(r"(\w+)x([1-9]\d?)", card):
        card, count = found.groups()
    if card not in CARDS:
        raise ValueError(
            f"--gpu {name} is not known; known are {', '.join(CARDS)}, and h100x8, "
            "eight in one host"
        )
    return Host(CARDS[card], int(count))


def target_config(card):
    """XLA's description of a Card (GpuTargetConfigProto as text)."""
    major, minor = str(card.capability).split(".")
    # Hopper's own instructions (sm_90a).
    extension = "ACCELERATED_FEATURES" if major == "9" else "NONE"
    sizes = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 48 * 2**10,
        "shared_memory_per_core": card.shared,
        "shared_memory_per_block_optin": card.shared - 2**10,
        "threads_per_core_limit": card.threads,
        "core_count": card.cores,
        "fpus_per_core": card.units,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 2**16 - 1,
        "block_dim_limit_z": 2**16 - 1,
        "memory_bandwidth": int(card.bandwidth),
        "l2_cache_size": card.l2,
        "clock_rate_ghz": card.clock,
        "device_memory_size": card.num_bytes,
        "registers_per_core_limit": 2**16,
        "registers_per_block_limit": 2**16,
    }
    return (
        f"gpu_device_info {{ {' '.join(f'{key}: {value}' for key, value in sizes.items())} "
        f"cuda_compute_capability {{ major: {major} minor: {minor} "
        f"feature_extension: {extension} }} }} "
        'platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 } '
        f'runtime_version {{ major: 12 minor: 8 }} device_description_str: "{card.name}"'
    )


# jax's packages of the compiler, for CUDA 13 and 12.
PACKAGES = ("jax_cuda13_plugin", "jax_cuda12_plugin")
# Folder of the compiler in the environment. In the environment itself, without NVIDIA's packages,
# every program that uses jax would print an error.
FOLDER = Path(sys.prefix, "gpu")


def find_compiler():
    """The installed package of the GPUs' compiler, which can be imported afterwards.

    Raises:
        ValueError: it is not installed, or has another version than jax.
    """
    if FOLDER.is_dir() and str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))  # after an environment's own
        importlib.invalidate_caches()
    packages = [name for name in PACKAGES if importlib.util.find_spec(name)]
    wanted = jaxlib.__version__
    install = f"pip install --upgrade --target {FOLDER} jax-cuda13-plugin=={wanted}"
    if not packages:
        raise ValueError(f"the compiler for NVIDIA GPUs is not installed; 140 MB: {install}")
    for package in (packages[0], packages[0].replace("plugin", "pjrt")):
        try:
            found = version(package)
        except PackageNotFoundError as error:
            raise ValueError(f"{package} is not installed: {install}") from error
        if found != wanted:
            raise ValueError(f"{package} is of jax {found}, but jaxlib is {wanted}: {install}")
    return packages[0]


def gpu_devices(host):
    """The devices of a Host, to compile for.

    Raises:
        ValueError: the compiler is not installed.
    """
    plugin = find_compiler()
    from jax._src import xla_bridge

    jax.devices()  # finds the plugins of the environment
    if "cuda" not in xla_bridge._topology_factories:  # the folder was not known then
        name = plugin.replace("jax_", "xla_").removesuffix("_plugin")
        importlib.import_module(f"jax_plugins.{name}").initialize()
    options = {"target_config": target_config(host.chip), "topology": f"1x1x{host.num_chips}"}
    return get_topology_desc("", "cuda", **options).devices


# cuDNN 9.10, as in target_config.
CUDNN_VERSION = 91000


@contextmanager
def traced_for(card):
    """Trace programs for a Card, which need not be there.

    jax's functions for cuDNN ask for a GPU of this process; here they are told the Card's
    capability, as the attention of the models is.

    Args:
        card: Card; None: programs are traced for jax's own devices.
    """
    if card is None:
        yield
        return
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    answers = {
        "check_cudnn_version": lambda: CUDNN_VERSION,
        "check_compute_capability": lambda least: card.capability >= float(least),
        "is_cuda_compute_capability_equal": lambda only: card.capability == float(only),
    }
    answers = {name: answer for name, answer in answers.items() if hasattr(cudnn, name)}
    with mock.patch.multiple(cudnn, **answers), tracing_for(card.capability):
        yield


# Without a GPU, XLA cannot try Triton's tiles of a matmul; it takes cuBLAS.
COMPILER_OPTIONS = {"xla_gpu_enable_triton_gemm": False}
