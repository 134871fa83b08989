"""Spatial parallelism: each device computes some rows of the feature maps, with the same result.

Inside jax.shard_map, where each device has a shard of the rows of a feature map (B, H, W, C):

    unet = unet.clone(rows_axis="rows")
    shard = unet.apply(variables, shard, t, text).sample

`axis` is the name of the mesh's axis along which the rows are sharded, or a tuple of names. All
shards have equally many rows, a multiple of the factor by which the model divides heights.

Convolutions exchange halos with the neighbouring devices, norms exchange moments, and
self-attention gathers keys and values of all positions; cross-attention and dense layers need no
exchange. The result differs from one device's by the rounding of sums. For inference only:
gradients would miss the other shards.

Source: DistriFusion (arXiv 2402.19481), figure 4; here all exchanges are of the current step.
"""

import jax
import jax.numpy as jnp


def with_halo(x, size, stride, padding, axis):
    """A convolution's input with the rows of neighbouring shards that the kernel reads.

    Args:
        x: (B, rows, W, C).
        size, stride: of the kernel.
        padding: ((top, bottom), (left, right)), zeros around the whole feature map.
        axis: of the mesh.

    Returns:
        (x with its halo, the remaining padding); both unchanged if the kernel needs no halo.
    """
    above = padding[0][0]
    below = size - stride - above
    if above <= 0 and below <= 0:
        return x, padding
    assert x.shape[1] % stride == 0, f"{x.shape[1]} rows are not a multiple of the stride {stride}"
    n = jax.lax.axis_size(axis)
    rows = [x]
    if above > 0:  # without a sender there are zeros
        halo = jax.lax.ppermute(x[:, -above:], axis, [(i, i + 1) for i in range(n - 1)])
        rows.insert(0, halo)
    if below > 0:
        halo = jax.lax.ppermute(x[:, :below], axis, [(i + 1, i) for i in range(n - 1)])
        rows.append(halo)
    return jnp.concatenate(rows, 1), ((0, 0), padding[1])


def gather_positions(x, axis):
    """The positions of all shards, (B, positions, C); x: the positions of one shard, by row."""
    return jax.lax.all_gather(x, axis, axis=1, tiled=True)


def global_moments(mean, variance, axis):
    """Mean and variance over all shards, from each shard's own, in one exchange.

    Source: Chan, Golub and LeVeque, Algorithms for computing the sample variance (1983).
    """
    means, variances = jax.lax.all_gather(jnp.stack((mean, variance)), axis, axis=1)
    mean = means.mean(0)
    return mean, (variances + jnp.square(means - mean)).mean(0)


def global_max(x, axis):
    """The elementwise maximum over all shards."""
    return jax.lax.pmax(x, axis)
