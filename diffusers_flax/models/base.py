"""from_pretrained and save_pretrained for the Flax models: files on disk <-> a parameter tree.

Reads safetensors (one file, sharded, with a variant), PyTorch .bin and the published Flax msgpack,
from a directory or from the Hugging Face Hub. Writes what PyTorch diffusers and transformers open.

    unet, params = FlaxUNet2DConditionModel.from_pretrained("my_model", subfolder="unet")
    unet.save_pretrained("copy/unet", params)
"""

import dataclasses
import functools
import json
import mmap
import os
import re
import shutil
import tempfile
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import msgpack
import numpy as np
from flax.serialization import msgpack_restore, msgpack_serialize
from flax.traverse_util import flatten_dict, unflatten_dict
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import safe_open
from safetensors.numpy import save_file

from diffusers_flax.loading.configs import (
    ConfigMixin,
    FrozenConfig,
    has_type,
    lists_to_tuples,
    types_of,
)
from diffusers_flax.loading.files import read_json, write_json
from diffusers_flax.loading.hub import (
    fetch_file,
    place_in_words,
    refuse_push_to_hub,
    take_hub_options,
)
from diffusers_flax.loading.weights import index_names, shard_names, weights_pattern
from diffusers_flax.messages import one_line, warn_once

# By `weights_name`: the file names to look for, in this order.
WEIGHT_FILES = {
    "diffusion_pytorch_model": (
        "diffusion_pytorch_model.safetensors",
        "diffusion_pytorch_model.bin",
        "diffusion_flax_model.msgpack",
    ),
    "model": ("model.safetensors", "pytorch_model.bin", "flax_model.msgpack"),
}

# Fields of a Flax module that are not part of its config.
RUNTIME_FIELDS = {
    "dtype",
    "gradient_checkpointing",
    "name",
    "parent",
    "split_head_dim",
    "use_memory_efficient_attention",
}

# Keys of transformers' config.json that describe the file, not the model.
FILE_KEYS = {"architectures", "model_type", "dtype", "torch_dtype", "transformers_version"}

# Lists whose index the Flax trees join to the name; the index of CLIP's `layers` stays separate.
JOINED_LISTS = (
    "attentions|down_blocks|downsamplers|net|resnets|to_out|transformer_blocks|up_blocks|upsamplers"
)
TORCH_LIST = re.compile(rf"\b({JOINED_LISTS})\.(\d+)\b")
FLAX_LIST = re.compile(rf"\b({JOINED_LISTS})_(\d+)\b")

# Flax has older names of the VAE's attention than PyTorch.
VAE_ATTENTION = re.compile(r"(?:encoder|decoder)[./]mid_block[./]attentions")
VAE_TORCH_TO_FLAX = {
    ".to_q.": ".query.",
    ".to_k.": ".key.",
    ".to_v.": ".value.",
    ".to_out.0.": ".proj_attn.",
}

# safetensors' names of the dtypes that its NumPy API does not read.
FLOAT8 = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2}

# PyTorch's names of the dtypes that NumPy lacks: integers of their size.
TORCH_BITS = {"bfloat16": "int16", "float8_e4m3fn": "int8", "float8_e5m2": "int8"}

# transformers 5 saves CLIPTextModel without the published prefix (and loads it with or without);
# the safety checker's published prefix vision_model.vision_model becomes vision_model.
CLIP_WITHOUT_PREFIX = re.compile(
    r"embeddings\.|encoder\.layers\.\d+\.(layer_norm|mlp|self_attn)|final_layer_norm\."
)


