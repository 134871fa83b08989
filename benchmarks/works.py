"""What is timed: a pass of the UNet, an optimizer step, an edit or SDXL images.

Models have the shapes of Stable Diffusion 1.5, with 8 input channels, or of SDXL, or are tiny; all
weights are random.
"""

from typing import Literal, NamedTuple

import jax
import numpy as np
import torch
from diffusers import UNet2DConditionModel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.harness import ROOT
from diffusers_flax.published_configs import PUBLISHED_CONFIGS

PROMPT = "invert the colors"
SCALES = {"guidance_scale": 7.5, "image_guidance_scale": 1.5}  # of edits
GUIDANCE_SCALE = 5.0  # of SDXL images
EDIT_BRANCHES = 3
TEXT_LENGTH = 77
TOKENIZER = ROOT / "demo" / "base_model" / "tokenizer"
END_OF_TEXT = 633  # the last id of TOKENIZER
TITLES = {  # in the names of rows
    "forward": "forward",
    "gradient": "gradient",
    "train": "optimizer step",
    "train_latents": "optimizer step, latents cached",
    "edit": "edit, {} steps",
    "sdxl": "images, {} steps",
}
TINY = {  # for images of 64 pixels
    "unet": {
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "block_out_channels": (32, 64),
        "layers_per_block": 1,
    },
    "vae": {"block_out_channels": (32, 32, 32, 32), "layers_per_block": 1},
    "text_encoder": {
        "vocab_size": END_OF_TEXT + 1,
        "num_hidden_layers": 2,
        "bos_token_id": END_OF_TEXT - 1,
        "eos_token_id": END_OF_TEXT,
    },
}
TINY_XL_UNET = {"attention_head_dim": (2, 4), "transformer_layers_per_block": (1, 1)}


class Work(NamedTuple):
    """A pass that ours and PyTorch's do."""

    name: Literal["forward", "gradient", "train", "train_latents", "edit", "sdxl"]
    resolution: int  # side of the images, pixels
    batch_size: int = 1  # samples, pairs or images
    num_inference_steps: int = 20
    half: bool = False  # compute in bfloat16 instead of float32
    tiny: bool = False

    @property
    def configs(self):
        """{component: config} of the models."""
        is_xl = self.name == "sdxl"
        model = "stable-diffusion-xl-base-1.0" if is_xl else "stable-diffusion-v1-5"
        configs = {name: dict(config) for name, config in PUBLISHED_CONFIGS[model].items()}
        configs["unet"]["in_channels"] = 4 if is_xl else 8
        if self.tiny:
            for name, config in configs.items():
                config |= TINY.get(name.removesuffix("_2"), {})
            configs["unet"] |= TINY_XL_UNET if is_xl else {}
        return configs

    @property
    def case(self):
        """The name of the row, without the device."""
        size = "sdxl" if self.name == "sdxl" else "sd15"
        size = "tiny" if self.tiny else size
        title = TITLES[self.name].format(self.num_inference_steps)
        return f"{size}_{self.resolution} {title} {self.batch_size}"

    def unet_inputs(self, batch_size):
        """NumPy arrays: sample, timesteps, text states, and SDXL's added conditions or None."""
        rng, config, side = np.random.default_rng(0), self.configs["unet"], self.resolution // 8

        def normal(*shape):
            return rng.standard_normal((batch_size, *shape), np.float32)

        sample = normal(config["in_channels"], side, side)
        timesteps = np.linspace(1, 999, batch_size).astype(np.int32)
        text, added = normal(TEXT_LENGTH, config["cross_attention_dim"]), None
        if time_dim := config.get("addition_time_embed_dim"):
            width = config["projection_class_embeddings_input_dim"] - 6 * time_dim
            pixels = self.resolution
            ids = np.tile(np.float32([pixels, pixels, 0, 0, pixels, pixels]), (batch_size, 1))
            added = {"text_embeds": normal(width), "time_ids": ids}
        return sample, timesteps, text, added

    def count_flops(self):
        """FLOPs of the UNet in a pass, by PyTorch's counter; only shapes are computed."""
        has_gradient, samples, calls = self.name in ("gradient", "train", "train_latents"), 1, 1
        if self.name == "edit":  # PNDM has one more call of the UNet than steps
            samples, calls = EDIT_BRANCHES, self.num_inference_steps + 1
        elif self.name == "sdxl":
            samples, calls = 2, self.num_inference_steps
        with torch.device("meta"):
            unet = UNet2DConditionModel.from_config(self.configs["unet"])
        inputs = self.unet_inputs(samples * self.batch_size)
        inputs = jax.tree.map(lambda x: torch.empty(x.shape, device="meta"), inputs)
        counter = FlopCounterMode(display=False)
        with counter, torch.set_grad_enabled(has_gradient):
            loss = unet(*inputs[:3], added_cond_kwargs=inputs[3]).sample.square().mean()
            if has_gradient:
                loss.backward()
        return calls * counter.get_total_flops()

    def batch(self):
        """Pairs of random images, uint8 (B, R, R, 3), or of their latents, and ids (B, 77)."""
        rng, B = np.random.default_rng(0), self.batch_size
        batch = {"input_ids": rng.integers(0, END_OF_TEXT, (B, TEXT_LENGTH), np.int32)}
        if self.name == "train_latents":
            shape = (B, self.resolution // 8, self.resolution // 8, 8)
            edited = rng.uniform(0.1, 1, shape).astype(np.float16)  # mean and deviation
            return batch | {"original_latents": edited[..., :4], "edited_latents": edited}
        shape = (B, self.resolution, self.resolution, 3)
        names = ("original_pixel_values", "edited_pixel_values")
        return batch | {name: rng.integers(0, 256, shape, np.uint8) for name in names}
