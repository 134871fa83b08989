"""What the programs that make images share: flags, memory, opening a model, edits over all devices.

checked = check_model("MODEL", None, num_inference_steps=50)
pipeline, params = load_model("MODEL", checked.pipeline_type, checked.scheduler, jnp.bfloat16)
replicate_params(params, devices)
for batch, images, seconds in edit_batches(pipeline, params, devices, edits, sizes, load, ...):
    ...
"""

import math
import re
import sys
import time
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import jax_utils
from PIL import Image, ImageOps
from tqdm import tqdm

from command_line import check_image_file, in_bytes
from dataloading.images import load_image
from dataloading.lists import read_list
from diffusers_flax.acceleration.plans import parse, plan_steps
from diffusers_flax.acceleration.previews import Preview
from diffusers_flax.images import made_by, save_image, to_pil
from diffusers_flax.loading.directories import read_index
from diffusers_flax.loading.hub import locate
from diffusers_flax.messages import warn_once
from diffusers_flax.parameters import replace_leaves
from diffusers_flax.pipelines.base import MODULES, pipeline_class
from diffusers_flax.pipelines.instruct_pix2pix import (
    InstructPix2Pix,
    edit_branches,
    pixels_per_latent,
)
from diffusers_flax.pipelines.sampling import check_eta, keys_per_image
from diffusers_flax.programs import timestep_options
from diffusers_flax.schedulers.factory import SCHEDULERS, scheduler_from_config
from diffusers_flax.schedulers.noise_schedule import noise_scales

PREVIEW = "preview by FlaxDiffusionPipeline"  # marks previews, which later previews may replace


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


def read_edits(file):
    """Read --edits_jsonl, see dataloading/lists.py: [(path of the image, instruction, output)]."""
    names = ("original_image", "edit_prompt", "output")
    rows = read_list(f"--edits_jsonl {file}", file, names)
    return [tuple(row[name] for name in names) for row in rows]


def image_size(path):
    """(width, height) of the image in a file, which is decoded to check it."""
    return load_image(path).size


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

    Returns:
        CheckedModel.

    Raises:
        ValueError: it is no such model, resolution is too small for it, or the scheduler does not
            take the number of steps, or accelerations do not fit.
    """
    accelerate = parse(accelerate)
    pipeline_type = pipeline_class(model)
    if not issubclass(pipeline_type, InstructPix2Pix):
        raise ValueError(
            f"--model {model} is a {pipeline_type.torch_class_name}, not an InstructPix2Pix model; "
            "train one with flax_train_instruct_pix2pix.py, or make images from text with "
            "sdxl_single.py and an SDXL model"
        )
    pipeline_type.check_acceleration(accelerate)
    _, configs = pipeline_type.check(model)
    factor = pixels_per_latent(configs, math.inf if resolution is None else resolution)
    if resolution is None:
        side = configs["unet"].get("sample_size") or MODULES["unet"].sample_size
        resolution = factor * (max(side) if isinstance(side, list) else side)
    found, state = choose_scheduler(configs["scheduler"], model, scheduler, timestep_spacing)
    steps = timestep_options(num_inference_steps, timesteps, eta)
    check_steps(found, state, steps, accelerate, edit_branches(*guidance_scales))
    return CheckedModel(pipeline_type, factor, resolution, found)


def check_xl(model, revision, unet):
    """Raise a ValueError, which names the right program, for a model that is not SDXL for text.

    Args:
        model, revision: --pretrained_model_name_or_path and --revision.
        unet: --unet, or None.
    """
    given = f"--pretrained_model_name_or_path {model}"
    name = str(read_index(model, revision).get("_class_name"))
    if "InstructPix2Pix" in name:
        raise ValueError(f"{given} is an edit model ({name}); edit_cli.py edits images with it")
    if "XL" not in name:
        raise ValueError(
            f"{given} is a {name}, not Stable Diffusion XL; give an SDXL model, or use Stable "
            "Diffusion 1.x and 2.x from Python, see docs/sdxl.md"
        )
    folder, file = locate("--unet", unet) if unet else (None, None)
    if not folder or file:
        return
    if Path(folder, "unet", "config.json").is_file():
        raise ValueError(f"--unet {unet} is a pipeline; give its UNet, {Path(unet, 'unet')}")
    config = MODULES["unet"].load_config(folder)
    if config.get("addition_embed_type") != "text_time":
        raise ValueError(
            f"--unet {unet} is a UNet of Stable Diffusion 1.x or 2.x, the model is SDXL; give a "
            "UNet of SDXL"
        )


def check_finite(images, which, lora=()):
    """Raise a ValueError, which says what to try, if images are not finite.

    Args:
        images: array.
        which: the images, in words.
        lora: --lora.
    """
    if not np.isfinite(images).all():
        first = f"without --lora {' '.join(lora)}, then " if lora else ""
        raise ValueError(
            f"{which} are NaN; try it {first}with --dtype float32, and if that does not help, the "
            "model is broken"
        )


def check_steps(scheduler, state, steps, accelerate, branches):
    """Raise a ValueError for steps that the scheduler or the accelerations do not take.

    Args:
        scheduler, state: of choose_scheduler.
        steps: of programs.timestep_options.
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

    They replace previews of an earlier run, and no other file.

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
    steps = timestep_options(config.num_inference_steps, config.timesteps, None)
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
        if path.resolve() in kept or (path.exists() and not made_by(path, PREVIEW)):
            raise ValueError(f"{path} would be replaced by a preview; give it another name")
    keys = jax.random.key_data(keys_per_image(jax.random.key(config.seed), len(outputs)))
    files = {key.tobytes(): file for key, file in zip(np.asarray(keys), outputs)}
    one_at_a_time = Lock()  # devices call it from several threads

    def show(step, keys, images):
        with one_at_a_time:
            for key, image in zip(keys, to_pil(images)):
                try:
                    save_image(image, preview_file(files[key.tobytes()], step), PREVIEW)
                except OSError as error:  # the image itself may still be written
                    warn_once(f"a preview cannot be written: {error}")

    return Preview(every, show, decoder)


