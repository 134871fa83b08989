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

from diffusers_flax.messages import one_line

# What the MagicBrush evaluation gives DINO: scaled to 256 pixels, cropped to 224, normalised by
# these constants of ImageNet.
DINO_RESIZE, DINO_CROP = 256, 224
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# Of LPIPS, version 0.1, for images in [-1, 1]
LPIPS_SHIFT, LPIPS_SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)
ALEXNET = "https://download.pytorch.org/models/alexnet-owt-7be5be79.pth"
# Convolutions of AlexNet: number in the file, channels, kernel, stride, padding, pooled before
ALEXNET_LAYERS = (
    (0, 3, 64, 11, 4, 2, False),
    (3, 64, 192, 5, 1, 2, True),
    (6, 192, 384, 3, 1, 1, True),
    (8, 384, 256, 3, 1, 1, False),
    (10, 256, 256, 3, 1, 1, False),
)
LEAST_LPIPS_SIDE = 31  # pixels; smaller images leave nothing after the two poolings


@contextmanager
def exact_inference():
    """Context in which PyTorch computes without gradients and, on a GPU, in full float32."""
    import torch  # seconds to import

    with torch.inference_mode(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


def torch_device():
    """PyTorch's GPU, else its CPU."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


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


def dino_pixels(image):
    """What DINO sees of a PIL image, float32 (3, 224, 224).

    Source: image_eval.py of github.com/OSU-NLP-Group/MagicBrush.
    """
    image = centred(image, DINO_RESIZE, DINO_CROP)
    pixels = (np.asarray(image, np.float32) / 255 - IMAGENET_MEAN) / IMAGENET_STD
    return pixels.transpose(2, 0, 1).astype(np.float32)


class Dino:
    """A ViT that DINO trained; its feature of an image is the class token after the last norm.

    Args:
        name: directory or hub id, in the layout of transformers.

    Raises:
        ValueError: it cannot be read, or is not a ViT for images of 224 pixels.
    """

    def __init__(self, name):
        from transformers import ViTModel

        try:
            model, info = ViTModel.from_pretrained(
                name, add_pooling_layer=False, dtype="float32", output_loading_info=True
            )
            config = model.config
            if info["missing_keys"] or (config.model_type, config.image_size) != ("vit", DINO_CROP):
                raise ValueError("it is no ViT for images of 224 pixels")
        except Exception as error:  # the libraries raise errors of many types
            raise ValueError(
                f"--dino_model {name} cannot be opened: {one_line(error, 300)}; name a directory "
                'or hub id of a DINO ViT/16, or "" to leave DINO out'
            ) from error
        self._model = model.eval().to(torch_device())

    def image_features(self, images):
        """Features of PIL images, at least one, float32 (n, D), not normalised."""
        import torch

        pixels = torch.from_numpy(np.stack([dino_pixels(image) for image in images]))
        with exact_inference():
            output = self._model(pixels.to(self._model.device))
        return output.last_hidden_state[:, 0].cpu().numpy()


class Lpips:
    """LPIPS with AlexNet, version 0.1: the package's weights on the features of PyTorch's AlexNet.

    The package lpips has the weights of the layers, 6 KB. Its own program needs torchvision, which
    has to be of PyTorch's build; these few convolutions need none.

    Raises:
        ValueError: the package is missing, or AlexNet's weights can be neither found nor
            downloaded.
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
        try:
            alexnet = torch.hub.load_state_dict_from_url(
                ALEXNET, map_location="cpu", progress=False, check_hash=True, weights_only=True
            )
        except Exception as error:  # no network, or a damaged file
            raise ValueError(
                f"--metrics lpips needs AlexNet's weights ({one_line(error, 120)}); save {ALEXNET} "
                f"in {torch.hub.get_dir()}/checkpoints"
            ) from error
        self._device, self._layers = torch_device(), []  # (layer, weight of its differences)
        for i, (number, *sizes, is_pooled) in enumerate(ALEXNET_LAYERS):
            convolution = torch.nn.Conv2d(*sizes)
            names = {name: alexnet[f"features.{number}.{name}"] for name in ("weight", "bias")}
            convolution.load_state_dict(names)
            pool = [torch.nn.MaxPool2d(3, 2)] * is_pooled
            layer = torch.nn.Sequential(*pool, convolution, torch.nn.ReLU()).eval()
            weight = weights[f"lin{i}.model.1.weight"]
            self._layers.append((layer.to(self._device), weight.to(self._device)))

    def distance(self, a, b):
        """LPIPS of two PIL images of one size; NaN below 31 pixels."""
        import torch

        if min(a.size) < LEAST_LPIPS_SIDE:
            return np.nan
        images = np.stack([np.asarray(x.convert("RGB"), np.float32) / 127.5 - 1 for x in (a, b)])
        images = (images - np.float32(LPIPS_SHIFT)) / np.float32(LPIPS_SCALE)
        x, total = torch.from_numpy(images).to(self._device).permute(0, 3, 1, 2), 0.0
        with exact_inference():
            for layer, weight in self._layers:
                x = layer(x)
                unit = x / (x.square().sum(1, keepdim=True).sqrt() + 1e-10)
                change = (unit[:1] - unit[1:]).square()
                total += torch.nn.functional.conv2d(change, weight).mean().item()
        return total
