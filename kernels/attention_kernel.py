"""The attention kernel behind ``tree_attention`` and ``qkv_attention``.

A program takes a block of (token, head) rows of one key head and one part of the cache's rows; the
last of the parts to finish combines them. With NEW the queries, keys and values come raw from the
QKV projection: the program normalises and rotates its queries itself, one extra part does the same
to the new tokens' keys and stores them, so that nothing else runs between projection and attention.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.device import (
    INTERPRETED,
    dot,
    last_to_arrive,
    prefetch_l2,
    wait_for_predecessor,
)
from kernels.launch import (
    arrival_counters,
    cdiv,
    launch,
    num_multiprocessors,
    pdl_for,
    pow2,
    require,
)
from kernels.prefetch import prefetch_arguments, prefetch_share
from kernels.tuning import Config, config_for


@triton.jit
def _rotated_halves(
    rows, in_row, gain, cos, sin, position, d, eps,
    HALF: tl.constexpr, HAS_NORM: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Both halves of ``rows`` after RMSNorm (optional) and rotation, fp32.

    The two halves of a table row are equal, so one is read.
    """
    inside = in_row[:, None] & (d < HALF)[None, :]
    a = tl.load(rows[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
    b = tl.load(rows[:, None] + (HALF + d)[None, :], mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)
        scale = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
        a *= scale * tl.load(gain + d, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
        b *= scale * tl.load(gain + HALF + d, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
    table = position[:, None] * (2 * HALF) + d[None, :]
    c = tl.load(cos + table, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + table, mask=inside, other=0.0).to(tl.float32)
    return a * c - b * s, b * c + a * s


@triton.jit
def attention_kernel(
    q, k_cache, v_cache, slots, prefixes, mask, out,
    q_gain, k_gain, cos, sin, positions,
    partial_o, partial_m, partial_l, counters, ahead, ahead_bytes,
    scale, eps, q_stride, k_offset, v_offset,
    k_slot_stride, k_row_stride, k_head_stride, v_slot_stride, v_row_stride, v_head_stride, J,
    T: tl.constexpr, N: tl.constexpr, G: tl.constexpr, HALF: tl.constexpr,
    NEW: tl.constexpr, HAS_NORM: tl.constexpr, HAS_MASK: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_NEW: tl.constexpr, BLOCK_PARTS: tl.constexpr, STAGES: tl.constexpr,
    PREFETCH: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    R: tl.constexpr = N // G
    D: tl.constexpr = 2 * HALF
    BLOCK_D: tl.constexpr = 2 * BLOCK_HALF
    PARTS: tl.constexpr = SPLITS + 1 if NEW else SPLITS
    part = tl.program_id(0)
    block = tl.program_id(1)
    b = tl.program_id(2) // G
    g = tl.program_id(2) % G
    wait_for_predecessor(PDL)
    prefix = tl.load(prefixes + b).to(tl.int32)
    slot = tl.load(slots + b).to(tl.int64)
    # rows read from the cache; with NEW the last T of them come from the projection instead
    stop = prefix + J - T if NEW else prefix + J
    if not HAS_MASK and not NEW:
        # causal: nothing after this block's last token is seen
        stop = tl.minimum(stop, prefix + (block * BLOCK_R + BLOCK_R - 1) // R + 1)
    chunk = tl.cdiv(tl.cdiv(stop, SPLITS), BLOCK_L) * BLOCK_L
    first = part * chunk
    if NEW:
        last = tl.where(part == SPLITS, first, tl.minimum(first + chunk, stop))
    else:
        last = tl.minimum(first + chunk, stop)
    k_base = k_cache + slot * k_slot_stride + g * k_head_stride
    v_base = v_cache + slot * v_slot_stride + g * v_head_stride
    # the first tile is on its way into L2 while the queries are made ready
    if not INTERPRETED:
        LINE: tl.constexpr = 128 // (k_cache.dtype.element_ty.primitive_bitwidth // 8)
        near = tl.minimum(first + tl.arange(0, BLOCK_L), tl.maximum(stop, 1) - 1).to(tl.int64)
        piece = tl.arange(0, BLOCK_D // LINE if BLOCK_D >= LINE else 1) * LINE
        piece = tl.minimum(piece, D - 1)
        prefetch_l2(k_base + near[:, None] * k_row_stride + piece[None, :], True)
        prefetch_l2(v_base + near[:, None] * v_row_stride + piece[None, :], True)
    if PREFETCH:
        # the next kernel's weight: after the cache's rows, which are waited for
        number = (tl.program_id(2) * tl.num_programs(1) + block) * PARTS + part
        total_programs = PARTS * tl.num_programs(1) * tl.num_programs(2)
        prefetch_share(ahead, ahead_bytes, number, total_programs, PREFETCH)
    row = block * BLOCK_R + tl.arange(0, BLOCK_R)
    in_row = row < T * R
    t = row // R
    head = g * R + row % R
    d = tl.arange(0, BLOCK_HALF)
    d_all = tl.arange(0, BLOCK_D)
    token = (b * T + t).to(tl.int64)
    q_rows = q + token * q_stride + head * D
    if NEW:
        position = tl.load(positions + token, mask=in_row, other=0).to(tl.int64)
        q_a, q_b = _rotated_halves(
            q_rows, in_row, q_gain, cos, sin, position, d, eps, HALF, HAS_NORM, BLOCK_R
        )
    else:
        inside = in_row[:, None] & (d < HALF)[None, :]
        q_a = tl.load(q_rows[:, None] + d[None, :], mask=inside, other=0.0)
        q_b = tl.load(q_rows[:, None] + (HALF + d)[None, :], mask=inside, other=0.0)
    dtype: tl.constexpr = k_cache.dtype.element_ty
    q_a = q_a.to(dtype)
    q_b = q_b.to(dtype)
    top = tl.full([BLOCK_R], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_R], dtype=tl.float32)
    acc = tl.zeros([BLOCK_R, BLOCK_D], dtype=tl.float32)
    mask_rows = mask + token * J
    for start in tl.range(first, last, BLOCK_L, num_stages=STAGES):
        line = start + tl.arange(0, BLOCK_L)
        in_line = line < last
        line_offset = line.to(tl.int64)
        k_rows = k_base + line_offset[:, None] * k_row_stride
        in_k = in_line[:, None] & (d < HALF)[None, :]
        k_a = tl.load(k_rows + d[None, :], mask=in_k, other=0.0)
        k_b = tl.load(k_rows + (HALF + d)[None, :], mask=in_k, other=0.0)
        score = dot(q_a, tl.trans(k_a), None, PRECISION)
        score = dot(q_b, tl.trans(k_b), score, PRECISION) * scale
        own = line - prefix
        seen = in_row[:, None] & in_line[None, :]
        if HAS_MASK:
            bit = tl.load(
                mask_rows[:, None] + own[None, :], mask=seen & (own >= 0)[None, :], other=1
            )
            seen = seen & (bit != 0)
        else:
            seen = seen & (own[None, :] <= t[:, None])
        v_rows = v_base + line_offset[:, None] * v_row_stride + d_all[None, :]
        v = tl.load(v_rows, mask=in_line[:, None] & (d_all < D)[None, :], other=0.0)
        score = tl.where(seen, score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, axis=1))
        # a row that has seen nothing yet keeps -inf; exp(-inf - 0) is 0, exp(-inf + inf) is NaN
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp(score - shift[:, None])
        fade = tl.exp(top - shift)
        total = total * fade + tl.sum(p, axis=1)
        acc = dot(p.to(dtype), v, acc * fade[:, None], PRECISION)
        top = new_top
    if NEW:  # noqa: SIM102 - one is known when compiling, the other is not
        if part == SPLITS:
            n = tl.arange(0, BLOCK_NEW)
            in_n = n < T
            new_token = (b * T + n).to(tl.int64)
            new_position = tl.load(positions + new_token, mask=in_n, other=0).to(tl.int64)
            k_a32, k_b32 = _rotated_halves(
                q + new_token * q_stride + k_offset + g * D, in_n, k_gain, cos, sin, new_position,
                d, eps, HALF, HAS_NORM, BLOCK_NEW,
            )  # fmt: skip
            k_new_a = k_a32.to(dtype)
            k_new_b = k_b32.to(dtype)
            in_v = in_n[:, None] & (d_all < D)[None, :]
            v_new = tl.load(
                q + (new_token * q_stride + v_offset + g * D)[:, None] + d_all[None, :],
                mask=in_v,
                other=0.0,
            )
            if block == 0:
                line_new = (prefix + J - T + n).to(tl.int64)[:, None]
                in_k_new = in_n[:, None] & (d < HALF)[None, :]
                k_out = k_base + line_new * k_row_stride + d[None, :]
                tl.store(k_out, k_new_a, mask=in_k_new)
                tl.store(k_out + HALF, k_new_b, mask=in_k_new)
                tl.store(v_base + line_new * v_row_stride + d_all[None, :], v_new, mask=in_v)
            score = dot(q_a, tl.trans(k_new_a), None, PRECISION)
            score = dot(q_b, tl.trans(k_new_b), score, PRECISION) * scale
            seen = in_row[:, None] & in_n[None, :]
            if HAS_MASK:
                bit = tl.load(mask_rows[:, None] + (J - T + n)[None, :], mask=seen, other=0)
                seen = seen & (bit != 0)
            else:
                seen = seen & (n[None, :] <= t[:, None])
            score = tl.where(seen, score, float("-inf"))
            top = tl.max(score, axis=1)
            shift = tl.where(top == float("-inf"), 0.0, top)
            p = tl.exp(score - shift[:, None])
            total = tl.sum(p, axis=1)
            acc = dot(p.to(dtype), v_new, None, PRECISION)
    shown = in_row[:, None] & (d_all < D)[None, :]
    where = (token * (N * D) + head * D)[:, None] + d_all[None, :]
    if PARTS == 1:
        o = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out + where, o.to(out.dtype.element_ty), mask=shown)
    else:
        group = tl.program_id(2) * tl.num_programs(1) + block
        r = tl.arange(0, BLOCK_R)
        base = group.to(tl.int64) * (PARTS * BLOCK_R)
        mine = base + part * BLOCK_R + r
        tl.store(partial_o + mine[:, None] * BLOCK_D + d_all[None, :], acc, mask=shown)
        tl.store(partial_m + mine, top)
        tl.store(partial_l + mine, total)
        if last_to_arrive(counters + group, PARTS):
            # every part's maximum and sum in one load each; a loop would wait for each in turn
            n_parts = tl.arange(0, BLOCK_PARTS)
            every = base + n_parts[:, None] * BLOCK_R + r[None, :]
            is_part = (n_parts < PARTS)[:, None]
            tops = tl.load(
                partial_m + every, mask=is_part, other=float("-inf"), cache_modifier=".cg"
            )
            totals = tl.load(partial_l + every, mask=is_part, other=0.0, cache_modifier=".cg")
            top = tl.max(tops, axis=0)
            shift = tl.where(top == float("-inf"), 0.0, top)
            total = tl.sum(tl.exp(tops - shift[None, :]) * totals, axis=0)
            acc = tl.zeros([BLOCK_R, BLOCK_D], dtype=tl.float32)
            # several parts' rows on their way at once, as many as the registers hold
            TOGETHER: tl.constexpr = 8 if BLOCK_R * BLOCK_D <= 2048 else 4
            for s0 in range(0, PARTS, TOGETHER):
                for s1 in tl.static_range(TOGETHER):
                    s = s0 + s1
                    at = base + s * BLOCK_R + r
                    m_s = tl.load(
                        partial_m + at,
                        mask=(r < BLOCK_R) & (s < PARTS),
                        other=float("-inf"),
                        cache_modifier=".cg",
                    )
                    o_s = tl.load(
                        partial_o + at[:, None] * BLOCK_D + d_all[None, :],
                        mask=shown & (s < PARTS),
                        other=0.0,
                        cache_modifier=".cg",
                    )
                    acc += tl.exp(m_s - shift)[:, None] * o_s
            o = acc / tl.where(total > 0, total, 1.0)[:, None]
            tl.store(out + where, o.to(out.dtype.element_ty), mask=shown)


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
    """Enough parts to occupy the GPU at small batch, none too short to be worth combining."""
    block_r = min(64, pow2(rows, 16))
    # a tile of keys or values of at most 16 KiB, so that every architecture has the shared memory
    block_l = min(64, max(16, 16384 // (pow2(head_size) * element_bytes)))
    programs = groups * cdiv(rows, block_r)
    splits = 1
    # the last program reads what every part left: 6 to 8 parts were fastest at 1024 rows (H200)
    while (
        splits < 8
        and programs * splits * 2 <= num_multiprocessors(device)
        and splits * block_l < num_cache_rows
    ):
        splits *= 2
    return {
        "block_r": block_r,
        "block_l": block_l,
        "splits": splits,
        "stages": 2,
        "num_warps": 4,
    }


def candidates(groups: int, rows: int) -> list[Config]:
    """What tuning tries."""
    found: list[Config] = []
    for block_r in sorted({min(64, pow2(rows, 16)), min(16, pow2(rows, 16))}):
        programs = groups * cdiv(rows, block_r)
        for block_l, splits, stages, num_warps in (
            (64, 16, 2, 4), (64, 8, 2, 4), (128, 8, 2, 4), (32, 16, 2, 4), (64, 4, 3, 4),
            (64, 1, 3, 4), (64, 2, 3, 4), (32, 2, 3, 4), (128, 8, 1, 8), (64, 16, 1, 8),
            (64, 12, 2, 4), (128, 8, 1, 4), (64, 6, 3, 4), (32, 8, 3, 4), (128, 4, 2, 4),
        ):  # fmt: skip
            few, many = (16, 600) if groups < 16 else (32, 1024)
            if few <= programs * splits <= many or (splits == 1 and programs > many):
                found.append({"block_r": block_r, "block_l": block_l, "splits": splits,
                              "stages": stages, "num_warps": num_warps})  # fmt: skip
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
    prefetch: torch.Tensor | None = None,
) -> None:
    """Check sizes, choose the configuration, launch. P = B * T rows of q (or of q, k and v).

    ``prefetch`` is a weight to bring into L2 meanwhile (see ``kernels.prefetch``).
    """
    num_rows_of_cache, num_kv_heads, head_size = k_cache_SCGD.shape[1:]
    require(head_size % 2 == 0, f"{op}: the head size must be even, got {head_size}")
    require(head_size <= 256, f"{op}: the head size must be at most 256, got {head_size}")
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
    block_r, splits = config["block_r"], config["splits"]
    blocks = cdiv(rows, block_r)
    parts = splits if new is None else splits + 1
    block_half = pow2(head_size // 2, 16)
    partial_o = partial_m = partial_l = counters = q_PX
    if parts > 1:
        num_partials = groups * blocks * parts * block_r
        partial_o = torch.empty(num_partials * 2 * block_half, dtype=torch.float32, device=device)
        partial_m = torch.empty(num_partials, dtype=torch.float32, device=device)
        partial_l = torch.empty(num_partials, dtype=torch.float32, device=device)
        counters = arrival_counters(device, groups * blocks)
    has_mask = mask_BTJ is not None
    mask = mask_BTJ.contiguous().view(torch.uint8) if mask_BTJ is not None else slot_B
    has_norm = new is not None and new.q_gain is not None
    pdl = pdl_for(device)
    ahead, ahead_bytes, prefetch_mode = prefetch_arguments(prefetch, q_PX)
    launch(
        attention_kernel, (parts, blocks, groups),
        q_PX, k_cache_SCGD, v_cache_SCGD, slot_B, prefix_B, mask, out,
        new.q_gain if new is not None and new.q_gain is not None else q_PX,
        new.k_gain if new is not None and new.k_gain is not None else q_PX,
        new.cos if new is not None else q_PX,
        new.sin if new is not None else q_PX,
        new.positions if new is not None else slot_B,
        partial_o, partial_m, partial_l, counters, ahead, ahead_bytes,
        scale, new.eps if new is not None else 0.0, q_PX.stride(0),
        num_heads * head_size, (num_heads + num_kv_heads) * head_size,
        *k_cache_SCGD.stride()[:3], *v_cache_SCGD.stride()[:3],
        mask_BTJ.shape[2] if mask_BTJ is not None else num_tokens,
        T=num_tokens, N=num_heads, G=num_kv_heads, HALF=head_size // 2,
        NEW=new is not None, HAS_NORM=has_norm, HAS_MASK=has_mask, SPLITS=splits,
        BLOCK_R=block_r, BLOCK_L=config["block_l"], BLOCK_HALF=block_half,
        BLOCK_NEW=pow2(num_tokens, 16) if new is not None else 16, BLOCK_PARTS=pow2(parts),
        STAGES=config["stages"], PREFETCH=prefetch_mode, PRECISION="ieee", PDL=pdl, launch_pdl=pdl,
        num_warps=config["num_warps"],
    )  # fmt: skip