def preview_file(file, step):
    """The file of an image's preview."""
    return file.with_name(f"{file.stem}-step-{step:03}{file.suffix}")


def load_model(
    model,
    pipeline_type,
    scheduler,
    dtype,
    lora=(),
    accelerate=(),
    preview=None,
    plan=lambda pipeline: "",
):
    """Read a model.

    Args:
        model, pipeline_type, scheduler: see check_model.
        dtype: of computation and parameters; see cast_params.
        lora: files to fold into the weights, see loading.lora.Loras.
        accelerate: see acceleration.plans.parse.
        preview: Preview or None.
        plan: called with the pipeline before the weights are read; returns a line to print after
            that, or "".

    Returns:
        (pipeline, its parameters as NumPy arrays).
    """
    pipeline = pipeline_type.open(
        model, dtype=dtype, scheduler=scheduler, accelerate=accelerate, preview=preview
    )
    planned = plan(pipeline)
    params = pipeline.load_params(model, lora=lora)
    cast_params(pipeline, params)
    if planned:
        tqdm.write(planned, file=sys.stderr)
    return pipeline, params


def plan_images(pipeline, devices, num_images, batch_size, branches, size, up_to=""):
    """What will be made, in words; what cannot fit into memory is refused. Reads no weights.

    Args:
        pipeline: as from open.
        devices: that make the images.
        num_images, batch_size: of all, and of a device at once.
        branches: of guidance.
        size: (width, height) of the images of a batch, pixels.
        up_to: "up to " if there are smaller ones.

    Returns:
        A line for the user, with a lower bound on the memory.

    Raises:
        ValueError: a lower bound on the memory is more than there is.
    """
    params = num_bytes_of_params(pipeline)
    per_device = batch_size * bytes_per_image(pipeline, len(branches), *size)
    stats = devices[0].memory_stats() or {}
    if on_host := devices[0].platform == "cpu":  # its devices share memory, and may share weights
        needed, available = params + len(devices) * per_device, host_memory()
    else:
        needed, available = params + per_device, stats.get("bytes_limit")
    what = (
        f"{num_images} image{'s' * (num_images > 1)} of {up_to}{size[0]}x{size[1]} pixels, "
        f"{batch_size} at once on each of {len(devices)} {devices[0].device_kind}"
    )
    memory = f"at least {in_bytes(needed)}"
    if available:
        memory += f" of the {in_bytes(available)} of {'this machine' if on_host else 'a device'}"
    if available and needed > available:
        raise ValueError(
            f"{what} take {memory}, of which the weights are {in_bytes(params)}; lower "
            "--batch_size or the size"
        )
    return f"{what}; memory: {memory}"


