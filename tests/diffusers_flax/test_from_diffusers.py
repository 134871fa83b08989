"""Scripts of diffusers 0.39 under `python -m diffusers_flax`, and docs/from-diffusers.md."""

import json
import os
import re
import subprocess
import sys

import pytest
from helpers import ROOT

import diffusers_flax

PAGE = (ROOT / "docs" / "from-diffusers.md").read_text(encoding="utf-8")
API = json.loads((ROOT / "tests" / "published_flax_api.json").read_text())["classes"]
NOT_HERE = {"FlaxGenerationMixin"}  # CLIP generates no text

SCRIPT = """
import os, sys
assert "jax" not in sys.modules and "diffusers" not in sys.modules
os.environ["JAX_ENABLE_X64"] = "1"  # read when jax is imported

import jax
from diffusers import (
    FlaxAutoencoderKL,
    FlaxDDPMScheduler,
    FlaxPNDMScheduler,
    FlaxStableDiffusionPipeline,
    FlaxUNet2DConditionModel,
)
from diffusers.pipelines.stable_diffusion import FlaxStableDiffusionSafetyChecker
from diffusers.utils import check_min_version
from jax.experimental.compilation_cache import compilation_cache as cc
from transformers import CLIPTokenizer, FlaxCLIPTextModel, set_seed

import beside_the_script

check_min_version("0.39.0")
check_min_version("0.40.0.dev0")  # of the scripts on the main branch of August 2026
assert __name__ == "__main__" and sys.modules["__main__"].check_min_version is check_min_version
assert jax.config.jax_enable_x64
cc.initialize_cache(sys.argv[1])
assert FlaxAutoencoderKL().config.latent_channels == 4
doubled = jax.tree_map(lambda x: 2 * x, {"a": 1})
print(FlaxPNDMScheduler.__name__, doubled, os.path.basename(__file__), *sys.argv)
sys.exit(7)
"""
NAMES = """
import importlib, json, sys
for module, name in json.loads(sys.argv[1]):
    value = getattr(importlib.import_module(module), name)
    assert value.__module__.startswith("diffusers_flax."), (module, name, value)
import diffusers, jax, transformers
for module in (diffusers, jax, transformers):
    assert not hasattr(module, "FlaxNothing")
"""


def run(cwd, *args, **env):
    """The finished process of python -m diffusers_flax ARGS."""
    return subprocess.run(
        [sys.executable, "-m", "diffusers_flax", *args],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | env,
        capture_output=True,
        text=True,
    )


def test_a_script_runs_as_it_is(tmp_path):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/train.py").write_text(SCRIPT)
    (tmp_path / "scripts/beside_the_script.py").touch()
    done = run(tmp_path, "scripts/train.py", "cache", "--seed", "3")
    assert done.returncode == 7, done.stderr
    assert done.stdout == "FlaxPNDMScheduler {'a': 2} train.py scripts/train.py cache --seed 3\n"


@pytest.mark.slow
def test_every_published_name_is_in_its_module(tmp_path):
    classes = {name: known["module"] for name, known in API.items() if name not in NOT_HERE}
    flax = {
        name: module for name, module in classes.items() if "Mixin" not in name or "Flax" in name
    }
    exported = [name for name in flax if name.startswith("Flax") and "Output" not in name]
    wanted = [(module, name) for name, module in flax.items() if "flax" in module]
    wanted += [(flax[name].split(".")[0], name) for name in exported]
    (tmp_path / "names.py").write_text(NAMES)
    done = run(tmp_path, "names.py", json.dumps(wanted))
    assert done.returncode == 0, done.stderr
    assert len(wanted) > 60


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "error:  is not a file; usage: python -m diffusers_flax SCRIPT"),
        (["missing.py"], "error: missing.py is not a file"),
    ],
)
def test_one_line_without_a_script(tmp_path, args, message):
    done = run(tmp_path, *args)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(message) and done.stderr.count("\n") == 1


def test_names_of_the_page():
    imports = re.findall(r"`(from diffusers_flax import [\w ,]+)`", PAGE)
    assert len(imports) >= 5
    for statement in imports:
        exec(statement, {})
    section = PAGE.partition("## The classes")[2].partition("## ")[0]
    named = set(re.findall(r"`(Flax\w+)`", section))
    schedulers = {f"{name}Scheduler" for name in named} & {*diffusers_flax.__all__}
    assert named - {*diffusers_flax.__all__} <= {
        name.removesuffix("Scheduler") for name in schedulers
    }
