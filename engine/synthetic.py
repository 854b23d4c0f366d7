"""Synthetic acceptance: how much a verify accepts is drawn, whatever the draft is worth.

Separates the time of a step from the quality of a draft. Rate d is the share of verifies that
accept at least d drafts (unconditional, as vLLM has it). The accepted nodes are first children.
Legend: B sequences, T nodes, D depths.
"""

import torch


def counts(uniform_B: torch.Tensor, rate_D: torch.Tensor) -> torch.Tensor:
    """How many drafts each sequence accepts: P(count >= d) = rate_d."""
    return (uniform_B[:, None] < rate_D).sum(-1)


def forced_targets(
    token_BT: torch.Tensor, parent_BT: torch.Tensor, depth_BT: torch.Tensor, count_B: torch.Tensor
) -> torch.Tensor:
    """Targets under which a greedy verify accepts ``count_b`` first children, and -1 elsewhere.

    A tree without so deep a line of first children accepts what it has.
    """
    num_tokens = token_BT.shape[1]
    none = num_tokens
    node_T = torch.arange(num_tokens, device=token_BT.device)
    first_BT = torch.full_like(parent_BT, none)
    children_BX = node_T[1:].expand(token_BT.shape[0], -1)
    first_BT.scatter_reduce_(1, parent_BT[:, 1:].clamp(min=0), children_BX, "amin")
    wanted_BT = (depth_BT < count_B[:, None]) & (first_BT < none)
    child_token_BT = token_BT.gather(1, first_BT.clamp(max=num_tokens - 1))
    return torch.where(wanted_BT, child_token_BT, -1)


def last_targets(
    path_BA: torch.Tensor, count_B: torch.Tensor, target_BT: torch.Tensor
) -> torch.Tensor:
    """The target's own token after each accepted path."""
    last_B1 = path_BA.gather(1, count_B[:, None]).clamp(min=0)
    return target_BT.gather(1, last_B1)[:, 0]
