"""Cost of an average: time, memory and bytes of a step."""

import time

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from benchmarks.ema.runs import AveragedRun, make_programs, trainer_config
from diffusers_flax.data.options import Transform
from diffusers_flax.training.batches import Batches
from diffusers_flax.training.ema import ema_plan, start_average
from diffusers_flax.training.models import load_models
from diffusers_flax.training.sharding import replicate, start_state
from parquet_processing import ParquetImagePairs

COST_DEVICES = 4
COST_PLANS = {
    "none": ema_plan("none", 10**6),
    "late, before its start": ema_plan("late", 10**6, start_step=10**6 - 6),
    "late, after its start": ema_plan("late", 10**6, start_step=0),
    "full": ema_plan("full", 10**6, decay=0.9999),
}


def bytes_held(tree):
    """Bytes of a tree on the first device."""
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def compiled_figures(compiled):
    """The compiler's figures of a program, per device."""
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
    return {
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "bytes_accessed": cost["bytes accessed"],
    }


def measure_cost(folder, rounds, num_steps):
    """Time, memory and bytes of a step with each of COST_PLANS.

    The training step is the same compiled program for every average, which adds its own arrays and
    a program that updates them. Call it in a new process, as it needs COST_DEVICES devices of JAX.

    Returns:
        {"state_bytes", "step" and "update" of compiled_figures, "plans": {name:
        {"average_bytes", "seconds": [of a step, in each round]}}}.
    """
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", COST_DEVICES)
    config = trainer_config(folder)
    models, pipeline, frozen, params = load_models(config, jnp.float32)
    dataset = ParquetImagePairs(
        *config.train_data_dir,
        batch_size=config.train_batch_size,
        transform=Transform(config.resolution),
    )
    batch = next(Batches(dataset, pipeline.prepare_text_inputs))
    inputs = replicate(frozen), batch, replicate(np.asarray(jax.random.PRNGKey(0)))

    programs = make_programs(config, models, params)
    state = start_state(params, programs.tx, programs.axes)
    average, decay = start_average(state.params), replicate(np.float32(0.9999))
    step = programs.train_step.lower(state, *inputs).compile()
    update = programs.update_average.lower(average, state.params, decay).compile()
    figures = {
        "state_bytes": bytes_held(state),
        "step": compiled_figures(step),
        "update": compiled_figures(update),
        "plans": {},
    }
    programs = programs._replace(train_step=step, update_average=update)
    runs = {}
    for name, plan in COST_PLANS.items():
        runs[name] = AveragedRun(programs, {name: plan}, params)
        runs[name].step(*inputs)  # allocates
        runs[name].wait()
        average_bytes = bytes_held(runs[name].averages)
        figures["plans"][name] = {"average_bytes": average_bytes, "seconds": []}

    names = list(runs)
    with tqdm(total=rounds * len(names), desc="step times", unit="run") as bar:
        for number in range(rounds):
            shift = number % len(names)  # none always comes after the same other
            for name in names[shift:] + names[:shift]:
                started = time.perf_counter()
                for _ in range(num_steps):
                    runs[name].step(*inputs)
                    runs[name].wait()
                seconds = (time.perf_counter() - started) / num_steps
                figures["plans"][name]["seconds"].append(seconds)
                bar.update()
    return figures