def torch_to_flax(key, array):
    """Rename one PyTorch tensor to its place in the Flax tree and turn its axes.

    Args:
        key: name in a state dict of UNet2DConditionModel, AutoencoderKL, AutoencoderTiny,
            CLIPTextModel, CLIPTextModelWithProjection or StableDiffusionSafetyChecker, e.g.
            "down_blocks.0.resnets.1.conv1.weight".
        array: the tensor, NumPy; convolution OIHW, linear (out, in), anything of one axis.

    Returns:
        (path, array): path joined by "/", array a view; convolution HWIO, linear (in, out).
    """
    if CLIP_WITHOUT_PREFIX.match(key):
        key = f"text_model.{key}"
    if key.startswith("vision_model.") and not key.startswith("vision_model.vision_model."):
        key = f"vision_model.{key}"
    if VAE_ATTENTION.match(key):
        for torch_name, flax_name in VAE_TORCH_TO_FLAX.items():
            key = key.replace(torch_name, flax_name)
        if array.ndim == 4 and not key.endswith("group_norm.weight"):
            array = array[:, :, 0, 0]  # the oldest files have 1x1 convolutions here
    module, _, leaf = key.rpartition(".")
    if leaf == "weight":
        if module.endswith(("token_embedding", "position_embedding")):
            leaf = "embedding"
        elif array.ndim == 1:
            leaf = "scale"
        elif array.ndim == 2:
            leaf, array = "kernel", array.T
        elif array.ndim == 4:
            leaf, array = "kernel", array.transpose(2, 3, 1, 0)
    name = f"{module}.{leaf}" if module else leaf
    return TORCH_LIST.sub(r"\1_\2", name).replace(".", "/"), array


def flax_to_torch(key, array):
    """Rename one Flax parameter to its PyTorch state dict name; the inverse of torch_to_flax.

    Args:
        key: path in the Flax tree joined by "/", e.g. "down_blocks_0/resnets_1/conv1/kernel".
        array: the parameter, NumPy; convolution HWIO, linear (in, out), anything of one axis.

    Returns:
        (name, array): today's diffusers name, or CLIP's published one with its `text_model.`
        prefix, which every transformers opens; array a view; convolution OIHW, linear (out, in).
    """
    is_vae_attention = VAE_ATTENTION.match(key)
    key = FLAX_LIST.sub(r"\1.\2", key).replace("/", ".")
    if is_vae_attention:
        for torch_name, flax_name in VAE_TORCH_TO_FLAX.items():
            key = key.replace(flax_name, torch_name)
    module, _, leaf = key.rpartition(".")
    if leaf == "kernel":
        array = array.transpose(3, 2, 0, 1) if array.ndim == 4 else array.T
    if leaf in ("kernel", "scale", "embedding"):
        leaf = "weight"
    return f"{module}.{leaf}" if module else leaf, array


def cast_floating(params, dtype, mask=None):
    """Cast the floating-point arrays of a parameter tree.

    Args:
        params: tree of NumPy and JAX arrays.
        dtype: what to cast to.
        mask: tree of bools of the same structure; arrays marked False stay as they are. None
            casts all.

    Returns:
        A new tree.
    """

    if mask is None:
        mask = jax.tree.map(lambda _: True, params)

    def cast(array, is_selected):
        is_floating = jnp.issubdtype(array.dtype, jnp.floating)
        return array.astype(dtype) if is_selected and is_floating else array

    return jax.tree.map(cast, params, mask)


class FloatingCasts:
    """The published methods that cast parameters; see cast_floating."""

    def to_bf16(self, params, mask=None):
        """Parameters in bfloat16."""
        return cast_floating(params, jnp.bfloat16, mask)

    def to_fp16(self, params, mask=None):
        """Parameters in float16."""
        return cast_floating(params, jnp.float16, mask)

    def to_fp32(self, params, mask=None):
        """Parameters in float32."""
        return cast_floating(params, jnp.float32, mask)


