"""Drawing a token by the Gumbel-max trick: the largest of ``logit / temperature + noise``.

The noise of a token is a hash of the request's seed, the position it would follow and its id, so a
text is the same however it is decoded: plainly, or by verifying drafts, alone or in a batch. Ranks
that hold shares of the vocabulary compare their best as they do without noise. Hashing is the
32-bit finaliser with the constants of Chris Wellons' "Prospecting for Hash Functions" (lowbias32).
Legend: N rows, V vocabulary (or this rank's share of it).
"""

import torch
import triton
import triton.language as tl

from kernels.device import wait_for_predecessor
from kernels.head import argmax_blocks_kernel
from kernels.launch import cdiv, launch, pdl_for, pow2, require

_MASK, _WEYL, _FIRST, _SECOND = 0xFFFFFFFF, 0x9E3779B9, 0x7FEB352D, 0x846CA68B
#: tokens of one program
_BLOCK_V = 4096


def _mix_ref(x: torch.Tensor) -> torch.Tensor:
    x = x & _MASK
    x = ((x ^ (x >> 16)) * _FIRST) & _MASK
    x = ((x ^ (x >> 15)) * _SECOND) & _MASK
    return x ^ (x >> 16)


def gumbel_ref(
    seed_N: torch.Tensor, position_N: torch.Tensor, start: int, count: int
) -> torch.Tensor:
    """Noise (N, ``count``) fp32 of the tokens from ``start`` on."""
    key_N = _mix_ref(_mix_ref(seed_N ^ _mix_ref(seed_N >> 32)) ^ position_N)
    id_V = torch.arange(start, start + count, device=seed_N.device)
    hash_NV = _mix_ref(_mix_ref(id_V + _WEYL)[None] ^ key_N[:, None])
    # 23 bits and a half: neither 0 nor 1 in fp32
    uniform_NV = ((hash_NV >> 9).float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform_NV))


def draw_ref(
    logits_NV: torch.Tensor,
    temperature_N: torch.Tensor,
    seed_N: torch.Tensor,
    position_N: torch.Tensor,
    start: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(token_N int64, value_N fp32)``: the drawn place in this share, and what won it.

    ``position`` is that of the row's input token, ``start`` where the share begins in the whole
    vocabulary. Rows of temperature 0 take the first of the largest logits. Where a logit is NaN the
    value is no finite number.
    """
    wide_NV = logits_NV.float()
    noise_NV = gumbel_ref(seed_N, position_N, start, logits_NV.shape[1])
    hot_N1 = (temperature_N > 0)[:, None]
    divisor_N1 = torch.where(hot_N1, temperature_N[:, None], 1.0)
    value_N, token_N = torch.where(hot_N1, wide_NV / divisor_N1 + noise_NV, wide_NV).max(-1)
    return token_N, value_N


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def draw_kernel(
    logits, temperatures, seeds, positions, best_value, best_index, start, V, N, logits_stride,
    BLOCK_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    v = block * BLOCK_V + tl.arange(0, BLOCK_V)
    here = v < V
    wait_for_predecessor(PDL)
    logit = tl.load(logits + n * logits_stride + v, mask=here, other=float("-inf")).to(tl.float32)
    heat = tl.load(temperatures + n)
    seed = tl.load(seeds + n)
    position = tl.load(positions + n).to(tl.uint32)
    # a vector of one hash a row: scalars would be promoted to 64 bits
    low = tl.full([BLOCK_V], 0, tl.uint32) + seed.to(tl.uint32)
    high = tl.full([BLOCK_V], 0, tl.uint32) + (seed >> 32).to(tl.uint32)
    key = _mix(_mix(low ^ _mix(high)) ^ position)
    ids = (start + v).to(tl.uint32)
    bits = _mix(_mix(ids + 0x9E3779B9) ^ key)
    uniform = ((bits >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    noise = -tl.log(-tl.log(uniform))
    value = logit
    if heat > 0:
        value = logit / heat + noise
    # a NaN wins, as infinity, which is no finite number either
    value = tl.where(here, tl.where(value == value, value, float("inf")), float("-inf"))
    best = tl.max(value, axis=0)
    found = tl.min(tl.where((value == best) & here, v, 2147483647), axis=0)
    tl.store(best_value + block * N + n, best)
    tl.store(best_index + block * N + n, found)


def draw(
    logits_NV: torch.Tensor,
    temperature_N: torch.Tensor,
    seed_N: torch.Tensor,
    position_N: torch.Tensor,
    start: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``draw_ref``, in two launches."""
    num_rows, vocabulary = logits_NV.shape
    require(logits_NV.stride(1) == 1, "draw: rows must be contiguous")
    device = logits_NV.device
    num_blocks = cdiv(vocabulary, _BLOCK_V)
    value = torch.empty(num_blocks, num_rows, dtype=torch.float32, device=device)
    index = torch.empty(num_blocks, num_rows, dtype=torch.int32, device=device)
    pdl = pdl_for(device)
    launch(
        draw_kernel, (num_rows, num_blocks), logits_NV, temperature_N, seed_N, position_N, value,
        index, start, vocabulary, num_rows, logits_NV.stride(0), BLOCK_V=_BLOCK_V, PDL=pdl,
        launch_pdl=pdl, num_warps=8,
    )  # fmt: skip
    token_N = torch.empty(num_rows, dtype=torch.int64, device=device)
    value_N = torch.empty(num_rows, dtype=torch.float32, device=device)
    launch(
        argmax_blocks_kernel, (num_rows,), value, index, token_N, value_N, num_blocks, num_rows,
        BLOCK=min(8192, pow2(num_blocks)), PDL=pdl, launch_pdl=pdl, num_warps=1,
    )  # fmt: skip
    return token_N, value_N
