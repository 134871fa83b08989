"""Memory and traffic of a program that is compiled for TPUs or GPUs."""

import math
import re
import time

import jax

from diffusers_flax.compilation_cache import no_compilation_cache
from diffusers_flax.compiling.hlo import hbm_bytes, host_bytes, interconnect_bytes
from diffusers_flax.compiling.kernels import kernel_table
from diffusers_flax.messages import one_line

# Without a GPU, XLA cannot try Triton's tiles of a matmul; it takes cuBLAS.
GPU_OPTIONS = {"xla_gpu_enable_triton_gemm": False}
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


def program_costs(function, args, chip, fractions=None, compiler_options=None):
    """Compile a program and measure its memory and traffic on each chip.

    Args:
        function: of pmap or jit.
        args: its arguments, trees of ShapeDtypeStructs.
        chip: Chip.
        fractions: see hlo.executed.
        compiler_options: {name: value} of XLA's options.

    Returns:
        dict: "padding" (of the arguments), "temporaries", "outputs" (unless they replace an
        argument) and "code", bytes; "interconnect_bytes", "host_bytes", "hbm_bytes"; of a GPU
        "kernels", see kernel_table; "compile_seconds". If the memory is too small, only "needs",
        bytes, and "compile_seconds".

    Raises:
        ValueError: XLA does not take a compiler option, or the program does not compile with them.
    """
    started, given = time.perf_counter(), compiler_options or {}
    as_bool = {"true": True, "false": False}  # a GPU's compiler does not take these as text
    options = {} if chip.card is None else GPU_OPTIONS
    options = options | {name: as_bool.get(value, value) for name, value in given.items()}
    try:
        with no_compilation_cache():  # reading from it needs the chip
            compiled = function.lower(*args).compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        said = str(error)
        size = re.search(r"\b([\d.]+)([KMGT])\b", said)  # the first number is what it needs
        is_full = "RESOURCE_EXHAUSTED" in said and size is not None
        # With options another memory may be full, such as VMEM.
        if re.search(NO_OPTION, said) or (given and is_full and "hbm" not in said.lower()):
            raise ValueError(
                f"XLA does not compile with these --compiler_options: {one_line(error, 200)}"
            ) from error
        if not is_full:
            raise
        needs = float(size[1]) * 1024 ** (1 + "KMGT".index(size[2]))
        return {"needs": needs, "compile_seconds": time.perf_counter() - started}
    memory, formats = compiled.memory_analysis(), jax.tree.leaves(compiled.input_formats)
    used = [x for x, form in zip(jax.tree.leaves(args), formats) if form.layout is not None]
    shardings, text = jax.tree.leaves(compiled.input_shardings), compiled.as_text()
    meshes = (sharding.mesh for sharding in shardings if hasattr(sharding, "mesh"))
    devices = next(meshes).devices.flat if chip.card is None else ()
    coords = [device.coords for device in devices if hasattr(device, "coords")] or None
    costs = {
        "padding": memory.argument_size_in_bytes - num_bytes(used),
        "temporaries": memory.temp_size_in_bytes,
        "outputs": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "code": memory.generated_code_size_in_bytes,
        "interconnect_bytes": interconnect_bytes(text, coords),
        "host_bytes": host_bytes(text, fractions),
        "compile_seconds": time.perf_counter() - started,
    }
    if chip.card is None:
        return costs | {"hbm_bytes": hbm_bytes(text, fractions)}
    kernels = kernel_table(text, chip, fractions)
    moved = sum(row["bytes"] for kind, row in kernels.items() if kind != "collective")
    return costs | {"hbm_bytes": moved, "kernels": kernels}
