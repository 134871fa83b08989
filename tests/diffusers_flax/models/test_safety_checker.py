"""FlaxStableDiffusionSafetyChecker against PyTorch's, with weights that flag some images."""

import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import safetensors.torch
import torch
from diffusers import StableDiffusionPipeline
from diffusers.image_processor import VaeImageProcessor
from diffusers.pipelines.stable_diffusion.safety_checker import (
    StableDiffusionSafetyChecker,
    cosine_distance,
)
from flax.traverse_util import flatten_dict
from helpers import slow
from references import flax_params
from transformers import CLIPConfig, CLIPImageProcessorPil

from diffusers_flax.models.clip_similarities import FlaxStableDiffusionSafetyChecker

VISION = dict(
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    image_size=32,
    patch_size=8,
)
FEATURE_EXTRACTOR = CLIPImageProcessorPil(
    size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
)


@pytest.fixture(scope="module")
def images():
    """(12, 40, 48, 3) float32 in [0, 1]; coarse patterns, so that their embeddings differ."""
    rng = np.random.default_rng(0)
    return rng.random((12, 5, 6, 3), np.float32).repeat(8, 1).repeat(8, 2)


@pytest.fixture(scope="module")
def features(images):
    """(12, 3, 32, 32), as PyTorch's pipeline makes them of images."""
    pil = VaeImageProcessor.numpy_to_pil(images)
    return np.stack(FEATURE_EXTRACTOR(pil).pixel_values)


@torch.no_grad()
def torch_cosines(theirs, features):
    embeds = theirs.visual_projection(theirs.vision_model(torch.tensor(features))[1])
    return [
        cosine_distance(embeds, concepts).numpy()
        for concepts in (theirs.concept_embeds, theirs.special_care_embeds)
    ]


def torch_flags(theirs, features):
    return theirs(torch.tensor(features), [np.ones((2, 2, 3)) for _ in features])[1]


@pytest.fixture(scope="module", params=["quick_gelu", *slow("gelu")])
def theirs(request, features):
    """PyTorch's checker, random, with thresholds for which special care changes flags."""
    config = CLIPConfig(vision_config=VISION | {"hidden_act": request.param}, projection_dim=8)
    torch.manual_seed(0)
    checker = StableDiffusionSafetyChecker(config).eval()
    for name, parameter in checker.named_parameters():
        noise = torch.randn_like(parameter) * (0.4 if parameter.ndim > 1 else 0.1)
        parameter.data = noise + 1 if "norm" in name and "weight" in name else noise
    cosines, special_cosines = torch_cosines(checker, features)
    # Concept 0 flags three images. The others miss the image nearest to each by 0.005, less than
    # special care adds to the scores of half of the images.
    thresholds = cosines.max(0) + 0.005
    thresholds[0] = np.sort(cosines[:, 0])[-4:-2].mean()
    checker.concept_embeds_weights.data = torch.tensor(thresholds)
    special_thresholds = np.median(special_cosines, 0)
    special_thresholds[1:] = 2
    checker.special_care_embeds_weights.data = torch.tensor(special_thresholds)
    return checker.float()


@pytest.fixture
def ours(theirs, tmp_path):
    theirs.save_pretrained(tmp_path / "theirs")
    return FlaxStableDiffusionSafetyChecker.from_pretrained(tmp_path / "theirs", from_pt=True)


def test_cosines_and_flags_equal_pytorch(theirs, ours, features):
    expected = torch_cosines(theirs, features)
    result = ours.module.apply({"params": ours.params}, features, method="cosine_distances")
    for cosines, expected_cosines in zip(result, expected):
        np.testing.assert_allclose(cosines, expected_cosines, atol=1e-5)
    flags = ours(features)
    assert flags.shape == (12,) and flags.dtype == bool
    assert flags.tolist() == torch_flags(theirs, features)
    careless = ours.params | {"special_care_embeds_weights": np.full(3, 2, np.float32)}
    without_care = ours(features, careless)
    assert without_care.sum() == 3
    assert 3 < flags.sum() < 12 and not (without_care & ~flags).any()


@pytest.mark.parametrize("score", [0.0004, 0.0006, -0.0096, -0.0094])
def test_scores_are_rounded_to_three_decimals(theirs, ours, features, score):
    """A score of 0.0004 counts as 0; with special care so does one of -0.0096."""
    cosines, _ = torch_cosines(theirs, features[:1])
    weights, special = np.full(17, 2, np.float32), np.full(3, -2 if score < 0 else 2, np.float32)
    weights[5] = cosines[0, 5] - score
    params = ours.params | {
        "concept_embeds_weights": weights,
        "special_care_embeds_weights": special,
    }
    before = [x.data for x in (theirs.concept_embeds_weights, theirs.special_care_embeds_weights)]
    theirs.concept_embeds_weights.data = torch.tensor(weights)
    theirs.special_care_embeds_weights.data = torch.tensor(special)
    expected = torch_flags(theirs, features[:1])
    theirs.concept_embeds_weights.data, theirs.special_care_embeds_weights.data = before
    assert ours(features[:1], params).tolist() == expected
    assert expected == [score in (0.0006, -0.0094)]


