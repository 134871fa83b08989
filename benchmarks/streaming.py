"""The demo's training from a slow server that fails, against the same files on disk.

    python -m benchmarks.streaming

trains the demo's model on its pairs, and on their latents as the demo does: from local files; from
a server on this machine that answers after 50 ms and fails 1% of the requests; and from the server
with SIGKILL in the middle and the same command again. The weights and losses of all three must be
equal, bit for bit. Each row has the fraction of the time that training waits for batches, as in
metrics.jsonl. The demo's set is so small that it is kept in memory after the first epoch; in the
case "large" a quarter of the latents is kept and shuffled, as of a set of 2 GB with the defaults.
A quarter of an hour on two idle cores; in two minutes:

    python -m benchmarks.streaming --num_pairs 400 --max_train_steps 75 --output streaming.json

Rows go to benchmarks/results/streaming.json.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from benchmarks.rows import ROOT, check_counts, describe_machine, run_benchmark, write_rows
from diffusers_flax.data.shards import shard_files

sys.path.append(str(ROOT / "tests"))

MAKE_DATA = (
    "demo/make_dataset.py --output_dir {folder} --num_pairs {num_pairs} --crops_per_photograph 1",
    "create_modified_unet.py --pretrained_model_name_or_path demo/base_model"
    " --output_dir {folder}/unet",
    "cache_latents.py --pretrained_model_name_or_path demo/base_model --resolution 64"
    " --train_data_dir {folder}/data --output_dir {folder}/latents",
)
TRAINER = """
import sys
from diffusers_flax.data import streaming
streaming.CACHE_BYTES = min(streaming.CACHE_BYTES, {kept})
streaming.READ_AHEAD_BYTES = min(streaming.READ_AHEAD_BYTES, {kept} // 4)
import flax_train_instruct_pix2pix
flax_train_instruct_pix2pix.main(sys.argv[1:])
"""


class Case(NamedTuple):
    """What the trainer reads."""

    data: str  # directory of the shards
    share: float  # of the set that is kept in memory and shuffled


CASES = {
    "images": Case("data", 1),
    "latents": Case("latents", 1),
    "large": Case("latents", 0.25),  # of latents
}


@dataclass(frozen=True)
class Config:
    cases: tuple[Literal["images", "latents", "large"], ...] = ("images", "latents", "large")
    num_pairs: int = 1600  # of the demo's data; an epoch has 200 steps
    max_train_steps: int = 330
    latency: float = 0.05  # seconds before each answer
    failure_rate: float = 0.01  # of the answers
    output: str = "benchmarks/results/streaming.json"


def train(config, folder, source, output_dir, case):
    """Start the trainer with the demo's flags; returns the process."""
    flags = {
        "pretrained_model_name_or_path": "demo/base_model",
        "unet_model_name_or_path": folder / "unet",
        "train_data_dir": source,
        "output_dir": output_dir,
        "resolution": 64,
        "train_batch_size": 8,
        "max_train_steps": config.max_train_steps,
        "learning_rate": 3e-3,
        "lr_warmup_steps": 50,
        "lr_scheduler": "cosine",
        "checkpointing_steps": config.max_train_steps // 3,
        "logging_steps": config.max_train_steps // 15,
        "shuffle_buffer": int(case.share * 4096),
    }
    kept = case.share * sum(file.stat().st_size for file in shard_files(folder / case.data))
    command = [sys.executable, "-c", TRAINER.format(kept=int(kept))]
    command += ["--no_random_crop"] * (case.data == "latents")
    command += [f"--{name}={value}" for name, value in flags.items()]
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "2", "HF_HUB_OFFLINE": "0"}
    return subprocess.Popen(command, cwd=ROOT, env=environment)


def finish(process):
    """Wait for a process; a ChildProcessError if it fails."""
    if process.wait():
        raise ChildProcessError("a program failed; it says why above")


def kill_after_checkpoint(process, checkpoint):
    """Send SIGKILL some steps after a checkpoint is complete."""
    while not checkpoint.is_dir():
        if process.poll() is not None:
            raise ChildProcessError("the training ended before it was killed; see above")
        time.sleep(0.1)
    time.sleep(2)
    process.kill()
    process.wait()


def describe_run(output_dir):
    """What a run waits for, and what it computes: (dict, weights and losses)."""
    rows = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    timed = [row for row in rows if row["data_wait"] is not None]
    weights = [1 / row["pairs_per_second"] for row in timed]  # seconds for equally many pairs
    waited = sum(row["data_wait"] * weight for row, weight in zip(timed, weights))
    described = {
        "data_wait": waited / sum(weights),
        "data_wait_highest": max(row["data_wait"] for row in timed),
        "pairs_per_second": len(weights) / sum(weights),
    }
    files = sorted((output_dir / "unet").glob("*.safetensors"))
    return described, ([file.read_bytes() for file in files], [row["loss"] for row in rows])


def measure(config, folder, name):
    """Rows of one of CASES, {case: dict}."""
    from flaky_server import FlakyServer

    case, runs, rows = CASES[name], folder / f"runs of {name}", {}
    files = {file.name: file.read_bytes() for file in shard_files(folder / case.data)}
    finish(train(config, folder, folder / case.data, runs / "local", case))
    rows["local"], expected = describe_run(runs / "local")
    for way in ("streamed", "streamed, killed"):
        options = {"latency": config.latency, "failure_rate": config.failure_rate}
        with FlakyServer(files, **options) as server:
            arguments = (config, folder, server.url(""), runs / way, case)
            if way != "streamed":
                checkpoint = runs / way / "checkpoints" / str(config.max_train_steps // 3)
                kill_after_checkpoint(train(*arguments), checkpoint)
            finish(train(*arguments))
            rows[way], computed = describe_run(runs / way)
            rows[way] |= {
                "is_bit_identical": computed == expected,
                "requests": len(server.requests),
                "failed_requests": server.num_failed,
                "fetched_bytes": server.sent.total(),
            }
    about = {"bytes": sum(map(len, files.values())), "pairs": config.num_pairs}
    about |= {"steps": config.max_train_steps, "share": case.share} | options
    return {f"{name}: {way}": row | about for way, row in rows.items()}


def run(config):
    """Make the demo's data and latents, train, write."""
    check_counts(config, num_pairs=64, max_train_steps=30, latency=0, failure_rate=0)
    machine = describe_machine()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for command in MAKE_DATA:
            words = command.format(folder=folder, num_pairs=config.num_pairs).split()
            finish(subprocess.Popen([sys.executable, *words], cwd=ROOT))
        for name in config.cases:
            write_rows(measure(config, folder, name), machine, config.output)


def main(args=None):
    """Command line."""
    run_benchmark(Config, run, __doc__, args)


if __name__ == "__main__":
    main()
