"""The best token over ranks that each hold a share of the vocabulary, and a cycle's end with it.

R ranks, N rows, B rows of a batch, V vocabulary, H hidden. A rank's pair is its best logit and that
token's id in the whole vocabulary, both fp32: ids are exact up to 2^24.
"""

import torch
import triton
import triton.language as tl
from torch.nn.functional import embedding

from kernels.cycle import LAST, advance_ref, end_plain_row
from kernels.device import wait_for_predecessor
from kernels.launch import cdiv, launch, pdl_for, pow2, require

_BLOCK_N = 128


def pair_best_ref(token_N: torch.Tensor, value_N: torch.Tensor, start: int) -> torch.Tensor:
    """This rank's pairs, (2, N) fp32: logits, then ids; its share begins at ``start``."""
    return torch.stack((value_N, (token_N + start).float()))


def best_of_ranks_ref(pairs_R2N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``(token_N int64, value_N fp32)``: the first of the largest logits; NaN is the largest."""
    best_1N = pairs_R2N[:, 0].argmax(0, keepdim=True)
    picked_2N = pairs_R2N.gather(0, best_1N.expand(2, -1)[None])[0]
    return picked_2N[1].long(), picked_2N[0]


def finish_ranks_ref(
    pairs_R2B: torch.Tensor,
    state_4B: torch.Tensor,
    record_B1: torch.Tensor,
    embed_VH: torch.Tensor,
    next_BH: torch.Tensor,
) -> None:
    """End a plain cycle in place: the best tokens, ``advance``, and what the next one reads."""
    advance_ref(*best_of_ranks_ref(pairs_R2B), state_4B, record_B1)
    next_BH.copy_(embedding(state_4B[LAST], embed_VH))


@triton.jit
def pair_best_kernel(
    token, value, pair, start, N, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = n < N
    wait_for_predecessor(PDL)
    tl.store(pair + n, tl.load(value + n, mask=here), mask=here)
    chosen = tl.load(token + n, mask=here) + start
    tl.store(pair + N + n, chosen.to(tl.float32), mask=here)


@triton.jit
def _first_rank(pairs, n, here, N, RANKS: tl.constexpr):
    """Best logit and id of rows ``n``: a NaN stays, as nothing is larger than it."""
    best = tl.load(pairs + n, mask=here, other=0.0)
    found = tl.load(pairs + N + n, mask=here, other=0.0)
    for rank in tl.static_range(1, RANKS):
        logit = tl.load(pairs + 2 * rank * N + n, mask=here, other=0.0)
        chosen = tl.load(pairs + (2 * rank + 1) * N + n, mask=here, other=0.0)
        better = (logit > best) | ((logit != logit) & (best == best))
        best = tl.where(better, logit, best)
        found = tl.where(better, chosen, found)
    return best, found.to(tl.int64)


@triton.jit
def best_of_ranks_kernel(
    pairs, token, value, N, RANKS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = n < N
    wait_for_predecessor(PDL)
    best, found = _first_rank(pairs, n, here, N, RANKS)
    tl.store(token + n, found, mask=here)
    tl.store(value + n, best, mask=here)


@triton.jit
def finish_ranks_kernel(
    pairs, state, record, embed, following, B, H, state_stride, record_stride,
    RANKS: tl.constexpr, BLOCK_H: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    wait_for_predecessor(PDL)
    logit, chosen = _first_rank(pairs, b, b < B, B, RANKS)
    end_plain_row(
        logit, chosen, state, record, embed, following, b, H, state_stride, record_stride, BLOCK_H
    )


def pair_best(token_N: torch.Tensor, value_N: torch.Tensor, start: int) -> torch.Tensor:
    """As ``pair_best_ref``, in one launch."""
    num_rows = token_N.shape[0]
    pair_2N = torch.empty(2, num_rows, dtype=torch.float32, device=token_N.device)
    pdl = pdl_for(token_N.device)
    launch(
        pair_best_kernel, (cdiv(num_rows, _BLOCK_N),), token_N, value_N, pair_2N, start, num_rows,
        BLOCK=_BLOCK_N, PDL=pdl, launch_pdl=pdl, num_warps=2,
    )  # fmt: skip
    return pair_2N


def best_of_ranks(pairs_R2N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``best_of_ranks_ref``, in one launch."""
    num_ranks, _, num_rows = pairs_R2N.shape
    require(pairs_R2N.is_contiguous(), "best_of_ranks: pairs must be contiguous")
    token_N = torch.empty(num_rows, dtype=torch.int64, device=pairs_R2N.device)
    value_N = torch.empty(num_rows, dtype=torch.float32, device=pairs_R2N.device)
    pdl = pdl_for(pairs_R2N.device)
    launch(
        best_of_ranks_kernel, (cdiv(num_rows, _BLOCK_N),), pairs_R2N, token_N, value_N, num_rows,
        RANKS=num_ranks, BLOCK=_BLOCK_N, PDL=pdl, launch_pdl=pdl, num_warps=2,
    )  # fmt: skip
    return token_N, value_N


def finish_ranks(
    pairs_R2B: torch.Tensor,
    state_4B: torch.Tensor,
    record_B1: torch.Tensor,
    embed_VH: torch.Tensor,
    next_BH: torch.Tensor,
) -> None:
    """As ``finish_ranks_ref``, in one launch."""
    num_ranks, _, num_rows = pairs_R2B.shape
    hidden = next_BH.shape[1]
    require(
        pairs_R2B.is_contiguous() and next_BH.is_contiguous() and embed_VH.is_contiguous(),
        "finish_ranks: pairs, embeddings and rows must be contiguous",
    )
    require(
        state_4B.shape == (4, num_rows)
        and state_4B.stride(1) == 1
        and next_BH.shape[0] == num_rows
        and embed_VH.shape[1] == hidden,
        f"finish_ranks: state {list(state_4B.shape)}, rows {list(next_BH.shape)} and embeddings "
        f"{list(embed_VH.shape)} do not fit {num_rows} rows",
    )
    pdl = pdl_for(pairs_R2B.device)
    launch(
        finish_ranks_kernel, (num_rows,), pairs_R2B, state_4B, record_B1, embed_VH, next_BH,
        num_rows, hidden, state_4B.stride(0), record_B1.stride(0), RANKS=num_ranks,
        BLOCK_H=pow2(hidden), PDL=pdl, launch_pdl=pdl, num_warps=4,
    )  # fmt: skip
