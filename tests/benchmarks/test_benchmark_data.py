"""benchmarks/data.py on tiny shards: files, pixels of all methods, summaries."""

import contextlib
import json
import subprocess
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest
from helpers import ROOT

from benchmarks import data as data_benchmark
from benchmarks.data import (
    BATCH_SIZE,
    COLUMNS,
    PIXELS,
    RESOLUTION,
    SCHEMA,
    ceiling,
    hugging_face,
    link_shards,
    make_shards,
    measure_stream,
    ours,
    read_pairs,
    summarize_rounds,
    torch_rows,
)
from benchmarks.rows import rows_of
from diffusers_flax.data.decoding import decode_pair

NUM_ROWS = 2 * BATCH_SIZE
# The workers of torch's DataLoader are forked, and compute nothing with JAX.
pytestmark = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")


@pytest.fixture(scope="module")
def shards_dir(tmp_path_factory):
    """Two shards of a batch each."""
    folder = tmp_path_factory.mktemp("bench") / "shards"
    make_shards(folder, num_shards=2, rows_per_shard=BATCH_SIZE)
    return folder


@pytest.fixture(scope="module")
def links(shards_dir, tmp_path_factory):
    """Links to the shards; an epoch has every row once."""
    folder = tmp_path_factory.mktemp("bench") / "links"
    return link_shards(sorted(shards_dir.glob("*.parquet")), folder, NUM_ROWS)


def decode(pair, resample):
    """Both images of a pair, float (2, R, R, 3) from 0 to 255."""
    pixels = np.empty((2, RESOLUTION, RESOLUTION, 3), np.uint8)
    decode_pair(pair, pixels, COLUMNS, resample, 0.5, False)
    return pixels.astype(np.float32)


def difference(pixels, expected):
    """Mean |difference|, of the mirrored images if that is less."""
    return min(np.abs(pixels - expected).mean(), np.abs(pixels[..., ::-1, :] - expected).mean())


def take_epoch(stream):
    """The images of an epoch by prompt: float (2, R, R, 3) from 0 to 255."""
    images = {}
    with contextlib.closing(stream):
        while len(images) < NUM_ROWS:
            batch = next(stream)
            pixels = np.stack([np.asarray(batch[name]) for name in PIXELS], axis=1)
            if pixels.dtype == np.float32:
                pixels = (np.moveaxis(pixels, 2, -1) + 1) * 127.5
            assert pixels.shape == (BATCH_SIZE, 2, RESOLUTION, RESOLUTION, 3)
            for prompt, both in zip(batch["edit_prompt"], pixels):
                assert prompt not in images  # an epoch has every row once
                images[prompt] = both.astype(np.float32)
    return images


def test_shards_are_shaped_like_the_real_ones(shards_dir):
    paths = sorted(shards_dir.glob("*"))
    assert [path.suffix for path in paths] == [".parquet"] * 2
    for path in paths:
        file = pq.ParquetFile(path)
        assert file.schema_arrow.equals(SCHEMA)
        assert file.metadata.num_row_groups == 1
    pairs = read_pairs(shards_dir)
    assert len({pair.instruction for pair in pairs}) == NUM_ROWS
    sizes = [len(image) for pair in pairs for image in pair[:2]]
    assert 150e3 < np.mean(sizes) < 250e3  # 205 kB in the public dataset
    differences = [np.abs(np.diff(decode(pair, "dct"), axis=0)).mean() for pair in pairs]
    assert min(differences) > 0.1  # an edit that changes nothing gives 0


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("method", ["ours", "ours_lanczos", "datasets", "torch"])
def test_pixels_agree(method, num_threads, shards_dir, links):
    """Every method yields the pairs of decode_pair, each once per epoch.

    Ours to the bit; the others, whose resampling is bicubic, nearly.
    """
    if method == "datasets":
        pytest.importorskip("datasets")
    resample = "dct" if method == "ours" else "lanczos"
    if method in ("ours", "ours_lanczos"):
        images = take_epoch(ours(links[0].parent, num_threads, resample))
        largest = 0
    else:
        stream = {"datasets": hugging_face, "torch": torch_rows}[method]
        images = take_epoch(stream(links, num_threads))
        largest = 3
    expected = {pair.instruction: decode(pair, resample) for pair in read_pairs(shards_dir)}
    assert images.keys() == expected.keys()
    for prompt, pixels in images.items():
        assert difference(pixels, expected[prompt]) <= largest


