"""Convolution, with an implementation per platform.

On a CPU Winograd's algorithm for 3x3 kernels and matmuls of patches for small inputs; on a TPU a
sum of matmuls for 3x3 kernels and small batches; on a GPU matmuls for 1x1 kernels; otherwise XLA's
convolution.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

# Least numbers of input and output channels for Winograd's algorithm and for shifted_matmuls.
LEAST_CHANNELS = 320
# Most output channels per position for Winograd's algorithm; few positions do not pay for
# transforming the kernel.
MOST_CHANNELS_PER_POSITION = 2
# Most numbers in input and output together; the algorithm needs four times as many, here 1 GiB.
MOST_NUMBERS = 2**26
# shifted_matmuls is for fewer than BATCH_UNIT images, at least LEAST_POSITIONS positions and at
# most MOST_SUMS results, whose float32 sums stay in VMEM. There XLA's convolution takes 1.5 to 2.4
# times the estimated cycles of shifted_matmuls on v5e, 0.9 to 2.0 times on v6e.
BATCH_UNIT = 8
LEAST_POSITIONS = 512
MOST_SUMS = 2**24


@partial(jax.jit, static_argnums=(2, 3))  # traced once for each shape
def convolve(x, kernel, stride, padding):
    """A convolution.

    Args:
        x: (B, H, W, C).
        kernel: (size, size, C, D), of x's dtype.
        stride: of both sides.
        padding: ((top, bottom), (left, right)), zeros.

    Returns:
        (B, h, w, D), of x's dtype. Gradients are in reverse mode only, and under jax.shard_map with
        check_vma=False.
    """
    xla = partial(xla_convolve, stride=stride, padding=padding)
    kernels = {}
    B, (size, *_, C, D) = x.shape[0], kernel.shape
    h, w = ((n + sum(pad) - size) // stride + 1 for n, pad in zip(x.shape[1:3], padding))
    positions = B * h * w
    is_wide = (size, stride, padding[1]) == (3, 1, (1, 1)) and min(C, D) >= LEAST_CHANNELS
    keeps_height, has_halo = padding[0] == (1, 1), padding[0] == (0, 0)
    if (
        is_wide
        and (keeps_height or has_halo)
        and B < BATCH_UNIT
        and positions >= LEAST_POSITIONS
        and positions * D <= MOST_SUMS
    ):
        kernels["tpu"] = partial(shifted_matmuls, rows=padding[0])
    if (
        is_wide
        and keeps_height
        and MOST_CHANNELS_PER_POSITION * positions >= D
        and positions * (C + D) <= MOST_NUMBERS
    ):
        kernels["cpu"] = winograd
    elif size == 1 or positions < D:
        kernels["cpu"] = partial(multiply_patches, stride=stride, padding=padding)
    if size == 1:
        kernels["cuda"] = partial(multiply_patches, stride=stride, padding=padding)
    if not kernels:
        return xla(x, kernel)
    return jax.lax.platform_dependent(x, kernel, default=xla, **kernels)


def xla_convolve(x, kernel, stride=1, padding=((1, 1), (1, 1))):
    """convolve by XLA's convolution."""
    strides, names = (stride, stride), ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=names)


def sum_of_matmuls(x, kernel, stride, padding, dtype):
    """A convolution as the sum of one matmul per kernel position.

    Args:
        x, kernel, stride, padding: as for convolve.
        dtype: of the sums.

    Returns:
        (B, h, w, D), in dtype.
    """
    positions = [(i, j) for i in range(len(kernel)) for j in range(len(kernel))]
    inputs = taps(x, len(kernel), stride, padding)
    return sum(
        jnp.matmul(tap, kernel[i, j], preferred_element_type=dtype)
        for tap, (i, j) in zip(inputs, positions)
    )


def taps(x, size, stride, padding):
    """The inputs (B, h, w, C) that each position of a kernel reads, row by row."""
    x = jnp.pad(x, ((0, 0), *padding, (0, 0)))
    rows, columns = (
        [slice(i, n - size + i + 1, stride) for i in range(size)] for n in x.shape[1:3]
    )
    return (x[:, i, j] for i in rows for j in columns)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def shifted_matmuls(x, kernel, rows=(1, 1)):
    """A 3x3 convolution of stride 1 that keeps the width: a matmul per kernel position.

    x (B, H, W, C), kernel (3, 3, C, D); rows: number of rows of zeros above and below x; (1, 1)
    keeps the height. Sums are float32.
    """
    return sum_of_matmuls(x, kernel, 1, (rows, (1, 1)), jnp.float32).astype(x.dtype)


