"""The model card of a run."""

import json
import os
import shlex

from helpers import ROOT
from huggingface_hub import ModelCard

from training.report import write_model_card


def card_of(folder, **changes):
    options = {
        "name": "tester/model",
        "command": "python flax_train_instruct_pix2pix.py --validation_prompt 'make it | red'",
        "config": {
            "pretrained_model_name_or_path": "stable-diffusion-v1-5/stable-diffusion-v1-5",
            "train_data_dir": ("data",),
            "learning_rate": 5e-5,
            "resolution": 256,
            "validation_prompt": "make it\n| red",
            "variant": None,
        },
        "metrics": {"step": 50, "loss": 0.12345678},
        "image": "validation/step-50.png",
    }
    write_model_card(folder, **(options | changes))
    return ModelCard.load(folder / "README.md")


def test_model_card(tmp_path):
    card = card_of(tmp_path)
    assert card.data.base_model == "stable-diffusion-v1-5/stable-diffusion-v1-5"
    assert card.data.library_name == "diffusers"
    assert card.data.pipeline_tag == "image-to-image"
    assert {"stable-diffusion", "instruct-pix2pix", "jax"} <= set(card.data.tags)
    assert card.data.license is None
    lines = card.text.splitlines()
    assert "python flax_train_instruct_pix2pix.py --validation_prompt 'make it | red'" in lines
    assert "| learning_rate | `5e-05` |" in lines
    assert r"| validation_prompt | `'make it\n\| red'` |" in lines
    assert "| loss | `0.1235` |" in lines and "| step | `50` |" in lines
    assert "loss.png" not in card.text
    (tmp_path / "loss.png").touch()
    assert "](loss.png)" in card_of(tmp_path).text
    (tmp_path / "loss.png").unlink()
    assert "](validation/step-50.png)" in card.text
    assert os.listdir(tmp_path) == ["README.md"]


def test_model_card_code_runs_as_python_and_shell(tmp_path):
    name = "out/my model's"
    text = card_of(tmp_path, name=name).text
    python = text.split("```python\n")[1].split("```")[0]
    compile(python, "card", "exec")
    assert json.dumps(name) in python
    shell = text.split("```sh\n")[1].split("```")[0]
    words = shlex.split(shell)
    assert words[:4] == ["python", "edit_cli.py", "--model", name]
    assert (ROOT / "edit_cli.py").exists()


def test_model_card_of_a_local_base_model(tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    card = card_of(
        tmp_path,
        config={
            "pretrained_model_name_or_path": str(base),
            "train_data_dir": ("data",),
            "resolution": 256,
        },
        metrics=None,
        image=None,
    )
    assert "base_model" not in card.data.to_dict()
    assert "![" not in card.text and "metrics" not in card.text
