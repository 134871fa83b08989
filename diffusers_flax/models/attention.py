"""Attention, with an implementation per platform.

On a TPU jax's splash attention for long sequences; on an NVIDIA GPU cuDNN's kernel in half
precision, for the text too; on a CPU blocks that fit a core's caches; otherwise, and with masks,
XLA's operations.
"""

from contextlib import contextmanager
from functools import partial

import jax
import jax.numpy as jnp

# The compute capability that tracing_for chooses; empty: this process's own GPU.
_TRACED_FOR = []


def attention(query, key, value, num_heads, mask=None, is_causal=False, num_keys=None):
    """Scaled dot-product attention, used by all models.

    Args:
        query: (B, T, C), C divisible by num_heads.
        key: (B, S, C).
        value: (B, S, C), or (B, S, n C) with n values side by side in each head, which share the
            softmax.
        num_heads: number of heads.
        mask: bool, broadcastable to (B, num_heads, T, S), True for visible keys; or None.
        is_causal: True hides later positions.
        num_keys: without mask and is_causal, how many keys are seen, as from pad_keys; None: all.

    Returns:
        (B, T, C), or (B, T, n C), in query's dtype; logits and softmax are float32. Gradients are
        in reverse mode only, and under jax.shard_map with check_vma=False.

    Source: Attention Is All You Need (arXiv 1706.03762), equation 1.
    """
    return _attend(query, key, value, mask, num_heads, is_causal, num_keys, cuda_capability())


