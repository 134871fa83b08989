"""Making the images of requests: one runner for all programs.

models = open_models(config, requests, layout, preview)
models.load(...)
for places, images, seconds in make_images(models, requests, program_sizes, todo, load, 4, bar):
    ...

finished = make_files(config, requests, "generate_cli.py", Path("out"))
"""

import inspect
import itertools
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from PIL import Image
from tqdm import tqdm

from diffusers_flax.compilation_cache import use_compilation_cache
from diffusers_flax.devices.precision import choose_dtype
from diffusers_flax.executables import SavedPrograms
from diffusers_flax.generating.batches import (
    IN_FLIGHT,
    FileWriter,
    batches_of_places,
    check_finite_images,
    devices_for,
    largest_round,
    rounds_of,
    run_ahead,
)
from diffusers_flax.generating.flags import from_flags, layout_of_flags
from diffusers_flax.generating.models import (
    EDIT,
    ModelOptions,
    check_tasks,
    load_weights,
    open_model,
    pipeline_for,
    plan_images,
    with_task,
)
from diffusers_flax.generating.previews import PreviewFiles
from diffusers_flax.generating.recipes import ids_of, recipe_of
from diffusers_flax.generating.requests import choose_sizes, output_files
from diffusers_flax.generating.sizes import (
    NUM_LOADERS,
    finish_image,
    load_fitted,
    load_mask,
    stretch,
    stretch_mask,
)
from diffusers_flax.images import prepare_images, prepare_masks, save_image, to_pil
from diffusers_flax.loading.directories import has_component, read_index
from diffusers_flax.models.controlnet import FlaxMultiControlNetModel
from diffusers_flax.models.vae import with_tile
from diffusers_flax.parameters import place_params
from diffusers_flax.prompts import prepare_prompts
from diffusers_flax.schedulers.factory import choose_scheduler

# Of scikit-image's canny: nearest to OpenCV's Canny(image, 100, 200), which published examples use.
# Of five photographs, 86% of the edges of each are within a pixel of the other's (F-measure).
CANNY = {"sigma": 0.5, "low_threshold": 0.2, "high_threshold": 0.4}
DENOISING_END = 0.8  # as in diffusers' example of the ensemble of base and refiner
OF_BOTH_MODELS = ("dtype", "embedding", "storage", "vae_dtype", "layout", "saved_programs")
# What the calls of model and refiner have in common.
REFINER_OPTIONS = ("num_inference_steps", "timesteps", "eta")
REFINER_OPTIONS += ("guidance", "guidance_rescale", "guidance_scale")
REFINER_ARRAYS = ("prng_seed", "guidance_scale", "mask", "masked_image")


@dataclass
class Models:
    """A model for several tasks, and a refiner or none."""

    pipelines: dict  # {task: pipeline}
    params: dict | None = None  # None: not read yet
    options: ModelOptions | None = None
    refiner: "Models | None" = None  # its pipelines are for the images of these tasks
    denoising_end: float | None = None  # fraction of the denoising after which the refiner goes on
    prompt_options: dict = field(default_factory=dict)  # of prepare_prompts

    @property
    def pipeline(self):
        """The pipeline that has all components."""
        return next(iter(self.pipelines.values()))


class Kind(NamedTuple):
    """What the images of a batch have in common: all that their program depends on, and numbers."""

    size: tuple  # (width, height) of the program
    task: str  # of models.TASKS
    options: tuple  # (argument, value) of the call, in pairs
    given: tuple  # which arrays there are, and the shapes of the prompts'


