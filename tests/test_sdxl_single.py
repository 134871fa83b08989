"""sdxl_single.py by its command line, on a tiny SDXL; sdxl_single_aot.py makes the same images."""

import os
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from helpers import ROOT, free_port, model_flags
from PIL import Image
from safetensors.numpy import save_file
from tiny_models import make_tiny_pipeline, make_tiny_xl

import sdxl_single
import sdxl_single_aot
from diffusers_flax.generating.captions import GRID_IMAGE_SIZE, GRID_MARGIN, LINE_HEIGHT
from diffusers_flax.models.base import FlaxModelMixin

PROMPTS = ("make it", "make it red", "it")
OPTIONS = ["--num_inference_steps", "3", "--num_images", "2", "--prompt", *PROMPTS]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_xl(tmp_path_factory.mktemp("tiny") / "xl")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("executables") / "store"


def run(script, model, output, *options, num_devices=4):
    """Run a program in a new process; return its stderr."""
    # The default code generators: with others the two scripts may differ in the last bit.
    flags = (
        f"--xla_force_host_platform_device_count={num_devices} "
        "--xla_cpu_parallel_codegen_split_count=1"
    )
    done = subprocess.run(
        [sys.executable, ROOT / script, *model_flags(model, output), *options],
        env=os.environ | {"XLA_FLAGS": flags},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert str(output / "000.png") in done.stdout
    return done.stderr


def images(folder):
    return [np.asarray(Image.open(file)) for file in sorted(folder.glob("0*.png"))]


@pytest.fixture(scope="module")
def made(model, tmp_path_factory):
    """Six images by sdxl_single.py on four devices: padded and trimmed."""
    folder = tmp_path_factory.mktemp("made")
    run("sdxl_single.py", model, folder, *OPTIONS, "--grid", folder / "grid.png")
    return folder


def test_images_and_grid(made):
    found = images(made)
    assert [x.shape for x in found] == [(64, 64, 3)] * 6
    assert len({x.tobytes() for x in found}) == 6
    grid, margin, line = np.asarray(Image.open(made / "grid.png")), GRID_MARGIN, LINE_HEIGHT
    side = GRID_IMAGE_SIZE  # of the images, enlarged
    assert grid.shape == (3 * (side + line + margin) + margin, 2 * (side + margin) + margin, 3)
    top = margin + side + line + margin
    enlarged = Image.fromarray(found[2]).resize((side, side), Image.Resampling.LANCZOS)
    np.testing.assert_array_equal(grid[top : top + side, margin : margin + side], enlarged)
    captions = grid[margin + side : margin + side + line]
    assert captions[:, :margin].min() == 255 and captions[:, margin : margin + side].min() < 80
    np.testing.assert_array_equal(  # of the two images of the first prompt
        captions[:, margin : margin + side], captions[:, 2 * margin + side : 2 * (margin + side)]
    )


def assert_alike(found, expected):
    """Up to rounding, which depends on how many threads a device has."""
    assert len(found) == len(expected)
    difference = np.abs(np.int16(found) - np.int16(expected))
    assert difference.max() <= 1 and difference.mean() < 0.01


@pytest.mark.slow
def test_branch_and_spatial_parallelism(model, made, tmp_path):
    shared = [*OPTIONS, "--parallel", "branches=2", "rows=2"]
    run("sdxl_single.py", model, tmp_path / "jit", *shared)
    assert_alike(images(tmp_path / "jit"), images(made))
    for name, how in (("compiled", "compiled (no"), ("loaded", "loaded in")):
        store = ["--executable_dir", tmp_path / "store"]
        assert how in run("sdxl_single_aot.py", model, tmp_path / name, *shared, *store)
        assert_alike(images(tmp_path / name), images(made))


@pytest.mark.slow
def test_same_images_by_two_processes(model, made, tmp_path):
    flags = [*model_flags(model, tmp_path / "out"), *OPTIONS, "--parallel", "branches=2", "rows=2"]
    flags += ["--coordinator_address", f"localhost:{free_port()}", "--num_processes", "2"]
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    starts = [
        subprocess.Popen(
            [sys.executable, ROOT / "sdxl_single.py", *flags, "--process_id", str(k)],
            env=env,
            stdout=subprocess.PIPE,
            text=True,
        )
        for k in range(2)
    ]
    printed = [start.communicate(timeout=300)[0] for start in starts]
    assert [start.returncode for start in starts] == [0, 0]
    assert "000.png" in printed[0] and ".png" not in printed[1]
    assert_alike(images(tmp_path / "out"), images(made))


@pytest.mark.slow
def test_same_images_on_any_number_of_devices(model, made, tmp_path, monkeypatch, store):
    expected = images(made)
    devices = jax.local_devices()
    for num_devices in (1, 2):
        monkeypatch.setattr(jax, "local_devices", lambda n=num_devices, backend=None: devices[:n])
        output = tmp_path / str(num_devices)
        flags = [*model_flags(model, output), *OPTIONS, "--compilation_cache_dir", ""]
        sdxl_single.main(flags)
        assert_alike(images(output), expected)
    run("sdxl_single.py", model, tmp_path / "8", *OPTIONS, num_devices=8)
    assert_alike(images(tmp_path / "8"), expected)


@pytest.mark.slow
def test_component_parallelism(model, made, tmp_path, capsys):
    flags = ["--devices", "text=3", "unet=1", "vae=2", "--batch_size", "4"]
    errors = run("sdxl_single.py", model, tmp_path, *OPTIONS, *flags)
    assert "4 at once with text on 3, unet on 1, vae on 2 of 4 cpu; memory" in errors
    for found, expected in zip(images(tmp_path), images(made), strict=True):
        assert_alike(found, expected)
    for given, message in (
        (["--devices", "unet=4"], "--devices unet=4 does not exist; this machine has 4"),
        (["--devices", "unet=1", "--parallel", "rows=2"], "--devices excludes --parallel"),
        (["--devices", "unet=1", "--offload", "layer"], "--offload layer and --devices both"),
        (["--vae_tile", "48"], "--vae_tile 48 is not a multiple of 32 pixels, 32 or more; try 64"),
    ):
        with pytest.raises(SystemExit):
            sdxl_single.main([*model_flags(model, tmp_path / "out"), *given])
        assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_offload_and_storage(model, made, tmp_path, store):
    """A CPU fetches nothing; both programs store the same numbers."""
    stored = []
    for script in ("sdxl_single.py", "sdxl_single_aot.py"):
        flags = [*OPTIONS, *(["--executable_dir", store] if "aot" in script else [])]
        errors = run(script, model, tmp_path / script, *flags, "--offload", "group")
        assert "; --offload group changes nothing on a cpu" in errors
        np.testing.assert_array_equal(images(tmp_path / script), images(made))
        folder = tmp_path / f"int8 {script}"
        run(script, model, folder, *flags, "--storage", "int8", "--offload", "layer")
        stored.append(images(folder))
    np.testing.assert_array_equal(*stored)
    assert (np.array(stored[0]) != np.array(images(made))).any()


@pytest.mark.slow
def test_the_twin_makes_the_same_tiles(model, tmp_path, store):
    """The executable of whole images is not taken for tiles."""
    options = [*OPTIONS[:2], "--prompt", "it", "--num_images", "1"]
    found = {}
    for script, tile in (("single_aot", 0), ("single_aot", 32), ("single", 32)):
        saved = ["--executable_dir", store] if "aot" in script else []
        output = tmp_path / f"{tile}_{script}"
        flags = ["--vae_tile", str(tile), *saved]
        errors = run(f"sdxl_{script}.py", model, output, *options, *flags, num_devices=1)
        assert ("tiles of 32 pixels" in errors) == bool(tile)
        (found[script, tile],) = images(output)
    np.testing.assert_array_equal(found["single", 32], found["single_aot", 32])
    assert (found["single_aot", 0] != found["single_aot", 32]).any()


def test_the_twin_makes_the_same_and_loads_its_executable(model, made, store, tmp_path):
    kept = ["--executable_dir", store]
    errors = run("sdxl_single_aot.py", model, tmp_path / "first", *OPTIONS, *kept)
    assert "compiled (no executable of these settings is saved) in" in errors
    assert "6 images of 64x64 pixels, 1 at once on each of 4 cpu; memory: at least " in errors
    assert store.stat().st_mode & 0o777 == 0o700
    errors = run("sdxl_single_aot.py", model, tmp_path / "second", *OPTIONS, *kept)
    assert "loaded in" in errors
    for folder in ("first", "second"):
        np.testing.assert_array_equal(images(tmp_path / folder), images(made))


def states(folder):
    """{name of a file: what changes when it is written again}."""
    return {file.name: (file.stat().st_ino, file.stat().st_mtime_ns) for file in folder.iterdir()}


@pytest.mark.slow
def test_an_interrupted_run_is_continued(model, made, tmp_path, capsys, monkeypatch):
    """The twin continues it too; with all images in place no model is loaded."""
    folder = tmp_path / "made"
    shutil.copytree(made, folder)
    for name in ("001.png", "004.png", "grid.png"):
        (folder / name).unlink()
    (folder / ".unfinished-001.png").write_text("of a kill")
    before = states(folder)
    flags = [*model_flags(model, folder), *OPTIONS]
    sdxl_single.main([*flags, "--grid", str(folder / "grid.png"), "--batch_size", "3"])
    captured = capsys.readouterr()
    assert "made already by this command: 4 of 6 images\n" in captured.err
    assert "2 images of 64x64 pixels" in captured.err
    assert captured.out.split() == [str(folder / f"{i:03}.png") for i in range(6)]
    after = states(folder)
    assert after.keys() == before.keys() - {".unfinished-001.png"} | {
        "001.png", "004.png", "grid.png"
    }  # fmt: skip
    assert {name: after[name] for name in before.keys() & after.keys()}.items() <= before.items()
    assert_alike(images(folder), images(made))
    np.testing.assert_array_equal(*(Image.open(x / "000.png") for x in (folder, made)))

    for script in (sdxl_single, sdxl_single_aot):
        monkeypatch.setattr(script, "generate", None)
        script.main(flags)
        assert "made already by this command: 6 of 6 images\n" in capsys.readouterr().err
    assert states(folder) == after


@pytest.mark.slow
def test_more_of_one_program(model, tmp_path, capsys):
    """Latents from a file, one prompt for all devices, several images per device, no guidance."""
    noise = np.random.default_rng(0).standard_normal((9, 4, 8, 8), np.float32)
    np.save(tmp_path / "noise.npy", noise)
    (tmp_path / "prompts.txt").write_text("it\x0bnow\n\nred\n")  # a newline alone ends a prompt
    flags = ["--num_inference_steps", "1", "--latents", str(tmp_path / "noise.npy")]
    cache = ["--compilation_cache_dir", ""]
    sdxl_single.main([*model_flags(model, tmp_path / "a"), *flags, *cache, "--prompt", "it"])
    assert len(images(tmp_path / "a")) == len(jax.devices())
    flags += ["--batch_size", "2", "--prompts_file", str(tmp_path / "prompts.txt")]
    flags += ["--num_images", "4", "--guidance_scale", "1"]
    sdxl_single.main([*model_flags(model, tmp_path / "b"), *flags, *cache])
    sdxl_single_aot.main([*model_flags(model, tmp_path / "c"), *flags, "--executable_dir", ""])
    assert len(images(tmp_path / "b")) == 8
    np.testing.assert_array_equal(images(tmp_path / "b"), images(tmp_path / "c"))


@pytest.mark.variants
@pytest.mark.parametrize("script", [sdxl_single, sdxl_single_aot], ids=["jit", "aot"])
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--height 100", "size 100x64 (height x width) is not divisible by 8; try 96x64"),
        ("--prompt", "--prompt is empty; give one or more texts"),
        ("--prompts_file EMPTY", "has no prompt; write one per line"),
        ("--prompts_file nowhere", "--prompts_file nowhere cannot be read"),
        ("--latents NOISE --num_images 3", "3 images are more than the 2 latents of"),
        ("--latents EMPTY", "cannot be read as a .npy file"),
        ("--latents NOISE --width 32", "has shape (2, 4, 8, 8), these images need (4, 4, 8, 4)"),
        ("--latents EMPTY.npz", "has no array of real numbers; numpy.save writes one"),
        ("--latents BROKEN --num_images 1", "has numbers that are not finite"),
        ("--prompts_file LATIN", "is not UTF-8 text; save it as UTF-8"),
        ("--prompts_file EMPTY --prompt it", "are both given; give one of them"),
        ("--num_images 1 --output a.png --grid a.png", "--grid a.png is an image of --output too"),
        ("--num_images 1 --output EMPTY", "ends in no extension; name it .png"),
        ("--num_inference_steps 0", "--num_inference_steps 0 must be at least 1"),
        (
            "--num_inference_steps 2000",
            "--num_inference_steps 2000 must be a whole number from 1 to",
        ),
        ("--guidance_scale -1", "-1.0 must be 0 or more; --guidance_scale 1 switches guidance off"),
        ("--guidance_rescale 2", "--guidance_rescale 2.0 must be from 0 to 1"),
        ("--scheduler magic", "--scheduler magic is unknown; choose from ddpm"),
        ("--seed -1", "--seed -1 must be from 0"),
        ("--output a.png --num_images 2", "--output a.png is one file for 2 images"),
        ("--output a.gif --num_images 1", "a.gif ends in .gif; name it .png"),
        (
            "--pretrained_model_name_or_path SD",
            "is a StableDiffusionPipeline, not Stable Diffusion XL; give an SDXL model, or make "
            "images with generate_cli.py",
        ),
        (
            "--pretrained_model_name_or_path EDITS",
            "is an edit model (StableDiffusionXLInstructPix2PixPipeline); edit_cli.py edits",
        ),
        ("--unet SD/unet", "SD/unet is a UNet of Stable Diffusion 1.x or 2.x, the model is SDXL"),
        ("--unet SD", "SD is a pipeline; give its UNet, "),
        ("--prompt it red --output a.png", "give a directory, or one prompt and --num_images 1 to"),
        ("--accelerate deepcache:interval=25", "interval=25 must be below the 25 steps"),
        ("--accelerate spectrum:window=200", "window=200.0 must be below the 25 steps"),
        (  # images of 4 * 3 * 64 * 64 bytes, and more than a tenth of a megabyte of weights
            "--batch_size 8000 --prompt it",
            "32000 images of 64x64 pixels, 8000 at once on each of 4 cpu take at least 1.57 GB of "
            "the 1 GB of this machine, of which the weights are 778 kB; lower --batch_size",
        ),
        ("--pretrained_model_name_or_path REFINER", "it is a refiner, which needs an image"),
        ("--pretrained_model_name_or_path nowhere", "nowhere has no model_index.json"),
        ("--storage int8 --accelerate int8", "--storage int8 and --accelerate int8 both change"),
        (
            "--vae_dtype bfloat16 --accelerate taesd",
            "--vae_dtype bfloat16 has no effect with --accelerate taesd",
        ),
    ],
)
def test_bad_input_is_one_line(model, tmp_path, capsys, monkeypatch, script, flags, message):
    """Mistakes are found before weights are read."""
    np.save(tmp_path / "noise.npy", np.zeros((2, 4, 8, 8), np.float32))
    np.save(tmp_path / "broken.npy", np.full((1, 4, 8, 8), np.nan, np.float32))
    np.savez(tmp_path / "empty.npz", noise=np.zeros(3))
    (tmp_path / "latin").write_bytes("caf\u00e9".encode("latin-1"))
    (tmp_path / "empty").write_text("\n")

    def read_weights(*arguments, **options):
        raise AssertionError("too late: the weights are being read")

    monkeypatch.setattr(FlaxModelMixin, "from_pretrained", read_weights)
    monkeypatch.setattr("diffusers_flax.devices.memory.host_memory", lambda: 10**9)
    if "EDITS" in flags:
        make_tiny_xl(tmp_path / "EDITS", edits=True)
    if "SD" in flags:
        make_tiny_pipeline(tmp_path / "SD", in_channels=4)
    if "REFINER" in flags:
        make_tiny_xl(tmp_path / "REFINER", refiner=True)
    for name in ("SD", "REFINER", "EDITS"):
        flags = flags.replace(name, str(tmp_path / name))
    flags = flags.replace("NOISE", str(tmp_path / "noise.npy"))
    flags = flags.replace("BROKEN", str(tmp_path / "broken.npy"))
    for name in ("EMPTY", "LATIN"):
        flags = flags.replace(name, str(tmp_path / name.lower()))
    with pytest.raises(SystemExit) as ended:
        script.main([*model_flags(model, tmp_path / "out"), *flags.split()])
    assert ended.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and message in error
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_embeddings(model, store, tmp_path, caplog):
    """Both programs make the same image, which depends on the vectors; unused tokens warn."""
    made = {}
    for seed in (0, 1):
        rng = np.random.default_rng(seed)
        arrays = {"clip_l": rng.normal(size=(2, 16)), "clip_g": rng.normal(size=(2, 32))}
        file = tmp_path / f"style-{seed}.safetensors"
        save_file({name: x.astype(np.float32) for name, x in arrays.items()}, file)
        for script in (sdxl_single, sdxl_single_aot):
            folder = tmp_path / f"{seed}_{script.__name__}"
            options = ["--embedding", f"{file}:<x>", "--prompt", "a <x>", "--num_images", "1"]
            options += ["--num_inference_steps", "2"]
            options += ["--executable_dir", str(store)] if script is sdxl_single_aot else []
            script.main([*model_flags(model, folder), *options])
            made[seed, script] = images(folder)[0]
        np.testing.assert_array_equal(made[seed, sdxl_single], made[seed, sdxl_single_aot])
    assert np.any(made[0, sdxl_single] != made[1, sdxl_single])
    assert not caplog.records
    options = ["--embedding", str(file), "--num_inference_steps", "2", "--prompt", "it"]
    sdxl_single.main([*model_flags(model, tmp_path / "unused"), *options])
    assert f"--embedding {file} has no effect: no prompt has its token, style-1" in caplog.text
