"""What a model is asked to do, and the pipeline that does it.

    task = task_of(image=photograph, mask=None, control=())  # "image to image"
    pipeline = with_task(pipeline, task)

The tasks are "text to image", "image to image", "inpainting" and "ControlNet".
"""

from dataclasses import fields

import diffusers_flax
from diffusers_flax.loading.directories import has_component, read_index
from diffusers_flax.pipelines.base import class_of
from diffusers_flax.pipelines.instruct_pix2pix import InstructPix2Pix
from diffusers_flax.pipelines.stable_diffusion_xl import XLComponents

CLASSES = {  # of each task, with "XL" or nothing in place of the braces
    "text to image": "FlaxStableDiffusion{}Pipeline",
    "image to image": "FlaxStableDiffusion{}Img2ImgPipeline",
    "inpainting": "FlaxStableDiffusion{}InpaintPipeline",
    "ControlNet": "FlaxStableDiffusion{}ControlNetPipeline",
}


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
    names = {field.name for field in fields(pipeline_type)} - {"compiled"}
    return pipeline_type(**{name: x for name, x in vars(pipeline).items() if name in names})


def check_tasks(model, tasks, replaced=None):
    """Check that a model can do tasks, without reading weights.

    Args:
        model: value of --model.
        tasks: all tasks that it is asked to do.
        replaced: {component: object} in place of the model's, see FlaxDiffusionPipeline.check.

    Returns:
        (whether the model is of SDXL's family; {component: its config}).

    Raises:
        ValueError: it is another kind of model; names the program or the flags for it.
    """
    index = read_index(model)
    named = class_of(index, model)
    if issubclass(named, InstructPix2Pix):
        raise ValueError(
            f"--model {model} is an edit model ({named.torch_class_name}); edit_cli.py edits "
            "images with it"
        )
    is_xl = issubclass(named, XLComponents)
    if is_xl and not has_component(index, "text_encoder") and "text to image" in tasks:
        raise ValueError(
            f"--model {model} is a refiner, which needs an image; give --image, or name it as "
            "--refiner beside the base model"
        )
    # Inpainting takes UNets of 4 and 9 channels, so that it comes first and finds the channels.
    _, configs = pipeline_for("inpainting", is_xl).check(model, replaced=replaced)
    sees_mask = configs["unet"].get("in_channels", 4) != configs["vae"].get("latent_channels", 4)
    others = {*tasks} - {"inpainting"}
    if sees_mask and others:
        raise ValueError(
            f"--model {model} is an inpainting model, whose UNet sees a mask, and cannot do "
            f"{' or '.join(sorted(others))}; give --image and --mask, or another model"
        )
    return is_xl, configs
