"""Training, cached latents and distillation with several directories of pairs."""

import os
import signal

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from shards import write_random_shard
from trainer_runs import config_of, read_metrics, run_trainer

import cache_latents
import flax_train_instruct_pix2pix as trainer
from diffusers_flax.data.mixture import Mixture
from diffusers_flax.training.batches import Batches

pytestmark = pytest.mark.usefixtures("lenient_optimizer")
MIXED = dict(train_data_weights=(3.0, 1.0), max_train_steps=3, checkpointing_steps=1, ema="none")


@pytest.fixture(scope="module")
def sets(data, tmp_path_factory):
    """The data, and ten pairs in columns of other names."""
    folder = tmp_path_factory.mktemp("more") / "magicbrush"
    folder.mkdir()
    write_random_shard(
        folder / "c.parquet", 10, seed=3, names=("source_img", "instruction", "target_img")
    )
    return str(data), str(folder)


def mixture_config(model, sets, out, **options):
    return config_of(model, "", out, **{"train_data_dir": tuple(sets)} | MIXED | options)


def weights_of(out):
    return load_file(out / "unet/diffusion_pytorch_model.safetensors")


def assert_same_runs(out, expected):
    weights, rows = weights_of(out), read_metrics(out)
    for name, array in weights_of(expected).items():
        np.testing.assert_array_equal(weights[name], array, err_msg=name)
    for row, other in zip(rows, read_metrics(expected), strict=True):
        same = ("step", "loss", "grad_norm", "num_bad", "passes/magicbrush")
        assert [row[name] for name in same] == [other[name] for name in same]


@pytest.fixture(scope="module")
def whole_run(model, sets, tmp_path_factory):
    """The output of three steps without interruption."""
    out = tmp_path_factory.mktemp("whole") / "out"
    with pytest.MonkeyPatch.context() as monkeypatch:
        run_trainer(mixture_config(model, sets, out), monkeypatch)
    return out


def test_batches_of_a_resumed_run(model, sets, tmp_path):
    """The trainer's flags open a mixture, whose batches go on at any step."""
    config = mixture_config(model, sets, tmp_path / "out")

    def tokenize(prompts):
        return np.array([[len(prompt)] for prompt in prompts])

    dataset = trainer.open_dataset(config)
    assert isinstance(dataset, Mixture) and dataset.shares == [0.75, 0.25]
    first, again = Batches(dataset, tokenize), Batches(trainer.open_dataset(config), tokenize, 2)
    batches = [next(first) for _ in range(4)]
    for batch in batches[2:]:
        jax.tree.map(np.testing.assert_array_equal, next(again), batch)
    first.close(), again.close()


@pytest.mark.slow
def test_a_stopped_run_resumes_bit_for_bit(model, sets, whole_run, tmp_path, monkeypatch, capsys):
    config, passes = mixture_config(model, sets, tmp_path / "out"), Mixture.passes

    def stop_at(mixture, step):
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return passes(mixture, step)

    monkeypatch.setattr(Mixture, "passes", stop_at)
    with pytest.raises(SystemExit, match="143"):
        run_trainer(config, monkeypatch)
    monkeypatch.setattr(Mixture, "passes", passes)
    other = mixture_config(model, sets, tmp_path / "out", train_data_weights=(1, 1))
    with pytest.raises(SystemExit, match="2"):
        run_trainer(other, monkeypatch)
    out, error = capsys.readouterr()
    assert "shares of train_data_dir was [0.75, 0.25] and is [0.5, 0.5]" in error
    run_trainer(config, monkeypatch)
    out += capsys.readouterr().out
    assert "parameters on a mixture of pairs (16 pairs, 75.0% of a batch)" in out
    assert "resuming after step 2" in out
    assert_same_runs(tmp_path / "out", whole_run)
    rows = read_metrics(whole_run)
    drawn = [16 * row["passes/pairs"] + 10 * row["passes/magicbrush"] for row in rows]
    np.testing.assert_allclose(drawn, [8, 16, 24], rtol=1e-12)


@pytest.mark.slow
def test_latents_of_several_sets(model, sets, tmp_path, monkeypatch, capsys):
    """Training caches what cache_latents.py writes; pairs and order are the images'."""
    cache, options = tmp_path / "cache", dict(random_crop=False, random_flip=False)
    config = mixture_config(model, sets, tmp_path / "out", cache_latents=str(cache), **options)
    run_trainer(config, monkeypatch)
    assert {path.name for path in cache.iterdir()} == {"pairs", "magicbrush"}
    flags = ["--pretrained_model_name_or_path", str(model), "--resolution", "16"]
    written = tmp_path / "written"
    capsys.readouterr()
    cache_latents.main([*flags, "--train_data_dir", *sets, "--output_dir", str(written)])
    assert capsys.readouterr().out.splitlines() == [
        f"latents of {sets[0]} are in {written}/pairs",
        f"latents of {sets[1]} are in {written}/magicbrush",
    ]
    for path in cache.glob("*/*.parquet"):
        assert path.read_bytes() == (written / path.relative_to(cache)).read_bytes()

    latents = [str(written / name) for name in ("pairs", "magicbrush")]
    run_trainer(mixture_config(model, latents, tmp_path / "again", **options), monkeypatch)
    assert_same_runs(tmp_path / "again", tmp_path / "out")
    run_trainer(mixture_config(model, sets, tmp_path / "images", **options), monkeypatch)
    losses = [[row["loss"] for row in read_metrics(tmp_path / name)] for name in ("out", "images")]
    np.testing.assert_allclose(*losses, rtol=1e-2)  # latents are stored in float16

    with pytest.raises(SystemExit, match="2"):
        mixed = (sets[0], latents[1])
        run_trainer(mixture_config(model, mixed, tmp_path / "mixed", **options), monkeypatch)
    assert "one has latents and the other images" in capsys.readouterr().err
