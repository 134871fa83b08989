"""FlaxModelMixin: from_pretrained, save_pretrained and config of the Flax models.

unet, params = FlaxUNet2DConditionModel.from_pretrained("my_model", subfolder="unet")
unet.save_pretrained("copy/unet", params)
"""

import dataclasses
import functools
import os
import shutil
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax.serialization import msgpack_serialize
from flax.traverse_util import flatten_dict, unflatten_dict

from diffusers_flax.loading.configs import RUNTIME_FIELDS, ConfigMixin, FrozenConfig
from diffusers_flax.loading.files import write_json
from diffusers_flax.loading.hub import (
    fetch_config,
    fetch_file,
    place_in_words,
    refuse_push_to_hub,
    take_hub_options,
)
from diffusers_flax.loading.single_file import SingleFile
from diffusers_flax.loading.weights import (
    WEIGHT_FILES,
    as_stored,
    find_weights,
    read_weights,
    weights_pattern,
    write_safetensors,
)
from diffusers_flax.messages import first_names, reason_of, warn_once
from diffusers_flax.models.quantization import (
    INT8_FILES,
    check_stored,
    scale_name,
    storage_of,
    store_array,
)
from diffusers_flax.parameters import (
    FloatingCasts,
    is_stored_array,
    warn_of_float16,
)

# Keys of transformers' config.json that describe the file, not the model.
FILE_KEYS = "architectures", "model_type", "dtype", "torch_dtype", "transformers_version"
FILE_KEYS += ("quantization_config",)  # see quantization.check_stored


def lists_to_tuples(value):
    """Linen modules must be hashable, so their fields hold tuples."""
    return tuple(map(lists_to_tuples, value)) if isinstance(value, list | tuple) else value


