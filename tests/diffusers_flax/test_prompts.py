"""Long and weighted prompts; against hand-made tables, other readings, and PyTorch's CLIP."""

import jax
import numpy as np
import pytest
import torch
import transformers
from helpers import photo, slow
from safetensors.numpy import save_file
from tiny_models import make_tiny_controlnet, make_tiny_pipeline, make_tiny_xl

import diffusers_flax
from diffusers_flax.images import prepare_images
from diffusers_flax.pipelines.base import FlaxDiffusionPipeline
from diffusers_flax.pipelines.running import Options
from diffusers_flax.prompts import (
    BREAK,
    parse_comfyui,
    parse_webui,
    prepare_prompts,
)

SIZE = dict(height=16, width=16, num_inference_steps=2, guidance_scale=3.0)
PROMPT = "a (red:1.4) panda, " + "it made a red (map:0.7), " * 7  # three chunks
NEGATIVE = "(it:0.5) " + "bad " * 30  # two chunks


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """{name: directory}; the states of their text encoders have a mean, as real ones have."""
    folder = tmp_path_factory.mktemp("models")
    made = {
        "sd": make_tiny_pipeline(folder / "sd", in_channels=4, vae_channels=(8, 8)),
        "xl": make_tiny_xl(folder / "xl", vae_channels=(8, 8)),
        "refiner": make_tiny_xl(folder / "refiner", refiner=True, vae_channels=(8, 8)),
    }
    encoder = transformers.CLIPTextModel.from_pretrained(made["sd"] / "text_encoder")
    for name, x in encoder.named_parameters():
        if name.endswith("final_layer_norm.bias"):
            torch.nn.init.normal_(x, mean=0.3)
    encoder.save_pretrained(made["sd"] / "text_encoder")
    return made


@pytest.fixture(scope="module")
def opened(models):
    """{name: (pipeline, params)}."""
    return {name: FlaxDiffusionPipeline.from_pretrained(path) for name, path in models.items()}


# --------------------------------------------------------------------------------- brackets

TABLE = [  # prompt, webui, comfyui
    ("a red panda", [("a red panda", 1)], [("a red panda", 1)]),
    ("a (red) panda", *[[("a ", 1), ("red", 1.1), (" panda", 1)]] * 2),
    ("(red:1.3) panda", *[[("red", 1.3), (" panda", 1)]] * 2),
    ("((red))", *[[("red", 1.21)]] * 2),
    ("((red:1.5))", [("red", 1.65)], [("red", 1.5)]),
    ("((a) red:2)", [("a", 2.2), (" red", 2)], [("a", 2.2), (" red", 2)]),
    ("[red] it", [("red", 1 / 1.1), (" it", 1)], [("[red] it", 1)]),
    ("(a)(b)", [("ab", 1.1)], [("a", 1.1), ("b", 1.1)]),
    ("(a [b) c]", [("a ", 1.1), ("b", 1), (" c", 1 / 1.1)], [("a [b", 1.1), (" c]", 1)]),
    (r"\(a\) \[b\] \\", [(r"(a) [b] " + "\\", 1)], [(r"(a) \[b\] \\", 1)]),
    (r"(a\):1.5)", *[[("a)", 1.5)]] * 2),
    ("(a (b:2)", [("a ", 1.1), ("b", 2.2)], [("a ", 2), ("(b", 2)]),
    ("(a (b:2) c", [("a ", 1.1), ("b", 2.2), (" c", 1.1)], [("(a (b:2) c", 1)]),
    ("a) (b:2)", [("a) ", 1), ("b", 2)], [("a) (b:2)", 1)]),
    ("a BREAK b", [("a ", 1), BREAK, (" b", 1)], [("a BREAK b", 1)]),
    (
        "(a BREAK b:1.2)BREAKS",
        [("a ", 1.2), BREAK, (" b", 1.2), ("BREAKS", 1)],
        [("a BREAK b", 1.2), ("BREAKS", 1)],
    ),
    ("(a:-1)", *[[("a", -1)]] * 2),
    ("(:1.3)", [], [(":1.3", 1.1)]),
    ("", [], []),
    ("BREAK", [("", 1), BREAK, ("", 1)], [("BREAK", 1)]),
]


@pytest.mark.parametrize("case", TABLE, ids=lambda case: ascii(case[0][:20]))
def test_brackets_by_hand(case):
    prompt, *expected = case
    for parse, parts in zip((parse_webui, parse_comfyui), expected):
        found = parse(prompt)
        assert [x and x[0] for x in found] == [x and x[0] for x in parts]
        weights = [[x[1] for x in both if x] for both in (found, parts)]
        np.testing.assert_allclose(*weights, rtol=1e-12)


