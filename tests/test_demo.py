"""The demo: its photographs and edits, its data, its measures, its base model."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from diffusers import (
    AutoencoderKL,
    AutoencoderTiny,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
)
from filelock import FileLock
from helpers import ROOT, psnr
from PIL import Image
from references import edit_with_torch
from safetensors.numpy import load_file

from demo import make_base_model, make_tiny_vae, photographs
from demo.evaluate import load_edits, read_pixels, summarize_edits
from demo.photographs import EDITS, HELD_OUT, TRAINING, load_photographs, random_crop
from diffusers_flax.data.options import Transform
from diffusers_flax.models.tiny_vae import FlaxAutoencoderTiny
from diffusers_flax.models.vae import FlaxAutoencoderKL
from diffusers_flax.pipelines.instruct_pix2pix import FlaxStableDiffusionInstructPix2PixPipeline
from diffusers_flax.pipelines.stable_diffusion_xl import FlaxStableDiffusionXLPipeline
from parquet_processing import ParquetImagePairs

BASE_MODEL = ROOT / "demo" / "base_model"
DEMO_LOCK = ROOT / "demo" / "work" / "lock"  # tests share demo/output
XL_BASE_MODEL = ROOT / "demo" / "base_model_xl"
TRAINED = ("unet", "text_encoder", "text_encoder_2")  # of make_base_model.py for SDXL
CAPTIONS = ("a photo of galaxies at night", "a photo of grass covered in fog")


def run(*command):
    """Run a program of the clone."""
    command = [sys.executable, *map(str, command)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def demo_output():
    """The demo's output with the model of test_the_whole_demo, which is trained if need be."""
    with FileLock(DEMO_LOCK):
        if not (ROOT / "demo/output/model/model_index.json").exists():
            run("demo/run_demo.py")
    return ROOT / "demo" / "output"


@pytest.fixture(scope="module")
def output_dir(tmp_path_factory):
    """What make_dataset.py writes, small."""
    folder = tmp_path_factory.mktemp("demo")
    flags = "--num_pairs 40 --num_shards 2 --crops_per_photograph 1"
    run("demo/make_dataset.py", "--output_dir", folder, *flags.split())
    return folder


def test_edits_are_images_and_differ():
    rng = np.random.default_rng(0)
    assert not set(HELD_OUT) & set(TRAINING)
    for photograph in load_photographs(HELD_OUT):
        crop = random_crop(rng, photograph, 32, smallest=0.5)
        results = [crop, *(edit.apply(crop) for edit in EDITS)]
        other = random_crop(rng, photograph, 32)[::-1] ** 2
        results += [edit.apply(crop, other) for edit in photographs.ALL_EDITS[len(EDITS) :]]
        for i, result in enumerate(results):
            assert result.shape == (32, 32, 3)
            assert result.dtype == np.float32
            assert 0 <= result.min() <= result.max() <= 1
            for other in results[:i]:
                assert np.abs(result - other).mean() > 0.02


@pytest.mark.slow
def test_shards_hold_true_edits(output_dir):
    """What the loader makes of the shards is an instruction's effect on the image beside it."""
    apply = {edit.instruction: edit.apply for edit in EDITS}
    dataset = ParquetImagePairs(
        str(output_dir / "data"), batch_size=40, transform=Transform(64, random_flip=False)
    )
    (batch,) = dataset
    for original, edited, prompt in zip(
        batch["original_pixel_values"], batch["edited_pixel_values"], batch["edit_prompt"]
    ):
        truth = apply[prompt](original.astype(np.float32) / 255)
        assert np.abs(truth - edited / 255).mean() < 0.02  # both went through JPEG


@pytest.mark.slow
def test_measures(output_dir):
    """Copies score 1 and never hit, truths score 0 and always do, another's truth misses."""
    held_out = output_dir / "held_out"
    (output_dir / "edits").mkdir()

    def summary_of(choose):
        for line in (held_out / "edits.jsonl").read_text().splitlines():
            edit = json.loads(line)
            number = [e.instruction for e in EDITS].index(edit["edit"])
            stem = edit["input"].removesuffix(".png")
            shutil.copy(held_out / choose(stem, number), held_out / edit["output"])
        return summarize_edits(load_edits(output_dir))

    copied = summary_of(lambda stem, number: f"{stem}.png")
    assert copied["num_edits"] == len(HELD_OUT) * len(EDITS)
    assert copied["edit_error_ratio"] == pytest.approx(1)
    assert copied["instruction_accuracy"] == 0
    perfect = summary_of(lambda stem, number: f"{stem}_truth_{number}.png")
    assert perfect["edit_error_ratio"] == 0
    assert perfect["instruction_accuracy"] == 1
    wrong = summary_of(lambda stem, number: f"{stem}_truth_{(number + 1) % len(EDITS)}.png")
    assert wrong["instruction_accuracy"] == 0
    assert wrong["edit_error_ratio"] > 0.5

    run("demo/evaluate.py", "--output_dir", output_dir, "--started", 0)
    summary = json.loads((output_dir / "summary.json").read_text())
    assert summary["seconds"] > 1e9
    assert {k: summary[k] for k in wrong} == wrong
    with Image.open(output_dir / "edits.png") as grid:
        assert grid.width > 2000


