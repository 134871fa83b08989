"""Compile a program for a TPU slice one does not have: does it fit, how fast can it be at best?

    python tpu_compile.py --tpu v5e-16 --train_batch_size 256 --mixed_precision bf16 --ema full

compiles the training step of flax_train_instruct_pix2pix.py for 16 TPU v5e chips with 16 pairs on
each. All flags of the trainer are taken, so --tpu and its value can be added to any training
command; of the models only the config.json is read, and without any it is Stable Diffusion 1.5.
--find_batch looks for the largest batch that fits. With the demo's model, in about a minute:

    python tpu_compile.py --tpu v5e-4 --pretrained_model_name_or_path demo/base_model \\
        --resolution 64 --train_batch_size 64 --output /tmp/tpu_compile.json

Images from text with SDXL, two on each chip, as sdxl_single.py makes them in bfloat16:

    python tpu_compile.py --tpu v5e-4 --program sdxl --num_images 2

Needs a CPU and the TPU's compiler, `pip install "jax[tpu]"`; Stable Diffusion 1.5 takes about 20
minutes on two cores and 13 GB of memory (27 GB at 32 pairs per chip). Prints a table and writes it
as JSON, into the current folder.

The memory is what the compiler lays out, at the time of the run that needs most: with the averages,
if there will be any. (Validation images are not in it.) The time of a step is a lower bound, a
roofline: all FLOPs at the chip's peak, or all that moves to and from its memory at the memory's
rate, whichever takes longer; communication between chips is not in it, nor is waiting for data. The
report has the bytes accessed as well, which the compiler counts wherever they are, also those that
never leave the chip, with those of kernels.

Paper: Roofline (Williams, Waterman, Patterson 2009).
"""

import importlib.util
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import tyro
from jax.experimental.topologies import get_topology_desc

import flax_train_instruct_pix2pix as trainer
from command_line import check_writable, run_main, save_whole
from config_flax import PUBLISHED_CONFIGS, fetch_file, read_json, write_json
from ema_flax import ema_plan
from executables import no_compilation_cache
from kernels_flax import plain_operations
from modeling_flax_clip import FlaxCLIPTextModel
from modeling_flax_unet import FlaxUNet2DConditionModel
from modeling_flax_vae import FlaxAutoencoderKL
from pipeline_flax_stable_diffusion_xl import FlaxStableDiffusionXLPipeline
from pipeline_flax_utils import MODULES
from scheduling_flax import FlaxDDPMScheduler, scheduler_from_config
from sharding_flax import shard_axes, state_shapes
from tpu_programs import hbm_bytes, kernel_bytes
from training_flags import check_config, ema_flags
from training_models import Models, encode_text
from training_run import MAX_STEPS_IN_FLIGHT, make_update_average

GIB = 2**30


class Chip(NamedTuple):
    """One kind of TPU. Source: Cloud TPU's pages on each; memory is the compiler's own limit."""

    topology: str  # its name in jax.experimental.topologies
    cores: int  # TensorCores of a chip, where a slice's name counts those, else 1
    flops: float  # peak in bfloat16, per second
    bandwidth: float  # of the memory, bytes per second
    memory: float  # that a program can use, GiB


CHIPS = {
    "v4": Chip("v4", 2, 275e12, 1.23e12, 30.75),
    "v5e": Chip("v5e", 1, 197e12, 0.82e12, 15.75),
    "v5p": Chip("v5", 2, 459e12, 2.8e12, 95.74),
    "v6e": Chip("v6e", 1, 918e12, 1.64e12, 31.25),
}
# Slices have three dimensions (v4, v5p) or two.
SHAPES_3D = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8")
SHAPES_2D = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")

