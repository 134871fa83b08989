"""PyTorch counterparts of components, with our weights; ONNX and Core ML files are made from them.

A counterpart takes its component's inputs by position and returns a tuple of outputs.
"""

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from diffusers_flax.exporting.components import random_inputs

CLASSES = {
    "unet": UNet2DConditionModel,
    "vae": AutoencoderKL,
    "text_encoder": CLIPTextModel,
    "text_encoder_2": CLIPTextModelWithProjection,
}


class TorchTextEncoder(torch.nn.Module):
    """Token ids to hidden states."""

    def __init__(self, model, outputs):
        super().__init__()
        self.model, self.outputs = model, outputs

    def forward(self, input_ids):
        with_states = any(name.startswith("hidden_states") for name in self.outputs)
        found = self.model(input_ids, output_hidden_states=with_states)
        states = {f"hidden_states.{i}": x for i, x in enumerate(found.hidden_states or ())}
        return tuple(states[name] if name in states else found[name] for name in self.outputs)


class TorchVaeEncoder(torch.nn.Module):
    """Images to their latents' mean and logarithm of the variance."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, sample):
        return (self.model.encode(sample).latent_dist.parameters,)


class TorchVaeDecoder(torch.nn.Module):
    """Latents to images."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, latent_sample):
        return (self.model.decode(latent_sample).sample,)


class TorchUNet(torch.nn.Module):
    """Noisy latents to a prediction."""

    def __init__(self, model, inputs):
        super().__init__()
        self.model, self.inputs = model, tuple(inputs)

    def forward(self, *arrays):
        inputs = dict(zip(self.inputs, arrays))
        # ONNX concatenates arrays of one dtype; the embedding beside these is float32.
        added = {x: inputs[x].float() for x in ("text_embeds", "time_ids") if x in inputs}
        found = self.model(
            inputs["sample"],
            inputs["timestep"],
            inputs["encoder_hidden_states"],
            timestep_cond=inputs.get("timestep_cond"),
            added_cond_kwargs=added or None,
        )
        return (found.sample,)


def open_torch_model(component, folder, dtype, device="cpu"):
    """A component's PyTorch counterpart.

    Args:
        component: Component.
        folder: that the module's save_pretrained wrote.
        dtype: name of the weights' torch dtype.
        device: "cpu", or "meta": shapes without weights, for a module of diffusers.
    """
    cls, dtype = CLASSES[component.module], getattr(torch, dtype)
    if device == "meta":
        with torch.device(device):
            model = cls.from_config(cls.load_config(folder)).to(dtype)
    else:
        model = cls.from_pretrained(folder, torch_dtype=dtype)
    model.eval().requires_grad_(False)
    if component.module.startswith("text_encoder"):
        return TorchTextEncoder(model, component.outputs)
    if component.name == "unet":
        return TorchUNet(model, component.inputs)
    return {"vae_encoder": TorchVaeEncoder, "vae_decoder": TorchVaeDecoder}[component.name](model)


def example_tensors(component, pipeline, dtype="float32"):
    """Inputs of a counterpart, a list, to trace a graph for all sizes with.

    torch.export takes a length of 1 for a constant, so the batch is 2. For sides that it cannot
    halve, a UNet computes the upsampled size of each level, which is right for all sizes.

    Args:
        component: Component.
        pipeline: the component's pipeline.
        dtype: name of the dtype of weights, latents, images and text.
    """
    factor = max(3, 2 ** (len(pipeline.unet.config.block_out_channels) - 1))
    inputs = random_inputs(component, pipeline, 2, (2 * factor + 1, 4 * factor - 1))
    return [cast_input(name, torch.from_numpy(x), dtype) for name, x in inputs.items()]


def cast_input(name, tensor, dtype):
    """A graph's input; token ids, timesteps and time_ids keep their dtypes."""
    keeps = not tensor.is_floating_point() or name in ("timestep", "time_ids")
    return tensor if keeps else tensor.to(getattr(torch, dtype))
