"""Single operations of the UNet against PyTorch's, alternating in one run.

    python -m benchmarks.operations

times convolutions, matmuls and attention with the shapes of Stable Diffusion 1.5's UNet at 256
pixels with two samples: forward pass, and gradients of all inputs. "xla" is XLA's own operation
without a platform's special implementation. On a CPU in float32, on a GPU in bfloat16. In seconds:

    python -m benchmarks.operations --kernels conv_8 --rounds 1 --seconds 0.1 --output o.json

The share of the peak is relative to a large matmul, which Winograd's convolution may exceed; small
operations on a GPU measure the launch. Rows go to benchmarks/results/operations.json. Five minutes
on two CPU cores.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.nn import functional as F

from benchmarks.harness import (
    check_config,
    find_device,
    make_row,
    synchronize,
    time_in_this_process,
    write_contenders,
)
from benchmarks.rows import PACKAGES, describe_machine, run_benchmark
from diffusers_flax.models.attention import attention
from diffusers_flax.models.convolution import convolve, xla_convolve

BATCH_SIZE = 2
NUM_HEADS = 8

# {name: (kind, sizes)}; conv: side, channels; dense: tokens, channels in and out; attention:
# queries, keys, channels.
KERNELS = {
    "conv_32": ("conv", (32, 320)),
    "conv_16": ("conv", (16, 640)),
    "conv_8": ("conv", (8, 1280)),
    "dense_1024": ("dense", (1024, 320, 2560)),
    "self_attention_1024": ("attention", (1024, 1024, 320)),
    "text_attention_1024": ("attention", (1024, 77, 320)),
}


@dataclass(frozen=True)
class Config:
    kernels: tuple[Literal[tuple(KERNELS)], ...] = tuple(KERNELS)
    rounds: int = 5  # each contender is measured once in each
    seconds: float = 1.0  # of a measurement, at least
    output: str = "benchmarks/results/operations.json"


def make_operation(name):
    """An operation.

    Returns:
        (ours(*arrays), the same by XLA alone or None, theirs(*tensors), shapes of our arrays, per
        array the order of its axes that PyTorch takes, FLOPs of a forward pass).
    """
    kind, sizes = KERNELS[name]
    B = BATCH_SIZE
    if kind == "conv":
        side, C = sizes
        return (
            lambda x, kernel: convolve(x, kernel, 1, ((1, 1), (1, 1))),
            xla_convolve,
            lambda x, kernel: F.conv2d(x, kernel, padding=1),
            ((B, side, side, C), (3, 3, C, C)),
            ((0, 3, 1, 2), (3, 2, 0, 1)),
            2 * B * side**2 * 9 * C**2,
        )
    if kind == "dense":
        T, C, D = sizes
        shapes, axes = ((B, T, C), (C, D)), ((0, 1, 2), (0, 1))
        return jnp.matmul, None, torch.matmul, shapes, axes, 2 * B * T * C * D
    T, S, C = sizes

    def ours(query, key, value):
        return attention(query, key, value, NUM_HEADS)

    def xla(*arrays):
        heads = (x.reshape(*x.shape[:2], NUM_HEADS, -1) for x in arrays)
        return jax.nn.dot_product_attention(*heads, implementation="xla").reshape(B, T, C)

    def theirs(*tensors):
        heads = (x.unflatten(-1, (NUM_HEADS, -1)).transpose(1, 2) for x in tensors)
        return F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)

    shapes, axes = ((B, T, C), (B, S, C), (B, S, C)), ((0, 1, 2),) * 3
    return ours, xla, theirs, shapes, axes, 4 * B * T * S * C


def random_operands(shapes, axes, device):
    """The same numbers as jax arrays and PyTorch tensors; shapes, axes: from make_operation."""
    half = device == "cuda"
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape, np.float32) for shape in shapes]
    tensors = [
        torch.from_numpy(x.transpose(order).copy(order="C")).to(
            device, torch.bfloat16 if half else torch.float32
        )
        for x, order in zip(arrays, axes)
    ]
    return [jnp.asarray(x, jnp.bfloat16 if half else jnp.float32) for x in arrays], tensors


def measure_operation(name, with_gradient, config, device):
    """A row of results, see harness.make_row."""
    ours, xla, theirs, shapes, axes, flops = make_operation(name)
    arrays, tensors = random_operands(shapes, axes, device)
    kind = KERNELS[name][0]
    g = jnp.ones(jax.eval_shape(ours, *arrays).shape, arrays[0].dtype)

    def jax_contender(function):
        def forward(_, *arrays):
            return function(*arrays)

        def gradient(g, *arrays):
            out, pull = jax.vjp(function, *arrays)
            return out, pull(g)

        program = jax.jit(gradient if with_gradient else forward).lower(g, *arrays).compile()
        return (lambda: None), lambda: jax.block_until_ready(program(g, *arrays))

    def run_theirs(tensors, g):
        with torch.set_grad_enabled(with_gradient):
            out = theirs(*tensors)
            if with_gradient:
                torch.autograd.grad(out, tensors, g)
        synchronize(device)

    contenders = {"ours": jax_contender(ours)}
    if xla is not None:
        contenders["xla"] = jax_contender(xla)
    layouts = {"torch eager": torch.contiguous_format}
    if kind == "conv":
        layouts["torch channels_last"] = torch.channels_last
    for contender, layout in layouts.items():
        ordered = [x.to(memory_format=layout).requires_grad_(with_gradient) for x in tensors]
        ones = torch.ones_like(theirs(*ordered)).detach()
        contenders[contender] = (lambda: None), partial(run_theirs, ordered, ones)
    return make_row(
        name,
        "gradient" if with_gradient else "forward",
        BATCH_SIZE,
        flops * (3 if with_gradient else 1),
        device,
        time_in_this_process(contenders, config.rounds, config.seconds),
    )


def run(config):
    """Measure, write, print."""
    check_config(config)
    if not config.kernels:
        raise ValueError(f"--kernels is empty; name at least one of {', '.join(KERNELS)}")
    device, machine = find_device(), describe_machine(PACKAGES)
    rows = (
        measure_operation(name, with_gradient, config, device)
        for name in config.kernels
        for with_gradient in (False, True)
    )
    write_contenders(rows, machine, config.output)


def main(args=None):
    """Command line."""
    run_benchmark({Config: run}, __doc__, args)


if __name__ == "__main__":
    main()
