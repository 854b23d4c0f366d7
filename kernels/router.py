"""Which experts a token goes to, and with what weight.

T tokens, E experts, K experts per token.
"""

import torch

SCORES = ("softmax", "sigmoid")


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
