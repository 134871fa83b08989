"""Measurements of speed and quality; each program's docstring has its commands."""

import os

# PyTorch's pipelines warn of a missing torchvision, which they do not need, and of casts.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
