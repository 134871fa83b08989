"""edit_app.py: its settings and files, its model and queue, its API, and the page in Chromium."""

import asyncio
import dataclasses
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, aclosing, closing, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import ROOT, free_port, photo, wait_for
from PIL import Image
from safetensors.numpy import save_file
from tiny_models import make_tiny_pipeline, make_tiny_xl, save_tiny_vae

import app.editor
import edit_app
import edit_cli
from app import server
from app.editor import Editor, ImageRequest, Stopped, named_loras
from app.images import image_to_paint_on, middle_of_change, painted_mask, read_upload
from app.sessions import MAX_RESULTS, Sessions
from app.settings import (
    KEYWORD,
    SOFTWARE,
    Limits,
    Settings,
    check_settings,
    read_settings,
    within_limits,
)
from app.status import about, status_of
from diffusers_flax.images import save_image

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
LIMITS = Limits(16, 128, ("style",))


def needs(*packages, chromium=False):
    """Marks a test that is skipped without packages that the Makefile installs."""
    missing = [name for name in packages if find_spec(name) is None]
    missing += ["chromium"] if chromium and CHROMIUM is None else []
    reason = f"not installed: {', '.join(missing)}; make test-app does it"
    return pytest.mark.skipif(bool(missing), reason=reason)


needs_gradio, needs_browser = needs("gradio"), needs("gradio", "playwright", chromium=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_pipeline(tmp_path_factory.mktemp("tiny") / "model", unet_channels=(16,))


@pytest.fixture(scope="module")
def photograph(tmp_path_factory):
    file = tmp_path_factory.mktemp("photo") / "photo.png"
    photo(96, 72).save(file)
    return file


def edit_by_cli(model, photograph, output, *flags, settings=None):
    """The image that edit_cli.py makes with Settings, uint8 (H, W, 3)."""
    settings = settings or Settings("make it red")
    words = ["--model", str(model), "--input", str(photograph), "--output", str(output), *flags]
    words += ["--edit", settings.instruction]
    for name in ("num_inference_steps", "seed", "guidance_scale", "image_guidance_scale"):
        words += [f"--{name}", str(getattr(settings, name))]
    edit_cli.main([*words, "--resolution", str(settings.resolution)])
    return np.asarray(Image.open(output))


# ---------------------------------------------------------------- settings, files


def test_settings_in_a_png_file(tmp_path):
    """They come back as they were; other files have none, damaged ones are no error."""
    settings = Settings(
        "écris « rouge »", 3.5, 1.2, 7, 2**32 - 1, 48, "square", "euler", ("tome",), ("style",), 0.5
    )
    image = photo(8, 6)
    save_image(image, tmp_path / "a.png", SOFTWARE, texts=settings.as_texts("demo"))
    assert read_settings(tmp_path / "a.png") == settings
    np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / "a.png")), np.asarray(image))
    save_image(image, tmp_path / "plain.png", SOFTWARE)
    texts = {KEYWORD: '{"instruction": "red", "seed": "7", "guidance_scale": 2, "lora": ["x"]}'}
    save_image(image, tmp_path / "other.png", texts=texts)
    assert read_settings(tmp_path / "plain.png") is None
    other = Settings("red", guidance_scale=2.0, lora=("x",))  # the seed is no number
    assert read_settings(tmp_path / "other.png") == other
    assert within_limits(other, LIMITS) == (
        dataclasses.replace(other, resolution=128, lora=()),
        ["resolution", "lora"],
    )
    for wrong in (
        {"instruction": "x" * 9999, "negative_prompt": "y" * 9999},
        {"seed": -1, "resolution": 10**30, "num_inference_steps": 0, "mask_feather": -5},
        {"guidance_scale": 99, "image_guidance_scale": float("inf"), "lora_weight": float("nan")},
        {"accelerate": [{"a": 1}, ["x"], 5], "lora": [["style"]], "scheduler": "<b>"},
        {"accelerate": ["taesd:path=/etc/passwd"], "shape": "round"},
        {"instruction": "half an emoji \ud83d", "negative_prompt": "\udcff"},
    ):
        texts = {KEYWORD: json.dumps({"instruction": "red", "resolution": 64} | wrong)}
        save_image(image, tmp_path / "wrong.png", texts=texts)
        allowed, changed = within_limits(read_settings(tmp_path / "wrong.png"), LIMITS)
        check_settings(allowed, LIMITS)
        assert sorted(changed) == sorted(wrong)
    for damaged in ('{"instruction": ', "[]", "7"):
        save_image(image, tmp_path / "broken.png", texts={KEYWORD: damaged})
        assert read_settings(tmp_path / "broken.png") is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"instruction": " "}, "--instruction is empty; write a few words"),
        ({"instruction": "red " * 300}, "--instruction has 1200 characters; write 1000 or less"),
        (
            {"negative_prompt": "half an emoji \ud83d"},
            "--negative_prompt is not valid Unicode: character 15 is an unpaired surrogate",
        ),
        ({"guidance_scale": float("nan")}, "--guidance_scale nan must be from 0 to 20"),
        ({"seed": 2**32}, "--seed 4294967296 must be from 0 to 4294967295"),
        ({"num_inference_steps": 151}, "--num_inference_steps 151 must be from 1 to 150"),
        ({"resolution": 136}, "--resolution 136 must be from 16 to 128 pixels"),
        ({"scheduler": "eular"}, "scheduler=eular is unknown"),
        ({"lora": ("/etc/x",)}, "--lora /etc/x is not among the files that this page offers"),
        ({"lora_weight": 2.5}, "--lora_weight 2.5 must be from 0 to 2"),
        ({"mask_feather": -1}, "--mask_feather -1 must be from 0 to 64 pixels"),
        ({"accelerate": ("tea",)}, "accelerate=tea: 'tea' is unknown"),
        ({"accelerate": ("taesd:path=/etc",)}, "the page has one TAESD; write taesd"),
        ({"shape": "round"}, "--shape round is unknown"),
    ],
)
def test_settings_out_of_range(change, message):
    settings = Settings("red", resolution=64, lora=("style",))
    check_settings(settings, LIMITS)
    with pytest.raises(ValueError, match=re.escape(message)):
        check_settings(dataclasses.replace(settings, **change), LIMITS)


