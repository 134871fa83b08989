"""The schedulers against PyTorch diffusers' over full trajectories, and against closed forms."""

import json

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import trajectories
from helpers import slow
from trajectories import (
    BASE,
    NOISE,
    SHAPE,
    STABLE_DIFFUSION,
    START,
    assert_same_trajectory,
    flax_trajectory,
    model,
    torch_class,
    torch_trajectory,
)

from diffusers_flax.schedulers.ddim import FlaxDDIMScheduler
from diffusers_flax.schedulers.ddpm import FlaxDDPMScheduler
from diffusers_flax.schedulers.dpmsolver import FlaxDPMSolverMultistepScheduler
from diffusers_flax.schedulers.euler import (
    FlaxEulerAncestralDiscreteScheduler,
    FlaxEulerDiscreteScheduler,
)
from diffusers_flax.schedulers.factory import (
    REPLACEABLE,
    SCHEDULERS,
    make_scheduler,
    scheduler_from_config,
    scheduler_from_pretrained,
    training_scheduler,
)
from diffusers_flax.schedulers.lms import FlaxLMSDiscreteScheduler
from diffusers_flax.schedulers.pndm import FlaxPNDMScheduler

diffusers.utils.logging.set_verbosity_error()
# PyTorch's schedulers turn tensors into NumPy arrays in a way that NumPy 2 warns of.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


PREDICTIONS = ("epsilon", "v_prediction")
SPACINGS = ("leading", "linspace", "trailing")


@pytest.mark.parametrize("num_steps", [20, *slow(1, 2, 5, 50)])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_whole_trajectories_match_pytorch(name, num_steps, monkeypatch):
    for prediction_type in PREDICTIONS:
        for spacing in SPACINGS:
            config = STABLE_DIFFUSION | BASE[name]
            config |= {"prediction_type": prediction_type, "timestep_spacing": spacing}
            config["steps_offset"] = 1 if spacing == "leading" else 0
            assert_same_trajectory(
                flax_trajectory(name, config, num_steps),
                torch_trajectory(name, config, num_steps, monkeypatch),
                f"{prediction_type} {spacing}",
            )


@pytest.mark.parametrize("name", [name for name in SCHEDULERS if name not in ("pndm", "lms")])
def test_beginning_in_the_middle_matches_pytorch(name, monkeypatch):
    """As in image-to-image; multistep methods start without history."""
    for num_steps, first_step in ((5, 4), (12, 5), (30, 7)):
        config = STABLE_DIFFUSION | BASE[name] | {"steps_offset": 1}
        assert_same_trajectory(
            flax_trajectory(name, config, num_steps, first_step=first_step),
            torch_trajectory(name, config, num_steps, monkeypatch, first_step=first_step),
            f"{num_steps} from {first_step}",
        )


def test_lms_begins_anew_in_the_middle(monkeypatch):
    """PyTorch gives missing slopes a weight; with a constant slope the path must be Euler's."""
    config = STABLE_DIFFUSION | {"steps_offset": 1}
    monkeypatch.setattr(trajectories, "model", lambda x, t: np.full_like(x, 0.3))
    assert_same_trajectory(
        flax_trajectory("lms", config, 12, first_step=5),
        flax_trajectory("euler", config, 12, first_step=5),
        "from 5",
    )


