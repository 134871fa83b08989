"""LoRA: layers against PEFT, files against PyTorch's loader, training by the command line."""

import dataclasses
import json
import re
import shutil
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import UNet2DConditionModel
from flax.traverse_util import flatten_dict, unflatten_dict
from helpers import PROMPTS, psnr, random_inputs
from peft import LoraConfig
from PIL import Image
from safetensors.torch import load_file
from shards import write_random_shard
from tiny_models import make_tiny_pipeline, make_tiny_xl
from torch_training import (
    Parallel,
    compare_runs,
    draws_by_hand,
    make_xl_batch,
    torch_text_encoder_xl,
    train_with_torch,
)
from trainer_runs import RUN, config_of, flags_of, read_metrics, run_trainer
from transformers import CLIPTextModel

import flax_train_instruct_pix2pix as trainer
from diffusers_flax.loading.directories import CONV_IN_FILE, LORA_FILE
from diffusers_flax.loading.weights import flax_to_torch, torch_to_flax
from diffusers_flax.models.quantization import storage_of
from diffusers_flax.models.unet import FlaxUNet2DConditionModel
from diffusers_flax.pipelines.base import FlaxDiffusionPipeline
from diffusers_flax.training.lora import add_lora, fold_lora
from diffusers_flax.training.models import cast_frozen, load_models
from diffusers_flax.training.sharding import combine

# of torch.Tensor.__array__, called by diffusers' schedulers
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.usefixtures("lenient_optimizer"),
]
RANK, ALPHA = 4, 6.0
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
SCALES = dict(guidance_scale=5.0, image_guidance_scale=1.5)
LORA = dict(lora_rank=RANK, lora_alpha=ALPHA)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    sizes = dict(vae_channels=(16, 32), unet_channels=(16, 16))
    return {
        "sd": make_tiny_pipeline(folder / "sd", **sizes),
        "xl": make_tiny_xl(folder / "xl", edits=True),
    }


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_random_shard(folder / "a.parquet", 16, seed=1)
    return folder


def torch_inputs(unet, batch=2, side=8):
    torch.manual_seed(0)
    inputs = torch.randn(batch, unet.config.in_channels, side, side), torch.tensor([3, 500])
    inputs = (*inputs, torch.randn(batch, 7, unet.config.cross_attention_dim))
    if unet.config.addition_embed_type is None:
        return inputs, {}
    added = {"text_embeds": torch.randn(batch, 20), "time_ids": torch.rand(batch, 6) * 100}
    return inputs, {"added_cond_kwargs": added}


def fold(params, trained, alpha):
    folded = {
        name: fold_lora(name, x, trained, RANK, alpha)
        for name, x in flatten_dict(params, sep="/").items()
    }
    return unflatten_dict(folded, sep="/")


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        pytest.param("xl", ATTENTION, marks=pytest.mark.slow),
        ("sd", (*ATTENTION, "proj_in", "ff.net.0.proj", "conv1", "downsamplers.0.conv")),
    ],
)
def test_outputs_and_gradients_are_pefts(models, family, targets):
    """The gradients of A, B and the first convolution; LoRA on dense layers and convolutions."""
    theirs = UNet2DConditionModel.from_pretrained(models[family] / "unet")
    lora = LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=list(targets), init_lora_weights=False
    )
    theirs.add_adapter(lora)
    theirs.conv_in.requires_grad_(True)
    inputs, added = torch_inputs(theirs)
    expected = theirs(*inputs, **added).sample
    weight = torch.randn_like(expected)
    (expected * weight).sum().backward()

    ours, params = FlaxUNet2DConditionModel.from_pretrained(models[family] / "unet")
    trained, frozen = add_lora(params, RANK, ALPHA, targets)
    of_theirs = {
        name.replace(".default.", "."): parameter
        for name, parameter in theirs.named_parameters()
        if parameter.requires_grad
    }
    names = flatten_dict(trained, sep="/")
    assert {flax_to_torch(name, x)[0] for name, x in names.items()} == set(of_theirs)
    trained = unflatten_dict(
        dict(torch_to_flax(name, x.detach().numpy()) for name, x in of_theirs.items()), sep="/"
    )
    assert jax.tree.map(np.shape, trained) == jax.tree.map(np.shape, unflatten_dict(names, sep="/"))
    inputs, added, weight = jax.tree.map(lambda x: x.numpy(), (inputs, added, weight))

    @jax.jit
    def loss(trained):
        sample = ours.apply({"params": combine(frozen, trained)}, *inputs, **added).sample
        return (sample * weight).sum(), sample

    (_, found), grads = jax.value_and_grad(loss, has_aux=True)(trained)
    np.testing.assert_allclose(found, expected.detach().numpy(), atol=1e-4, rtol=1e-4)
    for name, grad in flatten_dict(grads, sep="/").items():
        name, grad = flax_to_torch(name, np.asarray(grad))
        reference = of_theirs[name].grad.numpy()
        assert np.abs(grad - reference).max() <= 1e-3 * np.abs(reference).max(), name

    merged = fold(params, trained, ALPHA)
    assert jax.tree.map(np.shape, merged) == jax.tree.map(np.shape, params)
    result = jax.jit(ours.apply)({"params": merged}, *inputs, **added).sample
    np.testing.assert_allclose(result, found, atol=1e-4, rtol=1e-4)


