"""generate_cli.py by its command line: its images are those of the pipelines' calls in Python."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import skimage.feature
from helpers import ROOT, photo
from PIL import Image
from references import open_ours
from tiny_models import make_tiny_controlnet, make_tiny_pipeline, make_tiny_xl, save_tiny_vae

import diffusers_flax
import generate_cli
from diffusers_flax.generating.captions import image_grid
from diffusers_flax.generating.runner import CANNY
from diffusers_flax.images import prepare_images
from diffusers_flax.models.base import FlaxModelMixin
from diffusers_flax.prompts import prepare_prompts

SIZE = (32, 24)  # width x height of all images
BOX = (8, 5, 32, 19)  # white part of the mask: left, top, right, bottom
SMALL = {"resolution": 32}
OPTIONS = ["--num_inference_steps", "2", "--guidance_scale", "3"]
LINES = [  # of a list, for each task
    {"prompt": "make it red", "width": 32, "height": 24},
    {"prompt": "it", "image": "photo.png", "strength": 0.5, "negative_prompt": "red"} | SMALL,
    {"prompt": "it", "image": "photo.png", "mask": "mask.png", "seed": 11} | SMALL,
    {"prompt": "it", "width": 32, "height": 24, "guidance_scale": 9},
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """{name: directory}, made when first asked for."""
    return Models(tmp_path_factory.mktemp("tiny"))


class Models(dict):
    """Tiny models by name: the family, sd or xl, and what it is."""

    def __init__(self, folder):
        self.folder = folder

    def __missing__(self, name):
        family, _, kind = name.partition(" ")
        path, is_xl = self.folder / name.replace(" ", "_"), family == "xl"
        if kind in ("net", "other net"):
            seed = len(kind)
            make_tiny_controlnet(path, self[family], halvings=3 if is_xl else 2, seed=seed)
        elif is_xl:
            make_tiny_xl(path, refiner=kind == "refiner", inpaints=kind == "9", edits=kind == "8")
        else:
            make_tiny_pipeline(path, in_channels=int(kind or 4))
        return self.setdefault(name, path)


@pytest.fixture(autouse=True)
def inputs(tmp_path, monkeypatch):
    """The working directory, with a photograph, its mask and control images."""
    monkeypatch.chdir(tmp_path)
    photo(*SIZE).save("photo.png")
    mask = Image.new("L", SIZE)
    mask.paste(255, BOX)
    mask.save("mask.png")
    photo(*SIZE, 1).save("edges.png")
    photo(*SIZE, 2).save("depth.png")
    return tmp_path


def run(model, *words):
    """Run the program; the files that it prints."""
    generate_cli.main(["--model", str(model), *map(str, words)])


def made(folder="out"):
    """{name: pixels} of the images in a directory."""
    return {file.name: np.asarray(Image.open(file)) for file in sorted(Path(folder).glob("*.png"))}


def write_list(*lines, file="list.jsonl"):
    """Write a list; returns its flags."""
    Path(file).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return ["--requests_jsonl", file]


def by_pipeline(model, task, line, seed=0, **options):
    """The pixels of one image by the pipeline of a task, called in Python as users call it.

    Args:
        model: directory.
        task: of the class's name: "", Img2Img, Inpaint or ControlNet.
        line: of a list: prompts, image and mask.
        seed: of the key.
        options: controlnet, of from_pretrained; control, PIL images for it; scheduler, a name; the
            others are of the call.
    """
    is_xl = model.name.startswith("xl")
    cls = getattr(diffusers_flax, f"FlaxStableDiffusion{'XL' * is_xl}{task}Pipeline")
    nets, control = options.pop("controlnet", None), options.pop("control", None)
    nets = {"controlnet": nets} if nets else {}
    pipeline, params = open_ours(model, options.pop("scheduler", None), cls, **nets)
    options = dict(num_inference_steps=2, guidance_scale=3.0) | options
    if negative := line.get("negative_prompt"):
        options["neg_prompt_ids"] = pipeline.prepare_text_inputs(negative)
    image, mask = (line.get(name) and Image.open(line[name]) for name in ("image", "mask"))
    given = pipeline.prepare_inputs(line["prompt"], *filter(None, (image or control, mask)))
    if not task:
        given = (given,)
        options |= dict(width=SIZE[0], height=SIZE[1])
    elif task == "Inpaint" and not is_xl:
        given = (given[0], given[2], None)
        options["image"] = prepare_images(image)
    (result,) = np.asarray(pipeline(*given, params, jax.random.key(seed), **options).images)
    return composited(np.uint8(np.rint(result * 255)), line)


def composited(pixels, line):
    """Pixels of a result; outside of the line's mask, the photograph's."""
    if not line.get("mask"):
        return pixels
    is_white = np.asarray(Image.open(line["mask"]))[..., None] > 0
    return np.where(is_white, pixels, np.asarray(Image.open(line["image"])))


# Ends itself by SIGKILL while it writes the third image.
KILLED = """
import os, signal, threading
import generate_cli
from diffusers_flax.generating import runner
write_image, written, one_at_a_time = runner.write_image, [], threading.Lock()
def write(*arguments):
    with one_at_a_time:
        if len(written) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        write_image(*arguments)
        written.append(arguments)
