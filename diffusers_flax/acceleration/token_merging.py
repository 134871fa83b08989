"""Token merging (ToMe): self-attention over fewer positions.

Similar positions are averaged before an attention layer and its result is copied to all of them.

    with nn.intercept_methods(merging_hook(TokenMerging(ratio=0.5), x.shape[2])):
        sample = unet.apply({"params": params}, x, t, text).sample

Source: ToMe for Stable Diffusion (arXiv 2303.17604), section 4; ToMe (arXiv 2210.09461).
"""

import math
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from diffusers_flax.devices.offload import path_in_model
from diffusers_flax.models.blocks import Attention, BasicTransformerBlock, Transformer2D

WINDOW = 2  # one position of each window of 2x2 is a destination


def merging_hook(technique, full_height):
    """A function for flax.linen.intercept_methods that merges tokens in a UNet's self-attention.

    Args:
        technique: TokenMerging.
        full_height: height of the UNet's input, in latents.
    """
    shape, block_input = None, None  # of the transformer and the block that are running

    def hook(call, args, kwargs, context):
        nonlocal shape, block_input
        module = context.module
        if isinstance(module, Transformer2D):
            shape = args[0].shape[1:3]
        elif isinstance(module, BasicTransformerBlock):
            block_input = args[0]
        elif isinstance(module, Attention) and module.name == "attn1":
            is_self_attention = len(args) < 2 or args[1] is None
            if is_self_attention and full_height <= technique.max_downsample * shape[0]:
                offsets = window_offsets(shape, "/".join(path_in_model(module)), technique.random)
                merge, unmerge = match(block_input, shape, technique.ratio, offsets)
                return unmerge(call(merge(args[0]), *args[1:], **kwargs))
        return call(*args, **kwargs)

    return hook


def window_offsets(shape, layer, random):
    """Each window's destination: number of its position, 0 to 3, row by row.

    shape: (height, width) in positions; layer: its name, which seeds the draw; random: False: 0.
    """
    windows = shape[0] // WINDOW, shape[1] // WINDOW
    if not random:
        return np.zeros(windows, int)
    return np.random.default_rng(zlib.crc32(layer.encode())).integers(WINDOW**2, size=windows)


def destinations(shape, offsets):
    """(indices of the destinations, indices of the other positions), NumPy, each in order."""
    rows, columns = np.indices(offsets.shape) * WINDOW + np.stack(np.divmod(offsets, WINDOW))
    chosen = np.sort((rows * shape[1] + columns).ravel())
    return chosen, np.setdiff1d(np.arange(math.prod(shape)), chosen)


def match(x, shape, ratio, offsets):
    """Pair the most similar positions of x (B, N, C), by their cosine; shape: (height, width).

    ratio: fraction of the N positions to merge; destinations stay, which limits it.

    Returns (merge, unmerge): (B, N, D) -> (B, N - r, D), means of merged positions, and back.
    """
    to, others = destinations(shape, offsets)
    N = math.prod(shape)
    r = min(int(N * ratio), len(others))
    unit = x.astype(jnp.float32)
    unit = unit / jnp.linalg.norm(unit, axis=-1, keepdims=True)
    similarity = jnp.einsum("bsc,bdc->bsd", unit[:, others], unit[:, to])
    partner = similarity.argmax(-1)  # (B, len(others)), the index in `to`
    order = jnp.argsort(-similarity.max(-1), axis=-1, stable=True)
    merged, kept = order[:, :r], order[:, r:]  # indices in `others`
    target = jnp.take_along_axis(partner, merged, axis=1)  # (B, r)
    # Where position n of the result is found in the merged sequence: the kept, then `to`.
    num_kept = len(others) - r
    place = jnp.zeros((len(x), len(others)), jnp.int32)
    scatter = jax.vmap(lambda row, index, value: row.at[index].set(value))
    place = scatter(place, kept, jnp.broadcast_to(jnp.arange(num_kept), kept.shape))
    place = scatter(place, merged, target.astype(jnp.int32) + num_kept)
    source = jnp.zeros((len(x), N), jnp.int32)
    source = source.at[:, others].set(place).at[:, to].set(jnp.arange(len(to)) + num_kept)

    def merge(y):
        sums = y[:, to].astype(jnp.float32)
        moved = jnp.take_along_axis(y[:, others], merged[..., None], axis=1).astype(jnp.float32)
        add = jax.vmap(lambda rows, index, values: rows.at[index].add(values))
        counts = add(jnp.ones((len(y), len(to))), target, jnp.ones_like(target, jnp.float32))
        means = (add(sums, target, moved) / counts[..., None]).astype(y.dtype)
        unmoved = jnp.take_along_axis(y[:, others], kept[..., None], axis=1)
        return jnp.concatenate([unmoved, means], axis=1)

    def unmerge(y):
        return jnp.take_along_axis(y, source[..., None], axis=1)

    return merge, unmerge
