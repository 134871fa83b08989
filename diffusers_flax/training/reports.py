"""What a training run reports: rows of metrics.jsonl, the plot of the losses, wandb, snapshots of
the averages, and edits of validation images.

wandb handles its own token. Only process 0 writes.
"""

import contextlib
import gc
import json
import logging
import math
import shutil
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from tqdm import tqdm

from diffusers_flax.devices.memory import peak_memory
from diffusers_flax.loading.files import save_whole, write_text
from diffusers_flax.messages import one_line
from diffusers_flax.training.batches import MAX_STEPS_IN_FLIGHT
from diffusers_flax.training.ema import SIGMA_RELS, explain_average
from diffusers_flax.training.flags import (
    profiled_steps,
    snapshot_steps,
    steps_between_rows,
    write_flags,
)
from diffusers_flax.training.processes import wait_for_all
from diffusers_flax.training.sharding import first_replica, to_host
from diffusers_flax.training.validation import Validation, drop_step_images

logger = logging.getLogger(__name__)

LOSS_PLOT = "loss.png"
# A line says that devices wait for the host after WAITING_STEPS steps in rows whose device_wait, a
# fraction of the time, is above MOST_WAITING.
MOST_WAITING = 0.1
WAITING_STEPS = 20
LOSS_SPAN = 20  # the smoothed loss averages over about a fraction 1 / 20 of the rows
LOSS_ROWS = 5  # but over at least this number of rows


