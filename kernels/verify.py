"""Which path of a drafted tree the target accepts, and the token that follows it.

B sequences, T nodes each (node 0, the root, holds the last token already emitted), A = T longest
path, V vocabulary.
"""

import torch


def verify_greedy_ref(
    token_BT: torch.Tensor,
    parent_BT: torch.Tensor,
    target_BT: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(path_BA, num_accepted_B, next_token_B)``, all int64; written to ``out`` where given.

    From the root, step to the child whose token is ``target`` (the target's argmax) of the current
    node, as long as there is one. ``path_BA`` holds the visited nodes, root first, -1 padded;
    ``num_accepted_B`` counts them without the root; ``next_token_B`` is the last one's target.
    """
    num_sequences, num_nodes = token_BT.shape
    path_BA = torch.full((num_sequences, num_nodes), -1, dtype=torch.int64)
    num_accepted, next_token = [], []
    tokens, parents, targets = token_BT.tolist(), parent_BT.tolist(), target_BT.tolist()
    for b in range(num_sequences):
        path = [0]
        for node in range(1, num_nodes):
            # parents precede children, so one pass in order finds the whole path
            if parents[b][node] == path[-1] and tokens[b][node] == targets[b][path[-1]]:
                path.append(node)
        path_BA[b, : len(path)] = torch.tensor(path)
        num_accepted.append(len(path) - 1)
        next_token.append(targets[b][path[-1]])
    device = token_BT.device
    found = (
        path_BA.to(device),
        torch.tensor(num_accepted, device=device),
        torch.tensor(next_token, device=device),
    )
    if out is None:
        return found
    for goal, values in zip(out, found, strict=True):
        goal.copy_(values)
    return out


def verify_sampling_ref(
    token_BT: torch.Tensor,
    parent_BT: torch.Tensor,
    draft_prob_BTV: torch.Tensor | None,
    target_prob_BTV: torch.Tensor,
    uniform_BT: torch.Tensor,
    uniform_B: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Lossless recursive rejection sampling; returns as ``verify_greedy_ref``.

    ``target_prob_btv`` and ``draft_prob_btv`` are the distributions of the token after node t. At
    a node with target p and draft q its children are tried in node order: child x is accepted when
    ``uniform_BT`` of the child < p(x)/q(x); after a rejection p becomes max(p - q, 0) normalised,
    and q loses x and is normalised (children were drawn without replacement). ``draft_prob_BTV``
    None means the children were chosen, not drawn (top-k trees): q is then all on the child, so x
    is accepted with p(x) and p loses x when it is not. Where no child is accepted, the next token
    is drawn from what is left of p by inverse transform of ``uniform_B``.
    """
    num_sequences, num_nodes = token_BT.shape
    path_BA = torch.full((num_sequences, num_nodes), -1, dtype=torch.int64)
    num_accepted, next_token = [], []
    tokens, parents = token_BT.tolist(), parent_BT.tolist()
    uniforms = uniform_BT.tolist()
    for b in range(num_sequences):
        path = [0]
        p_V = target_prob_BTV[b, 0].float().clone()
        q_V = None if draft_prob_BTV is None else draft_prob_BTV[b, 0].float().clone()
        for node in range(1, num_nodes):
            if parents[b][node] != path[-1]:
                continue
            token = tokens[b][node]
            q = 1.0 if q_V is None else float(q_V[token])
            # written so that q = 0 (a token that could not have been drawn) needs p > 0
            if uniforms[b][node] * q < float(p_V[token]):
                path.append(node)
                p_V = target_prob_BTV[b, node].float().clone()
                q_V = None if draft_prob_BTV is None else draft_prob_BTV[b, node].float().clone()
                continue
            if q_V is None:
                p_V[token] = 0.0
            else:
                p_V = (p_V - q_V).clamp_(min=0.0)
                q_V[token] = 0.0
                q_V = q_V / q_V.sum().clamp_(min=1e-30)
            p_V = p_V / p_V.sum().clamp_(min=1e-30)
        path_BA[b, : len(path)] = torch.tensor(path)
        num_accepted.append(len(path) - 1)
        next_token.append(int(inverse_transform_ref(p_V[None], uniform_B[b : b + 1])))
    device = token_BT.device
    return (
        path_BA.to(device),
        torch.tensor(num_accepted, device=device),
        torch.tensor(next_token, device=device),
    )


def inverse_transform_ref(prob_TV: torch.Tensor, uniform_T: torch.Tensor) -> torch.Tensor:
    """The first token whose cumulative probability exceeds uniform * total; int64.

    Never a token of probability 0: rounding at the top end falls back to the last possible token.
    """
    cumulative_TV = prob_TV.double().cumsum(-1)
    threshold_T = uniform_T.double() * cumulative_TV[:, -1]
    found_T = (cumulative_TV <= threshold_T[:, None]).sum(-1)
    positions_V = torch.arange(prob_TV.shape[1], device=prob_TV.device)
    last_T = torch.where(prob_TV > 0, positions_V, 0).amax(-1)
    return torch.minimum(found_T, last_T)
