"""Textual-inversion files of all layouts, against PyTorch's load_textual_inversion."""

import os

import jax
import numpy as np
import pytest
import torch
from diffusers import (
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
)
from helpers import psnr
from safetensors.torch import save_file
from tiny_models import make_tiny_pipeline, make_tiny_xl

from diffusers_flax.loading.tokenizer import tokenize
from diffusers_flax.pipelines.base import FlaxDiffusionPipeline

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy")

WIDTH, WIDTHS_XL = 24, (16, 32)  # of the tiny models' text encoders
PROMPT, NEGATIVE = "a <cat>, made red like style.", "bad-hands"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """{family: directory}, their vectors as large as tiny models need to change an image."""
    folder = tmp_path_factory.mktemp("models")
    return {
        "sd": make_tiny_pipeline(folder / "sd", in_channels=4),
        "edit": make_tiny_pipeline(folder / "edit", in_channels=8),
        "xl": make_tiny_xl(folder / "xl"),
    }


def vectors(n, width=WIDTH, seed=0):
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """{name: path} of embeddings in all layouts."""
    folder = tmp_path_factory.mktemp("embeddings")
    paths = {
        name: folder / name
        for name in ("web_ui.pt", "diffusers.bin", "bad-hands.safetensors", "xl.safetensors")
    }
    web_ui = {
        "string_to_token": {"*": 265},
        "string_to_param": {"*": vectors(3).requires_grad_()},
        "name": "style",
        "step": 100,
        "sd_checkpoint": None,
        "sd_checkpoint_name": "v1-5",
    }
    torch.save(web_ui, paths["web_ui.pt"])
    torch.save({"<cat>": vectors(1, seed=1)[0].half()}, paths["diffusers.bin"])
    save_file({"emb_params": vectors(2, seed=2)}, paths["bad-hands.safetensors"])
    both = {name: vectors(2, width, 3) for name, width in zip(("clip_l", "clip_g"), WIDTHS_XL)}
    save_file(both, paths["xl.safetensors"])
    return paths


OPTIONS = dict(num_inference_steps=4, guidance_scale=12.0)
SIZE = dict(height=32, width=32)


def latents_of(theirs):
    side = 32 // theirs.vae_scale_factor
    return torch.randn(1, 4, side, side, generator=torch.Generator().manual_seed(5))


def image_of(pipeline, params, prompt, negative, latents):
    ids, neg_ids = pipeline.prepare_inputs(prompt), pipeline.prepare_text_inputs(negative)
    inputs = dict(neg_prompt_ids=neg_ids, latents=latents.numpy())
    return pipeline(ids, params, jax.random.key(0), **inputs, **SIZE, **OPTIONS).images


def assert_same_images(pipeline, params, theirs, prompt, negative):
    """Above 60 dB, for a prompt and a negative prompt; returns our image."""
    theirs.set_progress_bar_config(disable=True)
    given = dict(latents=latents_of(theirs), output_type="np")
    expected = theirs(prompt, negative_prompt=negative, **given, **SIZE, **OPTIONS).images
    ours = image_of(pipeline, params, prompt, negative, latents_of(theirs))
    assert psnr(ours, expected) > 60
    return ours


def test_images_are_those_of_pytorch(models, files):
    """Three files, tokens with one, two and three vectors, in the negative prompt too."""
    theirs = StableDiffusionPipeline.from_pretrained(models["sd"], safety_checker=None)
    theirs.load_textual_inversion(str(files["web_ui.pt"]))
    theirs.load_textual_inversion(str(files["diffusers.bin"]))
    theirs.load_textual_inversion(str(files["bad-hands.safetensors"]), token=NEGATIVE)
    specs = [str(files[name]) for name in ("web_ui.pt", "diffusers.bin", "bad-hands.safetensors")]
    pipeline, params = FlaxDiffusionPipeline.from_pretrained(models["sd"], embeddings=specs)
    prompt = theirs.maybe_convert_prompt(PROMPT, theirs.tokenizer)
    ids = theirs.tokenizer(prompt, padding="max_length", return_tensors="pt").input_ids
    np.testing.assert_array_equal(pipeline.prepare_inputs(PROMPT), ids)
    states = jax.jit(pipeline.text_encoder)(ids.numpy(), params=params["text_encoder"])[0]
    expected = theirs.text_encoder(ids)[0].detach()
    np.testing.assert_allclose(states, expected, atol=2e-5)
    image = assert_same_images(pipeline, params, theirs, PROMPT, NEGATIVE)
    table = params["text_encoder"]["text_model"]["embeddings"]["token_embedding"]["embedding"]
    np.testing.assert_array_equal(
        table, theirs.text_encoder.get_input_embeddings().weight.detach().numpy()
    )
    assert len(table) == pipeline.text_encoder.config.vocab_size == len(pipeline.tokenizer)
    plain, _ = FlaxDiffusionPipeline.from_pretrained(models["sd"])
    assert plain.description() != pipeline.description()
    without = image_of(pipeline, params, "a", NEGATIVE, latents_of(theirs))
    assert psnr(image, without) < 50


