"""Tree attention mask and depths from parent pointers.

B sequences, T nodes each.
"""

import torch
import triton
import triton.language as tl

from kernels.device import wait_for_predecessor
from kernels.launch import cdiv, launch, pdl_for, require

#: largest tree the kernel takes
MAX_NODES = 1024


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


@triton.jit
def tree_mask_kernel(
    parents, mask, depth, T: tl.constexpr, BLOCK_T: tl.constexpr, PDL: tl.constexpr
):
    b = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1)
    t = row * BLOCK_T + tl.arange(0, BLOCK_T)
    in_t = t < T
    wait_for_predecessor(PDL)
    # every query climbs to its root; zeros first, then a one at each node on the way
    for j in range(0, T):
        tl.store(mask + (b * T + t) * T + j, (t == j).to(tl.int8), mask=in_t)
    node = t
    steps = tl.zeros([BLOCK_T], dtype=tl.int64)
    alive = in_t
    for _ in range(0, T):
        parent = tl.load(parents + b * T + node, mask=alive, other=-1).to(tl.int32)
        alive = alive & (parent >= 0) & (parent < node)
        tl.store(mask + (b * T + t) * T + parent, tl.full([BLOCK_T], 1, tl.int8), mask=alive)
        node = tl.where(alive, parent, node)
        steps += alive.to(tl.int64)
    tl.store(depth + b * T + t, steps, mask=in_t)


def tree_mask(parent_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``tree_mask_ref``."""
    num_sequences, num_nodes = parent_BT.shape
    require(num_nodes <= MAX_NODES, f"tree_mask: at most {MAX_NODES} nodes a tree, got {num_nodes}")
    require(parent_BT.is_contiguous(), "tree_mask: parents must be contiguous")
    device = parent_BT.device
    mask_BTT = torch.empty(num_sequences, num_nodes, num_nodes, dtype=torch.bool, device=device)
    depth_BT = torch.empty(num_sequences, num_nodes, dtype=torch.int64, device=device)
    # one warp: each query's bytes are written by one thread, in order
    block_t = 32
    pdl = pdl_for(device)
    launch(
        tree_mask_kernel, (num_sequences, cdiv(num_nodes, block_t)), parent_BT,
        mask_BTT.view(torch.int8), depth_BT, T=num_nodes, BLOCK_T=block_t,
        PDL=pdl, launch_pdl=pdl, num_warps=1,
    )  # fmt: skip
    return mask_BTT, depth_BT