@partial(jax.jit, static_argnums=(4, 5, 6, 7))  # traced once for each shape
def _attend(query, key, value, mask, num_heads, is_causal, num_keys, capability):
    """attention; capability: of cuda_capability."""
    query, key, value = (
        x.reshape(*x.shape[:2], num_heads, x.shape[-1] // num_heads) for x in (query, key, value)
    )  # (B, T or S, num_heads, C / num_heads)

    kernels = {}
    if mask is None and not is_causal:
        if fits_splash(query.shape, value.shape):
            kernels["tpu"] = splash
        if fits_cudnn(query.shape, key.shape, query.dtype, capability):
            kernels["cuda"] = padded_attention
        kernels["cpu"] = blockwise
    elif query.dtype == jnp.float16:
        kernels["cpu"] = partial(_attention_in_float32, mask=mask, is_causal=is_causal)
    kernels["default"] = partial(_attention, mask=mask, is_causal=is_causal, implementation="xla")
    if num_keys not in (None, key.shape[1]):
        kernels = {name: _of_first_keys(kernel, num_keys) for name, kernel in kernels.items()}
    if value.shape[-1] != query.shape[-1]:
        own = {splash, blockwise}  # take wider values
        kernels = {k: f if f in own else partial(_each_value, f) for k, f in kernels.items()}
    out = jax.lax.platform_dependent(query, key, value, **kernels)
    return out.reshape(*out.shape[:2], -1)


def _of_first_keys(kernel, num_keys):
    """A kernel that attends to the first num_keys keys only."""
    if kernel is padded_attention:
        return partial(kernel, num_keys=num_keys)
    return lambda query, key, value: kernel(query, key[:, :num_keys], value[:, :num_keys])


def _each_value(kernel, query, key, value):
    """A kernel on values side by side, one after the other; XLA computes equal softmaxes once."""
    values = jnp.split(value, value.shape[-1] // query.shape[-1], -1)
    return jnp.concatenate([kernel(query, key, value) for value in values], -1)


def _attention(query, key, value, **options):
    with jax.numpy_dtype_promotion("standard"):  # jax's own code promotes bfloat16 implicitly
        return jax.nn.dot_product_attention(query, key, value, **options)


def _attention_in_float32(*args, **options):
    """For float16 on CPUs, which cannot sum float16 products in float32."""
    out = _attention(*(x.astype(jnp.float32) for x in args), implementation="xla", **options)
    return out.astype(args[0].dtype)


def cuda_capability():
    """Compute capability of the NVIDIA GPU that programs are traced for, 8.0, 9.0, ...

    It is the first device's, or what tracing_for says; None: no NVIDIA GPU.
    """
    if _TRACED_FOR:
        return _TRACED_FOR[-1]
    device = jax.devices()[0]
    if device.platform != "gpu" or "cuda" not in device.client.platform_version:
        return None
    return float(device.compute_capability)


@contextmanager
def tracing_for(capability):
    """Within it, programs are traced for a GPU of this compute capability, with or without one.

    It is for programs that compile for a GPU that is not there. The capability is no key of the
    caches of jax.jit: a function that was traced outside, or for another capability, keeps its
    program until jax.clear_caches().

    Args:
        capability: 8.0 (Ampere), 8.9 (Ada), 9.0 (Hopper), ...; None: no NVIDIA GPU.
    """
    _TRACED_FOR.append(capability)
    try:
        yield
    finally:
        _TRACED_FOR.pop()


def fits_cudnn(query_shape, key_shape, dtype, capability):
    """Whether cuDNN's kernel supports shapes (B, T, N, H) and (B, S, N, H).

    padded_attention makes S even. capability: of cuda_capability; cuDNN needs Ampere or newer.
    """
    if capability is None or capability < 8:
        return False
    head_dim, largest = query_shape[-1], 256 if capability >= 9 else 128
    even = query_shape[1] % 2 == 0  # jax supports gradients for even lengths only
    half = dtype in (jnp.bfloat16, jnp.float16)
    return half and even and head_dim <= largest and head_dim % 8 == 0


# Odd lengths, as the text's 77, are padded to a multiple of this.
PADDED_LENGTH = 8


def pad_keys(x):
    """Keys or values (B, S, ...) as cuDNN takes them: padded with zeros if S is odd."""
    S = x.shape[1]
    return jnp.pad(x, ((0, 0), (0, S % 2 and -S % PADDED_LENGTH), *[(0, 0)] * (x.ndim - 2)))


def padded_attention(query, key, value, num_keys=None, implementation="cudnn"):
    """Attention by cuDNN, which takes even lengths; padded keys are not seen.

    query (B, T, N, H), key and value (B, S, N, H), that fits_cudnn; num_keys: how many keys are
    seen, None: all; implementation: of jax.nn.dot_product_attention, "cudnn" or "xla".
    """
    B, S, *_ = key.shape
    num_keys, options = num_keys or S, {"implementation": implementation}
    key, value = pad_keys(key), pad_keys(value)
    if num_keys != key.shape[1]:
        options["key_value_seq_lengths"] = jnp.full(B, num_keys, jnp.int32)
    return _attention(query, key, value, **options)


# Least length at which splash attention is faster on a TPU.
SPLASH_LENGTH = 1024


def fits_splash(query_shape, value_shape):
    """Whether splash attention supports shapes (B, T, N, H) and (B, S, N, n H) and is faster."""
    lengths, head_dim = (query_shape[1], value_shape[1]), value_shape[-1]
    long = min(lengths) >= SPLASH_LENGTH and not any(n % 128 for n in lengths)
    return long and (head_dim <= 128 or (head_dim <= 512 and head_dim % 128 == 0))


def splash(query, key, value, interpret=False):
    """Splash attention, which does not store the logits in memory, of arrays that fits_splash.

    interpret: run the kernel on any platform, slowly.

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
        return max(n for n in (128, 256, 512, 1024, 2048) if length % n == 0 and n <= limit)

    # The fastest of the blocks that fit a v4's VMEM.
    small = head_dim <= 128
    sizes = dict(
        block_q=block(T, 512),
        block_kv=block(S, 2048 if small else 512),
        block_kv_compute=block(S, 1024 if small else 512),
        block_q_dkv=block(T, 1024 if small else 256),
        block_kv_dkv=block(S, 1024 if small else 256),
        block_kv_dkv_compute=block(S, 512 if small else 256),
    )
    if S // sizes["block_kv_dkv"] <= 4:  # the number of copies of query's gradient in memory
        sizes["use_fused_bwd_kernel"] = True
    else:
        sizes |= dict(block_q_dq=block(T, 512 if small else 256), block_kv_dq=sizes["block_kv_dkv"])
    if head_dim % 128:  # with positions as the last axis, the registers' 128 lanes are full
        sizes |= dict.fromkeys(("q_layout", "k_layout", "v_layout"), kernels.QKVLayout.SEQ_MINOR)
    with jax.numpy_dtype_promotion("standard"):
        kernel = kernels.make_splash_mha(
            masks.MultiHeadMask([masks.FullMask((T, S))] * num_heads),
            head_shards=1,
            q_seq_shards=1,
            block_sizes=kernels.BlockSizes(**sizes),
            interpret=interpret,
        )
        query = query * query.shape[-1] ** -0.5
        query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))
        return jax.vmap(kernel)(query, key, value).swapaxes(1, 2)


# Most logits in a block: 8 MB of all heads, else 4 MB of one head.
ALL_LOGITS = 2**21
BLOCK_LOGITS = 2**20


def blockwise(query, key, value):
    """Attention in blocks of logits that fit a CPU's caches; the backward pass recomputes them.

    (B, T, N, H), (B, S, N, H), (B, S, N, n H) -> (B, T, N, n H). Short sequences: all heads at
    once; otherwise blocks of one head's queries.

    Source: FlashAttention (arXiv 2205.14135); a block has all keys and needs no running softmax.
    """
    B, T, N, _ = query.shape
    heads_first = (x.swapaxes(1, 2).reshape(B * N, *x.shape[1::2]) for x in (query, key, value))
    return _blockwise(*heads_first).reshape(B, N, T, -1).swapaxes(1, 2)


_product = partial(jnp.einsum, preferred_element_type=jnp.float32)


def _num_blocks(G, T, S):
    """Number of blocks per head, of G heads; None: one block for all heads."""
    return None if G * T * S <= ALL_LOGITS else -(-T // max(BLOCK_LOGITS // S, 1))


def _cut(x, n):
    """(G, T, ...) -> (G n, T / n, ...), T padded with zeros."""
    G, T, *others = x.shape
    x = jnp.pad(x, ((0, 0), (0, -T % n), *[(0, 0)] * len(others)))
    return x.reshape(G * n, -1, *others)


def _join(x, G, T):
    """The inverse of _cut."""
    return x.reshape(G, -1, *x.shape[2:])[:, :T]


@jax.custom_vjp
def _blockwise(query, key, value):
    """(G, T, H), (G, S, H) twice -> (G, T, H); G counts heads."""
    return _blockwise_forward(query, key, value)[0]


def _block_forward(query, key, value):
    """(..., T, H), (..., S, H) twice -> (..., T, H), logarithms of softmax sums (..., T, 1)."""
    logits = _product("...th,...sh->...ts", query, key) * query.shape[-1] ** -0.5
    largest = logits.max(-1, keepdims=True)
    weights = jnp.exp(logits - largest)
    total = weights.sum(-1, keepdims=True)
    out = _product("...ts,...sh->...th", weights.astype(value.dtype), value) / total
    return out.astype(query.dtype), largest + jnp.log(total)


def _blockwise_forward(query, key, value):
    (G, T, _), S = query.shape, key.shape[1]
    n = _num_blocks(G, T, S)

    def of_block(args):
        i, query = args
        return _block_forward(query, key[i // n], value[i // n])

    if n is None:
        out, log_total = _block_forward(query, key, value)
    else:
        blocks = jax.lax.map(of_block, (jnp.arange(G * n), _cut(query, n)))
        out, log_total = (_join(x, G, T) for x in blocks)
    return out, (query, key, value, out, log_total)


def _block_backward(key, value, query, g, log_total, mean):
    """Gradients of _block_forward's arguments: query's in its dtype, the rest in float32."""
    scale = query.shape[-1] ** -0.5
    # With keys first, (..., S, T), only one of the four products needs a transpose.
    logits = _product("...sh,...th->...st", key, query) * scale
    weights = jnp.exp(logits - log_total.swapaxes(-1, -2))
    g_logits = weights * (_product("...sh,...th->...st", value, g) - mean.swapaxes(-1, -2))
    weights, g_logits = weights.astype(g.dtype), (g_logits * scale).astype(g.dtype)
    g_query = _product("...st,...sh->...th", g_logits, key).astype(query.dtype)
    g_key = _product("...st,...th->...sh", g_logits, query)
    return g_query, g_key, _product("...st,...th->...sh", weights, g)


def _blockwise_backward(kept, g):
    query, key, value, out, log_total = kept
    (G, T, _), S = query.shape, key.shape[1]
    n = _num_blocks(G, T, S)
    mean = (g.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1, keepdims=True)
    of_queries = query, g, log_total, mean

    def of_block(sums, args):
        i, *of_queries = args
        g_query, *others = _block_backward(key[i // n], value[i // n], *of_queries)
        return [total.at[i // n].add(x) for total, x in zip(sums, others)], g_query

    if n is None:
        g_query, *sums = _block_backward(key, value, *of_queries)
    else:
        zeros = [jnp.zeros(x.shape, jnp.float32) for x in (key, value)]
        blocks = (jnp.arange(G * n), *(_cut(x, n) for x in of_queries))
        sums, g_query = jax.lax.scan(of_block, zeros, blocks)
        g_query = _join(g_query, G, T)
    return g_query, sums[0].astype(key.dtype), sums[1].astype(value.dtype)


_blockwise.defvjp(_blockwise_forward, _blockwise_backward)


def attention_weights(query, key, num_heads, mask, is_causal):
    """The softmax weights, which attention does not return.

    Args:
        query, key, num_heads, mask, is_causal: as for attention.

    Returns:
        (B, num_heads, T, S) in query's dtype; the softmax is float32.
    """
    query, key = (x.reshape(*x.shape[:2], num_heads, -1) for x in (query, key))
    logits = jnp.einsum("bthd,bshd->bhts", query, key, preferred_element_type=jnp.float32)
    seen = jnp.ones(logits.shape[-2:], bool) if mask is None else mask
    seen = seen & jnp.tri(*logits.shape[-2:], dtype=bool) if is_causal else seen
    logits = jnp.where(seen, logits / query.shape[-1] ** 0.5, jnp.finfo(jnp.float32).min)
    return jax.nn.softmax(logits).astype(query.dtype)
