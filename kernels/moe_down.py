"""Second half of the experts' MLP: down projection, weighted sum over a token's experts, residual.

T tokens, H hidden, E experts, K experts per token, P = T * K pairs, I intermediate. For few tokens
a program owns output columns and goes through every touched expert (no partial results, one
order of summation); for many, an expert's program writes weighted pairs and a second kernel adds.
"""

import torch
import triton
import triton.language as tl

from kernels.device import dot, last_to_arrive, wait_for_predecessor
from kernels.launch import arrival_counters, cdiv, launch, pdl_for, pow2, require
from kernels.moe_rows import (
    MAX_PAIRS_UNSORTED,
    Slots,
    expert_of_slot,
    num_rows_of_slot,
    pairs_of_slot,
)
from kernels.tuning import Config

#: configuration values of "scheme"
VECTOR, STATIONARY, GROUPED, SHARED = 0, 1, 2, 3
#: pairs up to which the vector kernels may be the faster ones
MAX_PAIRS_SHARED = 128
#: most tokens of the stationary scheme: its rows are the tokens
MAX_STATIONARY_TOKENS = 16


@triton.jit
def down_vector_kernel(
    hidden, down, weights, experts, residual, out, H, expert_stride, row_stride,
    INTER: tl.constexpr, K: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, UNROLL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # the tokens of one block of columns run together: experts they share are read once
    t = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    i = tl.arange(0, BLOCK_I)
    k = tl.arange(0, UNROLL)
    in_o = o < H
    rows = down + o.to(tl.int64)[None, :, None] * row_stride + i[None, None, :]
    wait_for_predecessor(PDL)
    acc = tl.zeros([BLOCK_O, BLOCK_I], dtype=tl.float32)
    # several experts' rows in one load: that is what keeps enough bytes in flight
    for k0 in range(0, K, UNROLL):
        in_k = k0 + k < K
        e = tl.load(experts + t * K + k0 + k, mask=in_k, other=0).to(tl.int64)
        w = tl.load(weights + t * K + k0 + k, mask=in_k, other=0.0).to(tl.float32)
        for i0 in tl.static_range(0, INTER, BLOCK_I):
            in_i = i0 + i < INTER
            tile = tl.load(
                rows + e[:, None, None] * expert_stride + i0,
                mask=in_k[:, None, None] & in_o[None, :, None] & in_i[None, None, :],
                other=0.0,
                eviction_policy="evict_first",
            )
            v = tl.load(
                hidden + (t * K + k0 + k)[:, None] * INTER + (i0 + i)[None, :],
                mask=in_k[:, None] & in_i[None, :],
                other=0.0,
            )
            v = v.to(tl.float32) * w[:, None]
            acc += tl.sum(tile.to(tl.float32) * v[:, None, :], axis=0)
    y = tl.sum(acc, axis=1)
    if HAS_RESIDUAL:
        y += tl.load(residual + t * H + o, mask=in_o, other=0.0).to(tl.float32)
    tl.store(out + t * H + o, y.to(out.dtype.element_ty), mask=in_o)


@triton.jit
def down_stationary_kernel(
    hidden, down, weights, experts, active, num_active, residual, out, partial, counters,
    T, H, expert_stride, row_stride,
    INTER: tl.constexpr, K: tl.constexpr, HAS_RESIDUAL: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pid_o = tl.program_id(0)
    split = tl.program_id(1)
    STEPS: tl.constexpr = (INTER + BLOCK_I - 1) // BLOCK_I
    o = pid_o * BLOCK_O + tl.arange(0, BLOCK_O)
    t = tl.arange(0, BLOCK_T)
    k = tl.arange(0, BLOCK_K)
    in_o = o < H
    wait_for_predecessor(PDL)
    pair = t[:, None] * K + k[None, :]
    is_pair = (t < T)[:, None] & (k < K)[None, :]
    ids = tl.load(experts + pair, mask=is_pair, other=-1).to(tl.int32)
    w_pair = tl.load(weights + pair, mask=is_pair, other=0.0).to(tl.float32)
    rows = down + o.to(tl.int64)[:, None] * row_stride
    count = tl.load(num_active)
    share = tl.cdiv(count, SPLIT)
    first = split * share
    last = tl.minimum(first + share, count)
    acc = tl.zeros([BLOCK_T, BLOCK_O], dtype=tl.float32)
    # carried from step to step: loads whose address hangs on a load of the same step would not be
    # pipelined
    e = tl.load(active + first, mask=first < last, other=0)
    for step in tl.range(first * STEPS, last * STEPS, num_stages=STAGES):
        i = step % STEPS * BLOCK_I + tl.arange(0, BLOCK_I)
        in_i = i < INTER
        match = ids == e
        mine = tl.sum(tl.where(match, pair, 0), axis=1)
        has = tl.sum(match.to(tl.int32), axis=1) > 0
        w = tl.sum(tl.where(match, w_pair, 0.0), axis=1)
        a = tl.load(
            hidden + mine[:, None] * INTER + i[None, :],
            mask=has[:, None] & in_i[None, :],
            other=0.0,
        )
        tile = tl.load(
            rows + e.to(tl.int64) * expert_stride + i[None, :],
            mask=in_o[:, None] & in_i[None, :],
            other=0.0,
            eviction_policy="evict_first",
        )
        acc += w[:, None] * dot(a, tl.trans(tile), None, PRECISION)
        following = (step + 1) // STEPS
        e = tl.load(active + following, mask=following < last, other=0)
    shown = (t < T)[:, None] & in_o[None, :]
    where = t.to(tl.int64)[:, None] * H + o[None, :]
    finish = True
    if SPLIT > 1:
        inner = t[:, None] * BLOCK_O + tl.arange(0, BLOCK_O)[None, :]
        base = partial + pid_o.to(tl.int64) * SPLIT * BLOCK_T * BLOCK_O
        tl.store(base + split * BLOCK_T * BLOCK_O + inner, acc, mask=shown)
        finish = last_to_arrive(counters + pid_o, SPLIT)
        if finish:
            acc = tl.zeros([BLOCK_T, BLOCK_O], dtype=tl.float32)
            for s in tl.static_range(SPLIT):
                acc += tl.load(
                    base + s * BLOCK_T * BLOCK_O + inner,
                    mask=shown,
                    other=0.0,
                    cache_modifier=".cg",
                )
    if finish:
        if HAS_RESIDUAL:
            acc += tl.load(residual + where, mask=shown, other=0.0).to(tl.float32)
        tl.store(out + where, acc.to(out.dtype.element_ty), mask=shown)


@triton.jit
def down_shared_kernel(
    hidden, down, weights, experts, pairs_out, P, H, expert_stride, row_stride,
    INTER: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # whole rows of an expert stay in registers while its tokens pass by, one after the other
    pair = tl.program_id(0)
    o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    i = tl.arange(0, BLOCK_I)
    p = tl.arange(0, BLOCK_P)
    in_o = o < H
    in_i = i < INTER
    wait_for_predecessor(PDL)
    e = tl.load(experts + pair).to(tl.int64)
    ids = tl.load(experts + p, mask=p < P, other=-1)
    if tl.min(tl.where(ids == e, p, BLOCK_P), axis=0) < pair:
        return
    tile = tl.load(
        down + e * expert_stride + o.to(tl.int64)[:, None] * row_stride + i[None, :],
        mask=in_o[:, None] & in_i[None, :],
        other=0.0,
        eviction_policy="evict_first",
    )
    while pair < P:
        v = tl.load(hidden + pair.to(tl.int64) * INTER + i, mask=in_i, other=0.0).to(tl.float32)
        w = tl.load(weights + pair).to(tl.float32)
        y = tl.sum(tile.to(tl.float32) * v[None, :], axis=1) * w
        tl.store(pairs_out + pair.to(tl.int64) * H + o, y, mask=in_o)
        following = tl.min(tl.where((ids == e) & (p > pair), p, BLOCK_P), axis=0)
        pair = tl.where(following < BLOCK_P, following, P)


@triton.jit
def down_grouped_kernel(
    hidden, down, weights, experts, order, tile_expert, tile_first, tile_count, pairs_out,
    P, H, expert_stride, row_stride,
    INTER: tl.constexpr, SLOT: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, STAGES: tl.constexpr, SWAP: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(1)
    wait_for_predecessor(PDL)
    e = expert_of_slot(experts, tile_expert, slot, P, SLOT, BLOCK_P)
    if e < 0:
        return
    count = num_rows_of_slot(experts, tile_count, slot, e, P, SLOT, BLOCK_P)
    o = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    i = tl.arange(0, BLOCK_I)
    in_o = o < H
    rows = down + e.to(tl.int64) * expert_stride + o.to(tl.int64)[:, None] * row_stride
    for m0 in range(0, count, BLOCK_T):
        m = m0 + tl.arange(0, BLOCK_T)
        in_m = m < count
        pair = pairs_of_slot(
            experts, order, tile_first, slot, e, m, count, P, SLOT, BLOCK_P
        ).to(tl.int64)  # fmt: skip
        if SWAP:
            acc = tl.zeros([BLOCK_O, BLOCK_T], dtype=tl.float32)
        else:
            acc = tl.zeros([BLOCK_T, BLOCK_O], dtype=tl.float32)
        for i0 in tl.range(0, INTER, BLOCK_I, num_stages=STAGES):
            in_i = i0 + i < INTER
            a = tl.load(
                hidden + pair[:, None] * INTER + (i0 + i)[None, :],
                mask=in_m[:, None] & in_i[None, :],
                other=0.0,
            )
            tile = tl.load(
                rows + (i0 + i)[None, :],
                mask=in_o[:, None] & in_i[None, :],
                other=0.0,
                eviction_policy="evict_first",
            )
            if SWAP:
                acc = dot(tile, tl.trans(a), acc, PRECISION)
            else:
                acc = dot(a, tl.trans(tile), acc, PRECISION)
        if SWAP:
            acc = tl.trans(acc)
        w = tl.load(weights + pair, mask=in_m, other=0.0).to(tl.float32)
        tl.store(
            pairs_out + pair[:, None] * H + o[None, :],
            acc * w[:, None],
            mask=in_m[:, None] & in_o[None, :],
        )


@triton.jit
def combine_kernel(
    pairs_in, residual, out, H,
    K: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(1).to(tl.int64)
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wait_for_predecessor(PDL)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for k in tl.static_range(K):
        acc += tl.load(pairs_in + (t * K + k) * H + o, mask=o < H, other=0.0)
    if HAS_RESIDUAL:
        acc += tl.load(residual + t * H + o, mask=o < H, other=0.0).to(tl.float32)
    tl.store(out + t * H + o, acc.to(out.dtype.element_ty), mask=o < H)


def default_config(
    num_tokens: int,
    num_pairs: int,
    inter: int,
    element_bytes: int,
) -> Config:
    """A good choice without tuning."""
    if num_tokens == 1:
        block_i = min(pow2(inter, 16), 2048 // element_bytes)
        return {"scheme": VECTOR, "block_o": 4, "block_i": block_i, "unroll": 4, "num_warps": 4}
    if num_pairs <= 64 and inter * element_bytes <= 4096:
        return {"scheme": VECTOR, "block_o": 4, "block_i": min(pow2(inter, 16), 1024),
                "unroll": 4, "num_warps": 4}  # fmt: skip
    if num_pairs > MAX_PAIRS_UNSORTED:
        return {"scheme": GROUPED, "block_t": 64, "block_o": 64, "block_i": 128 // element_bytes,
                "stages": 3, "num_warps": 4}  # fmt: skip
    return {"scheme": GROUPED, "block_t": 16, "block_o": 64, "block_i": 256 // element_bytes,
            "stages": 3, "num_warps": 4}  # fmt: skip


def candidates(num_tokens: int, num_pairs: int, inter: int) -> list[Config]:
    """What tuning tries for this number of tokens."""
    found: list[Config] = []
    whole = pow2(inter, 16)
    if num_pairs <= MAX_PAIRS_SHARED:
        for block_o, block_i, unroll, num_warps in (
            (2, whole, 8, 4), (2, whole, 4, 4), (4, whole, 2, 4), (4, whole, 4, 4),
            (4, 256, 8, 2), (4, 256, 4, 1), (8, 256, 4, 2), (2, 256, 8, 1), (8, whole, 2, 4),
        ):  # fmt: skip
            if block_i <= whole:
                found.append({"scheme": VECTOR, "block_o": block_o, "block_i": block_i,
                              "unroll": unroll, "num_warps": num_warps})  # fmt: skip
    if num_tokens == 1:
        return found
    if num_pairs <= MAX_PAIRS_SHARED:
        for block_o, num_warps in ((4, 1), (8, 2), (8, 1), (16, 4), (16, 2), (32, 4)):
            found.append({"scheme": SHARED, "block_o": block_o, "block_i": whole,
                          "num_warps": num_warps})  # fmt: skip
    if num_tokens <= MAX_STATIONARY_TOKENS:
        for block_o, block_i, split, stages, num_warps in (
            (16, 256, 4, 4, 2), (32, 256, 4, 3, 4), (64, 128, 8, 4, 4),
        ):  # fmt: skip
            found.append({"scheme": STATIONARY, "block_o": block_o, "block_i": block_i,
                          "split": split, "stages": stages, "num_warps": num_warps})  # fmt: skip
    if num_pairs > MAX_PAIRS_UNSORTED:
        tiles = ((64, 64, 64, 3, 4, 0), (64, 128, 64, 3, 8, 0), (32, 64, 64, 4, 4, 0),
                 (64, 64, 64, 4, 8, 0), (64, 64, 64, 4, 4, 1), (64, 128, 64, 3, 4, 1))  # fmt: skip
    else:
        tiles = (
            (16, 32, 256, 4, 4, 0), (16, 64, 256, 3, 4, 0), (16, 32, 256, 4, 2, 0),
            (16, 16, 256, 4, 2, 0), (16, 64, 128, 4, 4, 1), (16, 64, 256, 3, 4, 1),
            (16, 64, 256, 4, 4, 1), (16, 128, 128, 4, 4, 1), (16, 128, 128, 4, 8, 1),
            (16, 64, 128, 5, 4, 1), (16, 128, 64, 5, 4, 1),
        )  # fmt: skip
    for block_t, block_o, block_i, stages, num_warps, swap in tiles:
        found.append({"scheme": GROUPED, "block_t": block_t, "block_o": block_o,
                      "block_i": block_i, "stages": stages, "swap": swap,
                      "num_warps": num_warps})  # fmt: skip
    return found


def run_down(
    hidden_PI: torch.Tensor,
    down_EHI: torch.Tensor,
    weight_TK: torch.Tensor,
    expert_TK: torch.Tensor,
    residual_TH: torch.Tensor | None,
    out_TH: torch.Tensor,
    config: Config,
    slots: Slots,
    active: torch.Tensor | None,
) -> None:
    """Write ``out_TH``; ``active`` is what ``run_gate_up`` filled (stationary scheme only)."""
    num_experts, hidden, inter = down_EHI.shape
    num_tokens, top_k = expert_TK.shape
    device = out_TH.device
    pdl = pdl_for(device)
    residual = out_TH if residual_TH is None else residual_TH
    common = {"PDL": pdl, "launch_pdl": pdl, "num_warps": config["num_warps"]}
    strides = down_EHI.stride()[:2]
    has_residual = residual_TH is not None
    blocks = cdiv(hidden, config["block_o"])
    if config["scheme"] == VECTOR:
        launch(
            down_vector_kernel, (num_tokens, blocks), hidden_PI, down_EHI, weight_TK,
            expert_TK, residual, out_TH, hidden, *strides, INTER=inter, K=top_k,
            HAS_RESIDUAL=has_residual,
            BLOCK_O=config["block_o"], BLOCK_I=config["block_i"], UNROLL=config["unroll"],
            **common,
        )  # fmt: skip
        return
    if config["scheme"] == STATIONARY:
        assert active is not None
        split, block_o = config["split"], config["block_o"]
        partial, counters = out_TH, out_TH
        if split > 1:
            size = blocks * split * MAX_STATIONARY_TOKENS * block_o
            partial = torch.empty(size, dtype=torch.float32, device=device)
            counters = arrival_counters(device, blocks)
        launch(
            down_stationary_kernel, (blocks, split), hidden_PI, down_EHI, weight_TK, expert_TK,
            active, active[num_experts:], residual, out_TH, partial, counters,
            num_tokens, hidden, *strides, INTER=inter, K=top_k, HAS_RESIDUAL=has_residual,
            SPLIT=split, BLOCK_T=MAX_STATIONARY_TOKENS, BLOCK_K=pow2(top_k), BLOCK_O=block_o,
            BLOCK_I=config["block_i"], STAGES=config["stages"], PRECISION="ieee", **common,
        )  # fmt: skip
        return
    pairs_PH = torch.empty(num_tokens * top_k, hidden, dtype=torch.float32, device=device)
    if config["scheme"] == SHARED:
        require(
            config["block_i"] >= inter,
            f"moe_down: sharing takes whole rows, {config['block_i']} of {inter} given",
        )
        launch(
            down_shared_kernel, (num_tokens * top_k, blocks), hidden_PI, down_EHI, weight_TK,
            expert_TK, pairs_PH, num_tokens * top_k, hidden, *strides, INTER=inter,
            BLOCK_P=pow2(num_tokens * top_k), BLOCK_O=config["block_o"],
            BLOCK_I=config["block_i"], **common,
        )  # fmt: skip
    else:
        launch(
            down_grouped_kernel, (blocks, slots.count), hidden_PI, down_EHI, weight_TK, expert_TK,
            slots.order, slots.tile_expert, slots.tile_first, slots.tile_count, pairs_PH,
            num_tokens * top_k, hidden, *strides, INTER=inter, SLOT=slots.kind,
            BLOCK_P=slots.block_p, BLOCK_T=config["block_t"], BLOCK_O=config["block_o"],
            BLOCK_I=config["block_i"], STAGES=config["stages"], SWAP=bool(config.get("swap")),
            PRECISION="ieee", **common,
        )  # fmt: skip
    block = min(1024, pow2(hidden))
    launch(
        combine_kernel, (cdiv(hidden, block), num_tokens), pairs_PH, residual, out_TH, hidden,
        K=top_k, HAS_RESIDUAL=has_residual, BLOCK=block, PDL=pdl, launch_pdl=pdl, num_warps=4,
    )  # fmt: skip
