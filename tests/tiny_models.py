"""A tiny random Stable Diffusion in the real folder layout, written by PyTorch's own classes."""

import json
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    PNDMScheduler,
    UNet2DConditionModel,
)
from transformers import CLIPTextConfig, CLIPTextModel

START, END = "<|startoftext|>", "<|endoftext|>"
MERGES = [("r", "e"), ("re", "d</w>"), ("m", "a"), ("ma", "k"), ("mak", "e</w>"), ("i", "t</w>")]

SCHEDULERS = {
    "ddim": (DDIMScheduler, {"clip_sample": False, "set_alpha_to_one": False, "steps_offset": 1}),
    "pndm": (PNDMScheduler, {"skip_prk_steps": True, "steps_offset": 1}),
    "euler": (EulerDiscreteScheduler, {}),
    "euler_ancestral": (EulerAncestralDiscreteScheduler, {}),
    "dpmsolver++": (DPMSolverMultistepScheduler, {}),
}


def byte_symbols():
    """The 256 characters that stand for bytes in CLIP's vocabulary, in its order.

    Printable Latin-1 characters stand for themselves; the other bytes take U+0100 and up.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    num_others = 256 - len(printable)
    return [chr(b) for b in printable] + [chr(256 + i) for i in range(num_others)]


def write_tokenizer(folder):
    """Write a CLIP BPE tokenizer of a few merges into folder; returns its vocabulary, a dict."""
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


def make_tiny_pipeline(
    folder,
    in_channels=8,
    scheduler="ddim",
    seed=0,
    prediction_type="epsilon",
    vae_channels=(16, 16, 32),
    unet_channels=(16, 32),
):
    """Write a random pipeline of about 0.3M parameters, a second's work.

    Args:
        folder: where to; must not exist.
        in_channels: 8 gives an InstructPix2Pix, 4 a text-to-image model to widen and train.
        scheduler: a key of SCHEDULERS.
        seed: of the random weights.
        prediction_type: "epsilon" or "v_prediction".
        vae_channels: multiples of 8; each level after the first halves the picture, so three
            make latents a quarter as wide and four an eighth, as in the real model.
        unet_channels: multiples of 8, one entry per level.

    Returns:
        folder, a Path.
    """
    folder = Path(folder)
    vocab = write_tokenizer(folder / "tokenizer")
    torch.manual_seed(seed)
    text_encoder = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(vocab),
            hidden_size=24,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=77,
            bos_token_id=vocab[START],
            eos_token_id=vocab[END],
            pad_token_id=vocab[END],
        )
    )
    vae = AutoencoderKL(
        block_out_channels=vae_channels,
        down_block_types=["DownEncoderBlock2D"] * len(vae_channels),
        up_block_types=["UpDecoderBlock2D"] * len(vae_channels),
        latent_channels=4,
        norm_num_groups=8,
        sample_size=64,
    )
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
        norm_num_groups=8,
    )
    text_encoder.save_pretrained(folder / "text_encoder")
    vae.save_pretrained(folder / "vae")
    unet.save_pretrained(folder / "unet")

    scheduler_class, options = SCHEDULERS[scheduler]
    schedule = {
        "beta_start": 0.00085,
        "beta_end": 0.012,
        "beta_schedule": "scaled_linear",
        "prediction_type": prediction_type,
    }
    scheduler_class(**schedule, **options).save_pretrained(folder / "scheduler")

    edits = in_channels == 8
    index = {
        "_class_name": f"StableDiffusion{'InstructPix2Pix' if edits else ''}Pipeline",
        "_diffusers_version": "0.30.0",
        "feature_extractor": [None, None],
        "requires_safety_checker": False,
        "safety_checker": [None, None],
        "scheduler": ["diffusers", scheduler_class.__name__],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    (folder / "model_index.json").write_text(json.dumps(index, indent=2))
    return folder
