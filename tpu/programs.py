"""Types of TPU; memory, traffic and least time of programs that are compiled for them.

    tpu = find_slice("v5e-16")
    costs = measure(jax.pmap(f, devices=slice_devices(tpu)), args)

The compiler's own "bytes accessed" counts every operand and result, also values in the chip's
VMEM; a prefetched value counts three times (read, written to VMEM, read there). hbm_bytes counts
only traffic of the chip's memory (HBM), from the program's text: a layout with S(1) is in VMEM, one
without S in HBM. kernel_bytes adds what Pallas kernels access,
which the compiler does not count. interconnect_bytes counts what the chips send to each other.
"""

import importlib.util
import math
import os
import re
import time
from functools import cache
from typing import NamedTuple

import jax
from jax.experimental.topologies import get_topology_desc

from diffusers_flax.messages import one_line
from diffusers_flax.programs import no_compilation_cache

GIB = 2**30


class Chip(NamedTuple):
    """A type of TPU. Source: Cloud TPU's documentation; memory is the compiler's limit."""

    topology: str  # its name in jax.experimental.topologies
    cores: int  # TensorCores per chip if the slice's name counts them, else 1
    flops: float  # peak in bfloat16, per second
    int8: float  # peak in int8, operations per second
    bandwidth: float  # of the memory, bytes per second
    interconnect: float  # sum over a chip's links, one direction, bytes per second
    memory: float  # usable by a program, GiB


CHIPS = {
    "v4": Chip("v4", 2, 275e12, 275e12, 1.23e12, 0.3e12, 30.75),
    "v5e": Chip("v5e", 1, 197e12, 393e12, 0.82e12, 0.2e12, 15.75),
    "v5p": Chip("v5", 2, 459e12, 918e12, 2.8e12, 0.6e12, 95.74),
    "v6e": Chip("v6e", 1, 918e12, 1836e12, 1.64e12, 0.448e12, 31.25),
}
# Slices have three dimensions (v4, v5p) or two.
SHAPES_3D = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8")
SHAPES_2D = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")

# Without these settings the compiler looks for a TPU in the network, writes logs to /tmp, and runs
# in only one process at a time.
LIBTPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


class Slice(NamedTuple):
    """Connected chips and their hosts."""

    chip: Chip
    num_chips: int
    num_hosts: int
    shape: str


def slices():
    """All types of slices, {name: Slice}."""
    types = {}
    for family, chip in CHIPS.items():
        for shape in SHAPES_3D if chip.cores == 2 else SHAPES_2D:
            num_chips = math.prod(map(int, shape.split("x")))
            # Four chips per host; v5e and v6e slices of up to eight chips have one host.
            num_hosts = 1 if chip.cores == 1 and num_chips <= 8 else num_chips // 4
            types[f"{family}-{num_chips * chip.cores}"] = Slice(chip, num_chips, num_hosts, shape)
    return types


def find_slice(name):
    """The Slice of an accelerator type.

    Args:
        name: such as v4-32 or v5p-8, which count TensorCores, two per chip; or v5e-16 (also as
            v5litepod-16) or v6e-8, which count chips.

    Raises:
        ValueError: the name is unknown.
    """
    types = slices()
    name = name.replace("v5litepod-", "v5e-")
    if name not in types:
        raise ValueError(f"--tpu {name} is not known; known are {', '.join(types)}")
    return types[name]


def check_compiler():
    """Raise a ValueError unless the TPU's compiler is installed."""
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            "libtpu, the TPU's compiler, is not installed; get the one for this jax: "
            f'pip install "jax[tpu]=={jax.__version__}"'
        )


def slice_devices(tpu):
    """The devices of a Slice, to compile for.

    Raises:
        ValueError: the compiler is not installed.
    """
    check_compiler()
    for name, value in LIBTPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    options = {"chip_config_name": "megacore"} if tpu.chip.cores == 2 else {}
    if tpu.num_chips == 1:
        options["chips_per_host_bounds"] = (1, 1, 1)
    return get_topology_desc(f"{tpu.chip.topology}:{tpu.shape}", "tpu", **options).devices


def param_shapes(module, dtype):
    """Shapes of a module's parameters, stored in dtype."""
    shapes = jax.eval_shape(module.init_weights, jax.random.key(0))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), shapes)


