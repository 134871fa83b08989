"""A GPU's kernels by kind: how many, bytes, FLOPs, the least time and an estimate.

table = kernel_table(compiled.as_text(), CARDS["h100"])
seconds = estimated_seconds(table, makes_images=False)
"""

import math
import re

import numpy as np

from diffusers_flax.compiling.hlo import (
    FUSED,
    SHAPE,
    interconnect_bytes,
    operands_of,
    sum_over_run,
    traffic,
)

# Kinds of kernels by name, in XLA's programs and in profiles; the first that is found counts.
KINDS = {
    "attention": "fmha|sdpa|dot_product_attention|compute_dot_do_o|convert_dq",
    "convolution": (
        "conv[A-Z_-]|_fprop_|_dgrad_|_wgrad_|ImplicitGemm|convolve|AddPadding|ToN(hwc|chw)Kernel|"
        "__5x_cudnn"
    ),
    "matmul": "gemm|cublas|nvjet|dot",
    "collective": "all-|all_|reduce-scatter|reduce_scatter|collective|nccl",
    "copy": "(?i)copy|memcpy|memset",
    "concatenation": "concatenate",
    "transpose": "transpose",
    "reduction": "reduce|softmax",
}
ELEMENTWISE = "element-wise"
ALL_KINDS = (*KINDS, ELEMENTWISE)


def kind_of_name(name):
    """The kind of a kernel, from its name."""
    return next((kind for kind, words in KINDS.items() if re.search(words, name)), ELEMENTWISE)


TARGET = re.compile(r'custom_call_target="([^"]+)"')
CONTRACTING = re.compile(r'"?lhs_contracting_(?:dims|dimensions)"?[=:][{\[]([^}\]]*)[}\]]')
HIGHEST = re.compile(r'operand_precision(=\{|":\[")highest', re.IGNORECASE)
FULL = "f32 without TF32"  # dtype of products of the highest precision
DIM_LABELS = re.compile(r"dim_labels=\w+_(\w+)->")


def kind_of(name, operation, rest, computations):
    """The kind of an instruction of a compiled program."""
    target = TARGET.search(rest)
    if operation == "custom-call" and target:
        name = target[1]
    elif fused := FUSED.search(rest):
        inside = {operation for _, _, operation, _ in computations[fused[1]]}
        for product, kind in (("dot", "matmul"), ("convolution", "convolution")):
            if product in inside:
                return kind
        # XLA names a fusion after its operations, except the ones that Triton compiles.
        if re.fullmatch(r"fusion(\.\d+)*", name):
            name = " ".join(sorted(inside & {"reduce", "transpose", "concatenate"}))
    elif operation != "custom-call":
        name = operation
    return kind_of_name(name)


def size_of(kind):
    """(dtype, dimensions) of the first array of a type."""
    dtype, shape, _ = SHAPE.findall(kind)[0]
    return dtype, [int(size) for size in shape.split(",") if size]


def product_flops(operation, kind, rest, types):
    """FLOPs of one matmul, convolution or attention.

    Args:
        operation, kind, rest: of the instruction.
        types: {name: type} of the computation.

    Returns:
        (FLOPs, dtype of the operands, or FULL); (0, "") for other operations.
    """
    found = TARGET.search(rest)
    target = found[1] if operation == "custom-call" and found else operation
    if not (operation in ("dot", "convolution") or target.startswith(("__cublas", "__cudnn"))):
        return 0, ""
    operands = [size_of(types[name]) for name in operands_of(rest)[:2]]
    (dtype, left), (_, right) = operands
    _, out = size_of(kind)
    if dtype == "f32" and HIGHEST.search(rest):
        dtype = FULL
    if "fmha" in target:  # (B, T, N, H), (B, S, N, H); two products, or five of the backward pass
        return (10 if "Backward" in target else 4) * math.prod(left) * right[1], dtype
    if operation == "dot" or target.startswith("__cublas"):
        axes = re.findall(r"\d+", CONTRACTING.search(rest)[1])
        return 2 * math.prod(out) * math.prod(left[int(axis)] for axis in axes), dtype
    images, kernel = out, right  # of the forward pass; kernels have an axis "o"
    if "BackwardInput" in target:
        images = left
    elif "BackwardFilter" in target:
        images, kernel = right, out
    channels = kernel[DIM_LABELS.search(rest)[1].index("o")]
    return 2 * math.prod(images) * math.prod(kernel) // channels, dtype


