"""Adding up what the parts of the attention kernel leave: by the last of them, or by programs of
their own that wait.

A part leaves, for each of its R rows, D sums weighted by exp2(factor * (score - m)), its largest
score m and the sum l of the weights. ``last_to_arrive`` costs a fence, an atomic and two more trips
to memory, about as long as the whole attention over a short context; programs that wait read the
parts' words as soon as they are there, a word that is not being EMPTY. They come after all parts in
the grid: the hardware starts programs in order, so what they wait for has started before them.
"""

import torch
import triton
import triton.language as tl

from kernels.device import INTERPRETED
from kernels.launch import num_multiprocessors, pow2, require

#: a NaN that no fp32 operation gives: a word that has not been written yet
EMPTY = tl.constexpr(-74565)
#: fp32 words a device has for parts that are waited for
NUM_WORDS = 1 << 22


@triton.jit
def add_up(
    partial_o, partial_m, partial_l, base, r, in_row, out_rows, out, factor,
    D: tl.constexpr, PARTS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_PARTS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """In the last part to arrive: the output rows ``r`` of the parts at ``base``."""
    every = base + tl.arange(0, BLOCK_PARTS)[:, None] * BLOCK_R + r[None, :]
    here = (tl.arange(0, BLOCK_PARTS) < PARTS)[:, None] & in_row[None, :]
    tops = tl.load(partial_m + every, mask=here, other=float("-inf"), cache_modifier=".cg")
    totals = tl.load(partial_l + every, mask=here, other=0.0, cache_modifier=".cg")
    top = tl.max(tops, axis=0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2((tops - shift[None, :]) * factor) * totals, axis=0)
    acc = tl.zeros([BLOCK_R, BLOCK_D], dtype=tl.float32)
    d = tl.arange(0, BLOCK_D)
    shown = in_row[:, None] & (d < D)[None, :]
    # several parts' rows on their way at once, as many as the registers hold
    for first in range(0, PARTS, TOGETHER):
        for i in tl.static_range(TOGETHER):
            part = first + i
            at = base + part * BLOCK_R + r
            inside = in_row & (part < PARTS)
            m = tl.load(partial_m + at, mask=inside, other=float("-inf"), cache_modifier=".cg")
            o = tl.load(
                partial_o + at[:, None] * BLOCK_D + d[None, :],
                mask=shown & (part < PARTS),
                other=0.0,
                cache_modifier=".cg",
            )
            acc += tl.exp2((m - shift) * factor)[:, None] * o
    o = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + out_rows[:, None] + d[None, :], o.to(out.dtype.element_ty), mask=shown)


