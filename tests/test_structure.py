"""CONTRIBUTING.md's rules for files, read from their text: sizes, and who imports whom."""

import ast
import itertools
import re
import subprocess
import tomllib
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter
from pathlib import PurePath

import pytest
from helpers import ROOT

LIBRARY = "diffusers_flax"
# Folders of the library, from the bottom; a folder imports from lower layers only.
LAYERS = (("loading",), ("models", "schedulers"), ("devices",), ("acceleration",))
LAYERS += (("pipelines", "data"), ("generating",), ("training", "evaluation"))
LAYERS += (("app", "pairing", "compiling", "exporting"),)
# Folders that know nothing of programs.
CLASSES = ("loading", "models", "schedulers", "devices", "acceleration", "pipelines")


def git_files(*patterns):
    command = ["git", "-C", ROOT, "ls-files", *patterns]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    return [PurePath(line) for line in done.stdout.splitlines() if (ROOT / line).exists()]


@cache
def code():
    """{file: its module as a syntax tree} of all Python files except tests."""
    files = [file for file in git_files("*.py") if file.parts[0] != "tests"]
    return {file: ast.parse((ROOT / file).read_text(encoding="utf-8")) for file in files}


def imports(tree):
    """Names of the modules that a file imports, also in its functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module


def test_numbers_of_files():
    files = [file for file in git_files() if file.parts[0] not in ("tests", "docs")]
    assert len([file for file in code() if len(file.parts) == 1]) <= 17
    counts = Counter(file.parent for file in files if len(file.parts) > 1)
    assert {str(folder): n for folder, n in counts.items() if n > 16} == {}


def test_lengths():
    long = {}
    for file, tree in code().items():
        long[file] = len((ROOT / file).read_text(encoding="utf-8").splitlines()) - 800
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                lines = node.end_lineno - body[0].lineno + 1 if body else 0
                long[f"{file}: {node.name}"] = lines - 80
    assert {str(name): n for name, n in long.items() if n > 0} == {}


def test_programs_that_read_like_the_published_guides_are_short():
    limits = {
        "sdxl_single.py": 100,
        "sdxl_single_aot.py": 130,
        "flax_train_instruct_pix2pix.py": 700,
        "generate_cli.py": 350,
    }
    lines = {name: len((ROOT / name).read_text().splitlines()) for name in limits}
    assert {name: n for name, n in lines.items() if n > limits[name]} == {}


def test_programs_that_read_like_the_published_guides_name_few_modules():
    limits = {"sdxl_single.py": 3, "sdxl_single_aot.py": 4, "flax_train_instruct_pix2pix.py": 8}
    for name, most in limits.items():
        found = {x for x in imports(code()[PurePath(name)]) if x.startswith(LIBRARY)}
        assert len(found) <= most, (name, found)


def test_imports():
    """A program is one file on the library; compile_for.py compiles the trainer's step."""
    programs = {file.stem for file in code() if len(file.parts) == 1}
    ours = {*programs, "tests", "benchmarks", "demo", "notebooks", "examples"}
    wrong = {}
    for file, tree in code().items():
        name = file.stem if len(file.parts) == 1 else file.parts[0]
        found = ours & {module.partition(".")[0] for module in imports(tree)} - {name}
        if name == "compile_for":
            found -= {"flax_train_instruct_pix2pix"}
        if name in programs or name in (LIBRARY, "examples"):
            wrong[file] = found
    assert {str(file): found for file, found in wrong.items() if found} == {}


def folder_imports():
    """{folder: folders that its files import}; files of the root and of the library alone."""
    modules = {".".join(file.parent.parts): file.parent / "__init__.py" for file in code()}
    modules |= {".".join(file.with_suffix("").parts): file for file in code()}

    def node(file):
        return file if file.parent in (PurePath(), PurePath(LIBRARY)) else file.parent

    graph = {}
    for file, tree in code().items():
        found = {node(modules[name]) for name in imports(tree) if name in modules}
        graph.setdefault(str(node(file)), set()).update(map(str, found - {node(file)}))
    return graph


def test_folders_import_in_one_direction():
    graph = folder_imports()
    TopologicalSorter(graph).prepare()  # raises a CycleError with the folders of a circle
    for i, layer in enumerate(LAYERS):
        allowed = {f"{LIBRARY}/{folder}" for lower in LAYERS[:i] for folder in lower}
        for folder in layer:
            found = {x for x in graph[f"{LIBRARY}/{folder}"] if not x.endswith(".py")}
            found = {"/".join(x.split("/")[:2]) for x in found} - {f"{LIBRARY}/{folder}"}
            assert found <= allowed, folder


def test_the_library_knows_no_program():
    """It names arguments, no flags but other programs' and the one of its own command line."""
    programs = "|".join(re.escape(file.name) for file in code() if len(file.parts) == 1)
    allowed = {"--help", "--revision", "--xla_cpu_collective_timeout_seconds"}
    root = {file for file in git_files(f"{LIBRARY}/*.py") if len(file.parts) == 2}
    files = {file for file in git_files(f"{LIBRARY}/*.py") if file.parts[1] in CLASSES} | root
    for file in files - {PurePath(LIBRARY, "command_line.py")}:
        text = (ROOT / file).read_text(encoding="utf-8")
        assert {*re.findall(r"--[a-z]\w+", text)} <= allowed, file
        if file.name != "__main__.py":  # its usage runs a user's script
            assert not re.search(rf"\b(?:{programs})\b", text), file


def test_functions_take_few_parameters():
    """At most 8; published signatures, an HTTP API and what users paste may take more."""
    published = {"__call__", "_generate", "from_pretrained"}
    exempt = {"api_edit", "api_image", "api_image_to_image", "diffusion_loss", "train_step"}
    long = {}
    for file, tree in code().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name not in published | exempt:
                names = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                count = len([x for x in names if x.arg not in ("self", "cls")])
                long |= {f"{file}: {node.name}": count} if count > 8 else {}
    assert long == {}


def test_bounds_of_the_requirements_agree():
    """The pinned torch is the lowest one, so that its bound is tested, too (make test-lowest)."""
    bound = re.compile(r"([\w-]+)>=([\d.]+)")
    requirements = dict(bound.findall((ROOT / "requirements.txt").read_text()))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    shared = ("torch", "scripts", "single-files")  # others are of one program
    extras = (project["optional-dependencies"][name] for name in shared)
    for line in itertools.chain(project["dependencies"], *extras):
        name, version = bound.fullmatch(line).groups()
        assert requirements[name] == version, name
    for file in ("Makefile", "setup-tpu-vm.sh"):
        (pinned,) = re.findall(r"torch==([\d.]+)", (ROOT / file).read_text())
        assert f"{pinned}.".startswith(f"{requirements['torch']}."), file
