"""Images between files, PIL and arrays: opening, RGB, inputs of pipelines, masks, saving."""

import io
from functools import partial

import numpy as np
from PIL import ExifTags, Image, PngImagePlugin, UnidentifiedImageError

from diffusers_flax.loading.files import save_whole

IMAGE_FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG"}
JPEG_QUALITY = 95
# Some of Pillow's other formats run external programs. TGA has no signature, so it is last.
READ_FORMATS = (
    *("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"),
    *("AVIF", "JPEG2000", "PPM", "TGA"),
)
MAX_PIXELS = 150_000_000  # of an image; decoding and compositing take up to 20 bytes per pixel
COLOR_SAMPLES = 4096  # pixels of a mask whose colors are counted
MANY_COLORS = 64  # a photograph's, also a grey one's
USUAL_MASKS = (
    "give an image that is white where the image may change and black elsewhere, a layer with "
    "paint there, or the image with a hole there"
)


def open_image(file):
    """Open an image of one of READ_FORMATS without decoding its pixels.

    Args:
        file: binary file object, which must stay open until the pixels are decoded.

    Returns:
        PIL image.

    Raises:
        ValueError: it has another format or more than MAX_PIXELS.
        Exception: of many types, for damaged data.
    """
    Image.MAX_IMAGE_PIXELS = None  # Pillow's own limit is lower
    try:
        image = Image.open(file, formats=READ_FORMATS)
    except UnidentifiedImageError:
        size = file.seek(0, io.SEEK_END)
        raise ValueError(f"no known image format ({size} bytes); save it as PNG or JPEG") from None
    if image.width * image.height > MAX_PIXELS:
        raise ValueError(
            f"{image.width}x{image.height} pixels are more than {MAX_PIXELS // 10**6} megapixels; "
            "scale the image down"
        )
    return image


def to_rgb(image):
    """Convert a PIL image of any mode to RGB, on a white background; see to_8_bits."""
    image = to_8_bits(image)
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image).convert("RGB")


