"""Editing images: lists of edits, the model, batches of edits over all devices.

checked = check_model("MODEL", None, sampling)
pipeline, params = load_model("MODEL", checked.pipeline_type, checked.scheduler, (), options)
replicate_params(params, edit_list.devices(None))
for batch, images, seconds in edit_batches(pipeline, params, edit_list, sampling, load, bar):
    ...
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from diffusers_flax.data.lists import raise_problems, read_list
from diffusers_flax.generating.batches import (
    batches_of_places,
    devices_for,
    images_at_once,
    run_batches,
)
from diffusers_flax.generating.models import check_sampling, factor_and_resolution, plan_images
from diffusers_flax.generating.tasks import pipeline_for
from diffusers_flax.images import image_mark
from diffusers_flax.pipelines.base import pipeline_class
from diffusers_flax.pipelines.instruct_pix2pix import InstructPix2Pix

SOFTWARE = "edit_cli.py"  # marks edited images, which the same list may replace


def read_edits(file, flag="edits_jsonl"):
    """Read a list of edits, see data/lists.py; flag: name of the file's flag, for errors.

    Returns:
        List of (original image, instruction, output, mask or None, place of the edit whose output
        is the original image, or None, true edit or None).

    Raises:
        ValueError: a row is invalid, or would overwrite an image that another row edits.
    """
    names = ("original_image", "edit_prompt", "output")
    rows = read_list(f"--{flag} {file}", file, names, ("mask", "edited_image"))
    raise_problems(file, overwritten_images(rows))
    places = {row["line"]: place for place, row in enumerate(rows)}
    return [
        (*(row[x] for x in (*names, "mask")), places.get(row["after"]), row["edited_image"])
        for row in rows
    ]


def overwritten_images(rows):
    """[(line, problem)] of rows whose output exists, is not by edit_cli.py and is read by a row."""
    outputs = {row["line"]: row["output"] for row in rows}
    readers = {row["after"]: row["line"] for row in reversed(rows)}  # the first of several
    return [
        (
            line,
            f"{path} exists, is not by edit_cli.py and would be overwritten, and line "
            f"{readers[line]} reads it; name another output, or delete the file if line "
            f"{readers[line]} is to edit the output of line {line}",
        )
        for line, path in outputs.items()
        if line in readers and path.exists() and image_mark(path)[0] != SOFTWARE
    ]


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
        others: tasks of generating/tasks.py; their pipelines are accepted too.

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


@dataclass(frozen=True)
class EditList:
    """Edits and their batches."""

    edits: Sequence  # objects with index, instruction, mask, and input, which names the image
    sizes: Sequence  # (width, height) of each edit's program
    batch_size: int = 1  # images per device at once, at most
    rounds: Sequence | None = None  # of rounds_of; None: all in one
    use_masks: bool = False  # edits whose mask is not None run in batches of their own
    mask_feather: int = 0  # see InstructPix2Pix.prepare_inputs
    finished: frozenset = frozenset()  # places of edits to leave out

    @property
    def rounds_and_kinds(self):
        """(round, (size, is masked)) of each edit; edits with the same share batches."""
        rounds = self.rounds or [0] * len(self.edits)
        masked = [self.use_masks and edit.mask is not None for edit in self.edits]
        return list(zip(rounds, zip(self.sizes, masked)))

    def devices(self, layout):
        """See devices_for; layout: the pipeline's."""
        largest = max(Counter(self.rounds or [0] * len(self.edits)).values())
        return devices_for(largest, layout)


def plan_edits(pipeline, edit_list, branches, vae_tile=None):
    """plan_images for the largest batch of an EditList; branches, vae_tile: see plan_images."""
    devices = edit_list.devices(pipeline.layout)
    for _, height in set(edit_list.sizes):
        pipeline.check_parallel(branches, height)
    at_once = images_at_once(edit_list.rounds_and_kinds, edit_list.batch_size, len(devices))
    largest = max(at_once, key=lambda kind: at_once[kind] * math.prod(kind[0]))
    up_to = "up to " if len(at_once) > 1 else ""
    return plan_images(
        pipeline,
        devices,
        num_images=len(edit_list.edits),
        batch_size=at_once[largest],
        branches=branches,
        size=largest[0],
        up_to=up_to,
        vae_tile=vae_tile,
    )


