"""Interrupted, killed and repeated exports."""

import shutil
import subprocess
import sys

import pytest
from exported import MODELS, OPENVINO, export, needs, ours_and_theirs, refusal
from helpers import ROOT, psnr

import export_model


@needs("onnx")
def test_killed_export(exports, tmp_path):
    """The export before it still runs, a new directory is refused; the next start cleans up."""
    model, whole = exports("text")
    other = MODELS["edit"](tmp_path / "other")
    shutil.copytree(whole, old := tmp_path / "old")
    code = (
        "import os, signal, sys, export_model; from diffusers_flax.exporting import folders;"
        "folders.compare_with_flax = lambda *args: os.kill(os.getpid(), signal.SIGKILL);"
        "export_model.main(sys.argv[1:])"
    )
    for folder in (old, new := tmp_path / "new", new):
        flags = ["--model", other, "--output_dir", folder, "--overwrite_output_dir"]
        done = subprocess.run([sys.executable, "-c", code, *flags], cwd=ROOT)
        assert done.returncode == -9
        assert len(list(folder.glob(".saving-*"))) == 1
    ours, theirs = ours_and_theirs(model, old, tmp_path)
    assert psnr(ours, theirs) > 60
    assert "is no complete export" in refusal("--model", new)


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