@pytest.mark.slow
def test_sdxl_with_two_text_encoders(models, files):
    theirs = StableDiffusionXLPipeline.from_pretrained(models["xl"])
    both = {name: vectors(2, width, 3) for name, width in zip(("clip_l", "clip_g"), WIDTHS_XL)}
    for suffix, name in (("", "clip_l"), ("_2", "clip_g")):
        theirs.load_textual_inversion(
            both[name],
            token="<style>",
            text_encoder=getattr(theirs, f"text_encoder{suffix}"),
            tokenizer=getattr(theirs, f"tokenizer{suffix}"),
        )
    pipeline, params = FlaxDiffusionPipeline.from_pretrained(
        models["xl"], embeddings=f"{files['xl.safetensors']}:<style>"
    )
    assert_same_images(pipeline, params, theirs, "make it <style> red", "no <style>")


@pytest.mark.slow
def test_saved_pipelines_keep_the_tokens(models, files, tmp_path):
    """We open them, with the same tokens and rows."""
    pipeline, params = FlaxDiffusionPipeline.from_pretrained(
        models["sd"], embeddings=[files["web_ui.pt"], files["diffusers.bin"]]
    )
    pipeline.save_pretrained(tmp_path / "saved", params)
    reopened, same = FlaxDiffusionPipeline.from_pretrained(tmp_path / "saved")
    jax.tree.map(np.testing.assert_array_equal, same["text_encoder"], params["text_encoder"])
    ids = pipeline.prepare_inputs(PROMPT)
    np.testing.assert_array_equal(reopened.prepare_inputs(PROMPT), ids)
    assert reopened.description() == pipeline.description()


@pytest.mark.slow
def test_names_of_tokens(models, files, tmp_path):
    """TOKEN wins over the file's, which wins over the name of the file or of its directory."""
    (tmp_path / "toy").mkdir()
    save_file(
        {"<toy>": vectors(1), "<car>": vectors(2)}, tmp_path / "toy/learned_embeds.safetensors"
    )
    (tmp_path / "boat").mkdir()
    torch.save(vectors(2), tmp_path / "boat/learned_embeds.bin")
    old = {"string_to_token": {"*": torch.tensor(265)}}
    old["string_to_param"] = torch.nn.ParameterDict({"*": torch.nn.Parameter(vectors(1))})
    torch.save(old, tmp_path / "painter.pt")
    specs = [
        f"{files['web_ui.pt']}:EasyOne",
        f"{files['bad-hands.safetensors']}",
        tmp_path / "toy",
        tmp_path / "boat",
        tmp_path / "painter.pt",
        f"{tmp_path / 'boat'}:<two>",
    ]
    pipeline = FlaxDiffusionPipeline.from_pretrained(models["sd"], embeddings=specs)[0]
    names = {x for x in pipeline.tokenizer.added_tokens_encoder if "|" not in x}
    expected = {"EasyOne", "EasyOne_1", "EasyOne_2", "bad-hands", "bad-hands_1", "<toy>", "<car>"}
    assert names == expected | {"<car>_1", "boat", "boat_1", "painter", "<two>", "<two>_1"}
    # diffusers 0.42 with transformers 5 takes the first vector only of a token with capitals.
    ids = tokenize(pipeline.tokenizer, "a EasyOne", 77)[0].tolist()
    one = pipeline.tokenizer.convert_tokens_to_ids(["EasyOne", "EasyOne_1", "EasyOne_2"])
    assert ids[2:5] == one


class RunsCode:
    """A pickle of it would run a command."""

    def __reduce__(self):
        return os.system, ("true",)


@pytest.mark.parametrize(
    ("family", "name", "message"),
    [
        ("sd", "wide.safetensors", "has vectors of 1024 numbers, the model's text encoders take"),
        ("sd", "lora.safetensors", "is a LoRA, .*; give it as lora="),
        ("sd", "code.pt", "it runs code when it is opened"),
        ("sd", "red.safetensors:re", r"has the token re already; name another one"),
        ("sd", "two.bin:<x>", "has the tokens <a>, <b>; leave out :TOKEN"),
        ("sd", "", r"there is no learned_embeds\.safetensors or learned_embeds\.bin in"),
    ],
)
def test_bad_files_in_one_line(models, tmp_path, family, name, message):
    save_file({"emb_params": vectors(1, 1024)}, tmp_path / "wide.safetensors")
    save_file({"lora_unet_a.lora_down.weight": vectors(1)}, tmp_path / "lora.safetensors")
    torch.save({"string_to_param": RunsCode()}, tmp_path / "code.pt")
    save_file({"emb_params": vectors(1)}, tmp_path / "red.safetensors")
    torch.save({"<a>": vectors(1), "<b>": vectors(1)}, tmp_path / "two.bin")
    with pytest.raises(ValueError, match=message) as error:
        FlaxDiffusionPipeline.from_pretrained(models[family], embeddings=f"{tmp_path / name}")
    assert "\n" not in str(error.value)
