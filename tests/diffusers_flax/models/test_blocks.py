"""Norms, gate, convolutions and attention against PyTorch, values and gradients."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import random_normal, slow

from diffusers_flax.flops import matmul_flops
from diffusers_flax.models.attention import (
    _attention,
    _each_value,
    attention,
    blockwise,
    padded_attention,
    splash,
    tracing_for,
)
from diffusers_flax.models.blocks import (
    TEXT,
    BasicTransformerBlock,
    Conv,
    gated_gelu,
    project_text,
)
from diffusers_flax.models.convolution import convolve, shifted_matmuls, winograd
from diffusers_flax.models.norms import group_norm, layer_norm


def value_and_gradients(function, args):
    """A function's value and gradients of a random weighted sum of it, NumPy arrays."""
    out, pull = jax.vjp(function, *map(jnp.asarray, args))
    weights = random_normal(*out.shape, seed=1)
    return [np.asarray(x) for x in (out, *pull(jnp.asarray(weights, out.dtype)))]


def torch_value_and_gradients(function, args):
    """The same by PyTorch in float64."""
    args = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in args]
    out = function(*args)
    out.backward(torch.from_numpy(random_normal(*out.shape, seed=1)).double())
    return [x.detach().numpy() for x in (out, *(arg.grad for arg in args))]


def assert_close(found, expected, tolerance, least=0.0):
    """Errors are at most tolerance times an array's largest value, or times `least`."""
    for ours, theirs in zip(found, expected, strict=True):
        atol = tolerance * max(np.abs(theirs).max(), least)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=atol)


def on_platform(name):
    """A jax.lax.platform_dependent that takes the named platform's branch."""
    return lambda *args, default, **branches: branches.get(name, default)(*args)