runner.write_image = write
generate_cli.main()
"""


def states(folder="out"):
    """{name: (inode, time of the last change)} of the files in a directory."""
    found = {file.name: file.stat() for file in Path(folder).iterdir()}
    return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in found.items()}


def test_a_killed_list_is_finished_with_the_images_of_the_pipelines(models, capsys):
    """Each line has its own task, seed and guidance scale; what is made stays as it is.

    Outside of a mask the photograph is kept.
    """
    lines = [LINES[0], *LINES[2:], LINES[0]]
    flags = [*write_list(*lines), *OPTIONS, "--seed", "5", "--output", "out"]
    command = [sys.executable, "-c", KILLED, "--model", models["sd"], *flags]
    paths = os.environ | {"PYTHONPATH": str(ROOT)}
    killed = subprocess.run(command, env=paths, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    before = {name: state for name, state in states().items() if name.endswith(".png")}
    assert 2 <= len([name for name in before if not name.startswith(".")]) < 4
    capsys.readouterr()
    run(models["sd"], *flags)
    printed = capsys.readouterr()
    assert f"made already by this command: {len(before)} of 4 images" in printed.err
    assert "text to image and inpainting with " in printed.err
    names = [f"{i:03}.png" for i in range(4)]
    assert printed.out.split() == [str(Path("out", name)) for name in names]
    after, images = states(), made()
    assert [*images] == names and before.items() <= after.items()

    expected = [
        by_pipeline(models["sd"], "", lines[0], seed=5),
        by_pipeline(models["sd"], "Inpaint", lines[1], seed=11),
        by_pipeline(models["sd"], "", lines[2], seed=7, guidance_scale=9.0),
        by_pipeline(models["sd"], "", lines[3], seed=8),
    ]
    for image, pixels in zip(images.values(), expected, strict=True):
        np.testing.assert_array_equal(image, pixels)
    assert len({image.tobytes() for image in images.values()}) == 4

    # The flags of a file are a command for the same image, which is made already.
    for file in ("out/001.png", "out/002.png"):
        run(models["sd"], "--like", file, "--output", file)
        assert "made already by this command: 1 of 1 image\n" in capsys.readouterr().err
    run(models["sd"], *flags)
    assert states() == after


STEPS = ["--num_inference_steps", "2"]
TASKS = {  # the model's kind, the class's task, a line, options of the call in Python
    "text": ("", "", LINES[0] | {"guidance_scale": 3}, {}),
    "text without guidance": ("", "", LINES[0] | {"guidance_scale": 1}, {"guidance_scale": 1.0}),
    "image": ("", "Img2Img", LINES[1] | {"guidance_scale": 3}, {"strength": 0.5}),
    "mask": ("", "Inpaint", LINES[2] | {"guidance_scale": 3}, {}),
    "mask, 9 channels": ("9", "Inpaint", LINES[2] | {"guidance_scale": 3}, {}),
}


def words_of(line):
    """A line of a list as flags."""
    return [str(word) for name, value in line.items() for word in (f"--{name}", value)]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sd", "xl"])
@pytest.mark.parametrize("task", TASKS)
def test_flags_make_the_image_of_the_pipeline(models, family, task):
    """Bit for bit."""
    kind, task, line, options = TASKS[task]
    model = models[f"{family} {kind}".strip()]
    run(model, *STEPS, *words_of(line), "--output", "out.png")
    expected = by_pipeline(model, task, line, line.get("seed", 0), **options)
    np.testing.assert_array_equal(Image.open("out.png"), expected)


@pytest.mark.slow
def test_latents_and_other_flags_reach_the_call(models):
    """A value of each kind of option, for text and for an image."""
    noise = np.random.default_rng(0).standard_normal((1, 4, 6, 8), np.float32)
    np.save("noise.npy", noise)
    for name, line, options, more in (
        ("", LINES[0], {"latents": noise, "eta": 0.5, "scheduler": "ddim"}, "--eta 0.5"),
        (
            "Img2Img",
            LINES[1],
            {"noise": noise, "timesteps": [801, 401], "scheduler": "euler", "strength": 0.5},
            "--timesteps 801 401",
        ),
    ):
        flags = ["--guidance_scale", "3", "--guidance_rescale", "0.7", "--latents", "noise.npy"]
        flags += ["--scheduler", options["scheduler"], *words_of(line), *more.split()]
        run(models["sd"], *flags, *STEPS, "--output", f"out{name}.png")
        expected = by_pipeline(models["sd"], name, line, **options, guidance_rescale=0.7)
        np.testing.assert_array_equal(Image.open(f"out{name}.png"), expected)


def controlled(model, nets, control, line, **options):
    """by_pipeline with ControlNets and their PIL images."""
    return by_pipeline(model, "ControlNet", line, controlnet=nets, control=control, **options)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sd", "xl"])
def test_controlnets_make_the_images_of_the_pipeline(models, family):
    """One and two of them, with a number for each; canny is scikit-image's of the fitted image."""
    model, nets = models[family], [models[f"{family} net"], models[f"{family} other net"]]
    line = {"prompt": "it", "resolution": 32}
    flags = [*OPTIONS, *words_of(line), "--controlnet"]
    run(model, *flags, nets[0], "--control", "edges.png", "--output", "one.png")
    edges, depth = Image.open("edges.png"), Image.open("depth.png")
    expected = controlled(model, str(nets[0]), edges, line)
    np.testing.assert_array_equal(Image.open("one.png"), expected)

    both = ["--control", "edges.png", "depth.png", "--output", "both.png"]
    both += ["--controlnet_conditioning_scale", "0.5", "1.5", "--control_guidance_start", "0.2"]
    both += ["--control_guidance_end", "0.6", "1"]
    run(model, *flags, *nets, *both)
    options = dict(controlnet_conditioning_scale=[0.5, 1.5], control_guidance_start=0.2)
    options["control_guidance_end"] = [0.6, 1.0]
    expected = controlled(model, [*map(str, nets)], [edges, depth], line, **options)
    np.testing.assert_array_equal(Image.open("both.png"), expected)


