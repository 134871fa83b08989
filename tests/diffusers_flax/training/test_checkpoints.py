"""Which checkpoint a run starts from, and what a refused run is told."""

import os
import re

import numpy as np
import pytest

import flax_train_instruct_pix2pix as trainer
from diffusers_flax.loading.directories import LORA_FILE
from diffusers_flax.training.checkpoints import CheckpointFiles, find_checkpoint


def make_small_run(out, step, num_steps, final="model_index.json", components=("unet",)):
    """The directory of a run with a checkpoint and, if final, a newer model."""
    checkpoints = CheckpointFiles(out / "checkpoints")
    run = {"identity": {"max_train_steps": num_steps, "seed": 3}}
    checkpoints.save(step, {"x": np.zeros(1)}, run)
    checkpoints.close()
    os.utime(out / "checkpoints" / str(step), (10, 10))
    for component in components:
        (out / component).mkdir()
    if final:
        (out / final).touch()


def find(out, num_steps, seed=3, **flags):
    """The step at which a run of small_run's directory starts."""
    config = trainer.Config("", "", output_dir=str(out), **flags)
    checkpoints, step, _ = find_checkpoint(config, {"max_train_steps": num_steps, "seed": seed})
    if checkpoints:
        checkpoints.close()
    return step


def test_a_finished_run_is_replaced_only_if_it_cannot_go_on(tmp_path, capsys):
    """With --overwrite_output_dir, which commands that are repeated often contain."""
    make_small_run(tmp_path, 30, 30)
    replaced = "starts again, replacing the finished run of 30 steps"
    for num_steps, flags, start, line in (
        (60, {}, 30, ""),
        (60, {"seed": 4}, 0, f"{replaced} (seed was 3 and is 4)\n"),
        (60, {"lr_scheduler": "cosine"}, 0, f"{replaced}\n"),
        (30, {}, 0, f"{replaced}\n"),
        (20, {}, 0, f"{replaced}\n"),
    ):
        assert find(tmp_path, num_steps, overwrite_output_dir=True, **flags) == start
        assert capsys.readouterr().out == line
    assert find(tmp_path, 60) == 30
    (tmp_path / "model_index.json").unlink()  # killed before its model was written
    assert find(tmp_path, 30, overwrite_output_dir=True) == 30


def test_a_checkpoint_from_before_a_flag_has_its_default(tmp_path):
    make_small_run(tmp_path, 20, 30, final="", components=())
    config = trainer.Config("", "", output_dir=str(tmp_path))
    identity = {"max_train_steps": 30, "seed": 3}
    flags = {"mask_loss_weight": 1.0, "train_data_weights": (), "mask_column": ""}
    checkpoints, step, _ = find_checkpoint(config, identity | flags)
    checkpoints.close()
    assert step == 20
    with pytest.raises(ValueError, match=r"another run: mask_loss_weight was 1\.0 and is 3\.0"):
        find_checkpoint(config, identity | flags | {"mask_loss_weight": 3.0})


def test_a_run_without_its_last_checkpoint_is_not_started_again(tmp_path):
    """The model may be older than the run; a copy of the directory does not keep its time."""
    make_small_run(tmp_path, 20, 30)
    for num_steps in (30, 60):
        assert find(tmp_path, num_steps, overwrite_output_dir=True) == 20


@pytest.mark.parametrize(
    ("run", "num_steps", "flags", "advice"),
    [
        ({}, 30, {}, "contains a model; its run had 30 steps; give more to train it longer; or"),
        # more would be refused
        (
            {},
            30,
            {"lr_scheduler": "cosine"},
            "its run had 30 steps; train its UNet further with --unet_model_name_or_path OUT/unet",
        ),
        (
            {"step": 20, "final": "", "components": ()},
            60,
            {"lr_scheduler": "cosine"},
            "cosine has lowered .* for 30; .* further with --unet_model_name_or_path OUT/unet, and",
        ),
        ({"step": 20, "final": ""}, 10, {}, "its checkpoint has done 20; give 20 or more, or"),
        # no run starts from a LoRA
        (
            {"final": LORA_FILE, "components": ()},
            60,
            {"lr_scheduler": "cosine", "lora_rank": 4},
            "cosine has lowered the learning rate for 30; name another --output_dir$",
        ),
    ],
)
def test_a_refused_length_comes_with_what_to_do(tmp_path, run, num_steps, flags, advice):
    make_small_run(tmp_path, **{"step": 30, "num_steps": 30} | run)
    with pytest.raises(ValueError) as refusal:
        find(tmp_path, num_steps, **flags)
    message = str(refusal.value).replace(str(tmp_path), "OUT")
    assert re.search(advice, message), message


@pytest.mark.parametrize("decayed", [False, True])
def test_a_cosine_within_its_warm_up_goes_on(tmp_path, decayed):
    make_small_run(tmp_path, 10, 30, final="")
    flags = dict(lr_scheduler="cosine", lr_warmup_steps=9 if decayed else 10)
    if decayed:
        with pytest.raises(ValueError, match="has lowered the learning rate"):
            find(tmp_path, 40, **flags)
    else:
        assert find(tmp_path, 40, **flags) == find(tmp_path, 20, **flags) == 10
