"""Measurements of speed, memory and quality; each module's docstring has its commands."""

import os

# PyTorch's pipelines import image processors; that torchvision is not installed does not matter.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
