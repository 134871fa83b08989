"""How scripts end, and how they write files."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from command_line import run_main, save_whole, write_text

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = """
import signal, sys, threading
from dataclasses import dataclass
import jax
from command_line import run_main

def many_operations(x):  # 5 seconds of compilation
    for i in range(300):
        x = jax.numpy.sin(x) @ x + i
    return x

@dataclass
class Config:
    pass

def work(config):
    lowered = jax.jit(many_operations).lower(jax.numpy.ones((8, 8)))
    threading.Timer(0.3, signal.raise_signal, [signal.SIGINT]).start()
    lowered.compile()

run_main(Config, "", work)
"""


def test_ctrl_c_during_a_compilation():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "JAX_PLATFORMS": "cpu"},  # no cache, all optimizations
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (130, "interrupted; nothing was written\n")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--promt", "a"],
            "error: Unrecognized options: --promt, a; Perhaps you meant: --prompt STR; For full",
        ),
        (["--promt", "a" * 200], f"error: Unrecognized options: --promt, {'a' * 200}; Perhaps "),
        (["--spacing", "wide"], "error: invalid choice 'wide' for argument '--spacing'. Expected"),
        (["--steps", "9.5"], "error: Error parsing --steps: "),
        (
            ["--sizes", "1", "--sizes=2"],
            "error: --sizes is given 2 times; write all values ",
        ),
        (["--steps"], "error: Missing value for argument '--steps'. Expected 1 values; For full"),
        ([], "error: Missing from "),
    ],
)
def test_wrong_flags_are_one_line(args, message, capsys):
    @dataclass
    class Config:
        model: str
        prompt: str = "a red panda reading a map in a bamboo forest in the morning, soft light"
        steps: int = 3
        sizes: tuple[int, ...] = ()
        spacing: Literal["leading", "trailing"] = "leading"

    with pytest.raises(SystemExit) as stopped:
        run_main(Config, "", lambda config: None, [*args, *(["--model", "m"] if args else [])])
    said = capsys.readouterr().err
    assert stopped.value.code == 2
    assert said.startswith(message) and said.count("\n") == 1 and "│" not in said
    assert "--help" in said or "is given 2 times" in said


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_wrong_subcommand_is_one_line(encoding):
    done = subprocess.run(
        [sys.executable, "tpu_compile.py", "trian", "--tpu", "v5e-4"],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "JAX_PLATFORMS": "cpu", "PYTHONIOENCODING": encoding},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert re.fullmatch(
        r"error: Unrecognized or misplaced options: trian .*; Available subcommands: train, unet, "
        r"sdxl, edit; For full helptext, run tpu_compile\.py --help\n",
        done.stderr,
    )


def test_processes_that_share_a_file_do_not_meet(tmp_path):
    """A second process writes the file while the first one does."""
    file = tmp_path / "new" / "file"

    def save(path):
        path.write_text("first")
        write_text(file, "second", shared=True)
        assert file.read_text() == "second"

    save_whole(file, save, shared=True)
    assert file.read_text() == "first"
    assert [path.name for path in file.parent.iterdir()] == ["file"]
