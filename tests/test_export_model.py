"""export_model.py and examples/run_onnx.py: files are compared with the Flax models they are of."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline
from helpers import ROOT, photo, psnr
from original_layout import original_layout, write_single_file
from PIL import Image
from safetensors.torch import save_file
from tiny_models import make_tiny_pipeline, make_tiny_xl
from trajectories import (
    NOISE,
    STABLE_DIFFUSION,
    START,
    model,
    torch_class,
    torch_trajectory,
)

import export_model
from diffusers_flax.images import MAX_PIXELS, READ_FORMATS
from diffusers_flax.pipelines.base import pipeline_class
from examples import run_onnx


def needs(format):
    """Marks a slow test that make test-export runs, and make test-all if its packages are there."""
    missing = [x for x in export_model.PACKAGES[format] if not export_model.is_installed(x)]
    reason = f"needs requirements-export.txt: {', '.join(missing)}"
    skip = pytest.mark.skipif(bool(missing), reason=reason)
    return lambda test: pytest.mark.slow(skip(test))


INT8, FLOAT16 = ("--quantize", "int8"), ("--dtype", "float16")
OPENVINO = ("--format", "openvino")
# Two levels: the UNet of the first halves sides, which may be odd.
MODELS = {
    "demo": lambda folder: ROOT / "demo" / "base_model",
    "edit": lambda folder: make_tiny_pipeline(folder, unet_channels=(16, 32)),
    "text": lambda folder: make_tiny_pipeline(folder, in_channels=4, scheduler="euler"),
    "xl": make_tiny_xl,
    "xl_edit": lambda folder: make_tiny_xl(folder, edits=True),
}


def export(model, folder, *flags):
    export_model.main(["--model", str(model), "--output_dir", str(folder), *flags])


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """Function (name, *flags) -> (a model of MODELS, its export), which no test changes."""
    folder, found = tmp_path_factory.mktemp("exports"), {}

    def get(name, *flags):
        if (name, flags) not in found:
            model = folder / name
            model = model if model.exists() else MODELS[name](model)
            export(model, target := folder / f"export{len(found)}", *flags)
            found[name, flags] = model, target
        return found[name, flags]

    return get


def ours_and_theirs(model, folder, tmp_path, python=sys.executable):
    """The same image by our pipeline and by examples/run_onnx.py, float32 (H, W, 3)."""
    pipeline, params = pipeline_class(model).from_pretrained(model)
    h, w = 8, 11
    factor = pipeline.vae_scale_factor
    shape = (1, pipeline.vae.latent_channels, h, w)
    noise = np.random.default_rng(1).standard_normal(shape, np.float32)
    np.save(tmp_path / "noise.npy", noise)
    size = dict(height=h * factor, width=w * factor)
    command = [python, ROOT / "examples/run_onnx.py", "--model", folder]
    command += ["--prompt", "make it red", "--guidance_scale", "5"]
    command += ["--height", str(size["height"]), "--width", str(size["width"])]
    command += ["--noise", tmp_path / "noise.npy", "--output", tmp_path / "image.npy"]
    if "InstructPix2Pix" in type(pipeline).__name__:
        image = photo(size["width"], size["height"])
        image.save(tmp_path / "input.png")
        command += ["--input", tmp_path / "input.png"]
        inputs = pipeline.prepare_inputs("make it red", image)
    else:
        inputs = [pipeline.prepare_inputs("make it red")]
    options = dict(num_inference_steps=20, latents=noise, guidance_scale=5.0, **size)
    ours = pipeline(*inputs, params, jax.random.key(0), **options).images[0]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return np.asarray(ours), np.load(tmp_path / "image.npy")


def write_scheduler(folder, content):
    """A folder with a scheduler_config.json."""
    (folder / "scheduler").mkdir(exist_ok=True)
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(content))
    return folder


V, ZERO_SNR = {"prediction_type": "v_prediction"}, {"rescale_betas_zero_snr": True}
KARRAS, NOT_ZERO = {"use_karras_sigmas": True}, {"final_sigmas_type": "sigma_min"}
SPACINGS = [{"timestep_spacing": x, "steps_offset": 1} for x in ("leading", "linspace", "trailing")]
OPTIONS = {  # of schedulers; what is left out is the default of diffusers' class
    "ddim": [{}, {"clip_sample_range": 0.5}, {"set_alpha_to_one": False, "clip_sample": False}],
    "pndm": [{}, {"set_alpha_to_one": True}],
    "euler": [KARRAS, KARRAS | {"sigma_min": 0.1, "sigma_max": 8.0}, NOT_ZERO, KARRAS | NOT_ZERO],
    "euler_ancestral": [{}],
    "dpmsolver++": [
        *({"solver_order": 1}, {"lower_order_final": False}, {"euler_at_final": True}),
        *(KARRAS, KARRAS | {"sigma_min": 0.1, "sigma_max": 8.0}, KARRAS | NOT_ZERO),
        NOT_ZERO | {"lower_order_final": False},
    ],
}


def test_run_onnx_reads_the_images_of_all_programs():
    assert [*READ_FORMATS] == run_onnx.FORMATS and run_onnx.MAX_PIXELS == MAX_PIXELS


@pytest.mark.filterwarnings("ignore:__array__:DeprecationWarning")  # of diffusers
@pytest.mark.parametrize("name", OPTIONS)
def test_steps_of_run_onnx_match_pytorch(tmp_path, monkeypatch, name):
    cases = [*OPTIONS[name], *SPACINGS, *(spacing | V for spacing in SPACINGS)]
    cases += [{"beta_schedule": "squaredcos_cap_v2"}, {"beta_start": 0.001}]
    cases += [{"num_train_timesteps": 100, "trained_betas": list(np.linspace(0.001, 0.03, 100))}]
    if name not in ("pndm", "euler_ancestral"):  # which have no such predictions
        cases += [{"prediction_type": "sample"}]
    if name != "pndm":
        cases += [spacing | V | ZERO_SNR for spacing in SPACINGS]
    for options in cases:
        config = STABLE_DIFFUSION | ({"skip_prk_steps": True} if name == "pndm" else {}) | options
        content = config | {"_class_name": torch_class(name).__name__}
        scheduler = run_onnx.read_scheduler(write_scheduler(tmp_path, content))
        for num_steps in (1, 3, 20):
            timesteps, samples = torch_trajectory(name, config, num_steps, monkeypatch)
            noise, visited = iter(NOISE), []
            rng = SimpleNamespace(standard_normal=lambda *_, noise=noise: next(noise))

            def predict(x, t, visited=visited):
                visited.append(t)
                return model(x, t)

            planned = run_onnx.plan(*scheduler, num_steps)
            found = run_onnx.denoise(predict, START, *scheduler, planned, rng)
            np.testing.assert_allclose(visited, timesteps, atol=1e-3)
            # With a sigma of 4096 diffusers' float32 has three digits left of x_0.
            share = 3e-3 if "rescale_betas_zero_snr" in options and num_steps < 20 else 1e-5
            atol = share * max(1, np.abs(samples[-1]).max())
            np.testing.assert_allclose(found, samples[-1], 0, atol, err_msg=f"{options}")


EULER = {"_class_name": "EulerDiscreteScheduler", "beta_schedule": "linear"}
SOLVER = {"_class_name": "DPMSolverMultistepScheduler", "beta_schedule": "linear"}
LACKING = [  # (content, --scheduler, what is said)
    ({"_class_name": "EDMEulerScheduler"}, None, "EDMEulerScheduler, which this example lacks\n"),
    (
        {"_class_name": "EDMEulerScheduler"},
        "euler",
        "EDMEulerScheduler, which this example lacks\n",
    ),
    (EULER | {"_class_name": "UniPCMultistepScheduler"}, None, "choose one with --scheduler: ddim"),
    (EULER | {"prediction_type": "flow_prediction"}, None, "prediction_type='flow_prediction'"),
    (EULER | {"timestep_type": "continuous"}, None, "timestep_type='continuous'"),
    (EULER | {"interpolation_type": "log_linear"}, None, "interpolation_type='log_linear'"),
    (EULER | {"use_beta_sigmas": True}, None, "use_beta_sigmas=True for EulerDiscreteScheduler"),
    (SOLVER | {"use_exponential_sigmas": True}, None, "this example has False"),
    (SOLVER | {"solver_order": 3}, None, "solver_order=3 for DPMSolver"),
    (SOLVER | {"thresholding": True}, None, "thresholding=True"),
    (EULER, "pndm", "skip_prk_steps=False for PNDMScheduler; this example has True"),
]


@pytest.mark.parametrize(("content", "scheduler", "said"), LACKING)
def test_scheduler_entries_that_run_onnx_lacks(tmp_path, content, scheduler, said):
    with pytest.raises(ValueError) as error:
        run_onnx.read_scheduler(write_scheduler(tmp_path, content), scheduler)
    assert said in f"{error.value}\n"


def test_another_scheduler_does_not_clip_latents(tmp_path):
    """Unless the file says so; DDIM itself clips where its file has no entry, as in diffusers."""
    for content, clips in (
        (EULER, False),
        (EULER | {"clip_sample": True}, True),
        (EULER | {"_class_name": "DDIMScheduler"}, True),
    ):
        _, entries = run_onnx.read_scheduler(write_scheduler(tmp_path, content), "ddim")
        assert entries["clip_sample"] == clips


def test_images_that_run_onnx_reads(tmp_path):
    """Transparent pixels are white, 16 bits are scaled."""
    half = Image.fromarray(np.uint8([[[200, 0, 0, 0], [200, 0, 0, 128]]]))
    on_white = [[255, 255, 255], [227, 127, 127]]
    deep = Image.fromarray(np.uint16([[25700, 65535]]))
    palette = Image.fromarray(np.uint8([[0, 1]])).convert("P")
    palette.putpalette([200, 0, 0, 9, 8, 7])
    palette.info["transparency"] = 0
    for image, pixels in (
        (half, on_white),
        (half.convert("LA").convert("La"), [[255] * 3, [157] * 3]),
        (palette, [[255] * 3, [9, 8, 7]]),
        (deep, [[100] * 3, [255] * 3]),
        (deep.convert("I"), [[100] * 3, [255] * 3]),
        (half.convert("CMYK"), [[200, 0, 0]] * 2),
    ):
        found = np.asarray(run_onnx.to_rgb(image))[0]
        np.testing.assert_allclose(found, pixels, atol=1, err_msg=image.mode)
    deep.save(tmp_path / "deep.png", transparency=25700)
    found = np.asarray(run_onnx.read_image(tmp_path / "deep.png"))
    assert (found == 255).all()
    deep.convert("F").save(tmp_path / "float.tiff")
    with pytest.raises(ValueError, match=r"float\.tiff cannot be read as an image: mode F"):
        run_onnx.read_image(tmp_path / "float.tiff")


def test_image_that_a_program_reads(tmp_path, capsys):
    """Transparent pixels are white; the sizes are printed."""
    from exporting.run_stablehlo import read_input_image

    Image.new("RGBA", (90, 60), (200, 0, 0, 0)).save(file := tmp_path / "clear.png")
    assert (read_input_image(file, (2, 3, 32, 64)) == np.ones((2, 3, 32, 64))).all()
    assert capsys.readouterr().err == f"{file}, 90x60, at 64x32\n"


def test_sizes_of_edits_by_run_onnx():
    configs = {"vae_decoder": {"block_out_channels": [8] * 4}, "unet": {"sample_size": 64}}
    parts = {name: SimpleNamespace(config=config) for name, config in configs.items()}
    for size, flags, wanted in (
        ((4000, 3000), {}, (384, 512)),
        ((100, 200), {}, (512, 256)),
        ((4000, 30), {}, (8, 512)),
        ((4000, 3000), {"width": 256}, (384, 256)),
        (None, {"height": 64}, (64, 512)),
    ):
        options = SimpleNamespace(**{"height": None, "width": None} | flags)
        image = Image.new("RGB", size) if size else None
        assert run_onnx.choose_size(options, parts, image) == wanted
    with pytest.raises(ValueError, match="--width 30 is not a multiple of 8; try 24 or 32"):
        run_onnx.choose_size(SimpleNamespace(height=None, width=30), parts, None)


# Least PSNR of an image of 20 steps, dB.
@needs("onnx")
@pytest.mark.parametrize(
    ("name", "flags", "least"),
    [
        *((name, (), 60) for name in MODELS),
        ("demo", FLOAT16, 50),
        ("xl_edit", FLOAT16, 50),
        ("demo", INT8, 35),
        ("edit", INT8, 35),
    ],
)
def test_image_of_onnx_files(exports, tmp_path, name, flags, least):
    ours, theirs = ours_and_theirs(*exports(name, *flags), tmp_path)
    print(f"{name} {' '.join(flags)}: {psnr(ours, theirs):.1f} dB")
    assert ours.std() > 0.05 and psnr(ours, theirs) > least


def run_example(folder, output, *flags):
    """(image or None, stdout, stderr) of run_onnx.py."""
    command = [sys.executable, ROOT / "examples/run_onnx.py", "--model", folder, "--output", output]
    command += ["--prompt", "make it red", "--num_inference_steps", "2", *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return np.load(output) if output.suffix == ".npy" else None, done.stdout, done.stderr


@needs("onnx")
def test_scales_up_to_1_are_no_guidance_from_text(exports, tmp_path):
    _, folder = exports("text")
    scales = [["--guidance_scale", scale] for scale in ("0", "0.5", "1", "1.5")]
    images = [run_example(folder, tmp_path / "image.npy", *scale)[0] for scale in scales]
    assert (images[0] == images[2]).all() and (images[1] == images[2]).all()
    assert (images[3] != images[2]).any()


@needs("onnx")
def test_edit_of_a_transparent_photograph(exports, tmp_path):
    """It has the model's size, and is the edit of the photograph on white; progress is printed."""
    _, folder = exports("edit")
    clear = photo(400, 300).convert("RGBA")
    clear.putalpha(100)
    white = Image.alpha_composite(Image.new("RGBA", clear.size, "white"), clear)
    edits = []
    for image in (clear, white.convert("RGB")):
        image.save(file := tmp_path / "in.png")
        edit, written, progress = run_example(folder, tmp_path / "out.npy", "--input", file)
        edits.append(edit)
    assert edits[0].shape == (48, 64, 3) and (edits[0] == edits[1]).all()
    assert written == f"{tmp_path / 'out.npy'}\n"
    assert f"{file}, 400x300, at 64x48 with ddim" in progress and "step 2 of 2" in progress
    run_example(folder, tmp_path / "new" / "out.jpg", "--input", file, "--width", "32")
    with Image.open(tmp_path / "new" / "out.jpg") as written:
        assert written.size == (32, 48)


