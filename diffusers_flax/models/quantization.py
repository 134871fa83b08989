"""Int8 inference of the UNet: kernels as 8-bit integers, each with a scale per output channel.

    params["unet"] = quantize(params["unet"], "fast")    # int8 matmuls where they are faster
    params["unet"] = quantize(params["unet"], "weight")  # int8 storage only
    sample = unet.apply({"params": params["unet"]}, ...).sample

A layer is int8 if its parameters say so: Dense and Conv compute in int8 if there is a
`dynamic_scale` beside the kernel, and cast the kernel up before use if there is a `weight_scale`.
Both scales are the largest absolute weight of an output channel divided by 127. In dynamic mode the
activations are quantized in the program, with their own scales. This is for inference; dynamic
layers have no gradients. LoRA factors of an int8 layer stay as they are and are added in `dtype`.

A TPU multiplies int8 at twice the rate of bfloat16, but finding the scales of activations costs two
passes over them. By the compiler's estimate for a v5e this pays for wide convolutions and the first
layer of wide feed-forwards (the mode "fast"), not for the other layers. Convolutions are matmuls
here, because XLA has no integer convolution for GPUs (github.com/jax-ml/jax/issues/7637). On a CPU
int8 is slow, and in a loop it saves no memory: XLA keeps the kernels that it has cast up.

Source: Integer Quantization for Deep Learning Inference (arXiv 2004.09602), sections 3.1.2 and 3.2.
"""

import re
from functools import partial

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from diffusers_flax.devices.rows import largest_of_all
from diffusers_flax.models.convolution import convolve, sum_of_matmuls

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
# In mode "fast" the dense layers of this name with at least so many input channels.
FAST_DENSE, FAST_WIDTH = "ff/net_0/proj/kernel", 1280
SMALLEST_SCALE = 1e-30  # an array of zeros stays zeros; 1 / SMALLEST_SCALE is finite


def quantize(params, mode="dynamic"):
    """Quantize the kernels of a UNet's transformers and 3x3 convolutions.

    The other parameters are unchanged: norms, time and text embeddings, conv_in, conv_out and 1x1
    convolutions of residual blocks.

    Args:
        params: the UNet's parameters, nested dict of NumPy or JAX arrays (also inside jit), one
            array at a time.
        mode: "dynamic", int8 activations and kernels; "fast", these only in convolutions and wide
            feed-forwards, the other layers are unchanged; or "weight", int8 kernels only.

    Returns:
        params with int8 kernels and a float32 (output channels,) dynamic_scale or weight_scale
        beside each.

    Raises:
        ValueError: the mode is unknown, or params are not a UNet's or already int8.
    """
    if mode not in SCALE_NAMES:
        raise ValueError(f"mode={mode!r} is not known; known are {', '.join(SCALE_NAMES)}")
    quantized, num_kernels = {}, 0
    for name, x in flatten_dict(params, sep="/").items():
        quantized[name] = x
        is_dense, is_convolution = (
            bool(pattern.fullmatch(name)) for pattern in (DENSE_KERNEL, CONVOLUTION_KERNEL)
        )
        if is_dense and mode == "fast":
            is_dense = name.endswith(FAST_DENSE) and x.shape[-2] >= FAST_WIDTH
        if not is_dense and not is_convolution:
            continue
        if x.dtype == np.int8:
            raise ValueError(f"{name} is already int8; quantize the parameters that were loaded")
        kernel, scale = to_int8(x, tuple(range(x.ndim - 1)))
        quantized[name] = kernel
        quantized[f"{name.removesuffix('kernel')}{SCALE_NAMES[mode]}"] = scale.reshape(-1)
        num_kernels += 1
    if not num_kernels:
        raise ValueError("there is no kernel to quantize; params must be a UNet's, params['unet']")
    return unflatten_dict(quantized, sep="/")


def to_int8(x, axes, widen=lambda largest: largest):
    """Symmetric quantization, to the nearest even number.

    Args:
        x: NumPy or jax array of any real dtype.
        axes: the axes along which all numbers share a scale.
        widen: from the largest absolute numbers of x to those of all that shares the scale.

    Returns:
        (int8 array of -127 to 127, float32 scale that keeps axes with size 1); their product is x.

    Source: arXiv 2004.09602, equations 8 to 10.
    """
    numpy = np if isinstance(x, np.ndarray) else jnp
    x = x.astype(np.float32)
    scale = widen(numpy.abs(x).max(axes, keepdims=True)) / np.float32(127)
    return numpy.rint(x / numpy.maximum(scale, np.float32(SMALLEST_SCALE))).astype(np.int8), scale


def mode_of(params):
    """The mode in which a UNet's parameters were quantized; None: they are not int8."""
    names = flatten_dict(params, sep="/").keys()
    if any(name.endswith("/weight_scale") for name in names):
        return "weight"
    if any(name.endswith("to_q/dynamic_scale") for name in names):
        return "dynamic"
    return "fast" if any(name.endswith("/dynamic_scale") for name in names) else None


def is_int8(params):
    """Whether a layer's parameters are int8."""
    return any(name in params for name in SCALE_NAMES.values())


def int8_layer(params, x, dtype, stride=1, padding=((0, 0), (0, 0))):
    """The output of an int8 Dense or Conv.

    Args:
        params: of the layer, with kernel, dynamic_scale or weight_scale, and bias if it has one.
        x: (..., C); (B, H, W, C) for a convolution.
        dtype: of the result. Sums are int32 in dynamic mode, times float32 scales.
        stride, padding: of a convolution, as for convolve.

    Returns:
        (..., output channels).
    """
    kernel = params["kernel"]
    if kernel.shape[:-2] == (1, 1):
        kernel = kernel.reshape(kernel.shape[-2:])  # a 1x1 convolution is a dense layer
    if "weight_scale" in params:
        scale = params["weight_scale"].astype(jnp.float32)
        x, kernel = x.astype(dtype), (kernel.astype(jnp.float32) * scale).astype(dtype)
        out = x @ kernel if kernel.ndim == 2 else convolve(x, kernel, stride, padding)
    else:
        if kernel.ndim == 2:
            x, x_scale = to_int8(x, -1)  # a scale per row
            sums = int8_matmul(x, kernel)
        else:
            x, x_scale = to_int8(x, (1, 2, 3), largest_of_all)  # a scale per image
            sums = int8_convolution(x, kernel, stride, padding)
        out = sums.astype(jnp.float32) * x_scale * params["dynamic_scale"].astype(jnp.float32)
    if "bias" in params:
        out = out + params["bias"].astype(out.dtype)
    return out.astype(dtype)


int8_matmul = partial(jnp.matmul, preferred_element_type=jnp.int32)


def int8_convolution(x, kernel, stride, padding):
    """A convolution as one int8 matmul per position of the kernel.

    XLA's own integer convolution does not exist for GPUs, and on a TPU v5e it is no faster than
    bfloat16 by the compiler's estimate.

    Args:
        x: int8 (B, H, W, C).
        kernel: int8 (size, size, C, D).
        stride, padding: as for convolve.

    Returns:
        int32 (B, h, w, D).
    """
    return sum_of_matmuls(x, kernel, stride, padding, jnp.int32)
