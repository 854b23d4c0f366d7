"""Two of the kernels behind the linear layers of ``linear`` and ``head``.

T tokens, K inputs, OUT outputs. What a flag switches off is a pointer that is never followed.
"""

import triton
import triton.language as tl

from kernels.device import add_rounded, dot, last_to_arrive, prefetch_l2, wait_for_predecessor


@triton.jit
def linear_vector_kernel(
    x, added, gain, weight, residual, out, total, best_value, best_index,
    OUT, weight_stride, eps,
    K: tl.constexpr, HAS_ADDED: tl.constexpr, HAS_NORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    STORE: tl.constexpr, ARGMAX: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    o = pid * BLOCK_O + tl.arange(0, BLOCK_O)
    k = tl.arange(0, BLOCK_K)
    rows = weight + o.to(tl.int64)[:, None] * weight_stride + k[None, :]
    # the first tile is on its way before the predecessor has ended
    tile = tl.load(
        rows, mask=(o < OUT)[:, None] & (k < K)[None, :], other=0.0, eviction_policy="evict_first"
    )
    wait_for_predecessor(PDL)
    acc = tl.zeros([BLOCK_O, BLOCK_K], dtype=tl.float32)
    squares = tl.zeros([BLOCK_K], dtype=tl.float32)
    for k0 in tl.static_range(0, K, BLOCK_K):
        in_k = k0 + k < K
        if k0 > 0:
            tile = tl.load(
                rows + k0,
                mask=(o < OUT)[:, None] & in_k[None, :],
                other=0.0,
                eviction_policy="evict_first",
            )
        x_k = tl.load(x + k0 + k, mask=in_k, other=0.0)
        if HAS_ADDED:
            x_k = add_rounded(x_k, tl.load(added + k0 + k, mask=in_k, other=0.0))
            if pid == 0:
                tl.store(total + k0 + k, x_k, mask=in_k)
        v = x_k.to(tl.float32)
        if HAS_NORM:
            squares += v * v
            v *= tl.load(gain + k0 + k, mask=in_k, other=0.0).to(tl.float32)
        acc += tile.to(tl.float32) * v[None, :]
    y = tl.sum(acc, axis=1)
    if HAS_NORM:
        y *= tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
    if HAS_RESIDUAL:
        y += tl.load(residual + o, mask=o < OUT, other=0.0).to(tl.float32)
    y = y.to(x.dtype.element_ty)
    if STORE:
        tl.store(out + o, y, mask=o < OUT)
    if ARGMAX:
        value = tl.where(o < OUT, y.to(tl.float32), float("-inf"))
        best = tl.max(value, axis=0)
        tl.store(best_value + pid, best)
        tl.store(best_index + pid, tl.min(tl.where(value == best, o, OUT - 1), axis=0))


@triton.jit
def matrix_product(
    x, added, gain, weight, total, o, t, pid_o, pid_k, T, OUT, x_stride, weight_stride,
    K: tl.constexpr, HAS_ADDED: tl.constexpr, HAS_NORM: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr, STAGES: tl.constexpr,
    SWAP: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``(products [BLOCK_T, BLOCK_O], sums of squares [BLOCK_T])`` of part ``pid_k`` of the inputs.

    Waits for the predecessor before it reads x.
    """
    PART: tl.constexpr = (K + SPLIT_K * BLOCK_K - 1) // (SPLIT_K * BLOCK_K) * BLOCK_K
    k = pid_k * PART + tl.arange(0, BLOCK_K)
    rows = weight + o.to(tl.int64)[:, None] * weight_stride
    if PDL:
        # this program's own weights are on their way before the predecessor has ended
        LINE: tl.constexpr = 128 // (weight.dtype.element_ty.primitive_bitwidth // 8)
        line = tl.arange(0, BLOCK_K // LINE if BLOCK_K >= LINE else 1) * LINE
        own_rows = weight + tl.minimum(o, OUT - 1).to(tl.int64)[:, None] * weight_stride
        for k0 in range(0, PART, BLOCK_K):
            prefetch_l2(own_rows + tl.minimum(pid_k * PART + k0 + line, K - 1)[None, :], PDL)
    wait_for_predecessor(PDL)
    t_offset = t.to(tl.int64)[:, None] * x_stride
    if SWAP:
        # rows of the weight are the rows of the product: 64 of them make it a warp group's
        acc = tl.zeros([BLOCK_O, BLOCK_T], dtype=tl.float32)
    else:
        acc = tl.zeros([BLOCK_T, BLOCK_O], dtype=tl.float32)
    squares_all = tl.zeros([BLOCK_T, BLOCK_K], dtype=tl.float32)
    for k0 in tl.range(0, PART, BLOCK_K, num_stages=STAGES):
        in_k = k0 + k < K
        in_x = (t < T)[:, None] & in_k[None, :]
        tile = tl.load(
            rows + (k0 + k)[None, :],
            mask=(o < OUT)[:, None] & in_k[None, :],
            other=0.0,
            eviction_policy="evict_first",
        )
        v = tl.load(x + t_offset + (k0 + k)[None, :], mask=in_x, other=0.0)
        if HAS_ADDED:
            v = add_rounded(v, tl.load(added + t_offset + (k0 + k)[None, :], mask=in_x, other=0.0))
            if pid_o == 0:
                tl.store(total + t_offset + (k0 + k)[None, :], v, mask=in_x)
        if HAS_NORM:
            wide = v.to(tl.float32)
            squares_all += wide * wide
            g = tl.load(gain + k0 + k, mask=in_k, other=0.0).to(tl.float32)
            v = (wide * g[None, :]).to(weight.dtype.element_ty)
        if SWAP:
            acc = dot(tile, tl.trans(v), acc, PRECISION)
        else:
            acc = dot(v, tl.trans(tile), acc, PRECISION)
    if SWAP:
        acc = tl.trans(acc)
    return acc, tl.sum(squares_all, axis=1)


@triton.jit
def ways_product(
    x, added, gain, weight, total, o, t, pid_o, pid_k, T, OUT, x_stride, weight_stride,
    K: tl.constexpr, HAS_ADDED: tl.constexpr, HAS_NORM: tl.constexpr, WAYS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As ``matrix_product``, in ``WAYS`` parts of the inputs side by side in one program.

    A warp has a part for itself, so that few outputs a program still give every multiprocessor
    many warps; their sums meet within the program instead of in memory.
    """
    WHOLE: tl.constexpr = SPLIT_K * WAYS * BLOCK_K
    PART: tl.constexpr = (K + WHOLE - 1) // WHOLE * BLOCK_K
    way = pid_k * WAYS + tl.arange(0, WAYS)
    k = way[:, None] * PART + tl.arange(0, BLOCK_K)[None, :]
    in_o = (o < OUT)[None, :, None]
    in_t = (t < T)[None, :, None]
    rows = weight + o.to(tl.int64)[None, :, None] * weight_stride + k[:, None, :]
    at = t.to(tl.int64)[None, :, None] * x_stride + k[:, None, :]
    wait_for_predecessor(PDL)
    acc = tl.zeros([WAYS, BLOCK_O, BLOCK_T], dtype=tl.float32)
    squares_all = tl.zeros([WAYS, BLOCK_T, BLOCK_K], dtype=tl.float32)
    for k0 in tl.range(0, PART, BLOCK_K, num_stages=STAGES):
        in_k = (k0 + k < K)[:, None, :]
        in_x = in_t & in_k
        tile = tl.load(rows + k0, mask=in_o & in_k, other=0.0, eviction_policy="evict_first")
        v = tl.load(x + at + k0, mask=in_x, other=0.0)
        if HAS_ADDED:
            v = add_rounded(v, tl.load(added + at + k0, mask=in_x, other=0.0))
            if pid_o == 0:
                tl.store(total + at + k0, v, mask=in_x)
        if HAS_NORM:
            wide = v.to(tl.float32)
            squares_all += wide * wide
            g = tl.load(gain + k0 + k, mask=k0 + k < K, other=0.0).to(tl.float32)
            v = (wide * g[:, None, :]).to(weight.dtype.element_ty)
        acc = dot(tile, tl.trans(v, 0, 2, 1), acc, PRECISION)
    return tl.trans(tl.sum(acc, axis=0)), tl.sum(tl.sum(squares_all, axis=2), axis=0)


@triton.jit
def linear_matrix_kernel(
    x, added, gain, weight, residual, out, total, best_value, best_index,
    partial, partial_squares, counters,
    T, OUT, x_stride, weight_stride, out_stride, eps,
    K: tl.constexpr, HAS_ADDED: tl.constexpr, HAS_NORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    STORE: tl.constexpr, ARGMAX: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
    WAYS: tl.constexpr, STAGES: tl.constexpr, SWAP: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    pid_o = tl.program_id(0)
    pid_k = tl.program_id(1)
    pid_t = tl.program_id(2)
    o = pid_o * BLOCK_O + tl.arange(0, BLOCK_O)
    t = pid_t * BLOCK_T + tl.arange(0, BLOCK_T)
    if WAYS > 1:
        acc, squares = ways_product(
            x, added, gain, weight, total, o, t, pid_o, pid_k, T, OUT, x_stride, weight_stride, K,
            HAS_ADDED, HAS_NORM, WAYS, BLOCK_T, BLOCK_O, BLOCK_K, SPLIT_K, STAGES, PRECISION, PDL,
        )  # fmt: skip
    else:
        acc, squares = matrix_product(
            x, added, gain, weight, total, o, t, pid_o, pid_k, T, OUT, x_stride, weight_stride, K,
            HAS_ADDED, HAS_NORM, BLOCK_T, BLOCK_O, BLOCK_K, SPLIT_K, STAGES, SWAP, PRECISION, PDL,
        )  # fmt: skip
    if SPLIT_K > 1:
        block = (pid_t * tl.num_programs(0) + pid_o).to(tl.int64)
        inner = tl.arange(0, BLOCK_T)[:, None] * BLOCK_O + tl.arange(0, BLOCK_O)[None, :]
        in_t = tl.arange(0, BLOCK_T)
        base = partial + block * SPLIT_K * BLOCK_T * BLOCK_O
        base_squares = partial_squares + block * SPLIT_K * BLOCK_T
        shown = (t < T)[:, None] & (o < OUT)[None, :]
        tl.store(base + pid_k * BLOCK_T * BLOCK_O + inner, acc, mask=shown)
        tl.store(base_squares + pid_k * BLOCK_T + in_t, squares)
        if last_to_arrive(counters + block, SPLIT_K):
            acc = tl.zeros([BLOCK_T, BLOCK_O], dtype=tl.float32)
            squares = tl.zeros([BLOCK_T], dtype=tl.float32)
            for s in tl.static_range(SPLIT_K):
                acc += tl.load(
                    base + s * BLOCK_T * BLOCK_O + inner,
                    mask=shown,
                    other=0.0,
                    cache_modifier=".cg",
                )
                squares += tl.load(base_squares + s * BLOCK_T + in_t, cache_modifier=".cg")
            _finish(
                acc, squares, residual, out, best_value, best_index, t, o, pid_o, T, OUT,
                out_stride, eps, K, HAS_NORM, HAS_RESIDUAL, STORE, ARGMAX,
            )  # fmt: skip
    else:
        _finish(
            acc, squares, residual, out, best_value, best_index, t, o, pid_o, T, OUT,
            out_stride, eps, K, HAS_NORM, HAS_RESIDUAL, STORE, ARGMAX,
        )  # fmt: skip


@triton.jit
def _finish(
    acc, squares, residual, out, best_value, best_index, t, o, pid_o, T, OUT, out_stride, eps,
    K: tl.constexpr, HAS_NORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr, STORE: tl.constexpr,
    ARGMAX: tl.constexpr,
):  # fmt: skip
    if HAS_NORM:
        acc *= tl.rsqrt(squares / K + eps)[:, None]
    shown = (t < T)[:, None] & (o < OUT)[None, :]
    where = t.to(tl.int64)[:, None] * out_stride + o[None, :]
    if HAS_RESIDUAL:
        acc += tl.load(residual + where, mask=shown, other=0.0).to(tl.float32)
    y = acc.to(out.dtype.element_ty)
    if STORE:
        tl.store(out + where, y, mask=shown)
    if ARGMAX:
        value = tl.where((o < OUT)[None, :], y.to(tl.float32), float("-inf"))
        best = tl.max(value, axis=1)
        index = tl.min(tl.where(value == best[:, None], o[None, :], OUT - 1), axis=1)
        tl.store(best_value + pid_o * T + t, best, mask=t < T)
        tl.store(best_index + pid_o * T + t, index, mask=t < T)
