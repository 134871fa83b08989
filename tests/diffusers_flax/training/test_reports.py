"""Reports of a run: metrics.jsonl, resuming it, the plot, wandb offline, times."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from trainer_runs import make_reports

from diffusers_flax.training import reports as module
from diffusers_flax.training.sharding import replicate


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def log(reports, step, loss, grad_norm=1.0):
    """Log a step whose row is due at once."""
    values = {"loss": np.float32(loss), "grad_norm": np.float32(grad_norm)}
    reports.log(step, replicate(values))


# metrics.jsonl and its plot


@pytest.mark.parametrize(
    "torn", ["", '{"step": 4', '{"step": 4, "loss": 0.4}', "\0\0\0", '{"mine": 1}\n3']
)
def test_rows_are_on_disk_at_once_and_resume_drops_what_is_repeated(tmp_path, torn):
    reports = make_reports(tmp_path)
    for step in range(1, 4):
        log(reports, step, 1 / step)
        assert rows_of(tmp_path)[-1]["loss"] == np.float32(1 / step)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(torn)
    log(make_reports(tmp_path, start_step=2), 3, 7.0)
    found = [(row["step"], row["loss"]) for row in rows_of(tmp_path)]
    assert found == [(1, 1.0), (2, 0.5), (3, 7.0)]


def test_new_run_starts_empty(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    (tmp_path / "loss.png").touch()
    make_reports(tmp_path)
    assert rows_of(tmp_path) == [] and not (tmp_path / "loss.png").exists()


def test_a_metric_of_ones_own_is_in_the_row(tmp_path):
    reports = make_reports(tmp_path)
    values = {"loss": 1.0, "grad_norm": 2.0, "sharpness": 3.0}
    reports.log(1, replicate({name: np.float32(x) for name, x in values.items()}))
    (row,) = rows_of(tmp_path)
    assert {name: row[name] for name in values} == values


def test_the_plot_shows_all_losses(tmp_path, monkeypatch):
    """Drawn meanwhile and at the end; a missing matplotlib costs only the plot."""
    reports = make_reports(tmp_path)
    reports.draw()  # nothing to draw yet
    plots = set()
    for step, loss in ((1, 2.0), (2, 1.0), (3, 0.5)):
        log(reports, step, loss)
        reports.draw()
        plots.add((tmp_path / "loss.png").read_bytes())
    assert len(plots) == 3  # each row changes it
    with Image.open(tmp_path / "loss.png") as plot:
        colors = plot.convert("RGB").getcolors(maxcolors=100_000)
    assert sum(blue > red + 100 for _, (red, _, blue) in colors)  # the lines
    (tmp_path / "loss.png").unlink()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    reports.close()
    assert not (tmp_path / "loss.png").exists()


@pytest.mark.parametrize(("num_rows", "span"), [(3, 5), (20, 5), (200, 10)])
def test_smoothed_losses(num_rows, span):
    """The closed form of an unbiased exponential average, over five rows in short runs."""
    values = np.random.default_rng(0).uniform(size=num_rows)
    decay = 1 - 1 / span
    for n, found in enumerate(module.smoothed(list(values)), start=1):
        weights = decay ** np.arange(n)[::-1]
        assert found == pytest.approx(weights @ values[:n] / weights.sum())


# Times


def test_pauses_are_not_counted(tmp_path, monkeypatch):
    """Every step takes the host 20 ms; the first one, which compiles, has no speed."""
    now = 100.0
    clock = SimpleNamespace(perf_counter=lambda: now, thread_time=lambda: now)
    monkeypatch.setattr(module, "time", clock)
    reports = make_reports(tmp_path, train_batch_size=4, logging_steps=10)
    for step in range(1, 11):
        now += 0.02
        log(reports, step, 1.0)
        with reports.pause():
            now += 100
    first, last = rows_of(tmp_path)
    assert first["pairs_per_second"] is first["data_wait"] is None
    assert last["pairs_per_second"] == pytest.approx(4 / 0.02)
    assert last["host_seconds"] == pytest.approx(0.02)
