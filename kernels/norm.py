"""RMSNorm, alone and with the residual addition before it.

T tokens, H hidden.
"""

import torch


def rms_norm_ref(x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale each row to unit root mean square, then by ``weight_H``.

    Rounds where Hugging Face does: the normalised row to x's type, then the product.
    """
    if x_TH.dtype == torch.float32:
        return torch.nn.functional.rms_norm(x_TH, (x_TH.shape[-1],), weight_H, eps)
    wide = x_TH.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight_H * (wide * scale).to(x_TH.dtype)


def add_rms_norm_ref(
    x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(rms_norm(x + residual), x + residual)``."""
    total_TH = x_TH + residual_TH
    return rms_norm_ref(total_TH, weight_H, eps), total_TH
