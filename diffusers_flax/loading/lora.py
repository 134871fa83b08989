"""LoRA files, low-rank updates of kernels, folded into a model's parameters while they are read.

    loras = ["lcm-lora.safetensors", "style.safetensors:0.8"]
    pipeline, params = FlaxStableDiffusionXLPipeline.from_pretrained("MODEL", lora=loras)

Source: LoRA (arXiv 2106.09685), section 4.1. Names of entries: the PEFT library, diffusers before
PEFT, kohya-ss/sd-scripts, and ComfyUI.
"""

import json
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors import safe_open

from diffusers_flax.loading.directories import CONV_IN_FILE, LORA_FILE
from diffusers_flax.loading.files import read_json
from diffusers_flax.loading.hub import fetch_file, fetch_named, locate
from diffusers_flax.loading.refused import EMBEDDING, LORA, refuse
from diffusers_flax.loading.weights import read_weights
from diffusers_flax.messages import first_names

# The two factors of a layer in all layouts, after torch_to_flax.
FACTOR = re.compile(
    r"(.+?)(?:/lora_(A|B|down|up)(?:/default)?|[/_]lora/(down|up)|/lora_linear_layer/(down|up))"
    r"/kernel"
)
DOWN_NAMES = ("A", "down")
# Component by prefix, with "_" for "/"; a file without prefixes is a UNet's.
PREFIXES = {
    "base_model_model_": "unet",
    "lora_unet_": "unet",
    "unet_": "unet",
    "diffusion_model_": "unet",
    "lora_te1_": "text_encoder",
    "lora_te2_": "text_encoder_2",
    "lora_te_": "text_encoder",
    "text_encoder_2_": "text_encoder_2",
    "text_encoder_": "text_encoder",
    "text_encoders_clip_l_transformer_": "text_encoder",
    "text_encoders_clip_h_transformer_": "text_encoder",
    "text_encoders_clip_g_transformer_": "text_encoder_2",
}
# Entries and files of PEFT's save_pretrained.
ADAPTER_PREFIX, ADAPTER_STEM = "base_model/model/", "adapter_model"
ADAPTER_CONFIG = "adapter_config.json"
# Values of PEFT's init_lora_weights that also change the base model's weights.
CHANGES_MODEL = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Names of the UNet's layers in the original repositories (sgm).
SGM_BLOCK = re.compile(r"(input_blocks|middle_block|output_blocks)_(\d+)(?:_(\d+))?_(.+)")
SGM_LAYERS = {
    "in_layers_2": "conv1",
    "out_layers_3": "conv2",
    "emb_layers_1": "time_emb_proj",
    "skip_connection": "conv_shortcut",
}
SGM_OTHERS = {
    "input_blocks_0_0": "conv_in",
    "time_embed_0": "time_embedding_linear_1",
    "time_embed_2": "time_embedding_linear_2",
    "label_emb_0_0": "add_embedding_linear_1",
    "label_emb_0_2": "add_embedding_linear_2",
    "out_2": "conv_out",
}
LAYERS_PER_BLOCK = 3  # of the up blocks; resnet and sampler of the down blocks


class Update(NamedTuple):
    """The update of one layer: scale * down @ up."""

    down: np.ndarray  # float32 (..., in, rank)
    up: np.ndarray  # float32 (rank, out)
    scale: float
    source: str  # argument and file, for errors


