"""Writing an export; its directory appears when all components are compared with our models."""

import contextlib
import gc
import io
import logging
import shutil
import tempfile
import warnings

import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

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

# Programs of --format stablehlo, and the parameters of all of them.
PROGRAM, WEIGHTS = ".jaxexport", "weights.safetensors"
# (batch, (height, width) of latents) at which every component is compared. The second has an odd
# side, which the UNet halves and has to restore.
CHECKED_SIZES = ((1, (16, 16)), (3, (13, 24)))
# Largest allowed difference, relative to a component's largest output.
TOLERANCES = {"float32": 1e-4, "float16": 2e-2, "int8": 0.15}


@contextlib.contextmanager
def quiet():
    """Silence the converters' messages."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    silent = io.StringIO()
    try:
        with (
            warnings.catch_warnings(action="ignore"),
            contextlib.redirect_stdout(silent),
            contextlib.redirect_stderr(silent),
        ):
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
        if not keep_programs:
            for file in (*output_dir.glob(f"*{PROGRAM}"), output_dir / WEIGHTS):
                file.unlink(missing_ok=True)


def write_components(pipeline, params, output_dir, write, is_run=True):
    """Write a pipeline's components, compared with our models, and the other files of a run.

    Args:
        pipeline: in float32.
        params: its parameters; the UNet's are removed before its file is written.
        output_dir: directory, made if absent.
        write: function (component, saved, folder) that writes a component's files into a folder
            from what save_pretrained saved. Returns a function {input: array} -> list of outputs
            that runs them, and a key of TOLERANCES.
        is_run: whether this machine can run the files; else write returns nothing.

    Returns:
        [output_dir].

    Raises:
        ArithmeticError: a difference exceeds the tolerance or is not finite.
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
                run, precision = written
                differences = []  # (relative to the output's largest number, absolute, largest)
                for arrays, outputs in zip(inputs, expected):
                    for found, wanted in zip(run(arrays), outputs):
                        scale = np.abs(wanted).max()
                        difference = np.abs(np.asarray(found, np.float32) - wanted).max()
                        share = np.nan_to_num(difference / scale, nan=np.inf)
                        differences.append((share, difference, scale))
                share, difference, scale = max(differences)
                said = f"largest difference {difference:.2e} of {scale:.2e}"
                if share > TOLERANCES[precision]:
                    raise ArithmeticError(
                        f"{component.name} in {precision} differs from the Flax model, {said}; "
                        "nothing was written"
                    )
            num_bytes = sum(file.stat().st_size for file in target.rglob("*"))
            bar.write(f"{component.name}: {said}, {in_bytes(num_bytes)}")
    return [output_dir]


def write_beside(pipeline, folder):
    """Write tokenizers, scheduler and model_index.json."""
    for name in ("tokenizer", "tokenizer_2"):
        if (tokenizer := getattr(pipeline, name, None)) is not None:
            tokenizer.save_pretrained(folder / name)
            tokenizer.backend_tokenizer.model.save(str(folder / name))
    pipeline.scheduler.save_pretrained(folder / "scheduler")
    write_json(folder / INDEX_NAME, pipeline.config)
