"""Run the notebook from top to bottom with the demo's model, and keep its outputs in the file.

    python notebooks/execute.py                   # minutes on one CPU core

Needs nbclient and ipykernel; requirements.txt has them for the tests.
"""

import os
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "notebooks" / "instruct_pix2pix.ipynb"
CELL_SECONDS = 1800  # a cell may take


def execute(notebook, folder, env):
    """Run all cells in place; the first error is raised.

    Args:
        notebook: of nbformat.
        folder: of the kernel at its start, the directory notebooks/ of a clone.
        env: environment variables of the kernel.
    """
    client = NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,  # of a progress bar only its last state is kept
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute(env=env | {"DEMO": "1"})
    notebook.metadata.language_info = {"name": "python"}  # without this machine's version
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if "text" in output:  # as on a terminal
                output.text = output.text.replace("\r\n", "\n")


def main():
    """Execute, and write the notebook without the paths of this machine."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    execute(notebook, NOTEBOOK.parent, dict(os.environ))
    text = nbformat.writes(notebook).replace(f"{ROOT}/", "")
    NOTEBOOK.write_text(text + "\n")
    print(f"wrote {NOTEBOOK}, {len(text) / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
