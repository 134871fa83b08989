"""Reports and uploads: metrics, resuming them, wandb offline, the model card, the hub."""

import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import ROOT
from hub_upload_server import UploadHub
from huggingface_hub import ModelCard
from PIL import ExifTags, Image

from dataloading.images import load_image
from generating.captions import LINE_HEIGHT
from training import report
from training.report import (
    MetricsLog,
    drop_step_images,
    validation_grid,
    write_model_card,
    write_progress,
)

TOKEN = "hf_stand_in_5f0c"


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def image(color, size=(64, 48)):
    return Image.new("RGB", size, color)


# metrics.jsonl


def test_rows_are_on_disk_at_once(tmp_path):
    log = MetricsLog(tmp_path, {})
    log.write({"step": 1, "loss": 0.5, "ema_decay": None})
    assert rows_of(tmp_path) == [{"step": 1, "loss": 0.5, "ema_decay": None}]
    log.write({"step": 2, "loss": 0.25, "ema_decay": None})
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 2]
    assert "wandb_run_id" not in os.listdir(tmp_path)


@pytest.mark.parametrize(
    "torn", ["", '{"step": 4', '{"step": 4, "loss": 0.4}', "\0\0\0", '{"mine": 1}\n3']
)
def test_resume_drops_what_is_repeated(tmp_path, torn):
    log = MetricsLog(tmp_path, {})
    for step in range(1, 4):
        log.write({"step": step, "loss": 1 / step})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(torn)
    MetricsLog(tmp_path, {}, first_step=2).write({"step": 3, "loss": 7.0})
    assert rows_of(tmp_path) == [
        {"step": 1, "loss": 1.0},
        {"step": 2, "loss": 0.5},
        {"step": 3, "loss": 7.0},
    ]


