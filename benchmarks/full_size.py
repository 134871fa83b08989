"""Full-size models on one machine: time and memory of command lines, and starts of SDXL scripts.

    python -m benchmarks.full_size commands

writes a pipeline of Stable Diffusion 1.5's shapes with random float32 weights and a shard of
images, then runs the user's command lines, each in its own process: widen the UNet; train it at 256
pixels with batch 1 and an EMA from the first step until the checkpoint of step 1 exists, then kill
the process (SIGKILL); run the same command again, which resumes; edit an image. Tiny, in a minute:

    python -m benchmarks.full_size commands --tiny --output full_size.json

Needs 20 GB of memory and 30 GB of disk; a quarter of an hour on two cores.

    python -m benchmarks.full_size commands --family sdxl

does the same with SDXL's shapes: widen the UNet; one training step of a LoRA at 512 pixels, which
also writes the merged pipeline; edit an image with it. Needs 23 GB of memory, 45 GB of disk and a
quarter of an hour on two cores.

    python -m benchmarks.full_size starts

starts sdxl_single.py without a cache and with jax's persistent cache, and sdxl_single_aot.py
without and with its executable on disk, each in its own process and twice, for one image of one
step. The UNet has Stable Diffusion 1.5's size (860M parameters, 256 pixels). Tiny: --tiny.
Needs 16 GB of memory; three minutes on two otherwise idle cores.

    python -m benchmarks.full_size serving

makes a thousand images with a tiny SDXL model by sdxl_single.py on four CPU devices: the share of
time in which the devices wait, by its own log; then the same command, killed several times and
started again, and which files were written twice; ten minutes.

Rows go to benchmarks/results/full_size.json.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax
import numpy as np
from PIL import Image

from benchmarks.data import PHOTOGRAPHS, make_shards
from benchmarks.harness import in_new_process
from benchmarks.random_models import (
    END_OF_TEXT,
    TEXT_ENCODER,
    TINY_UNET,
    TINY_VAE,
    UNET,
    VAE,
    make_pipeline,
    make_xl_pipeline,
    write_xl_pipeline,
)
from benchmarks.rows import (
    GIB,
    ROOT,
    check_counts,
    describe_machine,
    run_benchmark,
    write_rows,
)
from demo.photographs import load_photographs
from diffusers_flax.models.clip import FlaxCLIPTextModelWithProjectionModule

POLL_SECONDS = 0.05
NUM_DEVICES = 4  # of `serving`


@dataclass(frozen=True)
class CommandFlags:
    """Time and peak memory of the command lines."""

    family: Literal["sd15", "sdxl"] = "sd15"
    work_dir: str = ""  # a new directory for models and checkpoints; "": a temporary one, removed
    tiny: bool = False  # tiny models and images of 64 pixels, to try this
    output: str = "benchmarks/results/full_size.json"


def make_files(folder, family, tiny):
    """Write a pipeline (base), data for the trainer (data) and an image to edit (image.png)."""
    if family == "sdxl":
        make_xl_pipeline(folder / "base", tiny)
    else:
        make_pipeline(folder / "base", tiny)
    make_shards(folder / "data", num_shards=1, rows_per_shard=8)
    load_photographs(PHOTOGRAPHS[:1])[0].save(folder / "image.png")


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
        (figures: "command", "seconds", "peak_gib" and "peak_after_seconds", the time of the peak;
        its stdout).

    Raises:
        ChildProcessError: it failed, or ended before kill_when was true.
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
            "when memory is short: close other programs, or try --tiny"
        )
    figures = {
        "command_line": command,
        "seconds": seconds,
        "peak_gib": peak / GIB,
        "peak_after_seconds": peak_after,
    }
    return figures, output


def bench_commands(folder, family, tiny):
    """Make the inputs in a directory, run the commands.

    Returns:
        {name of the command: figures of run_command}.
    """
    in_new_process(make_files, folder, family, tiny)
    widen = ["create_modified_unet.py", "--pretrained_model_name_or_path", f"{folder}/base"]
    widen += ["--output_dir", f"{folder}/wide"]
    figures = {"widen": run_command(widen)[0]}
    model = folder / "model"
    train = ["flax_train_instruct_pix2pix.py", "--pretrained_model_name_or_path", f"{folder}/base"]
    train += ["--unet_model_name_or_path", f"{folder}/wide", "--train_data_dir", f"{folder}/data"]
    train += ["--train_batch_size", "1", "--output_dir", str(model)]
    train += ["--compilation_cache_dir", f"{folder}/cache"]
    if family == "sdxl":
        resolution = "64" if tiny else "512"
        train += ["--lora_rank", "16", "--merge_lora", "--max_train_steps", "1", "--ema", "none"]
        # In bfloat16 XLA's program for a CPU converts the weights to float32 and keeps them.
        train += ["--checkpointing_steps", "0", "--mixed_precision", "no"]
        train += ["--gradient_checkpointing"]
        figures["train a LoRA"], _ = run_command([*train, "--resolution", resolution])
    else:
        resolution = "64" if tiny else "256"
        train += ["--resolution", resolution]
        figures |= train_killed_and_resumed(train, model, tiny)
    losses = [json.loads(row)["loss"] for row in (model / "metrics.jsonl").read_text().splitlines()]
    if not np.isfinite(losses).all():
        raise ChildProcessError(f"losses {losses} are not all finite")
    list(figures.values())[-1]["loss"] = losses[-1]

    edit = ["edit_cli.py", "--model", str(model), "--input", f"{folder}/image.png"]
    edit += ["--edit", "invert the colors", "--output", f"{folder}/edited.png"]
    edit += ["--resolution", resolution, "--num_inference_steps", "2"]
    figures["edit"], _ = run_command(edit)
    return figures


def train_killed_and_resumed(train, model, tiny):
    """Run a training command until its first checkpoint, kill it, and run it again.

    Args:
        train: arguments of Python.
        model: Path, the output directory.
        tiny: the model is tiny.

    Returns:
        {name of the command: figures of run_command}.
    """
    checkpoints = model / "checkpoints"
    num_steps = "5" if tiny else "2"  # tiny ones may be over before a checkpoint is noticed
    train = [*train, "--max_train_steps", num_steps, "--ema", "full", "--ema_decay", "0.9999"]
    train += ["--checkpointing_steps", "1", "--checkpoints_total_limit", "1"]

    def saved():
        return any(path.name.isdecimal() for path in checkpoints.glob("*"))

    killed, _ = run_command(train, kill_when=saved)
    resumed, output = run_command(train)
    if "resuming after step" not in output:
        raise ChildProcessError("the trainer did not resume from the checkpoint")
    resumed["checkpoint_gib"] = (
        sum(file.stat().st_size for file in checkpoints.rglob("*") if file.is_file()) / GIB
    )
    return {"train, killed": killed, "train, resumed": resumed}


def run_commands(config):
    """Make the directory, measure, write."""
    machine = describe_machine(("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy"))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(config.work_dir or temporary).absolute()
        if any(folder.glob("[!.]*")):
            raise ValueError(f"--work_dir {folder} is not empty; name a new directory")
        folder.mkdir(parents=True, exist_ok=True)
        figures = bench_commands(folder, config.family, config.tiny)
    kind = "command" if config.family == "sd15" else "sdxl_command"
    rows = {f"{kind} {name}": row for name, row in figures.items()}
    write_rows(rows, machine, config.output)


SECONDS = re.compile(r"^(?:compiled|loaded).* in ([\d.]+) s$", re.MULTILINE)


@dataclass(frozen=True)
class StartFlags:
    """Starts of the SDXL scripts to the first image."""

    tiny: bool = False  # a tiny UNet, to try this
    rounds: int = 1  # starts of each kind
    output: str = "benchmarks/results/full_size.json"


def make_xl_model(folder, tiny):
    """Write a pipeline of SDXL's kind: a UNet of Stable Diffusion 1.5's size, or tiny; tiny others.

    Call it in a new process, which frees the memory.
    """
    jax.config.update("jax_platforms", "cpu")
    text_encoder = TEXT_ENCODER.clone(
        vocab_size=END_OF_TEXT + 1,
        hidden_size=384,
        intermediate_size=384,
        num_attention_heads=6,
        num_hidden_layers=2,
    )
    options = {name: getattr(text_encoder, name) for name in text_encoder.config}
    options |= {"projection_dim": 384, "hidden_act": "gelu"}
    unet = UNET.clone(
        sample_size=32,
        addition_embed_type="text_time",
        addition_time_embed_dim=256,
        projection_class_embeddings_input_dim=384 + 6 * 256,
    )
    if tiny:
        unet = unet.clone(sample_size=8, **TINY_UNET)
    modules = {
        "unet": unet,
        "vae": VAE.clone(scaling_factor=0.13025, **TINY_VAE),
        "text_encoder": text_encoder,
        "text_encoder_2": FlaxCLIPTextModelWithProjectionModule(**options),
    }
    write_xl_pipeline(folder, modules)


def time_start(script, folder, *options):
    """Run a script for one image.

    Returns:
        {"seconds": from start to end of the process, "compile_seconds": the seconds of compiling
        or loading that the script prints, or None}.
    """
    output = folder / "image.png"
    output.unlink(missing_ok=True)
    command = [sys.executable, script, "--pretrained_model_name_or_path", str(folder / "model")]
    command += ["--prompt", "a photograph", "--num_images", "1", "--num_inference_steps", "1"]
    environment = os.environ | {"JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu")}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    started = time.perf_counter()
    done = subprocess.run(
        [*command, "--output", str(output), *options],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    seconds = time.perf_counter() - started
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"it ended with code {done.returncode}"]
        raise ChildProcessError(f"{script} failed: {said[-1]}")
    told = SECONDS.search(done.stderr)
    return {"seconds": seconds, "compile_seconds": float(told[1]) if told else None}


def bench_starts(folder, tiny, rounds):
    """All starts.

    Returns:
        {name of the start: [figures of start, one per round]}.
    """
    in_new_process(make_xl_model, folder / "model", tiny)
    cache, kept = folder / "cache", folder / "kept"
    figures = {}
    for _ in range(rounds):
        for place in (cache, kept):
            shutil.rmtree(place, ignore_errors=True)
        for name, script, *options in (
            ("jit, no cache", "sdxl_single.py", "--compilation_cache_dir", ""),
            ("jit, first start", "sdxl_single.py", "--compilation_cache_dir", str(cache)),
            ("jit, persistent cache", "sdxl_single.py", "--compilation_cache_dir", str(cache)),
            ("AOT, first start", "sdxl_single_aot.py", "--executable_dir", str(kept)),
            ("AOT, executable kept", "sdxl_single_aot.py", "--executable_dir", str(kept)),
        ):
            row = time_start(script, folder, *options)
            print(f"{name}: {row['seconds']:.1f} s", flush=True)
            figures.setdefault(name, []).append(row)
    return figures


def run_starts(config):
    """Make the model, measure, write."""
    check_counts(config, rounds=1)
    machine = describe_machine(("jax", "jaxlib", "flax", "numpy"))
    with tempfile.TemporaryDirectory() as temporary:
        figures = bench_starts(Path(temporary), config.tiny, config.rounds)
    size = "tiny" if config.tiny else "sd15"
    rows = {f"start {size} {name}": {"starts": starts} for name, starts in figures.items()}
    write_rows(rows, machine, config.output)


@dataclass(frozen=True)
class ServingFlags:
    """A long list of prompts by sdxl_single.py, with a tiny model on CPU devices."""

    num_prompts: int = 1000
    num_inference_steps: int = 25
    kills: int = 4  # of the second run
    output: str = "benchmarks/results/full_size.json"


def serve(folder, config, output, most=None):
    """Start sdxl_single.py with the prompts of folder; kill it once output has `most` images.

    Returns:
        What it has printed on stderr.
    """
    command = [sys.executable, "sdxl_single.py", "--output", str(output), "--height", "64"]
    command += ["--width", "64", "--num_inference_steps", str(config.num_inference_steps)]
    command += ["--prompts_file", str(folder / "prompts.txt")]
    command += ["--pretrained_model_name_or_path", str(folder / "model")]
    command += ["--compilation_cache_dir", str(folder / "cache")]
    flags = f"--xla_force_host_platform_device_count={NUM_DEVICES}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    with tempfile.TemporaryFile("w+") as said:
        files = {"stdout": subprocess.DEVNULL, "stderr": said}
        process = subprocess.Popen(command, cwd=ROOT, env=environment, **files)
        try:
            while process.poll() is None and (most is None or len(images_in(output)) < most):
                time.sleep(POLL_SECONDS)
        finally:
            process.kill()
        killed = process.wait() == -signal.SIGKILL
        said.seek(0)
        text = said.read()
    if killed != (most is not None) or (process.returncode and not killed):
        raise ChildProcessError(f"sdxl_single.py failed or was too fast: {text.strip()[-200:]}")
    return text


def images_in(folder):
    """{name: its stat} of the images of sdxl_single.py in a directory."""
    return {file.name: file.stat() for file in folder.glob("*.png") if file.stem.isdecimal()}


def run_serving(config):
    """Make the images in one run, and in several killed runs; write the rows."""
    machine = describe_machine(("jax", "jaxlib", "flax", "numpy"))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        in_new_process(make_xl_model, folder / "model", True)
        prompts = (f"a photograph, number {i}" for i in range(config.num_prompts))
        (folder / "prompts.txt").write_text("\n".join(prompts))
        said = serve(folder, config, folder / "whole")
        seconds, waited = re.search(r"in (\S+) s after .* waited (\S+)%", said).groups()
        finished, states, written_twice = [], {}, 0
        for kill in range(1, config.kills + 2):
            most = config.num_prompts * kill // (config.kills + 1)
            serve(folder, config, folder / "killed", most if kill <= config.kills else None)
            found = images_in(folder / "killed")
            written_twice += sum(
                (found[name].st_ino, found[name].st_mtime_ns) != (old.st_ino, old.st_mtime_ns)
                for name, old in states.items()
            )
            states = found
            finished.append(len(found))
        different = sum(
            np.any(np.asarray(Image.open(file)) != np.asarray(Image.open(other)))
            for file, other in zip(*(sorted((folder / x).iterdir()) for x in ("whole", "killed")))
        )
    row = {
        "images": config.num_prompts,
        "devices": NUM_DEVICES,
        "seconds": float(seconds),
        "devices_waited_percent": float(waited),
        "files_after_each_kill": finished,
        "files_written_twice": written_twice,
        "images_that_differ": int(different),
    }
    write_rows({"serving": row}, machine, config.output)


SUBCOMMANDS = {"commands": CommandFlags, "starts": StartFlags, "serving": ServingFlags}
RUN = {CommandFlags: run_commands, StartFlags: run_starts, ServingFlags: run_serving}


def main(args=None):
    """Command line."""
    run_benchmark(SUBCOMMANDS, lambda config: RUN[type(config)](config), __doc__, args)


if __name__ == "__main__":
    main()
