"""cache_latents.py: latents against PyTorch's, training on them, incompatible flags."""

import dataclasses
import shutil
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from diffusers import AutoencoderKL
from known_sets import write_known
from shards import open_pairs
from tiny_models import make_tiny_pipeline
from trainer_runs import SIZE, config_of, read_metrics, run_trainer

import cache_latents
import flax_train_instruct_pix2pix as trainer
import parquet_processing
from cache_latents import Config
from diffusers_flax.data import decoding
from diffusers_flax.data.options import Columns
from diffusers_flax.data.shards import list_row_groups, pair_at, read_row_group, shard_ids
from diffusers_flax.models.vae import FlaxAutoencoderKL
from diffusers_flax.training import latents as training_latents
from diffusers_flax.training.latents import write_latents
from diffusers_flax.training.models import encode_images

pytestmark = pytest.mark.usefixtures("lenient_optimizer")


def config_for(model, data, output_dir, **options):
    options = {"resolution": 16, "batch_size": 1, **options}
    names = ("pretrained_model_name_or_path", "train_data_dir", "output_dir")
    return Config(**dict(zip(names, (str(model), (str(data),), str(output_dir)))), **options)


def fill(config):
    write_latents(config, config.output_dir, Columns(), config.batch_size)


@pytest.fixture(scope="module")
def kept(model, data, tmp_path_factory):
    """Latents of the data."""
    folder = tmp_path_factory.mktemp("latents") / "kept"
    fill(config_for(model, data, folder))
    return folder


def test_latents_are_pytorchs(model, data, kept):
    """Of every image and its mirror image, in the rows of the source."""
    vae = AutoencoderKL.from_pretrained(model / "vae")
    for source in list_row_groups(str(data)):
        group = next(g for g in list_row_groups(str(kept)) if g.path.name == source.path.name)
        assert group.num_rows == source.num_rows
        originals, edits = read_row_group(source), read_row_group(group)
        for row in range(group.num_rows):
            pair, ours = pair_at(originals, row), pair_at(edits, row)
            assert ours.instruction == pair.instruction
            if (source.path.name, row) == ("a.parquet", 3):
                assert ours.original is ours.edited is None
                continue
            pixels = np.empty((2, 16, 16, 3), np.uint8)
            decoding.decode_pair(pair, tuple(pixels), "dct", 0.5, False)
            both = np.stack((pixels, pixels[:, :, ::-1]), 1).reshape(4, 16, 16, 3)
            images = torch.from_numpy(both.copy()).permute(0, 3, 1, 2) / 127.5 - 1
            with torch.no_grad():
                posterior = vae.encode(images).latent_dist
            mean, std = (
                x.permute(0, 2, 3, 1).unflatten(0, (2, 2)).numpy()
                for x in (posterior.mean, posterior.std)
            )
            found = np.frombuffer(ours.original, np.float16).reshape(mean[0].shape)
            np.testing.assert_allclose(found, mean[0], rtol=2e-3, atol=1e-3)
            found = np.frombuffer(ours.edited, np.float16).reshape(2, *mean.shape[2:4], -1)
            expected = np.concatenate((mean[1], std[1]), -1)
            np.testing.assert_allclose(found, expected, rtol=2e-3, atol=1e-3)


def test_batches_are_flipped_as_images_are(model, data, kept):
    """Same rows, order, mirror images and replacement of the broken pair."""
    options = dict(batch_size=8, resolution=16, seed=1, random_crop=False)
    images, latents = (open_pairs(str(folder), **options) for folder in (data, kept))
    vae, params = FlaxAutoencoderKL.from_pretrained(model, subfolder="vae")
    encode = jax.jit(lambda images: encode_images(vae, params, images))
    for _ in range(2):  # epochs
        for ours, theirs in zip(latents, images, strict=True):
            assert ours["edit_prompt"] == theirs["edit_prompt"]
            original = encode(theirs["original_pixel_values"])
            edited = encode(theirs["edited_pixel_values"])
            expected = np.concatenate((edited.mean, edited.std), -1)
            assert ours["original_latents"].dtype == ours["edited_latents"].dtype == np.float16
            close = partial(np.testing.assert_allclose, rtol=2e-3, atol=1e-3)
            close(ours["original_latents"], original.mean)
            close(ours["edited_latents"], expected)
    assert images.num_bad == latents.num_bad > 0


