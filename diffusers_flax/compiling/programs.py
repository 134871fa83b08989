"""The programs that compile_for.py compiles besides the training step: UNets, images, pairs.

Each has a dataclass of flags, and a function that makes its Program for devices.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np

from diffusers_flax.acceleration.caches import switch_fractions
from diffusers_flax.acceleration.plans import plan_steps
from diffusers_flax.command_line import AtLeast, Between
from diffusers_flax.compiling.chips import find_target
from diffusers_flax.compiling.kernels import BUSY_WITH_IMAGES
from diffusers_flax.compiling.report import Part, Program, num_bytes, replicated_shapes
from diffusers_flax.devices.layout import Layout, parse_layout
from diffusers_flax.devices.parallelism import num_row_devices
from diffusers_flax.generating.batches import IN_FLIGHT
from diffusers_flax.generating.flags import (
    SamplingFlags,
    check_guidance_range,
    check_pair_ranges,
    from_flags,
)
from diffusers_flax.generating.models import (
    EDIT,
    Sampling,
    check_sampling,
    check_tasks,
    pipeline_for,
)
from diffusers_flax.loading.directories import COMPONENT_FILES, INDEX_NAME
from diffusers_flax.loading.files import write_json
from diffusers_flax.models.clip_similarities import FlaxCLIPModel
from diffusers_flax.models.quantization import store
from diffusers_flax.models.vae import with_tile
from diffusers_flax.pipelines.attention_sharing import SCOPE
from diffusers_flax.pipelines.base import MODULES
from diffusers_flax.pipelines.guidance import read_guidance
from diffusers_flax.pipelines.memory import choose_vae_tile, num_bytes_at_once
from diffusers_flax.pipelines.running import Options
from diffusers_flax.published_configs import PUBLISHED_CONFIGS

FAMILIES = {"sd15": "stable-diffusion-v1-5", "sdxl": "stable-diffusion-xl-base-1.0"}
Positive, Scale = Annotated[int, AtLeast(1)], Annotated[float, AtLeast(0)]  # of flags
# Products in bfloat16 that a TPU makes for one of CLIP's, which are in float32 with the highest
# precision. Source: jax.lax.Precision, HIGHEST: bfloat16 in six passes.
CLIP_PASSES = 6


@dataclass(frozen=True, kw_only=True)
class TargetFlags:
    """Flags of all programs."""

    tpu: str = ""  # type of the slice: v4-32, v5e-16, v5p-8, v6e-8, ...
    # or GPUs: a100_40, a100_80, h100, h200, l4, rtx4090, rtx6000pro; h100x8: eight in one host
    gpu: str = ""
    # XLA's optimization level; O0 and O1 compile faster, but keep nothing in a TPU's VMEM
    optimization_level: Literal["O0", "O1", "O2", "O3"] | None = None
    # XLA's options for this compilation, NAME=VALUE, such as xla_tpu_scoped_vmem_limit_kib=65536
    compiler_options: tuple[str, ...] = ()
    output: str = ""  # report; "" is compile_for_CHIPS_PROGRAM.json in the current directory


@dataclass(frozen=True, kw_only=True)
class ImageFlags(SamplingFlags, TargetFlags):
    """Flags of the programs that make images, by default in bfloat16."""

    family: Literal["sd15", "sdxl"] = "sd15"  # model without --pretrained_model_name_or_path
    pretrained_model_name_or_path: str = ""  # directory, hub id or file; "" is --family
    revision: str | None = None  # branch, tag or commit of a hub id
    config_name_or_path: str | None = None  # configs of a one-file model; default: its family's
    num_inference_steps: Positive = 20  # denoising steps
    storage: Literal["float8", "int8"] | None = None  # of the kernels of UNet and text encoders
    vae_dtype: Literal["float32", "bfloat16", "float16"] | None = None  # default: the program's
    # pixels, side of the tiles of the VAE; 0: whole images; default: tiles if they need less memory
    # than there is
    vae_tile: int | None = None


@dataclass(frozen=True, kw_only=True)
class BatchFlags(ImageFlags):
    """Flags of the programs whose images may be spread over chips."""

    # images at once on each chip, with --parallel in each group of chips; "auto": as many as fit
    num_images: Positive | Literal["auto"] = 1
    guidance_scale: Scale = 7.5  # weight of the text; up to 1: no guidance
    parallel: tuple[str, ...] = ()  # chips that share an image: branches=2 rows=2; see generate_cli
    # parameters in the host's memory of a TPU: component, group or layer
    offload: Literal["component", "group", "layer"] | None = None


@dataclass(frozen=True, kw_only=True)
class SdxlFlags(BatchFlags):
    """Images from text, by default of SDXL."""

    family: Literal["sd15", "sdxl"] = "sdxl"  # model without --pretrained_model_name_or_path
    image_size: Positive = 1024  # side of the images, pixels


@dataclass(frozen=True, kw_only=True)
class EditProgramFlags(BatchFlags):
    """Edited images, by InstructPix2Pix."""

    resolution: Positive = 512  # side of the images, pixels
    image_guidance_scale: Scale = 1.5  # similarity to the input


@dataclass(frozen=True, kw_only=True)
class PairProgramFlags(ImageFlags):
    """Pairs of images with shared self-attention, by make_pairs.py, and CLIP's features."""

    batch_size: Positive | Literal["auto"] = 4  # pairs per device at once; "auto": as many as fit
    num_inference_steps: Positive = 100  # denoising steps
    scheduler: str | None = "euler_ancestral"  # ddim, lcm, ...
    # least and largest weight of the captions; up to 1: no guidance, half the work
    guidance_scale: Annotated[tuple[float, float], AtLeast(0)] = (7.5, 15.0)
    # least and largest fraction of the steps with shared self-attention
    attention_sharing: Annotated[tuple[float, float], Between(0, 1)] = (0.1, 0.9)
    width: Positive | None = None  # pixels; default: the model's
    height: Positive | None = None  # likewise


