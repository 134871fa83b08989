"""FlaxCLIPTextModel, an object with config and parameters, against PyTorch's model."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from helpers import ROOT, slow
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
)

from diffusers_flax.models.clip import (
    FlaxBaseModelOutputWithPooling,
    FlaxCLIPTextModel,
    FlaxCLIPTextModelWithProjection,
)

CONFIG = dict(
    vocab_size=20,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    projection_dim=8,
    max_position_embeddings=6,
    bos_token_id=18,
    eos_token_id=19,
)
IDS = np.array([[18, 3, 4, 19, 19, 19], [18, 5, 6, 7, 8, 19]])
CLASSES = {
    CLIPTextModel: FlaxCLIPTextModel,
    CLIPTextModelWithProjection: FlaxCLIPTextModelWithProjection,
}
ACTIVATIONS = {CLIPTextModel: "quick_gelu", CLIPTextModelWithProjection: "gelu"}  # as SDXL's


@pytest.fixture(scope="module", params=CLASSES, ids=lambda cls: cls.__name__)
def folder(request, tmp_path_factory):
    """A model directory written by a PyTorch class."""
    torch.manual_seed(0)
    options = {"hidden_act": ACTIVATIONS[request.param], "attn_implementation": "eager"}
    config = CLIPTextConfig(**CONFIG, **options)
    path = tmp_path_factory.mktemp(request.param.__name__)
    request.param(config).save_pretrained(path)
    return path, request.param


@pytest.fixture(scope="module")
def model():
    return FlaxCLIPTextModel(CLIPTextConfig(**CONFIG), seed=1)


def assert_close(ours, theirs):
    np.testing.assert_allclose(np.asarray(ours), theirs.detach().numpy(), atol=2e-5)


@pytest.mark.parametrize("masked", [True, *slow(False)])
def test_equals_pytorch(folder, masked):
    path, torch_class = folder
    theirs = torch_class.from_pretrained(path, attn_implementation="eager").eval()
    ours = CLASSES[torch_class].from_pretrained(path)
    mask = np.array([[1, 1, 1, 1, 0, 0], [1] * 6]) if masked else None
    positions = np.array([[0, 1, 2, 3, 3, 3], [0, 1, 2, 3, 4, 5]])
    expected = theirs(
        torch.tensor(IDS),
        attention_mask=None if mask is None else torch.tensor(mask),
        position_ids=torch.tensor(positions),
        output_hidden_states=True,
        output_attentions=True,
    )
    result = ours(IDS, mask, positions, output_hidden_states=True, output_attentions=True)
    assert list(result.keys()) == list(expected.keys())
    for name in ("last_hidden_state", "pooler_output", "text_embeds"):
        if name in expected:
            assert_close(result[name], expected[name])
    for name in ("hidden_states", "attentions"):
        assert len(result[name]) == len(expected[name])
        for array, tensor in zip(result[name], expected[name]):
            assert_close(array, tensor)
    # Attention with and without returned weights gives the same states.
    np.testing.assert_allclose(ours(IDS, mask, positions)[0], result[0], atol=1e-5)


def test_end_of_text_of_old_configs_equals_pytorch(folder):
    """They have eos_token_id=2, but the end of text is the highest id."""
    path, torch_class = folder
    theirs = torch_class.from_pretrained(path, eos_token_id=2).eval()
    ours = CLASSES[torch_class].from_pretrained(path, eos_token_id=2)
    pooled = "pooler_output" if torch_class is CLIPTextModel else "text_embeds"
    assert_close(ours(IDS)[pooled], theirs(torch.tensor(IDS))[pooled])


def test_pytorch_opens_what_it_writes(folder, tmp_path):
    path, torch_class = folder
    ours = CLASSES[torch_class].from_pretrained(path)
    ours.save_pretrained(tmp_path / "own")
    ours.save_pretrained(tmp_path / "given", params=jax.tree.map(lambda x: x + 1, ours.params))
    theirs = torch_class.from_pretrained(path).state_dict()
    for name, shift in (("own", 0), ("given", 1)):
        reopened, report = torch_class.from_pretrained(tmp_path / name, output_loading_info=True)
        assert not any(report.values()), report
        for key, tensor in reopened.state_dict().items():
            torch.testing.assert_close(tensor, theirs[key] + shift)
    with pytest.raises(ValueError, match="push_to_hub=True is not supported; save, then"):
        ours.save_pretrained(tmp_path / "no", push_to_hub=True)


def test_jit_and_gradients(model):
    def loss(params, ids):
        return jnp.square(model(ids, params=params, train=True, dropout_rng=key)[0]).mean()

    key = jax.random.PRNGKey(0)
    gradient = jax.jit(jax.grad(loss))(model.params, IDS)
    table = gradient["text_model"]["embeddings"]["token_embedding"]["embedding"]
    used = np.unique(IDS)
    assert jnp.any(table[used] != 0, axis=1).all()
    assert not jnp.any(np.delete(table, used, axis=0))
    compiled = jax.jit(model)(IDS, params=model.params)  # the model is callable, outputs a pytree
    assert isinstance(compiled, FlaxBaseModelOutputWithPooling)
    np.testing.assert_allclose(compiled[0], model(IDS)[0], atol=1e-6)
    assert hash(model.__call__) == hash(model.__call__)  # apply_fn of a TrainState


def test_without_parameters(model, tmp_path):
    bare = FlaxCLIPTextModel(model.config, _do_init=False)
    for use in (lambda: bare.params, lambda: bare(IDS)):
        with pytest.raises(ValueError, match="_do_init=False and has no parameters"):
            use()
    np.testing.assert_array_equal(bare(IDS, params=model.params)[0], model(IDS)[0])
    model.save_pretrained(tmp_path)
    bare, params = FlaxCLIPTextModel.from_pretrained(tmp_path, _do_init=False)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(params))
    np.testing.assert_array_equal(bare(IDS, params=params)[0], model(IDS)[0])


def test_dtypes(model):
    half = FlaxCLIPTextModel(model.config, dtype=jnp.bfloat16)
    assert {x.dtype for x in jax.tree.leaves(half.params)} == {jnp.dtype("float32")}
    result = half(IDS, output_attentions=True)
    assert result[0].dtype == result.attentions[0].dtype == jnp.bfloat16
    for cast, dtype in (
        (half.to_bf16, jnp.bfloat16),
        (half.to_fp16, jnp.float16),
        (half.to_fp32, jnp.float32),
    ):
        assert {x.dtype for x in jax.tree.leaves(cast(half.params))} == {jnp.dtype(dtype)}
    mask = jax.tree.map(lambda x: x.ndim > 1, half.params)
    layer = half.to_bf16(half.params, mask)["text_model"]["encoder"]["layers"]["0"]["mlp"]["fc1"]
    assert (layer["kernel"].dtype, layer["bias"].dtype) == (jnp.bfloat16, jnp.float32)


def test_settings_on_loading(folder):
    path, torch_class = folder
    cls = CLASSES[torch_class]
    model = cls.from_pretrained(path, subfolder="", output_hidden_states=True, eos_token_id=2)
    assert len(model(IDS).hidden_states) == 3
    assert model.config.eos_token_id == model.module.eos_token_id == 2
    config = CLIPTextConfig(**CONFIG)
    assert cls.from_pretrained(path, config=config).config is config
    assert cls.from_pretrained(path, config=str(path)).module == cls.from_pretrained(path).module
    other = cls.from_pretrained(path, config=config, hidden_act="gelu")
    assert (other.config.hidden_act, config.hidden_act) == ("gelu", "quick_gelu")
    assert other.module.hidden_act == "gelu"
    for wrong, message in (
        (dict(hiden_size=8), "has no setting 'hiden_size'"),
        (dict(hidden_size=32), "wrong shape: "),
        (dict(attention_dropout=0.1), "does not implement attention_dropout=0.1"),
        (dict(num_hidden_layers=3), "missing: text_model/encoder/layers/2/"),
        (dict(config=CLIPTextConfig(**CONFIG | dict(num_hidden_layers=1))), "unexpected: text"),
        (dict(hidden_act="relu"), "hidden_act=relu is not supported"),
    ):
        with pytest.raises(ValueError, match=message):
            cls.from_pretrained(path, **wrong)
    assert cls.from_pretrained(path, config=config, _do_init=False)[0].config is config


@pytest.mark.slow
def test_a_model_in_a_pipeline_needs_no_torch(model, tmp_path):
    model.save_pretrained(tmp_path)
    code = """if True:
        import sys
        from diffusers_flax.models.clip import FlaxCLIPTextModel
        model, params = FlaxCLIPTextModel.from_pretrained(sys.argv[1], _do_init=False)
        assert model([[0]], params=params)[0].any()
        assert "torch" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True, cwd=ROOT)
