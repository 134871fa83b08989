"""Configs: in memory, and as JSON files in the directories of models, schedulers and pipelines."""

from pathlib import Path

from diffusers_flax.loading.files import json_text, write_json
from diffusers_flax.loading.hub import (
    fetch_config,
    open_source,
    place_in_words,
    refuse_push_to_hub,
    take_hub_options,
)
from diffusers_flax.loading.single_file import SINGLE_FILE_SUFFIXES, SingleFile

# Fields of a Flax module that are not part of its config.
RUNTIME_FIELDS = {
    "dtype",
    "gradient_checkpointing",
    "name",
    "parent",
    "rows_axis",
    "split_head_dim",
    "tile",
    "use_memory_efficient_attention",
}


class FrozenConfig(dict):
    """The read-only config of a model or scheduler: a dict whose entries are attributes too."""

    def __init__(self, entries):
        super().__init__(entries)
        vars(self).update((name, x) for name, x in self.items() if not hasattr(dict, name))

    def __getattr__(self, name):
        raise AttributeError(f"config has no entry {name!r}; it has {', '.join(self)}")

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
    """The methods of models, schedulers and pipelines for their config file.

    A subclass has `config_name`, the file's name, and `_file_content`, which returns the content.
    """

    config_name = "config.json"
    also_opens = ()  # other PyTorch classes whose files have this model
    # Published attributes.
    has_compatibles = False
    ignore_for_config = ()
    _deprecated_kwargs = ()

    @classmethod
    def _read_config(cls, path, subfolder=None, revision=None, **hub_options):
        content, file = fetch_config(path, cls.config_name, subfolder, revision, **hub_options)
        if file is None:
            where = place_in_words(path, subfolder, revision)
            raise ValueError(f"no {cls.config_name} in {where}; check the path")
        return content

    @classmethod
    def check_class(cls, config, source):
        """Raise a ValueError for another class's config; source: its file, for the error."""
        class_names = config.get("_class_name") or config.get("architectures") or []
        class_names = class_names if isinstance(class_names, list) else [class_names]
        accepted = {cls.__name__, cls.torch_class_name, f"Flax{cls.torch_class_name}"}
        accepted.update(cls.also_opens)
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
            return_unused_kwargs: True also returns unknown arguments.
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


class FromSingleFile:
    """from_single_file of pipelines and models; single_file_component: None for a pipeline."""

    single_file_component = None

    @classmethod
    def from_single_file(
        cls,
        pretrained_model_link_or_path,
        config=None,
        use_ema_weights=False,
        dtype=None,
        revision=None,
        **kwargs,
    ):
        """Read a model of the original layout: one .safetensors or .ckpt. Needs PyTorch, diffusers.

        Args:
            pretrained_model_link_or_path: a file, or one of the hub: "owner/name/FILE" or
                its address "https://huggingface.co/owner/name/blob/main/FILE".
            config: directory or hub id with the configs and the tokenizer; None: the published
                model of the file's family, from the hub or its cache.
            use_ema_weights: True reads the averages of the UNet's weights.
            dtype: compute dtype, None: float32.
            revision: branch, tag or commit of the hub's file.
            **kwargs: as for from_pretrained; param_dtype=None is the dtype of the file.

        Returns:
            As from_pretrained.

        Raises:
            ValueError: the file is missing, damaged or no such model, or there are no configs.
        """
        hub_options = take_hub_options(kwargs)
        model, component = pretrained_model_link_or_path, cls.single_file_component
        options = (component, config, use_ema_weights, revision)
        source = open_source("pretrained_model_link_or_path", model, *options, **hub_options)
        if not isinstance(source, SingleFile):
            raise ValueError(
                f"{source} is not one of {', '.join(SINGLE_FILE_SUFFIXES)}; from_pretrained opens "
                "directories and hub ids"
            )
        if dtype is not None:  # models do not take None for their default
            kwargs["dtype"] = dtype
        return cls.from_pretrained(source, **kwargs, **hub_options)
