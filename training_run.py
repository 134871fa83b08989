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
import math
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

from command_line import save_whole, write_text
from ema_flax import SIGMA_RELS, ema_start, ema_update
from executables import peak_memory
from lora_flax import save_conv_in, save_lora
from processes_flax import (
    StopSignal,
    check_agreement,
    from_process_0,
    lock_folder,
    on_process_0,
    wait_for_all,
)
from sharding_flax import (
    combine,
    first_replica,
    gather,
    in_place,
    shard_axes,
    shard_batch,
    start_state,
    to_host,
)
from training_checkpoints import (
    Checkpoints,
    checkpoint_shapes,
    find_checkpoint,
    flatten_by_name,
    read_state,
    release_memory,
    remove_replaced_model,
    run_identity,
)
from training_flags import (
    CONV_IN_FILE,
    LORA_FILE,
    Config,
    final_file,
    fixed_flags,
    profiled_steps,
    snapshot_steps,
)
from training_models import (
    WEIGHTS,
    compute_dtype,
    edit_images,
    lora_identity,
    lora_options,
    merge_lora,
    merged_unet,
    pipeline_params,
)
from training_report import (
    MetricsLog,
    check_finite,
    check_hub,
    drop_step_images,
    lines_until_step,
    push_to_hub,
    validation_grid,
    write_card,
    write_progress,
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
        validation_images,
    ):
        self.config, self.max_train_steps = config, max_train_steps
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
        self.validation_images = validation_images
        prompts = list(config.validation_prompt)  # one for each image, or one for all
        self.validation_prompts = prompts * (len(validation_images) if len(prompts) == 1 else 1)
        self.identity = run_identity(config, max_train_steps, dataset, models, params, frozen)
        shared = fixed_flags(config, "per_process")
        check_agreement(json.dumps([self.identity, shared, bool(dataset.latents)]))
        if config.push_to_hub:
            self.repo_id = on_process_0(partial(check_hub, config.hub_model_id, self.output_dir))

        self.unfetched_metrics = deque()  # of steps that may still run on the devices
        self.unlogged_metrics = []  # [loss, grad_norm] of each step since the last logged row
        self.num_bad_before = 0  # undecodable pairs before the run was resumed
        self.num_timed_images, self.clock_start = 0, None
        self.is_stopping = False

    def find_start(self):
        """Find the step of the newest checkpoint, or 0, and set the dataset to it.

        Raises:
            ValueError: the checkpoint is damaged or belongs to another run.
        """
        resume_from = self.config.resume_from_checkpoint
        final = self.output_dir / final_file(self.config)
        find = partial(find_checkpoint, self.output_dir, resume_from, self.identity, final)
        self.source, start_step, self.saved_run = on_process_0(find) or (None, 0, {})
        self.start_step = int(from_process_0(np.int32(start_step)))
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
            first_step = self.plan.first_step
            has_averages = first_step is not None and self.start_step > first_step
            num_averages = len(self.plan.decays(1)) if has_averages else 0
            shapes = checkpoint_shapes(self.shapes, self.tx, num_averages)
            state, averages = read_state(self.source, self.start_step, shapes)
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

    def _open_files(self):
        """Open the run's files; metrics.jsonl first, because it marks the directory of a run."""
        config, output_dir, flags = self.config, self.output_dir, asdict(self.config)
        self.metrics_log = MetricsLog(
            output_dir, flags, config.report_to, config.tracker_project_name, self.start_step
        )
        write_flags(config)
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
            f"training {num_params / 1e6:.1f}M parameters on "
            f"{self.dataset.describe_epoch(multiple)}: "
            f"{batch_size} pairs per step on {num_devices} device(s), "
            f"{jax.devices()[0].device_kind}"
        )
        if self.start_step:
            saved_on = self.saved_run.get("num_devices", num_devices)
            change = "" if saved_on == num_devices else f", which ran on {saved_on} device(s)"
            print(f"resuming after step {self.start_step}{change}")
        if self.plan.first_step is not None:
            decays = ", ".join(f"{d:.6g}" for d in self.plan.decays(self.max_train_steps))
            print(f"averaging the weights from step {self.plan.first_step} with decay {decays}")

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
        """Record a step's metrics; every logging_steps append a row to metrics.jsonl.

        Metrics are fetched only when a row is due, so that the host need not wait for each step.

        Args:
            step: number of completed steps.
            metrics: {"loss", "grad_norm"}, replicated arrays.
            schedule: step from 0 -> learning rate.

        Raises:
            FloatingPointError: a loss or gradient since the last row is not finite.
        """
        config = self.config
        self.unfetched_metrics.append(metrics)
        if self.clock_start is None:  # the first step includes compilation
            jax.block_until_ready(metrics)
            self._restart_clock()
        else:
            # The host must not run far ahead, or the progress bar would show steps not yet done.
            if len(self.unfetched_metrics) > MAX_STEPS_IN_FLIGHT:
                jax.block_until_ready(self.unfetched_metrics[-1 - MAX_STEPS_IN_FLIGHT])
            self.num_timed_images += config.train_batch_size
        self.progress.update()
        if step % config.logging_steps and not self._is_last_step(step):
            return
        self._fetch_metrics(step)
        seconds = time.perf_counter() - self.clock_start
        plan, timed = self.plan, self.num_timed_images > 0
        is_averaging = plan.first_step is not None and step > plan.first_step
        num_updates = (step - plan.first_step) // plan.every if is_averaging else 0
        row = {
            "step": step,
            "loss": float(np.mean(self.unlogged_metrics, axis=0)[0]),
            "lr": float(schedule(step - 1)),
            "grad_norm": self.unlogged_metrics[-1][1],
            "images_per_second": self.num_timed_images / seconds if timed else None,
            "data_wait": self.batches.seconds_waited / seconds if timed else None,  # fraction
            "memory_gb": peak_memory(jax.local_devices())[0] / 1e9,
            "ema_decay": plan.decays(num_updates)[0] if num_updates else None,
            "num_bad": self._total_bad(),
        }
        self.unlogged_metrics.clear()
        self._restart_clock()
        if self.is_main:
            self.metrics_log.write(row)
            rate = row["images_per_second"]
            self.progress.set_postfix_str(
                f"loss={row['loss']:.4f}" + (f", {rate:.1f} images/s" if rate else "")
            )

    def _restart_clock(self):
        self.num_timed_images, self.clock_start = 0, time.perf_counter()
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
            OSError: the checkpoint cannot be written.
        """
        with self._pause_clock():
            self._fetch_metrics(step)
            if self.is_main:
                self.checkpoints.wait()  # so that memory holds one checkpoint only
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
            }
            if self.is_main:
                self.checkpoints.save(step, content, metadata)
                if jax.default_backend() == "cpu":  # the next step overwrites the arrays' memory
                    self.checkpoints.wait()
                    release_memory()

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
        """
        release_memory()
        if self.is_main:
            if weights:
                self._save_model(weights)
            self.checkpoints.close()
            self.metrics_log.close()
            if self.config.push_to_hub and weights:
                print(f"uploaded {push_to_hub(self.output_dir, self.repo_id)}")
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

    def _save_model(self, weights):
        """Write the model; final_file(config) last, because it marks a finished run."""
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
            run = lora_identity(config, {name: self.identity[name] for name in WEIGHTS})
            save_lora(output_dir / LORA_FILE, weights["unet"], **lora_options(config), run=run)
            if config.merge_lora:
                merge_lora(config, self.models.unet.dtype)
        else:
            params = {"unet": weights["unet"], **self.frozen_params}
            self.pipeline.save_pretrained(output_dir, params)
        print(f"saved {config.output_dir}")


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


