"""Cycles that a TPU's compiler expects of attention layers and convolutions. Nothing is run.

    python -m benchmarks.tpu_kernels attention

counts the cycles of an attention layer, projections included, by the blocks and layouts of splash
attention: the instruction bundles of a kernel's loop times its iterations (all branches taken, no
waiting for data), and what the compiler expects of all other operations.

    python -m benchmarks.tpu_kernels convolution

counts the cycles of 3x3 convolutions: XLA's, models.convolution.shifted_matmuls, and in int8.
--gradients: with the backward pass.

Rows go to benchmarks/results/tpu.json. Needs a CPU and `pip install "jax[tpu]"`; ten minutes each.
"""

import os
import re
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel
from tqdm import tqdm

from benchmarks.rows import describe_compiler, read_rows, report, rows_of, run_benchmark, write_rows
from compiling.hlo import expected_cycles, kernel_bytes
from compiling.programs import find_slice, program_costs, replicated_shapes, slice_devices
from diffusers_flax.compilation_cache import no_compilation_cache
from diffusers_flax.models.blocks import Attention as AttentionLayer
from diffusers_flax.models.convolution import shifted_matmuls, xla_convolve
from diffusers_flax.models.quantization import eight_bit_layer

CASES = {
    "Stable Diffusion 1.5, 256 px, forward and backward": ((8, 1024, 320), 8, True),
    "Stable Diffusion 1.5, 512 px, forward and backward": ((2, 4096, 320), 8, True),
    "SDXL, 1024 px, 64x64 positions": ((2, 4096, 640), 10, False),
    "SDXL, 1024 px, 32x32 positions": ((2, 1024, 1280), 20, False),
}
BlockSizes, Layout = splash_attention_kernel.BlockSizes, splash_attention_kernel.QKVLayout
HEAD_DIM_LAST = dict.fromkeys(("q_layout", "k_layout", "v_layout"), Layout.HEAD_DIM_MINOR)
TWO_KERNELS = {"use_fused_bwd_kernel": False, "block_q_dq": 512, "block_kv_dq": 512}
SMALL_BLOCKS = {
    "block_q": 512,
    "block_kv": 512,
    "block_kv_compute": 512,
    "block_q_dkv": 512,
    "block_kv_dkv": 512,
    "block_kv_dkv_compute": 512,
}
VARIANTS = {  # changes to the BlockSizes of models.attention.splash
    "ours": {},
    "head dimension last": HEAD_DIM_LAST,
    "blocks of 512": SMALL_BLOCKS,
    "backward in two kernels": TWO_KERNELS,
    "all three": HEAD_DIM_LAST | SMALL_BLOCKS | TWO_KERNELS,
}


@dataclass(frozen=True)
class Attention:
    """Cycles of an attention layer."""

    tpu: str = "v5e-1"  # a slice, as for tpu_compile.py; its first chip counts
    output: str = "benchmarks/results/tpu.json"


def kernel_cycles(file):
    """Cycles of a kernel from its final bundles: bundles of its loop times its iterations."""
    text = file.read_text()
    first, *_ = re.findall(r"^ *(0x[0-9a-f]+) +LB:", text, re.MULTILINE)  # loop body
    *_, last = re.findall(r"^ *(0x[0-9a-f]+) .*:", text, re.MULTILINE)
    *_, trips = re.findall(r"(\d+) /\* loop exit test \*/", text)
    return (int(last, 16) - int(first, 16)) * (int(trips) - 2)  # two fill and empty the pipeline


def count_cycles(device, case, changes, folder):
    """What attention takes with changes to splash's blocks.

    Args:
        device: the chip.
        case: one of CASES' values.
        changes: one of VARIANTS' values.
        folder: Path, where the compiler writes.

    Returns:
        {"kernels": {name: cycles}, "rest": cycles, "bytes_accessed": int}.

    Raises:
        ValueError: the compiler wrote nothing of the kernels.
    """
    (B, T, C), num_heads, with_gradient = case
    layer = AttentionLayer(C, num_heads, jnp.bfloat16)
    x = jax.ShapeDtypeStruct((B, T, C), jnp.bfloat16)
    params = jax.eval_shape(layer.init, jax.random.key(0), x)

    def loss(params, x):
        return jnp.square(layer.apply(params, x).astype(jnp.float32)).mean()

    def changed(**sizes):
        return BlockSizes(**(sizes | changes))

    program = jax.grad(loss, (0, 1)) if with_gradient else layer.apply
    jax.clear_caches()  # of attention that was traced with other blocks
    for file in folder.iterdir():
        file.unlink()
    args = replicated_shapes((params, x), 1)
    with mock.patch.object(splash_attention_kernel, "BlockSizes", changed), no_compilation_cache():
        compiled = jax.pmap(program, devices=[device]).lower(*args).compile()
    text = compiled.as_text()
    kernels = {
        re.search(r"splash_mha_([a-z]+)", file.name)[1]: kernel_cycles(file)
        for file in folder.glob("*splash_mha_*-final_bundles.txt")
    }
    if not kernels:
        raise ValueError(
            f"libtpu {version('libtpu')} wrote no final_bundles: it may have other flags"
        )
    return {
        "kernels": kernels,
        "rest": expected_cycles(text),
        "bytes_accessed": compiled.cost_analysis()["bytes accessed"] + kernel_bytes(text),
    }


