"""Batches of edits: errors while the images of the next batch are awaited."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from diffusers_flax.evaluation.edits import EditList, edit_batches
from diffusers_flax.generating.batches import FileWriter, check_finite_images
from diffusers_flax.generating.models import Sampling


class BrokenPipeline:
    """Its images are NaN once an event is set."""

    layout = ays_timesteps = None

    def __init__(self, ready):
        self.ready = ready

    def prepare_text_inputs(self, texts):
        return np.zeros((len(texts), 77), np.int32)

    def prepare_inputs(self, text, images, masks, feather):
        return None, np.zeros((len(images), 3, 8, 8), np.float32)

    def __call__(self, *args, **options):
        return SimpleNamespace(images=self)

    def __array__(self, dtype=None, copy=None):
        assert self.ready.wait(10)
        return np.full((1, 1, 8, 8, 3), np.nan, np.float32)


def test_an_edit_fails_while_another_waits_for_its_output():
    """The error comes at once, though a thread waits for the file."""
    files, is_loading, errors = FileWriter(), threading.Event(), []
    edits = [SimpleNamespace(index=i, instruction="red", input=f"{i}.png") for i in range(2)]

    def load(edit, size, is_masked):
        if edit.index == 1:
            is_loading.set()
            files.wait_for("1.png")
        return Image.new("RGB", size), None

    def edit_all():
        with pytest.raises(ValueError, match="NaN") as error:
            bar = SimpleNamespace(set_description=lambda text: None)
            pipeline, sampling = BrokenPipeline(is_loading), Sampling(1)
            edit_list = EditList(edits, [(8, 8)] * 2, rounds=[0, 1])
            batches = edit_batches(pipeline, {}, edit_list, sampling, load, bar, in_flight=2)
            _, images, _ = next(batches)
            check_finite_images(images, "the first edit")
        errors.append(error.value)

    thread = threading.Thread(target=edit_all)
    thread.start()
    thread.join(10)
    found = list(errors)
    files.__exit__(None, None, None)  # ends the thread that waits
    thread.join(10)
    assert found
