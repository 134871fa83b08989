"""CLIP's scores of pairs of images with their captions.

Source: InstructPix2Pix (arXiv 2211.09800), section 3.1.2. The thresholds are the defaults of its
published code (dataset_creation/generate_img_dataset.py): scores of at least 0.2 for images and
captions, 0.7 for both images, 0.2 for the direction; of the pairs that reach them the 4 with the
largest direction are kept.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from diffusers_flax.data.archives.filtering import SCORES
from diffusers_flax.generating.clip import cosine

NUM_REMEMBERED = 1024  # captions whose features are kept


class Scores(NamedTuple):
    """Cosine similarities of CLIP's features of a pair. The names are columns of the shards."""

    clip_text_original: float  # of the first image and its caption
    clip_text_edited: float
    clip_image: float  # of both images
    clip_direction: float  # of the change of the images and the change of the captions


NO_SCORES = Scores(*[float("nan")] * len(Scores._fields))  # of NaN pixels, or without CLIP


def missed(scores, config):
    """The flags whose thresholds scores do not reach, a list of names; NaN misses."""
    return [
        flag
        for flag, columns in SCORES.items()
        if not all(getattr(scores, column) >= getattr(config, flag) for column in columns)
    ]


def scores_of_features(images, texts):
    """Scores of pairs.

    Args:
        images, texts: features of the original and the edited image and of their captions, float32
            (n, 2, D), each of length 1.

    Returns:
        List of Scores.
    """
    text, between = cosine(images, texts), cosine(images[:, 0], images[:, 1])
    direction = cosine(images[:, 1] - images[:, 0], texts[:, 1] - texts[:, 0])
    rows = np.column_stack([text, between, direction]).astype(np.float32)
    return [Scores(*row) for row in rows.tolist()]


class PairScorer:
    """Scores of pairs of captions.

    Args:
        clip: Clip; None: all scores are NO_SCORES.
        captions: list of Caption.
    """

    def __init__(self, clip, captions):
        self.clip, self.captions = clip, captions
        self.text_features = lru_cache(NUM_REMEMBERED)(self._text_features)

    def _text_features(self, place):
        """Features (2, D) of both captions of a line."""
        caption = self.captions[place]
        return self.clip.text_features([caption.input, caption.output])

    def __call__(self, images, places, device, map=map):
        """List of Scores of pairs.

        Args:
            images: PIL images, original and edited in turn.
            places: of the captions of each pair.
            device: number of the device of clip that encodes the images.
            map: of a pool of threads.
        """
        if self.clip is None:
            return [NO_SCORES] * len(places)
        texts = np.stack([self.text_features(place) for place in places])
        features = self.clip.image_features(images, len(images), map, device)
        return scores_of_features(features.reshape(len(places), 2, -1), texts)
