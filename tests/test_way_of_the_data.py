"""The README's commands end to end: plan, download on two workers, describe, train."""

import json
import os
import shlex
import subprocess
import sys

import numpy as np
from helpers import ROOT
from hub_server import Hub
from shards import write_random_shard
from tiny_models import make_tiny_pipeline

DATASET = "someone/pairs"


def start(*command, cwd, **env):
    env = {key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"} | env
    return subprocess.Popen(
        command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(processes):
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), outputs
    return outputs


def test_plan_download_describe_train(tmp_path):
    workers = [tmp_path / "worker0", tmp_path / "worker1"]
    files = {}
    for k in range(5):
        write_random_shard(tmp_path / "shard", 4 + k, k)
        files[f"data/train-{k:05d}-of-00005.parquet"] = (tmp_path / "shard").read_bytes()
    with Hub() as hub:
        hub.add(DATASET, files)
        slice_env = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": ""}
        slice_env["TPU_WORKER_HOSTNAMES"] = "host-a,host-b"
        envs = [slice_env | {"TPU_WORKER_ID": str(k)} for k in range(2)]
        for folder in workers:
            folder.mkdir()
        script = [sys.executable, ROOT / "script.py", "--dataset", DATASET]
        finish([start(*script, cwd=cwd, **env) for cwd, env in zip(workers, envs)])
        script = ["bash", ROOT / "script.sh"]
        outputs = finish([start(*script, cwd=cwd, **env) for cwd, env in zip(workers, envs)])
        for k, output in enumerate(outputs):
            assert all(f"worker {k}]" in line for line in output.splitlines())

    # Together the workers have everything.
    here = [{path.name for path in (folder / "data").glob("*.parquet")} for folder in workers]
    assert all(here) and not here[0] & here[1]
    for folder, names in zip(workers, here):
        for name in names:
            content = files[name.replace("data-", "data/", 1)]
            assert (folder / "data" / name).read_bytes() == content
    assert len(here[0] | here[1]) == len(files)

    describe = [sys.executable, ROOT / "parquet_processing.py", "--train_data_dir", "data"]
    (output,) = finish([start(*describe, cwd=workers[0])])
    assert f"shards      {len(here[0])}," in output and "unreadable  0 of" in output

    model = make_tiny_pipeline(tmp_path / "model", in_channels=4)
    widen = [sys.executable, ROOT / "create_modified_unet.py", "--output_dir", "modified_unet"]
    base = ["--pretrained_model_name_or_path", str(model)]
    finish([start(*widen, *base, cwd=workers[0])])
    train = [sys.executable, ROOT / "flax_train_instruct_pix2pix.py", *base]
    flags = (
        "--unet_model_name_or_path modified_unet --train_data_dir data --output_dir out"
        " --resolution 16 --train_batch_size 4 --max_train_steps 3"
    )
    finish([start(*train, *shlex.split(flags), cwd=workers[0])])
    metrics = (workers[0] / "out" / "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in metrics.splitlines()]
    assert rows[-1]["step"] == 3 and np.isfinite(rows[-1]["loss"])
    assert (workers[0] / "out" / "model_index.json").exists()
