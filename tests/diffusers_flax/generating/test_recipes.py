"""Recipes and ids of images; finding the images of an interrupted command."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers import photo
from PIL import Image

from diffusers_flax.generating.recipes import ids_of
from diffusers_flax.generating.requests import Request, output_files
from diffusers_flax.images import image_mark, save_image
from edit_cli import Config


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    """The working directory, with a model, a LoRA, a TAESD and images."""
    monkeypatch.chdir(tmp_path)
    for file in ("model/unet/weights.bin", "taesd/weights.safetensors", "a.safetensors"):
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text("1")
    for seed, name in enumerate(("a.png", "b.png")):
        photo(8, 8, seed).save(name)
    Path("copy.png").write_bytes(Path("a.png").read_bytes())
    return tmp_path


CONFIG = Config("model", lora=("a.safetensors:0.5",), accelerate=("taesd:path=taesd",))


def edit(image="a.png", instruction="red", **more):
    return Request(prompt=instruction, image=Path(image), image_guidance_scale=1.5, **more)


def id_of(config=CONFIG, request=None, program_size=(8, 8)):
    requests = [edit() if request is None else request]
    return ids_of("a.py", config, requests, [program_size])[0]


def test_what_an_id_depends_on():
    first = id_of()
    assert len(first) == 32 and int(first, 16)
    same = [replace(CONFIG, batch_size=2, grid=Path("g.png")), replace(CONFIG, preview=5)]
    save_image(np.zeros((8, 8, 3)), Path("model/000.png"))  # no file of the model
    assert {*map(id_of, same), id_of(request=edit("copy.png"))} == {first}
    others = [
        id_of(replace(CONFIG, **x))
        for x in ({"scheduler": "ddim"}, {"vae_tile": 512}, {"lora": ()})
    ]
    requests = edit(instruction="blue"), edit(index=1), edit("b.png"), edit(seed=1)
    others += [id_of(request=x) for x in (*requests, edit(mask=Path("b.png")))]
    others.append(id_of(program_size=(8, 16)))
    Path("a.safetensors").write_text("12")
    others.append(id_of())
    Path("a.safetensors").write_text("1")
    os.utime("model/unet/weights.bin", ns=(1, 1))
    others.append(id_of())
    Path("taesd/weights.safetensors").write_text("12")
    others.append(id_of())
    assert len({first, *others}) == 1 + len(others)


def test_ids_of_chains():
    """An edit of another's output depends on what that depends on."""
    sizes = [(8, 8)] * 2

    def chain(instruction):
        first = edit(instruction=instruction, output=Path("x.png"))
        return ids_of("a.py", CONFIG, [edit("x.png", index=1, after=1), first], sizes)

    assert chain("red") == chain("red") and not {*chain("red")} & {*chain("blue")}


def test_only_our_images_are_replaced(tmp_path):
    image = Image.new("RGB", (8, 8))
    for name in ("x.png", "x.jpg"):
        file = tmp_path / name
        save_image(image, file, "a.py", "0" * 32)
        assert image_mark(file) == ("a.py", "0" * 32)
        for image_id, todo in (("0" * 32, []), ("1" * 32, [0])):
            assert output_files([Request()], [image_id], file, "a.py", None) == ([file], todo)
        image.save(file)
        with pytest.raises(ValueError, match="exists, is not by a\\.py and would be overwritten"):
            output_files([Request()], ["0" * 32], file, "a.py", None)


@pytest.mark.parametrize(
    ("images", "numbers", "missing"),
    [  # images: None is not by us, else the place of a number
        ([], [0, 1, 2, 3], [0, 1, 2, 3]),
        ([None, None], [2, 3, 4, 5], [0, 1, 2, 3]),
        ([0, 1], [0, 1, 2, 3], [2, 3]),
        ([None, 0, "free", 2], [1, 2, 3, 4], [1, 3]),
        ([0, 1, 2, 3], [0, 1, 2, 3], []),
        ([0, 1, None], [0, 1, 3, 4], [2, 3]),
    ],
)
def test_numbers_follow_other_images_and_an_interrupted_run_goes_on(images, numbers, missing):
    ids = [f"{i:032x}" for i in range(4)]
    for number, place in enumerate(images):
        if place != "free":
            mark = () if place is None else ("a.py", ids[place])
            save_image(np.zeros((8, 8, 3)), Path("out", f"{number:03}.png"), *mark)
    files, todo = output_files([Request()] * 4, ids, Path("out"), "a.py", None)
    assert ([int(file.stem) for file in files], todo) == (numbers, missing)
    with pytest.raises(ValueError, match="2 images would be written to"):
        output_files([Request()] * 4, ids, Path("out"), "a.py", files[1])
