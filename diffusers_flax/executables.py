"""Executables on disk, loaded without tracing or compiling.

    program = jax.jit(f)
    compile = lambda: program.lower(*args).compile()
    compiled, how = load_or_compile("~/.cache/jax_executables", "f", (args, {}), devices, compile)

or, with an own name and key for each file:

    store = ExecutableStore("~/.cache/jax_executables")
    cache_key = {"program": "f of 8 images"} | surroundings(devices, [__file__])
    in_tree, out_tree = jax.tree.structure((args, {})), jax.tree.structure(result)
    compiled, reason = store.load(name, cache_key, devices, in_tree, out_tree)
    if compiled is None:
        with no_compilation_cache():
            compiled = jax.jit(f).lower(*args).compile()
        store.save(name, cache_key, compiled)

An executable is code: whoever can write the file can run code as the user who loads it. So the
directory is made with mode 0700, and a directory or file that other users may write to is refused.
"""

import hashlib
import json
import os
import platform
import re
import stat
import time
from importlib.metadata import distributions, version
from pathlib import Path

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from diffusers_flax.compilation_cache import no_compilation_cache
from diffusers_flax.loading.files import naming_full_disk, save_whole
from diffusers_flax.messages import one_line

SUFFIX = ".executable"
SAFE_FOLDER = "~/.cache/jax_executables"
# Settings of jax that do not change programs.
NO_EFFECT = re.compile("cache|_dir|dump|log|traceback|profil|timeout|transfer|debug_leaked|explain")


class SavedPrograms:
    """Runs functions of jax.jit and jax.pmap by their executables in a directory.

    Args:
        folder: see ExecutableStore.
        tell: function of a line, such as "loaded in 0.31 s".
    """

    def __init__(self, folder, tell):
        self.folder, self.tell, self.programs = folder, tell, {}

    def run(self, function, description, devices, static, arrays):
        """The result of function(*static, *arrays).

        Args:
            function: of jax.jit or jax.pmap.
            description: text of all that depends on `static`.
            devices: that it runs on.
            static, arrays: its arguments; the last of the arrays are parameters, whose shapes are
                the same in all calls.
        """
        key = description, str(jax.tree.map(jax.typeof, arrays[:-1]))
        if key not in self.programs:
            started = time.perf_counter()
            self.programs[key], how = load_or_compile(
                self.folder,
                description,
                (arrays, {}),
                devices,
                lambda: function.lower(*static, *arrays).compile(),
            )
            self.tell(f"{how} in {time.perf_counter() - started:.2f} s")
        return self.programs[key](*arrays)


def load_or_compile(folder, description, arguments, devices, compile, *files):
    """An executable for some arguments: loaded, or compiled and saved for the next start.

    Args:
        folder: see ExecutableStore.
        description: text of all that it depends on, besides code and arguments.
        arguments: (args, kwargs) of arrays, of which structure, shapes and dtypes count.
        devices: to run on.
        compile: () -> jax.stages.Compiled of these arguments.
        *files: source files of the caller, see surroundings.

    Returns:
        (jax.stages.Compiled, "loaded" or "compiled (why)").
    """
    settings = {
        "description": hashlib.sha256(description.encode()).hexdigest()[:16],
        "arguments": str(jax.tree.map(jax.typeof, arguments)),
        "process": f"{jax.process_index()} of {jax.process_count()}",
    }
    name = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]
    settings |= surroundings(devices, files)
    store = ExecutableStore(folder)
    in_tree, out_tree = jax.tree.structure(arguments), jax.tree.structure(0)
    compiled, why = store.load(name, settings, devices, in_tree, out_tree)
    if compiled is not None:
        return compiled, "loaded"
    with no_compilation_cache():
        compiled = compile()
    try:
        store.save(name, settings, compiled)
    except Exception as error:  # such as a full disk; the program runs all the same
        why = f"{why}; not saved: {one_line(error)}"
    return compiled, f"compiled ({why})"


