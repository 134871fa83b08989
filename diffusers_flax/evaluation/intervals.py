"""Confidence intervals of means by the bootstrap.

    low, high = bootstrap_interval(values)

Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapters 8 and 13.
"""

import numpy as np

NUM_RESAMPLES = 2000
LEVEL = 0.95


def mean_over(values, strata=None):
    """The mean of values, or the mean over strata of their means; NaN counts nowhere.

    Args:
        values: (n,).
        strata: label of each value; None: one for all.

    Returns:
        float; None without values.
    """
    values, known = np.asarray(values, np.float64), np.isfinite(values)
    if not known.any():
        return None
    labels = np.zeros(len(values)) if strata is None else np.asarray(strata)
    means = [values[known & (labels == label)].mean() for label in np.unique(labels[known])]
    return float(np.mean(means))


def bootstrap_interval(values, clusters=None, strata=None, num_resamples=NUM_RESAMPLES, seed=0):
    """The 95% percentile interval of mean_over(values, strata).

    Clusters are drawn with replacement, within their stratum: the turns of one session are not
    independent.

    Args:
        values: (n,), NaN where unknown.
        clusters: label of each value; None: each is its own.
        strata: label of each value; None: one for all. A cluster lies in one stratum.
        num_resamples: number of resamples.
        seed: of the draws; equal values have equal intervals.

    Returns:
        (low, high), floats; None with fewer than two clusters.
    """
    values = np.asarray(values, np.float64)
    known = np.isfinite(values)
    values, n = values[known], int(known.sum())
    clusters = np.arange(n) if clusters is None else np.asarray(clusters)[known]
    strata = np.zeros(n) if strata is None else np.asarray(strata)[known]
    if len(np.unique(clusters)) < 2:
        return None
    rng, means = np.random.default_rng(seed), []
    for stratum in np.unique(strata):
        mine = strata == stratum
        _, cluster = np.unique(clusters[mine], return_inverse=True)
        sums, counts = np.bincount(cluster, values[mine]), np.bincount(cluster)
        drawn = rng.integers(len(sums), size=(num_resamples, len(sums)))
        means.append(sums[drawn].sum(1) / counts[drawn].sum(1))
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(np.mean(means, axis=0), (tail, 1 - tail))
    return float(low), float(high)


def over_seeds(all_values, metric):
    """Values per pair, each the mean over the seeds that know it; None if no seed has the metric.

    all_values: list of {metric: (n,)}, one per seed.
    """
    columns = [values[metric] for values in all_values if metric in values]
    return np.ma.masked_invalid(columns).mean(0).filled(np.nan) if columns else None
