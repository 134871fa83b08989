"""Weights: names and axes in PyTorch's files and Flax trees; reading and writing files.

Reads safetensors (one file, sharded, with a variant), PyTorch's pickles and the published Flax
msgpack, with tensors of any dtype. Writes safetensors with PyTorch's names.
"""

import json
import mmap
import pickle
import re
import zipfile
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax.serialization import msgpack_restore
from flax.traverse_util import flatten_dict
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import safe_open
from safetensors.numpy import save_file

from diffusers_flax.loading.files import read_json, write_json
from diffusers_flax.messages import first_names, reason_of, warn_once

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")  # of torch.save
# Objects beside the weights, which are not made: PyTorch Lightning's training loop, numbers, paths.
NOT_NEEDED = ("pytorch_lightning.", "lightning.", "numpy.", "pathlib.", "datetime.", "argparse.")
PARAMETER_DICT = "torch.nn.modules.container.ParameterDict"  # of the first textual inversions
# File names by `weights_name`, in the order in which they are looked for.
WEIGHT_FILES = {
    "diffusion_pytorch_model": (
        "diffusion_pytorch_model.safetensors",
        "diffusion_pytorch_model.bin",
        "diffusion_flax_model.msgpack",
    ),
    "model": ("model.safetensors", "pytorch_model.bin", "flax_model.msgpack"),
}

# Lists whose index is part of the name in Flax trees; the index of CLIP's `layers` is not.
JOINED_LISTS = (
    "attentions|blocks|controlnet_down_blocks|down_blocks|downsamplers|net|resnets|to_out|"
    "transformer_blocks|up_blocks|upsamplers"
)
TORCH_LIST = re.compile(rf"\b({JOINED_LISTS})\.(\d+)\b")
FLAX_LIST = re.compile(rf"\b({JOINED_LISTS})_(\d+)\b")

# Flax trees have older names of the VAE's attention.
VAE_ATTENTION = re.compile(r"(?:encoder|decoder)[./]mid_block[./]attentions")
VAE_TORCH_TO_FLAX = {
    ".to_q.": ".query.",
    ".to_k.": ".key.",
    ".to_v.": ".value.",
    ".to_out.0.": ".proj_attn.",
}

