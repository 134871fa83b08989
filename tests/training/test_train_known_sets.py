"""Training on tiny shards in the exact schemas of the public datasets, without flags of columns."""

import numpy as np
import pytest
from helpers import config_of, read_metrics, run_main, slow
from known_sets import SCHEMAS, write_known

pytestmark = pytest.mark.usefixtures("lenient_optimizer")


@pytest.mark.parametrize("name", ["TIGER-Lab/OmniEdit-Filtered-1.2M", *slow(*list(SCHEMAS)[:-1])])
def test_a_known_set_trains_without_flags(model, tmp_path, monkeypatch, name):
    data = write_known(tmp_path / "data", name)
    out = tmp_path / "out"
    run_main(config_of(model, data, out, max_train_steps=3), monkeypatch)
    rows = read_metrics(out)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(np.isfinite(row["loss"]) for row in rows)
    assert (out / "model_index.json").exists()