def to_8_bits(image):
    """Convert a PIL image to a mode with 8 bits per value, which Pillow converts to RGBA.

    16-bit values (mode I;16, or I above 255) become 0 to 255. A ValueError for others.
    """
    if image.mode == "La":  # premultiplied
        return image.convert("LA")
    if not image.mode.startswith(("I", "F")):
        return image
    values = np.asarray(image)  # Pillow would clip them
    low, high = values.min(), values.max()
    if image.mode == "F" or low < 0 or high > 65535 or (image.mode == "I" and high < 256):
        raise ValueError(f"image mode {image.mode} has no values of 16 bits; convert it to mode L")
    return Image.fromarray((values // 257).astype(np.uint8))


def prepare_images(image):
    """Convert images to float32 (B, 3, H, W) in [-1, 1].

    Args:
        image: image or list of images of one size: PIL of any mode, or array (H, W, 3); or array
            (B, H, W, 3); uint8, or float in [0, 1].

    Raises:
        ValueError: sizes differ, or it is not an image.
    """
    is_batch = isinstance(image, list | tuple) or np.ndim(image) == 4
    arrays = [to_array(one) for one in (image if is_batch else [image])]
    if len(sizes := sorted({array.shape[:2] for array in arrays})) != 1:
        found = ", ".join(f"{height}x{width}" for height, width in sizes) or "none"
        raise ValueError(
            f"the images of a batch must have one size (height x width), found {found}; "
            "resize or crop them, or call once per size"
        )
    return np.stack(arrays).transpose(0, 3, 1, 2)


def to_array(image):
    """Convert one image, PIL or array, to float32 (H, W, 3) in [-1, 1]."""
    array = np.asarray(to_rgb(image) if isinstance(image, Image.Image) else image)
    if array.ndim != 3 or array.shape[-1] != 3:
        raise ValueError(f"an image has shape {array.shape}; as an array it is (H, W, 3)")
    if array.dtype == np.uint8:
        array = array.astype(np.float32) / 255
    if not (array.dtype.kind == "f" and array.min() >= 0 and array.max() <= 1):
        raise ValueError(
            f"an image has {array.dtype} values from {array.min()} to {array.max()}; "
            "give uint8, or float in [0, 1]"
        )
    return array.astype(np.float32) * 2 - 1


def prepare_masks(mask, feather=0):
    """Convert masks to float32 (B, 1, H, W) from 0 (keep) to 1 (repaint).

    Args:
        mask: mask or list of masks of one size: PIL of any mode, see mask_values, or array (H, W);
            or array (B, H, W); uint8, bool, or float in [0, 1]. Pixels from 0.5 on are repainted.
        feather: width in pixels of a ramp from 0 to 1 inside the repainted area, along its border;
            0: a hard edge.

    Raises:
        ValueError: sizes differ, or it is not a mask.
    """
    is_batch = isinstance(mask, list | tuple) or getattr(mask, "ndim", 0) == 3
    masks = []
    for one in mask if is_batch else [mask]:
        array = mask_values(one) if isinstance(one, Image.Image) else np.asarray(one)
        if array.ndim != 2:
            raise ValueError(f"a mask has shape {array.shape}; as an array it is (H, W)")
        if array.dtype == np.uint8:
            array = array.astype(np.float32) / 255
        if array.min() < 0 or array.max() > 1:
            raise ValueError(
                f"a mask has {array.dtype} values from {array.min()} to {array.max()}; give uint8, "
                "bool, or float in [0, 1]"
            )
        masks.append(array >= 0.5)
    return np.stack([ramp(mask, feather) for mask in masks])[:, None]


def mask_values(mask, unpainted=None):
    """The values of a mask, a PIL image of any mode, as uint8 (H, W); 255 may change.

    An image without transparent pixels is grey: white may change. Else black and white stay, and
    transparent pixels are black; few colors are paint, which may change; and many colors are a
    photograph around a hole, as in MagicBrush and DALL-E, which may change.

    Where all pixels are transparent, all values are `unpainted`; None: an error.

    Raises:
        ValueError: nothing is painted, or it has colors and no transparent pixels.
    """
    mask = to_8_bits(mask)
    if not mask.has_transparency_data:
        mask = mask.convert("RGB")  # not every mode becomes RGBA
    rgba = np.asarray(mask.convert("RGBA"))
    alpha, values = rgba[..., 3], np.asarray(Image.fromarray(rgba[..., :3]).convert("L"))
    if not (opaque := opaque_part(alpha)).any():
        if unpainted is not None:
            return np.full(alpha.shape, unpainted, np.uint8)
        raise ValueError("nothing is painted on it, all pixels are transparent; " + USUAL_MASKS)
    colors = rgba[opaque][:, :3]
    darkest, brightest = colors.min(1), colors.max(1)
    if opaque.all():
        if (brightest - darkest > 64).mean() > 0.02:
            raise ValueError("it has colors and no transparent pixels; " + USUAL_MASKS)
        return values
    black, white = brightest < 32, darkest >= 224
    if black.any() and white.any() and (black | white).mean() > 0.95:  # else smooth edges
        return np.where(opaque, values, 0)
    colors = rgba[alpha == alpha.max()][:, :3]  # without soft edges
    colors = colors[:: len(colors) // COLOR_SAMPLES + 1]
    many = min(MANY_COLORS, max(2, len(colors) / 4))  # fewer in a small image
    is_paint = len(np.unique(colors, axis=0)) < many
    # A plain background, of which a hole leaves the most, looks like grey paint.
    is_grey, is_most = (brightest - darkest).max() <= 16, opaque.mean() > 0.5
    if is_paint and is_grey and is_most and alpha.max() == 255:
        raise ValueError("it may be paint or an image with a hole; " + USUAL_MASKS)
    return np.where(opaque == is_paint, np.uint8(255), np.uint8(0))


def opaque_part(alpha):
    """Where a layer of alpha (H, W) has paint: at least half as opaque as the most, and 3%."""
    return alpha >= max(alpha.max() / 2, 8)


def ramp(inside, feather):
    """Weights of a mask, float32 (H, W): 0 outside, rising to 1 inside.

    Args:
        inside: bool (H, W).
        feather: width in pixels of the ramp; the edge of the image has none.
    """
    if feather <= 0 or inside.all():
        return inside.astype(np.float32)
    from scipy.ndimage import distance_transform_edt  # not for most images

    distance = distance_transform_edt(inside)  # from a pixel's centre to the next one outside
    return np.minimum(distance / (feather + 1), 1).astype(np.float32)


def save_image(image, path, software=None, image_id=None, texts=None):
    """Write an image in the format of the path's extension.

    Args:
        image: PIL image, or array (H, W, 3) in [0, 1].
        path: Path; the file appears when it is complete.
        software: text for the EXIF tag of this name; None: no EXIF data.
        image_id: 32 hexadecimal digits for the EXIF tag ImageUniqueID, or None.
        texts: {keyword: text} for the text chunks of a PNG, which Pillow reads as Image.text.
    """
    if isinstance(image, np.ndarray):
        (image,) = to_pil(image)
    image_format = IMAGE_FORMATS[path.suffix.lower()]
    options = {}
    if software:
        options["exif"] = Image.Exif()
        options["exif"][ExifTags.Base.Software] = software
        if image_id:
            details = options["exif"].get_ifd(ExifTags.IFD.Exif)
            details[ExifTags.Base.ImageUniqueID] = image_id
    if texts:
        options["pnginfo"] = PngImagePlugin.PngInfo()
        for keyword, text in texts.items():
            options["pnginfo"].add_itxt(keyword, text)
    save_whole(path, partial(image.save, format=image_format, quality=JPEG_QUALITY, **options))


def image_mark(path):
    """(software, image_id) of an image that save_image wrote; (None, None): of another file."""
    try:
        with open(path, "rb") as file:
            image = open_image(file)
            if image.format == "PNG" and "exif" not in image.info:
                return None, None  # Pillow would decode the image to look further
            exif = image.getexif()
            details = exif.get_ifd(ExifTags.IFD.Exif)
            return exif.get(ExifTags.Base.Software), details.get(ExifTags.Base.ImageUniqueID)
    except Exception:  # decoders raise errors of many types
        return None, None


def to_pil(images):
    """Convert arrays (..., H, W, 3 or 1) in [0, 1] to a flat list of PIL images."""
    pixels = np.rint(np.asarray(images, np.float32) * 255).astype(np.uint8)
    if pixels.shape[-1] == 1:  # grey
        pixels = pixels[..., 0]
        return [Image.fromarray(image) for image in pixels.reshape(-1, *pixels.shape[-2:])]
    return [Image.fromarray(image) for image in pixels.reshape(-1, *pixels.shape[-3:])]


def pair_up(first, second, first_name="prompts", second_name="images"):
    """Repeat an array of one row to match the other; other lengths must agree."""
    sizes = len(first), len(second)
    if sizes[0] != sizes[1] and 1 not in sizes:
        raise ValueError(
            f"{sizes[0]} {first_name} do not fit {sizes[1]} {second_name}; give as many, or one"
        )
    B = max(sizes)
    return np.repeat(first, B // sizes[0], axis=0), np.repeat(second, B // sizes[1], axis=0)


def pair_with_masks(prompt_ids, image, mask, factor=1, feather=0):
    """(prompt_ids, image, mask) with masks prepared; a single one of any is repeated.

    mask, feather: see prepare_masks; factor: pixels of the mask per pixel or latent of the image,
    along a side.
    """
    mask = prepare_masks(mask, feather)
    height, width = (side * factor for side in image.shape[2:])
    if mask.shape[2:] != (height, width):
        raise ValueError(
            f"image is {height}x{width} and mask {mask.shape[2]}x{mask.shape[3]} (height x "
            "width); resize one of them"
        )
    image, mask = pair_up(image, mask, "images", "masks")
    prompt_ids, image = pair_up(prompt_ids, image)
    return prompt_ids, image, pair_up(prompt_ids, mask)[1]
