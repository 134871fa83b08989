"""Streamed shards against the same files on disk: batches, requests, failures, resuming."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from types import SimpleNamespace

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from flaky_server import Fault, FlakyServer
from helpers import files_of, wait_for
from hub_server import Hub
from huggingface_hub import constants
from shards import (
    EDITED,
    ORIGINAL,
    on_processes,
    open_mixture,
    open_pairs,
    prompts_of,
    same,
    write_numbered,
    write_random_shard,
)
from trainer_runs import config_of, flags_of, read_metrics

import cache_latents
import flax_train_instruct_pix2pix as trainer
import parquet_processing
from diffusers_flax.data import streaming

DATASET = "owner/pairs"


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    """53 rows in three shards of different length, with at most 8 rows per row group."""
    return write_numbered(tmp_path_factory.mktemp("numbered"), [30, 4, 19])


@pytest.fixture(autouse=True)
def no_cache(monkeypatch):
    """Pieces are not kept, and requests are allowed and repeated at once."""
    monkeypatch.setattr(streaming, "CACHE_BYTES", 0)
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
        resumed.load_state_dict({**state, "versions": {}} if "other" in source else state)
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
    monkeypatch.setattr(streaming, "MAX_GAP_BYTES", 1000)
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


def test_processes_fetch_only_their_row_groups(tmp_path):
    write_numbered(tmp_path, [64, 64])
    sent, batches = [], []
    for count in (1, 2):
        for index in range(count):
            with FlakyServer(contents(tmp_path), redirect=False) as server:
                pairs = open_pairs(
                    server.url(""),
                    **dict(batch_size=16 // count, resolution=8, num_parts=2, shuffle_buffer=16),
                    **dict(process_index=index, process_count=count),
                )
                before = server.sent.total()
                batches.append(prompts_of(pairs))
                sent.append(server.sent.total() - before)
    together, *alone = batches
    rows = [np.reshape(prompts, (8, 8)) for prompts in alone]
    assert np.hstack(rows).ravel().tolist() == together
    assert max(sent[1:]) < 0.65 * sent[0]


def test_hosts_agree_on_streamed_shards(numbered):
    url = in_memory(numbered, "shared")

    def make(index, all_gather):
        return open_pairs(
            url, batch_size=4, process_index=index, process_count=2, all_gather=all_gather
        )

    first, second = on_processes(make, 2)
    assert first.directories == second.directories and len(first.directories) == 1
    assert first.state_dict() == second.state_dict()


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


def test_changed_shards_are_refused_by_name(numbered, hub):
    files = contents(numbered)
    hub.add(DATASET, files)
    url = f"hf://datasets/{DATASET}"
    state = open_pairs(url, batch_size=6).state_dict()
    other = bytearray(files["shard-1.parquet"])
    other[10] ^= 1
    hub.add(DATASET, {"shard-1.parquet": bytes(other)})
    again = open_pairs(url, batch_size=6)
    with pytest.raises(ValueError, match=r"^cannot resume the data: the content of shard-1.parq"):
        again.load_state_dict(state)

    with FlakyServer(files, redirect=False) as server:
        pairs = open_pairs(server.url(""), batch_size=6, resolution=8)
        server.files["shard-1.parquet"] = bytes(other)
        with pytest.raises(ValueError, match=r"resolve/shard-1.parquet has changed while it was"):
            list(pairs)


def test_a_file_without_etag(monkeypatch):
    """Last-Modified counts."""
    old, new = (f"Sat, 28 Nov 2026 0{n}:00:00 GMT" for n in range(2))
    file = streaming.RemoteFile("http://h/a.parquet", "a.parquet", 9, old, streaming.fetch_http)
    good = {"content-range": "bytes 1-2/9", "last-modified": old}
    sent = []
    answer = lambda *args: SimpleNamespace(headers=sent.pop(0), content=b"ab")  # noqa: E731
    monkeypatch.setattr(streaming, "get", answer)
    sent.append(good)
    assert file.fetch(file, 1, 3) == b"ab"
    for changed in ({"last-modified": new}, {"content-range": "bytes 1-2/8"}):
        sent.append(good | changed)
        with pytest.raises(ValueError, match="has changed while it was read"):
            file.fetch(file, 1, 3)


def test_ctrl_c_does_not_wait_for_a_server_that_fails(numbered, monkeypatch):
    """Also while a batch is awaited; the same set goes on afterwards."""

    def interrupt(*args):
        raise KeyboardInterrupt

    with FlakyServer(contents(numbered), redirect=False) as server:
        pairs = open_pairs(server.url(""), batch_size=6, resolution=8)
        server.faults["shard-0.parquet"] = Fault(hub=[502] * 10_000)
        monkeypatch.setattr(streaming, "FIRST_PAUSE", 1)
        monkeypatch.setattr(streaming, "LAST_PAUSE", 60)
        handler, started = signal.signal(signal.SIGALRM, interrupt), time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, 1)
        try:
            with pytest.raises(KeyboardInterrupt):
                list(pairs)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, handler)
        assert time.monotonic() - started < 10
        server.faults.clear()
        pairs.set_epoch(0)
        assert len(list(pairs)) == len(pairs)


def test_errors_name_the_url_and_the_reason(numbered, hub, monkeypatch):
    def error_of(url):
        with pytest.raises(ValueError) as error:
            list(open_pairs(url, batch_size=6, resolution=8))
        assert "\n" not in str(error.value)
        return str(error.value)

    for url in ("hf://a/b", "hf://datasets/a", "hf://datasets"):
        assert f"{url} is no dataset on the hub; write hf://datasets/OWNER/NAME" in error_of(url)
    files = contents(numbered)
    with FlakyServer(files, redirect=False) as server:
        url = server.url("")
        pairs = open_pairs(url, batch_size=6, resolution=8)
        server.faults["shard-0.parquet"] = Fault(hub=[502] * 1000)
        with pytest.raises(ValueError, match=r"resolve/shard-0.parquet: HTTP 502; check the addr"):
            list(pairs)
        server.faults["shard-0.parquet"] = Fault(hub=[403] * 1000)
        with pytest.raises(ValueError, match=r"resolve/shard-0.parquet: HTTP 403; check the addr"):
            list(pairs)
        server.faults.clear()
        gone = server.files.pop("shard-0.parquet")
        with pytest.raises(ValueError, match=r"resolve/shard-0.parquet: HTTP 404; check the addr"):
            list(pairs)
        server.files["shard-0.parquet"] = gone[: len(gone) // 2]
        with pytest.raises(ValueError, match=r"resolve/shard-0.parquet has changed while it was"):
            list(pairs)
        server.files["shard-0.parquet"] = gone
        server.files["bad.parquet"] = b"no parquet"
        assert "bad.parquet is not a parquet file, or is damaged" in error_of(url)
        assert "HTTP 404; check the address" in error_of(server.url("missing.parquet"))
        server.files.clear()
        assert "contains no *.parquet file" in error_of(url)
    assert "RepoNotFound" in error_of("hf://datasets/owner/missing")
    assert "write hf://datasets/OWNER/NAME" in error_of("hf://datasets/missing")
    assert "pip install gcsfs" in error_of("gs://bucket/pairs")
    assert "Protocol not known" in error_of("nothing://bucket/pairs")
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


def test_pieces_are_kept_up_to_a_size(numbered, monkeypatch):
    monkeypatch.setattr(streaming, "CACHE_BYTES", 1 << 20)
    with FlakyServer(contents(numbered), redirect=False) as server:
        pairs = open_pairs(server.url(""), batch_size=6, resolution=8)
        first = list(pairs)
        sent = server.sent.total()
        second = list(pairs)
        assert server.sent.total() == sent  # the second epoch is in memory
    assert not np.array_equal(first[0][ORIGINAL], second[0][ORIGINAL])
    assert first[0][EDITED].shape == (6, 8, 8, 3)


@pytest.mark.slow
def test_latents_of_a_stream_are_those_of_local_files(model, data, tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "FIRST_PAUSE", 0.01)
    with FlakyServer(contents(data), latency=0.01, failure_rate=0.05) as server:
        for name, source in (("local", data), ("streamed", server.url(""))):
            flags = ["--pretrained_model_name_or_path", model, "--train_data_dir", source]
            flags += ["--output_dir", tmp_path / name, "--resolution", 16]
            cache_latents.main(list(map(str, flags)))
    assert contents(tmp_path / "local") == contents(tmp_path / "streamed") != {}


@pytest.mark.slow
def test_a_killed_run_resumes_from_a_failing_server(model, data, tmp_path):
    """SIGKILL after step 3, and the same command again; also a shard that changed meanwhile."""
    options = dict(max_train_steps=6, checkpointing_steps=2)
    environment = os.environ | {"HF_HUB_OFFLINE": "0"}
    with FlakyServer(contents(data), latency=0.05, failure_rate=0.1) as server:

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

        name, content = next(iter(server.files.items()))
        server.files[name] = content[:100] + bytes([content[100] ^ 1]) + content[101:]
        code, error = finish(start("out", server.url("")))
        assert code == 2 and error.startswith("error: checkpoint ")
        assert f"the content of {name} has changed" in error

        server.files[name] = content
        assert finish(start("out", server.url(""))) == (0, "")
    losses = [[row["loss"] for row in read_metrics(tmp_path / x)] for x in ("out", "local")]
    assert losses[0] == losses[1] and len(losses[0]) == 6
    assert files_of(tmp_path / "out" / "unet") == files_of(tmp_path / "local" / "unet")


@pytest.mark.slow
def test_a_second_ctrl_c_ends_a_run_whose_server_fails(model, data, tmp_path):
    flags = flags_of(config_of(model, "URL", tmp_path / "out", max_train_steps=6))
    with FlakyServer(contents(data), redirect=False) as server:
        command = [sys.executable, trainer.__file__, *flags]
        command = [server.url("") if word == "URL" else word for word in command]
        environment = os.environ | {"HF_HUB_OFFLINE": "0"}
        process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        wait_for(lambda: len(server.requests) > 2 * len(server.files), "the footers")
        for name in server.files:
            server.faults[name] = Fault(hub=[502] * 10_000)
        wait_for(lambda: [x[3] for x in server.requests].count(502) > 8, "an outage")
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            time.sleep(1)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 130 and "interrupted; " in errors
