"""How a cycle ends: what each row of the batch emits, and what the next cycle starts from.

The state of the rows is ``state_4B``: slot, last token, rows settled in the cache, tokens still to
deliver. A row with nothing left to deliver stays as it is. Legend: B rows, T nodes of a row's tree,
A = T longest path, L longest accepted path with its root, X = 2 L values a row reports, Q draws
before they repeat, D depths, V vocabulary, H hidden.
"""

import torch
import triton
import triton.language as tl
from torch.nn.functional import embedding

from kernels.device import wait_for_predecessor
from kernels.head import first_best, norm_linear_argmax_ref
from kernels.launch import launch, pdl_for, pow2, require
from kernels.linear import run_linear

#: rows of the state matrix
SLOT, LAST, PREFIX, LEFT = range(4)
#: largest tree ``force`` takes: it compares every node with every other
MAX_FORCED_NODES = 128
_LAST, _PREFIX, _LEFT = tl.constexpr(LAST), tl.constexpr(PREFIX), tl.constexpr(LEFT)


def advance_ref(
    token_B: torch.Tensor, value_B: torch.Tensor, state_4B: torch.Tensor, record_B1: torch.Tensor
) -> None:
    """End a plain cycle in place: every row's token becomes its last one.

    The report is the token, or -1 where its logit ``value`` is no finite number.
    """
    _, last_B, prefix_B, left_B = state_4B
    record_B1[:, 0] = torch.where(value_B.isfinite(), token_B, -1)
    last_B.copy_(torch.where(left_B > 0, token_B, last_B))
    left_B -= (left_B > 0).long()
    prefix_B += (left_B > 0).long()


def finish_ref(
    x_BH: torch.Tensor,
    norm_weight_H: torch.Tensor,
    eps: float,
    weight_VH: torch.Tensor,
    state_4B: torch.Tensor,
    record_B1: torch.Tensor,
    embed_VH: torch.Tensor,
    next_BH: torch.Tensor,
) -> None:
    """The whole end of a plain cycle on one rank: head, ``advance``, and what the next one reads.

    ``next`` becomes the embeddings of the rows' last tokens; it may be ``x`` itself.
    """
    token_B, value_B = norm_linear_argmax_ref(x_BH, norm_weight_H, eps, weight_VH)
    advance_ref(token_B, value_B, state_4B, record_B1)
    next_BH.copy_(embedding(state_4B[LAST], embed_VH))


def settle_ref(
    token_BT: torch.Tensor,
    rank_BT: torch.Tensor,
    path_BA: torch.Tensor,
    count_B: torch.Tensor,
    next_B: torch.Tensor,
    target_BT: torch.Tensor,
    value_BT: torch.Tensor,
    state_4B: torch.Tensor,
    start_B: torch.Tensor,
    record_BX: torch.Tensor,
    draw_1: torch.Tensor | None,
    num_draws: int,
) -> None:
    """End a speculative cycle in place, after acceptance found path, count and next token.

    ``start`` becomes where the accepted rows begin. The report: count, next token (-1 where a logit
    ``value`` is no finite number), the accepted tokens, their ranks. With ``draw`` (synthetic
    acceptance) the next token is the target's at the end of the path, and the draw moves on.
    """
    _, last_B, prefix_B, left_B = state_4B
    longest = record_BX.shape[1] // 2
    if draw_1 is not None:
        end_B1 = path_BA.gather(1, count_B[:, None]).clamp(min=0)
        next_B.copy_(target_BT.gather(1, end_B1)[:, 0])
        draw_1.add_(1).remainder_(num_draws)
    nodes_BX = path_BA[:, 1:longest].clamp(min=0)
    sound_B = value_BT.isfinite().all(-1)
    record_BX[:, 0] = count_B
    record_BX[:, 1] = torch.where(sound_B, next_B, -1)
    record_BX[:, 2 : longest + 1] = token_BT.gather(1, nodes_BX)
    record_BX[:, longest + 1 :] = rank_BT.gather(1, nodes_BX)
    start_B.copy_(prefix_B)
    alive_B = left_B > 0
    last_B.copy_(torch.where(alive_B, next_B, last_B))
    left_B -= torch.where(alive_B, count_B + 1, 0)
    prefix_B += torch.where(left_B > 0, count_B + 1, 0)