class Reports:
    """The reports of one run; all processes make the same calls.

    Metrics are fetched when a row is due, so that the host does not wait for each step. As a
    context it shows a progress bar.

    Args:
        config: flags that check_flags has accepted.
        num_steps: length of the run.
        schedule: step from 0 -> learning rate.
        plan: EmaPlan.
        pipeline: of load_models.
        batches: Batches.
        checkpoints: Checkpoints, from which the run starts.

    Attributes:
        last_row: the last row of metrics.jsonl, or None.
        unlogged: metrics of each fetched step since the last row, dicts of floats.
    """

    def __init__(self, config, num_steps, schedule, plan, pipeline, batches, checkpoints):
        self.config, self.num_steps, self.folder = config, num_steps, Path(config.output_dir)
        self.schedule, self.plan, self.batches = schedule, plan, batches
        self.unet, self.is_main = pipeline.unet, jax.process_index() == 0
        self.start_step = checkpoints.start_step
        self.row_steps = steps_between_rows(config, num_steps)
        self.snapshot_steps = snapshot_steps(config, num_steps)
        self.profiled, self.is_profiling = profiled_steps(config.profile_steps), False
        self.validation = Validation(config, pipeline, batches.dataset.sizes, num_steps)

        self.unfetched = deque()  # metrics of steps that may still run on the devices
        before = checkpoints.saved.get("losses", [])  # pairs, in older checkpoints
        self.unlogged = [dict(zip(("loss", "grad_norm"), pair)) for pair in before]
        self.unlogged += checkpoints.saved.get("metrics", [])
        self.num_bad_before = checkpoints.saved.get("num_bad", 0)  # before the run resumed
        self.num_timed_steps, self.clock_start = 0, None
        # Metrics are ready when their step is: a thread notes the time.
        self.watcher, self.watched = ThreadPoolExecutor(1), None
        self.ready_at, self.device_waited = None, 0.0
        self.num_waiting_steps = 0  # of rows in which the devices waited for the host

        self.last_row = self.wandb_run = None
        self.plotter, self.plot = ThreadPoolExecutor(1), None
        if self.is_main:
            self._open_files()
            for line in describe_run(config, num_steps, checkpoints, plan, self):
                print(line)
        options = dict(total=num_steps, initial=self.start_step, unit="step", desc="train")
        self.bar = tqdm(**options, disable=not self.is_main)

    def _open_files(self):
        """Open metrics.jsonl, which marks the directory of a run; remove later steps' reports."""
        start, path = self.start_step, self.folder / "metrics.jsonl"
        if self.config.report_to == "wandb":
            self.wandb_run = start_wandb(self.folder, self.config, resume=start > 0)
        lines = lines_until_step(path, start)
        self.last_row = json.loads(lines[-1]) if lines else None
        write_text(path, "".join(lines))
        write_flags(self.folder, self.config)
        drop_step_images(self.validation.folder, start)
        if not start:
            (self.folder / LOSS_PLOT).unlink(missing_ok=True)
            shutil.rmtree(self.folder / "ema_snapshots", ignore_errors=True)

    def __enter__(self):
        gc.freeze()  # else the collector goes through all loaded objects during steps
        return self

    def __exit__(self, *exception):
        gc.unfreeze()
        self._stop_profile()
        self.bar.close()
        self.batches.close()
        self.watcher.shutdown()

    # Metrics

    def log(self, step, metrics):
        """Record a step's metrics, and append a row if one is due.

        Rows are due at the first step, every --logging_steps and at the last step.

        Args:
            step: number of completed steps.
            metrics: {"loss", "grad_norm"}, replicated arrays. A row has the mean loss and the
                last value of everything else, also of entries that a step of your own adds.

        Raises:
            FloatingPointError: a loss or gradient since the last row is not finite.
        """
        self._add(metrics)
        self.bar.update()
        if step == 1 or self._is_due(step, self.row_steps):
            row = self._row(step)
            if self.is_main:
                self.last_row = row
                with (self.folder / "metrics.jsonl").open("a") as file:
                    file.write(json.dumps(row) + "\n")
                if self.wandb_run is not None:
                    self.wandb_run.log(row)
                rate = row["pairs_per_second"]
                speed = "" if rate is None else f", {rate:.3g} pairs/s"
                self.bar.set_postfix_str(f"loss={row['loss']:.4f}{speed}")

    def _is_due(self, step, every):
        return every > 0 and (step % every == 0 or step == self.num_steps)

    def _add(self, metrics):
        self.unfetched.append(metrics)
        if self.clock_start is None:  # the first step includes the start of the devices
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

    def _row(self, step):
        """The row of all steps since the last row, a dict of numbers and None."""
        self.fetch(step)
        plan, timed = self.plan, self.num_timed_steps
        times = dict.fromkeys(("pairs_per_second", "data_wait", "device_wait", "host_seconds"))
        if timed:
            self.watched.result()
            seconds = time.perf_counter() - self.clock_start
            times = {
                "pairs_per_second": timed * self.config.train_batch_size / seconds,
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
            "loss": float(np.mean([metrics["loss"] for metrics in self.unlogged])),
            "lr": float(self.schedule(step - 1)),
            **{name: x for name, x in self.unlogged[-1].items() if name != "loss"},
            **times,
            "memory_gb": peak_memory(jax.local_devices())[0] / 1e9,
            "ema_decay": plan.decays(num_updates)[0] if num_updates else None,
            "num_bad": self.num_bad(),
        } | {f"passes/{name}": n for name, n in self.batches.dataset.passes(step).items()}
        self.unlogged.clear()
        return row

    def _explain_waiting(self, times):
        """Say once that the devices wait for the host, if they do for some time."""
        if times["device_wait"] > MOST_WAITING:
            before = self.num_waiting_steps
            self.num_waiting_steps += self.num_timed_steps
            if before < WAITING_STEPS <= self.num_waiting_steps and self.is_main:
                print(explain_waiting(times))

    def _restart_clock(self):
        self.num_timed_steps, self.clock_start = 0, time.perf_counter()
        self.work_start = time.thread_time()
        self.batches.seconds_waited = self.device_waited = 0.0

    def fetch(self, step):
        """Wait for all steps up to this one and move their metrics to unlogged.

        Raises:
            FloatingPointError: a loss or gradient is not finite.
        """
        while self.unfetched:
            metrics = self.unfetched.popleft()
            self.unlogged.append({name: float(first_replica(x)) for name, x in metrics.items()})
        sums = np.array([sum(metrics.values()) for metrics in self.unlogged])
        bad = np.flatnonzero(~np.isfinite(sums)) + step - len(sums) + 1
        if len(bad):
            raise FloatingPointError(
                f"the loss or gradient is not finite at step {bad[0]} ({len(bad)} of the last "
                f"{len(sums)} steps); nothing was saved since the last checkpoint; start again "
                "with a lower --learning_rate, or without --mixed_precision bf16"
            )

    def num_bad(self):
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

    def profile(self, step):
        """Start and stop the profiler for --profile_steps, which count from 0, before a step."""
        first, last = self.profiled
        if self.is_main and step - 1 == first:
            self.is_profiling = True
            jax.profiler.start_trace(self.folder / "profile")
        elif self.is_profiling and step - 1 > last:
            self._stop_profile()

    def _stop_profile(self):
        if self.is_profiling:
            self.is_profiling = False
            jax.block_until_ready(list(self.unfetched))
            jax.profiler.stop_trace()

    # Snapshots and validation images

    def snapshot_is_due(self, step):
        """Whether snapshots of the averages are due after a step."""
        return self._is_due(step, self.snapshot_steps)

    def save_snapshots(self, step, averages, axes):
        """Write the averages in float16 to OUTPUT_DIR/ema_snapshots, for ema_posthoc.py."""
        with self.pause():
            # With --ema_every the last update may be earlier than step.
            updated = self.plan.last_update_step(step)
            for sigma_rel, average in zip(SIGMA_RELS, averages):
                average = to_host(average, axes)
                if self.is_main:
                    name = f"{updated:08d}-{sigma_rel:.3f}"
                    half = jax.tree.map(lambda x: x.astype(np.float16), average)
                    save = partial(self.unet.save_pretrained, params=half)
                    save_whole(self.folder / "ema_snapshots" / name, save)

    def validation_is_due(self, step):
        """Whether validation images are due after a step."""
        return self.validation.images and self._is_due(step, self.config.validation_steps)

    def validate(self, step, weights, p_frozen, axes):
        """Edit the validation images and write them, with the sharded weights of the UNet.

        p_frozen: train_step's frozen parameters, replicated.
        """
        with self.pause():
            edits = self.validation.edit(weights, axes, p_frozen)
            if self.is_main:
                path = self.validation.write(step, edits)
                if self.wandb_run is not None:
                    import wandb

                    caption = f"before and after, step {step}"
                    image = wandb.Image(str(path), caption=caption)
                    self.wandb_run.log({"validation": image, "step": step})

    # The plot of the losses

    def draw(self):
        """Draw the losses in another thread, unless it is still drawing."""
        if self.plot is None or self.plot.done():
            self.plot = self.plotter.submit(draw_losses, self.folder)

    def close(self):
        """Draw the losses of all rows, and finish the wandb run, which else counts as failed."""
        self.plotter.shutdown()
        if self.is_main:
            draw_losses(self.folder)
        if self.wandb_run is not None:
            self.wandb_run.finish()


