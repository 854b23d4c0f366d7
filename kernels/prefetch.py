"""Bringing weights into L2 before the kernel that reads them starts.

A dense weight is known long before it is needed, and while a kernel that waits for latency runs
(attention, the router) memory is idle. Such a kernel takes a ``prefetch`` tensor: each of its
programs asks for its share of those bytes first thing, waits for nothing, and goes on. A kernel
called without one compiles as if this did not exist; nothing is computed from what is prefetched.

In a kernel: ``prefetch_share(pointer, num_bytes, part, num_parts, MODE)``; in its launcher:
``pointer, num_bytes, mode = prefetch_arguments(tensor, other)``.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import num_threads

from kernels.device import INTERPRETED
from kernels.launch import pdl_for, require

VARIABLE = "AUTOTUNE_PREFETCH"
#: off; as any other line; kept when other lines go (L2's evict_last)
CHOICES = ("off", "normal", "keep")
DEFAULT = "off"

#: values of MODE: nothing, a cache line an instruction (sm_80), a run of bytes each (sm_90)
OFF, LINES, LINES_KEPT, RUNS, RUNS_KEPT = range(5)


@triton.jit
def spans(num_bytes, part, num_parts, THREADS: tl.constexpr):
    """``(share, first, size)``: what each thread of ``part`` asks for, in whole lines of 128 bytes.

    One element a thread, so that an instruction on them runs once in each. The last span ends at
    the last multiple of 16 bytes; threads beyond it get size 0.
    """
    thread = part * THREADS + tl.arange(0, THREADS)
    share = tl.cdiv(tl.cdiv(num_bytes, num_parts * THREADS), 128) * 128
    first = thread.to(tl.int64) * share
    size = tl.minimum(tl.maximum(num_bytes - first, 0), share).to(tl.int32) // 16 * 16
    return share, first, size


@triton.jit
def prefetch_share(pointer, num_bytes, part, num_parts, MODE: tl.constexpr):
    """Ask for the ``part``-th of ``num_parts`` shares of ``num_bytes`` at ``pointer`` (16-aligned).

    MODE 0 is nothing at all.
    """
    if MODE != 0 and not INTERPRETED:
        THREADS: tl.constexpr = num_threads()
        share, first, size = spans(num_bytes, part, num_parts, THREADS)
        base = pointer.to(tl.pointer_type(tl.int8)) + first
        if MODE >= 3:
            _prefetch_run(base, size, MODE == 4)
        else:
            for offset in range(0, share, 128):
                _prefetch_line(base + offset, size - offset, MODE == 2)


@triton.jit
def prefetch_from_last(pointer, num_bytes, COUNT: tl.constexpr, MODE: tl.constexpr):
    """``prefetch_share`` by the last ``COUNT`` programs of the grid, or by all if they are fewer.

    For a kernel that keeps memory busy: only what its last programs ask for fills a gap, the one
    between its end and the next kernel's first loads.
    """
    if MODE != 0 and not INTERPRETED:
        total = tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)
        number = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
        number = number * tl.num_programs(0) + tl.program_id(0)
        count = tl.minimum(total, COUNT)
        if number >= total - count:
            prefetch_share(pointer, num_bytes, number - (total - count), count, MODE)


@triton.jit
def _prefetch_run(pointers, sizes, KEEP: tl.constexpr):
    if KEEP:
        tl.inline_asm_elementwise(
            """{ .reg .pred p; .reg .b64 policy;
            setp.gt.s32 p, $2, 0;
            createpolicy.fractional.L2::evict_last.b64 policy, 1.0;
            @p cp.async.bulk.prefetch.L2.global.L2::cache_hint [$1], $2, policy;
            mov.u32 $0, 0; }""",
            "=r,l,r",
            [pointers, sizes],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.inline_asm_elementwise(
            """{ .reg .pred p;
            setp.gt.s32 p, $2, 0;
            @p cp.async.bulk.prefetch.L2.global [$1], $2;
            mov.u32 $0, 0; }""",
            "=r,l,r",
            [pointers, sizes],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _prefetch_line(pointers, sizes, KEEP: tl.constexpr):
    if KEEP:
        tl.inline_asm_elementwise(
            """{ .reg .pred p;
            setp.gt.s32 p, $2, 0;
            @p prefetch.global.L2::evict_last [$1];
            mov.u32 $0, 0; }""",
            "=r,l,r",
            [pointers, sizes],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.inline_asm_elementwise(
            """{ .reg .pred p;
            setp.gt.s32 p, $2, 0;
            @p prefetch.global.L2 [$1];
            mov.u32 $0, 0; }""",
            "=r,l,r",
            [pointers, sizes],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@dataclass(slots=True)
class _State:
    choice: str | None = None


_state = _State()


@contextmanager
def prefetching(choice: str) -> Iterator[None]:
    """Prefetch as ``choice`` (see ``CHOICES``) says within this block, whatever the environment."""
    require(choice in CHOICES, f"prefetch {choice!r}: must be one of {', '.join(CHOICES)}")
    previous, _state.choice = _state.choice, choice
    try:
        yield
    finally:
        _state.choice = previous


def prefetch_choice() -> str:
    """What is in force; ``ValueError`` where the environment names none of ``CHOICES``."""
    choice = _state.choice or os.environ.get(VARIABLE, DEFAULT)
    require(choice in CHOICES, f"{VARIABLE}={choice!r}: must be one of {', '.join(CHOICES)}")
    return choice


def prefetch_arguments(
    tensor: torch.Tensor | None, other: torch.Tensor
) -> tuple[torch.Tensor, int, int]:
    """``(pointer, num_bytes, MODE)`` for a kernel; ``other`` stands in where there is nothing.

    ``tensor`` is contiguous and starts at a multiple of 16 bytes (``ValueError``); at most 1 GiB of
    it are fetched.
    """
    choice = prefetch_choice()
    if tensor is None or choice == "off" or tensor.device.type == "cpu":
        return other, 0, OFF
    require(tensor.is_contiguous(), "prefetch: the tensor must be contiguous")
    if tensor.device.type != "meta":
        require(tensor.data_ptr() % 16 == 0, "prefetch: the tensor must start at 16 bytes")
    num_bytes = min(tensor.numel() * tensor.element_size(), 2**30)
    kept = choice == "keep"
    if _has_runs(tensor.device):
        return tensor, num_bytes, RUNS_KEPT if kept else RUNS
    return tensor, num_bytes, LINES_KEPT if kept else LINES


def _has_runs(device: torch.device) -> bool:
    if device.type == "meta":
        # a recording for sm_90 and later is made with programmatic launch on, others without
        return pdl_for(device)
    return torch.cuda.get_device_capability(device)[0] >= 9
