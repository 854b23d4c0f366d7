"""Attention of a few new tokens (a chain or a tree) over a slotted key/value cache.

B sequences, T new tokens each, J rows a sequence has after its prefix (J >= T; the last T belong to
the new tokens, earlier ones to tree nodes drafted before them), N query heads, G key heads (N a
multiple of G), D head size, S slots, C rows a slot, L rows seen.
"""

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from kernels.attention_kernel import launch_attention
from kernels.launch import require


def check_attention(
    q_BTND: torch.Tensor, k_cache_SCGD: torch.Tensor, mask_BTJ: torch.Tensor | None
) -> None:
    """Raise ``ValueError`` where the shapes do not belong together."""
    num_sequences, num_tokens, num_heads, head_size = q_BTND.shape
    num_kv_heads = k_cache_SCGD.shape[2]
    require(
        num_heads % num_kv_heads == 0,
        f"{num_heads} query heads are not a multiple of {num_kv_heads} key heads",
    )
    require(
        k_cache_SCGD.shape[3] == head_size,
        f"queries have head size {head_size}, the cache {k_cache_SCGD.shape[3]}",
    )
    if mask_BTJ is not None:
        require(
            mask_BTJ.shape[:2] == (num_sequences, num_tokens) and mask_BTJ.shape[2] >= num_tokens,
            f"the mask of {num_sequences} sequences of {num_tokens} tokens must be "
            f"[{num_sequences}, {num_tokens}, >= {num_tokens}], got {list(mask_BTJ.shape)}",
        )


def tree_attention_ref(
    q_BTND: torch.Tensor,
    k_cache_SCGD: torch.Tensor,
    v_cache_SCGD: torch.Tensor,
    slot_B: torch.Tensor,
    prefix_B: torch.Tensor,
    mask_BTJ: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Query t of sequence b sees rows [0, prefix_b) and row prefix_b + j where ``mask_btj``.

    ``mask_BTJ`` None means causal (J = T, j <= t). The new tokens' own keys and values are already
    in the cache, at rows prefix_b + J - T and on. A query that sees nothing gets zeros. Computed in
    fp32. Rows beyond prefix_b + J are never read, whatever they hold.
    """
    check_attention(q_BTND, k_cache_SCGD, mask_BTJ)
    num_sequences, num_tokens = q_BTND.shape[:2]
    num_own = num_tokens if mask_BTJ is None else mask_BTJ.shape[2]
    if num_sequences == 1:
        prefix, slot = int(prefix_B), int(slot_B)
        stop = prefix + num_own
        k_BLGD = k_cache_SCGD[slot, :stop][None]
        v_BLGD = v_cache_SCGD[slot, :stop][None]
        visible_BTL = _visible_one(num_tokens, prefix, mask_BTJ, q_BTND.device)
    else:
        stop = int(prefix_B.max()) + num_own
        k_BLGD = k_cache_SCGD[slot_B, :stop]
        v_BLGD = v_cache_SCGD[slot_B, :stop]
        visible_BTL = _visible(num_tokens, num_own, stop, prefix_B, mask_BTJ)
        # rows past a shorter sequence's end may never have been written: 0 times NaN is NaN
        k_BLGD, v_BLGD = k_BLGD.nan_to_num(0.0, 0.0, 0.0), v_BLGD.nan_to_num(0.0, 0.0, 0.0)
    o_BNTD = scaled_dot_product_attention(
        q_BTND.transpose(1, 2).float(),
        k_BLGD.transpose(1, 2).float(),
        v_BLGD.transpose(1, 2).float(),
        attn_mask=None if visible_BTL is None else visible_BTL[:, None],
        scale=scale,
        enable_gqa=q_BTND.shape[2] != k_cache_SCGD.shape[2],
    )
    return o_BNTD.transpose(1, 2).to(q_BTND.dtype)


def _visible_one(
    num_tokens: int, prefix: int, mask_BTJ: torch.Tensor | None, device: torch.device
) -> torch.Tensor | None:
    if mask_BTJ is None:
        if num_tokens == 1:
            return None
        ones_TL = torch.ones(num_tokens, prefix + num_tokens, dtype=torch.bool, device=device)
        return ones_TL.tril_(prefix)[None]
    return pad(mask_BTJ, (prefix, 0), value=True)


def _visible(
    num_tokens: int,
    num_own: int,
    stop: int,
    prefix_B: torch.Tensor,
    mask_BTJ: torch.Tensor | None,
) -> torch.Tensor:
    row_L = torch.arange(stop, device=prefix_B.device)
    own_BL = row_L - prefix_B[:, None]
    if mask_BTJ is None:
        return own_BL[:, None] <= row_L[:num_tokens, None]
    visible_BTL = torch.gather(
        pad(mask_BTJ, (0, 1), value=False),
        2,
        own_BL.clamp(0, num_own)[:, None].expand(-1, num_tokens, -1),
    )
    return visible_BTL | (own_BL < 0)[:, None]


def tree_attention(
    q_BTND: torch.Tensor,
    k_cache_SCGD: torch.Tensor,
    v_cache_SCGD: torch.Tensor,
    slot_B: torch.Tensor,
    prefix_B: torch.Tensor,
    mask_BTJ: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """As ``tree_attention_ref``, one kernel: rows split over programs, the last one combines."""
    check_attention(q_BTND, k_cache_SCGD, mask_BTJ)
    num_sequences, num_tokens, num_heads, head_size = q_BTND.shape
    require(q_BTND.is_contiguous(), "tree_attention: q must be contiguous")
    out_BTND = torch.empty_like(q_BTND)
    launch_attention(
        "tree_attention",
        q_BTND.view(num_sequences * num_tokens, num_heads * head_size),
        k_cache_SCGD,
        v_cache_SCGD,
        slot_B,
        prefix_B,
        mask_BTJ,
        scale,
        num_tokens=num_tokens,
        num_heads=num_heads,
        out=out_BTND,
        new=None,
    )
    return out_BTND
