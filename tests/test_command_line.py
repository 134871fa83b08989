"""How scripts end, and how they write files."""

import errno
import logging
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from safetensors import SafetensorError
from tqdm import tqdm

from command_line import check_output_dir, run_main, save_whole, write_text

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
        (
            ["--dtype", "a"],
            "error: invalid choice 'a' for argument '--dtype'. Expected one of b, c; ",
        ),
        (["--steps", "9.5"], "error: --steps '9.5' is not a whole number; Argument help"),
        (["--share", "half"], "error: --share 'half' is not a number; Argument help"),
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
        dtype: Literal["b", "c"] | None = None
        share: float = 0.5

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


HELP = """Do something with a model that needs a description of two lines.

    python program.py --a_long_example that stays on one line, though it is longer than others

The end."""


@dataclass
class HelpConfig:
    model: str  # directory
    name: str = ""  # of the model
    part: str = ""  # a directory; "": the model's own, which is described in many more words
    number: int | None = None  # of images; None: all
    kind: Literal["a", "b"] | None = None  # of model
    sizes: tuple[int, ...] = ()  # pixels
    seed: int = 3  # of the noise
    optional_flag: str = ""  # "": the model's own


@dataclass
class LongHelpConfig(HelpConfig):
    flag_with_a_name_that_is_longer_than_the_others: int | None = None  # of images; None: all


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("config", [HelpConfig, LongHelpConfig])
def test_help_is_wrapped_and_names_defaults(config, width, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["program.py"])
    monkeypatch.setenv("COLUMNS", str(width))
    with pytest.raises(SystemExit) as stopped:
        run_main(config, HELP, lambda config: None, ["--help"])
    said = capsys.readouterr().out
    assert stopped.value.code == 0 and os.environ["COLUMNS"] == str(width)
    example = HELP.splitlines()[2]
    assert example in said.splitlines()
    assert all(len(line) <= width for line in said.splitlines() if line != example)
    words = " ".join(said.split())
    assert " ".join(HELP.split()) in words
    for text in (
        "--model STR directory (required)",
        "--name STR of the model (default: none)",
        "--part STR a directory; default: the model's own, which is described in many more words -",
        "--number INT of images; default: all --",
        "--kind {a,b} of model (default: none)",
        "--sizes [INT ...] pixels (default: none)",
        "--seed INT of the noise (default: 3)",
        "--optional_flag STR default: the model's own",
    ):
        assert text in words
    assert "None" not in said


def test_a_warning_ends_the_line_of_a_progress_bar(capfd):
    def work(config):
        with tqdm(total=3, file=sys.stderr) as bar:
            bar.update()
            logging.getLogger("somewhere").warning("the prompt is cut")
            bar.update()

    run_main(HelpConfig, "", work, ["--model", "m"])
    assert "the prompt is cut" in re.split(r"[\r\n]+", capfd.readouterr().err)


@dataclass
class OutputConfig:
    output_dir: str = ""
    overwrite_output_dir: bool = True
    num_steps: int = 2000


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), r"\[Errno 28\] No space left on device"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), r"\[Errno 122\] Disk quota exceeded"),
        (
            SafetensorError("I/O error: No space left on device (os error 28)"),
            "I/O error: No space .*",
        ),
    ],
)
def test_a_full_disk_is_named(error, message, tmp_path, capsys):
    def fail(*args):
        raise error

    with pytest.raises(SystemExit) as stopped:
        run_main(OutputConfig, "", fail, [f"--output_dir={tmp_path}"])
    place = rf"--output_dir {tmp_path} is on a disk with [\d.e+]+ [MG]B free; free some space"
    assert stopped.value.code == 2
    assert re.fullmatch(f"error: {message}; {place}\n", capsys.readouterr().err)

    with pytest.raises(SystemExit) as stopped:
        run_main(OutputConfig, "", lambda config: save_whole(tmp_path / "new" / "file", fail), [])
    size = r"[\d.e+]+ [MG]B"
    expected = (
        f"the disk is full; it takes more than the {size} that are free; free some space, or .*"
    )
    said = capsys.readouterr().err
    assert re.fullmatch(f"error: {tmp_path}/new/file cannot be written: {expected}\n", said)
    assert stopped.value.code == 2


def test_errors_of_the_library_name_flags(capsys):
    def work(config):
        raise ValueError(
            "num_steps=2000 must be less; overwrite_output_dir=True; tome:num_steps=1; "
            "output_dir=(1, 2)"
        )

    with pytest.raises(SystemExit):
        run_main(OutputConfig, "", work, [])
    assert capsys.readouterr().err == (
        "error: --num_steps 2000 must be less; --overwrite_output_dir; tome:num_steps=1; "
        "--output_dir 1 2\n"
    )


def test_a_directory_with_files_is_refused(tmp_path):
    folder = tmp_path / "out"
    check_output_dir("output_dir", folder, False)
    assert not folder.exists()
    folder.mkdir()
    (folder / ".unfinished-a").touch()  # of a killed program
    check_output_dir("output_dir", folder, False)
    for name in "abcde":
        (folder / name).touch()
    refused = re.escape(f"--output_dir {folder} is not empty (a, b, c and 2 more); name another ")
    with pytest.raises(
        ValueError, match=f"{refused}.*replace this program's files in it with --over"
    ):
        check_output_dir("output_dir", folder, False)
    with pytest.raises(ValueError, match=f"{refused}directory$"):
        check_output_dir("output_dir", folder, None)
    check_output_dir("output_dir", folder, True)
    check_output_dir("output_dir", folder, False, continues="[e]")
    for path, message in (
        (folder / "a", "is a file; name a directory"),
        (folder / "a" / "b", "cannot be written"),
        ("", "--output_dir is empty; name a directory"),
    ):
        with pytest.raises(ValueError, match=message):
            check_output_dir("output_dir", path, True)


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
