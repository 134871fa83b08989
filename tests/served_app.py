"""edit_app.py as a process of its own, and the images that edit_cli.py and pipelines make."""

import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from importlib.util import find_spec
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from helpers import ROOT, free_port
from PIL import Image

import diffusers_flax
import edit_cli
from diffusers_flax.app.settings import Limits, Settings, settings_of
from diffusers_flax.generating.recipes import read_recipe
from diffusers_flax.images import to_pil

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


def needs(*packages, chromium=False):
    """Marks a test that is skipped without packages that the Makefile installs."""
    missing = [name for name in packages if find_spec(name) is None]
    missing += ["chromium"] if chromium and CHROMIUM is None else []
    reason = f"not installed: {', '.join(missing)}; make test-app does it"
    return pytest.mark.skipif(bool(missing), reason=reason)


needs_gradio, needs_browser = needs("gradio"), needs("gradio", "playwright", chromium=True)

FAST = ("--resolution", "32", "--num_inference_steps", "3", "--compilation_cache_dir", "")


def settings_in(file, edits=True):
    """The Settings in a PNG file of the page."""
    limits = Limits(8, 4096, (), takes_strength=not edits)
    return settings_of(read_recipe(file), Settings(""), limits)


def edit_by_cli(model, photo_file, output, *flags, settings=None):
    """The image that edit_cli.py makes with Settings, uint8 (H, W, 3)."""
    settings = settings or Settings("make it red")
    words = ["--model", str(model), "--input", str(photo_file), "--output", str(output), *flags]
    words += ["--edit", settings.instruction]
    for name in ("num_inference_steps", "seed", "guidance_scale", "image_guidance_scale"):
        words += [f"--{name}", str(getattr(settings, name))]
    edit_cli.main([*words, "--resolution", str(settings.resolution)])
    return np.asarray(Image.open(output))


def call_pipeline(model, settings, image, mask):
    """The image of a pipeline's call in Python, uint8; image, mask: PIL, of the result's size."""
    named = "Inpaint" if mask else "Img2Img"
    is_xl = "XL" in (model / "model_index.json").read_text()
    kind = getattr(diffusers_flax, f"FlaxStableDiffusion{'XL' * is_xl}{named}Pipeline")
    pipeline, params = kind.from_pretrained(model)
    options = {"num_inference_steps": settings.num_inference_steps, "strength": settings.strength}
    options |= {"guidance_scale": settings.guidance_scale}
    options |= {"neg_prompt_ids": pipeline.prepare_text_inputs(settings.negative_prompt)}
    key = jax.random.key(settings.seed)
    if mask is None:
        arrays = pipeline.prepare_inputs(settings.instruction, image)
    elif is_xl:
        arrays = pipeline.prepare_inputs(settings.instruction, image, mask)
    else:
        prompt_ids, masked_image, mask = pipeline.prepare_inputs(settings.instruction, image, mask)
        arrays, options = (prompt_ids, mask, masked_image), options | {"image": whole(image)}
    return np.asarray(to_pil(pipeline(*arrays, params, key, **options).images)[0])


def whole(image):
    """A PIL image as float32 (1, 3, H, W) in [-1, 1]."""
    return (np.float32(image) / 255 * 2 - 1).transpose(2, 0, 1)[None]


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
    # A browser may close during an upload.
    assert "Traceback" not in errors or "ClientDisconnect" in errors, errors


def launch(browser_type, *flags):
    """Chromium, without a window."""
    options = ["--no-sandbox", "--disable-dev-shm-usage", *flags]
    return browser_type.launch(executable_path=CHROMIUM, args=options)
