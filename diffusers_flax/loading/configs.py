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
import math
import os
import re
import shutil
import tempfile
import typing
from collections import OrderedDict
from contextlib import contextmanager, suppress
from dataclasses import fields
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import constants, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError

from diffusers_flax.loading.files import one_line
from diffusers_flax.loading.hub import hub_answers

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
    # Tiny autoencoders in place of the VAE of Stable Diffusion and SDXL: all entries are defaults.
    "taesd": {"vae": {}},
    "taesdxl": {"vae": {}},
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
            where = place_in_words(path, subfolder, revision)
            raise ValueError(f"no {cls.config_name} in {where}; check the path, or copy it again")
        return read_json(file)

    @classmethod
    def check_class(cls, config, source):
        """Raise a ValueError if a config is of another class; source: its file, for the error."""
        class_names = config.get("_class_name") or config.get("architectures") or []
        class_names = class_names if isinstance(class_names, list) else [class_names]
        accepted = {cls.__name__, cls.torch_class_name, f"Flax{cls.torch_class_name}"}
        if class_names and not accepted.intersection(map(str, class_names)):
            raise ValueError(
                f"{source} is the config of {class_names[0]}, not of {cls.torch_class_name}, "
                f"which {cls.__name__} needs; open another directory or another class"
            )

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
            pretrained_model_name_or_path: directory or hub id.
            return_unused_kwargs: True also returns the arguments that are not known.
            subfolder: directory inside it.
            revision: branch, tag or commit on the hub.
            **kwargs: see take_hub_options.

        Returns:
            The content, a dict; with return_unused_kwargs (dict, dict).

        Raises:
            ValueError: the file is missing or not a JSON object, or an argument is unknown.
        """
        hub_options = take_hub_options(kwargs)
        if kwargs and not return_unused_kwargs:
            raise ValueError(f"load_config has no argument {', '.join(sorted(kwargs))}")
        config = cls._read_config(pretrained_model_name_or_path, subfolder, revision, **hub_options)
        return (config, kwargs) if return_unused_kwargs else config

    def save_config(self, save_directory, push_to_hub=False):
        """Write only the config file, as PyTorch reads it."""
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
        raise ValueError("push_to_hub=True is not supported; save, then `hf upload` the directory")


def take_hub_options(kwargs):
    """Remove the hub's options from keyword arguments.

    Returns:
        {name: value} for huggingface_hub.hf_hub_download.

    Raises:
        ValueError: proxies is given, which the hub client does not take.
    """
    kwargs.pop("resume_download", None)  # downloads always resume
    if (token := kwargs.pop("use_auth_token", None)) is not None:  # the old name
        kwargs.setdefault("token", token)
    if kwargs.pop("proxies", None) is not None:
        raise ValueError("proxies= is not supported; set the environment variable HTTPS_PROXY")
    names = ("cache_dir", "force_download", "local_files_only", "token")
    return {name: kwargs.pop(name) for name in names if name in kwargs}


def place_in_words(source, subfolder, revision):
    """Describe for an error message where files are searched."""
    where = f"{source}{f'/{subfolder}' if subfolder else ''}"
    if os.path.isdir(source):
        return where
    return f"{where} (not a directory, so looked up on the hub, revision {revision or 'main'})"


def fetch_file(source, name, subfolder, revision, **hub_options):
    """Path of a file of a directory or hub repository, downloaded if necessary; None if missing.

    hub_options: see take_hub_options.
    """
    if os.path.isdir(source):
        file = Path(source, subfolder or "", name)
        return file if file.is_file() else None
    try:
        offline = constants.HF_HUB_OFFLINE or hub_options.get("local_files_only")
        if not offline and not hub_answers(str(source), name, hub_options.get("token")):
            hub_options["local_files_only"] = True
        return Path(
            hf_hub_download(
                str(source), name, subfolder=subfolder or None, revision=revision, **hub_options
            )
        )
    except EntryNotFoundError:  # not in the repository, or offline and not in the cache
        return None
    except HFValidationError:
        raise ValueError(
            f"{source} is not a directory and cannot be a hub id (owner/name); check the path"
        ) from None
    except HfHubHTTPError as error:
        message = f"{source} is not a directory, and the hub refuses it: {one_line(error)}"
        raise ValueError(message) from error


def fetch_directory(source, names, subfolder=None, revision=None, **hub_options):
    """The directory that has files of a directory or hub repository; missing files are left out.

    transformers, given a hub id, asks the hub for many files more, and waits for each of them.

    Raises:
        ValueError: none of the files exists.
    """
    files = [fetch_file(source, name, subfolder, revision, **hub_options) for name in names]
    if not any(files):
        where = place_in_words(source, subfolder, revision)
        raise ValueError(f"there is no {names[0]} in {where}")
    return next(file.parent for file in files if file)


def locate(flag, source):
    """(directory or hub id, name of the file or None) of the value of a flag.

    source: file, directory, or hub id, owner/name or owner/name/FILE; a ValueError if it is none.
    """
    path = Path(source).expanduser()
    if path.is_file():
        return str(path.parent), path.name
    if path.is_dir():
        return str(path), None
    owner, _, rest = str(source).partition("/")
    repository, _, file = rest.partition("/")
    is_file = repository.endswith(WEIGHTS_SUFFIXES) or (file and path.parent.is_dir())
    if not (owner and repository) or owner.startswith((".", "~")) or is_file:
        raise ValueError(f"{flag} {source} does not exist; check the path")
    return f"{owner}/{repository}", file or None


def fetch_source(flag, source, **hub_options):
    """Path of the file that a flag names, downloaded if necessary; else the directory or hub id.

    flag, source: as for locate; hub_options: see take_hub_options.
    """
    repository, name = locate(flag, source)
    if name is None:
        return repository
    file = fetch_file(repository, name, None, None, **hub_options)
    if file is None:
        raise ValueError(
            f"{flag} {source}: neither the hub nor the cache has {name} of {repository}"
        )
    return file


@functools.cache
def warn_once(message):
    """Log a warning, once per process."""
    logger.warning(message)


def read_json(file):
    """Read a JSON object from a file; raise a ValueError that names the file if it has none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # RecursionError: brackets in brackets
        raise ValueError(f"{file} is not valid JSON ({error}); fetch it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} is not a JSON object; fetch it again")
    return content


