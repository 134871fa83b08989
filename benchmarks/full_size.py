"""The whole way at full size on one machine: memory and time of every command.

    python benchmarks/full_size.py

Makes a pipeline folder of Stable Diffusion 1.5's shapes with random float32 weights and a shard of
pictures, and then runs the command lines that a user would run, each a process of its own: widen
the UNet; train it at 256 pixels, batch 1, with an average of the weights from the first step, until
the checkpoint of step 1 is there and the process is killed (SIGKILL); the same command again, which
goes on and trains step 2; edit a picture in two steps. The same with tiny models, in a minute:

    python benchmarks/full_size.py --quick --output quick.json

Peak memory is the largest resident set of the command's process (VmHWM), which on a CPU holds what
would be on the device as well. Writes benchmarks/results/full_size.json and prints a table. Needs
a CPU, 23 GB of memory and 45 GB of disk (Linux).
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import jax
import numpy as np
import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import bench_data  # noqa: E402
from benchmarks.bench_data import (  # noqa: E402
    check_replaced,
    load_photographs,
    make_shards,
    this_command,
    write_json,
)
from modeling_flax_clip import FlaxCLIPTextModule  # noqa: E402
from modeling_flax_unet import FlaxUNet2DConditionModel  # noqa: E402
from modeling_flax_vae import FlaxAutoencoderKL  # noqa: E402

POLL_SECONDS = 0.05
GIB = 2**30
TOKENIZER = ROOT / "demo" / "base_model" / "tokenizer"
END_OF_TEXT = 633  # in TOKENIZER, whose ids are all below
UNET = FlaxUNet2DConditionModel(sample_size=64, cross_attention_dim=768)
TINY_UNET = {  # what differs in a UNet of 64 pixels, to try a benchmark
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
}
VAE = FlaxAutoencoderKL(
    down_block_types=("DownEncoderBlock2D",) * 4,
    up_block_types=("UpDecoderBlock2D",) * 4,
    block_out_channels=(128, 256, 512, 512),
    layers_per_block=2,
    sample_size=512,
)
TEXT_ENCODER = FlaxCLIPTextModule(
    hidden_size=768,
    intermediate_size=3072,
    projection_dim=768,
    num_attention_heads=12,
    bos_token_id=END_OF_TEXT - 1,
    eos_token_id=END_OF_TEXT,
    pad_token_id=END_OF_TEXT,
)
SCHEDULER = {
    "_class_name": "PNDMScheduler",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "num_train_timesteps": 1000,
    "set_alpha_to_one": False,
    "skip_prk_steps": True,
    "steps_offset": 1,
}
MODEL_INDEX = {
    "_class_name": "StableDiffusionPipeline",
    "feature_extractor": [None, None],
    "requires_safety_checker": False,
    "safety_checker": [None, None],
    "scheduler": ["diffusers", "PNDMScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "unet": ["diffusers", "UNet2DConditionModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}


@dataclass(frozen=True)
class Config:
    work_dir: str = ""  # a new folder for models and checkpoints; "": a temporary one, removed
    quick: bool = False  # tiny models and pictures of 64 pixels, to try this script
    output: str = "benchmarks/results/full_size.json"


def in_new_process(function, *args):
    """function's result, in a process of its own, whose devices and memory are its own.

    Raises:
        ValueError: the process was killed.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        try:
            return process.submit(function, *args).result()
        except BrokenProcessPool as error:
            raise ValueError(
                "a process was killed, most likely as memory ran out; measure less at once or on a "
                "machine that has more"
            ) from error


def write_module(folder, module):
    """Write a module with random float32 weights, scales of norms 1 and biases 0.

    Array by array, as one program for all would hold them twice, and in files that can be held
    beside them while they are written.

    Args:
        folder: path, to be made.
        module: a FlaxModelMixin.
    """
    rng = np.random.default_rng(0)

    def make(path, shape):
        match path[-1].key:
            case "scale":
                return np.ones(shape.shape, np.float32)
            case "bias":
                return np.zeros(shape.shape, np.float32)
        return rng.standard_normal(shape.shape, np.float32) * np.float32(0.02)

    shapes = jax.eval_shape(module.init_weights, jax.random.key(0))
    params = jax.tree_util.tree_map_with_path(make, shapes)
    module.save_pretrained(folder, params=params, max_shard_size="2GB")