def test_new_run_starts_empty(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    (tmp_path / "loss.png").touch()
    MetricsLog(tmp_path, {})
    assert rows_of(tmp_path) == []
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_the_plot_shows_all_losses(tmp_path):
    """Drawn meanwhile and at the end; a full disk or a missing matplotlib costs only the plot."""
    log = MetricsLog(tmp_path, {})
    log.draw()
    log.plot.result()  # nothing to draw yet
    sizes = set()
    for step, loss in ((1, 2.0), (2, 1.0), (40, 0.5)):
        log.write({"step": step, "loss": loss})
        log.draw()
        log.plot.result()
        sizes.add((tmp_path / "loss.png").read_bytes())
    assert len(sizes) == 3  # each row changes it
    log.finish_plot()
    with Image.open(tmp_path / "loss.png") as plot:
        colors = plot.convert("RGB").getcolors(maxcolors=100_000)
    assert sum(blue > red + 100 for _, (red, _, blue) in colors)  # the lines
    (tmp_path / "loss.png").unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib.figure", None)
        report.draw_losses(tmp_path / "metrics.jsonl")
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


@pytest.mark.parametrize("failure", ["full disk", "no number"])
def test_a_plot_that_fails_does_not_fail_the_run(tmp_path, monkeypatch, caplog, failure):
    """At any checkpoint and at the end; one line says why."""
    log = MetricsLog(tmp_path, {})
    log.write({"step": 1, "loss": 1.0 if failure == "full disk" else {}})
    if failure == "full disk":
        monkeypatch.setattr(report, "save_whole", full_disk)
    for _ in range(2):
        log.draw()
        assert log.plot.result() is None
    log.finish_plot()
    (line,) = caplog.messages
    assert line.startswith("loss.png cannot be drawn: ")
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_rows_without_a_loss_are_not_in_the_plot(tmp_path, caplog):
    log = MetricsLog(tmp_path, {})
    for row in ({"step": 1}, {"step": 2, "loss": 1.0}, {"step": 3}):
        log.write(row)
    log.finish_plot()
    assert (tmp_path / "loss.png").exists() and not caplog.messages


def full_disk(*args):
    raise OSError("no space left on device")


@pytest.mark.parametrize(("num_rows", "span"), [(3, 5), (20, 5), (200, 10)])
def test_smoothed_losses(num_rows, span):
    """The closed form of an unbiased exponential average, over five rows in short runs."""
    values = np.random.default_rng(0).uniform(size=num_rows)
    decay = 1 - 1 / span
    for n, found in enumerate(report.smoothed(list(values)), start=1):
        weights = decay ** np.arange(n)[::-1]
        assert found == pytest.approx(weights @ values[:n] / weights.sum())


def test_wandb_is_imported_only_if_asked_for():
    code = "import sys, training.report; sys.exit('wandb' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


# wandb

WANDB_RUN = """
import sys
from pathlib import Path
from PIL import Image
from training.report import MetricsLog
folder, first_step, last_step = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
options = {"report_to": "wandb", "project": "test", "first_step": first_step}
try:
    log = MetricsLog(folder, {"learning_rate": 5e-5}, **options)
except ValueError as error:
    sys.exit(f"error: {error}")
for step in range(first_step + 1, last_step + 1):
    log.write({"step": step, "loss": 1 / step, "lr": 5e-5, "ema_decay": None})
log.images("validation", folder / f"{step}.png", "make it red", step)
log.close()
"""


def run_wandb(folder, first_step, last_step, **env):
    env = {"PATH": os.environ["PATH"], "HOME": str(folder), "WANDB_MODE": "offline"} | env
    command = [sys.executable, "-c", WANDB_RUN, str(folder), str(first_step), str(last_step)]
    return subprocess.run(
        command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )


def wandb_records(file):
    """Records of a .wandb file: LevelDB's log format after a header of 7 bytes, holding protobuf.

    Source: LevelDB, doc/log_format.md.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    data, block = file.read_bytes(), 32768
    assert data[:4] == b":W&B"
    position, parts, records = 7, b"", []
    while position + 7 <= len(data):
        if block - position % block < 7:  # no room for a header: the rest of the block is padding
            position += block - position % block
            continue
        length = int.from_bytes(data[position + 4 : position + 6], "little")
        kind = data[position + 6]  # 1 whole, 2 first, 3 middle, 4 last
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            records.append(Record.FromString(parts))
            parts = b""
    return records


def history(records):
    """What was logged, a list of dicts, without wandb's own entries."""
    rows = []
    for record in records:
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            row = {
                item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items
            }
            rows.append({key: row[key] for key in row if not key.startswith("_")})
    return rows


@pytest.mark.slow
def test_wandb_offline_and_resumed(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3), np.uint8)
    for step, array in zip((3, 4), pixels):
        Image.fromarray(array).save(tmp_path / f"{step}.png")
    done = run_wandb(tmp_path, 0, 3)
    assert done.returncode == 0, done.stderr
    first_id = (tmp_path / "wandb_run_id").read_text()
    done = run_wandb(tmp_path, 2, 4)  # stopped after step 3; the last checkpoint was step 2
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "wandb_run_id").read_text() == first_id
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 2, 3, 4]

    files = sorted(tmp_path.glob(f"wandb/offline-run-*/run-{first_id}.wandb"))
    assert len(files) == 2
    for file, steps, array in zip(files, ([1, 2, 3], [3, 4]), pixels):
        records = wandb_records(file)
        rows = history(records)
        losses = [row for row in rows if "loss" in row]
        assert [row["step"] for row in losses] == steps
        np.testing.assert_allclose([row["loss"] for row in losses], [1 / s for s in steps])
        assert {row["lr"] for row in losses} == {5e-5}
        (shown,) = [row for row in rows if "validation.path" in row]
        assert shown["step"] == steps[-1]
        assert shown["validation.caption"] == "make it red"
        media = file.parent / "files" / shown["validation.path"]
        np.testing.assert_array_equal(np.asarray(Image.open(media)), array)
        axes = {
            metric.glob_name: metric.step_metric
            for metric in (r.metric for r in records if r.WhichOneof("record_type") == "metric")
        }
        assert axes["*"] == "step"
        (run,) = [r.run for r in records if r.WhichOneof("record_type") == "run"][:1]
        config = {item.key: json.loads(item.value_json) for item in run.config.update}
        assert run.project == "test"
        assert config["learning_rate"] == 5e-5


