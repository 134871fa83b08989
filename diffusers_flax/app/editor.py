"""The page's model, and the one thread that makes images with it.

    editor = Editor(config, layout)
    editor.open()
    request = editor.submit(ImageRequest(settings, image))
    async for progress in editor.follow(request): ...
    image, = request.images

Requests run one after another, first come, first served.
"""

import asyncio
import logging
import math
import threading
import time
from collections import deque
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from diffusers_flax.acceleration.plans import parse
from diffusers_flax.acceleration.previews import Preview
from diffusers_flax.app.settings import (
    SCALES,
    SHAPES,
    Limits,
    Settings,
    check_settings,
    page_recipe,
)
from diffusers_flax.data.images import load_image
from diffusers_flax.devices.precision import choose_dtype
from diffusers_flax.evaluation.edits import EditList, check_model, plan_edits
from diffusers_flax.generating.batches import check_finite_images, devices_for
from diffusers_flax.generating.defaults import with_defaults
from diffusers_flax.generating.flags import from_flags
from diffusers_flax.generating.inputs import inputs_of, key_of
from diffusers_flax.generating.masks import finish_image, fit_mask, stretch_mask
from diffusers_flax.generating.models import (
    ModelOptions,
    Sampling,
    check_sampling,
    load_model,
    plan_images,
)
from diffusers_flax.generating.recipes import MASKED
from diffusers_flax.generating.sizes import fit_image, result_size, shared_size, stretch
from diffusers_flax.generating.tasks import sees_mask, task_of, with_task
from diffusers_flax.images import prepare_masks, to_pil
from diffusers_flax.loading.lora import split_weight
from diffusers_flax.loading.tokenizer import sequences_of_ids, too_long
from diffusers_flax.parameters import cast_params, place_params
from diffusers_flax.pipelines.base import TEXT_ENCODERS
from diffusers_flax.pipelines.inpainting import Inpainting
from diffusers_flax.pipelines.instruct_pix2pix import InstructPix2Pix

MAX_PROGRAMS = 24  # in memory; older ones stay in the compilation cache on the disk
MAX_PREVIEWS = 10  # for each image
EDIT = "edit"  # a task beside the tasks of generating/tasks.py
POLL = 0.15  # seconds between two checks of a request's progress

logger = logging.getLogger(__name__)


class Stopped(Exception):
    """A request was cancelled, or its page was closed."""


class Progress(NamedTuple):
    """How far a request is."""

    stage: str  # "waiting", "loading", "compiling", "making"
    since: float  # time.monotonic() at which the stage began
    step: int = 0  # denoising steps done, of the current batch
    image: int = 0  # index of the batch's first image, in a comparison
    first: int = 0  # steps of all batches done before the stage began
    per_step: float | None = None  # measured seconds of a step
    preview: Any = None  # PIL image