def test_images_and_masks_of_the_page(tmp_path):
    photo(8, 6).save(tmp_path / "a.png")
    np.testing.assert_array_equal(
        np.asarray(read_upload(tmp_path / "a.png")), np.asarray(photo(8, 6))
    )
    (tmp_path / "broken.png").write_bytes((tmp_path / "a.png").read_bytes()[:60])
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "large.png").write_bytes(b"P5 15000 10001 255\n")
    for name, message in (
        ("broken", "this image cannot be read: "),
        ("text", "this image cannot be read: no known image format"),
        ("large", "this image cannot be read: 15000x10001 pixels are more than 150 megapixels"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            read_upload(tmp_path / f"{name}.png")
    assert image_to_paint_on(photo(100, 70), (64, 44)).size == (512, 352)
    assert image_to_paint_on(photo(2000, 1500), (768, 576)).size == (768, 576)
    layer = Image.new("RGBA", (6, 4))
    with pytest.raises(ValueError, match="no part is painted"):
        painted_mask([layer])
    layer.paste((20, 184, 166, 255), (2, 0, 6, 4))
    mask = np.asarray(painted_mask([Image.new("RGBA", (6, 4)), layer]))
    np.testing.assert_array_equal(mask, np.arange(6) >= np.full((4, 1), 2))


@pytest.mark.parametrize(
    ("box", "middle"),
    [((0, 0, 80, 10), 50), ((0, 0, 8, 10), 5), ((60, 2, 64, 4), 77.5), ((0, 0, 0, 0), 50)],
)
def test_the_slider_begins_where_the_edit_is(box, middle):
    """Half of the change is on each side, whatever the noise of the rest."""
    before, after = photo(80, 10), photo(80, 10)
    after.paste(Image.eval(after.crop(box), lambda x: (x + 128) % 256), box)
    assert middle_of_change(before, after) == pytest.approx(middle, abs=1)
    if any(box):
        noisy = Image.eval(after, lambda x: min(x + 1, 255))
        assert middle_of_change(before, noisy) == pytest.approx(middle, abs=1)


@pytest.mark.parametrize(
    ("edits", "words"),
    [(True, "instruction scale 7.5, image scale 1.2"), (False, "prompt scale 7.5")],
)
def test_the_summary_names_each_scale(edits, words):
    settings = Settings("red", 7.5, 1.2, 3, seed=7, scheduler="euler")
    assert settings.summary(edits) == f"{words}, 3 steps, seed 7, euler"


def test_tracebacks_of_closed_pages_are_dropped():
    """Of an upload that breaks off, and of an image deleted while it is sent; not of others."""
    requests = pytest.importorskip("starlette.requests")

    def record(error):
        return logging.makeLogRecord({"exc_info": (type(error), error, None)})

    deleted, other = RuntimeError("File at path x does not exist."), RuntimeError("other")
    deleted.__context__, other.__context__ = FileNotFoundError(), ValueError()
    dropped = [requests.ClientDisconnect(), deleted]
    assert not any(server.NoClosedPages().filter(record(error)) for error in dropped)
    assert server.NoClosedPages().filter(record(other))
    assert server.NoClosedPages().filter(logging.makeLogRecord({}))


def test_files_of_sessions(tmp_path):
    """A session keeps its latest images; closing it deletes its files and no others."""
    example, upload, both = (tmp_path / f"{name}.png" for name in ("example", "upload", "both"))
    example.touch()
    sessions = Sessions(tmp_path, "demo")
    upload.touch()
    both.touch()
    ours, theirs = sessions.get("a"), sessions.get("b")
    assert sessions.get("a") is ours
    settings = Settings("make it red")
    for _ in range(MAX_RESULTS + 2):
        before = sessions.save(ours, photo(8, 6), "input")
        sessions.add(ours, [photo(8, 6)], before, [settings], edits=True)
    (other,) = sessions.add(theirs, [photo(8, 6)], None, [settings], edits=True)
    assert other.path.name == "001-make-it-red.png"
    names = sorted(file.name for file in ours.folder.iterdir())
    assert len(names) == 2 * MAX_RESULTS and len(ours.results) == MAX_RESULTS
    assert names[0] == "003-make-it-red.png" and names[-1].startswith("input-")
    assert read_settings(ours.results[0].path) == settings
    for file in (example, upload, both, Path(__file__)):
        sessions.add_upload(ours, file)
    sessions.add_upload(theirs, both)
    (tmp_path / "hash").mkdir()
    painted = [tmp_path / "hash" / f"{name}.png" for name in ("background", "layer_0")]
    for file in painted:
        file.touch()
    theirs.painted_since = time.time() - 60
    sessions.get("paints later").painted_since = time.time() + 60
    sessions.close("a")
    assert all(file.exists() for file in painted)  # may be of b
    sessions.close("never")
    assert not ours.folder.exists() and other.path.exists()
    assert not upload.exists()
    assert all(file.exists() for file in (example, both, Path(__file__)))
    sessions.close("b")
    assert not any(file.exists() for file in (*painted, both))
    (uploaded := tmp_path / "hash" / "background-1.png").touch()
    sessions.get("never paints")
    sessions.close("never paints")
    assert uploaded.exists()


# ---------------------------------------------------------------- the command line


@pytest.mark.variants
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--username", "anna"], "--username anna has no password; write it to a --password_file"),
        (
            ["--password_file", "secret.txt"],
            "--password_file secret.txt is a password without a user",
        ),
        (["--password_file", "none.txt", "--username", "anna"], "none.txt cannot be read"),
        (["--password_file", "empty.txt", "--username", "anna"], "empty.txt is empty"),
        (["--host", "0.0.0.0"], "--host 0.0.0.0 opens the page to others; give --username"),
        (["--port", "0"], "--port 0 must be from 1 to 65535"),
        (["--model", "nowhere"], "nowhere has no model_index.json"),
        (["--max_queue", "0"], "--max_queue 0 must be at least 1"),
        (["--guidance_scale", "-1"], "--guidance_scale -1.0 must be 0 or more"),
        (["--scheduler", "eular"], "--scheduler eular is unknown"),
        (["--num_inference_steps", "151"], "--num_inference_steps 151 must be from 1 to 150"),
        (["--max_resolution", "32"], "--max_resolution 32 is below the resolution"),
        (["--examples", "none.jsonl"], "none.jsonl cannot be read"),
        (["--accelerate", "taesd"], "--accelerate taesd needs a TAESD; start with --preview_dec"),
        (["--no_progress", "--preview_decoder", "x"], "--preview_decoder is for --progress"),
    ],
)
def test_bad_input_is_one_line(model, tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(edit_app, "find_spec", lambda name: True)
    monkeypatch.setattr(Editor, "open", None)
    Path("secret.txt").write_text("secret\n")
    Path("empty.txt").write_text("\n")
    given = [] if "--model" in flags else ["--model", str(model)]
    port = [] if "--port" in flags else ["--port", str(free_port())]
    with pytest.raises(SystemExit) as stop:
        edit_app.main([*given, *port, *flags])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


def test_no_gradio_and_a_port_in_use(model, monkeypatch, capsys):
    monkeypatch.setenv(server.PASSWORD, "secret")
    with pytest.raises(ValueError, match="EDIT_APP_PASSWORD is a password without a user"):
        server.read_password(None, None, "127.0.0.1")
    assert server.read_password("anna", None, "0.0.0.0") == "secret"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"--port {port} of 127.0.0.1 is in use"):
            server.check_port("127.0.0.1", port)
    server.check_port("127.0.0.1", port)
    monkeypatch.setattr(edit_app, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        edit_app.main(["--model", str(model), "--username", "anna", "--port", str(port)])
    assert capsys.readouterr().err == (
        "error: the package gradio is missing; install it: pip install -r requirements-app.txt\n"
    )


# ---------------------------------------------------------------- the model and the queue


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


def test_a_request_says_how_long_it_takes(model):
    """By its own steps; before them by the request before, in proportion to pixels and steps."""
    editor = Editor(edit_app.Config(str(model), compilation_cache_dir=""))
    settings, image = Settings("red", num_inference_steps=10, resolution=32), photo(96, 72)

    def line(request, stage, seconds, **more):
        request.report(stage, **more)
        request.progress = request.progress._replace(since=time.monotonic() - seconds)
        if request.progress.step:
            editor._measure(request, request.steps_done(request.progress))
        return status_of(editor, request, request.progress)

    request = ImageRequest(settings, image)
    assert "Compiling for 32x24 and 10 steps, once: 3 s<" in line(request, "compiling", 3)
    editor.compile_seconds = 8
    request.report("making", step=1)  # the first step, which the program's compilation was for
    assert "Step 1 of 10<" in line(request, "making", 0, step=1)
    assert "Step 4 of 10, about 12 s left<" in line(request, "making", 6, step=4)

    twice = dataclasses.replace(settings, num_inference_steps=20, resolution=64)
    assert "once: 2 s of about 8 s, then about 3 min for the image<" in line(
        ImageRequest(twice, image), "compiling", 2
    )
    several = ImageRequest(settings, image, scales=((2.0, 1.0),) * 4, at_once=2)
    several.report("making")
    assert "Images 1 to 2 of 4, step 5 of 10, about 15 s left<" in line(
        several, "making", 5, step=5
    )
    assert "Images 3 to 4 of 4, step 5 of 10, about 5 s left<" in line(
        several, "making", 15, image=2, step=5
    )
    assert [about(x) for x in (0.2, 90, 200)] == ["about 1 s", "about 90 s", "about 3 min"]


@pytest.mark.slow
def test_the_editor_makes_the_images_of_edit_cli(model, photograph, tmp_path):
    """Also after a request that was cancelled in its first steps, which ends early."""
    settings = Settings("make it red", 3.0, 1.2, 4, seed=7, resolution=32)
    editor, image = open_editor(model), Image.open(photograph)
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
    expected = edit_by_cli(model, photograph, tmp_path / "cli.png", settings=settings)
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


@pytest.mark.slow
@pytest.mark.parametrize("text", [False, True])
def test_a_comparison_runs_on_all_devices(tmp_path, photograph, text):
    """Its images are those of single requests; also where a single one leaves a branch out."""
    model = make_tiny_pipeline(tmp_path / "model", 4 if text else 8, unet_channels=(16,))
    editor, image = open_editor(model), None if text else Image.open(photograph)
    settings = Settings("make it red", 2.0, 1.5, 3, seed=7, resolution=32)
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
def test_one_image_on_several_devices(model, photograph, tmp_path, flag):
    settings = Settings("make it red", 3.0, 1.2, 3, seed=7, resolution=32)
    options = {flag[0].removeprefix("--"): flag[1:]}
    config = edit_app.Config(str(model), compilation_cache_dir="", **options)
    editor = Editor(config, edit_app.layout_of_flags(config))
    editor.open()
    request = editor.submit(
        ImageRequest(settings, Image.open(photograph), scales=((3.0, 1.2), (3.0, 2.0)))
    )
    assert request.done.wait(120) and request.error is None and request.at_once == 1
    expected = edit_by_cli(model, photograph, tmp_path / "cli.png", *flag, settings=settings)
    assert np.abs(np.int16(request.images[0]) - expected).max() <= 1
    assert request.progress.step == 2


@pytest.mark.slow
def test_lora_and_int8_of_a_request(model, photograph, tmp_path, monkeypatch):
    """A request has the weights that it names, whatever the one before had.

    Of the two programs only one may be in memory.
    """
    monkeypatch.setattr(app.editor, "MAX_PROGRAMS", 1)
    rng, file = np.random.default_rng(0), tmp_path / "style.safetensors"
    layer = "unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
    save_file(
        {
            f"{layer}.lora_A.weight": rng.normal(size=(2, 16)).astype(np.float32),
            f"{layer}.lora_B.weight": rng.normal(size=(16, 2)).astype(np.float32),
        },
        file,
    )
    editor, image = open_editor(model, lora=(str(file),)), Image.open(photograph)
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
        expected = edit_by_cli(model, photograph, output, *flags, settings=plain)
        assert np.abs(np.int16(images[name]) - expected).max() <= 1
    np.testing.assert_array_equal(images["again"], images["plain"])
    assert all(np.any(images[x] != images["plain"]) for x in ("lora", "half", "int8"))


# ---------------------------------------------------------------- the server


@contextmanager
def served(model, *flags, cwd=None, **environment):
    """edit_app.py as a process of its own: its address and the process."""
    port = free_port()
    command = [sys.executable, ROOT / "edit_app.py", "--model", model, "--port", str(port), *flags]
    process = subprocess.Popen(
        list(map(str, command)),
        cwd=cwd,
        env=os.environ | {"PYTHONUNBUFFERED": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        line = process.stdout.readline()
        assert line.startswith("open http://127.0.0.1:"), line + process.stderr.read()
        yield SimpleNamespace(url=line.split()[1], process=process, port=port)
    finally:
        process.terminate()  # deletes its files
        _, errors = process.communicate(timeout=20)
    assert "Traceback" not in errors, errors


FAST = ("--resolution", "32", "--num_inference_steps", "3", "--compilation_cache_dir", "")


# Writes the hosts that a Python process connects to, or looks up, to a file.
NOTE_HOSTS = """
import os, sys

def note(event, args):
    if event not in ("socket.connect", "socket.getaddrinfo"):
        return
    host = args[0] if event == "socket.getaddrinfo" else args[1]
    if event == "socket.connect":
        if not isinstance(host, tuple):  # of this machine
            return
        host = host[0]
    with open(os.environ["HOSTS"], "a") as file:
        print(host.decode() if isinstance(host, bytes) else host, file=file)

sys.addaudithook(note)
"""


@pytest.fixture(scope="module")
def page(model, photograph, tmp_path_factory):
    """The page of a tiny model, whose files are in page.files; its server asks no other host."""
    folder = tmp_path_factory.mktemp("page")
    row = {"input": str(photograph), "edit": "make it blue", "output": "none.png"}
    (folder / "edits.jsonl").write_text(json.dumps(row))
    (folder / "sitecustomize.py").write_text(NOTE_HOSTS)
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    environment = {"PYTHONPATH": path, "HOSTS": str(folder / "hosts"), "TMPDIR": str(folder)}
    flags = "--examples", folder / "edits.jsonl", *FAST, "--max_resolution", "256"
    with served(model, *flags, **environment) as page:
        (page.files,) = folder.glob("edit_app_*")
        yield page
    assert not page.files.exists()
    hosts = set((folder / "hosts").read_text().split())
    assert "127.0.0.1" in hosts and hosts <= {*server.LOCAL, "None"}


@pytest.fixture
def connect():
    """A function that opens a client of a page's API; its session ends with the test."""
    from gradio_client import Client

    with ExitStack() as opened:

        def open_client(page, folder):
            client = Client(page.url, verbose=False, download_files=folder)
            opened.callback(client.close)
            return client

        yield open_client


@pytest.mark.slow
@needs_gradio
def test_the_api(page, connect, model, photograph, tmp_path):
    """The image of edit_cli.py, also with a mask; its file has the settings; errors say why."""
    from gradio_client import handle_file
    from gradio_client.exceptions import AppError

    client, given = connect(page, folder=tmp_path), {"image": handle_file(photograph)}
    given |= {"instruction": "make it red", "api_name": "/edit"}
    settings = Settings("make it red", 3.0, 1.2, 3, seed=7, resolution=32)
    changes = {"guidance_scale": 3, "image_guidance_scale": 1.2, "seed": 7}
    job = client.submit(**given, **changes)
    file, made = job.result()
    assert read_settings(file) == settings
    assert made.pop("seconds") > 0 and made["seed"] == 7
    expected = edit_by_cli(model, photograph, tmp_path / "cli.png", settings=settings)
    np.testing.assert_array_equal(np.asarray(Image.open(file)), expected)
    stages = {progress["stage"] for _, progress in job.outputs()[:-1]}
    assert stages and stages <= {"waiting", "compiling", "making"}

    mask = Image.new("L", (96, 72))
    mask.paste(255, (48, 0, 96, 72))
    mask.save(tmp_path / "mask.png")
    file, _ = client.predict(**given, **changes, mask=handle_file(tmp_path / "mask.png"))
    flags = "--mask", tmp_path / "mask.png"
    masked = edit_by_cli(model, photograph, tmp_path / "m.png", *map(str, flags), settings=settings)
    np.testing.assert_array_equal(np.asarray(Image.open(file)), masked)
    assert np.any(masked != expected)

    (tmp_path / "broken.png").write_bytes(photograph.read_bytes()[:99])
    for change, message in (
        ({"image": handle_file(tmp_path / "broken.png")}, "this image cannot be read"),
        ({"instruction": " "}, "Instruction is empty; write a few words"),
        ({"seed": -1}, "Seed -1 must be from 0 to 4294967295"),
        ({"accelerate": "tea"}, "Acceleration tea: 'tea' is unknown"),
        ({"mask": handle_file(tmp_path / "broken.png")}, "the mask cannot be read as a mask"),
        ({"instruction": "red " * 300}, "Instruction has 1200 characters; write 1000 or less"),
        ({"num_inference_steps": 151}, "Steps 151 must be from 1 to 150"),
        ({"scheduler": "eular"}, "Scheduler eular is unknown"),
        ({"seed": "seven"}, "Seed seven is not a number"),
        ({"scheduler": "dpmsolver++", "accelerate": ["tgate"]}, "is for text to image"),
    ):
        with pytest.raises(AppError, match=re.escape(message)):
            client.predict(**given | change)

    import httpx  # Gradio's

    # Half an emoji, which gradio_client does not send but browsers do.
    for instruction, accelerate, message in (
        (
            "red \ud83d",
            [],
            "Instruction is not valid Unicode: character 5 is an unpaired surrogate",
        ),
        ("red", ["\ud83d"], r"Acceleration \ud83d: '\ud83d' is unknown"),
    ):
        values = [
            None,
            instruction,
            7.5,
            1.5,
            3,
            0,
            32,
            "the model's own",
            accelerate,
            [],
            1,
            "",
            0,
        ]
        call = f"{page.url}gradio_api/call/edit"
        sent = {"content": json.dumps({"data": [*values, None]})}
        answer = httpx.post(call, headers={"Content-Type": "application/json"}, **sent)
        said = httpx.get(f"{call}/{answer.json()['event_id']}").text
        assert message in json.loads(said.partition("data: ")[2])["error"]


@pytest.mark.slow
@needs_gradio
def test_two_clients_30_requests_and_a_client_that_goes(page, connect, photograph, tmp_path):
    """Requests of two pages never mix, memory stays, files go with the session."""
    from gradio_client import handle_file

    given = {"image": handle_file(photograph), "api_name": "/edit"}
    clients = [connect(page, folder=tmp_path / name) for name in ("a", "b")]
    memory, jobs = [], []
    for seed in range(30):
        words = ("make it red", "invert the colors")[seed % 2]
        jobs.append(clients[seed % 2].submit(**given, seed=seed, instruction=words))
        if len(jobs) == 6:
            for job in jobs:
                job.result()
            memory.append(memory_of(page.process))
            made, jobs = jobs, []
    for number, job in enumerate(made, 24):
        file, settings = job.result()
        assert settings["seed"] == number
        assert settings["instruction"] == ("make it red", "invert the colors")[number % 2]
        assert read_settings(file).seed == number
    print("memory, MB:", [round(x / 2**20) for x in memory])
    assert memory[-1] - memory[0] < 64 * 2**20

    slow = clients[0].submit(**given, instruction="red", num_inference_steps=150, resolution=256)
    wait_for(lambda: any(stage["stage"] == "making" for _, stage in slow.outputs()))
    slow.cancel()
    clients[1].predict(**given, instruction="make it blue")  # is not behind it


def memory_of(process):
    """Bytes of memory that a process has."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024


@pytest.mark.slow
@needs_gradio
def test_a_used_port_a_password_and_ctrl_c(model, tmp_path):
    """A second start says that the port is in use; Ctrl-C ends at once and deletes the files."""
    import httpx
    from gradio_client import Client

    (tmp_path / "password.txt").write_text("secret\n")
    (tmp_path / "tmp").mkdir()
    flags = "--username", "anna", "--password_file", "password.txt", *FAST
    with served(model, *flags, cwd=tmp_path, TMPDIR=str(tmp_path / "tmp")) as page:
        command = [sys.executable, ROOT / "edit_app.py", "--model", model]
        second = [*command, "--port", str(page.port)]
        done = subprocess.run(list(map(str, second)), capture_output=True, text=True)
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        assert f"error: --port {page.port} of 127.0.0.1 is in use" in done.stderr
        for path in ("config", "gradio_api/info"):
            assert httpx.get(f"{page.url}{path}").status_code == 401
        with pytest.raises(Exception, match=r"(?i)login|auth|credential"):
            Client(page.url, verbose=False, auth=("anna", "wrong"))
        Client(page.url, verbose=False, auth=("anna", "secret")).view_api(print_info=False)
        assert list((tmp_path / "tmp").glob("edit_app_*")) != []
        started = time.monotonic()
        page.process.send_signal(signal.SIGINT)  # while the first program compiles
        _, errors = page.process.communicate(timeout=20)
        print(f"Ctrl-C: {time.monotonic() - started:.2f} s")
        assert time.monotonic() - started < 2
        assert page.process.returncode == 130
        assert "interrupted; the page is closed, and its images are deleted" in errors
        assert list((tmp_path / "tmp").glob("edit_app_*")) == []


@pytest.mark.slow
@needs_gradio
def test_sigterm_at_the_start_deletes_the_files(model, tmp_path):
    command = [sys.executable, ROOT / "edit_app.py", "--model", model, "--port", free_port()]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    process = subprocess.Popen(list(map(str, command)), env=environment, stderr=subprocess.PIPE)
    while not list(tmp_path.glob("edit_app_*")) and process.poll() is None:
        time.sleep(0.01)
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and b"nothing was served" in errors
    assert list(tmp_path.glob("edit_app_*")) == []


@pytest.mark.slow
@needs_gradio
@pytest.mark.parametrize("kind", ["xl_edit", "text", "xl", "preview"])
def test_other_models(kind, connect, tmp_path, photograph):
    """SDXL, text to image, and previews by a TAESD."""
    from gradio_client import handle_file

    flags = [*FAST]
    if kind == "preview":
        model = make_tiny_pipeline(tmp_path / "model", unet_channels=(16,))
        save_tiny_vae(tmp_path / "taesd", (8, 8, 8))
        flags += ["--preview_decoder", str(tmp_path / "taesd")]
    elif kind == "text":
        model = make_tiny_pipeline(tmp_path / "model", in_channels=4)
    else:
        model = make_tiny_xl(tmp_path / "model", edits=kind == "xl_edit")
    with served(model, *flags) as page:
        client, given = connect(page, folder=tmp_path / "files"), {"instruction": "make it red"}
        is_edit = kind in ("xl_edit", "preview")
        given |= {"image": handle_file(photograph)} if is_edit else {"shape": "landscape 4:3"}
        given |= {"accelerate": ["taesd"]} if kind == "preview" else {}
        file, settings = client.predict(**given, seed=3, api_name="/edit" if is_edit else "/image")
        with Image.open(file) as image:
            assert image.size == (32, 24) and settings["seed"] == 3


# ---------------------------------------------------------------- the page in Chromium


def launch(browser_type, *flags):
    """Chromium, without a window."""
    options = ["--no-sandbox", "--disable-dev-shm-usage", *flags]
    return browser_type.launch(executable_path=CHROMIUM, args=options)


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = launch(playwright.chromium)
        yield browser
        browser.close()


@contextmanager
def tab(browser, page, **options):
    """A tab of its own session; it must have no console error and no request elsewhere."""
    context = browser.new_context(viewport={"width": 1280, "height": 1000}, **options)
    opened, wrong = context.new_page(), []
    opened.on("console", lambda x: x.type == "error" and wrong.append(f"console: {x.text}"))
    opened.on("pageerror", lambda error: wrong.append(f"error: {error}"))
    local = (page.url, page.url.replace("http", "ws"), "data:", "blob:")
    opened.on("request", lambda x: x.url.startswith(local) or wrong.append(f"request: {x.url}"))
    opened.goto(page.url)
    opened.wait_for_selector("#run", timeout=60_000)
    try:
        yield opened
    finally:
        context.close()
    assert wrong == []


def click_and_wait(tab, button="#run", state=".done"):
    """Start a request and wait for its end; the text of the status line, which is a new one."""
    tab.evaluate("document.querySelector('#status .line')?.setAttribute('data-old', '')")
    tab.click(button)
    tab.wait_for_selector(f"#status {state}:not([data-old])", timeout=120_000)
    tab.wait_for_selector("#run:not([disabled])")
    return tab.inner_text("#status")


def give(tab, photograph, instruction="make it red", seed=7):
    tab.set_input_files("#image input[type=file]", photograph)
    tab.wait_for_selector("#image img")
    tab.fill("#instruction textarea, #instruction input", instruction)
    tab.fill("#seed input", str(seed))
    tab.check("#keep_seed input")


def download(tab, selector, file):
    with tab.expect_download() as started:
        tab.click(selector)
    started.value.save_as(file)
    return np.asarray(Image.open(file))


def value_of(tab, selector):
    return tab.input_value(f"{selector} input, {selector} textarea")


@needs_browser
def test_an_edit_in_the_browser(browser, page, model, photograph, tmp_path):
    """Upload, instruction, slider, gallery, download, settings from the file, result as input."""
    settings = Settings("make it red", 7.5, 1.5, 3, seed=7, resolution=32)
    expected = edit_by_cli(model, photograph, tmp_path / "cli.png", settings=settings)
    with tab(browser, page) as opened:
        give(opened, photograph)
        assert "seed 7" in click_and_wait(opened)
        assert opened.locator("#result img").count() == 2
        made = download(opened, "#download", tmp_path / "made.png")
        np.testing.assert_array_equal(made, expected)
        assert read_settings(tmp_path / "made.png") == settings

        opened.fill("#instruction textarea, #instruction input", "make it blue")
        opened.uncheck("#keep_seed input")
        click_and_wait(opened)
        seed = int(value_of(opened, "#seed"))
        assert seed != 7
        other = download(opened, "#download", tmp_path / "other.png")
        assert np.any(other != made) and read_settings(tmp_path / "other.png").seed == seed
        opened.click("#gallery button >> nth=1")  # the first one
        wait_for(lambda: value_of(opened, "#seed") == "7")
        assert value_of(opened, "#instruction") == "make it red"
        opened.click("#use")
        opened.wait_for_selector("#image img[src*='make-it-red']")

    with tab(browser, page) as opened:  # of another session
        assert opened.locator("#gallery").count() == 0
        opened.set_input_files("#image input[type=file]", tmp_path / "other.png")
        wait_for(lambda: value_of(opened, "#instruction") == "make it blue")
        assert value_of(opened, "#seed") == str(seed) and opened.is_checked("#keep_seed input")
        assert "settings of this file are back" in opened.inner_text("#status")
        opened.set_input_files("#image input[type=file]", photograph)


def slider_position(tab):
    """Where the slider of the result is, from 0, the left edge of the image, to 1."""
    image = tab.locator("#result img").first.bounding_box()
    handle = tab.locator("#result [data-testid=slider]").bounding_box()
    return (handle["x"] + handle["width"] / 2 - image["x"]) / image["width"]


@pytest.mark.slow
@needs_browser
def test_masks_and_comparisons_in_the_browser(browser, page, photograph, tmp_path):
    """Paint restricts an edit; a comparison makes an image per value and one of all."""
    files = {*page.files.rglob("*")}
    with tab(browser, page) as opened:
        give(opened, photograph)
        opened.click("text=Only a part of the image")
        opened.check("#use_mask input")
        opened.wait_for_selector("#mask canvas", timeout=30_000)
        assert "No part is painted" in click_and_wait(opened, state=".failed")
        box = opened.locator("#mask canvas").first.bounding_box()
        x, y = box["x"] + 3, box["y"] + 0.5 * box["height"]  # in the margin, left of the image
        opened.mouse.move(x, y)
        opened.mouse.down()
        for step in range(8):
            opened.mouse.move(x + 0.05 * step * box["width"], y)
        opened.mouse.up()
        opened.wait_for_timeout(500)
        click_and_wait(opened)
        assert 0.05 < slider_position(opened) < 0.3  # in the edit
        masked = download(opened, "#download", tmp_path / "masked.png")
        with Image.open(photograph) as image:
            before = np.asarray(image.resize((32, 24), Image.Resampling.LANCZOS))
        same = (masked == before).all(-1)
        assert 0.5 < same.mean() < 0.95 and same[:, 16:].all()

        opened.uncheck("#use_mask input")
        opened.click("text=Compare values of a scale")
        wait_for(lambda: value_of(opened, "#values"))  # when the part is opened
        opened.fill("#values textarea, #values input", "1.2 1.5, 3")
        opened.keyboard.press("Tab")
        assert "3 images" in click_and_wait(opened, "#run_comparison")
        captions = opened.locator("#comparison .caption-label").all_inner_texts()
        assert captions == ["image scale 1.2", "image scale 1.5", "image scale 3"]
        assert opened.locator("#comparison button img").count() == 3
        figure = download(opened, "#figure", tmp_path / "figure.png")
        assert figure.shape[1] > 4 * 192
        opened.click("#comparison button >> nth=2")
        wait_for(lambda: opened.input_value("#image_guidance_scale input[type=number]") == "3")
    wait_for(lambda: not [x for x in {*page.files.rglob("*")} - files if x.is_file()])


@pytest.mark.slow
@needs_browser
def test_two_tabs_cancel_and_a_tab_that_is_closed(browser, page, photograph, tmp_path):
    """A long request is cancelled, and one of a closed tab ends, so that the next one runs."""
    with tab(browser, page) as opened:
        give(opened, photograph)
        make_long(opened)
        opened.click("#run")
        opened.wait_for_selector("#status progress", timeout=120_000)
        opened.keyboard.press("Escape")
        opened.wait_for_selector("#status .info", timeout=20_000)
        assert opened.inner_text("#status") == "Cancelled"
        fill(opened, "num_inference_steps", 3)
        fill(opened, "resolution", 32)

        photo(80, 60).save(tmp_path / f"{tmp_path.name}.png")
        before = {*page.files.glob("session-*")}
        with tab(browser, page) as second:
            give(second, tmp_path / f"{tmp_path.name}.png", "invert the colors", seed=8)
            make_long(second)
            second.click("#run")
            second.wait_for_selector("#status progress", timeout=120_000)
            opened.click("#run")
            wait_for(lambda: "waiting for 1 request" in opened.inner_text("#status").lower())
            (folder,) = {*page.files.glob("session-*")} - before
            (upload,) = page.files.rglob(f"{tmp_path.name}.png")
            assert [file.name.partition("-")[0] for file in folder.iterdir()] == ["input"]
        opened.wait_for_selector("#status .done", timeout=60_000)
        assert "seed 7" in opened.inner_text("#status")
        wait_for(lambda: not folder.exists() and not upload.exists())


@pytest.mark.slow
@needs_browser
def test_30_requests_and_a_browser_that_is_killed(browser, page, photograph):
    """Memory stays; a request of a killed browser leaves the queue."""
    memory = []
    with tab(browser, page) as opened:
        give(opened, photograph)
        for number in range(30):
            fill(opened, "seed", number)
            assert f"seed {number}" in click_and_wait(opened)
            memory.append(memory_of(page.process))
    print("memory, MB:", [round(x / 2**20) for x in memory])
    assert memory[-1] - memory[5] < 64 * 2**20

    killed = launch(browser.browser_type)
    processes = killed.new_browser_cdp_session().send("SystemInfo.getProcessInfo")["processInfo"]
    (number,) = (process["id"] for process in processes if process["type"] == "browser")
    before = {*page.files.glob("session-*")}
    opened = killed.new_page()
    opened.goto(page.url)
    give(opened, photograph)
    make_long(opened)
    opened.click("text=Compare values of a scale")
    opened.fill("#values textarea, #values input", "1 1.1 1.2 1.3 1.4 1.5 1.6 1.7")
    opened.click("#run_comparison")
    opened.wait_for_selector("#status progress", timeout=120_000)
    (folder,) = {*page.files.glob("session-*")} - before
    os.kill(number, signal.SIGKILL)
    started = time.monotonic()
    while folder.exists():
        with suppress(FileNotFoundError):  # it is deleted at this moment
            assert not [*folder.glob("0*.png")], "the comparison was finished"
        assert time.monotonic() - started < 60
    print(f"files of the killed browser are gone after {time.monotonic() - started:.1f} s")
    with tab(browser, page) as opened:
        give(opened, photograph)
        click_and_wait(opened)


@pytest.mark.slow
@needs_browser
def test_a_photograph_of_the_camera(browser, page, tmp_path):
    """Chromium's own moving test image stands for the camera."""
    flags = "--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"
    with (
        closing(launch(browser.browser_type, *flags)) as other,
        tab(other, page, permissions=["camera"]) as opened,
    ):
        opened.click("#image button[aria-label='Capture from camera']")
        opened.click("#image div[title='grant webcam access'] button")
        opened.wait_for_function("document.querySelector('#image video').currentTime > 0")
        opened.click("#image button[aria-label='capture photo']")
        opened.wait_for_selector("#image img:not(.hide)")
        opened.fill("#instruction textarea, #instruction input", "make it red")
        click_and_wait(opened)
        assert download(opened, "#download", tmp_path / "made.png").shape == (24, 32, 3)


def make_long(tab):
    """Settings of an edit that takes some seconds."""
    fill(tab, "num_inference_steps", 150)
    fill(tab, "resolution", 256)


def fill(tab, name, number):
    tab.fill(f"#{name} input[type=number]", str(number))
    tab.keyboard.press("Tab")


@pytest.mark.slow
@needs_browser
def test_messages_in_the_browser(browser, page, photograph, tmp_path):
    """A broken file, no image, no instruction, a text that is too long.

    An error takes the result before it away, and the file that is its cause.
    """
    (tmp_path / "broken.png").write_bytes(photograph.read_bytes()[:99])
    with tab(browser, page) as opened:
        assert "Instruction is empty" in click_and_wait(opened, state=".failed")
        opened.fill("#instruction textarea, #instruction input", "make it red")
        assert "There is no image" in click_and_wait(opened, state=".failed")
        give(opened, photograph)
        click_and_wait(opened)
        opened.fill("#instruction textarea, #instruction input", "")
        assert "Instruction is empty" in click_and_wait(opened, state=".failed")
        opened.wait_for_selector("[data-testid=toast-body]:has-text('Instruction is empty')")
        color = "getComputedStyle(document.querySelector('#status .failed')).backgroundColor"
        assert opened.evaluate(color) != "rgba(0, 0, 0, 0)"
        assert opened.locator("#result img").count() == 0
        assert opened.is_disabled("#use") and opened.locator("#image img").count() == 1
    with tab(browser, page) as opened:
        give(opened, photograph)
        click_and_wait(opened)
        opened.click("#image button[aria-label='Remove Image']")
        opened.set_input_files("#image input[type=file]", tmp_path / "broken.png")
        opened.wait_for_selector("#status .failed:has-text('This image cannot be read')")
        wait_for(lambda: opened.locator("#image img, #result img").count() == 0)
    with tab(browser, page) as opened:
        give(opened, photograph, "make it red " * 30)
        opened.click("#run")
        opened.wait_for_selector("text=/prompt is .* tokens long/i", timeout=30_000)
        opened.wait_for_selector("#status .done", timeout=60_000)


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize(("width", "height"), [(1440, 900), (1024, 768)])
def test_the_page_fits_the_screen(browser, page, photograph, width, height):
    """Image, instruction, result and the main settings are seen without scrolling."""
    with tab(browser, page) as opened:
        opened.set_viewport_size({"width": width, "height": height})
        give(opened, photograph)
        click_and_wait(opened)
        names = ["image", "instruction", "run", "result", "status", "download"]
        names += ["image_guidance_scale", "num_inference_steps", "resolution", "seed"]
        for name in names:
            box = opened.locator(f"#{name}").bounding_box()
            assert box["x"] >= 0 and box["x"] + box["width"] <= width, name
            assert box["y"] >= 0 and box["y"] + box["height"] <= height, name
        columns = [opened.locator(f"#{x}").bounding_box() for x in ("request", "controls")]
        assert columns[1]["x"] + columns[1]["width"] - columns[0]["x"] > 0.9 * width


@pytest.mark.slow
@needs_browser
def test_reloading_asks(browser, page, photograph):
    with tab(browser, page) as opened:
        dialogs = []

        def answer(dialog):
            dialogs.append(dialog.type)
            dialog.accept()

        opened.on("dialog", answer)
        opened.click("#instruction")
        opened.reload()  # nothing is lost
        opened.wait_for_selector("#run")
        assert dialogs == []
        give(opened, photograph)
        opened.reload()
        assert dialogs == ["beforeunload"]


@pytest.mark.slow
@needs_gradio
def test_an_upload_of_a_tab_that_is_closed(page):
    """It leaves nothing in the terminal; see served."""
    head = "POST /gradio_api/upload HTTP/1.1", "Host: 127.0.0.1", "Content-Length: 9999"
    body = "--x", 'Content-Disposition: form-data; name="files"; filename="a.png"', "", "cut off"
    kind = "Content-Type: multipart/form-data; boundary=x"
    with socket.create_connection(("127.0.0.1", page.port)) as connection:
        connection.sendall("\r\n".join([*head, kind, "", *body]).encode())
        time.sleep(0.5)
    time.sleep(0.5)


@pytest.mark.slow
@needs_browser
def test_a_wrong_password_in_the_browser(browser, model, tmp_path):
    with served(model, "--username", "anna", *FAST, EDIT_APP_PASSWORD="secret") as page:
        opened = browser.new_page()
        opened.goto(page.url)
        for password, is_in in (("wrong", False), ("secret", True)):
            opened.fill("input[type=text], input[autocomplete=username]", "anna")
            opened.fill("input[type=password]", password)
            opened.click("button:has-text('Login')")
            if is_in:
                opened.wait_for_selector("#run", timeout=30_000)
            else:
                opened.wait_for_selector("text=/incorrect/i", timeout=30_000)
                assert opened.locator("#run").count() == 0
        opened.close()
