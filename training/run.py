"""The output directory of a training run: start or resume, log, save, validate and finish.

    run = TrainRun(config, ...)
    start_step = run.find_start()
    state, averages = run.start_or_resume(params)
    for step in run.steps(start_step):
        state, metrics = p_train_step(state, ...)
        run.log(step + 1, metrics, schedule)
        if run.save_due(step + 1):
            run.save(step + 1, state, averages)
    run.finish(run.final_weights(state, averages))

TrainRun handles files and steps, not gradients. All processes make the same calls; only process 0
writes files.
"""

import contextlib
import itertools
import json
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

from diffusers_flax.loading.directories import CONV_IN_FILE, LORA_FILE
from diffusers_flax.loading.files import save_whole
from diffusers_flax.loading.lora import save_conv_in, save_lora
from diffusers_flax.memory import peak_memory
from training.checkpoints import (
    Checkpoints,
    checkpoint_shapes,
    find_checkpoint,
    flatten_by_name,
    read_state,
    release_memory,
    run_identity,
)
from training.ema import SIGMA_RELS, ema_plan, ema_start, ema_update
from training.flags import (
    ema_flags,
    explain_no_average,
    fixed_flags,
    profiled_steps,
    snapshot_steps,
    steps_between_rows,
)
from training.models import (
    WEIGHTS,
    edit_images,
    lora_options,
    lora_record,
    merge_lora,
    merged_unet,
    pipeline_params,
)
from training.output import remove_replaced_model, write_flags
from training.processes import (
    StopSignal,
    check_agreement,
    from_process_0,
    on_process_0,
    wait_for_all,
)
from training.report import (
    MetricsLog,
    check_finite,
    check_hub,
    drop_step_images,
    push_to_hub,
    validation_grid,
    write_card,
    write_progress,
)
from training.sharding import (
    combine,
    first_replica,
    gather,
    in_place,
    shard_axes,
    shard_batch,
    start_state,
    to_host,
)

MAX_STEPS_IN_FLIGHT = 2  # steps that the host may run ahead of the devices; batches to prefetch


