# ruff: noqa: E501 - lines as the documents have them
"""Runs the JAX code of published tutorials unchanged, on eight devices.

Sources: Hugging Face's guide "JAX/Flax" (and the notebook it grew from), and "Stable Diffusion XL
for JAX + TPUv5e". What differs from them: the import lines of the classes that are ours, names of
checkpoints, what belongs to Colab and notebooks, what they leave out ("..."), and jax's
initialize_cache, which jax itself has renamed.
"""

import os
import subprocess
import sys

import pytest
from helpers import ROOT
from tiny_models import make_tiny_pipeline, make_tiny_xl

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

SDXL = """
import jax
import jax.numpy as jnp
import numpy as np
from flax.jax_utils import replicate
from diffusers_flax.pipelines.stable_diffusion_xl import FlaxStableDiffusionXLPipeline

from jax.experimental.compilation_cache import compilation_cache as cc
cc.set_cache_dir(CACHE)
import time

NUM_DEVICES = jax.device_count()

pipeline, params = FlaxStableDiffusionXLPipeline.from_pretrained(
    CHECKPOINT, revision="refs/pr/95", split_head_dim=True
)

scheduler_state = params.pop("scheduler")
params = jax.tree_util.tree_map(lambda x: x.astype(jnp.bfloat16), params)
params["scheduler"] = scheduler_state

default_prompt = "a photograph"
default_neg_prompt = "a drawing"
default_seed = 33
default_guidance_scale = 5.0
default_num_steps = 25

def tokenize_prompt(prompt, neg_prompt):
    prompt_ids = pipeline.prepare_inputs(prompt)
    neg_prompt_ids = pipeline.prepare_inputs(neg_prompt)
    return prompt_ids, neg_prompt_ids

p_params = replicate(params)

def replicate_all(prompt_ids, neg_prompt_ids, seed):  # the document only describes it
    rng = jax.random.split(jax.random.PRNGKey(seed), NUM_DEVICES)
    return replicate(prompt_ids), replicate(neg_prompt_ids), rng
"""

JIT = """
def generate(  # the document only describes it
    prompt,
    negative_prompt,
    seed=default_seed,
    guidance_scale=default_guidance_scale,
    num_inference_steps=default_num_steps,
):
    prompt_ids, neg_prompt_ids = tokenize_prompt(prompt, negative_prompt)
    prompt_ids, neg_prompt_ids, rng = replicate_all(prompt_ids, neg_prompt_ids, seed)
    images = pipeline(
        prompt_ids,
        p_params,
        rng,
        num_inference_steps=num_inference_steps,
        neg_prompt_ids=neg_prompt_ids,
        guidance_scale=guidance_scale,
        jit=True,
    ).images
    SHOW(images.shape)
    images = images.reshape((images.shape[0] * images.shape[1], ) + images.shape[-3:])
    return pipeline.numpy_to_pil(np.array(images))

start = time.time()
print(f"Compiling ...")
generate(default_prompt, default_neg_prompt)
print(f"Compiled in {time.time() - start}")

start = time.time()
prompt = "photo of a rhino dressed suit and tie sitting at a table in a bar with a bar stools, award winning photography, Elke vogelsang"
neg_prompt = "cartoon, illustration, animation. face. male, female"
images = generate(prompt, neg_prompt)
print(f"Inference in {time.time() - start}")
SHOW(len(images), len({image.tobytes() for image in images}))
"""