@needs("onnx")
def test_scheduler_of_an_export(tmp_path):
    """--scheduler takes the place of one that is not supported."""
    model = MODELS["text"](tmp_path / "model")
    write_scheduler(model, EULER | {"_class_name": "UniPCMultistepScheduler"})
    export(model, folder := tmp_path / "export", "--scheduler", "dpmsolver++")
    content = json.loads((folder / "scheduler" / "scheduler_config.json").read_text())
    index = json.loads((folder / "model_index.json").read_text())
    assert content["_class_name"] == index["scheduler"][1] == "DPMSolverMultistepScheduler"
    *_, progress = run_example(folder, tmp_path / "image.png")
    assert "with dpmsolver++" in progress


@needs("openvino")
@pytest.mark.parametrize(
    ("name", "flags", "least"),
    [
        ("demo", (), 60),
        ("edit", (), 60),
        ("xl_edit", (), 60),
        ("demo", FLOAT16, 50),
        ("edit", FLOAT16, 50),
        ("demo", INT8, 35),
        ("edit", INT8, 35),
    ],
)
def test_image_of_openvino_files(exports, tmp_path, name, flags, least):
    ours, theirs = ours_and_theirs(*exports(name, *OPENVINO, *flags), tmp_path)
    print(f"{name} openvino {' '.join(flags)}: {psnr(ours, theirs):.1f} dB")
    assert ours.std() > 0.05 and psnr(ours, theirs) > least


