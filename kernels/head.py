"""The language-model head with the argmax taken where the logits are made.

T tokens, H hidden, V vocabulary (or this rank's shard of it).
"""

import torch
import triton
import triton.language as tl

from kernels.device import wait_for_predecessor
from kernels.launch import launch, pdl_for, pow2
from kernels.linear import norm_linear_ref, run_linear


def norm_linear_argmax_ref(
    x_TH: torch.Tensor,
    norm_weight_H: torch.Tensor,
    eps: float,
    weight_VH: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(token_T int64, logit_T fp32)``: the largest logit of ``rms_norm(x) W^T`` and its place.

    The first one in a tie. The logit lets tensor-parallel ranks compare their shards.
    """
    value_T, token_T = norm_linear_ref(x_TH, norm_weight_H, eps, weight_VH).float().max(-1)
    return token_T, value_T


@triton.jit
def first_best(best_value, best_index, t, num_blocks, T, BLOCK: tl.constexpr):
    """The largest of the blocks' best values of token ``t``, and the first index that has it."""
    value = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    index = tl.full([BLOCK], 2147483647, dtype=tl.int32)
    for start in range(0, num_blocks, BLOCK):
        block = start + tl.arange(0, BLOCK)
        v = tl.load(best_value + block * T + t, mask=block < num_blocks, other=float("-inf"))
        i = tl.load(best_index + block * T + t, mask=block < num_blocks, other=2147483647)
        # blocks ascend with the index, so an equal value found later is not the first
        better = v > value
        value = tl.where(better, v, value)
        index = tl.where(better, i, index)
    best = tl.max(value, axis=0)
    found = tl.min(tl.where(value == best, index, 2147483647), axis=0)
    return best, tl.where(found == 2147483647, 0, found)


@triton.jit
def argmax_blocks_kernel(
    best_value, best_index, token, logit, num_blocks, T, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    t = tl.program_id(0)
    wait_for_predecessor(PDL)
    best, found = first_best(best_value, best_index, t, num_blocks, T, BLOCK)
    tl.store(token + t, found.to(tl.int64))
    tl.store(logit + t, best)


def norm_linear_argmax(
    x_TH: torch.Tensor,
    norm_weight_H: torch.Tensor,
    eps: float,
    weight_VH: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``norm_linear_argmax_ref``; the logits never reach memory."""
    _, _, value, index = run_linear(
        "lm_head", x_TH, weight_VH, gain_K=norm_weight_H, eps=eps, store=False, argmax=True
    )
    assert value is not None
    assert index is not None
    num_blocks, num_tokens = value.shape
    token_T = torch.empty(num_tokens, dtype=torch.int64, device=x_TH.device)
    logit_T = torch.empty(num_tokens, dtype=torch.float32, device=x_TH.device)
    pdl = pdl_for(x_TH.device)
    launch(
        argmax_blocks_kernel, (num_tokens,), value, index, token_T, logit_T, num_blocks, num_tokens,
        BLOCK=min(8192, pow2(num_blocks)), PDL=pdl, launch_pdl=pdl, num_warps=16,
    )  # fmt: skip
    return token_T, logit_T


def norm_lm_head(
    x_TH: torch.Tensor,
    norm_weight_H: torch.Tensor,
    eps: float,
    weight_VH: torch.Tensor,
) -> torch.Tensor:
    """``norm_linear_ref`` with a configuration of its own: the logits ``y_TV``."""
    out, _, _, _ = run_linear("lm_head", x_TH, weight_VH, gain_K=norm_weight_H, eps=eps)
    assert out is not None
    return out