OPTIONS = [
    ("ddpm", {"clip_sample": True}),
    ("ddpm", {"clip_sample": True, "clip_sample_range": 0.5, "beta_schedule": "squaredcos_cap_v2"}),
    ("ddpm", {"variance_type": "fixed_large"}),
    ("ddpm", {"variance_type": "fixed_large", "steps_offset": 1}),
    ("ddpm", {"variance_type": "fixed_small_log"}),
    ("ddpm", {"prediction_type": "sample"}),
    ("ddpm", {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True}),
    ("ddim", {"clip_sample": True}),
    ("ddim", {"set_alpha_to_one": False}),
    ("ddim", {"prediction_type": "sample"}),
    ("ddim", {"beta_schedule": "squaredcos_cap_v2", "timestep_spacing": "linspace"}),
    ("ddim", {"trained_betas": np.linspace(0.001, 0.03, 1000).tolist()}),
    (
        "ddim",
        {
            "prediction_type": "v_prediction",
            "rescale_betas_zero_snr": True,
            "timestep_spacing": "trailing",
        },
    ),
    ("pndm", {"set_alpha_to_one": True}),
    ("pndm", {"skip_prk_steps": False}),
    ("pndm", {"skip_prk_steps": False, "prediction_type": "v_prediction"}),
    ("pndm", {"beta_schedule": "linear", "beta_end": 0.02, "timestep_spacing": "trailing"}),
    ("euler", {"use_karras_sigmas": True}),
    ("euler", {"use_karras_sigmas": True, "sigma_min": 0.1, "sigma_max": 10.0}),
    ("euler", {"final_sigmas_type": "sigma_min", "timestep_spacing": "trailing"}),
    ("euler", {"prediction_type": "sample"}),
    ("euler", {"beta_schedule": "linear", "beta_end": 0.02}),
    ("euler_ancestral", {"beta_schedule": "linear", "beta_end": 0.02}),
    ("lms", {"use_karras_sigmas": True}),
    ("lms", {"prediction_type": "sample"}),
    ("lms", {"beta_schedule": "linear", "beta_end": 0.02}),
    ("lms", {"beta_schedule": "squaredcos_cap_v2", "timestep_spacing": "trailing"}),
    ("lcm", {"original_inference_steps": 30, "timestep_scaling": 3.0}),
    ("lcm", {"prediction_type": "sample", "clip_sample": True}),
    ("tcd", {"prediction_type": "sample"}),
    # Neither has an effect in diffusers.
    ("tcd", {"clip_sample": True, "clip_sample_range": 0.5, "thresholding": True}),
    ("tcd", {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True}),
    ("dpmsolver++", {"solver_order": 1}),
    ("dpmsolver++", {"solver_order": 3}),
    ("dpmsolver++", {"solver_order": 3, "lower_order_final": False, "euler_at_final": True}),
    ("dpmsolver++", {"lower_order_final": False, "final_sigmas_type": "sigma_min"}),
    ("dpmsolver++", {"solver_type": "heun"}),
    ("dpmsolver++", {"prediction_type": "sample"}),
    ("dpmsolver++", {"use_karras_sigmas": True}),
    ("dpmsolver++", {"use_karras_sigmas": True, "final_sigmas_type": "sigma_min"}),
    ("dpmsolver++", {"use_karras_sigmas": True, "sigma_min": 0.1, "sigma_max": 8.0}),
    ("dpmsolver++", {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True}),
]


@pytest.mark.parametrize("num_steps", [7, *slow(4, 20)])
@pytest.mark.parametrize("name, options", OPTIONS, ids=lambda value: str(value)[:60])
def test_options_match_pytorch(name, options, num_steps, monkeypatch):
    config = STABLE_DIFFUSION | BASE[name] | options
    found = flax_trajectory(name, config, num_steps)
    assert_same_trajectory(found, torch_trajectory(name, config, num_steps, monkeypatch), "")


@pytest.mark.parametrize("name", ["ddim", "tcd"])
@pytest.mark.parametrize("eta", [0.3, 1.0])
def test_noise_of_eta_matches_pytorch(eta, name, monkeypatch):
    for prediction_type in PREDICTIONS:
        config = STABLE_DIFFUSION | {"prediction_type": prediction_type, "steps_offset": 1}
        for num_steps in (2, 20):
            assert_same_trajectory(
                flax_trajectory(name, config, num_steps, eta),
                torch_trajectory(name, config, num_steps, monkeypatch, eta),
                f"{prediction_type} {num_steps}",
            )


