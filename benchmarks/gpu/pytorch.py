"""PyTorch's contenders, with random weights made on the GPU.

Every function of contenders returns {name: (prepare, run)}, see harness.time_in_this_process, for
the names: "eager", with contiguous kernels and images; "channels_last", eager too; "compiled",
torch.compile with channels_last.
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
from benchmarks.train import make_batch, torch_training
from benchmarks.unet import make_inputs, torch_contenders
from diffusers_flax.compiling.programs import SdxlFlags

FORMATS = {
    "eager": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "compiled": torch.channels_last,
}


def torch_module(cls, config, device, dtype):
    """A module of diffusers or transformers with random weights, made on the device."""
    with torch.device(device):
        if cls in (CLIPTextModel, CLIPTextModelWithProjection):
            config = {k: v for k, v in config.items() if not k.startswith("_")}
            module = cls(CLIPTextConfig(**config))
        else:
            module = cls.from_config(dict(config))
    return module.to(device, dtype)


def unet_contenders(names, case, batch_size, with_gradient, device):
    """A pass of the UNet; case: see benchmarks/unet.py."""
    dtype = torch.float32 if with_gradient else torch.bfloat16
    unet = torch_module(UNet2DConditionModel, case.config, device, dtype)
    inputs = jax.tree.map(lambda x: torch.from_numpy(x).to(device), make_inputs(case, batch_size))
    inputs = [inputs[0].to(dtype), inputs[1], inputs[2].to(dtype), inputs[3]]
    compiled = "compiled" in names
    found = torch_contenders(unet, inputs, with_gradient, True, compiled)
    return {name: found[f"torch {name}"] for name in names}


def programs_of(names, *functions):
    """{name of a contender: the functions, in torch.compile for "compiled"}."""
    programs = dict.fromkeys(names, functions)
    if "compiled" in names:
        programs["compiled"] = tuple(torch.compile(x, dynamic=False) for x in functions)
    return programs


def train_contenders(names, configs, sizes, device, latents=False):
    """An optimizer step.

    Args:
        names: of the contenders.
        configs: {component: config}.
        sizes: of flags.Sizes.
        device: "cuda" or "cpu".
        latents: the VAE's latents are in the batch.
    """
    unet = torch_module(UNet2DConditionModel, configs["unet"], device, torch.float32)
    vae = torch_module(AutoencoderKL, configs["vae"], device, torch.bfloat16)
    text_encoder = torch_module(CLIPTextModel, configs["text_encoder"], device, torch.bfloat16)
    scheduler = DDPMScheduler.from_config(dict(configs["scheduler"]))
    batch = make_batch(sizes.train_resolution, sizes.pairs, latents)
    run, arrange = torch_training(unet, vae, text_encoder, scheduler, batch)
    programs = programs_of(names, unet, vae.encode)
    return {
        name: (partial(arrange, FORMATS[name]), partial(run, *programs[name])) for name in names
    }


def image_contenders(names, pipeline, run):
    """Images of a pipeline, whose UNet and decoder may be compiled."""
    unet, vae, decode = pipeline.unet, pipeline.vae, pipeline.vae.decode
    programs = programs_of(names, unet, decode)
    pipeline.set_progress_bar_config(disable=True)

    def prepare(name):
        pipeline.unet, vae.decode = programs[name]
        unet.to(memory_format=FORMATS[name])
        vae.to(memory_format=FORMATS[name])

    return {name: (partial(prepare, name), run) for name in names}


def sdxl_contenders(names, configs, sizes, device, num_images):
    """SDXL images, num_images at once; the other arguments as for train_contenders."""
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
            num_images_per_prompt=num_images,
            height=sizes.image_size,
            width=sizes.image_size,
            num_inference_steps=sizes.num_inference_steps,
            guidance_scale=SdxlFlags.guidance_scale,
            output_type="pt",
        )
        synchronize(device)

    return image_contenders(names, pipeline, run)


def edit_contenders(names, configs, sizes, device):
    """An edit; arguments as for train_contenders."""
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
    image = torch.rand(1, 3, sizes.resolution, sizes.resolution, device=device)

    def run():
        steps = sizes.num_inference_steps
        pipeline(PROMPT, image, num_inference_steps=steps, output_type="pt", **SCALES)
        synchronize(device)

    return image_contenders(names, pipeline, run)