@pytest.mark.slow
def test_wandb_without_login(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    done = run_wandb(tmp_path, 0, 1, WANDB_MODE="online")
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "wandb login" in line and "WANDB_MODE=offline" in line
    assert len(rows_of(tmp_path)) == 1  # nothing of an earlier run is lost for it


# images


def test_validation_grid():
    pairs = [(image("red"), image("lime")), (image("blue", (30, 60)), image("black"))]
    prompts = ["make it green", "a long instruction that does not fit into a single line"]
    grid = np.asarray(validation_grid(pairs, prompts))
    # Enlarged from 64x48 to 256x192, with margins of 8.
    assert grid.shape[1] == 8 + 2 * 256 + 8
    height = (len(grid) - 8) // 2
    assert height >= 192 + LINE_HEIGHT + 8
    margins = (grid[:8], grid[-8:], grid[:, :8], grid[:, -8:], grid[height : height + 8])
    assert all((margin == 255).all() for margin in margins)
    assert (grid[8:200, 8:264] == (255, 0, 0)).all()
    assert (grid[8:200, 264:520] == (0, 255, 0)).all()
    for row in range(2):
        caption = grid[200 + row * height : (row + 1) * height]
        assert (caption < 64).any()
    second = grid[8 + height : 200 + height]
    assert (second[:, 90:182] == (0, 0, 255)).all()  # narrower: white at its sides
    assert (second[:, 8:80] == 255).all()
    assert (second[:, 264:520] == 0).all()


def test_large_validation_images_keep_their_size():
    grid = validation_grid([(image("red", (300, 300)), image("lime", (300, 300)))] * 8, ["x"] * 8)
    assert grid.width == 2 * (600 + 8) + 8  # two columns


def test_validation_grid_shows_its_own_instruction():
    pair = [(image("red"), image("red"))]
    one, other = (np.asarray(validation_grid(pair, [text])) for text in ("abc", "xyz"))
    assert one.shape == other.shape and (one != other).any()
    np.testing.assert_array_equal(one[:200], other[:200])
    assert np.asarray(validation_grid(pair, [""])).shape == one.shape


def test_progress_shows_the_images_of_all_steps(tmp_path, monkeypatch):
    """Sorted by number, on frames of one size; frames after a step can be dropped."""
    for step, color, size in (
        (5, "red", (80, 80)),
        (1000, "blue", (60, 80)),
        (50, "lime", (80, 40)),
    ):
        image(color, size).save(tmp_path / f"step-{step:02d}.png")
    (tmp_path / "step-best.png").write_bytes(b"not ours")
    line, gif = LINE_HEIGHT, tmp_path / "progress.gif"

    def frames():
        with Image.open(gif) as animation:
            for k in range(animation.n_frames):
                animation.seek(k)
                yield np.asarray(animation.convert("RGB")), animation.info["duration"]

    write_progress(tmp_path)
    shown, durations = zip(*frames())
    assert durations == (500, 500, 2000)
    assert [frame.shape for frame in shown] == [(80 + line, 80, 3)] * 3
    for frame, color in zip(shown, ((255, 0, 0), (0, 255, 0), (0, 0, 255))):
        assert (frame[:40, :60] == color).all()
    assert (shown[1][40:80] == 255).all() and (shown[2][:80, 60:] == 255).all()
    monkeypatch.setattr(report, "GIF_FRAMES", 2)
    write_progress(tmp_path)
    assert [tuple(frame[0, 0]) for frame, _ in frames()] == [(255, 0, 0), (0, 0, 255)]
    drop_step_images(tmp_path, 50)
    assert [tuple(frame[0, 0]) for frame, _ in frames()] == [(255, 0, 0), (0, 255, 0)]
    drop_step_images(tmp_path, 0)
    assert os.listdir(tmp_path) == ["step-best.png"]


def test_progress_names_its_step(tmp_path):
    """The step is drawn below the image, whole."""
    for step in (1, 2):
        image("red", (64, 48)).save(tmp_path / f"step-{step}.png")
    write_progress(tmp_path)
    captions = []
    with Image.open(tmp_path / "progress.gif") as animation:
        for k in range(2):
            animation.seek(k)
            captions.append(np.asarray(animation.convert("L"))[48:])
    assert all((x < 64).any() and (x[-1] == 255).all() for x in captions)
    assert (captions[0] != captions[1]).any()


TURNED = [  # by EXIF orientation, from 1: how the pixels of a file are to be seen
    lambda x: x,
    lambda x: x[:, ::-1],
    lambda x: x[::-1, ::-1],
    lambda x: x[::-1],
    lambda x: x.swapaxes(0, 1),
    lambda x: np.rot90(x, -1),
    lambda x: x[::-1, ::-1].swapaxes(0, 1),
    lambda x: np.rot90(x),
]


def test_images_are_turned_as_exif_says(tmp_path):
    pixels = np.arange(6 * 4 * 3, dtype=np.uint8).reshape(6, 4, 3)
    for orientation, turned in enumerate(TURNED, start=1):
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = orientation
        Image.fromarray(pixels).save(tmp_path / "a.png", exif=exif)
        np.testing.assert_array_equal(np.asarray(load_image(tmp_path / "a.png")), turned(pixels))


def test_files_that_are_no_image_are_named(tmp_path, monkeypatch):
    """Also files of which Pillow can read only the header."""
    whole = tmp_path / "a.jpg"
    pixels = np.random.default_rng(0).integers(0, 256, (48, 64, 3), np.uint8)
    Image.fromarray(pixels).save(whole)
    half = whole.read_bytes()[: whole.stat().st_size // 2]
    damaged = {
        "text.png": (b"no image", "cannot be read as an image: no known image format"),
        "empty.png": (b"", "cannot be read as an image: no known image format"),
        "cut.jpg": (half, "cannot be read as an image: Premature end"),
        "bad.ppm": (b"P6 1x 1 255 123", "cannot be read as an image: "),
    }
    for name, (content, _) in damaged.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder").mkdir()
    cases = {name: message for name, (_, message) in damaged.items()}
    cases |= {"folder": "cannot be read as an image", "none.png": "does not exist; check the path"}
    for name, message in cases.items():
        with pytest.raises(ValueError, match=f"^{tmp_path / name} {message}"):
            load_image(tmp_path / name)
    (tmp_path / "large.pgm").write_bytes(b"P5 15000 10001 255\n")
    with pytest.raises(ValueError, match=r"large\.pgm cannot be read as an image: 15000x10001 pix"):
        load_image(tmp_path / "large.pgm")


@pytest.mark.parametrize(
    ("family", "num_steps", "flags", "expected"),
    [  # the rows of docs/editing.md
        ("", 10_000, (None, None), (7.5, 1.5)),
        ("XL", 10_000, (None, None), (3.0, 1.5)),
        ("CosXL", 10_000, (None, None), (7.0, 1.5)),
        ("XL", 1_000, (None, None), (2.0, 1.2)),
        ("", 10_000, (None, 1.0), (7.5, 1.0)),
        ("", 1_000, (0.0, None), (0.0, 1.2)),
    ],
)
def test_guidance_scales_of_validation(family, num_steps, flags, expected):
    config = SimpleNamespace(
        train_batch_size=16,
        validation_guidance_scale=flags[0],
        validation_image_guidance_scale=flags[1],
    )
    pipeline = SimpleNamespace(
        torch_class_name=f"StableDiffusion{family[-2:]}InstructPix2PixPipeline",
        is_cosxl_edit=family == "CosXL",
    )
    assert report.guidance_scales(config, pipeline, num_steps) == expected


# the model card


def card_of(folder, **changes):
    options = {
        "name": "tester/model",
        "command": "python flax_train_instruct_pix2pix.py --validation_prompt 'make it | red'",
        "config": {
            "pretrained_model_name_or_path": "stable-diffusion-v1-5/stable-diffusion-v1-5",
            "train_data_dir": ("data",),
            "learning_rate": 5e-5,
            "resolution": 256,
            "validation_prompt": "make it\n| red",
            "variant": None,
        },
        "metrics": {"step": 50, "loss": 0.12345678},
        "image": "validation/step-50.png",
    }
    write_model_card(folder, **(options | changes))
    return ModelCard.load(folder / "README.md")


def test_model_card(tmp_path):
    card = card_of(tmp_path)
    assert card.data.base_model == "stable-diffusion-v1-5/stable-diffusion-v1-5"
    assert card.data.library_name == "diffusers"
    assert card.data.pipeline_tag == "image-to-image"
    assert {"stable-diffusion", "instruct-pix2pix", "jax"} <= set(card.data.tags)
    assert card.data.license is None
    lines = card.text.splitlines()
    assert "python flax_train_instruct_pix2pix.py --validation_prompt 'make it | red'" in lines
    assert "| learning_rate | `5e-05` |" in lines
    assert r"| validation_prompt | `'make it\n\| red'` |" in lines
    assert "| loss | `0.1235` |" in lines and "| step | `50` |" in lines
    assert "loss.png" not in card.text
    (tmp_path / "loss.png").touch()
    assert "](loss.png)" in card_of(tmp_path).text
    (tmp_path / "loss.png").unlink()
    assert "](validation/step-50.png)" in card.text
    assert os.listdir(tmp_path) == ["README.md"]


def test_model_card_code_runs_as_python_and_shell(tmp_path):
    name = "out/my model's"
    text = card_of(tmp_path, name=name).text
    python = text.split("```python\n")[1].split("```")[0]
    compile(python, "card", "exec")
    assert json.dumps(name) in python
    shell = text.split("```sh\n")[1].split("```")[0]
    words = shlex.split(shell)
    assert words[:4] == ["python", "edit_cli.py", "--model", name]
    assert (ROOT / "edit_cli.py").exists()


def test_model_card_of_a_local_base_model(tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    card = card_of(
        tmp_path,
        config={
            "pretrained_model_name_or_path": str(base),
            "train_data_dir": ("data",),
            "resolution": 256,
        },
        metrics=None,
        image=None,
    )
    assert "base_model" not in card.data.to_dict()
    assert "![" not in card.text and "metrics" not in card.text


# the hub

PUBLISH = """
import sys
from training.output import check_hub, push_to_hub
try:
    print(push_to_hub(sys.argv[1], check_hub(sys.argv[2] or None, sys.argv[1])))
except ValueError as error:
    sys.exit(f"error: {error}")
"""

CHECKS = """
import json, os, sys
from training.output import check_hub
for repo_id, os.environ["HF_TOKEN"] in json.loads(sys.argv[2]):
    try:
        print(check_hub(repo_id, sys.argv[1]))
    except ValueError as error:
        print(error)
"""

PUBLISHED = {
    "README.md": b"---\ntags:\n- jax\n---\n# model\n",
    "model_index.json": b"{}",
    "config.json": b"{}",
    "metrics.jsonl": b'{"step": 1}\n',
    "unet/config.json": b"{}",
    "unet/diffusion_pytorch_model.safetensors": np.random.default_rng(0).bytes(300_000),
    "vae/diffusion_pytorch_model.safetensors": np.random.default_rng(1).bytes(1000),
    "validation/step-1.png": np.random.default_rng(2).bytes(500),
}
KEPT = [
    "checkpoints/100/params/shard.bin",
    "ema_snapshots/100.safetensors",
    "unet_raw/diffusion_pytorch_model.safetensors",
    "profile/plugins/trace.json.gz",
    "wandb/offline-run-1/run-1.wandb",
    "wandb_run_id",
    ".metrics.jsonl.part",
    "unet/.saving-abc/diffusion_pytorch_model.safetensors",
]


@pytest.fixture
def model_folder(tmp_path):
    folder = tmp_path / "my-model"
    for path, content in PUBLISHED.items() | {path: b"kept" for path in KEPT}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return folder


def hub_environment(endpoint, folder):
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(folder.parent / "home"),  # nobody's stored token
        "HF_ENDPOINT": endpoint,
        "HF_TOKEN": TOKEN,
        "HF_HUB_DISABLE_XET": "1",  # the stand-in stores over LFS
        "HF_HUB_DISABLE_UPDATE_CHECK": "1",
        "NO_PROXY": "127.0.0.1",
    }


def run_hub(endpoint, code, folder, argument):
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder), argument],
        cwd=ROOT,
        env=hub_environment(endpoint, folder),
        capture_output=True,
        text=True,
    )
    assert "hf_" not in done.stdout + done.stderr  # no token is shown
    assert "Traceback" not in done.stderr
    return done