def write_published_model(folder, family, is_edit):
    """Write the config files of a published model as a model's directory; returns its Path.

    Args:
        folder: Path of an existing directory.
        family: key of FAMILIES.
        is_edit: make it an InstructPix2Pix model, with a widened UNet.
    """
    configs = {name: dict(x) for name, x in PUBLISHED_CONFIGS[FAMILIES[family]].items()}
    if is_edit:
        configs["unet"]["in_channels"] = 8
    kind = f"{'XL' if family == 'sdxl' else ''}{'InstructPix2Pix' if is_edit else ''}"
    index = {"_class_name": f"StableDiffusion{kind}Pipeline"}
    for name, content in configs.items():
        (folder / family / name).mkdir(parents=True)
        write_json(folder / family / name / COMPONENT_FILES[name], content)
        index[name] = ["diffusers", name]
    write_json(folder / family / INDEX_NAME, index)
    return folder / family


def param_shapes(module, dtype):
    """Shapes of a module's parameters, stored in dtype."""
    shapes = jax.eval_shape(module.init_weights, jax.random.key(0))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), shapes)


def open_pipeline(config, sampling, layout):
    """The pipeline of ImageFlags, from config files only.

    Raises:
        ValueError: the model or flags do not fit.
    """
    source, revision = config.pretrained_model_name_or_path, config.revision
    task = EDIT if isinstance(config, EditProgramFlags) else "text to image"
    place = dict(flag="pretrained_model_name_or_path", revision=revision)
    is_xl, configs = check_tasks(source, [task], **place)
    cls = pipeline_for(task, is_xl)
    if isinstance(config, PairProgramFlags):
        check_guidance_range(config.guidance_scale, configs["unet"])
    scheduler = check_sampling(cls, configs["scheduler"], source, sampling)
    # Prompts are tokens here, so no tokenizer is read.
    encoders = [name for name in configs if name.startswith("text_encoder")]
    replaced = {name.replace("text_encoder", "tokenizer"): True for name in encoders}
    options = {name: getattr(config, name) for name in ("accelerate", "storage", "vae_dtype")}
    options |= {"scheduler": scheduler, "replaced": replaced, "layout": layout}
    return cls.open(source, revision, dtype=jnp.dtype(config.dtype or "bfloat16"), **options)


def pipeline_shapes(pipeline):
    """Shapes of a pipeline's parameters, cast as by parameters.cast_params."""
    params = {
        name: param_shapes(module, pipeline.dtype)
        for name in (*MODULES, "tiny_vae")
        if (module := getattr(pipeline, name, None)) is not None
    }

    def stored(params):
        params = {name: store(x, storage=pipeline.storage) for name, x in params.items()}
        pipeline.quantize_params(params)
        return params

    vae = param_shapes(pipeline.compute_vae, pipeline.compute_vae.dtype)
    scheduler = jax.eval_shape(pipeline.scheduler.create_state)
    return jax.eval_shape(stored, params) | {"vae": vae, "scheduler": scheduler}


