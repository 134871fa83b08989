"""Editing pairs of images: checking a model, batches of edits over all devices.

checked = check_model("MODEL", None, sampling)
pipeline = open_model("MODEL", checked.pipeline_type, checked.scheduler, (), options)
params = load_weights(pipeline, "MODEL", options)
replicate_params(params, devices)
for places, images, seconds in edit_batches(evaluation, pipeline, params, sampling, load, bar):
    ...
"""

from pathlib import Path
from typing import Any, NamedTuple

from diffusers_flax.generating.flags import from_flags
from diffusers_flax.generating.models import (
    EDIT,
    check_sampling,
    factor_and_resolution,
    pipeline_for,
)
from diffusers_flax.generating.requests import Request
from diffusers_flax.generating.runner import Models, make_images
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


def edit_batches(evaluation, pipeline, params, sampling, load, bar, todo=None):
    """Edit the images of pairs over all devices, images of one size together.

    The noise of an edit depends on seed and index only. Threads load the next batch.

    Args:
        evaluation: with config, pairs and sizes, see measuring.Evaluation.
        pipeline: InstructPix2Pix.
        params: its parameters, on each device.
        sampling: generating.models.Sampling.
        load: (pair, size, is_masked) -> (original image of this size, mask or None), both PIL;
            called in threads, after the results that it needs are yielded.
        bar: tqdm progress bar in units of edits.
        todo: places of the pairs; None: all.

    Yields:
        (places of pairs, results: NumPy float32 (n, H, W, 3) in [0, 1], seconds on the devices).
    """
    config, pairs, sizes = evaluation.config, evaluation.pairs, evaluation.sizes
    masked = [config.use_masks and pair.mask is not None for pair in pairs]
    requests = [
        from_flags(
            Request,
            sampling,
            prompt=pair.instruction,
            mask=Path() if is_masked else None,
            index=pair.index,
            after=pair.after,
        )
        for pair, is_masked in zip(pairs, masked)
    ]
    yield from make_images(
        Models({EDIT: pipeline}, params),
        requests,
        sizes,
        range(len(pairs)) if todo is None else todo,
        lambda place: load(pairs[place], sizes[place], masked[place]),
        config.batch_size,
        bar,
        in_flight=1,
    )
