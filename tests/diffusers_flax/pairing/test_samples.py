"""Samples of captions: their random numbers, and how they share batches."""

import numpy as np
import pytest

from diffusers_flax.pairing.samples import batches_of, chunks_of, draw_sample, interleaved

SCALES, FRACTIONS = (7.5, 15.0), (0.1, 0.9)


def ks_distance(values, low, high):
    """Largest distance of the values' distribution and the uniform one, as Kolmogorov's test."""
    values = np.sort((np.array(values) - low) / (high - low))
    steps = np.arange(len(values) + 1) / len(values)
    return max(np.abs(values - steps[1:]).max(), np.abs(values - steps[:-1]).max())


def test_numbers_are_of_numpys_seed_sequence():
    """The key and both draws are the words of SeedSequence((seed, line, sample))."""
    words = np.random.SeedSequence((5, 3, 8)).generate_state(4, np.uint32)
    sample = draw_sample(5, 3, 8, SCALES, FRACTIONS)
    assert (sample.place, sample.number) == (3, 8)
    assert sample.key.dtype == np.uint32 and sample.key.tolist() == words[:2].tolist()
    assert sample.guidance_scale == pytest.approx(7.5 + 7.5 * words[2] / 2**32, rel=1e-6)
    assert sample.attention_sharing == pytest.approx(0.1 + 0.8 * words[3] / 2**32, rel=1e-6)


def test_numbers_never_change():
    """Shards of a run that is continued years later need the same numbers."""
    sample = draw_sample(0, 0, 0, SCALES, FRACTIONS)
    assert sample.key.tolist() == [2968811710, 3677149159]
    assert sample.guidance_scale == pytest.approx(8.802077, abs=1e-6)
    assert sample.attention_sharing == pytest.approx(0.637358, abs=1e-6)


def test_draws_are_uniform_and_independent():
    samples = [draw_sample(1, i // 50, i % 50, SCALES, FRACTIONS) for i in range(4000)]
    scales = [x.guidance_scale for x in samples]
    fractions = [x.attention_sharing for x in samples]
    limit = 1.95 / np.sqrt(len(samples))  # a uniform sample exceeds it once in 1000 times
    assert ks_distance(scales, *SCALES) < limit
    assert ks_distance(fractions, *FRACTIONS) < limit
    assert min(scales) >= 7.5 and max(scales) <= 15
    assert min(fractions) >= np.float32(0.1) and max(fractions) <= np.float32(0.9)
    assert abs(np.corrcoef(scales, fractions)[0, 1]) < 4 / np.sqrt(len(samples))
    neighbours = np.corrcoef(scales[:-1], scales[1:])[0, 1]
    assert abs(neighbours) < 4 / np.sqrt(len(samples))
    assert len({x.key.tobytes() for x in samples}) == len(samples)


def test_ranges_change_neither_keys_nor_places_in_the_range():
    wide, narrow = (draw_sample(0, 1, 2, scales, (0.5, 0.5)) for scales in ((0.0, 8.0), (2.0, 4.0)))
    assert np.array_equal(wide.key, narrow.key)
    assert narrow.guidance_scale == pytest.approx(2 + wide.guidance_scale / 4)
    assert wide.attention_sharing == narrow.attention_sharing == 0.5


# ------------------------------------------------------------------ chunks and batches


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 30])
def test_chunks_have_all_samples_in_order(size):
    chunks = chunks_of(range(4, 7), 5, size)
    assert {len(chunk) for chunk in chunks} == {size}
    samples = [sample for chunk in chunks for sample in chunk]
    expected = [(place, number) for place in (4, 5, 6) for number in range(5)]
    assert samples[:15] == expected
    assert set(samples[15:]) <= {(6, 4)} and len(samples) - 15 < size


def test_interleaved_chunks_visit_captions_in_turn():
    """Two captions take turns; a caption's samples stay in order."""
    chunks = chunks_of(range(3), 4, 2)
    order = [chunk[0] for chunk in interleaved(chunks, 2)]
    assert order == [(0, 0), (1, 0), (0, 2), (1, 2), (2, 0), (2, 2)]


@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_batches_have_the_same_chunks_on_any_number_of_devices(num_devices):
    chunks = chunks_of(range(3), 5, 2)
    batches = list(batches_of(chunks, lambda place: True, num_devices))
    assert {len(batch) for batch in batches} == {num_devices}
    made = [chunk for batch in batches for chunk in batch]
    assert made[: len(chunks)] == chunks
    assert all(chunk == chunks[-1] for chunk in made[len(chunks) :])


def test_batches_leave_out_chunks_that_nobody_needs():
    """A chunk with one wanted sample stays whole, as its images depend on the other samples."""
    chunks = chunks_of(range(3), 4, 3)
    batches = list(batches_of(chunks, lambda place: place == 0, 2))
    assert batches == [[[(0, 0), (0, 1), (0, 2)], [(0, 3), (1, 0), (1, 1)]]]
    assert list(batches_of(chunks, lambda place: False, 2)) == []


def test_whether_samples_are_wanted_is_asked_as_late_as_possible():
    """A batch does not decide about the chunks of later batches."""
    asked, chunks = [], chunks_of(range(4), 2, 2)
    batches = batches_of(chunks, lambda place: asked.append(place) or True, 2)
    next(batches)
    assert set(asked) == {0, 1}