class FlaxModelMixin(ConfigMixin, FloatingCasts):
    """Loading, saving, config and casts of all models.

    A model is a Linen module whose dataclass fields are config.json entries, with a method
    `init_weights(rng) -> params` and these class attributes (assigned without an annotation, which
    would make fields of them):

        weights_name: "diffusion_pytorch_model" (diffusers) or "model" (transformers).
        torch_class_name: the PyTorch class that opens the same directory.
        fixed_config: config keys that are not implemented -> the only supported value.
        ignored_config: config keys without effect on the numbers.
    """

    weights_name = "diffusion_pytorch_model"
    torch_class_name = None
    fixed_config = {}  # noqa: RUF012 - an annotation would make it a dataclass field
    ignored_config = ()

    @property
    def config(self):
        """The entries of config.json this model understands; lists are tuples."""
        names = [field.name for field in dataclasses.fields(self)]
        return FrozenConfig(
            {n: lists_to_tuples(getattr(self, n)) for n in names if n not in RUNTIME_FIELDS}
        )

    def init_weights(self, rng):
        """Random float32 parameters. rng: a PRNG key."""
        raise NotImplementedError

    @classmethod
    def from_config(cls, config=None, return_unused_kwargs=False, **overrides):
        """Build the module, without parameters, from the content of a config.json.

        Args:
            config: mapping, or a directory or hub id with overrides subfolder= and revision=;
                entries it lacks take the module's defaults.
            return_unused_kwargs: True returns (module, {overrides that it does not know}).
            **overrides: entries that win over `config`, and dtype=, gradient_checkpointing=.

        Returns:
            The module.

        Raises:
            ValueError: an entry that this model does not implement or that has the wrong type, or
                an override that it does not know.
        """
        if isinstance(config, str | Path):
            places = {name: overrides.pop(name, None) for name in ("subfolder", "revision")}
            config = cls.load_config(config, **places, **take_hub_options(overrides))
        fields = {field.name: field.type for field in dataclasses.fields(cls)}
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
                if key not in RUNTIME_FIELDS and not has_type(value, fields[key]):
                    kinds = " or ".join(kind.__name__ for kind in types_of(fields[key]))
                    raise ValueError(f"{key}={value!r} has the wrong type, it must be {kinds}")
                settings[key] = value
            elif key in overrides and return_unused_kwargs:
                unused[key] = value
            elif key in overrides:
                known = ", ".join(sorted(fields.keys() - {"parent", "name"}))
                raise ValueError(f"{cls.__name__} has no setting {key!r}; it has {known}")
            elif not (key.startswith("_") or key in cls.ignored_config or key in FILE_KEYS):
                warn_once(f"{cls.__name__} does not know the config key {key!r}: ignored")
        module = cls(**settings)
        return (module, unused) if return_unused_kwargs else module

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path,
        dtype=jnp.float32,
        *,
        subfolder=None,
        revision=None,
        variant=None,
        from_pt=False,
        config=None,
        convert=None,
        **config_overrides,
    ):
        """Read config.json and the weights in the same directory.

        Args:
            pretrained_model_name_or_path: a directory, or a hub id ("owner/name"); or, with config,
                a file of weights.
            dtype: compute dtype of the module; the parameters have the dtype of their files,
                float8 included, and each is cast where the computation uses it.
            subfolder: the model's directory in a pipeline, e.g. "unet".
            revision: branch, tag or commit on the hub.
            variant: the part in the middle of the weights' name, e.g. "fp16"; where no weights have
                it, those without are read, with a warning.
            from_pt: True looks for PyTorch's files only (safetensors, .bin), not for Flax msgpack.
            config: mapping that replaces config.json, or its directory or hub id.
            convert: (name joined by "/", array) -> array, called for each parameter as it is read.
            **config_overrides: config entries that win over config.json; and cache_dir,
                force_download, local_files_only, token of huggingface_hub.hf_hub_download.

        Returns:
            (module, params): params a nested dict of NumPy arrays.

        Raises:
            ValueError: files are missing, damaged, outside the directory or of another class, or
                the weights do not fit the config; the message names the file and all problems.
        """
        fetch = functools.partial(
            fetch_file,
            pretrained_model_name_or_path,
            subfolder=subfolder,
            revision=revision,
            **take_hub_options(config_overrides),
        )
        if isinstance(config, str | Path):
            config = cls.load_config(config)
        where = place_in_words(pretrained_model_name_or_path, subfolder, revision)
        config_file = "config=" if config is not None else fetch(cls.config_name)
        if config_file is None:
            raise ValueError(
                f"no config.json in {where}; give its directory or hub id, for a "
                'pipeline with subfolder="unet" (or "vae", "text_encoder"), and if HF_HUB_OFFLINE '
                "is set or the hub is out of reach, download it first"
            )
        if config is None:
            config = read_json(config_file)
        cls.check_class(config, config_file)
        try:
            module = cls.from_config(config, **config_overrides, dtype=dtype)
            expected = module._param_shapes()  # finds faults of the config before a long download
        except Exception as error:  # a bad size may fail anywhere in the model
            changes = "".join(f", {name}={value!r}" for name, value in config_overrides.items())
            raise ValueError(
                f"{cls.__name__} cannot be built from {config_file}{changes}: {_reason(error)}"
            ) from error

        files = [Path(pretrained_model_name_or_path)]
        if not files[0].is_file():
            files = find_weights(fetch, cls.weights_name, variant, from_pt, where)
        flat = {
            key: array if convert is None else convert(key, array)
            for file in files
            for key, array in read_weights(file)
        }
        source = str(files[0]) if len(files) == 1 else f"{files[0]} and its other shards"
        module._check_params(flat, expected, source)
        return module, unflatten_dict(flat, sep="/")

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
        max_shard_size="5GB",
    ):
        """Write config.json and the weights; PyTorch's from_pretrained opens the directory.

        All files are written under temporary names and moved into place at the end, so an
        interrupted save changes nothing. Shards and index of an earlier save are removed.

        Args:
            save_directory: directory, made if absent.
            params: nested dict of NumPy or JAX arrays, not replicated over devices.
            is_main_process: False writes nothing.
            push_to_hub: must be False; `hf upload` sends a directory to the hub.
            variant: name part as in from_pretrained, e.g. "fp16".
            dtype: of the file; None: each array's own.
            flax_msgpack: True writes the published Flax msgpack as well (it has no variant).
            max_shard_size: largest safetensors file, in bytes or as "5GB"; one such file at a time
                is held in memory on top of params.

        Raises:
            ValueError: params are not this model's.
        """
        refuse_push_to_hub(push_to_hub)
        if not is_main_process:
            return
        flat = flatten_dict(params, sep="/")
        self._check_params(flat, self._param_shapes(), "params")

        def stored(key):
            array = np.asarray(flat[key])
            return array if dtype is None else array.astype(dtype, copy=False)

        def num_bytes(array):
            return array.size * np.dtype(array.dtype if dtype is None else dtype).itemsize

        flax_keys = {flax_to_torch(key, array)[0]: key for key, array in flat.items()}
        dot_variant = f".{variant}" if variant else ""
        stem = f"{self.weights_name}{dot_variant}"
        index_name = index_names(self.weights_name, "safetensors", dot_variant)[0]
        shards = split_state_dict_into_shards_factory(
            {torch_key: flat[key] for torch_key, key in flax_keys.items()},
            get_storage_size=num_bytes,
            filename_pattern=stem + "{suffix}.safetensors",
            max_shard_size=max_shard_size,
        )

        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as tmp:
            tmp = Path(tmp)
            write_json(tmp / "config.json", self._file_content())
            for file_name, torch_keys in shards.filename_to_tensors.items():
                tensors = {
                    # save_file stores the memory as it lies, so a transposed view would be lost.
                    k: np.ascontiguousarray(flax_to_torch(flax_keys[k], stored(flax_keys[k]))[1])
                    for k in torch_keys
                }
                save_file(tensors, tmp / file_name, metadata={"format": "pt"})
                shutil.copymode(tmp / "config.json", tmp / file_name)  # safetensors leaves 0600
                del tensors
            if shards.is_sharded:
                index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
                write_json(tmp / index_name, index)
            if flax_msgpack:
                keys = unflatten_dict({key: key for key in flat}, sep="/")
                with open(tmp / WEIGHT_FILES[self.weights_name][2], "wb") as file:
                    for part in _msgpack_parts(keys, stored):
                        file.write(part)
            written = {file.name for file in tmp.iterdir()}
            for name in written:
                os.replace(tmp / name, folder / name)

        # PyTorch would prefer a left-over index to the new single file.
        for file in folder.iterdir():
            is_old = weights_pattern(self.weights_name, dot_variant).fullmatch(file.name)
            if is_old and file.name not in written:
                file.unlink()

    def _file_content(self):
        """The config.json for PyTorch; it contains the options that are fixed here."""
        if self.weights_name == "model":
            names = {"architectures": [self.torch_class_name], "model_type": "clip_text_model"}
        else:
            names = {"_class_name": self.torch_class_name}
        fixed = {key: value for key, value in self.fixed_config.items() if value is not None}
        return {**names, **fixed, **self.config}

    def _param_shapes(self):
        """{path joined by "/": shape} of this configuration; nothing is computed."""
        return _trace_shapes(type(self)(**self.config))

    def _check_params(self, flat, expected, where):
        """Raise one ValueError that names every missing, unexpected or mis-shaped parameter."""
        found = {key: np.shape(array) for key, array in flat.items()}
        misshaped = sorted(k for k in expected.keys() & found.keys() if expected[k] != found[k])
        groups = {
            "missing": sorted(expected.keys() - found.keys()),
            "unexpected": sorted(found.keys() - expected.keys()),
            "wrong shape": [f"{k} is {found[k]}, model has {expected[k]}" for k in misshaped],
        }
        problems = [f"{name}: {first_names(keys)}" for name, keys in groups.items() if keys]
        has_added = [any("add_embedding" in key for key in keys) for keys in (expected, found)]
        if has_added[0] != has_added[1] and "conv_in/kernel" in found:
            families = [f"{'SDXL' if x else 'Stable Diffusion 1.x or 2.x'}" for x in has_added]
            problems.insert(0, f"the weights are of {families[1]}, the config is of {families[0]}")
        if "conv_in/kernel" in misshaped:
            kernel, wanted = found["conv_in/kernel"], expected["conv_in/kernel"]
            if len(kernel) == 4 and kernel[2] != wanted[2]:
                problems.append(
                    f"conv_in takes {kernel[2]} channels, the config says {wanted[2]}: "
                    "create_modified_unet.py widens a UNet"
                )
        if problems:
            raise ValueError(f"{where} does not fit {type(self).__name__}: {'; '.join(problems)}")


