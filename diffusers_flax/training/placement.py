"""Arrays of training from the host to the devices, and back.

Arrays on devices are global: their first axis counts the devices of all processes.
"""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.core import ShapedArray
from jax.experimental import multihost_utils
from jax.experimental.layout import Format, Layout

from diffusers_flax.training.sharding import (
    TrainState,
    join_vectors,
    kernel_order,
    shard_order,
    vector_parts,
)


def all_devices():
    """The devices of all processes, one process after the other, as pmap orders them."""
    return sorted(jax.devices(), key=lambda device: device.process_index)


def compile_pmapped(p_function, first, *others):
    """Compile a pmapped function for arrays on the devices of all processes.

    With several processes, a call of the pmapped function turns every array into a global one and
    every result back, in Python: 164 ms for a step of Stable Diffusion's arrays and its average,
    in two processes on two CPU cores. The executable takes and returns global arrays; with joined
    vectors this takes 11 ms (python -m benchmarks.train --hosts 2).

    Args:
        p_function: of jax.pmap.
        first, others: its arguments: trees of arrays (devices of all processes, ...), or of their
            ShapeDtypeStructs, to compile before anything is allocated.

    Returns:
        The executable; it takes arrays of these shapes and donates what p_function donates.
    """
    # With several processes pmap converts its arguments from local to global arrays, unless the
    # first argument is abstract: then it takes all arguments as they are.
    first = jax.tree.map(lambda x: ShapedArray(x.shape, x.dtype), first)
    return p_function.lower(first, *others).compile()


def replicate(tree, devices=None, layout=None):
    """Put a copy of NumPy arrays on every device.

    Args:
        tree: arrays or numbers, the same on all processes.
        devices: None: the devices of all processes.
        layout: Layout of the arrays (devices, ...); None: the usual one.

    Returns:
        Tree of arrays (devices, ...), which may be donated.
    """
    devices = devices or all_devices()
    n = len(_local(devices))
    return jax.tree.map(lambda x: _place([np.asarray(x)[None]] * n, devices, layout), tree)


@lru_cache(maxsize=4)
def replicated_number(number):
    """replicate for a float, as float32; the last numbers are kept on the devices."""
    return replicate(np.float32(number))


def replicate_frozen(params):
    """Like replicate, for parameters that are not trained: on GPUs kernels have cuDNN's order.

    Only their order in memory changes, not their shapes.
    """
    return jax.tree.map(lambda x: replicate(x, layout=_frozen_layout(x)), params)


def frozen_shapes(params, devices):
    """The shapes, dtypes and layouts of replicate_frozen, (devices, ...); devices: all of them."""

    def shape_of(x):
        layout = _frozen_layout(x, devices[0].platform)
        sharded = layout and Format(layout, _sharding(devices))
        return jax.ShapeDtypeStruct((len(devices), *x.shape), x.dtype, sharding=sharded)

    return jax.tree.map(shape_of, params)


def shard(tree, axes, devices=None):
    """Put the shards of NumPy arrays on their devices.

    Args:
        tree: whole arrays, the same on all processes.
        axes: tree of their Splits.
        devices: to divide the arrays over; None: the devices of all processes.

    Returns:
        Tree of arrays (devices, ...), which may be donated.
    """
    devices = devices or all_devices()
    places = [devices.index(device) for device in _local(devices)]

    def shard_array(x, split):
        x, n = split.to_device_order(np.asarray(x)), split.num_shards
        shards = np.split(x, n, split.axis)
        number = np.argsort(shard_order(n))  # of each device's shard
        return _place([shards[number[place % n]][None] for place in places], devices)

    return jax.tree.map(shard_array, tree, axes)


