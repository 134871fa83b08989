"""benchmarks/pairs with few pairs of the demo's model."""

import json
import shutil

import pyarrow.parquet as pq
import pytest
from helpers import ROOT
from tiny_models import make_tiny_clip

from benchmarks.pairs import cases as pairs
from benchmarks.tables import speed


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """With models; measurements are of one pass."""
    make_tiny_clip(tmp_path / "clip")
    (tmp_path / "model").symlink_to(ROOT / "demo/base_model")
    mean_seconds = pairs.mean_seconds
    monkeypatch.setattr(pairs, "mean_seconds", lambda call, seconds: mean_seconds(call, 0))
    monkeypatch.setattr(pairs, "TIMED_LINES", 2)
    monkeypatch.setattr(pairs, "FIRST_LINES", 2)
    return tmp_path


def test_rows_and_their_table(folder, monkeypatch):
    config = pairs.Config(num_samples=5, num_inference_steps=1, num_lines=3)
    time = pairs.measure_time(folder, config)
    assert (time["samples"], time["batches"]) == (10, 3)
    assert min(sum(x.values()) for x in time["seconds_alone"].values()) > 0
    assert 0 < time["seconds_of_programs"] < time["seconds"]
    share = time["share_outside"]
    assert 0 < share < 1
    monkeypatch.setattr(pairs, "HOST_SAMPLES", 5)
    shutil.rmtree(folder / "data")
    host = pairs.measure_host(folder, config)
    assert 0.001 < host["cpu_seconds_per_pair"] < 10
    (shard,) = (folder / "data").glob("*.parquet")
    rows = pq.read_table(shard).to_pylist()
    assert len(rows) == 5 and len(rows[0]["edited_image"]["bytes"]) > 10_000
    shutil.rmtree(folder / "data")
    memory = pairs.measure_memory(folder, config)
    assert memory["samples"] == 12
    assert 50e6 < memory["bytes_first"] <= memory["bytes_most"] >= memory["bytes_last"]
    rows = {"time": time, "host": host, "memory": memory}
    monkeypatch.setattr(speed, "results", lambda name: {"pairs": rows}[name])
    table = speed.pairs_table()
    assert f"| outside of the compiled programs | {share:.2%} |" in table
    assert f"| after all | {memory['bytes_last'] / 1e6:.0f} MB |" in table
    assert json.loads(json.dumps(rows)) == rows
