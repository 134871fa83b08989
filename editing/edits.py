"""What the programs that edit images share: opening a model, batches of edits over all devices.

checked = check_model("MODEL", None, num_inference_steps=50)
pipeline, params = load_model("MODEL", checked.pipeline_type, checked.scheduler, jnp.bfloat16)
replicate_params(params, devices)
for batch, images, seconds in edit_batches(pipeline, params, devices, edits, sizes, load, ...):
    ...
"""

import math
import os
import sys
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from graphlib import TopologicalSorter
from typing import Any, NamedTuple

import jax
import numpy as np
from PIL import Image, ImageOps
from tqdm import tqdm

from dataloading.images import load_image
from dataloading.lists import raise_problems, read_list
from diffusers_flax.images import made_by
from diffusers_flax.messages import warn_once
from diffusers_flax.parameters import cast_params
from diffusers_flax.pipelines.base import (
    MODULES,
    Execution,
    pipeline_class,
    read_acceleration,
)
from diffusers_flax.pipelines.instruct_pix2pix import (
    InstructPix2Pix,
    edit_branches,
    pixels_per_latent,
)
from diffusers_flax.pipelines.memory import plan_images
from diffusers_flax.pipelines.sampling import check_steps, text_branches, timestep_options
from diffusers_flax.schedulers.factory import choose_scheduler
from generating.batches import check_finite_images, run_ahead

SOFTWARE = "edit_cli.py"  # marks edited images, which the same list may replace
TEXT_TO_IMAGE = ("StableDiffusionPipeline", "StableDiffusionXLPipeline")
MAX_LOADERS = 8


def edit_size(size, resolution, factor):
    """Width and height at which an image is edited.

    Args:
        size: its (width, height).
        resolution: of the longer side.
        factor: both are multiples of it.

    Returns:
        (width, height), each the nearest multiple of factor, at least one.
    """
    longer = max(size)
    sides = (side * resolution / longer for side in size)
    return tuple(max(1, math.floor(side / factor + 0.5)) * factor for side in sides)


def shared_size(size, factor):
    """Width and height of the program that edits an image; images of similar shapes have the same.

    The shorter side becomes the nearest of 8/16, 9/16, ..., 16/16 of the longer one. 1:1, 4:3,
    16:10, 16:9 and 2:1 stay as they are, 3:2 changes by about 3%, the most is 7% from 256 pixels
    on. Images longer than 2:1 keep their size.

    Args:
        size: (width, height) of the result, of edit_size.
        factor: both are multiples of it.
    """
    shorter, longer = sorted(size)
    sides = [math.floor(longer * k / 16 / factor + 0.5) * factor for k in range(8, 17)]
    if shorter < sides[0]:
        return size
    shared = min(sides, key=lambda side: (abs(side - shorter), -side))
    return (longer, shared) if size[0] == longer else (shared, longer)


def fit_image(image, size):
    """A PIL image scaled to cover size (width, height) and cropped to it evenly."""
    return ImageOps.fit(image, size, Image.Resampling.LANCZOS)


def stretch(image, size):
    """A PIL image scaled to size (width, height), each side by itself."""
    return image if image.size == size else image.resize(size, Image.Resampling.LANCZOS)


def read_edits(file, flag="edits_jsonl"):
    """Read a list of edits, see dataloading/lists.py; flag: that names the file, for errors.

    Returns:
        List of (path of the image, instruction, output, mask or None, the place in the list of the
        edit whose output the image is, or None).

    Raises:
        ValueError: a row is invalid, or would overwrite an image that another row edits.
    """
    names = ("original_image", "edit_prompt", "output")
    rows = read_list(f"--{flag} {file}", file, names, ("mask",))
    raise_problems(file, overwritten_images(rows))
    places = {row["line"]: place for place, row in enumerate(rows)}
    return [(*(row[name] for name in (*names, "mask")), places.get(row["after"])) for row in rows]


def overwritten_images(rows):
    """Problems of rows whose output exists, is read by another row and is not by edit_cli.py.

    Args:
        rows: of list_rows.

    Returns:
        List of (line, description).
    """
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
        if line in readers and path.exists() and not made_by(path, SOFTWARE)
    ]


def stages_of(edits):
    """The order of edits of which some edit the outputs of others.

    Args:
        edits: objects with after, the place of another edit in the list, or None; no circles.

    Returns:
        The stage of each edit, from 0; it needs outputs of the stage before.
    """
    after = {place: [] if e.after is None else [e.after] for place, e in enumerate(edits)}
    stages = [0] * len(edits)
    for place in TopologicalSorter(after).static_order():
        stages[place] = max((stages[before] + 1 for before in after[place]), default=0)
    return stages


def num_loaders():
    """How many threads decode images."""
    return min(MAX_LOADERS, os.cpu_count() or 1)


