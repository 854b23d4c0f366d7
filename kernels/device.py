"""Functions that kernels share: waiting for the predecessor, prefetching, the last arrival."""

import os

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

#: Triton's interpreter keeps bfloat16 as raw bits and cannot multiply it
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """``a b + acc`` in fp32."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def add_rounded(a, b):
    """``a + b`` rounded to their type."""
    return (a.to(tl.float32) + b.to(tl.float32)).to(a.dtype)


@triton.jit
def wait_for_predecessor(PDL: tl.constexpr):
    """Wait until the kernel before this one has ended, then let the next one start.

    Everything that earlier kernels wrote or still read may be touched only after this. The order
    (wait, then trigger) is what lets a kernel read, before its own wait, what the kernel two before
    it wrote.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def prefetch_l2(pointers, PDL: tl.constexpr):
    """Ask for these addresses' cache lines to be brought into L2; only under PDL."""
    if PDL:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [pointers],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def turn_among_last(counters, count, LAST: tl.constexpr):
    """Which of the ``LAST`` last of ``count`` programs this is (0 and on), or a negative number.

    They wait for one another: what all ``count`` programs stored is visible to each of them. Only
    ``LAST`` programs wait, and only for programs that still run or have a place to start in as
    long as the GPU holds more than ``LAST`` of them: see ``waiting_programs``. Two counters, 0
    again afterwards.
    """
    tl.debug_barrier()
    ticket = tl.atomic_add(counters, 1, sem="acq_rel")
    turn = ticket - (count - LAST)
    if LAST == 1:
        if turn == 0:
            tl.store(counters, 0)
    elif turn >= 0:
        arrived = tl.atomic_add(counters, 0, sem="acquire")
        while arrived < count:
            arrived = tl.atomic_add(counters, 0, sem="acquire")
        # nobody looks any more once all have passed
        if tl.atomic_add(counters + 1, 1, sem="acq_rel") == LAST - 1:
            tl.store(counters, 0)
            tl.store(counters + 1, 0)
    return turn


@triton.jit
def last_to_arrive(counter, count):
    """True in the last of ``count`` programs to call this; what the others stored is visible then.

    The counter is 0 again afterwards.
    """
    tl.debug_barrier()
    ticket = tl.atomic_add(counter, 1, sem="acq_rel")
    last = ticket == count - 1
    if last:
        tl.store(counter, 0)
    return last
