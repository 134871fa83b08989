"""The functions that the steps of an accelerated denoising loop call: caches, fewer branches.

    scales = noise_scales(state)
    steps = plan_steps(acceleration, branches, scales)
    segments = make_segments(
        acceleration, steps, unet, params, inputs, guide, prediction_type, scales
    )
    x_0 = denoise(scheduler, state, x_t, keys, segments)

Consecutive steps with the same branches of guidance are one segment, a compiled loop. In it, each
step calls the function of its kind; a static table says which. A cache begins empty in every run
and belongs to the images of the run: it is a part of the loop's carry.
"""

from functools import partial
from itertools import groupby

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from diffusers_flax.acceleration.plans import DeepCache, FirstBlockCache, Spectrum, TGate
from diffusers_flax.acceleration.token_merging import merge_positions
from diffusers_flax.models.blocks import Attention
from diffusers_flax.pipelines.sampling import Segment
from diffusers_flax.schedulers.noise_schedule import predict_x0_and_eps


def noise_scales(state):
    """The steps' alpha and sigma in x_t = alpha x_0 + sigma eps, alpha^2 + sigma^2 = 1.

    Args:
        state: of a scheduler's set_timesteps, concrete arrays.

    Returns:
        (alpha, sigma), NumPy float32 (steps,).
    """
    timesteps = np.asarray(state.timesteps)
    if hasattr(state, "sigmas"):  # sigma / alpha
        ratio = np.asarray(state.sigmas, np.float64)[: len(timesteps)]
        alpha = 1 / np.sqrt(1 + ratio**2)
    else:
        alpha = np.sqrt(np.asarray(state.common.alphas_cumprod, np.float64)[timesteps])
    return alpha.astype(np.float32), np.sqrt(1 - alpha**2).astype(np.float32)


class ActiveUNet:
    """A UNet on the input of the branches that a segment computes.

    Args:
        apply: unet.apply with parameters.
        branches: of guidance.
        inputs, guide: as for make_segments.
    """

    def __init__(self, apply, branches, inputs, guide):
        self.apply, self.branches = apply, branches
        self.inputs, self.guide = inputs, guide

    def embed(self, x, t):
        """(features after conv_in, time embedding, text states) of all branches."""
        return self.apply(*self.inputs(self.branches, x, t), method="embed")

    def finish(self, features):
        """The guided prediction of features, float32."""
        predictions = self.apply(features, method="predict").astype(jnp.float32)
        return self.guide(self.branches, predictions)


def group_steps(steps):
    """Consecutive steps with the same branches: [(branches, [kind of each step])]."""
    groups = groupby(steps, key=lambda step: step.branches)
    return [(branches, [step.kind for step in group]) for branches, group in groups]


def switch_shares(steps):
    """How often the loops compute each of their functions, per step.

    Returns:
        One tuple for each loop that has several functions, see flops.matmul_flops.
    """
    return tuple(
        tuple(kinds.count(kind) / len(kinds) for kind in sorted(set(kinds)))
        for _, kinds in group_steps(steps)
        if len(set(kinds)) > 1
    )


def make_segments(acceleration, steps, unet, params, inputs, guide, prediction_type, scales):
    """The segments of a run.

    Args:
        acceleration: Acceleration.
        steps: of plan_steps.
        unet, params: FlaxUNet2DConditionModel and its parameters.
        inputs: (branches, x_t, t) -> the arguments of unet.embed, a tuple; the rows of one branch
            after those of the other.
        guide: (branches, predictions, float32 (branches * B, C, h, w)) -> guided (B, C, h, w).
        prediction_type: of the scheduler's config.
        scales: of noise_scales.

    Returns:
        List of Segment, for denoise.
    """
    apply = partial(unet.apply, {"params": params})
    if acceleration.tome:
        apply = merge_positions(acceleration.tome, apply)
    cache, all_kinds = acceleration.cache, [step.kind for step in steps]
    segments = []
    for branches, kinds in group_steps(steps):
        model = ActiveUNet(apply, branches, inputs, guide)
        if isinstance(cache, DeepCache):
            functions, enter = deep_cache(model)
        elif isinstance(cache, FirstBlockCache):
            functions, enter = first_block_cache(model, cache.threshold)
        elif isinstance(cache, TGate):
            functions, enter = t_gate(model)
        elif isinstance(cache, Spectrum):
            table = cache.coefficients(all_kinds)
            functions, enter = spectrum(model, table, prediction_type, scales)
        else:
            functions, enter = plain(model)
        used = sorted(set(kinds))
        segments.append(
            Segment(
                len(kinds),
                tuple(functions[kind] for kind in used),
                np.array([used.index(kind) for kind in kinds]),
                enter,
            )
        )
    return segments


def empty_cache(function):
    """An `enter` that ignores the segment before: zeros like the cache that `function` returns."""

    def enter(cache, x):
        _, shapes = jax.eval_shape(function, x, jnp.int32(0), jnp.int32(0), None)
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    return enter


# Each returns ({kind: function of a step}, enter); see Segment.


def plain(model):
    """Without a cache."""

    def full(x, t, i, cache):
        features, _ = model.apply(*model.embed(x, t), method="blocks")
        return model.finish(features), ()

    return {"full": full}, lambda cache, x: ()


