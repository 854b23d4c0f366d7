"""A one-shot all-reduce for CPU ranks over shared memory, and the host-side message channel.

Every rank writes its part to its own place and announces it by a sequence number; everybody then
reads all parts and adds them in rank order, so all ranks hold identical bits. Two buffers
alternate: a rank may overwrite the buffer of operation n - 2 as soon as all ranks have announced
n - 1, because they announce n - 1 only after they have finished n - 2.

The memory is anonymous (memfd, inherited by file descriptor): nothing is left behind, however the
processes end. Announcing by plain stores needs the total store order of x86.
"""

import mmap
import os
import platform
import time

import torch

from engine.errors import invalid
from engine.shared_region import FLAG_BYTES, PART_BYTES, region_bytes

#: spins before giving up the core to others, a few microseconds' worth
_SPINS = 200
#: yields before sleeping between looks
_YIELDS = 2000
_SLEEP_S = 50e-6


def check_platform() -> None:
    """Raise where plain stores may be seen out of order."""
    machine = platform.machine()
    if machine not in ("x86_64", "AMD64"):
        raise invalid(
            f"collectives.backend 'one_shot' needs an x86-64 processor (store order), this is "
            f"{machine!r}; use gloo"
        )


class SharedMemoryGroup:
    """All ranks of one host; every method is a collective that all ranks call in the same order."""

    def __init__(self, fd: int, rank: int, tp: int, timeout_s: float) -> None:
        self.rank, self.tp, self._timeout_s = rank, tp, timeout_s
        self._map = mmap.mmap(fd, region_bytes(tp))
        # one flag a cache line
        self._flags = memoryview(self._map)[:FLAG_BYTES].cast("q")
        flat = torch.frombuffer(self._map, dtype=torch.uint8, offset=FLAG_BYTES)
        self._bytes = flat.view(2, tp, PART_BYTES)
        self._views: dict[torch.dtype, torch.Tensor] = {}
        self._sequence = 0
        self._others = [r * 8 for r in range(tp) if r != rank]

    def all_reduce(self, x: torch.Tensor) -> None:
        """Sum ``x`` (contiguous) over ranks in place; bf16 and fp16 add in fp32."""
        flat = x.view(-1)
        limit = PART_BYTES // x.element_size()
        for start in range(0, flat.numel(), limit):
            self._all_reduce_part(flat[start : start + limit])

    def _all_reduce_part(self, x: torch.Tensor) -> None:
        parts = self._begin(x.dtype, x.numel())
        parts[self.rank].copy_(x)
        self._announce()
        self._wait(self._sequence)
        if self.tp == 2 and x.dtype == torch.float32:
            torch.add(parts[0], parts[1], out=x)
        elif x.dtype == torch.float32:
            torch.sum(parts, 0, out=x)
        else:
            x.copy_(parts.sum(0, dtype=torch.float32))

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        """Rank 0 gets all parts, stacked; the others None. All ranks pass equal shapes."""
        flat = x.reshape(-1)
        limit = PART_BYTES // x.element_size()
        out = torch.empty(self.tp, flat.numel(), dtype=x.dtype) if self.rank == 0 else None
        for start in range(0, flat.numel(), limit):
            piece = flat[start : start + limit]
            parts = self._begin(x.dtype, piece.numel())
            parts[self.rank].copy_(piece)
            self._announce()
            if out is not None:
                self._wait(self._sequence)
                out[:, start : start + limit] = parts
        return None if out is None else out.view(self.tp, *x.shape)

    def broadcast(self, x: torch.Tensor) -> None:
        """Copy rank 0's ``x`` (contiguous) to all ranks in place."""
        flat = x.view(-1)
        limit = PART_BYTES // x.element_size()
        for start in range(0, flat.numel(), limit):
            piece = flat[start : start + limit]
            parts = self._begin(x.dtype, piece.numel())
            if self.rank == 0:
                parts[0].copy_(piece)
                self._announce()
            else:
                self._wait_for(0, self._sequence)
                piece.copy_(parts[0])
                self._announce()

    def _begin(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        self._wait(self._sequence)
        self._sequence += 1
        typed = self._views.get(dtype)
        if typed is None:
            typed = self._views[dtype] = self._bytes.view(dtype)
        return typed[self._sequence & 1, :, :count]

    def _announce(self) -> None:
        self._flags[self.rank * 8] = self._sequence

    def _wait(self, sequence: int) -> None:
        flags = self._flags
        for place in self._others:
            if flags[place] < sequence:
                self._wait_at(place, sequence)

    def _wait_for(self, rank: int, sequence: int) -> None:
        if self._flags[rank * 8] < sequence:
            self._wait_at(rank * 8, sequence)

    def _wait_at(self, place: int, sequence: int) -> None:
        flags = self._flags
        for _ in range(_SPINS):
            if flags[place] >= sequence:
                return
        for _ in range(_YIELDS):
            if flags[place] >= sequence:
                return
            os.sched_yield()
        deadline_s = time.monotonic() + self._timeout_s
        while flags[place] < sequence:
            time.sleep(_SLEEP_S)
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"rank {place // 8} did not arrive within {self._timeout_s:g} s")