def first_names(names):
    """The first ten of a list of names, and how many more there are."""
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return f"{', '.join(names[:10])}{more}"


@functools.cache  # loading and saving share it; tracing a large model takes seconds
def _trace_shapes(module):
    """{path joined by "/": shape} of a module's parameters."""
    params = jax.eval_shape(lambda: module.init_weights(jax.random.key(0)))
    return {key: leaf.shape for key, leaf in flatten_dict(params, sep="/").items()}


def _reason(error):
    """What went wrong, on one line; the type of errors that are not meant for users."""
    is_ours = isinstance(error, ValueError)
    return one_line(error, 200) if is_ours else f"{type(error).__name__}: {one_line(error, 200)}"


def find_weights(fetch, weights_name, variant, from_pt, where):
    """The files that hold the weights, in the first format that exists.

    If no weights have the variant, those without it: the published classes ignored the argument,
    and scripts for them name variants that do not exist.
    """
    tried = []
    for dot_variant in dict.fromkeys([f".{variant}" if variant else "", ""]):
        for file_name in WEIGHT_FILES[weights_name][: 2 if from_pt else 3]:
            stem, suffix = file_name.split(".")
            tried.append(f"{stem}{dot_variant}.{suffix}")
            if files := _weight_files(fetch, stem, suffix, dot_variant):
                if variant and not dot_variant:
                    warn_once(f"{where} has no weights with variant={variant!r}: read without it")
                return files
    raise ValueError(f"no weights in {where}: neither {', '.join(tried)} nor shards of one")


