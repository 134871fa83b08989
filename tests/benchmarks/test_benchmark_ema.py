"""benchmarks/ema: the trainer's loop, the demo's measures, summaries."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import ROOT
from PIL import Image

import flax_train_instruct_pix2pix as trainer
from benchmarks.ema import __main__ as ema
from benchmarks.ema.cost import COST_PLANS
from benchmarks.ema.quality import (
    edit_and_measure,
    make_loss,
    read_held_out,
    rebuild,
    study_plans,
    train_with_averages,
)
from benchmarks.ema.report import draw_quality, summarize_cost, summarize_quality
from benchmarks.ema.runs import make_demo, make_programs, trainer_config
from demo.photographs import EDITS
from diffusers_flax.models.unet import FlaxUNet2DConditionModel
from diffusers_flax.training.ema import SIGMA_RELS, ema_plan, power_decay, sigma_rel_to_gamma
from diffusers_flax.training.models import load_models

pytestmark = pytest.mark.usefixtures("lenient_optimizer")
NUM_STEPS = 8


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The demo's data, small, and its widened UNet."""
    folder = tmp_path_factory.mktemp("demo")
    make_demo(folder, num_pairs=64, crops_per_photograph=1)
    return folder


@pytest.fixture(scope="module")
def config(demo, tmp_path_factory):
    """Flags of the trainer for a run of a few steps."""
    return trainer_config(
        demo,
        max_train_steps=NUM_STEPS,
        train_batch_size=8,
        lr_scheduler="cosine",
        lr_warmup_steps=1,
        learning_rate=1e-3,
        seed=3,
        ema_fraction=0.5,
        ema_decay=0.5,
        checkpointing_steps=0,
        compilation_cache_dir="",
        output_dir=str(tmp_path_factory.mktemp("trained") / "model"),
    )


@pytest.fixture(scope="module")
def loaded(config):
    """What load_models returns."""
    return load_models(config, jnp.float32)


@pytest.fixture(scope="module")
def studied(config, loaded):
    """The result of the study's train."""
    models, pipeline, frozen, params = loaded
    programs = make_programs(config, models, params)
    plan = ema_plan("late", NUM_STEPS, fraction=0.5, decay=0.5)
    plans = study_plans(NUM_STEPS) | {"late 50%": plan}
    return train_with_averages(config, programs, plans, pipeline, frozen, params)


def assert_alike(a, b, **tolerances):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerances), a, b)


def test_its_run_is_the_trainers(config, studied):
    """The tracked average is bit-identical to the model that the trainer writes."""
    ends, _ = studied
    trainer.train(replace(config, save_raw_unet=True))
    for name, subfolder in (("late 50%", "unet"), ("none", "unet_raw")):
        _, params = FlaxUNet2DConditionModel.from_pretrained(config.output_dir, subfolder=subfolder)
        jax.tree.map(np.testing.assert_array_equal, ends[name], params)
    late, none = (ends[name]["conv_in"]["kernel"] for name in ("late 50%", "none"))
    assert np.abs(late - none).max() > 0


def test_plans_are_what_their_names_say():
    plans = study_plans(1500)
    assert plans["none"].first_step is None
    assert plans["full 0.9999"].decays(1) == plans["full 0.9999"].decays(1500) == [0.9999]
    (scaled,) = plans["full 0.9999, scaled"].decays(1500)
    assert scaled**1500 == pytest.approx(0.9999**15000)
    assert plans["full 0.9999, warm-up"].decays(1500) == [pytest.approx(1500 / 1509)]
    assert plans["late 3.6%"].first_step == 1446
    assert plans["late 3.6%"].decays(1) == [pytest.approx(1 - 5 / 54)]
    assert plans["late 20%"].decays(1) == [pytest.approx(1 - 5 / 300)]
    for name in ("late 3.6%", "late 20%"):
        other = plans[f"{name}, 0.9999"]
        assert other.first_step == plans[name].first_step
        assert other.decays(1) == [0.9999]