@contextlib.contextmanager
def lock_output_dir(config: Config):
    """A context that locks --output_dir for this run; all processes must enter it together.

    Raises:
        ValueError: another run uses the directory or has just written a model to it.
    """
    output_dir = Path(config.output_dir)
    final = output_dir / final_file(config)
    model_before = modified_at(final)
    with contextlib.ExitStack() as stack:

        def lock():
            stack.enter_context(lock_folder(output_dir))
            # --overwrite_output_dir covers only models that existed before the lock was requested.
            if modified_at(final) != model_before:
                raise ValueError(
                    f"a run that has just ended has written a model to --output_dir {output_dir}; "
                    "name another directory, or replace the model with --overwrite_output_dir"
                )

        on_process_0(lock)
        yield


def merge_finished_run(config: Config):
    """Write the merged pipeline of a finished run with LoRA; all processes call it together."""
    output_dir = Path(config.output_dir)

    def merge():
        repo_id = check_hub(config.hub_model_id, output_dir) if config.push_to_hub else None
        pipeline = merge_lora(config, compute_dtype(config))
        rows = lines_until_step(output_dir / "metrics.jsonl", math.inf)
        write_card(config, pipeline, json.loads(rows[-1]) if rows else None, repo_id)
        write_flags(config)
        print(f"merged {output_dir / LORA_FILE} without training; saved {output_dir}")
        if repo_id:
            print(f"uploaded {push_to_hub(output_dir, repo_id)}")

    on_process_0(merge)


def write_flags(config: Config):
    """Write OUTPUT_DIR/config.json, the flags of the run."""
    write_text(Path(config.output_dir, "config.json"), json.dumps(asdict(config), indent=2) + "\n")


def modified_at(path):
    """Modification time of a file in ns, or None."""
    return path.stat().st_mtime_ns if path.exists() else None


def start_average(params):
    """Start an average as a copy of the sharded parameters."""
    return jax.pmap(ema_start, axis_name="batch")(params)


def make_update_average(devices=None):
    """Make the pmapped update of a sharded average: (average, params, decay) -> average."""
    return jax.pmap(in_place(ema_update), axis_name="batch", donate_argnums=0, devices=devices)