def adapt(unet, trained):
    """Add PEFT's adapter to PyTorch's UNet, with our initial values; train conv_in in full."""
    unet.requires_grad_(False)
    unet.add_adapter(LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(ATTENTION)))
    unet.conv_in.requires_grad_(True)
    values = dict(flax_to_torch(name, x) for name, x in flatten_dict(trained, sep="/").items())
    for name, parameter in unet.named_parameters():
        if parameter.requires_grad:
            parameter.data = torch.tensor(values.pop(name.replace(".default.", ".")))
    assert not values


@pytest.mark.slow
def test_training_is_pefts(models):
    """SDXL on 4 devices by block, on one device, and PyTorch with PEFT and AdamW, 4 steps."""
    batches = [make_xl_batch(i) for i in range(4)]
    draws = [draws_by_hand(3, step, RUN["resolution"] // 8) for step in range(4)]
    config = config_of(models["xl"], "unused", "unused", **LORA)
    by_block = dataclasses.replace(config, gradient_checkpointing=True, gather_by_block=True)
    parallel = Parallel(by_block)
    steps = list(parallel.run(batches, 3))
    prepare = partial(adapt, trained=parallel.params)
    torch_run = train_with_torch(models["xl"], batches, draws, torch_text_encoder_xl, prepare)
    compare_runs(parallel, steps, *torch_run)

    alone = Parallel(config, num_devices=1)
    expected = list(alone.run(batches, 3))
    for (_, found), (_, metrics) in zip(steps, expected, strict=True):
        for name in ("loss", "grad_norm"):
            np.testing.assert_allclose(found[name][0], metrics[name][0], rtol=1e-4)
    params = alone.whole(expected[-1][0])
    for name, x in parallel.whole(steps[-1][0]).items():
        np.testing.assert_allclose(x, params[name], rtol=1e-4, atol=1e-6, err_msg=name)


def test_at_the_start_nothing_changes(models):
    _, params = FlaxUNet2DConditionModel.from_pretrained(models["xl"] / "unet")
    trained, frozen = add_lora(params, RANK, None, ATTENTION)
    folded = fold(params, trained, None)
    jax.tree.map(np.testing.assert_array_equal, folded, params)
    first = trained["down_blocks_0"]["attentions_0"]["transformer_blocks_0"]["attn1"]["to_q"]
    a = first["lora_A"]["kernel"]  # uniform, PEFT's bound
    assert a.shape == (16, RANK) and 0.8 / 4 < np.abs(a).max() <= 1 / 4
    assert "conv_in" in trained and "conv_in" not in frozen


def edit_with_lora(out, family, images, latents):
    """PyTorch's edit with the files of a run, opened as its model card says."""
    card = (out / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)pipeline\.to\(", card, re.DOTALL)
    namespace = {}
    exec(code.replace("float16", "float32"), namespace)
    pipeline = namespace["pipeline"]
    pipeline.set_progress_bar_config(disable=True)
    size = dict(height=images.shape[1], width=images.shape[2]) if family == "xl" else {}
    return pipeline(
        PROMPTS[:1],
        image=torch.tensor(images).permute(0, 3, 1, 2),
        num_inference_steps=8,
        latents=torch.tensor(latents),
        output_type="np",
        **SCALES,
        **size,
    ).images


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sd", pytest.param("xl", marks=pytest.mark.slow)])
def test_files_of_a_run_open_in_pytorch(models, data, tmp_path, monkeypatch, capsys, family):
    """Its image equals the image of the pipeline that the same command writes with --merge_lora."""
    out, model = tmp_path / "out", models[family]
    config = config_of(model, data, out, checkpointing_steps=3, ema="full", **LORA)
    out.mkdir()
    (out / "model_index.json").write_text("{}")  # of a model that is overwritten
    run_trainer(dataclasses.replace(config, overwrite_output_dir=True), monkeypatch)
    losses = [row["loss"] for row in read_metrics(out)]
    assert len(losses) == RUN["max_train_steps"]
    assert not (out / "model_index.json").exists()
    tensors = load_file(out / LORA_FILE)
    assert any(x.abs().max() > 0 for name, x in tensors.items() if "lora_B" in name)
    conv_in = load_file(out / CONV_IN_FILE)["conv_in.weight"]
    before = load_file(model / "unet" / "diffusion_pytorch_model.safetensors")["conv_in.weight"]
    assert conv_in.shape == before.shape and not torch.equal(conv_in, before)
    images, latents = random_inputs(1, 40, 24, 8 if family == "xl" else 2)
    expected = edit_with_lora(out, family, images, latents)

    other = config_of(models["xl" if family == "sd" else "sd"], data, out, merge_lora=True, **LORA)
    with pytest.raises(SystemExit, match="2"):
        trainer.main(flags_of(other))
    assert "belongs to another run: " in capsys.readouterr().err
    run_trainer(dataclasses.replace(config, merge_lora=True), monkeypatch)
    assert [row["loss"] for row in read_metrics(out)] == losses  # nothing is trained again
    card = (out / "README.md").read_text()
    assert "load_lora_weights" not in card and "from_pretrained" in card
    assert json.loads((out / "config.json").read_text())["merge_lora"] is True
    pipeline, params = FlaxDiffusionPipeline.from_pretrained(out)
    inputs = pipeline.prepare_inputs(PROMPTS[:1], images)
    found = pipeline(*inputs, params, jax.random.key(0), 8, latents=latents, **SCALES).images
    assert psnr(found, expected) > 60


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "storage"), [("sd", "float8"), pytest.param("xl", "int8", marks=pytest.mark.slow)]
)
def test_a_lora_beside_kernels_in_eight_bits(models, data, tmp_path, monkeypatch, family, storage):
    """It trains and edits validation images; the losses differ by the rounding of the kernels."""
    Image.new("RGB", (16, 16), "red").save(tmp_path / "in.png")
    images = {"validation_image": (str(tmp_path / "in.png"),), "validation_prompt": ("green",)}
    losses = {}
    for kind in (None, storage):
        out = tmp_path / str(kind)
        config = config_of(models[family], data, out, storage=kind, **images, **LORA)
        run_trainer(config, monkeypatch)
        losses[kind] = np.array([row["loss"] for row in read_metrics(out)])
        assert list((out / "validation").glob("*.png"))
    assert not np.array_equal(losses[storage], losses[None])
    np.testing.assert_allclose(losses[storage], losses[None], rtol=0.03)

    modules, _, frozen, _ = load_models(config, jnp.bfloat16)
    stored = cast_frozen(frozen, modules, storage)
    encoders = stored["text_encoder"] if family == "xl" else (stored["text_encoder"],)
    assert {storage_of(params) for params in (stored["unet"], *encoders)} == {storage}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sd", "xl"])
def test_merging_in_bfloat16_keeps_what_is_not_trained(models, data, tmp_path, monkeypatch, family):
    """Frozen kernels are bfloat16 in training; a pipeline merged later has the files' values.

    Nothing is trained again.
    """
    model = shutil.copytree(models[family], tmp_path / "model")
    CLIPTextModel.from_pretrained(model / "text_encoder").half().save_pretrained(
        model / "text_encoder"
    )
    out = tmp_path / "out"
    config = config_of(model, data, out, mixed_precision="bf16", **LORA)
    _, _, frozen, params = load_models(config, jnp.bfloat16)
    for name, x in flatten_dict(frozen["unet"], sep="/").items():
        assert x.dtype == (jnp.bfloat16 if x.ndim > 1 else np.float32), name
    assert {x.dtype for x in jax.tree.leaves(params)} == {np.dtype(np.float32)}
    assert {x.dtype for x in jax.tree.leaves(frozen["text_encoder"])} == {np.dtype(jnp.bfloat16)}
    run_trainer(config, monkeypatch)
    tensors, losses = load_file(out / LORA_FILE), [row["loss"] for row in read_metrics(out)]
    run_trainer(dataclasses.replace(config, merge_lora=True), monkeypatch)
    again = load_file(out / LORA_FILE)
    assert all(torch.equal(again[name], x) for name, x in tensors.items())
    assert [row["loss"] for row in read_metrics(out)] == losses

    before, after = (FlaxDiffusionPipeline.from_pretrained(x)[1] for x in (model, out))
    base = flatten_dict(before.pop("unet"), sep="/")
    merged = flatten_dict(after.pop("unet"), sep="/")
    tensors = {name.removeprefix("unet."): x.numpy() for name, x in tensors.items()}
    tensors |= {name: x.numpy() for name, x in load_file(out / CONV_IN_FILE).items()}
    flat = dict(torch_to_flax(name, x) for name, x in tensors.items())
    for name, x in base.items():
        module, _, leaf = name.rpartition("/")
        if name in flat:
            x = flat[name]
        elif leaf == "kernel" and f"{module}/lora_A/kernel" in flat:
            a, b = (flat[f"{module}/lora_{letter}/kernel"] for letter in "AB")
            np.testing.assert_allclose(merged[name], x + ALPHA / RANK * (a @ b), rtol=1e-5)
            continue
        np.testing.assert_array_equal(merged[name], x, err_msg=name)
    jax.tree.map(np.testing.assert_array_equal, after, before)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sd", "xl"])
def test_a_run_resumes_bit_identically(models, data, tmp_path, monkeypatch, family):
    """With validation images, average, gradient accumulation and checkpointing.

    SDXL also with cached latents and blocks that gather their own parameters.
    """
    options = LORA
    if family == "xl":
        cached = dict(cache_latents=str(tmp_path / "latents"), random_crop=False)
        options = LORA | cached | dict(gather_by_block=True)
    image = tmp_path / "in.png"
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)
    Image.fromarray(pixels).save(image)
    files = {}
    for name, resume_from in (("whole", "none"), ("resumed", "whole/checkpoints/3")):
        out = tmp_path / name
        config = config_of(
            models[family],
            data,
            out,
            checkpointing_steps=3,
            checkpoints_total_limit=None,
            resume_from_checkpoint=str(tmp_path / resume_from) if "/" in resume_from else "none",
            validation_image=(str(image),),
            validation_prompt=("make it red",),
            gradient_accumulation_steps=2,
            gradient_checkpointing=True,
            ema="full",
            save_raw_unet=True,
            **options,
        )
        run_trainer(config, monkeypatch)
        files[name] = load_file(out / LORA_FILE) | load_file(out / CONV_IN_FILE)
        assert len(list((out / "validation").glob("step-*"))) == 1
        assert (out / "unet_raw" / "config.json").exists()
    assert files["resumed"].keys() == files["whole"].keys()
    for key, x in files["resumed"].items():  # the order of a file's metadata is random
        assert torch.equal(x, files["whole"][key]), key
