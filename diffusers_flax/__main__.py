"""Run a script of diffusers 0.39 as it is: python -m diffusers_flax SCRIPT ARGS

While the script runs, `diffusers` and `transformers` have their Flax classes again, `jax` has
`jax.tree_map` and its kin, and `compilation_cache` has `initialize_cache`. A module gets its names
after the script imports it, and a name is imported when the script uses it, so that a script may
set environment variables before it imports jax.

    python -m diffusers_flax train_text_to_image_flax.py ARGS
"""

import os
import pkgutil
import re
import runpy
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec

import diffusers_flax

USAGE = "usage: python -m diffusers_flax SCRIPT ARGS, a script for diffusers' Flax classes"
CLASSES = {name: f"diffusers_flax:{name}" for name in diffusers_flax.__all__}
# {module of today: {name that it lacks: "module:name" of its value}}
OLD_NAMES = {
    **dict.fromkeys(
        (
            "diffusers",
            "diffusers.models",
            "diffusers.models.controlnets",
            "diffusers.pipelines",
            "diffusers.pipelines.controlnet",
            "diffusers.pipelines.stable_diffusion",
            "diffusers.pipelines.stable_diffusion.pipeline_output",
            "diffusers.pipelines.stable_diffusion_xl",
            "diffusers.pipelines.stable_diffusion_xl.pipeline_output",
            "diffusers.schedulers",
            "transformers",
            "transformers.models.clip",
        ),
        CLASSES,
    ),
    "jax": {
        f"tree_{name}": f"jax.tree:{name}"
        for name in ("map", "leaves", "structure", "flatten", "unflatten", "transpose")
    },
    "jax.experimental.compilation_cache.compilation_cache": {
        "initialize_cache": "diffusers_flax.compilation_cache:initialize_cache"
    },
}
# {module: module that its import replaces by a new object, without the added names}
RENEWS = {"transformers.processing_utils": "transformers"}
# Removed files, such as diffusers.models.vae_flax.
FLAX_FILE = re.compile(r"(diffusers|transformers)\.(\w+\.)*\w*flax\w*")


def add_names(module, values):
    """Add names to a module; they are imported when they are used.

    Args:
        module: changed in place; its own names stay.
        values: {name: "module:name" of its value}.
    """
    fallback = getattr(type(module), "__getattr__", None)

    class WithOldNames(type(module)):
        def __getattr__(self, name):
            if name in values:
                return pkgutil.resolve_name(values[name])
            if fallback is not None:
                return fallback(self, name)
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    module.__class__ = WithOldNames


class EmptyModule(Loader):
    """Loads a module that matches FLAX_FILE."""

    def exec_module(self, module):
        add_names(module, CLASSES)


class OldNamesFinder(MetaPathFinder):
    """Adds OLD_NAMES to modules after their import, and finds modules that match FLAX_FILE."""

    def find_spec(self, fullname, path=None, target=None):
        changed = RENEWS.get(fullname, fullname)
        if changed not in OLD_NAMES and not FLAX_FILE.fullmatch(fullname):
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None:
            return ModuleSpec(fullname, EmptyModule()) if FLAX_FILE.fullmatch(fullname) else None
        if changed in OLD_NAMES:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                # Not `module`: diffusers and transformers put another object in its place.
                add_names(sys.modules[changed], OLD_NAMES[changed])

            spec.loader.exec_module = exec_module
        return spec


def main():
    """Command line: exit code 2 for a mistake in it, else the script's own."""
    if sys.argv[1:2] in (["-h"], ["--help"]):
        print(f"{USAGE}\n\n{__doc__}".rstrip())
        return
    if len(sys.argv) < 2 or sys.argv[1].startswith("-") or not os.path.isfile(sys.argv[1]):
        print(f"error: {' '.join(sys.argv[1:])} is not a file; {USAGE}", file=sys.stderr)
        sys.exit(2)
    script = sys.argv[1]
    sys.meta_path.insert(0, OldNamesFinder())
    del sys.argv[0]
    if not sys.flags.safe_path:  # python -m puts the current directory here, python SCRIPT this one
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