def size_of_image(path):
    """(width, height) of the image in a file, which is decoded to check it."""
    return load_image(path).size


def load_fitted(path, size):
    """The image in a file, scaled to cover size (width, height) and cropped to it evenly."""
    return fit_image(load_image(path), size)


class CheckedModel(NamedTuple):
    """What check_model finds out."""

    pipeline_type: type  # class of the pipeline
    factor: int  # pixels per latent along a side
    resolution: int  # of the longer side of images, pixels
    scheduler: Any


def check_model(
    model,
    resolution,
    num_inference_steps,
    scheduler=None,
    timesteps=None,
    eta=None,
    timestep_spacing=None,
    accelerate=(),
    guidance_scales=(7.5, 1.5),
    text_to_image=False,
):
    """Check a model and the flags that depend on it, without reading its weights.

    Args:
        model: directory or hub id of an InstructPix2Pix pipeline, SD or SDXL.
        resolution: of the longer side, pixels; None: the size that the model was made for.
        num_inference_steps: of the scheduler.
        scheduler: a name of SCHEDULERS; None: the model's own.
        timesteps, eta: of the pipeline's call.
        timestep_spacing: see choose_scheduler.
        accelerate: see acceleration.plans.parse.
        guidance_scales: of the instruction and the image.
        text_to_image: take a model that makes images from text, too.

    Returns:
        CheckedModel.

    Raises:
        ValueError: it is no such model, resolution is too small for it, or the scheduler does not
            take the number of steps, or accelerations do not fit.
    """
    accelerate = read_acceleration(accelerate)
    pipeline_type = pipeline_class(model)
    is_known = text_to_image and pipeline_type.torch_class_name in TEXT_TO_IMAGE
    if not is_known and not issubclass(pipeline_type, InstructPix2Pix):
        raise ValueError(
            f"--model {model} is a {pipeline_type.torch_class_name}, not an InstructPix2Pix model; "
            "train one with flax_train_instruct_pix2pix.py, or make images from text with "
            "sdxl_single.py and an SDXL model"
        )
    if accelerate:
        pipeline_type.check_acceleration(accelerate)
    _, configs = pipeline_type.check(model)
    factor = pixels_per_latent(configs, math.inf if resolution is None else resolution)
    if resolution is None:
        side = configs["unet"].get("sample_size") or MODULES["unet"].sample_size
        resolution = factor * (max(side) if isinstance(side, list) else side)
    if (side := edit_size((1, 1), resolution, factor)[0]) != resolution:
        warn_once(
            f"--resolution {resolution} is not a multiple of {factor}; the longer side of images "
            f"becomes {side} pixels"
        )
    found = check_sampling(
        pipeline_type,
        configs["scheduler"],
        model,
        num_inference_steps,
        scheduler,
        timesteps,
        eta,
        timestep_spacing,
        accelerate,
        guidance_scales,
    )
    return CheckedModel(pipeline_type, factor, resolution, found)


def check_sampling(
    pipeline_type,
    scheduler_config,
    model,
    num_inference_steps,
    scheduler=None,
    timesteps=None,
    eta=None,
    timestep_spacing=None,
    accelerate=(),
    guidance_scales=(7.5, 1.5),
):
    """The scheduler that an edit takes, after a check of all that its steps depend on.

    Args:
        pipeline_type: class of the pipeline.
        scheduler_config: content of the model's scheduler_config.json.
        others: as for check_model.

    Raises:
        ValueError: the scheduler does not take the number of steps, or accelerations do not fit.
    """
    accelerate = read_acceleration(accelerate)
    if accelerate:
        pipeline_type.check_acceleration(accelerate)
    found, state = choose_scheduler(scheduler_config, model, scheduler, timestep_spacing)
    steps = timestep_options(num_inference_steps, timesteps, eta, pipeline_type.ays_timesteps)
    branches = branches_of(pipeline_type, *guidance_scales)
    check_steps(found, state, steps, accelerate, branches)
    return found


def branches_of(pipeline_type, guidance_scale, image_guidance_scale):
    """The branches of guidance that a pipeline computes; from text the second scale has none."""
    if issubclass(pipeline_type, InstructPix2Pix):
        return edit_branches(guidance_scale, image_guidance_scale)
    return text_branches(guidance_scale)


