"""export_model.py: its flags, missing packages and models."""

import shutil

import pytest
from tiny_models import make_tiny_pipeline

import export_model

EXPORT = ["--model", "m", "--output_dir", "o"]


def refusal(flags, capsys):
    """What the program says about its flags, on one line."""
    with pytest.raises(SystemExit, match="2"):
        export_model.main(flags)
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "give --model and --output_dir to export, or --run and --prompt"),
        ([*EXPORT, "--format", "coreml", "--batch_size", "0"], "--batch_size 0 must be at least 1"),
        ([*EXPORT, "--dtype", "bfloat16"], "not for --format onnx, which has float32, float16"),
        ([*EXPORT, "--quantize", "int8", "--dtype", "float16"], "are both given; give one"),
        (["--run", "f"], "--run needs --prompt, a text"),
        (["--run", "f", "--prompt", "x"], "f is no program of a complete export"),
    ],
)
def test_wrong_flags(flags, said, capsys):
    assert said in refusal(flags, capsys)


def test_missing_packages_and_models(tmp_path, monkeypatch, capsys):
    output = ["--output_dir", str(tmp_path / "export")]
    monkeypatch.setattr(
        export_model, "find_spec", lambda package: None if package == "onnxscript" else 1
    )
    said = '--format onnx needs onnxscript: pip install ".[onnx]"'
    assert refusal(["--model", "x", *output], capsys) == f"error: {said}"
    monkeypatch.setattr(export_model, "find_spec", lambda package: 1)
    assert "has no model_index.json" in refusal(["--model", str(tmp_path), *output], capsys)
    model = make_tiny_pipeline(tmp_path / "model")
    capsys.readouterr()
    flags = ["--model", str(model), "--format", "stablehlo", "--height", "63", *output]
    assert "size 63x" in refusal(flags, capsys)
    flags = ["--model", str(model), "--output_dir", str(model), "--overwrite_output_dir"]
    assert f"--output_dir {model} is a model, not an export" in refusal(flags, capsys)
    shutil.rmtree(model / "unet")
    assert "lacks unet/config.json" in refusal(["--model", str(model), *output], capsys)
    assert not (tmp_path / "export").exists()
