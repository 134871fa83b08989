"""The demo's photographs, and the edits that it teaches.

The photographs ship with scikit-image, scikit-learn and matplotlib, so nothing is downloaded.
HELD_OUT is for testing alone: neither the base model nor the fine-tuning sees these photographs.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from diffusers_flax.data.images import load_image

TRAINING = {  # file: what a caption calls it
    "skimage/data/astronaut.png": "an astronaut",
    "skimage/data/rocket.jpg": "a rocket",
    "skimage/data/hubble_deep_field.jpg": "galaxies",
    "skimage/data/motorcycle_left.png": "a motorcycle",
    "skimage/data/motorcycle_right.png": "a motorcycle",
    "skimage/data/ihc.png": "stained cells",
    "skimage/data/retina.jpg": "the inside of an eye",
    "skimage/data/camera.png": "a man with a camera",
    "skimage/data/coins.png": "old coins",
    "skimage/data/brick.png": "a brick wall",
    "skimage/data/grass.png": "grass",
    "skimage/data/gravel.png": "gravel",
    "skimage/data/moon.png": "the moon",
    "sklearn/datasets/images/flower.jpg": "a flower",
    "matplotlib/mpl-data/sample_data/grace_hopper.jpg": "an officer",
}
HELD_OUT = {
    "skimage/data/chelsea.png": "a cat",
    "skimage/data/coffee.png": "a cup of coffee",
    "sklearn/datasets/images/china.jpg": "a temple",
}


class SyntheticEdit(NamedTuple):
    """An instruction, a caption of the edited image, and the edit itself.

    apply takes and returns an image, (H, W, 3) float32 in [0, 1]; if has_reference, it also takes a
    reference image. weight is the edit's frequency in the training pairs, relative to other
    edits; edits that rearrange colours are learned slowly.
    """

    instruction: str
    caption: str
    apply: Callable[..., np.ndarray]
    weight: int = 1
    has_reference: bool = False


def _blend(colour, share):
    return lambda x: (1 - share) * x + share * np.asarray(colour, np.float32)


def _frame(x, reference=None):
    framed, width = np.ones_like(x) if reference is None else reference.copy(), len(x) // 8
    framed[width:-width, width:-width] = x[width:-width, width:-width]
    return framed


def _use_colours(x, reference):
    """x with the reference's mean and standard deviation of red, green and blue."""
    normal = (x - x.mean((0, 1))) / (x.std((0, 1)) + 0.01)
    return np.clip(normal * reference.std((0, 1)) + reference.mean((0, 1)), 0, 1)


EDITS = (
    SyntheticEdit(
        "make it black and white",
        "a black and white photo of {}",
        lambda x: np.repeat(x @ np.float32([[0.299], [0.587], [0.114]]), 3, axis=-1),
        weight=3,
    ),
    SyntheticEdit(
        "invert the colors", "a photo of {} with inverted colors", lambda x: 1 - x, weight=2
    ),
    SyntheticEdit("give it a red tint", "a photo of {} with a red tint", _blend((1, 0, 0), 0.5)),
    SyntheticEdit(
        "give it a green tint", "a photo of {} with a green tint", _blend((0, 1, 0), 0.5)
    ),
    SyntheticEdit(
        "turn day into night", "a photo of {} at night", lambda x: x * np.float32((0.2, 0.25, 0.45))
    ),
    SyntheticEdit("cover it in fog", "a photo of {} covered in fog", _blend((0.9, 0.9, 0.9), 0.7)),
    SyntheticEdit("put a white frame around it", "a photo of {} in a white frame", _frame),
    SyntheticEdit(
        "swap red and blue",
        "a photo of {} with red and blue swapped",
        lambda x: x[..., ::-1],
        weight=3,
    ),
)
ALL_EDITS = (
    *EDITS,
    SyntheticEdit(
        "use the colors of the second image",
        "a photo of {} in other colors",
        _use_colours,
        has_reference=True,
    ),
    SyntheticEdit(
        "frame it with the second image", "a photo of {} in a photo", _frame, has_reference=True
    ),
)


def load_photographs(files):
    """RGB images of files, each PACKAGE/PATH as in TRAINING."""
    import matplotlib
    import skimage
    import sklearn

    packages = {
        module.__name__: Path(module.__file__).parent for module in (matplotlib, skimage, sklearn)
    }
    images = []
    for file in files:
        package, _, rest = file.partition("/")
        images.append(load_image(packages[package] / rest))
    return images


def random_box(rng, image, size, smallest=0.0):
    """A random square of an image: (left, top, right, bottom), pixels.

    Args:
        rng: numpy Generator.
        image: PIL image.
        size: least side of the square, at most the image's shorter side.
        smallest: least side as a fraction of the image's shorter side.
    """
    shorter = min(image.size)
    side = int(np.exp(rng.uniform(np.log(max(size, smallest * shorter)), np.log(shorter))))
    left = int(rng.integers(image.width - side + 1))
    top = int(rng.integers(image.height - side + 1))
    return left, top, left + side, top + side


def resize_box(image, box, size):
    """A square box of a PIL image, resized: (size, size, 3) float32 in [0, 1]."""
    crop = image.resize((size, size), Image.Resampling.LANCZOS, box=box)
    return np.asarray(crop, np.float32) / 255


def random_crop(rng, image, size, smallest=0.0):
    """A random square of an image, resized; arguments of random_box, result of resize_box."""
    return resize_box(image, random_box(rng, image, size, smallest), size)
