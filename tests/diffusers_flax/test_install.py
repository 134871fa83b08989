"""`pip install .` installs the library alone, and what it imports is what it depends on."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions

import pytest
import torch
from helpers import ROOT
from safetensors.torch import save_file
from tiny_models import make_tiny_pipeline

import diffusers_flax
from diffusers_flax.loading.hub import open_source
from diffusers_flax.loading.weights import read_weights

LIBRARY = ROOT / "diffusers_flax"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NOT_NEEDED = ("tyro", "wandb", "pyarrow", "orbax", "skimage", "matplotlib", "torch", "diffusers")
# Code that makes these packages absent, for imports and for their metadata.
WITHOUT = """
import importlib.metadata, sys
sys.modules.update(dict.fromkeys({names}))
from_name = importlib.metadata.Distribution.from_name
def find(name):
    if name in {names}:
        raise importlib.metadata.PackageNotFoundError(name)
    return from_name(name)
importlib.metadata.Distribution.from_name = find
"""


def pip(*args):
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *args], check=True)


def distributions(requirements):
    """Names of distributions in requirements such as ["jax>=0.10"], in one spelling."""
    return {normalized(re.match(r"[\w-]+", text)[0]) for text in requirements}


def normalized(name):
    return name.lower().replace("_", "-")


def imported_distributions():
    """Distributions that the library imports, at the top of files and in functions."""
    modules = set()
    for file in LIBRARY.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                modules |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                modules.add(node.module.partition(".")[0])
    modules -= {*sys.stdlib_module_names, "diffusers_flax"}
    known = packages_distributions()
    return {normalized(name) for module in modules for name in known[module]}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of a copy of the root, as setuptools writes beside what it builds."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "copy"
    copy.mkdir()
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, copy)
        elif (path / "__init__.py").exists():
            ignore = shutil.ignore_patterns("__pycache__", "results")
            shutil.copytree(path, copy / path.name, ignore=ignore)
    pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder, copy)
    (file,) = folder.glob("*.whl")
    return file


def test_the_wheel_has_the_library_alone(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    info = "diffusers_flax-" + PROJECT["version"] + ".dist-info/"
    files = {str(file.relative_to(ROOT)) for file in LIBRARY.rglob("*.py")}
    assert {name for name in names if not name.startswith(info)} == files


def test_installed_library_makes_an_image_and_trains(wheel, tmp_path):
    """The snippet of the README, with a tiny model and without the network or the clone."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    snippets = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (snippet,) = (snippet for snippet in snippets if "FlaxDDPMScheduler" in snippet)
    blocked = WITHOUT.format(names=NOT_NEEDED)
    shown = "\nimport diffusers_flax\nprint(diffusers_flax.__file__, loss)\n"
    shown += 'pipeline.save_pretrained("saved", params)\n'
    shown += 'assert not [x for x in sys.modules if x.startswith("diffusers_flax.acceleration")]\n'
    (tmp_path / "snippet.py").write_text(blocked + snippet + shown)
    model = re.search(r'^model = "(.*?)"', snippet, re.M)[1]
    make_tiny_pipeline(tmp_path / model, in_channels=4, scheduler="pndm")
    target = tmp_path / "site"
    pip("install", "--no-deps", "--no-index", "--no-compile", "--target", target, wheel)
    done = subprocess.run(
        [sys.executable, "snippet.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    where, loss = done.stdout.split()
    assert where == str(target / "diffusers_flax" / "__init__.py") and 0 < float(loss) < 10
    assert len(list(tmp_path.glob("*.png"))) == 1
    assert (tmp_path / "saved" / "model_index.json").exists()


def test_bin_files_name_what_they_need(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=r"model\.bin needs PyTorch: pip install torch"):
        list(read_weights(tmp_path / "model.bin"))


@pytest.mark.slow
def test_single_files_name_what_they_need(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers.loaders", None)
    unet = {"model.diffusion_model.input_blocks.0.0.weight": torch.ones(8, 4, 3, 3)}
    save_file(unet, tmp_path / "model.safetensors")
    torch.save(unet, tmp_path / "model.ckpt")
    for name in ("model.safetensors", "model.ckpt"):
        match = rf"{name} needs PyTorch and diffusers: pip install torch diffusers"
        with pytest.raises(ImportError, match=match):
            open_source("model", str(tmp_path / name))


def test_dependencies_are_the_imports():
    needed, extras = PROJECT["dependencies"], PROJECT["optional-dependencies"]
    assert imported_distributions() == distributions(needed) | distributions(
        [*extras["torch"], *extras["single-files"]]
    )
    scripts = (ROOT / "requirements.txt").read_text().splitlines()
    for requirements in (needed, *(extras[x] for x in ("torch", "scripts", "single-files"))):
        assert {*requirements} <= {*scripts}


def test_every_name_is_in_its_module():
    for name in diffusers_flax.__all__:
        assert getattr(diffusers_flax, name).__name__ == name


def test_import_takes_no_time():
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "import diffusers_flax"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    times = re.findall(r"\|\s+(\d+) \| +(\S+)$", done.stderr, re.MULTILINE)
    assert times[-1][1] == "diffusers_flax" and int(times[-1][0]) < 300_000  # microseconds
    assert not {"jax", "flax", "numpy", "transformers"} & {module for _, module in times}