@pytest.mark.parametrize("num_threads", [1, 2])
def test_ceiling_decodes_every_pair(num_threads, shards_dir, monkeypatch):
    decoded = []
    monkeypatch.setattr(
        data_benchmark,
        "decode_pair",
        lambda pair, out, *rest: decoded.append((pair.instruction, *rest)),
    )
    pairs = read_pairs(shards_dir)
    with contextlib.closing(ceiling(pairs, num_threads, "dct")) as stream:
        prompts = next(stream)["edit_prompt"]
    assert prompts == [pair.instruction for pair in pairs]
    assert sorted(prompts) == sorted(prompt for prompt, *_ in decoded)
    assert sum(flip for *_, flip in decoded) == NUM_ROWS // 2


def test_measure_counts_whole_row_groups(monkeypatch):
    """Start-up and warm-up are not counted; every batch advances the clock by a second."""
    now = [0.0]

    def batches():
        now[0] += 100
        while True:
            now[0] += 1
            yield {"edit_prompt": ["p"] * 16}

    monkeypatch.setattr(data_benchmark.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(data_benchmark, "cpu_seconds", lambda: 2 * now[0])
    figures = measure_stream(batches(), rows_at_once=40, seconds=3)
    # 3 batches hold 40 pairs and last 3 s.
    assert figures["pairs"] == 48
    assert figures["seconds"] == 3
    assert figures["pairs_per_second"] == 16
    assert figures["pairs_per_cpu_second"] == 8
    # 4 s need a second row group: 5 batches hold 80 pairs.
    assert measure_stream(batches(), rows_at_once=40, seconds=4)["pairs"] == 80


def test_summarize():
    def figures(wall, cpu):
        return {"1": {"pairs_per_second": wall, "pairs_per_cpu_second": cpu}}

    rounds = [
        {"ours": figures(8, 4), "ceiling": figures(10, 5), "datasets": None},
        {"ours": figures(12, 6), "ceiling": figures(12, 5), "datasets": None},
        {"ours": figures(9, 5), "ceiling": figures(18, 5), "datasets": None},
    ]
    methods, ratios = summarize_rounds(rounds)
    assert methods["ours"]["1"]["pairs_per_second"] == {"median": 9, "min": 8, "max": 12}
    assert methods["datasets"] is None
    ratio = ratios["ours/ceiling"]["1"]
    assert ratio["pairs_per_second"] == {"median": 0.8, "min": 0.5, "max": 1}
    assert ratio["pairs_per_cpu_second"] == {"median": 1, "min": 0.8, "max": 1.2}
    assert ratios["ours/datasets"] is None


def test_command_line(shards_dir, tmp_path):
    output = tmp_path / "results" / "quick.json"
    command = [sys.executable, "-m", "benchmarks.data", "--shards_dir", shards_dir]
    command += ["--epoch_rows", "64", "--rounds", "1", "--slice_seconds", "0.05"]
    command += ["--warm_up_pairs", "0"]
    command += ["--memory_epochs", "1", "--output", output]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in output.parent.iterdir()] == ["quick.json"]

    results = json.loads(output.read_text())
    row = results["method ours"]
    assert row["command"].startswith("python -m benchmarks.data --shards_dir")
    assert row["machine"]["cores"] >= 1
    assert row["data"]["rows"] == NUM_ROWS
    assert row["data"]["links"] == 4
    methods = rows_of(results, "method")
    names = {"ceiling", "ours", "ceiling_lanczos", "ours_lanczos", "datasets", "torch"}
    assert methods.keys() == names
    ratios = rows_of(results, "ratio")
    assert ratios.keys() == {"ours/ceiling", "ours/datasets"}
    for threads in ("1", "2"):
        measured = methods["torch"]["rounds"][0][threads]
        assert measured["pairs"] >= BATCH_SIZE
        assert measured["pairs_per_second"] == measured["pairs"] / measured["seconds"]
        # Its worker processes' time is counted: decoding a pair takes 1 ms at the very least.
        assert measured["cpu_seconds"] > 1e-3 * measured["pairs"]
        a, b = (methods[name]["summary"][threads] for name in ("ours", "ceiling"))
        ratio = ratios["ours/ceiling"]["summary"][threads]["pairs_per_second"]["median"]
        expected = a["pairs_per_second"]["median"] / b["pairs_per_second"]["median"]
        assert ratio == pytest.approx(expected)
    if methods["datasets"]["summary"] is None:
        assert "pip install datasets" in done.stdout
    memory = list(rows_of(results, "memory").values())
    assert [row["num_parts"] for row in memory] == [1, 8]
    for row in memory:
        assert row["peak_increase_mb"] >= max(row["increase_after_epochs_mb"]) > 0
    assert "ratio ours/ceiling, summary, 1, pairs_per_second: median " in done.stdout
