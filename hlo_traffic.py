"""How many bytes a compiled TPU program moves to and from the chip's memory (HBM).

    hbm_bytes(compiled.as_text())

The compiler's own "bytes accessed" counts every operand and result wherever it is, so also what
stays in the chip's VMEM, and a value fetched ahead three times: read, written to VMEM, read there.
The program's text says where each value lives: a layout with S(1) is VMEM, one without S is HBM.
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
    limit = NAME.findall(rest.split(")")[0])[-1:]
    if operation == "compare" and "direction=LT" in rest and limit and limit[0] in constants:
        return constants[limit[0]]
    return 1


def hbm_bytes(text):
    """Bytes read from and written to the chip's memory, by one run of a program.

    Operands and results are counted whole, once each, so where an operation reads a part of one it
    is too much, and where a kernel reads one again too little. Of a condition's branches all count.

    Args:
        text: compiled.as_text() of a program compiled for a TPU.

    Returns:
        int.
    """
    computations, entry = parse(text)

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
            read = sum(sizes.get(operand, 0) for operand in NAME.findall(rest.split(")")[0]))
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