def publish(endpoint, folder, repo_id=""):
    """Run check_hub and push_to_hub; returns the finished process."""
    return run_hub(endpoint, PUBLISH, folder, repo_id)


def check(endpoint, folder, *calls):
    """Run check_hub once per (repo_id, token); returns the lines it gave or raised."""
    lines = run_hub(endpoint, CHECKS, folder, json.dumps(calls)).stdout.splitlines()
    assert len(lines) == len(calls)
    return lines


def error_line(done):
    assert done.returncode == 1
    return done.stderr.splitlines()[-1].removeprefix("error: ")


@pytest.mark.slow
def test_upload(model_folder):
    with UploadHub({TOKEN: "write"}) as hub:
        done = publish(hub.endpoint, model_folder)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == f"{hub.endpoint}/tester/my-model"
        assert hub.repos == {"tester/my-model": PUBLISHED}
        large = {c for path, c in PUBLISHED.items() if path.endswith((".safetensors", ".png"))}
        assert set(hub.lfs.values()) == large
        changed = model_folder / "unet" / "diffusion_pytorch_model.safetensors"
        changed.write_bytes(b"another training")
        done = publish(hub.endpoint, model_folder, "tester/my-model")  # it exists by now
        assert done.returncode == 0, done.stderr
        files = hub.repos["tester/my-model"]
        assert files == PUBLISHED | {str(changed.relative_to(model_folder)): b"another training"}
    for file in model_folder.rglob("*"):
        assert not file.is_file() or TOKEN.encode() not in file.read_bytes()