def format_attention(results):
    """Markdown of the rows of attention layers."""
    lines = ["| thousand cycles | kernels | all else | accessed, GB |", "|---|---|---|---|"]
    for name, row in rows_of(results, "attention").items():
        lines.append(
            f"| {name} | {sum(row['kernels'].values()) / 1e3:.0f} | {row['rest'] / 1e3:.0f} | "
            f"{row['bytes_accessed'] / 1e9:.3f} |"
        )
    return "\n".join(lines)


def run_attention(config):
    """Compile, write, print."""
    tpu = find_slice(config.tpu)
    read_rows(config.output)
    jax.config.update("jax_platforms", "cpu")
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {flags}"
        device = slice_devices(tpu)[0]
        machine = describe_compiler()
        with tqdm(total=len(CASES) * len(VARIANTS), unit="program") as bar:
            for case in CASES:
                for name, changes in VARIANTS.items():
                    counts = count_cycles(device, CASES[case], changes, Path(folder))
                    figures[f"attention {case}, {name}"] = counts
                    bar.update()
    results = write_rows(figures, machine, config.output)
    report(format_attention(results), config.output)


CONVOLUTIONS = (  # (B, H, W, C) and output channels: SDXL's images, edits, small training batches
    *(((2, 128, 128, 320), 320), ((2, 128, 128, 960), 320), ((2, 64, 64, 640), 640)),
    *(((2, 32, 32, 1280), 1280), ((2, 32, 32, 2560), 1280)),
    *(((3, 64, 64, 320), 320), ((3, 32, 32, 640), 640), ((3, 16, 16, 1280), 1280)),
    *(((4, 32, 32, 640), 640), ((6, 32, 32, 640), 640), ((8, 32, 32, 640), 640)),
    *(((6, 64, 64, 640), 640), ((12, 32, 32, 640), 640), ((15, 32, 32, 640), 640)),
    *(((1, 16, 16, 1280), 1280), ((1, 128, 128, 512), 512)),
)


@dataclass(frozen=True)
class Convolution:
    """Cycles of 3x3 convolutions: XLA's, and a matmul per kernel position in bfloat16 and int8."""

    tpus: tuple[str, ...] = ("v5e-1", "v6e-1")  # slices; their first chips count
    gradients: bool = False  # forward and backward pass, without int8
    again: bool = False  # also compile rows that the output has
    output: str = "benchmarks/results/tpu.json"


def int8_convolve(x, kernel):
    """An int8 kernel's convolution of activations that are quantized first."""
    params = {"kernel": kernel, "dynamic_scale": jnp.ones(kernel.shape[-1])}
    return eight_bit_layer(params, x, x.dtype, padding=((1, 1), (1, 1)))


CONVOLVE = {  # name: function of (x, kernel), dtype of the kernel
    "xla": (xla_convolve, jnp.bfloat16),
    "matmuls": (shifted_matmuls, jnp.bfloat16),
    "int8": (int8_convolve, jnp.int8),
}


def convolution_costs(tpu, shape, out_channels, name, gradients=False):
    """Figures of SiLU and a convolution in bfloat16, as in a residual block, or the gradients."""
    convolve, dtype = CONVOLVE[name]
    x = jax.ShapeDtypeStruct((1, *shape), jnp.bfloat16)
    kernel = jax.ShapeDtypeStruct((1, 3, 3, shape[-1], out_channels), dtype)

    def block(x, kernel):
        return convolve(jax.nn.silu(x), kernel)

    def loss(x, kernel):
        return jnp.square(block(x, kernel).astype(jnp.float32)).mean()

    function = jax.grad(loss, (0, 1)) if gradients else block
    devices = slice_devices(find_slice(tpu))[:1]
    costs = program_costs(jax.pmap(function, devices=devices), (x, kernel))
    return {key: costs[key] for key in ("cycles", "hbm_bytes", "temporaries")}


def format_convolution(results):
    """Markdown of the rows of convolutions."""
    lines = [f"| thousand cycles | {' | '.join(CONVOLVE)} |", "|---|---|---|---|"]
    for name, row in rows_of(results, "convolution").items():
        cells = [f"{row[key]['cycles'] / 1e3:.0f}" if key in row else "" for key in CONVOLVE]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def run_convolution(config):
    """Compile, write, print."""
    for tpu in config.tpus:
        find_slice(tpu)
    jax.config.update("jax_platforms", "cpu")
    machine, results = describe_compiler(), read_rows(config.output)
    cases = [(tpu, *shapes) for tpu in config.tpus for shapes in CONVOLUTIONS]
    for tpu, shape, out_channels in tqdm(cases, unit="shape"):
        case = f"convolution {tpu}, {'x'.join(map(str, shape))} to {out_channels}"
        case += ", gradients" * config.gradients
        if case in results and not config.again:
            continue
        row = {
            name: convolution_costs(tpu, shape, out_channels, name, config.gradients)
            for name in CONVOLVE
            if not (config.gradients and name == "int8")
        }
        results = write_rows({case: row}, machine, config.output)
    report(format_convolution(results), config.output)


SUBCOMMANDS = {Attention: run_attention, Convolution: run_convolution}


def main(args=None):
    """Command line."""
    run_benchmark(SUBCOMMANDS, __doc__, args)


if __name__ == "__main__":
    main()
