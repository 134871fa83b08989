"""The metrics of edits: distances between images, CLIP similarities.

    clip = Clip("openai/clip-vit-large-patch14")
    metrics = pixel_metrics(result, original, edited)
    metrics |= clip_metrics(clip.image_features(images), ...)

Source: InstructPix2Pix (arXiv 2211.09800), section 4.1; MagicBrush (arXiv 2306.10012), section 4.
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

CLIP_FILES = (
    *("config.json", "preprocessor_config.json", "processor_config.json"),
    *TOKENIZER_FILES,
)
PIXEL_METRICS = ("l1", "mse", "error_ratio", "l1_to_input")
# The same inside and outside of a mask.
MASK_METRICS = tuple(f"{name}_{side}" for side in ("inside", "outside") for name in PIXEL_METRICS)
CLIP_METRICS = (
    *("image_similarity", "direction_similarity"),
    *("text_similarity", "truth_similarity"),
)


def pixel_metrics(result, original, edited=None):
    """Distances between images of one size.

    Args:
        result, original, edited: float (H, W, 3) in [0, 1]; edited None: unknown.

    Returns:
        {"l1": mean |result - edited|, "mse": mean (result - edited)^2, "error_ratio": l1 divided by
        the l1 of the original, so that copying it gives 1, "l1_to_input": mean
        |result - original|}. NaN where the edited image is needed and unknown, or is the original.

    Source: MagicBrush (arXiv 2306.10012), section 4.
    """
    metrics = dict.fromkeys(PIXEL_METRICS, np.nan)
    metrics["l1_to_input"] = float(np.abs(result - original).mean())
    if edited is not None:
        metrics["l1"] = float(np.abs(result - edited).mean())
        metrics["mse"] = float(np.square(result - edited).mean())
        if (change := float(np.abs(original - edited).mean())) > 0:
            metrics["error_ratio"] = metrics["l1"] / change
    return metrics


def mask_metrics(mask, result, original, edited=None):
    """pixel_metrics of the pixels inside and outside of a mask, by the names of MASK_METRICS.

    Args:
        mask: bool (H, W).
        result, original, edited: as for pixel_metrics.

    Returns:
        {name: value}, NaN for a side without pixels.
    """
    metrics = dict.fromkeys(MASK_METRICS, np.nan)
    for side, where in (("inside", mask), ("outside", ~mask)):
        if where.any():
            pixels = (None if x is None else x[where] for x in (result, original, edited))
            metrics |= {f"{name}_{side}": x for name, x in pixel_metrics(*pixels).items()}
    return metrics


def cosine(a, b):
    """Cosine similarity of vectors (..., D); 0 where one of them is zero, as in PyTorch."""
    norms = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    return np.sum(a * b, axis=-1) / np.where(norms > 0, norms, 1)


def clip_metrics(result, original, edited, original_text, edited_text):
    """CLIP similarities of edits.

    Args:
        result, original, edited: image features (n, D), each of length 1; NaN where unknown.
        original_text, edited_text: text features of the captions, likewise.

    Returns:
        {name: (n,)}, NaN where a feature is unknown: "image_similarity" of result and original,
        "direction_similarity" of the changes of image and caption: cosine of the differences of
        normalised features; "text_similarity" of result and
        caption of the edited image; "truth_similarity" of result and edited image.

    Source: InstructPix2Pix (arXiv 2211.09800), section 4.1; StyleGAN-NADA (arXiv 2108.00946).
    """
    return {
        "image_similarity": cosine(original, result),
        "direction_similarity": cosine(result - original, edited_text - original_text),
        "text_similarity": cosine(result, edited_text),
        "truth_similarity": cosine(result, edited),
    }


class Clip:
    """A CLIP model in float32.

    Args:
        name: directory or hub id.
        backend: "flax", on the first device of JAX, or "torch", PyTorch on the CPU.

    Raises:
        ValueError: it cannot be read, or is not a CLIP model.
    """

    def __init__(self, name, backend="flax"):
        from transformers import CLIPProcessor  # seconds to import

        remedy = 'name a directory or hub id of a CLIP model, or "" to leave CLIP out'
        try:
            folder = fetch_directory(name, CLIP_FILES)
            config = read_json(folder / "config.json")
            if config.get("model_type") != "clip":
                raise ValueError(f"it is a model of type {config.get('model_type')}")
            self.processor = CLIPProcessor.from_pretrained(folder)
            self.side = (config.get("vision_config") or {}).get("image_size", 224)  # of its images
            encoders = {"flax": flax_encoders, "torch": torch_encoders}[backend]
            self._encode_images, self._encode_texts, self.dim, self._length = encoders(name)
        except Exception as error:  # the libraries raise errors of many types
            reason = one_line(error, 400)
            if "couldn't connect" in reason:
                reason = "the hub cannot be reached, and its cache has no copy"
            raise ValueError(f"--clip_model {name} cannot be opened: {reason}; {remedy}") from error

    def image_features(self, images, batch_size=16):
        """Features of PIL images, float32 (n, D), each of length 1.

        The processor divides 8-bit values by 255, so the encoder gets [0, 1], shifted and scaled as
        it was trained.
        """
        return self._features(self._encode_images, images, batch_size, lambda x: {"images": x})

    def text_features(self, texts, batch_size=64):
        """Features of texts, float32 (n, D), each of length 1; tokens past the 77th are cut."""
        options = {"padding": "max_length", "truncation": True, "max_length": self._length}
        return self._features(
            self._encode_texts, texts, batch_size, lambda x: {"text": x} | options
        )

    def _features(self, encode, items, batch_size, arguments):
        """Features of items, at most batch_size at once.

        A batch is padded to a power of two, so that the encoder compiles for few sizes.
        """
        rows = [np.zeros((0, self.dim), np.float32)]
        for start in range(0, len(items), batch_size):
            batch = list(items[start : start + batch_size])
            padding = min(batch_size, 1 << (len(batch) - 1).bit_length()) - len(batch)
            inputs = self.processor(**arguments(batch + batch[-1:] * padding))
            features = encode(**{name: np.stack(x) for name, x in inputs.items()})[: len(batch)]
            rows.append(features / np.linalg.norm(features, axis=-1, keepdims=True))
        return np.concatenate(rows)


def flax_encoders(name):
    """CLIP on the first device of JAX.

    Args:
        name: directory or hub id.

    Returns:
        (pixel_values -> features, (input_ids, attention_mask) -> features, their size, longest
        text in tokens): NumPy arrays, features not normalised.
    """
    model, params = FlaxCLIPModel.from_pretrained(name, _do_init=False)
    params = jax.device_put(model.to_fp32(params), jax.local_devices()[0])

    def compiled(encode):
        @jax.jit
        def features(params, inputs):
            # TPUs and GPUs would otherwise multiply float32 matrices with fewer bits.
            with jax.default_matmul_precision("highest"):
                return encode(**inputs, params=params)

        return lambda **inputs: np.asarray(features(params, inputs))

    encoders = compiled(model.get_image_features), compiled(model.get_text_features)
    module = model.module
    return *encoders, module.projection_dim, module.text_config["max_position_embeddings"]


def torch_encoders(name):
    """CLIP of PyTorch transformers on the CPU; as flax_encoders."""
    try:
        import torch
        from transformers import CLIPModel
    except ImportError as error:
        raise ImportError("--clip_backend torch needs PyTorch: pip install torch") from error

    fetch = partial(fetch_file, name, subfolder=None, revision=None)
    folder = find_weights(fetch, "model", None, True, name)[0].parent
    model, info = CLIPModel.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    if info["missing_keys"]:
        raise ValueError(f"it lacks {sorted(info['missing_keys'])[0]} and others")
    model.eval()

    def on_cpu(encode):
        @torch.inference_mode()
        def features(**inputs):
            inputs = {name: torch.from_numpy(x) for name, x in inputs.items()}
            return encode(**inputs).pooler_output.numpy()

        return features

    encoders = on_cpu(model.get_image_features), on_cpu(model.get_text_features)
    length = model.config.text_config.max_position_embeddings
    return *encoders, model.config.projection_dim, length


def features_or_nan(encode, items, dim):
    """Features (n, dim) of a list of items; rows of NaN where an item is None."""
    known = [i for i, item in enumerate(items) if item is not None]
    features = np.full((len(items), dim), np.nan, np.float32)
    if known:
        features[known] = encode([items[i] for i in known])
    return features