@pytest.mark.variants
@pytest.mark.parametrize("name", ["euler", "euler_ancestral"])
@pytest.mark.parametrize(
    "options",
    [{"beta_schedule": "squaredcos_cap_v2"}, {"rescale_betas_zero_snr": True}],
    ids=["cosine", "zero_snr"],
)
def test_euler_from_huge_sigmas_matches_float64(name, options):
    # These runs start at sigma = 4096 and more, where PyTorch's own float32 steps, which go
    # through x_t - sigma eps, are off by up to 1e-3: its noise levels, stepped in float64.
    config = STABLE_DIFFUSION | options | {"prediction_type": "v_prediction"}
    for spacing in SPACINGS:
        for num_steps in (1, 2, 5, 20):
            config |= {"timestep_spacing": spacing}
            reference = torch_class(name)(**config)
            reference.set_timesteps(num_steps)
            sigmas = reference.sigmas.double().numpy()
            x, samples = START * float(reference.init_noise_sigma), []
            for i, t in enumerate(reference.timesteps.tolist()):
                here, there = sigmas[i], sigmas[i + 1]
                x_vp = x / np.sqrt(here**2 + 1)
                v = np.float32(model(np.float32(x_vp), t)).astype(np.float64)
                x_0 = (x_vp - here * v) / np.sqrt(here**2 + 1)
                up = there * np.sqrt(1 - there**2 / here**2) if name == "euler_ancestral" else 0
                down = np.sqrt(there**2 - up**2)
                x = x_0 + (x - x_0) / here * down + up * NOISE[i]
                samples.append(x)
            expected = reference.timesteps.numpy(), np.array(samples)
            actual = flax_trajectory(name, config, num_steps)
            assert_same_trajectory(actual, expected, f"{spacing} {num_steps}")


@pytest.mark.parametrize("name", ["ddpm", "euler", "dpmsolver++", "lcm", "tcd"])
def test_chosen_timesteps_match_pytorch(name, monkeypatch):
    config = STABLE_DIFFUSION | BASE[name]
    for timesteps in ([999, 749, 499, 249], [999], [950, 400, 380, 7, 0]):
        assert_same_trajectory(
            flax_trajectory(name, config, len(timesteps), timesteps=timesteps),
            torch_trajectory(name, config, None, monkeypatch, timesteps=timesteps),
            str(timesteps),
        )


@pytest.mark.parametrize("name", SCHEDULERS)
def test_samples_and_states_keep_their_dtypes(name):
    scheduler = SCHEDULERS[name](dtype=jnp.bfloat16, **STABLE_DIFFUSION, **BASE[name])
    state = scheduler.set_timesteps(scheduler.create_state(), 4, SHAPE)
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(state)}
    assert dtypes <= {jnp.dtype("float32"), jnp.dtype("int32"), jnp.dtype("bool")}

    x, out, noise = jnp.asarray(START, jnp.bfloat16), jnp.asarray(NOISE[0]), jnp.asarray(NOISE[1])
    assert scheduler.scale_model_input(state, x, 0).dtype == jnp.bfloat16
    half = scheduler.step(state, out.astype(jnp.bfloat16), 0, x, noise=noise)
    full = scheduler.step(
        state, out.astype(jnp.bfloat16).astype(jnp.float32), 0, x.astype(jnp.float32), noise=noise
    )
    # The arithmetic is float32's; only the result is rounded.
    np.testing.assert_array_equal(half.prev_sample, full.prev_sample.astype(jnp.bfloat16))
    assert half.prev_sample.dtype == jnp.bfloat16
    assert jax.tree.structure(half.state) == jax.tree.structure(state)
    for before, after in zip(jax.tree.leaves(state), jax.tree.leaves(half.state)):
        assert (before.shape, before.dtype) == (after.shape, after.dtype)

    noisy = scheduler.add_noise(state, x, x, jnp.asarray(state.timesteps[:2]))
    velocity = scheduler.get_velocity(state, x, x, jnp.asarray(state.timesteps[:2]))
    assert noisy.dtype == velocity.dtype == jnp.bfloat16