# Without it the compiler asks the network which TPU it is on, complains, leaves logs in /tmp, and
# runs in one process at a time only, or in none beside a training run.
LIBTPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@dataclass(frozen=True, kw_only=True)
class Config(trainer.Config):
    tpu: str  # type of the slice: v4-32, v5e-16, v5p-8, v6e-8, ...
    # unet_grad: the bare UNet's part of a step; sdxl: images from text; sdxl_unet: its UNet, once
    program: Literal["train_step", "unet_grad", "sdxl", "sdxl_unet"] = "train_step"
    find_batch: bool = False  # find the largest batch that fits, starting from train_batch_size
    num_images: int = 1  # of sdxl and sdxl_unet: images at once on each chip
    num_inference_steps: int = 20  # of sdxl
    image_size: int = 1024  # of sdxl and sdxl_unet, pixels of a side
    # JSON; "" is tpu_compile_TPU_PROGRAM.json in the current folder, never one of other flags
    output: str = ""
    pretrained_model_name_or_path: str = ""  # folder or hub id; "" is Stable Diffusion 1.5, or XL
    unet_model_name_or_path: str = ""  # the 8-channel UNet; "" is the pretrained one, widened


SDXL_FLAGS = {"num_images", "num_inference_steps", "image_size"}
COMMON_FLAGS = {
    *("tpu", "program", "find_batch", "output"),
    *("pretrained_model_name_or_path", "revision"),
}


class Slice(NamedTuple):
    """Connected chips, and the hosts that they are in."""

    chip: Chip
    num_chips: int
    num_hosts: int
    shape: str


class Job(NamedTuple):
    """Programs to compile, under pmap, with ShapeDtypeStructs of (chips, ...) for arguments."""

    step: Callable
    args: tuple
    held: dict[str, Any]  # what a step finds in memory: trees by their names in the report
    batch_per_chip: int  # pairs or images
    trips: int = 1  # of the loop in the step
    body: Callable | None = None  # what is in that loop; None: all of the step's work
    body_args: tuple = ()
    update: Callable | None = None  # of an average of the weights
    update_args: tuple = ()
    updates_per_step: float = 0.0


def slices():
    """All types of slices there are, {name: Slice}."""
    types = {}
    for family, chip in CHIPS.items():
        for shape in SHAPES_3D if chip.cores == 2 else SHAPES_2D:
            num_chips = math.prod(map(int, shape.split("x")))
            # Four chips to a host, but up to eight where v5e or v6e need no second one.
            num_hosts = 1 if chip.cores == 1 and num_chips <= 8 else num_chips // 4
            types[f"{family}-{num_chips * chip.cores}"] = Slice(chip, num_chips, num_hosts, shape)
    return types


def find_slice(name):
    """The Slice of an accelerator type.

    Args:
        name: such as v4-32 or v5p-8, which count TensorCores, two to a chip; or v5e-16 (also as
            v5litepod-16) or v6e-8, which count chips.

    Raises:
        ValueError: there is none of that name.
    """
    types = slices()
    name = name.replace("v5litepod-", "v5e-")
    if name not in types:
        raise ValueError(f"tpu={name} is not known; known are {', '.join(types)}")
    return types[name]