@pytest.mark.slow
def test_canny_is_scikit_images(models):
    """Of the image fitted to the result, for one of two ControlNets, and in guess mode."""
    photo(96, 72, 6).save("large.png")
    fitted = photo(96, 72, 6).resize(SIZE, Image.Resampling.LANCZOS)
    grey = np.asarray(fitted.convert("L"), np.float64) / 255
    found = skimage.feature.canny(grey, **CANNY)
    assert 0.02 < found.mean() < 0.5
    edges = Image.fromarray(np.uint8(found)[..., None].repeat(3, 2) * 255)
    model, nets = models["sd"], [models["sd net"], models["sd other net"]]
    line = {"prompt": "", "resolution": 32}
    flags = [*OPTIONS, "--prompt", "", "--resolution", "32", "--guess_mode", "--controlnet", *nets]
    flags += ["--control", "large.png", "depth.png", "--control_from", "canny", "image"]
    run(model, *flags, "--output", "out.png")
    control, nets = [edges, Image.open("depth.png")], [*map(str, nets)]
    expected = controlled(model, nets, control, line, guess_mode=True)
    np.testing.assert_array_equal(Image.open("out.png"), expected)


@pytest.mark.slow
def test_a_list_has_its_own_control_images(models):
    """With and without one, and two scales of a ControlNet."""
    lines = [
        {"prompt": "it", "control": "edges.png", "resolution": 32},
        {"prompt": "it", "control": ["depth.png"], "controlnet_conditioning_scale": 0.5} | SMALL,
        LINES[0],
        LINES[1],
    ]
    net = models["sd net"]
    run(models["sd"], *write_list(*lines), *OPTIONS, "--controlnet", net, "--output", "out")
    found = list(made().values())
    edges, depth = Image.open("edges.png"), Image.open("depth.png")
    model, options = models["sd"], dict(controlnet_conditioning_scale=0.5)
    expected = [
        controlled(model, str(net), edges, lines[0]),
        controlled(model, str(net), depth, lines[1], seed=1, **options),
        by_pipeline(model, "", lines[2], seed=2),
        by_pipeline(model, "Img2Img", lines[3], seed=3, strength=0.5),
    ]
    for image, pixels in zip(found, expected, strict=True):
        np.testing.assert_array_equal(image, pixels)


