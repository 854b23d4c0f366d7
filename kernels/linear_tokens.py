# ruff: noqa: RUF005 - Triton has no starred tuples
"""A few tokens pass by weights in registers: the product behind linear layers of at most 8 tokens.

T tokens, K inputs, OUT outputs. A tensor core's tile wants 16 rows, and rows split over programs so
that there are enough of them must be added up through memory: for few tokens both cost more than
the multiplications. Here a program has whole rows of the weight, the next tile on its way while one
is multiplied, and each thread adds up on its own what lies in the inputs it holds.
"""

import triton
import triton.language as tl

from kernels.device import wait_for_predecessor


@triton.jit
def _eighths(a, ROWS: tl.constexpr, PAIRS: tl.constexpr):
    """Eight fp32 tensors, each with every eighth column of ``a``; no thread gives anything away.

    With ``PAIRS`` a column holds two bf16 as a 32-bit word, and there are half as many columns.
    Elements come in another order than in memory, the same one for every tensor.
    """
    if PAIRS:
        GROUPS: tl.constexpr = a.shape[1] // 4
        even, odd = tl.split(tl.reshape(a, [ROWS, GROUPS, 2, 2]))
        w0, w2 = tl.split(even)
        w1, w3 = tl.split(odd)
        words = (w0, w1, w2, w3)
        found = ()
        for i in tl.static_range(4):
            low = (words[i] << 16).to(tl.float32, bitcast=True)
            high = (words[i] & -65536).to(tl.float32, bitcast=True)
            found = found + (low, high)
        return found
    else:
        NUMBER: tl.constexpr = a.shape[1] // 8
        even, odd = tl.split(tl.reshape(a.to(tl.float32), [ROWS, NUMBER, 4, 2]))
        a0, a2 = tl.split(tl.reshape(even, [ROWS, NUMBER, 2, 2]))
        a1, a3 = tl.split(tl.reshape(odd, [ROWS, NUMBER, 2, 2]))
        b0, b4 = tl.split(a0)
        b2, b6 = tl.split(a2)
        b1, b5 = tl.split(a1)
        b3, b7 = tl.split(a3)
        return (b0, b1, b2, b3, b4, b5, b6, b7)


@triton.jit
def tokens_product(
    x, gain, weight, o, OUT, x_stride, weight_stride,
    T: tl.constexpr, K: tl.constexpr, HAS_NORM: tl.constexpr, BLOCK_O: tl.constexpr,
    BLOCK_K: tl.constexpr, AHEAD: tl.constexpr, PAIRS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """For each token ``(parts of the products [BLOCK_O, G], parts of the squares [1, G])``.

    Their sums over G are the results (``row_sums``). Waits for the predecessor before it reads x;
    the first ``AHEAD`` tiles of the weight are on their way by then.
    """
    WORD: tl.constexpr = 2 if PAIRS else 1
    STEP: tl.constexpr = BLOCK_K // WORD
    END: tl.constexpr = K // WORD
    if PAIRS:
        x = x.to(tl.pointer_type(tl.int32), bitcast=True)
        gain = gain.to(tl.pointer_type(tl.int32), bitcast=True)
        weight = weight.to(tl.pointer_type(tl.int32), bitcast=True)
    k = tl.arange(0, STEP)
    in_o = (o < OUT)[:, None]
    rows = weight + o.to(tl.int64)[:, None] * (weight_stride // WORD) + k[None, :]
    tiles = ()
    for i in tl.static_range(AHEAD):
        here = in_o & (i * STEP + k < END)[None, :]
        tile = tl.load(rows + i * STEP, mask=here, other=0, eviction_policy="evict_first")
        tiles = tiles + (tile,)
    wait_for_predecessor(PDL)
    sums = ()
    squares = ()
    for _ in tl.static_range(T):
        sums = sums + (tl.zeros([BLOCK_O, BLOCK_K // 8], dtype=tl.float32),)
        squares = squares + (tl.zeros([1, BLOCK_K // 8], dtype=tl.float32),)
    for k0 in tl.range(0, END, STEP):
        in_k = (k0 + k < END)[None, :]
        ahead = k0 + AHEAD * STEP
        here = in_o & (ahead + k < END)[None, :]
        tile = tl.load(rows + ahead, mask=here, other=0, eviction_policy="evict_first")
        w = _eighths(tiles[0], BLOCK_O, PAIRS)
        tiles = tiles[1:] + (tile,)
        if HAS_NORM:
            g = _eighths(tl.load(gain + k0 + k[None, :], mask=in_k, other=0), 1, PAIRS)
        new_sums = ()
        new_squares = ()
        for t in tl.static_range(T):
            row = x + t * (x_stride // WORD) + k0
            v = _eighths(tl.load(row + k[None, :], mask=in_k, other=0), 1, PAIRS)
            total = sums[t]
            square = squares[t]
            for i in tl.static_range(8):
                if HAS_NORM:
                    square += v[i] * v[i]
                    total += w[i] * (v[i] * g[i])
                else:
                    total += w[i] * v[i]
            new_sums = new_sums + (total,)
            new_squares = new_squares + (square,)
        sums = new_sums
        squares = new_squares
    return sums, squares


@triton.jit
def linear_tokens_kernel(
    x, gain, weight, residual, out, best_value, best_index,
    OUT, x_stride, weight_stride, eps,
    T: tl.constexpr, K: tl.constexpr, HAS_NORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    STORE: tl.constexpr, ARGMAX: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, AHEAD: tl.constexpr, PAIRS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    o = pid * BLOCK_O + tl.arange(0, BLOCK_O)
    in_o = o < OUT
    sums, squares = tokens_product(
        x, gain, weight, o, OUT, x_stride, weight_stride, T, K, HAS_NORM, BLOCK_O, BLOCK_K, AHEAD,
        PAIRS, PDL,
    )  # fmt: skip
    for t in tl.static_range(T):
        y = tl.sum(sums[t], axis=1)
        if HAS_NORM:
            y *= tl.rsqrt(tl.sum(tl.sum(squares[t], axis=1), axis=0) / K + eps)
        if HAS_RESIDUAL:
            y += tl.load(residual + t * OUT + o, mask=in_o, other=0.0).to(tl.float32)
        y = y.to(x.dtype.element_ty)
        if STORE:
            tl.store(out + t * OUT + o, y, mask=in_o)
        if ARGMAX:
            value = tl.where(in_o, y.to(tl.float32), float("-inf"))
            best = tl.max(value, axis=0)
            tl.store(best_value + pid * T + t, best)
            tl.store(best_index + pid * T + t, tl.min(tl.where(value == best, o, OUT - 1), axis=0))
