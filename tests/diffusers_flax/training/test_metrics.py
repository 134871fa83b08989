"""Reports and uploads: metrics, resuming them, wandb offline, the model card, the hub."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from diffusers_flax.training.metrics import MetricsLog
from helpers import ROOT
from PIL import Image

from diffusers_flax.training import metrics
from diffusers_flax.training.ema import NO_AVERAGE
from diffusers_flax.training.sharding import replicate

TOKEN = "hf_stand_in_5f0c"


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


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
        metrics.draw_losses(tmp_path / "metrics.jsonl")
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


@pytest.mark.parametrize("failure", ["full disk", "no number"])
def test_a_plot_that_fails_does_not_fail_the_run(tmp_path, monkeypatch, caplog, failure):
    """At any checkpoint and at the end; one line says why."""
    log = MetricsLog(tmp_path, {})
    log.write({"step": 1, "loss": 1.0 if failure == "full disk" else {}})
    if failure == "full disk":
        monkeypatch.setattr(metrics, "save_whole", full_disk)
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
    for n, found in enumerate(metrics.smoothed(list(values)), start=1):
        weights = decay ** np.arange(n)[::-1]
        assert found == pytest.approx(weights @ values[:n] / weights.sum())


@pytest.mark.slow
def test_wandb_is_imported_only_if_asked_for():
    code = "import sys, training.metrics, training.run; sys.exit('wandb' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


# wandb


WANDB_RUN = """
import sys
from pathlib import Path
from PIL import Image
from diffusers_flax.training.metrics import MetricsLog
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


# Waiting


class TimedSteps:
    """StepMetrics on a clock of its own; every step takes the host 20 ms.

    early: seconds by which a step is dispatched before the host has worked.
    """

    def __init__(self, monkeypatch, early=0.0):
        self.now, self.early = 100.0, early
        clock = SimpleNamespace(perf_counter=lambda: self.now, thread_time=lambda: self.now)
        monkeypatch.setattr(metrics, "time", clock)
        dataset = SimpleNamespace(passes=lambda step: {})
        self.batches = SimpleNamespace(seconds_waited=0.0, num_bad=0, dataset=dataset)
        self.metrics = metrics.StepMetrics(self.batches, 4, lambda step: 1e-4, NO_AVERAGE, {})

    def add(self, num_steps, last_step):
        """Add steps, which the devices end at once; returns their row."""
        for _ in range(num_steps):
            self.now += 0.02
            self.batches.handed_over = self.now - self.early, self.now
            self.metrics.add(replicate(dict.fromkeys(("loss", "grad_norm"), np.float32(1))))
            if self.metrics.watched:
                self.metrics.watched.result()
        return self.metrics.row(last_step)


def test_devices_that_wait_for_the_host_are_reported_once(monkeypatch, capsys):
    steps = TimedSteps(monkeypatch)
    assert steps.add(1, 1)["device_wait"] is None  # the first step compiles
    row = steps.add(15, 16)
    assert row["device_wait"] == pytest.approx(14 / 15)
    assert row["host_seconds"] == pytest.approx(0.02)
    assert capsys.readouterr().out == ""
    assert steps.add(15, 31)["device_wait"] == pytest.approx(1)
    found = capsys.readouterr().out
    assert found.startswith("the devices wait for the host in 100% of the time: ")
    assert found.count("\n") == 1
    steps.add(30, 61)
    assert capsys.readouterr().out == ""


def test_busy_devices_are_not_reported(monkeypatch, capsys):
    steps = TimedSteps(monkeypatch, early=0.018)
    steps.add(1, 1)
    assert steps.add(40, 41)["device_wait"] == pytest.approx(0.1 * 39 / 40)
    assert capsys.readouterr().out == ""


def test_pauses_are_not_counted(monkeypatch):
    steps = TimedSteps(monkeypatch)
    steps.add(1, 1)
    steps.add(5, 6)
    with steps.metrics.pause():
        steps.now += 100
    row = steps.add(10, 16)
    assert row["pairs_per_second"] == pytest.approx(4 / 0.02)
    assert row["device_wait"] == pytest.approx(0.9)
    assert row["host_seconds"] == pytest.approx(0.02)
