"""What the tests of programs for NVIDIA GPUs share."""

import importlib.util

import pytest

from compiling.cards import FOLDER, PACKAGES

needs_gpu_compiler = pytest.mark.skipif(
    not (FOLDER.is_dir() or any(importlib.util.find_spec(name) for name in PACKAGES)),
    reason="the compiler for NVIDIA GPUs is not installed: make .venv/gpu",
)
