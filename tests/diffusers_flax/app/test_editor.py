"""The queue, and images of requests, which are edit_cli.py's."""

import asyncio
import dataclasses
import threading
from contextlib import aclosing

import numpy as np
import pytest
from helpers import edit_json, photo
from PIL import Image, ImageOps
from safetensors.numpy import save_file
from served_app import call_pipeline, edit_by_cli
from tiny_models import make_tiny_pipeline, make_tiny_xl

import edit_app
from diffusers_flax.app.editor import Editor, ImageRequest, Stopped
from diffusers_flax.app.settings import Settings


def open_editor(model, **options):
    config = edit_app.Config(str(model), compilation_cache_dir="", **options)
    editor = Editor(config, edit_app.layout_of_flags(config))
    editor.open()
    return editor


def make(editor, request, stop_when=lambda: False):
    """The first image of a request, uint8 (H, W, 3); it is stopped when something is true."""

    async def follow():
        async for _ in editor.follow(request):
            if stop_when():
                request.stopped.set()

    asyncio.run(follow())
    return np.asarray(request.images[0])


def test_the_queue(model, monkeypatch):
    """Requests run in order; a stopped or abandoned one leaves; a full queue takes no more."""
    made, go_on = [], threading.Event()

    def make(self, request):
        go_on.wait(10)
        made.append(request.settings.seed)
        if request.settings.seed == 3:
            raise ValueError("no memory")

    monkeypatch.setattr(Editor, "_make", make)
    editor = Editor(edit_app.Config(str(model), compilation_cache_dir="", max_queue=4))
    requests = [ImageRequest(Settings("red", seed=seed)) for seed in range(6)]

    async def abandon(request):
        async with aclosing(editor.follow(request)) as following:
            async for _ in following:
                assert request.stage == "waiting" and request in editor.requests
                await asyncio.sleep(0.3)
                break

    async def follow(request):
        async for _ in editor.follow(request):
            pass

    async def follow_all():
        follow_one = [follow, abandon, follow, follow, follow, follow]
        running = [f(request) for f, request in zip(follow_one, requests)]
        loop = asyncio.get_running_loop()
        loop.call_later(0.1, requests[2].stopped.set)
        loop.call_later(1, go_on.set)
        return await asyncio.gather(*running, return_exceptions=True)

    *results, full = asyncio.run(follow_all())
    assert made == [0, 3, 4] and editor.requests == []
    assert [type(x) for x in results] == [type(None)] * 2 + [Stopped, ValueError, type(None)]
    assert "4 requests wait already; try again" in str(full)


@pytest.mark.slow
def test_the_editor_makes_the_images_of_edit_cli(model, photo_file, tmp_path):
    """Also after a request that was stopped in its first steps, which ends early."""
    settings = Settings("make it red", 3.0, 1.2, 4, seed=7, resolution=32)
    editor, image = open_editor(model), Image.open(photo_file)
    trial = editor.compile_first([photo_file])
    assert trial.done.wait(120) and isinstance(trial.error, Stopped)
    many = ImageRequest(dataclasses.replace(settings, num_inference_steps=100), image)
    with pytest.raises(Stopped):
        make(editor, many, lambda: many.step > 0)
    assert 0 < many.step < 100
    request = ImageRequest(settings, image)
    expected = edit_by_cli(model, photo_file, tmp_path / "cli.png", settings=settings)
    np.testing.assert_array_equal(make(editor, request), expected)
    assert request.step == 3  # the last one is not shown

    # A shape that is scaled for its program, and a mask.
    photo(96, 70).save(tmp_path / "near.png")
    mask = Image.new("1", (96, 70))
    mask.paste(1, (48, 0, 96, 70))
    mask.save(tmp_path / "mask.png")
    near = dataclasses.replace(settings, resolution=128, mask_feather=3)
    made = make(editor, ImageRequest(near, Image.open(tmp_path / "near.png"), mask))
    flags = ["--mask", str(tmp_path / "mask.png"), "--mask_feather", "3"]
    output = tmp_path / "b.png"
    expected_near = edit_by_cli(model, tmp_path / "near.png", output, *flags, settings=near)
    assert expected_near.shape == (92, 128, 3)
    np.testing.assert_array_equal(made, expected_near)

    request = ImageRequest(settings, image)
    np.testing.assert_array_equal(make(open_editor(model, progress=False), request), expected)
    assert request.step == 0


