"""The arrays of a batch of requests, and what its images have in common."""

import inspect
from contextlib import contextmanager
from typing import NamedTuple

import jax
import numpy as np
from PIL import Image

from diffusers_flax.generating.masks import load_mask, stretch_mask
from diffusers_flax.generating.sizes import load_fitted, stretch
from diffusers_flax.images import prepare_images, prepare_masks
from diffusers_flax.models.controlnet import FlaxMultiControlNetModel
from diffusers_flax.pipelines.running import Options
from diffusers_flax.pipelines.sampling import timestep_options

# Of scikit-image's canny: nearest to OpenCV's Canny(image, 100, 200), which published examples use.
# Of five photographs, 86% of the edges of each are within a pixel of the other's (F-measure).
CANNY = {"sigma": 0.5, "low_threshold": 0.2, "high_threshold": 0.4}
# Flags with a number for each ControlNet or for all.
CONTROL_OPTIONS = (
    "controlnet_conditioning_scale",
    "control_guidance_start",
    "control_guidance_end",
)


class Kind(NamedTuple):
    """What the images of a batch have in common: all that their program depends on, and numbers.

    Fields:
        size: (width, height) of the program.
        task: of CLASSES.
        options: (argument, value) of the call, in pairs.
        text: structure and shapes of the prompts' arrays.
        is_guided: whether the guidance scale is above 1; it may differ between images then.
        has_latents: whether the initial noise is given.
    """

    size: tuple
    task: str
    options: tuple
    text: tuple
    is_guided: bool
    has_latents: bool


def kind_of(request, size, prompts=None):
    """The Kind of a Request.

    Args:
        request: Request.
        size: (width, height) of its program.
        prompts: its Prompts; None: not known yet.
    """
    options = {name: getattr(request, name) for name in ("num_inference_steps", "eta")}
    options |= dict(timesteps=request.timesteps or None, guidance_rescale=request.guidance_rescale)
    if not (is_guided := request.guidance_scale > 1):
        options["guidance_scale"] = request.guidance_scale
    if request.strength is not None:
        options["strength"] = request.strength
    if request.task == "text to image":
        options |= dict(width=size[0], height=size[1])
    if request.control:
        given = {name: getattr(request, name) for name in CONTROL_OPTIONS}
        options |= {name: as_numbers(x) for name, x in given.items() if x}
        options["guess_mode"] = request.guess_mode
    text = jax.tree.structure(prompts), *(x.shape for x in jax.tree.leaves(prompts))
    options = tuple(sorted(options.items()))
    return Kind(size, request.task, options, text, is_guided, request.latents is not None)


@contextmanager
def naming_line(request):
    """Context in which a ValueError begins with the request's line in its list."""
    try:
        yield
    except ValueError as error:
        if request.line is None:
            raise
        raise ValueError(f"line {request.line}: {error}") from error


def check_call(pipeline, request, size, denoising_end=None):
    """Raise a ValueError for a Request that a pipeline does not take, before weights are read.

    Args:
        pipeline: of the request's task.
        request: Request.
        size: (width, height) of its program.
        denoising_end: as for the call.
    """
    branches = pipeline.guidance_branches(request.guidance_scale)
    pipeline.check_parallel(branches, size[1])
    first_step = steps_to_skip(type(pipeline), request)
    steps = request.num_inference_steps, request.timesteps, request.eta
    steps = timestep_options(*steps, pipeline.ays_timesteps)
    options = Options(
        **steps, branches=branches, first_step=first_step, denoising_end=denoising_end
    )
    schedule = pipeline.make_schedule(options, pipeline.latent_shape(1, size[1], size[0]))
    if pipeline.accelerate:
        from diffusers_flax.acceleration.plans import plan_steps  # not for plain images

        plan_steps(pipeline.accelerate, branches, schedule.scales)
    if request.task == "ControlNet":
        check_control(pipeline, request)


def steps_to_skip(pipeline_type, request):
    """The number of first steps that a Request does not run, see --strength."""
    if request.image is None:
        return 0
    default = inspect.signature(pipeline_type.__call__).parameters["strength"].default
    strength = default if request.strength is None else request.strength
    chosen = request.num_inference_steps, request.timesteps, request.eta
    steps = timestep_options(*chosen, pipeline_type.ays_timesteps)
    return pipeline_type.get_timestep_start(steps["num_inference_steps"], strength)


