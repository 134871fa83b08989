"""The output directory: files of a replaced model, finished LoRAs, uploads to the hub."""

import dataclasses
import json
import os
import shlex
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import ROOT
from hub_upload_server import UploadHub

import flax_train_instruct_pix2pix as trainer
from diffusers_flax.loading.directories import CONV_IN_FILE, LORA_FILE
from diffusers_flax.training.flags import write_flags
from diffusers_flax.training.models import WEIGHTS
from diffusers_flax.training.output import (
    check_replaces,
    merges_finished_run,
    remove_replaced_model,
    save_lora_file,
    says_finished,
)


@pytest.mark.parametrize(
    ("finished", "flags", "merges"),
    [
        ((30, None), {"max_train_steps": 30}, True),
        ((30, None), {"max_train_steps": 60}, False),
        ((30, None), {"max_train_steps": 20}, False),
        ((26, 2), {"num_train_epochs": 2}, True),
        ((26, 2), {"num_train_epochs": 8}, False),
        ((26, 2), {"max_train_steps": 26}, True),
        ((26, 2), {}, False),  # 15000
    ],
)
def test_only_a_finished_lora_is_merged_without_training(tmp_path, finished, flags, merges):
    num_steps, num_epochs = finished
    lora = trainer.Config("", "", output_dir=str(tmp_path), lora_rank=4, merge_lora=True)
    before = replace(lora, num_train_epochs=num_epochs)
    config = replace(lora, **flags)
    assert not merges_finished_run(config)
    params = {"q": {"lora_A": {"kernel": np.zeros((8, 4), np.float32)}}}
    params["q"]["lora_B"] = {"kernel": np.zeros((4, 8), np.float32)}
    identity = dict.fromkeys(WEIGHTS, 0) | {"max_train_steps": num_steps}
    save_lora_file(before, params, identity)
    assert merges_finished_run(config) == merges
    assert not merges_finished_run(replace(config, merge_lora=False))
    assert not merges_finished_run(replace(config, overwrite_output_dir=True))
    (tmp_path / "model_index.json").touch()
    assert not merges_finished_run(config)


@pytest.mark.parametrize("name", ["pretrained_model_name_or_path", "unet_model_name_or_path"])
def test_another_model_is_another_run(tmp_path, capsys, name):
    config = trainer.Config("base", "unet", output_dir=str(tmp_path))
    write_flags(tmp_path, config)
    (tmp_path / "model_index.json").touch()
    assert says_finished(config) and says_finished(replace(config, dataloader_num_workers=3))
    assert "nothing is left to do" in capsys.readouterr().out
    assert not says_finished(replace(config, **{name: "other"}))


def test_a_model_without_complete_checkpoints_is_not_overwritten(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "model_index.json").touch()
    config = trainer.Config("base", "unet", output_dir=str(tmp_path))
    with pytest.raises(ValueError, match="contains a model; it has no checkpoint"):
        check_replaces(config)
    check_replaces(replace(config, overwrite_output_dir=True))


def test_a_replaced_model_leaves_no_files(tmp_path):
    """A LoRA's run removes models beside a model_index.json; a full model's removes LoRA files."""
    pipeline = SimpleNamespace(components={"unet": object(), "safety_checker": None})
    lora = trainer.Config("", "", output_dir=str(tmp_path), lora_rank=4)
    full = dataclasses.replace(lora, lora_rank=None)
    merged = dataclasses.replace(lora, merge_lora=True)
    components = {"unet", "vae", "text_encoder_2", "safety_checker"}
    loras = {LORA_FILE, CONV_IN_FILE}
    users = {"notes", "unet_raw", "checkpoints"}

    def left(config, *, index):
        for name in components | users:
            (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / "vae" / "config.json").touch()
        for name in (*loras, *["model_index.json"] * index):
            (tmp_path / name).touch()
        remove_replaced_model(config, pipeline)
        return {path.name for path in tmp_path.iterdir()} - users

    assert left(lora, index=False) == components | loras
    assert left(lora, index=True) == loras
    assert left(full, index=True) == left(merged, index=True) == {"unet", "model_index.json"}
    assert all((tmp_path / name).is_dir() for name in users)
    (tmp_path / "notes" / "config.json").touch()
    (tmp_path / "vae").symlink_to(tmp_path / "notes")  # on another disk
    remove_replaced_model(lora, pipeline)
    assert not (tmp_path / "vae").exists() and (tmp_path / "notes" / "config.json").exists()


TOKEN = "hf_stand_in_5f0c"


# the hub