def torch_attention(query, key, value):
    """(B, T, N, H), (B, S, N, H) twice -> (B, T, N, H), by PyTorch."""
    args = (x.swapaxes(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(*args).swapaxes(1, 2)


@pytest.mark.parametrize("activate", [True, *slow(False)])
@pytest.mark.parametrize("offset", [0, 100])  # a mean 100 times the deviation: nothing cancels
@pytest.mark.parametrize(("shape", "num_groups"), [((2, 5, 7, 24), 8), ((3, 6, 12), 12)])
@pytest.mark.parametrize("outlier", [300, *slow(0)])  # of one position, in deviations
@pytest.mark.parametrize("place", [0, 0.5])  # of the outlier
@pytest.mark.parametrize("platform", ["default", "cuda"])
def test_group_norm(shape, num_groups, offset, activate, outlier, place, platform, monkeypatch):
    jax.clear_caches()  # of the other platform
    monkeypatch.setattr(jax.lax, "platform_dependent", on_platform(platform))
    channels, x = shape[-1], random_normal(*shape) + offset
    positions = x.reshape(len(x), -1, channels)
    positions[:, int(place * positions.shape[1])] += outlier
    args = x, random_normal(channels, seed=2), random_normal(channels, seed=3)

    def theirs(x, scale, bias):
        out = F.group_norm(x.movedim(-1, 1), num_groups, scale, bias, 1e-5).movedim(1, -1)
        return F.silu(out) if activate else out

    def ours(x, scale, bias):
        return group_norm(x, scale, bias, num_groups, 1e-5, activate, jnp.float32)

    expected = torch_value_and_gradients(theirs, args)
    assert_close(value_and_gradients(ours, args), expected, 3e-5 if offset else 3e-6)


def inputs_that_cancel(num_inputs):
    """Images (1, N, 8): two outliers, large means, half-empty images, bfloat16."""
    rng, side = np.random.default_rng(0), 128
    x = 0.01 * rng.standard_normal((1, side**2, 8), np.float32)
    # Rows at 1/4 and 3/4 of the middle column.
    x[:, [side**2 // 4 + side // 2, 3 * side**2 // 4 + side // 2]] = 1000
    yield x
    for number in range(num_inputs):
        N = (8**2, 12**2, 16**2, 20**2, 32**2)[number % 5]
        mean = rng.choice([0, 1, 10, 1e2, 1e3, 1e4]) * rng.standard_normal(8)
        deviation = 10 ** rng.uniform(-2, 2)
        x = mean + deviation * rng.standard_normal((1, N, 8))
        kind = number // 5 % 4
        if kind == 1:
            x[:, rng.integers(0, N, rng.integers(1, 4))] += rng.choice([10, 1e3, 1e4]) * deviation
        if kind == 2:
            x[:, : N // 2] = 0
        x = x.astype(np.float32)
        yield np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32) if kind == 3 else x


def reduce_in_pairs(operands, initial, join, axes):
    """jax.lax.reduce over one axis, as a tree."""
    operands = [jnp.moveaxis(x, axes[0], 0) for x in operands]
    while (n := len(operands[0])) > 1:
        halves = [(x[: n // 2], x[n // 2 : n // 2 * 2], x[n // 2 * 2 :]) for x in operands]
        joined = join(*(tuple(half[i] for half in halves) for i in range(2)))
        operands = [jnp.concatenate((x, half[2])) for x, half in zip(joined, halves)]
    return tuple(x[0] for x in operands)


@pytest.mark.parametrize("order", ["sequential", *slow("pairwise")])
@pytest.mark.parametrize("num_inputs", [20, *slow(1000)])
def test_group_norm_of_gpus_is_as_exact_as_pytorchs(num_inputs, order, monkeypatch):
    """Results and gradients have at most twice PyTorch's error, or two roundings."""
    jax.clear_caches()  # of the other branch
    monkeypatch.setattr(jax.lax, "platform_dependent", on_platform("cuda"))
    if order == "pairwise":
        monkeypatch.setattr(jax.lax, "reduce", reduce_in_pairs)
    weights = random_normal(8, seed=2), random_normal(8, seed=3)

    @jax.jit
    def ours(x, gradient):
        function = partial(group_norm.__wrapped__, num_groups=2, epsilon=1e-5, activate=False)
        out, pull = jax.vjp(lambda *args: function(*args, dtype=jnp.float32), x, *weights)
        return out, *pull(gradient)

    def theirs(x, gradient, dtype):
        args = [torch.tensor(each, dtype=dtype, requires_grad=True) for each in (x, *weights)]
        out = F.group_norm(args[0].movedim(-1, 1), 2, *args[1:], 1e-5).movedim(1, -1)
        out.backward(torch.tensor(gradient, dtype=dtype))
        return [each.detach().double().numpy() for each in (out, *(arg.grad for arg in args))]

    for x in inputs_that_cancel(num_inputs):
        gradient = random_normal(*x.shape, seed=1)
        exact = theirs(x, gradient, torch.float64)
        single = theirs(x, gradient, torch.float32)
        for found, other, expected in zip(ours(x, gradient), single, exact, strict=True):
            size = np.sqrt(np.square(expected).mean())
            error, their_error = (
                np.sqrt(np.square(each - expected).mean()) / size for each in (found, other)
            )
            assert error <= 2 * max(their_error, np.finfo(np.float32).eps)
    jax.clear_caches()


@pytest.mark.parametrize("offset", [0, 100])
def test_layer_norm(offset):
    args = random_normal(2, 9, 20) + offset, random_normal(20, seed=2), random_normal(20, seed=3)
    expected = torch_value_and_gradients(lambda x, *w: F.layer_norm(x, (20,), *w, eps=1e-5), args)
    found = value_and_gradients(lambda x, *w: layer_norm(x, *w, 1e-5, jnp.float32), args)
    assert_close(found, expected, 1e-6 if offset == 0 else 3e-5)


def test_gated_gelu():
    args = (3 * random_normal(2, 9, 20),)

    def theirs(x):
        hidden, gate = x.chunk(2, -1)
        return hidden * F.gelu(gate)

    assert_close(
        value_and_gradients(gated_gelu, args), torch_value_and_gradients(theirs, args), 1e-6
    )


def test_norms_save_only_their_input():
    """And a few numbers per channel or position."""
    x, scale, bias = jnp.ones((2, 64, 32), jnp.bfloat16), jnp.ones(32), jnp.zeros(32)
    for function in (
        lambda x: group_norm(x, scale, bias, 8, 1e-5, True, jnp.bfloat16),
        lambda x: layer_norm(x, scale, bias, 1e-5, jnp.bfloat16),
        gated_gelu,
    ):
        _, pull = jax.vjp(function, x)
        large = [y for y in jax.tree.leaves(pull) if y.size >= x.size]
        assert [(y.shape, y.dtype) for y in large] == [(x.shape, x.dtype)]


@pytest.mark.parametrize("lengths", [(128, 384), *slow(((256, 256),), ((1024, 2048),))])
@pytest.mark.parametrize("head_dim", [40, 64, 128, pytest.param(512, marks=pytest.mark.slow)])
def test_splash_is_attention(lengths, head_dim):
    """The TPU's kernel, interpreted, with smallest and largest blocks."""
    T, S = lengths
    shapes = (1, T, 2, head_dim), (1, S, 2, head_dim), (1, S, 2, head_dim)
    args = [random_normal(*shape, seed=i) for i, shape in enumerate(shapes)]
    found = value_and_gradients(partial(splash, interpret=True), args)
    assert_close(found, torch_value_and_gradients(torch_attention, args), 1e-5)


# Sizes for one block of all 6 heads, blocks of one head, and blocks of some of its queries.
@pytest.mark.parametrize("num_logits", [9 * 10, *slow(6 * 24 * 10, 24 * 10, 1)])
@pytest.mark.parametrize(("T", "S"), [(24, 10), (23, 10), (1, 10), (24, 1)])
def test_blockwise_is_attention(num_logits, T, S, monkeypatch):
    monkeypatch.setattr("diffusers_flax.models.attention.ALL_LOGITS", num_logits)
    monkeypatch.setattr("diffusers_flax.models.attention.BLOCK_LOGITS", num_logits)
    shapes = (2, T, 3, 8), (2, S, 3, 8), (2, S, 3, 8)
    args = [random_normal(*shape, seed=i) for i, shape in enumerate(shapes)]
    found = value_and_gradients(blockwise, args)
    # With one key the gradient of its logits is 0.
    assert_close(found, torch_value_and_gradients(torch_attention, args), 1e-5, least=1.0)


@pytest.fixture
def least_channels(request, monkeypatch):
    """Least number of channels for Winograd's algorithm; what jax traced before is forgotten."""
    monkeypatch.setattr("diffusers_flax.models.convolution.LEAST_CHANNELS", request.param)
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.parametrize("least_channels", [1, 320], indirect=True)  # with Winograd's, and without
@pytest.mark.parametrize("out_channels", [8, *slow(200)])  # fewer than positions, and more
@pytest.mark.parametrize(
    ("stride", "padding"),
    [(1, ((1, 1), (1, 1))), (2, ((1, 1), (1, 1))), (2, ((0, 1), (0, 1)))],
)
@pytest.mark.usefixtures("least_channels")
def test_convolve(out_channels, stride, padding):
    args = random_normal(2, 6, 9, 5), random_normal(3, 3, 5, out_channels, seed=2)

    def theirs(x, kernel):
        x = F.pad(x.movedim(-1, 1), (*padding[1], *padding[0]))
        return F.conv2d(x, kernel.permute(3, 2, 0, 1), stride=stride).movedim(1, -1)

    ours = partial(convolve, stride=stride, padding=padding)
    assert_close(value_and_gradients(ours, args), torch_value_and_gradients(theirs, args), 1e-5)


@pytest.mark.parametrize(("ours", "tolerance"), [(winograd, 2e-6), (shifted_matmuls, 1e-5)])
@pytest.mark.parametrize(
    "size", [(5, 7), *(pytest.param(x, marks=pytest.mark.slow) for x in ((1, 1), (6, 8), (2, 9)))]
)
def test_convolution_algorithms(size, ours, tolerance):
    """Values and gradients of PyTorch's convolution, in float32 and bfloat16."""
    args = random_normal(2, *size, 5), random_normal(3, 3, 5, 7, seed=2)

    def theirs(x, kernel):
        return F.conv2d(x.movedim(-1, 1), kernel.permute(3, 2, 0, 1), padding=1).movedim(1, -1)

    found = value_and_gradients(ours, args)
    assert_close(found, torch_value_and_gradients(theirs, args), tolerance)
    args = [jnp.asarray(x, jnp.bfloat16) for x in args]
    found = value_and_gradients(ours, args)
    assert {x.dtype for x in found} == {jnp.dtype(jnp.bfloat16)}
    args = [np.float32(x) for x in args]
    expected = torch_value_and_gradients(theirs, args)
    assert_close([np.float32(x) for x in found], expected, 2e-2)


@pytest.mark.slow
def test_convolution_of_each_platform():
    """CPU: matmuls for 1x1 kernels and few positions, Winograd for many channels; else XLA.

    GPU: matmuls for 1x1 kernels.

    TPU: a matmul per kernel position for small batches with many positions and channels; else XLA.
    """

    def lowered(platform, features, size=3, stride=1, side=4, channels=8, batch=1):
        x = jax.ShapeDtypeStruct((batch, side, side, channels), jnp.float32)
        conv = Conv(features, size, stride)
        params = jax.eval_shape(conv.init, jax.random.key(0), x)
        loss = jax.value_and_grad(lambda *args: conv.apply(*args).sum(), (0, 1))
        return jax.jit(loss).trace(params, x).lower(lowering_platforms=(platform,)).as_text()

    assert "dot_general" in lowered("cpu", 64) and "convolution" not in lowered("cpu", 64)
    assert "convolution" not in lowered("cpu", 8, 1) + lowered("cuda", 8, 1)
    for conv, is_winograd in (
        ((320, 3, 1, 16, 320), True),
        ((640, 3, 1, 16, 320), False),  # the kernel is too large for its 256 positions
        ((320, 3, 2, 64, 320), False),
    ):
        assert ("tensor<16x" in lowered("cpu", *conv)) == is_winograd
        assert "dot_general" not in lowered("tpu", *conv)
    for conv, is_matmuls in (
        ((320, 3, 1, 32, 320), True),
        ((320, 3, 1, 16, 320, 8), False),
        ((320, 3, 1, 256, 320), False),
        ((320, 3, 1, 32, 319), False),
    ):
        # The gradient of the kernel is XLA's convolution.
        assert lowered("tpu", *conv).count("dot_general") == 18 * is_matmuls
        assert "dot_general" not in lowered("cuda", *conv)
    for shape in (("cpu", 16), ("tpu", 64), ("cuda", 64), ("tpu", 8, 1)):
        text = lowered(*shape)
        assert "dot_general" not in text and "convolution" in text


def lowered(platform, length, key_length=None, dtype=jnp.bfloat16, **options):
    """The program of attention's gradient for a platform, text."""
    query = jax.ShapeDtypeStruct((2, length, 320), dtype)
    key = jax.ShapeDtypeStruct((2, key_length or length, 320), dtype)

    def loss(*args):
        return attention(*args, num_heads=8, **options).astype(jnp.float32).sum()

    with jax.numpy_dtype_promotion("standard"):  # jax's own code promotes in the backward pass
        traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(query, key, key)
        return traced.lower(lowering_platforms=(platform,)).as_text()


def test_kernel_of_each_platform(monkeypatch):
    assert "tpu_custom_call" in lowered("tpu", 1024)
    assert "tpu_custom_call" not in lowered("tpu", 1024, 77)  # text
    assert "tpu_custom_call" not in lowered("tpu", 1024, is_causal=True)
    assert "custom_call" not in lowered("cpu", 1024)

    # As on a GPU, where jax reads cuDNN's version and the compute capability.
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda capability: True)
    with tracing_for(9.0):
        text = lowered("cuda", 1024)
        assert "__cudnn$fmhaSoftmax" in text and "__cudnn$fmhaSoftmaxBackward" in text
        text = lowered("cuda", 1024, 77)  # text
        assert "__cudnn$fmhaSoftmax" in text and "__cudnn$fmhaSoftmaxBackward" in text
        assert "2x80x8x40xbf16" in text and "77x1024" not in text
        assert "cudnn" not in lowered("cuda", 1024, dtype=jnp.float32)
        assert "cudnn" not in lowered("cuda", 1024, is_causal=True)
        assert "cudnn" not in lowered("tpu", 1024)
    with tracing_for(7.5):
        assert "cudnn" not in lowered("cuda", 1024)
    assert "cudnn" not in lowered("cuda", 1024)  # this machine's device is a CPU


@pytest.mark.parametrize(
    "kernel", ["blockwise", "blocks", *slow("splash", "splash of 128", "xla", "padded")]
)
@pytest.mark.parametrize("dtype", [jnp.float32, *slow(jnp.bfloat16)])
def test_values_side_by_side(kernel, dtype, monkeypatch):
    """Two values that share a softmax, in each kernel, against PyTorch with one after the other."""
    if kernel == "blocks":
        monkeypatch.setattr("diffusers_flax.models.attention.ALL_LOGITS", 1)
        monkeypatch.setattr("diffusers_flax.models.attention.BLOCK_LOGITS", 1000)
    head_dim = 64 if kernel == "splash of 128" else 40
    T, S = (128, 256) if kernel.startswith("splash") else (24, 9)
    shapes = (2, T, 3, head_dim), *[(2, S, 3, head_dim)] * 3
    arrays = [jnp.asarray(random_normal(*shape, seed=i), dtype) for i, shape in enumerate(shapes)]
    query, key, *values = arrays
    ours = {
        "splash": partial(splash, interpret=True),
        "xla": partial(_each_value, partial(_attention, implementation="xla")),
        "padded": partial(_each_value, partial(padded_attention, implementation="xla")),
    }.get(kernel.split()[0], blockwise)
    found = ours(query, key, jnp.concatenate(values, -1))
    query, key, *values = (torch.from_numpy(np.float64(x)) for x in arrays)
    expected = torch.cat([torch_attention(query, key, value) for value in values], -1)
    assert found.dtype == dtype
    assert_close([np.float32(found)], [expected.numpy()], 1e-5 if dtype == jnp.float32 else 1e-2)


@pytest.mark.parametrize("capability", [None, 9.0])
def test_text_is_projected_once(capability):
    """A block with keys and values of the text gives what it gives without, padded or not."""
    x, states = (random_normal(2, length, 16, seed=length) for length in (12, 77))
    block = BasicTransformerBlock(16, num_heads=2)
    with tracing_for(capability):
        params = block.init(jax.random.key(0), x, states)["params"]
        expected = block.apply({"params": params}, x, states)
        text = project_text(params, states, jnp.float32)
        found = block.apply({"params": params, TEXT: text}, x, states)
        params["attn2"] |= {"to_k": {}, "to_v": {}}  # are not read
        again = block.apply({"params": params, TEXT: text}, x, states)
    assert text["attn2"]["key"].shape == (2, 80 if capability else 77, 16)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    np.testing.assert_array_equal(again, found)


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_is_pytorchs(is_causal):
    shapes = (2, 24, 32), (2, 24, 32), (2, 24, 32)
    args = [random_normal(*shape, seed=i) for i, shape in enumerate(shapes)]

    def theirs(*args):
        heads = [x.unflatten(-1, (4, 8)).swapaxes(1, 2) for x in args]
        out = F.scaled_dot_product_attention(*heads, is_causal=is_causal, scale=1 / math.sqrt(8))
        return out.swapaxes(1, 2).flatten(2)

    found = value_and_gradients(partial(attention, num_heads=4, is_causal=is_causal), args)
    assert_close(found, torch_value_and_gradients(theirs, args), 1e-5)


def test_all_flops_of_attention_are_counted():
    """Kernels and loops hide them from XLA's analysis."""
    query = jax.ShapeDtypeStruct((2, 1024, 320), jnp.float32)

    def attend(query):
        return attention(query, query, query, num_heads=8)

    def total(query):
        return attend(query).sum()

    products = 2 * (2 * 2 * 1024**2 * 320)
    for platform in ("cpu", "tpu"):
        lowered = jax.jit(attend).trace(query).lower(lowering_platforms=(platform,))
        assert lowered.cost_analysis()["flops"] < products / 2
    for function, expected in (attend, products), (jax.grad(total), 3 * products):
        assert matmul_flops(jax.make_jaxpr(function)(query).jaxpr) == (expected, 0)
