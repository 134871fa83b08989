"""Decoding stored pairs into the arrays of a batch: images, scaled and cropped, or latents.

Source: InstructPix2Pix (arXiv 2211.09800); SDXL (arXiv 2307.01952), section 2.2, for time ids.
"""

from dataclasses import dataclass

import numpy as np

from diffusers_flax.data.buckets import BUCKETS, size_name
from diffusers_flax.data.images import (
    JPEG_START,
    check_one_shape,
    crop_corner,
    crop_image,
    decode_image,
    decode_mask,
    encoded_size,
    scaled_shape,
)
from diffusers_flax.data.options import Transform
from diffusers_flax.data.shards import (
    TIME_IDS,
    Pair,
    RowGroup,
    choose_instruction,
    latents_metadata,
)

PIXELS = ("original_pixel_values", "edited_pixel_values")
LATENTS = ("original_latents", "edited_latents")
IMAGE_NAMES = ("original_image", "edited_image")  # in errors, whatever the columns are called


@dataclass(frozen=True)
class Decoding:
    """How pairs become arrays."""

    transform: Transform
    latents: dict | None  # latents_metadata of the shards; None: they have images
    masks: bool  # batches have masks; zeros for pairs without one
    references: bool  # batches have reference images; likewise

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Widths and heights of the batches' images."""
        return self.transform.sizes or ((self.transform.resolution,) * 2,)

    def check(self, group: RowGroup) -> None:
        """Raise a ValueError if the options do not fit a row group."""
        latents = latents_metadata(group.metadata)
        for name in ("vae", "shape", "sizes"):
            if (latents or {}).get(name) != (self.latents or {}).get(name):
                raise ValueError(
                    f"{group.path} does not match the first shard: one has latents and the other "
                    "images, or the latents differ in VAE or size; use one kind"
                )
        if latents is None:
            return
        transform, square = self.transform, (self.transform.resolution,) * 2
        resolution, resample = latents["resolution"], latents["image_interpolation_mode"]
        stored = {(w, h) for h, w in latents.get("sizes", [square])}
        has_sizes = stored <= {*self.sizes} and ("sizes" in latents or self.sizes == (square,))
        has_ids = TIME_IDS in group.metadata.schema.names
        problems = {
            "of the centre of each image (--no_random_crop)": transform.random_crop,
            f"of --resolution {resolution}, not {square[0]}": resolution != square[0],
            f"of --image_interpolation_mode {resample}": resample != transform.resample,
            f"of {BUCKETS} {' '.join(map(size_name, sorted(stored)))}": not has_sizes,
            "without time ids of SDXL": transform.micro_conditioning and not has_ids,
        }
        for problem in (text for text, is_one in problems.items() if is_one):
            raise ValueError(
                f"{group.path.parent} contains latents {problem}; use another directory"
            )

    def empty_batch(self, batch_size: int, size: int = 0) -> dict[str, np.ndarray]:
        """Uninitialized arrays for batch_size pairs, both images first; size: an index."""
        width, height = self.sizes[size]
        shapes, dtype = dict.fromkeys(PIXELS, (height, width, 3)), np.uint8
        if self.latents:
            shape, stored = self.latents["shape"], self.latents.get("sizes")
            height, width, C = shape[stored.index([height, width])] if stored else shape
            shapes = dict(zip(LATENTS, ((height, width, C), (height, width, 2 * C))))
            dtype = np.float16
        batch = {name: np.empty((batch_size, *shape), dtype) for name, shape in shapes.items()}
        if self.references:
            original, _ = batch.values()
            batch["reference_image"] = np.empty_like(original)
            batch["has_reference"] = np.empty(batch_size, bool)
        if self.transform.micro_conditioning:
            batch["time_ids"] = np.empty((batch_size, 6), np.float32)
        if self.masks:
            batch["mask"] = np.empty((batch_size, height, width), np.uint8)
        return batch

    def decode(
        self,
        batch: dict[str, np.ndarray],
        place: int,
        pair: Pair,
        draw: np.ndarray,
    ) -> str:
        """Decode a pair into batch[...][place], cropped and flipped by draw.

        Args:
            batch: result of empty_batch.
            place: row of the batch.
            pair: encoded pair.
            draw: (3,) in [0, 1): the crop, the flip if it is below a half, and which of several
                instructions.

        Returns:
            The instruction.
        """
        transform, names = self.transform, LATENTS if self.latents else PIXELS
        out = tuple(batch[name][place] for name in names)
        flip = transform.random_flip and bool(draw[1] < 0.5)
        crop = crop_position(draw[0], transform)
        if self.latents:
            time_ids = copy_latents(pair, out, flip)
        else:
            time_ids = decode_pair(pair, out, transform.resample, crop, flip)
        if transform.micro_conditioning:
            batch["time_ids"][place] = time_ids[int(flip)]
        if self.masks and self.latents and pair.mask is not None:
            mask = np.frombuffer(pair.mask, np.uint8).reshape(batch["mask"][place].shape)
            batch["mask"][place] = mask[:, ::-1] if flip else mask
        elif self.masks:
            place_mask(pair, batch["mask"][place], time_ids, transform.resample, crop, flip)
        if self.references:
            batch["has_reference"][place] = pair.reference is not None
            self._place_reference(pair.reference, batch["reference_image"][place], crop, flip)
        return choose_instruction(pair.instruction, draw[2])

    def _place_reference(
        self, data: bytes | None, out: np.ndarray, crop: float, flip: bool
    ) -> None:
        """Decode a reference image, of any aspect ratio, or copy its latents; without one 0."""
        if data is None:
            out[:] = 0
        elif self.latents:
            out[:] = np.frombuffer(data, np.float16).reshape(2, *out.shape)[int(flip)]
        else:
            place_image(data, out, self.transform.resample, crop, flip, "reference_image")


