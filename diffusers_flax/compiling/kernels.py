"""A GPU's kernels by kind: how many, bytes, FLOPs, the least time and an estimate.

table = kernel_table(compiled.as_text(), CARDS["h100"])
seconds = estimated_seconds(table, makes_images=False)
"""

import math
import re

import numpy as np

from diffusers_flax.compiling.hlo import (
    NO_TRAFFIC,
    SHAPE,
    executed,
    fused_by,
    interconnect_bytes,
    moved_bytes,
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


FULL = "f32 without TF32"  # dtype of products of the highest precision
COLUMNS = ("kernels", "bytes", "flops", "least_seconds")


def target_of(line):
    """What a custom call calls, such as __cublas$gemm; the operation of other instructions."""
    found = re.search(r'custom_call_target="([^"]+)"', line.text)
    return found[1] if found and line.operation == "custom-call" else line.operation


def kind_of(line, fused):
    """The kind of an instruction of a compiled program; fused: of hlo.fused_by."""
    if not fused:
        return kind_of_name(target_of(line))
    inside = {x.operation for x in fused.values()}
    for product, kind in (("dot", "matmul"), ("convolution", "convolution")):
        if product in inside:
            return kind
    # XLA names a fusion after its operations, except the ones that Triton compiles.
    is_named = not re.fullmatch(r"fusion(\.\d+)*", line.name)
    of_triton = " ".join(sorted(inside & {"reduce", "transpose", "concatenate"}))
    return kind_of_name(line.name if is_named else of_triton)


def product_flops(line, computation):
    """(FLOPs, dtype of the operands, or FULL) of a matmul, convolution or attention; else (0, "").

    Args:
        line: Instruction.
        computation: {name: Instruction} with its operands.
    """
    target = target_of(line)
    if not (line.operation in ("dot", "convolution") or target.startswith(("__cublas", "__cudnn"))):
        return 0, ""

    def first_array(instruction):
        dtype, shape, _ = SHAPE.findall(instruction.type)[0]
        return dtype, [int(size) for size in shape.split(",") if size]

    (dtype, left), (_, right) = (first_array(computation[name]) for name in line.operands[:2])
    _, out = first_array(line)
    if dtype == "f32" and re.search(r'(?i)operand_precision(=\{|":\[")highest', line.text):
        dtype = FULL
    if "fmha" in target:  # (B, T, N, H), (B, S, N, H); two products, or five of the backward pass
        return (10 if "Backward" in target else 4) * math.prod(left) * right[1], dtype
    if line.operation == "dot" or target.startswith("__cublas"):
        pattern = r'"?lhs_contracting_(?:dims|dimensions)"?[=:][{\[]([^}\]]*)[}\]]'
        axes = re.findall(r"\d+", re.search(pattern, line.text)[1])
        return 2 * math.prod(out) * math.prod(left[int(axis)] for axis in axes), dtype
    images, kernel = out, right  # of the forward pass; kernels have an axis "o"
    if "BackwardInput" in target:
        images = left
    elif "BackwardFilter" in target:
        images, kernel = right, out
    channels = kernel[re.search(r"dim_labels=\w+_(\w+)->", line.text)[1].index("o")]
    return 2 * math.prod(images) * math.prod(kernel) // channels, dtype


def rate(card, dtype):
    """FLOPs per second of a Card."""
    full = 2e9 * card.cores * card.units * card.clock  # a multiply-add of each unit in a cycle
    return {"f32": card.flops / 2, FULL: full, "s8": card.int8}.get(dtype, card.flops)


def kernel_table(text, card, switches=()):
    """What the kernels of one run of a program do, by kind; a loop's body counts for every trip.

    A kernel takes at least its FLOPs over the card's rate or its bytes over the memory's bandwidth.
    Each operand and result counts once.

    Args:
        text: compiled.as_text() of a program for a GPU.
        card: Card.
        switches: see hlo.executed.

    Returns:
        {kind: {"kernels", "bytes", "flops", "least_seconds"}}, kinds without kernels left out. The
        bytes of collectives are the ones that a GPU sends.

    Source: Roofline (Williams, Waterman, Patterson 2009), section 3, for each kernel.
    """
    lines, computations = executed(text, switches)
    total = {kind: np.zeros(len(COLUMNS)) for kind in ALL_KINDS}
    for line, computation, times in lines:
        if line.operation in NO_TRAFFIC or line.operation.endswith("-done"):
            continue
        fused = fused_by(line, computations)
        kind = kind_of(line, fused)
        if kind == "collective":
            total[kind] += np.array([times, 0, 0, 0])
            continue
        inside = fused if line.operation == "fusion" and fused else None
        products = [product_flops(x, inside) for x in inside.values()] if inside else []
        products = products or [product_flops(line, computation)]
        size = moved_bytes(line, computation, computations)
        seconds = sum(flops / rate(card, dtype) for flops, dtype in products)
        flops = sum(flops for flops, _ in products)
        total[kind] += times * np.array([1, size, flops, max(seconds, size / card.bandwidth)])
    sent = interconnect_bytes(text)
    total["collective"][1:] = sent, 0, sent / card.interconnect
    rows = {kind: dict(zip(COLUMNS, row.tolist())) for kind, row in total.items()}
    return {kind: row for kind, row in rows.items() if row["kernels"]}


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
