"""PyTorch's classes with our weights: ONNX and Core ML files are made from them.

A part's twin takes the part's inputs by position and returns a tuple of its outputs.
"""

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from exporting.parts import random_inputs

CLASSES = {
    "unet": UNet2DConditionModel,
    "vae": AutoencoderKL,
    "text_encoder": CLIPTextModel,
    "text_encoder_2": CLIPTextModelWithProjection,
}


class TextTwin(torch.nn.Module):
    """Token ids to states."""

    def __init__(self, model, outputs):
        super().__init__()
        self.model, self.outputs = model, outputs

    def forward(self, input_ids):
        with_states = any(name.startswith("hidden_states") for name in self.outputs)
        found = self.model(input_ids, output_hidden_states=with_states)
        states = {f"hidden_states.{i}": x for i, x in enumerate(found.hidden_states or ())}
        return tuple(states[name] if name in states else found[name] for name in self.outputs)


class EncoderTwin(torch.nn.Module):
    """Images to the mean and the logarithm of the variance of their latents."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, sample):
        return (self.model.encode(sample).latent_dist.parameters,)


class DecoderTwin(torch.nn.Module):
    """Latents to images."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, latent_sample):
        return (self.model.decode(latent_sample).sample,)


class UNetTwin(torch.nn.Module):
    """Noisy latents to the prediction."""

    def __init__(self, model, inputs):
        super().__init__()
        self.model, self.inputs = model, tuple(inputs)

    def forward(self, *arrays):
        given = dict(zip(self.inputs, arrays))
        # Concatenated with an embedding in float32; the operation of ONNX takes one dtype.
        added = {x: given[x].float() for x in ("text_embeds", "time_ids") if x in given}
        found = self.model(
            given["sample"],
            given["timestep"],
            given["encoder_hidden_states"],
            timestep_cond=given.get("timestep_cond"),
            added_cond_kwargs=added or None,
        )
        return (found.sample,)


def open_twin(part, folder, dtype, device="cpu"):
    """The twin of a part.

    Args:
        part: Part.
        folder: of the part's module, as its save_pretrained writes it.
        dtype: name of a dtype of torch, of the weights.
        device: "cpu", or "meta": shapes without weights, for a module of diffusers.
    """
    cls, dtype = CLASSES[part.module], getattr(torch, dtype)
    if device == "meta":
        with torch.device(device):
            model = cls.from_config(cls.load_config(folder)).to(dtype)
    else:
        model = cls.from_pretrained(folder, torch_dtype=dtype)
    model.eval().requires_grad_(False)
    if part.module.startswith("text_encoder"):
        return TextTwin(model, part.outputs)
    if part.name == "unet":
        return UNetTwin(model, part.inputs)
    return {"vae_encoder": EncoderTwin, "vae_decoder": DecoderTwin}[part.name](model)


def example_tensors(part, pipeline, dtype="float32"):
    """Inputs of a twin, a list, from which its graph for all sizes is made.

    torch.export takes a length of 1 for a constant, so the batch is 2. A UNet whose sides it cannot
    halve gives the upsampled size of each level, which is right for all sizes.

    Args:
        part: Part.
        pipeline: has the part.
        dtype: name of the weights' dtype, which latents, images and text have too.
    """
    factor = max(3, 2 ** (len(pipeline.unet.config.block_out_channels) - 1))
    inputs = random_inputs(part, pipeline, 2, (2 * factor + 1, 4 * factor - 1))
    return [as_given(name, torch.from_numpy(x), dtype) for name, x in inputs.items()]


def as_given(name, tensor, dtype):
    """A tensor as the graph takes it; timesteps and numbers of pixels need float32."""
    keeps = not tensor.is_floating_point() or name in ("timestep", "time_ids")
    return tensor if keeps else tensor.to(getattr(torch, dtype))
