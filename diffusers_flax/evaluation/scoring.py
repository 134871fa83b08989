"""The metrics of results of held-out pairs.

scorer = ResultScorer(pairs, ["l1", "dino"], sizes, dino=Dino("facebook/dino-vits16"))
values = scorer.measure(0, image)
"""

from functools import cache

import numpy as np
from PIL import Image

from diffusers_flax.evaluation.metrics import METRICS, mask_metrics, pixel_metrics, ssim
from diffusers_flax.evaluation.perceptual import Dino, Lpips, centred
from diffusers_flax.evaluation.protocols import PROTOCOLS, metrics_of
from diffusers_flax.generating.clip import Clip, cosine

FEATURES = ("clip", "dino")  # networks whose metrics are cosines of features


class ResultScorer:
    """Metrics of results of held-out pairs.

    Args:
        pairs: list of HeldOutPair.
        metrics: names, of METRICS.
        sizes: (width, height) of each pair's edit, to which images are fitted before they are
            compared; None: results are resized (bicubic) to the other image's size, as in papers.
        clip, dino, lpips: Clip, Dino and Lpips, each None if no metric needs it.
    """

    def __init__(self, pairs, metrics, sizes=None, clip=None, dino=None, lpips=None):
        self.pairs, self.metrics, self._sizes = pairs, metrics, sizes
        self._clip, self._dino, self._lpips = clip, dino, lpips
        self._parts = sorted({part for pair in pairs for part in pair.parts})
        self._has_masks = sizes is not None and any(pair.mask is not None for pair in pairs)
        self._feature_of_pair = cache(self._feature_of_pair)

    def measure(self, place, image):
        """Metrics of a result.

        Args:
            place: index of its pair.
            image: PIL image.

        Returns:
            {metric and part's suffix: float}, NaN where it is not defined or where the pair is not
            of the part.
        """
        if not self.metrics:  # only a judge scores
            return {}
        pair, size = self.pairs[place], self._sizes and self._sizes[place]
        values = self._distances(pair, size, image)
        names = [name for name in self.metrics if METRICS[name].network in FEATURES]
        networks = {METRICS[name].network for name in names}
        encoded = {network: self._encode(network, image) for network in networks}
        for name in names:
            values[name] = self._similarity(name, place, encoded[METRICS[name].network])
        return {
            f"{name}{part}": value if part in pair.parts else np.nan
            for part in self._parts
            for name, value in values.items()
        }

    def _distances(self, pair, size, image):
        """{metric: value} of the metrics that compare pixels."""
        original, edited = pair.decoded("original", size), pair.decoded("edited", size)
        values = dict.fromkeys(METRICS, np.nan)
        values |= pixel_metrics(as_floats(resized(image, original.size)), as_floats(original))
        if edited is not None:
            to_input, result = values["l1_to_input"], resized(image, edited.size)
            source = resized(original, edited.size)
            values |= pixel_metrics(*map(as_floats, (result, source, edited)))
            values["l1_to_input"] = to_input  # at the size of the input
            values["ssim"] = ssim(result, edited) if "ssim" in self.metrics else np.nan
            values["lpips"] = self._lpips.distance(result, edited) if self._lpips else np.nan
        wanted = {x: values[x] for x in self.metrics if METRICS[x].network not in FEATURES}
        if self._has_masks:
            mask = pair.decoded_mask(size)
            wanted |= mask_metrics(
                None if mask is None else np.asarray(mask),
                *(None if x is None else as_floats(x) for x in (image, original, edited)),
            )
        return wanted

    def _similarity(self, name, place, result):
        """The value of a metric that is a cosine of features; result: its feature (1, D)."""
        network, needs = METRICS[name].network, METRICS[name].needs
        if any(getattr(self.pairs[place], what) is None for what in needs):
            return np.nan
        other, *after = (
            self._feature_of_pair(network, what, place) for what in needs or ("original",)
        )
        if name == "direction_similarity":
            before = self._feature_of_pair(network, "original", place)
            return cosine(result - before, after[0] - other).item()
        return cosine(result, other).item()

    def _encode(self, network, image):
        """The feature (1, D) of a PIL image; papers crop it as OpenAI's CLIP does."""
        if network == "dino":
            return self._dino.image_features([image])
        if self._sizes is None:
            image = centred(image, self._clip.side, self._clip.side)
        return self._clip.image_features([image])

    def _feature_of_pair(self, network, what, place):
        """The feature (1, D) of an image or a caption of a pair."""
        if what.endswith("caption"):
            return self._clip.text_features([getattr(self.pairs[place], what)])
        size = self._sizes and self._sizes[place]
        return self._encode(network, self.pairs[place].decoded(what, size))


def make_scorer(pairs, sizes, config):
    """The ResultScorer for the metrics of --protocol and --metrics.

    sizes: (width, height) of each edit; config: Config of evaluate_edits.py.
    """
    metrics = metrics_of(config)
    networks = {METRICS[name].network for name in metrics}
    return ResultScorer(
        pairs,
        metrics,
        None if PROTOCOLS[config.protocol].is_benchmark else sizes,
        Clip(config.clip_model) if "clip" in networks else None,
        Dino(config.dino_model) if "dino" in networks else None,
        Lpips() if "lpips" in networks else None,
    )


def resized(image, size):
    """A PIL image of a size (width, height), scaled bicubically if it has another."""
    return image if image.size == size else image.resize(size, Image.Resampling.BICUBIC)


def as_floats(image):
    """The pixels of a PIL image in [0, 1], float32 (H, W, 3)."""
    return np.asarray(image, np.float32) / 255
