"""LoRA files of all layouts, folded into pipelines: against PyTorch's load_lora_weights."""

import itertools
import json
import re

import jax
import numpy as np
import peft
import pytest
import torch
from diffusers import (
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from flax.traverse_util import flatten_dict
from helpers import slow
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny_pipeline, make_tiny_xl

from diffusers_flax.loading.lora import Loras, from_sgm, read_updates
from diffusers_flax.loading.weights import flax_to_torch, torch_to_flax
from diffusers_flax.pipelines.base import FlaxDiffusionPipeline

RANK = 3
ATTENTION = ("attn1.to_q", "attn1.to_v", "attn2.to_k", "attn2.to_out.0")
TARGETS = (*ATTENTION, "proj_in", "ff.net.0.proj", "conv1", "time_emb_proj", "samplers.0.conv")
TEXT_TARGETS = ("self_attn.q_proj", "self_attn.out_proj", "mlp.fc1")
COMPONENTS = {"unet": "lora_unet", "text_encoder": "lora_te1", "text_encoder_2": "lora_te2"}
# Blocks of the two-level SDXL UNet below in the names of the original repository.
SGM = {
    "down_blocks.0.resnets.1": "input_blocks_2_0",
    "down_blocks.0.downsamplers.0.conv": "input_blocks_3_0_op",
    "down_blocks.1.resnets.0": "input_blocks_4_0",
    "down_blocks.1.attentions.0": "input_blocks_4_1",
    "down_blocks.1.attentions.1": "input_blocks_5_1",
    "mid_block.resnets.0": "middle_block_0",
    "mid_block.attentions.0": "middle_block_1",
    "mid_block.resnets.1": "middle_block_2",
    "up_blocks.0.resnets.0": "output_blocks_0_0",
    "up_blocks.0.attentions.2": "output_blocks_2_1",
    "up_blocks.0.upsamplers.0": "output_blocks_2_2",
    "up_blocks.1.resnets.1": "output_blocks_4_0",
}
SGM_LAYERS = {"conv1": "in_layers.2", "conv2": "out_layers.3", "time_emb_proj": "emb_layers.1"}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """{family: directory} of text-to-image models; SDXL's UNet has two layers per block."""
    folder = tmp_path_factory.mktemp("models")
    sd = make_tiny_pipeline(folder / "sd", in_channels=4, unet_channels=(16, 16))
    xl = make_tiny_xl(folder / "xl")
    config = UNet2DConditionModel.load_config(xl / "unet")
    config |= {
        "block_out_channels": [16, 16],
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
        "layers_per_block": 2,
        "transformer_layers_per_block": [1, 1],
        "attention_head_dim": [2, 2],
    }
    UNet2DConditionModel.from_config(config).save_pretrained(xl / "unet")
    return {"sd": sd, "xl": xl}


def torch_pipeline(family, folder):
    cls = StableDiffusionXLPipeline if family == "xl" else StableDiffusionPipeline
    options = {} if family == "xl" else {"safety_checker": None}
    pipeline = cls.from_pretrained(folder, **options)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def random_factors(pipeline, targets, seed=0):
    """{(component, layer): (down, up)} of all layers whose name ends with a target."""
    generator = torch.Generator().manual_seed(seed)
    factors = {}
    for component in COMPONENTS:
        if (model := getattr(pipeline, component, None)) is None:
            continue
        for layer, module in model.named_modules():
            if not f".{layer}".endswith(tuple(f".{t}" for t in targets[component])):
                continue
            out, num_in, *kernel = module.weight.shape
            shapes = (RANK, num_in, *kernel), (out, RANK, *(1 for _ in kernel))
            down, up = (torch.randn(shape, generator=generator) / 4 for shape in shapes)
            factors[component, layer] = down, up
    return factors


def all_targets(unet, text=TEXT_TARGETS):
    return {"unet": unet, "text_encoder": text, "text_encoder_2": text}


def peft_file(path, factors, alpha):
    tensors, settings = {}, {}
    for (component, layer), (down, up) in factors.items():
        tensors[f"{component}.{layer}.lora_A.weight"] = down
        tensors[f"{component}.{layer}.lora_B.weight"] = up
        settings |= {f"{component}.r": RANK, f"{component}.lora_alpha": alpha}
        targets = settings.setdefault(f"{component}.target_modules", [])
        targets.append(layer)
    save_file(tensors, path, metadata={"lora_adapter_metadata": json.dumps(settings)})


def diffusers_file(path, factors):
    """The layout of diffusers 0.14 to 0.20; alpha is the rank."""
    tensors = {}
    for (component, layer), pair in factors.items():
        for direction, tensor in zip(("down", "up"), pair):
            if component == "unet":
                block, _, name = layer.removesuffix(".0").rpartition(".")
                name = f"unet.{block}.processor.{name}_lora.{direction}.weight"
            else:
                name = f"{component}.{layer}.lora_linear_layer.{direction}.weight"
            tensors[name] = tensor
    save_file(tensors, path)


def sgm_names(layer):
    """(block, layer in it) in the names of the original repository; None without such a block."""
    if block := next((b for b in SGM if layer.startswith(b)), None):
        rest = layer.removeprefix(block).strip(".")
        return SGM[block], SGM_LAYERS.get(rest, rest)


def kohya_file(path, factors, alpha, sgm=False):
    tensors = {}
    for (component, layer), (down, up) in factors.items():
        name = layer.replace(".", "_")
        if sgm and component == "unet":
            if not (names := sgm_names(layer)):
                continue
            name = "_".join(filter(None, names)).replace(".", "_")
        prefix = "lora_te" if component == "text_encoder" and not sgm else COMPONENTS[component]
        tensors[f"{prefix}_{name}.lora_down.weight"] = down
        tensors[f"{prefix}_{name}.lora_up.weight"] = up
        tensors[f"{prefix}_{name}.alpha"] = torch.tensor(alpha)
    save_file(tensors, path)
    return len(tensors) // 3


def assert_params_are(pipeline, params):
    """Our parameters equal the parameters of a PyTorch pipeline, whose LoRA is fused."""
    for component in COMPONENTS:
        if (model := getattr(pipeline, component, None)) is None:
            continue
        expected = {name: x.numpy() for name, x in model.state_dict().items()}
        for key, x in flatten_dict(params[component], sep="/").items():
            name, x = flax_to_torch(key, np.asarray(x))
            name = name if name in expected else name.removeprefix("text_model.")
            np.testing.assert_allclose(x, expected[name], rtol=1e-5, atol=2e-6, err_msg=name)


@pytest.mark.parametrize(
    ("family", "layout"),
    [("xl", "peft"), ("sd", "diffusers"), ("xl", "sgm"), *slow(("sd", "peft"), ("sd", "kohya"))],
)
def test_weights_are_those_of_pytorch(models, tmp_path, family, layout):
    theirs, file = torch_pipeline(family, models[family]), tmp_path / "lora.safetensors"
    if layout == "diffusers":
        text = TEXT_TARGETS[:2]
        factors = random_factors(theirs, all_targets(ATTENTION, text))
        diffusers_file(file, factors)
    elif layout == "peft":
        factors = random_factors(theirs, all_targets(TARGETS))
        peft_file(file, factors, alpha=2.0)
    else:
        factors = random_factors(theirs, all_targets(TARGETS))
        number = kohya_file(file, factors, alpha=2, sgm=layout == "sgm")  # an int64 tensor
        assert number > 20
    theirs.load_lora_weights(tmp_path, weight_name=file.name)
    theirs.fuse_lora(lora_scale=0.7)
    theirs.unload_lora_weights()
    _, params = FlaxDiffusionPipeline.from_pretrained(models[family], lora=[f"{file}:0.7"])
    assert_params_are(theirs, params)


def test_names_of_comfyui(models, tmp_path):
    """The updates of the same factors in kohya's file, which PyTorch reads too."""
    factors = random_factors(torch_pipeline("xl", models["xl"]), all_targets(TARGETS))
    kohya_file(tmp_path / "kohya.safetensors", factors, alpha=2, sgm=True)
    tensors, encoders = {}, {"text_encoder": "clip_l", "text_encoder_2": "clip_g"}
    for (component, layer), pair in factors.items():
        inner = layer.removeprefix("text_model.")  # as transformers may or may not name it
        name = f"text_encoders.{encoders.get(component)}.transformer.text_model.{inner}"
        if component == "unet":
            if not (names := sgm_names(layer)):
                continue
            block = re.sub(r"^(input|output|middle)\.", r"\1_", names[0].replace("_", "."))
            name = ".".join(filter(None, ("diffusion_model", block, names[1])))
        tensors |= {f"{name}.lora_{way}.weight": x for way, x in zip(("down", "up"), pair)}
        tensors[f"{name}.alpha"] = torch.tensor(2.0)
    save_file(tensors, tmp_path / "comfyui.safetensors")
    found, expected = (
        read_updates(tmp_path / f"{name}.safetensors", 1.0) for name in ("comfyui", "kohya")
    )
    assert found.keys() == expected.keys() and len(found) > 20
    for key, update in expected.items():
        jax.tree.map(np.testing.assert_array_equal, found[key][:3], update[:3])


def test_each_layer_has_its_own_alpha(models, tmp_path):
    """Closed form: (alpha / rank) B A, and B A without alpha, which diffusers 0.42 gets wrong."""
    theirs, file = torch_pipeline("sd", models["sd"]), tmp_path / "lora.safetensors"
    before = {
        component: getattr(theirs, component).state_dict() for component in ("unet", "text_encoder")
    }
    factors = random_factors(theirs, all_targets(TARGETS))
    kohya_file(file, factors, alpha=1.0)
    tensors = load_file(file)
    alphas = dict(zip(factors, itertools.cycle((1.0, 2.0, 4.0, None))))
    for (component, layer), alpha in alphas.items():
        prefix = "lora_te" if component == "text_encoder" else COMPONENTS[component]
        name = f"{prefix}_{layer.replace('.', '_')}.alpha"
        tensors[name] = torch.tensor(alpha or 0.0)
        if alpha is None:
            del tensors[name]
    save_file(tensors, file)
    _, params = FlaxDiffusionPipeline.from_pretrained(models["sd"], lora=[str(file)])
    for (component, layer), alpha in alphas.items():
        down, up = (x.numpy() for x in factors[component, layer])
        update = np.tensordot(up.reshape(len(up), RANK), down, 1) * ((alpha or RANK) / RANK)
        prefix = "text_model." if component == "text_encoder" else ""
        key, expected = torch_to_flax(
            f"{prefix}{layer}.weight", before[component][f"{layer}.weight"].numpy() + update
        )
        found = flatten_dict(params[component], sep="/")[key]
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-6, err_msg=key)


