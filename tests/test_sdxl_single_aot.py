"""sdxl_single_aot.py's executables, with a tiny SDXL; test_sdxl_single.py compares its images."""

import json
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from helpers import model_flags
from tiny_models import make_tiny_xl

import sdxl_single
import sdxl_single_aot
from diffusers_flax.devices.layout import Layout
from diffusers_flax.executables import ExecutableStore


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_xl(tmp_path_factory.mktemp("tiny") / "xl")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Directory of executables."""
    return tmp_path_factory.mktemp("executables") / "store"


def damage(file):
    content = bytearray(file.read_bytes())
    content[-1000] ^= 1
    file.write_bytes(content)


def cut_off(file):
    file.write_bytes(file.read_bytes()[:50])


def other(**changes):
    """Return a function that changes the cache key of a saved executable."""

    def spoil(file):
        header, content = file.read_bytes().split(b"\n", 1)
        header = json.loads(header)
        header["cache_key"] |= changes
        file.write_bytes(json.dumps(header).encode() + b"\n" + content)

    return spoil


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (damage, "is damaged"),
        (cut_off, "is damaged"),
        (other(jax="0.9.0"), f"jax was 0.9.0 and is {jax.__version__}"),
    ],
)
def test_what_is_stale_or_damaged_is_compiled_again(model, store, tmp_path, capsys, spoil, reason):
    """The script prints the reason, and the next start loads again."""
    folder = tmp_path / "store"
    options = ["--num_inference_steps", "1", "--prompt", "it", "--num_images", "1"]

    def run(name):
        flags = [*model_flags(model, tmp_path / name), "--executable_dir", str(folder)]
        sdxl_single_aot.main([*flags, *options])

    if store.exists():
        shutil.copytree(store, folder)
    else:
        run("first")
        shutil.copytree(folder, store)
    (file,) = folder.iterdir()
    spoil(file)
    run("second")
    assert reason in capsys.readouterr().err
    run("third")
    assert "loaded in" in capsys.readouterr().err


def test_processes_save_executables_of_their_own(monkeypatch):
    """Hosts may share a home."""
    saved = []

    class Store:
        def load(self, name, cache_key, *others):
            saved.append((name, cache_key.get("process")))
            return others, None

    layout = Layout(jax.devices()[:1])
    pipeline = SimpleNamespace(description=lambda: "tiny", layout=layout)
    arguments = pipeline, Store(), layout.groups, (np.ones(1), {}), {}
    sdxl_single_aot.aot_compile(*arguments)
    monkeypatch.setattr(Layout, "is_local", False)
    for process in (0, 1):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        sdxl_single_aot.aot_compile(*arguments)
    assert [process for _, process in saved] == [None, "0 of 1", "1 of 1"]
    assert len({name for name, _ in saved}) == 3


@pytest.mark.slow
def test_an_executable_that_cannot_be_saved(model, tmp_path, capsys, monkeypatch):
    """The images are made all the same."""

    def full(*arguments):
        raise OSError("No space left on device")

    monkeypatch.setattr(ExecutableStore, "save", full)
    flags = [*model_flags(model, tmp_path / "out"), "--executable_dir", str(tmp_path / "store")]
    flags += ["--num_inference_steps", "1", "--num_images", "2", "--batch_size", "2"]
    sdxl_single_aot.main([*flags, "--negative_prompt", "", "--dtype", "bfloat16"])
    assert "; not saved: No space left on device" in capsys.readouterr().err
    assert len([*(tmp_path / "out").glob("*.png")]) == 2
    flags = [
        *model_flags(model, tmp_path / "out"),
        "--num_inference_steps",
        "1",
        "--num_images",
        "1",
    ]
    sdxl_single.main([*flags, "--compilation_cache_dir", "", "--prompt", "it"])
    assert len([*(tmp_path / "out").glob("*.png")]) == 3  # nothing overwritten


@pytest.mark.parametrize(
    ("mode", "message"), [(0o777, "may be written to by others"), (None, "cannot be used")]
)
def test_bad_executable_dir(model, tmp_path, capsys, mode, message):
    folder = tmp_path / "store"
    if mode is None:
        folder.write_text("")
    else:
        folder.mkdir()
        folder.chmod(mode)
    with pytest.raises(SystemExit) as ended:
        flags = model_flags(model, tmp_path / "out")
        sdxl_single_aot.main([*flags, "--executable_dir", str(folder)])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
