"""Bootstrap intervals in closed form."""

import numpy as np
import pytest
from scipy.stats import binom

from diffusers_flax.evaluation import intervals
from diffusers_flax.evaluation.intervals import bootstrap_interval, mean_over, over_seeds
from diffusers_flax.evaluation.results import load_values, save_values


@pytest.fixture(autouse=True)
def many_resamples(monkeypatch):
    monkeypatch.setattr(intervals, "NUM_RESAMPLES", 20000)


@pytest.mark.parametrize(("ones", "n"), [(10, 20), (3, 10), (40, 50)])
def test_an_interval_of_zeros_and_ones_is_binomial(ones, n):
    """The mean of a resample of k ones among n values is Binomial(n, k / n) / n."""
    values = np.arange(n) < ones
    expected = binom.ppf([0.025, 0.975], n, ones / n) / n
    found = bootstrap_interval(values, range(n))
    np.testing.assert_allclose(found, expected, atol=1e-9)


def test_clusters_of_different_sizes():
    """The mean of a resample is over its turns: one session of three zeros, one of a single one."""
    found = bootstrap_interval([0, 0, 0, 1], ["a", "a", "a", "b"])
    assert found == (0, 1)
    values, sessions = [0, 0, 0, 1] * 50, np.repeat(np.arange(100), [3, 1] * 50)
    low, high = bootstrap_interval(values, sessions)
    k = binom.ppf([0.025, 0.975], 100, 0.5)  # sessions of one turn among the hundred drawn
    np.testing.assert_allclose([low, high], k / (3 * (100 - k) + k), atol=1e-9)


def test_strata_have_equal_weights():
    """A mean of means: one group of a constant halves the width of the other's."""
    values = np.concatenate([np.arange(20) < 10, np.full(60, 0.5)])
    groups = np.repeat(["a", "b"], [20, 60])
    assert mean_over(values, groups) == 0.5
    assert mean_over([1, 0, 0, np.nan], ["a", "b", "b", "b"]) == 0.5
    low, high = bootstrap_interval(values, range(80), groups)
    expected = (binom.ppf([0.025, 0.975], 20, 0.5) / 20 + 0.5) / 2
    np.testing.assert_allclose([low, high], expected, atol=1e-9)


def test_too_few_values_have_no_interval():
    assert bootstrap_interval([0.5, np.nan], [0, 1]) is None
    assert bootstrap_interval([0.5, 0.6], ["a", "a"]) is None
    assert mean_over([np.nan]) is None


def test_values_of_seeds_are_means_per_pair(tmp_path):
    save_values(tmp_path, "0", {"l1": [0.1, np.nan, 0.3]})
    save_values(tmp_path, "1", {"l1": [0.3, np.nan, np.nan], "dino": [1.0, 1.0, 0.0]})
    means = over_seeds([load_values(tmp_path, name) for name in ("0", "1")])
    np.testing.assert_allclose(means["l1"], [0.2, np.nan, 0.3])
    np.testing.assert_allclose(means["dino"], [1, 1, 0])
    assert means.keys() == {"l1", "dino"}