def _weight_files(fetch, stem, suffix, dot_variant):
    """One file, or all shards; [] if there are neither."""
    if file := fetch(f"{stem}{dot_variant}.{suffix}"):
        return [file]
    names = index_names(stem, suffix, dot_variant)
    index = next((file for name in names if (file := fetch(name))), None)
    if index is None:
        return []
    shards = {name: fetch(name) for name in shard_names(index)}
    if missing := sorted(name for name, file in shards.items() if file is None):
        raise ValueError(
            f"{index} lists shards that are not there: {', '.join(missing)}; "
            "download or copy them again"
        )
    return list(shards.values())


def read_weights(file):
    """Yield (Flax path, array) of one file; the arrays do not refer to the file."""
    read = {".msgpack": _read_msgpack, ".bin": _read_bin}.get(file.suffix, _read_safetensors)
    try:
        for key, array in read(file):
            if key.endswith("embeddings.position_ids"):  # a buffer: 0, 1, 2, ...
                continue
            if not isinstance(array, np.ndarray) or not jnp.issubdtype(array.dtype, jnp.floating):
                kind = getattr(array, "dtype", type(array).__name__)
                raise ValueError(f"its entry {key!r} is {kind}, no array of floats")
            if read is not _read_msgpack:
                key, array = torch_to_flax(key, array)
                array = np.array(array, order="C")
            yield key, array
    except (ImportError, MemoryError, PermissionError):  # not caused by the file's content
        raise
    except Exception as error:  # the readers raise errors of many types for damaged bytes
        raise ValueError(
            f"{file} cannot be read as weights ({_reason(error)}); it may be an incomplete "
            "download, a git-lfs pointer, or no weights at all: fetch it again"
        ) from error


