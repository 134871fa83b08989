# ruff: noqa: E501 - lines as the documents have them
"""Runs the JAX code of Hugging Face's guide "JAX/Flax" unchanged, on eight devices.

It differs from the guide in import lines, names of checkpoints, what belongs to notebooks, and what
the guide leaves out ("..."). tests/drop_in/sdxl.py has the calls of the guide for SDXL.
"""

import os
import subprocess
import sys

import pytest
from helpers import ROOT
from tiny_models import make_tiny_pipeline

GUIDE = """
import jax

num_devices = jax.device_count()
device_type = jax.devices()[0].device_kind

print(f"Found {num_devices} JAX devices of type {device_type}.")

import numpy as np
import jax.numpy as jnp

from pathlib import Path
from jax import pmap
from flax.jax_utils import replicate
from flax.training.common_utils import shard
from PIL import Image

from huggingface_hub import notebook_login
from diffusers_flax.pipelines.stable_diffusion import FlaxStableDiffusionPipeline

dtype = jnp.bfloat16
pipeline, params = FlaxStableDiffusionPipeline.from_pretrained(
    CHECKPOINT,
    revision="bf16",
    dtype=dtype,
)

prompt = "A cinematic film still of Morgan Freeman starring as Jimi Hendrix, portrait, 40mm lens, shallow depth of field, close up, split lighting, cinematic"
prompt = [prompt] * jax.device_count()
prompt_ids = pipeline.prepare_inputs(prompt)
SHOW(prompt_ids.shape)

# parameters
p_params = replicate(params)

# arrays
prompt_ids = shard(prompt_ids)
SHOW(prompt_ids.shape)

def create_key(seed=0):
    return jax.random.PRNGKey(seed)

rng = create_key(0)
rng = jax.random.split(rng, jax.device_count())

images = pipeline(prompt_ids, p_params, rng, jit=True)[0]
SHOW(images.shape)
compiled = images

from diffusers.utils import make_image_grid

images = images.reshape((images.shape[0] * images.shape[1],) + images.shape[-3:])
images = pipeline.numpy_to_pil(images)
SHOW(make_image_grid(images, 2, 4).size)

p_generate = pmap(pipeline._generate)

images = p_generate(prompt_ids, p_params, rng)
images = images.block_until_ready()
SHOW(images.shape)
SHOW(float(abs(images - compiled).max()) < 1e-2)
SHOW(len(np.unique(np.asarray(images), axis=0)))

prompts = [
    "Labrador in the style of Hokusai",
    "Painting of a squirrel skating in New York",
    "HAL-9000 in the style of Van Gogh",
    "Times Square under water, with fish and a dolphin swimming around",
    "Ancient Roman fresco showing a man working on his laptop",
    "Close-up photograph of young black woman against urban background, high quality, bokeh",
    "Armchair in the shape of an avocado",
    "Clown astronaut in space, with Earth in the background",
]

prompt_ids = pipeline.prepare_inputs(prompts)
prompt_ids = shard(prompt_ids)

images = pipeline(prompt_ids, p_params, rng, jit=True).images
images = images.reshape((images.shape[0] * images.shape[1],) + images.shape[-3:])
images = pipeline.numpy_to_pil(images)

SHOW(make_image_grid(images, 2, 4).size)
"""


def run_snippet(code, tmp_path, checkpoint):
    """Run code with SHOW and CHECKPOINT defined, on eight devices; return the shown lines."""
    shown = tmp_path / "shown"
    prelude = f"def SHOW(*values):\n    print(*values, file=open({str(shown)!r}, 'a'))\n"
    prelude += f"CHECKPOINT = {str(checkpoint)!r}\n"
    flags = os.environ["XLA_FLAGS"].replace("device_count=4", "device_count=8")
    done = subprocess.run(
        [sys.executable, "-c", prelude + code],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": flags},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return shown.read_text().splitlines()


@pytest.mark.slow
def test_flax_guide(tmp_path):
    model = make_tiny_pipeline(
        tmp_path / "model", in_channels=4, scheduler="pndm", vae_channels=(8, 8, 16, 16)
    )  # fmt: skip
    assert run_snippet(GUIDE, tmp_path, model) == [
        "(8, 77)",
        "(8, 1, 77)",
        "(8, 1, 128, 128, 3)",
        "(512, 256)",
        "(8, 1, 128, 128, 3)",
        "True",
        "8",
        "(512, 256)",
    ]
