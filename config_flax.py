"""Configs (in memory, as JSON files, of published models) and outputs of models and pipelines.

@flax.struct.dataclass
class FlaxDecoderOutput(ModelOutput):
    sample: jax.Array

output = FlaxDecoderOutput(sample)
output.sample, output["sample"], output[0], output.to_tuple()[0]  # the same array
"""

import functools
import json
import logging
import os
from collections import OrderedDict
from dataclasses import fields
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError

logger = logging.getLogger(__name__)

# The configs of published pipelines, where they differ from the defaults of the Flax classes.
_VAE = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
}
_TEXT_ENCODER = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "projection_dim": 768,
    "num_attention_heads": 12,
}
_NOISE_SCHEDULE = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "num_train_timesteps": 1000,
    "steps_offset": 1,
}
PUBLISHED_CONFIGS = {
    "stable-diffusion-v1-5": {
        "unet": {"sample_size": 64, "cross_attention_dim": 768},
        "vae": _VAE | {"sample_size": 512},
        "text_encoder": _TEXT_ENCODER,
        "scheduler": _NOISE_SCHEDULE
        | {"_class_name": "PNDMScheduler", "set_alpha_to_one": False, "skip_prk_steps": True},
    },
    "stable-diffusion-xl-base-1.0": {
        "unet": {
            "sample_size": 128,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            "block_out_channels": (320, 640, 1280),
            "attention_head_dim": (5, 10, 20),
            "transformer_layers_per_block": (1, 2, 10),
            "cross_attention_dim": 2048,
            "use_linear_projection": True,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 256,
            "projection_class_embeddings_input_dim": 2816,
        },
        "vae": _VAE | {"sample_size": 1024, "scaling_factor": 0.13025, "force_upcast": True},
        "text_encoder": _TEXT_ENCODER,
        "text_encoder_2": {
            "hidden_size": 1280,
            "intermediate_size": 5120,
            "projection_dim": 1280,
            "num_attention_heads": 20,
            "num_hidden_layers": 32,
            "hidden_act": "gelu",
        },
        "scheduler": _NOISE_SCHEDULE
        | {"_class_name": "EulerDiscreteScheduler", "timestep_spacing": "leading"},
    },
}


class FrozenConfig(dict):
    """The settings of a model or scheduler, read-only: a dict with attributes."""

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"config has no entry {name!r}; it has {', '.join(self)}"
            ) from None

    def __setattr__(self, name, value):
        raise AttributeError(f"config is read-only: pass {name}={value!r} to from_pretrained")

    def _refuse(self, *args, **kwargs):
        raise TypeError("config is read-only: pass entries to from_pretrained")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self):  # copy and pickle
        return type(self), (dict(self),)

    def __repr__(self):
        return f"FrozenConfig({super().__repr__()})"


class ConfigMixin:
    """The methods of models, schedulers and pipelines that concern their config file.

    A subclass has `config_name`, the file's name, and `_file_content`, which returns its content.
    """

    config_name = "config.json"
    # Published names that other code reads.
    has_compatibles = False
    ignore_for_config = ()
    _deprecated_kwargs = ()

    @classmethod
    def _read_config(cls, path, subfolder=None, revision=None, **hub_options):
        file = fetch_file(path, cls.config_name, subfolder, revision, **hub_options)
        if file is None:
            raise ValueError(f"no {cls.config_name} in {place_in_words(path, subfolder, revision)}")
        return read_json(file)

    @classmethod
    def load_config(
        cls,
        pretrained_model_name_or_path,
        return_unused_kwargs=False,
        *,
        subfolder=None,
        revision=None,
        **kwargs,
    ):
        """Read the config file.

        Args:
            pretrained_model_name_or_path: folder or Hub id.
            return_unused_kwargs: True also returns the arguments that are not known.
            subfolder: folder inside it.
            revision: branch, tag or commit on the Hub.
            **kwargs: see take_hub_options.

        Returns:
            The content, a dict; with return_unused_kwargs (dict, dict).

        Raises:
            ValueError: there is no such file, it is no JSON object, or an argument is unknown.
        """
        hub_options = take_hub_options(kwargs)
        if kwargs and not return_unused_kwargs:
            raise ValueError(f"load_config has no argument {', '.join(sorted(kwargs))}")
        config = cls._read_config(pretrained_model_name_or_path, subfolder, revision, **hub_options)
        return (config, kwargs) if return_unused_kwargs else config

    def save_config(self, save_directory, push_to_hub=False):
        """Write the config file alone, as PyTorch reads it."""
        refuse_push_to_hub(push_to_hub)
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / self.config_name, self._file_content())

    def to_json_string(self):
        """The content of the config file."""
        return json_text(self._file_content())

    def to_json_file(self, json_file_path):
        """Write to_json_string() to a file."""
        Path(json_file_path).write_text(self.to_json_string(), encoding="utf-8")


