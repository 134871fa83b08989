"""What images will take of memory, in words, before weights are read."""

from dataclasses import replace

from command_line import in_bytes
from diffusers_flax.devices.layout import COMPONENTS
from diffusers_flax.models.vae import with_tile
from diffusers_flax.pipelines.memory import (
    bound_memory,
    choose_vae_tile,
    decodes_tiny,
    with_balanced_components,
)


def plan_images(pipeline, devices, num_images, batch_size, branches, size, up_to="", vae_tile=None):
    """Choose the VAE's tiles and say what will be made; refuse what cannot fit into memory.

    Args:
        pipeline: as from open.
        devices: that make images: all of them, or the first of each group of the layout.
        num_images: number of images on all devices.
        batch_size: images of a device at once.
        branches: of guidance.
        size: (width, height) of the images of a batch, pixels.
        up_to: "up to " if some images are smaller, else "".
        vae_tile: side of the VAE's tiles, pixels; 0: whole images; None: tiles if whole images
            would not fit into the memory.

    Returns:
        (the pipeline, whose VAE has the tile; a line for the user, with a lower bound on the
        memory).

    Raises:
        ValueError: the images need more memory than there is, vae_tile is no valid tile, or it has
            no effect.
    """
    if vae_tile is not None:
        check_vae_computes(pipeline, vae_tile)
        pipeline = replace(pipeline, vae=with_tile(pipeline.vae, vae_tile))
    batch = batch_size, len(branches), size
    pipeline = with_balanced_components(pipeline, *batch)
    bound = bound_memory(pipeline, devices, *batch)
    what = (
        f"{num_images} image{'s' * (num_images > 1)} of {up_to}{size[0]}x{size[1]} pixels, "
        f"{batch_size} at once {describe_devices(devices, pipeline.layout)}"
    )
    platform, memory = devices[0].platform, f"at least {in_bytes(bound.needed)}"
    if bound.available:
        place = "this machine" if platform == "cpu" else "a device"
        memory += f" of the {in_bytes(bound.available)} of {place}"
        if bound.needed > bound.available:
            raise ValueError(
                f"{what} take {memory}, of which the weights are {in_bytes(bound.params)}; lower "
                "--batch_size or the size"
            )
    reason = ""
    if vae_tile is None:
        vae_tile = choose_vae_tile(pipeline, batch_size, size, bound.left, platform)
        pipeline = replace(pipeline, vae=with_tile(pipeline.vae, vae_tile))
        reason = ", as whole images would not fit"
    tiles = ""
    if vae_tile and max(size) > vae_tile:
        tiles = f"; the VAE works in tiles of {vae_tile} pixels{reason}"
    return pipeline, f"{what}; memory: {memory}{tiles}{describe_offload(pipeline.layout)}"


def check_vae_computes(pipeline, vae_tile):
    """Raise a ValueError for tiles of a VAE that neither encodes nor decodes."""
    if vae_tile and decodes_tiny(pipeline) and not pipeline.encodes_images:
        raise ValueError(
            f"--vae_tile {vae_tile} has no effect with --accelerate taesd, which decodes whole "
            "images; give one of them"
        )


def describe_devices(devices, layout):
    """The devices that make images, for the line of plan_images."""
    kind = devices[0].device_kind
    if layout is None or (layout.group_size == 1 and not layout.components):
        return f"on each of {len(devices)} {kind}"
    if not layout.components:
        return f"on each of {len(devices)} x {layout.group_size} {kind}"
    places = (f"{x} on {layout.devices.index(layout.device_of(x))}" for x in COMPONENTS)
    return f"with {', '.join(places)} of {len(layout.devices)} {kind}"


def describe_offload(layout):
    """What a layout's offload does, for the line of plan_images."""
    if layout is None or layout.offload is None:
        return ""
    if not layout.fetches:
        return f"; --offload {layout.offload} changes nothing on a {layout.devices[0].platform}"
    return f"; parameters are in the host's memory, fetched by {layout.offload}"
