"""ema_posthoc.py: averages of other lengths, from snapshots of a random walk; bad input."""

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionInstructPix2PixPipeline, UNet2DConditionModel
from helpers import files_of
from mount_points import refuse_to_rename_folders
from safetensors.numpy import load_file
from tiny_models import make_tiny_pipeline

import ema_posthoc
from diffusers_flax.pipelines.instruct_pix2pix import FlaxStableDiffusionInstructPix2PixPipeline
from diffusers_flax.training.ema import SIGMA_RELS, sigma_rel_to_gamma

WEIGHTS = "diffusion_pytorch_model.safetensors"
PARTS = ["model_index.json", "scheduler", "text_encoder", "tokenizer", "unet", "vae"]


def track(steps, gammas, every):
    """Power-function averages in float64: {step: (len(gammas), P)} at every so many steps."""
    averages, kept = np.zeros((len(gammas), steps.shape[1])), {}
    for n, params in enumerate(steps, start=1):
        decays = np.array([(1 - 1 / n) ** (gamma + 1) for gamma in gammas])[:, None]
        averages = decays * averages + (1 - decays) * params
        if n % every == 0:
            kept[n] = averages
    return kept


def walk(start, num_steps, scale):
    rng = np.random.default_rng(0)
    steps = rng.normal(0, scale, (num_steps, start.size)).astype(np.float32)
    return start + np.cumsum(steps, axis=0, out=steps)


def relative_distance(found, expected, scale):
    return np.linalg.norm(found - expected) / np.linalg.norm(scale)


