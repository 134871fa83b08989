"""A GPU's kernels by kind: how many, bytes, FLOPs, the least time and an estimate.

table = kernel_table(compiled.as_text(), GPUS["h100"])
seconds = sum(kind_seconds(kind, row) for kind, row in table.items()) / BUSY
"""

import math
import re
from collections import Counter

from diffusers_flax.compiling.hlo import NO_TRAFFIC, SHAPE, executed, moved_bytes, sent_bytes

# {kind of kernels: (pattern of names in XLA's programs, share)}; the first that is found counts.
# The share is the least time of all kernels of a kind over the measured one, in three programs on
# an H200: the optimizer step and the UNet with gradients of Stable Diffusion 1.5, and an SDXL
# image, profiled on 2026-11-27. Collectives were not measured.
KINDS = {
    "attention": ("fmha", 0.39),
    "convolution": ("conv[A-Z_-]|convolution", 0.68),
    "matmul": ("gemm|cublas|dot", 0.66),
    "collective": ("all-|all_|reduce-scatter|reduce_scatter|collective", 1.0),
    "copy": ("copy", 0.34),
    "concatenation": ("concatenate", 0.32),
    "transpose": ("transpose", 0.29),
    "reduction": ("reduce|softmax", 0.38),
    "element-wise": ("", 0.49),
}
SMALLEST = 1e-6  # seconds of the smallest kernels in these profiles
# Share of the time in which a kernel runs, in the same runs: step and gradient; image.
BUSY, BUSY_WITH_IMAGES = 0.87, 0.97
FULL = "f32 without TF32"  # dtype of products of the highest precision


def kind_of(line):
    """The kind of an Instruction."""
    if not line.fused:
        name = target_of(line)
    else:
        inside = {x.operation for x in line.fused.values()}
        # XLA names a fusion after its operations, except the ones that Triton compiles.
        is_named = not re.fullmatch(r"fusion(\.\d+)*", line.name)
        of_triton = " ".join(sorted(inside & {"reduce", "transpose", "concatenate"}))
        products = [x for x in ("dot", "convolution") if x in inside]
        name = products[0] if products else line.name if is_named else of_triton
    return next(kind for kind, (pattern, _) in KINDS.items() if re.search(pattern, name))


def target_of(line):
    """What a custom call calls, such as __cublas$gemm; the operation of other instructions."""
    found = re.search(r'custom_call_target="([^"]+)"', line.text)
    return found[1] if found and line.operation == "custom-call" else line.operation


def product_flops(line):
    """(FLOPs, dtype or FULL) of a matmul, convolution or attention; of others (0, "")."""
    target = target_of(line)
    if not (line.operation in ("dot", "convolution") or target.startswith(("__cublas", "__cudnn"))):
        return 0, ""

    def first_array(kind):
        dtype, shape, _ = SHAPE.findall(kind)[0]
        return dtype, [int(size) for size in shape.split(",") if size]

    (dtype, left), (_, right) = map(first_array, line.operand_types[:2])
    _, out = first_array(line.type)
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


def kernel_table(text, chip, fractions=None):
    """What the kernels of one run of a program do, by kind; a loop's body counts for every trip.

    A kernel takes at least its FLOPs over the GPU's rate or its bytes over the memory's bandwidth.
    Each operand and result counts once.

    Args:
        text: compiled.as_text() of a program for a GPU.
        chip: Chip.
        fractions: see hlo.executed.

    Returns:
        {kind: {"kernels", "bytes", "flops", "least_seconds"}}, kinds without kernels left out. The
        bytes of collectives are the ones that a GPU sends.

    Source: Roofline (Williams, Waterman, Patterson 2009), section 3, for each kernel.
    """
    # A multiply-add of each float32 unit in a cycle.
    full = 2e9 * chip.card.cores * chip.card.units * chip.card.clock
    rates = {"f32": chip.flops / 2, FULL: full, "s8": chip.int8}
    table = {}
    for line, times in executed(text, fractions):
        if line.operation in NO_TRAFFIC or line.operation.endswith("-done"):
            continue
        kind, flops = kind_of(line), 0
        if kind == "collective":
            moved = sent_bytes(line, None)
            least = moved / chip.interconnect
        else:
            inside = line.fused.values() if line.operation == "fusion" else [line]
            products = [product_flops(x) for x in inside]
            flops, moved = sum(flops for flops, _ in products), moved_bytes(line)
            seconds = sum(flops / rates.get(dtype, chip.flops) for flops, dtype in products)
            least = max(seconds, moved / chip.bandwidth)
        amounts = {"kernels": 1, "bytes": moved, "flops": flops, "least_seconds": least}
        add_times(table, {kind: amounts}, times)
    return table


def add_times(total, table, times):
    """Add the rows of a table, times a number, to the rows of another one."""
    for kind, row in table.items():
        row = {name: times * amount for name, amount in row.items()}
        total.setdefault(kind, Counter()).update(row)


def kind_seconds(kind, row):
    """The time of the kernels of a kind at its measured share; row: of kernel_table."""
    return max(row["least_seconds"] / KINDS[kind][1], row["kernels"] * SMALLEST)