def replicated(tree, num_devices):
    """Shapes of arrays that pmap takes: (num_devices, ...)."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((num_devices, *x.shape), x.dtype), tree)


def num_bytes(tree):
    """Bytes that a tree of arrays (chips, ...) takes on each chip, without padding."""
    return sum(math.prod(x.shape[1:]) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def measure(program, args, switches=(), compiler_options=None):
    """Compile a program and measure its memory and traffic on each chip.

    Args:
        program: what pmap returned.
        args: its arguments, of ShapeDtypeStructs.
        switches: see sum_over_run.
        compiler_options: {name: value} of XLA's options.

    Returns:
        dict: "padding" (of the arguments), "temporaries", "outputs" (those that do not replace an
        argument) and "code", bytes; "hbm_bytes", to and from the memory;
        "interconnect_bytes", sent to other chips; "cycles", of expected_cycles;
        "bytes_accessed", the compiler's count plus kernel_bytes, a loop's body once;
        "compile_seconds". If the memory is too small, only "needs", bytes, and "compile_seconds".

    Raises:
        ValueError: XLA does not take a compiler option.
    """
    started = time.perf_counter()
    try:
        with no_compilation_cache():  # reading from it needs the chip
            compiled = program.lower(*args).compile(compiler_options=compiler_options)
    except jax.errors.JaxRuntimeError as error:
        # The first number is the memory needed.
        size = re.search(r"\b([\d.]+)([KMGT])\b", str(error))
        if re.search("No such compile option|Failed to parse .* into flag", str(error)):
            given = " ".join(f"{name}={value}" for name, value in compiler_options.items())
            raise ValueError(
                f"XLA does not take the compiler options {given} ({one_line(error, 200)}); leave "
                "out or correct the one that it names"
            ) from error
        if "RESOURCE_EXHAUSTED" not in str(error) or size is None:
            raise
        if compiler_options and "hbm" not in str(error).lower():  # another memory, such as VMEM
            raise ValueError(
                f"the program does not compile with these options: {one_line(error, 200)}"
            ) from error
        needs = float(size[1]) * 1024 ** (1 + "KMGT".index(size[2]))
        return {"needs": needs, "compile_seconds": time.perf_counter() - started}
    memory, cost, text = compiled.memory_analysis(), compiled.cost_analysis(), compiled.as_text()
    formats = jax.tree.leaves(compiled.input_formats)
    used = [x for x, form in zip(jax.tree.leaves(args), formats) if form.layout is not None]
    return {
        "padding": memory.argument_size_in_bytes - num_bytes(used),
        "temporaries": memory.temp_size_in_bytes,
        "outputs": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "code": memory.generated_code_size_in_bytes,
        "bytes_accessed": cost["bytes accessed"] + kernel_bytes(text),
        "hbm_bytes": hbm_bytes(text, switches),
        "interconnect_bytes": interconnect_bytes(text),
        "cycles": expected_cycles(text, switches),
        "compile_seconds": time.perf_counter() - started,
    }


def roofline_seconds(chip, flops, moved, sent=0, int8_flops=0):
    """The least time that a program can take on a Chip.

    Args:
        flops: of the work.
        moved, sent: bytes to and from the memory, and to other chips.
        int8_flops: those of the FLOPs that are in int8.

    Source: Roofline (Williams, Waterman, Patterson 2009), section 3.
    """
    compute = (flops - int8_flops) / chip.flops + int8_flops / chip.int8
    return max(compute, moved / chip.bandwidth, sent / chip.interconnect)


def largest_fitting(fits, start):
    """Find the largest number that fits, to within an eighth: double, then bisect.

    Args:
        fits: number, at least 1 -> bool; slow.
        start: first number to try.

    Returns:
        (number, or 0 if 1 does not fit; the smallest number known not to fit).
    """
    good, bad, number = 0, None, start
    while bad is None or bad - good > max(1, good // 8):
        if fits(number):
            good = number
        else:
            bad = number
        number = 2 * good if bad is None else (good + bad) // 2
    return good, bad


def verdict(report):
    """Whether the program fits, in a line."""
    total, usable = report["memory_total"] / GIB, report["memory_usable"] / GIB
    answer = "fits" if report["fits"] else "does not fit"
    return f"{answer}: {report['batch_per_chip']} per chip need {total:.2f} of {usable:.2f} GiB"


def print_report(report):
    """The report as a table."""
    print(f"{report['program']} on {report['tpu']}, {report['chips']} chip(s), each:")
    for name, size in report.get("memory", {}).items():
        print(f"  {name:<14}{size / GIB:8.3f} GiB")
    print(verdict(report))
    if "smallest_not_fitting" in report:
        print(f"{report['smallest_not_fitting']} per chip do not fit")
    if "flops" in report:
        ema = report["ema_hbm_bytes"] / 1e9
        unit = {"train": "pairs", "unet": "samples"}.get(report["program"], "images")
        print(
            f"{report['flops'] / 1e12:.3g} TFLOP, {report['hbm_bytes'] / 1e9:.3g} GB to and from "
            f"the memory{f', {ema:.3g} GB for averages of the weights' if ema else ''}, "
            f"{report['interconnect_bytes'] / 1e9:.3g} GB to other chips"
        )
        print(f"{report['cycles'] / 1e6:.4g} million cycles expected, without kernels")
        print(
            f"at least {report['step_seconds'] * 1e3:.3g} ms, so at most "
            f"{report['images_per_second_per_chip']:.1f} {unit}/s per chip, "
            f"{report['images_per_second']:.0f} on the slice"
        )


# The text of a compiled program

# bf16[8,1024]{1,0:T(8,128)S(1)}; the name has the number of bits, except pred, which is a byte.
SHAPE = re.compile(r"\b(pred|(?:bf|[cfsu])\d+\w*)\[([\d,]*)\](\{[^}]*\})?")
INSTRUCTION = re.compile(r"\s*(?:ROOT )?%([\w.\-]+) = (.*?) ([\w\-]+)\((.*)")
NAME = re.compile(r"%([\w.\-]+)")
COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
# Computations that an instruction calls; those of fusions are not listed.
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


def array_bytes(dtype, shape):
    """Size of an array: "bf16", "8,1024" -> 16384; s4 takes half a byte."""
    bits = 8 if dtype == "pred" else int(re.search(r"\d+", dtype)[0])
    return -(-bits * math.prod(int(size) for size in shape.split(",") if size) // 8)


def in_hbm(kind):
    """[bytes] of the arrays in a type's text; 0 for arrays in another memory."""
    return [
        0 if "S(" in layout else array_bytes(dtype, shape)
        for dtype, shape, layout in SHAPE.findall(kind)
    ]


