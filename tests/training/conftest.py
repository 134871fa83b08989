"""A model and a dataset to train on; tests that need others define their own fixtures."""

import pytest
from helpers import SIZE, write_shard
from tiny_models import make_tiny_pipeline


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A pipeline directory whose unet/ has 8 input channels, like a widened one."""
    return make_tiny_pipeline(tmp_path_factory.mktemp("tiny") / "model", **SIZE)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Sixteen pairs, two batches, in two shards; row 3 of the first cannot be decoded."""
    folder = tmp_path_factory.mktemp("data") / "pairs"
    folder.mkdir()
    write_shard(folder / "a.parquet", 9, seed=1, broken=[3])
    write_shard(folder / "b.parquet", 7, seed=2)
    return folder
