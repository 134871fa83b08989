"""The page's model, and the queue of requests for images of it.

    editor = Editor(config, layout)
    editor.open()
    request = ImageRequest(settings, image)
    async for _ in editor.follow(request):
        print(request.stage, request.step)
    image, = request.images

Requests run one after another, first come, first served.
"""

import asyncio
import logging
import sys
import threading
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import jax
from PIL import Image
from tqdm import tqdm

from diffusers_flax.acceleration.plans import parse
from diffusers_flax.acceleration.previews import Preview
from diffusers_flax.app.settings import (
    PAGE,
    SCALES,
    SHAPES,
    SOFTWARE,
    Limits,
    Settings,
    check_settings,
)
from diffusers_flax.data.images import load_image
from diffusers_flax.devices.precision import choose_dtype
from diffusers_flax.generating.batches import check_finite_images, devices_for
from diffusers_flax.generating.flags import from_flags, with_defaults
from diffusers_flax.generating.models import (
    EDIT,
    Sampling,
    check_sampling,
    check_tasks,
    factor_and_resolution,
    pipeline_for,
    plan_images,
    sees_mask,
    with_task,
)
from diffusers_flax.generating.recipes import MASKED, recipe_text
from diffusers_flax.generating.requests import Request
from diffusers_flax.generating.runner import Models, kind_of, make_images
from diffusers_flax.generating.sizes import (
    finish_image,
    fit_image,
    fit_mask,
    result_size,
    shared_size,
    stretch,
    stretch_mask,
)
from diffusers_flax.images import to_pil
from diffusers_flax.loading.lora import split_weight
from diffusers_flax.parameters import cast_params, place_params
from diffusers_flax.pipelines.base import pipeline_class
from diffusers_flax.pipelines.inpainting import Inpainting
from diffusers_flax.pipelines.instruct_pix2pix import InstructPix2Pix

MAX_PROGRAMS = 24  # in memory; older ones stay in the compilation cache on the disk
MAX_PREVIEWS = 10  # for each image

POLL = 0.15  # seconds between two checks of a request's progress
# Flags in recipes, of the model and of an image.
MODEL_FLAGS = ("embedding", "unet_delta", "config_name_or_path", "dtype", "storage", "vae_dtype")
INITIAL = (*SCALES, "num_inference_steps", "seed", "scheduler", "accelerate")  # flags of the page
IMAGE_FLAGS = (*INITIAL, "negative_prompt", "strength")

logger = logging.getLogger(__name__)


class Stopped(Exception):
    """A request was cancelled, or its page was closed."""


@dataclass(eq=False)
class ImageRequest:
    """One page's request for an image, or for a comparison, and how far it is."""

    settings: Settings
    image: Image.Image | None = None  # original image, of any size
    mask: Image.Image | None = None  # of the image's size, white where it may change
    reference: Image.Image | None = None  # of any size
    source: Path | None = None  # file of the original image
    reference_source: Path | None = None  # file of the reference
    scales: tuple = ()  # (guidance_scale, image_guidance_scale) of each image; (): the settings'
    stage: str = "waiting"  # then "starting", "loading", "making"
    since: float = field(default_factory=time.monotonic)  # when the stage began
    step: int = 0  # denoising steps done, of all batches of a comparison
    num_steps: int = 0  # of all batches
    preview: Image.Image | None = None
    size: tuple[int, int] = (0, 0)  # (width, height) of the images, set when the request starts
    images: list = field(default_factory=list)  # PIL
    seconds: float | None = None
    error: Exception | None = None
    stopped: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self):
        settings = self.settings
        self.scales = self.scales or ((settings.guidance_scale, settings.image_guidance_scale),)

    def enter(self, stage):
        """Begin a stage."""
        self.stage, self.since = stage, time.monotonic()


