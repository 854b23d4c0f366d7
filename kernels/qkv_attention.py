"""Everything between the QKV projection and the output projection, as one op.

P = B * T rows, B sequences of T new tokens, N query heads, G key heads, D head size, L positions in
the rotation tables, S slots, C rows a slot, J rows after the prefix (see ``attention``).
"""

import torch

from kernels.attention import check_attention, tree_attention_ref
from kernels.attention_kernel import NewTokens, launch_attention
from kernels.kv_cache import store_kv_ref
from kernels.launch import require
from kernels.rope import qk_norm_rope_ref

#: new tokens a sequence up to which one program can hold them; above, use the separate ops
MAX_NEW_TOKENS = 64


def qkv_attention_ref(
    qkv_PX: torch.Tensor,
    q_weight_D: torch.Tensor | None,
    k_weight_D: torch.Tensor | None,
    eps: float,
    position_P: torch.Tensor,
    cos_LD: torch.Tensor,
    sin_LD: torch.Tensor,
    k_cache_SCGD: torch.Tensor,
    v_cache_SCGD: torch.Tensor,
    slot_B: torch.Tensor,
    prefix_B: torch.Tensor,
    mask_BTJ: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Split, normalise and rotate, store the new keys and values, attend; returns ``o_PY``.

    ``qkv_PX`` holds N query, G key and G value heads a row (X = (N + 2G) D, Y = N D). The new
    rows go to prefix_b + J - T and on. T is at most 64.
    """
    num_rows, num_kv_heads, head_size = qkv_PX.shape[0], *k_cache_SCGD.shape[2:]
    num_heads = qkv_PX.shape[1] // head_size - 2 * num_kv_heads
    num_sequences = slot_B.shape[0]
    num_tokens = num_rows // num_sequences
    heads_PHD = qkv_PX.view(num_rows, num_heads + 2 * num_kv_heads, head_size)
    q_PND, k_PGD, v_PGD = heads_PHD.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    q_PND, k_PGD = qk_norm_rope_ref(
        q_PND, k_PGD, q_weight_D, k_weight_D, eps, position_P, cos_LD, sin_LD
    )
    num_own = num_tokens if mask_BTJ is None else mask_BTJ.shape[2]
    batch = (num_sequences, num_tokens)
    store_kv_ref(
        k_PGD.unflatten(0, batch),
        v_PGD.unflatten(0, batch),
        k_cache_SCGD,
        v_cache_SCGD,
        slot_B,
        prefix_B + (num_own - num_tokens),
    )
    o_BTND = tree_attention_ref(
        q_PND.unflatten(0, batch), k_cache_SCGD, v_cache_SCGD, slot_B, prefix_B, mask_BTJ, scale
    )
    return o_BTND.reshape(num_rows, num_heads * head_size)


def qkv_attention(
    qkv_PX: torch.Tensor,
    q_weight_D: torch.Tensor | None,
    k_weight_D: torch.Tensor | None,
    eps: float,
    position_P: torch.Tensor,
    cos_LD: torch.Tensor,
    sin_LD: torch.Tensor,
    k_cache_SCGD: torch.Tensor,
    v_cache_SCGD: torch.Tensor,
    slot_B: torch.Tensor,
    prefix_B: torch.Tensor,
    mask_BTJ: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """As ``qkv_attention_ref``, one kernel."""
    num_rows, num_kv_heads, head_size = qkv_PX.shape[0], *k_cache_SCGD.shape[2:]
    num_heads = qkv_PX.shape[1] // head_size - 2 * num_kv_heads
    num_sequences = slot_B.shape[0]
    num_tokens = num_rows // num_sequences
    require(
        qkv_PX.shape[1] == (num_heads + 2 * num_kv_heads) * head_size and num_heads > 0,
        f"qkv rows of {qkv_PX.shape[1]} do not hold {num_kv_heads} key heads of {head_size}",
    )
    require(
        num_tokens * num_sequences == num_rows,
        f"{num_rows} rows are not a multiple of {num_sequences} sequences",
    )
    require(
        num_tokens <= MAX_NEW_TOKENS,
        f"qkv_attention takes at most {MAX_NEW_TOKENS} new tokens a sequence, got {num_tokens}; "
        "use qk_norm_rope, store_kv and tree_attention",
    )
    require(
        (q_weight_D is None) == (k_weight_D is None),
        "qkv_attention: give both norm weights or neither",
    )
    require(
        cos_LD.is_contiguous() and sin_LD.is_contiguous() and qkv_PX.stride(1) == 1,
        "qkv_attention: the rotation tables and the rows of qkv must be contiguous",
    )
    require(
        position_P.shape == (num_rows,),
        f"qkv_attention: {list(position_P.shape)} positions for {num_rows} rows",
    )
    out_PY = qkv_PX.new_empty(num_rows, num_heads * head_size)
    check_attention(
        out_PY.view(num_sequences, num_tokens, num_heads, head_size), k_cache_SCGD, mask_BTJ
    )
    launch_attention(
        "qkv_attention", qkv_PX, k_cache_SCGD, v_cache_SCGD, slot_B, prefix_B, mask_BTJ, scale,
        num_tokens=num_tokens, num_heads=num_heads, out=out_PY,
        new=NewTokens(
            q_gain=q_weight_D, k_gain=k_weight_D, eps=eps, positions=position_P.contiguous(),
            cos=cos_LD, sin=sin_LD,
        ),
    )  # fmt: skip
    return out_PY
