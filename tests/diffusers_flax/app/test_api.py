"""The page's API, with gradio_client."""

import dataclasses
import re

import numpy as np
import pytest
from helpers import photo
from PIL import Image
from served_app import (
    FAST,
    call_pipeline,
    edit_by_cli,
    needs_gradio,
    served,
    settings_in,
)
from tiny_models import make_tiny_pipeline, save_tiny_vae

from diffusers_flax.app.settings import Settings
from diffusers_flax.generating.recipes import read_recipe


@pytest.mark.slow
@needs_gradio
def test_the_api(page, connect, model, photo_file, tmp_path):
    """The image of edit_cli.py, also with a mask; its file has the settings; errors say why."""
    from gradio_client import handle_file
    from gradio_client.exceptions import AppError

    client, given = connect(page, folder=tmp_path), {"image": handle_file(photo_file)}
    given |= {"instruction": "make it red", "api_name": "/edit"}
    settings = Settings("make it red", 3.0, 1.2, 3, seed=7, resolution=32)
    changes = {"guidance_scale": 3, "image_guidance_scale": 1.2, "seed": 7}
    job = client.submit(**given, **changes)
    file, made = job.result()
    assert settings_in(file) == settings
    assert made.pop("seconds") > 0 and made["seed"] == 7
    expected = edit_by_cli(model, photo_file, tmp_path / "cli.png", settings=settings)
    np.testing.assert_array_equal(np.asarray(Image.open(file)), expected)
    stages = {progress["stage"] for _, progress in job.outputs()[:-1]}
    assert stages and stages <= {"waiting", "starting", "making"}

    mask = Image.new("L", (96, 72))
    mask.paste(255, (48, 0, 96, 72))
    mask.save(tmp_path / "mask.png")
    file, _ = client.predict(**given, **changes, mask=handle_file(tmp_path / "mask.png"))
    flags = "--mask", tmp_path / "mask.png"
    masked = edit_by_cli(model, photo_file, tmp_path / "m.png", *map(str, flags), settings=settings)
    np.testing.assert_array_equal(np.asarray(Image.open(file)), masked)
    assert np.any(masked != expected)

    (tmp_path / "broken.png").write_bytes(photo_file.read_bytes()[:99])
    broken = handle_file(tmp_path / "broken.png")
    for change, message in (
        ({"image": None}, "there is no image; give image=handle_file(PATH)"),
        ({"image": broken}, "this image cannot be read"),
        ({"mask": broken}, "the mask cannot be read as a mask"),
        ({"instruction": " "}, "instruction= is empty; write a few words"),
        ({"num_inference_steps": 151}, "num_inference_steps=151 must be from 1 to 150"),
        ({"seed": "seven"}, "seed=seven is not of type int"),
        ({"scheduler": "dpmsolver++", "accelerate": ["tgate"]}, "is for text to image"),
    ):
        with pytest.raises(AppError, match=re.escape(message)):
            client.predict(**given | change)


@pytest.mark.slow
@needs_gradio
def test_edits_with_a_reference(connect, photo_file, tmp_path):
    """The image of edit_cli.py, whose recipe names the reference."""
    from gradio_client import handle_file

    model = make_tiny_pipeline(tmp_path / "model", in_channels=12)
    photo(64, 64, seed=1).save(tmp_path / "hat.png")
    given = {"image": handle_file(photo_file), "instruction": "make it red", "seed": 7}
    given |= {"reference": handle_file(tmp_path / "hat.png"), "api_name": "/edit"}
    with served(model, *FAST, TMPDIR=str(tmp_path)) as page:
        file, _ = connect(page, folder=tmp_path).predict(**given)
    flags = "--reference", str(tmp_path / "hat.png")
    settings = settings_in(file)
    expected = edit_by_cli(model, photo_file, tmp_path / "c.png", *flags, settings=settings)
    np.testing.assert_array_equal(np.asarray(Image.open(file)), expected)
    assert read_recipe(file)["reference"] == "hat.png"


@pytest.mark.slow
@needs_gradio
def test_images_from_text_and_an_image(connect, tmp_path):
    """The pipeline's image, with and without mask; text alone works as well."""
    from gradio_client import handle_file

    model, original = make_tiny_pipeline(tmp_path / "model", in_channels=4), photo(32, 24)
    original.save(tmp_path / "photo.png")
    mask = Image.fromarray(np.arange(32) >= np.full((24, 1), 16))
    mask.save(tmp_path / "mask.png")
    settings = Settings("a red panda", 3.0, num_inference_steps=4, seed=7, resolution=32)
    settings = dataclasses.replace(settings, strength=0.5, negative_prompt="grey")
    given = {"instruction": "a red panda", "guidance_scale": 3, "seed": 7, "strength": 0.5}
    given |= {"negative_prompt": "grey", "num_inference_steps": 4}
    given |= {"image": handle_file(tmp_path / "photo.png"), "api_name": "/image_to_image"}
    with served(model, *FAST) as page:
        client = connect(page, folder=tmp_path / "files")
        file, made = client.predict(**given)
        assert settings_in(file, edits=False) == settings and made["strength"] == 0.5
        expected = call_pipeline(model, settings, original, None)
        assert np.abs(np.int16(Image.open(file)) - expected).max() <= 1
        file, _ = client.predict(**given, mask=handle_file(tmp_path / "mask.png"))
        expected = call_pipeline(model, settings, original, mask)
        expected = np.where(np.asarray(mask)[..., None], expected, np.asarray(original))
        assert np.abs(np.int16(Image.open(file)) - expected).max() <= 1
        text = {name: given[name] for name in ("instruction", "seed")}
        file, made = client.predict(**text, api_name="/image")
        with Image.open(file) as image:
            assert made["strength"] is None and image.size == (32, 32)


@pytest.mark.slow
@needs_gradio
def test_previews(connect, tmp_path, photo_file):
    """By a TAESD, which also decodes the result."""
    from gradio_client import handle_file

    model = make_tiny_pipeline(tmp_path / "model", unet_channels=(16,))
    save_tiny_vae(tmp_path / "taesd", (8, 8, 8))
    with served(model, *FAST, "--preview_decoder", str(tmp_path / "taesd")) as page:
        client = connect(page, folder=tmp_path / "files")
        given = {"image": handle_file(photo_file), "instruction": "make it red"}
        file, settings = client.predict(**given, accelerate=["taesd"], seed=3, api_name="/edit")
        with Image.open(file) as image:
            assert image.size == (32, 24) and settings["seed"] == 3
