"""Traffic of a program, from the HLO that XLA compiled for a TPU or GPU.

XLA's own count of bytes has a TPU's values in VMEM too, a prefetched value three times. Here a
layout with S(1) is in VMEM, one without S in the chip's memory (HBM), S(5) in the host's memory.
compiling/kernels.py tells a GPU's kernels apart.
"""

import math
import re
from typing import NamedTuple

import numpy as np

# bf16[8,1024]{1,0:T(8,128)S(1)}; the name has the number of bits, except pred, which is a byte.
SHAPE = re.compile(r"\b(pred|(?:bf|[cfsu])\d+\w*)\[([\d,]*)\](\{[^}]*\})?")
INSTRUCTION = re.compile(r"\s*(?:ROOT )?%([\w.\-]+) = (.*?) ([\w\-]+)\((.*)")
NAME = re.compile(r"%([\w.\-]+)")
COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
# Operations without traffic of their own.
NO_TRAFFIC = {"parameter", "get-tuple-element", "tuple", "bitcast", "constant", "while"}
NO_TRAFFIC |= {"conditional", "call", "after-all", "optimization-barrier", "partition-id"}
SLICES = {"slice", "dynamic-slice", "slice-start"}
LIBRARY = re.compile(r'custom_call_target="__(cublas|cudnn)')  # kernels with a workspace
COLLECTIVE = "(all-gather|reduce-scatter|all-reduce|all-to-all|collective-permute)(-start)?"


class Instruction(NamedTuple):
    """A line of a program."""

    name: str
    type: str  # of the result: f32[8]{0}, or a tuple (f32[8]{0}, bf16[8]{0:S(1)})
    operation: str
    text: str  # operands and attributes
    computation: dict  # {name: Instruction} of the same computation
    computations: dict  # {name: computation} of the program

    @property
    def operands(self):
        """Names of the instructions whose results it reads."""
        return NAME.findall(self.text.split(")")[0])

    @property
    def operand_types(self):
        """The types of the operands."""
        read = map(self.computation.get, self.operands)
        return ["" if line is None else line.type for line in read]

    @property
    def fused(self):
        """The instructions of a fusion, {name: Instruction}; {} of other operations."""
        names = self.called("calls")
        return self.computations[names[0]] if names else {}

    def called(self, *attributes):
        """Names of the computations in attributes such as body=%x or branch_computations={%x}."""
        found = re.findall(rf"(?:{'|'.join(attributes)})=(%[\w.\-]+|\{{[^}}]*\}})", self.text)
        return [name for names in found for name in NAME.findall(names)]


