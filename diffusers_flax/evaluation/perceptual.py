"""DINO and LPIPS, networks of PyTorch that compare images.

    dino = Dino("facebook/dino-vits16")
    similarity = cosine(*dino.image_features([result, truth]))
    distance = Lpips().distance(result, truth)

PyTorch computes on its GPU if it has one, else on the CPU, in float32.

Source: DINO (arXiv 2104.14294); LPIPS (arXiv 1801.03924), section 3.
"""

from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image

# What the MagicBrush evaluation gives DINO: scaled to 256 pixels, cropped to 224, normalised by
# these constants of ImageNet.
DINO_RESIZE, DINO_CROP = 256, 224
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# Of LPIPS, version 0.1, for images in [-1, 1]
LPIPS_SHIFT, LPIPS_SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)
ALEXNET = "https://download.pytorch.org/models/alexnet-owt-7be5be79.pth"
# Convolutions of AlexNet: number in the file, stride, padding; before two of them it pools.
ALEXNET_LAYERS = ((0, 4, 2), (3, 1, 2), (6, 1, 1), (8, 1, 1), (10, 1, 1))
POOLED = (3, 6)


@contextmanager
def exact_inference():
    """Context in which PyTorch computes in full float32; gives its GPU, else its CPU."""
    import torch  # seconds to import

    with torch.inference_mode(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield torch.device("cuda" if torch.cuda.is_available() else "cpu")


def centred(image, shorter, side):
    """The centre of a PIL image, RGB: its shorter side scaled (bicubic), then cropped.

    Sizes and places are rounded as by torchvision's Resize and CenterCrop, in which the programs of
    papers differ from transformers by a pixel.

    Args:
        image: PIL image.
        shorter: pixels of the shorter side before the crop.
        side: pixels of the square.
    """
    size = [shorter * length // min(image.size) for length in image.size]
    left, top = (round((length - side) / 2) for length in size)
    image = image.convert("RGB").resize(size, Image.Resampling.BICUBIC)
    return image.crop((left, top, left + side, top + side))


class Dino:
    """A ViT that DINO trained; its feature of an image is the class token after the last norm.

    Args:
        name: directory or hub id, in the layout of transformers.
    """

    def __init__(self, name):
        from transformers import ViTModel

        model = ViTModel.from_pretrained(name, add_pooling_layer=False, dtype="float32")
        self._model = model.eval()

    def image_features(self, images):
        """Features of PIL images, at least one, float32 (n, D), not normalised.

        Source: image_eval.py of github.com/OSU-NLP-Group/MagicBrush.
        """
        import torch

        images = np.stack([centred(image, DINO_RESIZE, DINO_CROP) for image in images])
        pixels = (images.astype(np.float32) / 255 - IMAGENET_MEAN) / IMAGENET_STD
        pixels = torch.from_numpy(pixels.transpose(0, 3, 1, 2).astype(np.float32))
        with exact_inference() as device:
            output = self._model.to(device)(pixels.to(device))
        return output.last_hidden_state[:, 0].cpu().numpy()


class Lpips:
    """LPIPS with AlexNet, version 0.1: the package's weights on the features of PyTorch's AlexNet.

    The package lpips has the weights of the layers, 6 KB. Its own program needs torchvision, which
    has to be of PyTorch's build; these few convolutions need none.

    Raises:
        ValueError: the package is missing.
    """

    def __init__(self):
        import torch

        package = find_spec("lpips")
        if package is None:
            raise ValueError(
                "--metrics lpips needs the package lpips: pip install --no-deps -r "
                "requirements-metrics.txt"
            )
        file = Path(package.submodule_search_locations[0], "weights", "v0.1", "alex.pth")
        weights = torch.load(file, map_location="cpu", weights_only=True)
        alexnet = torch.hub.load_state_dict_from_url(
            ALEXNET, map_location="cpu", check_hash=True, weights_only=True
        )
        self._layers = []  # kernel, bias, weight of the differences
        for i, (number, *_) in enumerate(ALEXNET_LAYERS):
            names = f"features.{number}.weight", f"features.{number}.bias"
            layer = *(alexnet[name] for name in names), weights[f"lin{i}.model.1.weight"]
            self._layers.append(layer)

    def distance(self, a, b):
        """LPIPS of two PIL images of one size, at least 31 pixels."""
        import torch
        import torch.nn.functional as F

        images = np.stack([np.asarray(x.convert("RGB"), np.float32) / 127.5 - 1 for x in (a, b)])
        images = (images - np.float32(LPIPS_SHIFT)) / np.float32(LPIPS_SCALE)
        total = 0.0
        with exact_inference() as device:
            x = torch.from_numpy(images).to(device).permute(0, 3, 1, 2)
            for (number, stride, padding), layer in zip(ALEXNET_LAYERS, self._layers):
                kernel, bias, weight = (tensor.to(device) for tensor in layer)
                if number in POOLED:
                    x = F.max_pool2d(x, 3, 2)
                x = F.relu(F.conv2d(x, kernel, bias, stride, padding))
                unit = x / (x.square().sum(1, keepdim=True).sqrt() + 1e-10)
                change = (unit[:1] - unit[1:]).square()
                total += F.conv2d(change, weight).mean().item()
        return total
