"""Ids of images; finding the images of an interrupted command."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from diffusers_flax.generating.resuming import continue_images, id_maker, is_finished
from diffusers_flax.images import image_mark, save_image
from edit_cli import Config


def id_maker_of(config):
    return id_maker(config, config.model)


def test_ids_stay_the_same(tmp_path, monkeypatch):
    """Images of earlier versions are not made again."""
    monkeypatch.chdir(tmp_path)
    Path("model/unet").mkdir(parents=True)
    for file in ("a.safetensors", "model/unet/weights.bin"):
        Path(file).write_text("1")
        os.utime(file, ns=(10**18, 10**18))
    shared = {
        **dict(lora=("a.safetensors:0.5",), accelerate=("deepcache",), vae_tile=64, seed=3),
        **dict(storage="int8", parallel=("rows=2",), dtype="float32", batch_size=2, eta=0.5),
        **dict(grid=Path("g.png"), negative_prompt="bad", scheduler="ddim", num_processes=2),
    }
    files = dict(input=(Path("i.png"),), output=Path("o.png"), mask=("m.png",), mask_feather=2)
    more = dict(edit=("red",), preview=3, preview_decoder="x", compilation_cache_dir="y")
    scales = dict(num_inference_steps=50, guidance_scale=7.5, image_guidance_scale=1.5)
    config = Config("model", **files, **more, resolution=64, exact_size=True, **scales, **shared)
    make_id = id_maker(config, "model")
    assert make_id(instruction="red", index=0) == "6176e5029950d16baf61058cc8c723df"
    delta = ("model/unet", "a.safetensors:0.5")
    chosen = ("deepcache", "taesd:path=model/unet")
    others = replace(config, embedding=("a.safetensors:<a>",), unet_delta=delta, accelerate=chosen)
    make_id = id_maker(others, "model")
    assert make_id(instruction="red", index=0) == "c5f4da40eb51f844dd16337febe03f05"


def test_what_an_image_id_depends_on(tmp_path):
    model, lora = tmp_path / "model", tmp_path / "a.safetensors"
    (model / "unet").mkdir(parents=True)
    (model / "unet" / "weights.bin").write_text("1")
    lora.write_text("1")
    config = Config(str(model), lora=(f"{lora}:0.5",))
    image_id = id_maker_of(config)(prompt="red", index=0)
    assert len(image_id) == 32 and int(image_id, 16)
    for same in (config, replace(config, batch_size=2, grid=Path("grid.png"))):
        assert id_maker_of(same)(prompt="red", index=0) == image_id
    make_id = id_maker_of(config)
    others = {make_id(prompt="blue", index=0), make_id(prompt="red", index=1)}
    for changes in ({"seed": 1}, {"eta": 0.0}, {"lora": (f"{lora}:0.6",)}, {"lora": ()}):
        others.add(id_maker_of(replace(config, **changes))(prompt="red", index=0))
    lora.write_text("12")
    others.add(id_maker_of(config)(prompt="red", index=0))
    lora.write_text("1")
    os.utime(model / "unet" / "weights.bin", ns=(1, 1))
    others.add(id_maker_of(config)(prompt="red", index=0))
    assert len(others - {image_id}) == 8


def test_what_an_image_id_does_not_depend_on(tmp_path, monkeypatch):
    """Not on images in a model's directory, nor on flags that give the same image."""
    monkeypatch.chdir(tmp_path)
    taesd = tmp_path / "taesd"
    for folder in ("model/unet", "taesd"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "weights.safetensors").write_text("1")
    chosen = ("deepcache", f"taesd:path={taesd}")
    config = Config("model", lora=("owner/lora:0.5",), accelerate=chosen)
    image_id = id_maker_of(config)(index=0)
    for output in ("deepcache", "path", "owner/lora", "0.5", "model", "model/output"):
        folder = tmp_path / output
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("000.png", "a.jpg"):
            save_image(np.zeros((8, 8, 3)), folder / name)
        assert id_maker_of(config)(index=0) == image_id
    for same in ({"vae_tile": 0}, {"preview": 5}, {"preview_decoder": str(taesd)}):
        assert id_maker_of(replace(config, **same))(index=0) == image_id
    assert id_maker_of(replace(config, vae_tile=512))(index=0) != image_id
    (taesd / "weights.safetensors").write_text("12")
    assert id_maker_of(config)(index=0) != image_id


def test_the_grid_is_no_image_of_an_interrupted_run(tmp_path):
    ids = [f"{i:032x}" for i in range(4)]
    for i in (0, 1, 3):
        save_image(np.zeros((8, 8, 3)), tmp_path / f"{i:03}.png", "a.py", ids[i])
    new = [tmp_path / f"{4 + i:03}.png" for i in range(4)]
    for number in (0, 2):  # exists, is missing
        with pytest.raises(ValueError, match=rf"--grid .*/{number:03}\.png is an image of"):
            continue_images(new, ids, tmp_path, "a.py", tmp_path / f"{number:03}.png")
    files, missing = continue_images(new, ids, tmp_path, "a.py", tmp_path / "004.png")
    assert missing == [2] and files[2] == tmp_path / "002.png"


def test_existing_images_of_a_folder(tmp_path):
    """New numbers follow the existing ones; an interrupted run keeps its numbers."""
    ids = [f"{i:032x}" for i in range(4)]
    image = np.zeros((8, 8, 3))

    def folder(*images):
        """Of images: None is not by us, else the place of its number."""
        for file in tmp_path.iterdir():
            file.unlink()
        for number, place in enumerate(images):
            if place != "free":
                mark = () if place is None else ("a.py", ids[place])
                save_image(image, tmp_path / f"{number:03}.png", *mark)
        new = [tmp_path / f"{len(images) + i:03}.png" for i in range(4)]
        files, missing = continue_images(new, ids, tmp_path, "a.py")
        return [int(file.stem) for file in files], missing

    assert folder() == ([0, 1, 2, 3], [0, 1, 2, 3])
    assert folder(None, None) == ([2, 3, 4, 5], [0, 1, 2, 3])
    assert folder(0, 1) == ([0, 1, 2, 3], [2, 3])
    assert folder(None, "free", 1, "free", 3) == ([1, 2, 3, 4], [0, 2])
    assert folder(0, 1, 2, 3) == ([0, 1, 2, 3], [])
    assert folder(0, 1, None) == ([0, 1, 5, 6], [2, 3])  # something else has the name
    assert folder(1) == ([1, 0, 3, 4], [0, 2, 3])  # which would be -1


def test_only_our_images_are_replaced(tmp_path):
    image, number = Image.new("RGB", (8, 8)), "0" * 32
    for name in ("a.png", "a.jpg"):
        file = tmp_path / name
        assert not is_finished(file, number, "a.py")
        save_image(image, file, "a.py", number)
        assert image_mark(file) == ("a.py", number)
        assert is_finished(file, number, "a.py")
        assert not is_finished(file, "1" * 32, "a.py")
        image.save(file)
        with pytest.raises(ValueError, match="exists, is not by a\\.py and would be overwritten"):
            is_finished(file, number, "a.py")
        file.write_text("text")
        assert image_mark(file) == (None, None)
