"""The attention kernel behind ``tree_attention`` and ``qkv_attention``.

A program takes a block of (token, head) rows of one key head and one part of the cache's rows;
what the parts leave is added up as ``attention_combine`` says. With NEW queries, keys and values
come raw from the QKV projection: the program normalises and rotates its queries, and one part
does the same to the new tokens' keys and stores them, so that nothing else runs in between.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.attention_combine import (
    NUM_WORDS,
    add_up,
    empty_words,
    num_partial_words,
    rows_each,
    wait_and_add_up,
)
from kernels.attention_tiles import attend, cache_tile, halves, rotated
from kernels.device import INTERPRETED, last_to_arrive, prefetch_l2, wait_for_predecessor
from kernels.fit import fitted
from kernels.launch import (
    arrival_counters,
    cdiv,
    launch,
    num_multiprocessors,
    pdl_for,
    pow2,
    require,
)
from kernels.tuning import Config, config_for

#: exp(x) = exp2(LOG2_E x)
LOG2_E = 1.4426950408889634


@triton.jit
def attention_kernel(
    q, k_cache, v_cache, slots, prefixes, mask, out,
    q_gain, k_gain, cos, sin, positions,
    partial_o, partial_m, partial_l, counters,
    factor, eps, q_stride, k_offset, v_offset,
    k_slot_stride, k_row_stride, k_head_stride, v_slot_stride, v_row_stride, v_head_stride, J,
    num_parts,
    T: tl.constexpr, N: tl.constexpr, G: tl.constexpr, HALF: tl.constexpr,
    NEW: tl.constexpr, HAS_NORM: tl.constexpr, HAS_MASK: tl.constexpr, OWN: tl.constexpr,
    SPLITS: tl.constexpr, FOLD: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_NEW: tl.constexpr, BLOCK_PARTS: tl.constexpr, BLOCK_WAIT: tl.constexpr,
    WAITED: tl.constexpr, TOGETHER: tl.constexpr, AHEAD: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    R: tl.constexpr = N // G
    D: tl.constexpr = 2 * HALF
    BLOCK_D: tl.constexpr = 2 * BLOCK_HALF
    PARTS: tl.constexpr = SPLITS + 1 if NEW and not FOLD else SPLITS
    BLOCKS: tl.constexpr = (T * R + BLOCK_R - 1) // BLOCK_R
    wait_for_predecessor(PDL)
    number = tl.program_id(0)
    if BLOCK_WAIT > 0:  # noqa: SIM102 - one is known when compiling, the other is not
        if number >= num_parts:
            wait_and_add_up(
                partial_o, partial_m, partial_l, out, number - num_parts, factor,
                T, N, G, D, PARTS, BLOCKS, BLOCK_R, BLOCK_D, BLOCK_PARTS, BLOCK_WAIT, WAITED,
            )  # fmt: skip
            return
    part = number % PARTS
    group = number // PARTS
    block = group % BLOCKS
    b = group // BLOCKS // G
    g = group // BLOCKS % G
    prefix = tl.load(prefixes + b).to(tl.int32)
    slot = tl.load(slots + b).to(tl.int64)
    row = block * BLOCK_R + tl.arange(0, BLOCK_R)
    in_row = row < T * R
    t = row // R
    head = g * R + row % R
    token = (b * T + t).to(tl.int64)
    d = tl.arange(0, BLOCK_HALF)
    d_all = tl.arange(0, BLOCK_D)
    q_a, q_b = halves(q + token * q_stride + head * D, in_row, d, HALF)
    if NEW:
        position = tl.load(positions + token, mask=in_row, other=0).to(tl.int64)
    # rows read from the cache; with NEW the last T of them come from the projection instead
    stop = prefix + J - T if NEW else prefix + J
    if not HAS_MASK and not NEW:
        # causal: nothing after this block's last token is seen
        stop = tl.minimum(stop, prefix + (block * BLOCK_R + BLOCK_R - 1) // R + 1)
    chunk = tl.cdiv(tl.cdiv(stop, SPLITS), BLOCK_L) * BLOCK_L
    first = part * chunk
    last = tl.minimum(first + chunk, stop)
    if NEW and not FOLD:
        last = tl.where(part == SPLITS, first, last)
    # the prefix is seen by all, what comes after it by some
    limit = tl.minimum(last, prefix)
    k_base = k_cache + slot * k_slot_stride + g * k_head_stride
    v_base = v_cache + slot * v_slot_stride + g * v_head_stride
    lines = tl.arange(0, BLOCK_L)
    # the first rows are on their way into L2 while the queries are made ready
    if AHEAD > 0 and not INTERPRETED:
        LINE: tl.constexpr = 128 // (k_cache.dtype.element_ty.primitive_bitwidth // 8)
        piece = tl.arange(0, BLOCK_D // LINE if BLOCK_D >= LINE else 1) * LINE
        piece = tl.minimum(piece, D - 1)[None, :]
        for i in tl.static_range(AHEAD):
            near = tl.minimum(first + i * BLOCK_L + lines, tl.maximum(stop, 1) - 1)
            near = near.to(tl.int64)[:, None]
            prefetch_l2(k_base + near * k_row_stride + piece, True)
            prefetch_l2(v_base + near * v_row_stride + piece, True)
    dtype: tl.constexpr = k_cache.dtype.element_ty
    if NEW:
        q_a, q_b = rotated(
            q_a, q_b, in_row, q_gain, cos, sin, position, d, eps, HALF, HAS_NORM, BLOCK_R,
            BLOCK_HALF,
        )  # fmt: skip
    q_a = q_a.to(dtype)
    q_b = q_b.to(dtype)
    top = tl.full([BLOCK_R], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_R], dtype=tl.float32)
    acc = tl.zeros([BLOCK_R, BLOCK_D], dtype=tl.float32)
    mask_rows = mask + token * J
    for start in tl.range(first, limit, BLOCK_L, num_stages=STAGES):
        line = start + lines
        k_a, k_b, v = cache_tile(
            k_base, k_row_stride, v_base, v_row_stride, line, limit, d, d_all, HALF
        )
        top, total, acc = attend(
            q_a, q_b, k_a, k_b, v, (line < limit)[None, :], top, total, acc, factor, PRECISION
        )
    if OWN:
        for start in tl.range(tl.maximum(first, prefix), last, BLOCK_L, num_stages=STAGES):
            line = start + lines
            own = line - prefix
            k_a, k_b, v = cache_tile(
                k_base, k_row_stride, v_base, v_row_stride, line, last, d, d_all, HALF
            )
            seen = in_row[:, None] & (line < last)[None, :]
            if HAS_MASK:
                bit = tl.load(mask_rows[:, None] + own[None, :], mask=seen, other=0)
                seen = seen & (bit != 0)
            else:
                seen = seen & (own[None, :] <= t[:, None])
            top, total, acc = attend(
                q_a, q_b, k_a, k_b, v, seen, top, total, acc, factor, PRECISION
            )
    if NEW:  # noqa: SIM102 - one is known when compiling, the other is not
        if part == PARTS - 1:
            n = tl.arange(0, BLOCK_NEW)
            in_n = n < T
            new_token = (b * T + n).to(tl.int64)
            new_position = tl.load(positions + new_token, mask=in_n, other=0).to(tl.int64)
            new_rows = q + new_token * q_stride + g * D
            new_a, new_b = halves(new_rows + k_offset, in_n, d, HALF)
            in_new = in_n[:, None] & (d_all < D)[None, :]
            v_at = (new_rows + v_offset)[:, None] + d_all[None, :]
            v_new = tl.load(v_at, mask=in_new, other=0.0)
            new_a, new_b = rotated(
                new_a, new_b, in_n, k_gain, cos, sin, new_position, d, eps, HALF, HAS_NORM,
                BLOCK_NEW, BLOCK_HALF,
            )  # fmt: skip
            new_a = new_a.to(dtype)
            new_b = new_b.to(dtype)
            if block == 0:
                line_new = (prefix + J - T + n).to(tl.int64)[:, None]
                in_half = in_n[:, None] & (d < HALF)[None, :]
                k_out = k_base + line_new * k_row_stride + d[None, :]
                tl.store(k_out, new_a, mask=in_half)
                tl.store(k_out + HALF, new_b, mask=in_half)
                tl.store(v_base + line_new * v_row_stride + d_all[None, :], v_new, mask=in_new)
            seen = in_row[:, None] & in_n[None, :]
            if HAS_MASK:
                bit = tl.load(mask_rows[:, None] + (J - T + n)[None, :], mask=seen, other=0)
                seen = seen & (bit != 0)
            else:
                seen = seen & (n[None, :] <= t[:, None])
            top, total, acc = attend(
                q_a, q_b, new_a, new_b, v_new, seen, top, total, acc, factor, PRECISION
            )
    out_rows = token * (N * D) + head * D
    shown = in_row[:, None] & (d_all < D)[None, :]
    if PARTS == 1:
        o = acc / tl.where(total > 0, total, 1.0)[:, None]
        at = out + out_rows[:, None] + d_all[None, :]
        tl.store(at, o.to(out.dtype.element_ty), mask=shown)
    else:
        base = group.to(tl.int64) * (PARTS * BLOCK_R)
        r = tl.arange(0, BLOCK_R)
        mine = base + part * BLOCK_R + r
        tl.store(partial_o + mine[:, None] * BLOCK_D + d_all[None, :], acc, mask=shown)
        tl.store(partial_m + mine, top, mask=in_row)
        tl.store(partial_l + mine, total, mask=in_row)
        if BLOCK_WAIT == 0:  # noqa: SIM102
            if last_to_arrive(counters + group, PARTS):
                add_up(
                    partial_o, partial_m, partial_l, base, r, in_row, out_rows, out, factor,
                    D, PARTS, BLOCK_R, BLOCK_D, BLOCK_PARTS, TOGETHER,
                )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTokens:
    """What ``qkv_attention`` adds: the rows' layout, norms and rotation of the raw projection."""

    q_gain: torch.Tensor | None
    k_gain: torch.Tensor | None
    eps: float
    positions: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor


