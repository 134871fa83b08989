"""Checkpoints of a training run: find one, read it, write them, stop after a signal.

A checkpoint is the directory OUTPUT_DIR/checkpoints/STEP with whole NumPy arrays and a record of
the run, a dict. orbax-checkpoint writes it in the background; incomplete ones are never read. Only
process 0 reads and writes.
"""

import contextlib
import ctypes
import json
import shutil
import signal
import sys
import zlib
from dataclasses import MISSING, fields
from functools import partial
from pathlib import Path

import jax
import numpy as np
from flax.traverse_util import flatten_dict

from diffusers_flax.data.streaming import changed_files
from diffusers_flax.devices.processes import check_agreement
from diffusers_flax.loading.directories import INDEX_NAME
from diffusers_flax.messages import differences, one_line
from diffusers_flax.training.flags import (
    MAY_CHANGE,
    PER_PROCESS,
    final_file,
    fixed_flags,
    flag,
)
from diffusers_flax.training.latents import check_vae
from diffusers_flax.training.models import checksums
from diffusers_flax.training.processes import (
    StopSignal,
    from_process_0,
    on_process_0,
    wait_for_all,
)
from diffusers_flax.training.sharding import (
    TrainState,
    join_vectors,
    replicate,
    shard,
    start_state,
    to_host,
)

CHECKPOINTS_DIR = "checkpoints"
ARRAYS_PER_READ = 32  # limits the host memory that reading takes


class Checkpoints:
    """The checkpoints of one run; all processes make the same calls.

    Args:
        config: flags that check_flags has accepted.
        dataset: ParquetImagePairs or Mixture.
        identity: of run_identity.
        plan: EmaPlan.
        axes: of shard_axes.

    Attributes:
        start_step: number of completed steps at the start; 0: no checkpoint.
        saved: record of the checkpoint's run, on process 0; {} at step 0.
        num_averages: number of averages in the checkpoint.
        stop_signal: StopSignal; a context of the loop.
        is_stopped: whether the run ends because of the signal.

    Raises:
        ValueError: processes have different flags or data, or the checkpoint is damaged or belongs
            to another run.
    """

    def __init__(self, config, dataset, identity, plan, axes):
        self.config, self.identity, self.plan, self.axes = config, identity, plan, axes
        self.num_steps = identity["max_train_steps"]
        self.is_main, self.files, self.error = jax.process_index() == 0, None, None
        self.stop_signal, self.is_stopped, self.num_params = StopSignal(), False, None
        shared = fixed_flags(config, PER_PROCESS)
        check_agreement(json.dumps([identity, shared, bool(dataset.latents)]))
        find = partial(find_checkpoint, config, identity)
        self.found, step, self.saved = on_process_0(find) or (None, 0, {})
        self.start_step = int(from_process_0(np.int32(step)))
        due = plan.averages_after(step)  # for checkpoints that lack num_averages
        self.num_averages = int(from_process_0(np.int32(self.saved.get("num_averages", due))))

    def restore(self, params, tx):
        """Put the training state onto the devices.

        Args:
            params: the UNet's parameters at step 0, NumPy arrays.
            tx: element-wise optax optimizer, such as Adam.

        Returns:
            (TrainState, list of averages); no averages if the checkpoint has too few.
        """
        self.num_params = sum(x.size for x in jax.tree.leaves(params))
        if not self.start_step:
            state, averages = start_state(params, tx, self.axes), []
        else:
            due = self.plan.averages_after(self.start_step)
            num_to_read = due if self.num_averages >= due else 0
            shapes = checkpoint_shapes(jax.eval_shape(lambda: params), tx, num_to_read)
            state, averages = read_state(self.found, self.start_step, shapes, self.axes)
            if self.found:
                self.found.close()
        release_memory()
        return state, averages

    def describe_resume(self, num_steps):
        """Describe the step after which a run of this length resumes, and what has changed."""
        num_devices, before = jax.device_count(), self.saved["identity"]["max_train_steps"]
        saved_on = self.saved.get("num_devices", num_devices)
        change = "" if saved_on == num_devices else f", which ran on {saved_on} device(s)"
        if before != num_steps:
            change += f"; the run had {before} steps and has {num_steps}"
        return f"resuming after step {self.start_step}{change}"

    def is_due(self, step):
        """Whether to save after a step: at the interval, at the end, and after a stop signal.

        Every process asks after each step, so that all stop after the same one.
        """
        every, is_last = self.config.checkpointing_steps, step == self.num_steps
        self.is_stopped = self.stop_signal.requested(step) and not is_last
        return self.is_stopped or (every > 0 and (step % every == 0 or is_last))

    def save(self, step, state, averages, reports):
        """Save a checkpoint; its files are written in the background.

        Args:
            step: number of completed steps.
            state: TrainState.
            averages: list of averages.
            reports: Reports, which do not count the time.

        Raises:
            OSError: it cannot be written; for the last step raise_error raises it.
        """
        with reports.pause():
            reports.fetch(step)
            if self.is_main:
                self._write(step, lambda: self.files and self.files.wait())  # one in memory
            release_memory()  # writing takes gigabytes
            averages = averages[: self.plan.averages_after(step)]  # no mere copy of the weights
            content = {"params": state.params, "opt_state": state.opt_state, "ema": averages}
            content = flatten_by_name(to_host(content, self.axes))
            record = {
                "identity": self.identity,
                "metrics": reports.unlogged,
                "num_bad": reports.num_bad(),
                "num_devices": jax.device_count(),
                "num_averages": len(averages),
            }
            if self.is_main:
                self._write(step, partial(self._save, step, content, record))
                reports.draw()
                if jax.default_backend() == "cpu":  # the next step overwrites the arrays' memory
                    self._write(step, self.files.wait)
                    release_memory()

    def _save(self, step, content, record):
        if self.files is None:
            folder = Path(self.config.output_dir, CHECKPOINTS_DIR)
            limit = self.config.checkpoints_total_limit
            self.files = CheckpointFiles(folder, limit, self.start_step)
        self.files.save(step, content, record)

    def _write(self, step, write):
        if self.error is None:
            try:
                write()
            except OSError as error:
                if step != self.num_steps:
                    raise
                self.error = error

    def close(self):
        """Wait until the last checkpoint is complete or has failed, see raise_error."""
        if self.files is not None:
            self._write(self.num_steps, self.files.close)
        release_memory()

    def raise_error(self):
        """Raise an OSError if the last checkpoint could not be written; the model is saved."""
        if self.error:
            raise OSError(
                f"{self.error}; the model is saved in {self.config.output_dir}"
            ) from self.error

    def exit_after_signal(self, step):
        """End a run that a signal stopped after a step; the exit code is 128 + signal number."""
        if self.files is not None:
            self.files.close()
        wait_for_all("process 0 has saved")
        resumes = self.config.resume_from_checkpoint == "latest"
        print(
            f"stopped by {signal.Signals(self.stop_signal.number).name} after step {step} of "
            f"{self.num_steps}, which is saved; to resume, run the same command"
            + ("" if resumes else " with --resume_from_checkpoint latest")
        )
        sys.exit(128 + self.stop_signal.number)


