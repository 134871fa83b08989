"""Exported components of a pipeline: their inputs, our models' outputs, and PyTorch counterparts.

Components, inputs, outputs and axes have the names of Optimum's ONNX exports, which has a VAE's
encoder and decoder as two components.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

TEXT_ENCODERS = ("text_encoder", "text_encoder_2")
COMPONENTS = (*TEXT_ENCODERS, "vae_encoder", "vae_decoder", "unet")


class Component(NamedTuple):
    """An exported component of a pipeline."""

    name: str  # its folder in the export
    module: str  # name of the pipeline's module with its parameters
    inputs: dict  # {name: (shape, dtype)}; a dynamic axis of a shape is a name
    outputs: tuple  # names


def exported_components(pipeline):
    """A pipeline's Components, the UNet first, whose parameters are freed after its export.

    SDXL's UNet reads the text encoders' hidden states. The VAE's encoder returns the mean and the
    logarithm of the variance. Timesteps are floats, as some schedulers have fractional ones.
    """
    config = pipeline.unet.config
    shapes = {
        "sample": ("batch_size", config.in_channels, "height", "width"),
        "timestep": (1,),
        "encoder_hidden_states": ("batch_size", "sequence_length", config.cross_attention_dim),
    }
    if config.addition_embed_type is not None:  # SDXL
        num_time_ids = 5 if getattr(pipeline, "requires_aesthetics_score", False) else 6
        width = num_time_ids * config.addition_time_embed_dim
        pooled = config.projection_class_embeddings_input_dim - width
        shapes |= {"text_embeds": ("batch_size", pooled), "time_ids": ("batch_size", num_time_ids)}
    if config.time_cond_proj_dim is not None:  # distilled with guidance
        shapes["timestep_cond"] = ("batch_size", config.time_cond_proj_dim)
    inputs = {name: (shape, np.float32) for name, shape in shapes.items()}
    components = [Component("unet", "unet", inputs, ("out_sample",))]
    for name in TEXT_ENCODERS:
        if (encoder := getattr(pipeline, name, None)) is None:
            continue
        outputs = ["last_hidden_state", "pooler_output"]
        if name == "text_encoder_2":
            outputs = ["text_embeds", "last_hidden_state"]
        if hasattr(pipeline, "text_encoder_2"):
            outputs += [f"hidden_states.{i}" for i in range(encoder.module.num_hidden_layers + 1)]
        inputs = {"input_ids": (("batch_size", "sequence_length"), np.int64)}
        components.append(Component(name, name, inputs, tuple(outputs)))
    image = ("batch_size", pipeline.vae.in_channels, "height", "width")
    latents = ("batch_size", pipeline.vae.latent_channels, "height_latent", "width_latent")
    sample, latents = {"sample": (image, np.float32)}, {"latent_sample": (latents, np.float32)}
    return [
        *components,
        Component("vae_encoder", "vae", sample, ("latent_parameters",)),
        Component("vae_decoder", "vae", latents, ("sample",)),
    ]


def random_inputs(component, pipeline, batch, size):
    """Inputs {name: array} of a component, the same in every call.

    Args:
        component: Component.
        pipeline: the component's pipeline.
        batch: rows.
        size: (height, width) of the latents.
    """
    rng = np.random.default_rng(0)
    if component.module in TEXT_ENCODERS:
        module = getattr(pipeline, component.module).module
        length = module.max_position_embeddings
        ids = rng.integers(0, module.vocab_size, (batch, length), np.int64)
        ids[:, -1] = module.eos_token_id if module.eos_token_id != 2 else module.vocab_size - 1
        return {"input_ids": ids}
    scale = pipeline.vae_scale_factor if component.name == "vae_encoder" else 1
    height, width = (side * scale for side in size)
    lengths = {"batch_size": batch, "sequence_length": 77, "height": height, "width": width}
    lengths |= {"height_latent": height, "width_latent": width}
    inputs = {
        name: rng.standard_normal([lengths.get(axis, axis) for axis in shape]).astype(dtype)
        for name, (shape, dtype) in component.inputs.items()
    }
    if "timestep" in inputs:
        inputs["timestep"] = np.array([500], np.float32)
    if "time_ids" in inputs:
        pixels = np.array([*size, 0, 0, *size], np.float32)[: inputs["time_ids"].shape[1]]
        inputs["time_ids"] = np.tile(pixels * pipeline.vae_scale_factor, (batch, 1))
    return inputs


def run_flax(component, pipeline, params, inputs):
    """Our model's outputs, NumPy arrays in the component's order.

    Args:
        component, pipeline: as for random_inputs.
        params: parameters of the component's module.
        inputs: from random_inputs.
    """
    module = getattr(pipeline, component.module)

    def encode_text(params, given):
        ids = given["input_ids"].astype(jnp.int32)
        found = module(ids, params=params, output_hidden_states=True, return_dict=True)
        states = {f"hidden_states.{i}": x for i, x in enumerate(found.hidden_states)}
        return [states[name] if name in states else found[name] for name in component.outputs]

    def encode(params, given):
        moments = module.apply({"params": params}, given["sample"], method=module.moments)
        return [jnp.transpose(moments, (0, 3, 1, 2))]

    def decode(params, given):
        latents = given["latent_sample"]
        return [module.apply({"params": params}, latents, method=module.decode).sample]

    def predict(params, given):
        added = {name: given[name] for name in ("text_embeds", "time_ids") if name in given}
        names = ("sample", "timestep", "encoder_hidden_states")
        arguments = [*(given[name] for name in names), added or None]
        options = {name: given[name] for name in ("timestep_cond",) if name in given}
        return [module.apply({"params": params}, *arguments, **options).sample]

    functions = {"vae_encoder": encode, "vae_decoder": decode, "unet": predict}
    function = functions.get(component.name, encode_text)
    given = {name: jnp.asarray(array) for name, array in inputs.items()}
    return [np.asarray(x) for x in jax.jit(function)(params, given)]
