"""The scales, steps and scheduler that a model is made for, in a file that PyTorch ignores.

write_defaults(folder, guidance_scale=2.0, image_guidance_scale=1.2, num_inference_steps=20)
config = with_defaults(config, [config.model], config.lora)
"""

import sys
from dataclasses import replace
from pathlib import Path

from diffusers_flax.loading.files import write_json
from diffusers_flax.loading.hub import fetch_config, locate
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
