"""How scripts end, and how they write files."""

import dataclasses
import errno
import logging
import math
import os
import re
import subprocess
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Annotated, Literal

import jax
import pytest
import tyro
from helpers import ROOT
from safetensors import SafetensorError
from tqdm import tqdm

import edit_cli
from diffusers_flax import command_line
from diffusers_flax.acceleration.plans import TinyDecoder
from diffusers_flax.acceleration.previews import Preview
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
    check_writable,
    run_main,
)
from diffusers_flax.compilation_cache import use_compilation_cache
from diffusers_flax.devices.layout import Layout, parse_components
from diffusers_flax.devices.parallelism import check_parallel
from diffusers_flax.generating.flags import note_single_words
from diffusers_flax.loading.embeddings import read_embeddings
from diffusers_flax.loading.files import save_whole, write_text
from diffusers_flax.loading.lora import Loras
from diffusers_flax.models.tiny_vae import choose_tiny_vae


@dataclass(frozen=True)
class Numbers:
    steps: Annotated[int, AtLeast(1)] = 1
    scale: Annotated[float, AtLeast(0)] | None = None
    share: Annotated[float | None, Between(0, 1)] = None
    noise: Annotated[float, Between(1, math.inf)] = 1.0
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
        (["--scale", "nan"], "--scale nan must be at least 0"),
        (["--scale", "inf"], "--scale inf must be a finite number"),
        (["--share", "1.5"], "--share 1.5 must be from 0 to 1"),
        (["--noise", "0"], "--noise 0.0 must be from 1 to inf"),
        (["--sizes", "8", "12"], "--sizes 12 must be at least 8 and a multiple of 8"),
        (["--lengths", "0.1", "0.28"], "--lengths 0.28 must be above 0 and below 0.28"),
        (["--lengths", "0", "0.2"], "--lengths 0.0 must be above 0 and below 0.28"),
        (["--levels", "4"], "--levels 4 must be at most 3"),
        (["--seed", "-1"], "--seed -1 must be from 0 to 4294967295"),
        (["--offset", "nan"], "--offset nan must be a finite number"),
    ],
)
def test_flags_out_of_range_are_one_line(args, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        run_main(Numbers, "", lambda config: None, args)
    assert (stopped.value.code, capsys.readouterr().err) == (2, f"error: {message}\n")


def test_flags_in_range():
    check_ranges(Numbers())
    check_ranges(Numbers(1, 0.0, 1.0, math.inf, (8, 16), (0.1, 0.2), -5, 2**32 - 1, -1.0))


def test_help_shows_no_ranges(capsys):
    with pytest.raises(SystemExit):
        run_main(Numbers, "", lambda config: None, ["--help"])
    said = capsys.readouterr().out
    assert "Range" not in said and "lambda" not in said and "Annotated" not in said
    for flag in (
        "--steps INT",
        "--scale FLOAT",
        "--sizes [INT [INT ...]]",
    ):
        assert f" {flag} " in said


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


@pytest.mark.variants
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--promt", "a"], "error: --promt is unknown (did you mean --prompt?); --help "),
        (["--promt=" + "a" * 200], "error: --promt is unknown (did you mean --prompt?); --help "),
        (["--no-shfle"], "error: --no-shfle is unknown (did you mean --no_shuffle"),
        (
            ["--prompt", "a", "red", "panda"],
            "error: red panda: no flag takes this; write a text with spaces in quotation marks; ",
        ),
        (
            ["--spacing", "wide"],
            "error: --spacing wide is unknown; choose from leading, trailing; ",
        ),
        (["--dtype", "a"], "error: --dtype a is unknown; choose from b, c; "),
        (["--steps", "9.5"], "error: --steps '9.5' is not a whole number; "),
        (["--share", "half"], "error: --share 'half' is not a number; "),
        (["--height", "9.5"], "error: --height '9.5' is not a whole number; "),
        (["--height"], "error: --height has too few values; write --height INT; "),
        (["--range", "1"], "error: --range does not fit; write --range FLOAT FLOAT; "),
        (["--out_dir", "a", "b", "c"], "error: b c: --out_dir takes one value; "),
        (["--steps=3", "4"], "error: 4: --steps takes one value; "),
        (
            ["--shuffle", "true"],
            "error: true: --shuffle takes no value; write --shuffle or --no_shuffle; ",
        ),
        (
            ["--resolution", "512"],  # as other programs call it
            "error: --resolution is unknown (did you mean --height?); ",
        ),
        (
            ["--sizes", "2,1"],
            "error: --sizes ['2,1']: separate values with spaces, not commas; ",
        ),
        (["--sizes", "1", "a"], "error: --sizes ['1', 'a'] does not fit; write --sizes [INT "),
        (
            ["--sizes", "1", "--sizes=2"],
            "error: --sizes is given 2 times; write all values after one --sizes; ",
        ),
        (["--steps"], "error: --steps has too few values; write --steps INT; "),
        (
            ["--prompt", "make it \udcff red"],  # how Python reads a byte FF
            "error: --prompt make it \\xff red is not valid UTF-8; type the text again, or ",
        ),
        (["--prompt=\ud83d"], "error: --prompt=\\ud83d is not valid UTF-8; "),
        ([], "error: --model must be given; "),
    ],
)
def test_wrong_flags_are_one_line(args, message, capsys):
    @dataclass
    class Config:
        model: str
        prompt: str = "a red panda reading a map in a bamboo forest in the morning, soft light"
        steps: int = 3
        out_dir: str = ""
        sizes: tuple[int, ...] = ()
        spacing: Literal["leading", "trailing"] = "leading"
        dtype: Literal["b", "c"] | None = None
        share: float = 0.5
        height: int | None = None
        range: tuple[float, float] | None = None
        shuffle: bool = True

    with pytest.raises(SystemExit) as stopped:
        run_main(Config, "", lambda config: None, [*args, *(["--model", "m"] if args else [])])
    said = capsys.readouterr().err
    assert stopped.value.code == 2
    assert said.startswith(message) and said.endswith("; --help lists the flags\n")
    assert said.count("\n") == 1


