"""PyTorch's contenders, with random weights made on the device.

torch_contenders returns {name: (prepare, run)}, see harness.time_in_this_process, for the names:
"eager", with contiguous kernels and images; "channels_last", eager too; "compiled", torch.compile
of the UNet, and of the VAE's encoder in training or decoder in images. All share their weights.
"""

import shutil
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
from diffusers.training_utils import EMAModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from benchmarks.harness import synchronize
from benchmarks.works import END_OF_TEXT, GUIDANCE_SCALE, PROMPT, SCALES, TEXT_LENGTH, TOKENIZER

NAMES = ("eager", "channels_last", "compiled")
EMA_DECAY, DROPOUT_RATE = 0.9999, 0.05
ADAMW = dict(lr=5e-5, betas=(0.9, 0.999), weight_decay=1e-2, eps=1e-8)


def can_compile():
    """Whether the C++ compiler that torch.compile needs is installed."""
    return shutil.which("g++") is not None or shutil.which("clang++") is not None


def eager_contender(work):
    """A function that does a pass of a Work on the CPU, eager."""
    prepare, run = torch_contenders(work, ("eager",), "cpu")["eager"]
    prepare()
    return run


def torch_contenders(work, names, device):
    """The contenders of a Work.

    Args:
        work: Work.
        names: of NAMES.
        device: "cuda" or "cpu".
    """
    make = {"edit": image_contenders, "sdxl": image_contenders}
    make |= {"forward": unet_contenders, "gradient": unet_contenders}
    return make.get(work.name, train_contenders)(work, names, device)


def memory_format(name, device):
    """The order of kernels and images in memory."""
    is_last = name == "channels_last" or (name == "compiled" and device == "cuda")
    return torch.channels_last if is_last else torch.contiguous_format


def torch_module(cls, config, device, dtype):
    """A module of diffusers or transformers with random weights, made on the device."""
    with torch.device(device):
        if cls in (CLIPTextModel, CLIPTextModelWithProjection):
            config = {k: v for k, v in config.items() if not k.startswith("_")}
            module = cls(CLIPTextConfig(**config))
        else:
            module = cls.from_config(dict(config))
    return module.to(device, dtype)


def dtype_of(work):
    """The dtype in which a Work computes."""
    return torch.bfloat16 if work.half else torch.float32


def programs_of(names, *functions):
    """{name of a contender: the functions, in torch.compile for "compiled"}."""
    programs = dict.fromkeys(names, functions)
    if "compiled" in names:
        programs["compiled"] = tuple(torch.compile(x, dynamic=False) for x in functions)
    return programs


def unet_contenders(work, names, device):
    """A pass of the UNet: forward, or with the gradient of float32 parameters."""
    has_gradient = work.name == "gradient"
    dtype = torch.float32 if has_gradient else dtype_of(work)
    unet = torch_module(UNet2DConditionModel, work.configs["unet"], device, dtype)
    inputs = work.unet_inputs(work.batch_size)
    inputs = jax.tree.map(lambda x: torch.from_numpy(x).to(device), inputs)
    sample, timesteps, text, added = inputs
    text, programs = text.to(dtype), programs_of(names, unet)

    def forward(name):
        x = sample.to(dtype).contiguous(memory_format=memory_format(name, device))
        with torch.autocast(device, torch.bfloat16, enabled=work.half and has_gradient):
            return programs[name][0](x, timesteps, text, added_cond_kwargs=added).sample

    def run(name):
        if has_gradient:
            forward(name).float().square().mean().backward()
            for parameter in unet.parameters():
                parameter.grad = None
        else:
            with torch.inference_mode():
                forward(name)
        synchronize(device)

    def prepare(name):
        unet.to(memory_format=memory_format(name, device))

    return {name: (partial(prepare, name), partial(run, name)) for name in names}


