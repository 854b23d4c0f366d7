"""Where a cycle's time goes: laps between marks, so that the phases sum to the cycle.

``mark(name)`` charges the time since the previous mark to ``name``. On a CPU a lap costs about
0.1 us and every cycle is timed; on a GPU marks are CUDA events, recorded on every n-th cycle only
and read after the run, so that timing neither syncs nor slows the stream.
"""

from collections import defaultdict
from collections.abc import Mapping
from time import perf_counter
from typing import Protocol

import torch


class Timer(Protocol):
    """What the engine's forward functions see."""

    def mark(self, name: str) -> None:
        """Charge the time since the last mark to ``name``."""


class CycleTimer(Timer, Protocol):
    """What the run loop sees."""

    def start_cycle(self) -> None:
        """Laps start here."""

    def end_cycle(self) -> None:
        """Close the cycle; all its laps have been marked."""

    def phases_ms(self) -> tuple[Mapping[str, float], int]:
        """Mean ms per cycle by phase, and the number of cycles it comes from."""


class NoTimer:
    """For forwards outside of cycles (prefill)."""

    def mark(self, name: str) -> None:
        """Nothing."""


class LapTimer:
    """CPU: wall clock, every cycle."""

    def __init__(self) -> None:
        self._sums_s: defaultdict[str, float] = defaultdict(float)
        self._last_s = 0.0
        self._num_cycles = 0

    def mark(self, name: str) -> None:
        """Charge the lap to ``name``."""
        now_s = perf_counter()
        self._sums_s[name] += now_s - self._last_s
        self._last_s = now_s

    def start_cycle(self) -> None:
        """Laps start here."""
        self._last_s = perf_counter()

    def end_cycle(self) -> None:
        """Count it."""
        self._num_cycles += 1

    def phases_ms(self) -> tuple[Mapping[str, float], int]:
        """Mean ms per cycle by phase."""
        count = max(self._num_cycles, 1)
        return {name: s * 1e3 / count for name, s in self._sums_s.items()}, self._num_cycles


class EventTimer:
    """GPU: CUDA events on the compute stream, every ``every``-th cycle.

    A lap is time on the GPU's own clock, idle gaps included, so a host-bound phase shows as long
    as it really is.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._num_seen = 0
        self._active = False
        self._marks: list[tuple[str | None, torch.cuda.Event]] = []
        self._num_cycles = 0

    def mark(self, name: str | None) -> None:
        """Record an event; its lap is read after the run."""
        if not self._active:
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._marks.append((name, event))

    def start_cycle(self) -> None:
        """Decide whether this cycle is timed."""
        self._active = self._num_seen % self._every == 0
        self._num_seen += 1
        self.mark(None)

    def end_cycle(self) -> None:
        """Count it if it was timed."""
        self._num_cycles += self._active
        self._active = False

    def phases_ms(self) -> tuple[Mapping[str, float], int]:
        """Read the events (waits for the GPU); mean ms per timed cycle by phase."""
        torch.cuda.synchronize()
        sums_ms: defaultdict[str, float] = defaultdict(float)
        for (_, before), (name, event) in zip(self._marks, self._marks[1:], strict=False):
            if name is not None:
                sums_ms[name] += before.elapsed_time(event)
        count = max(self._num_cycles, 1)
        return {name: ms / count for name, ms in sums_ms.items()}, self._num_cycles
