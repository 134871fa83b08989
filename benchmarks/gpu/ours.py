"""Our programs, from config files only, and how far their edits are from a CPU's."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import compile_for
from benchmarks.harness import PROMPT, SCALES, in_new_process, psnr_db
from diffusers_flax.compiling.programs import (
    EditProgramFlags,
    Program,
    SdxlFlags,
    UnetFlags,
    open_pipeline_of_flags,
)
from diffusers_flax.pipelines.instruct_pix2pix import FlaxStableDiffusionInstructPix2PixPipeline
from diffusers_flax.schedulers.ddpm import FlaxDDPMScheduler
from diffusers_flax.schedulers.factory import make_scheduler

ACCELERATE = ("deepcache:interval=2", "guidance:stop=0.5")
ACCELERATED = f"ours, {' '.join(ACCELERATE)}"
HALF_VAE = "ours, vae_dtype bfloat16"  # as PyTorch's
AGREEMENT_STEPS = 4


def our_flags(config, sources):
    """{row: {contender: flags}} of our programs.

    Args:
        config: Config.
        sources: directories of the pipelines' configs, {"sd15", "sdxl"}; "": the published ones.
    """
    sizes = config.sizes
    sd15 = {"tpu": "", "pretrained_model_name_or_path": sources["sd15"]}
    # vae_tile 0: the VAE decodes whole images, as PyTorch's does.
    of_images = {"num_inference_steps": sizes.num_inference_steps, "vae_tile": 0}
    unet = UnetFlags(
        **sd15,
        in_channels=8,
        batch_size=sizes.batch_size,
        resolution=sizes.resolution,
        gradient=False,
    )
    train = compile_for.TrainFlags(
        **sd15,
        train_batch_size=sizes.pairs,
        resolution=sizes.train_resolution,
        mixed_precision="bf16",
        train_data_dir=(),
        ema="full",
    )
    train_latents = replace(train, cache_latents="latents")  # only whether there are latents counts
    images = SdxlFlags(
        tpu="",
        pretrained_model_name_or_path=sources["sdxl"],
        image_size=sizes.image_size,
        **of_images,
    )
    return {
        "forward": {"ours": unet},
        "gradient": {"ours": replace(unet, gradient=True)},
        "train": {"ours": train},
        "train_latents": {"ours": train_latents},
        "images": {
            "ours": images,
            HALF_VAE: replace(images, vae_dtype="bfloat16"),
            ACCELERATED: replace(images, accelerate=ACCELERATE),
        },
        "image_batch": {
            "ours": replace(images, num_images=sizes.num_images),
            HALF_VAE: replace(images, num_images=sizes.num_images, vae_dtype="bfloat16"),
        },
        "edit": {"ours": EditProgramFlags(**sd15, resolution=sizes.resolution, **of_images)},
    }


class Compiled(NamedTuple):
    """A compiled program: step and update return their arrays in a list."""

    program: Program
    step: Callable
    update: Callable | None  # of the average
    note: dict  # of ProgramCache


def compile_ours(flags, cache, name):
    """Compile for the first device, or load from the cache.

    Args:
        flags: of the program.
        cache: ProgramCache.
        name: of the program in the cache.

    Returns:
        Compiled.
    """
    started, program = time.monotonic(), compile_for.make_program(flags, jax.devices()[:1])
    step = cache.load(name, program.args)
    update = program.update and cache.load(f"average_{name}", program.update_args)
    if step is not None and (update is not None or program.update is None):
        return Compiled(program, step, update, cache.note(name))
    compiled = program.step.lower(*program.args).compile()
    if program.update:
        update = program.update.lower(*program.update_args).compile()
        cache.save(f"average_{name}", {"outputs": update.out_tree.num_leaves}, update)
    memory = compiled.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes
    note = {
        "outputs": compiled.out_tree.num_leaves,
        "bytes": held - memory.alias_size_in_bytes + memory.temp_size_in_bytes,
        "seconds": time.monotonic() - started,
    }
    cache.save(name, note, compiled)
    step, update = flat_outputs(compiled), update and flat_outputs(update)
    return Compiled(program, step, update, note)


def flat_outputs(function):
    """A function that returns the arrays of a function's result in a list."""
    return lambda *args: jax.tree.leaves(function(*args))


