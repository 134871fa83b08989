"""Previews: the clean latents that a step predicts, against PyTorch; the scripts' files."""

import dataclasses

import jax
import numpy as np
import pytest
import torch
from flax.jax_utils import replicate
from helpers import images_of, images_of_theirs, open_theirs, psnr, save_tiny_vae, slow
from PIL import Image
from tiny_models import make_tiny_pipeline, make_tiny_xl

import edit_cli
import sdxl_single
from diffusers_flax.acceleration.previews import Preview, preview_files
from diffusers_flax.messages import warn_once
from diffusers_flax.pipelines.base import FlaxDiffusionPipeline
from diffusers_flax.pipelines.sampling import count_steps, keys_per_image, timestep_options
from diffusers_flax.schedulers.factory import make_scheduler

# of torch.Tensor.__array__, called by diffusers' schedulers
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
STEPS = 5


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """(directory of a TAESD for images four times as wide as latents, PyTorch's)."""
    folder = tmp_path_factory.mktemp("tiny")
    return folder, save_tiny_vae(folder, (8, 8, 8))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_pipeline(tmp_path_factory.mktemp("sd"), in_channels=4)


def open_ours(model, scheduler, tiny, every=2):
    """(pipeline, params, {step: (keys, images)} of the previews)."""
    seen = {}

    def show(step, keys, images):
        seen.setdefault(step, []).extend(zip(keys.tolist(), images))

    pipeline, params = FlaxDiffusionPipeline.from_pretrained(
        model, preview=Preview(every, show, str(tiny[0]))
    )
    scheduler, _ = make_scheduler(scheduler, pipeline.scheduler.config)
    return dataclasses.replace(pipeline, scheduler=scheduler), params, seen


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", ["ddim", *slow("euler")])
def test_previews_are_pytorchs(model, tiny, scheduler):
    pipeline, params, seen = open_ours(model, scheduler, tiny)
    image = images_of(pipeline, params, steps=STEPS)
    jax.effects_barrier()
    assert sorted(seen) == [2, 4]  # not after the last step
    plain = images_of(dataclasses.replace(pipeline, preview=None), params, steps=STEPS)
    np.testing.assert_array_equal(image, plain)

    theirs, clean = open_theirs(model, pipeline.scheduler), []
    step = theirs.scheduler.step

    def keep(*args, return_dict=True, **options):
        out = step(*args, **options)
        clean.append(out.pred_original_sample)
        return out if return_dict else out[:1]

    theirs.scheduler.step = keep
    images_of_theirs(theirs, steps=STEPS, guidance_scale=7.5)
    for number in seen:
        with torch.no_grad():
            decoded = tiny[1].decode(clean[number - 1]).sample
        expected = (decoded / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).numpy()
        assert psnr(np.stack([image for _, image in seen[number]]), expected) > 60


@pytest.mark.slow
def test_each_image_of_each_device_has_its_key(model, tiny):
    keys = keys_per_image(jax.random.key(7), 4)
    pipeline, params, seen = open_ours(model, "ddim", tiny)
    ids = np.repeat(pipeline.prepare_inputs("make it red"), 4, axis=0)
    options = dict(num_inference_steps=STEPS, height=32, width=32)
    pipeline(ids, params, keys, **options)
    jax.effects_barrier()
    alone = {step: dict((tuple(key), image) for key, image in rows) for step, rows in seen.items()}
    seen.clear()
    devices = jax.local_devices()[:2]
    pipeline(
        ids.reshape(2, 2, -1), replicate(params, devices), keys.reshape(2, 2), jit=True, **options
    )
    jax.effects_barrier()
    assert {step: len(rows) for step, rows in seen.items()} == {2: 4, 4: 4}
    for step, rows in seen.items():
        for key, image in rows:
            np.testing.assert_allclose(image, alone[step][tuple(key)], atol=1e-4)


def flags_of(**flags):
    return sdxl_single.Config(seed=0, num_inference_steps=6, **flags)


def preview_files_of(flags, scheduler, outputs, inputs=()):
    """preview_files as the programs call it."""
    steps = timestep_options(flags.num_inference_steps, flags.timesteps, flags.eta)
    num_steps, kept = count_steps(scheduler, steps), [*inputs, flags.grid]
    decoder = flags.preview_decoder
    return preview_files(flags.preview, decoder, outputs, num_steps, flags.seed, kept)