def all_bytes(kind):
    """Bytes of all arrays in a type's text, in HBM and VMEM."""
    return sum(array_bytes(dtype, shape) for dtype, shape, _ in SHAPE.findall(kind))


def operands_of(rest):
    """The names of an instruction's operands, from the text after its opening parenthesis."""
    return NAME.findall(rest.split(")")[0])


def parse(text):
    """({computation: [(name, type, operation, rest of the line)]}, name of the entry)."""
    computations, current, entry = {}, None, None
    for line in text.splitlines():
        if found := COMPUTATION.match(line):
            current = computations.setdefault(found[2], [])
            entry = found[2] if found[1] else entry
        elif current is not None and (found := INSTRUCTION.match(line)):
            current.append(found.groups())
    return computations, entry


def num_trips(loop, condition):
    """Number of iterations of a loop: the compiler's, or from a condition "counter < constant".

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
    """Bytes that a fusion reads of parameters that it only slices.

    Args:
        computation: its instructions.

    Returns:
        {index of the parameter: bytes}; without parameters that are passed to another fusion.
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


def sum_over_run(text, cost, switches=()):
    """Sum a cost over the computations of a program, each as often as one run executes it.

    All branches of a condition count, except for those of `switches`.

    Args:
        text: compiled.as_text() of a program compiled for a TPU.
        cost: (instructions of a computation, all computations as of parse) -> number.
        switches: of each `lax.switch` in a loop, in their order: the share of the trips that each
            branch runs in.

    Returns:
        int.

    Raises:
        ValueError: the program has another number of switches.
    """
    computations, entry = parse(text)
    shares = list(switches)

    @cache
    def cost_of(computation, in_switch=False):
        total = cost(computations[computation], computations)
        for _, _, operation, rest in computations[computation]:
            trips = 1
            if operation == "while":
                trips = num_trips(rest, computations[CONDITION.search(rest)[1]])
            called = CALLED.findall(rest)
            for branches in BRANCHES.findall(rest):
                called += NAME.findall(branches)
            if operation == "call":
                called += re.findall(r"to_apply=%([\w.\-]+)", rest)
            is_switch = operation == "conditional" and not in_switch
            weights = shares.pop(0) if is_switch and shares else [trips] * len(called)
            for branch, weight in zip(called, weights, strict=True):
                total += weight * cost_of(branch, in_switch or is_switch)
        return total

    total = round(cost_of(entry))
    if shares:
        raise ValueError(f"{len(shares)} of {len(switches)} switches are not in the program")
    return total


