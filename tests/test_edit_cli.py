"""edit_cli by its command line: its files, noise per edit, refused flags."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import photo
from PIL import Image, ImageOps
from tiny_models import make_tiny_pipeline

import edit_cli
from diffusers_flax.generating.captions import GRID_MARGIN
from diffusers_flax.generating.recipes import read_recipe
from diffusers_flax.generating.sizes import load_fitted, result_size, shared_size
from diffusers_flax.models.base import FlaxModelMixin
from diffusers_flax.pipelines.instruct_pix2pix import FlaxStableDiffusionInstructPix2PixPipeline
from diffusers_flax.schedulers.factory import SCHEDULERS, make_scheduler
from edit_cli import edits_of_flags

SCRIPT = Path(edit_cli.__file__)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    # One level compiles faster than two.
    return make_tiny_pipeline(tmp_path_factory.mktemp("tiny") / "model", unet_channels=(16,))


@pytest.fixture
def input_images(tmp_path):
    """Five images, all landscape except b.png, one of them by its EXIF orientation only."""
    photo(96, 72, 0).save(tmp_path / "a.png")
    photo(72, 96, 1).save(tmp_path / "b.png")
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise by a quarter
    photo(72, 96, 2).save(tmp_path / "turned.jpg", exif=exif, quality=95)
    photo(48, 36, 3).convert("P").save(tmp_path / "palette.png")
    photo(96, 72, 4).convert("L").save(tmp_path / "grey.png")
    return tmp_path


EDITS = [
    ("a.png", "make it red", "out/a.png"),
    ("turned.jpg", "make it red", "out/deep/turned.png"),
    ("palette.png", "make it blue, with a caption so long that it takes two lines", "out/p.png"),
    ("grey.png", "make it red", "out/grey.JPG"),
    ("b.png", "invert the colors", "out/b.png"),
]


@pytest.mark.slow
def test_an_image_is_made_again_from_its_recipe(model, input_images, monkeypatch, capsys):
    """Of a list too; another seed wins; a missing or changed original is refused."""
    monkeypatch.chdir(input_images)
    rows = [dict(input="a.png", edit=text, output=f"{text}.png") for text in ("red", "blue")]
    Path("two.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = ["--model", str(model), "--num_inference_steps", "2", "--resolution", "32"]
    edit_cli.main([*flags, "--edits_jsonl", "two.jsonl", "--seed", "5", "--guidance_scale", "3"])
    recipe = read_recipe("blue.png")
    assert (recipe["edit"], recipe["seed"], recipe["first_index"]) == ("blue", 5, 1)

    def edited(*more):
        edit_cli.main(["--like", "blue.png", "--output", "again.png", *more])
        image = np.asarray(Image.open("again.png"))
        Path("again.png").unlink()
        return image

    np.testing.assert_array_equal(edited(), np.asarray(Image.open("blue.png")))
    assert (edited("--seed", "6") != np.asarray(Image.open("blue.png"))).any()
    capsys.readouterr()
    shutil.copy("a.png", "moved.png")
    Path("a.png").unlink()
    for _ in range(2):  # missing, then changed
        with pytest.raises(SystemExit):
            edited()
        assert "was made from a.png, which does not exist here or has ch" in capsys.readouterr().err
        Image.new("RGB", (32, 24)).save("a.png")
    moved = edited("--input", "moved.png")
    np.testing.assert_array_equal(moved, np.asarray(Image.open("blue.png")))


def test_edits_with_a_reference(tmp_path, monkeypatch):
    """By a list, whose lines may lack it, a recipe and flags: the pipeline's own images."""
    monkeypatch.chdir(tmp_path)
    model = make_tiny_pipeline("model", in_channels=12)
    for seed, name in enumerate(("a.png", "hat.png")):
        photo(32, 32, seed).save(name)
    rows = [{"input": "a.png", "edit": "red", "output": f"{i}.png"} for i in range(2)]
    Path("edits.jsonl").write_text(jsonl(rows[0], rows[1] | {"reference": "hat.png"}))
    flags = ["--model", str(model), "--num_inference_steps", "3", "--resolution", "32"]
    edit_cli.main([*flags, "--edits_jsonl", "edits.jsonl", "--grid", "grid.png"])
    edit_cli.main(["--like", "1.png", "--output", "like.png"])
    one = ["--input", "a.png", "--edit", "red", "--first_index", "1"]
    edit_cli.main([*flags, *one, "--reference", "hat.png", "--output", "flags.png"])
    pixels = {x: np.int32(Image.open(f"{x}.png")) for x in ("0", "1", "like", "flags")}
    assert (pixels["1"] == pixels["like"]).all() and (pixels["1"] == pixels["flags"]).all()
    pipeline, params = FlaxStableDiffusionInstructPix2PixPipeline.from_pretrained(model)
    images = [Image.open(name) for name in ("a.png", "hat.png")]
    *arrays, reference = pipeline.prepare_inputs("red", images[0], reference=images[1])
    for i, seen in enumerate((None, reference)):
        key = jax.random.fold_in(jax.random.key(0), i)[None]
        options = {"reference": seen, "output_type": "pil"}
        (image,) = pipeline(*arrays, params, key, 3, **options).images
        assert np.abs(pixels[str(i)] - np.int32(image)).max() <= 1


