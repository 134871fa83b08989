"""Run a program of --format stablehlo. Needs jax, tokenizers, Pillow and no code of models.

Source: the file is jax.export's; see exporting/stablehlo_files.py.
"""

import json
import sys

import jax
import numpy as np
from jax import export
from PIL import Image, ImageOps
from safetensors.flax import load_file
from tokenizers import Tokenizer

from diffusers_flax.data.images import load_image
from diffusers_flax.images import prepare_images, save_image, to_pil


def run_program(file, texts, image_files, seed, guidance_scales):
    """Make the images of a program.

    Args:
        file: Path of the .jaxexport.
        texts: {"prompt", "negative_prompt"}, for all images.
        image_files: {"image", "reference": Path or None}.
        seed: of the noise.
        guidance_scales: (guidance_scale, image_guidance_scale).

    Returns:
        float32 (B, H, W, 3) in [0, 1].

    Raises:
        ValueError: it is not a program, or the arguments do not fit it.
    """
    if not (file.is_file() and (file.parent / "model_index.json").is_file()):
        raise ValueError(
            f"{file} is no program of a complete export; make one with export_model.py"
        )
    program = export.deserialize(bytearray(file.read_bytes()))
    (_, inputs), _ = jax.tree.unflatten(program.in_tree, program.in_avals)
    shapes = {name: x.shape for name, x in inputs.items()}
    for (name, image_file), flag in zip(image_files.items(), ("--input", "--reference")):
        if (name in shapes) != (image_file is not None):
            raise ValueError(
                f"{file} needs {flag}, an image"
                if name in shapes
                else f"{file} takes no {flag}; leave it out"
            )
    if texts["negative_prompt"] and "neg_prompt_ids" not in shapes:
        raise ValueError("--negative_prompt: the program of SDXL takes none; leave it out")
    ids = {
        name: token_ids(file.parent, text, shapes["prompt_ids"], name)
        for name, text in texts.items()
    }
    arrays = {
        "prompt_ids": ids["prompt"],
        "neg_prompt_ids": ids["negative_prompt"],
        "key": np.asarray(jax.random.key_data(jax.random.key(seed))),
        "guidance_scale": np.float32(guidance_scales[0]),
        "image_guidance_scale": np.float32(guidance_scales[1]),
    }
    for name in image_files.keys() & shapes.keys():
        arrays[name] = read_input_image(image_files[name], shapes[name])
    arrays = {name: arrays[name] for name in shapes}
    weights = load_file(file.parent / "weights.safetensors")
    return np.asarray(jax.jit(program.call)(weights, arrays))


def token_ids(folder, text, shape, name):
    """Token ids of a text from every tokenizer, padded or cut; a cut is printed.

    Args:
        folder: the export.
        text: for all images.
        shape: (B, T) or (B, encoders, T).
        name: of the text's flag.
    """
    rows, length = [], shape[-1]
    for tokenizer_dir in sorted(folder.glob("tokenizer*/")):
        config = json.loads((tokenizer_dir / "tokenizer_config.json").read_text(encoding="utf-8"))
        tokenizer = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
        pad_id = tokenizer.token_to_id(config["pad_token"])
        tokenizer.enable_truncation(length)
        tokenizer.enable_padding(length=length, pad_id=pad_id)
        encoding = tokenizer.encode(text)
        rows.append(np.int32(encoding.ids))
    if encoding.overflowing:
        print(f"--{name} is too long: its first {length - 2} tokens are used", file=sys.stderr)
    return np.broadcast_to(rows if len(shape) == 3 else rows[0], shape)


def read_input_image(file, shape):
    """An image file, resized and cropped to a shape (B, 3, H, W): float32 in [-1, 1]."""
    image, (height, width) = load_image(file), shape[2:]
    print(f"{file}, {image.width}x{image.height}, at {width}x{height}", file=sys.stderr)
    image = ImageOps.fit(image, (width, height), Image.Resampling.LANCZOS)
    return np.broadcast_to(prepare_images(image), shape)


def save_images(images, output):
    """Write images as image files, or as floats to an .npy file; returns the paths."""
    output.parent.mkdir(parents=True, exist_ok=True)
    if output.suffix == ".npy":
        np.save(output, images)
        return [output]
    paths = [output]
    if len(images) > 1:
        paths = [output.with_stem(f"{output.stem}-{i}") for i in range(len(images))]
    for image, path in zip(to_pil(images), paths):
        save_image(image, path)
    return paths
