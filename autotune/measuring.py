"""Takes repeats on a backend and commits each as it is taken.

A ``Bench`` holds the backend's open group. Failures are values: they end the trial, not the loop.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autotune.backends.base import Backend, BackendFailure, Group
from autotune.records import Failure, Measurement
from autotune.schemas import Measure
from autotune.statistics import summarise
from autotune.store.store import Store
from autotune.store.views import RepeatView, TrialView
from model.spec import Knobs, Workload

#: failures that one more try may get past
_PASSING = ("crash", "hang", "unhealthy_host")
#: how many of them two arms in turns may get past: they take many repeats, and without them
#: nothing can be compared
_ARM_RETRIES = 3
#: relative distance below the best at which a trial needs no more repeats
_HOPELESS = 0.15
#: pairs without which two arms have no interval
_LEAST_PAIRS = 2


def _never() -> bool:
    """Time without a limit."""
    return False


class StopRequestedError(Exception):
    """Somebody asked the study to stop; raised between repeats, never inside one."""


@dataclass
class Bench:
    """A backend at work for one study."""

    backend: Backend
    store: Store
    study_id: int
    workloads: Mapping[int, Workload]
    measure: Measure
    #: raises ``StopRequestedError`` when the study should stop
    check_stop: Callable[[], None]
    #: told every repeat as soon as it is stored
    on_repeat: Callable[[TrialView, Measurement], None]
    #: (knobs id, concurrency) -> repeats taken so far in the study
    num_taken: dict[tuple[str, int], int]
    open_group: Group | None = None
    #: seconds that starts and repeats took in this session
    open_s: float = 0.0
    num_opens: int = 0
    #: concurrency -> seconds on this machine's clock that each repeat of this session took; what a
    #: repeat says of itself may be simulated time
    seconds: dict[int, list[float]] = field(default_factory=dict)

    def repeat_s(self, level: int) -> float | None:
        """Mean seconds of a repeat at a level in this session; None before the first."""
        taken = self.seconds.get(level)
        return sum(taken) / len(taken) if taken else None

    def start_s(self) -> float | None:
        """Mean seconds of a start in this session; None before the first."""
        return self.open_s / self.num_opens if self.num_opens else None

    def ensure_open(self, knobs: Knobs) -> Failure | None:
        """Open the group of ``knobs`` unless it is open; what went wrong, or None."""
        group = self.backend.group(knobs)
        if group == self.open_group:
            return None
        self.check_stop()
        self.store.add_event(self.study_id, "open", {"group": group.id, "label": group.label()})
        started = time.monotonic()
        self.open_group = None
        try:
            self.backend.open(group)
        except BackendFailure as error:
            return error.failure
        self.open_group = group
        self.open_s += time.monotonic() - started
        self.num_opens += 1
        return None

    def run_trial(
        self,
        trial: TrialView,
        best: Mapping[int, float],
        done: tuple[RepeatView, ...] = (),
        out_of_time: Callable[[], bool] = _never,
    ) -> Failure | None:
        """Repeat at every level until the intervals are tight or the repeats are used up.

        ``best``: concurrency -> tok/s to beat; a trial far below it stops at ``min_repeats``.
        ``done``: repeats that are stored already (of a worker that died). ``out_of_time`` ends the
        trial once every level has a repeat. None means success.
        """
        failure = self.ensure_open(trial.knobs)
        if failure is not None:
            return failure
        series = _Series.of(self.workloads, done)
        tries_left = 1
        while True:
            level = series.next_level(self.measure.max_repeats)
            if level is None or self._settled(series, best):
                break
            if series.fewest(self.workloads) > 0 and out_of_time():
                break
            failure = self._repeat(trial, level, series)
            if failure is not None and (failure.kind not in _PASSING or tries_left == 0):
                return failure
            tries_left -= failure is not None
        self.store.set_provenance(trial.id, self.backend.provenance())
        return None

    def run_arms(
        self,
        first: TrialView,
        second: TrialView,
        num_pairs: int,
        done: Mapping[int, tuple[RepeatView, ...]],
        levels: Sequence[int] | None = None,
        out_of_time: Callable[[], bool] = _never,
    ) -> tuple[Failure | None, Failure | None]:
        """Measure two arms in turns (ABBA), ``num_pairs`` repeats each at ``levels`` (None: all).

        Arms that need different groups are visited A B A, half of A's repeats on either side, so
        that a linear drift still cancels. ``out_of_time`` ends it once there are pairs enough for
        an interval. Returns the failure of each arm.
        """
        arms = (first, second)
        series = [_Series.of(self.workloads, done.get(arm.id, ())) for arm in arms]
        together = self.backend.group(first.knobs) == self.backend.group(second.knobs)
        order = _abba(num_pairs) if together else _aba(num_pairs)
        tries_left = _ARM_RETRIES
        asked = levels or tuple(self.workloads)
        for index, round_number in order:
            if min(one.fewest(asked) for one in series) >= _LEAST_PAIRS and out_of_time():
                break
            for level in asked:
                if series[index].valid(level) > round_number:
                    continue
                while True:
                    failure = self.ensure_open(arms[index].knobs)
                    failure = failure or self._repeat(arms[index], level, series[index])
                    if failure is None:
                        break
                    if failure.kind not in _PASSING or tries_left == 0:
                        return (failure, None) if index == 0 else (None, failure)
                    tries_left -= 1
        # provenance of the group that is open now; the other arm's was set when it was measured
        for arm in arms:
            if self.backend.group(arm.knobs) == self.open_group:
                self.store.set_provenance(arm.id, self.backend.provenance())
        return None, None

    def take(self, trial: TrialView, level: int, number: int) -> Measurement:
        """Measure repeat ``number`` of a trial in the open group, and store it.

        Raises ``StopRequestedError`` before it begins.
        """
        self.check_stop()
        # the backend counts repeats of these knobs over all trials, so that none is served twice
        key = (trial.knobs.id, level)
        index = self.num_taken.get(key, 0)
        started = time.monotonic()
        taken = self.backend.measure(trial.knobs, self.workloads[level], index)
        self.num_taken[key] = index + 1
        placed = taken.model_copy(update={"trial": trial.number, "repeat": number})
        stored = self.store.add_measurement(self.study_id, trial.id, placed)
        self.on_repeat(trial, stored)
        self.seconds.setdefault(level, []).append(time.monotonic() - started)
        return stored

    def _repeat(self, trial: TrialView, level: int, series: "_Series") -> Failure | None:
        stored = self.take(trial, level, series.next_number(level))
        series.add(level, None if stored.failure is not None else stored.tokens_per_s)
        return stored.failure

    def _settled(self, series: "_Series", best: Mapping[int, float]) -> bool:
        """Every level has its repeats and a tight interval, or the trial can't win anywhere."""
        if any(series.valid(level) < self.measure.min_repeats for level in self.workloads):
            return False
        summaries = {level: summarise(series.values[level]) for level in self.workloads}
        hopeless = all(
            level in best and summary.median < best[level] * (1 - _HOPELESS)
            for level, summary in summaries.items()
        )
        return hopeless or all(
            summary.rel_half_width <= self.measure.target_rel_ci for summary in summaries.values()
        )


