"""The optimizer of a training run and its learning rate."""

import optax


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
        config: training.flags.Config.
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
    return tx, schedule