def test_sums_are_float32_and_keep_the_dtype(tmp_path):
    """In float16 the update alone would be rounded to nothing."""
    layer = "unet.down_blocks.0.resnets.0.time_emb_proj"
    down, up = torch.full((1, 4), 2.0**-9), torch.full((2, 1), 2.0**-9)
    tensors = {f"{layer}.lora_A.weight": down, f"{layer}.lora_B.weight": up}
    save_file(tensors, tmp_path / "a.safetensors")
    loras = Loras([str(tmp_path / "a.safetensors")] * 600)
    x = np.ones((4, 2), np.float16)
    folded = loras.fold("unet", "down_blocks_0/resnets_0/time_emb_proj/kernel", x)
    assert folded.dtype == np.float16
    np.testing.assert_array_equal(folded, np.float16(1 + 600 * 2.0**-18))
    loras.require_folded()


def test_other_names_of_the_original_repository():
    assert from_sgm("input_blocks_0_0") == "conv_in"
    assert from_sgm("time_embed_2") == "time_embedding_linear_2"
    assert from_sgm("label_emb_0_0") == "add_embedding_linear_1"
    assert from_sgm("out_2") == "conv_out"
    assert from_sgm("output_blocks_5_2_conv") == "up_blocks_1_upsamplers_0_conv"
    assert from_sgm("input_blocks_4_0_skip_connection") == "down_blocks_1_resnets_0_conv_shortcut"


