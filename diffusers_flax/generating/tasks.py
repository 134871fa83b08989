"""What a model is asked to do, and the pipeline that does it.

    task = task_of(image=photograph, mask=None, control=())  # "image to image"
    pipeline = with_task(pipeline, task)

The tasks are "text to image", "image to image", "inpainting" and "ControlNet".
"""

import math
import sys
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from tqdm import tqdm

import diffusers_flax
from diffusers_flax.devices.precision import choose_dtype
from diffusers_flax.executables import SavedPrograms
from diffusers_flax.generating.batches import devices_for
from diffusers_flax.generating.flags import from_flags
from diffusers_flax.generating.inputs import check_call, kind_of, naming_line, steps_to_skip
from diffusers_flax.generating.models import (
    ModelOptions,
    Sampling,
    check_sampling,
    load_model,
    plan_images,
)
from diffusers_flax.loading.directories import has_component, read_index
from diffusers_flax.models.vae import with_tile
from diffusers_flax.pipelines.base import class_of
from diffusers_flax.pipelines.instruct_pix2pix import InstructPix2Pix
from diffusers_flax.pipelines.sampling import count_steps
from diffusers_flax.pipelines.stable_diffusion_xl import XLComponents
from diffusers_flax.prompts import prepare_prompts

CLASSES = {  # of each task, with "XL" or nothing in place of the braces
    "text to image": "FlaxStableDiffusion{}Pipeline",
    "image to image": "FlaxStableDiffusion{}Img2ImgPipeline",
    "inpainting": "FlaxStableDiffusion{}InpaintPipeline",
    "ControlNet": "FlaxStableDiffusion{}ControlNetPipeline",
}
NET = "controlnet"  # the component
# What the calls of model and refiner have in common.
REFINER_OPTIONS = ("num_inference_steps", "timesteps", "eta", "guidance_rescale", "guidance_scale")
OF_BOTH_MODELS = ("dtype", "embedding", "storage", "vae_dtype", "saved_programs")
REFINER_ARRAYS = ("prng_seed", "guidance_scale", "mask", "masked_image")


def task_of(image=None, mask=None, control=()):
    """The task of an image; arguments: whether it has an image, a mask, control images."""
    if control:
        return "ControlNet"
    if mask is not None:
        return "inpainting"
    return "text to image" if image is None else "image to image"


def pipeline_for(task, is_xl):
    """The pipeline class of a task and a family."""
    return getattr(diffusers_flax, CLASSES[task].format("XL" if is_xl else ""))


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


def check_tasks(model, tasks, replaced=None, flag="model", takes_images=True, revision=None):
    """Check that a model can do tasks, without reading weights.

    Args:
        model: value of --model, or of another flag.
        tasks: all tasks that it is asked to do.
        replaced: {component: object} in place of the model's, see FlaxDiffusionPipeline.check.
        flag: name of the model's flag.
        takes_images: whether the program has flags for images, masks and refiners.
        revision: branch, tag or commit on the hub.

    Returns:
        (whether the model is of SDXL's family; {component: its config}).

    Raises:
        ValueError: it is another kind of model; names the program or the flags for it.
    """
    index, given = read_index(model, revision), f"--{flag} {model}"
    named = class_of(index, model)
    if issubclass(named, InstructPix2Pix):
        raise ValueError(
            f"{given} is an edit model ({named.torch_class_name}); edit_cli.py edits images with it"
        )
    is_xl = issubclass(named, XLComponents)
    if is_xl and not has_component(index, "text_encoder") and "text to image" in tasks:
        remedy = "give --image, or name it as --refiner beside the base model"
        remedy = remedy if takes_images else "name a base model"
        raise ValueError(f"{given} is a refiner, which needs an image; {remedy}")
    # Inpainting takes UNets of 4 and 9 channels, so that it comes first and finds the channels.
    _, configs = pipeline_for("inpainting", is_xl).check(model, revision, replaced)
    others = " or ".join(sorted({*tasks} - {"inpainting"}))
    if sees_mask(configs) and others:
        remedy = "give --image and --mask, or another model"
        remedy = remedy if takes_images else "name another model"
        raise ValueError(
            f"{given} is an inpainting model, whose UNet sees a mask, and cannot do {others}; "
            f"{remedy}"
        )
    return is_xl, configs


@dataclass(frozen=True)
class CheckedTasks:
    """What check_models finds out without reading weights."""

    pipeline_type: type  # opens the model
    scheduler: Any
    configs: dict  # {component: its config} of the model
    num_steps: int  # of the image with the most
    branches: tuple  # of guidance, for the most
    refiner_type: type | None = None
    refiner_scheduler: Any = None


@dataclass(frozen=True)
class LoadedModels:
    """The models, ready for calls."""

    pipelines: dict  # {task: pipeline}
    params: dict
    refiners: dict  # likewise; {}: no refiner
    refiner_params: dict | None


