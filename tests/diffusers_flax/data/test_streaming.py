"""Streamed shards against the same files on disk: batches, requests, failures, resuming."""

import json
import os
import random
import re
import signal
import subprocess
import sys
from collections import Counter

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from flaky_server import Fault, FlakyServer
from helpers import files_of, wait_for
from hub_server import Hub
from huggingface_hub import constants
from shards import (
    open_mixture,
    open_pairs,
    same,
    write_numbered,
    write_random_shard,
)
from trainer_runs import config_of, flags_of, read_metrics

import flax_train_instruct_pix2pix as trainer
import parquet_processing
from diffusers_flax.data import streaming

DATASET = "owner/pairs"


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    """53 rows in three shards of different length, with at most 8 rows per row group."""
    return write_numbered(tmp_path_factory.mktemp("numbered"), [30, 4, 19])


@pytest.fixture(autouse=True)
def network(monkeypatch):
    """Requests are allowed and repeated at once."""
    monkeypatch.setattr(streaming, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(streaming, "LAST_PAUSE", 0.001)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A stand-in for the hub."""
    with Hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        yield hub


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.parquet"))}


def in_memory(folder, name):
    """The URL of a copy of a folder's shards in fsspec's memory."""
    fs = fsspec.filesystem("memory")
    for file, content in contents(folder).items():
        fs.pipe(f"/{name}/{file}", content)
    fs.pipe(f"/{name}/._hidden.parquet", b"no shard")
    return f"memory://{name}"


def assert_same(found, expected):
    found, expected = list(found), list(expected)
    assert len(found) == len(expected) > 0
    assert all(map(same, found, expected))


def test_any_file_system_gives_the_batches_of_local_files_also_when_resumed(numbered):
    options = dict(batch_size=6, resolution=8, shuffle_buffer=16, seed=4)
    local = open_pairs(str(numbered), **options)
    streamed = open_pairs(in_memory(numbered, "numbered"), **options)
    for _ in range(2):
        assert_same(streamed, local)
    for _ in zip(range(3), streamed):
        pass
    state = json.loads(json.dumps(streamed.state_dict()))
    assert (state["epoch"], state["batch"]) == (2, 3)
    expected = list(local)[3:]
    for source in (in_memory(numbered, "other-numbered"), str(numbered)):
        resumed = open_pairs(source, **options)
        resumed.load_state_dict(state)
        assert_same(resumed, expected)


def test_a_mixture_of_a_stream_and_a_directory(numbered, tmp_path):
    write_random_shard(tmp_path / "a.parquet", 20, broken=[3])
    options = dict(weights=[1, 2], batch_size=5, resolution=8, shuffle_buffer=12)
    local = open_mixture([str(tmp_path), str(numbered)], **options)
    streamed = open_mixture([str(tmp_path), in_memory(numbered, "mixed")], **options)
    pairs = [batches for _, *batches in zip(range(20), streamed, local)]
    assert all(same(*batches) for batches in pairs)
    assert streamed.names[1] == "mixed" and streamed.num_bad == local.num_bad > 0


def test_a_failing_server_gives_the_same_batches_in_ranges_of_the_columns_in_use(
    tmp_path, monkeypatch
):
    rng = random.Random(0)
    write_numbered(tmp_path, [40])
    shard = tmp_path / "shard-0.parquet"
    table = pq.read_table(shard)
    junk = pa.array([rng.randbytes(30_000) for _ in range(len(table))])
    pq.write_table(table.add_column(1, "junk", junk), shard, row_group_size=8, compression="none")
    monkeypatch.setattr(streaming, "PIECE_BYTES", 500)
    fault = Fault(hub=[0, 500], cdn=[500, 0, 502], cuts=3, link_requests=7)
    options = dict(batch_size=8, resolution=8)
    with FlakyServer(contents(tmp_path), {shard.name: fault}) as server:
        streamed = open_pairs(server.url(""), **options)
        before = server.sent[shard.name]
        assert_same(streamed, open_pairs(str(tmp_path), **options))
        statuses = Counter(status for *_, status, _ in server.requests)
        assert fault.hub == fault.cdn == [] and fault.cuts == 0 and statuses[206] > 20
        assert server.sent[shard.name] - before < 60_000 < 8 * 30_000 * 5


def test_a_dataset_of_the_hub(numbered, hub, monkeypatch, tmp_path, capsys):
    """The shards and names of script.py's plan, at one commit, with the token only for the hub."""
    files = {f"data/train-{name}": content for name, content in contents(numbered).items()}
    hub.add(DATASET, files | {"data/test-0.parquet": b"no shard", "README.md": b"pairs"})
    hub.token = "hf_secret"
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.failures[f"/datasets/{DATASET}/resolve/"] = [(503, {}), (429, {})]
    for name, content in files.items():
        (tmp_path / name.replace("/", "-")).write_bytes(content)
    local = open_pairs(str(tmp_path), batch_size=6, resolution=8)
    streamed = open_pairs(f"hf://datasets/{DATASET}", batch_size=6, resolution=8)
    expected = list(local)
    hub.trees[DATASET, "main"] = {name: b"another push" for name in files}  # changes nothing
    assert_same(streamed, expected)
    assert streamed.state_dict()["data"] == local.state_dict()["data"]
    assert re.fullmatch(
        rf"streams 3 shards from {hub.endpoint}/datasets/{DATASET}/resolve/[0-9a-f]{{40}}/data",
        capsys.readouterr().out.splitlines()[-1],
    )
    tokens = {host: headers.get("authorization") for host, _, headers in hub.requests}
    assert tokens == {"127.0.0.1": "Bearer hf_secret", "localhost": None}

    # a directory of another revision
    hub.add(DATASET, {f"sub/{name}": content for name, content in files.items()}, "v2")
    of_folder = open_pairs(f"hf://datasets/{DATASET}@v2/sub", batch_size=6, resolution=8)
    assert_same(of_folder, expected)


def test_errors_name_the_url_and_the_reason(numbered, hub):
    def error_of(url):
        with pytest.raises(ValueError) as error:
            list(open_pairs(url, batch_size=6, resolution=8))
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "write hf://datasets/OWNER/NAME" in error_of("hf://datasets/a")
    files = contents(numbered)
    with FlakyServer(files, redirect=False) as server:
        pairs = open_pairs(server.url(""), batch_size=6, resolution=8)
        for status in (502, 403):
            server.faults["shard-0.parquet"] = Fault(hub=[status] * 1000)
            with pytest.raises(ValueError, match=rf"shard-0.parquet: .*HTTP {status}"):
                list(pairs)
        server.faults.clear()
        server.files["bad.parquet"] = b"no parquet"
        assert "bad.parquet is not a parquet file" in error_of(server.url(""))
        server.files.clear()
        assert "contains no *.parquet file" in error_of(server.url(""))
    assert "owner/missing: " in error_of("hf://datasets/owner/missing")
    assert "gcsfs" in error_of("gs://bucket/pairs")
    assert "check the address" in error_of("memory://missing")
    with pytest.raises(ValueError, match="--aspect_ratio_buckets reads all images"):
        open_pairs(in_memory(numbered, "sizes"), batch_size=2, sizes=((8, 8), (16, 8)))


def test_parquet_processing_describes_a_stream(numbered, tmp_path, capsys):
    url, preview = in_memory(numbered, "described"), tmp_path / "preview.png"
    said = []
    for source in (url, numbered):
        parquet_processing.main([f"--train_data_dir={source}", f"--preview={preview}"])
        said.append(capsys.readouterr().out)
    assert (
        said[0] == f"streams 3 shards from memory:///described\n{said[1]}"
        and "rows        53" in said[1]
    )


@pytest.mark.slow
def test_a_killed_run_resumes_from_a_failing_server(model, data, tmp_path):
    """SIGKILL after step 3, and the same command again."""
    options = dict(max_train_steps=6, checkpointing_steps=2)
    environment = os.environ | {"HF_HUB_OFFLINE": "0"}
    faults = {name: Fault(hub=[0, 500], cdn=[503], cuts=2) for name in contents(data)}
    with FlakyServer(contents(data), faults) as server:

        def finish(process):
            lines = process.communicate()[1].splitlines()
            errors = [line for line in lines if line.startswith("error: ")]
            return process.returncode, "".join(errors)

        def start(name, source):
            flags = flags_of(config_of(model, source, tmp_path / name, **options))
            command = [sys.executable, trainer.__file__, *flags]
            return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)

        assert finish(start("local", data)) == (0, "")
        process, metrics = start("out", server.url("")), tmp_path / "out" / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and '"step": 3,' in metrics.read_text(), "step 3")
        process.kill()
        assert finish(process)[0] == -signal.SIGKILL

        assert finish(start("out", server.url(""))) == (0, "")
    losses = [[row["loss"] for row in read_metrics(tmp_path / x)] for x in ("out", "local")]
    assert losses[0] == losses[1] and len(losses[0]) == 6
    assert files_of(tmp_path / "out" / "unet") == files_of(tmp_path / "local" / "unet")