@pytest.mark.parametrize("names", [(), ("on_parse_error",)])
def test_with_another_tyro_its_own_message_is_shown(names, capsys, monkeypatch):
    """The module that errors are taken from is private to tyro: it may lack names."""
    module = ModuleType("tyro._errors")
    for name in names:
        setattr(module, name, getattr(tyro._errors, name))
    monkeypatch.setitem(sys.modules, "tyro._errors", module)
    with pytest.raises(SystemExit) as stopped:
        run_main(Train, "", lambda config: None, ["--steps", "9.5"])
    assert stopped.value.code == 2
    assert "Error parsing --steps" in capsys.readouterr().err


def test_with_other_events_of_tyro_its_own_message_is_shown(capsys, monkeypatch):
    def without_metavar(argument):
        raise AttributeError("metavar")

    monkeypatch.setattr(command_line, "usage", without_metavar)
    with pytest.raises(SystemExit) as stopped:
        run_main(Train, "", lambda config: None, ["--steps", "9.5"])
    assert stopped.value.code == 2
    assert "Error parsing --steps" in capsys.readouterr().err


@dataclass
class Train:
    steps: int = 1
    rate: float = 1.0


@dataclass
class Edit:
    model: str
    steps: int = 1


def test_a_text_without_quotation_marks_is_noticed(capsys):
    for texts in (["cat", "dog"], ["a cat", "a", "dog"]):
        note_single_words("prompt", texts)
        assert capsys.readouterr().err == ""
    note_single_words("prompt", ["a", "cat", "on", "a", "mat"])
    assert capsys.readouterr().err.startswith("--prompt has 5 texts of one word each; if they are")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["trian", "--steps", "2"], "trian is not a subcommand; begin with one of train, edit"),
        ([], "begin with one of train, edit"),
        (["edit", "--model", "a", "--rate", "2"], "--rate is unknown"),
        (["train", "--stps", "2"], "--stps is unknown (did you mean --steps?)"),
        (
            ["edit", "--modl", "a"],
            "--model must be given; --modl is unknown (did you mean --model?)",
        ),
    ],
)
def test_a_wrong_subcommand_is_one_line(args, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        run_main({"train": Train, "edit": Edit}, "", lambda config: None, args)
    assert stopped.value.code == 2
    assert capsys.readouterr().err == f"error: {message}; --help lists the flags\n"


HELP = """Do something with a model that needs a description of two lines.

    python program.py --a_long_example that stays on one line, though it is longer than others

The description has a second paragraph, which is longer than the width of the terminal too."""


@dataclass
class HelpConfig:
    model: str  # directory
    name: str = ""  # of the model
    part: str = ""  # a directory; "": the model's own, which is described in many more words
    number: int | None = None  # of images; default: all
    kind: Literal["a", "b"] | None = None  # of model
    sizes: tuple[int, ...] = ()  # pixels
    seed: int = 3  # of the noise


@pytest.mark.parametrize("width", [60, 61, 120])
def test_help_is_wrapped_and_names_defaults(width, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["program.py"])
    monkeypatch.setenv("COLUMNS", str(width))
    with pytest.raises(SystemExit) as stopped:
        run_main(HelpConfig, HELP, lambda config: None, ["--help"])
    said = capsys.readouterr().out
    assert stopped.value.code == 0
    first, example, second = HELP.split("\n\n")
    lines = said.splitlines()
    assert example in lines
    assert all(len(line) <= width for line in lines if line != example)
    assert len({len(line) for line in lines[lines.index(example) + 6 :]}) == 1  # the frame
    words = " ".join(re.sub("[│|]", " ", said).split())
    assert " ".join(f"{first} {example} {second}".split()) in words
    for text in (
        "--model STR directory (required)",
        "a directory; \"\": the model's own, which is described in many more words (default: '')",
        "of images; default: all (default: none) --",
        "of model (default: none) --",
        "pixels (optional) --",
        "--seed INT of the noise (default: 3)",
    ):
        assert text in words
    assert "None)" not in said


def test_a_warning_ends_the_line_of_a_progress_bar(capfd):
    def work(config):
        with tqdm(total=3, file=sys.stderr) as bar:
            bar.update()
            logging.getLogger("somewhere").warning("the prompt is cut")
            bar.update()

    run_main(HelpConfig, "", work, ["--model", "m"])
    assert "the prompt is cut" in re.split(r"[\r\n]+", capfd.readouterr().err)


def test_the_directory_that_cannot_be_written_to_is_named_without_dots(tmp_path, monkeypatch):
    (tmp_path / "clone").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path / "clone")
    with pytest.raises(ValueError, match=f"--output ../file/x .*: {tmp_path}/file is not a"):
        check_writable("--output ../file/x", Path("../file/x"))


