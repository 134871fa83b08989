"""FlaxCLIPModel and FlaxCLIPVisionModel against PyTorch's models on the same weights."""

import json
from functools import partial

import jax
import numpy as np
import pytest
import safetensors.torch
import torch
from flax.traverse_util import flatten_dict
from helpers import slow
from transformers import (
    CLIPConfig,
    CLIPModel,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPVisionModel,
)

from diffusers_flax import (
    FlaxCLIPModel,
    FlaxCLIPTextModel,
    FlaxCLIPTextModelWithProjection,
    FlaxCLIPVisionModel,
)

TEXT = dict(
    vocab_size=20,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=6,
    bos_token_id=18,
    eos_token_id=19,
)
VISION = dict(
    hidden_size=24,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=3,
    image_size=12,
    patch_size=4,
)
CONFIGS = {  # changes of both towers: CLIP, OpenCLIP, and what published models do not have
    "clip": {},
    "open_clip": {"hidden_act": "gelu"},
    "other": {"layer_norm_eps": 1e-2, "num_hidden_layers": 1, "num_attention_heads": 4},
}
IDS = np.array([[18, 3, 4, 19, 19, 19], [18, 5, 6, 7, 8, 19]])
MASK = np.array([[1, 1, 1, 1, 0, 0], [1] * 6])
PIXELS = np.random.default_rng(0).normal(size=(3, 3, 12, 12)).astype(np.float32)
ALL = {"output_hidden_states": True, "output_attentions": True}


def make_clip(folder, changes, **config):
    """Write a random CLIP model with PyTorch; return its folder."""
    torch.manual_seed(0)
    given = {"projection_dim": 8, "logit_scale_init_value": 1.5} | config
    config = CLIPConfig(text_config=TEXT | changes, vision_config=VISION | changes, **given)
    model = CLIPModel(config)
    for parameter in model.parameters():  # also norms and biases, which begin as constants
        if parameter.ndim:
            torch.nn.init.normal_(parameter, 0.0 if parameter.ndim > 1 else 1.0, 0.3)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["clip", *slow("open_clip", "other")])
def folder(request, tmp_path_factory):
    return make_clip(tmp_path_factory.mktemp(request.param), CONFIGS[request.param])


def theirs_of(torch_class, folder):
    return torch_class.from_pretrained(folder, attn_implementation="eager").eval()


def assert_same_output(ours, theirs):
    """Entries, also in tuples, agree within 2e-4."""
    assert list(ours.keys()) == list(theirs.keys())
    for name, value in ours.items():
        if isinstance(value, dict):
            assert_same_output(value, theirs[name])
            continue
        expected = theirs[name]
        pairs = zip(value, expected, strict=True) if type(value) is tuple else [(value, expected)]
        for array, tensor in pairs:
            np.testing.assert_allclose(np.asarray(array), tensor.detach().numpy(), atol=2e-4)


def test_texts_and_images_equal_pytorch(folder):
    ours, theirs = FlaxCLIPModel.from_pretrained(folder), theirs_of(CLIPModel, folder)
    output = jax.jit(partial(ours, **ALL))(IDS, PIXELS, MASK, params=ours.params)
    with torch.inference_mode():
        expected = theirs(torch.tensor(IDS), torch.tensor(PIXELS), torch.tensor(MASK), **ALL)
        text = theirs.get_text_features(torch.tensor(IDS), torch.tensor(MASK)).pooler_output
        image = theirs.get_image_features(torch.tensor(PIXELS)).pooler_output
    # transformers 5 has the projections in the place of the encoders' own pooled outputs.
    expected.text_model_output.pooler_output = theirs.text_model(
        torch.tensor(IDS), torch.tensor(MASK)
    ).pooler_output
    expected.vision_model_output.pooler_output = theirs.vision_model(
        torch.tensor(PIXELS)
    ).pooler_output
    assert_same_output(output, expected)
    assert output.logits_per_image.shape == (3, 2)
    text_features = jax.jit(ours.get_text_features)(IDS, MASK, params=ours.params)
    np.testing.assert_allclose(text_features, text, atol=2e-4)
    image_features = jax.jit(ours.get_image_features)(PIXELS, params=ours.params)
    np.testing.assert_allclose(image_features, image, atol=2e-4)
    assert np.std(np.asarray(output.logits_per_image)) > 0.1


