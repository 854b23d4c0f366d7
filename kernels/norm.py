# ruff: noqa: N815 - fields are tensors with shape suffixes
"""RMSNorm, alone and with the residual addition before it.

T tokens, H hidden.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.device import add_rounded, wait_for_predecessor
from kernels.launch import launch, pdl_for, pow2, require

#: a row is held whole by one program
MAX_HIDDEN = 32768


class Normed(NamedTuple):
    """RMSNorm taken apart, as the kernel that made x leaves it for a product that follows.

    ``x * gain`` (T, H) and N parts of each row's sum of squares (N, T, fp32).
    """

    weighted_TH: torch.Tensor
    squares_NT: torch.Tensor


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


@triton.jit
def row_scale(squares, t, in_t, T, H, eps, PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr):
    """The norm's factor of rows ``t``, out of ``PARTS`` parts of their sums of squares."""
    n = tl.arange(0, BLOCK_PARTS)
    parts = tl.load(
        squares + n[None, :] * T + t[:, None],
        mask=in_t[:, None] & (n < PARTS)[None, :],
        other=0.0,
    )
    return tl.rsqrt(tl.sum(parts, axis=1) / H + eps)


@triton.jit
def rms_norm_kernel(
    x, residual, gain, y, total, H, x_stride, eps,
    HAS_RESIDUAL: tl.constexpr, BLOCK_H: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK_H)
    inside = h < H
    g = tl.load(gain + h, mask=inside, other=0.0).to(tl.float32)
    wait_for_predecessor(PDL)
    v = tl.load(x + t * x_stride + h, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        v = add_rounded(v, tl.load(residual + t * H + h, mask=inside, other=0.0))
        tl.store(total + t * H + h, v, mask=inside)
    wide = v.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / H + eps)
    tl.store(y + t * H + h, (wide * scale * g).to(y.dtype.element_ty), mask=inside)


def _run(
    x_TH: torch.Tensor, residual_TH: torch.Tensor | None, weight_H: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens, hidden = x_TH.shape
    require(hidden <= MAX_HIDDEN, f"rms_norm: at most {MAX_HIDDEN} columns, got {hidden}")
    require(x_TH.stride(1) == 1, "rms_norm: rows must be contiguous")
    require(residual_TH is None or residual_TH.is_contiguous(), "rms_norm: residual not contiguous")
    y_TH = x_TH.new_empty(num_tokens, hidden)
    total_TH = x_TH if residual_TH is None else torch.empty_like(residual_TH)
    pdl = pdl_for(x_TH.device)
    launch(
        rms_norm_kernel, (num_tokens,),
        x_TH, x_TH if residual_TH is None else residual_TH, weight_H, y_TH, total_TH,
        hidden, x_TH.stride(0), eps,
        HAS_RESIDUAL=residual_TH is not None, BLOCK_H=pow2(hidden, 16), PDL=pdl, launch_pdl=pdl,
        num_warps=4 if hidden <= 4096 else 8,
    )  # fmt: skip
    return y_TH, total_TH


def rms_norm(x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
    """As ``rms_norm_ref``."""
    return _run(x_TH, None, weight_H, eps)[0]


def add_rms_norm(
    x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``add_rms_norm_ref``."""
    return _run(x_TH, residual_TH, weight_H, eps)