@pytest.mark.slow
def test_failed_upload_tells_the_way_by_hand(model_folder):
    with UploadHub({TOKEN: "write"}) as hub:
        hub.failures["/commit/main"] = [(500, {"error": "disk on fire"})]
        line = error_line(publish(hub.endpoint, model_folder))
        assert f"the model is in {model_folder}" in line and "disk on fire" in line
        assert hub.repos == {"tester/my-model": {}}
        command = shlex.split(line.split("later: ")[1])
        assert command[0] == "hf"
        command[0] = str(Path(sys.executable).parent / "hf")
        subprocess.run(
            command,
            env=hub_environment(hub.endpoint, model_folder),
            cwd=model_folder.parent,
            check=True,
            capture_output=True,
        )
        assert hub.repos == {"tester/my-model": PUBLISHED}


@pytest.mark.slow
def test_failed_file_tells_why(model_folder):
    with UploadHub({TOKEN: "write"}) as hub:
        hub.failures["/lfs/verify"] = [(403, {"error": "quota exceeded"})]
        line = error_line(publish(hub.endpoint, model_folder))
    assert "the model is in" in line and "quota exceeded" in line


@pytest.mark.slow
def test_check_before_training(tmp_path):
    read_token = "hf_read"
    with UploadHub({TOKEN: "write", read_token: "read"}) as hub:
        calls = {
            "new": (None, TOKEN),
            "again": ("not-yet-there", TOKEN),
            "of somebody": ("somebody/model", TOKEN),
            "bad name": ("no such name", TOKEN),
            "wrong token": ("model", "hf_wrong"),
            "no token": ("model", ""),
            "torn token": ("model", "hf_tor\x0bn"),
            # Finds the repository that is there: the upload would fail, a day later.
            "read token": ("not-yet-there", read_token),
            "read token, new": ("another", read_token),
        }
        lines = dict(zip(calls, check(hub.endpoint, tmp_path / "not-yet-there", *calls.values())))
        assert hub.repos == {"tester/not-yet-there": {}}
    assert lines["new"] == lines["again"] == "tester/not-yet-there"
    assert "You may not create somebody/model" in lines["of somebody"]
    assert lines["bad name"].startswith("--hub_model_id tester/no such name: ")
    assert "HF_TOKEN environment variable is invalid" in lines["wrong token"]
    assert "nobody is logged in" in lines["no token"]
    assert "contains an invalid character" in lines["torn token"]
    assert "the token of tester is read-only" in lines["read token"]
    assert "You may not create tester/another" in lines["read token, new"]
    for name in calls.keys() - {"new", "again", "bad name"}:
        assert "run `hf auth login` or set HF_TOKEN" in lines[name]


@pytest.mark.slow
def test_hub_out_of_order(tmp_path):
    with UploadHub({TOKEN: "write"}) as hub:
        hub.failures["/api/whoami-v2"] = [(500, {}), (200, b"<html>not the hub</html>")]
        lines = check(hub.endpoint, tmp_path, ("model", TOKEN), ("model", TOKEN))
        assert hub.failures["/api/whoami-v2"] == [] and hub.repos == {}
    for line in lines:
        assert hub.endpoint in line and "check network and HF_ENDPOINT" in line
    assert "500" in lines[0]


@pytest.mark.slow
def test_hub_unreachable(tmp_path):
    with socket.socket() as nobody_listens:
        nobody_listens.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{nobody_listens.getsockname()[1]}"
        (line,) = check(endpoint, tmp_path, ("model", TOKEN))
    assert endpoint in line and "check network and HF_ENDPOINT" in line
