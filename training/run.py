"""A training run: its steps, their metrics, checkpoints, validation images and the final model.

run_training of flax_train_instruct_pix2pix.py shows how the parts work together. TrainRun handles
files and steps, not gradients. All processes make the same calls; only process 0 writes files.
"""

import contextlib
import shutil
import signal
import sys
import time
from collections import deque
from dataclasses import asdict
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from tqdm import tqdm

from diffusers_flax.compilation_cache import use_compilation_cache
from diffusers_flax.devices.memory import peak_memory
from diffusers_flax.loading.files import save_whole
from training.checkpoints import (
    CHECKPOINTS_DIR,
    Checkpoints,
    checkpoint_shapes,
    flatten_by_name,
    release_memory,
)
from training.ema import SIGMA_RELS, explain_average
from training.flags import profiled_steps, snapshot_steps, steps_between_rows
from training.output import write_flags
from training.processes import StopSignal, wait_for_all
from training.report import MetricsLog, Validation, drop_step_images
from training.sharding import (
    MAX_STEPS_IN_FLIGHT,
    first_replica,
    gather,
    replicate,
    shard_axes,
    to_host,
)


def cache_programs(folder):
    """Keep all compiled programs in a directory; "": keep none."""
    if use_compilation_cache(folder):
        # Saving runs many small programs; a preemption leaves no time to compile them.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def compile_steps(p_train_step, state, p_frozen, batches, p_rng):
    """Compile a training step for the batches of every size.

    Args:
        p_train_step: pmapped train_step.
        state: its shapes, of state_shapes for all devices.
        p_frozen, p_rng: its other arguments.
        batches: Batches.

    Returns:
        A function like p_train_step. In several processes pmap compiles a step only by a call: for
        batches of one size that is the first step, for several sizes a call with zeros.
    """
    shapes, are_several = batches.shapes(), jax.process_count() > 1
    if "" in shapes:
        if are_several:
            return p_train_step
        return p_train_step.lower(state, p_frozen, batches.peek(), p_rng).compile()
    if are_several:
        state = zeros_like(state)
    programs = {}
    for number, (size, batch) in enumerate(shapes.items(), start=1):
        start = time.perf_counter()
        if are_several:
            state, _ = p_train_step(state, p_frozen, zeros_like(batch), p_rng)
            jax.block_until_ready(state)
            programs[shapes_of(batch)] = p_train_step
        else:
            program = p_train_step.lower(state, p_frozen, batch, p_rng).compile()
            programs[shapes_of(batch)] = program
        if jax.process_index() == 0:
            seconds = time.perf_counter() - start
            print(f"compiled {size} in {seconds:.3g} s, {number} of {len(shapes)}", flush=True)
    wait_for_all("all sizes are compiled")

    def step(state, p_frozen, batch, p_rng):
        return programs[shapes_of(batch)](state, p_frozen, batch, p_rng)

    return step


def zeros_like(shapes):
    """Zeros on this process's devices, (local devices, ...); shapes: a tree, (any, ...)."""
    return replicate(jax.tree.map(lambda x: np.zeros(x.shape[1:], x.dtype), shapes))


def shapes_of(batch):
    """The shapes of a batch's arrays, to look up its program."""
    return frozenset((name, x.shape) for name, x in batch.items())


