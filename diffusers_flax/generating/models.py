"""Models as flags choose them: the pipeline of a task, checks without weights, memory, weights.

task = task_of(image=photograph, mask=None, control=())  # "image to image"
is_xl, configs = check_tasks("MODEL", [task])
scheduler = check_sampling(pipeline_for(task, is_xl), configs["scheduler"], "MODEL", sampling)
pipeline, params = load_model("MODEL", pipeline_for(task, is_xl), scheduler, (), options)
inpainting = with_task(pipeline, "inpainting")
"""

import math
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from jax.typing import DTypeLike

import diffusers_flax
from diffusers_flax.devices.layout import Layout
from diffusers_flax.loading.directories import has_component, read_index
from diffusers_flax.messages import in_bytes
from diffusers_flax.models.vae import with_tile
from diffusers_flax.parameters import cast_params
from diffusers_flax.pipelines.base import MODULES, class_of, read_acceleration
from diffusers_flax.pipelines.guidance import read_guidance
from diffusers_flax.pipelines.instruct_pix2pix import (
    InstructPix2Pix,
    edit_branches,
    pixels_per_latent,
)
from diffusers_flax.pipelines.memory import (
    bound_memory,
    choose_vae_tile,
    with_balanced_components,
)
from diffusers_flax.pipelines.sampling import check_steps, text_branches, timestep_options
from diffusers_flax.pipelines.stable_diffusion_xl import XLComponents
from diffusers_flax.schedulers.factory import choose_scheduler

if TYPE_CHECKING:
    from diffusers_flax.acceleration.previews import Preview
    from diffusers_flax.executables import SavedPrograms

EDIT = "edit"
TASKS = {  # and the name in the class of the pipeline
    "text to image": "",
    "image to image": "Img2Img",
    "inpainting": "Inpaint",
    "ControlNet": "ControlNet",
    EDIT: "InstructPix2Pix",
}


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
    guidance: str | None = None  # see pipelines.guidance.read_guidance
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


# ------------------------------------------------------------ tasks


def task_of(image=None, mask=None, control=()):
    """The task of an image; arguments: whether it has an image, a mask, control images."""
    if control:
        return "ControlNet"
    if mask is not None:
        return "inpainting"
    return "text to image" if image is None else "image to image"


def pipeline_for(task, is_xl):
    """The pipeline class of a task and a family."""
    return getattr(diffusers_flax, f"FlaxStableDiffusion{'XL' * is_xl}{TASKS[task]}Pipeline")


def with_task(pipeline, task):
    """The pipeline of a task, with all fields of another pipeline of the same family.

    Both take the same parameters. A ControlNet is left out unless the task is "ControlNet".
    """
    pipeline_type = pipeline_for(task, isinstance(pipeline, XLComponents))
    if type(pipeline) is pipeline_type:
        return pipeline
    names = {field.name for field in fields(pipeline_type)}
    return pipeline_type(**{name: x for name, x in vars(pipeline).items() if name in names})


def sees_mask(configs):
    """Whether a UNet is for inpainting alone; configs: {component: its config}."""
    return configs["unet"].get("in_channels", 4) != configs["vae"].get("latent_channels", 4)


def check_tasks(model, tasks, replaced=None, flag="model", revision=None):
    """Check that a model can do tasks, without reading weights.

    Args:
        model: value of --model, or of another flag.
        tasks: all tasks that it is asked to do: EDIT alone, or others.
        replaced: {component: object} in place of the model's, see FlaxDiffusionPipeline.check.
        flag: name of the model's flag.
        revision: branch, tag or commit on the hub.

    Returns:
        (whether the model is of SDXL's family; {component: its config}).

    Raises:
        ValueError: it is another kind of model.
    """
    index, given = read_index(model, revision), f"--{flag} {model}"
    named = class_of(index, model)
    is_xl, edits = issubclass(named, XLComponents), EDIT in tasks
    if issubclass(named, InstructPix2Pix) != edits:
        raise ValueError(
            f"{given} is {'not ' * edits}an edit model ({named.torch_class_name}); take "
            f"{'generate_cli.py' if edits else 'edit_cli.py'}"
        )
    if is_xl and not has_component(index, "text_encoder") and "text to image" in tasks:
        raise ValueError(
            f"{given} is a refiner, which needs an image; name it as --refiner beside the base "
            "model"
        )
    # Inpainting takes UNets of 4 and 9 channels.
    pipeline_type = pipeline_for(EDIT if edits else "inpainting", is_xl)
    _, configs = pipeline_type.check(model, revision, replaced)
    others = " or ".join(sorted({*tasks} - {"inpainting", EDIT}))
    if others and sees_mask(configs):
        raise ValueError(
            f"{given} is an inpainting model, whose UNet sees a mask, and cannot do {others}; give "
            "an image and a mask, or another model"
        )
    return is_xl, configs