def write_json(file, content):
    """Write content to a JSON file, indented."""
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


# Types of entries


def lists_to_tuples(value):
    """Linen modules must be hashable, so their fields hold tuples."""
    return tuple(map(lists_to_tuples, value)) if isinstance(value, list | tuple) else value


def types_of(annotation):
    """The types in an annotation such as int | tuple | None."""
    return typing.get_args(annotation) or (annotation,)


def has_type(value, annotation):
    """Whether a value of JSON is of a field's type; 1 is also a float, true is not an int."""
    kinds = types_of(annotation)
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, (*kinds, int) if float in kinds else kinds)


# A shard is in the directory of its index: letters, digits and a few signs, no path.
SHARD_NAME = re.compile(r"\w[\w.+ -]{0,254}", re.ASCII)


def shard_names(index):
    """The names of the files that an index of a sharded checkpoint lists, sorted.

    Args:
        index: Path of a *.index.json.

    Raises:
        ValueError: it lists no files, or a file in another directory.
    """
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has no weight_map from tensors to files; fetch it again")
    for name in weight_map.values():
        if not isinstance(name, str) or not SHARD_NAME.fullmatch(name):
            raise ValueError(
                f"{index} lists the shard {name!r}, which is not a file name in its directory; "
                "fetch it again, from a source that you trust"
            )
    return sorted(set(weight_map.values()))


# Options of the schedulers

