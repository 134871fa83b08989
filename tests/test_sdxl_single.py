"""sdxl_single.py and its twin sdxl_single_aot.py by their command lines, on a tiny SDXL."""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from helpers import ROOT
from PIL import Image
from tiny_models import make_tiny_pipeline, make_tiny_xl

import sdxl_single
import sdxl_single_aot
from diffusers_flax import FlaxStableDiffusionXLPipeline

PROMPTS = ("make it", "make it red", "it")
OPTIONS = ["--num_inference_steps", "3", "--num_images", "2", "--prompt", *PROMPTS]
SHORT = ["--num_inference_steps", "1", "--prompt", "it"]
PROGRAMS = (sdxl_single, sdxl_single_aot)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_xl(tmp_path_factory.mktemp("tiny") / "xl")


def run(script, model, output, *options, num_devices=4):
    """Run a program in a new process; return what it prints."""
    # The default code generators: with others the two programs may differ in the last bit.
    flags = f"--xla_force_host_platform_device_count={num_devices}"
    done = subprocess.run(
        [sys.executable, ROOT / script, "--model", model, "--output", output, *options],
        env=os.environ | {"XLA_FLAGS": f"{flags} --xla_cpu_parallel_codegen_split_count=1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def images(folder):
    return [np.asarray(Image.open(file)) for file in sorted(folder.glob("*.png"))]


@pytest.fixture(scope="module")
def made(model, tmp_path_factory):
    """Six images on four devices: the second batch is padded, and trimmed."""
    folder = tmp_path_factory.mktemp("made")
    printed = run("sdxl_single.py", model, folder, *OPTIONS)
    times = [line.partition(":")[0] for line in printed.splitlines() if "call" in line]
    assert times == ["first call", "later call"]
    assert str(folder / "005.png") in printed
    return images(folder)


def test_images_are_those_of_the_pipeline(model, made):
    """Called in Python with the key of each image, on one device, up to rounding."""
    assert len(made) == 6 and len({image.tobytes() for image in made}) == 6
    pipeline, params = FlaxStableDiffusionXLPipeline.from_pretrained(model)
    prompt_ids = pipeline.prepare_inputs([prompt for prompt in PROMPTS for _ in range(2)])
    negative = pipeline.prepare_inputs([sdxl_single.Config.negative_prompt])
    options = dict(num_inference_steps=3, guidance_scale=5.0, neg_prompt_ids=negative)
    result = pipeline(prompt_ids, params, jax.random.key(33), **options).images
    difference = np.abs(np.int16(made) - np.rint(np.asarray(result) * 255))
    assert difference.max() <= 1 and difference.mean() < 0.01


def test_the_twin_makes_the_same_and_loads_its_executable(model, made, tmp_path):
    kept = ["--executable_dir", tmp_path / "store"]
    for name, how in (("first", "compiled (no executable"), ("second", "loaded in")):
        assert how in run("sdxl_single_aot.py", model, tmp_path / name, *OPTIONS, *kept)
        np.testing.assert_array_equal(images(tmp_path / name), made)
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o700


@pytest.mark.slow
def test_batches_on_fewer_devices(model, made, tmp_path):
    for script in ("sdxl_single.py", "sdxl_single_aot.py"):
        options = [*OPTIONS, "--batch_size", "2"]
        options += ["--executable_dir", tmp_path / "store"] if "aot" in script else []
        run(script, model, tmp_path / script, *options, num_devices=1)
        difference = np.abs(np.int16(images(tmp_path / script)) - np.int16(made))
        assert difference.max() <= 1 and difference.mean() < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_one_prompt_fills_a_batch_and_images_stay(model, tmp_path, program):
    """Without a negative prompt and guidance, in bfloat16."""
    flags = ["--model", str(model), "--output", str(tmp_path / "out"), *SHORT]
    flags += ["--negative_prompt", "", "--guidance_scale", "1", "--dtype", "bfloat16"]
    flags += ["--executable_dir", str(tmp_path / "store")] if program is sdxl_single_aot else []
    program.main(flags)
    assert len(images(tmp_path / "out")) == len(jax.devices())
    before = (tmp_path / "out" / "000.png").stat().st_mtime_ns
    (tmp_path / "out" / "001.png").unlink()
    program.main([*flags, "--num_images", "1"])
    assert (tmp_path / "out" / "000.png").stat().st_mtime_ns == before
    assert len(images(tmp_path / "out")) == len(jax.devices())


@pytest.mark.slow
def test_code_that_changes_compiles_again(model, tmp_path):
    """A copy of the program with another line has other executables."""
    store, copy = ["--executable_dir", tmp_path / "store"], tmp_path / "mine.py"
    copy.write_text(
        (ROOT / "sdxl_single_aot.py").read_text().replace("key(config", "key(1 + config")
    )
    options = [*SHORT, "--num_images", "1", *store]
    run("sdxl_single_aot.py", model, tmp_path / "a", *options, num_devices=1)
    printed = run(copy, model, tmp_path / "b", *options, num_devices=1)
    assert "compiled (code, versions" in printed


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--height 100", "size 100x64 (height x width) is not divisible by 8; try 96x64"),
        ("--num_images 0", "--num_images 0 must be at least 1"),
        ("--output FILE", "File exists"),
        ("--model SD", "is a StableDiffusionPipeline, not Stable Diffusion XL"),
        ("--model nowhere", "nowhere has no model_index.json"),
    ],
)
def test_bad_input_is_one_line(model, tmp_path, capsys, monkeypatch, flags, message):
    """Of both programs, with exit code 2."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").touch()
    if "SD" in flags:
        make_tiny_pipeline(tmp_path / "SD", in_channels=4)
    for program in PROGRAMS:
        capsys.readouterr()
        model_flag = [] if "--model" in flags else ["--model", str(model)]
        with pytest.raises(SystemExit) as ended:
            program.main([*SHORT[:2], *model_flag, *flags.split()])
        assert ended.value.code == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("error: ") and message in error