def test_rebuilding_gives_back_what_was_tracked(studied):
    """Rebuilding gives the last snapshots, up to float16, and averages of other lengths."""
    _, snapshots = studied
    assert [(step, sigma_rel) for step, sigma_rel, _ in snapshots] == [
        (step, sigma_rel) for step in range(1, NUM_STEPS + 1) for sigma_rel in SIGMA_RELS
    ]
    for _, sigma_rel, params in snapshots[-2:]:
        assert_alike(rebuild(snapshots, sigma_rel), params, atol=2e-3)

    # Snapshots whose every weight is the step number.
    made, gamma, expected = [], sigma_rel_to_gamma(0.075), 0.0
    tracked = dict.fromkeys(SIGMA_RELS, 0.0)
    for step in range(1, 81):
        expected += (1 - power_decay(step, gamma)) * (step - expected)
        for sigma_rel in SIGMA_RELS:
            decay = power_decay(step, sigma_rel_to_gamma(sigma_rel))
            tracked[sigma_rel] += (1 - decay) * (step - tracked[sigma_rel])
            if step % 10 == 0:
                made.append((step, sigma_rel, {"x": np.full(2, tracked[sigma_rel], np.float32)}))
    np.testing.assert_allclose(rebuild(made, 0.075)["x"], expected, rtol=2e-3)


def test_held_out_images(demo):
    instructions, images, truths = read_held_out(demo)
    assert len(instructions) == len(images) == len(truths) == 3 * len(EDITS)
    apply = {edit.instruction: edit.apply for edit in EDITS}
    for instruction, image, truth in zip(instructions, images, truths):
        expected = apply[instruction](np.float32(image) / 255)
        assert np.abs(expected - truth / 255).max() < 0.01


def test_held_out_loss(demo, loaded):
    """A UNet that predicts zero has the mean square of its targets; the same at every call."""
    models, pipeline, frozen, params = loaded
    held_out = read_held_out(demo)
    loss = make_loss(models, pipeline, frozen, held_out, num_draws=4)
    first = float(loss(params))
    assert first == float(loss(params))
    zero = params | {"conv_out": jax.tree.map(np.zeros_like, params["conv_out"])}
    # v = alpha noise - sigma x_0, averaged over timesteps spread evenly.
    alpha_bar = np.asarray(frozen["scheduler"].common.alphas_cumprod)
    truths = np.transpose(held_out[2] / np.float32(127.5) - 1, (0, 3, 1, 2))
    vae = {"params": frozen["vae"]}
    posterior = models.vae.apply(vae, truths, method=models.vae.encode).latent_dist
    x_0 = np.asarray(posterior.mode()) * models.vae.config.scaling_factor
    expected = alpha_bar.mean() + (1 - alpha_bar).mean() * np.mean(x_0**2)
    assert float(loss(zero)) == pytest.approx(expected, rel=0.02)


def test_edits_are_measured_as_the_demo_does(demo, loaded):
    """The pipeline's images reach the demo's measure in order."""
    _, pipeline, _, _ = loaded
    held_out = read_held_out(demo)

    class Perfect:
        prepare_inputs = pipeline.prepare_inputs
        numpy_to_pil = staticmethod(pipeline.numpy_to_pil)

        def __call__(self, prompt_ids, image, params, key, *settings):
            assert settings == (20, 2.0, 1.2)  # as in demo/run_demo.py
            assert "--num_inference_steps 20 --guidance_scale 2 --image_guidance_scale 1.2" in (
                ROOT / "demo" / "run_demo.py"
            ).read_text().replace('"\n    "', "")
            return type("Result", (), {"images": held_out[2] / np.float32(255)})

    summary = edit_and_measure(Perfect(), {}, held_out, demo)
    assert summary["edit_error_ratio"] == 0
    assert summary["instruction_accuracy"] == 1
    assert summary["num_edits"] == len(held_out[0])