def run_identity(config, max_train_steps, dataset, models, params, frozen):
    """A flat JSON dict of the flags, data and weights that must not change on resume.

    Only max_train_steps may change, see refuse_length.

    Args:
        config: flags of the program.
        max_train_steps: length of the run.
        dataset: ParquetImagePairs or Mixture.
        models, params, frozen: of load_models.

    Raises:
        ValueError: another VAE made the dataset's latents.
    """
    check_vae(dataset, frozen["vae"], config)
    data = dataset.state_dict()
    encoders = models.text_encoder
    first, *second = encoders if isinstance(encoders, tuple) else [encoders]
    modules = models._asdict() | {"text_encoder": first.module}
    del modules["condition_scale"]  # no module, and fixed by the model
    modules |= {f"text_encoder_{i}": encoder.module for i, encoder in enumerate(second, 2)}
    configs = {name: dict(module.config) for name, module in modules.items()}
    return fixed_flags(config, MAY_CHANGE) | {
        "max_train_steps": max_train_steps,
        "configs of the models": zlib.crc32(json.dumps(configs, default=str).encode()),
        "columns of train_data_dir": data["columns"],
        "shards of train_data_dir": data["data"],
        "versions": data.get("versions"),  # of streamed shards
        "sizes of batches": data.get("sizes"),  # of --aspect_ratio_buckets, with a batch of pairs
        "shares of train_data_dir": data.get("shares"),  # of a mixture
        **checksums(frozen, params),
    }


def new_flags(identity, config):
    """Default values, as JSON, of the flags in identity, for checkpoints without new flags."""
    defaults = {f.name: f.default for f in fields(config) if f.default is not MISSING}
    return json.loads(json.dumps({name: defaults[name] for name in identity if name in defaults}))


