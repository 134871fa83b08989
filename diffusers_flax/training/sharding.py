"""Training state that is sharded over all devices, under pmap(axis_name="batch").

Parameters, optimizer moments and averages are split along one axis of every array; each device
holds one shard (ZeRO, stage 3, arXiv 1910.02054). A training step gathers the parameters in the
compute dtype. The gradient of the gather is a reduce-scatter that adds in float32:

    axes = shard_axes(params, jax.device_count())
    state = start_state(params, tx, axes)                         # host to devices

    def loss_fn(shards):                                          # inside the pmapped step
        return loss(gather(shards, axes, dtype), batch)
    loss, grads = jax.value_and_grad(loss_fn)(state.params)       # shards of the mean, float32
    state, metrics = update_state(tx, state, loss, grads, axes, max_grad_norm)

On one device each of these operations returns its argument. gather_by_block replaces gather for
models that do not fit into a device's memory.

Shards are a flat dict {path: array}. All vectors (biases, scales of norms) are joined into one
array, as the host spends microseconds on each array of a call and more than half of them are
vectors. Arrays on devices are global: their first axis counts the devices of all processes.

On NVIDIA GPUs the shards of convolution kernels have their axes in the order of cuDNN, (O, height,
width, I): then neither the forward pass nor the optimizer transposes them. gather returns
parameters, and to_host arrays, in the usual order.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.core import ShapedArray
from jax.experimental import multihost_utils
from jax.experimental.layout import Format, Layout
from jax.tree_util import Partial
from optax import MaskedNode

from diffusers_flax.models.blocks import CHECKPOINTED_BLOCKS

KERNEL_ORDER = (3, 0, 1, 2)  # of a kernel's axes (height, width, I, O) on GPUs
CHIPS_PER_HOST = 4  # in TPU slices of several hosts; their device numbers are consecutive


@dataclass(frozen=True)
class Split:
    """An array is split along axis into num_shards, one per device.

    With fewer shards than devices, each group of num_shards consecutive devices holds one set of
    shards. Devices hold the array with its axes in the given order; axis counts in this order.
    """

    axis: int
    num_shards: int  # 1: every device has the whole array
    order: tuple[int, ...] | None = None  # None: as they are
    vectors: tuple | None = None  # ((path, size), ...) of joined vectors; None: any other array

    def to_device_order(self, x):
        """Put the axes of a whole array in the order in which devices hold it."""
        return x if self.order is None else x.transpose(self.order)

    def from_device_order(self, x):
        """The inverse of to_device_order."""
        return x if self.order is None else x.transpose(np.argsort(self.order))


@struct.dataclass
class TrainState:
    """Number of steps done, float32 shards of parameters and optimizer moments."""

    step: jax.Array
    params: Any
    opt_state: Any


# How arrays are split


def kernel_order(x, platform=None):
    """The order in which devices hold the axes of an array; None: as they are.

    On NVIDIA GPUs it is KERNEL_ORDER for kernels of convolutions, except for 1x1, as for matmuls.

    Args:
        x: array or its shape.
        platform: "gpu" (NVIDIA's), "tpu" or "cpu"; None: of jax's default device.
    """
    is_kernel = x.ndim == 4 and x.shape[0] > 1
    is_on_gpu = platform == "gpu"
    if platform is None:
        is_on_gpu = "cuda" in jax.devices()[0].client.platform_version
    return KERNEL_ORDER if is_kernel and is_on_gpu else None


def split_of(x, num_devices, platform=None):
    """The Split of an array: along the longest axis that num_devices divides.

    Matrices and kernels without such an axis are split into fewer shards, as many as possible; the
    array is replicated if no axis can be split.
    """
    order = kernel_order(x, platform)
    shape = x.shape if order is None else [x.shape[i] for i in order]
    splits = [Split(i, math.gcd(size, num_devices), order) for i, size in enumerate(shape) if size]
    whole = Split(0, 1, order)
    best = max(splits, key=lambda s: (s.num_shards, shape[s.axis]), default=whole)
    is_worth_it = best.num_shards == num_devices or x.ndim > 1
    return best if best.num_shards > 1 and is_worth_it else whole


def shard_axes(params, num_devices, platform=None, whole=False):
    """How a tree of parameters is sharded.

    Args:
        params: nested dict of arrays or their shapes (ShapeDtypeStructs), not sharded.
        num_devices: number of devices.
        platform: as for kernel_order.
        whole: every device has every whole array, for optimizers such as Adafactor and Muon.

    Returns:
        {path, a tuple: Split} of matrices and kernels; vectors that are split alike are one entry.
        With whole, all arrays have their own.
    """
    if whole:
        return dict.fromkeys(sorted(flatten_dict(params)), Split(0, 1))
    axes, vectors = {}, {}
    for path, x in sorted(flatten_dict(params).items()):
        split = split_of(x, num_devices, platform)
        if x.ndim == 1:
            vectors.setdefault(split.num_shards, []).append((path, x.size))
        else:
            axes[path] = split
    return axes | {("vectors", str(n)): Split(0, n, None, tuple(v)) for n, v in vectors.items()}


def join_vectors(flat, axes):
    """Join the vectors among whole arrays: {path: array} with the paths of axes.

    Args:
        flat: {path: array}.
        axes: of shard_axes.
    """

    def join(split):
        n = split.num_shards  # a shard has a shard of each vector
        shards = [flat[path].reshape(n, -1) for path, _ in split.vectors]
        concatenate = np.concatenate if isinstance(shards[0], np.ndarray) else jnp.concatenate
        return concatenate(shards, axis=1).ravel()

    return {path: join(split) if split.vectors else flat[path] for path, split in axes.items()}


def vector_parts(x, split):
    """The vectors in a joined one: {path: array}; x has a shard's numbers in the last axis."""
    paths, sizes = zip(*split.vectors)
    split_up = np.split if isinstance(x, np.ndarray) else jnp.split
    return dict(zip(paths, split_up(x, np.cumsum(sizes)[:-1] // split.num_shards, axis=-1)))


def separate_vectors(shards, axes):
    """This device's shards without joined vectors, and their Splits: two dicts by path."""
    flat, splits = {}, {}
    for path, x in shards.items():
        parts = vector_parts(x, axes[path]) if axes[path].vectors else {path: x}
        flat |= parts
        splits |= dict.fromkeys(parts, replace(axes[path], vectors=None))
    return flat, splits


# Whole parameters on every device, and their gradient


def gather(shards, axes, dtype):
    """The whole parameters, a nested dict, on every device.

    Args:
        shards: this device's shards, float32.
        axes: of shard_axes.
        dtype: of the matrices and kernels. Vectors (biases, scales of norms) stay float32: they are
            small, and norms compute in float32.
    """
    return unflatten_dict(gather_arrays(*separate_vectors(shards, axes), dtype))


def gather_by_block(shards, axes, dtype, blocks=CHECKPOINTED_BLOCKS):
    """Like gather, but blocks gather their own parameters when they run, forward and backward.

    A device then holds parameters and gradients of a few blocks instead of all blocks; each block's
    parameters are sent twice. The blocks must be checkpointed, see models.blocks.checkpointed;
    otherwise all parameters are kept for the backward pass.

    Args:
        shards, axes, dtype: as for gather.
        blocks: name prefixes of the blocks, such as "resnets_".

    Returns:
        The parameters; those of blocks are functions without arguments that gather them.
    """
    flat, splits = separate_vectors(shards, axes)
    later = {
        path: Partial(partial(gather_arrays, axes=splits[path], dtype=dtype), x)
        for path, x in flat.items()
        if any(name.startswith(blocks) for name in path)
    }
    first = {path: x for path, x in flat.items() if path not in later}
    first = gather_arrays(first, {path: splits[path] for path in first}, dtype)
    return unflatten_dict(first | later)


def gather_arrays(shards, axes, dtype):
    """Whole arrays, on every device; the gradient is reduce_scatter_mean.

    Args:
        shards: this device's shards, float32: a tree.
        axes: tree of their Splits.
        dtype: as for gather.

    Source: ZeRO (arXiv 1910.02054), section 5.3.
    """

    def gather_array(x, split):
        x = cast_kernels(x, dtype)
        if split.num_shards > 1:
            groups = groups_at_once(split.num_shards, jax.lax.axis_size("batch"))
            options = {"axis": split.axis, "axis_index_groups": groups, "tiled": True}
            x = jax.lax.all_gather(x, "batch", **options)
        return split.from_device_order(x)

    @jax.custom_vjp
    def gather_all(shards):
        return jax.tree.map(gather_array, shards, axes)

    gather_all.defvjp(
        lambda shards: (gather_all(shards), None),
        lambda _, grads: (reduce_scatter_mean(grads, axes),),
    )
    return gather_all(shards)


def cast_kernels(params, dtype):
    """Cast the matrices and convolution kernels of a tree to dtype; vectors keep their dtype."""
    return jax.tree.map(lambda x: x.astype(dtype, copy=False) if x.ndim > 1 else x, params)


def combine(frozen, trained):
    """Merge two nested dicts of parameters that have no array in common."""
    return unflatten_dict(flatten_dict(frozen) | flatten_dict(trained))


def reduce_scatter_mean(grads, axes):
    """This device's shard of the mean over all devices, added in float32.

    TPUs send gradients in their dtype, other platforms in float32.

    Args:
        grads: gradients of the whole parameters, of any dtype.
        axes: of shard_axes.
    """
    num_devices = jax.lax.axis_size("batch")
    grads = jax.tree.map(lambda g, split: split.to_device_order(g), grads, axes)
    if num_devices == 1:  # XLA would copy the gradients
        return jax.tree.map(lambda g: g.astype(jnp.float32), grads)

    def mean(g, split, stages):
        if split.num_shards == 1:
            return jax.lax.pmean(g.astype(jnp.float32), "batch")
        for groups in stages(split.num_shards, num_devices):
            g = sum_scatter(g, split.axis, groups)
        if split.num_shards < num_devices:
            replicas = np.arange(num_devices).reshape(-1, split.num_shards).T.tolist()
            g = jax.lax.psum(g, "batch", axis_index_groups=replicas)
        return g / num_devices

    def in_stages(grads):
        return jax.tree.map(partial(mean, stages=reduce_scatter_stages), grads, axes)

    def at_once(grads):
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        return jax.tree.map(partial(mean, stages=one_stage), grads, axes)

    def one_stage(*numbers):
        return [groups_at_once(*numbers)]

    return jax.lax.platform_dependent(grads, tpu=in_stages, default=at_once)


def sum_scatter(g, axis, groups):
    """This device's shard of the sum over its group, sent in g's dtype and added in float32."""
    if g.dtype == jnp.float32:
        return jax.lax.psum_scatter(
            g, "batch", scatter_dimension=axis, axis_index_groups=groups, tiled=True
        )
    size = len(groups[0]) if groups else jax.lax.axis_size("batch")
    g = g.reshape(*g.shape[:axis], size, -1, *g.shape[axis + 1 :])
    received = jax.lax.all_to_all(g, "batch", axis, 0, axis_index_groups=groups)
    return received.astype(jnp.float32).sum(axis=0)


def stage_sizes(num_shards):
    """Group sizes of a reduce-scatter in stages, last stage first.

    XLA compiles a reduce-scatter over 16 chips of a v5e slice, and over most larger numbers, as an
    all-reduce, which sends twice as much and holds the full sum. In groups of at most 8 chips it
    does not. The first groups are the chips of a host, because the first stage sends most.
    """
    sizes = []
    while num_shards > 2 * CHIPS_PER_HOST and num_shards % CHIPS_PER_HOST == 0:
        sizes.insert(0, CHIPS_PER_HOST)
        num_shards //= CHIPS_PER_HOST
    return [num_shards, *sizes]


def reduce_scatter_stages(num_shards, num_devices):
    """The axis_index_groups of each stage of a reduce-scatter, in order, for TPUs."""
    sizes = stage_sizes(num_shards)
    devices = np.arange(num_devices).reshape(-1, *sizes)
    return [
        np.moveaxis(devices, stage + 1, -1).reshape(-1, sizes[stage]).tolist()
        for stage in reversed(range(len(sizes)))
    ]


def shard_order(num_shards):
    """The device, of num_shards consecutive ones, that holds each shard after all stages."""
    return np.arange(num_shards).reshape(stage_sizes(num_shards)).T.ravel()


def groups_at_once(num_shards, num_devices):
    """The axis_index_groups of a gather or reduce-scatter in one stage; None: all, in order."""
    order = shard_order(num_shards)
    groups = [(first + order).tolist() for first in range(0, num_devices, num_shards)]
    return None if groups == [list(range(num_devices))] else groups


# The end of a step


def global_norm(shards, axes):
    """L2 norm of a sharded tree, the same on all devices."""
    # Separately, so that the rounding of the sum does not depend on how vectors are stored.
    shards, axes = separate_vectors(shards, axes)
    by_split = {}  # {number of shards: arrays}
    for path in sorted(shards):
        by_split.setdefault(axes[path].num_shards, []).append(shards[path])
    squares = {n: sum_of_squares(arrays) for n, arrays in by_split.items()}
    total = squares.pop(1, 0.0)
    if squares:
        num_devices = jax.lax.axis_size("batch")
        shares = [x / (num_devices // n) if n < num_devices else x for n, x in squares.items()]
        total = total + jax.lax.psum(sum(shares), "batch")
    return jnp.sqrt(total)


def sum_of_squares(arrays):
    """Sum of the squares of arrays; vectors are joined, as each takes several kernels on a GPU."""
    vectors = [x for x in arrays if x.ndim < 2]
    joined = [jnp.concatenate(vectors)] if vectors else []
    return sum(jnp.sum(jnp.square(x)) for x in joined + [x for x in arrays if x.ndim > 1])


def update_state(tx, state, loss, grads, axes, max_grad_norm):
    """End a training step: clip the gradient, apply the optimizer, average the loss.

    Args:
        tx: element-wise optax optimizer, such as Adam, or WholeArrays.
        state: TrainState.
        loss: of this device's rows.
        grads: this device's shards of the mean gradient.
        axes: of shard_axes.
        max_grad_norm: gradients with a larger global norm are scaled down to it.

    Returns:
        (state, {"loss", "grad_norm"}): mean loss and gradient norm over the global batch.
    """
    grad_norm = global_norm(grads, axes)
    scale = jnp.minimum(1, max_grad_norm / grad_norm)

    def update(params, opt_state, grads):
        grads = jax.tree.map(lambda g: g * scale, grads)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    if not isinstance(tx, WholeArrays):
        update = in_place(update)
    params, opt_state = update(state.params, state.opt_state, grads)
    state = state.replace(step=state.step + 1, params=params, opt_state=opt_state)
    return state, {"loss": jax.lax.pmean(loss, "batch"), "grad_norm": grad_norm}


class WholeArrays(optax.GradientTransformation):
    """An optax optimizer that needs whole arrays, such as Muon; its axes are whole."""


def each_array(tx):
    """An optax optimizer that treats each array alone, and updates one array after the other.

    Its state is the same; a program traces the update once for each shape, not for each array.
    """
    update_one = jax.jit(tx.update)

    def update(grads, opt_state, params):
        structure = jax.tree.structure(params)

        def is_per_array(x):  # moments are, the number of steps is not
            return jax.tree.structure(x) == structure

        parts, whole = jax.tree.flatten(opt_state, is_leaf=is_per_array)
        parts = [structure.flatten_up_to(x) if is_per_array(x) else x for x in parts]
        updates, new_parts = [], []
        for i, (g, p) in enumerate(zip(jax.tree.leaves(grads), jax.tree.leaves(params))):
            own = whole.unflatten([x[i] if isinstance(x, list) else x for x in parts])
            one, own = update_one(g, own, p)
            updates.append(one)
            new_parts.append(whole.flatten_up_to(own))
        new_parts = [
            structure.unflatten(new) if isinstance(old, list) else new[0]
            for old, new in zip(parts, zip(*new_parts))
        ]
        return structure.unflatten(updates), whole.unflatten(new_parts)

    return optax.GradientTransformation(tx.init, update)


def in_place(update):
    """Make XLA update donated arrays in place; a function for pmap, of trees -> tree, elementwise.

    pmap removes the device axis from its arguments and adds it to its results. Between these two
    reshapes XLA's CPU compiler copies every donated array. So the function gets arrays with the
    axis, and the reshapes cancel. On TPUs it gets them without the axis, which moves fewer bytes.
    """

    def with_axis(*args):
        args = jax.tree.map(lambda x: x[None] if x.ndim else x, args)
        return jax.tree.map(lambda x: x[0] if x.ndim else x, update(*args))

    return lambda *args: jax.lax.platform_dependent(*args, tpu=update, default=with_axis)


# --- From the host to the devices, and back ------------------------------------------------------


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
            if isinstance(x[path], MaskedNode):  # the optimizer has nothing for this array
                continue
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
        tx: element-wise optax optimizer, such as Adam, or WholeArrays. It gets {path: array},
            without whole axes with joined vectors, so masks by name do not apply.
        axes: of shard_axes(params).
        devices: as for shard.

    Raises:
        ValueError: params are not float32.
    """
    # float16 overflows to NaN within a few steps; in bfloat16 small updates round to zero.
    for path, x in flatten_dict(params, sep="/").items():
        if x.dtype != jnp.float32:
            raise ValueError(
                f"{path} is {x.dtype}, not float32; read it with param_dtype=jnp.float32"
            )
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
