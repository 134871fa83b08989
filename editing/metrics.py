"""Held-out pairs and the metrics of edits: distances between images, CLIP similarities.

    pairs = pairs_of_jsonl(Path("pairs.jsonl"))
    clip = Clip("openai/clip-vit-large-patch14")
    metrics = pixel_metrics(result, original, truth)
    metrics |= clip_metrics(clip.image_features(images), ...)

Source: InstructPix2Pix (arXiv 2211.09800), section 4.1; MagicBrush (arXiv 2306.10012), section 4.
"""

import hashlib
import json
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet as pq
from PIL import Image

from dataloading.images import decode_image
from dataloading.lists import CAPTIONS, IMAGES, read_list
from dataloading.shards import latents_metadata, list_row_groups
from diffusers_flax.acceleration.caches import switch_shares
from diffusers_flax.acceleration.plans import plan_steps
from diffusers_flax.flops import matmul_flops
from diffusers_flax.loading.hub import fetch_directory, fetch_file
from diffusers_flax.loading.tokenizer import TOKENIZER_FILES
from diffusers_flax.loading.weights import find_weights
from diffusers_flax.messages import one_line
from diffusers_flax.models.attention import plain_operations
from diffusers_flax.pipelines.sampling import decode
from editing.edits import fit_image

CAPTION_COLUMNS = {
    "original_prompt_column": "original_prompt",
    "edited_prompt_column": "edited_prompt",
}
CLIP_FILES = (
    *("config.json", "preprocessor_config.json", "processor_config.json"),
    *TOKENIZER_FILES,
)
PIXEL_METRICS = ("l1", "mse", "error_ratio", "l1_to_input")
CLIP_METRICS = (
    *("image_similarity", "direction_similarity"),
    *("text_similarity", "truth_similarity"),
)


@dataclass(frozen=True, eq=False)
class HeldOutPair:
    """An image to edit with its instruction, and what the result should be, as far as known.

    index is its place in the list, on which the noise depends; input names it in messages; images
    are encoded.
    """

    index: int
    input: str
    instruction: str
    original: bytes
    truth: bytes | None = None
    input_caption: str | None = None
    output_caption: str | None = None

    def size(self):
        """(width, height) of the image to edit."""
        return self._decode(self.original).size

    def fitted_original(self, size):
        """The image to edit, PIL, scaled and cropped to size (width, height)."""
        return fit_image(self._decode(self.original), size)

    def fitted_truth(self, size):
        """The true result, PIL, likewise; None if unknown."""
        return None if self.truth is None else fit_image(self._decode(self.truth), size)

    def check(self):
        """Raise a ValueError if an image cannot be decoded."""
        for data in filter(None, (self.original, self.truth)):
            self._decode(data)

    def _decode(self, data):
        try:
            return Image.fromarray(decode_image(data))
        except ValueError as error:
            raise ValueError(f"{self.input}: {error}") from error


def pairs_of_jsonl(file, max_pairs=None):
    """Read a list of pairs; see dataloading/lists.py. Image to edit and instruction are required.

    Args:
        file: path.
        max_pairs: read the first ones only; None: all.

    Returns:
        List of HeldOutPair.

    Raises:
        ValueError: a row lacks a required key or has a value that is not text, or a file cannot be
            read.
    """
    required, optional = ("original_image", "edit_prompt"), ("edited_image", *CAPTIONS)
    pairs = []
    for row in read_list(f"--pairs_jsonl {file}", file, required, optional, max_pairs):
        data = {}
        for name in IMAGES:
            try:
                data[name] = row[name].read_bytes() if row[name] else None
            except OSError as error:
                raise ValueError(
                    f"{file} line {row['line']}: {row[name]} cannot be read: "
                    f"{error.strerror or error}; check the path"
                ) from error
        captions = (row[name] for name in CAPTIONS)
        name = str(row["original_image"])
        pairs.append(HeldOutPair(len(pairs), name, row["edit_prompt"], *data.values(), *captions))
    return pairs


