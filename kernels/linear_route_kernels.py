"""The kernels behind ``linear_route``: a linear layer whose last program chooses the experts.

T tokens, K inputs, OUT outputs (the residual stream), E experts, TOP experts per token. A program
has finished columns of the residual stream in registers: their share of the router's logits and of
the row's sum of squares costs it one small product. The last programs, one a token, add the shares,
scale the logits by the norm and choose.
"""

import triton
import triton.language as tl

from kernels.device import dot, last_to_arrive, turn_among_last, wait_for_predecessor
from kernels.linear_kernels import matrix_product, ways_product
from kernels.router_kernels import choose_one


@triton.jit
def linear_route_vector_kernel(
    x, weight, residual, out, gain, router, bias, normed, norm_squares, out_weight, out_expert,
    partial, partial_logits, partial_squares, counters,
    OUT, x_stride, weight_stride, router_stride, eps, scale,
    T: tl.constexpr, K: tl.constexpr, E: tl.constexpr, TOP: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, HAS_BIAS: tl.constexpr, SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr, NUM_BLOCKS: tl.constexpr, LAST: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_TOP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    o = pid * BLOCK_O + tl.arange(0, BLOCK_O)
    k = tl.arange(0, BLOCK_K)
    e = tl.arange(0, BLOCK_E)
    in_o = o < OUT
    rows = weight + o.to(tl.int64)[:, None] * weight_stride + k[None, :]
    tile = tl.load(
        rows, mask=in_o[:, None] & (k < K)[None, :], other=0.0, eviction_policy="evict_first"
    )
    router_tile = tl.load(
        router + e.to(tl.int64)[:, None] * router_stride + o[None, :],
        mask=(e < E)[:, None] & in_o[None, :],
        other=0.0,
    )
    g = tl.load(gain + o, mask=in_o, other=0.0).to(tl.float32)
    wait_for_predecessor(PDL)
    acc = tl.zeros([BLOCK_O, BLOCK_K], dtype=tl.float32)
    for k0 in tl.static_range(0, K, BLOCK_K):
        in_k = k0 + k < K
        if k0 > 0:
            tile = tl.load(
                rows + k0,
                mask=in_o[:, None] & in_k[None, :],
                other=0.0,
                eviction_policy="evict_first",
            )
        v = tl.load(x + k0 + k, mask=in_k, other=0.0).to(tl.float32)
        acc += tile.to(tl.float32) * v[None, :]
    y = tl.sum(acc, axis=1)
    if HAS_RESIDUAL:
        y += tl.load(residual + o, mask=in_o, other=0.0).to(tl.float32)
    y = y.to(out.dtype.element_ty)
    tl.store(out + o, y, mask=in_o)
    wide = y.to(tl.float32)
    weighted = wide * g
    tl.store(normed + o, weighted.to(normed.dtype.element_ty), mask=in_o)
    share = tl.sum(router_tile.to(tl.float32) * weighted[None, :], axis=1)
    tl.store(partial_logits + pid * BLOCK_E + e, share)
    tl.store(partial_squares + pid, tl.sum(wide * wide, axis=0))
    _choose_from_shares(
        partial_logits, partial_squares, counters, bias, norm_squares, out_weight, out_expert, OUT,
        eps, scale, T, E, TOP, HAS_BIAS, SIGMOID, RENORMALIZE, NUM_BLOCKS, LAST, BLOCK_N, BLOCK_R,
        BLOCK_E, BLOCK_TOP,
    )  # fmt: skip


@triton.jit
def linear_route_matrix_kernel(
    x, weight, residual, out, gain, router, bias, normed, norm_squares, out_weight, out_expert,
    partial, partial_logits, partial_squares, counters,
    OUT, x_stride, weight_stride, router_stride, eps, scale,
    T: tl.constexpr, K: tl.constexpr, E: tl.constexpr, TOP: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, HAS_BIAS: tl.constexpr, SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr, NUM_BLOCKS: tl.constexpr, LAST: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
    WAYS: tl.constexpr, STAGES: tl.constexpr, SWAP: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_TOP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    pid_o = tl.program_id(0)
    pid_k = tl.program_id(1)
    o = pid_o * BLOCK_O + tl.arange(0, BLOCK_O)
    t = tl.arange(0, BLOCK_T)
    e = tl.arange(0, BLOCK_E)
    in_o = o < OUT
    # the router's columns arrive while the product runs
    router_tile = tl.load(
        router + e.to(tl.int64)[:, None] * router_stride + o[None, :],
        mask=(e < E)[:, None] & in_o[None, :],
        other=0.0,
    )
    g = tl.load(gain + o, mask=in_o, other=0.0).to(tl.float32)
    if WAYS > 1:
        acc, _ = ways_product(
            x, x, gain, weight, out, o, t, pid_o, pid_k, T, OUT, x_stride, weight_stride, K,
            False, False, WAYS, BLOCK_T, BLOCK_O, BLOCK_K, SPLIT_K, STAGES, PRECISION, PDL,
        )  # fmt: skip
    else:
        acc, _ = matrix_product(
            x, x, gain, weight, out, o, t, pid_o, pid_k, T, OUT, x_stride, weight_stride, K,
            False, False, BLOCK_T, BLOCK_O, BLOCK_K, SPLIT_K, STAGES, SWAP, PRECISION, PDL,
        )  # fmt: skip
    shown = (t < T)[:, None] & in_o[None, :]
    finish = True
    if SPLIT_K > 1:
        inner = t[:, None] * BLOCK_O + tl.arange(0, BLOCK_O)[None, :]
        base = partial + pid_o.to(tl.int64) * SPLIT_K * BLOCK_T * BLOCK_O
        tl.store(base + pid_k * BLOCK_T * BLOCK_O + inner, acc, mask=shown)
        finish = last_to_arrive(counters + pid_o, SPLIT_K)
        if finish:
            # one load of all the parts: one after the other, each would change layout on its own
            part = tl.arange(0, SPLIT_K)[:, None, None] * (BLOCK_T * BLOCK_O)
            every = tl.load(
                base + part + inner[None, :, :],
                mask=shown[None, :, :],
                other=0.0,
                cache_modifier=".cg",
            )
            acc = tl.sum(every, axis=0)
    if finish:
        where = t[:, None] * OUT + o[None, :]
        if HAS_RESIDUAL:
            acc += tl.load(residual + where, mask=shown, other=0.0).to(tl.float32)
        y = acc.to(out.dtype.element_ty)
        tl.store(out + where, y, mask=shown)
        wide = y.to(tl.float32)
        weighted = (wide * g[None, :]).to(normed.dtype.element_ty)
        tl.store(normed + where, weighted, mask=shown)
        if BLOCK_T < 16:
            # a tensor core wants 16 rows: the experts are
            share = tl.trans(dot(router_tile, tl.trans(weighted), None, PRECISION))
        else:
            share = dot(weighted, tl.trans(router_tile), None, PRECISION)
        at = (pid_o * T + t)[:, None] * BLOCK_E + e[None, :]
        tl.store(partial_logits + at, share, mask=(t < T)[:, None])
        tl.store(partial_squares + pid_o * T + t, tl.sum(wide * wide, axis=1), mask=t < T)
        _choose_from_shares(
            partial_logits, partial_squares, counters + NUM_BLOCKS, bias, norm_squares, out_weight,
            out_expert, OUT, eps, scale, T, E, TOP, HAS_BIAS, SIGMOID, RENORMALIZE, NUM_BLOCKS,
            LAST, BLOCK_N, BLOCK_R, BLOCK_E, BLOCK_TOP,
        )  # fmt: skip


@triton.jit
def _choose_from_shares(
    partial_logits, partial_squares, counters, bias, norm_squares, out_weight, out_expert, OUT, eps,
    scale,
    T: tl.constexpr, E: tl.constexpr, TOP: tl.constexpr, HAS_BIAS: tl.constexpr,
    SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr, NUM_BLOCKS: tl.constexpr, LAST: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_TOP: tl.constexpr,
):  # fmt: skip
    turn = turn_among_last(counters, NUM_BLOCKS, LAST)
    if turn >= 0:
        for t in range(turn, T, LAST):
            square = choose_one(
                partial_logits + t * BLOCK_E, T * BLOCK_E, partial_squares + t, T, t, bias,
                out_weight, out_expert, OUT, eps, scale, E, TOP, HAS_BIAS, SIGMOID, RENORMALIZE,
                NUM_BLOCKS, True, BLOCK_N, BLOCK_R, BLOCK_E, BLOCK_TOP,
            )  # fmt: skip
            tl.store(norm_squares + t, square)
