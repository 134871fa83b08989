import os
import subprocess
import sys
from pathlib import Path

from command_line import save_whole, write_text

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