def default_config(
    groups: int,
    rows: int,
    num_cache_rows: int,
    head_size: int,
    element_bytes: int,
    device: torch.device,
) -> Config:
    """Enough parts to occupy the GPU at small batch, none too short to be worth adding up.

    As measured on an H200 at 1024 and 8192 rows (``bench/attention_variants.py``): where a block
    has room for 16 parts and more, programs that wait add them up; fewer parts, and every part of
    a large block, are cheaper for the last one.
    """
    # a tile of keys or values of at most 16 KiB, so that every architecture has the shared memory
    block_l = min(64, max(16, 16384 // (pow2(head_size) * element_bytes)))
    tiles = cdiv(num_cache_rows, block_l)
    small = num_multiprocessors(device) // (groups * cdiv(rows, 16))
    if min(small, tiles) >= 16:
        config = {"block_r": 16, "block_l": block_l, "splits": min(small, tiles, 20), "fold": 0,
                  "wait": 1, "ahead": 2, "stages": 3, "num_warps": 4}  # fmt: skip
        return fitted("qkv_attention", config, element_bytes, head_size)
    block_r = min(64, pow2(rows, 16))
    room = num_multiprocessors(device) // (groups * cdiv(rows, block_r))
    splits = max(1, min(room, tiles, 6 if block_r <= 32 or tiles > 64 else 2))
    config = {
        "block_r": block_r,
        "block_l": block_l,
        "splits": splits,
        # the new tokens in the last part, where parts are long or there is one
        "fold": int(splits <= 2 and block_r <= 32),
        "wait": 0,
        "ahead": 1 if splits > 2 else 2,
        "stages": 3 if block_r <= 32 else 2,
        "num_warps": 4,
    }
    return fitted("qkv_attention", config, element_bytes, head_size)


#: block_l, splits, fold, wait, ahead, stages, num_warps
_CHOICES = (
    (64, 16, 0, 1, 1, 2, 4), (64, 20, 0, 1, 1, 2, 4), (64, 20, 0, 1, 2, 3, 4),
    (64, 6, 0, 0, 1, 3, 4), (64, 4, 0, 0, 1, 3, 4), (64, 2, 0, 0, 1, 3, 4), (64, 4, 0, 0, 2, 3, 4),
    (64, 2, 1, 0, 6, 4, 4), (128, 2, 1, 0, 3, 3, 8), (64, 1, 1, 0, 2, 3, 4), (64, 1, 1, 0, 4, 4, 4),
    (64, 12, 0, 0, 1, 3, 4), (64, 16, 0, 1, 2, 3, 4),
)  # fmt: skip


def candidates(groups: int, rows: int) -> list[Config]:
    """What tuning tries."""
    names = ("block_l", "splits", "fold", "wait", "ahead", "stages", "num_warps")
    found: list[Config] = []
    for block_r in sorted({min(64, pow2(rows, 16)), min(16, pow2(rows, 16))}):
        programs = groups * cdiv(rows, block_r)
        for values in _CHOICES:
            splits = values[1]
            few, many = (16, 600) if groups < 16 else (32, 1024)
            if few <= programs * splits <= many or (splits == 1 and programs > many):
                found.append({"block_r": block_r} | dict(zip(names, values, strict=True)))
    return found


def launch_attention(
    op: str,
    q_PX: torch.Tensor,
    k_cache_SCGD: torch.Tensor,
    v_cache_SCGD: torch.Tensor,
    slot_B: torch.Tensor,
    prefix_B: torch.Tensor,
    mask_BTJ: torch.Tensor | None,
    scale: float,
    *,
    num_tokens: int,
    num_heads: int,
    out: torch.Tensor,
    new: NewTokens | None,
) -> None:
    """Check sizes, choose the configuration, launch. P = B * T rows of q (or of q, k and v)."""
    num_rows_of_cache, num_kv_heads, head_size = k_cache_SCGD.shape[1:]
    require(head_size % 2 == 0, f"{op}: the head size must be even, got {head_size}")
    require(head_size <= 256, f"{op}: the head size must be at most 256, got {head_size}")
    require(scale > 0, f"{op}: the scale must be positive, got {scale}")
    require(
        k_cache_SCGD.stride(3) == 1 and v_cache_SCGD.stride(3) == 1,
        f"{op}: the cache's last dimension must be contiguous",
    )
    require(
        k_cache_SCGD.dtype == q_PX.dtype,
        f"{op}: the cache is {k_cache_SCGD.dtype}, q is {q_PX.dtype}; they must be the same",
    )
    num_sequences = slot_B.shape[0]
    require(
        prefix_B.shape == slot_B.shape,
        f"{op}: {slot_B.shape[0]} slots but {prefix_B.shape[0]} prefixes",
    )
    slot_B, prefix_B = slot_B.contiguous(), prefix_B.contiguous()
    device = q_PX.device
    rows = num_tokens * (num_heads // num_kv_heads)
    groups = num_sequences * num_kv_heads
    shape = {
        "B": num_sequences, "T": num_tokens, "N": num_heads, "G": num_kv_heads, "D": head_size,
        "dtype": str(q_PX.dtype)[6:],
    }  # fmt: skip
    config = config_for(
        op,
        device,
        shape,
        lambda: default_config(
            groups, rows, num_rows_of_cache, head_size, q_PX.element_size(), device
        ),
    )
    block_r, splits, fold = config["block_r"], config["splits"], bool(config.get("fold", 0))
    num_groups = groups * cdiv(rows, block_r)
    parts = splits + 1 if new is not None and not fold else splits
    num_parts = num_groups * parts
    block_half = pow2(head_size // 2, 16)
    partial_o = partial_m = partial_l = counters = q_PX
    block_wait, waited = 0, pow2(min(rows, block_r))
    if parts > 1:
        num_partials = num_parts * block_r
        num_words = num_partial_words(num_groups * block_r, parts, head_size)
        # more parts than the buffer holds are added up by the last one to finish
        if config.get("wait", 0) and num_words <= NUM_WORDS:
            block_wait = rows_each(
                num_groups, waited, pow2(parts) * 2 * block_half, config["num_warps"], device
            )
            words = empty_words(device, num_words)
        else:
            words = torch.empty(num_words, dtype=torch.float32, device=device)
            counters = arrival_counters(device, num_groups)
        partial_o, partial_m, partial_l = words.split(
            [num_words - 2 * num_partials, num_partials, num_partials]
        )
    waiting = num_groups * (waited // block_wait) if block_wait else 0
    has_mask = mask_BTJ is not None
    mask = mask_BTJ.contiguous().view(torch.uint8) if mask_BTJ is not None else slot_B
    num_own = mask_BTJ.shape[2] if mask_BTJ is not None else num_tokens
    has_norm = new is not None and new.q_gain is not None
    pdl = pdl_for(device)
    launch(
        attention_kernel, (num_parts + waiting,),
        q_PX, k_cache_SCGD, v_cache_SCGD, slot_B, prefix_B, mask, out,
        new.q_gain if new is not None and new.q_gain is not None else q_PX,
        new.k_gain if new is not None and new.k_gain is not None else q_PX,
        new.cos if new is not None else q_PX,
        new.sin if new is not None else q_PX,
        new.positions if new is not None else slot_B,
        partial_o, partial_m, partial_l, counters,
        scale * LOG2_E, new.eps if new is not None else 0.0, q_PX.stride(0),
        num_heads * head_size, (num_heads + num_kv_heads) * head_size,
        *k_cache_SCGD.stride()[:3], *v_cache_SCGD.stride()[:3], num_own, num_parts,
        T=num_tokens, N=num_heads, G=num_kv_heads, HALF=head_size // 2,
        NEW=new is not None, HAS_NORM=has_norm, HAS_MASK=has_mask,
        OWN=new is None or num_own > num_tokens, SPLITS=splits, FOLD=fold,
        BLOCK_R=block_r, BLOCK_L=config["block_l"], BLOCK_HALF=block_half,
        BLOCK_NEW=pow2(num_tokens, 16) if new is not None else 16, BLOCK_PARTS=pow2(parts),
        BLOCK_WAIT=block_wait, WAITED=waited, TOGETHER=8 if block_r * block_half <= 1024 else 4,
        AHEAD=config.get("ahead", 1), STAGES=config["stages"],
        PRECISION="ieee", PDL=pdl, launch_pdl=pdl, num_warps=config["num_warps"],
    )  # fmt: skip
