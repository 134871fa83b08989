"""export_model.py and examples/run_onnx.py: files are compared with the Flax models they are of."""

import json
import os
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from helpers import ROOT, photo, psnr
from tiny_models import make_tiny_pipeline, make_tiny_xl

import export_model
from diffusers_flax.pipelines.base import pipeline_class


def needs(format):
    """Marks a slow test that make test-export runs, and make test-all if its packages are there."""
    missing = [x for x in export_model.PACKAGES[format] if not export_model.is_installed(x)]
    reason = f"needs requirements-export.txt: {', '.join(missing)}"
    skip = pytest.mark.skipif(bool(missing), reason=reason)
    return lambda test: pytest.mark.slow(skip(test))


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


def ours_and_theirs(model, folder, tmp_path, python=sys.executable):
    """The same image by our pipeline and by examples/run_onnx.py, float32 (H, W, 3)."""
    pipeline, params = pipeline_class(model).from_pretrained(model)
    h, w = 8, 11
    factor = pipeline.vae_scale_factor
    noise = np.random.default_rng(1).standard_normal((1, 4, h, w), np.float32)
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
    ours = pipeline(*inputs, params, jax.random.key(0), **options).images[0]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return np.asarray(ours), np.load(tmp_path / "image.npy")


@needs("onnx")
def test_image_of_onnx_files(exported, tmp_path):
    ours, theirs = ours_and_theirs(*exported, tmp_path)
    assert ours.std() > 0.05 and psnr(ours, theirs) > 60


@needs("onnx")
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


@needs("onnx")
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


@needs("onnx")
@pytest.mark.parametrize("flags", [("--quantize", "int8"), ("--dtype", "float16")], ids=str)
def test_smaller_files(tmp_path, flags):
    model = MODELS["text"](tmp_path / "model")
    export(model, tmp_path / "small", *flags)
    ours, theirs = ours_and_theirs(model, tmp_path / "small", tmp_path)
    assert psnr(ours, theirs) > (35 if "int8" in flags else 50)


@needs("onnx")
def test_example_without_jax_and_torch(tmp_path):
    model = make_tiny_xl(tmp_path / "model", edits=True)
    export(model, tmp_path / "export")
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    packages = ["onnxruntime", "numpy", "tokenizers", "pillow"]
    done = subprocess.run(
        [python, "-m", "pip", "install", "--quiet", *packages], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"pip cannot install {', '.join(packages)}: {done.stderr[-200:]}")
    for name in ("jax", "torch"):
        assert subprocess.run([python, "-c", f"import {name}"], capture_output=True).returncode
    ours, theirs = ours_and_theirs(model, tmp_path / "export", tmp_path, python)
    assert psnr(ours, theirs) > 60
    for folder, said in (
        (model, "has no unet/model.onnx; export with --format onnx"),
        (tmp_path / "venv", "is no complete export; make one with export_model.py"),
    ):
        command = [python, ROOT / "examples/run_onnx.py", "--model", folder, "--prompt", "it"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1) and said in done.stderr