@pytest.mark.slow
def test_all_instructions_of_a_pair_are_kept(model, tmp_path):
    """Each epoch draws from them, as it does without cached latents."""
    folder = write_known(tmp_path / "data", "TIGER-Lab/OmniEdit-Filtered-1.2M")
    fill(config_for(model, folder, tmp_path / "latents"))
    options = dict(batch_size=8, resolution=16, random_crop=False)
    images, latents = (open_pairs(str(path), **options) for path in (folder, tmp_path / "latents"))
    assert images.state_dict()["columns"] == latents.state_dict()["columns"]
    epochs = [
        [batch["edit_prompt"] for _ in range(4) for batch in dataset]
        for dataset in (images, latents)
    ]
    assert epochs[0] == epochs[1] and len(set(map(tuple, map(sorted, epochs[0])))) > 1


def test_latents_are_known_as_their_images(data, kept):
    """A run may resume with or without them, and several hosts draw the same random numbers."""
    states = [
        open_pairs(str(folder), batch_size=8, resolution=16, random_crop=False).state_dict()
        for folder in (data, kept)
    ]
    assert states[0].pop("latents") is None and states[1].pop("latents")
    assert states[0] == states[1]
    shards = [shard_ids(list_row_groups(str(folder))).keys() for folder in (data, kept)]
    assert shards[0] == shards[1]


