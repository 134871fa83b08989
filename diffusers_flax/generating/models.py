"""Models as flags choose them: checks that read no weights, a plan of memory, the weights."""

import math
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from jax.typing import DTypeLike
from tqdm import tqdm

from diffusers_flax.devices.layout import COMPONENTS, Layout
from diffusers_flax.generating.sizes import result_size
from diffusers_flax.messages import in_bytes, warn_once
from diffusers_flax.models.vae import with_tile
from diffusers_flax.parameters import cast_params
from diffusers_flax.pipelines.base import MODULES, read_acceleration
from diffusers_flax.pipelines.instruct_pix2pix import (
    InstructPix2Pix,
    edit_branches,
    pixels_per_latent,
)
from diffusers_flax.pipelines.memory import (
    bound_memory,
    choose_vae_tile,
    decodes_tiny,
    with_balanced_components,
)
from diffusers_flax.pipelines.sampling import check_steps, text_branches, timestep_options
from diffusers_flax.schedulers.factory import choose_scheduler

if TYPE_CHECKING:
    from diffusers_flax.acceleration.previews import Preview
    from diffusers_flax.executables import SavedPrograms


@dataclass(frozen=True)
class Sampling:
    """How a model makes images. The fields are flags of the programs, see flags.from_flags."""

    num_inference_steps: int = 50
    guidance_scale: float = 7.5
    image_guidance_scale: float = 1.5  # of edits
    negative_prompt: str = ""
    seed: int = 0
    timesteps: tuple = ()  # instead of num_inference_steps, integers or "ays"; (): none
    eta: float | None = None
    scheduler: str | None = None  # a name of SCHEDULERS; None: the model's own
    timestep_spacing: str | None = None  # None: as in the scheduler's config
    prediction_type: str | None = None  # likewise
    accelerate: tuple[str, ...] = ()  # see acceleration.plans.parse

    def steps(self, pipeline_type):
        """The options of a pipeline's call that choose the steps, see timestep_options."""
        return timestep_options(
            self.num_inference_steps, self.timesteps, self.eta, pipeline_type.ays_timesteps
        )

    def branches(self, pipeline_type):
        """The branches of guidance; text to image has one scale."""
        if issubclass(pipeline_type, InstructPix2Pix):
            return edit_branches(self.guidance_scale, self.image_guidance_scale)
        return text_branches(self.guidance_scale)


@dataclass(frozen=True)
class ModelOptions:
    """How a model is opened."""

    dtype: DTypeLike  # of computation and parameters, see cast_params
    lora: tuple[str, ...] = ()  # files to fold into the weights, see loading.lora.Loras
    embedding: tuple[str, ...] = ()  # files with new tokens, see loading.embeddings.Embeddings
    unet_delta: tuple[str, ...] = ()  # difference to add to the UNet, see loading.unet_delta
    storage: str | None = None  # of the kernels, see models.quantization.store
    vae_dtype: str | None = None  # of the VAE's computation; None: see from_pretrained
    layout: Layout | None = None  # of the devices; None: each device makes images of its own
    controlnet: tuple[str, ...] = ()  # directories, hub ids or files
    unet: Any = None  # file, directory or hub id of a UNet in place of the model's
    revision: str | None = None  # branch, tag or commit on the hub
    variant: str | None = None  # of the weights' files, such as fp16
    preview: "Preview | None" = None
    saved_programs: "SavedPrograms | None" = None


def factor_and_resolution(configs, resolution=None):
    """The pixels per latent along a side, and the longer side of results in pixels.

    Args:
        configs: {component: its config}, with "unet" and "vae".
        resolution: --resolution; None: the model's own. A warning says if it has to be rounded.

    Raises:
        ValueError: the resolution is too small for the model.
    """
    factor = pixels_per_latent(configs, math.inf if resolution is None else resolution)
    if resolution is None:
        side = configs["unet"].get("sample_size") or MODULES["unet"].sample_size
        resolution = factor * (max(side) if isinstance(side, list) else side)
    if (side := result_size((1, 1), resolution, factor)[0]) != resolution:
        warn_once(
            f"--resolution {resolution} is not a multiple of {factor}; the longer side of images "
            f"becomes {side} pixels"
        )
    return factor, resolution


