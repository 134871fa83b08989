"""Int8 inference against NumPy and bfloat16, and which layers of published UNets are int8."""

import json
import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax.traverse_util import flatten_dict, unflatten_dict
from helpers import ROOT, psnr, random_normal
from tpu_programs import needs_libtpu

from diffusers_flax.compiling.chips import find_target, target_devices
from diffusers_flax.models.blocks import Conv, Dense
from diffusers_flax.models.quantization import quantize
from diffusers_flax.training.lora import add_lora
from diffusers_flax.training.sharding import combine

TINY = {
    "in_channels": 4,
    "block_out_channels": (32, 64),
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "layers_per_block": 1,
    "attention_head_dim": 2,
    "cross_attention_dim": 24,
    "norm_num_groups": 8,
}
# Where a UNet has these; quantize selects by path.
DENSE = "mid_block/attentions_0/proj_in"
BLOCK = "mid_block/attentions_0/transformer_blocks_0"
RESNET = "mid_block/resnets_0"


def quantize_at(path, params, *args):
    """quantize the parameters of a module as if it were at this path of a UNet."""
    tree = quantize(unflatten_dict({path: params}, sep="/"), *args)
    flat = flatten_dict(tree, sep="/").items()
    return unflatten_dict({name.removeprefix(f"{path}/"): x for name, x in flat}, sep="/")


def int8_of(x, axis):
    """(x as integers, scale) by NumPy."""
    scale = np.abs(x).max(axis, keepdims=True) / np.float32(127)
    return np.rint(x / np.where(scale == 0, 1, scale)).astype(np.int64), scale.astype(np.float64)


def quality(ours, theirs):
    """PSNR in dB; the peak is the largest absolute value of theirs."""
    return psnr(ours, theirs, np.abs(theirs).max())


@cache
def sdxl_shapes(dtype=jnp.float32):
    """The parameter tree of SDXL's published UNet, as shapes."""
    published = json.loads((ROOT / "tests" / "published_flax_param_shapes.json").read_text())
    shapes = {name: jax.ShapeDtypeStruct(x, dtype) for name, x in published["sdxl_unet"].items()}
    return unflatten_dict(shapes, sep="/")


def dense_params():
    params = {
        "kernel": random_normal(24, 40) * random_normal(40, seed=1),
        "bias": random_normal(40, seed=2),
    }
    params["kernel"][:, 3] = 0
    return params


@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray])
def test_kernel(convert):
    params = jax.tree.map(convert, dense_params())
    integers, scale = int8_of(np.asarray(params["kernel"]), 0)
    for function in (quantize_at, jax.jit(quantize_at, static_argnums=0)):
        found = function(DENSE, params)
        assert found["kernel"].dtype == np.int8 and found["dynamic_scale"].dtype == np.float32
        np.testing.assert_array_equal(found["kernel"], integers)
        np.testing.assert_allclose(found["dynamic_scale"], scale[0], rtol=1e-6)
        assert found["bias"] is params["bias"] or function is not quantize_at
        expected = type(params["kernel"]) if function is quantize_at else jax.Array
        assert isinstance(found["kernel"], expected)
    assert not np.any(found["kernel"][:, 3])


@pytest.mark.parametrize("use_bias", [True, False])
def test_dynamic_dense(use_bias):
    params, x = dense_params(), random_normal(2, 5, 24, seed=3) * random_normal(2, 5, 1, seed=4)
    x[0, 1] = 0
    if not use_bias:
        del params["bias"]
    found = Dense(40, use_bias).apply({"params": quantize_at(DENSE, params)}, x)
    (x, x_scale), (kernel, scale) = int8_of(x, -1), int8_of(params["kernel"], 0)
    expected = (x @ kernel) * x_scale * scale + params.get("bias", 0)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    assert found.dtype == np.float32


