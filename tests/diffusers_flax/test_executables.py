"""Saved executables: who may write them, what they depend on."""

import subprocess
import sys

import jax
import numpy as np
import pytest
from helpers import ROOT

from diffusers_flax import executables
from diffusers_flax.compilation_cache import no_compilation_cache
from diffusers_flax.executables import ExecutableStore, surroundings


def test_a_folder_that_others_may_write_to_is_refused(tmp_path):
    folder = tmp_path / "store"
    folder.mkdir(mode=0o700)
    ExecutableStore(folder)
    folder.chmod(0o770)
    with pytest.raises(
        ValueError, match="may be written to by others, who can run code as you; name"
    ):
        ExecutableStore(folder)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ValueError, match="cannot be used for executables"):
        ExecutableStore(file / "store")

    folder.chmod(0o700)
    (tmp_path / "link").symlink_to(folder)
    assert ExecutableStore(tmp_path / "link").folder == folder
    tmp_path.chmod(0o777)
    with pytest.raises(ValueError, match="who could replace"):
        ExecutableStore(folder)
    tmp_path.chmod(0o1777)  # like /tmp
    ExecutableStore(folder)


def test_a_file_that_others_may_write_to_is_not_loaded(tmp_path):
    store = ExecutableStore(tmp_path / "store")
    args = (np.ones(3, np.float32),)
    with no_compilation_cache():  # an executable from that cache cannot be saved
        compiled = jax.jit(lambda x: x + 1).lower(*args).compile()
    store.save("add", {"a": 1}, compiled)
    trees = jax.tree.structure((args, {})), jax.tree.structure(0)

    def load():
        return store.load("add", {"a": 1}, jax.devices()[:1], *trees)

    compiled, reason = load()
    assert reason is None
    np.testing.assert_array_equal(compiled(*args), args[0] + 1)
    file = store.folder / "add.executable"
    file.chmod(0o666)
    assert load() == (None, f"{file} belongs to another user or may be written to by others")
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert "cannot be read" in load()[1]
    file.unlink()
    file.write_bytes(b'{"cache_key": 1, "sha256": ""}\n')
    assert load() == (None, f"{file} is damaged")


@pytest.mark.slow
def test_kept_though_jax_has_it_in_its_cache(tmp_path, monkeypatch):
    """Executables are compiled without jax's cache, as cached ones could not run after loading."""
    program = """if True:
        import sys
        import jax
        import numpy as np
        from diffusers_flax.executables import ExecutableStore
        from diffusers_flax.compilation_cache import no_compilation_cache
        store, args = ExecutableStore(sys.argv[1]), (np.arange(1000.0, dtype=np.float32),)
        trees = jax.tree.structure((args, {})), jax.tree.structure(0)
        compiled, _ = store.load("sort", {}, jax.devices()[:1], *trees)
        if compiled is None:
            with no_compilation_cache():
                compiled = jax.jit(lambda x: x[(x % 7).astype(int)].cumsum()).lower(*args).compile()
            store.save("sort", {}, compiled)
        jax.block_until_ready(compiled(*args))
        assert jax.config.jax_enable_compilation_cache
        jax.block_until_ready(jax.jit(lambda x: x[(x % 7).astype(int)].cumsum())(*args))
    """
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for folder in ("first", "second", "second"):
        subprocess.run([sys.executable, "-c", program, tmp_path / folder], check=True)
    assert any((tmp_path / "cache").iterdir())


def test_what_an_executable_depends_on(tmp_path, monkeypatch):
    """Each of these changes gives another cache key."""
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
    monkeypatch.setattr(executables, "version", lambda name: "0" if name == "flax" else "1")
    look()
    with jax.default_matmul_precision("highest"):
        look()
    assert surroundings(jax.devices()[:2], [caller]) not in seen
