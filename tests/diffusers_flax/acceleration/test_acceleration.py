"""Caches, fewer branches and token merging, against the techniques' own PyTorch packages."""

import dataclasses
import warnings

import jax
import numpy as np
import pytest
import torch
from flax.jax_utils import replicate
from helpers import psnr
from references import images_of, images_of_theirs, open_ours, open_theirs
from tiny_models import make_tiny_pipeline, make_tiny_xl, save_tiny_vae

from diffusers_flax.acceleration.plans import (
    Acceleration,
    DeepCache,
    Guidance,
    Spectrum,
    TGate,
    parse,
    plan_steps,
)
from diffusers_flax.pipelines.instruct_pix2pix import edit_branches
from diffusers_flax.pipelines.sampling import keys_per_image, normal

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import tgate
    import tgate.tgate_utils
    import tomesd
    from DeepCache import DeepCacheSDHelper

# of torch.Tensor.__array__, called by diffusers' schedulers
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
PROMPT, STEPS, SHAPE = "make it red", 12, (4, 16, 16)
SCALES = (np.full(20, 0.6), np.full(20, 0.8))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """{name: directory} of random models with two levels, and attention at the first."""
    folder = tmp_path_factory.mktemp("models")
    levels = {"unet_channels": (16, 32)}
    return {
        "sd": make_tiny_pipeline(folder / "sd", in_channels=4, **levels),
        "edits": make_tiny_pipeline(folder / "edits", **levels),
        "xl": make_tiny_xl(folder / "xl"),
        "xl edits": make_tiny_xl(folder / "xl_edits", edits=True),
    }


def assert_images_agree(found, plain, expected):
    """The accelerated image has 50 dB more PSNR to the expected one than the plain image has.

    Neighbouring parameters of a technique give at most 26 dB more with these random models.
    """
    assert psnr(found, expected) > max(85, psnr(plain, expected) + 50)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "scheduler"), [("sd", "pndm"), ("xl", "euler"), ("sd", "ddim"), ("sd", "euler")]
)
def test_deepcache_is_its_pytorch_package(models, model, scheduler):
    pipeline, params = open_ours(models[model], scheduler, accelerate="deepcache:interval=3")
    found = images_of(pipeline, params)
    plain = images_of(dataclasses.replace(pipeline, accelerate=Acceleration()), params)
    theirs = open_theirs(models[model], pipeline.scheduler)
    factor = pipeline.vae_scale_factor
    helper = enable_deepcache(theirs, 3)
    if scheduler == "pndm":  # their helper finds a repeated timestep's first place only
        steps = iter(range(100))
        forward = helper.function_dict["unet_forward"]

        def count_steps(*args, **kwargs):
            helper.cur_timestep = next(steps)
            return forward(*args, **kwargs)

        theirs.unet.forward = count_steps
    expected = images_of_theirs(theirs, factor=factor, guidance_scale=7.5)
    assert_images_agree(found, plain, expected)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["sd", pytest.param("xl", marks=pytest.mark.slow)])
def test_tgate_is_its_pytorch_package(models, model):
    pipeline, params = open_ours(
        models[model], "ddim", accelerate="tgate:gate=8,interval=4,warmup=1"
    )
    found = images_of(pipeline, params)
    plain = images_of(dataclasses.replace(pipeline, accelerate=Acceleration()), params)
    theirs = open_theirs(models[model], pipeline.scheduler)
    loader = tgate.TgateSDLoader if model == "sd" else tgate.TgateSDXLLoader
    theirs = loader(theirs, gate_step=8, sp_interval=4, fi_interval=1, warm_up=1)
    expected = images_of_theirs(
        theirs,
        factor=pipeline.vae_scale_factor,
        call=theirs.tgate,
        gate_step=8,
        sp_interval=4,
        warm_up=1,
        guidance_scale=7.5,
    )
    assert_images_agree(found, plain, expected)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["sd", pytest.param("xl", marks=pytest.mark.slow)])
def test_token_merging_is_its_pytorch_package(models, model):
    downsample = 1 if model == "sd" else 2
    spec = f"tome:ratio=0.5,random=false,max_downsample={downsample}"
    pipeline, params = open_ours(models[model], "ddim", accelerate=spec)
    found = images_of(pipeline, params, steps=3)
    plain = images_of(dataclasses.replace(pipeline, accelerate=Acceleration()), params, steps=3)
    theirs = open_theirs(models[model], pipeline.scheduler)
    tomesd.apply_patch(theirs, ratio=0.5, use_rand=False, max_downsample=downsample)
    factor = pipeline.vae_scale_factor
    expected = images_of_theirs(theirs, steps=3, factor=factor, guidance_scale=7.5)
    assert_images_agree(found, plain, expected)


