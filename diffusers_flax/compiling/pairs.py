"""The programs of make_pairs.py, compiled for TPUs or GPUs: pairs of images, and CLIP's features.

Each device makes batches of pairs with attention_sharing, then CLIP encodes their images. Source:
InstructPix2Pix (arXiv 2211.09800), section 3.1.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np

from diffusers_flax.acceleration.caches import switch_fractions
from diffusers_flax.acceleration.plans import count_evaluations, plan_steps
from diffusers_flax.command_line import AtLeast, Between
from diffusers_flax.compiling.costs import num_bytes, replicated_shapes
from diffusers_flax.compiling.programs import (
    FAMILIES,
    Positive,
    Program,
    TargetFlags,
    param_shapes,
    pipeline_of_configs,
    pipeline_shapes,
    prompt_shapes,
    with_vae_tile,
)
from diffusers_flax.flops import Scoped, matmul_flops
from diffusers_flax.generating.batches import IN_FLIGHT
from diffusers_flax.generating.flags import check_guidance_range, from_flags
from diffusers_flax.generating.models import Sampling, check_sampling
from diffusers_flax.generating.tasks import check_tasks, pipeline_for
from diffusers_flax.models.clip_similarities import FlaxCLIPModel
from diffusers_flax.pipelines.attention_sharing import SCOPE
from diffusers_flax.pipelines.running import Options
from diffusers_flax.pipelines.sampling import timestep_options
from diffusers_flax.published_configs import PUBLISHED_CONFIGS

# CLIP ViT-L/14, from which openai/clip-vit-large-patch14's config does not differ in shapes.
CLIP_CONFIG = {
    "projection_dim": 768,
    "text_config": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "projection_dim": 768,
    },
    "vision_config": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "image_size": 224,
        "projection_dim": 768,
    },
}


@dataclass(frozen=True, kw_only=True)
class PairProgramFlags(TargetFlags):
    """Pairs of images with shared self-attention, by make_pairs.py, in bfloat16."""

    family: Literal["sd15", "sdxl"] = "sd15"  # model without --model
    batch_size: Positive | Literal["auto"] = 4  # pairs per device at once; "auto": as many as fit
    num_inference_steps: Positive = 100  # denoising steps
    # timesteps to run instead, for distilled models: 999 749 499 249; or ays
    timesteps: tuple[int | Literal["ays"], ...] = ()
    scheduler: str | None = "euler_ancestral"  # ddim, lcm, ...
    # least and largest weight of the captions; up to 1: no guidance, half the work
    guidance_scale: Annotated[tuple[float, float], AtLeast(0)] = (7.5, 15.0)
    # least and largest fraction of the steps with shared self-attention
    attention_sharing: Annotated[tuple[float, float], Between(0, 1)] = (0.1, 0.9)
    width: Positive | None = None  # pixels; default: the model's
    height: Positive | None = None  # likewise
    # NAME or NAME:PARAMETER=VALUE,...; names: guidance, deepcache, spectrum, tgate, fbcache, int8,
    # taesd; see docs/acceleration.md
    accelerate: tuple[str, ...] = ()
    storage: Literal["float8", "int8"] | None = None  # of the kernels of UNet and text encoders
    vae_dtype: Literal["float32", "bfloat16", "float16"] | None = None  # default: as in make_pairs
    # report; "" is compile_for_CHIPS_pairs.json in the current directory
    output: str = ""
    model: str = ""  # directory, hub id or file of a text-to-image model; "" is --family
    config_name_or_path: str | None = None  # configs of a one-file model; default: its family's
    clip_model: str = ""  # directory or hub id; "" is CLIP ViT-L/14


def sharing_fractions(low, high, num_pairs, num_steps):
    """Expected fractions of the steps in which no, some and all pairs of a batch share attention.

    Args:
        low, high: of the uniform distribution of each pair's p.
        num_pairs: of the batch.
        num_steps: step i is shared while p > i / (num_steps - 1).
    """
    t = np.arange(num_steps) / max(num_steps - 1, 1)
    shares = np.clip((high - t) / (high - low), 0, 1) if low < high else np.float64(low > t)
    none, all_pairs = np.mean((1 - shares) ** num_pairs), np.mean(shares**num_pairs)
    return float(none), float(1 - none - all_pairs), float(all_pairs)


def open_text_pipeline(config):
    """The pipeline of PairProgramFlags, from config files only, checked as by make_pairs.py.

    Raises:
        ValueError: the model or flags do not fit.
    """
    settings, is_xl = {}, config.family == "sdxl"
    configs = PUBLISHED_CONFIGS[FAMILIES[config.family]]
    if config.model:
        is_xl, configs = check_tasks(config.model, ["text to image"])
    check_guidance_range(config.guidance_scale, configs["unet"])
    cls = pipeline_for("text to image", is_xl)
    if config.model:
        index, _ = cls.check(config.model)
        settings = cls._settings(index)
    sampling = from_flags(Sampling, config, guidance_scale=config.guidance_scale[1])
    settings["scheduler"] = check_sampling(cls, configs["scheduler"], config.model, sampling)
    return pipeline_of_configs(cls, configs, config, settings)


def open_clip(name):
    """The FlaxCLIPModel of a directory or hub id, without parameters; "": CLIP ViT-L/14."""
    content = FlaxCLIPModel.module_class.load_config(name) if name else CLIP_CONFIG
    if name and (found := content.get("model_type")) != "clip":
        raise ValueError(
            f"--clip_model {name} is a model of type {found}; name a directory or hub id of a CLIP "
            "model"
        )
    return FlaxCLIPModel.from_config(content)


def clip_program(clip, num_images, devices):
    """Features of images, as generating/clip.py makes them.

    Args:
        clip: of open_clip.
        num_images: of a device.
        devices: to compile for.

    Returns:
        (function of pmap, its arguments).
    """
    side, channels = (clip.module.vision_config[x] for x in ("image_size", "num_channels"))

    def features(params, pixel_values):
        with jax.default_matmul_precision("highest"):
            return clip.get_image_features(pixel_values, params=params)

    n = len(devices)
    params = replicated_shapes(param_shapes(clip.module, jnp.float32), n)
    pixels = jax.ShapeDtypeStruct((n, num_images, channels, side, side), jnp.float32)
    return jax.pmap(features, axis_name="batch", devices=devices), (params, pixels)


def pair_program(config, devices):
    """The programs of make_pairs.py on each device: from captions and noise to images, and CLIP.

    Args:
        config: PairProgramFlags.
        devices: to compile for.

    Returns:
        Program.
    """
    n, B = len(devices), 2 * config.batch_size
    clip, pipeline = open_clip(config.clip_model), open_text_pipeline(config)
    scoring, scoring_args = clip_program(clip, B, devices)
    height, width = pipeline.image_size(config.height, config.width)
    clip_bytes = num_bytes(scoring_args[0])
    pipeline, vae_tile = with_vae_tile(pipeline, config, B, (width, height), clip_bytes)
    steps = config.num_inference_steps, config.timesteps, None
    steps = timestep_options(*steps, pipeline.ays_timesteps)
    branches = pipeline.guidance_branches(config.guidance_scale[1])

    ids, keys = prompt_shapes(pipeline, n, B)
    numbers = jax.ShapeDtypeStruct((n, B), jnp.float32)
    inputs = {"prompt_ids": ids, "neg_prompt_ids": ids, "attention_sharing": numbers}
    inputs |= {"prng_seed": keys}
    inputs |= {"guidance_scale": numbers}

    def generate(inputs, params):
        sizes = {"height": height, "width": width, "branches": branches}
        return pipeline._generate(params=params, **steps, **sizes, **inputs)

    options = Options(**steps, height=height, width=width)
    schedule = pipeline.make_schedule(options, pipeline.latent_shape(B, height, width))
    plan = plan_steps(pipeline.accelerate, branches, schedule.scales)
    shared = sharing_fractions(*config.attention_sharing, config.batch_size, schedule.num_steps)
    params = replicated_shapes(pipeline_shapes(pipeline), n)
    images = jax.ShapeDtypeStruct((n, B, height, width, 3), jnp.float32)
    return Program(
        step=jax.pmap(generate, axis_name="batch", devices=devices),
        args=(inputs, params),
        held={
            "parameters": params,
            "CLIP": scoring_args[0],
            "batches": [inputs, scoring_args[1], *[images] * (IN_FLIGHT - 1)],
        },
        batch_per_chip=config.batch_size,
        evaluations=count_evaluations(plan),
        vae_tile=vae_tile,
        switches=(*switch_fractions(plan), Scoped(SCOPE, shared)),
        scoring=scoring,
        scoring_args=scoring_args,
    )


def count_clip_flops(config):
    """FLOPs of CLIP for the images of a device's batch; config: PairProgramFlags."""
    devices = jax.devices("cpu")[:1]
    program, args = clip_program(open_clip(config.clip_model), 2 * config.batch_size, devices)
    return matmul_flops(jax.make_jaxpr(program)(*args).jaxpr)[0]