# Options every scheduler has, and the values that some of them may take.
DEFAULTS = {
    "num_train_timesteps": 1000,
    "beta_start": 0.0001,
    "beta_end": 0.02,
    "beta_schedule": "linear",
    "trained_betas": None,
    "prediction_type": "epsilon",
    "timestep_spacing": "leading",
    "steps_offset": 0,
}
CHOICES = {
    "beta_schedule": ("linear", "scaled_linear", "squaredcos_cap_v2"),
    "prediction_type": ("epsilon", "v_prediction", "sample"),
    "timestep_spacing": ("leading", "linspace", "trailing"),
}
# The first arguments of all constructors; the arguments of a class follow.
FIRST_ARGUMENTS = (
    "num_train_timesteps",
    "beta_start",
    "beta_end",
    "beta_schedule",
    "trained_betas",
)
# Options are of their default's type; those without a default are numbers.
TYPES = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
SMALLEST_SIGMA = 1e-6
RANGES = {
    "num_train_timesteps": (1, math.inf),
    "beta_start": (0, 1),
    "beta_end": (0, 2),  # above 1 only the timesteps before beta reaches 1 are usable
    "sigma_min": (SMALLEST_SIGMA, math.inf),
    "sigma_max": (SMALLEST_SIGMA, math.inf),
    "original_inference_steps": (1, math.inf),
}


def checked_option(name, value, default):
    """The value as its default's type; a ValueError if it is not of that type or out of range.

    An integer may be written as 1.0, and true or false as 1 or 0.
    """
    if name == "trained_betas":
        is_array = isinstance(value, list | tuple) or np.ndim(value) > 0
        if not is_array or not all(isinstance(beta, Real) for beta in np.asarray(value).tolist()):
            raise ValueError("trained_betas must be a list of numbers, one per training timestep")
        betas = np.asarray(value)
        if not ((betas >= 0) & (betas <= 1)).all():
            raise ValueError("trained_betas has values outside 0 to 1; give variances")
        return tuple(map(float, betas))
    kind = float if default is None else type(default)
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if kind is bool and is_number and value in (0, 1):
        return bool(value)
    if kind is int and is_number and math.isfinite(value) and value == int(value):
        value = int(value)
    elif kind is int or not (is_number if kind is float else isinstance(value, kind)):
        raise ValueError(f"{name}={value!r} has the wrong type, it must be {TYPES[kind]}")
    lowest, highest = RANGES.get(name, (-math.inf, math.inf))
    if kind in (int, float) and not lowest <= value <= highest:
        limits = f"at least {lowest}" if highest == math.inf else f"from {lowest} to {highest}"
        raise ValueError(f"{name}={value!r} must be {limits}")
    return value


# Pipeline directories

INDEX_NAME = "model_index.json"
WEIGHTS_SUFFIXES = (".safetensors", ".bin", ".msgpack")
LORA_FILE = "pytorch_lora_weights.safetensors"  # PyTorch diffusers' name
CONV_IN_FILE = "conv_in.safetensors"  # of training with LoRA: the first convolution, in full
# The file that shows that a part of a pipeline directory exists.
PART_FILES = {
    **dict.fromkeys(("unet", "vae", "text_encoder", "text_encoder_2"), "config.json"),
    **dict.fromkeys(("tokenizer", "tokenizer_2"), "tokenizer_config.json"),
    "scheduler": "scheduler_config.json",
}
PARTS = {*PART_FILES, "safety_checker", "feature_extractor"}


def index_names(stem, suffix, dot_variant=""):
    """Names of the index of a sharded checkpoint: today's, diffusers' older one, huggingface_hub's.

    Args:
        stem, suffix: of the single file, "model" and "safetensors".
        dot_variant: "" or the variant with its dot, ".fp16".
    """
    return list(
        dict.fromkeys(
            (
                f"{stem}.{suffix}.index{dot_variant}.json",
                f"{stem}.{suffix}{dot_variant}.index.json",
                f"{stem}{dot_variant}.{suffix}.index.json",
            )
        )
    )


def weights_pattern(stem, dot_variant=""):
    """Pattern of the safetensors files of a model: single, sharded, index, under all names.

    Args:
        stem: weights_name.
        dot_variant: as for index_names.
    """
    variant, number = re.escape(dot_variant), r"(-\d{5}-of-\d{5})?"
    files = [f"{stem}({variant}{number}|{number}{variant})[.]safetensors"]
    indices = [re.escape(name) for name in index_names(stem, "safetensors", dot_variant)]
    return re.compile("|".join(files + indices))


