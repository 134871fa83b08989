"""What edit_cli.py and evaluate_edits.py share: sizes, opening a model, edits over all devices.

pipeline_type, factor, scheduler = check_model("MODEL", resolution=512, num_inference_steps=50)
pipeline, params = load_model("MODEL", pipeline_type, scheduler, jnp.bfloat16)
replicate_params(params, devices)
for batch, images, seconds in edit_batches(pipeline, params, devices, edits, sizes, load, ...):
    ...
"""

import math
import time
from collections import defaultdict
from functools import partial
from threading import Lock

import jax
import jax.numpy as jnp
import numpy as np
from flax import jax_utils
from PIL import Image, ImageOps

from acceleration_flax import parse, plan_steps
from caching_flax import noise_scales
from config_flax import warn_once
from executables import replace_leaves, step_options
from images import check_image_file, load_image, save_image, to_pil
from pipeline_flax_stable_diffusion_instruct_pix2pix import (
    InstructPix2Pix,
    guidance_branches,
    pixels_per_latent,
)
from pipeline_flax_utils import MODULES, pipeline_class
from previews_flax import Preview
from sampling_flax import check_eta, keys_per_image
from scheduling_flax import SCHEDULERS, scheduler_from_config


def edit_size(size, resolution, factor):
    """Width and height at which an image is edited.

    Args:
        size: its (width, height).
        resolution: of the longer side.
        factor: both are multiples of it.

    Returns:
        (width, height), each the nearest multiple of factor, at least one.
    """
    scale = resolution / max(size)
    return tuple(max(1, math.floor(side * scale / factor + 0.5)) * factor for side in size)


def fit_image(image, size):
    """A PIL image scaled to cover size (width, height) and cropped to it evenly."""
    return ImageOps.fit(image, size, Image.Resampling.LANCZOS)


def load_fitted(path, size):
    """The image in a file, scaled to cover size (width, height) and cropped to it evenly."""
    return fit_image(load_image(path), size)


def check_scale(name, value):
    """Raise a ValueError unless a guidance scale is a number >= 0; name: of its flag."""
    if not 0 <= value < math.inf:
        raise ValueError(
            f"--{name} {value} must be 0 or more; --guidance_scale 1 --image_guidance_scale 1 "
            "switches guidance off"
        )


def check_seed(name, value):
    """Raise a ValueError for a seed that is not a uint32; name: of its flag."""
    if not 0 <= value < 2**32:
        raise ValueError(f"--{name} {value} must be from 0 to {2**32 - 1}")


def check_scheduler(name):
    """Raise a ValueError for an unknown --scheduler; None is the model's own."""
    if name not in (None, *SCHEDULERS):
        raise ValueError(f"--scheduler {name} is unknown; choose from {', '.join(SCHEDULERS)}")


def choose_scheduler(config, source, name=None, timestep_spacing=None, prediction_type=None):
    """Build (scheduler, state) of --scheduler, --timestep_spacing and --prediction_type.

    Args:
        config, source: content of the model's scheduler_config.json, and the model.
        name: of SCHEDULERS; None: the class that the config names.
        timestep_spacing, prediction_type: None: as in the config.

    Raises:
        ValueError: the scheduler does not use timestep_spacing, or is not supported.
    """
    changes = {"timestep_spacing": timestep_spacing, "prediction_type": prediction_type}
    changes = {option: value for option, value in changes.items() if value}
    scheduler, state = scheduler_from_config(config, source, name, **changes)
    if timestep_spacing and isinstance(scheduler, (SCHEDULERS["lcm"], SCHEDULERS["tcd"])):
        raise ValueError(
            f"--timestep_spacing {timestep_spacing} has no effect with "
            f"{type(scheduler).__name__}, which visits timesteps of the distillation; leave it out"
        )
    return scheduler, state


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
):
    """Check a model and the flags that depend on it, without reading its weights.

    Args:
        model: directory or hub id of an InstructPix2Pix pipeline, SD or SDXL.
        resolution: of the longer side, pixels.
        num_inference_steps: of the scheduler.
        scheduler: a name of SCHEDULERS; None: the model's own.
        timesteps, eta: of the pipeline's call.
        timestep_spacing: see choose_scheduler.
        accelerate: see acceleration_flax.parse.
        guidance_scales: of the instruction and the image.

    Returns:
        (pipeline class, pixels per latent along a side, scheduler).

    Raises:
        ValueError: it is no such model, resolution is too small for it, or the scheduler does not
            take the number of steps, or accelerations do not fit.
    """
    accelerate = parse(accelerate)
    pipeline_type = pipeline_class(model)
    if not issubclass(pipeline_type, InstructPix2Pix):
        raise ValueError(
            f"--model {model} is a {pipeline_type.torch_class_name}, not an InstructPix2Pix "
            "model; train one with flax_train_instruct_pix2pix.py"
        )
    pipeline_type.check_acceleration(accelerate)
    _, configs = pipeline_type.check(model)
    factor = pixels_per_latent(configs, resolution)
    found, state = choose_scheduler(configs["scheduler"], model, scheduler, timestep_spacing)
    steps = step_options(num_inference_steps, timesteps, eta)
    check_steps(found, state, steps, accelerate, guidance_branches(*guidance_scales))
    return pipeline_type, factor, found


