"""Models with random weights in the shapes of the published ones, and tiny ones."""

import shutil

import jax
import numpy as np

from benchmarks.rows import ROOT
from diffusers_flax.loading.files import write_json
from diffusers_flax.models.clip import FlaxCLIPTextModelWithProjectionModule, FlaxCLIPTextModule
from diffusers_flax.models.unet import FlaxUNet2DConditionModel
from diffusers_flax.models.vae import FlaxAutoencoderKL
from diffusers_flax.published_configs import PUBLISHED_CONFIGS

TOKENIZER = ROOT / "demo" / "base_model" / "tokenizer"
END_OF_TEXT = 633  # the last id of TOKENIZER
SD15 = PUBLISHED_CONFIGS["stable-diffusion-v1-5"]
SDXL = PUBLISHED_CONFIGS["stable-diffusion-xl-base-1.0"]
UNET = FlaxUNet2DConditionModel(**SD15["unet"])
VAE = FlaxAutoencoderKL(**SD15["vae"])
IDS = {
    "bos_token_id": END_OF_TEXT - 1,
    "eos_token_id": END_OF_TEXT,
    "pad_token_id": END_OF_TEXT,
}
TEXT_ENCODER = FlaxCLIPTextModule(**SD15["text_encoder"], **IDS)
XL_SCHEDULER = {
    "_class_name": "EulerDiscreteScheduler",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
}
TINY_UNET = {  # overrides for a tiny UNet of 64 pixels
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
}
TINY_VAE = {"block_out_channels": (32, 32, 32, 32), "layers_per_block": 1}
TINY_XL_UNET = TINY_UNET | {"attention_head_dim": (2, 4), "transformer_layers_per_block": (1, 1)}


def write_module(folder, module):
    """Write a module with random float32 weights, scales of norms 1 and biases 0.

    Arrays are made one at a time, as one program for all would hold them twice; files are small
    enough to be in memory beside them.

    Args:
        folder: Path of a new directory.
        module: a FlaxModelMixin.
    """
    rng = np.random.default_rng(0)

    def make(path, shape):
        match path[-1].key:
            case "scale":
                return np.ones(shape.shape, np.float32)
            case "bias":
                return np.zeros(shape.shape, np.float32)
        return rng.standard_normal(shape.shape, np.float32) * np.float32(0.02)

    shapes = jax.eval_shape(module.init_weights, jax.random.key(0))
    params = jax.tree_util.tree_map_with_path(make, shapes)
    module.save_pretrained(folder, params=params, max_shard_size="2GB")


def make_pipeline(folder, tiny, in_channels=4, scheduler="PNDMScheduler"):
    """Write a pipeline's directory with random weights, of Stable Diffusion 1.5's shapes or tiny.

    Call it in a new process, which frees the memory.

    Args:
        folder: Path of a new directory.
        tiny: tiny models.
        in_channels: of the UNet; 8 for InstructPix2Pix.
        scheduler: PyTorch's class.
    """
    jax.config.update("jax_platforms", "cpu")
    unet, vae, text_encoder = UNET.clone(in_channels=in_channels), VAE, TEXT_ENCODER
    if tiny:
        unet, vae = unet.clone(**TINY_UNET), vae.clone(**TINY_VAE)
        text_encoder = text_encoder.clone(vocab_size=END_OF_TEXT + 1, num_hidden_layers=1)
    is_edit = in_channels == 8
    write_pipeline(
        folder,
        {"unet": unet, "vae": vae, "text_encoder": text_encoder},
        f"StableDiffusion{'InstructPix2Pix' * is_edit}Pipeline",
        SD15["scheduler"] | {"_class_name": scheduler},
        {
            "feature_extractor": [None, None],
            "requires_safety_checker": False,
            "safety_checker": [None, None],
        },
    )


def make_xl_pipeline(folder, tiny):
    """Write a pipeline's directory with random weights, of SDXL's shapes or tiny.

    Call it in a new process, which frees the memory.
    """
    jax.config.update("jax_platforms", "cpu")
    modules = {
        "unet": FlaxUNet2DConditionModel(**SDXL["unet"]),
        "vae": FlaxAutoencoderKL(**SDXL["vae"]),
        "text_encoder": FlaxCLIPTextModule(**SDXL["text_encoder"], **IDS),
        "text_encoder_2": FlaxCLIPTextModelWithProjectionModule(**SDXL["text_encoder_2"], **IDS),
    }
    if tiny:
        text = {"vocab_size": END_OF_TEXT + 1, "num_hidden_layers": 2}
        changes = {"unet": TINY_XL_UNET, "vae": TINY_VAE}
        modules = {name: x.clone(**changes.get(name, text)) for name, x in modules.items()}
    write_xl_pipeline(folder, modules)


def write_xl_pipeline(folder, modules):
    """Write an SDXL pipeline's directory with random weights; modules: {name: module}."""
    settings = {"force_zeros_for_empty_prompt": True}
    name = "StableDiffusionXLPipeline"
    write_pipeline(folder, modules, name, XL_SCHEDULER, settings)


def write_pipeline(folder, modules, class_name, scheduler, settings):
    """Write a pipeline's directory with random weights.

    Args:
        folder: Path of a new directory.
        modules: {name: module}.
        class_name: PyTorch's class of the pipeline.
        scheduler: its config, with PyTorch's class.
        settings: further entries of model_index.json.
    """
    index = {"_class_name": class_name, "scheduler": ["diffusers", scheduler["_class_name"]]}
    for name, module in modules.items():
        write_module(folder / name, module)
        library = "transformers" if name.startswith("text") else "diffusers"
        index[name] = [library, module.torch_class_name]
        if name.startswith("text"):
            tokenizer = name.replace("text_encoder", "tokenizer")
            shutil.copytree(TOKENIZER, folder / tokenizer)
            index[tokenizer] = ["transformers", "CLIPTokenizer"]
    (folder / "scheduler").mkdir()
    write_json(folder / "scheduler" / "scheduler_config.json", scheduler)
    write_json(folder / "model_index.json", index | settings)
