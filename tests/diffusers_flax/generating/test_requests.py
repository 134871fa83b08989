"""Requests for images: lines of lists, and flags kept in images."""

import json
from pathlib import Path

import numpy as np
import pytest
from helpers import photo
from PIL import Image

from diffusers_flax.command_line import parse_flags
from diffusers_flax.generating.recipes import recipe_of, with_flags_of_image
from diffusers_flax.generating.requests import (
    requests_of_flags,
    requests_of_jsonl,
)
from diffusers_flax.images import save_image
from generate_cli import Config


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    """The working directory; it and lists/ have images of one name."""
    monkeypatch.chdir(tmp_path)
    Path("lists").mkdir()
    for seed, name in enumerate(("a.png", "lists/a.png", "mask.png", "lists/b.png", "a b.png")):
        photo(8, 8, seed).save(name)
    np.save("noise.npy", np.zeros((1, 4, 2, 2), np.float32))


def config_of(*words):
    return parse_flags(Config, "", ["--model", "m", *words])


def requests_of(*lines, words=()):
    """requests_of_jsonl of lines, or one line's Request."""
    file = Path("lists/list.jsonl")
    file.write_text("\n".join(map(json.dumps, lines)))
    return requests_of_jsonl(file, config_of(*words))


def test_a_line_wins_over_flags_and_paths_are_relative_to_the_list():
    """Or else to the working directory; a number may be written without a point."""
    words = ["--seed", "7", "--guidance_scale", "3", "--negative_prompt", "fog"]
    first, second, third = requests_of(
        {"prompt": "x", "image": "a.png", "mask": "mask.png", "strength": 1, "output": "x.jpg"},
        {
            "prompt": "",
            "control": "b.png",
            "control_from": ["canny", "image"][:1],
            "seed": 2**32 - 1,
        },
        {
            "prompt": "x",
            "guidance_scale": 5,
            "negative_prompt": "",
            "width": 64,
            "timesteps": "ays",
        },
        words=words,
    )
    assert (first.image, first.mask) == (Path("lists/a.png"), Path("mask.png"))
    assert (first.strength, type(first.strength)) == (1.0, float)
    assert (first.task, second.task, third.task) == ("inpainting", "ControlNet", "text to image")
    assert (second.control, second.control_from) == ((Path("lists/b.png"),), ("canny",))
    assert [x.seed for x in (first, second, third)] == [7, 2**32 - 1, 9]
    assert [x.guidance_scale for x in (first, second, third)] == [3, 3, 5]
    assert [x.negative_prompt for x in (first, second, third)] == ["fog", "fog", ""]
    assert (first.output, second.output, third.timesteps) == (Path("x.jpg"), None, ("ays",))


def test_flags_go_in_pairs():
    """One prompt for all images, one seed each; seeds wrap."""
    words = ["--prompt", "x", "--image", "a.png", "a b.png", "--mask", "mask.png"]
    found = requests_of_flags(config_of(*words, "--num_images", "2", "--seed", str(2**32 - 2)))
    assert [str(x.image) for x in found] == ["a.png", "a.png", "a b.png", "a b.png"]
    assert {x.mask for x in found} == {Path("mask.png")} and {x.prompt for x in found} == {"x"}
    assert [x.seed for x in found] == [2**32 - 2, 2**32 - 1, 0, 1]


LINES = [
    {"prompt": ""},
    {"prompt": '--seed 4 "a\\b" \n it\'s ü', "negative_prompt": "-x", "seed": 0},
    {"prompt": "-1", "seed": 2**32 - 1, "num_inference_steps": 7, "guidance_scale": 1e-05},
    {"prompt": "x", "timesteps": [999, 1], "eta": 0.25, "guidance_rescale": 0.7},
    {"prompt": "x", "guidance": "apg:eta=0.2,norm=9"},
    {"prompt": "x", "timesteps": "ays", "width": 64, "height": 32, "latents": "noise.npy"},
    {"prompt": "x", "image": "a b.png", "mask": "mask.png", "strength": 0.3, "mask_feather": 3},
    {"prompt": "x", "image": "a.png", "resolution": 64, "output": "x.png"},
    {
        "prompt": "x",
        "control": ["a.png", "b.png"],
        "control_from": ["image", "canny"],
        "controlnet_conditioning_scale": [0.5, 1],
        "control_guidance_start": 0.1,
        "control_guidance_end": [0.5, 1],
        "guess_mode": True,
    },
]
FLAGS = [
    [],
    ["--long_prompts", "--prompt_weights", "webui", "--exact_size"],
    ["--controlnet", "x", "y", "--scheduler", "euler", "--accelerate", "tome:ratio=0.5", "taesd"],
    ["--refiner", "r", "--denoising_end", "0.5", "--vae_tile", "0", "--lora", "a:0.5", "b:-1"],
]


def save_recipe(config, request):
    """Write x.png with a recipe."""
    texts = recipe_of("program", config, request)
    save_image(Image.new("RGB", (8, 8)), Path("x.png"), "program", "0" * 32, texts)


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("flags", FLAGS)
def test_the_flags_of_an_image_make_its_request_again(line, flags):
    """Through the command line, with the same id; flags that are given win."""
    (request,) = requests_of(line)
    config = config_of(*flags, "--batch_size", "3", "--num_images", "2", "--output", "elsewhere")
    save_recipe(config, request)
    words = with_flags_of_image(["--like", "x.png"], Config)
    again = parse_flags(Config, "", words)
    names = ("batch_size", "num_images", "output")
    for name, value in vars(config).items():
        if name == "controlnet" and not request.control:
            value = ()  # of other lines
        if name not in (*names, *vars(request)):
            assert getattr(again, name) == value, name
    assert [getattr(again, name) for name in names] == [1, 1, Path("images")]
    (found,) = requests_of_flags(again)
    expected = vars(request) | {"output": None}
    assert vars(found) == expected

    words = with_flags_of_image(
        ["--prompt", "seed", "--like=x.png", "--seed", "5", "--no-guess_mode"], Config
    )
    (other,) = requests_of_flags(parse_flags(Config, "", words))
    assert vars(other) == expected | {"prompt": "seed", "seed": 5, "guess_mode": False}


def test_other_sources_of_requests_replace_the_flags_of_an_image():
    """Also the flags that go with what they replace."""
    (request,) = requests_of({"prompt": "x", "image": "a.png", "strength": 0.5, "resolution": 16})
    save_recipe(config_of(), request)
    Path("list.jsonl").write_text('{"prompt": "y"}')
    words = with_flags_of_image(["--like", "x.png", "--requests_jsonl", "list.jsonl"], Config)
    (found,) = requests_of_jsonl(Path("list.jsonl"), parse_flags(Config, "", words))
    assert (found.prompt, found.image, found.strength, found.resolution) == ("y", None, None, None)
    Path("prompts.txt").write_text("one\ntwo\n")
    words = with_flags_of_image(["--like", "x.png", "--prompts_file", "prompts.txt"], Config)
    found = requests_of_flags(parse_flags(Config, "", words))
    assert [(x.prompt, x.strength) for x in found] == [("one", 0.5), ("two", 0.5)]


def test_flags_of_the_command_count_for_the_lines_that_they_are_for():
    lines = [{"prompt": "x"}, {"prompt": "x", "image": "a.png"}]
    found = requests_of(*lines, words=["--strength", "0.5", "--resolution", "16"])
    assert [(x.strength, x.resolution) for x in found] == [(None, None), (0.5, 16)]
    with pytest.raises(ValueError, match="line 1: --strength"):
        requests_of({"prompt": "x", "strength": 0.5})
