"""The page's status line: a request's progress, estimated time and errors."""

import html
import re
import time

from diffusers_flax.app.settings import as_unicode
from diffusers_flax.messages import one_line


def status(text, kind, share=None):
    """The HTML of the status line.

    Args:
        text: a sentence.
        kind: "busy", "done", "info" or "failed".
        share: work done, from 0 to 1, for a progress bar; None: no bar.
    """
    bar = "" if share is None else f'<progress value="{share:.3f}" max="1"></progress>'
    role = "alert" if kind == "failed" else "status"
    text = html.escape(text[:1].upper() + text[1:])
    return f'<div class="line {kind}" role="{role}">{bar}<span>{text}</span></div>'


def status_of(editor, request, progress):
    """The status line of a request.

    Args:
        editor: the request's Editor.
        request: ImageRequest.
        progress: the request's Progress.
    """
    seconds = time.monotonic() - progress.since
    if progress.stage == "waiting":
        return status(waiting(editor, request, seconds), "busy")
    if progress.stage == "loading":
        return status(f"reading the model with other weights, {seconds:.0f} s", "busy")
    num_images, steps = len(request.scales), request.settings.num_steps
    first, last = progress.image + 1, min(progress.image + request.at_once, num_images)
    numbers = f"image {first}" if first == last else f"images {first} to {last}"
    of_several = f"{numbers} of {num_images}, " * (num_images > 1)
    if progress.stage == "compiling":
        return status(of_several + compiling(editor, request, progress, seconds), "busy")
    if not editor.config.progress:
        whole = editor.seconds_left(request, progress._replace(image=0))
        whole = f" of {about(whole)}" if whole else ""
        return status(f"{of_several}{seconds:.0f} s{whole}", "busy")
    text = f"{of_several}step {min(progress.step, steps)} of {steps}"
    if left := editor.seconds_left(request, progress):
        text += f", {about(left)} left"
    done = progress.image + (last - first + 1) * progress.step / steps
    return status(text, "busy", min(1, done / num_images))


def waiting(editor, request, seconds):
    """What a waiting request waits for."""
    current, number = editor.current, editor.num_before(request)
    if number == 1 and current and current.is_trial:
        return f"waiting for the program, which compiles, {seconds:.0f} s"
    if number == 0:
        return "starting"
    return f"waiting for {number} request{'s' * (number > 1)} before this one"


def compiling(editor, request, progress, seconds):
    """Time since compilation began, with estimates from earlier programs and images."""
    width, height = editor.program_size(request)
    steps = request.settings.num_steps
    text = f"compiling for {width}x{height} and {steps} steps, once: {seconds:.0f} s"
    if editor.compile_seconds:
        text += f" of {about(editor.compile_seconds)}"
    if left := editor.seconds_left(request, progress):
        text += f", then {about(left)} for the image{'s' * (len(request.scales) > 1)}"
    return text


def about(seconds):
    """An estimated time in words."""
    return f"about {max(1, seconds):.0f} s" if seconds < 120 else f"about {seconds / 60:.0f} min"


def in_words(error, names, labels):
    """An error's message for the page.

    Args:
        error: exception or text; it may name flags (`--seed 7`) or arguments (`seed=7`).
        names: namespace of the flags and settings.
        labels: {name: label on the page}.
    """
    named = re.compile(rf"(?:--|(?<![\w./=]))({'|'.join(labels)})(?:=(?=\S)|=|\b)")

    def label(found):
        return labels[found[1]] + " " * found[0].endswith("=")

    return as_unicode(named.sub(label, one_line(error)).replace("  ", " "))
