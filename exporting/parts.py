"""The parts of a pipeline that are exported one by one: their inputs, and what our models give.

Parts, inputs, outputs and axes have the names of Optimum's ONNX exports.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

TEXT_ENCODERS = ("text_encoder", "text_encoder_2")
PARTS = (*TEXT_ENCODERS, "vae_encoder", "vae_decoder", "unet")
# Latents (height, width) and batches at which every part is compared. The sides of the second are
# odd: the UNet halves them and has to come back to the same size.
CHECKED_SIZES = ((1, (16, 16)), (3, (13, 24)))


@dataclass(frozen=True)
class Part:
    """A part of a pipeline.

    Fields:
        name: of its folder in the export.
        module: name of the pipeline's module, whose parameters it has.
        inputs: {name: (shape, dtype)}; a shape has numbers and names of axes of any length.
        outputs: names.
    """

    name: str
    module: str
    inputs: dict
    outputs: tuple

    def axes(self):
        """{input: {number of an axis: its name}} of the axes of any length."""
        return {
            name: {i: axis for i, axis in enumerate(shape) if isinstance(axis, str)}
            for name, (shape, _) in self.inputs.items()
        }


def exported_parts(pipeline):
    """The Parts of a pipeline, the UNet first, as its parameters are freed after its export."""
    texts = [text_part(pipeline, name) for name in TEXT_ENCODERS if getattr(pipeline, name, None)]
    num_time_ids = 5 if getattr(pipeline, "requires_aesthetics_score", False) else 6
    return [unet_part(pipeline.unet.config, num_time_ids), *texts, *vae_parts(pipeline.vae)]


def text_part(pipeline, name):
    """The Part of a text encoder; SDXL's UNet reads its hidden states."""
    encoder = getattr(pipeline, name)
    outputs = ["last_hidden_state", "pooler_output"]
    if name == "text_encoder_2":
        outputs = ["text_embeds", "last_hidden_state"]
    if hasattr(pipeline, "text_encoder_2"):
        outputs += [f"hidden_states.{i}" for i in range(encoder.module.num_hidden_layers + 1)]
    inputs = {"input_ids": (("batch_size", "sequence_length"), np.int64)}
    return Part(name, name, inputs, tuple(outputs))


def vae_parts(vae):
    """The Parts of a VAE; the encoder's output has the mean and the logarithm of the variance."""
    image = ("batch_size", vae.in_channels, "height", "width")
    latents = ("batch_size", vae.latent_channels, "height_latent", "width_latent")
    return [
        Part("vae_encoder", "vae", {"sample": (image, np.float32)}, ("latent_parameters",)),
        Part("vae_decoder", "vae", {"latent_sample": (latents, np.float32)}, ("sample",)),
    ]


def unet_part(config, num_time_ids):
    """The Part of a UNet. Timesteps are floats, as some schedulers have fractions of them."""
    sample = ("batch_size", config.in_channels, "height", "width")
    text = ("batch_size", "sequence_length", config.cross_attention_dim)
    inputs = {
        "sample": (sample, np.float32),
        "timestep": ((1,), np.float32),
        "encoder_hidden_states": (text, np.float32),
    }
    if config.addition_embed_type is not None:  # SDXL
        width = num_time_ids * config.addition_time_embed_dim
        pooled = config.projection_class_embeddings_input_dim - width
        inputs["text_embeds"] = (("batch_size", pooled), np.float32)
        inputs["time_ids"] = (("batch_size", num_time_ids), np.float32)
    if config.time_cond_proj_dim is not None:  # distilled with guidance
        inputs["timestep_cond"] = (("batch_size", config.time_cond_proj_dim), np.float32)
    return Part("unet", "unet", inputs, ("out_sample",))


def random_inputs(part, pipeline, batch, size):
    """Inputs of a part, {name: array}, the same at every call.

    Args:
        part: Part.
        pipeline: has the part.
        batch: rows.
        size: (height, width) of the latents.
    """
    rng = np.random.default_rng(0)
    lengths = {"batch_size": batch, "sequence_length": 77}
    if part.module in TEXT_ENCODERS:
        module = getattr(pipeline, part.module).module
        length = module.max_position_embeddings
        ids = rng.integers(0, module.vocab_size, (batch, length), np.int64)
        ids[:, -1] = module.eos_token_id if module.eos_token_id != 2 else module.vocab_size - 1
        return {"input_ids": ids}
    scale = pipeline.vae_scale_factor if part.name == "vae_encoder" else 1
    height, width = (side * scale for side in size)
    lengths |= {"height": height, "width": width, "height_latent": height, "width_latent": width}
    inputs = {
        name: rng.standard_normal([lengths.get(axis, axis) for axis in shape]).astype(dtype)
        for name, (shape, dtype) in part.inputs.items()
    }
    if "timestep" in inputs:
        inputs["timestep"] = np.array([500], np.float32)
    if "time_ids" in inputs:
        pixels = np.array([*size, 0, 0, *size], np.float32)[: inputs["time_ids"].shape[1]]
        inputs["time_ids"] = np.tile(pixels * pipeline.vae_scale_factor, (batch, 1))
    return inputs


def run_flax(part, pipeline, params, inputs):
    """Our model's outputs of a part, in its order, as NumPy arrays.

    Args:
        part, pipeline: as for random_inputs.
        params: of the part's module.
        inputs: of random_inputs.
    """
    given = {name: jnp.asarray(array) for name, array in inputs.items()}
    return [np.asarray(x) for x in jax.jit(flax_function(part, pipeline))(params, given)]


def output_shapes(part, pipeline, inputs):
    """Shapes of our model's outputs of a part, without its parameters; arguments of run_flax."""
    module = getattr(pipeline, part.module)
    params = jax.eval_shape(getattr(module, "module", module).init_weights, jax.random.key(0))
    given = {name: jnp.asarray(array) for name, array in inputs.items()}
    return [x.shape for x in jax.eval_shape(flax_function(part, pipeline), params, given)]


def flax_function(part, pipeline):
    """(params, {input: array}) -> list of outputs, by our model."""
    module = getattr(pipeline, part.module)

    def encode_text(params, given):
        ids = given["input_ids"].astype(jnp.int32)
        found = module(ids, params=params, output_hidden_states=True, return_dict=True)
        states = {f"hidden_states.{i}": x for i, x in enumerate(found.hidden_states)}
        return [states[name] if name in states else found[name] for name in part.outputs]

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
    return functions.get(part.name, encode_text)
