"""Exports that several tests read."""

import pytest
from exported import MODELS, export


@pytest.fixture(scope="session")
def exports(tmp_path_factory):
    """Function (name, *flags) -> (a model of MODELS, its export), which no test changes."""
    folder, found = tmp_path_factory.mktemp("exports"), {}

    def get(name, *flags):
        if (name, flags) not in found:
            model = folder / name
            model = model if model.exists() else MODELS[name](model)
            export(model, target := folder / f"export{len(found)}", *flags)
            found[name, flags] = model, target
        return found[name, flags]

    return get
