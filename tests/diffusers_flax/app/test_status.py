"""The status line: progress, estimates, errors."""

import dataclasses
import time
from types import SimpleNamespace

import pytest
from helpers import photo
from tiny_models import make_tiny_pipeline

import edit_app
from diffusers_flax.app.editor import Editor, ImageRequest
from diffusers_flax.app.settings import Settings
from diffusers_flax.app.status import about, in_words, status_of


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


def test_strength_leaves_steps_out(tmp_path):
    """The status line and the estimate count the steps that run: 4 of 10 at strength 0.4."""
    model = make_tiny_pipeline(tmp_path / "model", in_channels=4)
    editor = Editor(edit_app.Config(str(model), compilation_cache_dir=""))
    settings = Settings("red", num_inference_steps=10, resolution=32, strength=0.4)
    request = ImageRequest(settings, photo(96, 72), scales=((2.0, 1.0),) * 2)
    request.report("compiling")
    assert "Image 1 of 2, compiling for 32x24 and 4 steps" in status_of(
        editor, request, request.progress
    )
    request.report("making", step=1, per_step=2.0)
    line = status_of(editor, request, request.progress)
    assert "Image 1 of 2, step 1 of 4, about 14 s left<" in line and 'value="0.125"' in line
    request.report("making", image=1, step=2, per_step=2.0)
    line = status_of(editor, request, request.progress)
    assert "Image 2 of 2, step 2 of 4, about 4 s left<" in line and 'value="0.750"' in line


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("num_inference_steps=2000 must be less", "Steps 2000 must be less"),
        (
            "accelerate=tome:ratio=0.5 and scheduler=lcm",
            "Acceleration tome:ratio=0.5 and Scheduler lcm",
        ),
        ("leave accelerate= out", "leave Acceleration out"),
        ("--lora_weight 3 must be from 0 to 2", "LoRA weight 3 must be from 0 to 2"),
        ("--preview_decoder no/such is missing", "--preview_decoder no/such is missing"),
        ("accelerate=\ud83d: half an emoji", "Acceleration \\ud83d: half an emoji"),
    ],
)
def test_errors_have_the_labels_of_the_page(message, shown):
    names = SimpleNamespace(**dataclasses.asdict(Settings("red")), preview_decoder="no/such")
    labels = {"num_inference_steps": "Steps", "accelerate": "Acceleration"}
    labels |= {"lora": "LoRA", "lora_weight": "LoRA weight", "scheduler": "Scheduler"}
    assert in_words(ValueError(message), names, labels) == shown