@needs("openvino")
@pytest.mark.parametrize(
    ("name", "flags"),
    [*((name, ()) for name in MODELS), *((name, OPENVINO) for name in ("demo", "edit", "xl_edit"))],
)
def test_components_at_other_sizes(exports, name, flags):
    from exporting.components import exported_components, random_inputs, run_flax
    from exporting.onnx_files import open_onnx
    from exporting.openvino_files import open_openvino

    model, folder = exports(name, *flags)
    pipeline, params = pipeline_class(model).from_pretrained(model)
    for part in exported_components(pipeline):
        file = folder / part.name / ("openvino_model.xml" if flags else "model.onnx")
        run = (open_openvino if flags else open_onnx)(file)
        for checked in ((1, (8, 8)), (3, (24, 16)), (2, (9, 7))):
            inputs = random_inputs(part, pipeline, *checked)
            wanted = run_flax(part, pipeline, params[part.module], inputs)
            for ours, found in zip(wanted, run(inputs)):
                assert np.abs(ours - found).max() < 1e-4 * np.abs(ours).max()


@needs("onnx")
@pytest.mark.parametrize("name", MODELS)
def test_layout_of_an_export(exports, name):
    import onnx

    _, folder = exports(name)
    index = json.loads((folder / "model_index.json").read_text())
    names = [x for x in index if x.startswith(("unet", "text_encoder"))]
    for part in (*names, "vae_encoder", "vae_decoder"):
        model = onnx.load(folder / part / "model.onnx")
        assert [x.version for x in model.opset_import if not x.domain] == [18]
        properties = {x.key: x.value for x in model.metadata_props}
        assert "PyTorch" in properties["note"]
        assert float(properties["largest_difference"]) < 1e-4 * float(properties["largest_output"])
        assert (folder / part / "config.json").exists()
    assert (folder / "tokenizer" / "tokenizer.json").exists()
    assert (folder / "scheduler" / "scheduler_config.json").exists()
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]
    model = onnx.load(folder / "unet" / "model.onnx")
    inputs = {x.name: x.type.tensor_type.shape.dim for x in model.graph.input}
    assert [x.dim_param for x in inputs["sample"]] == ["batch_size", "", "height", "width"]
    assert ("time_ids" in inputs) == ("XL" in index["_class_name"])


