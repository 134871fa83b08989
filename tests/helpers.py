"""What tests of all kinds share: images, arrays, files, marks."""

import json
import re
import socket
import time
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = ["make it red", "invert the colors", "turn it upside down", ""]


def free_port():
    """A port of this machine that nothing listens on."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def slow(*cases):
    """Cases of parametrize that only `make test-all` runs; a case of several values is a tuple."""
    cases = (case if isinstance(case, tuple) else (case,) for case in cases)
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def wait_for(condition, what="the condition", seconds=60):
    """Wait until condition() is true; fail after some seconds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen"
        time.sleep(0.02)


def files_of(folder):
    """{relative path: bytes} of all files below a folder."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder): path.read_bytes() for path in paths}


def flags_in_help(program):
    """The flags that the --help of a program, a module, shows."""
    with redirect_stdout(StringIO()) as shown, suppress(SystemExit):
        program.main(["--help"])
    return {*re.findall(r"--[a-z]\w+", shown.getvalue())}


def edit_json(file, **values):
    """Set entries of a JSON file's object."""
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def photo(width, height, seed=0):
    """Smooth random colours with something different in each corner."""
    small = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def random_inputs(batch, height, width, factor=4):
    """Images (B, H, W, 3) in [0, 1], not just noise, and latents (B, 4, h, w)."""
    rng = np.random.default_rng(0)
    patches = rng.random((batch, height // 8, width // 8, 3), np.float32)
    images = patches.repeat(8, 1).repeat(8, 2)
    latents = rng.standard_normal((batch, 4, height // factor, width // factor), np.float32)
    return images, latents


def random_normal(*shape, seed=0):
    """Standard normal float32 numbers."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def psnr(ours, theirs, peak=1.0):
    """Peak signal-to-noise ratio in dB; equal arrays have at least 200.

    Args:
        ours, theirs: arrays of one shape.
        peak: largest value of the signal; 1 for images in [0, 1].
    """
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    assert ours.shape == theirs.shape
    return 10 * np.log10(peak**2 / (np.mean((ours - theirs) ** 2) + 1e-20))


def matmuls_of_text(program, in_loop=False):
    """Number of matmuls (B, 77, D) x (D, C) in the loops of a jaxpr; in_loop: in all of it."""
    from jax.extend.core import jaxprs_in_params

    total = 0
    for equation in program.eqns:
        inside = in_loop or equation.primitive.name in ("scan", "while")
        for each in jaxprs_in_params(equation.params):
            total += matmuls_of_text(each, inside)
        if in_loop and equation.primitive.name == "dot_general":
            states, kernel = (x.aval.shape for x in equation.invars)
            total += len(kernel) == 2 and states[-2:-1] == (77,)
    return total
