"""Interrupted, killed and repeated exports."""

import shutil

import pytest
from exported import OPENVINO, export, needs, refusal

import export_model


@needs("openvino")
def test_an_export_of_another_format(exports, tmp_path, capsys):
    """It is refused, or replaced as a whole."""
    model, whole = exports("text")
    shutil.copytree(whole, folder := tmp_path / "export")
    with pytest.raises(SystemExit, match="2"):
        export(model, folder, *OPENVINO)
    assert "is not empty (model_index.json, scheduler" in capsys.readouterr().err
    size = ["--height", "64", "--width", "64", "--num_inference_steps", "1"]
    program = ["--format", "stablehlo", *size, "--platform", "cpu"]
    export(model, folder, *program, "--overwrite_output_dir")
    (file,) = folder.glob("*.jaxexport")
    assert not (folder / "unet").exists()
    assert "has no unet/model.onnx" in refusal("--model", folder)
    (folder / "model_index.json").unlink()
    with pytest.raises(SystemExit, match="2"):
        export_model.main(["--run", str(file), "--prompt", "it"])
    assert "is no program of a complete export" in capsys.readouterr().err
    export(model, folder, *OPENVINO, "--overwrite_output_dir")
    files = {"config.json", "openvino_model.xml", "openvino_model.bin"}
    assert {x.name for x in (folder / "unet").iterdir()} == files
    assert not [*folder.glob("*.jaxexport"), *folder.glob("weights*"), *folder.glob("image*")]
