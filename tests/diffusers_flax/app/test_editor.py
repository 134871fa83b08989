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
from diffusers_flax.app.editor import Editor, ImageRequest, Stopped, named_loras
from diffusers_flax.app.settings import Settings


def open_editor(model, **options):
    config = edit_app.Config(str(model), compilation_cache_dir="", **options)
    editor = Editor(config)
    editor.open()
    return editor


async def follow_request(editor, request, until=lambda progress: False):
    """All Progress of a request; it is left when one is as wanted."""
    found = []
    async for progress in editor.follow(editor.submit(request)):
        found.append(progress)
        if until(progress):
            editor.stop(request)
    return found


def test_the_queue(model, monkeypatch):
    """Jobs run in order; a stopped or abandoned one leaves; a full queue takes no more."""
    made, go_on = [], threading.Event()

    def make(self, request):
        go_on.wait(10)
        made.append(request.settings.seed)
        if request.settings.seed == 3:
            raise ValueError("no memory")

    monkeypatch.setattr(Editor, "_make", make)
    monkeypatch.setattr(
        Editor, "open", lambda self: threading.Thread(target=self._work, daemon=True).start()
    )
    editor = open_editor(model, max_queue=4)
    requests = [editor.submit(ImageRequest(Settings("red", seed=seed))) for seed in range(5)]
    with pytest.raises(ValueError, match="4 requests wait already; try again"):
        editor.submit(ImageRequest(Settings("red")))
    assert [editor.num_before(request) for request in requests] == [0, 1, 2, 3, 4]

    async def abandon():
        async with aclosing(editor.follow(requests[1])) as following:
            async for progress in following:
                assert progress.stage == "waiting"
                break

    asyncio.run(abandon())
    editor.stop(requests[2])
    go_on.set()
    for request in requests:
        assert request.done.wait(10)
    assert made == [0, 3, 4]
    assert [type(request.error) for request in requests] == [
        type(None),
        Stopped,
        Stopped,
        ValueError,
        type(None),
    ]


@pytest.mark.slow
def test_the_editor_makes_the_images_of_edit_cli(model, photo_file, tmp_path):
    """Also after a request that was cancelled in its first steps, which ends early."""
    settings = Settings("make it red", 3.0, 1.2, 4, seed=7, resolution=32)
    editor, image = open_editor(model), Image.open(photo_file)
    many = ImageRequest(dataclasses.replace(settings, num_inference_steps=100), image)
    with pytest.raises(Stopped):
        asyncio.run(follow_request(editor, many, lambda progress: progress.step > 0))
    request, waiting = ImageRequest(settings, image), ImageRequest(settings, image)
    editor.submit(request)
    editor.submit(waiting)
    editor.stop(waiting)
    assert editor.num_before(request) <= 1
    assert request.done.wait(60) and request.error is None and isinstance(waiting.error, Stopped)
    assert many.progress.step < 100 and request.progress.step == 3
    expected = edit_by_cli(model, photo_file, tmp_path / "cli.png", settings=settings)
    np.testing.assert_array_equal(np.asarray(request.images[0]), expected)

    # A shape that is scaled for its program, and a mask.
    photo(96, 70).save(tmp_path / "near.png")
    mask = Image.new("1", (96, 70))
    mask.paste(1, (48, 0, 96, 70))
    mask.save(tmp_path / "mask.png")
    near = dataclasses.replace(settings, resolution=128, mask_feather=3)
    request = editor.submit(ImageRequest(near, Image.open(tmp_path / "near.png"), mask))
    assert request.done.wait(60) and request.error is None
    flags = ["--mask", str(tmp_path / "mask.png"), "--mask_feather", "3"]
    expected_near = edit_by_cli(
        model, tmp_path / "near.png", tmp_path / "b.png", *flags, settings=near
    )
    assert expected_near.shape == (92, 128, 3)
    np.testing.assert_array_equal(np.asarray(request.images[0]), expected_near)

    without = open_editor(model, progress=False).submit(ImageRequest(settings, image))
    assert without.done.wait(60) and without.error is None and without.progress.step == 0
    np.testing.assert_array_equal(np.asarray(without.images[0]), expected)


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
    editor, image, mask = open_editor(model), photo(64, 48), None
    settings = Settings("a red panda", 3.0, num_inference_steps=6, seed=7, resolution=64)
    settings = dataclasses.replace(settings, strength=0.5, negative_prompt="grey")
    right = np.arange(64) >= np.full((48, 1), 32)
    if masked:
        mask = Image.fromarray(right)
    request = editor.submit(ImageRequest(settings, image, mask))
    assert request.done.wait(120) and request.error is None
    assert request.progress.step == 2  # of 3; the last one is not shown
    expected = call_pipeline(model, settings, image, mask)
    if masked:
        expected = np.where(right[..., None], expected, np.asarray(image))
    made = np.asarray(request.images[0])
    assert np.abs(np.int16(made) - expected).max() <= 1
    assert np.any(made[:, 32:] != np.asarray(image)[:, 32:])
    if kind == "xl" and masked:  # a shape that is scaled for its program
        large, mask = photo(96, 70), Image.new("1", (96, 70))
        mask.paste(1, (48, 0, 96, 70))
        wider = dataclasses.replace(settings, resolution=128, mask_feather=3)
        request = editor.submit(ImageRequest(wider, large, mask))
        assert request.done.wait(120) and request.error is None
        before = ImageOps.fit(large, (128, 92), Image.Resampling.LANCZOS)
        made = np.asarray(request.images[0])
        np.testing.assert_array_equal(made[:, :64], np.asarray(before)[:, :64])
        assert np.any(made[:, 64:] != np.asarray(before)[:, 64:])
    if inpaints:
        with pytest.raises(ValueError, match="there is no mask, which an inpainting model needs"):
            editor.submit(ImageRequest(settings, image))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["edits", "text", "text and image"])