def image_program(config, devices):
    """The Program of generate_cli.py, edit_cli.py or make_pairs.py: from prompts to images.

    Args:
        config: SdxlFlags, EditProgramFlags or PairProgramFlags.
        devices: to compile for.
    """
    layout = clip = None
    if isinstance(config, PairProgramFlags):
        check_pair_ranges(config)
        height, width, B = config.height, config.width, 2 * config.batch_size
        clip = clip_part(B, devices)
    else:
        height = width = getattr(config, "resolution", None) or config.image_size
        B, layout = config.num_images, parse_layout(config.parallel, devices)
        if config.offload:
            layout = replace(layout or Layout(devices), offload=config.offload)
    n = len(devices) if layout is None else layout.data
    sampling = from_flags(Sampling, config, guidance_scale=np.max(config.guidance_scale))
    pipeline = open_pipeline(config, sampling, layout)
    height, width = pipeline.image_size(height, width)
    if (tile := config.vae_tile) is None:  # what the chip's memory needs
        left = find_target(config.tpu or config.gpu).chip.memory - num_bytes_at_once(pipeline)
        left -= num_bytes(clip.args[0]) if clip else 0
        if layout:
            left *= num_row_devices(layout, height // pipeline.vae_scale_factor)
        tile = choose_vae_tile(pipeline, B, (width, height), left, devices[0].platform)
    pipeline = replace(pipeline, vae=with_tile(pipeline.vae, tile))

    key = jax.eval_shape(jax.random.key, 0)
    length = pipeline.text_encoder.module.max_position_embeddings
    ids = jax.ShapeDtypeStruct((n, B, *(2,) * (pipeline.text_axes - 1), length), jnp.int32)
    scale = jax.ShapeDtypeStruct((n, B if clip else 1), jnp.float32)
    inputs = {"prompt_ids": ids, "neg_prompt_ids": ids, "guidance_scale": scale}
    inputs["prng_seed"] = jax.ShapeDtypeStruct((n, B), key.dtype)
    if isinstance(config, EditProgramFlags):
        inputs["image"] = jax.ShapeDtypeStruct((n, B, 3, height, width), jnp.float32)
        inputs["image_guidance_scale"] = scale
        if pipeline.unet.takes_reference:
            inputs["reference"] = inputs["image"]
    scales = {name: np.max(getattr(config, name)) for name in inputs if name.endswith("_scale")}
    branches = pipeline.guidance_branches(**scales)
    options = sampling.steps(type(pipeline)) | {"height": height, "width": width}
    options["guidance"] = read_guidance(config.guidance, pipeline.accelerate)
    schedule = pipeline.make_schedule(Options(**options), pipeline.latent_shape(B, height, width))
    plan = plan_steps(pipeline.accelerate, branches, schedule.scales)
    fractions = switch_fractions(plan)
    if clip:
        inputs["attention_sharing"] = scale
        shared = sharing_fractions(*config.attention_sharing, B // 2, schedule.num_steps)
        fractions[SCOPE] = shared

    def generate(inputs, params):
        return pipeline._generate(params=params, branches=branches, **options, **inputs)

    params = pipeline_shapes(pipeline)
    if layout is None:
        function = jax.pmap(generate, axis_name="batch", devices=devices)
        params = replicated_shapes(params, n)
    else:
        pipeline.check_parallel(branches, height)
        function, params = layout.jit_batches(generate), layout.shapes_of_params(params)
        inputs, devices = layout.with_shardings(inputs), layout.devices
    step = Part(function, (inputs, params), fractions=fractions, busy=BUSY_WITH_IMAGES)
    parts, held, batches = {"step": step}, {"parameters": params}, [inputs]
    if clip:
        parts["CLIP"], held["CLIP"] = clip, clip.args[0]
        images = jax.ShapeDtypeStruct((n, B, height, width, 3), jnp.float32)
        batches += [clip.args[1], *[images] * (IN_FLIGHT - 1)]
    return Program(
        parts,
        held | {"batches": batches},
        batch_per_chip=(B // 2 if clip else B) * n / len(devices),
        num_chips=len(devices),
        per_batch=2 if clip else 1,
        vae_tile=tile if max(height, width) > tile else 0,
    )


def sharing_fractions(low, high, num_pairs, num_steps):
    """Expected fractions of the steps in which no, some and all pairs of a batch share attention.

    Args:
        low, high: of the uniform distribution of each pair's p.
        num_pairs: of the batch.
        num_steps: step i is shared while p > i / (num_steps - 1).

    Source: InstructPix2Pix (arXiv 2211.09800), section 3.1.
    """
    t = np.arange(num_steps) / max(num_steps - 1, 1)
    shares = np.clip((high - t) / (high - low), 0, 1) if low < high else np.float64(low > t)
    none, all_pairs = np.mean((1 - shares) ** num_pairs), np.mean(shares**num_pairs)
    return float(none), float(1 - none - all_pairs), float(all_pairs)


def clip_part(num_images, devices):
    """The Part of CLIP's features of a device's images, as generating/clip.py makes them."""
    # CLIP ViT-L/14, whose text encoder is Stable Diffusion's.
    text = PUBLISHED_CONFIGS[FAMILIES["sd15"]]["text_encoder"]
    vision = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16}
    vision |= {"num_hidden_layers": 24, "patch_size": 14, "projection_dim": 768}
    configs = {"projection_dim": 768, "text_config": text, "vision_config": vision}
    clip = FlaxCLIPModel.from_config(configs)

    def features(params, pixel_values):
        with jax.default_matmul_precision("highest"):
            return clip.get_image_features(pixel_values, params=params)

    params = replicated_shapes(param_shapes(clip.module, jnp.float32), len(devices))
    images = jax.ShapeDtypeStruct((len(devices), num_images, 3, 224, 224), jnp.float32)
    function = jax.pmap(features, axis_name="batch", devices=devices)
    return Part(function, (params, images), passes=CLIP_PASSES)