def shard_batch(batch):
    """Divide this process's rows equally over its devices.

    Args:
        batch: dict of NumPy arrays (B, ...); B is a multiple of the number of local devices. On
            CPUs their memory may be used in place: do not change it afterwards.

    Returns:
        dict of arrays (devices, B / local devices, ...), with the rows of all processes.
    """
    sharding, n = _sharding(all_devices()), jax.local_device_count()

    def put(x):
        x = x.reshape(n, len(x) // n, *x.shape[1:])
        return jax.make_array_from_process_local_data(sharding, x)

    return {name: put(x) for name, x in batch.items()}


def to_host(tree, axes):
    """Join shards to whole, contiguous NumPy arrays; all processes call it together.

    Args:
        tree: shards, or a tree that contains some, such as an optimizer's state; other arrays in it
            are replicated.
        axes: of shard_axes.

    Returns:
        The tree with nested dicts of parameters, their axes in the usual order.
    """

    def whole(x, split):
        if split.num_shards == 1:
            x = first_replica(x)
        else:
            if jax.process_count() > 1:
                x = multihost_utils.process_allgather(x, tiled=True)
            x = np.concatenate(np.asarray(x)[shard_order(split.num_shards)], split.axis)
        return np.asarray(split.from_device_order(x), order="C")

    def join(x):
        if not is_sharded(x):
            return first_replica(x)
        flat = {}
        for path, split in axes.items():
            array = whole(x[path], split)
            if split.vectors:
                parts = vector_parts(array.reshape(split.num_shards, -1), split)
                flat |= {name: part.ravel() for name, part in parts.items()}
            else:
                flat[path] = array
        return unflatten_dict(flat)

    def is_sharded(x):
        return isinstance(x, dict) and x.keys() == axes.keys()

    return jax.tree.map(join, tree, is_leaf=is_sharded)


def start_state(params, tx, axes, devices=None):
    """The TrainState (devices, ...) at the start of a run.

    Args:
        params: whole NumPy arrays, float32: a nested dict.
        tx: element-wise optax optimizer, such as Adam. It gets {path: array} with joined vectors,
            so masks by name do not apply.
        axes: of shard_axes(params).
        devices: as for shard.

    Raises:
        ValueError: params are not float32.
    """
    check_float32(params)
    shards = shard(join_vectors(flatten_dict(params), axes), axes, devices)
    init = jax.pmap(tx.init, axis_name="batch", devices=devices)
    opt_state = compile_pmapped(init, shards)(shards)
    return TrainState(replicate(np.int32(0), devices), shards, opt_state)


def state_shapes(params, tx, axes, num_devices):
    """The shapes and dtypes of start_state, (num_devices, ...).

    Args:
        params: whole arrays or their shapes.
        tx, axes: as for start_state.
        num_devices: as for shard_axes.
    """

    def on_one_device(params):
        whole = join_vectors(flatten_dict(params), axes)
        shards = {
            path: jnp.split(split.to_device_order(whole[path]), split.num_shards, split.axis)[0]
            for path, split in axes.items()
        }
        return TrainState(jnp.int32(0), shards, tx.init(shards))

    state = jax.eval_shape(on_one_device, params)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((num_devices, *x.shape), x.dtype), state)


def check_float32(params):
    """Raise a ValueError unless all parameters are float32.

    float16 parameters overflow to NaN within a few steps; in bfloat16 small updates round to zero.
    """
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        if x.dtype != jnp.float32:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise ValueError(
                f"{name} is {x.dtype}, not float32; read the parameters with "
                "from_pretrained(..., param_dtype=jnp.float32), as updates in half precision are "
                "lost or overflow; dtype=jnp.bfloat16 computes in half precision"
            )


def first_replica(x):
    """A replicated array as NumPy array, from this process's first device."""
    copy = np.asarray(x.addressable_shards[0].data)
    return copy.reshape(copy.shape[1:])


def local_rows(x):
    """This process's rows, (B, ...), of an array (devices, B / devices, ...)."""
    return np.concatenate([np.asarray(shard.data)[0] for shard in x.addressable_shards])


def _frozen_layout(x, platform=None):
    """The Layout of replicate_frozen; None: the usual one. Arguments as for kernel_order."""
    order = kernel_order(x, platform)
    return order and Layout((0, *(axis + 1 for axis in order)))


def _local(devices):
    """This process's devices among some."""
    return [device for device in devices if device.process_index == jax.process_index()]


def _sharding(devices):
    """The sharding of an array (devices, ...)."""
    return jax.NamedSharding(jax.sharding.Mesh(np.array(devices), ("batch",)), jax.P("batch"))


def _place(shards, devices, layout=None):
    """Make one array (devices, ...) of an array (1, ...) for each of this process's devices."""
    places = _local(devices)
    if layout is not None:
        places = [Format(layout, jax.sharding.SingleDeviceSharding(device)) for device in places]
    arrays = jax.device_put(list(map(_unaligned, shards)), places)
    shape = (len(devices), *shards[0].shape[1:])
    return jax.make_array_from_single_device_arrays(shape, _sharding(devices), arrays)


def _unaligned(x):
    """On CPUs, copy x to memory that is not aligned to 64 bytes.

    JAX uses aligned NumPy memory in place and cannot donate it; a step would hold the state twice.
    """
    if jax.default_backend() != "cpu":
        return x
    memory = np.empty(x.nbytes + 64, np.uint8)
    start = (x.itemsize - memory.ctypes.data) % 64
    copy = memory[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    copy[...] = x
    return copy
