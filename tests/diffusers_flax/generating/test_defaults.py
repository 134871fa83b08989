"""Scales and steps that come with a model or a LoRA."""

from dataclasses import dataclass

import pytest

from diffusers_flax.generating.flags import DEFAULTS_FILE, with_defaults, write_defaults


@dataclass(frozen=True)
class Flags:
    guidance_scale: float | None = None
    image_guidance_scale: tuple[float, ...] = ()
    num_inference_steps: int | None = None
    scheduler: str | None = None


def test_flags_win_over_the_lora_the_lora_over_the_model(tmp_path, capsys):
    model, lora = tmp_path / "model", tmp_path / "lora"
    model.mkdir()
    lora.mkdir()
    assert with_defaults(Flags(), [str(model)]) == Flags(7.5, (1.5,), 50, None)
    assert capsys.readouterr().err == ""
    write_defaults(model, guidance_scale=2.0, image_guidance_scale=1.2, num_inference_steps=20)
    assert with_defaults(Flags(), [str(model)]) == Flags(2.0, (1.2,), 20, None)
    said = "--guidance_scale 2.0 --image_guidance_scale 1.2 --num_inference_steps 20, as in "
    assert f"{said}{DEFAULTS_FILE}" in capsys.readouterr().err
    write_defaults(lora, guidance_scale=1.0, num_inference_steps=4, scheduler="lcm", other=1)
    (lora / "x.safetensors").touch()
    found = with_defaults(Flags(num_inference_steps=8), [str(model)], [f"{lora}/x.safetensors:0.5"])
    assert found == Flags(1.0, (1.2,), 8, "lcm")


def test_models_that_differ_need_the_flag(tmp_path):
    for name, scale in (("a", 2.0), ("b", 3.0)):
        (tmp_path / name).mkdir()
        write_defaults(tmp_path / name, guidance_scale=scale)
    models = [str(tmp_path / name) for name in "ab"]
    with pytest.raises(ValueError, match=r"of --guidance_scale, \[2.0, 3.0\]; give it"):
        with_defaults(Flags(), models)
    assert with_defaults(Flags(guidance_scale=5), models).guidance_scale == 5


def test_a_checkpoint_is_named_with_the_command_for_it(tmp_path):
    (tmp_path / "checkpoints" / "600").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"ema_posthoc.py --checkpoint .*/checkpoints/600 "):
        with_defaults(Flags(), [str(tmp_path / "checkpoints" / "600")])
