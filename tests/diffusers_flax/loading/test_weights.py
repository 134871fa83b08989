"""Files on disk <-> parameter trees: names, shapes and values against PyTorch, formats, errors."""

import copy
import json
import logging
import os
import pickle
import traceback
import tracemalloc
from functools import partial
from pathlib import Path

import diffusers
import flax.linen as nn
import flax.serialization
import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
import transformers
from flax.traverse_util import flatten_dict
from helpers import slow

from diffusers_flax.loading import weights
from diffusers_flax.loading.weights import flax_to_torch, torch_to_flax
from diffusers_flax.models.base import FlaxModelMixin
from diffusers_flax.models.clip import (
    FlaxCLIPTextModel,
    FlaxCLIPTextModelWithProjectionModule,
    FlaxCLIPTextModule,
)
from diffusers_flax.models.unet import FlaxUNet2DConditionModel
from diffusers_flax.models.vae import FlaxAutoencoderKL

UNET = dict(
    sample_size=8,
    block_out_channels=(8, 16),
    norm_num_groups=4,
    layers_per_block=1,
    cross_attention_dim=12,
    attention_head_dim=2,
    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
)
VAE = dict(
    block_out_channels=(8, 16),
    norm_num_groups=4,
    down_block_types=("DownEncoderBlock2D",) * 2,
    up_block_types=("UpDecoderBlock2D",) * 2,
)
CLIP = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
CLIP |= dict(vocab_size=40, max_position_embeddings=10, projection_dim=12)
CLIP |= dict(bos_token_id=38, eos_token_id=39)


def torch_model(kind):
    torch.manual_seed(0)
    match kind:
        case "unet_conv":
            return diffusers.UNet2DConditionModel(**UNET)
        case "unet_no_middle":
            return diffusers.UNet2DConditionModel(**UNET, mid_block_type=None)
        case "unet_linear":
            return diffusers.UNet2DConditionModel(**UNET, use_linear_projection=True)
        case "unet_sdxl":  # the mapping covers modules that the Flax UNet does not implement
            return diffusers.UNet2DConditionModel(
                **UNET,
                use_linear_projection=True,
                addition_embed_type="text_time",
                addition_time_embed_dim=4,
                projection_class_embeddings_input_dim=36,
                transformer_layers_per_block=(2, 1),
            )
        case "vae":
            return diffusers.AutoencoderKL(**VAE)
        case "clip":
            return transformers.CLIPTextModel(transformers.CLIPTextConfig(**CLIP))
        case "clip_projection":
            config = transformers.CLIPTextConfig(**CLIP)
            return transformers.CLIPTextModelWithProjection(config)


FLAX_CLASSES = {
    "unet_conv": FlaxUNet2DConditionModel,
    "unet_linear": FlaxUNet2DConditionModel,
    "unet_no_middle": FlaxUNet2DConditionModel,
    "vae": FlaxAutoencoderKL,
    "clip": FlaxCLIPTextModule,
    "clip_projection": FlaxCLIPTextModelWithProjectionModule,
}


# --- names, shapes, values ---


def test_every_tensor_goes_there_and_back():
    """Also of modules that the Flax UNet does not implement."""
    state = {key: x.numpy() for key, x in torch_model("unet_sdxl").state_dict().items()}
    flax = {key: torch_to_flax(key, tensor) for key, tensor in state.items()}
    assert len({name for name, _ in flax.values()}) == len(state)
    for key, named in flax.items():
        torch_key, back = flax_to_torch(*named)
        assert torch_key == key
        np.testing.assert_array_equal(back, state[key], strict=True)


@pytest.mark.parametrize("as_conv", [False, True])
def test_old_vae_attention_names(as_conv):
    prefix = "encoder.mid_block.attentions.0"
    for old, new in zip(
        ("query", "key", "value", "proj_attn"), ("to_q", "to_k", "to_v", "to_out.0")
    ):
        weight = np.random.default_rng(0).normal(size=(4, 4))
        old_weight = weight[:, :, None, None] if as_conv else weight
        key, kernel = torch_to_flax(f"{prefix}.{old}.weight", old_weight)
        assert key == f"encoder/mid_block/attentions_0/{old}/kernel"
        np.testing.assert_array_equal(kernel, weight.T, strict=True)
        key, back = flax_to_torch(key, kernel)
        assert key == f"{prefix}.{new}.weight"
        np.testing.assert_array_equal(back, weight, strict=True)