@needs("onnx")
@pytest.mark.parametrize("flags", [(), INT8], ids=str)
def test_weights_beside_a_large_file(tmp_path, monkeypatch, flags):
    from exporting import onnx_files

    model = MODELS["text"](tmp_path / "model")
    monkeypatch.setattr(onnx_files, "LARGEST_FILE", 20_000)  # bytes
    export(model, tmp_path / "export", *flags)
    file = tmp_path / "export" / "unet" / "model.onnx"
    assert {x.name for x in file.parent.iterdir()} == {
        "config.json",
        file.name,
        f"{file.name}_data",
    }
    data = file.with_name(f"{file.name}_data")
    assert data.stat().st_size > 20_000
    ours, theirs = ours_and_theirs(model, tmp_path / "export", tmp_path)
    assert psnr(ours, theirs) > (35 if flags else 60)


@needs("onnx")
def test_lora_in_a_single_file(tmp_path):
    """The UNet and the text encoder are PyTorch's with the LoRA fused."""
    from exporting.components import exported_components, random_inputs
    from exporting.onnx_files import open_onnx

    model = make_tiny_pipeline(tmp_path / "model", in_channels=4, unet_channels=(16, 32))
    file = write_single_file(tmp_path / "model.safetensors", original_layout(model))
    theirs = StableDiffusionPipeline.from_pretrained(model, safety_checker=None)
    targets, tensors = ("attn2.to_k", "ff.net.2", "conv1", "q_proj"), {}
    for part in ("unet", "text_encoder"):
        for name, module in getattr(theirs, part).named_modules():
            if name.endswith(targets):
                out, num_in, *kernel = module.weight.shape
                down, up = (
                    torch.randn(2, num_in, *kernel),
                    torch.randn(out, 2, *(1 for _ in kernel)),
                )
                tensors[f"{part}.{name}.lora_A.weight"] = down / 8
                tensors[f"{part}.{name}.lora_B.weight"] = up
    save_file(tensors, lora := tmp_path / "lora.safetensors")
    flags = ["--config_name_or_path", str(model), "--lora", f"{lora}:0.8"]
    export(file, tmp_path / "export", *flags)

    pipeline, _ = pipeline_class(model).from_pretrained(model)
    unet, text, *_ = exported_components(pipeline)
    inputs = random_inputs(unet, pipeline, 2, (9, 6))
    given = {name: torch.from_numpy(x) for name, x in inputs.items()}
    ids = random_inputs(text, pipeline, 2, None)["input_ids"]

    def run_theirs():
        with torch.no_grad():
            states = theirs.text_encoder(torch.from_numpy(ids)).last_hidden_state
            return states.numpy(), theirs.unet(**given).sample.numpy()

    before = run_theirs()
    theirs.load_lora_weights(lora)
    theirs.fuse_lora(lora_scale=0.8)
    run = [open_onnx(tmp_path / "export" / part.name / "model.onnx") for part in (text, unet)]
    found = run[0]({"input_ids": ids})[0], run[1](inputs)[0]
    for x, fused, plain in zip(found, run_theirs(), before):
        assert np.abs(x - fused).max() < 1e-4 * np.abs(fused).max() < np.abs(plain - fused).max()


