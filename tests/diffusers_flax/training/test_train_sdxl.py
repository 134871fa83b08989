"""Training SDXL: against PyTorch, and by the trainer's command line."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet as pq
import pytest
from helpers import random_inputs, random_normal, slow
from PIL import Image
from tiny_models import make_tiny_xl
from torch_training import (
    Parallel,
    compare_losses,
    compare_runs,
    draws_by_hand,
    make_xl_batch,
    torch_text_encoder_xl,
    train_with_torch,
)
from trainer_runs import RUN, config_of, read_metrics, run_trainer

import ema_posthoc
import flax_train_instruct_pix2pix as trainer
from diffusers_flax.pipelines.instruct_pix2pix_xl import (
    FlaxStableDiffusionXLInstructPix2PixPipeline,
)
from diffusers_flax.training.sharding import replicated_number

pytestmark = pytest.mark.usefixtures("lenient_optimizer")
SIDE = RUN["resolution"] // 8  # of the latents


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_xl(
        tmp_path_factory.mktemp("tiny") / "xl", edits=True, prediction_type="v_prediction"
    )


@pytest.mark.parametrize("prediction_type", ["epsilon", *slow("v_prediction")])
def test_loss_and_gradients_are_pytorchs(model, prediction_type):
    """With time ids, and with dropout of text, image and both: zeros for states and pooled."""
    B = 6
    text = {
        "states": random_normal(B, 7, 48, seed=3),
        "pooled": random_normal(B, 20, seed=4),
        "time_ids": np.random.default_rng(5).integers(0, 2000, (B, 6)).astype(np.float32),
    }
    condition = random_normal(B, 4, 5, 7, seed=2)
    keys = jax.random.split(jax.random.key(0), B)
    u, rate = np.asarray(jax.vmap(jax.random.uniform)(keys)), 0.25
    assert set(np.floor(u / rate)) == {0, 1, 2, 3}  # all rows of the table
    null_text = {name: jnp.zeros_like(text[name][:1]) for name in ("states", "pooled")}
    ours = trainer.conditioning_dropout(keys, text, null_text, condition, rate)
    theirs = {name: x.copy() for name, x in text.items()}, condition.copy()
    for name in ("states", "pooled"):
        theirs[0][name][u < 2 * rate] = 0
    theirs[1][(rate <= u) & (u < 3 * rate)] = 0
    compare_losses(model, prediction_type, ours, theirs)


@pytest.mark.slow
def test_four_devices_are_pytorch_on_one(model):
    """From pixels to weights, v prediction: text of both encoders, time ids, dropout, AdamW.

    Blocks gather their own parameters.
    """
    num_steps, seed = 4, 3
    batches = [make_xl_batch(i) for i in range(num_steps)]
    draws = [draws_by_hand(seed, step, SIDE) for step in range(num_steps)]
    options = {"gradient_checkpointing": True, "gather_by_block": True}
    parallel = Parallel(config_of(model, "unused", "unused", **options))
    torch_run = train_with_torch(model, batches, draws, torch_text_encoder_xl)
    compare_runs(parallel, list(parallel.run(batches, seed)), *torch_run)


def test_cached_latents_have_the_time_ids(model, data, tmp_path):
    """The same in every batch as with images; latents without time ids are refused."""
    folder = tmp_path / "latents"
    config = config_of(model, data, tmp_path / "out", random_crop=False)
    images = trainer.open_dataset(config)
    config = dataclasses.replace(config, cache_latents=str(folder))
    for plain, cached in zip(images, trainer.open_dataset(config), strict=True):
        np.testing.assert_array_equal(cached["time_ids"], plain["time_ids"])
    for path in folder.iterdir():
        table = pq.read_table(path)
        pq.write_table(table.drop_columns(["time_ids"]), path)
    with pytest.raises(ValueError, match="without time ids of SDXL; use another"):
        trainer.open_dataset(config)


@pytest.mark.slow
def test_a_run_resumes_on_fewer_devices(model, data, tmp_path, monkeypatch):
    """The last checkpoint of four devices gives the same end on two; with validation images."""
    devices = jax.devices()
    image = random_inputs(1, 16, 16, 8)[0]
    pipeline, _ = FlaxStableDiffusionXLInstructPix2PixPipeline.from_pretrained(model)
    pipeline.numpy_to_pil(image)[0].save(tmp_path / "in.png")
    config = config_of(
        model,
        data,
        tmp_path / "out",
        checkpointing_steps=3,
        checkpoints_total_limit=None,
        validation_image=(str(tmp_path / "in.png"),),
        validation_prompt=("make it red",),
        validation_steps=3,
        gradient_checkpointing=True,
        gradient_accumulation_steps=2,
        gather_by_block=True,
        ema="power",
        ema_every=1,
        ema_snapshot_steps=3,
    )
    run_trainer(config, monkeypatch)
    assert len(list((tmp_path / "out" / "validation").glob("step-*"))) == 2
    expected = [row["loss"] for row in read_metrics(tmp_path / "out")]
    (tmp_path / "out" / "model_index.json").unlink()
    other = dataclasses.replace(
        config, resume_from_checkpoint=str(tmp_path / "out" / "checkpoints" / "3")
    )
    for name in ("devices", "local_devices"):
        monkeypatch.setattr(jax, name, lambda *args, **options: devices[:2])
    for name in ("device_count", "local_device_count"):
        monkeypatch.setattr(jax, name, lambda *args, **options: 2)
    replicated_number.cache_clear()  # has numbers on four devices
    run_trainer(other, monkeypatch)
    found = [row["loss"] for row in read_metrics(tmp_path / "out")]
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    with Image.open(tmp_path / "out" / "validation" / "progress.gif") as animation:
        assert animation.n_frames == 2

    flags = f"--train_output_dir {tmp_path}/out --output_dir {tmp_path}/longer --sigma_rel 0.12"
    ema_posthoc.main(flags.split())
    averages = [
        FlaxStableDiffusionXLInstructPix2PixPipeline.from_pretrained(tmp_path / name)[1]["unet"][
            "conv_in"
        ]["kernel"]
        for name in ("out", "longer")
    ]
    assert 0 < np.abs(averages[0] - averages[1]).max() < 0.1