# --- the real models, read from and opened by PyTorch ---


def assert_same_tree(tree, expected):
    flat, expected = flatten_dict(tree, sep="/"), flatten_dict(expected, sep="/")
    assert flat.keys() == expected.keys()
    for key, value in expected.items():
        assert flat[key].dtype == value.dtype, key
        np.testing.assert_array_equal(flat[key], value, err_msg=key)


@pytest.mark.parametrize(
    "kind",
    ["unet_conv", "vae", "clip", *slow("unet_linear", "unet_no_middle", "clip_projection")],
)
def test_pytorch_opens_what_we_write(kind, tmp_path):
    theirs = torch_model(kind)
    theirs.save_pretrained(tmp_path / "theirs")
    module, params = FLAX_CLASSES[kind].from_pretrained(tmp_path / "theirs")
    module.save_pretrained(tmp_path / "ours", params)

    reopened, report = type(theirs).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values()), report
    for key, tensor in theirs.state_dict().items():
        assert torch.equal(tensor, reopened.state_dict()[key]), key
    with safetensors.safe_open(
        tmp_path / "ours" / f"{module.weights_name}.safetensors", "pt"
    ) as file:
        assert file.metadata() == {"format": "pt"}

    reopened.save_pretrained(tmp_path / "reopened")
    wrote, rewrote = (
        json.loads((tmp_path / name / "config.json").read_text()) for name in ("theirs", "reopened")
    )
    rewrote.pop("_name_or_path", None)
    assert rewrote == wrote


def test_unprefixed_clip_names_and_buffers_are_read(tmp_path):
    theirs = torch_model("clip")
    theirs.save_pretrained(tmp_path)
    _, expected = FlaxCLIPTextModel.from_pretrained(tmp_path, _do_init=False)
    bare = {k.removeprefix("text_model."): v for k, v in theirs.state_dict().items()}
    bare["embeddings.position_ids"] = torch.arange(10)[None]
    safetensors.torch.save_file(bare, tmp_path / "model.safetensors")
    _, params = FlaxCLIPTextModel.from_pretrained(tmp_path, _do_init=False)
    assert_same_tree(params, expected)


def test_old_flax_config_and_msgpack_name_open(tmp_path):
    module = FlaxUNet2DConditionModel(**UNET)
    shapes = jax.eval_shape(module.init_weights, jax.random.key(0))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), shapes)
    config = {"_class_name": "FlaxUNet2DConditionModel", "_diffusers_version": "0.3.0", **UNET}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "diffusion_flax_model.msgpack").write_bytes(flax.serialization.to_bytes(params))
    reopened, loaded = FlaxUNet2DConditionModel.from_pretrained(tmp_path)
    assert reopened == module
    assert_same_tree(loaded, params)


# --- one tiny module in every format ---


class TinyModel(nn.Module, FlaxModelMixin):
    in_channels: int = 4
    widths: tuple = (6, 5)
    dtype: type = jnp.float32
    gradient_checkpointing: bool = False

    torch_class_name = "UNet2DConditionModel"
    fixed_config = {"act_fn": "silu", "time_cond_proj_dim": None, "sizes": [1, 2]}  # noqa: RUF012
    ignored_config = ("memory_trick",)

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(self.widths[0], (3, 3), name="conv_in")(x)
        x = nn.LayerNorm(name="conv_norm_out")(x)
        for i, width in enumerate(self.widths[1:]):
            x = nn.Dense(width, name=f"to_out_{i}")(x)
        return x

    def init_weights(self, rng):
        return self.init(rng, jnp.zeros((1, 8, 8, self.in_channels)))["params"]


CONFIG = {"_class_name": "UNet2DConditionModel", "in_channels": 4, "widths": [6, 5]}
STATE_SHAPES = {
    "conv_in.weight": (6, 4, 3, 3),
    "conv_in.bias": (6,),
    "conv_norm_out.weight": (6,),
    "conv_norm_out.bias": (6,),
    "to_out.0.weight": (5, 6),
    "to_out.0.bias": (5,),
}


def tiny_state(dtype=torch.float32, **extra_shapes):
    generator = torch.Generator().manual_seed(1)
    shapes = STATE_SHAPES | extra_shapes
    return {k: torch.randn(shape, generator=generator).to(dtype) for k, shape in shapes.items()}