def test_base_model_is_a_stable_diffusion_of_at_most_6_mb():
    assert sum(file.stat().st_size for file in BASE_MODEL.rglob("*") if file.is_file()) <= 6e6
    pipeline = StableDiffusionPipeline.from_pretrained(BASE_MODEL, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    ids = pipeline.tokenizer("Make it black and white, 日本!").input_ids
    text = "".join(pipeline.tokenizer.decode(ids, skip_special_tokens=True).split())
    assert text == "makeitblackandwhite,日本!"
    generator = torch.Generator().manual_seed(0)
    options = dict(num_inference_steps=10, generator=generator, output_type="np")
    night, fog = (pipeline(caption, **options).images for caption in CAPTIONS)
    assert night.shape == (1, 64, 64, 3)
    assert night.mean() < fog.mean() - 0.2  # it knows what the captions say


def num_parameters(folder):
    """Parameters in the safetensors file of a folder."""
    (file,) = folder.glob("*.safetensors")
    return sum(tensor.size for tensor in load_file(file).values())


@pytest.mark.slow
def test_xl_base_model_is_an_sdxl_next_to_the_other():
    """Same VAE, as many parameters within 10%, at most 6 MB, and PyTorch makes our images of it."""
    assert sum(file.stat().st_size for file in XL_BASE_MODEL.rglob("*") if file.is_file()) <= 6e6
    for file in (BASE_MODEL / "vae").iterdir():
        assert (XL_BASE_MODEL / "vae" / file.name).read_bytes() == file.read_bytes()
    counts = [
        sum(num_parameters(folder) for folder in model.iterdir() if folder.name in TRAINED)
        for model in (XL_BASE_MODEL, BASE_MODEL)
    ]
    assert counts[0] == pytest.approx(counts[1], rel=0.1)

    theirs = StableDiffusionXLPipeline.from_pretrained(XL_BASE_MODEL, dtype=torch.float32)
    theirs.set_progress_bar_config(disable=True)
    assert theirs.config.force_zeros_for_empty_prompt
    latents = np.random.default_rng(0).standard_normal((2, 16, 16, 16)).astype(np.float32)
    settings = dict(num_inference_steps=10, guidance_scale=5.0, height=64, width=64)
    expected = theirs(
        [*CAPTIONS], latents=torch.tensor(latents), output_type="np", **settings
    ).images
    night, fog = expected.mean(axis=(1, 2, 3))
    assert night < fog - 0.2  # it knows what the captions say
    pipeline, params = FlaxStableDiffusionXLPipeline.from_pretrained(XL_BASE_MODEL)
    prompt_ids = pipeline.prepare_inputs([*CAPTIONS])
    images = pipeline(prompt_ids, params, jax.random.key(0), latents=latents, **settings).images
    assert images.shape == (2, 64, 64, 3) and psnr(images, expected) > 60


@pytest.mark.slow
@pytest.mark.parametrize(("family", "model"), [("sd", BASE_MODEL), ("sdxl", XL_BASE_MODEL)])
def test_make_base_model(family, model, tmp_path):
    """It writes the files of the demo's model, with the same configs."""
    flags = f"--vae_steps 2 --unet_steps 2 --num_latents 256 --family {family}"
    run("demo/make_base_model.py", *flags.split(), "--output_dir", tmp_path)
    made = {file.relative_to(tmp_path) for file in tmp_path.rglob("*.*")}
    assert made == {file.relative_to(model) for file in model.rglob("*.*")}
    configs = {file for file in made if file.suffix == ".json" and file.name != "vocab.json"}
    for config in configs - {Path("vae/config.json")}:  # its scaling_factor is measured
        written, expected = (json.loads((x / config).read_text()) for x in (tmp_path, model))
        assert written | expected == written, config


@pytest.mark.slow
def test_the_whole_demo():
    """The README's figures, and PyTorch's images; takes some minutes."""
    check_demo("sd", ROOT / "demo" / "output")
    model, held_out = (ROOT / "demo" / "output" / name for name in ("model", "held_out"))
    names = ("chelsea_0.png", "coffee_0.png", "china_0.png")
    images = np.stack([read_pixels(held_out / name) for name in names])
    latents = np.random.default_rng(0).standard_normal((3, 16, 16, 16)).astype(np.float32)
    prompts = ["invert the colors", "cover it in fog", "make it black and white"]
    expected = edit_with_torch(model, prompts, images, latents)
    pipeline, params = FlaxStableDiffusionInstructPix2PixPipeline.from_pretrained(model)
    inputs = pipeline.prepare_inputs(prompts, images)
    result = pipeline(*inputs, params, jax.random.key(0), 20, latents=latents).images
    assert psnr(result, expected) > 60


@pytest.mark.slow
def test_the_whole_demo_of_sdxl():
    check_demo("sdxl", ROOT / "demo" / "output_xl")


def check_demo(family, folder):
    """The demo of a family reaches the README's figures."""
    with FileLock(DEMO_LOCK):
        run("demo/run_demo.py", "--family", family)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["edit_error_ratio"] <= 0.22
    assert summary["instruction_accuracy"] >= 0.97 and summary["num_edits"] == 72
    for instruction, figures in summary["by_instruction"].items():
        assert figures["edit_error_ratio"] <= 0.5, instruction


@pytest.mark.slow
def test_evaluate_edits_agrees_with_the_summary(tmp_path):
    """With the model of test_the_whole_demo."""
    output = demo_output()
    run(
        "evaluate_edits.py", "--model", output / "model", "--pairs_jsonl",
        output / "held_out" / "edits.jsonl", "--resolution", 64, "--num_inference_steps", 20,
        "--batch_size", 36, "--guidance_scale", 1, 2, "--image_guidance_scale", 1, 1.2,
        "--clip_model", "", "--output_dir", tmp_path,
    )  # fmt: skip
    results = json.loads((tmp_path / "results.json").read_text())
    found = {
        (r["guidance_scale"], r["image_guidance_scale"]): r["error_ratio"] for r in results["rows"]
    }
    expected = summarize_edits(load_edits(output))["edit_error_ratio"]
    assert found[2, 1.2] == pytest.approx(expected, rel=0.01)
    assert found[2, 1.2] < found[1, 1] < results["baselines"][0]["error_ratio"] == 1


@pytest.mark.slow
def test_make_tiny_vae(tmp_path):
    """The loss equals PyTorch's and falls; a pipeline decodes with the saved TAESD."""
    run("demo/make_tiny_vae.py", "--num_steps", 20, "--output_dir", tmp_path / "taesd")
    images, *_ = next(make_base_model.image_batches(0, 2, False))
    vae, vae_params = FlaxAutoencoderKL.from_pretrained(BASE_MODEL / "vae")
    key, teacher = jax.random.key(3), {"vae": vae, "vae_params": vae_params}
    _, trained = FlaxAutoencoderTiny.from_pretrained(tmp_path / "taesd")
    untrained = make_tiny_vae.TINY_VAE.init_weights(jax.random.key(0))
    found, before = (
        make_tiny_vae.tiny_vae_loss(params, images, key, **teacher)
        for params in (trained, untrained)
    )
    assert found < 0.95 * before
    theirs = AutoencoderKL.from_pretrained(BASE_MODEL / "vae", dtype=torch.float32)
    tiny, losses = AutoencoderTiny.from_pretrained(tmp_path / "taesd"), []
    with torch.no_grad():
        images = torch.from_numpy(images)
        posterior, scale = theirs.encode(images).latent_dist, theirs.config.scaling_factor
        B, C, h, w = posterior.mean.shape
        noise = torch.tensor(np.asarray(jax.random.normal(key, (B, h, w, C)))).movedim(-1, 1)
        latents = posterior.mean + posterior.std * noise
        for student, teacher in (
            (tiny.encode(images).latents, scale * posterior.mean),
            (tiny.decode(scale * latents).sample, theirs.decode(latents).sample),
        ):
            losses.append(F.l1_loss(student, teacher) + F.mse_loss(student, teacher))
    np.testing.assert_allclose(found, sum(losses), rtol=1e-4)
