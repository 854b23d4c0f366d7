"""Which experts a token goes to, and with what weight.

T tokens, E experts, K experts per token, H hidden.
"""

import torch

from kernels.launch import arrival_counters, cdiv, launch, pdl_for, pow2, require, waiting_programs
from kernels.norm import rms_norm_ref
from kernels.router_kernels import norm_route_kernel, norm_route_rows_kernel, route_kernel
from kernels.tuning import Config, config_for

SCORES = ("softmax", "sigmoid")
#: a program holds all the logits of its tokens
MAX_EXPERTS = 1024
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """``route`` of the logits ``rms_norm(x) W^T``, which are taken in fp32."""
    logits_TE = torch.nn.functional.linear(
        rms_norm_ref(x_TH, norm_weight_H, eps).float(), weight_EH.float()
    )
    return route_ref(
        logits_TE, top_k, score=score, bias_E=bias_E, renormalize=renormalize, scale=scale
    )


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
        return {"rows": 1 if num_experts <= 256 else 2, "num_warps": 4}
    block_h = max(16, min(64, 32768 // (pow2(num_experts, 16) * element_bytes)))
    split = 1
    while split < 32 and 2 * split * block_h <= hidden:
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``norm_route_ref``, one kernel: split over H, the last program chooses the experts."""
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
    bias = x_TH if bias_E is None else bias_E
    flags = {
        "H": hidden, "E": num_experts, "K": top_k, "HAS_BIAS": bias_E is not None,
        "SIGMOID": score == "sigmoid", "RENORMALIZE": renormalize, "BLOCK_E": block_e,
        "BLOCK_K": pow2(top_k), "BLOCK_R": config["num_warps"], "PDL": pdl, "launch_pdl": pdl,
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
            arrival_counters(device, 2), x_TH.stride(0), weight_EH.stride(0),
            eps, scale,
            T=num_tokens, ROWS=config["rows"], BLOCK_T=pow2(num_tokens), BLOCK_H=pow2(hidden),
            LAST=waiting_programs(device, min(num_tokens, cdiv(num_experts, config["rows"]))),
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
        partial, partial_squares, arrival_counters(device, 2 * token_blocks),
        num_tokens, x_TH.stride(0), weight_EH.stride(0), eps, scale,
        SPLIT=split, LAST=waiting_programs(device, min(split, block_t, num_tokens), token_blocks),
        BLOCK_PARTS=pow2(split), BLOCK_T=block_t, BLOCK_H=config["block_h"],
        STAGES=config["stages"],
        PRECISION="ieee", **flags,
    )  # fmt: skip
    return weight_TK, expert_TK
