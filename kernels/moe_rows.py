"""Which rows an expert's program works on, without sorting for few tokens.

T tokens, K experts per token, P = T * K (token, expert) pairs, E experts. A *slot* is what a
program is given: with SLOT_PAIR pair number ``slot`` (its expert, if no earlier pair has it), with
SLOT_EXPERT expert number ``slot``, with SLOT_TILE a run of at most BLOCK_T pairs out of a sorted
list made by ``sorted_tiles``.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.launch import cdiv, pow2

#: pairs up to which every program finds its rows by itself
MAX_PAIRS_UNSORTED = 512

SLOT_PAIR = tl.constexpr(0)
SLOT_EXPERT = tl.constexpr(1)
SLOT_TILE = tl.constexpr(2)


@triton.jit
def expert_of_slot(experts, tile_expert, slot, P, SLOT: tl.constexpr, BLOCK_P: tl.constexpr):
    """The slot's expert, or a negative number where the slot has nothing to do."""
    e = slot
    if SLOT == SLOT_TILE:
        e = tl.load(tile_expert + slot)
    if SLOT == SLOT_PAIR:
        e = tl.load(experts + slot).to(tl.int32)
        p = tl.arange(0, BLOCK_P)
        ids = tl.load(experts + p, mask=p < P, other=-1).to(tl.int32)
        earlier = tl.sum(((ids == e) & (p < slot)).to(tl.int32), axis=0)
        e = tl.where(earlier > 0, -1, e)
    return e


@triton.jit
def num_rows_of_slot(
    experts, tile_count, slot, e, P, SLOT: tl.constexpr, BLOCK_P: tl.constexpr
):  # fmt: skip
    """How many pairs the slot has."""
    if SLOT == SLOT_TILE:
        count = tl.load(tile_count + slot)
    else:
        p = tl.arange(0, BLOCK_P)
        ids = tl.load(experts + p, mask=p < P, other=-1).to(tl.int32)
        count = tl.sum((ids == e).to(tl.int32), axis=0)
    return count


@triton.jit
def pairs_of_slot(
    experts, order, tile_first, slot, e, m, count, P, SLOT: tl.constexpr, BLOCK_P: tl.constexpr
):  # fmt: skip
    """Pair numbers of the slot's rows ``m`` (only those below ``count`` mean anything)."""
    if SLOT == SLOT_TILE:
        pairs = tl.load(order + tl.load(tile_first + slot) + m, mask=m < count, other=0)
    else:
        p = tl.arange(0, BLOCK_P)
        ids = tl.load(experts + p, mask=p < P, other=-1).to(tl.int32)
        match = (ids == e).to(tl.int32)
        rank = tl.cumsum(match, axis=0) - match
        here = (match[None, :] > 0) & (rank[None, :] == m[:, None])
        pairs = tl.sum(tl.where(here, p[None, :], 0), axis=1)
    return pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """The slots of one MoE layer call; tensors are placeholders unless the kind is SLOT_TILE."""

    kind: int
    count: int
    block_p: int
    order: torch.Tensor
    tile_expert: torch.Tensor
    tile_first: torch.Tensor
    tile_count: torch.Tensor


def make_slots(expert_TK: torch.Tensor, num_experts: int, block_t: int) -> Slots:
    """The cheapest kind of slots for this number of pairs; never looks at the values."""
    num_pairs = expert_TK.numel()
    if num_pairs <= MAX_PAIRS_UNSORTED:
        by_pair = num_pairs < num_experts
        return Slots(
            kind=SLOT_PAIR.value if by_pair else SLOT_EXPERT.value,
            count=num_pairs if by_pair else num_experts,
            block_p=pow2(num_pairs),
            order=expert_TK,
            tile_expert=expert_TK,
            tile_first=expert_TK,
            tile_count=expert_TK,
        )
    return sorted_tiles(expert_TK, num_experts, block_t)


def sorted_tiles(expert_TK: torch.Tensor, num_experts: int, block_t: int) -> Slots:
    """Pairs sorted by expert and cut into runs of at most ``block_t`` of one expert.

    Torch operations of static size, so it can be captured. Tiles left over have expert -1.
    """
    expert_P = expert_TK.flatten()
    device = expert_P.device
    num_pairs = expert_P.numel()
    num_tiles = min(num_pairs, cdiv(num_pairs, block_t) + num_experts)
    order_P = torch.argsort(expert_P, stable=True).to(torch.int32)
    count_E = torch.zeros(num_experts, dtype=torch.int64, device=device)
    count_E.scatter_add_(0, expert_P, torch.ones_like(expert_P))
    first_E = count_E.cumsum(0) - count_E
    tiles_E = (count_E + block_t - 1) // block_t
    end_E = tiles_E.cumsum(0)
    tile_S = torch.arange(num_tiles, device=device)
    owner_S = torch.searchsorted(end_E, tile_S, right=True)
    used_S = owner_S < num_experts
    owner_S = owner_S.clamp(max=num_experts - 1)
    nth_S = (tile_S - (end_E - tiles_E)[owner_S]) * block_t
    return Slots(
        kind=SLOT_TILE.value,
        count=num_tiles,
        block_p=16,
        order=order_P,
        tile_expert=torch.where(used_S, owner_S, -1).to(torch.int32),
        tile_first=(first_E[owner_S] + nth_S).to(torch.int32),
        tile_count=(count_E[owner_S] - nth_S).clamp(0, block_t).to(torch.int32),
    )
