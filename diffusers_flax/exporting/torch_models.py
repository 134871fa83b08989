"""PyTorch counterparts of components, with our weights, from which files are made."""

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from transformers import CLIPTextModel, CLIPTextModelWithProjection

CLASSES = {
    "unet": UNet2DConditionModel,
    "vae": AutoencoderKL,
    "text_encoder": CLIPTextModel,
    "text_encoder_2": CLIPTextModelWithProjection,
}


class TorchComponent(torch.nn.Module):
    """A component by PyTorch's model: its inputs to a tuple of its outputs."""

    def __init__(self, model, component):
        super().__init__()
        self.model, self.component = model, component

    def forward(self, *arrays):
        """The outputs; arrays: in the order of component.inputs."""
        name, outputs = self.component.name, self.component.outputs
        inputs = dict(zip(self.component.inputs, arrays))
        if name == "vae_encoder":
            return (self.model.encode(inputs["sample"]).latent_dist.parameters,)
        if name == "vae_decoder":
            return (self.model.decode(inputs["latent_sample"]).sample,)
        if name == "unet":
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
        with_states = any(output.startswith("hidden_states") for output in outputs)
        found = self.model(inputs["input_ids"], output_hidden_states=with_states)
        states = {f"hidden_states.{i}": x for i, x in enumerate(found.hidden_states or ())}
        return tuple(states[output] if output in states else found[output] for output in outputs)


def open_torch_model(component, folder, dtype, device="cpu"):
    """A component's TorchComponent.

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
    return TorchComponent(model.eval().requires_grad_(False), component)
