"""A pipeline's whole run as one program of jax.export, for run_stablehlo.py.

The file has no weights and no model code; weights lie beside it. jax refuses such files after about
six months, see jax.export's compatibility guarantees. The weights remain readable.
"""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.export import export as jax_export
from safetensors.flax import save_file

from diffusers_flax.exporting.folders import PROGRAM, WEIGHTS, write_beside, writing_export
from diffusers_flax.loading.directories import INDEX_NAME
from diffusers_flax.parameters import cast_params


def export(pipeline, params, output_dir, config, size):
    """Write programs, and the weights, tokenizers and scheduler that they need.

    A program is a function of {path joined by "/": array of weights} and {argument: array}, which
    returns images, float32 (B, H, W, 3) in [0, 1].

    Args:
        pipeline: in the dtype to compute in.
        params: its parameters, cast in place.
        output_dir: Path of a directory, made if absent; it may have programs of other sizes.
        config: flags. There is a program for each platform: one for several would choose kernels
            while it runs, which changes XLA's fusions and so the image's last bits.
        size: (height, width), pixels.

    Returns:
        Paths of the programs.
    """
    cast_params(pipeline, params)
    components = {name: tree for name, tree in params.items() if name != "scheduler"}
    weights = {key: np.asarray(x) for key, x in flatten_dict(components, sep="/").items()}
    state, is_edit = pipeline.scheduler.create_state(), "InstructPix2Pix" in type(pipeline).__name__
    (height, width), num_steps = size, config.num_inference_steps
    options = dict(num_inference_steps=num_steps, height=height, width=width)
    # From text, scales up to 1 are no guidance. A program's scale is an array, with which the
    # pipelines would interpolate between the null text and the text.
    ends_at_1 = not is_edit and pipeline.unet.config.time_cond_proj_dim is None

    def generate(weights, arrays):
        params = unflatten_dict(weights, sep="/") | {"scheduler": state}
        inputs = {name: x for name, x in arrays.items() if name != "key"}
        if ends_at_1:
            inputs["guidance_scale"] = jnp.maximum(inputs["guidance_scale"], 1)
        inputs["prng_seed"] = jax.random.wrap_key_data(arrays["key"])
        return pipeline._generate(params=params, **inputs, **options)

    struct = jax.ShapeDtypeStruct
    ids = np.asarray(pipeline.prepare_text_inputs([""] * config.batch_size))
    arrays = {
        "prompt_ids": struct(ids.shape, jnp.int32),
        "key": struct((2,), jnp.uint32),
        "guidance_scale": struct((), jnp.float32),
    }
    # Without a negative prompt, SDXL's states are zeros, which no token ids give.
    if not getattr(pipeline, "force_zeros_for_empty_prompt", False):
        arrays["neg_prompt_ids"] = struct(ids.shape, jnp.int32)
    if is_edit:
        arrays["image"] = struct((config.batch_size, 3, height, width), jnp.float32)
        arrays["image_guidance_scale"] = struct((), jnp.float32)
        if pipeline.unet.takes_reference:
            arrays["reference"] = arrays["image"]
    shapes = jax.tree.map(lambda x: struct(x.shape, x.dtype), weights)
    programs = {}  # before anything is written
    for platform in config.platform:
        exported = jax_export(jax.jit(generate), platforms=(platform,))(shapes, arrays)
        name = f"{'edit' if is_edit else 'image'}-batch{config.batch_size}-{width}x{height}"
        programs[f"{name}-{num_steps}steps-{platform}{PROGRAM}"] = exported.serialize()
    with writing_export(output_dir, keep_programs=True) as folder:
        write_beside(pipeline, folder)
        save_file(weights, folder / WEIGHTS)
        shutil.copymode(folder / INDEX_NAME, folder / WEIGHTS)  # safetensors' is the owner's alone
        for name, program in programs.items():
            (folder / name).write_bytes(program)
    return [output_dir / name for name in programs]
