"""PyTorch's contenders, with random weights made on the device: functions that do a pass of a Work.

"eager" has contiguous kernels and images; "compiled" is torch.compile of the UNet, and of the VAE's
encoder in training or decoder in images, with channels_last on a GPU.
"""

import shutil

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
from diffusers.training_utils import EMAModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from benchmarks.harness import synchronize
from benchmarks.works import END_OF_TEXT, GUIDANCE_SCALE, PROMPT, SCALES, TEXT_LENGTH, TOKENIZER

NAMES = ("eager", "compiled")
EMA_DECAY, DROPOUT_RATE = 0.9999, 0.05
ADAMW = dict(lr=5e-5, betas=(0.9, 0.999), weight_decay=1e-2, eps=1e-8)


def can_compile():
    """Whether the C++ compiler that torch.compile needs is installed."""
    return shutil.which("g++") is not None or shutil.which("clang++") is not None


def torch_contender(work, name="eager", device="cpu"):
    """A function that does a pass of a Work.

    Args:
        work: Work.
        name: of NAMES.
        device: "cuda" or "cpu".
    """
    dtype = torch.bfloat16 if work.half else torch.float32
    is_last = name == "compiled" and device == "cuda"
    order = torch.channels_last if is_last else torch.contiguous_format

    def make(cls, part, dtype=dtype):
        config = dict(work.configs[part])
        with torch.device(device):
            if part.startswith("text_encoder"):
                config = {k: v for k, v in config.items() if not k.startswith("_")}
                return cls(CLIPTextConfig(**config)).to(device, dtype)
            return cls.from_config(config).to(device, dtype, memory_format=order)

    def program(function):
        return torch.compile(function, dynamic=False) if name == "compiled" else function

    makers = {"edit": make_images, "sdxl": make_images}
    makers |= {"forward": make_unet, "gradient": make_unet}
    run = makers.get(work.name, make_step)(work, make, program, device, dtype, order)

    def run_to_the_end():
        run()
        synchronize(device)

    return run_to_the_end


def make_unet(work, make, program, device, dtype, order):
    """A pass of the UNet: forward, or with the gradient of float32 parameters."""
    has_gradient = work.name == "gradient"
    if has_gradient:
        dtype = torch.float32
    unet = make(UNet2DConditionModel, "unet", dtype)
    inputs = work.unet_inputs(work.batch_size)
    inputs = jax.tree.map(lambda x: torch.from_numpy(x).to(device), inputs)
    sample, timesteps, text, added = inputs
    sample, text = sample.to(dtype, memory_format=order), text.to(dtype)
    predict = program(unet)

    def run():
        with torch.autocast(device, torch.bfloat16, enabled=work.half and has_gradient):
            return predict(sample, timesteps, text, added_cond_kwargs=added).sample

    def run_gradient():
        run().float().square().mean().backward()
        unet.zero_grad()

    return run_gradient if has_gradient else torch.inference_mode()(run)


def make_images(work, make, program, device, dtype, order):
    """Edits of one image, or SDXL images; the UNet and the decoder may be compiled."""
    scheduler = dict(work.configs["scheduler"])
    parts = {
        "vae": make(AutoencoderKL, "vae"),
        "text_encoder": make(CLIPTextModel, "text_encoder"),
        "tokenizer": CLIPTokenizer.from_pretrained(TOKENIZER),
        "unet": make(UNet2DConditionModel, "unet"),
    }
    settings = dict(num_inference_steps=work.num_inference_steps, output_type="pt")
    if work.name == "sdxl":
        pipeline = StableDiffusionXLPipeline(
            **parts,
            text_encoder_2=make(CLIPTextModelWithProjection, "text_encoder_2"),
            tokenizer_2=parts["tokenizer"],
            scheduler=EulerDiscreteScheduler.from_config(scheduler),
            add_watermarker=False,
        )
        settings |= dict(num_images_per_prompt=work.batch_size, guidance_scale=GUIDANCE_SCALE)
        settings |= dict(height=work.resolution, width=work.resolution)
    else:
        pipeline = StableDiffusionInstructPix2PixPipeline(
            **parts,
            scheduler=PNDMScheduler.from_config(scheduler),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
        image = torch.rand(1, 3, work.resolution, work.resolution, device=device)
        settings |= dict(image=image, **SCALES)
    pipeline.unet = program(pipeline.unet)
    pipeline.vae.decode = program(pipeline.vae.decode)
    pipeline.set_progress_bar_config(disable=True)
    return lambda: pipeline(PROMPT, **settings)


def make_step(work, make, program, device, dtype, order):
    """An optimizer step.

    AdamW is fused; on a GPU the average is updated in one launch for many parameters. The text of
    dropped conditions is encoded once, the batch's text in every step, as in ours.
    """
    torch.backends.cuda.matmul.allow_tf32 = True
    B = work.batch_size
    unet = make(UNet2DConditionModel, "unet", torch.float32).train()
    vae = make(AutoencoderKL, "vae").requires_grad_(False)
    text_encoder = make(CLIPTextModel, "text_encoder").requires_grad_(False)
    scheduler = DDPMScheduler.from_config(dict(work.configs["scheduler"]))
    optimizer = torch.optim.AdamW(unet.parameters(), **ADAMW, fused=True)
    average = EMAModel(unet.parameters(), decay=EMA_DECAY, foreach=device == "cuda")
    average.to(device)
    batch = {k: torch.from_numpy(v).to(device) for k, v in work.batch().items()}
    empty = torch.full((1, TEXT_LENGTH), END_OF_TEXT, device=device)
    with torch.no_grad():
        null_text = text_encoder(empty)[0]
    predict, encode = program(unet), program(vae.encode)

    def encode_images():
        if "edited_latents" in batch:
            mean, std = batch["edited_latents"].permute(0, 3, 1, 2).chunk(2, 1)
            latents = mean + std * torch.randn_like(std)
            return latents.to(dtype), batch["original_latents"].permute(0, 3, 1, 2).to(dtype)
        original, edited = (
            (batch[name].permute(0, 3, 1, 2) / 127.5 - 1).to(dtype)
            for name in ("original_pixel_values", "edited_pixel_values")
        )
        return encode(edited).latent_dist.sample(), encode(original).latent_dist.mode()

    def run():
        with torch.no_grad():
            latents, condition = encode_images()
            latents = latents * vae.config.scaling_factor
            text = text_encoder(batch["input_ids"])[0]
            noise = torch.randn_like(latents)
            timesteps = torch.randint(0, 1000, (B,), device=device)
            noisy = scheduler.add_noise(latents, noise, timesteps)
            u = torch.rand(B, device=device)
            text = torch.where((u < 2 * DROPOUT_RATE)[:, None, None], null_text, text)
            keep = ~((u >= DROPOUT_RATE) & (u < 3 * DROPOUT_RATE))
            condition = condition * keep[:, None, None, None]
        with torch.autocast(device, torch.bfloat16, enabled=work.half):
            noisy = torch.cat((noisy, condition), 1)
            prediction = predict(noisy, timesteps, text, return_dict=False)[0]
        torch.nn.functional.mse_loss(prediction.float(), noise.float()).backward()
        torch.nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        average.step(unet.parameters())

    return run
