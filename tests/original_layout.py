"""Writes a pipeline directory as one file of the original layout; inverts diffusers' renaming."""

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
UNET = {
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
    "mid_block.resnets.0": "middle_block.0",
    "mid_block.attentions.0": "middle_block.1",
    "mid_block.resnets.1": "middle_block.2",
}
VAE = {
    "mid_block.resnets.0": "mid.block_1",
    "mid_block.resnets.1": "mid.block_2",
    "mid_block.attentions.0": "mid.attn_1",
    "conv_norm_out": "norm_out",
    "conv_shortcut": "nin_shortcut",
    "group_norm": "norm",
    "to_q": "q",
    "to_k": "k",
    "to_v": "v",
    "to_out.0": "proj_out",
    "downsamplers.0": "downsample",
    "upsamplers.0": "upsample",
}
OPEN_CLIP = {
    "text_model.embeddings.position_embedding.weight": "positional_embedding",
    "text_model.embeddings.token_embedding": "token_embedding",
    "text_model.final_layer_norm": "ln_final",
    "text_model.encoder.layers": "transformer.resblocks",
    "text_projection.weight": "text_projection",
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
    "self_attn": "attn",
}


def replace_names(name, names):
    """Replace the words of a dict in a name with dots."""
    for new, old in names.items():
        name = re.sub(rf"(?<![\w.]){re.escape(new)}(?!\w)|(?<=\.){re.escape(new)}(?!\w)", old, name)
    return name


def unet_layout(tensors, layers_per_block):
    """A UNet's state dict with the original names, without prefix."""
    step = layers_per_block + 1

    def rename(name):
        block = re.match(r"(down|up)_blocks\.(\d+)\.(\w+)\.(\d+)\.(.+)", name)
        if not block:
            name = replace_names(name, UNET)
            return replace_names(name, RESNET) if re.match(r"middle_block\.[02]", name) else name
        way, i, kind, j, rest = block.groups()
        i, j = int(i), int(j)
        if kind == "downsamplers":
            return f"input_blocks.{(i + 1) * step}.0.op.{rest.removeprefix('conv.')}"
        if kind == "upsamplers":
            has_attention = any(n.startswith(f"up_blocks.{i}.attentions") for n in tensors)
            return f"output_blocks.{i * step + layers_per_block}.{1 + has_attention}.{rest}"
        number = 1 + i * step + j if way == "down" else i * step + j
        place = f"{'input' if way == 'down' else 'output'}_blocks.{number}"
        return (
            f"{place}.1.{rest}"
            if kind == "attentions"
            else f"{place}.0.{replace_names(rest, RESNET)}"
        )

    return {rename(name): x for name, x in tensors.items()}


def controlnet_layout(tensors, layers_per_block):
    """A ControlNet's state dict with the original names, without prefix."""
    num_blocks = sum(
        bool(re.fullmatch(r".*embedding\.blocks\.\d+\.bias", name)) for name in tensors
    )
    hints = {"conv_in": 0, "conv_out": 14} | {f"blocks.{i}": 2 * i + 2 for i in range(num_blocks)}
    names = {f"controlnet_cond_embedding.{n}": f"input_hint_block.{i}" for n, i in hints.items()}
    names |= {"controlnet_mid_block": "middle_block_out.0"}

    def rename(name):
        name = replace_names(name, names)
        return re.sub(r"controlnet_down_blocks\.(\d+)", r"zero_convs.\1.0", name)

    own = {rename(name): x for name, x in tensors.items() if name.startswith("controlnet_")}
    rest = {name: x for name, x in tensors.items() if not name.startswith("controlnet_")}
    return own | unet_layout(rest, layers_per_block)


def vae_layout(tensors, levels):
    """A VAE's state dict with the original names: attention is 1x1 convolutions."""
    renamed = {}
    for name, x in tensors.items():
        if ".attentions." in name and x.ndim == 2:
            x = x[:, :, None, None]
        name = re.sub(r"down_blocks\.(\d+)\.resnets", r"down.\1.block", name)
        name = re.sub(r"down_blocks", "down", name)
        name = re.sub(r"up_blocks\.(\d+)", lambda m: f"up.{levels - 1 - int(m[1])}", name)
        name = re.sub(r"(up\.\d+)\.resnets", r"\1.block", name)
        renamed[replace_names(name, VAE)] = x
    return renamed


def open_clip_layout(tensors):
    """A text encoder's state dict with OpenCLIP's names: query, key and value in one tensor."""
    renamed = {}
    for name in sorted(tensors):
        x, old = tensors[name], replace_names(name, OPEN_CLIP)
        found = re.match(r"(.*attn)\.([kqv])_proj\.(\w+)", old)
        if found and found[2] == "q":
            pieces = [tensors[name.replace("q_proj", f"{p}_proj")] for p in "qkv"]
            renamed[f"{found[1]}.in_proj_{found[3]}"] = torch.cat(pieces)
        elif not found:
            renamed[old] = x.T if name == "text_projection.weight" else x
    return renamed


def read_component(folder, component):
    """(state dict, config) of a pipeline directory's component; CLIP with its published prefix."""
    folder = Path(folder, component)
    stem = "model" if component.startswith("text") else "diffusion_pytorch_model"
    tensors = load_file(folder / f"{stem}.safetensors")
    if component.startswith("text"):
        named = (n if n.startswith("text_") else f"text_model.{n}" for n in tensors)
        tensors = dict(zip(named, tensors.values()))
    return tensors, json.loads((folder / "config.json").read_text())


def original_layout(
    folder, components=("unet", "vae", "text_encoder", "text_encoder_2"), clip="clip"
):
    """The state dict of a pipeline directory in the original layout.

    Args:
        folder: of a Stable Diffusion or SDXL pipeline.
        components: to take; components that the pipeline lacks are left out.
        clip: "open_clip" for the text encoder of Stable Diffusion 2.
    """
    tensors = {}
    components = [component for component in components if Path(folder, component).is_dir()]
    is_xl = Path(folder, "text_encoder_2").is_dir()
    is_refiner = is_xl and not Path(folder, "text_encoder").is_dir()
    for component in components:
        state, config = read_component(folder, component)
        if component == "unet":
            prefix, state = "model.diffusion_model.", unet_layout(state, config["layers_per_block"])
        elif component == "vae":
            prefix = "first_stage_model."
            state = vae_layout(state, len(config["block_out_channels"]))
        elif component == "text_encoder_2":
            prefix = f"conditioner.embedders.{0 if is_refiner else 1}.model."
            state = open_clip_layout(state)
        elif clip == "open_clip":
            prefix, state = "cond_stage_model.model.", open_clip_layout(state)
        else:
            prefix = (
                "conditioner.embedders.0.transformer." if is_xl else "cond_stage_model.transformer."
            )
        tensors |= {f"{prefix}{name}": x.contiguous() for name, x in state.items()}
    return tensors


def add_averages(tensors, add):
    """Add the averages of the UNet's weights, each the weight plus a number."""
    averages = {
        "model_ema." + name.removeprefix("model.").replace(".", ""): x + add
        for name, x in tensors.items()
        if name.startswith("model.diffusion_model.")
    }
    return tensors | averages | {"model_ema.num_updates": torch.tensor(3)}


def write_single_file(file, tensors):
    """Write a state dict as .safetensors, or as .ckpt with the records of a training loop."""
    file = Path(file)
    if file.suffix == ".safetensors":
        save_file(tensors, file)
    else:
        torch.save({"state_dict": tensors, "global_step": 7, "epoch": 1}, file)
    return file
