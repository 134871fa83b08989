"""Types of chips; memory and traffic of compiled programs."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import ROOT
from tpu_programs import needs_libtpu

from compile_for import TrainFlags
from diffusers_flax.compiling.chips import (
    CHIPS,
    HOST_MS,
    find_slice,
    peak_share,
    roofline_seconds,
    slice_devices,
)
from diffusers_flax.compiling.costs import program_costs, replicated_shapes
from diffusers_flax.compiling.programs import Program
from diffusers_flax.compiling.report import make_report, print_times, verdict
from diffusers_flax.models.quantization import store
from diffusers_flax.models.unet import FlaxUNet2DConditionModel
from diffusers_flax.training.sharding import (
    gather,
    shard_axes,
    state_shapes,
    update_state,
)

NUM_DEVICES = 4  # conftest.py's
V5E = CHIPS["v5e"]


@pytest.mark.variants
@pytest.mark.parametrize(
    ("name", "num_chips", "num_hosts", "shape"),
    [
        ("v4-8", 4, 1, "2x2x1"),
        ("v4-32", 16, 4, "2x2x4"),
        ("v5p-8", 4, 1, "2x2x1"),
        ("v5e-1", 1, 1, "1x1"),
        ("v5e-8", 8, 1, "2x4"),
        ("v5e-16", 16, 4, "4x4"),
        ("v5litepod-16", 16, 4, "4x4"),
        ("v6e-8", 8, 1, "2x4"),
        ("v6e-256", 256, 64, "16x16"),
    ],
)
def test_types_count_cores_or_chips(name, num_chips, num_hosts, shape):
    tpu = find_slice(name)
    assert (tpu.num_chips, tpu.num_hosts, tpu.shape) == (num_chips, num_hosts, shape)


@needs_libtpu
@pytest.mark.parametrize("name", ["v4-32", "v5p-8", "v5e-1", "v5e-16", "v6e-8", "v4-1024"])
def test_topologies_have_as_many_devices(name, libtpu_environment):
    tpu = find_slice(name)
    devices = slice_devices(tpu)
    assert len(devices) == tpu.num_chips
    kinds = {"v4": "TPU v4", "v5p": "TPU v5", "v5e": "TPU v5 lite", "v6e": "TPU v6 lite"}
    assert {device.device_kind for device in devices} == {kinds[name.split("-")[0]]}


def test_roofline_by_hand():
    assert roofline_seconds(V5E, 394e12, 0.82e12) == pytest.approx(2.0)  # 2 x 197 TFLOP
    assert roofline_seconds(V5E, 197e12, 2.46e12) == pytest.approx(3.0)  # 3 x 0.82 TB
    # 98.5 TFLOP in bfloat16 and 786 in int8
    assert roofline_seconds(V5E, 884.5e12, 0.0, int8_flops=786e12) == pytest.approx(2.5)


def test_every_chip_has_a_share_of_its_peak():
    shares = {name: peak_share(chip) for name, chip in CHIPS.items()}
    assert shares == {"v4": 0.42, "v5e": 0.61, "v5p": 0.42, "v6e": 0.42}
    assert {name for name, chip in CHIPS.items() if chip.share} == {"v5e", "v6e"}


@pytest.mark.parametrize(
    ("tpu", "hosts", "share"),
    [
        ("v5e-16", 4, "61% of the peak, as SDXL reached in a published measurement of this chip"),
        ("v5p-8", 1, "42% of the peak, the lowest published one: no measurement of this chip"),
    ],
)
def test_printed_estimate(capsys, tpu, hosts, share):
    """It names its share, and on several hosts the host's time."""
    report = dict.fromkeys(("flops", "hbm_bytes", "interconnect_bytes"), 1e12)
    report |= {"program": "train", "tpu": tpu, "hosts": hosts, "chips": 16, "batch_per_chip": 4}
    report |= {"step_seconds": 0.05, "estimated_seconds": 0.1}
    print_times(report | {"images_per_second_per_chip": 80, "images_per_second": 1280})
    said = capsys.readouterr().out
    assert f"\nby estimate 100 ms, 40 pairs/s per chip, 640 on the slice, at {share}" in said
    assert ("\nthe host's thread needs about " in said) == (hosts > 1)


