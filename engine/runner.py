"""The run loop of rank 0: admit requests to slots, cycle, retire, and sum up.

A cycle handles all running requests together; a request that ends frees its slot for the next one.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter

from engine.config import SpeculationConfig
from engine.cycle import Cycle, Seeds
from engine.draft import DraftModel
from engine.executor import Executor
from engine.results import Request, RunResult
from engine.sequence import Sequence
from engine.stream import Stream
from engine.timing import CycleTimer, EventTimer, LapTimer

#: on a GPU every n-th cycle is timed in detail
_TIMED_EVERY = 16
_BEAT_S = 1.0


class Runner:
    """Runs requests on rank 0; ``beat`` is called about once a second as a sign of life."""

    def __init__(
        self,
        executor: Executor,
        draft_model: DraftModel | None,
        *,
        slots: int,
        eos_ids: tuple[int, ...],
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self.executor, self.draft_model = executor, draft_model
        self.slots, self.eos_ids, self.beat = slots, eos_ids, beat
        resident = executor.resident
        if resident is not None:
            self.seeds = resident.seeds
        else:
            self.seeds = None if draft_model is None else Seeds(draft_model, slots + 1)

    def run(
        self,
        requests: list[Request],
        speculation: SpeculationConfig,
        *,
        concurrency: int,
        margins: bool = False,
        timed: bool = True,
    ) -> RunResult:
        """Run all requests, at most ``concurrency`` at once.

        ``timed`` False measures no parts of resident cycles. Raises ``EngineError`` (crash) when
        logits are not numbers.
        """
        on_cpu = self.executor.device.type == "cpu"
        timer: CycleTimer = LapTimer() if on_cpu else EventTimer(_TIMED_EVERY)
        cycle = Cycle(
            self.executor, self.draft_model, self.seeds, speculation, timer, margins=margins
        )
        at_once = min(concurrency, self.slots)
        stepwise = self._why_stepwise(margins)
        try:
            if stepwise is None:
                assert self.executor.resident is not None
                return Stream(
                    self.executor,
                    self.executor.resident,
                    cycle,
                    requests,
                    self.eos_ids,
                    concurrency=at_once,
                    beat=_Beat(self.beat),
                    timed=timed,
                ).run()
            return replace(_Job(self, requests, cycle, at_once).run(), path=f"stepwise: {stepwise}")
        finally:
            self.executor.stop()

    def _why_stepwise(self, margins: bool) -> str | None:
        """Why these requests need the host in every cycle; None: they do not."""
        if self.executor.resident is None:
            return "device cpu"
        if margins:
            return "margins asked for"
        return None


class _Beat:
    """Passes on a sign of life at most once a second."""

    def __init__(self, beat: Callable[[], None]) -> None:
        self._beat, self._last_s = beat, perf_counter()

    def __call__(self) -> None:
        if perf_counter() - self._last_s > _BEAT_S:
            self._last_s = perf_counter()
            self._beat()


class _Job:
    """State of one run."""

    def __init__(
        self, runner: Runner, requests: list[Request], cycle: Cycle, concurrency: int
    ) -> None:
        self.runner, self.cycle, self.timer = runner, cycle, cycle.timer
        self.waiting = deque(enumerate(requests))
        self.free = list(range(concurrency))[::-1]
        self.active: list[Sequence] = []
        self.done: list[Sequence] = []
        self.decode_tokens = 0
        self.decode_wall_s = 0.0
        self.num_cycles = 0
        self._beat_s = perf_counter()

    def run(self) -> RunResult:
        while self.waiting or self.active:
            while self.waiting and self.free:
                self._admit()
            if self.active:
                self._timed_cycle()
            self._beat()
        return self._result()

    def _admit(self) -> None:
        index, request = self.waiting.popleft()
        sequence = Sequence(index, request, self.free.pop(), self.runner.eos_ids)
        self.cycle.prefill(sequence, self._beat)
        self.active.append(sequence)
        self._retire()

    def _timed_cycle(self) -> None:
        start_s = perf_counter()
        self.timer.start_cycle()
        sequences = self.active
        self.decode_tokens += self.cycle.run(sequences)
        self._retire()
        self.timer.mark("host_gap")
        self.timer.end_cycle()
        wall_s = perf_counter() - start_s
        for sequence in sequences:
            sequence.decode_s += wall_s
        self.decode_wall_s += wall_s
        self.num_cycles += 1

    def _retire(self) -> None:
        for sequence in self.active:
            if sequence.finish_reason is not None:
                self.free.append(sequence.slot)
                self.done.append(sequence)
        self.active = [s for s in self.active if s.finish_reason is None]

    def _beat(self) -> None:
        if perf_counter() - self._beat_s > _BEAT_S:
            self._beat_s = perf_counter()
            self.runner.beat()

    def _result(self) -> RunResult:
        phases_ms, num_timed = self.timer.phases_ms()
        cycle_ms = self.decode_wall_s * 1e3 / max(self.num_cycles, 1)
        if num_timed < self.num_cycles and phases_ms:
            # timed on a sample of the cycles: scaled to the mean of all
            scale = cycle_ms / max(sum(phases_ms.values()), 1e-9)
            phases_ms = {name: ms * scale for name, ms in phases_ms.items()}
        return RunResult(
            requests=tuple(s.result() for s in sorted(self.done, key=lambda s: s.index)),
            counters=self.cycle.tally.counters(),
            decode_wall_s=self.decode_wall_s,
            decode_tokens=self.decode_tokens,
            num_cycles=self.num_cycles,
            cycle_ms=cycle_ms,
            phases_ms=phases_ms,
            num_timed_cycles=num_timed,
        )
