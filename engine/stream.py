# ruff: noqa: N815 - fields are tensors with shape suffixes
"""The run loop of resident cycles on rank 0: queue cycles ahead, read reports behind.

Prefills of all waiting requests are queued first and their tokens read afterwards. Then the device
is kept some cycles ahead of the host, which reads reports when they have arrived and delivers their
tokens; where no request can end early or leave its place to another, cycles go in flights of
several. A request that turns out to have ended leaves the batch with the next cycle queued; what
the device still does for it is dropped. Admission waits for an empty queue, so that prefills are
not counted as decoding.
"""

import struct
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from time import perf_counter
from typing import Any

import torch

from engine.bodies import longest_path
from engine.cycle import Cycle
from engine.errors import EngineError
from engine.executor import Executor
from engine.graphs import SegmentTimes
from engine.prefill import chunks_of
from engine.resident import FLIGHT, Resident, bucket
from engine.resident_orders import (
    prefill_order,
    prepare_order,
    prepare_prefill_order,
    run_order,
    start_order,
)
from engine.results import Request, RunResult
from engine.sequence import Sequence

#: single cycles that are queued ahead of what has been read
_AHEAD = 3
#: flights beside the one that runs: other ranks hear of theirs later, and single cycles are short
_FLIGHTS_AHEAD = 2
#: cycles from which on a new batch size is worth its segments
_WORTH_BUILDING = 64
#: cycles in one order to the other ranks
_LONGEST_ORDER = 16


@dataclass(frozen=True, slots=True)
class _Pending:
    """Queued cycles whose reports have not been read."""

    rows: tuple[Sequence, ...]
    report_KBX: torch.Tensor
    arrived: Any

    @property
    def num_cycles(self) -> int:
        return self.report_KBX.shape[0]

    def has_arrived(self) -> bool:
        return self.arrived is not None and bool(self.arrived.query())


