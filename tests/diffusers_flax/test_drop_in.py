"""The scripts in drop_in/, with imports and calls as in diffusers 0.39's examples, run here."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
import torch
from diffusers import ControlNetModel, PNDMScheduler, StableDiffusionPipeline
from helpers import ROOT
from PIL import Image
from safetensors.torch import load_file
from tiny_models import make_tiny_pipeline, make_tiny_safety_checker, make_tiny_xl

from diffusers_flax.pipelines.stable_diffusion import FlaxStableDiffusionPipeline

NUM_STEPS = 2
# PyTorch's pipeline warns that it changes steps_offset to 1.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The configuration file of this scheduler:FutureWarning"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A text-to-image pipeline; its components have .bin files too."""
    folder = tmp_path_factory.mktemp("sd") / "model"
    make_tiny_pipeline(folder, in_channels=4, scheduler="pndm", vae_channels=(8, 16))
    for file in folder.rglob("*.safetensors"):
        torch.save(load_file(file), file.with_suffix(".bin"))
    (folder / "text_encoder/model.bin").rename(folder / "text_encoder/pytorch_model.bin")
    return folder


@pytest.fixture(scope="module")
def safety_checker(tmp_path_factory):
    return make_tiny_safety_checker(tmp_path_factory.mktemp("sd") / "safety_checker")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    for number, name in enumerate(["red", "make it red", "it", "make red"]):
        colors = np.random.default_rng(number).integers(0, 256, (5, 5, 3), dtype=np.uint8)
        Image.fromarray(colors).resize((40, 40)).save(folder / f"{name}.png")
    return folder


