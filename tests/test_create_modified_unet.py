"""create_modified_unet.py by its command line: its output, its self-check, bad input."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import UNet2DConditionModel
from safetensors.numpy import load_file
from tiny_models import make_tiny_pipeline, make_tiny_xl

import create_modified_unet

WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def narrow(tmp_path_factory):
    """A text-to-image pipeline directory."""
    return make_tiny_pipeline(tmp_path_factory.mktemp("tiny") / "narrow", in_channels=4)


def modify(monkeypatch, source, output_dir, **flags):
    flags = {"pretrained_model_name_or_path": source, "output_dir": output_dir} | flags
    args = [f"--{name}" if value is True else f"--{name}={value}" for name, value in flags.items()]
    create_modified_unet.main(args)


def read(folder):
    """(config.json, tensors in PyTorch's naming) of a UNet directory."""
    return json.loads((folder / "config.json").read_text()), load_file(folder / WEIGHTS)


def check_widened(source, widened, in_channels):
    """All tensors are bit-identical, and PyTorch's outputs ignore the new channels."""
    (old_config, old), (new_config, new) = read(source), read(widened)
    old_channels = old_config["in_channels"]
    assert new_config["in_channels"] == in_channels
    assert old.keys() == new.keys()
    kernel = new.pop("conv_in.weight")  # (C, in_channels, 3, 3)
    assert kernel.dtype == old["conv_in.weight"].dtype
    assert kernel[:, :old_channels].tobytes() == old.pop("conv_in.weight").tobytes()
    assert kernel[:, old_channels:].tobytes() == bytes(kernel[:, old_channels:].nbytes)
    assert kernel.shape[1] == in_channels
    assert "conv_in.bias" in old
    for name, tensor in old.items():
        assert new[name].dtype == tensor.dtype
        assert new[name].tobytes() == tensor.tobytes(), name

    torch.manual_seed(0)
    latents = torch.randn(2, old_channels, 8, 12)
    text = torch.randn(2, 7, new_config["cross_attention_dim"])
    timesteps, added = torch.tensor([3, 900]), {}
    if new_config["addition_embed_type"] == "text_time":
        time_ids = torch.tensor([[40.0, 56, 3, 0, 40, 40]] * 2)
        added = {"added_cond_kwargs": {"text_embeds": torch.randn(2, 20), "time_ids": time_ids}}
    unets = [UNet2DConditionModel.from_pretrained(f).float() for f in (source, widened)]
    with torch.no_grad():
        expected = unets[0](latents, timesteps, text, **added).sample
        for extra in (torch.zeros, torch.randn, lambda *size: 100 * torch.randn(*size)):
            x = torch.cat((latents, extra(2, in_channels - old_channels, 8, 12)), 1)
            result = unets[1](x, timesteps, text, **added).sample
            torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)


def test_a_pipelines_unet_is_widened(narrow, tmp_path, monkeypatch, capsys):
    out = tmp_path / "deep" / "widened"
    modify(monkeypatch, narrow, out)
    check_widened(narrow / "unet", out, 8)
    assert sorted(file.name for file in out.iterdir()) == ["config.json", WEIGHTS]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"loaded {narrow}: 4 input channels")
    (check,) = [line for line in lines if line.startswith("largest difference")]
    assert float(check.split()[2].rstrip(",")) <= 1e-5 * float(check.split()[5].rstrip(","))
    assert "4 new channels" in check
    assert lines[-1] == f"saved {out}: 8 input channels, all other weights unchanged"


def test_edit_model_gets_a_reference(tmp_path, monkeypatch):
    source = make_tiny_pipeline(tmp_path / "edits", in_channels=8)
    modify(monkeypatch, source, tmp_path / "widened", num_images=2)
    check_widened(source / "unet", tmp_path / "widened", 12)


