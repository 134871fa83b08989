"""Checkpoints of a training run: find one, read it, write them; the signal to stop.

A checkpoint is the directory OUTPUT_DIR/checkpoints/STEP with whole NumPy arrays and a record of
the run, a dict. orbax-checkpoint writes it in the background; incomplete ones have other names.
Only process 0 reads and writes. At SIGTERM all processes stop after the same step.
"""

import contextlib
import json
import os
import signal
import sys
import zlib
from dataclasses import MISSING, fields
from functools import partial
from pathlib import Path

import jax
import numpy as np
from flax.traverse_util import flatten_dict
from jax.experimental import multihost_utils
from optax import MaskedNode

from diffusers_flax.devices.processes import check_agreement
from diffusers_flax.messages import differences, one_line
from diffusers_flax.training.flags import MAY_CHANGE, PER_PROCESS, final_file, fixed_flags, flag
from diffusers_flax.training.models import tree_checksum
from diffusers_flax.training.processes import from_process_0, wait_for_all
from diffusers_flax.training.sharding import (
    TrainState,
    combine,
    join_vectors,
    replicate,
    shard,
    start_state,
    to_host,
)

CHECKPOINTS_DIR = "checkpoints"


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
        record: of the checkpoint from which the run starts, on process 0; {} at step 0.

    Raises:
        ValueError: processes have different flags or data, or the checkpoint belongs to another
            run.
    """

    def __init__(self, config, dataset, identity, plan, axes):
        self.config, self.identity, self.plan, self.axes = config, identity, plan, axes
        self.path, self.record, self.manager, self.error = None, {}, None, None
        shared = fixed_flags(config, PER_PROCESS)
        check_agreement(json.dumps([identity, shared, bool(dataset.latents)]))
        if jax.process_index() == 0:
            self.path, self.record = find_checkpoint(config, identity)
        step = int(self.path.name) if self.path else 0
        numbers = from_process_0(np.int32([step, self.record.get("num_averages", 0)]))
        self.start_step, self.num_averages = numbers.tolist()

    def restore(self, params, tx):
        """Put the training state onto the devices.

        Args:
            params: the UNet's parameters at step 0, NumPy arrays.
            tx: as for start_state.

        Returns:
            (TrainState, list of averages); no averages if the checkpoint has too few.
        """
        if not self.start_step:
            return start_state(params, tx, self.axes), []
        due = self.plan.averages_after(self.start_step)
        arrays = read_arrays(self.path) if self.path else {}
        wait_for_all("process 0 has read")
        if self.path:
            before, now = (x["max_train_steps"] for x in (self.record["identity"], self.identity))
            length = f"; the run had {before} steps and has {now}" if before != now else ""
            print(f"resuming after step {self.start_step}{length}")
            if self.num_averages > due:
                print("the checkpoint's average is dropped; its last weights are trained further")
        params = jax.eval_shape(lambda: flatten_dict(params))  # {path: shape}
        averages = [params] * (due if self.num_averages >= due else 0)
        shapes = {"params": params, "opt_state": jax.eval_shape(tx.init, params), "ema": averages}

        def is_params(x):
            return isinstance(x, dict) and x.keys() == params.keys()

        def read(path, x):
            (name,) = flatten_by_name(x, path)
            return from_process_0(arrays.pop(name) if arrays else np.zeros(x.shape, x.dtype))

        def load(path, tree):
            if not is_params(tree):  # such as the number of steps in an optimizer's state
                return replicate(read(path, tree))
            masked = {key: x for key, x in tree.items() if isinstance(x, MaskedNode)}
            flat = {
                key: read((*path, *map(jax.tree_util.DictKey, key)), tree[key])
                for key in sorted(tree.keys() - masked.keys())
            }
            axes = {key: split for key, split in self.axes.items() if key not in masked}
            return masked | shard(join_vectors(flat, axes), axes)

        tree = jax.tree_util.tree_map_with_path(load, shapes, is_leaf=is_params)
        step = replicate(np.int32(self.start_step))
        return TrainState(step, tree["params"], tree["opt_state"]), tree["ema"]

    def save(self, step, state, averages, reported):
        """Save a checkpoint; its files are written in the background.

        At the last step `close` raises the errors, such as a full disk: the model comes first.

        Args:
            step: number of completed steps.
            state: TrainState.
            averages: list of averages.
            reported: of Reports.state, to continue the reports.
        """
        with self._after_the_model(step):
            if self.manager:
                self.manager.wait_until_finished()  # one in memory
        averages = averages[: self.plan.averages_after(step)]  # no mere copy of the weights
        content = {"params": state.params, "opt_state": state.opt_state, "ema": averages}
        content = flatten_by_name(to_host(content, self.axes))  # with all processes
        if jax.process_index() or self.error:
            return
        record = {"identity": self.identity, **reported, "num_averages": len(averages)}
        with self._after_the_model(step):
            self._write(step, content, record)

    @contextlib.contextmanager
    def _after_the_model(self, step):
        """A context whose errors `close` raises if the step is the last."""
        try:
            yield
        except Exception as error:
            if step < self.identity["max_train_steps"]:
                raise
            self.error = error

    def _write(self, step, content, record):
        """Write the arrays of a checkpoint, {name: array}, and its record."""
        import orbax.checkpoint as ocp  # seconds to import

        if self.manager is None:
            folder = Path(self.config.output_dir, CHECKPOINTS_DIR).resolve()
            folder.mkdir(parents=True, exist_ok=True)
            handlers, this_process = make_handlers()
            options = ocp.CheckpointManagerOptions(
                max_to_keep=self.config.checkpoints_total_limit,
                cleanup_tmp_directories=True,  # of killed processes
                multiprocessing_options=this_process,
                create=False,
            )
            self.manager = ocp.CheckpointManager(folder, options=options, item_handlers=handlers)
            for later in [s for s in self.manager.all_steps() if s > self.start_step]:
                self.manager.delete(later)
        self.manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.PyTreeSave(content), run=ocp.args.JsonSave(record)
            ),
        )
        if jax.default_backend() == "cpu":  # the next step overwrites the arrays' memory
            self.manager.wait_until_finished()

    def close(self):
        """Wait until the last checkpoint is complete; raise the errors of its writing."""
        if self.error:
            raise self.error
        if self.manager:
            self.manager.close()


def run_identity(config, max_train_steps, dataset, models, params, frozen):
    """A flat JSON dict of the flags, data and weights that must not change on resume.

    Only max_train_steps may change, see find_checkpoint.

    Args:
        config: flags of the program.
        max_train_steps: length of the run.
        dataset: ParquetImagePairs or Mixture.
        models, params, frozen: of load_models.

    Raises:
        ValueError: another VAE made the dataset's latents.
    """
    if dataset.latents and dataset.latents["vae"] != f"{tree_checksum(frozen['vae']):08x}":
        source = config.pretrained_vae_model_name_or_path or config.pretrained_model_name_or_path
        raise ValueError(
            f"{dataset.train_data_dir} has latents of another VAE than {source}'s; name "
            "another --cache_latents directory to make new ones"
        )
    data = dataset.state_dict()
    encoders = models.text_encoder
    first, *second = encoders if isinstance(encoders, tuple) else [encoders]
    modules = models._asdict() | {"text_encoder": first.module}
    del modules["condition_scale"]  # no module, and fixed by the model
    modules |= {f"text_encoder_{i}": encoder.module for i, encoder in enumerate(second, 2)}
    configs = {name: dict(module.config) for name, module in modules.items()}
    unet, others = combine(frozen.get("unet", {}), params), [frozen["vae"], frozen["text_encoder"]]
    return fixed_flags(config, MAY_CHANGE) | {
        "max_train_steps": max_train_steps,
        "configs of the models": zlib.crc32(json.dumps(configs, default=str).encode()),
        "columns of train_data_dir": data["columns"],
        "shards of train_data_dir": data["data"],
        "sizes of batches": data.get("sizes"),  # of --aspect_ratio_buckets, with a batch of pairs
        "shares of train_data_dir": data.get("shares"),  # of a mixture
        "weights of unet_model_name_or_path": tree_checksum(unet),
        "weights of pretrained_model_name_or_path": tree_checksum(others),
    }


def newest_checkpoint(output_dir):
    """The newest complete checkpoint of a run, a Path, or None."""
    paths = [path for path in Path(output_dir, CHECKPOINTS_DIR).glob("*") if path.name.isdecimal()]
    return max(paths, key=lambda path: int(path.name), default=None)


def find_checkpoint(config, identity):
    """Find the checkpoint to resume from.

    With --overwrite_output_dir a finished run, whose model is newer than its newest checkpoint,
    starts again unless it can go on to more steps.

    Args:
        config: flags that check_flags has accepted.
        identity: the run's run_identity.

    Returns:
        (Path, its record); (None, {}) to start from step 0.

    Raises:
        ValueError: the checkpoint is missing or belongs to another run.
    """
    resume_from = config.resume_from_checkpoint
    path = newest_checkpoint(config.output_dir) if resume_from == "latest" else Path(resume_from)
    if path is None or resume_from == "none":
        return None, {}
    if not (path.is_dir() and path.name.isdecimal()):
        raise ValueError(
            f"--resume_from_checkpoint {resume_from} is not a checkpoint; give latest, none or its "
            "directory, such as OUTPUT_DIR/checkpoints/500"
        )
    record, step = read_record(path), int(path.name)
    current, saved = json.loads(json.dumps(identity)), dict(record["identity"])  # lists, not tuples
    num_steps, new_num_steps = saved.pop("max_train_steps"), current.pop("max_train_steps")
    # A checkpoint from before a flag has its default.
    defaults = {f.name: f.default for f in fields(config) if f.default is not MISSING}
    defaults = {name: x for name, x in defaults.items() if name in current}
    saved = json.loads(json.dumps(defaults)) | saved
    different = differences(saved, dict.fromkeys(saved) | current)
    has_decayed = config.lr_scheduler != "constant" and step > config.lr_warmup_steps
    goes_on = new_num_steps == num_steps or not has_decayed

    model = Path(config.output_dir, final_file(config))
    is_finished = model.exists() and model.stat().st_mtime > path.stat().st_mtime
    is_replaced = resume_from == "latest" and config.overwrite_output_dir and is_finished
    if is_replaced and (different or new_num_steps <= step or not goes_on):
        print(f"starts again, replacing the finished run of {num_steps} steps")
        return None, {}
    if different:
        raise ValueError(
            f"checkpoint {path} belongs to another run: {'; '.join(different[:5])}. Change that "
            "back, name another --output_dir, or start again with --resume_from_checkpoint none"
        )
    if new_num_steps < step:
        raise ValueError(
            f"the run is to have {new_num_steps} steps, but its checkpoint has done {step}; give "
            f"{step} or more, or start again with --resume_from_checkpoint none"
        )
    if not goes_on:
        raise ValueError(
            f"the run had {num_steps} steps and is to have {new_num_steps}, but "
            f"{flag(config, 'lr_scheduler')} has lowered the learning rate for {num_steps}; train "
            "its UNet further with --unet_model_name_or_path and another --output_dir"
        )
    return path, record


def make_handlers():
    """Orbax's handlers of a checkpoint's items, and its options for one process."""
    import orbax.checkpoint as ocp

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


@contextlib.contextmanager
def naming_damaged_checkpoint(path):
    """A context for reading a checkpoint whose errors name its directory and the remedy."""
    try:
        yield
    except (FileNotFoundError, ValueError, KeyError) as error:
        raise ValueError(
            f"checkpoint {path} is damaged ({one_line(error, 200)}); remove this directory to "
            "resume from the checkpoint before"
        ) from error


def read_record(path):
    """Read the record of a checkpoint; path: its directory."""
    with naming_damaged_checkpoint(path):
        return json.loads((path / "run" / "metadata").read_text())


def read_arrays(path):
    """Read the arrays of a checkpoint, {name: NumPy array}; path: its directory."""
    import orbax.checkpoint as ocp

    handlers, _ = make_handlers()
    with naming_damaged_checkpoint(path):
        return handlers["state"].restore(path.resolve() / "state", args=ocp.args.PyTreeRestore())


def flatten_by_name(tree, path=()):
    """Flatten a tree into {"opt_state/0/mu/conv_in/kernel": array, ...}; path: prefix of names."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    keystr = partial(jax.tree_util.keystr, simple=True, separator="/")
    return {keystr((*path, *keys)): x for keys, x in leaves}


