"""Weights in 8 bits: stored to save memory, or multiplied as int8 to save time.

    params["unet"] = store(params["unet"], "float8")     # or "int8": half the memory of bfloat16
    params["unet"] = quantize(params["unet"], "fast")    # int8 matmuls where they are faster
    sample = unet.apply({"params": params["unet"]}, ...).sample

A layer is in 8 bits if its kernel is. Dense and Conv cast a float8 kernel up before each use. An
int8 kernel has a `weight_scale` beside it, by which it is multiplied, or a `dynamic_scale`: then
the layer multiplies int8 activations, which it quantizes with scales of their own. A scale is the
largest absolute weight of an output channel divided by 127. LoRA factors of an 8-bit layer keep
their dtype and are added in `dtype`. 8 bits are for inference; dynamic layers have no gradients.

A TPU multiplies int8 at twice the rate of bfloat16, but the scales of activations cost two passes
over them. By the compiler's estimate for a v5e this pays for wide convolutions and for the first
layer of wide feed-forwards (the mode "fast"). Convolutions are matmuls here, because XLA has no
integer convolution for GPUs (github.com/jax-ml/jax/issues/7637). On a CPU int8 is slow, and in a
loop 8 bits save no memory, as XLA keeps the kernels that it has cast up.

Source: Integer Quantization for Deep Learning Inference (arXiv 2004.09602), sections 3.1.2 and 3.2.
"""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.tree_util import keystr

from diffusers_flax.models.convolution import convolve, sum_of_matmuls
from diffusers_flax.models.spatial_parallelism import global_max

SCALE_NAMES = {
    "fast": "dynamic_scale",
    "dynamic": "dynamic_scale",
    "weight": "weight_scale",
}
_BLOCK = r"(?:(?:down|up)_blocks_\d+|mid_block)/"
DENSE_KERNEL = re.compile(
    _BLOCK + r"attentions_\d+/(?:proj_in|proj_out|transformer_blocks_\d+/"
    r"(?:attn[12]/(?:to_q|to_k|to_v|to_out_0)|ff/(?:net_0/proj|net_2)))/kernel"
)
CONVOLUTION_KERNEL = re.compile(
    _BLOCK + r"(?:resnets_\d+/conv[12]|(?:down|up)samplers_\d+/conv)/kernel"
)
TEXT_KERNEL = re.compile(
    r"text_model/encoder/layers/\d+/(?:self_attn/(?:[qkv]|out)_proj|mlp/fc[12])/kernel"
)
ONE_OF_SEVERAL = re.compile(r"^(?:nets_)?\d+/")  # ControlNets, in a dict or list
STORAGES = {"float8": np.dtype(ml_dtypes.float8_e4m3fn), "int8": np.dtype(np.int8)}
# quantization_config in the config.json of int8 kernels, which PyTorch's classes refuse by name.
INT8_FILES = {"quant_method": "diffusers_flax_int8"}
# The dense layers of mode "fast", and their least number of input channels.
FAST_DENSE, FAST_WIDTH = "ff/net_0/proj/kernel", 1280
SMALLEST_SCALE = 1e-30  # an array of zeros stays zeros; 1 / SMALLEST_SCALE is finite


def check_storage(storage, int8=None):
    """Raise a ValueError unless storage is None or a key of STORAGES; int8: Acceleration.int8."""
    if storage is not None and storage not in STORAGES:
        raise ValueError(f"storage={storage!r} is not known; known are {', '.join(STORAGES)}")
    if storage and int8:
        raise ValueError(
            f"storage={storage} and accelerate=int8 both change the UNet's kernels; leave one out"
        )


def check_stored(config, storage, where):
    """Raise a ValueError if a storage does not suit weights; config: their config.json's content.

    where: the directory, in words.
    """
    check_storage(storage)
    if config.get("quantization_config") == INT8_FILES and storage != "int8":
        raise ValueError(
            f"the weights in {where} are int8; open them with storage='int8', or take the model "
            "that they were made from"
        )


def check_foldable(x, where):
    """Raise a ValueError if a directory's array is int8, to which nothing can be added."""
    if x.dtype == np.int8:
        raise ValueError(
            f"lora= and unet_delta= change weights, which {where} has as int8; take the model that "
            "they were made from"
        )


def is_stored_kernel(name):
    """Whether `store` changes a parameter, by its path joined by "/".

    True for the kernels that quantize changes in UNets and ControlNets, and for text encoders'
    layers. Norms, biases, embeddings, conv_in, conv_out, text projections, 1x1
    convolutions of residual blocks and VAEs stay as they are.
    """
    name = ONE_OF_SEVERAL.sub("", name)
    patterns = DENSE_KERNEL, CONVOLUTION_KERNEL, TEXT_KERNEL
    return any(pattern.fullmatch(name) for pattern in patterns)


def scale_name(kernel, mode="weight"):
    """The path of the scale of an int8 kernel at a path; mode as for quantize."""
    return f"{kernel.removesuffix('kernel')}{SCALE_NAMES[mode]}"


def store(params, storage):
    """Store the kernels of a UNet, ControlNet or text encoder in 8 bits; see is_stored_kernel.

    Args:
        params: nested dict of NumPy or JAX arrays (also inside jit).
        storage: "float8", e4m3 as PyTorch's enable_layerwise_casting; or "int8", with a float32
            (output channels,) weight_scale beside each kernel. None: params stay as they are.

    Returns:
        params with float8 or int8 kernels.

    Raises:
        ValueError: storage is unknown.
    """
    stored = {}
    for name, x in flatten_dict(params, sep="/").items():
        stored |= store_array(name, x, storage)
    return unflatten_dict(stored, sep="/")