@pytest.mark.parametrize(
    ("kind", "masked"),
    [
        ("sd", True),
        pytest.param("sd", False, marks=pytest.mark.slow),
        pytest.param("sd inpainting", True, marks=pytest.mark.slow),
        pytest.param("xl", False, marks=pytest.mark.slow),
        pytest.param("xl", True, marks=pytest.mark.slow),
        pytest.param("xl inpainting", True, marks=pytest.mark.slow),
    ],
)
def test_images_from_text_and_an_image_are_the_pipelines(tmp_path, kind, masked):
    """With a mask the pixels outside are the original's, also of a result that is scaled back."""
    inpaints = "inpainting" in kind
    if kind.startswith("xl"):
        model = make_tiny_xl(tmp_path / "model", inpaints=inpaints, vae_channels=(8, 8, 16))
    else:
        model = make_tiny_pipeline(tmp_path / "model", 9 if inpaints else 4)
        if inpaints:
            edit_json(model / "model_index.json", _class_name="StableDiffusionInpaintPipeline")
    editor, image = open_editor(model), photo(64, 48)
    settings = Settings("a red panda", 3.0, num_inference_steps=6, seed=7, resolution=64)
    settings = dataclasses.replace(settings, strength=0.5, negative_prompt="grey")
    right = np.arange(64) >= np.full((48, 1), 32)
    mask = Image.fromarray(right) if masked else None
    made = make(editor, ImageRequest(settings, image, mask))
    expected = call_pipeline(model, settings, image, mask)
    if masked:
        expected = np.where(right[..., None], expected, np.asarray(image))
    assert np.abs(np.int16(made) - expected).max() <= 1
    assert np.any(made[:, 32:] != np.asarray(image)[:, 32:])
    if kind == "xl" and masked:  # a shape that is scaled for its program
        large, mask = photo(96, 70), Image.new("1", (96, 70))
        mask.paste(1, (48, 0, 96, 70))
        wider = dataclasses.replace(settings, resolution=128, mask_feather=3)
        made = make(editor, ImageRequest(wider, large, mask))
        before = np.asarray(ImageOps.fit(large, (128, 92), Image.Resampling.LANCZOS))
        np.testing.assert_array_equal(made[:, :64], before[:, :64])
        assert np.any(made[:, 64:] != before[:, 64:])
    if inpaints:
        with pytest.raises(ValueError, match="there is no mask, which an inpainting model needs"):
            make(editor, ImageRequest(settings, image))


@pytest.mark.slow
@pytest.mark.parametrize("flag", [("--parallel", "data=1,branches=3"), ("--devices", "balanced")])
def test_one_image_on_several_devices(model, photo_file, tmp_path, flag):
    settings = Settings("make it red", 3.0, 1.2, 3, seed=7, resolution=32)
    editor = open_editor(model, **{flag[0].removeprefix("--"): flag[1:]})
    scales = (3.0, 1.2), (3.0, 2.0)
    request = ImageRequest(settings, Image.open(photo_file), scales=scales)
    expected = edit_by_cli(model, photo_file, tmp_path / "cli.png", *flag, settings=settings)
    assert np.abs(np.int16(make(editor, request)) - expected).max() <= 1
    assert request.num_steps == 2 * settings.num_steps


@pytest.mark.slow
def test_lora_and_int8_of_a_request(model, photo_file, tmp_path, monkeypatch):
    """A request has the weights that it names, whatever the one before had.

    Of the two programs only one may be in memory.
    """
    monkeypatch.setattr("diffusers_flax.app.editor.MAX_PROGRAMS", 1)
    rng, file = np.random.default_rng(0), tmp_path / "style.safetensors"
    layer = "unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
    shapes = {f"{layer}.lora_A.weight": (2, 16), f"{layer}.lora_B.weight": (16, 2)}
    save_file({x: rng.normal(size=y).astype(np.float32) for x, y in shapes.items()}, file)
    editor, image = open_editor(model, lora=(str(file),)), Image.open(photo_file)
    assert editor.defaults().lora == ("style",)

    plain = Settings("make it red", 2.0, 1.5, 3, seed=7, resolution=32)
    changes = {
        "lora": ({"lora": ("style",)}, ["--lora", str(file)]),
        "half": ({"lora": ("style",), "lora_weight": 0.5}, ["--lora", f"{file}:0.5"]),
        "plain": ({}, []),
        "int8": ({"accelerate": ("int8:mode=weight",)}, ["--accelerate", "int8:mode=weight"]),
        "again": ({}, []),
    }
    images = {}
    for name, (change, flags) in changes.items():
        settings = dataclasses.replace(plain, **change)
        images[name] = make(editor, ImageRequest(settings, image))
        output = tmp_path / f"{name}.png"
        expected = edit_by_cli(model, photo_file, output, *flags, settings=plain)
        assert np.abs(np.int16(images[name]) - expected).max() <= 1
    np.testing.assert_array_equal(images["again"], images["plain"])
    assert all(np.any(images[x] != images["plain"]) for x in ("lora", "half", "int8"))
