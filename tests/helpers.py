"""What several test files share: images, editing and sampling with PyTorch, runs of the trainer."""

import io
import json
import socket
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from diffusers import (
    StableDiffusionInstructPix2PixPipeline,
    StableDiffusionXLInstructPix2PixPipeline,
)
from PIL import Image

import flax_train_instruct_pix2pix as trainer
from diffusers_flax.pipelines.sampling import keys_per_image, normal

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = ["make it red", "invert the colors", "turn it upside down", ""]


def free_port():
    """A port of this machine that nothing listens on."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def slow(*cases):
    """Cases of parametrize that only `make test-all` runs; a case of several values is a tuple."""
    cases = (case if isinstance(case, tuple) else (case,) for case in cases)
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def random_inputs(batch, height, width, factor=4):
    """Images (B, H, W, 3) in [0, 1], not just noise, and latents (B, 4, h, w)."""
    rng = np.random.default_rng(0)
    patches = rng.random((batch, height // 8, width // 8, 3), np.float32)
    images = patches.repeat(8, 1).repeat(8, 2)
    latents = rng.standard_normal((batch, 4, height // factor, width // factor), np.float32)
    return images, latents


def psnr(a, b):
    """In dB, of images in [0, 1]."""
    return -10 * np.log10(np.mean((np.asarray(a) - np.asarray(b)) ** 2) + 1e-20)


def edit_with_torch(
    folder, prompts, images, latents, negative_prompt=None, output_type="np", **scales
):
    """PyTorch's pipeline, 20 steps; (B, H, W, 3) in [0, 1], or of another output_type."""
    pipeline = StableDiffusionInstructPix2PixPipeline.from_pretrained(folder, safety_checker=None)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(
        prompts,
        image=torch.tensor(images).permute(0, 3, 1, 2),
        num_inference_steps=20,
        latents=torch.tensor(latents),
        negative_prompt=negative_prompt,
        output_type=output_type,
        **scales,
    ).images


def check_output_types(loaded, torch_latents, input_images, latents, **options):
    """np, pil and latent of an edit pipeline; torch_latents: the result's, of PyTorch."""
    pipeline, params = loaded
    inputs = pipeline.prepare_inputs(PROMPTS[: len(input_images)], input_images)
    edit = partial(pipeline, *inputs, params, jax.random.key(0), latents=latents, **options)
    found = edit(output_type="latent").images
    assert found.shape == torch_latents.shape and found.dtype == jnp.float32
    assert np.abs(found - torch_latents.numpy()).max() < 1e-4 * torch_latents.abs().max()
    arrays = edit().images
    np.testing.assert_allclose(pipeline.decode(params, {}, None, None, found), arrays, atol=1e-5)
    images, *flags = edit(output_type="pil", return_dict=False)  # SDXL has no flags
    assert not any(flags) and len(images) == len(input_images)
    for image, array in zip(images, arrays):
        assert np.abs(np.asarray(image) / 255 - array).max() < 0.6 / 255
    assert (edit(output_type=None).images == arrays).all()
    with pytest.raises(ValueError, match="output_type='pt' is unknown; take np, pil or latent"):
        edit(output_type="pt")


def edit_with_torch_xl(
    folder, prompts, images, latents, negative_prompt=None, output_type="np", **options
):
    """PyTorch's pipeline, 8 steps; (B, H, W, 3) in [0, 1], or of another output_type."""
    pipeline = StableDiffusionXLInstructPix2PixPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(
        prompts,
        image=torch.tensor(images).permute(0, 3, 1, 2),
        height=images.shape[1],
        width=images.shape[2],
        num_inference_steps=8,
        latents=torch.tensor(latents),
        negative_prompt=negative_prompt,
        output_type=output_type,
        **options,
    ).images


def open_theirs(folder, scheduler):
    """PyTorch's pipeline with our scheduler's config."""
    cls = diffusers.DiffusionPipeline
    theirs = cls.from_pretrained(folder, safety_checker=None)
    theirs.set_progress_bar_config(disable=True)
    name = type(scheduler).__name__.removeprefix("Flax")
    theirs.scheduler = getattr(diffusers, name).from_config(dict(scheduler.config))
    return theirs