@needs("onnx")
def test_interruption(tmp_path, monkeypatch):
    from exporting import folders

    model = MODELS["text"](tmp_path / "model")
    folder = tmp_path / "export"

    def stop(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(folders, "compare", stop)
    with pytest.raises(SystemExit, match="130"):
        export(model, folder)
    assert not folder.exists()


@needs("openvino")
@pytest.mark.parametrize(
    ("flags", "least"), [((), 60), (("--dtype", "float16"), 50), (("--quantize", "int8"), 35)]
)
def test_openvino(tmp_path, monkeypatch, flags, least):
    from exporting.openvino_files import open_openvino
    from exporting.parts import parts_of, random_inputs, run_flax

    model = MODELS["text"](tmp_path / "model")
    export(model, tmp_path / "export", "--format", "openvino", *flags)
    pipeline, params = pipeline_class(model).from_pretrained(model)
    for part in parts_of(pipeline):
        run = open_openvino(tmp_path / "export" / part.name / "openvino_model.xml")
        inputs = random_inputs(part, pipeline, 2, (11, 8))
        for ours, found in zip(run_flax(part, pipeline, params[part.module], inputs), run(inputs)):
            scale = np.abs(ours).max()
            assert -20 * np.log10(np.sqrt(np.mean((ours - found) ** 2)) / scale) > least


@needs("coreml")
@pytest.mark.parametrize("flags", [(), ("--quantize", "palette6")], ids=str)
def test_coreml(tmp_path, flags):
    model = make_tiny_xl(tmp_path / "model")
    export(model, tmp_path / "export", "--format", "coreml", "--height", "64", *flags)
    assert len(list((tmp_path / "export").glob("*/model.mlpackage/Manifest.json"))) == 5


@needs("stablehlo")
@pytest.mark.parametrize("name", ["text", "xl_edit"])
def test_stablehlo_is_bit_for_bit_jit(tmp_path, name):
    """In a process without our model code."""
    model, folder = MODELS[name](tmp_path / "model"), tmp_path / "programs"
    is_edit, h, w = name == "xl_edit", 64, 96
    size = ["--height", str(h), "--width", str(w), "--batch_size", "2"]
    export(model, folder, "--format", "stablehlo", *size, "--num_inference_steps", "3")
    file = folder / f"{'edit' if is_edit else 'image'}-batch2-{w}x{h}-3steps-cpu.jaxexport"
    image = photo(w, h)
    image.save(tmp_path / "input.png")
    code = (
        "import sys, export_model; export_model.main(sys.argv[1:]);"
        "ours = {'diffusers_flax', 'torch', 'transformers'};"
        "assert not ours & {name.partition('.')[0] for name in sys.modules}"
    )
    flags = ["--run", file, "--prompt", "make it red", "--output", tmp_path / "image.npy"]
    flags += ["--seed", "5", *(["--input", tmp_path / "input.png"] if is_edit else [])]
    command = [sys.executable, "-c", code, *flags]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr

    pipeline, params = pipeline_class(model).from_pretrained(model)
    texts = ["make it red"] * 2
    inputs = pipeline.prepare_inputs(texts, *([image] if is_edit else []))
    inputs = inputs if is_edit else [inputs]
    options = dict(num_inference_steps=3, height=h, width=w)
    scales = dict(guidance_scale=np.float32(7.5))
    if is_edit:
        scales["image_guidance_scale"] = np.float32(1.5)
    else:
        scales["neg_prompt_ids"] = pipeline.prepare_text_inputs([""] * 2)

    def generate(params, inputs, scales):
        key = jax.random.key(5)
        return pipeline._generate(*inputs, params=params, prng_seed=key, **scales, **options)

    wanted = np.asarray(jax.jit(generate)(params, inputs, scales))
    assert (np.load(tmp_path / "image.npy") == wanted).all()


@needs("stablehlo")
def test_stablehlo_for_a_tpu_compiles(tmp_path):
    if not (ROOT / ".venv" / "tpu").exists():
        pytest.skip("needs libtpu in .venv/tpu")
    model = make_tiny_xl(tmp_path / "model")
    size = ["--height", "256", "--width", "256", "--num_inference_steps", "2"]
    export(model, tmp_path / "tpu", "--format", "stablehlo", "--platform", "tpu", *size)
    (file,) = (tmp_path / "tpu").glob("*-tpu.jaxexport")
    code = """
import sys
import jax
from jax.experimental.topologies import get_topology_desc
jax.config.update("jax_platforms", "cpu")
program = jax.export.deserialize(bytearray(Path(sys.argv[1]).read_bytes()))
device = get_topology_desc("v5e:2x2", "tpu").devices[0]
place = jax.sharding.SingleDeviceSharding(device)
args, _ = jax.tree.unflatten(program.in_tree, program.in_avals)
args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), args)
assert "tpu_custom_call" in jax.jit(program.call).lower(*args).compile().as_text()
"""
    env = os.environ | {"PYTHONPATH": str(ROOT / ".venv" / "tpu"), "TPU_SKIP_MDS_QUERY": "1"}
    done = subprocess.run(
        [sys.executable, "-c", "import jax.export\n" + code, file],
        capture_output=True,
        text=True,
        env=env,
    )
    assert done.returncode == 0, done.stderr
    flags = ["--run", str(file), "--prompt", "it", "--output", str(tmp_path / "x.png")]
    with pytest.raises(SystemExit, match="2"):
        export_model.main(flags)


WRONG = [
    ([], "give --model and --output_dir to export, or --run and --prompt"),
    (["--format", "tflite"], "--format tflite is unknown; choose from coreml, onnx, openvino"),
    (["--model", "m", "--output_dir", "o", "--prompt", "x"], "--prompt goes with --run"),
    (["--model", "m", "--output_dir", "o", "--height", "64"], "--height 64 is for --format coreml"),
    (["--model", "m", "--output_dir", "o", "--dtype", "bfloat16"], "not for --format onnx"),
    (["--model", "m", "--output_dir", "o", "--quantize", "palette6"], "which has int8"),
    (["--run", "f", "--model", "m", "--prompt", "x"], "--model does not go with --run"),
    (["--run", "f"], "--run needs --prompt, a text"),
]


@pytest.mark.parametrize(("flags", "said"), WRONG)
@pytest.mark.variants
def test_wrong_flags(flags, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        export_model.main(flags)
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_missing_packages_and_models(tmp_path, monkeypatch, capsys):
    def message(*flags):
        with pytest.raises(SystemExit, match="2"):
            export_model.main(["--output_dir", str(tmp_path / "export"), *flags])
        assert not (tmp_path / "export").exists()
        return capsys.readouterr().err

    monkeypatch.setattr(export_model, "is_installed", lambda package: package != "onnxscript")
    said = "--format onnx needs onnxscript: pip install -r requirements-export.txt\n"
    assert message("--model", "x") == f"error: {said}"
    monkeypatch.setattr(export_model, "is_installed", lambda package: True)
    assert "has no model_index.json" in message("--model", str(tmp_path))
    model = make_tiny_pipeline(tmp_path / "model")
    flags = ["--model", str(model), "--format", "stablehlo", "--height", "63"]
    assert "size 63x" in message(*flags)
    shutil.rmtree(model / "unet")
    assert "lacks unet/config.json" in message("--model", str(model))