@dataclass(eq=False)
class ImageRequest:
    """One page's request for an image, or for a comparison."""

    settings: Settings
    image: Image.Image | None = None  # original image, of any size
    mask: Image.Image | None = None  # of the image's size, white where it may change
    source: Path | None = None  # file of the original image
    scales: tuple = ()  # (guidance_scale, image_guidance_scale) of each image; (): the settings'
    is_trial: bool = False  # only compiles
    at_once: int = 1  # batch size
    size: tuple[int, int] = (0, 0)  # (width, height) of the images, set when the request starts
    has_compiled: bool = False
    progress: Progress = field(default_factory=lambda: Progress("waiting", time.monotonic()))
    images: list = field(default_factory=list)  # PIL
    seconds: float | None = None
    error: Exception | None = None
    stopped: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self):
        settings = self.settings
        self.scales = self.scales or ((settings.guidance_scale, settings.image_guidance_scale),)

    def report(self, stage, **more):
        """Update the progress; a new stage starts its clock."""
        progress = self.progress._replace(stage=stage, **more)
        if stage != self.progress.stage:
            done = self.steps_done(progress)
            progress = progress._replace(since=time.monotonic(), first=done)
        self.progress = progress

    def steps_done(self, progress):
        """Denoising steps done in all batches; the images of a batch share its steps."""
        batches = progress.image // self.at_once
        return batches * self.settings.num_steps + progress.step

    def steps_left(self, progress):
        """Denoising steps to do in all batches."""
        batches = -(-len(self.scales) // self.at_once)
        return max(0, batches * self.settings.num_steps - self.steps_done(progress))


@dataclass(eq=False)
class PageProgram:
    """A pipeline, and whether its program is compiled."""

    pipeline: Any
    is_compiled: bool = False


class Editor:
    """The model, its programs, and the queue of requests."""

    def __init__(self, config, layout=None):
        """config: edit_app.py's flags; layout: Layout of the devices, or None."""
        config = with_defaults(config, [config.model], config.lora)
        self.config, self.layout = config, layout and layout.first(1)
        sampling = from_flags(Sampling, config)
        others = "text to image", "inpainting"
        self.checked = check_model(config.model, config.resolution, sampling, others)
        _, configs = self.checked.pipeline_type.check(config.model)
        self.scheduler_config = configs["scheduler"]
        self.task = first_task(self.checked.pipeline_type, configs)
        self.edits = self.task == EDIT
        self.loras = named_loras(config.lora)
        self.limits = self._limits(configs)
        self.decoder = config.preview_decoder or None
        if self.decoder and not config.progress:
            raise ValueError("--preview_decoder is for --progress; leave --no_progress out")
        check_settings(replace(self.defaults(), instruction="red"), self.limits)
        self.check(self.defaults())
        # A single image runs on the first device or the layout, a comparison on all devices.
        self.devices = devices_for(1, self.layout)
        self.all_devices = self.devices if self.layout else jax.local_devices()
        self.programs = {}
        self.compile_seconds = None  # of the last program
        self.pixel_seconds = None  # of a denoising step, per pixel
        self.params, self.weights = None, None
        self.requests, self.condition = deque(), threading.Condition()
        self.current = self.program = self.trial_error = None  # of the thread

    def _limits(self, configs):
        """The model's Limits; configs: of its components."""
        levels = len(configs["unet"].get("block_out_channels", (0,) * 4))
        smallest = self.checked.factor * 2 ** (levels - 1)
        largest = self.config.max_resolution or 2 * self.checked.resolution
        if largest < self.checked.resolution:
            raise ValueError(
                f"--max_resolution {largest} is below the resolution of the model, "
                f"{self.checked.resolution}; give --resolution too"
            )
        return Limits(smallest, largest, tuple(self.loras), takes_strength=not self.edits)

    def defaults(self):
        """The page's initial Settings."""
        names = (*SCALES, "num_inference_steps", "scheduler", "accelerate", "seed")
        flags = {name: getattr(self.config, name) for name in names}
        flags |= {"strength": 1.0} if self.task == "inpainting" else {}
        return Settings("", resolution=self.checked.resolution, lora=tuple(self.loras), **flags)

    def recipe(self, request, settings):
        """The page_recipe of an image of a request; settings: the image's."""
        of_model = (
            "embedding",
            "unet_delta",
            "config_name_or_path",
            "dtype",
            "storage",
            "vae_dtype",
        )
        names = (*SCALES, "num_inference_steps", "seed", "scheduler", "accelerate")
        values = {name: getattr(self.config, name) for name in of_model}
        values |= {
            name: getattr(settings, name) for name in (*names, "negative_prompt", "strength")
        }
        flags = {"model": str(self.config.model)}
        flags |= {name: x for name, x in values.items() if x not in (None, (), "")}
        flags["edit" if self.edits else "prompt"] = settings.instruction
        if settings.lora:
            specs = (split_weight(self.loras[name]) for name in settings.lora)
            flags["lora"] = [f"{file}:{weight * settings.lora_weight:g}" for file, weight in specs]
        if request.image is None:
            flags["width"], flags["height"] = request.size
        else:
            flags["resolution"] = settings.resolution
        files = {}
        if request.source is not None:
            files = {"input" if self.edits else "image": request.source}
            flags |= {name: Path(file).name for name, file in files.items()}
        if request.mask is not None:
            flags |= {MASKED: True, "mask_feather": settings.mask_feather}
        return page_recipe(settings, flags, files)

    def open(self):
        """Load the model and start the thread."""
        config = self.config
        size = (self.checked.resolution,) * 2
        preview = Preview(1, self._show, self.decoder) if config.progress else None
        options = from_flags(
            ModelOptions,
            config,
            dtype=choose_dtype(config.dtype),
            lora=self._lora_specs(self.defaults()),
            layout=self.layout,
            preview=preview,
        )
        self.pipeline, params = load_model(
            config.model,
            self.checked.pipeline_type,
            self.checked.scheduler,
            (),  # --accelerate comes with the settings
            options,
            partial(self._plan, settings=self.defaults(), size=size),
        )
        if config.accelerate:  # int8 changes the parameters
            cast_params(self._with_settings(self.defaults()), params)
        self._place(params, self._weights_of(self.defaults()))
        threading.Thread(target=self._work, name="editor", daemon=True).start()

    # ------------------------------------------------------------ checks and estimates

    def check(self, settings):
        """The scheduler for settings; a ValueError if the model does not take them.

        check_settings comes first.
        """
        pipeline_type, config = self.checked.pipeline_type, self.scheduler_config
        sampling = self._sampling(settings)
        return check_sampling(pipeline_type, config, self.config.model, sampling)

    def _sampling(self, settings):
        """The Sampling of settings."""
        return from_flags(Sampling, settings, accelerate=self._acceleration(settings))

    def size_of(self, settings, image_size=None):
        """(width, height) of the result; image_size: of the original image."""
        shape = image_size or SHAPES[settings.shape]
        return result_size(shape, settings.resolution, self.checked.factor)

    def program_size(self, request):
        """(width, height) of a request's program, see shared_size."""
        size = self.size_of(request.settings, request.image and request.image.size)
        return shared_size(size, self.checked.factor) if request.image else size

    def seconds_left(self, request, progress):
        """Estimated seconds of a request's remaining denoising steps; None without a measurement.

        Before its first step, the estimate scales the previous request's time by pixels and steps.
        """
        per_step = progress.per_step
        if per_step is None and self.pixel_seconds:
            per_step = self.pixel_seconds * self._pixels(request)
        return per_step and per_step * request.steps_left(progress)

    def _pixels(self, request):
        return math.prod(self.program_size(request))

    def cut_text(self, text):
        """A sentence about the tokens that a text encoder cuts off; "" if the text fits."""
        for name, encoder in TEXT_ENCODERS.items():
            if tokenizer := getattr(self.pipeline, name, None):
                length = getattr(self.pipeline, encoder).module.max_position_embeddings
                (ids,) = sequences_of_ids(tokenizer, [text])
                if message := too_long(tokenizer, ids, length):
                    return message
        return ""

    # ------------------------------------------------------------ the queue

    def submit(self, request):
        """Add a request to the queue; raise a ValueError if it is full, or a mask is missing."""
        if self.task == "inpainting" and request.mask is None:
            raise ValueError(
                "there is no mask, which an inpainting model needs; paint the part that may "
                "change, or upload a mask"
            )
        with self.condition:
            if len(self.requests) > self.config.max_queue:
                raise ValueError(
                    f"{self.config.max_queue} requests wait already; try again in a few minutes"
                )
            self.requests.append(request)
            self.condition.notify()
        return request

    def num_before(self, request):
        """Number of requests that run or wait before this one."""
        with self.condition:
            return self.requests.index(request) if request in self.requests else 0

    def stop(self, request):
        """Cancel a request. It leaves the queue, or ends after its current step."""
        request.stopped.set()
        with self.condition:
            if request in self.requests and request is not self.current:
                self.requests.remove(request)
                request.error = Stopped()
                request.done.set()

    async def follow(self, request):
        """Yield a request's Progress until it is done. A request that nobody follows ends."""
        try:
            while not request.done.is_set():
                yield request.progress
                await asyncio.sleep(POLL)
        finally:
            if not request.done.is_set():
                self.stop(request)
        if request.error:
            raise request.error

    def _work(self):
        while True:
            with self.condition:
                self.condition.wait_for(lambda: self.requests)
                request = self.current = self.requests[0]
            try:
                self._make(request)
            except Exception as error:
                request.error = error_of(error, request)
                if request.is_trial and not isinstance(request.error, Stopped):
                    self.trial_error = request.error
            with self.condition:
                self.current = None
                self.requests.popleft()
            request.done.set()

    # ------------------------------------------------------------ the model, in the thread

    def _make(self, request):
        started = time.perf_counter()
        settings = request.settings
        self._load_weights(request)
        if request.stopped.is_set():
            raise Stopped
        request.size = self.size_of(settings, request.image and request.image.size)
        size = self.program_size(request)
        mask = None if request.mask is None else fit_mask(request.mask, request.size)
        if mask and not mask.getbbox():
            raise ValueError("the mask has no white, so nothing may change; make a part white")
        if self.edits and mask and mask.getextrema()[0]:
            mask = None  # all white restricts nothing
        task = EDIT if self.edits else task_of(request.image, mask)
        image = request.image and fit_image(request.image, request.size)
        request.at_once = len(self.all_devices) if len(request.scales) > 1 else 1
        arrays = self._arrays(settings, task, size, image, mask, request.at_once)
        for first in range(0, len(request.scales), request.at_once):
            request.report("making", image=first, step=0)
            scales = request.scales[first : first + request.at_once]
            if len(request.scales) > 1:
                scales = [with_all_branches(*one) for one in scales]
            of_image = replace(settings, **dict(zip(SCALES, scales[0])))
            kind = task, mask is not None, size
            self.program = program = self._program(of_image, kind, request.at_once)
            if not program.is_compiled:
                request.report("compiling")
                request.has_compiled = True
            images = self._call(program.pipeline, task, arrays, of_image, scales)
            if request.stopped.is_set():
                raise Stopped
            images = np.asarray(images).reshape(-1, size[1], size[0], 3)[: len(scales)]
            if not program.is_compiled:  # no step was shown
                self.compile_seconds = time.monotonic() - request.progress.since
                program.is_compiled = True
            elif not self.config.progress:
                self._measure(request, (first // request.at_once + 1) * settings.num_steps)
            check_finite_images(images, "the images", settings.lora)
            request.images += [
                finish_image(made, request.size, image, mask, settings.mask_feather)
                for made in to_pil(images)
            ]
        request.seconds = time.perf_counter() - started

    def _arrays(self, settings, task, size, image, mask, num_devices):
        """A call's arrays by their names, the same for each device, (devices, 1, ...).

        size: (width, height) of the program; image, mask: PIL, of the result's size, or None.
        """
        pipeline = self.pipeline
        arrays = {"prompt_ids": pipeline.prepare_text_inputs(settings.instruction)}
        if settings.negative_prompt:
            arrays["neg_prompt_ids"] = pipeline.prepare_text_inputs(settings.negative_prompt)
        images = image and [stretch(image, size)]
        masks = mask and [stretch_mask(mask, size)]
        arrays |= inputs_of(pipeline, task, images, masks)
        if task == EDIT and masks:
            arrays["mask"] = prepare_masks(masks)
        arrays = {
            name: x if x is None else np.broadcast_to(x, (num_devices, *x.shape))
            for name, x in arrays.items()
        }
        return arrays | {"prng_seed": jnp.broadcast_to(key_of(settings.seed), (num_devices, 1))}

    def _call(self, pipeline, task, arrays, settings, scales):
        """Start a program; returns its images, on devices.

        Args:
            pipeline: of the task.
            arrays: of _arrays.
            settings: Settings.
            scales: of each image, at most one per device.
        """
        num_devices = len(arrays["prompt_ids"])
        if num_devices == 1:
            (scales,) = scales
        else:
            scales = [*scales, *scales[-1:] * (num_devices - len(scales))]
            scales = np.float32(scales).T[..., None]  # (2, devices, 1)
        options = {"num_inference_steps": settings.num_inference_steps}
        options["guidance_scale"] = scales[0]
        if task == EDIT:
            options["image_guidance_scale"] = scales[1]
        elif task == "text to image":
            width, height = self.size_of(settings)
            options |= {"width": width, "height": height}
        else:
            options["strength"] = settings.strength
        params = self.params[num_devices]
        return pipeline(params=params, jit=True, **arrays, **options).images

    def _program(self, settings, kind, num_devices):
        """The PageProgram that makes an image on each device; a new one is not compiled yet.

        kind: (task, whether there is a mask, (width, height)).
        """
        task, _, size = kind
        branches = from_flags(Sampling, settings).branches(self.checked.pipeline_type)
        key = (
            *(settings.scheduler, settings.accelerate, settings.num_inference_steps),
            *(settings.num_steps, *kind, branches, bool(settings.negative_prompt), num_devices),
        )
        if key not in self.programs:
            if len(self.programs) == MAX_PROGRAMS:
                self.programs.clear()
                jax.clear_caches()
            pipeline = self._with_settings(settings)
            if task != EDIT:
                pipeline = with_task(pipeline, task)
            pipeline, _ = self._plan(pipeline, settings, size)
            self.programs[key] = PageProgram(pipeline)
        return self.programs[key]

    def _with_settings(self, settings):
        """The pipeline with the scheduler and accelerations of settings."""
        accelerate = parse(self._acceleration(settings))
        every, decoder = 1, self.decoder
        if decoder:
            every = -(-settings.num_steps // MAX_PREVIEWS)
            decoder = "" if accelerate.tiny_decoder else decoder  # the pipeline's is the same
        return replace(
            self.pipeline,
            scheduler=self.check(settings),
            accelerate=accelerate,
            preview=Preview(every, self._show, decoder) if self.config.progress else None,
            compiled=set(),
        )

    def _acceleration(self, settings):
        """The accelerations of settings; taesd gets the path of the page's decoder."""
        if "taesd" in settings.accelerate and not self.decoder:
            raise ValueError("--accelerate taesd needs a TAESD; start with --preview_decoder")
        named = {"taesd": f"taesd:path={self.decoder}"}
        return tuple(named.get(spec, spec) for spec in settings.accelerate)

    def _plan(self, pipeline, settings, size):
        """(pipeline, with a tiled VAE if it needs one; a line about the memory)."""
        branches = from_flags(Sampling, settings).branches(self.checked.pipeline_type)
        if self.edits:
            return plan_edits(pipeline, EditList([None], [size]), branches, self.config.vae_tile)
        pipeline.check_parallel(branches, size[1])
        return plan_images(
            pipeline,
            self.devices,
            num_images=1,
            batch_size=1,
            branches=branches,
            size=size,
            vae_tile=self.config.vae_tile,
        )

    def _lora_specs(self, settings):
        """FILE:WEIGHT of each LoRA in settings."""
        chosen = (split_weight(self.loras[name]) for name in settings.lora)
        return tuple(f"{file}:{weight * settings.lora_weight}" for file, weight in chosen)

    def _weights_of(self, settings):
        """The settings that parameters depend on: LoRA files and the mode of int8."""
        int8 = parse(self._acceleration(settings)).int8
        return self._lora_specs(settings), int8 and int8.mode

    def _load_weights(self, request):
        """Read the parameters again if a request has other LoRA files or another int8 mode."""
        weights = self._weights_of(request.settings)
        if weights == self.weights:
            return
        request.report("loading")
        self.params = self.weights = None  # frees the memory first
        options = {"lora": weights[0], "unet_delta": self.config.unet_delta}
        params = self.pipeline.load_params(self.config.model, **options)
        cast_params(self._with_settings(request.settings), params)
        self._place(params, weights)

    def _place(self, params, weights):
        """Move parameters to all devices; weights: their _weights_of."""
        place_params(params, self.all_devices, self.pipeline.layout)
        self.params = {len(self.all_devices): params}
        if len(self.all_devices) > 1:  # the same memory
            first = jax.tree.map(lambda x: x.addressable_shards[0].data, params)
            self.params[1] = first
        self.weights = weights

    def _show(self, step, keys, images):
        """Take a step's preview; the program calls it, in any thread."""
        request = self.current
        if request is None:
            return
        if request.progress.stage == "compiling":
            self.compile_seconds = time.monotonic() - request.progress.since
            self.program.is_compiled = True
        preview = request.progress.preview
        if images is not None:
            preview = stretch(to_pil(images)[0], request.size)
        request.report("making", step=step, preview=preview)
        self._measure(request, request.steps_done(request.progress))
        # An error ends the program at once. On TPUs, where this is untested, the program runs to
        # its end and its image is dropped.
        is_unwanted = request.stopped.is_set() or request.is_trial
        if is_unwanted and self.devices[0].platform != "tpu":
            raise Stopped

    def _measure(self, request, num_steps):
        """Measure the seconds of a step; num_steps: the request's steps done."""
        if (num_steps := num_steps - request.progress.first) > 0:
            per_step = (time.monotonic() - request.progress.since) / num_steps
            request.report(request.progress.stage, per_step=per_step)
            self.pixel_seconds = per_step / self._pixels(request)


class NoStops(logging.Filter):
    """Drops jax's log entry about a callback that raises Stopped."""

    def filter(self, record):
        return not (record.exc_info and isinstance(record.exc_info[1], Stopped))


def first_task(pipeline_type, configs):
    """The task of the page's first tab: what a model does with the least input.

    Args:
        pipeline_type: class of the model's pipeline.
        configs: {component: its config}.
    """
    if issubclass(pipeline_type, InstructPix2Pix):
        return EDIT
    is_inpainting = issubclass(pipeline_type, Inpainting) and sees_mask(configs)
    return "inpainting" if is_inpainting else "text to image"


def named_loras(specs):
    """{short name on the page: spec} of --lora; a name used before gets its folder's in front."""
    named = {}
    for spec in specs:
        path = Path(split_weight(spec)[0])
        named[path.stem if path.stem not in named else f"{path.parent.name}/{path.stem}"] = spec
    return named


def with_all_branches(guidance_scale, image_guidance_scale):
    """The scales, moved by less than float32 resolves where a branch would be left out.

    All images of a comparison then share one program.
    """
    if image_guidance_scale in (1, guidance_scale):
        image_guidance_scale = math.nextafter(image_guidance_scale, math.inf)
    if guidance_scale in (0, 1):
        guidance_scale = math.nextafter(guidance_scale, math.inf)
    return guidance_scale, image_guidance_scale


def error_of(error, request):
    """The exception that a request's page shows."""
    text = str(error)
    if request.stopped.is_set() or (request.is_trial and "Stopped" in text):
        return Stopped()
    if "RESOURCE_EXHAUSTED" in text:
        return ValueError("the memory of the device is too small; choose a smaller size")
    if not isinstance(error, ValueError | OSError):
        logger.error("a request failed", exc_info=error)
    return error


def trial_request(editor, images):
    """A request that compiles the program of the first example image, or of a square.

    images: paths of the examples.
    """
    settings, image, mask = replace(editor.defaults(), instruction="a photograph"), None, None
    if editor.task != "text to image":
        image = load_image(images[0]) if images else Image.new("RGB", (64, 64), "grey")
    if editor.task == "inpainting":
        mask = Image.new("1", image.size, 1)
    return ImageRequest(settings, image, mask, is_trial=True)