def refuse_push_to_hub(push_to_hub):
    """Raise a ValueError if a published push_to_hub argument is True."""
    if push_to_hub:
        raise ValueError("push_to_hub=True is not supported; save, then `hf upload` the folder")


def take_hub_options(kwargs):
    """Remove what concerns the Hub from keyword arguments.

    Returns:
        {name: value} for huggingface_hub.hf_hub_download.

    Raises:
        ValueError: proxies is given, which the Hub client no longer takes.
    """
    kwargs.pop("resume_download", None)  # downloads always resume
    if (token := kwargs.pop("use_auth_token", None)) is not None:  # the old name
        kwargs.setdefault("token", token)
    if kwargs.pop("proxies", None) is not None:
        raise ValueError("proxies= is not supported; set the environment variable HTTPS_PROXY")
    names = ("cache_dir", "force_download", "local_files_only", "token")
    return {name: kwargs.pop(name) for name in names if name in kwargs}


def place_in_words(source, subfolder, revision):
    """Where files are looked for, in words."""
    where = f"{source}{f'/{subfolder}' if subfolder else ''}"
    if os.path.isdir(source):
        return where
    return f"{where} (no folder here, so looked up on the Hub, revision {revision or 'main'})"


def fetch_file(source, name, subfolder, revision, **hub_options):
    """Path of one file of a folder or Hub repository, downloaded if need be; None if absent.

    hub_options: see take_hub_options.
    """
    if os.path.isdir(source):
        file = Path(source, subfolder or "", name)
        return file if file.is_file() else None
    try:
        return Path(
            hf_hub_download(
                str(source), name, subfolder=subfolder or None, revision=revision, **hub_options
            )
        )
    except EntryNotFoundError:  # not in the repository, or offline and not in the cache
        return None
    except HFValidationError:
        raise ValueError(
            f"{source} is no folder here and cannot be a Hub id (owner/name); check the path"
        ) from None
    except HfHubHTTPError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{source} is no folder here, and the Hub refuses it: {reason}") from error


@functools.cache
def warn_once(message):
    """Log a warning the first time it is given."""
    logger.warning(message)


def read_json(file):
    """The JSON object in file; a ValueError that names the file if there is none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # RecursionError: brackets in brackets
        raise ValueError(f"{file} is not valid JSON ({error}); fetch it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds no JSON object; fetch it again")
    return content


def write_json(file, content):
    """Write content, readable, to file."""
    file.write_text(json_text(content), encoding="utf-8")


def json_text(content):
    """Content as the text of a JSON file."""
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


class ModelOutput(OrderedDict):
    """Base of output dataclasses: a dict of the fields that are not None, in the order of fields.

    Values are read by attribute, name, index or slice. Iteration gives names, as in any dict;
    to_tuple() gives values. With flax.struct.dataclass an output is a pytree of all its fields.
    """

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                super().__setitem__(field.name, value)

    def __getitem__(self, key: str | int | slice) -> Any:
        """The value of a name, or entries of to_tuple()."""
        return super().__getitem__(key) if isinstance(key, str) else self.to_tuple()[key]

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in {field.name for field in fields(self)}:
            raise KeyError(f"{type(self).__name__} has no field {name!r}")
        super().__setitem__(name, value)
        object.__setattr__(self, name, value)

    def to_tuple(self) -> tuple:
        """The values that are not None, in the order of the fields."""
        return tuple(self.values())

    def __reduce__(self):  # copy and pickle by fields
        return type(self), tuple(getattr(self, field.name) for field in fields(self))

    def _refuse(self, *args, **kwargs):
        raise TypeError(f"{type(self).__name__} has fixed fields; use replace(name=value)")

    __delitem__ = pop = popitem = setdefault = update = clear = _refuse
