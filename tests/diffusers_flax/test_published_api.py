"""The classes have the members and signatures of diffusers 0.39 and transformers 4.57."""

import functools
import inspect
import json
import re

import jax.numpy as jnp
import pytest
from helpers import ROOT
from tiny_models import make_tiny_pipeline, make_tiny_safety_checker
from transformers import CLIPConfig, CLIPTextConfig, CLIPVisionConfig

import diffusers_flax

CLASSES = json.loads((ROOT / "tests" / "published_flax_api.json").read_text())["classes"]
MIXINS = ("PushToHubMixin", "ConfigMixin", "BaseOutput", "ModelOutput", "FlaxGenerationMixin")
NAMES = [name for name in CLASSES if name not in MIXINS]  # a mixin is checked in its subclasses

# Deliberate differences, {"Class.member" or "Class.method(parameter)": reason}, of a class and its
# subclasses; "(parameter=)" is another default.
PAGE = (ROOT / "docs" / "from-diffusers.md").read_text(encoding="utf-8").partition("## Gaps")[2]
GAPS = dict(re.findall(r"^\| `(.+)` \| (.+) \|$", PAGE, re.MULTILINE))

VARIADIC = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
TOWER = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "vocab_size": 4,
    "projection_dim": 4,
    "image_size": 8,
    "patch_size": 8,
}


@functools.cache
def ours():
    """{name: class} of the published classes."""
    return {name: getattr(diffusers_flax, name) for name in diffusers_flax.__all__}


def make(name):
    """An instance of a published class, or None of a base class."""
    cls = ours()[name]
    if name.endswith("Output"):
        return cls(*[jnp.zeros(1) for _ in parameters(CLASSES[name]["methods"]["__init__"])])
    if name == "CommonSchedulerState":
        return ours()["FlaxDDPMScheduler"]().create_state().common
    if name.endswith("SchedulerState"):
        return ours()[f"Flax{name.removesuffix('State')}"]().create_state()
    if name == "FlaxDiagonalGaussianDistribution":
        return cls(jnp.zeros((1, 1, 1, 2)))
    if name.startswith("FlaxCLIPTextModel"):
        return cls(CLIPTextConfig(**TOWER))
    if name == "FlaxCLIPVisionModel":
        return cls(CLIPVisionConfig(**TOWER))
    if name in ("FlaxCLIPModel", "FlaxStableDiffusionSafetyChecker"):
        return cls(CLIPConfig(text_config=TOWER, vision_config=TOWER, projection_dim=4))
    if "Diffusion" in name and name.endswith("Pipeline") and name != "FlaxDiffusionPipeline":
        text = make("FlaxCLIPTextModel")
        components = {"vae": make("FlaxAutoencoderKL"), "unet": make("FlaxUNet2DConditionModel")}
        components |= {
            "tokenizer": None,
            "text_encoder": text,
            "scheduler": make("FlaxDDIMScheduler"),
        }
        if "ControlNet" in name:
            components["controlnet"] = make("FlaxControlNetModel")
        if "XL" in name:
            return cls(**components, text_encoder_2=text, tokenizer_2=None)
        return cls(**components, safety_checker=None, feature_extractor=None)
    return None if "Mixin" in name or "PreTrained" in name or "Pipeline" in name else cls()


def members(name):
    """{member: signature, or None for an attribute} of a published class and its bases."""
    found = {}
    for base in CLASSES[name].get("bases", []):
        found |= members(base)
    found |= dict.fromkeys(CLASSES[name].get("attributes", []))
    return found | CLASSES[name].get("methods", {})


def lineage(name):
    """Names of a published class and its bases."""
    bases = CLASSES[name].get("bases", [])
    return {name}.union(*map(lineage, bases))


def gaps_of(name, what):
    """The keys in GAPS of what differs in a published class: "member" or "method(parameter)"."""
    texts = {what, what.partition("(")[0]}
    return {f"{cls}.{text}" for cls in lineage(name) for text in texts} & GAPS.keys()


def parameters(signature):
    """inspect.Parameters of a signature as text; a default that is no literal becomes ...

    Variadic ones are left out: what they take has no name.
    """
    scope = {}
    exec(f"def function{signature}: pass", scope)
    found = inspect.signature(scope["function"]).parameters.values()
    return [parameter for parameter in found if parameter.kind not in VARIADIC]