def deep_cache(model):
    """The cache: the input of the UNet's last layer. Source: DeepCache (arXiv 2312.00858)."""

    def full(x, t, i, cache):
        features, last_input = model.apply(*model.embed(x, t), method="blocks")
        return model.finish(features), last_input

    def shallow(x, t, i, cache):
        features = model.apply(cache, *model.embed(x, t), method="last_layer")
        return model.finish(features), cache

    return {"full": full, "shallow": shallow}, empty_cache(full)


def first_block_cache(model, threshold):
    """The cache: what the first layer adds, and what all layers after it add, float32.

    Each image decides whether its own cache is reused, so the result does not depend on the other
    images of the batch; the layers are skipped if all decide so.
    """

    def start(x, t):
        embedded = model.embed(x, t)
        first = model.apply(*embedded, method="first_layer")
        return embedded, first, (first - embedded[0]).astype(jnp.float32)

    def whole(embedded, first, added):
        features, _ = model.apply(*embedded, first_output=first, method="blocks")
        rest = features.astype(jnp.float32) - first.astype(jnp.float32)
        return features, {"added": added, "rest": rest}

    def full(x, t, i, cache):
        features, cache = whole(*start(x, t))
        return model.finish(features), cache

    def adaptive(x, t, i, cache):
        embedded, first, added = start(x, t)
        B = len(x)

        def mean_per_image(y):
            means = jnp.abs(y).mean((1, 2, 3))
            return means.reshape(-1, B).mean(0)  # over the branches

        change = mean_per_image(added - cache["added"]) / mean_per_image(cache["added"])
        reuse = jnp.tile(change <= threshold, len(first) // B)[:, None, None, None]
        reused = (first.astype(jnp.float32) + cache["rest"]).astype(first.dtype)

        def compute():
            features, new = whole(embedded, first, added)
            new = jax.tree.map(partial(jnp.where, reuse), cache, new)
            return jnp.where(reuse, reused, features), new

        features, cache = jax.lax.cond(reuse.all(), lambda: (reused, cache), compute)
        return model.finish(features), cache

    return {"full": full, "adaptive": adaptive}, empty_cache(full)


def t_gate(model):
    """The cache: outputs of self-attention, and of cross-attention averaged over the branches.

    Source: T-GATE (arXiv 2404.02747), section 4.
    """

    def run(x, t, reuse, store):
        """(guided prediction, {kind of attention: {layer: output}} of the kinds in `store`)."""
        stored = {kind: {} for kind in store}

        def intercept(call, args, kwargs, context):
            if not isinstance(context.module, Attention) or context.method_name != "__call__":
                return call(*args, **kwargs)
            layer = "/".join(context.module.path)
            kind = "cross" if len(args) > 1 and args[1] is not None else "self"
            out = reuse[kind][layer] if kind in reuse else call(*args, **kwargs)
            if kind in stored:
                stored[kind][layer] = out
            return out

        embedded = model.embed(x, t)
        with nn.intercept_methods(intercept):
            features, _ = model.apply(*embedded, method="blocks")
        return model.finish(features), stored

    def mean_over_branches(out):
        return out.reshape(len(model.branches), -1, *out.shape[1:]).mean(0).astype(out.dtype)

    def full(x, t, i, cache):
        return run(x, t, {}, ())[0], cache

    def store(x, t, i, cache):
        guided, stored = run(x, t, {}, ("self",))
        return guided, cache | stored

    def reuse(x, t, i, cache):
        return run(x, t, {"self": cache["self"]}, ())[0], cache

    def gate(x, t, i, cache):
        guided, stored = run(x, t, {}, ("self", "cross"))
        return guided, stored | {"cross": jax.tree.map(mean_over_branches, stored["cross"])}

    def gated(x, t, i, cache):
        return run(x, t, {"cross": cache["cross"]}, ())[0], cache

    def enter(cache, x):
        return empty_cache(gate)(None, x) if cache is None else cache

    kinds = {"full": full, "store": store, "reuse": reuse, "gate": gate, "gated": gated}
    return kinds, enter


def spectrum(model, table, prediction_type, scales):
    """The cache: clean latents of the latest whole steps, float32 (history, B, C, h, w).

    Args:
        model: ActiveUNet.
        table: Spectrum.coefficients.
        prediction_type, scales: as for make_segments.

    Source: Spectrum (arXiv 2603.01623).
    """
    weights, alphas, sigmas = map(jnp.asarray, (table, *scales))

    def full(x, t, i, cache):
        features, _ = model.apply(*model.embed(x, t), method="blocks")
        guided = model.finish(features)
        x_0, _ = predict_x0_and_eps(prediction_type, alphas[i], sigmas[i], x, guided)
        return guided, jnp.concatenate([cache[1:], x_0[None]])

    def forecast(x, t, i, cache):
        x_0 = jnp.tensordot(weights[i], cache, 1)
        eps = (x - alphas[i] * x_0) / sigmas[i]
        outputs = {
            "epsilon": eps,
            "v_prediction": alphas[i] * eps - sigmas[i] * x_0,
            "sample": x_0,
        }
        return outputs[prediction_type], cache

    def enter(cache, x):
        return jnp.zeros((weights.shape[1], *x.shape), jnp.float32) if cache is None else cache

    return {"full": full, "forecast": forecast}, enter