def _read_safetensors(file):
    # pread: the pages of a memory map would stay in memory next to the copies.
    with safe_open(file, "np", backend="pread") as tensors, open(file, "rb") as raw:
        header_size = int.from_bytes(raw.read(8), "little")
        header = json.loads(raw.read(header_size))
        for key in tensors.keys():  # noqa: SIM118 - not a dict
            entry = header[key]
            if entry["dtype"] not in FLOAT8:
                yield key, tensors.get_tensor(key)
                continue
            start, end = entry["data_offsets"]
            raw.seek(8 + header_size + start)
            array = np.frombuffer(raw.read(end - start), FLOAT8[entry["dtype"]])
            yield key, array.reshape(entry["shape"])


def _read_bin(file):
    import torch  # seconds to import, and needed for .bin files only

    # Files of PyTorch before 1.6 are not zip archives and cannot be mapped.
    tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    if not isinstance(tensors, dict):
        raise ValueError("it holds no state dict")
    for key, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"its entry {key!r} is not a tensor")
        name = str(tensor.dtype).removeprefix("torch.")
        if name in TORCH_BITS:
            bits = tensor.detach().view(getattr(torch, TORCH_BITS[name]))
            yield key, bits.numpy().view(getattr(ml_dtypes, name))
        else:
            yield key, tensor.detach().numpy()


def _read_msgpack(file):
    with open(file, "rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
        tree = msgpack_restore(data)
    if not isinstance(tree, dict):
        raise ValueError("it holds no tree of parameters")
    yield from flatten_dict(tree, sep="/").items()


def _msgpack_parts(tree, leaf_to_array):
    """Yield msgpack_serialize's bytes leaf by leaf; at once they take twice the file's size."""
    if not isinstance(tree, dict):
        yield msgpack_serialize(leaf_to_array(tree))
        return
    packer = msgpack.Packer()
    yield packer.pack_map_header(len(tree))
    for key, subtree in sorted(tree.items()):
        yield packer.pack(key)
        yield from _msgpack_parts(subtree, leaf_to_array)