def pairs_of_shards(directory, columns, caption_columns, max_pairs=None):
    """Read the pairs of a directory of parquet shards.

    Args:
        directory: of the shards.
        columns: names of the columns of original image, edited image and instruction; "": those of
            public datasets.
        caption_columns: names of the columns of the captions before and after; "":
            original_prompt and edited_prompt, which may be missing.
        max_pairs: read the first ones only; None: all.

    Returns:
        List of HeldOutPair. Rows without image or instruction are left out, but count in index.

    Raises:
        ValueError: see list_row_groups; or a given column of captions is missing, or the shards
            contain latents.
    """
    groups = list_row_groups(directory, *columns, flag="--data_dir")
    pairs, row_index = [], 0
    for group in groups:
        if latents_metadata(group.metadata) is not None:
            raise ValueError(
                f"--data_dir {directory} has shards of latents; name the directory of the images"
            )
        names = group.metadata.schema.to_arrow_schema().names
        captions = []
        for (flag, default), given in zip(CAPTION_COLUMNS.items(), caption_columns):
            if given and given not in names:
                raise ValueError(
                    f"{group.path} has no column {given}; it has {', '.join(names)}: choose one "
                    f"with --{flag}"
                )
            captions.append(given or default)
        wanted = [*group.columns, *(name for name in captions if name in names)]
        try:
            with pq.ParquetFile(group.path) as file:
                rows = file.read_row_group(group.index, columns=wanted).to_pylist()
        except Exception as error:  # damaged pages raise errors of many types
            raise ValueError(
                f"{group.path} cannot be read: {one_line(error, 200)}; download it again"
            ) from error
        for number, row in enumerate(rows):
            if len(pairs) == max_pairs:
                return pairs
            original, truth = (row[name] for name in group.columns[:2])
            original, truth = (x["bytes"] if isinstance(x, dict) else x for x in (original, truth))
            instruction = row[group.columns[2]]
            if original and instruction:
                name = f"{group.path} row {group.first_row + number}"
                texts = (row.get(caption) or None for caption in captions)
                pair = (row_index, name, instruction, original, truth or None, *texts)
                pairs.append(HeldOutPair(*pair))
            row_index += 1
    if not pairs:
        raise ValueError(
            f"--data_dir {directory} has no row with an image and an instruction; name a directory "
            "of shards that parquet_processing.py describes"
        )
    return pairs


def checksum_of_pairs(pairs):
    """A checksum of the pairs' images and texts."""
    total = hashlib.sha256()
    for pair in pairs:
        texts = [pair.index, pair.instruction, pair.input_caption, pair.output_caption]
        total.update(json.dumps(texts).encode())
        for data in (pair.original, pair.truth):
            total.update(hashlib.sha256(data or b"").digest())
    return total.hexdigest()[:16]


def pixel_metrics(result, original, truth=None):
    """Distances between images of one size.

    Args:
        result, original, truth: float (H, W, 3) in [0, 1]; truth None: unknown.

    Returns:
        {"l1": mean |result - truth|, "mse": mean (result - truth)^2, without a root, "error_ratio":
        l1 divided by that of the original, so that copying it gives 1, "l1_to_input": mean
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
        "direction_similarity" of the change of the image and that of the caption: cosine of the
        differences of features that were normalised before; "text_similarity" of result and the
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


# Costs, and the VAE alone


def count_flops(pipeline, params, size, branches, steps):
    """FLOPs of the matmuls and convolutions of one edit.

    The steps of a cache count by what they compute; those of fbcache, which decides as it runs, as
    if it never reused anything.

    Args:
        pipeline: InstructPix2Pix.
        params: shapes of its parameters, jax.ShapeDtypeStruct.
        size: (width, height).
        branches: of guidance.
        steps: of programs.step_options.

    Returns:
        float.
    """
    width, height = size
    image = jax.ShapeDtypeStruct((1, 3, height, width), jnp.float32)
    latents = pipeline.latent_shape(1, height, width)
    num_steps, timesteps = steps["num_inference_steps"], steps["timesteps"]
    _, scales = pipeline._schedule(num_steps, latents, timesteps=timesteps)
    edit = partial(pipeline._generate, branches=branches, **steps)
    with plain_operations():
        program = jax.make_jaxpr(edit)(
            pipeline.prepare_text_inputs(""), image, params, jax.random.key(0)
        )
    switches = switch_shares(plan_steps(pipeline.accelerate, branches, scales))
    return matmul_flops(program.jaxpr, switches)[0]


@partial(jax.jit, static_argnums=0)
def vae_round_trip(vae, params, image):
    """Images (B, 3, H, W) in [-1, 1], encoded and decoded: (B, H, W, 3) in [0, 1]."""
    mode = vae.apply({"params": params}, image, method=vae.encode).latent_dist.mode()
    latents = jnp.transpose(mode, (0, 3, 1, 2)) * vae.config.scaling_factor
    return decode(vae, params, latents)


def num_parameters(tree):
    """Number of parameters of a tree of arrays."""
    return sum(x.size for x in jax.tree.leaves(tree))