def differences(name):
    """Yield ("member" or "method(parameter)", difference) of a published class and ours."""
    cls, instance = ours()[name], make(name)
    for member, signature in members(name).items():
        if signature is None:
            if instance is not None and not hasattr(instance, member):
                yield member, "missing"
        elif not callable(getattr(cls, member, None)):
            yield member, "missing"
        else:
            function = cls if member == "__init__" else getattr(cls, member)
            bound = inspect.getattr_static(cls, member)
            has_self = function is not cls and not isinstance(bound, (classmethod, staticmethod))
            got = list(inspect.signature(function).parameters.values())[has_self:]
            yield from signature_differences(member, signature, got)


def signature_differences(method, signature, got):
    """Yield ("method(parameter)", difference) of a published signature and our parameters."""
    takes_any = {parameter.kind for parameter in got} & VARIADIC
    if takes_any == VARIADIC:  # then test_states_are_created calls it
        return
    got = [parameter for parameter in got if parameter.kind not in VARIADIC]
    by_name = {parameter.name: parameter for parameter in got}
    wanted = parameters(signature)
    for i, parameter in enumerate(wanted):
        at = f"{method}({parameter.name})"
        by_keyword = parameter.kind is inspect.Parameter.KEYWORD_ONLY
        if parameter.name not in by_name:
            if not (by_keyword and takes_any):  # then test_keywords calls it
                yield at, "missing"
            continue
        mine = by_name[parameter.name]
        if not by_keyword and (mine.kind is parameter.KEYWORD_ONLY or got.index(mine) != i):
            yield at, f"is not number {i}, positional"
        if parameter.default is not inspect.Parameter.empty:
            if mine.default is inspect.Parameter.empty:
                yield at, "has no default"
            elif parameter.default is not ... and plain(mine.default) != plain(parameter.default):
                yield (
                    f"{method}({parameter.name}=)",
                    f"{mine.default!r} is not {parameter.default!r}",
                )
    for mine in got:
        if mine.default is inspect.Parameter.empty and mine.name not in {p.name for p in wanted}:
            yield f"{method}({mine.name})", "is not published and has no default"


def plain(value):
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize("name", NAMES)
def test_members_and_signatures(name):
    found = [f"{what}: {text}" for what, text in differences(name) if not gaps_of(name, what)]
    assert not found, "\n".join(found)


def test_gaps_are_still_there():
    found = [gaps_of(name, what) for name in NAMES for what, _ in differences(name)]
    filled = sorted(GAPS.keys() - set().union(*found))
    assert not filled


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A pipeline with a safety checker."""
    folder = make_tiny_pipeline(tmp_path_factory.mktemp("sd") / "model", in_channels=4)
    make_tiny_safety_checker(folder / "safety_checker")
    return folder


@pytest.mark.parametrize(
    ("name", "subfolder"),
    [
        ("FlaxUNet2DConditionModel", "unet"),
        ("FlaxAutoencoderKL", "vae"),
        ("FlaxCLIPTextModel", "text_encoder"),
        ("FlaxStableDiffusionSafetyChecker", "safety_checker"),
        ("FlaxDDIMScheduler", "scheduler"),
        ("FlaxStableDiffusionPipeline", None),
        ("FlaxStableDiffusionImg2ImgPipeline", None),
    ],
)
def test_keywords(folder, name, subfolder):
    """from_pretrained takes every published keyword, given as its default."""
    signature = members(name)["from_pretrained"]
    keywords = {p.name: p.default for p in parameters(signature) if p.kind is p.KEYWORD_ONLY}
    if subfolder:
        keywords["subfolder"] = subfolder
    assert ours()[name].from_pretrained(folder, **keywords)


@pytest.mark.parametrize("name", [n for n in NAMES if n.endswith("State") and n[0] != "C"])
def test_states_are_created(name):
    state = make(name)
    wanted = {p.name: getattr(state, p.name) for p in parameters(members(name)["create"])}
    for created in (type(state).create(*wanted.values()), type(state).create(**wanted)):
        assert all(getattr(created, field) is value for field, value in wanted.items())
