"""Both halves of the experts' MLP in one kernel, for a few tokens.

T tokens, H hidden, E experts, K experts per token, P = T * K pairs, I intermediate. Between two
kernels memory stands still while the first ends and the second begins. Here programs take tickets:
the first ones compute gate, up and SiLU product of a pair, the others output columns of a token.
The latter fetch their rows of the down projection at once and then wait until the token's pairs
are done. A ticket is only ever held by a program that runs, and the pairs' tickets come first, so
whoever waits waits for programs that run: it cannot lock up, however few run at once.
"""

import torch
import triton
import triton.language as tl

from kernels.device import last_to_arrive, wait_for_predecessor
from kernels.launch import arrival_counters, cdiv, launch, pdl_for, pow2
from kernels.tuning import Config

OP = "moe_fused"
#: every pair reads its expert's weights; with more tokens they share too many
MAX_TOKENS = 8


@triton.jit
def moe_fused_kernel(
    x, gain, norm_squares, gate_up, down, weights, experts, residual, hidden, out, counters,
    T, H_OUT, eps, x_stride, gate_expert_stride, gate_row_stride, down_expert_stride,
    down_row_stride,
    H: tl.constexpr, INTER: tl.constexpr, K: tl.constexpr, HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, NORM_PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_D: tl.constexpr,
    UNROLL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    I_BLOCKS: tl.constexpr = (INTER + BLOCK_I - 1) // BLOCK_I
    O_BLOCKS: tl.constexpr = (H + BLOCK_O - 1) // BLOCK_O
    wait_for_predecessor(PDL)
    # counters: tickets, finished programs, and each token's finished pairs
    ticket = tl.atomic_add(counters, 1, sem="relaxed")
    num_pairs = T * K
    if ticket < num_pairs * I_BLOCKS:
        # pairs run side by side: experts they share are read once
        pair = ticket % num_pairs
        i = ticket // num_pairs * BLOCK_I + tl.arange(0, BLOCK_I)
        h = tl.arange(0, BLOCK_H)
        in_i = i < INTER
        e = tl.load(experts + pair).to(tl.int64)
        row = x + (pair // K).to(tl.int64) * x_stride + h
        gate = gate_up + e * gate_expert_stride + i.to(tl.int64)[:, None] * gate_row_stride
        gate += h[None, :]
        up = gate + INTER * gate_row_stride
        acc_gate = tl.zeros([BLOCK_I, BLOCK_H], dtype=tl.float32)
        acc_up = tl.zeros([BLOCK_I, BLOCK_H], dtype=tl.float32)
        squares = tl.zeros([BLOCK_H], dtype=tl.float32)
        for h0 in tl.static_range(0, H, BLOCK_H):
            in_h = h0 + h < H
            inside = in_i[:, None] & in_h[None, :]
            w_gate = tl.load(gate + h0, mask=inside, other=0.0, eviction_policy="evict_first")
            w_up = tl.load(up + h0, mask=inside, other=0.0, eviction_policy="evict_first")
            v = tl.load(row + h0, mask=in_h, other=0.0).to(tl.float32)
            if HAS_NORM:
                squares += v * v
                v *= tl.load(gain + h0 + h, mask=in_h, other=0.0).to(tl.float32)
            acc_gate += w_gate.to(tl.float32) * v[None, :]
            acc_up += w_up.to(tl.float32) * v[None, :]
        g = tl.sum(acc_gate, axis=1)
        u = tl.sum(acc_up, axis=1)
        if HAS_NORM:
            scale = tl.rsqrt(tl.sum(squares, axis=0) / H + eps)
            g *= scale
            u *= scale
        if NORM_PARTS:
            n = tl.arange(0, BLOCK_PARTS)
            parts = tl.load(norm_squares + n * T + pair // K, mask=n < NORM_PARTS, other=0.0)
            scale = tl.rsqrt(tl.sum(parts, axis=0) / H + eps)
            g *= scale
            u *= scale
        y = g / (1.0 + tl.exp(-g)) * u
        tl.store(hidden + pair.to(tl.int64) * INTER + i, y.to(hidden.dtype.element_ty), mask=in_i)
        tl.debug_barrier()
        tl.atomic_add(counters + 2 + pair // K, 1, sem="release")
    else:
        item = ticket - num_pairs * I_BLOCKS
        t = (item % T).to(tl.int64)
        o = item // T * BLOCK_O + tl.arange(0, BLOCK_O)
        d = tl.arange(0, BLOCK_D)
        k = tl.arange(0, UNROLL)
        in_o = o < H_OUT
        rows = down + o.to(tl.int64)[None, :, None] * down_row_stride + d[None, None, :]
        chosen = tl.load(experts + t * K + k, mask=k < K, other=0).to(tl.int64)
        # on its way while the pairs are being finished
        tile = tl.load(
            rows + chosen[:, None, None] * down_expert_stride,
            mask=(k < K)[:, None, None] & in_o[None, :, None] & (d < INTER)[None, None, :],
            other=0.0,
            eviction_policy="evict_first",
        )
        finished = tl.atomic_add(counters + 2 + t, 0, sem="acquire")
        while finished < K * I_BLOCKS:
            finished = tl.atomic_add(counters + 2 + t, 0, sem="acquire")
        acc = tl.zeros([BLOCK_O, BLOCK_D], dtype=tl.float32)
        for k0 in tl.static_range(0, K, UNROLL):
            in_k = k0 + k < K
            w = tl.load(weights + t * K + k0 + k, mask=in_k, other=0.0).to(tl.float32)
            if k0 > 0:
                chosen = tl.load(experts + t * K + k0 + k, mask=in_k, other=0).to(tl.int64)
            for d0 in tl.static_range(0, INTER, BLOCK_D):
                in_d = d0 + d < INTER
                if k0 + d0 > 0:
                    tile = tl.load(
                        rows + chosen[:, None, None] * down_expert_stride + d0,
                        mask=in_k[:, None, None] & in_o[None, :, None] & in_d[None, None, :],
                        other=0.0,
                        eviction_policy="evict_first",
                    )
                inner = tl.load(
                    hidden + (t * K + k0 + k)[:, None] * INTER + (d0 + d)[None, :],
                    mask=in_k[:, None] & in_d[None, :],
                    other=0.0,
                    cache_modifier=".cg",
                )
                inner = inner.to(tl.float32) * w[:, None]
                acc += tl.sum(tile.to(tl.float32) * inner[:, None, :], axis=0)
        total = tl.sum(acc, axis=1)
        if HAS_RESIDUAL:
            total += tl.load(residual + t * H_OUT + o, mask=in_o, other=0.0).to(tl.float32)
        tl.store(out + t * H_OUT + o, total.to(out.dtype.element_ty), mask=in_o)
        if last_to_arrive(counters + 1, T * O_BLOCKS):
            # all tickets are taken and all waiting is over
            tl.store(counters, 0)
            for token in range(T):
                tl.store(counters + 2 + token, 0)


def default_config() -> Config:
    """Off: two kernels."""
    return {"enabled": 0}


def candidates(num_tokens: int, inter: int, hidden: int) -> list[Config]:
    """What tuning tries; off among it."""
    found: list[Config] = [default_config()]
    if num_tokens > MAX_TOKENS:
        return found
    for block_i, block_h, block_o, unroll, num_warps in (
        (4, 2048, 4, 4, 4), (2, 2048, 2, 8, 4), (4, 2048, 2, 8, 4), (2, 2048, 2, 4, 2),
        (4, 2048, 4, 2, 4), (8, 2048, 4, 8, 8), (4, 2048, 4, 8, 8), (2, 2048, 4, 4, 4),
    ):  # fmt: skip
        if block_h <= pow2(hidden):
            found.append({"enabled": 1, "block_i": block_i, "block_h": block_h,
                          "block_o": block_o, "block_d": pow2(inter), "unroll": unroll,
                          "num_warps": num_warps})  # fmt: skip
    return found


def run_fused(
    x_TH: torch.Tensor,
    gain_H: torch.Tensor | None,
    squares_NT: torch.Tensor | None,
    eps: float,
    gate_up_EJH: torch.Tensor,
    down_EHI: torch.Tensor,
    weight_TK: torch.Tensor,
    expert_TK: torch.Tensor,
    residual_TH: torch.Tensor | None,
    out_TH: torch.Tensor,
    config: Config,
) -> None:
    """Write ``out_TH``; ``squares_NT`` as ``run_gate_up`` has it."""
    _, hidden, inter = down_EHI.shape
    num_tokens, top_k = expert_TK.shape
    hidden_PI = x_TH.new_empty(num_tokens * top_k, inter)
    programs = num_tokens * top_k * cdiv(inter, config["block_i"])
    programs += num_tokens * cdiv(hidden, config["block_o"])
    parts = 0 if squares_NT is None else len(squares_NT)
    pdl = pdl_for(x_TH.device, OP)
    # what a flag switches off still needs a pointer of a fixed type
    launch(
        moe_fused_kernel, (programs,), x_TH, x_TH if gain_H is None else gain_H,
        x_TH if squares_NT is None else squares_NT, gate_up_EJH, down_EHI, weight_TK, expert_TK,
        out_TH if residual_TH is None else residual_TH, hidden_PI, out_TH,
        arrival_counters(x_TH.device, 2 + num_tokens), num_tokens, hidden, eps, x_TH.stride(0),
        *gate_up_EJH.stride()[:2], *down_EHI.stride()[:2], H=hidden, INTER=inter, K=top_k,
        HAS_NORM=gain_H is not None, HAS_RESIDUAL=residual_TH is not None, NORM_PARTS=parts,
        BLOCK_PARTS=pow2(parts), BLOCK_I=config["block_i"], BLOCK_H=config["block_h"],
        BLOCK_O=config["block_o"], BLOCK_D=config["block_d"], UNROLL=config["unroll"], PDL=pdl,
        launch_pdl=pdl, num_warps=config["num_warps"],
    )  # fmt: skip