def test_summaries():
    def run(none, late):
        numbers = {"edit_error_ratio": 0.5, "instruction_accuracy": 1.0}
        return {"variants": {"none": {"loss": none} | numbers, "late": {"loss": late} | numbers}}

    summary = summarize_quality([run(2.0, 1.0), run(4.0, 3.0)])
    assert summary["late"]["loss"] == {"mean": 2, "median": 2, "min": 1, "max": 3}
    ratios = summary["late"]["loss_to_none"]
    assert ratios == {"mean": 0.625, "median": 0.625, "min": 0.5, "max": 0.75}
    assert summary["none"]["loss_to_none"]["mean"] == 1

    rows = {
        "step": {"bytes_accessed": 200.0},
        "update": {"bytes_accessed": 3.0},
        "plans": {"none": {"seconds": [1.0, 2.0, 4.0]}, "full": {"seconds": [2.0, 2.0, 5.0]}},
    }
    summary = summarize_cost(rows)
    assert summary["update_share"] == 0.015
    assert summary["full"] == {"mean": pytest.approx(17 / 12), "median": 1.25, "min": 1, "max": 2}
    assert summary["none"]["max"] == 1


def test_the_plot_shows_every_ratio():
    """Also one far from the rest."""
    losses = {"none": 1.0, "full 0.9999": 9.0, "late 20%": 0.3, "post-hoc 0.05": 0.6}
    numbers = {name: {"edit_error_ratio": x, "loss": x} for name, x in losses.items()}
    runs = [{"variants": {name: x | {"instruction_accuracy": 1.0} for name, x in numbers.items()}}]
    study = {"summary": summarize_quality(runs), "runs": runs}
    for axes in draw_quality(study, [0.05]).axes:
        ratios = [y for line in axes.lines for y in line.get_ydata()]
        least, largest = axes.get_ylim()
        assert ratios and least < min(ratios) and max(ratios) < largest


def test_command_line(tmp_path):
    """The command line with tiny settings."""
    options = "--seeds 0 1 --max_train_steps 8"
    options += " --num_pairs 64 --crops_per_photograph 1 --loss_draws 1 --sigma_rels 0.05 0.1"
    options += " --cost_rounds 1 --cost_steps 1"
    command = [sys.executable, "-m", "benchmarks.ema", *options.split()]
    command += ["--output", tmp_path / "out" / "study.json", "--plot", tmp_path / "out" / "a.png"]
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"study.json", "a.png"}
    with Image.open(tmp_path / "out" / "a.png") as plot:
        assert plot.width > 1000

    results = json.loads((tmp_path / "out" / "study.json").read_text())
    assert [run["seed"] for run in results["quality"]["runs"]] == [0, 1]
    variants = results["quality"]["summary"]
    # Late windows of at most 5 steps have no average unless a decay is given.
    expected = set(study_plans(8)) - {"power", "late 3.6%", "late 20%"}
    assert variants.keys() == expected | {"post-hoc 0.05", "post-hoc 0.1", "post-hoc, best"}
    best = variants["post-hoc, best"]["loss"]["mean"]
    assert best <= min(variants[f"post-hoc {s}"]["loss"]["mean"] for s in (0.05, 0.1))

    plans = results["cost"]["figures"]["plans"]
    assert plans.keys() == COST_PLANS.keys()
    none, before, after, full = (plan["average_bytes"] for plan in plans.values())
    assert none == before == 0 < after == full
    # Parameters, two moments and an average are sharded alike.
    assert full == pytest.approx(results["cost"]["figures"]["state_bytes"] / 3, rel=0.01)
    assert len(plans["full"]["seconds"]) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--max_train_steps 4", "--max_train_steps 4 must be at least 8"),
        ("--sigma_rels 0.5", "sigma_rel=0.5 must be above 0 and below 0.28"),
        ("--seeds", "seeds is empty; name at least one"),
    ],
)
def test_bad_flags_end_in_one_line(options, message, capsys):
    with pytest.raises(SystemExit) as ended:
        ema.main(options.split())
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}") and error.count("\n") == 1
