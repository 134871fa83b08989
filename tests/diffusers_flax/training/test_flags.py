"""Flags that the trainer refuses before it reads anything."""

import sys
from pathlib import Path

import pytest
from shards import random_png
from trainer_runs import config_of, flags_of, run_badly

import flax_train_instruct_pix2pix as trainer
from diffusers_flax.training.flags import LORA_FILE

# flags, {relative path: damage}, message
BAD_FLAGS = [
    ({"train_batch_size": 6}, "--train_batch_size 6 is not divisible by 4 devices; try 4 or 8"),
    ({"train_batch_size": 3}, "--train_batch_size 3 is not divisible by 4 devices; try 4\n"),
    ({"train_batch_size": 0}, "--train_batch_size 0 must be at least 1"),
    ({"learning_rate": float("nan")}, "--learning_rate nan must be above 0"),
    ({"adam_beta1": 1.0}, "--adam_beta1 1.0 must be at least 0 and below 1"),
    ({"adam_weight_decay": -0.1}, "--adam_weight_decay -0.1 must be at least 0"),
    ({"conditioning_dropout_prob": 0.34}, "--conditioning_dropout_prob 0.34 must be from 0 to 1/3"),
    (
        {"lr_warmup_steps": 5},
        "steps 5 must be at least 0 and below --max_train_steps 5",
    ),
    ({"ema": "full", "ema_start_step": 3}, "--ema_start_step 3 goes with --ema late, not full"),
    ({"num_train_epochs": 2}, "--num_train_epochs 2 and --max_train_steps 5 both set the length"),
    ({"ema_snapshot_steps": 2}, "--ema_snapshot_steps 2 goes with --ema power, not late"),
    ({"ema": "power", "ema_decay": 0.9}, "--ema_decay 0.9 goes with --ema late or full, not power"),
    (
        {"validation_image": ("a.png", "b.png"), "validation_prompt": ("x", "y", "z")},
        "2 --validation_image and 3 --validation_prompt do not match",
    ),
    ({"validation_prompt": ("x",)}, "0 --validation_image and 1 --validation_prompt do not match"),
    (
        {"validation_image": ("file",)},
        "1 --validation_image and 0 --validation_prompt do not match",
    ),
    (
        {"validation_image": ("a.png",), "validation_prompt": ("x",)},
        "--validation_image a.png does not exist",
    ),
    (
        {"validation_image": ("cut.png",), "validation_prompt": ("x",)},
        "--validation_image cut.png cannot be read as an image",
    ),
    ({"profile_steps": "3"}, "--profile_steps 3 must be FIRST:LAST"),
    (
        {"output_dir": "own"},
        "--output_dir own is not empty (README.md); name another directory, or replace",
    ),
    ({"validation_guidance_scale": 2.0}, "scale 2.0 goes with --validation_image; name an image"),
    ({"validation_image_guidance_scale": -1.0}, "scale -1.0 must be at least 0 and finite"),
    ({"output_dir": "file/out"}, "--output_dir file/out cannot be written: "),
    (
        {"ema": "power", "ema_every": 2, "ema_snapshot_steps": 3},
        "3 must be a multiple",
    ),
    ({"hub_model_id": "me/model"}, "--hub_model_id me/model goes with --push_to_hub"),
    ({"num_processes": 2}, "--num_processes and --process_id go together; give all three"),
    (
        {"coordinator_address": "localhost:1", "num_processes": 2, "process_id": 2},
        "--process_id 2 must be from 0 to 1",
    ),
    ({"seed": 2**32}, "--seed 4294967296 must be from 0 to 4294967295"),
    ({"gradient_accumulation_steps": 3}, "steps 3 must divide the 2 pairs per device"),
    ({"snr_gamma": 0.0}, "--snr_gamma 0.0 must be above 0 and finite"),
    ({"ema_every": 0}, "--ema_every 0 must be from 1 to the averaged steps"),
    ({"ema_fraction": 1.5}, "--ema_fraction 1.5 must be above 0 and at most 1, a window as long"),
    ({"ema": "none", "ema_warmup": True}, "--ema_warmup True goes with --ema late or full"),
    ({"ema_start_step": 5}, "--ema_start_step 5 must be from 0 to --max_train_steps - 1, 4"),
    ({"ema_decay": 1.0}, "--ema_decay 1.0 must be at least 0 and below 1"),
    ({"output_dir": "file"}, "--output_dir file is a file; name a directory"),
    ({"output_dir": ""}, "--output_dir is empty; name a directory"),
    (
        {"output_dir": "nowhere"},
        "--output_dir nowhere is or contains --pretrained_model",
    ),
    ({"output_dir": "finished"}, "--output_dir finished contains a model; name another"),
    ({"output_dir": "finished", "lora_rank": 4}, "--output_dir finished contains a model"),
    ({"output_dir": "lora"}, "--output_dir lora contains a model; name another"),
    (
        {"output_dir": "file", "pretrained_vae_model_name_or_path": "file/vae"},
        "--output_dir file is a file",
    ),
    (
        {"output_dir": "out", "pretrained_vae_model_name_or_path": "out/vae"},
        "--output_dir out is or contains --pretrained_vae_model_name_or_path out/vae; name another",
    ),
    ({"output_dir": "."}, "--output_dir . is or contains --pretrained_model_name_or_path"),
    ({"output_dir": "d", "train_data_dir": ("./d",)}, "--output_dir d is --train_data_dir too"),
    ({"learning_rate": float("inf")}, "--learning_rate inf must be above 0 and finite"),
]


@pytest.mark.variants
@pytest.mark.parametrize(("flags", "message"), BAD_FLAGS)
def test_bad_flags_are_refused_before_anything_is_read(
    tmp_path, monkeypatch, capsys, flags, message
):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("cut.png").write_bytes(random_png(0)[:-100])
    Path("finished").mkdir()
    Path("finished/model_index.json").touch()
    Path("lora").mkdir()
    Path("lora", LORA_FILE).touch()
    Path("own").mkdir()
    Path("own/README.md").touch()
    config = config_of("nowhere", "nowhere", "out", **flags)
    assert message in run_badly(config, monkeypatch, capsys)


def test_an_unknown_schedule_is_refused_by_name(monkeypatch, capsys):
    args = flags_of(config_of("nowhere", "nowhere", "out", lr_scheduler="polynomial"))
    monkeypatch.setattr(sys, "argv", ["train", *args])
    with pytest.raises(SystemExit) as stop:
        trainer.main(sys.argv[1:])
    assert stop.value.code == 2
    assert "polynomial" in capsys.readouterr().err