def load_model(
    model,
    pipeline_type,
    scheduler,
    dtype,
    lora=(),
    accelerate=(),
    preview=None,
    plan=lambda pipeline: (pipeline, ""),
    embedding=(),
    unet_delta=(),
    layout=None,
    storage=None,
):
    """Read a model.

    Args:
        model, pipeline_type, scheduler: see check_model.
        dtype: of computation and parameters; see cast_params.
        lora: files to fold into the weights, see loading.lora.Loras.
        accelerate: see acceleration.plans.parse.
        preview: Preview or None.
        plan: called with the pipeline before the weights are read; returns the pipeline to use
            and a line to print after that, or "".
        embedding: files with new tokens, see loading.embeddings.Embeddings.
        unet_delta: difference to add to the UNet, see loading.unet_delta.UnetDelta.
        layout: of the devices, see devices.layout.Layout; None: each makes images of its own.
        storage: of the kernels, see models.quantization.store.

    Returns:
        (pipeline, its parameters as NumPy arrays).
    """
    pipeline = pipeline_type.open(
        model,
        dtype=dtype,
        scheduler=scheduler,
        embeddings=embedding,
        execution=Execution(accelerate, preview, layout, storage=storage),
    )
    pipeline, planned = plan(pipeline)
    params = pipeline.load_params(model, lora=lora, unet_delta=unet_delta)
    cast_params(pipeline, params)
    if planned:
        tqdm.write(planned, file=sys.stderr)
    return pipeline, params


def devices_for(num_edits, stages=None, layout=None):
    """The local devices that edits run on, no more than there are edits at once.

    Args:
        num_edits: number of edits.
        stages: of stages_of; None: all in one.
        layout: of the pipeline; the devices are the first ones of its groups.
    """
    if layout is not None:
        return layout.groups
    return jax.local_devices()[: max(Counter(stages or [0] * num_edits).values())]


def rows_at_once(groups, batch_size, num_devices):
    """How many images of each kind a device edits at once: {kind: number}.

    Args:
        groups: the (stage, kind) of each edit.
        batch_size: images per device at once, at most.
        num_devices: number of devices.
    """
    largest = defaultdict(int)
    for (_, kind), count in Counter(groups).items():
        largest[kind] = max(largest[kind], count)
    return {kind: min(batch_size, math.ceil(n / num_devices)) for kind, n in largest.items()}


def plan_edits(pipeline, sizes, batch_size, branches, stages=None, masked=None, vae_tile=None):
    """plan_images for edit_batches.

    Args:
        pipeline, batch_size, branches, vae_tile: as for plan_images.
        sizes: (width, height) of each edit.
        stages: of stages_of; None: all in one.
        masked: whether each edit has a mask; None: none has.
    """
    devices = devices_for(len(sizes), stages, pipeline.layout)
    for _, height in set(sizes):
        pipeline.check_parallel(branches, height)
    kinds = zip(sizes, masked or [False] * len(sizes))
    groups = zip(stages or [0] * len(sizes), kinds)
    at_once = rows_at_once(groups, batch_size, len(devices))
    largest = max(at_once, key=lambda kind: at_once[kind] * math.prod(kind[0]))
    up_to = "up to " if len(at_once) > 1 else ""
    of_images = len(sizes), at_once[largest], branches, largest[0]
    return plan_images(pipeline, devices, *of_images, up_to, vae_tile)