def image_contenders(work, names, device):
    """Edits of one image, or SDXL images; the UNet and the decoder may be compiled."""
    configs, dtype = work.configs, dtype_of(work)
    make = partial(torch_module, device=device, dtype=dtype)
    parts = {
        "vae": make(AutoencoderKL, configs["vae"]),
        "text_encoder": make(CLIPTextModel, configs["text_encoder"]),
        "tokenizer": CLIPTokenizer.from_pretrained(TOKENIZER),
        "unet": make(UNet2DConditionModel, configs["unet"]),
    }
    settings = dict(num_inference_steps=work.num_inference_steps, output_type="pt")
    if work.name == "sdxl":
        pipeline = StableDiffusionXLPipeline(
            **parts,
            text_encoder_2=make(CLIPTextModelWithProjection, configs["text_encoder_2"]),
            tokenizer_2=parts["tokenizer"],
            scheduler=EulerDiscreteScheduler.from_config(dict(configs["scheduler"])),
            add_watermarker=False,
        )
        settings |= dict(num_images_per_prompt=work.batch_size, guidance_scale=GUIDANCE_SCALE)
        settings |= dict(height=work.resolution, width=work.resolution)
    else:
        pipeline = StableDiffusionInstructPix2PixPipeline(
            **parts,
            scheduler=PNDMScheduler.from_config(dict(configs["scheduler"])),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
        image = torch.rand(1, 3, work.resolution, work.resolution, device=device)
        settings |= dict(image=image, **SCALES)
    unet, vae, decode = pipeline.unet, pipeline.vae, pipeline.vae.decode
    programs = programs_of(names, unet, decode)
    pipeline.set_progress_bar_config(disable=True)

    def prepare(name):
        pipeline.unet, vae.decode = programs[name]
        for module in (unet, vae):
            module.to(memory_format=memory_format(name, device))

    def run():
        pipeline(PROMPT, **settings)
        synchronize(device)

    return {name: (partial(prepare, name), run) for name in names}


def train_contenders(work, names, device):
    """An optimizer step.

    AdamW is fused; on a GPU the average is updated in one launch for many parameters. The text of
    dropped conditions is encoded once, the batch's text in every step, as in ours.
    """
    torch.backends.cuda.matmul.allow_tf32 = True
    configs, half, B = work.configs, dtype_of(work), work.batch_size
    unet = torch_module(UNet2DConditionModel, configs["unet"], device, torch.float32).train()
    vae = torch_module(AutoencoderKL, configs["vae"], device, half).requires_grad_(False)
    text_encoder = torch_module(CLIPTextModel, configs["text_encoder"], device, half)
    text_encoder.requires_grad_(False)
    scheduler = DDPMScheduler.from_config(dict(configs["scheduler"]))
    optimizer = torch.optim.AdamW(unet.parameters(), **ADAMW, fused=True)
    average = EMAModel(unet.parameters(), decay=EMA_DECAY, foreach=device == "cuda")
    average.to(device)
    batch = {k: torch.from_numpy(v).to(device) for k, v in work.batch().items()}
    empty = torch.full((1, TEXT_LENGTH), END_OF_TEXT, device=device)
    with torch.no_grad():
        null_text = text_encoder(empty)[0]
    programs = programs_of(names, unet, vae.encode)

    def prepare(name):
        order = memory_format(name, device)

        def arranged(tensor):
            return tensor.to(memory_format=order) if tensor.ndim == 4 else tensor

        unet.to(memory_format=order)
        vae.to(memory_format=order)
        # Fused AdamW takes parameters and moments of the same strides only.
        for moments in optimizer.state.values():
            moments.update({name: arranged(x) for name, x in moments.items()})
        average.shadow_params = [arranged(x) for x in average.shadow_params]

    def encode_images(encode):
        if "edited_latents" in batch:
            mean, std = batch["edited_latents"].permute(0, 3, 1, 2).chunk(2, 1)
            latents = mean + std * torch.randn_like(std)
            return latents.to(half), batch["original_latents"].permute(0, 3, 1, 2).to(half)
        original, edited = (
            (batch[name].permute(0, 3, 1, 2) / 127.5 - 1).to(half)
            for name in ("original_pixel_values", "edited_pixel_values")
        )
        return encode(edited).latent_dist.sample(), encode(original).latent_dist.mode()

    def run(program, encode):
        with torch.no_grad():
            latents, condition = encode_images(encode)
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
            prediction = program(noisy, timesteps, text, return_dict=False)[0]
        torch.nn.functional.mse_loss(prediction.float(), noise.float()).backward()
        torch.nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        average.step(unet.parameters())
        synchronize(device)

    return {name: (partial(prepare, name), partial(run, *programs[name])) for name in names}
