"""Saved executables: who may write them, what they depend on."""

import subprocess
import sys

import jax
import numpy as np
import pytest
from helpers import ROOT

from diffusers_flax import executables
from diffusers_flax.executables import load_or_compile, private_folder, surroundings


def test_a_folder_that_others_may_write_to_is_refused(tmp_path):
    folder = tmp_path / "store"
    private_folder(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o770)
    with pytest.raises(ValueError, match="may be written to by others, who can run code as you"):
        private_folder(folder)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ValueError, match="cannot be used for executables"):
        private_folder(file / "store")

    folder.chmod(0o700)
    (tmp_path / "link").symlink_to(folder)
    assert private_folder(tmp_path / "link") == folder


def run(folder, number=1, devices=None):
    """How the executable of x + number was had; checks its result."""
    args = (np.ones(3, np.float32),)
    compiled, how = load_or_compile(
        folder,
        f"add {number}",
        (args, {}),
        devices or jax.devices()[:1],
        lambda: jax.jit(lambda x: x + number).lower(*args).compile(),
    )
    np.testing.assert_array_equal(compiled(*args), args[0] + number)
    return how


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[-10] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda file: file.write_bytes(file.read_bytes()[:50]),
        flip_a_bit,
        lambda file: file.write_bytes(b"x" + file.read_bytes()),
    ],
)
def test_what_is_spoiled_or_stale_is_compiled_again(tmp_path, spoil):
    """The reason is said, and the next start loads again."""
    assert "no executable of these settings is saved" in run(tmp_path / "store")
    assert "no executable" in run(tmp_path / "store", 2)
    assert run(tmp_path / "store") == "loaded"
    for file in (tmp_path / "store").iterdir():
        spoil(file)
    assert "or its file is damaged" in run(tmp_path / "store")
    assert run(tmp_path / "store") == "loaded"


def test_a_full_disk_stops_nothing(tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise OSError("No space left on device")

    monkeypatch.setattr(executables, "save_whole", full)
    assert run(tmp_path / "store").endswith("not saved: No space left on device)")


@pytest.mark.slow
def test_kept_though_jax_has_it_in_its_cache(tmp_path, monkeypatch):
    """Executables are compiled without jax's cache, as cached ones could not run after loading."""
    program = """if True:
        import sys
        import jax
        import numpy as np
        from diffusers_flax.executables import load_or_compile
        args = (np.arange(1000.0, dtype=np.float32),)
        f = lambda x: x[(x % 7).astype(int)].cumsum()
        compile = lambda: jax.jit(f).lower(*args).compile()
        devices = jax.devices()[:1]
        compiled, _ = load_or_compile(sys.argv[1], "sort", (args, {}), devices, compile)
        jax.block_until_ready(compiled(*args))
        assert jax.config.jax_enable_compilation_cache
        jax.block_until_ready(jax.jit(f)(*args))
    """
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for folder in ("first", "second", "second"):
        subprocess.run([sys.executable, "-c", program, tmp_path / folder], check=True)
    assert any((tmp_path / "cache").iterdir())


def test_what_an_executable_depends_on(tmp_path, monkeypatch):
    """Each of these changes gives another key."""
    caller = tmp_path / "caller.py"
    caller.write_text("1")
    seen = []

    def look():
        now = surroundings(jax.devices(), [caller])
        assert now not in seen
        seen.append(now)

    look()
    caller.write_text("2")
    look()
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    look()
    (tmp_path / "library").mkdir()
    monkeypatch.setattr(executables, "__file__", str(tmp_path / "library" / "executables.py"))
    look()
    with jax.default_matmul_precision("highest"):
        look()
    assert surroundings(jax.devices()[:2], [caller]) not in seen