@pytest.mark.parametrize("name", SCHEDULERS)
def test_add_noise_and_velocity_match_pytorch(name):
    config = STABLE_DIFFUSION | {"steps_offset": 1}
    scheduler, training_state = make_scheduler(name, config)
    reference = torch_class(name)(**config)
    alphas_cumprod = reference.alphas_cumprod.double().numpy()
    if name == "dpmsolver++":  # PyTorch's looks its levels up in reverse until set_timesteps
        reference = diffusers.DDPMScheduler(**config)
    x, noise = torch.from_numpy(START), torch.from_numpy(NOISE[0])
    run_state = scheduler.set_timesteps(training_state, 10, SHAPE)
    for state, timesteps in ((training_state, [3, 700]), (run_state, run_state.timesteps[2:4])):
        if state is run_state:
            reference = torch_class(name)(**config)
            reference.set_timesteps(10)
        timesteps = np.array(timesteps)
        actual = scheduler.add_noise(state, jnp.asarray(START), jnp.asarray(NOISE[0]), timesteps)
        expected = reference.add_noise(x, noise, torch.from_numpy(timesteps)).numpy()
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)

        # At fractional timesteps (Euler, linspace) sigma, not alpha_bar, is interpolated.
        sigma = np.sqrt(1 / alphas_cumprod - 1)
        sigma = np.interp(timesteps, np.arange(1000), sigma).reshape(2, 1, 1, 1)
        expected = (NOISE[0] - sigma * START) / np.sqrt(sigma**2 + 1)
        actual = scheduler.get_velocity(state, jnp.asarray(START), jnp.asarray(NOISE[0]), timesteps)
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
        if name in ("ddpm", "ddim"):
            expected = reference.get_velocity(x, noise, torch.from_numpy(timesteps)).numpy()
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["ddpm", "ddim", "euler_ancestral"])
def test_noise_comes_from_the_key(name):
    scheduler, state = make_scheduler(name, STABLE_DIFFUSION)
    state = scheduler.set_timesteps(state, 3)
    x, out = jnp.asarray(START), jnp.asarray(NOISE[0])
    options = {"eta": 0.5} if name == "ddim" else {}
    key = jax.random.key(7)
    t = state.timesteps[0]
    drawn = scheduler.step(state, out, t, x, key=key, **options).prev_sample
    noise = jax.random.normal(jax.random.split(key, 1)[0], SHAPE)
    given = scheduler.step(state, out, t, x, noise=noise, **options).prev_sample
    other = scheduler.step(state, out, t, x, key=jax.random.key(8), **options).prev_sample
    np.testing.assert_array_equal(drawn, given)
    assert np.abs(drawn - other).max() > 0.01
    with pytest.raises(ValueError, match="key=None"):
        scheduler.step(state, out, t, x, **options)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_files_go_through_pytorch_and_back(name, tmp_path):
    options = {"beta_end": 0.013, "timestep_spacing": "trailing", "steps_offset": 1}
    options |= {"trained_betas": [0.001, 0.002, 0.003], "num_train_timesteps": 3}
    scheduler = SCHEDULERS[name].from_config({}, **options)
    scheduler.save_pretrained(tmp_path / "ours" / "scheduler")
    theirs = torch_class(name).from_pretrained(tmp_path / "ours", subfolder="scheduler")
    for option in scheduler.defaults:
        value = scheduler.config[option]
        assert theirs.config[option] == (list(value) if isinstance(value, tuple) else value), option

    theirs.save_pretrained(tmp_path / "theirs")
    assert json.loads((tmp_path / "theirs/scheduler_config.json").read_text())["_class_name"]
    back, state = scheduler_from_pretrained(tmp_path / "theirs", subfolder=None)
    assert type(back) is SCHEDULERS[name]
    assert {k: back.config[k] for k in scheduler.defaults} == {
        k: scheduler.config[k] for k in scheduler.defaults
    }
    np.testing.assert_allclose(state.common.betas, [0.001, 0.002, 0.003], rtol=1e-6)
    again, _ = SCHEDULERS[name].from_pretrained(tmp_path / "theirs", prediction_type="v_prediction")
    assert again.config.prediction_type == "v_prediction"


