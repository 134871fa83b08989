"""The output directory: finished runs, files of a replaced model, uploads to the hub."""

import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT
from hub_upload_server import UploadHub

import flax_train_instruct_pix2pix as trainer
from diffusers_flax.training.output import check_output_dir
from diffusers_flax.training.processes import locked


def test_a_model_without_complete_checkpoints_is_not_overwritten(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "model_index.json").touch()
    config = trainer.Config("base", "unet", output_dir=str(tmp_path))
    with pytest.raises(ValueError, match="contains a model and no checkpoint"):
        check_output_dir(config)
    check_output_dir(replace(config, overwrite_output_dir=True))
    (tmp_path / "checkpoints" / "3").mkdir()
    check_output_dir(config)
    with pytest.raises(ValueError, match="contains a model and no checkpoint"):
        check_output_dir(replace(config, resume_from_checkpoint="none"))


def test_one_run_has_the_directory(tmp_path, monkeypatch):
    """A directory that the lock has made, and nothing else is in, goes with it."""
    monkeypatch.setattr("diffusers_flax.training.processes.LOCK_SECONDS", 0.1)
    folder = tmp_path / "new"
    for _ in range(2):
        with (
            locked(folder),
            pytest.raises(ValueError, match=f"--output_dir {folder} is in use by another run"),
            locked(folder),
        ):
            pass
    assert not folder.exists()


# The hub

TOKEN = "hf_stand_in_5f0c"
PUBLISH = """
import sys
from flax_train_instruct_pix2pix import Config
from diffusers_flax.training.publishing import check_hub, push_to_hub
config = Config("", "", output_dir=sys.argv[1], hub_model_id=sys.argv[2] or None)
try:
    print(push_to_hub(config.output_dir, check_hub(config)))
except ValueError as error:
    sys.exit(f"error: {error}")
"""
PUBLISHED = {
    "README.md": b"---\ntags:\n- jax\n---\n# model\n",
    "model_index.json": b"{}",
    "config.json": b"{}",
    "metrics.jsonl": b'{"step": 1}\n',
    "unet/config.json": b"{}",
    "unet/diffusion_pytorch_model.safetensors": np.random.default_rng(0).bytes(300_000),
    "vae/diffusion_pytorch_model.safetensors": np.random.default_rng(1).bytes(1000),
    "validation/step-1.png": np.random.default_rng(2).bytes(500),
}
KEPT = [
    "checkpoints/100/params/shard.bin",
    "ema_snapshots/100.safetensors",
    "unet_raw/diffusion_pytorch_model.safetensors",
    "profile/plugins/trace.json.gz",
    "wandb/offline-run-1/run-1.wandb",
    "wandb_run_id",
    ".metrics.jsonl.part",
    "unet/.saving-abc/diffusion_pytorch_model.safetensors",
]


@pytest.fixture
def model_folder(tmp_path):
    folder = tmp_path / "my-model"
    for path, content in PUBLISHED.items() | {path: b"kept" for path in KEPT}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return folder


def hub_environment(endpoint, folder, token=TOKEN):
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(folder.parent / "home"),  # nobody's stored token
        "HF_ENDPOINT": endpoint,
        "HF_TOKEN": token,
        "HF_HUB_DISABLE_XET": "1",  # the stand-in stores over LFS
        "HF_HUB_DISABLE_UPDATE_CHECK": "1",
        "NO_PROXY": "127.0.0.1",
    }


def publish(endpoint, folder, repo_id="", token=TOKEN):
    """Run check_hub and push_to_hub; returns (stdout, last line of stderr)."""
    done = subprocess.run(
        [sys.executable, "-c", PUBLISH, str(folder), repo_id],
        cwd=ROOT,
        env=hub_environment(endpoint, folder, token),
        capture_output=True,
        text=True,
    )
    assert "hf_" not in done.stdout + done.stderr  # no token is shown
    assert "Traceback" not in done.stderr
    return done.stdout.strip(), done.stderr.splitlines()[-1] if done.returncode else ""


@pytest.mark.slow
def test_upload(model_folder):
    """Also to a repository that exists; files that do not belong to the model stay here."""
    with UploadHub({TOKEN: "write"}) as hub:
        found, error = publish(hub.endpoint, model_folder)
        assert (found, error) == (f"{hub.endpoint}/tester/my-model", "")
        assert hub.repos == {"tester/my-model": PUBLISHED}
        changed = model_folder / "unet" / "diffusion_pytorch_model.safetensors"
        changed.write_bytes(b"another training")
        assert publish(hub.endpoint, model_folder, "tester/my-model")[1] == ""
        files = hub.repos["tester/my-model"]
        assert files == PUBLISHED | {str(changed.relative_to(model_folder)): b"another training"}


@pytest.mark.slow
def test_failed_upload_tells_the_way_by_hand(model_folder):
    with UploadHub({TOKEN: "write"}) as hub:
        hub.failures["/commit/main"] = [(500, {"error": "disk on fire"})]
        _, line = publish(hub.endpoint, model_folder)
        assert f"the model is in {model_folder}" in line and "disk on fire" in line
        command = shlex.split(line.split("later: ")[1])
        command[0] = str(Path(sys.executable).parent / "hf")
        subprocess.run(
            command,
            env=hub_environment(hub.endpoint, model_folder),
            cwd=model_folder.parent,
            check=True,
            capture_output=True,
        )
        assert hub.repos == {"tester/my-model": PUBLISHED}


@pytest.mark.slow
def test_what_the_hub_refuses_is_known_before_training(tmp_path):
    with UploadHub({TOKEN: "write"}) as hub:
        for repo_id, token, message in (
            ("somebody/model", TOKEN, "You may not create somebody/model"),
            ("no such name", TOKEN, "no such name cannot be made: "),
            ("model", "", "model cannot be made: "),
        ):
            _, line = publish(hub.endpoint, tmp_path, repo_id, token)
            assert message in line and "run `hf auth login` or set HF_TOKEN" in line
        assert hub.repos == {}
