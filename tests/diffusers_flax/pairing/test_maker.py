"""Which batches are made, in which order."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from diffusers_flax.pairing import maker as makers
from diffusers_flax.pairing.caption_lists import Caption
from diffusers_flax.pairing.maker import PairMaker
from diffusers_flax.pairing.pair_scores import Scores
from diffusers_flax.pairing.pair_shards import choose_pairs, counts_of
from diffusers_flax.pairing.samples import draw_sample


def config_of(**changes):
    flags = dict(num_samples=12, batch_size=2, early_stop=True, keep_all=False, num_kept=4)
    flags |= dict(min_clip_text=0.2, min_clip_image=0.7, min_clip_direction=0.2)
    flags |= dict(clip_model="clip", preview=False, lora=(), seed=0)
    return SimpleNamespace(**flags | changes)


@pytest.mark.parametrize("dim, high", [(None, 0.8), (None, 4.0), (256, 0.8)])
def test_guidance_scales_are_a_number_only_without_guidance(monkeypatch, dim, high):
    """A number up to 1 is one branch; a UNet that takes the scale gets the drawn ones of pairs."""
    prompts = SimpleNamespace(_asdict=dict)
    monkeypatch.setattr(makers, "prepare_prompts", lambda *args: prompts)
    pipeline = SimpleNamespace(unet=SimpleNamespace(time_cond_proj_dim=dim))
    ranges = dict(guidance_scale=(high / 2, high), attention_sharing=(0.1, 0.9))
    config = config_of(negative_prompt="", **ranges)
    captions = [Caption(1, "a cat", "make it a lion", "a lion")]
    maker = PairMaker(pipeline, [None], None, captions, config)
    samples, arrays = maker.prepare([(0, 0), (0, 1)])
    if dim is None and high <= 1:
        assert arrays["guidance_scale"] == high
        assert [x.guidance_scale for x in samples] == [np.float32(high)] * 2
    else:
        drawn = np.float32([x.guidance_scale for x in samples])
        assert arrays["guidance_scale"].tolist() == drawn.repeat(2).tolist()


class Stub(PairMaker):
    """Makes grey images instead of a model's, which are good.

    Args:
        values: of each batch the grey values of its pairs.
        num_devices: chunks of a batch.
    """

    def __init__(self, values, num_devices=1, **flags):
        captions = [Caption(i + 1, f"a {i}", "edit", f"b {i}") for i in range(200)]
        config = config_of(**dict(num_samples=2, early_stop=False) | flags)
        super().__init__(None, [None] * num_devices, self.good, captions, config)
        self.values, self.made = iter(values), []

    @staticmethod
    def good(images, places, device, map):
        return [Scores(0.5, 0.5, 0.9, 0.5)] * len(places)

    def prepare(self, chunk):
        return [draw_sample(0, *numbers, (7, 8), (0, 1)) for numbers in chunk], {}

    def dispatch(self, prepared):
        values = next(self.values)
        self.made += [sample[:2] for samples, _ in prepared for sample in samples]
        grey = np.repeat(np.float32(values), 2)
        return [grey[:, None, None, None] * np.ones((8, 8, 3), np.float32)] * len(prepared)

    def lines(self, num_lines, per_shard=1):
        """Yields the finished lines of a run of several shards: (place, pairs)."""
        bar = SimpleNamespace(update=lambda n: None, set_description=lambda text: None)
        starts = range(0, num_lines, per_shard)
        places = [range(start, min(start + per_shard, num_lines)) for start in starts]
        shards = SimpleNamespace(unfinished=lambda: range(len(places)), places=places.__getitem__)
        yield from self.make(shards, bar)


@pytest.mark.parametrize("num_devices", [1, 4])
@pytest.mark.parametrize("per_shard", [1, 3, 100])
def test_early_stop_makes_few_samples_in_vain(per_shard, num_devices):
    """Lines take turns over the borders of shards: a short list has one line in each."""
    maker = Stub(itertools.repeat([0.2, 0.4]), num_devices, num_samples=12, early_stop=True)
    lines = dict(maker.lines(144, per_shard))
    assert sorted(lines) == [*range(144)]
    assert all([x.sample.number for x in pairs] == [0, 1, 2, 3] for pairs in lines.values())
    assert 144 * 4 <= len(maker.made) <= 1.25 * 144 * 4


@pytest.mark.parametrize("num_devices", [1, 2])
def test_without_early_stop_all_samples_are_made_in_order(num_devices):
    """In the same chunks on any number of devices; the last one repeats its last sample."""
    maker = Stub(itertools.repeat([0.2, 0.4]), num_devices, num_samples=3)
    assert [place for place, _ in maker.lines(5, 2)] == [*range(5)]
    expected = [(place, number) for place in range(5) for number in range(3)]
    assert maker.made[:16] == [*expected, expected[-1]]


@pytest.mark.parametrize("keep_all", [False, True])
def test_a_sample_that_is_nan_is_not_kept(keep_all, monkeypatch):
    monkeypatch.setattr(makers, "MAX_NAN", 4)
    nan = np.nan
    maker = Stub([[0.2, 0.4], [nan, 0.4], [np.inf, nan]], keep_all=keep_all)
    lines = dict(maker.lines(3))
    kept = [choose_pairs(lines[i], maker.config) for i in range(3)]
    assert [[x.sample.number for x in pairs] for pairs in kept] == [[0, 1], [1], []]
    counts = counts_of(Caption(1, "a", "b", "c"), lines[1], maker.config)
    assert counts["missed"] == {"min_clip_text": 1, "min_clip_image": 1, "min_clip_direction": 1}
    assert counts["good"] == 1
    with pytest.raises(ValueError, match='images of "a 1" and others are NaN'):
        dict(Stub([[nan, np.inf]] * 9).lines(9))
