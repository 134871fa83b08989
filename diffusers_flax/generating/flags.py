"""Flags of programs that make images, and what follows from them."""

import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Literal

import jax

from diffusers_flax.command_line import AtLeast
from diffusers_flax.devices.layout import Layout, parse_components, parse_layout
from diffusers_flax.devices.processes import check_agreement, start_distributed
from diffusers_flax.loading.files import write_json
from diffusers_flax.loading.hub import fetch_config, locate, open_source
from diffusers_flax.loading.lora import split_weight
from diffusers_flax.loading.single_file import SingleFile

DEFAULTS_FILE = "sampling_defaults.json"  # in a model's directory, or beside a LoRA
# Of models without this file; None: the model's own scheduler.
USUAL = {
    "guidance_scale": 7.5,
    "image_guidance_scale": 1.5,
    "num_inference_steps": 50,
    "scheduler": None,
}


@dataclass(frozen=True)
class SamplingFlags:
    """How models make images, besides the flags whose defaults differ between programs."""

    # timesteps to run instead of --num_inference_steps, for distilled models: 999 749 499 249; or
    # ays, the ten of Align-Your-Steps for each model's family
    timesteps: tuple[int | Literal["ays"], ...] = ()
    # apg or apg:eta=0,norm=15,momentum=-0.5, projected guidance: high scales without burnt colors
    guidance: str | None = None
    eta: float | None = None  # noise per step, 0 to 1, for ddim (default 0) and tcd (default 0.3)
    scheduler: str | None = None  # ddim, euler, ...; default: each model's own
    # how timesteps are spaced; default: the scheduler's config
    timestep_spacing: Literal["leading", "linspace", "trailing"] | None = None
    # DISTILLED BASE or DISTILLED BASE:WEIGHT, adds the difference of two UNets to each model's; a
    # UNet is a directory, hub id or file
    unet_delta: tuple[str, ...] = ()
    # LoRA files or hub ids to fold into each model: FILE or FILE:WEIGHT
    lora: tuple[str, ...] = ()
    # textual-inversion files or hub ids; texts may contain their tokens: FILE or FILE:TOKEN
    embedding: tuple[str, ...] = ()
    # NAME or NAME:PARAMETER=VALUE,...; names: guidance, deepcache, spectrum, fbcache, tome, int8,
    # taesd; tgate only for images from text; see docs/acceleration.md
    accelerate: tuple[str, ...] = ()
    # default: float32 on a CPU, float16 on NVIDIA GPUs before Ampere, else bfloat16
    dtype: Literal["float32", "bfloat16", "float16"] | None = None


@dataclass(frozen=True)
class PreviewFlags:
    """Previews of images."""

    # also write a preview of every N-th step, decoded by TAESD, next to each image
    preview: Annotated[int, AtLeast(1)] | None = None
    # directory or hub id of the TAESD of previews; "": as for --accelerate taesd
    preview_decoder: str = ""


@dataclass(frozen=True)
class DeviceFlags:
    """Flags of the programs that make images: devices and their memory."""

    # devices of all hosts that share the work: data=N groups with different images; in a group
    # branches=N with different branches of guidance, rows=N with different rows of an image; see
    # docs/memory.md
    parallel: tuple[str, ...] = ()
    # pixels, side of the tiles in which the VAE computes larger images; 0: whole images; default:
    # tiles if whole images would not fit into the memory
    vae_tile: int | None = None
    # device of each component, such as text=0 unet=1 vae=2, device 0 for others; balanced: chosen
    # by memory; default: every device has all components
    devices: tuple[str, ...] = ()
    # keep parameters in the host's memory until they are needed. component: text encoders and VAE;
    # group: blocks of all models, one ahead; layer: one layer at a time
    offload: Literal["component", "group", "layer"] | None = None
    # store the kernels of UNet and text encoders in 8 bits, cast up before each use
    storage: Literal["float8", "int8"] | None = None
    # in which the VAE computes; default: --dtype, or float32 for VAEs with force_upcast if --dtype
    # is float16 or the model is SDXL. SDXL's published VAE overflows float16, not bfloat16
    vae_dtype: Literal["float32", "bfloat16", "float16"] | None = None


@dataclass(frozen=True)
class ProcessFlags:
    """Flags of the programs that may run on several hosts."""

    # HOST:PORT of process 0, with --parallel over several hosts; a TPU slice, Slurm and Open MPI
    # tell it themselves
    coordinator_address: str | None = None
    num_processes: int | None = None  # number of processes; one per host
    process_id: int | None = None  # number of this process, from 0


def layout_of_flags(flags):
    """The Layout of DeviceFlags, or None if each device makes its own images.

    With ProcessFlags, processes join first: no device may be used before this call.

    Raises:
        ValueError: the flags are not valid, or exclude each other.
    """
    if flags.parallel and flags.devices:
        raise ValueError("--devices excludes --parallel; give one of them")
    if flags.devices:
        components = parse_components(flags.devices)
        return Layout(jax.local_devices(), components=components, offload=flags.offload)
    if flags.parallel:
        if isinstance(flags, ProcessFlags):
            start_distributed(flags.coordinator_address, flags.num_processes, flags.process_id)
            check_agreement(repr(replace(flags, process_id=None)))
        return replace(parse_layout(flags.parallel), offload=flags.offload)
    return Layout(jax.local_devices(), offload=flags.offload) if flags.offload else None