def edit_batches(pipeline, params, edit_list, sampling, load, bar, clock=None, in_flight=1):
    """Edit images over several devices, images of one size together.

    The noise of an edit depends on seed and index only. Threads load the next batch.

    Args:
        pipeline: InstructPix2Pix.
        params: its parameters, on each of the devices of edit_list, or as the pipeline's layout
            places them.
        edit_list: EditList.
        sampling: generating.models.Sampling.
        load: (edit, size, is_masked) -> (original image of this size, mask or None), both PIL;
            called in threads, round by round; waits for the outputs that it needs.
        bar: tqdm progress bar in units of edits.
        clock, in_flight: see run_ahead.

    Yields:
        (list of edits, results: NumPy float32 (n, H, W, 3) in [0, 1], seconds on the devices).
    """
    edits, devices = edit_list.edits, edit_list.devices(pipeline.layout)
    # All texts at once, so that warnings come early and once.
    all_prompt_ids = pipeline.prepare_text_inputs([edit.instruction for edit in edits])
    neg_prompt_ids = None
    if sampling.negative_prompt:  # SDXL distinguishes no text from an empty one
        neg_prompt_ids = pipeline.prepare_text_inputs(sampling.negative_prompt)
    base_key = jax.random.key(sampling.seed)
    batches = batches_of_places(
        edit_list.rounds_and_kinds, edit_list.finished, edit_list.batch_size, len(devices)
    )

    def prepare(kind, places, load_all):
        size, is_masked = kind
        batch, n = [edits[place] for place in places], len(places)
        images, masks = zip(*load_all(load, batch, [size] * n, [is_masked] * n))
        indices = np.array([edit.index for edit in batch])
        return batch_inputs(
            pipeline,
            list(images),
            list(masks) if is_masked else None,
            all_prompt_ids[places],
            neg_prompt_ids,
            jax.vmap(jax.random.fold_in, (None, 0))(base_key, indices),
            len(devices),
            edit_list.mask_feather,
        )

    def call(_, arrays):
        prompt_ids, image, keys, neg_ids, mask = arrays
        return pipeline(
            prompt_ids,
            image,
            params,
            keys,
            guidance_scale=sampling.guidance_scale,
            image_guidance_scale=sampling.image_guidance_scale,
            neg_prompt_ids=neg_ids,
            mask=mask,
            jit=True,
            **sampling.steps(type(pipeline)),
        ).images  # (devices, B, H, W, 3)

    made = run_batches(batches, prepare, call, bar, "editing", clock, in_flight)
    for places, images, seconds in made:
        yield [edits[place] for place in places], images, seconds


def batch_inputs(
    pipeline, images, masks, prompt_ids, neg_prompt_ids, keys, num_devices, mask_feather=0
):
    """Arrays for the pipeline's call, of a batch of edits.

    Args:
        pipeline: InstructPix2Pix.
        images: PIL images of one size, (devices * B).
        masks: as many, or None.
        prompt_ids: of their instructions, (devices * B, ...).
        neg_prompt_ids: of the negative prompt, (1, ...), or None.
        keys: one PRNG key per edit.
        num_devices: number of devices.
        mask_feather: see InstructPix2Pix.prepare_inputs.

    Returns:
        (prompt_ids, image, keys, neg_prompt_ids, mask), each (devices, B, ...) or None.
    """
    _, image, *mask = pipeline.prepare_inputs("", images, masks, mask_feather)
    mask = mask[0] if mask else None
    if neg_prompt_ids is not None:
        neg_prompt_ids = np.broadcast_to(neg_prompt_ids, prompt_ids.shape)
    return jax.tree.map(
        lambda x: x.reshape(num_devices, -1, *x.shape[1:]),
        (prompt_ids, image, keys, neg_prompt_ids, mask),
    )