@pytest.mark.parametrize("size", [1, 3])
def test_weight_mode(size):
    kernel, bias, x = (
        random_normal(size, size, 8, 12),
        random_normal(12, seed=1),
        random_normal(2, 5, 6, 8, seed=2),
    )
    path = DENSE if size == 1 else f"{RESNET}/conv1"
    params = quantize_at(path, {"kernel": kernel, "bias": bias}, "weight")
    assert params.keys() == {"kernel", "bias", "weight_scale"}
    assert params["kernel"].dtype == np.int8
    found = Conv(12, size).apply({"params": params}, x)
    integers, scale = int8_of(kernel, (0, 1, 2))
    expected = torch_convolution(x, integers * scale) + bias
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def torch_convolution(x, kernel, stride=1):
    """A convolution in float64, exact for integers: x (B, H, W, C), kernel HWIO."""
    x, kernel = (torch.from_numpy(np.asarray(y, np.float64)) for y in (x, kernel))
    out = torch.nn.functional.conv2d(
        x.movedim(-1, 1), kernel.permute(3, 2, 0, 1), stride=stride, padding=kernel.shape[0] // 2
    )
    return out.movedim(1, -1).numpy()


@pytest.mark.parametrize(("size", "stride"), [(1, 1), (3, 1), (3, 2)])
def test_dynamic_convolution(size, stride):
    kernel, bias, x = (
        random_normal(size, size, 8, 12),
        random_normal(12, seed=1),
        random_normal(2, 6, 7, 8, seed=2),
    )
    x[1] *= 50
    path = DENSE if size == 1 else "down_blocks_0/downsamplers_0/conv"
    params = quantize_at(path, {"kernel": kernel, "bias": bias}, "dynamic")
    padding = ((size // 2, size // 2),) * 2
    found = Conv(12, size, stride, padding).apply({"params": params}, x)
    x, x_scale = int8_of(x, -1 if size == 1 else (1, 2, 3))
    integers, scale = int8_of(kernel, (0, 1, 2))
    expected = torch_convolution(x, integers, stride) * x_scale * scale + bias
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["dynamic", "weight"])
def test_lora_of_int8(mode):
    params, x = dense_params(), random_normal(3, 24, seed=1)
    trained, frozen = add_lora({"to_q": params}, 4, None, ("to_q",))
    trained["to_q"]["lora_B"]["kernel"] = random_normal(4, 40, seed=5)
    path = f"{BLOCK}/attn1/to_q"
    layer = Dense(40)
    plain = layer.apply({"params": quantize_at(path, params, mode)}, x)
    found = layer.apply({"params": quantize_at(path, combine(frozen, trained)["to_q"], mode)}, x)
    a, b = (trained["to_q"][f"lora_{letter}"]["kernel"] for letter in "AB")
    np.testing.assert_allclose(found - plain, x @ a @ b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "mode, dense, convolutions",
    [
        ("dynamic", 70 * 10 + 11 * 2, 38),  # in all layers of 70 blocks of 11 transformers
        ("weight", 70 * 10 + 11 * 2, 38),
        ("fast", 60, 38),  # the first layer of the feed-forwards with 1280 channels
    ],
)
def test_layers_of_sdxl(mode, dense, convolutions):
    """As docs/acceleration.md says; 17 residual blocks and 4 samplers have 3x3 kernels."""
    tree = jax.eval_shape(partial(quantize, mode=mode), sdxl_shapes())
    kernels = [x.ndim for x in jax.tree.leaves(tree) if x.dtype == jnp.int8]
    assert [kernels.count(2), kernels.count(4)] == [dense, convolutions]


@needs_libtpu
def test_tpu_multiplies_int8(libtpu_environment):
    """Compiled for a v5e, a dynamic layer is one matmul of s8 with an s32 result."""
    params = quantize_at(DENSE, {"kernel": random_normal(256, 512), "bias": random_normal(512)})
    layer = Dense(512, dtype=jnp.bfloat16)
    device = target_devices(find_target("v5e-1"))[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    program = jax.jit(lambda params, x: layer.apply({"params": params}, x), out_shardings=sharding)
    x = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16, sharding=sharding)
    text = program.lower(params, x).compile().as_text()
    assert re.search(r"= s32\[256,512\].* convolution\(", text)
