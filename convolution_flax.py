"""Convolution of pictures, an implementation for each platform.

CPU: 3x3 by Winograd's algorithm, small ones as matmuls of patches. Everything else: XLA's own.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from attention_flax import by_platform

# Where Winograd's way is the fastest: from so many input and output channels on, and with at most
# so many output channels for every position (transforming the kernel is the same work for few).
LEAST_CHANNELS = 320
MOST_CHANNELS_PER_POSITION = 2
MOST_NUMBERS = 2**26  # of its input and output together: it takes four times as many, here 1 GiB


def convolve(x, kernel, stride, padding):
    """A convolution.

    Args:
        x: (B, H, W, C).
        kernel: (size, size, C, D), of x's dtype.
        stride: of both sides.
        padding: ((top, bottom), (left, right)), zeros.

    Returns:
        (B, h, w, D), of x's dtype. It has gradients in reverse mode only, on all platforms, and
        under jax.shard_map with check_vma=False.
    """
    xla = partial(
        jax.lax.conv_general_dilated,
        window_strides=(stride, stride),
        padding=padding,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    B, (size, *_, C, D) = x.shape[0], kernel.shape
    h, w = ((n + sum(pad) - size) // stride + 1 for n, pad in zip(x.shape[1:3], padding))
    if (
        (size, stride, padding) == (3, 1, ((1, 1), (1, 1)))
        and min(C, D) >= LEAST_CHANNELS
        and MOST_CHANNELS_PER_POSITION * B * h * w >= D
        and B * h * w * (C + D) <= MOST_NUMBERS
    ):
        cpu = winograd
    elif size == 1 or B * h * w < D:
        cpu = partial(multiply_patches, stride=stride, padding=padding)
    else:
        return xla(x, kernel)
    return by_platform(x, kernel, cpu=cpu, default=xla)


def multiply_patches(x, kernel, stride, padding):
    """convolve as a matmul of patches, forward and backward.

    For kernels of 1x1 and for few positions: XLA's CPU compiler arranges a kernel anew in every
    call.
    """
    size, *_, D = kernel.shape
    x = jnp.pad(x, ((0, 0), *padding, (0, 0)))
    _, H, W, _ = x.shape

    def taps(n):  # which rows, or columns, each of the kernel's reads
        return [slice(i, n - size + i + 1, stride) for i in range(size)]

    patches = jnp.concatenate([x[:, i, j] for i in taps(H) for j in taps(W)], -1)
    out = patches.reshape(-1, patches.shape[-1]) @ kernel.reshape(-1, D)
    return out.reshape(*patches.shape[:3], D)


# ------------------------------------------------------------------ Winograd

# F(2x2, 3x3): 4x4 products make 2x2 results, 4 a result instead of 9. As matrices of one axis: of
# the kernel's 3 weights 4, of 4 inputs 4, of 4 products 2 results.
_KERNEL = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]], np.float32)
_BOTH_AXES = np.kron(_KERNEL, _KERNEL)  # (16, 9)
_TURNED = np.kron(_KERNEL[:, ::-1], _KERNEL[:, ::-1])  # of a kernel turned around


def _of_inputs(d):
    return [d[0] - d[2], d[1] + d[2], d[2] - d[1], d[1] - d[3]]


def _to_results(m):
    return [m[0] + m[1] + m[2], m[1] - m[2] - m[3]]


def _of_results(y):
    """_to_results transposed."""
    return [y[0], y[0] + y[1], y[0] - y[1], -y[1]]


def _transform_kernel(matrix, kernel):
    """(3, 3, C, D) -> (16, C, D); as a matmul, which XLA does not repeat for each who reads it."""
    _, _, C, D = kernel.shape
    return (matrix @ kernel.reshape(9, C * D)).reshape(16, C, D)


def _transform_inputs(x):
    """(B, H, W, C) -> (16, B th tw, C), of the 4x4 inputs of every tile of 2x2 results."""
    B, H, W, C = x.shape
    th, tw = -(-H // 2), -(-W // 2)
    x = jnp.pad(x, ((0, 0), (1, 1 + 2 * th - H), (1, 1 + 2 * tw - W), (0, 0)))
    rows = jnp.stack(_of_inputs([x[:, i : i + 2 * th - 1 : 2] for i in range(4)]))
    rows = jax.lax.optimization_barrier(rows)  # otherwise each is computed four times
    tiles = _of_inputs([rows[:, :, :, j : j + 2 * tw - 1 : 2] for j in range(4)])
    return jnp.stack(tiles, 1).reshape(16, B * th * tw, C)


def _transform_results(g):
    """(B, H, W, D) -> (16, B th tw, D): what _make_results does, transposed."""
    B, H, W, D = g.shape
    th, tw = -(-H // 2), -(-W // 2)
    g = jnp.pad(g, ((0, 0), (0, 2 * th - H), (0, 2 * tw - W), (0, 0)))
    g = g.reshape(B, th, 2, tw, 2, D)
    rows = jnp.stack(_of_results([g[:, :, i] for i in range(2)]))
    tiles = _of_results([rows[:, :, :, :, j] for j in range(2)])
    return jnp.stack(tiles, 1).reshape(16, B * th * tw, D)


def _make_results(products, shape):
    """(16, B th tw, D) -> shape, (B, H, W, D)."""
    B, H, W, D = shape
    th, tw = -(-H // 2), -(-W // 2)
    rows = _to_results(products.reshape(4, 4, B, th, tw, D))
    tiles = jnp.stack([jnp.stack(_to_results(row), 3) for row in rows], 2)
    return tiles.reshape(B, 2 * th, 2 * tw, D)[:, :H, :W]


@jax.custom_vjp
def winograd(x, kernel):
    """A 3x3 convolution of stride 1 that keeps height and width, with 4/9 of the multiplications.

    Args:
        x: (B, H, W, C).
        kernel: (3, 3, C, D).

    Returns:
        (B, H, W, D), in x's dtype; computed in float32, to about 1e-6 of the largest.

    Source: Fast Algorithms for Convolutional Neural Networks (arXiv 1509.09308), section 4.1.
    """
    x32, kernel = x.astype(jnp.float32), kernel.astype(jnp.float32)
    transformed = _transform_kernel(_BOTH_AXES, kernel)
    products = jnp.einsum("ipc,icd->ipd", _transform_inputs(x32), transformed)
    return _make_results(products, (*x.shape[:3], kernel.shape[-1])).astype(x.dtype)


def _winograd_forward(x, kernel):
    return winograd(x, kernel), (x, kernel)


def _winograd_backward(kept, g):
    x, kernel = kept
    x32, kernel32, g32 = (y.astype(jnp.float32) for y in (x, kernel, g))
    turned = _transform_kernel(_TURNED, kernel32)
    g_products = jnp.einsum("ipd,icd->ipc", _transform_inputs(g32), turned)
    g_x = _make_results(g_products, x.shape)
    # XLA sees that it has transformed x before, and keeps that from the forward pass.
    g_kernel = jnp.einsum("ipc,ipd->icd", _transform_inputs(x32), _transform_results(g32))
    g_kernel = _BOTH_AXES.T @ g_kernel.reshape(16, -1)
    return g_x.astype(x.dtype), g_kernel.reshape(kernel.shape).astype(kernel.dtype)


winograd.defvjp(_winograd_forward, _winograd_backward)
