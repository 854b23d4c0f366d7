# ruff: noqa: N815 - fields are tensors with shape suffixes
"""Drafting a chain or a dynamic tree with an EAGLE-3 head.

Each step expands the ``topk`` best nodes of the last level (by cumulative log-probability) into
``topk`` children each; at the end the best ``draft_tokens - 1`` of all children made are kept. A
child never scores above its parent and comes after it, so a stable sort keeps every kept node's
ancestors. Nothing here waits for the device. Legend: B sequences, T nodes (root included), K topk,
C candidates made, M nodes forwarded, H hidden of the head, R draft vocabulary.
"""

from dataclasses import dataclass

import torch

from engine.config import SpeculationConfig
from engine.draft import DraftModel


@dataclass(frozen=True, slots=True)
class Tree:
    """A drafted tree per sequence; node 0 is the root, parents precede children."""

    token_BT: torch.Tensor
    #: -1 for the root
    parent_BT: torch.Tensor
    #: which child of its parent a node is, best first; 0 for the root
    rank_BT: torch.Tensor


@dataclass(slots=True)
class _Beam:
    """The nodes to expand next."""

    token_BK: torch.Tensor
    score_BK: torch.Tensor
    hidden_BKH: torch.Tensor
    #: among the candidates
    index_BK: torch.Tensor


def draft(
    model: DraftModel,
    speculation: SpeculationConfig,
    root_B: torch.Tensor,
    hidden_BH: torch.Tensor,
    logits_BR: torch.Tensor,
    slot_B: torch.Tensor,
    prefix_B: torch.Tensor,
) -> Tree:
    """Draft below ``root_B`` from the extend's last hidden states and logits.

    ``prefix_B``: rows of the head's cache that are settled.
    """
    if speculation.topk == 1:
        num_tokens = speculation.num_tokens
        token_BT = root_B.new_empty(len(root_B), num_tokens)
        first_B = logits_BR.argmax(-1)
        draft_chain(model, root_B, hidden_BH, first_B, slot_B, prefix_B, out_BT=token_BT)
        parent_T = torch.arange(-1, num_tokens - 1, device=token_BT.device)
        return Tree(token_BT, parent_T.repeat(len(root_B), 1), torch.zeros_like(token_BT))
    return _tree(model, speculation, root_B, hidden_BH, logits_BR, slot_B, prefix_B)


def draft_chain(
    model: DraftModel,
    root_B: torch.Tensor,
    hidden_BH: torch.Tensor,
    first_B: torch.Tensor,
    slot_B: torch.Tensor,
    prefix_B: torch.Tensor,
    *,
    out_BT: torch.Tensor,
) -> None:
    """Only the best child, step by step: no scores, no masks. Fills ``out`` from the root on.

    ``first_B`` is the best draft id of the extend.
    """
    target_id_R = model.weights.target_id_R
    tokens = [root_B, target_id_R[first_B]]
    for step in range(out_BT.shape[1] - 2):
        row_B = prefix_B + step if step else prefix_B
        hidden_BH = model.forward(tokens[-1][:, None], hidden_BH, row_B[:, None], slot_B, row_B)
        tokens.append(target_id_R[model.best(hidden_BH)])
    torch.stack(tokens, dim=1, out=out_BT)