class Loras:
    """LoRA files, folded into a model's parameters while they are read.

    Args:
        specs: FILE or FILE:WEIGHT, each a .safetensors, .bin, .pt or .ckpt file, a directory with
            pytorch_lora_weights.safetensors, or a hub id (owner/name or owner/name/FILE). WEIGHT
            multiplies the update, default 1.
        **hub_options: see take_hub_options.

    Raises:
        ValueError: a file is missing, damaged or not a LoRA.
    """

    def __init__(self, specs, **hub_options):
        specs = [specs] if isinstance(specs, str | Path) else specs
        self.updates, self.folded = {}, set()
        for spec in specs:
            source, weight = split_weight(spec)
            for key, update in read_updates(find_lora(source, **hub_options), weight).items():
                self.updates.setdefault(key, []).append(update)

    def fold(self, component, name, x):
        """A component's parameter x plus its updates, summed in float32, in the dtype of x.

        name: of the parameter, joined by "/". A ValueError for an update of other sizes.
        """
        layer, _, leaf = name.rpartition("/")
        key = component, layer.replace("/", "_")
        if leaf != "kernel" or key not in self.updates:
            return x
        self.folded.add(key)
        total = np.asarray(x, np.float32)
        for update in self.updates[key]:
            delta = np.float32(update.scale) * (update.down @ update.up)
            # A linear layer of one may be a 1x1 convolution of the other.
            if delta.size != x.size or delta.shape[-2:] != x.shape[-2:]:
                raise ValueError(
                    f"{update.source} is for another model: its update of {component} {layer} "
                    f"is {delta.shape[-2]} -> {delta.shape[-1]} wide, the model's layer "
                    f"{x.shape[-2]} -> {x.shape[-1]}"
                )
            total = total + delta.reshape(x.shape)
        return total.astype(x.dtype)

    def require_folded(self):
        """Raise a ValueError if an update belongs to no layer of the model."""
        if unused := sorted(self.updates.keys() - self.folded):
            files = {update.source for key in unused for update in self.updates[key]}
            raise ValueError(
                f"{' and '.join(sorted(files))}: {len(unused)} of {len(self.updates)} layers do "
                f"not exist in the model ({first_names([' '.join(key) for key in unused])}); take "
                "a LoRA of this model's family"
            )


def split_spec(spec):
    """FILE or FILE:VALUE -> (FILE, VALUE or None)."""
    source, colon, value = str(spec).rpartition(":")
    if not colon or "/" in value or "\\" in value or Path(spec).exists():
        return str(spec), None
    return source, value


def split_weight(spec, argument="lora"):
    """FILE or FILE:WEIGHT -> (FILE, WEIGHT or 1.0); argument: for the error."""
    source, weight = split_spec(spec)
    try:
        return source, 1.0 if weight is None else float(weight)
    except ValueError:
        raise ValueError(f"{argument}={spec}: {weight} is not a number") from None


def find_lora(source, **hub_options):
    """Path of the file of a LoRA: a file, directory or hub id; downloaded if necessary."""
    file = fetch_named("lora", source, [LORA_FILE], **hub_options)
    repository, name = locate("lora", source)
    if file.stem == ADAPTER_STEM:
        config = str(Path(name).with_name(ADAPTER_CONFIG))
        fetch_file(repository, config, None, None, **hub_options)
    if fetch_file(repository, CONV_IN_FILE, None, None, **hub_options):
        raise ValueError(
            f"lora={source} has {CONV_IN_FILE} next to it, the first convolution, which was "
            "trained in full: write the model with both merged in training, and open it without "
            "lora="
        )
    return file


def read_updates(file, weight):
    """{(component, layer joined by "_"): Update} of a LoRA file; weight multiplies all updates."""
    what, entries = f"lora={file}", dict(read_weights(file, kinds=(np.number, np.bool_)))
    refuse(what, entries, takes=(LORA, EMBEDDING))
    downs, ups, alphas, names = {}, {}, {}, {}
    for name, x in entries.items():
        if name.startswith("bundle_emb/"):  # an embedding
            continue
        if found := FACTOR.fullmatch(name):
            layer, *words = found.groups()
            factors = downs if {*DOWN_NAMES} & {*words} else ups
        elif name.endswith("/alpha"):
            layer, factors, x = name.removesuffix("/alpha"), alphas, x.reshape(())
        else:
            raise ValueError(f"{what}: its entry {name} is not of a LoRA")
        key = layer_of(layer)
        factors[key] = np.asarray(x, np.float32)
        names[key] = layer.removeprefix(ADAPTER_PREFIX).removeprefix(f"{key[0]}/")
    if not downs or downs.keys() != ups.keys():
        raise ValueError(f"{what} lacks factors of its layers; download the file again")
    settings = read_peft_settings(file)
    is_adapter = any(name.startswith(ADAPTER_PREFIX) for name in entries)
    if is_adapter and "unet.lora_alpha" not in settings and not alphas:
        raise ValueError(
            f"{what} is an adapter of PEFT without lora_alpha; put PEFT's {ADAPTER_CONFIG} next to "
            f"it, and name it {ADAPTER_STEM}{file.suffix}"
        )
    updates = {}
    for key, down in downs.items():
        rank = down.shape[-1]
        alpha = alphas[key] if key in alphas else alpha_of(key[0], names[key], settings, rank)
        updates[key] = Update(
            down, ups[key].reshape(rank, -1), weight * (float(alpha) / rank), what
        )
    return updates


