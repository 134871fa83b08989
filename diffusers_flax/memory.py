"""Memory: what images will take at least, and what a program has used."""

import math
import re
import sys
from pathlib import Path

import numpy as np
from tqdm import tqdm

from diffusers_flax.pipelines.base import MODULES


def peak_memory(devices, reset=False):
    """The most memory in use since the process began, or since the last reset where possible.

    Args:
        devices: jax devices.
        reset: start again from what is in use; Linux can do it, a device cannot.

    Returns:
        (bytes of the fullest device, "device"), or (bytes of this process, "process") for devices
        that do not report it, such as a CPU.
    """
    stats = [device.memory_stats() or {} for device in devices]
    if all("peak_bytes_in_use" in x for x in stats):
        return max(x["peak_bytes_in_use"] for x in stats), "device"
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024, "process"
    except (OSError, ValueError, IndexError):
        import resource  # not on Windows

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "process"


def plan_images(pipeline, devices, num_images, batch_size, branches, size, up_to=""):
    """What will be made, in words; what cannot fit into memory is refused. Reads no weights.

    Args:
        pipeline: as from open.
        devices: that make the images.
        num_images, batch_size: of all, and of a device at once.
        branches: of guidance.
        size: (width, height) of the images of a batch, pixels.
        up_to: "up to " if there are smaller ones.

    Returns:
        A line for the user, with a lower bound on the memory.

    Raises:
        ValueError: a lower bound on the memory is more than there is.
    """
    params = num_bytes_of_params(pipeline)
    per_device = batch_size * bytes_per_image(pipeline, len(branches), *size)
    stats = devices[0].memory_stats() or {}
    if on_host := devices[0].platform == "cpu":  # its devices share memory, and may share weights
        needed, available = params + len(devices) * per_device, host_memory()
    else:
        needed, available = params + per_device, stats.get("bytes_limit")
    what = (
        f"{num_images} image{'s' * (num_images > 1)} of {up_to}{size[0]}x{size[1]} pixels, "
        f"{batch_size} at once on each of {len(devices)} {devices[0].device_kind}"
    )
    memory = f"at least {_in_bytes(needed)}"
    if available:
        memory += f" of the {_in_bytes(available)} of {'this machine' if on_host else 'a device'}"
    if available and needed > available:
        raise ValueError(
            f"{what} take {memory}, of which the weights are {_in_bytes(params)}; lower "
            "--batch_size or the size"
        )
    return f"{what}; memory: {memory}"


def num_bytes_of_params(pipeline):
    """Bytes of a pipeline's parameters after cast_params, from its configs."""
    total = 0
    for name in MODULES:
        if (part := getattr(pipeline, name, None)) is not None:
            dtype = pipeline._vae.dtype if name == "vae" else pipeline.dtype
            is_int8 = name == "unet" and pipeline.accelerate.int8
            shapes = getattr(part, "module", part)._param_shapes()  # a text encoder has a module
            total += sum(map(math.prod, shapes.values())) * (
                1 if is_int8 else np.dtype(dtype).itemsize
            )
    return total


def bytes_per_image(pipeline, num_branches, width, height):
    """A lower bound on the memory that the program needs for each image of a batch, bytes.

    It is the larger one of the image, float32, and of the features of the UNet's down blocks, which
    all wait for the up blocks. Attention and the VAE's decoder take more.
    """
    config, factor = pipeline.unet.config, pipeline.vae_scale_factor
    channels, layers = config.block_out_channels, config.layers_per_block
    layers = layers if isinstance(layers, tuple) else [layers] * len(channels)
    h, w = height // factor, width // factor
    features = h * w * channels[0]  # of conv_in
    for level, C in enumerate(channels):
        features += layers[level] * h * w * C
        if level + 1 < len(channels):
            h, w = math.ceil(h / 2), math.ceil(w / 2)
            features += h * w * C
    return max(num_branches * features * np.dtype(pipeline.dtype).itemsize, width * height * 3 * 4)


def host_memory():
    """Bytes of memory and swap that this machine or container has; None: unknown."""
    try:
        lines = Path("/proc/meminfo").read_text()
        total = sum(int(x) << 10 for x in re.findall(r"(?:Mem|Swap)Total: +(\d+) kB", lines))
        limit = Path("/sys/fs/cgroup/memory.max")
        limit = limit.read_text().strip() if limit.exists() else "max"
        return total if limit == "max" else min(total, int(limit))
    except (OSError, ValueError):
        return None


def _in_bytes(number):
    """A number of bytes in words, such as 3.40 GB."""
    return re.sub(r"(?=[kMG]B)", " ", tqdm.format_sizeof(number, "B"))
