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


def batches_of(shards, config, num_devices, num_waiting, finished):
    """Lists of one chunk for each device; the last list repeats its last chunk.

    A chunk has the samples, (place, number), that a device makes at once, of one shard; its last
    chunk repeats its last sample. With early_stop the lines of several shards take turns, as nobody
    knows yet whether a line needs another chunk while its chunk is on the devices.

    Args:
        shards: places of the captions of each shard.
        config: flags of make_pairs.py: num_samples, batch_size, early_stop.
        num_devices: chunks in a batch.
        num_waiting: batches that are not scored yet when another one begins.
        finished: set of places of captions that need no more samples; it may grow meanwhile.
    """
    size = config.batch_size

    def in_turn(chunk):
        place, number = chunk[0]
        return number // size, place

    def ordered():
        found, num_lines = [], 0
        for i, places in enumerate(shards):
            samples = [(place, number) for place in places for number in range(config.num_samples)]
            samples += samples[-1:] * (-len(samples) % size)
            found += [samples[start : start + size] for start in range(0, len(samples), size)]
            num_lines += len(places)
            is_enough = not config.early_stop or num_lines >= 3 * num_waiting * num_devices
            if is_enough or i == len(shards) - 1:
                yield from sorted(found, key=in_turn) if config.early_stop else found
                found, num_lines = [], 0

    batch = []
    for chunk in ordered():
        if any(place not in finished for place, _ in chunk):
            batch.append(chunk)
        if len(batch) == num_devices:
            yield batch
            batch = []
    if batch:
        yield batch + batch[-1:] * (num_devices - len(batch))