def edit_batches(
    pipeline,
    params,
    devices,
    edits,
    sizes,
    load,
    bar,
    *,
    batch_size,
    seed,
    num_inference_steps,
    guidance_scale,
    image_guidance_scale,
    negative_prompt="",
    timesteps=None,
    eta=None,
    lora=(),
    stages=None,
    load_mask=None,
    mask_feather=0,
    finished=(),
    clock=None,
    in_flight=1,
):
    """Edit images over several devices, images of one size together.

    The noise of an edit depends on seed and its index only. Edits with masks run in batches of
    their own. Threads load the images of the next batch.

    Args:
        pipeline: InstructPix2Pix.
        params: its parameters, on each of the devices, or where the pipeline's layout has them.
        devices: jax devices, one of each group of a layout.
        edits: objects with index, instruction and input, which names the image in errors.
        sizes: (width, height) of each edit.
        load: (edit, size) -> the PIL image to edit, of that size; called in threads.
        bar: tqdm progress bar in units of edits.
        batch_size: images per device at once, at most.
        seed, num_inference_steps, guidance_scale, image_guidance_scale, negative_prompt, timesteps,
            eta: of all edits.
        lora: names for the error of a result that is not finite.
        stages: of stages_of; images of a stage are loaded after those of the stages before, and
            load waits for results that it needs. None: all in one.
        load_mask: (edit, size) -> the PIL mask of an edit whose mask is not None, of that size;
            None: no edit has a mask.
        mask_feather: see InstructPix2Pix.prepare_inputs.
        finished: places of edits to leave out.
        clock, in_flight: see run_ahead.

    Yields:
        (list of edits, their results, NumPy float32 (n, H, W, 3) in [0, 1], seconds that the
        devices took).

    Raises:
        ValueError: a result is not finite.
    """
    # All texts at once, so that warnings come early and once.
    all_prompt_ids = pipeline.prepare_text_inputs([edit.instruction for edit in edits])
    neg_prompt_ids = None
    if negative_prompt:  # SDXL distinguishes no text from an empty one
        neg_prompt_ids = pipeline.prepare_text_inputs(negative_prompt)
    base_key, compiled = jax.random.key(seed), set()
    masked = [load_mask is not None and edit.mask is not None for edit in edits]
    kinds = list(zip(sizes, masked))
    batches = rows_of_batches(kinds, stages, finished, batch_size, len(devices))

    def prepare(kind, rows, num_edits):
        size, is_masked = kind
        padded, all_sizes = [edits[row] for row in rows], [size] * len(rows)
        arrays = batch_inputs(
            pipeline,
            list(loaders.map(load, padded, all_sizes)),
            list(loaders.map(load_mask, padded, all_sizes)) if is_masked else None,
            mask_feather,
            all_prompt_ids[rows],
            neg_prompt_ids,
            base_key,
            np.array([edit.index for edit in padded]),
            len(devices),
        )
        return kind, padded[:num_edits], arrays

    def dispatch(prepared):
        kind, _, (prompt_ids, image, keys, neg_ids, mask) = prepared
        if kind not in compiled:
            compiled.add(kind)
            bar.set_description(f"compiling {kind[0][0]}x{kind[0][1]}")
        return pipeline(
            prompt_ids,
            image,
            params,
            keys,
            num_inference_steps,
            guidance_scale,
            image_guidance_scale,
            neg_prompt_ids=neg_ids,
            jit=True,
            timesteps=timesteps,
            eta=eta,
            mask=mask,
        ).images  # (devices, B, H, W, 3)

    def collect(prepared, images):
        _, batch, _ = prepared
        images = np.asarray(images)
        images = images.reshape(-1, *images.shape[2:])[: len(batch)]
        check_finite_images(images, f"the edit of {batch[0].input} and others", lora)
        return images

    loaders = ThreadPoolExecutor(num_loaders())
    try:
        ready = (prepare(*batch) for batch in batches)
        for prepared, images, seconds in run_ahead(ready, dispatch, collect, clock, in_flight):
            ((width, height), _), batch, _ = prepared
            yield batch, images, seconds
            bar.set_description(f"editing {width}x{height}")
            bar.update(len(batch))
    finally:  # without waiting: after an error load may wait for a result that never comes
        loaders.shutdown(wait=False, cancel_futures=True)


def rows_of_batches(kinds, stages, finished, batch_size, num_devices):
    """Split edits into batches of one kind and stage; the last of each is padded.

    Args:
        kinds: of each edit.
        stages: of stages_of; None: all in one.
        finished: places of edits to leave out.
        batch_size: images per device at once, at most.
        num_devices: number of devices.

    Returns:
        List of (kind, places of the edits, as many as fill the devices, how many are no padding).
    """
    groups = defaultdict(list)
    for row, group in enumerate(zip(stages or [0] * len(kinds), kinds)):
        groups[group].append(row)
    group_of_each = (group for group, rows in groups.items() for _ in rows)
    per_device = rows_at_once(group_of_each, batch_size, num_devices)
    batches = []
    for stage, kind in sorted(groups, key=lambda group: group[0]):
        rows = [row for row in groups[stage, kind] if row not in finished]
        at_once = per_device[kind] * num_devices
        for start in range(0, len(rows), at_once):
            batch = rows[start : start + at_once]
            batches.append((kind, batch + batch[-1:] * (at_once - len(batch)), len(batch)))
    return batches


def batch_inputs(
    pipeline,
    images,
    masks,
    mask_feather,
    prompt_ids,
    neg_prompt_ids,
    base_key,
    indices,
    num_devices,
):
    """The arrays of the pipeline's call for the edits of a batch.

    Args:
        pipeline: InstructPix2Pix.
        images: PIL images of one size, (devices * B).
        masks: as many, or None.
        mask_feather: see InstructPix2Pix.prepare_inputs.
        prompt_ids: of their instructions, (devices * B, ...).
        neg_prompt_ids: of the negative prompt, (1, ...), or None.
        base_key, indices: the noise of an edit has the key fold_in(base_key, index).
        num_devices: number of devices.

    Returns:
        (prompt_ids, image, keys, neg_prompt_ids, mask), each (devices, B, ...); the last two may
        be None.
    """
    _, image, *mask = pipeline.prepare_inputs("", images, masks, mask_feather)
    mask = mask[0] if mask else None
    keys = jax.vmap(jax.random.fold_in, (None, 0))(base_key, indices)
    if neg_prompt_ids is not None:
        neg_prompt_ids = np.broadcast_to(neg_prompt_ids, prompt_ids.shape)
    return jax.tree.map(
        lambda x: x.reshape(num_devices, -1, *x.shape[1:]),
        (prompt_ids, image, keys, neg_prompt_ids, mask),
    )
