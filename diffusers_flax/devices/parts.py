"""The parts of a run: encoding texts and images, denoising, decoding.

A method with the decorator `part` is one of them. It is a plain method, unless `run_parts` gives a
function that runs the parts in its own way.
"""

import functools
from contextlib import contextmanager
from contextvars import ContextVar

PARTS = ("text", "unet", "vae")  # as --devices names them

_run_part = ContextVar("run_part", default=None)


@contextmanager
def run_parts(run_part):
    """A context in which run_part(names, call, params) runs every part and returns its result.

    names are the keys of the part's models in params, call(params) is the part's result.
    """
    token = _run_part.set(run_part)
    try:
        yield
    finally:
        _run_part.reset(token)


def part(*names):
    """Decorator of a method (params, ...) that is a part of a run.

    names: the keys of the part's models in params; some of them may be absent.
    """

    def decorate(method):
        @functools.wraps(method)
        def run(self, params, *args, **kwargs):
            def call(params):
                return method(self, params, *args, **kwargs)

            run_part = _run_part.get()
            return call(params) if run_part is None else run_part(names, call, params)

        return run

    return decorate


def part_of_models(models):
    """The name in PARTS of the part with these models, keys of params; see part."""
    if models[0].startswith("text_encoder"):
        return "text"
    return "unet" if models[0] == "controlnet" else models[0]
