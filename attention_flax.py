"""Scaled dot-product attention, and by_platform, which picks an implementation per platform.

TPU: splash attention, a kernel of jax's, for long sequences. NVIDIA: cuDNN's, in half precision.
CPU: in blocks that fit a core's caches. Everything else: XLA's own, which also takes masks.
"""

from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

import jax
import jax.numpy as jnp

_plain = ContextVar("plain", default=False)


@contextmanager
def plain_operations():
    """Functions traced inside have by_platform's default implementations alone.

    For counting: XLA's cost analysis counts nothing of a kernel, and the body of a loop once. Trace
    a new function inside: jax caches traces, so one that was traced before keeps its kernels, and
    one that is run again later has none.
    """
    token = _plain.set(True)
    try:
        yield
    finally:
        _plain.reset(token)


def by_platform(*args, default, **kernels):
    """jax.lax.platform_dependent; inside plain_operations always the default."""
    kernels = {} if _plain.get() else kernels
    return jax.lax.platform_dependent(*args, default=default, **kernels)


def attention(query, key, value, num_heads, mask=None, is_causal=False):
    """Scaled dot-product attention; every model here calls this one.

    Args:
        query: (B, T, C), C divisible by num_heads.
        key, value: (B, S, C).
        num_heads: how many heads C is split into.
        mask: bool, broadcastable to (B, num_heads, T, S), True where a key may be seen; or None.
        is_causal: True lets position t see positions 0 to t only.

    Returns:
        (B, T, C) in query's dtype; logits and softmax are float32. It has gradients in reverse
        mode only.

    Source: Attention Is All You Need (arXiv 1706.03762), equation 1.
    """
    query, key, value = (
        x.reshape(*x.shape[:2], num_heads, x.shape[-1] // num_heads) for x in (query, key, value)
    )  # (B, T or S, num_heads, C / num_heads)

    kernels = {}
    if mask is None and not is_causal:
        if fits_splash(query.shape, key.shape):
            kernels["tpu"] = splash
        if fits_cudnn(query.shape, key.shape, query.dtype, jax.devices()[0]):
            kernels["cuda"] = partial(_attention, implementation="cudnn")
        kernels["cpu"] = blockwise
    xla = partial(_attention, mask=mask, is_causal=is_causal, implementation="xla")
    out = by_platform(query, key, value, default=xla, **kernels)
    return out.reshape(*out.shape[:2], -1)


def _attention(query, key, value, **options):
    with jax.numpy_dtype_promotion("standard"):  # jax's own code promotes bfloat16 implicitly
        return jax.nn.dot_product_attention(query, key, value, **options)


def fits_cudnn(query_shape, key_shape, dtype, device):
    """Can NVIDIA's kernel take these, (B, T, N, H) and (B, S, N, H), on this device?"""
    if device.platform != "gpu" or "cuda" not in device.client.platform_version:
        return False
    generation = float(device.compute_capability)  # 8: Ampere, 9: Hopper
    head_dim, largest = query_shape[-1], 256 if generation >= 9 else 128
    even = query_shape[1] % 2 == key_shape[1] % 2 == 0  # jax refuses gradients of others
    half = dtype in (jnp.bfloat16, jnp.float16)
    return half and even and generation >= 8 and head_dim <= largest and head_dim % 8 == 0


# Shortest sequences for which keeping the logits off the memory pays on a TPU.
SPLASH_LENGTH = 1024


def fits_splash(query_shape, key_shape):
    """Can TPU's kernel take these, (B, T, N, H) and (B, S, N, H), and is it worth while?"""
    lengths, head_dim = (query_shape[1], key_shape[1]), query_shape[-1]
    long = min(lengths) >= SPLASH_LENGTH and not any(n % 128 for n in lengths)
    return long and (head_dim <= 128 or (head_dim <= 512 and head_dim % 128 == 0))


def splash(query, key, value, interpret=False):
    """Attention by TPU's kernel, whose logits never reach the memory.

    Args:
        query, key, value: (B, T, N, H), (B, S, N, H) twice, that fits_splash.
        interpret: run the kernel on any platform, slowly.

    Returns:
        (B, T, N, H) in query's dtype.

    Source: FlashAttention (arXiv 2205.14135).
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as kernels,
    )
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_mask as masks,
    )

    (_, T, num_heads, head_dim), S = query.shape, key.shape[1]

    def block(length, limit):
        return max(n for n in (128, 256, 512) if length % n == 0 and n <= limit)

    back = 512 if head_dim <= 128 else 256  # more does not fit a v4's VMEM
    sizes = kernels.BlockSizes(
        block_q=block(T, 512),
        **dict.fromkeys(("block_kv", "block_kv_compute"), block(S, 512)),
        **dict.fromkeys(("block_q_dkv", "block_q_dq"), block(T, back)),
        **dict.fromkeys(("block_kv_dkv", "block_kv_dkv_compute", "block_kv_dq"), block(S, back)),
    )
    with jax.numpy_dtype_promotion("standard"):
        kernel = kernels.make_splash_mha(
            masks.MultiHeadMask([masks.FullMask((T, S))] * num_heads),
            head_shards=1,
            q_seq_shards=1,
            block_sizes=sizes,
            interpret=interpret,
        )
        query = query * query.shape[-1] ** -0.5
        query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))
        return jax.vmap(kernel)(query, key, value).swapaxes(1, 2)


# Logits of a block, about: 4 MB. Of 2**18 to 2**22 the fastest for SD1.5's lengths on an EPYC.
BLOCK_LOGITS = 2**20


def blockwise(query, key, value):
    """Attention in blocks of logits, of some heads and some positions, computed again backward.

    Args:
        query, key, value: (B, T, N, H), (B, S, N, H) twice.

    Returns:
        (B, T, N, H) in query's dtype; logits and softmax are float32.

    Source: FlashAttention (arXiv 2205.14135), without its running softmax: a block has all keys.
    """
    B, _, N, H = query.shape
    heads_first = (x.swapaxes(1, 2).reshape(B * N, -1, H) for x in (query, key, value))
    return _blockwise(*heads_first).reshape(B, N, -1, H).swapaxes(1, 2)


_product = partial(jnp.einsum, preferred_element_type=jnp.float32)


def _block_sizes(G, T, S):
    """How many of G heads, a divisor, and of T queries a block has, with S keys."""
    num_blocks = -(-T // max(BLOCK_LOGITS // S, 1))
    fitting = max(BLOCK_LOGITS // (T * S), 1)
    heads = max(d for d in range(1, G + 1) if G % d == 0 and d <= fitting)
    return heads, -(-T // num_blocks)


def _split(x, heads, queries):
    """(G, T, ...) -> (G / heads, T / queries, heads, queries, ...), T filled up with zeros."""
    G, T, *rest = x.shape
    num_blocks = -(-T // queries)
    x = jnp.pad(x, ((0, 0), (0, num_blocks * queries - T), *[(0, 0)] * len(rest)))
    return x.reshape(G // heads, heads, num_blocks, queries, *rest).swapaxes(1, 2)


def _join(x, T):
    """What _split does, undone."""
    x = x.swapaxes(1, 2)
    return x.reshape(x.shape[0] * x.shape[1], -1, *x.shape[4:])[:, :T]


def _scan(function, carry, args):
    """jax.lax.scan; of a single item without a loop, which compiles faster."""
    return jax.lax.scan(function, carry, args, unroll=len(jax.tree.leaves(args)[0]) == 1)


def _map(function, args):
    """jax.lax.map, as _scan."""
    return _scan(lambda carry, x: (carry, function(x)), None, args)[1]


@jax.custom_vjp
def _blockwise(query, key, value):
    """(G, T, H), (G, S, H) twice -> (G, T, H); G counts heads."""
    return _blockwise_forward(query, key, value)[0]


def _blockwise_forward(query, key, value):
    (G, T, H), S = query.shape, key.shape[1]
    heads, queries = _block_sizes(G, T, S)

    def of_heads(args):
        key, value, query = args

        def of_block(query):
            logits = _product("gth,gsh->gts", query, key) * H**-0.5
            largest = logits.max(-1, keepdims=True)
            weights = jnp.exp(logits - largest)
            total = weights.sum(-1, keepdims=True)
            out = _product("gts,gsh->gth", weights.astype(value.dtype), value) / total
            return out.astype(query.dtype), largest + jnp.log(total)

        return _map(of_block, query)

    grouped = (x.reshape(G // heads, heads, S, H) for x in (key, value))
    out, log_total = _map(of_heads, (*grouped, _split(query, heads, queries)))
    out = _join(out, T)
    return out, (query, key, value, out, _join(log_total, T))


def _blockwise_backward(kept, g):
    query, key, value, out, log_total = kept
    (G, T, H), S = query.shape, key.shape[1]
    heads, queries = _block_sizes(G, T, S)
    mean = (g.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1, keepdims=True)

    def of_heads(args):
        key, value, *of_queries = args

        def of_block(sums, args):
            query, g, log_total, mean = args
            # Keys come first, (G, S, T): of four products of these only one has to transpose.
            logits = _product("gsh,gth->gst", key, query) * H**-0.5
            weights = jnp.exp(logits - log_total.swapaxes(1, 2))
            g_logits = weights * (_product("gsh,gth->gst", value, g) - mean.swapaxes(1, 2))
            weights, g_logits = weights.astype(g.dtype), (g_logits * H**-0.5).astype(g.dtype)
            g_key = _product("gst,gth->gsh", g_logits, query)
            g_value = _product("gst,gth->gsh", weights, g)
            g_query = _product("gst,gsh->gth", g_logits, key)
            return (sums[0] + g_key, sums[1] + g_value), g_query.astype(query.dtype)

        zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (key, value))
        (g_key, g_value), g_query = _scan(of_block, zeros, tuple(of_queries))
        return g_key.astype(key.dtype), g_value.astype(value.dtype), g_query

    grouped = (x.reshape(G // heads, heads, S, H) for x in (key, value))
    blocks = (_split(x, heads, queries) for x in (query, g, log_total, mean))
    g_key, g_value, g_query = _map(of_heads, (*grouped, *blocks))
    return _join(g_query, T), g_key.reshape(key.shape), g_value.reshape(value.shape)


_blockwise.defvjp(_blockwise_forward, _blockwise_backward)
