"""The demo's data, and the trainer's loop with the averages of several plans."""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

import flax_train_instruct_pix2pix as trainer
from benchmarks.rows import ROOT
from diffusers_flax.training.ema import make_update_average, start_average
from diffusers_flax.training.sharding import replicate, shard_axes, start_state

RESOLUTION = 64  # of the demo


class Programs(NamedTuple):
    """The trainer's programs for a model and an optimizer, shared by all runs."""

    train_step: Callable
    update_average: Callable
    tx: optax.GradientTransformation
    axes: Any  # shard_axes of the parameters


def make_programs(config, models, params):
    """Programs with these flags of the trainer."""
    tx, _ = trainer.make_optimizer(config, config.max_train_steps)
    axes = shard_axes(params, jax.device_count())
    options = trainer.train_step_options(config)
    step = partial(trainer.train_step, models=models, tx=tx, axes=axes, **options)
    p_train_step = jax.pmap(step, axis_name="batch", donate_argnums=0)
    return Programs(p_train_step, make_update_average(), tx, axes)


class AveragedRun:
    """The trainer's loop, one step per call, with the averages of several plans.

    Args:
        programs: Programs.
        plans: {name: EmaPlan}.
        params: the UNet's, NumPy arrays.
    """

    def __init__(self, programs, plans, params):
        self.programs, self.plans = programs, plans
        self.state = start_state(params, programs.tx, programs.axes)
        self.averages = {name: [] for name in plans}
        self.num_steps = 0

    def step(self, frozen, batch, base_rng):
        """One optimizer step, and the updates that are due after it; arguments on the devices."""
        for name, plan in self.plans.items():
            if self.num_steps == plan.first_step:
                params = self.state.params
                self.averages[name] = [start_average(params) for _ in range(plan.num_averages)]
        self.state, _ = self.programs.train_step(self.state, frozen, batch, base_rng)
        self.num_steps += 1
        for name, plan in self.plans.items():
            if num_updates := plan.update_of(self.num_steps):
                update, params = self.programs.update_average, self.state.params
                self.averages[name] = [
                    update(average, params, replicate(np.float32(decay)))
                    for average, decay in zip(self.averages[name], plan.decays(num_updates))
                ]

    def wait(self):
        """Wait until the devices are done."""
        jax.block_until_ready((self.state, self.averages))


def make_demo(folder, num_pairs, crops_per_photograph):
    """The demo's data and its widened UNet, by their command lines."""
    dataset = ["demo/make_dataset.py", "--output_dir", str(folder), "--num_pairs", str(num_pairs)]
    dataset += ["--crops_per_photograph", str(crops_per_photograph)]
    widen = ["create_modified_unet.py", "--pretrained_model_name_or_path", "demo/base_model"]
    widen += ["--output_dir", str(folder / "unet"), "--overwrite_output_dir"]
    for command in (dataset, widen):
        done = subprocess.run([sys.executable, *command], cwd=ROOT)
        if done.returncode:
            raise ChildProcessError(f"{command[0]} failed; it says why above")


def trainer_config(folder, **flags):
    """The trainer's flags for the demo in a directory."""
    flags = {"lr_warmup_steps": 0, "resolution": RESOLUTION} | flags
    return trainer.Config(
        pretrained_model_name_or_path=str(ROOT / "demo" / "base_model"),
        unet_model_name_or_path=str(folder / "unet"),
        train_data_dir=(str(folder / "data"),),
        **flags,
    )
