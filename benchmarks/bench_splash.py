"""Cycles that attention takes on a TPU that is not here, by the blocks and layouts of its kernels.

    python benchmarks/bench_splash.py

Compiles an attention layer, projections included, and has the TPU's compiler write out its program:
a kernel's cycles are the instruction bundles of its loop times its iterations (all branches taken,
no waiting for data), those of all else are what the compiler expects. Nothing is run. Another chip:

    python benchmarks/bench_splash.py --tpu v6e-1 --output splash_v6e.json

Writes benchmarks/results/splash.json and prints a table. Needs a CPU, `pip install "jax[tpu]"` and
a gigabyte in /tmp; some ten minutes on two cores.
"""

import os
import re
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import tpu_compile  # noqa: E402
from benchmarks.full_size import (  # noqa: E402
    check_replaced,
    command_line,
    describe_machine,
    report,
)
from executables import no_compilation_cache  # noqa: E402
from modeling_flax_blocks import Attention  # noqa: E402
from tpu_programs import kernel_bytes  # noqa: E402

# {name: ((B, T, C), heads, with gradients)}
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
VARIANTS = {  # changes to the BlockSizes of kernels_flax.splash
    "ours": {},
    "head dimension last": HEAD_DIM_LAST,
    "blocks of 512": SMALL_BLOCKS,
    "backward in two kernels": TWO_KERNELS,
    "all three": HEAD_DIM_LAST | SMALL_BLOCKS | TWO_KERNELS,
}


@dataclass(frozen=True)
class Config:
    tpu: str = "v5e-1"  # a slice, as for tpu_compile.py; its first chip counts
    output: str = "benchmarks/results/splash.json"


def kernel_cycles(file):
    """Cycles of a kernel from its final bundles: those of its loop times its iterations."""
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
    layer = Attention(C, num_heads, jnp.bfloat16)
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
    args = tpu_compile.on_all((params, x), 1)
    with mock.patch.object(splash_attention_kernel, "BlockSizes", changed), no_compilation_cache():
        compiled = jax.pmap(program, devices=[device]).lower(*args).compile()
    text = compiled.as_text()
    entry = text[text.index("\nENTRY ") :]
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
        "rest": sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', entry))),
        "bytes_accessed": compiled.cost_analysis()["bytes accessed"] + kernel_bytes(text),
    }


def format_table(figures):
    """The figures as Markdown."""
    lines = ["| thousand cycles | | kernels | all else | accessed, GB |", "|---|---|---|---|---|"]
    for case, variants in figures.items():
        for name, row in variants.items():
            lines.append(
                f"| {case} | {name} | {sum(row['kernels'].values()) / 1e3:.0f} | "
                f"{row['rest'] / 1e3:.0f} | {row['bytes_accessed'] / 1e9:.3f} |"
            )
    return "\n".join(lines)


def run(config):
    """Compile, write, print."""
    tpu = tpu_compile.find_slice(config.tpu)
    check_replaced(config.output)
    jax.config.update("jax_platforms", "cpu")
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {flags}"
        device = tpu_compile.slice_devices(tpu)[0]
        machine = describe_machine(("jax", "jaxlib", "libtpu"))
        with tqdm(total=len(CASES) * len(VARIANTS), unit="program") as bar:
            for case in CASES:
                figures[case] = {}
                for name, changes in VARIANTS.items():
                    counts = count_cycles(device, CASES[case], changes, Path(folder))
                    figures[case][name] = counts
                    bar.update()
    report(format_table(figures), config.output, machine=machine, figures=figures)


def main(args=None):
    """Command line."""
    command_line(Config, __doc__, run, args)


if __name__ == "__main__":
    main()
