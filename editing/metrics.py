"""The metrics of edits: distances between images, CLIP similarities.

    clip = Clip("openai/clip-vit-large-patch14")
    metrics = pixel_metrics(result, original, truth)
    metrics |= clip_metrics(clip.image_features(images), ...)

Source: InstructPix2Pix (arXiv 2211.09800), section 4.1; MagicBrush (arXiv 2306.10012), section 4.
"""

from functools import partial

import numpy as np

from diffusers_flax.loading.hub import fetch_directory, fetch_file
from diffusers_flax.loading.tokenizer import TOKENIZER_FILES
from diffusers_flax.loading.weights import find_weights
from diffusers_flax.messages import one_line

CLIP_FILES = (
    *("config.json", "preprocessor_config.json", "processor_config.json"),
    *TOKENIZER_FILES,
)
PIXEL_METRICS = ("l1", "mse", "error_ratio", "l1_to_input")
CLIP_METRICS = (
    *("image_similarity", "direction_similarity"),
    *("text_similarity", "truth_similarity"),
)


def pixel_metrics(result, original, truth=None):
    """Distances between images of one size.

    Args:
        result, original, truth: float (H, W, 3) in [0, 1]; truth None: unknown.

    Returns:
        {"l1": mean |result - truth|, "mse": mean (result - truth)^2, without a root, "error_ratio":
        l1 divided by the l1 of the original, so that copying it gives 1, "l1_to_input": mean
        |result - original|}. NaN where truth is needed and unknown, or where it is the original.

    Source: MagicBrush (arXiv 2306.10012), section 4.
    """
    metrics = dict.fromkeys(PIXEL_METRICS, np.nan)
    metrics["l1_to_input"] = float(np.abs(result - original).mean())
    if truth is not None:
        metrics["l1"] = float(np.abs(result - truth).mean())
        metrics["mse"] = float(np.square(result - truth).mean())
        if (change := float(np.abs(original - truth).mean())) > 0:
            metrics["error_ratio"] = metrics["l1"] / change
    return metrics


def cosine(a, b):
    """Cosine similarity of vectors (..., D); 0 where one of them is zero, as in PyTorch."""
    norms = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    return np.sum(a * b, axis=-1) / np.where(norms > 0, norms, 1)


def clip_metrics(result, original, truth, input_text, output_text):
    """CLIP similarities of edits.

    Args:
        result, original, truth: image features (n, D), each of length 1; NaN where unknown.
        input_text, output_text: text features of the captions, likewise.

    Returns:
        {name: (n,)}, NaN where a feature is unknown: "image_similarity" of result and original,
        "direction_similarity" of the changes of image and caption: cosine of the differences of
        normalised features; "text_similarity" of result and the
        caption after the edit; "truth_similarity" of result and truth.

    Source: InstructPix2Pix (arXiv 2211.09800), section 4.1; StyleGAN-NADA (arXiv 2108.00946).
    """
    return {
        "image_similarity": cosine(original, result),
        "direction_similarity": cosine(result - original, output_text - input_text),
        "text_similarity": cosine(result, output_text),
        "truth_similarity": cosine(result, truth),
    }


class Clip:
    """A CLIP model of transformers, on the CPU in float32.

    Args:
        name: directory or hub id.

    Raises:
        ValueError: it cannot be read, or is not a CLIP model.
    """

    def __init__(self, name):
        from transformers import AutoConfig, CLIPModel, CLIPProcessor  # seconds to import

        remedy = 'name a directory or hub id of a CLIP model, or "" to leave CLIP out'
        try:
            folder = fetch_directory(name, CLIP_FILES)
            kind = AutoConfig.from_pretrained(folder).model_type
            if kind != "clip":
                raise ValueError(f"it is a model of type {kind}")
            fetch = partial(fetch_file, name, subfolder=None, revision=None)
            find_weights(fetch, "model", None, True, name)
            self.processor = CLIPProcessor.from_pretrained(folder)
            self.model, info = CLIPModel.from_pretrained(folder, output_loading_info=True)
            if info["missing_keys"]:
                raise ValueError(f"it lacks {sorted(info['missing_keys'])[0]} and others")
        except Exception as error:  # the libraries raise errors of many types
            reason = one_line(error, 400)
            if "couldn't connect" in reason:
                reason = "the hub cannot be reached, and its cache has no copy"
            raise ValueError(f"--clip_model {name} cannot be opened: {reason}; {remedy}") from error
        self.model.eval()
        self.dim = self.model.config.projection_dim

    def image_features(self, images, batch_size=16):
        """Features of PIL images, float32 (n, D), each of length 1.

        The processor divides 8-bit values by 255, so the encoder gets [0, 1], shifted and scaled as
        it was trained.
        """
        return self._features(
            images, batch_size, self.model.get_image_features, lambda x: {"images": x}
        )

    def text_features(self, texts, batch_size=64):
        """Features of texts, float32 (n, D), each of length 1; tokens past the 77th are cut."""
        length = self.model.config.text_config.max_position_embeddings
        return self._features(
            texts,
            batch_size,
            self.model.get_text_features,
            lambda x: {"text": x, "padding": True, "truncation": True, "max_length": length},
        )

    def _features(self, items, batch_size, encode, arguments):
        import torch

        rows = [np.zeros((0, self.dim), np.float32)]
        for start in range(0, len(items), batch_size):
            batch = arguments(list(items[start : start + batch_size]))
            with torch.inference_mode():
                features = encode(**self.processor(**batch, return_tensors="pt")).pooler_output
            rows.append((features / features.norm(dim=-1, keepdim=True)).float().numpy())
        return np.concatenate(rows)


def features_or_nan(encode, items, dim):
    """Features (n, dim) of a list of items; rows of NaN where an item is None."""
    known = [i for i, item in enumerate(items) if item is not None]
    features = np.full((len(items), dim), np.nan, np.float32)
    if known:
        features[known] = encode([items[i] for i in known])
    return features
