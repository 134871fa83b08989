"""What TPUs' compiler says of the training step and of SDXL, beside the classes of others.

    python benchmarks/bench_tpu_compiled.py

Has tpu_compile.py compile, for chips that are not here: the UNet's part of a training step (Stable
Diffusion 1.5, 256 pixels, 8 pairs, bfloat16), the whole step with and without --cache_latents, the
UNet of one SDXL step (1024 pixels, one picture with guidance) and all of a picture. Nothing is run.
Reports of the same flags that are there already (benchmarks/results/tpu_compile_*.json) are taken
as they are; --again compiles all anew. With the demo's model:

    python benchmarks/bench_tpu_compiled.py --tpus v5e-4 --jobs unet_grad --resolution 64 \\
        --pretrained_model_name_or_path demo/base_model --results_dir /tmp/reports

"Accessed" is the compiler's count of bytes, which has what stays on the chip, and what its kernels
access, which the compiler does not count (of others' classes there are none); "HBM" is what moves
to and from the chip's memory (tpu_programs.py). The rows of others are measured with the same
compiler: the classes that diffusers 0.39 had, and MaxDiffusion's. Needs a CPU, 18 GB of memory and
`pip install "jax[tpu]"`; 5 to 75 minutes per chip and job on two cores.
"""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import tpu_compile  # noqa: E402
from benchmarks.full_size import GIB, command_line  # noqa: E402
from config_flax import read_json  # noqa: E402

STEP = ("--mixed_precision", "bf16", "--ema", "full")
# Flags of tpu_compile.py; the batch is 8 pairs or one picture on each chip.
JOBS = {
    "unet_grad": ("--program", "unet_grad", "--mixed_precision", "bf16"),
    "train_step": STEP,
    "train_step_latents": (*STEP, "--cache_latents", "latents", "--no_random_crop"),
    "sdxl_unet": ("--program", "sdxl_unet"),
    "sdxl": ("--program", "sdxl"),
}
# Of others, one v5e chip: (temporaries, bytes accessed, FLOPs).
BASELINES = {
    "unet_grad": {
        "diffusers 0.39": (1.45e9, 54.8e9, 4.06e12),
        "MaxDiffusion": (2.38e9, 68.4e9, 4.08e12),
    },
    "sdxl_unet": {"diffusers 0.39": (1.03e9, 98.4e9, 14.05e12)},
}
PAIRS_PER_CHIP = 8
MODEL = "pretrained_model_name_or_path"
JobName = Literal["unet_grad", "train_step", "train_step_latents", "sdxl_unet", "sdxl"]


@dataclass(frozen=True)
class Config:
    tpus: tuple[str, ...] = ("v5e-4", "v4-8", "v6e-4")  # slices of four chips
    jobs: tuple[JobName, ...] = tuple(JOBS)
    again: bool = False  # compile what was compiled before, too
    results_dir: str = "benchmarks/results"
    pretrained_model_name_or_path: str = ""  # "": Stable Diffusion 1.5, or XL
    resolution: int = 256  # of training, pixels


def flags_of(tpu, job, config):
    """The flags of tpu_compile.py."""
    flags = ["--tpu", tpu, *JOBS[job]]
    if not job.startswith("sdxl"):
        batch_size = PAIRS_PER_CHIP * tpu_compile.find_slice(tpu).num_chips
        flags += ["--train_batch_size", str(batch_size), "--resolution", str(config.resolution)]
    if model := config.pretrained_model_name_or_path:
        flags += [f"--{MODEL}", str(Path(model).absolute())]
    return flags


def report_of(tpu, job, config):
    """The report of tpu_compile.py, compiled if it is not there."""
    name = f"{tpu}_{job}_1" if job.startswith("sdxl") else f"{tpu}_{job}"
    file = Path(config.results_dir) / f"tpu_compile_{name}.json"
    flags = flags_of(tpu, job, config)
    if config.again or not file.is_file():
        command = [sys.executable, "tpu_compile.py", *flags, "--output", str(file.absolute())]
        print(f"{tpu} {job} ...", flush=True)
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            said = done.stderr.strip() or f"tpu_compile.py ended with code {done.returncode}"
            raise ValueError(said.splitlines()[-1].removeprefix("error: "))
    report = read_json(file)
    asked = tpu_compile.changed_flags(
        tyro.cli(tpu_compile.Config, args=flags, use_underscores=True)
    )
    if report["flags"] != asked:
        raise ValueError(
            f"{file} is of other flags ({report['flags']}); name another --results_dir, or give "
            "--again"
        )
    return report


def format_table(reports):
    """Markdown; reports: {(tpu, job): report}."""
    lines = [
        "| chip | what | | temporaries, GiB | accessed, GB | HBM, GB | TFLOP | at least, ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (tpu, job), report in reports.items():
        chip = tpu.split("-")[0]
        if "memory" not in report:
            lines.append(f"| {chip} | {job} | ours | does not fit | | | | |")
            continue
        accessed = "" if job == "sdxl" else f"{report['bytes_accessed'] / 1e9:.3g}"  # a loop's once
        lines.append(
            f"| {chip} | {job} | ours | {report['memory']['temporaries'] / GIB:.3g} | {accessed} | "
            f"{report['hbm_bytes'] / 1e9:.3g} | {report['flops'] / 1e12:.3g} | "
            f"{report['step_seconds'] * 1e3:.3g} |"
        )
        if chip == "v5e" and not report["flags"].keys() & {"resolution", MODEL}:
            for name, (temporaries, num_bytes, flops) in BASELINES.get(job, {}).items():
                lines.append(
                    f"| {chip} | {job} | {name} | {temporaries / GIB:.3g} | "
                    f"{num_bytes / 1e9:.3g} | | {flops / 1e12:.3g} | |"
                )
    return "\n".join(lines)


def run(config):
    """Compile what is missing, print."""
    if not (config.tpus and config.jobs):
        raise ValueError("tpus and jobs must name at least one each")
    reports = {
        (tpu, job): report_of(tpu, job, config) for job in config.jobs for tpu in config.tpus
    }
    print(f"\n{format_table(reports)}\n\nreports are in {config.results_dir}")


def main(args=None):
    """Command line."""
    command_line(Config, __doc__, run, args)


if __name__ == "__main__":
    main()
