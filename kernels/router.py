"""Which experts a token goes to, and with what weight.

T tokens, E experts, K experts per token, H hidden.
"""

import torch
import triton
import triton.language as tl

from kernels.device import dot, last_to_arrive, prefetch_l2, wait_for_predecessor
from kernels.launch import arrival_counters, cdiv, launch, pdl_for, pow2, require
from kernels.norm import rms_norm_ref
from kernels.prefetch import prefetch_arguments, prefetch_from_last
from kernels.tuning import Config, config_for

SCORES = ("softmax", "sigmoid")
#: a program holds all the logits of its tokens
MAX_EXPERTS = 1024
#: programs that fetch ahead
LAST_PROGRAMS = tl.constexpr(1024)
#: most tokens that pass by rows of the router's weight held in registers
MAX_ROWS_TOKENS = 8


def check_route(num_experts: int, top_k: int, score: str) -> None:
    """Raise ``ValueError`` unless ``top_k`` of ``num_experts`` can be chosen by ``score``."""
    if score not in SCORES:
        raise ValueError(f"unknown router score {score!r}; known: {', '.join(SCORES)}")
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k must be in 1..{num_experts} (the number of experts), got {top_k}")


def route_ref(
    logits_TE: torch.Tensor,
    top_k: int,
    *,
    score: str = "softmax",
    bias_E: torch.Tensor | None = None,
    renormalize: bool = True,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(weight_TK fp32, expert_TK int64)``, the best expert first.

    ``bias_E`` moves the choice but not the weight (DeepSeek's load balancing). ``renormalize``
    makes the K weights sum to 1 before ``scale``.
    """
    check_route(logits_TE.shape[1], top_k, score)
    logits_TE = logits_TE.float()
    score_TE = logits_TE.softmax(-1) if score == "softmax" else logits_TE.sigmoid()
    if bias_E is None:
        weight_TK, expert_TK = score_TE.topk(top_k, dim=-1)
    else:
        expert_TK = (score_TE + bias_E).topk(top_k, dim=-1).indices
        weight_TK = score_TE.gather(1, expert_TK)
    if renormalize:
        weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)
    return (weight_TK if scale == 1.0 else weight_TK * scale), expert_TK


def norm_route_ref(
    x_TH: torch.Tensor,
    norm_weight_H: torch.Tensor,
    eps: float,
    weight_EH: torch.Tensor,
    top_k: int,
    *,
    score: str = "softmax",
    bias_E: torch.Tensor | None = None,
    renormalize: bool = True,
    scale: float = 1.0,
    prefetch: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``route`` of the logits ``rms_norm(x) W^T``, which are taken in fp32."""
    logits_TE = torch.nn.functional.linear(
        rms_norm_ref(x_TH, norm_weight_H, eps).float(), weight_EH.float()
    )
    return route_ref(
        logits_TE, top_k, score=score, bias_E=bias_E, renormalize=renormalize, scale=scale
    )


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
    k = tl.arange(0, BLOCK_K)
    chosen = tl.zeros([BLOCK_T, BLOCK_K], dtype=tl.int32)
    weight = tl.zeros([BLOCK_T, BLOCK_K], dtype=tl.float32)
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
        chosen = tl.where(k[None, :] == n, index[:, None], chosen)
        weight = tl.where(k[None, :] == n, value[:, None], weight)
    if RENORMALIZE:
        weight = weight / tl.sum(weight, axis=1)[:, None]
    where = t.to(tl.int64)[:, None] * K + k[None, :]
    shown = in_t[:, None] & (k < K)[None, :]
    tl.store(out_weight + where, weight * scale, mask=shown)
    tl.store(out_expert + where, chosen.to(tl.int64), mask=shown)


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
    ahead, ahead_bytes, T, x_stride, weight_stride, eps, scale,
    H: tl.constexpr, E: tl.constexpr, K: tl.constexpr, HAS_BIAS: tl.constexpr,
    SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
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
    prefetch_from_last(ahead, ahead_bytes, LAST_PROGRAMS, PREFETCH)
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
    if last_to_arrive(counters + block, SPLIT):
        logits = tl.zeros([BLOCK_T, BLOCK_E], dtype=tl.float32)
        squares = tl.zeros([BLOCK_T], dtype=tl.float32)
        for s in tl.static_range(SPLIT):
            logits += tl.load(
                base + s * (BLOCK_T * BLOCK_E) + at, mask=shown, other=0.0, cache_modifier=".cg"
            )
            squares += tl.load(base_squares + s * BLOCK_T + inner, cache_modifier=".cg")
        logits *= tl.rsqrt(squares / H + eps)[:, None]
        choose(
            logits, t, in_t, bias, out_weight, out_expert, scale,
            E, K, HAS_BIAS, SIGMOID, RENORMALIZE, BLOCK_T, BLOCK_E, BLOCK_K,
        )  # fmt: skip


@triton.jit
def norm_route_rows_kernel(
    x, gain, weight, bias, out_weight, out_expert, logits, counters,
    ahead, ahead_bytes, x_stride, weight_stride, eps, scale,
    T: tl.constexpr, H: tl.constexpr, E: tl.constexpr, K: tl.constexpr, HAS_BIAS: tl.constexpr,
    SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr, PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * ROWS
    rows = first + tl.arange(0, ROWS)
    h = tl.arange(0, BLOCK_H)
    in_h = h < H
    tile = tl.load(
        weight + rows.to(tl.int64)[:, None] * weight_stride + h[None, :],
        mask=(rows < E)[:, None] & in_h[None, :],
        other=0.0,
    )
    g = tl.load(gain + h, mask=in_h, other=0.0).to(tl.float32)
    prefetch_from_last(ahead, ahead_bytes, LAST_PROGRAMS, PREFETCH)
    wait_for_predecessor(PDL)
    for t in tl.static_range(T):
        v = tl.load(x + t * x_stride + h, mask=in_h, other=0.0).to(tl.float32)
        y = tl.sum(tile.to(tl.float32) * (v * g)[None, :], axis=1)
        y *= tl.rsqrt(tl.sum(v * v, axis=0) / H + eps)
        tl.store(logits + t * BLOCK_E + rows, y, mask=rows < E)
    if last_to_arrive(counters, tl.num_programs(0)):
        e = tl.arange(0, BLOCK_E)
        t_all = tl.arange(0, BLOCK_T)
        in_t = t_all < T
        values = tl.load(
            logits + t_all[:, None] * BLOCK_E + e[None, :],
            mask=in_t[:, None] & (e < E)[None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        choose(
            values, t_all, in_t, bias, out_weight, out_expert, scale,
            E, K, HAS_BIAS, SIGMOID, RENORMALIZE, BLOCK_T, BLOCK_E, BLOCK_K,
        )  # fmt: skip


def route(
    logits_TE: torch.Tensor,
    top_k: int,
    *,
    score: str = "softmax",
    bias_E: torch.Tensor | None = None,
    renormalize: bool = True,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``route_ref``; the lowest expert in a tie."""
    num_tokens, num_experts = logits_TE.shape
    check_route(num_experts, top_k, score)
    require(num_experts <= MAX_EXPERTS, f"route: at most {MAX_EXPERTS} experts, got {num_experts}")
    require(logits_TE.stride(1) == 1, "route: rows must be contiguous")
    device = logits_TE.device
    weight_TK = torch.empty(num_tokens, top_k, dtype=torch.float32, device=device)
    expert_TK = torch.empty(num_tokens, top_k, dtype=torch.int64, device=device)
    block_t = max(1, min(16, 2048 // pow2(num_experts)))
    pdl = pdl_for(device)
    launch(
        route_kernel, (cdiv(num_tokens, block_t),),
        logits_TE, logits_TE if bias_E is None else bias_E, weight_TK, expert_TK, num_tokens,
        logits_TE.stride(0), scale, E=num_experts, K=top_k, HAS_BIAS=bias_E is not None,
        SIGMOID=score == "sigmoid", RENORMALIZE=renormalize, BLOCK_T=block_t,
        BLOCK_E=pow2(num_experts), BLOCK_K=pow2(top_k), PDL=pdl, launch_pdl=pdl, num_warps=4,
    )  # fmt: skip
    return weight_TK, expert_TK


def default_config(num_tokens: int, hidden: int, num_experts: int, element_bytes: int) -> Config:
    """A good choice without tuning."""
    if num_tokens <= MAX_ROWS_TOKENS and pow2(hidden) * element_bytes <= 16384:
        return {"rows": 2, "num_warps": 4}
    block_h = max(32, min(128, 32768 // (pow2(num_experts, 16) * element_bytes)))
    split = 1
    while split < (16 if num_tokens <= 4 else 8) and 2 * split * block_h <= hidden:
        split *= 2
    return {"rows": 0, "split": split, "block_h": block_h, "stages": 2, "num_warps": 4}


def candidates(num_tokens: int, num_experts: int) -> list[Config]:
    """What tuning tries."""
    found: list[Config] = []
    if num_tokens <= MAX_ROWS_TOKENS:
        found = [
            {"rows": rows, "num_warps": num_warps}
            for rows, num_warps in ((1, 4), (2, 4), (4, 4), (1, 2), (2, 8), (4, 8), (1, 8))
        ]
    tiles = ((64, 2, 4), (64, 3, 8), (128, 2, 4)) if num_tokens > 1 else ((128, 2, 4),)
    return found + [
        {"rows": 0, "split": split, "block_h": block_h, "stages": stages, "num_warps": num_warps}
        for split in (8, 16, 32)
        for block_h, stages, num_warps in tiles
        if block_h * pow2(num_experts) <= 16384 and split * block_h <= 2048
    ]


def norm_route(
    x_TH: torch.Tensor,
    norm_weight_H: torch.Tensor,
    eps: float,
    weight_EH: torch.Tensor,
    top_k: int,
    *,
    score: str = "softmax",
    bias_E: torch.Tensor | None = None,
    renormalize: bool = True,
    scale: float = 1.0,
    prefetch: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``norm_route_ref``, one kernel: split over H, the last program chooses the experts.

    ``prefetch`` is brought into L2 meanwhile.
    """
    num_tokens, hidden = x_TH.shape
    num_experts = weight_EH.shape[0]
    check_route(num_experts, top_k, score)
    require(num_experts <= MAX_EXPERTS, f"norm_route: at most {MAX_EXPERTS} experts")
    require(x_TH.stride(1) == 1 and weight_EH.stride(1) == 1, "norm_route: rows must be contiguous")
    device = x_TH.device
    config = config_for(
        "norm_route",
        device,
        {"T": num_tokens, "H": hidden, "E": num_experts, "dtype": str(x_TH.dtype)[6:]},
        lambda: default_config(num_tokens, hidden, num_experts, x_TH.element_size()),
    )
    weight_TK = torch.empty(num_tokens, top_k, dtype=torch.float32, device=device)
    expert_TK = torch.empty(num_tokens, top_k, dtype=torch.int64, device=device)
    block_e, pdl = pow2(num_experts, 16), pdl_for(device, "norm_route")
    ahead, ahead_bytes, mode = prefetch_arguments(prefetch, x_TH)
    bias = x_TH if bias_E is None else bias_E
    flags = {
        "H": hidden, "E": num_experts, "K": top_k, "HAS_BIAS": bias_E is not None,
        "SIGMOID": score == "sigmoid", "RENORMALIZE": renormalize, "BLOCK_E": block_e,
        "BLOCK_K": pow2(top_k), "PREFETCH": mode, "PDL": pdl, "launch_pdl": pdl,
        "num_warps": config["num_warps"],
    }  # fmt: skip
    if config.get("rows"):
        require(
            num_tokens <= MAX_ROWS_TOKENS,
            f"norm_route: whole rows take {MAX_ROWS_TOKENS} tokens at most, got {num_tokens}",
        )
        logits = torch.empty(num_tokens, block_e, dtype=torch.float32, device=device)
        launch(
            norm_route_rows_kernel, (cdiv(num_experts, config["rows"]),),
            x_TH, norm_weight_H, weight_EH, bias, weight_TK, expert_TK, logits,
            arrival_counters(device, 1), ahead, ahead_bytes, x_TH.stride(0), weight_EH.stride(0),
            eps, scale,
            T=num_tokens, ROWS=config["rows"], BLOCK_H=pow2(hidden),
            # a warp a token: nothing crosses warps while choosing
            BLOCK_T=max(config["num_warps"], pow2(num_tokens)),
            **flags,
        )  # fmt: skip
        return weight_TK, expert_TK
    split, block_t = config["split"], 16
    token_blocks = cdiv(num_tokens, block_t)
    size = token_blocks * split * block_t
    partial = torch.empty(size * block_e, dtype=torch.float32, device=device)
    partial_squares = torch.empty(size, dtype=torch.float32, device=device)
    launch(
        norm_route_kernel, (split, token_blocks),
        x_TH, norm_weight_H, weight_EH, bias, weight_TK, expert_TK,
        partial, partial_squares, arrival_counters(device, token_blocks), ahead, ahead_bytes,
        num_tokens, x_TH.stride(0), weight_EH.stride(0), eps, scale,
        SPLIT=split, BLOCK_T=block_t, BLOCK_H=config["block_h"], STAGES=config["stages"],
        PRECISION="ieee", **flags,
    )  # fmt: skip
    return weight_TK, expert_TK