def test_a_list_of_edits_by_the_real_command_line(model, input_images, monkeypatch):
    lines = [json.dumps(dict(zip(("input", "edit", "output"), edit))) for edit in EDITS]
    (input_images / "edits.jsonl").write_text("\n".join(lines[:2]) + "\n\n" + "\n".join(lines[2:]))
    flags = {
        "model": model,
        "edits_jsonl": "edits.jsonl",
        "num_inference_steps": 3,
        "scheduler": "euler_ancestral",
        "resolution": 32,
        "seed": 7,
    }
    args = [f"--{name}={value}" for name, value in flags.items()]
    flags = os.environ["XLA_FLAGS"].replace("device_count=4", "device_count=1")
    environment = os.environ | {"XLA_FLAGS": flags}
    del environment["JAX_COMPILATION_CACHE_DIR"]  # it overrides the flag
    cache = "--compilation_cache_dir=programs"
    done = subprocess.run(
        [sys.executable, SCRIPT, *args, "--batch_size=3", "--grid=grid.png", cache],
        cwd=input_images,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [edit[2] for edit in EDITS]
    assert "5/5" in done.stderr
    assert "5 images of up to 32x24 pixels, 3 at once on each of 1 cpu; memory: at" in done.stderr
    assert list((input_images / "programs").glob("*-cache")) != []
    found = [Image.open(input_images / edit[2]) for edit in EDITS]
    assert [image.format for image in found] == ["PNG", "PNG", "PNG", "JPEG", "PNG"]
    assert [image.size for image in found] == [(32, 24)] * 4 + [(24, 32)]
    files = {path.name for path in (input_images / "out").rglob("*")}
    assert files == {"a.png", "b.png", "deep", "turned.png", "p.png", "grey.JPG"}

    # The first tile: before, after and instruction.
    grid = Image.open(input_images / "grid.png")
    margin = GRID_MARGIN
    before = ImageOps.contain(load_fitted(input_images / "a.png", (32, 24)), (256, 256))
    corner = grid.crop((margin, margin, margin + 256, margin + 192))
    np.testing.assert_array_equal(np.asarray(corner), np.asarray(before))
    after = ImageOps.contain(found[0], (256, 256))
    corner = grid.crop((margin + 256, margin, margin + 512, margin + 192))
    np.testing.assert_array_equal(np.asarray(corner), np.asarray(after))
    caption = np.asarray(grid.crop((margin, margin + 192, margin + 512, margin + 212)))
    assert caption.min() < 80  # black letters
    assert caption[:, 256:].min() == 255  # on white, and short

    # The same one image at a time, by the pipeline itself: edit 1 ...
    pipeline, params = FlaxStableDiffusionInstructPix2PixPipeline.from_pretrained(model)
    scheduler, params["scheduler"] = make_scheduler("euler_ancestral", pipeline.scheduler.config)
    pipeline = dataclasses.replace(pipeline, scheduler=scheduler)
    turned = Image.open(input_images / "turned.jpg").transpose(Image.Transpose.ROTATE_270)
    inputs = pipeline.prepare_inputs(
        "make it red", turned.resize((32, 24), Image.Resampling.LANCZOS)
    )
    key = jax.random.fold_in(jax.random.key(7), 1)[None]
    images = pipeline(*inputs, params, key, 3).images
    expected = np.asarray(pipeline.numpy_to_pil(images)[0], np.int16)
    assert np.abs(np.asarray(found[1], np.int16) - expected).max() <= 1

    # ... and images of one size over four devices.
    monkeypatch.chdir(input_images)
    Path("edits.jsonl").write_text("\n".join(lines[:4]))
    one_device = [np.asarray(image, np.int16) for image in found]
    edit_cli.main([*args, "--batch_size=1"])
    for before, edit in zip(one_device, EDITS[:4]):
        now = np.asarray(Image.open(edit[2]), np.int16)
        assert np.abs(now - before).max() <= (1 if edit[2].endswith("png") else 4)
    assert len(jax.local_devices()) == 4


def mask_image(size, box):
    """A mask, white in box (left, top, right, bottom)."""
    mask = Image.new("L", size)
    mask.paste(255, box)
    return mask


CHAIN = [
    {"input": "a.png", "edit": "make it red", "output": "out/red.png"},
    {"input": "out/red.png", "edit": "make it blue", "output": "out/both.png"},
]


def run_list(model, rows):
    """Edit a list of rows; the results, uint8 (24, 32, 3)."""
    Path("edits.jsonl").write_text(jsonl(*rows))
    flags = ["--model", str(model), "--num_inference_steps", "2", "--resolution", "32"]
    edit_cli.main([*flags, "--edits_jsonl", "edits.jsonl"])
    return [np.asarray(Image.open(row["output"])) for row in rows]


def test_masks_and_several_edits_in_a_row(model, input_images, monkeypatch, capsys):
    """An edit of another's output reads the saved file; pixels outside of the mask stay."""
    monkeypatch.chdir(input_images)
    mask_image((96, 72), (48, 0, 96, 72)).save("right.png")  # of the photograph's size
    red, both = run_list(model, [row | {"mask": "right.png"} for row in CHAIN])
    before = np.asarray(load_fitted(Path("a.png"), (32, 24)))
    for image, edited in ((before, red), (red, both)):
        np.testing.assert_array_equal(edited[:, :16], image[:, :16])
        assert (edited[:, 16:] != image[:, 16:]).mean() > 0.5

    # The same command makes what is missing, and the edit of a changed one again.
    made = Path("out/red.png").stat()
    Path("out/both.png").unlink()
    _, again = run_list(model, [row | {"mask": "right.png"} for row in CHAIN])
    np.testing.assert_array_equal(again, both)
    assert Path("out/red.png").stat() == made
    assert "made already by this command: 1 of 2 images" in capsys.readouterr().err
    changed = CHAIN[0] | {"edit": "make it blue", "mask": "right.png"}
    blue, again = run_list(model, [changed, CHAIN[1] | {"mask": "right.png"}])
    assert np.any(blue != red) and np.any(again != both)
    assert not {file.name for file in Path("out").iterdir()} - {"red.png", "both.png"}


@pytest.fixture
def edit_b(model, input_images, monkeypatch, capsys):
    """(function that edits a.png and b.png of similar shapes, b.png's edit by the pipeline)."""
    monkeypatch.chdir(input_images)
    photo(96, 70, 5).save("b.png")
    mask_image((96, 70), (48, 0, 96, 70)).save("right.png")
    flags = ["--model", str(model), "--num_inference_steps", "2", "--resolution", "127"]
    flags += ["--edit", "make it red"]

    def run(*names, more=()):
        Path("out").mkdir(exist_ok=True)
        edit_cli.main([*flags, "--input", *names, "--output", "out", *more])
        errors = capsys.readouterr().err
        found = [np.asarray(Image.open(Path("out", name)), np.int16) for name in names]
        return *found, {*re.findall(r"compiling (\d+x\d+)", errors)}, errors

    pipeline, params = FlaxStableDiffusionInstructPix2PixPipeline.from_pretrained(model)

    def by_pipeline(size, mask=None, index=0):
        image = load_fitted("b.png", (128, 92)).resize(size, Image.Resampling.LANCZOS)
        inputs = pipeline.prepare_inputs("make it red", image, mask)
        key = jax.random.fold_in(jax.random.key(0), index)[None]
        options = dict(num_inference_steps=2, mask=inputs[2] if mask else None)
        (edited,) = pipeline.numpy_to_pil(pipeline(*inputs[:2], params, key, **options).images)
        return np.asarray(edited.resize((128, 92), Image.Resampling.LANCZOS))

    return run, by_pipeline


@pytest.mark.slow
def test_similar_shapes_share_a_program(edit_b):
    """The program gets the image stretched to its size; the result has the photograph's shape."""
    run, by_pipeline = edit_b
    a, b, programs, _ = run("a.png", "b.png")
    assert (a.shape, b.shape, programs) == ((96, 128, 3), (92, 128, 3), {"128x96"})
    assert np.abs(b - by_pipeline((128, 96), index=1)).max() <= 2


@pytest.mark.slow
def test_exact_sizes_and_masks_of_shared_programs(edit_b):
    """Outside of a mask no pixel changes, inside no pixel is the image's, up to the border."""
    run, by_pipeline = edit_b
    exact, programs, _ = run("b.png", more=["--exact_size"])
    assert programs == {"128x92"}
    assert np.abs(exact - by_pipeline((128, 92))).max() <= 1
    image = np.asarray(load_fitted("b.png", (128, 92)))
    masked, programs, _ = run("b.png", more=["--mask", "right.png"])
    assert programs == {"128x96"}
    np.testing.assert_array_equal(masked[:, :64], image[:, :64])
    expected = by_pipeline((128, 96), mask_image((128, 96), (60, 0, 128, 96)))
    assert np.abs(masked[:, 64:] - expected[:, 64:]).max() <= 2
    soft, _, _ = run("b.png", more=["--mask", "right.png", "--mask_feather", "3"])
    weights = np.array([0.25, 0.5, 0.75, 1])[:, None]
    mixed = weights * masked[:, 64:68] + (1 - weights) * image[:, 64:68]
    assert np.abs(soft[:, 64:68] - mixed).max() <= 1


@pytest.mark.parametrize(
    ("size", "resolution", "factor", "expected"),
    [
        ((4000, 3000), 512, 8, (512, 384)),
        ((1000, 667), 512, 8, (512, 344)),  # 341.5
        ((1000, 660), 512, 8, (512, 336)),  # 337.9
        ((640, 480), 500, 8, (504, 376)),  # 500 = 62.5 * 8 and 375
        ((5000, 20), 512, 8, (512, 8)),
    ],
)
def test_sizes(size, resolution, factor, expected):
    assert result_size(size, resolution, factor) == expected


def test_shared_programs_hardly_change_a_shape():
    """At every resolution; the usual shapes not at all."""
    assert shared_size((512, 344), 8) == (512, 352)  # 3:2
    assert shared_size((512, 248), 8) == (512, 248)  # longer than 2:1
    for longer in range(64, 1088, 8):
        for width, height in ((1, 1), (4, 3), (16, 10), (16, 9), (2, 1)):
            size = result_size((100 * width, 100 * height), longer, 8)
            assert shared_size(size, 8) == size
        for shorter in range(8, longer + 1, 8):
            shared = shared_size((shorter, longer), 8)
            assert shared[1] == longer
            assert abs(shared[0] / shorter - 1) < (0.07 if longer >= 256 else 0.09)


def test_fitting_keeps_the_aspect_ratio(tmp_path):
    """A disc stays a disc: the excess is cropped evenly."""
    y, x = np.mgrid[:120, :200]
    disc = np.hypot(x - 99.5, y - 59.5) < 50
    Image.fromarray(np.where(disc, 255, 0).astype(np.uint8)).save(tmp_path / "disc.png")
    fitted = np.asarray(load_fitted(tmp_path / "disc.png", (64, 48)))[..., 0] > 127  # not 64 x 38
    rows, columns = fitted.any(1).nonzero()[0], fitted.any(0).nonzero()[0]
    assert len(rows) == len(columns) == 40  # 100 * 48 / 120
    assert rows[0] + rows[-1] == 47
    assert columns[0] + columns[-1] == 63


def test_outputs_of_flags(tmp_path):
    def outputs(inputs, texts, output=None):
        config = edit_cli.Config("m", input=tuple(map(Path, inputs)), edit=texts, output=output)
        return [str(row["output"]) for row in edits_of_flags(config)]

    both = ["x/a.jpg", "b.png"]
    assert outputs(both, ("red",)) == ["x/a-edited.png", "b-edited.png"]
    assert outputs(both, ("red", "blue"), Path("out")) == ["out/a.png", "out/b.png"]
    assert outputs(both[:1], ("red",), Path("out.jpg")) == ["out.jpg"]
    assert outputs(both[:1], ("red",), tmp_path) == [str(tmp_path / "a.png")]


def jsonl(*rows):
    return "\n".join(map(json.dumps, rows))


GOOD_ROW = {"input": "a.png", "edit": "red", "output": "o.png"}
ONE = ["--input", "a.png", "--edit", "red"]
TWO = ["--input", "a.png", "b.png", "--edit", "red"]


@pytest.mark.variants
@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "--input and --edit must be given, or --edits_jsonl"),
        ([*TWO, "blue", "green"], "2 --input do not fit 3 --edit"),
        ([*TWO, "--output", "o.png"], "--output o.png is one file for several edits; give a dir"),
        ([*ONE, "--output", "a.png"], "a.png is an input and would be overwritten"),
        ([*ONE, "--output", "b.png"], "b.png exists, is not by edit_cli.py and would be overw"),
        ([*ONE, "--scheduler", "eular"], f"choose from {', '.join(SCHEDULERS)}"),
        ([*ONE, "--model", "narrow"], "narrow is not an edit model (StableDiffusionPipeline)"),
        (["--edits_jsonl", "twice.jsonl"], "2 images would be written to"),
        (["--edits_jsonl", "missing.jsonl"], "line 2: none.png does not exist"),
        (["--edits_jsonl", "cycle.jsonl"], "cycle.jsonl has 1 problem: line 1: its image would be"),
        (
            [*ONE, "--mask", "small.png"],
            "small.png is 8x16 pixels (width x height) and its image 16x16; a mask has the size of",
        ),
        ([*ONE, "--mask", "black.png"], "black.png has no white at the size of the result"),
        ([*ONE, "--mask_feather", "3"], "--mask_feather 3 is for --mask; give both or none"),
        ([*ONE, "--reference", "b.png"], "a reference needs a UNet with 12 input channels, this"),
    ],
)
def test_bad_input_is_one_line_before_weights_are_read(
    model, tmp_path, monkeypatch, capsys, args, message
):
    def load(*args, **kwargs):
        raise AssertionError("weights are being read")

    monkeypatch.setattr(FlaxModelMixin, "from_pretrained", load)
    monkeypatch.chdir(tmp_path)
    for name in ("a.png", "b.png"):
        photo(16, 16).save(name)
    Path("text.png").write_text("no image")
    mask_image((16, 16), (0, 0, 0, 0)).save("black.png")
    mask_image((8, 16), (0, 0, 8, 8)).save("small.png")
    cycle = [("4.png", "1.png"), ("1.png", "2.png"), ("1.png", "3.png"), ("./2.png", "4.png")]
    for name, rows in {
        "twice": (GOOD_ROW, GOOD_ROW | {"output": "./o.png"}),
        "missing": (GOOD_ROW, {**GOOD_ROW, "input": "none.png", "output": "p.png"}),
        "cycle": [{"input": before, "edit": "x", "output": after} for before, after in cycle],
    }.items():
        Path(f"{name}.jsonl").write_text(jsonl(*rows))
    if "narrow" in args:
        make_tiny_pipeline("narrow", in_channels=4)
        capsys.readouterr()  # PyTorch's progress bars
    files = sorted(Path().rglob("*"))

    with pytest.raises(SystemExit) as error:
        edit_cli.main(args if "--model" in args else [*args, "--model", str(model)])
    assert error.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert sorted(Path().rglob("*")) == files
