"""The model of the page, and the one thread that makes images with it.

    editor = Editor(config, layout)
    editor.open()
    job = editor.submit(Job(settings, image))
    async for progress in editor.follow(job): ...
    image, = job.images

Jobs run one after another, in the order in which they come.
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
import numpy as np
from PIL import Image

from app.settings import SHAPES, Limits, Settings, check_settings
from dataloading.images import load_image
from diffusers_flax.acceleration.plans import parse
from diffusers_flax.acceleration.previews import Preview
from diffusers_flax.images import to_pil
from diffusers_flax.loading.lora import split_weight
from diffusers_flax.loading.tokenizer import sequences_of_ids, too_long
from diffusers_flax.parameters import cast_params, choose_dtype, place_params
from diffusers_flax.pipelines.base import TEXT_ENCODERS
from diffusers_flax.pipelines.instruct_pix2pix import InstructPix2Pix
from editing.edits import (
    EditList,
    batch_inputs,
    check_model,
    edit_size,
    fit_image,
    plan_edits,
    shared_size,
    stretch,
)
from editing.masks import finish_edit, fit_mask, stretch_mask
from generating.batches import check_finite_images, devices_for
from generating.flags import take
from generating.memory import plan_images
from generating.models import ModelOptions, Sampling, check_sampling, load_model

MAX_PROGRAMS = 24  # in memory; those before are in the compilation cache on the disk
MAX_PREVIEWS = 10  # of an image
POLL = 0.15  # seconds between two looks at a job

logger = logging.getLogger(__name__)


class Stopped(Exception):
    """A job was cancelled, or its page closed."""


class Progress(NamedTuple):
    """How far a job is."""

    stage: str  # "waiting", "loading", "compiling", "making"
    since: float  # time.monotonic() of the beginning of the stage
    step: int = 0  # denoising steps done
    image: int = 0  # number of the first image in work, of a comparison
    first: int = 0  # steps of all images that were done when the stage began
    per_step: float | None = None  # seconds, measured
    preview: Any = None  # PIL image


@dataclass(eq=False)
class Job:
    """Images of one request."""

    settings: Settings
    image: Image.Image | None = None  # to edit, of any size
    mask: Image.Image | None = None  # of its size, white where it may change
    scales: tuple = ()  # (guidance_scale, image_guidance_scale) of each image; (): of settings
    is_trial: bool = False  # compiles, and makes no image
    at_once: int = 1  # batch size
    size: tuple[int, int] = (0, 0)  # (width, height) of the images, known when the job begins
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
        """Set the progress."""
        progress = self.progress._replace(stage=stage, **more)
        if stage != self.progress.stage:
            done = self.steps_done(progress)
            progress = progress._replace(since=time.monotonic(), first=done)
        self.progress = progress

    def steps_done(self, progress):
        """Denoising steps done, of all batches; the images of a batch share its steps."""
        batches = progress.image // self.at_once
        return batches * self.settings.num_inference_steps + progress.step

    def steps_left(self, progress):
        """Denoising steps to do, of all batches."""
        batches = -(-len(self.scales) // self.at_once)
        num_steps = batches * self.settings.num_inference_steps
        return max(0, num_steps - self.steps_done(progress))


@dataclass(eq=False)
class Program:
    """A pipeline, and whether its program is compiled."""

    pipeline: Any
    is_compiled: bool = False


class Editor:
    """The model, its programs, and the queue of jobs."""

    def __init__(self, config, layout=None):
        """config: of edit_app.py; layout: of the devices, or None."""
        self.config, self.layout = config, layout and layout.first(1)
        sampling = take(Sampling, config, lora=())
        self.checked = check_model(config.model, config.resolution, sampling, text_to_image=True)
        _, configs = self.checked.pipeline_type.check(config.model)
        self.scheduler_config = configs["scheduler"]
        self.edits = issubclass(self.checked.pipeline_type, InstructPix2Pix)
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
        self.compile_seconds = self.pixel_seconds = None  # of a program; of a step and pixel
        self.params, self.weights = None, None
        self.jobs, self.condition = deque(), threading.Condition()
        self.current = self.program = self.trial_error = None  # of the thread

    def _limits(self, configs):
        """The Limits, from the configs of the model."""
        levels = len(configs["unet"].get("block_out_channels", (0,) * 4))
        smallest = self.checked.factor * 2 ** (levels - 1)
        largest = self.config.max_resolution or 2 * self.checked.resolution
        if largest < self.checked.resolution:
            raise ValueError(
                f"--max_resolution {largest} is below the resolution of the model, "
                f"{self.checked.resolution}; give --resolution too"
            )
        return Limits(smallest, largest, tuple(self.loras))

    def defaults(self):
        """The Settings that the page begins with."""
        names = ("guidance_scale", "image_guidance_scale", "num_inference_steps", "scheduler")
        given = {name: getattr(self.config, name) for name in names}
        given |= {"accelerate": self.config.accelerate, "lora": tuple(self.loras)}
        return Settings("", seed=self.config.seed, resolution=self.checked.resolution, **given)

    def open(self):
        """Load the model, and start the thread."""
        config = self.config
        size = (self.checked.resolution,) * 2
        preview = Preview(1, self._show, self.decoder) if config.progress else None
        options = dict(dtype=choose_dtype(config.dtype), layout=self.layout, preview=preview)
        self.pipeline, params = load_model(
            config.model,
            self.checked.pipeline_type,
            self.checked.scheduler,
            Sampling(lora=self._lora_specs(self.defaults())),
            take(ModelOptions, config, **options),
            partial(self._plan, settings=self.defaults(), size=size),
        )
        if config.accelerate:  # int8 changes the parameters
            cast_params(self._with_settings(self.defaults()), params)
        self._place(params, self._weights_of(self.defaults()))
        threading.Thread(target=self._work, name="editor", daemon=True).start()

    # ------------------------------------------------------------ of a request

    def check(self, settings):
        """Raise a ValueError for settings that the model does not take; check_settings is before.

        Returns:
            The scheduler.
        """
        pipeline_type, config = self.checked.pipeline_type, self.scheduler_config
        sampling = self._sampling(settings)
        return check_sampling(pipeline_type, config, self.config.model, sampling)

    def _sampling(self, settings):
        """The Sampling of settings."""
        return take(Sampling, settings, accelerate=self._acceleration(settings), lora=())

    def size_of(self, settings, image_size=None):
        """(width, height) of an image; image_size: of the image to edit."""
        shape = image_size if self.edits else SHAPES[settings.shape]
        return edit_size(shape, settings.resolution, self.checked.factor)

    def program_size(self, job):
        """(width, height) of the program that makes a job's images, see shared_size."""
        size = self.size_of(job.settings, job.image and job.image.size)
        return shared_size(size, self.checked.factor) if self.edits else size

    def seconds_left(self, job, progress):
        """About how long the denoising steps of a job take from here; None: nothing is measured.

        Before its own first step a job is as fast as the one before it, by pixels and steps.
        """
        per_step = progress.per_step
        if per_step is None and self.pixel_seconds:
            per_step = self.pixel_seconds * self._pixels(job)
        return per_step and per_step * job.steps_left(progress)

    def _pixels(self, job):
        return math.prod(self.program_size(job))

    def cut_text(self, text):
        """What the text encoders cut off of a text, a sentence; "" if it fits."""
        for name, encoder in TEXT_ENCODERS.items():
            if tokenizer := getattr(self.pipeline, name, None):
                length = getattr(self.pipeline, encoder).module.max_position_embeddings
                (ids,) = sequences_of_ids(tokenizer, [text])
                if message := too_long(tokenizer, ids, length):
                    return message
        return ""

    # ------------------------------------------------------------ the queue

    def submit(self, job):
        """Add a job to the queue; raise a ValueError if it is full."""
        with self.condition:
            if len(self.jobs) > self.config.max_queue:
                raise ValueError(
                    f"{self.config.max_queue} requests wait already; try again in a few minutes"
                )
            self.jobs.append(job)
            self.condition.notify()
        return job

    def num_before(self, job):
        """How many jobs run or wait before this one."""
        with self.condition:
            return self.jobs.index(job) if job in self.jobs else 0

    def stop(self, job):
        """Cancel a job: it leaves the queue, or ends after its current step."""
        job.stopped.set()
        with self.condition:
            if job in self.jobs and job is not self.current:
                self.jobs.remove(job)
                job.error = Stopped()
                job.done.set()

    async def follow(self, job):
        """Wait for a job and yield its Progress meanwhile; a job that nobody follows ends."""
        try:
            while not job.done.is_set():
                yield job.progress
                await asyncio.sleep(POLL)
        finally:
            if not job.done.is_set():
                self.stop(job)
        if job.error:
            raise job.error

    def _work(self):
        while True:
            with self.condition:
                self.condition.wait_for(lambda: self.jobs)
                job = self.current = self.jobs[0]
            try:
                self._make(job)
            except Exception as error:
                job.error = error_of(error, job)
                if job.is_trial and not isinstance(job.error, Stopped):
                    self.trial_error = job.error
            with self.condition:
                self.current = None
                self.jobs.popleft()
            job.done.set()

    # ------------------------------------------------------------ the model, in the thread

    def _make(self, job):
        started = time.perf_counter()
        settings = job.settings
        self._load_weights(job)
        if job.stopped.is_set():
            raise Stopped
        job.size = self.size_of(settings, job.image and job.image.size)
        size = self.program_size(job)
        mask = None if job.mask is None else fit_mask(job.mask, job.size)
        mask = None if mask and mask.getextrema()[0] else mask  # all white restricts nothing
        image = job.image and fit_image(job.image, job.size)
        job.at_once = len(self.all_devices) if len(job.scales) > 1 else 1
        arrays = self._arrays(settings, size, image, mask, job.at_once)
        for first in range(0, len(job.scales), job.at_once):
            job.report("making", image=first, step=0)
            scales = job.scales[first : first + job.at_once]
            if len(job.scales) > 1:
                scales = [with_all_branches(*one) for one in scales]
            of_image = dict(zip(("guidance_scale", "image_guidance_scale"), scales[0]))
            of_image = replace(settings, **of_image)
            self.program = program = self._program(of_image, size, mask is not None, job.at_once)
            if not program.is_compiled:
                job.report("compiling")
                job.has_compiled = True
            images = self._call(program.pipeline, arrays, settings, size, scales, job.at_once)
            if job.stopped.is_set():
                raise Stopped
            images = np.asarray(images).reshape(-1, size[1], size[0], 3)[: len(scales)]
            if not program.is_compiled:  # no step was shown
                self.compile_seconds = time.monotonic() - job.progress.since
                program.is_compiled = True
            elif not self.config.progress:
                self._measure(job, (first // job.at_once + 1) * settings.num_inference_steps)
            check_finite_images(images, "the images", settings.lora)
            of_mask = job.size, image, mask, settings.mask_feather
            job.images += [finish_edit(made, *of_mask) for made in to_pil(images)]
        job.seconds = time.perf_counter() - started

    def _arrays(self, settings, size, image, mask, num_devices):
        """The arrays of a call, the same for each device: of text, keys, and of an edit.

        image, mask: PIL, of the result's size, or None; size: (width, height) of the program.
        """
        pipeline = self.pipeline
        prompt_ids = pipeline.prepare_text_inputs([settings.instruction] * num_devices)
        neg_ids = None
        if settings.negative_prompt:
            neg_ids = pipeline.prepare_text_inputs([settings.negative_prompt] * num_devices)
        key, indices = jax.random.key(settings.seed), np.zeros(num_devices, int)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, indices)
        if self.edits:
            images = [stretch(image, size)] * num_devices
            masks = None if mask is None else [stretch_mask(mask, size)] * num_devices
            return batch_inputs(pipeline, images, masks, prompt_ids, neg_ids, keys, num_devices)
        return jax.tree.map(lambda x: x[:, None], (prompt_ids, keys, neg_ids))

    def _call(self, pipeline, arrays, settings, size, scales, num_devices):
        """The images, on devices; they may not be ready.

        scales: of each image, at most as many as there are devices.
        """
        steps, params = settings.num_inference_steps, self.params[num_devices]
        if num_devices == 1:
            (scales,) = scales
        else:
            scales = [*scales, *scales[-1:] * (num_devices - len(scales))]
            scales = np.float32(scales).T[..., None]  # (2, devices, 1)
        if self.edits:
            prompt_ids, image, keys, neg_ids, mask = arrays
            of_image = prompt_ids, image, params, keys, steps, *scales
            return pipeline(*of_image, neg_prompt_ids=neg_ids, jit=True, mask=mask).images
        prompt_ids, keys, neg_ids = arrays
        return pipeline(
            prompt_ids,
            params,
            keys,
            num_inference_steps=steps,
            guidance_scale=scales[0],
            width=size[0],
            height=size[1],
            neg_prompt_ids=neg_ids,
            jit=True,
        ).images

    def _program(self, settings, size, is_masked, num_devices):
        """The Program of an image on each device, new ones not compiled."""
        branches = take(Sampling, settings).branches(self.checked.pipeline_type)
        key = (
            *(settings.scheduler, settings.accelerate, settings.num_inference_steps, size),
            *(is_masked, branches, bool(settings.negative_prompt), num_devices),
        )
        if key not in self.programs:
            if len(self.programs) == MAX_PROGRAMS:
                self.programs.clear()
                jax.clear_caches()
            pipeline = self._with_settings(settings)
            pipeline, _ = self._plan(pipeline, settings, size)
            self.programs[key] = Program(pipeline)
        return self.programs[key]

    def _with_settings(self, settings):
        """The pipeline with the scheduler and the accelerations of settings."""
        accelerate = parse(self._acceleration(settings))
        every, decoder = 1, self.decoder
        if decoder:
            every = -(-settings.num_inference_steps // MAX_PREVIEWS)
            decoder = "" if accelerate.tiny_decoder else decoder  # the same one
        return replace(
            self.pipeline,
            scheduler=self.check(settings),
            accelerate=accelerate,
            preview=Preview(every, self._show, decoder) if self.config.progress else None,
            compiled=set(),
        )

    def _acceleration(self, settings):
        """--accelerate of settings, taesd with the page's decoder."""
        if "taesd" in settings.accelerate and not self.decoder:
            raise ValueError("--accelerate taesd needs a TAESD; start with --preview_decoder")
        named = {"taesd": f"taesd:path={self.decoder}"}
        return tuple(named.get(spec, spec) for spec in settings.accelerate)

    def _plan(self, pipeline, settings, size):
        """(pipeline, with tiles of the VAE if it needs them; a line about the memory)."""
        branches = take(Sampling, settings).branches(self.checked.pipeline_type)
        if self.edits:
            return plan_edits(pipeline, EditList([None], [size]), branches, self.config.vae_tile)
        pipeline.check_parallel(branches, size[1])
        of_image = self.devices, 1, 1, branches, size
        return plan_images(pipeline, *of_image, vae_tile=self.config.vae_tile)

    def _lora_specs(self, settings):
        """--lora of settings: FILE:WEIGHT of each name."""
        chosen = (split_weight(self.loras[name]) for name in settings.lora)
        return tuple(f"{file}:{weight * settings.lora_weight}" for file, weight in chosen)

    def _weights_of(self, settings):
        """What the parameters depend on."""
        int8 = parse(self._acceleration(settings)).int8
        return self._lora_specs(settings), int8 and int8.mode

    def _load_weights(self, job):
        """Read the model again if the job has another LoRA than the one before, or int8."""
        weights = self._weights_of(job.settings)
        if weights == self.weights:
            return
        job.report("loading")
        self.params = self.weights = None  # never twice in memory
        options = {"lora": weights[0], "unet_delta": self.config.unet_delta}
        params = self.pipeline.load_params(self.config.model, **options)
        cast_params(self._with_settings(job.settings), params)
        self._place(params, weights)

    def _place(self, params, weights):
        """Move parameters to all devices; weights: of _weights_of."""
        place_params(params, self.all_devices, self.pipeline.layout)
        self.params = {len(self.all_devices): params}
        if len(self.all_devices) > 1:  # the same memory
            first = jax.tree.map(lambda x: x.addressable_shards[0].data, params)
            self.params[1] = first
        self.weights = weights

    def _show(self, step, keys, images):
        """Called by the program after a step, in any thread."""
        job = self.current
        if job is None:
            return
        if job.progress.stage == "compiling":
            self.compile_seconds = time.monotonic() - job.progress.since
            self.program.is_compiled = True
        preview = job.progress.preview
        if images is not None:
            preview = stretch(to_pil(images)[0], job.size)
        job.report("making", step=step, preview=preview)
        self._measure(job, job.steps_done(job.progress))
        # An error ends the program at once. A TPU's program ends by itself, and its image is
        # dropped: there an error of a callback was never tried.
        is_unwanted = job.stopped.is_set() or job.is_trial
        if is_unwanted and self.devices[0].platform != "tpu":
            raise Stopped

    def _measure(self, job, num_steps):
        """Note how long a step takes; num_steps: of the job that are done."""
        if (num_steps := num_steps - job.progress.first) > 0:
            per_step = (time.monotonic() - job.progress.since) / num_steps
            job.report(job.progress.stage, per_step=per_step)
            self.pixel_seconds = per_step / self._pixels(job)


class NoStops(logging.Filter):
    """Drops jax's log entry about an error in a callback that is Stopped."""

    def filter(self, record):
        return not (record.exc_info and isinstance(record.exc_info[1], Stopped))


def named_loras(specs):
    """{a short name for the page: spec} of --lora; of files of one name the folder's too."""
    named = {}
    for spec in specs:
        path = Path(split_weight(spec)[0])
        named[path.stem if path.stem not in named else f"{path.parent.name}/{path.stem}"] = spec
    return named


def with_all_branches(guidance_scale, image_guidance_scale):
    """The scales, enlarged by less than float32 has where they would leave a branch out.

    The images of a comparison then have one program.
    """
    if image_guidance_scale in (1, guidance_scale):
        image_guidance_scale = math.nextafter(image_guidance_scale, math.inf)
    if guidance_scale in (0, 1):
        guidance_scale = math.nextafter(guidance_scale, math.inf)
    return guidance_scale, image_guidance_scale


def error_of(error, job):
    """The exception for a job's user."""
    text = str(error)
    if job.stopped.is_set() or (job.is_trial and "Stopped" in text):
        return Stopped()
    if "RESOURCE_EXHAUSTED" in text:
        return ValueError("the memory of the device is too small; choose a smaller size")
    if not isinstance(error, ValueError | OSError):
        logger.error("a request failed", exc_info=error)
    return error


def trial_job(editor, images):
    """The Job that compiles the program of the first example, or of a square.

    images: paths of the examples.
    """
    settings, image = replace(editor.defaults(), instruction="a photograph"), None
    if editor.edits:
        image = load_image(images[0]) if images else Image.new("RGB", (64, 64), "grey")
    return Job(settings, image, is_trial=True)
