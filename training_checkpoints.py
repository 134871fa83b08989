"""Checkpoints of a training run, written in the background by orbax-checkpoint.

    checkpoints = Checkpoints("out/checkpoints", total_limit=2)
    if (step := checkpoints.latest()) is not None:
        run, state = checkpoints.read_run(step), checkpoints.read_state(step)
    checkpoints.save(step, state, run)      # returns before it is written
    checkpoints.close()                     # waits for what is still being written

A checkpoint is a dict of NumPy arrays, whole, however they were shared out over devices, and a dict
of what identifies the run. One that was not finished is never taken for one that was.
"""

import contextlib
import ctypes
import json
import shutil
import zlib
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

from processes_flax import from_process_0, wait_for_all
from sharding_flax import TrainState, replicate, shard, shard_axes
from training_flags import fixed_flags

ARRAYS_AT_ONCE = 32  # arrays of a checkpoint that the host holds while it reads one


class Checkpoints:
    """The checkpoints of one run; one process uses it, the others need not know.

    Args:
        folder: they lie in FOLDER/STEP.
        total_limit: so many are kept, the oldest go; None keeps all.
        first_step: steps the run has done; checkpoints of later ones, which are of another run or
            made anew, are removed when the first is saved. None keeps them.
    """

    def __init__(self, folder, total_limit=None, first_step=None):
        self.folder = Path(folder).absolute()
        self.first_step = first_step
        self.folder.mkdir(parents=True, exist_ok=True)
        # Arrays are handed over, not copied: their memory may be a good part of the host's.
        arrays = ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False)
        registry = ocp.type_handlers.create_type_handler_registry((np.ndarray, arrays))
        this_process = ocp.options.MultiprocessingOptions(
            primary_host=jax.process_index(), active_processes={jax.process_index()}
        )
        self.manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=total_limit,
                cleanup_tmp_directories=first_step is not None,  # of starts that were killed
                multiprocessing_options=this_process,
                create=False,
            ),
            item_handlers={
                "state": ocp.PyTreeCheckpointHandler(
                    type_handler_registry=registry, multiprocessing_options=this_process
                ),
                "run": ocp.JsonCheckpointHandler(multiprocessing_options=this_process),
            },
        )

    def latest(self):
        """Step of the newest complete checkpoint, or None."""
        return self.manager.latest_step()

    def save(self, step, state, run):
        """Write a checkpoint in the background; waits for the one before.

        Args:
            step: optimizer steps done.
            state: dict of NumPy arrays; not to be changed before `wait` has returned.
            run: what identifies the run, for JSON.

        Raises:
            OSError: it, or the one before, cannot be written; older ones are as they were.
        """
        try:
            if self.first_step is not None:
                for later in [s for s in self.manager.all_steps() if s > self.first_step]:
                    self.manager.delete(later)
                self.first_step = None
            needed = sum(x.nbytes for x in state.values())
            free = shutil.disk_usage(self.folder).free
            if free < needed:  # before it starts: a write that fails half-way is noisy
                raise OSError(f"it takes {needed / 1e9:.3g} GB, {free / 1e9:.3g} GB are free")
            self.manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeSave(state), run=ocp.args.JsonSave(run)
                ),
            )
        except Exception as error:
            raise self._fault(error) from error

    def read_run(self, step):
        """What identifies the run, as it was saved.

        Raises:
            ValueError: there is no such checkpoint, or it is damaged.
        """
        return self._read(step, run=ocp.args.JsonRestore())["run"]

    def read_state(self, step, names=None):
        """The arrays as they were saved.

        Args:
            step: of the checkpoint.
            names: of some of them, so that not all are held at once; None reads all.

        Raises:
            ValueError: as for read_run.
        """
        some = {}
        if names is not None:
            as_numpy = ocp.RestoreArgs(restore_type=np.ndarray)
            some = dict(
                item=dict.fromkeys(names, 0),
                restore_args=dict.fromkeys(names, as_numpy),
                partial_restore=True,
            )
        return self._read(step, state=ocp.args.PyTreeRestore(**some))["state"]

    def _read(self, step, **items):
        try:
            return self.manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:
            raise ValueError(
                f"checkpoint {self.folder / str(step)} cannot be read "
                f"({' '.join(str(error).split())[:200]}); remove it, and the one before is taken"
            ) from error

    def wait(self):
        """Wait until everything is written.

        Raises:
            OSError: as for save.
        """
        try:
            self.manager.wait_until_finished()
        except Exception as error:
            raise self._fault(error) from error

    def close(self):
        """Wait, and let go of the threads."""
        self.wait()
        self.manager.close()

    def _fault(self, error):
        whole = [step for step in self.manager.all_steps() if (self.folder / str(step)).exists()]
        with contextlib.suppress(Exception):  # what failed once fails again
            self.manager.close()
        return OSError(
            f"a checkpoint cannot be written to {self.folder} "
            f"({' '.join(str(error).split())[:200]}); "
            + (f"that of step {max(whole)} is complete" if whole else "there is none yet")
        )


