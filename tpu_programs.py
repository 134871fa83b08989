"""How many bytes a compiled TPU program moves to and from the chip's memory (HBM).

    hbm_bytes(compiled.as_text())

The compiler's own "bytes accessed" counts every operand and result wherever it is, so also what
stays in the chip's VMEM, and a value fetched ahead three times: read, written to VMEM, read there.
The program's text says where each value lives: a layout with S(1) is VMEM, one without S is HBM.
What Pallas kernels access the compiler does not count: kernel_bytes.
"""

import math
import re
from functools import cache

# bf16[8,1024]{1,0:T(8,128)S(1)}; a type's name has its bits, but for pred, a byte.
SHAPE = re.compile(r"\b(pred|(?:bf|[cfsu])\d+\w*)\[([\d,]*)\](\{[^}]*\})?")
INSTRUCTION = re.compile(r"\s*(?:ROOT )?%([\w.\-]+) = (.*?) ([\w\-]+)\((.*)")
NAME = re.compile(r"%([\w.\-]+)")
COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
# Those that a step of the program goes through; a fusion's are inside it.
CALLED = re.compile(r"(?:body|true_computation|false_computation)=%([\w.\-]+)")
TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
CONDITION = re.compile(r"condition=%([\w.\-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
# They move nothing themselves.
NO_TRAFFIC = {"parameter", "get-tuple-element", "tuple", "bitcast", "constant", "while"}
NO_TRAFFIC |= {"conditional", "call", "after-all", "optimization-barrier", "partition-id"}
SLICES = {"slice", "dynamic-slice"}
FUSED = re.compile(r"calls=%([\w.\-]+)")


def array_bytes(dtype, shape):
    """Of an array: "bf16", "8,1024" -> 16384; two of s4 share a byte."""
    bits = 8 if dtype == "pred" else int(re.search(r"\d+", dtype)[0])
    return -(-bits * math.prod(int(size) for size in shape.split(",") if size) // 8)


def in_hbm(kind):
    """[bytes] of the arrays in a type's text; 0 of one that is elsewhere."""
    return [
        0 if "S(" in layout else array_bytes(dtype, shape)
        for dtype, shape, layout in SHAPE.findall(kind)
    ]


def all_bytes(kind):
    """Bytes of all arrays in a type's text, wherever they are."""
    return sum(array_bytes(dtype, shape) for dtype, shape, _ in SHAPE.findall(kind))


def operands_of(rest):
    """The names of an instruction's operands, from what follows its opening parenthesis."""
    return NAME.findall(rest.split(")")[0])


def parse(text):
    """({computation: [(name, type, operation, the rest of the line)]}, the entry's name)."""
    computations, current, entry = {}, None, None
    for line in text.splitlines():
        if found := COMPUTATION.match(line):
            current = computations.setdefault(found[2], [])
            entry = found[2] if found[1] else entry
        elif current is not None and (found := INSTRUCTION.match(line)):
            current.append(found.groups())
    return computations, entry


def num_trips(loop, condition):
    """How often a loop is run: as the compiler notes, or if its condition is "counter < constant".

    Args:
        loop: the rest of its line.
        condition: the instructions of its condition.

    Returns:
        int; 1 if it is neither.
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
    """What a fusion reads of those parameters of which it reads slices alone.

    Args:
        computation: its instructions.

    Returns:
        {index of the parameter: bytes}; none of a parameter that goes into another fusion inside.
    """
    indices, read = {}, {}  # of each name of a parameter; of each index
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


def hbm_bytes(text):
    """Bytes read from and written to the chip's memory, by one run of a program.

    Operands and results count once each, an operand that is sliced by its slices. Where a kernel
    reads one again that is too little; where a part of an array is replaced in place the array
    counts whole, read and written, which is too much. Of a condition's branches all count.

    Args:
        text: compiled.as_text() of a program compiled for a TPU.

    Returns:
        int.
    """
    computations, entry = parse(text)

    def read_by(kind, operation, rest, sizes):
        """Bytes of an instruction's operands in HBM."""
        reads = [sizes.get(operand, 0) for operand in operands_of(rest)]
        if operation in SLICES:
            reads = [min(size, all_bytes(kind)) for size in reads]
        elif fused := FUSED.search(rest):
            for index, size in slices_of(computations[fused[1]]).items():
                reads[index] = min(reads[index], size)
        return sum(reads)

    @cache
    def moved_by(computation):
        total, sizes = 0, {}  # in HBM, of each value
        for name, kind, operation, rest in computations[computation]:
            sizes[name] = sum(in_hbm(kind))
            trips = 1
            if operation == "while":
                trips = num_trips(rest, computations[CONDITION.search(rest)[1]])
            called = CALLED.findall(rest)
            for branches in BRANCHES.findall(rest):
                called += NAME.findall(branches)
            if operation == "call":
                called += re.findall(r"to_apply=%([\w.\-]+)", rest)
            total += trips * sum(map(moved_by, called))
            if operation in NO_TRAFFIC or operation.endswith("-done"):
                continue
            read = read_by(kind, operation, rest, sizes)
            written = sizes[name]
            if operation in ("copy-start", "slice-start"):
                # Its type is (target, source, flag), or ((source), target, flag).
                dtype, shape, layout = SHAPE.findall(kind)[operation == "slice-start"]
                size = array_bytes(dtype, shape)
                written = 0 if "S(" in layout else size
                read = size if read else 0
            elif operation.endswith("-start"):
                written = max(0, written - read)  # its type has the operands as well
            total += read + written
        return total

    return moved_by(entry)


def kernel_bytes(text):
    """Bytes that a program's kernels (Pallas) access, which the compiler's count leaves out.

    Args:
        text: compiled.as_text() of a program compiled for a TPU.

    Returns:
        int; operands and results count once each, wherever they are, and a loop's body once, as in
        the compiler's count.
    """
    total = 0
    for computation in parse(text)[0].values():
        sizes = {name: all_bytes(kind) for name, kind, _, _ in computation}
        for name, _, operation, rest in computation:
            if operation == "custom-call" and 'custom_call_target="tpu_custom_call"' in rest:
                total += sizes[name] + sum(sizes.get(operand, 0) for operand in operands_of(rest))
    return total
