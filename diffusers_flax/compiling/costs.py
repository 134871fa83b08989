"""Memory and traffic of a program that is compiled for TPUs or GPUs.

costs = program_costs(jax.pmap(f, devices=slice_devices(tpu)), args, tpu.chip)
with traced_for(host.chip):
    costs = program_costs(jax.pmap(f, devices=gpu_devices(host)), args, host.chip)
"""

import math
import re
import time

import jax

from diffusers_flax.compilation_cache import no_compilation_cache
from diffusers_flax.compiling.cards import COMPILER_OPTIONS, Card
from diffusers_flax.compiling.hlo import (
    expected_cycles,
    hbm_bytes,
    host_bytes,
    interconnect_bytes,
)
from diffusers_flax.compiling.kernels import kernel_table
from diffusers_flax.messages import one_line

GIB = 2**30
NO_OPTION = "No such compile option|While setting option|Failed to parse .* into flag"


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


def program_costs(program, args, chip, switches=(), compiler_options=None):
    """Compile a program and measure its memory and traffic on each chip.

    Args:
        program: function of pmap or jit.
        args: its arguments, trees of ShapeDtypeStructs.
        chip: Chip or Card.
        switches: see hlo.executed.
        compiler_options: {name: value} of XLA's options.

    Returns:
        dict: "padding" (of the arguments), "temporaries", "outputs" (unless they replace an
        argument) and "code", bytes; "interconnect_bytes" and "host_bytes"; of a TPU "hbm_bytes" and
        "cycles", of a GPU "kernels", see hlo.py and kernel_table; "compile_seconds". If the memory
        is too small, only "needs", bytes, and "compile_seconds".

    Raises:
        ValueError: XLA does not take a compiler option, or the program does not compile with them.
    """
    is_gpu, started = isinstance(chip, Card), time.perf_counter()
    given = {"true": True, "false": False}  # a GPU's compiler does not take these as text
    options = {name: given.get(value, value) for name, value in (compiler_options or {}).items()}
    options = (COMPILER_OPTIONS if is_gpu else {}) | options
    try:
        with no_compilation_cache():  # reading from it needs the chip
            compiled = program.lower(*args).compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        needs = memory_needed(str(error), compiler_options)
        if needs is None:
            raise
        return {"needs": needs, "compile_seconds": time.perf_counter() - started}
    seconds = time.perf_counter() - started
    memory, formats = compiled.memory_analysis(), jax.tree.leaves(compiled.input_formats)
    used = [x for x, form in zip(jax.tree.leaves(args), formats) if form.layout is not None]
    shardings = jax.tree.leaves(compiled.input_shardings)
    meshes = [sharding.mesh for sharding in shardings if hasattr(sharding, "mesh")]
    chips = meshes[0].devices.ravel() if meshes else []
    coords = [x.coords for x in chips if hasattr(x, "coords")] or None  # of TPUs
    text = compiled.as_text()
    costs = {
        "padding": memory.argument_size_in_bytes - num_bytes(used),
        "temporaries": memory.temp_size_in_bytes,
        "outputs": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "code": memory.generated_code_size_in_bytes,
        "interconnect_bytes": interconnect_bytes(text, None if is_gpu else coords),
        "host_bytes": host_bytes(text, switches),
        "compile_seconds": seconds,
    }
    if is_gpu:
        return costs | {"kernels": kernel_table(text, chip, switches)}
    return costs | {
        "hbm_bytes": hbm_bytes(text, switches),
        "cycles": expected_cycles(text, switches),
    }


def memory_needed(error, compiler_options):
    """Bytes that a program needs, from XLA's error; None if it says something else.

    Raises:
        ValueError: the error is about the compiler options.
    """
    if re.search(NO_OPTION, error):
        options = " ".join(f"{name}={value}" for name, value in compiler_options.items())
        raise ValueError(
            f"XLA does not take the compiler options {options} ({one_line(error, 200)}); leave out "
            "or correct the one that it names"
        )
    size = re.search(r"\b([\d.]+)([KMGT])\b", error)  # the first number is the memory needed
    if "RESOURCE_EXHAUSTED" not in error or size is None:
        return None
    if compiler_options and "hbm" not in error.lower():  # another memory, such as VMEM
        raise ValueError(f"the program does not compile with these options: {one_line(error, 200)}")
    return float(size[1]) * 1024 ** (1 + "KMGT".index(size[2]))
