"""Flags that the trainer refuses before it reads anything."""

import sys
from pathlib import Path

import pytest
from trainer_runs import config_of, flags_of, run_badly

import flax_train_instruct_pix2pix as trainer
from diffusers_flax.training.flags import LORA_FILE

SCHEDULE_FREE = {"optimizer": "schedule_free", "ema": "none", "lr_scheduler": "constant"}
BAD_FLAGS = [
    ({"train_batch_size": 6}, "--train_batch_size 6 is not divisible by 4 devices; try 4 or 8"),
    ({"gradient_accumulation_steps": 3}, "steps 3 must divide the 2 pairs per device"),
    ({"train_batch_size": 0}, "--train_batch_size 0 must be at least 1"),
    ({"learning_rate": float("nan")}, "--learning_rate nan must be"),
    ({"conditioning_dropout_prob": 0.34}, "--conditioning_dropout_prob 0.34 must be"),
    ({"lr_warmup_steps": 5}, "steps 5 must be below --max_train_steps 5"),
    ({"ema": "full", "ema_start_step": 3}, "goes with --ema late, not full"),
    ({"ema": "power", "ema_decay": 0.9}, "go with --ema late or full, not power"),
    ({"ema_start_step": 5}, "must leave an update in the run of 5 steps"),
    ({"ema": "power", "ema_every": 2, "ema_snapshot_steps": 3}, "3 must be a multiple"),
    ({"num_train_epochs": 2}, "--num_train_epochs 2 and --max_train_steps 5 both set the length"),
    ({"ema_snapshot_steps": 2}, "--ema_snapshot_steps 2 goes with --ema power, not late"),
    ({"validation_guidance_scale": 2.0}, "scale 2.0 goes with --validation_image; name an image"),
    ({"lora_alpha": 2.0}, "--lora_alpha 2.0 goes with --lora_rank"),
    ({"lora_rank": 4, "ema": "power"}, "--ema power does not go with --lora_rank"),
    ({"optimizer": "schedule_free"}, "averages the weights itself; add --ema none"),
    (SCHEDULE_FREE | {"adam_beta1": 0.0}, "divides by --adam_beta1 0"),
    ({"optimizer": "adafactor", "adam_beta1": 0.8}, "0.8 goes with another --optimizer than"),
    ({"optimizer": "lion"}, "--adam_epsilon 0.001 goes with --optimizer adamw, muon or"),
    ({"validation_prompt": ("x",)}, "0 --validation_image and 1 --validation_prompt do not match"),
    ({"profile_steps": "3"}, "--profile_steps 3 must be FIRST:LAST"),
    ({"num_processes": 2}, "go together; give all three"),
    ({"unet_model_name_or_path": "run"}, "run is a pipeline; give run/unet"),
    ({"output_dir": "file"}, "no directory that you can write to"),
    ({"output_dir": "file/out"}, "no directory that you can write to"),
    ({"output_dir": "own"}, "--output_dir own is not empty (README.md); name another directory"),
    ({"output_dir": "finished"}, "--output_dir finished contains a model and no checkpoint"),
    ({"output_dir": "lora"}, "--output_dir lora contains a model and no checkpoint"),
    ({"output_dir": "."}, "--output_dir . is "),
    ({"output_dir": "d", "train_data_dir": ("./d",)}, "--output_dir d is --train_data_dir too"),
]


@pytest.mark.parametrize(("flags", "message"), BAD_FLAGS)
def test_bad_flags_are_refused_before_anything_is_read(
    tmp_path, monkeypatch, capsys, flags, message
):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("finished").mkdir()
    Path("finished/model_index.json").touch()
    Path("lora").mkdir()
    Path("lora", LORA_FILE).touch()
    Path("run/unet").mkdir(parents=True)
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
