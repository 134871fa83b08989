"""Recipes of images: the flags that make an image again, in its file; which images are made.

    recipe = recipe_of("generate_cli.py", config, request)
    ids = ids_of("generate_cli.py", config, requests, zip(sizes, program_sizes))
    save_image(image, file, "generate_cli.py", ids[0], as_text(recipe))
    words = with_flags_of_image(sys.argv[1:], Config, REPLACED)

edit_cli.py, generate_cli.py and edit_app.py write recipes as JSON into PNG files and read each
other's. The text is the flag "edit" or "prompt". Of files that an image is made from a recipe has
paths and checksums. An image's id is a hash of its recipe and of the model's files, so that a
program that is started again finds its finished images.
"""

import hashlib
import json
import os
import re
import sys
from collections import Counter
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path

from diffusers_flax.command_line import SAME_FLAGS, refuse
from diffusers_flax.generating.batches import rounds_of
from diffusers_flax.generating.masks import finish_image, load_mask
from diffusers_flax.generating.sizes import load_fitted
from diffusers_flax.images import image_mark, open_image, save_image, to_pil
from diffusers_flax.loading.hub import WEIGHTS_SUFFIXES, fetch_file
from diffusers_flax.loading.single_file import INDEX_NAME, SingleFile

KEYWORD = "recipe"  # of the text chunk
LIKE = "--like"
CHECKSUMS = "sha256"  # entry of a recipe: {flag: checksum of its file, or of each of its files}
MASKED = "masked"  # entry of a recipe: whether the page used a mask, which the recipe lacks
FILES_OF_REQUESTS = ("input", "image", "mask", "control", "latents")  # flags
FLAGS_OF_EDITS = {"prompt": "edit", "image": "input", "mask": "mask", "index": "first_index"}
MODEL_SUFFIXES = {*WEIGHTS_SUFFIXES, ".json", ".txt"}  # weights, configs and tokenizers


# ------------------------------------------------------------ recipes


def checksum_of(path):
    """SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def make_recipe(program, flags, files=(), checksum=checksum_of):
    """A recipe, a dict: {"program", **flags, "sha256": checksums}.

    Args:
        program: its name.
        flags: {name: value} of one image.
        files: {flag: file that the image is made from, or a tuple of files}.
        checksum: file -> its checksum.
    """

    def checksums(value):
        return [checksum(x) for x in value] if isinstance(value, tuple) else checksum(value)

    found = {name: checksums(value) for name, value in dict(files).items()}
    return {"program": program, **flags, CHECKSUMS: found}


def as_text(recipe):
    """{keyword: text} for save_image."""
    return {KEYWORD: json.dumps(recipe, default=str, ensure_ascii=False)}


def recipe_text(program, flags, files=()):
    """as_text of make_recipe."""
    return as_text(make_recipe(program, flags, files))


def recipe_of(program, config, request, checksum=checksum_of):
    """The recipe of an image.

    Args:
        program, checksum: see make_recipe.
        config: Config of the program, with its paths as the user wrote them.
        request: Request.
    """
    same = {*names_in(config, "SAME_IMAGES"), *(() if request.control else ("controlnet",))}
    flags = {name: x for name, x in changed(config).items() if name not in same}
    if request.index is None:
        flags |= {name: x for name, x in changed(request).items() if name not in ("line", "output")}
        flags["prompt"] = request.prompt  # also their defaults
    else:
        own = {flag: getattr(request, name) for name, flag in FLAGS_OF_EDITS.items()}
        flags |= {name: x for name, x in own.items() if x}
    files = {name: flags[name] for name in FILES_OF_REQUESTS if name in flags}
    return make_recipe(program, flags | {"seed": request.seed}, files, checksum)


def write_image(result, request, size, path, program, image_id, config):
    """Write an image with its recipe.

    Args:
        result: of the request's program, NumPy (H, W, 3) in [0, 1].
        request, program, config: see recipe_of.
        size: (width, height) of the image.
        path: of the file.
        image_id: of ids_of.
    """
    original = mask = None
    if request.mask is not None:
        original, mask = load_fitted(request.image, size), load_mask(request.mask, size)
    (image,) = to_pil(result)
    image = finish_image(image, size, original, mask, request.mask_feather)
    texts = as_text(recipe_of(program, config, request))
    save_image(image, path, program, image_id, texts)


def changed(flags):
    """The fields of a dataclass that differ from their defaults: {name: value}."""
    values = {field.name: getattr(flags, field.name) for field in fields(flags)}
    defaults = {field.name: field.default for field in fields(flags)}
    return {
        name: x for name, x in values.items() if defaults[name] is MISSING or x != defaults[name]
    }


def names_in(config, which):
    """Names of flags in the tuples FILES or SAME_IMAGES of a config's classes, see flags.py."""
    return {name for cls in type(config).__mro__ for name in vars(cls).get(which, ())}


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


def ids_of(program, config, requests, sizes):
    """The id of each image, 32 hexadecimal digits for EXIF's ImageUniqueID.

    It depends on recipes, on names, sizes and times of the models' files, on the contents of the
    files that an image is made from, not on their names, and on how often an equal image came
    before.

    Args:
        program, config: see recipe_of.
        requests: list of Request; the output of one may be the image of another.
        sizes: for each, ((width, height) of the result, of its program).
    """
    states = {
        name: identify(name, value)
        for name in sorted(names_in(config, "FILES"))
        if (value := getattr(config, name))
    }
    commit = commit_of(config.model, getattr(config, "revision", None))
    rounds, checksum, made = rounds_of(requests), cache(checksum_of), {}
    programs = [None if size == program else program for size, program in sizes]
    ids, counts = [None] * len(requests), Counter()
    for place in sorted(range(len(requests)), key=rounds.__getitem__):
        recipe = recipe_of(
            program, config, requests[place], lambda path: made.get(path) or checksum(path)
        )
        contents = {name: x for name, x in recipe.items() if name not in recipe[CHECKSUMS]}
        known = digest_of(contents, programs[place], states, commit)
        counts[known] += 1
        ids[place] = digest_of(known, counts[known])
        made[requests[place].output] = ids[place]
    return ids