def tiny_params(dtype=np.float32):
    """The tree of tiny_state, with axes transposed by hand."""
    state = {k: v.numpy().astype(dtype) for k, v in tiny_state().items()}
    return {
        "conv_in": {
            "kernel": np.moveaxis(state["conv_in.weight"], (0, 1), (3, 2)),
            "bias": state["conv_in.bias"],
        },
        "conv_norm_out": {
            "scale": state["conv_norm_out.weight"],
            "bias": state["conv_norm_out.bias"],
        },
        "to_out_0": {
            "kernel": np.swapaxes(state["to_out.0.weight"], 0, 1),
            "bias": state["to_out.0.bias"],
        },
    }


STEM = "diffusion_pytorch_model"
FORMS = {  # {form: (end of the file's name, or of the shards', end of their index's)}
    "safetensors": (".safetensors", None),
    "safetensors sharded": ("-{}.safetensors", ".safetensors.index.json"),
    "safetensors fp16": (".fp16.safetensors", None),
    "safetensors sharded fp16": (".fp16-{}.safetensors", ".safetensors.index.fp16.json"),
    "safetensors sharded, diffusers' older names, fp16": (
        "-{}.fp16.safetensors",
        ".safetensors.fp16.index.json",
    ),
    "safetensors sharded, huggingface_hub's names, fp16": (
        ".fp16-{}.safetensors",
        ".fp16.safetensors.index.json",
    ),
    "bin": (".bin", None),
    "bin before 1.6": (".bin", None),
    "bin sharded": ("-{}.bin", ".bin.index.json"),
    "msgpack": None,
}


def save_single(folder, state, name=f"{STEM}.safetensors"):
    safetensors.torch.save_file(state, folder / name)


def write_weights(folder, form, dtype=torch.float32):
    state = tiny_state(dtype)
    if form == "msgpack":
        tree = tiny_params(np.dtype(getattr(jnp, str(dtype).removeprefix("torch."))))
        data = flax.serialization.msgpack_serialize(jax.tree.map(jnp.asarray, tree))
        (folder / "diffusion_flax_model.msgpack").write_bytes(data)
        return
    end, index_end = FORMS[form]
    save = partial(torch.save, _use_new_zipfile_serialization=form != "bin before 1.6")
    save = safetensors.torch.save_file if end.endswith("safetensors") else save
    if index_end is None:
        save(state, folder / f"{STEM}{end}")
        return
    weight_map = {}
    for i, keys in enumerate((list(state)[:2], list(state)[2:]), 1):
        name = f"{STEM}{end}".format(f"{i:05d}-of-00002")
        save({k: state[k] for k in keys}, folder / name)
        weight_map |= dict.fromkeys(keys, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / f"{STEM}{index_end}").write_text(json.dumps(index))


@pytest.fixture
def folder(tmp_path):
    """A model directory without weights."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def variant_of(form):
    return "fp16" if form.endswith("fp16") else None


@pytest.mark.parametrize("form", FORMS)
def test_every_format_gives_the_same_params(folder, form):
    write_weights(folder, form)
    module, params = TinyModel.from_pretrained(folder, variant=variant_of(form))
    assert module == TinyModel(in_channels=4, widths=(6, 5))
    assert_same_tree(params, tiny_params())
    assert {leaf.device for leaf in jax.tree.leaves(params)} == {jax.local_devices()[0]}


def test_every_dtype_in_every_file(tmp_path):
    """All dtypes that PyTorch and safetensors have but packed ones, with PyTorch's numbers."""
    safetensors_file = tmp_path / "a.safetensors"
    for name in (*safetensors.torch._TYPES, "F8_E8M0"):
        dtype = safetensors.torch._TYPES.get(name, torch.float8_e8m0fnu)
        tensor = torch.tensor([[0, 1, 2], [1, 4, 8]]).to(dtype)
        safetensors.torch.save_file({"a": tensor}, safetensors_file)
        torch.save({"a": tensor}, tmp_path / "a.bin")
        is_new = dtype not in torch.storage._dtype_to_storage_type_map()  # for the old format
        torch.save({"a": tensor}, tmp_path / "a.pt", _use_new_zipfile_serialization=is_new)
        array = weights.as_array(tensor)
        data = flax.serialization.msgpack_serialize({"a": array})
        (tmp_path / "a.msgpack").write_bytes(data)
        for suffix in (".safetensors", ".bin", ".pt", ".msgpack"):
            file = tmp_path / f"a{suffix}"
            [(_, found)] = weights.read_weights(file, kinds=(np.number, np.bool_))
            assert str(dtype) == f"torch.{found.dtype.name}"
            expected = tensor.to(torch.complex64).numpy()
            np.testing.assert_array_equal(found.astype(np.complex64), expected, err_msg=name)
    header = b'{"a":{"dtype":"F4","shape":[2,2],"data_offsets":[0,2]}}'
    safetensors_file.write_bytes(len(header).to_bytes(8, "little") + header + b"ab")
    with pytest.raises(ValueError, match=r"cannot be read as weights.*float4"):
        list(weights.read_weights(safetensors_file))