class ExecutableStore:
    """A directory of executables.

    Args:
        folder: directory, created if missing with mode 0700.

    Raises:
        ValueError: it is no directory, is not readable, belongs to another user, or others may
            write to it or replace it.
    """

    def __init__(self, folder):
        self.folder = Path(folder).expanduser().resolve()
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = self.folder.stat()
        except OSError as error:
            raise ValueError(
                f"{self.folder} cannot be used for executables: {error}; name another directory"
            ) from error
        if not is_private(status):
            raise ValueError(
                f"{self.folder} belongs to another user or may be written to by others, who can "
                f"run code as you; name another directory, such as {SAFE_FOLDER}"
            )
        for parent in self.folder.parents:
            mode = parent.stat().st_mode
            if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                raise ValueError(
                    f"{parent} may be written to by others, who could replace "
                    f"{self.folder} and run code as you; name another directory, such as "
                    f"{SAFE_FOLDER}"
                )
        if not os.access(self.folder, os.R_OK | os.W_OK | os.X_OK):
            raise ValueError(
                f"{self.folder} cannot be read and written; chmod 700 {self.folder}, or name "
                "another directory"
            )

    def load(self, name, cache_key, devices, in_tree, out_tree):
        """Load an executable.

        Args:
            name: of the program, a file name without extension.
            cache_key: everything that it depends on, a flat dict for JSON; see surroundings.
            devices: to run on.
            in_tree, out_tree: structures of (args, kwargs) and of the result.

        Returns:
            (jax.stages.Compiled, None), or (None, why it must be compiled).
        """
        file = self.folder / f"{name}{SUFFIX}"
        try:
            with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW), "rb") as f:
                if not is_private(os.fstat(f.fileno())):
                    return None, f"{file} belongs to another user or may be written to by others"
                header, content = f.readline(), f.read()
        except FileNotFoundError:
            return None, "no executable of these settings is saved"
        except OSError as error:
            return None, f"{file} cannot be read ({error})"
        try:
            header = json.loads(header)
            before, checksum = dict(header["cache_key"]), header["sha256"]
        except (ValueError, KeyError, TypeError):
            return None, f"{file} is damaged"
        now = json.loads(json.dumps(cache_key))
        if changes := [
            f"{key} was {_short(before.get(key))} and is {_short(now.get(key))}"
            for key in sorted(before.keys() | now.keys())
            if before.get(key) != now.get(key)
        ]:
            return None, "; ".join(changes)
        if hashlib.sha256(content).hexdigest() != checksum:
            return None, f"{file} is damaged"
        try:
            compiled = deserialize_and_load(content, in_tree, out_tree, execution_devices=devices)
            return compiled, None
        except Exception as error:  # of the runtime; the program can be compiled again
            return None, f"{file} cannot be loaded ({one_line(error, 200)})"

    def save(self, name, cache_key, compiled):
        """Save an executable; its file appears when it is complete."""
        content, _, _ = serialize(compiled)
        header = {"cache_key": cache_key, "sha256": hashlib.sha256(content).hexdigest()}
        file = self.folder / f"{name}{SUFFIX}"

        def write(unfinished):
            with naming_full_disk(file, len(content)):
                unfinished.touch(mode=0o600)
                unfinished.write_bytes(json.dumps(header).encode() + b"\n" + content)

        save_whole(file, write, shared=True)


def is_private(status):
    """Whether only this user may write to a file or directory; status: of os.stat."""
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _short(value):
    text = str(value)
    return text if len(text) < 80 else f"{text[:76]}..."


def surroundings(devices, files):
    """What a compiled program depends on besides its function, a flat dict.

    Versions, devices, settings of XLA and jax, and a checksum of the code.

    Args:
        devices: to run on.
        files: source files of the caller; the library's own are always included.
    """
    library = Path(__file__).parent
    code = hashlib.sha256()
    for file in sorted(library.rglob("*.py")):
        code.update(str(file.relative_to(library)).encode() + file.read_bytes())
    for file in map(Path, files):
        code.update(file.name.encode() + file.read_bytes())
    client = devices[0].client
    settings = {k: str(v) for k, v in jax.config.values.items() if not NO_EFFECT.search(k)}
    return {
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
        "flax": version("flax"),
        "libraries": _library_versions() if client.platform != "cpu" else "",
        "runtime": f"{client.platform} {client.platform_version}",
        "device": f"{devices[0].device_kind}{_cpu_features() if client.platform == 'cpu' else ''}",
        "device numbers": [device.id for device in devices],
        "code": code.hexdigest()[:16],
        **{name: os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")},
        **settings,
    }


def _library_versions():
    """Versions of the accelerator's libraries, such as cuDNN."""
    found = {(package.name or "", package.version) for package in distributions()}
    return ", ".join(f"{n} {v}" for n, v in sorted(found) if n.startswith(("nvidia", "libtpu")))


def _cpu_features():
    """The CPU's architecture, and on Linux a checksum of its features."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f" {platform.machine()}"
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f" {platform.machine()} {hashlib.sha256(features.encode()).hexdigest()[:16]}"
