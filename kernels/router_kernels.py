"""The kernels behind ``router``.

T tokens, E experts, K experts per token, H hidden.
"""

import triton
import triton.language as tl

from kernels.device import dot, prefetch_l2, turn_among_last, wait_for_predecessor


@triton.jit
def choose(
    logits, t, in_t, bias, out_weight, out_expert, scale,
    E: tl.constexpr, K: tl.constexpr, HAS_BIAS: tl.constexpr, SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Store the K best of each token's E logits and their weights."""
    e = tl.arange(0, BLOCK_E)
    is_expert = (e < E)[None, :]
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-logits))
    else:
        shifted = tl.where(is_expert, logits, float("-inf"))
        score = tl.exp(shifted - tl.max(shifted, axis=1)[:, None])
        score = score / tl.sum(score, axis=1)[:, None]
    choice = score
    if HAS_BIAS:
        choice = score + tl.load(bias + e, mask=e < E, other=0.0).to(tl.float32)[None, :]
    choice = tl.where(is_expert, choice, float("-inf"))
    # the first K of these are the choice: of the same shape as the scores, so that nothing has to
    # change its place among the threads from one choice to the next
    chosen = tl.zeros([BLOCK_T, BLOCK_E], dtype=tl.int32)
    weight = tl.zeros([BLOCK_T, BLOCK_E], dtype=tl.float32)
    # as integers of the same order: a warp finds the largest of those in one instruction
    key = choice.to(tl.int32, bitcast=True)
    key = key ^ ((key >> 31) & 0x7FFFFFFF)
    for n in tl.static_range(K):
        best = tl.max(key, axis=1)
        # in range even where NaN leaves nothing to find
        index = tl.min(tl.where(key == best[:, None], e[None, :], E - 1), axis=1)
        here = e[None, :] == index[:, None]
        if HAS_BIAS:
            value = tl.sum(tl.where(here, score, 0.0), axis=1)
        else:
            # scores are not negative, so the integer is the number's own bits
            value = best.to(tl.float32, bitcast=True)
        key = tl.where(here, -2147483648, key)
        chosen = tl.where(e[None, :] == n, index[:, None], chosen)
        weight = tl.where(e[None, :] == n, value[:, None], weight)
    if RENORMALIZE:
        weight = weight / tl.sum(weight, axis=1)[:, None]
    where = t.to(tl.int64)[:, None] * K + e[None, :]
    shown = in_t[:, None] & (e < K)[None, :]
    tl.store(out_weight + where, weight * scale, mask=shown)
    tl.store(out_expert + where, chosen.to(tl.int64), mask=shown)


