"""The recipe of an image: the flags that make it again, as JSON in a text chunk of its PNG file.

    text = recipe_text("edit_cli.py", flags, {"input": path})
    save_image(image, file, "edit_cli.py", image_id, text)
    recipe = read_recipe(file)
    words = with_flags_of_image(sys.argv[1:], Config, REPLACED)

edit_cli.py, generate_cli.py and edit_app.py write it and read each other's. The text is the flag
"edit" or "prompt". Of an original image and its mask a recipe has paths and checksums.
"""

import json
from dataclasses import MISSING, fields
from pathlib import Path

from diffusers_flax.command_line import refuse
from diffusers_flax.generating.resuming import checksum_of
from diffusers_flax.images import open_image

KEYWORD = "recipe"  # of the text chunk
LIKE = "--like"
CHECKSUMS = "sha256"  # entry of a recipe: {flag: checksum of its file}
MASKED = "masked"  # entry of a recipe: whether the page used a mask, which the recipe lacks


def recipe_text(program, flags, files=()):
    """{keyword: text} for save_image.

    Args:
        program: name of the program.
        flags: {name: value} of one image.
        files: {flag: file that is read}; the recipe has their checksums.
    """
    checksums = {name: checksum_of(file) for name, file in dict(files).items()}
    recipe = {"program": program, **flags, CHECKSUMS: checksums}
    return {KEYWORD: json.dumps(recipe, default=str, ensure_ascii=False)}


def read_recipe(file):
    """The recipe in a PNG file, a dict; None: it has none."""
    try:
        with open(file, "rb") as opened:
            image = open_image(opened)
            image.load()  # text chunks may stand after the pixels
            return dict(json.loads(image.text[KEYWORD]))
    except Exception:  # decoders raise errors of many types
        return None


def changed(flags):
    """The fields of a dataclass that differ from their defaults: {name: value}."""
    values = {field.name: getattr(flags, field.name) for field in fields(flags)}
    defaults = {field.name: field.default for field in fields(flags)}
    return {
        name: x for name, x in values.items() if defaults[name] is MISSING or x != defaults[name]
    }


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
    if len(places) > 1:
        refuse(f"{LIKE} is given {len(places)} times; name one image")
    place = places[0]
    _, is_joined, file = words[place].partition("=")
    rest = [*words[:place], *words[place + (1 if is_joined else 2) :]]
    if not is_joined:
        file = "".join(words[place + 1 : place + 2])
    named = [word.partition("=")[0] for word in rest if word.startswith("--")]
    given = {name.removeprefix("--").replace("-", "_") for name in named}
    given |= {name.removeprefix("no_") for name in given}
    given = given.union(*(replaced.get(name, ()) for name in given))
    recipe, known = recipe_for(file, config_class)
    check_files(file, recipe, given)
    if recipe.get(MASKED) and "mask" not in given:
        refuse(f"{LIKE} {file} has a painted mask, which its recipe lacks; give it with --mask")
    flags = {name: x for name, x in recipe.items() if name in known - given}
    return [*rest, *(word for name, value in flags.items() for word in as_words(name, value))]


def recipe_for(file, config_class):
    """(recipe of --like FILE, names of the program's flags)."""
    if not file or file.startswith("--"):
        refuse(f"{LIKE} has no value; name an image of this program")
    if not Path(file).is_file():
        refuse(f"{LIKE} {file} does not exist; name an image of this program")
    if (recipe := read_recipe(file)) is None:
        refuse(f"{LIKE} {file} has no recipe; name a PNG file as this program wrote it")
    known = {field.name for field in fields(config_class)}
    for name, program in (("edit", "edit_cli.py"), ("prompt", "generate_cli.py")):
        if name in recipe and name not in known:
            refuse(f"{LIKE} {file} is not of this program; {program} {LIKE} {file} makes it again")
    return recipe, known


def check_files(file, recipe, given):
    """Refuse a recipe whose input files are missing or changed, unless other files are given."""
    for name, checksum in recipe.get(CHECKSUMS, {}).items():
        path = recipe[name][0] if isinstance(recipe[name], list) else recipe[name]
        if name in given or (Path(path).is_file() and checksum_of(path) == checksum):
            continue
        problem = "has changed since" if Path(path).is_file() else "does not exist here"
        refuse(f"{LIKE} {file} was made from {path}, which {problem}; name the file with --{name}")


def as_words(name, value):
    """A flag and its value as words of a command line."""
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no_{name}"]
    if isinstance(value, list) and len(value) != 1:
        return [f"--{name}", *map(str, value)]
    return [f"--{name}={value[0] if isinstance(value, list) else value}"]  # it may begin with -