class FlaxModelMixin(ConfigMixin, FloatingCasts):
    """Loading, saving, config and casts of all models.

    A model is a Linen module whose dataclass fields are config.json entries, with a method
    `init_weights(rng) -> params` and these class attributes, which have no annotation, as that
    would make them fields:

        weights_name: "diffusion_pytorch_model" (diffusers) or "model" (transformers).
        torch_class_name: the PyTorch class that opens the same directory.
        model_type: a transformers config's, else None.
        is_trained: True: from_pretrained warns that float16 parameters cannot be trained.
        fixed_config: {config key that is not implemented: the only supported value}.
        ignored_config: config keys without effect on the numbers.
        choices: {field: its supported values}, which check_choices checks.
    """

    weights_name = "diffusion_pytorch_model"
    torch_class_name = None
    model_type = None
    is_trained = False
    fixed_config = {}  # noqa: RUF012 - an annotation would make it a dataclass field
    ignored_config = ()
    choices = {}  # noqa: RUF012

    def check_choices(self):
        """Raise a ValueError for a config entry that is not implemented."""
        for name, supported in self.choices.items():
            if (value := getattr(self, name)) not in supported:
                known = " and ".join("null" if x is None else repr(x) for x in supported)
                raise ValueError(f"{name}={value!r} is not supported, only {known}")

    @property
    def config(self):
        """The model's entries of config.json, read-only; lists are tuples."""
        return FrozenConfig(self.config_fields())

    def config_fields(self):
        """The fields that are entries of config.json, a dict; lists are tuples."""
        names = [field.name for field in dataclasses.fields(self)]
        return {n: lists_to_tuples(getattr(self, n)) for n in names if n not in RUNTIME_FIELDS}

    @classmethod
    def entry_names(cls):
        """The names of the entries of config.json that a module is made of."""
        return cls.__dataclass_fields__.keys() - RUNTIME_FIELDS | {*cls.fixed_config}

    def init_weights(self, rng):
        """Random float32 parameters. rng: a PRNG key."""
        raise NotImplementedError

    @classmethod
    def own_config(cls, config):
        """The model's entries in a config.json's content, which may be a larger model's."""
        return config

    @classmethod
    def path_in_tree(cls, path, config):
        """The path in the tree of a file's parameter, joined by "/"; None: it is no parameter.

        path: from torch_to_flax; config: the content of the config.json beside the file.
        """
        return path

    @classmethod
    def from_config(cls, config=None, return_unused_kwargs=False, **overrides):
        """Build the module, without parameters, from the content of a config.json.

        Args:
            config: mapping, or a directory or hub id (then also subfolder= and revision=); missing
                entries have the module's defaults.
            return_unused_kwargs: True returns (module, {unknown overrides}).
            **overrides: entries that win over `config`, and dtype=, gradient_checkpointing=.

        Returns:
            The module.

        Raises:
            ValueError: an entry is not implemented, or an override is unknown.
        """
        if isinstance(config, str | Path):
            places = {name: overrides.pop(name, None) for name in ("subfolder", "revision")}
            config = cls.load_config(config, **places, **take_hub_options(overrides))
        fields = {field.name for field in dataclasses.fields(cls)}
        settings, unused = {}, {}
        for key, value in {**(config or {}), **overrides}.items():
            value = lists_to_tuples(value)
            if key in cls.fixed_config:
                supported = cls.fixed_config[key]
                if value is not None and value != lists_to_tuples(supported):
                    raise ValueError(
                        f"{cls.__name__} does not implement {key}={value!r}; "
                        f"it supports {key}={supported!r} only"
                    )
            elif key in fields and (key not in RUNTIME_FIELDS or key in overrides):
                settings[key] = value
            elif key in overrides and return_unused_kwargs:
                unused[key] = value
            elif key[0] == "_" or key in (*cls.ignored_config, *FILE_KEYS):
                continue
            elif key in overrides:
                known = ", ".join(sorted(fields - {"parent", "name"}))
                raise ValueError(f"{cls.__name__} has no setting {key!r}; it has {known}")
            else:
                warn_once(f"{cls.__name__} does not know the config key {key!r}: ignored")
        module = cls(**settings)
        return (module, unused) if return_unused_kwargs else module

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path,
        dtype=jnp.float32,
        *,
        param_dtype=None,
        subfolder=None,
        revision=None,
        variant=None,
        from_pt=False,
        config=None,
        convert=None,
        storage=None,
        **config_overrides,
    ):
        """Read config.json and the weights in the same directory.

        Args:
            pretrained_model_name_or_path: a directory, or a hub id ("owner/name"); or, with config,
                a file of weights.
            dtype: compute dtype of the module, to which it casts parameters where it uses them.
            param_dtype: dtype of the parameters: jnp.float32 to train, jnp.bfloat16 or jnp.float16
                to sample with half the memory; stored kernels and their scales have their own.
                None: as in the files, float8 included.
            subfolder: the model's directory in a pipeline, e.g. "unet".
            revision: branch, tag or commit on the hub.
            variant: middle of the weights' file name, e.g. "fp16"; if there are no such files, the
                weights without a variant are read, with a warning.
            from_pt: True reads PyTorch's files only (safetensors, .bin), not Flax msgpack.
            config: mapping that replaces config.json, or its directory or hub id.
            convert: (path joined by "/", array) -> array, called for each parameter as it is read.
            storage: "float8" or "int8" kernels, see models.quantization.store; None: as in the
                files, which must not be int8.
            **config_overrides: config entries that win over config.json; and cache_dir,
                force_download, local_files_only, token of huggingface_hub.hf_hub_download.

        Returns:
            (module, params): params is a nested dict of JAX arrays on the host's CPU device;
            jax.device_put(params, jax.devices()[0]), or replicate, moves them to an accelerator.

        Raises:
            ValueError: files are missing, damaged, outside the directory or another class's, or the
                weights do not fit the config; the message names the file and all problems. Or
                storage is unknown.
        """
        param_dtype = param_dtype and jnp.dtype(param_dtype)
        source, hub_options = pretrained_model_name_or_path, take_hub_options(config_overrides)
        component = None
        if isinstance(source, SingleFile):
            component = subfolder or source.component or getattr(cls, "single_file_component", None)
            if component not in source.prefixes:
                source, subfolder, revision, component = source.without_component(component)
        place = {"subfolder": subfolder, "revision": revision, **hub_options}
        if isinstance(config, str | Path):
            config = cls.load_config(config)
        where = place_in_words(source, subfolder, revision)
        config_file = "config="
        if config is None:
            config, config_file = fetch_config(source, cls.config_name, **place)
        if config_file is None:
            raise ValueError(
                f"no config.json in {where}; give its directory or hub id, for a "
                'pipeline with subfolder="unet" (or "vae", "text_encoder")'
            )
        cls.check_class(config, config_file)
        check_stored(config, storage, where)
        try:
            module = cls.from_config(cls.own_config(config), **config_overrides, dtype=dtype)
            expected = module._param_shapes()  # finds config errors before a long download
        except Exception as error:  # a bad size may fail anywhere in the model
            raise ValueError(
                f"{cls.__name__} cannot be built from {config_file}: {reason_of(error)}"
            ) from error

        files, read = [Path(source)], None
        if component is not None:
            read = functools.partial(source.read_component, component, module._file_content())
        elif not files[0].is_file():
            fetch = functools.partial(fetch_file, source, **place)
            files = find_weights(fetch, cls.weights_name, variant, from_pt, where)
        cpu, flat = jax.local_devices(backend="cpu")[0], {}
        kinds = (jnp.floating, np.int8) if storage == "int8" else (jnp.floating,)
        for file in files:
            for key, array in read_weights(file, read, kinds):
                key = cls.path_in_tree(key, config)
                # PyTorch's from_single_file leaves out what it does not know, too.
                if key is None or (component is not None and key not in expected):
                    continue
                if param_dtype is not None and array.dtype != np.int8:
                    array = array.astype(np.float32, copy=False)  # convert adds in float32
                array = array if convert is None else convert(key, array)
                for name, x in store_array(key, array, storage).items():
                    if param_dtype is not None and not is_stored_array(name, x):
                        x = x.astype(param_dtype, copy=False)
                    # A copy, so that a program may overwrite (donate) it.
                    flat[name] = jax.device_put(x, cpu, may_alias=False)
        where = str(files[0]) if len(files) == 1 else f"{files[0]} and its other shards"
        module._check_params(flat, expected, where)
        params = unflatten_dict(flat, sep="/")
        if cls.is_trained and param_dtype is None and convert is None:
            warn_of_float16(params, cls.torch_class_name)
        return module, params

    def save_pretrained(
        self,
        save_directory,
        params,
        is_main_process=True,
        push_to_hub=False,
        *,
        variant=None,
        dtype=None,
        flax_msgpack=False,
        max_shard_size="10GB",
    ):
        """Write config.json and the weights; PyTorch's from_pretrained opens the directory.

        Files have temporary names until all are complete, so an interrupted save changes nothing.
        Shards and index of an earlier save are removed.

        Args:
            save_directory: directory, made if absent.
            params: nested dict of NumPy or JAX arrays, not replicated over devices.
            is_main_process: False writes nothing.
            push_to_hub: must be False; `hf upload` sends a directory to the hub.
            variant: as for from_pretrained, e.g. "fp16".
            dtype: of the file; None: each array's own.
            flax_msgpack: True also writes the published Flax msgpack, without a variant.
            max_shard_size: largest safetensors file, in bytes or as "5GB", for which there must be
                memory besides params. Larger weights are shards with an index.

        Raises:
            ValueError: params are not this model's.
        """
        refuse_push_to_hub(push_to_hub)
        if not is_main_process:
            return
        flat = flatten_dict(params, sep="/")
        self._check_params(flat, self._param_shapes(), "params")
        dot_variant = f".{variant}" if variant else ""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as tmp:
            tmp = Path(tmp)
            is_int8 = storage_of(params) == "int8"
            content = {"quantization_config": INT8_FILES} if is_int8 else {}
            write_json(tmp / "config.json", self._file_content() | content)
            write_safetensors(tmp, flat, self.weights_name, dot_variant, dtype, max_shard_size)
            for file in tmp.glob("*.safetensors"):
                shutil.copymode(tmp / "config.json", file)  # safetensors leaves 0600
            if flax_msgpack:
                tree = unflatten_dict({k: as_stored(x, dtype) for k, x in flat.items()}, sep="/")
                file = tmp / WEIGHT_FILES[self.weights_name][2]
                file.write_bytes(msgpack_serialize(tree))
            # The directory may have other files, so save_whole cannot replace it.
            written = {file.name for file in tmp.iterdir()}
            for name in written:
                os.replace(tmp / name, folder / name)

        # PyTorch would prefer a left-over index to the new single file.
        for file in folder.iterdir():
            is_old = weights_pattern(self.weights_name, dot_variant).fullmatch(file.name)
            if is_old and file.name not in written:
                file.unlink()

    def _file_content(self):
        """The config.json for PyTorch, with fixed_config."""
        fixed = {key: value for key, value in self.fixed_config.items() if value is not None}
        header = {"_class_name": self.torch_class_name}
        if self.weights_name == "model":
            header = {"architectures": [self.torch_class_name], "model_type": self.model_type}
            header["dtype"] = "float32"  # without it transformers computes in the weights'
        return {**header, **fixed, **self.config_fields()}

    def _param_shapes(self):
        """{path joined by "/": shape} of all parameters; nothing is computed."""
        return _trace_shapes(type(self)(**self.config_fields()))

    def _check_params(self, flat, expected, where):
        """Raise one ValueError that names every missing, unexpected or mis-shaped parameter."""
        found = {key: np.shape(array) for key, array in flat.items()}
        int8 = {key for key, array in flat.items() if array.dtype == np.int8} & expected.keys()
        expected = expected | {scale_name(key): expected[key][-1:] for key in int8}
        misshaped = sorted(k for k in expected.keys() & found.keys() if expected[k] != found[k])
        groups = {
            "missing": sorted(expected.keys() - found.keys()),
            "unexpected": sorted(found.keys() - expected.keys()),
            "wrong shape": [f"{k} is {found[k]}, model has {expected[k]}" for k in misshaped],
        }
        problems = [f"{name}: {first_names(keys)}" for name, keys in groups.items() if keys]
        if problems:
            raise ValueError(f"{where} does not fit {type(self).__name__}: {'; '.join(problems)}")


@functools.cache  # loading and saving share it; tracing a large model takes seconds
def _trace_shapes(module):
    params = jax.eval_shape(lambda: module.init_weights(jax.random.key(0)))
    return {key: leaf.shape for key, leaf in flatten_dict(params, sep="/").items()}
