"""benchmarks/full_size.py with tiny models, and PyTorch parity at full size.

SDXL's UNet is compared at 512 pixels. Minutes, 20 GB of memory, 11 of disk:

    pytest -m slow -s tests/benchmarks/test_benchmark_full_size.py
"""

import json
import os
import resource
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import UNet2DConditionModel
from flax.traverse_util import flatten_dict
from helpers import ROOT

from benchmarks import full_size
from benchmarks.full_size import run_command
from benchmarks.random_models import TEXT_ENCODER, UNET, VAE
from benchmarks.rows import rows_of
from diffusers_flax.models.unet import FlaxUNet2DConditionModel
from diffusers_flax.published_configs import PUBLISHED_CONFIGS


def test_shapes_are_stable_diffusions():
    """Those of the published Flax checkpoints."""
    published = json.loads((ROOT / "tests" / "published_flax_param_shapes.json").read_text())
    for name, module in (("sd15_unet", UNET), ("vae", VAE), ("clip_l_text", TEXT_ENCODER)):
        shapes = jax.eval_shape(module.init_weights, jax.random.key(0))
        flat = {k: list(x.shape) for k, x in flatten_dict(shapes, sep="/").items()}
        assert flat == published[name]


def test_peak_memory_and_killing(tmp_path):
    """A process that briefly holds 300 MB, and one that is killed when a file exists."""
    hold = "import time; x = b'1' * 300_000_000; time.sleep(0.3); del x; time.sleep(0.3)"
    figures, output = run_command(["-c", f"{hold}; print('done')"])
    assert 0.27 < figures["peak_gib"] < 0.35  # 300 MB and Python's own
    assert 0 < figures["peak_after_seconds"] < figures["seconds"] - 0.2
    assert output == "done\n"

    wait = f"import time; open({str(tmp_path / 'file')!r}, 'w'); time.sleep(60)"
    figures, _ = run_command(["-c", wait], kill_when=(tmp_path / "file").exists)
    assert figures["seconds"] < 30

    with pytest.raises(ChildProcessError, match="exit code 3"):
        run_command(["-c", "raise SystemExit(3)"])
    with pytest.raises(ChildProcessError, match="exit code 0"):  # it should have been killed
        run_command(["-c", ""], kill_when=lambda: False)


def test_command_line(tmp_path, capfd, monkeypatch):
    """All commands with tiny models; the trainer is killed and resumes."""
    monkeypatch.delenv("XLA_FLAGS")  # on one device
    arguments = ["commands", "--tiny", "--output", str(tmp_path / "out" / "quick.json")]
    full_size.main([*arguments, "--work_dir", str(tmp_path / "work")])
    results = json.loads((tmp_path / "out" / "quick.json").read_text())
    names = ["widen", "train, killed", "train, resumed", "edit"]
    figures = rows_of(results, "command")
    assert list(figures) == names
    for row in figures.values():
        assert 0.1 < row["peak_gib"] < row["machine"]["memory_gib"]
    killed, resumed = (figures[name]["command_line"] for name in names[1:3])
    assert killed == resumed
    assert (tmp_path / "work" / "edited.png").is_file()
    assert "resuming after step" in capfd.readouterr().out

    with pytest.raises(SystemExit) as ended:
        full_size.main([*arguments, "--work_dir", str(tmp_path / "work")])
    assert ended.value.code == 2
    error = capfd.readouterr().err.splitlines()[-1]  # a warning of a busy machine may precede it
    assert error.startswith("error: --work_dir ") and "is not empty" in error