def make_pipeline(folder, quick, in_channels=4):
    """Write a pipeline's folder with random weights, of Stable Diffusion 1.5's shapes or tiny.

    To be called in a process of its own, so that its memory is returned.

    Args:
        folder: to be made.
        quick: tiny models.
        in_channels: of the UNet; 8 for InstructPix2Pix.
    """
    jax.config.update("jax_platforms", "cpu")
    unet, vae, text_encoder = UNET.clone(in_channels=in_channels), VAE, TEXT_ENCODER
    if quick:
        unet = unet.clone(**TINY_UNET)
        vae = VAE.clone(block_out_channels=(32, 32, 32, 32), layers_per_block=1)
        text_encoder = TEXT_ENCODER.clone(vocab_size=END_OF_TEXT + 1, num_hidden_layers=1)
    for name, module in {"unet": unet, "vae": vae, "text_encoder": text_encoder}.items():
        write_module(folder / name, module)
    shutil.copytree(TOKENIZER, folder / "tokenizer")
    (folder / "scheduler").mkdir()
    for file, content in (
        ("scheduler/scheduler_config.json", SCHEDULER),
        ("model_index.json", MODEL_INDEX),
    ):
        (folder / file).write_text(json.dumps(content, indent=2) + "\n")


def make_inputs(folder, quick):
    """Write a pipeline (base), data for the trainer (data) and a picture to edit (picture.png)."""
    make_pipeline(folder / "base", quick)
    make_shards(folder / "data", num_shards=1, rows_per_shard=8, seed=0)
    load_photographs()[0].save(folder / "picture.png")


def peak_of(pid):
    """VmHWM of a process, bytes; 0 when it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def run_command(arguments, kill_when=None):
    """Run `python ARGUMENTS` in the repository's root and measure it; its stdout is repeated.

    Args:
        arguments: of Python, strings.
        kill_when: () -> bool; the process gets SIGKILL as soon as it is true.

    Returns:
        (figures: "command", "seconds", "peak_gib" and "peak_after_seconds", when it got there;
        its stdout).

    Raises:
        ChildProcessError: it failed, or ended before it was to be killed.
    """
    command = shlex.join(["python", *arguments])
    print(f"\n$ {command}", flush=True)
    with tempfile.TemporaryFile("w+") as stdout:
        started = time.perf_counter()
        process = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, stdout=stdout)
        peak = peak_after = 0
        killed = False
        try:
            while process.poll() is None:
                if (now := peak_of(process.pid)) > peak:
                    peak, peak_after = now, time.perf_counter() - started
                if kill_when and not killed and kill_when():
                    process.kill()
                    killed = True
                time.sleep(POLL_SECONDS)
        finally:
            process.kill()  # Ctrl-C: none is left behind
        seconds = time.perf_counter() - started
        stdout.seek(0)
        output = stdout.read()
    print(output, end="", flush=True)
    expected = -signal.SIGKILL if kill_when else 0
    if process.returncode != expected or killed != bool(kill_when):
        raise ChildProcessError(
            f"exit code {process.returncode} of: {command}; with -9 it was killed, by the system "
            "when memory is short: close other programs, or try --quick"
        )
    figures = {
        "command": command,
        "seconds": seconds,
        "peak_gib": peak / GIB,
        "peak_after_seconds": peak_after,
    }
    return figures, output


def describe_machine(packages):
    """What the figures were measured on and with, memory included."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    machine = bench_data.describe_machine(packages) | {"memory_gib": memory}
    if machine["load_before"] > machine["cores"] / 2:
        print(
            f"warning: other work (load {machine['load_before']:.1f} on {machine['cores']} cores) "
            "slows down some contenders more than others",
            file=sys.stderr,
        )
    return machine


def check_output(output):
    """Find out that a file cannot be written before anything is measured; ValueError."""
    folder = Path(output).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"output={output} cannot be written: {error.strerror}") from error


