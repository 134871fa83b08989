"""CLIP's scores of pairs, against PyTorch's CLIP, and thresholds."""

import jax
import numpy as np
import pytest
import torch
from helpers import photo
from PIL import Image
from tiny_models import make_tiny_clip
from transformers import CLIPModel, CLIPProcessor

from diffusers_flax.generating.clip import Clip
from diffusers_flax.pairing.caption_lists import Caption
from diffusers_flax.pairing.pair_scores import (
    PairScorer,
    Scores,
    missed,
    scores_of_features,
)
from make_pairs import Config

CAPTIONS = [
    Caption(1, "a photo of the moon", "make it red", "a red photo of the moon"),
    Caption(2, "a flower", "at night", "a flower at night"),
    Caption(5, "it", "make it " + "red " * 30, "red it " * 40),  # longer than 77 tokens
]
PLACES = [0, 2, 1, 0, 2]
GOOD = Scores(0.25, 0.25, 0.75, 0.25)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny CLIP."""
    folder = tmp_path_factory.mktemp("clip") / "model"
    make_tiny_clip(folder)
    return folder


@pytest.fixture(scope="module")
def images():
    """Photographs of several sizes; pairs are alike."""
    images = []
    for number, size in enumerate([(64, 64), (48, 32), (33, 70), (64, 64), (100, 40)]):
        first = photo(*size, seed=number)
        second = photo(*size, seed=50 + number)
        images += [first, Image.blend(first, second, 0.3)]
    return images


def reference(folder, images, places):
    """Scores by transformers' CLIPModel and CLIPProcessor, and torch's cosine similarity."""
    model, processor = (
        CLIPModel.from_pretrained(folder).eval(),
        CLIPProcessor.from_pretrained(folder),
    )
    cosine, rows = torch.nn.functional.cosine_similarity, []
    for number, place in enumerate(places):
        pair, texts = images[2 * number : 2 * number + 2], list(CAPTIONS[place][1::2])
        inputs = processor(
            text=texts, images=pair, return_tensors="pt", padding=True, truncation=True
        )
        with torch.no_grad():
            found = model(**inputs)
        image, text = (
            torch.nn.functional.normalize(x) for x in (found.image_embeds, found.text_embeds)
        )
        both = cosine(image, text)
        direction = cosine(image[1] - image[0], text[1] - text[0], dim=0)
        rows.append([*both, cosine(image[0], image[1], dim=0), direction])
    return np.array(rows, np.float32)


def test_scores_are_those_of_pytorch(folder, images):
    """To 1e-5."""
    expected = reference(folder, images, PLACES)
    assert np.abs(expected).min() > 1e-3 and np.ptp(expected[:, 3]) > 0.01
    scorer = PairScorer(Clip(str(folder), devices=jax.local_devices()[:2]), CAPTIONS)
    found = scorer(images, PLACES, 0)
    assert np.allclose(found, expected, rtol=0, atol=1e-5)
    assert scorer(images, PLACES, 1) == found  # on another device
    assert scorer.text_features.cache_info().misses == 3


def test_closed_forms():
    """Vectors in a plane, whose angles are known."""
    unit = lambda *degrees: [[np.cos(np.radians(x)), np.sin(np.radians(x))] for x in degrees]  # noqa: E731
    images = np.float32([unit(0, 60), unit(0, 60), unit(10, 10)])
    texts = np.float32([unit(45, 105), unit(60, 0), unit(10, 20)])
    found = np.array(scores_of_features(images, texts))
    cos = lambda degrees: np.cos(np.radians(degrees))  # noqa: E731
    # The change from angle a to b has the angle (a + b) / 2 + 90, or - 90 if b is less than a.
    expected = [[cos(45), cos(45), 0.5, cos(45)], [0.5, 0.5, 0.5, -1], [1, cos(10), 1, 0]]
    assert np.allclose(found, expected, atol=1e-6)  # no change has the direction 0, not NaN


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        (GOOD, ""),
        (Scores(0.2, 0.2, 0.7, 0.2), ""),  # the thresholds of the paper
        (GOOD._replace(clip_text_original=0.19), "text"),
        (GOOD._replace(clip_text_edited=float("nan")), "text"),
        (GOOD._replace(clip_image=0.69), "image"),
        (GOOD._replace(clip_direction=float("nan")), "direction"),
        (Scores(-1, -1, -1, -1), "text image direction"),
    ],
)
def test_thresholds_that_scores_miss(scores, expected):
    assert missed(scores, Config("m")) == [f"min_clip_{name}" for name in expected.split()]