@needs("onnx")
def test_example_without_jax_and_torch(exports, tmp_path):
    model, folder = exports("xl_edit")
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    packages = ["onnxruntime", "numpy", "tokenizers", "pillow"]
    done = subprocess.run(
        [python, "-m", "pip", "install", "--quiet", *packages], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"pip cannot install {', '.join(packages)}: {done.stderr[-200:]}")
    for name in ("jax", "torch"):
        assert subprocess.run([python, "-c", f"import {name}"], capture_output=True).returncode
    ours, theirs = ours_and_theirs(model, folder, tmp_path, python)
    assert psnr(ours, theirs) > 60


def refusal(*flags):
    """What run_onnx.py says about its flags, on one line."""
    command = [sys.executable, ROOT / "examples/run_onnx.py", "--prompt", "it", *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    return done.stderr


WRONG_FOR_RUN_ONNX = [
    ([], "--model and --prompt must be given; --help lists the flags"),
    (["--model", "m"], "error: --prompt must be given"),
    (["--model", "m", "--promt", "it"], "--promt is unknown; --help lists the flags"),
    (["--model", "m", "--prompt", "make it \udcff red"], "it \\udcff red' is not valid UTF-8"),
    (["--model", "m", "--prompt", "it"], "--model m is no complete export"),
    (["--model", "m", "--prompt", "it", "--scheduler", "unipc"], "choose from"),
    (["--model", "m", "--prompt", "it", "--guidance_scale", "nan"], "--guidance_scale nan must"),
    (["--model", "m", "--prompt", "it", "--seed", "-1"], "--seed -1 must be from 0"),
    (["--model", "m", "--prompt", "it", "--input", "no.png"], "--input no.png is not a file"),
    (["--model", "m", "--prompt", "it", "--output", "a.gif"], "--output a.gif must be a file that"),
]


@pytest.mark.parametrize(("flags", "said"), WRONG_FOR_RUN_ONNX)
def test_wrong_flags_of_run_onnx(flags, said, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["run_onnx.py", *flags])
    with pytest.raises(SystemExit) as stop:
        run_onnx.main()
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and said in error


@needs("onnx")
def test_folders_that_run_onnx_refuses(exports, tmp_path, capsys):
    model, whole = exports("edit")
    assert "has no unet/model.onnx; export with onnx or openvino" in refusal("--model", model)
    assert "is no complete export; make one with export_model.py" in refusal("--model", tmp_path)
    assert "edits images and needs --input" in refusal("--model", whole)
    photo(64, 64).save(image := tmp_path / "in.png")
    flags = ["--model", whole, "--input", image]
    assert "--height 30 is not a multiple of 4" in refusal(*flags, "--height", "30")
    assert "--num_inference_steps 0 must be" in refusal(*flags, "--num_inference_steps", "0")
    shutil.copytree(whole, broken := tmp_path / "broken")
    file = broken / "unet" / "model.onnx"
    file.write_bytes(file.read_bytes()[:5000])
    assert "broken cannot be opened: " in refusal("--model", broken, "--input", image)
    # An export is no model to export, and a model is no place for an export.
    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        export(whole, tmp_path / "other")
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "vae" in error and not (tmp_path / "other").exists()
    with pytest.raises(SystemExit, match="2"):
        export(model, model, "--overwrite_output_dir")
    assert f"--output_dir {model} is a model, not an export" in capsys.readouterr().err


@needs("onnx")
def test_interruption(tmp_path, monkeypatch):
    from exporting import folders

    model = MODELS["text"](tmp_path / "model")
    folder = tmp_path / "export"

    def stop(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(folders, "compare_with_flax", stop)
    with pytest.raises(SystemExit, match="130"):
        export(model, folder)
    assert not folder.exists()


@needs("onnx")
def test_killed_export(exports, tmp_path):
    """The export before it still runs, a new directory is refused; the next start cleans up."""
    model, whole = exports("text")
    other = MODELS["edit"](tmp_path / "other")
    shutil.copytree(whole, old := tmp_path / "old")
    code = (
        "import os, signal, sys, export_model; from exporting import folders;"
        "folders.compare_with_flax = lambda *args: os.kill(os.getpid(), signal.SIGKILL);"
        "export_model.main(sys.argv[1:])"
    )
    for folder in (old, new := tmp_path / "new", new):
        flags = ["--model", other, "--output_dir", folder, "--overwrite_output_dir"]
        done = subprocess.run([sys.executable, "-c", code, *flags], cwd=ROOT)
        assert done.returncode == -9
        assert len(list(folder.glob(".saving-*"))) == 1
    ours, theirs = ours_and_theirs(model, old, tmp_path)
    assert psnr(ours, theirs) > 60
    assert "is no complete export" in refusal("--model", new)


@needs("openvino")
def test_an_export_of_another_format(exports, tmp_path, capsys):
    """It is refused, or replaced as a whole."""
    model, whole = exports("text")
    shutil.copytree(whole, folder := tmp_path / "export")
    (folder / "unet" / "model.onnx_data").write_bytes(b"weights")
    with pytest.raises(SystemExit, match="2"):
        export(model, folder, *OPENVINO)
    assert "is not empty (model_index.json, scheduler" in capsys.readouterr().err
    size = ["--height", "64", "--width", "64", "--num_inference_steps", "1"]
    program = ["--format", "stablehlo", *size, "--platform", "cpu"]
    export(model, folder, *program, "--overwrite_output_dir")
    (file,) = folder.glob("*.jaxexport")
    assert [x.name for x in (folder / "unet").iterdir()] == ["config.json"]
    assert "has no unet/model.onnx" in refusal("--model", folder)
    (folder / "model_index.json").unlink()
    with pytest.raises(SystemExit, match="2"):
        export_model.main(["--run", str(file), "--prompt", "it"])
    assert "is in an incomplete export" in capsys.readouterr().err
    export(model, folder, *OPENVINO, "--overwrite_output_dir")
    files = {"config.json", "openvino_model.xml", "openvino_model.bin"}
    assert {x.name for x in (folder / "unet").iterdir()} == files
    assert not [*folder.glob("*.jaxexport"), *folder.glob("weights*"), *folder.glob("image*")]


@needs("openvino")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch and diffusers
def test_benchmarks(tmp_path, monkeypatch):
    """With tiny models: an export of each format, and times of every contender with them."""
    from benchmarks.export import exports as benchmark

    monkeypatch.delenv("XLA_FLAGS")  # on one device
    output = tmp_path / "rows.json"
    flags = ["--output", str(output), "--work_dir", str(tmp_path / "work")]
    benchmark.main(["files", "--quick", *flags, "--names", "onnx", "openvino"])
    rows = json.loads(output.read_text())
    assert list(rows) == ["export sd15 onnx", "export sd15 openvino"]
    for row in rows.values():
        assert row["largest_share"] < 1e-4 and row["parts"].keys() >= {"unet", "vae_encoder"}
    tiny = ["--size", "tiny", "--resolution", "64", "--num_inference_steps", "2"]
    benchmark.main(["runtimes", *tiny, "--rounds", "1", "--seconds", "0", *flags])
    rows = {x: row for x, row in json.loads(output.read_text()).items() if x not in rows}
    assert {row["work"] for row in rows.values()} == {"runtimes, UNet", "runtimes, edit, 2 steps"}
    names = {"ours", "torch eager", "onnxruntime", "openvino"}
    assert all(row["seconds"].keys() == names for row in rows.values())


@needs("coreml")
@pytest.mark.parametrize(
    ("name", "flags", "num_values"),
    [
        ("xl", (), None),
        ("edit", ("--quantize", "palette8"), 256),
        ("xl_edit", ("--quantize", "palette6"), 64),
    ],
)
def test_coreml(tmp_path, name, flags, num_values):
    """coremltools opens the packages; matrices have tables of so many values."""
    import coremltools
    from coremltools.optimize.coreml import get_weights_metadata

    model, num_branches = MODELS[name](tmp_path / "model"), 3 if "edit" in name else 2
    size = ["--height", "64", "--width", "32", "--batch_size", "2"]
    export(model, folder := tmp_path / "export", "--format", "coreml", *size, *flags)
    factor = pipeline_class(model).from_pretrained(model)[0].vae_scale_factor
    h, w = 64 // factor, 32 // factor
    shapes = {
        "vae_encoder": {"sample": [2, 3, 64, 32], "latent_parameters": [2, 8, h, w]},
        "vae_decoder": {"latent_sample": [2, 4, h, w], "sample": [2, 3, 64, 32]},
        "text_encoder": {"input_ids": [2 * num_branches, 77]},
        "unet": {"timestep": [1], "out_sample": [2 * num_branches, 4, h, w]},
    }
    for part, wanted in shapes.items():
        file = folder / part / "model.mlpackage"
        opened = coremltools.models.MLModel(str(file), skip_model_load=True)
        description = opened.get_spec().description
        found = {
            x.name: list(x.type.multiArrayType.shape)
            for x in (*description.input, *description.output)
        }
        assert found.items() >= wanted.items()
        operations = [
            operation.type
            for function in opened.get_spec().mlProgram.functions.values()
            for block in function.block_specializations.values()
            for operation in block.operations
        ]
        assert ("constexpr_lut_to_dense" in operations) == (num_values is not None)
    if num_values is not None:
        weights = get_weights_metadata(opened, weight_threshold=2049)
        assert max(len(np.unique(x.val)) for x in weights.values()) <= num_values


@needs("stablehlo")
@pytest.mark.parametrize("name", ["text", "xl_edit"])
def test_stablehlo_is_bit_for_bit_jit(tmp_path, name):
    """In a process without our model code."""
    model, folder = MODELS[name](tmp_path / "model"), tmp_path / "programs"
    is_edit, h, w = name == "xl_edit", 64, 96
    size = ["--height", str(h), "--width", str(w), "--batch_size", "2"]
    export(model, folder, "--format", "stablehlo", *size, "--num_inference_steps", "3")
    file = folder / f"{'edit' if is_edit else 'image'}-batch2-{w}x{h}-3steps-cpu.jaxexport"
    image = photo(w, h)
    image.save(tmp_path / "input.png")
    code = (
        "import sys, export_model; export_model.main(sys.argv[1:]);"
        "others = {'torch', 'transformers'};"
        "assert not others & {name.partition('.')[0] for name in sys.modules};"
        "assert not [x for x in sys.modules if x.startswith('diffusers_flax.models')]"
    )
    flags = ["--run", file, "--prompt", "make it red", "--output", tmp_path / "image.npy"]
    flags += ["--seed", "5", *(["--input", tmp_path / "input.png"] if is_edit else [])]
    command = [sys.executable, "-c", code, *flags]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr

    pipeline, params = pipeline_class(model).from_pretrained(model)
    texts = ["make it red"] * 2
    inputs = pipeline.prepare_inputs(texts, *([image] if is_edit else []))
    inputs = inputs if is_edit else [inputs]
    options = dict(num_inference_steps=3, height=h, width=w)
    scales = dict(guidance_scale=np.float32(7.5))
    if is_edit:
        scales["image_guidance_scale"] = np.float32(1.5)
    else:
        scales["neg_prompt_ids"] = pipeline.prepare_text_inputs([""] * 2)

    def generate(params, inputs, scales):
        key = jax.random.key(5)
        return pipeline._generate(*inputs, params=params, prng_seed=key, **scales, **options)

    wanted = np.asarray(jax.jit(generate)(params, inputs, scales))
    assert (np.load(tmp_path / "image.npy") == wanted).all()
    if not is_edit:  # a number up to 1 is no guidance
        from exporting.run_stablehlo import run_program

        options |= dict(guidance_scale=0.0)
        plain = pipeline(*inputs, params, jax.random.key(5), **options).images
        found = run_program(file, "make it red", "", None, 5, (0, 1.5))
        assert psnr(found, plain) > 100


@needs("stablehlo")
def test_stablehlo_for_a_tpu_compiles(tmp_path):
    tpu = Path(sys.prefix, "tpu")  # see the Makefile
    if not tpu.exists():
        pytest.skip(f"needs libtpu in {tpu}")
    model = make_tiny_xl(tmp_path / "model")
    size = ["--height", "256", "--width", "256", "--num_inference_steps", "2"]
    export(model, tmp_path / "tpu", "--format", "stablehlo", "--platform", "tpu", *size)
    (file,) = (tmp_path / "tpu").glob("*-tpu.jaxexport")
    code = """
import sys
from pathlib import Path
import jax
from jax.experimental.topologies import get_topology_desc
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_optimization_level", "O0")  # whether it compiles, in less time
program = jax.export.deserialize(bytearray(Path(sys.argv[1]).read_bytes()))
device = get_topology_desc("v5e:2x2", "tpu").devices[0]
place = jax.sharding.SingleDeviceSharding(device)
args, _ = jax.tree.unflatten(program.in_tree, program.in_avals)
args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), args)
assert "tpu_custom_call" in jax.jit(program.call).lower(*args).compile().as_text()
"""
    env = os.environ | {"PYTHONPATH": str(tpu), "TPU_SKIP_MDS_QUERY": "1"}
    done = subprocess.run(
        [sys.executable, "-c", "import jax.export\n" + code, file],
        capture_output=True,
        text=True,
        env=env,
    )
    assert done.returncode == 0, done.stderr
    flags = ["--run", str(file), "--prompt", "it", "--output", str(tmp_path / "x.png")]
    with pytest.raises(SystemExit, match="2"):
        export_model.main(flags)


WRONG = [
    ([], "give --model and --output_dir to export, or --run and --prompt"),
    (["--format", "tflite"], "--format tflite is unknown; choose from coreml, onnx, openvino"),
    (["--model", "m", "--output_dir", "o", "--prompt", "x"], "--prompt goes with --run"),
    (["--model", "m", "--output_dir", "o", "--height", "64"], "--height 64 is for --format coreml"),
    (["--model", "m", "--output_dir", "o", "--dtype", "bfloat16"], "not for --format onnx"),
    (["--model", "m", "--output_dir", "o", "--quantize", "palette6"], "which has int8"),
    (["--run", "f", "--model", "m", "--prompt", "x"], "--model does not go with --run"),
    (["--run", "f"], "--run needs --prompt, a text"),
]


@pytest.mark.parametrize(("flags", "said"), WRONG)
@pytest.mark.variants
def test_wrong_flags(flags, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        export_model.main(flags)
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_missing_packages_and_models(tmp_path, monkeypatch, capsys):
    def message(*flags):
        with pytest.raises(SystemExit, match="2"):
            export_model.main(["--output_dir", str(tmp_path / "export"), *flags])
        assert not (tmp_path / "export").exists()
        return capsys.readouterr().err

    monkeypatch.setattr(export_model, "is_installed", lambda package: package != "onnxscript")
    said = "--format onnx needs onnxscript: pip install -r requirements-export.txt\n"
    assert message("--model", "x") == f"error: {said}"
    monkeypatch.setattr(export_model, "is_installed", lambda package: True)
    assert "has no model_index.json" in message("--model", str(tmp_path))
    model = make_tiny_pipeline(tmp_path / "model")
    flags = ["--model", str(model), "--format", "stablehlo", "--height", "63"]
    assert "size 63x" in message(*flags)
    shutil.rmtree(model / "unet")
    assert "lacks unet/config.json" in message("--model", str(model))
