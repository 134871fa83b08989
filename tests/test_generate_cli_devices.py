"""generate_cli.py over several devices and processes, with less memory and from executables."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from helpers import ROOT, free_port
from PIL import Image
from tiny_models import make_tiny_xl

import generate_cli

OPTIONS = ["--num_inference_steps", "3", "--num_images", "2", "--prompt", "make it", "red", "it"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_xl(tmp_path_factory.mktemp("tiny") / "xl")


def start(model, output, *options, num_devices=4):
    """Start the program in a new process."""
    flags = f"--xla_force_host_platform_device_count={num_devices}"
    return subprocess.Popen(
        [sys.executable, ROOT / "generate_cli.py", "--model", model, "--output", output, *options],
        env=os.environ | {"XLA_FLAGS": f"{flags} --xla_cpu_parallel_codegen_split_count=1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(model, output, *options, **more):
    """Run the program in a new process; its stderr."""
    process = start(model, output, *OPTIONS, *options, **more)
    errors = process.communicate(timeout=600)[1]
    assert process.returncode == 0, errors
    return errors


def images(folder):
    return [np.asarray(Image.open(file)) for file in sorted(folder.glob("*.png"))]


@pytest.fixture(scope="module")
def made(model, tmp_path_factory):
    """Six images on four devices, padded and trimmed."""
    folder = tmp_path_factory.mktemp("made")
    run(model, folder)
    return images(folder)


def assert_alike(found, expected):
    """Up to rounding, which depends on how many threads a device has."""
    assert len(found) == len(expected) == 6
    difference = np.abs(np.int16(found) - np.int16(expected))
    assert difference.max() <= 1 and difference.mean() < 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--parallel", "branches=2", "rows=2"], "1 at once on each of 1 x 4 cpu"),
        (["--parallel", "data=2", "branches=2"], "1 at once on each of 2 x 2 cpu"),
        (
            ["--devices", "text=3", "unet=1", "vae=2", "--batch_size", "4"],
            "4 at once with text on 3, unet on 1, vae on 2 of 4 cpu; memory",
        ),
        (["--offload", "group"], "1 at once on each of 4 cpu"),
    ],
)
def test_layouts_make_the_same_images(model, made, tmp_path, flags, said):
    assert said in run(model, tmp_path, *flags)
    assert_alike(images(tmp_path), made)


@pytest.mark.slow
def test_batches_on_fewer_devices_make_the_same_images(model, made, tmp_path):
    errors = run(model, tmp_path, "--batch_size", "2", num_devices=2)
    assert "2 at once on each of 2 cpu" in errors
    assert_alike(images(tmp_path), made)


@pytest.mark.slow
def test_two_processes_make_the_same_images(model, made, tmp_path):
    flags = [*OPTIONS, "--parallel", "branches=2", "rows=2", "--num_processes", "2"]
    flags += ["--coordinator_address", f"localhost:{free_port()}"]
    starts = [
        start(model, tmp_path, *flags, "--process_id", str(k), num_devices=2) for k in range(2)
    ]
    printed = [process.communicate(timeout=600)[0] for process in starts]
    assert [process.returncode for process in starts] == [0, 0]
    assert "000.png" in printed[0] and ".png" not in printed[1]
    assert_alike(images(tmp_path), made)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--parallel", "branches=2", "rows=2"]])
def test_executables_make_the_same_images(model, made, tmp_path, flags):
    """Compiled by the first start, loaded by the second one."""
    for name, how in (("first", "compiled (no executable"), ("second", "loaded in")):
        errors = run(model, tmp_path / name, *flags, "--executable_dir", tmp_path / "store")
        assert how in errors
        assert_alike(images(tmp_path / name), made)
    np.testing.assert_array_equal(images(tmp_path / "second"), images(tmp_path / "first"))


@pytest.mark.slow
def test_variant_and_unet(model, made, tmp_path):
    """A UNet of its own, and weights of a variant, in place of the model's."""
    for file in (model / "unet").iterdir():
        (tmp_path / "unet").mkdir(exist_ok=True)
        (tmp_path / "unet" / file.name).write_bytes(file.read_bytes())
    run(model, tmp_path / "out", "--unet", tmp_path / "unet")
    np.testing.assert_array_equal(images(tmp_path / "out"), made)
    other = make_tiny_xl(tmp_path / "other", seed=1)
    for file in other.glob("*/*.safetensors"):
        file.rename(file.with_suffix(".fp16.safetensors"))
    run(other, tmp_path / "variant", "--variant", "fp16")
    assert np.any(np.stack(images(tmp_path / "variant")) != np.stack(made))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--devices unet=4", "unet=4 does not exist; devices are numbered from 0 to 3"),
        ("--devices unet=1 --parallel rows=2", "--devices excludes --parallel"),
        (
            "--devices unet=1 --executable_dir store",
            "--executable_dir excludes --devices and --preview",
        ),
        ("--unet SD", "no config.json in SD; check the path"),
        (  # images of 4 * 3 * 64 * 64 bytes, and more than a tenth of a megabyte of weights
            "--batch_size 80 --num_images 320",
            "320 images of 64x64 pixels, 80 at once on each of 4 cpu; memory: at least 16.5 MB "
            "of 10 MB, of which the weights are 778 kB; lower --batch_size",
        ),
    ],
)
def test_bad_input_is_one_line(model, tmp_path, capsys, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("diffusers_flax.devices.memory.host_memory", lambda: 10**7)
    (tmp_path / "SD" / "unet").mkdir(parents=True)
    (tmp_path / "SD" / "unet" / "config.json").write_text(json.dumps({}))
    with pytest.raises(SystemExit) as ended:
        generate_cli.main(["--model", str(model), "--prompt", "it", *flags.split()])
    assert ended.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and message in error