def crop_position(draw: float, transform: Transform) -> float:
    """Where a pair is cropped along its longer side, in [0, 1), see crop_image; draw: likewise."""
    return draw if transform.random_crop else 0.5


def decode_pair(
    pair: Pair,
    out: tuple[np.ndarray, np.ndarray],
    resample: str,
    crop: float,
    flip: bool,
    names: tuple[str, str] = IMAGE_NAMES,
) -> np.ndarray:
    """Decode both images of a pair into out, with the same crop and flip.

    Args:
        pair: encoded pair.
        out: original and edited images, contiguous uint8 (H, W, 3) each; overwritten.
        resample: "dct": libjpeg downscales large JPEGs by powers of two while decoding, Lanczos
            does the rest; "lanczos" (as in the paper) and "bicubic" (as at Hugging Face): libjpeg
            leaves at least a factor of 2 to the filter.
        crop: position of the crop, see crop_image.
        flip: mirror left and right.
        names: of the images, for errors.

    Returns:
        The time ids of SDXL's micro-conditioning, float32 (2, 6), not mirrored and mirrored: height
        and width of the edited image as stored, top and left of the crop in the scaled image, H, W.

    Raises:
        ValueError: the prompt or an image is missing or cannot be decoded, or the images have two
            aspect ratios; out is then undefined.

    Source: SDXL (arXiv 2307.01952), section 2.2.
    """
    if pair.instruction is None:
        raise ValueError("edit_prompt: null")
    stored = []
    for data, pixels, name in zip(pair[:2], out, names):
        decoded = place_image(data, pixels, resample, crop, flip, name)
        is_jpeg = data.startswith(JPEG_START)  # which may be decoded at a half of its size or less
        stored.append(encoded_size(data) if is_jpeg else decoded[::-1])
    check_one_shape(names[0], stored[0], names[1], stored[1])
    shape = out[1].shape[:2]
    height, width = scaled_shape(*decoded, shape)
    top, left = crop_corner(height, width, shape, crop)
    lefts = (left, width - shape[1] - left)
    return np.array([(*stored[1][::-1], top, x, *shape) for x in lefts], np.float32)


def place_image(
    data: bytes | None, out: np.ndarray, resample: str, crop: float, flip: bool, name: str
) -> tuple[int, int]:
    """Decode an image into out, scaled, cropped and flipped; arguments as for decode_pair.

    Returns:
        Height and width before the crop, as decoded.

    Raises:
        ValueError: it is missing or cannot be decoded; name: its name in the error.
    """
    if data is None:
        raise ValueError(f"{name}: no image bytes in the shard")
    shape = out.shape[:2]
    try:
        min_shape = shape if resample == "dct" else (2 * shape[0], 2 * shape[1])
        decoded = decode_image(data, min_shape, out=out)
        cropped = crop_image(decoded, shape, resample, crop)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    if flip:
        for c in range(3):  # five times faster than all channels at once
            out[..., c] = cropped[:, ::-1, c]
    else:
        out[:] = cropped
    return decoded.shape[:2]


def place_mask(
    pair: Pair,
    out: np.ndarray,
    time_ids: np.ndarray,
    resample: str,
    crop: float,
    flip: bool,
) -> None:
    """Decode a pair's mask into out, scaled, cropped and flipped as its images.

    Args:
        pair: encoded pair; without a mask, out becomes 0.
        out: uint8 (H, W); overwritten.
        time_ids, resample, crop, flip: see decode_pair.

    Raises:
        ValueError: the mask cannot be decoded, or has another aspect ratio.
    """
    if pair.mask is None:
        out[:] = 0
        return
    try:
        mask = decode_mask(pair.mask, unpainted=255)
    except ValueError as error:
        raise ValueError(f"mask: {error}") from error
    check_one_shape("the mask", mask.shape[::-1], "the edited image", time_ids[0, 1::-1])
    mask = crop_image(mask, out.shape, resample, crop)
    out[:] = mask[:, ::-1] if flip else mask


def reduce_mask(mask: np.ndarray, factor: int) -> np.ndarray:
    """Average a mask over the pixels of each latent, rounded; factor: pixels along a side."""
    H, W = mask.shape
    blocks = mask.reshape(H // factor, factor, W // factor, factor)
    return np.rint(blocks.mean(axis=(1, 3))).astype(np.uint8)


def copy_latents(pair: Pair, out: tuple[np.ndarray, np.ndarray], flip: bool) -> np.ndarray | None:
    """Copy the latents of a pair into out.

    Args:
        pair: stored pair of cache_latents.py.
        out: float16 mode (h, w, C), and mean and standard deviation (h, w, 2 C); overwritten.
        flip: take the latents of the mirrored images.

    Returns:
        The time ids as from decode_pair, (2, 6); None if the shard has none.

    Raises:
        ValueError: the pair has no latents, or the shard is damaged.
    """
    if pair.instruction is None:
        raise ValueError("edit_prompt: null")
    for data, latents, column in zip(pair[:2], out, IMAGE_NAMES):
        if data is None or len(data) != 2 * latents.nbytes:
            raise ValueError(f"{column}: no latents in the shard; the pair could not be used")
        latents[:] = np.frombuffer(data, np.float16).reshape(2, *latents.shape)[int(flip)]
    if pair.time_ids is None:
        return None
    return np.frombuffer(pair.time_ids, np.float32).reshape(2, -1)