class Editor:
    """The model, its programs, and the queue of requests."""

    def __init__(self, config, layout=None):
        """config: edit_app.py's flags; layout: Layout of the devices, or None."""
        config = with_defaults(config, [config.model], config.lora)
        self.config, self.layout = config, layout and layout.first(1)
        named = pipeline_class(config.model)
        # What a model does with the least input: the task of the page's first tab.
        self.edits = issubclass(named, InstructPix2Pix)
        self.task = EDIT if self.edits else "text to image"
        if issubclass(named, Inpainting) and sees_mask(named.check(config.model)[1]):
            self.task = "inpainting"
        is_xl, configs = check_tasks(config.model, [self.task])
        self.pipeline_type = pipeline_for(self.task, is_xl)
        self.factor, self.resolution = factor_and_resolution(configs, config.resolution)
        self.scheduler_config = configs["scheduler"]
        self.loras = {}
        for spec in config.lora:
            path = Path(split_weight(spec)[0])
            is_taken = path.stem in self.loras
            self.loras[f"{path.parent.name}/{path.stem}" if is_taken else path.stem] = spec
        self.decoder = config.preview_decoder or None
        levels = len(configs["unet"].get("block_out_channels", (0,) * 4))
        smallest = self.factor * 2 ** (levels - 1)
        largest = config.max_resolution or 2 * self.resolution
        self.limits = Limits(smallest, largest, tuple(self.loras), takes_strength=not self.edits)
        check_settings(replace(self.defaults(), instruction="red"), self.limits)
        self.check(self.defaults())
        self.devices = devices_for(1, self.layout)
        self.programs = {}  # {what a program depends on: pipeline}
        self.params, self.weights = None, None
        self.requests = []  # the first request runs, the other requests wait
        self.current = None  # the request that runs

    @property
    def takes_reference(self):
        """Whether the model sees a second image; after open."""
        return self.pipeline.unet.takes_reference

    def defaults(self):
        """The page's initial Settings."""
        flags = {name: getattr(self.config, name) for name in INITIAL}
        flags |= {"strength": 1.0} if self.task == "inpainting" else {}
        return Settings("", resolution=self.resolution, lora=tuple(self.loras), **flags)

    def recipe(self, request, settings):
        """The recipe_text of an image of a request; settings: the image's."""
        flags = {"model": str(self.config.model)}
        for source, names in ((self.config, MODEL_FLAGS), (settings, IMAGE_FLAGS)):
            values = {name: getattr(source, name) for name in names}
            flags |= {name: x for name, x in values.items() if x not in (None, (), "")}
        flags["edit" if self.edits else "prompt"] = settings.instruction
        if settings.lora:
            flags["lora"] = self._lora_specs(settings)
        if request.image is None:
            flags["width"], flags["height"] = request.size
        else:
            flags["resolution"] = settings.resolution
        image = "input" if self.edits else "image"
        files = {image: request.source, "reference": request.reference_source}
        files = {name: file for name, file in files.items() if file is not None}
        flags |= {name: Path(file).name for name, file in files.items()}
        if request.mask is not None:
            flags |= {MASKED: True, "mask_feather": settings.mask_feather}
        return recipe_text(SOFTWARE, {**flags, PAGE: asdict(settings)}, files)

    def open(self):
        """Load the model."""
        config, defaults = self.config, self.defaults()
        pipeline = self.pipeline_type.open(
            config.model,
            dtype=choose_dtype(config.dtype),
            scheduler=self.check(defaults),
            embeddings=config.embedding,
            layout=self.layout,
            preview=Preview(1, self._show, self.decoder) if config.progress else None,
            storage=config.storage,
            vae_dtype=config.vae_dtype,
        )
        self.pipeline, planned = self._plan(pipeline, defaults, (self.resolution,) * 2)
        print(planned, file=sys.stderr)
        self._load_weights(defaults)

    # ------------------------------------------------------------ checks

    def check(self, settings):
        """The scheduler for settings; a ValueError if the model does not take them.

        check_settings comes first.
        """
        sampling = from_flags(Sampling, settings, accelerate=self._acceleration(settings))
        of_model = self.pipeline_type, self.scheduler_config, self.config.model
        return check_sampling(*of_model, sampling)

    def size_of(self, settings, image=None):
        """(width, height) of the result; image: the original image."""
        shape = image.size if image else SHAPES[settings.shape]
        return result_size(shape, settings.resolution, self.factor)

    # ------------------------------------------------------------ the queue

    async def follow(self, request):
        """Make a request's images; yields now and then until it is done.

        A stopped request, or one whose page is closed, leaves the queue; a running one ends after
        its current step.

        Raises:
            ValueError: the queue is full, a mask is missing, or an error of the model.
            Stopped: it was stopped.
        """
        if self.task == "inpainting" and request.mask is None:
            raise ValueError(
                "there is no mask, which an inpainting model needs; paint the part that may "
                "change, or upload a mask"
            )
        if len(self.requests) > self.config.max_queue:
            raise ValueError(
                f"{self.config.max_queue} requests wait already; try again in a few minutes"
            )
        self.requests.append(request)
        try:
            while self.requests[0] is not request:
                if request.stopped.is_set():
                    raise Stopped
                yield
                await asyncio.sleep(POLL)
            self._start(request)
            while not request.done.is_set():
                yield
                await asyncio.sleep(POLL)
        finally:
            request.stopped.set()
            if request.stage == "waiting":
                self.requests.remove(request)
        if request.error:
            raise request.error

    def compile_first(self, images):
        """Compile the program of the first of some images, or of a square; returns the request."""
        image = mask = None
        if self.task != "text to image":
            image = load_image(images[0]) if images else Image.new("RGB", (64, 64), "grey")
        if self.task == "inpainting":
            mask = Image.new("1", image.size, 1)
        settings = replace(self.defaults(), instruction="a photograph")
        request = ImageRequest(settings, image, mask)
        request.stopped.set()  # ends after the first step
        self.requests.append(request)
        self._start(request)
        return request

    def _start(self, request):
        """Make the images of the first request of the queue in a thread, which ends with us."""
        request.enter("starting")
        threading.Thread(target=self._run, args=(request,), daemon=True).start()

    def _run(self, request):
        try:
            self.current = request
            self._make(request)
        except (Stopped, ValueError, OSError) as error:
            request.error = error
        except Exception as error:
            text = "this failed on the server, whose log says why"
            if "RESOURCE_EXHAUSTED" in str(error):
                text = "the memory of the device is too small; choose a smaller size"
            elif not request.error:  # of _show
                logger.error("a request failed", exc_info=error)
            request.error = request.error or ValueError(text)
        self.requests.remove(request)
        request.done.set()

    # ------------------------------------------------------------ the model, in a thread

    def _make(self, request):
        started, factor = time.perf_counter(), self.factor
        settings = request.settings
        if self._weights_of(settings) != self.weights:
            request.enter("loading")
            self._load_weights(settings)
        request.size = self.size_of(settings, request.image)
        size = request.size if request.image is None else shared_size(request.size, factor)
        images = request.image, request.reference
        image, reference = (x and fit_image(x, request.size) for x in images)
        mask = None if request.mask is None else fit_mask(request.mask, request.size)
        if mask and not mask.getbbox():
            raise ValueError("the mask has no white, so nothing may change; make a part white")
        if self.edits and mask and mask.getextrema()[0]:
            mask = None  # all white restricts nothing
        inputs = image and stretch(image, size), mask and stretch_mask(mask, size)
        inputs += (reference and stretch(reference, size),)
        request.num_steps = settings.num_steps * len(request.scales)
        request.enter("making")
        for number, scales in enumerate(request.scales):
            request.step = number * settings.num_steps
            one = replace(settings, **dict(zip(SCALES, scales)))
            given = dict(prompt=one.instruction, image=image and Path(), mask=mask and Path())
            given |= {"reference": reference and Path()}
            given |= {} if self.edits else {"image_guidance_scale": None}
            to_make = from_flags(Request, one, **given)
            branches = from_flags(Sampling, one).branches(self.pipeline_type)
            key = one.scheduler, one.accelerate, branches, kind_of(to_make, size)
            if key not in self.programs:
                if len(self.programs) == MAX_PROGRAMS:
                    self.programs.clear()
                    jax.clear_caches()
                pipeline = with_task(self._with_settings(one), to_make.task)
                self.programs[key], _ = self._plan(pipeline, one, size)
            models = Models({to_make.task: self.programs[key]}, self.params)
            making = [to_make], [size], [0], lambda place: inputs, 1, tqdm(disable=True)
            ((_, images, _),) = make_images(models, *making)
            if request.stopped.is_set():
                raise Stopped
            check_finite_images(images, "the images")
            (made,) = to_pil(images)
            feather = settings.mask_feather
            request.images.append(finish_image(made, request.size, image, mask, feather))
        request.seconds = time.perf_counter() - started

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
        )

    def _acceleration(self, settings):
        """The accelerations of settings; taesd gets the path of the page's decoder."""
        if "taesd" in settings.accelerate and not self.decoder:
            raise ValueError("--accelerate taesd needs a TAESD; start with --preview_decoder")
        named = {"taesd": f"taesd:path={self.decoder}"}
        return tuple(named.get(spec, spec) for spec in settings.accelerate)

    def _plan(self, pipeline, settings, size):
        """(pipeline, with a tiled VAE if it needs one; a line about the memory)."""
        branches = from_flags(Sampling, settings).branches(self.pipeline_type)
        return plan_images(pipeline, self.devices, 1, 1, branches, [size], self.config.vae_tile)

    def _lora_specs(self, settings):
        """FILE:WEIGHT of each LoRA in settings."""
        chosen = (split_weight(self.loras[name]) for name in settings.lora)
        return tuple(f"{file}:{weight * settings.lora_weight}" for file, weight in chosen)

    def _weights_of(self, settings):
        """The settings that parameters depend on: LoRA files and the mode of int8."""
        int8 = parse(self._acceleration(settings)).int8
        return self._lora_specs(settings), int8 and int8.mode

    def _load_weights(self, settings):
        """Read the parameters, with the LoRA files and the int8 mode of settings."""
        self.params = self.weights = None  # frees the memory first
        options = {"lora": self._lora_specs(settings), "unet_delta": self.config.unet_delta}
        params = self.pipeline.load_params(self.config.model, **options)
        cast_params(self._with_settings(settings), params)
        place_params(params, self.devices, self.pipeline.layout)
        self.params, self.weights = params, self._weights_of(settings)

    def _show(self, step, keys, images):
        """Take a step's preview; the program calls it, in any thread."""
        request = self.current
        done_before = request.step // request.settings.num_steps * request.settings.num_steps
        request.step = done_before + step
        if images is not None:
            request.preview = stretch(to_pil(images)[0], request.size)
        # An error ends the program at once. On TPUs, where this is untested, the program runs to
        # its end and its image is dropped.
        if request.stopped.is_set() and self.devices[0].platform != "tpu":
            request.error = Stopped()
            raise request.error


class NoStops(logging.Filter):
    """Drops jax's log entry about a callback that raises Stopped."""

    def filter(self, record):
        return not (record.exc_info and isinstance(record.exc_info[1], Stopped))