# --- weights that do not fit, files that cannot be read ---

BAD_STATE = {
    "conv_in.weight": (6, 3, 3, 3),
    "conv_norm_out.weight": (7,),
    "up_blocks.0.extra.weight": (2, 2),
    "mid_block.extra.bias": (2,),
}
BAD_REPORT = (
    "does not fit TinyModel: "
    "missing: conv_in/bias, to_out_0/kernel; "
    "unexpected: mid_block/extra/bias, up_blocks_0/extra/kernel; "
    "wrong shape: conv_in/kernel is (3, 3, 3, 6), model has (3, 3, 4, 6), "
    "conv_norm_out/scale is (7,), model has (6,)"
)


def test_every_bad_key_is_named(folder):
    state = tiny_state(**BAD_STATE)
    del state["conv_in.bias"], state["to_out.0.weight"]
    save_single(folder, state)
    with pytest.raises(ValueError) as error:
        TinyModel.from_pretrained(folder)
    assert str(error.value) == f"{folder / STEM}.safetensors {BAD_REPORT}"


class Malicious:
    def __init__(self, victim):
        self.victim = victim

    def __reduce__(self):
        return os.mkdir, (str(self.victim),)


def test_pickled_code_is_refused(folder):
    victim = folder / "executed"
    state = {**tiny_state(), "conv_in.bias": Malicious(victim)}
    torch.save(state, folder / "diffusion_pytorch_model.bin")
    message = r"model\.bin cannot be read as weights \(it runs code when it is opened: .*mkdir"
    with pytest.raises(ValueError, match=message) as error:
        TinyModel.from_pretrained(folder)
    assert "weights_only" not in str(error.value) and not victim.exists()
    torch.load(folder / "diffusion_pytorch_model.bin", weights_only=False)
    assert victim.exists()  # so the file would have done it


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 3438167540\n"


@pytest.mark.parametrize(
    ("form", "damage"), [("safetensors", "truncated"), ("bin", "truncated"), ("msgpack", "pointer")]
)
def test_damaged_files(folder, form, damage):
    write_weights(folder, form)
    (file,) = (f for f in folder.iterdir() if f.name != "config.json")
    data = {"truncated": file.read_bytes()[:-200], "pointer": POINTER}[damage]
    file.write_bytes(data)
    with pytest.raises(ValueError) as error:
        TinyModel.from_pretrained(folder)
    assert str(error.value).startswith(f"{file} cannot be read as weights (")
    assert "weights_only set" not in "".join(traceback.format_exception(error.value))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (CONFIG | {"in_channels": -4}, "cannot be built"),
        (CONFIG | {"_class_name": "AutoencoderKL"}, "config of AutoencoderKL, not of UNet2DCon"),
        ("{", "is not valid JSON"),
    ],
    ids=lambda value: str(value)[-40:],
)
def test_damaged_configs(folder, text, words):
    file = folder / "config.json"
    file.write_text(text if isinstance(text, str) else json.dumps(text))
    with pytest.raises(ValueError, match=words) as error:
        TinyModel.from_pretrained(folder)
    assert str(file) in str(error.value) and "\n" not in str(error.value)


def test_missing_weights_and_variant(folder, caplog):
    with pytest.raises(ValueError, match=r"_model\.bf16\.safetensors, .*_model\.safetensors, "):
        TinyModel.from_pretrained(folder, variant="bf16")
    write_weights(folder, "safetensors")
    with caplog.at_level(logging.WARNING):
        _, params = TinyModel.from_pretrained(folder, variant="bf16")
    assert "has no weights with variant='bf16': read without it" in caplog.text
    assert_same_tree(params, TinyModel.from_pretrained(folder)[1])
    other = jax.tree.map(lambda x: x + 1, params)
    TinyModel().save_pretrained(folder, other, variant="bf16")
    assert_same_tree(TinyModel.from_pretrained(folder, variant="bf16")[1], other)


