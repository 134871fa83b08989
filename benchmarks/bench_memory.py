"""What a training step holds: optimizer shared out or not, batch whole or in parts, checkpointed.

    python benchmarks/bench_memory.py

Compiles the trainer's step of Stable Diffusion 1.5 at 256 pixels for four forced CPU devices with
eight pairs each and the average of the weights on, and reads off what each device holds; nothing is
run. Temporaries are a CPU's: its compiler undoes gradient checkpointing and computes bfloat16 in
float32, a TPU's does neither. With --tpu v5e-16 it compiles for that slice (`pip install
"jax[tpu]"`), some 20 minutes a row. In a minute, with the demo's model:

    python benchmarks/bench_memory.py --pretrained_model_name_or_path demo/base_model \\
        --resolution 64 --output memory.json

Writes benchmarks/results/memory.json and prints a table. Needs a CPU and 8 GB of memory; a quarter
of an hour on two cores.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import jax
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import tpu_compile  # noqa: E402
from benchmarks.full_size import (  # noqa: E402
    GIB,
    check_replaced,
    command_line,
    describe_machine,
    report,
)

NUM_DEVICES = 4
VARIANTS = {
    "plain": {},
    "4 micro-batches": {"gradient_accumulation_steps": 4},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "bf16": {"mixed_precision": "bf16"},
    "bf16, 4 micro-batches, checkpointing": {
        "mixed_precision": "bf16",
        "gradient_accumulation_steps": 4,
        "gradient_checkpointing": True,
    },
}


@dataclass(frozen=True)
class Config:
    pretrained_model_name_or_path: str = ""  # folder or Hub id; "" is Stable Diffusion 1.5
    resolution: int = 256  # pixels
    batch_per_device: int = 8  # pairs
    tpu: str = ""  # type of a slice, as for tpu_compile.py; "": four CPU devices
    output: str = "benchmarks/results/memory.json"


def compile_variants(config, devices):
    """The memory of a step with each of VARIANTS.

    Args:
        config: Config.
        devices: to compile for.

    Returns:
        {name: {"parameters", "optimizer", "ema", "temporaries": bytes of a device, ...}}.

    Raises:
        ValueError: flags that the trainer does not take.
    """
    base = tpu_compile.Config(
        tpu=config.tpu,
        pretrained_model_name_or_path=config.pretrained_model_name_or_path,
        resolution=config.resolution,
        train_batch_size=config.batch_per_device * len(devices),
        ema="full",
        ema_decay=0.9999,
    )
    variants = {name: replace(base, **flags) for name, flags in VARIANTS.items()}
    for variant in variants.values():
        tpu_compile.check_flags(variant, len(devices))
    figures = {}
    for name, variant in tqdm(variants.items(), unit="step"):
        job = tpu_compile.train_step_job(variant, devices)
        step = tpu_compile.measure(job.step, job.args)
        update = tpu_compile.measure(job.update, job.update_args)
        if "needs" in step:  # too large for the chip
            figures[name] = step
            continue
        figures[name] = tpu_compile.memory_parts(job, step, update)
        figures[name] |= {"compile_seconds": step["compile_seconds"]}
    return figures


def format_table(figures):
    """The figures as Markdown."""
    parts = ("parameters", "optimizer", "ema", "temporaries")
    lines = [f"| GiB per device | {' | '.join(parts)} |", "|---|" + "---|" * len(parts)]
    for name, row in figures.items():
        cells = [f"{row[part] / GIB:.2f}" if part in row else "does not fit" for part in parts]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def run(config):
    """Compile, write, print."""
    if config.batch_per_device % 4 or config.batch_per_device < 4:
        raise ValueError(
            f"batch_per_device={config.batch_per_device} cannot be cut into four micro-batches; "
            "give a multiple of 4"
        )
    check_replaced(config.output)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    if config.tpu:
        devices = tpu_compile.slice_devices(tpu_compile.find_slice(config.tpu))
    else:
        devices = jax.devices()
    figures = compile_variants(config, devices)
    machine = describe_machine(("jax", "jaxlib", "flax", "optax"))
    report(format_table(figures), config.output, machine=machine, figures=figures)


def main(args=None):
    """Command line."""
    command_line(Config, __doc__, run, args)


if __name__ == "__main__":
    main()