@pytest.mark.slow
def test_images_equal_pytorch(folder, tmp_path):
    """From an image encoder's directory, with prefix and without, and from a complete model's."""
    theirs = theirs_of(CLIPVisionModel, folder)
    expected = theirs(torch.tensor(PIXELS), **ALL)
    theirs.save_pretrained(tmp_path / "own")  # transformers 5: without the prefix
    tensors = safetensors.torch.load_file(tmp_path / "own" / "model.safetensors")
    (tmp_path / "prefix").mkdir()
    named = {f"vision_model.{name.removeprefix('vision_model.')}": x for name, x in tensors.items()}
    safetensors.torch.save_file(named, tmp_path / "prefix" / "model.safetensors")
    text = (tmp_path / "own" / "config.json").read_text()
    (tmp_path / "prefix" / "config.json").write_text(text)
    for place in (folder, tmp_path / "own", tmp_path / "prefix"):
        ours = FlaxCLIPVisionModel.from_pretrained(place)
        assert_same_output(ours(PIXELS, **ALL), expected)
        assert ours.config.hidden_size == 24


@pytest.mark.slow
@pytest.mark.parametrize(
    ("torch_class", "ours"),
    [
        (CLIPTextModel, FlaxCLIPTextModel),
        (CLIPTextModelWithProjection, FlaxCLIPTextModelWithProjection),
    ],
)
def test_text_model_of_a_complete_model(folder, torch_class, ours, tmp_path):
    """transformers 4.57's examples open the complete CLIP like this."""
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["projection_dim"] = 8
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    theirs = theirs_of(torch_class, tmp_path)(torch.tensor(IDS), **ALL)
    assert_same_output(ours.from_pretrained(tmp_path)(IDS, **ALL), theirs)


def test_pytorch_opens_what_it_writes(folder, tmp_path):
    ours = FlaxCLIPModel.from_pretrained(folder)
    assert ours.config.logit_scale_init_value == ours.params["logit_scale"] == 1.5
    ours.save_pretrained(tmp_path / "ours")
    theirs, report = CLIPModel.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values()), report
    before = CLIPModel.from_pretrained(folder)
    for key, tensor in before.state_dict().items():
        torch.testing.assert_close(theirs.state_dict()[key], tensor, rtol=0, atol=0)
    for name in ("text_config", "vision_config"):
        saved, original = (getattr(model.config, name).to_dict() for model in (theirs, before))
        assert saved == original
    reopened = FlaxCLIPModel.from_pretrained(tmp_path / "ours")
    jax.tree.map(np.testing.assert_array_equal, reopened.params, ours.params)
    vision = FlaxCLIPVisionModel.from_pretrained(folder)
    vision.save_pretrained(tmp_path / "vision")
    _, report = CLIPVisionModel.from_pretrained(tmp_path / "vision", output_loading_info=True)
    assert not any(report.values()), report


@pytest.mark.slow
def test_published_tree(tmp_path):
    """The paths of transformers 4.57's Flax classes, and Flax msgpack with them."""
    ours = FlaxCLIPModel.from_pretrained(make_clip(tmp_path, {}))
    paths = {"/".join(path) for path in flatten_dict(ours.params)}
    assert {path for path in paths if path.count("/") < 3} == {
        "logit_scale",
        "text_projection/kernel",
        "visual_projection/kernel",
        "text_model/final_layer_norm/bias",
        "text_model/final_layer_norm/scale",
        "vision_model/embeddings/class_embedding",
        "vision_model/post_layernorm/bias",
        "vision_model/post_layernorm/scale",
        "vision_model/pre_layrnorm/bias",
        "vision_model/pre_layrnorm/scale",
    }
    assert "vision_model/embeddings/patch_embedding/kernel" in paths
    assert "vision_model/encoder/layers/1/self_attn/q_proj/kernel" in paths
    ours.save_pretrained(tmp_path / "flax", flax_msgpack=True)
    (tmp_path / "flax" / "model.safetensors").unlink()
    reopened = FlaxCLIPModel.from_pretrained(tmp_path / "flax")
    jax.tree.map(np.testing.assert_array_equal, reopened.params, ours.params)
    vision, params = FlaxCLIPVisionModel.from_pretrained(tmp_path / "flax", _do_init=False)
    assert set(params) == {"vision_model"}
    assert vision(PIXELS, params=params).pooler_output.shape == (3, 24)
