"""Small runs of evaluate_edits.py."""

import io
import json
from pathlib import Path

import numpy as np
import pytest

import evaluate_edits


def evaluate(**given):
    """Run the program; return results.json's content."""
    evaluate_edits.main(flags(**given))
    return json.loads(Path(given["output_dir"], "results.json").read_text())


def flags(**given):
    """A command line; a tuple is several words, None leaves the flag out."""
    given = {"model": "sd", "num_inference_steps": 2, "resolution": 32} | given
    words = []
    for name, value in given.items():
        if value is not None:
            values = value if isinstance(value, tuple) else (value,)
            words += [f"--{name}", *map(str, values)]
    return words


def refused(capsys, **given):
    """The line that the program ends with."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as error:
        evaluate(**given)
    assert error.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def png(image):
    """A PIL image as the bytes of a PNG."""
    data = io.BytesIO()
    image.save(data, "PNG")
    return data.getvalue()


def array(image):
    """Pixels in [0, 1]."""
    return np.asarray(image, np.float64) / 255