def hbm_bytes(text, switches=()):
    """Bytes read from and written to the chip's memory, by one run of a program.

    Each operand and result counts once, a sliced operand by its slices. This is too little if a
    kernel reads an operand several times, and too much if a part of an array is replaced in place,
    as the whole array counts as read and written.

    Args and errors: those of sum_over_run.

    Returns:
        int.
    """
    return sum_over_run(text, moved_by, switches)


def moved_by(instructions, computations):
    """Bytes that the instructions of a computation move to and from HBM."""
    total, sizes = 0, {}  # bytes in HBM of each value
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
        read = sum(reads)
        if operation in ("copy-start", "slice-start"):
            # Its type is (target, source, flag), or ((source), target, flag).
            dtype, shape, layout = SHAPE.findall(kind)[operation == "slice-start"]
            size = array_bytes(dtype, shape)
            written = 0 if "S(" in layout else size
            read = size if read else 0
        elif operation.endswith("-start"):
            written = max(0, written - read)  # its type includes the operands
        total += read + written
    return total


def expected_cycles(text, switches=()):
    """Cycles that the compiler expects of a program's operations, without kernels (Pallas).

    Args and errors: those of sum_over_run.

    Returns:
        int.
    """

    def cost(instructions, computations):
        return sum(int(x) for *_, rest in instructions for x in CYCLES.findall(rest))

    return sum_over_run(text, cost, switches)


COLLECTIVE = re.compile("(all-gather|reduce-scatter|all-reduce)(-start)?")
# replica_groups={{0,1,2,3}}, =[1,4]<=[4] or =mesh['batch'=4] {'batch'}
LISTED_GROUP = re.compile(r"replica_groups=\{\{([\d,]+)\}")
TILED_GROUPS = re.compile(r"replica_groups=\[\d+,(\d+)\]")
MESH_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")


def group_size(rest):
    """Number of chips in a group of a collective, from the rest of its line."""
    if listed := LISTED_GROUP.search(rest):
        return len(listed[1].split(","))
    if tiled := TILED_GROUPS.search(rest):
        return int(tiled[1])
    axes, used = MESH_GROUPS.search(rest).groups()
    sizes = dict(re.findall(r"'([^']*)'=(\d+)", axes))
    return math.prod(int(sizes[name]) for name in re.findall(r"'([^']*)'", used))


def interconnect_bytes(text):
    """Bytes that a chip sends to other chips in one run of a program.

    A ring of n chips sends (n - 1) / n of the gathered array per chip for an all-gather or a
    reduce-scatter, and twice as much for an all-reduce. A fusion of an all-reduce and a slice is a
    reduce-scatter (its emitter is called AllReduceScatterFusion).

    Args:
        text: compiled.as_text() of a program compiled for a TPU.

    Returns:
        int.
    """
    computations, entry = parse(text)

    @cache
    def sent_by(computation, sum_factor=2):
        total = 0
        for name, kind, operation, rest in computations[computation]:
            if found := COLLECTIVE.fullmatch(operation):
                sizes = [array_bytes(dtype, shape) for dtype, shape, _ in SHAPE.findall(kind)]
                if found[2] and len(sizes) > 1:
                    sizes = sizes[len(sizes) // 2 :]  # the type of a start has operands and results
                n = group_size(rest)
                factors = {"all-gather": 1 / n, "reduce-scatter": 1.0, "all-reduce": sum_factor / n}
                total += sum(sizes) * (n - 1) * factors[found[1]]
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
    """Bytes that a program's kernels (Pallas) access; the compiler does not count them.

    Args:
        text: compiled.as_text() of a program compiled for a TPU.

    Returns:
        int; operands and results count once each, in HBM or VMEM, and a loop's body once, as in the
        compiler's count.
    """
    total = 0
    for computation in parse(text)[0].values():
        sizes = {name: all_bytes(kind) for name, kind, _, _ in computation}
        for name, _, operation, rest in computation:
            if operation == "custom-call" and 'custom_call_target="tpu_custom_call"' in rest:
                total += sizes[name] + sum(sizes.get(operand, 0) for operand in operands_of(rest))
    return total
