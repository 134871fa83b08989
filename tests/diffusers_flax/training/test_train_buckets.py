"""Training with --aspect_ratio_buckets: devices, latents, resuming, validation images."""

import json

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from known_sets import png
from PIL import Image
from shards import open_mixture, write_random_shard
from trainer_runs import config_of, flags_of, read_metrics, run_trainer

import cache_latents
import flax_train_instruct_pix2pix as trainer
from diffusers_flax.data.shards import latents_metadata
from diffusers_flax.training.reports import load_validation_images

pytestmark = pytest.mark.usefixtures("lenient_optimizer")

# Of stored images: two thirds are square at the sizes 12x20, 16x16 and 20x12 of 16 pixels.
STORED = ((22, 18), (20, 20), (18, 30), (20, 19), (34, 18), (19, 17))  # (width, height)
BUCKETS = dict(aspect_ratio_buckets=(), max_train_steps=9, adam_epsilon=1e-2)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Six batches of eight an epoch: four of 16x16, one of 12x20, one of 20x12."""
    folder = tmp_path_factory.mktemp("data")
    write_random_shard(folder / "a.parquet", 33, seed=1, broken=[3], sizes=STORED)
    write_random_shard(folder / "b.parquet", 21, seed=2, sizes=STORED)
    for path in folder.iterdir():
        table, masks = pq.read_table(path), []
        for n in range(len(table)):
            width, height = STORED[n % len(STORED)]
            white = np.ones((height, 1)) * np.arange(width) < n % width
            masks.append(None if n % 5 == 0 else png(np.uint8(255) * white))
        pq.write_table(table.append_column("mask_image", pa.array(masks, pa.binary())), path)
    return folder


def losses(out):
    return [[row["loss"], row["grad_norm"]] for row in read_metrics(out)]


def on_one_device(monkeypatch):
    device = jax.devices()[0]
    for name in ("devices", "local_devices"):
        monkeypatch.setattr(jax, name, lambda *args, **options: [device])
    for name in ("device_count", "local_device_count"):
        monkeypatch.setattr(jax, name, lambda *args, **options: 1)


@pytest.mark.slow
def test_each_size_is_compiled_once_and_trains(model, data, tmp_path, monkeypatch, capsys):
    sizes = ("20x12", "16x16")
    config = config_of(
        model,
        data,
        tmp_path / "out",
        **BUCKETS | dict(aspect_ratio_buckets=sizes, max_train_steps=5),
    )
    run_trainer(config, monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    compiled = [line.split() for line in lines if line.startswith("compiled")]
    assert [words[1] + words[-3] for words in compiled] == ["16x161", "20x122"]
    assert any("pairs by size: 16x16 46, 20x12 8" in line for line in lines)
    assert any("on 48 of 54 pairs per epoch" in line for line in lines)
    assert len(read_metrics(tmp_path / "out")) == 5
    flags = json.loads((tmp_path / "out" / "config.json").read_text())
    assert flags["aspect_ratio_buckets"] == ["16x16", "20x12"]


@pytest.mark.slow
def test_validation_images_keep_their_aspect_ratio(model, data, tmp_path, monkeypatch):
    for name, size in (("wide", (40, 24)), ("square", (30, 32))):
        Image.new("RGB", size, "red").save(tmp_path / f"{name}.png")
    validation = dict(
        validation_image=tuple(str(tmp_path / f"{name}.png") for name in ("wide", "square")),
        validation_prompt=("make it blue",),
    )
    steps = dict(max_train_steps=3)
    config = config_of(model, data, tmp_path / "out", **BUCKETS | validation | steps)
    sizes = trainer.open_dataset(config).sizes
    images = load_validation_images(config.validation_image, sizes)
    assert [image.size for image in images] == [(20, 12), (16, 16)]
    run_trainer(config, monkeypatch)
    with Image.open(tmp_path / "out" / "validation" / "step-000003.png") as grid:
        assert grid.width > grid.height


@pytest.mark.slow
@pytest.mark.parametrize("prediction", [None, "flow"])
def test_devices_latents_and_a_resume_change_nothing(
    model, data, tmp_path, monkeypatch, capsys, prediction
):
    options = BUCKETS | dict(random_crop=False, checkpointing_steps=3, checkpoints_total_limit=None)
    options |= dict(mask_loss_weight=4.0, prediction=prediction)
    config = config_of(model, data, tmp_path / "four", **options)
    run_trainer(config, monkeypatch)
    expected = losses(tmp_path / "four")
    assert len(expected) == 9

    # From the middle of an epoch, with the sizes written out.
    (tmp_path / "four" / "model_index.json").unlink()
    resumed = str(tmp_path / "four" / "checkpoints" / "3")
    again = dict(resume_from_checkpoint=resumed, aspect_ratio_buckets=("16x16", "12x20", "20x12"))
    weights = (tmp_path / "four" / "unet" / "diffusion_pytorch_model.safetensors").read_bytes()
    run_trainer(config_of(model, data, tmp_path / "four", **options | again), monkeypatch)
    assert losses(tmp_path / "four") == expected
    assert "resuming after step 3" in capsys.readouterr().out
    again = (tmp_path / "four" / "unet" / "diffusion_pytorch_model.safetensors").read_bytes()
    assert again == weights
    (tmp_path / "four" / "model_index.json").unlink()
    other = options | dict(resume_from_checkpoint=resumed, aspect_ratio_buckets=("16x16", "12x20"))
    with pytest.raises(SystemExit):
        run_trainer(config_of(model, data, tmp_path / "four", **other), monkeypatch)
    error = capsys.readouterr().err.splitlines()[-1]
    assert "belongs to another run: aspect_ratio_buckets was ['12x20', '16x16', '20x12']" in error

    latents = tmp_path / "latents"
    cached = options | dict(cache_latents=str(latents))
    for name in ("cached", "again"):
        run_trainer(config_of(model, data, tmp_path / name, **cached), monkeypatch)
        np.testing.assert_allclose(losses(tmp_path / name), expected, rtol=2e-3)
    accumulated = options | dict(gradient_accumulation_steps=2, lora_rank=None)
    on_one_device(monkeypatch)
    run_trainer(config_of(model, data, tmp_path / "one", **accumulated), monkeypatch)
    np.testing.assert_allclose(losses(tmp_path / "one"), expected, rtol=1e-4)


def cache(model, data, out, *flags):
    args = ["--pretrained_model_name_or_path", model, "--train_data_dir", data, "--resolution", 16]
    cache_latents.main([str(x) for x in (*args, "--output_dir", out, *flags)])


@pytest.mark.slow
def test_latents_of_sizes(model, data, tmp_path, monkeypatch, capsys):
    out = tmp_path / "latents"
    cache(model, data, out, "--train_batch_size", 8, "--aspect_ratio_buckets")
    table = pq.read_table(out / "a.parquet")
    assert table["size"].to_pylist() == [[1, 1, 0, 1, 2, 1][n % 6] for n in range(33)]
    assert latents_metadata(pq.read_metadata(out / "a.parquet"))["sizes"] == [
        [20, 12], [16, 16], [12, 20],
    ]  # fmt: skip
    for row, size in enumerate(table["size"].to_pylist()):
        data_of_row = table["original_image"][row].as_py()
        h, w = ((10, 6), (8, 8), (6, 10))[size]
        assert data_of_row is None or len(data_of_row) == 2 * 2 * h * w * 4

    def error(*flags, **options):
        config = config_of(model, out, tmp_path / "x", random_crop=False, **options)
        with pytest.raises(SystemExit) as stop:
            trainer.main([*flags_of(config), *flags])
        assert stop.value.code == 2
        return capsys.readouterr().err.splitlines()[-1]

    assert "latents of --aspect_ratio_buckets 12x20 16x16 20x12" in error()
    some = error(aspect_ratio_buckets=("16x16", "12x20"))
    assert "latents of --aspect_ratio_buckets 12x20 16x16 20x12; use another directory" in some
    with pytest.raises(ValueError, match="20x12; use another directory"):
        open_mixture([str(out), str(data)], batch_size=8, resolution=16, random_crop=False)
    few = error(aspect_ratio_buckets=(), train_batch_size=12)
    assert "has latents of a size with less than a batch of pairs" in few
    assert "make the latents again with --aspect_ratio_buckets 16x16" in few
    # A size without a batch of pairs has no latents; existing shards keep their sizes.
    cache(model, data, tmp_path / "squares", "--train_batch_size", 12, "--aspect_ratio_buckets")
    (tmp_path / "squares" / "b.parquet").unlink()
    cache(model, data, tmp_path / "squares", "--train_batch_size", 8, "--aspect_ratio_buckets")
    for path in (tmp_path / "squares").glob("*.parquet"):
        assert latents_metadata(pq.read_metadata(path))["sizes"] == [[16, 16]]
    cache(model, data, tmp_path / "plain")
    for sizes in ((), ("20x12",)):
        config = config_of(
            model, tmp_path / "plain", tmp_path / "x", random_crop=False, aspect_ratio_buckets=sizes
        )
        with pytest.raises(SystemExit):
            run_trainer(config, monkeypatch)
        assert "contains latents of --aspect_ratio_buckets 16x16; use" in capsys.readouterr().err
