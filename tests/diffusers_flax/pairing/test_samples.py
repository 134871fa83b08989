"""Samples of captions: their random numbers."""

import numpy as np
import pytest

from diffusers_flax.pairing.samples import draw_sample

SCALES, FRACTIONS = (7.5, 15.0), (0.1, 0.9)


def ks_distance(values, low, high):
    """Largest distance of the values' distribution and the uniform one, as Kolmogorov's test."""
    values = np.sort((np.array(values) - low) / (high - low))
    steps = np.arange(len(values) + 1) / len(values)
    return max(np.abs(values - steps[1:]).max(), np.abs(values - steps[:-1]).max())


def test_numbers_are_of_numpys_seed_sequence():
    """They never change: shards of a run that is continued years later need the same numbers."""
    words = np.random.SeedSequence((5, 3, 8)).generate_state(4, np.uint32)
    sample = draw_sample(5, 3, 8, SCALES, FRACTIONS)
    assert (sample.place, sample.number) == (3, 8)
    assert sample.key.dtype == np.uint32 and sample.key.tolist() == words[:2].tolist()
    assert sample.guidance_scale == pytest.approx(7.5 + 7.5 * words[2] / 2**32, rel=1e-6)
    assert sample.attention_sharing == pytest.approx(0.1 + 0.8 * words[3] / 2**32, rel=1e-6)
    sample = draw_sample(0, 0, 0, SCALES, FRACTIONS)
    assert sample.key.tolist() == [2968811710, 3677149159]
    assert sample.guidance_scale == pytest.approx(8.802077, abs=1e-6)


def test_draws_are_uniform_and_independent():
    samples = [draw_sample(1, i // 50, i % 50, SCALES, FRACTIONS) for i in range(4000)]
    scales = [x.guidance_scale for x in samples]
    fractions = [x.attention_sharing for x in samples]
    limit = 1.95 / np.sqrt(len(samples))  # a uniform sample exceeds it once in 1000 times
    assert ks_distance(scales, *SCALES) < limit
    assert ks_distance(fractions, *FRACTIONS) < limit
    assert abs(np.corrcoef(scales, fractions)[0, 1]) < 4 / np.sqrt(len(samples))
    neighbours = np.corrcoef(scales[:-1], scales[1:])[0, 1]
    assert abs(neighbours) < 4 / np.sqrt(len(samples))
    assert len({x.key.tobytes() for x in samples}) == len(samples)