LAYER = "unet.mid_block.attentions.0.proj_in"
PAIR = {f"{LAYER}.lora_A.weight": (2, 16, 1, 1), f"{LAYER}.lora_B.weight": (16, 2, 1, 1)}


@pytest.mark.variants
@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({f"{LAYER}.lora_A.weight": (2, 16)}, "lacks factors of its layers; download"),
        (PAIR | {f"{LAYER}.bias": (16,)}, "proj_in/bias is not of a LoRA"),
        (
            PAIR | {f"{LAYER}.dora_scale": (16, 1)},
            "is an adapter, and no LoRA.*; merge it",
        ),
        ({f"base_model.model.{x[5:]}": y for x, y in PAIR.items()}, "without lora_alpha; put PEFT"),
    ],
)
def test_broken_files_are_refused(tmp_path, shapes, message):
    file = tmp_path / "a.safetensors"
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, file)
    with pytest.raises(ValueError, match=f"{file}.*{message}"):
        Loras([str(file)])


def test_loras_of_other_models_are_refused(models, tmp_path):
    file = tmp_path / "a.safetensors"
    wide = {f"{LAYER}.lora_A.weight": (2, 24, 1, 1), f"{LAYER}.lora_B.weight": (16, 2, 1, 1)}
    save_file({name: torch.zeros(shape) for name, shape in wide.items()}, file)
    with pytest.raises(ValueError, match=r"is for another model: .*is 24 -> 16 wide.* 16 -> 16"):
        FlaxDiffusionPipeline.from_pretrained(models["sd"], lora=[str(file)])
    other = {name.replace("mid_block", "down_blocks.7"): shape for name, shape in PAIR.items()}
    save_file({name: torch.zeros(shape) for name, shape in (PAIR | other).items()}, file)
    with pytest.raises(ValueError, match=r"1 of 2 layers do not exist in the model \(unet down_bl"):
        FlaxDiffusionPipeline.from_pretrained(models["sd"], lora=[str(file)])


