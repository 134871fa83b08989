"""Sharded state: how arrays are split, gathered, reduced and put on devices."""

import os
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import ROOT

from diffusers_flax.training import sharding
from diffusers_flax.training.sharding import (
    KERNEL_ORDER,
    Split,
    gather,
    join_vectors,
    reduce_scatter_stages,
    replicate,
    replicate_frozen,
    separate_vectors,
    shard_axes,
    shard_batch,
    split_of,
    start_state,
    state_shapes,
    to_host,
)

NUM_DEVICES = 4  # conftest.py's


def test_a_batch_is_divided_over_the_devices():
    batch = {"x": np.arange(24).reshape(8, 3), "y": np.zeros((8, 0))}
    for name, x in shard_batch(batch).items():
        np.testing.assert_array_equal(x, batch[name].reshape(4, 2, -1))


def shapes_of(*shapes):
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


def test_arrays_are_split_along_their_longest_axis():
    shapes = shapes_of((3, 3, 320, 640), (3, 3, 320, 4), (3, 3, 4, 4), (8,), ())
    assert [split_of(x, 8) for x in shapes] == [
        *(Split(3, 8), Split(2, 8), Split(2, 4), Split(0, 8), Split(0, 1))
    ]
    assert [split_of(x, 1) for x in shapes] == [Split(0, 1)] * 5
    # Of 256 devices every 64th has the same part; vectors stay whole.
    shapes = shapes_of((3, 3, 320, 320), (1920, 640), (320,), (0, 256), (0, 0), (5, 7))
    assert [split_of(x, 256) for x in shapes] == [
        *(Split(2, 64), Split(0, 128), Split(0, 1), Split(1, 256), Split(0, 1), Split(0, 1))
    ]


def test_vectors_are_joined_shard_by_shard():
    """Every shard of the joined vector has the shards of all its vectors, in order."""
    params = {"a": {"bias": np.arange(4), "kernel": np.ones((3, 3))}, "scale": np.arange(10, 16)}
    params["odd"] = np.arange(20, 23)
    axes = shard_axes(params, 2)
    flat = {("a", "bias"): params["a"]["bias"], ("a", "kernel"): params["a"]["kernel"]}
    flat |= {("scale",): params["scale"], ("odd",): params["odd"]}
    joined = join_vectors(flat, axes)
    assert joined.keys() == axes.keys() == {("a", "kernel"), ("vectors", "2"), ("vectors", "1")}
    assert joined["vectors", "2"].tolist() == [0, 1, 10, 11, 12, 2, 3, 13, 14, 15]
    assert joined["vectors", "1"].tolist() == [20, 21, 22]
    second = {("a", "bias"): [2, 3], ("scale",): [13, 14, 15], ("odd",): [20, 21, 22]}
    shards = {("vectors", "2"): jnp.asarray(joined["vectors", "2"][5:])}
    found, splits = separate_vectors(shards | {("vectors", "1"): joined["vectors", "1"]}, axes)
    assert {path: x.tolist() for path, x in found.items()} == second
    assert splits == {("a", "bias"): Split(0, 2), ("scale",): Split(0, 2), ("odd",): Split(0, 1)}


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_the_gradient_of_gather_is_the_mean_in_float32(num_devices, platform):
    """Also for a gather in bfloat16, in which a sum over devices would lose small gradients."""
    rng = np.random.default_rng(0)
    shapes = {"a": (8, 4), "b": (3,), "c": (3, 3, 4, 8), "d": (3, 3, 5, 7), "e": (4,), "f": (8,)}
    params = {k: rng.standard_normal(shape, np.float32) for k, shape in shapes.items()}
    weights = {k: 2.0 ** rng.integers(-12, 1, (num_devices, *x.shape)) for k, x in params.items()}
    weights = jax.tree.map(lambda x: x.astype(np.float32), weights)  # exact in bfloat16
    axes, devices = shard_axes(params, num_devices, platform), jax.devices()[:num_devices]
    state = start_state(params, optax.identity(), axes, devices)
    shapes = state_shapes(params, optax.identity(), axes, num_devices).params
    assert jax.tree.map(jnp.shape, state.params) == jax.tree.map(jnp.shape, shapes)

    def grads_of(shards, weights, dtype):
        def loss(shards):
            whole = gather(shards, axes, dtype)
            return sum((whole[k].astype(jnp.float32) * weights[k]).sum() for k in whole)

        return jax.grad(loss)(shards)

    for dtype in (jnp.float32, jnp.bfloat16):
        p_grads = jax.pmap(partial(grads_of, dtype=dtype), axis_name="batch", devices=devices)
        grads = to_host(p_grads(state.params, weights), axes)
        for name, x in grads.items():
            assert x.dtype == np.float32 and x.flags.c_contiguous
            np.testing.assert_allclose(x, weights[name].mean(axis=0), rtol=1e-6)


