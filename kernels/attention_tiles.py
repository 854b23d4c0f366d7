"""The pieces of the attention kernel: rotated rows, rows of the cache, one tile of the softmax.

R rows (a token and a query head each), L cache rows, D head size. ``factor`` is the softmax's scale
times log2(e): powers of two are what the hardware computes.
"""

import triton
import triton.language as tl

from kernels.device import dot


@triton.jit
def halves(rows, in_row, d, HALF: tl.constexpr):
    """Both halves of the D elements at ``rows``."""
    inside = in_row[:, None] & (d < HALF)[None, :]
    at = rows[:, None] + d[None, :]
    return tl.load(at, mask=inside, other=0.0), tl.load(at + HALF, mask=inside, other=0.0)


@triton.jit
def rotated(
    a, b, in_row, gain, cos, sin, position, d, eps,
    HALF: tl.constexpr, HAS_NORM: tl.constexpr, ROWS: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """The halves after RMSNorm (optional) and rotation, fp32."""
    inside = in_row[:, None] & (d < HALF)[None, :]
    # the two halves of a table row are equal, so one is read
    table = position[:, None] * (2 * HALF) + d[None, :]
    c = tl.load(cos + table, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + table, mask=inside, other=0.0).to(tl.float32)
    a = a.to(tl.float32)
    b = b.to(tl.float32)
    if HAS_NORM:
        # read for every row: a vector would take the way through shared memory to get there
        gains = tl.broadcast_to((gain + d)[None, :], [ROWS, BLOCK_HALF])
        scale = tl.rsqrt(tl.sum(a * a + b * b, axis=1) / (2 * HALF) + eps)[:, None]
        a *= scale * tl.load(gains, mask=inside, other=0.0).to(tl.float32)
        b *= scale * tl.load(gains + HALF, mask=inside, other=0.0).to(tl.float32)
    return a * c - b * s, b * c + a * s


@triton.jit
def cache_tile(
    k_base, k_row_stride, v_base, v_row_stride, line, limit, d, d_all, HALF: tl.constexpr
):
    """Keys' halves and values of the cache rows ``line`` below ``limit``."""
    long = line.to(tl.int64)[:, None]
    here = (line < limit)[:, None]
    k_at = k_base + long * k_row_stride + d[None, :]
    in_k = here & (d < HALF)[None, :]
    k_a = tl.load(k_at, mask=in_k, other=0.0)
    k_b = tl.load(k_at + HALF, mask=in_k, other=0.0)
    v_at = v_base + long * v_row_stride + d_all[None, :]
    return k_a, k_b, tl.load(v_at, mask=here & (d_all < 2 * HALF)[None, :], other=0.0)


@triton.jit
def attend(q_a, q_b, k_a, k_b, v, seen, top, total, acc, factor, PRECISION: tl.constexpr):
    """One tile into the running maximum (of the unscaled scores), sum and output."""
    score = dot(q_a, tl.trans(k_a), None, PRECISION)
    score = dot(q_b, tl.trans(k_b), score, PRECISION)
    score = tl.where(seen, score, float("-inf"))
    new_top = tl.maximum(top, tl.max(score, axis=1))
    # a row that has seen nothing yet keeps -inf; exp(-inf - 0) is 0, exp(-inf + inf) is NaN
    shift = tl.where(new_top == float("-inf"), 0.0, new_top * factor)
    p = tl.exp2(score * factor - shift[:, None])
    fade = tl.exp2(top * factor - shift)
    total = total * fade + tl.sum(p, axis=1)
    return new_top, total, dot(p.to(v.dtype), v, acc * fade[:, None], PRECISION)
