"""Parts of a cycle as CUDA graphs: captured where switched on, run eagerly where not, and timed.

A *segment* is a function over fixed buffers that decides nothing by data and never asks the device.
Its graph is captured once a shape; a second, instrumented graph of the same kernels carries event
records between them and is replayed instead on a few cycles, to learn how the segment's time
divides. Cycles in between are timed by events around the replays only.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from engine.timing import NoTimer, Timer

#: body of a segment; it charges laps to the timer it is given
Body = Callable[[Timer], None]
#: why a segment is not a graph, where no failure stands behind it
NO_GPU = "no CUDA device"


class LapEvents:
    """Events between the parts of one segment; ``external`` ones stay readable in a graph."""

    def __init__(self, *, external: bool) -> None:
        self._external = external
        self.marks: list[tuple[str | None, Any]] = []
        self.mark(None)

    def mark(self, name: str | None) -> None:
        """Record an event here; the lap since the last one belongs to ``name``."""
        kind: Any = torch.cuda.Event
        event = kind(enable_timing=True, external=True) if self._external else kind(True)
        event.record()
        self.marks.append((name, event))

    def add_to(self, sums_ms: defaultdict[str, float]) -> None:
        """Add the laps of the last run, which has ended."""
        for (_, before), (name, event) in zip(self.marks, self.marks[1:], strict=False):
            sums_ms[str(name)] += before.elapsed_time(event)


class Segment:
    """One part of a cycle at one shape.

    ``reason`` says why it runs eagerly; None: it is captured. ``laps_reason`` says why there is no
    instrumented graph beside a captured one.
    """

    def __init__(self, name: str, body: Body, device: torch.device) -> None:
        self.name, self.body, self.device = name, body, device
        self.reason: str | None = NO_GPU
        self.laps_reason: str | None = None
        self._graph: Any = None
        self._laps_graph: Any = None
        self._laps: LapEvents | None = None
        self._laps_pending = False

    def capture(self, pool: Any, *, switched_on: bool, with_laps: bool, warm: bool = True) -> None:
        """Run once to compile and to allocate, then capture if ``switched_on``.

        A failure to capture is no failure of the run: the segment stays eager and says why. Without
        ``warm`` everything in it has run before.
        """
        if self.device.type != "cuda":
            return
        if warm:
            self.body(NoTimer())
        torch.cuda.synchronize()
        if not switched_on:
            self.reason = "switched off"
            return
        try:
            self._graph = self._captured(pool, NoTimer)
            self.reason = None
        except (RuntimeError, ValueError, TypeError) as error:
            self.reason = f"capture failed: {_short(error)}"
            torch.cuda.synchronize()
            return
        if with_laps:
            try:
                self._laps_graph = self._captured(pool, self._start_laps)
            except (RuntimeError, ValueError, TypeError) as error:
                self._laps, self.laps_reason = None, _short(error)
                torch.cuda.synchronize()

    def _captured(self, pool: Any, timer: Callable[[], Timer]) -> Any:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            # NCCL's watchdog thread queries events of its own while this thread captures
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                self.body(timer())
        finally:
            # a capture that fails leaves its own stream current
            torch.cuda.set_stream(stream)
        torch.cuda.synchronize()
        return graph

    def _start_laps(self) -> Timer:
        self._laps = LapEvents(external=True)
        return self._laps

    def run(self) -> None:
        """Replay, or run eagerly."""
        if self._graph is not None:
            self._graph.replay()
        else:
            self.body(NoTimer())

    def run_with_laps(self) -> None:
        """As ``run``, taking laps where that is possible; read them with ``read_laps``."""
        if self._laps_graph is not None:
            self._laps_graph.replay()
            self._laps_pending = True
        elif self._graph is None and self.device.type == "cuda":
            self._laps = LapEvents(external=False)
            self.body(self._laps)
            self._laps_pending = True
        else:
            self.run()

    def read_laps(self, sums_ms: defaultdict[str, float]) -> None:
        """Add the last laps taken, if any were; the device must be past them."""
        if self._laps_pending and self._laps is not None:
            try:
                self._laps.add_to(sums_ms)
            except RuntimeError as error:
                # a driver that cannot read events of a graph costs the laps, not the run
                self._laps_graph, self.laps_reason = None, _short(error)
        self._laps_pending = False


#: cycles after which special ones come again: one timed by its segments, then one with laps (in
#: every ``_LAPS_EVERY``-th period), and room for flights
_PERIOD, _TIMED, _LAPS, _LAPS_EVERY = 43, 1, 2, 2


class SegmentTimes:
    """How long segments take, from events around them on one cycle of every period.

    ``on`` False times nothing.
    """

    def __init__(self, device: torch.device, *, on: bool = True) -> None:
        self._on = on and device.type == "cuda"
        self._count = 0
        self._active = False
        self._open: Any = None
        self._marks: list[tuple[str, Any, Any]] = []
        self.num_timed = 0
        self.laps_ms: defaultdict[str, float] = defaultdict(float)

    def quiet(self) -> int:
        """How many cycles from here on are neither timed nor take laps."""
        if not self._on:
            return _PERIOD
        at = self._count % _PERIOD
        if at in (_TIMED, _LAPS):
            return 0
        return _TIMED - at if at < _TIMED else _PERIOD + _TIMED - at

    def singles(self, longest: int) -> int:
        """How many cycles from here on go singly until ``longest`` quiet ones follow."""
        if not self._on:
            return 0
        at = self._count % _PERIOD
        rest = _PERIOD + _TIMED - at
        if at > _LAPS and rest >= longest:
            return 0
        return _LAPS + 1 - at if at <= _LAPS else _PERIOD + _LAPS + 1 - at

    def start_cycles(self, count: int) -> str | None:
        """``count`` cycles begin: "timed" and "laps" say that this one is special."""
        if not self._on:
            return None
        period, at = divmod(self._count, _PERIOD)
        self._count += count
        active = count == 1 and at == _TIMED
        if self._active or active:
            event = self._event()
            if self._active:
                self._marks.append(("host_gap", self._open, event))
            self._open = event
        self.num_timed += active
        self._active = active
        if active:
            return "timed"
        return "laps" if count == 1 and at == _LAPS and period % _LAPS_EVERY == 0 else None

    def mark(self, name: str) -> None:
        """End of segment ``name``."""
        if self._active:
            event = self._event()
            self._marks.append((name, self._open, event))
            self._open = event

    def pause(self) -> None:
        """The next cycle does not follow directly: no gap is counted."""
        self._active = False

    def means_ms(self) -> dict[str, float]:
        """Mean ms per timed cycle by segment; waits for the device."""
        if not self._marks:
            return {}
        torch.cuda.synchronize()
        sums: defaultdict[str, float] = defaultdict(float)
        counts: defaultdict[str, int] = defaultdict(int)
        for name, before, after in self._marks:
            sums[name] += before.elapsed_time(after)
            counts[name] += 1
        return {name: total / counts[name] for name, total in sums.items()}

    @staticmethod
    def _event() -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"