def test_frozen_kernels_keep_their_shapes(monkeypatch):
    """On a GPU they lie in memory in another order, which a pmapped program takes as it is."""
    order = sharding.kernel_order
    monkeypatch.setattr(sharding, "kernel_order", lambda x, platform=None: order(x, "gpu"))
    params = {"kernel": np.random.default_rng(0).random((3, 3, 8, 16), np.float32)}
    params["bias"] = np.ones(16, np.float32)
    frozen = replicate_frozen(params)
    assert frozen["kernel"].format.layout.major_to_minor == (0, 4, 1, 2, 3)
    program = jax.pmap(lambda tree: jax.tree.map(lambda x: 2 * x, tree), axis_name="batch")
    compiled = program.lower(frozen).compile()
    assert compiled.input_formats[0][0]["kernel"].layout == frozen["kernel"].format.layout
    for name, x in compiled(frozen).items():
        np.testing.assert_array_equal(x, np.stack([2 * params[name]] * NUM_DEVICES))


def test_kernels_of_gpus():
    """Output channels come first, and are split if that is the longest axis."""
    shapes = shapes_of((3, 3, 320, 640), (3, 3, 640, 4), (8, 4))
    splits = [Split(0, 8, KERNEL_ORDER), Split(3, 8, KERNEL_ORDER), Split(0, 8)]
    assert [split_of(x, 8, "gpu") for x in shapes] == splits
    splits = [Split(0, 1, KERNEL_ORDER)] * 2 + [Split(0, 1)]
    assert [split_of(x, 1, "gpu") for x in shapes] == splits


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_parameters_in_half_precision_are_refused(dtype):
    """Updates of float16 parameters overflow to NaN after a few steps of README's loop."""
    params = {"conv_in": {"kernel": np.zeros((2, 2), dtype), "bias": np.zeros(2, np.float32)}}
    axes = shard_axes(params, 1)
    match = rf"conv_in/kernel is {jnp.dtype(dtype).name}, not float32; .*param_dtype="
    with pytest.raises(ValueError, match=match):
        start_state(params, optax.adam(1e-4), axes)


def test_shards_on_sixteen_devices():
    """With the branch of TPUs and the other: parameters, gradient and norm of closed forms.

    No axis of "b" is a multiple of 16: four devices share it, four times.
    """
    program = """
import jax, jax.numpy as jnp, numpy as np, optax
from diffusers_flax.training.sharding import Split, gather, global_norm, shard_axes
from diffusers_flax.training.sharding import start_state, to_host

rng, n = np.random.default_rng(0), 16
shapes = {"a": (3, 32, 6), "b": (20, 12), "bias": (20,), "scale": (32,)}
params = {name: rng.integers(-9, 9, shape).astype(np.float32) for name, shape in shapes.items()}
weights = {k: rng.integers(-9, 9, (n, *x.shape)).astype(np.float32) for k, x in params.items()}
mean = {k: x.mean(axis=0) for k, x in weights.items()}
axes = shard_axes(params, n)
assert axes["b",] == Split(0, 4)
state = start_state(params, optax.identity(), axes)
assert state.params["b",].shape == (16, 5, 12)
for k, x in to_host(state.params, axes).items():
    np.testing.assert_array_equal(x, params[k])

def step(shards, weights):
    def loss(shards):
        whole = gather(shards, axes, jnp.bfloat16)
        return sum((x.astype(jnp.float32) * weights[k]).sum() for k, x in whole.items()), whole
    grads, whole = jax.grad(loss, has_aux=True)(shards)
    return grads, whole, global_norm(grads, axes)

def on_tpu(*args, tpu, default):
    return tpu(*args)

for choose in (jax.lax.platform_dependent, on_tpu):
    jax.lax.platform_dependent = choose
    grads, whole, norm = jax.pmap(step, axis_name="batch")(state.params, weights)
    for k, x in to_host(grads, axes).items():
        np.testing.assert_array_equal(x, mean[k])
        for copy in np.asarray(whole[k]).astype(np.float32):
            np.testing.assert_array_equal(copy, params[k])
    squares = sum(np.square(x).sum() for x in mean.values())
    np.testing.assert_allclose(norm, np.sqrt(squares), rtol=1e-6)
    jax.clear_caches()
"""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=16"}
    subprocess.run([sys.executable, "-c", program], env=os.environ | flags, cwd=ROOT, check=True)


@pytest.mark.parametrize(
    ("num_shards", "num_devices", "sizes"),
    [(1, 1, [1]), (8, 8, [8]), (9, 9, [9]), (12, 12, [4, 3]), (64, 256, [4, 4, 4])],
)
def test_stages_of_a_reduce_scatter(num_shards, num_devices, sizes):
    """The first groups are hosts of four chips."""
    stages = reduce_scatter_stages(num_shards, num_devices)
    assert [len(groups[0]) for groups in stages] == sizes
    assert all(sorted(np.ravel(groups)) == list(range(num_devices)) for groups in stages)
    assert stages[0][0] == list(range(sizes[0]))


def test_arrays_that_are_put_can_be_given_away():
    """Also arrays whose memory a CPU could use in place: a step would hold them twice."""
    memory = np.zeros(2**12, np.uint8)
    start = -memory.ctypes.data % 64
    aligned = memory[start : start + 2**10].view(np.float32)
    for x in (aligned, memory[start + 4 : start + 1028].view(np.float32)):
        on_devices = replicate(x)
        add = jax.pmap(lambda x: x + 1, axis_name="batch", donate_argnums=0)
        before = [shard.data.unsafe_buffer_pointer() for shard in on_devices.addressable_shards]
        after = [shard.data.unsafe_buffer_pointer() for shard in add(on_devices).addressable_shards]
        assert before == after