def check_sampling(pipeline_type, scheduler_config, model, sampling):
    """Check a model's steps and accelerations; returns its scheduler.

    Args:
        pipeline_type: class of the pipeline.
        scheduler_config: content of the model's scheduler_config.json.
        model: its name, for errors.
        sampling: Sampling.

    Raises:
        ValueError: the scheduler does not take the number of steps, or accelerations do not fit.
    """
    accelerate = read_acceleration(sampling.accelerate)
    if accelerate:
        pipeline_type.check_acceleration(accelerate)
    scheduler, state = choose_scheduler(
        scheduler_config,
        model,
        sampling.scheduler,
        timestep_spacing=sampling.timestep_spacing,
        prediction_type=sampling.prediction_type,
    )
    steps, branches = sampling.steps(pipeline_type), sampling.branches(pipeline_type)
    check_steps(scheduler, state, steps, accelerate, branches)
    return scheduler


def load_model(
    model, pipeline_type, scheduler, accelerate, options, plan=lambda pipeline: (pipeline, "")
):
    """Read a model.

    Args:
        model: directory, hub id or SingleFile.
        pipeline_type: class of the pipeline.
        scheduler: of check_sampling.
        accelerate: see acceleration.plans.parse.
        options: ModelOptions.
        plan: pipeline -> (pipeline to use, line to print), called before the weights are read.

    Returns:
        (pipeline, its parameters as NumPy arrays).
    """
    names = ("preview", "layout", "storage", "vae_dtype", "saved_programs")
    nets, replaced = options.controlnet, {"unet": options.unet} if options.unet else {}
    if nets:
        replaced["controlnet"] = nets if len(nets) > 1 else nets[0]
    pipeline = pipeline_type.open(
        model,
        options.revision,
        dtype=options.dtype,
        scheduler=scheduler,
        replaced=replaced,
        embeddings=options.embedding,
        accelerate=accelerate,
        **{name: getattr(options, name) for name in names},
    )
    pipeline, planned = plan(pipeline)
    weights = dict(variant=options.variant, lora=options.lora, unet_delta=options.unet_delta)
    params = pipeline.load_params(model, options.revision, **weights)
    cast_params(pipeline, params)
    if planned:
        tqdm.write(planned, file=sys.stderr)
    return pipeline, params


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
    if vae_tile and decodes_tiny(pipeline) and not pipeline.encodes_images:
        raise ValueError(
            f"--vae_tile {vae_tile} has no effect with --accelerate taesd, which decodes whole "
            "images; give one of them"
        )
    if vae_tile is not None:
        pipeline = replace(pipeline, vae=with_tile(pipeline.vae, vae_tile))
    batch = batch_size, size
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
    planned = f"{what}; memory: {memory}"
    if vae_tile and max(size) > vae_tile:
        planned += f"; the VAE works in tiles of {vae_tile} pixels{reason}"
    if (layout := pipeline.layout) and layout.offload:
        planned += f"; parameters are in the host's memory, fetched by {layout.offload}"
        if not layout.fetches:
            planned += ", which changes nothing on this device"
    return pipeline, planned


def describe_devices(devices, layout):
    """The devices that make images, for the line of plan_images."""
    name = devices[0].device_kind
    if layout is None or (layout.group_size == 1 and not layout.components):
        return f"on each of {len(devices)} {name}"
    if not layout.components:
        return f"on each of {len(devices)} x {layout.group_size} {name}"
    places = (f"{x} on {layout.devices.index(layout.device_of(x))}" for x in COMPONENTS)
    return f"with {', '.join(places)} of {len(layout.devices)} {name}"
