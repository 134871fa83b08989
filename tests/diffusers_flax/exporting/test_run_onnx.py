"""examples/run_onnx.py: its schedulers, images and errors."""

import json
import subprocess
import sys

import numpy as np
import pytest
from exported import (
    MODELS,
    export,
    needs,
    ours_and_theirs,
    refusal,
    run_example,
    write_scheduler,
)
from helpers import photo, psnr
from PIL import Image
from trajectories import (
    STABLE_DIFFUSION,
    START,
    model,
    torch_class,
    torch_trajectory,
)

from examples import run_onnx

V, ZERO_SNR = {"prediction_type": "v_prediction"}, {"rescale_betas_zero_snr": True}

SPACINGS = [{"timestep_spacing": x, "steps_offset": 1} for x in ("leading", "linspace", "trailing")]

OPTIONS = {  # of schedulers; what is left out is the default of diffusers' class
    "ddim": [{"clip_sample_range": 0.5}, {"set_alpha_to_one": False, "clip_sample": False}],
    "euler": [],
    "dpmsolver++": [],
}

EULER = {"_class_name": "EulerDiscreteScheduler", "beta_schedule": "linear"}

SOLVER = {"_class_name": "DPMSolverMultistepScheduler", "beta_schedule": "linear"}

LACKING = [  # (content, --scheduler, what is said)
    (SOLVER | {"solver_order": 3}, None, "solver_order=3; this example has 2"),
]


@pytest.mark.filterwarnings("ignore:__array__:DeprecationWarning")  # of diffusers
@pytest.mark.parametrize("name", OPTIONS)
def test_steps_of_run_onnx_match_pytorch(tmp_path, monkeypatch, name):
    cases = [{}, *OPTIONS[name], *SPACINGS, *(spacing | V for spacing in SPACINGS)]
    cases += [{"beta_schedule": "linear"}, {"beta_start": 0.001}]
    cases += [spacing | V | ZERO_SNR for spacing in SPACINGS]
    for options in cases:
        config = STABLE_DIFFUSION | options
        content = config | {"_class_name": torch_class(name).__name__}
        scheduler = run_onnx.read_scheduler(write_scheduler(tmp_path, content))
        for num_steps in (1, 3, 20):
            timesteps, samples = torch_trajectory(name, config, num_steps, monkeypatch)
            visited = []

            def predict(x, t, visited=visited):
                visited.append(t)
                return model(x, t)

            planned = run_onnx.plan(*scheduler, num_steps)
            found = run_onnx.denoise(predict, START, *scheduler, planned)
            np.testing.assert_allclose(visited, timesteps, atol=1e-3)
            # With a sigma of 4096 diffusers' float32 has three digits left of x_0.
            share = 3e-3 if "rescale_betas_zero_snr" in options and num_steps < 20 else 1e-5
            atol = share * max(1, np.abs(samples[-1]).max())
            np.testing.assert_allclose(found, samples[-1], 0, atol, err_msg=f"{options}")


@pytest.mark.parametrize(("content", "scheduler", "said"), LACKING)
def test_scheduler_entries_that_run_onnx_lacks(tmp_path, content, scheduler, said):
    with pytest.raises(ValueError) as error:
        run_onnx.read_scheduler(write_scheduler(tmp_path, content), scheduler)
    assert said in f"{error.value}\n"


@needs("onnx")
def test_folders_that_run_onnx_refuses(exports, tmp_path):
    model, _ = exports("edit")
    assert "has no unet/model.onnx; export with onnx" in refusal("--model", model)
    assert "is no complete export; make one with export_model.py" in refusal("--model", tmp_path)


@needs("onnx")
def test_scales_up_to_1_are_no_guidance_from_text(exports, tmp_path):
    _, folder = exports("text")
    scales = [["--guidance_scale", scale] for scale in ("0", "0.5", "1", "1.5")]
    images = [run_example(folder, tmp_path / "image.npy", *scale)[0] for scale in scales]
    assert (images[0] == images[2]).all() and (images[1] == images[2]).all()
    assert (images[3] != images[2]).any()


@needs("onnx")
def test_edit_of_a_transparent_photograph(exports, tmp_path):
    """It has the model's size, and is the edit of the photograph on white; progress is printed."""
    _, folder = exports("edit")
    clear = photo(400, 300).convert("RGBA")
    clear.putalpha(100)
    white = Image.alpha_composite(Image.new("RGBA", clear.size, "white"), clear)
    edits = []
    for image in (clear, white.convert("RGB")):
        image.save(file := tmp_path / "in.png")
        edit, written, progress = run_example(folder, tmp_path / "out.npy", "--input", file)
        edits.append(edit)
    assert edits[0].shape == (48, 64, 3) and (edits[0] == edits[1]).all()
    assert written == f"{tmp_path / 'out.npy'}\n"
    assert f"{file}, 400x300, at 64x48 with ddim" in progress and "step 2 of 2" in progress
    run_example(folder, tmp_path / "new" / "out.jpg", "--input", file, "--width", "32")
    with Image.open(tmp_path / "new" / "out.jpg") as written:
        assert written.size == (32, 48)


@needs("onnx")
def test_scheduler_of_an_export(tmp_path):
    """--scheduler takes the place of one that is not supported."""
    model = MODELS["text"](tmp_path / "model")
    write_scheduler(model, EULER | {"_class_name": "UniPCMultistepScheduler"})
    export(model, folder := tmp_path / "export", "--scheduler", "dpmsolver++")
    content = json.loads((folder / "scheduler" / "scheduler_config.json").read_text())
    index = json.loads((folder / "model_index.json").read_text())
    assert content["_class_name"] == index["scheduler"][1] == "DPMSolverMultistepScheduler"
    *_, progress = run_example(folder, tmp_path / "image.png")
    assert "with dpmsolver++" in progress


@needs("onnx")
def test_example_without_jax_and_torch(exports, tmp_path):
    model, folder = exports("xl_edit")
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
    ours, theirs = ours_and_theirs(model, folder, tmp_path, python)
    assert psnr(ours, theirs) > 60
