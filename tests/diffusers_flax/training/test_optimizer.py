"""Learning rates and AdamW against PyTorch and diffusers; other optimizers against optax."""

from functools import partial

import jax
import numpy as np
import optax
import pytest
import torch
from diffusers.optimization import get_scheduler
from flax.traverse_util import flatten_dict
from helpers import random_normal
from optax.contrib import muon, schedule_free_adamw, schedule_free_eval_params

import flax_train_instruct_pix2pix as trainer
from diffusers_flax.training.sharding import (
    WholeArrays,
    global_norm,
    join_vectors,
    shard,
    shard_axes,
    start_state,
    to_host,
    update_state,
)

pytestmark = pytest.mark.usefixtures("lenient_optimizer")


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_learning_rates_are_diffusers(name, warmup):
    num_steps, peak = 12, 3e-4
    config = trainer.Config("", "", learning_rate=peak, lr_scheduler=name, lr_warmup_steps=warmup)
    _, schedule = trainer.make_optimizer(config, num_steps)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    reference = get_scheduler(
        "constant_with_warmup" if name == "constant" else name,
        optimizer,
        num_warmup_steps=warmup,
        num_training_steps=num_steps,
    )
    for step in range(num_steps):
        assert float(schedule(step)) == pytest.approx(reference.get_last_lr()[0], abs=1e-7 * peak)
        optimizer.step()
        reference.step()
    assert float(schedule(0)) == (0 if warmup else pytest.approx(peak))
    assert float(schedule(warmup)) == pytest.approx(peak)
    end = float(schedule(num_steps))
    assert end == pytest.approx(peak if name == "constant" else 0, abs=1e-7 * peak)


def test_optimizer_is_pytorchs_adamw_with_clipping():
    """Hugging Face's settings, with gradient norms above and below the clipping threshold."""
    rng = np.random.default_rng(0)
    shapes = {"kernel": (5, 3), "bias": (3,), "scale": (1,)}
    params = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    betas, epsilon, weight_decay, max_norm, peak, num_steps = (0.9, 0.999), 1e-8, 1e-2, 1.0, 0.05, 6
    config = trainer.Config("", "", learning_rate=peak, lr_scheduler="linear", lr_warmup_steps=2)
    assert betas == (config.adam_beta1, config.adam_beta2)
    assert (epsilon, weight_decay) == (config.adam_epsilon, config.adam_weight_decay)
    tx, _ = trainer.make_optimizer(config, num_steps)
    opt_state = tx.init(params)
    theirs = {name: torch.nn.Parameter(torch.tensor(x)) for name, x in params.items()}
    reference = torch.optim.AdamW(
        theirs.values(), lr=peak, betas=betas, eps=epsilon, weight_decay=weight_decay
    )
    lr_scheduler = get_scheduler(
        "linear", reference, num_warmup_steps=2, num_training_steps=num_steps
    )

    norms = []
    for step in range(num_steps):
        size = 10.0 ** (step % 3 - 2)
        grads = {
            name: rng.normal(0, size, x.shape).astype(np.float32) for name, x in params.items()
        }
        for name, p in theirs.items():
            p.grad = torch.tensor(grads[name])
        norms.append(torch.nn.utils.clip_grad_norm_(theirs.values(), max_norm).item())
        reference.step()
        lr_scheduler.step()
        axes = shard_axes(grads, 1)
        norm = float(global_norm(join_vectors(flatten_dict(grads), axes), axes))
        np.testing.assert_allclose(norm, norms[-1], rtol=1e-6)
        grads = {name: g * min(1, max_norm / norm) for name, g in grads.items()}
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        for name, p in theirs.items():
            np.testing.assert_allclose(params[name], p.detach().numpy(), rtol=1e-6, atol=1e-6)
    assert min(norms) < max_norm < max(norms)


RATE, DECAY = 0.03, 0.1
WITH_BETAS = dict(b1=0.9, b2=0.999, weight_decay=DECAY)
OPTIMIZERS = {
    "adamw": optax.adamw(RATE, **WITH_BETAS),
    "lion": optax.lion(RATE, **WITH_BETAS),
    "muon": muon(RATE, consistent_rms=0.2, weight_decay=DECAY),
    "adafactor": optax.adafactor(
        RATE, multiply_by_parameter_scale=False, weight_decay_rate=RATE * DECAY
    ),
    "schedule_free": schedule_free_adamw(RATE, **WITH_BETAS),
}


def as_matrices(arrays):
    """Kernels as matrices of inputs x outputs; vectors stay."""
    return {path: x.reshape(-1, x.shape[-1]) if x.ndim > 1 else x for path, x in arrays.items()}


@pytest.mark.parametrize("name", OPTIMIZERS)
@jax.numpy_dtype_promotion("standard")
def test_on_four_devices_it_is_optaxs_on_whole_arrays(name):
    """Adafactor takes means of rows only of the larger matrix. Optax's Muon knows matrices only."""
    shapes = {"large": (132, 160), "kernel": (3, 3, 4, 8), "bias": (8,), "scale": (5,)}
    params, *all_grads = [
        {path: random_normal(*shape, seed=seed) for path, shape in shapes.items()}
        for seed in range(4)
    ]
    config = trainer.Config("", "", optimizer=name, learning_rate=RATE, adam_weight_decay=DECAY)
    tx, _ = trainer.make_optimizer(config, 10)
    axes = shard_axes(params, jax.device_count(), whole=isinstance(tx, WholeArrays))
    state = start_state(params, tx, axes)
    update = partial(update_state, tx, loss=np.float32(0), axes=axes, max_grad_norm=1.0)
    p_update = jax.pmap(lambda state, grads: update(state, grads=grads)[0], axis_name="batch")
    reference = optax.chain(optax.clip_by_global_norm(1.0), OPTIMIZERS[name])
    trained = as_matrices(params)
    opt_state = reference.init(trained)
    for grads in all_grads:
        state = p_update(state, shard(join_vectors(flatten_dict(grads), axes), axes))
        updates, opt_state = jax.jit(reference.update)(as_matrices(grads), opt_state, trained)
        trained = optax.apply_updates(trained, updates)
    best = trained
    if name == "schedule_free":
        best = schedule_free_eval_params(opt_state[1], trained)
    best_here = trainer.best_weights(state, [])
    start = as_matrices(params)
    for shards, expected in ((state.params, trained), (best_here, best)):
        for path, x in as_matrices(to_host(shards, axes)).items():
            np.testing.assert_allclose(x, expected[path], rtol=1e-5, atol=1e-6, err_msg=path)
            assert np.abs(x - start[path]).max() > RATE / 2
