"""Makes the images of a tiny pipeline on a layout of forced CPU devices, and saves them.

python tests/several_devices.py MODEL PARALLEL OUTPUT.npy HEIGHT [ADDRESS NUM_PROCESSES PROCESS_ID]

XLA_FLAGS has the number of devices of each process.
"""

import sys

import jax
import numpy as np

from diffusers_flax.devices.layout import parse_layout
from diffusers_flax.devices.processes import start_distributed
from diffusers_flax.images import prepare_images
from diffusers_flax.pipelines.base import FlaxDiffusionPipeline
from diffusers_flax.pipelines.instruct_pix2pix import InstructPix2Pix


def make_images(model, layout, num_images=1, height=96):
    """(num_images, height, 32, 3), from text or by edits of a gradient."""
    pipeline, params = FlaxDiffusionPipeline.from_pretrained(model, layout=layout)
    if layout is not None:
        params = jax.tree.map(np.asarray, params)
        layout.place_params(params)
    inputs = (np.concatenate([pipeline.prepare_text_inputs("it")] * num_images),)
    options = {"num_inference_steps": 2, "guidance_scale": 3.0, "height": height, "width": 32}
    if isinstance(pipeline, InstructPix2Pix):
        gradient = np.linspace(0, 1, height * 32 * 3, dtype=np.float32)
        gradient = gradient.reshape(1, height, 32, 3)
        inputs += (np.concatenate([prepare_images(gradient)] * num_images),)
        options["image_guidance_scale"] = 1.5
    return np.asarray(pipeline(*inputs, params, jax.random.key(3), **options).images)


if __name__ == "__main__":
    model, parallel, output, height, *processes = sys.argv[1:]
    if processes:
        start_distributed(processes[0], *map(int, processes[1:]))
    layout = parse_layout(parallel)
    np.save(output, make_images(model, layout, layout.data, int(height)))
