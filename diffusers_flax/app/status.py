"""The page's status line: a request's progress, results, errors."""

import html
import time


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
    if request.stage == "making" and request.step:
        text = f"step {request.step} of {request.num_steps}"
        return status(text, "busy", request.step / request.num_steps)
    if request.stage == "waiting":
        before = editor.requests.index(request)
        text = f"waiting for {before} request{'s' * (before > 1)} before this one"
    else:
        text = f"{request.stage}, {time.monotonic() - request.since:.0f} s"
        if request.stage == "making":  # no step is known yet, or --no_progress
            text += "; another size, number of steps or scheduler compiles first"
    return status(text, "busy")