def kind_of(request, size, prompts=None):
    """The Kind of a Request; size: of its program; prompts: its Prompts, None: not known yet."""
    names = ("num_inference_steps", "eta", "guidance_rescale", "guidance_scale")
    names += ("strength", "image_guidance_scale", "guidance")
    options = {name: getattr(request, name) for name in names}
    if request.task == "text to image":
        options |= dict(width=size[0], height=size[1])
    if request.control:
        names = ("control_guidance_start", "control_guidance_end", "controlnet_conditioning_scale")
        given = {name: getattr(request, name) for name in names}  # for each ControlNet or for all
        options |= {name: x if len(x) > 1 else x[0] for name, x in given.items() if x}
        options["guess_mode"] = request.guess_mode
    if is_guided(request):
        del options["guidance_scale"]
    options["timesteps"] = request.timesteps or None
    options = tuple((name, x) for name, x in options.items() if x is not None)
    given = request.latents is None, request.mask is None, len(request.control)
    given += (
        request.reference is not None,
        jax.tree.structure(prompts),
        *(x.shape for x in jax.tree.leaves(prompts)),
    )
    return Kind(size, request.task, options, given)


def is_guided(request):
    """Whether the guidance scale of an image is an array of the call: it may differ in a batch."""
    return request.task != EDIT and request.guidance_scale > 1


# ------------------------------------------------------------ models


def open_models(config, requests, layout, preview=None):
    """The Models of the flags, without parameters.

    Args:
        config: flags of a program; model and refiner may be SingleFiles.
        requests: list of Request.
        layout: Layout or None.
        preview: Preview or None.

    Raises:
        ValueError: the models do not fit the requests.
    """
    tasks = list(dict.fromkeys(request.task for request in requests))
    tasks.sort(key=lambda task: task != "ControlNet")  # its pipeline has all components
    names = ("unet", "refiner", "controlnet", "revision", "prediction_type", "executable_dir")
    unet, refiner, nets, revision, prediction_type, folder = (
        getattr(config, name, None) for name in names
    )
    is_xl, configs = check_tasks(config.model, tasks, {"unet": unet}, revision=revision)
    has_net = nets or has_component(read_index(config.model, revision), "controlnet")
    if nets and tasks[0] != "ControlNet":
        raise ValueError(f"--controlnet {nets[0]} needs --control, its image")
    if tasks[0] == "ControlNet" and not has_net:
        raise ValueError(
            f"--control needs --controlnet, as --model {config.model} has no ControlNet"
        )
    if folder and (config.devices or config.preview):
        raise ValueError("--executable_dir excludes --devices and --preview; leave one out")
    saved = folder and SavedPrograms(folder, partial(tqdm.write, file=sys.stderr))
    settings = dict(dtype=choose_dtype(config.dtype), layout=layout, preview=preview)
    options = from_flags(ModelOptions, config, **settings, saved_programs=saved)

    def open_one(source, tasks, configs, accelerate, options):
        chosen = config.scheduler, config.timestep_spacing, prediction_type
        scheduler, _ = choose_scheduler(configs["scheduler"], source, *chosen)
        task = next(iter(tasks.values()))
        pipeline = open_model(source, pipeline_for(task, is_xl), scheduler, accelerate, options)
        pipelines = {name: with_task(pipeline, task) for name, task in tasks.items()}
        return Models(pipelines, options=options)

    models = open_one(config.model, dict(zip(tasks, tasks)), configs, config.accelerate, options)
    for name in ("long_prompts", "prompt_weights"):
        models.prompt_options[name] = getattr(config, name, None)
    if refiner:
        own_xl, configs = check_tasks(refiner, ["image to image"], flag="refiner")
        if not (is_xl and own_xl):
            model = f"--refiner {refiner}" if is_xl else f"--model {config.model}"
            raise ValueError(f"{model} is not SDXL; --refiner goes with SDXL's base and refiner")
        # Caches and less guidance are for the steps of the model alone.
        kept = [x for x in config.accelerate if x.partition(":")[0] in ("tome", "int8", "taesd")]
        same = {name: getattr(options, name) for name in OF_BOTH_MODELS}
        tasks = {x: "inpainting" if x == "inpainting" else "image to image" for x in tasks}
        models.refiner = open_one(refiner, tasks, configs, tuple(kept), ModelOptions(**same))
        models.denoising_end = config.denoising_end or DENOISING_END
    return models


