"""Memory and traffic of compiled programs."""

from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest
from tpu_programs import needs_libtpu

from diffusers_flax.compiling.chips import TPUS, find_target, target_devices
from diffusers_flax.compiling.report import Part, program_costs, replicated_shapes
from diffusers_flax.models.quantization import store
from diffusers_flax.models.unet import FlaxUNet2DConditionModel
from diffusers_flax.training.sharding import gather, shard_axes, state_shapes, update_state

NUM_DEVICES = 4  # conftest.py's
V5E = TPUS["v5e"]


@needs_libtpu
def test_padding_is_that_of_tiles(libtpu_environment):
    """A TPU keeps the last axis in tiles of 128."""
    devices = target_devices(find_target("v5e-4"))
    narrow = jax.ShapeDtypeStruct((4, 8, 100), jnp.float32)
    unused = jax.ShapeDtypeStruct((4, 1000), jnp.float32)
    part = Part(jax.pmap(lambda x, y: x + 1, devices=devices), (narrow, unused))
    assert program_costs(part, V5E)["memory"]["padding"] == 4 * 8 * (128 - 100)


@needs_libtpu
def test_traffic_is_what_does_not_fit_on_the_chip(libtpu_environment):
    devices = target_devices(find_target("v5e-4"))
    large = jax.ShapeDtypeStruct((4, 16384, 4096), jnp.float32)  # twice the VMEM
    result = program_costs(Part(jax.pmap(lambda x: x + 1, devices=devices), (large,)), V5E)
    assert result["hbm_bytes"] == 2 * 16384 * 4096 * 4
    # 16 results of 4 MiB stay on the chip: arguments and the last result travel, one of them twice.
    small = jax.ShapeDtypeStruct((4, 1024, 1024), jnp.float32)

    def chain(x, w):
        for _ in range(16):
            x = jnp.tanh(x @ w)
        return x

    result = program_costs(Part(jax.pmap(chain, devices=devices), (small, small)), V5E)
    size = 1024 * 1024 * 4
    assert 3 * size <= result["hbm_bytes"] <= 4 * size


@needs_libtpu
def test_too_large_for_the_chip(libtpu_environment):
    devices = target_devices(find_target("v5e-4"))
    square = jax.ShapeDtypeStruct((4, 50_000, 50_000), jnp.float32)  # 9.3 GiB each
    result = program_costs(Part(jax.pmap(lambda x: x + 1, devices=devices), (square,)), V5E)
    assert 18.6 < result["needs"] / 2**30 < 19


@pytest.mark.slow
@needs_libtpu
def test_kernels_in_8_bits_are_cast_up_one_at_a_time(libtpu_environment):
    """A loop does not keep its kernels in bfloat16."""
    devices = target_devices(find_target("v5e-4"))
    unet = FlaxUNet2DConditionModel(
        block_out_channels=(128, 256),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1,
        attention_head_dim=8,
        cross_attention_dim=128,
        dtype=jnp.bfloat16,
    )
    params = jax.eval_shape(unet.init_weights, jax.random.key(0))
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), params)

    def loop(params, x, context):
        def step(i, x):
            return unet.apply({"params": params}, x, i, context).sample.astype(x.dtype)

        return jax.lax.fori_loop(0, 3, step, x)

    temporaries = {}
    for storage in (None, "int8"):
        stored = jax.eval_shape(partial(store, storage=storage), params)
        args = stored, jnp.zeros((1, 4, 16, 16)), jnp.zeros((1, 77, 128), jnp.bfloat16)
        args = replicated_shapes(args, len(devices))
        costs = program_costs(Part(jax.pmap(loop, devices=devices), args), V5E)
        temporaries[storage] = costs["memory"]["temporaries"]
    kernels = sum(2 * x.size for x in jax.tree.leaves(stored) if x.dtype == jnp.int8)
    assert kernels > 2**24
    assert temporaries["int8"] - temporaries[None] < kernels / 4, temporaries


@pytest.mark.slow
@needs_libtpu
def test_a_step_does_not_copy_the_parameters(libtpu_environment):
    """The optimizer moves less than 9 times the parameters' size, in place."""
    n, tx = 4, optax.adamw(1e-4)
    devices = target_devices(find_target("v5e-4"))
    shape = jax.ShapeDtypeStruct((2560, 2560), jnp.float32)
    shapes = {f"kernel_{i:02d}": shape for i in range(20)}  # more than the VMEM holds
    axes = shard_axes(shapes, n)

    def step(state, x):
        def loss(shards):
            y = x
            for w in gather(shards, axes, jnp.bfloat16).values():
                y = y + jnp.tanh(y @ w)
            return jnp.mean(jnp.square(y.astype(jnp.float32)))

        value, grads = jax.value_and_grad(loss)(state.params)
        return update_state(tx, state, value, grads, axes, max_grad_norm=1)[0]

    state = state_shapes(shapes, tx, axes, n)
    x = jax.ShapeDtypeStruct((n, 256, 2560), jnp.bfloat16)
    step = jax.pmap(step, axis_name="batch", devices=devices, donate_argnums=0)
    size = 4 * 20 * 2560**2  # of the whole parameters in float32
    with jax.numpy_dtype_promotion("standard"):  # optax promotes
        result = program_costs(Part(step, (state, x)), V5E)
    assert result["hbm_bytes"] < 9 * size