@triton.jit
def choose_one(
    logits, logits_stride, squares, squares_stride, t, bias, out_weight, out_expert, H, eps, scale,
    E: tl.constexpr, K: tl.constexpr, HAS_BIAS: tl.constexpr, SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr, PARTS: tl.constexpr, HAS_NORM: tl.constexpr,
    BLOCK_PARTS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``choose`` for token ``t``, whose logits and sum of squares are in ``PARTS`` parts.

    Returns the sum of squares. ``BLOCK_R`` rows, one a warp, do the same. (Slower on an H200: an
    expert's place as the number of better ones, all pairs compared at once.)
    """
    e = tl.arange(0, BLOCK_E)
    n = tl.arange(0, BLOCK_PARTS)
    r = tl.arange(0, BLOCK_R)
    is_expert = e < E
    if PARTS == 1:
        # every warp loads the row for itself: loaded once, it would be spread over the warps
        total = tl.load(
            logits + 0 * r[:, None] + e[None, :],
            mask=is_expert[None, :] & (r < BLOCK_R)[:, None],
            other=0.0,
            cache_modifier=".cg",
        )
    else:
        parts = tl.load(
            logits + n[:, None] * logits_stride + e[None, :],
            mask=(n < PARTS)[:, None] & is_expert[None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        total = tl.zeros([BLOCK_R, BLOCK_E], dtype=tl.float32) + tl.sum(parts, axis=0)[None, :]
    square = 0.0
    if HAS_NORM:
        square = tl.sum(
            tl.load(squares + n * squares_stride, mask=n < PARTS, other=0.0, cache_modifier=".cg"),
            axis=0,
        )
        total *= tl.rsqrt(square / H + eps)
    choose(
        total, t + 0 * r, r == 0, bias, out_weight, out_expert, scale, E, K, HAS_BIAS, SIGMOID,
        RENORMALIZE, BLOCK_R, BLOCK_E, BLOCK_K,
    )  # fmt: skip
    return square


@triton.jit
def route_kernel(
    logits, bias, out_weight, out_expert, T, logits_stride, scale,
    E: tl.constexpr, K: tl.constexpr, HAS_BIAS: tl.constexpr, SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, BLOCK_E)
    in_t = t < T
    wait_for_predecessor(PDL)
    values = tl.load(
        logits + t.to(tl.int64)[:, None] * logits_stride + e[None, :],
        mask=in_t[:, None] & (e < E)[None, :],
        other=0.0,
    ).to(tl.float32)
    choose(
        values, t, in_t, bias, out_weight, out_expert, scale,
        E, K, HAS_BIAS, SIGMOID, RENORMALIZE, BLOCK_T, BLOCK_E, BLOCK_K,
    )  # fmt: skip


@triton.jit
def norm_route_kernel(
    x, gain, weight, bias, out_weight, out_expert, partial, partial_squares, counters,
    T, x_stride, weight_stride, eps, scale,
    H: tl.constexpr, E: tl.constexpr, K: tl.constexpr, HAS_BIAS: tl.constexpr,
    SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr, SPLIT: tl.constexpr,
    LAST: tl.constexpr, BLOCK_PARTS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0)
    block = tl.program_id(1)
    PART: tl.constexpr = (H + SPLIT * BLOCK_H - 1) // (SPLIT * BLOCK_H) * BLOCK_H
    t = block * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, BLOCK_E)
    h = split * PART + tl.arange(0, BLOCK_H)
    in_t = t < T
    if PDL:
        LINE: tl.constexpr = 128 // (weight.dtype.element_ty.primitive_bitwidth // 8)
        line = tl.arange(0, BLOCK_H // LINE if BLOCK_H >= LINE else 1) * LINE
        row = tl.minimum(e, E - 1).to(tl.int64)[:, None] * weight_stride
        for h0 in range(0, PART, BLOCK_H):
            column = tl.minimum(split * PART + h0 + line, H - 1)
            prefetch_l2(weight + row + column[None, :], PDL)
    wait_for_predecessor(PDL)
    logits = tl.zeros([BLOCK_T, BLOCK_E], dtype=tl.float32)
    squares = tl.zeros([BLOCK_T], dtype=tl.float32)
    for h0 in tl.range(0, PART, BLOCK_H, num_stages=STAGES):
        in_h = h0 + h < H
        tile = tl.load(
            weight + e.to(tl.int64)[:, None] * weight_stride + (h0 + h)[None, :],
            mask=(e < E)[:, None] & in_h[None, :],
            other=0.0,
        )
        v = tl.load(
            x + t.to(tl.int64)[:, None] * x_stride + (h0 + h)[None, :],
            mask=in_t[:, None] & in_h[None, :],
            other=0.0,
        ).to(tl.float32)
        squares += tl.sum(v * v, axis=1)
        v *= tl.load(gain + h0 + h, mask=in_h, other=0.0).to(tl.float32)[None, :]
        logits = dot(v.to(tile.dtype), tl.trans(tile), logits, PRECISION)
    inner = tl.arange(0, BLOCK_T)
    base = partial + block.to(tl.int64) * (SPLIT * BLOCK_T * BLOCK_E)
    base_squares = partial_squares + block * (SPLIT * BLOCK_T)
    at = inner[:, None] * BLOCK_E + e[None, :]
    shown = in_t[:, None] & (e < E)[None, :]
    tl.store(base + split * (BLOCK_T * BLOCK_E) + at, logits, mask=shown)
    tl.store(base_squares + split * BLOCK_T + inner, squares)
    turn = turn_among_last(counters + 2 * block, SPLIT, LAST)
    if turn >= 0:
        for r in range(turn, tl.minimum(T - block * BLOCK_T, BLOCK_T), LAST):
            choose_one(
                base + r * BLOCK_E, BLOCK_T * BLOCK_E, base_squares + r, BLOCK_T,
                block * BLOCK_T + r, bias, out_weight, out_expert, H, eps, scale, E, K, HAS_BIAS,
                SIGMOID, RENORMALIZE, SPLIT, True, BLOCK_PARTS, BLOCK_R, BLOCK_E, BLOCK_K,
            )  # fmt: skip


@triton.jit
def norm_route_rows_kernel(
    x, gain, weight, bias, out_weight, out_expert, logits, counters,
    x_stride, weight_stride, eps, scale,
    T: tl.constexpr, H: tl.constexpr, E: tl.constexpr, K: tl.constexpr, HAS_BIAS: tl.constexpr,
    SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, LAST: tl.constexpr,
    BLOCK_R: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * ROWS
    t = tl.arange(0, BLOCK_T)
    h = tl.arange(0, BLOCK_H)
    in_t, in_h = t < T, h < H
    g = tl.load(gain + h, mask=in_h, other=0.0).to(tl.float32)
    row = tl.load(weight + first.to(tl.int64) * weight_stride + h, mask=in_h, other=0.0)
    wait_for_predecessor(PDL)
    # all tokens in one load and one sum: one after the other, each would wait for its own
    v = tl.load(
        x + t.to(tl.int64)[:, None] * x_stride + h[None, :],
        mask=in_t[:, None] & in_h[None, :],
        other=0.0,
    ).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(v * v, axis=1) / H + eps)
    v *= g[None, :]
    for r in tl.static_range(ROWS):
        if r > 0:
            row = tl.load(
                weight + (first + r).to(tl.int64) * weight_stride + h,
                mask=in_h & (first + r < E),
                other=0.0,
            )
        y = tl.sum(row.to(tl.float32)[None, :] * v, axis=1) * inverse
        tl.store(logits + t * BLOCK_E + first + r, y, mask=in_t & (first + r < E))
    turn = turn_among_last(counters, tl.num_programs(0), LAST)
    if turn >= 0:
        for token in range(turn, T, LAST):
            choose_one(
                logits + token * BLOCK_E, 0, logits, 0, token, bias, out_weight, out_expert, H,
                eps, scale,
                E, K, HAS_BIAS, SIGMOID, RENORMALIZE, 1, False, 1, BLOCK_R, BLOCK_E, BLOCK_K,
            )  # fmt: skip
