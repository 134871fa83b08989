"""The README's commands end to end: plan, download on two workers, describe, train."""

import io
import json
import os
import shlex
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from helpers import ROOT
from hub_server import Hub
from PIL import Image
from tiny_models import make_tiny_pipeline

DATASET = "someone/pairs"
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def shard(number, num_rows):
    """A shard in the public dataset's schema, as bytes; the prompt is the row's number."""
    rng = np.random.default_rng(number)

    def images():
        cells = []
        for _ in range(num_rows):
            file = io.BytesIO()
            Image.fromarray(rng.integers(0, 256, (20, 20, 3), np.uint8)).save(file, "JPEG")
            cells.append({"bytes": file.getvalue(), "path": None})
        return pa.array(cells, IMAGE)

    prompts = [f"row {row} of {number}" for row in range(num_rows)]
    file = io.BytesIO()
    pq.write_table(
        pa.table({"original_image": images(), "edit_prompt": prompts, "edited_image": images()}),
        file,
    )
    return file.getvalue()


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
    files = {f"data/train-{k:05d}-of-00005.parquet": shard(k, 4 + k) for k in range(5)}
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

    # Each worker has what the manifest, the same on both, says; together everything.
    manifests = [(folder / "plan" / "manifest.json").read_text() for folder in workers]
    assert manifests[0] == manifests[1]
    here = [{path.name for path in (folder / "data").glob("*.parquet")} for folder in workers]
    planned = json.loads(manifests[0])["files"]
    assert here == [{file["file"] for file in planned if file["worker"] == k} for k in range(2)]
    assert sorted(here[0] | here[1]) == [name.replace("/", "-") for name in sorted(files)]
    for folder, names in zip(workers, here):
        for name in names:
            content = files[name.replace("data-", "data/", 1)]
            assert (folder / "data" / name).read_bytes() == content

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