def describe_run(config, num_steps, checkpoints, plan, reports):
    """Yield lines about the size of a run, its devices and its first step; args as for Reports."""
    num_params, dataset = checkpoints.num_params, reports.batches.dataset
    yield (
        f"training {num_params:,} parameters on {dataset.describe_epoch()}: "
        f"{config.train_batch_size} pairs per step on {jax.device_count()} device(s), "
        f"{jax.devices()[0].device_kind}"
    )
    if sizes := dataset.describe_sizes():
        yield sizes
    if checkpoints.start_step:
        yield checkpoints.describe_resume(num_steps)
    if reports.validation.images:
        s_T, s_I = reports.validation.scales
        yield f"validation images have guidance scale {s_T:g}, image guidance scale {s_I:g}"
    yield from explain_average(
        config, plan, num_steps, checkpoints.start_step, checkpoints.num_averages
    )


def explain_waiting(times):
    """The line for the times of a row in which the devices wait for the host."""
    devices, data = f"{times['device_wait']:.0%}", f"{times['data_wait']:.0%}"
    return (
        f"the devices wait for the host in {devices} of the time: the loop waits for batches in "
        f"{data}, and works {1e3 * times['host_seconds']:.3g} ms in a step. Usual reasons: images "
        "are read or decoded slowly (--cache_latents helps), other programs run on this host, "
        "--train_batch_size or --logging_steps is small"
    )


def lines_until_step(path, last_step):
    """The lines of a metrics.jsonl up to a step, without lines that a crash truncated."""
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    valid_lines = []
    for line in lines:
        with contextlib.suppress(json.JSONDecodeError):
            row = json.loads(line)
            if isinstance(row, dict) and row.get("step", last_step + 1) <= last_step:
                valid_lines.append(f"{line}\n")
    return valid_lines


def draw_losses(folder):
    """Plot the losses of FOLDER/metrics.jsonl to FOLDER/loss.png; without matplotlib do nothing."""
    try:
        from matplotlib.figure import Figure  # seconds to import; without pyplot no display is used
    except ImportError:
        return
    rows = [json.loads(line) for line in lines_until_step(folder / "metrics.jsonl", math.inf)]
    points = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    if not points:
        return
    try:
        steps, losses = zip(*points)
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        plot = figure.add_subplot()
        plot.plot(steps, losses, ".-", color="C0", alpha=0.35, label="loss")
        plot.plot(steps, smoothed(losses), color="C0", linewidth=2, label="smoothed")
        plot.set(xlabel="step", ylabel="loss")
        plot.grid(alpha=0.3)
        plot.legend()
        save_whole(folder / LOSS_PLOT, partial(figure.savefig, format="png", dpi=110))
    except Exception as error:  # a run does not end because of its plot
        logger.warning("%s cannot be drawn: %s", LOSS_PLOT, one_line(error, 200))


def smoothed(values):
    """Bias-corrected exponential averages, over about a fraction 1 / LOSS_SPAN of the values."""
    decay = 1 - 1 / max(LOSS_ROWS, len(values) / LOSS_SPAN)
    average, averages = 0.0, []
    for n, value in enumerate(values, start=1):
        average = decay * average + (1 - decay) * value
        averages.append(average / (1 - decay**n))
    return averages


def start_wandb(folder, config, resume):
    """Start a wandb run, or resume the one whose id is in FOLDER/wandb_run_id."""
    import wandb

    id_file = folder / "wandb_run_id"
    run_id = id_file.read_text() if resume and id_file.exists() else None
    options = dict(project=config.tracker_project_name, config=vars(config), dir=folder)
    try:
        run = wandb.init(**options, id=run_id, resume="allow")
    except wandb.Error as error:
        raise ValueError(
            f"wandb: {one_line(error)}; run `wandb login`, set WANDB_MODE=offline, or leave out "
            "--report_to wandb"
        ) from error
    # wandb drops rows whose own step decreases, as after a resume; "step" may repeat.
    run.define_metric("*", step_metric="step")
    write_text(id_file, run.id)
    return run