# ----------------------------------------------------------------------------------- chunks


def chunks_of(pipeline, prompt, convention, long_prompts=True, number=0):
    """Chunks of a prompt, each a list of (token, weight) between its start and end."""
    prompts = prepare_prompts(pipeline, prompt, None, long_prompts, convention)
    _, _, tokenizer = pipeline.text_encoders[number]
    ids = prompts.prompt_ids.reshape(len(pipeline.text_encoders), -1, 77)[number]
    weights = np.ones(ids.shape, np.float32)
    if prompts.prompt_weights is not None:
        weights = prompts.prompt_weights.text.reshape(-1, *ids.shape)[number]
    chunks = []
    for row, of_row in zip(ids, weights):
        end = row.tolist().index(tokenizer.eos_token_id)
        assert row[0] == tokenizer.bos_token_id
        assert (row[end + 1 :] == tokenizer.pad_token_id).all()
        assert of_row[0] == 1 and (of_row[end:] == 1).all()
        tokens = tokenizer.convert_ids_to_tokens(row[1:end].tolist())
        chunks.append([(token, round(float(w), 3)) for token, w in zip(tokens, of_row[1:end])])
    return chunks


def test_tokens_by_hand(opened):
    """The tokenizer knows make, it, red, and parts of words."""
    pipeline, _ = opened["sd"]
    reds = [("re", 1.3), ("d", 1.3), ("s</w>", 1.3)]
    for convention in ("webui", "comfyui"):
        assert chunks_of(pipeline, "make (reds:1.3) it", convention) == [
            [("make</w>", 1), *reds, ("it</w>", 1)]
        ]
    # One text for webui where the weight is the same; apart where it changes.
    assert chunks_of(pipeline, "(ma)(ke)", "webui") == [[("make</w>", 1.1)]]
    assert [len(x) for x in chunks_of(pipeline, "(ma)(ke)", "comfyui")] == [4]  # m a k e
    assert [len(x) for x in chunks_of(pipeline, "it BREAK it", "webui")] == [1, 1]
    assert [len(x) for x in chunks_of(pipeline, "BREAK it BREAK", "webui")] == [0, 1]
    assert [len(x) for x in chunks_of(pipeline, "BREAK", "webui")] == [0]
    assert [len(x) for x in chunks_of(pipeline, "", "comfyui")] == [0]
    assert len(chunks_of(pipeline, "it BREAK it", "webui", long_prompts=False)[0]) == 2


@pytest.mark.parametrize(
    ("prompt", "webui", "comfyui"),
    [
        ("make " * 75, [75], [75]),
        ("make " * 76, [75, 1], [75, 1]),
        ("make " * 70 + "(qwertyzz:1.2)", [75, 3], [75, 3]),  # a text of 8 tokens is split
        ("make " * 70 + "(qwertyz:1.2)", [75, 2], [70, 7]),
        ("make " * 55 + ", " + "it " * 30, [56, 30], [75, 11]),  # 20 tokens with the comma
        ("make " * 54 + ", " + "it " * 30, [75, 10], [75, 10]),
        ("make " * 75 + ", " + "it " * 3, [75, 4], [75, 4]),
        ("q" * 200, [75, 75, 50], [75, 75, 50]),
    ],
    ids=lambda x: x[-12:].strip() if isinstance(x, str) else None,
)
def test_lengths_of_chunks_by_hand(opened, prompt, webui, comfyui):
    expected = {"webui": webui, "comfyui": comfyui} | ({} if "(" in prompt else {None: webui})
    for convention, lengths in expected.items():
        for name in ("sd", "xl"):
            found = chunks_of(opened[name][0], prompt, convention, number=-1)
            assert [len(chunk) for chunk in found] == lengths, convention


def test_an_embedding_is_in_one_chunk(models, tmp_path):
    vectors = np.random.default_rng(0).standard_normal((12, 24), np.float32)
    save_file({"<cat>": vectors}, tmp_path / "cat.safetensors")
    pipeline = FlaxDiffusionPipeline.from_pretrained(
        models["sd"], embeddings=f"{tmp_path / 'cat.safetensors'}:<cat>"
    )[0]
    for convention in ("webui", "comfyui", None):
        found = chunks_of(pipeline, "make " * 70 + "<cat> it", convention)
        assert [len(chunk) for chunk in found] == [70, 13]
        assert [token for token, _ in found[1]][:2] == ["<cat>", "<cat>_1"]
        found = chunks_of(pipeline, "it " + "<cat> " * 7, convention)
        assert [len(chunk) for chunk in found] == [73, 12]
    found = chunks_of(pipeline, "make (<cat>:1.5)", "webui")
    assert found == [[("make</w>", 1), *[(token, 1.5) for token, _ in found[0][1:]]]]
    assert len(found[0]) == 13