PUBLISH = """
import sys
from diffusers_flax.training.publishing import check_hub, push_to_hub
try:
    print(push_to_hub(sys.argv[1], check_hub(sys.argv[2] or None, sys.argv[1])))
except ValueError as error:
    sys.exit(f"error: {error}")
"""
CHECKS = """
import json, os, sys
from diffusers_flax.training.publishing import check_hub
for repo_id, os.environ["HF_TOKEN"] in json.loads(sys.argv[2]):
    try:
        print(check_hub(repo_id, sys.argv[1]))
    except ValueError as error:
        print(error)
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


def hub_environment(endpoint, folder):
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(folder.parent / "home"),  # nobody's stored token
        "HF_ENDPOINT": endpoint,
        "HF_TOKEN": TOKEN,
        "HF_HUB_DISABLE_XET": "1",  # the stand-in stores over LFS
        "HF_HUB_DISABLE_UPDATE_CHECK": "1",
        "NO_PROXY": "127.0.0.1",
    }


def run_hub(endpoint, code, folder, argument):
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder), argument],
        cwd=ROOT,
        env=hub_environment(endpoint, folder),
        capture_output=True,
        text=True,
    )
    assert "hf_" not in done.stdout + done.stderr  # no token is shown
    assert "Traceback" not in done.stderr
    return done


def publish(endpoint, folder, repo_id=""):
    """Run check_hub and push_to_hub; returns the finished process."""
    return run_hub(endpoint, PUBLISH, folder, repo_id)


def check(endpoint, folder, *calls):
    """Run check_hub once per (repo_id, token); returns the lines it gave or raised."""
    lines = run_hub(endpoint, CHECKS, folder, json.dumps(calls)).stdout.splitlines()
    assert len(lines) == len(calls)
    return lines


def error_line(done):
    assert done.returncode == 1
    return done.stderr.splitlines()[-1].removeprefix("error: ")


@pytest.mark.slow
def test_upload(model_folder):
    with UploadHub({TOKEN: "write"}) as hub:
        done = publish(hub.endpoint, model_folder)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == f"{hub.endpoint}/tester/my-model"
        assert hub.repos == {"tester/my-model": PUBLISHED}
        large = {c for path, c in PUBLISHED.items() if path.endswith((".safetensors", ".png"))}
        assert set(hub.lfs.values()) == large
        changed = model_folder / "unet" / "diffusion_pytorch_model.safetensors"
        changed.write_bytes(b"another training")
        done = publish(hub.endpoint, model_folder, "tester/my-model")  # it exists by now
        assert done.returncode == 0, done.stderr
        files = hub.repos["tester/my-model"]
        assert files == PUBLISHED | {str(changed.relative_to(model_folder)): b"another training"}
    for file in model_folder.rglob("*"):
        assert not file.is_file() or TOKEN.encode() not in file.read_bytes()


@pytest.mark.slow
def test_failed_upload_tells_the_way_by_hand(model_folder):
    with UploadHub({TOKEN: "write"}) as hub:
        hub.failures["/commit/main"] = [(500, {"error": "disk on fire"})]
        line = error_line(publish(hub.endpoint, model_folder))
        assert f"the model is in {model_folder}" in line and "disk on fire" in line
        assert hub.repos == {"tester/my-model": {}}
        command = shlex.split(line.split("later: ")[1])
        assert command[0] == "hf"
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
def test_check_before_training(tmp_path):
    read_token = "hf_read"
    with UploadHub({TOKEN: "write", read_token: "read"}) as hub:
        calls = {
            "new": (None, TOKEN),
            "again": ("not-yet-there", TOKEN),
            "of somebody": ("somebody/model", TOKEN),
            "bad name": ("no such name", TOKEN),
            "wrong token": ("model", "hf_wrong"),
            "no token": ("model", ""),
            "torn token": ("model", "hf_tor\x0bn"),
            # Finds the repository that is there: the upload would fail, a day later.
            "read token": ("not-yet-there", read_token),
            "read token, new": ("another", read_token),
        }
        lines = dict(zip(calls, check(hub.endpoint, tmp_path / "not-yet-there", *calls.values())))
        assert hub.repos == {"tester/not-yet-there": {}}
    assert lines["new"] == lines["again"] == "tester/not-yet-there"
    assert "You may not create somebody/model" in lines["of somebody"]
    assert lines["bad name"].startswith("--hub_model_id tester/no such name: ")
    assert "HF_TOKEN environment variable is invalid" in lines["wrong token"]
    assert "nobody is logged in" in lines["no token"]
    assert "contains an invalid character" in lines["torn token"]
    assert "the token of tester is read-only" in lines["read token"]
    assert "You may not create tester/another" in lines["read token, new"]
    for name in calls.keys() - {"new", "again", "bad name"}:
        assert "run `hf auth login` or set HF_TOKEN" in lines[name]


@pytest.mark.slow
def test_hub_unreachable(tmp_path):
    with socket.socket() as nobody_listens:
        nobody_listens.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{nobody_listens.getsockname()[1]}"
        (line,) = check(endpoint, tmp_path, ("model", TOKEN))
    assert endpoint in line and "check network and HF_ENDPOINT" in line