def store_array(name, x, storage):
    """store for one parameter: {path: array}, also with the path of its scale."""
    check_storage(storage)
    if storage is None or x.dtype == STORAGES[storage] or not is_stored_kernel(name):
        return {name: x}
    if storage == "int8":
        return int8_arrays(name, x, "weight")
    return {name: x.astype(STORAGES[storage])}


def storage_of(params):
    """The storage of a model's parameters: "float8", "int8" or None."""
    arrays = jax.tree_util.tree_leaves_with_path(params)  # several ControlNets may be in a list
    names = {keystr(path, simple=True, separator="/"): x.dtype for path, x in arrays}
    kernels = {dtype for name, dtype in names.items() if is_stored_kernel(name)}
    if any(name.endswith("/weight_scale") for name in names):
        return "int8"
    return "float8" if STORAGES["float8"] in kernels else None


def quantize(params, mode="dynamic"):
    """Quantize the kernels of a UNet's transformers and 3x3 convolutions.

    Norms, time and text embeddings, conv_in, conv_out and 1x1 convolutions of residual blocks stay
    as they are.

    Args:
        params: the UNet's parameters, nested dict of NumPy or JAX arrays (also inside jit); one
            array is converted at a time.
        mode: "dynamic", int8 activations and kernels; "fast", the same in convolutions and wide
            feed-forwards only; or "weight", int8 kernels only.

    Returns:
        params with int8 kernels and a float32 (output channels,) dynamic_scale or weight_scale
        beside each.
    """
    quantized = flatten_dict(params, sep="/")
    for name, x in [*quantized.items()]:
        is_chosen = DENSE_KERNEL.fullmatch(name)
        if is_chosen and mode == "fast":
            is_chosen = name.endswith(FAST_DENSE) and x.shape[-2] >= FAST_WIDTH
        if is_chosen or CONVOLUTION_KERNEL.fullmatch(name):
            quantized |= int8_arrays(name, x, mode)
    return unflatten_dict(quantized, sep="/")


def int8_arrays(name, x, mode):
    """{path: array} of a kernel in int8 and its scale, float32 (output channels,)."""
    kernel, scale = to_int8(x, tuple(range(x.ndim - 1)))
    return {name: kernel, scale_name(name, mode): scale.reshape(-1)}


def to_int8(x, axes, rows_axis=None):
    """Symmetric quantization, rounding half to even, of a NumPy or jax array.

    axes: along which numbers share a scale; rows_axis: the mesh's axis whose devices share it, too.

    Returns (int8 array of -127 to 127, float32 scale that keeps axes with size 1).

    Source: arXiv 2004.09602, equations 8 to 10.
    """
    numpy = np if isinstance(x, np.ndarray) else jnp
    x = x.astype(np.float32)
    largest = numpy.abs(x).max(axes, keepdims=True)
    if rows_axis is not None:
        largest = global_max(largest, rows_axis)
    scale = largest / np.float32(127)
    return numpy.rint(x / numpy.maximum(scale, np.float32(SMALLEST_SCALE))).astype(np.int8), scale


def is_eight_bit(params):
    """Whether a layer's kernel is int8 or float8."""
    return "kernel" in params and jnp.dtype(params["kernel"].dtype).itemsize == 1


def eight_bit_layer(params, x, dtype, stride=1, padding=((0, 0), (0, 0)), rows_axis=None):
    """The output of a Dense or Conv whose kernel is int8 or float8.

    Args:
        params: the layer's kernel; dynamic_scale or weight_scale of int8; bias if it has one.
        x: (..., C); (B, H, W, C) for a convolution.
        dtype: of the result; dynamic mode sums in int32 and multiplies by float32 scales.
        stride, padding: of a convolution, as for convolve.
        rows_axis: of a convolution, see blocks.py.

    Returns:
        (..., output channels).
    """
    kernel = params["kernel"]
    if kernel.shape[:-2] == (1, 1):
        kernel = kernel.reshape(kernel.shape[-2:])  # a 1x1 convolution is a dense layer
    if "dynamic_scale" not in params:
        kernel, x = cast_later(kernel, x.astype(dtype))
        if "weight_scale" in params:
            kernel = kernel.astype(jnp.float32) * params["weight_scale"].astype(jnp.float32)
        kernel = kernel.astype(dtype)
        out = x @ kernel if kernel.ndim == 2 else convolve(x, kernel, stride, padding)
    else:
        if kernel.ndim == 2:
            x, x_scale = to_int8(x, -1)  # a scale per row
            sums = jnp.matmul(x, kernel, preferred_element_type=jnp.int32)
        else:
            x, x_scale = to_int8(x, (1, 2, 3), rows_axis)  # a scale per image
            sums = sum_of_matmuls(x, kernel, stride, padding, jnp.int32)
        out = sums.astype(jnp.float32) * x_scale * params["dynamic_scale"].astype(jnp.float32)
    if "bias" in params:
        out = out + params["bias"].astype(out.dtype)
    return out.astype(dtype)


def cast_later(kernel, x):
    """A layer's kernel and input, tied so that XLA casts the kernel up when the layer runs.

    XLA might otherwise cast all kernels before a loop, and keep them. On a TPU, whose compiler
    casts within each matmul, the tie would prevent fusions (9% of a UNet's estimated cycles); on a
    CPU the compiler drops it.
    """

    def together(kernel, x):
        return kernel, x

    def tied(kernel, x):
        return jax.lax.optimization_barrier((kernel, x))

    return jax.lax.platform_dependent(kernel, x, default=tied, tpu=together, cpu=together)
