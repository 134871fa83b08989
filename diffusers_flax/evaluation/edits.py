"""Checking a model that edits images."""

from typing import Any, NamedTuple

from diffusers_flax.generating.models import (
    check_sampling,
    factor_and_resolution,
    pipeline_for,
)
from diffusers_flax.pipelines.base import pipeline_class
from diffusers_flax.pipelines.instruct_pix2pix import InstructPix2Pix


class CheckedModel(NamedTuple):
    """What check_model finds out."""

    pipeline_type: type  # class of the pipeline
    factor: int  # pixels per latent along a side
    resolution: int  # of the longer side of images, pixels
    scheduler: Any


def check_model(model, resolution, sampling, others=()):
    """Check a model and the flags that depend on it, without reading its weights.

    Args:
        model: directory or hub id of an InstructPix2Pix pipeline, SD or SDXL.
        resolution: of the longer side, pixels; None: the model's own.
        sampling: generating.models.Sampling.
        others: tasks of generating/models.py; their pipelines are accepted too.

    Returns:
        CheckedModel.

    Raises:
        ValueError: it is another kind of model; resolution, steps or accelerations do not fit it.
    """
    pipeline_type = pipeline_class(model)
    is_known = any(
        pipeline_type is pipeline_for(task, is_xl) for task in others for is_xl in (False, True)
    )
    if not is_known and not issubclass(pipeline_type, InstructPix2Pix):
        raise ValueError(
            f"--model {model} is a {pipeline_type.torch_class_name}, not an InstructPix2Pix model; "
            "train one with flax_train_instruct_pix2pix.py, or make images with generate_cli.py"
        )
    _, configs = pipeline_type.check(model)
    factor, resolution = factor_and_resolution(configs, resolution)
    scheduler = check_sampling(pipeline_type, configs["scheduler"], model, sampling)
    return CheckedModel(pipeline_type, factor, resolution, scheduler)