# --- configs ---


def test_unsupported_settings():
    with pytest.raises(ValueError, match=r"TinyModel does not implement act_fn='mish'; .*'silu'"):
        TinyModel.from_config({"act_fn": "mish"})
    with pytest.raises(ValueError, match=r"time_cond_proj_dim=256; .*time_cond_proj_dim=None"):
        TinyModel.from_config({"time_cond_proj_dim": 256})
    with pytest.raises(ValueError, match=r"no setting 'in_chanels'; it has .*in_channels"):
        TinyModel.from_config({}, in_chanels=8)


# --- saving ---


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_save_dtype_variant_and_msgpack(tmp_path, dtype):
    expected = tiny_params(np.dtype(dtype))
    TinyModel().save_pretrained(
        tmp_path, tiny_params(), variant="half", dtype=dtype, flax_msgpack=True
    )
    _, params = TinyModel.from_pretrained(tmp_path, variant="half")
    assert_same_tree(params, expected)
    data = (tmp_path / "diffusion_flax_model.msgpack").read_bytes()
    assert_same_tree(flax.serialization.msgpack_restore(data), expected)
    assert data == flax.serialization.msgpack_serialize(expected)


def test_save_shards_and_single_replace_each_other(tmp_path):
    other = jax.tree.map(np.ones_like, tiny_params())
    TinyModel().save_pretrained(tmp_path, other)
    (tmp_path / "diffusion_pytorch_model.fp16.safetensors").write_bytes(b"another variant")

    TinyModel().save_pretrained(tmp_path, tiny_params(), max_shard_size=500)
    names = {f.name for f in tmp_path.glob("diffusion*")}
    index = json.loads((tmp_path / "diffusion_pytorch_model.safetensors.index.json").read_text())
    shards = set(index["weight_map"].values())
    assert names == shards | {
        "diffusion_pytorch_model.safetensors.index.json",
        "diffusion_pytorch_model.fp16.safetensors",
    }
    assert len(shards) > 1
    assert index["metadata"]["total_size"] == 4 * sum(map(np.prod, STATE_SHAPES.values()))
    assert_same_tree(TinyModel.from_pretrained(tmp_path)[1], tiny_params())

    TinyModel().save_pretrained(tmp_path, other)
    assert {f.name for f in tmp_path.glob("diffusion*")} == {
        "diffusion_pytorch_model.safetensors",
        "diffusion_pytorch_model.fp16.safetensors",
    }
    assert_same_tree(TinyModel.from_pretrained(tmp_path)[1], other)


def test_interrupted_save_leaves_the_folder_as_it_was(tmp_path, monkeypatch):
    TinyModel().save_pretrained(tmp_path, tiny_params())
    before = {f.name: f.read_bytes() for f in tmp_path.iterdir()}

    def half_a_file(tensors, file, metadata):
        assert Path(file).parent.parent == tmp_path  # renaming must not cross file systems
        Path(file).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(weights, "save_file", half_a_file)
    ones = jax.tree.map(np.ones_like, tiny_params())
    with pytest.raises(KeyboardInterrupt):
        TinyModel().save_pretrained(tmp_path, ones)
    assert {f.name: f.read_bytes() for f in tmp_path.iterdir()} == before


# --- memory ---


def peak_bytes(function):
    tracemalloc.start()
    try:
        result = function()
        return tracemalloc.get_traced_memory()[1], result
    finally:
        tracemalloc.stop()


def test_memory(tmp_path):
    module = TinyModel(widths=(256,) * 33)  # 32 matrices of 256 KB
    shapes = jax.eval_shape(lambda: module.init_weights(jax.random.key(0)))
    params = jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), shapes)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    one_mb = 2**20
    module.save_pretrained(tmp_path, params)
    reading, (_, loaded) = peak_bytes(lambda: TinyModel.from_pretrained(tmp_path))
    assert_same_tree(loaded, params)
    # Beside JAX's arrays, which are not counted: a few tensors, not a second copy of the file.
    assert reading < 2 * one_mb
    del loaded
    writing, _ = peak_bytes(
        lambda: module.save_pretrained(tmp_path, params, max_shard_size=2 * one_mb)
    )
    assert writing < 4 * one_mb  # on top of params: one shard and a few MB
    assert size > 8 * one_mb


