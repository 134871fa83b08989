"""The metrics of edits: distances between images, CLIP similarities, SSIM.

    values = pixel_metrics(result, original, edited)

Source: InstructPix2Pix (arXiv 2211.09800), section 4.1; MagicBrush (arXiv 2306.10012), section 4.
"""

from typing import NamedTuple

import numpy as np

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