class StopSignal:
    """A context that turns SIGTERM (preemption) and Ctrl-C into a request to stop after a step.

    A signal to one of several processes makes `requested` true on all at the same step. A second
    signal ends the process at once.
    """

    def __init__(self):
        self.number = None  # of the signal
        self.handlers = {}  # {number: handler before the context}

    def __enter__(self):
        numbers = {signal.SIGINT, signal.SIGTERM}
        if jax.distributed.is_initialized():  # jax's handler informs the other processes
            numbers.remove(signal.SIGTERM)
        self.handlers = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def _note(self, number, frame):
        if jax.distributed.is_initialized():
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            self.number = number
        self.__exit__()

    def requested(self, step):
        """Whether to stop after this step; all processes ask after every step."""
        if jax.distributed.is_initialized() and multihost_utils.reached_preemption_sync_point(step):
            self.number = signal.SIGTERM
        return self.number is not None

    def __exit__(self, *exception):
        while self.handlers:
            signal.signal(*self.handlers.popitem())

    def end(self, step):
        """End the process after a step, which is saved; the exit code is 128 + signal number."""
        wait_for_all("process 0 has saved")
        name = signal.Signals(self.number).name
        print(f"stopped by {name} after step {step}, which is saved; to resume, run the command")
        sys.exit(128 + self.number)
