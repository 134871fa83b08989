"""Metrics of a training run: rows of metrics.jsonl, the plot of the losses, wandb.

wandb handles its own token.
"""

import contextlib
import json
import logging
import math
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather

from diffusers_flax.devices.memory import peak_memory
from diffusers_flax.loading.files import save_whole, write_text
from diffusers_flax.messages import one_line
from diffusers_flax.training.batches import MAX_STEPS_IN_FLIGHT
from diffusers_flax.training.processes import wait_for_all
from diffusers_flax.training.sharding import first_replica

logger = logging.getLogger(__name__)

LOSS_PLOT = "loss.png"
# The trainer says that devices wait for the host after WAITING_STEPS steps in rows whose
# device_wait, a fraction of the time, is above MOST_WAITING.
MOST_WAITING = 0.1
WAITING_STEPS = 20
LOSS_SPAN = 20  # the smoothed loss averages over about a fraction 1 / 20 of the rows
LOSS_ROWS = 5  # but over at least this number of rows


class StepMetrics:
    """Collects the metrics of steps into rows of metrics.jsonl.

    Metrics are fetched when a row is due, so that the host does not wait for each step.

    Args:
        batches: Batches.
        batch_size: pairs per step.
        schedule: step from 0 -> learning rate.
        plan: EmaPlan.
        saved: the record of the run in its checkpoint; {} at step 0.

    Attributes:
        unlogged: [loss, grad_norm] of each fetched step since the last row.
    """

    def __init__(self, batches, batch_size, schedule, plan, saved):
        self.batches, self.batch_size = batches, batch_size
        self.schedule, self.plan = schedule, plan
        self.unfetched = deque()  # metrics of steps that may still run on the devices
        self.unlogged = saved.get("losses", [])
        self.num_bad_before = saved.get("num_bad", 0)  # undecodable pairs before the run resumed
        self.num_timed_steps, self.clock_start = 0, None
        # Metrics are ready when their step is: a thread notes the time.
        self.watcher, self.watched = ThreadPoolExecutor(1), None
        self.ready_at, self.device_waited = None, 0.0
        self.num_waiting_steps = 0  # of rows in which the devices waited for the host

    def add(self, metrics):
        """Add {"loss", "grad_norm"} of a step, replicated arrays."""
        self.unfetched.append(metrics)
        if self.clock_start is None:  # the first step includes compilation
            jax.block_until_ready(metrics)
            self._restart_clock()
            return
        dispatched = time.perf_counter()
        if jax.default_backend() == "cpu":  # where a call may last as long as its step
            handed_over, work = self.batches.handed_over
            dispatched = handed_over + time.thread_time() - work
        self.watched = self.watcher.submit(self._watch, metrics, dispatched)
        # The host must not run far ahead: the progress bar would show steps that are not done.
        if len(self.unfetched) > MAX_STEPS_IN_FLIGHT:
            jax.block_until_ready(self.unfetched[-1 - MAX_STEPS_IN_FLIGHT])
        self.num_timed_steps += 1

    def _watch(self, metrics, dispatched):
        """Add the devices' wait between the end of the previous step and the dispatch of a step.

        An average's update in between counts as waiting.
        """
        if self.ready_at is not None:
            self.device_waited += max(0.0, dispatched - self.ready_at)
        jax.block_until_ready(metrics)
        self.ready_at = time.perf_counter()

    def row(self, step):
        """Make the row of all steps since the last row, a dict of numbers and None.

        Args:
            step: number of completed steps.

        Raises:
            FloatingPointError: a loss or gradient is not finite.
        """
        self.fetch(step)
        plan, timed = self.plan, self.num_timed_steps
        times = dict.fromkeys(("pairs_per_second", "data_wait", "device_wait", "host_seconds"))
        if timed:
            self.watched.result()
            seconds = time.perf_counter() - self.clock_start
            times = {
                "pairs_per_second": timed * self.batch_size / seconds,
                "data_wait": self.batches.seconds_waited / seconds,  # fraction
                "device_wait": self.device_waited / seconds,  # fraction
                # of this thread's work in a step, without waiting
                "host_seconds": (time.thread_time() - self.work_start) / timed,
            }
            self._explain_waiting(times)
        self._restart_clock()
        is_averaging = plan.averages_after(step) > 0
        num_updates = (step - plan.first_step) // plan.every if is_averaging else 0
        row = {
            "step": step,
            "loss": float(np.mean(self.unlogged, axis=0)[0]),
            "lr": float(self.schedule(step - 1)),
            "grad_norm": self.unlogged[-1][1],
            **times,
            "memory_gb": peak_memory(jax.local_devices())[0] / 1e9,
            "ema_decay": plan.decays(num_updates)[0] if num_updates else None,
            "num_bad": self.total_bad(),
        } | {f"passes/{name}": n for name, n in self.batches.dataset.passes(step).items()}
        self.unlogged.clear()
        return row

    def _explain_waiting(self, times):
        """Say once that the devices wait for the host, if they do for some time."""
        if times["device_wait"] > MOST_WAITING:
            before = self.num_waiting_steps
            self.num_waiting_steps += self.num_timed_steps
            if before < WAITING_STEPS <= self.num_waiting_steps and jax.process_index() == 0:
                print(explain_waiting(times))

    def _restart_clock(self):
        self.num_timed_steps, self.clock_start = 0, time.perf_counter()
        self.work_start = time.thread_time()
        self.batches.seconds_waited = self.device_waited = 0.0

    def close(self):
        """Wait for all steps and stop the thread."""
        self.watcher.shutdown()

    def wait(self):
        """Wait for all steps."""
        jax.block_until_ready(list(self.unfetched))

    def fetch(self, step):
        """Wait for all steps up to this one and move their metrics to unlogged.

        Raises:
            FloatingPointError: a loss or gradient is not finite.
        """
        while self.unfetched:
            metrics = self.unfetched.popleft()
            self.unlogged.append(
                [float(first_replica(metrics[name])) for name in ("loss", "grad_norm")]
            )
        sums = np.reshape(self.unlogged, (-1, 2)).sum(axis=1)
        check_losses_finite(sums, step - len(self.unlogged) + 1)

    def total_bad(self):
        """Undecodable pairs in the run so far, over all processes."""
        num_bad = np.int32(self.batches.num_bad)
        total = process_allgather(num_bad).sum() if jax.process_count() > 1 else num_bad
        return self.num_bad_before + int(total)

    @contextlib.contextmanager
    def pause(self):
        """A context for work that is not timed; all processes leave it together."""
        if self.watched:
            self.watched.result()
        pause_start, work_start = time.perf_counter(), time.thread_time()
        yield
        wait_for_all("process 0 has written")
        self.clock_start += time.perf_counter() - pause_start
        self.work_start += time.thread_time() - work_start
        self.ready_at = None


