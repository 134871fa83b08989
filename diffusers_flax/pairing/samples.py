"""The samples of captions: their random numbers, and which of them share a program's batch.

A sample is a pair of images that is made from one line of captions. All that is random about it
depends on (seed, line, number of the sample). Samples that share a batch are chosen before any is
made: batches are the same on any number of devices and workers.
"""

from typing import NamedTuple

import numpy as np


class PairSample(NamedTuple):
    """What is random about a pair."""

    place: int  # of its captions in the list, from 0
    number: int  # among the samples of these captions, from 0
    key: np.ndarray  # of the noise of both images, uint32 (2,)
    guidance_scale: float  # weight of the captions
    attention_sharing: float  # fraction of the steps in which both images share self-attention


def draw_sample(seed, place, number, scales, fractions):
    """The PairSample of these numbers.

    NumPy promises that a SeedSequence has the same numbers in all versions.

    Args:
        seed: of the run.
        place, number: see PairSample.
        scales, fractions: (least, largest) of guidance_scale and attention_sharing, which are
            uniform between them.
    """
    state = np.random.SeedSequence((seed, place, number)).generate_state(4, np.uint32)

    def between(low, high, word):
        return float(np.float32(low + (high - low) * word / 2**32))

    drawn = between(*scales, int(state[2])), between(*fractions, int(state[3]))
    return PairSample(place, number, state[:2], *drawn)


def chunks_of(places, num_samples, size):
    """The samples of some captions, in groups that one device makes at once.

    Args:
        places: of the captions.
        num_samples: of each.
        size: samples in a chunk.

    Returns:
        Lists of `size` (place, number), in order; the last one repeats its last sample.
    """
    samples = [(place, number) for place in places for number in range(num_samples)]
    samples += samples[-1:] * (-len(samples) % size)
    return [samples[start : start + size] for start in range(0, len(samples), size)]


def interleaved(chunks, num_captions):
    """Chunks in an order that visits several captions in turn, for --early_stop.

    While a chunk is on the devices, nobody knows yet whether its captions need another one.

    Args:
        chunks: of chunks_of, of one or more calls.
        num_captions: how many captions take turns.

    Returns:
        The chunks, sorted: the first samples of the first captions, then their next samples.
    """
    ranks = {}
    for chunk in chunks:
        ranks.setdefault(chunk[0][0], len(ranks))

    def turn(chunk):
        place, number = chunk[0]
        return ranks[place] // num_captions, number // len(chunk), place

    return sorted(chunks, key=turn)


def batches_of(chunks, is_wanted, num_devices):
    """Lists of one chunk for each device; the last list repeats its last chunk.

    Args:
        chunks: iterable of chunks, which is advanced by one batch at a time.
        is_wanted: place -> whether more samples of these captions are needed; chunks without any
            are left out.
        num_devices: chunks in a batch.
    """
    batch = []
    for chunk in chunks:
        if any(is_wanted(place) for place, _ in chunk):
            batch.append(chunk)
        if len(batch) == num_devices:
            yield batch
            batch = []
    if batch:
        yield batch + batch[-1:] * (num_devices - len(batch))
