"""Query and key normalisation per head, then rotary position embedding.

T tokens, N query heads, G key heads, D head size, P positions in the tables. The layout is Hugging
Face's half rotation: element i is paired with element i + D/2, and both halves of a table row hold
the same angles.
"""

import torch
import triton
import triton.language as tl

from kernels.device import wait_for_predecessor
from kernels.launch import launch, pdl_for, pow2, require
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


@triton.jit
def qk_norm_rope_kernel(
    q, k, q_gain, k_gain, q_out, k_out, positions, cos, sin, eps,
    q_token_stride, q_head_stride, k_token_stride, k_head_stride,
    N: tl.constexpr, G: tl.constexpr, HALF: tl.constexpr, HAS_Q_NORM: tl.constexpr,
    HAS_K_NORM: tl.constexpr, BLOCK_HALF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK_HALF)
    inside = d < HALF
    wait_for_predecessor(PDL)
    table = tl.load(positions + t).to(tl.int64) * (2 * HALF) + d
    c = tl.load(cos + table, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + table, mask=inside, other=0.0).to(tl.float32)
    if head < N:
        row = q + t * q_token_stride + head * q_head_stride
        a = tl.load(row + d, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(row + HALF + d, mask=inside, other=0.0).to(tl.float32)
        if HAS_Q_NORM:
            scale = tl.rsqrt((tl.sum(a * a, axis=0) + tl.sum(b * b, axis=0)) / (2 * HALF) + eps)
            a *= scale * tl.load(q_gain + d, mask=inside, other=0.0).to(tl.float32)
            b *= scale * tl.load(q_gain + HALF + d, mask=inside, other=0.0).to(tl.float32)
        out = q_out + (t * N + head) * (2 * HALF) + d
        tl.store(out, (a * c - b * s).to(q_out.dtype.element_ty), mask=inside)
        tl.store(out + HALF, (b * c + a * s).to(q_out.dtype.element_ty), mask=inside)
    else:
        row = k + t * k_token_stride + (head - N) * k_head_stride
        a = tl.load(row + d, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(row + HALF + d, mask=inside, other=0.0).to(tl.float32)
        if HAS_K_NORM:
            scale = tl.rsqrt((tl.sum(a * a, axis=0) + tl.sum(b * b, axis=0)) / (2 * HALF) + eps)
            a *= scale * tl.load(k_gain + d, mask=inside, other=0.0).to(tl.float32)
            b *= scale * tl.load(k_gain + HALF + d, mask=inside, other=0.0).to(tl.float32)
        out = k_out + (t * G + head - N) * (2 * HALF) + d
        tl.store(out, (a * c - b * s).to(k_out.dtype.element_ty), mask=inside)
        tl.store(out + HALF, (b * c + a * s).to(k_out.dtype.element_ty), mask=inside)


def qk_norm_rope(
    q_TND: torch.Tensor,
    k_TGD: torch.Tensor,
    q_weight_D: torch.Tensor | None,
    k_weight_D: torch.Tensor | None,
    eps: float,
    position_T: torch.Tensor,
    cos_PD: torch.Tensor,
    sin_PD: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``qk_norm_rope_ref``."""
    num_tokens, num_heads, head_size = q_TND.shape
    num_kv_heads = k_TGD.shape[1]
    require(head_size % 2 == 0, f"qk_norm_rope: the head size must be even, got {head_size}")
    require(
        q_TND.stride(2) == 1
        and k_TGD.stride(2) == 1
        and cos_PD.is_contiguous()
        and sin_PD.is_contiguous(),
        "qk_norm_rope: heads and tables must be contiguous",
    )
    require(
        position_T.shape == (num_tokens,),
        f"qk_norm_rope: {list(position_T.shape)} positions for {num_tokens} tokens",
    )
    # one position for all tokens may come expanded
    position_T = position_T.contiguous()
    q_out = q_TND.new_empty(q_TND.shape)
    k_out = k_TGD.new_empty(k_TGD.shape)
    pdl = pdl_for(q_TND.device)
    launch(
        qk_norm_rope_kernel, (num_tokens, num_heads + num_kv_heads),
        q_TND, k_TGD, q_TND if q_weight_D is None else q_weight_D,
        k_TGD if k_weight_D is None else k_weight_D, q_out, k_out, position_T, cos_PD, sin_PD, eps,
        *q_TND.stride()[:2], *k_TGD.stride()[:2],
        N=num_heads, G=num_kv_heads, HALF=head_size // 2,
        HAS_Q_NORM=q_weight_D is not None, HAS_K_NORM=k_weight_D is not None,
        BLOCK_HALF=pow2(head_size // 2), PDL=pdl, launch_pdl=pdl, num_warps=1,
    )  # fmt: skip
    return q_out, k_out