def rate(card, dtype):
    """FLOPs per second of a Card."""
    full = 2e9 * card.cores * card.units * card.clock  # a multiply-add of each unit in a cycle
    return {"f32": card.flops / 2, FULL: full, "s8": card.int8}.get(dtype, card.flops)


COLUMNS = ("kernels", "bytes", "flops", "least_seconds")


def kernel_table(text, card, switches=()):
    """What the kernels of one run of a program do, by kind; a loop's body counts for every trip.

    A kernel takes at least its FLOPs over the card's rate or its bytes over the memory's bandwidth.
    Each operand and result counts once.

    Args:
        text: compiled.as_text() of a program for a GPU.
        card: Card.
        switches: see sum_over_run.

    Returns:
        {kind: {"kernels", "bytes", "flops", "least_seconds"}}, kinds without kernels left out. The
        bytes of collectives are the ones that a GPU sends.

    Source: Roofline (Williams, Waterman, Patterson 2009), section 3, for each kernel.
    """

    def cost(instructions, computations):
        types = {name: kind for name, kind, *_ in instructions}
        total = np.zeros((len(ALL_KINDS), len(COLUMNS)))
        for name, kind, operation, rest, size in traffic(instructions, computations):
            row = ALL_KINDS.index(kind_of(name, operation, rest, computations))
            if ALL_KINDS[row] == "collective":
                total[row, 0] += 1
                continue
            flops, seconds = 0, 0.0
            for count, dtype in flops_of(operation, kind, rest, types, computations):
                flops, seconds = flops + count, seconds + count / rate(card, dtype)
            total[row] += 1, size, flops, max(seconds, size / card.bandwidth)
        return total

    total = sum_over_run(text, cost, switches)
    sent = interconnect_bytes(text)
    total[ALL_KINDS.index("collective"), 1:] = sent, 0, sent / card.interconnect
    rows = zip(ALL_KINDS, total.tolist())
    return {kind: dict(zip(COLUMNS, row)) for kind, row in rows if row[0]}


def flops_of(operation, kind, rest, types, computations):
    """[(FLOPs, dtype)] of an instruction or of the products in its fusion."""
    fused = FUSED.search(rest)
    if operation != "fusion" or not fused:
        return [product_flops(operation, kind, rest, types)]
    inside = computations[fused[1]]
    types = {name: kind for name, kind, *_ in inside}
    return [product_flops(op, kind, rest, types) for _, kind, op, rest in inside]


def add_tables(tables):
    """The sum of tables, each times a number; tables: [(of kernel_table, number)]."""
    total = {}
    for table, number in tables:
        for kind, row in table.items():
            old = total.get(kind, dict.fromkeys(COLUMNS, 0.0))
            total[kind] = {name: old[name] + number * row[name] for name in COLUMNS}
    return total


# The least time of all kernels of a kind over the measured one, in three programs on an H200: the
# optimizer step and the UNet with gradients of Stable Diffusion 1.5, and an SDXL image, profiled on
# 2026-11-27. Collectives were not measured.
MEASURED_SHARES = {
    "attention": 0.39,
    "convolution": 0.68,
    "matmul": 0.66,
    "collective": 1.0,
    "copy": 0.34,
    "concatenation": 0.32,
    "transpose": 0.29,
    "reduction": 0.38,
    ELEMENTWISE: 0.49,
}
# Seconds of the smallest kernels in these profiles.
SMALLEST = 1e-6
# Share of the time in which a kernel runs, in the same runs: step and gradient; image.
BUSY = 0.87
BUSY_WITH_IMAGES = 0.97


def kind_seconds(kind, row):
    """The time of the kernels of a kind at its measured share; row: of kernel_table."""
    return max(row["least_seconds"] / MEASURED_SHARES[kind], row["kernels"] * SMALLEST)


def estimated_seconds(table, makes_images):
    """The time of a program if its kernels reach the measured shares of their least time.

    Args:
        table: of kernel_table.
        makes_images: the program makes images by a loop, which keeps a GPU busier than a step.
    """
    seconds = sum(kind_seconds(kind, row) for kind, row in table.items())
    return seconds / (BUSY_WITH_IMAGES if makes_images else BUSY)