def newest_run(config):
    """The checkpoint of --resume_from_checkpoint latest, (CheckpointFiles, step, record).

    None: output_dir has no checkpoint, or the flag is not latest.
    """
    folder = Path(config.output_dir, CHECKPOINTS_DIR)
    if config.resume_from_checkpoint != "latest" or not folder.is_dir():
        return None
    files = CheckpointFiles(folder)
    step = files.latest()
    return None if step is None else (files, step, files.read_record(step))


def is_newer(model, checkpoint):
    """Whether a run is finished: its model is newer than its newest complete checkpoint; Paths."""
    return model.exists() and model.stat().st_mtime > checkpoint.stat().st_mtime


def refuse_model(config, advice):
    """The error for an output_dir that contains a model."""
    return ValueError(
        f"{flag(config, 'output_dir')} contains a model; {advice}; or name another directory, or "
        "replace the model with --overwrite_output_dir"
    )


def check_goes_on(config):
    """Raise a ValueError if the run in output_dir is finished and is not made longer.

    Args:
        config: flags of the program, whose output_dir has a model.
    """
    newest = newest_run(config)
    if newest is None:
        unet, advice = Path(config.output_dir, "unet"), "it has no checkpoint to go on from"
        if unet.is_dir():
            advice += f"; another run trains it further with --unet_model_name_or_path {unet}"
        raise refuse_model(config, advice)
    files, step, record = newest
    files.close()
    checkpoint, num_steps = files.folder / str(step), record["identity"]["max_train_steps"]
    is_finished = is_newer(Path(config.output_dir, final_file(config)), checkpoint)
    if is_finished and config.num_train_epochs is None and config.max_train_steps <= num_steps:
        length = (num_steps, config.max_train_steps)
        raise refuse_model(config, refuse_length(config, checkpoint, *length, True))


def find_checkpoint(config, identity):
    """Find the checkpoint to resume from.

    A run is finished if its model is newer than its newest complete checkpoint. With
    --overwrite_output_dir a finished run starts again, unless it can go on to more steps.

    Args:
        config: flags that check_flags has accepted.
        identity: the run's run_identity.

    Returns:
        (CheckpointFiles, step, record); (None, 0, {}) to start from step 0.

    Raises:
        ValueError: the checkpoint is missing, damaged, or belongs to another run.
    """
    resume_from, max_train_steps = config.resume_from_checkpoint, identity["max_train_steps"]
    if resume_from in ("none", "latest"):
        newest = newest_run(config)
        if newest is None:
            make_handlers()  # an error of orbax ends the run before it compiles
            return None, 0, {}
        files, step, record = newest
    else:
        path = Path(resume_from)
        if not (path.is_dir() and path.name.isdecimal()):
            raise ValueError(
                f"--resume_from_checkpoint {resume_from} is not a checkpoint; give latest, none or "
                "its directory, such as OUTPUT_DIR/checkpoints/500"
            )
        files, step = CheckpointFiles(path.parent), int(path.name)
        record = files.read_record(step)

    saved, checkpoint = dict(record["identity"]), files.folder / str(step)
    num_steps = saved["max_train_steps"]
    current = json.loads(json.dumps(identity))  # tuples become lists
    current["max_train_steps"] = num_steps  # see refuse_length
    different = changed_files(saved.pop("versions", None), current.pop("versions", None))
    different += differences(new_flags(current, config) | saved, dict.fromkeys(saved) | current)
    model = Path(config.output_dir, final_file(config))
    is_finished = resume_from == "latest" and is_newer(model, checkpoint)
    refusal = refuse_length(config, checkpoint, num_steps, max_train_steps, is_finished)
    if is_finished and config.overwrite_output_dir:
        if step == num_steps and (different or refusal):
            files.close()
            change = f" ({'; '.join(different)})" if different else ""
            print(f"starts again, replacing the finished run of {num_steps} steps{change}")
            return None, 0, {}
        # Without a checkpoint of its last step the run may have been killed: it goes on.
        refusal = refuse_length(config, checkpoint, num_steps, max_train_steps, False)
    elif is_finished and max_train_steps <= num_steps:
        raise refuse_model(config, refusal)
    if different:
        named = different[:5] + [f"and {len(different) - 5} more"] * (len(different) > 5)
        raise ValueError(
            f"checkpoint {checkpoint} belongs to another run: {'; '.join(named)}. Change that "
            "back, name another --output_dir, or start again with --resume_from_checkpoint none"
        )
    if refusal:
        raise ValueError(refusal)
    return files, step, record


