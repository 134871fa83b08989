"""Self-attention shared by two images, which then have the same layout.

    pipeline(ids_of_both, params, keys_of_both, attention_sharing=0.5)

Images 2 j and 2 j + 1 of a batch are a pair. While their attention is shared, the second image's
self-attention has the queries and keys of the first image, and its own values. With the same noise
the second image looks like the first one, as far as its text allows.

Source: InstructPix2Pix (arXiv 2211.09800), section 3.1.2; its published code shares the weights of
self-attention, where Prompt-to-Prompt (arXiv 2208.01626) shares cross-attention.
"""

import jax
import jax.numpy as jnp
import numpy as np

from diffusers_flax.models.attention import attention
from diffusers_flax.models.blocks import Attention

SCOPE = "share_attention"  # of the conditions, in traced and compiled programs


def share_attention(pipeline, prediction, fraction, num_images, num_steps):
    """A GuidedPrediction for which pairs of images share their attention.

    fraction: p, a number, or an array of one per image, of which each second one counts. Attention
    is shared in the steps i with p > i / (num_steps - 1).
    """
    if num_images % 2 or (pipeline.accelerate and pipeline.accelerate.tome):
        raise ValueError(
            f"attention_sharing= is for pairs of images, without accelerate=tome, and {num_images} "
            "images are on a device; give an even number"
        )
    fraction = jnp.broadcast_to(fraction, (num_images,))[1::2]
    # A table, as XLA divides by a constant inexactly.
    done = np.float32(np.arange(num_steps) / max(num_steps - 1, 1))
    shared = None  # in the step that is traced: bool, of each pair

    def inputs(branches, i, x_t, t):
        nonlocal shared
        shared = fraction > jnp.asarray(done)[i]
        return prediction.inputs(branches, i, x_t, t)

    def share_in_unet(call, args, kwargs, context):
        module = context.module
        if not isinstance(module, Attention) or context.method_name != "attend_to_itself":
            return call(*args, **kwargs)
        return share(*args, module.num_heads, shared)

    return prediction._replace(inputs=inputs, hooks=(*prediction.hooks, share_in_unet))


def share(query, key, value, num_heads, shared):
    """Self-attention (n B, T, C) of pairs of images side by side, in n branches of guidance.

    query: (n B, T, C); key, value: (n B, S, C); shared: bool (B / 2,), the pairs that share.
    """
    shared = jnp.tile(shared, len(query) // (2 * len(shared)))

    def of_none():
        return attention(query, key, value, num_heads)

    def of_some():
        def of_first(x):
            pairs = x.reshape(-1, 2, *x.shape[1:])
            return jnp.where(shared[:, None, None, None], pairs[:, :1], pairs).reshape(x.shape)

        return attention(of_first(query), of_first(key), value, num_heads)

    def of_all():  # the values of both images side by side in each head: one softmax
        values = value.reshape(-1, 2, *value.shape[1:2], num_heads, value.shape[-1] // num_heads)
        values = jnp.moveaxis(values, 1, 3)  # (pairs, S, heads, 2, C / heads)
        both = attention(query[::2], key[::2], values.reshape(*values.shape[:2], -1), num_heads)
        both = both.reshape(*both.shape[:2], num_heads, 2, -1)
        return jnp.moveaxis(both, 3, 1).reshape(query.shape)

    how_many = jnp.int32(shared.any()) + jnp.int32(shared.all())
    with jax.named_scope(SCOPE):
        return jax.lax.switch(how_many, (of_none, of_some, of_all))
