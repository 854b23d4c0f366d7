"""First half of the experts' MLP: RMSNorm (optional), gate and up projections, SiLU product.

T tokens, H hidden, E experts, K experts per token, P = T * K pairs, I intermediate, J = 2I. Each
touched expert's weights are read once for up to BLOCK_T tokens.
"""

import torch
import triton
import triton.language as tl

from kernels.device import dot, wait_for_predecessor
from kernels.launch import cdiv, launch, pdl_for, pow2, require
from kernels.moe_rows import (
    MAX_PAIRS_UNSORTED,
    Slots,
    expert_of_slot,
    num_rows_of_slot,
    pairs_of_slot,
)
from kernels.moe_tiles import mostly_apart, row_warps, rows_of_expert
from kernels.norm import rms_norm, row_scale
from kernels.tuning import Config

#: pairs up to which the vector kernels may be the faster ones
MAX_PAIRS_SHARED = 128
#: configuration values of "vector": tiles of tokens, a pair a program, an expert's pairs a program
MATRIX, PAIR, SHARED = 0, 1, 2
#: shared memory that deeper pipelines take
_ROOMY_BYTES = 160 * 1024


@triton.jit
def _scale_of_pair(
    norm_squares, pair, P, eps, H: tl.constexpr, K: tl.constexpr, NORM_PARTS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    n = tl.arange(0, BLOCK_PARTS)
    parts = tl.load(norm_squares + n * (P // K) + pair // K, mask=n < NORM_PARTS, other=0.0)
    return tl.rsqrt(tl.sum(parts, axis=0) / H + eps)


@triton.jit
def gate_up_vector_kernel(
    x, gain, norm_squares, gate_up, experts, out, active, num_active, P, eps, x_stride,
    expert_stride,
    row_stride,
    H: tl.constexpr, INTER: tl.constexpr, E: tl.constexpr, K: tl.constexpr, HAS_NORM: tl.constexpr,
    NORM_PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr, LIST: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_H: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0)
    i = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    h = tl.arange(0, BLOCK_H)
    in_i = i < INTER
    wait_for_predecessor(PDL)
    if LIST:  # noqa: SIM102 - one is known when compiling, the other is not
        if pair == P:
            if tl.program_id(1) == 0:
                _list_active(experts, active, num_active, P, E, BLOCK_P, BLOCK_E)
            return
    e = tl.load(experts + pair).to(tl.int64)
    row = x + (pair // K).to(tl.int64) * x_stride + h
    gate = gate_up + e * expert_stride + i.to(tl.int64)[:, None] * row_stride + h[None, :]
    up = gate + INTER * row_stride
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
        scale = _scale_of_pair(norm_squares, pair, P, eps, H, K, NORM_PARTS, BLOCK_PARTS)
        g *= scale
        u *= scale
    y = g / (1.0 + tl.exp(-g)) * u
    tl.store(out + pair.to(tl.int64) * INTER + i, y.to(out.dtype.element_ty), mask=in_i)


@triton.jit
def gate_up_shared_kernel(
    x, gain, norm_squares, gate_up, experts, out, active, num_active, P, eps, x_stride,
    expert_stride,
    row_stride,
    H: tl.constexpr, INTER: tl.constexpr, E: tl.constexpr, K: tl.constexpr, HAS_NORM: tl.constexpr,
    NORM_PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr, LIST: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_H: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # whole rows of an expert stay in registers while its tokens pass by, one after the other
    pair = tl.program_id(0)
    i = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    h = tl.arange(0, BLOCK_H)
    p = tl.arange(0, BLOCK_P)
    in_i = i < INTER
    in_h = h < H
    wait_for_predecessor(PDL)
    if LIST:  # noqa: SIM102 - as above
        if pair == P:
            if tl.program_id(1) == 0:
                _list_active(experts, active, num_active, P, E, BLOCK_P, BLOCK_E)
            return
    e = tl.load(experts + pair).to(tl.int64)
    ids = tl.load(experts + p, mask=p < P, other=-1)
    if tl.min(tl.where(ids == e, p, BLOCK_P), axis=0) < pair:
        return
    gate = gate_up + e * expert_stride + i.to(tl.int64)[:, None] * row_stride + h[None, :]
    inside = in_i[:, None] & in_h[None, :]
    w_gate = tl.load(gate, mask=inside, other=0.0, eviction_policy="evict_first")
    w_up = tl.load(gate + INTER * row_stride, mask=inside, other=0.0, eviction_policy="evict_first")
    if HAS_NORM:
        factor = tl.load(gain + h, mask=in_h, other=0.0).to(tl.float32)
    while pair < P:
        v = tl.load(x + (pair // K).to(tl.int64) * x_stride + h, mask=in_h, other=0.0)
        v = v.to(tl.float32)
        if HAS_NORM:
            v *= tl.rsqrt(tl.sum(v * v, axis=0) / H + eps) * factor
        g = tl.sum(w_gate.to(tl.float32) * v[None, :], axis=1)
        u = tl.sum(w_up.to(tl.float32) * v[None, :], axis=1)
        if NORM_PARTS:
            scale = _scale_of_pair(norm_squares, pair, P, eps, H, K, NORM_PARTS, BLOCK_PARTS)
            g *= scale
            u *= scale
        y = g / (1.0 + tl.exp(-g)) * u
        tl.store(out + pair.to(tl.int64) * INTER + i, y.to(out.dtype.element_ty), mask=in_i)
        following = tl.min(tl.where((ids == e) & (p > pair), p, BLOCK_P), axis=0)
        pair = tl.where(following < BLOCK_P, following, P)


@triton.jit
def gate_up_matrix_kernel(
    x, gain, norm_squares, gate_up, experts, order, tile_expert, tile_first, tile_count, out,
    active,
    num_active, P, num_slots, x_stride, eps, expert_stride, row_stride,
    H: tl.constexpr, INTER: tl.constexpr, E: tl.constexpr, K: tl.constexpr, HAS_NORM: tl.constexpr,
    NORM_PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr, LIST: tl.constexpr, SLOT: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_H: tl.constexpr,
    STAGES: tl.constexpr, SWAP: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pid_i = tl.program_id(0)
    slot = tl.program_id(1)
    wait_for_predecessor(PDL)
    if LIST:  # noqa: SIM102 - one is known when compiling, the other is not
        # one more program than slots lists the touched experts for the second half
        if slot == num_slots:
            if pid_i == 0:
                _list_active(experts, active, num_active, P, E, BLOCK_P, BLOCK_E)
            return
    e = expert_of_slot(experts, tile_expert, slot, P, SLOT, BLOCK_P)
    if e < 0:
        return
    count = num_rows_of_slot(experts, tile_count, slot, e, P, SLOT, BLOCK_P)
    i = pid_i * BLOCK_I + tl.arange(0, BLOCK_I)
    h = tl.arange(0, BLOCK_H)
    in_i = i < INTER
    gate = gate_up + e.to(tl.int64) * expert_stride + i.to(tl.int64)[:, None] * row_stride
    up = gate + INTER * row_stride
    for m0 in range(0, count, BLOCK_T):
        m = m0 + tl.arange(0, BLOCK_T)
        in_m = m < count
        pair = pairs_of_slot(
            experts, order, tile_first, slot, e, m, count, P, SLOT, BLOCK_P
        ).to(tl.int64)  # fmt: skip
        rows = x + (pair // K)[:, None] * x_stride
        if SWAP:
            acc_gate = tl.zeros([BLOCK_I, BLOCK_T], dtype=tl.float32)
            acc_up = tl.zeros([BLOCK_I, BLOCK_T], dtype=tl.float32)
        else:
            acc_gate = tl.zeros([BLOCK_T, BLOCK_I], dtype=tl.float32)
            acc_up = tl.zeros([BLOCK_T, BLOCK_I], dtype=tl.float32)
        squares = tl.zeros([BLOCK_T, BLOCK_H], dtype=tl.float32)
        for h0 in tl.range(0, H, BLOCK_H, num_stages=STAGES):
            in_h = h0 + h < H
            inside = in_i[:, None] & in_h[None, :]
            w_gate = tl.load(
                gate + (h0 + h)[None, :], mask=inside, other=0.0, eviction_policy="evict_first"
            )
            w_up = tl.load(
                up + (h0 + h)[None, :], mask=inside, other=0.0, eviction_policy="evict_first"
            )
            v = tl.load(rows + (h0 + h)[None, :], mask=in_m[:, None] & in_h[None, :], other=0.0)
            if HAS_NORM:
                wide = v.to(tl.float32)
                squares += wide * wide
                g = tl.load(gain + h0 + h, mask=in_h, other=0.0).to(tl.float32)
                v = (wide * g[None, :]).to(gate_up.dtype.element_ty)
            if SWAP:
                acc_gate = dot(w_gate, tl.trans(v), acc_gate, PRECISION)
                acc_up = dot(w_up, tl.trans(v), acc_up, PRECISION)
            else:
                acc_gate = dot(v, tl.trans(w_gate), acc_gate, PRECISION)
                acc_up = dot(v, tl.trans(w_up), acc_up, PRECISION)
        if SWAP:
            acc_gate = tl.trans(acc_gate)
            acc_up = tl.trans(acc_up)
        if HAS_NORM:
            scale = tl.rsqrt(tl.sum(squares, axis=1) / H + eps)[:, None]
            acc_gate *= scale
            acc_up *= scale
        if NORM_PARTS:
            scale = row_scale(
                norm_squares, pair // K, in_m, P // K, H, eps, NORM_PARTS, BLOCK_PARTS
            )[:, None]
            acc_gate *= scale
            acc_up *= scale
        y = acc_gate / (1.0 + tl.exp(-acc_gate)) * acc_up
        tl.store(
            out + pair[:, None] * INTER + i[None, :],
            y.to(out.dtype.element_ty),
            mask=in_m[:, None] & in_i[None, :],
        )


@triton.jit
def _list_active(
    experts, active, num_active, P, E: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr
):
    e = tl.arange(0, BLOCK_E)
    used = tl.zeros([BLOCK_E], dtype=tl.int32)
    STEP: tl.constexpr = 32 if BLOCK_P > 32 else BLOCK_P
    for p0 in range(0, P, STEP):
        p = p0 + tl.arange(0, STEP)
        ids = tl.load(experts + p, mask=p < P, other=-1).to(tl.int32)
        used = tl.maximum(used, tl.max((ids[None, :] == e[:, None]).to(tl.int32), axis=1))
    place = tl.cumsum(used, axis=0) - used
    tl.store(active + place, e, mask=(used > 0) & (e < E))
    tl.store(num_active, tl.sum(used, axis=0))


def default_config(
    num_tokens: int,
    num_pairs: int,
    element_bytes: int,
    hidden: int = 2048,
    *,
    num_experts: int = 128,
    shared_bytes: int = 0,
) -> Config:
    """A good choice without tuning; ``shared_bytes``: what the GPU lets a block have."""
    if num_tokens == 1 or mostly_apart(num_tokens, num_pairs, num_experts):
        block_h = min(pow2(hidden, 16), 4096 // element_bytes)
        return {"vector": PAIR, "block_i": 4, "block_h": block_h, "norm_first": 0,
                "num_warps": row_warps(block_h, element_bytes, 4)}  # fmt: skip
    if num_pairs > MAX_PAIRS_UNSORTED:
        return {"vector": MATRIX, "block_t": 64, "block_i": 64, "block_h": 128 // element_bytes,
                "norm_first": 1, "stages": 3, "num_warps": 4}  # fmt: skip
    block_t = rows_of_expert(num_tokens, num_pairs, num_experts)
    config = {"vector": MATRIX, "block_t": block_t, "norm_first": 1, "num_warps": 4}
    if block_t == 16 and shared_bytes >= _ROOMY_BYTES:
        return config | {"block_i": 64, "block_h": 128 // element_bytes, "stages": 5, "swap": 1}
    stages = {16: 5, 32: 4, 64: 3}[block_t]
    return config | {"block_i": 32, "block_h": 256 // element_bytes, "stages": stages}


def candidates(num_tokens: int, num_pairs: int, hidden: int) -> list[Config]:
    """What tuning tries for this number of tokens (16-bit weights)."""
    found: list[Config] = []
    if num_pairs <= MAX_PAIRS_SHARED:
        for block_i, block_h, num_warps, norm_first in (
            (4, 2048, 4, 0), (2, 2048, 4, 0), (2, 2048, 2, 0), (1, 2048, 2, 0), (1, 2048, 1, 0),
            (8, 1024, 4, 0), (4, 2048, 8, 0), (4, 2048, 4, 1),
        ):  # fmt: skip
            if block_h <= pow2(hidden) and (num_tokens > 1 or not norm_first):
                found.append({"vector": PAIR, "block_i": block_i, "block_h": block_h,
                              "norm_first": norm_first, "num_warps": num_warps})  # fmt: skip
    if num_tokens == 1:
        return found
    if num_pairs <= MAX_PAIRS_SHARED:
        for block_i, num_warps in ((4, 4), (1, 1)):
            found.append({"vector": SHARED, "block_i": block_i, "block_h": pow2(hidden),
                          "norm_first": 1, "num_warps": num_warps})  # fmt: skip
    if num_pairs > MAX_PAIRS_UNSORTED:
        tiles = ((64, 64, 64, 3, 4, 0), (64, 64, 64, 4, 8, 0), (32, 64, 64, 4, 4, 0),
                 (64, 128, 64, 3, 8, 0), (64, 64, 64, 4, 4, 1), (64, 128, 64, 3, 4, 1))  # fmt: skip
    else:
        tiles = (
            (16, 64, 64, 5, 4, 1), (16, 64, 128, 3, 4, 1), (16, 32, 128, 5, 4, 0),
            (16, 32, 128, 4, 4, 0), (16, 32, 256, 3, 4, 0), (16, 128, 64, 5, 4, 1),
            (16, 32, 128, 4, 2, 1), (16, 16, 256, 4, 2, 0),
        )  # fmt: skip
    for block_t, block_i, block_h, stages, num_warps, swap in tiles:
        found.append({"vector": MATRIX, "block_t": block_t, "block_i": block_i, "block_h": block_h,
                      "stages": stages, "swap": swap, "norm_first": 1,
                      "num_warps": num_warps})  # fmt: skip
    return found


def run_gate_up(
    x_TH: torch.Tensor,
    gain_H: torch.Tensor | None,
    eps: float,
    gate_up_EJH: torch.Tensor,
    expert_TK: torch.Tensor,
    config: Config,
    slots: Slots,
    active: torch.Tensor | None,
    squares_NT: torch.Tensor | None = None,
) -> torch.Tensor:
    """``hidden_PI``; ``active`` (int32 [E + 1]) gets the touched experts and, last, how many.

    With ``squares_NT`` the rows of x are ``Normed``: they carry the gain and only lack the scale.
    """
    num_experts, double, hidden = gate_up_EJH.shape
    inter = double // 2
    num_tokens, top_k = expert_TK.shape
    out_PI = x_TH.new_empty(num_tokens * top_k, inter)
    gain = x_TH if gain_H is None else gain_H
    pdl = pdl_for(x_TH.device, "moe_gate_up")
    blocks = cdiv(inter, config["block_i"])
    num_pairs = num_tokens * top_k
    if gain_H is not None and config.get("norm_first"):
        # a kernel of its own for the norm leaves the product's loop with loads and dots alone
        x_TH, gain_H = rms_norm(x_TH, gain_H, eps), None
    flags = {"H": hidden, "INTER": inter, "K": top_k, "HAS_NORM": gain_H is not None,
             "NORM_PARTS": 0 if squares_NT is None else len(squares_NT),
             "BLOCK_PARTS": 1 if squares_NT is None else pow2(len(squares_NT))}  # fmt: skip
    norm_squares = gain if squares_NT is None else squares_NT
    listed = active is not None
    # what a flag switches off still needs a pointer of a fixed type
    place = active if active is not None else expert_TK
    number = active[num_experts:] if active is not None else expert_TK
    strides = (x_TH.stride(0), *gate_up_EJH.stride()[:2])
    if config["vector"]:
        require(
            config["vector"] == PAIR or config["block_h"] >= hidden,
            f"moe_gate_up: sharing takes whole rows, {config['block_h']} of {hidden} given",
        )
        launch(
            gate_up_vector_kernel if config["vector"] == PAIR else gate_up_shared_kernel,
            (num_pairs + (1 if listed else 0), blocks), x_TH, gain, norm_squares, gate_up_EJH,
            expert_TK, out_PI, place, number, num_pairs, eps, *strides, **flags, E=num_experts,
            LIST=listed, BLOCK_P=pow2(num_pairs), BLOCK_E=pow2(num_experts),
            BLOCK_I=config["block_i"], BLOCK_H=config["block_h"],
            PDL=pdl, launch_pdl=pdl, num_warps=config["num_warps"],
        )  # fmt: skip
        return out_PI
    launch(
        gate_up_matrix_kernel, (blocks, slots.count + (1 if listed else 0)),
        x_TH, gain, norm_squares, gate_up_EJH, expert_TK, slots.order, slots.tile_expert,
        slots.tile_first, slots.tile_count, out_PI, place, number, num_pairs, slots.count,
        strides[0], eps, *strides[1:],
        **flags, E=num_experts, LIST=listed, SLOT=slots.kind, BLOCK_P=slots.block_p,
        BLOCK_E=pow2(num_experts), BLOCK_T=config["block_t"], BLOCK_I=config["block_i"],
        BLOCK_H=config["block_h"], STAGES=config["stages"], SWAP=bool(config.get("swap")),
        PRECISION="ieee",
        PDL=pdl, launch_pdl=pdl, num_warps=config["num_warps"],
    )  # fmt: skip
    return out_PI