def images_of(pipeline, params, key=3, steps=12, size=64, **options):
    prompt_ids = pipeline.prepare_inputs("make it red")
    options = dict(num_inference_steps=steps, height=size, width=size) | options
    return pipeline(prompt_ids, params, jax.random.key(key), **options).images


def images_of_theirs(theirs, key=3, steps=12, size=64, call=None, factor=4, **options):
    shape = (4, size // factor, size // factor)
    noise = normal(keys_per_image(jax.random.key(key), 1), 0, shape)
    latents = torch.from_numpy(np.array(noise))
    options = dict(num_inference_steps=steps, height=size, width=size) | options
    call = call or theirs
    return call("make it red", latents=latents, output_type="np", **options).images


def save_tiny_vae(folder, channels):
    """A random AutoencoderTiny that reduces images by 2^(n - 1), n = len(channels)."""
    torch.manual_seed(0)
    blocks = (1,) * len(channels)
    tiny = diffusers.AutoencoderTiny(
        encoder_block_out_channels=channels,
        decoder_block_out_channels=channels,
        num_encoder_blocks=blocks,
        num_decoder_blocks=blocks,
    )
    tiny.save_pretrained(folder)
    return tiny


def photo(width, height, seed=0):
    """Smooth random colours with something different in each corner."""
    small = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


SIZE = dict(vae_channels=(16, 32), unet_channels=(16,))  # latents are half as wide as images
# A run small enough to be computed again by hand. Adam's epsilon is large so that the sign of a
# gradient that is zero but for rounding does not matter.
RUN = dict(
    resolution=16,
    train_batch_size=8,
    max_train_steps=5,
    learning_rate=0.03,
    lr_scheduler="cosine",
    lr_warmup_steps=2,
    adam_epsilon=1e-3,
    adam_weight_decay=0.1,
    max_grad_norm=0.05,
    conditioning_dropout_prob=0.2,
    seed=3,
    logging_steps=1,
)
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
COLUMNS = ("original_image", "edit_prompt", "edited_image")


def encoded(seed, size=(18, 22)):
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def write_shard(path, num_rows, seed=0, broken=(), columns=COLUMNS, sizes=((18, 22),)):
    """A parquet shard in the public dataset's schema; rows `broken` have no original image.

    The images of row i have size i of sizes, (height, width), repeated.
    """
    originals, edits = (
        [encoded([seed, i, column], sizes[i % len(sizes)]) for i in range(num_rows)]
        for column in range(2)
    )
    for i in broken:
        originals[i] = b"no image"
    prompts = [PROMPTS[i % 3] for i in range(num_rows)]

    def cells(images):
        return pa.array([{"bytes": data, "path": None} for data in images], IMAGE)

    table = dict(zip(columns, (cells(originals), pa.array(prompts), cells(edits))))
    pq.write_table(pa.table(table), path)


def config_of(model, data, out, **options):
    folders = dict(
        pretrained_model_name_or_path=str(model),
        unet_model_name_or_path=str(Path(model) / "unet"),
        train_data_dir=(str(data),),
        output_dir=str(out),
    )
    return trainer.Config(**folders | RUN | options)


def flags_of(config):
    """The command line that gives this config."""
    args = []
    for name, value in asdict(config).items():
        if isinstance(value, bool):
            args.append(f"--{name}" if value else f"--no_{name}")
        elif isinstance(value, tuple):
            # Without values, --aspect_ratio_buckets is another flag than none.
            is_given = value or name == "aspect_ratio_buckets"
            args += [f"--{name}", *map(str, value)] if is_given else []
        else:
            args.append(f"--{name}={value}")
    return args


def run_main(config, monkeypatch):
    monkeypatch.setattr(sys, "argv", [trainer.__file__, *flags_of(config)])
    trainer.main(sys.argv[1:])


def run_badly(config, monkeypatch, capsys):
    """The one line of a refusal of the trainer, which leaves the working directory as it was."""
    files = sorted(Path().rglob("*"))
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        run_main(config, monkeypatch)
    captured = capsys.readouterr()
    assert stop.value.code == 2 and captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert sorted(Path().rglob("*")) == files
    return captured.err


def read_metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def edit_json(file, **values):
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def random_normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)
