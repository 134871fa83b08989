import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = """
import signal, sys, threading
import jax
from command_line import run_main

def many_operations(x):  # 5 seconds of compilation
    for i in range(300):
        x = jax.numpy.sin(x) @ x + i
    return x

def main():
    lowered = jax.jit(many_operations).lower(jax.numpy.ones((8, 8)))
    threading.Timer(0.3, signal.raise_signal, [signal.SIGINT]).start()
    try:
        lowered.compile()
    except KeyboardInterrupt:
        print("interrupted", end="")
        sys.exit(130)

run_main(main)
"""


def test_ctrl_c_during_a_compilation():
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (130, "interrupted")