class _Series:
    """Repeats of one trial by level."""

    def __init__(self, levels: Mapping[int, Workload]) -> None:
        self.values: dict[int, list[float]] = {level: [] for level in levels}
        self._taken: dict[int, int] = dict.fromkeys(levels, 0)

    @classmethod
    def of(cls, levels: Mapping[int, Workload], done: tuple[RepeatView, ...]) -> "_Series":
        series = cls(levels)
        for repeat in done:
            if repeat.repeat >= 0 and repeat.concurrency in series.values:
                value = repeat.tokens_per_s if repeat.failure_kind is None else None
                series.add(repeat.concurrency, value)
        return series

    def add(self, level: int, value: float | None) -> None:
        self._taken[level] += 1
        if value is not None and math.isfinite(value) and value > 0:
            self.values[level].append(value)

    def valid(self, level: int) -> int:
        return len(self.values[level])

    def fewest(self, levels: Iterable[int]) -> int:
        """Valid repeats of the level that has the fewest."""
        return min(self.valid(level) for level in levels)

    def next_number(self, level: int) -> int:
        return self._taken[level]

    def next_level(self, max_repeats: int) -> int | None:
        """The level with the fewest repeats, None when all are used up."""
        level = min(self._taken, key=lambda item: (self._taken[item], item))
        return level if self._taken[level] < max_repeats else None


def _abba(num_pairs: int) -> Iterator[tuple[int, int]]:
    """(arm, round) in the order A B B A A B B A ..."""
    for round_number in range(num_pairs):
        first = round_number % 2
        yield first, round_number
        yield 1 - first, round_number


def _aba(num_pairs: int) -> Iterator[tuple[int, int]]:
    """(arm, round): half of A, all of B, the rest of A."""
    half = (num_pairs + 1) // 2
    yield from ((0, number) for number in range(half))
    yield from ((1, number) for number in range(num_pairs))
    yield from ((0, number) for number in range(half, num_pairs))