def slice_devices(tpu):
    """The devices of a Slice, to compile for.

    Raises:
        ValueError: the compiler is not installed.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            "libtpu, the TPU's compiler, is not installed; get the one for this jax: "
            f'pip install "jax[tpu]=={jax.__version__}"'
        )
    for name, value in LIBTPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    options = {"chip_config_name": "megacore"} if tpu.chip.cores == 2 else {}
    if tpu.num_chips == 1:
        options["chips_per_host_bounds"] = (1, 1, 1)
    return get_topology_desc(f"{tpu.chip.topology}:{tpu.shape}", "tpu", **options).devices


def read_config(source, subfolder=None, revision=None, name="config.json"):
    """A model's config file, a dict.

    Raises:
        ValueError: there is none.
    """
    file = fetch_file(source, name, subfolder, revision)
    if file is None:
        where = f"{source}/{subfolder}" if subfolder else source
        raise ValueError(f"{where} has no {name}; give a model's folder or Hub id")
    return read_json(file)


def model_shapes(config):
    """The modules of a training step and the shapes of their parameters, as train() has them.

    Args:
        config: Config.

    Returns:
        (Models, train_step's `frozen`, the UNet's parameters), the last two of ShapeDtypeStructs.

    Raises:
        ValueError: a config file is missing, or is not of such a model.
    """
    configs = PUBLISHED_CONFIGS["stable-diffusion-v1-5"]
    if source := config.pretrained_model_name_or_path:
        read = partial(read_config, source, revision=config.revision)
        configs = {name: read(name) for name in ("vae", "text_encoder")}
        configs["scheduler"] = read("scheduler", name="scheduler_config.json")
        configs["unet"] = {} if config.unet_model_name_or_path else read("unet")
    dtype = jnp.bfloat16 if config.mixed_precision == "bf16" else jnp.float32
    vae = FlaxAutoencoderKL.from_config(configs["vae"], dtype=dtype)
    text_encoder = FlaxCLIPTextModel.from_config(configs["text_encoder"], dtype=dtype)
    scheduler = FlaxDDPMScheduler.from_config(configs["scheduler"])
    scheduler_state = scheduler.create_state()
    if config.unet_model_name_or_path:
        unet_config = read_config(config.unet_model_name_or_path)
    else:
        unet_config = {**configs["unet"], "in_channels": 2 * vae.latent_channels}
    unet = FlaxUNet2DConditionModel.from_config(
        unet_config, dtype=dtype, gradient_checkpointing=config.gradient_checkpointing
    )

    text_params = param_shapes(text_encoder, dtype)
    ids = jax.ShapeDtypeStruct((1, text_encoder.module.max_position_embeddings), jnp.int32)
    frozen = {
        "vae": param_shapes(vae, dtype),
        "text_encoder": text_params,
        "null_text": jax.eval_shape(partial(encode_text, text_encoder), text_params, ids),
        "scheduler": jax.eval_shape(lambda: scheduler_state),
    }
    models = Models(unet, vae, text_encoder, scheduler)
    return models, frozen, param_shapes(unet, jnp.float32)


def param_shapes(module, dtype):
    """Shapes of a module's parameters, kept in dtype."""
    shapes = jax.eval_shape(module.init_weights, jax.random.key(0))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), shapes)


