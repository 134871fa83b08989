"""export_model.py and examples/run_onnx.py: files are compared with the Flax models they are of."""

import json
import subprocess
import sys

import jax
import numpy as np
import pytest
from helpers import ROOT, photo, psnr
from tiny_models import make_tiny_pipeline, make_tiny_xl

import export_model
from diffusers_flax.pipelines.base import pipeline_class

HAS_ONNX = all(map(export_model.is_installed, ("onnx", "onnxscript", "onnxruntime")))
needs_onnx = pytest.mark.skipif(not HAS_ONNX, reason="needs requirements-export.txt")

# Two levels: the UNet of the first halves sides, which may be odd.
MODELS = {
    "edit": lambda folder: make_tiny_pipeline(folder, unet_channels=(16, 32)),
    "text": lambda folder: make_tiny_pipeline(folder, in_channels=4, scheduler="euler"),
    "xl": make_tiny_xl,
    "xl_edit": lambda folder: make_tiny_xl(folder, edits=True),
}


def export(model, folder, *flags):
    export_model.main(["--model", str(model), "--output_dir", str(folder), *flags])


def make(name, tmp_path_factory):
    return MODELS[name](tmp_path_factory.mktemp("models") / name)


@pytest.fixture(scope="module", params=MODELS)
def exported(request, tmp_path_factory):
    """(a model, its ONNX files)."""
    model = make(request.param, tmp_path_factory)
    folder = tmp_path_factory.mktemp("exports") / request.param
    export(model, folder)
    return model, folder


def ours_and_theirs(model, folder, tmp_path, *flags, program="examples/run_onnx.py", python=None):
    """The same image by our pipeline and by an example program, float32 (H, W, 3)."""
    pipeline, params = pipeline_class(model).from_pretrained(model)
    h, w = 8, 11
    factor = pipeline.vae_scale_factor
    noise = np.random.default_rng(1).standard_normal((1, 4, h, w), np.float32)
    np.save(tmp_path / "noise.npy", noise)
    size = dict(height=h * factor, width=w * factor)
    command = [python or sys.executable, ROOT / program, "--model", folder, *flags]
    command += ["--prompt", "make it red", "--guidance_scale", "5"]
    command += ["--height", str(size["height"]), "--width", str(size["width"])]
    command += ["--noise", tmp_path / "noise.npy", "--output", tmp_path / "image.npy"]
    if "InstructPix2Pix" in type(pipeline).__name__:
        image = photo(size["width"], size["height"])
        image.save(tmp_path / "input.png")
        command += ["--input", tmp_path / "input.png"]
        inputs, scales = pipeline.prepare_inputs("make it red", image), dict(guidance_scale=5.0)
    else:
        inputs, scales = [pipeline.prepare_inputs("make it red")], dict(guidance_scale=5.0)
    options = dict(num_inference_steps=20, latents=noise, **size, **scales)
    ours = pipeline(*inputs, params, jax.random.key(0), **options).images[0]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return np.asarray(ours), np.load(tmp_path / "image.npy")


@needs_onnx
@pytest.mark.slow
def test_image_of_onnx_files(exported, tmp_path):
    ours, theirs = ours_and_theirs(*exported, tmp_path)
    assert ours.std() > 0.05 and psnr(ours, theirs) > 60


@needs_onnx
@pytest.mark.slow
def test_onnx_files_at_other_sizes(exported):
    from exporting.onnx_files import open_onnx
    from exporting.parts import parts_of, random_inputs, run_flax

    model, folder = exported
    pipeline, params = pipeline_class(model).from_pretrained(model)
    for part in parts_of(pipeline):
        run = open_onnx(folder / part.name / "model.onnx")
        for checked in ((1, (8, 8)), (3, (24, 16)), (2, (9, 7))):
            inputs = random_inputs(part, pipeline, *checked)
            for ours, found in zip(
                run_flax(part, pipeline, params[part.module], inputs), run(inputs)
            ):
                assert np.abs(ours - found).max() < 1e-4 * np.abs(ours).max()


@needs_onnx
@pytest.mark.slow
def test_layout_of_an_export(exported):
    import onnx

    _, folder = exported
    index = json.loads((folder / "model_index.json").read_text())
    names = [name for name in index if name.startswith(("unet", "text_encoder"))]
    for name in (*names, "vae_encoder", "vae_decoder"):
        model = onnx.load(folder / name / "model.onnx")
        assert [x.version for x in model.opset_import if not x.domain] == [18]
        properties = {x.key: x.value for x in model.metadata_props}
        assert "PyTorch" in properties["note"]
        assert float(properties["largest_difference"]) < 1e-4 * float(properties["largest_output"])
        assert (folder / name / "config.json").exists()
    assert (folder / "tokenizer" / "tokenizer.json").exists()
    assert (folder / "scheduler" / "scheduler_config.json").exists()
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]
    model = onnx.load(folder / "unet" / "model.onnx")
    inputs = {x.name: x.type.tensor_type.shape.dim for x in model.graph.input}
    assert [x.dim_param for x in inputs["sample"]] == ["batch_size", "", "height", "width"]
    assert ("time_ids" in inputs) == ("XL" in index["_class_name"])