# ------------------------------------------------------------ sizes and steps


def factor_and_resolution(configs, resolution=None):
    """The pixels per latent along a side, and the longer side of results in pixels.

    Args:
        configs: {component: its config}, with "unet" and "vae".
        resolution: --resolution; None: the model's own.

    Raises:
        ValueError: the resolution is too small for the model.
    """
    factor = pixels_per_latent(configs, math.inf if resolution is None else resolution)
    if resolution is None:
        side = configs["unet"].get("sample_size") or MODULES["unet"].sample_size
        resolution = factor * (max(side) if isinstance(side, list | tuple) else side)
    return factor, resolution


def check_sampling(pipeline_type, scheduler_config, model, sampling):
    """Check a model's steps and accelerations; returns its scheduler.

    Args:
        pipeline_type: class of the pipeline.
        scheduler_config: content of the model's scheduler_config.json.
        model: its name, for errors.
        sampling: Sampling.

    Raises:
        ValueError: the scheduler does not take the number of steps, or accelerations or guidance
            do not fit.
    """
    accelerate = read_acceleration(sampling.accelerate)
    read_guidance(sampling.guidance, accelerate)
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


# ------------------------------------------------------------ weights and memory


def open_model(model, pipeline_type, scheduler, accelerate, options):
    """A model's pipeline, without weights.

    Args:
        model: directory, hub id or SingleFile.
        pipeline_type: class of the pipeline.
        scheduler: of check_sampling.
        accelerate: see acceleration.plans.parse.
        options: ModelOptions.
    """
    names = ("preview", "layout", "storage", "vae_dtype", "saved_programs")
    nets, replaced = options.controlnet, {"unet": options.unet} if options.unet else {}
    if nets:
        replaced["controlnet"] = nets if len(nets) > 1 else nets[0]
    return pipeline_type.open(
        model,
        options.revision,
        dtype=options.dtype,
        scheduler=scheduler,
        replaced=replaced,
        embeddings=options.embedding,
        accelerate=accelerate,
        **{name: getattr(options, name) for name in names},
    )


def load_weights(pipeline, model, options):
    """The parameters of open_model's pipeline, NumPy arrays."""
    weights = dict(variant=options.variant, lora=options.lora, unet_delta=options.unet_delta)
    params = pipeline.load_params(model, options.revision, **weights)
    cast_params(pipeline, params)
    return params


def plan_images(pipeline, devices, num_images, batch_size, branches, sizes, vae_tile=None):
    """Choose the VAE's tiles and say what will be made; refuse what cannot fit into memory.

    Args:
        pipeline: as from open.
        devices: that make images: all of them, or the first of each group of the layout.
        num_images: number of images on all devices.
        batch_size: images of a device at once, at most.
        branches: of guidance.
        sizes: (width, height) of the images, pixels.
        vae_tile: side of the VAE's tiles, pixels; 0: whole images; None: tiles if whole images
            would not fit into the memory.

    Returns:
        (the pipeline, whose VAE has the tile; a line for the user, with a lower bound on the
        memory).

    Raises:
        ValueError: the images need more memory than there is, or vae_tile is no valid tile.
    """
    for _, height in {*sizes}:
        pipeline.check_parallel(branches, height)
    if vae_tile is not None:
        pipeline = replace(pipeline, vae=with_tile(pipeline.vae, vae_tile))
    size, up_to = max(sizes, key=math.prod), "up to " if len({*sizes}) > 1 else ""
    batch_size = min(batch_size, math.ceil(num_images / len(devices)))
    pipeline = with_balanced_components(pipeline, batch_size, size)
    bound = bound_memory(pipeline, devices, batch_size, size)
    layout, platform = pipeline.layout, devices[0].platform
    where = f"on each of {len(devices)}"
    if layout and layout.components:
        places = ", ".join(f"{name} on {number}" for name, number in layout.components)
        where = f"with {places} of {len(layout.devices)}"
    elif layout and layout.group_size > 1:
        where += f" x {layout.group_size}"
    planned = (
        f"{num_images} image{'s' * (num_images > 1)} of {up_to}{size[0]}x{size[1]} pixels, "
        f"{batch_size} at once {where} {devices[0].device_kind}; memory: at least "
        f"{in_bytes(bound.needed)}"
    )
    if bound.available:
        planned += f" of {in_bytes(bound.available)}"
        if bound.needed > bound.available:
            raise ValueError(
                f"{planned}, of which the weights are {in_bytes(bound.params)}; lower --batch_size "
                "or the size"
            )
    if vae_tile is None:
        vae_tile = choose_vae_tile(pipeline, batch_size, size, bound.left, platform)
        pipeline = replace(pipeline, vae=with_tile(pipeline.vae, vae_tile))
    if vae_tile and max(size) > vae_tile:
        planned += f"; the VAE works in tiles of {vae_tile} pixels"
    return pipeline, planned