def explain_waiting(times):
    """The line for the times of a row in which the devices wait for the host."""
    devices, data = f"{times['device_wait']:.0%}", f"{times['data_wait']:.0%}"
    return (
        f"the devices wait for the host in {devices} of the time: the loop waits for batches in "
        f"{data}, and works {1e3 * times['host_seconds']:.3g} ms in a step. Usual reasons: images "
        "are read or decoded slowly (--cache_latents helps), other programs run on this host, "
        "--train_batch_size or --logging_steps is small"
    )


def check_losses_finite(numbers, first_step):
    """Raise a FloatingPointError that names the first step with a non-finite number."""
    bad = [first_step + int(i) for i in np.flatnonzero(~np.isfinite(numbers))]
    if bad:
        raise FloatingPointError(
            f"the loss or gradient is not finite at step {bad[0]} ({len(bad)} of the last "
            f"{len(numbers)} steps); nothing was saved since the last checkpoint; start again with "
            "a lower --learning_rate, or without --mixed_precision bf16"
        )


class MetricsLog:
    """FOLDER/metrics.jsonl, one JSON object per line, FOLDER/loss.png, and optionally wandb.

    The plot needs matplotlib.

    Args:
        folder: the run's directory; must exist.
        config: dict of all flags, for wandb.
        report_to: "none" or "wandb".
        project: name of the wandb project.
        first_step: step at which the run starts; later rows are removed. Above 0, the wandb run of
            the previous start continues.

    Raises:
        ValueError: wandb cannot start, e.g. because nobody is logged in.
    """

    def __init__(self, folder, config, report_to="none", project="instruct-pix2pix", first_step=0):
        folder = Path(folder)
        self.wandb_run = None
        if report_to == "wandb":
            self.wandb_run = start_wandb(folder, config, project, resume=first_step > 0)
        self.plotter, self.plot, self.plot_failed = ThreadPoolExecutor(1), None, False
        if first_step == 0:
            (folder / LOSS_PLOT).unlink(missing_ok=True)
        self.path = folder / "metrics.jsonl"
        lines = lines_until_step(self.path, first_step)
        self.last_row = json.loads(lines[-1]) if lines else None
        write_text(self.path, "".join(lines))

    def write(self, row):
        """Append a row, a dict of numbers or None that contains "step"."""
        self.last_row = row
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        if self.wandb_run is not None:
            self.wandb_run.log(row)

    def images(self, name, path, caption, step):
        """Log the image file at path to wandb, if it is used."""
        if self.wandb_run is not None:
            import wandb

            self.wandb_run.log({name: wandb.Image(str(path), caption=caption), "step": step})

    def draw(self):
        """Draw the losses in another thread, unless it is still drawing."""
        if self.plot is None or self.plot.done():
            self.plot = self.plotter.submit(self._draw)

    def finish_plot(self):
        """Draw the losses of all rows and wait."""
        self.plotter.shutdown()
        self._draw()

    def _draw(self):
        try:
            draw_losses(self.path)
        except Exception as error:  # a run does not end because of its plot
            if not self.plot_failed:
                logger.warning("%s cannot be drawn: %s", LOSS_PLOT, one_line(error, 200))
            self.plot_failed = True

    def close(self):
        """Finish the wandb run, which wandb otherwise marks as failed."""
        if self.wandb_run is not None:
            self.wandb_run.finish()