def check_steps(scheduler, state, steps, accelerate, branches):
    """Raise a ValueError for steps that the scheduler or the accelerations do not take.

    Args:
        scheduler, state: of choose_scheduler.
        steps: of executables.step_options.
        accelerate: Acceleration.
        branches: of guidance.
    """
    state = timesteps_of(scheduler, state, steps)
    check_eta(scheduler, steps["eta"])
    plan_steps(accelerate, branches, noise_scales(state))


def timesteps_of(scheduler, state, steps):
    """The scheduler's state; its timesteps are all that it visits, PNDM's repeated ones included.

    Arguments as for check_steps.
    """
    return scheduler.set_timesteps(
        state, steps["num_inference_steps"], timesteps=steps["timesteps"]
    )


def compute_dtype(name):
    """The dtype of a --dtype flag; None: float32 on a CPU, else bfloat16."""
    return jnp.dtype(name or ("float32" if jax.default_backend() == "cpu" else "bfloat16"))


def preview_files(config, scheduler, outputs, inputs=()):
    """Write previews next to the images: for OUT.png OUT-step-005.png, OUT-step-010.png, ...

    Args:
        config: with the flags preview, preview_decoder, seed, num_inference_steps, timesteps, grid.
        scheduler: of the images.
        outputs: the file of each image, in the order of their keys.
        inputs: files that previews must not replace, besides outputs and grid.

    Returns:
        Preview, or None without --preview.

    Raises:
        ValueError: there would be no preview, or one cannot be written or would replace a file.
    """
    every, decoder = config.preview, config.preview_decoder
    if every is None:
        if decoder:
            raise ValueError(f"--preview_decoder {decoder} is for --preview; give both or neither")
        return None
    steps = step_options(config.num_inference_steps, config.timesteps, None)
    num_steps = len(timesteps_of(scheduler, scheduler.create_state(), steps).timesteps)
    if every >= num_steps:
        raise ValueError(
            f"--preview {every} of {num_steps} steps makes no preview, as the last step makes the "
            f"image; take less than {num_steps}"
        )
    kept = {path.resolve() for path in (*outputs, *inputs, config.grid) if path}
    for path in (
        preview_file(x, i) for x in outputs for i in range(every, num_steps, max(1, every))
    ):
        check_image_file(path)
        if path.resolve() in kept:
            raise ValueError(f"{path} would be replaced by a preview; give it another name")
    keys = jax.random.key_data(keys_per_image(jax.random.key(config.seed), len(outputs)))
    files = {key.tobytes(): file for key, file in zip(np.asarray(keys), outputs)}
    one_at_a_time = Lock()  # devices call it from several threads

    def show(step, keys, images):
        with one_at_a_time:
            for key, image in zip(keys, to_pil(images)):
                try:
                    save_image(image, preview_file(files[key.tobytes()], step))
                except OSError as error:  # the image itself may still be written
                    warn_once(f"a preview cannot be written: {error}")

    return Preview(every, show, decoder)


def preview_file(file, step):
    """The file of an image's preview."""
    return file.with_name(f"{file.stem}-step-{step:03}{file.suffix}")