def check_call(models, kind):
    """The number of steps and the branches of guidance of calls of a Kind, without weights.

    Raises a ValueError if the pipeline does not take them.
    """
    pipeline, (width, height) = models.pipelines[kind.task], kind.size
    given = dict(kind.options, height=height, width=width, params={}, prng_seed=None)
    *_, num_controls, has_reference = kind.given[:4]
    if has_reference:
        given["reference"] = True  # instead of an array
    call = inspect.signature(type(pipeline).__call__)
    bound = call.bind_partial(pipeline, **given, denoising_end=models.denoising_end)
    bound.apply_defaults()
    options = pipeline.make_call(bound.arguments).options
    schedule = pipeline.make_schedule(options, pipeline.latent_shape(1, height, width))
    if pipeline.accelerate:
        from diffusers_flax.acceleration.plans import plan_steps  # not for plain images

        plan_steps(pipeline.accelerate, options.branches, schedule.scales)
    if kind.task == "ControlNet" and num_controls != len(pipeline.nets):
        raise ValueError(
            f"{num_controls} --control do not fit {len(pipeline.nets)} --controlnet; give an image "
            "for each ControlNet, in their order"
        )
    return schedule.num_steps, options.branches


def load_models(models, config, requests, program_sizes, branches):
    """Plan the memory, read the weights of open_models's Models and place them on the devices.

    program_sizes: (width, height) of each image's program; branches: of guidance, the most.
    """
    devices = devices_for(largest_round(requests), models.options.layout)
    of_batches = config.batch_size, branches, program_sizes, config.vae_tile
    pipeline, planned = plan_images(models.pipeline, devices, len(requests), *of_batches)
    tqdm.write(f"{' and '.join(models.pipelines)} with {config.model}\n{planned}", sys.stderr)
    tile, layout, refiner = pipeline.vae.tile, pipeline.layout, getattr(config, "refiner", None)
    for one, source in ((models, config.model), (models.refiner, refiner)):
        if one:
            one.pipelines = {
                task: replace(x, vae=with_tile(x.vae, tile), layout=layout)
                for task, x in one.pipelines.items()
            }
            one.params = load_weights(one.pipeline, source, one.options)
            place_params(one.params, devices, layout)


# ------------------------------------------------------------ batches


def keys_of(requests):
    """The key of each image's noise; an edit's depends on its place in the list too."""
    seeds = np.array([request.seed for request in requests], np.uint32)
    indices = np.array([request.index for request in requests])
    return jax.vmap(jax.random.fold_in)(jax.vmap(jax.random.key)(seeds), indices)


def load_inputs(request, size, program_size):
    """The images of a Request, PIL: (image, or a tuple of control images; mask; reference) or None.

    size, program_size: (width, height) of the result, and of its program.
    """

    def load(path, way="image"):
        image = stretch(load_fitted(path, size), program_size)
        if way == "image":
            return image
        from skimage.feature import canny  # a second, not for other images

        grey = np.asarray(image.convert("L"), np.float64) / 255
        return Image.fromarray(np.uint8(canny(grey, **CANNY)) * 255).convert("RGB")

    if request.control:
        ways = request.control_from or ("image",)
        ways = ways if len(ways) > 1 else ways * len(request.control)
        return tuple(map(load, request.control, ways)), None, None
    mask = request.mask and stretch_mask(load_mask(request.mask, size), program_size)
    image, reference = (path and load(path) for path in (request.image, request.reference))
    return image, mask, reference


