"""Rows of feature maps on several devices: each computes a contiguous part, with the same result.

Inside jax.shard_map, where every device has its part of the rows of a feature map (B, H, W, C):

    unet = unet.clone(rows_axis="rows")
    part = unet.apply(variables, part, t, text).sample

`axis` is the name of the mesh's axis, or a tuple of names, whose devices have the parts in their
order. All parts have as many rows, a multiple of what the model divides heights by.

Convolutions take the border rows of the neighbours' parts, norms the moments of all parts, and
self-attention the keys and values of all positions; cross-attention and dense layers need nothing.
The results differ from one device's results by the rounding of sums. For inference: gradients would
miss the other parts.

Source: DistriFusion (arXiv 2402.19481), figure 4; here nothing is of an earlier step.
"""

import jax
import jax.numpy as jnp


def with_neighbours(x, size, stride, padding, axis):
    """A convolution's input with the rows that it reads of the neighbours' parts.

    Args:
        x: (B, rows, W, C).
        size, stride: of the kernel.
        padding: ((top, bottom), (left, right)), zeros around the whole feature map.
        axis: of the mesh.

    Returns:
        (x with further rows, the padding that is left); both as given if it reads none.
    """
    above = padding[0][0]
    below = size - stride - above
    if above <= 0 and below <= 0:
        return x, padding
    assert x.shape[1] % stride == 0, f"{x.shape[1]} rows are not a multiple of the stride {stride}"
    n = jax.lax.axis_size(axis)
    parts = [x]
    if above > 0:  # without a sender there are zeros
        rows = jax.lax.ppermute(x[:, -above:], axis, [(i, i + 1) for i in range(n - 1)])
        parts.insert(0, rows)
    if below > 0:
        rows = jax.lax.ppermute(x[:, :below], axis, [(i + 1, i) for i in range(n - 1)])
        parts.append(rows)
    return jnp.concatenate(parts, 1), ((0, 0), padding[1])


def all_positions(x, axis):
    """The positions of all parts, (B, positions, C); x: the positions of one part, row by row."""
    return jax.lax.all_gather(x, axis, axis=1, tiled=True)


def moments_of_all(mean, variance, axis):
    """Mean and variance of all parts, from the mean and variance of each, in one exchange.

    Source: Chan, Golub and LeVeque, Algorithms for computing the sample variance (1983).
    """
    means, variances = jax.lax.all_gather(jnp.stack((mean, variance)), axis, axis=1)
    mean = means.mean(0)
    return mean, (variances + jnp.square(means - mean)).mean(0)


def largest_of_all(x, axis):
    """The largest of all parts' values, element by element."""
    return jax.lax.pmax(x, axis)