AOT = """
from jax import pmap

height = width = SIZE

def aot_compile(
        prompt=default_prompt,
        negative_prompt=default_neg_prompt,
        seed=default_seed,
        guidance_scale=default_guidance_scale,
        num_inference_steps=default_num_steps
):
    prompt_ids, neg_prompt_ids = tokenize_prompt(prompt, negative_prompt)
    prompt_ids, neg_prompt_ids, rng = replicate_all(prompt_ids, neg_prompt_ids, seed)
    g = jnp.array([guidance_scale] * prompt_ids.shape[0], dtype=jnp.float32)
    g = g[:, None]

    return pmap(
        pipeline._generate,static_broadcasted_argnums=[3, 4, 5, 9]
        ).lower(
            prompt_ids,
            p_params,
            rng,
            num_inference_steps, # num_inference_steps
            height, # height
            width, # width
            g,
            None,
            neg_prompt_ids,
            False # return_latents
            ).compile()

start = time.time()
print("Compiling ...")
p_generate = aot_compile()
print(f"Compiled in {time.time() - start}")

def generate(
    prompt,
    negative_prompt,
    seed=default_seed,
    guidance_scale=default_guidance_scale
):
    prompt_ids, neg_prompt_ids = tokenize_prompt(prompt, negative_prompt)
    prompt_ids, neg_prompt_ids, rng = replicate_all(prompt_ids, neg_prompt_ids, seed)
    g = jnp.array([guidance_scale] * prompt_ids.shape[0], dtype=jnp.float32)
    g = g[:, None]
    images = p_generate(
        prompt_ids,
        p_params,
        rng,
        g,
        None,
        neg_prompt_ids)
    SHOW(images.shape)

    # convert the images to PIL
    images = images.reshape((images.shape[0] * images.shape[1], ) + images.shape[-3:])
    return pipeline.numpy_to_pil(np.array(images))

start = time.time()
prompt = "photo of a rhino dressed suit and tie sitting at a table in a bar with a bar stools, award winning photography, Elke vogelsang"
neg_prompt = "cartoon, illustration, animation. face. male, female"
aot_images = generate(prompt, neg_prompt)
print(f"First inference in {time.time() - start}")

start = time.time()
prompt = "photo of a rhino dressed suit and tie sitting at a table in a bar with a bar stools, award winning photography, Elke vogelsang"
neg_prompt = "cartoon, illustration, animation. face. male, female"
aot_images = generate(prompt, neg_prompt)
print(f"Inference in {time.time() - start}")
SHOW(max(abs(np.int16(a) - np.int16(b)).max() for a, b in zip(images, aot_images)) <= 2)
"""

CLASSES = """
from transformers import CLIPImageProcessor, CLIPTokenizer
from diffusers_flax.models.clip import FlaxCLIPTextModel
from diffusers_flax.models.unet import FlaxUNet2DConditionModel
from diffusers_flax.models.vae import FlaxAutoencoderKL
from diffusers_flax.pipelines.stable_diffusion import FlaxStableDiffusionPipeline
from diffusers_flax.schedulers.ddpm import FlaxDDPMScheduler
from diffusers_flax.schedulers.pndm import FlaxPNDMScheduler
"""


def run_snippet(code, tmp_path, **names):
    """Run code with SHOW and names defined, on eight devices; return the shown lines."""
    shown = tmp_path / "shown"
    names = "".join(f"{name} = {value!r}\n" for name, value in names.items())
    prelude = f"def SHOW(*values):\n    print(*values, file=open({str(shown)!r}, 'a'))\n{names}"
    flags = os.environ["XLA_FLAGS"].replace("device_count=4", "device_count=8")
    done = subprocess.run(
        [sys.executable, "-c", prelude + code],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": flags},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return shown.read_text().splitlines() if shown.exists() else []


@pytest.mark.slow
def test_flax_guide(tmp_path):
    model = make_tiny_pipeline(
        tmp_path / "model", in_channels=4, scheduler="pndm", vae_channels=(8, 8, 16, 16)
    )  # fmt: skip
    assert run_snippet(GUIDE, tmp_path, CHECKPOINT=str(model)) == [
        "(8, 77)",
        "(8, 1, 77)",
        "(8, 1, 128, 128, 3)",
        "(512, 256)",
        "(8, 1, 128, 128, 3)",
        "True",
        "8",
        "(512, 256)",
    ]


@pytest.mark.slow
def test_sdxl_guide(tmp_path):
    model = make_tiny_xl(tmp_path / "model")
    names = dict(CHECKPOINT=str(model), CACHE=str(tmp_path / "cache"), SIZE=64)
    assert run_snippet(SDXL + JIT + AOT, tmp_path, **names) == [
        *["(8, 1, 64, 64, 3)"] * 2,
        "8 8",
        *["(8, 1, 64, 64, 3)"] * 2,
        "True",
    ]
    assert list((tmp_path / "cache").iterdir())


@pytest.mark.slow
def test_the_classes_have_their_names(tmp_path):
    assert run_snippet(CLASSES, tmp_path) == []
