"""Confidence intervals of means by the bootstrap.

    low, high = bootstrap_interval(values)

Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapters 8 and 13.
"""

import numpy as np

NUM_RESAMPLES = 2000
LEVEL = 0.95


def mean_over(values, strata=""):
    """The mean of values, or the mean over strata of their means; NaN counts nowhere.

    Args:
        values: (n,).
        strata: label of each value, or of all.

    Returns:
        float; None without values.
    """
    values, known = np.asarray(values, np.float64), np.isfinite(values)
    if not known.any():
        return None
    labels = np.broadcast_to(strata, len(values))
    means = [values[known & (labels == label)].mean() for label in np.unique(labels[known])]
    return float(np.mean(means))


def bootstrap_interval(values, clusters, strata=""):
    """The 95% percentile interval of mean_over(values, strata).

    Clusters are drawn with replacement, within their stratum: the turns of one session are not
    independent. Equal values have equal intervals.

    Args:
        values: (n,), NaN where unknown.
        clusters: label of each value.
        strata: label of each value, or of all. A cluster lies in one stratum.

    Returns:
        (low, high), floats; None with fewer than two clusters.
    """
    known = np.isfinite(values)
    values, clusters = np.asarray(values, np.float64)[known], np.asarray(clusters)[known]
    strata = np.broadcast_to(strata, len(known))[known]
    if len(np.unique(clusters)) < 2:
        return None
    rng, means = np.random.default_rng(0), []
    for stratum in np.unique(strata):
        mine = strata == stratum
        _, cluster = np.unique(clusters[mine], return_inverse=True)
        sums, counts = np.bincount(cluster, values[mine]), np.bincount(cluster)
        drawn = rng.integers(len(sums), size=(NUM_RESAMPLES, len(sums)))
        means.append(sums[drawn].sum(1) / counts[drawn].sum(1))
    return tuple(np.quantile(np.mean(means, axis=0), ((1 - LEVEL) / 2, (1 + LEVEL) / 2)).tolist())


def over_seeds(all_values):
    """{metric: means per pair over the seeds that know it, (n,)} of such dicts, one per seed."""
    means = {}
    for metric in dict.fromkeys(name for values in all_values for name in values):
        columns = [values[metric] for values in all_values if metric in values]
        means[metric] = np.ma.masked_invalid(columns).mean(0).filled(np.nan)
    return means