@pytest.mark.slow
def test_spectrum_is_the_papers_equations(models):
    """The forecast written anew around PyTorch's UNet."""
    pipeline, params = open_ours(models["sd"], "ddim", accelerate="spectrum")
    found = images_of(pipeline, params, steps=20)
    plain = images_of(dataclasses.replace(pipeline, accelerate=Acceleration()), params, steps=20)
    theirs = open_theirs(models["sd"], pipeline.scheduler)
    kinds = "FFFF.F.F..F..F...FFF"
    alpha_bars, past, calls = theirs.scheduler.alphas_cumprod, [], iter(range(20))
    step = theirs.scheduler.step

    def forecast_or_step(eps, t, sample, **options):
        i, alpha_bar = next(calls), alpha_bars[t]
        if kinds[i] == "F":
            x_0 = (sample - (1 - alpha_bar) ** 0.5 * eps) / alpha_bar**0.5
            past.append((i, x_0))
        else:
            latest = past[-6:]
            taus = torch.tensor([2 * j / 50 - 1 for j, _ in latest], dtype=torch.float64)
            now = torch.tensor([2 * i / 50 - 1], dtype=torch.float64)
            design = torch.stack([torch.cos(m * torch.arccos(taus)) for m in range(4)], 1)
            here = torch.stack([torch.cos(m * torch.arccos(now)) for m in range(4)], 1)
            inverse = torch.linalg.inv(design.T @ design + torch.eye(4, dtype=torch.float64))
            weights = (design @ inverse @ here.T).flatten()
            fit = sum(w * h for w, (_, h) in zip(weights, latest))
            (_, before), (_, last) = latest[-2:]
            x_0 = (0.6 * (last + 0.5 * (last - before)) + 0.4 * fit).float()
            eps = (sample - alpha_bar**0.5 * x_0) / (1 - alpha_bar) ** 0.5
        return step(eps, t, sample, **options)

    theirs.scheduler.step = forecast_or_step
    expected = images_of_theirs(theirs, steps=20, guidance_scale=7.5)
    assert_images_agree(found, plain, expected)


@pytest.mark.slow
def test_first_block_cache_is_written_anew(models):
    """The decision and the residuals around PyTorch's UNet by hooks."""
    pipeline, params = open_ours(models["sd"], "ddim", accelerate="fbcache:threshold=0.3")
    found = images_of(pipeline, params)
    plain = images_of(dataclasses.replace(pipeline, accelerate=Acceleration()), params)
    theirs = open_theirs(models["sd"], pipeline.scheduler)
    unet, kept, seen = theirs.unet, {}, {}
    unet.conv_in.register_forward_hook(lambda m, a, out: seen.update(start=out))
    first = unet.down_blocks[0].attentions[0]
    first.register_forward_hook(lambda m, a, out: seen.update(first=out[0]))
    reused = []

    def replace_features(module, args):
        added = seen["first"] - seen["start"]
        if kept:
            change = (added - kept["added"]).abs().mean() / kept["added"].abs().mean()
            reused.append(bool(change <= 0.3))
            if reused[-1]:
                return (seen["first"] + kept["rest"],)
        kept.update(added=added, rest=args[0] - seen["first"])
        return args

    unet.conv_norm_out.register_forward_pre_hook(replace_features)
    expected = images_of_theirs(theirs, guidance_scale=7.5)
    assert 2 < sum(reused) < STEPS - 1
    assert_images_agree(found, plain, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    [
        "fbcache:threshold=0.3",
        "deepcache",
        "tome:max_downsample=8",
        "guidance:start=0.2,stop=0.6",
    ],
)
def test_an_image_does_not_depend_on_its_batch_or_devices(models, spec):
    pipeline, params = open_ours(models["sd"], "ddim", accelerate=spec)
    texts = ["make it red", "it", "red", "make"]
    prompt_ids = np.concatenate([pipeline.prepare_inputs(text) for text in texts])
    keys = keys_per_image(jax.random.key(1), 4)
    options = dict(num_inference_steps=STEPS, height=32, width=32)
    together = pipeline(prompt_ids, params, keys, **options).images
    alone = pipeline(prompt_ids[1:2], params, keys[1:2], **options).images
    np.testing.assert_allclose(alone, together[1:2], atol=2e-4)
    again = pipeline(prompt_ids, params, keys, **options).images
    np.testing.assert_array_equal(together, again)
    replicated = replicate(params, jax.devices()[:2])
    split = (prompt_ids.reshape(2, 2, -1), replicated, keys.reshape(2, 2))
    on_two = pipeline(*split, **options, jit=True).images
    np.testing.assert_allclose(on_two.reshape(together.shape), together, atol=2e-4)