def read_results(output, figures):
    """The rows of a JSON file, none of a new one.

    Args:
        output: the file.
        figures: the key that holds a row's figures.

    Raises:
        ValueError: it is damaged, or holds something else.
    """
    output = Path(output)
    try:
        results = json.loads(output.read_text()) if output.exists() else {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{output} cannot be read ({error}); name another --output") from error
    rows = results.values() if isinstance(results, dict) else [None]
    if not all(isinstance(row, dict) and figures in row for row in rows):
        raise ValueError(f"{output} holds something else than such results; name another --output")
    return results


def bench(folder, quick):
    """Make the inputs in a folder, run the commands.

    Returns:
        {what was done: figures of run_command}.
    """
    in_new_process(make_inputs, folder, quick)
    resolution = "64" if quick else "256"
    num_steps = "5" if quick else "2"  # tiny ones may be over before a checkpoint is noticed
    model, checkpoints = folder / "model", folder / "model" / "checkpoints"
    widen = ["create_modified_unet.py", "--pretrained_model_name_or_path", f"{folder}/base"]
    widen += ["--output_dir", f"{folder}/wide"]
    train = ["flax_train_instruct_pix2pix.py", "--pretrained_model_name_or_path", f"{folder}/base"]
    train += ["--unet_model_name_or_path", f"{folder}/wide", "--train_data_dir", f"{folder}/data"]
    train += ["--resolution", resolution, "--train_batch_size", "1", "--max_train_steps", num_steps]
    train += ["--ema", "full", "--ema_decay", "0.9999"]
    train += ["--checkpointing_steps", "1", "--checkpoints_total_limit", "1"]
    train += ["--output_dir", str(model), "--compilation_cache_dir", f"{folder}/cache"]
    edit = ["edit_cli.py", "--model", str(model), "--input", f"{folder}/picture.png"]
    edit += ["--edit", "invert the colors", "--output", f"{folder}/edited.png"]
    edit += ["--resolution", resolution, "--num_inference_steps", "2"]

    def saved():
        return any(path.name.isdecimal() for path in checkpoints.glob("*"))

    figures = {}
    figures["widen"], _ = run_command(widen)
    figures["train, killed"], _ = run_command(train, kill_when=saved)
    figures["train, resumed"], output = run_command(train)
    if "resuming after step" not in output:
        raise ChildProcessError("the trainer did not resume from the checkpoint")
    metrics = (model / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in metrics]
    figures["train, resumed"]["loss"] = losses[-1]
    figures["train, resumed"]["checkpoint_gib"] = (
        sum(file.stat().st_size for file in checkpoints.rglob("*") if file.is_file()) / GIB
    )
    figures["edit"], _ = run_command(edit)
    if not np.isfinite(losses).all():
        raise ChildProcessError(f"losses {losses} are not all finite")
    return figures


def format_table(figures):
    """The figures as Markdown."""
    lines = ["| | seconds | peak memory, GiB | reached after, s |", "|---|---|---|---|"]
    for name, row in figures.items():
        lines.append(
            f"| {name} | {row['seconds']:.0f} | {row['peak_gib']:.1f} | "
            f"{row['peak_after_seconds']:.0f} |"
        )
    return "\n".join(lines)


def run(config):
    """Make the folder, measure, write."""
    check_replaced(config.output)
    machine = describe_machine(("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy"))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(config.work_dir or temporary).absolute()
        if folder.is_dir() and any(folder.iterdir()):
            raise ValueError(f"work_dir={folder} is not empty; name a new folder")
        folder.mkdir(parents=True, exist_ok=True)
        figures = bench(folder, config.quick)
    report(format_table(figures), config.output, machine=machine, figures=figures)


def report(table, output, **results):
    """Write results, with the command that gives them, to a JSON file and print their table."""
    write_json({"command": this_command()} | results, output)
    print(f"\n{table}\n\nwrote {output}")


def command_line(config_class, description, run, args=None):
    """What every benchmark's main does: read the flags, run; mistakes end in one line."""
    config = tyro.cli(config_class, description=description, args=args, use_underscores=True)
    try:
        if hasattr(config, "output"):
            check_output(config.output)
        run(config)
    except KeyboardInterrupt:
        print("interrupted; only what is in the output file already is kept", file=sys.stderr)
        sys.exit(130)
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


def main(args=None):
    """Command line."""
    command_line(Config, __doc__, run, args)


if __name__ == "__main__":
    main()
