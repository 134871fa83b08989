"""The denoising loop with accelerations: caches, fewer branches of guidance, token merging.

    denoise_accelerated(pipeline, params, schedule, ...)  # in place of sampling.denoise

Consecutive steps with the same branches of guidance are one segment, a compiled loop. In it, each
step calls the function of its kind; a static table says which. A cache begins empty in every run
and belongs to the images of the run: it is a part of the loop's carry.

Caches and token merging intercept calls of the UNet's modules (flax.linen's intercept_methods); the
UNet knows nothing of it:

    deepcache    `layer` of the last block: keeps the input of its last layer
    fbcache      `layer` of the first block: its result is known already
    tgate        attention: keeps results, or takes them from the cache
    tome         attention: merges positions before, copies the result after; token_merging.py

Spectrum replaces whole calls of the UNet and needs no interception.
"""

from contextlib import ExitStack
from functools import partial
from itertools import groupby

import flax.linen as nn
import jax
import jax.numpy as jnp

from diffusers_flax.acceleration.plans import (
    DeepCache,
    FirstBlockCache,
    Spectrum,
    TGate,
    plan_steps,
)
from diffusers_flax.acceleration.token_merging import merging_hook
from diffusers_flax.devices.offload import path_in_model
from diffusers_flax.devices.parallelism import choose_axes
from diffusers_flax.models.blocks import TEXT, Attention, project_text
from diffusers_flax.schedulers.noise_schedule import output_of_x0, predict_x0_and_eps


def denoise_accelerated(
    pipeline, params, schedule, keys, prediction, x_t, watch=None, after_step=None
):
    """x_0 of x_t, like sampling.denoise.

    Args:
        pipeline, params: an accelerated FlaxDiffusionPipeline, and its parameters.
        schedule, keys, x_t, watch, after_step: as for sampling.denoise.
        prediction: GuidedPrediction of a plain run.
    """
    acceleration, unet = pipeline.accelerate, pipeline.unet
    scheduler, state, scales, _ = schedule
    steps = plan_steps(acceleration, prediction.branches, scales)
    hooks = prediction.hooks
    if acceleration.tome:
        hooks = (*hooks, merging_hook(acceleration.tome, x_t.shape[2]))
    # tome and fbcache need all rows of an image. A cache that outlives a branch needs the same rows
    # on each device before and after; Spectrum's has all rows, as it is of guided x_0.
    rows_on_branches = not acceleration.tome and not isinstance(
        acceleration.cache, TGate | FirstBlockCache
    )
    first, cache = 0, None
    for active, kinds in group_steps(steps):
        axes = choose_axes(pipeline.layout, unet, len(active), x_t.shape[2], rows_on_branches)
        model = ActiveUNet(unet, params["unet"], active, prediction, hooks, axes)
        by_kind, enter = functions_of(
            acceleration.cache, model, steps, scheduler.vp_prediction_type, scales
        )
        used = sorted(set(kinds))
        functions = [by_kind[kind] for kind in used]
        table = jnp.array([used.index(kind) for kind in kinds], jnp.int32)

        def body(i, carry, functions=functions, table=table, first=first):
            x_t, state, cache = carry
            t = state.timesteps[i]
            arguments = scheduler.scale_model_input(state, x_t, t), t, i, cache
            if len(functions) == 1:
                guided, cache = functions[0](*arguments)
            else:
                with jax.named_scope(f"steps_from_{first}"):  # see switch_fractions
                    guided, cache = jax.lax.switch(table[i - first], functions, *arguments)
            if watch is not None:
                watch(i, arguments[0], guided)
            x_t, state = schedule.step(state, i, t, x_t, guided, keys)
            return (x_t if after_step is None else after_step(i, x_t, state)), state, cache

        last = first + len(kinds)
        carry = x_t, state, enter(cache, x_t)
        x_t, state, cache = jax.lax.fori_loop(first, last, body, carry)
        first = last
    return x_t


