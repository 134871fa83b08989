"""Writing an export, part by part: a directory appears when all of it is compared."""

import contextlib
import gc
import io
import logging
import shutil
import tempfile
import time
import warnings

import jax.numpy as jnp
from tqdm import tqdm

from command_line import in_bytes
from diffusers_flax.loading.directories import INDEX_NAME, writing_pipeline
from diffusers_flax.loading.files import remove, write_json
from diffusers_flax.parameters import replace_leaves
from exporting.agreement import compare_with_flax, references
from exporting.parts import PARTS, exported_parts

# The files of a part, by format.
ONNX, ONNX_DATA = "model.onnx", "model.onnx_data"
XML, BIN = "openvino_model.xml", "openvino_model.bin"
PACKAGE = "model.mlpackage"
# Programs of --format stablehlo, and the parameters of all of them.
PROGRAM, WEIGHTS = ".jaxexport", "weights.safetensors"


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


@contextlib.contextmanager
def writing_export(output_dir, keep_programs=False):
    """Yield an empty directory, then move its files into output_dir, model_index.json last.

    Files of an earlier export that no new one replaces go, of any format, and so does what a killed
    export left. If the caller fails, output_dir is not changed.

    Args:
        output_dir: Path of a directory, made if absent.
        keep_programs: keep programs of --format stablehlo.
    """
    for unfinished in output_dir.glob(".saving-*"):  # of writing_pipeline
        shutil.rmtree(unfinished)
    with writing_pipeline(output_dir) as folder:
        yield folder
        # From here on a kill leaves a directory that says that it is incomplete.
        (output_dir / INDEX_NAME).unlink(missing_ok=True)
        for part in PARTS:
            for name in (ONNX, ONNX_DATA, XML, BIN, PACKAGE):
                if not (folder / part / name).exists():
                    remove(output_dir / part / name)
        for program in [] if keep_programs else output_dir.glob(f"*{PROGRAM}"):
            for file in (program, program.with_suffix(".json"), output_dir / WEIGHTS):
                file.unlink(missing_ok=True)


def write_parts(pipeline, params, output_dir, write, precision_of):
    """Write all parts of a pipeline, compared with our models, and what a run needs beside them.

    Args:
        pipeline: in float32.
        params: its parameters; a module's are removed when its parts are written.
        output_dir: directory, made if absent.
        write: function (part, saved, folder) that writes a part's files into a folder and returns
            a function {input: array} -> list of outputs that runs them, and a function that takes
            the agreement, to keep it in the files; two times None if this machine cannot run them.
        precision_of: function (part) -> key of TOLERANCES; None if this machine cannot run it.
    """
    parts = exported_parts(pipeline)
    with writing_export(output_dir) as folder:
        write_beside(pipeline, folder)
        with tqdm(parts, unit="part") as bar:
            for i, part in enumerate(bar):
                bar.set_description(part.name)
                started = time.perf_counter()
                (folder / part.name).mkdir()
                module = getattr(pipeline, part.module)
                getattr(module, "module", module).save_config(folder / part.name)
                # Each comparison would copy NumPy's arrays once more.
                replace_leaves(jnp.asarray, params[part.module])
                runs = precision_of is not None
                expected = references(part, pipeline, params[part.module]) if runs else None
                is_last = all(later.module != part.module for later in parts[i + 1 :])
                take = params.pop if is_last else params.get
                with tempfile.TemporaryDirectory(dir=folder) as saved:
                    # Our weights leave the memory before the part's file is written and run.
                    module.save_pretrained(saved, params=take(part.module), max_shard_size="1GB")
                    gc.collect()  # traces of run_flax have the parameters in reference cycles
                    run, note = write(part, saved, folder / part.name)
                text = "converted, never run here"
                if runs:
                    agreement = compare_with_flax(part, run, expected, precision_of(part))
                    note(agreement)
                    text = "largest difference {largest_difference} of {largest_output}".format(
                        **agreement
                    )
                num_bytes = sum(file.stat().st_size for file in (folder / part.name).rglob("*"))
                seconds = time.perf_counter() - started
                bar.write(f"{part.name}: {text}, {in_bytes(num_bytes)}, {seconds:.0f} s")


def write_beside(pipeline, folder):
    """Write tokenizers, scheduler and model_index.json, as in a pipeline's directory."""
    for name in ("tokenizer", "tokenizer_2"):
        if (tokenizer := getattr(pipeline, name, None)) is not None:
            tokenizer.save_pretrained(folder / name)
            tokenizer.backend_tokenizer.model.save(str(folder / name))
    pipeline.scheduler.save_pretrained(folder / "scheduler")
    write_json(folder / INDEX_NAME, pipeline.config)