def arrays_of(models, task, requests, loaded):
    """The arguments of a pipeline's call without its prompts.

    requests: of one Kind; loaded: load_inputs of each.
    """
    pipeline, arrays = models.pipelines[task], {"prng_seed": keys_of(requests)}
    images, masks, references = map(list, zip(*loaded))
    if task == "ControlNet":
        of_nets = [list(controls) for controls in zip(*images)]
        is_several = isinstance(pipeline.controlnet, FlaxMultiControlNetModel)
        arrays["image"] = pipeline.prepare_image_inputs(of_nets if is_several else of_nets[0])
    elif task != "text to image":
        arrays["image"] = prepare_images(images)
    if requests[0].mask is not None:
        arrays["mask"] = prepare_masks(masks)
    if requests[0].reference is not None:
        arrays["reference"] = prepare_images(references)
    if task == "inpainting":
        arrays["masked_image"] = None  # the call makes it
    if is_guided(requests[0]):
        arrays["guidance_scale"] = np.array([x.guidance_scale for x in requests], np.float32)
    if requests[0].latents is not None:
        latents = np.concatenate([np.load(x.latents)[:1] for x in requests])
        arrays["noise" if task == "image to image" else "latents"] = np.float32(latents)
    return arrays


def join(prompts):
    """The Prompts of several images as one call's arguments."""
    joined = jax.tree.map(lambda *rows: np.concatenate(rows), *prompts)._asdict()
    return {name: x for name, x in joined.items() if x is not None}


def make_images(models, requests, program_sizes, todo, load, batch_size, bar, in_flight=IN_FLIGHT):
    """Make images over the local devices, images of one kind together.

    Args:
        models: Models, with parameters.
        requests: list of Request.
        program_sizes: (width, height) of each image's program.
        todo: places of the images to make.
        load: place -> the images of its program, see load_inputs; called in threads, after the
            images of earlier rounds, see rounds_of, are yielded.
        batch_size: images per device at once, at most.
        bar: tqdm progress bar in units of images.
        in_flight: see run_ahead.

    Yields:
        (places, results of the programs: NumPy float32 (n, H, W, 3) in [0, 1], seconds on the
        devices).
    """
    devices = devices_for(largest_round(requests), models.pipeline.layout)
    texts = partial(prepare_prompts, **models.prompt_options)
    prompts = [texts(models.pipelines[x.task], x.prompt, x.negative_prompt) for x in requests]
    kinds = [kind_of(*row) for row in zip(requests, program_sizes, prompts)]
    rounds_and_kinds = list(zip(rounds_of(requests), kinds))
    batches = batches_of_places(rounds_and_kinds, todo, batch_size, len(devices))
    compiled, loaders = set(), ThreadPoolExecutor(NUM_LOADERS)
    split = partial(jax.tree.map, lambda x: x.reshape(len(devices), -1, *x.shape[1:]))

    def prepare(batch):
        _, kind, places, _ = batch
        of_batch = [requests[place] for place in places]
        arrays = arrays_of(models, kind.task, of_batch, list(loaders.map(load, places)))
        refining = None
        if models.refiner:
            refining = {name: arrays[name] for name in REFINER_ARRAYS if name in arrays}
            refiner = models.refiner.pipelines[kind.task]
            refining |= join(texts(refiner, x.prompt, x.negative_prompt) for x in of_batch)
        arrays |= join(prompts[place] for place in places)
        return batch, split(arrays), split(refining)

    def dispatch(prepared):
        (_, kind, _, _), arrays, refining = prepared
        if kind not in compiled:
            compiled.add(kind)
            bar.set_description("compiling {}x{}".format(*kind.size))
        pipeline, options = models.pipelines[kind.task], dict(kind.options)
        if refining is None:
            return pipeline(params=models.params, jit=True, **arrays, **options).images
        end, refiner = models.denoising_end, models.refiner
        first = options | {"denoising_end": end, "output_type": "latent"}
        refining["image"] = pipeline(params=models.params, jit=True, **arrays, **first).images
        refining |= {name: x for name, x in options.items() if name in REFINER_OPTIONS}
        pipeline = refiner.pipelines[kind.task]
        return pipeline(params=refiner.params, denoising_start=end, jit=True, **refining).images

    def collect(prepared, images):
        images = np.asarray(images)
        return images.reshape(-1, *images.shape[2:])[: prepared[0][3]]

    try:
        for _, of_round in itertools.groupby(batches, key=lambda batch: batch[0]):
            ready = map(prepare, of_round)
            for prepared, images, seconds in run_ahead(ready, dispatch, collect, in_flight):
                _, kind, places, number = prepared[0]
                yield places[:number], images, seconds
                bar.set_description("making {}x{}".format(*kind.size))
                bar.update(number)
    finally:  # after an error without waiting
        loaders.shutdown(wait=False, cancel_futures=True)