def force_ref(
    token_BT: torch.Tensor,
    parent_BT: torch.Tensor,
    depth_BT: torch.Tensor,
    uniform_QB: torch.Tensor,
    draw_1: torch.Tensor,
    rate_D: torch.Tensor,
) -> torch.Tensor:
    """Targets under which a greedy verify accepts what is drawn, along first children.

    Row b accepts d drafts or more where its draw is below ``rate_D[d - 1]``. Nodes off that line
    get -1, which no token equals; a tree without so deep a line accepts what it has.
    """
    num_rows, num_tokens = token_BT.shape
    uniform_B = uniform_QB[draw_1, :num_rows][0]
    count_B = (uniform_B[:, None] < rate_D).sum(-1)
    node_T = torch.arange(num_tokens, device=token_BT.device)
    first_BT = torch.full_like(parent_BT, num_tokens)
    children_BX = node_T[1:].expand(num_rows, -1)
    first_BT.scatter_reduce_(1, parent_BT[:, 1:].clamp(min=0), children_BX, "amin")
    wanted_BT = (depth_BT < count_B[:, None]) & (first_BT < num_tokens)
    child_token_BT = token_BT.gather(1, first_BT.clamp(max=num_tokens - 1))
    return torch.where(wanted_BT, child_token_BT, -1)


