"""Tiny random Stable Diffusion and SDXL pipelines, written by the PyTorch classes.

Models of the same arguments are made once in a run of the tests and copied, so a test may change
its files.
"""

import functools
import hashlib
import inspect
import json
import shutil
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderTiny,
    ControlNetModel,
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EDMEulerScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    PNDMScheduler,
    UNet2DConditionModel,
)
from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
from filelock import FileLock
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPProcessor,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    ViTConfig,
    ViTModel,
)

# The directory of the models made so far, shared by all workers; conftest.py sets it. None, outside
# pytest: each call makes its model.
made_models = None

START, END = "<|startoftext|>", "<|endoftext|>"
MERGES = [("r", "e"), ("re", "d</w>"), ("m", "a"), ("ma", "k"), ("mak", "e</w>"), ("i", "t</w>")]

SCHEDULERS = {
    "ddim": (DDIMScheduler, {"clip_sample": False, "set_alpha_to_one": False, "steps_offset": 1}),
    "pndm": (PNDMScheduler, {"skip_prk_steps": True, "steps_offset": 1}),
    "euler": (EulerDiscreteScheduler, {}),
    "euler_ancestral": (EulerAncestralDiscreteScheduler, {}),
    "dpmsolver++": (DPMSolverMultistepScheduler, {}),
}


def made_once(make):
    """Decorator of make(folder, **options): later calls copy the files of the first."""

    @functools.wraps(make)
    def make_or_copy(folder, *args, **options):
        if made_models is None:
            make(Path(folder), *args, **options)
            torch.manual_seed(0)
            return Path(folder)
        call = inspect.signature(make).bind("", *args, **options)
        call.apply_defaults()
        key = hashlib.sha256(repr((make.__name__, call.arguments)).encode()).hexdigest()[:16]
        made = made_models / key
        with FileLock(f"{made}.lock"):
            if not made.exists():
                part = made.with_suffix(".part")
                make(part, *args, **options)
                part.rename(made)
        torch.manual_seed(0)  # the same numbers follow, whether the model was made or copied
        return Path(shutil.copytree(made, folder, dirs_exist_ok=True))

    return make_or_copy


def byte_symbols():
    """The 256 characters that stand for bytes in CLIP's vocabulary, in its order.

    Printable Latin-1 characters stand for themselves; the other bytes take U+0100 and up.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    num_others = 256 - len(printable)
    return [chr(b) for b in printable] + [chr(256 + i) for i in range(num_others)]


def write_tokenizer(folder):
    """Write a CLIP BPE tokenizer with a few merges to `folder`; return its vocabulary, a dict."""
    symbols = byte_symbols()
    words = symbols + [f"{s}</w>" for s in symbols] + ["".join(pair) for pair in MERGES]
    vocab = {word: i for i, word in enumerate([*words, START, END])}
    folder.mkdir(parents=True)
    (folder / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
    merges = ["#version: 0.2", *(" ".join(pair) for pair in MERGES)]
    (folder / "merges.txt").write_text("\n".join(merges) + "\n", encoding="utf-8")
    special = {"bos_token": START, "eos_token": END, "unk_token": END, "pad_token": END}
    (folder / "special_tokens_map.json").write_text(json.dumps(special))
    config = {"tokenizer_class": "CLIPTokenizer", "model_max_length": 77, **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return vocab


def tiny_text_encoder(cls, vocab, hidden_size, **options):
    """A random text encoder of PyTorch for a vocabulary of write_tokenizer."""
    config = CLIPTextConfig(
        vocab_size=len(vocab),
        hidden_size=hidden_size,
        intermediate_size=48,
        num_attention_heads=2,
        max_position_embeddings=77,
        bos_token_id=vocab[START],
        eos_token_id=vocab[END],
        **({"pad_token_id": vocab[END]} | options),
    )
    return cls(config)


def tiny_vae(channels, **options):
    """A random VAE of PyTorch with a level for each of the channels."""
    return AutoencoderKL(
        block_out_channels=channels,
        down_block_types=["DownEncoderBlock2D"] * len(channels),
        up_block_types=["UpDecoderBlock2D"] * len(channels),
        latent_channels=4,
        norm_num_groups=8,
        sample_size=64,
        **options,
    )


def write_scheduler(folder, name, **options):
    """Write scheduler/ with Stable Diffusion's noise; returns its entry of model_index.json."""
    cls, defaults = SCHEDULERS[name]
    betas = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
    cls(**betas, **defaults | options).save_pretrained(folder / "scheduler")
    return ["diffusers", cls.__name__]


