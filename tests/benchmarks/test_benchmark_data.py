"""benchmarks/data.py: shards, pixels of all methods."""

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
def shards(tmp_path_factory):
    """Two shards of a batch each; an epoch has every row once."""
    return data.make_shards(tmp_path_factory.mktemp("bench") / "shards", BATCH_SIZE)


def read_pairs(shards):
    """All pairs of the shards."""
    for group in list_row_groups(str(shards[0].parent)):
        cells = read_row_group(group)
        yield from (pair_at(cells, position) for position in range(group.num_rows))


def decode(pair, resample):
    """Both images of a pair, float (2, R, R, 3) from 0 to 255."""
    pixels = np.empty((2, RESOLUTION, RESOLUTION, 3), np.uint8)
    decode_pair(pair, pixels, resample, 0.5, False)
    return pixels.astype(np.float32)


def test_shards_are_shaped_like_the_real_ones(shards):
    for link in shards:
        file = pq.ParquetFile(link)
        assert file.schema_arrow.equals(SCHEMA) and file.metadata.num_row_groups == 1
    pairs = list(read_pairs(shards))
    assert len({pair.instruction for pair in pairs}) == NUM_ROWS
    sizes = [len(image) for pair in pairs for image in pair[:2]]
    assert 150e3 < np.mean(sizes) < 250e3  # 205 kB in the public dataset
    differences = [np.abs(np.diff(decode(pair, "dct"), axis=0)).mean() for pair in pairs]
    assert min(differences) > 0.1  # an edit that changes nothing gives 0


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_pixels_agree(method, num_threads, shards):
    """Every method yields each pair of an epoch once.

    Ours to the bit; the others, whose resampling is bicubic, nearly.
    """
    if method == "datasets":
        pytest.importorskip("datasets")
    images, is_ours = {}, method.startswith("ours")
    with contextlib.closing(METHODS[method](shards, num_threads)) as stream:
        while len(images) < NUM_ROWS:
            batch = next(stream)
            pixels = np.stack([np.asarray(batch[name]) for name in PIXELS], axis=1)
            if not is_ours:
                pixels = (np.moveaxis(pixels, 2, -1) + 1) * 127.5
            assert pixels.shape == (BATCH_SIZE, 2, RESOLUTION, RESOLUTION, 3)
            for prompt, both in zip(batch["edit_prompt"], pixels):
                assert prompt not in images
                images[prompt] = both.astype(np.float32)
    for pair in read_pairs(shards):
        expected = decode(pair, "dct" if method == "ours" else "lanczos")
        both = images.pop(pair.instruction)
        errors = [np.abs(x - expected).mean() for x in (both, both[..., ::-1, :])]
        assert min(errors) <= (0 if is_ours else 3)
    assert not images