@triton.jit
def end_plain_row(
    logit, chosen, state, record, embed, following, b, H, state_stride, record_stride,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Row ``b`` got the token ``chosen``, which won by ``logit``: report, state, next embedding."""
    # infinities and NaN less themselves are NaN
    sound = (logit - logit) == 0.0
    tl.store(record + b * record_stride, tl.where(sound, chosen, -1))
    last_at = state + _LAST * state_stride + b
    prefix_at = state + _PREFIX * state_stride + b
    left_at = state + _LEFT * state_stride + b
    left = tl.load(left_at)
    last = tl.load(last_at)
    prefix = tl.load(prefix_at)
    if left > 0:
        left -= 1
        last = chosen
        tl.store(last_at, last)
        tl.store(left_at, left)
        tl.store(prefix_at, prefix + (left > 0).to(tl.int64))
    h = tl.arange(0, BLOCK_H)
    row = tl.load(embed + last * H + h, mask=h < H, other=0.0)
    tl.store(following + b * H + h, row, mask=h < H)


@triton.jit
def finish_kernel(
    best_value, best_index, state, record, embed, following, num_blocks, B, H, state_stride,
    record_stride, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    wait_for_predecessor(PDL)
    logit, chosen = first_best(best_value, best_index, b, num_blocks, B, BLOCK)
    chosen = chosen.to(tl.int64)
    end_plain_row(
        logit, chosen, state, record, embed, following, b, H, state_stride, record_stride, BLOCK_H
    )


@triton.jit
def settle_kernel(
    token, rank, path, count, next_token, target, value, state, start, record, draw,
    T, L, state_stride, num_draws,
    FORCED: tl.constexpr, BLOCK_T: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK_T)
    wait_for_predecessor(PDL)
    row = b * T
    accepted = tl.load(count + b)
    following = tl.load(next_token + b)
    if FORCED:
        end = tl.maximum(tl.load(path + row + accepted), 0)
        following = tl.load(target + row + end)
        tl.store(next_token + b, following)
        if b == 0:
            tl.store(draw, (tl.load(draw) + 1) % num_draws)
    logit = tl.load(value + row + i, mask=i < T, other=0.0)
    unsound = tl.sum(((logit - logit) != 0.0).to(tl.int32), axis=0)
    report = record + b * 2 * L
    tl.store(report, accepted)
    tl.store(report + 1, tl.where(unsound == 0, following, -1))
    inner = (i > 0) & (i < L)
    node = tl.maximum(tl.load(path + row + i, mask=inner, other=0), 0)
    tl.store(report + 1 + i, tl.load(token + row + node, mask=inner, other=0), mask=inner)
    tl.store(report + L + i, tl.load(rank + row + node, mask=inner, other=0), mask=inner)
    last_at = state + _LAST * state_stride + b
    prefix_at = state + _PREFIX * state_stride + b
    left_at = state + _LEFT * state_stride + b
    prefix = tl.load(prefix_at)
    left = tl.load(left_at)
    tl.store(start + b, prefix)
    if left > 0:
        left -= accepted + 1
        tl.store(last_at, following)
        tl.store(left_at, left)
        if left > 0:
            tl.store(prefix_at, prefix + accepted + 1)


@triton.jit
def force_kernel(
    token, parent, depth, uniform, draw, rate, judged, T, D, uniform_stride,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    t = tl.arange(0, BLOCK_T)
    d = tl.arange(0, BLOCK_D)
    wait_for_predecessor(PDL)
    row = b * T
    drawn = tl.load(uniform + tl.load(draw) * uniform_stride + b)
    below = drawn < tl.load(rate + d, mask=d < D, other=0.0)
    wanted = tl.sum((below & (d < D)).to(tl.int32), axis=0)
    # the root's parent is nobody, and so is a padding node's
    above = tl.load(parent + row + t, mask=t < T, other=-1).to(tl.int32)
    above = tl.where(t == 0, -1, above)
    child = tl.where(above[None, :] == t[:, None], t[None, :], T)
    first = tl.min(child, axis=1)
    level = tl.load(depth + row + t, mask=t < T, other=T).to(tl.int32)
    on_line = (level < wanted) & (first < T)
    chosen = tl.load(token + row + tl.minimum(first, T - 1), mask=t < T, other=-1)
    tl.store(judged + row + t, tl.where(on_line, chosen, -1), mask=t < T)


def finish(
    x_BH: torch.Tensor,
    norm_weight_H: torch.Tensor,
    eps: float,
    weight_VH: torch.Tensor,
    state_4B: torch.Tensor,
    record_B1: torch.Tensor,
    embed_VH: torch.Tensor,
    next_BH: torch.Tensor,
) -> None:
    """As ``finish_ref``, in two launches; no logits reach memory."""
    num_rows, hidden = next_BH.shape
    require(
        state_4B.shape == (4, num_rows) and state_4B.stride(1) == 1,
        f"finish: state {list(state_4B.shape)} must hold 4 x {num_rows} values, rows contiguous",
    )
    require(
        next_BH.is_contiguous() and embed_VH.is_contiguous() and embed_VH.shape[1] == hidden,
        f"finish: embeddings {list(embed_VH.shape)} and rows {list(next_BH.shape)} do not fit",
    )
    _, _, value, index = run_linear(
        "lm_head", x_BH, weight_VH, gain_K=norm_weight_H, eps=eps, store=False, argmax=True
    )
    assert value is not None
    assert index is not None
    num_blocks, pdl = value.shape[0], pdl_for(x_BH.device)
    launch(
        finish_kernel, (num_rows,), value, index, state_4B, record_B1, embed_VH, next_BH,
        num_blocks, num_rows, hidden, state_4B.stride(0), record_B1.stride(0),
        BLOCK=min(8192, pow2(num_blocks)), BLOCK_H=pow2(hidden), PDL=pdl, launch_pdl=pdl,
        num_warps=16,
    )  # fmt: skip


def settle(
    token_BT: torch.Tensor,
    rank_BT: torch.Tensor,
    path_BA: torch.Tensor,
    count_B: torch.Tensor,
    next_B: torch.Tensor,
    target_BT: torch.Tensor,
    value_BT: torch.Tensor,
    state_4B: torch.Tensor,
    start_B: torch.Tensor,
    record_BX: torch.Tensor,
    draw_1: torch.Tensor | None,
    num_draws: int,
) -> None:
    """As ``settle_ref``, in one launch."""
    num_rows, num_tokens = token_BT.shape
    matrices = (token_BT, rank_BT, path_BA, target_BT, value_BT, record_BX)
    require(all(x.is_contiguous() for x in matrices), "settle: inputs must be contiguous")
    require(
        state_4B.shape == (4, num_rows) and state_4B.stride(1) == 1,
        f"settle: state {list(state_4B.shape)} must hold 4 x {num_rows} values, rows contiguous",
    )
    pdl = pdl_for(token_BT.device)
    launch(
        settle_kernel, (num_rows,), token_BT, rank_BT, path_BA, count_B, next_B, target_BT,
        value_BT, state_4B, start_B, record_BX, count_B if draw_1 is None else draw_1,
        num_tokens, record_BX.shape[1] // 2, state_4B.stride(0), num_draws,
        FORCED=draw_1 is not None, BLOCK_T=pow2(num_tokens), PDL=pdl, launch_pdl=pdl, num_warps=1,
    )  # fmt: skip


def force(
    token_BT: torch.Tensor,
    parent_BT: torch.Tensor,
    depth_BT: torch.Tensor,
    uniform_QB: torch.Tensor,
    draw_1: torch.Tensor,
    rate_D: torch.Tensor,
) -> torch.Tensor:
    """As ``force_ref``, in one launch."""
    num_rows, num_tokens = token_BT.shape
    require(
        num_tokens <= MAX_FORCED_NODES,
        f"force: at most {MAX_FORCED_NODES} nodes a tree, got {num_tokens}",
    )
    require(
        token_BT.is_contiguous() and parent_BT.is_contiguous() and depth_BT.is_contiguous(),
        "force: inputs must be contiguous",
    )
    judged_BT = torch.empty_like(token_BT)
    pdl = pdl_for(token_BT.device)
    launch(
        force_kernel, (num_rows,), token_BT, parent_BT, depth_BT, uniform_QB, draw_1, rate_D,
        judged_BT, num_tokens, rate_D.shape[0], uniform_QB.stride(0), BLOCK_T=pow2(num_tokens),
        BLOCK_D=pow2(rate_D.shape[0]), PDL=pdl, launch_pdl=pdl, num_warps=4,
    )  # fmt: skip
    return judged_BT