class ActiveUNet:
    """A UNet on the input of the branches that a segment computes.

    hooks: functions for flax.linen.intercept_methods, in all calls; axes: ParallelAxes.
    """

    def __init__(self, unet, params, branches, prediction, hooks, axes):
        self.unet, self.branches, self.axes = unet, branches, axes
        self.prediction, self.hooks = prediction, hooks
        text = axes.local_branches(prediction.text(branches))
        variables = {"params": params, TEXT: project_text(params, text, unet.dtype)}
        self.apply = partial(unet.clone(rows_axis=axes.rows).apply, variables)

    def embed(self, i, x, t):
        """(features after conv_in, time embedding, text states) of all branches.

        A ControlNet's residuals follow, if there is one: the arguments of unet.blocks.
        """
        *arguments, timestep_cond = self.axes.split(self.prediction.inputs(self.branches, i, x, t))
        embedded = self.apply(*arguments[:4], timestep_cond, method="embed")
        return *embedded, *arguments[4:]

    def run(self, method, *args, hook=None):
        """A method of the UNet, or a function of the UNet, with the hooks and one more."""
        with ExitStack() as stack:
            for each in (*self.hooks, *([hook] if hook else [])):
                stack.enter_context(nn.intercept_methods(each))
            return self.apply(*args, method=method)

    def finish(self, i, features):
        """The guided prediction of features, float32."""
        predictions = self.apply(features, method="predict").astype(jnp.float32)
        guided, _ = self.prediction.guide(self.axes.gather(predictions), self.branches, i, ())
        return guided


def group_steps(steps):
    """Consecutive steps with the same branches: [(branches, [kind of each step])]."""
    groups = groupby(steps, key=lambda step: step.branches)
    return [(branches, [step.kind for step in group]) for branches, group in groups]


def switch_fractions(steps):
    """Fraction of the steps in which each function of a loop runs: {scope of its switch: tuple}.

    Loops with one function have no switch.
    """
    fractions, first = {}, 0
    for _, kinds in group_steps(steps):
        if len(set(kinds)) > 1:
            shares = tuple(kinds.count(kind) / len(kinds) for kind in sorted(set(kinds)))
            fractions[f"steps_from_{first}"] = shares
        first += len(kinds)
    return fractions


def functions_of(cache, model, steps, prediction_type, scales):
    """The functions of a segment's steps, and how its cache begins; steps: of the whole run.

    Returns ({kind: (model_input, t, i, cache) -> (guided prediction, float32, cache)}, (the cache
    of the segment before, None at first; x_t) -> the cache to start with, a tree of arrays); i is
    the number of the step in the run.
    """
    if isinstance(cache, DeepCache):
        return deep_cache(model)
    if isinstance(cache, FirstBlockCache):
        return first_block_cache(model, cache.threshold)
    if isinstance(cache, TGate):
        return t_gate(model)
    if isinstance(cache, Spectrum):
        table = cache.coefficients([step.kind for step in steps])
        return spectrum(model, table, prediction_type, scales)
    return plain(model)


def empty_cache(function, cache, x):
    """An `enter` that ignores the segment before: zeros like the cache that `function` returns."""
    _, shapes = jax.eval_shape(function, x, jnp.int32(0), jnp.int32(0), None)
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


# Each returns what functions_of returns.


def plain(model):
    """Without a cache."""

    def full(x, t, i, cache):
        features = model.run("blocks", *model.embed(i, x, t))
        return model.finish(i, features), ()

    return {"full": full}, lambda cache, x: ()


def is_layer(context, block, i, args):
    """Whether an intercepted call is of layer i of a block such as "up_blocks_3"."""
    is_block = context.module.name == block and context.method_name == "layer"
    return is_block and args[0] == i


def deep_cache(model):
    """The cache: the input of the UNet's last layer. Source: DeepCache (arXiv 2312.00858)."""
    last_block = f"up_blocks_{len(model.unet.block_out_channels) - 1}"
    layers = model.unet.layers_per_block
    last = layers if isinstance(layers, int) else layers[0]  # an up block has one layer more

    def full(x, t, i, cache):
        kept = []

        def keep(call, args, kwargs, context):
            if is_layer(context, last_block, last, args):
                kept.append(args[1])
            return call(*args, **kwargs)

        features = model.run("blocks", *model.embed(i, x, t), hook=keep)
        return model.finish(i, features), kept[0]

    def shallow(x, t, i, cache):
        def last_layer(unet, skip, time_emb, context):
            return unet.up_blocks[-1].layer(last, cache, skip, time_emb, context)

        return model.finish(i, model.run(last_layer, *model.embed(i, x, t))), cache

    return {"full": full, "shallow": shallow}, partial(empty_cache, full)


