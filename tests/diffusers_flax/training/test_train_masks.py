"""--mask_loss_weight: masks with their pairs, the weighted loss, cached latents, accumulation."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from known_sets import SCHEMAS, half_mask, known_rows, write_known
from shards import open_pairs
from tiny_models import make_tiny_xl
from trainer_runs import config_of, read_metrics, run_trainer

import cache_latents
import flax_train_instruct_pix2pix as trainer
from diffusers_flax.data.decoding import reduce_mask
from diffusers_flax.schedulers.ddpm import FlaxDDPMScheduler

pytestmark = pytest.mark.usefixtures("lenient_optimizer")


ULTRA, MAGIC = "BleachNick/UltraEdit", "osunlp/MagicBrush"


class LinearUnet:
    """A UNet whose prediction is the latents times a parameter."""

    dtype = jnp.float32

    def apply(self, params, x_in, t, states, **added):
        return SimpleNamespace(sample=x_in[:, :4] * params["params"])


@pytest.mark.parametrize("snr_gamma", [None, 5.0])
def test_the_weighted_loss_is_numpys(snr_gamma):
    """Also its gradient; a mask that is white, black or missing changes nothing."""
    rng = np.random.default_rng(0)
    B, h, w, factor, weight = 5, 4, 6, 8, 3.5
    scheduler = FlaxDDPMScheduler()
    state = scheduler.create_state()
    x_0, noise = (jnp.asarray(rng.standard_normal((B, 4, h, w)), jnp.float32) for _ in range(2))
    timesteps = jnp.asarray(rng.integers(0, 1000, B))
    mask = rng.integers(0, 256, (B, h * factor, w * factor), np.uint8)
    mask[1], mask[2], mask[3] = 0, 255, 255 * (np.arange(w * factor) < 20)
    arguments = (LinearUnet(), scheduler, state, x_0, x_0, {"states": None}, noise, timesteps)

    def loss(params, **options):
        return trainer.diffusion_loss(params, *arguments, snr_gamma, **options)

    x_t = np.asarray(scheduler.add_noise(state, x_0, noise, timesteps))
    alpha_bar = np.asarray(state.common.alphas_cumprod)[timesteps]
    snr = alpha_bar / (1 - alpha_bar)
    of_sample = np.ones(B) if snr_gamma is None else np.minimum(1, snr_gamma / snr)
    inside = np.stack([reduce_mask(each, factor) for each in mask]) / 255
    weights = 1 + (weight - 1) * inside
    weights /= weights.mean(axis=(1, 2), keepdims=True)
    np.testing.assert_allclose(weights.mean(axis=(1, 2)), 1)
    assert len(np.unique(weights[1])) == len(np.unique(weights[2])) == 1
    error = (0.7 * x_t - noise) ** 2 * weights[:, None]
    expected = (error.mean(axis=(1, 2, 3)) * of_sample).mean()
    slope = 2 * (0.7 * x_t - noise) * x_t * weights[:, None]
    value, gradient = jax.value_and_grad(partial(loss, mask=mask, mask_loss_weight=weight))(0.7)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(gradient, (slope.mean(axis=(1, 2, 3)) * of_sample).mean(), rtol=1e-4)
    plain = loss(0.7)
    for constant in (0, 255):
        found = loss(0.7, mask=np.full_like(mask, constant), mask_loss_weight=weight)
        np.testing.assert_allclose(found, plain, rtol=1e-6)
    assert abs(value - plain) > 1e-3


def test_a_bad_mask_costs_its_pair_only_where_masks_are_read(model, tmp_path):
    """Latents with masks serve both."""
    rows = known_rows(ULTRA, 8)
    for n, data in enumerate((b"bad", half_mask("white", (16, 32)))):
        rows[n]["mask_image"] = {"bytes": data, "path": None}
    rows[2]["mask_image"] = {"bytes": None, "path": "gone.png"}
    rows[3]["edited_image"] = {"bytes": b"bad", "path": None}
    for folder in ("images", "latents"):
        (tmp_path / folder).mkdir()
    table = pa.Table.from_pylist(rows, pa.schema(SCHEMAS[ULTRA][0]))
    pq.write_table(table, tmp_path / "images" / "a.parquet")
    flags = f"""--pretrained_model_name_or_path {model} --train_data_dir {tmp_path}/images
        --resolution 16 --output_dir {tmp_path}/latents --cache_masks --max_bad_fraction 1"""
    cache_latents.main(flags.split())
    options = dict(batch_size=8, resolution=16, random_crop=False, max_bad_fraction=1)
    for given, bad in ((None, [3]), ("", [0, 1, 2, 3])):
        for folder in ("images", "latents"):
            dataset = open_pairs(tmp_path / folder, mask=given, **options)
            list(dataset)
            assert sorted(row for _, row in dataset.bad_rows) == bad


def losses(folder):
    return [row["loss"] for row in read_metrics(folder)]


@pytest.mark.slow
@pytest.mark.parametrize("name", [ULTRA, MAGIC])
def test_masks_change_the_loss(model, tmp_path, monkeypatch, capsys, name):
    """The run with masks differs, its accumulation agrees, and it resumes only as itself."""
    data = write_known(tmp_path / "data", name)
    config = config_of(model, data, tmp_path / "a", max_train_steps=3, mask_loss_weight=4.0)
    run_trainer(config, monkeypatch)
    found = losses(tmp_path / "a")
    assert len(found) == 3 and np.isfinite(found).all()
    plain = replace(config, output_dir=str(tmp_path / "b"), mask_loss_weight=1.0)
    run_trainer(plain, monkeypatch)
    assert abs(losses(tmp_path / "b")[0] / found[0] - 1) > 1e-4
    with pytest.raises(SystemExit):
        run_trainer(replace(config, mask_loss_weight=3.0, max_train_steps=4), monkeypatch)
    assert "mask_loss_weight was 4.0 and is 3.0" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"gradient_accumulation_steps": 2}, {"lora_rank": 2}], ids=str)
def test_masks_with_accumulation_and_lora(model, tmp_path, monkeypatch, options):
    data = write_known(tmp_path / "data", ULTRA)
    results = []
    for n, more in enumerate(({}, options)):
        base = dict(max_train_steps=3, mask_loss_weight=4.0, train_batch_size=8)
        if "lora_rank" in options:
            more = options | ({"mask_loss_weight": 2.0} if n else {})
        run_trainer(config_of(model, data, tmp_path / str(n), **base | more), monkeypatch)
        results.append(losses(tmp_path / str(n)))
    if "lora_rank" in options:
        assert results[0] != results[1]
    else:
        np.testing.assert_allclose(*results, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("is_xl", [False, True])
def test_masks_of_cached_latents(model, tmp_path, monkeypatch, capsys, is_xl):
    """Images and latents give the same losses; latents without masks are refused."""
    if is_xl:
        model = make_tiny_xl(tmp_path / "xl", edits=True)
    data = write_known(tmp_path / "data", MAGIC)
    options = dict(max_train_steps=3, mask_loss_weight=4.0, random_crop=False)
    run_trainer(config_of(model, data, tmp_path / "a", **options), monkeypatch)
    cached = options | {"cache_latents": str(tmp_path / "latents")}
    run_trainer(config_of(model, data, tmp_path / "b", **cached), monkeypatch)
    np.testing.assert_allclose(losses(tmp_path / "b"), losses(tmp_path / "a"), rtol=2e-3)
    schema = pq.read_schema(next((tmp_path / "latents").glob("*.parquet")))
    assert schema.names[-1] == "mask"

    # The same latents serve a run without masks.
    run_trainer(
        config_of(model, data, tmp_path / "c", **cached | {"mask_loss_weight": 1.0}), monkeypatch
    )
    without = ["--pretrained_model_name_or_path", str(model), "--train_data_dir", str(data)]
    without += ["--resolution", "16", "--output_dir", str(tmp_path / "without")]
    cache_latents.main(without)
    assert pq.read_schema(next((tmp_path / "without").glob("*.parquet"))).names[-1] == "time_ids"
    bad = config_of(model, tmp_path / "without", tmp_path / "d", **options)
    with pytest.raises(SystemExit):
        run_trainer(bad, monkeypatch)
    assert "has latents without masks, which --mask_loss_weight needs" in capsys.readouterr().err
    cache_latents.main([*without, "--cache_masks", "--overwrite_output_dir"])
    run_trainer(bad, monkeypatch)
    np.testing.assert_allclose(losses(tmp_path / "d"), losses(tmp_path / "b"), rtol=1e-6)
