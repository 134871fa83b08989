"""benchmarks/data.py: shards, pixels of all methods, the clock."""

import contextlib

import numpy as np
import pyarrow.parquet as pq
import pytest

from benchmarks import data
from benchmarks.data import BATCH_SIZE, METHODS, PIXELS, RESOLUTION, SCHEMA
from diffusers_flax.data.decoding import decode_pair
from diffusers_flax.data.shards import list_row_groups, pair_at, read_row_group

NUM_ROWS = 2 * BATCH_SIZE
# The workers of torch's DataLoader are forked, and compute nothing with JAX.
pytestmark = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")


@pytest.fixture(scope="module")
def links(tmp_path_factory):
    """Links to two shards of a batch each; an epoch has every row once."""
    folder = tmp_path_factory.mktemp("bench")
    data.make_shards(folder / "shards", num_shards=2, rows_per_shard=BATCH_SIZE)
    shards = sorted((folder / "shards").glob("*.parquet"))
    return data.link_shards(shards, folder / "links", NUM_ROWS)


def read_pairs(links):
    """All pairs of the shards."""
    for group in list_row_groups(str(links[0].parent)):
        cells = read_row_group(group)
        yield from (pair_at(cells, position) for position in range(group.num_rows))


def decode(pair, resample):
    """Both images of a pair, float (2, R, R, 3) from 0 to 255."""
    pixels = np.empty((2, RESOLUTION, RESOLUTION, 3), np.uint8)
    decode_pair(pair, pixels, resample, 0.5, False)
    return pixels.astype(np.float32)


def test_shards_are_shaped_like_the_real_ones(links):
    for link in links:
        file = pq.ParquetFile(link)
        assert file.schema_arrow.equals(SCHEMA) and file.metadata.num_row_groups == 1
    pairs = list(read_pairs(links))
    assert len({pair.instruction for pair in pairs}) == NUM_ROWS
    sizes = [len(image) for pair in pairs for image in pair[:2]]
    assert 150e3 < np.mean(sizes) < 250e3  # 205 kB in the public dataset
    differences = [np.abs(np.diff(decode(pair, "dct"), axis=0)).mean() for pair in pairs]
    assert min(differences) > 0.1  # an edit that changes nothing gives 0


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_pixels_agree(method, num_threads, links):
    """Every method yields each pair of an epoch once.

    Ours to the bit; the others, whose resampling is bicubic, nearly.
    """
    if method == "datasets":
        pytest.importorskip("datasets")
    images, is_ours = {}, method.startswith("ours")
    with contextlib.closing(METHODS[method](links, num_threads)) as stream:
        while len(images) < NUM_ROWS:
            batch = next(stream)
            pixels = np.stack([np.asarray(batch[name]) for name in PIXELS], axis=1)
            if not is_ours:
                pixels = (np.moveaxis(pixels, 2, -1) + 1) * 127.5
            assert pixels.shape == (BATCH_SIZE, 2, RESOLUTION, RESOLUTION, 3)
            for prompt, both in zip(batch["edit_prompt"], pixels):
                assert prompt not in images
                images[prompt] = both.astype(np.float32)
    for pair in read_pairs(links):
        expected = decode(pair, "dct" if method == "ours" else "lanczos")
        both = images.pop(pair.instruction)
        errors = [np.abs(x - expected).mean() for x in (both, both[..., ::-1, :])]
        assert min(errors) <= (0 if is_ours else 3)
    assert not images


def test_measure_counts_whole_row_groups(monkeypatch):
    """Start-up and warm-up are not counted; every batch advances the clock by a second."""
    now = [0.0]

    def batches():
        now[0] += 100
        while True:
            now[0] += 1
            yield {"edit_prompt": ["p"] * 16}

    monkeypatch.setattr(data.time, "perf_counter", lambda: now[0])
    # 3 batches hold 40 pairs and last 3 s; 4 s need a second row group: 5 batches hold 80 pairs.
    for seconds in (3, 4):
        assert data.pairs_per_second(batches(), rows_at_once=40, seconds=seconds) == 16
