"""Each protocol's numbers beside a second computation with PyTorch, Pillow and NumPy."""

import importlib.util
import io
import sys
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from evaluations import png
from helpers import photo
from PIL import Image
from tiny_models import make_tiny_clip, make_tiny_dino, save_random_alexnet
from transformers import CLIPModel, CLIPTokenizer, ViTModel

from diffusers_flax.evaluation.held_out import HeldOutPair
from diffusers_flax.evaluation.metrics import ResultScorer
from diffusers_flax.evaluation.perceptual import Lpips
from diffusers_flax.evaluation.protocols import PROTOCOLS

needs_lpips = pytest.mark.skipif(
    importlib.util.find_spec("lpips") is None, reason="needs requirements-metrics.txt"
)
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
SIZES = ((96, 64), (50, 90), (64, 64))  # of inputs and truths, width and height


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("networks")
    make_tiny_clip(folder / "clip")
    make_tiny_dino(folder / "dino")
    return folder


@pytest.fixture(scope="module")
def edits():
    """Pairs of three sizes, and results of another size and nearly the same shape."""
    pairs, results = [], []
    for i, (width, height) in enumerate(SIZES):
        images = photo(width, height, 10 * i), photo(width, height, 10 * i + 1)
        texts = {"original_caption": f"an apple {i}", "edited_caption": f"a red apple {i}"}
        pairs.append(HeldOutPair(i, f"{i}.png", "make it red", *map(png, images), **texts))
        results.append(photo(width // 2 + 1, height // 2, 10 * i + 2))
    return pairs, results


def cropped(image, resize, crop, mean, std):
    """torchvision's Resize (bicubic), CenterCrop, ToTensor and Normalize, on Pillow."""
    width, height = image.size
    if width <= height:
        size = resize, int(resize * height / width)
    else:
        size = int(resize * width / height), resize
    image = image.resize(size, Image.Resampling.BICUBIC)
    left, top = (round((side - crop) / 2.0) for side in size)
    pixels = np.asarray(image)[top : top + crop, left : left + crop] / 255
    return torch.tensor(((pixels - mean) / std).transpose(2, 0, 1)[None], dtype=torch.float32)


def by_hand(folder, pairs, results):
    """{metric: values} of results."""
    clip = CLIPModel.from_pretrained(folder / "clip").eval()
    tokenizer = CLIPTokenizer.from_pretrained(folder / "clip")
    vit = ViTModel.from_pretrained(folder / "dino", add_pooling_layer=False).eval()

    def clip_image(image):
        pixels = cropped(image, 32, 32, CLIP_MEAN, CLIP_STD)
        return F.normalize(clip.get_image_features(pixels).pooler_output)

    def clip_text(text):
        tokens = tokenizer([text], padding="max_length", max_length=77, return_tensors="pt")
        return F.normalize(clip.get_text_features(**tokens).pooler_output)

    def dino(image):
        pixels = cropped(image, 256, 224, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
        return vit(pixels).last_hidden_state[:, 0]

    found = []
    with torch.inference_mode():
        for pair, result in zip(pairs, results):
            before, truth = (
                Image.open(io.BytesIO(x)).convert("RGB") for x in (pair.original, pair.edited)
            )
            resized = np.asarray(result.resize(truth.size), np.float64) / 255  # bicubic
            to_truth, to_input = (
                resized - np.asarray(x, np.float64) / 255 for x in (truth, before)
            )
            texts = clip_text(pair.original_caption), clip_text(pair.edited_caption)
            values = {
                "l1": np.abs(to_truth).mean(),
                "mse": np.square(to_truth).mean(),
                "l1_to_input": np.abs(to_input).mean(),
                "truth_similarity": F.cosine_similarity(clip_image(result), clip_image(truth)),
                "image_similarity": F.cosine_similarity(clip_image(result), clip_image(before)),
                "text_similarity": F.cosine_similarity(clip_image(result), texts[1]),
                "direction_similarity": F.cosine_similarity(
                    clip_image(result) - clip_image(before), texts[1] - texts[0]
                ),
                "dino": F.cosine_similarity(dino(result), dino(truth)),
                "dino_to_input": F.cosine_similarity(dino(result), dino(before)),
            }
            found.append({name: float(value) for name, value in values.items()})
    return {name: [values[name] for values in found] for name in found[0]}


@pytest.mark.parametrize("name", ["magicbrush", "emu_edit"])
def test_a_protocol_equals_a_second_computation(folder, edits, name):
    """Resize, crop, normalisation and which images are compared, to 1e-4."""
    pairs, results = edits
    metrics = PROTOCOLS[name].metrics
    networks = {f"{name}_model": str(folder / name) for name in ("clip", "dino")}
    scorer = ResultScorer(pairs, metrics, **networks)
    found = [scorer.measure(i, result) for i, result in enumerate(results)]
    expected = by_hand(folder, pairs, results)
    assert all(values.keys() == metrics.keys() for values in found)
    for metric in metrics:
        values = [x[metric] for x in found]
        np.testing.assert_allclose(values, expected[metric], atol=1e-4, err_msg=metric)
        assert np.ptp(expected[metric]) > 1e-3, metric  # the tiny networks tell images apart


@needs_lpips
def test_lpips_of_the_package(tmp_path, monkeypatch):
    """The program of the package lpips with the same random AlexNet.

    It needs torchvision for AlexNet only, which is written out here.
    """
    weights = save_random_alexnet(tmp_path)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    layers = []
    for inputs, outputs, kernel, stride, padding, is_pooled in (
        (3, 64, 11, 4, 2, True),
        (64, 192, 5, 1, 2, True),
        (192, 384, 3, 1, 1, False),
        (384, 256, 3, 1, 1, False),
        (256, 256, 3, 1, 1, True),
    ):
        layers += [torch.nn.Conv2d(inputs, outputs, kernel, stride, padding), torch.nn.ReLU()]
        layers += [torch.nn.MaxPool2d(3, 2)] * is_pooled
    features = torch.nn.Sequential(*layers)
    features.load_state_dict({k.removeprefix("features."): x for k, x in weights.items()})
    torchvision = types.ModuleType("torchvision")
    alexnet = types.SimpleNamespace(features=features)
    torchvision.models = types.SimpleNamespace(alexnet=lambda pretrained: alexnet)
    monkeypatch.setitem(sys.modules, "torchvision", torchvision)
    try:
        import lpips

        theirs = lpips.LPIPS(net="alex", version="0.1", verbose=False)
    finally:
        for name in [x for x in sys.modules if x.split(".")[0] == "lpips"]:
            del sys.modules[name]

    ours = Lpips()
    for size in ((64, 64), (90, 33), (31, 31)):
        a, b = photo(*size, 0), photo(*size, 1)
        tensors = [
            torch.tensor(np.asarray(x) / 127.5 - 1, dtype=torch.float32).permute(2, 0, 1)[None]
            for x in (a, b)
        ]
        with torch.inference_mode():
            expected = theirs(*tensors).item()
        assert expected > 0.01
        assert ours.distance(a, b) == pytest.approx(expected, rel=1e-4, abs=1e-5)
        assert ours.distance(a, a) == 0