def test_configs_of_other_schedulers_are_read_as_in_diffusers(tmp_path):
    # Stable Diffusion 1.5's file: written before timestep_spacing, which Euler defaults otherwise.
    published = {
        "_class_name": "PNDMScheduler",
        "_diffusers_version": "0.6.0",
        "beta_end": 0.012,
        "beta_schedule": "scaled_linear",
        "beta_start": 0.00085,
        "clip_sample": False,
        "num_train_timesteps": 1000,
        "set_alpha_to_one": False,
        "skip_prk_steps": True,
        "steps_offset": 1,
        "trained_betas": None,
    }
    # Euler's options; DPM-Solver uses the ones that its own constructor lacks.
    published |= {"use_karras_sigmas": True, "sigma_min": 0.1, "sigma_max": 8.0}
    (tmp_path / "scheduler_config.json").write_text(json.dumps(published))
    for first in SCHEDULERS:
        ours_first, _ = SCHEDULERS[first].from_pretrained(tmp_path)
        theirs_first = torch_class(first).from_pretrained(tmp_path)
        for second, cls in SCHEDULERS.items():
            ours = cls.from_config(ours_first.config)
            theirs = torch_class(second).from_config(theirs_first.config)
            for option in cls.defaults:
                assert ours.config[option] == theirs.config.get(option), (first, second, option)
    assert scheduler_from_pretrained(tmp_path, subfolder=None)[0].config.skip_prk_steps is True
    published["_class_name"] = "FlaxDDIMScheduler"
    (tmp_path / "scheduler_config.json").write_text(json.dumps(published))
    assert type(scheduler_from_pretrained(tmp_path, None)[0]) is FlaxDDIMScheduler


@pytest.mark.variants
@pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")  # as above
@pytest.mark.parametrize("own", sorted(REPLACEABLE))
def test_schedulers_without_a_flax_class_can_be_replaced(own, tmp_path, monkeypatch):
    """With the numbers of PyTorch's classes for its config, also in training."""
    options = {"clip_sample": False, "skip_prk_steps": True, "prediction_type": "v_prediction"}
    config = STABLE_DIFFUSION | options
    needs_package = own == "DPMSolverSDEScheduler"  # torchsde; its options are KDPM2's
    cls = getattr(diffusers, "KDPM2DiscreteScheduler" if needs_package else own)
    cls.from_config(config).save_pretrained(tmp_path)
    file = tmp_path / "scheduler_config.json"
    content = json.loads(file.read_text()) | {"_class_name": own}
    file.write_text(json.dumps(content))
    for name in SCHEDULERS:
        scheduler, _ = scheduler_from_config(content, tmp_path, name)
        assert type(scheduler) is SCHEDULERS[name]
        found = flax_trajectory(name, scheduler.config, 5)
        # diffusers means to take "deis" for its own value, but first refuses it.
        known = {"algorithm_type": "dpmsolver++"} if "deis" in content.values() else {}
        expected = torch_trajectory(name, content | known, 5, monkeypatch)
        assert_same_trajectory(found, expected, name)

    scheduler, state = training_scheduler(content | {"thresholding": True}, tmp_path)
    ddpm = diffusers.DDPMScheduler(**STABLE_DIFFUSION, prediction_type="v_prediction")
    x, noise, t = START, NOISE[0], [17, 800]
    for ours, theirs in (
        (scheduler.add_noise, ddpm.add_noise),
        (scheduler.get_velocity, ddpm.get_velocity),
    ):
        expected = theirs(torch.from_numpy(x), torch.from_numpy(noise), torch.tensor(t))
        np.testing.assert_allclose(ours(state, x, noise, jnp.asarray(t)), expected, atol=1e-6)
    assert scheduler.config.prediction_type == "v_prediction"

    with pytest.raises(ValueError, match=f"_class_name={own}.*choose one with scheduler="):
        scheduler_from_pretrained(tmp_path, None)


