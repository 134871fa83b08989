"""Recipes of images: the flags that make an image again, in its file; which images are made.

    recipe = recipe_of("generate_cli.py", config, request)
    ids = ids_of("generate_cli.py", config, requests, program_sizes)
    save_image(image, file, "generate_cli.py", ids[0], as_text(recipe))
    words = with_flags_of_image(sys.argv[1:], Config)

edit_cli.py, generate_cli.py and edit_app.py write recipes as JSON into PNG files and read each
other's. The text is the flag "edit" or "prompt". Of files that an image is made from a recipe has
paths and checksums. An image's id is a hash of its recipe and of the model's files, so that a
program that is started again finds its finished images.
"""

import argparse
import hashlib
import json
from dataclasses import fields
from functools import cache
from pathlib import Path

from diffusers_flax.command_line import SAME_FLAGS, refuse
from diffusers_flax.generating.batches import rounds_of
from diffusers_flax.generating.models import EDIT
from diffusers_flax.images import open_image
from diffusers_flax.loading.hub import WEIGHTS_SUFFIXES

KEYWORD = "recipe"  # of the text chunk
LIKE = "--like"
CHECKSUMS = "sha256"  # entry of a recipe: {flag: checksum of its file, or of each of its files}
MASKED = "masked"  # entry of a recipe: whether the page used a mask, which the recipe lacks
INPUTS = ("input", "image", "mask", "reference", "control", "latents")  # flags of files
FLAGS_OF_EDITS = {"edit": "prompt", "input": "image", "first_index": "index"}
# Flags whose values may be files or directories of a model.
OF_MODELS = ("model", "config_name_or_path", "unet", "refiner", "controlnet")
OF_MODELS += ("unet_delta", "lora", "embedding", "accelerate")
# Flags that do not change an image, or choose images.
SAME_IMAGES = (
    *("prompts_file", "num_images", "requests_jsonl", "edits_jsonl", "like", "output", "grid"),
    *("batch_size", "compilation_cache_dir", "executable_dir", "preview", "preview_decoder"),
    *("parallel", "devices", "offload", "coordinator_address", "num_processes", "process_id"),
)
# Flags of the image of --like that other flags replace.
OF_LINES = ("prompt", "image", "mask", "control", "latents", "num_images", "prompts_file")
REPLACED = {
    "requests_jsonl": OF_LINES,
    "prompts_file": ("prompt",),
    "edits_jsonl": ("input", "edit", "mask", "reference", "first_index"),
}
MODEL_SUFFIXES = {*WEIGHTS_SUFFIXES, ".json", ".txt"}  # weights, configs and tokenizers


# ------------------------------------------------------------ recipes


