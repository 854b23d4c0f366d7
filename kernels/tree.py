"""Tree attention mask and depths from parent pointers.

B sequences, T nodes each.
"""

import torch


def tree_mask_ref(parent_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``(mask_BTT bool, depth_BT int64)``: node t sees itself and its ancestors.

    Parents precede children; -1 marks a root (node 0; padding nodes may be roots of their own).
    """
    num_sequences, num_nodes = parent_BT.shape
    mask_BTT = torch.eye(num_nodes, dtype=torch.bool, device=parent_BT.device)
    mask_BTT = mask_BTT.repeat(num_sequences, 1, 1)
    batch_B = torch.arange(num_sequences, device=parent_BT.device)
    parents = parent_BT.long()
    for t in range(1, num_nodes):
        parent_B = parents[:, t]
        ancestors_BT = mask_BTT[batch_B, parent_B.clamp(min=0)]
        mask_BTT[:, t] |= ancestors_BT & (parent_B >= 0)[:, None]
    return mask_BTT, mask_BTT.sum(-1) - 1
