"""The programs that compile_for.py compiles besides the training step: UNets and images.

Each has a dataclass of flags, and a function that makes its Program for devices.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from diffusers_flax.acceleration.caches import switch_fractions
from diffusers_flax.acceleration.plans import count_evaluations, plan_steps
from diffusers_flax.command_line import AtLeast
from diffusers_flax.compiling.cards import find_gpus, gpu_devices
from diffusers_flax.compiling.chips import Slice, find_slice, slice_devices
from diffusers_flax.compiling.costs import GIB, replicated_shapes
from diffusers_flax.devices.layout import Layout, parse_layout
from diffusers_flax.devices.parallelism import num_row_devices
from diffusers_flax.generating.flags import DeviceFlags
from diffusers_flax.loading.configs import ConfigMixin
from diffusers_flax.models.quantization import store
from diffusers_flax.models.tiny_vae import (
    TINY_VAES,
    FlaxAutoencoderTiny,
    check_latents,
    choose_tiny_vae,
    open_tiny_vae,
)
from diffusers_flax.models.unet import FlaxUNet2DConditionModel
from diffusers_flax.models.vae import with_tile
from diffusers_flax.pipelines.base import MODULES, pipeline_class, read_acceleration
from diffusers_flax.pipelines.instruct_pix2pix import (
    FlaxStableDiffusionInstructPix2PixPipeline,
    InstructPix2Pix,
    edit_branches,
    pixels_per_latent,
)
from diffusers_flax.pipelines.instruct_pix2pix_xl import (
    FlaxStableDiffusionXLInstructPix2PixPipeline,
)
from diffusers_flax.pipelines.memory import choose_vae_tile, num_bytes_at_once
from diffusers_flax.pipelines.sampling import make_schedule
from diffusers_flax.pipelines.stable_diffusion_xl import FlaxStableDiffusionXLPipeline
from diffusers_flax.published_configs import PUBLISHED_CONFIGS
from diffusers_flax.schedulers.factory import choose_scheduler

FAMILIES = {"sd15": "stable-diffusion-v1-5", "sdxl": "stable-diffusion-xl-base-1.0"}
DTYPES = {"no": jnp.float32, "bf16": jnp.bfloat16}
Positive, Scale = Annotated[int, AtLeast(1)], Annotated[float, AtLeast(0)]  # of flags


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


def find_target(config):
    """The Slice of --tpu or the Host of --gpu.

    Raises:
        ValueError: neither or both are given, or the type is unknown.
    """
    if bool(config.tpu) == bool(config.gpu):
        given = f"--tpu {config.tpu} and --gpu {config.gpu} are both given" if config.tpu else ""
        raise ValueError(f"{given or 'nothing to compile for'}; give --tpu v5e-4 or --gpu h100")
    return find_slice(config.tpu) if config.tpu else find_gpus(config.gpu)


def target_devices(target):
    """The devices of a Slice or Host, to compile for.

    Raises:
        ValueError: the compiler is not installed.
    """
    return slice_devices(target) if isinstance(target, Slice) else gpu_devices(target)


class Program(NamedTuple):
    """A step to compile, and an update of an average; arguments are ShapeDtypeStructs.

    Under pmap their shapes are (chips, ...).
    """

    step: Callable
    args: tuple
    held: dict[str, Any]  # arrays in memory before the step, {name in the report: tree}
    batch_per_chip: float  # pairs, samples or images
    switches: tuple = ()  # of acceleration.caches.switch_fractions
    num_chips: int | None = None  # chips that take part; None: all
    evaluations: int | None = None  # of the UNet per image, for programs that make images
    vae_tile: int = 0  # side of the tiles in which the VAE works, pixels; 0: whole images
    update: Callable | None = None  # of an average of the weights
    update_args: tuple = ()
    updates_per_step: float = 0.0
    scoring: Callable | None = None  # CLIP's features of the images
    scoring_args: tuple = ()


@dataclass(frozen=True, kw_only=True)
class UnetFlags(TargetFlags):
    """A UNet: forward and backward pass, or the forward pass of one sampling step."""

    family: Literal["sd15", "sdxl"] = "sd15"  # model without --pretrained_model_name_or_path
    gradient: bool = True  # also the gradient of float32 parameters; --no_gradient: forward pass
    # samples per chip; two per image with guidance; "auto": the largest number that fits
    batch_size: Positive | Literal["auto"] = 8
    in_channels: int | None = None  # input channels; default: 8 with gradient, else the config's
    resolution: Positive = 256  # side of the images, pixels
    mixed_precision: Literal["no", "bf16"] = "bf16"  # compute dtype
    output: str = ""  # report; "" is compile_for_CHIPS_unet.json in the current directory
    pretrained_model_name_or_path: str = ""  # directory, hub id or file; "" is --family
    revision: str | None = None  # branch, tag or commit of a hub id
    config_name_or_path: str | None = None  # configs of a one-file model; default: its family's


@dataclass(frozen=True, kw_only=True)
class ImageProgramFlags(DeviceFlags, TargetFlags):
    """Flags of the programs that make images, in bfloat16."""

    # images at once on each chip, with --parallel in each group of chips; "auto": as many as fit
    num_images: Positive | Literal["auto"] = 1
    num_inference_steps: Positive = 20  # denoising steps
    guidance_scale: Scale = 7.5  # weight of the text; up to 1: no guidance
    scheduler: str | None = None  # ddim, euler, ...; default: the model's own
    # NAME or NAME:PARAMETER=VALUE,...; names: guidance, deepcache, spectrum, tgate, fbcache, tome,
    # int8, taesd; see docs/acceleration.md
    accelerate: tuple[str, ...] = ()
    # report; "" is compile_for_CHIPS_PROGRAM_NUM_IMAGES.json in the current directory
    output: str = ""
    revision: str | None = None  # branch, tag or commit of a hub id
    config_name_or_path: str | None = None  # configs of a one-file model; default: its family's


@dataclass(frozen=True, kw_only=True)
class SdxlFlags(ImageProgramFlags):
    """SDXL images from text."""

    image_size: Positive = 1024  # side of the images, pixels
    pretrained_model_name_or_path: str = ""  # directory, hub id or file; "" is SDXL base 1.0


@dataclass(frozen=True, kw_only=True)
class EditProgramFlags(ImageProgramFlags):
    """Edited images, by InstructPix2Pix."""

    family: Literal["sd15", "sdxl"] = "sd15"  # model without --pretrained_model_name_or_path
    resolution: Positive = 512  # side of the images, pixels
    image_guidance_scale: Scale = 1.5  # similarity to the input
    pretrained_model_name_or_path: str = ""  # directory, hub id or file; "" is --family, widened


def param_shapes(module, dtype):
    """Shapes of a module's parameters, stored in dtype."""
    shapes = jax.eval_shape(module.init_weights, jax.random.key(0))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), shapes)


