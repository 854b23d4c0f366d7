"""Writing new keys and values into a slotted cache, and closing the gaps a rejected tree leaves.

B sequences, T new tokens each, S slots, C rows a slot, G key heads, D head size, X caches (one for
the keys and one for the values of every layer), A longest accepted path.
"""

import torch
import triton
import triton.language as tl

from kernels.device import wait_for_predecessor
from kernels.launch import cdiv, launch, pdl_for, pow2, require


def store_kv_ref(
    k_BTGD: torch.Tensor,
    v_BTGD: torch.Tensor,
    k_cache_SCGD: torch.Tensor,
    v_cache_SCGD: torch.Tensor,
    slot_B: torch.Tensor,
    start_B: torch.Tensor,
) -> None:
    """Write token t of sequence b to row ``start_b + t`` of slot ``slot_b``."""
    num_tokens = k_BTGD.shape[1]
    if slot_B.shape[0] == 1:
        slot, start = int(slot_B), int(start_B)
        k_cache_SCGD[slot, start : start + num_tokens] = k_BTGD[0]
        v_cache_SCGD[slot, start : start + num_tokens] = v_BTGD[0]
        return
    row_BT = start_B[:, None] + torch.arange(num_tokens, device=start_B.device)
    k_cache_SCGD[slot_B[:, None], row_BT] = k_BTGD
    v_cache_SCGD[slot_B[:, None], row_BT] = v_BTGD


def kv_compact_ref(
    cache_XSCGD: torch.Tensor,
    slot_B: torch.Tensor,
    start_B: torch.Tensor,
    src_BA: torch.Tensor,
    count_B: torch.Tensor,
) -> None:
    """Move row ``start_b + src_bi`` of slot ``slot_b`` to ``start_b + i`` for i < ``count_b``.

    ``src_b`` ascends and ``src_bi >= i`` (node indices of an accepted path); entries past
    ``count_b`` are ignored. Applies to each of the X caches.
    """
    slots, starts, counts = slot_B.tolist(), start_B.tolist(), count_B.tolist()
    for b, (slot, start, count) in enumerate(zip(slots, starts, counts, strict=True)):
        src_A = src_BA[b, :count]
        rows = cache_XSCGD[:, slot]
        rows[:, start : start + count] = rows[:, start + src_A]


@triton.jit
def store_kv_kernel(
    k, v, k_cache, v_cache, slots, starts, T, width,
    k_token_stride, v_token_stride, k_slot_stride, k_row_stride, v_slot_stride, v_row_stride,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b = token // T
    wait_for_predecessor(PDL)
    slot = tl.load(slots + b).to(tl.int64)
    row = tl.load(starts + b).to(tl.int64) + token % T
    inside = i < width
    k_new = tl.load(k + token * k_token_stride + i, mask=inside)
    v_new = tl.load(v + token * v_token_stride + i, mask=inside)
    tl.store(k_cache + slot * k_slot_stride + row * k_row_stride + i, k_new, mask=inside)
    tl.store(v_cache + slot * v_slot_stride + row * v_row_stride + i, v_new, mask=inside)


@triton.jit
def kv_compact_kernel(
    cache, slots, starts, sources, counts, A, width, cache_stride, slot_stride, row_stride,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2)
    inside = i < width
    wait_for_predecessor(PDL)
    count = tl.load(counts + b)
    start = tl.load(starts + b).to(tl.int64)
    rows = cache + x * cache_stride + tl.load(slots + b).to(tl.int64) * slot_stride
    # one program walks the path in order: a row it overwrites may have been an earlier source, and
    # no other program touches these columns
    for a in range(0, count):
        source = tl.load(sources + b * A + a).to(tl.int64)
        if source != a:
            value = tl.load(rows + (start + source) * row_stride + i, mask=inside)
            tl.store(rows + (start + a) * row_stride + i, value, mask=inside)


def _inner_contiguous(*tensors: torch.Tensor) -> bool:
    return all(
        t.stride(-1) == 1 and (t.shape[-2] == 1 or t.stride(-2) == t.shape[-1]) for t in tensors
    )


def _row_stride(x_BTGD: torch.Tensor) -> int:
    """Elements from a token to the next, over all sequences. Raises where there is no such number.

    The stride of a dimension of size 1 means nothing: a view may have any there.
    """
    num_sequences, num_tokens = x_BTGD.shape[:2]
    if num_tokens == 1:
        return x_BTGD.stride(0)
    require(
        num_sequences == 1 or x_BTGD.stride(0) == num_tokens * x_BTGD.stride(1),
        "store_kv: sequences must follow each other at the tokens' stride",
    )
    return x_BTGD.stride(1)


def store_kv(
    k_BTGD: torch.Tensor,
    v_BTGD: torch.Tensor,
    k_cache_SCGD: torch.Tensor,
    v_cache_SCGD: torch.Tensor,
    slot_B: torch.Tensor,
    start_B: torch.Tensor,
) -> None:
    """As ``store_kv_ref``."""
    num_sequences, num_tokens, num_kv_heads, head_size = k_BTGD.shape
    width = num_kv_heads * head_size
    require(
        _inner_contiguous(k_BTGD, v_BTGD, k_cache_SCGD, v_cache_SCGD),
        "store_kv: heads must be contiguous within a row",
    )
    block = min(1024, pow2(width))
    pdl = pdl_for(k_BTGD.device)
    launch(
        store_kv_kernel, (num_sequences * num_tokens, cdiv(width, block)),
        k_BTGD, v_BTGD, k_cache_SCGD, v_cache_SCGD, slot_B.contiguous(), start_B.contiguous(),
        num_tokens, width,
        _row_stride(k_BTGD), _row_stride(v_BTGD),
        *k_cache_SCGD.stride()[:2], *v_cache_SCGD.stride()[:2],
        BLOCK=block, PDL=pdl, launch_pdl=pdl, num_warps=2,
    )  # fmt: skip


def kv_compact(
    cache_XSCGD: torch.Tensor,
    slot_B: torch.Tensor,
    start_B: torch.Tensor,
    src_BA: torch.Tensor,
    count_B: torch.Tensor,
) -> None:
    """As ``kv_compact_ref``."""
    num_caches, _, _, num_kv_heads, head_size = cache_XSCGD.shape
    width = num_kv_heads * head_size
    require(
        _inner_contiguous(cache_XSCGD) and src_BA.is_contiguous(),
        "kv_compact: heads must be contiguous within a row, and src contiguous",
    )
    # at least a column a thread: a second copy of a column could be overwritten before it is read
    block = min(512, pow2(width, 64))
    pdl = pdl_for(cache_XSCGD.device)
    launch(
        kv_compact_kernel, (cdiv(width, block), num_caches, slot_B.shape[0]),
        cache_XSCGD, slot_B.contiguous(), start_B.contiguous(), src_BA, count_B.contiguous(),
        src_BA.shape[1], width,
        *cache_XSCGD.stride()[:3], BLOCK=block, PDL=pdl, launch_pdl=pdl, num_warps=2,
    )  # fmt: skip
