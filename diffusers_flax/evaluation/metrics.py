"""The metrics of edits: distances between images, CLIP similarities, DINO, LPIPS, SSIM.

    scorer = ResultScorer(pairs, ["l1", "dino"], sizes, dino_model="facebook/dino-vits16")
    values = scorer.measure(0, image)

Source: InstructPix2Pix (arXiv 2211.09800), section 4.1; MagicBrush (arXiv 2306.10012), section 4.
"""

from functools import cache
from typing import NamedTuple

import numpy as np
from PIL import Image

from diffusers_flax.evaluation.perceptual import Dino, Lpips, centred
from diffusers_flax.generating.clip import Clip, cosine

PIXEL_METRICS = ("l1", "mse", "error_ratio", "l1_to_input")


class Metric(NamedTuple):
    """A metric of a result of a held-out pair."""

    heading: str  # in the report
    compared: tuple[str, ...] = ()  # of a cosine: fields of HeldOutPair whose features it takes
    network: str = ""  # "clip", "dino" or "lpips"; "": none


METRICS = {
    "dino": Metric("DINO", ("edited",), "dino"),
    "dino_to_input": Metric("DINO", ("original",), "dino"),
    "lpips": Metric("LPIPS", network="lpips"),
    "ssim": Metric("SSIM"),
    "l1": Metric("L1"),
    "mse": Metric("MSE"),
    "error_ratio": Metric("error ratio"),
    "l1_to_input": Metric("L1 to input"),
    "image_similarity": Metric("image sim.", ("original",), "clip"),
    "direction_similarity": Metric(
        "direction sim.", ("original", "original_caption", "edited_caption"), "clip"
    ),
    "text_similarity": Metric("text sim.", ("edited_caption",), "clip"),
    "truth_similarity": Metric("truth sim.", ("edited",), "clip"),
}


class ResultScorer:
    """Metrics of results of held-out pairs.

    Args:
        pairs: list of HeldOutPair.
        metrics: names, of METRICS.
        sizes: (width, height) of each pair's edit, to which images are fitted before they are
            compared; None: results are resized (bicubic) to the other image's size, as in papers.
        clip_model, dino_model: directories or hub ids, opened if a metric needs them.
    """

    def __init__(self, pairs, metrics, sizes=None, clip_model="", dino_model=""):
        networks = {METRICS[name].network for name in metrics}
        self.pairs, self.metrics, self._sizes = pairs, metrics, sizes or [None] * len(pairs)
        self._is_fitted = sizes is not None
        self._clip = Clip(clip_model) if "clip" in networks else None
        self._dino = Dino(dino_model) if "dino" in networks else None
        self._lpips = Lpips() if "lpips" in networks else None
        self._feature_of_pair = cache(self._feature_of_pair)

    def measure(self, place, image):
        """Metrics of a result.

        Args:
            place: index of its pair.
            image: PIL image.

        Returns:
            {metric and suffix of each part of the pair: float}, NaN where it is not defined.
        """
        if not self.metrics:  # only a judge scores
            return {}
        pair, size = self.pairs[place], self._sizes[place]
        original, edited = pair.decoded("original", size), pair.decoded("edited", size)
        known = dict.fromkeys(METRICS, np.nan)
        known |= pixel_metrics(as_floats(resized(image, original.size)), as_floats(original))
        if edited is not None:
            to_input, result = known["l1_to_input"], resized(image, edited.size)
            source = resized(original, edited.size)
            known |= pixel_metrics(*map(as_floats, (result, source, edited)))
            known["l1_to_input"] = to_input  # at the size of the input
            known["ssim"] = ssim(result, edited) if "ssim" in self.metrics else np.nan
            known["lpips"] = self._lpips.distance(result, edited) if self._lpips else np.nan
        encoded = {}  # {network: feature of the result}
        for name in self.metrics:
            network, compared = METRICS[name].network, METRICS[name].compared
            if compared and all(getattr(pair, what) is not None for what in compared):
                if network not in encoded:
                    encoded[network] = self._encode(network, image)
                result = encoded[network]
                others = [self._feature_of_pair(network, what, place) for what in compared]
                if name == "direction_similarity":
                    before, text_before, text_after = others
                    result, others = result - before, [text_after - text_before]
                known[name] = cosine(result, others[0]).item()
        values = {name: known[name] for name in self.metrics}
        if self._is_fitted and pair.mask is not None:
            mask = np.asarray(pair.decoded_mask(size))
            truth = None if edited is None else as_floats(edited)
            values |= mask_metrics(mask, as_floats(image), as_floats(original), truth)
        return {f"{name}{part}": x for part in pair.parts for name, x in values.items()}

    def _encode(self, network, image):
        """The feature (1, D) of a PIL image; papers crop it as OpenAI's CLIP does."""
        if network == "dino":
            return self._dino.image_features([image])
        if not self._is_fitted:
            image = centred(image, self._clip.side, self._clip.side)
        return self._clip.image_features([image])

    def _feature_of_pair(self, network, what, place):
        """The feature (1, D) of an image or a caption of a pair."""
        if what.endswith("caption"):
            return self._clip.text_features([getattr(self.pairs[place], what)])
        return self._encode(network, self.pairs[place].decoded(what, self._sizes[place]))


def resized(image, size):
    """A PIL image of a size (width, height), scaled bicubically if it has another."""
    return image if image.size == size else image.resize(size, Image.Resampling.BICUBIC)


def as_floats(image):
    """The pixels of a PIL image in [0, 1], float32 (H, W, 3)."""
    return np.asarray(image, np.float32) / 255


def pixel_metrics(result, original, edited=None):
    """Distances between images of one size.

    Args:
        result, original, edited: float (..., 3) in [0, 1]; edited None: unknown.

    Returns:
        {"l1": mean |result - edited|, "mse": mean (result - edited)^2, "error_ratio": l1 divided by
        the l1 of the original, so that copying it gives 1, "l1_to_input": mean
        |result - original|}. NaN where the edited image is needed and unknown, or is the original.

    Source: MagicBrush (arXiv 2306.10012), section 4.
    """
    metrics = dict.fromkeys(PIXEL_METRICS, np.nan)
    metrics["l1_to_input"] = float(np.abs(result - original).mean())
    if edited is not None:
        metrics["l1"] = float(np.abs(result - edited).mean())
        metrics["mse"] = float(np.square(result - edited).mean())
        if (change := float(np.abs(original - edited).mean())) > 0:
            metrics["error_ratio"] = metrics["l1"] / change
    return metrics


def mask_metrics(mask, result, original, edited=None):
    """pixel_metrics of the pixels inside and outside of a mask.

    Args:
        mask: bool (H, W).
        result, original, edited: as for pixel_metrics, (H, W, 3).

    Returns:
        {"l1_inside", "l1_outside", ...: value}, without those of a side that has no pixels.
    """
    metrics = {}
    for side, where in (("inside", mask), ("outside", ~mask)):
        if where.any():
            pixels = (None if x is None else x[where] for x in (result, original, edited))
            metrics |= {f"{name}_{side}": x for name, x in pixel_metrics(*pixels).items()}
    return metrics


def ssim(a, b):
    """SSIM of two PIL images of one size, at least 11 pixels, mean over the channels of RGB.

    Windows are Gaussian with a standard deviation of 1.5 pixels, K1 = 0.01, K2 = 0.03.

    Source: Wang et al., Image Quality Assessment (2004), section III.
    """
    from skimage.metrics import structural_similarity

    options = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False}
    a, b = (np.asarray(x.convert("RGB"), np.float64) for x in (a, b))
    return float(structural_similarity(a, b, data_range=255, channel_axis=-1, **options))