@pytest.mark.slow
def test_base_and_refiner_make_the_images_of_the_pipelines(models):
    """From text, and from an image with a mask."""
    pair, key = (models["xl"], models["xl refiner"]), jax.random.key(11)
    flags = ["--refiner", pair[1], "--denoising_end", "0.5", "--num_inference_steps", "4"]
    flags += ["--guidance_scale", "3"]
    options = dict(num_inference_steps=4, guidance_scale=3.0)
    first, second = dict(denoising_end=0.5, output_type="latent"), dict(denoising_start=0.5)
    for task, line in (("", {"seed": 11} | LINES[0]), ("Inpaint", LINES[2])):
        run(pair[0], *flags, *words_of(line), "--output", f"out{task}.png")
        names = [
            f"FlaxStableDiffusionXL{task}Pipeline",
            f"FlaxStableDiffusionXL{task or 'Img2Img'}Pipeline",
        ]
        (base, params), (refiner, refiner_params) = (
            getattr(diffusers_flax, name).from_pretrained(model) for name, model in zip(names, pair)
        )
        size = {} if task else dict(width=32, height=24)
        files = [Image.open(line[name]) for name in ("image", "mask") if name in line]
        inputs = base.prepare_inputs(line["prompt"], *files)
        inputs = inputs if task else (inputs,)
        latents = base(*inputs, params, key, **options, **first, **size).images
        inputs = refiner.prepare_inputs(line["prompt"], latents, *files[1:])
        images = refiner(*inputs, refiner_params, key, **options, **second).images
        expected = composited(np.uint8(np.rint(np.asarray(images[0]) * 255)), line)
        np.testing.assert_array_equal(Image.open(f"out{task}.png"), expected)


@pytest.mark.slow
def test_an_image_is_a_command_for_itself(models):
    """--like makes the image of a line again, or with another seed or guidance scale."""
    Path("lists").mkdir()
    for name in ("photo.png", "mask.png"):
        Path(name).rename(Path("lists", name))  # paths are relative to the list
    line = LINES[2] | {"output": "masked.png", "negative_prompt": "-red", "mask_feather": 2}
    empty = LINES[0] | {"prompt": "", "output": "empty.png"}
    model = models["sd"]
    run(model, *write_list(line, empty, file="lists/list.jsonl"), *OPTIONS, "--output", "out")
    assert [*made()] == ["empty.png", "masked.png"]
    like = ["--like", "out/masked.png", "--output"]
    generate_cli.main([*like, "again.png"])
    np.testing.assert_array_equal(Image.open("again.png"), made()["masked.png"])
    generate_cli.main(["--like=out/empty.png", "--output", "again_empty.png"])
    np.testing.assert_array_equal(Image.open("again_empty.png"), made()["empty.png"])

    line |= {"image": "lists/photo.png", "mask": "lists/mask.png"}
    for flags, options in (
        (["--seed", "5"], {"seed": 5}),
        (["--prompt", "seed"], {"seed": 11}),
        (["--guidance_scale", "9"], {"seed": 11, "guidance_scale": 9.0}),
    ):
        generate_cli.main([*like, f"{flags[1]}.png", *flags, "--mask_feather", "0"])
        changed = line | ({"prompt": "seed"} if flags[0] == "--prompt" else {})
        expected = by_pipeline(model, "Inpaint", changed, **options)
        np.testing.assert_array_equal(Image.open(f"{flags[1]}.png"), expected)


