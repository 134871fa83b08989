"""The status line: progress, estimates, errors."""

import time
from types import SimpleNamespace

import pytest

from diffusers_flax.app.editor import ImageRequest
from diffusers_flax.app.settings import Settings
from diffusers_flax.app.status import about, in_words, status_of


def test_a_request_says_how_long_it_takes():
    """In proportion to the steps since the stage began."""
    before, request = (ImageRequest(Settings("red", num_inference_steps=10)) for _ in range(2))
    editor = SimpleNamespace(
        config=SimpleNamespace(progress=True),
        requests=[before, request],
        compile_seconds=8,
        program_size=lambda request: (32, 24),
    )
    assert "Waiting for 1 request before this one<" in status_of(editor, request)
    request.enter("compiling")
    request.since = time.monotonic() - 3
    line = "Compiling for 32x24 and 10 steps, once: 3 s of about 8 s<"
    assert line in status_of(editor, request)
    request.step, request.num_steps = 1, 20  # in two batches
    request.enter("making")  # the first step, which the program's compilation was for
    assert "Step 1 of 20<" in status_of(editor, request)
    request.step, request.since = 4, time.monotonic() - 6
    line = status_of(editor, request)
    assert "Step 4 of 20, about 32 s left<" in line and 'value="0.200"' in line
    editor.config.progress = False
    assert "Making, 6 s<" in status_of(editor, request)
    assert [about(x) for x in (0.2, 90, 200)] == ["about 1 s", "about 90 s", "about 3 min"]


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("num_inference_steps=2000 must be less", "Steps 2000 must be less"),
        ("accelerate=tome:ratio=0.5 and lora=a", "Acceleration tome:ratio=0.5 and LoRA a"),
        ("leave accelerate= out", "leave Acceleration out"),
        ("--lora_weight 3 must be from 0 to 2", "LoRA weight 3 must be from 0 to 2"),
        ("--preview_decoder no/such is missing", "--preview_decoder no/such is missing"),
    ],
)
def test_errors_have_the_labels_of_the_page(message, shown):
    labels = {"num_inference_steps": "Steps", "accelerate": "Acceleration"}
    labels |= {"lora": "LoRA", "lora_weight": "LoRA weight"}
    assert in_words(ValueError(message), labels) == shown