@triton.jit
def wait_and_add_up(
    partial_o, partial_m, partial_l, out, task, factor,
    T: tl.constexpr, N: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_PARTS: tl.constexpr, BLOCK_WAIT: tl.constexpr, WAITED: tl.constexpr,
):  # fmt: skip
    """In a program of its own: ``BLOCK_WAIT`` of a block's first ``WAITED`` rows.

    Their words are EMPTY again afterwards.
    """
    R: tl.constexpr = N // G
    SLICES: tl.constexpr = WAITED // BLOCK_WAIT
    group = task // SLICES
    bg = group // BLOCKS
    r = task % SLICES * BLOCK_WAIT + tl.arange(0, BLOCK_WAIT)
    row = group % BLOCKS * BLOCK_R + r
    in_row = row < T * R
    part = tl.arange(0, BLOCK_PARTS)
    d = tl.arange(0, BLOCK_D)
    at = group.to(tl.int64) * (PARTS * BLOCK_R) + part[:, None] * BLOCK_R + r[None, :]
    here = (part < PARTS)[:, None] & in_row[None, :]
    here_o = here[:, :, None] & (d < D)[None, None, :]
    m_at = partial_m.to(tl.pointer_type(tl.int32)) + at
    l_at = partial_l.to(tl.pointer_type(tl.int32)) + at
    o_at = partial_o.to(tl.pointer_type(tl.int32)) + at[:, :, None] * BLOCK_D + d[None, None, :]
    # one word of every part first: the others are there soon after
    _arrived(tl.where(here, EMPTY, 0), m_at, here)
    tl.debug_barrier()
    o_bits = tl.load(o_at, mask=here_o, other=0, volatile=True)
    m_bits = tl.load(m_at, mask=here, other=0, volatile=True)
    l_bits = tl.load(l_at, mask=here, other=0, volatile=True)
    m_bits = _arrived(m_bits, m_at, here)
    l_bits = _arrived(l_bits, l_at, here)
    o_bits = _arrived(o_bits, o_at, here_o)
    # emptied when all threads have read
    tl.debug_barrier()
    tl.store(o_at, tl.full([BLOCK_PARTS, BLOCK_WAIT, BLOCK_D], EMPTY, tl.int32), mask=here_o)
    tl.store(m_at, tl.full([BLOCK_PARTS, BLOCK_WAIT], EMPTY, tl.int32), mask=here)
    tl.store(l_at, tl.full([BLOCK_PARTS, BLOCK_WAIT], EMPTY, tl.int32), mask=here)
    m = tl.where(here, m_bits.to(tl.float32, bitcast=True), float("-inf"))
    top = tl.max(m, axis=0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2((m - shift[None, :]) * factor)
    total = tl.sum(weight * l_bits.to(tl.float32, bitcast=True), axis=0)
    acc = tl.sum(weight[:, :, None] * o_bits.to(tl.float32, bitcast=True), axis=0)
    o = acc / tl.where(total > 0, total, 1.0)[:, None]
    token = (bg // G * T + row // R).to(tl.int64)
    to = out + (token * (N * D) + (bg % G * R + row % R) * D)[:, None] + d[None, :]
    tl.store(to, o.to(out.dtype.element_ty), mask=in_row[:, None] & (d < D)[None, :])


@triton.jit
def _arrived(bits, pointers, wanted):
    """``bits``, each read again, where wanted, until it is no longer EMPTY."""
    if INTERPRETED:
        # one program after the other: the parts have run
        return bits
    return tl.inline_asm_elementwise(
        """{ .reg .pred empty, wanted;
        mov.b32 $0, $1;
        setp.ne.s32 wanted, $3, 0;
        AGAIN: setp.eq.and.s32 empty, $0, -74565, wanted;
        @!empty bra DONE;
        ld.volatile.global.b32 $0, [$2];
        bra AGAIN;
        DONE: }""",
        "=&r,r,l,r",
        [bits, pointers, wanted.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def rows_each(num_groups: int, rows: int, words: int, num_warps: int, device: torch.device) -> int:
    """Rows that a waiting program adds up: one, more where that makes too many programs.

    ``words`` are what all parts leave a row; a thread holds at most 64 of them.
    """
    each = 1
    while (
        each < rows
        and num_groups * rows // each > num_multiprocessors(device)
        and 2 * each * words <= 64 * 32 * num_warps
    ):
        each *= 2
    return each


def num_partial_words(num_rows: int, parts: int, head_size: int) -> int:
    """fp32 words that ``parts`` leave for ``num_rows`` rows of (padded) blocks."""
    return num_rows * parts * (2 * pow2(head_size // 2, 16) + 2)


_words: dict[torch.device, torch.Tensor] = {}


def empty_words(device: torch.device, count: int) -> torch.Tensor:
    """``count`` fp32 words that hold EMPTY between launches; one buffer a device, one stream.

    Raises ``ValueError`` when more are asked for than there are and ``RuntimeError`` when the first
    use falls into a graph capture (the graph would write them, not now).
    """
    require(
        count <= NUM_WORDS,
        f"attention that waits for its parts needs {count} words; there are {NUM_WORDS}",
    )
    buffer = _words.get(device)
    if buffer is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("run the forward once before capturing it in a CUDA graph")
        buffer = torch.full((NUM_WORDS,), EMPTY.value, dtype=torch.int32, device=device)
        _words[device] = buffer
    return buffer[:count].view(torch.float32)
