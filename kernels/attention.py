"""Attention of a few new tokens (a chain or a tree) over a slotted key/value cache.

B sequences, T new tokens each, N query heads, G key heads (N a multiple of G), D head size,
S slots, C rows a slot.
"""

import torch
from torch.nn.functional import pad, scaled_dot_product_attention


def tree_attention_ref(
    q_BTND: torch.Tensor,
    k_cache_SCGD: torch.Tensor,
    v_cache_SCGD: torch.Tensor,
    slot_B: torch.Tensor,
    prefix_B: torch.Tensor,
    mask_BTT: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Query t of sequence b sees rows [0, prefix_b) and row prefix_b + j where ``mask_btj``.

    ``mask_BTT`` None means causal (j <= t). The T tokens' own keys and values are already in the
    cache. A query that sees nothing gets zeros. Computed in fp32.
    """
    num_sequences, num_tokens = q_BTND.shape[:2]
    if num_sequences == 1:
        prefix, slot = int(prefix_B), int(slot_B)
        stop = prefix + num_tokens
        k_BLGD = k_cache_SCGD[slot, :stop][None]
        v_BLGD = v_cache_SCGD[slot, :stop][None]
        visible_BTL = _visible_one(num_tokens, prefix, mask_BTT)
    else:
        stop = int(prefix_B.max()) + num_tokens
        k_BLGD = k_cache_SCGD[slot_B, :stop]
        v_BLGD = v_cache_SCGD[slot_B, :stop]
        visible_BTL = _visible(num_tokens, stop, prefix_B, mask_BTT)
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
    num_tokens: int, prefix: int, mask_BTT: torch.Tensor | None
) -> torch.Tensor | None:
    if mask_BTT is None:
        if num_tokens == 1:
            return None
        return torch.ones(num_tokens, prefix + num_tokens, dtype=torch.bool).tril_(prefix)[None]
    return pad(mask_BTT, (prefix, 0), value=True)


def _visible(
    num_tokens: int, stop: int, prefix_B: torch.Tensor, mask_BTT: torch.Tensor | None
) -> torch.Tensor:
    row_L = torch.arange(stop, device=prefix_B.device)
    node_BL = row_L - prefix_B[:, None]
    if mask_BTT is None:
        return node_BL[:, None] <= row_L[:num_tokens, None]
    own_BTL = torch.gather(
        pad(mask_BTT, (0, 1), value=False),
        2,
        node_BL.clamp(0, num_tokens)[:, None].expand(-1, num_tokens, -1),
    )
    return own_BTL | (node_BL < 0)[:, None]
