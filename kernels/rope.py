"""Query and key normalisation per head, then rotary position embedding.

T tokens, N query heads, G key heads, D head size, P positions in the tables. The layout is Hugging
Face's half rotation: element i is paired with element i + D/2, and both halves of a table row hold
the same angles.
"""

import torch

from kernels.norm import rms_norm_ref


def _rotate(x_THD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
    half = x_THD.shape[-1] // 2
    turned = torch.cat((-x_THD[..., half:], x_THD[..., :half]), dim=-1)
    return x_THD * cos_TD[:, None] + turned * sin_TD[:, None]


def qk_norm_rope_ref(
    q_TND: torch.Tensor,
    k_TGD: torch.Tensor,
    q_weight_D: torch.Tensor | None,
    k_weight_D: torch.Tensor | None,
    eps: float,
    position_T: torch.Tensor,
    cos_PD: torch.Tensor,
    sin_PD: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise each head (weights may be None: no normalisation), then rotate by its position."""
    if q_weight_D is not None:
        q_TND = rms_norm_ref(q_TND, q_weight_D, eps)
    if k_weight_D is not None:
        k_TGD = rms_norm_ref(k_TGD, k_weight_D, eps)
    cos_TD = cos_PD[position_T].to(q_TND.dtype)
    sin_TD = sin_PD[position_T].to(q_TND.dtype)
    num_q_heads = q_TND.shape[1]
    both = _rotate(torch.cat((q_TND, k_TGD), dim=1), cos_TD, sin_TD)
    return both[:, :num_q_heads], both[:, num_q_heads:]
