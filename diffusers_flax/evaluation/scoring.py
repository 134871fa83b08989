"""The metrics of results of held-out pairs.

scorer = ResultScorer(pairs, ["l1", "dino"], sizes, dino=Dino("facebook/dino-vits16"))
values = scorer.measure([0, 1], [image, other_image])
"""

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
        self._has_masks = sizes is not None and any(pair.mask is not None for pair in pairs)
        self._features = {}  # {(network, field of a pair): (n, D)}

    def measure(self, places, images):
        """Metrics of results.

        Args:
            places: index of each result's pair, int.
            images: results, PIL images.

        Returns:
            {metric and part's suffix: list of floats}, NaN where it is not defined or where the
            pair is not of the part.
        """
        distances = [self._distances(place, image) for place, image in zip(places, images)]
        found = {name: [values[name] for values in distances] for name in distances[0]}
        results = {}
        for name in self.metrics:
            if (network := METRICS[name].network) in FEATURES:
                if network not in results:
                    results[network] = self._encode(network, images)
                found[name] = self._similarities(name, network, places, results[network])
        return {
            f"{name}{part}": [
                value if part in self.pairs[place].parts else np.nan
                for place, value in zip(places, values)
            ]
            for part in sorted({part for pair in self.pairs for part in pair.parts})
            for name, values in found.items()
        }

    def _distances(self, place, image):
        """{metric: value} of the metrics that compare pixels, of one result."""
        pair, size = self.pairs[place], self._sizes and self._sizes[place]
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

    def _similarities(self, name, network, places, results):
        """The values of a metric that is a cosine of features; results: features (n, D)."""

        def features(what):
            return self._features_of(network, what)[places]

        if name == "direction_similarity":
            captions = features("edited_caption") - features("original_caption")
            return cosine(results - features("original"), captions).tolist()
        (other,) = METRICS[name].needs or ("original",)
        return cosine(results, features(other)).tolist()

    def _encode(self, network, images):
        """Features (n, D) of PIL images; papers crop them as OpenAI's CLIP does."""
        if network == "dino":
            return self._dino.image_features(images)
        if self._sizes is None:
            images = [centred(image, self._clip.side, self._clip.side) for image in images]
        return self._clip.image_features(images)

    def _features_of(self, network, what):
        """Features (n, D) of all pairs' images or captions, NaN where there is none; kept."""
        if (network, what) not in self._features:
            rows = [self._feature(network, what, place) for place in range(len(self.pairs))]
            dim = max((len(row) for row in rows if row is not None), default=1)
            empty = np.full(dim, np.nan, np.float32)
            rows = [empty if row is None else row for row in rows]
            self._features[network, what] = np.stack(rows)
        return self._features[network, what]

    def _feature(self, network, what, place):
        """The feature (D,) of a pair's image or caption; None if it has none."""
        if what.endswith("caption"):
            text = getattr(self.pairs[place], what)
            return None if text is None else self._clip.text_features([text])[0]
        image = self.pairs[place].decoded(what, self._sizes and self._sizes[place])
        return None if image is None else self._encode(network, [image])[0]


def make_scorer(pairs, sizes, config):
    """The ResultScorer for the metrics of --protocol and --metrics; None if only a judge scores.

    sizes: (width, height) of each edit; config: Config of evaluate_edits.py.
    """
    metrics = metrics_of(config)
    networks = {METRICS[name].network for name in metrics}
    if not metrics:
        return None
    return ResultScorer(
        pairs,
        metrics,
        None if PROTOCOLS[config.protocol].is_benchmark else sizes,
        Clip(config.clip_model, config.clip_backend) if "clip" in networks else None,
        Dino(config.dino_model) if "dino" in networks else None,
        Lpips() if "lpips" in networks else None,
    )


def resized(image, size):
    """A PIL image of a size (width, height), scaled bicubically if it has another."""
    return image if image.size == size else image.resize(size, Image.Resampling.BICUBIC)


def as_floats(image):
    """The pixels of a PIL image in [0, 1], float32 (H, W, 3)."""
    return np.asarray(image, np.float32) / 255