def _tree(
    model: DraftModel,
    speculation: SpeculationConfig,
    root_B: torch.Tensor,
    hidden_BH: torch.Tensor,
    logits_BR: torch.Tensor,
    slot_B: torch.Tensor,
    prefix_B: torch.Tensor,
) -> Tree:
    steps, topk = speculation.steps, speculation.topk
    num_sequences, device = root_B.shape[0], root_B.device
    target_id_R = model.weights.target_id_R
    score_BK, id_BK = _log_probs(logits_BR).topk(topk, dim=-1)
    beam = _Beam(
        token_BK=target_id_R[id_BK],
        score_BK=score_BK,
        hidden_BKH=hidden_BH[:, None].expand(-1, topk, -1),
        index_BK=torch.arange(topk, device=device).expand(num_sequences, topk),
    )
    tokens, scores = [beam.token_BK], [beam.score_BK]
    parents = [torch.full_like(beam.index_BK, -1)]
    eye_BKK = torch.eye(topk, dtype=torch.bool, device=device).expand(num_sequences, -1, -1)
    mask_BMM = eye_BKK
    for step in range(steps - 1):
        position_BK = (prefix_B + step)[:, None].expand(-1, topk)
        hidden_NH = model.forward(
            beam.token_BK,
            beam.hidden_BKH.reshape(num_sequences * topk, -1),
            position_BK,
            slot_B,
            prefix_B,
            mask_BMM,
        )
        log_BKR = _log_probs(model.logits(hidden_NH)).view(num_sequences, topk, -1)
        top_BKK = log_BKR.topk(topk, dim=-1)
        score_BKK = beam.score_BK[:, :, None] + top_BKK.values
        token_BX = target_id_R[top_BKK.indices].view(num_sequences, -1)
        num_made = sum(s.shape[1] for s in scores)
        scores.append(score_BKK.view(num_sequences, -1))
        tokens.append(token_BX)
        parents.append(beam.index_BK.repeat_interleave(topk, dim=1))
        if step == steps - 2:
            break
        best = scores[-1].topk(topk, dim=-1)
        from_BK = best.indices // topk
        hidden_BKH = hidden_NH.view(num_sequences, topk, -1)
        beam = _Beam(
            token_BK=token_BX.gather(1, best.indices),
            score_BK=best.values,
            hidden_BKH=_rows(hidden_BKH, from_BK),
            index_BK=best.indices + num_made,
        )
        mask_BMM = _grown(mask_BMM, from_BK, eye_BKK)
    return _select(
        root_B, torch.cat(tokens, 1), torch.cat(scores, 1), torch.cat(parents, 1), speculation
    )


def _select(
    root_B: torch.Tensor,
    token_BC: torch.Tensor,
    score_BC: torch.Tensor,
    parent_BC: torch.Tensor,
    speculation: SpeculationConfig,
) -> Tree:
    """Keep the best candidates, in the order they were made, below the root."""
    kept = speculation.num_tokens - 1
    order_BC = score_BC.argsort(dim=-1, descending=True, stable=True)
    chosen_BX = order_BC[:, :kept].sort(dim=-1).values
    # node of a candidate: its place among the chosen, after the root
    node_BC = torch.full_like(parent_BC, -1)
    places = torch.arange(1, kept + 1, device=root_B.device)
    node_BC.scatter_(1, chosen_BX, places.expand_as(chosen_BX))
    parent_BX = parent_BC.gather(1, chosen_BX)
    node_of_parent_BX = node_BC.gather(1, parent_BX.clamp(min=0))
    parent_BX = torch.where(parent_BX < 0, 0, node_of_parent_BX)
    root_B1 = root_B[:, None]
    return Tree(
        torch.cat((root_B1, token_BC.gather(1, chosen_BX)), 1),
        torch.cat((torch.full_like(root_B1, -1), parent_BX), 1),
        torch.cat((torch.zeros_like(root_B1), chosen_BX % speculation.topk), 1),
    )


def _log_probs(logits: torch.Tensor) -> torch.Tensor:
    # rounding may leave a certain token above log 1, and a child above its parent
    return logits.log_softmax(-1).clamp_(max=0.0)


def _rows(x_BKH: torch.Tensor, index_BK: torch.Tensor) -> torch.Tensor:
    return x_BKH.gather(1, index_BK[:, :, None].expand(-1, -1, x_BKH.shape[-1]))


def _grown(mask_BMM: torch.Tensor, from_BK: torch.Tensor, eye_BKK: torch.Tensor) -> torch.Tensor:
    """Mask of all nodes after a new level whose nodes hang below ``from_BK`` of the last level."""
    topk = from_BK.shape[1]
    last_BKM = mask_BMM[:, -topk:]
    ancestors_BKM = last_BKM.gather(1, from_BK[:, :, None].expand(-1, -1, last_BKM.shape[-1]))
    above = torch.nn.functional.pad(mask_BMM, (0, topk))
    below = torch.cat((ancestors_BKM, eye_BKK), dim=-1)
    return torch.cat((above, below), dim=1)