def read_configs(source, revision, *names):
    """{name: content of its config.json} of a pipeline's components."""
    read = partial(ConfigMixin.load_config, source, revision=revision)
    return {name: read(subfolder=name) for name in names}


def unet_program(config, devices):
    """A UNet on each device: loss and gradient, or one prediction.

    Args:
        config: UnetFlags.
        devices: to compile for.

    Returns:
        Program.
    """
    n, B = len(devices), config.batch_size
    configs = PUBLISHED_CONFIGS[FAMILIES[config.family]]
    if source := config.pretrained_model_name_or_path:
        configs = read_configs(source, config.revision, "unet", "vae")
    pretrained_channels = configs["unet"].get("in_channels", 4)
    in_channels = config.in_channels or (8 if config.gradient else pretrained_channels)
    dtype = DTYPES[config.mixed_precision]
    unet = FlaxUNet2DConditionModel.from_config(
        configs["unet"] | {"in_channels": in_channels}, dtype=dtype
    )
    side = config.resolution // pixels_per_latent(configs, config.resolution)
    inputs = [
        jax.ShapeDtypeStruct((n, B, in_channels, side, side), jnp.float32),
        jax.ShapeDtypeStruct((n, B), jnp.int32),
        jax.ShapeDtypeStruct((n, B, 77, unet.cross_attention_dim), dtype),
    ]
    if unet.addition_embed_type == "text_time":
        width = unet.projection_class_embeddings_input_dim - 6 * unet.addition_time_embed_dim
        added = {"text_embeds": ((n, B, width), dtype), "time_ids": ((n, B, 6), jnp.float32)}
        inputs.append({name: jax.ShapeDtypeStruct(*x) for name, x in added.items()})

    def predict(params, *inputs):
        return unet.apply({"params": params}, *inputs).sample

    def loss(params, *inputs):
        return jnp.square(predict(params, *inputs).astype(jnp.float32)).mean()

    params = replicated_shapes(param_shapes(unet, jnp.float32 if config.gradient else dtype), n)
    function = jax.value_and_grad(loss) if config.gradient else predict
    return Program(
        step=jax.pmap(function, axis_name="batch", devices=devices),
        args=(params, *inputs),
        held={"parameters": params, "batches": inputs},
        batch_per_chip=B,
    )


