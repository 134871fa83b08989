"""edit_app.py as a process of its own, and the image that edit_cli.py makes."""

import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import ROOT, free_port
from PIL import Image

import edit_cli
from app.settings import Settings

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


def edit_by_cli(model, photo_file, output, *flags, settings=None):
    """The image that edit_cli.py makes with Settings, uint8 (H, W, 3)."""
    settings = settings or Settings("make it red")
    words = ["--model", str(model), "--input", str(photo_file), "--output", str(output), *flags]
    words += ["--edit", settings.instruction]
    for name in ("num_inference_steps", "seed", "guidance_scale", "image_guidance_scale"):
        words += [f"--{name}", str(getattr(settings, name))]
    edit_cli.main([*words, "--resolution", str(settings.resolution)])
    return np.asarray(Image.open(output))


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
    assert "Traceback" not in errors, errors


def memory_of(process):
    """Bytes of memory that a process has."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024


def launch(browser_type, *flags):
    """Chromium, without a window."""
    options = ["--no-sandbox", "--disable-dev-shm-usage", *flags]
    return browser_type.launch(executable_path=CHROMIUM, args=options)