def run(script, **flags):
    """What the main function of drop_in/SCRIPT.py returns under python -m diffusers_flax."""
    file = ROOT / "tests" / "drop_in" / f"{script}.py"
    done = subprocess.run(
        [sys.executable, "-m", "diffusers_flax", file, json.dumps(flags, default=str)],
        cwd=ROOT,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def check(folder, before, prompt="make it red"):
    """PyTorch and our classes open the saved pipeline, with a safety checker.

    Returns:
        {component: names of its arrays that differ from the arrays in the folder `before`}.
    """
    theirs = StableDiffusionPipeline.from_pretrained(folder)
    assert type(theirs.safety_checker).__name__ == "StableDiffusionSafetyChecker"
    assert theirs.feature_extractor.crop_size["height"] == 224
    checker = theirs.safety_checker
    latents = np.random.default_rng(0).standard_normal((1, 4, 8, 8), np.float32)
    options = {"num_inference_steps": 3, "guidance_scale": 3.0, "height": 16, "width": 16}
    theirs.set_progress_bar_config(disable=True)
    theirs.safety_checker = None
    theirs.scheduler = PNDMScheduler.from_pretrained(folder, subfolder="scheduler")
    wanted = theirs(prompt, latents=torch.from_numpy(latents), output_type="np", **options).images
    ours, params = FlaxStableDiffusionPipeline.from_pretrained(folder, safety_checker=None)
    rng = jax.random.PRNGKey(0)
    got = ours(ours.prepare_inputs(prompt), params, rng, latents=latents, **options).images
    np.testing.assert_allclose(np.asarray(got), wanted, atol=1e-4)

    old = StableDiffusionPipeline.from_pretrained(before)
    changed = {"safety_checker": checker.state_dict()}
    for component in ("unet", "vae", "text_encoder"):
        a, b = (getattr(pipeline, component).state_dict() for pipeline in (old, theirs))
        assert a.keys() == b.keys()
        assert all(array.isfinite().all() for array in b.values())
        changed[component] = {
            k for k in a if a[k].shape != b[k].shape or not torch.equal(a[k], b[k])
        }
    return changed


@pytest.mark.slow
def test_dreambooth(model, images, safety_checker, tmp_path):
    (tmp_path / "class_images").mkdir()
    PNDMScheduler(beta_end=0.012, skip_prk_steps=True, steps_offset=1).save_pretrained(
        tmp_path / "schedule" / "scheduler"
    )
    losses = run(
        "dreambooth",
        model=model,
        images=images,
        class_images=tmp_path / "class_images",
        safety_checker=safety_checker,
        scheduler_folder=tmp_path / "schedule",
        output=tmp_path / "out",
        num_steps=NUM_STEPS,
    )
    assert np.isfinite(losses).all() and len(losses) == NUM_STEPS
    made = [np.asarray(Image.open(f)) for f in sorted((tmp_path / "class_images").iterdir())]
    assert len(made) == jax.local_device_count() == len(np.unique(made, axis=0))
    changed = check(tmp_path / "out", model)
    assert len(changed["unet"]) > 50 and len(changed["text_encoder"]) >= 20
    assert not changed["vae"]
    earlier = check(tmp_path / "out" / "1", tmp_path / "out")  # the first step's, and the last's
    assert earlier["unet"] and earlier["text_encoder"] and not earlier["vae"]
    assert {f.name for f in (tmp_path / "out").iterdir() if f.name.isdigit()} == {"1", "2"}
    scheduler = json.loads((tmp_path / "out/scheduler/scheduler_config.json").read_text())
    assert scheduler["steps_offset"] == 1


@pytest.mark.slow
def test_textual_inversion(model, images, safety_checker, tmp_path):
    losses = run(
        "textual_inversion",
        model=model,
        images=images,
        safety_checker=safety_checker,
        output=tmp_path / "out",
        placeholder="<thing>",
        initializer="red",
        num_steps=NUM_STEPS,
    )
    assert np.isfinite(losses).all() and len(losses) == NUM_STEPS
    changed = check(tmp_path / "out", model, prompt="make it <thing>")
    (name,) = changed["text_encoder"]
    assert name.endswith("token_embedding.weight")
    assert not changed["unet"] and not changed["vae"]
    pipeline = StableDiffusionPipeline.from_pretrained(tmp_path / "out")
    number = pipeline.tokenizer.convert_tokens_to_ids("<thing>")
    rows = pipeline.text_encoder.state_dict()[name]
    old_rows = StableDiffusionPipeline.from_pretrained(model).text_encoder.state_dict()[name]
    assert number == len(old_rows) == len(rows) - 1 == pipeline.text_encoder.config.vocab_size - 1
    assert torch.equal(rows[:-1], old_rows)
    red = pipeline.tokenizer.encode("red", add_special_tokens=False)
    assert 0.005 < (rows[number] - old_rows[red[0]]).abs().max() < 0.1  # two steps from "red"
    learned = np.load(tmp_path / "out" / "learned_embeds.npy", allow_pickle=True).item()
    np.testing.assert_array_equal(learned["<thing>"], rows[number])


@pytest.mark.slow
def test_sdxl(tmp_path, programs):
    model = make_tiny_xl(tmp_path / "model")
    flags = {"model": model, "cache": programs, "num_steps": NUM_STEPS}
    folders = [tmp_path / "jit", tmp_path / "ahead_of_time"]
    for folder in folders:
        folder.mkdir()
    run("sdxl", ahead_of_time=False, output=folders[0], **flags)
    images = {f.name: Image.open(f) for f in folders[0].iterdir()}
    assert len(images) == jax.device_count() == len({im.tobytes() for im in images.values()})
    size = images["0.png"].height
    run("sdxl", ahead_of_time=True, output=folders[1], size=size, **flags)
    for name, image in images.items():
        compiled = np.asarray(Image.open(folders[1] / name), np.int16)
        assert np.abs(np.asarray(image, np.int16) - compiled).max() <= 1


@pytest.mark.slow
def test_controlnet(images, tmp_path):
    """The published script makes a ControlNet with 32 groups and its default epsilon."""
    model = make_tiny_pipeline(
        tmp_path / "model",
        in_channels=4,
        scheduler="pndm",
        vae_channels=(8, 16),
        unet_channels=(32, 32),
        norm_num_groups=32,
    )
    flags = dict(model=model, images=images, num_steps=NUM_STEPS, prompt="make it red")
    made = run("controlnet", controlnet=None, output=tmp_path / "out", **flags)
    assert np.isfinite(made["losses"]).all() and len(made["losses"]) == NUM_STEPS
    assert len(set(made["images"])) == jax.local_device_count()
    theirs, info = ControlNetModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    unet = StableDiffusionPipeline.from_pretrained(model).unet.state_dict()
    weights = theirs.state_dict()
    shared = [key for key in weights if key in unet]
    assert len(shared) > 50
    for key in shared:  # the first step's gradient of the UNet's arrays is zero
        assert torch.allclose(weights[key], unet[key], atol=3e-3) and weights[key].isfinite().all()
    assert all(weights[f"controlnet_{x}.weight"].any() for x in ("mid_block", "down_blocks.0"))

    again = run("controlnet", controlnet=tmp_path / "out", output=tmp_path / "again", **flags)
    assert again["losses"] != made["losses"]
    weights_again = ControlNetModel.from_pretrained(tmp_path / "again").state_dict()
    assert (weights_again["conv_in.weight"] != weights["conv_in.weight"]).any()