def read_index(path, revision=None, **hub_options):
    """The content of model_index.json; arguments and errors as of read_parts."""
    index = fetch_file(path, INDEX_NAME, None, revision, **hub_options)
    if index is None:
        if os.path.exists(os.path.join(path, LORA_FILE)):
            raise ValueError(
                f"{path} has a LoRA and no model_index.json; repeat the training command with "
                "--merge_lora, which writes a whole pipeline"
            )
        found = (
            ""
            if os.path.isdir(path)
            else " (it is no directory, and neither the hub nor the cache has the file of revision "
            f"{revision or 'main'})"
        )
        raise ValueError(
            f"{path} has no model_index.json{found}; give the directory or hub id of a "
            "complete pipeline"
        )
    return read_json(index)


def has(index, part):
    """Whether a model_index.json lists a part."""
    return (index.get(part) or [None])[0] is not None


def read_parts(path, parts, revision=None, given=None, **hub_options):
    """Read the settings of a pipeline directory, no weights.

    Args:
        path: directory or hub id.
        parts: names, keys of PART_FILES, or a function that picks them from model_index.json.
        revision: branch, tag or commit on the hub.
        given: {part: its config} of parts that replace the directory's, which are not read.
        hub_options: see fetch_file.

    Returns:
        (model_index.json's content; {part: the content of its PART_FILES, or the given config}).

    Raises:
        ValueError: the pipeline or some of its parts are missing.
    """
    index = read_index(path, revision, **hub_options)
    parts, given = parts(index) if callable(parts) else parts, given or {}
    files = {
        part: fetch_file(path, PART_FILES[part], part, revision, **hub_options)
        for part in parts
        if part not in given
    }
    if missing := [f"{part}/{PART_FILES[part]}" for part, file in files.items() if file is None]:
        raise ValueError(f"{path} lacks {', '.join(missing)}; copy or download it again")
    configs = {part: read_json(file) for part, file in files.items()}
    if "vae" in files and not isinstance(configs["vae"].get("block_out_channels"), list):
        raise ValueError(f"{files['vae']} has no list block_out_channels; download it again")
    return index, configs | given


@contextmanager
def writing_pipeline(save_directory):
    """Yield an empty directory for a pipeline, then move its files into save_directory.

    Only files are moved, so save_directory may be a mount point or a link to a directory. An old
    model_index.json is removed first and the new one is moved last: a directory that has one is
    complete. Other files in save_directory are not changed.

    If the caller fails, save_directory is not changed. If a file cannot be moved, it stays in
    save_directory/.saving-*.

    Args:
        save_directory: directory, made if absent.

    Yields:
        Path of an empty directory.

    Raises:
        ValueError: save_directory has a file where the model has a directory, or the reverse. The
            old model is unchanged, and the message names the place of the new one.
    """
    folder = Path(save_directory).resolve()
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    written = Path(tempfile.mkdtemp(dir=folder, prefix=".saving-"))
    try:
        yield written
    except BaseException:
        shutil.rmtree(written)
        if is_new:
            with suppress(OSError):  # another process has put a file there
                folder.rmdir()
        raise
    for new in sorted(written.rglob("*")):
        path = new.relative_to(written)
        old = folder / path
        if old.exists() and old.is_dir() != new.is_dir():
            raise ValueError(
                f"{old} is in the way of the model's {path}; remove it and save again, or take the "
                f"complete model from {written}"
            )
    files = [file.relative_to(written) for file in written.rglob("*") if file.is_file()]
    (folder / INDEX_NAME).unlink(missing_ok=True)
    # PyTorch prefers the index of an earlier save to a single file.
    old_weights = [weights_pattern(stem) for stem in ("diffusion_pytorch_model", "model")]
    for part in {file.parts[0] for file in files if len(file.parts) > 1}:
        for old in (folder / part).glob("*"):
            if any(pattern.fullmatch(old.name) for pattern in old_weights):
                old.unlink()
    for file in sorted(files, key=lambda file: (file.name == INDEX_NAME, file)):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.move(written / file, folder / file)  # copies if a part is on another disk
    shutil.rmtree(written)
