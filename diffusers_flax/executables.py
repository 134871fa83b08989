"""Executables on disk, loaded without tracing or compiling.

    compile = lambda: jax.jit(f).lower(*args).compile()
    compiled, how = load_or_compile("~/.cache/mine", "f", (args, {}), jax.devices()[:1], compile)

An executable is code: whoever can write the file can run code as the user who loads it. So the
directory is made with mode 0700, and a directory that other users may write to is refused.
"""

import hashlib
import os
import platform
import re
import stat
import time
from importlib.metadata import distributions
from pathlib import Path

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from diffusers_flax.compilation_cache import no_compilation_cache
from diffusers_flax.loading.files import save_whole
from diffusers_flax.messages import one_line

SAFE_FOLDER = "~/.cache/jax_executables"
# Settings of jax that do not change programs.
NO_EFFECT = re.compile("cache|_dir|dump|log|traceback|profil|timeout|transfer|debug_leaked|explain")


class SavedPrograms:
    """Runs functions of jax.jit and jax.pmap by their executables in a directory.

    Args:
        folder: see private_folder.
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
        folder: see private_folder.
        description: text of all that it depends on, besides code and arguments.
        arguments: (args, kwargs) of arrays, of which structure, shapes and dtypes count.
        devices: to run on.
        compile: () -> jax.stages.Compiled of these arguments.
        *files: source files of the caller, see surroundings.

    Returns:
        (jax.stages.Compiled, "loaded" or "compiled (why)").
    """
    used_for = description, str(jax.tree.map(jax.typeof, arguments)), jax.process_index()
    file = private_folder(folder) / f"{digest(str(used_for).encode())}.executable"
    made_by = digest(str((jax.process_count(), surroundings(devices, files))).encode())
    why = "no executable of these settings is saved"
    if file.exists():
        header, _, content = file.read_bytes().partition(b"\n")
        why = "code, versions, settings of jax or devices were others, or its file is damaged"
        if header == f"{made_by} {digest(content)}".encode():
            trees = jax.tree.structure(arguments), jax.tree.structure(0)
            try:
                loaded = deserialize_and_load(content, *trees, execution_devices=devices)
                return loaded, "loaded"
            except Exception as error:  # of the runtime; the program can be compiled again
                why = f"{file} cannot be loaded ({one_line(error, 200)})"
    with no_compilation_cache():
        compiled = compile()

    def write(unfinished):
        unfinished.touch(mode=0o600)
        content, _, _ = serialize(compiled)
        unfinished.write_bytes(f"{made_by} {digest(content)}\n".encode() + content)

    try:
        save_whole(file, write, shared=True)
    except Exception as error:  # such as a full disk; the program runs all the same
        why = f"{why}; not saved: {one_line(error)}"
    return compiled, f"compiled ({why})"


def digest(content):
    """16 hexadecimal digits for bytes."""
    return hashlib.sha256(content).hexdigest()[:16]


def private_folder(folder):
    """A directory for executables, created if missing with mode 0700; its Path.

    Raises:
        ValueError: it cannot be used, belongs to another user, or others may write to it.
    """
    folder = Path(folder).expanduser().resolve()
    remedy = f"name another directory, such as {SAFE_FOLDER}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise ValueError(f"{folder} cannot be used for executables: {error}; {remedy}") from error
    others_may_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if status.st_uid != os.geteuid() or others_may_write:
        raise ValueError(
            f"{folder} belongs to another user or may be written to by others, who can run code as "
            f"you; {remedy}"
        )
    return folder


def surroundings(devices, files):
    """What a compiled program depends on besides its function, a list.

    Versions, devices, settings of XLA and jax, and a checksum of the code.

    Args:
        devices: to run on.
        files: source files of the caller; the library's own are always included.
    """
    code = hashlib.sha256()
    for file in (*sorted(Path(__file__).parent.rglob("*.py")), *map(Path, files)):
        code.update(file.name.encode() + file.read_bytes())
    client = devices[0].client
    machine = platform.machine()
    if client.platform == "cpu" and Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        machine = next((x for x in lines if x.startswith(("flags", "Features"))), machine)
    # The accelerator's libraries, such as cuDNN, too.
    packages = sorted({(package.name or "", package.version) for package in distributions()})
    return [
        *(x for x in packages if x[0].startswith(("jax", "flax", "nvidia", "libtpu"))),
        *(client.platform, client.platform_version, devices[0].device_kind, machine),
        *(device.id for device in devices),
        code.hexdigest(),
        *(os.environ.get(name) for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")),
        *((k, str(v)) for k, v in jax.config.values.items() if not NO_EFFECT.search(k)),
    ]