@pytest.mark.slow
@pytest.mark.parametrize("num_images", [1, 2])
def test_sdxl(tmp_path, monkeypatch, num_images):
    """The self-check includes the added conditions."""
    source, out = make_tiny_xl(tmp_path / "xl"), tmp_path / "widened"
    modify(monkeypatch, source, out, num_images=num_images)
    check_widened(source / "unet", out, 4 + 4 * num_images)
    checked = create_modified_unet.largest_difference
    biased = {"add_embedding": {}}

    def spoiled(narrow, narrow_params, wide, wide_params):
        added = wide_params["add_embedding"]["linear_1"]
        biased["add_embedding"] = wide_params["add_embedding"] | {
            "linear_1": added | {"bias": added["bias"] + 1}
        }
        return checked(narrow, narrow_params, wide, wide_params | biased)

    monkeypatch.setattr(create_modified_unet, "largest_difference", spoiled)
    with pytest.raises(SystemExit) as stop:
        modify(monkeypatch, source, tmp_path / "other")
    assert stop.value.code == 1 and not (tmp_path / "other").exists()


@pytest.mark.slow
def test_a_half_precision_unet_folder_and_more_channels(narrow, tmp_path, monkeypatch):
    source, out = tmp_path / "half", tmp_path / "widened"
    UNet2DConditionModel.from_pretrained(narrow / "unet").half().save_pretrained(source)
    modify(monkeypatch, source, out, subfolder="", num_images=2)
    check_widened(source, out, 12)
    assert {tensor.dtype.name for tensor in read(out)[1].values()} == {"float16"}


def test_overwriting_replaces_the_unet_and_nothing_else(narrow, tmp_path, monkeypatch):
    monkeypatch.setattr(create_modified_unet, "largest_difference", lambda *_: (0.0, 1.0))
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    (out / "config.json").write_text("{}")
    modify(monkeypatch, narrow, out, overwrite_output_dir=True)
    check_widened(narrow / "unet", out, 8)
    assert (out / "notes.txt").read_text() == "mine"


def random_bias(params):
    """As with a new random bias."""
    bias = np.random.default_rng(0).normal(0, 1e-2, params["conv_in"]["bias"].shape)
    return {**params, "conv_in": {**params["conv_in"], "bias": bias.astype(np.float32)}}


@pytest.mark.slow
def test_a_wrong_widening_is_noticed_and_not_saved(narrow, tmp_path, monkeypatch, capsys):
    widen = create_modified_unet.widen
    monkeypatch.setattr(create_modified_unet, "widen", lambda *args: random_bias(widen(*args)))
    with pytest.raises(SystemExit, match="1"):
        modify(monkeypatch, narrow, tmp_path / "out")
    assert re.fullmatch(
        r"error: the widened UNet differs from the narrow one by .*; nothing was saved\n",
        capsys.readouterr().err,
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.variants
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"source": "wide"},
            "the UNet of wide has 8 input channels; widen a text-to-image ",
        ),
        ({"source": "nowhere/model"}, "no config.json in nowhere/model/unet"),
        ({"subfolder": "vae"}, "is the config of AutoencoderKL, not of UNet2DConditionModel"),
        ({"output_dir": "file"}, "no directory that you can write to"),
        ({"output_dir": "run"}, "--output_dir run is not empty (config.json, metrics.jsonl); name"),
        ({"output_dir": "narrow"}, "--output_dir narrow has another model's UNet; name another"),
    ],
)
def test_bad_input_is_one_line(narrow, tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    Path("narrow").symlink_to(narrow)
    if flags.get("source") == "wide":
        make_tiny_pipeline("wide", in_channels=8)
    Path("file").touch()
    Path("run").mkdir()
    Path("run/config.json").write_text("{}")
    Path("run/metrics.jsonl").write_text("")
    files = sorted(Path().rglob("*"))
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        modify(monkeypatch, **{"source": "narrow", "output_dir": "out"} | flags)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1
    assert sorted(Path().rglob("*")) == files
