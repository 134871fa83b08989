"""Executables on disk, loaded without tracing or compiling.

    compile = lambda: jax.jit(f).lower(*args).compile()
    compiled, how = load_or_compile("~/.cache/mine", "f", (args, {}), jax.devices()[:1], compile)

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
from diffusers_flax.loading.files import save_whole
from diffusers_flax.messages import differences, one_line

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
    settings = {
        "description": digest(description.encode()),
        "arguments": str(jax.tree.map(jax.typeof, arguments)),
        "process": f"{jax.process_index()} of {jax.process_count()}",
    }
    file = private_folder(folder) / f"{digest(json.dumps(settings).encode())}.executable"
    settings |= surroundings(devices, files)
    content, why = read_file(file, json.loads(json.dumps(settings)))
    if content is not None:
        in_tree, out_tree = jax.tree.structure(arguments), jax.tree.structure(0)
        try:
            loaded = deserialize_and_load(content, in_tree, out_tree, execution_devices=devices)
            return loaded, "loaded"
        except Exception as error:  # of the runtime; the program can be compiled again
            why = f"{file} cannot be loaded ({one_line(error, 200)})"
    with no_compilation_cache():
        compiled = compile()
    try:
        content, _, _ = serialize(compiled)
        header = {"settings": settings, "sha256": digest(content)}
        text = json.dumps(header).encode() + b"\n" + content

        def write(unfinished):
            unfinished.touch(mode=0o600)
            unfinished.write_bytes(text)

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
        ValueError: it is no directory, is not readable, belongs to another user, or others may
            write to it.
    """
    folder = Path(folder).expanduser().resolve()
    remedy = f"name another directory, such as {SAFE_FOLDER}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.listdir(folder)
        status = folder.stat()
    except OSError as error:
        raise ValueError(f"{folder} cannot be used for executables: {error}; {remedy}") from error
    if not is_private(status):
        raise ValueError(
            f"{folder} belongs to another user or may be written to by others, who can run code as "
            f"you; {remedy}"
        )
    return folder


def read_file(file, settings):
    """(content of an executable's file, None), or (None, why it must be compiled).

    settings: everything that the executable depends on, a flat dict as from JSON.
    """
    try:
        with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW), "rb") as f:
            if not is_private(os.fstat(f.fileno())):
                return None, f"{file} belongs to another user or may be written to by others"
            header, content = json.loads(f.readline()), f.read()
        if changes := differences(header["settings"], settings):
            return None, "; ".join(f"{change:.200}" for change in changes)
        if digest(content) == header["sha256"]:
            return content, None
        return None, f"{file} is damaged"
    except FileNotFoundError:
        return None, "no executable of these settings is saved"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return None, f"{file} cannot be read ({one_line(error, 200)})"


def is_private(status):
    """Whether only this user may write to a file or directory; status: of os.stat."""
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


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
