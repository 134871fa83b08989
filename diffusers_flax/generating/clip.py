"""CLIP of a directory or hub id: features of images and texts.

clip = Clip("openai/clip-vit-large-patch14")
similarity = cosine(clip.image_features([image]), clip.text_features(["a cat"]))
"""

from functools import partial

import jax
import numpy as np

from diffusers_flax.loading.files import read_json
from diffusers_flax.loading.hub import fetch_directory, fetch_file
from diffusers_flax.loading.tokenizer import TOKENIZER_FILES
from diffusers_flax.loading.weights import find_weights
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
        backend: "flax", or "torch", PyTorch on the CPU.
        devices: of JAX, where "flax" computes features; None: the first one.

    Raises:
        ValueError: it cannot be read, or is not a CLIP model.
    """

    def __init__(self, name, backend="flax", devices=None):
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
            self.side = (config.get("vision_config") or {}).get("image_size", 224)  # of its images
            encoders = torch_encoders if backend == "torch" else partial(flax_encoders, devices)
            self._encode_images, self._encode_texts, self.dim, self._length = encoders(name)
        except Exception as error:  # the libraries raise errors of many types
            raise ValueError(
                f"--clip_model {name} cannot be opened: {one_line(error, 400)}; name a directory "
                'or hub id of a CLIP model, or "" to leave CLIP out'
            ) from error

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

        encode = partial(self._encode_images, device)
        return self._features(encode, images, batch_size, prepare)

    def text_features(self, texts, batch_size=64):
        """Features of texts, float32 (n, D), each of length 1; tokens past the 77th are cut."""
        options = {"padding": "max_length", "truncation": True, "max_length": self._length}

        def prepare(batch):
            inputs = self.processor(text=batch, **options)
            return {name: np.stack(x) for name, x in inputs.items()}

        return self._features(partial(self._encode_texts, 0), texts, batch_size, prepare)

    def _features(self, encode, items, batch_size, prepare):
        """Features of items, at most batch_size at once.

        A batch is padded to a power of two, so that the encoder compiles for few sizes.
        """
        rows = [np.zeros((0, self.dim), np.float32)]
        for start in range(0, len(items), batch_size):
            batch = list(items[start : start + batch_size])
            padding = min(batch_size, 1 << (len(batch) - 1).bit_length()) - len(batch)
            features = encode(**prepare(batch + batch[-1:] * padding))[: len(batch)]
            rows.append(features / np.linalg.norm(features, axis=-1, keepdims=True))
        return np.concatenate(rows)


def flax_encoders(devices, name):
    """CLIP on devices of JAX.

    Args:
        devices: see Clip.
        name: directory or hub id.

    Returns:
        ((number of the device, pixel_values=) -> features, likewise with input_ids= and
        attention_mask=, size of the features, longest text in tokens): NumPy arrays, features not
        normalised.
    """
    model, params = FlaxCLIPModel.from_pretrained(name, _do_init=False)
    devices, params = devices or jax.local_devices()[:1], model.to_fp32(params)
    copies = [jax.device_put(params, device) for device in devices]

    def compiled(encode):
        @jax.jit
        def features(params, inputs):
            # TPUs and GPUs would otherwise multiply float32 matrices with fewer bits.
            with jax.default_matmul_precision("highest"):
                return encode(**inputs, params=params)

        return lambda device, **inputs: np.asarray(features(copies[device], inputs))

    encoders = compiled(model.get_image_features), compiled(model.get_text_features)
    module = model.module
    return *encoders, module.projection_dim, module.text_config["max_position_embeddings"]


def torch_encoders(name):
    """CLIP of PyTorch transformers on the CPU; results as of flax_encoders."""
    import torch
    from transformers import CLIPModel

    fetch = partial(fetch_file, name, subfolder=None, revision=None)
    folder = find_weights(fetch, "model", None, True, name)[0].parent
    model = CLIPModel.from_pretrained(folder, dtype=torch.float32).eval()

    def on_cpu(encode):
        @torch.inference_mode()
        def features(device, **inputs):
            inputs = {name: torch.from_numpy(x) for name, x in inputs.items()}
            return encode(**inputs).pooler_output.numpy()

        return features

    encoders = on_cpu(model.get_image_features), on_cpu(model.get_text_features)
    length = model.config.text_config.max_position_embeddings
    return *encoders, model.config.projection_dim, length
