"""Files of previews: their names, and which files they may replace."""

import jax
import numpy as np
import pytest
from PIL import Image
from tiny_models import make_tiny_pipeline, make_tiny_xl

import edit_cli
import generate_cli
from diffusers_flax.generating.previews import preview_files
from diffusers_flax.messages import warn_once
from diffusers_flax.pipelines.sampling import count_steps, keys_per_image, timestep_options
from diffusers_flax.schedulers.factory import make_scheduler

DDIM, _ = make_scheduler("ddim", {})


def flags_of(**flags):
    return generate_cli.Config("model", seed=0, num_inference_steps=6, **flags)


def preview_files_of(flags, scheduler, outputs, inputs=()):
    """preview_files as the programs call it."""
    steps = timestep_options(flags.num_inference_steps, flags.timesteps, flags.eta)
    num_steps = count_steps(scheduler, steps)
    keys, sizes = keys_per_image(jax.random.key(0), len(outputs)), [(8, 8)] * len(outputs)
    return preview_files(flags, outputs, num_steps, [*inputs, flags.grid], sizes, keys)


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
        (
            ["--preview", "2", "--preview_decoder", "a", "--accelerate", "taesd"],
            "leave preview.path= out",
        ),
        (["--preview", "51", "--num_inference_steps", "50"], "--preview 51 of 5"),
        (["--preview", "0"], "--preview 0 must be at least 1"),
        (["--preview", "2", "--preview_decoder", "/no/such"], "/no/such"),
        (["--preview_decoder", "/no/such"], "is for --preview; give both or neither"),
    ],
)
@pytest.mark.parametrize("script", [edit_cli, generate_cli])
def test_bad_flags(script, tmp_path, capsys, flags, message):
    model, image = tmp_path / "model", tmp_path / "in.png"
    Image.new("RGB", (32, 32)).save(image)
    if script is edit_cli:
        make_tiny_pipeline(model)
        flags = [*flags, "--model", str(model), "--input", str(image), "--edit", "make it red"]
        flags += ["--resolution", "32"]
    else:
        make_tiny_xl(model)
        flags = [*flags, "--model", str(model), "--prompt", "it"]
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        script.main([*flags, "--output", str(tmp_path / "out.png")])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error
    assert sorted(file.name for file in tmp_path.iterdir()) == ["in.png", "model"]