class Stream:
    """One run of resident cycles. ``timed``: measure the parts of some cycles."""

    def __init__(
        self,
        executor: Executor,
        resident: Resident,
        cycle: Cycle,
        requests: list[Request],
        eos_ids: tuple[int, ...],
        *,
        concurrency: int,
        beat: Callable[[], None],
        timed: bool = True,
    ) -> None:
        self.executor, self.resident, self.tally = executor, resident, cycle.tally
        self.speculation, self.eos_ids, self.beat = cycle.speculation, eos_ids, beat
        self.waiting = deque(enumerate(requests))
        #: whether any token is drawn: then all rows say how theirs are
        self.sampled = any(request.temperature > 0 for request in requests)
        self.free = list(range(concurrency))[::-1]
        #: what the device's rows are, and what they should become with the next cycle
        self.rows: tuple[Sequence, ...] = ()
        self.active: list[Sequence] = []
        self.done: list[Sequence] = []
        self.queue: deque[_Pending] = deque()
        self.num_queued = 0
        self.times = SegmentTimes(resident.device, on=timed)
        self.decode_tokens = self.num_cycles = 0
        self.decode_wall_s = self._since_s = 0.0
        self._on_gpu = resident.device.type == "cuda"
        #: host buffers to use again: pinning memory takes longer than a cycle
        self._pinned: defaultdict[torch.Size, list[torch.Tensor]] = defaultdict(list)
        #: batch sizes that cycles have run at
        self._used: set[int] = set()
        self._longest = longest_path(self.speculation)

    def run(self) -> RunResult:
        """Everything, to the last token."""
        self.executor.order_resident(start_order(self.speculation, self.sampled))
        self.resident.start(self.speculation, sampled=self.sampled)
        while self.waiting or self.active:
            if self.waiting and self.free:
                self._drain()
                self._admit()
            elif (count := self._wanted()) > 0:
                self._issue(count)
            else:
                self._read()
            while self.queue and self.queue[0].has_arrived():
                self._read()
        return self._result()

    def _admit(self) -> None:
        """Prefill into all free slots, then start the clock."""
        while self.waiting and self.free:
            queued = []
            while self.waiting and self.free:
                index, request = self.waiting.popleft()
                sequence = Sequence(index, request, self.free.pop(), self.eos_ids)
                queued.append((sequence, self._queue_prefill(sequence)))
            for sequence, token in queued:
                self._first_token(sequence, token)
            self._retire()
        self._start_clock()

    def _queue_prefill(self, sequence: Sequence) -> _Pending:
        resident = self.resident
        drafts = self.speculation.method != "off"
        for chunk in chunks_of(sequence.request.prompt_ids, sequence.slot):
            length = resident.prefill.length_of(chunk)
            if not resident.prefill.prepared(length, chunk.last, drafts, self.sampled):
                self.executor.order_resident(prepare_prefill_order(length, chunk.last))
                resident.prepare_prefill(length, chunk.last)
            values = chunk.values(length, self._drawn(sequence))
            self.executor.order_resident(prefill_order(values, chunk.last))
            resident.prefill_chunk(values, chunk.last)
            self.beat()
        return self._copied((sequence,), resident.prefill.token_1.view(1, 1, 1))

    def _drawn(self, sequence: Sequence | None) -> list[int]:
        """Temperature (the bits of fp32) and seed of a row where any is drawn; None: padding."""
        if not self.sampled:
            return []
        if sequence is None:
            return [0, 0]
        request = sequence.request
        (bits,) = struct.unpack("<i", struct.pack("<f", request.temperature))
        return [bits, request.seed % 2**63]

    def _first_token(self, sequence: Sequence, token: _Pending) -> None:
        (((value,),),) = self._values(token)
        if value < 0:
            raise self._not_numbers("the prefill", sequence)
        sequence.prefix = len(sequence.request.prompt_ids)
        sequence.emit([value])
        self.active.append(sequence)
        self.beat()

    def _start_clock(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()
        self.times.pause()
        self._since_s = perf_counter()

    def _wanted(self) -> int:
        """Cycles to queue now; 0: read first.

        Cycles beyond the longest need are not queued, as far as the tokens a cycle has delivered so
        far tell; those beyond the least need may turn out idle.
        """
        if not self.active:
            return 0
        queued = self.num_queued
        left = [s.request.max_new_tokens - len(s.tokens) for s in self.active]
        most = ceil(max(left) / self._tokens_per_cycle()) - queued
        if most <= 0:
            return 0
        # cycles within which no request ends that another one waits for
        needed = min(left) if self.waiting else max(left)
        safe = needed // self._longest - queued
        if any(not s.request.ignore_eos for s in self.active):
            safe = min(safe, _AHEAD)
        if safe >= FLIGHT:
            if queued > _FLIGHTS_AHEAD * FLIGHT:
                return 0
            # cycles that are measured go singly, in one order
            return min(self.times.singles(FLIGHT), safe) or FLIGHT
        if queued >= _AHEAD:
            return 0
        if self.executor.group.tp == 1:
            return 1
        # an order is worth its broadcast
        return max(1, min(safe, _LONGEST_ORDER, most))

    def _batch_size(self) -> int:
        """Rows that the next cycles run at.

        Building segments of a new size takes as long as many cycles. The tail of a run, when its
        last requests end one by one, is not worth that: it goes on at a size already used.
        """
        exact = bucket(len(self.active))
        if self.waiting or self.resident.prepared(exact):
            return exact
        left = max(s.request.max_new_tokens - len(s.tokens) for s in self.active)
        if left / self._tokens_per_cycle() >= _WORTH_BUILDING:
            return exact
        return min((rows for rows in self._used if rows > exact), default=exact)

    def _tokens_per_cycle(self) -> float:
        """Mean so far over the running requests; at first the least there can be."""
        if self.speculation.method == "off":
            return 1.0
        verifies = sum(len(s.tokens_per_verify) for s in self.active)
        tokens = sum(sum(s.tokens_per_verify) for s in self.active)
        return tokens / verifies if verifies else 1.0

    def _issue(self, count: int) -> None:
        """Queue ``count`` cycles on every rank."""
        num_rows = self._batch_size()
        if not self.resident.prepared(num_rows):
            self._drain()
            if not self.active:
                return
            num_rows = self._batch_size()
        if not self.resident.prepared(num_rows):
            self.executor.order_resident(prepare_order(num_rows))
            self.resident.prepare(num_rows)
            self.beat()
            self._start_clock()
        plan_XB = self._plan(num_rows)
        self.executor.order_resident(run_order(num_rows, count, plan_XB))
        if plan_XB is not None:
            self.resident.arrange(plan_XB)
        self._used.add(num_rows)
        flies = self.resident.flies(num_rows)
        while count > 0:
            if flies and count >= FLIGHT and self.times.quiet() >= FLIGHT:
                record_KBX = self.resident.fly(num_rows, self.times)
            else:
                record_KBX = self.resident.cycle(num_rows, self.times)
            self.queue.append(self._copied(self.rows, record_KBX))
            self.num_queued += len(record_KBX)
            count -= len(record_KBX)

    def _plan(self, num_rows: int) -> torch.Tensor | None:
        """How the device's rows become ``active``; None when they are already."""
        wanted = tuple(self.active)
        if wanted == self.rows:
            return None
        before = {id(s): row for row, s in enumerate(self.rows)}
        padding = [-1, self.resident.slots, 0, 0, 0, *self._drawn(None)]
        columns = []
        for s in wanted:
            if id(s) in before:
                columns.append([before[id(s)], 0, 0, 0, 0, *self._drawn(None)])
            else:
                left = s.request.max_new_tokens - len(s.tokens)
                columns.append([-1, s.slot, s.last, s.prefix, left, *self._drawn(s)])
        columns += [padding] * (num_rows - len(columns))
        self.rows = wanted
        return torch.tensor(columns).T.contiguous()

    def _copied(self, rows: tuple[Sequence, ...], record_KBX: torch.Tensor) -> _Pending:
        """Queue a copy of a report to the host."""
        if not self._on_gpu:
            return _Pending(rows, record_KBX.clone(), None)
        spare = self._pinned[record_KBX.shape]
        if spare:
            report_KBX = spare.pop()
        else:
            report_KBX = torch.empty(record_KBX.shape, dtype=torch.int64, pin_memory=True)
        report_KBX.copy_(record_KBX, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return _Pending(rows, report_KBX, event)

    def _values(self, pending: _Pending) -> list[list[list[int]]]:
        """Wait for a report; its buffer is free again."""
        if pending.arrived is not None:
            pending.arrived.synchronize()
        values: list[list[list[int]]] = pending.report_KBX[:, : len(pending.rows)].tolist()
        if pending.arrived is not None:
            self._pinned[pending.report_KBX.shape].append(pending.report_KBX)
        return values

    def _drain(self) -> None:
        while self.queue:
            self._read()

    def _read(self) -> None:
        """Wait for the oldest reports and deliver their tokens."""
        pending = self.queue.popleft()
        reports = self._values(pending)
        self.num_queued -= pending.num_cycles
        now_s = perf_counter()
        wall_s, self._since_s = now_s - self._since_s, now_s
        self.decode_wall_s += wall_s
        for report in reports:
            running = False
            for sequence, values in zip(pending.rows, report, strict=True):
                if sequence.finish_reason is None:
                    running = True
                    sequence.decode_s += wall_s / len(reports)
                    self._deliver(sequence, values)
            self.num_cycles += running
        self._retire()
        self.beat()

    def _deliver(self, sequence: Sequence, values: list[int]) -> None:
        if self.speculation.method == "off":
            emitted = values
        else:
            count, token = values[:2]
            longest = self._longest
            self.tally.add(values[longest + 1 : longest + 1 + count])
            sequence.tokens_per_verify.append(count + 1)
            emitted = [*values[2 : 2 + count], token]
        if emitted[-1] < 0:
            raise self._not_numbers(f"cycle {self.num_cycles}", sequence)
        sequence.prefix += len(emitted)
        self.decode_tokens += sequence.emit(emitted)

    @staticmethod
    def _not_numbers(where: str, sequence: Sequence) -> EngineError:
        return EngineError(
            "crash",
            "generate",
            f"NaN or infinite logits at {where} (request {sequence.index}): "
            "the weights or the prompt overflow this dtype",
        )

    def _retire(self) -> None:
        for sequence in self.active:
            if sequence.finish_reason is not None:
                self.free.append(sequence.slot)
                self.done.append(sequence)
        self.active = [s for s in self.active if s.finish_reason is None]

    def _result(self) -> RunResult:
        # cycles queued for requests that had ended
        self.queue.clear()
        self.resident.finish_laps(self.times)
        means_ms = self.times.means_ms()
        cycle_ms = self.decode_wall_s * 1e3 / max(self.num_cycles, 1)
        return RunResult(
            requests=tuple(s.result() for s in sorted(self.done, key=lambda s: s.index)),
            counters=self.tally.counters(),
            decode_wall_s=self.decode_wall_s,
            decode_tokens=self.decode_tokens,
            num_cycles=self.num_cycles,
            cycle_ms=cycle_ms,
            phases_ms=_phases(means_ms, dict(self.times.laps_ms), cycle_ms),
            num_timed_cycles=self.times.num_timed,
            path="resident",
            graphs=self.resident.report(),
            segments_ms=means_ms,
            distinct_experts=self.resident.distinct_experts(max(self._used, default=1)),
        )


def _phases(
    means_ms: dict[str, float], laps_ms: dict[str, float], cycle_ms: float
) -> dict[str, float]:
    """Segment times split by the laps' shares, scaled so that they sum to the cycle."""
    phases = dict(means_ms)
    for whole in ("decode", "verify"):
        inside = {
            name: ms for name, ms in laps_ms.items() if name == "sample" or name.startswith(whole)
        }
        if whole in phases and sum(inside.values()) > 0:
            segment_ms, total = phases.pop(whole), sum(inside.values())
            for name, ms in inside.items():
                phases[name] = segment_ms * ms / total
        elif whole in phases:
            phases[f"{whole}.other"] = phases.pop(whole)
    scale = cycle_ms / total if (total := sum(phases.values())) > 0 else 1.0
    return {name: ms * scale for name, ms in phases.items()}