def _shifted_matmuls_forward(x, kernel, rows):
    return shifted_matmuls(x, kernel, rows), (x, kernel)


def _shifted_matmuls_backward(rows, kept, g):
    x, kernel = kept
    g_x = shifted_matmuls(g, kernel[::-1, ::-1].swapaxes(2, 3), tuple(2 - n for n in rows))
    _, kernel_vjp = jax.vjp(partial(xla_convolve, x, padding=(rows, (1, 1))), kernel)
    return g_x, *kernel_vjp(g)


shifted_matmuls.defvjp(_shifted_matmuls_forward, _shifted_matmuls_backward)


def multiply_patches(x, kernel, stride, padding):
    """convolve as a matmul of patches, forward and backward.

    For 1x1 kernels and few positions, for which XLA's CPU compiler would rearrange the kernel in
    every call. On GPUs cuDNN would need 1x1 kernels in one order forward and in another backward.
    """
    size, *_, D = kernel.shape
    patches = jnp.concatenate([*taps(x, size, stride, padding)], -1)
    out = patches.reshape(-1, patches.shape[-1]) @ kernel.reshape(-1, D)
    return out.reshape(*patches.shape[:3], D)


# F(2x2, 3x3): 4x4 products give 2x2 results, 4 per result instead of 9. The matrices of one axis
# map 3 weights to 4 numbers, 4 inputs to 4 numbers, and 4 products to 2 results.
_KERNEL = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]], np.float32)
_BOTH_AXES = np.kron(_KERNEL, _KERNEL)  # (16, 9)
_REVERSED = np.kron(_KERNEL[:, ::-1], _KERNEL[:, ::-1])  # for a kernel with both axes reversed


def _of_inputs(d):
    return [d[0] - d[2], d[1] + d[2], d[2] - d[1], d[1] - d[3]]


def _to_results(m):
    return [m[0] + m[1] + m[2], m[1] - m[2] - m[3]]


def _of_results(y):
    """_to_results transposed."""
    return [y[0], y[0] + y[1], y[0] - y[1], -y[1]]


def _transform_kernel(matrix, kernel):
    """(3, 3, C, D) -> (16, C, D), as a matmul, which XLA computes once for all its users."""
    _, _, C, D = kernel.shape
    return (matrix @ kernel.reshape(9, C * D)).reshape(16, C, D)


def _transform_inputs(x):
    """(B, H, W, C) -> (16, B th tw, C), from the 4x4 inputs of each tile of 2x2 results."""
    B, H, W, C = x.shape
    th, tw = -(-H // 2), -(-W // 2)
    x = jnp.pad(x, ((0, 0), (1, 1 + 2 * th - H), (1, 1 + 2 * tw - W), (0, 0)))
    rows = jnp.stack(_of_inputs([x[:, i : i + 2 * th - 1 : 2] for i in range(4)]))
    rows = jax.lax.optimization_barrier(rows)  # otherwise XLA computes each four times
    tiles = _of_inputs([rows[:, :, :, j : j + 2 * tw - 1 : 2] for j in range(4)])
    return jnp.stack(tiles, 1).reshape(16, B * th * tw, C)


def _transform_results(g):
    """(B, H, W, D) -> (16, B th tw, D): the transpose of _make_results."""
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

    x (B, H, W, C), kernel (3, 3, C, D); computed in float32, to about 1e-6 of the largest.

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
    transformed = _transform_kernel(_REVERSED, kernel32)
    g_products = jnp.einsum("ipd,icd->ipc", _transform_inputs(g32), transformed)
    g_x = _make_results(g_products, x.shape)
    # XLA reuses the forward pass's transformed x.
    g_kernel = jnp.einsum("ipc,ipd->icd", _transform_inputs(x32), _transform_results(g32))
    g_kernel = _BOTH_AXES.T @ g_kernel.reshape(16, -1)
    return g_x.astype(x.dtype), g_kernel.reshape(kernel.shape).astype(kernel.dtype)


winograd.defvjp(_winograd_forward, _winograd_backward)
