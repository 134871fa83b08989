"""Traffic and cycles of a program, from the HLO that XLA compiled for a TPU or GPU.

XLA's own "bytes accessed" counts every operand and result, also values in a TPU's VMEM; a
prefetched value counts three times (read, written to VMEM, read there). hbm_bytes counts only
traffic of the chip's memory (HBM): a layout with S(1) is in VMEM, one without S in HBM, S(5) in the
host's memory. kernel_bytes counts the accesses of Pallas kernels, which XLA leaves out.
interconnect_bytes counts bytes between chips. compiling/kernels.py tells a GPU's kernels apart.
"""

import math
import re
from functools import cache

import numpy as np

from diffusers_flax.flops import in_scope, split_switches

# bf16[8,1024]{1,0:T(8,128)S(1)}; the name has the number of bits, except pred, which is a byte.
SHAPE = re.compile(r"\b(pred|(?:bf|[cfsu])\d+\w*)\[([\d,]*)\](\{[^}]*\})?")
INSTRUCTION = re.compile(r"\s*(?:ROOT )?%([\w.\-]+) = (.*?) ([\w\-]+)\((.*)")
NAME = re.compile(r"%([\w.\-]+)")
COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
# Computations that an instruction calls, except for the computations of fusions.
CALLED = re.compile(r"(?:body|true_computation|false_computation)=%([\w.\-]+)")
TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
CONDITION = re.compile(r"condition=%([\w.\-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
# Operations without traffic of their own.
NO_TRAFFIC = {"parameter", "get-tuple-element", "tuple", "bitcast", "constant", "while"}
NO_TRAFFIC |= {"conditional", "call", "after-all", "optimization-barrier", "partition-id"}
SLICES = {"slice", "dynamic-slice"}
FUSED = re.compile(r"calls=%([\w.\-]+)")
CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
UNKNOWN_CYCLES = 2**64 - 1  # of operations without an estimate


def array_bytes(dtype, shape):
    """Bytes of an array: "bf16", "8,1024" -> 16384; s4 takes half a byte."""
    bits = 8 if dtype == "pred" else int(re.search(r"\d+", dtype)[0])
    return -(-bits * math.prod(int(size) for size in shape.split(",") if size) // 8)


def in_hbm(kind):
    """[bytes of each array] of a type like "(f32[8]{0}, bf16[8]{0:S(1)})"; 0 outside HBM."""
    return [
        0 if "S(" in layout else array_bytes(dtype, shape)
        for dtype, shape, layout in SHAPE.findall(kind)
    ]


def all_bytes(kind):
    """Bytes of all arrays of a type, in HBM and VMEM."""
    return sum(array_bytes(dtype, shape) for dtype, shape, _ in SHAPE.findall(kind))


def operands_of(rest):
    """Names of an instruction's operands, from the text after its opening parenthesis."""
    return NAME.findall(rest.split(")")[0])


def parse_program(text):
    """({computation: [(name, type, operation, rest of the line)]}, entry computation)."""
    computations, current, entry = {}, None, None
    for line in text.splitlines():
        if found := COMPUTATION.match(line):
            current = computations.setdefault(found[2], [])
            entry = found[2] if found[1] else entry
        elif current is not None and (found := INSTRUCTION.match(line)):
            current.append(found.groups())
    return computations, entry


def num_trips(loop, condition):
    """Number of trips of a loop, as the compiler notes it or from "counter < constant".

    Args:
        loop: the rest of its line.
        condition: the instructions of its condition.

    Returns:
        int; 1 if unknown.
    """
    if noted := TRIP_COUNT.search(loop):
        return int(noted[1])
    constants = {
        name: int(rest.split(")")[0])
        for name, kind, operation, rest in condition
        if operation == "constant" and kind.startswith(("s32[]", "u32[]"))
    }
    _, _, operation, rest = condition[-1]
    limit = operands_of(rest)[-1:]
    if operation == "compare" and "direction=LT" in rest and limit and limit[0] in constants:
        return constants[limit[0]]
    return 1


def slices_of(computation):
    """Bytes that a fusion reads from parameters that it only slices.

    Args:
        computation: its instructions.

    Returns:
        {index of the parameter: bytes}, without parameters that other operations also read.
    """
    indices, read = {}, {}  # {name: index of the parameter}, {index: bytes}
    for name, kind, operation, rest in computation:
        operands = operands_of(rest)
        if operation == "parameter":
            indices[name] = index = int(rest.split(")")[0])
            read[index] = 0
        elif operation == "bitcast" and operands[0] in indices:
            indices[name] = indices[operands[0]]
        else:
            size = all_bytes(kind) if operation in SLICES else math.inf
            for index in {indices[operand] for operand in operands if operand in indices}:
                read[index] += size
    return {index: size for index, size in read.items() if size < math.inf}


def sum_over_run(text, cost, switches=()):
    """Sum a cost over the computations of a program; a loop's body counts once per trip.

    All branches of a conditional count in full, unless `switches` gives the fraction of trips of
    each.

    Args:
        text: compiled.as_text() of a program.
        cost: (instructions of a computation, all computations, see parse_program) -> number or
            NumPy array.
        switches: for each `lax.switch` in a loop, in order: the fraction of trips in which each
            branch runs; and Scoped, see flops.matmul_flops.

    Returns:
        The sum, a float where shares of trips count.

    Raises:
        ValueError: the program has another number of switches.
    """
    computations, entry = parse_program(text)
    shares, scoped = split_switches(switches)

    @cache
    def cost_of(computation, in_switch=False):
        total = cost(computations[computation], computations)
        for _, _, operation, rest in computations[computation]:
            trips = 1
            if operation == "while":
                trips = num_trips(rest, computations[CONDITION.search(rest)[1]])
            called = CALLED.findall(rest)[::-1]  # of a condition: false, true, as in jax.lax.cond
            for branches in BRANCHES.findall(rest):
                called += NAME.findall(branches)
            if operation == "call":
                called += re.findall(r"to_apply=%([\w.\-]+)", rest)
            is_conditional = operation == "conditional"
            weights = in_scope(scoped, rest) if is_conditional and scoped else None
            is_switch = is_conditional and not in_switch
            if weights is None:
                weights = shares.pop(0) if is_switch and shares else [trips] * len(called)
            for branch, weight in zip(called, weights, strict=True):
                total = total + weight * cost_of(branch, in_switch or is_switch)
        return total

    total = cost_of(entry)
    if shares:
        raise ValueError(f"{len(shares)} of {len(switches)} switches are not in the program")
    return total


def hbm_bytes(text, switches=()):
    """Bytes that one run of a program reads from and writes to the chip's memory.

    Each operand and result counts once, a sliced operand by its slices. This is too little if a
    kernel reads an operand several times, and too much for an update of some elements in place,
    where the whole array counts as read and written.

    Args and errors: as for sum_over_run.

    Returns:
        int.
    """
    return round(sum_over_run(text, moved_by, switches))


LIBRARY = re.compile(r'custom_call_target="__(cublas|cudnn)')  # kernels with a workspace


def moved_by(instructions, computations):
    """Bytes that a computation's instructions move to and from HBM."""
    return sum(size for *_, size in traffic(instructions, computations))


def traffic(instructions, computations):
    """Each instruction that moves data, and its bytes to and from HBM.

    Yields:
        (name, type, operation, rest of the line, bytes).
    """
    sizes = {}  # bytes in HBM of each value
    for name, kind, operation, rest in instructions:
        written = sizes[name] = sum(in_hbm(kind))
        if operation in NO_TRAFFIC or operation.endswith("-done"):
            continue
        reads = [sizes.get(operand, 0) for operand in operands_of(rest)]
        if operation in SLICES:
            reads = [min(size, all_bytes(kind)) for size in reads]
        elif fused := FUSED.search(rest):
            for index, size in slices_of(computations[fused[1]]).items():
                reads[index] = min(reads[index], size)
        elif LIBRARY.search(rest):
            written = max(0, written - workspace_bytes(kind))
        read = sum(reads)
        if operation in ("copy-start", "slice-start"):
            # Its type is (target, source, flag), or ((source), target, flag).
            dtype, shape, layout = SHAPE.findall(kind)[operation == "slice-start"]
            size = array_bytes(dtype, shape)
            written = 0 if "S(" in layout else size
            read = size if read else 0
        elif operation.endswith("-start"):
            written = max(0, written - read)  # its type includes the operands
        yield name, kind, operation, rest, read + written


def workspace_bytes(kind):
    """Bytes of the workspace at the end of a library call's type, "(bf16[8]{0}, u8[4096]{0})"."""
    last = SHAPE.findall(kind)[1:][-1:]
    return sum(array_bytes(dtype, shape) for dtype, shape, _ in last if dtype in ("u8", "s8"))


def host_bytes(text, switches=()):
    """Bytes that one run of a program fetches from the host's memory, S(5).

    Args and errors: as for sum_over_run.

    Returns:
        int.
    """

    def cost(instructions, computations):
        total = 0
        for _, kind, operation, _ in instructions:
            if operation == "copy-start":  # its type is (target, source, flag)
                dtype, shape, layout = SHAPE.findall(kind)[1]
                total += array_bytes(dtype, shape) * ("S(5)" in layout)
        return total

    return round(sum_over_run(text, cost, switches))


def expected_cycles(text, switches=()):
    """XLA's estimate of a program's cycles, without Pallas kernels.

    Args and errors: as for sum_over_run.

    Returns:
        int.
    """

    def cost(instructions, computations):
        found = [int(x) for *_, rest in instructions for x in CYCLES.findall(rest)]
        return sum(x for x in found if x != UNKNOWN_CYCLES)

    return round(sum_over_run(text, cost, switches))


COLLECTIVE = re.compile(
    "(all-gather|reduce-scatter|all-reduce|all-to-all|collective-permute)(-start)?"
)
# source_target_pairs={{0,1},{1,2}} of a collective-permute
PAIRS = re.compile(r"source_target_pairs=\{(\{[\d,{}]+\})\}")
# replica_groups={{0,1,2,3},{4,5,6,7}}, =[2,4]<=[8], =[2,4]<=[4,2]T(1,0)
# or =mesh['batch'=4,'model'=2] {'batch'}
LISTED_GROUP = re.compile(r"replica_groups=\{\{([\d,]+)\}")
TILED_GROUPS = re.compile(r"replica_groups=\[\d+,(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
MESH_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")


def first_group(rest):
    """Chips of a collective's first group; rest: of its line."""
    if listed := LISTED_GROUP.search(rest):
        return integers(listed[1])
    if tiled := TILED_GROUPS.search(rest):
        shape = integers(tiled[2])
        order = integers(tiled[3]) if tiled[3] else range(len(shape))
        chips = np.arange(math.prod(shape)).reshape(shape).transpose(order)
        return chips.ravel()[: int(tiled[1])].tolist()
    axes, used = MESH_GROUPS.search(rest).groups()
    sizes = re.findall(r"'([^']*)'=(\d+)", axes)
    chips = np.arange(math.prod(int(size) for _, size in sizes)).reshape([int(s) for _, s in sizes])
    return (
        chips[tuple(slice(None) if f"'{name}'" in used else 0 for name, _ in sizes)]
        .ravel()
        .tolist()
    )


def integers(text):
    """Numbers of a list: "4,2" -> [4, 2]."""
    return [int(number) for number in text.split(",")]


def links_between(coords, group):
    """Numbers of links between the chips of a group, (n, n), on a mesh without wrap-around."""
    places = np.array([coords[chip] for chip in group])
    return np.abs(places[:, None] - places).sum(axis=-1)


def interconnect_bytes(text, coords=None):
    """Bytes that a chip sends over its links in one run of a program.

    In a ring of n chips (n - 1) / n of the gathered array leave a chip for an all-gather or a
    reduce-scatter, and twice as much for an all-reduce. A fusion of an all-reduce and a slice is a
    reduce-scatter (its emitter is called AllReduceScatterFusion). In an all-to-all a chip sends
    1 / n of its array to each chip of the group, in a collective-permute all of it to one. Bytes
    count once for each link that they cross; a ring's neighbours are as far apart as the two
    closest chips of the group.

    Args:
        text: compiled.as_text() of a program compiled for a TPU.
        coords: coordinates of the chips; None: every two chips have a link.

    Returns:
        int.
    """
    computations, entry = parse_program(text)

    def links_of(operation, group):
        """Links that an array crosses, in units of its size."""
        n = len(group)
        if n == 1:
            return 0.0
        links = 1 - np.eye(n) if coords is None else links_between(coords, group)
        if operation == "all-to-all":
            return links.mean()
        if operation == "collective-permute":
            return links.max()
        return links[links > 0].min() * (n - 1) / n

    @cache
    def sent_by(computation, sum_factor=2):
        total = 0
        for name, kind, operation, rest in computations[computation]:
            if found := COLLECTIVE.fullmatch(operation):
                sizes = [array_bytes(dtype, shape) for dtype, shape, _ in SHAPE.findall(kind)]
                if found[1] == "collective-permute":
                    pairs = re.findall(r"(\d+),(\d+)", PAIRS.search(rest)[1])
                    # The type of a start has operand, result and two semaphores.
                    total += sizes[0] * max(links_of(found[1], list(map(int, x))) for x in pairs)
                    continue
                if found[2] and len(sizes) > 1:
                    sizes = sizes[len(sizes) // 2 :]  # the type of a start has operands and results
                group = first_group(rest)
                times = {"reduce-scatter": len(group), "all-reduce": sum_factor}.get(found[1], 1)
                total += sum(sizes) * times * links_of(found[1], group)
            if "AllReduceScatterFusion" in rest and operation == "fusion":
                total += sum(sent_by(called, sum_factor=1) for called in FUSED.findall(rest))
            trips = 1
            if operation == "while":
                trips = num_trips(rest, computations[CONDITION.search(rest)[1]])
            called = CALLED.findall(rest)
            # The text repeats a collective in its end and in the fusions that overlap with it.
            if name.startswith("async-collective-start"):
                called += FUSED.findall(rest)
            if operation == "call":
                called += re.findall(r"to_apply=%([\w.\-]+)", rest)
            for branches in BRANCHES.findall(rest):
                called += NAME.findall(branches)
            total += trips * sum(map(sent_by, called))
        return total

    return round(sent_by(entry))


def kernel_bytes(text):
    """Bytes that a program's Pallas kernels access, which XLA does not count.

    Args:
        text: compiled.as_text() of a program compiled for a TPU.

    Returns:
        int; operands and results count once each, in HBM or VMEM, and a loop's body once, as in
        XLA's count.
    """
    total = 0
    for computation in parse_program(text)[0].values():
        sizes = {name: all_bytes(kind) for name, kind, _, _ in computation}
        for name, _, operation, rest in computation:
            if operation == "custom-call" and 'custom_call_target="tpu_custom_call"' in rest:
                total += sizes[name] + sum(sizes.get(operand, 0) for operand in operands_of(rest))
    return total