def load_model(model, pipeline_type, scheduler, dtype, lora=(), accelerate=(), preview=None):
    """Read a model.

    Args:
        model, pipeline_type, scheduler: see check_model.
        dtype: of computation and parameters; see cast_params.
        lora: files to fold into the weights, see lora_flax.Loras.
        accelerate: see acceleration_flax.parse.
        preview: Preview or None.

    Returns:
        (pipeline, its parameters as NumPy arrays).
    """
    pipeline = pipeline_type.open(
        model, dtype=dtype, scheduler=scheduler, accelerate=accelerate, preview=preview
    )
    params = pipeline.load_params(model, lora=lora)
    cast_params(pipeline, params)
    return pipeline, params


def cast_params(pipeline, params):
    """Cast a pipeline's parameters, in place, to the dtype in which they compute.

    That is pipeline.dtype, but float32 for a VAE with force_upcast, and for the scheduler's state;
    int8 for the UNet's kernels if the pipeline's acceleration says so.

    Args:
        pipeline: as from open or from_pretrained.
        params: its parameters, NumPy arrays.
    """
    for name in {*MODULES, "tiny_vae"} & params.keys():
        dtype = pipeline._vae.dtype if name == "vae" else pipeline.dtype
        replace_leaves(partial(np.asarray, dtype=dtype), params[name])
    pipeline.quantize_params(params)


def replicate_params(params, devices):
    """Move parameters to every device: afterwards params has no NumPy arrays."""
    replace_leaves(lambda x: jax_utils.replicate(x, devices), params)


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
):
    """Edit images over several devices, those of one size together.

    The noise of an edit depends on seed and its index only.

    Args:
        pipeline: InstructPix2Pix.
        params: its parameters, on each of the devices.
        devices: jax devices.
        edits: objects with index, instruction and input, which names the image in errors.
        sizes: (width, height) of each edit.
        load: (edit, size) -> the PIL image to edit, of that size.
        bar: tqdm progress bar in units of edits.
        batch_size: images per device at once, at most.
        seed, num_inference_steps, guidance_scale, image_guidance_scale, negative_prompt, timesteps,
            eta: of all edits.

    Yields:
        (list of edits, their results, NumPy float32 (n, H, W, 3) in [0, 1], seconds of the
        pipeline's call).

    Raises:
        ValueError: a result is not finite.
    """
    # All texts at once, so that warnings come early and once.
    all_prompt_ids = pipeline.prepare_text_inputs([edit.instruction for edit in edits])
    neg_prompt_ids = None
    if negative_prompt:  # SDXL distinguishes no text from an empty one
        neg_prompt_ids = pipeline.prepare_text_inputs(negative_prompt)
    base_key = jax.random.key(seed)
    groups = defaultdict(list)
    for row, (edit, size) in enumerate(zip(edits, sizes)):
        groups[size].append((row, edit))

    for size, group in groups.items():
        B = min(batch_size, math.ceil(len(group) / len(devices)))
        bar.set_description(f"compiling {size[0]}x{size[1]}")
        for start in range(0, len(group), B * len(devices)):
            batch = group[start : start + B * len(devices)]
            padded = batch + batch[-1:] * (B * len(devices) - len(batch))
            _, image = pipeline.prepare_inputs("", [load(edit, size) for _, edit in padded])
            prompt_ids = all_prompt_ids[[row for row, _ in padded]]
            indices = np.array([edit.index for _, edit in padded])
            keys = jax.vmap(jax.random.fold_in, (None, 0))(base_key, indices)
            neg_ids = None
            if neg_prompt_ids is not None:
                neg_ids = np.broadcast_to(neg_prompt_ids, prompt_ids.shape)
            prompt_ids, image, keys, neg_ids = jax.tree.map(
                lambda x: x.reshape(len(devices), -1, *x.shape[1:]),
                (prompt_ids, image, keys, neg_ids),
            )
            started = time.perf_counter()
            images = pipeline(
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
            ).images  # (devices, B, H, W, 3)
            images = np.asarray(images)
            seconds = time.perf_counter() - started
            images = images.reshape(-1, *images.shape[2:])[: len(batch)]
            if not np.isfinite(images).all():
                raise ValueError(
                    f"the edit of {batch[0][1].input} and others are NaN; try --dtype "
                    "float32, and if that does not help, the model is broken"
                )
            yield [edit for _, edit in batch], images, seconds
            bar.set_description(f"editing {size[0]}x{size[1]}")
            bar.update(len(batch))
