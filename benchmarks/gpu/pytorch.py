"""PyTorch's contenders of benchmarks.gpu, with random weights that are made on the GPU.

Every function returns {name: (prepare, run)}, see harness.time_in_this_process, for the given names
of "eager" and "compiled".
"""

from functools import partial

import jax
import torch
from diffusers import (
    AutoencoderKL,
    DDPMScheduler,
    EulerDiscreteScheduler,
    PNDMScheduler,
    StableDiffusionInstructPix2PixPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from benchmarks.harness import PROMPT, SCALES, synchronize
from benchmarks.random_models import TOKENIZER
from benchmarks.train import Step, make_batch, torch_training
from benchmarks.unet import make_inputs, torch_contenders
from compiling.jobs import Sdxl


def torch_module(cls, config, device, dtype):
    """A module of diffusers or transformers with random weights, made on the device."""
    with torch.device(device):
        if cls in (CLIPTextModel, CLIPTextModelWithProjection):
            config = {k: v for k, v in config.items() if not k.startswith("_")}
            module = cls(CLIPTextConfig(**config))
        else:
            module = cls.from_config(dict(config))
    return module.to(device, dtype)


def torch_unet(names, case, batch_size, with_gradient, device):
    """A pass of the UNet; case: see benchmarks/unet.py."""
    dtype = torch.float32 if with_gradient else torch.bfloat16
    unet = torch_module(UNet2DConditionModel, case.config, device, dtype)
    inputs = jax.tree.map(lambda x: torch.from_numpy(x).to(device), make_inputs(case, batch_size))
    inputs = [inputs[0].to(dtype), inputs[1], inputs[2].to(dtype), inputs[3]]
    compiled = "compiled" in names
    found = torch_contenders(unet, inputs, with_gradient, True, compiled)
    return {name: found[f"torch {name}"] for name in names}


def torch_train(names, configs, size, device):
    """An optimizer step; size: see plan.SIZES."""
    unet = torch_module(UNet2DConditionModel, configs["unet"], device, torch.float32)
    vae = torch_module(AutoencoderKL, configs["vae"], device, torch.bfloat16)
    text_encoder = torch_module(CLIPTextModel, configs["text_encoder"], device, torch.bfloat16)
    scheduler = DDPMScheduler.from_config(dict(configs["scheduler"]))
    batch = make_batch(Step(resolution=size.train_resolution, batch_size=size.pairs))
    run = torch_training(unet, vae, text_encoder, scheduler, batch)
    programs = {
        "eager": (unet, torch.contiguous_format),
        "compiled": (torch.compile(unet, dynamic=False), torch.channels_last),
    }

    def prepare(name):
        unet.to(memory_format=programs[name][1])

    return {name: (partial(prepare, name), partial(run, programs[name][0])) for name in names}


def torch_images(names, pipeline, run):
    """Images of a pipeline, whose UNet and decoder may be compiled."""
    unet, decode = pipeline.unet, pipeline.vae.decode
    parts = {
        "eager": (unet, decode, torch.contiguous_format),
        "compiled": (
            torch.compile(unet, dynamic=False),
            torch.compile(decode, dynamic=False),
            torch.channels_last,
        ),
    }
    pipeline.set_progress_bar_config(disable=True)

    def prepare(name):
        pipeline.unet, pipeline.vae.decode, memory_format = parts[name]
        unet.to(memory_format=memory_format)

    return {name: (partial(prepare, name), run) for name in names}


def torch_sdxl(names, configs, size, device):
    """An SDXL image; configs: {part: config}."""
    make = partial(torch_module, device=device, dtype=torch.bfloat16)
    pipeline = StableDiffusionXLPipeline(
        vae=make(AutoencoderKL, configs["vae"]),
        text_encoder=make(CLIPTextModel, configs["text_encoder"]),
        text_encoder_2=make(CLIPTextModelWithProjection, configs["text_encoder_2"]),
        tokenizer=CLIPTokenizer.from_pretrained(TOKENIZER),
        tokenizer_2=CLIPTokenizer.from_pretrained(TOKENIZER),
        unet=make(UNet2DConditionModel, configs["unet"]),
        scheduler=EulerDiscreteScheduler.from_config(dict(configs["scheduler"])),
        add_watermarker=False,
    )

    def run():
        pipeline(
            PROMPT,
            height=size.image_size,
            width=size.image_size,
            num_inference_steps=size.num_inference_steps,
            guidance_scale=Sdxl.guidance_scale,
            output_type="pt",
        )
        synchronize(device)

    return torch_images(names, pipeline, run)


def torch_edit(names, configs, size, device):
    """An edit; configs: {part: config}."""
    make = partial(torch_module, device=device, dtype=torch.bfloat16)
    pipeline = StableDiffusionInstructPix2PixPipeline(
        vae=make(AutoencoderKL, configs["vae"]),
        text_encoder=make(CLIPTextModel, configs["text_encoder"]),
        tokenizer=CLIPTokenizer.from_pretrained(TOKENIZER),
        unet=make(UNet2DConditionModel, configs["unet"]),
        scheduler=PNDMScheduler.from_config(dict(configs["scheduler"])),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    image = torch.rand(1, 3, size.resolution, size.resolution, device=device)

    def run():
        steps = size.num_inference_steps
        pipeline(PROMPT, image, num_inference_steps=steps, output_type="pt", **SCALES)
        synchronize(device)

    return torch_images(names, pipeline, run)