def plan_edits(pipeline, sizes, batch_size, branches):
    """plan_images for edit_batches.

    Args:
        pipeline, batch_size, branches: as for plan_images.
        sizes: (width, height) of each edit.
    """
    devices = jax.local_devices()[: len(sizes)]
    at_once = {
        size: min(batch_size, math.ceil(count / len(devices)))
        for size, count in Counter(sizes).items()
    }
    size = max(at_once, key=lambda size: at_once[size] * math.prod(size))
    up_to = "up to " if len(at_once) > 1 else ""
    return plan_images(pipeline, devices, len(sizes), at_once[size], branches, size, up_to)


def num_bytes_of_params(pipeline):
    """Bytes of a pipeline's parameters after cast_params, from its configs."""
    total = 0
    for name in MODULES:
        if (part := getattr(pipeline, name, None)) is not None:
            dtype = pipeline._vae.dtype if name == "vae" else pipeline.dtype
            is_int8 = name == "unet" and pipeline.accelerate.int8
            shapes = getattr(part, "module", part)._param_shapes()  # a text encoder has a module
            total += sum(map(math.prod, shapes.values())) * (
                1 if is_int8 else np.dtype(dtype).itemsize
            )
    return total


def bytes_per_image(pipeline, num_branches, width, height):
    """A lower bound on the memory that the program needs for each image of a batch, bytes.

    It is the larger one of the image, float32, and of the features of the UNet's down blocks, which
    all wait for the up blocks. Attention and the VAE's decoder take more.
    """
    config, factor = pipeline.unet.config, pipeline.vae_scale_factor
    channels, layers = config.block_out_channels, config.layers_per_block
    layers = layers if isinstance(layers, tuple) else [layers] * len(channels)
    h, w = height // factor, width // factor
    features = h * w * channels[0]  # of conv_in
    for level, C in enumerate(channels):
        features += layers[level] * h * w * C
        if level + 1 < len(channels):
            h, w = math.ceil(h / 2), math.ceil(w / 2)
            features += h * w * C
    return max(num_branches * features * np.dtype(pipeline.dtype).itemsize, width * height * 3 * 4)


def host_memory():
    """Bytes of memory and swap that this machine or container has; None: unknown."""
    try:
        lines = Path("/proc/meminfo").read_text()
        total = sum(int(x) << 10 for x in re.findall(r"(?:Mem|Swap)Total: +(\d+) kB", lines))
        limit = Path("/sys/fs/cgroup/memory.max")
        limit = limit.read_text().strip() if limit.exists() else "max"
        return total if limit == "max" else min(total, int(limit))
    except (OSError, ValueError):
        return None


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
    lora=(),
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
        lora: names for the error of a result that is not finite.

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
    base_key, num_devices = jax.random.key(seed), len(devices)
    groups = defaultdict(list)
    for row, (edit, size) in enumerate(zip(edits, sizes)):
        groups[size].append((row, edit))

    for size, group in groups.items():
        at_once = min(batch_size, math.ceil(len(group) / num_devices)) * num_devices
        bar.set_description(f"compiling {size[0]}x{size[1]}")
        for start in range(0, len(group), at_once):
            batch = group[start : start + at_once]
            padded = batch + batch[-1:] * (at_once - len(batch))
            prompt_ids, image, keys, neg_ids = batch_inputs(
                pipeline,
                [load(edit, size) for _, edit in padded],
                all_prompt_ids[[row for row, _ in padded]],
                neg_prompt_ids,
                base_key,
                np.array([edit.index for _, edit in padded]),
                num_devices,
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
            check_finite(images, f"the edit of {batch[0][1].input} and others", lora)
            yield [edit for _, edit in batch], images, seconds
            bar.set_description(f"editing {size[0]}x{size[1]}")
            bar.update(len(batch))


def batch_inputs(pipeline, images, prompt_ids, neg_prompt_ids, base_key, indices, num_devices):
    """The arrays of the pipeline's call for the edits of a batch.

    Args:
        pipeline: InstructPix2Pix.
        images: PIL images of one size, (devices * B).
        prompt_ids: of their instructions, (devices * B, ...).
        neg_prompt_ids: of the negative prompt, (1, ...), or None.
        base_key, indices: the noise of an edit has the key fold_in(base_key, index).
        num_devices: number of devices.

    Returns:
        (prompt_ids, image, keys, neg_prompt_ids), each (devices, B, ...).
    """
    _, image = pipeline.prepare_inputs("", images)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(base_key, indices)
    if neg_prompt_ids is not None:
        neg_prompt_ids = np.broadcast_to(neg_prompt_ids, prompt_ids.shape)
    return jax.tree.map(
        lambda x: x.reshape(num_devices, -1, *x.shape[1:]),
        (prompt_ids, image, keys, neg_prompt_ids),
    )