@dataclass
class OutputConfig:
    output_dir: str = ""


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
    said = capsys.readouterr().err
    file = f"{tmp_path}/new/file"
    expected = (
        rf"\[Errno \d+\] the disk is full: '{file}'; {file} is on a disk with [\d.e+]+ [MG]B free"
    )
    assert re.fullmatch(f"error: {expected}; free some space\n", said)
    assert stopped.value.code == 2


def test_a_full_disk_of_a_program_with_inputs(tmp_path, monkeypatch):
    """Inputs and disks that cannot be written to are not full; the file in the error is."""
    free = {"in": 0, "read_only": 0, "out": 5_000_000, "other": 7_000_000}
    for name in free:
        (tmp_path / name).mkdir()
    monkeypatch.setattr(command_line, "disk_space", lambda path: free[path.name])
    monkeypatch.setattr(os, "access", lambda path, mode: path.name != "read_only")
    config = SimpleNamespace(
        train_data_dir=(str(tmp_path / "in"),),
        cache_latents=str(tmp_path / "read_only"),
        output_dir=tmp_path / "out",
        compilation_cache_dir=str(tmp_path / "other"),
        preview=3,
    )
    full = OSError(errno.ENOSPC, "No space left on device")
    assert command_line.free_space(full, config) == (
        f"; --output_dir {tmp_path / 'out'} is on a disk with 5 MB free; free some space"
    )
    file = str(tmp_path / "other")
    full = OSError(errno.ENOSPC, "No space left on device", file)
    assert command_line.free_space(full, config) == (
        f"; {file} is on a disk with 7 MB free; free some space"
    )
    assert command_line.free_space(OSError(errno.EACCES, "Permission denied"), config) == ""


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("num_inference_steps=2000 must be less", "--num_inference_steps 2000 must be less"),
        ("eta=0.5 is not; overwrite=True", "--eta 0.5 is not; --overwrite"),
        ("timesteps=(9, 5, 1) must fall", "--timesteps 9 5 1 must fall"),
        ("sigma_rel=0.3 and seed=5, which", "--sigma_rel 0.3 and --seed 5, which"),
        ("the scheduler: spacing='leading' is", "the scheduler: --spacing leading is"),
        # The rest has no flag.
        ("--data data/resolution=256 is not a directory", None),
        ("data/resolution=256/train is not a directory", None),
        ("resolution=256/train is not a directory", None),
        ("resolution=256.png is not an image", None),
        (r"C:\\runs: resolution=256\\a.png is no image", None),
        ("[Errno 2] No such file: 'runs/seed=5/a.png'", None),
        ("[Errno 2] No such file: 'seed=5/a.png'", None),
        ("'a sign that says seed=5' is too long", None),
        ("https://host/x.parquet?resolution=256&seed=5 cannot be read", None),
        ("tome:seed=5 has no effect", None),
        ("quiet=False; spacing=None", None),
        ("lora=a/b.pt is not", "--lora a/b.pt is not"),
        ("lora=a/c.pt is not", None),
        ("give config=, a directory", "give --config_name_or_path, a directory"),
        ("take seed=7, or leave name= out", "take --seed 7, or leave --name out"),
    ],
)
def test_errors_of_the_library_name_flags(said, expected):
    config = SimpleNamespace(
        num_inference_steps=2000,
        eta=0.5,
        overwrite=True,
        quiet=False,
        timesteps=(9, 5, 1),
        sigma_rel=(0.1, 0.3),
        seed=5,
        spacing="leading",
        resolution=256,
        config_name_or_path=None,
        lora=("a/b.pt:0.5",),
        name="",
    )
    assert command_line.with_flags(said, config) == (expected or said)


