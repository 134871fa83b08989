"""Estimates of the memory that a pipeline takes, from its configs alone."""

import math
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from diffusers_flax.devices.layout import BALANCED, COMPONENTS
from diffusers_flax.devices.memory import available_memory
from diffusers_flax.devices.offload import KEPT_MODELS, group_of
from diffusers_flax.devices.parallelism import num_row_devices
from diffusers_flax.models.attention import fits_splash
from diffusers_flax.models.quantization import is_stored_kernel
from diffusers_flax.models.vae import least_tile
from diffusers_flax.pipelines.base import MODULES
from diffusers_flax.pipelines.sampling import DECODED_PIXELS

# Arrays of features at full size that the VAE holds at once, by programs compiled for a CPU.
DECODER_ARRAYS, ENCODER_ARRAYS = 4.1, 4.5


class MemoryBound(NamedTuple):
    """Lower bounds on the memory of a batch of images, bytes.

    Fields:
        needed: of the fullest device; of all devices for CPUs, which share the host's memory.
        params: what the parameters take of it, on all devices.
        available: memory of a device, or of the host for CPUs; None: unknown.
        left: what the VAE may take for the images of a device; inf: unknown.
    """

    needed: int
    params: int
    available: int | None
    left: float


def bound_memory(pipeline, devices, batch_size, size):
    """The MemoryBound of the parameters and of a batch of images of a size on each device.

    devices: that make images: all of them, or the first of each group of the layout.
    """
    layout, on_host = pipeline.layout, devices[0].platform == "cpu"
    held = bytes_of_devices(pipeline)
    images, params = batch_size * math.prod(size) * 3 * 4, sum(held)
    # CPUs may share weights.
    needed = params + len(devices) * images if on_host else max(held) + images
    available = available_memory(devices if layout is None else layout.devices)
    left = math.inf
    if available and on_host:
        left = (available - params) / len(devices)
    elif available:
        left = available - held[0 if layout is None else dict(layout.components).get("vae", 0)]
    if layout is not None and not on_host:  # the devices of a group share its rows
        left *= num_row_devices(layout, size[1] // pipeline.vae_scale_factor)
    return MemoryBound(needed, params, available, left)


def bytes_of_devices(pipeline):
    """Bytes of the parameters on each device: one, unless components have devices of their own."""
    layout = pipeline.layout
    if layout is None or not layout.components:
        return [num_bytes_at_once(pipeline)]
    held = [0] * len(layout.devices)
    for component in COMPONENTS:
        device = layout.devices.index(layout.device_of(component))
        held[device] += num_bytes_of_params(pipeline, COMPONENTS[component])
    return held


def with_balanced_components(pipeline, batch_size, size):
    """The pipeline with its components' devices chosen by memory, if its layout is BALANCED."""
    layout = pipeline.layout
    if layout is None or layout.components != BALANCED:
        return pipeline
    sizes = {name: num_bytes_of_params(pipeline, models) for name, models in COMPONENTS.items()}
    of_batch = batch_size, size, layout.devices[0].platform
    vae, encodes = pipeline.compute_vae, pipeline.encodes_images
    sizes["vae"] += bytes_of_vae(vae, *of_batch, pipeline.vae.tile, encodes)
    held, chosen = [0] * len(layout.devices), {}
    for component in sorted(sizes, key=sizes.get, reverse=True):  # the largest to the least full
        chosen[component] = held.index(min(held))
        held[chosen[component]] += sizes[component]
    return replace(pipeline, layout=replace(layout, components=chosen))


def choose_vae_tile(pipeline, batch_size, size, available, platform):
    """The side of tiles in which the VAE's work fits into memory; 0: whole images.

    It is the size that the VAE was trained at, as in PyTorch, or a half or a quarter of it. Smaller
    ones would show. available: bytes of memory beside the parameters; others as for bytes_of_vae.
    """
    vae, encodes = pipeline.compute_vae, pipeline.encodes_images
    needs = partial(bytes_of_vae, vae, batch_size, size, platform, encodes=encodes)
    is_tiny = pipeline.accelerate and pipeline.accelerate.tiny_decoder
    if (is_tiny and not encodes) or needs() <= available:
        return 0
    side, least = vae.sample_size, least_tile(vae)
    if not isinstance(side, int) or side < least or side % least:
        side = 16 * least
    tiles = [side // n for n in (1, 2, 4) if side % (n * least) == 0]
    return next((tile for tile in tiles if needs(tile=tile) <= available), tiles[-1])


def bytes_of_vae(vae, batch_size, size, platform, tile=0, encodes=False):
    """Memory that the VAE takes for images beside its parameters, bytes, estimated.

    size: their (width, height), pixels; platform: "cpu", "gpu" or "tpu"; tile: side of its tiles,
    0: whole images; encodes: whether a batch of images is encoded too, all at once.
    """
    width, height = (min(side, tile or side) for side in size)
    num_decoded = min(batch_size, max(1, DECODED_PIXELS // math.prod(size)))  # at once
    channels, factor = vae.block_out_channels, 2 ** (len(vae.block_out_channels) - 1)
    # The decoder's first block of full size takes the features of the level below.
    features = DECODER_ARRAYS * num_decoded * max(channels[:2])
    if encodes:
        features = max(features, ENCODER_ARRAYS * batch_size * channels[0])
    features *= width * height * np.dtype(vae.dtype).itemsize
    positions = width * height // factor**2
    shape = (1, positions, 1, channels[-1])
    has_kernel = platform == "cpu" or (platform == "tpu" and fits_splash(shape, shape))
    logits = 0
    if vae.mid_block_add_attention and not has_kernel:  # float32, and their softmax
        logits = 2 * (batch_size if encodes else num_decoded) * positions**2 * 4
    images = batch_size * math.prod(size) * 3 * 4
    return 2 * images + max(features, logits)


def num_bytes_of_params(pipeline, models=tuple(MODULES)):
    """Bytes of a pipeline's parameters after cast_params, from its configs; of these models."""
    return sum(size for model in models for _, size in sizes_of_params(pipeline, model))


def sizes_of_params(pipeline, model):
    """[(name, bytes)] of a model's parameters after cast_params; [] if it is absent."""
    if model not in MODULES or (module := getattr(pipeline, model, None)) is None:
        return []
    dtype = pipeline.compute_vae.dtype if model == "vae" else pipeline.dtype
    is_int8 = model == "unet" and pipeline.accelerate and pipeline.accelerate.int8
    sizes = []
    shapes = getattr(module, "module", module)._param_shapes()  # a text encoder has a module
    for name, shape in shapes.items():
        is_small = is_int8 or (pipeline.storage and is_stored_kernel(name))
        sizes.append((name, math.prod(shape) * (1 if is_small else np.dtype(dtype).itemsize)))
    return sizes


def num_bytes_at_once(pipeline):
    """A lower bound on the bytes of parameters that are on a device at once; see offload."""
    if pipeline.layout is None or not pipeline.layout.fetches:
        return num_bytes_of_params(pipeline)
    offload, most = pipeline.layout.offload, 0
    kept = KEPT_MODELS if offload == "component" else ()
    for models in COMPONENTS.values():
        groups = Counter()
        for model in {*models} - {*kept}:
            for name, size in sizes_of_params(pipeline, model):
                group = group_of(name.split("/"), offload)
                groups[group and (model, group)] += size
        rest = groups.pop(None, 0)
        most = max(most, rest + max(groups.values(), default=0))
    return most + num_bytes_of_params(pipeline, kept)