class TrainRun:
    """The steps of one run and its output directory.

    Args:
        config: Config that check_flags has accepted.
        max_train_steps: length of the run.
        start: Start, of find_start.
        batches: Batches from start.step on.
        unet, params: the UNet's module and its initial trained parameters, or their shapes.
        tx, schedule: of make_optimizer.
        plan: EmaPlan.
        final_model: an object with the methods of FinalModel.
        pipeline, validation_images: see load_models and fit_validation_images.
        flags: the flags of a program that is not the trainer, a dataclass; they identify the run
            in place of config's.
    """

    def __init__(
        self,
        config,
        *,
        max_train_steps,
        start,
        batches,
        unet,
        params,
        tx,
        schedule,
        plan,
        final_model,
        pipeline,
        validation_images=(),
        flags=None,
    ):
        self.config, self.max_train_steps = config, max_train_steps
        self.flags = flags or config
        self.start, self.batches, self.unet, self.plan = start, batches, unet, plan
        self.final_model = final_model
        self.output_dir = Path(config.output_dir)
        self.is_main = jax.process_index() == 0
        self.shapes, self.tx = jax.eval_shape(lambda: params), tx
        self.axes = shard_axes(self.shapes, jax.device_count())
        gather_all = partial(gather, axes=self.axes, dtype=unet.dtype)
        self.p_gather = jax.pmap(gather_all, axis_name="batch")
        self.snapshot_steps = snapshot_steps(config, max_train_steps)
        self.logging_steps = steps_between_rows(config, max_train_steps)
        self.validation = Validation(config, pipeline, validation_images, max_train_steps)
        self.metrics = StepMetrics(batches, config.train_batch_size, schedule, plan, start.saved)
        self.stop_signal, self.is_stopping = StopSignal(), False
        self.last_save_error = None
        self.metrics_log, self.checkpoints = self._open_files() if self.is_main else (None, None)
        if self.is_main:
            self._announce()
        self.bar = tqdm(
            total=max_train_steps,
            initial=start.step,
            unit="step",
            desc="train",
            disable=not self.is_main,
        )

    def _open_files(self):
        """Open the run's files; metrics.jsonl first, because it marks the directory of a run."""
        config, output_dir, flags = self.config, self.output_dir, asdict(self.flags)
        metrics_log = MetricsLog(
            output_dir, flags, config.report_to, config.tracker_project_name, self.start.step
        )
        write_flags(output_dir, self.flags)
        checkpoints = Checkpoints(
            output_dir / CHECKPOINTS_DIR, config.checkpoints_total_limit, self.start.step
        )
        drop_step_images(self.validation.folder, self.start.step)
        if not self.start.step:  # remove an earlier run's snapshots
            shutil.rmtree(output_dir / "ema_snapshots", ignore_errors=True)
        return metrics_log, checkpoints

    def _announce(self):
        """Print the size of the run, the device and the first step."""
        num_params = sum(x.size for x in jax.tree.leaves(self.shapes))
        batch_size, num_devices = self.config.train_batch_size, jax.device_count()
        multiple = num_devices * self.config.gradient_accumulation_steps
        print(
            f"training {num_params:,} parameters on "
            f"{self.batches.dataset.describe_epoch(multiple)}: "
            f"{batch_size} pairs per step on {num_devices} device(s), "
            f"{jax.devices()[0].device_kind}"
        )
        if sizes := self.batches.dataset.describe_sizes():
            print(sizes)
        if self.start.step:
            print(self.start.describe_resume(self.max_train_steps))
        if self.validation.images:
            s_T, s_I = self.validation.scales
            print(f"validation images have guidance scale {s_T:g}, image guidance scale {s_I:g}")
        for line in explain_average(self.config, self.plan, self.max_train_steps, self.start):
            print(line)

    def steps(self):
        """Yield the remaining step numbers; show a progress bar and run the profiler.

        Ends early after SIGTERM or Ctrl-C, once save_if_due has saved a checkpoint.
        """
        first_profiled, last_profiled = profiled_steps(self.config.profile_steps)
        is_profiling = False
        with self.stop_signal, self.bar:
            for step in range(self.start.step, self.max_train_steps):
                if self.is_main and step == first_profiled:
                    is_profiling = True
                    jax.profiler.start_trace(self.output_dir / "profile")
                yield step
                is_end = self.is_stopping or self._is_last_step(step + 1)
                if is_profiling and (step == last_profiled or is_end):
                    is_profiling = False
                    self.metrics.wait()
                    jax.profiler.stop_trace()
                if self.is_stopping:
                    break

    def _is_last_step(self, step):
        return step == self.max_train_steps

    def log(self, step, metrics):
        """Record a step's metrics; append a row to metrics.jsonl if one is due.

        Rows are due at the first step, every logging_steps and at the last step.

        Args:
            step: number of completed steps.
            metrics: {"loss", "grad_norm"}, replicated arrays.

        Raises:
            FloatingPointError: a loss or gradient since the last row is not finite.
        """
        self.metrics.add(metrics)
        self.bar.update()
        if step == 1 or step % self.logging_steps == 0 or self._is_last_step(step):
            row = self.metrics.row(step)
            if self.is_main:
                self.metrics_log.write(row)
                rate = row["pairs_per_second"]
                speed = "" if rate is None else f", {rate:.3g} pairs/s"
                self.bar.set_postfix_str(f"loss={row['loss']:.4f}{speed}")

    def save_if_due(self, step, state, averages):
        """Save snapshots of the averages and a checkpoint at their intervals and at the end.

        After a stop signal, save a checkpoint. Every process must call it once per step, so that
        all stop after the same step.

        Args:
            step: number of completed steps.
            state: TrainState.
            averages: Averages.

        Raises:
            OSError: the checkpoint cannot be written; the last one's error is raised by finish.
        """
        is_last, every = self._is_last_step(step), self.config.checkpointing_steps
        if self.snapshot_steps and (step % self.snapshot_steps == 0 or is_last):
            self._save_snapshots(step, averages)
        self.is_stopping = self.stop_signal.requested(step) and not is_last
        if self.is_stopping or (every and (step % every == 0 or is_last)):
            self._save(step, state, averages)

    def _save(self, step, state, averages):
        """Save a checkpoint; its files are written in the background."""
        with self.metrics.pause():
            self.metrics.fetch(step)
            if self.is_main:
                self._try(step, self.checkpoints.wait)  # so that memory holds one checkpoint only
            release_memory()  # writing takes gigabytes
            trees = averages.trees
            content = {"params": state.params, "opt_state": state.opt_state, "ema": trees}
            axes = shard_axes(
                checkpoint_shapes(self.shapes, self.tx, len(trees)), jax.device_count()
            )
            content = flatten_by_name(to_host(content, axes))
            record = {
                "identity": self.start.identity,
                "losses": self.metrics.unlogged,
                "num_bad": self.metrics.total_bad(),
                "num_devices": jax.device_count(),
                "num_averages": len(trees),
            }
            if self.is_main:
                self._try(step, partial(self.checkpoints.save, step, content, record))
                self.metrics_log.draw()
                if jax.default_backend() == "cpu":  # the next step overwrites the arrays' memory
                    self._try(step, self.checkpoints.wait)
                    release_memory()

    def _try(self, step, write):
        """Write a checkpoint; an error at the last step is kept for finish: the model is whole."""
        if self.last_save_error is None:
            try:
                write()
            except OSError as error:
                if not self._is_last_step(step):
                    raise
                self.last_save_error = error

    def _save_snapshots(self, step, averages):
        """Write the averages in float16 to OUTPUT_DIR/ema_snapshots, for ema_posthoc.py."""
        with self.metrics.pause():
            # The last update may be earlier than step if --ema_every does not divide it.
            updated = self.plan.last_update_step(step)
            for sigma_rel, average in zip(SIGMA_RELS, averages.trees):
                average = to_host(average, self.axes)
                if self.is_main:
                    name = f"{updated:08d}-{sigma_rel:.3f}"
                    half = jax.tree.map(lambda x: x.astype(np.float16), average)
                    save = partial(self.unet.save_pretrained, params=half)
                    save_whole(self.output_dir / "ema_snapshots" / name, save)

    def validate_if_due(self, step, state, averages, p_frozen):
        """Edit the validation images at their interval and at the end, with the first average.

        Never after a stop signal, as time is short.

        Args:
            step, state, averages: as for save_if_due.
            p_frozen: train_step's frozen parameters, replicated.
        """
        every = self.config.validation_steps
        is_due = step % every == 0 or self._is_last_step(step)
        if self.is_stopping or not (self.validation.images and is_due):
            return
        with self.metrics.pause():
            p_unet = self.p_gather(averages.best(state.params))
            edits = self.validation.edit(p_unet, p_frozen)
            if self.is_main:
                path = self.validation.write(step, edits)
                self.metrics_log.images("validation", path, f"before and after, step {step}", step)

    def final_weights(self, state, averages):
        """Gather the trained parameters as NumPy arrays.

        Returns:
            {"unet"}, and {"unet_raw"} with --save_raw_unet; {} if the run was stopped early.
        """
        self.batches.close()
        if self.is_stopping:
            return {}
        weights = {"unet": to_host(averages.best(state.params), self.axes)}
        if self.config.save_raw_unet:
            weights["unet_raw"] = to_host(state.params, self.axes)
        return weights

    def finish(self, weights):
        """Write the model and its card and close all files; after a stop signal, exit instead.

        Args:
            weights: from final_weights. Free device memory first, as writing copies them.

        Raises:
            SystemExit: a signal stopped the run; the exit code is 128 + signal number.
            OSError: the last checkpoint cannot be written; the model is saved.
        """
        release_memory()
        if self.is_main:
            # A run is finished if its model is newer than its newest complete checkpoint. So the
            # model follows when the last checkpoint is complete or has failed: after a kill before
            # the end there is a checkpoint to resume from, after it the whole model.
            self._try(self.bar.n, self.checkpoints.close)
            self.metrics_log.finish_plot()
            if weights:
                self.final_model.save(weights, self.metrics_log.last_row)
                print(f"saved {self.output_dir}")
            self.metrics_log.close()
            if weights:
                self.final_model.upload()
            if self.last_save_error:
                raise OSError(
                    f"{self.last_save_error}; the model is saved in {self.output_dir}"
                ) from self.last_save_error
        wait_for_all("process 0 has saved")
        if not weights:
            self._exit_after_signal()

    def _exit_after_signal(self):
        number, step = self.stop_signal.number, self.bar.n
        resumes = self.config.resume_from_checkpoint == "latest"
        print(
            f"stopped by {signal.Signals(number).name} after step {step} of "
            f"{self.max_train_steps}, which is saved; to resume, run the same command"
            + ("" if resumes else " with --resume_from_checkpoint latest")
        )
        sys.exit(128 + number)