def on_all(tree, num_devices):
    """Arrays as pmap takes them: (num_devices, ...), a copy for each."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((num_devices, *x.shape), x.dtype), tree)


def train_step_job(config, devices):
    """The trainer's step and the update of its averages, under pmap as in training.

    Args:
        config: Config.
        devices: to compile for.

    Returns:
        Job.
    """
    n = len(devices)
    models, frozen, params = model_shapes(config)
    plan = ema_plan(*ema_flags(config, config.max_train_steps))
    tx, _ = trainer.make_optimizer(config, config.max_train_steps)
    axes = shard_axes(params, n)
    options = trainer.step_options(config)
    train_step = partial(trainer.train_step, models=models, tx=tx, axes=axes, **options)

    B, R = config.train_batch_size // n, config.resolution
    T = models.text_encoder.module.max_position_embeddings
    batch = {"input_ids": jax.ShapeDtypeStruct((n, B, T), jnp.int32)}
    if config.cache_latents:
        del frozen["vae"]
        C, side = models.vae.latent_channels, R // 2 ** (len(models.vae.block_out_channels) - 1)
        for name, channels in (("original_latents", C), ("edited_latents", 2 * C)):
            batch[name] = jax.ShapeDtypeStruct((n, B, side, side, channels), jnp.float16)
    else:
        images = jax.ShapeDtypeStruct((n, B, R, R, 3), jnp.uint8)
        batch |= {"original_pixel_values": images, "edited_pixel_values": images}
    frozen = on_all(frozen, n)
    state = state_shapes(params, tx, axes, n)
    average = state.params  # sharded alike
    num_averages = 0 if plan.first_step is None else len(plan.decays(1))
    return Job(
        step=jax.pmap(train_step, axis_name="batch", donate_argnums=0, devices=devices),
        args=(state, frozen, batch, on_all(jax.random.PRNGKey(0), n)),
        held={
            "parameters": state.params,
            "optimizer": state.opt_state,
            "ema": [average] * num_averages,
            "frozen models": frozen,
            "batches": [batch] * (1 + MAX_STEPS_IN_FLIGHT),
        },
        batch_per_chip=B,
        trips=config.gradient_accumulation_steps,
        update=make_update_average(devices) if num_averages else None,
        update_args=(average, state.params, jax.ShapeDtypeStruct((n,), jnp.float32)),
        updates_per_step=num_averages / plan.every,
    )


def unet_grad_job(config, devices):
    """Forward and backward of the bare UNet on each device, for comparison with other UNets.

    Args:
        config: Config.
        devices: to compile for.

    Returns:
        Job.
    """
    n = len(devices)
    models, frozen, params = model_shapes(config)
    unet, B = models.unet, config.train_batch_size // n
    null_text = frozen["null_text"]["states"]
    side = config.resolution // 2 ** (len(models.vae.block_out_channels) - 1)
    inputs = (
        jax.ShapeDtypeStruct((n, B, unet.in_channels, side, side), jnp.float32),
        jax.ShapeDtypeStruct((n, B), jnp.int32),
        jax.ShapeDtypeStruct((n, B, *null_text.shape[1:]), null_text.dtype),
    )

    def loss(params, sample, timesteps, text):
        prediction = unet.apply({"params": params}, sample, timesteps, text).sample
        return jnp.square(prediction.astype(jnp.float32)).mean()

    params = on_all(params, n)
    return Job(
        step=jax.pmap(jax.value_and_grad(loss), axis_name="batch", devices=devices),
        args=(params, *inputs),
        held={"parameters": params, "batches": inputs},
        batch_per_chip=B,
    )


def sdxl_job(config, devices):
    """sdxl_single.py's program in bfloat16: prompts, noise and guidance to images.

    Args:
        config: Config.
        devices: to compile for.

    Returns:
        Job.
    """
    n, B, dtype = len(devices), config.num_images, jnp.bfloat16
    configs, settings = PUBLISHED_CONFIGS["stable-diffusion-xl-base-1.0"], {}
    if source := config.pretrained_model_name_or_path:
        index, configs = FlaxStableDiffusionXLPipeline.check(source, config.revision)
        settings = FlaxStableDiffusionXLPipeline._settings(index)
    modules = {
        name: MODULES[name].from_config(configs[name], dtype=dtype)
        for name in ("unet", "vae", "text_encoder", "text_encoder_2")
    }
    scheduler, scheduler_state = scheduler_from_config(configs["scheduler"], source)
    # Both prompts are given as tokens, so there is nothing to tokenize.
    pipeline = FlaxStableDiffusionXLPipeline(
        **modules, **settings, scheduler=scheduler, tokenizer=True, tokenizer_2=True
    )
    params = {name: param_shapes(module, dtype) for name, module in modules.items()}
    params["scheduler"] = jax.eval_shape(lambda: scheduler_state)
    params = on_all(params, n)
    keys = jax.eval_shape(jax.vmap(jax.random.key), jax.ShapeDtypeStruct((n * B,), jnp.int32))
    ids = jax.ShapeDtypeStruct(
        (n, B, 2, pipeline.text_encoder.module.max_position_embeddings), jnp.int32
    )
    scale = jax.ShapeDtypeStruct((n, 1), jnp.float32)

    def generate(prompt_ids, neg_prompt_ids, params, keys, guidance_scale):
        return pipeline._generate(
            prompt_ids,
            params,
            keys,
            config.num_inference_steps,
            config.image_size,
            config.image_size,
            guidance_scale,
            neg_prompt_ids=neg_prompt_ids,
        )

    def predict(params, x_t, t, context, text_embeds, time_ids):
        added = {"text_embeds": text_embeds, "time_ids": time_ids}
        return modules["unet"].apply({"params": params}, x_t, t, context, added).sample

    # The UNet of one step, both branches of guidance.
    shape = pipeline.latent_shape(2 * B, config.image_size, config.image_size)
    unet = modules["unet"]
    width = unet.projection_class_embeddings_input_dim - 6 * unet.addition_time_embed_dim
    step_shapes = [
        (shape, jnp.float32),
        ((2 * B,), jnp.int32),
        ((2 * B, ids.shape[-1], unet.cross_attention_dim), dtype),
        ((2 * B, width), dtype),
        ((2 * B, 6), jnp.float32),
    ]
    step_args = [jax.ShapeDtypeStruct((n, *shape), kind) for shape, kind in step_shapes]
    pmap = partial(jax.pmap, axis_name="batch", devices=devices)
    inputs = (ids, ids, params, jax.ShapeDtypeStruct((n, B), keys.dtype), scale)
    return Job(
        step=pmap(generate),
        args=inputs,
        held={"parameters": params, "batches": (ids, ids, scale)},
        batch_per_chip=B,
        body=pmap(predict),
        body_args=(params["unet"], *step_args),
        trips=config.num_inference_steps,
    )


def sdxl_unet_job(config, devices):
    """The UNet of one of sdxl_job's steps alone, for comparison with other UNets."""
    job = sdxl_job(config, devices)
    held = {"parameters": job.body_args[0], "batches": job.body_args[1:]}
    return job._replace(step=job.body, args=job.body_args, held=held, trips=1)