def check_control(pipeline, request):
    """check_call for what is a ControlNet's."""
    if len(request.control) != len(pipeline.nets):
        raise ValueError(
            f"{len(request.control)} --control do not fit {len(pipeline.nets)} --controlnet; give "
            "an image for each ControlNet, in their order"
        )
    given = {name: getattr(request, name) for name in CONTROL_OPTIONS}
    pipeline.values_of_nets({name: as_numbers(x) for name, x in given.items() if x})


def as_numbers(values):
    """A tuple of several numbers as it is, of one as the number."""
    return values if len(values) > 1 else values[0]


def key_of(seed, index=0):
    """The key of the noise of image `index` of a call with jax.random.key(seed)."""
    return jax.random.fold_in(jax.random.key(seed), index)


def keys_of(requests):
    """The key of each image's noise; an edit's depends on its place in the list too."""
    seeds = np.array([request.seed for request in requests], np.uint32)
    return jax.vmap(key_of)(seeds, np.array([request.index or 0 for request in requests]))


def load_inputs(request, size, program_size):
    """The images of a Request for its program.

    Args:
        request: Request.
        size, program_size: (width, height) of the result, and of its program.

    Returns:
        (PIL image, or a tuple of control images, or None; mask or None).
    """

    def load(path):
        return stretch(load_fitted(path, size), program_size)

    if request.control:
        ways = request.control_from or ("image",)
        ways = ways if len(ways) > 1 else ways * len(request.control)
        images = [load(path) for path in request.control]
        return tuple(edges_of(x) if way == "canny" else x for x, way in zip(images, ways)), None
    mask = request.mask and stretch_mask(load_mask(request.mask, size), program_size)
    return request.image and load(request.image), mask


def arrays_of(pipeline, kind, requests, loaded):
    """The arrays of a call, but the prompts.

    Args:
        pipeline: of the task.
        kind: Kind of the requests.
        requests: list of Request.
        loaded: load_inputs of each.

    Returns:
        {argument: array (B, ...) or None}.
    """
    images, masks = zip(*loaded)
    arrays = inputs_of(pipeline, kind.task, list(images), list(masks))
    arrays["prng_seed"] = keys_of(requests)
    if kind.is_guided:
        arrays["guidance_scale"] = np.array([x.guidance_scale for x in requests], np.float32)
    if kind.has_latents:
        latents = np.concatenate([np.load(x.latents)[:1] for x in requests])
        arrays["noise" if kind.task == "image to image" else "latents"] = np.float32(latents)
    return arrays


def join(prompts):
    """The Prompts of several images as one call's arguments."""
    joined = jax.tree.map(lambda *rows: np.concatenate(rows), *prompts)._asdict()
    return {name: x for name, x in joined.items() if x is not None}


def inputs_of(pipeline, task, images=(), masks=()):
    """The arrays of a call that hold its images.

    Args:
        pipeline: with_task's.
        task: of CLASSES.
        images: list of PIL images of one size; for "ControlNet" of tuples of them, one for each
            ControlNet.
        masks: for "inpainting", list of PIL images, white where an image may change.

    Returns:
        {argument: float32 (B, ...)}; for "inpainting" masked_image is None, as the call makes it.
    """
    if task == "text to image":
        return {}
    if task == "ControlNet":
        of_nets = [list(controls) for controls in zip(*images)]
        is_several = isinstance(pipeline.controlnet, FlaxMultiControlNetModel)
        return {"image": pipeline.prepare_image_inputs(of_nets if is_several else of_nets[0])}
    arrays = {"image": prepare_images(images)}
    if task == "inpainting":
        arrays |= {"mask": prepare_masks(masks), "masked_image": None}
    return arrays


def edges_of(image):
    """The edges of a PIL image, white on black, as ControlNets for edges take them.

    Source: Canny, A Computational Approach to Edge Detection (1986).
    """
    from skimage.feature import canny  # a second, not for other images

    grey = np.asarray(image.convert("L"), np.float64) / 255
    return Image.fromarray(np.uint8(canny(grey, **CANNY)) * 255).convert("RGB")
