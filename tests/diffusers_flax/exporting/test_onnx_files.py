"""ONNX and OpenVINO files are compared with the Flax models."""

import json

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline
from exported import FLOAT16, INT8, MODELS, OPENVINO, export, needs, ours_and_theirs
from helpers import psnr
from original_layout import original_layout, write_single_file
from safetensors.torch import save_file
from tiny_models import make_tiny_pipeline

from diffusers_flax.pipelines.base import pipeline_class


# Least PSNR of an image of 20 steps, dB.
@needs("onnx")
@pytest.mark.parametrize(
    ("name", "flags", "least"),
    [
        *((name, (), 60) for name in MODELS),
        ("xl_edit", FLOAT16, 50),
        ("demo", INT8, 35),
        *((name, OPENVINO, 60) for name in ("demo", "xl_edit")),
        ("demo", (*OPENVINO, *FLOAT16), 50),
        ("demo", (*OPENVINO, *INT8), 35),
    ],
)
def test_images_of_exports(exports, tmp_path, name, flags, least):
    if "openvino" in flags:
        pytest.importorskip("openvino")
    ours, theirs = ours_and_theirs(*exports(name, *flags), tmp_path)
    assert ours.std() > 0.05 and psnr(ours, theirs) > least


@needs("onnx")
@pytest.mark.parametrize("name", MODELS)
def test_layout_of_an_export(exports, name):
    import onnx

    _, folder = exports(name)
    index = json.loads((folder / "model_index.json").read_text())
    names = [x for x in index if x.startswith(("unet", "text_encoder"))]
    for part in (*names, "vae_encoder", "vae_decoder"):
        model = onnx.load(folder / part / "model.onnx")
        assert [x.version for x in model.opset_import if not x.domain] == [18]
        assert (folder / part / "config.json").exists()
    assert (folder / "tokenizer" / "tokenizer.json").exists()
    assert (folder / "scheduler" / "scheduler_config.json").exists()
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]
    model = onnx.load(folder / "unet" / "model.onnx")
    inputs = {x.name: x.type.tensor_type.shape.dim for x in model.graph.input}
    assert [x.dim_param for x in inputs["sample"]] == ["batch_size", "", "height", "width"]
    assert ("time_ids" in inputs) == ("XL" in index["_class_name"])


@needs("onnx")
@pytest.mark.parametrize("flags", [(), INT8], ids=str)
def test_weights_beside_a_large_file(tmp_path, monkeypatch, flags):
    from diffusers_flax.exporting import onnx_files

    model = MODELS["text"](tmp_path / "model")
    monkeypatch.setattr(onnx_files, "LARGEST_FILE", 20_000)  # bytes
    export(model, tmp_path / "export", *flags)
    file = tmp_path / "export" / "unet" / "model.onnx"
    names = {"config.json", "model.onnx", "model.onnx_data"}
    assert {x.name for x in file.parent.iterdir()} == names
    assert (file.parent / "model.onnx_data").stat().st_size > 20_000
    ours, theirs = ours_and_theirs(model, tmp_path / "export", tmp_path)
    assert psnr(ours, theirs) > (35 if flags else 60)


@needs("onnx")
def test_lora_in_a_single_file(tmp_path):
    """The UNet and the text encoder are PyTorch's with the LoRA fused."""
    from diffusers_flax.exporting.components import exported_components, random_inputs
    from diffusers_flax.exporting.onnx_files import open_onnx

    model = make_tiny_pipeline(tmp_path / "model", in_channels=4, unet_channels=(16, 32))
    file = write_single_file(tmp_path / "model.safetensors", original_layout(model))
    theirs = StableDiffusionPipeline.from_pretrained(model, safety_checker=None)
    targets, tensors = ("attn2.to_k", "ff.net.2", "conv1", "q_proj"), {}
    for part in ("unet", "text_encoder"):
        for name, module in getattr(theirs, part).named_modules():
            if name.endswith(targets):
                out, num_in, *kernel = module.weight.shape
                down = torch.randn(2, num_in, *kernel)
                up = torch.randn(out, 2, *(1 for _ in kernel))
                tensors[f"{part}.{name}.lora_A.weight"] = down / 8
                tensors[f"{part}.{name}.lora_B.weight"] = up
    save_file(tensors, lora := tmp_path / "lora.safetensors")
    flags = ["--config_name_or_path", str(model), "--lora", f"{lora}:0.8"]
    export(file, tmp_path / "export", *flags)

    pipeline, _ = pipeline_class(model).from_pretrained(model)
    unet, text, *_ = exported_components(pipeline)
    inputs = random_inputs(unet, pipeline, 2, (9, 6))
    given = {name: torch.from_numpy(x) for name, x in inputs.items()}
    ids = random_inputs(text, pipeline, 2, None)["input_ids"]

    def run_theirs():
        with torch.no_grad():
            states = theirs.text_encoder(torch.from_numpy(ids)).last_hidden_state
            return states.numpy(), theirs.unet(**given).sample.numpy()

    before = run_theirs()
    theirs.load_lora_weights(lora)
    theirs.fuse_lora(lora_scale=0.8)
    run = [open_onnx(tmp_path / "export" / part.name / "model.onnx") for part in (text, unet)]
    found = run[0]({"input_ids": ids})[0], run[1](inputs)[0]
    for x, fused, plain in zip(found, run_theirs(), before):
        assert np.abs(x - fused).max() < 1e-4 * np.abs(fused).max() < np.abs(plain - fused).max()