@pytest.mark.parametrize(
    "settings", ['{"a.use_dora": true}', '{"unet.init_lora_weights": "pissa"}']
)
def test_unsupported_settings_are_refused(tmp_path, settings):
    file = tmp_path / "a.safetensors"
    tensors = {name: torch.zeros(shape) for name, shape in PAIR.items()}
    save_file(tensors, file, metadata={"lora_adapter_metadata": settings})
    with pytest.raises(ValueError, match=f"{file} has PEFT's setting"):
        Loras([str(file)])


@pytest.mark.parametrize("pattern", ["to_v", "attns.1.to_[qv]", r"^attns\.\d\.to_v"])
def test_an_adapter_of_peft_has_its_alpha_in_another_file(tmp_path, pattern):
    """PEFT's own save_pretrained, with another alpha for the layers of a pattern."""
    torch.manual_seed(0)
    model = torch.nn.Module()
    model.attns = torch.nn.ModuleList(
        torch.nn.ModuleDict({name: torch.nn.Linear(6, 5) for name in ("to_q", "to_v")})
        for _ in range(2)
    )
    layers = {
        f"attns_{i}/{name}": layer
        for i, attn in enumerate(model.attns)
        for name, layer in attn.items()
    }
    before = {name: layer.weight.detach().numpy().T.copy() for name, layer in layers.items()}
    settings = peft.LoraConfig(
        r=4,
        lora_alpha=1,
        target_modules=["to_q", "to_v"],
        alpha_pattern={pattern: 3},
        init_lora_weights=False,
    )
    adapted = peft.PeftModel(model, settings)
    adapted.save_pretrained(tmp_path)
    adapted.merge_and_unload()
    loras = Loras([str(tmp_path / "adapter_model.safetensors")])
    for name, layer in layers.items():
        found = loras.fold("unet", f"{name}/kernel", before[name])
        np.testing.assert_allclose(found, layer.weight.detach().numpy().T, atol=1e-6)
        assert np.abs(found - before[name]).max() > 0.05