DTYPES = {  # by safetensors' names, where NumPy has another one
    "BOOL": "bool",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
DTYPE_KINDS = {"F": "float", "I": "int", "U": "uint", "C": "complex"}


def torch_to_flax(key, array):
    """Give a PyTorch tensor its name and axes in the Flax tree.

    Args:
        key: name in a state dict of UNet2DConditionModel, ControlNetModel, AutoencoderKL,
            AutoencoderTiny, CLIPTextModel, CLIPTextModelWithProjection or
            StableDiffusionSafetyChecker, e.g. "down_blocks.0.resnets.1.conv1.weight".
        array: NumPy; convolution OIHW, linear (out, in), or one axis.

    Returns:
        (path, array): path joined by "/", array a view; convolution HWIO, linear (in, out).
    """
    if VAE_ATTENTION.match(key):
        for torch_name, flax_name in VAE_TORCH_TO_FLAX.items():
            key = key.replace(torch_name, flax_name)
        if array.ndim == 4 and not key.endswith("group_norm.weight"):
            array = array[:, :, 0, 0]  # a 1x1 convolution in the oldest files
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
    """Give a Flax parameter its name and axes in PyTorch; the inverse of torch_to_flax.

    Args:
        key: path in the Flax tree joined by "/", e.g. "down_blocks_0/resnets_1/conv1/kernel".
        array: NumPy; convolution HWIO, linear (in, out), or one axis.

    Returns:
        (name, array): diffusers' name, or CLIP's with the published prefix `text_model.`, which
        every version of transformers opens; array a view; convolution OIHW, linear (out, in).
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


def find_weights(fetch, weights_name, variant, from_pt, where):
    """The files of the weights, one or all shards, in the first format that exists.

    Weights without a variant take the place of a missing variant: the published classes ignored the
    argument, and scripts for them name variants that do not exist.

    Args:
        fetch: function from a file name to its Path, or None.
        weights_name: key of WEIGHT_FILES.
        variant: e.g. "fp16", or None.
        from_pt: True leaves out Flax msgpack.
        where: the place in words, for errors.
    """
    tried = []
    for dot_variant in dict.fromkeys([f".{variant}" if variant else "", ""]):
        for file_name in WEIGHT_FILES[weights_name][: 2 if from_pt else 3]:
            stem, suffix = file_name.split(".")
            tried.append(f"{stem}{dot_variant}.{suffix}")
            files = [fetch(tried[-1])]
            # diffusers' index of today, its older one, and huggingface_hub's.
            for index_name in (
                f"{stem}.{suffix}.index{dot_variant}.json",
                f"{stem}.{suffix}{dot_variant}.index.json",
                f"{stem}{dot_variant}.{suffix}.index.json",
            ):
                if files[0] is None and (index := fetch(index_name)):
                    files = find_shards(fetch, index)
            if files[0] is not None:
                if variant and not dot_variant:
                    warn_once(f"{where} has no weights with variant={variant!r}: read without it")
                return files
    raise ValueError(f"no weights in {where}: neither {', '.join(tried)} nor shards of one")


def find_shards(fetch, index):
    """The shards that an index lists, in its directory."""
    with naming_damage(index):
        names = sorted({Path(path).name for path in read_json(index)["weight_map"].values()})
        shards = [fetch(name) for name in names]
        if None in shards:
            raise ValueError("it lists shards that are not there")
    return shards


def weights_pattern(stem, dot_variant=""):
    """Pattern of a model's safetensors files and index, as write_safetensors names them."""
    variant = re.escape(dot_variant)
    files = rf"{stem}{variant}(-\d{{5}}-of-\d{{5}})?\.safetensors"
    return re.compile(rf"{files}|{stem}\.safetensors\.index{variant}\.json")


class NotNeeded:
    """Replaces an object of a pickle that is not needed; accepts any arguments and state."""

    def __init__(self, *args, **kwargs):
        pass

    def __setstate__(self, state):
        pass


def read_weights(file, read=None, kinds=(jnp.floating,)):
    """Yield (Flax path, NumPy array) of one file; arrays of pickles are in the file's memory map.

    read: yields (PyTorch's name, array) of the file, None: by its suffix; kinds: of the arrays'
    dtypes, as jnp.issubdtype takes them. A ValueError for others, and for a damaged file.
    """
    readers = {".msgpack": read_msgpack, **dict.fromkeys(PICKLE_SUFFIXES, read_pickle)}
    read = read or partial(readers.get(file.suffix, read_safetensors), file)
    with naming_damage(file):
        for key, array in read():
            if key.endswith("embeddings.position_ids"):  # a buffer: 0, 1, 2, ...
                continue
            dtype = getattr(array, "dtype", type(array).__name__)
            is_array = isinstance(array, np.ndarray)
            if not is_array or not any(jnp.issubdtype(dtype, kind) for kind in kinds):
                raise ValueError(f"its entry {key!r} is {dtype}, no array of floats")
            yield (key, array) if file.suffix == ".msgpack" else torch_to_flax(key, array)


@contextmanager
def naming_damage(file):
    """Turn an error while a file of weights is read into a ValueError that names the file."""
    try:
        yield
    except (ImportError, MemoryError, PermissionError):  # not for the file's content
        raise
    except Exception as error:  # the readers raise errors of many types for damaged bytes
        raise ValueError(
            f"{file} cannot be read as weights ({reason_of(error)}); it may be an incomplete "
            "download, a git-lfs pointer, or no weights at all: fetch it again"
        ) from error


def load_pickle(file):
    """The content of a PyTorch file, with memory-mapped tensors; no code in it is run.

    Raises errors of many types for code and damaged data; see naming_damage.
    """
    try:
        import torch  # takes seconds, and is needed for these files alone
    except ImportError as error:
        message = f"reading {file} needs PyTorch: pip install torch, or take .safetensors"
        raise ImportError(message) from error

    is_zip = zipfile.is_zipfile(file)  # not of PyTorch before 1.6, which cannot be mapped
    find_code = torch.serialization.get_unsafe_globals_in_checkpoint
    try:
        names = {*(find_code(file) if is_zip else ())} - {PARAMETER_DICT}
        if code := sorted(name for name in names if not name.startswith(NOT_NEEDED)):
            raise ValueError(f"it runs code when it is opened: {first_names(code)}")
        safe = [torch.nn.ParameterDict, *((NotNeeded, name) for name in names)]
        with torch.serialization.safe_globals(safe):
            return torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip)
    except (pickle.UnpicklingError, EOFError):  # their text explains how to run code
        raise ValueError("it is no pickle of tensors alone; take the .safetensors") from None