def assert_alike(found, expected):
    """Up to rounding, which depends on the program and on how many threads a device has."""
    difference = np.abs(np.int16(found) - np.int16(expected))
    assert difference.max() <= 1 and difference.mean() < 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ([], {}),
        (["--long_prompts"], {"long_prompts": True}),
        (
            ["--long_prompts", "--prompt_weights", "comfyui"],
            {"long_prompts": True, "prompt_weights": "comfyui"},
        ),
    ],
)
def test_long_and_weighted_prompts(models, flags, options):
    """They reach the call as prepare_prompts makes them; without the flags they are text."""
    line = LINES[0] | {"prompt": "(make:1.3) " + "it [red] " * 60, "negative_prompt": "(red:1.2)"}
    pipeline, params = open_ours(models["sd"], None, diffusers_flax.FlaxStableDiffusionPipeline)
    run(models["sd"], *words_of(line), *OPTIONS, *flags, "--output", "out.png")
    prompts = prepare_prompts(pipeline, line["prompt"], line["negative_prompt"], **options)
    given = {name: x for name, x in prompts._asdict().items() if x is not None}
    call = dict(num_inference_steps=2, guidance_scale=3.0, width=32, height=24)
    (result,) = pipeline(params=params, prng_seed=jax.random.key(0), **given, **call).images
    image = np.asarray(Image.open("out.png"))
    np.testing.assert_array_equal(image, np.uint8(np.rint(np.asarray(result) * 255)))
    assert np.array_equal(image, by_pipeline(models["sd"], "", line)) == (not flags)


@pytest.mark.slow
def test_previews_and_a_grid(models):
    """Of steps that run, from an image and before a refiner; the images are alike."""
    save_tiny_vae("taesd", (8, 8, 8))
    save_tiny_vae("taesdxl", (8, 8, 8, 8))
    refiner = ["--refiner", str(models["xl refiner"]), "--denoising_end", "0.75"]
    for family, decoder, more in (("sd", "taesd", []), ("xl", "taesdxl", refiner)):
        flags = [*write_list(LINES[0], LINES[1]), "--num_inference_steps", "4", *more]
        run(models[family], *flags, "--output", f"plain-{family}")
        previews = ["--preview", "1", "--preview_decoder", decoder, "--grid", f"{family}.png"]
        run(models[family], *flags, "--output", family, *previews)
        plain, found = made(f"plain-{family}"), made(family)
        for name, pixels in plain.items():
            assert_alike(found.pop(name), pixels)
        assert {pixels.shape for pixels in found.values()} == {(24, 32, 3)}
        # Of 4 steps, or 2 from the image, all but the last; the refiner makes one of them.
        last = {"sd": (3, 1), "xl": (2, 0)}[family]
        names = [f"{i:03}-step-{k:03}.png" for i in (0, 1) for k in range(1, last[i] + 1)]
        assert [*found] == names
        assert len({pixels.tobytes() for pixels in found.values()}) == len(names)
        images = [Image.open(Path(family, name)) for name in plain]
        grid = image_grid(images, ["make it red", "it"])
        np.testing.assert_array_equal(Image.open(f"{family}.png"), grid)


