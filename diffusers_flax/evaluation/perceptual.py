"""Metrics of images by networks of PyTorch: DINO and LPIPS; and SSIM.

    dino = Dino("facebook/dino-vits16")
    similarity = cosine(*dino.image_features([result, truth]))
    distance = Lpips().distance(result, truth)

PyTorch computes on its GPU if it has one, else on the CPU, in float32.

Source: DINO (arXiv 2104.14294); LPIPS (arXiv 1801.03924), section 3; SSIM (Wang et al., 2004).
"""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image

from diffusers_flax.loading.files import read_json
from diffusers_flax.loading.hub import fetch_directory, fetch_file
from diffusers_flax.loading.weights import find_weights
from diffusers_flax.messages import one_line

INSTALL = "pip install --no-deps -r requirements-metrics.txt"
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
LEAST_SSIM_SIDE = 11  # pixels, the side of its window


def torch_device():
    """PyTorch's GPU, else its CPU.

    Raises:
        ValueError: PyTorch is not installed.
    """
    try:
        import torch  # seconds to import
    except ImportError as error:
        raise ValueError("DINO and LPIPS need PyTorch: pip install torch") from error
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
        device = torch_device()
        import torch
        from transformers import ViTModel

        try:
            config = read_json(fetch_directory(name, ("config.json",)) / "config.json")
            kind, size = config.get("model_type"), config.get("image_size")
            if (kind, size) != ("vit", DINO_CROP):
                raise ValueError(f"it is a model of type {kind} for images of {size} pixels")

            def fetch(file):
                return fetch_file(name, file, None, None)

            folder = find_weights(fetch, "model", None, True, name)[0].parent
            model, info = ViTModel.from_pretrained(
                folder, add_pooling_layer=False, dtype=torch.float32, output_loading_info=True
            )
            if info["missing_keys"]:
                raise ValueError(f"it lacks {sorted(info['missing_keys'])[0]} and others")
        except Exception as error:  # the libraries raise errors of many types
            reason = one_line(error, 300)
            if "couldn't connect" in reason:
                reason = "the hub cannot be reached, and its cache has no copy"
            raise ValueError(
                f"--dino_model {name} cannot be opened: {reason}; name a directory or hub id of "
                'a DINO ViT/16, or "" to leave DINO out'
            ) from error
        self.dim, self._device, self._model = config["hidden_size"], device, model.eval().to(device)

    def image_features(self, images, batch_size=16):
        """Features of PIL images, float32 (n, D), not normalised."""
        import torch

        rows = [np.zeros((0, self.dim), np.float32)]
        for start in range(0, len(images), batch_size):
            pixels = np.stack([dino_pixels(x) for x in images[start : start + batch_size]])
            with torch.inference_mode(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
                output = self._model(torch.from_numpy(pixels).to(self._device))
            rows.append(output.last_hidden_state[:, 0].cpu().numpy())
        return np.concatenate(rows)


class Lpips:
    """LPIPS with AlexNet, version 0.1: the package's weights on the features of PyTorch's AlexNet.

    The package lpips has the weights of the layers, 6 KB. Its own program needs torchvision, which
    has to be of PyTorch's build; these few convolutions need none.

    Raises:
        ValueError: the package is missing, or AlexNet's weights can be neither found nor
            downloaded.
    """

    def __init__(self):
        self._device = torch_device()
        import torch

        package = find_spec("lpips")
        if package is None:
            raise ValueError(f"--metrics lpips needs the package lpips: {INSTALL}")
        file = Path(package.submodule_search_locations[0], "weights", "v0.1", "alex.pth")
        try:
            weights = torch.load(file, map_location=self._device, weights_only=True)
            weights = [weights[f"lin{i}.model.1.weight"] for i in range(len(ALEXNET_LAYERS))]
        except Exception as error:
            raise ValueError(f"{file} cannot be read: {one_line(error, 200)}; {INSTALL}") from error
        self._layers = list(zip(self._alexnet(), weights))
        to_image = {"dtype": torch.float32, "device": self._device}
        self._shift, self._scale = (
            torch.tensor(x, **to_image)[None, :, None, None] for x in (LPIPS_SHIFT, LPIPS_SCALE)
        )

    def _alexnet(self):
        """[(layers from the features before)] of AlexNet, up to each activation."""
        import torch

        folder = Path(torch.hub.get_dir(), "checkpoints")
        try:
            found = torch.hub.load_state_dict_from_url(
                ALEXNET, str(folder), "cpu", progress=False, check_hash=True, weights_only=True
            )
            layers = []
            for number, inputs, outputs, kernel, stride, padding, is_pooled in ALEXNET_LAYERS:
                convolution = torch.nn.Conv2d(inputs, outputs, kernel, stride, padding)
                names = {name: found[f"features.{number}.{name}"] for name in ("weight", "bias")}
                convolution.load_state_dict(names)
                pool = [torch.nn.MaxPool2d(3, 2)] * is_pooled
                layers.append(torch.nn.Sequential(*pool, convolution, torch.nn.ReLU()))
        except Exception as error:  # no network, a damaged file, another network's weights
            raise ValueError(
                f"--metrics lpips needs AlexNet's weights ({one_line(error, 120)}); save {ALEXNET} "
                f"in {folder}"
            ) from error
        return [layer.to(self._device).eval() for layer in layers]

    def distance(self, a, b):
        """LPIPS of two PIL images of one size; NaN below 31 pixels."""
        import torch

        if min(a.size) < LEAST_LPIPS_SIDE:
            return np.nan
        images = np.stack([np.asarray(x.convert("RGB"), np.float32) / 127.5 - 1 for x in (a, b)])
        x, total = torch.from_numpy(images).to(self._device).permute(0, 3, 1, 2), 0.0
        with torch.inference_mode(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            x = (x - self._shift) / self._scale
            for layer, weight in self._layers:
                x = layer(x)
                unit = x / (x.square().sum(1, keepdim=True).sqrt() + 1e-10)
                change = (unit[:1] - unit[1:]).square()
                total += torch.nn.functional.conv2d(change, weight).mean().item()
        return total


def require_ssim():
    """Raise a ValueError if scikit-image is missing."""
    if find_spec("skimage") is None:
        raise ValueError("--metrics ssim needs scikit-image: pip install scikit-image")


def ssim(a, b):
    """SSIM of two PIL images of one size, mean over the channels of RGB; NaN below 11 pixels.

    Windows are Gaussian with a standard deviation of 1.5 pixels, K1 = 0.01, K2 = 0.03.

    Source: Wang et al., Image Quality Assessment (2004), section III.
    """
    from skimage.metrics import structural_similarity

    if min(a.size) < LEAST_SSIM_SIDE:
        return np.nan
    options = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False}
    a, b = (np.asarray(x.convert("RGB"), np.float64) for x in (a, b))
    return float(structural_similarity(a, b, data_range=255, channel_axis=-1, **options))