def open_pipeline_of_flags(config, layout=None):
    """The pipeline of SdxlFlags or EditProgramFlags, from config files only.

    Raises:
        ValueError: the model or flags do not fit.
    """
    is_edit, settings = isinstance(config, EditProgramFlags), {}
    source = config.pretrained_model_name_or_path
    if source:
        cls = pipeline_class(source, config.revision) if is_edit else FlaxStableDiffusionXLPipeline
        if is_edit and not issubclass(cls, InstructPix2Pix):
            raise ValueError(
                f"--pretrained_model_name_or_path {source} is a {cls.torch_class_name}; edit takes "
                "an InstructPix2Pix model"
            )
        index, configs = cls.check(source, config.revision)
        settings = cls._settings(index)
    else:
        family = config.family if is_edit else "sdxl"
        configs = dict(PUBLISHED_CONFIGS[FAMILIES[family]])
        cls = FlaxStableDiffusionXLPipeline
        if is_edit:
            cls = {
                "sd15": FlaxStableDiffusionInstructPix2PixPipeline,
                "sdxl": FlaxStableDiffusionXLInstructPix2PixPipeline,
            }[family]
            configs["unet"] = configs["unet"] | {"in_channels": 8}
    scheduler, _ = choose_scheduler(configs["scheduler"], source, config.scheduler)
    settings |= {"scheduler": scheduler, "layout": layout}
    return pipeline_of_configs(cls, configs, config, settings)


def pipeline_of_configs(cls, configs, config, settings):
    """A bfloat16 pipeline without parameters, made from the configs of its components.

    Args:
        cls: class of the pipeline.
        configs: {component: content of its config.json}.
        config: flags with accelerate, storage and vae_dtype.
        settings: {field of the pipeline: value}, among them the scheduler.
    """
    dtype, settings = jnp.bfloat16, dict(settings)
    modules = {
        name: MODULES[name].from_config(configs[name], dtype=dtype)
        for name in MODULES.keys() & configs.keys()
    }
    accelerate = read_acceleration(config.accelerate)
    decoder = accelerate and accelerate.tiny_decoder
    if tiny_vae := choose_tiny_vae(decoder, None, cls.tiny_vae_name):
        settings["tiny_vae_source"] = tiny_vae
        settings["tiny_vae"] = tiny_vae_module(tiny_vae, modules["vae"], dtype)
    # Prompts are tokens here, so no tokenizer is needed.
    tokenizers = {
        name.replace("text_encoder", "tokenizer"): True
        for name in modules
        if name.startswith("text_encoder")
    }
    settings |= {"dtype": dtype, "accelerate": accelerate}
    settings |= {"storage": config.storage, "vae_dtype": config.vae_dtype}
    return cls(**modules, **tokenizers, **settings)


def tiny_vae_module(source, vae, dtype):
    """The module of a TAESD; the configs of the published ones need no hub."""
    if source not in TINY_VAES:
        return open_tiny_vae(source, vae, dtype)
    published = PUBLISHED_CONFIGS[source.split("/")[1]]["vae"]
    module = FlaxAutoencoderTiny.from_config(published, dtype=dtype)
    check_latents(module, vae, source)
    return module


def pipeline_shapes(pipeline):
    """Shapes of a pipeline's parameters, cast as by parameters.cast_params."""

    def stored(params):
        return jax.eval_shape(partial(store, storage=pipeline.storage), params)

    params = {
        name: stored(param_shapes(module, pipeline.dtype))
        for name in (*MODULES, "tiny_vae")
        if (module := getattr(pipeline, name, None)) is not None
    }
    params["vae"] = param_shapes(pipeline.compute_vae, pipeline.compute_vae.dtype)

    def quantized(unet):
        params = {"unet": unet}
        pipeline.quantize_params(params)
        return params["unet"]

    params["unet"] = jax.eval_shape(quantized, params["unet"])
    params["scheduler"] = jax.eval_shape(pipeline.scheduler.create_state)
    return params


