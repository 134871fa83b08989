"""Training LoRA: a model's trained and frozen parameters, and the files of a run.

    trained, frozen = add_lora(params, 16, None, ("to_q", "to_v"))  # of the UNet's parameters
    params = combine(frozen, trained)  # of training.sharding, for unet.apply
    save_lora("pytorch_lora_weights.safetensors", trained, 16, None, ("to_q", "to_v"))
    fold = partial(fold_lora, trained=trained, rank=16, alpha=None)
    unet, params = FlaxUNet2DConditionModel.from_pretrained(folder, convert=fold)  # merged

A layer whose parameters contain `lora_A`, `lora_B` and `lora_scale` adds lora_scale (x A) B to its
output, where lora_scale is alpha / rank. B starts as zeros.

Source: LoRA (arXiv 2106.09685), section 4.1; file layout and initial values: the PEFT library.
"""

import json
import math
from functools import reduce

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import save

from diffusers_flax.loading.files import save_whole
from diffusers_flax.loading.weights import flax_to_torch


def add_lora(params, rank, alpha, target_modules, fully_trained=("conv_in",), seed=0):
    """Split a model's parameters into frozen ones and trained ones, and add LoRA to the latter.

    Args:
        params: nested dict of arrays or of their shapes (ShapeDtypeStructs).
        rank: columns of A and rows of B.
        alpha: the update is scaled by alpha / rank; None: rank.
        target_modules: ends of the PyTorch names of dense and convolution layers, such as
            "to_q" or "to_out.0".
        fully_trained: names of top-level modules that are trained without LoRA.
        seed: seed of the initial values.

    Returns:
        (trained, frozen), nested dicts; combine them to apply the model. A (..., in, rank) and
        B (..., rank, out) are float32 kernels; the parameters of params are not copied.

    Raises:
        ValueError: a target module does not exist.
    """
    rng = np.random.default_rng(seed)
    scale = np.float32((alpha or rank) / rank)
    trained, frozen, unused = {}, {}, set(target_modules)
    for name, x in sorted(flatten_dict(params, sep="/").items()):  # not in the order of files
        module, _, leaf = name.rpartition("/")
        if module.split("/")[0] in fully_trained:
            trained[name] = x
            continue
        frozen[name] = x
        bias, _ = flax_to_torch(f"{module}/bias", None)
        targets = {
            x for x in target_modules if leaf == "kernel" and f".{bias}".endswith(f".{x}.bias")
        }
        unused -= targets
        if not targets:
            continue
        *kernel_size, num_in, num_out = x.shape
        bound = 1 / math.sqrt(math.prod(kernel_size) * num_in)  # Kaiming uniform with a = sqrt(5)
        shape_a, shape_b = (*kernel_size, num_in, rank), (*(1 for _ in kernel_size), rank, num_out)
        trained[f"{module}/lora_A/kernel"] = rng.uniform(-bound, bound, shape_a).astype(np.float32)
        trained[f"{module}/lora_B/kernel"] = np.zeros(shape_b, np.float32)
        frozen[f"{module}/lora_scale"] = scale
    if unused:
        raise ValueError(
            f"--lora_target_modules {' '.join(sorted(unused))} names no dense or convolution layer "
            "of the UNet; usual ones are to_q, to_k, to_v, to_out.0, proj_in, proj_out, "
            "ff.net.0.proj, ff.net.2, conv1 and conv2"
        )
    return unflatten_dict(trained, sep="/"), unflatten_dict(frozen, sep="/")


def fold_lora(name, x, trained, rank, alpha):
    """Replace one parameter of a model by its value after training with LoRA.

    Args:
        name: of the parameter, joined by "/".
        x: its value before, a NumPy array.
        trained: of add_lora, as NumPy arrays.
        rank, alpha: as for add_lora.

    Returns:
        float32 array: x + alpha / rank A B, a fully trained parameter, or x.
    """
    *path, leaf = name.split("/")
    module = reduce(lambda tree, key: tree.get(key, {}), path, trained)
    if leaf in module:
        return np.asarray(module[leaf], np.float32)
    x = np.asarray(x, np.float32)
    if leaf != "kernel" or "lora_A" not in module:
        return x
    a, b = (np.asarray(module[f"lora_{letter}"]["kernel"], np.float32) for letter in "AB")
    b = b.reshape(b.shape[-2:])  # (1, 1, rank, out) of a convolution
    return x + np.float32((alpha or rank) / rank) * (a @ b)


def save_lora(path, trained, rank, alpha, target_modules):
    """Write a LoRA file that load_lora_weights of PyTorch's pipelines reads.

    Args:
        path: file to write, .safetensors.
        trained: nested dict of add_lora; entries other than LoRA's are left out.
        rank, alpha, target_modules: as for add_lora.
    """
    tensors = {}
    for name, x in flatten_dict(trained, sep="/").items():
        if "/lora_" in name:
            name, x = flax_to_torch(name, np.asarray(x, np.float32))
            tensors[f"unet.{name}"] = x
    settings = {
        "unet.r": rank,
        "unet.lora_alpha": alpha or rank,
        "unet.target_modules": list(target_modules),
    }
    save_tensors(path, tensors, lora_adapter_metadata=json.dumps(settings))


def save_conv_in(path, trained):
    """Write the UNet's first convolution with PyTorch's names, for load_state_dict."""
    tensors = dict(flax_to_torch(f"conv_in/{name}", x) for name, x in trained["conv_in"].items())
    save_tensors(path, tensors)


def save_tensors(path, tensors, **metadata):
    """Write a safetensors file."""
    tensors = {name: np.ascontiguousarray(x) for name, x in tensors.items()}
    content = save(tensors, metadata={"format": "pt", **metadata})
    save_whole(path, lambda file: file.write_bytes(content))