@pytest.mark.parametrize(
    ("flags", "call", "line"),
    [
        ("--lora a.pt:0.5", lambda: Loras(["a.pt:0.5"]), "--lora a.pt does not exist; check the"),
        (
            "--embedding a.pt",
            lambda: read_embeddings("a.pt"),
            "--embedding a.pt does not exist; che",
        ),
        (
            "--parallel branches=4",
            lambda: check_parallel(
                Layout(jax.devices(), branches=4), None, ("text", "null"), 64, 8
            ),
            "--parallel branches=4 does not divide the number of branches of guidance, ",
        ),
        (
            "--devices unet=9",
            lambda: parse_components(("unet=9",), 2),
            "--devices unet=9 does not exist; this machine has 2, numbered from 0",
        ),
        (
            "--accelerate taesd --preview_decoder a",
            lambda: choose_tiny_vae(TinyDecoder(), Preview(1, print, "a"), ""),
            "--preview_decoder a and --accelerate taesd: previews have the images' decoder; leave "
            "--preview_decoder out",
        ),
        (
            f"--compilation_cache_dir {__file__}",
            lambda: use_compilation_cache(__file__),
            f"--compilation_cache_dir {__file__} cannot be made: ",
        ),
    ],
    ids=["lora", "embedding", "parallel", "devices", "preview_decoder", "compilation_cache_dir"],
)
def test_programs_print_errors_of_the_library_with_flags(flags, call, line, monkeypatch, capsys):
    unset = SimpleNamespace(config=SimpleNamespace(jax_compilation_cache_dir=None))
    monkeypatch.setattr("diffusers_flax.compilation_cache.jax", unset)
    with pytest.raises(SystemExit):
        run_main(edit_cli.Config, "", lambda config: call(), ["--model", "m", *flags.split()])
    assert capsys.readouterr().err.startswith(f"error: {line}")


