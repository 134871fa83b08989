"""The notebook: its commands are right for every machine, and the demo runs from top to bottom."""

import importlib
import json
import os
import re
import shlex
import shutil
import sys
from contextlib import suppress
from types import SimpleNamespace

import pytest
from helpers import ROOT, flags_in_help, slow

from diffusers_flax.command_line import parse_flags
from diffusers_flax.training.flags import check_flags

NOTEBOOK = ROOT / "notebooks" / "instruct_pix2pix.ipynb"
COMMAND = re.compile(r"^( *)!(.*)$", re.MULTILINE)
SHELL = {"cd", "du", "git"}  # programs of commands that are not this project's


def code_cells():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def commands():
    """The notebook's commands, in words, with its variables filled in; none of them is run."""
    found, names = [], {}

    def record(command):
        found.append(
            shlex.split(re.sub(r"{([^{}]+)}", lambda match: str(eval(match[1], names)), command))
        )

    names.update(record=record, get_ipython=SimpleNamespace)
    for cell in code_cells():
        source = "".join(cell["source"]).replace("\\\n", " ")  # one line for each command
        source = source.replace('HUB_MODEL_ID = ""', 'HUB_MODEL_ID = "me/model"')
        source = COMMAND.sub(lambda match: f"{match[1]}record({match[2]!r})", source)
        with suppress(FileNotFoundError):  # what a command would have written
            exec(source, names)
    return found


@pytest.mark.parametrize("demo", ["", *slow("1")])
def test_commands_parse(demo, monkeypatch, tmp_path):
    images = SimpleNamespace(Image=lambda *args, **kwargs: None, display=lambda image: None)
    monkeypatch.setitem(sys.modules, "IPython.display", images)
    monkeypatch.setenv("DEMO", demo)
    monkeypatch.setenv("PATH", os.environ["PATH"])  # the notebook changes it
    monkeypatch.setenv("HF_TOKEN", "token")
    for folder in ("demo", "work"):  # the demo's outputs, and all others
        (tmp_path / "notebooks" / folder).mkdir(parents=True)
    (tmp_path / "setup-tpu-vm.sh").touch()
    monkeypatch.chdir(tmp_path / "notebooks")
    programs = []
    for program, *words in commands():
        if program == "python" and words[0] != "-c":
            programs.append(words[0])
            module = importlib.import_module(words[0].removesuffix(".py").replace("/", "."))
            if words[0] == "script.py":  # has no Config
                assert {x for x in words if x.startswith("--")} <= flags_in_help(module)
                continue
            config = parse_flags(module.Config, "", words[1:])
            if words[0] == "flax_train_instruct_pix2pix.py":
                assert config.hub_model_id == "me/model"
                for num_devices in (1, 2, 8):
                    check_flags(config, num_devices)
        elif program == "bash":
            assert (ROOT / words[0]).exists()
        else:
            assert program in SHELL or words[0] == "-c"
    data = ["demo/make_dataset.py"] if demo else ["script.py"]
    assert programs == [
        *data,
        "parquet_processing.py",
        "create_modified_unet.py",
        "flax_train_instruct_pix2pix.py",
        *["edit_cli.py"] * 4,
    ]


def images_and_loss(cells):
    """(number of images in the outputs, last loss that they print)."""
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    images = [x for output in outputs for x in output.get("data", {}) if x.startswith("image/")]
    text = "".join("".join(output.get("text", "")) for output in outputs)
    return len(images), float(re.findall(r"step \d+: loss (\d\.\d+)", text)[-1])


def test_outputs_are_of_a_run_and_small():
    num_images, loss = images_and_loss(code_cells())
    assert num_images == 6
    assert loss < 0.5
    assert [cell["execution_count"] for cell in code_cells()] == list(
        range(1, len(code_cells()) + 1)
    )
    assert NOTEBOOK.stat().st_size < 400_000


@pytest.mark.slow
def test_demo_runs(tmp_path):
    nbformat = pytest.importorskip("nbformat")
    for package in ("nbclient", "ipykernel"):
        pytest.importorskip(package)
    if not (ROOT / ".venv" / "installed").exists():
        pytest.skip("no .venv/installed, which make sets up: the notebook would install it")
    from notebooks.execute import execute

    (tmp_path / "notebooks").mkdir()  # a clone whose outputs are its own
    for path in ROOT.iterdir():
        if path.name not in ("notebooks", ".git"):
            (tmp_path / path.name).symlink_to(path)
    shutil.copy(NOTEBOOK, tmp_path / "notebooks")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    execute(notebook, tmp_path / "notebooks", env)
    (num_images, loss), committed = (
        images_and_loss(cells)
        for cells in ([x for x in notebook.cells if x.cell_type == "code"], code_cells())
    )
    assert num_images == committed[0]
    assert loss == pytest.approx(committed[1], rel=0.1)