DDIM, _ = make_scheduler("ddim", {})


def test_a_preview_that_cannot_be_written_does_not_stop_the_image(tmp_path, caplog):
    warn_once.cache_clear()
    preview = preview_files_of(flags_of(preview=1), DDIM, [tmp_path / "file" / "out.png"])
    (tmp_path / "file").touch()
    key = np.asarray(jax.random.key_data(keys_per_image(jax.random.key(0), 1)))
    preview.show(1, key, np.zeros((1, 8, 8, 3), np.float32))
    assert "a preview cannot be written: " in caplog.text
    (tmp_path / "file").unlink()
    preview.show(2, key, np.zeros((1, 8, 8, 3), np.float32))
    assert (tmp_path / "file" / "out-step-002.png").is_file()


def test_previews_do_not_replace_inputs_or_images(tmp_path):
    output, step_4 = tmp_path / "a.png", tmp_path / "a-step-004.png"
    for flags, outputs, inputs in (
        (flags_of(preview=2), [output], [step_4]),
        (flags_of(preview=4), [output, step_4], []),
        (flags_of(preview=4, grid=step_4), [output], []),
    ):
        with pytest.raises(ValueError, match=r"a-step-004\.png would be replaced by a preview"):
            preview_files_of(flags, DDIM, outputs, inputs)
    preview_files_of(flags_of(preview=3), DDIM, [output, step_4])
    for suffix in (".png", ".jpg"):
        image = output.with_suffix(suffix)
        made = preview_files_of(flags_of(preview=4), DDIM, [image])
        key = keys_per_image(jax.random.key(0), 1)
        made.show(4, jax.random.key_data(key), np.zeros((1, 8, 8, 3), np.float32))
        preview = tmp_path / f"a-step-004{suffix}"
        preview_files_of(flags_of(preview=4), DDIM, [image])  # the preview of an earlier run
        Image.new("RGB", (8, 8)).save(preview)  # an image of somebody else
        with pytest.raises(ValueError, match=f"{preview.name} would be replaced by a preview"):
            preview_files_of(flags_of(preview=4), DDIM, [image])
        preview.unlink()
    step_4.mkdir()
    with pytest.raises(ValueError, match=r"a-step-004\.png would be replaced by a preview"):
        preview_files_of(flags_of(preview=4), DDIM, [output])


@pytest.mark.parametrize(("skip_prk_steps", "number"), [(True, 6), (False, 12)])
def test_steps_that_pndm_repeats_count(tmp_path, skip_prk_steps, number):
    """Six steps of PNDM visit 7 timesteps, with the Runge-Kutta start 15."""
    pndm, _ = make_scheduler("pndm", {"skip_prk_steps": skip_prk_steps})
    output, last = tmp_path / "a.png", tmp_path / f"a-step-{number:03}.png"
    with pytest.raises(ValueError, match=f"{last.name} would be replaced by a preview"):
        preview_files_of(flags_of(preview=3), pndm, [output], [last])
    with pytest.raises(ValueError, match=f"--preview {number + 3} of .* steps makes no preview"):
        preview_files_of(flags_of(preview=number + 3), pndm, [output])


@pytest.mark.variants
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--preview", "2", "--preview_decoder", "a", "--accelerate", "taesd"], "leave --preview_"),
        (["--preview", "51", "--num_inference_steps", "50"], "--preview 51 of 5"),
        (["--preview", "0"], "--preview 0 must be a whole number, at least 1"),
        (["--preview", "2", "--preview_decoder", "/no/such"], "/no/such"),
        (["--preview_decoder", "/no/such"], "is for --preview; give both or neither"),
    ],
)
@pytest.mark.parametrize("script", [edit_cli, sdxl_single])
def test_bad_flags(script, tmp_path, capsys, flags, message):
    model, image = tmp_path / "model", tmp_path / "in.png"
    Image.new("RGB", (32, 32)).save(image)
    if script is edit_cli:
        make_tiny_pipeline(model)
        flags = [*flags, "--model", str(model), "--input", str(image), "--edit", "make it red"]
        flags += ["--resolution", "32"]
    else:
        make_tiny_xl(model)
        flags = [*flags, "--pretrained_model_name_or_path", str(model), "--num_images", "1"]
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        script.main([*flags, "--output", str(tmp_path / "out.png")])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error
    assert sorted(file.name for file in tmp_path.iterdir()) == ["in.png", "model"]