def test_images_equal_those_of_pytorchs_pipeline(theirs, ours, images, caplog):
    pipeline = SimpleNamespace(
        safety_checker=theirs,
        feature_extractor=FEATURE_EXTRACTOR,
        image_processor=VaeImageProcessor(),
    )
    expected, expected_flags = StableDiffusionPipeline.run_safety_checker(
        pipeline, images.copy(), "cpu", torch.float32
    )
    given = images.copy()
    given.flags.writeable = False
    bare = FlaxStableDiffusionSafetyChecker(ours.config, _do_init=False)
    params = jax.tree.map(np.asarray, ours.params)
    result, flags = bare.filter_images(given, FEATURE_EXTRACTOR, params)
    np.testing.assert_array_equal(result, expected)
    assert result.dtype == np.float32
    assert flags == expected_flags and all(type(flag) is bool for flag in flags)
    assert f"{sum(flags)} of 12 images may not be safe for work" in caplog.text
    caplog.clear()
    harmless = given[~np.array(flags)]
    result, flags = ours.filter_images(harmless, FEATURE_EXTRACTOR)
    np.testing.assert_array_equal(result, harmless)
    assert flags == [False] * len(harmless) and not caplog.text


def test_files_of_pytorch_and_the_hub(theirs, ours, features, tmp_path):
    """Current PyTorch has the prefix vision_model once, files on the hub have it twice."""
    state = theirs.state_dict()
    assert "vision_model.post_layernorm.bias" in state
    folder = tmp_path / "theirs"
    twice = {
        f"vision_model.{name}" if name.startswith("vision_model.") else name: tensor
        for name, tensor in state.items()
    }
    twice["vision_model.vision_model.embeddings.position_ids"] = torch.arange(17)[None]
    safetensors.torch.save_file(twice, folder / "model.safetensors", metadata={"format": "pt"})
    reopened, params = FlaxStableDiffusionSafetyChecker.from_pretrained(folder, _do_init=False)
    jax.tree.map(np.testing.assert_array_equal, params, ours.params)

    ours.save_pretrained(tmp_path / "written")
    config = json.loads((tmp_path / "written" / "config.json").read_text())
    assert config["architectures"] == ["StableDiffusionSafetyChecker"]
    theirs_again, report = StableDiffusionSafetyChecker.from_pretrained(
        tmp_path / "written", output_loading_info=True
    )
    assert not any(report.values()), report
    for name, tensor in theirs_again.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    configs = [model.config.vision_config.to_dict() for model in (theirs_again, theirs)]
    assert configs[0] == configs[1] | {"dtype": "float32"}

    msgpack = tmp_path / "msgpack"
    reopened.save_pretrained(msgpack, params, flax_msgpack=True)
    (msgpack / "model.safetensors").unlink()
    flags = FlaxStableDiffusionSafetyChecker.from_pretrained(msgpack)(features)
    assert flags.tolist() == torch_flags(theirs, features)


def test_published_tree_and_config():
    """The hub's config.json has vision_config_dict and unknown keys."""
    vision = dict(hidden_size=1024, intermediate_size=4096, num_attention_heads=16)
    vision |= dict(num_hidden_layers=1, patch_size=14)
    config = dict(
        architectures=["StableDiffusionSafetyChecker"],
        projection_dim=768,
        text_config={"hidden_size": 768, "num_attention_heads": 12},
        text_config_dict={"hidden_size": 768, "num_attention_heads": 12},
        vision_config={"dropout": 0.0, "finetuning_task": None},
        vision_config_dict=vision,
    )
    checker = FlaxStableDiffusionSafetyChecker(config, _do_init=False)
    theirs = CLIPConfig(**config)
    assert checker.module == FlaxStableDiffusionSafetyChecker(theirs, _do_init=False).module
    assert checker.input_shape == (1, 224, 224, 3) and checker.main_input_name == "clip_input"
    shapes = flatten_dict(jax.tree.map(lambda x: x.shape, checker.params_shape_tree), sep="/")
    torch_params = flax_params(StableDiffusionSafetyChecker(theirs), type(checker.module))
    wanted = flatten_dict(torch_params, sep="/")
    assert shapes == {name: x.shape for name, x in wanted.items()}
    assert shapes["vision_model/vision_model/pre_layrnorm/scale"] == (1024,)
    assert shapes["vision_model/vision_model/embeddings/class_embedding"] == (1024,)
    assert shapes["visual_projection/kernel"] == (1024, 768)