def test_host_time_is_the_measured_one():
    """The longest of all versions of jax."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "train.json").read_text())
    for model, family in (("Stable Diffusion 1.5", "sd15"), ("SDXL", "sdxl")):
        case = f"{family} host time, 2 processes"
        measured = [row["host_ms"] for name, row in rows.items() if name.startswith(case)]
        assert round(max(measured)) == HOST_MS[model]


def test_measure_counts_what_a_program_does():
    def multiply(total, x, unused):
        return total + x @ x

    square = jax.ShapeDtypeStruct((NUM_DEVICES, 64, 64), jnp.float32)
    unused = jax.ShapeDtypeStruct((NUM_DEVICES, 1000), jnp.float32)
    result = program_costs(jax.pmap(multiply, donate_argnums=0), (square, square, unused), V5E)
    assert result["padding"] == 0  # a CPU has none
    assert result["outputs"] < 64  # the sum takes its argument's place


@needs_libtpu
def test_padding_is_that_of_tiles(libtpu_environment):
    """A TPU keeps the last axis in tiles of 128."""
    devices = slice_devices(find_slice("v5e-4"))
    narrow = jax.ShapeDtypeStruct((4, 8, 100), jnp.float32)
    unused = jax.ShapeDtypeStruct((4, 1000), jnp.float32)
    result = program_costs(jax.pmap(lambda x, y: x + 1, devices=devices), (narrow, unused), V5E)
    assert result["padding"] == 4 * 8 * (128 - 100)


@needs_libtpu
def test_traffic_is_what_does_not_fit_on_the_chip(libtpu_environment):
    devices = slice_devices(find_slice("v5e-4"))
    large = jax.ShapeDtypeStruct((4, 16384, 4096), jnp.float32)  # twice the VMEM
    result = program_costs(jax.pmap(lambda x: x + 1, devices=devices), (large,), V5E)
    assert result["hbm_bytes"] == 2 * 16384 * 4096 * 4
    # 16 results of 4 MiB stay on the chip: arguments and the last result travel, one of them twice.
    small = jax.ShapeDtypeStruct((4, 1024, 1024), jnp.float32)

    def chain(x, w):
        for _ in range(16):
            x = jnp.tanh(x @ w)
        return x

    result = program_costs(jax.pmap(chain, devices=devices), (small, small), V5E)
    size = 1024 * 1024 * 4
    assert 3 * size <= result["hbm_bytes"] <= 4 * size


@needs_libtpu
def test_too_large_for_the_chip(libtpu_environment):
    devices = slice_devices(find_slice("v5e-4"))
    square = jax.ShapeDtypeStruct((4, 50_000, 50_000), jnp.float32)  # 9.3 GiB each
    result = program_costs(jax.pmap(lambda x: x + 1, devices=devices), (square,), V5E)
    assert 18.6 < result["needs"] / 2**30 < 19
    program = Program(step=None, args=(), held={}, batch_per_chip=1)
    config = TrainFlags(tpu="v5e-4")
    report = make_report(config, "train", find_slice("v5e-4"), program, {"step": result}, None)
    assert verdict(report) == (
        f"does not fit: 1 per chip need {result['needs'] / 2**30:.2f} of 15.75 GiB"
    )


@needs_libtpu
def test_nothing_is_kept_in_the_cache(libtpu_environment, programs, tmp_path):
    """jax cannot read such an executable back and would warn."""
    devices = slice_devices(find_slice("v5e-4"))
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    try:
        args = (jax.ShapeDtypeStruct((4,), "int32"),)
        program_costs(jax.pmap(lambda x: x - 2, devices=devices), args, V5E)
    finally:
        jax.config.update("jax_compilation_cache_dir", programs)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@needs_libtpu
def test_kernels_in_8_bits_are_cast_up_one_at_a_time(libtpu_environment):
    """A loop does not keep its kernels in bfloat16."""
    devices = slice_devices(find_slice("v5e-4"))
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
        costs = program_costs(jax.pmap(loop, devices=devices), args, V5E)
        temporaries[storage] = costs["temporaries"]
    kernels = sum(2 * x.size for x in jax.tree.leaves(stored) if x.dtype == jnp.int8)
    assert kernels > 2**24
    assert temporaries["int8"] - temporaries[None] < kernels / 4, temporaries


@pytest.mark.slow
@needs_libtpu
def test_a_step_does_not_copy_the_parameters(libtpu_environment):
    """The optimizer moves less than 9 times the parameters' size, in place."""
    n, tx = 4, optax.adamw(1e-4)
    devices = slice_devices(find_slice("v5e-4"))
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
        result = program_costs(step, (state, x), V5E)
    print({name: figure / size for name, figure in result.items()})
    assert result["hbm_bytes"] < 9 * size