def test_commas_between_values_are_explained():
    config = SimpleNamespace(
        data=("a,b", "c"), accelerate=("tome:a=1,b=2",), prompt=("red, blue",), name="a,b"
    )
    hint = "; separate several values with spaces, not commas"
    for said, expected in (
        ("--data a,b is not a directory", hint),
        ("--data c is not a directory", ""),
        ("--accelerate tome:a=1,b=2 is unknown", ""),
        ("--prompt red, blue is too long", ""),
        ("--name a,b is not a directory", ""),
    ):
        assert command_line.comma_hint(said, config) == expected


def test_a_directory_with_files_is_refused(tmp_path):
    folder = tmp_path / "out"
    ask_before_replacing("output_dir", folder, False)
    assert not folder.exists()
    folder.mkdir()
    (folder / ".unfinished-a").touch()  # of a killed program
    ask_before_replacing("output_dir", folder, False)
    for name in "abcde":
        (folder / name).touch()
    refused = re.escape(f"--output_dir {folder} is not empty (a, b, c and 2 more); name another ")
    with pytest.raises(
        ValueError, match=f"{refused}.*replace this program's files in it with --over"
    ):
        ask_before_replacing("output_dir", folder, False)
    ask_before_replacing("output_dir", folder, True)
    ask_before_replacing("output_dir", folder, False, continues="[e]")
    inside = [folder / name for name in "abcd"]
    ask_before_replacing("output_dir", folder, False, others=[*inside, folder / "e" / "cache"])
    with pytest.raises(ValueError, match=r"is not empty \(e\)"):
        ask_before_replacing("output_dir", folder, False, others=inside)
    for path, message in (
        (folder / "a", "is a file; name a directory"),
        (folder / "a" / "b", "cannot be written"),
        ("", "--output_dir is empty; name a directory"),
    ):
        with pytest.raises(ValueError, match=message):
            ask_before_replacing("output_dir", path, True)


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


def test_no_proxy_takes_requests_to_this_machine(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://proxy.example:3128")
    for given, expected in (
        ("", "localhost,127.0.0.1,::1"),
        ("a.b", "a.b,localhost,127.0.0.1,::1"),
    ):
        monkeypatch.setenv("no_proxy", given)
        monkeypatch.setenv("NO_PROXY", given)
        command_line.spare_this_machine()
        assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == expected
        command_line.spare_this_machine()
        assert os.environ["no_proxy"] == expected
    assert urllib.request.proxy_bypass_environment("127.0.0.1")


def test_types_of_optional_flags_are_plain(capsys):
    @dataclass(frozen=True)
    class Config:
        scale: float | None = None
        names: tuple[str, ...] | None = None

    with pytest.raises(SystemExit):
        command_line.parse_flags(Config, "A program.", ["--help"])
    said = capsys.readouterr().out
    assert "{None}" not in said and "--scale FLOAT" in said and "--names [STR [STR ...]]" in said


@pytest.mark.parametrize(
    ("own", "other"),
    [("model", "pretrained_model_name_or_path"), ("pretrained_model_name_or_path", "model")],
)
def test_doubles_have_both_names(own, other, capsys):
    """Also with hyphens and with an equals sign; --help shows the program's own name alone."""
    config_class = dataclasses.make_dataclass("Config", [(own, str)], frozen=True)
    for words in (
        [f"--{own}", "x"],
        [f"--{other}", "x"],
        [f"--{other}=x"],
        [f"--{other.replace('_', '-')}", "x"],
    ):
        assert command_line.with_own_names([f"xx{other}"], config_class) == [f"xx{other}"]
        assert getattr(command_line.parse_flags(config_class, "A program.", words), own) == "x"
    with pytest.raises(SystemExit):
        command_line.parse_flags(config_class, "A program.", ["--help"])
    said = capsys.readouterr().out
    assert f"--{own} STR" in said and f"--{other}" not in said