def tree_checksum(tree):
    """A number that two trees of arrays share if they are alike, bit for bit."""
    checksum = 0
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        checksum = zlib.crc32(jax.tree_util.keystr(path).encode(), checksum)
        checksum = zlib.crc32(np.ascontiguousarray(x).view(np.uint8), checksum)
    return checksum


def run_identity(config, max_train_steps, dataset, models, params, frozen):
    """What makes two starts the same run, a flat dict for JSON: flags, data, models' weights."""
    data = dataset.state_dict()
    modules = models._asdict() | {"text_encoder": models.text_encoder.module}
    configs = {name: dict(module.config) for name, module in modules.items()}
    return fixed_flags(config, "may_change") | {
        "max_train_steps": max_train_steps,
        "configs of the models": zlib.crc32(json.dumps(configs, default=str).encode()),
        "columns of train_data_dir": data["columns"],
        "shards of train_data_dir": data["data"],
        "weights of unet_model_name_or_path": tree_checksum(params),
        "weights of pretrained_model_name_or_path": tree_checksum(
            [frozen["vae"], frozen["text_encoder"]]
        ),
    }


def find_checkpoint(output_dir, which, identity):
    """Where a run has to go on.

    Args:
        output_dir: of the run; its checkpoints are in OUTPUT_DIR/checkpoints.
        which: "latest" of them, "none", or the folder of one.
        identity: what makes the run this run, a flat dict for JSON.

    Returns:
        (Checkpoints, step, what was saved as `run`), or (None, 0, {}) if it has to begin.

    Raises:
        ValueError: no such checkpoint, a damaged one, or one of another run.
    """
    if which == "none":
        return None, 0, {}
    if which == "latest":
        folder = Path(output_dir, "checkpoints")
        if not folder.is_dir():
            return None, 0, {}
        checkpoints = Checkpoints(folder)
        step = checkpoints.latest()
        if step is None:
            return None, 0, {}
        run = checkpoints.read_run(step)
        model = Path(output_dir, "model_index.json")
        is_last = step == run["identity"]["max_train_steps"]
        if (
            is_last
            and model.exists()
            and model.stat().st_mtime > (folder / str(step)).stat().st_mtime
        ):
            return None, 0, {}  # that run is finished, its model is written: it is to be replaced
    else:
        path = Path(which)
        if not (path.is_dir() and path.name.isdecimal()):
            raise ValueError(
                f"resume_from_checkpoint={which} is no checkpoint; give the folder of one, such "
                "as OUTPUT_DIR/checkpoints/500, or latest or none"
            )
        checkpoints, step = Checkpoints(path.parent), int(path.name)
        run = checkpoints.read_run(step)

    saved = run["identity"]
    current = json.loads(json.dumps(identity))  # tuples are lists there
    different = [
        f"{name} was {saved.get(name)} and is {current.get(name)}"
        for name in sorted(saved.keys() | current.keys())
        if saved.get(name) != current.get(name)
    ]
    if different:
        raise ValueError(
            f"checkpoint {checkpoints.folder / str(step)} is of another run: "
            f"{'; '.join(different)}. Change that back, name another --output_dir, or start anew "
            "with --resume_from_checkpoint none"
        )
    return checkpoints, step, run


def by_name(tree):
    """A tree as a flat dict: names such as "opt_state/0/mu/conv_in/kernel" -> arrays."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves}


def checkpoint_shapes(params, tx, num_averages):
    """Shapes of all arrays of a checkpoint, not sharded, given those of the UNet's parameters."""
    opt_state = jax.eval_shape(tx.init, params)
    return {"params": params, "opt_state": opt_state, "ema": [params] * num_averages}


def read_state(checkpoints, step, shapes):
    """Read a checkpoint onto the devices: process 0 reads it, in parts, and sends it to all.

    Args:
        checkpoints: Checkpoints on process 0, None on the others.
        step: of the checkpoint.
        shapes: checkpoint_shapes.

    Returns:
        (TrainState, list of averages).
    """
    shape_of, axis_of = by_name(shapes), by_name(shard_axes(shapes, jax.device_count()))
    names, arrays = list(shape_of), []
    for start in range(0, len(names), ARRAYS_AT_ONCE):
        part = names[start : start + ARRAYS_AT_ONCE]
        saved = checkpoints.read_state(step, part) if checkpoints else {}
        wait_for_all("process 0 has read")
        for name in part:
            shape = shape_of[name]
            x = saved.pop(name) if checkpoints else np.zeros(shape.shape, shape.dtype)
            arrays.append(shard(from_process_0(x), axis_of[name]))
        release_memory()
    tree = jax.tree.unflatten(jax.tree.structure(shapes), arrays)
    return TrainState(replicate(np.int32(step)), tree["params"], tree["opt_state"]), tree["ema"]


def release_memory():
    """Return freed memory to the system; glibc keeps gigabytes of it otherwise."""
    if malloc_trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        malloc_trim(0)