def name_snapshot(step, sigma_rel):
    return f"{step:08d}-{sigma_rel:.3f}"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The directory of a run with --ema power, and other averages of the same run.

    Returns:
        folder; names and shapes of its UNet's tensors; kept: {step: (4, P)}, the averages of the
        lengths 0.05, 0.1, 0.03 and 0.15.
    """
    root = tmp_path_factory.mktemp("run")
    folder = make_tiny_pipeline(root / "model", unet_channels=(16, 32))
    unet = UNet2DConditionModel.from_pretrained(folder / "unet")
    state = {name: tensor.numpy() for name, tensor in unet.state_dict().items()}
    start = np.concatenate([array.ravel() for array in state.values()])
    gammas = [sigma_rel_to_gamma(sigma_rel) for sigma_rel in (*SIGMA_RELS, 0.03, 0.15)]
    kept = track(walk(start, 60, 0.01), gammas, 4)
    shapes = {name: array.shape for name, array in state.items()}
    for step, averages in kept.items():
        for sigma_rel, average in zip(SIGMA_RELS, averages):
            tensors = {k: torch.tensor(x) for k, x in split(average, shapes).items()}
            unet.load_state_dict(tensors)
            # One snapshot is sharded.
            size = "200KB" if step == 8 else "1GB"
            out = folder / "ema_snapshots" / name_snapshot(step, sigma_rel)
            unet.save_pretrained(out, max_shard_size=size)
    assert len(list((folder / "ema_snapshots" / "00000008-0.050").iterdir())) > 3
    (folder / "ema_snapshots" / ".saving-1").mkdir()  # left by a killed run
    return SimpleNamespace(folder=folder, shapes=shapes, kept=kept)


def split(vector, shapes):
    """{name: float32 array} of a vector of all parameters."""
    ends = np.cumsum([math.prod(shape) for shape in shapes.values()])
    parts = np.split(vector.astype(np.float32), ends[:-1])
    return {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts)}


def read_unet(folder, shapes):
    """The vector of all parameters, as PyTorch reads them."""
    state = UNet2DConditionModel.from_pretrained(folder, subfolder="unet").state_dict()
    assert state.keys() == shapes.keys()
    return np.concatenate([state[name].numpy().ravel() for name in shapes])


def run_posthoc(*args):
    ema_posthoc.main([*map(str, args)])


def test_the_command_line(run, tmp_path, monkeypatch, capsys):
    before = files_of(run.folder)
    monkeypatch.chdir(tmp_path)
    args = ["--train_output_dir", run.folder, "--output_dir", "models"]
    run_posthoc(*args, "--sigma_rel", 0.03, 0.15, 0.05)
    captured = capsys.readouterr()
    assert "30/30" in captured.err and "warning" not in captured.err
    lines = captured.out.splitlines()
    assert lines[0] == "30 snapshots, steps 4 to 60"
    assert lines[-1] == f"saved {tmp_path / 'models' / '0.05'}"
    assert [path.name for path in tmp_path.iterdir()] == ["models"]
    assert files_of(run.folder) == before

    last = run.kept[60]
    for sigma_rel, expected in (("0.03", last[2]), ("0.15", last[3]), ("0.05", last[0])):
        folder = tmp_path / "models" / sigma_rel
        assert sorted(path.name for path in folder.iterdir()) == PARTS
        found = read_unet(folder, run.shapes)
        assert relative_distance(found, expected, last[0] - last[1]) < 0.05
    np.testing.assert_allclose(found, last[0], atol=1e-5)

    # The rest is copied, not linked; both libraries open it.
    for path, content in files_of(folder).items():
        if path.parts[0] != "unet":
            assert content == before[path]
            assert not (folder / path).samefile(run.folder / path)
    pipeline = StableDiffusionInstructPix2PixPipeline.from_pretrained(folder, safety_checker=None)
    state = pipeline.unet.state_dict()
    np.testing.assert_array_equal(
        np.concatenate([state[name].numpy().ravel() for name in run.shapes]), found
    )
    FlaxStableDiffusionInstructPix2PixPipeline.from_pretrained(folder)
    assert json.loads((folder / "unet" / "config.json").read_text())["in_channels"] == 8


def test_an_earlier_step_in_half_precision_over_an_old_model(run, tmp_path, monkeypatch, capsys):
    out = tmp_path / "deep" / "model"
    out.mkdir(parents=True)
    refuse_to_rename_folders(monkeypatch)
    args = ["--train_output_dir", run.folder, "--output_dir", out, "--sigma_rel", 0.15]
    run_posthoc(*args, "--step", 40, "--dtype", "float16")
    assert "20 snapshots, steps 4 to 40" in capsys.readouterr().out
    assert {array.dtype.name for array in load_file(out / "unet" / WEIGHTS).values()} == {"float16"}
    at_40 = run.kept[40]
    found = read_unet(out, run.shapes)
    assert relative_distance(found, at_40[3], at_40[0] - at_40[1]) < 0.05

    (out / "old").touch()
    with pytest.raises(SystemExit):
        run_posthoc(*args)
    assert f"--output_dir {out} is not empty (model_index.json, " in capsys.readouterr().err
    run_posthoc(*args, "--overwrite_output_dir")
    assert sorted(path.name for path in out.iterdir()) == sorted([*PARTS, "old"])
    assert [path.name for path in out.parent.iterdir()] == ["model"]
    assert relative_distance(read_unet(out, run.shapes), run.kept[60][3], at_40[0] - at_40[1]) < 0.1


@pytest.fixture
def small_run(run, tmp_path, monkeypatch):
    """A copy of the run with the snapshots of two steps, to damage, in the working directory.

    Returns:
        its relative path.
    """
    monkeypatch.chdir(tmp_path)
    others = [name_snapshot(step, s) for step in run.kept for s in SIGMA_RELS if step not in (4, 8)]
    shutil.copytree(run.folder, "run", ignore=shutil.ignore_patterns(*others))
    return Path("run")


def remove(name):
    def spoil(folder):
        shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()

    return spoil


def lose_a_shard(folder):
    sorted((folder / "ema_snapshots" / "00000008-0.100").glob("*-of-*"))[0].unlink()


def nothing(folder):
    pass


@pytest.mark.variants
@pytest.mark.parametrize(
    ("spoil", "flags", "message"),
    [
        (nothing, {"sigma_rel": "0.1 0.28"}, "--sigma_rel 0.28 must be above 0 and below 0.28"),
        (nothing, {"train_output_dir": "nowhere"}, "nowhere/ema_snapshots has no snapshots; give"),
        (nothing, {"step": "3"}, "--step 3 has no snapshots; choose from 4, 8"),
        (nothing, {"output_dir": "full"}, "--output_dir full is not empty (0.08); name another"),
        (remove("model_index.json"), {}, "run has snapshots but no model_index.json, so the train"),
        (lose_a_shard, {}, "the snapshot run/ema_snapshots/00000008-0.100 is incomplete"),
    ],
)
def test_bad_input_is_one_line(small_run, capsys, spoil, flags, message):
    spoil(small_run)
    Path("full/0.08").mkdir(parents=True)
    Path("full/0.08/model_index.json").touch()
    paths = sorted(Path().rglob("*"))
    flags = {"train_output_dir": "run", "output_dir": "out", "sigma_rel": "0.08"} | flags
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        run_posthoc(*(x for name, value in flags.items() for x in (f"--{name}", *value.split())))
    assert stop.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert message in lines[-1]
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:]
    assert sorted({*Path().rglob("*")} - {Path("out")}) == paths  # an empty directory
