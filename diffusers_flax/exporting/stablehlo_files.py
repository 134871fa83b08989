"""A pipeline's whole run as one program of jax.export, for run_stablehlo.py.

The file has no weights and no model code; weights lie beside it. jax refuses such files after about
six months, see jax.export's compatibility guarantees. The weights remain readable.
"""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import export
from safetensors.flax import save_file

from diffusers_flax.exporting.folders import PROGRAM, WEIGHTS, write_beside, writing_export
from diffusers_flax.loading.directories import INDEX_NAME
from diffusers_flax.parameters import cast_params


def is_edit(pipeline):
    """Whether a pipeline edits an image."""
    return "InstructPix2Pix" in type(pipeline).__name__


def generate_function(pipeline, size, num_inference_steps):
    """A pure function (weights, arrays) -> images, float32 (B, H, W, 3) in [0, 1].

    weights: {path joined by "/": array}; arrays: see abstract_arrays.
    """
    height, width = size
    options = dict(num_inference_steps=num_inference_steps, height=height, width=width)
    state = pipeline.scheduler.create_state()
    # From text, scales up to 1 are no guidance. A program's scale is an array, with which the
    # pipelines would interpolate between the null text and the text.
    embeds_scale = pipeline.unet.config.time_cond_proj_dim is not None
    ends_at_1 = not is_edit(pipeline) and not embeds_scale

    def generate(weights, arrays):
        params = unflatten_dict(weights, sep="/") | {"scheduler": state}
        rng = jax.random.wrap_key_data(arrays["key"])
        inputs = {name: x for name, x in arrays.items() if name != "key"}
        if ends_at_1:
            inputs["guidance_scale"] = jnp.maximum(inputs["guidance_scale"], 1)
        return pipeline._generate(params=params, prng_seed=rng, **inputs, **options)

    return generate


def abstract_arrays(pipeline, batch_size, size):
    """A program's inputs, {argument: jax.ShapeDtypeStruct}."""
    struct = jax.ShapeDtypeStruct
    ids = np.asarray(pipeline.prepare_text_inputs([""] * batch_size))
    arrays = {
        "prompt_ids": struct(ids.shape, jnp.int32),
        "key": struct((2,), jnp.uint32),
        "guidance_scale": struct((), jnp.float32),
    }
    # Without a negative prompt, SDXL's states are zeros, which no token ids give.
    if not getattr(pipeline, "force_zeros_for_empty_prompt", False):
        arrays["neg_prompt_ids"] = struct(ids.shape, jnp.int32)
    if is_edit(pipeline):
        arrays["image"] = struct((batch_size, 3, *size), jnp.float32)
        arrays["image_guidance_scale"] = struct((), jnp.float32)
    return arrays


def export_stablehlo(
    pipeline, params, output_dir, platforms, batch_size, size, num_inference_steps
):
    """Write programs, and the weights, tokenizers and scheduler that they need.

    Args:
        pipeline: in the dtype to compute in.
        params: its parameters, cast in place.
        output_dir: Path of a directory, made if absent; it may have programs of other sizes.
        platforms: jax's names, a program for each. One program for several would choose kernels
            while it runs, which changes XLA's fusions and so the image's last bits.
        batch_size: images.
        size: (height, width), pixels.
        num_inference_steps: denoising steps.

    Returns:
        Paths of the programs.
    """
    cast_params(pipeline, params)
    components = {name: tree for name, tree in params.items() if name != "scheduler"}
    weights = {key: np.asarray(x) for key, x in flatten_dict(components, sep="/").items()}
    arrays = abstract_arrays(pipeline, batch_size, size)
    struct = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), weights)
    function = jax.jit(generate_function(pipeline, size, num_inference_steps))
    programs = {  # before anything is written
        platform: export.export(function, platforms=(platform,))(struct, arrays).serialize()
        for platform in platforms
    }
    files, (height, width), result = [], size, "edit" if is_edit(pipeline) else "image"
    with writing_export(output_dir, keep_programs=True) as folder:
        write_beside(pipeline, folder)
        save_file(weights, folder / WEIGHTS)
        shutil.copymode(folder / INDEX_NAME, folder / WEIGHTS)  # safetensors' is the owner's alone
        for platform, program in programs.items():
            name = (
                f"{result}-batch{batch_size}-{width}x{height}-{num_inference_steps}steps-{platform}"
            )
            files.append(output_dir / f"{name}{PROGRAM}")
            (folder / files[-1].name).write_bytes(program)
    return files