def refuse_length(config, checkpoint, num_steps, new_num_steps, is_finished):
    """The message for a run that cannot go on with another length; None: it can.

    Args:
        config: flags of the program.
        checkpoint: Path, RUN/checkpoints/STEP.
        num_steps, new_num_steps: length of the run so far, and as asked for.
        is_finished: whether RUN has its model.
    """
    step, further = int(checkpoint.name), "name another --output_dir"
    if final_file(config) == INDEX_NAME:  # no run starts from a LoRA
        unet = checkpoint.parent.parent / "unet"
        further = f"train its UNet further with --unet_model_name_or_path {unet}, and {further}"
    has_decayed = config.lr_scheduler != "constant" and step > config.lr_warmup_steps
    if is_finished and new_num_steps <= num_steps:
        advice = further if has_decayed else "give more to train it longer"
        return f"its run had {num_steps} steps; {advice}"
    if new_num_steps < step:
        return (
            f"the run is to have {new_num_steps} steps, but its checkpoint has done {step}; give "
            f"{step} or more, or start again with --resume_from_checkpoint none"
        )
    if new_num_steps == num_steps or not has_decayed:
        return None
    return (
        f"the run had {num_steps} steps and is to have {new_num_steps}, but "
        f"{flag(config, 'lr_scheduler')} has lowered the learning rate for {num_steps}; {further}"
    )


def make_handlers():
    """Orbax's handlers of a checkpoint's items, and its options for one process."""
    import orbax.checkpoint as ocp  # seconds to import

    # No copies: the arrays may take a large part of the host's memory.
    arrays = ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False)
    registry = ocp.type_handlers.create_type_handler_registry((np.ndarray, arrays))
    this_process = ocp.options.MultiprocessingOptions(
        primary_host=jax.process_index(), active_processes={jax.process_index()}
    )
    handlers = {
        "state": ocp.PyTreeCheckpointHandler(
            type_handler_registry=registry, multiprocessing_options=this_process
        ),
        "run": ocp.JsonCheckpointHandler(multiprocessing_options=this_process),
    }
    return handlers, this_process


class CheckpointFiles:
    """The checkpoints FOLDER/STEP; one process reads and writes them.

        files = CheckpointFiles("out/checkpoints", total_limit=2)
        if (step := files.latest()) is not None:
            record, state = files.read_record(step), files.read_state(step)
        files.save(step, state, record)   # returns before the files are written
        files.close()                     # waits for the last save

    Args:
        folder: directory.
        total_limit: number of newest checkpoints to keep; None: all.
        first_step: step at which the run starts; the first save removes checkpoints of later steps.
            None keeps them.
    """

    def __init__(self, folder, total_limit=None, first_step=None):
        self.folder = Path(folder).resolve()
        self.first_step = first_step
        self.folder.mkdir(parents=True, exist_ok=True)
        import orbax.checkpoint as ocp  # seconds to import

        self.ocp = ocp
        item_handlers, this_process = make_handlers()
        self.manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=total_limit,
                cleanup_tmp_directories=first_step is not None,  # of killed processes
                multiprocessing_options=this_process,
                create=False,
            ),
            item_handlers=item_handlers,
        )

    def latest(self):
        """Step of the newest complete checkpoint, or None."""
        return self.manager.latest_step()

    def save(self, step, state, record):
        """Write a checkpoint in the background, once the previous one is complete.

        Args:
            step: number of completed steps.
            state: dict of NumPy arrays; must not change until `wait` returns.
            record: JSON dict that identifies the run.

        Raises:
            OSError: this checkpoint or the previous one cannot be written; older ones are intact.
        """
        try:
            if self.first_step is not None:
                for later in [s for s in self.manager.all_steps() if s > self.first_step]:
                    self.manager.delete(later)
                self.first_step = None
            needed = sum(x.nbytes for x in state.values())
            free = shutil.disk_usage(self.folder).free
            if free < needed:  # checked first, as orbax logs tracebacks when a write fails
                raise OSError(f"it takes {needed / 1e9:.3g} GB, {free / 1e9:.3g} GB are free")
            self.manager.save(
                step,
                args=self.ocp.args.Composite(
                    state=self.ocp.args.PyTreeSave(state), run=self.ocp.args.JsonSave(record)
                ),
            )
        except Exception as error:
            raise self._close_and_explain(error) from error

    def read_record(self, step):
        """Read the record of the run.

        Raises:
            ValueError: the checkpoint is missing or damaged.
        """
        return self._read(step, run=self.ocp.args.JsonRestore())["run"]

    def read_state(self, step, names=None):
        """Read the arrays.

        Args:
            step: of the checkpoint.
            names: arrays to read; None: all.

        Raises:
            ValueError: the checkpoint is missing or damaged.
        """
        options = {}
        if names is not None:
            as_numpy = self.ocp.RestoreArgs(restore_type=np.ndarray)
            options = dict(
                item=dict.fromkeys(names, 0),
                restore_args=dict.fromkeys(names, as_numpy),
                partial_restore=True,
            )
        return self._read(step, state=self.ocp.args.PyTreeRestore(**options))["state"]

    def _read(self, step, **items):
        try:
            return self.manager.restore(step, args=self.ocp.args.Composite(**items))
        except Exception as error:
            raise ValueError(
                f"checkpoint {self.folder / str(step)} cannot be read "
                f"({one_line(error, 200)}); remove it to resume from the previous one"
            ) from error

    def wait(self):
        """Wait until the checkpoint is written.

        Raises:
            OSError: the checkpoint cannot be written.
        """
        try:
            self.manager.wait_until_finished()
        except Exception as error:
            raise self._close_and_explain(error) from error

    def close(self):
        """Wait, then stop the threads."""
        self.wait()
        self.manager.close()

    def _close_and_explain(self, error):
        steps = self.manager.all_steps()
        complete = [step for step in steps if (self.folder / str(step)).exists()]
        with contextlib.suppress(Exception):  # close() raises the same error again
            self.manager.close()
        return OSError(
            f"a checkpoint cannot be written to {self.folder} "
            f"({one_line(error, 200)}); "
            + (
                f"the one of step {max(complete)} is complete"
                if complete
                else "none is complete yet"
            )
        )