def test_a_comparison_runs_on_all_devices(tmp_path, photo_file, kind):
    """Its images are those of single requests; also where a single one leaves a branch out."""
    text = kind != "edits"
    model = make_tiny_pipeline(tmp_path / "model", 4 if text else 8, unet_channels=(16,))
    editor, image = open_editor(model), None if kind == "text" else Image.open(photo_file)
    settings = Settings("make it red", 2.0, 1.5, 3, seed=7, resolution=32)
    if kind == "text and image":
        settings = dataclasses.replace(settings, strength=0.7)
    scales = [(2.0, x) for x in (1.0, 1.2, 1.5, 2.0, 3.0)]
    scales = [(1.0, 1.5), (2.0, 1.5), (7.5, 1.5)] if text else scales
    request = editor.submit(ImageRequest(settings, image, scales=tuple(scales)))
    assert request.done.wait(120) and request.error is None and request.at_once == 4
    assert len(request.images) == len(scales) and len(editor.programs) == 1
    names = ("guidance_scale", "image_guidance_scale")
    for one, found in zip(scales, request.images):
        single = editor.submit(
            ImageRequest(dataclasses.replace(settings, **dict(zip(names, one))), image)
        )
        assert single.done.wait(120) and single.error is None
        difference = np.int16(single.images[0]) - np.int16(found)
        assert np.abs(difference).max() <= 1


@pytest.mark.slow
@pytest.mark.parametrize("flag", [("--parallel", "data=1,branches=3"), ("--devices", "balanced")])
def test_one_image_on_several_devices(model, photo_file, tmp_path, flag):
    settings = Settings("make it red", 3.0, 1.2, 3, seed=7, resolution=32)
    options = {flag[0].removeprefix("--"): flag[1:]}
    config = edit_app.Config(str(model), compilation_cache_dir="", **options)
    editor = Editor(config, edit_app.layout_of_flags(config))
    editor.open()
    request = editor.submit(
        ImageRequest(settings, Image.open(photo_file), scales=((3.0, 1.2), (3.0, 2.0)))
    )
    assert request.done.wait(120) and request.error is None and request.at_once == 1
    expected = edit_by_cli(model, photo_file, tmp_path / "cli.png", *flag, settings=settings)
    assert np.abs(np.int16(request.images[0]) - expected).max() <= 1
    assert request.progress.step == 2


@pytest.mark.slow
def test_lora_and_int8_of_a_request(model, photo_file, tmp_path, monkeypatch):
    """A request has the weights that it names, whatever the one before had.

    Of the two programs only one may be in memory.
    """
    monkeypatch.setattr("diffusers_flax.app.editor.MAX_PROGRAMS", 1)
    rng, file = np.random.default_rng(0), tmp_path / "style.safetensors"
    layer = "unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
    save_file(
        {
            f"{layer}.lora_A.weight": rng.normal(size=(2, 16)).astype(np.float32),
            f"{layer}.lora_B.weight": rng.normal(size=(16, 2)).astype(np.float32),
        },
        file,
    )
    editor, image = open_editor(model, lora=(str(file),)), Image.open(photo_file)
    assert editor.defaults().lora == ("style",)
    assert [*named_loras(("a/x.bin:0.5", "b/x.bin"))] == ["x", "b/x"]
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
        request = editor.submit(ImageRequest(dataclasses.replace(plain, **change), image))
        assert request.done.wait(120) and request.error is None
        images[name] = np.asarray(request.images[0])
        output = tmp_path / f"{name}.png"
        expected = edit_by_cli(model, photo_file, output, *flags, settings=plain)
        assert np.abs(np.int16(images[name]) - expected).max() <= 1
    np.testing.assert_array_equal(images["again"], images["plain"])
    assert all(np.any(images[x] != images["plain"]) for x in ("lora", "half", "int8"))
