"""Programs of jax.export, in a process without model code."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from exported import MODELS, export, needs
from helpers import ROOT, photo, psnr
from PIL import Image
from tiny_models import make_tiny_xl

import export_model
from diffusers_flax.pipelines.base import pipeline_class


def test_image_that_a_program_reads(tmp_path, capsys):
    """Transparent pixels are white; the sizes are printed."""
    from diffusers_flax.exporting.run_stablehlo import read_input_image

    Image.new("RGBA", (90, 60), (200, 0, 0, 0)).save(file := tmp_path / "clear.png")
    assert (read_input_image(file, (2, 3, 32, 64)) == np.ones((2, 3, 32, 64))).all()
    assert capsys.readouterr().err == f"{file}, 90x60, at 64x32\n"


@needs("stablehlo")
@pytest.mark.parametrize("name", ["text", "xl_edit", "reference"])
def test_stablehlo_is_bit_for_bit_jit(tmp_path, name):
    """In a process without our model code."""
    model, folder = MODELS[name](tmp_path / "model"), tmp_path / "programs"
    is_edit, has_reference, h, w = name != "text", name == "reference", 64, 96
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
    flags += ["--reference", tmp_path / "input.png"] if has_reference else []
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
    if has_reference:
        scales["reference"] = inputs[1]
    if name != "xl_edit":
        scales["neg_prompt_ids"] = pipeline.prepare_text_inputs([""] * 2)

    def generate(params, inputs, scales):
        key = jax.random.key(5)
        return pipeline._generate(*inputs, params=params, prng_seed=key, **scales, **options)

    wanted = np.asarray(jax.jit(generate)(params, inputs, scales))
    assert (np.load(tmp_path / "image.npy") == wanted).all()
    if not is_edit:  # a number up to 1 is no guidance
        from diffusers_flax.exporting.run_stablehlo import run_program

        options |= dict(guidance_scale=0.0)
        texts = {"prompt": "make it red", "negative_prompt": ""}
        plain = pipeline(*inputs, params, jax.random.key(5), **options).images
        found = run_program(file, texts, {}, 5, (0, 1.5))
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
