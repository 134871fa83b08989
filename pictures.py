"""What the scripts share about images: reading, names of files, prompts, batches, saving, grids."""

import math
import os
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

PICTURE_FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG"}
JPEG_QUALITY = 95


def to_rgb(picture):
    """Convert a PIL image to RGB, on white where it is transparent.

    Args:
        picture: PIL image; values of 16 bits (mode I;16, or I above 255) become 0 to 255.

    Returns:
        PIL image of mode RGB.

    Raises:
        ValueError: the range of the values is not known: mode F, or mode I that is not 16 bits.
    """
    if picture.mode == "F":
        raise ValueError(
            "image mode F (float) has no known range; scale its values to 0 to 255 and convert it "
            "to mode L"
        )
    if picture.mode.startswith("I"):  # Pillow clips 16-bit grey instead of scaling it
        values = np.asarray(picture)
        low, high = values.min(), values.max()
        if low < 0 or high > 65535 or (picture.mode == "I" and high < 256):
            raise ValueError(
                f"image mode {picture.mode} (integer) has values from {low} to {high}, which are "
                "not 16 bits; scale them to 0 to 255 and convert the image to mode L"
            )
        picture = Image.fromarray((values // 257).astype(np.uint8))
    if not picture.has_transparency_data:
        return picture.convert("RGB")
    picture = picture.convert("RGBA")
    white = Image.new("RGBA", picture.size, "white")
    return Image.alpha_composite(white, picture).convert("RGB")


def load_image(path):
    """Read an image file completely, and turn the image as its EXIF orientation says.

    Args:
        path: of the file.

    Returns:
        PIL image, RGB, on white where it is transparent.

    Raises:
        ValueError: no such file, no image, or a damaged one; the message starts with path.
    """
    try:
        with Image.open(path) as image:
            return to_rgb(ImageOps.exif_transpose(image))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; check the path") from None
    except UnidentifiedImageError:
        raise ValueError(f"{path} is not an image that Pillow can read") from None
    except Exception as error:  # Pillow's decoders raise errors of many types
        raise ValueError(f"{path} cannot be read as an image: {error}") from error


def check_picture_file(path):
    """Refuse a picture file that cannot be written, touching nothing."""
    if path.suffix.lower() not in PICTURE_FORMATS:
        raise ValueError(
            f"{path} ends in {path.suffix or 'no extension'}; name it "
            f"{' or '.join(PICTURE_FORMATS)}"
        )
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise ValueError(f"{path} cannot be written: no folder can be made or filled in {folder}")


def save_picture(picture, path):
    """Write a picture by its extension; it appears under its name when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".saving-") as tmp:
        file = Path(tmp, path.name)
        picture.save(file, PICTURE_FORMATS[path.suffix.lower()], quality=JPEG_QUALITY)
        os.replace(file, path)


def picture_files(output, num_pictures, grid=None):
    """Name a file for each picture.

    Args:
        output: folder; for one picture also a file, which its extension tells.
        num_pictures: how many.
        grid: another file that will be written, or None.

    Returns:
        Paths; in a folder 000.png, 001.png, ..., on from the last one that is there.

    Raises:
        ValueError: output is one file for several pictures, or cannot be written, or is grid too.
    """
    is_folder = output.is_dir() or not (output.suffix or output.is_file())
    if num_pictures == 1 and not is_folder:
        files = [output]
    elif output.suffix.lower() in PICTURE_FORMATS or output.is_file():
        raise ValueError(
            f"--output {output} is one file for {num_pictures} pictures; give a folder, or "
            "--num_images 1 for one picture of a prompt and not one on each device"
        )
    else:
        numbers = [int(file.stem) for file in output.glob("*.png") if file.stem.isdecimal()]
        first = max(numbers, default=-1) + 1
        files = [output / f"{first + i:03}.png" for i in range(num_pictures)]
    if grid and grid.resolve() in [file.resolve() for file in files]:
        raise ValueError(f"--grid {grid} is a picture of --output too; give it another name")
    for file in files:
        check_picture_file(file)
    return files


def picture_grid(pictures):
    """One picture of several of one size, in rows, as square as it gets."""
    from diffusers.utils import make_image_grid  # seconds to import

    columns = math.ceil(math.sqrt(len(pictures)))
    rows = math.ceil(len(pictures) / columns)
    blank = Image.new("RGB", pictures[0].size, "white")
    return make_image_grid([*pictures, *[blank] * (rows * columns - len(pictures))], rows, columns)


def read_prompts(file):
    """The lines of a text file that are not empty; a ValueError if there are none."""
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompts_file {file} is no UTF-8 text; save it as that") from error
    except OSError as error:
        raise ValueError(f"--prompts_file {file} cannot be read: {error}") from error
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise ValueError(f"--prompts_file {file} holds no prompt; write one a line")
    return prompts


def read_latents(file, shape):
    """Noise to start from out of a .npy file.

    Args:
        file: path.
        shape: that is needed, (pictures, C, h, w); the file may hold more pictures.

    Returns:
        float32 of that shape.

    Raises:
        ValueError: it is no such array, or holds fewer.
    """
    try:
        with open(file, "rb") as opened:
            latents = np.load(opened, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is none, or cut short"
        raise ValueError(f"--latents {file} cannot be read as a .npy file: {reason}") from error
    if not isinstance(latents, np.ndarray) or latents.dtype.kind not in "fiu":
        raise ValueError(f"--latents {file} holds no array of real numbers; numpy.save writes one")
    if latents.shape[1:] != shape[1:]:
        raise ValueError(f"--latents {file} has shape {latents.shape}, these pictures need {shape}")
    if len(latents) < shape[0]:
        raise ValueError(
            f"{shape[0]} pictures are more than the {len(latents)} latents of {file}; give fewer "
            "prompts or more latents"
        )
    latents = latents[: shape[0]].astype(np.float32)
    if not np.isfinite(latents).all():
        raise ValueError(f"--latents {file} holds numbers that are not finite")
    return latents


def to_batches(arrays, num_devices, batch_size):
    """Cut arrays of one row per picture into batches for all devices, the last one filled up.

    Args:
        arrays: {name: (pictures, ...) or None}.
        num_devices, batch_size: a batch has their product of rows.

    Yields:
        (range of the batch's pictures, {name: (devices, batch_size, ...) or None}).
    """
    num_pictures = next(len(x) for x in arrays.values() if x is not None)
    per_batch = num_devices * batch_size
    for start in range(0, num_pictures, per_batch):
        rows = np.minimum(np.arange(start, start + per_batch), num_pictures - 1)
        yield (
            range(start, min(start + per_batch, num_pictures)),
            {
                name: None if x is None else x[rows].reshape(num_devices, batch_size, *x.shape[1:])
                for name, x in arrays.items()
            },
        )