def check_models(config, requests):
    """Check the models and the flags that depend on them; returns CheckedTasks."""
    tasks = list(dict.fromkeys(request.task for request in requests))
    replaced = {"unet": config.unet} if config.unet else None
    is_xl, configs = check_tasks(config.model, tasks, replaced, revision=config.revision)
    uses_nets, index = "ControlNet" in tasks, read_index(config.model, config.revision)
    if config.controlnet and not uses_nets:
        raise ValueError(f"--controlnet {config.controlnet[0]} needs --control, its image")
    if uses_nets and not config.controlnet and not has_component(index, NET):
        raise ValueError(
            f"--control needs --controlnet, as --model {config.model} has no ControlNet"
        )
    pipeline_type = pipeline_for("ControlNet" if uses_nets else tasks[0], is_xl)
    refiner_type = refiner_configs = refiner_scheduler = None
    if config.refiner:
        refiner_is_xl, refiner_configs = check_tasks(
            config.refiner, ["image to image"], flag="refiner"
        )
        refiner_type = pipeline_for("image to image", is_xl)
        if not (is_xl and refiner_is_xl):
            which = f"--refiner {config.refiner}" if is_xl else f"--model {config.model}"
            raise ValueError(f"{which} is not SDXL; --refiner goes with SDXL's base and refiner")
    names = ("num_inference_steps", "guidance_scale", "timesteps", "eta")
    different = {(*(getattr(x, name) for name in names), x.strength, x.task): x for x in requests}
    num_steps, all_branches = [], []
    for request in different.values():
        own = {name: getattr(request, name) for name in names}
        sampling = from_flags(Sampling, config, **own)
        scheduler = check_sampling(pipeline_type, configs["scheduler"], config.model, sampling)
        with naming_line(request):
            skipped = steps_to_skip(pipeline_for(request.task, is_xl), request)
        num_steps.append(count_steps(scheduler, sampling.steps(pipeline_type)) - skipped)
        all_branches.append(sampling.branches(pipeline_type))
        if config.refiner:
            sampling = replace(sampling, accelerate=for_refiner(config.accelerate))
            scheduler_config = refiner_configs["scheduler"]
            refiner_scheduler = check_sampling(
                refiner_type, scheduler_config, config.refiner, sampling
            )
    branches = max(all_branches, key=len)
    own = pipeline_type, scheduler, configs, max(num_steps), branches
    return CheckedTasks(*own, refiner_type, refiner_scheduler)


def load_models(config, checked, requests, program_sizes, preview, layout):
    """Plan the memory, then read the weights; returns LoadedModels.

    program_sizes: (width, height) of each image's program.
    """
    devices = devices_for(len(requests), layout)
    tasks = list(dict.fromkeys(request.task for request in requests))

    def plan(pipeline):
        different = {kind_of(*row): row[0] for row in zip(requests, program_sizes)}
        for kind, request in different.items():
            with naming_line(request):
                pipeline_of_task = with_task(pipeline, request.task)
                check_call(pipeline_of_task, request, kind.size, config.denoising_end)
        for request in requests if config.prompt_weights else ():
            with naming_line(request):  # weights that are no numbers
                texts = request.prompt, request.negative_prompt
                prepare_prompts(pipeline, *texts, config.long_prompts, config.prompt_weights)
        pipeline, planned = plan_images(
            pipeline,
            devices,
            num_images=len(requests),
            batch_size=min(config.batch_size, math.ceil(len(requests) / len(devices))),
            branches=checked.branches,
            size=max(program_sizes, key=math.prod),
            up_to="up to " if len({*program_sizes}) > 1 else "",
            vae_tile=config.vae_tile,
        )
        used = [config.model, *config.controlnet, *filter(None, [config.refiner])]
        return pipeline, f"{' and '.join(tasks)} with {', '.join(map(str, used))}\n{planned}"

    own = from_flags(
        ModelOptions,
        config,
        dtype=choose_dtype(config.dtype),
        layout=layout,
        preview=preview,
        saved_programs=saved_programs_of(config),
    )
    pipeline, params = load_model(
        config.model, checked.pipeline_type, checked.scheduler, config.accelerate, own, plan
    )
    pipelines = {task: with_task(pipeline, task) for task in tasks}
    if checked.refiner_type is None:
        return LoadedModels(pipelines, params, {}, None)
    options = ModelOptions(
        layout=pipeline.layout,
        **{name: getattr(own, name) for name in OF_BOTH_MODELS},
    )
    refiner, refiner_params = load_model(
        config.refiner,
        checked.refiner_type,
        checked.refiner_scheduler,
        for_refiner(config.accelerate),
        options,
        plan=lambda refiner: (replace(refiner, vae=with_tile(refiner.vae, pipeline.vae.tile)), ""),
    )
    names = {task: "inpainting" if task == "inpainting" else "image to image" for task in pipelines}
    refiners = {task: with_task(refiner, name) for task, name in names.items()}
    return LoadedModels(pipelines, params, refiners, refiner_params)


def saved_programs_of(config):
    """The SavedPrograms of --executable_dir, or None."""
    if not config.executable_dir:
        return None
    if given := [name for name in ("devices", "preview") if getattr(config, name)]:
        raise ValueError(f"--executable_dir excludes --{given[0]}; leave one out")
    return SavedPrograms(config.executable_dir, partial(tqdm.write, file=sys.stderr))


def for_refiner(accelerate):
    """The accelerations of --accelerate that a refiner's few steps take.

    Caches and less guidance are for the steps of the model alone.
    """
    names = ("tome", "int8", "taesd")
    return tuple(spec for spec in accelerate if spec.partition(":")[0] in names)


def call_models(models, kind, arrays, refining, denoising_end):
    """Start the programs of a batch; returns its images, on devices.

    Args:
        models: LoadedModels.
        kind: Kind of the images.
        arrays, refining: arguments of the call of the model, and of the refiner's or None.
        denoising_end: fraction of the denoising after which the refiner goes on.
    """
    make = partial(models.pipelines[kind.task], **arrays, **dict(kind.options), jit=True)
    if refining is None:
        return make(params=models.params).images
    ends = dict(denoising_end=denoising_end, output_type="latent")
    latents = make(params=models.params, **ends).images
    shared = {name: x for name, x in kind.options if name in REFINER_OPTIONS}
    refine = partial(models.refiners[kind.task], **refining, **shared, jit=True)
    return refine(image=latents, params=models.refiner_params, denoising_start=denoising_end).images