def write_index(folder, **entries):
    """Write model_index.json."""
    index = {
        "_diffusers_version": "0.30.0",
        "text_encoder": ["transformers", "CLIPTextModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    (folder / "model_index.json").write_text(json.dumps(index | entries, indent=2))


@made_once
def make_tiny_pipeline(
    folder,
    in_channels=8,
    scheduler="ddim",
    seed=0,
    prediction_type="epsilon",
    vae_channels=(16, 16, 32),
    unet_channels=(16,),
    norm_num_groups=8,
):
    """Write a random pipeline of about 0.3M parameters, in about a second.

    scheduler is a key of SCHEDULERS. in_channels: 8 for InstructPix2Pix, 12 with a reference, 4 for
    text to image.
    vae_channels are multiples of 8, one per level: three give latents of a quarter of the width,
    four an eighth, as in the real model. unet_channels are multiples of norm_num_groups. Returns
    the folder, a Path.
    """
    folder = Path(folder)
    vocab = write_tokenizer(folder / "tokenizer")
    torch.manual_seed(seed)
    text_encoder = tiny_text_encoder(CLIPTextModel, vocab, 24, num_hidden_layers=1)
    vae = tiny_vae(vae_channels)
    levels = len(unet_channels)
    unet = UNet2DConditionModel(
        sample_size=16,
        in_channels=in_channels,
        out_channels=4,
        block_out_channels=unet_channels,
        down_block_types=["CrossAttnDownBlock2D"] * (levels - 1) + ["DownBlock2D"],
        up_block_types=["UpBlock2D"] + ["CrossAttnUpBlock2D"] * (levels - 1),
        layers_per_block=1,
        attention_head_dim=2,
        cross_attention_dim=24,
        norm_num_groups=norm_num_groups,
    )
    text_encoder.save_pretrained(folder / "text_encoder")
    vae.save_pretrained(folder / "vae")
    unet.save_pretrained(folder / "unet")
    write_index(
        folder,
        _class_name=f"StableDiffusion{'InstructPix2Pix' * (in_channels in (8, 12))}Pipeline",
        feature_extractor=[None, None],
        requires_safety_checker=False,
        safety_checker=[None, None],
        scheduler=write_scheduler(folder, scheduler, prediction_type=prediction_type),
    )
    return folder


@made_once
def make_tiny_xl(
    folder,
    refiner=False,
    scheduler="euler",
    seed=0,
    force_zeros=True,
    edits=False,
    inpaints=False,
    vae_channels=(8, 8, 16, 16),
    **options,
):
    """Write a random SDXL pipeline, base or refiner, of about 0.5M parameters.

    A refiner has no first text encoder and an aesthetic score. edits: an InstructPix2Pix model, 2:
    with a reference; inpaints: one with 9 input channels; options: of the scheduler. Returns the
    folder, a Path.
    """
    folder = Path(folder)
    torch.manual_seed(seed)
    numbers = [2] if refiner else [1, 2]
    for number in numbers:
        suffix = "_2" if number == 2 else ""
        vocab = write_tokenizer(folder / f"tokenizer{suffix}")
        if number == 2:  # OpenCLIP pads with "!", which is its token 0
            file = folder / "tokenizer_2" / "tokenizer_config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | {"pad_token": "!"}))
        tiny_text_encoder(
            CLIPTextModelWithProjection if number == 2 else CLIPTextModel,
            vocab,
            16 * number,
            num_hidden_layers=2,
            hidden_act="gelu" if number == 2 else "quick_gelu",
            projection_dim=20,
            pad_token_id=vocab["!" if number == 2 else END],
        ).save_pretrained(folder / f"text_encoder{suffix}")
    tiny_vae(vae_channels, scaling_factor=0.13025, force_upcast=True).save_pretrained(
        folder / "vae"
    )
    UNet2DConditionModel(
        sample_size=8,
        in_channels=9 if inpaints else 4 * (1 + edits),
        block_out_channels=[16],
        down_block_types=["CrossAttnDownBlock2D"],
        up_block_types=["CrossAttnUpBlock2D"],
        layers_per_block=1,
        transformer_layers_per_block=[1],
        attention_head_dim=[2],
        cross_attention_dim=sum(16 * number for number in numbers),
        use_linear_projection=True,
        norm_num_groups=8,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=20 + (5 if refiner else 6) * 8,
    ).save_pretrained(folder / "unet")
    options = {"timestep_spacing": "leading", "steps_offset": 1} | options
    kind = "Inpaint" if inpaints else "Img2Img" if refiner else "InstructPix2Pix" if edits else ""
    absent = {"text_encoder": [None, None], "tokenizer": [None, None]} if refiner else {}
    write_index(
        folder,
        _class_name=f"StableDiffusionXL{kind}Pipeline",
        force_zeros_for_empty_prompt=force_zeros,
        requires_aesthetics_score=refiner,
        scheduler=write_scheduler(folder, scheduler, **options),
        text_encoder_2=["transformers", "CLIPTextModelWithProjection"],
        tokenizer_2=["transformers", "CLIPTokenizer"],
        **absent,
    )
    return folder


def make_tiny_cosxl(folder, edits=True):
    """make_tiny_xl with CosXL's scheduler, or CosXL Edit's model_index.json."""
    folder = make_tiny_xl(folder, edits=edits)
    shutil.rmtree(folder / "scheduler")
    EDMEulerScheduler(
        sigma_min=0.002,
        sigma_max=120.0,
        sigma_data=1.0,
        sigma_schedule="exponential",
        prediction_type="v_prediction",
    ).save_pretrained(folder / "scheduler")
    file = folder / "model_index.json"
    changes = {"scheduler": ["diffusers", "EDMEulerScheduler"]} | (
        {"is_cosxl_edit": True} if edits else {}
    )
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


def save_tiny_vae(folder, channels):
    """Write a random AutoencoderTiny.

    channels: one per level; n levels reduce images by 2^(n - 1). Returns PyTorch's model.
    """
    torch.manual_seed(0)
    blocks = (1,) * len(channels)
    tiny = AutoencoderTiny(
        encoder_block_out_channels=channels,
        decoder_block_out_channels=channels,
        num_encoder_blocks=blocks,
        num_decoder_blocks=blocks,
    )
    tiny.save_pretrained(folder)
    return tiny


@made_once
def make_tiny_safety_checker(folder, seed=0):
    """Write a random safety checker of about 0.1M parameters for images of 224 x 224."""
    torch.manual_seed(seed)
    tower = {
        "hidden_size": 24,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "projection_dim": 16,
    }
    vision = tower | {"image_size": 224, "patch_size": 32}
    config = CLIPConfig(text_config=tower, vision_config=vision, projection_dim=16)
    checker = StableDiffusionSafetyChecker(config)
    for name in ("concept_embeds", "special_care_embeds"):  # initialised to ones
        torch.nn.init.normal_(getattr(checker, name))
    checker.save_pretrained(folder)
    return Path(folder)


def make_tiny_controlnet(folder, model, halvings=2, seed=0, **options):
    """Write a random ControlNet for a pipeline's UNet.

    halvings: of the image, as many as the pipeline's VAE makes; options: config entries.
    """
    unet = UNet2DConditionModel.from_pretrained(model, subfolder="unet")
    torch.manual_seed(seed)
    channels = (8,) * halvings + (16,)
    net = ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=channels)
    net.register_to_config(**options)
    for layer in (net.controlnet_cond_embedding.conv_out, *net.controlnet_down_blocks):
        torch.nn.init.normal_(layer.weight, std=0.1)
    torch.nn.init.normal_(net.controlnet_mid_block.weight, std=0.1)
    net.save_pretrained(folder)
    return Path(folder)


def make_tiny_clip(folder):
    """Write a random CLIP model with its processor, for images of 32 x 32."""
    vocab = write_tokenizer(folder)
    torch.manual_seed(0)
    tower = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    tower |= {"num_attention_heads": 2, "projection_dim": 12}
    text = tower | {"vocab_size": len(vocab), "bos_token_id": vocab[START]}
    text |= {"eos_token_id": vocab[END], "pad_token_id": vocab[END]}
    vision = tower | {"image_size": 32, "patch_size": 8}
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=12)
    CLIPModel(config).save_pretrained(folder)
    side = {"height": 32, "width": 32}
    images = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=side)
    CLIPProcessor(images, CLIPTokenizer.from_pretrained(folder)).save_pretrained(folder)


def make_tiny_dino(folder, image_size=224):
    """Write a random ViT in the layout of facebook/dino-vits16."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = ViTConfig(**sizes, num_attention_heads=2, image_size=image_size, patch_size=16)
    model = ViTModel(config, add_pooling_layer=False)
    with torch.no_grad():  # an initial bias of zero would hide a missing one
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)


def save_random_alexnet(torch_home):
    """Write random weights of AlexNet's convolutions where PyTorch's hub keeps downloaded files.

    Returns:
        The state dict.
    """
    torch.manual_seed(0)
    shapes = {
        0: (64, 3, 11),
        3: (192, 64, 5),
        6: (384, 192, 3),
        8: (256, 384, 3),
        10: (256, 256, 3),
    }
    weights = {}
    for number, (outputs, inputs, side) in shapes.items():
        weights[f"features.{number}.weight"] = torch.randn(outputs, inputs, side, side) / (
            inputs**0.5 * side
        )
        weights[f"features.{number}.bias"] = torch.randn(outputs) / 10
    folder = Path(torch_home, "hub", "checkpoints")
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(weights, folder / "alexnet-owt-7be5be79.pth")
    return weights