def test_without_long_prompts_one_chunk_is_cut_as_ever(opened, caplog):
    pipeline, _ = opened["sd"]
    prompt = "it, " * 50
    prompts = prepare_prompts(pipeline, prompt, "", False, "webui")
    np.testing.assert_array_equal(prompts.prompt_ids, pipeline.prepare_text_inputs(prompt))
    assert prompts.neg_prompt_ids is None and prompts.prompt_weights is None
    assert "its last 25 tokens are ignored" in caplog.text


def test_prompts_of_a_batch_are_repeated(opened):
    """To a common number of chunks, so that a prompt's image does not depend on the others."""
    pipeline, _ = opened["xl"]
    texts = ["make " * 200, "(it:1.2) " + "make " * 100]
    both = prepare_prompts(pipeline, texts, texts[1], True, "webui")
    alone = [prepare_prompts(pipeline, text, None, True, "webui") for text in texts]
    assert both.prompt_ids.shape == both.prompt_weights.text.shape == (2, 2, 6 * 77)
    assert both.neg_prompt_ids.shape == both.prompt_weights.null.shape == (1, 2, 2 * 77)
    for row, one in zip(both.prompt_ids, alone):
        k = one.prompt_ids.shape[-1] // 77
        np.testing.assert_array_equal(row, np.tile(one.prompt_ids[0], 6 // k))
    np.testing.assert_array_equal(
        both.prompt_weights.text[1], np.tile(alone[1].prompt_weights.text[0], 3)
    )


@pytest.mark.parametrize("name", ["sd", "xl", "refiner"])
def test_prompts_without_brackets_are_bit_identical(opened, name):
    pipeline, _ = opened[name]
    texts = ["a red panda, made: it", "", "it BREAKS"]
    plain = pipeline.prepare_text_inputs(texts), pipeline.prepare_text_inputs("bad")
    for convention in (None, "webui", "comfyui"):
        for long_prompts in (False, True):
            found = prepare_prompts(pipeline, texts, "bad", long_prompts, convention)
            np.testing.assert_array_equal(found.prompt_ids, plain[0])
            np.testing.assert_array_equal(found.neg_prompt_ids, plain[1])
            assert found.prompt_weights is None and found.prompt_ids.dtype == np.int32
    assert prepare_prompts(pipeline, "it", ["", ""]).neg_prompt_ids is None


# ----------------------------------------------------------------------------------- states


def encode(pipeline, params, prompts):
    """(states, pooled or None) of the branches text and null of a run."""
    inputs = dict(prompts._asdict(), latents=None)
    options = Options(height=16, width=16, branches=("text", "null"))
    inputs |= {"image": None}
    states, added = jax.jit(lambda *x: pipeline.encode_text(*x, options))(params, inputs)
    return np.asarray(states), None if added is None else np.asarray(added["text_embeds"])


def torch_states(folder, ids):
    """[states (N, 77, D) of each text encoder], pooled, of token ids (N, encoders, 77)."""
    found, pooled = [], None
    for i, name in enumerate(x for x in ("", "_2") if (folder / f"text_encoder{x}").exists()):
        path = folder / f"text_encoder{name}"
        is_xl = (folder / "text_encoder_2").exists()
        projects = name == "_2"
        kind = transformers.CLIPTextModelWithProjection if projects else transformers.CLIPTextModel
        with torch.no_grad():
            output = kind.from_pretrained(path)(
                torch.from_numpy(ids[:, i]).long(), output_hidden_states=True
            )
        states = output.hidden_states[-2] if is_xl else output.last_hidden_state
        found.append(states.double().numpy())
        pooled = output.text_embeds.numpy() if projects else None
    return found, pooled


def expected_states(folder, pipeline, ids, weights, convention):
    """NumPy's states (rows, 77 k, D), and pooled ones, by the published formulas."""
    number = len(pipeline.text_encoders)
    ids = ids.reshape(len(ids), number, -1)
    weights = np.ones(ids.shape) if weights is None else weights.reshape(ids.shape)
    empty = pipeline.prepare_text_inputs("").reshape(1, number, 77)
    empty_states, _ = torch_states(folder, empty)
    chunks, first_pooled = [], None
    for k in range(ids.shape[-1] // 77):
        part = slice(77 * k, 77 * k + 77)
        states, pooled = torch_states(folder, ids[..., part])
        first_pooled = pooled if k == 0 else first_pooled
        for i, z in enumerate(states):
            w = weights[:, i, part, None].astype(np.float64)
            if convention == "comfyui":
                states[i] = empty_states[i] + w * (z - empty_states[i])
            elif convention == "webui":
                for row in range(len(z)):
                    new = z[row] * w[row]
                    states[i][row] = new * (z[row].mean() / new.mean())
        chunks.append(np.concatenate(states, -1))
    return np.concatenate(chunks, 1), first_pooled


@pytest.mark.parametrize(
    ("name", "convention", "prompt", "negative"),
    [
        ("sd", "webui", [PROMPT, "(red:1.2) it"], NEGATIVE),
        *slow(
            ("sd", "comfyui", [PROMPT, "(red:1.2) it"], NEGATIVE),
            ("sd", None, "it " * 100, "it " * 200),
            ("xl", "webui", [PROMPT, "it (red)"], ["it", NEGATIVE]),
            ("xl", "comfyui", [PROMPT, "it (red)"], ["it", NEGATIVE]),
            ("xl", None, "it " * 160, "bad"),
            ("refiner", "webui", PROMPT, NEGATIVE),
        ),
    ],
)
def test_states_are_the_published_formulas(models, opened, name, convention, prompt, negative):
    pipeline, params = opened[name]
    prompts = prepare_prompts(pipeline, prompt, negative, True, convention)
    found, pooled = encode(pipeline, params, prompts)
    null_ids, null_weights, weights = prompts.neg_prompt_ids, None, None
    if prompts.prompt_weights is not None:
        weights, null_weights = prompts.prompt_weights.text, prompts.prompt_weights.null
    expected = expected_states(models[name], pipeline, prompts.prompt_ids, weights, convention)
    B, S = len(prompts.prompt_ids), found.shape[1]
    is_zero = null_ids is None and name != "sd"
    null_ids = pipeline.prepare_text_inputs("") if null_ids is None else null_ids
    null = expected_states(models[name], pipeline, null_ids, null_weights, convention)
    if is_zero:
        null = [np.zeros_like(x) for x in expected]
    for states, their_pooled, rows in ((*expected, slice(B)), (*null, slice(B, None))):
        states = np.tile(states, (1, S // states.shape[1], 1))
        np.testing.assert_allclose(
            found[rows], np.broadcast_to(states, (B, *states.shape[1:])), atol=1e-5, rtol=1e-5
        )
        if pooled is not None:
            their_pooled = np.broadcast_to(their_pooled, (B, their_pooled.shape[1]))
            np.testing.assert_allclose(pooled[rows], their_pooled, atol=1e-5)


# ----------------------------------------------------------------------------------- images


def image_of(pipeline, params, prompts, *images, **options):
    options = SIZE | options
    arrays = prompts._asdict()
    inputs = arrays.pop("prompt_ids"), *images
    return pipeline(*inputs, params, jax.random.key(0), **arrays, **options).images


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sd", "xl"])
def test_image_to_image_inpainting_and_control(models, opened, name, tmp_path):
    """Weights and chunks reach all tasks: another weight, another image; repeated, the same."""
    kind = f"FlaxStableDiffusion{'XL' if name == 'xl' else ''}"
    image, mask = prepare_images(photo(16, 16)), np.ones((1, 1, 16, 16), np.float32)
    mask[..., 8:] = 0
    net = make_tiny_controlnet(tmp_path / "net", models[name], halvings=1)
    cases = {
        "Img2Img": ((image,), {}),
        "Inpaint": ((image, mask) if name == "xl" else (mask, image), {}),
        "ControlNet": (((image + 1) / 2,), {"controlnet": str(net)}),
    }
    for task, (images, more) in cases.items():
        cls = getattr(diffusers_flax, f"{kind}{task}Pipeline")
        pipeline, params = cls.from_pretrained(models[name], **more)
        options = {"image": image} if (task, name) == ("Inpaint", "sd") else {}
        prompts = prepare_prompts(pipeline, PROMPT, NEGATIVE, True, "webui")
        twice = jax.tree.map(lambda x: np.concatenate([x, x], -1), prompts)
        found = image_of(pipeline, params, prompts, *images, **options)
        again = image_of(pipeline, params, twice, *images, **options)
        np.testing.assert_allclose(found, again, atol=1e-5)
        plain = image_of(
            pipeline, params, prompts._replace(prompt_weights=None), *images, **options
        )
        assert np.abs(found - plain).max() > 1e-4, task
