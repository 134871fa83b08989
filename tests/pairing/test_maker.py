"""Which batches are made, in which order."""

from types import SimpleNamespace

import pytest

from pairing.maker import IN_FLIGHT, SCORING, PairMaker


def config_of(**changes):
    flags = dict(num_samples=12, batch_size=2, early_stop=True, keep_all=False, num_kept=4)
    flags |= dict(min_clip_text=0.2, min_clip_image=0.7, min_clip_direction=0.2)
    return SimpleNamespace(**flags | changes)


def shards_of(num_lines, per_shard):
    """An Output without finished lines."""
    starts = range(0, num_lines, per_shard)
    shards = [range(start, min(start + per_shard, num_lines)) for start in starts]
    return SimpleNamespace(unfinished_shards=lambda: iter(shards))


def made_until_known(maker, output, num_needed):
    """The chunks of a run in which a batch's scores are known IN_FLIGHT + SCORING batches later.

    A line is finished when so many of its samples are known.
    """
    known, waiting, made = {}, [], []

    def is_wanted(place, number):
        return known.get(place, 0) < num_needed

    for batch in maker.batches(output, is_wanted):
        made += batch
        waiting.append(batch)
        if len(waiting) > IN_FLIGHT + SCORING:
            for chunk in waiting.pop(0):
                for place, _ in chunk:
                    known[place] = known.get(place, 0) + 1
    return made


@pytest.mark.parametrize("num_devices", [1, 4])
@pytest.mark.parametrize("per_shard", [1, 3, 100])
def test_early_stop_makes_few_samples_in_vain(per_shard, num_devices):
    """Lines take turns over the borders of shards: a short list has one line in each."""
    maker = PairMaker(None, [None] * num_devices, None, None, config_of())
    num_lines = 144
    made = made_until_known(maker, shards_of(num_lines, per_shard), num_needed=4)
    assert {chunk[0] for chunk in made} >= {(place, 0) for place in range(num_lines)}
    needed = num_lines * 4 / 2  # chunks
    assert needed <= len(made) <= 1.25 * needed


def test_without_early_stop_all_samples_are_made_in_order():
    maker = PairMaker(None, [None], None, None, config_of(early_stop=False))
    made = made_until_known(maker, shards_of(5, 2), num_needed=12)
    assert [x for chunk in made for x in chunk] == [(i, n) for i in range(5) for n in range(12)]
