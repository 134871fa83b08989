"""Which checkpoint a run starts from, and what a refused run is told."""

import json
import os
import re

import pytest

import flax_train_instruct_pix2pix as trainer
from diffusers_flax.training.checkpoints import find_checkpoint, read_arrays


def make_small_run(out, step=30, num_steps=30, finished=True):
    """The directory of a run with a checkpoint, without arrays, and a newer model if finished."""
    checkpoint = out / "checkpoints" / str(step)
    (checkpoint / "run").mkdir(parents=True)
    record = {"identity": {"max_train_steps": num_steps, "seed": 3}}
    (checkpoint / "run" / "metadata").write_text(json.dumps(record))
    os.utime(checkpoint, (10, 10))
    if finished:
        (out / "model_index.json").touch()


def find(out, num_steps, identity=None, **flags):
    """The step at which a run of make_small_run's directory starts."""
    config = trainer.Config("", "", output_dir=str(out), **flags)
    identity = {"max_train_steps": num_steps, "seed": 3} | (identity or {})
    path, record = find_checkpoint(config, identity)
    assert bool(record) == bool(path)
    return int(path.name) if path else 0


def test_a_finished_run_is_replaced_only_if_it_cannot_go_on(tmp_path, capsys):
    """With --overwrite_output_dir, which commands that are repeated often contain."""
    make_small_run(tmp_path)
    replaced = "starts again, replacing the finished run of 30 steps\n"
    for num_steps, identity, flags, start in (
        (60, {}, {}, 30),
        (60, {"seed": 4}, {}, 0),
        (60, {}, {"lr_scheduler": "cosine"}, 0),
        (30, {}, {}, 0),
        (20, {}, {}, 0),
    ):
        assert find(tmp_path, num_steps, identity, overwrite_output_dir=True, **flags) == start
        assert capsys.readouterr().out == ("" if start else replaced)
    assert find(tmp_path, 60) == find(tmp_path, 30) == 30
    (tmp_path / "model_index.json").unlink()  # killed before its model was written
    assert find(tmp_path, 30, overwrite_output_dir=True) == 30
    assert find(tmp_path, 30, resume_from_checkpoint="none") == 0


@pytest.mark.parametrize(
    ("num_steps", "identity", "flags", "message"),
    [
        (30, {"seed": 4}, {}, "20 belongs to another run: seed was 3 and is 4. Change"),
        (30, {"mask_loss_weight": 3.0}, {}, r"mask_loss_weight was 1\.0 and is 3\.0"),  # new flag
        (10, {}, {}, "its checkpoint has done 20; give 20 or more, or"),
        (60, {}, {"lr_scheduler": "cosine"}, "cosine has lowered the learning rate for 30; train"),
        (30, {}, {"resume_from_checkpoint": "nowhere"}, "nowhere is not a checkpoint; give latest"),
    ],
)
def test_another_run_is_refused(tmp_path, num_steps, identity, flags, message):
    make_small_run(tmp_path, step=20, finished=False)
    with pytest.raises(ValueError) as refusal:
        find(tmp_path, num_steps, identity, **flags)
    assert re.search(message, str(refusal.value)), refusal.value


def test_a_damaged_checkpoint_is_named(tmp_path):
    make_small_run(tmp_path, step=20, finished=False)
    (tmp_path / "checkpoints/20/run/metadata").write_text("{")
    with pytest.raises(ValueError, match=r"checkpoints/20 is damaged .*; remove this directory"):
        find(tmp_path, 30)
    with pytest.raises(ValueError, match=r"checkpoints/20 is damaged .*; remove this directory"):
        read_arrays(tmp_path / "checkpoints/20")


def test_a_cosine_within_its_warm_up_and_default_values_of_new_flags_go_on(tmp_path):
    make_small_run(tmp_path, step=10, finished=False)
    cosine = dict(lr_scheduler="cosine", lr_warmup_steps=10)
    new = {"mask_loss_weight": 1.0, "train_data_weights": (), "mask_column": ""}
    assert find(tmp_path, 40, new, **cosine) == find(tmp_path, 20, **cosine) == 10