class TrainRun:
    """One run and its output directory.

    Args:
        config: Config that check_config has accepted.
        max_train_steps: length of the run.
        models, pipeline, frozen: see load_models.
        params: the UNet's initial trained parameters, float32 NumPy arrays.
        tx: element-wise optax optimizer, such as Adam.
        dtype: compute dtype of validation.
        dataset: ParquetImagePairs.
        plan: EmaPlan.
        validation_images: see load_validation_images.
        flags: the flags of a program that is not the trainer, a dataclass; they identify the run
            in place of config's.

    Raises:
        ValueError: processes have different flags or data, or the model cannot be uploaded.
    """

    def __init__(
        self,
        config,
        *,
        max_train_steps,
        models,
        pipeline,
        frozen,
        params,
        tx,
        dtype,
        dataset,
        plan,
        validation_images=(),
        flags=None,
    ):
        self.config, self.max_train_steps = config, max_train_steps
        self.flags = flags or config
        self.models, self.pipeline = models, pipeline
        if config.lora_rank is None:  # to save with the UNet; --merge_lora reads the files again
            self.frozen_params = pipeline_params(frozen)
        self.tx, self.dataset, self.plan = tx, dataset, plan
        self.output_dir = Path(config.output_dir)
        self.is_main = jax.process_index() == 0
        self.shapes = jax.eval_shape(lambda: params)
        self.axes = shard_axes(self.shapes, jax.device_count())
        self.p_gather = jax.pmap(partial(gather, axes=self.axes, dtype=dtype), axis_name="batch")
        self.snapshot_steps = snapshot_steps(config, max_train_steps)
        self.logging_steps = steps_between_rows(config, max_train_steps)
        self.validation_images = validation_images
        prompts = list(config.validation_prompt)  # one for each image, or one for all
        self.validation_prompts = prompts * (len(validation_images) if len(prompts) == 1 else 1)
        self.identity = run_identity(self.flags, max_train_steps, dataset, models, params, frozen)
        shared = fixed_flags(self.flags, "per_process")
        check_agreement(json.dumps([self.identity, shared, bool(dataset.latents)]))
        if config.push_to_hub:
            self.repo_id = on_process_0(partial(check_hub, config.hub_model_id, self.output_dir))

        self.unfetched_metrics = deque()  # of steps that may still run on the devices
        self.unlogged_metrics = []  # [loss, grad_norm] of each step since the last logged row
        self.num_bad_before = 0  # undecodable pairs before the run was resumed
        self.num_timed_pairs, self.clock_start = 0, None
        self.is_stopping, self.last_save_error = False, None

    def find_start(self):
        """Find the step of the newest checkpoint, or 0, and set the dataset to it.

        Raises:
            ValueError: the checkpoint is damaged or belongs to another run.
        """
        find = partial(find_checkpoint, self.config, self.identity)
        self.source, start_step, self.saved_run = on_process_0(find) or (None, 0, {})
        self.start_step = int(from_process_0(np.int32(start_step)))
        due = self._averages_at(self.start_step)  # what the checkpoint has unless the plan differs
        num_averages = np.int32(self.saved_run.get("num_averages", due))
        self.num_saved_averages = int(from_process_0(num_averages))
        epoch, batch = divmod(self.start_step, len(self.dataset))
        position = {"epoch": epoch, "batch": batch}
        self.dataset.load_state_dict(self.dataset.state_dict() | position)
        return self.start_step

    def start_or_resume(self, params):
        """Create the training state of step find_start() on the devices and open the run's files.

        Args:
            params: the UNet's parameters for a new run.

        Returns:
            (TrainState, list of averages).

        Raises:
            ValueError: the checkpoint is damaged.
        """
        if self.start_step:
            num_averages = self._averages_at(self.start_step)
            num_to_read = min(num_averages, self.num_saved_averages)
            shapes = checkpoint_shapes(self.shapes, self.tx, num_to_read)
            state, averages = read_state(self.source, self.start_step, shapes)
            if num_to_read < num_averages:  # the run was longer before, and its average later
                averages = [start_average(state.params) for _ in range(num_averages)]
            if self.source:
                self.source.close()
            self.unlogged_metrics = self.saved_run.get("losses", [])
            self.num_bad_before = self.saved_run.get("num_bad", 0)
        else:
            state, averages = start_state(params, self.tx, self.axes), []
        release_memory()
        if self.is_main:
            self._open_files()
            self._announce()
        return state, averages

    def _averages_at(self, step):
        """The number of averages that a run of this plan has after a number of steps."""
        first_step = self.plan.first_step
        return len(self.plan.decays(1)) if first_step is not None and step > first_step else 0

    def _open_files(self):
        """Open the run's files; metrics.jsonl first, because it marks the directory of a run."""
        config, output_dir, flags = self.config, self.output_dir, asdict(self.flags)
        self.metrics_log = MetricsLog(
            output_dir, flags, config.report_to, config.tracker_project_name, self.start_step
        )
        write_flags(output_dir, self.flags)
        self.checkpoints = Checkpoints(
            output_dir / "checkpoints", config.checkpoints_total_limit, self.start_step
        )
        drop_step_images(output_dir / "validation", self.start_step)
        if not self.start_step:  # remove those of an earlier run
            shutil.rmtree(output_dir / "ema_snapshots", ignore_errors=True)

    def _announce(self):
        """Print the size of the run, the device and the first step."""
        num_params = sum(x.size for x in jax.tree.leaves(self.shapes))
        batch_size, num_devices = self.config.train_batch_size, jax.device_count()
        multiple = num_devices * self.config.gradient_accumulation_steps
        print(
            f"training {num_params:,} parameters on "
            f"{self.dataset.describe_epoch(multiple)}: "
            f"{batch_size} pairs per step on {num_devices} device(s), "
            f"{jax.devices()[0].device_kind}"
        )
        if self.start_step:
            saved_on = self.saved_run.get("num_devices", num_devices)
            change = "" if saved_on == num_devices else f", which ran on {saved_on} device(s)"
            num_steps = self.saved_run["identity"]["max_train_steps"]
            if num_steps != self.max_train_steps:
                change += f"; the run had {num_steps} steps and has {self.max_train_steps}"
            print(f"resuming after step {self.start_step}{change}")
        self._announce_average()

    def _announce_average(self):
        """Print when the average starts, and what happens to the checkpoint's average."""
        config, plan, num_steps = self.config, self.plan, self.max_train_steps
        num_averages, num_saved = self._averages_at(self.start_step), self.num_saved_averages
        if num_saved > num_averages:
            print("the checkpoint's average is dropped; its last weights are trained further")
        if plan.first_step is None:
            if config.ema != "none":
                print(explain_no_average(config, num_steps))
            return

        def decays(plan):
            return ", ".join(f"{decay:.6g}" for decay in plan.decays(num_steps))

        first_step, change = plan.first_step, ""
        if num_averages > num_saved:
            first_step = self.start_step
        elif num_averages:
            before = ema_plan(*ema_flags(config, self.saved_run["identity"]["max_train_steps"]))
            if decays(before) != decays(plan):
                change = f", until step {self.start_step} with decay {decays(before)}"
        print(f"averaging the weights from step {first_step} with decay {decays(plan)}{change}")

    def next_batches(self, tokenize):
        """The training batches from step find_start() on, a Batches."""
        self.batches = Batches(self.dataset, tokenize)
        return self.batches

    def steps(self, start_step):
        """Yield the remaining step numbers; show a progress bar and run the profiler.

        Ends early after SIGTERM or Ctrl-C, once save_due has requested a checkpoint.
        """
        first_profiled, last_profiled = profiled_steps(self.config.profile_steps)
        is_profiling = False
        with (
            StopSignal() as self.stop_signal,
            tqdm(
                total=self.max_train_steps,
                initial=start_step,
                unit="step",
                desc="train",
                disable=not self.is_main,
            ) as self.progress,
        ):
            for step in range(start_step, self.max_train_steps):
                if self.is_main and step == first_profiled:
                    is_profiling = True
                    jax.profiler.start_trace(self.output_dir / "profile")
                yield step
                is_end = self.is_stopping or self._is_last_step(step + 1)
                if is_profiling and (step == last_profiled or is_end):
                    is_profiling = False
                    jax.block_until_ready(list(self.unfetched_metrics))
                    jax.profiler.stop_trace()
                if self.is_stopping:
                    break

    def _is_last_step(self, step):
        return step == self.max_train_steps

    def log(self, step, metrics, schedule):
        """Record a step's metrics; append a row to metrics.jsonl if one is due.

        Rows are due at the first step, every logging_steps and at the last step. Only then are
        metrics fetched, so that the host need not wait for each step.

        Args:
            step: number of completed steps.
            metrics: {"loss", "grad_norm"}, replicated arrays.
            schedule: step from 0 -> learning rate.

        Raises:
            FloatingPointError: a loss or gradient since the last row is not finite.
        """
        self.unfetched_metrics.append(metrics)
        if self.clock_start is None:  # the first step includes compilation
            jax.block_until_ready(metrics)
            self._restart_clock()
        else:
            # The host must not run far ahead, or the progress bar would show steps not yet done.
            if len(self.unfetched_metrics) > MAX_STEPS_IN_FLIGHT:
                jax.block_until_ready(self.unfetched_metrics[-1 - MAX_STEPS_IN_FLIGHT])
            self.num_timed_pairs += self.config.train_batch_size
        self.progress.update()
        if step > 1 and step % self.logging_steps and not self._is_last_step(step):
            return
        self._fetch_metrics(step)
        seconds = time.perf_counter() - self.clock_start
        plan, timed = self.plan, self.num_timed_pairs > 0
        rate = self.num_timed_pairs / seconds if timed else None
        is_averaging = plan.first_step is not None and step > plan.first_step
        num_updates = (step - plan.first_step) // plan.every if is_averaging else 0
        row = {
            "step": step,
            "loss": float(np.mean(self.unlogged_metrics, axis=0)[0]),
            "lr": float(schedule(step - 1)),
            "grad_norm": self.unlogged_metrics[-1][1],
            "pairs_per_second": rate,
            "data_wait": self.batches.seconds_waited / seconds if timed else None,  # fraction
            "memory_gb": peak_memory(jax.local_devices())[0] / 1e9,
            "ema_decay": plan.decays(num_updates)[0] if num_updates else None,
            "num_bad": self._total_bad(),
        }
        self.unlogged_metrics.clear()
        self._restart_clock()
        if self.is_main:
            self.metrics_log.write(row)
            speed = f", {rate:.3g} pairs/s" if timed else ""
            self.progress.set_postfix_str(f"loss={row['loss']:.4f}{speed}")

    def _restart_clock(self):
        self.num_timed_pairs, self.clock_start = 0, time.perf_counter()
        self.batches.seconds_waited = 0.0

    def _fetch_metrics(self, step):
        """Wait for all steps and move their metrics to unlogged_metrics."""
        while self.unfetched_metrics:
            metrics = self.unfetched_metrics.popleft()
            self.unlogged_metrics.append(
                [float(first_replica(metrics[name])) for name in ("loss", "grad_norm")]
            )
        sums = np.reshape(self.unlogged_metrics, (-1, 2)).sum(axis=1)
        check_finite(sums, step - len(self.unlogged_metrics) + 1)

    def _total_bad(self):
        """Undecodable pairs in the run so far, over all processes."""
        num_bad = np.int32(self.batches.num_bad)
        total = process_allgather(num_bad).sum() if jax.process_count() > 1 else num_bad
        return self.num_bad_before + int(total)

    @contextlib.contextmanager
    def _pause_clock(self):
        """A context for work outside the timed steps; all processes leave it together."""
        pause_start = time.perf_counter()
        yield
        wait_for_all("process 0 has written")
        self.clock_start += time.perf_counter() - pause_start

    def snapshot_due(self, step):
        """Whether to save the averages for ema_posthoc.py."""
        return self.snapshot_steps and (step % self.snapshot_steps == 0 or self._is_last_step(step))

    def save_due(self, step):
        """Whether to save a checkpoint: at intervals, at the end, and after a stop signal.

        Every process must call it once per step, so that all stop after the same step.
        """
        self.is_stopping = self.stop_signal.requested(step) and not self._is_last_step(step)
        every = self.config.checkpointing_steps
        return self.is_stopping or (every and (step % every == 0 or self._is_last_step(step)))

    def validation_due(self, step):
        """Whether to edit the validation images; never after a stop signal, as time is short."""
        every = self.config.validation_steps
        due = self.validation_images and (step % every == 0 or self._is_last_step(step))
        return due and not self.is_stopping

    def save(self, step, state, averages):
        """Save a checkpoint; its files are written in the background.

        Raises:
            OSError: the checkpoint cannot be written; the last one's error is raised by finish.
        """
        with self._pause_clock():
            self._fetch_metrics(step)
            if self.is_main:
                self._try(step, self.checkpoints.wait)  # so that memory holds one checkpoint only
            release_memory()  # writing takes gigabytes
            content = {"params": state.params, "opt_state": state.opt_state, "ema": averages}
            axes = shard_axes(
                checkpoint_shapes(self.shapes, self.tx, len(averages)), jax.device_count()
            )
            content = flatten_by_name(to_host(content, axes))
            metadata = {
                "identity": self.identity,
                "losses": self.unlogged_metrics,
                "num_bad": self._total_bad(),
                "num_devices": jax.device_count(),
                "num_averages": len(averages),
            }
            if self.is_main:
                self._try(step, partial(self.checkpoints.save, step, content, metadata))
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

    def save_snapshots(self, step, averages):
        """Write the averages in float16 to OUTPUT_DIR/ema_snapshots."""
        with self._pause_clock():
            # The last update may be earlier than step if --ema_every does not divide it.
            updated = self.plan.last_update_step(step)
            for sigma_rel, average in zip(SIGMA_RELS, averages):
                average = to_host(average, self.axes)
                if self.is_main:
                    name = f"{updated:08d}-{sigma_rel:.3f}"
                    half = jax.tree.map(lambda x: x.astype(np.float16), average)
                    save = partial(self.models.unet.save_pretrained, params=half)
                    save_whole(self.output_dir / "ema_snapshots" / name, save)

    def validate(self, step, state, averages, p_frozen):
        """Edit the validation images with the first average, else with the parameters."""
        with self._pause_clock():
            unet = self.p_gather(averages[0] if averages else state.params)
            unet = combine(p_frozen.get("unet", {}), unet)
            params = {"unet": unet, **pipeline_params(p_frozen)}
            images, prompts = self.validation_images, self.validation_prompts
            edits = edit_images(self.pipeline, params, images, prompts, self.config.seed)
            if self.is_main:
                path = self.output_dir / "validation" / f"step-{step:06d}.png"
                save_whole(path, validation_grid(list(zip(images, edits)), prompts).save)
                write_progress(path.parent)
                self.metrics_log.images("validation", path, f"before and after, step {step}", step)

    def final_weights(self, state, averages):
        """Gather the trained parameters as NumPy arrays.

        Returns:
            {"unet"}, and {"unet_raw"} with --save_raw_unet; {} if the run was stopped early.
        """
        self.batches.close()
        if self.is_stopping:
            return {}
        weights = {"unet": to_host(averages[0] if averages else state.params, self.axes)}
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
            self._try(self.progress.n, self.checkpoints.close)
            self.metrics_log.finish_plot()
            if weights:
                self.save_model(weights)
                print(f"saved {self.output_dir}")
            self.metrics_log.close()
            if self.config.push_to_hub and weights:
                print(f"uploaded {push_to_hub(self.output_dir, self.repo_id)}")
            if self.last_save_error:
                raise OSError(
                    f"{self.last_save_error}; the model is saved in {self.output_dir}"
                ) from self.last_save_error
        wait_for_all("process 0 has saved")
        if weights:
            return
        number, step = self.stop_signal.number, self.progress.n
        resumes = self.config.resume_from_checkpoint == "latest"
        print(
            f"stopped by {signal.Signals(number).name} after step {step} of "
            f"{self.max_train_steps}, which is saved; to resume, run the same command"
            + ("" if resumes else " with --resume_from_checkpoint latest")
        )
        sys.exit(128 + number)

    def save_model(self, weights):
        """Write the model and its card; final_file(config) last, as it marks a finished run."""
        config, output_dir = self.config, self.output_dir
        if "unet_raw" in weights:
            params = weights["unet_raw"]
            if config.lora_rank is not None:
                params = merged_unet(config, params)
            self.models.unet.save_pretrained(output_dir / "unet_raw", params=params)
        repo_id = self.repo_id if config.push_to_hub else None
        write_card(config, self.pipeline, self.metrics_log.last_row, repo_id)
        remove_replaced_model(config, self.pipeline)
        if config.lora_rank is not None:
            save_conv_in(output_dir / CONV_IN_FILE, weights["unet"])
            sums = {name: self.identity[name] for name in WEIGHTS}
            run = lora_record(config, self.max_train_steps, sums)
            save_lora(output_dir / LORA_FILE, weights["unet"], **lora_options(config), run=run)
            if config.merge_lora:
                merge_lora(config, self.models.unet.dtype)
        else:
            params = {"unet": weights["unet"], **self.frozen_params}
            self.pipeline.save_pretrained(output_dir, params)


