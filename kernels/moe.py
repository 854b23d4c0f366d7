"""The experts' MLP of a Mixture-of-Experts layer (one tensor-parallel shard of it).

T tokens, H hidden, E experts, K experts per token, I this shard's intermediate size, J = 2I.
"""

import torch
from torch.nn.functional import linear, silu

from kernels import moe_down, moe_gate_up
from kernels.launch import require, shared_memory_bytes
from kernels.moe_rows import make_slots
from kernels.norm import Normed, rms_norm_ref
from kernels.tuning import config_for

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


def norm_moe_add_ref(
    x_TH: torch.Tensor,
    norm_weight_H: torch.Tensor,
    eps: float,
    gate_up_EJH: torch.Tensor,
    down_EHI: torch.Tensor,
    weight_TK: torch.Tensor,
    expert_TK: torch.Tensor,
    residual_TH: torch.Tensor | None,
    normed: Normed | None = None,
) -> torch.Tensor:
    """``moe_mlp(rms_norm(x)) + residual`` (None: no addition).

    ``normed`` changes nothing here: see ``norm_moe_add``.
    """
    y_TH = moe_mlp_ref(
        rms_norm_ref(x_TH, norm_weight_H, eps), gate_up_EJH, down_EHI, weight_TK, expert_TK
    )
    return y_TH if residual_TH is None else y_TH + residual_TH


def _run(
    x_TH: torch.Tensor,
    norm_weight_H: torch.Tensor | None,
    eps: float,
    gate_up_EJH: torch.Tensor,
    down_EHI: torch.Tensor,
    weight_TK: torch.Tensor,
    expert_TK: torch.Tensor,
    residual_TH: torch.Tensor | None,
    out_TH: torch.Tensor | None,
    normed: Normed | None = None,
) -> torch.Tensor:
    num_experts, double, hidden = gate_up_EJH.shape
    inter = double // 2
    num_tokens, top_k = expert_TK.shape
    require(
        down_EHI.shape == (num_experts, hidden, inter) and double == 2 * inter,
        f"moe: gate_up {list(gate_up_EJH.shape)} and down {list(down_EHI.shape)} do not fit",
    )
    require(
        x_TH.shape == (num_tokens, hidden) and weight_TK.shape == expert_TK.shape,
        f"moe: x {list(x_TH.shape)}, weights {list(weight_TK.shape)} and experts "
        f"{list(expert_TK.shape)} do not fit",
    )
    require(
        x_TH.dtype == gate_up_EJH.dtype == down_EHI.dtype,
        f"moe: x is {x_TH.dtype}, the experts {gate_up_EJH.dtype} and {down_EHI.dtype}",
    )
    require(
        x_TH.stride(1) == 1 and gate_up_EJH.stride(2) == 1 and down_EHI.stride(2) == 1,
        "moe: rows must be contiguous",
    )
    require(
        expert_TK.is_contiguous() and weight_TK.is_contiguous(),
        "moe: the router's outputs must be contiguous",
    )
    device, size = x_TH.device, x_TH.element_size()
    num_pairs = num_tokens * top_k
    shape = {
        "T": num_tokens, "H": hidden, "I": inter, "E": num_experts, "K": top_k,
        "dtype": str(x_TH.dtype)[6:],
    }  # fmt: skip
    first = config_for(
        "moe_gate_up",
        device,
        shape,
        lambda: moe_gate_up.default_config(
            num_tokens,
            num_pairs,
            size,
            hidden,
            num_experts=num_experts,
            shared_bytes=shared_memory_bytes(device),
        ),
    )
    second = config_for(
        "moe_down",
        device,
        shape,
        lambda: moe_down.default_config(
            num_tokens, num_pairs, inter, size, hidden=hidden, num_experts=num_experts
        ),
    )
    squares_NT = None
    if normed is not None:
        require(
            normed.weighted_TH.shape == x_TH.shape and normed.weighted_TH.is_contiguous(),
            f"moe: the normed rows {list(normed.weighted_TH.shape)} do not fit x",
        )
        (x_TH, squares_NT), norm_weight_H = normed, None
    out = x_TH.new_empty(num_tokens, hidden) if out_TH is None else out_TH
    active = None
    if second["scheme"] == moe_down.STATIONARY:
        require(
            num_tokens <= moe_down.MAX_STATIONARY_TOKENS,
            f"moe: the stationary scheme takes {moe_down.MAX_STATIONARY_TOKENS} tokens at most",
        )
        active = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    slots = make_slots(expert_TK, num_experts, first.get("block_t", 16))
    hidden_PI = moe_gate_up.run_gate_up(
        x_TH, norm_weight_H, eps, gate_up_EJH, expert_TK, first, slots, active, squares_NT
    )
    if second.get("block_t", 16) != first.get("block_t", 16):
        slots = make_slots(expert_TK, num_experts, second.get("block_t", 16))
    moe_down.run_down(
        hidden_PI,
        down_EHI,
        weight_TK,
        expert_TK,
        residual_TH,
        out,
        second,
        slots,
        active,
    )
    return out


def moe_mlp(
    x_TH: torch.Tensor,
    gate_up_EJH: torch.Tensor,
    down_EHI: torch.Tensor,
    weight_TK: torch.Tensor,
    expert_TK: torch.Tensor,
) -> torch.Tensor:
    """As ``moe_mlp_ref``."""
    return _run(x_TH, None, 0.0, gate_up_EJH, down_EHI, weight_TK, expert_TK, None, None)


def norm_moe_add(
    x_TH: torch.Tensor,
    norm_weight_H: torch.Tensor,
    eps: float,
    gate_up_EJH: torch.Tensor,
    down_EHI: torch.Tensor,
    weight_TK: torch.Tensor,
    expert_TK: torch.Tensor,
    residual_TH: torch.Tensor | None,
    out_TH: torch.Tensor | None = None,
    normed: Normed | None = None,
) -> torch.Tensor:
    """As ``norm_moe_add_ref``; ``out_TH`` may be given, and may be ``residual_TH`` itself.

    ``normed`` is the norm of x as
    ``linear_route`` leaves it: it spares taking the norm again.
    """
    return _run(
        x_TH, norm_weight_H, eps, gate_up_EJH, down_EHI, weight_TK, expert_TK, residual_TH, out_TH,
        normed,
    )  # fmt: skip
