"""`pip install .` installs the library, and what it imports is what it depends on."""

import ast
import itertools
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions

import pytest
from helpers import ROOT, photo
from shards import write_random_shard
from tiny_models import make_tiny_pipeline

import diffusers_flax

LIBRARY = ROOT / "diffusers_flax"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NOT_NEEDED = (
    "tyro",
    "wandb",
    "pyarrow",
    "orbax",
    "skimage",
    "matplotlib",
    "torch",
    "diffusers",
)  # by the classes
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
    names = ({module: known.get(module, [module])} for module in modules)
    return {normalized(x) for pair in names for several in pair.values() for x in several}


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
    files = {str(x.relative_to(ROOT)) for x in LIBRARY.rglob("*.*") if x.suffix != ".pyc"}
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


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory):
    """A directory with the installed wheel, for PYTHONPATH."""
    target = tmp_path_factory.mktemp("site")
    pip("install", "--no-deps", "--no-index", "--no-compile", "--target", target, wheel)
    return target


def run_alone(name, folder, site, *words):
    """Run a program that is copied alone into a folder, with the installed library."""
    folder.mkdir(exist_ok=True)
    shutil.copy(ROOT / name, folder)
    done = subprocess.run(
        [sys.executable, name, *map(str, words)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_script_py_needs_no_library(tmp_path):
    """Beside it, the library and jax are modules that cannot be imported."""
    for name in ("diffusers_flax", "jax", "torch"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name} is imported')")
    (tmp_path / "urls.txt").write_text("https://host/a.parquet 5\nhttps://host/b.parquet 7\n")
    shown = run_alone("script.py", tmp_path, "", "--urls", "urls.txt", "--num_workers", 2)
    assert "next, on worker K: bash script.sh plan/download-K.txt" in shown
    assert "https://host/b.parquet" in (tmp_path / "plan/download-0.txt").read_text()


SIX = ("script.py", "parquet_processing.py", "create_modified_unet.py")
SIX += ("flax_train_instruct_pix2pix.py", "sdxl_single.py", "sdxl_single_aot.py")
OTHERS = sorted({x.name for x in ROOT.glob("*.py")} - {*SIX, "compile_for.py"})  # has two files


@pytest.mark.parametrize("name", [*SIX, *(pytest.param(x, marks=pytest.mark.slow) for x in OTHERS)])
def test_a_program_alone_answers(site, tmp_path, name):
    assert f"python {name} " in run_alone(name, tmp_path, site, "--help")


@pytest.mark.slow
def test_programs_alone_do_the_main_job(site, tmp_path):
    """Widen, train and edit, each in an empty folder."""
    base, pairs = tmp_path / "base", tmp_path / "pairs"
    make_tiny_pipeline(base, in_channels=4)
    pairs.mkdir()
    write_random_shard(pairs / "a.parquet", 8, seed=0)
    unet, model = tmp_path / "unet", tmp_path / "model"
    base_flag = ("--pretrained_model_name_or_path", base)
    run_alone("create_modified_unet.py", tmp_path / "a", site, *base_flag, "--output_dir", unet)
    flags = ["--unet_model_name_or_path", unet, "--train_data_dir", pairs, "--output_dir", model]
    flags += ["--resolution", 16, "--train_batch_size", 4, "--max_train_steps", 2]
    run_alone("flax_train_instruct_pix2pix.py", tmp_path / "b", site, *base_flag, *flags)
    photo(32, 24).save(tmp_path / "in.png")
    flags = ["--model", model, "--input", tmp_path / "in.png", "--edit", "make it red"]
    flags += ["--output", tmp_path / "out.png", "--num_inference_steps", 2, "--resolution", 32]
    run_alone("edit_cli.py", tmp_path / "c", site, *flags)
    assert (tmp_path / "out.png").exists()


def test_dependencies_are_the_imports():
    """Of a program's own packages, too, which are extras; some come with others."""
    needed, extras = PROJECT["dependencies"], PROJECT["optional-dependencies"]
    more = itertools.chain(*(extras[x] for x in extras if x not in ("openvino", "export")))
    come_along = {"fsspec", "jaxlib", "starlette", "onnx-ir", "openvino", "nncf"}
    assert imported_distributions() - come_along <= distributions(needed) | distributions(more)
    assert distributions(needed) - imported_distributions() == set()
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
