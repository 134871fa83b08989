"""Run a program of --format stablehlo. Needs jax, tokenizers, Pillow and no code of models.

Source: the file is jax.export's; see exporting/stablehlo_files.py.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np
from jax import export
from PIL import Image, ImageOps
from safetensors import SafetensorError
from safetensors.flax import load_file
from tokenizers import Tokenizer

from diffusers_flax.images import open_image, to_rgb

NAMES_OF_PLATFORMS = {"gpu": "cuda"}  # of jax.default_backend()


def run_program(file, prompt, negative_prompt, image_file, seed, guidance_scales):
    """Make the images of a program.

    Args:
        file: Path of the .jaxexport.
        prompt, negative_prompt: texts, for all images.
        image_file: Path of the original image, or None.
        seed: of the noise.
        guidance_scales: (guidance_scale, image_guidance_scale).

    Returns:
        float32 (B, H, W, 3) in [0, 1].

    Raises:
        ValueError: it is not a program, or the flags do not fit it.
    """
    program, settings, weights = open_program(file)
    shapes = {name: shape for name, (shape, _) in settings["arrays"].items()}
    if ("image" in shapes) != (image_file is not None):
        raise ValueError(
            f"--run {file} edits an image: give --input"
            if "image" in shapes
            else f"--input {image_file} is for edits; --run {file} makes images from text"
        )
    if negative_prompt and "neg_prompt_ids" not in shapes:
        raise ValueError(
            f"--negative_prompt {negative_prompt!r}: the program of SDXL takes none; leave it out"
        )
    arrays = {
        "prompt_ids": token_ids(file.parent, prompt, shapes["prompt_ids"], "--prompt"),
        "neg_prompt_ids": token_ids(
            file.parent, negative_prompt, shapes["prompt_ids"], "--negative_prompt"
        ),
        "key": np.asarray(jax.random.key_data(jax.random.key(seed))),
        "guidance_scale": np.float32(guidance_scales[0]),
        "image_guidance_scale": np.float32(guidance_scales[1]),
    }
    if image_file is not None:
        arrays["image"] = read_input_image(image_file, shapes["image"])
    arrays = {name: arrays[name] for name in shapes}
    return np.asarray(jax.jit(program.call)(weights, arrays))


def open_program(file):
    """(jax.export.Exported, settings, weights) of a file."""
    settings_file = file.with_suffix(".json")
    if not file.is_file() or not settings_file.is_file():
        raise ValueError(
            f"--run {file} is no program of --format stablehlo with its .json beside it; name the "
            ".jaxexport file that export_model.py wrote"
        )
    if not (file.parent / "model_index.json").is_file():
        raise ValueError(
            f"--run {file} is in an incomplete export, which was interrupted; export it again"
        )
    settings = json.loads(settings_file.read_text(encoding="utf-8"))
    try:
        program = export.deserialize(bytearray(file.read_bytes()))
        weights = load_file(file.parent / "weights.safetensors")
    except (ValueError, SafetensorError, OSError) as error:
        raise ValueError(
            f"--run {file} cannot be read by jax {jax.__version__}: {error}; it was written by jax "
            f"{settings['jax']}; export the model again"
        ) from error
    platform = jax.default_backend()
    platform = NAMES_OF_PLATFORMS.get(platform, platform)
    if platform not in program.platforms:
        raise ValueError(
            f"--run {file} is for {' and '.join(program.platforms)}, this machine has {platform}; "
            "export it with another --platform"
        )
    found = {name: (x.shape, x.dtype) for name, x in weights.items()}
    args, _ = jax.tree.unflatten(program.in_tree, program.in_avals)
    wanted = {name: (x.shape, x.dtype) for name, x in args[0].items()}
    if found != wanted:
        raise ValueError(
            f"--run {file} is of another model than the weights.safetensors beside it; export both "
            "again into a new directory"
        )
    return program, settings, weights


def token_ids(folder, text, shape, flag):
    """Token ids of a text from every tokenizer, padded or cut; a cut is printed.

    Args:
        folder: the export.
        text: for all images.
        shape: (B, T) or (B, encoders, T).
        flag: the text's flag.
    """
    rows, used = [], shape[-1] - 2  # without the tokens of start and end
    for name in ("tokenizer", "tokenizer_2"):
        if not (folder / name).is_dir():
            continue
        config = json.loads((folder / name / "tokenizer_config.json").read_text(encoding="utf-8"))
        tokenizer = Tokenizer.from_file(str(folder / name / "tokenizer.json"))
        row = np.full(shape[-1], tokenizer.token_to_id(config["pad_token"]), np.int32)
        ids = tokenizer.encode(text).ids
        is_cut = len(ids) > len(row)
        ids = [*ids[: used + 1], ids[-1]] if is_cut else ids
        row[: len(ids)] = ids
        rows.append(row)
    if is_cut:
        print(f"{flag} is too long: its first {used} tokens are used", file=sys.stderr)
    return np.broadcast_to(rows if len(shape) == 3 else rows[0], shape)


def read_input_image(file, shape):
    """An image file, resized and cropped to a shape (B, 3, H, W): float32 in [-1, 1]."""
    try:
        with open(file, "rb") as opened:
            image = to_rgb(ImageOps.exif_transpose(open_image(opened)))
    except Exception as error:  # decoders raise errors of many types
        raise ValueError(f"--input {file} cannot be read as an image: {error}") from error
    height, width = shape[2:]
    print(f"{file}, {image.width}x{image.height}, at {width}x{height}", file=sys.stderr)
    image = ImageOps.fit(image, (width, height), Image.Resampling.LANCZOS)
    array = np.float32(image).transpose(2, 0, 1) / 127.5 - 1
    return np.broadcast_to(array, shape)


def save_images(images, output):
    """Write images as PNG files, or as floats to an .npy file; returns the paths."""
    output = Path(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    if output.suffix == ".npy":
        np.save(output, images)
        return [output]
    several = len(images) > 1
    paths = [
        output.with_name(f"{output.stem}-{i}{output.suffix}") if several else output
        for i in range(len(images))
    ]
    for image, path in zip(images, paths):
        Image.fromarray(np.uint8((image * 255).round())).save(path)
    return paths
