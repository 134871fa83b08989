"""Memory: what images will take at least, and what a program has used."""

import inspect
import math
import re
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from tqdm import tqdm

from diffusers_flax.devices.layout import BALANCED, COMPONENTS
from diffusers_flax.devices.offload import KEPT_MODELS, group_of
from diffusers_flax.devices.parallelism import num_row_devices
from diffusers_flax.models.attention import fits_splash
from diffusers_flax.models.quantization import is_stored_kernel
from diffusers_flax.models.vae import least_tile, with_tile
from diffusers_flax.pipelines.base import MODULES
from diffusers_flax.pipelines.sampling import DECODED_PIXELS

# How many arrays of the features at full size the VAE has in memory, by programs compiled for a CPU
# and v5e (there 3.5 in the decoder).
DECODER_ARRAYS, ENCODER_ARRAYS = 4.1, 4.5


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


def plan_images(pipeline, devices, num_images, batch_size, branches, size, up_to="", vae_tile=None):
    """What will be made, in words; what cannot fit into memory is refused. Reads no weights.

    Args:
        pipeline: as from open.
        devices: that make the images.
        num_images, batch_size: of all, and of a device at once.
        branches: of guidance.
        size: (width, height) of the images of a batch, pixels.
        up_to: "up to " if there are smaller ones.
        vae_tile: side of the VAE's tiles, pixels; 0: whole images; None: tiles if whole images
            would not fit into the memory.

    Returns:
        (the pipeline, whose VAE has the tile; a line for the user, with a lower bound on the
        memory).

    Raises:
        ValueError: a lower bound on the memory is more than there is, vae_tile is not a side of
            tiles, or nothing would be computed in tiles.
    """
    is_chosen = vae_tile is None
    if not is_chosen:
        check_vae_computes(pipeline, vae_tile)
        pipeline = replace(pipeline, vae=with_tile(pipeline.vae, vae_tile))
    pipeline = with_balanced_components(pipeline, batch_size, len(branches), size)
    held = bytes_of_devices(pipeline, batch_size, len(branches), size)
    params = sum(params for params, _ in held)
    all_devices = devices if pipeline.layout is None else pipeline.layout.devices
    # The devices of other processes do not tell.
    ours = (x for x in all_devices if x.process_index == x.client.process_index())
    stats = next(ours).memory_stats() or {}
    on_host = devices[0].platform == "cpu"  # its devices share memory, and may share weights
    available = host_memory() if on_host else stats.get("bytes_limit")
    sharing = len(devices) if on_host else 1  # groups of devices that share the memory
    needed = max(map(sum, held))
    if on_host:
        needed = params + sharing * sum(batch for _, batch in held)
    layout = pipeline.layout
    on_each = f"on each of {len(devices)} {devices[0].device_kind}"
    if layout is not None and layout.group_size > 1:
        on_each = f"on each of {len(devices)} x {layout.group_size} {devices[0].device_kind}"
    if layout is not None and layout.components:
        places = ", ".join(
            f"{component} on {layout.devices.index(layout.device_of(component))}"
            for component in COMPONENTS
        )
        on_each = f"with {places} of {len(layout.devices)} {devices[0].device_kind}"
    what = (
        f"{num_images} image{'s' * (num_images > 1)} of {up_to}{size[0]}x{size[1]} pixels, "
        f"{batch_size} at once {on_each}"
    )
    memory = f"at least {_in_bytes(needed)}"
    if available:
        memory += f" of the {_in_bytes(available)} of {'this machine' if on_host else 'a device'}"
    if available and needed > available:
        raise ValueError(
            f"{what} take {memory}, of which the weights are {_in_bytes(params)}; lower "
            "--batch_size or the size"
        )
    if is_chosen:
        place = (
            0 if layout is None or not layout.components else dict(layout.components).get("vae", 0)
        )
        left = math.inf
        if available:
            left = (available - (params if on_host else held[place][0])) / sharing
        if layout is not None and not on_host:  # the devices of a group share its rows
            left *= num_row_devices(layout, size[1] // pipeline.vae_scale_factor)
        vae_tile = choose_vae_tile(pipeline, batch_size, size, left, devices[0].platform)
        pipeline = replace(pipeline, vae=with_tile(pipeline.vae, vae_tile))
    tiles = ""
    if vae_tile and max(size) > vae_tile:
        reason = ", as whole images would not fit" if is_chosen else ""
        tiles = f"; the VAE works in tiles of {vae_tile} pixels{reason}"
    return pipeline, f"{what}; memory: {memory}{tiles}{words_of_offload(layout)}"


def check_vae_computes(pipeline, vae_tile):
    """Raise a ValueError for tiles of a VAE that neither encodes nor decodes."""
    if vae_tile and decodes_tiny(pipeline) and not encodes_images(pipeline):
        raise ValueError(
            f"--vae_tile {vae_tile} has no effect with --accelerate taesd, which decodes whole "
            "images; give one of them"
        )


def encodes_images(pipeline):
    """Whether a pipeline's VAE encodes images."""
    return "image" in inspect.signature(type(pipeline)._generate).parameters


def decodes_tiny(pipeline):
    """Whether TAESD decodes a pipeline's images."""
    return bool(pipeline.accelerate and pipeline.accelerate.tiny_decoder)


def words_of_offload(layout):
    """What a layout's offload does, for the line of plan_images."""
    if layout is None or layout.offload is None:
        return ""
    if not layout.fetches:
        return f"; --offload {layout.offload} changes nothing on a {layout.devices[0].platform}"
    return f"; parameters are in the host's memory, fetched by {layout.offload}"


def bytes_of_devices(pipeline, batch_size, num_branches, size):
    """A lower bound on the memory of each device, bytes: [(parameters, what a batch takes)].

    It has one entry, unless the layout has components on devices of their own.

    Args:
        pipeline: as from open.
        batch_size: images at once.
        num_branches: of guidance.
        size: (width, height) of the images, pixels.
    """
    layout = pipeline.layout
    image = batch_size * math.prod(size) * 3 * 4
    unet = batch_size * bytes_per_image(pipeline, num_branches, *size)
    if layout is None or not layout.components or layout.offload:
        if layout is not None and layout.devices[0].platform != "cpu":
            unet //= layout.group_size
        return [(num_bytes_at_once(pipeline), unet)]
    held = [[0, 0] for _ in layout.devices]
    for component, batch in (("text", 0), ("unet", unet), ("vae", image)):
        of_device = held[layout.devices.index(layout.device_of(component))]
        of_device[0] += num_bytes_of_params(pipeline, modules_of(component))
        of_device[1] = max(of_device[1], batch)
    return held


def modules_of(component):
    """The names in MODULES of a component's models."""
    return [model for model in COMPONENTS[component] if model in MODULES]


def with_balanced_components(pipeline, batch_size, num_branches, size):
    """The pipeline with its components' devices chosen by memory, if its layout is BALANCED.

    Arguments as for bytes_of_devices.
    """
    layout = pipeline.layout
    if layout is None or layout.components != BALANCED:
        return pipeline
    sizes = {name: num_bytes_of_params(pipeline, modules_of(name)) for name in COMPONENTS}
    sizes["unet"] += batch_size * bytes_per_image(pipeline, num_branches, *size)
    platform = layout.devices[0].platform
    of_batch = batch_size, size, platform, pipeline.vae.tile, encodes_images(pipeline)
    sizes["vae"] += bytes_of_vae(pipeline.compute_vae, *of_batch)
    components = balance(sizes, len(layout.devices))
    return replace(pipeline, layout=replace(layout, components=components))


def balance(sizes, num_devices):
    """{component: index of its device}: the largest first, each on the device with the least.

    sizes: {component: bytes}.
    """
    held, chosen = [0] * num_devices, {}
    for component in sorted(sizes, key=sizes.get, reverse=True):
        chosen[component] = held.index(min(held))
        held[chosen[component]] += sizes[component]
    return chosen


def choose_vae_tile(pipeline, batch_size, size, available, platform):
    """The side of tiles in which the VAE's work fits into memory; 0: whole images.

    It is the size that the VAE was trained at, as in PyTorch, or a half or a quarter of it. Smaller
    ones would show.

    Args:
        pipeline: as from open.
        batch_size: images at once.
        size: their (width, height), pixels.
        available: bytes of memory beside the parameters.
        platform: of the device, "cpu", "gpu" or "tpu".
    """
    vae = pipeline.compute_vae
    encodes = encodes_images(pipeline)
    needs = partial(bytes_of_vae, vae, batch_size, size, platform, encodes=encodes)
    if (decodes_tiny(pipeline) and not encodes) or needs() <= available:
        return 0
    side, least = vae.sample_size, least_tile(vae)
    if not isinstance(side, int) or side < least or side % least:
        side = 16 * least
    tiles = [side // n for n in (1, 2, 4) if side % (n * least) == 0]
    return next((tile for tile in tiles if needs(tile=tile) <= available), tiles[-1])


def bytes_of_vae(vae, batch_size, size, platform, tile=0, encodes=False):
    """Memory that the VAE takes for images beside its parameters, bytes, estimated.

    Most of it is the widest features at full size, or the logits of the attention in the middle,
    where it has no kernel.

    Args:
        vae: FlaxAutoencoderKL, in the dtype that it computes in.
        batch_size: images at once.
        size: their (width, height), pixels.
        platform: of the device, "cpu", "gpu" or "tpu".
        tile: side of its tiles; 0: whole images.
        encodes: whether images are encoded too, all of a batch at once.
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
    if (module := getattr(pipeline, model, None)) is None:
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
    """A lower bound on the bytes of parameters that are on a device at once.

    They are all, or with offload those of the component that runs, with groups the largest group
    and what is in no group.
    """
    if pipeline.layout is None or not pipeline.layout.fetches:
        return num_bytes_of_params(pipeline)
    offload = pipeline.layout.offload
    kept = KEPT_MODELS if offload == "component" else ()
    most = 0
    for component in COMPONENTS:
        rest, groups = 0, Counter()
        for model in set(modules_of(component)) - set(kept):
            for name, size in sizes_of_params(pipeline, model):
                group = group_of(name.split("/"), offload)
                groups[model, group] += size * (group is not None)
                rest += size * (group is None)
        most = max(most, rest + max(groups.values(), default=0))
    return most + num_bytes_of_params(pipeline, kept)


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
