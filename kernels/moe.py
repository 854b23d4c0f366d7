"""The experts' MLP of a Mixture-of-Experts layer (one tensor-parallel shard of it).

T tokens, H hidden, E experts, K experts per token, I this shard's intermediate size, J = 2I.
"""

import torch
from torch.nn.functional import linear, silu

#: tokens x elements of gate_up up to which computing every expert beats a loop over them (one core:
#: about 1 ms)
_DENSE_MAX_MACS = 20_000_000


def moe_mlp_ref(
    x_TH: torch.Tensor,
    gate_up_EJH: torch.Tensor,
    down_EHI: torch.Tensor,
    weight_TK: torch.Tensor,
    expert_TK: torch.Tensor,
) -> torch.Tensor:
    """``y_t = sum_k weight_tk * down[e] (silu(gate[e] x_t) * up[e] x_t)``, e = expert_tk.

    Gate rows come first in ``gate_up_EJH``. The sum over K is taken in fp32. One token, small
    problems and large ones take different paths (the same sums): on a CPU a small step's cost is
    the number of torch ops.
    """
    num_tokens, num_experts = x_TH.shape[0], gate_up_EJH.shape[0]
    if num_tokens == 1:
        return _one_token(x_TH, gate_up_EJH, down_EHI, weight_TK, expert_TK)
    if num_tokens * gate_up_EJH.numel() <= _DENSE_MAX_MACS:
        return _dense(x_TH, gate_up_EJH, down_EHI, weight_TK, expert_TK)
    top_k = expert_TK.shape[1]
    order_P = expert_TK.flatten().argsort(stable=True)
    counts = torch.bincount(expert_TK.flatten(), minlength=num_experts).tolist()
    token_P = order_P // top_k
    x_PH = x_TH[token_P]
    y_PH = torch.empty_like(x_PH)
    start = 0
    for expert, count in enumerate(counts):
        if count:
            rows = slice(start, start + count)
            hidden_PI = _silu_product(linear(x_PH[rows], gate_up_EJH[expert]))
            y_PH[rows] = linear(hidden_PI, down_EHI[expert])
            start += count
    total_TH = torch.zeros(x_TH.shape, dtype=torch.float32, device=x_TH.device)
    weighted_PH = y_PH.float() * weight_TK.flatten()[order_P, None]
    return total_TH.index_add_(0, token_P, weighted_PH).to(x_TH.dtype)


def _silu_product(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up


def _one_token(
    x_TH: torch.Tensor,
    gate_up_EJH: torch.Tensor,
    down_EHI: torch.Tensor,
    weight_TK: torch.Tensor,
    expert_TK: torch.Tensor,
) -> torch.Tensor:
    y_KH = torch.cat(
        [
            linear(_silu_product(linear(x_TH, gate_up_EJH[expert])), down_EHI[expert])
            for expert in expert_TK[0].tolist()
        ]
    )
    return (weight_TK.float() @ y_KH.float()).to(x_TH.dtype)


def _dense(
    x_TH: torch.Tensor,
    gate_up_EJH: torch.Tensor,
    down_EHI: torch.Tensor,
    weight_TK: torch.Tensor,
    expert_TK: torch.Tensor,
) -> torch.Tensor:
    """Every expert on every token, weighted by 0 where the router did not choose it."""
    weight_TE = torch.zeros(x_TH.shape[0], gate_up_EJH.shape[0], device=x_TH.device)
    weight_TE.scatter_add_(1, expert_TK, weight_TK.float())
    hidden_ETI = _silu_product(torch.matmul(x_TH, gate_up_EJH.transpose(1, 2)))
    y_ETH = torch.bmm(hidden_ETI, down_EHI.transpose(1, 2))
    return torch.einsum("te,eth->th", weight_TE, y_ETH.float()).to(x_TH.dtype)