def flatten_by_name(tree, path=()):
    """Flatten a tree into a dict with names such as "opt_state/0/mu/conv_in/kernel".

    path: of the tree in a larger one; its keys come first in the names.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    keystr = partial(jax.tree_util.keystr, simple=True, separator="/")
    return {keystr((*path, *keys)): x for keys, x in leaves}


def checkpoint_shapes(params, tx, num_averages):
    """Shapes of a checkpoint's arrays, not sharded; params: shapes of the trained parameters."""
    opt_state = jax.eval_shape(tx.init, params)
    return {"params": params, "opt_state": opt_state, "ema": [params] * num_averages}


def read_state(files, step, shapes, axes):
    """Read a checkpoint onto the devices; process 0 reads a few arrays at a time and sends them.

    Args:
        files: CheckpointFiles on process 0, None on other processes.
        step: of the checkpoint.
        shapes: of checkpoint_shapes.
        axes: of shard_axes.

    Returns:
        (TrainState, list of averages).
    """
    structure = jax.tree.structure(shapes["params"])

    def is_params(x):
        return jax.tree.structure(x) == structure

    def read(shape_of):
        """Whole arrays of some names, on all processes: {name: array}."""
        saved = files.read_state(step, list(shape_of)) if files else {}
        wait_for_all("process 0 has read")
        for name, shape in shape_of.items():
            x = saved.pop(name) if files else np.zeros(shape.shape, shape.dtype)
            yield name, from_process_0(x)
        release_memory()

    def load(path, tree):
        of_name = flatten_by_name(tree, path)
        if not is_params(tree):  # such as the number of steps in an optimizer's state
            return replicate(dict(read(of_name)).popitem()[1])
        path_of = dict(zip(of_name, sorted(flatten_dict(tree))))  # both in jax's order
        shards, vectors, names = {}, {}, list(of_name)
        for start in range(0, len(names), ARRAYS_PER_READ):
            for name, x in read({name: of_name[name] for name in names[start:][:ARRAYS_PER_READ]}):
                if x.ndim == 1:
                    vectors[path_of[name]] = x
                else:
                    shards[path_of[name]] = shard(x, axes[path_of[name]])
        joined = {path: split for path, split in axes.items() if split.vectors}
        return shards | shard(join_vectors(vectors, joined), joined)

    tree = jax.tree_util.tree_map_with_path(load, shapes, is_leaf=is_params)
    return TrainState(replicate(np.int32(step)), tree["params"], tree["opt_state"]), tree["ema"]


def release_memory():
    """Return freed memory to the system; glibc otherwise keeps gigabytes."""
    if malloc_trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        malloc_trim(0)
