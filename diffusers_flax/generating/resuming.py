"""Ids in image files, to continue a list of images.

    make_id = id_maker(config, config.model)
    ids = [make_id(prompt=prompt, index=i) for i, prompt in enumerate(prompts)]
    files, missing = continue_images(files, ids, output, "sdxl_single.py", grid)
    save_image(image, file, "generate_cli.py", ids[0])

An image file holds an id, a hash of all that the image depends on. A program that is started again
finds its finished images by their ids, whatever else is in the directory, and makes the others.
"""

import hashlib
import json
import os
import re
import sys
from pathlib import Path

from diffusers_flax.command_line import IMAGE_EXTENSIONS, check_image_file
from diffusers_flax.images import image_mark
from diffusers_flax.loading.hub import WEIGHTS_SUFFIXES, fetch_file
from diffusers_flax.loading.single_file import INDEX_NAME, SingleFile

MODEL_SUFFIXES = {*WEIGHTS_SUFFIXES, ".json", ".txt"}  # weights, configs and tokenizers


def id_maker(config, model):
    """The function that makes the ids of a command's images.

    Args:
        config: of a program. An id depends on all flags but SAME_IMAGES (see flags.py), and on
            names, sizes and times of the files in FILES. vae_tile=0 counts as None, whose tiles
            depend on memory.
        model: value of the model's flag.

    Returns:
        Function of keywords: all else that the image depends on. Returns 32 hexadecimal digits, for
        EXIF's ImageUniqueID.
    """
    files, same = names_in(config, "FILES"), names_in(config, "SAME_IMAGES")
    values = {
        name: identify(name, value) if name in files else value
        for name, value in vars(config).items()
        if name not in same and value not in (None, "", ()) and value is not False
    }
    if values.get("vae_tile") == 0:
        del values["vae_tile"]
    values["commit"] = commit_of(model, vars(config).get("revision"))
    common = hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode())

    def make_id(**image):
        digest = common.copy()
        digest.update(json.dumps(image, sort_keys=True, default=str).encode())
        return digest.hexdigest()[:32]

    return make_id


def names_in(config, which):
    """Names of flags in the tuples FILES or SAME_IMAGES of a config's classes, see flags.py."""
    return {name for cls in type(config).__mro__ for name in vars(cls).get(which, ())}


def identify(flag, value):
    """The value of a flag as JSON, with the state of the files that it names."""
    if isinstance(value, tuple):
        return [identify(flag, x) for x in value]
    if isinstance(value, SingleFile):
        configs = identify(flag, value.configs)
        return [identify(flag, str(value)), value.use_ema_weights, configs]
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


def commit_of(model, revision=None, file=INDEX_NAME):
    """The commit of a model on the hub; None for a file or directory, or if it is unknown.

    file: one that the model has.
    """
    if isinstance(model, SingleFile) or os.path.exists(model):
        return None
    try:
        file = fetch_file(model, file, None, revision)
    except (ValueError, OSError):  # opening the model says more
        return None
    return file and file.parent.name


def checksum_of(path):
    """SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_finished(path, image_id, software):
    """Whether a file is the image with an id; False if it is missing or from another command.

    Args:
        path: of the image.
        image_id: of id_maker's function.
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


def image_files(output, num_images, grid=None):
    """The files for new images.

    Args:
        output: directory; for one image also a file name with an extension.
        num_images: number of images.
        grid: file of the grid, or None.

    Returns:
        Paths; in a directory 000.png, 001.png, ..., after the existing numbers.

    Raises:
        ValueError: output is one file for several images; output or the grid cannot be written.
    """
    if grid:
        check_image_file(grid)
    is_folder = output.is_dir() or not (output.suffix or output.is_file())
    if is_one_file := num_images == 1 and not is_folder:
        files = [output]
    elif output.suffix.lower() in IMAGE_EXTENSIONS or output.is_file():
        raise ValueError(
            f"--output {output} is one file for {num_images} images; give a directory, or one "
            "prompt and --num_images 1 to make one image"
        )
    else:
        numbers = [int(file.stem) for file in output.glob("*.png") if file.stem.isdecimal()]
        first = max(numbers, default=-1) + 1
        files = [output / f"{first + i:03}.png" for i in range(num_images)]
    for file in files if is_one_file else files[:1]:  # further files are new, in the same directory
        check_image_file(file)
    return files


def continue_images(files, ids, output, software, grid=None):
    """The files of all images of a command that may have made some of them already.

    Args:
        files: of image_files.
        ids: the id of each image.
        output, grid: as for image_files.
        software: see is_finished.

    Returns:
        (files, list of the places of the missing files).

    Raises:
        ValueError: output is one file by another program, or the grid is one of the files.
    """
    if files == [output]:
        missing = [] if is_finished(output, ids[0], software) else [0]
    else:
        files, missing = images_of_folder(files, ids)
    if grid and grid.resolve() in [file.resolve() for file in files]:
        raise ValueError(f"--grid {grid} is an image of --output too; give it another name")
    return files, missing


def images_of_folder(files, ids):
    """As continue_images, in a directory."""
    folder = files[0].parent
    numbered = {int(x.stem): x for x in sorted(folder.glob("*.png")) if x.stem.isdecimal()}
    place_of, found = {image_id: i for i, image_id in enumerate(ids)}, {}
    for number, path in numbered.items():
        if (place := place_of.get(image_mark(path)[1])) is not None:
            found.setdefault(place, number)
    missing = [i for i in range(len(ids)) if i not in found]
    made = {i: numbered[number] for i, number in found.items()}
    if made and missing:
        place, number = next(iter(found.items()))
        wanted = {i: number - place + i for i in missing}
        # The names of the interrupted run, unless other images have some of them.
        if min(wanted.values()) >= 0 and not numbered.keys() & {*wanted.values()}:
            made |= {i: folder / f"{number:03}.png" for i, number in wanted.items()}
    return [made.get(i, file) for i, file in enumerate(files)], missing


def print_continued(num_finished, num_images):
    """Print the number of images that an earlier start of this command has made."""
    if num_finished:
        made = f"{num_finished} of {num_images} image{'s' * (num_images > 1)}"
        print(f"made already by this command: {made}", file=sys.stderr)