@pytest.mark.slow
def test_training_is_the_same(model, data, tmp_path, monkeypatch):
    """With latents that the trainer makes or finds, with their directory as data, and without."""
    losses, folder = [], tmp_path / "latents"
    options = {"random_crop": False, "ema": "none"}
    cached = config_of(model, data, tmp_path / "cached", cache_latents=str(folder), **options)
    for config in (
        config_of(model, data, tmp_path / "plain", **options),
        cached,
        config_of(model, folder, tmp_path / "from latents", **options),
    ):
        run_trainer(config, monkeypatch)
        losses.append([line["loss"] for line in read_metrics(Path(config.output_dir))])
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-3)
    assert losses[2] == losses[1]

    before = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert before.keys() == {"a.parquet", "b.parquet"}
    found = trainer.open_dataset(cached)
    assert before == {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    for ours, expected in zip(found, trainer.open_dataset(config), strict=True):
        np.testing.assert_array_equal(ours["edited_latents"], expected["edited_latents"])


def test_what_was_finished_is_kept(model, data, tmp_path, monkeypatch):
    folder, write = tmp_path / "latents", training_latents.write_shard

    def write_until_b(path, *args):
        if path.name == "b.parquet":
            raise KeyboardInterrupt
        write(path, *args)

    monkeypatch.setattr(training_latents, "write_shard", write_until_b)
    flags = ["--pretrained_model_name_or_path", str(model), "--train_data_dir", str(data)]
    flags += ["--output_dir", str(folder), "--resolution", "16"]
    with pytest.raises(SystemExit) as ended:
        cache_latents.main(flags)
    assert ended.value.code == 130
    assert [file.name for file in folder.iterdir()] == ["a.parquet"]
    before = (folder / "a.parquet").stat().st_mtime_ns
    monkeypatch.undo()
    cache_latents.main(flags)
    assert sorted(file.name for file in folder.iterdir()) == ["a.parquet", "b.parquet"]
    assert (folder / "a.parquet").stat().st_mtime_ns == before


def test_processes_that_share_a_folder_share_the_work(model, data, tmp_path, monkeypatch):
    """The second process begins with the second shard and skips finished ones."""
    folder, write, written = tmp_path / "latents", training_latents.write_shard, []

    def write_both(path, *args):
        written.append(path.name)
        write(path, *args)
        if path.name == "b.parquet":  # by the other process meanwhile
            shutil.copy(path, path.with_name("a.parquet"))

    monkeypatch.setattr(training_latents, "write_shard", write_both)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    fill(config_for(model, data, folder))
    assert written == ["b.parquet"]


@pytest.mark.slow
def test_too_many_broken_pairs(model, data, tmp_path, monkeypatch):
    monkeypatch.setattr(training_latents, "MIN_ROWS_FOR_BAD_FRACTION", 1)
    with pytest.raises(ValueError, match=r"1 of the first . pairs of .* cannot be used"):
        fill(config_for(model, data, tmp_path / "latents", max_bad_fraction=0.1))
    assert not any((tmp_path / "latents").iterdir())


def test_a_full_disk_leaves_nothing(model, data, tmp_path, monkeypatch):
    def full(*args, **options):
        raise OSError("No space left on device")

    monkeypatch.setattr(pq.ParquetWriter, "write_table", full)
    with pytest.raises(OSError, match="the disk is full"):
        fill(config_for(model, data, tmp_path / "latents"))
    assert not any((tmp_path / "latents").iterdir())


def test_a_trial_of_few_pairs_encodes_few(model, data, tmp_path):
    fill(config_for(model, data, tmp_path / "latents", max_train_samples=5))
    assert [file.name for file in (tmp_path / "latents").iterdir()] == ["a.parquet"]
    (tmp_path / "latents" / "._a.parquet").write_bytes(b"of macOS")
    fill(config_for(model, data, tmp_path / "latents"))
    assert len(list((tmp_path / "latents").glob("[!.]*"))) == 2


def test_latents_of_other_settings_are_replaced_on_request(model, data, kept, tmp_path):
    """The result is the same as in a new directory; foreign files stay."""
    folder, new = tmp_path / "copy", tmp_path / "new"
    shutil.copytree(kept, folder)
    (folder / "notes.txt").write_text("mine")
    config = config_for(model, data, new, image_interpolation_mode="bicubic")
    fill(config)
    flags = dataclasses.asdict(dataclasses.replace(config, output_dir=str(folder)))
    flags["train_data_dir"] = data
    flags = [f"--{name}={value}" for name, value in flags.items() if value not in (None, False)]
    cache_latents.main([*flags, "--overwrite_output_dir"])
    files = {file.name: file.read_bytes() for file in new.iterdir()}
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == files | {
        "notes.txt": b"mine"
    }
    assert files["a.parquet"] != (kept / "a.parquet").read_bytes()


@pytest.mark.variants
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            dict(resolution=32),
            "was made with other settings (resolution was 16 and is 32; shape was",
        ),
        (dict(pretrained_model_name_or_path="OTHER"), "was made with other settings (vae was"),
        (dict(train_data_dir="FEWER"), "b.parquet matches no shard in"),
        (dict(train_data_dir="KEPT", output_dir="NEW"), "already has latents; train on it"),
        (dict(output_dir="DATA"), "is --train_data_dir; name another directory"),
        (  # checked before anything is asked or read
            dict(mask_column="mask", pretrained_model_name_or_path="NONE"),
            "--mask_column mask goes with --cache_masks; add it",
        ),
    ],
)
def test_what_does_not_go_together(model, data, kept, tmp_path, capsys, options, message):
    places = {"DATA": data, "KEPT": kept, "NEW": tmp_path / "new", "NONE": tmp_path / "none"}
    for name in ("FEWER", "COPY"):
        places[name] = tmp_path / name
        shutil.copytree(data, places[name])
    (places["FEWER"] / "b.parquet").unlink()
    if "OTHER" in options.values():
        places["OTHER"] = make_tiny_pipeline(tmp_path / "other", seed=5, **SIZE)
    before = {file: file.read_bytes() for file in (*data.iterdir(), *kept.iterdir())}
    named = dict(
        pretrained_model_name_or_path=model, train_data_dir=data, output_dir=kept, resolution=16
    )
    named |= {name: places.get(value, value) for name, value in options.items()}
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        cache_latents.main([f"--{name}={value}" for name, value in named.items()])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error
    assert before == {file: file.read_bytes() for file in before}
    assert not places["NEW"].exists()


def test_what_training_refuses(model, data, kept, tmp_path, monkeypatch, capsys):
    other = make_tiny_pipeline(tmp_path / "other", seed=5, **SIZE)
    mixed = tmp_path / "mixed"
    shutil.copytree(kept, mixed)
    shutil.copy(data / "b.parquet", mixed)
    run = partial(config_of, out=tmp_path / "out", random_crop=False)
    for config, message in (
        (run(model, data, cache_latents="x", random_crop=True), "add --no_random_crop"),
        (
            run(model, kept, random_crop=True),
            "contains latents of the centre of each image (--no_random_crop)",
        ),
        (run(model, kept, resolution=32), "contains latents of --resolution 16, not 32"),
        (run(other, kept), "has latents of another VAE than"),
        (run(model, mixed), "b.parquet does not match the first shard"),
    ):
        with pytest.raises(SystemExit) as ended:
            run_trainer(config, monkeypatch)
        assert ended.value.code == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("error: ") and message in error
    with pytest.raises(SystemExit):
        parquet_processing.main(["--train_data_dir", str(kept)])
    assert "contains latents; name the directory of the images" in capsys.readouterr().err