def array_sizes(type_of_result, in_hbm=False):
    """Bytes of the arrays of a type, all or the ones in HBM: "bf16[8,1024]{1,0}" -> [16384]."""
    sizes = []
    for dtype, shape, layout in SHAPE.findall(type_of_result):
        bits = 8 if dtype == "pred" else int(re.search(r"\d+", dtype)[0])
        if not (in_hbm and "S(" in layout):
            sizes.append(-(-bits * math.prod(int(x) for x in shape.split(",") if x) // 8))
    return sizes


def parse_program(text):
    """({computation: {name: Instruction}}, entry computation); text: compiled.as_text()."""
    computations, current, entry = {}, None, None
    for line in text.splitlines():
        if found := COMPUTATION.match(line):
            current = computations.setdefault(found[2], {})
            entry = found[2] if found[1] else entry
        elif current is not None and (found := INSTRUCTION.match(line)):
            current[found[1]] = Instruction(*found.groups(), current, computations)
    return computations, entry


def num_trips(loop):
    """Trips of a loop, as the compiler notes it or from "counter < constant"; 1 if unknown."""
    if noted := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.text):
        return int(noted[1])
    condition = loop.computations[loop.called("condition")[0]]
    last = [*condition.values()][-1]
    limit = condition[last.operands[-1]].text if "direction=LT" in last.text else ""
    return int(number[1]) if (number := re.match(r"(\d+)\)", limit)) else 1


def executed(text, fractions=None):
    """Every instruction that a run executes, and how often; fusions are one instruction.

    Args:
        text: compiled.as_text() of a program.
        fractions: {jax.named_scope around a condition: the fraction of its runs in which each
            branch is taken}; of other conditions all branches count in full.

    Yields:
        (Instruction, times).
    """
    computations, entry = parse_program(text)
    fractions = fractions or {}
    conditions = "\n".join(line for line in text.splitlines() if " conditional(" in line)
    nameless = iter([x for scope, x in fractions.items() if f'{scope}/cond"' not in conditions])

    def visit(computation, times):
        for line in computations[computation].values():
            yield line, times
            # Branches of a condition are false, true, as in jax.lax.cond.
            called = line.called("body", "true_computation", "false_computation")[::-1]
            called += line.called("branch_computations")
            called += line.called("to_apply") if line.operation == "call" else []
            shares = [num_trips(line) if line.operation == "while" else 1] * len(called)
            if line.operation == "conditional":
                named = [x for scope, x in fractions.items() if f'{scope}/cond"' in line.text]
                if "op_name" not in line.text:  # XLA has moved other operations into it
                    named = [next(nameless, shares)]
                shares = named[0] if named else shares
            for branch, share in zip(called, shares, strict=True):
                yield from visit(branch, times * share)

    yield from visit(entry, 1)


def moved_bytes(line):
    """Bytes that an Instruction moves to and from HBM.

    Each operand and result counts once, a sliced operand by its slices. This is too little if a
    kernel reads an operand several times, and too much for an update of some elements in place,
    where the whole array counts as read and written.
    """
    if line.operation in NO_TRAFFIC or line.operation.endswith("-done"):
        return 0
    # The last result of a library's kernel is its workspace.
    results = re.sub(r", [su]8\[.*", "", line.type) if LIBRARY.search(line.text) else line.type
    written = sum(array_sizes(results, in_hbm=True))
    reads = [sum(array_sizes(kind, in_hbm=True)) for kind in line.operand_types]
    if line.operation.endswith("-start"):  # its type has the operands too
        written = max(0, written - sum(reads))
    if line.operation in SLICES:
        # The type of a slice-start is ((source), target, flag).
        size = array_sizes(line.type)[line.operation == "slice-start"]
        reads = [min(read, size) for read in reads]
    for index, size in sliced_parameters(line.fused).items():
        reads[index] = min(reads[index], size)
    return sum(reads) + written


def sliced_parameters(fused):
    """{index: bytes} that a fusion reads of the parameters that it only slices."""
    indices, read = {}, {}  # {name: index of the parameter}, {index: bytes}
    for name, line in fused.items():
        if line.operation == "parameter":
            indices[name] = index = int(line.text.split(")")[0])
            read[index] = 0
        elif line.operation == "bitcast" and line.operands[0] in indices:
            indices[name] = indices[line.operands[0]]
        else:
            size = sum(array_sizes(line.type)) if line.operation in SLICES else math.inf
            for index in {indices[operand] for operand in line.operands if operand in indices}:
                read[index] += size
    return {index: size for index, size in read.items() if size < math.inf}


def first_group(line):
    """Chips of a collective's first group.

    In the text: replica_groups={{0,1,2,3},{4,5,6,7}}, =[2,4]<=[8] or =[2,4]<=[4,2]T(1,0).
    """
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line.text):
        return integers(listed[1])
    tiled = re.search(r"replica_groups=\[\d+,(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line.text)
    chips = np.arange(math.prod(integers(tiled[2]))).reshape(integers(tiled[2]))
    return chips.transpose(integers(tiled[3]) if tiled[3] else None).ravel()[: int(tiled[1])]


def sent_bytes(line, coords, sum_factor=2):
    """Bytes that a chip sends for a collective, see traffic; 0 for other operations.

    sum_factor: passes of an all-reduce over its array.
    """
    if not (found := re.fullmatch(COLLECTIVE, line.operation)):
        return 0

    def links(group):
        """Hops between each two chips of a group, (n, n), on a mesh without wrap-around links."""
        if coords is None:
            return 1 - np.eye(len(group))
        places = np.array([coords[chip] for chip in group])
        return np.abs(places[:, None] - places).sum(axis=-1)

    sizes = array_sizes(line.type)
    if found[1] == "collective-permute":  # the type of a start has two semaphores as well
        pairs = re.search(r"source_target_pairs=\{(\{[\d,{}]+\})\}", line.text)[1]
        return sizes[0] * max(links(integers(x)).max() for x in re.findall(r"\d+,\d+", pairs))
    if found[2] and len(sizes) > 1:
        sizes = sizes[len(sizes) // 2 :]  # the type of a start has operands and results
    group, size = first_group(line), sum(sizes)
    n, crossed = len(group), links(group)
    if n == 1:
        return 0
    if found[1] == "all-to-all":
        return size * crossed.mean()
    times = {"reduce-scatter": n, "all-reduce": sum_factor}.get(found[1], 1)
    return size * times * crossed[crossed > 0].min() * (n - 1) / n


def integers(text):
    """Numbers of a list: "4,2" -> [4, 2]."""
    return [int(number) for number in text.split(",")]


def traffic(text, fractions=None, coords=None):
    """Bytes that one run of a program moves on each chip.

    In a ring of n chips (n - 1) / n of the gathered array leave a chip for an all-gather or a
    reduce-scatter, and twice as much for an all-reduce. In an all-to-all a chip sends 1 / n of its
    array to each chip of the group, in a collective-permute all of it to one. Bytes count once for
    each link that they cross; a ring's neighbours are as far apart as the two closest chips of the
    group.

    Args:
        text: compiled.as_text() of a program.
        fractions: see executed.
        coords: coordinates of a TPU's chips; None: every two chips have a link.

    Returns:
        {"hbm_bytes": to and from its memory, "host_bytes": from the host's memory,
        "interconnect_bytes": to other chips}.
    """
    hbm = host = sent = 0
    for line, times in executed(text, fractions):
        hbm += times * moved_bytes(line)
        # The type of a copy-start is (target, source, flag).
        if line.operation == "copy-start" and "S(5)" in SHAPE.findall(line.type)[1][2]:
            host += times * array_sizes(line.type)[1]
        # An all-reduce and a slice, which is a reduce-scatter.
        is_scatter = line.operation == "fusion" and "AllReduceScatterFusion" in line.text
        # The end of an async collective, and fusions that overlap with it, repeat it.
        is_async = line.name.startswith("async-collective-start")
        for inside in [line, *(line.fused.values() if is_scatter or is_async else ())]:
            sent += times * sent_bytes(inside, coords, 1 if is_scatter else 2)
    return {"hbm_bytes": round(hbm), "host_bytes": round(host), "interconnect_bytes": round(sent)}
