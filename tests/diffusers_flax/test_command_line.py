"""How programs read their flags, how they end, and what they may write."""

import dataclasses
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from typing import Annotated, Literal

import pytest
from helpers import ROOT
from safetensors import SafetensorError

from diffusers_flax.command_line import (
    Above,
    AtLeast,
    AtMost,
    Below,
    Between,
    MultipleOf,
    Seed,
    ask_before_replacing,
    check_ranges,
    parse_flags,
    run_main,
)


@dataclass
class Train:
    steps: int = 1
    rate: float = 1.0


@dataclass
class Edit:
    model: str  # directory
    prompt: str = "a red panda reading a map in a bamboo forest in the morning, soft light"
    steps: int = 3  # of the sampler
    sizes: tuple[int, ...] = ()  # pixels
    spacing: Literal["leading", "trailing"] = "leading"
    dtype: Literal["b", "c"] | None = None


def refused(config_class, args, capsys):
    """What a program prints that refuses its flags: one line."""
    with pytest.raises(SystemExit) as stopped:
        run_main(config_class, "", lambda config: None, args)
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "Missing from "),
        (["--promt", "a"], "Unrecognized options: --promt, a; did you mean --prompt?"),
        (["--steps"], "Missing value for argument '--steps'. Expected 1 values; --help"),
        (
            ["--steps", "9.5"],
            "Error parsing --steps: invalid literal for int() with base 10: '9.5'",
        ),
        (["--spacing", "wide"], "invalid choice 'wide' for argument '--spacing'"),
        (["--sizes", "1", "--sizes", "2"], "--sizes is given twice; write all values after one"),
    ],
)
def test_wrong_flags_are_one_line(args, message, capsys):
    said = refused(Edit, ["--model", "m", *args] if args else [], capsys)
    assert said.startswith(f"error: {message}") and said.endswith("; --help lists the flags")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["trian"], "Unrecognized options: trian"),
        (["edit", "--model", "a", "--rate", "2"], "Unrecognized or misplaced options: --rate "),
    ],
)
def test_a_wrong_subcommand_is_one_line(args, message, capsys):
    said = refused({"train": Train, "edit": Edit}, args, capsys)
    assert said.startswith(f"error: {message}")


@pytest.mark.parametrize("width", [60, 120])
def test_help(width, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["program.py"])
    monkeypatch.setenv("COLUMNS", str(width))
    description = "Edit images.\n\n    python program.py --model m\n"
    for config_class, args in ((Edit, []), ({"train": Train, "edit": Edit}, ["edit"])):
        with pytest.raises(SystemExit) as stopped:
            run_main(config_class, description, lambda config: None, [*args, "--help"])
        said = capsys.readouterr().out
        assert stopped.value.code == 0 and said.startswith(description)
        lines = said.splitlines()
        table = lines[lines.index("    python program.py --model m") + 4 :]
        assert all(len(line) <= width for line in table)
        words = " ".join(said.split())
        for text in (
            "--model STR directory (required)",
            "--steps INT of the sampler (default: 3)",
            "--sizes [INT [INT ...]] pixels (default: )",
            "--dtype {None,b,c} (default: None)",
        ):
            assert text in words


@pytest.mark.parametrize(
    ("own", "other"),
    [
        ("model", "pretrained_model_name_or_path"),
        ("pretrained_model_name_or_path", "model"),
        ("data_dir", "pairs"),
    ],
)
def test_doubles_have_both_names(own, other, capsys):
    """Also with hyphens and with an equals sign; --help shows the program's own name alone."""
    config_class = dataclasses.make_dataclass("Config", [(own, str)], frozen=True)
    for words in (
        [f"--{own}", f"xx{other}"],
        [f"--{other}", f"xx{other}"],
        [f"--{other}=xx{other}"],
        [f"--{other.replace('_', '-')}", f"xx{other}"],
    ):
        assert getattr(parse_flags(config_class, "A program.", words), own) == f"xx{other}"
    with pytest.raises(SystemExit):
        parse_flags(config_class, "A program.", ["--help"])
    said = capsys.readouterr().out
    assert f"--{own} STR" in said and f"--{other}" not in said


@dataclass(frozen=True)
class Numbers:
    steps: Annotated[int, AtLeast(1)] = 1
    scale: Annotated[float, AtLeast(0)] | None = None
    share: Annotated[float | None, Between(0, 1)] = None
    sizes: tuple[Annotated[int, AtLeast(8), MultipleOf(8)], ...] = ()
    lengths: Annotated[tuple[float, float], Above(0), Below(0.28)] | None = None
    levels: Annotated[int, AtMost(3)] = 3
    seed: Seed = 0
    offset: float = 0.0
    shuffle: bool = True


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--steps", "0"], "--steps 0 must be at least 1"),
        (["--scale", "-0.1"], "--scale -0.1 must be at least 0"),
        (["--scale", "nan"], "--scale nan must be a finite number"),
        (["--share", "1.5"], "--share 1.5 must be from 0 to 1"),
        (["--sizes", "8", "12"], "--sizes 12 must be at least 8 and a multiple of 8"),
        (["--lengths", "0.1", "0.28"], "--lengths 0.28 must be above 0 and below 0.28"),
        (["--levels", "4"], "--levels 4 must be at most 3"),
        (["--seed", "-1"], "--seed -1 must be from 0 to 4294967295"),
    ],
)
def test_flags_out_of_range_are_one_line(args, message, capsys):
    assert refused(Numbers, args, capsys) == f"error: {message}"


def test_flags_in_range():
    check_ranges(Numbers())
    check_ranges(Numbers(1, 0.0, 1.0, (8, 16), (0.1, 0.2), -5, 2**32 - 1, -1.0))


SCRIPT = """
import signal, sys, threading
from dataclasses import dataclass
import jax
from diffusers_flax.command_line import run_main

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
    ("error", "code", "message"),
    [
        (ValueError("accelerate='tome'\n is unknown"), 2, "accelerate='tome' is unknown"),
        (FileNotFoundError(2, "No such file", "a.png"), 2, "[Errno 2] No such file: 'a.png'"),
        (SafetensorError("I/O: No space left on device"), 2, "I/O: No space left on device"),
        (FloatingPointError("the loss is NaN"), 1, "the loss is NaN"),
    ],
)
def test_errors_end_in_one_line(error, code, message, capsys):
    def work(config):
        raise error

    with pytest.raises(SystemExit) as stopped:
        run_main(Train, "", work, [])
    assert (stopped.value.code, capsys.readouterr().err) == (code, f"error: {message}\n")


def test_a_directory_with_files_is_refused(tmp_path):
    folder = tmp_path / "out"
    ask_before_replacing("output_dir", folder, False)
    assert not folder.exists()
    folder.mkdir()
    (folder / ".unfinished-a").touch()  # of a killed program
    ask_before_replacing("output_dir", folder, False)
    for name in "abcde":
        (folder / name).touch()
    refused = f"--output_dir {folder} is not empty (a, b, c); name another directory"
    with pytest.raises(ValueError, match=re.escape(refused)):
        ask_before_replacing("output_dir", folder, False)
    ask_before_replacing("output_dir", folder, True)
    ask_before_replacing("output_dir", folder, False, continues="[e]")
    inside = [folder / name for name in "abcd"]
    ask_before_replacing("output_dir", folder, False, others=[*inside, folder / "e" / "cache"])
    with pytest.raises(ValueError, match=r"is not empty \(e\)"):
        ask_before_replacing("output_dir", folder, False, others=inside)
