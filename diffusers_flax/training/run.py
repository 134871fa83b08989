"""A training run: its steps, their metrics, checkpoints, validation images and the final model.

TrainRun handles steps and files, not gradients; flax_train_instruct_pix2pix.py shows the loop. All
processes make the same calls; only process 0 writes files.
"""

import contextlib
import gc
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from tqdm import tqdm

from diffusers_flax.compilation_cache import use_compilation_cache
from diffusers_flax.loading.files import save_whole
from diffusers_flax.training.checkpoints import (
    CHECKPOINTS_DIR,
    Checkpoints,
    flatten_by_name,
    release_memory,
)
from diffusers_flax.training.ema import SIGMA_RELS, EmaPlan, explain_average
from diffusers_flax.training.flags import profiled_steps, snapshot_steps, steps_between_rows
from diffusers_flax.training.metrics import MetricsLog, StepMetrics
from diffusers_flax.training.output import write_flags
from diffusers_flax.training.processes import StopSignal, wait_for_all
from diffusers_flax.training.sharding import compile_pmapped, gather, shard_axes, to_host
from diffusers_flax.training.validation import Validation, drop_step_images


def cache_programs(folder):
    """Keep all compiled programs in a directory; "": none."""
    if use_compilation_cache(folder):
        # Saving runs many small programs; at a preemption there is no time to compile them.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def compile_steps(p_train_step, state, p_frozen, batches, p_rng):
    """Compile a training step for the batches of every size.

    Args:
        p_train_step: pmapped train_step.
        state: state_shapes for all devices.
        p_frozen, p_rng: as for train_step, replicated.
        batches: Batches.

    Returns:
        A function like p_train_step, for global arrays.
    """
    programs, shapes = {}, batches.shapes()
    for number, (size, batch) in enumerate(shapes.items(), start=1):
        start = time.perf_counter()
        arguments = state, p_frozen, batch, p_rng
        programs[shapes_of(batch)] = compile_pmapped(p_train_step, *arguments)
        if size and jax.process_index() == 0:
            seconds = time.perf_counter() - start
            print(f"compiled {size} in {seconds:.3g} s, {number} of {len(shapes)}", flush=True)
    wait_for_all("all sizes are compiled")
    if len(programs) == 1:
        (program,) = programs.values()
        return program

    def step(state, p_frozen, batch, p_rng):
        return programs[shapes_of(batch)](state, p_frozen, batch, p_rng)

    return step


def shapes_of(batch):
    """The shapes of a batch's arrays, to look up its program."""
    return frozenset((name, x.shape) for name, x in batch.items())


def lr_schedule(name, learning_rate, num_warmup_steps, max_train_steps):
    """Schedule with linear warm-up, then "constant", or "linear" or "cosine" decay to zero."""
    num_decay_steps = max_train_steps - num_warmup_steps
    after = {
        "constant": optax.constant_schedule(learning_rate),
        "linear": optax.linear_schedule(learning_rate, 0.0, num_decay_steps),
        "cosine": optax.cosine_decay_schedule(learning_rate, num_decay_steps),
    }[name]
    if num_warmup_steps == 0:
        return after
    warmup = optax.linear_schedule(0.0, learning_rate, num_warmup_steps)
    return optax.join_schedules([warmup, after], [num_warmup_steps])


def make_optimizer(config, max_train_steps):
    """AdamW without clipping; returns (optax optimizer, schedule: step -> learning rate).

    Args:
        config: Config.
        max_train_steps: length of the run.
    """
    schedule = lr_schedule(
        config.lr_scheduler, config.learning_rate, config.lr_warmup_steps, max_train_steps
    )
    tx = optax.adamw(
        schedule,
        b1=config.adam_beta1,
        b2=config.adam_beta2,
        eps=config.adam_epsilon,
        weight_decay=config.adam_weight_decay,
    )
    return each_array(tx), schedule


def each_array(tx):
    """An element-wise optax optimizer that updates one array after the other.

    Its state is the same; a program traces the update once for each shape, not for each array.
    """
    update_one = jax.jit(tx.update)

    def update(grads, opt_state, params):
        structure = jax.tree.structure(params)

        def is_per_array(x):  # moments are, the number of steps is not
            return jax.tree.structure(x) == structure

        parts, whole = jax.tree.flatten(opt_state, is_leaf=is_per_array)
        parts = [structure.flatten_up_to(x) if is_per_array(x) else x for x in parts]
        updates, new_parts = [], []
        for i, (g, p) in enumerate(zip(jax.tree.leaves(grads), jax.tree.leaves(params))):
            own = whole.unflatten([x[i] if isinstance(x, list) else x for x in parts])
            one, own = update_one(g, own, p)
            updates.append(one)
            new_parts.append(whole.flatten_up_to(own))
        new_parts = [
            structure.unflatten(new) if isinstance(old, list) else new[0]
            for old, new in zip(parts, zip(*new_parts))
        ]
        return structure.unflatten(updates), whole.unflatten(new_parts)

    return optax.GradientTransformation(tx.init, update)


@dataclass(frozen=True)
class Optimization:
    """What a run optimizes, and how."""

    num_steps: int  # length of the run
    shapes: Any  # of the trained parameters, not sharded: a tree of ShapeDtypeStructs
    tx: optax.GradientTransformation  # of make_optimizer
    schedule: Callable[[int], float]  # step from 0 -> learning rate, of make_optimizer
    plan: EmaPlan