def from_flags(group, config, **changes):
    """Fill a dataclass, such as models.Sampling, from the flags with its fields' names.

    Args:
        group: dataclass; fields without a flag keep their defaults.
        config: flags of a program, or another object with such fields.
        changes: values of fields, instead of flags.
    """
    names = [field.name for field in fields(group) if hasattr(config, field.name)]
    return group(**{name: getattr(config, name) for name in names} | changes)


def write_defaults(folder, **values):
    """Write DEFAULTS_FILE; values: of the keys of USUAL."""
    write_json(Path(folder, DEFAULTS_FILE), values)


def read_defaults(model, loras=()):
    """The values of DEFAULTS_FILE of a model, then of its LoRAs, {} without the file.

    Args:
        model: directory, hub id or SingleFile.
        loras: FILE or FILE:WEIGHT, see loading.lora.Loras.

    Raises:
        ValueError: the model is a checkpoint of a training run.
    """
    path = Path(str(model))
    if path.parent.name == "checkpoints" and path.name.isdecimal() and path.is_dir():
        raise ValueError(
            f"{path} is a checkpoint of a training run; make a model of it: python ema_posthoc.py "
            f"--checkpoint {path} --output_dir NEW"
        )
    sources = [] if isinstance(model, SingleFile) else [model]
    sources += [locate("lora", split_weight(lora)[0])[0] for lora in loras]
    found = {}
    for source in sources:
        values, _ = fetch_config(source, DEFAULTS_FILE)
        found |= {name: x for name, x in (values or {}).items() if name in USUAL}
    return found


def with_defaults(config, models, loras=()):
    """Fill in the flags that were not given, None or (), with the values that models are made for.

    Args:
        config: dataclass of flags, with some of the keys of USUAL; flags whose default is a tuple
            get a tuple of one value.
        models: directories, hub ids or SingleFiles.
        loras: that are folded into each.

    Raises:
        ValueError: the models are made for different values.
    """
    found, changes, said = [read_defaults(model, loras) for model in models], {}, []
    for name in USUAL:
        if (given := getattr(config, name, 0)) not in (None, ()):
            continue
        values = [x.get(name, USUAL[name]) for x in found]
        if len({*values}) > 1:
            raise ValueError(f"the models have different values of --{name}, {values}; give it")
        changes[name] = values[0] if given is None else (values[0],)
        if any(name in x for x in found):
            said.append(f"--{name} {values[0]}")
    if said:
        print(f"{' '.join(said)}, as in {DEFAULTS_FILE} of the model or LoRA", file=sys.stderr)
    return replace(config, **changes)


def with_single_files(config, model, component=None, **components):
    """Replace the values of flags that name a model in one file by SingleFile objects.

    Args:
        config: dataclass of the flags, with config_name_or_path.
        model: name of the main model's flag, which may have several values.
        component: what the program needs of the main model; None: the whole pipeline.
        **components: {name of another flag: its component}; configs are the main model's.

    Raises:
        ValueError: see open_source; or a flag has no effect.
    """
    configs, use_ema_weights = config.config_name_or_path, getattr(config, "use_ema_weights", False)
    components = {flag: name for flag, name in components.items() if getattr(config, flag)}
    values, revision = getattr(config, model), getattr(config, "revision", None)
    is_averaged = use_ema_weights and "unet" not in components.values()
    found = [
        open_source(
            "pretrained_model_name_or_path", x, component, configs, is_averaged, revision=revision
        )
        for x in (values if isinstance(values, tuple) else (values,))
    ]
    changes = {model: tuple(found) if isinstance(values, tuple) else found[0]}
    of_main = configs or getattr(found[0], "configs", found[0]) or None
    for flag, name in components.items():
        is_averaged = use_ema_weights and name == "unet"
        changes[flag] = open_source(flag, getattr(config, flag), name, of_main, is_averaged)
    files = [x for x in (*found, *changes.values()) if isinstance(x, SingleFile)]
    if configs and not files:
        raise ValueError(
            f"--config_name_or_path {configs} goes with a model that is one file; leave it out"
        )
    if use_ema_weights and not any(file.use_ema_weights for file in files):
        raise ValueError("--use_ema_weights goes with a UNet in one file; leave it out")
    return replace(config, **changes)


def check_pair_ranges(config):
    """Raise a ValueError unless flags are ranges of what pairs of images may have.

    config: with guidance_scale and attention_sharing, each (least, largest), and accelerate.
    """
    for name in ("guidance_scale", "attention_sharing"):
        low, high = getattr(config, name)
        if not low <= high:
            raise ValueError(f"--{name} {low:g} {high:g} must be in order: the least, the largest")
    if any(spec.partition(":")[0] == "tome" for spec in config.accelerate):
        raise ValueError(
            "--accelerate tome merges other positions in each image of a pair; leave it out"
        )


def check_guidance_range(guidance_scale, unet_config):
    """Raise a ValueError for a range of scales of which only a part needs guidance.

    Args:
        guidance_scale: (least, largest).
        unet_config: content of the UNet's config.json; a UNet that takes the scale has one branch.
    """
    low, high = guidance_scale
    if low <= 1 < high and unet_config.get("time_cond_proj_dim") is None:
        raise ValueError(
            f"--guidance_scale {low:g} {high:g}: up to 1 there is no guidance; take both above 1, "
            "or both up to 1"
        )


def nonblank_lines(file):
    """The lines with text of a UTF-8 file, without the spaces around them."""
    lines = file.read_text(encoding="utf-8-sig").split("\n")
    return [line.strip() for line in lines if line.strip()]
