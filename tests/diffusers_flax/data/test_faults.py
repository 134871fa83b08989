"""Which pairs count as unchanged, and which as near duplicates."""

import io

import numpy as np
import pytest
from helpers import slow
from PIL import Image, ImageDraw

from diffusers_flax.data.faults import FaultFinder, measure
from diffusers_flax.data.images import load_image


def encode(image, **options):
    file = io.BytesIO()
    image.save(file, **({"format": "JPEG", "quality": 90} | options))
    return file.getvalue()


def is_unchanged(original, edited):
    return "unchanged" in measure(original, edited).faults


@pytest.fixture(scope="module")
def photographs():
    """Five parts of a photograph, 512x512."""
    skimage = pytest.importorskip("skimage").__path__[0]
    image = load_image(f"{skimage}/data/chelsea.png")
    boxes = [
        (x, y, x + 200, y + 200) for x, y in ((0, 0), (120, 60), (240, 90), (60, 100), (200, 0))
    ]
    return [image.crop(box).resize((512, 512), Image.Resampling.LANCZOS) for box in boxes]


@pytest.mark.parametrize(("side", "side_2"), [(512, 512), (512, 256), (256, 256)])
def test_what_compression_and_scaling_do_is_no_change(photographs, side, side_2):
    for photograph in photographs:
        first = encode(photograph.resize((side, side)))
        second = photograph.resize((side_2, side_2))
        assert is_unchanged(first, encode(second, quality=70))
        assert is_unchanged(first, encode(second, format="WEBP", quality=70))


def test_small_edits_are_changes(photographs):
    rng = np.random.default_rng(0)
    for photograph in photographs:
        original = encode(photograph)
        for _ in range(4):
            ball, lips = photograph.copy(), np.asarray(photograph).astype(np.int16)
            x, y = rng.integers(0, 440, 2).tolist()
            ImageDraw.Draw(ball).ellipse((x, y, x + 28, y + 28), fill=(220, 40, 60))
            lips[y : y + 30, x : x + 60, 0] += 30  # redder
            for edited in (ball, Image.fromarray(lips.clip(0, 255).astype(np.uint8))):
                assert not is_unchanged(original, encode(edited))
        slightly_brighter = Image.fromarray((np.asarray(photograph) * 0.95 + 12).astype(np.uint8))
        assert not is_unchanged(original, encode(slightly_brighter))


def drawing(rng, largest):
    """An object on white: a shape of one colour around the middle, 256x256."""
    image = Image.new("RGB", (256, 256), "white")
    draw, colour = ImageDraw.Draw(image), tuple(rng.integers(0, 200, 3).tolist())
    radii = rng.uniform(largest / 3, largest, 8)
    angles = np.arange(8) * np.pi / 4
    points = 128 + radii[:, None] * np.stack([np.cos(angles), np.sin(angles)], 1)
    draw.polygon([tuple(point) for point in points.tolist()], fill=colour)
    return image


@pytest.mark.parametrize("largest", [15, *slow(40, 100)])
def test_different_objects_on_white_do_not_look_alike(photographs, largest):
    rng, finder = np.random.default_rng(1), FaultFinder()
    objects = [drawing(rng, largest) for _ in range(100)]
    pairs = [(image, image.convert("L").convert("RGB")) for image in objects]
    pairs += [(image, image.rotate(180)) for image in photographs]

    def found(pair, **options):
        measured = measure(*(encode(image, **options) for image in pair))
        return finder.find(measured, "same instruction")

    num_copies = sum("near_duplicate" in found(pair) for pair in pairs)
    assert num_copies <= 2
    for pair in pairs:
        scaled = [image.resize((240, 240), Image.Resampling.LANCZOS) for image in pair]
        assert "near_duplicate" in found(scaled, quality=80)
