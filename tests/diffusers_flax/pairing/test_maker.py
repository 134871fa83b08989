"""Which batches are made, in which order."""

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from diffusers_flax.generating.batches import DeviceClock
from diffusers_flax.pairing import maker as makers
from diffusers_flax.pairing.captions import Caption
from diffusers_flax.pairing.maker import IN_FLIGHT, SCORING, PairMaker
from diffusers_flax.pairing.samples import draw_sample
from diffusers_flax.pairing.scores import Scores


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

    def is_wanted(place):
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


@pytest.mark.parametrize("dim, high", [(None, 0.8), (None, 4.0), (256, 0.8)])
def test_guidance_scales_are_a_number_only_without_guidance(monkeypatch, dim, high):
    """A number up to 1 is one branch; a UNet that takes the scale gets the drawn ones of pairs."""
    prompts = SimpleNamespace(_asdict=dict)
    monkeypatch.setattr(makers, "prepare_prompts", lambda *args: prompts)
    pipeline = SimpleNamespace(unet=SimpleNamespace(time_cond_proj_dim=dim))
    ranges = dict(guidance_scale=(high / 2, high), attention_sharing=(0.1, 0.9))
    config = config_of(seed=0, negative_prompt="", **ranges)
    captions = [Caption(1, "a cat", "make it a lion", "a lion")]
    maker = PairMaker(pipeline, [None], None, captions, config)
    samples, arrays = maker.prepare_chunk([(0, 0), (0, 1)])
    if dim is None and high <= 1:
        assert arrays["guidance_scale"] == high
        assert [x.guidance_scale for x in samples] == [np.float32(high)] * 2
    else:
        drawn = np.float32([x.guidance_scale for x in samples])
        assert arrays["guidance_scale"].tolist() == drawn.repeat(2).tolist()


class Stub(PairMaker):
    """Makes grey images instead of a model's, which are good.

    Args:
        values: of each batch the grey values of its pairs, or an error.
    """

    def __init__(self, values, **flags):
        flags = dict(num_samples=2, early_stop=False, preview=False, lora=(), seed=0) | flags
        captions = [Caption(i + 1, f"a {i}", "edit", f"b {i}") for i in range(9)]
        super().__init__(None, [None], None, captions, config_of(**flags))
        self.scorer, self.values = SlowScorer(), iter(values)

    def prepare_chunk(self, chunk):
        return [draw_sample(0, *numbers, (7, 8), (0, 1)) for numbers in chunk], {}

    def dispatch(self, prepared):
        values = next(self.values)
        if isinstance(values, Exception):
            raise values
        grey = np.repeat(np.float32(values), 2)
        return [grey[:, None, None, None] * np.ones((8, 8, 3), np.float32)]

    def lines(self, num_lines):
        """Yields the finished lines of a run: (place, Line)."""
        output = shards_of(num_lines, 1)
        output.is_finished = lambda place: False
        bar = SimpleNamespace(update=lambda n: None, set_description=lambda text: None)
        yield from self.make(output, bar, DeviceClock())


class SlowScorer:
    pool = ThreadPoolExecutor(1)

    def __call__(self, images, places, device):
        time.sleep(0.1)
        return [Scores(0.5, 0.5, 0.9, 0.5)] * len(places)


def test_an_error_keeps_the_lines_that_are_made():
    """Their scores are unknown when the device fails; a line is a batch."""
    maker, found = Stub([[0.2, 0.4]] * 3 + [RuntimeError("out of memory")]), []
    with pytest.raises(RuntimeError, match="out of memory"):
        found.extend(maker.lines(6))
    assert [place for place, _ in found] == [0, 1, 2]


@pytest.mark.parametrize("keep_all", [False, True])
def test_a_sample_that_is_nan_is_not_kept(keep_all, monkeypatch):
    monkeypatch.setattr(makers, "MAX_NAN", 4)
    nan = np.nan
    lines = dict(Stub([[0.2, 0.4], [nan, 0.4]], keep_all=keep_all).lines(2))
    assert [[pair.sample.number for pair in lines[i].kept] for i in (0, 1)] == [[0, 1], [1]]
    assert [lines[i].num_good for i in (0, 1)] == [2, 1]
    assert lines[1].missed == {"min_clip_text": 1, "min_clip_image": 1, "min_clip_direction": 1}
    with pytest.raises(ValueError, match='images of "a 1" and others are NaN'):
        dict(Stub([[nan, np.inf]] * 9).lines(9))


def test_lines_that_are_all_nan():
    """As many as a start may have, in batches of any size; infinite values are like NaN."""
    lines = dict(Stub([[np.inf, -np.inf], [np.nan, 0.4]]).lines(2))
    assert [lines[i].num_nan for i in (0, 1)] == [2, 1]
    assert not lines[0].kept and lines[0].best.images is None