def scales_per_step(theirs, scales):
    """A callback that sets PyTorch's guidance scales for the step after each one."""

    def callback(pipe, i, t, kwargs):
        for name, values in scales.items():
            setattr(pipe, f"_{name}", values[min(i + 1, len(values) - 1)])
        return {}

    return {"callback_on_step_end": callback, **{name: x[0] for name, x in scales.items()}}


OFF = 1 + 1e-9  # of guidance: above 1, so that PyTorch computes all branches


@pytest.mark.slow
def test_guidance_in_an_interval(models):
    pipeline, params = open_ours(models["xl"], "euler", accelerate="guidance:start=0.25,stop=0.75")
    found = images_of(pipeline, params)
    plain = images_of(dataclasses.replace(pipeline, accelerate=Acceleration()), params)
    theirs = open_theirs(models["xl"], pipeline.scheduler)
    callback = scales_per_step(theirs, {"guidance_scale": [OFF] * 3 + [7.5] * 6 + [OFF] * 3})
    expected = images_of_theirs(theirs, factor=pipeline.vae_scale_factor, **callback)
    assert_images_agree(found, plain, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "scales", "numbers"),
    [
        ("edits", (7.5, 1.0), [2] * 8 + [1] * 4),
        ("xl edits", (7.5, 1.5), [3] * 4 + [2] * 4 + [1] * 4),
    ],
)
def test_edits_go_from_three_branches_to_two_to_one(models, model, scales, numbers):
    """Image guidance ends at step 4, text guidance at step 8."""
    spec = "guidance:image_stop=0.3,stop=0.6" if numbers[0] == 3 else "guidance:stop=0.6"
    pipeline, params = open_ours(models[model], "euler", accelerate=spec)
    plan = plan_steps(pipeline.accelerate, edit_branches(*scales), np.ones((2, STEPS)))
    assert [len(step.branches) for step in plan] == numbers
    image = np.random.default_rng(0).uniform(size=(64, 64, 3)).astype(np.float32)
    key, options = jax.random.key(3), dict(num_inference_steps=STEPS)
    options |= dict(guidance_scale=scales[0], image_guidance_scale=scales[1])
    inputs = *pipeline.prepare_inputs(PROMPT, image), params, key
    found = pipeline(*inputs, **options).images
    plain = dataclasses.replace(pipeline, accelerate=Acceleration())(*inputs, **options).images
    theirs = open_theirs(models[model], pipeline.scheduler)
    calls = iter(range(STEPS))

    def drop_branches(module, args, kwargs, output):
        """Guidance ends where the branches that it compares predict the same."""
        i, (text, image, null) = next(calls), output[0].chunk(3)
        if numbers[i] == 1:
            image = null = text
        elif numbers[0] == 3 > numbers[i]:
            null = image
        return (torch.cat([text, image, null]),)

    theirs.unet.register_forward_hook(drop_branches, with_kwargs=True)
    image = torch.from_numpy(image.transpose(2, 0, 1)[None])
    if model == "xl edits":
        options |= dict(height=64, width=64)
    shape = (4, *(64 // pipeline.vae_scale_factor,) * 2)
    noise = normal(keys_per_image(key, 1), 0, shape)
    options |= dict(latents=torch.from_numpy(np.array(noise)), output_type="np")
    expected = theirs(PROMPT, image=image, **options).images
    assert_images_agree(found, plain, expected)


def enable_deepcache(theirs, interval):
    """The package's cache in a PyTorch pipeline."""
    helper = DeepCacheSDHelper(pipe=theirs)
    helper.set_params(cache_interval=interval, cache_branch_id=0)
    helper.enable()
    return helper


@pytest.mark.slow
@pytest.mark.parametrize("model", ["edits", pytest.param("xl edits", marks=pytest.mark.slow)])
def test_deepcache_of_edits_is_its_pytorch_package(models, model):
    """Three branches of guidance share a cache, each its rows."""
    pipeline, params = open_ours(models[model], "ddim", accelerate="deepcache:interval=3")
    image = np.random.default_rng(0).uniform(size=(64, 64, 3)).astype(np.float32)
    key, options = jax.random.key(3), dict(num_inference_steps=STEPS)
    inputs = *pipeline.prepare_inputs(PROMPT, image), params, key
    plain = dataclasses.replace(pipeline, accelerate=Acceleration())
    images = [p(*inputs, **options).images for p in (pipeline, plain)]
    theirs = open_theirs(models[model], pipeline.scheduler)
    enable_deepcache(theirs, 3)
    if model == "xl edits":
        options |= dict(height=64, width=64)
    shape = (4, *(64 // pipeline.vae_scale_factor,) * 2)
    noise = normal(keys_per_image(key, 1), 0, shape)
    options |= dict(latents=torch.from_numpy(np.array(noise)), output_type="np")
    options |= dict(guidance_scale=7.5, image_guidance_scale=1.5)
    image = torch.from_numpy(image.transpose(2, 0, 1)[None])
    assert_images_agree(*images, theirs(PROMPT, image=image, **options).images)


def test_plans():
    """Whole steps of DeepCache and Spectrum, and the kinds of T-GATE."""
    initials = lambda technique, n: "".join(x[0] for x in technique.kinds(n, [0]))  # noqa: E731
    letters = {"full": "F", "forecast": "."}
    assert "".join(letters[x] for x in Spectrum().kinds(20, [0])) == "FFFF.F.F..F..F...FFF"
    assert [Spectrum().kinds(n, [0]).count("full") for n in (20, 30, 50)] == [11, 14, 19]
    assert initials(DeepCache(interval=3), 9) == "fssfssfss"
    assert initials(DeepCache(interval=3, warmup=4), 9) == "ffffssfss"
    # A change of the branches needs a whole step.
    sigmas = np.stack([np.ones(12), np.ones(12)])
    plan = plan_steps(parse("deepcache guidance:stop=0.4"), ("text", "null"), sigmas)
    assert "".join(step.kind[0] for step in plan) == "fssfsfssfssf"
    assert TGate(gate=6, interval=3).kinds(8, [0]) == [
        *("full", "full", "store", "store", "reuse_self", "gate", "gated", "gated")
    ]
    interval = Guidance(sigma_min=0.5, sigma_max=2.0)
    sigmas = np.stack([np.ones(4), [3.0, 2.0, 1.0, 0.5]])
    plan = plan_steps(Acceleration(interval), ("text", "null"), sigmas)
    assert [len(step.branches) for step in plan] == [1, 2, 2, 1]


@pytest.mark.variants
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("turbo", "'turbo' is unknown; known: guidance, deepcache, "),
        ("deepcache:speed=2", "'speed=2' is no parameter of deepcache with a value; it has"),
        ("deepcache:interval=many", "'interval=many' is no parameter of deepcache with a value"),
        ("deepcache:interval=1", "interval=1 must be at least 2"),
        ("deepcache spectrum", "deepcache and spectrum do not go together; take one of them"),
        ("tgate guidance:stop=0.5", "tgate excludes guidance"),
        ("int8:mode=fp4", "mode=fp4 must be one of fast, dynamic, weight"),
    ],
)
def test_bad_specs(spec, message):
    with pytest.raises(ValueError, match=message) as error:
        parse(spec)
    assert "\n" not in str(error.value)


def test_a_changed_acceleration_needs_its_decoder(models, tmp_path, monkeypatch):
    save_tiny_vae(tmp_path / "a", (8, 8, 8))
    monkeypatch.setenv("HOME", str(tmp_path))
    tiny, _ = open_ours(models["sd"], accelerate="taesd:path=~/a")
    assert dataclasses.replace(tiny, accelerate="deepcache").tiny_vae is tiny.tiny_vae
    with pytest.raises(ValueError, match="the TAESD some/other is not loaded; give from_pre"):
        dataclasses.replace(tiny, accelerate="taesd:path=some/other")


@pytest.mark.slow
def test_images_decoded_by_taesd_are_pytorchs(models, tmp_path):
    tiny = save_tiny_vae(tmp_path / "tiny", (8, 8, 8))
    pipeline, params = open_ours(models["sd"], "ddim", accelerate=f"taesd:path={tmp_path / 'tiny'}")
    found = images_of(pipeline, params, steps=3)
    theirs = open_theirs(models["sd"], pipeline.scheduler)
    theirs.vae = tiny
    expected = images_of_theirs(theirs, steps=3, guidance_scale=7.5)
    assert psnr(found, expected) > 60
    with pytest.raises(ValueError, match="params lack tiny_vae"):
        images_of(pipeline, {name: x for name, x in params.items() if name != "tiny_vae"})