def state_dict_of(content):
    """The state dict in the content of a PyTorch file: the content, or an entry of it."""
    while isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
        content = content["state_dict"]
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise ValueError("it holds no state dict")
    return content


def read_safetensors(file):
    """Yield (name, NumPy array) of a safetensors file."""
    tensors = SafetensorsFile(file)
    for key in tensors.shapes:
        yield key, tensors.read(key)


class SafetensorsFile:
    """A safetensors file whose tensors are read one at a time; shapes: {name: shape}."""

    def __init__(self, file):
        self.file = file
        with safe_open(file, "np") as tensors:  # checks the file's header
            names = tensors.keys()
        with open(file, "rb") as raw:
            header_size = int.from_bytes(raw.read(8), "little")
            self.header = json.loads(raw.read(header_size))
        self.start = 8 + header_size
        self.shapes = {name: tuple(self.header[name]["shape"]) for name in names}

    def read(self, key):
        """A tensor as a NumPy array, of ml_dtypes' dtypes where NumPy has none."""
        entry = self.header[key]
        name, (start, end) = entry["dtype"], entry["data_offsets"]
        dtype = np.dtype(DTYPES.get(name) or DTYPE_KINDS[name[0]] + name[1:])
        # Not mapped: the pages of a memory map would stay in memory beside the copies.
        data = np.fromfile(self.file, np.uint8, end - start, offset=self.start + start)
        return data.view(dtype).reshape(entry["shape"])


def read_pickle(file):
    """Yield (name, NumPy array) of a PyTorch file."""
    for key, tensor in state_dict_of(load_pickle(file)).items():
        yield key, as_array(tensor)


def as_array(tensor):
    """A PyTorch tensor of any dtype that is not packed, as a NumPy array of the same memory."""
    import torch

    tensor, name = tensor.detach(), str(tensor.dtype).removeprefix("torch.")
    if not hasattr(ml_dtypes, name):
        return tensor.numpy()
    bits = torch.int8 if tensor.element_size() == 1 else torch.int16
    return tensor.view(bits).numpy().view(getattr(ml_dtypes, name))


def read_msgpack(file):
    """Yield (path joined by "/", NumPy array) of a Flax msgpack."""
    with open(file, "rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
        flat = flatten_dict(msgpack_restore(data), sep="/")
    while flat:  # frees each array before the next
        yield flat.popitem()


def write_safetensors(folder, flat, weights_name, dot_variant, dtype, max_shard_size):
    """Write parameters with PyTorch's names, as one file or as shards and their index.

    flat: {path joined by "/": array}; weights_name: key of WEIGHT_FILES; dot_variant: "" or the
    variant with its dot, ".fp16"; dtype: of the file, None: each array's own; max_shard_size: see
    FlaxModelMixin.save_pretrained.
    """

    def num_bytes(array):
        return array.size * np.dtype(array.dtype if dtype is None else dtype).itemsize

    flax_keys = {flax_to_torch(key, array)[0]: key for key, array in flat.items()}
    shards = split_state_dict_into_shards_factory(
        {torch_key: flat[key] for torch_key, key in flax_keys.items()},
        get_storage_size=num_bytes,
        filename_pattern=f"{weights_name}{dot_variant}{{suffix}}.safetensors",
        max_shard_size=max_shard_size,
    )
    for file_name, torch_keys in shards.filename_to_tensors.items():
        tensors = {
            # save_file stores memory as it is, so a transposed view would be lost.
            k: np.asarray(
                flax_to_torch(flax_keys[k], as_stored(flat[flax_keys[k]], dtype))[1], order="C"
            )
            for k in torch_keys
        }
        save_file(tensors, folder / file_name, metadata={"format": "pt"})
        del tensors
    if shards.is_sharded:
        index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
        write_json(folder / f"{weights_name}.safetensors.index{dot_variant}.json", index)


def as_stored(array, dtype):
    """A NumPy array in dtype, or in its own for None."""
    array = np.asarray(array)
    return array if dtype is None else array.astype(dtype, copy=False)