def lines_until_step(path, last_step):
    """The lines of a metrics.jsonl up to a step, without lines that a crash truncated."""
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    valid_lines = []
    for line in lines:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict) and row.get("step", last_step + 1) <= last_step:
            valid_lines.append(f"{line}\n")
    return valid_lines


def draw_losses(metrics):
    """Plot the losses of a metrics.jsonl, a Path; without matplotlib do nothing."""
    try:
        from matplotlib.figure import Figure  # seconds to import; without pyplot no display is used
    except ImportError:
        return
    rows = [json.loads(line) for line in lines_until_step(metrics, math.inf)]
    points = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    if not points:
        return
    steps, losses = zip(*points)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    plot = figure.add_subplot()
    plot.plot(steps, losses, ".-", color="C0", alpha=0.35, label="loss")
    plot.plot(steps, smoothed(losses), color="C0", linewidth=2, label="smoothed")
    plot.set(xlabel="step", ylabel="loss")
    plot.grid(alpha=0.3)
    plot.legend()
    save_whole(metrics.with_name(LOSS_PLOT), partial(figure.savefig, format="png", dpi=110))


def smoothed(values):
    """Bias-corrected exponential averages, over about a fraction 1 / LOSS_SPAN of the values."""
    decay = 1 - 1 / max(LOSS_ROWS, len(values) / LOSS_SPAN)
    average, averages = 0.0, []
    for n, value in enumerate(values, start=1):
        average = decay * average + (1 - decay) * value
        averages.append(average / (1 - decay**n))
    return averages


def start_wandb(folder, config, project, resume):
    """Start a wandb run, or resume the one whose id is in folder/wandb_run_id."""
    import wandb

    id_file = folder / "wandb_run_id"
    run_id = id_file.read_text() if resume and id_file.exists() else None
    try:
        run = wandb.init(project=project, config=config, dir=folder, id=run_id, resume="allow")
    except wandb.Error as error:
        raise ValueError(
            f"wandb: {one_line(error)}; run `wandb login`, set WANDB_MODE=offline, or leave out "
            "--report_to wandb"
        ) from error
    # wandb drops rows whose own step decreases, as after a resume; "step" may repeat.
    run.define_metric("*", step_metric="step")
    write_text(id_file, run.id)
    return run
