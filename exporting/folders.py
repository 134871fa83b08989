"""Writing an export, part by part: a directory appears when all of it is compared."""

import contextlib
import io
import logging
import tempfile
import time
import warnings

from tqdm import tqdm

from command_line import in_bytes
from diffusers_flax.loading.directories import INDEX_NAME, writing_pipeline
from diffusers_flax.loading.files import write_json
from exporting.agreement import compare, references
from exporting.parts import parts_of


@contextlib.contextmanager
def quiet():
    """Without what the converters say about themselves."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def write_parts(pipeline, params, output_dir, write, precision_of, files):
    """Write all parts of a pipeline, compared with our models, and what a run needs beside them.

    Args:
        pipeline: in float32.
        params: its parameters; a module's are removed when its parts are written.
        output_dir: directory, made if absent.
        write: function (part, saved, folder) that writes a part's files into a folder and returns
            a function {input: array} -> list of outputs that runs them, and a function that takes
            the agreement, to keep it in the files; two times None if this machine cannot run them.
        precision_of: function (part) -> key of TOLERANCES; None if this machine cannot run it.
        files: names of the files that a part may have; left over ones of an earlier export go.
    """
    parts = parts_of(pipeline)
    with writing_pipeline(output_dir) as folder:
        write_beside(pipeline, folder)
        with tqdm(parts, unit="part") as bar:
            for i, part in enumerate(bar):
                bar.set_description(part.name)
                started = time.perf_counter()
                (folder / part.name).mkdir()
                module = getattr(pipeline, part.module)
                getattr(module, "module", module).save_config(folder / part.name)
                runs = precision_of is not None
                expected = references(part, pipeline, params[part.module]) if runs else None
                is_last = all(later.module != part.module for later in parts[i + 1 :])
                take = params.pop if is_last else params.get
                with tempfile.TemporaryDirectory(dir=folder) as saved:
                    # A UNet of SDXL is in memory once: here as ours, then as PyTorch's.
                    module.save_pretrained(saved, params=take(part.module))
                    run, note = write(part, saved, folder / part.name)
                text = "converted, never run here"
                if runs:
                    agreement = compare(part, run, expected, precision_of(part))
                    note(agreement)
                    text = "largest difference {largest_difference} of {largest_output}".format(
                        **agreement
                    )
                num_bytes = sum(file.stat().st_size for file in (folder / part.name).rglob("*"))
                seconds = time.perf_counter() - started
                bar.write(f"{part.name}: {text}, {in_bytes(num_bytes)}, {seconds:.0f} s")
        kept = {file.relative_to(folder) for file in folder.rglob("*")}
    for part in parts:
        for name in files:
            if f"{part.name}/{name}" not in map(str, kept):
                (output_dir / part.name / name).unlink(missing_ok=True)


def write_beside(pipeline, folder):
    """Write tokenizers, scheduler and model_index.json, as in a pipeline's directory."""
    for name in ("tokenizer", "tokenizer_2"):
        if (tokenizer := getattr(pipeline, name, None)) is not None:
            tokenizer.save_pretrained(folder / name)
            tokenizer.backend_tokenizer.model.save(str(folder / name))
    pipeline.scheduler.save_pretrained(folder / "scheduler")
    write_json(folder / INDEX_NAME, pipeline.config)