class StepMetrics:
    """The metrics of steps, which make the rows of metrics.jsonl.

    They are fetched when a row is due, so that the host need not wait for each step.

    Args:
        batches: Batches.
        batch_size: pairs per step.
        schedule: step from 0 -> learning rate.
        plan: EmaPlan.
        saved: what the checkpoint says about the run; {} at step 0.

    Attributes:
        unlogged: [loss, grad_norm] of each fetched step since the last row.
    """

    def __init__(self, batches, batch_size, schedule, plan, saved):
        self.batches, self.batch_size, self.schedule, self.plan = (
            batches,
            batch_size,
            schedule,
            plan,
        )
        self.unfetched = deque()  # of steps that may still run on the devices
        self.unlogged = saved.get("losses", [])
        self.num_bad_before = saved.get("num_bad", 0)  # undecodable pairs before the run resumed
        self.num_timed_pairs, self.clock_start = 0, None

    def add(self, metrics):
        """Add {"loss", "grad_norm"} of a step, replicated arrays."""
        self.unfetched.append(metrics)
        if self.clock_start is None:  # the first step includes compilation
            jax.block_until_ready(metrics)
            self._restart_clock()
            return
        # The host must not run far ahead, or the progress bar would show steps not yet done.
        if len(self.unfetched) > MAX_STEPS_IN_FLIGHT:
            jax.block_until_ready(self.unfetched[-1 - MAX_STEPS_IN_FLIGHT])
        self.num_timed_pairs += self.batch_size

    def row(self, step):
        """The row of all steps since the last one, a dict of numbers and None.

        Args:
            step: number of completed steps.

        Raises:
            FloatingPointError: a loss or gradient is not finite.
        """
        self.fetch(step)
        seconds = time.perf_counter() - self.clock_start
        plan, timed = self.plan, self.num_timed_pairs > 0
        is_averaging = plan.averages_after(step) > 0
        num_updates = (step - plan.first_step) // plan.every if is_averaging else 0
        row = {
            "step": step,
            "loss": float(np.mean(self.unlogged, axis=0)[0]),
            "lr": float(self.schedule(step - 1)),
            "grad_norm": self.unlogged[-1][1],
            "pairs_per_second": self.num_timed_pairs / seconds if timed else None,
            "data_wait": self.batches.seconds_waited / seconds if timed else None,  # fraction
            "memory_gb": peak_memory(jax.local_devices())[0] / 1e9,
            "ema_decay": plan.decays(num_updates)[0] if num_updates else None,
            "num_bad": self.total_bad(),
        } | {f"passes/{name}": n for name, n in self.batches.dataset.passes(step).items()}
        self.unlogged.clear()
        self._restart_clock()
        return row

    def _restart_clock(self):
        self.num_timed_pairs, self.clock_start = 0, time.perf_counter()
        self.batches.seconds_waited = 0.0

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
        """A context for work outside the timed steps; all processes leave it together."""
        pause_start = time.perf_counter()
        yield
        wait_for_all("process 0 has written")
        self.clock_start += time.perf_counter() - pause_start


def check_losses_finite(numbers, first_step):
    """Raise a FloatingPointError that names the first step with a non-finite number."""
    bad = [first_step + int(i) for i in np.flatnonzero(~np.isfinite(numbers))]
    if bad:
        raise FloatingPointError(
            f"the loss or gradient is not finite at step {bad[0]} ({len(bad)} of the last "
            f"{len(numbers)} steps); nothing was saved since the last checkpoint; start again with "
            "a lower --learning_rate, or without --mixed_precision bf16"
        )