def digest_of(*values):
    """32 hexadecimal digits for values of JSON."""
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def identify(flag, value):
    """The value of a flag as JSON, with the state of the files that it names."""
    if isinstance(value, tuple):
        return [identify(flag, x) for x in value]
    value = str(value)
    if flag == "accelerate":  # taesd:path=DIRECTORY; other words may be names of directories too
        paths = re.findall("[:,]path=([^,]+)", value)
    else:  # FILE, FILE:WEIGHT or FILE:TOKEN
        paths = [value if os.path.exists(os.path.expanduser(value)) else value.rpartition(":")[0]]
    return [
        value,
        *(file for path in paths if path for file in state_of_files(Path(path).expanduser())),
    ]


def state_of_files(path):
    """(name, bytes, time of the last change) of a file, or of each file of a model's directory.

    Images in the directory do not count: a program may write them there.
    """
    files = sorted(x for x in path.rglob("[!.]*") if x.suffix.lower() in MODEL_SUFFIXES)
    files = [path] if path.is_file() else files
    found = ((file, file.stat()) for file in files if file.is_file())
    return [(str(file), stat.st_size, stat.st_mtime_ns) for file, stat in found]


def commit_of(model, revision=None):
    """The commit of a model on the hub; None for a file or directory, or if it is unknown."""
    if isinstance(model, SingleFile) or os.path.exists(model):
        return None
    try:
        file = fetch_file(model, INDEX_NAME, None, revision)
    except (ValueError, OSError):  # opening the model says more
        return None
    return file and file.parent.name


def is_finished(path, image_id, software):
    """Whether a file is the image with an id; False if it is missing or from another command.

    Args:
        path: of the image.
        image_id: of ids_of.
        software: the program's mark.

    Raises:
        ValueError: the file is not by the program, so it must not be replaced.
    """
    if not path.exists():
        return False
    by, found = image_mark(path)
    if by != software:
        raise ValueError(
            f"{path} exists, is not by {software} and would be overwritten; name another output, "
            "or delete the file"
        )
    return found == image_id


def print_continued(num_finished, num_images):
    """Print the number of images that an earlier start of this command has made."""
    if num_finished:
        made = f"{num_finished} of {num_images} image{'s' * (num_images > 1)}"
        print(f"made already by this command: {made}", file=sys.stderr)


# ------------------------------------------------------------ --like


def with_flags_of_image(words, config_class, replaced):
    """A command line in which --like FILE gives the flags of that image; other flags win.

    Args:
        words: of the command line.
        config_class: dataclass of the program's flags, with "edit" or "prompt".
        replaced: {flag: flags of the image that it replaces, too}.

    A file without a recipe, or a changed original image or mask, ends the program with one line.
    """
    places = [i for i, word in enumerate(words) if word.partition("=")[0] == LIKE]
    if not places:
        return words
    place = places[0]
    _, is_joined, file = words[place].partition("=")
    others = [*words[:place], *words[place + (1 if is_joined else 2) :]]
    if not is_joined:
        file = "".join(words[place + 1 : place + 2])
    named = [word.partition("=")[0] for word in others if word.startswith("--")]
    given = {name.removeprefix("--").replace("-", "_").removeprefix("no_") for name in named}
    given |= {own for pair in SAME_FLAGS if given & {*pair} for own in pair}
    given = given.union(*(replaced.get(name, ()) for name in given))
    if not Path(file).is_file():
        refuse(f"{LIKE} {file} does not exist; name an image of this program")
    if (recipe := read_recipe(file)) is None:
        refuse(f"{LIKE} {file} has no recipe; name a PNG file as this program wrote it")
    known = {field.name for field in fields(config_class)}
    for name, program in (("edit", "edit_cli.py"), ("prompt", "generate_cli.py")):
        if name in recipe and name not in known:
            refuse(f"{LIKE} {file} is not of this program; {program} {LIKE} {file} makes it again")
    check_files(file, recipe, given)
    if recipe.get(MASKED) and "mask" not in given:
        refuse(f"{LIKE} {file} has a painted mask, which its recipe lacks; give it with --mask")
    flags = {name: x for name, x in recipe.items() if name in known - given}
    return [*others, *(word for name, value in flags.items() for word in as_words(name, value))]


def check_files(file, recipe, given):
    """Refuse a recipe whose input files are missing or changed, unless other files are given."""
    for name, checksums in recipe.get(CHECKSUMS, {}).items():
        paths = recipe[name] if isinstance(recipe[name], list) else [recipe[name]]
        checksums = checksums if isinstance(checksums, list) else [checksums]
        for path, checksum in zip(paths, checksums):
            is_there = Path(path).is_file()
            if name not in given and not (is_there and checksum_of(path) == checksum):
                problem = "has changed since" if is_there else "does not exist here"
                remedy = f"name the file with --{name}"
                refuse(f"{LIKE} {file} was made from {path}, which {problem}; {remedy}")


def as_words(name, value):
    """A flag and its value as words of a command line."""
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no_{name}"]
    if isinstance(value, list) and len(value) != 1:
        return [f"--{name}", *map(str, value)]
    return [f"--{name}={value[0] if isinstance(value, list) else value}"]  # it may begin with -