def test_schedulers_are_read_only_and_hash_by_class_and_options():
    ddim, same = FlaxDDIMScheduler(beta_end=0.01), FlaxDDIMScheduler(beta_end=0.01)
    assert ddim == same and hash(ddim) == hash(same)
    assert ddim != FlaxDDIMScheduler(beta_end=0.02) and ddim != FlaxDDPMScheduler(beta_end=0.01)
    assert hash(FlaxDDIMScheduler(trained_betas=[0.1] * 1000))
    assert ddim.config.get("skip_prk_steps") is None and ddim.config["beta_end"] == 0.01
    traces = []

    def timesteps(scheduler, state):
        traces.append(scheduler)
        return scheduler.set_timesteps(state, 4).timesteps

    compiled = jax.jit(timesteps, static_argnums=0)
    np.testing.assert_array_equal(compiled(ddim, ddim.create_state()), [750, 500, 250, 0])
    compiled(same, same.create_state())
    assert len(traces) == 1


REFUSED = [
    (FlaxDDPMScheduler, {"thresholding": True}),
    (FlaxDDPMScheduler, {"beta_schedule": "sigmoid"}),
    (FlaxDDIMScheduler, {"prediction_type": "flow_prediction"}),
    (FlaxPNDMScheduler, {"rescale_betas_zero_snr": True}),
    (FlaxEulerDiscreteScheduler, {"timestep_type": "continuous"}),
    (FlaxEulerAncestralDiscreteScheduler, {"prediction_type": "sample"}),
    (FlaxLMSDiscreteScheduler, {"use_exponential_sigmas": True}),
    (FlaxDPMSolverMultistepScheduler, {"algorithm_type": "sde-dpmsolver++"}),
    (FlaxDPMSolverMultistepScheduler, {"variance_type": "learned_range"}),
]


@pytest.mark.variants
@pytest.mark.parametrize("cls, option", REFUSED, ids=lambda value: str(value)[-60:])
def test_unsupported_options_are_refused_by_name(cls, option):
    ((name, value),) = option.items()
    with pytest.raises(ValueError, match=f"{name}={value!r}".replace("+", r"\+")):
        cls.from_config({"_class_name": "DDIMScheduler"} | option)
    assert cls.from_config({name: None}) == cls()


def test_bad_input_is_refused_with_a_remedy(tmp_path):
    ddim, dpm = FlaxDDIMScheduler(), FlaxDPMSolverMultistepScheduler()
    state, x = ddim.create_state(), jnp.asarray(START)
    with pytest.raises(ValueError, match="no option beta_stat"):
        FlaxDDIMScheduler.from_config(ddim.config, beta_stat=0.1)
    for num_steps in (0, 1001):
        with pytest.raises(ValueError, match="from 1 to 1000"):
            ddim.set_timesteps(state, num_steps)
    with pytest.raises(ValueError, match="visits timesteps 1 to 1000, outside 0 to 999"):
        FlaxDDIMScheduler(steps_offset=1).set_timesteps(state, 1000)
    with pytest.raises(ValueError, match="call set_timesteps before step"):
        ddim.step(state, x, 0, x)
    with pytest.raises(ValueError, match=r"set_timesteps\(state, 4, sample.shape\)"):
        dpm.step(dpm.set_timesteps(dpm.create_state(), 4, (1, *SHAPE[1:])), x, 0, x)
    with pytest.raises(ValueError, match="skip_prk_steps=True"):
        FlaxPNDMScheduler().set_timesteps(state, 3, SHAPE)
    for timesteps in ([999], [499, 999], [9, -1]):
        with pytest.raises(
            ValueError, match="must be num_inference_steps=2 integers that decrease"
        ):
            SCHEDULERS["lcm"]().set_timesteps(
                SCHEDULERS["lcm"]().create_state(), 2, (), 0, timesteps
            )
    with pytest.raises(ValueError, match="scheduler=heun is unknown; choose from ddpm, ddim, pndm"):
        make_scheduler("heun", {})

    with pytest.raises(ValueError, match=r"no scheduler_config\.json"):
        scheduler_from_pretrained(tmp_path)
    file = tmp_path / "scheduler_config.json"
    for content, message in (
        ("{", "not valid JSON"),
        ('{"_class_name": "UniPCMultistepScheduler"}', "_class_name=UniPC.*supported are DDPM"),
        ("{}", "_class_name=None"),
    ):
        file.write_text(content)
        with pytest.raises(ValueError, match=message):
            scheduler_from_pretrained(tmp_path, subfolder=None)