def read_peft_settings(file):
    """PEFT's settings of a LoRA, {"unet.r": 16, "unet.lora_alpha": 16, ...}, or {}.

    They are in the header of a safetensors file, or in a file beside the one of save_pretrained.
    """
    config, settings = file.with_name(ADAPTER_CONFIG), {}
    if file.stem == ADAPTER_STEM and config.is_file():
        settings = {f"unet.{name}": value for name, value in read_json(config).items()}
    elif file.suffix == ".safetensors":
        with safe_open(file, "np") as tensors:
            settings = json.loads((tensors.metadata() or {}).get("lora_adapter_metadata", "{}"))
    for name, value in settings.items():
        _, _, setting = name.rpartition(".")
        changes_model = setting == "init_lora_weights" and str(value).startswith(CHANGES_MODEL)
        if changes_model or (value and setting in ("use_dora", "use_rslora")):
            raise ValueError(
                f"lora={file} has PEFT's setting {setting}={value}, which is not supported; "
                "merge it into its model with PEFT"
            )
    return settings


def alpha_of(component, layer, settings, rank):
    """A layer's alpha in PEFT's settings; the rank without one."""
    # PyTorch's name of the layer: attentions.0.proj_in, time_embedding.linear_1
    torch_name = re.sub(r"(?<!linear)_(?=\d+(\.|$))", ".", layer.replace("/", "."))
    for pattern, alpha in (settings.get(f"{component}.alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", torch_name):
            return alpha
    return settings.get(f"{component}.lora_alpha", rank)


def layer_of(name):
    """(component, layer joined by "_") of a name in any layout."""
    name = name.replace("/processor/", "/").replace("/", "_")
    if name.endswith("to_out"):
        name += "_0"
    prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), "unet_")
    component, name = PREFIXES[prefix], name.removeprefix(prefix)
    if component == "unet":
        return component, from_sgm(name)
    return component, name if name.startswith("text_") else f"text_model_{name}"


def from_sgm(name):
    """diffusers' name of a layer of the UNet, joined by "_"; other names are unchanged."""
    found = SGM_BLOCK.fullmatch(name)
    if name in SGM_OTHERS or not found:
        return SGM_OTHERS.get(name, name)
    kind, number, inner, rest = found[1], int(found[2]), found[3], found[4]
    rest = SGM_LAYERS.get(rest, rest)
    if kind == "middle_block":
        middle = {0: "resnets_0", 1: "attentions_0", 2: "resnets_1"}
        return f"mid_block_{middle.get(number, number)}_{rest}"
    layer_list = "attentions" if inner == "1" else "resnets"
    if kind == "input_blocks":
        block, layer = divmod(number - 1, LAYERS_PER_BLOCK)
        if rest == "op":
            return f"down_blocks_{block}_downsamplers_0_conv"
        return f"down_blocks_{block}_{layer_list}_{layer}_{rest}"
    block, layer = divmod(number, LAYERS_PER_BLOCK)
    if rest == "conv":
        return f"up_blocks_{block}_upsamplers_0_conv"
    return f"up_blocks_{block}_{layer_list}_{layer}_{rest}"
