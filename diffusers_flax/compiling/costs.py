"""Memory and traffic of a program that is compiled for TPUs or GPUs.

costs = program_costs(jax.pmap(f, devices=slice_devices(find_slice("v5e-16"))), args)
with traced_for(host.chip):
    costs = gpu_costs(jax.pmap(f, devices=gpu_devices(host)), args, host.chip)
"""

import math
import re
import time

import jax

from diffusers_flax.compilation_cache import no_compilation_cache
from diffusers_flax.compiling.cards import COMPILER_OPTIONS
from diffusers_flax.compiling.hlo import (
    expected_cycles,
    hbm_bytes,
    host_bytes,
    interconnect_bytes,
    kernel_bytes,
)
from diffusers_flax.compiling.kernels import kernel_table
from diffusers_flax.messages import one_line

GIB = 2**30


def replicated_shapes(tree, num_devices):
    """Shapes of arrays that pmap takes: (num_devices, ...)."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((num_devices, *x.shape), x.dtype), tree)


def num_bytes(tree):
    """Bytes of a tree of arrays on each chip, without padding.

    Arrays are (chips, ...), or ShapeDtypeStructs with a sharding; arrays in the host's memory do
    not count.
    """

    def on_a_chip(x):
        sharding = getattr(x, "sharding", None)
        if sharding is not None and sharding.memory_kind == "pinned_host":
            return (0,)
        return x.shape[1:] if sharding is None else sharding.shard_shape(x.shape)

    return sum(math.prod(on_a_chip(x)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def program_costs(program, args, switches=(), compiler_options=None):
    """Compile a program and measure its memory and traffic on each chip.

    Args:
        program: function of pmap or jit.
        args: its arguments, trees of ShapeDtypeStructs.
        switches: see sum_over_run.
        compiler_options: {name: value} of XLA's options.

    Returns:
        dict: "padding" (of the arguments), "temporaries", "outputs" (unless they replace an
        argument) and "code", bytes; "hbm_bytes", "host_bytes", "interconnect_bytes" and "cycles",
        see compiling/hlo.py; "bytes_accessed", XLA's count plus kernel_bytes, a loop's body once;
        "compile_seconds". If the memory is too small, only "needs", bytes, and "compile_seconds".

    Raises:
        ValueError: XLA does not take a compiler option, or the program does not compile with them.
    """
    compiled, needs, seconds = compile_shapes(program, args, compiler_options)
    if compiled is None:
        return {"needs": needs, "compile_seconds": seconds}
    cost, text = compiled.cost_analysis(), compiled.as_text()
    shardings = jax.tree.leaves(compiled.input_shardings)
    meshes = [sharding.mesh for sharding in shardings if hasattr(sharding, "mesh")]
    chips = meshes[0].devices.ravel() if meshes else []
    coords = [chip.coords for chip in chips if hasattr(chip, "coords")] or None  # a CPU has none
    return memory_costs(compiled, args) | {
        "bytes_accessed": cost["bytes accessed"] + kernel_bytes(text),
        "hbm_bytes": hbm_bytes(text, switches),
        "interconnect_bytes": interconnect_bytes(text, coords),
        "host_bytes": host_bytes(text, switches),
        "cycles": expected_cycles(text, switches),
        "compile_seconds": seconds,
    }


def gpu_costs(program, args, card, switches=(), compiler_options=None):
    """Compile a program for a GPU and measure its memory and kernels.

    Args and errors: as for program_costs; card: Card.

    Returns:
        dict: "padding", "temporaries", "outputs" and "code" as of program_costs; "kernels", see
        kernel_table; "interconnect_bytes", "host_bytes" and "compile_seconds".
    """
    compiled, needs, seconds = compile_shapes(program, args, compiler_options, COMPILER_OPTIONS)
    if compiled is None:
        return {"needs": needs, "compile_seconds": seconds}
    text = compiled.as_text()
    return memory_costs(compiled, args) | {
        "kernels": kernel_table(text, card, switches),
        "interconnect_bytes": interconnect_bytes(text),
        "host_bytes": host_bytes(text, switches),
        "compile_seconds": seconds,
    }


def memory_costs(compiled, args):
    """{"padding", "temporaries", "outputs", "code"} of a compiled program, see program_costs."""
    memory, formats = compiled.memory_analysis(), jax.tree.leaves(compiled.input_formats)
    used = [x for x, form in zip(jax.tree.leaves(args), formats) if form.layout is not None]
    return {
        "padding": memory.argument_size_in_bytes - num_bytes(used),
        "temporaries": memory.temp_size_in_bytes,
        "outputs": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "code": memory.generated_code_size_in_bytes,
    }


def compile_shapes(program, args, compiler_options, defaults=None):
    """Compile a program for arguments of these shapes, without jax's cache.

    Args and errors: as for program_costs; defaults: options that hold unless others are given.

    Returns:
        (compiled program, None, seconds); if the memory is too small, (None, bytes that the program
        needs, seconds).
    """
    started = time.perf_counter()
    given = {"true": True, "false": False}  # a GPU's compiler does not take these as text
    options = {name: given.get(value, value) for name, value in (compiler_options or {}).items()}
    try:
        with no_compilation_cache():  # reading from it needs the chip
            compiled = program.lower(*args).compile(compiler_options=(defaults or {}) | options)
    except jax.errors.JaxRuntimeError as error:
        # The first number is the memory needed.
        size = re.search(r"\b([\d.]+)([KMGT])\b", str(error))
        if re.search(
            "No such compile option|While setting option|Failed to parse .* into flag", str(error)
        ):
            options = " ".join(f"{name}={value}" for name, value in compiler_options.items())
            raise ValueError(
                f"XLA does not take the compiler options {options} ({one_line(error, 200)}); leave "
                "out or correct the one that it names"
            ) from error
        if "RESOURCE_EXHAUSTED" not in str(error) or size is None:
            raise
        if compiler_options and "hbm" not in str(error).lower():  # another memory, such as VMEM
            raise ValueError(
                f"the program does not compile with these options: {one_line(error, 200)}"
            ) from error
        needs = float(size[1]) * 1024 ** (1 + "KMGT".index(size[2]))
        return None, needs, time.perf_counter() - started
    return compiled, None, time.perf_counter() - started
