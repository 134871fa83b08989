"""export_model.py: its flags, missing packages."""

import shutil

import pytest
from tiny_models import make_tiny_pipeline

import export_model

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
    said = '--format onnx needs onnxscript: pip install ".[onnx]"\n'
    assert message("--model", "x") == f"error: {said}"
    monkeypatch.setattr(export_model, "is_installed", lambda package: True)
    assert "has no model_index.json" in message("--model", str(tmp_path))
    model = make_tiny_pipeline(tmp_path / "model")
    flags = ["--model", str(model), "--format", "stablehlo", "--height", "63"]
    assert "size 63x" in message(*flags)
    shutil.rmtree(model / "unet")
    assert "lacks unet/config.json" in message("--model", str(model))
