"""The model card of a run."""

import json
import os
import shlex
import sys
from types import SimpleNamespace

from helpers import ROOT
from huggingface_hub import ModelCard

import flax_train_instruct_pix2pix as trainer
from diffusers_flax.training.publishing import write_card

PIPELINE = SimpleNamespace(
    torch_class_name="StableDiffusionInstructPix2PixPipeline",
    unet=SimpleNamespace(takes_reference=False),
    scheduler=SimpleNamespace(is_flow=False),
)


def card_of(folder, metrics=None, **flags):
    flags = {
        "pretrained_model_name_or_path": "stable-diffusion-v1-5/stable-diffusion-v1-5",
        "unet_model_name_or_path": "modified_unet",
        "output_dir": str(folder),
    } | flags
    write_card(trainer.Config(**flags), PIPELINE, metrics, (7.5, 1.5))
    return ModelCard.load(folder / "README.md")


def test_model_card(tmp_path, monkeypatch):
    flags = dict(validation_prompt=("make it\n| red",), learning_rate=5e-5)
    run = dict(metrics={"step": 50, "loss": 0.12345678})
    run |= dict(push_to_hub=True, hub_model_id="tester/model")
    monkeypatch.setattr(sys, "argv", ["/x/train.py", "--validation_prompt", "make it | red"])
    card = card_of(tmp_path, **run, **flags)
    assert card.data.base_model == "stable-diffusion-v1-5/stable-diffusion-v1-5"
    assert card.data.library_name == "diffusers"
    assert card.data.pipeline_tag == "image-to-image"
    assert {"stable-diffusion", "instruct-pix2pix", "jax"} <= set(card.data.tags)
    assert card.data.license is None
    lines = card.text.splitlines()
    assert "# tester/model" in lines
    assert "python train.py --validation_prompt 'make it | red'" in lines
    values = json.loads(card.text.split("```json\n")[1].split("```")[0])
    assert values["metrics"] == run["metrics"]
    assert values["flags"]["learning_rate"] == 5e-5
    assert "![" not in card.text
    assert os.listdir(tmp_path) == ["README.md"]
    (tmp_path / "loss.png").touch()
    (tmp_path / "validation").mkdir()
    (tmp_path / "validation" / "step-50.png").touch()
    text = card_of(tmp_path, **run, **flags).text
    assert "](loss.png)" in text and "](validation/step-50.png)" in text


def test_model_card_code_runs_as_python_and_shell(tmp_path):
    name = tmp_path / "my model's"
    name.mkdir()
    text = card_of(name).text
    python = text.split("```python\n")[1].split("```")[0]
    compile(python, "card", "exec")
    assert json.dumps(str(name)) in python
    shell = text.split("```sh\n")[1].split("```")[0]
    words = shlex.split(shell)
    assert words[:4] == ["python", "edit_cli.py", "--model", str(name)]
    assert (ROOT / "edit_cli.py").exists()


def test_model_card_of_a_local_base_model(tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    card = card_of(tmp_path, pretrained_model_name_or_path=str(base))
    assert "base_model" not in card.data.to_dict()