def test_widening_and_pytorch_parity(tmp_path):
    torch.manual_seed(0)
    UNet2DConditionModel(cross_attention_dim=768).save_pretrained(tmp_path / "narrow")

    environment = {k: v for k, v in os.environ.items() if k != "JAX_DISABLE_MOST_OPTIMIZATIONS"}
    command = [sys.executable, "create_modified_unet.py", "--subfolder", ""]
    command += ["--pretrained_model_name_or_path", tmp_path / "narrow"]
    command += ["--output_dir", tmp_path / "wide"]
    started = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    seconds = time.perf_counter() - started
    assert done.returncode == 0, done.stderr
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    print(f"\n{done.stdout}create_modified_unet.py: {seconds:.0f} s, peak {peak:.1f} GiB")
    assert "largest difference" in done.stdout

    inputs = torch.randn(2, 8, 32, 32), torch.tensor([1, 999]), torch.randn(2, 77, 768)
    with torch.no_grad():
        theirs = UNet2DConditionModel.from_pretrained(tmp_path / "wide").eval()
        expected = theirs(*inputs).sample.numpy()
        narrow = UNet2DConditionModel.from_pretrained(tmp_path / "narrow").eval()
        unwidened = narrow(inputs[0][:, :4], *inputs[1:]).sample.numpy()
    del theirs, narrow
    assert np.abs(expected - unwidened).max() < 1e-5 * np.abs(unwidened).max()

    ours, params = FlaxUNet2DConditionModel.from_pretrained(tmp_path / "wide")
    started = time.perf_counter()
    result = jax.jit(ours.apply)({"params": params}, *(jnp.asarray(x.numpy()) for x in inputs))
    seconds = time.perf_counter() - started
    error = np.abs(result.sample - expected).max() / np.abs(expected).max()
    print(f"ours against PyTorch: {error:.1e} of the largest output, in {seconds:.0f} s")
    assert error < 2e-4


def in_new_process(function, *args):
    """(result of function, peak of its memory in GiB)."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        result = process.submit(function, *args).result()
        peak = process.submit(resource.getrusage, resource.RUSAGE_SELF).result().ru_maxrss / 2**20
    return result, peak


def sdxl_inputs():
    """(latents of 512 pixels, timestep, text, pooled text, time ids), float32 and int32."""
    rng = np.random.default_rng(0)
    shapes = (1, 4, 64, 64), (1, 77, 2048), (1, 1280)
    latents, text, pooled = (np.float32(rng.standard_normal(shape)) for shape in shapes)
    time_ids = np.float32([[512, 512, 0, 0, 512, 512]])
    return latents, np.int32([801]), text, {"text_embeds": pooled, "time_ids": time_ids}


def sdxl_of_pytorch(folder):
    torch.manual_seed(0)
    unet = UNet2DConditionModel(**PUBLISHED_CONFIGS["stable-diffusion-xl-base-1.0"]["unet"]).eval()
    unet.save_pretrained(folder)
    latents, t, text, added = jax.tree.map(torch.from_numpy, sdxl_inputs())
    with torch.inference_mode():
        return unet(latents, t, text, added_cond_kwargs=added).sample.numpy()


def sdxl_of_ours(folder):
    jax.config.update("jax_platforms", "cpu")
    unet, params = FlaxUNet2DConditionModel.from_pretrained(folder)
    leaves, structure = jax.tree.flatten(params)
    del params
    for i, leaf in enumerate(leaves):  # never twice
        leaves[i] = jax.device_put(leaf)
    params = jax.tree.unflatten(structure, leaves)
    return np.asarray(jax.jit(unet.apply)({"params": params}, *sdxl_inputs()).sample)


def test_sdxl_unet(tmp_path, monkeypatch):
    """One forward pass of the published shapes at 512 pixels, float32."""
    for name in ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS"):
        monkeypatch.delenv(name, raising=False)
    expected, their_peak = in_new_process(sdxl_of_pytorch, tmp_path / "unet")
    result, peak = in_new_process(sdxl_of_ours, tmp_path / "unet")
    error = np.abs(result - expected).max() / np.abs(expected).max()
    print(f"\npeaks of memory: PyTorch {their_peak:.1f} GiB, ours {peak:.1f} GiB")
    print(f"ours against PyTorch: {error:.1e} of the largest output")
    assert error < 2e-4


def test_a_long_list_of_prompts(tmp_path):
    """A run that is killed and continued makes each image once."""
    output = tmp_path / "full_size.json"
    flags = ["--num_prompts", "60", "--num_inference_steps", "10", "--kills", "2"]
    full_size.main(["serving", *flags, "--output", str(output)])
    row = json.loads(output.read_text())["serving"]
    first, second, end = row["files_after_each_kill"]
    assert 0 < first < second < end == 60
    assert row["files_written_twice"] == row["images_that_differ"] == 0
    assert 0 <= row["devices_waited_percent"] < 100