class Batches:
    """An endless iterator of batches on the devices, with prefetching.

    Args:
        dataset: ParquetImagePairs.
        tokenize: list of prompts -> ids (B, T).

    Attributes:
        num_bad: undecodable pairs in this process's batches so far.
        seconds_waited: time spent waiting for batches; readers may reset it.
    """

    def __init__(self, dataset, tokenize):
        self.num_bad, self.seconds_waited = 0, 0.0
        self.stream = self._endless_batches(dataset, tokenize)
        self.queue = deque(itertools.islice(self.stream, MAX_STEPS_IN_FLIGHT))

    @staticmethod
    def _endless_batches(dataset, tokenize):
        while True:
            for batch in dataset:
                batch = {"input_ids": tokenize(batch.pop("edit_prompt")), **batch}
                yield shard_batch(batch), dataset.num_bad

    def __iter__(self):
        return self

    def __next__(self):
        wait_start = time.perf_counter()
        batch, self.num_bad = self.queue.popleft()
        self.queue.append(next(self.stream))
        self.seconds_waited += time.perf_counter() - wait_start
        return batch

    def peek(self):
        """Return the next batch without consuming it."""
        return self.queue[0][0]

    def close(self):
        """Stop the dataset's threads and free the batches."""
        self.stream.close()
        self.queue.clear()


def start_average(params):
    """Start an average as a copy of the sharded parameters."""
    return jax.pmap(ema_start, axis_name="batch")(params)


def make_update_average(devices=None):
    """Make the pmapped update of a sharded average: (average, params, decay) -> average."""
    return jax.pmap(in_place(ema_update), axis_name="batch", donate_argnums=0, devices=devices)
