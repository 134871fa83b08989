"""Compiled programs of earlier calls."""

import hashlib
import json
import os
import re
from importlib.metadata import version
from pathlib import Path

import jax

from benchmarks.rows import ROOT
from diffusers_flax.executables import SUFFIX, ExecutableStore, surroundings
from diffusers_flax.loading.files import write_json

SOURCES = (
    "compile_for.py",
    "flax_train_instruct_pix2pix.py",
    "diffusers_flax/compiling/*.py",
    "diffusers_flax/training/*.py",
)


def file_name(text):
    """Letters and digits of a text, with _ for others."""
    return re.sub("[^A-Za-z0-9]+", "_", text)


class ProgramCache:
    """A directory of compiled programs, ours and PyTorch's, or nothing.

    A program's name ends in a checksum of everything that it depends on. A note beside it says what
    its compilation was: {"seconds"}, for ours also {"outputs": number of arrays, "bytes": memory}.
    The programs of torch.compile lie in a directory of its own, named in its variable.

    Args:
        folder: directory; "": nothing is kept.
        configs: of the models.
    """

    def __init__(self, folder, configs):
        self.store = self.folder = None
        if not folder:
            return
        self.folder = Path(folder).expanduser()
        self.store = ExecutableStore(self.folder / "ours")
        # PyTorch sets this variable to its default when it is imported.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(self.folder / "torch")
        files = [file for pattern in SOURCES for file in sorted(ROOT.glob(pattern))]
        around = surroundings(jax.devices()[:1], files)
        packages = {name: version(name) for name in ("torch", "diffusers", "transformers")}
        self.around = {
            "ours": around | {"configs": configs},
            "torch": packages | {"device": around["device"], "configs": configs},
        }

    def name(self, case, contender, flags=""):
        """The name of a contender's program.

        Args:
            case: of the row.
            contender: "ours...", or "torch ...".
            flags: text of what else it depends on.
        """
        title = file_name(f"{case} {contender}")
        if self.store is None:
            return title
        around = self.around[contender[:5].strip(" ,")]
        text = json.dumps([around, flags], sort_keys=True, default=str)
        return f"{title}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def note(self, name):
        """The note of a program; None: it is not here."""
        file = self.store and self.store.folder / f"{name}.json"
        return json.loads(file.read_text()) if file and file.exists() else None

    def load(self, name, args):
        """Our program as run(*args) -> its arrays in a list, or None."""
        if (note := self.note(name)) is None:
            return None
        out_tree = jax.tree.structure([0] * note["outputs"])
        in_tree = jax.tree.structure((args, {}))
        compiled, _ = self.store.load(name, {}, jax.devices()[:1], in_tree, out_tree)
        return compiled

    def save(self, name, note, compiled=None):
        """Keep a note, and our program; files of the same title with other checksums go."""
        if self.store is None:
            return
        title = name.rpartition("_")[0]
        for file in self.store.folder.iterdir():
            if file.stem.rpartition("_")[0] == title and file.stem != name:
                file.unlink()
        if compiled is not None:
            self.store.save(name, {}, compiled)
        write_json(self.store.folder / f"{name}.json", note)

    def has(self, name, is_ours):
        """Whether a program need not be compiled."""
        file = self.store and self.store.folder / f"{name}{SUFFIX}"
        return self.note(name) is not None and (not is_ours or file.exists())