def scheduler_state(flags, configs):
    """The state of the scheduler that a program takes."""
    if isinstance(flags, compile_for.TrainFlags):
        return FlaxDDPMScheduler.from_config(configs["sd15"]["scheduler"]).create_state()
    return open_pipeline_of_flags(flags).scheduler.create_state()


def random_arrays(shapes):
    """Arrays on the first device: zeros for counters and moments, ones for scales of norms.

    Kernels are 0.02 times normal, slices of one array: billions of random numbers take long.

    Args:
        shapes: ShapeDtypeStructs of (1, ...).
    """
    sharding = jax.NamedSharding(jax.sharding.Mesh(jax.devices()[:1], ("batch",)), jax.P("batch"))
    rng = np.random.default_rng(0)
    sizes = [x.size for x in jax.tree.leaves(shapes) if jnp.issubdtype(x.dtype, jnp.floating)]
    normal = rng.standard_normal(max(sizes), np.float32) * np.float32(0.02)
    normals = {}

    def make(path, shape):
        name, dtype = jax.tree_util.keystr(path, simple=True, separator="/"), shape.dtype
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            return jax.random.split(jax.random.key(0), shape.shape)
        if "opt_state" in name or name.endswith(("step", "bias")):
            return np.zeros(shape.shape, dtype)
        if name.endswith("/scale"):
            return np.ones(shape.shape, dtype)
        if not jnp.issubdtype(dtype, jnp.floating):
            return rng.integers(0, 256, shape.shape).astype(dtype)  # pixels, tokens, timesteps
        if dtype not in normals:
            normals[dtype] = normal.astype(dtype)
        return normals[dtype][: shape.size].reshape(shape.shape)

    def place(path, shape):
        return jax.device_put(make(path, shape), sharding)

    return jax.tree_util.tree_map_with_path(place, shapes)


def our_run(flags, compiled, configs):
    """A function that runs a compiled program on random arrays.

    Args:
        flags: of the program.
        compiled: what compile_ours returned.
        configs: {family: {component: config}}.
    """
    program, step, update, _ = compiled
    args = list(random_arrays(program.args))
    if not isinstance(flags, UnetFlags):
        state = scheduler_state(flags, configs)
        args[1]["scheduler"] = jax.tree.map(lambda x: jnp.asarray(x)[None], state)
    if update is None:
        return lambda: jax.block_until_ready(step(*args))
    average = random_arrays(program.update_args[0])
    held = {"state": args[0], "average": average}
    structures = {name: jax.tree.structure(tree) for name, tree in held.items()}
    decay = jnp.full((1,), flags.ema_decay or 0.9999, jnp.float32)

    def run():
        outputs = step(held["state"], *args[1:])
        count = structures["state"].num_leaves
        held["state"] = structures["state"].unflatten(outputs[:count])
        averages = update(held["average"], held["state"].params, decay)
        held["average"] = structures["average"].unflatten(averages)
        jax.block_until_ready((outputs, averages))

    return run


def tiny_edit(folder, dtype, platform=None):
    """A tiny pipeline's edit: float32 (1, 64, 64, 3).

    Args:
        folder: of the pipeline.
        dtype: "float32", with the highest precision of matmuls, or "bfloat16".
        platform: "cpu" in a new process; None: the process's default device.
    """
    if platform:
        jax.config.update("jax_platforms", platform)
    pipeline, params = FlaxStableDiffusionInstructPix2PixPipeline.from_pretrained(
        folder, dtype=jnp.dtype(dtype), scheduler=make_scheduler("ddim", {})[0]
    )
    params = jax.device_put(params, jax.devices()[0])
    image = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    ids, pixels = pipeline.prepare_inputs(PROMPT, image)
    with jax.default_matmul_precision("highest"):
        out = pipeline(ids, pixels, params, jax.random.key(0), AGREEMENT_STEPS, **SCALES)
        return np.asarray(out.images, np.float32)


def measure_agreement(folder):
    """{dtype: PSNR of this device's edit to the CPU's in float32, dB; None: equal}."""
    expected = in_new_process(tiny_edit, folder, "float32", "cpu")
    return {x: psnr_db(tiny_edit(folder, x), expected) for x in ("float32", "bfloat16")}