# --- the hub, offline ---

REPOSITORY, COMMITS = "someone/images", {"main": "a" * 40, "v2": "b" * 40}


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """A cache of the hub client with two revisions of a pipeline, with different weights."""
    assert huggingface_hub.constants.HF_HUB_OFFLINE
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--someone--images"
    (repository / "refs").mkdir(parents=True)
    for number, (revision, commit) in enumerate(COMMITS.items()):
        (repository / "refs" / revision).write_text(commit)
        unet = repository / "snapshots" / commit / "unet"
        params = jax.tree.map(lambda x, n=number: np.full_like(x, n), tiny_params())
        TinyModel().save_pretrained(unet, params, max_shard_size=500 if number else "1MB")
    return repository


@pytest.mark.parametrize(("revision", "number"), [(None, 0), ("v2", 1), ("b" * 40, 1)])
def test_hub_subfolder_and_revision(hub_cache, revision, number):
    module, params = TinyModel.from_pretrained(REPOSITORY, subfolder="unet", revision=revision)
    assert module == TinyModel()
    assert all((leaf == number).all() for leaf in jax.tree.leaves(params))


def test_hub_errors(hub_cache):
    with pytest.raises(ValueError, match=r"no config\.json in someone/images \(not a directory"):
        TinyModel.from_pretrained(REPOSITORY)
    with pytest.raises(ValueError, match=r"unet \(not a directory.*revision v3; HF_HUB_OFFLINE"):
        TinyModel.from_pretrained(REPOSITORY, subfolder="unet", revision="v3")
    with pytest.raises(ValueError, match="/no/such/folder is not a directory and cannot be"):
        TinyModel.from_pretrained("/no/such/folder")


# --- the published methods ---


@pytest.mark.parametrize(
    ("method", "dtype"),
    [("to_bf16", jnp.bfloat16), ("to_fp16", jnp.float16), ("to_fp32", jnp.float32)],
)
def test_casts(method, dtype):
    start = jnp.float64 if dtype == jnp.float32 else jnp.float32
    params = {
        "b": {"kernel": np.arange(3, dtype=start), "steps": np.arange(3)},
        "a": jnp.arange(2, dtype=jnp.float16),
    }
    cast = getattr(TinyModel(), method)
    assert jax.tree.map(lambda x: x.dtype, cast(params)) == {
        "b": {"kernel": dtype, "steps": int},
        "a": dtype,
    }
    np.testing.assert_array_equal(cast(params)["b"]["kernel"], [0, 1, 2])
    assert params["b"]["kernel"].dtype == start
    mask = {"b": {"kernel": False, "steps": True}, "a": True}
    dtypes = jax.tree.map(lambda x: x.dtype, cast(params, mask))
    assert dtypes == {"b": {"kernel": start, "steps": int}, "a": dtype}


def test_config_is_a_dict_that_goes_to_json_and_back(tmp_path):
    model = TinyModel(in_channels=3, widths=(2, 1))
    assert isinstance(model.config, dict) and "widths" in model.config
    for config in (copy.deepcopy(model.config), pickle.loads(pickle.dumps(model.config))):
        assert config == model.config and config.in_channels == 3
    with pytest.raises(AttributeError, match=r"no entry 'width'; it has in_channels, widths"):
        model.config.width  # noqa: B018
    model.save_config(tmp_path)
    model.to_json_file(tmp_path / "copy.json")
    for content in (TinyModel.load_config(tmp_path), json.loads(model.to_json_string())):
        assert content == json.loads((tmp_path / "copy.json").read_text())
        assert TinyModel.from_config(content) == model
    with pytest.raises(ValueError, match=r"no config\.json in"):
        TinyModel.load_config(tmp_path, subfolder="unet")
    other, unused = TinyModel.from_config(
        content, return_unused_kwargs=True, in_channels=5, speed=9, dtype=jnp.bfloat16
    )
    assert (other.in_channels, other.dtype, unused) == (5, jnp.bfloat16, {"speed": 9})
    assert TinyModel.from_config() == TinyModel()
    with pytest.raises(AttributeError, match="read-only"):
        model.config.in_channels = 8
    with pytest.raises(TypeError):
        model.config["in_channels"] = 8