def first_block_cache(model, threshold):
    """The cache: what the first layer adds, and what all layers after it add, float32.

    Each image decides whether its own cache is reused, so the result does not depend on the other
    images of the batch; the layers are skipped if all decide so.
    """

    def start(i, x, t):
        embedded = model.embed(i, x, t)
        first = model.run(lambda unet, *args: unet.down_blocks[0].layer(0, *args), *embedded)
        return embedded, first, (first - embedded[0]).astype(jnp.float32)

    def whole(embedded, first, added):
        def is_known(call, args, kwargs, context):
            return first if is_layer(context, "down_blocks_0", 0, args) else call(*args, **kwargs)

        features = model.run("blocks", *embedded, hook=is_known)
        later = features.astype(jnp.float32) - first.astype(jnp.float32)
        return features, {"added": added, "later": later}

    def full(x, t, i, cache):
        features, cache = whole(*start(i, x, t))
        return model.finish(i, features), cache

    def adaptive(x, t, i, cache):
        embedded, first, added = start(i, x, t)
        B = len(x)

        def mean_per_image(y):
            means = jnp.abs(y).mean((1, 2, 3))
            return model.axes.mean_of_branches(means.reshape(-1, B).mean(0))  # over the branches

        change = mean_per_image(added - cache["added"]) / mean_per_image(cache["added"])
        reuse = jnp.tile(change <= threshold, len(first) // B)[:, None, None, None]
        reused = (first.astype(jnp.float32) + cache["later"]).astype(first.dtype)

        def compute():
            features, new = whole(embedded, first, added)
            new = jax.tree.map(partial(jnp.where, reuse), cache, new)
            return jnp.where(reuse, reused, features), new

        features, cache = jax.lax.cond(reuse.all(), lambda: (reused, cache), compute)
        return model.finish(i, features), cache

    return {"full": full, "adaptive": adaptive}, partial(empty_cache, full)


def t_gate(model):
    """The cache: outputs of self-attention, and of cross-attention averaged over the branches.

    Source: T-GATE (arXiv 2404.02747), section 4.
    """

    def run(i, x, t, reuse, store):
        """(guided prediction, {kind of attention: {layer: output}} of the kinds in `store`)."""
        stored = {kind: {} for kind in store}

        def intercept(call, args, kwargs, context):
            if not isinstance(context.module, Attention) or context.method_name != "__call__":
                return call(*args, **kwargs)
            layer = "/".join(path_in_model(context.module))
            kind = "cross" if len(args) > 1 and args[1] is not None else "self"
            out = reuse[kind][layer] if kind in reuse else call(*args, **kwargs)
            if kind in stored:
                stored[kind][layer] = out
            return out

        features = model.run("blocks", *model.embed(i, x, t), hook=intercept)
        return model.finish(i, features), stored

    def mean_over_branches(out):
        num_branches = model.axes.num_local_branches(len(model.branches))
        mean = out.reshape(num_branches, -1, *out.shape[1:]).mean(0)
        return model.axes.mean_of_branches(mean).astype(out.dtype)

    def full(x, t, i, cache):
        return run(i, x, t, {}, ())[0], cache

    def store(x, t, i, cache):
        guided, stored = run(i, x, t, {}, ("self",))
        return guided, cache | stored

    def reuse_self(x, t, i, cache):
        return run(i, x, t, {"self": cache["self"]}, ())[0], cache

    def gate(x, t, i, cache):
        guided, stored = run(i, x, t, {}, ("self", "cross"))
        return guided, stored | {"cross": jax.tree.map(mean_over_branches, stored["cross"])}

    def gated(x, t, i, cache):
        return run(i, x, t, {"cross": cache["cross"]}, ())[0], cache

    def enter(cache, x):
        return empty_cache(gate, None, x) if cache is None else cache

    kinds = {"full": full, "store": store, "reuse_self": reuse_self, "gate": gate, "gated": gated}
    return kinds, enter


def spectrum(model, table, prediction_type, scales):
    """The cache: clean latents of the latest whole steps, float32 (history, B, C, h, w).

    table: Spectrum.coefficients. Source: Spectrum (arXiv 2603.01623).
    """
    weights, alphas, sigmas = map(jnp.asarray, (table, *scales))

    def full(x, t, i, cache):
        features = model.run("blocks", *model.embed(i, x, t))
        guided = model.finish(i, features)
        x_0, _ = predict_x0_and_eps(prediction_type, alphas[i], sigmas[i], x, guided)
        return guided, jnp.concatenate([cache[1:], x_0[None]])

    def forecast(x, t, i, cache):
        x_0 = jnp.tensordot(weights[i], cache, 1)
        return output_of_x0(prediction_type, alphas[i], sigmas[i], x, x_0), cache

    def enter(cache, x):
        return jnp.zeros((weights.shape[1], *x.shape), jnp.float32) if cache is None else cache

    return {"full": full, "forecast": forecast}, enter