def checksum_of(path):
    """SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def recipe_text(program, flags, files=(), checksum=checksum_of):
    """A recipe for save_image, {keyword: JSON of {"program", **flags, "sha256": checksums}}.

    Args:
        program: its name.
        flags: {name: value} of one image.
        files: {flag: file that the image is made from, or a tuple of files}.
        checksum: file -> its checksum.
    """
    found = {
        name: [*map(checksum, x)] if isinstance(x, tuple) else checksum(x)
        for name, x in dict(files).items()
    }
    recipe = {"program": program, **flags, CHECKSUMS: found}
    return {KEYWORD: json.dumps(recipe, default=str, ensure_ascii=False)}


def recipe_of(program, config, request, checksum=checksum_of):
    """The recipe_text of an image: all flags that differ from the program's defaults.

    Args:
        program, checksum: see recipe_text.
        config: flags of the program.
        request: Request.
    """
    fields_of_edits = FLAGS_OF_EDITS if request.task == EDIT else {}
    flags = {"seed": request.seed}
    for field in fields(config):
        name = fields_of_edits.get(field.name, field.name)
        value = getattr(request if name in vars(request) else config, name)
        is_needless = field.name in SAME_IMAGES or (name == "controlnet" and not request.control)
        if not is_needless and value is not None and value != field.default:
            flags[field.name] = value
    files = {name: flags[name] for name in INPUTS if name in flags}
    return recipe_text(program, flags, files, checksum)


def read_recipe(file):
    """The recipe in a PNG file, a dict; None: it has none."""
    try:
        with open(file, "rb") as opened:
            image = open_image(opened)
            image.load()  # text chunks may stand after the pixels
            return dict(json.loads(image.text[KEYWORD]))
    except Exception:  # decoders raise errors of many types
        return None


# ------------------------------------------------------------ ids


def ids_of(program, config, requests, program_sizes):
    """The id of each image, 32 hexadecimal digits for EXIF's ImageUniqueID.

    It depends on recipes, on names and times of the models' files, and on the contents of the files
    that an image is made from, not on their names.

    Args:
        program, config: see recipe_of.
        requests: list of Request; the output of one may be the image of another.
        program_sizes: (width, height) of each image's program.
    """
    states = [state_of_files(getattr(config, name, None)) for name in OF_MODELS]
    rounds, checksum, ids, made = rounds_of(requests), cache(checksum_of), {}, {}
    for place in sorted(range(len(requests)), key=rounds.__getitem__):
        request = requests[place]
        text = recipe_of(program, config, request, lambda path: made.get(path) or checksum(path))
        recipe = json.loads(text[KEYWORD])
        contents = {name: x for name, x in recipe.items() if name not in recipe[CHECKSUMS]}
        ids[place] = digest_of(contents, program_sizes[place], states)
        made[request.output] = ids[place]
    return [ids[place] for place in range(len(requests))]


def digest_of(*values):
    """32 hexadecimal digits for values of JSON."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:32]


def state_of_files(value):
    """[(name, time of the last change)] of the model files that a flag's value names.

    Images in a model's directory do not count: a program may write them there.
    """
    found = []
    for word in value if isinstance(value, tuple) else (value or "",):
        # FILE, FILE:WEIGHT, taesd:path=DIRECTORY
        for name in (str(word), word.rpartition(":")[0], word.partition("path=")[2]):
            path = Path(name).expanduser()
            files = [path] if path.is_file() else sorted(path.rglob("[!.]*")) if name else []
            files = [file for file in files if file.suffix.lower() in MODEL_SUFFIXES]
            found += [(str(file), file.stat().st_mtime_ns) for file in files]
    return found


# ------------------------------------------------------------ --like


def with_flags_of_image(words, config_class):
    """A command line in which --like FILE gives the flags of that image; other flags win.

    Args:
        words: of the command line.
        config_class: dataclass of the program's flags, with "edit" or "prompt".

    A file without a recipe, or a changed original image or mask, ends the program with one line.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(LIKE)
    found, others = parser.parse_known_args(words)
    if (file := found.like) is None:
        return words
    named = [word.partition("=")[0] for word in others if word.startswith("--")]
    given = {name.removeprefix("--").replace("-", "_").removeprefix("no_") for name in named}
    given |= {own for pair in SAME_FLAGS if given & {*pair} for own in pair}
    given = given.union(*(REPLACED.get(name, ()) for name in given))
    if (recipe := read_recipe(file)) is None:
        refuse(f"{LIKE} {file} has no recipe; name a PNG file as this program wrote it")
    known = {field.name for field in fields(config_class)}
    for name, checksums in recipe.get(CHECKSUMS, {}).items():
        paths, checksums = (x if isinstance(x, list) else [x] for x in (recipe[name], checksums))
        for path, checksum in zip(paths, checksums):
            if name not in given and not (Path(path).is_file() and checksum_of(path) == checksum):
                refuse(
                    f"{LIKE} {file} was made from {path}, which does not exist here or has changed "
                    f"since; name the file with --{name}"
                )
    if recipe.get(MASKED) and "mask" not in given:
        refuse(f"{LIKE} {file} has a painted mask, which its recipe lacks; give it with --mask")
    for name, value in recipe.items():
        values = value if isinstance(value, list) else [value]
        if name not in known - given:
            continue
        if isinstance(value, bool):
            others.append(f"--{name}" if value else f"--no_{name}")
        elif len(values) == 1:
            others.append(f"--{name}={values[0]}")  # it may begin with -
        else:
            others += [f"--{name}", *map(str, values)]
    return others
