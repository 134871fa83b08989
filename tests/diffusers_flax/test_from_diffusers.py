"""The code and tables of docs/from-diffusers.md."""

import importlib
import os
import re
import subprocess
import sys

import pytest
from helpers import ROOT

PAGE = (ROOT / "docs" / "from-diffusers.md").read_text(encoding="utf-8")
SCRIPT = """
import sys
from diffusers import (
    FlaxAutoencoderKL,
    FlaxDDPMScheduler,
    FlaxPNDMScheduler,
    FlaxStableDiffusionPipeline,
    FlaxUNet2DConditionModel,
)
from diffusers.pipelines.stable_diffusion import FlaxStableDiffusionSafetyChecker
from jax.experimental.compilation_cache import compilation_cache as cc
from transformers import CLIPTokenizer, FlaxCLIPTextModel

cc.initialize_cache(sys.argv[1])
vae = FlaxAutoencoderKL()
assert __name__ == "__main__" and vae.config.latent_channels == 4
print(FlaxPNDMScheduler.__name__, *sys.argv[1:])
"""


def test_imports_of_the_table():
    imports = re.findall(r"`from (\w+) import ([\w, ]+)`", PAGE)
    assert len(imports) > 10
    for module, names in imports:
        if module not in ("diffusers", "transformers"):
            for name in names.split(", "):
                assert hasattr(importlib.import_module(module), name)


def test_every_old_name_is_there():
    """The names in the left column exist in the modules of the right column."""
    for row in re.findall(r"^\| (.*) \| (.*) \|$", PAGE, re.MULTILINE):
        if (new := re.search(r"`from (\w+) import", row[1])) and "import" in row[0]:
            module = importlib.import_module(new[1])
            for name in re.findall(r"Flax\w+", row[0].replace("FlaxDDPM...", "FlaxDDPMScheduler")):
                assert any(known.startswith(name) for known in vars(module)), (module, name)


def test_a_script_that_stays_as_it_is(tmp_path):
    snippet = re.search(r"```python\n(# old_names.py\n.*?)```", PAGE, re.DOTALL)[1]
    (tmp_path / "old_names.py").write_text(snippet)
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "old_names.py", "train.py", "cache", "--seed", "3"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "FlaxPNDMScheduler cache --seed 3\n"


@pytest.mark.parametrize("module", re.findall(r"`from diffusers_flax import (\w+) as cc`", PAGE))
def test_initialize_cache(module):
    assert callable(importlib.import_module(f"diffusers_flax.{module}").initialize_cache)
