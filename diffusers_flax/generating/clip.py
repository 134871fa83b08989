"""CLIP of a directory or hub id: features of images and texts.

clip = Clip("openai/clip-vit-large-patch14")
similarity = cosine(clip.image_features([image]), clip.text_features(["a cat"]))
"""

import jax
import numpy as np

from diffusers_flax.loading.files import read_json
from diffusers_flax.loading.hub import fetch_directory
from diffusers_flax.loading.tokenizer import TOKENIZER_FILES
from diffusers_flax.messages import one_line
from diffusers_flax.models.clip_similarities import FlaxCLIPModel

CLIP_FILES = ("config.json", "preprocessor_config.json", "processor_config.json", *TOKENIZER_FILES)


def cosine(a, b):
    """Cosine similarity of vectors (..., D); 0 where one of them is zero, as in PyTorch."""
    norms = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    return np.sum(a * b, axis=-1) / np.where(norms > 0, norms, 1)


class Clip:
    """A CLIP model in float32.

    Args:
        name: directory or hub id.
        devices: of JAX, which compute features; None: the first one.

    Raises:
        ValueError: it cannot be read, or is not a CLIP model.
    """

    def __init__(self, name, devices=None):
        from transformers import CLIPProcessor  # seconds to import

        try:
            folder = fetch_directory(name, CLIP_FILES)
            config = read_json(folder / "config.json")
            if config.get("model_type") != "clip":
                raise ValueError(f"it is a model of type {config.get('model_type')}")
            # Without its files, transformers silently makes a tokenizer without words.
            if not any((folder / file).exists() for file in ("tokenizer.json", "vocab.json")):
                raise ValueError("it has no tokenizer.json and no vocab.json")
            self.processor = CLIPProcessor.from_pretrained(folder)
            model, params = FlaxCLIPModel.from_pretrained(name, _do_init=False)
        except Exception as error:  # the libraries raise errors of many types
            raise ValueError(
                f"--clip_model {name} cannot be opened: {one_line(error, 400)}; name a directory "
                'or hub id of a CLIP model, or "" to leave CLIP out'
            ) from error
        self.side = (config.get("vision_config") or {}).get("image_size", 224)  # of its images
        self.dim = model.module.projection_dim
        self._length = model.module.text_config["max_position_embeddings"]
        params, devices = model.to_fp32(params), devices or jax.local_devices()[:1]
        self._params = [jax.device_put(params, device) for device in devices]
        self._encode_images = jax.jit(model.get_image_features)
        self._encode_texts = jax.jit(model.get_text_features)

    def image_features(self, images, batch_size=16, map=map, device=0):
        """Features of PIL images, float32 (n, D), each of length 1.

        The processor divides 8-bit values by 255, so the encoder gets [0, 1], shifted and scaled as
        it was trained.

        Args:
            images: list of PIL images.
            batch_size: images at once.
            map: of a pool of threads that prepare the images.
            device: number of the device that encodes them.
        """

        def prepare(batch):
            rows = map(lambda image: self.processor(images=[image]), batch)
            return {"pixel_values": np.concatenate([np.stack(x["pixel_values"]) for x in rows])}

        return self._features(self._encode_images, device, images, batch_size, prepare)

    def text_features(self, texts, batch_size=64):
        """Features of texts, float32 (n, D), each of length 1; tokens past the 77th are cut."""
        options = {"padding": "max_length", "truncation": True, "max_length": self._length}

        def prepare(batch):
            inputs = self.processor(text=batch, **options)
            return {name: np.stack(x) for name, x in inputs.items()}

        return self._features(self._encode_texts, 0, texts, batch_size, prepare)

    def _features(self, encode, device, items, batch_size, prepare):
        """Features of items, at most batch_size at once.

        A batch is padded to a power of two, so that the encoder compiles for few sizes.
        """
        rows = [np.zeros((0, self.dim), np.float32)]
        for start in range(0, len(items), batch_size):
            batch = list(items[start : start + batch_size])
            padding = min(batch_size, 1 << (len(batch) - 1).bit_length()) - len(batch)
            inputs = prepare(batch + batch[-1:] * padding)
            # TPUs and GPUs would otherwise multiply float32 matrices with fewer bits.
            with jax.default_matmul_precision("highest"):
                features = np.asarray(encode(**inputs, params=self._params[device]))[: len(batch)]
            rows.append(features / np.linalg.norm(features, axis=-1, keepdims=True))
        return np.concatenate(rows)