# ------------------------------------------------------------ files


def write_image(result, request, size, config, program, image_id):
    """Write the result of a request's program, NumPy (H, W, 3) in [0, 1], with its recipe."""
    original = mask = None
    if request.mask is not None:
        original, mask = load_fitted(request.image, size), load_mask(request.mask, size)
    (image,) = to_pil(result)
    image = finish_image(image, size, original, mask, request.mask_feather)
    texts = recipe_of(program, config, request)
    save_image(image, request.output, program, image_id, texts)


def make_files(config, requests, program, output=None):
    """Make the images of requests that are not made yet, and write them.

    Args:
        config: flags of a program.
        requests: list of Request.
        program: its name, which marks its images.
        output: directory of the images, or a file, see output_files; None: each has its path.

    Returns:
        (requests with their outputs, (width, height) of each image), or None in processes that do
        not write.
    """
    if output:  # the lines of a list name files in it
        requests = [replace(x, output=x.output and output / x.output) for x in requests]
    layout = layout_of_flags(config)
    layout = layout and layout.first(largest_round(requests))
    several_hosts = layout and not layout.is_local  # of which one writes files
    if several_hosts and (config.preview or any(x.after is not None for x in requests)):
        raise ValueError(
            "--preview, and edits of the results of other edits, need one host; leave them out"
        )
    use_compilation_cache(config.compilation_cache_dir)
    previews = PreviewFiles(config.preview, config.preview_decoder) if config.preview else None
    models = open_models(config, requests, layout, previews and previews.preview)
    sizes, program_sizes = choose_sizes(requests, models.pipeline, config.exact_size)
    checked = {}
    for request, size in zip(requests, program_sizes):
        if (kind := kind_of(request, size)) not in checked:
            checked[kind] = check_call(models, kind)
    all_steps, all_branches = zip(*checked.values())
    ids = ids_of(program, config, requests, program_sizes)
    files, todo = output_files(requests, ids, output, program, config.grid)
    requests = [replace(request, output=file) for request, file in zip(requests, files)]
    todo = layout.agree(todo) if layout else todo
    if len(todo) < len(requests):
        made = f"{len(requests) - len(todo)} of {len(requests)} image{'s' * (len(requests) > 1)}"
        print(f"made already by this command: {made}", file=sys.stderr)
    if previews:
        previews.add(files, sizes, keys_of(requests), max(all_steps))
    is_writer = layout is None or layout.is_writer
    if todo:
        load_models(models, config, requests, program_sizes, max(all_branches, key=len))
        with tqdm(total=len(todo), unit="image") as bar, FileWriter() as writer:

            def load(place):
                if requests[place].after is not None:
                    writer.wait()
                return load_inputs(requests[place], sizes[place], program_sizes[place])

            made = make_images(models, requests, program_sizes, todo, load, config.batch_size, bar)
            for places, images, _ in made:
                check_finite_images(images, f'images of "{requests[places[0]].prompt}" and others')
                for place, image in zip(places, images if is_writer else ()):
                    about = requests[place], sizes[place], config, program, ids[place]
                    writer.write(write_image, image, *about)
        jax.effects_barrier()  # waits for the previews
    return (requests, sizes) if is_writer else None
