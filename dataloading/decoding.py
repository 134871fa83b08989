"""Decoding stored pairs into the arrays of a batch: scaled, cropped and flipped, or as latents.

Source: InstructPix2Pix (arXiv 2211.09800); SDXL (arXiv 2307.01952), section 2.2, for time ids.
"""

from dataclasses import dataclass

import numpy as np

from dataloading.images import (
    crop_corner,
    crop_image,
    decode_image,
    encoded_size,
    scaled_size,
)
from dataloading.shards import (
    Pair,
    RowGroup,
    choose_instruction,
    has_time_ids,
    latents_metadata,
)


@dataclass(frozen=True)
class Decoding:
    """How pairs become arrays; for the options see ParquetImagePairs.

    latents: latents_metadata of the shards, None if they have images.
    """

    resolution: int
    resample: str
    random_crop: bool
    random_flip: bool
    micro_conditioning: bool
    latents: dict | None

    def check(self, group: RowGroup) -> None:
        """Raise a ValueError if the options do not fit a row group."""
        check_row_group(group, self.latents, self.resolution, self.resample, self.random_crop)
        if self.micro_conditioning and self.latents and not has_time_ids(group):
            raise ValueError(
                f"{group.path} has no time ids of SDXL; delete the directory and make the "
                "latents again"
            )

    def image_specs(self) -> dict[str, tuple[tuple[int, ...], type]]:
        """(shape, dtype) of a row of both images or latents, by their names in a batch."""
        if self.latents:
            h, w, C = self.latents["shape"]
            return {
                "original_latents": ((h, w, C), np.float16),
                "edited_latents": ((h, w, 2 * C), np.float16),
            }
        pixels = ((self.resolution, self.resolution, 3), np.uint8)
        return {"original_pixel_values": pixels, "edited_pixel_values": pixels}

    def empty_batch(self, batch_size: int) -> dict[str, np.ndarray]:
        """Arrays for batch_size pairs, without values."""
        specs = self.image_specs()
        if self.micro_conditioning:
            specs["time_ids"] = ((6,), np.float32)
        return {name: np.empty((batch_size, *spec[0]), spec[1]) for name, spec in specs.items()}

    def decode(
        self,
        batch: dict[str, np.ndarray],
        place: int,
        pair: Pair,
        columns: tuple[str, str, str],
        draw: np.ndarray,
    ) -> str:
        """Decode a pair into batch[...][place], cropped and flipped by draw.

        Args:
            batch: of empty_batch.
            place: row of the batch.
            pair: encoded pair.
            columns: column names for error messages.
            draw: (3,) in [0, 1): the crop, the flip if it is below a half, and which of several
                instructions.

        Returns:
            The instruction.
        """
        out = tuple(batch[name][place] for name in self.image_specs())
        flip = self.random_flip and bool(draw[1] < 0.5)
        if self.latents:
            time_ids = copy_latents(pair, out, columns, flip)
        else:
            crop = draw[0] if self.random_crop else 0.5
            time_ids = decode_pair(pair, out, columns, self.resample, crop, flip)
        if self.micro_conditioning:
            batch["time_ids"][place] = time_ids[int(flip)]
        return choose_instruction(pair.prompt, draw[2])


def decode_pair(
    pair: Pair,
    out: tuple[np.ndarray, np.ndarray],
    columns: tuple[str, str, str],
    resample: str,
    crop: float,
    flip: bool,
) -> np.ndarray:
    """Decode both images of a pair into out, with the same crop and flip.

    Args:
        pair: encoded pair.
        out: original and edited images, contiguous uint8 (H, W, 3) each; overwritten.
        columns: column names for error messages.
        resample: "dct": libjpeg downscales large JPEGs by powers of two while decoding, Lanczos
            does the rest; "lanczos" (as in the paper) and "bicubic" (as at Hugging Face): libjpeg
            leaves at least a factor of 2 to the filter.
        crop: position of the crop, see crop_image.
        flip: mirror left and right.

    Returns:
        The time ids of SDXL's micro-conditioning, float32 (2, 6), not mirrored and mirrored: height
        and width of the edited image as stored, top and left of the crop in the scaled image, H, W.

    Raises:
        ValueError: the prompt or an image is missing or cannot be decoded; out is then undefined.

    Source: SDXL (arXiv 2307.01952), section 2.2.
    """
    if pair.prompt is None:
        raise ValueError(f"{columns[2]}: null")
    for data, pixels, column in zip(pair[:2], out, columns[:2]):
        if data is None:
            raise ValueError(f"{column}: no image bytes in the shard")
        size = pixels.shape[:2]
        try:
            min_size = size if resample == "dct" else (2 * size[0], 2 * size[1])
            decoded = decode_image(data, min_size, out=pixels)
            cropped = crop_image(decoded, size, resample, crop)
        except ValueError as error:
            raise ValueError(f"{column}: {error}") from error
        if flip:
            for c in range(3):  # five times faster than all channels at once
                pixels[..., c] = cropped[:, ::-1, c]
        else:
            pixels[:] = cropped
    height, width = scaled_size(*decoded.shape[:2], size)
    top, left = crop_corner(height, width, size, crop)
    lefts, stored = (left, width - size[1] - left), encoded_size(data)
    return np.array([(*stored, top, x, *size) for x in lefts], np.float32)


def copy_latents(
    pair: Pair, out: tuple[np.ndarray, np.ndarray], columns: tuple[str, str, str], flip: bool
) -> np.ndarray | None:
    """Copy the latents of a pair into out.

    Args:
        pair: stored pair of cache_latents.py.
        out: float16 mode (h, w, C), and mean and standard deviation (h, w, 2 C); overwritten.
        columns: column names for error messages.
        flip: take the latents of the mirrored images.

    Returns:
        The time ids as from decode_pair, (2, 6); None if the shard has none.

    Raises:
        ValueError: the pair has no latents, or the shard is damaged.
    """
    if pair.prompt is None:
        raise ValueError(f"{columns[2]}: null")
    for data, latents, column in zip(pair[:2], out, columns[:2]):
        if data is None or len(data) != 2 * latents.nbytes:
            raise ValueError(f"{column}: no latents in the shard; the image was undecodable")
        latents[:] = np.frombuffer(data, np.float16).reshape(2, *latents.shape)[int(flip)]
    if pair.time_ids is None:
        return None
    return np.frombuffer(pair.time_ids, np.float32).reshape(2, -1)


def check_row_group(
    group: RowGroup, first: dict | None, resolution: int, resample: str, random_crop: bool
) -> None:
    """Raise a ValueError if a row group's latents or images do not match the arguments.

    Args:
        group: the row group.
        first: latents_metadata of the first shard, which all shards must match.
        resolution, resample, random_crop: arguments of ParquetImagePairs.
    """
    latents = latents_metadata(group.metadata)
    for name in ("vae", "shape"):
        if (latents or {}).get(name) != (first or {}).get(name):
            raise ValueError(
                f"{group.path.name} does not match the first shard in {group.path.parent}: one has "
                "latents and the other images, or the latents differ in VAE or size; use one "
                "directory for each kind"
            )
    if latents is None:
        return
    if random_crop:
        raise ValueError(
            "latents are of the centre of each image; add --no_random_crop (it changes nothing for "
            "square images)"
        )
    for name, value in (("resolution", resolution), ("image_interpolation_mode", resample)):
        if latents[name] != value:
            raise ValueError(
                f"{group.path.parent} contains latents of --{name} {latents[name]}, not {value}; "
                f"use --{name} {latents[name]}, or another directory for new latents"
            )