MISTAKES = [
    ("--mask mask.png", "--mask is for --image; give both or none"),
    ("--controlnet XLNET --control photo.png", "has cross_attention_dim=48, the UNet 24: they are"),
    ("--image photo.png --strength 0", "--strength 0.0 must be above 0 and at most 1"),
    ("--model EDITS", "--model EDITS is an edit model (StableDiffusionInstructPix2PixPipeline); t"),
    ("--prompts_file none.txt --prompt it", "--prompt and --prompts_file are both given; give"),
    (
        "--requests_jsonl several.jsonl",
        'line 3: seed cannot be "a"; line 4: not JSON (Expecting property name enclosed in double '
        'quotes); line 5: no "prompt"; give one, which may be empty; line 6: --strength is for '
        "--image; give both or none; line 7: output is a/b.png; write a file name, which goes to "
        '--output; line 8: image cannot be ["a"]',
    ),
    ("--requests_jsonl twice.jsonl", "2 images would be written to "),
    ("--image none.png", "none.png does not exist; check the path"),
    ("--image text.png", "text.png cannot be read as an image: no known image format (8 bytes)"),
    ("--image photo.png photo.png photo.png --prompt it red", "2 --prompt do not fit 3 --image;"),
    ("--image photo.png --strength 0.01", "strength=0.01 of num_inference_steps=50 leaves no"),
    ("--prompt it red --output a.png", "--output a.png is one file for 2 images; give a directory"),
    ("--output photo.png", "photo.png exists, is not by generate_cli.py and would be overwritten"),
    ("--width 30", "size 64x30 (height x width) is not divisible by 4; try 64x32"),
    ("--controlnet NET", "--controlnet NET needs --control, its image"),
    ("--controlnet NET --control photo.png --image photo.png", "excludes --image and --mask"),
    ("--model INPAINTS", "INPAINTS is an inpainting model, whose UNet sees a mask, and can"),
    ("--model REFINER", "--model REFINER is a refiner, which needs an image"),
    ("--model XL --refiner SD", "--refiner SD is not SDXL"),
    ("--denoising_end 0.5", "--denoising_end 0.5 is for --refiner; give both"),
    ("--like photo.png", "--like photo.png has no recipe; name a PNG file as this program wrote"),
]
SEVERAL = ['{"prompt": "it"}', '{"prompt": "it", "stenght": 1}', '{"prompt": "it", "seed": "a"}']
SEVERAL += ["{", '{"seed": 3}', '{"prompt": "it", "strength": 0.5}']
SEVERAL += ['{"prompt": "it", "output": "a/b.png"}', '{"prompt": "it", "image": ["a"]}']
KINDS = {  # directories in the flags
    "SD": "sd",
    "XL": "xl",
    "EDITS": "sd 8",
    "INPAINTS": "sd 9",
    "REFINER": "xl refiner",
    "NET": "sd net",
    "XLNET": "xl net",
}


@pytest.mark.variants
@pytest.mark.parametrize(("flags", "message"), MISTAKES)
def test_a_mistake_is_one_line_before_weights_are_read(models, monkeypatch, capsys, flags, message):
    """What is wrong and what would be right, exit code 2, and nothing is written."""

    def read_weights(*arguments, **options):
        raise AssertionError("too late: the weights are being read")

    monkeypatch.setattr(FlaxModelMixin, "from_pretrained", read_weights)
    Path("text.png").write_text("no image")
    Path("several.jsonl").write_text("\n".join(SEVERAL))
    write_list(*[{"prompt": "it", "output": "a.png"}] * 2, file="twice.jsonl")
    words = flags.split()
    for word in {"SD", *words} & {*KINDS}:
        Path(word).symlink_to(models[KINDS[word]])
    words += [] if "--model" in words else ["--model", "SD"]
    words += [] if {"--prompt", "--requests_jsonl"} & {*words} else ["--prompt", "it"]
    words += [] if "--output" in words else ["--output", "out"]
    files = sorted(Path().rglob("*"))
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        generate_cli.main(words)
    printed = capsys.readouterr()
    assert (stop.value.code, printed.out) == (2, "")
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1
    assert message in printed.err
    assert sorted(Path().rglob("*")) == files