class TrainRun:
    """The steps of one run and its output directory.

    Args:
        config: Config that check_flags has accepted.
        start: Start, of find_start.
        batches: Batches from start.step on.
        optimization: Optimization.
        pipeline: of load_models.
        final_model: an object with the methods of FinalModel.
        validation_images: of fit_validation_images.
        flags: dataclass of another program's flags, which identify the run instead of config.
    """

    def __init__(
        self,
        config,
        start,
        batches,
        optimization,
        pipeline,
        final_model,
        validation_images=(),
        flags=None,
    ):
        num_steps, plan = optimization.num_steps, optimization.plan
        self.config, self.flags = config, flags or config
        self.start, self.batches, self.optimization = start, batches, optimization
        self.unet, self.final_model = pipeline.unet, final_model
        self.max_train_steps, self.output_dir = num_steps, Path(config.output_dir)
        self.is_main = jax.process_index() == 0
        self.axes = shard_axes(optimization.shapes, jax.device_count())
        self.snapshot_steps = snapshot_steps(config, num_steps)
        self.logging_steps = steps_between_rows(config, num_steps)
        self.validation = Validation(config, pipeline, validation_images, num_steps)
        self.metrics = StepMetrics(
            batches, config.train_batch_size, optimization.schedule, plan, start.saved
        )
        self.stop_signal, self.is_stopping = StopSignal(), False
        self.last_save_error = self.p_gather = None
        self.metrics_log, self.checkpoints = self._open_files() if self.is_main else (None, None)
        if self.is_main:
            self._announce()
        self.bar = tqdm(
            total=num_steps,
            initial=start.step,
            unit="step",
            desc="train",
            disable=not self.is_main,
        )

    def _open_files(self):
        """Open the run's files; metrics.jsonl first, as it marks the directory of a run."""
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
        """Print the size of the run, its devices and its first step."""
        plan, shapes = self.optimization.plan, self.optimization.shapes
        num_params = sum(x.size for x in jax.tree.leaves(shapes))
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
        for line in explain_average(self.config, plan, self.max_train_steps, self.start):
            print(line)

    def steps(self):
        """Yield the remaining step numbers, with a progress bar and the profiler.

        Ends early after SIGTERM or Ctrl-C, once save_if_due has saved a checkpoint.
        """
        first_profiled, last_profiled = profiled_steps(self.config.profile_steps)
        is_profiling = False
        with self.stop_signal, self.bar, contextlib.ExitStack() as stack:
            gc.freeze()  # else the collector goes through all loaded objects during steps
            stack.callback(gc.unfreeze)
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
        """Record a step's metrics and append a row to metrics.jsonl if one is due.

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

        After a stop signal, save a checkpoint. Every process calls this once per step, so that all
        stop after the same step.

        Args:
            step: number of completed steps.
            state: TrainState.
            averages: Averages.

        Raises:
            OSError: a checkpoint cannot be written; for the last one, finish raises the error.
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
                self._try(step, self.checkpoints.wait)  # memory then holds one checkpoint only
            release_memory()  # writing takes gigabytes
            trees = averages.trees
            content = {"params": state.params, "opt_state": state.opt_state, "ema": trees}
            content = flatten_by_name(to_host(content, self.axes))
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
        """Write a checkpoint; an error at the last step waits until finish has saved the model."""
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
            # With --ema_every the last update may be earlier than step.
            updated = self.optimization.plan.last_update_step(step)
            for sigma_rel, average in zip(SIGMA_RELS, averages.trees):
                average = to_host(average, self.axes)
                if self.is_main:
                    name = f"{updated:08d}-{sigma_rel:.3f}"
                    half = jax.tree.map(lambda x: x.astype(np.float16), average)
                    save = partial(self.unet.save_pretrained, params=half)
                    save_whole(self.output_dir / "ema_snapshots" / name, save)

    def validate_if_due(self, step, state, averages, p_frozen):
        """Edit the validation images at their interval and at the end, with the first average.

        Not after a stop signal, as time is short.

        Args:
            step, state, averages: as for save_if_due.
            p_frozen: train_step's frozen parameters, replicated.
        """
        every = self.config.validation_steps
        is_due = step % every == 0 or self._is_last_step(step)
        if self.is_stopping or not (self.validation.images and is_due):
            return
        with self.metrics.pause():
            best = averages.best(state.params)
            if self.p_gather is None:
                gather_all = partial(gather, axes=self.axes, dtype=self.unet.dtype)
                self.p_gather = compile_pmapped(jax.pmap(gather_all, axis_name="batch"), best)
            edits = self.validation.edit(self.p_gather(best), p_frozen)
            if self.is_main:
                path = self.validation.write(step, edits)
                self.metrics_log.images("validation", path, f"before and after, step {step}", step)

    def final_weights(self, state, averages):
        """Gather the trained parameters as NumPy arrays.

        Returns:
            {"unet"}, with --save_raw_unet also {"unet_raw"}; {} if the run was stopped early.
        """
        self.batches.close()
        self.metrics.close()
        if self.is_stopping:
            return {}
        weights = {"unet": to_host(averages.best(state.params), self.axes)}
        if self.config.save_raw_unet:
            weights["unet_raw"] = to_host(state.params, self.axes)
        return weights

    def finish(self, weights):
        """Write the model and its card and close all files; after a stop signal, exit instead.

        Args:
            weights: of final_weights. Free device memory first, as writing copies them.

        Raises:
            SystemExit: a signal stopped the run; the exit code is 128 + signal number.
            OSError: the last checkpoint cannot be written, but the model is saved.
        """
        release_memory()
        if self.is_main:
            # A run is finished if its model is newer than its newest complete checkpoint. So the
            # model is written once the last checkpoint is complete or has failed; a run killed
            # before that resumes from a checkpoint.
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