def with_vae_tile(pipeline, config, num_images, size, held=0):
    """Set the side of the VAE's tiles: --vae_tile, or what the chip's memory needs.

    Args:
        pipeline: of pipeline_of_configs.
        config: flags of the target, and vae_tile if the program has it.
        num_images: at once.
        size: (width, height) of the images, pixels.
        held: bytes of other models on the chip.

    Returns:
        (pipeline, side of the tiles, pixels; 0: whole images).
    """
    tile = getattr(config, "vae_tile", None)
    if tile is None:
        left = find_target(config).chip.memory * GIB - num_bytes_at_once(pipeline) - held
        if layout := pipeline.layout:
            left *= num_row_devices(layout, size[1] // pipeline.vae_scale_factor)
        platform = "tpu" if config.tpu else "gpu"
        tile = choose_vae_tile(pipeline, num_images, size, left, platform)
    pipeline = replace(pipeline, vae=with_tile(pipeline.vae, tile))
    return pipeline, tile if max(size) > tile else 0


def prompt_shapes(pipeline, n, B):
    """Shapes of the tokens of prompts and of the keys of images, (n, B, ...)."""
    encoders = (2,) * (pipeline.text_axes - 1)
    length = pipeline.text_encoder.module.max_position_embeddings
    key = jax.eval_shape(jax.random.key, 0)
    ids = jax.ShapeDtypeStruct((n, B, *encoders, length), jnp.int32)
    return ids, jax.ShapeDtypeStruct((n, B), key.dtype)


def image_program(config, devices):
    """The Program of generate_cli.py or edit_cli.py: from prompts, images and noise to images.

    Args:
        config: SdxlFlags or EditProgramFlags.
        devices: to compile for.
    """
    layout = parse_layout(config.parallel, devices)
    if config.offload:
        layout = replace(layout or Layout(devices), offload=config.offload)
    n = len(devices) if layout is None else layout.data
    B, num_steps = config.num_images, config.num_inference_steps
    side = config.resolution if isinstance(config, EditProgramFlags) else config.image_size
    pipeline = open_pipeline_of_flags(config, layout)
    pipeline, vae_tile = with_vae_tile(pipeline, config, B, (side, side))
    params = pipeline_shapes(pipeline)
    ids, keys = prompt_shapes(pipeline, n, B)
    scale = jax.ShapeDtypeStruct((n, 1), jnp.float32)
    inputs = {"prompt_ids": ids, "neg_prompt_ids": ids, "guidance_scale": scale}
    if isinstance(config, EditProgramFlags):
        branches = edit_branches(config.guidance_scale, config.image_guidance_scale)
        inputs["image"] = jax.ShapeDtypeStruct((n, B, 3, side, side), jnp.float32)
        inputs["image_guidance_scale"] = scale
    else:
        branches = pipeline.guidance_branches(config.guidance_scale)

    def generate(inputs_and_keys, params):
        inputs, keys = inputs_and_keys
        return pipeline._generate(
            params=params,
            prng_seed=keys,
            num_inference_steps=num_steps,
            height=side,
            width=side,
            branches=branches,
            **inputs,
        )

    latents = pipeline.latent_shape(B, side, side)
    schedule = make_schedule(pipeline.scheduler, latents, num_steps)
    steps = plan_steps(pipeline.accelerate, branches, schedule.scales)
    if layout is None:
        step, batch_per_chip = jax.pmap(generate, axis_name="batch", devices=devices), B
        params = replicated_shapes(params, n)
    else:
        pipeline.check_parallel(branches, side)
        group_size = layout.branches * layout.rows
        batch_per_chip = B if group_size == 1 else B / group_size
        step = layout.jit_batches(generate)
        inputs, keys = layout.with_shardings((inputs, keys))
        params = layout.shapes_of_params(params)
    return Program(
        step=step,
        args=((inputs, keys), params),
        held={"parameters": params, "batches": inputs},
        batch_per_chip=batch_per_chip,
        num_chips=None if layout is None else len(layout.devices),
        evaluations=count_evaluations(steps),
        vae_tile=vae_tile,
        switches=switch_fractions(steps),
    )
