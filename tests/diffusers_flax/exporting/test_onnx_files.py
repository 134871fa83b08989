"""ONNX and OpenVINO files are compared with the Flax models."""

import json

import pytest
from exported import FLOAT16, INT8, MODELS, OPENVINO, export, needs, ours_and_theirs
from helpers import psnr


# Least PSNR of an image of 20 steps, dB.
@needs("onnx")
@pytest.mark.parametrize(
    ("name", "flags", "least"),
    [
        *((name, (), 60) for name in MODELS),
        ("xl_edit", FLOAT16, 50),
        ("demo", INT8, 35),
        *((name, OPENVINO, 60) for name in ("demo", "xl_edit")),
        ("demo", (*OPENVINO, *FLOAT16), 50),
        ("demo", (*OPENVINO, *INT8), 35),
    ],
)
def test_images_of_exports(exports, tmp_path, name, flags, least):
    if "openvino" in flags:
        pytest.importorskip("openvino")
    ours, theirs = ours_and_theirs(*exports(name, *flags), tmp_path)
    assert ours.std() > 0.05 and psnr(ours, theirs) > least


@needs("onnx")
@pytest.mark.parametrize("name", MODELS)
def test_layout_of_an_export(exports, name):
    import onnx

    _, folder = exports(name)
    index = json.loads((folder / "model_index.json").read_text())
    names = [x for x in index if x.startswith(("unet", "text_encoder"))]
    for part in (*names, "vae_encoder", "vae_decoder"):
        model = onnx.load(folder / part / "model.onnx")
        assert [x.version for x in model.opset_import if not x.domain] == [18]
        assert (folder / part / "config.json").exists()
    assert (folder / "tokenizer" / "tokenizer.json").exists()
    assert (folder / "scheduler" / "scheduler_config.json").exists()
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]
    model = onnx.load(folder / "unet" / "model.onnx")
    inputs = {x.name: x.type.tensor_type.shape.dim for x in model.graph.input}
    assert [x.dim_param for x in inputs["sample"]] == ["batch_size", "", "height", "width"]
    assert ("time_ids" in inputs) == ("XL" in index["_class_name"])


@needs("onnx")
@pytest.mark.parametrize("flags", [(), INT8], ids=str)
def test_weights_beside_a_large_file(tmp_path, monkeypatch, flags):
    from diffusers_flax.exporting import onnx_files

    model = MODELS["text"](tmp_path / "model")
    monkeypatch.setattr(onnx_files, "LARGEST_FILE", 20_000)  # bytes
    export(model, tmp_path / "export", *flags)
    file = tmp_path / "export" / "unet" / "model.onnx"
    names = {"config.json", "model.onnx", "model.onnx_data"}
    assert {x.name for x in file.parent.iterdir()} == names
    assert (file.parent / "model.onnx_data").stat().st_size > 20_000
    ours, theirs = ours_and_theirs(model, tmp_path / "export", tmp_path)
    assert psnr(ours, theirs) > (35 if flags else 60)
