"""The metrics of edits: distances between images, CLIP similarities.

    metrics = pixel_metrics(result, original, edited)
    metrics |= clip_metrics(clip.image_features(images), ...)

Source: InstructPix2Pix (arXiv 2211.09800), section 4.1; MagicBrush (arXiv 2306.10012), section 4.
"""

import numpy as np

from diffusers_flax.generating.clip import cosine

PIXEL_METRICS = ("l1", "mse", "error_ratio", "l1_to_input")
# The same inside and outside of a mask.
MASK_METRICS = tuple(f"{name}_{side}" for side in ("inside", "outside") for name in PIXEL_METRICS)
CLIP_METRICS = (
    *("image_similarity", "direction_similarity"),
    *("text_similarity", "truth_similarity"),
)


def pixel_metrics(result, original, edited=None):
    """Distances between images of one size.

    Args:
        result, original, edited: float (H, W, 3) in [0, 1]; edited None: unknown.

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
    """pixel_metrics of the pixels inside and outside of a mask, by the names of MASK_METRICS.

    Args:
        mask: bool (H, W).
        result, original, edited: as for pixel_metrics.

    Returns:
        {name: value}, NaN for a side without pixels.
    """
    metrics = dict.fromkeys(MASK_METRICS, np.nan)
    for side, where in (("inside", mask), ("outside", ~mask)):
        if where.any():
            pixels = (None if x is None else x[where] for x in (result, original, edited))
            metrics |= {f"{name}_{side}": x for name, x in pixel_metrics(*pixels).items()}
    return metrics


def clip_metrics(result, original, edited, original_text, edited_text):
    """CLIP similarities of edits.

    Args:
        result, original, edited: image features (n, D), each of length 1; NaN where unknown.
        original_text, edited_text: text features of the captions, likewise.

    Returns:
        {name: (n,)}, NaN where a feature is unknown: "image_similarity" of result and original,
        "direction_similarity" of the changes of image and caption: cosine of the differences of
        normalised features; "text_similarity" of result and
        caption of the edited image; "truth_similarity" of result and edited image.

    Source: InstructPix2Pix (arXiv 2211.09800), section 4.1; StyleGAN-NADA (arXiv 2108.00946).
    """
    return {
        "image_similarity": cosine(original, result),
        "direction_similarity": cosine(result - original, edited_text - original_text),
        "text_similarity": cosine(result, edited_text),
        "truth_similarity": cosine(result, edited),
    }


def features_or_nan(encode, items, dim):
    """Features (n, dim) of a list of items; rows of NaN where an item is None."""
    known = [i for i, item in enumerate(items) if item is not None]
    features = np.full((len(items), dim), np.nan, np.float32)
    if known:
        features[known] = encode([items[i] for i in known])
    return features
