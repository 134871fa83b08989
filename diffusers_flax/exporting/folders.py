"""Writing an export; its directory appears when all components are compared."""

import contextlib
import gc
import io
import logging
import shutil
import tempfile
import warnings

import jax.numpy as jnp
from tqdm import tqdm

from diffusers_flax.exporting.agreement import CHECKED_SIZES, compare_with_flax
from diffusers_flax.exporting.components import (
    COMPONENTS,
    exported_components,
    random_inputs,
    run_flax,
)
from diffusers_flax.loading.directories import INDEX_NAME, writing_pipeline
from diffusers_flax.loading.files import remove, write_json
from diffusers_flax.messages import in_bytes
from diffusers_flax.parameters import replace_leaves

# A component's files, by format.
ONNX, ONNX_DATA = "model.onnx", "model.onnx_data"
XML, BIN = "openvino_model.xml", "openvino_model.bin"
PACKAGE = "model.mlpackage"
# Programs of --format stablehlo, and the parameters of all of them.
PROGRAM, WEIGHTS = ".jaxexport", "weights.safetensors"


@contextlib.contextmanager
def quiet():
    """Silence the converters' messages."""
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

    Deletes files of earlier exports, of any format, and of killed ones. If the caller fails,
    output_dir does not change.

    Args:
        output_dir: Path of a directory, made if absent.
        keep_programs: keep programs of --format stablehlo.
    """
    for unfinished in output_dir.glob(".saving-*"):  # of writing_pipeline
        shutil.rmtree(unfinished)
    with writing_pipeline(output_dir) as folder:
        yield folder
        # A directory without its index is incomplete, as after a kill from here on.
        (output_dir / INDEX_NAME).unlink(missing_ok=True)
        for component in COMPONENTS:
            remove(output_dir / component)
        for program in [] if keep_programs else output_dir.glob(f"*{PROGRAM}"):
            for file in (program, program.with_suffix(".json"), output_dir / WEIGHTS):
                file.unlink(missing_ok=True)


def write_components(pipeline, params, output_dir, write, is_run=True):
    """Write a pipeline's components, compared with our models, and the other files of a run.

    Args:
        pipeline: in float32.
        params: its parameters; the UNet's are removed before its file is written.
        output_dir: directory, made if absent.
        write: function (component, saved, folder) that writes a component's files into a folder
            from what save_pretrained saved. Returns a function {input: array} -> list of outputs
            that runs them, a function that notes the agreement in them, and a key of TOLERANCES.
        is_run: whether this machine can run the files; else write returns nothing.
    """
    with writing_export(output_dir) as folder:
        write_beside(pipeline, folder)
        bar = tqdm(exported_components(pipeline), unit="component")
        for component in bar:
            bar.set_description(component.name)
            target, name = folder / component.name, component.module
            target.mkdir()
            module = getattr(pipeline, name)
            getattr(module, "module", module).save_config(target)
            replace_leaves(jnp.asarray, params[name])  # jax would copy NumPy's in each call
            sizes = CHECKED_SIZES if is_run else ()
            inputs = [random_inputs(component, pipeline, *size) for size in sizes]
            expected = [run_flax(component, pipeline, params[name], x) for x in inputs]
            with tempfile.TemporaryDirectory(dir=folder) as saved:
                weights = params.pop(name) if name == "unet" else params[name]
                module.save_pretrained(saved, params=weights, max_shard_size="1GB")
                del weights
                gc.collect()  # run_flax's traces keep the parameters in reference cycles
                written = write(component, saved, target)
            said = "converted, never run here"
            if is_run:
                run, note, precision = written
                agreement = compare_with_flax(component, run, inputs, expected, precision)
                note(agreement)
                said = "largest difference {largest_difference} of {largest_output}"
                said = said.format(**agreement)
            num_bytes = sum(file.stat().st_size for file in target.rglob("*"))
            bar.write(f"{component.name}: {said}, {in_bytes(num_bytes)}")


def write_beside(pipeline, folder):
    """Write tokenizers, scheduler and model_index.json."""
    for name in ("tokenizer", "tokenizer_2"):
        if (tokenizer := getattr(pipeline, name, None)) is not None:
            tokenizer.save_pretrained(folder / name)
            tokenizer.backend_tokenizer.model.save(str(folder / name))
    pipeline.scheduler.save_pretrained(folder / "scheduler")
    write_json(folder / INDEX_NAME, pipeline.config)
