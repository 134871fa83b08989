"""The page's status line: a request's progress, estimated time and errors."""

import html
import re
import time

from diffusers_flax.messages import one_line


def status(text, state, share=None):
    """The HTML of the status line.

    Args:
        text: a sentence.
        state: "busy", "done", "info" or "failed".
        share: work done, from 0 to 1, for a progress bar; None: no bar.
    """
    bar = "" if share is None else f'<progress value="{share:.3f}" max="1"></progress>'
    role = "alert" if state == "failed" else "status"
    text = html.escape(text[:1].upper() + text[1:])
    return f'<div class="line {state}" role="{role}">{bar}<span>{text}</span></div>'


def status_of(editor, request):
    """The status line of a request of an Editor."""
    seconds = time.monotonic() - request.since
    if request.stage == "making" and editor.config.progress:
        text = f"step {request.step} of {request.num_steps}"
        if left := request.seconds_left():
            text += f", {about(left)} left"
        return status(text, "busy", request.step / request.num_steps)
    if request.stage == "compiling":
        width, height = editor.program_size(request)
        steps = request.settings.num_steps
        text = f"compiling for {width}x{height} and {steps} steps, once: {seconds:.0f} s"
        if editor.compile_seconds:
            text += f" of {about(editor.compile_seconds)}"
    elif request.stage != "waiting":
        text = f"{request.stage}, {seconds:.0f} s"
    else:
        before = [*editor.requests].index(request)
        text = f"waiting for {before} request{'s' * (before > 1)} before this one"
    return status(text, "busy")


def about(seconds):
    """An estimated time in words."""
    return f"about {max(1, seconds):.0f} s" if seconds < 120 else f"about {seconds / 60:.0f} min"


def in_words(error, labels):
    """An error's message for the page.

    Args:
        error: exception or text; it names settings as arguments (`seed=7`) or flags (`--seed 7`).
        labels: {setting: label on the page}.
    """
    text = one_line(error)
    for name, label in labels.items():
        text = re.sub(rf"\b{name}=(?=\S)", f"{label} ", text)
        text = re.sub(rf"--{name}\b|\b{name}=", label, text)
    return text
