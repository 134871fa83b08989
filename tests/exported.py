"""Exports of tiny models, and images of examples/run_onnx.py."""

import json
import subprocess
import sys

import jax
import numpy as np
import pytest
from helpers import ROOT, photo
from tiny_models import make_tiny_pipeline, make_tiny_xl

import export_model
from diffusers_flax.pipelines.base import pipeline_class

INT8, FLOAT16 = ("--quantize", "int8"), ("--dtype", "float16")

OPENVINO = ("--format", "openvino")

# Two levels: the UNet of the first halves sides, which may be odd.
MODELS = {
    "demo": lambda folder: ROOT / "demo" / "base_model",
    "edit": lambda folder: make_tiny_pipeline(folder, unet_channels=(16, 32)),
    "text": lambda folder: make_tiny_pipeline(folder, in_channels=4, scheduler="euler"),
    "xl": make_tiny_xl,
    "xl_edit": lambda folder: make_tiny_xl(folder, edits=True),
    "reference": lambda folder: make_tiny_pipeline(folder, in_channels=12),
}


def needs(format):
    """Marks a slow test that make test-export runs, and make test-all if its packages are there."""
    packages = export_model.FORMATS[format].packages
    missing = [x for x in packages if export_model.find_spec(x) is None]
    reason = f"needs make .venv/export: {', '.join(missing)}"
    skip = pytest.mark.skipif(bool(missing), reason=reason)
    return lambda test: pytest.mark.slow(skip(test))


def export(model, folder, *flags):
    export_model.main(["--model", str(model), "--output_dir", str(folder), *flags])


def ours_and_theirs(model, folder, tmp_path, python=sys.executable):
    """The same image by our pipeline and by examples/run_onnx.py, float32 (H, W, 3)."""
    pipeline, params = pipeline_class(model).from_pretrained(model)
    h, w = 8, 11
    factor = pipeline.vae_scale_factor
    shape = (1, pipeline.vae.latent_channels, h, w)
    noise = np.random.default_rng(1).standard_normal(shape, np.float32)
    np.save(tmp_path / "noise.npy", noise)
    size = dict(height=h * factor, width=w * factor)
    command = [python, ROOT / "examples/run_onnx.py", "--model", folder]
    command += ["--prompt", "make it red", "--guidance_scale", "5"]
    command += ["--height", str(size["height"]), "--width", str(size["width"])]
    command += ["--noise", tmp_path / "noise.npy", "--output", tmp_path / "image.npy"]
    if "InstructPix2Pix" in type(pipeline).__name__:
        image = photo(size["width"], size["height"])
        image.save(tmp_path / "input.png")
        command += ["--input", tmp_path / "input.png"]
        inputs = pipeline.prepare_inputs("make it red", image)
    else:
        inputs = [pipeline.prepare_inputs("make it red")]
    options = dict(num_inference_steps=20, latents=noise, guidance_scale=5.0, **size)
    if pipeline.unet.takes_reference:
        other = photo(size["width"], size["height"], seed=1)
        other.save(tmp_path / "reference.png")
        command += ["--reference", tmp_path / "reference.png"]
        options["reference"] = pipeline.prepare_inputs("", image, reference=other)[2]
    ours = pipeline(*inputs, params, jax.random.key(0), **options).images[0]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return np.asarray(ours), np.load(tmp_path / "image.npy")


def write_scheduler(folder, content):
    """A folder with a scheduler_config.json."""
    (folder / "scheduler").mkdir(exist_ok=True)
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(content))
    return folder


def run_example(folder, output, *flags):
    """(image or None, stdout, stderr) of run_onnx.py."""
    command = [sys.executable, ROOT / "examples/run_onnx.py", "--model", folder, "--output", output]
    command += ["--prompt", "make it red", "--num_inference_steps", "2", *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return np.load(output) if output.suffix == ".npy" else None, done.stdout, done.stderr


def refusal(*flags):
    """What run_onnx.py says about its flags, on one line."""
    command = [sys.executable, ROOT / "examples/run_onnx.py", "--prompt", "it", *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    return done.stderr
