"""Writing an export; its directory appears when all components are compared."""

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

from diffusers_flax.exporting.agreement import compare_with_flax, references
from diffusers_flax.exporting.components import COMPONENTS, exported_components
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
            for name in (ONNX, ONNX_DATA, XML, BIN, PACKAGE):
                if not (folder / component / name).exists():
                    remove(output_dir / component / name)
        for program in [] if keep_programs else output_dir.glob(f"*{PROGRAM}"):
            for file in (program, program.with_suffix(".json"), output_dir / WEIGHTS):
                file.unlink(missing_ok=True)


def write_components(pipeline, params, output_dir, write, precision_of):
    """Write a pipeline's components, compared with our models, and the other files of a run.

    Args:
        pipeline: in float32.
        params: its parameters; a module's are removed when its components are written.
        output_dir: directory, made if absent.
        write: function (component, saved, folder) that writes a component's files into a folder.
            Returns a function {input: array} -> list of outputs that runs them, and a function
            that notes the agreement in them; None and None if this machine cannot run them.
        precision_of: function (component) -> key of TOLERANCES; None if this machine cannot run
            the files.
    """
    components = exported_components(pipeline)
    with writing_export(output_dir) as folder:
        write_beside(pipeline, folder)
        with tqdm(components, unit="component") as bar:
            for i, component in enumerate(bar):
                bar.set_description(component.name)
                started = time.perf_counter()
                (folder / component.name).mkdir()
                module = getattr(pipeline, component.module)
                getattr(module, "module", module).save_config(folder / component.name)
                # jax would copy NumPy's arrays in each comparison.
                replace_leaves(jnp.asarray, params[component.module])
                runs = precision_of is not None
                expected = (
                    references(component, pipeline, params[component.module]) if runs else None
                )
                is_last = all(later.module != component.module for later in components[i + 1 :])
                take = params.pop if is_last else params.get
                with tempfile.TemporaryDirectory(dir=folder) as saved:
                    # Frees our weights before the component's file is written and run.
                    module.save_pretrained(
                        saved, params=take(component.module), max_shard_size="1GB"
                    )
                    gc.collect()  # run_flax's traces keep the parameters in reference cycles
                    run, note = write(component, saved, folder / component.name)
                text = "converted, never run here"
                if runs:
                    agreement = compare_with_flax(component, run, expected, precision_of(component))
                    note(agreement)
                    text = "largest difference {largest_difference} of {largest_output}".format(
                        **agreement
                    )
                num_bytes = sum(
                    file.stat().st_size for file in (folder / component.name).rglob("*")
                )
                seconds = time.perf_counter() - started
                bar.write(f"{component.name}: {text}, {in_bytes(num_bytes)}, {seconds:.0f} s")


def write_beside(pipeline, folder):
    """Write tokenizers, scheduler and model_index.json."""
    for name in ("tokenizer", "tokenizer_2"):
        if (tokenizer := getattr(pipeline, name, None)) is not None:
            tokenizer.save_pretrained(folder / name)
            tokenizer.backend_tokenizer.model.save(str(folder / name))
    pipeline.scheduler.save_pretrained(folder / "scheduler")
    write_json(folder / INDEX_NAME, pipeline.config)