JOBS = {
    "train_step": train_step_job,
    "unet_grad": unet_grad_job,
    "sdxl": sdxl_job,
    "sdxl_unet": sdxl_unet_job,
}


def num_bytes(tree):
    """Bytes that a tree of arrays (chips, ...) takes on each chip, without padding."""
    return sum(math.prod(x.shape[1:]) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def measure(program, args):
    """Compile a program and read off what it costs each chip.

    Args:
        program: what pmap returned.
        args: its arguments, of ShapeDtypeStructs.

    Returns:
        dict: "padding" (of the arguments that it uses), "temporaries", "outputs" (those that take
        no argument's place) and "code", bytes; "hbm_bytes", to and from the memory;
        "bytes_accessed", wherever they are, the compiler's count plus kernel_bytes, a loop's body
        once; "compile_seconds". If the memory is too small, only "needs", bytes, and
        "compile_seconds".
    """
    started = time.perf_counter()
    try:
        with no_compilation_cache():  # which no chip is here to read from
            compiled = program.lower(*args).compile()
    except jax.errors.JaxRuntimeError as error:
        size = re.search(r"\b([\d.]+)([KMGT])\b", str(error))  # the first is what it would need
        if "RESOURCE_EXHAUSTED" not in str(error) or size is None:
            raise
        needs = float(size[1]) * 1024 ** (1 + "KMGT".index(size[2]))
        return {"needs": needs, "compile_seconds": time.perf_counter() - started}
    memory, cost, text = compiled.memory_analysis(), compiled.cost_analysis(), compiled.as_text()
    formats = jax.tree.leaves(compiled.input_formats)
    used = [x for x, form in zip(jax.tree.leaves(args), formats) if form.layout is not None]
    return {
        "padding": memory.argument_size_in_bytes - num_bytes(used),
        "temporaries": memory.temp_size_in_bytes,
        "outputs": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "code": memory.generated_code_size_in_bytes,
        "bytes_accessed": cost["bytes accessed"] + kernel_bytes(text),
        "hbm_bytes": hbm_bytes(text),
        "compile_seconds": time.perf_counter() - started,
    }


def count_flops(config, share):
    """FLOPs of a chip's step, counted as lowered for a CPU, in plain operations.

    The compiler's own count for a TPU leaves out what its kernels (attention) compute.

    Args:
        config: Config.
        share: of the batch, pairs or images of a chip.
    """
    one_image = replace(config, train_batch_size=share, num_images=1)
    job = JOBS[config.program](one_image, jax.devices("cpu")[:1])

    def count(program, args):
        with plain_operations():
            return program.lower(*args).cost_analysis()["flops"]  # a loop's body counts once

    flops = count(job.step, job.args)
    if job.body is None:
        return flops * job.trips
    if job.trips > 1:
        flops += (job.trips - 1) * count(job.body, job.body_args)
    return flops * share  # of one image, as many are decoded in a loop


def memory_parts(job, step, update):
    """What is in a chip's memory during a step, by name, in bytes.

    Args:
        job: Job.
        step, update: what measure returned for its programs; update None: there is none.

    Returns:
        dict, the parts of job.held first.
    """
    parts = {name: num_bytes(tree) for name, tree in job.held.items()}
    temporaries, padding, code = step["temporaries"], step["padding"], step["code"]
    if update:
        temporaries = max(temporaries, update["temporaries"])
        padding += update["padding"] * parts["ema"] // num_bytes(job.update_args)
        code += update["code"]
    return parts | {
        "padding": padding,
        "temporaries": temporaries,
        "outputs": step["outputs"],
        "code": code,
    }


def roofline_seconds(chip, flops, moved):
    """The least time that this work can take on a Chip. Source: Roofline, section 3."""
    return max(flops / chip.flops, moved / chip.bandwidth)


def describe(config, tpu, job, step, update, flops):
    """The report on one compilation.

    Args:
        config: Config.
        tpu: Slice.
        job: Job.
        step, update: what measure returned for its programs; update None: there is none.
        flops: of a chip's step.

    Returns:
        dict, ready for JSON. Memory, FLOPs and bytes are a chip's, and those of a step.
    """
    n, usable = tpu.num_chips, round(tpu.chip.memory * GIB)
    share = job.batch_per_chip
    report = {
        "tpu": config.tpu,
        "chips": n,
        "hosts": tpu.num_hosts,
        "program": config.program,
        "flags": changed_flags(config),
        "batch_per_chip": share,
        "memory_usable": usable,
        "compile_seconds": step["compile_seconds"],
        "versions": {name: version(name) for name in ("jax", "libtpu")},
    }
    if "needs" in step:
        return report | {"fits": False, "memory_total": round(step["needs"])}
    memory = memory_parts(job, step, update)
    total = sum(memory.values())
    averages = {
        f"ema_{name}": update[name] * job.updates_per_step if update else 0.0
        for name in ("bytes_accessed", "hbm_bytes")
    }
    seconds = roofline_seconds(tpu.chip, flops, step["hbm_bytes"])
    seconds += roofline_seconds(tpu.chip, 0.0, averages["ema_hbm_bytes"])
    return report | {
        "fits": total <= usable,
        "memory": memory,
        "memory_total": total,
        "flops": flops,
        **{name: step[name] for name in ("hbm_bytes", "bytes_accessed")},
        **averages,
        "step_seconds": seconds,
        "images_per_second_per_chip": share / seconds,
        "images_per_second": n * share / seconds,
    }


def verdict(report):
    """Does it fit? In a line."""
    total, usable = report["memory_total"] / GIB, report["memory_usable"] / GIB
    answer = "fits" if report["fits"] else "does not fit"
    share = report["batch_per_chip"]
    return f"{answer}: {share} per chip need {total:.2f} of {usable:.2f} GiB"


def print_report(report):
    """The report as a table."""
    print(f"{report['program']} on {report['tpu']}, {report['chips']} chip(s), each:")
    for name, size in report.get("memory", {}).items():
        print(f"  {name:<14}{size / GIB:8.3f} GiB")
    print(verdict(report))
    if "smallest_not_fitting" in report:
        print(f"{report['smallest_not_fitting']} per chip do not fit")
    if "flops" in report:
        ema = report["ema_hbm_bytes"] / 1e9
        print(
            f"{report['flops'] / 1e12:.3g} TFLOP, {report['hbm_bytes'] / 1e9:.3g} GB to and from "
            f"the memory{f', {ema:.3g} GB for averages of the weights' if ema else ''}"
        )
        print(
            f"at least {report['step_seconds'] * 1e3:.3g} ms, so at most "
            f"{report['images_per_second_per_chip']:.1f} images/s per chip, "
            f"{report['images_per_second']:.0f} on the slice"
        )


def largest_fitting(fits, start):
    """The largest number that fits, to an eighth: doubling, then bisecting.

    Args:
        fits: number, at least 1 -> bool; slow, so it is asked as rarely as can be.
        start: number to ask first.

    Returns:
        (number, or 0 if 1 does not fit; the smallest number known not to fit).
    """
    good, bad, number = 0, None, start
    while bad is None or bad - good > max(1, good // 8):
        if fits(number):
            good = number
        else:
            bad = number
        number = 2 * good if bad is None else (good + bad) // 2
    return good, bad


def check_flags(config, num_devices):
    """Raise a ValueError for flags that do not go together, before anything is compiled."""
    changed = changed_flags(config).keys()
    if config.program.startswith("sdxl"):
        wrong = changed - COMMON_FLAGS - SDXL_FLAGS
        if config.program == "sdxl_unet":
            wrong |= changed & {"num_inference_steps"}
        for name in sorted(SDXL_FLAGS):
            if getattr(config, name) < 1:
                raise ValueError(f"{name}={getattr(config, name)} must be at least 1")
    else:
        wrong = changed & SDXL_FLAGS
        # It writes nothing.
        check_config(replace(config, overwrite_output_dir=True), num_devices)
    if wrong:
        raise ValueError(
            f"--{', --'.join(sorted(wrong))} has no meaning for --program {config.program}; leave "
            "it out"
        )


def compile_for(config, tpu, devices):
    """Compile what the flags ask for.

    Args:
        config: Config.
        tpu: Slice.
        devices: its devices.

    Returns:
        The report, see describe.

    Raises:
        ValueError: flags or models that do not go together.
    """
    check_flags(config, len(devices))
    job = JOBS[config.program](config, devices)
    step = measure(job.step, job.args)
    if "needs" in step:
        return describe(config, tpu, job, step, None, None)
    update = measure(job.update, job.update_args) if job.update else None
    return describe(config, tpu, job, step, update, count_flops(config, job.batch_per_chip))


def find_batch(config, tpu, devices):
    """compile_for with the largest batch that fits, or the smallest if none does."""
    is_sdxl = config.program.startswith("sdxl")
    flag = "num_images" if is_sdxl else "train_batch_size"
    # Batches are multiples of it.
    unit = 1 if is_sdxl else tpu.num_chips * config.gradient_accumulation_steps
    reports = {}

    def fits(number):
        report = compile_for(replace(config, **{flag: number * unit}), tpu, devices)
        reports[number] = report
        print(f"{verdict(report)} (compiled in {report['compile_seconds']:.0f} s)", flush=True)
        return report["fits"]

    good, bad = largest_fitting(fits, max(1, getattr(config, flag) // unit))
    return reports[good or bad] | {"smallest_not_fitting": reports[bad]["batch_per_chip"]}


def changed_flags(config):
    """The flags that are not the defaults, ready for JSON; not where the report goes."""
    defaults = {field.name: field.default for field in fields(config)} | {"output": config.output}
    return {k: v for k, v in asdict(config).items() if v != defaults[k]}


def report_file(config):
    """Where the report goes.

    Raises:
        ValueError: the report there is of other flags, and --output does not name it; what is
            there is no report, or nothing can be written there.
    """
    name = f"tpu_compile_{config.tpu}_{config.program}"
    if config.find_batch:
        name += "_largest"
    elif config.program.startswith("sdxl"):
        name += f"_{config.num_images}"
    file = Path(config.output or f"{name}.json")
    if file.is_dir():
        raise ValueError(f"output={file} is a folder; name a file")
    check_writable(f"--output {file}", file.absolute().parent)
    if file.is_file():
        try:
            kept, flags = json.loads(file.read_text())["flags"], changed_flags(config)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"output={file} is there and no report; name another") from error
        if not config.output and kept != json.loads(json.dumps(flags)):
            raise ValueError(f"{file} is of other flags ({kept}); say with --output where to write")
    return file


def run(config):
    """Check, compile, print, write."""
    tpu = find_slice(config.tpu)
    devices = slice_devices(tpu)
    check_flags(config, len(devices))
    output = report_file(config)
    print(
        f"compiling {config.program} for {config.tpu}, {tpu.num_chips} chip(s) in "
        f"{tpu.num_hosts} host(s); a full-size model takes some 20 minutes",
        flush=True,
    )
    report = (find_batch if config.find_batch else compile_for)(config, tpu, devices)
    print_report(report)
    save_whole(output, partial(write_json, content=report))
    print(f"wrote {output}")


def main():
    """Read the flags, compile; the user's mistakes end in one line and exit code 2."""
    config = tyro.cli(Config, description=__doc__, use_underscores=True)
    jax.config.update("jax_platforms", "cpu")  # leave this machine's accelerators be
    try:
        run(config)
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        sys.exit(130)
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    run_main(main)
